//! The types that a key can have: each is read from a file, described in the schema and on the reference page, and shown
//! by `config show`.

use std::{fmt::Debug, marker::PhantomData, net::SocketAddr, ops::Deref, path::PathBuf, slice, time::Duration};

use clap::ValueEnum;
use outlast_core::{
    gateway::{Children, Pattern},
    keys::DetachKey,
    sandbox::{self, RULES_MAX},
    secret::Resolved,
};
use serde_json::{Value as Json, json};

use super::{
    keys::Algorithm,
    mistake::{Spot, did_you_mean},
    show::{self, Setting},
    table::{Reader, Set, Shape, Table, Value, join},
    tree::{Entry, Node, Position, Value as Tree},
};
use crate::{cli::duration, gateway::listen::address};

/// The value without its position.
pub(crate) trait Plain {
    type Plain;

    fn plain(&self) -> Self::Plain;
}

macro_rules! plain {
    ($($(@[$($generic:tt)+])? $from:ty => $to:ty: $plain:expr;)+) => { $(
        impl $(<$($generic)+>)? Plain for $from {
            type Plain = $to;

            fn plain(&self) -> $to {
                let plain: fn(&$from) -> $to = $plain;
                plain(self)
            }
        }
    )+ };
}

plain! {
    bool => bool: |truth| *truth;
    Duration => Duration: |span| *span;
    Text => String: |text| text.to_string();
    Size => u64: |size| size.0;
    @[const LEAST: u32] Count<LEAST> => u32: |count| count.0;
    @[W: Word] Parsed<W> => W::Plain: |parsed| parsed.value.clone();
    @[T: Plain] Option<T> => Option<T::Plain>: |value| value.as_ref().map(T::plain);
    @[T: Plain] Vec<T> => Vec<T::Plain>: |values| values.iter().map(T::plain).collect();
}

/// Of a key without a default.
impl<T: Value> Value for Option<T> {
    fn read(reader: &mut Reader<'_>, spot: &Spot, node: &Node) -> Option<Option<T>> {
        T::read(reader, spot, node).map(Some)
    }

    fn kind() -> (String, Json) {
        T::kind()
    }

    fn shown(&self, node: &Node) -> Json {
        self.as_ref().map_or(Json::Null, |value| value.shown(node))
    }

    fn lines(&self, line: Setting, out: &mut Vec<Setting>) {
        match self {
            Some(value) => value.lines(line, out),
            None => out.push(line),
        }
    }
}

/// A text with its form in the file: if a part comes from the environment, only that form may be shown.
#[derive(Debug, Clone)]
pub(crate) struct Text {
    pub spot: Spot,
    pub written: String,
    /// It knows the parts that must not be shown.
    pub value: Resolved,
}

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        self.value.expose()
    }
}

impl Value for Text {
    fn read(reader: &mut Reader<'_>, spot: &Spot, node: &Node) -> Option<Text> {
        let Tree::Text(written) = &node.value else { return reader.expected(spot, node, "a text") };
        let value = match reader.references.map(|references| references.put_in(written)) {
            None => Resolved::from(written.as_str()),
            Some(Ok(value)) => value,
            Some(Err((what, hint))) => return reader.wrong(spot, node, what, hint),
        };
        if value.expose().contains('\0') {
            return reader.wrong(spot, node, "it contains a NUL character", "");
        }
        reader.variables.extend(value.names().map(str::to_owned));
        Some(Text { spot: spot.of(node), written: written.clone(), value })
    }

    fn kind() -> (String, Json) {
        ("text".to_owned(), json!({ "type": "string" }))
    }
}

/// A text that is a secret. It is shown only if it consists of references.
#[derive(Debug, Clone)]
pub(crate) struct Hidden(pub Text);

impl Value for Hidden {
    fn read(reader: &mut Reader<'_>, spot: &Spot, node: &Node) -> Option<Hidden> {
        Text::read(reader, spot, node).map(Hidden)
    }

    fn kind() -> (String, Json) {
        Text::kind()
    }

