//! Hung servers (SPEC H1, rows y1 to y9): when a server counts as hung, and what becomes of the requests it holds. A slow
//! server is not replaced: silence alone proves nothing, only a private ping that stays unanswered does.

use super::{
    BTreeMap, Class, Current, Duration, Failure, Id, Instant, Next, Open, Origin, Outcome, Place, Private, Record,
    Relay, Ticket, record,
};
use crate::{
    message::{line, quote},
    patience::Patience,
};

/// How many cancelled calls one suspicion keeps apart.
const CALLS_MAX: usize = 16;

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
    about: About,
    ping: Patience,
}

#[derive(Debug)]
enum About {
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
}

impl Hang {
    fn watches(&self, generation: u32) -> bool {
        self.suspicion.as_ref().is_some_and(|suspicion| suspicion.generation == generation)
    }
}

impl Relay {
    // ---- what leads to a suspicion --------------------------------------------------------------------

    /// A call on the serving child was cancelled, by the client or by its time limit.
    pub(super) fn suspect_after_cancel(&mut self, generation: u32, id: Id, what: &str, now: Instant) {
        match &mut self.hang.suspicion {
            Some(Suspicion { generation: suspected, about: About::Cancelled { calls, .. }, .. })
                if *suspected == generation =>
            {
                if calls.len() < CALLS_MAX {
                    calls.push(id);
                }
            }
            _ => {
                let about = About::Cancelled { calls: vec![id], what: what.to_owned() };
                self.suspect(generation, about, now);
            }
        }
    }

    fn suspect(&mut self, generation: u32, about: About, now: Instant) {
        // One that is known to hang is asked again if its replacement failed.
        let is_known = self.hung(generation).is_some() && (self.restart.is_some() || self.queued.is_some());
        let is_over = self.is_stopping(generation) || self.is_leaving();
        if self.current != Current::Serving(generation) || is_known || is_over {
            return;
        }
        self.ping(generation, Private::HangPing);
        let ping = Patience::new(self.settings.limits.ping_max, now);
        self.hang.suspicion = Some(Suspicion { generation, about, ping });
    }

    /// A request that needs no work goes to a child: from now on its silence is looked at.
    pub(super) fn quiet_begins(&mut self, generation: u32, now: Instant) {
        let is_watched = self.hang.quiet.as_ref().is_some_and(|quiet| quiet.generation == generation);
        if self.current == Current::Serving(generation) && !is_watched {
            let wait = Patience::new(self.settings.limits.quiet_max, now);
            self.hang.quiet = Some(Quiet { generation, wait });
        }
    }

