//! A restart that was asked for: marker, build, a child beside the old one, takeover, comparison, answer. Restarts after a
//! crash are decided in [`crate::slot`].

use std::time::Instant;

use serde_json::{Value, json};

use super::{
    Relay,
    events::{Action, NotWritten, Origin, Reading},
    failures::FailureKind,
    lists::Diff,
    messages,
    messages::Tool,
    saved::{SavedLastReload, SavedMarker, SavedReloads},
    servers::{Current, Purpose},
    settings::Reload,
    status::{LastReloadStatus, RestartStatus},
};
use crate::{
    count::count,
    exit::{Exit, How},
    mcp::List,
    reason::{REASON_MAX, one_line},
    record,
    record::Record,
    saved::Moment,
};

/// The request that waits for a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ticket {
    /// A call of our tool, by its number.
    Call(u64),
    /// A program or a person, through the driver.
    Outside(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Marking,
    Building,
    /// The old child finishes and stops first.
    Clearing,
    Starting,
    Handshake(u32),
    Comparing(u32),
}

#[derive(Debug)]
struct Restart {
    tickets: Vec<Ticket>,
    reasons: Vec<String>,
    since: Instant,
    step: Step,
    old: Option<(u32, u32)>,
    /// As in the marker: the old server's, or the last one's.
    pid: u32,
    /// Why the marker could not be written.
    marker_error: Option<String>,
    ended: Option<How>,
    diff: Option<Diff>,
    /// The calls of the old server are not waited for.
    at_once: bool,
}

/// A restart that is over.
#[derive(Debug)]
struct LastReload {
    reason: String,
    at: Instant,
    /// Why it failed, and the stderr of the new server or the output of the build.
    failure: Option<(String, Vec<String>)>,
    marker_error: Option<String>,
}

/// A marker that is not in its file: all that it would say, and why.
#[derive(Debug)]
pub(super) struct UnwrittenMarker {
    pub(super) timestamp: f64,
    pub(super) pid: u32,
    pub(super) reason: String,
    pub(super) iso_time: String,
    pub(super) why: String,
}

impl UnwrittenMarker {
    /// As if it had been read from its file.
    pub(super) fn reading(&self) -> Reading {
        Reading::Valid {
            timestamp: self.timestamp,
            pid: self.pid,
            reason: self.reason.clone(),
            iso_time: self.iso_time.clone(),
        }
    }
}

#[derive(Debug)]
struct Queued {
    tickets: Vec<Ticket>,
    reasons: Vec<String>,
    /// A person, an agent or outlast asked, and not only a changed file.
    urgent: bool,
    /// The calls of the old server are not waited for.
    at_once: bool,
    origin: Origin,
    /// When the first of them asked.
    since: Instant,
}

/// How the reason of a restart begins that failed before any new server was there.
const BUILD_FAILED: &str = "the build failed";

/// The restarts that were asked for: one runs, one more may wait.
#[derive(Debug, Default)]
pub(super) struct Reloads {
    running: Option<Restart>,
    queued: Option<Queued>,
    last: Option<LastReload>,
    /// The newest restart marker, if it could not be written: what it would say is reported from here.
    unwritten_marker: Option<UnwrittenMarker>,
    is_building: bool,
}

impl Reloads {
    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// One runs or waits.
    pub(super) fn is_wanted(&self) -> bool {
        self.running.is_some() || self.queued.is_some()
    }

    pub(super) fn is_building(&self) -> bool {
        self.is_building
    }

    /// It will ask for a child itself, so nothing else does.
    pub(super) fn will_start(&self) -> bool {
        self.running.as_ref().is_some_and(Restart::will_start)
    }

    pub(super) fn waits_for(&self, generation: u32) -> bool {
        self.running.as_ref().is_some_and(|restart| restart.waits_for(generation))
    }

    pub(super) fn waits_for_start(&self) -> bool {
        self.running.as_ref().is_some_and(Restart::waits_for_start)
    }

    /// The running restart does not wait for calls of the old server.
    pub(super) fn is_at_once(&self) -> bool {
        self.running.as_ref().is_some_and(|restart| restart.at_once)
    }

    /// Of the running restart.
    pub(super) fn reason(&self) -> Option<String> {
        self.running.as_ref().map(Restart::reason)
    }

    pub(super) fn child_ended(&mut self, generation: u32, how: &How) {
        if let Some(restart) = &mut self.running
            && restart.old.is_some_and(|(old, _)| old == generation)
        {
            restart.ended = Some(how.clone());
        }
    }