    fn lines(&self, line: Setting, out: &mut Vec<Setting>) {
        out.push(match is_reference(&self.0) {
            true => line,
            false => Setting { value: None, hidden: true, ..line },
        });
    }
}

/// A kind of text that is parsed, such as an address.
pub(crate) trait Word {
    type Plain: Debug + Clone;

    /// The error is the cause and the fix.
    fn parse(text: &Text) -> Result<Self::Plain, (String, String)>;

    fn kind() -> (String, Json) {
        Text::kind()
    }
}

/// A text that was parsed.
#[derive(Debug, Clone)]
pub(crate) struct Parsed<W: Word> {
    pub text: Text,
    value: W::Plain,
}

impl<W: Word> Deref for Parsed<W> {
    type Target = W::Plain;

    fn deref(&self) -> &W::Plain {
        &self.value
    }
}

impl<W: Word> Value for Parsed<W> {
    fn read(reader: &mut Reader<'_>, spot: &Spot, node: &Node) -> Option<Parsed<W>> {
        let text = Text::read(reader, spot, node)?;
        match W::parse(&text) {
            Ok(value) => Some(Parsed { text, value }),
            Err((what, hint)) => reader.wrong(spot, node, what, hint),
        }
    }

    fn kind() -> (String, Json) {
        W::kind()
    }
}

/// A path, relative to the directory of its file.
#[derive(Debug, Clone)]
pub(crate) struct Relative;
pub(crate) type FilePath = Parsed<Relative>;

impl Word for Relative {
    type Plain = PathBuf;

    fn parse(text: &Text) -> Result<PathBuf, (String, String)> {
        let dir = text.spot.at.as_ref().and_then(|at| at.file.path.parent());
        Ok(dir.map_or_else(|| PathBuf::from(&**text), |dir| dir.join(&**text)))
    }

    fn kind() -> (String, Json) {
        ("path".to_owned(), Text::kind().1)
    }
}

/// An address to listen on.
#[derive(Debug, Clone)]
pub(crate) struct Listener;

impl Word for Listener {
    type Plain = SocketAddr;

    fn parse(text: &Text) -> Result<SocketAddr, (String, String)> {
        let what = || format!("`{}` is not an address to listen on", text.written);
        address::parse(text).ok_or_else(|| (what(), address::FORMS.to_owned()))
    }

    fn kind() -> (String, Json) {
        ("address".to_owned(), Text::kind().1)
    }
}

impl Word for DetachKey {
    type Plain = DetachKey;

    fn parse(text: &Text) -> Result<DetachKey, (String, String)> {
        DetachKey::parse(text).map_err(|why| (format!("`{}` is not a valid detach key", text.written), why))
    }
}

/// One of the words of a type, as on the command line.
#[derive(Debug, Clone)]
pub(crate) struct OneOf<T>(PhantomData<T>);
pub(crate) type Choice<T> = Parsed<OneOf<T>>;

impl<T: ValueEnum> OneOf<T> {
    fn words() -> Vec<String> {
        let words = T::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        words.map(|word| word.get_name().to_owned()).collect()
    }
}

impl<T: ValueEnum + Debug + Clone + 'static> Word for OneOf<T> {
    type Plain = T;

    fn parse(text: &Text) -> Result<T, (String, String)> {
        let words = Self::words();
        // `at_once` and `at-once` are the same word.
        let same = |word: &String| word.replace('-', "_") == text.replace('-', "_");
        words.iter().position(same).map(|at| T::value_variants()[at].clone()).ok_or_else(|| {
            let hint = did_you_mean(text, words.iter().map(String::as_str));
            (format!("`{}` is not one of its values", text.written), hint)
        })
    }

    fn kind() -> (String, Json) {
        let quoted: Vec<String> = Self::words().iter().map(|word| format!("`\"{word}\"`")).collect();
        (quoted.join(", "), json!({ "enum": Self::words() }))
    }
}

