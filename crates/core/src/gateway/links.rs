//! Links: what comes up, is said and goes down on each.

use super::*;
use crate::{
    message::{self, Message},
    patience::Patience,
};

use calls::What;
use opening::Private;

#[derive(Debug)]
pub(super) struct Connection {
    pub link: Link,
    pub place: PlaceKey,
    pub phase: Phase,
    pub era: Era,
    pub version: String,
    pub has: Has,
    pub pid: Option<u32>,
    pub generation: u64,
    pub began: Instant,
    pub ready: Option<Instant>,
    /// When it was last sent or heard anything for a client.
    pub last_used: Instant,
    /// Clients' requests that it has not answered.
    pub in_flight: usize,
    /// It was started only to read what it offers; no request has needed it yet.
    pub is_probe: bool,
    /// What it said when we first asked in the era that was not its own.
    pub refused: Option<String>,
    pub fetch: lists::Fetch,
    /// If it says nothing until then, it hangs.
    pub suspected: Option<Patience>,
    /// Then another one is started beside it, and its other calls may finish.
    pub drains_if_hung: bool,
    /// The number that would have been the next when it last answered a client's request, or told of progress.
    pub answered: u64,
    /// A call was late, and nothing was answered since it was sent.
    pub is_doubted: bool,
    /// Its end is in the audit log already.
    pub is_recorded: bool,
    /// Lines that were no JSON.
    pub garbage: u64,
    /// The resources that it was asked to watch.
    pub watched: BTreeSet<String>,
    /// Our subscription to what a stateless backend has to say.
    pub listen: Option<u64>,
    /// It ended; another one is due then.
    pub listen_again: Option<Instant>,
    /// It has no subscriptions.
    pub is_deaf: bool,
    /// Calls that were taken back or late, and that it may still be at.
    pub ghosts: Vec<asks::Ghost>,
    /// The level that it was last told.
    pub level: Option<subscriptions::Level>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Phase {
    /// Not ready by then, it is stopped.
    Connecting {
        by: Instant,
    },
    Opening {
        by: Instant,
    },
    Ready,
    Draining {
        until: Instant,
    },
    Stopping {
        how: How,
    },
}

/// What a backend said that it can do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Has {
    pub tools: bool,
    pub prompts: bool,
    pub resources: bool,
    pub subscribe: bool,
    pub logging: bool,
    pub completions: bool,
    pub tasks: bool,
}

impl Has {
    pub fn list(self, kind: List) -> bool {
        match kind {
            List::Tools => self.tools,
            List::Prompts => self.prompts,
            List::Resources | List::Templates => self.resources,
        }
    }
}

impl Connection {
    pub fn new(link: Link, place: PlaceKey, generation: u64, by: Instant, now: Instant) -> Connection {
        Connection {
            link,
            place,
            phase: Phase::Connecting { by },
            era: Era::Handshake,
            version: String::new(),
            has: Has::default(),
            pid: None,
            generation,
            began: now,
            ready: None,
            last_used: now,
            in_flight: 0,
            is_probe: false,
            refused: None,
            fetch: lists::Fetch::default(),
            suspected: None,
            drains_if_hung: false,
            answered: 0,
            is_doubted: false,
            is_recorded: false,
            garbage: 0,
            watched: BTreeSet::new(),
            listen: None,
            listen_again: None,
            is_deaf: false,
            ghosts: Vec::new(),
            level: None,
        }
    }

    pub fn is_ready(&self) -> bool {
        self.phase == Phase::Ready
    }

