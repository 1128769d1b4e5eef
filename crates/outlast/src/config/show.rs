//! `outlast config show`: every effective value, and where it came from.
//!
//! What came out of the environment is shown as it was referred to. Values of `env` and `headers` are shown only if they
//! are nothing but references: they are where people put secrets.

use outlast_core::{gateway::Children, sandbox::Ports};
use serde_json::{Value as Json, json};

use super::{
    Config,
    keys::{BACKEND, Key, OF_ADDRESSES, OF_COMMANDS, Shape},
    read::{Got, Section, Text, say_span},
};
use crate::table::{Column, Yield, lines, room};

/// One line: the key with all that leads to it, its value, and where it came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub key: String,
    /// As it could stand in the file; none if there is no value and no default.
    pub value: Option<Shown>,
    pub origin: Origin,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shown {
    Known(Json),
    /// It may be a secret.
    Hidden,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    Default,
    /// `file:line`
    File(String),
    /// The same, with variables put in.
    Environment(String, Vec<String>),
    Option(String),
    /// `file:line`: the value is not in force, because the user does not trust the file.
    Untrusted(String),
}

/// All values of a configuration; only those of one table, if it is named.
pub fn all(config: &Config, table: Option<&str>) -> Vec<Line> {
    let mut out = Vec::new();
    for key in config.root.keys() {
        if table.is_none_or(|table| table == key.name) {
            key_lines(&config.root, key, "", &mut out);
        }
    }
    let ignored = config.ignored.iter().filter(|ignored| {
        let of = ignored.key.split('.').next().unwrap_or_default();
        table.is_none_or(|table| super::is_of(of, table))
    });
    out.extend(ignored.map(|ignored| Line {
        key: ignored.key.clone(),
        value: Some(Shown::Known(ignored.shown())),
        origin: Origin::Untrusted(ignored.at.to_string()),
    }));
    out
}

fn section_lines(section: &Section, path: &str, out: &mut Vec<Line>) {
    let is_backend = std::ptr::eq(section.keys(), BACKEND);
    for key in section.keys() {
        // Of a command and of an address other keys are in force.
        let is_idle = is_backend
            && match section.the_text("url") {
                Some(_) => OF_COMMANDS.contains(&key.name),
                None => OF_ADDRESSES.contains(&key.name),
            };
        if !is_idle {
            key_lines(section, key, path, out);
        }
    }
}

fn key_lines(section: &Section, key: &'static Key, path: &str, out: &mut Vec<Line>) {
    let full = if path.is_empty() { key.name.to_owned() } else { format!("{path}.{}", key.name) };
    match key.shape {
        Shape::Table(_) => section_lines(&section.section(key.name), &full, out),
        Shape::Named(_) => {
            for (name, _, inner) in section.named(key.name) {
                section_lines(inner, &format!("{full}.{name}"), out);
            }
        }
        Shape::Many(_) => {
            for (n, inner) in section.many(key.name).iter().enumerate() {
                let name = inner.the_text("name").map_or_else(|| (n + 1).to_string(), |name| name.written.clone());
                section_lines(inner, &format!("{full}.{name}"), out);
            }
        }
        Shape::Pairs => {
            let pairs = section.pairs(key.name);
            for (name, text) in pairs {
                let value = if is_reference(text) { Shown::Known(json!(text.written)) } else { Shown::Hidden };
                out.push(Line { key: format!("{full}.{name}"), value: Some(value), origin: origin(text) });
            }
            if pairs.is_empty() {
                out.push(Line { key: full, value: Some(Shown::Known(json!({}))), origin: Origin::Default });
            }
        }
        _ => out.push(leaf(section, key, full)),
    }
}

fn leaf(section: &Section, key: &Key, full: String) -> Line {
    let Some(set) = section.set(key.name) else {
        let value = super::read::default(key).map(|got| Shown::Known(shown(&got)));
        return Line { key: full, value, origin: Origin::Default };
    };
    let variables = match &set.got {
        Got::Text(text) => text.variables.clone(),
        Got::Texts(texts) => texts.iter().flat_map(|text| text.variables.clone()).collect(),
        _ => vec![],
    };
    let origin = match (set.at.is_option(), variables.is_empty()) {
        (true, _) => Origin::Option(set.at.to_string()),
        (false, true) => Origin::File(set.at.to_string()),
        (false, false) => Origin::Environment(set.at.to_string(), variables),
    };
    Line { key: full, value: Some(Shown::Known(shown(&set.got))), origin }
}