/// A name in which `*` matches anything.
impl Value for Pattern {
    fn read(reader: &mut Reader<'_>, spot: &Spot, node: &Node) -> Option<Pattern> {
        let Tree::Text(text) = &node.value else { return reader.expected(spot, node, "a text") };
        let what = if text.is_empty() {
            "a pattern is empty".to_owned()
        } else if let Some(letter) = text.chars().find(|letter| "^$()[]{}|\\?+ \t".contains(*letter)) {
            format!("`{letter}` in `{text}` is not allowed")
        } else {
            return Some(Pattern(text.clone()));
        };
        let hint = "a pattern is a name in which `*` matches anything; regular expressions are not supported";
        reader.wrong(spot, node, what, hint)
    }

    fn kind() -> (String, Json) {
        ("pattern".to_owned(), json!({ "type": "string", "minLength": 1, "pattern": "^[^\\^$()\\[\\]{}|\\\\?+\\s]+$" }))
    }
}

/// A type whose values can be in a list.
pub(crate) trait Element: Value {
    /// Whether one value may stand for a list of one.
    const MAY_STAND_ALONE: bool = true;
}

impl Element for Text {}
impl Element for FilePath {}
impl Element for Pattern {}
impl Element for Choice<Algorithm> {
    const MAY_STAND_ALONE: bool = false;
}

impl<T: Element> Value for Vec<T> {
    fn read(reader: &mut Reader<'_>, spot: &Spot, node: &Node) -> Option<Vec<T>> {
        let nodes = match &node.value {
            Tree::List(nodes) => nodes.as_slice(),
            Tree::Text(_) if T::MAY_STAND_ALONE => slice::from_ref(node),
            _ => return reader.expected(spot, node, "a list of texts"),
        };
        Some(nodes.iter().filter_map(|node| T::read(reader, spot, node)).collect())
    }

    fn kind() -> (String, Json) {
        let (page, one) = T::kind();
        let list = json!({ "type": "array", "items": one });
        match T::MAY_STAND_ALONE {
            true => (format!("{page}s"), json!({ "anyOf": [list, one] })),
            false => (format!("list of {page}"), list),
        }
    }

    fn shown(&self, node: &Node) -> Json {
        let node = node.json();
        if node.is_array() { node } else { json!([node]) }
    }
}

/// Texts by name. They are shown only if they consist of references: people put secrets there.
#[derive(Debug, Clone)]
pub(crate) struct Pairs(pub Vec<(String, Text)>);

impl Value for Pairs {
    fn read(reader: &mut Reader<'_>, spot: &Spot, node: &Node) -> Option<Pairs> {
        let Tree::Table(entries) = &node.value else { return reader.expected(spot, node, "a table of texts") };
        let pairs = entries.iter().filter_map(|Entry { name, node, .. }| {
            let text = |text: String| Node { at: node.at.clone(), value: Tree::Text(text) };
            // Numbers and booleans become the text that they have in an environment.
            let node = match &node.value {
                Tree::Whole(number) => &text(number.to_string()),
                Tree::Truth(truth) => &text(truth.to_string()),
                _ => node,
            };
            let spot = Spot { key: join(&spot.key, name), at: spot.at.clone() };
            Some((name.clone(), Text::read(reader, &spot, node)?))
        });
        Some(Pairs(pairs.collect()))
    }

    fn kind() -> (String, Json) {
        let text = json!({ "type": ["string", "integer", "boolean"] });
        ("table of texts".to_owned(), json!({ "type": "object", "additionalProperties": text }))
    }

    fn lines(&self, line: Setting, out: &mut Vec<Setting>) {
        for (name, text) in &self.0 {
            let value = is_reference(text).then(|| json!(text.written));
            let hidden = value.is_none();
            let names = text.value.names().map(str::to_owned).collect();
            out.push(Setting { hidden, ..Setting::new(join(&line.key, name), value, text.spot.at.as_ref(), names) });
        }
        if self.0.is_empty() {
            out.push(Setting::new(line.key, Some(json!({})), None, vec![]));
        }
    }
}

