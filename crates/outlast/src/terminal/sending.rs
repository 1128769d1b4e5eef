//! Drives what is sent to the agent: shows the machine what is on the screen, types what it says, and answers.

use std::time::{Duration, Instant};

use outlast_core::{
    send::{Action, Failed, Letter, Proof, Sent},
    waiting,
};
use serde_json::{Value, json};

use super::{Terminal, methods::no_screen, screen::Screen};
use crate::control::wire::Refusal;

/// How long a text waits for the composer if nobody says,
const PATIENCE: Duration = Duration::from_secs(30);
/// and at most.
const PATIENCE_MAX: Duration = Duration::from_secs(3600);

impl Terminal {
    pub(super) fn send(&mut self, ticket: u64, params: &Value) {
        let letter = match letter(params) {
            Ok(letter) => letter,
            Err(refusal) => return self.control.answer(ticket, &Err(refusal)),
        };
        if self.screen.is_none() {
            return self.control.answer(ticket, &Err(no_screen()));
        }
        let state = self.session.state();
        if matches!(state, "halted" | "exited" | "stopping") {
            let code = if state == "halted" { "halted" } else { "not_running" };
            let refusal = Refusal::new(code, format!("there is no agent to send to; the session is {state}"));
            return self.control.answer(ticket, &Err(refusal));
        }
        self.journal.event("send", &[("bytes", &letter.text.len()), ("submit", &letter.submit)]);
        let actions = self.sends.asked(ticket, letter, self.now);
        self.act_on_sends(actions);
        self.tend_sends();
    }

    /// Looks whether what is sent has come any further.
    pub(super) fn tend_sends(&mut self) -> bool {
        if !self.sends.is_busy() {
            return false;
        }
        self.catch_up();
        let Some(screen) = &self.screen else { return false };
        let is_ready = self.session.state() == "ready"
            && self.child.as_ref().is_some_and(|child| child.stdin.is_some() && !child.is_ending);
        let actions = self.sends.look(&screen.seen(), is_ready, Instant::now());
        let has_come_further = !actions.is_empty();
        self.act_on_sends(actions);
        has_come_further
    }

    /// An agent ended; perhaps for good.
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
        if let Some(child) = &mut self.child {
            child.typed.extend_from_slice(bytes);
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

fn letter(params: &Value) -> Result<Letter, Refusal> {
    let wrong = |words: &str| Refusal::new("bad_request", words);
    let text = params["text"].as_str().ok_or_else(|| wrong("`send` wants a `text`"))?;
    let submit = match &params["submit"] {
        Value::Null => true,
        submit => submit.as_bool().ok_or_else(|| wrong("`submit` is true or false"))?,
    };
    let patience = match &params["timeout_ms"] {
        Value::Null => PATIENCE,
        millis => Duration::from_millis(millis.as_u64().ok_or_else(|| wrong("`timeout_ms` is a whole number"))?),
    };
    let key = match &params["key"] {
        Value::Null => None,
        key => Some(key.as_str().ok_or_else(|| wrong("`key` is a text"))?.to_owned()),
    };
    Ok(Letter { text: text.to_owned(), submit, patience: patience.min(PATIENCE_MAX), key })
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
