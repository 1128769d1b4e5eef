//! The notice of a usage limit: where an agent shows it on its screen, and how it records it in its file of the
//! conversation. The words alone are no notice, because a conversation can contain them: they count in the agent's own
//! elements of the screen, or if the agent's record of the last turn says the same.

use serde_json::Value;

use crate::{
    agent::Kind,
    stance::{is_composer, is_finished, is_rule},
};

/// How claude's notices begin.
const HITS: [&str; 5] = [
    "You've hit your",
    "You've reached your",
    "You're out of usage credits",
    "You're out of extra usage",
    "Your org is out of usage",
];
/// In notices of earlier versions, after the name of the limit.
const HIT_BEFORE: &str = "limit reached";
/// Below claude's composer, while it waits for the end of the limit.
const FOOTER: &str = "⚠ Usage limit reached";
const CONTINUES: &str = "Continuing ";
/// Beginnings of claude's own remarks about the limit, after their mark.
const REMARKS: [&str; 2] = ["Usage limit", "Automatic continue"];
/// Before the answer of a tool, and before an error of claude.
const RESULT: &str = "  ⎿";
/// Further lines of such an element, and hints of claude at the right edge.
const INDENTED: &str = "     ";
/// Before an error of codex, in the first column.
const CODEX_ERROR: &str = "■ ";
/// Lines at the end of the screen in which a described agent shows its notice.
const DESCRIBED_LINES: usize = 10;

/// A notice on the screen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    pub text: String,
    /// The output of a tool could look the same: the agent's record decides.
    pub needs_record: bool,
    pub continues_itself: bool,
}

/// What the agent recorded of its last turn: it ended at the limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    pub text: String,
    /// Seconds since 1970.
    pub resets_at: Option<i64>,
}

/// The notice at the end of the conversation on the screen. `described`: the beginning of the notice of an agent that the
/// user described.
pub fn on_screen(kind: Kind, lines: &[String], described: Option<&str>) -> Option<Notice> {
    match kind {
        Kind::Claude => by_claude(lines),
        Kind::Codex => by_codex(lines),
        Kind::Described => by_description(lines, described?),
        Kind::Shell | Kind::Other | Kind::NotInteractive => None,
    }
}

fn by_claude(lines: &[String]) -> Option<Notice> {
    let shown: Vec<&str> = lines.iter().map(String::as_str).filter(|line| !line.trim().is_empty()).collect();
    let composer = (0..shown.len()).rev().find(|at| is_composer(&shown, *at))?;
    let below = &shown[composer + 1..];
    let footer = below.iter().position(|line| is_rule(line)).map_or(&[][..], |rule| &below[rule + 1..]);
    let waits = footer.iter().position(|line| line.trim_start().starts_with(FOOTER));
    if let Some(at) = waits {
        let continues_itself = footer[at..].iter().any(|line| line.trim_start().starts_with(CONTINUES));
        let text = footer[at].trim().trim_start_matches('⚠').trim().to_owned();
        return Some(Notice { text, needs_record: false, continues_itself });
    }
    // The last element above the composer, apart from claude's own remarks.
    let mut after: Vec<&str> = Vec::new();
    for line in shown[..composer - 1].iter().rev() {
        if let Some(text) = line.strip_prefix(RESULT) {
            let more = after.iter().rev().map(|line| line.trim()).take_while(|line| !line.starts_with('/'));
            let text = [text.trim()].into_iter().chain(more).collect::<Vec<_>>().join(" ").replace('’', "'");
            let is_hit = HITS.iter().any(|hit| text.starts_with(hit)) || is_earlier_form(&text);
            return is_hit.then_some(Notice { text, needs_record: true, continues_itself: false });
        }
        let remark = line.strip_prefix("● ").is_some_and(|text| REMARKS.iter().any(|known| text.starts_with(known)));
        match () {
            () if remark || is_finished(line) => after.clear(),
            () if line.starts_with(INDENTED) => after.push(line),
            // Further lines of a remark.
            () if line.starts_with("  ") => {}
            () => return None,
        }
    }
    None
}

/// `5-hour limit reached ∙ resets 3pm`
fn is_earlier_form(text: &str) -> bool {
    text.split_once(HIT_BEFORE).is_some_and(|(name, rest)| name.len() < 32 && rest.trim_start().starts_with(['∙', '·']))
}

fn by_codex(lines: &[String]) -> Option<Notice> {
    let is_blank = |line: &String| line.trim().is_empty();
    let composer = lines.iter().rposition(|line| line.starts_with('›'))?;
    let end = lines[..composer].iter().rposition(|line| !is_blank(line))?;
    let begin = lines[..end].iter().rposition(is_blank).map_or(0, |blank| blank + 1);
    let text = lines[begin..=end].iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
    let text = text.strip_prefix(CODEX_ERROR).filter(|_| lines[begin].starts_with(CODEX_ERROR))?;
    let is_hit = text.contains("usage limit");
    is_hit.then(|| Notice { text: text.to_owned(), needs_record: false, continues_itself: false })
}