    pub fn due(&self, owners: &BTreeMap<u32, Owner>) -> Option<Instant> {
        match self.phase {
            Phase::Connecting { by } | Phase::Opening { by } => Some(by),
            Phase::Draining { until } => Some(until),
            Phase::Ready => {
                let idle = owners.get(&self.link.backend).and_then(|owner| owner.settings.idle_stop);
                let idle = match self.place.seat {
                    Seat::Lent(_) => Some(idle.unwrap_or(loans::LOAN_IDLE).min(loans::LOAN_IDLE)),
                    _ => idle,
                };
                let idle = idle.filter(|_| self.is_idle()).map(|idle| self.last_used + idle);
                let suspected = self.suspected.as_ref().map(Patience::deadline);
                suspected.into_iter().chain(idle).chain(self.listen_again).min()
            }
            Phase::Stopping { .. } => None,
        }
    }

    /// Nobody would miss it.
    pub fn is_idle(&self) -> bool {
        self.in_flight == 0 && self.watched.is_empty() && self.fetch.is_over()
    }
}

impl Gateway {
    pub(super) fn link_up(&mut self, link: Link, pid: Option<u32>, now: Instant) {
        let Some(connection) = self.links.get_mut(&link.serial) else { return };
        connection.pid = pid;
        let Phase::Connecting { by } = connection.phase else { return };
        connection.phase = Phase::Opening { by };
        self.open_link(link.serial, now);
    }

    /// False: that was no JSON.
    pub(super) fn link_said(&mut self, link: Link, said: &[u8], now: Instant) -> bool {
        let Some(connection) = self.links.get_mut(&link.serial) else { return true };
        connection.suspected = None;
        match message::parse(said) {
            Ok(Message::Response { id, result, error }) => {
                self.answered(link.serial, said, id, result, error, now);
            }
            Ok(Message::Request { params, .. } | Message::Notification { params, .. }) if !params.has_version() => {
                connection.garbage += 1;
                return false;
            }
            Ok(Message::Request { id, method, params }) => {
                self.link_asked(link.serial, said, id, &method, &params, now);
            }
            Ok(Message::Notification { method, params }) => {
                self.link_noted(link.serial, said, &method, &params, now);
            }
            Ok(Message::Batch(members)) => {
                for member in members {
                    // A batch in a batch is none.
                    if !member.get().starts_with('[') {
                        self.link_said(link, member.get().as_bytes(), now);
                    }
                }
            }
            Ok(Message::Other) => {
                connection.garbage += 1;
                return false;
            }
            Err(unreadable) => {
                connection.garbage += 1;
                if let Some(instead) = unreadable.instead_of_response() {
                    self.link_said(link, &instead, now);
                }
                return false;
            }
        }
        true
    }

    pub(super) fn link_said_for(&mut self, link: Link, id: &Id, said: &[u8], now: Instant) {
        let key = match id {
            Id::Integer(number) => u64::try_from(*number).ok(),
            Id::Big(_) | Id::Text(_) => None,
        };
        let is_open = |call: &Call| call.link == Some(link.serial) && call.whom.is_some();
        self.said_for = key.filter(|key| self.calls.get(key).is_some_and(|call| is_open(call)));
        if self.said_for.is_some() || !self.is_said_too_late(link.serial, said) {
            // Over HTTP only JSON comes this far.
            let _ = self.link_said(link, said, now);
        }
        self.said_for = None;
    }

    /// Whether that can only have been for a call that is over: it must not reach another one's client.
    fn is_said_too_late(&mut self, serial: u64, said: &[u8]) -> bool {
        match message::parse(said) {
            Ok(Message::Request { id, method, .. }) if method != "ping" => {
                if let Some(at) = id.place(said) {
                    let raw = String::from_utf8_lossy(&said[at]);
                    let answer = message::error_line(&raw, -32800, "the call that this was for is over", None);
                    self.tell_link(serial, answer);
                }
                true
            }
            Ok(Message::Notification { method, .. }) => match &*method {
                "notifications/cancelled" | "notifications/resources/updated" => false,
                "notifications/tasks/status" | "notifications/tasks" => false,
                method => Family::of(method).is_none(),
            },
            _ => false,
        }
    }

