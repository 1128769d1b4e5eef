//! Hung servers (SPEC H1, rows y1 to y9): when a server counts as hung, and what becomes of the requests it holds. A slow
//! server is not replaced: silence alone proves nothing, only a private ping that stays unanswered does.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{
    Relay,
    endpoint::Private,
    events::Origin,
    messages::{Failure, Next, Outcome},
    requests::{Class, OpenRequest, Waits},
    restart::Ticket,
    saved::{SavedHang, SavedSuspicion},
};
use crate::{
    message::{Id, cancelled_line, quote},
    patience::Patience,
    record,
    record::Record,
    saved::Moment,
};

/// How many cancelled calls one suspicion keeps apart.
const CALLS_MAX: usize = 16;
/// How many calls that timed out are known by their progress tokens. The oldest is forgotten, and its late progress passes.
const LATE_TOKENS_MAX: usize = 64;

/// What is known of the serving child's silence.
#[derive(Debug, Default)]
pub(super) struct Hang {
    suspicion: Option<Suspicion>,
    quiet: Option<Quiet>,
    timeouts: Timeouts,
}

/// A private ping is out, and its answer decides.
#[derive(Debug)]
struct Suspicion {
    generation: u32,
    about: PingCause,
    ping: Patience,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum PingCause {
    /// Calls that were cancelled: an answer to each of them clears the server as well as the ping's. `what` is the first.
    Cancelled { calls: Vec<Id>, what: String },
    /// A request that needs no work was not answered.
    Quiet { what: String },
}

/// A request that needs no work was sent to this child. The timer is not moved by each answer: when it fires, it looks at
/// what is open.
#[derive(Debug)]
struct Quiet {
    generation: u32,
    wait: Patience,
}

/// The calls with a time limit, by number.
#[derive(Debug, Default)]
struct Timeouts {
    calls: BTreeMap<u64, Patience>,
    /// No later than the first deadline. Progress and answers do not move it, so it may be too early.
    next: Option<Instant>,
    /// The progress tokens of calls that timed out on this child. The client has its answers to them.
    late_tokens: VecDeque<(u32, Id)>,
}

impl Hang {
    pub(super) fn save(&self, now: Instant) -> SavedHang {
        SavedHang {
            suspicion: self.suspicion.as_ref().map(|suspicion| SavedSuspicion {
                generation: suspicion.generation,
                about: suspicion.about.clone(),
                ping: suspicion.ping.save(now),
            }),
            quiet: self.quiet.as_ref().map(|quiet| (quiet.generation, quiet.wait.save(now))),
            timeouts: self.timeouts.calls.iter().map(|(seq, limit)| (*seq, limit.save(now))).collect(),
            next_timeout: self.timeouts.next.map(|at| Moment::of(at, now)),
            late_tokens: self.timeouts.late_tokens.clone(),
        }
    }

    pub(super) fn restore(saved: SavedHang, now: Instant) -> Hang {
        let patience = |wait| Patience::restore(wait, now);
        Hang {
            suspicion: saved.suspicion.map(|suspicion| Suspicion {
                generation: suspicion.generation,
                about: suspicion.about,
                ping: patience(suspicion.ping),
            }),
            quiet: saved.quiet.map(|(generation, wait)| Quiet { generation, wait: patience(wait) }),
            timeouts: Timeouts {
                calls: saved.timeouts.into_iter().map(|(seq, limit)| (seq, patience(limit))).collect(),
                next: saved.next_timeout.map(|at| at.at(now)),
                late_tokens: saved.late_tokens,
            },
        }
    }

    pub(super) fn ping_deadline(&self) -> Option<Instant> {
        self.suspicion.as_ref().map(|suspicion| suspicion.ping.deadline())
    }

    pub(super) fn quiet_deadline(&self) -> Option<Instant> {
        self.quiet.as_ref().map(|quiet| quiet.wait.deadline())
    }

    pub(super) fn timeouts_deadline(&self) -> Option<Instant> {
        self.timeouts.next
    }

    fn watches(&self, generation: u32) -> bool {
        self.suspicion.as_ref().is_some_and(|suspicion| suspicion.generation == generation)
    }
}

impl Relay {
    // ---- what leads to a suspicion --------------------------------------------------------------------

