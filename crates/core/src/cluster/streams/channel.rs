//! One channel: the numbers of both sides, numbered packets with acknowledgements, and when the peer is probed or given up.
//! It does not know streams.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use bytes::Bytes;

use super::{Instance, Limits, PROBE_EVERY, PROBE_MAX, SILENT_AFTER, packet::Header};

/// What was received is acknowledged at the latest after so long, or after so many bytes or this part of what may be
/// unacknowledged.
const ACK_AFTER: Duration = Duration::from_millis(20);
const ACK_AFTER_BYTES: usize = 64 << 10;
const ACK_PART: usize = 4;
/// Without an acknowledgement of anything more for so long, the peer is asked what it misses.
const ASK_AFTER: Duration = Duration::from_millis(250);
/// The same gap is reported again, and filled again, only after so long.
const GAP_AGAIN_AFTER: Duration = Duration::from_millis(200);
/// A probe whose outcome was not reported so long after its end counts as failed.
const PROBE_REPORT_MAX: Duration = Duration::from_millis(100);
/// A peer is not given up before so many probes failed: it may be this process that did not run.
const PROBES_MIN: u32 = 2;

#[derive(Debug)]
pub(super) struct Channel {
    number: u64,
    phase: Phase,
    began_at: Instant,
    /// When something of this channel was received last.
    heard_at: Option<Instant>,
    /// Since when there are streams, or packets that are not acknowledged. Counts only while there are.
    active_since: Instant,
    /// Nothing is known of the peer since a long time or a lost connection: no frame is published before it answers.
    must_verify: bool,
    /// A packet is due even without frames, because it tells our number.
    must_tell: bool,
    probes: Probes,
    sending: Sending,
    receiving: Receiving,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The peer has not shown that it knows our number. Its own is the highest that was heard.
    Opening {
        heard: Option<u64>,
    },
    Established {
        peer: u64,
    },
}

/// What a header means to a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeaderMeaning {
    /// Of this channel.
    Current,
    /// It tells the number of the peer, which does not know ours yet. Frames in it are not for this channel.
    Greeting,
    /// Of an earlier channel.
    Late,
    /// The peer has given this channel up.
    Renewed,
    /// It acknowledges what was not sent.
    Impossible,
}

/// How a packet with frames fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    Next,
    Duplicate,
    /// An earlier one is missing.
    Early,
}

impl Channel {
    pub(super) fn new(number: u64, heard: Option<u64>, now: Instant) -> Channel {
        Channel {
            number,
            phase: Phase::Opening { heard },
            began_at: now,
            heard_at: heard.map(|_| now),
            active_since: now,
            must_verify: false,
            must_tell: false,
            probes: Probes::default(),
            sending: Sending::new(now),
            receiving: Receiving::default(),
        }
    }

    pub(super) fn is_established(&self) -> bool {
        matches!(self.phase, Phase::Established { .. })
    }

    pub(super) fn heard_at(&self) -> Option<Instant> {
        self.heard_at
    }

    /// Bytes that are not acknowledged.
    pub(super) fn unacked(&self) -> usize {
        self.sending.bytes
    }

    /// The length of the longest packet that is not acknowledged.
    pub(super) fn longest_unacked(&self) -> usize {
        self.sending.unacked.iter().map(Bytes::len).max().unwrap_or(0)
    }

    /// From now on there are streams.
    pub(super) fn activate(&mut self, is_connected: bool, now: Instant) {
        self.active_since = now;
        self.probes.failed = if is_connected { 0 } else { PROBES_MIN };
        if self.heard_at.is_none_or(|at| now.saturating_duration_since(at) >= SILENT_AFTER) {
            self.must_verify = true;
        }
    }

    pub(super) fn connected(&mut self) {
        self.must_verify = true;
        self.probes.forget();
    }

    /// No probe can tell more.
    pub(super) fn disconnected(&mut self) {
        self.probes.forget();
        self.probes.failed = PROBES_MIN;
    }

    pub(super) fn probe_ended(&mut self) {
        self.probes.ended();
    }

    /// The peer is told our number with the next flush.
    pub(super) fn tell(&mut self) {
        self.must_tell = true;
    }

    /// Reads the header of a packet, and takes the acknowledgement in it.
    pub(super) fn read(&mut self, header: &Header, now: Instant) -> HeaderMeaning {
        if header.target == self.number && header.ack > self.sending.next {
            return HeaderMeaning::Impossible;
        }
        match self.phase {
            Phase::Opening { heard } if heard.is_some_and(|heard| header.source < heard) => return HeaderMeaning::Late,
            Phase::Opening { .. } if header.target == self.number => {
                self.phase = Phase::Established { peer: header.source };
                self.must_tell = true; // The peer may not know yet that we have heard it.
            }
            Phase::Opening { .. } => {
                self.phase = Phase::Opening { heard: Some(header.source) };
                self.heard_at = Some(now);
                return HeaderMeaning::Greeting;
            }
            Phase::Established { peer } if header.source > peer => return HeaderMeaning::Renewed,
            Phase::Established { peer } if header.source < peer || header.target != self.number => {
                return HeaderMeaning::Late;
            }
            Phase::Established { .. } => {}
        }
        self.heard_at = Some(now);
        self.must_verify = false;
        self.probes.failed = 0;
        self.sending.acked(header.ack, header.is_gap, now);
        HeaderMeaning::Current
    }