    fn link_noted(&mut self, serial: u64, said: &[u8], method: &str, params: &message::Params<'_>, now: Instant) {
        match method {
            "notifications/progress" => self.progressed(serial, said, params, now),
            "notifications/message" => self.logged(serial, said, params, now),
            "notifications/cancelled" => self.link_cancelled(serial, params, now),
            "notifications/resources/updated" => self.resource_updated(serial, said, params),
            "notifications/tasks/status" | "notifications/tasks" => self.task_noted(serial, said, params),
            "notifications/subscriptions/acknowledged" => {}
            _ => match Family::of(method) {
                Some(family) => self.refetch(serial, family, now),
                None if methods::is_for_caller(method) => self.pass_note(serial, said, now),
                None => self.refuse_note_of_link(serial, method),
            },
        }
    }

    pub(super) fn link_down(&mut self, link: Link, how: How, stderr: String, unsent: Vec<Bytes>, now: Instant) {
        let Some(mut connection) = self.links.remove(&link.serial) else { return };
        // What we ended ended for our reason, whatever the process said in the end.
        let how = match &connection.phase {
            Phase::Stopping { how } => how.clone(),
            Phase::Draining { .. } if connection.in_flight == 0 => How::Stopped,
            _ => how,
        };
        let stderr = tail(stderr);
        if !matches!(connection.phase, Phase::Stopping { .. }) {
            connection.phase = Phase::Stopping { how: how.clone() };
        }
        // The place first, so that those who are told of the end also hear when the next try is.
        self.place_emptied(&connection, how.clone(), stderr.clone(), now);
        let unsent = losses::Unsent { era: connection.era, lines: unsent };
        self.calls_lost(link.serial, &how, &stderr, &unsent, now);
        self.drop_asks_on(link.serial);
        self.lose_tasks(link.serial);
        if self.stopping.is_some() && self.links.is_empty() && !mem::replace(&mut self.over, true) {
            self.out.push(Action::Over);
        }
    }

    /// The link takes nothing more: its place is filled again, and what is open there may still be answered.
    pub(super) fn link_failing(&mut self, link: Link, how: How, now: Instant) {
        let Some(mut connection) = self.links.remove(&link.serial) else { return };
        if !matches!(connection.phase, Phase::Draining { .. } | Phase::Stopping { .. }) {
            connection.phase = Phase::Draining { until: now + DRAIN_MAX };
            self.place_emptied(&connection, how, String::new(), now);
            connection.is_recorded = true;
            self.wake_by(now + DRAIN_MAX);
        }
        let is_quiet = connection.in_flight == 0;
        self.links.insert(link.serial, connection);
        if is_quiet {
            self.part(link.serial, How::Stopped, false, now);
        }
    }

    /// Links that are late with their handshake, that drained long enough, hang, or that nobody needs.
    pub(super) fn links_late(&mut self, now: Instant) {
        let due = |connection: &Connection| connection.due(&self.owners).is_some_and(|due| due <= now);
        let mut late: Vec<u64> =
            self.links.iter().filter(|(_, connection)| due(connection)).map(|(serial, _)| *serial).collect();
        late.sort_unstable();
        for serial in late {
            let connection = self.links.get_mut(&serial).expect("listed above");
            let is_suspect_due = connection.suspected.as_ref().is_some_and(|wait| wait.deadline() <= now);
            let is_hung = connection.suspected.as_mut().is_some_and(|wait| wait.is_over(now));
            let connection = &self.links[&serial];
            let settings = self.settings_of(connection.link);
            let start_timeout = settings.map_or(Duration::ZERO, |settings| settings.start_timeout);
            match connection.phase {
                Phase::Connecting { .. } | Phase::Opening { .. } => {
                    self.part(serial, How::HandshakeLate(start_timeout), true, now);
                }
                Phase::Draining { .. } => self.part(serial, How::Stopped, false, now),
                Phase::Ready if is_hung => self.hung(serial, now),
                // This was noticed late, and begins anew.
                Phase::Ready if is_suspect_due => self.watch_idle(serial),
                Phase::Ready if connection.listen_again.is_some_and(|at| at <= now) => self.listen_anew(serial, now),
                Phase::Ready => self.part(serial, How::Stopped, false, now),
                Phase::Stopping { .. } => {}
            }
        }
    }

