//! What the replicas of a cluster report to operators: the state of the cluster, pages of its audit stream, and the answers
//! of all replicas to one request. The types are written by gateways and read by commands and the status page; a
//! missing or invalid member counts as absent.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::answer::lenient;

/// How long a gateway waits for the other replicas before it names them in `unreachable`.
pub const REPLICAS_ANSWER_MAX: Duration = Duration::from_secs(2);
/// The most records in a page of the audit stream.
pub const AUDIT_PAGE_MAX: u64 = 500;
/// The most bytes of records in a page: with its other members it fits into one frame, also if every character of a record
/// has to be escaped once more.
pub const AUDIT_PAGE_BYTES_MAX: usize = 400 << 10;

/// The code of the refusal by a gateway that is not in a cluster.
pub const NOT_IN_CLUSTER: &str = "not_in_cluster";

/// In the state of an instance: the cluster that it is in.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Membership {
    #[serde(deserialize_with = "lenient")]
    pub name: String,
    #[serde(deserialize_with = "lenient")]
    pub replica: String,
}

/// The cluster as one of its replicas sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterState {
    #[serde(deserialize_with = "lenient")]
    pub name: String,
    /// The replica that reports.
    #[serde(deserialize_with = "lenient")]
    pub replica: String,
    /// The random number of its process, as 16 hexadecimal digits: JSON numbers are not exact enough.
    #[serde(deserialize_with = "lenient")]
    pub instance: String,
    #[serde(deserialize_with = "lenient")]
    pub nats: Nats,
    /// All that are registered, and those that were until recently.
    #[serde(deserialize_with = "lenient")]
    pub replicas: Vec<Replica>,
    /// A backend with `placement = "one"` once, others once for each replica.
    #[serde(deserialize_with = "lenient")]
    pub backends: Vec<PlacedBackend>,
    #[serde(deserialize_with = "lenient")]
    pub switches: Vec<SwitchedOff>,
    #[serde(deserialize_with = "lenient")]
    pub counters: Counters,
    /// The replicas that did not answer in time. What is listed of them is what was known before.
    #[serde(deserialize_with = "lenient")]
    pub unreachable: Vec<String>,
}

impl ClusterState {
    pub fn read(state: &Value) -> ClusterState {
        ClusterState::deserialize(state).unwrap_or_default()
    }

    /// The replica that reports, as it is listed.
    pub fn own(&self) -> Option<&Replica> {
        self.replicas.iter().find(|replica| replica.is_self)
    }

    pub fn membership(&self) -> Membership {
        Membership { name: self.name.clone(), replica: self.replica.clone() }
    }
}

/// The connection of the replica that reports to NATS.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Nats {
    #[serde(deserialize_with = "lenient")]
    pub connected: bool,
    /// The server that it is connected to, or was last.
    #[serde(deserialize_with = "lenient")]
    pub server: Option<String>,
    /// How long it has been connected, or has not.
    #[serde(deserialize_with = "lenient")]
    pub since_s: Option<f64>,
    /// Why it is not connected.
    #[serde(deserialize_with = "lenient")]
    pub why: Option<String>,
    /// Buckets whose changes are not reported at the moment: `replicas`, `sessions`, `leases` or `state`.
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Vec::is_empty")]
    pub watches_down: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Replica {
    #[serde(deserialize_with = "lenient")]
    pub name: String,
    #[serde(deserialize_with = "lenient")]
    pub instance: String,
    #[serde(deserialize_with = "lenient")]
    pub version: String,
    /// Where it listens.
    #[serde(deserialize_with = "lenient")]
    pub address: Option<String>,
    /// Seconds since 1970.
    #[serde(deserialize_with = "lenient")]
    pub started: Option<f64>,
    #[serde(deserialize_with = "lenient")]
    pub is_self: bool,
    /// Its registration is there.
    #[serde(deserialize_with = "lenient")]
    pub is_alive: bool,
    #[serde(deserialize_with = "lenient")]
    pub uptime_s: Option<f64>,
    /// Sessions whose home it is.
    #[serde(deserialize_with = "lenient")]
    pub sessions: Option<u64>,
    /// Those of them that other replicas do not know, because their records could not be stored.
    #[serde(deserialize_with = "lenient")]
    pub sessions_local_only: Option<u64>,
    /// Streams between it and the other replicas.
    #[serde(deserialize_with = "lenient")]
    pub streams: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    pub unacked_bytes: Option<u64>,
    /// Its share of all rate budgets, in millionths.
    #[serde(deserialize_with = "lenient")]
    pub share_parts: Option<u32>,
    /// Audit records that are not published yet.
    #[serde(deserialize_with = "lenient")]
    pub audit_backlog: Option<u64>,
}

/// A backend, on one replica or without an owner.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PlacedBackend {
    #[serde(deserialize_with = "lenient")]
    pub name: String,
    /// `one` or `every`.
    #[serde(deserialize_with = "lenient")]
    pub placement: String,
    /// With placement `one`: the replica that holds the lease.
    #[serde(deserialize_with = "lenient")]
    pub owner: Option<String>,
    #[serde(deserialize_with = "lenient")]
    pub lease_until_s: Option<f64>,
    /// Absent if no replica reports it.
    #[serde(deserialize_with = "lenient")]
    pub state: Option<String>,
    #[serde(deserialize_with = "lenient")]
    pub pid: Option<u64>,
    /// The replica that reports the state.
    #[serde(deserialize_with = "lenient")]
    pub replica: Option<String>,
    #[serde(deserialize_with = "lenient")]
    pub uptime_s: Option<f64>,
    #[serde(deserialize_with = "lenient")]
    pub restarts: Option<u64>,
}

