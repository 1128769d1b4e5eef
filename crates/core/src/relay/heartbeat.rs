//! Progress of outlast's own for calls whose server sends none (SPEC H3, rows p1 to p4), so that a client with an idle
//! timeout does not give up. It is off unless `--heartbeat` is given.

use std::{collections::BTreeMap, time::Instant};

use super::{Class, Open, Place, Relay};
use crate::message::{line, quote};

/// Each heartbeat is this much more than the one before: far below what a server would call progress, so that the
/// server's own numbers, when they come, are above ours.
const STEP: f64 = 1e-6;

/// The calls that are reported to be alive, by number.
#[derive(Debug, Default)]
pub(super) struct Heartbeats(BTreeMap<u64, Beat>);

#[derive(Debug)]
struct Beat {
    since: Instant,
    next: Instant,
    count: u32,
}

impl Heartbeats {
    /// The client waits for it no longer.
    pub(super) fn cancelled(&mut self, seq: u64) {
        self.0.remove(&seq);
    }
}

impl Relay {
    /// A call of the client's came, and is not answered yet.
    pub(super) fn heartbeat_begins(&mut self, seq: u64, now: Instant) {
        let Some(every) = self.settings.heartbeat else { return };
        let is_watched = |open: &Open| open.token.is_some() && matches!(open.class, Class::Call { .. });
        if self.opens.get(&seq).is_some_and(|open| is_watched(open)) {
            self.heartbeats.0.insert(seq, Beat { since: now, next: now + every, count: 0 });
        }
    }

    /// It is answered, or owed nothing any more, or its server speaks for itself.
    pub(super) fn heartbeat_ends(&mut self, seq: u64) {
        self.heartbeats.0.remove(&seq);
    }

    /// The highest progress that the client has heard from us for this call.
    pub(super) fn heartbeat_value(&self, seq: u64) -> Option<f64> {
        self.heartbeats.0.get(&seq).filter(|beat| beat.count > 0).map(|beat| f64::from(beat.count) * STEP)
    }

    pub(super) fn heartbeat_deadline(&self) -> Option<Instant> {
        self.heartbeats.0.values().map(|beat| beat.next).min()
    }

    pub(super) fn heartbeats_time_passed(&mut self, now: Instant) {
        let Some(every) = self.settings.heartbeat else { return };
        let due: Vec<u64> =
            self.heartbeats.0.iter().filter(|(_, beat)| beat.next <= now).map(|(seq, _)| *seq).collect();
        for seq in due {
            let Some(open) = self.opens.get(&seq).filter(|open| !open.cancelled) else {
                self.heartbeat_ends(seq);
                continue;
            };
            let (token, place) = (open.token.clone(), open.place);
            let Some((beat, token)) = self.heartbeats.0.get_mut(&seq).zip(token) else { continue };
            beat.count += 1;
            beat.next = now + every;
            let seconds = now.duration_since(beat.since).as_secs();
            let state = match place {
                Place::On(_) => "The server has not answered yet",
                Place::Held => "The call waits for the server to start",
                Place::Ours | Place::Due | Place::Nowhere => "The call waits for the restart",
            };
            let message = quote(&format!("{state} ({seconds} s)"));
            let progress = format!("{:.6}", f64::from(beat.count) * STEP);
            self.tell_client(line(format!(
                r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{token},"progress":{progress},"message":{message}}}}}"#
            )));
        }
    }
}
