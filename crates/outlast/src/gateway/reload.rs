//! The configuration of a running gateway: read again when a file of it changes or somebody asks, and taken only whole.

use std::{
    collections::BTreeMap,
    future::Future,
    net::SocketAddr,
    path::PathBuf,
    pin::Pin,
    task::{Context, Poll},
    time::Instant,
};

use outlast_core::gateway::{Backend, Event, Settings};
use serde_json::{Value, json};

use super::{Driver, begin};
use crate::{
    config::gateway::Gateway as Config,
    control::wire::Refusal,
    offload::{Task, offload},
    report::Report,
    watch::Watch,
};

/// Where the configuration comes from. No file: the nearest `outlast.toml`.
#[derive(Debug, Clone)]
pub struct Source {
    pub files: Vec<PathBuf>,
    pub cwd: PathBuf,
}

impl Source {
    pub fn read(&self) -> Result<Config, Report> {
        Config::read(&self.files, &self.cwd)
    }
}

pub struct Reload {
    source: Source,
    is_watching: bool,
    watched: Vec<PathBuf>,
    /// The address that was asked for at the start, whatever the files say.
    listen: Option<SocketAddr>,
    /// Whether the files name an address.
    has_address: bool,
    watch: Option<Watch>,
    reading: Option<Task<Result<Config, Report>>>,
    /// Somebody asked while it was being read, and may have changed it just then.
    again: bool,
    /// Who wants to know how it went.
    tickets: Vec<u64>,
    /// Reloads whose changed backends are being tried, each with what changed, in words.
    outcomes: BTreeMap<u64, String>,
    /// Who asked last, or none after a change of the files.
    who: Option<String>,
    /// When and why the configuration on disk was last refused; none once one is in force that was read after it.
    pub(super) failed: Option<(Instant, String)>,
}

impl Reload {
    /// A sentence if changes will go unnoticed.
    pub fn new(
        source: Source,
        config: &Config,
        listen: Option<SocketAddr>,
        is_watching: bool,
    ) -> (Reload, Option<String>) {
        let mut reload = Reload {
            source,
            is_watching,
            watched: Vec::new(),
            listen,
            has_address: config.front.listen.is_some(),
            watch: None,
            reading: None,
            again: false,
            tickets: Vec::new(),
            outcomes: BTreeMap::new(),
            who: None,
            failed: None,
        };
        let complaint = reload.watch(&config.watched);
        (reload, complaint)
    }

    /// The files may be others after each reading.
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
            Err(error) => {
                Some(format!("changes of the configuration go unnoticed until SIGHUP or `outlast reload`: {error}"))
            }
        }
    }

    fn begin(&mut self, ticket: Option<u64>) {
        self.tickets.extend(ticket);
        if self.reading.is_some() {
            self.again = true;
            return;
        }
        let source = self.source.clone();
        self.reading = Some(offload(move || source.read()));
    }

    /// What was read, if something was. A change of the files begins to read them.
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
            Err(Report::new(crate::report::FAILURE, "reading the configuration failed").because(error))
        }))
    }
}

impl Driver {
    /// Begins to read; whoever waits is told how it went.
    pub(super) fn reload(&mut self, ticket: Option<u64>) {
        self.reload.who = self.operator.as_ref().map(|operator| operator.who.clone());
        self.reload.begin(ticket);
        self.outside.pull();
    }

    pub(super) fn poll_reload(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(read) = self.reload.poll(cx) else { return false };
        let tickets = std::mem::take(&mut self.reload.tickets);
        let who = self.reload.who.take().unwrap_or_else(|| "a changed file".to_owned());
        let answer: Result<Value, Refusal> = match read.and_then(|config| self.take_config(config, &who)) {
            // Each is answered when the changed backends have taken over, or one of them failed.
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

    /// The machine says what became of a reload. Nothing if it is not about one.
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
        // Who may come, and where to, is decided first: if that cannot be had, all stays as it is.
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
            self.journal.note("whether clients come by HTTP or by stdin is decided at the next start");
        }
        if let Some(complaint) = self.reload.watch(&config.watched) {
            self.journal.note(&complaint);
        }
        config.notes.iter().for_each(|note| self.journal.note(note));
        self.journal.learn(config.settings.backends.iter().flat_map(|backend| backend.kind.texts()));
        let before: Vec<Backend> = self.gateway.backends().cloned().collect();
        let detail = changes(&before, &config.settings);
        self.configured(&detail, who);
        self.tell(Event::Configured(Box::new(config.settings)));
        let backends: Vec<Backend> = self.gateway.backends().cloned().collect();
        self.shelf.configure(&backends, self.now);
        self.set_memory_watch();
        self.show_mirrors();
        Ok(detail)
    }
}

/// What is different, in words.
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
    if parts.is_empty() { "the backends are the same".to_owned() } else { parts.join("; ") }
}
