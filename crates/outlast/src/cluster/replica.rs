//! This gateway as one replica of a cluster: drives the machines of `core::cluster` over NATS, in a task of its own. The
//! loop of the gateway, the HTTP front and its connections use it; it does not know what they do with its results.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet, VecDeque},
    future::poll_fn,
    path::PathBuf,
    rc::Rc,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use bytes::Bytes;
use outlast_core::{
    cluster::{
        BootTime, Instance,
        homes::{self, Home, Homes},
        leases::{self, Lease, Leases},
        shares::{self, Shares},
        streams::{self, End, Limits, Stream, Streams},
    },
    front::record::RecordKey,
    gateway::Switch,
};
use outlast_os as os;
use rustc_hash::{FxHashMap, FxHashSet};
use serde::{Deserialize, Serialize};

mod pipe;
mod sessions;

pub(crate) use pipe::{Pipe, PipeEnd};
pub(crate) use sessions::{ClusterStore, resolve};

use pipe::PipeState;
use sessions::{Resolution, SessionWrite};

use super::{
    NatsSettings,
    audit_publisher::{AuditPublisher, Noticed},
    nats::{self, Bucket, Expected, Nats, Presence, Probed, ReplyTo, ServerInfo},
};
use crate::{child::timer::Timer, gateway::session_store::StoreEvent};

/// The longest message between replicas: the longest body or line, and what is around it.
const MESSAGE_MAX: usize = (64 << 20) + (1 << 20);
/// Bytes of one stream that its reader has not consumed; further messages wait at the sender.
const WINDOW: usize = 1 << 20;
/// Bytes to one replica that it has not acknowledged; further messages wait.
const UNACKED_MAX: usize = 8 << 20;
/// Packets are no larger than this, even if the NATS server takes larger ones: a large packet delays the small ones behind it.
const PACKET_MAX: usize = 256 << 10;
/// How long requests of sessions wait for the first connection. Without one only sessions of this replica are served.
const CONNECT_MAX: Duration = Duration::from_secs(2);
/// How often the replica notices that it runs.
const TICK: Duration = Duration::from_millis(500);
/// A tick that comes so late means that this process did not run.
const PAUSE: Duration = Duration::from_secs(2);
/// How long a replica may be silent until it counts as lost.
const SILENT_AFTER: Duration = Duration::from_secs(3);
/// How often a replica is asked whether it is alive.
const CHECK_EVERY: Duration = Duration::from_millis(200);
/// A registration that was not renewed for so long has expired: NATS does not report that.
const PRESENCE_MAX: Duration = Duration::from_secs(12);
/// Events of NATS in one turn.
const EVENTS_MAX: usize = 256;

pub(crate) type SharedReplica = Rc<RefCell<Replica>>;

/// The first message of a stream.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Hello {
    /// Messages of a backend that the receiver owns.
    Backend(String),
    /// One HTTP request of a session whose home is the receiver.
    Request(Box<serde_json::value::RawValue>),
}

/// What the loop of the gateway is told.
#[derive(Debug)]
pub(crate) enum Heard {
    /// A replica wants to use a backend of this one. The stream is to be accepted or ended.
    BackendWanted {
        stream: Stream,
        from: Instance,
        backend: String,
    },
    /// A replica forwards a request of a session.
    RequestForwarded {
        stream: Stream,
        request: Bytes,
    },
    Said {
        stream: Stream,
        message: Bytes,
    },
    Ended {
        stream: Stream,
        how: End,
        unsent: Vec<Bytes>,
    },
    StartHost {
        backend: String,
        until: BootTime,
    },
    ExtendHost {
        backend: String,
        until: BootTime,
    },
    StopHost {
        backend: String,
        at_once: bool,
    },
    /// Calls of this backend go to another replica from now on, or to none.
    OwnerChanged {
        backend: String,
    },
    /// Another replica is the home of this session.
    SessionMoved {
        key: RecordKey,
    },
    Switched {
        what: Switch,
        off: bool,
    },
    ShareChanged {
        parts: u32,
    },
    RememberShare {
        parts: u32,
        age: Duration,
    },
    Operator {
        request: Bytes,
        reply: ReplyTo,
    },
    Asked {
        ticket: u64,
        result: Result<Bytes, String>,
    },
    AuditPage {
        ticket: u64,
        page: Result<nats::AuditPage, String>,
    },
    AuditReplicas {
        ticket: u64,
        replicas: Result<Vec<String>, String>,
    },
    AuditNoticed(Noticed),
    Connected,
    Disconnected,
    /// Another live replica has the name of this one: the gateway cannot continue as a replica.
    NameTaken(String),
    Note(String),
}

/// What an operation of NATS was for.
enum Purpose {
    LeaseRead(String),
    LeaseWrite { backend: String, attempt: u64 },
    HomeRead { key: RecordKey, number: u64 },
    HomeTake { key: RecordKey, number: u64 },
    Session { key: RecordKey },
    SharesRead,
    SharesWrite { attempt: u64 },
    Switch,
    Loop(u64),
}

