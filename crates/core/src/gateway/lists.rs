//! Lists: fetched from each backend page by page, and served to clients merged.

use super::*;
use crate::{json::Raw, message, relay::lists::Page};

use links::Phase;
use opening::Private;

/// What one link is asked about what it offers.
#[derive(Debug, Default)]
pub(super) struct Fetch {
    pub offer: Offer,
    under_way: [Option<Pages>; 4],
}

#[derive(Debug, Default)]
struct Pages {
    items: Vec<Bytes>,
    count: usize,
    /// It said meanwhile that the list changed.
    again: bool,
}

impl Fetch {
    pub fn is_over(&self) -> bool {
        self.under_way.iter().all(Option::is_none)
    }
}

/// A client's request that waits for backends to say what they offer.
#[derive(Debug)]
pub(super) struct Gathering {
    pub whom: Whom,
    pub wants: Wants,
    pub until: Instant,
}

#[derive(Debug)]
pub(super) enum Wants {
    /// Of all of them that nothing is known of yet.
    List(List),
    /// Of one, to know whether it has what is asked for.
    Request { owner: u32, message: Bytes, says: Says },
}

impl Gathering {
    pub fn is_for(&self, backend: u32) -> bool {
        matches!(self.wants, Wants::Request { owner, .. } if owner == backend)
    }
}

impl Gateway {
    /// Asks a new link for all it offers.
    pub(super) fn fetch_all(&mut self, serial: u64, now: Instant) {
        let Some(connection) = self.links.get_mut(&serial) else { return };
        let owner = self.owners.get(&connection.link.backend);
        // What the first one offers is known by then; another one with other clients may differ in what it shows to them.
        let is_known = owner.is_some_and(|owner| owner.standing == Standing::Confirmed);
        if connection.place.seat == Seat::Second || is_known && matches!(connection.place.seat, Seat::Lent(_)) {
            return;
        }
        let has = connection.has;
        for kind in List::ALL.into_iter().filter(|kind| has.list(*kind)) {
            self.fetch(serial, kind, now);
        }
        self.offered(serial, now);
    }

    fn fetch(&mut self, serial: u64, kind: List, now: Instant) {
        let Some(connection) = self.links.get_mut(&serial) else { return };
        connection.fetch.under_way[kind as usize] = Some(Pages::default());
        let era = connection.era;
        self.ask_link(serial, Private::List(kind), kind.method(), "", era, now);
    }

    /// A backend said that a list changed.
    pub(super) fn refetch(&mut self, serial: u64, family: Family, now: Instant) {
        let is_trial = self.trial_of(serial).is_some();
        let Some(connection) = self.links.get(&serial) else { return };
        if connection.phase != Phase::Ready && !is_trial || connection.place.seat == Seat::Second {
            return;
        }
        let has = connection.has;
        if matches!(connection.place.seat, Seat::Lent(_))
            && let Some(owner) = self.owners.get(&connection.link.backend)
        {
            // It was not asked for the rest.
            let offer = owner.offer.clone();
            let connection = self.links.get_mut(&serial).expect("seen above");
            connection.fetch.offer = offer;
        }
        for kind in List::ALL.into_iter().filter(|kind| kind.family() == family && has.list(*kind)) {
            match self.links.get_mut(&serial).and_then(|link| link.fetch.under_way[kind as usize].as_mut()) {
                Some(pages) => pages.again = true,
                None => self.fetch(serial, kind, now),
            }
        }
    }

    /// One page of a list.
    pub(super) fn listed(
        &mut self,
        serial: u64,
        kind: List,
        result: Option<Raw<'_>>,
        error: Option<Raw<'_>>,
        now: Instant,
    ) {
        let Some(page) = result.and_then(|result| Page::parse(kind, result)) else {
            let words = match error {
                // Many a server has resources and no templates, and says so like this.
                Some(error) if words::error_code(error) == Some(-32601) => {
                    return self.list_done(serial, kind, Vec::new(), now);
                }
                Some(error) => words::error_words(error),
                None => "an answer that is no list".into(),
            };
            return self.list_failed(serial, kind, &words, now);
        };
        let Some(connection) = self.links.get_mut(&serial) else { return };
        let era = connection.era;
        let others: usize = List::ALL.iter().map(|kind| size(connection.fetch.offer.of(*kind))).sum();
        let Some(pages) = &mut connection.fetch.under_way[kind as usize] else { return };
        let mut bytes = others + size(&pages.items);
        let mut left_out = page.is_cut;
        for item in page.items {
            bytes += item.get().len();
            match bytes > OFFER_BYTES_MAX || pages.items.len() >= LIST_ITEMS_MAX {
                true => left_out = true,
                false => pages.items.push(Bytes::copy_from_slice(item.get().as_bytes())),
            }
        }
        pages.count += 1;
        left_out |= pages.count >= LIST_PAGES_MAX && page.next.is_some();
        match page.next {
            Some(cursor) if !left_out => {
                let params = words::member("cursor", &cursor);
                self.ask_link(serial, Private::List(kind), kind.method(), &params, era, now);
            }
            _ => {
                let items = mem::take(&mut pages.items);
                if left_out {
                    let name = self.owner_name(self.links[&serial].link.backend);
                    let words = format!("{name}: its {} are too many; only {} are kept", kind.member(), items.len());
                    self.note(words);
                }
                self.list_done(serial, kind, items, now);
            }
        }
    }