    /// A call on the serving child was cancelled, by the client or by its time limit.
    pub(super) fn suspect_after_cancel(&mut self, generation: u32, id: Id, what: &str, now: Instant) {
        match &mut self.hang.suspicion {
            Some(Suspicion { generation: suspected, about: PingCause::Cancelled { calls, .. }, .. })
                if *suspected == generation =>
            {
                if calls.len() < CALLS_MAX {
                    calls.push(id);
                }
            }
            _ => {
                let about = PingCause::Cancelled { calls: vec![id], what: what.to_owned() };
                self.suspect(generation, about, now);
            }
        }
    }

    fn suspect(&mut self, generation: u32, about: PingCause, now: Instant) {
        // A hung server is asked again if its replacement failed.
        let is_known = self.hung(generation).is_some() && self.reloads.is_wanted();
        let is_over = self.servers.is_stopping(generation) || self.is_leaving();
        if self.servers.slot.serving() != Some(generation) || is_known || is_over {
            return;
        }
        self.ping(generation, Private::HangPing);
        let ping = Patience::new(self.settings.limits.hang.ping_max, now);
        self.hang.suspicion = Some(Suspicion { generation, about, ping });
    }

    /// A request that needs no work goes to a child: from now on its silence is looked at.
    pub(super) fn quiet_begins(&mut self, generation: u32, now: Instant) {
        let is_watched = self.hang.quiet.as_ref().is_some_and(|quiet| quiet.generation == generation);
        if self.servers.slot.serving() == Some(generation) && !is_watched {
            let wait = Patience::new(self.settings.limits.hang.quiet_max, now);
            self.hang.quiet = Some(Quiet { generation, wait });
        }
    }

    /// The timer of such a request fired: it is disarmed, set anew, or the server is suspected.
    pub(super) fn quiet_is_due(&mut self, now: Instant) {
        let Some(quiet) = &mut self.hang.quiet else { return };
        if !quiet.wait.is_over(now) {
            return;
        }
        let generation = quiet.generation;
        let limits = &self.settings.limits;
        let (quiet_max, ping_max) = (limits.hang.quiet_max, limits.hang.ping_max);
        let Some(child) = self.servers.get(generation).filter(|_| self.servers.slot.serving() == Some(generation))
        else {
            self.hang.quiet = None;
            return;
        };
        let mut oldest: Option<(Instant, String)> = None;
        let mut is_busy = false;
        for open in self.requests.iter().filter(|open| open.is_on(generation) && !open.cancelled) {
            match open.class {
                Class::Listen => {}
                _ if open.class.needs_no_work() => {
                    let asked = open.asked.unwrap_or(now);
                    if oldest.as_ref().is_none_or(|(since, _)| asked < *since) {
                        oldest = Some((asked, open.what.clone()));
                    }
                }
                _ => is_busy = true,
            }
        }
        let follows =
            |private: &Private| matches!(private, Private::Restore(_) | Private::Fetch(_) | Private::LateFetch);
        if child.private.values().any(follows) {
            let since = child.ready.unwrap_or(now);
            if oldest.as_ref().is_none_or(|(asked, _)| since < *asked) {
                oldest = Some((since, "the requests that follow its handshake".to_owned()));
            }
        }
        let Some((asked, what)) = oldest else {
            self.hang.quiet = None;
            return;
        };
        let since = child.answered.map_or(asked, |answered| answered.max(asked));
        if is_busy || since + quiet_max > now {
            // While a call runs, its end is not known beforehand.
            let again = if is_busy { ping_max } else { since + quiet_max - now };
            self.hang.quiet = Some(Quiet { generation, wait: Patience::new(again, now) });
            return;
        }
        self.hang.quiet = None;
        if !self.hang.watches(generation) {
            self.suspect(generation, PingCause::Quiet { what }, now);
        }
    }

    // ---- what clears it -------------------------------------------------------------------------------

    pub(super) fn is_suspected(&self) -> bool {
        self.hang.suspicion.is_some()
    }

