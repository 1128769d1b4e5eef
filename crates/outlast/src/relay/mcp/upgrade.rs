//! `outlast mcp` becomes another program: what is saved of the conversation and its pipes, and how the next program goes
//! on. The decisions are in core's `upgrade` and in the relay.

use std::{
    cell::RefCell,
    path::{Path, PathBuf},
    rc::Rc,
    task::Context,
    time::{Duration, Instant, SystemTime},
};

use outlast_control::SavedControl;
use outlast_core::{relay, upgrade::Action};
use outlast_os::handover::{Handover, Received};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Driver;
use crate::{
    child::{SavedChildren, own_streams::SavedStreams},
    cli::report::{self, Report},
    upgrade::{
        format::{self, Header, Kind},
        requests::{self, Requested},
    },
};

/// If all open requests of an inner client are younger, those that postponed an upgrade are over, and it is awaited once
/// more.
const YOUNG: Duration = Duration::from_secs(2);

/// `outlast mcp` as saved state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Saved {
    pub relay: relay::Saved,
    pub children: SavedChildren,
    pub control: SavedControl,
    /// The client, where it is a part of this process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inner: Option<Value>,
    pub rest: SavedRest,
}

/// What the driver itself knows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedRest {
    pub client: SavedStreams,
    next_generation: u32,
    builds: u64,
    loaded_at: Option<SystemTime>,
    is_wide: bool,
    requested: Requested,
}

/// The client of the relay where it is a part of this process: the hub of a shared server. It is handed over together with
/// the relay.
pub(crate) trait InnerClient {
    /// Why its state cannot be saved now. The waker is called when that may have changed.
    fn poll_busy(&mut self, cx: &mut Context<'_>) -> Option<String>;

    /// While it is held, it sends no new requests, so that open ones can end.
    fn hold(&mut self, is_held: bool);

    /// All its open requests were sent after this moment.
    fn is_young(&self, since: Instant) -> bool;

    /// It has a state that can be checked.
    fn has_begun(&self) -> bool;

    /// Its state. If it is busy, it can be checked, but not be gone on with. `None` before it has begun.
    fn save(&self, handover: &mut Handover, now: Instant) -> Option<Value>;
}

impl Driver {
    /// A request over the control socket, or SIGUSR2.
    pub(super) fn ask_upgrade(&mut self, ticket: Option<u64>, named: Option<String>) {
        let wanted = requests::wanted_program(named, self.control.program());
        let refusal = match wanted {
            _ if self.client.is_threaded() => {
                Report::new(report::FAILURE, "stdin and stdout must be pipes or sockets for an upgrade in place")
            }
            Err(report) => report,
            Ok(program) if self.upgrades.machine.requested(ticket, program.clone(), self.now) => return,
            Ok(_) => Report::new(report::FAILURE, "an upgrade to another program is under way"),
        };
        self.tell_upgrade_failed(ticket.into_iter().collect(), &refusal);
    }

    /// Continues with an upgrade that was requested. True if something has happened.
    pub(super) fn poll_upgrade(&mut self, cx: &mut Context<'_>) -> bool {
        if self.stops.poll_upgrade(cx).is_ready() {
            self.ask_upgrade(None, None);
        }
        if !self.upgrades.machine.is_wanted() {
            return false;
        }
        let has_moved = self.step_upgrade(cx);
        self.update_hold();
        has_moved
    }

    /// Holds the requests of an inner client while its open ones are waited for, for as long as that may last.
    fn update_hold(&mut self) {
        let Some(inner) = &self.plan.inner else { return };
        let machine = &self.upgrades.machine;
        let is_held = machine.is_checked() && (machine.is_awaited() || machine.is_pausing()) && self.ending.is_none();
        inner.borrow_mut().hold(is_held);
        self.held = self.held.filter(|_| is_held).or_else(|| is_held.then(SystemTime::now));
    }

    fn step_upgrade(&mut self, cx: &mut Context<'_>) -> bool {
        match self.upgrades.poll_checked(cx) {
            Some(Ok(())) => self.upgrades.machine.checked(),
            Some(Err(report)) => {
                let tickets = self.upgrades.machine.failed();
                self.tell_upgrade_failed(tickets, &report);
                return true;
            }
            None => {}
        }
        let is_young = |inner: &Rc<RefCell<dyn InnerClient>>| {
            self.now.checked_sub(YOUNG).is_some_and(|since| inner.borrow().is_young(since))
        };
        if self.plan.inner.as_ref().is_some_and(is_young) {
            self.upgrades.machine.retry(self.now);
        }
        let busy = self.busy(cx);
        let action = if !self.upgrades.machine.is_pausing() {
            self.upgrades.machine.look(busy.is_some(), self.now)
        } else if self.children.poll_pause(cx).is_ready() {
            self.upgrades.machine.paused(busy.is_some())
        } else {
            None
        };
        match action {
            None => return false,
            Some(Action::Check(program)) => {
                let requested = Requested::default();
                let children = self.children.sketch(&mut Handover::default());
                match children.and_then(|children| self.save(children, &mut Handover::default(), requested)) {
                    Some(saved) => self.upgrades.check(program, format::write(self.kind(), &saved)),
                    None => unreachable!("the driver is not busy"),
                }
            }
            Some(Action::Pause) => {}
            Some(Action::Resume) => self.children.unpause(),
            Some(Action::Become { program, tickets }) => self.become_next(&program, tickets),
            Some(Action::Postpone(tickets)) => {
                let answer = Ok(requests::postponed(busy.as_deref().unwrap_or("the new program is being checked")));
                tickets.into_iter().for_each(|ticket| self.control.answer(ticket, &answer));
            }
        }
        true
    }