fn by_description(lines: &[String], pattern: &str) -> Option<Notice> {
    let last = lines.iter().rev().map(|line| line.trim()).filter(|line| !line.is_empty()).take(DESCRIBED_LINES);
    let line = last.into_iter().find(|line| line.starts_with(pattern.trim()))?;
    Some(Notice { text: line.to_owned(), needs_record: false, continues_itself: false })
}

/// Whether the last turn in the agent's file ended at the limit. The lines are the end of the file, in its order.
pub fn recorded<'a>(kind: Kind, lines: impl DoubleEndedIterator<Item = &'a [u8]>) -> Option<Recorded> {
    let may_be =
        |line: &&[u8], words: [&str; 3]| words.iter().any(|word| memchr::memmem::find(line, word.as_bytes()).is_some());
    let mut lines = lines.rev();
    match kind {
        Kind::Claude => lines
            .filter(|line| may_be(line, ["\"assistant\"", "\"user\"", "\"user\""]))
            .filter_map(|line| serde_json::from_slice::<Value>(line).ok())
            .find(|record| {
                let is_message = matches!(record["type"].as_str(), Some("assistant" | "user"));
                is_message && record["isSidechain"] != true && record["isMeta"] != true
            })
            .and_then(|record| claude_record(&record)),
        Kind::Codex => lines
            .find(|line| may_be(line, ["\"task_complete\"", "\"turn_complete\"", "\"task_started\""]))
            .and_then(|line| codex_record(&serde_json::from_slice(line).ok()?)),
        Kind::Described | Kind::Shell | Kind::Other | Kind::NotInteractive => None,
    }
}

fn claude_record(record: &Value) -> Option<Recorded> {
    let parts = record["message"]["content"].as_array()?.iter();
    let text = parts.filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().concat().replace('’', "'");
    let is_error = record["type"] == "assistant" && record["isApiErrorMessage"] == true;
    let is_hit = record["apiError"] == "usage_limit_reached" || HITS.iter().any(|hit| text.starts_with(hit));
    let resets_at = [&record["quotaLimits"]["resetsAt"], &record["apiErrorParams"]["rate_limit_info"]["resetsAt"]];
    let resets_at = resets_at.into_iter().find_map(Value::as_i64);
    (is_error && is_hit).then_some(Recorded { text, resets_at })
}

