//! `outlast gateway` becomes another program: what is saved of its clients and backends, and how the next program continues.
//! The decisions are in core's `upgrade`; what can be saved, and when, is known to the gateway and to its fronts.
//!
//! First the new program is checked with a sketch of the state, while all requests are served. Then new requests are held:
//! those over HTTP stay in the buffers of the system, those on stdin in a list that is saved. Open requests are answered.
//! When none is left, streams end, connections give their sockets back, and the process becomes the new program.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    task::Context,
    time::{Duration, Instant, SystemTime},
};

use outlast_control::SavedControl;
use outlast_core::{
    gateway::{self, Event, Kind, Link},
    saved::{Moment, Octets},
    upgrade::Action,
};
use outlast_os::handover::{Handover, Received};
use serde::{Deserialize, Serialize};
use tokio::task::spawn_local;

use super::{
    Driver, Stopping,
    checker::is_checker,
    http::{HttpClient, HttpLink, SavedHttp},
    links::{CONNECT_MAX, Wire, WireKind, http_settings},
    listen::SavedListen,
};
use crate::{
    child::{SavedChildren, own_streams::SavedStreams},
    cli::report::{self, Report},
    config::Texts,
    upgrade::{
        format::{self, Header},
        requests::{self, Requested},
    },
};

/// How long connections may take to end their streams; then they are closed.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// If all open requests are younger, those that postponed an upgrade are over, and it is awaited once more.
const YOUNG: Duration = Duration::from_secs(2);

/// `outlast gateway` as saved state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Saved {
    pub id: String,
    pub name: String,
    /// The configuration in force. The file on disk may be another one by now.
    pub config: Texts,
    pub gateway: gateway::Saved,
    pub children: SavedChildren,
    pub control: SavedControl,
    pub listen: Option<SavedListen>,
    pub stdio: Option<SavedStreams>,
    pub rest: SavedRest,
}

/// What the driver itself knows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedRest {
    /// Lines of the client on stdin that were not heard yet.
    held_lines: Vec<Octets>,
    /// Sessions at HTTP backends, by serial number.
    pub http: BTreeMap<u64, SavedHttp>,
    /// How many lines of each process were not JSON.
    diverted: BTreeMap<u64, u64>,
    /// How many checker processes there were.
    checkers: u64,
    left_out: BTreeMap<String, Vec<String>>,
    reload_failed: Option<(Moment, String)>,
    began: Moment,
    requested: Requested,
}

impl Saved {
    /// The serial numbers of all links that are handed over.
    pub(crate) fn links(&self) -> BTreeSet<u64> {
        self.children.keys().filter(|key| !is_checker(*key)).chain(self.rest.http.keys().copied()).collect()
    }
}

/// The moments of one handover.
#[derive(Debug, Default)]
pub(super) struct HandoverTimes {
    /// Requests are held since then.
    held: Option<SystemTime>,
    /// Connections must have ended their streams by then.
    pause_by: Option<Instant>,
}

impl Driver {
    /// A request over the control socket, or SIGUSR2.
    pub(super) fn ask_upgrade(&mut self, ticket: Option<u64>, named: Option<String>) {
        let wanted = requests::wanted_program(named, self.control.program());
        let refusal = match wanted {
            _ if self.stdio.as_ref().is_some_and(|stdio| stdio.is_threaded()) => {
                Report::new(report::FAILURE, "stdin and stdout must be pipes or sockets for an upgrade in place")
            }
            _ if self.cluster.is_some() => {
                Report::new(report::FAILURE, "a replica of a cluster is not upgraded in place")
                    .hint("stop it and start it again: the other replicas serve its sessions meanwhile")
            }
            Err(report) => report,
            Ok(program) if self.upgrades.machine.requested(ticket, program.clone(), self.now) => return,
            Ok(_) => Report::new(report::FAILURE, "an upgrade to another program is under way"),
        };
        self.tell_upgrade_failed(ticket.into_iter().collect(), &refusal);
    }

    pub(super) fn upgrade_deadline(&self) -> Option<Instant> {
        self.upgrades.machine.deadline().into_iter().chain(self.handover.pause_by).min()
    }

