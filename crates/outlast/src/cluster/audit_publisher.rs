//! Publishes the records of this replica's audit log to its cluster: reads them from the local files, and drives
//! `AuditLog`, which decides what is published when. It writes no records.

use std::{
    future::Future,
    io,
    path::{Path, PathBuf},
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::Bytes;
use outlast_core::cluster::audit_log::{self, Action, AuditLog, Event, Last, Loaded, Published};
use outlast_os::offload::{Task, offload};

use super::nats::{AuditEntry, Nats, Written};
use crate::state::{
    audit_reader::{AuditReader, Batch, Missing},
    audit_retention::{self, Mark},
};

/// The largest message. It is less if NATS accepts less.
const BATCH_MAX: usize = 256 << 10;
/// After all records were read, the next read waits this long: records are synced before they are published, and an append
/// to the log may block during a sync.
const PACE: Duration = Duration::from_secs(1);
/// A read that failed is repeated after this time.
const RETRY: Duration = Duration::from_secs(1);
/// How often the number of the last published record is stored if it has changed, and if it has not.
const STORE_GAP: Duration = Duration::from_secs(1);
const STORE_GAP_MAX: Duration = Duration::from_secs(60 * 60);

/// The two requests to NATS that a publisher makes.
pub(crate) trait AuditStream {
    /// Answered by [`AuditPublisher::last_read`].
    fn read_last_audit(&mut self, ticket: u64);
    /// Answered by [`AuditPublisher::published`].
    fn publish_audit(&mut self, id: String, expected_last: u64, body: Bytes, ticket: u64);
}

impl AuditStream for Nats {
    fn read_last_audit(&mut self, ticket: u64) {
        Nats::read_last_audit(self, ticket);
    }

    fn publish_audit(&mut self, id: String, expected_last: u64, body: Bytes, ticket: u64) {
        Nats::publish_audit(self, id, expected_last, body, ticket);
    }
}

/// What the gateway should know. Its text is for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Noticed {
    /// Local files were removed before their records were published. To be recorded as `audit_degraded`.
    Missing(String),
    /// The stream has records of this replica with higher numbers than the local log: `Journal::number_records_after`
    /// must be called with this number, and the text recorded as `audit_degraded`.
    Ahead { number: u64, text: String },
    /// The local log cannot be read. It is told once until it can be read again.
    Unreadable(String),
}

pub(crate) struct AuditPublisher {
    machine: AuditLog,
    path: PathBuf,
    replica: String,
    /// The number of the last local record, as far as it is known.
    appended: u64,
    /// Records up to here were published when this process started.
    floor: u64,
    bytes_max: usize,
    ticket: u64,
    asked: Option<Asked>,
    load: Load,
    /// A read does not begin before this.
    load_from: Option<Instant>,
    is_hasty: bool,
    is_unreadable: bool,
    mark: StoredMark,
    actions: Vec<Action>,
    noticed: Vec<Noticed>,
}

/// The request to NATS whose answer is expected. Answers to others are late and are ignored.
enum Asked {
    Last { ticket: u64 },
    Publish { ticket: u64, batch: u64, id: String },
}

/// Where the reader is.
enum Load {
    Idle(AuditReader),
    /// A read is wanted, but does not begin yet.
    Wanted(AuditReader, Wanted),
    Running {
        task: Task<(AuditReader, io::Result<Batch>)>,
        wanted: Wanted,
        /// If the result is not expected any more: whether something else is to be read.
        instead: Option<Option<Wanted>>,
    },
}

#[derive(Debug, Clone, Copy)]
struct Wanted {
    after: Option<u64>,
    bytes_max: usize,
}

/// The number of the last published record, and its copy on disk.
struct StoredMark {
    now: Mark,
    /// `None` if the last attempt failed.
    stored: Option<Mark>,
    stored_at: Instant,
    storing: Option<Task<io::Result<()>>>,
}

