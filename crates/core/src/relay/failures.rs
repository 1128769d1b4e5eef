//! The errors that outlast answers with when a server cannot (rows e1 to e7). Their wire format is in `messages`.

use std::time::Instant;

use super::{
    Relay,
    backlog::Full,
    messages::{Failure, Next, Outcome, Tool},
    requests::{Class, OpenRequest},
    servers::{Current, LastEnd},
};
use crate::{exit::How, slot::Until};

/// Why a request fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FailureKind {
    /// The server ended while the request was running (e1).
    ServerEnded,
    /// The same, after the request was sent again (e1).
    EndedAgain,
    /// The server did not come up in time (e2).
    ServerDown,
    /// No start is planned (e3).
    GaveUp,
    /// There is no room for it (e4).
    HoldFull,
    /// A replaced server did not finish it in time (e5).
    DrainOver,
    /// A replaced server was not to finish it (e5).
    AtOnce,
    /// Outlast is stopping (e6).
    Stopping,
    /// The server hung and was replaced (e7).
    ServerHung,
}

impl FailureKind {
    fn code(self) -> i32 {
        match self {
            FailureKind::ServerEnded | FailureKind::EndedAgain => 7001,
            FailureKind::ServerDown => 7002,
            FailureKind::GaveUp => 7003,
            FailureKind::HoldFull => 7004,
            FailureKind::DrainOver | FailureKind::AtOnce => 7005,
            FailureKind::Stopping => 7006,
            FailureKind::ServerHung => 7009,
        }
    }

    fn reason(self) -> &'static str {
        match self {
            FailureKind::ServerEnded => "server_ended",
            FailureKind::EndedAgain => "ended_again",
            FailureKind::ServerDown => "server_down",
            FailureKind::GaveUp => "gave_up",
            FailureKind::HoldFull => "hold_full",
            FailureKind::DrainOver => "drain_over",
            FailureKind::AtOnce => "at_once",
            FailureKind::Stopping => "stopping",
            FailureKind::ServerHung => "server_hung",
        }
    }

    fn outcome(self, open: &OpenRequest) -> Outcome {
        match self {
            FailureKind::ServerEnded | FailureKind::EndedAgain | FailureKind::ServerHung => Outcome::Unknown,
            FailureKind::DrainOver | FailureKind::AtOnce => Outcome::Unknown,
            FailureKind::HoldFull => Outcome::NotSent,
            FailureKind::ServerDown | FailureKind::GaveUp | FailureKind::Stopping if open.taken => Outcome::Unknown,
            FailureKind::ServerDown | FailureKind::GaveUp | FailureKind::Stopping => Outcome::NotSent,
        }
    }
}

/// A request that fails because of the end of a server.
pub(super) struct Loss<'a> {
    pub(super) kind: FailureKind,
    pub(super) open: &'a OpenRequest,
    pub(super) end: &'a LastEnd,
    /// Why the server counts as hung, if it does.
    pub(super) hung: Option<&'a str>,
}

impl Loss<'_> {
    /// A list or a read changes nothing, so there is no effect to check.
    fn has_effect(&self) -> bool {
        matches!(self.open.class, Class::Call { .. } | Class::Other)
    }

    /// A part of a sentence, for a request that can change something.
    fn effect(&self, text: &'static str) -> &'static str {
        if self.has_effect() { text } else { "" }
    }

    fn was_not_run(&self) -> String {
        let what = &self.open.what;
        match self.kind.outcome(self.open) {
            Outcome::NotSent => format!("`{what}` was not run"),
            Outcome::Unknown if self.has_effect() => format!("`{what}` may or may not have taken effect"),
            Outcome::Unknown => format!("`{what}` was not answered"),
        }
    }
}

impl Relay {
    fn next(&self, now: Instant) -> Next {
        match self.servers.slot.current() {
            Current::Serving(_) | Current::Fresh(_) => Next::Nothing,
            Current::Replaying(_) | Current::None => Next::Now,
            Current::Down { at } if self.wants_start() && *at > now => Next::In(*at - now),
            Current::Down { .. } => Next::Now,
            // It left on purpose, and outlast leaves with it.
            Current::GivenUp { crashes: None, until: Until::Asked } => Next::Nothing,
            Current::GivenUp { .. } => Next::Asked,
        }
    }