pub(crate) struct Replica {
    name: String,
    cluster: String,
    instance: Instance,
    nats: Nats,
    streams: Streams,
    leases: Leases,
    homes: Homes,
    shares: Shares,
    /// None without a local log.
    audit: Option<AuditPublisher>,
    connection: Connection,
    /// By name, from the bucket, and when each was last renewed.
    presences: BTreeMap<String, (Presence, Instant)>,
    /// Buckets whose changes are not reported at the moment, and why.
    watches_down: BTreeMap<Bucket, String>,
    watches_lost: u64,
    owners: BTreeMap<String, (String, Instance)>,
    /// Owners that were lost. No stream is opened to one of them until it is heard from.
    lost_owners: FxHashSet<Instance>,
    /// The owners that streams of the loop lead to.
    owner_streams: FxHashMap<Stream, Instance>,
    /// Replicas whose life is in question, and since when.
    checks: FxHashMap<Instance, Check>,
    pipes: FxHashMap<Stream, PipeState>,
    resolutions: FxHashMap<u64, Resolution>,
    purposes: FxHashMap<u64, Purpose>,
    writes: FxHashMap<RecordKey, SessionWrite>,
    store_events: VecDeque<StoreEvent>,
    store_waker: Option<Waker>,
    /// Requests of sessions wait for the first connection until then.
    loading_until: Option<Instant>,
    next_ticket: u64,
    heard: VecDeque<Heard>,
    loop_waker: Option<Waker>,
    task_waker: Option<Waker>,
    timer: Timer,
    /// What the timer is set to.
    timer_at: Option<Instant>,
    /// The loop or a task has used a stream since the last flush.
    must_flush: bool,
    next_tick: BootTime,
    is_closing: bool,
    links_lost: u64,
}

#[derive(Debug)]
pub(crate) struct Connection {
    pub is_up: bool,
    pub since: Instant,
    /// Of the last loss.
    pub why: Option<String>,
}

struct Check {
    since: Instant,
    /// When the next probe is due; none while one is under way.
    next: Option<Instant>,
}

fn boot_now() -> BootTime {
    BootTime(os::boot_time())
}

fn key_of(backend: &str) -> String {
    backend.bytes().map(|byte| format!("{byte:02x}")).collect()
}

fn name_of(key: &str) -> Option<String> {
    let digits = key.as_bytes();
    let bytes: Option<Vec<u8>> = digits
        .chunks(2)
        .map(|pair| std::str::from_utf8(pair).ok().and_then(|pair| u8::from_str_radix(pair, 16).ok()))
        .collect();
    String::from_utf8(bytes?).ok()
}

impl Replica {
    /// Begins to connect. `address` is where clients reach this replica.
    /// `log` is the local audit log, and the number of its last record.
    pub(crate) fn begin(settings: NatsSettings, address: Option<String>, log: Option<(PathBuf, u64)>) -> SharedReplica {
        let seed = crate::state::home::random();
        // An instance is never 0.
        let instance = crate::state::home::random() | 1;
        let (name, cluster) = (settings.replica.clone(), settings.cluster.clone());
        let limits =
            Limits { packet_max: PACKET_MAX, message_max: MESSAGE_MAX, window: WINDOW, unacked_max: UNACKED_MAX };
        let nats = Nats::connect(settings, instance, address);
        let audit = log.map(|(path, written)| AuditPublisher::new(&name, &path, written, Instant::now()));
        let replica = Replica {
            streams: Streams::new(instance, seed, limits),
            leases: Leases::new(name.clone(), instance),
            homes: Homes::new(Home { name: name.clone(), instance }),
            shares: Shares::new(name.clone(), instance, seed.rotate_left(17)),
            name,
            cluster,
            instance,
            nats,
            audit,
            connection: Connection { is_up: false, since: Instant::now(), why: None },
            presences: BTreeMap::new(),
            watches_down: BTreeMap::new(),
            watches_lost: 0,
            owners: BTreeMap::new(),
            lost_owners: FxHashSet::default(),
            owner_streams: FxHashMap::default(),
            checks: FxHashMap::default(),
            pipes: FxHashMap::default(),
            resolutions: FxHashMap::default(),
            purposes: FxHashMap::default(),
            writes: FxHashMap::default(),
            store_events: VecDeque::new(),
            loading_until: Some(Instant::now() + CONNECT_MAX),
            store_waker: None,
            next_ticket: 1,
            heard: VecDeque::new(),
            loop_waker: None,
            task_waker: None,
            timer: Timer::default(),
            timer_at: None,
            must_flush: false,
            next_tick: boot_now() + TICK,
            is_closing: false,
            links_lost: 0,
        };
        let shared = Rc::new(RefCell::new(replica));
        tokio::task::spawn_local(Replica::run(shared.clone()));
        shared
    }

