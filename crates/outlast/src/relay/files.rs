//! The files of one conversation: restart markers, the cache of the last run, and changed files. They are read and
//! written outside the loop; what they mean is decided by the relay.

use std::{
    collections::VecDeque,
    future::Future,
    io,
    path::PathBuf,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use outlast_core::{
    debounce::Changed,
    record,
    relay::{Event, NotWritten, Reading},
};
use outlast_os::offload::{Task, offload};

use super::start_cache::StartCache;
use crate::{
    child::watch::{FileState, Watch, WatchError},
    state::marker::{self, Marker, Markers},
};

/// How far the clock of a file system may lag behind ours.
const FILE_CLOCK: Duration = Duration::from_millis(20);

/// How long a change of a file may take to reach the watch: changes in that time before an upgrade may be lost with it.
#[cfg(unix)]
const WATCH_LAG: Duration = Duration::from_millis(100);

/// The entry of the cache if there is one, or why it cannot be read.
type CacheRead = Result<Option<String>, String>;

pub(crate) struct Files {
    cwd: PathBuf,
    markers: Markers,
    writing: Option<Task<Result<String, NotWritten>>>,
    readings: Vec<(u64, Task<marker::Reading>)>,
    /// The answers of the last run of this command; `None` without a home directory.
    cache: Option<StartCache>,
    /// The protocol revision whose entry is being read.
    cache_reading: Option<(String, Task<CacheRead>)>,
    cache_saving: Option<Task<io::Result<()>>>,
    /// The next save, after the one that runs: revision and entry.
    cache_next: Option<(String, Option<String>)>,
    watch: Option<Watch>,
    /// After an upgrade the watch begins beside the loop.
    watch_begins: Option<Task<Result<Watch, WatchError>>>,
    /// Changed files that are being read. Until that is done, no further changes are taken.
    looking: Option<(Changed, Task<Vec<FileState>>)>,
    /// When the newest server was started, or the build before it. It has loaded all earlier changes.
    loaded_at: Option<SystemTime>,
    /// Bounded by one poll: the driver takes it before it polls again.
    found: VecDeque<Found>,
}

/// What a poll of the files found.
pub(super) enum Found {
    Event(Event),
    /// A sentence for the log.
    Note(String),
}

impl Files {
    pub(crate) fn new(cwd: PathBuf, markers: Markers, cache: Option<StartCache>, watch: Option<Watch>) -> Files {
        Files {
            cwd,
            markers,
            writing: None,
            readings: Vec::new(),
            cache,
            cache_reading: None,
            cache_saving: None,
            cache_next: None,
            watch,
            watch_begins: None,
            looking: None,
            loaded_at: None,
            found: VecDeque::new(),
        }
    }

    /// Files are being read or written, or changes are being gathered.
    #[cfg(unix)]
    pub(super) fn are_busy(&self) -> bool {
        let is_writing = self.writing.is_some() || self.cache_saving.is_some() || self.cache_next.is_some();
        let is_reading = !self.readings.is_empty() || self.cache_reading.is_some() || self.looking.is_some();
        let is_watching = self.watch_begins.is_some() || self.watch.as_ref().is_some_and(Watch::is_restless);
        is_writing || is_reading || is_watching || !self.found.is_empty()
    }

    /// For the next program: when the newest server was started.
    #[cfg(unix)]
    pub(super) fn loaded_at(&self) -> Option<SystemTime> {
        self.loaded_at
    }

    /// Continues after an upgrade, during which changes of files were not noticed.
    #[cfg(unix)]
    pub(crate) fn go_on(&mut self, loaded_at: Option<SystemTime>, watched: Vec<PathBuf>, paused: Option<SystemTime>) {
        self.loaded_at = loaded_at;
        if !watched.is_empty() {
            let cwd = self.cwd.clone();
            let since = paused.and_then(|paused| paused.checked_sub(WATCH_LAG));
            self.watch_begins = Some(offload(move || Watch::begin_since(&watched, &cwd, since)));
        }
    }

    /// What is started now loads the files as they are.
    pub(super) fn are_loaded(&mut self) {
        self.loaded_at = Some(SystemTime::now());
    }

    pub(super) fn is_saving(&self) -> bool {
        self.cache_saving.is_some()
    }

    pub(super) fn write_marker(&mut self, pid: u32, reason: String, id: &str) {
        let markers = self.markers.clone();
        let (timestamp, iso_time) = timestamps();
        let marker = Marker { timestamp, pid, reason, iso_time, id: Some(id.to_owned()) };
        self.writing = Some(offload(move || match markers.write(&marker) {
            Ok(()) => Ok(markers.path().map(|path| path.display().to_string()).unwrap_or_default()),
            Err(error) => {
                Err(NotWritten { why: error.to_string(), timestamp: marker.timestamp, iso_time: marker.iso_time })
            }
        }));
    }

    pub(super) fn read_marker(&mut self, key: u64) {
        let markers = self.markers.clone();
        self.readings.push((key, offload(move || markers.read())));
    }

    pub(super) fn read_cache(&mut self, revision: String) {
        if let Some(cache) = self.cache.clone() {
            let of = revision.clone();
            self.cache_reading = Some((revision, offload(move || cache.read(&of))));
        }
    }

    pub(super) fn save_cache(&mut self, revision: String, entry: Option<String>) {
        self.cache_next = Some((revision, entry));
        self.save_next();
    }

    /// Starts the next save, unless one runs.
    fn save_next(&mut self) {
        if self.cache_saving.is_none()
            && let Some(cache) = self.cache.clone()
            && let Some((revision, entry)) = self.cache_next.take()
        {
            self.cache_saving = Some(offload(move || cache.save(&revision, entry.as_deref())));
        }
    }

    pub(super) fn next_found(&mut self) -> Option<Found> {
        self.found.pop_front()
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) {
        self.poll_cache(cx);
        self.poll_markers(cx);
        self.poll_watch(cx);
    }

    fn poll_cache(&mut self, cx: &mut Context<'_>) {
        if let Some((_, reading)) = &mut self.cache_reading
            && let Poll::Ready(read) = Pin::new(reading).poll(cx)
            && let Some((revision, _)) = self.cache_reading.take()
        {
            let entry = match read {
                Ok(Ok(entry)) => entry,
                Ok(Err(why)) => self.note(format!("the cache of this command's last run is ignored: {why}")),
                Err(error) => self.note(format!("the cache of this command's last run is not read: {error}")),
            };
            self.found.push_back(Found::Event(Event::CacheRead { revision, entry }));
        }
        if let Some(saving) = &mut self.cache_saving
            && let Poll::Ready(saved) = Pin::new(saving).poll(cx)
        {
            self.cache_saving = None;
            if let Err(error) = saved.unwrap_or_else(Err) {
                self.note::<()>(format!("the lists of the server could not be cached for the next start: {error}"));
            }
            self.save_next();
        }
    }

    fn note<T>(&mut self, words: String) -> Option<T> {
        self.found.push_back(Found::Note(words));
        None
    }

    fn poll_markers(&mut self, cx: &mut Context<'_>) {
        if let Some(writing) = &mut self.writing
            && let Poll::Ready(result) = Pin::new(writing).poll(cx)
        {
            self.writing = None;
            let result = result.unwrap_or_else(|error| {
                let (timestamp, iso_time) = timestamps();
                Err(NotWritten { why: error.to_string(), timestamp, iso_time })
            });
            self.found.push_back(Found::Event(Event::MarkerWritten(result)));
        }
        self.readings.retain_mut(|(key, reading)| {
            let Poll::Ready(read) = Pin::new(reading).poll(cx) else { return true };
            let reading = match read {
                Ok(marker::Reading::Missing { path }) => Reading::Missing { path: path.display().to_string() },
                Ok(marker::Reading::Corrupt { path, error }) => {
                    Reading::Corrupt { path: path.display().to_string(), error }
                }
                Ok(marker::Reading::Valid(marker)) => Reading::Valid {
                    timestamp: marker.timestamp,
                    pid: marker.pid,
                    reason: marker.reason,
                    iso_time: marker.iso_time,
                },
                Err(error) => Reading::Corrupt { path: String::new(), error: error.to_string() },
            };
            self.found.push_back(Found::Event(Event::MarkerRead { key: *key, reading, unix: unix_now() }));
            false
        });
    }

    fn poll_watch(&mut self, cx: &mut Context<'_>) {
        if let Some(begins) = &mut self.watch_begins {
            let Poll::Ready(begun) = Pin::new(begins).poll(cx) else { return };
            self.watch_begins = None;
            match begun {
                Ok(Ok(watch)) => self.watch = Some(watch),
                Ok(Err(error)) => self.note(format!("WARNING: no file is watched any more: {error}")).unwrap_or(()),
                Err(error) => self.note(format!("WARNING: no file is watched any more: {error}")).unwrap_or(()),
            }
        }
        let Some(watch) = &mut self.watch else { return };
        self.found.extend(watch.trouble().map(|sentence| Found::Note(format!("WARNING: {sentence}"))));
        loop {
            if let Some((_, looking)) = &mut self.looking {
                let Poll::Ready(looks) = Pin::new(looking).poll(cx) else { return };
                if let Some((changed, _)) = self.looking.take() {
                    let event = self.changed(changed, &looks.unwrap_or_default());
                    self.found.extend(event.map(Found::Event));
                }
            }
            let Some(Poll::Ready(changed)) = self.watch.as_mut().map(|watch| watch.poll_next(cx)) else { return };
            let paths: Vec<PathBuf> = changed.paths.iter().map(|path| self.cwd.join(path)).collect();
            let looking = offload(move || paths.iter().map(|path| FileState::at(path)).collect());
            self.looking = Some((changed, looking));
        }
    }

    /// `None` if the newest server has loaded the changes already: a requested restart may be faster than the watch.
    fn changed(&self, changed: Changed, looks: &[FileState]) -> Option<Event> {
        let is_loaded = |look: &FileState| {
            let changed = look.changed.zip(self.loaded_at);
            changed.is_some_and(|(changed, loaded)| changed + FILE_CLOCK < loaded)
        };
        let is_complete = changed.more == 0 && !changed.is_moved && looks.len() == changed.paths.len();
        if is_complete && !looks.is_empty() && looks.iter().all(is_loaded) {
            return None;
        }
        let prints = looks.iter().map(|look| look.print).collect();
        Some(Event::FilesChanged { changed, prints })
    }
}

fn timestamps() -> (f64, String) {
    let now = unix_now();
    (now, record::iso((now * 1000.0) as u64))
}

pub(super) fn unix_now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
