//! Puts outlast in front of a server's command, or removes it, by splices in the text. All other bytes stay
//! unchanged.

use std::ops::Range;

use super::servers::{Args, Format, How, Program, Server, Word};

/// Replaces one range of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Edit {
    pub at: Range<usize>,
    pub text: String,
}

/// The decision about one server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    Change(Vec<Edit>),
    /// There is nothing to change.
    Settled,
    /// It must not be changed, for this reason.
    Leave(&'static str),
}

/// The command for outlast in this file, and whether the command that is there already means the same program.
pub(crate) struct Caller<'a> {
    pub command: &'a str,
    /// Also write `--share`.
    pub shares: bool,
    pub is_same: &'a dyn Fn(&str) -> bool,
}

/// The options that `wrap` writes: a user who wraps a server wants it restarted, also after it exits with 0.
const WRITTEN: [&str; 2] = ["--on-clean-exit", "restart"];

/// The option that `wrap --share` writes.
const SHARE: &str = "--share";

pub(crate) fn wrap(text: &str, format: Format, server: &Server, caller: &Caller<'_>) -> Verdict {
    let program = match starts(server) {
        Ok(program) => program,
        Err(leave) => return leave,
    };
    if is_outlast(program) {
        let is_ours = inner(program).is_some();
        if !is_ours {
            return Verdict::Leave("it already runs outlast, with another command");
        }
        let command = &program.command.text;
        let is_same = command == caller.command || (caller.is_same)(command);
        let moved = Edit { at: program.command.at.clone(), text: quoted(caller.command, format) };
        let shared = share_edit(text, format, program).filter(|_| caller.shares);
        let edits: Vec<Edit> = (!is_same).then_some(moved).into_iter().chain(shared).collect();
        return if edits.is_empty() { Verdict::Settled } else { Verdict::Change(edits) };
    }
    if is_behind_another(program) {
        return Verdict::Leave("it already runs outlast, behind another program");
    }
    let command = Edit { at: program.command.at.clone(), text: quoted(caller.command, format) };
    // A name that looks like an option is written as one word with its option.
    let name = match &server.name {
        name if name.starts_with('-') => vec![format!("--name={name}")],
        name => vec!["--name".to_owned(), name.clone()],
    };
    let share = caller.shares.then(|| SHARE.to_owned());
    let options = name.into_iter().chain(WRITTEN.map(str::to_owned)).chain(share);
    let words = ["mcp".to_owned()].into_iter().chain(options).chain(["--".to_owned()]);
    let words = words.map(|word| quoted(&word, format));
    if program.is_list
        && let Some(args) = &program.args
    {
        let words: Vec<String> = [command.text].into_iter().chain(words).collect();
        let comma = comma(text, program);
        let list = Args { at: args.at.clone(), words: vec![program.command.clone()] };
        return Verdict::Change(vec![before_the_first(text, &list, words.join(comma), comma)]);
    }
    // The command is moved verbatim, in the user's own quoting.
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

/// `had_args` says whether the server had a list of arguments before it was wrapped, if that is known.
pub(crate) fn unwrap(text: &str, server: &Server, had_args: Option<bool>) -> Verdict {
    let program = match starts(server) {
        Ok(program) => program,
        Err(leave) => return leave,
    };
    if !is_outlast(program) {
        return Verdict::Settled;
    }
    let (Some(at), Some(args)) = (inner(program), &program.args) else {
        return Verdict::Leave("it runs outlast with another command");
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

/// The options between `mcp` and the command, without those that `wrap` writes: `unwrap` drops them.
pub(crate) fn options(server: &Server) -> Vec<String> {
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
            SHARE => rest,
            _ => {
                options.push(word.text.clone());
                rest
            }
        };
    }
    options
}

/// The server's own command and arguments, whether it is wrapped or not.
pub(crate) fn command_of(server: &Server) -> Option<Vec<String>> {
    let How::Starts(program) = &server.how else { return None };
    let args = program.args.iter().flat_map(|args| &args.words).map(|word| word.text.clone());
    match inner(program).filter(|_| is_outlast(program)) {
        Some(at) => Some(args.skip(at).collect()),
        None => Some([program.command.text.clone()].into_iter().chain(args).collect()),
    }
}

/// Whether this server is wrapped in the form that `wrap` writes.
pub(crate) fn is_wrapped(server: &Server) -> bool {
    matches!(&server.how, How::Starts(program) if is_outlast(program) && inner(program).is_some())
}

pub(crate) fn apply(text: &str, edits: &[Edit]) -> String {
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

/// Compares the file name, without the directory and without `.exe`. A server may be called `outlast-notes`: a name
/// with a suffix counts only if the suffix is a version, or if the arguments have the form that `wrap` writes.
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

/// `cmd /c outlast mcp …`, `env A=1 outlast mcp …`: the user has put outlast behind another program.
fn is_behind_another(program: &Program) -> bool {
    let words: Vec<&str> = program.args.iter().flat_map(|args| &args.words).map(|word| word.text.as_str()).collect();
    let is_outlast = |name: String| name == "outlast" || name.starts_with("outlast-");
    words.windows(2).any(|pair| is_outlast(name_of(pair[0])) && pair[1] == "mcp")
}

/// For `mcp [OPTIONS] -- CMD …`: the index of the command among the arguments.
fn inner(program: &Program) -> Option<usize> {
    let words = &program.args.as_ref()?.words;
    if words.first()?.text != "mcp" {
        return None;
    }
    let at = words.iter().position(|word| word.text == "--")? + 1;
    words.get(at).map(|_| at)
}

/// Whether a wrapped server has the option that `wrap --share` writes, with or without a value.
pub(crate) fn is_sharing(server: &Server) -> bool {
    matches!(&server.how, How::Starts(program) if shares(program))
}

fn shares(program: &Program) -> bool {
    let options = program.args.iter().flat_map(|args| &args.words).take_while(|word| word.text != "--");
    options.skip(1).any(|word| word.text == SHARE || word.text.starts_with("--share="))
}

/// Adds the option to a server that is wrapped without it, before the `--`.
fn share_edit(text: &str, format: Format, program: &Program) -> Option<Edit> {
    if shares(program) {
        return None;
    }
    let at = program.args.as_ref()?.words.get(inner(program)? - 1)?.at.start;
    Some(Edit { at: at..at, text: format!("{}{}", quoted(SHARE, format), comma(text, program)) })
}

/// Without a space after the colon, none is written after a comma.
fn comma(text: &str, program: &Program) -> &'static str {
    if text[program.key.clone()].ends_with(char::is_whitespace) { ", " } else { "," }
}

/// The separator between the command and the new arguments: a comma or a line end, and the key `args`, in the style
/// of the command's key.
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
    // If the key begins its line, the new one gets a line, too; otherwise it is separated as its neighbours are.
    let space = if indented { &text[begin..program.key.start] } else { comma(text, program).trim_start_matches(',') };
    format!(",{space}{key}")
}