impl AuditPublisher {
    /// `written` is the number of the last record in the local log, see `Journal::last_number`.
    pub(crate) fn new(replica: &str, audit: &Path, written: u64, now: Instant) -> AuditPublisher {
        let mark = audit_retention::stored(audit, replica).unwrap_or_default();
        let mut publisher = AuditPublisher {
            machine: AuditLog::new(replica.to_owned(), BATCH_MAX),
            path: audit.to_owned(),
            replica: replica.to_owned(),
            appended: written,
            floor: mark.published,
            bytes_max: BATCH_MAX,
            ticket: 0,
            asked: None,
            load: Load::Idle(AuditReader::new(audit, replica)),
            load_from: None,
            is_hasty: false,
            is_unreadable: false,
            mark: StoredMark { now: mark, stored: Some(mark), stored_at: now, storing: None },
            actions: Vec::new(),
            noticed: Vec::new(),
        };
        publisher.tell(Event::Appended { up_to: written }, now);
        publisher
    }

    /// After each event `poll` must be called.
    pub(crate) fn connected(&mut self, payload_max: usize, now: Instant) {
        self.bytes_max = BATCH_MAX.min(payload_max / 2);
        self.tell(Event::Connected, now);
    }

    pub(crate) fn disconnected(&mut self, now: Instant) {
        self.asked = None;
        self.cancel_load();
        self.tell(Event::Disconnected, now);
    }

    /// The local log has records up to this number.
    pub(crate) fn appended(&mut self, up_to: u64, now: Instant) {
        if self.appended < up_to {
            self.appended = up_to;
            self.tell(Event::Appended { up_to }, now);
        }
    }

    /// `Heard::LastAudit`
    pub(crate) fn last_read(&mut self, ticket: u64, last: Result<Option<AuditEntry>, String>, now: Instant) {
        if !matches!(self.asked, Some(Asked::Last { ticket: asked }) if asked == ticket) {
            return;
        }
        self.asked = None;
        let last = match last {
            Ok(Some(entry)) => {
                if let Some(number) = audit_log::number(&self.replica, &entry.id) {
                    self.is_published(number);
                    self.compare(number, now);
                }
                Last::Some { sequence: entry.sequence, id: entry.id }
            }
            Ok(None) => Last::None,
            Err(_) => Last::Failed,
        };
        self.tell(Event::LastRead { last }, now);
    }

    /// `Heard::AuditPublished`
    pub(crate) fn published(&mut self, ticket: u64, result: Written, now: Instant) {
        let Some(Asked::Publish { batch, id, .. }) =
            self.asked.take_if(|asked| matches!(asked, Asked::Publish { ticket: asked, .. } if *asked == ticket))
        else {
            return;
        };
        let result = match result {
            Written::Done(sequence) => {
                audit_log::number(&self.replica, &id).into_iter().for_each(|number| self.is_published(number));
                Published::Done { sequence }
            }
            Written::Conflict => Published::WrongLast,
            Written::Unknown(_) => Published::Failed,
        };
        self.tell(Event::Published { batch, result }, now);
    }

    /// From here on reads do not wait for others. For the end of the gateway.
    pub(crate) fn hurry(&mut self) {
        self.is_hasty = true;
        self.load_from = None;
    }

    /// Records that are not published yet.
    pub(crate) fn backlog(&self) -> u64 {
        let most = self.appended.saturating_sub(self.floor);
        self.machine.counts().backlog.map_or(most, |backlog| backlog.min(most))
    }

