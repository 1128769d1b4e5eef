//! What the client was shown of each list, and whether a new server's list is another one.

use std::{
    collections::{BTreeMap, HashSet},
    hash::{DefaultHasher, Hash, Hasher},
};

use serde_json::Value;

use crate::message::{Raw, pick, text};

/// The four lists of MCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    Tools,
    Prompts,
    Resources,
    Templates,
}

/// What one `list_changed` speaks of: templates belong to the resources.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    Tools,
    Prompts,
    Resources,
}

impl Kind {
    pub const ALL: [Kind; 4] = [Kind::Tools, Kind::Prompts, Kind::Resources, Kind::Templates];

    pub fn of(method: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.method() == method)
    }

    pub fn method(self) -> &'static str {
        match self {
            Kind::Tools => "tools/list",
            Kind::Prompts => "prompts/list",
            Kind::Resources => "resources/list",
            Kind::Templates => "resources/templates/list",
        }
    }

    /// The member of the result that holds the items.
    pub fn member(self) -> &'static str {
        match self {
            Kind::Tools => "tools",
            Kind::Prompts => "prompts",
            Kind::Resources => "resources",
            Kind::Templates => "resourceTemplates",
        }
    }

    /// One item, in words.
    pub fn one(self) -> &'static str {
        match self {
            Kind::Tools => "tool",
            Kind::Prompts => "prompt",
            Kind::Resources => "resource",
            Kind::Templates => "resource template",
        }
    }

    fn key(self) -> &'static str {
        match self {
            Kind::Tools | Kind::Prompts => "name",
            Kind::Resources => "uri",
            Kind::Templates => "uriTemplate",
        }
    }

    pub fn family(self) -> Family {
        match self {
            Kind::Tools => Family::Tools,
            Kind::Prompts => Family::Prompts,
            Kind::Resources | Kind::Templates => Family::Resources,
        }
    }
}

impl Family {
    pub const ALL: [Family; 3] = [Family::Tools, Family::Prompts, Family::Resources];

    pub fn of(method: &str) -> Option<Family> {
        Family::ALL.into_iter().find(|family| family.method() == method)
    }

    pub fn method(self) -> &'static str {
        match self {
            Family::Tools => "notifications/tools/list_changed",
            Family::Prompts => "notifications/prompts/list_changed",
            Family::Resources => "notifications/resources/list_changed",
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Family::Tools => "tools",
            Family::Prompts => "prompts",
            Family::Resources => "resources",
        }
    }
}

/// The items of one list, by key. Past `list_bytes_max` only their hashes stay: they can be compared, not served.
#[derive(Debug, Clone, Default)]
pub struct Items {
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

/// How many elements of one page are read.
pub const PAGE_ITEMS_MAX: usize = 100_000;
/// How many elements of one list are kept to be compared; a longer list is not served again.
const ITEMS_MAX: usize = 100_000;

/// One page of a list.
pub struct Page<'a> {
    /// The first [`PAGE_ITEMS_MAX`].
    pub items: Vec<Raw<'a>>,
    /// There are more.
    pub is_cut: bool,
    pub array: Raw<'a>,
    pub next: Option<String>,
}

impl<'a> Page<'a> {
    pub fn parse(kind: Kind, result: Raw<'a>) -> Option<Page<'a>> {
        let [array, next] = pick(result, [kind.member(), "nextCursor"])?;
        let array = array?;
        let (items, is_cut) = array.first_elements(PAGE_ITEMS_MAX)?;
        Some(Page { items, is_cut, array, next: next.and_then(text) })
    }
}

impl Items {
    pub fn extend(&mut self, kind: Kind, page: &Page<'_>, bytes_max: usize) {
        for raw in &page.items {
            let Some(key) = pick(*raw, [kind.key()]).and_then(|[key]| text(key?)) else { continue };
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

    pub fn names(&self) -> HashSet<String> {
        self.items.keys().cloned().collect()
    }

    /// The definition of one item, while definitions are kept.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.items.get(key).map(|item| &*item.raw).filter(|raw| !raw.is_empty())
    }

    /// The items as the inside of a JSON array; `None` if they were too big to keep.
    pub fn joined(&self) -> Option<String> {
        if self.too_big {
            return None;
        }
        let raws: Vec<&str> = self.order.iter().map(|key| &*self.items[key].raw).collect();
        Some(raws.join(","))
    }
}

/// What the client holds of one list.
#[derive(Debug, Clone, Default)]
pub struct Shown {
    pub items: Items,
    /// The cursor of the page that comes next; `None` once the last page was shown.
    pub next: Option<String>,
    /// The child whose first page it was.
    pub from: u32,
    /// The last complete list, while a newer one is still being shown.
    pub before: Option<Items>,
    /// Another list reached the client after this one: whatever a server has may differ from it.
    pub doubtful: bool,
}

impl Shown {
    pub fn is_complete(&self) -> bool {
        self.next.is_none() && !self.doubtful
    }

    /// The last complete list that was shown.
    pub fn last_good(&self) -> Option<&Items> {
        if self.is_complete() { Some(&self.items) } else { self.before.as_ref() }
    }

    fn into_last_good(self) -> Option<Items> {
        if self.is_complete() { Some(self.items) } else { self.before }
    }

    /// The client lists anew, from the first page.
    pub fn anew(before: Option<Shown>, from: u32) -> Shown {
        Shown { before: before.and_then(Shown::into_last_good), from, ..Shown::default() }
    }

    /// The client was given a list whole.
    pub fn whole(items: Items) -> Shown {
        Shown { items, ..Shown::default() }
    }
}

/// How a new list differs from what the client holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Diff {
    pub added: Vec<String>,
    pub removed: Vec<String>,
    pub changed: Vec<String>,
}

impl Diff {
    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty() && self.changed.is_empty()
    }

    /// Of a list with pages missing only the pages the client has seen can be judged.
    pub fn between(shown: &Shown, new: &Items) -> Diff {
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

    pub fn to_json(&self) -> Value {
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

    fn items(json: &str, bytes_max: usize) -> Items {
        let result = Raw::parse(json).unwrap();
        let mut items = Items::default();
        items.extend(Kind::Tools, &Page::parse(Kind::Tools, result).unwrap(), bytes_max);
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
    fn only_so_many_elements_of_a_list_are_read() {
        let many = format!(r#"{{"tools":[{}{{"name":"last"}}]}}"#, "0,".repeat(PAGE_ITEMS_MAX));
        let result = Raw::parse(&many).unwrap();
        let page = Page::parse(Kind::Tools, result).unwrap();
        assert!(page.is_cut && page.items.len() == PAGE_ITEMS_MAX && page.items.capacity() <= 2 * PAGE_ITEMS_MAX);
        let mut items = Items::default();
        for half in 0..3 {
            let names: Vec<String> = (0..60_000).map(|n| format!(r#"{{"name":"{half}-{n}"}}"#)).collect();
            let page = format!(r#"{{"tools":[{}]}}"#, names.join(","));
            items.extend(Kind::Tools, &Page::parse(Kind::Tools, Raw::parse(&page).unwrap()).unwrap(), 1 << 30);
        }
        assert_eq!((items.items.len(), items.joined()), (ITEMS_MAX, None));
    }

    #[test]
    fn a_list_too_big_is_compared_but_not_served() {
        let big = items(r#"{"tools":[{"name":"a"},{"name":"b"}]}"#, 10);
        assert_eq!(big.joined(), None);
        let new = items(r#"{"tools":[{"name":"a","x":1},{"name":"b"}]}"#, 10);
        assert_eq!(Diff::between(&Shown::whole(big), &new).changed, ["a"]);
    }
}
