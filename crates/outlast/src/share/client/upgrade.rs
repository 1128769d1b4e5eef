//! A thin client becomes another program after its hub did, or at SIGUSR2: what is saved of the conversation and of the
//! connections to hubs, and how the next program continues. It has no control socket, so results are told on stderr.

use std::{
    io,
    path::Path,
    task::Context,
    time::{Instant, SystemTime},
};

use outlast_core::{
    relay::{self, Relay, Settings},
    saved::Octets,
    upgrade::Action,
};
use outlast_os::{
    self as os,
    handover::{Handover, Received},
};
use serde::{Deserialize, Serialize};

use super::{
    super::{connection::SavedConnection, join::Joining, place::Hubs, wire::Hello},
    Connection, Hub, ThinClient,
};
use crate::{
    child::own_streams::{OwnStreams, SavedStreams},
    cli::report::{self, Report},
    upgrade::{
        OWN_VERSION,
        format::{self, Header, Kind},
        requests::{self, Requested},
    },
};

/// A thin client as saved state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Saved {
    pub relay: relay::Saved,
    /// The line that greets a hub.
    hello: Octets,
    moved: Option<String>,
    hubs: Vec<SavedHub>,
    next_generation: u32,
    client: SavedStreams,
    requested: Requested,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct SavedHub {
    generation: u32,
    id: String,
    connection: SavedConnection,
    queued: Option<usize>,
}

impl ThinClient {
    /// Continues with an upgrade that was requested. True if something has happened.
    pub(super) fn poll_upgrade(&mut self, cx: &mut Context<'_>) -> bool {
        if self.stops.poll_upgrade(cx).is_ready() {
            self.ask_upgrade(None);
        }
        if !self.upgrades.machine.is_wanted() {
            return false;
        }
        match self.upgrades.poll_checked(cx) {
            Some(Ok(())) => self.upgrades.machine.checked(),
            Some(Err(report)) => {
                self.upgrades.machine.failed();
                say_failed(&report);
                return true;
            }
            None => {}
        }
        let busy = self.busy();
        // There is no process to be paused.
        let action = match self.upgrades.machine.is_pausing() {
            false => self.upgrades.machine.look(busy.is_some(), self.now),
            true => self.upgrades.machine.paused(busy.is_some()),
        };
        match action {
            None => return false,
            Some(Action::Check(program)) => match self.save(&mut Handover::default(), Requested::default()) {
                Some(saved) => self.upgrades.check(program, format::write(Kind::SharedClient, &saved)),
                None => unreachable!("the client is not busy"),
            },
            Some(Action::Pause | Action::Resume) => {}
            Some(Action::Become { program, .. }) => self.become_next(&program),
            Some(Action::Postpone(_)) => {
                let why = busy.as_deref().unwrap_or("the new program is being checked");
                os::say(&format!("[outlast] the upgrade is postponed: {why}"));
            }
        }
        true
    }

    /// SIGUSR2, or a hub that has become the named program.
    pub(super) fn ask_upgrade(&mut self, named: Option<String>) {
        let report = match requests::wanted_program(named, self.program.as_ref()) {
            _ if self.client.is_threaded() => {
                Report::new(report::FAILURE, "stdin and stdout must be pipes or sockets for an upgrade in place")
            }
            Err(report) => report,
            Ok(program) if self.upgrades.machine.requested(None, program.clone(), self.now) => return,
            Ok(_) => Report::new(report::FAILURE, "an upgrade to another program is under way"),
        };
        say_failed(&report);
    }

    /// Why the state cannot be saved now.
    fn busy(&self) -> Option<String> {
        if let Some(busy) = self.relay.busy() {
            return Some(busy.to_string());
        }
        let is_leaving = self.hubs.values().any(|hub| hub.leaving.is_some());
        if self.ending.is_some() {
            Some("outlast is stopping".to_owned())
        } else if self.joining.is_none() || self.starting.is_some() || self.awaits_first || is_leaving {
            Some("a hub is being joined or left".to_owned())
        } else {
            None
        }
    }

    /// `None` while [`ThinClient::busy`].
    fn save(&self, handover: &mut Handover, requested: Requested) -> Option<Saved> {
        let hubs = self.hubs.iter().map(|(generation, hub)| SavedHub {
            generation: *generation,
            id: hub.id.clone(),
            connection: hub.connection.save(handover),
            queued: hub.queued,
        });
        Some(Saved {
            relay: self.relay.save(self.now).ok()?,
            hello: Octets::of(&self.joining.as_ref()?.hello.to_line()),
            moved: self.moved.clone(),
            hubs: hubs.collect(),
            next_generation: self.next_generation,
            client: self.client.save(),
            requested,
        })
    }

    /// Does not return, unless it fails.
    fn become_next(&mut self, program: &Path) {
        let requested = Requested { tickets: Vec::new(), paused: Some(SystemTime::now()) };
        let mut handover = Handover::default();
        let Some(saved) = self.save(&mut handover, requested) else { unreachable!("the client is not busy") };
        let report = match requests::save(&format::write(Kind::SharedClient, &saved)) {
            Err(report) => report,
            Ok(file) => {
                self.client.let_go();
                let report = self.upgrades.become_next(program, &file, &handover);
                self.client.take_back();
                report
            }
        };
        self.upgrades.machine.failed();
        say_failed(&report);
    }

    /// The client of the last program of this process. Must be called within the runtime.
    pub(crate) fn restore(
        settings: Settings,
        place: Hubs,
        stops: os::Stops,
        saved: Saved,
        received: &mut Received,
    ) -> io::Result<(ThinClient, Requested)> {
        let now = Instant::now();
        let mut client = ThinClient::new(settings.clone(), place, stops, OwnStreams::restore(saved.client)?);
        client.relay = Relay::restore(settings, saved.relay, now);
        let wrong = || io::Error::other("the state has no greeting");
        let hello = Hello::read(saved.hello.bytes().trim_ascii_end()).ok_or_else(wrong)?;
        let (place, args) = (client.place.clone(), std::env::args_os().collect());
        client.joining = Some(Joining { place, hello, args });
        client.moved = saved.moved;
        client.next_generation = saved.next_generation;
        client.awaits_first = false;
        client.has_started = true;
        for hub in saved.hubs {
            let connection = Connection::restore(hub.connection, received)?;
            let restored = Hub { id: hub.id, connection, leaving: None, queued: hub.queued };
            client.hubs.insert(hub.generation, restored);
        }
        Ok((client, saved.requested))
    }

    /// Continues where the last program stopped.
    pub(crate) async fn go_on(self, header: &Header, requested: &Requested, received: Received) -> u8 {
        if let Err(error) = received.unblock_signals() {
            os::say(&format!("[outlast] WARNING: signals are still blocked: {error}"));
        }
        drop(received);
        let pause_ms = requested.pause().as_secs_f64() * 1e3;
        os::say(&format!(
            "[outlast] this client was upgraded from {} to {OWN_VERSION}; it paused for {pause_ms:.1} ms",
            header.outlast
        ));
        self.run().await
    }
}

fn say_failed(report: &Report) {
    let because = report.because.as_ref().map(|because| format!(": {because}")).unwrap_or_default();
    os::say(&format!("[outlast] {}{because}", report.sentence));
}