    async fn run(shared: SharedReplica) {
        poll_fn(|cx| shared.borrow_mut().poll(cx)).await;
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.task_waker.as_ref().is_none_or(|known| !known.will_wake(cx.waker())) {
            self.task_waker = Some(cx.waker().clone());
        }
        self.notice_pause();
        for turn in 0..=EVENTS_MAX {
            if turn == EVENTS_MAX {
                cx.waker().wake_by_ref();
                break;
            }
            let Poll::Ready(heard) = self.nats.poll(cx) else { break };
            self.nats_heard(heard);
        }
        self.poll_audit(cx);
        self.flush();
        loop {
            self.timer_at = self.deadline();
            if !self.timer.poll(self.timer_at, Instant::now(), cx) {
                break;
            }
            self.time_passed();
            self.poll_audit(cx);
            self.flush();
        }
        if self.is_closing { Poll::Ready(()) } else { Poll::Pending }
    }

    fn poll_audit(&mut self, cx: &mut Context<'_>) {
        let Some(mut audit) = self.audit.take() else { return };
        while let Poll::Ready(noticed) = audit.poll(cx, &mut self.nats, Instant::now()) {
            self.hear(Heard::AuditNoticed(noticed));
        }
        self.audit = Some(audit);
    }

    /// A process that was stopped, or a machine that was suspended, may have lost its leases and sessions meanwhile.
    fn notice_pause(&mut self) {
        let now = boot_now();
        if now.since(self.next_tick) >= PAUSE {
            self.home_event(homes::Event::Paused);
            // Renewals of the others wait to be read.
            let now = Instant::now();
            self.presences.values_mut().for_each(|(_, renewed)| *renewed = now);
        }
        if self.next_tick <= now {
            self.next_tick = now + TICK;
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let (now, boot) = (Instant::now(), boot_now());
        let soon = |at: BootTime| now + at.since(boot);
        let boots = [self.leases.deadline(), self.shares.deadline(), Some(self.next_tick)];
        let checks = self.checks.values().filter_map(|check| check.next);
        let machines = [self.streams.deadline(), self.homes.deadline()].into_iter().flatten();
        let audit = self.audit.as_ref().and_then(AuditPublisher::deadline);
        let own = checks.chain(self.loading_until).chain(audit);
        boots.into_iter().flatten().map(soon).chain(machines).chain(own).min()
    }

    fn time_passed(&mut self) {
        self.notice_pause();
        if self.loading_until.is_some_and(|until| until <= Instant::now()) {
            self.end_loading();
        }
        self.stream_event(streams::Event::TimePassed);
        self.lease_event(leases::Event::TimePassed);
        self.home_event(homes::Event::TimePassed);
        self.share_event(shares::Event::TimePassed);
        self.probe_due_checks();
        self.expire_presences();
    }

    /// There is nothing to load: a record is read when its session is asked for.
    fn end_loading(&mut self) {
        if self.loading_until.take().is_some() {
            self.store_event(StoreEvent::Loaded(Vec::new()));
        }
    }

    fn wake_task(&self) {
        self.task_waker.iter().for_each(Waker::wake_by_ref);
    }

    fn hear(&mut self, heard: Heard) {
        self.heard.push_back(heard);
        self.loop_waker.take().into_iter().for_each(Waker::wake);
    }

    fn ticket(&mut self, purpose: Purpose) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.purposes.insert(ticket, purpose);
        ticket
    }

    // ---- NATS --------------------------------------------------------------------------------------------------

