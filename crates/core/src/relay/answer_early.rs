//! Answers to an opening that the first server is slow to give (SPEC H2, rows b1, b4, k1 to k5): from the cache of this
//! command's last run, or as for a broken server. What the cache holds is in `cache`; reading and writing is the driver's.

use std::time::{Duration, Instant};

use bytes::Bytes;

use super::{
    Relay,
    cache::Cached,
    conversation::version_of,
    endpoint::Private,
    events::Action,
    lists::Items,
    requests::{Class, OpenRequest, Waits},
    saved::{SavedCached, SavedEarly},
    servers::Current,
};
use crate::{
    capabilities::Capabilities,
    mcp::List,
    message,
    message::{Message, pick, text},
};

/// What is known of the cache, and what the client was told from it.
#[derive(Debug, Default)]
pub(super) struct AnswerEarly {
    cache: Reading,
    /// The client was answered from the cache.
    from_cache: bool,
}

#[derive(Debug, Default)]
enum Reading {
    #[default]
    Unread,
    /// The driver was asked for the entry of this revision.
    Asked {
        revision: String,
        at: Instant,
    },
    Read(Option<Box<Cached>>),
}

impl AnswerEarly {
    /// The driver reads the cache.
    pub(super) fn is_reading(&self) -> bool {
        matches!(self.cache, Reading::Asked { .. })
    }

    /// None while the driver reads the cache.
    pub(super) fn save(&self) -> Option<SavedEarly> {
        let save = |cached: &Cached| SavedCached {
            revision: cached.revision.clone(),
            opening: cached.opening.clone(),
            lists: cached.lists.iter().map(|(list, items)| (*list, items.save())).collect(),
        };
        let (is_cache_read, cached) = match &self.cache {
            Reading::Unread => (false, None),
            Reading::Asked { .. } => return None,
            Reading::Read(cached) => (true, cached.as_deref().map(save)),
        };
        Some(SavedEarly { from_cache: self.from_cache, is_cache_read, cached })
    }

    pub(super) fn restore(saved: SavedEarly) -> AnswerEarly {
        let restore = |cached: SavedCached| {
            let lists = cached.lists.into_iter().map(|(list, items)| (list, Items::restore(items))).collect();
            Box::new(Cached { revision: cached.revision, opening: cached.opening, lists })
        };
        let cache = if saved.is_cache_read { Reading::Read(saved.cached.map(restore)) } else { Reading::Unread };
        AnswerEarly { cache, from_cache: saved.from_cache }
    }
}

impl Relay {
    fn cached(&self) -> Option<&Cached> {
        match &self.early.cache {
            Reading::Read(cached) => cached.as_deref(),
            _ => None,
        }
    }

    /// The list of the last run, once the client was answered from the cache and while no server has served.
    pub(super) fn cached_list(&self, list: List) -> Option<&Items> {
        let is_told = self.early.from_cache && !self.servers.was_ever_ready();
        self.cached().filter(|_| is_told)?.lists.get(&list)
    }

    /// The client was answered from the cache.
    pub(super) fn is_from_cache(&self) -> bool {
        self.early.from_cache
    }

    /// The client begins anew in the other era.
    pub(super) fn forget_early(&mut self) {
        self.early = AnswerEarly::default();
    }

    /// A request that is answered early if the server is slow, and what waits with it.
    fn is_early(&self, open: &OpenRequest) -> bool {
        if open.cancelled || !self.is_unserved(open) {
            return false;
        }
        match open.class {
            Class::Initialize => true,
            Class::Discover => self.is_modern(),
            Class::List(list) => self.conversation.is_past_probe() && !self.is_listing(open, list),
            _ => false,
        }
    }

    /// The server that has this request has answered pages of the list before, so it will answer.
    fn is_listing(&self, open: &OpenRequest, list: List) -> bool {
        let Waits::OnServer(generation) = open.waits else { return false };
        self.lists.get(list).is_some_and(|shown| shown.from == generation)
    }

    /// It waits for the first server, or is with one that has not answered anything yet.
    fn is_unserved(&self, open: &OpenRequest) -> bool {
        match open.waits {
            Waits::Held => true,
            Waits::OnServer(generation) => {
                *self.servers.slot.current() == Current::Fresh(generation) && !self.servers.is_stopping(generation)
            }
            _ => false,
        }
    }

