//! A watch of one bucket: its entries, and each change of it. A watch that lost a message, its consumer or its stream is
//! reported, and begins again with all entries, so that no change is missed.

use std::time::Duration;

use async_nats::{
    StatusCode, Subscriber,
    header::NATS_LAST_CONSUMER,
    jetstream::{
        Message,
        consumer::{AckPolicy, DeliverPolicy, push},
    },
};
use tokio::{
    sync::mpsc,
    time::{error::Elapsed, sleep, timeout},
};

use super::{
    Bucket, Heard,
    operations::{Link, is_deleted},
    task::{News, next},
};

/// A consumer without messages sends one as often; after two that are missing the watch begins again.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// How much later than that it may come.
const LATE: Duration = Duration::from_millis(500);
const LOST: &str = "a message was lost";
/// The pause before a watch begins again.
const PAUSE: Duration = Duration::from_millis(250);

/// Why a watch ended.
enum Ended {
    Failed(String),
    /// The handle was dropped.
    Dropped,
}

/// Runs until the connection is dropped.
pub(super) async fn watch(link: Link, bucket: Bucket, news: mpsc::Sender<News>) {
    let mut is_lost = false;
    loop {
        let ended = watch_once(&link, bucket, &mut is_lost, &news).await;
        let Ended::Failed(why) = ended else { return };
        if !is_lost && news.send(News::Heard(Heard::WatchLost { bucket, why })).await.is_err() {
            return;
        }
        is_lost = true;
        sleep(PAUSE).await;
    }
}

async fn watch_once(link: &Link, bucket: Bucket, is_lost: &mut bool, news: &mpsc::Sender<News>) -> Ended {
    let inbox = link.client.new_inbox();
    // The stream of messages that async-nats offers does not notice that nothing arrives after a heartbeat, so heartbeats
    // are awaited here.
    let mut messages = match link.client.subscribe(inbox.clone()).await {
        Ok(messages) => messages,
        Err(error) => return Ended::Failed(error.to_string()),
    };
    let config = push::Config {
        deliver_subject: inbox,
        ack_policy: AckPolicy::None,
        deliver_policy: match bucket {
            // Entries of sessions are read one by one when they are needed; there may be too many to report all of them.
            Bucket::Sessions => DeliverPolicy::New,
            Bucket::Replicas | Bucket::Leases | Bucket::State => DeliverPolicy::LastPerSubject,
        },
        filter_subject: link.names.key(bucket, ">"),
        idle_heartbeat: HEARTBEAT,
        inactive_threshold: Duration::from_secs(10),
        max_deliver: 1,
        memory_storage: true,
        num_replicas: 1,
        // Without flow control: at the limit of the subscription a message is lost, which the numbers show.
        ..push::Config::default()
    };
    if let Err(error) = link.jetstream.create_consumer_on_stream(config, link.names.stream_of(bucket)).await {
        return Ended::Failed(error.to_string());
    }
    *is_lost = false;
    if news.send(News::Heard(Heard::Watching { bucket })).await.is_err() {
        return Ended::Dropped;
    }
    let prefix = link.names.key(bucket, "");
    let mut last: u64 = 0;
    loop {
        let message = match next_within(&mut messages).await {
            Ok(Some(message)) => message,
            Ok(None) => return Ended::Failed("its subscription ended".to_owned()),
            Err(_) => return Ended::Failed("nothing was received from it for too long".to_owned()),
        };
        if let Some(status) = message.status {
            let sent = message.headers.as_ref().and_then(|headers| headers.get_last(NATS_LAST_CONSUMER));
            let is_whole = sent.and_then(|sent| sent.as_str().parse().ok()).is_none_or(|sent: u64| sent == last);
            match status {
                StatusCode::IDLE_HEARTBEAT if is_whole => continue,
                StatusCode::IDLE_HEARTBEAT => return Ended::Failed(LOST.to_owned()),
                _ => return Ended::Failed(message.description.unwrap_or_else(|| status.to_string())),
            }
        }
        let message = Message { message, context: link.jetstream.clone() };
        let Ok(info) = message.info() else { return Ended::Failed("a message has no number".to_owned()) };
        if info.consumer_sequence != last + 1 {
            return Ended::Failed(LOST.to_owned());
        }
        last = info.consumer_sequence;
        let revision = info.stream_sequence;
        let Some(key) = message.subject.strip_prefix(&prefix) else { continue };
        let value = (!is_deleted(message.headers.as_ref())).then(|| message.payload.clone());
        let changed = Heard::Changed { bucket, key: key.to_owned(), revision, value };
        if news.send(News::Heard(changed)).await.is_err() {
            return Ended::Dropped;
        }
    }
}

/// The next message or heartbeat. A process that was stopped reads what came meanwhile before it gives up.
async fn next_within(messages: &mut Subscriber) -> Result<Option<async_nats::Message>, Elapsed> {
    match timeout(HEARTBEAT * 2, next(messages)).await {
        Ok(message) => Ok(message),
        Err(_) => timeout(LATE, next(messages)).await,
    }
}
