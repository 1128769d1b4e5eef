//! Puts outlast in front of a server's command, or takes it away: a few splices in the text, and nothing else.

use std::ops::Range;

use super::servers::{Args, Format, How, Program, Server, Word};

/// One piece of a text gives way to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edit {
    pub at: Range<usize>,
    pub text: String,
}

/// What is to be done with one server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Change(Vec<Edit>),
    /// It is as it should be.
    Settled,
    /// Not ours to touch, and why.
    Leave(&'static str),
}

/// How outlast is called in this file, and whether what is there already means the same.
pub struct Caller<'a> {
    pub command: &'a str,
    pub is_same: &'a dyn Fn(&str) -> bool,
}

/// The options that `wrap` writes: a user who wraps a server wants it kept, also after it exits with 0.
const WRITTEN: [&str; 2] = ["--on-clean-exit", "restart"];

pub fn wrap(text: &str, format: Format, server: &Server, caller: &Caller<'_>) -> Verdict {
    let program = match starts(server) {
        Ok(program) => program,
        Err(leave) => return leave,
    };
    if is_outlast(program) {
        let is_ours = inner(program).is_some();
        return match &program.command.text {
            _ if !is_ours => Verdict::Leave("it is outlast already, in a way of its own"),
            command if command == caller.command || (caller.is_same)(command) => Verdict::Settled,
            _ => Verdict::Change(vec![Edit { at: program.command.at.clone(), text: quoted(caller.command, format) }]),
        };
    }
    if is_behind_another(program) {
        return Verdict::Leave("it is outlast already, behind another program");
    }
    let command = Edit { at: program.command.at.clone(), text: quoted(caller.command, format) };
    // A name that looks like an option is given as one word with its option.
    let name = match &server.name {
        name if name.starts_with('-') => vec![format!("--name={name}")],
        name => vec!["--name".to_owned(), name.clone()],
    };
    let words = ["mcp".to_owned()].into_iter().chain(name).chain(WRITTEN.map(str::to_owned)).chain(["--".to_owned()]);
    let words = words.map(|word| quoted(&word, format));
    if program.is_list
        && let Some(args) = &program.args
    {
        let words: Vec<String> = [command.text].into_iter().chain(words).collect();
        let comma = comma(text, program);
        let list = Args { at: args.at.clone(), words: vec![program.command.clone()] };
        return Verdict::Change(vec![before_the_first(text, &list, words.join(comma), comma)]);
    }
    // The command moves as it stands: there are several ways to quote a word, and this one is the user's.
    let words: Vec<String> = words.chain([text[program.command.at.clone()].to_owned()]).collect();
    let comma = comma(text, program);
    let words = words.join(comma);
    Verdict::Change(match &program.args {
        Some(args) => vec![command, before_the_first(text, args, words, comma)],
        None => {
            let text = format!("{}{}[{words}]", command.text, between(text, program));
            vec![Edit { text, ..command }]
        }
    })
}

/// `had_args` says whether there was a list of arguments before outlast came, where that is known.
pub fn unwrap(text: &str, server: &Server, had_args: Option<bool>) -> Verdict {
    let program = match starts(server) {
        Ok(program) => program,
        Err(leave) => return leave,
    };
    if !is_outlast(program) {
        return Verdict::Settled;
    }
    let (Some(at), Some(args)) = (inner(program), &program.args) else {
        return Verdict::Leave("it is outlast in a way of its own");
    };
    if program.is_list {
        let ours = program.command.at.start..args.words[at].at.start;
        return Verdict::Change(vec![Edit { at: ours, text: String::new() }]);
    }
    let command = Edit { at: program.command.at.clone(), text: text[args.words[at].at.clone()].to_owned() };
    let first = args.words[0].at.start;
    if let Some(next) = args.words.get(at + 1) {
        return Verdict::Change(vec![command, Edit { at: first..next.at.start, text: String::new() }]);
    }
    let is_next = program.command.at.end < args.at.start
        && text[program.command.at.end..args.at.start].starts_with(between(text, program).as_str());
    if had_args == Some(false) && is_next {
        let at = program.command.at.start..args.at.end;
        return Verdict::Change(vec![Edit { at, text: command.text }]);
    }
    let last = args.words[at].at.end;
    Verdict::Change(vec![command, Edit { at: first..last, text: String::new() }])
}