    /// The failure of a request that no server has, or that is refused.
    pub(super) fn failure(&self, kind: FailureKind, open: &OpenRequest, now: Instant) -> Failure {
        let is_queue = kind == FailureKind::HoldFull && self.full() == Full::Queued;
        let live = self.servers.slot.live().filter(|_| is_queue);
        let none = |generation, stderr| LastEnd { how: How::Stopped, generation, pid: 0, stderr };
        let end = match (live, self.servers.last_end()) {
            // The server that is meant runs, whatever happened to those before it.
            (Some(generation), _) => none(generation, self.servers.stderr(generation)),
            (None, Some(end)) => end.clone(),
            (None, None) => none(0, Vec::new()),
        };
        let mut failure = self.failure_of(&Loss { kind, open, end: &end, hung: None }, now);
        if live.is_some() {
            failure.how = None;
        }
        failure
    }

    pub(super) fn failure_of(&self, loss: &Loss<'_>, now: Instant) -> Failure {
        let Loss { kind, open, end, hung } = *loss;
        let next = self.next(now);
        let is_ended = end.generation > 0 && hung.is_none() || matches!(end.how, How::CouldNotStart(_));
        Failure {
            code: kind.code(),
            reason: kind.reason(),
            outcome: kind.outcome(open),
            message: self.failure_message(loss, next, now),
            generation: end.generation,
            how: is_ended.then(|| end.how.clone()),
            stderr: end.stderr.clone(),
            next: if kind == FailureKind::Stopping { Next::Asked } else { next },
            limit: (kind == FailureKind::HoldFull).then(|| self.full().limit()),
        }
    }

    fn failure_message(&self, loss: &Loss<'_>, next: Next, now: Instant) -> String {
        let (what, how, was_not_run) = (&loss.open.what, &loss.end.how, loss.was_not_run());
        let restart_tool = self.settings.tools.then(|| self.listed_name(Tool::Restart));
        let sentence = next.sentence(restart_tool.as_deref());
        let space = if sentence.is_empty() { "" } else { " " };
        match loss.kind {
            FailureKind::ServerEnded | FailureKind::EndedAgain if loss.has_effect() => format!(
                "The server ended ({how}) while `{what}` was running; it may or may not have taken effect: \
                 check before repeating it.{space}{sentence}"
            ),
            FailureKind::ServerEnded | FailureKind::EndedAgain => {
                format!("The server ended ({how}) before it answered `{what}`.{space}{sentence}")
            }
            FailureKind::ServerDown if self.servers.last_end().is_none() => {
                format!("{was_not_run}: the server is still starting. {sentence}")
            }
            FailureKind::ServerDown => format!("{was_not_run}: the server is down ({how}). {sentence}"),
            FailureKind::GaveUp => {
                let crashes = match self.servers.slot.current() {
                    Current::GivenUp { crashes: Some(crashes), .. } => format!("; {}", crashes.words("in")),
                    _ => String::new(),
                };
                format!("{was_not_run}: the server is not running ({how}{crashes}). {sentence}")
            }
            FailureKind::HoldFull => {
                let advice = match (self.full(), &restart_tool) {
                    (Full::Queued, Some(tool)) => format!(" Call `{tool}` to replace it."),
                    (Full::Queued, None) => " `outlast restart` replaces it.".to_owned(),
                    _ => String::new(),
                };
                format!("{was_not_run}: {}.{advice}{space}{sentence}", self.full_sentence())
            }
            FailureKind::ServerHung => {
                let why = loss.hung.unwrap_or("it did not answer");
                let effect = loss.effect("; it may or may not have taken effect: check before repeating it");
                format!("The server hung ({why}) and was replaced before it answered `{what}`{effect}.")
            }
            FailureKind::AtOnce => {
                let effect = loss.effect("; it may or may not have taken effect");
                format!("The server was restarted at once, as requested, with `{what}` unfinished{effect}.")
            }
            FailureKind::DrainOver => {
                let had = self.drained_for(loss.end.generation, now);
                let effect = loss.effect("; it may or may not have taken effect");
                format!(
                    "The server was reloaded and the old one stopped after {had} s with `{what}` unfinished{effect}."
                )
            }
            FailureKind::Stopping => format!("{was_not_run}: outlast is stopping."),
        }
    }

    /// How many seconds a child had to finish its calls: fewer than the limit, if later reloads pushed it out.
    fn drained_for(&self, generation: u32, now: Instant) -> String {
        let drain_max = self.settings.limits.draining.drain_max;
        let draining = self.servers.draining_of(generation);
        let had = draining.map_or(drain_max, |draining| drain_max.saturating_sub(draining.until - now));
        if had.as_secs() < 10 { format!("{:.1}", had.as_secs_f64()) } else { had.as_secs().to_string() }
    }
}