    fn nats_heard(&mut self, heard: nats::Heard) {
        match heard {
            nats::Heard::Connected { payload_max } => {
                self.audit.iter_mut().for_each(|audit| audit.connected(payload_max, Instant::now()));
                self.connection = Connection { is_up: true, since: Instant::now(), why: None };
                let mut actions = Vec::new();
                self.streams.set_packet_max(PACKET_MAX.min(payload_max), &mut actions);
                self.stream_actions(actions);
                self.stream_event(streams::Event::Connected);
                self.lease_event(leases::Event::Connected);
                self.home_event(homes::Event::Connected);
                self.share_event(shares::Event::Connected);
                self.end_loading();
                self.hear(Heard::Connected);
            }
            nats::Heard::Disconnected { why } => {
                self.hear(Heard::Note(format!("the connection to NATS is lost: {why}; it is opened again")));
                self.connection = Connection { is_up: false, since: Instant::now(), why: Some(why) };
                // They begin anew with the next connection.
                self.watches_down.clear();
                self.audit.iter_mut().for_each(|audit| audit.disconnected(Instant::now()));
                self.stream_event(streams::Event::Disconnected);
                self.lease_event(leases::Event::Disconnected);
                self.home_event(homes::Event::Disconnected);
                self.share_event(shares::Event::Disconnected);
                self.hear(Heard::Disconnected);
            }
            nats::Heard::NameTaken { by } => {
                let at = by.address.map_or_else(String::new, |address| format!(" at {address}"));
                self.hear(Heard::NameTaken(format!("another replica named `{}` is running{at}", by.name)));
            }
            nats::Heard::Packet { from, packet } => self.stream_event(streams::Event::Received { from, packet }),
            nats::Heard::Probe { from, packet, reply } => {
                let answer = self.streams.probed(from, &packet, Instant::now());
                self.nats.answer_probe(reply, answer);
            }
            nats::Heard::ProbeEnded { of, result } => self.probe_ended(of, result),
            nats::Heard::Operator { request, reply } => self.hear(Heard::Operator { request, reply }),
            nats::Heard::Asked { ticket, result } => {
                if let Some(Purpose::Loop(ticket)) = self.purposes.remove(&ticket) {
                    self.hear(Heard::Asked { ticket, result });
                }
            }
            nats::Heard::Read { ticket, found } => self.was_read(ticket, found),
            nats::Heard::Written { ticket, result } => self.was_written(ticket, result),
            nats::Heard::Changed { bucket, key, revision, value } => self.changed(bucket, &key, revision, value),
            nats::Heard::Watching { bucket } => {
                if self.watches_down.remove(&bucket).is_some() {
                    self.hear(Heard::Note(format!("changes of `{}` in NATS are reported again", bucket.name())));
                }
                self.watch_changed(bucket);
            }
            nats::Heard::WatchLost { bucket, why } => {
                self.hear(Heard::Note(format!(
                    "changes of `{}` in NATS are not reported at the moment: {why}; the watch is opened again",
                    bucket.name()
                )));
                self.watches_lost += 1;
                self.watches_down.insert(bucket, why);
                self.watch_changed(bucket);
            }
            nats::Heard::LastAudit { ticket, last } => {
                if let Some(audit) = &mut self.audit {
                    audit.last_read(ticket, last, Instant::now());
                }
            }
            nats::Heard::AuditPublished { ticket, result } => {
                if let Some(audit) = &mut self.audit {
                    audit.published(ticket, result, Instant::now());
                }
            }
            nats::Heard::AuditPage { ticket, page } => {
                if let Some(Purpose::Loop(ticket)) = self.purposes.remove(&ticket) {
                    self.hear(Heard::AuditPage { ticket, page });
                }
            }
            nats::Heard::AuditReplicas { ticket, replicas } => {
                if let Some(Purpose::Loop(ticket)) = self.purposes.remove(&ticket) {
                    self.hear(Heard::AuditReplicas { ticket, replicas });
                }
            }
            nats::Heard::Note(text) => self.hear(Heard::Note(text)),
        }
    }

    fn was_read(&mut self, ticket: u64, found: Result<(u64, Option<Bytes>), String>) {
        match self.purposes.remove(&ticket) {
            // A read that fails is not reported; the machine asks again.
            Some(Purpose::LeaseRead(backend)) => {
                if let Ok((revision, value)) = found {
                    let lease = value.map(|value| Lease::decode(&value).unwrap_or_else(|_| Lease::unreadable()));
                    self.lease_event(leases::Event::Changed { backend, revision, lease });
                }
            }
            Some(Purpose::HomeRead { key, number }) => {
                let found = match found {
                    Ok((revision, Some(value))) => match homes::decode(key, &value) {
                        Ok((record, home)) => homes::Found::Some(Box::new(homes::Stored { revision, record, home })),
                        Err(why) => {
                            self.hear(Heard::Note(format!(
                                "a session record in NATS cannot be used: {why}; its client must initialize again"
                            )));
                            homes::Found::None
                        }
                    },
                    Ok((_, None)) => homes::Found::None,
                    Err(_) => homes::Found::Failed,
                };
                self.home_event(homes::Event::Read { key, number, found });
            }
            Some(Purpose::SharesRead) => {
                let found = match found {
                    Ok((revision, Some(value))) => match shares::Table::decode(&value) {
                        Ok(table) => shares::Found::Some { revision, table },
                        Err(_) => shares::Found::Failed,
                    },
                    Ok((_, None)) => shares::Found::None,
                    Err(_) => shares::Found::Failed,
                };
                self.share_event(shares::Event::Read { found });
            }
            _ => {}
        }
    }

