//! The cache of the catalogue on disk: what each backend offered last, so that clients see it at once at the next
//! start.
//!
//! Each gateway has one file, which is replaced as a whole, outside the loop, shortly after the last change. It is in the
//! user's state directory and not in the project, where a clone could contain descriptions of tools. An entry is not used if
//! the command or the address of its backend has changed.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use outlast_core::{
    gateway::{Backend, Kind, Offer},
    secret::Resolved,
};
use outlast_os::{
    self as os,
    offload::{Task, offload},
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

use crate::{cli::report::plain, state::home::Home};

/// The version of the format. A file of another version is not read.
const VERSION: u32 = 1;
/// A larger catalogue is neither written nor read; then the next start waits for its backends.
const FILE_MAX: usize = 32 << 20;
/// How many files of other gateways in one directory are read, newest first.
const PEEKED_MAX: usize = 32;
/// Backends become ready together, so their catalogues are written together.
const WAIT: Duration = Duration::from_millis(500);

pub(crate) struct CatalogueCache {
    path: Option<PathBuf>,
    kept: BTreeMap<String, StoredOffer>,
    /// A hash of each backend's command or address, by name.
    marks: BTreeMap<String, String>,
    due: Option<Instant>,
    writing: Option<Task<io::Result<()>>>,
    /// A failed write is reported once.
    has_reported_failure: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct StoredOffer {
    mark: String,
    offer: Offer,
}

#[derive(Serialize, Deserialize)]
struct File<'a> {
    version: u32,
    #[serde(borrow)]
    backends: BTreeMap<String, CachedOffer<'a>>,
}

#[derive(Serialize, Deserialize)]
struct CachedOffer<'a> {
    /// The hash of the backend's command or address.
    mark: String,
    #[serde(borrow)]
    tools: Vec<&'a RawValue>,
    #[serde(borrow)]
    prompts: Vec<&'a RawValue>,
    #[serde(borrow)]
    resources: Vec<&'a RawValue>,
    #[serde(borrow)]
    templates: Vec<&'a RawValue>,
    #[serde(borrow)]
    capabilities: Option<&'a RawValue>,
    instructions: Option<String>,
}

impl CatalogueCache {
    /// Reads what is cached for these backends. `home` is [`Home::of_user`]. `identity` distinguishes gateways of one
    /// directory and is part of the file name. The text is for the log, if the file could not be used.
    pub(crate) fn open(
        home: &Home,
        identity: &str,
        backends: &[Backend],
    ) -> (CatalogueCache, BTreeMap<String, Offer>, Option<String>) {
        let path = home.dir().map(|dir| dir.join(file_name(identity)));
        let (kept, note) = match path.as_deref().map(read) {
            None | Some(Ok(None)) => (BTreeMap::new(), None),
            Some(Ok(Some(kept))) => (kept, None),
            Some(Err(why)) => {
                let note = format!("the cached catalogue cannot be used and is read again from the backends: {why}");
                (BTreeMap::new(), Some(note))
            }
        };
        let mut cache = CatalogueCache {
            path,
            kept,
            marks: BTreeMap::new(),
            due: None,
            writing: None,
            has_reported_failure: false,
        };
        cache.marks = marks(backends);
        cache.drop_unknown_backends();
        let offers = cache.kept.iter().map(|(name, kept)| (name.clone(), kept.offer.clone())).collect();
        (cache, offers, note)
    }

    /// Reads what is cached in a directory for these backends, for a command that changes nothing. The gateway of this
    /// identity comes first, then the others: their entries for the same commands are valid too.
    pub(crate) fn peek(dir: Option<&Path>, identity: &str, backends: &[Backend]) -> BTreeMap<String, Offer> {
        let Some(dir) = dir.filter(|dir| os::check_own_dir(dir).is_ok()) else { return BTreeMap::new() };
        let paths = [dir.join(file_name(identity))].into_iter().chain(catalogues(dir));
        let marks = marks(backends);
        let mut offers = BTreeMap::new();
        for (name, kept) in paths.filter_map(|path| read(&path).ok().flatten()).flatten() {
            if marks.get(&name) == Some(&kept.mark) {
                offers.entry(name).or_insert(kept.offer);
            }
        }
        offers
    }

