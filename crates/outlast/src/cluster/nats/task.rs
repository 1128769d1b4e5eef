//! The task that keeps a replica connected: it opens connections, holds the name of the replica, runs the watches, and
//! begins again when a connection is lost.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    pin::Pin,
    rc::Rc,
    time::{Duration, Instant},
};

use async_nats::{Event, Subscriber};
use futures_core::Stream;
use outlast_core::cluster::server_watch::ServerWatch;
use tokio::{
    sync::{mpsc, oneshot, watch as signal},
    task::JoinSet,
    time::{sleep, sleep_until, timeout},
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
/// How long another server may take to show that it can be used instead of a silent one.
const TRIAL_MAX: Duration = Duration::from_secs(5);
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
    /// JetStream is silent there, and answers on this connection.
    Moved(Box<Opened>),
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
        let mut moved: Option<Box<Opened>> = None;
        loop {
            let result = match moved.take() {
                Some(opened) => Ok(*opened),
                None => tokio::select! {
                    result = open(&self.settings, &self.names, self.own.instance, &servers, true) => result,
                    _ = &mut self.close => return,
                },
            };
            let result = match result {
                Ok(opened) => {
                    learn(&mut servers, &opened);
                    self.attend(opened, &servers).await
                }
                Err(error) => Err(error),
            };
            match result {
                Ok(Ended::Closed) => return,
                Ok(Ended::Moved(opened)) => {
                    (pause, said) = (PAUSE_FIRST, String::new());
                    let why = format!("JetStream does not answer there, and answers at {}", opened.server.url);
                    moved = Some(opened);
                    self.tell(News::Down(why)).await;
                    continue;
                }
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
    async fn attend(&mut self, opened: Opened, servers: &[String]) -> Result<Ended, NatsError> {
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
        let watch = RefCell::new(ServerWatch::new(Instant::now()));
        let others = servers.iter().filter(|server| ***server != *link.server).map(String::as_str).collect();
        let Task { settings, names, own, close, .. } = self;
        let trials = Trials { settings, names, own, others };
        let ended = tokio::select! {
            by = keep_name(&link, own, &revision, &watch) => Ended::Taken(by),
            opened = trials.find(&watch) => Ended::Moved(Box::new(opened)),
            why = lost_connection(&mut events) => Ended::Lost(why),
            // A watch runs as long as the connection. If one panicked, everything begins again.
            Some(_) = watches.join_next() => Ended::Lost("a watch of a bucket ended".to_owned()),
            _ = close => {
                let _ = timeout(OPERATION_MAX, presence::leave(&link, own)).await;
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
async fn keep_name(link: &Link, own: &Presence, revision: &Cell<u64>, watch: &RefCell<ServerWatch>) -> Presence {
    loop {
        sleep(presence::RENEW).await;
        let written = match presence::renew(link, own, revision.get()).await {
            Written::Done(new) => Ok(new),
            // The entry expired, another replica took it, or the result is not known.
            Written::Conflict | Written::Unknown(_) => presence::claim(link, own).await,
        };
        match written {
            Ok(new) => {
                revision.set(new);
                watch.borrow_mut().answered(Instant::now());
            }
            Err(NatsError::NameTaken { by }) => return by,
            Err(_) => {}
        }
    }
}

/// Attempts to use another server while the connection to a silent one stays: without JetStream, it still carries packets.
struct Trials<'a> {
    settings: &'a NatsSettings,
    names: &'a Rc<Names>,
    own: &'a Presence,
    others: Vec<&'a str>,
}

impl Trials<'_> {
    /// Ends when JetStream is silent on the connection in use and was found to answer on another.
    async fn find(&self, watch: &RefCell<ServerWatch>) -> Opened {
        loop {
            let deadline = watch.borrow().deadline();
            sleep_until(deadline.into()).await;
            if Instant::now() < watch.borrow().deadline() {
                continue;
            }
            for server in &self.others {
                if let Ok(Ok(opened)) = timeout(TRIAL_MAX, self.try_one(server)).await
                    && watch.borrow().is_silent(Instant::now())
                {
                    return opened;
                }
            }
            watch.borrow_mut().tried(Instant::now());
        }
    }

    /// The server must store something, too: one without its peers may still answer to reads.
    async fn try_one(&self, server: &str) -> Result<Opened, NatsError> {
        let opened = open(self.settings, self.names, self.own.instance, &[server.to_owned()], true).await?;
        presence::claim(&opened.link, self.own).await?;
        Ok(opened)
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