    /// When to call `poll` at the latest.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let load = self.load_from.filter(|_| matches!(self.load, Load::Wanted(..)));
        let store = self.mark.due();
        [self.machine.deadline(), load, store].into_iter().flatten().min()
    }

    /// Does what is to be done. Ready if the gateway should know something; then it must be called again.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>, stream: &mut impl AuditStream, now: Instant) -> Poll<Noticed> {
        if self.machine.deadline().is_some_and(|deadline| deadline <= now) {
            self.tell(Event::TimePassed, now);
        }
        loop {
            for action in std::mem::take(&mut self.actions) {
                self.carry_out(action, stream);
            }
            self.begin_load(now);
            self.poll_load(cx, now);
            if self.actions.is_empty() {
                break;
            }
        }
        self.mark.poll(cx, &self.path, &self.replica, now);
        match self.noticed.pop() {
            Some(noticed) => Poll::Ready(noticed),
            None => Poll::Pending,
        }
    }

    fn tell(&mut self, event: Event, now: Instant) {
        self.machine.handle(event, now, &mut self.actions);
    }

    fn carry_out(&mut self, action: Action, stream: &mut impl AuditStream) {
        match action {
            Action::ReadLast => {
                self.cancel_load();
                self.ticket += 1;
                self.asked = Some(Asked::Last { ticket: self.ticket });
                stream.read_last_audit(self.ticket);
            }
            Action::Load { after, bytes_max } => {
                self.want(Wanted { after, bytes_max: bytes_max.min(self.bytes_max) });
            }
            Action::Publish { batch, id, expected_last, body } => {
                self.ticket += 1;
                self.asked = Some(Asked::Publish { ticket: self.ticket, batch, id: id.clone() });
                stream.publish_audit(id, expected_last, body, self.ticket);
            }
        }
    }

    fn want(&mut self, wanted: Wanted) {
        self.load = match self.take_load() {
            Load::Idle(reader) | Load::Wanted(reader, _) => Load::Wanted(reader, wanted),
            Load::Running { task, wanted: other, .. } => {
                Load::Running { task, wanted: other, instead: Some(Some(wanted)) }
            }
        };
    }

    fn cancel_load(&mut self) {
        self.load = match self.take_load() {
            Load::Idle(reader) | Load::Wanted(reader, _) => Load::Idle(reader),
            Load::Running { task, wanted, .. } => Load::Running { task, wanted, instead: Some(None) },
        };
    }

    fn take_load(&mut self) -> Load {
        std::mem::replace(&mut self.load, Load::Idle(AuditReader::new(&self.path, &self.replica)))
    }

    fn begin_load(&mut self, now: Instant) {
        let is_wanted = matches!(self.load, Load::Wanted(..));
        if !is_wanted || self.load_from.is_some_and(|from| now < from) {
            return;
        }
        self.load = match self.take_load() {
            Load::Wanted(mut reader, wanted) => {
                self.load_from = None;
                let work = move || {
                    let batch = reader.read(wanted.after, wanted.bytes_max);
                    (reader, batch)
                };
                Load::Running { task: offload(work), wanted, instead: None }
            }
            other => other,
        };
    }

    fn poll_load(&mut self, cx: &mut Context<'_>, now: Instant) {
        let Load::Running { task, wanted, instead } = &mut self.load else { return };
        let Poll::Ready(done) = Pin::new(task).poll(cx) else { return };
        let (wanted, instead) = (*wanted, *instead);
        // A reader is lost with its thread. Another one finds its place again.
        let fresh = || AuditReader::new(&self.path, &self.replica);
        let (reader, batch) = done.unwrap_or_else(|error| (fresh(), Err(error)));
        match (instead, batch) {
            (Some(None), _) => self.load = Load::Idle(reader),
            (Some(Some(wanted)), _) => self.load = Load::Wanted(reader, wanted),
            (None, Err(error)) => {
                self.load = Load::Wanted(reader, wanted);
                self.load_from = Some(now + RETRY);
                if !std::mem::replace(&mut self.is_unreadable, true) {
                    let path = self.path.display();
                    let text = format!("the audit log {path} cannot be read, so no records are published ({error})");
                    self.noticed.push(Noticed::Unreadable(text));
                }
            }
            (None, Ok(batch)) => {
                self.load = Load::Idle(reader);
                self.is_unreadable = false;
                if batch.is_end && !self.is_hasty {
                    self.load_from = Some(now + PACE);
                }
                self.loaded(wanted.after, batch, now);
            }
        }
    }

    fn loaded(&mut self, after: Option<u64>, batch: Batch, now: Instant) {
        // The log may have grown since its last number was reported.
        self.appended = batch.records.last().map_or(self.appended, |line| self.appended.max(line.number));
        if let Some(Missing { after, before }) = batch.missing {
            let (after, before) = (audit_log::id(&self.replica, after), audit_log::id(&self.replica, before));
            let text = "were removed from the local files before they were published";
            self.noticed.push(Noticed::Missing(format!("the records after {after} and before {before} {text}")));
        }
        let is_missing = batch.missing.is_some();
        self.tell(Event::Loaded(Loaded { after, lines: batch.records, is_end: batch.is_end, is_missing }), now);
    }

    fn is_published(&mut self, number: u64) {
        self.mark.now.published = self.mark.now.published.max(number);
    }

    /// Compares the local log with the stream, whose last record has this number.
    fn compare(&mut self, number: u64, now: Instant) {
        if self.appended < number {
            let last = audit_log::id(&self.replica, number);
            let text = format!(
                "the cluster already has records of this replica up to {last}, so local records with lower numbers are not \
                 published"
            );
            self.noticed.push(Noticed::Ahead { number, text });
            self.appended(number, now);
        }
    }
}

