//! Lists: read from each backend page by page, merged, and served to clients in pages.
//! What a client sees of them is decided in [`super::catalogue`].

use std::{
    mem,
    rc::Rc,
    time::{Duration, Instant},
};

use bytes::Bytes;

use super::{
    Action, Client, Era, Gateway, Offer, Said,
    backends::BackendState,
    calls::ReplyTo,
    clients::{ClientState, Declared},
    dispatch::Checked,
    links::LinkState,
    messages,
    opening::OwnRequest,
    search,
    slots::Sharing,
    timers::Timer,
};
use crate::{
    json::Raw,
    mcp::{Family, List, Page, meta},
    message,
};

/// How many pages of a backend's list are read; the rest is left out, and that is noted.
const LIST_PAGES_MAX: usize = 100;
/// How large the four lists of a backend may be together; the rest is left out, and that is noted.
const OFFER_BYTES_MAX: usize = 16 << 20;
/// How many elements one list of a backend may have; the rest is left out, and that is noted.
const LIST_ITEMS_MAX: usize = 5_000;

/// A list with more elements or more bytes is read at most once in this time, because a backend may report changes without
/// end.
const LARGE_ITEMS: usize = 500;
const LARGE_BYTES: usize = 256 << 10;
const LARGE_LIST_PAUSE: Duration = Duration::from_secs(1);

/// The offer of one link, while it is read.
#[derive(Debug, Default)]
pub(super) struct Fetch {
    offer: Offer,
    reads: [Read; 4],
    /// Large lists are not read again before.
    paused_until: [Option<Instant>; 4],
}

/// Whether a list is read.
#[derive(Debug, Default)]
enum Read {
    #[default]
    No,
    /// It changed in its pause, which ends then.
    Due(Instant),
    UnderWay(Pages),
}

#[derive(Debug, Default)]
struct Pages {
    items: Vec<Bytes>,
    count: usize,
    /// Of all pages, with what is left out.
    bytes: usize,
    item_count: usize,
    /// The backend reported meanwhile that the list changed.
    again: bool,
}

impl Fetch {
    /// What the answer to the handshake says of the offer.
    pub(super) fn begin(&mut self, capabilities: Bytes, instructions: Option<String>) {
        self.offer.capabilities = capabilities;
        self.offer.instructions = instructions;
    }

    /// The lists that were read on this link.
    pub(super) fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Lists that changed and were not read again.
    pub(super) fn changed(&self) -> [bool; 4] {
        self.reads.each_ref().map(|read| matches!(read, Read::Due(_)))
    }

    /// The lists that changed are read again soon.
    pub(super) fn restore(offer: Offer, changed: [bool; 4], now: Instant) -> Fetch {
        let reads = changed.map(|is_changed| if is_changed { Read::Due(now) } else { Read::No });
        Fetch { offer, reads, ..Fetch::default() }
    }

    /// When lists that changed are read again.
    pub(super) fn deadlines(&self) -> impl Iterator<Item = Instant> {
        self.reads.iter().filter_map(|read| if let Read::Due(at) = read { Some(*at) } else { None })
    }

    fn take_due(&mut self, kind: List, now: Instant) -> bool {
        let read = &mut self.reads[kind as usize];
        let is_due = matches!(read, Read::Due(at) if *at <= now);
        if is_due {
            *read = Read::No;
        }
        is_due
    }

    fn pages(&mut self, kind: List) -> Option<&mut Pages> {
        if let Read::UnderWay(pages) = &mut self.reads[kind as usize] { Some(pages) } else { None }
    }

    pub(super) fn is_over(&self) -> bool {
        !self.reads.iter().any(|read| matches!(read, Read::UnderWay(_)))
    }
}

/// Requests of clients that wait for the offers of backends, or for the check of their arguments.
#[derive(Debug, Default)]
pub(super) struct OfferWaits(Vec<OfferWait>);

#[derive(Debug)]
pub(super) struct OfferWait {
    pub reply_to: ReplyTo,
    pub wants: Wants,
    until: Instant,
}