    /// The child answered some request. Called only while there is a suspicion.
    pub(super) fn suspect_answered(&mut self, generation: u32, id: &Id, now: Instant) {
        let length = self.settings.limits.hang.ping_max;
        let Some(suspicion) = self.hang.suspicion.as_mut().filter(|suspicion| suspicion.generation == generation)
        else {
            return;
        };
        let is_clear = match &mut suspicion.about {
            PingCause::Cancelled { calls, .. } => {
                let before = calls.len();
                calls.retain(|call| call != id);
                if calls.len() < before {
                    // The others were cancelled later.
                    suspicion.ping = Patience::new(length, now);
                }
                calls.is_empty()
            }
            PingCause::Quiet { .. } => true,
        };
        if is_clear {
            self.suspicion_ends(generation, now);
        }
    }

    /// It answered the ping.
    pub(super) fn suspicion_ends(&mut self, generation: u32, now: Instant) {
        if self.hang.watches(generation) {
            self.hang.suspicion = None;
            let waits = |open: &OpenRequest| open.is_on(generation) && open.class.needs_no_work();
            if self.requests.iter().any(waits) {
                self.quiet_begins(generation, now);
            }
        }
    }

    /// This child serves no longer.
    pub(super) fn forget_hang(&mut self, generation: u32) {
        if self.hang.watches(generation) {
            self.hang.suspicion = None;
        }
        if self.hang.quiet.as_ref().is_some_and(|quiet| quiet.generation == generation) {
            self.hang.quiet = None;
        }
        self.hang.timeouts.late_tokens.retain(|(child, _)| *child != generation);
    }

    // ---- time -----------------------------------------------------------------------------------------

    pub(super) fn ping_is_due(&mut self, now: Instant) {
        if let Some(suspicion) = &mut self.hang.suspicion
            && suspicion.ping.is_over(now)
            && let Some(suspicion) = self.hang.suspicion.take()
        {
            self.is_hung(suspicion, now);
        }
    }

    /// The ping is unanswered: the server is replaced.
    fn is_hung(&mut self, suspicion: Suspicion, now: Instant) {
        let Suspicion { generation, about, ping } = suspicion;
        if self.servers.slot.serving() != Some(generation) || self.is_leaving() {
            return;
        }
        if self.servers.is_stopping(generation) {
            return;
        }
        let pid = self.servers.pid(generation);
        let Some(child) = self.servers.get_mut(generation) else { return };
        let seconds = ping.length().as_secs_f64();
        let why = match about {
            PingCause::Cancelled { what, .. } => {
                format!("`{what}` was cancelled, and neither it nor a ping was answered within {seconds} s")
            }
            PingCause::Quiet { what } => {
                let quiet = self.settings.limits.hang.quiet_max.as_secs_f64();
                format!("{what} was not answered for {quiet} s, nor a ping within {seconds} s")
            }
        };
        child.hung = Some(why.clone());
        let record = Record::new(record::Event::ServerHung);
        self.record(Record { pid, generation: Some(generation.into()), detail: Some(why), ..record });
        if !self.is_being_replaced(generation) {
            self.restart_asked(Ticket::Outside(0), Origin::Hang, "the server hung".into(), false, now);
        }
    }

    // ---- the requests of a hung server ----------------------------------------------------------------

    /// A hung child was replaced: what may be asked twice goes to the new server now, and cancelled requests are forgotten, so
    /// that they do not keep the old one.
    pub(super) fn leave_hung(&mut self, generation: u32, now: Instant) {
        for seq in self.requests.on(generation) {
            let open = &self.requests[seq];
            if open.class != Class::Listen && self.rescue(open, true).is_some() {
                let mut open = self.close(seq);
                open.taken = true;
                self.salvage(open, true, now);
            }
        }
    }

    /// Why a child counts as hung, if it does.
    pub(super) fn hung(&self, generation: u32) -> Option<&str> {
        self.servers.get(generation)?.hung.as_deref()
    }

    // ---- time limits of calls -------------------------------------------------------------------------

    /// A call was sent to a child.
    pub(super) fn call_timeout_begins(&mut self, seq: u64, now: Instant) {
        let Some(open) = self.requests.get(seq) else { return };
        let of_tool = self.settings.call_timeouts.get(&open.what).copied();
        let limit = of_tool.or(self.settings.call_timeout).filter(|limit| !limit.is_zero());
        if let Some(limit) = limit {
            self.hang.timeouts.calls.insert(seq, Patience::new(limit, now));
            let next = self.hang.timeouts.next.map_or(now + limit, |next| next.min(now + limit));
            self.hang.timeouts.next = Some(next);
        }
    }

