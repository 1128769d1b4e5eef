//! The sessions of the HTTP front as saved state: what their clients have told, and the events that they may have missed.
//! Responses are not part of it: open requests are waited for, and streams end and are resumed.

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    rc::Rc,
    time::Instant,
};

use serde::{Deserialize, Serialize};

use super::{Entry, HttpFront, Limits, RecordKey, Session, SessionId, session::Outcome};
use crate::{
    gateway::{Client, SavedWho, Who},
    saved::{Moment, Octets},
};

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    sessions: Vec<SavedSession>,
}

/// So many sessions have open requests. `Display` completes the sentence "... because".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Busy(usize);

impl fmt::Display for Busy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1 => f.write_str("1 session has an open request"),
            sessions => write!(f, "{sessions} sessions have open requests"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedSession {
    pub(super) client: Client,
    /// In hexadecimal.
    pub(super) id: String,
    pub(super) who: SavedWho,
    pub(super) peer: String,
    pub(super) version: String,
    pub(super) next_post: u32,
    pub(super) general_sent: u64,
    pub(super) events: Vec<SavedEvent>,
    pub(super) next_event: u64,
    pub(super) seen: Moment,
    pub(super) stored: SavedStored,
}

/// An event that is kept for resumption.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedEvent {
    pub(super) stream: u32,
    pub(super) number: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) answered: u64,
    pub(super) frame: Octets,
}

/// The record of a session, as the store has it or is to have it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedStored {
    pub(super) version: String,
    pub(super) initialize: String,
    pub(super) level: Option<String>,
    pub(super) watches: BTreeSet<String>,
    pub(super) outcome: Outcome,
    pub(super) write: u32,
    pub(super) since: Moment,
}

impl<R: Clone + PartialEq> HttpFront<R> {
    /// Why the sessions cannot be saved now. Single requests are known to the gateway.
    pub fn busy(&self) -> Option<Busy> {
        let busy = self.open_sessions().filter(|session| session.is_busy()).count();
        (busy > 0).then_some(Busy(busy))
    }

    pub fn save(&self, now: Instant) -> Result<Saved, Busy> {
        match self.busy() {
            Some(busy) => Err(busy),
            None => Ok(self.sketch(now)),
        }
    }

    /// The state without all that is under way: to be checked, not to continue with.
    pub fn sketch(&self, now: Instant) -> Saved {
        let mut sessions: Vec<SavedSession> = self.open_sessions().map(|session| session.save(now)).collect();
        sessions.sort_unstable_by_key(|session| session.client);
        Saved { sessions }
    }

    /// Continues where [`HttpFront::save`] was called. Sessions whose clients have not come back since the last start are not
    /// part of the state: the store loads them again.
    pub fn restore(
        limits: Limits,
        hash: Option<fn(SessionId) -> RecordKey>,
        saved: Saved,
        now: Instant,
    ) -> HttpFront<R> {
        let mut front = HttpFront::new(limits, hash);
        // Many sessions are of the same client.
        let mut known: HashMap<String, Rc<Who>> = HashMap::new();
        for saved in saved.sessions {
            let Some(mut session) = Session::restore(saved, now) else { continue };
            session.share_who(&mut known);
            front.sessions.insert(session.secret_id(), session.client());
            front.sessions_open += 1;
            front.events_bytes += session.events_bytes();
            front.clients.insert(session.client(), Entry::Session(Box::new(session)));
        }
        front.drop_events();
        // Deadlines are computed at the first look.
        front.due = Some(now);
        front
    }
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}
