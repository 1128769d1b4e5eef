//! What the client was shown of each list, and whether a new server's list is another one.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    hash::{DefaultHasher, Hash, Hasher},
};

use serde_json::Value;

use super::saved::{SavedItems, SavedLists, SavedShown};
use crate::{
    mcp::{Family, List, Page},
    message::{pick, text},
};

/// The items of one list, by key. Past `list_bytes_max` only their hashes stay: they can be compared, not served.
#[derive(Debug, Clone, Default)]
pub(super) struct Items {
    items: BTreeMap<String, Item>,
    /// Keys in the order they came, for serving the list again.
    order: Vec<String>,
    bytes: usize,
    too_big: bool,
}

#[derive(Debug, Clone)]
struct Item {
    hash: u64,
    raw: Box<str>,
}

/// How many elements of one list are kept to be compared; a longer list is not served again.
const ITEMS_MAX: usize = 100_000;

impl Items {
    pub(super) fn extend(&mut self, list: List, page: &Page<'_>, bytes_max: usize) {
        for raw in &page.items {
            let Some(key) = pick(*raw, [list.key()]).and_then(|[key]| text(key?)) else { continue };
            self.bytes += raw.get().len();
            self.too_big |= self.bytes > bytes_max || page.is_cut;
            if self.items.len() >= ITEMS_MAX && !self.items.contains_key(&key) {
                self.too_big = true;
                continue;
            }
            let item = Item { hash: hash(raw.get()), raw: raw.get().into() };
            if self.items.insert(key.clone(), item).is_none() {
                self.order.push(key);
            }
        }
        if self.too_big {
            self.items.values_mut().for_each(|item| item.raw = "".into());
        }
    }

    pub(super) fn save(&self) -> SavedItems {
        let items = self.order.iter().map(|key| (key.clone(), &self.items[key]));
        if self.too_big {
            SavedItems::Hashes { items: items.map(|(key, item)| (key, item.hash)).collect(), bytes: self.bytes }
        } else {
            SavedItems::Whole {
                items: items.map(|(key, item)| (key, item.raw.to_string())).collect(),
                bytes: self.bytes,
            }
        }
    }

    pub(super) fn restore(saved: SavedItems) -> Items {
        let mut restored = Items::default();
        let mut put = |key: String, item: Item| {
            restored.items.insert(key.clone(), item);
            restored.order.push(key);
        };
        match saved {
            SavedItems::Whole { items, bytes } => {
                items.into_iter().for_each(|(key, raw)| put(key, Item { hash: hash(&raw), raw: raw.into() }));
                restored.bytes = bytes;
            }
            SavedItems::Hashes { items, bytes } => {
                items.into_iter().for_each(|(key, hash)| put(key, Item { hash, raw: "".into() }));
                (restored.bytes, restored.too_big) = (bytes, true);
            }
        }
        restored
    }

    pub(super) fn names(&self) -> HashSet<String> {
        self.items.keys().cloned().collect()
    }

    /// The definition of one item, while definitions are kept.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.items.get(key).map(|item| &*item.raw).filter(|raw| !raw.is_empty())
    }

    /// The items as the inside of a JSON array; `None` if they were too big to keep.
    pub(super) fn joined(&self) -> Option<String> {
        if self.too_big {
            return None;
        }
        let raws: Vec<&str> = self.order.iter().map(|key| &*self.items[key].raw).collect();
        Some(raws.join(","))
    }
}

/// What the client holds of one list.
#[derive(Debug, Clone, Default)]
pub(super) struct Shown {
    pub items: Items,
    /// The cursor of the page that comes next; `None` once the last page was shown.
    pub next: Option<String>,
    /// The child whose first page it was.
    pub from: u32,
    /// The last complete list, while a newer one is still being shown.
    pub before: Option<Items>,
    /// Another list reached the client after this one: the list of any server may differ from it.
    pub doubtful: bool,
}

impl Shown {
    fn save(&self) -> SavedShown {
        SavedShown {
            items: self.items.save(),
            next: self.next.clone(),
            from: self.from,
            before: self.before.as_ref().map(Items::save),
            doubtful: self.doubtful,
        }
    }