    /// The result of the last restart, for users who did not request it.
    pub(super) fn last_status(&self, now: Instant) -> Option<LastReloadStatus> {
        let last = self.last.as_ref()?;
        Some(LastReloadStatus {
            reason: last.reason.clone(),
            ago: now.saturating_duration_since(last.at),
            marker_error: last.marker_error.clone(),
            failure: last.failure.clone(),
        })
    }

    /// The one that runs.
    pub(super) fn status(&self, now: Instant) -> Option<RestartStatus> {
        let restart = self.running.as_ref()?;
        let (reason, step) = (restart.reason(), restart.step_in_words());
        Some(RestartStatus { reason, running: now.duration_since(restart.since), step })
    }

    pub(super) fn unwritten_marker(&self) -> Option<&UnwrittenMarker> {
        self.unwritten_marker.as_ref()
    }
}

impl Restart {
    /// It will ask for a child itself, so nothing else does.
    pub(super) fn will_start(&self) -> bool {
        matches!(self.step, Step::Marking | Step::Building | Step::Clearing | Step::Starting)
    }

    pub(super) fn waits_for(&self, generation: u32) -> bool {
        matches!(self.step, Step::Handshake(n) | Step::Comparing(n) if n == generation)
    }

    pub(super) fn waits_for_start(&self) -> bool {
        matches!(self.step, Step::Starting | Step::Clearing)
    }

    pub(super) fn reason(&self) -> String {
        one_line(&self.reasons.join("; "))
    }

    pub(super) fn step_in_words(&self) -> &'static str {
        match self.step {
            Step::Marking => "writing the restart marker",
            Step::Building => "the build is running",
            Step::Clearing => "the old server is finishing its calls",
            Step::Starting | Step::Handshake(_) => "the new server has not finished its handshake",
            Step::Comparing(_) => "the new server's tools are being compared",
        }
    }
}

impl Reloads {
    /// A restart is wanted or running: the relay cannot be saved.
    pub(super) fn is_busy(&self) -> bool {
        self.running.is_some() || self.queued.is_some() || self.is_building
    }

    /// What is known of earlier restarts.
    pub(super) fn save(&self, now: Instant) -> SavedReloads {
        SavedReloads {
            last: self.last.as_ref().map(|last| SavedLastReload {
                reason: last.reason.clone(),
                at: Moment::of(last.at, now),
                failure: last.failure.clone(),
                marker_error: last.marker_error.clone(),
            }),
            unwritten_marker: self.unwritten_marker.as_ref().map(|marker| SavedMarker {
                timestamp: marker.timestamp,
                pid: marker.pid,
                reason: marker.reason.clone(),
                iso_time: marker.iso_time.clone(),
                why: marker.why.clone(),
            }),
        }
    }

    pub(super) fn restore(saved: SavedReloads, now: Instant) -> Reloads {
        Reloads {
            last: saved.last.map(|last| LastReload {
                reason: last.reason,
                at: last.at.at(now),
                failure: last.failure,
                marker_error: last.marker_error,
            }),
            unwritten_marker: saved.unwritten_marker.map(|marker| UnwrittenMarker {
                timestamp: marker.timestamp,
                pid: marker.pid,
                reason: marker.reason,
                iso_time: marker.iso_time,
                why: marker.why,
            }),
            ..Reloads::default()
        }
    }
}

impl Relay {
    pub(super) fn restart_asked(
        &mut self,
        ticket: Ticket,
        origin: Origin,
        reason: String,
        at_once: bool,
        now: Instant,
    ) {
        if self.is_leaving() {
            return self.refuse_ticket(ticket, "outlast is stopping", &[], None);
        }
        let queued = self.reloads.queued.get_or_insert_with(|| Queued {
            tickets: Vec::new(),
            reasons: Vec::new(),
            urgent: false,
            at_once: false,
            origin,
            since: now,
        });
        queued.at_once |= at_once;
        queued.tickets.push(ticket);
        let reason = one_line(&reason);
        // More would be cut when they are joined.
        let has_room = queued.reasons.iter().map(String::len).sum::<usize>() < REASON_MAX;
        if has_room && !queued.reasons.contains(&reason) {
            queued.reasons.push(reason);
        }
        queued.urgent |= origin != Origin::Watch;
        if origin.is_request() {
            self.unmute_files();
        }
        if at_once {
            self.end_drains(now);
        }
    }

    /// A restart runs that brings up another child in place of this one.
    pub(super) fn is_being_replaced(&self, generation: u32) -> bool {
        let old = self.reloads.running.as_ref().and_then(|restart| restart.old);
        old.is_some_and(|(old, _)| old == generation)
    }