    /// The last call on a link is over.
    pub(super) fn link_quiet(&mut self, serial: u64, now: Instant) {
        match self.links[&serial].phase {
            Phase::Draining { .. } => self.part(serial, How::Stopped, false, now),
            Phase::Ready if self.stopping.is_some() => self.part(serial, How::Stopped, false, now),
            Phase::Ready => {
                // One that is lent to one call after another may be waited for.
                if matches!(self.links[&serial].place.seat, Seat::Lent(_)) {
                    self.loan_over(serial, now);
                }
                self.watch_idle(serial);
            }
            _ => {}
        }
    }

    pub(super) fn watch_idle(&mut self, serial: u64) {
        if let Some(due) = self.links.get(&serial).and_then(|connection| connection.due(&self.owners)) {
            self.wake_by(due);
        }
    }

    /// A call was late. A child that says nothing at all for a while after that hangs; an HTTP backend lost one request.
    pub(super) fn suspect(&mut self, serial: u64, now: Instant) {
        let Some(connection) = self.links.get_mut(&serial) else { return };
        let is_child = self
            .owners
            .get(&connection.link.backend)
            .is_some_and(|owner| matches!(owner.settings.kind, Kind::Stdio { .. }));
        if !is_child || connection.phase != Phase::Ready || connection.suspected.is_some() {
            return;
        }
        connection.suspected = Some(Patience::new(HANG_MAX, now));
        connection.drains_if_hung = false;
        self.wake_by(now + HANG_MAX);
        // Whatever it says proves it alive; this gives it something to say. The stateless era has no ping.
        let (method, era) = match self.links[&serial].era {
            Era::Handshake => ("ping", Era::Handshake),
            Era::Stateless => ("server/discover", Era::Stateless),
        };
        self.ask_link(serial, Private::Ping, method, "", era, now);
    }

    /// The client took a call back. A child that says nothing at all after that hangs, as after a late call; it may still work on
    /// other calls.
    pub(super) fn suspect_after_cancel(&mut self, serial: u64, now: Instant) {
        let is_suspected = |connection: &Connection| connection.suspected.is_some();
        if self.links.get(&serial).is_some_and(is_suspected) {
            return;
        }
        self.suspect(serial, now);
        if let Some(connection) = self.links.get_mut(&serial) {
            connection.drains_if_hung = connection.suspected.is_some();
        }
    }

    /// A call was late, and so was everything else since then. That it still answers a ping is not what it is there for:
    /// another one comes up beside it. One that is slow at one thing and does others is left alone.
    pub(super) fn doubt(&mut self, serial: u64, key: u64) {
        if let Some(connection) = self.links.get_mut(&serial) {
            connection.is_doubted = connection.answered <= key;
        }
    }

    /// What came of the ping.
    pub(super) fn pinged(&mut self, serial: u64, now: Instant) {
        let Some(connection) = self.links.get_mut(&serial) else { return };
        let place = connection.place;
        if !mem::take(&mut connection.is_doubted) || !connection.is_ready() || self.stopping.is_some() {
            return;
        }
        let name = self.owner_name(place.backend).to_owned();
        if self.may_replace(place, now) && self.replace(place, now) {
            self.places.get_mut(&place).expect("it was just replaced").is_doubted = true;
            self.note(format!("{name}: lives, and answered no call since one that was late; it is replaced"));
        }
    }

    /// One that is found wanting at every look must not be replaced at every look.
    fn may_replace(&mut self, place: PlaceKey, now: Instant) -> bool {
        let Some(state) = self.places.get_mut(&place) else { return false };
        let is_soon = state.replaced_at.is_some_and(|last| now.saturating_duration_since(last) < REPLACE_GAP);
        if !is_soon {
            state.replaced_at = Some(now);
        }
        !is_soon
    }