fn codex_record(record: &Value) -> Option<Recorded> {
    let error = &record["payload"]["error"];
    let text = error["message"].as_str().unwrap_or_default().to_owned();
    let resets_at = error["resets_at"].as_i64();
    (error["codex_error_info"] == "usage_limit_exceeded").then_some(Recorded { text, resets_at })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The composer of claude, and what is below it.
    fn claude(above: &str, footer: &str) -> String {
        format!("{above}\n\n──────────\n❯ \n──────────\n{footer}")
    }

    #[test]
    fn a_notice_is_an_element_of_the_agent() {
        const HIT: &str = "You've hit your 5-hour limit · resets 3:37am (Europe/Berlin)";
        const WAITS: &str = "  ⚠ Usage limit reached · limit resets 3:37am\n    Continuing automatically at 3:37am · Esc to cancel\n  auto mode on";
        let block = format!("❯ hello\n  ⎿  {HIT}\n     /upgrade to increase your usage limit.");
        let narrow = "❯ hello\n  ⎿  You've hit your 5-hour\n     limit · resets 3:37am\n     (Europe/Berlin)\n     /upgrade to increase your";
        let remarks = "\n\n● Usage limit reached · continuing automatically at 3:37am ·\n  esc to cancel\n\n✻ Churned for 0s · done 1:38 AM\n\n● Automatic continue cancelled · /rate-limit-options to re-arm\n\n                          Automatic continue cancelled";
        let codex = "› hello there\n\n\n■ You’ve hit your usage limit. Upgrade to Pro (https://chatgpt.com/), visit https://chatgpt.com/\nsettings/usage to purchase more credits or try again at 3:37 AM.\n\n\n› Ask Codex to do anything\n\n  GPT default";
        let codex_text = "You’ve hit your usage limit. Upgrade to Pro (https://chatgpt.com/), visit https://chatgpt.com/ settings/usage to purchase more credits or try again at 3:37 AM.";
        #[rustfmt::skip]
        let table = [
            // agent        the screen                                            the notice      needs a record, continues itself
            (Kind::Claude, claude(&block, WAITS),                                Some(("Usage limit reached · limit resets 3:37am", false, true))),
            (Kind::Claude, claude(&block, "  ⚠ Usage limit reached · limit resets 3:37am"), Some(("Usage limit reached · limit resets 3:37am", false, false))),
            (Kind::Claude, claude(&block, "  auto mode on"),                     Some((HIT, true, false))),
            (Kind::Claude, claude(&format!("{block}{remarks}"), "  auto mode on"), Some((HIT, true, false))),
            (Kind::Claude, claude(narrow, "  auto mode on"),                     Some((HIT, true, false))),
            (Kind::Claude, claude("❯ hi\n  ⎿  5-hour limit reached ∙ resets 3pm\n     /upgrade", ""), Some(("5-hour limit reached ∙ resets 3pm", true, false))),
            // The same words in a conversation.
            (Kind::Claude, claude(&format!("❯ hello\n● {HIT}"), "  auto mode on"), None),
            (Kind::Claude, claude(&format!("❯ {HIT}"), "  auto mode on"),        None),
            (Kind::Claude, claude(&format!("❯ hello\n● It says:\n  {HIT}\n  ⚠ Usage limit reached · limit resets 3pm"), "  auto mode on"), None),
            (Kind::Claude, claude(&format!("● Bash(cat log)\n  ⎿  {HIT}\n\n● The log says so."), "  auto mode on"), None),
            (Kind::Claude, claude("● Bash(cat log)\n  ⎿  nothing", "  auto mode on"), None),
            (Kind::Claude, format!("{block}\n● but no composer"),                None),
            (Kind::Claude, claude("● hello", "  a status line: Usage limit reached · limit resets 3pm"), None),
            (Kind::Codex,  codex.to_owned(),                                     Some((codex_text, false, false))),
            (Kind::Codex,  codex.replace("■ ", "• "),                            None),
            (Kind::Codex,  codex.replace("■ ", "  ■ "),                          None),
            (Kind::Codex,  codex.replace("\n\n\n› Ask", "\n\n• an answer\n\n› Ask"), None),
            (Kind::Codex,  codex.replace("usage limit", "stream error"),         None),
            (Kind::Codex,  "■ You’ve hit your usage limit.".to_owned(),          None),
            (Kind::Described, "QUOTA: resets 3pm\nask>".to_owned(),              Some(("QUOTA: resets 3pm", false, false))),
            (Kind::Described, "he said QUOTA: resets 3pm\nask>".to_owned(),      None),
            (Kind::Other,  codex.to_owned(),                                     None),
        ];
        for (kind, screen, expected) in table {
            let lines: Vec<String> = screen.lines().map(|line| line.trim_end().to_owned()).collect();
            let found = on_screen(kind, &lines, Some("QUOTA:"));
            let found = found.as_ref().map(|it| (it.text.as_str(), it.needs_record, it.continues_itself));
            assert_eq!(found, expected, "{screen}");
        }
        assert_eq!(on_screen(Kind::Described, &["QUOTA: x".to_owned()], None), None);
    }

    #[test]
    fn the_last_turn_decides() {
        const HIT: &str = r#"{"type":"assistant","isApiErrorMessage":true,"error":"rate_limit","apiError":"usage_limit_reached","quotaLimits":{"resetsAt":1794969458},"message":{"content":[{"type":"text","text":"You've hit your 5-hour limit · resets 3:37am"}]}}"#;
        const SYSTEM: &str = r#"{"type":"system","subtype":"turn_duration"}"#;
        const BUSY: &str = r#"{"type":"assistant","isApiErrorMessage":true,"error":"rate_limit","message":{"content":[{"type":"text","text":"API Error: Request rejected (429)"}]}}"#;
        const SAYS: &str = r#"{"type":"assistant","message":{"content":[{"type":"text","text":"You've hit your 5-hour limit · resets 3:37am"}]}}"#;
        const TOOL: &str =
            r#"{"type":"user","message":{"content":[{"type":"tool_result","content":"You've hit your limit"}]}}"#;
        const OTHER: &str =
            r#"{"type":"assistant","isSidechain":true,"message":{"content":[{"type":"text","text":"x"}]}}"#;
        const CODEX: &str = r#"{"payload":{"type":"task_complete","error":{"message":"try again at 3:37 AM.","codex_error_info":"usage_limit_exceeded"}}}"#;
        const CODEX_DONE: &str = r#"{"payload":{"type":"task_complete","last_agent_message":"usage_limit_exceeded"}}"#;
        const CODEX_BEGAN: &str = r#"{"payload":{"type":"task_started"}}"#;
        let at = Some(Some(1_794_969_458));
        #[rustfmt::skip]
        let table = [
            (Kind::Claude, vec![TOOL, HIT],             at),
            (Kind::Claude, vec![HIT, SYSTEM, OTHER],    at),
            (Kind::Claude, vec![HIT, TOOL],             None),
            (Kind::Claude, vec![HIT, SAYS],             None),
            (Kind::Claude, vec![SAYS],                  None),
            (Kind::Claude, vec![BUSY],                  None),
            (Kind::Claude, vec!["{", ""],               None),
            (Kind::Codex,  vec![CODEX_BEGAN, CODEX],    Some(None)),
            (Kind::Codex,  vec![CODEX, CODEX_BEGAN],    None),
            (Kind::Codex,  vec![CODEX, CODEX_DONE],     None),
            (Kind::Other,  vec![HIT],                   None),
        ];
        for (kind, lines, expected) in table {
            let found = recorded(kind, lines.iter().map(|line| line.as_bytes()));
            assert_eq!(found.map(|found| found.resets_at), expected, "{lines:?}");
        }
    }
}
