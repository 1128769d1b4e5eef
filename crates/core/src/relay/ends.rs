//! The end of a child, and what it means for everybody who waits for it.

use super::{backlog::Full, hang::SERVER_HUNG, *};
use crate::{
    count::count,
    exit::{Cause, Exit, RESTART_CODE, classify},
    restarts::{Verdict, Why},
};
use serde_json::json;

impl Relay {
    pub(super) fn server_went_down(&mut self, generation: u32, how: How, unsent: Vec<(u64, Bytes)>, now: Instant) {
        let Some(child) = self.children.remove(&generation) else { return };
        let stderr = child.stderr.to_vec();
        let drained = self.draining.iter().find(|draining| draining.generation == generation);
        let reason = drained.map(|draining| draining.reason.clone());
        self.draining.retain(|draining| draining.generation != generation);
        self.cancel_asked(generation);
        self.forget_hang(generation);

        let mut left = false;
        if self.current_generation() == Some(generation) {
            self.last_end =
                Some(LastEnd { how: how.clone(), generation, pid: child.pid, stderr: stderr.clone(), hung: None });
            left = self.current_ended(generation, &child, &how, now);
        } else {
            let event = if reason.is_some() { record::Event::ServerExiting } else { record::Event::ServerStopped };
            self.record(Record { reason, ..self.obituary(event, generation, &child, &how, now) });
            if self.candidate == Some(generation) {
                self.candidate = None;
                self.restart_failed_with(&how, &stderr, now);
            }
        }
        if let Some(restart) = &mut self.restart {
            restart.child_ended(generation, &how);
        }
        let end = LastEnd { how: how.clone(), generation, pid: child.pid, stderr, hung: child.hung };
        self.settle(end, unsent, now);
        if left {
            self.leave(now);
        }
        if self.start_after == Some(generation) {
            self.start_after = None;
            if !self.is_leaving() {
                self.start(Role::Current);
            }
        }
        self.note_end_before_ready(now);
        self.check_holds(now);
        self.begin_queued(now);
        self.end_if_alone(now);
    }

    fn obituary(&self, event: record::Event, generation: u32, child: &Child, how: &How, now: Instant) -> Record {
        Record {
            pid: Some(child.pid),
            generation: Some(generation.into()),
            uptime: Some(now.duration_since(child.started)),
            restarts: Some(self.replaced),
            ..Record::new(event).ended(how)
        }
    }

    /// The serving child ended, or the one that was meant to. True if it left on purpose and outlast leaves with it.
    fn current_ended(&mut self, generation: u32, child: &Child, how: &How, now: Instant) -> bool {
        let cause = classify(how, false, child.ready.is_some());
        if child.ready.is_none() {
            self.ends_before_ready += 1;
        }
        if self.is_leaving() {
            self.record(self.obituary(record::Event::ServerStopped, generation, child, how, now));
            self.current = Current::None;
            return false;
        }
        let verdict = self.restarts.child_ended(cause, how.clone(), now);
        let event = match cause {
            Cause::Asked | Cause::Clean => record::Event::ServerStopped,
            Cause::RestartRequested | Cause::Forgot => record::Event::ServerExiting,
            Cause::Crashed | Cause::NeverReady => record::Event::ServerCrashed,
        };
        let mut obituary = self.obituary(event, generation, child, how, now);
        obituary.crashes = Some(self.restarts.crashes(now));
        if let Verdict::StartAt { delay, .. } = verdict {
            obituary.delay = Some(delay);
        }
        self.record(obituary.clone());
        // A candidate on its way takes the place; the crash counts all the same.
        if let Some(candidate) = self.candidate.take() {
            self.current = Current::Replaying(candidate);
            self.restarts.replaced(now);
            self.replaced += 1;
            return false;
        }
        // An asked-for restart that was to bring this child up has failed.
        let stderr = child.stderr.to_vec();
        if self.restart.as_ref().is_some_and(|restart| restart.waits_for(generation)) {
            self.restart_failed_with(how, &stderr, now);
        }
        self.follow(verdict, obituary, now)
    }