    /// The list stays what it was.
    pub(super) fn list_failed(&mut self, serial: u64, kind: List, why: &str, now: Instant) {
        if self.trial_misses_list(serial, kind, why, now) {
            return;
        }
        let Some(connection) = self.links.get(&serial) else { return };
        let Some(owner) = self.owners.get(&connection.link.backend) else { return };
        let (name, items) = (&owner.settings.name, owner.offer.of(kind).clone());
        let words = format!("{name}: {} failed ({}); the last one is kept", kind.method(), words::cut(why, 300));
        self.note(words);
        self.list_done(serial, kind, items, now);
    }

    fn list_done(&mut self, serial: u64, kind: List, items: Vec<Bytes>, now: Instant) {
        let Some(connection) = self.links.get_mut(&serial) else { return };
        let Some(pages) = connection.fetch.under_way[kind as usize].take() else { return };
        *connection.fetch.offer.of_mut(kind) = items;
        // First what is there: one that never stops announcing changes would never be heard otherwise.
        self.offered(serial, now);
        if pages.again {
            self.fetch(serial, kind, now);
        }
    }

    /// Everything that was asked for is there: this is what the backend offers now.
    pub(super) fn offered(&mut self, serial: u64, now: Instant) {
        let Some(connection) = self.links.get(&serial) else { return };
        let backend = connection.link.backend;
        if connection.fetch.is_over() && self.trial_of(serial).is_some() {
            return self.trial_passed(serial, now);
        }
        let connection = self.links.get_mut(&serial).expect("seen above");
        // One that was replaced has nothing more to say about what there is.
        if !connection.fetch.is_over() || connection.phase != Phase::Ready {
            return;
        }
        connection.last_used = connection.last_used.max(now);
        let offer = connection.fetch.offer.clone();
        let Some(owner) = self.owners.get_mut(&backend) else { return };
        let was_confirmed = mem::replace(&mut owner.standing, Standing::Confirmed) == Standing::Confirmed;
        let is_kept = mem::replace(&mut owner.is_kept, true);
        let is_same = owner.offer == offer;
        if !is_same || !is_kept {
            owner.offer = offer.clone();
            owner.unchecked.clear();
            let name = owner.settings.name.clone();
            self.out.push(Action::Keep { backend: name, catalogue: offer });
        }
        if !is_same {
            self.merge_catalogue();
        }
        if !was_confirmed {
            self.gather(now);
        }
        self.watch_idle(serial);
        self.end_probe(serial, now);
    }

    /// Serves the lists that waited, if everybody has spoken or it took too long.
    pub(super) fn gather(&mut self, now: Instant) {
        if self.gathering.is_empty() {
            return;
        }
        let all_known = self.gather_until(now).is_none();
        let (ripe, waiting): (Vec<Gathering>, Vec<Gathering>) =
            mem::take(&mut self.gathering).into_iter().partition(|waiting| {
                let is_known = match waiting.wants {
                    Wants::List(_) => all_known,
                    Wants::Request { owner, .. } => {
                        self.owners.get(&owner).is_none_or(|owner| owner.standing == Standing::Confirmed)
                            || self.is_given_up(owner)
                    }
                };
                is_known || waiting.until <= now || self.stopping.is_some()
            });
        self.gathering = waiting;
        for waiting in ripe {
            match waiting.wants {
                Wants::List(kind) => self.serve_list(&waiting.whom, kind, 0),
                Wants::Request { owner, message, says } => self.judge(waiting.whom, owner, &message, says, now),
            }
        }
    }

    /// How long a list may have to wait for a backend that nothing is known of yet.
    fn gather_until(&self, now: Instant) -> Option<Instant> {
        let unknown = self.owners.values().filter(|owner| owner.standing == Standing::Unknown);
        unknown.filter_map(|owner| owner.gather_until).filter(|until| *until > now).max()
    }

