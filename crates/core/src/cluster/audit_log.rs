//! Which records of the local audit log are published, in which order: the stream of a replica continues after the last
//! record that it has, without a gap or a duplicate. It does not keep records; the driver reads them from the local files.

use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};

/// How long it waits after a failure.
pub const RETRY: Duration = Duration::from_secs(1);
/// A request that is not answered for so long has failed.
pub const REQUEST_MAX: Duration = Duration::from_secs(10);

/// The id of a record: `<replica>-<number>`.
pub fn id(replica: &str, number: u64) -> String {
    format!("{replica}-{number}")
}

/// The number in an id of this replica.
pub fn number(replica: &str, id: &str) -> Option<u64> {
    let digits = id.strip_prefix(replica)?.strip_prefix('-')?;
    let is_number = digits.len() <= 20 && digits.bytes().all(|digit| digit.is_ascii_digit());
    if is_number { digits.parse().ok() } else { None }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Connected,
    Disconnected,
    /// The answer to [`Action::ReadLast`].
    LastRead {
        last: Last,
    },
    /// The local log has records up to this number. Numbers grow with every record, also from one process to the next, and
    /// after the local files were lost: a new log begins with a number that was never used, such as the time of day.
    Appended {
        up_to: u64,
    },
    /// The answer to [`Action::Load`]: at least one line, unless there are no more.
    Loaded(Loaded),
    Published {
        batch: u64,
        result: Published,
    },
    TimePassed,
}

/// The last message of this replica's subject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Last {
    Some { sequence: u64, id: String },
    None,
    Failed,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Loaded {
    /// As in [`Action::Load`].
    pub after: Option<u64>,
    /// In the order of their numbers.
    pub lines: Vec<Line>,
    /// There are no more lines at present.
    pub is_end: bool,
    /// Lines between the one that was asked for and the first of these are in no local file any more.
    pub is_missing: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub number: u64,
    /// With its line end.
    pub bytes: Bytes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    Done {
        sequence: u64,
    },
    /// The last sequence of the subject is another than was expected.
    WrongLast,
    /// It may have taken effect, or may still do so.
    Failed,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// From the leader.
    ReadLast,
    /// The lines after this number (all that are left if None), as many as `bytes_max` has room for and at least one.
    Load { after: Option<u64>, bytes_max: usize },
    /// With `id` as message id and `expected_last` as expected last sequence of the subject.
    Publish { batch: u64, id: String, expected_last: u64, body: Bytes },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Records that are known not to be published yet; nothing before the stream was read.
    pub backlog: Option<u64>,
    /// Records that this process published.
    pub published: u64,
    /// How often lines were in no local file any more before they were published.
    pub gaps: u64,
}

#[derive(Debug)]
pub struct AuditLog {
    replica: String,
    batch_max: usize,
    is_connected: bool,
    /// The last record of the local log.
    up_to: u64,
    /// No record of the local log has this number or a lower one.
    floor: u64,
    /// Where the stream ends. Nothing after a failure: it is read before anything is published.
    end: Option<End>,
    step: Step,
    batches: u64,
    /// The last publish found another end of the stream than was read.
    was_wrong: bool,
    published: u64,
    gaps: u64,
}

#[derive(Debug, Clone, Copy)]
struct End {
    /// Of the subject's last message, or 0.
    sequence: u64,
    /// The last record of that message.
    number: Option<u64>,
}

#[derive(Debug)]
enum Step {
    /// Until something happens, or this moment.
    Waiting {
        until: Option<Instant>,
    },
    ReadingLast {
        until: Instant,
    },
    Loading {
        after: Option<u64>,
        until: Instant,
    },
    Publishing {
        batch: u64,
        last: u64,
        records: u64,
        until: Instant,
    },
}

impl AuditLog {
    /// `batch_max` is the largest body, in bytes. A longer line is a batch of its own.
    pub fn new(replica: String, batch_max: usize) -> AuditLog {
        AuditLog {
            replica,
            batch_max,
            is_connected: false,
            up_to: 0,
            floor: 0,
            end: None,
            step: Step::Waiting { until: None },
            batches: 0,
            was_wrong: false,
            published: 0,
            gaps: 0,
        }
    }