    /// Carries out the policy's verdict on the end that was recorded. True if the child left on purpose and outlast
    /// leaves with it.
    fn follow(&mut self, verdict: Verdict, end: Record, now: Instant) -> bool {
        match verdict {
            Verdict::StartAt { at, why, .. } => {
                if why == Why::Throttled {
                    self.record(Record { event: record::Event::RestartThrottled, ..end });
                }
                self.current = Current::Down { at };
                if at <= now && self.wants_start() {
                    self.start(Role::Current);
                }
                false
            }
            Verdict::GiveUp { crashes, within } => {
                let within = within.map(|within| format!(" in {:.0} s", within.as_secs_f64())).unwrap_or_default();
                let words = format!("{}{within}", count(crashes, "crash", "crashes"));
                let detail = Some(words.clone());
                self.record(Record { event: record::Event::GaveUp, crashes: Some(crashes), detail, ..end });
                self.current = Current::GivenUp { crashes: Some(words), callable: false };
                false
            }
            Verdict::Left => {
                // Whoever asked for a restart wants a server.
                let callable = self.settings.on_clean_exit == OnCleanExit::Restart || self.restart_will_start();
                self.current = Current::GivenUp { crashes: None, callable };
                !callable
            }
        }
    }

    pub(super) fn start_failed(&mut self, why: String, now: Instant) {
        let role = self.starting.take();
        let how = How::CouldNotStart(why);
        if self.is_leaving() {
            return self.end_if_alone(now);
        }
        if role == Some(Role::Candidate) && matches!(self.current, Current::Serving(_)) {
            self.restart_failed_with(&how, &[], now);
            return;
        }
        let (generation, pid) = self.last_end.as_ref().map_or((0, 0), |end| (end.generation, end.pid));
        self.last_end = Some(LastEnd { how: how.clone(), generation, pid, stderr: Vec::new(), hung: None });
        self.ends_before_ready += 1;
        let verdict = self.restarts.child_ended(Cause::NeverReady, how.clone(), now);
        let crashes = self.restarts.crashes(now);
        let mut record = Record::new(record::Event::ServerCrashed).ended(&how);
        record.crashes = Some(crashes);
        if let Verdict::StartAt { delay, .. } = verdict {
            record.delay = Some(delay);
        }
        self.record(record.clone());
        if self.restart.as_ref().is_some_and(Restart::waits_for_start) {
            self.restart_failed_with(&how, &[], now);
        }
        self.follow(verdict, record, now);
        if !self.ever_ready {
            self.broken_at_start(now);
        }
        self.place_what_need_not_wait(now);
        self.recheck_holds(now);
        self.begin_queued(now);
    }

    /// Before the first child everything waits; now it is known that nobody serves.
    fn place_what_need_not_wait(&mut self, now: Instant) {
        let waiting: Vec<(u64, Bytes)> = self
            .held
            .iter()
            .filter(|(seq, _)| {
                self.opens.get(seq).is_some_and(|open| matches!(open.class, Class::Ping | Class::Listen))
            })
            .map(|(seq, held)| (*seq, held.line.clone()))
            .collect();
        for (seq, line) in waiting {
            let open = self.close(seq);
            self.place(open, line, now);
        }
    }

    /// Openings do not wait for a server that has shown it does not come up, nor anything for one that comes too late.
    fn check_holds(&mut self, now: Instant) {
        if self.is_leaving() {
            return;
        }
        let late = matches!(self.last_end, Some(LastEnd { how: How::HandshakeLate(_), .. }));
        let gave_up = matches!(self.current, Current::GivenUp { .. });
        if self.ends_before_ready >= 2 || late || gave_up {
            self.broken_at_start(now);
        }
        self.recheck_holds(now);
    }