#[derive(Debug)]
pub(super) enum Wants {
    /// This list, with the offers of all backends.
    List(List),
    /// To know whether this backend has what the request names.
    Request { backend: u32, message: Bytes, declared: Declared, checked: Option<Checked> },
    /// To know whether the arguments of a tool call fit this schema.
    Check { ticket: u64, backend: u32, shown: Rc<str>, message: Bytes, declared: Declared, schema: Bytes },
}

impl OfferWaits {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// How many wait for the check of their arguments.
    pub(super) fn checks(&self) -> usize {
        self.0.iter().filter(|wait| matches!(wait.wants, Wants::Check { .. })).count()
    }

    /// The call whose arguments were checked, and until when it waits.
    pub(super) fn take_check(&mut self, ticket: u64) -> Option<(OfferWait, Instant)> {
        let is_it = |wait: &OfferWait| matches!(wait.wants, Wants::Check { ticket: own, .. } if own == ticket);
        let wait = self.0.remove(self.0.iter().position(is_it)?);
        let until = wait.until;
        Some((wait, until))
    }

    pub(super) fn deadlines(&self) -> impl Iterator<Item = Instant> {
        self.0.iter().map(|wait| wait.until)
    }

    pub(super) fn replies(&self) -> impl Iterator<Item = &ReplyTo> {
        self.0.iter().map(|wait| &wait.reply_to)
    }

    pub(super) fn add(&mut self, reply_to: ReplyTo, wants: Wants, until: Instant) {
        self.0.push(OfferWait { reply_to, wants, until });
    }

    /// How many requests wait for the offer of this backend alone.
    pub(super) fn count_for(&self, backend: u32) -> usize {
        self.0.iter().filter(|wait| matches!(wait.wants, Wants::Request { backend: of, .. } if of == backend)).count()
    }

    pub(super) fn is_for(&self, backend: u32) -> bool {
        self.count_for(backend) > 0
    }

    /// The requests that are kept in full, each with the client that sent it.
    pub(super) fn messages(&self) -> impl Iterator<Item = (&ReplyTo, &Bytes)> {
        self.0.iter().filter_map(|wait| match &wait.wants {
            Wants::Request { message, .. } | Wants::Check { message, .. } => Some((&wait.reply_to, message)),
            Wants::List(_) => None,
        })
    }

    pub(super) fn take_where(&mut self, is_it: impl Fn(&ReplyTo) -> bool) -> Vec<OfferWait> {
        self.0.extract_if(.., |wait| is_it(&wait.reply_to)).collect()
    }

    pub(super) fn take_first(&mut self, is_it: impl Fn(&ReplyTo) -> bool) -> Option<OfferWait> {
        let index = self.0.iter().position(|wait| is_it(&wait.reply_to))?;
        Some(self.0.remove(index))
    }
}

impl Gateway {
    /// Reads all lists of a new link.
    pub(super) fn fetch_all(&mut self, serial: u64, now: Instant) {
        let Some(link_state) = self.links.get_mut(&serial) else { return };
        let owner = self.backends.get(&link_state.id().backend);
        // The offer is known from the first link; the link of one client may show a different one.
        let is_known = owner.is_some_and(|backend| backend.is_offer_confirmed());
        if link_state.sharing() == Sharing::Handshake
            || is_known && matches!(link_state.sharing(), Sharing::Borrowed(_))
        {
            return;
        }
        let has = link_state.has();
        for kind in List::ALL.into_iter().filter(|kind| has.has(kind.family())) {
            self.fetch(serial, kind, now);
        }
        self.offered(serial, now);
    }

    fn fetch(&mut self, serial: u64, kind: List, now: Instant) {
        let Some(link_state) = self.links.get_mut(&serial) else { return };
        link_state.fetch.reads[kind as usize] = Read::UnderWay(Pages::default());
        let era = link_state.era();
        self.send_own_request(serial, OwnRequest::List(kind), kind.method(), "", era, now);
    }

