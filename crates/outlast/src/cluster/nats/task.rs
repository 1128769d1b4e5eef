//! The task that keeps a replica connected: it opens connections, holds the name of the replica, runs the watches, and
//! begins again when a connection is lost.

use std::{cell::Cell, future::poll_fn, pin::Pin, rc::Rc, time::Duration};

use async_nats::{Event, Subscriber};
use futures_core::Stream;
use tokio::{
    sync::{mpsc, oneshot, watch as signal},
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{
    Heard, Presence, ServerInfo, Written,
    connect::{Opened, open, subscribe},
    error::NatsError,
    names::{BUCKETS, Names},
    operations::{Link, OPERATION_MAX},
    presence,
    watch::watch,
};
use crate::cluster::NatsSettings;

/// Pauses between attempts to connect double from the first to the last.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// Servers that are tried, those that the servers name included.
const SERVERS_MAX: usize = 32;

/// What the task tells the handle.
pub(super) enum News {
    Up(Box<Up>),
    Down(String),
    Heard(Heard),
}

/// A connection that is in use.
pub(super) struct Up {
    pub link: Link,
    pub subscriber: Subscriber,
    pub server: ServerInfo,
    pub payload_max: usize,
    /// Dropped with the connection, which ends the operations in flight.
    pub lost: signal::Sender<()>,
}

pub(super) struct Task {
    pub settings: NatsSettings,
    pub names: Rc<Names>,
    pub own: Presence,
    pub news: mpsc::Sender<News>,
    pub close: oneshot::Receiver<()>,
}

/// Why a connection is not used any more.
enum Ended {
    Lost(String),
    Taken(Presence),
    Closed,
}

impl Task {
    pub(super) async fn run(mut self) {
        let mut pause = PAUSE_FIRST;
        let mut servers = self.settings.servers.clone();
        // Replicas spread over the servers.
        let first = self.own.instance as usize % servers.len().max(1);
        servers.rotate_left(first);
        let mut said = String::new();
        loop {
            let result = tokio::select! {
                result = open(&self.settings, &self.names, self.own.instance, &servers, true) => result,
                _ = &mut self.close => return,
            };
            let result = match result {
                Ok(opened) => {
                    learn(&mut servers, &opened);
                    self.attend(opened).await
                }
                Err(error) => Err(error),
            };
            match result {
                Ok(Ended::Closed) => return,
                Ok(Ended::Lost(why)) => {
                    (pause, said) = (PAUSE_FIRST, String::new());
                    self.tell(News::Down(why)).await;
                }
                Ok(Ended::Taken(by)) => {
                    self.tell(News::Down("another replica has the name of this one".to_owned())).await;
                    return self.tell(News::Heard(Heard::NameTaken { by })).await;
                }
                Err(NatsError::NameTaken { by }) => {
                    return self.tell(News::Heard(Heard::NameTaken { by })).await;
                }
                Err(error) => {
                    let line = error.line();
                    if said != line {
                        self.tell(News::Heard(Heard::Note(line.clone()))).await;
                        said = line;
                    }
                }
            }
            servers.rotate_left(1);
            tokio::select! {
                () = sleep(pause) => {}
                _ = &mut self.close => return,
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Uses a connection until it is lost. An error means that it was never reported as connected.
    async fn attend(&mut self, opened: Opened) -> Result<Ended, NatsError> {
        let Opened { link, mut events, server, payload_max, .. } = opened;
        // Before the name is claimed: a replica with the same name asks this subscription whether it is in use.
        let subscriber = subscribe(&link).await?;
        let revision = Rc::new(Cell::new(presence::claim(&link, &self.own).await?));
        let (lost, _) = signal::channel(());
        let up = Up { link: link.clone(), subscriber, server, payload_max, lost };
        self.tell(News::Up(Box::new(up))).await;
        let mut watches = JoinSet::new();
        for bucket in BUCKETS {
            watches.spawn_local(watch(link.clone(), bucket, self.news.clone()));
        }
        let ended = tokio::select! {
            by = keep_name(&link, &self.own, &revision) => Ended::Taken(by),
            why = lost_connection(&mut events) => Ended::Lost(why),
            // A watch runs as long as the connection. If one panicked, everything begins again.
            Some(_) = watches.join_next() => Ended::Lost("a watch of a bucket ended".to_owned()),
            _ = &mut self.close => {
                let _ = timeout(OPERATION_MAX, presence::leave(&link, &self.own)).await;
                let _ = timeout(OPERATION_MAX, link.client.flush()).await;
                Ended::Closed
            }
        };
        watches.shutdown().await;
        Ok(ended)
    }

    async fn tell(&self, news: News) {
        // The handle may have been dropped; then the task ends with it.
        let _ = self.news.send(news).await;
    }
}

/// Renews the entry of this replica; returns the other replica that has its name.
async fn keep_name(link: &Link, own: &Presence, revision: &Cell<u64>) -> Presence {
    loop {
        sleep(presence::RENEW).await;
        if let Written::Done(new) = presence::renew(link, own, revision.get()).await {
            revision.set(new);
            continue;
        }
        // The entry expired, another replica took it, or the result is not known.
        match presence::claim(link, own).await {
            Ok(new) => revision.set(new),
            Err(NatsError::NameTaken { by }) => return by,
            Err(_) => {}
        }
    }
}

async fn lost_connection(events: &mut mpsc::Receiver<Event>) -> String {
    while let Some(event) = events.recv().await {
        match event {
            Event::Disconnected => return "the connection to NATS was lost".to_owned(),
            Event::LameDuckMode => return "the NATS server shuts down".to_owned(),
            _ => {}
        }
    }
    "the connection to NATS ended".to_owned()
}

/// Adds the servers that a server names.
fn learn(servers: &mut Vec<String>, opened: &Opened) {
    for other in &opened.others {
        if servers.len() < SERVERS_MAX && !servers.contains(other) {
            servers.push(other.clone());
        }
    }
}

pub(super) async fn next<S: Stream + Unpin>(stream: &mut S) -> Option<S::Item> {
    poll_fn(|cx| Pin::new(&mut *stream).poll_next(cx)).await
}