    /// Whoever waits longer than it may until the next start is told so now.
    pub(super) fn recheck_holds(&mut self, now: Instant) {
        if matches!(self.current, Current::GivenUp { .. }) {
            let notes: Vec<u64> = self.held.iter().filter(|(_, held)| !held.is_request).map(|(seq, _)| *seq).collect();
            for held in notes.iter().filter_map(|seq| self.held.remove(seq)) {
                self.held_bytes -= held.line.len();
                self.dropped.from_client += 1;
            }
        }
        let seqs: Vec<u64> = self.held.iter().filter(|(_, held)| held.is_request).map(|(seq, _)| *seq).collect();
        for seq in seqs {
            let open = &self.opens[&seq];
            let limits = &self.settings.limits;
            let is_opening = self.is_first_opening(open);
            let over = match &self.current {
                Current::GivenUp { callable, .. } => !callable && !self.restart_will_start(),
                Current::Down { at } if self.wants_start() => {
                    let wait = if is_opening { limits.opening_wait } else { limits.hold_max };
                    *at > open.waiting_since.unwrap_or(now) + wait
                }
                _ => false,
            };
            if over {
                if is_opening {
                    self.broken = true;
                }
                let open = self.close(seq);
                self.answer_without_server(open, now);
            }
        }
    }

    /// Every request that was on the ended child finds its next place, in client order.
    fn settle(&mut self, end: LastEnd, unsent: Vec<(u64, Bytes)>, now: Instant) {
        let generation = end.generation;
        let mut unsent: BTreeMap<u64, Bytes> = unsent.into_iter().collect();
        let seqs = self.open_on(generation);
        let due = self.cause_of_restart(&seqs, &end.how, &unsent);
        if let Some((seq, line)) = &self.initialized
            && self.opening.is_none()
            && self.client == Client::Ready
            && self.live().is_none()
        {
            // The opening is not answered: both halves of it go to the next child.
            unsent.insert(*seq, line.clone());
        }
        let places: BTreeSet<u64> = seqs.into_iter().chain(unsent.keys().copied()).collect();
        for seq in places {
            let line = unsent.remove(&seq);
            match (self.opens.get_mut(&seq), &line) {
                (Some(open), _) if open.place == Place::On(generation) => {}
                (Some(open), Some(_)) => {
                    // It was asked again when this child was told to stop, which shows now not to have heard it.
                    open.resent = open.resent.saturating_sub(1);
                    open.taken = open.resent > 0;
                    continue;
                }
                (None, Some(line)) => {
                    self.untracked_again(seq, line, now);
                    continue;
                }
                (_, None) => continue,
            }
            self.opens.get_mut(&seq).expect("listed above").taken |= line.is_none();
            if self.opens[&seq].class == Class::Listen {
                self.listen_lost_child(seq);
                if self.live().is_none() && !self.is_leaving() {
                    self.acknowledge(seq);
                }
                continue;
            }
            if due == Some(seq) {
                self.make_due(seq, now);
                continue;
            }
            let mut open = self.close(seq);
            if open.cancelled {
                self.forget(&open);
            } else if self.is_leaving() {
                let failure = self.failure(7006, "stopping", &open, now);
                self.fail(&open, &failure);
            } else if open.class == Class::Ping {
                self.answer_result(&open, "{}");
            } else if let Some(line) = line {
                self.again(open, line, now);
            } else if self.may_repeat(&open)
                && open.resent < self.settings.limits.resend_max
                && let Some(kept) = open.kept.clone()
            {
                open.resent += 1;
                self.again(open, kept, now);
            } else if matches!(open.class, Class::Initialize | Class::Discover) {
                self.broken |= !self.ever_ready;
                self.answer_without_server(open, now);
            } else {
                let failure = match &end.hung {
                    Some(_) => self.failure_of(&end, SERVER_HUNG, "server_hung", &open, now),
                    None if open.resent > 0 => self.failure_of(&end, 7001, "ended_again", &open, now),
                    None => self.failure_of(&end, 7001, "server_ended", &open, now),
                };
                self.fail(&open, &failure);
            }
        }
    }

