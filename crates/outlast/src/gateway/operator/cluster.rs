//! Requests of operators that concern all replicas of a cluster: this gateway asks the others and joins their answers.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use outlast_control::{
    cluster::{
        AUDIT_PAGE_BYTES_MAX, AuditPage, AuditRecord, ClusterAnswer, ClusterState, Counters, NOT_IN_CLUSTER, Nats,
        PlacedBackend, REPLICAS_ANSWER_MAX, Replica, ReplicaAnswer, SwitchedOff,
    },
    method::ClusterAudit,
    wire::Refusal,
};
use outlast_core::{
    cluster::Instance,
    gateway::{Event, Placement, Switch},
};
use outlast_os as os;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::{Driver, Operator, state::Placed};
use crate::{
    cluster::{
        nats::{self, AuditFrom, ReplyTo},
        replica::SharedReplica,
    },
    state::home,
};

/// Tickets of requests that come from another replica.
const REMOTE: u64 = 1 << 62;
/// How long a restart at another replica may take; then its operator is told that it did not answer.
const RESTART_MAX: Duration = Duration::from_secs(60);
/// A longer file with a share of rates is not read.
const SHARE_FILE_MAX: u64 = 1024;

/// What an operator wants of all replicas.
#[derive(Debug)]
pub(in crate::gateway) enum ClusterRequest {
    /// Answered with a [`ClusterState`].
    State,
    /// Answered with an [`AuditPage`].
    Audit(ClusterAudit),
    /// Answered with a [`ClusterAnswer`]. All backends if none is named.
    Restart { backend: Option<String>, reason: String },
}

/// What one replica asks of another.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Question {
    State,
    /// One backend, or all.
    Restart {
        backend: Option<String>,
        reason: String,
    },
}

/// The answer to a question.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Ok(Value),
    Error(String),
}

/// Requests that wait for answers of other replicas.
#[derive(Default)]
pub(in crate::gateway) struct ClusterRequests {
    /// By the ticket of the operator.
    gathers: BTreeMap<u64, Gather>,
    /// The request and the replica that a question is for.
    asked: BTreeMap<u64, (u64, String)>,
    /// Where answers to requests of other replicas go, by ticket.
    replies: BTreeMap<u64, ReplyTo>,
    /// Pages of the audit stream that are being read, each with the ticket and the wish of its operator.
    audits: BTreeMap<u64, (u64, ClusterAudit)>,
    last: u64,
}

struct Gather {
    what: AskedOfReplicas,
    until: Instant,
    /// By the name of the replica; none of those that have not answered.
    answers: BTreeMap<String, Option<Result<Value, String>>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AskedOfReplicas {
    State,
    Restart {
        /// The operator named one backend of this replica and did not ask for the cluster.
        is_plain: bool,
    },
}

/// The share of rates that a replica used last, and how long before that it was renewed.
#[derive(Serialize, Deserialize)]
struct StoredShare {
    parts: u32,
    age_s: f64,
}

impl ClusterRequests {
    pub(in crate::gateway) fn deadline(&self) -> Option<Instant> {
        self.gathers.values().map(|gather| gather.until).min()
    }

    fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }
}

impl Driver {
    /// `None` if the request is answered later, by `answer_asked`.
    pub(in crate::gateway) fn ask_cluster(
        &mut self,
        ticket: u64,
        request: ClusterRequest,
    ) -> Option<Result<Value, Refusal>> {
        let Some(replica) = self.cluster.clone() else { return Some(Err(not_in_cluster())) };
        match request {
            ClusterRequest::State => self.gather_state(&replica, ticket),
            ClusterRequest::Restart { backend, reason } => {
                return self.gather_restart(&replica, ticket, backend, &reason, false).err().map(Err);
            }
            ClusterRequest::Audit(audit) => self.read_audit(&replica, ticket, audit),
        }
        None
    }

    fn gather_state(&mut self, replica: &SharedReplica, ticket: u64) {
        let others: Vec<(String, Instance)> = {
            let replica = replica.borrow();
            let others = replica.presences().filter(|presence| presence.instance != replica.instance());
            others.map(|presence| (presence.name.clone(), presence.instance)).collect()
        };
        let answers = others.iter().map(|(name, _)| (name.clone(), None)).collect();
        let until = self.now + REPLICAS_ANSWER_MAX;
        self.cluster_requests.gathers.insert(ticket, Gather { what: AskedOfReplicas::State, until, answers });
        for (name, instance) in others {
            self.ask_replica(replica, ticket, &name, instance, &Question::State, REPLICAS_ANSWER_MAX);
        }
        self.end_complete_gather(ticket);
    }

