//! The connection to NATS: packets between replicas, probes, buckets, the audit stream and presence. It reports what
//! happened ([`Heard`]) and decides nothing; a connection that is lost is opened again for ever.

use std::{
    collections::{HashMap, VecDeque},
    mem,
    pin::{Pin, pin},
    rc::Rc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use async_nats::{Message, Subject};
use bytes::Bytes;
use futures_core::Stream;
use tokio::{
    sync::{mpsc, oneshot},
    task::{JoinHandle, JoinSet, spawn_local},
    time::timeout,
};

use self::{
    names::Names,
    operations::{KIND, Link, OPERATION_MAX, OPERATOR, PRESENCE, PROBE},
    task::{News, Task, Up},
};
use super::NatsSettings;
pub(crate) use super::nats_events::{
    AuditEntry, AuditFrom, AuditPage, Bucket, Expected, Heard, Presence, Probed, ReplyTo, ServerInfo, Written,
};

mod connect;
mod error;
mod names;
mod operations;
mod presence;
mod task;
mod watch;

#[cfg(all(test, unix))]
mod tests;

pub(crate) use connect::check;

/// The oldest supported version of nats-server.
pub(crate) const OLDEST: &str = "2.10";
/// The smallest limit of a message that a server may have.
pub(crate) const PAYLOAD_MIN: usize = 64 << 10;
/// What a message needs beside its payload: the instance of the sender, headers.
const OVERHEAD: usize = 1024;
/// Operations in flight. A further one fails at once.
const OPERATIONS_MAX: usize = 4096;
/// News of the task that wait for the loop; at the limit the watches wait.
const NEWS_MAX: usize = 1024;
/// Bytes of packets that wait for the connection. Further packets are dropped, as a network may drop them.
const OUTBOX_MAX: usize = 64 << 20;
/// Subjects of replicas that are remembered.
const SUBJECTS_MAX: usize = 1024;

/// A handle; all waiting is done by local tasks of the runtime. They must be dropped in its context, because a subscription of
/// async-nats spawns a task when it is dropped.
pub(crate) struct Nats {
    names: Rc<Names>,
    news: mpsc::Receiver<News>,
    task: Option<JoinHandle<()>>,
    /// Dropped or sent, it ends the task.
    close: Option<oneshot::Sender<()>>,
    up: Option<Up>,
    outbox: Outbox,
    operations: JoinSet<Option<Heard>>,
    /// Why the connection was lost, until the operations in flight have ended.
    lost: Option<String>,
    /// Results of operations that could not be begun.
    failed: VecDeque<Heard>,
    payload_max: usize,
    waker: Option<Waker>,
}

/// Packets in order, for the connection.
#[derive(Default)]
struct Outbox {
    queue: VecDeque<(Subject, Bytes)>,
    bytes: usize,
    /// The packet that the connection is taking.
    sending: Option<Pin<Box<dyn Future<Output = ()>>>>,
    subjects: HashMap<u64, Subject>,
    dropped: u64,
}

impl Nats {
    /// Begins to connect. `address` is where clients of this replica connect.
    pub(crate) fn connect(settings: NatsSettings, instance: u64, address: Option<String>) -> Nats {
        let names = Rc::new(Names::new(&settings));
        let own = Presence::own(&settings.replica, instance, address);
        let (tell, news) = mpsc::channel(NEWS_MAX);
        let (close, closed) = oneshot::channel();
        let task = Task { settings, names: names.clone(), own, news: tell, close: closed };
        Nats {
            names,
            news,
            task: Some(spawn_local(task.run())),
            close: Some(close),
            up: None,
            outbox: Outbox::default(),
            operations: JoinSet::new(),
            lost: None,
            failed: VecDeque::new(),
            payload_max: PAYLOAD_MIN - OVERHEAD,
            waker: None,
        }
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Heard> {
        if !self.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            self.waker = Some(cx.waker().clone());
        }
        loop {
            if let Some(heard) = self.failed.pop_front() {
                return Poll::Ready(heard);
            }
            match self.operations.poll_join_next(cx) {
                Poll::Ready(Some(Ok(Some(heard)))) => return Poll::Ready(heard),
                Poll::Ready(Some(_)) => continue,
                Poll::Ready(None) if self.lost.is_some() => {
                    let why = self.lost.take().unwrap_or_default();
                    return Poll::Ready(Heard::Disconnected { why });
                }
                Poll::Pending if self.lost.is_some() => return Poll::Pending,
                Poll::Ready(None) | Poll::Pending => {}
            }
            if let Some(up) = &self.up {
                self.outbox.poll(&up.link, cx);
            }
            match self.news.poll_recv(cx) {
                Poll::Ready(Some(News::Up(up))) => {
                    self.payload_max = up.payload_max;
                    self.up = Some(*up);
                    return Poll::Ready(Heard::Connected { payload_max: self.payload_max });
                }
                Poll::Ready(Some(News::Down(why))) => {
                    self.up = None;
                    self.outbox = Outbox { dropped: self.outbox.dropped, ..Outbox::default() };
                    self.lost = Some(why);
                }
                Poll::Ready(Some(News::Heard(heard))) => return Poll::Ready(heard),
                Poll::Ready(None) | Poll::Pending => return Poll::Pending,
            }
        }
    }

    /// The next message of another replica. Another task than that of [`Nats::poll`] may poll it; it is to do so after
    /// [`Heard::Connected`], because each connection has its own queue.
    pub(crate) fn poll_message(&mut self, cx: &mut Context<'_>) -> Poll<Heard> {
        while let Some(up) = &mut self.up
            && let Poll::Ready(Some(message)) = Pin::new(&mut up.subscriber).poll_next(cx)
        {
            if let Some(heard) = self.message(message) {
                return Poll::Ready(heard);
            }
        }
        Poll::Pending
    }

    /// A message to the subject of this replica.
    fn message(&mut self, message: Message) -> Option<Heard> {
        let (from, payload) = message.payload.split_first_chunk::<8>()?;
        let from = u64::from_be_bytes(*from);
        let payload = message.payload.slice_ref(payload);
        let Some(headers) = &message.headers else { return Some(Heard::Packet { from, packet: payload }) };
        let kind = headers.get(KIND)?.as_str();
        let reply = ReplyTo(message.reply?.to_string());
        match kind {
            PROBE => Some(Heard::Probe { from, packet: payload, reply }),
            OPERATOR => Some(Heard::Operator { request: payload, reply }),
            PRESENCE => {
                self.answer(reply, Bytes::new());
                None
            }
            _ => None,
        }
    }

    /// Sends a packet, or drops it if there is no connection.
    pub(crate) fn publish(&mut self, to: u64, packet: Bytes) {
        let Some(up) = &self.up else { return };
        let subject = self.outbox.subject(&self.names, to);
        if !self.outbox.put(&up.link, subject, up.link.signed(&packet)) {
            self.wake();
        }
    }

    pub(crate) fn probe(&mut self, to: u64, packet: Bytes, within: Duration) {
        let failed = Heard::ProbeEnded { of: to, result: Probed::Failed };
        self.begin(Some(failed), async move |link| {
            Some(Heard::ProbeEnded { of: to, result: link.probe(to, packet, within).await })
        });
    }

    pub(crate) fn answer_probe(&mut self, reply: ReplyTo, packet: Bytes) {
        self.answer(reply, packet);
    }

    /// Sends the request of an operator to a replica.
    pub(crate) fn ask(&mut self, to: u64, ticket: u64, request: Bytes, within: Duration) {
        let failed = Heard::Asked { ticket, result: Err(NO_CONNECTION.to_owned()) };
        self.begin(Some(failed), async move |link| {
            let result = match link.request(to, OPERATOR, request, within).await {
                Ok(answer) => Ok(answer),
                Err((true, _)) => Err("the replica has ended".to_owned()),
                Err((false, why)) => Err(why),
            };
            Some(Heard::Asked { ticket, result })
        });
    }

    pub(crate) fn answer(&mut self, ReplyTo(subject): ReplyTo, answer: Bytes) {
        let Some(up) = &self.up else { return };
        if !self.outbox.put(&up.link, Subject::from(subject), answer) {
            self.wake();
        }
    }

    /// Reads from the leader of the bucket.
    pub(crate) fn read(&mut self, bucket: Bucket, key: &str, ticket: u64) {
        let key = key.to_owned();
        let failed = Heard::Read { ticket, found: Err(NO_CONNECTION.to_owned()) };
        self.begin(Some(failed), async move |link| Some(Heard::Read { ticket, found: link.read(bucket, &key).await }));
    }

    pub(crate) fn write(&mut self, bucket: Bucket, key: &str, expected: Expected, value: Bytes, ticket: u64) {
        let key = key.to_owned();
        let failed = Heard::Written { ticket, result: Written::Unknown(NO_CONNECTION.to_owned()) };
        self.begin(Some(failed), async move |link| {
            Some(Heard::Written { ticket, result: link.write(bucket, &key, expected, value).await })
        });
    }

    /// Without a report: an entry that is not deleted is found or expires.
    pub(crate) fn delete(&mut self, bucket: Bucket, key: &str, expected: Option<u64>) {
        let key = key.to_owned();
        self.begin(None, async move |link| {
            let _ = link.delete(bucket, &key, expected).await;
            None
        });
    }

    /// The last entry of this replica in the audit stream.
    pub(crate) fn read_last_audit(&mut self, ticket: u64) {
        let failed = Heard::LastAudit { ticket, last: Err(NO_CONNECTION.to_owned()) };
        self.begin(Some(failed), async move |link| Some(Heard::LastAudit { ticket, last: link.last_audit().await }));
    }

    /// Appends an entry if the last one of this replica has the sequence `expected_last` (0: there is none).
    pub(crate) fn publish_audit(&mut self, id: String, expected_last: u64, body: Bytes, ticket: u64) {
        let failed = Heard::AuditPublished { ticket, result: Written::Unknown(NO_CONNECTION.to_owned()) };
        self.begin(Some(failed), async move |link| {
            Some(Heard::AuditPublished { ticket, result: link.publish_audit(&id, expected_last, body).await })
        });
    }

    /// The replicas, also former ones, whose entries are in the audit stream.
    pub(crate) fn audit_replicas(&mut self, ticket: u64) {
        let failed = Heard::AuditReplicas { ticket, replicas: Err(NO_CONNECTION.to_owned()) };
        self.begin(Some(failed), async move |link| {
            Some(Heard::AuditReplicas { ticket, replicas: link.audit_replicas().await })
        });
    }

    /// A page of the entries of all replicas.
    pub(crate) fn read_audit(&mut self, from: AuditFrom, ticket: u64) {
        let failed = Heard::AuditPage { ticket, page: Err(NO_CONNECTION.to_owned()) };
        self.begin(Some(failed), async move |link| {
            Some(Heard::AuditPage { ticket, page: link.audit_page(from).await })
        });
    }

    pub(crate) fn server(&self) -> Option<ServerInfo> {
        self.up.as_ref().map(|up| up.server.clone())
    }

    /// Deletes the entry of this replica and closes the connection, after what was published.
    pub(crate) fn close(&mut self) -> impl Future<Output = ()> + use<> {
        let (up, close, task) = (self.up.take(), self.close.take(), self.task.take());
        let mut outbox = std::mem::take(&mut self.outbox);
        // The task waits for the news to be read; no news is read any more.
        self.news.close();
        let mut operations = std::mem::take(&mut self.operations);
        async move {
            if let Some(up) = up {
                let _ = timeout(OPERATION_MAX, outbox.flush(&up.link)).await;
            }
            if let Some(close) = close {
                let _ = close.send(());
            }
            if let Some(task) = task {
                let _ = task.await;
            }
            operations.shutdown().await;
        }
    }

    /// Runs an operation; `failed` is its result if it cannot be begun or the connection is lost.
    fn begin<F>(&mut self, failed: Option<Heard>, operation: F)
    where
        F: AsyncFnOnce(&Link) -> Option<Heard> + 'static,
    {
        self.wake();
        let Some(up) = self.up.as_ref().filter(|_| self.operations.len() < OPERATIONS_MAX) else {
            return self.failed.extend(failed);
        };
        let (link, mut lost) = (up.link.clone(), up.lost.subscribe());
        self.operations.spawn_local(async move {
            tokio::select! {
                biased;
                heard = operation(&link) => heard,
                _ = lost.changed() => failed,
            }
        });
    }

    /// Something is to be polled that was not there at the last poll.
    fn wake(&mut self) {
        self.waker.take().into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
impl Nats {
    fn payload_max(&self) -> usize {
        self.payload_max
    }

    fn is_connected(&self) -> bool {
        self.up.is_some()
    }

    /// Packets that were dropped because the connection did not take them.
    fn dropped(&self) -> u64 {
        self.outbox.dropped
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        self.task.iter().for_each(JoinHandle::abort);
    }
}

const NO_CONNECTION: &str = "no connection to NATS";

impl Outbox {
    fn subject(&mut self, names: &Names, to: u64) -> Subject {
        if SUBJECTS_MAX <= self.subjects.len() {
            self.subjects.clear();
        }
        self.subjects.entry(to).or_insert_with(|| names.replica(to)).clone()
    }

    /// Usually the connection takes the packet at once. False: it waits, and the outbox must be polled.
    fn put(&mut self, link: &Link, subject: Subject, payload: Bytes) -> bool {
        if self.sending.is_none() && self.queue.is_empty() {
            let sending = pin!(link.client.publish(subject.clone(), payload.clone()));
            if sending.poll(&mut Context::from_waker(Waker::noop())).is_ready() {
                return true;
            }
        }
        if OUTBOX_MAX < self.bytes + payload.len() {
            self.dropped += 1;
            return true;
        }
        self.bytes += payload.len();
        self.queue.push_back((subject, payload));
        false
    }

    fn poll(&mut self, link: &Link, cx: &mut Context<'_>) {
        loop {
            if let Some(sending) = &mut self.sending {
                if sending.as_mut().poll(cx).is_pending() {
                    return;
                }
                self.sending = None;
            }
            let Some((subject, payload)) = self.queue.pop_front() else { return };
            self.bytes -= payload.len();
            let client = link.client.clone();
            self.sending = Some(Box::pin(async move { drop(client.publish(subject, payload).await) }));
        }
    }

    async fn flush(&mut self, link: &Link) {
        if let Some(sending) = self.sending.take() {
            sending.await;
        }
        for (subject, payload) in mem::take(&mut self.queue) {
            drop(link.client.publish(subject, payload).await);
        }
        let _ = link.client.flush().await;
    }
}
