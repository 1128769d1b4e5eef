//! What people do at a terminal: type, resize, detach, attach, suspend and stop.

use std::task::{Context, Poll};

use bytes::BytesMut;
use outlast_control::server::Taken;
use outlast_core::{
    keys,
    session::{Choice, Event, Mode},
    terminal::{self, Action, Role},
    waiting,
};
use outlast_os::{self as os, OuterEvent, Size};
use serde::{Deserialize, Serialize};

use super::{
    Terminal,
    paint::Extent,
    viewers::{OWNER, ViewerEvent},
};
use crate::child::Child;

/// Above this no viewer is read: the agent does not read its input.
const TYPED_HIGH: usize = 64 << 10;

const CTRL_C: u8 = 0x03;
const CTRL_D: u8 = 0x04;

/// A signal that may reach this process, its stand-in, or both. If it reaches both, it counts once.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Tally {
    ours: u32,
    passed: u32,
}

impl Tally {
    fn counts(&mut self, was_passed: bool) -> bool {
        let before = self.ours.max(self.passed);
        *if was_passed { &mut self.passed } else { &mut self.ours } += 1;
        self.ours.max(self.passed) > before
    }

    fn is_repeated(&self) -> bool {
        self.ours.max(self.passed) > 1
    }
}

impl Terminal {
    pub(super) fn poll_stops(&mut self, cx: &mut Context<'_>) -> bool {
        #[cfg(unix)]
        if self.stops.poll_upgrade(cx).is_ready() {
            self.ask_upgrade(None, None);
        }
        let Poll::Ready(stop) = self.stops.poll_next(cx) else { return false };
        self.journal.event("user_action", &[("action", &"signal"), ("signal", &stop.name)]);
        if stop.is_hangup() && self.plan.outlives_terminal {
            self.lose_owner();
        } else {
            self.stop_heard(false);
        }
        true
    }

    fn stop_heard(&mut self, was_passed: bool) {
        self.is_interrupted = true;
        if self.stops_heard.counts(was_passed) {
            self.tell(Event::StopAsked { force: self.stops_heard.is_repeated() });
        }
    }

    pub(super) fn poll_viewers(&mut self, cx: &mut Context<'_>) -> bool {
        // Freed buffer space wakes the loop.
        let listens = self.process().is_none_or(|process| process.queued() < TYPED_HIGH);
        let Poll::Ready((key, heard)) = self.viewers.poll(cx, listens) else { return false };
        match heard {
            ViewerEvent::Typed(keys) => self.typed(key, keys),
            ViewerEvent::Resized(size) => self.see(terminal::Event::Resized { key, size }),
            ViewerEvent::Blank => self.see(terminal::Event::PaintAsked { key }),
            ViewerEvent::Leaves => self.detach(),
            ViewerEvent::Lost if key == OWNER => {
                self.journal.event("user_action", &[("action", &"hangup")]);
                self.hung_up();
            }
            ViewerEvent::Lost => self.left(key),
            ViewerEvent::Refused => self.viewers.refuse(key, "read_only", "this terminal is attached read-only"),
            ViewerEvent::Outer(event) => self.heard_outer(event),
        }
        true
    }

    fn typed(&mut self, key: u64, keys: BytesMut) {
        if keys.is_empty() {
            return;
        }
        if keys::has_key(&keys) {
            self.see(terminal::Event::Typed { key });
            let enter = keys.contains(&b'\r') || keys.contains(&b'\n');
            self.watch(waiting::Event::Input { enter });
        }
        if self.reading_process().is_none() {
            return self.pressed(&keys);
        }
        self.typing.typed(&keys, self.now);
        if let Some(process) = self.reading_process() {
            process.put(keys.freeze(), None);
        }
    }

    // ---- attach and detach --------------------------------------------------------------------------------

    /// Tells the machine that knows the viewers, and carries out its actions.
    pub(super) fn see(&mut self, event: terminal::Event) {
        let had_person = self.viewers.has_person();
        for action in self.viewers.handle(event, self.now) {
            match action {
                Action::Resize(size) => self.resize(size),
                Action::Paint { key, with_history } => {
                    let size = self.viewers.size_of(key);
                    let terminal = self.viewers.terminal_of(key).map(str::to_owned);
                    let shown = self.screen().map(|screen| screen.line_hashes());
                    let skipped = match (&terminal, &shown) {
                        (Some(terminal), Some(shown)) if with_history => self.seen.already(terminal, &shown.history),
                        _ => 0,
                    };
                    let extent = if with_history { Extent::WithHistory { skipped } } else { Extent::Screen };
                    if let Some(screen) = self.screen() {
                        let picture = screen.paint(size, extent);
                        self.viewers.show(key, &picture);
                    }
                    if with_history && let (Some(terminal), Some(shown)) = (terminal, shown) {
                        self.seen.remember(terminal, shown);
                    }
                }
            }
        }
        match (had_person, self.viewers.has_person()) {
            (false, true) => self.tell(Event::TerminalFound),
            (true, false) => self.tell(Event::TerminalLost),
            _ => {}
        }
    }

