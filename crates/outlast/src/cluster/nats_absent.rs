//! In the place of `nats` in a build without the feature `cluster`, in which there is no connection to NATS.

use std::{
    future::{Future, ready},
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;

use super::NatsSettings;
pub(crate) use super::nats_events::{
    AuditEntry, AuditFrom, AuditPage, Bucket, Expected, Heard, Presence, Probed, ReplyTo, ServerInfo, Written,
};

/// Never connects.
pub(crate) struct Nats;

impl Nats {
    /// Not called: a configuration with `[cluster]` is an error in this build.
    pub(crate) fn connect(_: NatsSettings, _: u64, _: Option<String>) -> Nats {
        Nats
    }

    pub(crate) fn poll(&mut self, _: &mut Context<'_>) -> Poll<Heard> {
        Poll::Pending
    }

    pub(crate) fn poll_message(&mut self, _: &mut Context<'_>) -> Poll<Heard> {
        Poll::Pending
    }

    pub(crate) fn publish(&mut self, _: u64, _: Bytes) {}

    pub(crate) fn probe(&mut self, _: u64, _: Bytes, _: Duration) {}

    pub(crate) fn answer_probe(&mut self, _: ReplyTo, _: Bytes) {}

    pub(crate) fn ask(&mut self, _: u64, _: u64, _: Bytes, _: Duration) {}

    pub(crate) fn answer(&mut self, _: ReplyTo, _: Bytes) {}

    pub(crate) fn read(&mut self, _: Bucket, _: &str, _: u64) {}

    pub(crate) fn write(&mut self, _: Bucket, _: &str, _: Expected, _: Bytes, _: u64) {}

    pub(crate) fn delete(&mut self, _: Bucket, _: &str, _: Option<u64>) {}

    pub(crate) fn read_last_audit(&mut self, _: u64) {}

    pub(crate) fn publish_audit(&mut self, _: String, _: u64, _: Bytes, _: u64) {}

    pub(crate) fn audit_replicas(&mut self, _: u64) {}

    pub(crate) fn read_audit(&mut self, _: AuditFrom, _: u64) {}

    pub(crate) fn server(&self) -> Option<ServerInfo> {
        None
    }

    pub(crate) fn close(&mut self) -> impl Future<Output = ()> + use<> {
        ready(())
    }
}

impl Presence {
    pub(crate) fn read(_: &[u8]) -> Option<Presence> {
        None
    }
}