    pub fn handle(&mut self, event: Event, now: Instant, actions: &mut Vec<Action>) {
        match event {
            Event::Connected => {
                (self.is_connected, self.end, self.step) = (true, None, Step::Waiting { until: None });
            }
            Event::Disconnected => {
                (self.is_connected, self.end, self.step) = (false, None, Step::Waiting { until: None });
            }
            Event::LastRead { last } => self.last_read(last, now),
            Event::Appended { up_to } => self.up_to = self.up_to.max(up_to),
            Event::Loaded(loaded) => self.loaded(loaded, now, actions),
            Event::Published { batch, result } => self.was_published(batch, result, now),
            Event::TimePassed => {
                let due = match &self.step {
                    Step::Waiting { until } => *until,
                    Step::ReadingLast { until } | Step::Loading { until, .. } | Step::Publishing { until, .. } => {
                        Some(*until)
                    }
                };
                if due.is_some_and(|until| until <= now) {
                    // A publish that was not answered may have taken effect.
                    if !matches!(self.step, Step::Waiting { .. }) {
                        self.end = None;
                    }
                    self.step = Step::Waiting { until: None };
                }
            }
        }
        self.go_on(now, actions);
    }

    pub fn deadline(&self) -> Option<Instant> {
        match &self.step {
            Step::Waiting { until } => *until,
            Step::ReadingLast { until } | Step::Loading { until, .. } | Step::Publishing { until, .. } => Some(*until),
        }
    }

    pub fn counts(&self) -> Counts {
        let done = |end: End| end.number.unwrap_or(0).max(self.floor);
        Counts {
            backlog: self.end.map(|end| self.up_to.saturating_sub(done(end))),
            published: self.published,
            gaps: self.gaps,
        }
    }

    /// The next step, if none is under way.
    fn go_on(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if !self.is_connected || !matches!(self.step, Step::Waiting { until: None }) {
            return;
        }
        let until = now + REQUEST_MAX;
        match self.end {
            None => {
                self.step = Step::ReadingLast { until };
                actions.push(Action::ReadLast);
            }
            Some(end) if end.number.unwrap_or(0) < self.up_to => {
                self.step = Step::Loading { after: end.number, until };
                actions.push(Action::Load { after: end.number, bytes_max: self.batch_max });
            }
            Some(_) => {}
        }
    }

    fn last_read(&mut self, last: Last, now: Instant) {
        if !matches!(self.step, Step::ReadingLast { .. }) {
            return;
        }
        let end = match last {
            Last::None => Some(End { sequence: 0, number: None }),
            // A message that this program did not write: what comes after it is not known.
            Last::Some { sequence, id } => {
                number(&self.replica, &id).map(|number| End { sequence, number: Some(number) })
            }
            Last::Failed => None,
        };
        self.step = Step::Waiting { until: end.is_none().then(|| now + RETRY) };
        self.end = end;
    }

    fn loaded(&mut self, loaded: Loaded, now: Instant, actions: &mut Vec<Action>) {
        let (Step::Loading { after, .. }, Some(end)) = (&self.step, self.end) else { return };
        if *after != loaded.after {
            return;
        }
        self.gaps += u64::from(loaded.is_missing);
        let (mut body, mut last, mut records) = (BytesMut::new(), end.number, 0);
        for Line { number, bytes } in loaded.lines {
            if records > 0 && body.len() + bytes.len() > self.batch_max {
                break;
            }
            if last.is_some_and(|last| number <= last) {
                continue;
            }
            if records == 0 {
                self.floor = self.floor.max(number.saturating_sub(1));
            }
            body.extend_from_slice(&bytes);
            (last, records) = (Some(number), records + 1);
        }
        let Some(last) = last.filter(|_| records > 0) else {
            // The log should have more: it could not be read.
            self.step = Step::Waiting { until: Some(now + RETRY) };
            return;
        };
        self.batches += 1;
        let batch = self.batches;
        self.step = Step::Publishing { batch, last, records, until: now + REQUEST_MAX };
        let id = id(&self.replica, last);
        actions.push(Action::Publish { batch, id, expected_last: end.sequence, body: body.freeze() });
    }

    fn was_published(&mut self, batch: u64, result: Published, now: Instant) {
        let Step::Publishing { batch: awaited, last, records, .. } = self.step else { return };
        if awaited != batch {
            return;
        }
        match result {
            Published::Done { sequence } => {
                self.end = Some(End { sequence, number: Some(last) });
                self.published += records;
                self.step = Step::Waiting { until: None };
            }
            // An earlier publish took effect without an answer. If that is not all, another process writes to the subject.
            Published::WrongLast => {
                self.end = None;
                self.step = Step::Waiting { until: self.was_wrong.then(|| now + RETRY) };
            }
            Published::Failed => {
                self.end = None;
                self.step = Step::Waiting { until: Some(now + RETRY) };
            }
        }
        self.was_wrong = result == Published::WrongLast;
    }
}