    /// What never reached the child and owes no answer is as if it came now.
    pub(super) fn untracked_again(&mut self, seq: u64, line: &Bytes, now: Instant) {
        match message::parse(line) {
            Ok(Message::Notification { method, params }) => {
                self.client_noted(&method, &params, line, Some(seq), now);
            }
            // One that could be kept track of is answered by now.
            Ok(Message::Request { id, .. }) if id.parse().is_none() => self.pass_or_hold(line, Some(seq), now),
            _ => {}
        }
    }

    /// An opening that no server has answered yet never fails: it waits, or is answered without a server.
    pub(super) fn is_first_opening(&self, open: &Open) -> bool {
        !self.ever_ready && matches!(open.class, Class::Initialize | Class::Discover)
    }

    /// A request that goes to whoever serves next, or already does.
    pub(super) fn again(&mut self, mut open: Box<Open>, line: Bytes, now: Instant) {
        open.waiting_since.get_or_insert(now);
        match self.current {
            Current::Fresh(_) | Current::Serving(_) => self.place(open, line, now),
            Current::GivenUp { callable, .. } => self.place_while_given_up(open, line, callable, now),
            _ => self.hold(open, line, now),
        }
    }

    // ---- exit 42 --------------------------------------------------------------------------------------

    /// The one call that made the server exit to be restarted, if it can be told.
    fn cause_of_restart(&self, seqs: &[u64], how: &How, unsent: &BTreeMap<u64, Bytes>) -> Option<u64> {
        if how.exit() != Some(&Exit::Code(RESTART_CODE)) || self.is_leaving() {
            return None;
        }
        let seqs: Vec<u64> = seqs.iter().copied().filter(|seq| !unsent.contains_key(seq)).collect();
        self.restart_call_among(&seqs)
    }

    pub(super) fn due_is_back(&mut self, seq: u64, generation: u32) {
        let open = self.close(seq);
        let pid = self.children.get(&generation).map_or(0, |child| child.pid);
        let words = format!("The server exited to restart, as asked, and is back (pid {pid}).");
        let schema = self
            .shown
            .get(&Kind::Tools)
            .and_then(|shown| shown.items.get(&open.what))
            .and_then(|raw| serde_json::from_str::<Value>(raw).ok())
            .map(|tool| tool["outputSchema"].clone())
            .filter(|schema| !schema.is_null());
        let modern = self.is_modern();
        let result = match schema {
            None => words::tool_result(&words, None, false, None, modern),
            Some(schema) if is_one_string(&schema) => {
                words::tool_result(&words, Some(&json!({"result": words})), false, None, modern)
            }
            // Only an error may lack what the schema promises.
            Some(_) => words::tool_result(&format!("restarted: {words}"), None, true, None, modern),
        };
        self.answer_result(&open, &result);
    }

    pub(super) fn due_waited_out(&mut self, seq: u64) {
        let open = self.close(seq);
        let how = self.last_end.as_ref().map_or_else(String::new, |end| format!(": {}", end.how));
        let words = format!("The server exited to restart, as asked, and is not back{how}.");
        let result = words::tool_result(&words, None, true, None, self.is_modern());
        self.answer_result(&open, &result);
    }

    // ---- failures ---------------------------------------------------------------------------------------

    fn next(&self, now: Instant) -> Next {
        match &self.current {
            Current::Serving(_) | Current::Fresh(_) => Next::Nothing,
            Current::Replaying(_) | Current::None => Next::Now,
            Current::Down { at } if self.wants_start() && *at > now => Next::In(*at - now),
            Current::Down { .. } => Next::Now,
            // It left on purpose, and outlast goes with it.
            Current::GivenUp { crashes: None, callable: false } => Next::Nothing,
            Current::GivenUp { .. } => Next::Asked,
        }
    }