    /// Continues with an upgrade that was requested. True if something has happened.
    pub(super) fn poll_upgrade(&mut self, cx: &mut Context<'_>) -> bool {
        if !self.upgrades.machine.is_wanted() {
            return false;
        }
        // The next program would not know the settings that it runs under.
        if let Some(name) = self.gateway.failed_change() {
            let sentence = format!("the changed configuration of the backend `{name}` was not applied");
            let report = Report::new(report::FAILURE, sentence).hint("correct or undo the change, and upgrade again");
            self.upgrade_failed(&report);
            return true;
        }
        match self.upgrades.poll_checked(cx) {
            Some(Ok(())) => self.upgrades.machine.checked(),
            Some(Err(report)) => {
                self.upgrade_failed(&report);
                return true;
            }
            None => {}
        }
        if self.gateway.open_since().is_some_and(|since| self.now < since + YOUNG) {
            self.upgrades.machine.retry(self.now);
        }
        let busy = self.busy();
        let action = if self.upgrades.machine.is_pausing() {
            self.poll_pause(cx)
        } else {
            // A sketch of the state can be checked at any moment.
            let is_busy = match self.upgrades.machine.is_checked() {
                true => busy.is_some(),
                false => self.stopping != Stopping::No,
            };
            self.upgrades.machine.look(is_busy, self.now)
        };
        match action {
            None => return self.update_hold(),
            Some(Action::Check(program)) => {
                let children = self.children.sketch_of_running(&mut Handover::default());
                let saved = self.save(children, &mut Handover::default(), Requested::default());
                self.upgrades.check(program, format::write(format::Kind::Gateway, &saved));
            }
            Some(Action::Pause) => self.begin_pause(),
            Some(Action::Resume) => self.end_pause(),
            Some(Action::Become { program, tickets }) => self.become_next(&program, tickets),
            Some(Action::Postpone(tickets)) => {
                let why = busy.as_deref().unwrap_or("the new program is being checked");
                self.journal.note(&format!("the upgrade is postponed: {why}"));
                let answer = Ok(requests::postponed(why));
                tickets.into_iter().for_each(|ticket| self.control.answer(ticket, &answer));
            }
        }
        self.update_hold();
        true
    }

    /// Holds new requests while open ones are waited for, for as long as that may last. A request that needs an answer of
    /// its client is not waited for like this: the answer is one more request over HTTP. True if lines were heard.
    fn update_hold(&mut self) -> bool {
        let machine = &self.upgrades.machine;
        let is_draining = machine.is_checked() && machine.is_awaited() && !self.gateway.awaits_client();
        let wanted = (is_draining || machine.is_pausing()) && self.stopping == Stopping::No;
        let was_held = self.handover.held.is_some();
        if wanted == was_held {
            return false;
        }
        self.handover.held = wanted.then(SystemTime::now);
        self.hold_requests(wanted);
        true
    }

    /// Why the state cannot be saved now.
    fn busy(&self) -> Option<String> {
        self.busy_machines().or_else(|| self.listen.as_ref()?.busy())
    }

    /// The same without HTTP responses that are being sent.
    fn busy_machines(&self) -> Option<String> {
        let is_http_busy = |wire: &Wire| matches!(&wire.kind, WireKind::Http(http) if http.is_busy());
        if self.stopping != Stopping::No {
            Some("the gateway is stopping".to_owned())
        } else if let Some(busy) = self.gateway.busy() {
            Some(busy.to_string())
        } else if self.children.is_busy() {
            Some("a process is being started or stopped".to_owned())
        } else if !self.long_messages.is_empty() {
            Some("a long message of a backend is being parsed".to_owned())
        } else if self.hosts.is_parsing() {
            Some("a long message of another replica is being parsed".to_owned())
        } else if self.long_line.is_some() {
            Some("a long message of the client is being parsed".to_owned())
        } else if self.links.values().any(is_http_busy) {
            Some("a message to an HTTP backend is being sent".to_owned())
        } else if self.reload.is_busy() || !self.pending_restarts.is_empty() {
            Some("the configuration is being read, or a change of it is on trial".to_owned())
        } else if self.catalogue_cache.is_busy() {
            Some("the catalogue is being written".to_owned())
        } else {
            None
        }
    }

    fn begin_pause(&mut self) {
        self.update_hold();
        self.handover.pause_by = Some(self.now + PAUSE_MAX);
        self.tell(Event::HandoverBegan);
        self.listen.as_mut().into_iter().for_each(|listen| listen.begin_handover());
    }

    fn poll_pause(&mut self, cx: &mut Context<'_>) -> Option<Action> {
        if self.busy_machines().is_some() {
            return self.upgrades.machine.paused(true);
        }
        if self.handover.pause_by.take_if(|by| *by <= self.now).is_some() {
            self.listen.as_mut().into_iter().for_each(|listen| listen.cut_connections());
        }
        let is_handed_over = self.listen.as_mut().is_none_or(|listen| listen.poll_handed_over(cx).is_ready());
        let is_paused = self.children.poll_pause(cx).is_ready() && is_handed_over;
        match is_paused {
            true => self.upgrades.machine.paused(self.busy().is_some()),
            false => None,
        }
    }

    fn end_pause(&mut self) {
        self.handover.pause_by = None;
        self.children.unpause();
        self.listen.as_mut().into_iter().for_each(|listen| listen.end_handover());
    }

