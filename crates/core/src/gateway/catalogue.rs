//! All that the backends offer, merged: who owns what, under which name clients see it, and which client sees what.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::*;
use crate::{
    json::Raw,
    message::{Edit, pick, quote, splice},
};

/// The longest name that every client takes.
const NAME_MAX: usize = 64;

/// One tool, prompt, resource or template.
#[derive(Debug)]
pub(super) struct Entry {
    pub owner: u32,
    /// As clients see it: a name, an address or a template of addresses.
    pub shown: Rc<str>,
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

/// Somebody came too late with a name that was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Collision {
    pub kind: List,
    pub shown: String,
    pub winner: u32,
    pub loser: u32,
}

#[derive(Debug, Default)]
pub(super) struct Catalogue {
    lists: [Vec<Entry>; 4],
    names: [FxHashMap<Rc<str>, u32>; 4],
    pub collisions: Vec<Collision>,
    /// Counts its changes, for cursors.
    pub version: u64,
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

impl Catalogue {
    /// Merges what the owners offer, in the order of the file: who comes first keeps a name.
    pub fn merge<'a>(owners: impl Iterator<Item = (u32, &'a Owner)>, switches: &Switches, version: u64) -> Catalogue {
        let mut catalogue = Catalogue { version, ..Catalogue::default() };
        for (number, owner) in owners {
            if switches.is_backend_off(&owner.settings.name) {
                continue;
            }
            for kind in List::ALL {
                for json in owner.offer.of(kind) {
                    catalogue.add(kind, number, owner, json, switches);
                }
            }
        }
        catalogue
    }

    fn add(&mut self, kind: List, number: u32, owner: &Owner, json: &Bytes, switches: &Switches) {
        let Some(element) = std::str::from_utf8(json).ok().and_then(Raw::parse) else { return };
        let Some([Some(key), schema, annotations]) = pick(element, [key_of(kind), "inputSchema", "annotations"]) else {
            return;
        };
        let Some(own) = key.text() else { return };
        let schema = schema.filter(|_| kind == List::Tools).map(|schema| json.slice_ref(schema.get().as_bytes()));
        let is_safe = annotations.is_some_and(is_safe);
        let (shown, json): (Rc<str>, Bytes) = match kind {
            List::Tools | List::Prompts => {
                if kind == List::Tools && !guard::passes(&owner.settings.allow, &owner.settings.deny, &own) {
                    return;
                }
                let shown = name_shown(&owner.settings.prefix, &own);
                if kind == List::Tools && switches.is_tool_off(&shown) {
                    return;
                }
                let json = match shown == own {
                    true => json.clone(),
                    false => splice(json, vec![Edit::replace(json, key, quote(&shown))]),
                };
                (shown.into(), json)
            }
            List::Resources | List::Templates => (own.as_str().into(), json.clone()),
        };
        let index = kind as usize;
        if let Some(taken) = self.names[index].get(&shown) {
            let winner = self.lists[index][*taken as usize].owner;
            self.collisions.push(Collision { kind, shown: shown.to_string(), winner, loser: number });
            return;
        }
        let own_json = (*shown != *own).then(|| quote(&own).into());
        let mut hasher = DefaultHasher::new();
        (number, &json).hash(&mut hasher);
        self.names[index].insert(shown.clone(), self.lists[index].len() as u32);
        let (own, hash) = (own.into(), hasher.finish());
        self.lists[index].push(Entry { owner: number, shown, own, own_json, json, schema, is_safe, hash });
    }

    pub fn find(&self, kind: List, shown: &str) -> Option<(u32, &Entry)> {
        let index = *self.names[kind as usize].get(shown)?;
        Some((index, &self.lists[kind as usize][index as usize]))
    }

    pub fn entry(&self, kind: List, index: u32) -> &Entry {
        &self.lists[kind as usize][index as usize]
    }

    pub fn all(&self, kind: List) -> &[Entry] {
        &self.lists[kind as usize]
    }

    /// Who lost this name, if somebody did.
    pub fn loser(&self, kind: List, shown: &str) -> Option<&Collision> {
        self.collisions.iter().find(|collision| collision.kind == kind && collision.shown == shown)
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
    /// The catalogue may have changed: whoever sees a change is told, and nobody else.
    pub(super) fn merge_catalogue(&mut self) {
        let order = self.order.iter().filter_map(|number| Some((*number, self.owners.get(number)?)));
        let merged = Catalogue::merge(order, &self.switches, self.catalogue.version + 1);
        let before = mem::replace(&mut self.catalogue, merged);
        for collision in self.catalogue.collisions.clone() {
            if !before.collisions.contains(&collision) {
                self.note_collision(&collision);
            }
        }
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

    fn note_collision(&mut self, collision: &Collision) {
        let (winner, loser) = (self.owner_name(collision.winner), self.owner_name(collision.loser));
        let words = format!(
            "{loser}: `{}` is already offered by {winner} and is left out; give one of them another prefix",
            collision.shown
        );
        self.note(words);
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
        let may_own = |owner: u32| {
            let names = [List::Tools, List::Prompts].into_iter().flat_map(|kind| self.catalogue.all(kind));
            let mut names = names.filter(|entry| entry.owner == owner).map(|entry| &*entry.shown).peekable();
            match names.peek() {
                Some(_) => names.any(may),
                None => self.owners.get(&owner).is_some_and(|owner| may(&owner.settings.prefix)),
            }
        };
        let open: BTreeSet<u32> =
            self.owners.keys().copied().filter(|owner| sees_owner(*owner) && may_own(*owner)).collect();

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

/// What a backend calls a tool or prompt, by its definition.
pub(super) fn own_name(json: &Bytes) -> Option<String> {
    pick(std::str::from_utf8(json).ok().and_then(Raw::parse)?, ["name"])?[0]?.text()
}

/// A name that every client takes: letters, digits, `_` and `-`, at most 64 of them. Anything else becomes `_`; of what is
/// too long the end is replaced by a sum of the whole, so that two such names stay two.
pub(super) fn name_shown(prefix: &str, own: &str) -> String {
    let plain = |letter: char| if letter.is_ascii_alphanumeric() || letter == '-' { letter } else { '_' };
    let mut shown: String = prefix.chars().chain(own.chars()).map(plain).collect();
    if shown.is_empty() {
        shown.push('_');
    }
    if shown.len() > NAME_MAX {
        // FNV-1a: the sum must be the same in every run, as people write names down.
        let sum = own.bytes().fold(0x811c_9dc5_u32, |sum, byte| (sum ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        shown.truncate(NAME_MAX - 9);
        shown.push_str(&format!("_{sum:08x}"));
    }
    shown
}
