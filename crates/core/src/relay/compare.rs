//! Compares the lists of a new child with those that the client has, and announces each list that changed.

use std::time::Instant;

use super::{
    Relay,
    endpoint::{Fetch, Private},
    lists::{Diff, Items},
    requests::Class,
};
use crate::{
    mcp::{Family, List, Page},
    message::{Raw, quote, request_line},
};

impl Relay {
    /// A page on its way to the client.
    pub(super) fn note_shown(&mut self, generation: u32, list: List, cursor: Option<&str>, page: &Page<'_>) {
        let bytes_max = self.settings.limits.lists.list_bytes_max;
        self.requests.outdate(list.family());
        let Some(is_complete) = self.lists.note_page(generation, list, cursor, page, bytes_max) else { return };
        if is_complete && self.settings.cache {
            let inside = self.lists.get(list).and_then(|shown| shown.items.joined());
            self.remember_list(list, inside);
        }
    }

    /// A list that reached the client from a child that no longer serves, or one whose pages are of several children, is
    /// compared with that of the one that does.
    pub(super) fn compare_late(&mut self, generation: u32, list: List, now: Instant) {
        if let Some(serving) = self.servers.slot.serving()
            && self.lists.get(list).is_some_and(|shown| generation != serving || shown.from != serving)
            && self.servers.get(serving).is_some_and(|child| !child.fetches.contains_key(&list))
        {
            self.compare_one(serving, list, now);
        }
    }

    /// A list that the client was given without a server: `items` is what it holds of the server's own.
    pub(super) fn note_shown_locally(&mut self, list: List, items: Items) {
        self.requests.outdate(list.family());
        self.lists.note_whole(list, items);
    }

    /// A later child serves: every list that the client holds is fetched from it, beside the traffic.
    pub(super) fn compare(&mut self, generation: u32, now: Instant) {
        let told = self.conversation.told();
        for list in List::ALL {
            let family = list.family();
            let known = self.lists.get(list).is_some()
                || (self.conversation.is_broken() && self.conversation.is_opened_by_us());
            let own = self.lists.get(list).is_some_and(|shown| shown.from == generation);
            let under_way = self.servers.get(generation).is_some_and(|child| child.fetches.contains_key(&list));
            if !known || own || under_way || !(self.is_modern() || told.has(family)) {
                continue;
            }
            self.lists.begin(list);
            self.compare_one(generation, list, now);
        }
    }

    /// A child that has no such list is not asked for it.
    fn compare_one(&mut self, generation: u32, list: List, now: Instant) {
        let has = self.servers.get(generation).and_then(|child| child.capabilities);
        // A child without known capabilities is asked for the list.
        if has.is_none_or(|has| has.has(list.family())) {
            self.fetch(generation, list, None, now);
        } else {
            self.conclude(generation, list, Some(Items::default()), now);
        }
    }

    /// Asks for a page. The first one begins the fetch.
    fn fetch(&mut self, generation: u32, list: List, cursor: Option<&str>, now: Instant) {
        let id = self.private_id();
        let mut params = Vec::new();
        if let Some(cursor) = cursor {
            params.push(format!(r#""cursor":{}"#, quote(cursor)));
        }
        if self.is_modern() {
            params.push(format!(r#""_meta":{}"#, self.conversation.own_meta()));
        }
        let request = request_line(&id, list.method(), &params.join(","));
        let by = now + self.settings.limits.lists.list_max;
        let Some(child) = self.servers.get_mut(generation) else { return };
        child.private.insert(id.clone(), Private::Fetch(list));
        let fetch = child.fetches.entry(list).or_insert(Fetch {
            id: id.clone(),
            items: Items::default(),
            pages: 0,
            again: false,
            by,
        });
        fetch.id = id;
        self.tell_server(generation, request, None);
    }

    pub(super) fn fetched(&mut self, generation: u32, list: List, result: Option<Raw<'_>>, now: Instant) {
        let limits = self.settings.limits.clone();
        let Some(child) = self.servers.get_mut(generation) else { return };
        let Some(fetch) = child.fetches.get_mut(&list) else { return };
        let page = result.and_then(|result| Page::parse(list, result));
        let Some(page) = page.filter(|_| fetch.pages < limits.lists.list_pages_max) else {
            child.fetches.remove(&list);
            return self.conclude(generation, list, None, now);
        };
        fetch.pages += 1;
        fetch.items.extend(list, &page, limits.lists.list_bytes_max);
        if let Some(next) = page.next {
            return self.fetch(generation, list, Some(&next), now);
        }
        let fetch = child.fetches.remove(&list).expect("found above");
        if fetch.again {
            self.fetch(generation, list, None, now);
            // A child that keeps changing its list does not delay the comparison without end.
            if let Some(again) = self.servers.get_mut(generation).and_then(|child| child.fetches.get_mut(&list)) {
                again.by = fetch.by;
            }
            return;
        }
        self.conclude(generation, list, Some(fetch.items), now);
    }

    /// The list did not come in time.
    pub(super) fn fetch_late(&mut self, generation: u32, list: List, now: Instant) {
        if let Some(child) = self.servers.get_mut(generation)
            && let Some(fetch) = child.fetches.remove(&list)
        {
            child.private.insert(fetch.id, Private::LateFetch);
            self.conclude(generation, list, None, now);
        }
    }

    /// The new list is known, or cannot be had: then the old one cannot be vouched for.
    fn conclude(&mut self, generation: u32, list: List, items: Option<Items>, now: Instant) {
        let ours_before = self.our_names();
        if let Some(items) = &items {
            self.remember_list(list, items.joined());
        }
        let shown = self.lists.begin(list);
        let doubtful = shown.doubtful;
        let diff = items.as_ref().map(|items| Diff::between(shown, items));
        if list == List::Tools
            && let Some(items) = &items
        {
            self.lists.set_tools(items.names());
        }
        let changed = doubtful || diff.as_ref().is_none_or(|diff| !diff.is_empty()) || self.our_names() != ours_before;
        if changed && self.servers.slot.serving() == Some(generation) {
            self.announce(list.family());
        }
        if list == List::Tools {
            self.restart_compared(generation, diff, now);
        }
    }

    /// A child's own notification that a list changed.
    pub(super) fn list_changed_passes(&mut self, generation: u32, family: Family) -> bool {
        if !self.is_modern() && !self.conversation.told().has(family) {
            return false;
        }
        // A list that the client has, or is about to get, from before the change.
        let asked: Vec<u64> = self.requests.on(generation);
        let is_held = |list: &List| {
            let is_asked = |seq: &u64| self.requests[*seq].class == Class::List(*list);
            self.lists.get(*list).is_some() || asked.iter().any(is_asked)
        };
        let held: Vec<List> = List::ALL.into_iter().filter(|list| list.family() == family && is_held(list)).collect();
        let Some(child) = self.servers.get_mut(generation) else { return false };
        let mut absorbed = false;
        for (_, fetch) in child.fetches.iter_mut().filter(|(list, _)| list.family() == family) {
            fetch.again = true;
            absorbed = true;
        }
        absorbed &= held.iter().all(|list| child.fetches.contains_key(list));
        if !absorbed {
            self.requests.outdate(family);
        }
        !absorbed
    }
}
