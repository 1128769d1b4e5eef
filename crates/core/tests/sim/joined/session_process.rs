//! `outlast run` as a process: the session machine and its agent.

use std::time::Instant;

use outlast_core::{
    exit::{Exit, How},
    restarts::Policy,
    session::{Action, Choice, Event, LastInput, Mode, Session},
};

use super::{Shared, What};
use crate::kernel::{Child, Heard, Pid};

pub(crate) struct SessionProcess {
    pid: Pid,
    session: Session,
    agent: Option<Child>,
    mode: Mode,
    starts: u64,
    next_ticket: u64,
    tickets: Vec<u64>,
    is_stopped: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Move {
    News,
    Read,
    Write,
    Time,
    Choose,
    Term,
}

impl SessionProcess {
    pub(crate) fn new(pid: Pid, seed: u64, shared: &mut Shared) -> SessionProcess {
        let has_terminal = shared.kernel.dice.one_in(2);
        let session = Session::new(Policy::session(), seed, has_terminal);
        let (mode, tickets) = (Mode::Fresh, Vec::new());
        let mut process =
            SessionProcess { pid, session, agent: None, mode, starts: 0, next_ticket: 1, tickets, is_stopped: false };
        let actions = process.session.begin(mode);
        process.act(actions, shared);
        process
    }

    /// A person or an operator interferes.
    pub(crate) fn operate(&mut self, shared: &mut Shared) {
        let dice = &mut shared.kernel.dice;
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let mode = dice.pick(&[Mode::Fresh, Mode::Continue]);
        let event = match dice.below(5) {
            0 | 1 => {
                self.tickets.push(ticket);
                Event::RestartAsked { ticket, mode }
            }
            2 => {
                self.tickets.push(ticket);
                Event::ResumeAsked { ticket }
            }
            3 => Event::KeyTyped,
            _ => Event::Hung { silent_for: std::time::Duration::from_secs(60) },
        };
        self.tell(event, shared);
    }

    /// An operator waits for an answer. A halted session answers none of them until it is resumed or stopped.
    pub(crate) fn is_asked(&self) -> bool {
        !self.tickets.is_empty() && self.session.state() != "halted"
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.agent.as_ref().and_then(Child::deadline).into_iter().chain(self.session.deadline()).min()
    }

    pub(crate) fn moves(&self, shared: &Shared, moves: &mut Vec<Move>) {
        let kernel = &shared.kernel;
        if kernel.has_news(self.pid) {
            moves.push(Move::News);
        }
        if let Some(agent) = &self.agent {
            if agent.can_read(kernel, true) {
                moves.push(Move::Read);
            }
            if agent.can_flush(kernel) {
                moves.push(Move::Write);
            }
        }
        if self.deadline().is_some_and(|due| due <= kernel.now) {
            moves.push(Move::Time);
        }
        if self.session.is_asking() {
            moves.push(Move::Choose);
        }
        if kernel.get(self.pid).is_some_and(|process| process.is_terminated) {
            moves.push(Move::Term);
        }
    }

    pub(crate) fn turn(&mut self, which: Move, shared: &mut Shared) {
        let mut heard = Vec::new();
        match which {
            Move::News => {
                let Some((key, news)) = shared.kernel.next_news(self.pid) else { return };
                if let Some(agent) = self.agent.as_mut().filter(|_| key == self.starts) {
                    agent.news(news, &mut shared.kernel, &mut heard);
                }
            }
            Move::Read => self.agent.iter_mut().for_each(|agent| agent.read(&mut shared.kernel, &mut heard)),
            Move::Write => self.agent.iter_mut().for_each(|agent| agent.flush(&mut shared.kernel, &mut heard)),
            Move::Time => {
                let now = shared.kernel.now;
                self.agent.iter_mut().for_each(|agent| agent.time_passed(&mut shared.kernel, &mut heard));
                if self.session.deadline().is_some_and(|due| due <= now) {
                    self.tell(Event::TimePassed, shared);
                    let due = self.session.deadline();
                    assert!(due.is_none_or(|due| due > now), "session {} has a deadline that stays", self.pid);
                }
            }
            // The first signal stops with a grace period, the second at once.
            Move::Term => {
                shared.kernel.get_mut(self.pid).expect("it moves").is_terminated = false;
                let force = std::mem::replace(&mut self.is_stopped, true);
                self.tell(Event::StopAsked { force }, shared);
            }
            Move::Choose => {
                let choice = match shared.kernel.dice.one_in(3) {
                    true => Choice::Quit,
                    false => Choice::Start(Mode::Continue),
                };
                self.tell(Event::Chosen(choice), shared);
            }
        }
        self.hear(heard, shared);
    }

    fn hear(&mut self, heard: Vec<Heard>, shared: &mut Shared) {
        for heard in heard {
            match heard {
                Heard::Started => {
                    let pid = self.agent.as_ref().expect("it was started").pid;
                    self.tell(Event::Started { pid, mode: self.mode }, shared);
                }
                Heard::Said(_) => self.tell(Event::PromptShown, shared),
                Heard::Gone(gone) if gone.pid.is_none() => {
                    self.agent = None;
                    self.tell(Event::StartFailed { why: "no such program".into(), code: 127 }, shared);
                }
                Heard::Gone(gone) => {
                    self.tell(Event::Ended { how: gone.how, last_input: LastInput::Other }, shared);
                }
            }
        }
    }

    fn tell(&mut self, event: Event, shared: &mut Shared) {
        shared.kernel.tell(&format!("session {} >", self.pid), &event);
        let actions = self.session.handle(event, shared.kernel.now);
        self.act(actions, shared);
    }

    fn act(&mut self, actions: Vec<Action>, shared: &mut Shared) {
        for action in actions {
            shared.kernel.tell(&format!("session {}   <", self.pid), &action);
            let mut heard = Vec::new();
            match action {
                Action::Start(mode) => {
                    // A killed agent counts as gone when its exit takes too long.
                    let kernel = &shared.kernel;
                    let is_gone = |agent: &Child| !kernel.runs(agent.pid) || kernel.is_killed(agent.pid);
                    let is_alone = self.agent.as_ref().is_none_or(is_gone);
                    assert!(is_alone, "session {} has two agents", self.pid);
                    self.mode = mode;
                    self.starts += 1;
                    let pid = shared.start(What::Agent, self.pid, self.starts);
                    self.agent = Some(Child::new(&shared.kernel, pid));
                }
                Action::Stop => self.each(|agent| agent.stop(How::Stopped, &mut shared.kernel, &mut heard)),
                Action::StopHung(silent_for) => {
                    self.each(|agent| agent.stop(How::Hung(silent_for), &mut shared.kernel, &mut heard));
                }
                Action::Kill => self.each(|agent| agent.kill(&mut shared.kernel, &mut heard)),
                Action::Answer { ticket, .. } => {
                    let at = self.tickets.iter().position(|asked| *asked == ticket);
                    self.tickets.remove(at.unwrap_or_else(|| panic!("ticket {ticket} was answered twice")));
                }
                Action::End(code) => {
                    assert!(self.tickets.is_empty(), "session {} ends and {:?} wait", self.pid, self.tickets);
                    shared.kernel.exit(self.pid, Exit::Code(code.into()));
                }
                Action::Ask | Action::Note(_) => {}
            }
            self.hear(heard, shared);
        }
    }

    fn each(&mut self, act: impl FnMut(&mut Child)) {
        self.agent.iter_mut().for_each(act);
    }
}