    /// A backend reported that a list changed.
    pub(super) fn refetch(&mut self, serial: u64, family: Family, now: Instant) {
        let is_trial = self.trial_of(serial).is_some();
        let Some(link_state) = self.links.get(&serial) else { return };
        if !link_state.is_ready() && !is_trial || link_state.sharing() == Sharing::Handshake {
            return;
        }
        let has = link_state.has();
        if matches!(link_state.sharing(), Sharing::Borrowed(_))
            && let Some(owner) = self.backends.get(&link_state.id().backend)
        {
            // The other lists were not read on this link.
            let offer = owner.offer().clone();
            let link_state = self.links.get_mut(&serial).expect("seen above");
            link_state.fetch.offer = offer;
        }
        for kind in List::ALL.into_iter().filter(|kind| kind.family() == family && has.has(family)) {
            match self.links.get_mut(&serial).and_then(|link| link.fetch.pages(kind)) {
                Some(pages) => pages.again = true,
                None => self.fetch_changed(serial, kind, now),
            }
        }
    }

    /// Reads a list that changed, after its pause if it is large.
    fn fetch_changed(&mut self, serial: u64, kind: List, now: Instant) {
        let Some(link_state) = self.links.get_mut(&serial) else { return };
        match link_state.fetch.paused_until[kind as usize].filter(|until| *until > now) {
            Some(until) => {
                link_state.fetch.reads[kind as usize] = Read::Due(until);
                self.timers.arm(Timer::Lists, until);
            }
            None => self.fetch(serial, kind, now),
        }
    }