    /// Replaces the list of backends.
    pub(crate) fn configure(&mut self, backends: &[Backend], now: Instant) {
        self.marks = marks(backends);
        if self.drop_unknown_backends() {
            self.due.get_or_insert(now + WAIT);
        }
    }

    /// Caches what a backend offers now.
    pub(crate) fn keep(&mut self, backend: &str, offer: Offer, now: Instant) {
        let Some(mark) = self.marks.get(backend).cloned() else { return };
        let kept = StoredOffer { mark, offer };
        if self.kept.get(backend) != Some(&kept) {
            self.kept.insert(backend.to_owned(), kept);
            self.due.get_or_insert(now + WAIT);
        }
    }

    /// When to call `time_passed`.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        // While a write runs there is no deadline: its end wakes the loop.
        if self.writing.is_some() { None } else { self.due }
    }

    /// A change is not written yet.
    #[cfg(unix)]
    pub(crate) fn is_busy(&self) -> bool {
        self.writing.is_some() || self.path.is_some() && self.due.is_some()
    }

    /// Starts the write that is due. An early or second call changes nothing.
    pub(crate) fn time_passed(&mut self, now: Instant) {
        if self.writing.is_none() && self.due.is_some_and(|due| due <= now) {
            self.write();
        }
    }

    /// Ready with an error text at the first failed write. Otherwise pending; the end of a write wakes it.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<String> {
        let Some(writing) = &mut self.writing else { return Poll::Pending };
        let Poll::Ready(written) = Pin::new(writing).poll(cx) else { return Poll::Pending };
        self.writing = None;
        let written = written.unwrap_or_else(Err);
        match written {
            Err(error) if !self.has_reported_failure => {
                self.has_reported_failure = true;
                let why = plain(&error.to_string());
                Poll::Ready(format!("the catalogue cannot be cached for the next start: {why}"))
            }
            _ => {
                // A change during the write has a deadline of its own, which the loop reads after this wake.
                cx.waker().wake_by_ref();
                Poll::Pending
            }
        }
    }

    /// At the end: writes what is not written yet.
    pub(crate) async fn finish(mut self) {
        if let Some(writing) = self.writing.take() {
            let _ = writing.await;
        }
        if self.due.is_some() {
            self.write();
        }
        if let Some(writing) = self.writing.take() {
            let _ = writing.await;
        }
    }

    fn write(&mut self) {
        self.due = None;
        let Some(path) = self.path.clone() else { return };
        // Cheap: the lists are shared, not copied.
        let kept = self.kept.clone();
        self.writing = Some(offload(move || write(&path, &kept)));
    }

    /// True if entries were dropped.
    fn drop_unknown_backends(&mut self) -> bool {
        let before = self.kept.len();
        let marks = &self.marks;
        self.kept.retain(|name, kept| marks.get(name) == Some(&kept.mark));
        self.kept.len() < before
    }
}

/// All cached catalogues in a directory, newest first.
fn catalogues(dir: &Path) -> Vec<PathBuf> {
    let is_one = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with("catalogue.") && name.ends_with(".json")
    };
    let mut found: Vec<(SystemTime, PathBuf)> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(is_one)
        .map(|path| (fs::metadata(&path).and_then(|about| about.modified()).unwrap_or(SystemTime::UNIX_EPOCH), path))
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    found.truncate(PEEKED_MAX);
    found.into_iter().map(|(_, path)| path).collect()
}

fn file_name(identity: &str) -> String {
    let hash = Sha256::digest(identity.as_bytes());
    let name: String = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("catalogue.{name}.json")
}

fn marks(backends: &[Backend]) -> BTreeMap<String, String> {
    backends.iter().map(|backend| (backend.name.clone(), mark(&backend.kind))).collect()
}

