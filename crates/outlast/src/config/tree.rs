//! A configuration file, TOML or JSON with comments, as a tree in which every value has its position. It does not know
//! the keys.

use std::{fmt, ops::Range, path::PathBuf, rc::Rc};

use jsonc_parser::{CollectOptions, ParseOptions, ast, common::Ranged, errors::ParseErrorKind, parse_to_ast};
use serde_json::{Value as Json, json};
use toml_edit::{Document, Item, TableLike, Value as Toml};

use super::{
    mistake::Mistake,
    nesting::{NESTING_MAX, too_deep},
};

/// One file of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct File {
    /// Absolute.
    pub path: PathBuf,
    /// The path as it is shown.
    pub shown: String,
}

/// The position of a value. Lines and columns count from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Position {
    pub file: Rc<File>,
    /// 0 for a value of the command line.
    pub line: usize,
    pub column: usize,
}

impl Position {
    /// Of a value of the command line.
    pub fn option(name: &str) -> Position {
        let file = File { path: PathBuf::new(), shown: format!("--{}", name.replace('_', "-")) };
        Position { file: file.into(), line: 0, column: 0 }
    }

    pub fn is_option(&self) -> bool {
        self.line == 0
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => f.write_str(&self.file.shown),
            line => write!(f, "{}:{line}", self.file.shown),
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub at: Position,
    pub value: Value,
}

#[derive(Debug, Clone)]
pub(crate) enum Value {
    Text(String),
    Whole(i64),
    Fraction(f64),
    Truth(bool),
    List(Vec<Node>),
    Table(Vec<Entry>),
    /// A value that no key accepts: a date, or null.
    Other(&'static str),
}

#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub name: String,
    pub at: Position,
    pub node: Node,
}

impl Node {
    /// The entry of that name, if this is a table that has one.
    pub(crate) fn get(&self, name: &str) -> Option<&Entry> {
        match &self.value {
            Value::Table(entries) => entries.iter().find(|entry| entry.name == name),
            _ => None,
        }
    }

    /// The name of the table at an index of a list: its own, if it has a readable one, or else the number.
    pub(crate) fn name(&self, index: usize) -> String {
        let name = self.get("name").and_then(|entry| entry.node.text());
        name.map_or_else(|| (index + 1).to_string(), str::to_owned)
    }

    pub(crate) fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(crate) fn json(&self) -> Json {
        match &self.value {
            Value::Text(text) => json!(text),
            Value::Whole(number) => json!(number),
            Value::Fraction(number) => json!(number),
            Value::Truth(truth) => json!(truth),
            Value::List(nodes) => nodes.iter().map(Node::json).collect(),
            Value::Table(entries) => entries.iter().map(|entry| (entry.name.clone(), entry.node.json())).collect(),
            Value::Other(what) => json!(what),
        }
    }
}

impl Value {
    /// Its kind, for a sentence.
    pub(crate) fn what(&self) -> &'static str {
        match self {
            Value::Text(_) => "a text",
            Value::Whole(_) | Value::Fraction(_) => "a number",
            Value::Truth(_) => "true or false",
            Value::List(_) => "a list",
            Value::Table(_) => "a table",
            Value::Other(what) => what,
        }
    }

    /// The value itself if it is short, or else its kind.
    pub(crate) fn quoted(&self) -> String {
        match self {
            Value::Text(text) => format!("`{text}`"),
            Value::Whole(number) => format!("`{number}`"),
            Value::Fraction(number) => format!("`{number}`"),
            value => value.what().to_owned(),
        }
    }
}

/// The text of a file, for converting offsets to positions.
struct Source<'a> {
    file: Rc<File>,
    text: &'a str,
    /// The start of each line.
    lines: Vec<usize>,
}

impl<'a> Source<'a> {
    fn new(file: &Rc<File>, text: &'a str) -> Source<'a> {
        let ends = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at + 1);
        Source { file: file.clone(), text, lines: std::iter::once(0).chain(ends).collect() }
    }

    fn place(&self, offset: usize) -> Position {
        let line = self.lines.partition_point(|start| *start <= offset).max(1);
        let column = self.text.get(self.lines[line - 1]..offset).map_or(0, |before| before.chars().count()) + 1;
        Position { file: self.file.clone(), line, column }
    }
}