    /// A packet with frames arrived.
    pub(super) fn order(&mut self, number: u64, len: usize, limits: &Limits, now: Instant) -> Order {
        self.receiving.order(number, len, ACK_AFTER_BYTES.min(limits.unacked_max / ACK_PART), now)
    }

    /// A packet without frames arrived: all with lower numbers were sent before it.
    pub(super) fn reached(&mut self, header: &Header, now: Instant) {
        self.receiving.must_ack |= header.asks;
        self.receiving.reached(header.number, now);
    }

    /// The header of the next packet, which takes the acknowledgement that is due with it.
    pub(super) fn header(&mut self, own: Instance, to: Instance) -> Header {
        let (source, number, ack) = (self.number, self.sending.next, self.receiving.expected);
        let target = match self.phase {
            Phase::Opening { heard } => heard.unwrap_or(0),
            Phase::Established { peer } => peer,
        };
        let is_gap = self.receiving.told();
        self.must_tell = false;
        Header { from: own, to, source, target, number, ack, is_gap, asks: false }
    }

    /// Whether a packet with frames may be published.
    pub(super) fn has_room(&self, limits: &Limits) -> bool {
        let is_below = self.sending.bytes == 0 || self.sending.bytes + limits.packet_max <= limits.unacked_max;
        self.is_established() && !self.must_verify && is_below
    }

    /// A packet with frames and the header of this moment is published.
    pub(super) fn published(&mut self, packet: Bytes, now: Instant) {
        self.sending.push(packet, now);
    }

    /// The packets that the peer misses, if it reported that.
    pub(super) fn resend(&mut self, now: Instant) -> impl Iterator<Item = Bytes> + '_ {
        let is_due = self.sending.must_resend && !self.must_verify;
        if is_due {
            self.sending.resent(now);
        }
        self.sending.unacked.iter().filter(move |_| is_due).cloned()
    }

    /// Whether the peer is to be asked for an acknowledgement now.
    pub(super) fn takes_ask(&mut self, now: Instant) -> bool {
        let is_due = self.is_established() && !self.must_verify && self.sending.ask_at().is_some_and(|at| at <= now);
        if is_due {
            self.sending.waits_since = now;
        }
        is_due
    }

    /// Whether a packet is due now, even without frames.
    pub(super) fn must_publish(&self, now: Instant) -> bool {
        match self.phase {
            Phase::Opening { heard } => self.must_tell && heard.is_some(),
            Phase::Established { .. } => self.must_tell || self.receiving.is_due(now),
        }
    }

    /// A probe whose outcome was not reported counts as failed.
    pub(super) fn time_passed(&mut self, now: Instant) {
        if self.probes.ends_at().is_some_and(|at| at <= now) {
            self.probes.ended();
        }
    }

    /// Whether a probe is to be sent now; then it counts as sent.
    pub(super) fn takes_probe(&mut self, is_active: bool, now: Instant) -> bool {
        let is_due = !self.probes.is_open && self.probe_at(is_active).is_some_and(|at| at <= now);
        if is_due {
            self.probes.sent(now);
        }
        is_due
    }

    fn probe_at(&self, is_active: bool) -> Option<Instant> {
        let quiet_at = match self.is_established() && !self.must_verify {
            true => self.quiet_since() + PROBE_EVERY,
            false => self.active_since,
        };
        is_active.then(|| self.probes.next_at(quiet_at))
    }

    /// Since when a peer that has reason to answer has shown nothing. While the channel opens, only its opening counts: a
    /// peer that greets and does not hear us is no use.
    fn quiet_since(&self) -> Instant {
        match self.heard_at {
            Some(at) if self.is_established() => at.max(self.active_since),
            _ => self.active_since,
        }
    }

    /// When the peer is given up, as nothing was received from it.
    pub(super) fn silent_at(&self, is_active: bool, is_connected: bool) -> Option<Instant> {
        match (is_active, self.phase) {
            (true, _) if is_connected && self.probes.failed < PROBES_MIN => None,
            (true, _) => Some(self.quiet_since() + SILENT_AFTER),
            (false, Phase::Opening { .. }) => Some(self.heard_at.unwrap_or(self.began_at) + SILENT_AFTER),
            (false, Phase::Established { .. }) => None,
        }
    }

    pub(super) fn deadline(&self, is_active: bool, is_connected: bool) -> Option<Instant> {
        let is_sending = self.is_established() && !self.must_verify;
        let timers = [
            self.silent_at(is_active, is_connected),
            self.probe_at(is_active).filter(|_| is_connected),
            self.sending.ask_at().filter(|_| is_connected && is_sending),
            self.receiving.ack_at.filter(|_| is_connected && self.is_established()),
        ];
        timers.into_iter().flatten().min()
    }
}

