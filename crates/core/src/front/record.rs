//! What is stored of a session, so that a gateway that is started again can serve it: a versioned text with a checksum.
//! The driver decides where it is stored.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::{gateway::Who, json::Raw, mcp::method, message::Params};

/// Of the format. A record of another version is not read.
const VERSION: u32 = 1;
/// A session whose record would be longer is served without one.
pub const RECORD_BYTES_MAX: usize = 64 << 10;

/// By which a record is stored: a hash of the session's id, which is a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordKey(pub u128);

impl std::fmt::Display for RecordKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    pub who: Who,
    pub state: SessionState,
}

/// What a client has told in its session, as the gateway must know it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SessionState {
    /// The revision that `initialize` was answered with.
    pub version: Box<str>,
    /// The client's own `initialize`.
    pub initialize: Box<str>,
    pub level: Option<Box<str>>,
    /// Resources that it is subscribed to.
    pub watches: BTreeSet<Box<str>>,
}

/// A request that changes what is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    Level(Box<str>),
    Watch(Box<str>),
    Unwatch(Box<str>),
}

impl Change {
    /// Nothing for nearly every request.
    pub fn of(method: &str, params: &Params<'_>) -> Option<Change> {
        let uri = || params.uri().and_then(Raw::text).map(Into::into);
        match method {
            method::SET_LEVEL => params.level().and_then(Raw::text).map(|level| Change::Level(level.into())),
            method::SUBSCRIBE => uri().map(Change::Watch),
            method::UNSUBSCRIBE => uri().map(Change::Unwatch),
            _ => None,
        }
    }
}

impl SessionState {
    pub(super) fn apply(&mut self, change: Change) {
        match change {
            Change::Level(level) => self.level = Some(level),
            Change::Watch(uri) => drop(self.watches.insert(uri)),
            Change::Unwatch(uri) => drop(self.watches.remove(&uri)),
        }
    }
}

/// Why a record cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BadRecord {
    Damaged,
    /// Of a format that this outlast does not know.
    Version(u32),
    /// Stored under another key than it was written for.
    Foreign,
    TooLong,
}

impl std::fmt::Display for BadRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BadRecord::Damaged => f.write_str("it is damaged"),
            BadRecord::Version(version) => write!(f, "it has version {version}, which this outlast does not know"),
            BadRecord::Foreign => f.write_str("it was written for another session"),
            BadRecord::TooLong => write!(f, "it is longer than {RECORD_BYTES_MAX} bytes"),
        }
    }
}

/// The first line.
#[derive(Serialize, Deserialize)]
struct Head {
    version: u32,
    /// Of key and body.
    sum: String,
}

/// The second line. Members that are not known are ignored.
#[derive(Serialize, Deserialize)]
struct Body<'a> {
    #[serde(borrow)]
    name: std::borrow::Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    profile: Option<String>,
    revision: Box<str>,
    initialize: Box<str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    level: Option<Box<str>>,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    subscriptions: BTreeSet<Box<str>>,
}

impl Record {
    pub fn encode(&self, key: RecordKey) -> Result<Vec<u8>, BadRecord> {
        let body = Body {
            name: self.who.name.as_str().into(),
            role: self.who.role.clone(),
            profile: self.who.profile.clone(),
            revision: self.state.version.clone(),
            initialize: self.state.initialize.clone(),
            level: self.state.level.clone(),
            subscriptions: self.state.watches.clone(),
        };
        let body = serde_json::to_string(&body).map_err(|_| BadRecord::Damaged)?;
        let head = Head { version: VERSION, sum: sum(key, &body) };
        let head = serde_json::to_string(&head).map_err(|_| BadRecord::Damaged)?;
        let text = format!("{head}\n{body}\n");
        if text.len() > RECORD_BYTES_MAX { Err(BadRecord::TooLong) } else { Ok(text.into_bytes()) }
    }