fn origin(text: &Text) -> Origin {
    match text.variables.as_slice() {
        [] => Origin::File(text.at.to_string()),
        variables => Origin::Environment(text.at.to_string(), variables.to_vec()),
    }
}

/// Only references, with at most a word such as `Bearer` before them.
fn is_reference(text: &Text) -> bool {
    !text.variables.is_empty() && {
        let outside = text.written.split("${").next().unwrap_or_default();
        let rest = text.written.rsplit('}').next().unwrap_or_default();
        let has_default = text.written.contains(":-");
        rest.is_empty() && !has_default && (outside.is_empty() || outside.ends_with(' ') && outside.len() <= 8)
    }
}

fn shown(got: &Got) -> Json {
    match got {
        Got::Text(text) => json!(text.written),
        Got::Texts(texts) => texts.iter().map(|text| json!(text.written)).collect(),
        Got::Patterns(patterns) => patterns.iter().map(|pattern| json!(pattern.0)).collect(),
        Got::Count(count) | Got::Size(count) => json!(count),
        Got::Truth(truth) => json!(truth),
        Got::Span(span) => json!(say_span(*span)),
        Got::Children(Children::Shared) => json!("shared"),
        Got::Children(Children::PerSession) => json!("per_session"),
        Got::Children(Children::Pool(count)) => json!({ "pool": count }),
        Got::Ports(Ports::Any) => json!("any"),
        Got::Ports(Ports::Only(ports)) => json!(ports),
        Got::Pairs(_) | Got::Section(_) | Got::Named(_) | Got::Many(_) => Json::Null,
    }
}

/// For people: a table; what is unset and has no default is left out.
pub fn table(all: &[Line]) -> String {
    let column = |title, yields| Column { title, is_number: false, yields };
    let columns =
        [column("KEY", Yield::Last(16)), column("VALUE", Yield::End(40, 16)), column("FROM", Yield::End(40, 12))];
    let rows: Vec<Vec<String>> = all
        .iter()
        .filter_map(|line| {
            let value = match line.value.as_ref()? {
                Shown::Known(value) => value.to_string(),
                Shown::Hidden => "…".to_owned(),
            };
            Some(vec![line.key.clone(), value, words(&line.origin)])
        })
        .collect();
    lines(&columns, &rows, room()).into_iter().map(|line| line + "\n").collect()
}

fn words(origin: &Origin) -> String {
    match origin {
        Origin::Default => "default".to_owned(),
        Origin::File(place) | Origin::Option(place) => place.clone(),
        Origin::Environment(place, variables) => format!("{place}, environment {}", variables.join(", ")),
        Origin::Untrusted(place) => format!("{place}, ignored: not trusted"),
    }
}

/// For programs: everything, null where there is no value.
pub fn json(all: &[Line], config: &Config) -> Json {
    let values: Vec<Json> = all
        .iter()
        .map(|line| {
            let (value, is_hidden) = match &line.value {
                Some(Shown::Known(value)) => (value.clone(), false),
                Some(Shown::Hidden) => (Json::Null, true),
                None => (Json::Null, false),
            };
            let mut object = json!({ "key": line.key, "value": value });
            match &line.origin {
                Origin::Default => object["from"] = json!("default"),
                Origin::File(place) => (object["from"], object["place"]) = (json!("file"), json!(place)),
                Origin::Option(option) => (object["from"], object["place"]) = (json!("option"), json!(option)),
                Origin::Environment(place, variables) => {
                    (object["from"], object["place"]) = (json!("environment"), json!(place));
                    object["variables"] = json!(variables);
                }
                Origin::Untrusted(_) => {}
            }
            if let Origin::Untrusted(place) = &line.origin {
                (object["from"], object["place"], object["ignored"]) =
                    (json!("file"), json!(place), json!("untrusted"));
            }
            if is_hidden {
                object["hidden"] = json!(true);
            }
            object
        })
        .collect();
    let files: Vec<String> = config.files.iter().map(|file| file.path.display().to_string()).collect();
    json!({ "files": files, "values": values, "warnings": config.warnings() })
}
