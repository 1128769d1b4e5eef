//! All that the backends offer, merged: who owns what, under which name clients see it, and which client sees what.

use std::{
    cell::Cell,
    hash::{DefaultHasher, Hash, Hasher},
};

use super::*;
use crate::{
    json::Raw,
    message::{Edit, pick, quote, splice},
};

use names::{Candidate, Given, Owned};

/// Collisions that are written to the log at one change of the catalogue; the rest are counted.
const COLLISIONS_NOTED_MAX: usize = 20;

/// One tool, prompt, resource or template.
#[derive(Debug)]
pub(super) struct Entry {
    pub owner: u32,
    /// As clients see it: a name, an address or a template of addresses.
    pub shown: Rc<str>,
    /// Its backend's prefix and its own name, unchanged.
    raw: Rc<str>,
    /// As its backend calls it.
    pub own: Box<str>,
    /// The same as JSON, where it differs from what clients see.
    pub own_json: Option<Rc<str>>,
    /// Its definition as clients see it.
    pub json: Bytes,
    /// What a tool's arguments must be like.
    pub schema: Option<Bytes>,
    /// Its annotations say that calling it twice does no harm.
    pub is_safe: bool,
    hash: u64,
}

/// Two backends offer the same name. It belongs to the winner, whether that offers it at the moment or not.
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
    names: [FxHashMap<Rc<str>, u32>; 4],
    /// What is switched off, or whose backend is: its owner.
    off: [FxHashMap<Rc<str>, Off>; 4],
    pub collisions: Vec<Collision>,
    /// The first collision of each name.
    lost: FxHashMap<(List, Rc<str>), usize>,
    /// Clients may have seen what is in a list.
    seen: [Cell<bool>; 4],
    /// Counts its changes, for cursors.
    pub version: u64,
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
    /// Three tools of our own instead of all the others.
    pub search: bool,
    shows: [Vec<u32>; 4],
    visible: [Vec<bool>; 4],
    hashes: [u64; 3],
    /// Backends whose resources it sees.
    open: BTreeSet<u32>,
}

/// One element of a list before it has a name.
struct Element<'a> {
    owner: u32,
    own: String,
    json: &'a Bytes,
    /// Where its name is in `json`.
    key: Raw<'a>,
    schema: Option<Bytes>,
    is_safe: bool,
}