/// Only references, with at most one word such as `Bearer` before them.
fn is_reference(text: &Text) -> bool {
    let outside = text.written.split("${").next().unwrap_or_default();
    let is_word = outside.is_empty() || outside.ends_with(' ') && outside.len() <= 8;
    text.value.names().next().is_some() && text.written.ends_with('}') && !text.written.contains(":-") && is_word
}

/// A whole number from `LEAST`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Count<const LEAST: u32>(pub u32);

impl<const LEAST: u32> Value for Count<LEAST> {
    fn read(reader: &mut Reader<'_>, spot: &Spot, node: &Node) -> Option<Count<LEAST>> {
        let number = match &node.value {
            Tree::Whole(number) => *number,
            // An option.
            Tree::Text(text) if reader.references.is_none() => text.parse().ok()?,
            _ => return reader.expected(spot, node, "a whole number"),
        };
        match u32::try_from(number) {
            Ok(count) if LEAST <= count => Some(Count(count)),
            _ => {
                let hint = format!("use {LEAST} to {}", u32::MAX);
                reader.wrong(spot, node, format!("{number} is out of range"), hint)
            }
        }
    }

    fn kind() -> (String, Json) {
        ("number".to_owned(), json!({ "type": "integer", "minimum": LEAST, "maximum": u32::MAX }))
    }

    fn shown(&self, _: &Node) -> Json {
        json!(self.0)
    }
}

impl Value for bool {
    fn read(reader: &mut Reader<'_>, spot: &Spot, node: &Node) -> Option<bool> {
        match node.value {
            Tree::Truth(truth) => Some(truth),
            _ => reader.expected(spot, node, "true or false"),
        }
    }

    fn kind() -> (String, Json) {
        ("`true`, `false`".to_owned(), json!({ "type": "boolean" }))
    }
}

/// A longer duration is a typing error, and clocks cannot add it.
const SPAN_MAX: Duration = Duration::from_secs(366 * 86_400);

impl Value for Duration {
    fn read(reader: &mut Reader<'_>, spot: &Spot, node: &Node) -> Option<Duration> {
        let span = match &node.value {
            #[expect(clippy::cast_precision_loss, reason = "no span of time has so many digits")]
            Tree::Whole(seconds) => Duration::try_from_secs_f64(*seconds as f64).ok(),
            Tree::Fraction(seconds) => Duration::try_from_secs_f64(*seconds).ok(),
            Tree::Text(text) => duration::parse(text),
            _ => return reader.expected(spot, node, "a time"),
        };
        match span {
            Some(span) if span <= SPAN_MAX => Some(span),
            Some(_) => reader.wrong(spot, node, "this is more than a year", "a number means seconds"),
            None => {
                let hint = "write \"30s\", \"5m\", \"1h30m\" or \"250ms\", or a number of seconds";
                reader.wrong(spot, node, format!("{} is not a time", node.value.quoted()), hint)
            }
        }
    }

    fn kind() -> (String, Json) {
        let text = json!({ "type": "string", "pattern": r"^\s*(([0-9.]+(ms|s|min|m|h|d))+|[0-9.]+)\s*$" });
        ("time".to_owned(), json!({ "anyOf": [text, { "type": "number", "minimum": 0 }] }))
    }

    fn shown(&self, _: &Node) -> Json {
        json!(say_span(*self))
    }
}

/// A duration as it can be written.
fn say_span(span: Duration) -> String {
    let millis = span.as_millis();
    if !millis.is_multiple_of(1000) {
        return format!("{millis}ms");
    }
    match span.as_secs() {
        0 => "0s".to_owned(),
        s if s % 86_400 == 0 => format!("{}d", s / 86_400),
        s if s % 3_600 == 0 => format!("{}h", s / 3_600),
        s if s % 60 == 0 => format!("{}m", s / 60),
        s => format!("{s}s"),
    }
}

/// A number of bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size(pub u64);

