//! The catalogue: the offers of all backends, merged; the name of each element, its owner, and which clients see it.
//! Offers are read in [`super::lists`], and names are chosen in [`super::names`].

use std::{
    cell::{Cell, OnceCell},
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    hash::{DefaultHasher, Hash, Hasher as _},
    mem,
    rc::Rc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use rustc_hash::FxHashMap;

use super::{
    Gateway, Offer, Who,
    backends::{BackendState, Backends},
    elements::{Element, Names},
    guard,
    guard::Guards,
    names,
    names::{Candidate, Given, Owned},
    saved::SavedCatalogue,
    timers::Timer,
};
use crate::{
    json::Raw,
    mcp::{Family, List},
    message::quote,
};

/// How long the name of a tool or prompt may be; one with a longer name is left out.
const OWN_NAME_MAX: usize = 1 << 10;

/// How many elements all backends may list together, and how large these may be. A backend that lists less than its equal
/// part leaves the rest to the others; of the backends with the most, elements beyond that are left out.
const ELEMENTS_MAX: usize = 20_000;
const BYTES_MAX: usize = 16 << 20;
/// So much of each backend is listed in any case: how many backends there are is the choice of the operator.
const OWN_ELEMENTS_MIN: usize = 100;
const OWN_BYTES_MIN: usize = 64 << 10;
/// After the offers were merged, the next change of an offer waits this long for each element, if there are many.
const MERGE_PAUSE: Duration = Duration::from_micros(10);
/// So many elements are merged without a pause.
const MERGE_AT_ONCE_MAX: usize = 1_000;

/// Collisions that are written to the log at one change of the catalogue; the rest are counted.
const COLLISIONS_NOTED_MAX: usize = 20;

/// One tool, prompt, resource or template.
#[derive(Debug)]
pub(super) struct Entry {
    pub owner: u32,
    /// The name, address or template of addresses that clients see.
    pub shown: Rc<str>,
    /// Its backend's prefix and its own name, unchanged.
    raw: Rc<str>,
    /// What its backend says of it.
    element: Rc<Element>,
    /// The name that its backend knows as JSON, once it was needed.
    own_json: OnceCell<Rc<str>>,
    /// The schema of a tool's arguments.
    pub schema: Option<Bytes>,
    hash: u64,
}

/// Two backends offer the same name. It belongs to the winner, even while the winner does not offer it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Collision {
    pub kind: List,
    pub shown: Rc<str>,
    pub winner: u32,
    pub loser: u32,
}

#[derive(Debug, Default)]
pub(super) struct Catalogue {
    lists: [Vec<Entry>; 4],
    /// With a keyed hash, because backends choose the names; so have the next two.
    names: [HashMap<Rc<str>, u32>; 4],
    /// Names that are switched off, or whose backend is.
    off: [HashMap<Rc<str>, Off>; 4],
    collisions: Vec<Collision>,
    /// The first collision of each name.
    lost: HashMap<(List, Rc<str>), usize>,
    /// How many elements of each backend are left out, because all backends together list too many.
    left_out: BTreeMap<u32, usize>,
    pauses: Pauses,
    /// Clients may have seen this list.
    seen: [Cell<bool>; 4],
    /// Counts its changes, for cursors.
    version: u64,
    /// For each list, which backend owns a name that clients have seen.
    owned: [Owned; 4],
    /// One for each profile and role that a client has or had since the last change of the configuration.
    views: Vec<View>,
}

/// When changed offers are merged, if there are many elements.
#[derive(Debug, Clone, Copy, Default)]
struct Pauses {
    /// No change of an offer is merged before.
    until: Option<Instant>,
    /// A changed offer is not merged yet.
    is_changed: bool,
}

#[derive(Debug)]
struct Off {
    owner: u32,
    raw: Rc<str>,
}

/// What clients of one profile and one role see.
#[derive(Debug)]
pub(super) struct View {
    pub profile: Option<String>,
    pub role: Option<String>,
    /// Three tools to search, describe and call instead of the list.
    pub search: bool,
    shows: [Vec<u32>; 4],
    visible: [Vec<bool>; 4],
    hashes: [u64; 3],
    /// Backends whose resources it sees.
    open: BTreeSet<u32>,
}

impl Entry {
    /// The name that its backend knows.
    pub(super) fn own(&self) -> &str {
        &self.element.own
    }

