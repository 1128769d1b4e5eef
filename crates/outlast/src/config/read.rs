//! A tree against the list of keys: every value read as what its key wants, every mistake noted.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use outlast_core::{
    gateway::{Children, Pattern},
    sandbox::Ports,
    secret::{Part, Resolved},
};

use crate::gateway::listen::address;

use super::{
    keys::{Key, Shape},
    mistake::{Mistake, Mistakes, did_you_mean},
    reference::{Reference, References},
    tree::{Entry, File, Node, Place, Value},
};
use crate::duration;

/// A table that was read: only keys that it may have, each with a value of the right shape.
#[derive(Debug, Clone)]
pub struct Section {
    keys: &'static [Key],
    /// Its name, with all that leads to it.
    pub path: String,
    /// Of the table itself; nothing if it stands in no file.
    pub at: Option<Place>,
    sets: BTreeMap<&'static str, Set>,
    /// Something in it could not be read, so nobody can say what is missing.
    pub is_broken: bool,
}

/// One value that was set, and where.
#[derive(Debug, Clone)]
pub struct Set {
    pub at: Place,
    pub got: Got,
}

#[derive(Debug, Clone)]
pub enum Got {
    Text(Text),
    Texts(Vec<Text>),
    Patterns(Vec<Pattern>),
    Pairs(Vec<(String, Text)>),
    Count(u64),
    Truth(bool),
    Span(Duration),
    Size(u64),
    Children(Children),
    Ports(Ports),
    Section(Section),
    Named(Vec<(String, Place, Section)>),
    Many(Vec<Section>),
}

/// A text, with what stood in the file: where something was put in from the environment, only that may be shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    pub at: Place,
    pub value: String,
    pub written: String,
    /// Variables of the environment that are in it.
    pub variables: Vec<String>,
    /// Where these are in the value.
    pub parts: Vec<Part>,
}

impl Text {
    /// The value, which knows what of it must not be shown.
    pub fn resolved(&self) -> Resolved {
        Resolved::new(self.value.clone(), self.parts.clone())
    }
}

impl Section {
    pub fn empty(keys: &'static [Key]) -> Section {
        Section { keys, path: String::new(), at: None, sets: BTreeMap::new(), is_broken: false }
    }