    /// A client asked over the socket to see the terminal.
    pub(super) fn attach(&mut self, taken: Taken, role: Role, size: Size, terminal: Option<String>) {
        let key = self.viewers.attach(taken, size, terminal);
        let word = if role == Role::Watcher { "watch" } else { "attach" };
        let (columns, rows) = (size.columns, size.rows);
        self.journal.event(word, &[("viewer", &key), ("columns", &columns), ("rows", &rows)]);
        let on_alternate = self.screen().is_some_and(|screen| screen.modes().alternate);
        self.see(terminal::Event::Attached { key, role, size, on_alternate });
    }

    /// Notes which lines a terminal has in its own scrollback, so that they are not printed there again.
    fn remember_seen(&mut self, key: u64) {
        // A viewer that got pictures has only what was printed when it attached.
        let is_exact = self.viewers.is_exact(key);
        let Some(terminal) = self.viewers.terminal_of(key).filter(|_| is_exact).map(str::to_owned) else { return };
        if let Some(shown) = self.screen().map(|screen| screen.line_hashes()) {
            self.seen.remember(terminal, shown);
        }
    }

    fn left(&mut self, key: u64) {
        self.remember_seen(key);
        self.viewers.remove(key);
        self.journal.event("detach", &[("viewer", &key)]);
        self.see(terminal::Event::Left { key });
    }

    /// The person at outlast's own terminal detached from the session, which continues.
    fn detach(&mut self) {
        self.journal.event("user_action", &[("action", &"detach")]);
        let id = &self.plan.id;
        let back =
            if self.screen.is_some() { format!("`outlast attach {id}` attaches again, ") } else { String::new() };
        let words = format!("[outlast] detached; {back}`outlast stop {id}` stops it\r\n");
        self.leave(&words);
    }

    /// outlast's own terminal is gone, or its stand-in exited.
    fn hung_up(&mut self) {
        if self.plan.outlives_terminal {
            return self.lose_owner();
        }
        self.viewers.remove(OWNER);
        self.is_interrupted = true;
        self.see(terminal::Event::Left { key: OWNER });
        self.tell(Event::StopAsked { force: false });
    }

    fn lose_owner(&mut self) {
        if self.viewers.outer().is_some() {
            self.journal.event("user_action", &[("action", &"hangup"), ("goes_on", &true)]);
            self.leave("");
        }
    }

    fn leave(&mut self, words: &str) {
        // No other terminal answers what the agent asked this one.
        self.catch_up();
        self.remember_seen(OWNER);
        let Some(outer) = self.viewers.remove(OWNER) else { return };
        outer.note_alternate(self.alternate.is_on);
        // Below the agent's output, which stays there.
        let place = if self.alternate.is_on { "" } else { "\x1b[999;1H\r\n" };
        let words = if words.is_empty() { String::new() } else { format!("{place}{words}") };
        if let Err(error) = outer.leave(&words) {
            self.journal.note(&format!("the terminal could not be restored ({error})"));
        }
        self.see(terminal::Event::Left { key: OWNER });
    }

    // ---- outlast's own terminal ---------------------------------------------------------------------------

    fn heard_outer(&mut self, event: OuterEvent) {
        let Some(outer) = self.viewers.outer() else { return };
        match event {
            OuterEvent::Resized => {
                let size = outer.size();
                self.see(terminal::Event::Resized { key: OWNER, size });
            }
            OuterEvent::SuspendAsked => self.suspend(false),
            OuterEvent::SuspendPassed => self.suspend(true),
            OuterEvent::Continued => {
                if let Err(error) = outer.make_raw() {
                    self.journal.note(&format!("the terminal cannot be set to raw mode again ({error})"));
                }
                let size = outer.size();
                self.redraw();
                self.see(terminal::Event::Resized { key: OWNER, size });
            }
            OuterEvent::StopPassed => self.stop_heard(true),
            OuterEvent::HangupPassed if self.plan.outlives_terminal => self.lose_owner(),
            OuterEvent::HangupPassed => self.stop_heard(true),
            OuterEvent::Abandoned => {
                self.journal.event("user_action", &[("action", &"abandoned")]);
                self.hung_up();
            }
        }
    }

    fn suspend(&mut self, was_passed: bool) {
        if !self.suspends_heard.counts(was_passed) {
            return;
        }
        if let Some(outer) = self.viewers.outer() {
            outer.note_alternate(self.alternate.is_on);
            outer.suspend();
        }
    }

