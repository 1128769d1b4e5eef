//! What clients were told, what hosts did and what was written: shows which promise is broken.

use std::collections::{BTreeMap, BTreeSet};

use outlast_core::{
    front::record::{Record, RecordKey, SessionState},
    gateway::Who,
};

#[derive(Debug, Default)]
pub(super) struct Ledger {
    pub(super) sessions: BTreeMap<RecordKey, Session>,
    /// Calls of backends that a host executed.
    executed: BTreeSet<u64>,
    /// Calls that were answered.
    pub(super) answered: BTreeSet<u64>,
    /// What happened, so that a test sees that the world is not empty.
    pub(super) taken: u64,
    pub(super) hosts: u64,
    pub(super) published: u64,
    pub(super) served: u64,
}

/// A session as its client knows it.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) who: Who,
    /// `initialize` was answered after its record was stored.
    pub(super) is_stored: bool,
    pub(super) is_deleted: bool,
    /// The last level whose request was answered, and the last that was asked for.
    pub(super) level: u64,
    pub(super) level_asked: u64,
    /// The last request was answered. Only looked at when there are no more faults.
    pub(super) is_served: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) key: RecordKey,
    pub(super) who: Who,
    pub(super) what: What,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    Call,
    SetLevel(u64),
    Delete,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reply {
    Served,
    NotFound,
    /// A status that says to try again, or a broken connection.
    TryAgain,
}

pub(super) fn who(name: &str) -> Who {
    Who { name: name.into(), role: None, profile: None }
}

pub(super) fn record(who: &Who, level: u64) -> Record {
    let state = SessionState {
        version: "2025-11-25".into(),
        initialize: "{}".into(),
        level: Some(level.to_string().into()),
        watches: BTreeSet::new(),
    };
    Record { who: who.clone(), state }
}

pub(super) fn level(record: &Record) -> u64 {
    record.state.level.as_ref().and_then(|level| level.parse().ok()).expect("a record of this world has a level")
}

impl Ledger {
    pub(super) fn opened(&mut self, key: RecordKey, who: Who, is_stored: bool) {
        let session = Session { who, is_stored, is_deleted: false, level: 0, level_asked: 0, is_served: false };
        self.sessions.insert(key, session);
    }

    pub(super) fn replied(&mut self, request: &Request, reply: Reply) -> Result<(), String> {
        let Some(session) = self.sessions.get_mut(&request.key) else { return Ok(()) };
        let is_owner = session.who == request.who;
        match reply {
            Reply::Served if !is_owner => Err(format!("{request:?}: served to another principal")),
            Reply::NotFound if is_owner && session.is_stored && !session.is_deleted => {
                Err(format!("{request:?}: the session is lost"))
            }
            Reply::Served => {
                self.served += 1;
                session.is_served = true;
                if let What::SetLevel(level) = request.what {
                    session.level = session.level.max(level);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// A session is opened from its record.
    pub(super) fn restored(&mut self, key: RecordKey, record: &Record) -> Result<(), String> {
        self.taken += 1;
        let Some(session) = self.sessions.get(&key) else { return Ok(()) };
        let level = level(record);
        match record.who == session.who && (session.level..=session.level_asked).contains(&level) {
            true => Ok(()),
            false => Err(format!("{key} is restored from {record:?}, but is {session:?}")),
        }
    }

    /// A record of the session is stored.
    pub(super) fn stored(&self, key: RecordKey, record: &Record) -> Result<(), String> {
        let Some(session) = self.sessions.get(&key) else { return Ok(()) };
        match record.who == session.who && session.level <= level(record) {
            true => Ok(()),
            false => Err(format!("{key} is stored as {record:?}, but is {session:?}")),
        }
    }

    pub(super) fn execute(&mut self, call: u64) -> Result<(), String> {
        match self.executed.insert(call) {
            true => Ok(()),
            false => Err(format!("call {call} is executed twice")),
        }
    }
}
