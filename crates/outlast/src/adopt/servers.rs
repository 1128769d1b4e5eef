//! The servers in a client's configuration, and the position of each of their words in the text.
//!
//! It does not write: the positions are for splices, so that comments, order, commas, line ends and indentation stay
//! unchanged.

use std::ops::Range;

use jsonc_parser::{
    CollectOptions,
    ast::{self, Object, ObjectProp},
    common::Ranged,
    parse_to_ast,
};
use toml_edit::{Document, Item, TableLike};

use crate::config::nesting::{NESTING_MAX, too_deep};

/// The byte order mark at the start of a text, common on Windows.
const BOM: char = '\u{feff}';

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Comments and trailing commas are allowed.
    Json,
    Toml,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Server {
    pub name: String,
    /// The project directory, in a file for several projects.
    pub project: Option<String>,
    pub env: Vec<(String, String)>,
    /// The values of the headers that the client sends to a remote server.
    pub header_values: Vec<String>,
    pub cwd: Option<String>,
    pub how: How,
}

/// How a client reaches a server.
#[derive(Debug, Clone, PartialEq)]
pub enum How {
    /// It starts a program.
    Starts(Program),
    /// It connects over the network.
    Calls,
    /// The entry is not understood, for this reason.
    Unclear(&'static str),
}

#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    pub command: Word,
    /// The range from the start of the key to the command: `"command": `.
    pub key: Range<usize>,
    /// The name of that key: `command`, or `path` in the older form of Zed.
    pub key_name: &'static str,
    /// It is in braces or brackets, so that commas, not lines, separate it from its neighbours.
    pub is_inline: bool,
    /// The command is the first element of a list, and `args` are the others (opencode).
    pub is_list: bool,
    pub args: Option<Args>,
}

/// A string and its position, quotes included.
#[derive(Debug, Clone, PartialEq)]
pub struct Word {
    pub text: String,
    pub at: Range<usize>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Args {
    /// Brackets included.
    pub at: Range<usize>,
    pub words: Vec<Word>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}, on line {line}")]
pub struct ReadError {
    pub what: String,
    pub line: usize,
}

/// Every server of a configuration, in file order.
pub fn read(text: &str, format: Format) -> Result<Vec<Server>, ReadError> {
    let skipped = if text.starts_with(BOM) { BOM.len_utf8() } else { 0 };
    match format {
        Format::Json => read_json(&text[skipped..], skipped),
        Format::Toml => read_toml(&text[skipped..], skipped),
    }
}

// ---- JSON ----------------------------------------------------------------------------------------------------

/// Lines end with a line feed, as in editors: a carriage return alone ends no line.
fn line_of(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
}

fn read_json(text: &str, skipped: usize) -> Result<Vec<Server>, ReadError> {
    // An empty file is valid: some clients create one.
    let parsed = parse_to_ast(text, &CollectOptions::default(), &Default::default())
        .map_err(|error| ReadError { what: error.kind().to_string(), line: line_of(text, error.range().start) })?;
    let Some(ast::Value::Object(root)) = parsed.value else { return Ok(Vec::new()) };
    let reader = Json { skipped };
    let mut servers = Vec::new();
    for key in KEYS {
        reader.take(object(&root, key), None, &mut servers);
    }
    // VS Code and opencode 2 have `mcp.servers`; opencode 1 has its servers in `mcp` itself.
    for property in object(&root, "mcp").into_iter().flat_map(|mcp| &mcp.properties) {
        let ast::Value::Object(inner) = &property.value else { continue };
        let is_server = ["command", "url"].iter().any(|key| last(inner, key).is_some_and(|found| !is_object(found)));
        match property.name.as_str() {
            "servers" if !is_server => reader.take(Some(inner), None, &mut servers),
            name if is_server => servers.push(reader.server(name, inner, None)),
            _ => {}
        }
    }
    for project in object(&root, "projects").into_iter().flat_map(|projects| &projects.properties) {
        if let ast::Value::Object(settings) = &project.value {
            reader.take(object(settings, "mcpServers"), Some(project.name.as_str()), &mut servers);
        }
    }
    Ok(servers)
}

/// Members of the root object that hold servers by name: of most clients, of VS Code and of Zed.
const KEYS: [&str; 3] = ["mcpServers", "servers", "context_servers"];

/// Where servers are searched, for messages.
pub const LOOKED_IN: &str =
    "`mcpServers`, `servers`, `context_servers`, `mcp` and `mcp.servers` (JSON), and `[mcp_servers]` (TOML)";

/// What clients call the headers of a remote server.
const HEADERS: [&str; 2] = ["headers", "http_headers"];

struct Json {
    skipped: usize,
}

impl Json {
    fn take(&self, from: Option<&Object>, project: Option<&str>, servers: &mut Vec<Server>) {
        for property in from.into_iter().flat_map(|from| &from.properties) {
            if let ast::Value::Object(server) = &property.value {
                servers.push(self.server(property.name.as_str(), server, project));
            }
        }
    }