    /// The same as JSON, if it differs from what clients see.
    pub(super) fn own_json(&self) -> Option<Rc<str>> {
        let json = || self.own_json.get_or_init(|| quote(self.own()).into());
        (!self.is_own_name()).then(|| Rc::clone(json()))
    }

    fn is_own_name(&self) -> bool {
        *self.shown == *self.element.own
    }

    /// Its annotations allow it to be called twice.
    pub(super) fn is_safe(&self) -> bool {
        self.element.is_safe
    }

    /// Its definition by its backend.
    pub(super) fn own_definition(&self) -> Option<Raw<'_>> {
        std::str::from_utf8(&self.element.json).ok().map(Raw::checked)
    }

    /// Its definition as clients see it.
    pub(super) fn definition(&self) -> Vec<u8> {
        let mut definition = Vec::with_capacity(self.element.json.len() + self.shown.len());
        self.write_definition(&mut definition);
        definition
    }

    pub(super) fn write_definition(&self, out: &mut Vec<u8>) {
        let Element { json, key, .. } = &*self.element;
        if self.is_own_name() {
            return out.extend_from_slice(json);
        }
        out.extend_from_slice(&json[..key.start]);
        out.extend_from_slice(quote(&self.shown).as_bytes());
        out.extend_from_slice(&json[key.end..]);
    }
}

impl Catalogue {
    /// Merges the offers in the order of the configuration. A name stays with the backend that owns it, and otherwise
    /// goes to the first backend that offers it. What is switched off keeps its name and is not listed.
    fn merged(backends: &Backends, guards: &Guards, owned: &[Owned; 4], version: u64) -> Catalogue {
        let mut catalogue = Catalogue { version, ..Catalogue::default() };
        let mut parts = Parts::of(backends);
        for kind in List::ALL {
            let (mut elements, mut candidates) = (Vec::new(), Vec::new());
            for (number, owner) in backends.in_order() {
                let all = owner.elements().of(kind);
                let kept = all.iter().filter(|(json, _)| parts.take(number, json.len()));
                let mut found = 0;
                for (_, element) in kept {
                    found += 1;
                    let Some(element) = element.as_ref().filter(|element| is_offered(kind, owner, element)) else {
                        continue;
                    };
                    candidates.push(candidate(kind, number, owner, element));
                    elements.push((element, owner.is_shared()));
                }
                let left_out = all.len() - found;
                if left_out > 0 {
                    *catalogue.left_out.entry(number).or_insert(0) += left_out;
                }
            }
            let is_off = |(_, backend): &(u32, &BackendState)| guards.is_backend_off(backend.name());
            let off: BTreeSet<u32> = backends.in_order().filter(is_off).map(|(number, _)| number).collect();
            let given = owned[kind as usize].give(&candidates);
            catalogue.names[kind as usize].reserve(candidates.len());
            catalogue.lists[kind as usize].reserve(candidates.len());
            for (((element, is_shared), candidate), given) in elements.into_iter().zip(candidates).zip(given) {
                let owner = candidate.owner;
                let shown = match given {
                    Given::Name(shown) => shown,
                    Given::Taken { name, by } => {
                        catalogue.collide(Collision { kind, shown: name, winner: by, loser: owner });
                        continue;
                    }
                };
                if off.contains(&owner) || kind == List::Tools && guards.is_tool_off(&shown) {
                    let off = Off { owner, raw: candidate.raw };
                    catalogue.off[kind as usize].insert(shown, off);
                } else {
                    let schema = element.schema.clone().filter(|_| !is_shared);
                    catalogue.add(kind, candidate, Rc::clone(element), schema, shown);
                }
            }
        }
        catalogue
    }

    fn collide(&mut self, collision: Collision) {
        let at = self.collisions.len();
        self.lost.entry((collision.kind, collision.shown.clone())).or_insert(at);
        self.collisions.push(collision);
    }

    fn add(
        &mut self,
        kind: List,
        Candidate { owner, raw, .. }: Candidate,
        element: Rc<Element>,
        schema: Option<Bytes>,
        shown: Rc<str>,
    ) {
        let mut hasher = DefaultHasher::new();
        (owner, element.hash, &shown).hash(&mut hasher);
        let index = kind as usize;
        self.names[index].insert(shown.clone(), self.lists[index].len() as u32);
        let hash = hasher.finish();
        self.lists[index].push(Entry { owner, shown, raw, element, own_json: OnceCell::new(), schema, hash });
    }

