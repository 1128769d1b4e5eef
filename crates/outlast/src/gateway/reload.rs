//! The configuration of a running gateway. It is read again when one of its files changes or on request, and applied as
//! a whole or not at all.

use std::{
    collections::BTreeMap,
    future::Future,
    net::SocketAddr,
    path::{Path, PathBuf},
    pin::Pin,
    task::{Context, Poll},
    time::Instant,
};

use outlast_control::wire::Refusal;
use outlast_core::gateway::{Backend, Event, Settings};
use outlast_os::offload::{Task, offload};
use serde_json::{Value, json};

use super::{Driver, begin};
use crate::{
    child::watch::Watch,
    cli::report::{self, Report},
    cluster::NatsSettings,
    config::{Texts, gateway::Gateway as Config},
};

/// The files of the configuration; if empty, the nearest `outlast.toml`.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    pub files: Vec<PathBuf>,
    pub cwd: PathBuf,
}

impl Source {
    pub(crate) fn read(&self) -> Result<Config, Report> {
        Config::read(&self.files, &self.cwd)
    }
}

pub(crate) struct Reload {
    source: Source,
    is_watching: bool,
    watched: Vec<PathBuf>,
    /// The files that were empty when the configuration in force was read.
    blank: Vec<PathBuf>,
    /// The texts of the configuration in force.
    pub(super) texts: Texts,
    /// The read that runs only finds out whether the texts on disk are others.
    is_comparison: bool,
    /// The address from the command line, which overrides the files.
    listen: Option<SocketAddr>,
    /// Whether the files set an address.
    has_address: bool,
    /// The cluster that the gateway joined at its start.
    cluster: Option<NatsSettings>,
    watch: Option<Watch>,
    reading: Option<Task<Result<Config, Report>>>,
    /// A request arrived during a read, after which the files may have changed.
    again: bool,
    /// Tickets of the requests that wait for the result.
    tickets: Vec<u64>,
    /// Reloads whose changed backends are on trial, each with a description of the changes.
    outcomes: BTreeMap<u64, String>,
    /// The last sender of a request; `None` after a change of the files.
    who: Option<String>,
    /// When and why the configuration on disk was last refused; `None` once a later one is in force.
    pub(super) failed: Option<(Instant, String)>,
}

impl Reload {
    /// With a warning if changes of the files will not be noticed.
    pub(crate) fn new(
        source: Source,
        config: &Config,
        listen: Option<SocketAddr>,
        is_watching: bool,
    ) -> (Reload, Option<String>) {
        let mut reload = Reload {
            source,
            is_watching,
            watched: Vec::new(),
            blank: config.blank.clone(),
            texts: config.texts.clone(),
            is_comparison: false,
            listen,
            has_address: config.front.listen.is_some(),
            cluster: config.cluster.clone(),
            watch: None,
            reading: None,
            again: false,
            tickets: Vec::new(),
            outcomes: BTreeMap::new(),
            who: None,
            failed: None,
        };
        let warning = reload.watch(&config.watched);
        (reload, warning)
    }

    /// Watches these files, which can differ after each read.
    fn watch(&mut self, files: &[PathBuf]) -> Option<String> {
        if !self.is_watching || self.watched == files {
            return None;
        }
        match Watch::begin(files, &self.source.cwd) {
            Ok(watch) => {
                self.watch = Some(watch);
                self.watched = files.to_vec();
                None
            }
            Err(error) => Some(format!(
                "the configuration cannot be watched; use SIGHUP or `outlast reload` after a change: {error}"
            )),
        }
    }

    /// An error if a file has become empty, or was found before and is gone, and backends would be removed by that. A
    /// program that saves a file may empty or remove it first; the next change is read again.
    fn check_finished(&self, config: &Config, before: &[Backend]) -> Result<(), Report> {
        let is_left = |backend: &Backend| config.settings.backends.iter().any(|other| other.name == backend.name);
        let emptied = config.blank.iter().find(|file| !self.blank.contains(file));
        let what = match (emptied, self.watched.first()) {
            _ if before.iter().all(is_left) => return Ok(()),
            (Some(file), _) => format!("`{}` is empty", self.shown(file)),
            (None, Some(file)) if config.watched.is_empty() => format!("`{}` is gone", self.shown(file)),
            _ => return Ok(()),
        };
        Err(Report::new(report::FAILURE, format!("{what}, and would remove backends"))
            .because("a program that saves the file may not have finished")
            .hint("the file is read again when it changes; to remove all backends, leave a comment in it"))
    }

    fn shown(&self, file: &Path) -> String {
        file.strip_prefix(&self.source.cwd).unwrap_or(file).display().to_string()
    }

    /// A read is running, or its changes are on trial.
    #[cfg(unix)]
    pub(super) fn is_busy(&self) -> bool {
        self.reading.is_some() || !self.tickets.is_empty() || !self.outcomes.is_empty()
    }

    /// Reads the files, which may have changed while no program watched them. Equal texts change nothing.
    #[cfg(unix)]
    pub(super) fn compare(&mut self) {
        self.begin(None);
        self.is_comparison = true;
    }

    fn begin(&mut self, ticket: Option<u64>) {
        self.is_comparison = false;
        self.tickets.extend(ticket);
        if self.reading.is_some() {
            self.again = true;
            return;
        }
        let source = self.source.clone();
        self.reading = Some(offload(move || source.read()));
    }