    fn was_written(&mut self, ticket: u64, result: nats::Written) {
        match self.purposes.remove(&ticket) {
            Some(Purpose::LeaseWrite { backend, attempt }) => {
                let result = match result {
                    nats::Written::Done(revision) => leases::Written::Done { revision },
                    nats::Written::Conflict => leases::Written::Conflict,
                    nats::Written::Unknown(_) => leases::Written::Unknown,
                };
                self.lease_event(leases::Event::Written { backend, attempt, result });
            }
            Some(Purpose::HomeTake { key, number }) => {
                let result = match result {
                    nats::Written::Done(revision) => homes::Written::Done { revision },
                    nats::Written::Conflict => homes::Written::Conflict,
                    nats::Written::Unknown(_) => homes::Written::Failed,
                };
                self.home_event(homes::Event::Written { key, number, result });
            }
            Some(Purpose::Session { key }) => self.session_written(key, result),
            Some(Purpose::SharesWrite { attempt }) => {
                let result = match result {
                    nats::Written::Done(revision) => shares::Written::Done { revision },
                    nats::Written::Conflict => shares::Written::Conflict,
                    nats::Written::Unknown(_) => shares::Written::Unknown,
                };
                self.share_event(shares::Event::Written { attempt, result });
            }
            Some(Purpose::Switch) if !matches!(result, nats::Written::Done(_)) => {
                let text = "a switch could not be stored in NATS, so it applies to this replica only; set it again";
                self.hear(Heard::Note(text.to_owned()));
            }
            _ => {}
        }
    }

    fn changed(&mut self, bucket: Bucket, key: &str, revision: u64, value: Option<Bytes>) {
        match bucket {
            Bucket::Replicas => self.presence_changed(key, value.as_deref()),
            Bucket::Leases => {
                let Some(backend) = name_of(key) else { return };
                let lease = value.map(|value| Lease::decode(&value).unwrap_or_else(|_| Lease::unreadable()));
                // It has just renewed its lease, so it runs.
                lease.iter().for_each(|lease| self.owner_is_back(lease.instance));
                self.lease_event(leases::Event::Changed { backend, revision, lease });
            }
            Bucket::Sessions => {
                let Ok(key) = u128::from_str_radix(key, 16).map(RecordKey) else { return };
                if self.homes.is_of_interest(key) {
                    let home = value.and_then(|value| homes::decode_home(&value).ok());
                    self.home_event(homes::Event::Changed { key, revision, home });
                }
            }
            Bucket::State => match (key.split_once('.'), value) {
                (None, value) if key == "shares" => {
                    let table = value.and_then(|value| shares::Table::decode(&value).ok());
                    self.share_event(shares::Event::Changed { revision, table });
                }
                (Some(("switch", what)), Some(value)) => {
                    let off = &*value == b"off";
                    let what = match what.split_once('.') {
                        Some(("tool", name)) => name_of(name).map(Switch::Tool),
                        Some(("backend", name)) => name_of(name).map(Switch::Backend),
                        _ => None,
                    };
                    what.into_iter().for_each(|what| self.hear(Heard::Switched { what, off }));
                }
                _ => {}
            },
        }
    }

    /// A watch ended, or begins: what changed in between was not reported. Other entries than those of sessions are all
    /// reported after the begin.
    fn watch_changed(&mut self, bucket: Bucket) {
        match bucket {
            Bucket::Sessions => self.home_event(homes::Event::Missed),
            Bucket::Replicas => {
                let now = Instant::now();
                self.presences.values_mut().for_each(|(_, renewed)| *renewed = now);
            }
            Bucket::Leases | Bucket::State => {}
        }
    }

    /// Forgets replicas that ended without removing their registration. Whether one is alive is found out by probes.
    fn expire_presences(&mut self) {
        if !self.connection.is_up || self.watches_down.contains_key(&Bucket::Replicas) {
            return;
        }
        let (now, own) = (Instant::now(), self.instance);
        self.presences.retain(|_, (presence, renewed)| presence.instance == own || now < *renewed + PRESENCE_MAX);
    }

    fn presence_changed(&mut self, name: &str, value: Option<&[u8]>) {
        let presence = value.and_then(Presence::read);
        let before = match &presence {
            Some(presence) => self.presences.insert(name.to_owned(), (presence.clone(), Instant::now())),
            None => self.presences.remove(name),
        };
        if let Some((before, _)) = before
            && presence.is_none_or(|presence| presence.instance != before.instance)
        {
            self.instance_lost(before.instance);
            self.stream_event(streams::Event::Left { instance: before.instance });
        }
    }

    // ---- whether a replica is alive ----------------------------------------------------------------------------------

    fn probe_ended(&mut self, of: Instance, result: Probed) {
        match result {
            Probed::Answered(packet) => {
                self.owner_is_back(of);
                if self.checks.remove(&of).is_some() {
                    self.home_event(homes::Event::Alive { instance: of });
                }
                if !packet.is_empty() {
                    self.stream_event(streams::Event::ProbeAnswered { of, packet });
                }
            }
            Probed::Dead => {
                self.instance_lost(of);
                self.stream_event(streams::Event::ProbeFailed { of, is_dead: true });
            }
            Probed::Failed => {
                let now = Instant::now();
                let is_silent = match self.checks.get_mut(&of) {
                    Some(check) => {
                        check.next = Some(now + CHECK_EVERY);
                        check.since + SILENT_AFTER <= now
                    }
                    None => false,
                };
                if is_silent {
                    self.instance_lost(of);
                }
                self.stream_event(streams::Event::ProbeFailed { of, is_dead: false });
            }
        }
    }