fn before_the_first(text: &str, args: &Args, words: String, comma: &str) -> Edit {
    let Some(first) = args.words.first() else {
        let at = args.at.start + 1;
        return Edit { at: at..at, text: words };
    };
    // If each argument has its own line, the new ones share one line, and the first old one keeps its own.
    let line = text[..first.at.start].rfind('\n').map_or(0, |at| at + 1);
    let is_alone = args.at.start < line && text[line..first.at.start].trim().is_empty();
    let at = first.at.start..first.at.start;
    if !is_alone {
        return Edit { at, text: format!("{words}{comma}") };
    }
    let newline = if text[..line].ends_with("\r\n") { "\r\n" } else { "\n" };
    Edit { at, text: format!("{words},{newline}{}", &text[line..first.at.start]) }
}

/// A JSON string is a valid TOML string, except for U+007F.
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
    use crate::adopt::servers::read;

    fn wrapped(text: &str, format: Format) -> String {
        let caller = Caller { command: "/opt/outlast", shares: false, is_same: &|command| command == "outlast" };
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
    fn outlast_is_inserted_into_the_command_and_removed_again() {
        let json = [
            // before; after
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
            // Zed, before and after its servers got the usual form
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
    fn a_moved_outlast_is_called_by_its_new_path() {
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
    fn entries_changed_by_hand_are_kept() {
        let table = [
            (r#"{"command": "outlast", "args": ["gateway"]}"#, "it already runs outlast, with another command"),
            (
                r#"{"command": "cmd", "args": ["/c", "outlast", "mcp", "--", "a"]}"#,
                "it already runs outlast, behind another program",
            ),
            (r#"{"type": "http", "url": "https://x"}"#, "it is reached over the network"),
            (r#"{"command": 1}"#, "its command is not a string"),
        ];
        for (server, why) in table {
            let text = format!(r#"{{"servers": {{"x": {server}}}}}"#);
            let caller = Caller { command: "outlast", shares: false, is_same: &|_| false };
            let servers = read(&text, Format::Json).unwrap();
            assert_eq!(wrap(&text, Format::Json, &servers[0], &caller), Verdict::Leave(why));
        }
    }

    #[test]
    fn a_server_is_shared_from_the_start_or_later() {
        let share = |text: &str, format| {
            let caller = Caller { command: "outlast", shares: true, is_same: &|command| command == "outlast" };
            changed(text, format, |server| wrap(text, format, server, &caller))
        };
        let table = [
            // before; after
            (
                r#"{"x": {"command": "a", "args": ["b"]}}"#,
                r#"{"x": {"command": "outlast", "args": ["mcp", "--name", "x", "--on-clean-exit", "restart", "--share", "--", "a", "b"]}}"#,
            ),
            (
                r#"{"x":{"command":"outlast","args":["mcp","--watch","src","--","a","--share"]}}"#,
                r#"{"x":{"command":"outlast","args":["mcp","--watch","src","--share","--","a","--share"]}}"#,
            ),
            (
                r#"{"x": {"command": "outlast", "args": ["mcp", "--share=user", "--", "a"]}}"#,
                r#"{"x": {"command": "outlast", "args": ["mcp", "--share=user", "--", "a"]}}"#,
            ),
        ];
        for (before, after) in table {
            let inside = |servers: &str| format!("{{\"mcpServers\": {servers}}}");
            assert_eq!(share(&inside(before), Format::Json), inside(after));
            assert_eq!(share(&inside(after), Format::Json), inside(after), "twice is once");
        }
        let toml = "[mcp_servers.x]\ncommand = \"a\" # c\nargs = [\"b\"]\n";
        let shared = share(toml, Format::Toml);
        assert!(shared.contains(r#""--share", "--", "a", "b""#), "{shared}");
        assert_eq!(unwrapped(&shared, Format::Toml, Some(true)), toml);
        let servers = read(&shared, Format::Toml).unwrap();
        assert!(is_sharing(&servers[0]) && options(&servers[0]).is_empty());
    }

    #[test]
    fn options_of_outlast_are_separated_from_the_command() {
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
