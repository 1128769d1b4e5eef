//! NATS as the replicas see it: buckets that are linearizable at their leader, compare-and-swap by revision, and a stream with
//! one subject for each replica.

use std::{collections::BTreeMap, rc::Rc, time::Duration};

use bytes::Bytes;
use outlast_core::{
    cluster::{
        homes::{self, Home},
        leases::Lease,
        shares::Table,
    },
    front::record::{Record, RecordKey},
};

/// How long a message id is remembered.
const DUPLICATES: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Bucket {
    Leases,
    Sessions,
    State,
}

/// What is stored, as it is read from the bytes that were written. Reading it once for all who are told is quicker.
#[derive(Debug, Clone)]
pub(super) enum Value {
    Lease(Rc<Lease>),
    Session(Rc<(Record, Home)>),
    Table(Rc<Table>),
}

impl Value {
    pub(super) fn lease(lease: &Lease) -> Value {
        let read = Lease::decode(&lease.encode());
        assert_eq!(read.as_ref(), Ok(lease));
        Value::Lease(Rc::new(lease.clone()))
    }

    pub(super) fn session(key: RecordKey, record: &Record, home: &Home) -> Value {
        let bytes = homes::encode(key, record, home).expect("it is short");
        assert_eq!(homes::decode_home(&bytes).as_ref(), Ok(home));
        let read = homes::decode(key, &bytes).expect("it was written so");
        assert_eq!((&read.0, &read.1), (record, home));
        Value::Session(Rc::new(read))
    }

    pub(super) fn table(table: &Table) -> Value {
        let read = Table::decode(&table.encode());
        assert_eq!(read.as_ref(), Ok(table));
        Value::Table(Rc::new(table.clone()))
    }

    pub(super) fn home(&self) -> Option<&Home> {
        match self {
            Value::Session(stored) => Some(&stored.1),
            _ => None,
        }
    }
}

#[derive(Debug, Clone)]
pub(super) enum Op {
    Read {
        bucket: Bucket,
        key: String,
    },
    /// Nothing deletes the key.
    Write {
        bucket: Bucket,
        key: String,
        expected: u64,
        value: Option<Value>,
    },
    ReadLast {
        subject: String,
    },
    Publish {
        subject: String,
        id: String,
        expected_last: u64,
        body: Bytes,
    },
}

#[derive(Debug, Clone)]
pub(super) enum Answer {
    /// Of a key that is or was there.
    Found(Option<(u64, Option<Value>)>),
    Done(u64),
    Conflict,
    Last(Option<(u64, String)>),
}

/// A change that watches are told.
#[derive(Debug, Clone)]
pub(super) struct Change {
    pub(super) bucket: Bucket,
    pub(super) key: String,
    pub(super) revision: u64,
    pub(super) value: Option<Value>,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) revision: u64,
    pub(super) value: Option<Value>,
    pub(super) changed: Duration,
}

#[derive(Debug)]
pub(super) struct Message {
    sequence: u64,
    id: String,
    pub(super) body: Bytes,
    at: Duration,
}

#[derive(Debug, Default)]
pub(super) struct Nats {
    buckets: BTreeMap<(Bucket, String), Entry>,
    revisions: BTreeMap<Bucket, u64>,
    subjects: BTreeMap<String, Vec<Message>>,
    sequence: u64,
}

impl Nats {
    pub(super) fn entry(&self, bucket: Bucket, key: &str) -> Option<&Entry> {
        self.buckets.get(&(bucket, key.to_owned()))
    }

    /// What a new watch is told first.
    pub(super) fn entries(&self, bucket: Bucket) -> Vec<Change> {
        let of_bucket = self.buckets.iter().filter(|((of, _), _)| *of == bucket);
        of_bucket
            .map(|((_, key), entry)| Change {
                bucket,
                key: key.clone(),
                revision: entry.revision,
                value: entry.value.clone(),
            })
            .collect()
    }

    pub(super) fn messages(&self, subject: &str) -> &[Message] {
        self.subjects.get(subject).map_or(&[], |messages| messages)
    }

    pub(super) fn apply(&mut self, op: &Op, now: Duration) -> (Answer, Option<Change>) {
        match op {
            Op::Read { bucket, key } => {
                let entry = self.entry(*bucket, key);
                (Answer::Found(entry.map(|entry| (entry.revision, entry.value.clone()))), None)
            }
            Op::Write { bucket, key, expected, value } => {
                let current = self.entry(*bucket, key).map_or(0, |entry| entry.revision);
                if current != *expected {
                    return (Answer::Conflict, None);
                }
                let revision = self.revisions.entry(*bucket).or_default();
                *revision += 1;
                let entry = Entry { revision: *revision, value: value.clone(), changed: now };
                let change = Change { bucket: *bucket, key: key.clone(), revision: *revision, value: value.clone() };
                self.buckets.insert((*bucket, key.clone()), entry);
                (Answer::Done(change.revision), Some(change))
            }
            Op::ReadLast { subject } => {
                let last = self.messages(subject).last();
                (Answer::Last(last.map(|message| (message.sequence, message.id.clone()))), None)
            }
            Op::Publish { subject, id, expected_last, body } => {
                let messages = self.subjects.entry(subject.clone()).or_default();
                let mut recent = messages.iter().rev().take_while(|message| message.at + DUPLICATES > now);
                if let Some(known) = recent.find(|message| message.id == *id) {
                    return (Answer::Done(known.sequence), None);
                }
                if messages.last().map_or(0, |message| message.sequence) != *expected_last {
                    return (Answer::Conflict, None);
                }
                self.sequence += 1;
                let sequence = self.sequence;
                messages.push(Message { sequence, id: id.clone(), body: body.clone(), at: now });
                (Answer::Done(sequence), None)
            }
        }
    }
}