/// A hash of a backend's command or address, which reveals no secret.
fn mark(kind: &Kind) -> String {
    let mut hash = Sha256::new();
    let mut add = |text: &str| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    };
    match kind {
        Kind::Stdio { command, args, cwd, .. } => {
            add("stdio");
            add(command.expose());
            add(cwd.as_ref().map_or("", Resolved::expose));
            args.iter().for_each(|word| add(word.expose()));
        }
        Kind::Http { url, is_sse, .. } => {
            add(if *is_sse { "sse" } else { "http" });
            add(url.expose());
        }
    }
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// `None` if there is no such file.
fn read(path: &Path) -> Result<Option<BTreeMap<String, StoredOffer>>, String> {
    let read = match os::read_own(path, FILE_MAX as u64) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::FileTooLarge => return Err("it is too large".to_owned()),
        other => other.map_err(|error| plain(&error.to_string()))?,
    };
    let text = String::from_utf8(read).map_err(|_| "it is not UTF-8".to_owned())?;
    #[derive(Deserialize)]
    struct Head {
        version: u32,
    }
    let head: Head = serde_json::from_str(&text).map_err(|error| format!("it is damaged ({error})"))?;
    if head.version != VERSION {
        return Err(format!("it is of version {}", head.version));
    }
    let file: File<'_> = serde_json::from_str(&text).map_err(|error| format!("it is damaged ({error})"))?;
    let list = |values: Vec<&RawValue>| values.into_iter().map(bytes).collect();
    let backends = file.backends.into_iter().map(|(name, cached)| {
        let offer = Offer {
            tools: list(cached.tools),
            prompts: list(cached.prompts),
            resources: list(cached.resources),
            templates: list(cached.templates),
            capabilities: cached.capabilities.map(bytes).unwrap_or_default(),
            instructions: cached.instructions,
        };
        (name, StoredOffer { mark: cached.mark, offer })
    });
    Ok(Some(backends.collect()))
}

fn bytes(value: &RawValue) -> Bytes {
    Bytes::copy_from_slice(value.get().as_bytes())
}

fn write(path: &Path, kept: &BTreeMap<String, StoredOffer>) -> io::Result<()> {
    let bad = |error: serde_json::Error| io::Error::new(io::ErrorKind::InvalidData, error);
    let mut backends = BTreeMap::new();
    for (name, StoredOffer { mark, offer }) in kept {
        let cached = CachedOffer {
            mark: mark.clone(),
            tools: raws(&offer.tools).map_err(bad)?,
            prompts: raws(&offer.prompts).map_err(bad)?,
            resources: raws(&offer.resources).map_err(bad)?,
            templates: raws(&offer.templates).map_err(bad)?,
            capabilities: if offer.capabilities.is_empty() {
                None
            } else {
                Some(raw(&offer.capabilities).map_err(bad)?)
            },
            instructions: offer.instructions.clone(),
        };
        backends.insert(name.clone(), cached);
    }
    let text = serde_json::to_vec(&File { version: VERSION, backends }).map_err(bad)?;
    if text.len() > FILE_MAX {
        return Err(io::Error::other(format!("it is larger than {} MiB", FILE_MAX >> 20)));
    }
    // The text goes to a new file that replaces the old one, so that a reader sees one of them whole.
    let fresh = path.with_extension(format!("{}.new", std::process::id()));
    let written = os::open_own(fs::OpenOptions::new().write(true).create(true).truncate(true), &fresh)
        .and_then(|mut file| io::Write::write_all(&mut file, &text))
        .and_then(|()| fs::rename(&fresh, path));
    if written.is_err() {
        let _ = fs::remove_file(&fresh);
    }
    written
}

fn raws(values: &[Bytes]) -> Result<Vec<&RawValue>, serde_json::Error> {
    values.iter().map(raw).collect()
}

fn raw(value: &Bytes) -> Result<&RawValue, serde_json::Error> {
    serde_json::from_slice(value)
}

#[cfg(test)]
mod tests;
