//! `outlast run` becomes another program: what is saved of the session, its terminal and its viewers, and how the next
//! program continues. The decisions are in core's `upgrade` and in the machines of the session.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::Path,
    task::Context,
    time::{Instant, SystemTime},
};

use outlast_control::SavedControl;
use outlast_core::{
    agent::{self, SavedPrompt},
    alternate_screen::{self, AlternateScreen},
    limit::{self, Limit},
    on_resume,
    saved::{Moment, Octets},
    seen_lines::{SeenLines, ShownLines},
    send, session,
    session::Mode,
    terminal::Event,
    typing::{self, Typing},
    upgrade::Action,
    waiting::{self, Waiting},
};
use outlast_os::{
    self as os,
    handover::{Handover, Received},
};
use serde::{Deserialize, Serialize};

use super::{
    Parts, Terminal,
    agent_hooks::AgentHooks,
    answers::Answers,
    bytes::Pipe,
    child::Running,
    people::Tally,
    plan::SavedStartContext,
    screen::{SavedScreen, Screen},
    viewers::{OWNER, SavedViewers, Viewers},
};
use crate::{
    child::SavedChildren,
    cli::report::{self, Report},
    upgrade::{
        OWN_VERSION,
        format::{self, Header, Kind},
        requests::{self, Requested},
    },
};

/// `outlast run` as saved state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Saved {
    /// The session.
    pub id: String,
    /// Where its log and its records are: the directory of the first agent.
    pub home: Octets,
    pub place: SavedStartContext,
    pub session: session::Saved,
    pub children: SavedChildren,
    pub control: SavedControl,
    /// The lock of its name.
    pub claim: Option<i32>,
    pub viewers: SavedViewers,
    pub rest: SavedRest,
}

/// What the driver itself knows, and what is restored from it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedRest {
    agent: agent::Saved,
    typing: typing::Saved,
    sends: send::Saved,
    waiting: waiting::Saved,
    limit: limit::Saved,
    on_resume: on_resume::Saved,
    answers: Answers,
    was_at_work: bool,
    recorded_turn: bool,
    next_notification: u64,
    settings_file: Option<Octets>,
    stops_heard: Tally,
    suspends_heard: Tally,
    seen: Vec<(String, ShownLines)>,
    /// What a stdout that is no terminal has not accepted yet; `None` if the agent's output does not go there.
    stdout: Option<Octets>,
    has_no_terminal: bool,
    fresh: Octets,
    screen: Option<SavedScreen>,
    alternate: alternate_screen::Saved,
    is_record_lost: bool,
    is_interrupted: bool,
    is_stopped_by_limit: bool,
    running: Option<SavedRunning>,
    learns_at: Option<Moment>,
    generation: u64,
    turn_waiters: BTreeSet<u64>,
    asked_at: BTreeMap<u64, Moment>,
    requested: Requested,
}

/// The running agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct SavedRunning {
    key: u64,
    mode: Mode,
    since: SystemTime,
    prompt: Option<SavedPrompt>,
    tail: Octets,
    has_reported: bool,
}

impl SavedRest {
    /// Restores what needs no descriptor, as a proof that it can be read.
    pub(crate) fn check(self) {
        let now = Instant::now();
        drop(self.screen.map(Screen::restore));
        drop(Waiting::restore(false, None, self.waiting, now));
        drop(Limit::restore(Default::default(), self.limit, now));
    }
}

impl Terminal {
    /// A request over the control socket, or SIGUSR2.
    pub(super) fn ask_upgrade(&mut self, ticket: Option<u64>, named: Option<String>) {
        let refusal = match requests::wanted_program(named, self.control.program()) {
            _ if !self.viewers.can_be_saved() => {
                Report::new(report::FAILURE, "the terminal of this session cannot be handed over to another program")
                    .hint("detach from it, and try again")
            }
            Err(report) => report,
            Ok(program) if self.upgrades.machine.requested(ticket, program.clone(), self.now) => return,
            Ok(_) => Report::new(report::FAILURE, "an upgrade to another program is under way"),
        };
        self.tell_upgrade_failed(ticket.into_iter().collect(), &refusal);
    }