impl Value for Size {
    fn read(reader: &mut Reader<'_>, spot: &Spot, node: &Node) -> Option<Size> {
        let size = match &node.value {
            Tree::Whole(bytes) => u64::try_from(*bytes).ok(),
            Tree::Text(text) => size(text),
            _ => return reader.expected(spot, node, "a size"),
        };
        let hint = "write \"512MB\", \"1.5GB\" or \"64KiB\", or a number of bytes";
        match size {
            None | Some(0) => reader.wrong(spot, node, format!("{} is not a size", node.value.quoted()), hint),
            Some(size) => Some(Size(size)),
        }
    }

    fn kind() -> (String, Json) {
        let text = json!({ "type": "string", "pattern": r"^\s*[0-9.]+\s*([kKmMgG]([iI]?[bB])?|[bB])?\s*$" });
        ("size".to_owned(), json!({ "anyOf": [text, { "type": "integer", "minimum": 1 }] }))
    }

    fn shown(&self, _: &Node) -> Json {
        json!(self.0)
    }
}

/// `512MB`, `1.5 GiB`, `4096`.
pub(crate) fn size(text: &str) -> Option<u64> {
    let text = text.trim();
    let number = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
    let unit: f64 = match text[number..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kb" => 1e3,
        "m" | "mb" => 1e6,
        "g" | "gb" => 1e9,
        "kib" => 1024.0,
        "mib" => 1024.0 * 1024.0,
        "gib" => 1024.0 * 1024.0 * 1024.0,
        _ => return None,
    };
    let bytes = text[..number].parse::<f64>().ok()? * unit;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is in range")]
    (bytes.is_finite() && bytes < 1e15).then_some(bytes as u64)
}

/// How many processes a backend has.
impl Value for Children {
    fn read(reader: &mut Reader<'_>, spot: &Spot, node: &Node) -> Option<Children> {
        let pool = |node: &Node| match node.value {
            Tree::Whole(count @ 1..=1000) => u32::try_from(count).ok().map(Children::Pool),
            _ => None,
        };
        let children = match &node.value {
            Tree::Text(text) if text == "shared" => Some(Children::Shared),
            Tree::Text(text) if text.replace('-', "_") == "per_session" => Some(Children::PerSession),
            Tree::Table(entries) if entries.len() == 1 => node.get("pool").and_then(|entry| pool(&entry.node)),
            _ => None,
        };
        let hint = "write \"shared\", \"per_session\" or { pool = 4 }";
        children.or_else(|| reader.wrong(spot, node, "this is not a number of processes", hint))
    }

    fn kind() -> (String, Json) {
        let page = "`\"shared\"`, `\"per_session\"`, `{ pool = 4 }`".to_owned();
        let count = json!({ "pool": { "type": "integer", "minimum": 1, "maximum": 1000 } });
        let pool = json!({
            "type": "object", "additionalProperties": false, "required": ["pool"], "properties": count,
        });
        (page, json!({ "anyOf": [{ "enum": ["shared", "per_session"] }, pool] }))
    }
}

/// TCP ports from `LEAST`: a list, or `"any"`.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ports<const LEAST: u16>(pub sandbox::Ports);

impl<const LEAST: u16> Value for Ports<LEAST> {
    fn read(reader: &mut Reader<'_>, spot: &Spot, node: &Node) -> Option<Ports<LEAST>> {
        let hint = format!("write a list of numbers from {LEAST} to 65535, such as [443], or \"any\"");
        let nodes = match &node.value {
            Tree::Text(text) if text == "any" => return Some(Ports(sandbox::Ports::Any)),
            Tree::List(nodes) => nodes.as_slice(),
            // One value may stand for a list of one.
            Tree::Whole(_) => slice::from_ref(node),
            value => {
                let what = format!("expected a list of ports, not {}", value.quoted());
                return reader.wrong(spot, node, what, hint);
            }
        };
        let ports = nodes.iter().filter_map(|node| match node.value {
            Tree::Whole(number) if (i64::from(LEAST)..=65_535).contains(&number) => u16::try_from(number).ok(),
            _ => reader.wrong(spot, node, format!("{} is not a port", node.value.quoted()), &hint),
        });
        let ports: Vec<u16> = ports.collect();
        (ports.len() == nodes.len()).then_some(Ports(sandbox::Ports::Only(ports)))
    }