    fn hung(&mut self, serial: u64, now: Instant) {
        let connection = self.links.get_mut(&serial).expect("it is late");
        let (place, drains) = (connection.place, mem::take(&mut connection.drains_if_hung));
        let (pid, generation) = (connection.pid, connection.generation);
        let name = self.owner_name(place.backend).to_owned();
        let detail = format!("it has said nothing for {} s since a call was late or cancelled", HANG_MAX.as_secs());
        self.out.push(Action::Record(Record {
            id: Some(name.clone()),
            kind: Some("backend"),
            pid,
            generation: Some(generation),
            detail: Some(detail),
            ..Record::new(record::Event::ServerHung)
        }));
        self.note(format!("{name}: says nothing any more; it is replaced"));
        if drains && self.may_replace(place, now) && self.replace(place, now) {
            if let Some(connection) = self.links.get_mut(&serial) {
                connection.suspected = None;
            }
            return;
        }
        self.part(serial, How::Hung(HANG_MAX), true, now);
    }

    /// Above its limit a child is replaced: a new one comes up beside it.
    pub(super) fn measured(&mut self, link: Link, rss: u64, now: Instant) {
        let Some(owner) = self.owners.get(&link.backend) else { return };
        let Some(max) = owner.settings.memory_max.filter(|max| rss > *max) else { return };
        let name = owner.settings.name.clone();
        let Some(connection) = self.links.get(&link.serial) else { return };
        let (place, pid, generation) = (connection.place, connection.pid, connection.generation);
        if self.stopping.is_some() || !connection.is_ready() {
            return;
        }
        if self.may_replace(place, now) && self.replace(place, now) {
            let mib = |bytes: u64| bytes.div_ceil(1 << 20);
            let detail = format!("it uses {} MiB, more than {} MiB", mib(rss), mib(max));
            self.note(format!("{name}: {detail}; it is replaced"));
            self.out.push(Action::Record(Record {
                id: Some(name),
                kind: Some("backend"),
                pid,
                generation: Some(generation),
                detail: Some(detail),
                ..Record::new(record::Event::ServerTooLarge)
            }));
        }
    }

    /// A request of ours.
    pub(super) fn ask_link(
        &mut self,
        serial: u64,
        private: Private,
        method: &'static str,
        params: &str,
        era: Era,
        now: Instant,
    ) -> Option<u64> {
        let place = self.links.get(&serial)?.place;
        let key = self.number();
        let meta = match era {
            Era::Handshake => String::new(),
            Era::Stateless => format!(r#""_meta":{{{}}}"#, words::meta_members(None)),
        };
        let comma = if meta.is_empty() || params.is_empty() { "" } else { "," };
        let line = message::line(format!(
            r#"{{"jsonrpc":"2.0","id":{key},"method":"{method}","params":{{{params}{comma}{meta}}}}}"#
        ));
        self.calls.insert(
            key,
            Box::new(Call {
                whom: None,
                what: What::Private(private),
                method: method.into(),
                place,
                link: Some(serial),
                shown: None,
                own: None,
                message: None,
                token: None,
                began: now,
                due: private.patience().map(|patience| now + patience),
                due_max: now,
                rounds: 0,
                repeatable: false,
                resent: false,
                unsent_tries: 0,
                told_in: None,
                pass: None,
                task: false,
                says: Says::default(),
                parked: None,
                inputs: None,
            }),
        );
        if let Some(patience) = private.patience() {
            self.wake_by(now + patience);
        }
        self.tell_link(serial, line);
        Some(key)
    }
}

/// The end of a text, at most as long as is kept.
fn tail(mut text: String) -> String {
    if text.len() > STDERR_BYTES_MAX {
        let mut from = text.len() - STDERR_BYTES_MAX;
        while !text.is_char_boundary(from) {
            from += 1;
        }
        text.drain(..from);
    }
    text
}