    pub fn decode(key: RecordKey, bytes: &[u8]) -> Result<Record, BadRecord> {
        if bytes.len() > RECORD_BYTES_MAX {
            return Err(BadRecord::TooLong);
        }
        let text = std::str::from_utf8(bytes).map_err(|_| BadRecord::Damaged)?;
        let (head, body) = text.split_once('\n').ok_or(BadRecord::Damaged)?;
        let body = body.strip_suffix('\n').ok_or(BadRecord::Damaged)?;
        let head: Head = serde_json::from_str(head).map_err(|_| BadRecord::Damaged)?;
        if head.version != VERSION {
            return Err(BadRecord::Version(head.version));
        }
        if head.sum != sum(key, body) {
            let keyless = head.sum.split_once('-').map(|(_, of_body)| of_body);
            let is_whole = keyless == sum(key, body).split_once('-').map(|(_, of_body)| of_body);
            return Err(if is_whole { BadRecord::Foreign } else { BadRecord::Damaged });
        }
        let body: Body<'_> = serde_json::from_str(body).map_err(|_| BadRecord::Damaged)?;
        let who = Who { name: body.name.into_owned(), role: body.role, profile: body.profile };
        let state = SessionState {
            version: body.revision,
            initialize: body.initialize,
            level: body.level,
            watches: body.subscriptions,
        };
        Ok(Record { who, state })
    }
}

/// Against damage, not against forgery: the files belong to this user.
fn sum(key: RecordKey, body: &str) -> String {
    let fnv = |bytes: &[u8]| {
        bytes
            .iter()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
    };
    format!("{:016x}-{:016x}", fnv(&key.0.to_le_bytes()), fnv(body.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let who = Who { name: "anna".into(), role: Some("ops".into()), profile: None };
        let state = SessionState {
            version: "2025-11-25".into(),
            initialize: r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{}}"#.into(),
            level: Some("info".into()),
            watches: ["file:///a", "file:///b"].map(Into::into).into(),
        };
        Record { who, state }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let key = RecordKey(7);
        let text = record().encode(key).unwrap();
        assert_eq!(Record::decode(key, &text), Ok(record()));
        assert_eq!(Record::decode(RecordKey(8), &text), Err(BadRecord::Foreign));
    }

    #[test]
    fn a_record_that_is_not_as_it_was_written_is_refused() {
        let key = RecordKey(7);
        let text = String::from_utf8(record().encode(key).unwrap()).unwrap();
        let table = [
            (text.replace("anna", "bert"), BadRecord::Damaged),
            (text.replace("\"version\":1", "\"version\":2"), BadRecord::Version(2)),
            (text[..text.len() - 2].to_owned(), BadRecord::Damaged),
            (text.trim_end().to_owned(), BadRecord::Damaged),
            (String::new(), BadRecord::Damaged),
            ("{}\n{}\n".to_owned(), BadRecord::Damaged),
            ("\u{1F980}".repeat(RECORD_BYTES_MAX), BadRecord::TooLong),
        ];
        for (text, why) in table {
            assert_eq!(Record::decode(key, text.as_bytes()), Err(why), "{text:.80}");
        }
        assert_eq!(Record::decode(key, &[0xff, 0xfe, b'\n']), Err(BadRecord::Damaged));
        // Every single byte counts.
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 1;
            assert!(Record::decode(key, &bytes).is_err(), "byte {at}");
        }
    }

    #[test]
    fn members_that_are_not_known_are_ignored() {
        let key = RecordKey(7);
        let text = String::from_utf8(record().encode(key).unwrap()).unwrap();
        let (_, body) = text.split_once('\n').unwrap();
        let body = body.trim_end().replacen('{', r#"{"home":"replica-1","#, 1);
        let text = format!("{{\"version\":1,\"sum\":\"{}\",\"new\":[]}}\n{body}\n", sum(key, &body));
        assert_eq!(Record::decode(key, text.as_bytes()), Ok(record()));
    }

    #[test]
    fn a_record_is_bounded() {
        let mut long = record();
        long.state.watches.insert("x".repeat(RECORD_BYTES_MAX).into());
        assert_eq!(long.encode(RecordKey(1)), Err(BadRecord::TooLong));
    }
}
