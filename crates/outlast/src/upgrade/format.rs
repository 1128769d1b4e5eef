//! The state of an instance as a text with a version. A program reads the versions that it knows: its own, and older ones
//! by a migration for each step. A newer version is refused, and the running program continues.

use std::{collections::BTreeMap, sync::OnceLock};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::OWN_VERSION;

/// Turns the state of one version into that of the next.
type Migration = fn(&mut Value);

#[derive(Debug)]
struct Format {
    version: u32,
    /// The first one is for version 1.
    migrations: &'static [Migration],
    /// Members beside the state that this version has.
    members: &'static [&'static str],
}

/// What this program writes.
const CURRENT: Format = Format { version: 1, migrations: &[], members: &[] };

/// What the next one would write, for tests of a migration.
const NEXT: Format = Format {
    version: 2,
    migrations: &[|state| state["added_in_2"] = json!("by a migration")],
    members: &["added_in_2"],
};

static FORMAT: OnceLock<&Format> = OnceLock::new();

fn format() -> &'static Format {
    FORMAT.get_or_init(|| &CURRENT)
}

/// This process writes and reads the format of the next version. Called before any other function of this module.
pub(crate) fn use_next() {
    let _ = FORMAT.set(&NEXT);
}

/// The version of the format, for records.
pub(crate) fn version() -> u32 {
    format().version
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    Mcp,
    /// The thin client of `outlast mcp --share`.
    SharedClient,
    /// The hub of `outlast mcp --share`.
    Hub,
    Gateway,
    Session,
}

#[derive(Serialize)]
struct Written<'a, T> {
    version: u32,
    outlast: &'a str,
    kind: Kind,
    #[serde(flatten)]
    members: BTreeMap<&'a str, &'a str>,
    state: &'a T,
}

/// What is known of a state without reading all of it.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Header {
    /// Of the format.
    pub version: u32,
    /// The version of the program that wrote it.
    pub outlast: String,
    pub kind: Kind,
}

#[derive(Deserialize)]
struct Read<T> {
    state: T,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unreadable {
    #[error("the state has version {found}, and this program reads versions up to {known}")]
    Newer { found: u32, known: u32 },
    #[error("the state is of another kind of instance")]
    OtherKind,
    #[error("the state cannot be read: {0}")]
    Wrong(String),
}

impl From<serde_json::Error> for Unreadable {
    fn from(error: serde_json::Error) -> Unreadable {
        Unreadable::Wrong(error.to_string())
    }
}

pub(crate) fn write<T: Serialize>(kind: Kind, state: &T) -> Vec<u8> {
    write_as(format(), kind, state)
}

fn write_as<T: Serialize>(format: &Format, kind: Kind, state: &T) -> Vec<u8> {
    let members = format.members.iter().map(|member| (*member, "by its own version")).collect();
    let written = Written { version: format.version, outlast: OWN_VERSION, kind, members, state };
    serde_json::to_vec(&written).expect("a state is always JSON")
}

pub(crate) fn read<T: DeserializeOwned>(kind: Kind, bytes: &[u8]) -> Result<(Header, T), Unreadable> {
    read_as(format(), kind, bytes)
}

fn read_as<T: DeserializeOwned>(format: &Format, kind: Kind, bytes: &[u8]) -> Result<(Header, T), Unreadable> {
    let header: Header = serde_json::from_slice(bytes)?;
    if header.version > format.version {
        return Err(Unreadable::Newer { found: header.version, known: format.version });
    }
    if header.kind != kind {
        return Err(Unreadable::OtherKind);
    }
    let migrations = (header.version as usize).checked_sub(1).and_then(|done| format.migrations.get(done..));
    let migrations = migrations.ok_or_else(|| Unreadable::Wrong("its version is unknown".to_owned()))?;
    if migrations.is_empty() && format.members.is_empty() {
        let Read { state } = serde_json::from_slice(bytes)?;
        return Ok((header, state));
    }
    let mut value: Value = serde_json::from_slice(bytes)?;
    migrations.iter().for_each(|migrate| migrate(&mut value));
    if let Some(missing) = format.members.iter().find(|member| value.get(**member).is_none()) {
        return Err(Unreadable::Wrong(format!("it has no `{missing}`")));
    }
    let Read { state } = from_value(&value)?;
    Ok((header, state))
}

/// Reads a part of a state by way of its text. `serde_json::from_value` would compile a second reader for every type of
/// every state, half a megabyte of code.
pub(crate) fn from_value<T: DeserializeOwned>(value: &Value) -> Result<T, Unreadable> {
    Ok(serde_json::from_slice(&serde_json::to_vec(value)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_reads_its_own_version_and_older_ones() {
        let state = vec!["a".to_owned(), "ü".to_owned()];
        let of = |format| write_as(format, Kind::Mcp, &state);
        let read = |format, bytes: &[u8]| {
            read_as::<Vec<String>>(format, Kind::Mcp, bytes).map(|(header, state)| (header.version, state))
        };
        let table = [
            // reads, wrote
            (&CURRENT, &CURRENT, Ok((1, state.clone()))),
            (&NEXT, &NEXT, Ok((2, state.clone()))),
            (&NEXT, &CURRENT, Ok((1, state.clone()))),
            (&CURRENT, &NEXT, Err(Unreadable::Newer { found: 2, known: 1 })),
        ];
        for (reads, wrote, expected) in table {
            assert_eq!(read(reads, &of(wrote)), expected, "{} reads {}", reads.version, wrote.version);
        }
        const FORGETFUL: Format = Format { migrations: &[|_| {}], ..NEXT };
        let missing = Unreadable::Wrong("it has no `added_in_2`".into());
        assert_eq!(read(&FORGETFUL, &of(&CURRENT)), Err(missing), "the migration is needed");
    }

    #[test]
    fn an_invalid_state_is_refused_with_a_sentence() {
        let text = r#"{"version":0,"outlast":"0.1.0","kind":"mcp","state":[]}"#;
        let table = [
            (r#"{"version":1,"outlast":"0.1.0","kind":"gateway","state":[]}"#.to_owned(), "another kind"),
            (text.to_owned(), "its version is unknown"),
            (text.replace("0,", "1,").replace("[]", "[1]"), "expected a string"),
            (text.replace("0,", "9,"), "has version 9, and this program reads versions up to 1"),
            ("{}".to_owned(), "missing field"),
            (String::new(), "EOF"),
        ];
        for (text, words) in table {
            let error = read_as::<Vec<String>>(&CURRENT, Kind::Mcp, text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