    fn restore(saved: SavedShown) -> Shown {
        Shown {
            items: Items::restore(saved.items),
            next: saved.next,
            from: saved.from,
            before: saved.before.map(Items::restore),
            doubtful: saved.doubtful,
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.next.is_none() && !self.doubtful
    }

    /// The last complete list that was shown.
    pub(super) fn last_good(&self) -> Option<&Items> {
        if self.is_complete() { Some(&self.items) } else { self.before.as_ref() }
    }

    fn into_last_good(self) -> Option<Items> {
        if self.is_complete() { Some(self.items) } else { self.before }
    }

    /// The client lists anew, from the first page.
    pub(super) fn anew(before: Option<Shown>, from: u32) -> Shown {
        Shown { before: before.and_then(Shown::into_last_good), from, ..Shown::default() }
    }

    /// The client was given a list whole.
    pub(super) fn whole(items: Items) -> Shown {
        Shown { items, ..Shown::default() }
    }
}

/// What the client holds of every list, which changes it was told of, and the names of the server's tools.
#[derive(Debug, Default)]
pub(super) struct Lists {
    shown: BTreeMap<List, Shown>,
    /// Families whose change was announced since the client last listed them.
    announced: BTreeSet<Family>,
    /// The names that the server's own tools take.
    tools: HashSet<String>,
}

impl Lists {
    pub(super) fn save(&self) -> SavedLists {
        SavedLists {
            shown: self.shown.iter().map(|(list, shown)| (*list, shown.save())).collect(),
            announced: self.announced.clone(),
            tools: self.tools.iter().cloned().collect(),
        }
    }

    pub(super) fn restore(saved: SavedLists) -> Lists {
        Lists {
            shown: saved.shown.into_iter().map(|(list, shown)| (list, Shown::restore(shown))).collect(),
            announced: saved.announced,
            tools: saved.tools.into_iter().collect(),
        }
    }

    pub(super) fn get(&self, list: List) -> Option<&Shown> {
        self.shown.get(&list)
    }

    /// What the client holds of a list that is to be compared: nothing, if it was never shown.
    pub(super) fn begin(&mut self, list: List) -> &Shown {
        self.shown.entry(list).or_default()
    }

    /// The definition of one of the server's tools, as the client was shown it.
    pub(super) fn tool(&self, name: &str) -> Option<Value> {
        let raw = self.shown.get(&List::Tools)?.items.get(name)?;
        serde_json::from_str(raw).ok()
    }

    pub(super) fn has_tool(&self, name: &str) -> bool {
        self.tools.contains(name)
    }

    pub(super) fn set_tools(&mut self, names: HashSet<String>) {
        self.tools = names;
    }

    /// A page reaches the client. Whether the list is complete with it; `None` if the page is not the next one, and adds
    /// nothing that can be compared.
    pub(super) fn note_page(
        &mut self,
        generation: u32,
        list: List,
        cursor: Option<&str>,
        page: &Page<'_>,
        bytes_max: usize,
    ) -> Option<bool> {
        let before = self.shown.remove(&list);
        let mut shown = match (cursor, before) {
            (None, before) => Shown::anew(before, generation),
            (Some(cursor), Some(before)) if before.next.as_deref() == Some(cursor) => before,
            (Some(_), before) => {
                self.shown.extend(before.map(|before| (list, before)));
                return None;
            }
        };
        shown.items.extend(list, page, bytes_max);
        shown.next = page.next.clone();
        let is_complete = shown.is_complete();
        if is_complete {
            shown.before = None;
        }
        if list == List::Tools {
            self.tools = shown.items.names();
        }
        self.shown.insert(list, shown);
        if cursor.is_none() {
            self.listed(list.family());
        }
        Some(is_complete)
    }

    /// A list that the client was given without a server: `items` is what it holds of the server's own.
    pub(super) fn note_whole(&mut self, list: List, items: Items) {
        self.shown.insert(list, Shown::whole(items));
        self.listed(list.family());
    }

    /// The client listed a family: its next change is announced again.
    pub(super) fn listed(&mut self, family: Family) {
        self.announced.remove(&family);
    }

    pub(super) fn announced(&mut self, family: Family) {
        self.announced.insert(family);
    }

    pub(super) fn is_announced(&self, family: Family) -> bool {
        self.announced.contains(&family)
    }

    /// The client holds an older list than the last one shown: no server's list can be compared with it.
    pub(super) fn doubt(&mut self, family: Family) {
        let shown = self.shown.iter_mut().filter(|(list, _)| list.family() == family);
        shown.for_each(|(_, shown)| shown.doubtful = true);
    }
}

/// How a new list differs from what the client holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Diff {
    pub added: Vec<String>,
    pub removed: Vec<String>,
    pub changed: Vec<String>,
}