/// A byte order mark, which some editors on Windows write.
const BYTE_ORDER_MARK: char = '\u{feff}';

pub(crate) fn toml(file: &Rc<File>, text: &str) -> Result<Node, Mistake> {
    let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text);
    let source = Source::new(file, text);
    if let Some(offset) = too_deep(text) {
        let sentence = format!("this is nested more than {NESTING_MAX} levels deep");
        return Err(Mistake::new(source.place(offset), "", sentence));
    }
    let document = Document::parse(text).map_err(|error| {
        let at = source.place(error.span().map_or(0, |span| span.start));
        let words = error.message().trim().replace('\n', ", ");
        Mistake::new(at, "", format!("this is not TOML: {words}"))
    })?;
    let start = source.place(0);
    Ok(Node { value: source.table(document.as_table(), &start), at: start })
}

/// The default of a key, as it is written there.
pub(crate) fn default(text: &str) -> Node {
    let file = Rc::new(File { path: PathBuf::new(), shown: "the list of keys".to_owned() });
    let Value::Table(mut entries) = toml(&file, &format!("x = {text}")).expect("a default is TOML").value else {
        unreachable!("a document is a table");
    };
    entries.remove(0).node
}

impl Source<'_> {
    fn start(&self, span: Option<Range<usize>>, otherwise: &Position) -> Position {
        span.map_or_else(|| otherwise.clone(), |span| self.place(span.start))
    }

    fn item(&self, item: &Item, otherwise: &Position) -> Node {
        let at = self.start(item.span(), otherwise);
        let value = match item {
            Item::None => Value::Other("nothing"),
            Item::Value(value) => return self.value(value, otherwise),
            Item::Table(table) => self.table(table, &at),
            Item::ArrayOfTables(tables) => {
                let node = |at: Position, table| Node { value: self.table(table, &at), at };
                Value::List(tables.iter().map(|table| node(self.start(table.span(), &at), table)).collect())
            }
        };
        Node { at, value }
    }

    fn table(&self, table: &dyn TableLike, at: &Position) -> Value {
        let entries = table.iter().map(|(name, item)| {
            let at = self.start(table.key(name).and_then(toml_edit::Key::span), at);
            Entry { name: name.to_owned(), node: self.item(item, &at), at }
        });
        Value::Table(entries.collect())
    }

    fn value(&self, value: &Toml, otherwise: &Position) -> Node {
        let at = self.start(value.span(), otherwise);
        let value = match value {
            Toml::String(text) => Value::Text(text.value().clone()),
            Toml::Integer(number) => Value::Whole(*number.value()),
            Toml::Float(number) => Value::Fraction(*number.value()),
            Toml::Boolean(truth) => Value::Truth(*truth.value()),
            Toml::Datetime(_) => Value::Other("a date"),
            Toml::Array(list) => Value::List(list.iter().map(|value| self.value(value, &at)).collect()),
            Toml::InlineTable(table) => self.table(table, &at),
        };
        Node { at, value }
    }

    fn json(&self, value: &ast::Value<'_>) -> Node {
        let at = self.place(value.start());
        let value = match value {
            ast::Value::StringLit(text) => Value::Text(text.value.to_string()),
            ast::Value::NumberLit(number) => match (number.value.parse(), number.value.parse()) {
                (Ok(whole), _) => Value::Whole(whole),
                (_, Ok(fraction)) => Value::Fraction(fraction),
                _ => Value::Other("a number out of range"),
            },
            ast::Value::BooleanLit(truth) => Value::Truth(truth.value),
            ast::Value::NullKeyword(_) => Value::Other("null"),
            ast::Value::Array(list) => Value::List(list.elements.iter().map(|value| self.json(value)).collect()),
            ast::Value::Object(object) => {
                let entries = object.properties.iter().map(|property| Entry {
                    name: property.name.as_str().to_owned(),
                    at: self.place(property.range.start),
                    node: self.json(&property.value),
                });
                Value::Table(entries.collect())
            }
        };
        Node { at, value }
    }
}

