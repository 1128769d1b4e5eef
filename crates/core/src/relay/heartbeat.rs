//! Progress of outlast's own for calls whose server sends none (SPEC H3, rows p1 to p4), so that a client with an idle
//! timeout does not give up. It is off unless `--heartbeat` is given.

use std::{collections::BTreeMap, time::Instant};

use super::{
    Relay,
    requests::{Class, OpenRequest, Waits},
    saved::SavedBeat,
};
use crate::{
    mcp::notification,
    message::{notification_line, quote},
    saved::Moment,
};

/// Each heartbeat is this much more than the one before: far below what a server would call progress, so that the
/// server's own numbers, when they come, are above ours.
const STEP: f64 = 1e-6;

/// The calls that get heartbeats, by number.
#[derive(Debug, Default)]
pub(super) struct Heartbeats(BTreeMap<u64, Beat>);

#[derive(Debug)]
struct Beat {
    since: Instant,
    next: Instant,
    count: u32,
}

impl Heartbeats {
    /// When each call gets its next heartbeat.
    pub(super) fn deadlines(&self) -> impl Iterator<Item = (u64, Instant)> {
        self.0.iter().map(|(seq, beat)| (*seq, beat.next))
    }

    /// The client waits for it no longer.
    pub(super) fn cancelled(&mut self, seq: u64) {
        self.0.remove(&seq);
    }
}

impl Heartbeats {
    pub(super) fn save(&self, now: Instant) -> BTreeMap<u64, SavedBeat> {
        let save = |beat: &Beat| SavedBeat {
            since: Moment::of(beat.since, now),
            next: Moment::of(beat.next, now),
            count: beat.count,
        };
        self.0.iter().map(|(seq, beat)| (*seq, save(beat))).collect()
    }

    pub(super) fn restore(saved: BTreeMap<u64, SavedBeat>, now: Instant) -> Heartbeats {
        let restore = |beat: SavedBeat| Beat { since: beat.since.at(now), next: beat.next.at(now), count: beat.count };
        Heartbeats(saved.into_iter().map(|(seq, beat)| (seq, restore(beat))).collect())
    }
}

impl Relay {
    /// A call of the client's came, and is not answered yet.
    pub(super) fn heartbeat_begins(&mut self, seq: u64, now: Instant) {
        let Some(every) = self.settings.heartbeat else { return };
        let is_watched = |open: &OpenRequest| open.token().is_some() && matches!(open.class, Class::Call { .. });
        if self.requests.get(seq).is_some_and(is_watched) {
            self.heartbeats.0.insert(seq, Beat { since: now, next: now + every, count: 0 });
        }
    }

    /// It is answered or needs no answer any more, or its server sends progress itself.
    pub(super) fn heartbeat_ends(&mut self, seq: u64) {
        self.heartbeats.0.remove(&seq);
    }

    /// The highest progress that outlast has sent to the client for this call.
    pub(super) fn heartbeat_value(&self, seq: u64) -> Option<f64> {
        self.heartbeats.0.get(&seq).filter(|beat| beat.count > 0).map(|beat| f64::from(beat.count) * STEP)
    }

    /// The next heartbeat of a call is due.
    pub(super) fn beat(&mut self, seq: u64, now: Instant) {
        let open = self.requests.get(seq).filter(|open| !open.cancelled);
        let call = open.and_then(|open| Some((open.token()?.clone(), open.waits)));
        let (Some(every), Some((token, waits)), Some(beat)) =
            (self.settings.heartbeat, call, self.heartbeats.0.get_mut(&seq))
        else {
            return self.heartbeat_ends(seq);
        };
        beat.count += 1;
        beat.next = now + every;
        let seconds = now.duration_since(beat.since).as_secs();
        let state = match waits {
            Waits::OnServer(_) => "The server has not answered yet",
            Waits::Held => "The call waits for the server to start",
            Waits::Restarting | Waits::Verifying { .. } | Waits::Replacement | Waits::Detached => {
                "The call waits for the restart"
            }
        };
        let message = quote(&format!("{state} ({seconds} s)"));
        let progress = format!("{:.6}", f64::from(beat.count) * STEP);
        let params = format!(r#""progressToken":{token},"progress":{progress},"message":{message}"#);
        self.tell_client(notification_line(notification::PROGRESS, &params));
    }
}