    /// Why the state cannot be saved now.
    fn busy(&self, cx: &mut Context<'_>) -> Option<String> {
        self.own_busy().or_else(|| {
            let mut inner = self.plan.inner.as_ref()?.borrow_mut();
            match self.upgrades.machine.is_checked() {
                true => inner.poll_busy(cx),
                false => (!inner.has_begun()).then(|| "no client has joined the hub yet".to_owned()),
            }
        })
    }

    fn own_busy(&self) -> Option<String> {
        if let Some(busy) = self.relay.busy() {
            return Some(busy.to_string());
        }
        if self.ending.is_some() {
            Some("outlast is stopping".to_owned())
        } else if self.awaits_first || self.children.is_busy() {
            Some("a server is being started or stopped".to_owned())
        } else if self.files.are_busy() {
            Some("files are being written or read, or are changing".to_owned())
        } else {
            None
        }
    }

    fn save(&self, children: SavedChildren, handover: &mut Handover, requested: Requested) -> Option<Saved> {
        let inner = match &self.plan.inner {
            Some(inner) => Some(inner.borrow().save(handover, self.now)?),
            None => None,
        };
        Some(Saved {
            relay: self.relay.save(self.now).ok()?,
            children,
            control: self.control.save(handover),
            rest: SavedRest {
                client: match inner {
                    Some(_) => self.client.save_other(handover),
                    None => self.client.save(),
                },
                next_generation: self.next_generation,
                builds: self.builds,
                loaded_at: self.files.loaded_at(),
                is_wide: self.is_wide,
                requested,
            },
            inner,
        })
    }

    /// Does not return, unless it fails.
    fn become_next(&mut self, program: &Path, tickets: Vec<u64>) {
        let requested = Requested { tickets, paused: Some(self.held.unwrap_or_else(SystemTime::now)) };
        let mut handover = Handover::default();
        let children = self.children.save(&mut handover);
        let Some(saved) = children.and_then(|children| self.save(children, &mut handover, requested)) else {
            // A message to or from a monitor is under way.
            self.upgrades.machine.paused(true);
            return self.children.unpause();
        };
        let report = match requests::save(&format::write(self.kind(), &saved)) {
            Err(report) => report,
            // The streams to an inner client are not shared with another process, so they keep their flags.
            Ok(file) if saved.inner.is_some() => self.upgrades.become_next(program, &file, &handover),
            Ok(file) => {
                self.client.let_go();
                let report = self.upgrades.become_next(program, &file, &handover);
                self.client.take_back();
                report
            }
        };
        self.children.unpause();
        let tickets = self.upgrades.machine.failed();
        self.tell_upgrade_failed(tickets, &report);
    }

    fn kind(&self) -> Kind {
        if self.plan.inner.is_some() { Kind::Hub } else { Kind::Mcp }
    }

    fn tell_upgrade_failed(&mut self, tickets: Vec<u64>, report: &Report) {
        let line = self.journal.record(requests::failure(report));
        self.control.record(&line);
        let answer = Err(requests::refused(report));
        tickets.into_iter().for_each(|ticket| self.control.answer(ticket, &answer));
    }

    /// Continues where the last program stopped. The relay, the children and the control socket have been restored already.
    pub(crate) async fn go_on(
        mut self,
        header: &Header,
        saved: SavedRest,
        watched: Vec<PathBuf>,
        received: Received,
    ) -> u8 {
        (self.next_generation, self.builds) = (saved.next_generation, saved.builds);
        self.is_wide = saved.is_wide;
        self.awaits_first = false;
        self.has_started = true;
        self.files.go_on(saved.loaded_at, watched, saved.requested.paused);
        if let Err(error) = received.unblock_signals() {
            self.journal.note(&format!("WARNING: signals are still blocked: {error}"));
        }
        drop(received);
        let pause = saved.requested.pause();
        let line = self.journal.record(requests::record(header, pause));
        self.control.record(&line);
        let answer = Ok(requests::upgraded(header, pause));
        saved.requested.tickets.into_iter().for_each(|ticket| self.control.answer(ticket, &answer));
        self.run_loop().await
    }
}
