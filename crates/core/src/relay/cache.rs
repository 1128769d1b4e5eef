//! What a command's last run told its client, as one JSON text: the answer to its opening, and its lists. The driver keeps
//! the text in a file; this module says what stands in it and when it is saved.

use std::{collections::BTreeMap, time::Instant};

use serde_json::Value;

use super::{Relay, events::Action, lists::Items, saved::SavedMemory};
use crate::{
    mcp::{List, Page},
    message::{Raw, pick, quote, text},
    saved::Moment,
};

/// Another layout has another number, and is ignored.
const LAYOUT: &str = "1";

/// An entry that was read.
#[derive(Debug)]
pub(super) struct Cached {
    pub(super) revision: String,
    /// The server's result of `initialize`, or of `server/discover`.
    pub(super) opening: Option<String>,
    pub(super) lists: BTreeMap<List, Items>,
}

impl Cached {
    pub(super) fn parse(entry: &str, revision: &str) -> Result<Cached, String> {
        let whole = Raw::parse(entry).ok_or("it is not JSON")?;
        let [layout, of, opening, lists] =
            pick(whole, ["layout", "revision", "opening", "lists"]).ok_or("it is not an object")?;
        if layout.is_none_or(|layout| layout.get() != LAYOUT) {
            return Err("it was written by another version of outlast".into());
        }
        if of.and_then(text).as_deref() != Some(revision) {
            return Err("it belongs to another protocol revision".into());
        }
        let opening = opening.filter(|opening| opening.get().starts_with('{')).map(|opening| opening.get().to_owned());
        let lists = lists.ok_or("it has no lists")?;
        let mut found = BTreeMap::new();
        for list in List::ALL {
            if let Some(page) = Page::parse(list, lists) {
                let mut items = Items::default();
                items.extend(list, &page, usize::MAX);
                found.insert(list, items);
            }
        }
        Ok(Cached { revision: revision.to_owned(), opening, lists: found })
    }

    /// A client that lists only once gets what it needs from this entry.
    pub(super) fn has_lists(&self) -> bool {
        let capabilities = self.opening.as_ref().and_then(|opening| serde_json::from_str::<Value>(opening).ok());
        let has_tools = capabilities.is_none_or(|opening| opening["capabilities"].get("tools").is_some());
        !has_tools || self.lists.contains_key(&List::Tools)
    }
}

/// What this run has told its client so far, for the next one.
#[derive(Debug, Default)]
pub(super) struct Memory {
    revision: Option<String>,
    opening: Option<String>,
    /// The inside of a JSON array each.
    lists: BTreeMap<List, String>,
    changed: Changed,
}

#[derive(Debug, Default, PartialEq)]
enum Changed {
    #[default]
    No,
    Now,
    Since(Instant),
}

impl Memory {
    pub(super) fn save(&self, now: Instant) -> SavedMemory {
        SavedMemory {
            revision: self.revision.clone(),
            opening: self.opening.clone(),
            lists: self.lists.clone(),
            changed: match self.changed {
                Changed::No => None,
                Changed::Now => Some(Moment::of(now, now)),
                Changed::Since(at) => Some(Moment::of(at, now)),
            },
        }
    }

    pub(super) fn restore(saved: SavedMemory, now: Instant) -> Memory {
        Memory {
            revision: saved.revision,
            opening: saved.opening,
            lists: saved.lists,
            changed: saved.changed.map_or(Changed::No, |at| Changed::Since(at.at(now))),
        }
    }
}

impl Relay {
    /// A server's own answer to an opening, the client's or ours.
    pub(super) fn remember_opening(&mut self, result: Raw<'_>) {
        if !self.settings.cache || result.get().len() > self.settings.limits.cache.cache_bytes_max {
            return;
        }
        let revision = self.conversation.revision();
        if revision != self.memory.revision {
            self.memory = Memory { revision, ..Memory::default() };
        }
        if self.memory.opening.as_deref() != Some(result.get()) {
            self.memory.opening = Some(result.get().to_owned());
            self.memory.changed = Changed::Now;
        }
    }

    /// A complete list of a server's, as the inside of a JSON array; `None` if it is too large to keep.
    pub(super) fn remember_list(&mut self, list: List, inside: Option<String>) {
        if !self.settings.cache {
            return;
        }
        if self.memory.revision.is_none() && self.is_modern() {
            self.memory.revision = self.conversation.revision();
        }
        match inside {
            Some(inside) if self.memory.lists.get(&list) == Some(&inside) => return,
            Some(inside) => drop(self.memory.lists.insert(list, inside)),
            None => drop(self.memory.lists.remove(&list)),
        }
        self.memory.changed = Changed::Now;
    }

    pub(super) fn memory_deadline(&self) -> Option<Instant> {
        match self.memory.changed {
            Changed::Since(since) => Some(since + self.settings.limits.cache.cache_write_after),
            _ => None,
        }
    }

    /// Notes when the memory changed, after each event.
    pub(super) fn memory_settles(&mut self, now: Instant) {
        if self.memory.changed == Changed::Now {
            self.memory.changed = Changed::Since(now);
        }
    }

    /// Hands the memory to the driver, if it changed. An entry that is too large is not kept.
    pub(super) fn save_memory(&mut self) {
        if std::mem::take(&mut self.memory.changed) == Changed::No {
            return;
        }
        let Some(revision) = self.memory.revision.clone() else { return };
        let opening = self.memory.opening.as_deref().unwrap_or("null");
        let lists: Vec<String> =
            self.memory.lists.iter().map(|(list, inside)| format!("{}:[{inside}]", quote(list.member()))).collect();
        let entry = format!(
            r#"{{"layout":{LAYOUT},"revision":{},"opening":{opening},"lists":{{{}}}}}"#,
            quote(&revision),
            lists.join(",")
        );
        let entry = Some(entry).filter(|entry| entry.len() <= self.settings.limits.cache.cache_bytes_max);
        self.act(Action::SaveCache { revision, entry });
    }
}
