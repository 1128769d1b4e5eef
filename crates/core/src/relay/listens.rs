//! `subscriptions/listen`: requests that stay open across server lives, under the same id.

use super::*;
use crate::message::{Edit, Params, Raw, line, pick, splice};

const SUBSCRIPTION_ID: &str = "io.modelcontextprotocol/subscriptionId";
const FLAGS: [&str; 3] = ["toolsListChanged", "promptsListChanged", "resourcesListChanged"];

/// What a client listens for.
#[derive(Debug)]
pub(super) struct Listen {
    /// The filter it asked for, as JSON.
    filter: String,
    /// Which families' changes it wants to hear of.
    wants: [bool; 3],
    acknowledged: bool,
    /// The child's word that it is over, kept back for a moment.
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

    pub(super) fn hears(&self, family: Family) -> bool {
        self.acknowledged && self.wants[family as usize]
    }

    fn hears_any(&self) -> bool {
        self.wants.contains(&true)
    }
}

impl Relay {
    fn listens(&self) -> Vec<u64> {
        self.opens.values().filter(|open| open.class == Class::Listen).map(|open| open.seq).collect()
    }

    fn listen_mut(&mut self, seq: u64) -> &mut Listen {
        self.opens.get_mut(&seq).and_then(|open| open.listen.as_mut()).expect("an open listen")
    }

    /// Nobody serves: acknowledged by us, and opened on the next child.
    pub(super) fn listen_without_server(&mut self, mut open: Box<Open>, line: Bytes) {
        open.place = Place::Nowhere;
        open.kept = Some(Bytes::copy_from_slice(&line));
        let seq = open.seq;
        self.insert(open);
        self.acknowledge(seq);
    }

    /// In our own words, unless it was acknowledged before.
    pub(super) fn acknowledge(&mut self, seq: u64) {
        let id = self.opens[&seq].id.clone();
        let listen = self.listen_mut(seq);
        if !mem::replace(&mut listen.acknowledged, true) {
            let filter = listen.filter.clone();
            self.tell_client(line(format!(
                r#"{{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{{"_meta":{{"{SUBSCRIPTION_ID}":{id}}},"notifications":{filter}}}}}"#
            )));
        }
    }

    /// Subscriptions that a child has been asked for and has not acknowledged yet.
    pub(super) fn acknowledge_listens(&mut self, generation: u32) {
        for seq in self.listens() {
            if self.opens[&seq].place == Place::On(generation) {
                self.acknowledge(seq);
            }
        }
    }

    /// Opens every subscription on a child that did not have it.
    pub(super) fn reopen_listens(&mut self, generation: u32) {
        for seq in self.listens() {
            let open = self.opens.get_mut(&seq).expect("listed above");
            if open.place != Place::On(generation)
                && let Some(line) = open.kept.clone()
            {
                open.place = Place::On(generation);
                self.tell_server(generation, line, Some(seq));
            }
        }
    }

    /// On taking over, the old child is told that nobody listens any more.
    pub(super) fn leave_listens(&mut self, generation: u32) {
        for seq in self.listens() {
            let open = self.opens.get_mut(&seq).expect("listed above");
            if open.place == Place::On(generation) {
                let id = open.id.clone();
                self.listen_lost_child(seq);
                if self.live().is_none() {
                    self.acknowledge(seq);
                }
                self.tell_server(
                    generation,
                    line(format!(
                        r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id},"reason":"moved to a new server"}}}}"#
                    )),
                    None,
                );
            }
        }
    }

    /// A child that is stopped takes its teardowns with it.
    pub(super) fn lose_listens(&mut self, generation: u32) {
        for seq in self.listens() {
            if self.opens[&seq].place == Place::On(generation) {
                self.listen_lost_child(seq);
            }
        }
    }

    /// Its child is gone, or no longer serves; a teardown that was kept back belonged to that.
    pub(super) fn listen_lost_child(&mut self, seq: u64) {
        self.listen_mut(seq).torn = None;
        self.bounded.remove(&seq);
        let open = self.opens.get_mut(&seq).expect("an open listen");
        open.place = Place::Nowhere;
        open.deadline = None;
    }

    /// The first acknowledgement goes to the client, promising the changes that we announce ourselves.
    pub(super) fn acknowledged(&mut self, generation: u32, serves: bool, params: &Params<'_>, line: Bytes) {
        let id = params.meta().and_then(|meta| pick(meta, [SUBSCRIPTION_ID])).and_then(|[id]| Id::parse(id?.get()));
        let seq = id
            .and_then(|id| self.oldest(&id, |open| open.class == Class::Listen && open.place == Place::On(generation)));
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
                self.odd("The new server grants less of a subscription than was asked for".into());
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
        let open = self.opens.get_mut(&seq).expect("an open listen");
        open.deadline = Some(now + self.settings.limits.teardown_wait);
        self.bounded.insert(seq);
    }

    /// The child meant it.
    pub(super) fn listen_ended(&mut self, seq: u64) {
        let mut open = self.close(seq);
        match open.listen.as_mut().and_then(|listen| listen.torn.take()) {
            Some(line) => self.answer(&open, line),
            None => self.end_listen(&open),
        }
    }

    /// A graceful end in our own words.
    pub(super) fn end_listen(&mut self, open: &Open) {
        let id = &open.id;
        let info = words::server_info();
        let meta = format!(r#"{{"{SUBSCRIPTION_ID}":{id},"io.modelcontextprotocol/serverInfo":{info}}}"#);
        self.answer_result(open, &format!(r#"{{"resultType":"complete","_meta":{meta}}}"#));
    }

    /// A list that waits in a batch is another one by now.
    pub(super) fn outdate(&mut self, family: Family) {
        for batch in self.batches.values_mut().filter(|batch| batch.lists.contains(&family)) {
            batch.outdated.insert(family);
        }
    }

    /// Tells the client that a list is another one, in the way of its era.
    pub(super) fn announce(&mut self, family: Family) {
        self.outdate(family);
        if self.announced.contains(&family) {
            return;
        }
        let method = family.method();
        if self.is_modern() {
            let ids: Vec<Id> = self
                .opens
                .values()
                .filter(|open| open.listen.as_ref().is_some_and(|listen| listen.hears(family)))
                .map(|open| open.id.clone())
                .collect();
            for id in ids {
                self.announced.insert(family);
                self.tell_client(line(format!(
                    r#"{{"jsonrpc":"2.0","method":"{method}","params":{{"_meta":{{"{SUBSCRIPTION_ID}":{id}}}}}}}"#
                )));
            }
        } else if self.told().has(family) {
            self.announced.insert(family);
            self.tell_client(line(format!(r#"{{"jsonrpc":"2.0","method":"{method}"}}"#)));
        }
    }
}