    fn early_opens(&self) -> impl Iterator<Item = &OpenRequest> {
        let most = if self.servers.was_ever_ready() || self.is_leaving() { 0 } else { usize::MAX };
        self.requests.iter().take(most).filter(|open| self.is_early(open))
    }

    fn answer_after(&self) -> Duration {
        let limits = &self.settings.limits;
        let default = match self.cached() {
            Some(cached) if cached.has_lists() => limits.early.answer_after_cached,
            _ => limits.early.answer_after_uncached,
        };
        self.settings.answer_after.unwrap_or(default)
    }

    /// When the driver is asked for the cache: not for a server that answers at once.
    fn cache_due(&self, open: &OpenRequest) -> Option<Instant> {
        let is_wanted = self.settings.cache && matches!(self.early.cache, Reading::Unread);
        let wait = self.settings.limits.cache.cache_read_after.min(self.answer_after());
        Some(open.arrival.at? + wait).filter(|_| is_wanted)
    }

    /// When this request is answered because the server is slow. An uncached `discover` is not: the answer would decide
    /// the era.
    fn slow_due(&self, open: &OpenRequest) -> Option<Instant> {
        if open.class == Class::Discover && self.cached().is_none_or(|cached| cached.opening.is_none()) {
            return None;
        }
        if let Class::List(list) = open.class
            && self.early.from_cache
            && self.cached_list(list).is_none()
        {
            // The client was told what the cache has; this list is held.
            return None;
        }
        let due = open.arrival.at? + self.answer_after();
        Some(match &self.early.cache {
            Reading::Asked { at, .. } => due.max(*at + self.settings.limits.cache.cache_read_max),
            _ => due,
        })
    }

    /// When this request is answered because its server ended before it was ready (b1).
    fn broken_due(&self, open: &OpenRequest) -> Option<Instant> {
        Some(open.arrival.met_end? + self.settings.limits.early.broken_after)
    }

    pub(super) fn early_deadline(&self) -> Option<Instant> {
        self.early_opens()
            .flat_map(|open| [self.cache_due(open), self.slow_due(open), self.broken_due(open)])
            .flatten()
            .min()
    }

    pub(super) fn early_time_passed(&mut self, now: Instant) {
        let is_due = |due: Option<Instant>| due.is_some_and(|due| due <= now);
        let cache_due = self.early_opens().find(|open| is_due(self.cache_due(open))).map(|open| match open.class {
            Class::Initialize => open.kept().and_then(|line| version_of(line)),
            _ => self.conversation.revision(),
        });
        if let Some(revision) = cache_due {
            match revision {
                Some(revision) => {
                    self.act(Action::ReadCache(revision.clone()));
                    self.early.cache = Reading::Asked { revision, at: now };
                }
                None => self.early.cache = Reading::Read(None),
            }
        }
        if self.early_opens().any(|open| is_due(self.broken_due(open))) {
            self.answer_waiting(true, now);
        } else if self.early_opens().any(|open| is_due(self.slow_due(open))) {
            self.answer_waiting(false, now);
        }
    }

    /// A child that was never ready ended: from now on what waits for it is answered soon.
    pub(super) fn note_end_before_ready(&mut self, now: Instant) {
        if self.servers.was_ever_ready() || self.servers.ends_before_ready() == 0 {
            return;
        }
        self.requests.meet_end(now);
    }

    pub(super) fn cache_read(&mut self, revision: &str, entry: Option<&str>) {
        match &self.early.cache {
            Reading::Asked { revision: asked, .. } if asked == revision => {}
            _ => return,
        }
        let cached = entry.and_then(|entry| match Cached::parse(entry, revision) {
            Ok(cached) => Some(Box::new(cached)),
            Err(why) => {
                self.note(format!("The cache of this command's last run is ignored: {why}"));
                None
            }
        });
        self.early.cache = Reading::Read(cached);
    }

