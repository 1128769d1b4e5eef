//! Requests that a server sent to the client and that are not answered: under which id the client knows them, and which
//! generation waits. Requests of the client's are in `requests`.

use std::collections::HashMap;

use crate::message::Id;

/// A server's request to the client.
#[derive(Debug)]
pub(super) struct ServerRequest {
    pub(super) generation: u32,
    /// The id, as the server wrote it.
    pub(super) written: String,
    pub(super) id: Id,
    pub(super) token: Option<Id>,
}

/// By the id that the client knows.
#[derive(Debug, Default)]
pub(super) struct ServerRequests(HashMap<Id, ServerRequest>);

impl ServerRequests {
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Id, &ServerRequest)> {
        self.0.iter()
    }

    pub(super) fn insert(&mut self, known: Id, request: ServerRequest) {
        self.0.insert(known, request);
    }

    /// The client answered it.
    pub(super) fn answered(&mut self, known: &Id) -> Option<ServerRequest> {
        self.0.remove(known)
    }

    /// The server cancelled it: the id that the client knows.
    pub(super) fn cancelled(&mut self, generation: u32, id: &Id) -> Option<Id> {
        let is_it = |request: &ServerRequest| request.generation == generation && request.id == *id;
        let known = self.0.iter().find(|(_, request)| is_it(request)).map(|(known, _)| known.clone())?;
        self.0.remove(&known);
        Some(known)
    }

    /// The newest generation that has an open request with this progress token.
    pub(super) fn newest_with(&self, token: &Id) -> Option<u32> {
        let with_token = self.0.values().filter(|request| request.token.as_ref() == Some(token));
        with_token.map(|request| request.generation).max()
    }

    /// Forgets the requests of a generation: their ids, in order.
    pub(super) fn take_of(&mut self, generation: u32) -> Vec<Id> {
        if self.0.is_empty() {
            return Vec::new();
        }
        let mut taken: Vec<Id> =
            self.0.extract_if(|_, request| request.generation == generation).map(|(id, _)| id).collect();
        taken.sort();
        taken
    }
}
