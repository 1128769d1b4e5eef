//! Lists stay true: after a restart the new child's are compared with what the client holds.

use super::{client::own_meta, lists::Diff, lists::Page, *};
use crate::message::{Raw, line, quote};

impl Relay {
    /// A page on its way to the client.
    pub(super) fn note_shown(&mut self, generation: u32, kind: Kind, cursor: Option<&str>, page: &Page<'_>) {
        let bytes_max = self.settings.limits.list_bytes_max;
        self.outdate(kind.family());
        let shown = self.shown.remove(&kind);
        let mut shown = match (cursor, shown) {
            (None, shown) => Shown::anew(shown, generation),
            (Some(cursor), Some(shown)) if shown.next.as_deref() == Some(cursor) => shown,
            // A page out of turn adds nothing that could be vouched for.
            (Some(_), shown) => {
                self.shown.extend(shown.map(|shown| (kind, shown)));
                return;
            }
        };
        shown.items.extend(kind, page, bytes_max);
        shown.next = page.next.clone();
        if shown.is_complete() {
            shown.before = None;
            self.remember_list(kind, &shown.items);
        }
        self.shown.insert(kind, shown);
        if kind == Kind::Tools {
            self.child_tools = self.shown[&kind].items.names();
        }
        if cursor.is_none() {
            self.announced.remove(&kind.family());
        }
    }

    /// A list that reached the client from a child that no longer serves, or one whose pages are of several children, is
    /// compared with that of the one that does.
    pub(super) fn compare_late(&mut self, generation: u32, kind: Kind, now: Instant) {
        if let Current::Serving(serving) = self.current
            && self.shown.get(&kind).is_some_and(|shown| generation != serving || shown.from != serving)
            && self.children.get(&serving).is_some_and(|child| !child.fetches.contains_key(&kind))
        {
            self.compare_one(serving, kind, now);
        }
    }

    /// A list that the client was given without a server: `items` is what it holds of the server's own.
    pub(super) fn note_shown_locally(&mut self, kind: Kind, items: Items) {
        self.outdate(kind.family());
        self.shown.insert(kind, Shown::whole(items));
        self.announced.remove(&kind.family());
    }

    /// A later child serves: every list that the client holds is fetched from it, beside the traffic.
    pub(super) fn compare(&mut self, generation: u32, now: Instant) {
        let told = self.told();
        for kind in Kind::ALL {
            let family = kind.family();
            let known = self.shown.contains_key(&kind) || (self.broken && self.opening_is_local());
            let own = self.shown.get(&kind).is_some_and(|shown| shown.from == generation);
            let under_way = self.children.get(&generation).is_some_and(|child| child.fetches.contains_key(&kind));
            if !known || own || under_way || !(self.is_modern() || told.has(family)) {
                continue;
            }
            self.shown.entry(kind).or_default();
            self.compare_one(generation, kind, now);
        }
    }

    /// A child that has no such list is not asked for it.
    fn compare_one(&mut self, generation: u32, kind: Kind, now: Instant) {
        let has = self.children.get(&generation).and_then(|child| child.capabilities);
        // One that said nothing of what it has can be asked.
        if has.is_none_or(|has| has.has(kind.family())) {
            self.fetch(generation, kind, None, now);
        } else {
            self.conclude(generation, kind, Some(Items::default()), now);
        }
    }

    /// We opened the conversation, and told of lists with nothing in them.
    fn opening_is_local(&self) -> bool {
        match &self.opening {
            Some(opening) => opening.local,
            None => self.is_modern(),
        }
    }

    /// Asks for a page. The first one begins the fetch.
    fn fetch(&mut self, generation: u32, kind: Kind, cursor: Option<&str>, now: Instant) {
        let id = self.private_id();
        let mut params = Vec::new();
        if let Some(cursor) = cursor {
            params.push(format!(r#""cursor":{}"#, quote(cursor)));
        }
        if self.is_modern() {
            params.push(format!(r#""_meta":{}"#, own_meta(&self.meta)));
        }
        let (method, params) = (kind.method(), params.join(","));
        let request = line(format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{{{params}}}}}"#));
        let by = now + self.settings.limits.list_max;
        let Some(child) = self.children.get_mut(&generation) else { return };
        child.private.insert(id.clone(), Private::Fetch(kind));
        let fetch = child.fetches.entry(kind).or_insert(Fetch {
            id: id.clone(),
            items: Items::default(),
            pages: 0,
            again: false,
            by,
        });
        fetch.id = id;
        self.tell_server(generation, request, None);
    }

    pub(super) fn fetched(&mut self, generation: u32, kind: Kind, result: Option<Raw<'_>>, now: Instant) {
        let limits = self.settings.limits.clone();
        let Some(child) = self.children.get_mut(&generation) else { return };
        let Some(fetch) = child.fetches.get_mut(&kind) else { return };
        let page = result.and_then(|result| Page::parse(kind, result));
        let Some(page) = page.filter(|_| fetch.pages < limits.list_pages_max) else {
            child.fetches.remove(&kind);
            return self.conclude(generation, kind, None, now);
        };
        fetch.pages += 1;
        fetch.items.extend(kind, &page, limits.list_bytes_max);
        if let Some(next) = page.next {
            return self.fetch(generation, kind, Some(&next), now);
        }
        let fetch = child.fetches.remove(&kind).expect("found above");
        if fetch.again {
            self.fetch(generation, kind, None, now);
            // A child that never rests does not put the comparison off for ever.
            if let Some(again) = self.children.get_mut(&generation).and_then(|child| child.fetches.get_mut(&kind)) {
                again.by = fetch.by;
            }
            return;
        }
        self.conclude(generation, kind, Some(fetch.items), now);
    }

    pub(super) fn fetches_late(&mut self, now: Instant) {
        let mut late = Vec::new();
        for (generation, child) in self.children.iter_mut().filter(|(_, child)| !child.stopping) {
            child.fetches.retain(|kind, fetch| {
                if fetch.by <= now {
                    child.private.insert(fetch.id.clone(), Private::LateFetch);
                    late.push((*generation, *kind));
                }
                fetch.by > now
            });
        }
        for (generation, kind) in late {
            self.conclude(generation, kind, None, now);
        }
    }

    /// The new list is known, or cannot be had: then the old one cannot be vouched for.
    fn conclude(&mut self, generation: u32, kind: Kind, items: Option<Items>, now: Instant) {
        let ours_before = self.our_names();
        if let Some(items) = &items {
            self.remember_list(kind, items);
        }
        let shown = self.shown.entry(kind).or_default();
        let doubtful = shown.doubtful;
        let diff = items.as_ref().map(|items| Diff::between(shown, items));
        if kind == Kind::Tools
            && let Some(items) = &items
        {
            self.child_tools = items.names();
        }
        let changed = doubtful || diff.as_ref().is_none_or(|diff| !diff.is_empty()) || self.our_names() != ours_before;
        if changed && self.current == Current::Serving(generation) {
            self.announce(kind.family());
        }
        if kind == Kind::Tools {
            self.restart_compared(generation, diff, now);
        }
    }

    /// A child's own word that a list changed.
    pub(super) fn list_changed_passes(&mut self, generation: u32, family: Family) -> bool {
        if !self.is_modern() && !self.told().has(family) {
            return false;
        }
        let Some(child) = self.children.get_mut(&generation) else { return false };
        let mut absorbed = false;
        for (_, fetch) in child.fetches.iter_mut().filter(|(kind, _)| kind.family() == family) {
            fetch.again = true;
            absorbed = true;
        }
        if !absorbed {
            self.outdate(family);
        }
        !absorbed
    }
}