/// A tool or a backend that is off in the whole cluster; one of the two is there.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SwitchedOff {
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub tool: Option<String>,
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
}

/// Counts of the replica that reports, since it was started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    /// Messages for a call or a stream that had ended.
    #[serde(deserialize_with = "lenient")]
    pub late_messages: u64,
    /// Packets that were received more than once.
    #[serde(deserialize_with = "lenient")]
    pub duplicates: u64,
    /// Packets that were sent again.
    #[serde(deserialize_with = "lenient")]
    pub resent: u64,
    /// Sessions and backends that this replica took over from a lost one.
    #[serde(deserialize_with = "lenient")]
    pub takeovers: u64,
    /// Calls that failed because the replica that executed them was lost.
    #[serde(deserialize_with = "lenient")]
    pub calls_lost: u64,
    /// Watches of buckets that failed and were opened again.
    #[serde(deserialize_with = "lenient")]
    pub watches_lost: u64,
}

/// A page of the audit stream.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AuditPage {
    /// All replicas that have records in the stream, also former ones.
    #[serde(deserialize_with = "lenient")]
    pub replicas: Vec<String>,
    /// Of one replica, in the order in which it wrote them. Empty if the request names no replica.
    #[serde(deserialize_with = "lenient")]
    pub records: Vec<AuditRecord>,
    /// The cursor of the next page. Absent after the last one; a page can be empty and have a next one.
    #[serde(deserialize_with = "lenient")]
    pub next: Option<String>,
}

impl AuditPage {
    pub fn read(page: &Value) -> AuditPage {
        AuditPage::deserialize(page).unwrap_or_default()
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AuditRecord {
    /// The replica's name, a dash and a number.
    #[serde(deserialize_with = "lenient")]
    pub id: String,
    #[serde(deserialize_with = "lenient")]
    pub replica: String,
    /// The line of the audit log, unchanged and without its line feed. Empty if it is longer than a page.
    #[serde(deserialize_with = "lenient")]
    pub line: String,
}

/// The answers of all replicas that a request was for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterAnswer {
    #[serde(deserialize_with = "lenient")]
    pub replicas: Vec<ReplicaAnswer>,
    #[serde(deserialize_with = "lenient")]
    pub unreachable: Vec<String>,
}

impl ClusterAnswer {
    pub fn read(answer: &Value) -> ClusterAnswer {
        ClusterAnswer::deserialize(answer).unwrap_or_default()
    }
}

/// The answer of one replica to the same request without `cluster`, or the message of its refusal.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReplicaAnswer {
    #[serde(deserialize_with = "lenient")]
    pub replica: String,
    #[serde(skip_serializing_if = "Value::is_null")]
    pub answer: Value,
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_unexpected_member_does_not_affect_the_others() {
        let state = ClusterState::read(&json!({
            "name": "prod", "replica": "east-1", "instance": 7, "nats": {"connected": true, "since_s": "long"},
            "replicas": [{"name": "east-1", "is_self": true, "sessions": 3, "share_parts": -1}, {"later": {}}],
            "backends": [{"name": "files", "placement": "one", "owner": null}], "counters": {"resent": 2}, "later": [],
        }));
        assert_eq!(state.membership(), Membership { name: "prod".into(), replica: "east-1".into() });
        assert_eq!((state.nats.connected, state.nats.since_s), (true, None));
        assert_eq!(state.own().unwrap().sessions, Some(3));
        assert_eq!((state.replicas.len(), state.counters.resent), (2, 2));
        assert_eq!((state.instance.as_str(), state.backends[0].owner.as_deref()), ("", None));
        assert_eq!(ClusterState::read(&json!([1])), ClusterState::default());
        assert_eq!(ClusterAnswer::read(&json!(null)), ClusterAnswer::default());
    }

    #[test]
    fn what_is_written_is_read_back() {
        let answer = ClusterAnswer {
            replicas: vec![
                ReplicaAnswer { replica: "a".into(), answer: json!({"old_pid": 1}), error: None },
                ReplicaAnswer { replica: "b".into(), answer: Value::Null, error: Some("no".into()) },
            ],
            unreachable: vec!["c".into()],
        };
        let written = serde_json::to_value(&answer).unwrap();
        assert_eq!(written["replicas"][1], json!({"replica": "b", "error": "no"}));
        assert_eq!(ClusterAnswer::read(&written), answer);
        let record = AuditRecord { id: "a-1".into(), replica: "a".into(), line: "{\"id\":\"a-1\"}".into() };
        let page = AuditPage { replicas: vec!["a".into()], records: vec![record], next: Some("7".into()) };
        assert_eq!(AuditPage::read(&serde_json::to_value(&page).unwrap()), page);
    }

    #[test]
    fn the_longest_page_fits_into_a_frame() {
        // Every character is escaped, and there are as many records as there can be.
        let length = AUDIT_PAGE_BYTES_MAX / AUDIT_PAGE_MAX as usize;
        let record = AuditRecord { id: "r".repeat(70), replica: "r".repeat(60), line: "\"".repeat(length) };
        let page = AuditPage { records: vec![record; AUDIT_PAGE_MAX as usize], ..AuditPage::default() };
        let frame = crate::wire::frame(&serde_json::to_string(&page).unwrap());
        assert!(frame.is_some());
    }
}
