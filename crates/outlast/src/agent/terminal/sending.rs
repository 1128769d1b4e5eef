//! Drives `send`: shows the machine the screen, types what it decides, and answers the request.

use std::time::{Duration, Instant};

use bytes::Bytes;
use outlast_control::{method::Send, wire::Refusal};
use outlast_core::{
    limit,
    send::{Action, Failed, Letter, Proof, Sent},
    waiting,
};
use serde_json::{Value, json};

use super::{Terminal, methods::no_screen, screen::Screen};

/// How long a text waits for the composer by default,
const PATIENCE: Duration = Duration::from_secs(30);
/// and at most.
const PATIENCE_MAX: Duration = Duration::from_secs(3600);
/// How long a text of outlast itself waits.
const PATIENCE_OWN: Duration = Duration::from_secs(300);
/// Tickets of such texts; those of clients are small.
const OWN_TICKETS: u64 = 1 << 62;

/// A text that outlast sends by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Own {
    /// The agent's usage limit is over.
    AfterLimit,
    /// A crash interrupted a turn.
    AfterCrash,
}

impl Own {
    fn ticket(self) -> u64 {
        match self {
            Own::AfterLimit => OWN_TICKETS,
            Own::AfterCrash => OWN_TICKETS + 1,
        }
    }

    fn of(ticket: u64) -> Option<Own> {
        [Own::AfterLimit, Own::AfterCrash].into_iter().find(|own| own.ticket() == ticket)
    }
}

impl Terminal {
    pub(super) fn send(&mut self, ticket: u64, send: Send) {
        let letter = letter(send);
        if self.screen.is_none() {
            return self.control.answer(ticket, &Err(no_screen()));
        }
        let state = self.session.state();
        if matches!(state, "halted" | "exited" | "stopping") {
            let code = if state == "halted" { "halted" } else { "not_running" };
            let refusal = Refusal::new(code, format!("no agent is running; the session is {state}"));
            return self.control.answer(ticket, &Err(refusal));
        }
        self.journal.event("send", &[("bytes", &letter.text.len()), ("submit", &letter.submit)]);
        let actions = self.sends.asked(ticket, letter, self.now);
        self.act_on_sends(actions);
        self.tend_sends();
    }

    /// Sends a text of outlast itself; `own_sent` gets the result.
    pub(super) fn send_own(&mut self, own: Own, text: String) {
        self.journal.event("send", &[("bytes", &text.len()), ("submit", &true), ("by", &"outlast")]);
        let letter = Letter { text, submit: true, patience: PATIENCE_OWN, key: None };
        let actions = self.sends.asked(own.ticket(), letter, self.now);
        self.act_on_sends(actions);
        self.tend_sends();
    }

    /// Gives up a text of outlast itself that was not typed yet.
    pub(super) fn withdraw_own(&mut self, own: Own) {
        let actions = self.sends.withdraw(own.ticket());
        self.act_on_sends(actions);
    }

    fn own_sent(&mut self, own: Own, result: &Result<Sent, Failed>) {
        // Agents without records show only that the text has left their input field.
        let has_left = |sent: &Sent| sent.proof != Proof::Unproven { has_left: false };
        let is_submitted = result.as_ref().is_ok_and(has_left);
        match own {
            Own::AfterLimit => self.tell_limit(limit::Event::Continued { is_submitted }),
            Own::AfterCrash if is_submitted => self.notify("resumed_turn", json!({}), false),
            Own::AfterCrash if *result == Err(Failed::Withdrawn) => {}
            // The agent may have dropped it because it had just started.
            Own::AfterCrash
                if matches!(result, Err(failed) if failed.is_removed() == Some(true)) && self.on_resume.failed() =>
            {
                if self.waiting.is_waiting() {
                    self.go_on_after_crash();
                }
            }
            Own::AfterCrash => {
                let why = result.as_ref().err().map(ToString::to_string).unwrap_or_default();
                self.journal.note(&format!("the text of --on-resume could not be sent: {why}"));
                self.notify("resume_failed", json!({"why": why}), true);
            }
        }
    }

    /// Shows the screen to the machine while a text is being sent.
    pub(super) fn tend_sends(&mut self) -> bool {
        if !self.sends.is_busy() {
            return false;
        }
        self.catch_up();
        let Some(screen) = &self.screen else { return false };
        let is_ready = self.session.state() == "ready"
            && self.process().is_some_and(|process| process.has_stdin() && !process.has_exited());
        let actions = self.sends.look(&screen.seen(), is_ready, Instant::now());
        let has_come_further = !actions.is_empty();
        self.act_on_sends(actions);
        has_come_further
    }

    /// An agent exited; `is_over`: none is started again.
    pub(super) fn end_sends(&mut self, is_over: bool) {
        let actions = if is_over { self.sends.is_over() } else { self.sends.agent_ended() };
        self.act_on_sends(actions);
    }

    pub(super) fn act_on_sends(&mut self, actions: Vec<Action>) {
        let mut is_answered = false;
        for action in actions {
            match action {
                Action::Type(bytes) => self.type_keys(&bytes),
                Action::AwaitRecord => self.await_record(),
                Action::Remove(bytes) => {
                    self.catch_up();
                    self.screen_before = self.screen_before.take().or(self.screen.as_ref().map(Screen::text));
                    self.type_keys(&bytes);
                }
                Action::Answer { ticket, result } => {
                    let word = result.as_ref().map_or_else(Failed::code, |sent| sent.proof.word());
                    self.journal.event("send_ended", &[("result", &word)]);
                    if let Some(own) = Own::of(ticket) {
                        self.own_sent(own, &result);
                        continue;
                    }
                    self.catch_up();
                    let result = result.map(|sent| in_json(&sent)).map_err(|failed| self.refusal(&failed));
                    self.control.answer(ticket, &result);
                    is_answered = true;
                }
            }
        }
        if is_answered {
            self.screen_before = None;
        }
    }

    fn type_keys(&mut self, bytes: &[u8]) {
        if let Some(process) = self.reading_process() {
            process.put(Bytes::copy_from_slice(bytes), None);
        }
        self.typing.interrupted();
        self.watch(waiting::Event::Input { enter: bytes.contains(&b'\r') });
    }

    /// With the screen as it was when the text failed.
    fn refusal(&mut self, failed: &Failed) -> Refusal {
        let before = self.screen_before.as_ref().filter(|_| failed.is_removed().is_some()).cloned();
        let screen = before.or_else(|| self.screen.as_ref().map(Screen::text));
        Refusal {
            data: json!({"screen": screen, "removed": failed.is_removed()}),
            ..Refusal::new(failed.code(), failed.to_string())
        }
    }
}

fn letter(send: Send) -> Letter {
    let patience = send.timeout_ms.map_or(PATIENCE, Duration::from_millis).min(PATIENCE_MAX);
    Letter { text: send.text, submit: send.submit.unwrap_or(true), patience, key: send.key }
}

fn in_json(sent: &Sent) -> Value {
    let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let source = match sent.proof {
        Proof::Recorded(source) => Some(source.word()),
        Proof::Typed | Proof::Unproven { .. } => None,
    };
    let has_left = sent.is_submitted() || sent.proof == Proof::Unproven { has_left: true };
    json!({
        "result": sent.proof.word(),
        "submitted": sent.is_submitted(),
        "proof": {"seen_in_composer": true, "left_composer": has_left, "recorded_by": source},
        "presses": sent.presses,
        "as_paste": sent.as_paste,
        "repeated": sent.is_repeated,
        "waited_ms": millis(sent.waited),
        "took_ms": millis(sent.took),
    })
}
