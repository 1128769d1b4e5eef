//! The connections to backends: processes and HTTP. What is sent on them, and when one is opened or closed, is decided by
//! the machine.

use std::{
    ffi::OsString,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use outlast_core::{
    exit::How,
    gateway::{Backend, Event, Kind, Link, Placement, Refused},
    message::{BYTE_ORDER_MARK, PARSED_AT_ONCE_MAX, Walk},
};
use outlast_os::{
    BootTime, Order, Stdio,
    offload::{Task, compute_for_server},
};

use super::{
    Driver, EVENTS_MAX,
    checker::is_checker,
    http::{self, HttpClient, HttpLink, HttpSettings, WaitLimits},
    ready_set::ReadyWaker,
};
use crate::{
    child::{
        ChildEvent,
        environment::{self, Environment},
        own_streams::OwnStreams,
    },
    cli::report,
};

/// How long a connection to a backend may take.
pub(super) const CONNECT_MAX: Duration = Duration::from_secs(10);
/// A child with more bytes than this in its queue has stopped reading. It is replaced, and its callers get an error.
/// The longest message fits.
const OUTBOX_MAX: usize = 64 << 20;

/// A message of a process that is parsed beside the loop. Until then nothing else is read from its process, and its later
/// events wait.
pub(super) struct LongMessage {
    line: Bytes,
    parsing: Task<Walk>,
}

/// One connection to one backend.
pub(super) struct Wire {
    pub(super) link: Link,
    pub(super) waker: ReadyWaker,
    pub(super) kind: WireKind,
}

pub(super) enum WireKind {
    /// A process, with the name of its backend and the number of lines on its stdout that were not JSON.
    Child {
        backend: String,
        diverted: u64,
    },
    Http(Box<HttpLink>),
    /// A stream to the replica that runs the backend, once one is known.
    Stream {
        backend: String,
        stream: Option<u64>,
    },
}

/// None for a process.
pub(super) fn http_settings(kind: &Kind) -> Option<HttpSettings> {
    let Kind::Http { url, headers, is_sse } = kind else { return None };
    Some(HttpSettings {
        url: url.expose().to_owned(),
        headers: headers.iter().map(|(name, value)| (name.clone(), value.expose().to_owned())).collect(),
        is_sse: *is_sse,
        limits: WaitLimits::default(),
    })
}

impl Driver {
    pub(super) fn connect(&mut self, link: Link) {
        let Some(backend) = self.gateway.settings_of(link).cloned() else { return };
        if backend.placement == Placement::One && self.cluster.is_some() {
            return self.connect_to_owner(link, &backend.name);
        }
        match &backend.kind {
            Kind::Stdio { .. } => self.start(link, &backend),
            kind @ Kind::Http { .. } => {
                let Some(settings) = http_settings(kind) else { return };
                let client = self.http.get_or_insert_with(|| HttpClient::new(CONNECT_MAX));
                let http = Box::new(HttpLink::connect(client, &settings));
                self.add_wire(link, WireKind::Http(http));
                self.tell(Event::LinkUp { link, pid: None });
            }
        }
    }

    pub(super) fn start(&mut self, link: Link, backend: &Backend) {
        let Kind::Stdio { command, args, env, cwd, sandbox } = &backend.kind else { return };
        let cwd = cwd.as_ref().map_or_else(|| self.plan.cwd.clone(), |cwd| self.plan.cwd.join(cwd.expose()));
        let configured = env.iter().map(|(name, value)| (OsString::from(name), OsString::from(value.expose())));
        let env = match backend.inherit_env {
            true => configured.collect(),
            false => {
                let Environment { all, left_out } = environment::of_backend(environment::ours(), configured, &cwd);
                self.env_left_out(&backend.name, left_out);
                all
            }
        };
        let order = Order {
            program: command.expose().into(),
            args: args.iter().map(|word| word.expose().into()).collect(),
            env,
            env_is_all: !backend.inherit_env,
            cwd,
            tag: format!("{}.{}.{}", self.plan.id, backend.name, link.serial),
            stdio: Stdio::Piped,
            sandbox: sandbox.clone(),
            live_until: self.hosts.live_until(link.serial).map(|until| BootTime(until.0)),
        };
        match self.children.start(link.serial, &order, self.plan.grace) {
            Ok(()) => self.add_wire(link, WireKind::Child { backend: backend.name.clone(), diverted: 0 }),
            Err(error) => {
                let how = self.masked(How::CouldNotStart(report::plain(&error.to_string())));
                self.tell(Event::LinkDown { link, how, stderr_tail: String::new(), unsent: Vec::new() });
            }
        }
    }

    pub(super) fn add_wire(&mut self, link: Link, kind: WireKind) {
        let waker = self.ready_set.waker(link.serial);
        waker.wake();
        self.links.insert(link.serial, Wire { link, waker, kind });
    }

    /// Notes the variables of outlast that a backend does not get; logged when they change.
    pub(super) fn env_left_out(&mut self, backend: &str, left_out: Vec<String>) {
        if self.left_out.get(backend) == Some(&left_out) {
            return;
        }
        if let Some(words) = environment::left_out_of_backend_in_words(&left_out) {
            self.journal.note(&format!("{backend}: {words}"));
        }
        self.left_out.insert(backend.to_owned(), left_out);
    }

    pub(super) fn tell_link(&mut self, link: Link, message: Bytes) {
        match self.links.get_mut(&link.serial).map(|wire| &mut wire.kind) {
            Some(WireKind::Http(http)) => return http.send(message),
            Some(WireKind::Stream { stream, .. }) => {
                if let (Some(stream), Some(replica)) = (*stream, &self.cluster) {
                    replica.borrow_mut().send(stream, message);
                }
                return;
            }
            _ => {}
        }
        if !self.tell_child(link.serial, message) {
            self.children.stop(link.serial, How::StoppedReading, self.now);
        }
    }

    /// False if the child has stopped reading.
    pub(super) fn tell_child(&mut self, serial: u64, message: Bytes) -> bool {
        let Some(child) = self.children.get_mut(serial) else { return true };
        if child.queued() >= OUTBOX_MAX {
            return false;
        }
        // Also after stdin was closed: unsent lines go to the next child.
        child.put(message, Some(0));
        self.to_flush.push(serial);
        true
    }

    pub(super) fn disconnect(&mut self, serial: u64, at_once: bool) {
        match self.links.get_mut(&serial).map(|wire| &mut wire.kind) {
            Some(WireKind::Http(http)) => http.close(at_once),
            Some(WireKind::Stream { .. }) => self.disconnect_stream(serial),
            _ if at_once => self.children.kill(serial, self.now),
            _ => self.children.stop(serial, How::Stopped, self.now),
        }
    }

    pub(super) fn poll_news(&mut self, cx: &mut Context<'_>) -> bool {
        for turn in 0..EVENTS_MAX {
            if !self.children.poll_news(cx, self.now) {
                return turn > 0;
            }
            self.hear_children();
        }
        true
    }

    /// Handles events of children until none is left or the turn is to end: one line may become a message to each client.
    /// [`Driver::flush`] calls it in every turn, so that events that are left are handled in the next ones.
    pub(super) fn hear_children(&mut self) -> bool {
        let mut moved = false;
        while let Some(event) = self.children.next_event() {
            self.heard(event);
            moved = true;
            if self.is_long() {
                break;
            }
        }
        moved
    }

    pub(super) fn heard(&mut self, event: ChildEvent) {
        match event {
            ChildEvent::Said { line, .. } if line.len() <= PARSED_AT_ONCE_MAX && line.trim_ascii().is_empty() => {}
            ChildEvent::Said { key, line } if is_checker(key) => self.checker_said(key, &line),
            ChildEvent::Said { key, line } if line.len() > PARSED_AT_ONCE_MAX => self.parse_beside(key, line),
            ChildEvent::Said { key, line } => {
                if let Some(link) = self.link(key) {
                    self.tell(Event::LinkSaid { link, message: line });
                }
            }
            ChildEvent::Logged { key, text, redacted } => {
                if let Some(Wire { kind: WireKind::Child { backend, .. }, .. }) = self.links.get(&key) {
                    self.journal.stderr_of(backend, &text, &redacted);
                }
            }
            ChildEvent::Started { key, pid } => {
                self.has_started = true;
                let Some(wire) = self.links.get(&key) else { return };
                // What the child has written is read only now: the machine did not know the child before.
                wire.waker.wake();
                // The checker reports by itself when it is ready.
                if !is_checker(key) {
                    let link = wire.link;
                    self.tell(Event::LinkUp { link, pid: Some(pid) });
                    self.set_memory_watch();
                }
            }
            ChildEvent::StartFailed { key, error } => {
                self.gone(key, How::CouldNotStart(report::plain(&error.to_string())), Vec::new());
                self.remove_wire(key);
            }
            ChildEvent::Gone { key, how, unsent } => {
                self.gone(key, how, unsent.into_iter().map(|(_, line)| line).collect());
            }
            ChildEvent::Cleared { key } => self.remove_wire(key),
            // Only a child with a terminal is suspended.
            ChildEvent::Suspended { .. } => {}
            ChildEvent::Noticed(sentence) => self.journal.note(&format!("WARNING: {sentence}")),
        }
    }

    fn parse_beside(&mut self, serial: u64, line: Bytes) {
        let Some(wire) = self.links.get(&serial) else { return };
        // The end of the work wakes the link, once the work was polled.
        wire.waker.wake();
        let is_marked = line.starts_with(BYTE_ORDER_MARK);
        let line = if is_marked { line.slice(BYTE_ORDER_MARK.len()..) } else { line };
        let text = line.clone();
        let parsing = compute_for_server(move || Walk::of(&text));
        self.long_messages.insert(serial, LongMessage { line, parsing });
        self.children.hold(serial);
    }

    /// True if a message of this link is still parsed.
    fn poll_long_message(&mut self, serial: u64, cx: &mut Context<'_>) -> bool {
        let Some(message) = self.long_messages.get_mut(&serial) else { return false };
        let Poll::Ready(parsed) = Pin::new(&mut message.parsing).poll(cx) else { return true };
        let LongMessage { line, .. } = self.long_messages.remove(&serial).expect("found above");
        if let Some(link) = self.link(serial) {
            self.tell(match parsed {
                Ok(walk) => Event::LinkSaidLong { link, message: line, walk: Box::new(walk) },
                // No thread could be started.
                Err(_) => Event::LinkSaid { link, message: line },
            });
        }
        self.children.release(serial);
        self.hear_children();
        self.links.get(&serial).into_iter().for_each(|wire| wire.waker.wake());
        true
    }

    fn remove_wire(&mut self, serial: u64) {
        self.links.remove(&serial);
        self.end_hosts();
    }

    pub(super) fn link(&self, serial: u64) -> Option<Link> {
        self.links.get(&serial).map(|wire| wire.link)
    }

    pub(super) fn gone(&mut self, serial: u64, how: How, unsent: Vec<Bytes>) {
        let Some(link) = self.link(serial) else { return };
        if is_checker(serial) {
            return self.checker_gone(serial, how);
        }
        let stderr_tail = self.children.get(serial).map(|child| child.tail().text()).unwrap_or_default();
        let stderr_tail = self.journal.mask().hide(&stderr_tail).into_owned();
        let how = self.masked(how);
        let backend = self.machine(serial).and_then(|machine| machine.backend(link.backend));
        if let Some(name) = backend.map(|backend| backend.name.clone()) {
            self.pending_restarts.values_mut().for_each(|pending| pending.note_end(&name, &stderr_tail));
        }
        self.tell(Event::LinkDown { link, how, stderr_tail, unsent });
    }

    /// The reason of an exit reaches clients, operators and files, so values of references are masked in it.
    pub(super) fn masked(&self, how: How) -> How {
        let hide = |why: String| self.journal.mask().hide(&why).into_owned();
        match how {
            How::CouldNotStart(why) => How::CouldNotStart(hide(why)),
            How::Lost(why) => How::Lost(hide(why)),
            How::Forgot(why) => How::Forgot(hide(why)),
            how => how,
        }
    }

    pub(super) fn mask_refusal(&self, refused: &mut Refused) {
        let hide = |text: &mut String| *text = self.journal.mask().hide(text).into_owned();
        hide(&mut refused.words);
        refused.challenge.as_mut().map(hide);
        refused.body.as_mut().map(hide);
    }

    pub(super) fn poll_link(&mut self, serial: u64) {
        let Some(wire) = self.links.get(&serial) else { return };
        match wire.kind {
            WireKind::Http(_) => return self.poll_http(serial),
            // What comes on a stream is reported by the replica.
            WireKind::Stream { .. } => return,
            WireKind::Child { .. } => {}
        }
        // With stdio as the only front, a slow client slows the backends down (backpressure). Beside other clients it
        // is disconnected.
        let is_low = self.listen.is_some() || self.stdio.as_ref().is_none_or(OwnStreams::is_low);
        let waker = wire.waker.clone();
        let mut cx = Context::from_waker(waker.rearm());
        if self.poll_long_message(serial, &mut cx) {
            // There may be room in its stdin again.
            return self.to_flush.push(serial);
        }
        // There may be room in its stdin again.
        self.to_flush.push(serial);
        // Nothing more is read before all that was read is handled.
        self.hear_children();
        if self.children.has_events()
            || self.children.poll_output(serial, is_low || is_checker(serial), &mut cx, self.now)
        {
            waker.wake();
        }
        self.hear_children();
    }

    pub(super) fn poll_http(&mut self, serial: u64) {
        for _ in 0..EVENTS_MAX {
            let Some(Wire { link, waker, kind: WireKind::Http(http) }) = self.links.get_mut(&serial) else { return };
            let link = *link;
            let Poll::Ready(heard) = http.poll(&mut Context::from_waker(waker.rearm())) else { return };
            match heard {
                http::LinkEvent::Said(message) => self.tell(Event::LinkSaid { link, message }),
                http::LinkEvent::SaidFor { id, message } => {
                    self.tell(Event::LinkSaidFor { link, id, message, walk: None });
                }
                http::LinkEvent::SaidLong { within: Some(id), message, walk } => {
                    self.tell(Event::LinkSaidFor { link, id, message, walk: Some(walk) });
                }
                http::LinkEvent::SaidLong { within: None, message, walk } => {
                    self.tell(Event::LinkSaidLong { link, message, walk });
                }
                http::LinkEvent::Lost { id, was_sent, why } => {
                    let why = self.journal.mask().hide(&why).into_owned();
                    self.tell(Event::RequestLost { link, id, was_sent, why });
                }
                http::LinkEvent::Refused { id, mut refused } => {
                    self.mask_refusal(&mut refused);
                    self.tell(Event::RequestRefused { link, id, refused });
                }
                http::LinkEvent::Denied(mut refused) => {
                    self.mask_refusal(&mut refused);
                    self.tell(Event::LinkDenied { link, refused });
                }
                http::LinkEvent::Failing(how) => {
                    let how = self.masked(how);
                    self.tell(Event::LinkFailing { link, how });
                }
                http::LinkEvent::Note(text) => {
                    if let Some(backend) = self.gateway.backend(link.backend) {
                        let text = format!("{}: {text}", backend.name);
                        self.journal.note(&text);
                    }
                }
                http::LinkEvent::Down { why, is_forgotten } => {
                    self.links.remove(&serial);
                    let how = self.masked(if is_forgotten { How::Forgot(why) } else { How::Lost(why) });
                    return self.tell(Event::LinkDown { link, how, stderr_tail: String::new(), unsent: Vec::new() });
                }
            }
        }
        // The other links are polled first.
        self.links.get(&serial).into_iter().for_each(|wire| wire.waker.wake());
    }

    /// One write for each child with unsent lines, however many lines there are in this turn.
    pub(super) fn flush(&mut self, cx: &mut Context<'_>) -> bool {
        let mut to_flush = std::mem::take(&mut self.to_flush);
        to_flush.sort_unstable();
        to_flush.dedup();
        for serial in to_flush.drain(..) {
            if let Some(wire) = self.links.get(&serial) {
                self.children.flush(serial, &mut Context::from_waker(wire.waker.rearm()), self.now);
            }
        }
        self.to_flush = to_flush;
        self.hear_children() | self.flush_stdio(cx)
    }

    /// Children with a memory limit, by serial number and process id.
    pub(super) fn with_memory_limit(&self) -> Vec<(u64, u32)> {
        let has_limit = |serial: &u64| {
            let link = self.link(*serial);
            let backend = link.and_then(|link| self.machine(*serial)?.backend(link.backend));
            backend.is_some_and(|backend| backend.memory_max.is_some())
        };
        self.children.running().filter(|(serial, _)| has_limit(serial)).collect()
    }

    pub(super) fn set_memory_watch(&mut self) {
        self.memory.set(!self.with_memory_limit().is_empty(), self.now);
    }

    pub(super) fn poll_memory(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(found) = self.memory.poll(cx) else { return false };
        for (serial, rss) in found {
            if let Some(link) = self.link(serial) {
                self.tell(Event::Measured { link, rss });
            }
        }
        self.set_memory_watch();
        true
    }
}
