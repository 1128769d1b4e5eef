//! The elements of a backend's lists. Each is read once, when its list arrives; how elements are merged and named is
//! decided in [`super::catalogue`].

use std::{
    cell::RefCell,
    hash::{DefaultHasher, Hash, Hasher as _},
    ops::Range,
    rc::Rc,
};

use bytes::Bytes;

use super::Offer;
use crate::{
    json::Raw,
    mcp::List,
    message::{pick, place},
};

/// What the catalogue needs of one element.
#[derive(Debug)]
pub(super) struct Element {
    /// The name or address that the backend knows.
    pub own: Rc<str>,
    /// The definition by its backend.
    pub json: Bytes,
    /// The position of the name in `json`.
    pub key: Range<usize>,
    pub schema: Option<Bytes>,
    /// Its annotations allow it to be called twice.
    pub is_safe: bool,
    /// Of `json`.
    pub hash: u64,
    /// The names that it was given in the last merge.
    names: RefCell<Option<Names>>,
}

/// The names of a tool or prompt with the prefix of its backend.
#[derive(Debug, Clone)]
pub(super) struct Names {
    pub prefix: Rc<str>,
    pub raw: Rc<str>,
    /// In characters that every client accepts.
    pub plain: Rc<str>,
}

/// The elements of an offer, in the same order. One without a name is not read.
#[derive(Debug, Default)]
pub(super) struct Elements([Vec<(Bytes, Option<Rc<Element>>)>; 4]);

/// Whether the text of an offer was checked before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Text {
    /// It was part of a message, which was checked as a whole.
    Checked,
    /// It is from a file.
    Unchecked,
}

impl Elements {
    /// Reads the elements that were not read for the last offer. The time is linear in the size of the lists that changed.
    pub(super) fn read(&self, offer: &Offer, text: Text) -> Elements {
        let read = |kind: List| {
            let before = &self.0[kind as usize];
            let items = offer.of(kind).iter().enumerate();
            items.map(move |(at, json)| match before.get(at) {
                // A list that did not change shares its bytes with the last offer.
                Some((same, element)) if same.as_ptr() == json.as_ptr() && same.len() == json.len() => {
                    (json.clone(), element.clone())
                }
                _ => (json.clone(), Element::read(kind, json, text).map(Rc::new)),
            })
        };
        Elements(List::ALL.map(|kind| read(kind).collect()))
    }

    pub(super) fn of(&self, kind: List) -> &[(Bytes, Option<Rc<Element>>)] {
        &self.0[kind as usize]
    }
}

impl Element {
    fn read(kind: List, json: &Bytes, text: Text) -> Option<Element> {
        let line = std::str::from_utf8(json).ok()?;
        let element = match text {
            Text::Checked => Raw::checked(line),
            Text::Unchecked => Raw::parse(line)?,
        };
        let [key, schema, annotations] = pick(element, [kind.key(), "inputSchema", "annotations"])?;
        let key = key?;
        let mut hasher = DefaultHasher::new();
        json.hash(&mut hasher);
        let schema = schema.filter(|_| kind == List::Tools);
        Some(Element {
            own: key.text()?.into(),
            json: json.clone(),
            // `element` may begin with white space, and `key` lies in the same text.
            key: place(json, key),
            schema: schema.map(|schema| json.slice_ref(schema.get().as_bytes())),
            is_safe: annotations.is_some_and(is_safe),
            hash: hasher.finish(),
            names: RefCell::default(),
        })
    }

    /// Its names with this prefix. They are made once, unless the prefix changes.
    pub(super) fn names(&self, prefix: &str, make: impl FnOnce() -> Names) -> Names {
        let mut names = self.names.borrow_mut();
        match &*names {
            Some(names) if *names.prefix == *prefix => names.clone(),
            _ => names.insert(make()).clone(),
        }
    }
}

fn is_safe(annotations: Raw<'_>) -> bool {
    let hints = pick(annotations, ["readOnlyHint", "idempotentHint"]).unwrap_or_default();
    hints.into_iter().any(|hint| hint.is_some_and(|hint| hint.get() == "true"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_a_list_that_did_not_change_are_not_read_again() {
        let tool = |name: &str| Bytes::from(format!(r#" {{"name":"{name}","inputSchema":{{}}}}"#));
        let mut offer = Offer { tools: vec![tool("a"), tool("b"), Bytes::from("{}")], ..Offer::default() };
        offer.prompts = vec![Bytes::from(r#"{"name":"p"}"#)];
        let first = Elements::default().read(&offer, Text::Unchecked);
        offer.tools[1] = tool("c");
        let again = first.read(&offer, Text::Checked);
        let own = |elements: &Elements| -> Vec<Option<String>> {
            elements
                .of(List::Tools)
                .iter()
                .map(|(_, element)| element.as_ref().map(|own| own.own.to_string()))
                .collect()
        };
        assert_eq!(own(&again), [Some("a".to_owned()), Some("c".to_owned()), None]);
        let of = |elements: &Elements, kind: List, at: usize| elements.of(kind)[at].1.clone().expect("it has a name");
        assert!(Rc::ptr_eq(&of(&first, List::Tools, 0), &of(&again, List::Tools, 0)));
        assert!(Rc::ptr_eq(&of(&first, List::Prompts, 0), &of(&again, List::Prompts, 0)));
        assert_ne!(of(&first, List::Tools, 1).hash, of(&again, List::Tools, 1).hash);
        assert_eq!(&of(&again, List::Tools, 1).json[of(&again, List::Tools, 1).key.clone()], b"\"c\"");
    }

    #[test]
    fn text_from_a_file_is_checked() {
        let offer = Offer { tools: vec![Bytes::from(r#"{"name":"a","x":[1,]}"#)], ..Offer::default() };
        assert!(Elements::default().read(&offer, Text::Unchecked).of(List::Tools)[0].1.is_none());
    }
}