    fn server(&self, name: &str, server: &Object, project: Option<&str>) -> Server {
        let variables = ["env", "environment"].iter().find_map(|key| object(server, key));
        // The older form of Zed has everything in `command`.
        let inner = object(server, "command");
        let variables = variables.or_else(|| object(inner?, "env")).into_iter().flat_map(|env| &env.properties);
        let env = variables.filter_map(|pair| Some((pair.name.as_str().to_owned(), string(&pair.value)?)));
        let headers = HEADERS.iter().filter_map(|key| object(server, key)).flat_map(|headers| &headers.properties);
        Server {
            name: name.to_owned(),
            project: project.map(str::to_owned),
            env: env.collect(),
            header_values: headers.filter_map(|header| string(&header.value)).collect(),
            cwd: last(server, "cwd").and_then(|cwd| string(&cwd.value)),
            how: match inner {
                Some(inner) => self.how(inner, "path"),
                None => self.how(server, "command"),
            },
        }
    }

    fn how(&self, server: &Object, key_name: &'static str) -> How {
        let Some(property) = last(server, key_name) else {
            let is_remote = ["url", "httpUrl", "serverUrl"].iter().any(|key| last(server, key).is_some());
            return if is_remote { How::Calls } else { How::Unclear("it has no command") };
        };
        if let ast::Value::Array(array) = &property.value {
            return self.list(array, property, key_name);
        }
        let Some(text) = string(&property.value) else { return How::Unclear("its command is not a string") };
        let args = match last(server, "args").map(|args| &args.value) {
            None | Some(ast::Value::NullKeyword(_)) => None,
            Some(ast::Value::Array(array)) => Some(self.args(array)),
            Some(_) => return How::Unclear("its args are not a list"),
        };
        if args.is_none() && last(server, "args").is_some() {
            return How::Unclear("its args are not a list");
        }
        let command = Word { text, at: self.place(&property.value) };
        let key = property.start() + self.skipped..command.at.start;
        How::Starts(Program { command, key, key_name, is_inline: true, is_list: false, args })
    }

    fn list(&self, array: &ast::Array, property: &ObjectProp, key_name: &'static str) -> How {
        let mut args = self.args(array);
        if args.words.is_empty() || string(&array.elements[0]).is_none() {
            return How::Unclear("its command is not a string");
        }
        let command = args.words.remove(0);
        let key = property.start() + self.skipped..args.at.start;
        How::Starts(Program { command, key, key_name, is_inline: true, is_list: true, args: Some(args) })
    }

    fn args(&self, array: &ast::Array) -> Args {
        let words = array.elements.iter().map(|element| {
            // An element that is not a string is kept unchanged.
            Word { text: string(element).unwrap_or_default(), at: self.place(element) }
        });
        Args { words: words.collect(), at: self.place(array) }
    }