    /// Restarts a backend where it runs: at its owner, or on every replica.
    fn gather_restart(
        &mut self,
        replica: &SharedReplica,
        ticket: u64,
        backend: Option<String>,
        reason: &str,
        is_plain: bool,
    ) -> Result<(), Refusal> {
        let placed = backend.as_deref().filter(|name| self.is_placed(name));
        let targets: Vec<(String, Instance)> = match placed {
            Some(name) => match replica.borrow().owner(name) {
                Some(owner) => vec![owner.clone()],
                None => {
                    let message = format!("no replica runs the backend `{name}` now; one will start it");
                    return Err(Refusal::new("no_owner", message));
                }
            },
            None => {
                let replica = replica.borrow();
                replica.presences().map(|presence| (presence.name.clone(), presence.instance)).collect()
            }
        };
        let answers = targets.iter().map(|(name, _)| (name.clone(), None)).collect();
        let (what, until) = (AskedOfReplicas::Restart { is_plain }, self.now + RESTART_MAX);
        self.cluster_requests.gathers.insert(ticket, Gather { what, until, answers });
        for (name, instance) in targets {
            let question = Question::Restart { backend: backend.clone(), reason: reason.to_owned() };
            self.ask_replica(replica, ticket, &name, instance, &question, RESTART_MAX);
        }
        Ok(())
    }

    /// A restart of a backend that one replica runs for all, at its owner.
    pub(in crate::gateway) fn restart_placed(
        &mut self,
        ticket: u64,
        backend: String,
        reason: &str,
    ) -> Option<Result<Value, Refusal>> {
        let replica = self.cluster.clone()?;
        self.gather_restart(&replica, ticket, Some(backend), reason, true).err().map(Err)
    }

    pub(in crate::gateway) fn is_placed(&self, backend: &str) -> bool {
        self.cluster.is_some()
            && self.gateway.backends().any(|other| other.name == backend && other.placement == Placement::One)
    }

    fn ask_replica(
        &mut self,
        replica: &SharedReplica,
        ticket: u64,
        name: &str,
        instance: Instance,
        question: &Question,
        within: Duration,
    ) {
        let number = self.cluster_requests.number();
        self.cluster_requests.asked.insert(number, (ticket, name.to_owned()));
        let question = serde_json::to_vec(question).unwrap_or_default();
        replica.borrow_mut().ask(instance, number, question.into(), within);
    }

    /// Another replica asks.
    pub(in crate::gateway) fn replica_asked(&mut self, replica: &SharedReplica, question: &[u8], reply: ReplyTo) {
        match serde_json::from_slice(question) {
            Ok(Question::State) => {
                let state = self.cluster_state().map_or(Value::Null, |state| json!(state));
                answer(replica, reply, &Answer::Ok(state));
            }
            Ok(Question::Restart { backend, reason }) => {
                let ticket = REMOTE | self.cluster_requests.number();
                self.cluster_requests.replies.insert(ticket, reply);
                self.operator = Some(Operator { who: "another replica".to_owned(), peer: None });
                self.operator_requested("restart", backend.as_deref(), Some(&reason));
                self.operator = None;
                self.restart_here(ticket, backend, reason);
            }
            Err(_) => {
                let why = "this replica does not know the request: it may run an older outlast".to_owned();
                answer(replica, reply, &Answer::Error(why));
            }
        }
    }

    fn restart_here(&mut self, ticket: u64, backend: Option<String>, reason: String) {
        self.begin_restart(ticket, backend.clone());
        match backend.as_deref().and_then(|name| self.hosts.of_backend(name)).map(|(number, _)| number) {
            Some(host) => self.tell_machine(host, Event::RestartAsked { ticket, backend, reason }),
            None => self.tell(Event::RestartAsked { ticket, backend, reason }),
        }
    }

    /// The answer to a request of another replica. False if the ticket is not of one.
    pub(in crate::gateway) fn answer_replica(&mut self, ticket: u64, result: &Result<Value, Refusal>) -> bool {
        if ticket & REMOTE == 0 {
            return false;
        }
        if let (Some(reply), Some(replica)) = (self.cluster_requests.replies.remove(&ticket), &self.cluster) {
            let result = match result {
                Ok(value) => Answer::Ok(value.clone()),
                Err(refusal) => Answer::Error(refusal.message.clone()),
            };
            answer(replica, reply, &result);
        }
        true
    }