impl Catalogue {
    /// Merges what the owners offer, in the order of the configuration. Names belong to those who own them already, then to
    /// the backend that comes first; what is switched off keeps its name and is not listed.
    pub fn merge<'a>(
        owners: impl Iterator<Item = (u32, &'a Owner)> + Clone,
        owned: &[Owned; 4],
        switches: &Switches,
        version: u64,
    ) -> Catalogue {
        let mut catalogue = Catalogue { version, ..Catalogue::default() };
        for kind in List::ALL {
            let (mut elements, mut candidates) = (Vec::new(), Vec::new());
            for (number, owner) in owners.clone() {
                let found = owner.offer.of(kind).iter().filter_map(|json| Element::read(kind, number, owner, json));
                for element in found {
                    candidates.push(element.candidate(kind, &owner.settings.prefix));
                    elements.push(element);
                }
            }
            let off: BTreeSet<u32> = owners
                .clone()
                .filter(|(_, owner)| switches.is_backend_off(&owner.settings.name))
                .map(|(number, _)| number)
                .collect();
            let given = owned[kind as usize].give(&candidates);
            for ((element, candidate), given) in elements.into_iter().zip(candidates).zip(given) {
                let shown = match given {
                    Given::Name(shown) => shown,
                    Given::Taken { name, by } => {
                        catalogue.collide(Collision { kind, shown: name, winner: by, loser: element.owner });
                        continue;
                    }
                };
                if off.contains(&element.owner) || kind == List::Tools && switches.is_tool_off(&shown) {
                    let off = Off { owner: element.owner, raw: candidate.raw };
                    catalogue.off[kind as usize].insert(shown, off);
                } else {
                    catalogue.add(kind, element, candidate.raw, shown);
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

    fn add(&mut self, kind: List, element: Element<'_>, raw: Rc<str>, shown: Rc<str>) {
        let Element { owner, own, json, key, schema, is_safe } = element;
        let is_same = *shown == *own;
        let json = if is_same { json.clone() } else { splice(json, vec![Edit::replace(json, key, quote(&shown))]) };
        let own_json = (!is_same).then(|| quote(&own).into());
        let mut hasher = DefaultHasher::new();
        (owner, &json).hash(&mut hasher);
        let index = kind as usize;
        self.names[index].insert(shown.clone(), self.lists[index].len() as u32);
        let (own, hash) = (own.into(), hasher.finish());
        self.lists[index].push(Entry { owner, shown, raw, own, own_json, json, schema, is_safe, hash });
    }

    /// Notes who owns what clients may have seen in this catalogue.
    pub fn remember(&self, owned: &mut [Owned; 4]) {
        for kind in List::ALL {
            let index = kind as usize;
            if self.seen[index].get() {
                let listed = self.lists[index].iter().map(|entry| (entry.owner, &entry.raw, &entry.shown));
                let off = self.off[index].iter().map(|(shown, off)| (off.owner, &off.raw, shown));
                owned[index].keep(listed.chain(off));
            }
        }
    }

    /// A client is shown something of this list, or names it itself: from here on its names keep their owners.
    pub fn see(&self, kind: List) {
        self.seen[kind as usize].set(true);
    }

    /// What clients have seen was noted: see [`Catalogue::remember`].
    pub fn forget_seen(&self) {
        self.seen.iter().for_each(|seen| seen.set(false));
    }

    /// Who owns this name, of those that are not listed because they or their backends are switched off.
    pub fn off_owner(&self, kind: List, shown: &str) -> Option<u32> {
        self.off[kind as usize].get(shown).map(|off| off.owner)
    }

    /// Whether a tool or prompt has this name, listed or off.
    pub fn has_name(&self, shown: &str) -> bool {
        let has = |kind: List| self.names[kind as usize].contains_key(shown) || self.off_owner(kind, shown).is_some();
        has(List::Tools) || has(List::Prompts)
    }

    /// All tools by the names that clients see or would see, with their owners; those that are off too.
    pub fn all_tools(&self) -> impl Iterator<Item = (&Rc<str>, u32)> {
        let index = List::Tools as usize;
        let listed = self.lists[index].iter().map(|entry| (&entry.shown, entry.owner));
        listed.chain(self.off[index].iter().map(|(shown, off)| (shown, off.owner)))
    }

    pub fn find(&self, kind: List, shown: &str) -> Option<(u32, &Entry)> {
        let index = *self.names[kind as usize].get(shown)?;
        self.see(kind);
        Some((index, &self.lists[kind as usize][index as usize]))
    }

    pub fn entry(&self, kind: List, index: u32) -> &Entry {
        &self.lists[kind as usize][index as usize]
    }

    pub fn all(&self, kind: List) -> &[Entry] {
        &self.lists[kind as usize]
    }

    /// Which backends offer this name, if several do.
    pub fn collision(&self, kind: List, shown: &str) -> Option<&Collision> {
        self.lost.get(&(kind, shown.into())).map(|at| &self.collisions[*at])
    }
}

impl<'a> Element<'a> {
    /// Nothing if it has no name, or if the configuration leaves it out.
    fn read(kind: List, number: u32, owner: &Owner, json: &'a Bytes) -> Option<Element<'a>> {
        let element = std::str::from_utf8(json).ok().and_then(Raw::parse)?;
        let [key, schema, annotations] = pick(element, [key_of(kind), "inputSchema", "annotations"])?;
        let key = key?;
        let own = key.text()?;
        if matches!(kind, List::Tools | List::Prompts) && own.len() > OWN_NAME_MAX {
            return None;
        }
        if kind == List::Tools && !guard::passes(&owner.settings.allow, &owner.settings.deny, &own) {
            return None;
        }
        let schema = schema.filter(|_| kind == List::Tools).map(|schema| json.slice_ref(schema.get().as_bytes()));
        Some(Element { owner: number, own, json, key, schema, is_safe: annotations.is_some_and(is_safe) })
    }

    fn candidate(&self, kind: List, prefix: &str) -> Candidate {
        let raw: Rc<str> = match kind {
            List::Tools | List::Prompts => format!("{prefix}{}", self.own).into(),
            List::Resources | List::Templates => self.own.as_str().into(),
        };
        let plain: Rc<str> = match kind {
            List::Tools | List::Prompts => {
                let plain = names::plain(prefix, &self.own);
                if *plain == *raw { raw.clone() } else { plain.into() }
            }
            List::Resources | List::Templates => raw.clone(),
        };
        Candidate { owner: self.owner, raw, plain }
    }
}

impl View {
    pub fn sees(&self, kind: List, index: u32) -> bool {
        self.visible[kind as usize].get(index as usize).copied().unwrap_or(false)
    }

    pub fn shows(&self, kind: List) -> &[u32] {
        &self.shows[kind as usize]
    }

    /// Whether resources of a backend are for it, listed or not.
    pub fn is_open(&self, owner: u32) -> bool {
        self.open.contains(&owner)
    }

    pub fn family_hash(&self, family: Family) -> u64 {
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
    /// The catalogue may have changed: the clients that see a change are told.
    pub(super) fn merge_catalogue(&mut self) {
        self.catalogue.remember(&mut self.owned);
        let order = self.order.iter().filter_map(|number| Some((*number, self.owners.get(number)?)));
        let merged = Catalogue::merge(order, &self.owned, &self.switches, self.catalogue.version + 1);
        let before = mem::replace(&mut self.catalogue, merged);
        self.note_collisions(&before);
        for index in 0..self.views.len() {
            let old = &self.views[index];
            let new = self.look(old.profile.clone(), old.role.clone());
            let old = mem::replace(&mut self.views[index], new);
            for family in Family::ALL {
                if old.family_hash(family) != self.views[index].family_hash(family) {
                    self.announce(index, family);
                }
            }
        }
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
        let (winner, loser) = (self.owner_name(collision.winner), self.owner_name(collision.loser));
        let (what, name) = (collision.kind.one(), &collision.shown);
        if winner == loser {
            return format!("{loser}: it lists the {what} `{name}` twice; only the first counts");
        }
        let hint = match collision.kind {
            List::Tools | List::Prompts => "; give one of them another prefix",
            List::Resources | List::Templates => "",
        };
        format!("{loser}: the {what} `{name}` belongs to {winner} and is left out here{hint}")
    }

    /// The view of everyone with this profile and role. Names that the configuration does not have share one, so that
    /// there are never more views than it can tell apart.
    pub(super) fn view_of(&mut self, who: &Who) -> usize {
        const NOT_THERE: &str = "";
        let profile = who.profile.as_deref().or(self.settings.default_profile.as_deref());
        let profile = profile.map(|name| if self.settings.profiles.contains_key(name) { name } else { NOT_THERE });
        let role = who.role.as_deref().filter(|_| !self.settings.roles.is_empty());
        let role = role.map(|name| if self.settings.roles.contains_key(name) { name } else { NOT_THERE });
        let fits = |view: &View| view.profile.as_deref() == profile && view.role.as_deref() == role;
        if let Some(index) = self.views.iter().position(fits) {
            return index;
        }
        let view = self.look(profile.map(str::to_owned), role.map(str::to_owned));
        self.views.push(view);
        self.views.len() - 1
    }

    fn look(&self, profile: Option<String>, role: Option<String>) -> View {
        // A profile that is not there shows nothing: it may have been the one thing between a client and the rest.
        let rules = profile.as_ref().map(|name| self.settings.profiles.get(name));
        let sees_owner = |owner: u32| match rules {
            None => true,
            Some(None) => false,
            Some(Some(rules)) => rules.has_backend(self.owner_name(owner)),
        };
        let sees_tool = |shown: &str| match rules {
            None => true,
            Some(None) => false,
            Some(Some(rules)) => rules.has_tool(shown),
        };
        let may = |shown: &str| self.roles.allow(role.as_deref(), shown);
        // Resources have no name that a role could speak of: they are open to those who may use anything else of the
        // same backend, or whatever it would offer.
        let mut named: FxHashMap<u32, bool> = FxHashMap::default();
        for entry in [List::Tools, List::Prompts].into_iter().flat_map(|kind| self.catalogue.all(kind)) {
            let allowed = named.entry(entry.owner).or_insert(false);
            *allowed = *allowed || may(&entry.shown);
        }
        let may_own = |number: &u32| match named.get(number) {
            Some(allowed) => *allowed,
            None => self.owners.get(number).is_some_and(|owner| may(&owner.settings.prefix)),
        };
        let open: BTreeSet<u32> =
            self.owners.keys().copied().filter(|owner| sees_owner(*owner) && may_own(owner)).collect();

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

fn is_safe(annotations: Raw<'_>) -> bool {
    let hints = pick(annotations, ["readOnlyHint", "idempotentHint"]).unwrap_or_default();
    hints.into_iter().any(|hint| hint.is_some_and(|hint| hint.get() == "true"))
}

fn key_of(kind: List) -> &'static str {
    match kind {
        List::Tools | List::Prompts => "name",
        List::Resources => "uri",
        List::Templates => "uriTemplate",
    }
}