    pub(super) fn failure(&self, code: i32, reason: &'static str, open: &Open, now: Instant) -> Failure {
        let live = self.live().filter(|_| code == 7004 && self.full() == Full::Queued);
        let none = |generation, stderr| LastEnd { how: How::Stopped, generation, pid: 0, stderr, hung: None };
        let end = match (live, &self.last_end) {
            // The server that is meant runs, whatever happened to those before it.
            (Some(generation), _) => none(generation, self.stderr_of(generation)),
            (None, Some(end)) => end.clone(),
            (None, None) => none(0, Vec::new()),
        };
        let mut failure = self.failure_of(&end, code, reason, open, now);
        if live.is_some() {
            failure.how = None;
        }
        failure
    }

    pub(super) fn failure_of(
        &self,
        end: &LastEnd,
        code: i32,
        reason: &'static str,
        open: &Open,
        now: Instant,
    ) -> Failure {
        let what = &open.what;
        let how = &end.how;
        let next = self.next(now);
        let restart_tool = self.settings.tools.then(|| self.listed_name(Tool::Restart));
        let sentence = next.sentence(restart_tool.as_deref());
        let outcome = match code {
            7001 | 7005 | SERVER_HUNG => Outcome::Unknown,
            7004 => Outcome::NotSent,
            _ if open.taken => Outcome::Unknown,
            _ => Outcome::NotSent,
        };
        // A list or a read changes nothing, so there is no effect to wonder about.
        let has_effect = matches!(open.class, Class::Call { .. } | Class::Other);
        let was_not_run = match outcome {
            Outcome::NotSent => format!("`{what}` was not run"),
            Outcome::Unknown if has_effect => format!("`{what}` may or may not have taken effect"),
            Outcome::Unknown => format!("`{what}` was not answered"),
        };
        let message = match code {
            7001 => {
                let space = if sentence.is_empty() { "" } else { " " };
                if has_effect {
                    format!(
                        "The server ended ({how}) while `{what}` was running; it may or may not have taken effect: \
                         check before repeating it.{space}{sentence}"
                    )
                } else {
                    format!("The server ended ({how}) before it answered `{what}`.{space}{sentence}")
                }
            }
            7002 if self.last_end.is_none() => {
                format!("{was_not_run}: the server has not finished its start yet. {sentence}")
            }
            7002 => format!("{was_not_run}: the server is down ({how}). {sentence}"),
            7003 => {
                let crashes = match &self.current {
                    Current::GivenUp { crashes: Some(crashes), .. } => format!("; {crashes}"),
                    _ => String::new(),
                };
                format!("{was_not_run}: the server is not running ({how}{crashes}). {sentence}")
            }
            7004 => {
                let space = if sentence.is_empty() { "" } else { " " };
                let advice = match (self.full(), &restart_tool) {
                    (Full::Queued, Some(tool)) => format!(" Call `{tool}` to replace it."),
                    (Full::Queued, None) => " `outlast restart` replaces it.".to_owned(),
                    _ => String::new(),
                };
                format!("{was_not_run}: {}.{advice}{space}{sentence}", self.full_in_words())
            }
            SERVER_HUNG => {
                let why = end.hung.as_deref().unwrap_or("it did not answer");
                let effect =
                    if has_effect { "; it may or may not have taken effect: check before repeating it" } else { "" };
                format!("The server hung ({why}) and was replaced before it answered `{what}`{effect}.")
            }
            7005 if reason == AT_ONCE => {
                let effect = if has_effect { "; it may or may not have taken effect" } else { "" };
                format!("The server was restarted at once, as asked, with `{what}` unfinished{effect}.")
            }
            7005 => {
                // Less than it may take, if later reloads pushed it out.
                let drain_max = self.settings.limits.drain_max;
                let until = self.draining.iter().find(|draining| draining.generation == end.generation);
                let had = until.map_or(drain_max, |draining| drain_max.saturating_sub(draining.until - now));
                let had =
                    if had.as_secs() < 10 { format!("{:.1}", had.as_secs_f64()) } else { had.as_secs().to_string() };
                let effect = if has_effect { "; it may or may not have taken effect" } else { "" };
                format!(
                    "The server was reloaded and the old one stopped after {had} s with `{what}` unfinished{effect}."
                )
            }
            _ => format!("{was_not_run}: outlast is stopping."),
        };
        Failure {
            code,
            reason,
            outcome,
            message,
            generation: end.generation,
            how: (end.generation > 0 && end.hung.is_none() || matches!(how, How::CouldNotStart(_)))
                .then(|| how.clone()),
            stderr: end.stderr.clone(),
            next: if code == 7006 { Next::Asked } else { next },
            limit: (code == 7004).then(|| self.full().limit()),
        }
    }