    /// The timer of such a request fired: it is disarmed, set anew, or the server is suspected.
    fn quiet_is_due(&mut self, generation: u32, now: Instant) {
        let limits = &self.settings.limits;
        let (quiet_max, ping_max) = (limits.quiet_max, limits.ping_max);
        let Some(child) = self.children.get(&generation).filter(|_| self.current == Current::Serving(generation))
        else {
            self.hang.quiet = None;
            return;
        };
        let mut oldest: Option<(Instant, String)> = None;
        let mut is_busy = false;
        for open in self.opens.values().filter(|open| open.place == Place::On(generation) && !open.cancelled) {
            match open.class {
                Class::Listen => {}
                _ if needs_no_work(&open.class) => {
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
            self.suspect(generation, About::Quiet { what }, now);
        }
    }

    // ---- what clears it -------------------------------------------------------------------------------

    pub(super) fn is_suspected(&self) -> bool {
        self.hang.suspicion.is_some()
    }

    /// The child answered some request. Called only while there is a suspicion.
    pub(super) fn suspect_answered(&mut self, generation: u32, id: &Id, now: Instant) {
        let length = self.settings.limits.ping_max;
        let Some(suspicion) = self.hang.suspicion.as_mut().filter(|suspicion| suspicion.generation == generation)
        else {
            return;
        };
        let is_clear = match &mut suspicion.about {
            About::Cancelled { calls, .. } => {
                let before = calls.len();
                calls.retain(|call| call != id);
                if calls.len() < before {
                    // The others were cancelled later.
                    suspicion.ping = Patience::new(length, now);
                }
                calls.is_empty()
            }
            About::Quiet { .. } => true,
        };
        if is_clear {
            self.suspicion_ends(generation, now);
        }
    }

    /// It answered the ping.
    pub(super) fn suspicion_ends(&mut self, generation: u32, now: Instant) {
        if self.hang.watches(generation) {
            self.hang.suspicion = None;
            let waits = |open: &Open| open.place == Place::On(generation) && needs_no_work(&open.class);
            if self.opens.values().any(|open| waits(open)) {
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
    }

    // ---- time -----------------------------------------------------------------------------------------

    pub(super) fn hang_deadline(&self) -> Option<Instant> {
        let suspicion = self.hang.suspicion.as_ref().map(|suspicion| suspicion.ping.deadline());
        let quiet = self.hang.quiet.as_ref().map(|quiet| quiet.wait.deadline());
        [suspicion, quiet, self.hang.timeouts.next].into_iter().flatten().min()
    }

    pub(super) fn hang_time_passed(&mut self, now: Instant) {
        self.calls_time_out(now);
        if let Some(quiet) = &mut self.hang.quiet
            && quiet.wait.is_over(now)
        {
            let generation = quiet.generation;
            self.quiet_is_due(generation, now);
        }
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
        if self.current != Current::Serving(generation) || self.is_leaving() {
            return;
        }
        let Some(child) = self.children.get_mut(&generation).filter(|child| !child.stopping) else { return };
        let seconds = ping.length().as_secs_f64();
        let why = match about {
            About::Cancelled { what, .. } => {
                format!("`{what}` was cancelled, and neither it nor a ping was answered within {seconds} s")
            }
            About::Quiet { what } => {
                let quiet = self.settings.limits.quiet_max.as_secs_f64();
                format!("{what} was not answered for {quiet} s, nor a ping within {seconds} s")
            }
        };
        child.hung = Some(why.clone());
        let pid = Some(child.pid);
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
        for seq in self.open_on(generation) {
            let open = &self.opens[&seq];
            let may_move = self.may_repeat(open)
                && open.resent < self.settings.limits.resend_max
                && open.kept.as_ref().is_some_and(|kept| self.live().is_some() || self.has_room(kept));
            if open.class == Class::Listen || !(open.cancelled || open.class == Class::Ping || may_move) {
                continue;
            }
            let mut open = self.close(seq);
            open.taken = true;
            if open.cancelled {
                self.forget(&open);
            } else if open.class == Class::Ping {
                self.answer_result(&open, "{}");
            } else if let Some(kept) = open.kept.clone() {
                open.resent += 1;
                self.again(open, kept, now);
            }
        }
    }

    /// Why a child counts as hung, if it does.
    pub(super) fn hung(&self, generation: u32) -> Option<&str> {
        self.children.get(&generation)?.hung.as_deref()
    }

    // ---- time limits of calls -------------------------------------------------------------------------

    /// A call was sent to a child.
    pub(super) fn call_timeout_begins(&mut self, seq: u64, now: Instant) {
        let Some(open) = self.opens.get(&seq) else { return };
        let of_tool = self.settings.call_timeouts.get(&open.what).copied();
        let limit = of_tool.or(self.settings.call_timeout).filter(|limit| !limit.is_zero());
        if let Some(limit) = limit {
            self.hang.timeouts.calls.insert(seq, Patience::new(limit, now));
            let next = self.hang.timeouts.next.map_or(now + limit, |next| next.min(now + limit));
            self.hang.timeouts.next = Some(next);
        }
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

    fn calls_time_out(&mut self, now: Instant) {
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
        let Some(open) = self.opens.get(&seq).filter(|open| !open.cancelled) else { return };
        let Place::On(generation) = open.place else { return };
        let mut open = self.close(seq);
        open.taken = true;
        let id = open.id.clone();
        let reason = quote(&format!("no answer within {} s", limit.as_secs_f64()));
        self.tell_server(
            generation,
            line(format!(
                r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id},"reason":{reason}}}}}"#
            )),
            None,
        );
        let failure = self.call_timed_out(generation, &open, limit);
        self.fail(&open, &failure);
        self.suspect_after_cancel(generation, id, &open.what, now);
        if self.draining.iter().any(|draining| draining.generation == generation) {
            self.drained(generation);
        }
        self.begin_queued(now);
    }

    fn call_timed_out(&self, generation: u32, open: &Open, limit: Duration) -> Failure {
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
            stderr: self.stderr_of(generation),
            next: Next::Nothing,
            limit: None,
        }
    }

    // ---- for people and programs ----------------------------------------------------------------------

    /// Whether the serving child looks hung: a ping is unanswered, it is known to hang, it does not read, or it has said
    /// nothing for a while though requests wait for it.
    pub(super) fn is_stalling(&self, now: Instant) -> bool {
        let Some(generation) = self.live() else { return false };
        let Some(child) = self.children.get(&generation) else { return false };
        let quiet_max = self.settings.limits.quiet_max;
        let heard = child.heard.unwrap_or(child.started);
        let is_silent = now.saturating_duration_since(heard) >= quiet_max;
        let waits = || self.awaited().any(|(on, asked)| on == generation && now - asked >= quiet_max);
        self.hang.watches(generation) || child.hung.is_some() || self.is_stalled(generation) || (is_silent && waits())
    }

    /// How long the oldest request has waited that a child holds.
    pub(super) fn oldest_request(&self, now: Instant) -> Option<Duration> {
        self.awaited().map(|(_, asked)| now.saturating_duration_since(asked)).max()
    }

    /// Requests that the client waits for and a child holds: the child, and since when.
    fn awaited(&self) -> impl Iterator<Item = (u32, Instant)> {
        self.opens.values().filter_map(|open| match open.place {
            Place::On(generation) if open.class != Class::Listen && !open.cancelled => Some((generation, open.asked?)),
            _ => None,
        })
    }
}

/// A call took longer than `--call-timeout`.
pub(super) const CALL_TIMEOUT: i32 = 7016;
/// The server hung and was replaced before the request was answered.
pub(super) const SERVER_HUNG: i32 = 7009;

/// Requests that a server answers without work: it can be expected to do so whatever its tools do.
pub(super) fn needs_no_work(class: &Class) -> bool {
    matches!(class, Class::List(_) | Class::Page(..) | Class::Ping | Class::SetLevel | Class::Discover)
}
