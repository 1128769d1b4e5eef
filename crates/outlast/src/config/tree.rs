//! A configuration file as a tree in which everything knows its place, be it TOML or JSON with comments.

use std::{fmt, path::PathBuf, rc::Rc};

use jsonc_parser::{CollectOptions, ParseOptions, ast, common::Ranged, errors::ParseErrorKind, parse_to_ast};
use toml_edit::{Document, Item, Value as Toml};

use super::mistake::Mistake;

/// One file of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct File {
    /// Absolute.
    pub path: PathBuf,
    /// As people know it.
    pub shown: String,
}

/// Where something stands. Lines and columns count from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub file: Rc<File>,
    /// 0: it stands in no file, but on the command line.
    pub line: usize,
    pub column: usize,
}

impl Place {
    /// Of what was said on the command line.
    pub fn option(name: &str) -> Place {
        let file = File { path: PathBuf::new(), shown: format!("--{}", name.replace('_', "-")) };
        Place { file: file.into(), line: 0, column: 0 }
    }

    pub fn is_option(&self) -> bool {
        self.line == 0
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => f.write_str(&self.file.shown),
            line => write!(f, "{}:{line}", self.file.shown),
        }
    }
}

#[derive(Debug, Clone)]
pub struct Node {
    pub at: Place,
    pub value: Value,
}

#[derive(Debug, Clone)]
pub enum Value {
    Text(String),
    Whole(i64),
    Fraction(f64),
    Truth(bool),
    List(Vec<Node>),
    Table(Vec<Entry>),
    /// What no key wants: a date, or null.
    Other(&'static str),
}

#[derive(Debug, Clone)]
pub struct Entry {
    pub name: String,
    pub at: Place,
    pub node: Node,
}

impl Node {
    /// The entry of that name, if this is a table and has one.
    pub fn get(&self, name: &str) -> Option<&Entry> {
        match &self.value {
            Value::Table(entries) => entries.iter().find(|entry| entry.name == name),
            _ => None,
        }
    }
}

impl Value {
    /// What it is, for a sentence.
    pub fn what(&self) -> &'static str {
        match self {
            Value::Text(_) => "a text",
            Value::Whole(_) | Value::Fraction(_) => "a number",
            Value::Truth(_) => "true or false",
            Value::List(_) => "a list",
            Value::Table(_) => "a table",
            Value::Other(what) => what,
        }
    }
}

/// The text of a file, for turning offsets into places.
struct Source<'a> {
    file: Rc<File>,
    text: &'a str,
    /// Where each line begins.
    lines: Vec<usize>,
}

impl<'a> Source<'a> {
    fn new(file: &Rc<File>, text: &'a str) -> Source<'a> {
        let ends = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at + 1);
        Source { file: file.clone(), text, lines: std::iter::once(0).chain(ends).collect() }
    }

    fn place(&self, offset: usize) -> Place {
        let line = self.lines.partition_point(|start| *start <= offset).max(1);
        let column = self.text.get(self.lines[line - 1]..offset).map_or(0, |before| before.chars().count()) + 1;
        Place { file: self.file.clone(), line, column }
    }
}

/// Some editors on Windows begin a file with this.
const BYTE_ORDER_MARK: char = '\u{feff}';

pub fn toml(file: &Rc<File>, text: &str) -> Result<Node, Mistake> {
    let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text);
    let source = Source::new(file, text);
    let document = Document::parse(text).map_err(|error| {
        let at = source.place(error.span().map_or(0, |span| span.start));
        let words = error.message().trim().replace('\n', ", ");
        Mistake::new(at, "", format!("this is not TOML: {words}"))
    })?;
    let start = source.place(0);
    Ok(source.table(document.as_table(), start))
}

impl Source<'_> {
    fn item(&self, item: &Item, otherwise: &Place) -> Node {
        let at = item.span().map_or_else(|| otherwise.clone(), |span| self.place(span.start));
        match item {
            Item::None => Node { at, value: Value::Other("nothing") },
            Item::Value(value) => self.value(value, otherwise),
            Item::Table(table) => self.table(table, at),
            Item::ArrayOfTables(tables) => {
                let tables = tables.iter().map(|table| {
                    let at = table.span().map_or_else(|| at.clone(), |span| self.place(span.start));
                    self.table(table, at)
                });
                Node { value: Value::List(tables.collect()), at }
            }
        }
    }

    fn table(&self, table: &toml_edit::Table, at: Place) -> Node {
        let entries = table.iter().map(|(name, item)| self.entry(name, table.key(name), item, &at));
        Node { value: Value::Table(entries.collect()), at }
    }

    fn entry(&self, name: &str, key: Option<&toml_edit::Key>, item: &Item, otherwise: &Place) -> Entry {
        let span = key.and_then(toml_edit::Key::span);
        let at = span.map_or_else(|| otherwise.clone(), |span| self.place(span.start));
        Entry { name: name.to_owned(), node: self.item(item, &at), at }
    }

    fn value(&self, value: &Toml, otherwise: &Place) -> Node {
        let at = value.span().map_or_else(|| otherwise.clone(), |span| self.place(span.start));
        let value = match value {
            Toml::String(text) => Value::Text(text.value().clone()),
            Toml::Integer(number) => Value::Whole(*number.value()),
            Toml::Float(number) => Value::Fraction(*number.value()),
            Toml::Boolean(truth) => Value::Truth(*truth.value()),
            Toml::Datetime(_) => Value::Other("a date"),
            Toml::Array(list) => Value::List(list.iter().map(|value| self.value(value, &at)).collect()),
            Toml::InlineTable(table) => {
                let entries = table.iter().map(|(name, value)| {
                    let span = table.key(name).and_then(toml_edit::Key::span);
                    let at = span.map_or_else(|| at.clone(), |span| self.place(span.start));
                    Entry { name: name.to_owned(), node: self.value(value, &at), at }
                });
                Value::Table(entries.collect())
            }
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
                _ => Value::Other("a number beyond all bounds"),
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

/// Comments and trailing commas are let pass, as the clients do whose files these are.
pub fn json(file: &Rc<File>, text: &str) -> Result<Node, Mistake> {
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
            kind => crate::report::plain(&kind.to_string()),
        };
        Mistake::new(source.place(error.range().start), "", format!("this is not JSON: {words}"))
    })?;
    match parsed.value {
        Some(value) => Ok(source.json(&value)),
        None => Err(Mistake::new(source.place(0), "", "the file is empty").hint("an object is wanted: {}")),
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
    fn everything_in_toml_knows_its_place() {
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
    fn everything_in_json_knows_its_place() {
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
    fn what_is_not_toml_or_json_is_said_with_its_place() {
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