    /// Lists begin to wait for backends that nothing is known of yet, each once and for a short time.
    fn begin_gathering(&mut self, now: Instant) {
        let off: Vec<u32> = self.order.iter().copied().filter(|number| self.is_off(*number)).collect();
        for (number, owner) in &mut self.owners {
            if owner.standing == Standing::Unknown && !off.contains(number) {
                owner.gather_until.get_or_insert(now + GATHER_MAX);
            }
        }
    }

    /// A client asks for a list.
    pub(super) fn list_asked(&mut self, whom: Whom, kind: List, cursor: Option<Raw<'_>>, now: Instant) {
        if let Some(cursor) = cursor.filter(|cursor| cursor.get() != "null") {
            match cursor.text().as_deref().and_then(|cursor| offset(cursor, kind)) {
                Some(offset) => self.serve_list(&whom, kind, offset),
                None => self.answer_error(&whom, -32602, "This cursor is not one of ours: begin the list anew.", None),
            }
            return;
        }
        self.begin_gathering(now);
        match self.gather_until(now).filter(|_| self.stopping.is_none()) {
            Some(until) => {
                self.wake_by(until);
                self.gathering.push(Gathering { whom, wants: Wants::List(kind), until });
            }
            None => self.serve_list(&whom, kind, 0),
        }
    }

    fn serve_list(&mut self, whom: &Whom, kind: List, offset: usize) {
        self.catalogue.see(kind);
        let Some(guest) = self.guests.get(&whom.client) else { return };
        let view = &self.views[guest.view];
        let mut result = format!(r#"{{"{}":["#, kind.member()).into_bytes();
        if kind == List::Tools && view.search {
            result.extend_from_slice(search::DEFINITIONS.as_bytes());
            result.push(b']');
        } else {
            let shown = view.shows(kind);
            let page = self.settings.limits.page.max(1);
            let end = shown.len().min(offset.saturating_add(page));
            for (position, index) in shown.get(offset..end).unwrap_or_default().iter().enumerate() {
                if position > 0 {
                    result.push(b',');
                }
                result.extend_from_slice(&self.catalogue.entry(kind, *index).json);
            }
            result.push(b']');
            if end < shown.len() && offset < end {
                let cursor = format!("outlast.{}.{}.{end}", kind.member(), self.catalogue.version);
                result.extend_from_slice(format!(r#","nextCursor":"{cursor}""#).as_bytes());
            }
        }
        if whom.era == Era::Stateless {
            result.extend_from_slice(self.freshness().as_bytes());
        }
        result.push(b'}');
        let result = String::from_utf8(result).expect("catalogues are text");
        // Elements came as part of one line each, but a backend over HTTP may have written them over several.
        let result = if result.contains('\n') { result.replace(['\n', '\r'], " ") } else { result };
        self.answer_result(whom, &result);
    }

    /// What every list and discovery says to a client of the stateless era. Where clients differ in what they see,
    /// nobody may share it.
    pub(super) fn freshness(&self) -> String {
        let scope = match self.settings.roles.is_empty() && self.settings.profiles.is_empty() {
            true => "public",
            false => "private",
        };
        let ttl = if self.is_partial() { 0 } else { words::TTL_MS };
        format!(
            r#","resultType":"complete","ttlMs":{ttl},"cacheScope":"{scope}","_meta":{{"io.modelcontextprotocol/serverInfo":{}}}"#,
            words::info()
        )
    }

    /// Whether lists lack what a backend may be about to offer.
    fn is_partial(&self) -> bool {
        let is_unknown = |number: &u32| self.owners[number].standing == Standing::Unknown && !self.is_off(*number);
        self.order.iter().any(is_unknown)
    }

    /// Tells those who look through this view that a list is another one now.
    pub(super) fn announce(&mut self, view: usize, family: Family) {
        let mut clients: Vec<Client> =
            self.guests.iter().filter(|(_, guest)| guest.view == view).map(|(client, _)| *client).collect();
        clients.sort_unstable();
        for client in clients {
            self.announce_to(client, family);
        }
    }

    pub(super) fn announce_to(&mut self, client: Client, family: Family) {
        if self.guests.get(&client).is_some_and(Guest::hears_changes) {
            let message = message::line(format!(r#"{{"jsonrpc":"2.0","method":"{}"}}"#, family.method()));
            self.out.push(Action::TellClient { client, message, about: None, said: Said::Other });
        }
        self.announce_to_listens(client, family);
    }
}

fn size(items: &[Bytes]) -> usize {
    items.iter().map(Bytes::len).sum()
}

/// Where a list goes on, if the cursor is one of ours. The list may have changed since; the client was told then.
fn offset(cursor: &str, kind: List) -> Option<usize> {
    let (_, offset) =
        cursor.strip_prefix("outlast.")?.strip_prefix(kind.member())?.strip_prefix('.')?.split_once('.')?;
    offset.parse().ok()
}