    /// A restart is not to wait for calls: servers that were replaced earlier stop now, and the one that a running restart
    /// replaces stops when the new one is ready.
    pub(super) fn end_drains(&mut self, now: Instant) {
        if let Some(restart) = &mut self.reloads.running {
            restart.at_once = true;
        }
        let finishing: Vec<u32> = self.servers.finishing().map(|(generation, _)| generation).collect();
        for generation in finishing {
            self.drain_over(generation, FailureKind::AtOnce, now);
        }
    }

    /// Restarts in a row wait for calls to finish, so that these do not fail, but only until then.
    pub(super) fn waits_for_room(&self) -> Option<Instant> {
        let queued = self.reloads.queued.as_ref()?;
        let crowded = self.servers.slot.serving().is_some() && !self.has_room_to_drain();
        (crowded && self.reloads.running.is_none()).then(|| queued.since + self.settings.limits.draining.room_wait)
    }

    /// Begins what waits, once nothing else runs.
    pub(super) fn begin_queued(&mut self, now: Instant) {
        if self.reloads.queued.is_none() {
            return;
        }
        if self.reloads.running.is_some()
            || self.is_leaving()
            || self.servers.is_starting()
            || self.servers.waits_for_end()
        {
            return;
        }
        let Some(queued) = &self.reloads.queued else { return };
        // A changed file does not disturb a handshake; a request for a restart does.
        let in_handshake = match *self.servers.slot.current() {
            Current::Fresh(n) => self.is_being_opened(n),
            Current::Replaying(_) => true,
            _ => false,
        };
        if in_handshake && !queued.urgent {
            return;
        }
        if self.waits_for_room().is_some_and(|until| until > now) {
            return;
        }
        let queued = self.reloads.queued.take().expect("looked at above");
        let old = self.servers.slot.child().and_then(|n| Some((n, self.servers.pid(n)?)));
        // If no child serves, the restart replaces the last one that did.
        let pid = old.map(|(_, pid)| pid).or(self.servers.last_end().map(|end| end.pid)).unwrap_or_default();
        let restart = Restart {
            tickets: queued.tickets,
            reasons: queued.reasons,
            since: now,
            step: Step::Marking,
            old,
            pid,
            marker_error: None,
            ended: None,
            diff: None,
            at_once: queued.at_once,
        };
        let reason = restart.reason();
        let record = Record::new(record::Event::ServerRestartRequested);
        self.record(Record {
            reason: Some(reason.clone()),
            pid: (pid > 0).then_some(pid),
            generation: old.map(|(n, _)| n.into()),
            detail: Some(queued.origin.as_str().into()),
            ..record
        });
        self.reloads.running = Some(restart);
        self.act(Action::WriteMarker { pid, reason });
    }

    pub(super) fn marker_written(&mut self, result: Result<String, NotWritten>, now: Instant) {
        let Some(restart) = &mut self.reloads.running else { return };
        if restart.step != Step::Marking {
            return;
        }
        let reason = restart.reason();
        let (generation, pid) = restart.old.unzip();
        let generation = generation.map(u64::from);
        restart.marker_error = result.as_ref().err().map(|unwritten| unwritten.why.clone());
        self.reloads.unwritten_marker = result.as_ref().err().map(|unwritten| UnwrittenMarker {
            timestamp: unwritten.timestamp,
            pid: restart.pid,
            reason: reason.clone(),
            iso_time: unwritten.iso_time.clone(),
            why: unwritten.why.clone(),
        });
        let reason = Some(reason);
        if self.settings.build {
            restart.step = Step::Building;
        }
        match result {
            Ok(path) => {
                let record = Record::new(record::Event::RestartMarkerWritten);
                self.record(Record { reason, pid, generation, detail: Some(path), ..record });
            }
            Err(NotWritten { why, .. }) => {
                self.notes.push(&format!("The restart marker could not be written: {why}"));
                let record = Record::new(record::Event::RestartMarkerFailed);
                self.record(Record { reason, pid, generation, detail: Some(why), ..record });
            }
        }
        if self.settings.build {
            self.reloads.is_building = true;
            self.habits.loaded(now);
            self.act(Action::Build);
        } else {
            self.replace_child(now);
        }
    }

    pub(super) fn build_ended(&mut self, result: Result<(), String>, now: Instant) {
        self.reloads.is_building = false;
        self.habits.disturbed(now);
        if self.is_leaving() {
            return;
        }
        match result {
            Ok(()) => self.replace_child(now),
            Err(output) => {
                let lines: Vec<String> = output.lines().map(str::to_owned).collect();
                let (first, rest) = lines.split_first().map_or(("", &[][..]), |(first, rest)| (first.as_str(), rest));
                self.finish_restart(Err((format!("{BUILD_FAILED}: {first}"), rest.to_vec())), now);
            }
        }
    }

