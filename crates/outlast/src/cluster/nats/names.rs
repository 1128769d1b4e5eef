//! The names of a cluster's subjects, buckets and streams. All of them begin with the configured prefix and the version of
//! the format.

use async_nats::Subject;

use super::Bucket;
use crate::cluster::NatsSettings;

/// In the description of every bucket and stream. A replica that finds another text does not use the bucket.
pub(super) const DESCRIPTION: &str = "outlast cluster state, version 1";
const VERSION: &str = "v1";

pub(super) const BUCKETS: [Bucket; 4] = [Bucket::Replicas, Bucket::Sessions, Bucket::Leases, Bucket::State];

#[derive(Debug)]
pub(super) struct Names {
    /// `outlast.v1.<cluster>`
    subjects: String,
    /// `outlast_v1_<cluster>`
    objects: String,
    replica: String,
}

impl Names {
    pub(super) fn new(settings: &NatsSettings) -> Names {
        let NatsSettings { prefix, cluster, replica, .. } = settings;
        Names {
            subjects: format!("{prefix}.{VERSION}.{cluster}"),
            objects: format!("{prefix}_{VERSION}_{cluster}"),
            replica: replica.clone(),
        }
    }

    /// Where a replica gets packets, probes and requests.
    pub(super) fn replica(&self, instance: u64) -> Subject {
        Subject::from(format!("{}.replica.{instance:016x}", self.subjects))
    }

    /// Where the answers to requests of a replica arrive.
    pub(super) fn inbox(&self, instance: u64) -> String {
        format!("{}.inbox.{instance:016x}", self.subjects)
    }

    pub(super) fn bucket(&self, bucket: Bucket) -> String {
        format!("{}_{}", self.objects, bucket.name())
    }

    /// The stream of a bucket, as all clients of NATS name it.
    pub(super) fn stream_of(&self, bucket: Bucket) -> String {
        format!("KV_{}", self.bucket(bucket))
    }

    /// The subject of a key.
    pub(super) fn key(&self, bucket: Bucket, key: &str) -> String {
        format!("$KV.{}.{key}", self.bucket(bucket))
    }

    pub(super) fn audit_stream(&self) -> String {
        format!("{}_audit", self.objects)
    }

    /// The subjects of all replicas in the audit stream.
    pub(super) fn audit_subjects(&self) -> String {
        format!("{}.audit.*", self.subjects)
    }

    /// The replica of a subject in the audit stream.
    pub(super) fn replica_of_audit(&self, subject: &str) -> Option<String> {
        let rest = subject.strip_prefix(&self.subjects)?.strip_prefix(".audit.")?;
        Some(rest.to_owned())
    }

    /// The subject of this replica in the audit stream.
    pub(super) fn own_audit_subject(&self) -> String {
        format!("{}.audit.{}", self.subjects, self.replica)
    }
}