    // ---- the client's end ---------------------------------------------------------------------------------

    pub(super) fn client_ended(&mut self, farewell: Farewell, now: Instant) {
        self.unheard |= farewell == Farewell::Broken;
        self.leave(now);
        self.end_if_alone(now);
    }

    /// The client is gone, or the server left on purpose and outlast goes with it.
    fn leave(&mut self, now: Instant) {
        if self.is_leaving() {
            return;
        }
        self.save_memory();
        self.client = Client::Gone;
        let waiting: Vec<u64> =
            self.opens.values().filter(|open| !matches!(open.place, Place::On(_))).map(|open| open.seq).collect();
        for seq in waiting {
            let open = self.close(seq);
            if open.class == Class::Listen {
                self.end_listen(&open);
            } else {
                let failure = self.failure(7006, "stopping", &open, now);
                self.fail(&open, &failure);
            }
        }
        self.held.clear();
        self.held_bytes = 0;
        self.abandon_restart();
        if self.building {
            self.act(Action::StopBuild);
        }
        for generation in self.children.keys().copied().collect::<Vec<_>>() {
            self.stop(generation, How::Stopped);
        }
    }

    pub(super) fn end_if_alone(&mut self, now: Instant) {
        let alone = self.children.is_empty() && self.starting.is_none() && !self.building;
        if self.is_leaving() && alone && !self.ended {
            self.ended = true;
            for seq in self.opens.keys().copied().collect::<Vec<_>>() {
                let open = self.close(seq);
                if open.class == Class::Listen {
                    self.end_listen(&open);
                } else if !open.cancelled {
                    let failure = self.failure(7006, "stopping", &open, now);
                    self.fail(&open, &failure);
                }
            }
            self.act(Action::End(0));
        }
    }

    // ---- draining -----------------------------------------------------------------------------------------

    /// A replaced child finishes what it was asked, and goes.
    pub(super) fn drain(&mut self, generation: u32, now: Instant) {
        let limits = &self.settings.limits;
        let (until, draining_max) = (now + limits.drain_max, limits.draining_max);
        let reason = self.restart.as_ref().map_or_else(|| "replaced by a new server".into(), Restart::reason);
        let at_once = self.restart.as_ref().is_some_and(Restart::is_at_once);
        self.draining.push(Draining { generation, until, reason, at_once });
        if let Some(child) = self.children.get_mut(&generation) {
            child.fetches.clear();
        }
        self.forget_hang(generation);
        if self.hung(generation).is_some() {
            self.leave_hung(generation, now);
        }
        let finishing: Vec<u32> = self
            .draining
            .iter()
            .map(|draining| draining.generation)
            .filter(|generation| !self.is_stopping(*generation))
            .collect();
        if finishing.len() > draining_max {
            let unawaited = finishing.iter().find(|generation| !self.is_awaited(**generation));
            self.drain_over(*unawaited.unwrap_or(&finishing[0]), DRAIN_OVER, now);
        }
        self.drained(generation);
        // What it has not read goes to the server that replaces it. While there is none, only a child that has stopped
        // reading gives its queue back: one that reads may still answer.
        let replaced = matches!(self.current, Current::Serving(_));
        if !self.is_stopping(generation) && (replaced || at_once || self.is_stalled(generation)) {
            self.act(Action::TakeBack(generation));
        }
    }