    /// Merges the offers again. Returns the catalogue that was replaced, without its views.
    fn merge(&mut self, backends: &Backends, guards: &Guards) -> Catalogue {
        self.keep_seen_names();
        let merged = Catalogue::merged(backends, guards, &self.owned, self.version + 1);
        let mut before = mem::replace(self, merged);
        self.owned = mem::take(&mut before.owned);
        self.views = mem::take(&mut before.views);
        self.pauses.until = before.pauses.until;
        before
    }

    /// Whether changed offers are merged now; if not, they are merged at the end of this pause.
    fn end_of_pause(&mut self, now: Instant) -> Option<Instant> {
        let until = self.pauses.until.filter(|until| *until > now);
        self.pauses.is_changed = until.is_some();
        until
    }

    fn begin_pause(&mut self, now: Instant) {
        let elements: usize = self.lists.iter().map(Vec::len).sum::<usize>() + self.collisions.len();
        let is_long = elements > MERGE_AT_ONCE_MAX;
        self.pauses.until = is_long.then(|| now + MERGE_PAUSE.saturating_mul(elements as u32));
    }

    /// When changed offers are merged.
    pub(super) fn merge_due(&self) -> Option<Instant> {
        self.pauses.until.filter(|_| self.pauses.is_changed)
    }

    /// Notes which backend owns each name that clients may have seen in this catalogue.
    fn keep_seen_names(&mut self) {
        for kind in List::ALL {
            let index = kind as usize;
            if self.seen[index].get() {
                let listed = self.lists[index].iter().map(|entry| (entry.owner, &entry.raw, &entry.shown));
                let off = self.off[index].iter().map(|(shown, off)| (off.owner, &off.raw, shown));
                self.owned[index].keep(listed.chain(off));
            }
        }
    }

    /// The configuration changes: names that clients have seen keep their owners, and names that they see from now on
    /// are noted anew.
    pub(super) fn begin_change(&mut self) {
        self.keep_seen_names();
        self.seen.iter().for_each(|seen| seen.set(false));
    }

    /// A backend keeps the names for which `stays` is true of the list and the raw name; the others become free.
    pub(super) fn release_names(&mut self, backend: u32, stays: impl Fn(List, &str) -> bool) {
        for kind in List::ALL {
            self.owned[kind as usize].release(backend, |raw| stays(kind, raw));
        }
    }

    /// The names that clients know; the lists follow from the offers of the backends.
    pub(super) fn save(&self) -> SavedCatalogue {
        SavedCatalogue {
            version: self.version,
            seen: self.seen.each_ref().map(Cell::get),
            owned: List::ALL.map(|kind| self.owned_by_now(kind)),
        }
    }

    /// Owner, raw name and shown name of everything that clients have seen in a list.
    fn owned_by_now(&self, kind: List) -> Vec<(u32, String, String)> {
        let index = kind as usize;
        let owned = self.owned[index].save().into_iter();
        let mut names: BTreeMap<(u32, String), String> =
            owned.map(|(owner, raw, shown)| ((owner, raw), shown)).collect();
        if self.seen[index].get() {
            let listed = self.lists[index].iter().map(|entry| (entry.owner, &entry.raw, &entry.shown));
            let off = self.off[index].iter().map(|(shown, off)| (off.owner, &off.raw, shown));
            let now = listed.chain(off).map(|(owner, raw, shown)| ((owner, raw.to_string()), shown.to_string()));
            names.extend(now);
        }
        names.into_iter().map(|((owner, raw), shown)| (owner, raw, shown)).collect()
    }

    /// Without lists: the offers are merged next, which counts as the same version.
    pub(super) fn restore(saved: SavedCatalogue) -> Catalogue {
        Catalogue {
            version: saved.version.saturating_sub(1),
            owned: saved.owned.map(Owned::restore),
            ..Catalogue::default()
        }
    }