    pub fn keys(&self) -> &'static [Key] {
        self.keys
    }

    pub fn set(&self, name: &str) -> Option<&Set> {
        debug_assert!(self.keys.iter().any(|key| key.name == name), "`{name}` is in the list of keys");
        self.sets.get(name)
    }

    /// Where a value was set, or else the table.
    pub fn place(&self, name: &str) -> Option<Place> {
        self.set(name).map(|set| set.at.clone()).or_else(|| self.at.clone())
    }

    /// What was said on the command line.
    pub fn put(&mut self, name: &'static str, at: Place, got: Got) {
        debug_assert!(self.keys.iter().any(|key| key.name == name), "`{name}` is in the list of keys");
        self.sets.insert(name, Set { at, got });
    }

    /// Puts in what another file says of the same table; the later file has the last word.
    pub fn merge(&mut self, later: Section) {
        self.at = later.at.or(self.at.take());
        self.is_broken |= later.is_broken;
        for (name, set) in later.sets {
            match (self.sets.get_mut(name), set) {
                (Some(Set { got: Got::Section(mine), .. }), Set { got: Got::Section(theirs), .. }) => {
                    mine.merge(theirs)
                }
                (Some(Set { got: Got::Named(mine), .. }), Set { got: Got::Named(theirs), .. }) => {
                    for (name, at, section) in theirs {
                        match mine.iter_mut().find(|(known, ..)| *known == name) {
                            Some((_, _, known)) => known.merge(section),
                            None => mine.push((name, at, section)),
                        }
                    }
                }
                (Some(Set { got: Got::Many(mine), .. }), Set { got: Got::Many(theirs), .. }) => mine.extend(theirs),
                (_, set) => {
                    self.sets.insert(name, set);
                }
            }
        }
    }

    pub fn text(&self, name: &str) -> Option<String> {
        self.the_text(name).map(|text| text.value.clone()).or_else(|| match self.default(name)? {
            Got::Text(text) => Some(text.value),
            _ => None,
        })
    }

    pub fn the_text(&self, name: &str) -> Option<&Text> {
        match &self.set(name)?.got {
            Got::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A path as it counts from the directory of its file; none if it was not set.
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        self.the_text(name).map(beside)
    }

    pub fn texts(&self, name: &str) -> Vec<Text> {
        match self.set(name).map(|set| &set.got) {
            Some(Got::Texts(texts)) => texts.clone(),
            _ => vec![],
        }
    }

    pub fn values(&self, name: &str) -> Vec<String> {
        self.texts(name).into_iter().map(|text| text.value).collect()
    }

    pub fn patterns(&self, name: &str) -> Vec<Pattern> {
        match self.set(name).map(|set| set.got.clone()).or_else(|| self.default(name)) {
            Some(Got::Patterns(patterns)) => patterns,
            _ => vec![],
        }
    }

    pub fn pairs(&self, name: &str) -> &[(String, Text)] {
        match self.set(name).map(|set| &set.got) {
            Some(Got::Pairs(pairs)) => pairs,
            _ => &[],
        }
    }

    pub fn count(&self, name: &str) -> Option<u32> {
        match self.set(name).map(|set| set.got.clone()).or_else(|| self.default(name))? {
            Got::Count(count) => u32::try_from(count).ok(),
            _ => None,
        }
    }

    pub fn truth(&self, name: &str) -> bool {
        let got = self.set(name).map(|set| set.got.clone()).or_else(|| self.default(name));
        matches!(got, Some(Got::Truth(true)))
    }

    pub fn span(&self, name: &str) -> Option<Duration> {
        match self.set(name).map(|set| set.got.clone()).or_else(|| self.default(name))? {
            Got::Span(span) => Some(span),
            _ => None,
        }
    }

    pub fn size(&self, name: &str) -> Option<u64> {
        match self.set(name).map(|set| set.got.clone()).or_else(|| self.default(name))? {
            Got::Size(size) => Some(size),
            _ => None,
        }
    }

    pub fn children(&self, name: &str) -> Children {
        match self.set(name).map(|set| &set.got) {
            Some(Got::Children(children)) => *children,
            _ => Children::Shared,
        }
    }

    pub fn ports(&self, name: &str) -> Ports {
        match self.set(name).map(|set| &set.got) {
            Some(Got::Ports(ports)) => ports.clone(),
            _ => Ports::default(),
        }
    }

    /// An empty one if it is not in the file.
    pub fn section(&self, name: &str) -> Section {
        match self.set(name).map(|set| &set.got) {
            Some(Got::Section(section)) => section.clone(),
            _ => match self.key(name).shape {
                Shape::Table(keys) => Section::empty(keys),
                _ => Section::empty(&[]),
            },
        }
    }

    pub fn named(&self, name: &str) -> &[(String, Place, Section)] {
        match self.set(name).map(|set| &set.got) {
            Some(Got::Named(named)) => named,
            _ => &[],
        }
    }

    pub fn many(&self, name: &str) -> &[Section] {
        match self.set(name).map(|set| &set.got) {
            Some(Got::Many(many)) => many,
            _ => &[],
        }
    }

    fn key(&self, name: &str) -> &'static Key {
        self.keys.iter().find(|key| key.name == name).expect("only keys of the list are asked for")
    }

    /// The default of a key, read as the file would be.
    fn default(&self, name: &str) -> Option<Got> {
        default(self.key(name))
    }
}

/// A relative path counts from the directory of the file it stands in.
pub fn beside(text: &Text) -> PathBuf {
    text.at.file.path.parent().map_or_else(|| PathBuf::from(&text.value), |dir| dir.join(&text.value))
}

pub fn default(key: &Key) -> Option<Got> {
    if key.default.is_empty() {
        return None;
    }
    let file = File { path: PathBuf::new(), shown: "the list of keys".to_owned() };
    let node = super::tree::toml(&file.into(), &format!("x = {}", key.default)).expect("a default is TOML");
    let entry = node.get("x").expect("it was just written");
    let mut mistakes = Mistakes::default();
    let nobody = |_: &str| None;
    let references = References { environment: &nobody, places: vec![] };
    let got = Reader { references: &references, mistakes: &mut mistakes }.got(key, key.name, entry);
    debug_assert!(mistakes.is_empty(), "the default of {} is right: {mistakes:?}", key.name);
    got
}

/// Reads trees; what is wrong gathers in `mistakes`.
pub struct Reader<'a> {
    pub references: &'a References<'a>,
    pub mistakes: &'a mut Mistakes,
}

