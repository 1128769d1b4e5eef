//! `subscriptions/listen`: requests that stay open across server processes, under the same id.

use std::{mem, time::Instant};

use bytes::Bytes;

use super::{
    Relay, messages,
    requests::{Class, OpenRequest, Waits},
    saved::SavedListen,
};
use crate::{
    mcp::{
        Family,
        meta::{SERVER_INFO, SUBSCRIPTION_ID},
        notification,
    },
    message::{Edit, Id, Params, Raw, cancelled_line, notification_line, pick, splice},
    saved::Octets,
};

const FLAGS: [&str; 3] = ["toolsListChanged", "promptsListChanged", "resourcesListChanged"];

/// What a client listens for.
#[derive(Debug)]
pub(super) struct Listen {
    /// The filter it asked for, as JSON.
    filter: String,
    /// The families whose changes it subscribed to.
    wants: [bool; 3],
    acknowledged: bool,
    /// The child's message that the subscription is over, delayed for a moment.
    torn: Option<Bytes>,
}

impl Listen {
    pub(super) fn asked(filter: Option<Raw<'_>>) -> Listen {
        let flags = filter.and_then(|filter| pick(filter, FLAGS)).unwrap_or_default();
        Listen {
            filter: filter.map_or_else(|| "{}".into(), |filter| filter.get().to_owned()),
            wants: flags.map(|flag| flag.is_some_and(|flag| flag.get() == "true")),
            acknowledged: false,
            torn: None,
        }
    }

    pub(super) fn save(&self) -> SavedListen {
        let torn = self.torn.as_ref().map(|line| Octets::of(line));
        SavedListen { filter: self.filter.clone(), wants: self.wants, acknowledged: self.acknowledged, torn }
    }

    pub(super) fn restore(saved: SavedListen) -> Listen {
        let SavedListen { filter, wants, acknowledged, torn } = saved;
        Listen { filter, wants, acknowledged, torn: torn.map(Octets::bytes) }
    }

    pub(super) fn hears(&self, family: Family) -> bool {
        self.acknowledged && self.wants[family as usize]
    }

    fn hears_any(&self) -> bool {
        self.wants.contains(&true)
    }
}

impl Relay {
    fn listens(&self) -> Vec<u64> {
        self.requests.iter().filter(|open| open.class == Class::Listen).map(|open| open.seq()).collect()
    }

    fn listen_mut(&mut self, seq: u64) -> &mut Listen {
        self.requests.get_mut(seq).and_then(|open| open.listen.as_mut()).expect("an open listen")
    }

    /// No child serves: the subscription is acknowledged by outlast, and opened on the next child.
    pub(super) fn listen_without_server(&mut self, mut open: Box<OpenRequest>, line: Bytes) {
        open.waits = Waits::Detached;
        open.keep(&line);
        let seq = open.seq();
        self.requests.insert(open);
        self.acknowledge(seq);
    }