    /// Whether this token is of a call on this child that timed out.
    pub(super) fn timed_out_with_token(&self, generation: u32, token: &Id) -> bool {
        self.hang.timeouts.late_tokens.iter().any(|(child, late)| *child == generation && late == token)
    }

    /// Its server reported progress.
    pub(super) fn call_progresses(&mut self, seq: u64, now: Instant) {
        if let Some(patience) = self.hang.timeouts.calls.get_mut(&seq) {
            *patience = Patience::new(patience.length(), now);
        }
    }

    pub(super) fn call_timeout_ends(&mut self, seq: u64) {
        if !self.hang.timeouts.calls.is_empty() {
            self.hang.timeouts.calls.remove(&seq);
        }
    }

    pub(super) fn calls_time_out(&mut self, now: Instant) {
        if self.hang.timeouts.next.is_none_or(|next| next > now) {
            return;
        }
        let mut late = Vec::new();
        for (seq, patience) in &mut self.hang.timeouts.calls {
            if patience.is_over(now) {
                late.push((*seq, patience.length()));
            }
        }
        for (seq, limit) in late {
            self.call_times_out(seq, limit, now);
        }
        self.hang.timeouts.next = self.hang.timeouts.calls.values().map(Patience::deadline).min();
    }

    fn call_times_out(&mut self, seq: u64, limit: Duration, now: Instant) {
        self.call_timeout_ends(seq);
        let Some(open) = self.requests.get(seq).filter(|open| !open.cancelled) else { return };
        let Waits::OnServer(generation) = open.waits else { return };
        let mut open = self.close(seq);
        open.taken = true;
        let id = open.id().clone();
        let reason = quote(&format!("no answer within {} s", limit.as_secs_f64()));
        self.tell_server(generation, cancelled_line(&id, Some(&reason)), None);
        if let Some(token) = open.token() {
            let tokens = &mut self.hang.timeouts.late_tokens;
            tokens.push_back((generation, token.clone()));
            tokens.drain(..tokens.len().saturating_sub(LATE_TOKENS_MAX));
        }
        let failure = self.call_timed_out(generation, &open, limit);
        self.fail(&open, &failure);
        self.suspect_after_cancel(generation, id, &open.what, now);
        if self.servers.drains(generation) {
            self.drained(generation);
        }
    }

    fn call_timed_out(&self, generation: u32, open: &OpenRequest, limit: Duration) -> Failure {
        let what = &open.what;
        Failure {
            code: CALL_TIMEOUT,
            reason: "call_timeout",
            outcome: Outcome::Unknown,
            message: format!(
                "`{what}` was not answered within {} s and was cancelled; it may or may not have taken effect: check \
                 before repeating it.",
                limit.as_secs_f64()
            ),
            generation,
            how: None,
            stderr: self.servers.stderr(generation),
            next: Next::Nothing,
            limit: None,
        }
    }

    // ---- for people and programs ----------------------------------------------------------------------

    /// Whether the serving child looks hung: a ping is unanswered, it is known to hang, it does not read, or it has said
    /// nothing for a while though requests wait for it.
    pub(super) fn is_stalling(&self, now: Instant) -> bool {
        let Some(generation) = self.servers.slot.live() else { return false };
        let Some(child) = self.servers.get(generation) else { return false };
        let quiet_max = self.settings.limits.hang.quiet_max;
        let heard = child.heard.unwrap_or(child.started);
        let is_silent = now.saturating_duration_since(heard) >= quiet_max;
        let waits = || {
            let is_long = |asked: Instant| now - asked >= quiet_max;
            self.requests.awaited().any(|(on, asked)| on == generation && asked.is_some_and(is_long))
        };
        self.hang.watches(generation) || child.hung.is_some() || self.is_stalled(generation) || (is_silent && waits())
    }

    /// How long the oldest request has waited that a child holds.
    pub(super) fn oldest_request(&self, now: Instant) -> Option<Duration> {
        self.requests.awaited().filter_map(|(_, asked)| Some(now.saturating_duration_since(asked?))).max()
    }
}

/// A call took longer than `--call-timeout`.
pub(super) const CALL_TIMEOUT: i32 = 7016;