    /// The result of a read, if one ended. A change of the files starts a read.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Config, Report>> {
        if let Some(watch) = &mut self.watch
            && watch.poll_next(cx).is_ready()
        {
            self.begin(None);
        }
        let Some(reading) = &mut self.reading else { return Poll::Pending };
        let Poll::Ready(read) = Pin::new(reading).poll(cx) else { return Poll::Pending };
        self.reading = None;
        if std::mem::take(&mut self.again) {
            self.begin(None);
            return self.poll(cx);
        }
        Poll::Ready(read.unwrap_or_else(|error| {
            Err(Report::new(report::FAILURE, "reading the configuration failed").because(error))
        }))
    }
}

impl Driver {
    /// Starts a read; the ticket is answered with its result.
    pub(super) fn reload(&mut self, ticket: Option<u64>) {
        self.reload.who = self.operator.as_ref().map(|operator| operator.who.clone());
        self.reload.begin(ticket);
        self.outside.wake();
    }

    pub(super) fn poll_reload(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(read) = self.reload.poll(cx) else { return false };
        if std::mem::take(&mut self.reload.is_comparison)
            && read.as_ref().is_ok_and(|config| config.texts == self.reload.texts)
        {
            return true;
        }
        let tickets = std::mem::take(&mut self.reload.tickets);
        let who = self.reload.who.take().unwrap_or_else(|| "a changed file".to_owned());
        let answer: Result<Value, Refusal> = match read.and_then(|config| self.take_config(config, &who)) {
            // Each request is answered when the changed backends have taken over, or when one of them failed.
            Ok(detail) => {
                for ticket in tickets {
                    self.reload.outcomes.insert(ticket, detail.clone());
                    self.tell(Event::OutcomeAsked { ticket });
                }
                return true;
            }
            Err(report) => {
                let words = report.to_string();
                self.refuse_config(words.trim_end().trim_start_matches("error: "), &who);
                Err(Refusal::new("config_refused", words.trim_end()))
            }
        };
        for ticket in tickets {
            self.answer_asked(ticket, &answer);
        }
        true
    }

    /// The machine's result of a reload. `None` if the ticket is not of a reload.
    pub(super) fn reload_outcome(
        &mut self,
        ticket: u64,
        result: &Result<Value, String>,
    ) -> Option<Result<Value, Refusal>> {
        let detail = self.reload.outcomes.remove(&ticket)?;
        Some(match result {
            Ok(_) => Ok(json!({"reloaded": true, "detail": detail})),
            Err(why) => {
                let why = self.journal.mask().hide(why).into_owned();
                Err(Refusal { data: json!({"detail": detail}), ..Refusal::new("not_applied", why) })
            }
        })
    }

    fn take_config(&mut self, config: Config, who: &str) -> Result<String, Report> {
        let before: Vec<Backend> = self.gateway.backends().cloned().collect();
        self.reload.check_finished(&config, &before)?;
        // Authentication and addresses come first: if one of them fails, nothing is changed.
        if let Some(listen) = &mut self.listen {
            let address = self.reload.listen.or(config.front.listen).unwrap_or(listen.asked());
            let options = begin::options(address, &config)?;
            let before = listen.url();
            listen.configure(options).map_err(|error| begin::cannot_listen(&error))?;
            if listen.url() != before {
                begin::announce(listen).iter().for_each(|note| self.journal.note(note));
            }
        }
        let has_address = config.front.listen.is_some();
        let is_new = std::mem::replace(&mut self.reload.has_address, has_address) != has_address;
        if is_new && self.listen.is_some() != has_address && self.reload.listen.is_none() {
            self.journal.note("adding or removing the HTTP endpoint takes effect at the next start");
        }
        if self.reload.cluster != config.cluster {
            self.journal.note("a change of [cluster] takes effect at the next start");
        }
        if let Some(warning) = self.reload.watch(&config.watched) {
            self.journal.note(&warning);
        }
        self.reload.blank = config.blank;
        self.reload.texts = config.texts;
        config.notes.iter().for_each(|note| self.journal.note(note));
        self.journal.learn(config.settings.backends.iter().flat_map(|backend| backend.kind.texts()));
        let detail = changes(&before, &config.settings);
        self.configured(&detail, who);
        self.tell(Event::Configured(Box::new(config.settings)));
        self.configure_cluster();
        let backends: Vec<Backend> = self.gateway.backends().cloned().collect();
        self.catalogue_cache.configure(&backends, self.now);
        self.set_memory_watch();
        self.show_mirrors();
        Ok(detail)
    }
}

/// A description of the changes.
fn changes(before: &[Backend], after: &Settings) -> String {
    let old = |name: &str| before.iter().find(|backend| backend.name == name);
    let mut added = Vec::new();
    let mut changed = Vec::new();
    for backend in &after.backends {
        match old(&backend.name) {
            None => added.push(backend.name.as_str()),
            Some(old) if old != backend => changed.push(backend.name.as_str()),
            Some(_) => {}
        }
    }
    let is_left = |backend: &&Backend| after.backends.iter().all(|other| other.name != backend.name);
    let removed: Vec<&str> = before.iter().filter(is_left).map(|backend| backend.name.as_str()).collect();
    let parts: Vec<String> = [("added", added), ("changed", changed), ("removed", removed)]
        .into_iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(what, names)| format!("{what} {}", names.join(", ")))
        .collect();
    if parts.is_empty() { "the backends are unchanged".to_owned() } else { parts.join("; ") }
}
