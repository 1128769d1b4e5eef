//! The names that clients see, and which backend owns each.
//! It does not read the elements themselves; [`super::catalogue`] does.

use std::{collections::HashMap, rc::Rc};

/// The longest name that every client accepts.
const NAME_MAX: usize = 64;
/// Of a suffix: an underscore and eight digits.
const SUFFIX_LENGTH: usize = 9;
/// Suffixes that are tried for one name; then the element is left out as a collision.
const SUFFIXES_MAX: u32 = 8;
/// Names whose owners are remembered for each list. Beyond that, names that no backend offers are forgotten.
const OWNED_MAX: usize = 100_000;

/// Something that a backend offers and that needs a name.
#[derive(Debug)]
pub(super) struct Candidate {
    pub owner: u32,
    /// The configured prefix and the backend's own name, unchanged.
    pub raw: Rc<str>,
    /// The same in characters that every client accepts. Different raw names may have the same plain name.
    pub plain: Rc<str>,
}

/// The name that a candidate gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Given {
    Name(Rc<str>),
    /// The name belongs to something else with the same raw name.
    Taken {
        name: Rc<str>,
        by: u32,
    },
}

/// The owners of names that clients have seen in one list. An owner keeps its names until the configuration changes,
/// even while it does not offer them.
///
/// Backends choose the names, so the maps have a keyed hash: names that all have the same hash cannot be computed.
#[derive(Debug, Default)]
pub(super) struct Owned {
    by_name: HashMap<Rc<str>, Claim>,
    by_raw: HashMap<(u32, Rc<str>), Rc<str>>,
}

#[derive(Debug, Clone)]
struct Claim {
    owner: u32,
    raw: Rc<str>,
}

impl Owned {
    /// Gives each candidate a name, in linear time. Names that clients have seen stay. Otherwise the first candidate
    /// with a raw name gets it. If several raw names have one plain name, the raw name that equals it keeps it and the
    /// others get a suffix, independent of their order.
    pub(super) fn give(&self, candidates: &[Candidate]) -> Vec<Given> {
        let mut raw_of_plain: HashMap<&str, Option<&str>> = HashMap::with_capacity(candidates.len());
        for candidate in candidates {
            let raw = raw_of_plain.entry(&candidate.plain).or_insert(Some(&candidate.raw));
            if *raw != Some(&candidate.raw) {
                *raw = None;
            }
        }
        let mut round = Round { owned: self, given: HashMap::with_capacity(candidates.len()) };
        let mut given: Vec<Option<Given>> = Vec::with_capacity(candidates.len());
        for candidate in candidates {
            let name = self.by_raw.get(&(candidate.owner, candidate.raw.clone()));
            given.push(name.map(|name| round.take(candidate, name.clone()).unwrap_or_else(|taken| taken)));
        }
        for (candidate, given) in candidates.iter().zip(&mut given) {
            let is_alone = raw_of_plain[&*candidate.plain].is_some();
            if given.is_none() && (is_alone || candidate.raw == candidate.plain) {
                *given = round.offer(candidate, candidate.plain.clone());
            }
        }
        let rest = candidates.iter().zip(given);
        rest.map(|(candidate, given)| given.unwrap_or_else(|| round.suffixed(candidate))).collect()
    }

    /// Clients have seen these names.
    pub(super) fn keep<'a>(&mut self, seen: impl Iterator<Item = (u32, &'a Rc<str>, &'a Rc<str>)>) {
        let seen: Vec<(u32, &Rc<str>, &Rc<str>)> = seen.collect();
        self.insert(&seen);
        if self.by_name.len() > OWNED_MAX {
            self.by_name.clear();
            self.by_raw.clear();
            self.insert(&seen);
        }
    }

    /// Owner, raw name and shown name of each.
    pub(super) fn save(&self) -> Vec<(u32, String, String)> {
        let claims = self.by_raw.iter().map(|((owner, raw), name)| (*owner, raw.to_string(), name.to_string()));
        let mut saved: Vec<(u32, String, String)> = claims.collect();
        saved.sort_unstable();
        saved
    }

    pub(super) fn restore(saved: Vec<(u32, String, String)>) -> Owned {
        let mut owned = Owned::default();
        for (owner, raw, name) in saved {
            owned.insert(&[(owner, &raw.into(), &name.into())]);
        }
        owned
    }

    fn insert(&mut self, seen: &[(u32, &Rc<str>, &Rc<str>)]) {
        for &(owner, raw, name) in seen {
            self.by_raw.insert((owner, raw.clone()), name.clone());
            self.by_name.insert(name.clone(), Claim { owner, raw: raw.clone() });
        }
    }

    /// The configuration of a backend changed: it keeps the names for which `stays` is true of the raw name.
    pub(super) fn release(&mut self, owner: u32, stays: impl Fn(&str) -> bool) {
        self.by_name.retain(|_, claim| claim.owner != owner || stays(&claim.raw));
        self.by_raw.retain(|(of, raw), _| *of != owner || stays(raw));
    }
}

/// The names that are given in one merge, and those that are owned.
struct Round<'a> {
    owned: &'a Owned,
    given: HashMap<Rc<str>, Claim>,
}