    /// The agent stopped itself, as at Ctrl-Z. outlast stops too, and both continue together. Without a shell that
    /// could continue them, or with other viewers, the agent is continued at once.
    pub(super) fn suspended(&mut self, key: u64) {
        let is_alone = self.viewers.count() == 1;
        if let Some(outer) = self.viewers.outer().filter(|outer| is_alone && outer.is_job()) {
            self.journal.event("user_action", &[("action", &"suspend")]);
            outer.note_alternate(self.alternate.is_on);
            outer.suspend();
        } else {
            self.redraw();
        }
        self.children.resume(key);
    }

    /// Another program wrote to our terminal: the screen is painted, if there is a model; otherwise a resize and back
    /// makes the agent draw anew.
    fn redraw(&mut self) {
        let size = self.viewers.size_of(OWNER);
        if let Some(screen) = self.screen() {
            let picture = screen.paint(size, Extent::Screen);
            // Without an owner nothing is sent.
            self.viewers.show(OWNER, &picture);
        }
        if let Some(window) = self.process().and_then(Child::window) {
            let size = self.viewers.size();
            let other = Size { rows: size.rows.saturating_sub(1).max(1), ..size };
            // An agent that has just exited needs no size.
            let _ = window.resize(other).and_then(|()| window.resize(size));
        }
    }

    fn resize(&mut self, size: Size) {
        if let Some(screen) = self.screen() {
            screen.resize(size);
        }
        self.journal.event("resize", &[("columns", &size.columns), ("rows", &size.rows)]);
        // Without an agent the next one gets it.
        if let Some(window) = self.process().and_then(Child::window)
            && let Err(error) = window.resize(size)
        {
            self.journal.note(&format!("the agent's terminal cannot be resized ({error})"));
        }
    }

    // ---- while no agent runs ------------------------------------------------------------------------------

    /// Keys that are typed while no agent runs.
    fn pressed(&mut self, keys: &[u8]) {
        if self.session.is_about_to_ask() {
            return self.tell(Event::KeyTyped);
        }
        if !self.session.is_asking() {
            if keys.contains(&CTRL_C) {
                self.journal.event("user_action", &[("action", &"quit")]);
                self.tell(Event::StopAsked { force: false });
            }
            return;
        }
        let choice = keys.iter().find_map(|key| match key {
            b'\r' | b'\n' => Some((Choice::Start(Mode::Continue), "restart")),
            b'f' | b'F' => Some((Choice::Start(Mode::Fresh), "fresh")),
            b'q' | b'Q' | &CTRL_C | &CTRL_D => Some((Choice::Quit, "quit")),
            _ => None,
        });
        if let Some((choice, action)) = choice {
            self.journal.event("user_action", &[("action", &action)]);
            self.tell(Event::Chosen(choice));
        }
    }

    /// Shows a line of outlast's own on every terminal, with the keys that work there. A stdout that is no terminal
    /// gets the agent's output only; there the line goes to stderr.
    pub(super) fn say(&mut self, words: &str, keys: &str) {
        self.add(format!("\r\n[outlast] {words}{keys}\r\n").as_bytes());
        if self.has_no_terminal {
            os::say(&format!("[outlast] {words}"));
        }
    }

    /// Tells the user who started outlast without a terminal how to see the agent.
    pub(super) fn say_without_terminal(&self) {
        if !self.has_no_terminal {
            return;
        }
        let (id, size) = (&self.plan.id, self.viewers.size());
        let shows = if self.screen.is_some() { format!("`outlast attach {id}` shows it, ") } else { String::new() };
        os::say(&format!(
            "[outlast] no terminal here: session {id} is detached ({} × {}); {shows}`outlast stop {id}` stops it",
            size.columns, size.rows
        ));
    }

    /// Turns off the terminal modes that an exited agent left on.
    pub(super) fn calm(&mut self) {
        let was_alternate = std::mem::take(&mut self.alternate).is_on;
        let calm = os::calm(was_alternate);
        self.add(&calm);
    }

    /// Adds bytes of outlast's own to the agent's output.
    fn add(&mut self, bytes: &[u8]) {
        self.fresh.extend_from_slice(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_both_processes_get_counts_once() {
        let table = [
            // sent to us (false) or to the stand-in (true)   counts       repeated
            (&[false][..], &[true][..], false),
            (&[true], &[true], false),
            (&[false, true], &[true, false], false),
            (&[true, false], &[true, false], false),
            (&[false, false], &[true, true], true),
            (&[false, true, true, false], &[true, false, true, false], true),
        ];
        for (told, expected, is_repeated) in table {
            let mut tally = Tally::default();
            let counts: Vec<bool> = told.iter().map(|passed| tally.counts(*passed)).collect();
            assert_eq!((&counts[..], tally.is_repeated()), (expected, is_repeated), "{told:?}");
        }
    }
}