/// The options that stand between `mcp` and the command, without those that `wrap` writes: they are lost with outlast.
pub fn options(server: &Server) -> Vec<String> {
    let How::Starts(program) = &server.how else { return Vec::new() };
    let (Some(at), Some(args)) = (inner(program), &program.args) else { return Vec::new() };
    let mut words: &[Word] = &args.words[1..at - 1];
    let mut options = Vec::new();
    while let [word, rest @ ..] = words {
        let next = rest.first().map(|next| next.text.as_str());
        words = match word.text.as_str() {
            "--name" if next.is_some() => &rest[1..],
            name if name.starts_with("--name=") => rest,
            name if [Some(name), next] == WRITTEN.map(Some) => &rest[1..],
            _ => {
                options.push(word.text.clone());
                rest
            }
        };
    }
    options
}

/// The server's own command and arguments, whether or not outlast stands before it.
pub fn command_of(server: &Server) -> Option<Vec<String>> {
    let How::Starts(program) = &server.how else { return None };
    let args = program.args.iter().flat_map(|args| &args.words).map(|word| word.text.clone());
    match inner(program).filter(|_| is_outlast(program)) {
        Some(at) => Some(args.skip(at).collect()),
        None => Some([program.command.text.clone()].into_iter().chain(args).collect()),
    }
}

/// Whether outlast stands before this server, as `wrap` puts it there.
pub fn is_wrapped(server: &Server) -> bool {
    matches!(&server.how, How::Starts(program) if is_outlast(program) && inner(program).is_some())
}

pub fn apply(text: &str, edits: &[Edit]) -> String {
    let mut edits: Vec<&Edit> = edits.iter().collect();
    edits.sort_by_key(|edit| edit.at.start);
    let mut done = String::with_capacity(text.len() + 64 * edits.len());
    let mut from = 0;
    for edit in edits {
        done.push_str(&text[from..edit.at.start]);
        done.push_str(&edit.text);
        from = edit.at.end;
    }
    done.push_str(&text[from..]);
    done
}

fn starts(server: &Server) -> Result<&Program, Verdict> {
    match &server.how {
        How::Starts(program) => Ok(program),
        How::Calls => Err(Verdict::Leave("it is reached over the network")),
        How::Unclear(why) => Err(Verdict::Leave(why)),
    }
}

/// By its name, wherever it lies and whatever the system calls programs. A server may be called `outlast-notes`: such a
/// name is ours only with a version, or where it is called as `wrap` calls us.
fn is_outlast(program: &Program) -> bool {
    let name = name_of(&program.command.text);
    let is_version = |rest: &str| rest.starts_with(|letter: char| letter.is_ascii_digit());
    let is_ours = |rest: &str| is_version(rest) || inner(program).is_some();
    name == "outlast" || name.strip_prefix("outlast-").is_some_and(is_ours)
}

fn name_of(command: &str) -> String {
    let name = command.rsplit(['/', '\\']).next().unwrap_or(command).to_ascii_lowercase();
    name.strip_suffix(".exe").map(str::to_owned).unwrap_or(name)
}

/// `cmd /c outlast mcp …`, `env A=1 outlast mcp …`: somebody has done our work in another way.
fn is_behind_another(program: &Program) -> bool {
    let words: Vec<&str> = program.args.iter().flat_map(|args| &args.words).map(|word| word.text.as_str()).collect();
    let is_outlast = |name: String| name == "outlast" || name.starts_with("outlast-");
    words.windows(2).any(|pair| is_outlast(name_of(pair[0])) && pair[1] == "mcp")
}

/// Of `mcp [OPTIONS] -- CMD …`: where the command stands among the arguments.
fn inner(program: &Program) -> Option<usize> {
    let words = &program.args.as_ref()?.words;
    if words.first()?.text != "mcp" {
        return None;
    }
    let at = words.iter().position(|word| word.text == "--")? + 1;
    words.get(at).map(|_| at)
}