/// One at a time.
#[derive(Debug, Default)]
struct Probes {
    sent_at: Option<Instant>,
    is_open: bool,
    /// How many failed in a row.
    failed: u32,
}

impl Probes {
    fn sent(&mut self, now: Instant) {
        (self.sent_at, self.is_open) = (Some(now), true);
    }

    fn ends_at(&self) -> Option<Instant> {
        self.sent_at.filter(|_| self.is_open).map(|at| at + PROBE_MAX + PROBE_REPORT_MAX)
    }

    /// It failed, unless it was answered: then what was heard resets the number.
    fn ended(&mut self) {
        self.failed += u32::from(self.is_open);
        self.is_open = false;
    }

    fn forget(&mut self) {
        (self.sent_at, self.is_open) = (None, false);
    }

    /// `quiet_at`: when a probe is wanted.
    fn next_at(&self, quiet_at: Instant) -> Instant {
        match (self.ends_at(), self.sent_at) {
            (Some(at), _) => at,
            (None, Some(at)) => quiet_at.max(at + PROBE_EVERY),
            (None, None) => quiet_at,
        }
    }
}

/// Packets that were published and are not acknowledged.
#[derive(Debug)]
struct Sending {
    /// The number of the next packet.
    next: u64,
    /// The last one has the number `next - 1`.
    unacked: VecDeque<Bytes>,
    bytes: usize,
    /// Since when there is no progress: the last acknowledgement, resend or question.
    waits_since: Instant,
    must_resend: bool,
    /// From which number packets were sent again last, and when.
    resent: Option<(u64, Instant)>,
}

impl Sending {
    fn new(now: Instant) -> Sending {
        Sending { next: 0, unacked: VecDeque::new(), bytes: 0, waits_since: now, must_resend: false, resent: None }
    }

    fn first(&self) -> u64 {
        self.next - self.unacked.len() as u64
    }

    fn push(&mut self, packet: Bytes, now: Instant) {
        if self.unacked.is_empty() {
            self.waits_since = now;
        }
        self.bytes += packet.len();
        self.unacked.push_back(packet);
        self.next += 1;
    }

    fn acked(&mut self, ack: u64, is_gap: bool, now: Instant) {
        while self.first() < ack
            && let Some(packet) = self.unacked.pop_front()
        {
            self.bytes -= packet.len();
            self.waits_since = now;
            self.must_resend = false;
        }
        let is_fresh = self.resent.is_none_or(|(from, at)| from != ack || now >= at + GAP_AGAIN_AFTER);
        if is_gap && ack == self.first() && ack < self.next && is_fresh {
            self.must_resend = true;
        }
    }

    fn resent(&mut self, now: Instant) {
        self.must_resend = false;
        self.resent = Some((self.first(), now));
        self.waits_since = now;
    }

    fn ask_at(&self) -> Option<Instant> {
        (!self.unacked.is_empty()).then(|| self.waits_since + ASK_AFTER)
    }
}

/// Which packets were received, and which acknowledgement is due.
#[derive(Debug, Default)]
struct Receiving {
    /// The number of the next packet.
    expected: u64,
    /// Bytes that were received and are not acknowledged.
    bytes: usize,
    ack_at: Option<Instant>,
    must_ack: bool,
    must_report_gap: bool,
    /// The gap that was reported last, and when.
    gap: Option<(u64, Instant)>,
}

impl Receiving {
    fn order(&mut self, number: u64, len: usize, unacked_max: usize, now: Instant) -> Order {
        if number > self.expected {
            self.reached(number, now);
            return Order::Early;
        }
        self.ack_at = self.ack_at.or(Some(now + ACK_AFTER));
        if number < self.expected {
            return Order::Duplicate;
        }
        self.expected += 1;
        self.must_report_gap = false;
        self.bytes += len;
        self.must_ack |= self.bytes >= unacked_max;
        Order::Next
    }

    fn reached(&mut self, number: u64, now: Instant) {
        let is_fresh = self.gap.is_none_or(|(from, at)| from != self.expected || now >= at + GAP_AGAIN_AFTER);
        if number > self.expected && is_fresh {
            self.gap = Some((self.expected, now));
            self.must_report_gap = true;
        }
    }

    fn is_due(&self, now: Instant) -> bool {
        self.must_ack || self.must_report_gap || self.ack_at.is_some_and(|at| at <= now)
    }

    /// A packet takes the acknowledgement with it. Returns whether it reports a gap.
    fn told(&mut self) -> bool {
        (self.bytes, self.ack_at, self.must_ack) = (0, None, false);
        std::mem::take(&mut self.must_report_gap)
    }
}