    /// Clients may have seen these lists.
    pub(super) fn set_seen(&self, seen: [bool; 4]) {
        self.seen.iter().zip(seen).for_each(|(list, seen)| list.set(seen));
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn collisions(&self) -> &[Collision] {
        &self.collisions
    }

    pub(super) fn view(&self, index: usize) -> &View {
        &self.views[index]
    }

    /// The configuration changed: all views are made again.
    pub(super) fn clear_views(&mut self) {
        self.views.clear();
    }

    /// A client sees this list, or calls something in it: from now on its names keep their owners.
    pub(super) fn see(&self, kind: List) {
        self.seen[kind as usize].set(true);
    }

    /// The owner of a name that is switched off or whose backend is.
    pub(super) fn off_owner(&self, kind: List, shown: &str) -> Option<u32> {
        self.off[kind as usize].get(shown).map(|off| off.owner)
    }

    /// Whether a tool or prompt has this name, listed or off.
    pub(super) fn has_name(&self, shown: &str) -> bool {
        let has = |kind: List| self.names[kind as usize].contains_key(shown) || self.off_owner(kind, shown).is_some();
        has(List::Tools) || has(List::Prompts)
    }

    /// All tools by the names that clients see, also of those that are switched off, with their owners.
    pub(super) fn all_tools(&self) -> impl Iterator<Item = (&Rc<str>, u32)> {
        let index = List::Tools as usize;
        let listed = self.lists[index].iter().map(|entry| (&entry.shown, entry.owner));
        listed.chain(self.off[index].iter().map(|(shown, off)| (shown, off.owner)))
    }

    pub(super) fn find(&self, kind: List, shown: &str) -> Option<(u32, &Entry)> {
        let index = *self.names[kind as usize].get(shown)?;
        self.see(kind);
        Some((index, &self.lists[kind as usize][index as usize]))
    }

    pub(super) fn entry(&self, kind: List, index: u32) -> &Entry {
        &self.lists[kind as usize][index as usize]
    }

    pub(super) fn all(&self, kind: List) -> &[Entry] {
        &self.lists[kind as usize]
    }

    /// The collision of a name that several backends offer.
    pub(super) fn collision(&self, kind: List, shown: &str) -> Option<&Collision> {
        self.lost.get(&(kind, shown.into())).map(|at| &self.collisions[*at])
    }
}

/// What each backend may still add to a catalogue.
struct Parts {
    elements: usize,
    bytes: usize,
    taken: BTreeMap<u32, (usize, usize)>,
}

impl Parts {
    fn of(backends: &Backends) -> Parts {
        let needs = |of_list: fn(&Vec<Bytes>) -> usize| -> Vec<usize> {
            let owners = backends.in_order().map(|(_, owner)| owner);
            owners.map(|owner| List::ALL.into_iter().map(|kind| of_list(owner.offer().of(kind))).sum()).collect()
        };
        let elements = part(needs(Vec::len), ELEMENTS_MAX).max(OWN_ELEMENTS_MIN);
        let bytes = part(needs(|list| list.iter().map(Bytes::len).sum()), BYTES_MAX).max(OWN_BYTES_MIN);
        Parts { elements, bytes, taken: BTreeMap::new() }
    }

    /// False if there is no room for this element of a backend. A shorter one may still fit.
    fn take(&mut self, backend: u32, length: usize) -> bool {
        let (elements, bytes) = self.taken.entry(backend).or_default();
        let fits = *elements < self.elements && bytes.saturating_add(length) <= self.bytes;
        if fits {
            *elements += 1;
            *bytes += length;
        }
        fits
    }
}

/// The most that each may have, so that all together have no more than `max`: what one does not need is left to the others.
fn part(mut needs: Vec<usize>, max: usize) -> usize {
    needs.sort_unstable();
    let mut left = max;
    for (given, need) in needs.iter().enumerate() {
        let part = left / (needs.len() - given);
        if part < *need {
            return part;
        }
        left -= need;
    }
    usize::MAX
}

/// False if its name is too long, or if the configuration excludes it.
fn is_offered(kind: List, owner: &BackendState, element: &Element) -> bool {
    let is_long = matches!(kind, List::Tools | List::Prompts) && element.own.len() > OWN_NAME_MAX && !owner.is_shared();
    !is_long && (kind != List::Tools || guard::passes(&owner.settings().allow, &owner.settings().deny, &element.own))
}

fn candidate(kind: List, number: u32, owner: &BackendState, element: &Element) -> Candidate {
    if matches!(kind, List::Resources | List::Templates) {
        return Candidate { owner: number, raw: Rc::clone(&element.own), plain: Rc::clone(&element.own) };
    }
    let prefix = &owner.settings().prefix;
    let names = element.names(prefix, || {
        let raw: Rc<str> = format!("{prefix}{}", element.own).into();
        let plain = names::plain(prefix, &element.own);
        let plain = if *plain == *raw { Rc::clone(&raw) } else { plain.into() };
        Names { prefix: prefix.as_str().into(), raw, plain }
    });
    // A shared server keeps its names, whatever their characters.
    let plain = if owner.is_shared() { Rc::clone(&names.raw) } else { names.plain };
    Candidate { owner: number, raw: names.raw, plain }
}

impl View {
    pub(super) fn sees(&self, kind: List, index: u32) -> bool {
        self.visible[kind as usize].get(index as usize).copied().unwrap_or(false)
    }

