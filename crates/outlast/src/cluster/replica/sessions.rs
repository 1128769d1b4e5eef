//! Sessions of a replica in a cluster: their records in NATS, and which replica serves a request that names one.

use std::{
    collections::VecDeque,
    future::poll_fn,
    task::{Context, Poll, Waker},
    time::Instant,
};

use bytes::Bytes;
use outlast_core::{
    cluster::homes::{self, Home, Outcome},
    front::record::{Record, RecordKey},
    gateway::Who,
};

use super::{Bucket, Check, Expected, Heard, Purpose, Replica, SharedReplica, nats};
use crate::gateway::session_store::{SessionStore, StoreEvent};

/// A record that is being written, and those that wait for it: a write must expect the revision of the one before.
pub(super) struct SessionWrite {
    client: u64,
    write: u32,
    waiting: VecDeque<(u64, u32, Record)>,
    /// The record is deleted after all writes.
    is_ended: bool,
}

/// A request that waits to learn which replica serves its session.
#[derive(Default)]
pub(super) struct Resolution {
    outcome: Option<Outcome>,
    waker: Option<Waker>,
}

/// Which replica serves the session of this key, for this client.
pub(crate) async fn resolve(shared: &SharedReplica, key: RecordKey, who: &Who) -> Outcome {
    {
        let mut replica = shared.borrow_mut();
        // The task of a connection may run first after a pause.
        replica.notice_pause();
        if replica.homes.is_here(key) {
            return Outcome::Here;
        }
    }
    let mut waiting = Waiting { shared, ticket: 0 };
    {
        let mut replica = shared.borrow_mut();
        waiting.ticket = replica.next_ticket;
        replica.next_ticket += 1;
        replica.resolutions.insert(waiting.ticket, Resolution::default());
        replica.home_event(homes::Event::Asked { ticket: waiting.ticket, key, who: who.clone() });
    }
    poll_fn(|cx| {
        let mut replica = shared.borrow_mut();
        let Some(resolution) = replica.resolutions.get_mut(&waiting.ticket) else {
            return Poll::Ready(Outcome::Unavailable);
        };
        match resolution.outcome.take() {
            Some(outcome) => Poll::Ready(outcome),
            None => {
                resolution.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    })
    .await
}

/// Forgets the question if the connection of the request is gone.
struct Waiting<'a> {
    shared: &'a SharedReplica,
    ticket: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.shared.borrow_mut().resolutions.remove(&self.ticket);
    }
}

impl Replica {
    pub(super) fn home_event(&mut self, event: homes::Event) {
        let mut actions = Vec::new();
        self.homes.handle(event, Instant::now(), &mut actions);
        for action in actions {
            match action {
                homes::Action::Read { key, number } => {
                    let ticket = self.ticket(Purpose::HomeRead { key, number });
                    self.nats.read(Bucket::Sessions, &key.to_string(), ticket);
                }
                homes::Action::Take { key, number, expected, record, home } => {
                    let ticket = self.ticket(Purpose::HomeTake { key, number });
                    match homes::encode(key, &record, &home) {
                        Ok(value) => {
                            let expected = Expected::Revision(expected);
                            self.nats.write(Bucket::Sessions, &key.to_string(), expected, value.into(), ticket);
                        }
                        Err(_) => self.was_written(ticket, nats::Written::Unknown("it is too long".to_owned())),
                    }
                }
                homes::Action::Check { instance } => {
                    let now = Instant::now();
                    self.checks.entry(instance).or_insert(Check { since: now, next: Some(now) });
                }
                homes::Action::Answer { ticket, outcome } => {
                    if let Some(resolution) = self.resolutions.get_mut(&ticket) {
                        resolution.outcome = Some(outcome);
                        resolution.waker.take().into_iter().for_each(Waker::wake);
                    }
                }
                homes::Action::Drop { key } => self.hear(Heard::SessionMoved { key }),
            }
        }
        self.wake_task();
    }