    fn instance_lost(&mut self, instance: Instance) {
        self.checks.remove(&instance);
        self.home_event(homes::Event::Lost { instance });
    }

    /// It is asked whether it is alive after all: the connection may have been lost on this side.
    fn owner_lost(&mut self, owner: Instance) {
        let now = Instant::now();
        self.lost_owners.insert(owner);
        self.checks.entry(owner).or_insert(Check { since: now, next: Some(now + CHECK_EVERY) });
    }

    /// An owner that was lost is heard from.
    fn owner_is_back(&mut self, owner: Instance) {
        if self.lost_owners.remove(&owner) {
            let owned: Vec<String> =
                self.owners.iter().filter(|(_, (_, of))| *of == owner).map(|(backend, _)| backend.clone()).collect();
            owned.into_iter().for_each(|backend| self.hear(Heard::OwnerChanged { backend }));
        }
    }

    fn probe_due_checks(&mut self) {
        let now = Instant::now();
        let due: Vec<Instance> = self
            .checks
            .iter_mut()
            .filter(|(_, check)| check.next.is_some_and(|next| next <= now))
            .map(|(instance, check)| {
                check.next = None;
                *instance
            })
            .collect();
        due.into_iter().for_each(|instance| self.nats.probe(instance, Bytes::new(), CHECK_EVERY));
    }

    // ---- streams -------------------------------------------------------------------------------------------------

    fn stream_event(&mut self, event: streams::Event) {
        let mut actions = Vec::new();
        self.streams.handle(event, Instant::now(), &mut actions);
        self.stream_actions(actions);
    }

    fn flush(&mut self) {
        self.must_flush = false;
        let mut actions = Vec::new();
        self.streams.flush(Instant::now(), &mut actions);
        self.stream_actions(actions);
    }

    fn stream_actions(&mut self, actions: Vec<streams::Action>) {
        for action in actions {
            match action {
                streams::Action::Publish { to, packet } => self.nats.publish(to, packet),
                streams::Action::Probe { to, packet, within } => self.nats.probe(to, packet, within),
                streams::Action::Accept { stream, from, hello } => self.accepted(stream, from, &hello),
                streams::Action::Deliver { stream, message } => match self.pipes.get_mut(&stream) {
                    Some(pipe) => {
                        pipe.inbox.push_back(message);
                        pipe.reader.take().into_iter().for_each(Waker::wake);
                    }
                    None => self.hear(Heard::Said { stream, message }),
                },
                streams::Action::Room { stream } => {
                    if let Some(pipe) = self.pipes.get_mut(&stream) {
                        pipe.writer.take().into_iter().for_each(Waker::wake);
                    }
                }
                streams::Action::End { stream, how, is_opened, unsent } => match self.pipes.get_mut(&stream) {
                    Some(pipe) => {
                        pipe.end = Some(PipeEnd { how, is_opened, unsent });
                        pipe.reader.take().into_iter().chain(pipe.writer.take()).for_each(Waker::wake);
                    }
                    None => {
                        if let (Some(owner), End::Lost(_)) = (self.owner_streams.remove(&stream), &how) {
                            self.owner_lost(owner);
                        }
                        self.hear(Heard::Ended { stream, how, unsent });
                    }
                },
            }
        }
    }

    fn accepted(&mut self, stream: Stream, from: Instance, hello: &[u8]) {
        match serde_json::from_slice(hello) {
            Ok(Hello::Backend(backend)) => self.hear(Heard::BackendWanted { stream, from, backend }),
            Ok(Hello::Request(request)) => {
                // Its messages are read by the task that serves it.
                self.pipes.insert(stream, PipeState::default());
                let request = Bytes::copy_from_slice(request.get().as_bytes());
                self.hear(Heard::RequestForwarded { stream, request });
            }
            Err(_) => {
                let why = "the first message cannot be read".to_owned();
                self.stream_event(streams::Event::Aborted { stream, why });
            }
        }
    }

    /// At the end of each turn of the loop: what the loop said in it is sent now, without a turn of the task.
    pub(crate) fn loop_turned(&mut self) {
        if !self.must_flush {
            return;
        }
        self.flush();
        // Later deadlines are found when the timer fires.
        if self.streams.deadline().is_some_and(|next| self.timer_at.is_none_or(|at| next < at)) {
            self.wake_task();
        }
    }

    /// A stream to a backend at its owner. None if no replica owns it.
    pub(crate) fn open_backend(&mut self, backend: &str) -> Option<Stream> {
        let to = self.owners.get(backend)?.1;
        if self.lost_owners.contains(&to) {
            return None;
        }
        let hello = serde_json::to_vec(&Hello::Backend(backend.to_owned())).unwrap_or_default();
        let stream = self.streams.next_stream();
        self.owner_streams.insert(stream, to);
        self.stream_event(streams::Event::Opened { stream, to, hello: hello.into() });
        self.must_flush = true;
        Some(stream)
    }