    fn place(&self, node: &impl Ranged) -> Range<usize> {
        node.start() + self.skipped..node.end() + self.skipped
    }
}

/// Of several members with the same name the last one counts, as in every client.
fn last<'a, 'b>(object: &'b Object<'a>, name: &str) -> Option<&'b ObjectProp<'a>> {
    object.properties.iter().rev().find(|property| property.name.as_str() == name)
}

fn object<'a, 'b>(from: &'b Object<'a>, name: &str) -> Option<&'b Object<'a>> {
    match &last(from, name)?.value {
        ast::Value::Object(object) => Some(object),
        _ => None,
    }
}

fn is_object(property: &ObjectProp) -> bool {
    matches!(property.value, ast::Value::Object(_))
}

fn string(value: &ast::Value) -> Option<String> {
    value.as_string_lit().map(|literal| literal.value.clone().into_owned())
}

// ---- TOML ----------------------------------------------------------------------------------------------------

fn read_toml(text: &str, skipped: usize) -> Result<Vec<Server>, ReadError> {
    if let Some(offset) = too_deep(text) {
        let what = format!("nested more than {NESTING_MAX} levels deep");
        return Err(ReadError { what, line: line_of(text, offset) });
    }
    let document = Document::parse(text).map_err(|error| {
        let what = error.message().lines().next().unwrap_or("this is not TOML").to_owned();
        ReadError { what, line: line_of(text, error.span().map_or(0, |span| span.start)) }
    })?;
    let servers = document.as_table().get("mcp_servers").and_then(Item::as_table_like);
    let servers = servers.into_iter().flat_map(|servers| servers.iter());
    let read = servers.filter_map(|(name, item)| {
        let server = item.as_table_like()?;
        let env = server.get("env").and_then(Item::as_table_like);
        let env = env.into_iter().flat_map(|env| env.iter());
        let headers = HEADERS.iter().filter_map(|key| server.get(key)?.as_table_like());
        let headers = headers.flat_map(|headers| headers.iter());
        Some(Server {
            name: name.to_owned(),
            project: None,
            env: env.filter_map(|(name, value)| Some((name.to_owned(), value.as_str()?.to_owned()))).collect(),
            header_values: headers.filter_map(|(_, value)| Some(value.as_str()?.to_owned())).collect(),
            cwd: server.get("cwd").and_then(Item::as_str).map(str::to_owned),
            how: toml_how(server, item.is_inline_table(), text, skipped),
        })
    });
    Ok(read.collect())
}

fn toml_how(server: &dyn TableLike, is_inline: bool, text: &str, skipped: usize) -> How {
    let place = |span: Range<usize>| span.start + skipped..span.end + skipped;
    let Some(item) = server.get("command") else {
        return if server.contains_key("url") { How::Calls } else { How::Unclear("it has no command") };
    };
    let (Some(command), Some(at)) = (item.as_str(), item.span()) else {
        return How::Unclear("its command is not a string");
    };
    let args = match server.get("args") {
        None => None,
        Some(args) => match (args.as_array(), args.span()) {
            (Some(array), Some(at)) => {
                let words = array.iter().filter_map(|value| {
                    Some(Word { text: value.as_str().unwrap_or_default().to_owned(), at: place(value.span()?) })
                });
                Some(Args { words: words.collect(), at: place(at) })
            }
            _ => return How::Unclear("its args are not a list"),
        },
    };
    // In a table the key may be dotted, `mcp_servers.x.command`, and begins its line.
    let begin = if is_inline {
        text[..at.start].rfind("command").unwrap_or(at.start)
    } else {
        text[..at.start].rfind('\n').map_or(0, |at| at + 1)
    };
    How::Starts(Program {
        key: place(begin..at.start),
        key_name: "command",
        command: Word { text: command.to_owned(), at: place(at) },
        is_inline,
        is_list: false,
        args,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One line per server, with its words read from their positions in the text.
    fn shown(text: &str, format: Format) -> String {
        let servers = read(text, format).unwrap();
        let lines = servers.iter().map(|server| {
            let project = server.project.as_deref().map(|project| format!(" in {project}")).unwrap_or_default();
            let how = match &server.how {
                How::Calls => "calls".to_owned(),
                How::Unclear(why) => format!("unclear: {why}"),
                How::Starts(program) => {
                    let args = program.args.iter().flat_map(|args| &args.words);
                    let args: Vec<&str> = args.map(|word| &text[word.at.clone()]).collect();
                    let brackets = program.args.as_ref().map(|args| &text[args.at.clone()]);
                    assert!(brackets.is_none_or(|text| text.starts_with('[') && text.ends_with(']')), "{brackets:?}");
                    format!("{}{} {}", &text[program.key.clone()], &text[program.command.at.clone()], args.join(" "))
                }
            };
            format!("{}{project}: {how} {:?}\n", server.name, server.env)
        });
        lines.collect()
    }

    #[test]
    fn json_is_read_with_comments_and_other_extensions() {
        let text = "\u{feff}{ // ünïcode\r\n  'mcpServers': {\r\n    \"a\": {\"command\" : \"b\", \"args\": [\"c\", 4,],},\r\n\
            \"env\": {\"command\": \"x\", \"env\": {\"K\": \"v\"}}, \"web\": {\"type\": \"http\", \"url\": \"u\"},\n\
            \"odd\": {\"command\": [1]}, \"odder\": {\"command\": \"x\", \"args\": \"y\"}, \"none\": {}, \"no\": 1\n}, \
            \"servers\": {\"v\": {\"type\": \"stdio\", \"command\": \"w\"}}, \"mcp\": {\"servers\": {\"s\": {\"command\": \"t\"}}},\n\
            \"projects\": {\"/srv/a b\": {\"mcpServers\": {\"p\": {\"command\": \"q\", \"command\": \"r\"}}}, \"/x\": {}}}";
        insta::assert_snapshot!(shown(text, Format::Json), @r#"
        a: "command" : "b" "c" 4 []
        env: "command": "x"  [("K", "v")]
        web: calls []
        odd: unclear: its command is not a string []
        odder: unclear: its args are not a list []
        none: unclear: it has no command []
        v: "command": "w"  []
        s: "command": "t"  []
        p in /srv/a b: "command": "r"  []
        "#);
        for empty in ["", "  ", "[]", "{}", "// nothing\n"] {
            assert_eq!(read(empty, Format::Json), Ok(vec![]), "{empty:?}");
        }
    }

    #[test]
    fn the_forms_of_zed_and_opencode_are_read() {
        let text = r#"{"context_servers": {"new": {"source": "custom", "command": "a", "args": ["b"], "env": {"K": "v"}},
            "old": {"command": {"path": "c", "args": ["d"], "env": {"L": "w"}}}, "extension": {"settings": {}}},
            "mcp": {"local": {"type": "local", "command": ["e", "f"], "environment": {"M": "x"}},
            "remote": {"type": "remote", "url": "u"}, "off": {"enabled": false}, "timeout": 5000, "none": {"command": []},
            "servers": {"second": {"type": "local", "command": ["g"]}}}}"#;
        insta::assert_snapshot!(shown(text, Format::Json), @r#"
        new: "command": "a" "b" [("K", "v")]
        old: "path": "c" "d" [("L", "w")]
        extension: unclear: it has no command []
        local: "command": "e" "f" [("M", "x")]
        remote: calls []
        none: unclear: its command is not a string []
        second: "command": "g"  []
        "#);
        // A server of opencode 1 may be called `servers`.
        let text = r#"{"mcp": {"servers": {"type": "local", "command": ["a"]}}}"#;
        insta::assert_snapshot!(shown(text, Format::Json), @r#"servers: "command": "a"  []"#);
    }

    #[test]
    fn toml_is_read_in_every_way_it_can_be_written() {
        let text = "\u{feff}model = \"x\" # ü\r\n\r\n[mcp_servers.a]\r\n  command = 'b' # why\r\nargs = [\r\n  \"c\",\r\n]\r\n\
            [mcp_servers.a.env]\r\nK = \"v\"\r\n[mcp_servers]\nb = { command = \"c\", env = { L = \"w\" } }\nweb.url = \"u\"\n\
            [mcp_servers.\"d e\"]\nargs = []\ncommand = \"\"\"f\"\"\"\n";
        insta::assert_snapshot!(shown(text, Format::Toml).replace('\r', ""), @r#"
        a:   command = 'b' "c" [("K", "v")]
        b: command = "c"  [("L", "w")]
        web: calls []
        d e: command = """f"""  []
        "#);
        let text = "mcp_servers.x.command = \"y\"\n";
        insta::assert_snapshot!(shown(text, Format::Toml), @r#"x: mcp_servers.x.command = "y"  []"#);
        assert_eq!(read("a = 1\n", Format::Toml), Ok(vec![]));
    }

    #[test]
    fn an_unreadable_entry_is_reported_with_its_line() {
        let table = [
            (Format::Json, "{\n  \"mcpServers\": {\n", "Unterminated object, on line 2"),
            (Format::Json, "{\n\"a\" 1}", "Expected colon after the string or word in object property, on line 2"),
            (Format::Toml, "a = 1\n[b\n", "unclosed table, expected `]`, on line 2"),
        ];
        for (format, text, words) in table {
            assert_eq!(read(text, format).unwrap_err().to_string(), words);
        }
    }
}