    /// The replica that was taken for the home of a session says that it is not.
    pub(crate) fn home_refused(&mut self, key: RecordKey, by: &Home) {
        self.home_event(homes::Event::Refused { key, by: by.instance });
    }

    /// A session that counts as open here is not: the request that was to open it has left.
    pub(crate) fn not_opened(&mut self, key: RecordKey) {
        self.home_event(homes::Event::Unopened { key });
    }

    /// A session that was to be opened from its record is not open here.
    pub(crate) fn not_restored(&mut self, key: RecordKey) {
        self.home_event(homes::Event::Closed { key });
    }

    // ---- records --------------------------------------------------------------------------------------------------

    fn put_session(&mut self, client: u64, key: RecordKey, write: u32, record: Record) {
        if let Some(running) = self.writes.get_mut(&key) {
            return running.waiting.push_back((client, write, record));
        }
        let home = Home { name: self.name.clone(), instance: self.instance };
        let value = match homes::encode(key, &record, &home) {
            Ok(value) => value,
            Err(why) => {
                self.hear(Heard::Note(format!("a session is served by this replica only: its record {why}")));
                return self.store_event(StoreEvent::Written { client, write, is_ok: false });
            }
        };
        self.writes.insert(key, SessionWrite { client, write, waiting: VecDeque::new(), is_ended: false });
        let expected = match self.homes.revision(key) {
            Some(revision) => Expected::Revision(revision),
            None => {
                // Until it is written, the session is known to this replica only.
                self.home_event(homes::Event::Opened { key, revision: None });
                Expected::Absent
            }
        };
        let ticket = self.ticket(Purpose::Session { key });
        self.nats.write(Bucket::Sessions, &key.to_string(), expected, Bytes::from(value), ticket);
        self.wake_task();
    }

    pub(super) fn session_written(&mut self, key: RecordKey, result: nats::Written) {
        let Some(SessionWrite { client, write, waiting, is_ended }) = self.writes.remove(&key) else { return };
        let is_ok = matches!(result, nats::Written::Done(_));
        if !is_ended {
            match result {
                nats::Written::Done(revision) => self.home_event(homes::Event::Stored { key, revision }),
                nats::Written::Conflict => self.home_event(homes::Event::Conflicted { key }),
                // The next write finds out.
                nats::Written::Unknown(_) => {}
            }
        }
        self.store_event(StoreEvent::Written { client, write, is_ok });
        let mut waiting = waiting;
        if let Some((client, write, record)) = waiting.pop_front() {
            self.put_session(client, key, write, record);
            if let Some(running) = self.writes.get_mut(&key) {
                running.waiting = waiting;
                running.is_ended = is_ended;
            }
        } else if is_ended {
            self.nats.delete(Bucket::Sessions, &key.to_string(), None);
        }
    }

    fn remove_session(&mut self, key: RecordKey) {
        self.home_event(homes::Event::Closed { key });
        match self.writes.get_mut(&key) {
            Some(running) => running.is_ended = true,
            None => self.nats.delete(Bucket::Sessions, &key.to_string(), None),
        }
        self.wake_task();
    }

    pub(super) fn store_event(&mut self, event: StoreEvent) {
        self.store_events.push_back(event);
        if let Some(waker) = self.store_waker.take() {
            waker.wake();
        }
    }
}

/// The records of sessions in NATS, where every replica can read them.
pub(crate) struct ClusterStore(pub(crate) SharedReplica);

impl SessionStore for ClusterStore {
    fn put(&mut self, client: u64, key: RecordKey, write: u32, record: &Record) {
        self.0.borrow_mut().put_session(client, key, write, record.clone());
    }

    fn remove(&mut self, key: RecordKey) {
        self.0.borrow_mut().remove_session(key);
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<StoreEvent> {
        let mut replica = self.0.borrow_mut();
        match replica.store_events.pop_front() {
            Some(event) => Poll::Ready(event),
            None => {
                replica.store_waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    fn is_busy(&self) -> bool {
        let replica = self.0.borrow();
        !replica.writes.is_empty() || !replica.store_events.is_empty()
    }

    fn close(&mut self) {}
}
