//! A watch of one bucket: its entries, and each change of it. A watch that lost a message or its consumer begins again where
//! it was.

use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, push};
use tokio::{sync::mpsc, time::sleep};

use super::{
    Bucket, Heard,
    operations::{Link, is_deleted},
    task::{News, next},
};

/// A consumer without messages sends one as often; after two that are missing the watch begins again.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// The pause before a watch begins again.
const PAUSE: Duration = Duration::from_millis(250);

/// Runs until the connection is dropped.
pub(super) async fn watch(link: Link, bucket: Bucket, news: mpsc::Sender<News>) {
    // Entries of sessions are read one by one when they are needed; there may be too many to report all of them.
    let mut from = match bucket {
        Bucket::Sessions => DeliverPolicy::New,
        Bucket::Replicas | Bucket::Leases | Bucket::State => DeliverPolicy::LastPerSubject,
    };
    while let Some(last) = watch_once(&link, bucket, from, &news).await {
        if last != 0 {
            from = DeliverPolicy::ByStartSequence { start_sequence: last + 1 };
        }
        sleep(PAUSE).await;
    }
}

/// Returns the last sequence that was reported, 0 if there was none; `None` if the handle was dropped.
async fn watch_once(link: &Link, bucket: Bucket, from: DeliverPolicy, news: &mpsc::Sender<News>) -> Option<u64> {
    let mut last = match from {
        DeliverPolicy::ByStartSequence { start_sequence } => start_sequence - 1,
        _ => 0,
    };
    let config = push::Config {
        deliver_subject: link.client.new_inbox(),
        ack_policy: AckPolicy::None,
        deliver_policy: from,
        filter_subject: link.names.key(bucket, ">"),
        idle_heartbeat: HEARTBEAT,
        inactive_threshold: Duration::from_secs(10),
        max_deliver: 1,
        memory_storage: true,
        num_replicas: 1,
        // Without flow control: at the limit of the subscription a message is lost, which the numbers show.
        ..push::Config::default()
    };
    let consumer = match link.jetstream.create_consumer_on_stream(config, link.names.stream_of(bucket)).await {
        Ok(consumer) => consumer,
        Err(_) => return Some(last),
    };
    let Ok(mut messages) = consumer.messages().await else { return Some(last) };
    let prefix = link.names.key(bucket, "");
    let mut expected = 1;
    while let Some(Ok(message)) = next(&mut messages).await {
        let Ok(info) = message.info() else { break };
        if info.consumer_sequence != expected {
            break;
        }
        expected += 1;
        last = info.stream_sequence;
        let Some(key) = message.subject.strip_prefix(&prefix) else { continue };
        let value = (!is_deleted(message.headers.as_ref())).then(|| message.payload.clone());
        let changed = Heard::Changed { bucket, key: key.to_owned(), revision: last, value };
        news.send(News::Heard(changed)).await.ok()?;
    }
    Some(last)
}