    /// Brings the new child up: beside the old one if that serves and may, else in its place.
    pub(super) fn replace_child(&mut self, now: Instant) {
        let step = match *self.servers.slot.current() {
            Current::Serving(_) if self.settings.reload == Reload::BlueGreen => {
                self.start(Purpose::Candidate);
                Step::Starting
            }
            Current::Serving(old) => {
                self.servers.slot.go_down(now);
                self.servers.start_after(old);
                self.leave_listens(old);
                self.drain(old, now);
                Step::Clearing
            }
            Current::Fresh(old) | Current::Replaying(old) => {
                self.start_over(old, now);
                if self.servers.waits_for_end() { Step::Clearing } else { Step::Starting }
            }
            // A child is on its way already, as the client has just changed its era.
            _ if self.servers.waits_for_end() => Step::Clearing,
            _ if self.servers.is_starting() => Step::Starting,
            Current::None | Current::Down { .. } | Current::GivenUp { .. } => {
                self.servers.slot.go_down(now);
                self.start(Purpose::Current);
                Step::Starting
            }
        };
        if let Some(restart) = &mut self.reloads.running {
            restart.step = step;
        }
    }

    /// The child that a restart was to bring up is given up for another one that is started now.
    pub(super) fn restart_starts_over(&mut self, generation: u32) {
        if let Some(restart) = &mut self.reloads.running
            && restart.waits_for(generation)
        {
            restart.step = Step::Starting;
        }
    }

    pub(super) fn restart_has_child(&mut self, generation: u32) {
        if let Some(restart) = &mut self.reloads.running
            && restart.waits_for_start()
        {
            restart.step = Step::Handshake(generation);
        }
    }

    /// The new child is ready; its tools may still have to be compared.
    pub(super) fn restart_is_ready(&mut self, generation: u32, now: Instant) {
        let comparing = self.servers.get(generation).is_some_and(|child| child.fetches.contains_key(&List::Tools));
        match &mut self.reloads.running {
            Some(restart) if restart.waits_for(generation) && comparing => restart.step = Step::Comparing(generation),
            _ => self.restart_is_done_if(generation, now),
        }
    }

    /// The tools of the new child were compared.
    pub(super) fn restart_compared(&mut self, generation: u32, diff: Option<Diff>, now: Instant) {
        if let Some(restart) = &mut self.reloads.running
            && restart.waits_for(generation)
        {
            restart.diff = diff;
            self.restart_is_done_if(generation, now);
        }
    }

    pub(super) fn restart_is_done_if(&mut self, generation: u32, now: Instant) {
        let Some(restart) = &self.reloads.running else { return };
        if !restart.waits_for(generation) && !restart.waits_for_start() {
            return;
        }
        let new_pid = self.servers.pid(generation);
        let draining = restart.old.map_or(0, |(old, _)| self.requests.on(old).len());
        let mut report = json!({
            "old_pid": restart.old.map(|(_, pid)| pid),
            "new_pid": new_pid,
            "generation": generation,
            "took_ms": record::millis(now.duration_since(restart.since)),
            "ended": restart.ended.as_ref().map(How::to_string),
            "tools": restart.diff.clone().unwrap_or_default().to_json(),
            "stderr_tail": self.servers.stderr(generation).join("\n"),
        });
        if restart.old.is_some_and(|(old, _)| self.is_stalled(old)) {
            // How many of them it has read is known only when its queue has been taken back.
            report["draining"] = json!("messages that the old server has not read go to the new one");
        } else if draining > 0 && !restart.at_once {
            report["draining"] = json!(format!("{} left on the old server", count(draining, "call", "calls")));
        }
        if let Some(why) = &restart.marker_error {
            report["marker_error"] = json!(why);
        }
        if restart.diff.is_none() {
            report["tools"]["compared"] = json!(false);
        }
        self.finish_restart(Ok(report), now);
    }

    /// The new child did not come up.
    pub(super) fn restart_failed(&mut self, how: &How, generation: Option<u32>, now: Instant) {
        let stderr = generation.map(|generation| self.servers.stderr(generation)).unwrap_or_default();
        self.restart_failed_with(how, &stderr, now);
    }

    pub(super) fn restart_failed_with(&mut self, how: &How, stderr: &[String], now: Instant) {
        let why = match how {
            How::Exited(Exit::Code(_) | Exit::Signal(_)) => {
                format!("the new server ended before it was ready ({how})")
            }
            how => format!("the new server {how}"),
        };
        self.finish_restart(Err((why, stderr.to_vec())), now);
    }

