//! Which arguments of which tools clients of the stateless era repeat in headers, from the backends' lists. It does not
//! check the headers.

use std::collections::{BTreeMap, HashMap};

use outlast_core::{
    gateway::{Backend, Gateway, Offer},
    message::{self, Raw},
};

use super::listen::{Mirror, Mirrors, mirrors_of};

/// By backend and by the backend's own name of the tool. Usually empty.
#[derive(Debug, Default)]
pub(crate) struct MirrorsByBackend(BTreeMap<String, BTreeMap<String, Vec<Mirror>>>);

impl MirrorsByBackend {
    /// From the cached catalogues.
    pub(crate) fn of(kept: &BTreeMap<String, Offer>, backends: &[Backend]) -> MirrorsByBackend {
        let mut all = MirrorsByBackend::default();
        for (name, offer) in kept.iter().filter(|(name, _)| backends.iter().any(|backend| backend.name == **name)) {
            all.learn(name, offer);
        }
        all
    }

    /// Takes the new list of a backend. True if a mirrored argument changed.
    pub(crate) fn learn(&mut self, backend: &str, offer: &Offer) -> bool {
        let named = |tool: &[u8]| {
            let text = std::str::from_utf8(tool).ok()?;
            message::pick_text(Raw::parse(text)?, "name")
        };
        let found: BTreeMap<String, Vec<Mirror>> = offer
            .tools
            .iter()
            .map(|tool| (tool, mirrors_of(tool)))
            .filter(|(_, mirrors)| !mirrors.is_empty())
            .filter_map(|(tool, mirrors)| Some((named(tool)?, mirrors)))
            .collect();
        if self.0.get(backend).map_or(found.is_empty(), |known| *known == found) {
            return false;
        }
        self.0.insert(backend.to_owned(), found);
        true
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.values().all(BTreeMap::is_empty)
    }

    /// By the names that clients see.
    pub(crate) fn shown(&self, gateway: &Gateway) -> Mirrors {
        let mut shown = HashMap::new();
        if self.is_empty() {
            return shown;
        }
        for (name, backend, own) in gateway.tools() {
            if let Some(mirrors) = self.0.get(backend).and_then(|tools| tools.get(own)) {
                shown.insert(name.to_owned(), mirrors.clone());
            }
        }
        shown
    }
}