    /// What the loop does with streams takes effect at the end of its turn.
    pub(crate) fn send(&mut self, stream: Stream, message: Bytes) {
        self.stream_event(streams::Event::Sent { stream, message });
        self.must_flush = true;
    }

    /// The loop has dealt with a message of so many bytes.
    pub(crate) fn consumed(&mut self, stream: Stream, bytes: usize) {
        self.stream_event(streams::Event::Consumed { stream, bytes });
        self.must_flush = true;
    }

    pub(crate) fn close(&mut self, stream: Stream) {
        self.owner_streams.remove(&stream);
        self.stream_event(streams::Event::Closed { stream });
        self.must_flush = true;
    }

    pub(crate) fn abort(&mut self, stream: Stream, why: &str) {
        self.owner_streams.remove(&stream);
        self.stream_event(streams::Event::Aborted { stream, why: why.to_owned() });
        self.must_flush = true;
    }

    // ---- leases, shares and switches -------------------------------------------------------------------------------

    /// The backends that one replica runs for all.
    pub(crate) fn configure(&mut self, backends: BTreeSet<String>) {
        self.lease_event(leases::Event::Configured { backends });
        self.wake_task();
    }

    /// No process of this backend is left here.
    pub(crate) fn host_gone(&mut self, backend: &str) {
        self.lease_event(leases::Event::HostGone { backend: backend.to_owned() });
        self.wake_task();
    }

    fn lease_event(&mut self, event: leases::Event) {
        let mut actions = Vec::new();
        self.leases.handle(event, boot_now(), &mut actions);
        for action in actions {
            match action {
                leases::Action::Read { backend } => {
                    let key = key_of(&backend);
                    let ticket = self.ticket(Purpose::LeaseRead(backend));
                    self.nats.read(Bucket::Leases, &key, ticket);
                }
                leases::Action::Write { backend, expected, lease } => {
                    let key = key_of(&backend);
                    let ticket = self.ticket(Purpose::LeaseWrite { backend, attempt: lease.attempt });
                    self.nats.write(Bucket::Leases, &key, expected_of(expected), lease.encode().into(), ticket);
                }
                leases::Action::Start { backend, until } => self.hear(Heard::StartHost { backend, until }),
                leases::Action::Extend { backend, until } => self.hear(Heard::ExtendHost { backend, until }),
                leases::Action::Stop { backend, at_once } => self.hear(Heard::StopHost { backend, at_once }),
                leases::Action::Owner { backend, owner } => {
                    match owner {
                        Some(owner) => drop(self.owners.insert(backend.clone(), owner)),
                        None => drop(self.owners.remove(&backend)),
                    }
                    self.hear(Heard::OwnerChanged { backend });
                }
            }
        }
    }

    /// What an earlier process of this replica stored of its share.
    pub(crate) fn remember_share(&mut self, parts: u32, age: Duration) {
        self.share_event(shares::Event::Remembered { parts, age });
    }

    fn share_event(&mut self, event: shares::Event) {
        let mut actions = Vec::new();
        self.shares.handle(event, boot_now(), &mut actions);
        for action in actions {
            match action {
                shares::Action::Read => {
                    let ticket = self.ticket(Purpose::SharesRead);
                    self.nats.read(Bucket::State, SHARES, ticket);
                }
                shares::Action::Write { attempt, expected, table } => {
                    let ticket = self.ticket(Purpose::SharesWrite { attempt });
                    self.nats.write(Bucket::State, SHARES, expected_of(expected), table.encode().into(), ticket);
                }
                shares::Action::Share { parts } => self.hear(Heard::ShareChanged { parts }),
                shares::Action::Remember { parts, age } => self.hear(Heard::RememberShare { parts, age }),
            }
        }
    }

    /// Stores a switch for all replicas.
    pub(crate) fn switch(&mut self, what: &Switch, off: bool) {
        let key = match what {
            Switch::Tool(name) => format!("switch.tool.{}", key_of(name)),
            Switch::Backend(name) => format!("switch.backend.{}", key_of(name)),
        };
        let value: &'static [u8] = if off { b"off" } else { b"on" };
        let ticket = self.ticket(Purpose::Switch);
        self.nats.write(Bucket::State, &key, Expected::Any, Bytes::from_static(value), ticket);
        self.wake_task();
    }

    // ---- for the loop of the gateway -------------------------------------------------------------------------------

    /// Messages of other replicas are taken here, without a turn of the task.
    pub(crate) fn poll_heard(&mut self, cx: &mut Context<'_>) -> Poll<Heard> {
        // While the loop asks, it is not woken.
        let waker = self.loop_waker.take();
        loop {
            if let Some(heard) = self.heard.pop_front() {
                return Poll::Ready(heard);
            }
            let Poll::Ready(heard) = self.nats.poll_message(cx) else { break };
            self.notice_pause();
            self.nats_heard(heard);
            self.must_flush = true;
        }
        self.loop_waker = waker.filter(|waker| waker.will_wake(cx.waker())).or_else(|| Some(cx.waker().clone()));
        Poll::Pending
    }

