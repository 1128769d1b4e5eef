//! Sessions whose ids were told to their clients, by id and by the key of their record. Without stored sessions there are
//! no keys.

use rustc_hash::FxHashMap;

use super::{SessionId, record::RecordKey};
use crate::gateway::Client;

#[derive(Debug)]
pub(super) struct SessionIds {
    hash: Option<fn(SessionId) -> RecordKey>,
    by_id: FxHashMap<SessionId, Client>,
    by_key: FxHashMap<RecordKey, Client>,
}

impl SessionIds {
    pub(super) fn new(hash: Option<fn(SessionId) -> RecordKey>) -> SessionIds {
        SessionIds { hash, by_id: FxHashMap::default(), by_key: FxHashMap::default() }
    }

    pub(super) fn insert(&mut self, id: SessionId, client: Client) {
        self.by_id.insert(id, client);
        if let Some(hash) = self.hash {
            self.by_key.insert(hash(id), client);
        }
    }

    pub(super) fn remove(&mut self, id: SessionId) {
        self.by_id.remove(&id);
        if let Some(hash) = self.hash {
            self.by_key.remove(&hash(id));
        }
    }

    pub(super) fn of_id(&self, id: SessionId) -> Option<Client> {
        self.by_id.get(&id).copied()
    }

    pub(super) fn of_key(&self, key: RecordKey) -> Option<Client> {
        self.by_key.get(&key).copied()
    }
}
