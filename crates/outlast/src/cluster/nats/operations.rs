//! Single operations on buckets and on the audit stream: one request each, to the leader of the stream.

use std::{future::poll_fn, pin::Pin, rc::Rc, time::Duration};

use async_nats::{
    Client, HeaderMap, Request, RequestErrorKind, Subject,
    header::{NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, NATS_MESSAGE_ID},
    jetstream::{
        Context,
        stream::{LastRawMessageErrorKind, RawMessageError, Stream},
    },
};
use bytes::Bytes;
use futures_core::Stream as _;
use serde::Deserialize;

use super::{AuditEntry, AuditFrom, AuditPage, Bucket, Expected, Probed, Written, names::Names};

/// How long an operation may take. The machines that ask for it have shorter deadlines where they need them.
pub(super) const OPERATION_MAX: Duration = Duration::from_secs(2);
/// Of one page of the audit stream; a page has at least one entry.
const PAGE_BYTES: usize = 1 << 20;
const PAGE_ENTRIES: usize = 256;

/// The header that says what a message to a replica is. A packet has no headers.
pub(super) const KIND: &str = "Kind";
pub(super) const PROBE: &str = "probe";
pub(super) const OPERATOR: &str = "operator";
/// Whether a replica with this instance runs; answered by this layer.
pub(super) const PRESENCE: &str = "presence";

/// What JetStream answers if another message is the last one of the subject. A replicated stream has two codes for it.
const WRONG_LAST: [u64; 2] = [10071, 10164];

/// One connection, as operations use it.
#[derive(Clone)]
pub(super) struct Link {
    pub client: Client,
    pub jetstream: Context,
    pub names: Rc<Names>,
    pub instance: u64,
    /// The address, for errors.
    pub server: Rc<str>,
}

#[derive(Deserialize)]
struct Ack {
    #[serde(default)]
    seq: u64,
    error: Option<AckError>,
}

#[derive(Deserialize)]
struct AckError {
    #[serde(default)]
    err_code: u64,
    #[serde(default)]
    description: String,
}

impl Link {
    pub(super) fn server(&self) -> String {
        self.server.to_string()
    }

    /// The newest entry of a key, from the leader: its revision, and its value unless it was deleted. The revision of a
    /// key that never existed is 0.
    pub(super) async fn read(&self, bucket: Bucket, key: &str) -> Result<(u64, Option<Bytes>), String> {
        let subject = self.names.key(bucket, key);
        let stream = self.stream(&self.names.stream_of(bucket)).await?;
        match found(stream.get_last_raw_message_by_subject(&subject).await)? {
            None => Ok((0, None)),
            Some(message) => {
                let is_deleted = is_deleted(Some(&message.headers));
                Ok((message.sequence, (!is_deleted).then_some(message.payload)))
            }
        }
    }

    pub(super) async fn write(&self, bucket: Bucket, key: &str, expected: Expected, value: Bytes) -> Written {
        let subject = self.names.key(bucket, key);
        let last = match expected {
            Expected::Any => None,
            Expected::Absent => Some(0),
            Expected::Revision(revision) => Some(revision),
        };
        let written = self.put(subject.clone(), headers(last), value.clone()).await;
        // A deleted key has a marker, which is the last message of its subject.
        if let (Written::Conflict, Expected::Absent) = (&written, expected) {
            return match self.read(bucket, key).await {
                Ok((marker, None)) => self.put(subject, headers(Some(marker)), value).await,
                Ok((_, Some(_))) => Written::Conflict,
                Err(why) => Written::Unknown(why),
            };
        }
        written
    }

    pub(super) async fn delete(&self, bucket: Bucket, key: &str, expected: Option<u64>) -> Written {
        let mut headers = headers(expected);
        headers.insert("KV-Operation", "DEL");
        self.put(self.names.key(bucket, key), headers, Bytes::new()).await
    }

    pub(super) async fn publish_audit(&self, id: &str, expected_last: u64, body: Bytes) -> Written {
        let mut headers = headers(Some(expected_last));
        headers.insert(NATS_MESSAGE_ID, id);
        self.put(self.names.own_audit_subject(), headers, body).await
    }

    pub(super) async fn last_audit(&self) -> Result<Option<AuditEntry>, String> {
        let stream = self.stream(&self.names.audit_stream()).await?;
        let last = stream.get_last_raw_message_by_subject(&self.names.own_audit_subject()).await;
        Ok(found(last)?.map(audit_entry))
    }

    pub(super) async fn audit_page(&self, from: AuditFrom) -> Result<AuditPage, String> {
        let stream = self.stream(&self.names.audit_stream()).await?;
        let mut next = match from {
            AuditFrom::Sequence(sequence) => sequence.max(1),
            AuditFrom::Time(since) => self.sequence_since(&stream, since).await?,
        };
        let (mut entries, mut bytes) = (Vec::new(), 0);
        while entries.len() < PAGE_ENTRIES && bytes < PAGE_BYTES {
            let Some(message) = self.audit_from(&stream, next).await? else {
                return Ok(AuditPage { entries, next: None });
            };
            next = message.sequence + 1;
            bytes += message.payload.len();
            entries.push(audit_entry(message));
        }
        Ok(AuditPage { entries, next: Some(next) })
    }