    /// Reads the large lists whose pause is over.
    pub(super) fn fetch_due(&mut self, now: Instant) {
        let mut due = Vec::new();
        for (serial, link_state) in self.links.iter_mut() {
            let kinds = List::ALL.into_iter().filter(|kind| link_state.fetch.take_due(*kind, now));
            due.extend(kinds.map(|kind| (*serial, kind)));
        }
        for (serial, kind) in due {
            // A link that was replaced meanwhile does not change the offer.
            if self.links.get(&serial).is_some_and(LinkState::is_ready) || self.trial_of(serial).is_some() {
                self.fetch(serial, kind, now);
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
                // A server with resources and without templates may answer like this.
                Some(error) if messages::error_code(error) == Some(-32601) => {
                    return self.list_done(serial, kind, Vec::new(), now);
                }
                Some(error) => messages::error_words(error),
                None => "an answer that is not a list".into(),
            };
            return self.list_failed(serial, kind, &words, now);
        };
        let Some(link_state) = self.links.get_mut(&serial) else { return };
        let era = link_state.era();
        let others = List::ALL.into_iter().filter(|other| *other != kind);
        let others: usize = others.map(|other| size(link_state.fetch.offer.of(other))).sum();
        let Some(pages) = link_state.fetch.pages(kind) else { return };
        let mut bytes = others + size(&pages.items);
        let mut left_out = page.is_cut;
        pages.bytes += page.array.get().len();
        pages.item_count += page.items.len();
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
                let params = messages::member("cursor", &cursor);
                self.send_own_request(serial, OwnRequest::List(kind), kind.method(), &params, era, now);
            }
            _ => {
                let items = mem::take(&mut pages.items);
                if left_out {
                    let name = self.backends.name(self.links[&serial].id().backend);
                    let words = format!("{name}: its {} are too many; only {} are kept", kind.member(), items.len());
                    self.note(words);
                }
                self.list_done(serial, kind, items, now);
            }
        }
    }

    /// A list cannot be read: the last one is kept.
    pub(super) fn list_failed(&mut self, serial: u64, kind: List, why: &str, now: Instant) {
        if self.trial_misses_list(serial, kind, why, now) {
            return;
        }
        let Some(link_state) = self.links.get(&serial) else { return };
        let Some(owner) = self.backends.get(&link_state.id().backend) else { return };
        let (name, items) = (&owner.settings().name, owner.offer().of(kind).clone());
        let words = format!("{name}: {} failed ({}); the last one is kept", kind.method(), messages::cut(why, 300));
        self.note(words);
        self.list_done(serial, kind, items, now);
    }

    fn list_done(&mut self, serial: u64, kind: List, items: Vec<Bytes>, now: Instant) {
        let Some(link_state) = self.links.get_mut(&serial) else { return };
        let read = &mut link_state.fetch.reads[kind as usize];
        let Read::UnderWay(pages) = mem::take(read) else { return };
        let is_large = pages.item_count > LARGE_ITEMS || pages.bytes > LARGE_BYTES;
        link_state.fetch.paused_until[kind as usize] = is_large.then(|| now + LARGE_LIST_PAUSE);
        *link_state.fetch.offer.of_mut(kind) = items;
        // The new list is used before it is read again, because a backend may report changes without end.
        self.offered(serial, now);
        if pages.again {
            self.fetch_changed(serial, kind, now);
        }
    }

    /// All lists are read: this is the offer of the backend now.
    pub(super) fn offered(&mut self, serial: u64, now: Instant) {
        let Some(link_state) = self.links.get(&serial) else { return };
        let backend = link_state.id().backend;
        if link_state.fetch.is_over() && self.trial_of(serial).is_some() {
            return self.trial_passed(serial, now);
        }
        let link_state = self.links.get_mut(&serial).expect("seen above");
        // A link that was replaced does not change the offer.
        if !link_state.fetch.is_over() || !link_state.is_ready() {
            return;
        }
        link_state.note_used(now);
        let offer = link_state.fetch.offer.clone();
        let Some(state) = self.backends.get_mut(&backend) else { return };
        let change = state.set_offer(&offer);
        if change.is_to_be_kept {
            let backend = state.settings().name.clone();
            self.out.push(Action::Keep { backend, catalogue: offer });
        }
        match change.was_confirmed {
            _ if change.is_same => {}
            true => self.merge_changed_offer(now),
            false => self.merge_new_offer(now),
        }
        if !change.was_confirmed {
            self.end_offer_waits(now);
        }
        self.arm_link(serial);
        self.end_probe(serial, now);
    }

    /// Serves the requests whose wait is over: the offers that they need are known, or it took too long.
    pub(super) fn end_offer_waits(&mut self, now: Instant) {
        if self.offer_waits.0.is_empty() {
            return;
        }
        let all_known = self.offer_wait_until(now).is_none();
        let (over, waiting): (Vec<OfferWait>, Vec<OfferWait>) =
            mem::take(&mut self.offer_waits.0).into_iter().partition(|wait| {
                let is_known = match wait.wants {
                    Wants::List(_) => all_known,
                    Wants::Request { backend, .. } => {
                        self.backends.get(&backend).is_none_or(BackendState::is_offer_confirmed)
                            || self.is_given_up(backend)
                    }
                    Wants::Check { .. } => false,
                };
                is_known || wait.until <= now || self.stage.is_stopping()
            });
        self.offer_waits.0 = waiting;
        for wait in over {
            match wait.wants {
                Wants::List(kind) => self.serve_list(&wait.reply_to, kind, 0),
                Wants::Request { backend, message, declared, checked } => {
                    self.route_after_offer(wait.reply_to, backend, &message, declared, checked, now);
                }
                Wants::Check { ticket, backend, shown, .. } => {
                    self.out.push(Action::DropCheck { ticket });
                    self.check_ended(&wait.reply_to, backend, &shown);
                }
            }
        }
    }

    /// How long lists still wait for backends whose offers are unknown.
    fn offer_wait_until(&self, now: Instant) -> Option<Instant> {
        self.backends.values().filter_map(|backend| backend.offer_wait_until(now)).max()
    }

    /// Lists wait for backends whose offers are unknown, once and for a short time.
    fn begin_offer_waits(&mut self, now: Instant) {
        for number in self.backends.order().to_vec() {
            if !self.is_off(number)
                && let Some(backend) = self.backends.get_mut(&number)
            {
                backend.begin_offer_wait(now);
            }
        }
    }

    /// A client asks for a list.
    pub(super) fn list_requested(&mut self, reply_to: ReplyTo, kind: List, cursor: Option<Raw<'_>>, now: Instant) {
        if let Some(cursor) = cursor.filter(|cursor| cursor.get() != "null") {
            match cursor.text().as_deref().and_then(|cursor| offset(cursor, kind)) {
                Some(offset) => self.serve_list(&reply_to, kind, offset),
                None => {
                    self.answer_error(&reply_to, -32602, "This cursor is not valid: list again without a cursor.", None)
                }
            }
            return;
        }
        self.begin_offer_waits(now);
        match self.offer_wait_until(now).filter(|_| !self.stage.is_stopping()) {
            Some(until) => {
                self.timers.arm(Timer::OfferWaits, until);
                self.offer_waits.add(reply_to, Wants::List(kind), until);
            }
            None => self.serve_list(&reply_to, kind, 0),
        }
    }

    fn serve_list(&mut self, reply_to: &ReplyTo, kind: List, offset: usize) {
        self.catalogue.see(kind);
        let Some(client_state) = self.clients.get(&reply_to.client) else { return };
        let view = self.catalogue.view(client_state.view());
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
                self.catalogue.entry(kind, *index).write_definition(&mut result);
            }
            result.push(b']');
            if end < shown.len() && offset < end {
                let cursor = format!("outlast.{}.{}.{end}", kind.member(), self.catalogue.version());
                result.extend_from_slice(format!(r#","nextCursor":"{cursor}""#).as_bytes());
            }
        }
        if reply_to.era == Era::Stateless {
            result.extend_from_slice(self.freshness().as_bytes());
        }
        result.push(b'}');
        let result = String::from_utf8(result).expect("catalogues are text");
        // An HTTP backend may send an element with line breaks in it.
        let result = if result.contains('\n') { result.replace(['\n', '\r'], " ") } else { result };
        self.answer_result(reply_to, &result);
    }

    /// Members of every list and of discovery in the stateless era. If clients see different lists, the answer must not
    /// be shared.
    pub(super) fn freshness(&self) -> String {
        let scope = match self.settings.roles.is_empty() && self.settings.profiles.is_empty() {
            true => "public",
            false => "private",
        };
        let ttl = if self.is_partial() { 0 } else { messages::TTL_MS };
        format!(
            r#","resultType":"complete","ttlMs":{ttl},"cacheScope":"{scope}","_meta":{{"{}":{}}}"#,
            meta::SERVER_INFO,
            self.server_info()
        )
    }

    /// Whether the offer of a backend is still missing in the lists.
    fn is_partial(&self) -> bool {
        let is_unknown = |number: &u32| self.backends[number].is_offer_unknown() && !self.is_off(*number);
        self.backends.order().iter().any(is_unknown)
    }

    /// Notifies the clients with this view that a list changed.
    pub(super) fn announce(&mut self, view: usize, family: Family) {
        let clients = self.clients.numbers_where(|_, client_state| client_state.view() == view);
        for client in clients {
            self.announce_to(client, family);
        }
    }

    pub(super) fn announce_to(&mut self, client: Client, family: Family) {
        if self.clients.get(&client).is_some_and(ClientState::hears_changes) {
            let message = message::notification_line(family.method(), "");
            self.out.push(Action::TellClient { client, message, about: None, said: Said::Other });
        }
        self.announce_to_listens(client, family);
    }
}

fn size(items: &[Bytes]) -> usize {
    items.iter().map(Bytes::len).sum()
}

/// The position in a list that a cursor of the gateway means. The list may have changed since; the client was notified
/// of that.
fn offset(cursor: &str, kind: List) -> Option<usize> {
    let (_, offset) =
        cursor.strip_prefix("outlast.")?.strip_prefix(kind.member())?.strip_prefix('.')?.split_once('.')?;
    offset.parse().ok()
}