/// Whoever leaves no room after a colon leaves none after a comma.
fn comma(text: &str, program: &Program) -> &'static str {
    if text[program.key.clone()].ends_with(char::is_whitespace) { ", " } else { "," }
}

/// What stands between the command and arguments that come after it: a comma or a line end, and their key, written
/// as the command's own is.
fn between(text: &str, program: &Program) -> String {
    let key = &text[program.key.clone()];
    let (before, after) = key.split_at(key.rfind(program.key_name).unwrap_or_default());
    let key = format!("{before}args{}", after.strip_prefix(program.key_name).unwrap_or(after));
    if !program.is_inline {
        let newline = if text.contains("\r\n") { "\r\n" } else { "\n" };
        return format!("{newline}{key}");
    }
    let before = text[..program.key.start].trim_end_matches([' ', '\t']);
    let indented = before.ends_with('\n');
    let begin = match before {
        text if text.ends_with("\r\n") => before.len() - 2,
        text if text.ends_with('\n') => before.len() - 1,
        _ => before.len(),
    };
    // Alone in its line, and so will the other be; or else as far apart as the neighbours are.
    let space = if indented { &text[begin..program.key.start] } else { comma(text, program).trim_start_matches(',') };
    format!(",{space}{key}")
}

fn before_the_first(text: &str, args: &Args, words: String, comma: &str) -> Edit {
    let Some(first) = args.words.first() else {
        let at = args.at.start + 1;
        return Edit { at: at..at, text: words };
    };
    // Where each argument has a line, ours share one, and the first of the others keeps its own.
    let line = text[..first.at.start].rfind('\n').map_or(0, |at| at + 1);
    let is_alone = args.at.start < line && text[line..first.at.start].trim().is_empty();
    let at = first.at.start..first.at.start;
    if !is_alone {
        return Edit { at, text: format!("{words}{comma}") };
    }
    let newline = if text[..line].ends_with("\r\n") { "\r\n" } else { "\n" };
    Edit { at, text: format!("{words},{newline}{}", &text[line..first.at.start]) }
}