impl Diff {
    pub(super) fn is_empty(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty() && self.changed.is_empty()
    }

    /// Of a list with pages missing only the pages the client has seen can be judged.
    pub(super) fn between(shown: &Shown, new: &Items) -> Diff {
        let old = &shown.items;
        let mut diff = Diff::default();
        for (key, item) in &old.items {
            match new.items.get(key) {
                None => diff.removed.push(key.clone()),
                Some(other) if other.hash != item.hash => diff.changed.push(key.clone()),
                Some(_) => {}
            }
        }
        if shown.is_complete() {
            diff.added = new.items.keys().filter(|key| !old.items.contains_key(*key)).cloned().collect();
        }
        diff
    }

    pub(super) fn to_json(&self) -> Value {
        serde_json::json!({"added": self.added, "removed": self.removed, "changed": self.changed})
    }
}

/// Equal as JSON means equal whatever the order of the members and the white space.
fn hash(raw: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    match serde_json::from_str::<Value>(raw) {
        Ok(value) => hash_value(&value, &mut hasher),
        Err(_) => raw.hash(&mut hasher),
    }
    hasher.finish()
}

fn hash_value(value: &Value, hasher: &mut DefaultHasher) {
    match value {
        Value::Object(object) => {
            let mut members: Vec<_> = object.iter().collect();
            members.sort_by_key(|(name, _)| *name);
            (b'{', members.len()).hash(hasher);
            for (name, value) in members {
                name.hash(hasher);
                hash_value(value, hasher);
            }
        }
        Value::Array(values) => {
            (b'[', values.len()).hash(hasher);
            values.iter().for_each(|value| hash_value(value, hasher));
        }
        scalar => scalar.to_string().hash(hasher),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{mcp::PAGE_ITEMS_MAX, message::Raw};

    fn items(json: &str, bytes_max: usize) -> Items {
        let result = Raw::parse(json).unwrap();
        let mut items = Items::default();
        items.extend(List::Tools, &Page::parse(List::Tools, result).unwrap(), bytes_max);
        items
    }

    #[test]
    fn order_and_layout_do_not_matter() {
        let old = items(r#"{"tools":[{"name":"a","x":1},{"name":"b"}]}"#, 1000);
        let new = items(r#"{"tools":[ {"name":"b"}, {"x": 1, "name":"a"} ]}"#, 1000);
        assert!(Diff::between(&Shown::whole(old), &new).is_empty());
    }

    #[test]
    fn a_diff_names_what_differs() {
        let old = items(r#"{"tools":[{"name":"a"},{"name":"b"}]}"#, 1000);
        let new = items(r#"{"tools":[{"name":"b","x":1},{"name":"c"}]}"#, 1000);
        let shown = Shown::whole(old);
        let diff = Diff::between(&shown, &new);
        assert_eq!((diff.added, diff.removed, diff.changed), (vec!["c".into()], vec!["a".into()], vec!["b".into()]));
        let partly = Shown { next: Some("2".into()), ..shown };
        assert!(Diff::between(&partly, &new).added.is_empty(), "the client has not seen the last page");
    }

    #[test]
    fn the_elements_read_of_a_list_are_bounded() {
        let many = format!(r#"{{"tools":[{}{{"name":"last"}}]}}"#, "0,".repeat(PAGE_ITEMS_MAX));
        let result = Raw::parse(&many).unwrap();
        let page = Page::parse(List::Tools, result).unwrap();
        assert!(page.is_cut && page.items.len() == PAGE_ITEMS_MAX && page.items.capacity() <= 2 * PAGE_ITEMS_MAX);
        let mut items = Items::default();
        for half in 0..3 {
            let names: Vec<String> = (0..60_000).map(|n| format!(r#"{{"name":"{half}-{n}"}}"#)).collect();
            let page = format!(r#"{{"tools":[{}]}}"#, names.join(","));
            items.extend(List::Tools, &Page::parse(List::Tools, Raw::parse(&page).unwrap()).unwrap(), 1 << 30);
        }
        assert_eq!((items.items.len(), items.joined()), (ITEMS_MAX, None));
    }

    #[test]
    fn an_oversized_list_is_compared_but_not_served() {
        let big = items(r#"{"tools":[{"name":"a"},{"name":"b"}]}"#, 10);
        assert_eq!(big.joined(), None);
        let new = items(r#"{"tools":[{"name":"a","x":1},{"name":"b"}]}"#, 10);
        assert_eq!(Diff::between(&Shown::whole(big), &new).changed, ["a"]);
    }
}