    /// Sends outlast's own acknowledgement, unless it was acknowledged before.
    pub(super) fn acknowledge(&mut self, seq: u64) {
        let id = self.requests[seq].id().clone();
        let listen = self.listen_mut(seq);
        if !mem::replace(&mut listen.acknowledged, true) {
            let params = format!(r#""_meta":{{"{SUBSCRIPTION_ID}":{id}}},"notifications":{}"#, listen.filter);
            self.tell_client(notification_line(notification::ACKNOWLEDGED, &params));
        }
    }

    /// Subscriptions that a child has been asked for and has not acknowledged yet.
    pub(super) fn acknowledge_listens(&mut self, generation: u32) {
        for seq in self.listens() {
            if self.requests[seq].is_on(generation) {
                self.acknowledge(seq);
            }
        }
    }

    /// Opens every subscription on a child that did not have it.
    pub(super) fn reopen_listens(&mut self, generation: u32) {
        for seq in self.listens() {
            let open = self.requests.get_mut(seq).expect("listed above");
            if open.waits != Waits::OnServer(generation)
                && let Some(line) = open.kept().cloned()
            {
                open.waits = Waits::OnServer(generation);
                self.tell_server(generation, line, Some(seq));
            }
        }
    }

    /// At a takeover the subscriptions of the old child are cancelled.
    pub(super) fn leave_listens(&mut self, generation: u32) {
        for seq in self.listens() {
            let open = self.requests.get_mut(seq).expect("listed above");
            if open.is_on(generation) {
                let id = open.id().clone();
                self.listen_lost_child(seq);
                if self.servers.slot.live().is_none() {
                    self.acknowledge(seq);
                }
                let line = cancelled_line(id, Some(r#""moved to a new server""#));
                self.tell_server(generation, line, None);
            }
        }
    }

    /// A child that is stopped takes its teardowns with it.
    pub(super) fn lose_listens(&mut self, generation: u32) {
        for seq in self.listens() {
            if self.requests[seq].is_on(generation) {
                self.listen_lost_child(seq);
            }
        }
    }

    /// Its child is gone, or no longer serves; a teardown that was kept back belonged to that.
    pub(super) fn listen_lost_child(&mut self, seq: u64) {
        self.listen_mut(seq).torn = None;
        self.requests.set_deadline(seq, None);
        self.requests.get_mut(seq).expect("an open listen").waits = Waits::Detached;
    }

    /// The first acknowledgement goes to the client, promising the changes that we announce ourselves.
    pub(super) fn acknowledged(&mut self, generation: u32, serves: bool, params: &Params<'_>, line: Bytes) {
        let id = params.meta().and_then(|meta| pick(meta, [SUBSCRIPTION_ID])).and_then(|[id]| Id::parse(id?.get()));
        let seq =
            id.and_then(|id| self.requests.oldest(&id, |open| open.class == Class::Listen && open.is_on(generation)));
        let (Some(seq), true) = (seq, serves) else {
            self.dropped.from_server += 1;
            return;
        };
        let granted = params.notifications();
        let listen = self.listen_mut(seq);
        let wanted: Vec<&str> =
            FLAGS.into_iter().zip(listen.wants).filter(|(_, wants)| *wants).map(|(f, _)| f).collect();
        if mem::replace(&mut listen.acknowledged, true) {
            let flags = granted.and_then(|granted| pick(granted, FLAGS)).unwrap_or_default();
            let fewer = listen
                .wants
                .iter()
                .zip(flags)
                .any(|(wants, flag)| *wants && flag.is_none_or(|flag| flag.get() != "true"));
            if fewer {
                self.odd("The new server grants less of a subscription than was requested".into());
            }
            return;
        }
        let edits: Vec<Edit> = match granted {
            Some(granted) => {
                // One edit for each flag would overlap in an empty object, so those that are missing go in together.
                let flags = pick(granted, FLAGS).unwrap_or_default();
                let mut edits = Vec::new();
                let mut missing = Vec::new();
                for (name, flag) in FLAGS.into_iter().zip(flags) {
                    if wanted.contains(&name) {
                        match flag {
                            Some(flag) if flag.get() != "true" => edits.push(Edit::replace(&line, flag, "true")),
                            Some(_) => {}
                            None => missing.push(format!(r#""{name}":true"#)),
                        }
                    }
                }
                if !missing.is_empty() {
                    edits.push(Edit::append(&line, granted, &missing.join(",")));
                }
                edits
            }
            None => Vec::new(),
        };
        self.tell_client(if edits.is_empty() { line.clone() } else { splice(&line, edits) });
    }

    /// The child answered a listen: an error, or its graceful end.
    pub(super) fn listen_answered(&mut self, seq: u64, is_error: bool, line: Bytes, now: Instant) {
        if !is_error {
            return self.listen_torn_down(seq, line, now);
        }
        let listen = self.listen_mut(seq);
        if listen.hears_any() {
            // We can announce changes of lists without the child.
            self.acknowledge(seq);
            self.listen_lost_child(seq);
            return;
        }
        let acknowledged = listen.acknowledged;
        let open = self.close(seq);
        if acknowledged {
            self.end_listen(&open);
        } else {
            self.answer(&open, line);
        }
    }

    /// Kept back for a moment: a child that is leaving ends its subscriptions first.
    pub(super) fn listen_torn_down(&mut self, seq: u64, line: Bytes, now: Instant) {
        if self.is_leaving() {
            let open = self.close(seq);
            return self.answer(&open, line);
        }
        self.listen_mut(seq).torn = Some(Bytes::copy_from_slice(&line));
        self.requests.set_deadline(seq, Some(now + self.settings.limits.messages.teardown_wait));
    }

    /// The child meant it.
    pub(super) fn listen_ended(&mut self, seq: u64) {
        let mut open = self.close(seq);
        match open.listen.as_mut().and_then(|listen| listen.torn.take()) {
            Some(line) => self.answer(&open, line),
            None => self.end_listen(&open),
        }
    }

    /// A regular end that outlast writes.
    pub(super) fn end_listen(&mut self, open: &OpenRequest) {
        let id = open.id();
        let info = messages::server_info();
        let meta = format!(r#"{{"{SUBSCRIPTION_ID}":{id},"{SERVER_INFO}":{info}}}"#);
        self.answer_result(open, &format!(r#"{{"resultType":"complete","_meta":{meta}}}"#));
    }

    /// Tells the client that a list is another one, in the way of its era.
    pub(super) fn announce(&mut self, family: Family) {
        self.requests.outdate(family);
        if self.lists.is_announced(family) {
            return;
        }
        let method = family.method();
        if self.is_modern() {
            let ids: Vec<Id> = self
                .requests
                .iter()
                .filter(|open| open.listen.as_ref().is_some_and(|listen| listen.hears(family)))
                .map(|open| open.id().clone())
                .collect();
            for id in ids {
                self.lists.announced(family);
                let params = format!(r#""_meta":{{"{SUBSCRIPTION_ID}":{id}}}"#);
                self.tell_client(notification_line(method, &params));
            }
        } else if self.conversation.told().has(family) {
            self.lists.announced(family);
            self.tell_client(notification_line(method, ""));
        }
    }
}