    /// One more server may have to finish its calls without any other being cut short.
    pub(super) fn has_room_to_drain(&self) -> bool {
        let awaited = self.draining.iter().filter(|draining| self.is_awaited(draining.generation));
        awaited.count() < self.settings.limits.draining_max
    }

    /// The client waits for an answer of this child.
    fn is_awaited(&self, generation: u32) -> bool {
        let mut calls = self.opens.values().filter(|open| open.place == Place::On(generation));
        calls.any(|open| open.class != Class::Listen && !open.cancelled)
    }

    /// Stops a draining child that has nothing left to do.
    pub(super) fn drained(&mut self, generation: u32) {
        if !self.has_open_calls_on(generation) && !self.is_stopping(generation) {
            self.retire(generation);
        }
    }

    pub(super) fn drain_over(&mut self, generation: u32, reason: &'static str, now: Instant) {
        self.drain_over_but(generation, reason, BTreeMap::new(), now);
    }

    /// The same, but for lines that the child has not read: these go to the server that replaced it, in client order with
    /// what may be asked twice.
    pub(super) fn drain_over_but(
        &mut self,
        generation: u32,
        reason: &'static str,
        mut unsent: BTreeMap<u64, Bytes>,
        now: Instant,
    ) {
        let (how, stderr) = (How::Stopped, self.stderr_of(generation));
        let hung = self.hung(generation).map(str::to_owned);
        let end = LastEnd { how, generation, pid: 0, stderr, hung };
        let seqs: BTreeSet<u64> = self.open_on(generation).into_iter().chain(unsent.keys().copied()).collect();
        for seq in seqs {
            if let Some(line) = unsent.remove(&seq) {
                self.give_back(generation, seq, line, now);
                continue;
            }
            let mut open = self.close(seq);
            open.taken = true;
            if open.cancelled {
                self.forget(&open);
            } else if open.class == Class::Ping {
                self.answer_result(&open, "{}");
            } else if self.may_repeat(&open)
                && open.resent < self.settings.limits.resend_max
                && let Some(kept) = open.kept.clone()
                && (self.live().is_some() || self.has_room(&kept))
            {
                open.resent += 1;
                self.again(open, kept, now);
            } else {
                let failure = match &end.hung {
                    Some(_) => self.failure_of(&end, SERVER_HUNG, "server_hung", &open, now),
                    None => self.failure_of(&end, 7005, reason, &open, now),
                };
                self.fail(&open, &failure);
            }
        }
        self.retire(generation);
    }

    fn retire(&mut self, generation: u32) {
        self.cancel_asked(generation);
        let drained = self.draining.iter().find(|draining| draining.generation == generation);
        let reason = drained.map(|draining| draining.reason.clone());
        self.draining.retain(|draining| draining.generation != generation);
        if let Some(child) = self.children.get(&generation) {
            let record = Record::new(record::Event::ServerExiting);
            self.record(Record { pid: Some(child.pid), generation: Some(generation.into()), reason, ..record });
        }
        self.stop(generation, How::Stopped);
    }

    pub(super) fn stderr_of(&self, generation: u32) -> Vec<String> {
        self.children.get(&generation).map(|child| child.stderr.to_vec()).unwrap_or_default()
    }
}

/// Why a request fails that a replaced server has not finished (7005): its time was up, or the restart was not to wait.
pub(super) const DRAIN_OVER: &str = "drain_over";
pub(super) const AT_ONCE: &str = "at_once";

/// The schema of a tool that returns a string, as the Python SDKs write it.
fn is_one_string(schema: &Value) -> bool {
    let properties = schema["properties"].as_object();
    properties.is_some_and(|properties| {
        properties.len() == 1 && properties.get("result").is_some_and(|result| result["type"] == "string")
    })
}
