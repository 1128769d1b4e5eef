//! What the connection to NATS reports, and the values that it carries. How it does so is in `nats`.

#![cfg_attr(not(feature = "cluster"), expect(dead_code, reason = "without NATS none of it happens"))]

use bytes::Bytes;

/// What happened. After `Disconnected` nothing of the lost connection is reported any more: operations in flight have
/// ended before it, as `Failed`, `Unknown` or an error.
#[derive(Debug)]
pub(crate) enum Heard {
    /// Buckets and stream are verified, the subscription is in place; the watches report the current entries after this.
    Connected {
        payload_max: usize,
    },
    Disconnected {
        why: String,
    },
    /// Another live replica has the name of this one. No connection is tried any more.
    NameTaken {
        by: Presence,
    },
    Packet {
        from: u64,
        packet: Bytes,
    },
    Probe {
        from: u64,
        packet: Bytes,
        reply: ReplyTo,
    },
    ProbeEnded {
        of: u64,
        result: Probed,
    },
    /// The request of an operator, by way of another replica.
    Operator {
        request: Bytes,
        reply: ReplyTo,
    },
    Asked {
        ticket: u64,
        result: Result<Bytes, String>,
    },
    /// The newest entry: its revision, and its value unless it was deleted. Revision 0: there never was one, or it expired.
    Read {
        ticket: u64,
        found: Result<(u64, Option<Bytes>), String>,
    },
    Written {
        ticket: u64,
        result: Written,
    },
    /// The bucket is watched from now on. Its entries are reported after this, except those of sessions.
    Watching {
        bucket: Bucket,
    },
    /// The watch of a bucket ended. It is begun again until it works; [`Heard::Watching`] says so.
    WatchLost {
        bucket: Bucket,
        why: String,
    },
    /// A watched entry, in the order of the bucket. An entry that expired is not reported.
    Changed {
        bucket: Bucket,
        key: String,
        revision: u64,
        value: Option<Bytes>,
    },
    LastAudit {
        ticket: u64,
        last: Result<Option<AuditEntry>, String>,
    },
    AuditPublished {
        ticket: u64,
        result: Written,
    },
    AuditPage {
        ticket: u64,
        page: Result<AuditPage, String>,
    },
    /// The names of the replicas with entries in the audit stream.
    AuditReplicas {
        ticket: u64,
        replicas: Result<Vec<String>, String>,
    },
    Note(String),
}

#[derive(Debug)]
pub(crate) enum Probed {
    Answered(Bytes),
    /// No process has this instance.
    Dead,
    /// No answer in time, or the connection was lost.
    Failed,
}

#[derive(Debug)]
pub(crate) enum Written {
    /// The revision of the entry, or the sequence of the record.
    Done(u64),
    /// Another value or record is there.
    Conflict,
    /// It may have taken effect, or may yet.
    Unknown(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Bucket {
    Replicas,
    Sessions,
    Leases,
    State,
}

impl Bucket {
    /// For people, and in the name of the bucket.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Bucket::Replicas => "replicas",
            Bucket::Sessions => "sessions",
            Bucket::Leases => "leases",
            Bucket::State => "state",
        }
    }
}

/// What must be in a bucket for a write to take effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expected {
    Any,
    /// No entry, or one that was deleted.
    Absent,
    Revision(u64),
}

/// Where the answer to a probe or request goes.
#[derive(Debug, Clone)]
pub(crate) struct ReplyTo(pub(super) String);

/// The entry of a replica in the bucket `replicas`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Presence {
    pub instance: u64,
    pub name: String,
    /// Of outlast.
    pub version: String,
    /// Seconds since 1970.
    pub started: u64,
    /// Where its clients connect.
    pub address: Option<String>,
}

/// One batch of records in the audit stream.
#[derive(Debug)]
pub(crate) struct AuditEntry {
    pub sequence: u64,
    /// Of its last record.
    pub id: String,
    pub replica: String,
    pub body: Bytes,
}

#[derive(Debug)]
pub(crate) struct AuditPage {
    pub entries: Vec<AuditEntry>,
    /// Where the next page begins; `None` after the last entry.
    pub next: Option<u64>,
}

/// Which records of the audit stream are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AuditFrom {
    Sequence(u64),
    /// Seconds since 1970.
    Time(i64),
}

/// The server of the current connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ServerInfo {
    pub url: String,
    pub version: String,
    /// The name of the NATS cluster, if the server is part of one.
    pub cluster: Option<String>,
}