impl Reader<'_> {
    /// `path` is the name of the table, with all that leads to it; empty for the file itself.
    pub fn section(&mut self, keys: &'static [Key], path: &str, node: &Node) -> Section {
        let mut section =
            Section { keys, path: path.to_owned(), at: Some(node.at.clone()), sets: BTreeMap::new(), is_broken: true };
        let Value::Table(entries) = &node.value else {
            let what = format!("a table is wanted, not {}", node.value.what());
            self.mistakes.add(Mistake::new(node.at.clone(), path, what));
            return section;
        };
        section.is_broken = false;
        for entry in entries {
            let full = join(path, &entry.name);
            let Some(key) = keys.iter().find(|key| key.name == entry.name) else {
                self.unknown(keys, path, &full, entry);
                section.is_broken = true;
                continue;
            };
            if section.sets.contains_key(key.name) {
                self.mistakes.add(Mistake::new(entry.at.clone(), full, "it is given twice"));
                continue;
            }
            match self.got(key, &full, entry) {
                Some(got) => {
                    section.sets.insert(key.name, Set { at: entry.at.clone(), got });
                }
                None => section.is_broken = true,
            }
        }
        section
    }

    fn unknown(&mut self, keys: &'static [Key], path: &str, full: &str, entry: &Entry) {
        let place = if path.is_empty() { "at the top of the file".to_owned() } else { format!("in `{path}`") };
        let mistake = Mistake::new(entry.at.clone(), full, format!("there is no such key {place}"));
        let hint = match moved(path, &entry.name) {
            Some(hint) => hint.to_owned(),
            None => did_you_mean(&entry.name, keys.iter().map(|key| key.name)),
        };
        self.mistakes.add(mistake.hint(hint));
    }

    pub fn got(&mut self, key: &Key, path: &str, entry: &Entry) -> Option<Got> {
        let node = &entry.node;
        match key.shape {
            Shape::Text | Shape::Path | Shape::Address => {
                let text = self.text(path, node)?;
                if matches!(key.shape, Shape::Address) && address::parse(&text.value).is_none() {
                    let what = format!("`{}` is no address to listen on", text.written);
                    let hint = address::FORMS;
                    self.mistakes.add(Mistake::new(node.at.clone(), path, what).hint(hint));
                    return None;
                }
                Some(Got::Text(text))
            }
            Shape::Texts | Shape::Paths => {
                // One may stand for a list of one.
                if let Value::Text(_) = node.value {
                    return self.text(path, node).map(|text| Got::Texts(vec![text]));
                }
                let texts = self.list(path, node)?.iter().filter_map(|node| self.text(path, node)).collect();
                Some(Got::Texts(texts))
            }
            Shape::Patterns => {
                let nodes = match &node.value {
                    Value::Text(_) => std::slice::from_ref(node),
                    _ => self.list(path, node)?,
                };
                Some(Got::Patterns(nodes.iter().filter_map(|node| self.pattern(path, node)).collect()))
            }
            Shape::Pairs => {
                let Value::Table(entries) = &node.value else {
                    return self.wrong(path, node, "a table of texts");
                };
                let mut pairs = Vec::new();
                for entry in entries {
                    let full = join(path, &entry.name);
                    // Numbers and truths are meant as the text they would be in an environment.
                    let node = match &entry.node.value {
                        Value::Whole(number) => Some(Value::Text(number.to_string())),
                        Value::Truth(truth) => Some(Value::Text(truth.to_string())),
                        _ => None,
                    };
                    let node = node.map(|value| Node { at: entry.node.at.clone(), value });
                    if let Some(text) = self.text(&full, node.as_ref().unwrap_or(&entry.node)) {
                        pairs.push((entry.name.clone(), text));
                    }
                }
                Some(Got::Pairs(pairs))
            }
            Shape::Count { least, most } => match node.value {
                Value::Whole(number) if u64::try_from(number).is_ok_and(|n| (least..=most).contains(&n)) => {
                    Some(Got::Count(number.unsigned_abs()))
                }
                Value::Whole(number) => {
                    let what = format!("{number} is out of range");
                    let hint = format!("it may be {least} to {most}");
                    self.mistakes.add(Mistake::new(node.at.clone(), path, what).hint(hint));
                    None
                }
                _ => self.wrong(path, node, "a whole number"),
            },
            Shape::Truth => match node.value {
                Value::Truth(truth) => Some(Got::Truth(truth)),
                _ => self.wrong(path, node, "true or false"),
            },
            Shape::Span => self.span(path, node).map(Got::Span),
            Shape::Size => self.size(path, node).map(Got::Size),
            Shape::Choice(choices) => self.choice(path, node, choices).map(Got::Text),
            Shape::Choices(choices) => {
                let nodes = self.list(path, node)?;
                Some(Got::Texts(nodes.iter().filter_map(|node| self.choice(path, node, choices)).collect()))
            }
            Shape::Children => self.children(path, node).map(Got::Children),
            Shape::Ports { least } => self.ports(path, node, least).map(Got::Ports),
            Shape::Table(keys) => Some(Got::Section(self.section(keys, path, node))),
            Shape::Named(keys) => {
                let Value::Table(entries) = &node.value else {
                    return self.wrong(path, node, "a table of tables");
                };
                let named = entries.iter().map(|entry| {
                    let section = self.section(keys, &join(path, &entry.name), &entry.node);
                    (entry.name.clone(), entry.at.clone(), section)
                });
                Some(Got::Named(named.collect()))
            }
            Shape::Many(keys) => {
                let Value::List(nodes) = &node.value else {
                    let hint = format!("write [[{path}]] with two brackets, once for each");
                    let what = format!("a list of tables is wanted, not {}", node.value.what());
                    self.mistakes.add(Mistake::new(entry.at.clone(), path, what).hint(hint));
                    return None;
                };
                let many = nodes.iter().enumerate().map(|(n, node)| {
                    // By its name, if it has one that can be read, for people count badly.
                    let name = node.get("name").and_then(|entry| match &entry.node.value {
                        Value::Text(name) => Some(name.clone()),
                        _ => None,
                    });
                    self.section(keys, &join(path, &name.unwrap_or_else(|| (n + 1).to_string())), node)
                });
                Some(Got::Many(many.collect()))
            }
        }
    }

    fn wrong<T>(&mut self, path: &str, node: &Node, wanted: &str) -> Option<T> {
        let what = format!("{wanted} is wanted, not {}", node.value.what());
        self.mistakes.add(Mistake::new(node.at.clone(), path, what));
        None
    }

    fn list<'n>(&mut self, path: &str, node: &'n Node) -> Option<&'n [Node]> {
        match &node.value {
            Value::List(nodes) => Some(nodes),
            _ => self.wrong(path, node, "a list of texts"),
        }
    }

    pub fn text(&mut self, path: &str, node: &Node) -> Option<Text> {
        let Value::Text(written) = &node.value else { return self.wrong(path, node, "a text") };
        match self.references.put_in(written) {
            Ok(Reference { value, variables, parts }) => {
                if value.contains('\0') {
                    self.mistakes.add(Mistake::new(node.at.clone(), path, "there is a NUL in it"));
                    return None;
                }
                Some(Text { at: node.at.clone(), value, written: written.clone(), variables, parts })
            }
            Err((what, hint)) => {
                self.mistakes.add(Mistake::new(node.at.clone(), path, what).hint(hint));
                None
            }
        }
    }

    fn pattern(&mut self, path: &str, node: &Node) -> Option<Pattern> {
        let Value::Text(text) = &node.value else { return self.wrong(path, node, "a text") };
        let what = if text.is_empty() {
            "a pattern is empty".to_owned()
        } else if let Some(letter) = text.chars().find(|letter| "^$()[]{}|\\?+ \t".contains(*letter)) {
            format!("`{letter}` in `{text}` means nothing here")
        } else {
            return Some(Pattern(text.clone()));
        };
        let hint = "a pattern is a name, in which `*` stands for anything; it is no regular expression";
        self.mistakes.add(Mistake::new(node.at.clone(), path, what).hint(hint));
        None
    }

    fn choice(&mut self, path: &str, node: &Node, choices: &'static [&'static str]) -> Option<Text> {
        let text = self.text(path, node)?;
        // `at_once` and `at-once` are the same word.
        let same = |choice: &&&str| choice.replace('-', "_") == text.value.replace('-', "_");
        match choices.iter().find(same) {
            Some(choice) => Some(Text { value: (*choice).to_owned(), parts: vec![], ..text }),
            None => {
                let what = format!("`{}` is none of its values", text.written);
                let hint = did_you_mean(&text.value, choices.iter().copied());
                self.mistakes.add(Mistake::new(node.at.clone(), path, what).hint(hint));
                None
            }
        }
    }

    fn children(&mut self, path: &str, node: &Node) -> Option<Children> {
        const HINT: &str = "write \"shared\", \"per_session\" or { pool = 4 }";
        let children = match &node.value {
            Value::Text(text) => match text.replace('-', "_").as_str() {
                "shared" => Some(Children::Shared),
                "per_session" => Some(Children::PerSession),
                _ => None,
            },
            Value::Table(entries) => match entries.as_slice() {
                [Entry { name, node: Node { value: Value::Whole(count @ 1..=1000), .. }, .. }] if name == "pool" => {
                    u32::try_from(*count).ok().map(Children::Pool)
                }
                _ => None,
            },
            _ => None,
        };
        if children.is_none() {
            let what = "this does not say how many processes there are";
            self.mistakes.add(Mistake::new(node.at.clone(), path, what).hint(HINT));
        }
        children
    }

    fn ports(&mut self, path: &str, node: &Node, least: u16) -> Option<Ports> {
        let hint = format!("write a list of numbers from {least} to 65535, such as [443], or \"any\"");
        let nodes = match &node.value {
            Value::Text(text) if text == "any" => return Some(Ports::Any),
            Value::List(nodes) => nodes.as_slice(),
            // One may stand for a list of one.
            Value::Whole(_) => std::slice::from_ref(node),
            _ => {
                let what = format!("a list of ports is wanted, not {}", shown(&node.value));
                self.mistakes.add(Mistake::new(node.at.clone(), path, what).hint(hint));
                return None;
            }
        };
        let mut ports = Vec::new();
        for node in nodes {
            let port = match node.value {
                Value::Whole(number) => u16::try_from(number).ok().filter(|port| least <= *port),
                _ => None,
            };
            match port {
                Some(port) => ports.push(port),
                None => {
                    let what = format!("{} is no port", shown(&node.value));
                    self.mistakes.add(Mistake::new(node.at.clone(), path, what).hint(hint.clone()));
                }
            }
        }
        (ports.len() == nodes.len()).then_some(Ports::Only(ports))
    }

    fn span(&mut self, path: &str, node: &Node) -> Option<Duration> {
        let span = match &node.value {
            #[expect(clippy::cast_precision_loss, reason = "no span of time has so many digits")]
            Value::Whole(seconds) => Duration::try_from_secs_f64(*seconds as f64).ok(),
            Value::Fraction(seconds) => Duration::try_from_secs_f64(*seconds).ok(),
            Value::Text(text) => duration::parse(text),
            _ => return self.wrong(path, node, "a span of time"),
        };
        match span {
            Some(span) if span <= SPAN_MAX => Some(span),
            Some(_) => {
                let mistake = Mistake::new(node.at.clone(), path, "this is more than a year");
                self.mistakes.add(mistake.hint("a number is one of seconds"));
                None
            }
            None => {
                let what = format!("{} is no span of time", shown(&node.value));
                let hint = "write \"30s\", \"5m\", \"1h30m\" or \"250ms\", or a number of seconds";
                self.mistakes.add(Mistake::new(node.at.clone(), path, what).hint(hint));
                None
            }
        }
    }

    fn size(&mut self, path: &str, node: &Node) -> Option<u64> {
        let size = match &node.value {
            Value::Whole(bytes) => u64::try_from(*bytes).ok(),
            Value::Text(text) => size(text),
            _ => return self.wrong(path, node, "an amount of memory"),
        };
        if size.is_none_or(|size| size == 0) {
            let what = format!("{} is no amount of memory", shown(&node.value));
            let hint = "write \"512MB\", \"1.5GB\" or \"64KiB\", or a number of bytes";
            self.mistakes.add(Mistake::new(node.at.clone(), path, what).hint(hint));
            return None;
        }
        size
    }
}