/// Comments and trailing commas are accepted, as the clients of these files do.
pub(crate) fn json(file: &Rc<File>, text: &str) -> Result<Node, Mistake> {
    let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text);
    let source = Source::new(file, text);
    let options = ParseOptions {
        allow_comments: true,
        allow_trailing_commas: true,
        allow_loose_object_property_names: false,
        allow_missing_commas: false,
        allow_single_quoted_strings: false,
        allow_hexadecimal_numbers: false,
        allow_unary_plus_numbers: false,
        allow_bare_decimal_point_numbers: false,
        allow_non_finite_numbers: false,
        allow_extended_string_escapes: false,
    };
    let parsed = parse_to_ast(text, &CollectOptions::default(), &options).map_err(|error| {
        let words = match error.kind() {
            ParseErrorKind::ExpectedComma => "a comma is missing before this".to_owned(),
            ParseErrorKind::UnterminatedObject => "the `}` for this is missing".to_owned(),
            ParseErrorKind::UnterminatedArray => "the `]` for this is missing".to_owned(),
            kind => crate::cli::report::plain(&kind.to_string()),
        };
        Mistake::new(source.place(error.range().start), "", format!("this is not JSON: {words}"))
    })?;
    match parsed.value {
        Some(value) => Ok(source.json(&value)),
        None => Err(Mistake::new(source.place(0), "", "the file is empty").hint("expected an object: {}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str) -> Rc<File> {
        File { path: name.into(), shown: name.to_owned() }.into()
    }

    fn places(node: &Node, path: &str, out: &mut Vec<String>) {
        match &node.value {
            Value::Table(entries) => {
                for entry in entries {
                    let path = format!("{path}/{}", entry.name);
                    out.push(format!("{path} {}:{}", entry.at.line, entry.at.column));
                    places(&entry.node, &path, out);
                }
            }
            Value::List(nodes) => {
                nodes.iter().enumerate().for_each(|(n, node)| places(node, &format!("{path}/{n}"), out))
            }
            value => out.push(format!("{path} = {value:?} {}:{}", node.at.line, node.at.column)),
        }
    }

    fn shown(node: &Node) -> Vec<String> {
        let mut out = vec![];
        places(node, "", &mut out);
        out
    }

    #[test]
    fn every_value_in_toml_has_its_position() {
        let text =
            "\u{feff}a = 1\r\n\r\n[[b]]\r\nc = [\"x\",\r\n  \"ü\", 2.5]\r\n[d.e]\r\nf = { g = true }\r\nh.i = 3\r\n";
        let node = toml(&file("x.toml"), text).unwrap();
        insta::assert_snapshot!(shown(&node).join("\n"), @r#"
        /a 1:1
        /a = Whole(1) 1:5
        /b 3:3
        /b/0/c 4:1
        /b/0/c/0 = Text("x") 4:6
        /b/0/c/1 = Text("ü") 5:3
        /b/0/c/2 = Fraction(2.5) 5:8
        /d 6:2
        /d/e 6:4
        /d/e/f 7:1
        /d/e/f/g 7:7
        /d/e/f/g = Truth(true) 7:11
        /d/e/h 8:1
        /d/e/h/i 8:3
        /d/e/h/i = Whole(3) 8:7
        "#);
    }

    #[test]
    fn every_value_in_json_has_its_position() {
        let text = "\u{feff}{ // a comment\r\n  \"a\": [1, 2.5,],\r\n  /* another */ \"b\": { \"c\": null, \"d\": \"\\u00fc\" },\r\n}\r\n";
        let node = json(&file("x.json"), text).unwrap();
        insta::assert_snapshot!(shown(&node).join("\n"), @r#"
        /a 2:3
        /a/0 = Whole(1) 2:9
        /a/1 = Fraction(2.5) 2:12
        /b 3:17
        /b/c 3:24
        /b/c = Other("null") 3:29
        /b/d 3:35
        /b/d = Text("ü") 3:40
        "#);
    }

    #[test]
    fn a_syntax_error_is_reported_with_its_position() {
        let mut words = String::new();
        for text in ["a = ", "[a\nb = 1", "a = 1\na = 2", "x"] {
            words.push_str(&format!("{}\n", toml(&file("x.toml"), text).unwrap_err()));
        }
        for text in ["", "{ \"a\": 1 \"b\": 2 }", "{ \"a\": [1", "{ 'a': 1 }", "{\"a\": tru}", "// nothing"] {
            words.push_str(&format!("{}\n", json(&file("x.json"), text).unwrap_err()));
        }
        insta::assert_snapshot!(words);
    }
}