    pub(in crate::gateway) fn replica_answered(&mut self, number: u64, result: Result<Bytes, String>) {
        let Some((ticket, name)) = self.cluster_requests.asked.remove(&number) else { return };
        let answer = result.and_then(|answer| match serde_json::from_slice(&answer) {
            Ok(Answer::Ok(value)) => Ok(value),
            Ok(Answer::Error(why)) => Err(why),
            Err(error) => Err(error.to_string()),
        });
        if let Some(slot) = self.cluster_requests.gathers.get_mut(&ticket).and_then(|all| all.answers.get_mut(&name)) {
            *slot = Some(answer);
        }
        self.end_complete_gather(ticket);
    }

    fn end_complete_gather(&mut self, ticket: u64) {
        if self.cluster_requests.gathers.get(&ticket).is_some_and(|all| all.answers.values().all(Option::is_some)) {
            self.end_gather(ticket);
        }
    }

    pub(in crate::gateway) fn end_late_cluster_requests(&mut self) {
        let late = self.cluster_requests.gathers.iter().filter(|(_, gather)| gather.until <= self.now);
        let late: Vec<u64> = late.map(|(ticket, _)| *ticket).collect();
        late.into_iter().for_each(|ticket| self.end_gather(ticket));
    }

    fn end_gather(&mut self, ticket: u64) {
        let Some(gather) = self.cluster_requests.gathers.remove(&ticket) else { return };
        self.cluster_requests.asked.retain(|_, (of, _)| *of != ticket);
        let result = match gather.what {
            AskedOfReplicas::State => Ok(json!(self.joined_state(gather.answers))),
            AskedOfReplicas::Restart { is_plain: false } => Ok(json!(joined_restart(gather.answers))),
            AskedOfReplicas::Restart { is_plain: true } => match gather.answers.into_values().next().flatten() {
                Some(Ok(value)) => Ok(value),
                Some(Err(why)) => Err(Refusal::new("failed", why)),
                None => Err(Refusal::new("failed", "the owner of the backend does not answer")),
            },
        };
        self.answer_asked(ticket, &result);
    }

    /// The state of the cluster with what each replica says of itself.
    fn joined_state(&self, answers: BTreeMap<String, Option<Result<Value, String>>>) -> ClusterState {
        let mut state = self.cluster_state().unwrap_or_default();
        for (name, answer) in answers {
            let Some(Ok(answer)) = answer else {
                state.unreachable.push(name);
                continue;
            };
            let theirs = ClusterState::read(&answer);
            let known = state.replicas.iter_mut().find(|replica| replica.name == name);
            if let (Some(known), Some(own)) = (known, theirs.own()) {
                *known = Replica { is_self: false, ..own.clone() };
            }
            for backend in theirs.backends {
                let is_theirs = backend.replica.as_deref() == Some(&name);
                match state.backends.iter_mut().find(|known| known.name == backend.name && known.placement == "one") {
                    Some(known) if is_theirs => *known = backend,
                    Some(_) => {}
                    None if is_theirs => state.backends.push(backend),
                    None => {}
                }
            }
        }
        state
    }