    fn kind() -> (String, Json) {
        let port = json!({ "type": "integer", "minimum": LEAST, "maximum": 65535 });
        let list = json!({ "type": "array", "items": port, "maxItems": RULES_MAX });
        ("ports, `\"any\"`".to_owned(), json!({ "anyOf": [list, port, { "enum": ["any"] }] }))
    }

    fn shown(&self, _: &Node) -> Json {
        match &self.0 {
            sandbox::Ports::Any => json!("any"),
            sandbox::Ports::Only(ports) => json!(ports),
        }
    }
}

/// Several tables with the same keys, by their names.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tables<T, const IS_LIST: bool>(pub Vec<(String, Set<T>)>);
/// `[key.NAME]`, in the order of the file.
pub(crate) type Named<T> = Tables<T, false>;
/// `[[key]]`
pub(crate) type Many<T> = Tables<T, true>;

impl<T: Table + Value + Default, const IS_LIST: bool> Value for Tables<T, IS_LIST> {
    const SHAPE: Shape = if IS_LIST { Shape::Many(T::SHAPE.keys()) } else { Shape::Named(T::SHAPE.keys()) };

    fn read(reader: &mut Reader<'_>, spot: &Spot, node: &Node) -> Option<Tables<T, IS_LIST>> {
        let nodes: Vec<(String, &Position, &Node)> = match &node.value {
            Tree::Table(entries) if !IS_LIST => {
                entries.iter().map(|entry| (entry.name.clone(), &entry.at, &entry.node)).collect()
            }
            Tree::List(nodes) if IS_LIST => {
                nodes.iter().enumerate().map(|(n, node)| (node.name(n), &node.at, node)).collect()
            }
            _ if !IS_LIST => return reader.expected(spot, node, "a table of tables"),
            value => {
                let hint = format!("write [[{}]] with two brackets, once for each", spot.key);
                reader.mistakes.wrong(spot, format!("expected a list of tables, not {}", value.what()), hint);
                return None;
            }
        };
        let tables = nodes.into_iter().filter_map(|(name, at, node)| {
            let spot = Spot { key: join(&spot.key, &name), at: Some(at.clone()) };
            Some((name, Set::read(reader, spot, node)?))
        });
        Some(Tables(tables.collect()))
    }

    fn kind() -> (String, Json) {
        let table = T::kind().1;
        let schema = match IS_LIST {
            true => json!({ "type": "array", "items": table }),
            false => json!({ "type": "object", "additionalProperties": table }),
        };
        (String::new(), schema)
    }

    fn shown(&self, _: &Node) -> Json {
        Json::Null
    }

    fn lines(&self, line: Setting, out: &mut Vec<Setting>) {
        self.0.iter().for_each(|(name, table)| show::table_lines(&**table, &join(&line.key, name), out));
    }

    fn merge(&mut self, later: Tables<T, IS_LIST>) {
        for (name, table) in later.0 {
            match self.0.iter_mut().find(|(known, _)| !IS_LIST && *known == name) {
                Some((_, known)) => known.merge(table),
                None => self.0.push((name, table)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_printed_as_it_can_be_written() {
        for text in ["30s", "5m", "90m", "250ms", "2d", "0s", "1500ms", "61s"] {
            let span = duration::parse(text).unwrap();
            assert_eq!(duration::parse(&say_span(span)), Some(span), "{text}");
        }
    }

    #[test]
    fn amounts_of_memory() {
        #[rustfmt::skip]
        let table = [
            ("512MB", Some(512_000_000)), ("1.5 GB", Some(1_500_000_000)), ("64KiB", Some(65_536)), ("4096", Some(4_096)),
            ("1mib", Some(1_048_576)), ("10 k", Some(10_000)), ("MB", None), ("-1MB", None), ("1TB", None), ("", None),
        ];
        for (text, wanted) in table {
            assert_eq!(size(text), wanted, "{text}");
        }
    }
}