    /// The local audit log has records up to this number.
    pub(crate) fn appended(&mut self, up_to: u64) {
        self.audit.iter_mut().for_each(|audit| audit.appended(up_to, Instant::now()));
        self.wake_task();
    }

    /// Asks another replica. [`Heard::Asked`] follows.
    pub(crate) fn ask(&mut self, to: Instance, ticket: u64, request: Bytes, within: Duration) {
        let ticket = self.ticket(Purpose::Loop(ticket));
        self.nats.ask(to, ticket, request, within);
        self.wake_task();
    }

    pub(crate) fn answer(&mut self, reply: ReplyTo, answer: Bytes) {
        self.nats.answer(reply, answer);
        self.wake_task();
    }

    /// [`Heard::AuditPage`] follows.
    pub(crate) fn read_audit(&mut self, from: nats::AuditFrom, ticket: u64) {
        let ticket = self.ticket(Purpose::Loop(ticket));
        self.nats.read_audit(from, ticket);
        self.wake_task();
    }

    /// The replicas with records in the audit stream. [`Heard::AuditReplicas`] follows.
    pub(crate) fn audit_replicas(&mut self, ticket: u64) {
        let ticket = self.ticket(Purpose::Loop(ticket));
        self.nats.audit_replicas(ticket);
        self.wake_task();
    }

    /// The gateway stops. Leases are released when their hosts are gone.
    pub(crate) fn stop(&mut self) {
        self.lease_event(leases::Event::StopAsked);
        self.share_event(shares::Event::StopAsked);
        self.audit.iter_mut().for_each(AuditPublisher::hurry);
        self.wake_task();
    }

    /// Everything that this replica holds is released.
    pub(crate) fn is_over(&self) -> bool {
        let is_published = self.audit_backlog().is_none_or(|backlog| backlog == 0);
        !self.connection.is_up || self.leases.is_over() && self.shares.is_over() && is_published
    }

    /// Leaves the cluster. Nothing is sent or received after it.
    pub(crate) async fn leave(shared: SharedReplica) {
        let closing = {
            let mut replica = shared.borrow_mut();
            replica.is_closing = true;
            replica.wake_task();
            replica.nats.close()
        };
        closing.await;
    }

    // ---- for operators -------------------------------------------------------------------------------------------

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn cluster(&self) -> &str {
        &self.cluster
    }

    pub(crate) fn instance(&self) -> Instance {
        self.instance
    }

    pub(crate) fn connection(&self) -> &Connection {
        &self.connection
    }

    pub(crate) fn server(&self) -> Option<ServerInfo> {
        self.nats.server()
    }

    pub(crate) fn presences(&self) -> impl Iterator<Item = &Presence> {
        self.presences.values().map(|(presence, _)| presence)
    }

    /// Buckets whose changes are not reported at the moment, and why.
    pub(crate) fn watches_down(&self) -> impl Iterator<Item = (Bucket, &str)> {
        self.watches_down.iter().map(|(bucket, why)| (*bucket, why.as_str()))
    }

    /// Watches that failed, since the start.
    pub(crate) fn watches_lost(&self) -> u64 {
        self.watches_lost
    }

    pub(crate) fn owner(&self, backend: &str) -> Option<&(String, Instance)> {
        self.owners.get(backend)
    }

    /// How long the lease of this replica on a backend is valid, if it has it.
    pub(crate) fn lease_left(&self, backend: &str) -> Option<Duration> {
        let expires = self.leases.views().find(|view| view.backend == backend)?.expires?;
        Some(expires.since(boot_now()))
    }

    pub(crate) fn owned(&self) -> usize {
        self.owners.values().filter(|(_, instance)| *instance == self.instance).count()
    }

    pub(crate) fn parts(&self) -> u32 {
        self.shares.parts()
    }

    pub(crate) fn home_counts(&self) -> homes::Counts {
        self.homes.counts()
    }

    pub(crate) fn stream_counts(&self) -> streams::Counts {
        self.streams.counts()
    }

    pub(crate) fn link_lost(&mut self) {
        self.links_lost += 1;
    }

    /// Streams to owners of backends that were lost, since the start.
    pub(crate) fn links_lost(&self) -> u64 {
        self.links_lost
    }

    pub(crate) fn audit_backlog(&self) -> Option<u64> {
        self.audit.as_ref().map(AuditPublisher::backlog)
    }
}

/// The key of all shares.
const SHARES: &str = "shares";

/// Of the machines, for which 0 means that there must be no key.
fn expected_of(revision: u64) -> Expected {
    if revision == 0 { Expected::Absent } else { Expected::Revision(revision) }
}