    pub(super) fn shows(&self, kind: List) -> &[u32] {
        &self.shows[kind as usize]
    }

    /// Whether clients with this view may read resources of a backend, listed or not.
    pub(super) fn is_open(&self, owner: u32) -> bool {
        self.open.contains(&owner)
    }

    pub(super) fn family_hash(&self, family: Family) -> u64 {
        self.hashes[family as usize]
    }
}

impl Offer {
    pub(super) fn of(&self, kind: List) -> &Vec<Bytes> {
        match kind {
            List::Tools => &self.tools,
            List::Prompts => &self.prompts,
            List::Resources => &self.resources,
            List::Templates => &self.templates,
        }
    }

    pub(super) fn of_mut(&mut self, kind: List) -> &mut Vec<Bytes> {
        match kind {
            List::Tools => &mut self.tools,
            List::Prompts => &mut self.prompts,
            List::Resources => &mut self.resources,
            List::Templates => &mut self.templates,
        }
    }
}

impl Gateway {
    /// Merges the catalogue again, and notifies the clients whose view changed.
    pub(super) fn merge_catalogue(&mut self) {
        let before = self.catalogue.merge(&self.backends, &self.guards);
        self.note_collisions(&before);
        self.note_left_out(&before);
        for index in 0..self.catalogue.views.len() {
            let old = &self.catalogue.views[index];
            let new = self.make_view(old.profile.clone(), old.role.clone());
            let old = mem::replace(&mut self.catalogue.views[index], new);
            for family in Family::ALL {
                if old.family_hash(family) != self.catalogue.views[index].family_hash(family) {
                    self.announce(index, family);
                }
            }
        }
    }

    /// An offer changed. A catalogue with many elements is not merged again at once, because a backend may report changes
    /// without end.
    pub(super) fn merge_changed_offer(&mut self, now: Instant) {
        if let Some(until) = self.catalogue.end_of_pause(now) {
            return self.timers.arm(Timer::Catalogue, until);
        }
        self.merge_new_offer(now);
    }

    /// The same at once: a backend offers something for the first time, and requests may wait for that, or a switch was set.
    pub(super) fn merge_new_offer(&mut self, now: Instant) {
        self.merge_catalogue();
        self.catalogue.begin_pause(now);
        // Restored clients may watch resources that no backend listed until now.
        if self.clients.values().any(|client| client.subscriptions.is_watching()) {
            self.update_watches(now);
        }
    }

    fn note_left_out(&mut self, before: &Catalogue) {
        let left_out = self.catalogue.left_out.iter().filter(|(number, _)| !before.left_out.contains_key(number));
        let words = left_out.map(|(number, count)| {
            let name = self.backends.name(*number);
            format!("{name}: {count} of the elements that it lists are left out, because all backends together list too many")
        });
        let words: Vec<String> = words.collect();
        words.into_iter().for_each(|words| self.note(words));
    }

    fn note_collisions(&mut self, before: &Catalogue) {
        let known: HashSet<&Collision> = before.collisions.iter().collect();
        let new = self.catalogue.collisions.iter().filter(|collision| !known.contains(collision));
        let mut notes: Vec<String> = new.map(|collision| self.collision_words(collision)).collect();
        let more = notes.len().saturating_sub(COLLISIONS_NOTED_MAX);
        notes.truncate(COLLISIONS_NOTED_MAX);
        if more > 0 {
            let names = if more == 1 { "name is" } else { "names are" };
            notes.push(format!("{more} more {names} offered more than once; `outlast state` lists them"));
        }
        notes.into_iter().for_each(|words| self.note(words));
    }