    pub(super) async fn audit_replicas(&self) -> Result<Vec<String>, String> {
        let stream = self.stream(&self.names.audit_stream()).await?;
        let subjects = self.names.audit_subjects();
        let mut found = stream.info_with_subjects(&subjects).await.map_err(|error| error.to_string())?;
        let mut replicas = Vec::new();
        while let Some(subject) = poll_fn(|cx| Pin::new(&mut found).poll_next(cx)).await {
            let (subject, _) = subject.map_err(|error| error.to_string())?;
            replicas.extend(self.names.replica_of_audit(&subject));
        }
        replicas.sort_unstable();
        Ok(replicas)
    }

    /// The first entry at or after a sequence.
    async fn audit_from(
        &self,
        stream: &Stream<()>,
        sequence: u64,
    ) -> Result<Option<async_nats::jetstream::message::StreamMessage>, String> {
        found(stream.get_first_raw_message_by_subject(self.names.audit_subjects(), sequence).await)
    }

    /// The sequence of the first entry since a time, by bisection: NATS stores the entries in the order of time.
    async fn sequence_since(&self, stream: &Stream<()>, since: i64) -> Result<u64, String> {
        let state = stream.get_info().await.map_err(|error| error.to_string())?.state;
        let (mut low, mut high) = (state.first_sequence.max(1), state.last_sequence + 1);
        while low < high {
            let middle = low + (high - low) / 2;
            match self.audit_from(stream, middle).await? {
                Some(message) if message.time.unix_timestamp() < since => low = message.sequence + 1,
                _ => high = middle,
            }
        }
        Ok(low)
    }

    /// A request to another replica. `Err(true)` if no process has this instance.
    pub(super) async fn request(
        &self,
        to: u64,
        kind: &'static str,
        payload: Bytes,
        within: Duration,
    ) -> Result<Bytes, (bool, String)> {
        let mut headers = HeaderMap::new();
        headers.insert(KIND, kind);
        let request = Request::new().headers(headers).payload(self.signed(&payload)).timeout(Some(within));
        match self.client.send_request(self.names.replica(to), request).await {
            Ok(message) => Ok(message.payload),
            Err(error) => Err((error.kind() == RequestErrorKind::NoResponders, error.to_string())),
        }
    }

    pub(super) async fn probe(&self, to: u64, packet: Bytes, within: Duration) -> Probed {
        match self.request(to, PROBE, packet, within).await {
            Ok(answer) => Probed::Answered(answer),
            Err((true, _)) => Probed::Dead,
            Err((false, _)) => Probed::Failed,
        }
    }

    /// Messages to replicas begin with the instance of the sender.
    pub(super) fn signed(&self, payload: &[u8]) -> Bytes {
        [&self.instance.to_be_bytes(), payload].concat().into()
    }

    async fn put(&self, subject: String, headers: HeaderMap, payload: Bytes) -> Written {
        let request = Request::new().headers(headers).payload(payload).timeout(Some(OPERATION_MAX));
        let message = match self.client.send_request(Subject::from(subject), request).await {
            Ok(message) => message,
            Err(error) => return Written::Unknown(error.to_string()),
        };
        match serde_json::from_slice(&message.payload) {
            Ok(Ack { error: None, seq }) => Written::Done(seq),
            Ok(Ack { error: Some(error), .. }) if WRONG_LAST.contains(&error.err_code) => Written::Conflict,
            Ok(Ack { error: Some(error), .. }) => Written::Unknown(error.description),
            Err(error) => Written::Unknown(error.to_string()),
        }
    }

    async fn stream(&self, name: &str) -> Result<Stream<()>, String> {
        self.jetstream.get_stream_no_info(name).await.map_err(|error| error.to_string())
    }
}

fn headers(last: Option<u64>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if let Some(last) = last {
        headers.insert(NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, last.to_string());
    }
    headers
}

fn found<T>(result: Result<T, RawMessageError>) -> Result<Option<T>, String> {
    match result {
        Ok(message) => Ok(Some(message)),
        Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

/// Whether a message of a bucket is the marker of a deleted key.
pub(super) fn is_deleted(headers: Option<&HeaderMap>) -> bool {
    let operation = headers.and_then(|headers| headers.get("KV-Operation"));
    operation.is_some_and(|operation| matches!(operation.as_str(), "DEL" | "PURGE"))
}

fn audit_entry(message: async_nats::jetstream::message::StreamMessage) -> AuditEntry {
    let id = message.headers.get(NATS_MESSAGE_ID).map(|id| id.as_str().to_owned()).unwrap_or_default();
    let replica = message.subject.rsplit('.').next().unwrap_or_default().to_owned();
    AuditEntry { sequence: message.sequence, id, replica, body: message.payload }
}