/// Longer ones are slips: nobody means them, and clocks cannot add them.
const SPAN_MAX: Duration = Duration::from_secs(366 * 86_400);

fn shown(value: &Value) -> String {
    match value {
        Value::Text(text) => format!("`{text}`"),
        Value::Whole(number) => format!("`{number}`"),
        Value::Fraction(number) => format!("`{number}`"),
        value => value.what().to_owned(),
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// What people look for under another name.
fn moved(path: &str, name: &str) -> Option<&'static str> {
    let root = path.split('.').next().unwrap_or_default();
    match (root, name) {
        ("auth", "secret" | "jwt_secret" | "hs256_secret") => {
            Some("a secret stands in no file: name the variable that holds it by `secret_env`")
        }
        ("auth", "api_key" | "token" | "value") if path.starts_with("auth.key") => {
            Some("a key stands in no file: `outlast gateway hash-key` makes the `sha256` of it")
        }
        ("", "backends" | "server" | "servers" | "mcpServers" | "mcp_servers") => Some("did you mean `[[backend]]`?"),
        ("backend", "environment") => Some("did you mean `env`?"),
        ("backend", "timeout") => Some("did you mean `call_timeout`?"),
        ("backend", "tools" | "include") => Some("did you mean `allow`?"),
        ("backend", "exclude") => Some("did you mean `deny`?"),
        ("backend", "enabled") => Some("did you mean `disabled`?"),
        _ => None,
    }
}

/// A span as it could be written.
pub fn say_span(span: Duration) -> String {
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

/// `512MB`, `1.5 GiB`, `4096`.
pub fn size(text: &str) -> Option<u64> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_said_as_it_could_be_written() {
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