impl StoredMark {
    fn due(&self) -> Option<Instant> {
        let gap = if self.stored == Some(self.now) { STORE_GAP_MAX } else { STORE_GAP };
        self.storing.is_none().then(|| self.stored_at + gap)
    }

    fn poll(&mut self, cx: &mut Context<'_>, path: &Path, replica: &str, now: Instant) {
        if self.due().is_some_and(|due| due <= now) {
            let (path, replica, mark) = (path.to_owned(), replica.to_owned(), self.now);
            (self.stored, self.stored_at) = (Some(mark), now);
            self.storing = Some(offload(move || audit_retention::store(&path, &replica, mark)));
        }
        if let Some(storing) = &mut self.storing
            && let Poll::Ready(stored) = Pin::new(storing).poll(cx)
        {
            self.storing = None;
            // Until it can be stored, logs are kept longer.
            if !matches!(stored, Ok(Ok(()))) {
                self.stored = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{audit::Audit, audit_numbers::Numbers};
    use std::{collections::VecDeque, fs, future::poll_fn, rc::Rc};
    use tempfile::TempDir;
    use tokio::runtime::Runtime;

    /// A stream in memory, with the requests that it has not answered.
    #[derive(Default)]
    struct Stream {
        entries: Vec<(String, Bytes)>,
        /// As many sequences belong to other replicas.
        base: u64,
        requests: VecDeque<Request>,
    }

    #[derive(Debug)]
    enum Request {
        ReadLast { ticket: u64 },
        Publish { id: String, expected_last: u64, body: Bytes, ticket: u64 },
    }

    impl AuditStream for Stream {
        fn read_last_audit(&mut self, ticket: u64) {
            self.requests.push_back(Request::ReadLast { ticket });
        }

        fn publish_audit(&mut self, id: String, expected_last: u64, body: Bytes, ticket: u64) {
            self.requests.push_back(Request::Publish { id, expected_last, body, ticket });
        }
    }

    impl Stream {
        fn last(&self) -> u64 {
            if self.entries.is_empty() { 0 } else { self.base + self.entries.len() as u64 }
        }

        fn read_last(&self) -> Option<AuditEntry> {
            let (id, body) = self.entries.last()?;
            Some(AuditEntry { sequence: self.last(), id: id.clone(), replica: "east".to_owned(), body: body.clone() })
        }

        fn publish(&mut self, id: String, expected_last: u64, body: Bytes) -> Written {
            if expected_last != self.last() {
                return Written::Conflict;
            }
            self.entries.push((id, body));
            Written::Done(self.last())
        }

        fn text(&self) -> String {
            self.entries.iter().map(|(_, body)| str::from_utf8(body).unwrap()).collect()
        }
    }

    struct World {
        _dir: TempDir,
        path: PathBuf,
        runtime: Rc<Runtime>,
        audit: Audit,
        numbers: Numbers,
        publisher: AuditPublisher,
        stream: Stream,
        now: Instant,
        noticed: Vec<Noticed>,
        written: String,
    }

    impl World {
        fn new() -> World {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("audit.jsonl");
            let now = Instant::now();
            let numbers = Numbers::begin(Some(&path), "east").0;
            World {
                _dir: dir,
                runtime: Rc::new(tokio::runtime::Builder::new_current_thread().build().unwrap()),
                audit: Audit::small(&path, 1_000),
                publisher: AuditPublisher::new("east", &path, numbers.written(), now),
                numbers,
                stream: Stream { base: 1_000, ..Stream::default() },
                now,
                noticed: Vec::new(),
                written: String::new(),
                path,
            }
        }

        fn write(&mut self, count: usize) {
            for _ in 0..count {
                let mut line = String::new();
                self.numbers.open_line(&mut line);
                line.push_str("\"timestamp\":\"x\"}\n");
                assert_eq!(self.audit.write(&line), None);
                self.numbers.all_written();
                self.written.push_str(&line);
            }
            self.publisher.appended(self.numbers.written(), self.now);
        }

        /// Another process of this replica, after `kill -9`.
        fn restart(&mut self) {
            self.audit = Audit::small(&self.path, 1_000);
            self.numbers = Numbers::begin(Some(&self.path), "east").0;
            self.publisher = AuditPublisher::new("east", &self.path, self.numbers.written(), self.now);
            self.stream.requests.clear();
        }

        /// Lets it run until it waits for the stream or for time to pass.
        fn settle(&mut self) {
            let runtime = Rc::clone(&self.runtime);
            loop {
                let World { publisher, stream, now, noticed, .. } = self;
                let is_busy = runtime.block_on(poll_fn(|cx| match publisher.poll(cx, stream, *now) {
                    Poll::Ready(one) => {
                        noticed.push(one);
                        Poll::Ready(true)
                    }
                    Poll::Pending if matches!(publisher.load, Load::Running { .. }) => Poll::Pending,
                    Poll::Pending if publisher.mark.storing.is_some() => Poll::Pending,
                    Poll::Pending => Poll::Ready(false),
                }));
                if !is_busy {
                    return;
                }
            }
        }

        /// Answers requests and lets time pass until nothing is to be done.
        fn run(&mut self) {
            for _ in 0..1_000 {
                self.settle();
                match self.stream.requests.pop_front() {
                    Some(Request::ReadLast { ticket }) => {
                        let last = self.stream.read_last();
                        self.publisher.last_read(ticket, Ok(last), self.now);
                    }
                    Some(Request::Publish { id, expected_last, body, ticket }) => {
                        let result = self.stream.publish(id, expected_last, body);
                        self.publisher.published(ticket, result, self.now);
                    }
                    None => match self.publisher.deadline().filter(|next| *next < self.now + Duration::from_secs(60)) {
                        Some(next) => self.now = self.now.max(next),
                        None => return,
                    },
                }
            }
            panic!("it does not come to rest");
        }

        /// What is stored.
        fn published(&self) -> u64 {
            audit_retention::stored(&self.path, "east").unwrap().published
        }

        fn next_request(&mut self) -> Request {
            self.settle();
            self.stream.requests.pop_front().expect("a request is made")
        }
    }

    #[test]
    fn records_are_published_in_order_and_the_number_is_stored() {
        let mut world = World::new();
        let first = world.numbers.written() + 1;
        world.write(100);
        world.settle();
        assert!(world.stream.requests.is_empty(), "not before it is connected");
        assert_eq!(world.publisher.backlog(), 100);
        world.publisher.connected(1_000, world.now);
        world.run();
        assert_eq!(world.stream.text(), world.written);
        assert_eq!(world.publisher.backlog(), 0);
        assert!(world.stream.entries.iter().all(|(_, body)| body.len() <= 500), "half of what NATS accepts");
        assert_eq!(world.published(), first + 99);
        for _ in 0..5 {
            world.write(3);
            world.run();
        }
        assert_eq!(world.stream.text(), world.written);
        assert_eq!(world.noticed, []);
        assert_eq!(world.published(), first + 114);
    }

    /// Also if the answer to the last message was lost, and if it takes effect late.
    #[test]
    fn nothing_is_lost_or_published_twice_after_a_disconnect_or_a_kill() {
        for is_killed in [false, true] {
            for takes_effect in [Some(false), Some(true), None] {
                let mut world = World::new();
                world.write(10);
                world.publisher.connected(1 << 20, world.now);
                world.run();
                world.write(10);
                world.now += PACE;
                let Request::Publish { id, expected_last, body, ticket } = world.next_request() else {
                    panic!("the last record is known")
                };
                if takes_effect == Some(false) {
                    world.stream.publish(id.clone(), expected_last, body.clone());
                }
                world.publisher.disconnected(world.now);
                world.write(10);
                if is_killed {
                    world.restart();
                }
                world.publisher.connected(1 << 20, world.now);
                if takes_effect == Some(true) {
                    // After the last record was read.
                    let Request::ReadLast { ticket } = world.next_request() else { panic!("it is read first") };
                    let last = world.stream.read_last();
                    world.publisher.last_read(ticket, Ok(last), world.now);
                    world.stream.publish(id, expected_last, body);
                }
                // A late answer says nothing about the requests that followed.
                world.publisher.published(ticket, Written::Done(7), world.now);
                world.run();
                assert_eq!(world.stream.text(), world.written, "{is_killed} {takes_effect:?}");
                assert_eq!((world.publisher.backlog(), world.noticed), (0, vec![]));
            }
        }
    }

    #[test]
    fn removed_records_are_reported_and_the_others_published() {
        let mut world = World::new();
        world.write(1);
        world.publisher.connected(1 << 20, world.now);
        world.run();
        world.publisher.disconnected(world.now);
        let before = world.written.len();
        world.write(60);
        let after = fs::read_to_string(&world.path).unwrap();
        for log in crate::state::audit::files(&world.path) {
            if log != world.path {
                fs::remove_file(log).unwrap();
            }
        }
        world.restart();
        world.publisher.connected(1 << 20, world.now);
        world.run();
        assert_eq!(world.stream.text(), world.written[..before].to_owned() + &after);
        let id = |line: &str| line.split('"').nth(3).unwrap().to_owned();
        let (last, first) = (id(&world.written), id(&after));
        let text = format!(
            "the records after {last} and before {first} were removed from the local files before they were published"
        );
        assert_eq!(world.noticed, [Noticed::Missing(text)]);
        assert_eq!(world.publisher.machine.counts().gaps, 1);
        assert_eq!(world.publisher.backlog(), 0);
    }

    /// The clock was set back and the files were lost.
    #[test]
    fn a_stream_that_is_ahead_of_the_local_log_is_reported() {
        let mut world = World::new();
        world.write(1);
        let number = world.numbers.written() + 1_000;
        world.stream.entries.push((format!("east-{number}"), Bytes::from_static(b"{}\n")));
        world.publisher.connected(1 << 20, world.now);
        world.run();
        let [Noticed::Ahead { number: found, text }] = &world.noticed[..] else { panic!("{:?}", world.noticed) };
        assert_eq!(*found, number);
        assert_eq!(
            *text,
            format!(
                "the cluster already has records of this replica up to east-{number}, so local records with lower numbers \
                 are not published"
            )
        );
        world.numbers.go_on_after(number);
        world.written.clear();
        world.write(2);
        world.run();
        assert_eq!(world.stream.text(), "{}\n".to_owned() + &world.written);
    }

    #[test]
    fn a_log_that_cannot_be_read_is_reported_once_and_read_later() {
        let mut world = World::new();
        world.write(1);
        let aside = world.path.with_file_name("aside");
        fs::rename(&world.path, &aside).unwrap();
        fs::create_dir(&world.path).unwrap();
        world.publisher.connected(1 << 20, world.now);
        for _ in 0..5 {
            world.settle();
            if let Some(Request::ReadLast { ticket }) = world.stream.requests.pop_front() {
                world.publisher.last_read(ticket, Ok(None), world.now);
            }
            world.now += RETRY;
        }
        assert!(matches!(&world.noticed[..], [Noticed::Unreadable(_)]), "{:?}", world.noticed);
        fs::remove_dir(&world.path).unwrap();
        fs::rename(&aside, &world.path).unwrap();
        world.run();
        assert_eq!(world.stream.text(), world.written);
    }

    #[test]
    fn reads_are_spaced_unless_the_gateway_ends() {
        let mut world = World::new();
        world.publisher.connected(1 << 20, world.now);
        world.write(1);
        world.run();
        world.now += PACE;
        world.write(1);
        assert!(matches!(world.next_request(), Request::Publish { .. }), "the first is read at once");
        world.publisher.disconnected(world.now);
        world.publisher.connected(1 << 20, world.now);
        let Request::ReadLast { ticket } = world.next_request() else { panic!("it is read first") };
        let last = world.stream.read_last();
        world.publisher.last_read(ticket, Ok(last), world.now);
        world.settle();
        assert!(world.stream.requests.is_empty());
        assert!(world.publisher.deadline().is_some_and(|deadline| deadline <= world.now + PACE));
        world.publisher.hurry();
        assert!(matches!(world.next_request(), Request::Publish { .. }));
    }
}
