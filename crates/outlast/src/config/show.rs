//! `outlast config show`: every effective value and its origin. A value from the environment is shown as its reference.

use serde::Serialize;
use serde_json::{Value as Json, json};

use super::{
    Config, is_of,
    table::{Table, join},
    tree::Position,
};
use crate::cli::table::{Column, Yield, lines, room};

/// One line: the full key, its value, and its origin.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Setting {
    pub key: String,
    /// As it can be written in the file; `None` if there is no value and no default.
    pub value: Option<Json>,
    pub from: &'static str,
    /// `file:line`, or the option.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub place: Option<String>,
    /// That were replaced in it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub variables: Vec<String>,
    /// Why the value is not in force.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ignored: Option<&'static str>,
    /// It may be a secret.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub hidden: bool,
}

impl Setting {
    /// Without a place it is a default.
    pub(crate) fn new(key: String, value: Option<Json>, at: Option<&Position>, variables: Vec<String>) -> Setting {
        let from = match at {
            None => "default",
            Some(at) if at.is_option() => "option",
            Some(_) if variables.is_empty() => "file",
            Some(_) => "environment",
        };
        Setting { key, value, from, place: at.map(Position::to_string), variables, ignored: None, hidden: false }
    }

    fn origin(&self) -> String {
        let place = self.place.as_deref().unwrap_or("default");
        let variables = match self.variables.as_slice() {
            [] => String::new(),
            variables => format!(", environment {}", variables.join(", ")),
        };
        format!("{place}{variables}{}", if self.ignored.is_some() { ", ignored: not trusted" } else { "" })
    }
}

/// All values of a configuration, or those of one table if it is named.
pub(crate) fn all(config: &Config, table: Option<&str>) -> Vec<Setting> {
    let mut out = Vec::new();
    for (key, field) in config.root.fields() {
        if table.is_none_or(|table| table == key.name) {
            field.lines(key.name.to_owned(), &mut out);
        }
    }
    let ignored = config.ignored.iter().filter(|ignored| table.is_none_or(|table| is_of(ignored.table(), table)));
    out.extend(ignored.map(|ignored| Setting {
        ignored: Some("untrusted"),
        ..Setting::new(ignored.key.clone(), Some(ignored.shown()), Some(&ignored.at), vec![])
    }));
    out
}

pub(crate) fn table_lines(table: &dyn Table, path: &str, out: &mut Vec<Setting>) {
    table.fields().iter().for_each(|(key, field)| field.lines(join(path, key.name), out));
}

/// For people: a table; keys without a value and a default are left out.
pub(crate) fn table(all: &[Setting]) -> String {
    let column = |title, yields| Column { title, is_number: false, yields };
    let columns =
        [column("KEY", Yield::Last(16)), column("VALUE", Yield::End(40, 16)), column("FROM", Yield::End(40, 12))];
    let shown = all.iter().filter(|line| line.value.is_some() || line.hidden);
    let value = |line: &Setting| line.value.as_ref().map_or_else(|| "…".to_owned(), Json::to_string);
    let rows: Vec<Vec<String>> = shown.map(|line| vec![line.key.clone(), value(line), line.origin()]).collect();
    lines(&columns, &rows, room()).into_iter().map(|line| line + "\n").collect()
}

/// For programs: every key, null where there is no value.
pub(crate) fn json(all: &[Setting], config: &Config) -> Json {
    let files: Vec<String> = config.files.iter().map(|file| file.path.display().to_string()).collect();
    json!({ "files": files, "values": all, "warnings": config.warnings() })
}