    fn save(&self, children: SavedChildren, handover: &mut Handover, requested: Requested) -> Saved {
        let mut diverted = BTreeMap::new();
        let mut http = BTreeMap::new();
        for (serial, wire) in &self.links {
            match &wire.kind {
                WireKind::Child { diverted: lines, .. } => drop(diverted.insert(*serial, *lines)),
                WireKind::Http(link) => http.extend(link.save().map(|saved| (*serial, saved))),
                // Only a replica of a cluster has such a link, and it is not upgraded in place.
                WireKind::Stream { .. } => {}
            }
        }
        Saved {
            id: self.plan.id.clone(),
            name: self.plan.name.clone(),
            config: self.reload.texts.clone(),
            gateway: self.gateway.sketch(self.now),
            children,
            control: self.control.save(handover),
            listen: self.listen.as_ref().map(|listen| listen.save(handover)),
            stdio: self.stdio.as_ref().map(|stdio| stdio.save()),
            rest: SavedRest {
                held_lines: self.held_lines.lines.iter().map(|line| Octets::of(line)).collect(),
                http,
                diverted,
                checkers: self.checker.started,
                left_out: self.left_out.clone(),
                reload_failed: self.reload.failed.as_ref().map(|(at, why)| (Moment::of(*at, self.now), why.clone())),
                began: Moment::of(self.began, self.now),
                requested,
            },
        }
    }

    /// Does not return, unless it fails.
    fn become_next(&mut self, program: &Path, tickets: Vec<u64>) {
        self.calls.write(&mut self.journal);
        let requested = Requested { tickets, paused: self.handover.held };
        let mut handover = Handover::default();
        let Some(children) = self.children.save(&mut handover) else {
            // A message to or from a monitor is under way.
            self.upgrades.machine.paused(true);
            return self.end_pause();
        };
        let saved = self.save(children, &mut handover, requested);
        let report = match requests::save(&format::write(format::Kind::Gateway, &saved)) {
            Err(report) => report,
            Ok(file) => {
                self.stdio.as_mut().into_iter().for_each(|stdio| stdio.let_go());
                let report = self.upgrades.become_next(program, &file, &handover);
                self.stdio.as_mut().into_iter().for_each(|stdio| stdio.take_back());
                report
            }
        };
        self.upgrade_failed(&report);
    }

    fn upgrade_failed(&mut self, report: &Report) {
        if self.upgrades.machine.is_pausing() {
            self.end_pause();
        }
        let tickets = self.upgrades.machine.failed();
        self.update_hold();
        self.tell_upgrade_failed(tickets, report);
    }

    fn tell_upgrade_failed(&mut self, tickets: Vec<u64>, report: &Report) {
        self.calls.write(&mut self.journal);
        let line = self.journal.record(requests::failure(report));
        self.control.record(&line);
        let answer = Err(requests::refused(report));
        tickets.into_iter().for_each(|ticket| self.control.answer(ticket, &answer));
    }

    /// Continues where the last program stopped. The machine, the children, the fronts and the control socket have been
    /// restored already.
    pub(crate) async fn go_on(mut self, header: Header, saved: SavedRest, received: Received) {
        spawn_local(self.ready_set.forward_wakes());
        self.began = saved.began.at(self.now);
        self.left_out = saved.left_out;
        self.checker.started = saved.checkers;
        self.reload.failed = saved.reload_failed.map(|(at, why)| (at.at(self.now), why));
        self.show_mirrors();
        for link in self.gateway.links() {
            self.resume_link(link, &saved.http, &saved.diverted);
        }
        // The checker keeps nothing that cannot be compiled again.
        let strays: Vec<u64> = self.children.keys().filter(|key| !self.links.contains_key(key)).collect();
        strays.into_iter().for_each(|key| self.children.kill(key, self.now));
        self.tell(Event::TimePassed);
        self.has_started = true;
        self.set_memory_watch();
        if let Err(error) = received.unblock_signals() {
            self.journal.note(&format!("WARNING: signals are still blocked: {error}"));
        }
        drop(received);
        let pause = saved.requested.pause();
        self.calls.write(&mut self.journal);
        let line = self.journal.record(requests::record(&header, pause));
        self.control.record(&line);
        let answer = Ok(requests::upgraded(&header, pause));
        saved.requested.tickets.into_iter().for_each(|ticket| self.control.answer(ticket, &answer));
        self.reload.compare();
        saved.held_lines.into_iter().for_each(|line| self.heard_line(line.bytes()));
        // Only a replica of a cluster ends by itself, and it is not upgraded in place.
        let _ = self.run_loop().await;
    }

    fn resume_link(&mut self, link: Link, http: &BTreeMap<u64, SavedHttp>, diverted: &BTreeMap<u64, u64>) {
        let Some(backend) = self.gateway.backend(link.backend).cloned() else { return };
        match (&backend.kind, http.get(&link.serial)) {
            (Kind::Stdio { .. }, _) => {
                let diverted = diverted.get(&link.serial).copied().unwrap_or_default();
                self.add_wire(link, WireKind::Child { backend: backend.name, diverted });
            }
            (kind @ Kind::Http { .. }, Some(saved)) => {
                let client = self.http.get_or_insert_with(|| HttpClient::new(CONNECT_MAX));
                let settings = http_settings(kind).expect("seen above");
                let resumed = HttpLink::resume(client, &settings, saved, self.gateway.tools_of(link));
                self.add_wire(link, WireKind::Http(Box::new(resumed)));
                self.tell(Event::LinkResumed { link });
            }
            (Kind::Http { .. }, None) => {}
        }
    }
}