/// JSON's strings are TOML's, too, but for one letter.
fn quoted(word: &str, format: Format) -> String {
    let json = serde_json::to_string(word).expect("a string is always JSON");
    match format {
        Format::Json => json,
        Format::Toml => json.replace('\u{7f}', "\\u007f"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wrap::servers::read;

    fn wrapped(text: &str, format: Format) -> String {
        let caller = Caller { command: "/opt/outlast", is_same: &|command| command == "outlast" };
        changed(text, format, |server| wrap(text, format, server, &caller))
    }

    fn unwrapped(text: &str, format: Format, had_args: Option<bool>) -> String {
        changed(text, format, |server| unwrap(text, server, had_args))
    }

    fn changed(text: &str, format: Format, decide: impl Fn(&Server) -> Verdict) -> String {
        let servers = read(text, format).unwrap();
        let edits = servers.iter().map(decide).filter_map(|verdict| match verdict {
            Verdict::Change(edits) => Some(edits),
            _ => None,
        });
        apply(text, &edits.flatten().collect::<Vec<_>>())
    }

    #[test]
    fn the_words_are_put_where_they_belong_and_taken_out_again() {
        let json = [
            // as it was, what is put where
            (
                r#"{"command":"a"}"#,
                r#"{"command":"/opt/outlast","args":["mcp","--name","x","--on-clean-exit","restart","--","a"]}"#,
            ),
            (
                r#"{"command": "a"}"#,
                r#"{"command": "/opt/outlast", "args": ["mcp", "--name", "x", "--on-clean-exit", "restart", "--", "a"]}"#,
            ),
            (
                r#"{ "args": ["b"], "command": "a" }"#,
                r#"{ "args": ["mcp", "--name", "x", "--on-clean-exit", "restart", "--", "a", "b"], "command": "/opt/outlast" }"#,
            ),
            (
                "{\r\n\t\"command\": \"a\", // c\r\n\t\"env\": {}}",
                "{\r\n\t\"command\": \"/opt/outlast\",\r\n\t\"args\": [\"mcp\", \"--name\", \"x\", \"--on-clean-exit\", \"restart\", \"--\", \"a\"], // c\r\n\t\"env\": {}}",
            ),
            (
                "{\"command\": \"a\", \"args\": [ // c\n    \"b\",\n    \"c\",\n]}",
                "{\"command\": \"/opt/outlast\", \"args\": [ // c\n    \"mcp\", \"--name\", \"x\", \"--on-clean-exit\", \"restart\", \"--\", \"a\",\n    \"b\",\n    \"c\",\n]}",
            ),
            (
                r#"{"command": "C:\\a b\\c.exe", "args": []}"#,
                r#"{"command": "/opt/outlast", "args": ["mcp", "--name", "x", "--on-clean-exit", "restart", "--", "C:\\a b\\c.exe"]}"#,
            ),
            (
                r#"{"command": "cmd", "args": ["/c", "npx"]}"#,
                r#"{"command": "/opt/outlast", "args": ["mcp", "--name", "x", "--on-clean-exit", "restart", "--", "cmd", "/c", "npx"]}"#,
            ),
        ];
        for (before, after) in json {
            let inside = |server: &str| format!("{{\"mcpServers\": {{\"x\": {server}}}}}");
            let had_args = Some(before.contains("args"));
            assert_eq!(wrapped(&inside(before), Format::Json), inside(after));
            assert_eq!(wrapped(&inside(after), Format::Json), inside(after), "twice is once");
            assert_eq!(unwrapped(&inside(after), Format::Json, had_args), inside(before));
            assert_eq!(unwrapped(&inside(before), Format::Json, had_args), inside(before), "nothing to undo");
        }
        let others = [
            // Zed, before and after its servers got a form like everybody's
            (
                r#"{"context_servers": {"x": {"command": {"path": "a", "args": ["b"]}}}}"#,
                r#"{"context_servers": {"x": {"command": {"path": "/opt/outlast", "args": [OURS, "a", "b"]}}}}"#,
            ),
            (
                r#"{"context_servers": {"x": {"command": {"path": "a"}}}}"#,
                r#"{"context_servers": {"x": {"command": {"path": "/opt/outlast", "args": [OURS, "a"]}}}}"#,
            ),
            (
                r#"{"context_servers": {"x": {"source": "custom", "command": "a", "args": []}}}"#,
                r#"{"context_servers": {"x": {"source": "custom", "command": "/opt/outlast", "args": [OURS, "a"]}}}"#,
            ),
            // opencode
            (
                r#"{"mcp": {"x": {"command": ["a", "b"]}}}"#,
                r#"{"mcp": {"x": {"command": ["/opt/outlast", OURS, "a", "b"]}}}"#,
            ),
            (
                "{\"mcp\": {\"servers\": {\"x\": {\"command\": [\n    \"a\",\n    \"b\"\n]}}}}",
                "{\"mcp\": {\"servers\": {\"x\": {\"command\": [\n    \"/opt/outlast\", OURS,\n    \"a\",\n    \"b\"\n]}}}}",
            ),
        ];
        for (before, after) in others {
            let after = after.replace("OURS", r#""mcp", "--name", "x", "--on-clean-exit", "restart", "--""#);
            let had_args = Some(before.contains("args"));
            assert_eq!(wrapped(before, Format::Json), after);
            assert_eq!(wrapped(&after, Format::Json), after, "twice is once");
            assert_eq!(unwrapped(&after, Format::Json, had_args), before);
        }
        let toml = [
            (
                "[mcp_servers.x]\n# why\ncommand = \"a\" # c\nenv.K = \"v\"\n",
                "[mcp_servers.x]\n# why\ncommand = \"/opt/outlast\"\nargs = [\"mcp\", \"--name\", \"x\", \"--on-clean-exit\", \"restart\", \"--\", \"a\"] # c\nenv.K = \"v\"\n",
            ),
            (
                "[mcp_servers.x]\r\nargs = [\r\n  \"b\", # c\r\n]\r\ncommand = \"a\"",
                "[mcp_servers.x]\r\nargs = [\r\n  \"mcp\", \"--name\", \"x\", \"--on-clean-exit\", \"restart\", \"--\", \"a\",\r\n  \"b\", # c\r\n]\r\ncommand = \"/opt/outlast\"",
            ),
            (
                "mcp_servers = { x = { command = \"a\" } }",
                "mcp_servers = { x = { command = \"/opt/outlast\", args = [\"mcp\", \"--name\", \"x\", \"--on-clean-exit\", \"restart\", \"--\", \"a\"] } }",
            ),
            (
                "mcp_servers.x.command = \"a\"",
                "mcp_servers.x.command = \"/opt/outlast\"\nmcp_servers.x.args = [\"mcp\", \"--name\", \"x\", \"--on-clean-exit\", \"restart\", \"--\", \"a\"]",
            ),
        ];
        for (before, after) in toml {
            let had_args = Some(before.contains("args"));
            assert_eq!(wrapped(before, Format::Toml), after);
            assert_eq!(wrapped(after, Format::Toml), after, "twice is once");
            assert_eq!(unwrapped(after, Format::Toml, had_args), before);
        }
    }

    #[test]
    fn an_outlast_that_moved_is_called_by_its_new_place() {
        let server = |command: &str| {
            format!(
                r#"{{"servers": {{"x": {{"command": {command:?}, "args": ["mcp", "--watch", "src", "--", "a"]}}}}}}"#
            )
        };
        for old in ["/old/outlast", "C:\\old\\Outlast.exe", "/old/outlast-0.2"] {
            assert_eq!(wrapped(&server(old), Format::Json), server("/opt/outlast"));
        }
        assert_eq!(wrapped(&server("outlast"), Format::Json), server("outlast"), "it is found, and is the same");
    }

    #[test]
    fn a_server_whose_name_begins_like_ours_is_a_server() {
        let before = r#"{"servers": {"x": {"command": "outlast-notes", "args": ["a"]}}}"#;
        let after = wrapped(before, Format::Json);
        assert!(
            after.contains(r#"["mcp", "--name", "x", "--on-clean-exit", "restart", "--", "outlast-notes", "a"]"#),
            "{after}"
        );
        assert_eq!(unwrapped(&after, Format::Json, Some(true)), before);
    }

    #[test]
    fn what_somebody_has_done_by_hand_is_left() {
        let table = [
            (r#"{"command": "outlast", "args": ["gateway"]}"#, "it is outlast already, in a way of its own"),
            (
                r#"{"command": "cmd", "args": ["/c", "outlast", "mcp", "--", "a"]}"#,
                "it is outlast already, behind another program",
            ),
            (r#"{"type": "http", "url": "https://x"}"#, "it is reached over the network"),
            (r#"{"command": 1}"#, "its command is no string"),
        ];
        for (server, why) in table {
            let text = format!(r#"{{"servers": {{"x": {server}}}}}"#);
            let caller = Caller { command: "outlast", is_same: &|_| false };
            let servers = read(&text, Format::Json).unwrap();
            assert_eq!(wrap(&text, Format::Json, &servers[0], &caller), Verdict::Leave(why));
        }
    }

    #[test]
    fn what_goes_with_outlast_is_known() {
        let text = r#"{"servers": {"x": {"command": "outlast", "args": ["mcp", "--name", "x", "--on-clean-exit", "restart",
            "--watch", "src", "--on-clean-exit", "end", "--", "a", "--name"]}}}"#;
        let servers = read(text, Format::Json).unwrap();
        assert_eq!(options(&servers[0]), ["--watch", "src", "--on-clean-exit", "end"]);
        assert_eq!(command_of(&servers[0]).unwrap(), ["a", "--name"]);
        assert!(is_wrapped(&servers[0]));
    }

    #[test]
    fn a_name_may_look_like_an_option() {
        let text = r#"{"servers": {"-x": {"command": "a"}}}"#;
        assert!(
            wrapped(text, Format::Json).contains(r#"["mcp", "--name=-x", "--on-clean-exit", "restart", "--", "a"]"#)
        );
    }
}