    pub(super) fn finish_restart(&mut self, result: Result<Value, (String, Vec<String>)>, now: Instant) {
        let Some(restart) = self.reloads.running.take() else { return };
        if let Err((why, _)) = &result {
            self.record(Record {
                reason: Some(restart.reason()),
                pid: restart.old.map(|(_, pid)| pid),
                generation: restart.old.map(|(n, _)| n.into()),
                detail: Some(why.clone()),
                took: Some(now.duration_since(restart.since)),
                ..Record::new(record::Event::ReloadFailed)
            });
        }
        self.reloads.last = Some(LastReload {
            reason: restart.reason(),
            at: now,
            failure: result.as_ref().err().map(|(why, stderr)| (why.clone(), stderr.clone())),
            marker_error: restart.marker_error.clone(),
        });
        if result.is_err() {
            self.stop_closed();
        }
        for ticket in restart.tickets {
            match &result {
                Ok(report) => self.answer_ticket(ticket, report),
                Err((why, stderr)) => self.refuse_ticket(ticket, why, stderr, restart.marker_error.as_deref()),
            }
        }
        self.begin_queued(now);
        if result.is_err() {
            self.recheck_holds(now);
        }
    }

    pub(super) fn answer_ticket(&mut self, ticket: Ticket, report: &Value) {
        match ticket {
            Ticket::Outside(ticket) => self.act(Action::Answer { ticket, result: Ok(report.clone()) }),
            Ticket::Call(seq) if self.requests.get(seq).is_some() => {
                let open = self.close(seq);
                let result = messages::tool_result(&report.to_string(), Some(report), false, None, self.is_modern());
                self.answer_result(&open, &result);
            }
            Ticket::Call(_) => {}
        }
    }

    pub(super) fn refuse_ticket(&mut self, ticket: Ticket, why: &str, stderr: &[String], marker_error: Option<&str>) {
        let serving = self.servers.slot.live().and_then(|generation| self.servers.pid(generation));
        let rest = match serving {
            _ if self.is_leaving() => String::new(),
            Some(pid) => format!(" The old server (pid {pid}) keeps serving."),
            None => " No server is serving.".into(),
        };
        let mut report = json!({
            "error": format!("The restart failed: {why}.{rest}"),
            "serving_pid": serving,
            "stderr_tail": stderr.join("\n"),
        });
        if let Some(why) = marker_error {
            report["marker_error"] = json!(why);
        }
        match ticket {
            Ticket::Outside(ticket) => self.act(Action::Answer { ticket, result: Err(report) }),
            Ticket::Call(seq) if self.requests.get(seq).is_some() => {
                let open = self.close(seq);
                let mut text = report["error"].as_str().unwrap_or_default().to_owned();
                if !stderr.is_empty() {
                    let whose =
                        if why.starts_with(BUILD_FAILED) { "output of the build" } else { "stderr of the new server" };
                    text = format!("{text}\n\n{whose}:\n{}", stderr.join("\n"));
                }
                let result = messages::tool_result(&text, Some(&report), true, None, self.is_modern());
                self.answer_result(&open, &result);
            }
            Ticket::Call(_) => {}
        }
    }

    /// A call of ours has waited as long as clients do; the restart continues.
    pub(super) fn restart_call_waited_out(&mut self, seq: u64) {
        let open = self.close(seq);
        self.forget_ticket(seq);
        let step = self.reloads.running.as_ref().map_or("it waits for another restart", Restart::step_in_words);
        let status = self.listed_name(Tool::Status);
        let words = format!("The restart is still running: {step}; `{status}` shows its state.");
        let result = messages::tool_result(&words, Some(&json!({"running": words})), false, None, self.is_modern());
        self.answer_result(&open, &result);
    }

    pub(super) fn forget_ticket(&mut self, seq: u64) {
        let keeps = |ticket: &Ticket| *ticket != Ticket::Call(seq);
        if let Some(restart) = &mut self.reloads.running {
            restart.tickets.retain(keeps);
        }
        if let Some(queued) = &mut self.reloads.queued {
            queued.tickets.retain(keeps);
        }
    }

    /// Outlast is leaving: askers outside the conversation are told; calls were answered like all others.
    pub(super) fn abandon_restart(&mut self) {
        let mut tickets = self.reloads.running.take().map(|restart| restart.tickets).unwrap_or_default();
        tickets.extend(self.reloads.queued.take().map(|queued| queued.tickets).unwrap_or_default());
        for ticket in tickets {
            self.refuse_ticket(ticket, "outlast is stopping", &[], None);
        }
    }
}