impl Round<'_> {
    fn take(&mut self, candidate: &Candidate, name: Rc<str>) -> Result<Given, Given> {
        if let Some(claim) = self.given.get(&name) {
            return Err(Given::Taken { by: claim.owner, name });
        }
        let claim = Claim { owner: candidate.owner, raw: candidate.raw.clone() };
        self.given.insert(name.clone(), claim);
        Ok(Given::Name(name))
    }

    /// Nothing if the name belongs to another raw name, so that a suffix is needed.
    fn offer(&mut self, candidate: &Candidate, name: Rc<str>) -> Option<Given> {
        match self.given.get(&name).or_else(|| self.owned.by_name.get(&name)) {
            Some(claim) if claim.raw == candidate.raw => Some(Given::Taken { by: claim.owner, name }),
            Some(_) => None,
            None => self.take(candidate, name).ok(),
        }
    }

    fn suffixed(&mut self, candidate: &Candidate) -> Given {
        for salt in 0..SUFFIXES_MAX {
            let sum = hash(candidate.raw.bytes().chain(salt.to_le_bytes().into_iter().filter(|_| salt > 0)));
            if let Some(given) = self.offer(candidate, with_suffix(&candidate.plain, sum).into()) {
                return given;
            }
        }
        let name = candidate.plain.clone();
        let by = self.given.get(&name).or_else(|| self.owned.by_name.get(&name));
        Given::Taken { by: by.map_or(candidate.owner, |claim| claim.owner), name }
    }
}

/// A name that every client accepts: letters, digits, `_` and `-`, at most 64 of them. Every other character becomes
/// `_`. The end of a longer name is replaced by a hash.
pub(super) fn plain(prefix: &str, own: &str) -> String {
    let letter = |letter: char| if letter.is_ascii_alphanumeric() || letter == '-' { letter } else { '_' };
    let mut plain: String = prefix.chars().chain(own.chars()).map(letter).collect();
    if plain.is_empty() {
        plain.push('_');
    }
    if plain.len() > NAME_MAX {
        plain = with_suffix(&plain, hash(own.bytes()));
    }
    plain
}

/// Whether a name that clients see may be that of a backend's element: its plain name, or that with a suffix.
pub(super) fn is_of(shown: &str, prefix: &str, own: &str) -> bool {
    let plain = plain(prefix, own);
    shown.starts_with(&plain[..plain.len().min(NAME_MAX - SUFFIX_LENGTH)])
}

fn with_suffix(plain: &str, sum: u32) -> String {
    let end = plain.len().min(NAME_MAX - SUFFIX_LENGTH);
    format!("{}_{sum:08x}", &plain[..end])
}

/// FNV-1a: the hash is the same in every run, because people write these names into their configuration.
fn hash(bytes: impl Iterator<Item = u8>) -> u32 {
    bytes.fold(0x811c_9dc5, |sum, byte| (sum ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(owner: u32, raw: &str) -> Candidate {
        Candidate { owner, raw: raw.into(), plain: plain("", raw).into() }
    }

    fn names(given: &[Given]) -> Vec<String> {
        let name = |given: &Given| match given {
            Given::Name(name) => name.to_string(),
            Given::Taken { name, by } => format!("{name} of {by}"),
        };
        given.iter().map(name).collect()
    }

    #[test]
    fn a_suffixed_name_that_is_taken_is_not_given_again() {
        let suffixed = with_suffix("a_b", hash("a.b".bytes()));
        let candidates = [candidate(1, "a.b"), candidate(1, "a_b"), candidate(2, &suffixed)];
        let given = names(&Owned::default().give(&candidates));
        assert_eq!(&given[1..], ["a_b".to_owned(), suffixed.clone()]);
        assert!(given[0].starts_with("a_b_") && given[0] != suffixed, "{given:?}");
    }

    #[test]
    fn the_same_raw_name_collides_with_or_without_a_suffix() {
        let candidates = [candidate(1, "a.b"), candidate(2, "a.b"), candidate(1, "a_b"), candidate(2, "a_b")];
        let given = names(&Owned::default().give(&candidates));
        assert_eq!(given[1], format!("{} of 1", given[0]));
        assert_eq!(&given[2..], ["a_b", "a_b of 1"]);
    }

    #[test]
    fn names_that_are_no_longer_offered_are_forgotten_beyond_the_bound() {
        let mut owned = Owned::default();
        let seen = |owned: &mut Owned, from: usize| {
            let raws: Vec<Rc<str>> = (from..from + 60_000).map(|n| format!("n{n}").into()).collect();
            owned.keep(raws.iter().map(|raw| (1, raw, raw)));
        };
        seen(&mut owned, 0);
        assert_eq!(names(&owned.give(&[candidate(2, "n7")])), ["n7 of 1"]);
        seen(&mut owned, 60_000);
        assert!(owned.by_name.len() <= OWNED_MAX && owned.by_raw.len() <= OWNED_MAX);
        assert_eq!(names(&owned.give(&[candidate(2, "n7"), candidate(2, "n60000")])), ["n7", "n60000 of 1"]);
    }

    #[test]
    fn names_that_a_new_configuration_excludes_become_free() {
        let mut owned = Owned::default();
        let raws: [Rc<str>; 2] = ["a".into(), "b".into()];
        owned.keep(raws.iter().map(|raw| (1, raw, raw)));
        owned.release(1, |raw| raw == "b");
        let given = owned.give(&[candidate(2, "a"), candidate(2, "b")]);
        assert_eq!(names(&given), ["a", "b of 1"]);
    }
}