    /// The cluster as this replica knows it now, without a request to the others. `None` if the gateway is in none.
    pub(in crate::gateway) fn cluster_state(&self) -> Option<ClusterState> {
        let replica = self.cluster.as_ref()?.borrow();
        let (connection, server) = (replica.connection(), replica.server());
        let (streams, homes) = (replica.stream_counts(), replica.home_counts());
        let sessions = self.listen.as_ref().map_or(0, |listen| listen.counts().sessions);
        let shown = |presence: &nats::Presence| {
            let is_self = presence.instance == replica.instance();
            let known = Replica {
                name: presence.name.clone(),
                instance: format!("{:016x}", presence.instance),
                version: presence.version.clone(),
                address: presence.address.clone(),
                started: Some(presence.started as f64),
                is_self,
                is_alive: true,
                ..Replica::default()
            };
            match is_self {
                false => known,
                true => Replica {
                    uptime_s: Some(self.now.saturating_duration_since(self.began).as_secs_f64()),
                    sessions: Some(sessions as u64),
                    sessions_local_only: Some(homes.local as u64),
                    streams: Some(streams.peers.iter().map(|peer| peer.streams as u64).sum()),
                    unacked_bytes: Some(streams.peers.iter().map(|peer| peer.unacked as u64).sum()),
                    share_parts: Some(replica.parts()),
                    audit_backlog: replica.audit_backlog(),
                    ..known
                },
            }
        };
        let mut replicas: Vec<Replica> = replica.presences().map(shown).collect();
        // Without NATS a replica may not know of its own entry.
        if !replicas.iter().any(|known| known.is_self) {
            let own = nats::Presence {
                instance: replica.instance(),
                name: replica.name().to_owned(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                started: 0,
                address: self.listen.as_ref().map(|listen| format!("{}/mcp", listen.url())),
            };
            replicas.push(Replica { started: None, ..shown(&own) });
        }
        let backends = self.gateway.status(self.now).backends.into_iter().map(|status| {
            let backend = self.state_of_backend(status);
            let (placement, owner, lease_until_s) = match backend.placed {
                Some(Placed::One { owner, lease_s }) => ("one", owner, lease_s),
                Some(Placed::Every) | None => ("every", None, None),
            };
            let is_here = placement == "every" || owner.as_deref() == Some(replica.name());
            PlacedBackend {
                name: backend.name,
                placement: placement.to_owned(),
                lease_until_s,
                state: backend.state.filter(|_| is_here).map(str::to_owned),
                pid: backend.pid.filter(|_| is_here).map(u64::from),
                replica: is_here.then(|| replica.name().to_owned()),
                uptime_s: backend.uptime_s.filter(|_| is_here),
                restarts: is_here.then_some(backend.restarts),
                owner,
            }
        });
        let off = self.gateway.switched_off().map(|switch| match switch {
            Switch::Tool(tool) => SwitchedOff { tool: Some(tool), backend: None },
            Switch::Backend(backend) => SwitchedOff { tool: None, backend: Some(backend) },
        });
        Some(ClusterState {
            name: replica.cluster().to_owned(),
            replica: replica.name().to_owned(),
            instance: format!("{:016x}", replica.instance()),
            nats: Nats {
                connected: connection.is_up,
                server: server.map(|server| server.url),
                since_s: Some(connection.since.elapsed().as_secs_f64()),
                why: connection.why.clone(),
                watches_down: replica.watches_down().map(|(bucket, _)| bucket.name().to_owned()).collect(),
            },
            replicas,
            backends: backends.collect(),
            switches: off.collect(),
            counters: Counters {
                late_messages: streams.late_messages + streams.late_packets,
                duplicates: streams.duplicates,
                resent: streams.resent,
                takeovers: homes.taken,
                calls_lost: replica.links_lost(),
                watches_lost: replica.watches_lost(),
            },
            unreachable: Vec::new(),
        })
    }

    // ---- the audit stream --------------------------------------------------------------------------------------------

    fn read_audit(&mut self, replica: &SharedReplica, ticket: u64, audit: ClusterAudit) {
        let number = self.cluster_requests.number();
        let from = match (&audit.cursor, &audit.since) {
            (Some(cursor), _) => AuditFrom::Sequence(cursor.parse().unwrap_or(u64::MAX)),
            // NATS stores a record after it was written, so none since then is stored before.
            (None, Some(since)) => AuditFrom::Time(outlast_core::record::unix_seconds(since).unwrap_or(0)),
            (None, None) => AuditFrom::Sequence(1),
        };
        match audit.replica.is_some() {
            true => replica.borrow_mut().read_audit(from, number),
            false => replica.borrow_mut().audit_replicas(number),
        }
        self.cluster_requests.audits.insert(number, (ticket, audit));
    }

    pub(in crate::gateway) fn audit_replicas(&mut self, number: u64, replicas: Result<Vec<String>, String>) {
        let Some((ticket, _)) = self.cluster_requests.audits.remove(&number) else { return };
        let result = replicas.map(|replicas| json!(AuditPage { replicas, ..AuditPage::default() }));
        self.answer_asked(ticket, &result.map_err(|why| unreadable(&why)));
    }

    pub(in crate::gateway) fn audit_page(&mut self, number: u64, page: Result<nats::AuditPage, String>) {
        let Some((ticket, audit)) = self.cluster_requests.audits.remove(&number) else { return };
        let result = page.map(|page| json!(shown_page(&page, &audit))).map_err(|why| unreadable(&why));
        self.answer_asked(ticket, &result);
    }

    // ---- the share of rates on disk ----------------------------------------------------------------------------------

    fn share_file(&self) -> Option<PathBuf> {
        let replica = self.cluster.as_ref()?.borrow();
        let names = format!("{}.{}", replica.cluster(), replica.name());
        let name: String = names.bytes().map(|byte| format!("{byte:02x}")).collect();
        Some(self.plan.state.as_ref()?.join(format!("cluster-share-{name}")))
    }

    pub(in crate::gateway) fn remember_share(&mut self, parts: u32, age: Duration) {
        let Some(file) = self.share_file() else { return };
        let text = serde_json::to_vec(&StoredShare { parts, age_s: age.as_secs_f64() }).unwrap_or_default();
        if let Err(error) = home::write_private(&file, &text) {
            self.journal.note(&format!("the share of rates cannot be stored in {}: {error}", file.display()));
        }
    }

    /// What an earlier process of this replica stored.
    pub(in crate::gateway) fn recall_share(&self) {
        let Some(file) = self.share_file() else { return };
        let Ok(text) = os::read_own(&file, SHARE_FILE_MAX) else { return };
        let Ok(stored) = serde_json::from_slice::<StoredShare>(&text) else { return };
        if let (Some(replica), Ok(written)) =
            (&self.cluster, fs::symlink_metadata(&file).and_then(|about| about.modified()))
            // If the clock was set back, the age is unknown, and the share is not used.
            && let Ok(since) = SystemTime::now().duration_since(written)
            && let Ok(age) = Duration::try_from_secs_f64(stored.age_s)
        {
            replica.borrow_mut().remember_share(stored.parts, age + since);
        }
    }
}

fn answer(replica: &SharedReplica, reply: ReplyTo, answer: &Answer) {
    let answer = serde_json::to_vec(answer).unwrap_or_default();
    replica.borrow_mut().answer(reply, answer.into());
}

/// The records of one replica in a page, as far as they are wanted and fit.
fn shown_page(page: &nats::AuditPage, audit: &ClusterAudit) -> AuditPage {
    let mut shown = AuditPage { next: page.next.map(|next| next.to_string()), ..AuditPage::default() };
    let mut bytes = 0;
    for entry in page.entries.iter().filter(|entry| Some(&entry.replica) == audit.replica.as_ref()) {
        let text = String::from_utf8_lossy(&entry.body);
        let records = text.lines().filter(|line| audit.wants(line)).map(|line| AuditRecord {
            id: record_id(line),
            replica: entry.replica.clone(),
            line: if line.len() > AUDIT_PAGE_BYTES_MAX { String::new() } else { line.to_owned() },
        });
        let records: Vec<AuditRecord> = records.collect();
        let more: usize = records.iter().map(|record| record.line.len()).sum();
        let is_full =
            bytes + more > AUDIT_PAGE_BYTES_MAX || (shown.records.len() + records.len()) as u64 > audit.limit();
        if is_full && !shown.records.is_empty() {
            // The next page begins with this entry.
            shown.next = Some(entry.sequence.to_string());
            return shown;
        }
        bytes += more;
        shown.records.extend(records);
    }
    shown
}

fn record_id(line: &str) -> String {
    #[derive(Deserialize)]
    struct Identified {
        id: String,
    }
    serde_json::from_str::<Identified>(line).map_or_else(|_| String::new(), |record| record.id)
}

fn joined_restart(answers: BTreeMap<String, Option<Result<Value, String>>>) -> ClusterAnswer {
    let mut joined = ClusterAnswer::default();
    for (replica, answer) in answers {
        match answer {
            Some(Ok(answer)) => joined.replicas.push(ReplicaAnswer { replica, answer, error: None }),
            Some(Err(why)) => {
                joined.replicas.push(ReplicaAnswer { replica, answer: Value::Null, error: Some(why) });
            }
            None => joined.unreachable.push(replica),
        }
    }
    joined
}

fn unreadable(why: &str) -> Refusal {
    Refusal::new("failed", format!("the audit stream cannot be read: {why}"))
}

fn not_in_cluster() -> Refusal {
    let hint = "the table `[cluster]` in its configuration puts it into one";
    Refusal { data: json!({"hint": hint}), ..Refusal::new(NOT_IN_CLUSTER, "this gateway is not in a cluster") }
}