    fn collision_words(&self, collision: &Collision) -> String {
        let (winner, loser) = (self.backends.name(collision.winner), self.backends.name(collision.loser));
        let (what, name) = (collision.kind.one(), &collision.shown);
        if winner == loser {
            return format!("{loser}: it lists the {what} `{name}` twice; only the first is offered");
        }
        let hint = match collision.kind {
            List::Tools | List::Prompts => "; give one of them another prefix",
            List::Resources | List::Templates => "",
        };
        format!("{loser}: the {what} `{name}` belongs to {winner} and is left out here{hint}")
    }

    /// The view of this profile and role. All names that are not configured share one view, so the number of views is
    /// bounded.
    pub(super) fn view_of(&mut self, who: &Who) -> usize {
        const NOT_THERE: &str = "";
        let profile = who.profile.as_deref().or(self.settings.default_profile.as_deref());
        let profile = profile.map(|name| if self.settings.profiles.contains_key(name) { name } else { NOT_THERE });
        let role = who.role.as_deref().filter(|_| !self.settings.roles.is_empty());
        let role = role.map(|name| if self.settings.roles.contains_key(name) { name } else { NOT_THERE });
        let fits = |view: &View| view.profile.as_deref() == profile && view.role.as_deref() == role;
        if let Some(index) = self.catalogue.views.iter().position(fits) {
            return index;
        }
        let view = self.make_view(profile.map(str::to_owned), role.map(str::to_owned));
        self.catalogue.views.push(view);
        self.catalogue.views.len() - 1
    }

    fn make_view(&self, profile: Option<String>, role: Option<String>) -> View {
        // An unknown profile shows nothing: it may have been meant to restrict the client.
        let rules = profile.as_ref().map(|name| self.settings.profiles.get(name));
        let sees_owner = |owner: u32| match rules {
            None => true,
            Some(None) => false,
            Some(Some(rules)) => rules.has_backend(self.backends.name(owner)),
        };
        let sees_tool = |shown: &str| match rules {
            None => true,
            Some(None) => false,
            Some(Some(rules)) => rules.has_tool(shown),
        };
        let may = |shown: &str| self.guards.allow(role.as_deref(), shown);
        // Roles name tools and prompts, not resources. Resources are visible to a role that may use any tool or prompt
        // of the same backend; without such names, to a role that may use its prefix.
        let mut named: FxHashMap<u32, bool> = FxHashMap::default();
        for entry in [List::Tools, List::Prompts].into_iter().flat_map(|kind| self.catalogue.all(kind)) {
            let allowed = named.entry(entry.owner).or_insert(false);
            *allowed = *allowed || may(&entry.shown);
        }
        let may_own = |number: &u32| match named.get(number) {
            Some(allowed) => *allowed,
            None => self.backends.get(number).is_some_and(|owner| may(&owner.settings().prefix)),
        };
        let open: BTreeSet<u32> =
            self.backends.keys().copied().filter(|owner| sees_owner(*owner) && may_own(owner)).collect();

        let mut view = View {
            search: rules.flatten().is_some_and(|rules| rules.search),
            profile,
            role: role.clone(),
            shows: Default::default(),
            visible: Default::default(),
            hashes: [0; 3],
            open,
        };
        let mut hashers: [DefaultHasher; 3] = Default::default();
        for kind in List::ALL {
            let entries = self.catalogue.all(kind);
            let sees = |entry: &Entry| match kind {
                List::Tools => sees_owner(entry.owner) && sees_tool(&entry.shown) && may(&entry.shown),
                List::Prompts => sees_owner(entry.owner) && may(&entry.shown),
                List::Resources | List::Templates => view.open.contains(&entry.owner),
            };
            view.visible[kind as usize] = entries.iter().map(sees).collect();
            let visible = &view.visible[kind as usize];
            view.shows[kind as usize] = (0..entries.len() as u32).filter(|index| visible[*index as usize]).collect();
            let hasher = &mut hashers[kind.family() as usize];
            kind.hash(hasher);
            for index in &view.shows[kind as usize] {
                entries[*index as usize].hash.hash(hasher);
            }
        }
        view.hashes = hashers.map(|hasher| hasher.finish());
        if view.search {
            // Its three tools never change.
            view.hashes[Family::Tools as usize] = 0;
        }
        view
    }
}