    /// Continues with an upgrade that was requested. True if something has happened.
    pub(super) fn poll_upgrade(&mut self, cx: &mut Context<'_>) -> bool {
        if !self.upgrades.machine.is_wanted() {
            return false;
        }
        match self.upgrades.poll_checked(cx) {
            Some(Ok(())) => self.upgrades.machine.checked(),
            Some(Err(report)) => {
                let tickets = self.upgrades.machine.failed();
                self.tell_upgrade_failed(tickets, &report);
                return true;
            }
            None => {}
        }
        let busy = self.busy();
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
                    Some(saved) => self.upgrades.check(program, format::write(Kind::Session, &saved)),
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
    fn busy(&mut self) -> Option<String> {
        self.catch_up();
        if let Some(busy) = self.session.busy() {
            return Some(busy.to_string());
        }
        let why = if self.ending.is_some() {
            "the session is ending"
        } else if self.announce.is_some() || self.children.is_busy() {
            "a process is being started or stopped"
        } else if self.sends.is_busy() {
            "a text is being sent to the agent"
        } else if self.hooks.are_running() {
            "a notification is being sent"
        } else if self.screen.as_ref().is_some_and(Screen::is_in_long_sequence) {
            "the agent is writing a long escape sequence"
        } else if self.stdout.as_ref().is_some_and(Pipe::is_writing) {
            "output is being written to a file"
        } else {
            return None;
        };
        Some(why.to_owned())
    }

    /// `None` while [`Terminal::busy`].
    fn save(&mut self, children: SavedChildren, handover: &mut Handover, requested: Requested) -> Option<Saved> {
        self.catch_up();
        let now = self.now;
        let moment = |at: Instant| Moment::of(at, now);
        Some(Saved {
            id: self.plan.id.clone(),
            home: self.home.clone(),
            place: self.place.save(),
            session: self.session.save(now).ok()?,
            children,
            control: self.control.save(handover),
            claim: self.claim.as_ref().map(|claim| claim.keep(handover)),
            viewers: self.viewers.save(handover, now)?,
            rest: SavedRest {
                agent: self.agent.save(),
                typing: self.typing.save(now),
                sends: self.sends.save()?,
                waiting: self.waiting.save(now),
                limit: self.limit.save(now),
                on_resume: self.on_resume.save(),
                answers: self.answers.clone(),
                was_at_work: self.was_at_work,
                recorded_turn: self.recorded_turn,
                next_notification: self.hooks.next(),
                settings_file: self.agent_hooks.save(),
                stops_heard: self.stops_heard.clone(),
                suspends_heard: self.suspends_heard.clone(),
                seen: self.seen.save(),
                stdout: self.stdout.as_ref().map(Pipe::save),
                has_no_terminal: self.has_no_terminal,
                fresh: Octets::of(&self.fresh),
                screen: self.screen.as_mut().map(Screen::save),
                alternate: self.alternate.save(),
                is_record_lost: self.is_record_lost,
                is_interrupted: self.is_interrupted,
                is_stopped_by_limit: self.is_stopped_by_limit,
                running: self.running.as_ref().map(|running| SavedRunning {
                    key: running.key,
                    mode: running.mode,
                    since: running.since,
                    prompt: running.prompt.as_ref().map(agent::Prompt::save),
                    tail: Octets::of(&running.tail),
                    has_reported: running.has_reported,
                }),
                learns_at: self.learns_at.map(moment),
                generation: self.generation,
                turn_waiters: self.turn_waiters.clone(),
                asked_at: self.asked_at.iter().map(|(ticket, at)| (*ticket, moment(*at))).collect(),
                requested,
            },
        })
    }

    /// Does not return, unless it fails.
    fn become_next(&mut self, program: &Path, tickets: Vec<u64>) {
        let requested = Requested { tickets, paused: Some(SystemTime::now()) };
        let mut handover = Handover::default();
        let children = self.children.save(&mut handover);
        let Some(saved) = children.and_then(|children| self.save(children, &mut handover, requested)) else {
            // A message to or from a monitor is under way.
            self.upgrades.machine.paused(true);
            return self.children.unpause();
        };
        let report = match requests::save(&format::write(Kind::Session, &saved)) {
            Err(report) => report,
            Ok(file) => {
                // This gives stdout the flags back that it had before outlast.
                let stdout = self.stdout.take().map(|pipe| pipe.save());
                let report = self.upgrades.become_next(program, &file, &handover);
                // A stdout that cannot be used any more has no reader; the agent continues.
                self.stdout = stdout.and_then(|queue| Some(Pipe::restore(os::stdout().ok()?, queue)));
                report
            }
        };
        self.children.unpause();
        let tickets = self.upgrades.machine.failed();
        self.tell_upgrade_failed(tickets, &report);
    }

    fn tell_upgrade_failed(&mut self, tickets: Vec<u64>, report: &Report) {
        let record = requests::failure(report);
        self.journal.event("upgrade_failed", &[("why", &record.detail.as_deref().unwrap_or_default())]);
        self.record(record);
        let answer = Err(requests::refused(report));
        tickets.into_iter().for_each(|ticket| self.control.answer(ticket, &answer));
    }

    /// The session of the last program of this process. Its machine, viewers, children and control socket have been restored
    /// already. Must be called within the runtime.
    pub(crate) fn restore(parts: Parts, saved: SavedRest, viewers: Viewers) -> io::Result<(Terminal, Requested)> {
        let now = Instant::now();
        let mut terminal = Terminal::new(parts);
        let at = |moment: Moment| moment.at(now);
        terminal.viewers = viewers;
        terminal.agent.restore(saved.agent);
        terminal.typing = Typing::restore(terminal.agent.quit_words(), saved.typing, now);
        terminal.sends.go_on(saved.sends);
        let reads_screen = saved.screen.is_some() && terminal.agent.is_readable();
        terminal.waiting = Waiting::restore(reads_screen, terminal.plan.hang_timeout, saved.waiting, now);
        terminal.limit = Limit::restore(terminal.plan.on_limit, saved.limit, now);
        terminal.on_resume.go_on(saved.on_resume);
        terminal.answers = saved.answers;
        terminal.was_at_work = saved.was_at_work;
        terminal.recorded_turn = saved.recorded_turn;
        terminal.hooks.go_on(saved.next_notification);
        terminal.agent_hooks = AgentHooks::restore(saved.settings_file);
        terminal.stops_heard = saved.stops_heard;
        terminal.suspends_heard = saved.suspends_heard;
        terminal.seen = SeenLines::restore(saved.seen);
        terminal.stdout = match saved.stdout {
            Some(queue) => Some(Pipe::restore(os::stdout()?, queue)),
            None => None,
        };
        terminal.has_no_terminal = saved.has_no_terminal;
        terminal.fresh = saved.fresh.bytes().into();
        terminal.screen = saved.screen.map(Screen::restore);
        terminal.alternate = AlternateScreen::restore(saved.alternate);
        terminal.is_record_lost = saved.is_record_lost;
        terminal.is_interrupted = saved.is_interrupted;
        terminal.is_stopped_by_limit = saved.is_stopped_by_limit;
        terminal.running = saved.running.map(|running| Running {
            key: running.key,
            mode: running.mode,
            since: running.since,
            prompt: running.prompt.map(|prompt| terminal.agent.prompt_again(prompt)),
            tail: running.tail.bytes().to_vec(),
            has_reported: running.has_reported,
        });
        terminal.learns_at = saved.learns_at.map(at);
        terminal.generation = saved.generation;
        terminal.turn_waiters = saved.turn_waiters;
        terminal.asked_at = saved.asked_at.into_iter().map(|(ticket, moment)| (ticket, at(moment))).collect();
        Ok((terminal, saved.requested))
    }

    /// Continues where the last program stopped, and answers the requests for that.
    pub(crate) async fn go_on(
        mut self,
        header: &Header,
        requested: Requested,
        received: Received,
    ) -> Result<u8, Report> {
        if let Err(error) = received.unblock_signals() {
            self.journal.note(&format!("WARNING: signals are still blocked: {error}"));
        }
        drop(received);
        let pause = requested.pause();
        let pause_ms = format!("{:.1}", pause.as_secs_f64() * 1e3);
        self.journal.event("upgraded", &[("from", &header.outlast), ("to", &OWN_VERSION), ("pause_ms", &pause_ms)]);
        self.record(requests::record(header, pause));
        let answer = Ok(requests::upgraded(header, pause));
        requested.tickets.into_iter().for_each(|ticket| self.control.answer(ticket, &answer));
        // The window may have been resized meanwhile.
        let size = self.viewers.outer().map(os::Outer::size);
        if let Some(size) = size.filter(|size| *size != self.viewers.size_of(OWNER)) {
            self.see(Event::Resized { key: OWNER, size });
        }
        // To read the state takes more code than to continue.
        os::give_back_code();
        self.serve().await
    }
}