    /// Answers every opening, and every list that waits with it, without the server. The child keeps starting; what
    /// it still answers to these requests is its handshake with us.
    fn answer_waiting(&mut self, ended: bool, now: Instant) {
        let from_cache = !ended && self.cached().is_some();
        if from_cache {
            self.tell_from_cache();
        } else {
            self.conversation.mark_broken();
        }
        let has_discovered = self.conversation.discovered().is_some();
        let mut handshake = false;
        let mut lists = false;
        for seq in self.requests.seqs(|_| true) {
            let open = &self.requests[seq];
            let is_answered = !open.cancelled
                && self.is_unserved(open)
                && match open.class {
                    Class::Initialize => true,
                    Class::Discover => self.is_modern() && (ended || has_discovered),
                    Class::List(list) => {
                        !self.conversation.is_unopened()
                            && !self.is_listing(open, list)
                            && (!self.is_modern() || self.conversation.is_past_probe() || has_discovered)
                            && (!from_cache || self.cached_list(list).is_some())
                    }
                    _ => false,
                };
            if !is_answered {
                continue;
            }
            let open = self.close(seq);
            if let Waits::OnServer(generation) = open.waits {
                let opens = match open.class {
                    Class::Initialize => true,
                    Class::Discover => has_discovered,
                    _ => false,
                };
                // Of several openings the first answer is the handshake.
                let private = if opens && !handshake { Private::Handshake } else { Private::Answered };
                if let Some(child) = self.servers.get_mut(generation) {
                    child.private.insert(open.id().clone(), private);
                }
                handshake |= opens;
            }
            lists |= matches!(open.class, Class::List(_));
            self.answer_without_server(open, now);
        }
        if let Current::Fresh(generation) = *self.servers.slot.current() {
            let asks = self.conversation.is_past_probe() && lists;
            if handshake || asks {
                self.servers.slot.withhold(generation);
                self.acknowledge_listens(generation);
            }
            if asks && !handshake {
                self.replay(generation, self.settings.limits.handshake.first_handshake_max, now);
            }
        }
    }

    fn tell_from_cache(&mut self) {
        if std::mem::replace(&mut self.early.from_cache, true) {
            return;
        }
        let tools = self.cached_list(List::Tools).map(Items::names);
        self.lists.set_tools(tools.unwrap_or_default());
        if self.is_modern()
            && let Some(opening) = self.cached().and_then(|cached| cached.opening.clone())
        {
            let line = message::line(format!(r#"{{"jsonrpc":"2.0","id":0,"result":{opening}}}"#));
            let (edited, told, _) = self.promised(&line);
            if let Ok(Message::Response { result: Some(result), .. }) = message::parse(&edited) {
                self.conversation.note_discovered(told, Some(result.get()));
            }
        }
        let words = "The server is slow to start; the client was answered from the cache of this command's last run";
        self.note(words.into());
    }

    /// The cached answer to an `initialize`, the version and the capabilities it tells.
    pub(super) fn initialize_from_cache(&self, open: &OpenRequest) -> Option<(Bytes, String, Capabilities)> {
        let cached = self.cached().filter(|_| self.early.from_cache && !self.servers.was_ever_ready())?;
        let opening = cached.opening.as_ref().filter(|_| !self.is_modern())?;
        let (line, told, version) = self.promised(&message::result_line(open.id(), opening));
        Some((line, version?, told))
    }

    /// The result of an opening with our promises in it, what it tells, and its version.
    fn promised(&self, line: &Bytes) -> (Bytes, Capabilities, Option<String>) {
        let Ok(Message::Response { result: Some(result), .. }) = message::parse(line) else {
            return (line.clone(), Capabilities::default(), None);
        };
        let [version, capabilities] = pick(result, ["protocolVersion", "capabilities"]).unwrap_or_default();
        let told = Capabilities::parse(capabilities, |_| true).with_tools(self.settings.tools);
        (self.promise(result, capabilities, line), told, version.and_then(text))
    }

    /// The server refused the handshake that the cache promised: the entry is of no use to the next client.
    pub(super) fn refused_after_cache(&mut self) {
        if let Some(revision) = self.cached().filter(|_| self.early.from_cache).map(|cached| cached.revision.clone()) {
            self.act(Action::SaveCache { revision, entry: None });
        }
    }
}
