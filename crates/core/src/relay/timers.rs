//! Everything that time can make due, as one table. What is done then is decided by the module that owns the entry.

use std::time::Instant;

use super::{
    Relay,
    failures::FailureKind,
    servers::{Current, Purpose},
};
use crate::mcp::List;

/// How many entries one event can fire; what is left fires at the next one. Each entry that fires is removed or moved, so
/// this is reached only by a mistake in outlast, which must not stop the conversation.
const FIRED_MAX: usize = 10_000;

/// In the order in which entries fire that are due at once.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Timer {
    /// The next child starts.
    Start,
    /// The handshake of this child is late.
    Handshake(u32),
    /// The drain of this child is over.
    Drain(u32),
    /// A request has waited long enough.
    Request(u64),
    /// A list that is fetched for comparison is late.
    Fetch(u32, List),
    /// A file that was muted counts again.
    MutedFiles,
    /// This child takes nothing of its queue.
    Backlog(u32),
    /// An opening is answered without the first server, or the cache is read for it.
    EarlyAnswer,
    SaveCache,
    /// A call gets a heartbeat.
    Heartbeat(u64),
    /// The server has not exited by its own restart tool.
    OwnRestart,
    CallTimeouts,
    /// A request that needs no work is not answered.
    Quiet,
    /// The ping to a suspected server is not answered.
    HangPing,
    /// A restart has waited long enough for replaced servers to finish.
    QueuedRestart,
}

impl Relay {
    /// When `TimePassed` is due: the first entry of the table.
    pub fn deadline(&self) -> Option<Instant> {
        let mut soonest: Option<Instant> = None;
        self.each_timer(|_, at| soonest = Some(soonest.map_or(at, |soonest| soonest.min(at))));
        soonest
    }

    /// Early or twice changes nothing.
    pub(super) fn time_passed(&mut self, now: Instant) {
        for _ in 0..FIRED_MAX {
            let mut due = None;
            self.each_timer(|timer, at| {
                if at <= now {
                    due.get_or_insert(timer);
                }
            });
            let Some(timer) = due else { return };
            self.fire(timer, now);
        }
    }

    /// The table, in the order of [`Timer`]. A closure instead of an iterator: this runs after each wake of the driver, and
    /// a chain of iterators costs more than what it yields.
    fn each_timer(&self, mut entry: impl FnMut(Timer, Instant)) {
        let mut maybe = |timer: Timer, at: Option<Instant>| {
            if let Some(at) = at {
                entry(timer, at);
            }
        };
        if let Current::Down { at } = *self.servers.slot.current()
            && self.wants_start()
        {
            maybe(Timer::Start, Some(at));
        }
        for (generation, child) in self.servers.running() {
            maybe(Timer::Handshake(generation), child.handshake_by);
        }
        for (generation, until) in self.servers.finishing() {
            maybe(Timer::Drain(generation), Some(until));
        }
        for (seq, at) in self.request_deadlines() {
            maybe(Timer::Request(seq), Some(at));
        }
        for (generation, child) in self.servers.running() {
            for (list, fetch) in &child.fetches {
                maybe(Timer::Fetch(generation, *list), Some(fetch.by));
            }
        }
        let stays = !self.is_leaving();
        if stays {
            maybe(Timer::MutedFiles, self.habits.deadline());
        }
        for (generation, child) in self.servers.running() {
            maybe(Timer::Backlog(generation), self.backlog_deadline(child));
        }
        maybe(Timer::EarlyAnswer, self.early_deadline());
        maybe(Timer::SaveCache, self.memory_deadline());
        for (seq, at) in self.heartbeats.deadlines() {
            maybe(Timer::Heartbeat(seq), Some(at));
        }
        if stays {
            maybe(Timer::OwnRestart, self.own_restart_deadline());
            maybe(Timer::CallTimeouts, self.hang.timeouts_deadline());
            maybe(Timer::Quiet, self.hang.quiet_deadline());
            maybe(Timer::HangPing, self.hang.ping_deadline());
            maybe(Timer::QueuedRestart, self.waits_for_room());
        }
    }

    fn fire(&mut self, timer: Timer, now: Instant) {
        match timer {
            Timer::Start => self.start(Purpose::Current),
            Timer::Handshake(generation) => self.handshake_late(generation, now),
            Timer::Drain(generation) => self.drain_over(generation, FailureKind::DrainOver, now),
            Timer::Request(seq) => self.waited_out(seq, now),
            Timer::Fetch(generation, list) => self.fetch_late(generation, list, now),
            Timer::MutedFiles => self.muted_files_due(now),
            Timer::Backlog(generation) => self.backlog_stalls(generation),
            Timer::EarlyAnswer => self.early_time_passed(now),
            Timer::SaveCache => self.save_memory(),
            Timer::Heartbeat(seq) => self.beat(seq, now),
            Timer::OwnRestart => self.own_restart_due(now),
            Timer::CallTimeouts => self.calls_time_out(now),
            Timer::Quiet => self.quiet_is_due(now),
            Timer::HangPing => self.ping_is_due(now),
            Timer::QueuedRestart => self.begin_queued(now),
        }
    }
}
