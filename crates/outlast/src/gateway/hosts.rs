//! Backends that one replica of a cluster runs for all (`placement = "one"`). A replica that owns such a backend has a
//! second machine for it, its *host*, whose clients are replicas. Every replica, the owner too, reaches the backend by a stream.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use outlast_core::{
    cluster::{
        BootTime, Instance,
        streams::{End, Stream},
    },
    exit::How,
    gateway::{Action, Backend, BackendStatus, Client, Event, Front, Gateway, Link, Placement, Switch, Who},
    message::{PARSED_AT_ONCE_MAX, Walk},
    record::{self, Record},
};
use outlast_os::{
    self as os,
    offload::{Task, compute_for_server},
};
use rustc_hash::FxHashMap;

use super::{Driver, EVENTS_MAX, Stopping, links::WireKind, operator::NO_TICKET};
use crate::{
    cluster::{
        audit_publisher::Noticed,
        replica::{Heard, SharedReplica},
    },
    state::home,
};

/// The machine of the gateway itself. Others are numbered from 1 on.
pub(super) const MAIN: u64 = 0;
/// Links and clients of a host have its number in the bits above these.
const BITS: u32 = 40;

/// The hosts of this replica, by number.
#[derive(Default)]
pub(super) struct Hosts {
    by_number: BTreeMap<u64, Host>,
    last: u64,
    last_client: u64,
    clients: FxHashMap<Stream, Client>,
    /// Links of the main machine, by their streams.
    links: FxHashMap<Stream, u64>,
    /// Streams whose last message is parsed beside the loop.
    long_messages: BTreeMap<Stream, LongMessage>,
}

/// A message of another replica that is parsed beside the loop. Later events of its stream wait: those of one window.
struct LongMessage {
    message: Bytes,
    parsing: Task<Walk>,
    later: VecDeque<Heard>,
}

struct Host {
    backend: String,
    gateway: Gateway,
    streams: BTreeMap<Client, Stream>,
    /// The monitor ends its processes then.
    until: BootTime,
    is_over: bool,
}

/// The machine that an event is for.
pub(super) fn machine_of(event: &Event) -> u64 {
    let number = match event {
        Event::ClientCame { client, .. }
        | Event::ClientRestored { client, .. }
        | Event::ClientSaid { client, .. }
        | Event::ClientRequested { client, .. }
        | Event::ClientSaidLong { client, .. }
        | Event::ClientLeft { client }
        | Event::ClientAllowed { client, .. } => *client,
        Event::LinkUp { link, .. }
        | Event::LinkSaid { link, .. }
        | Event::LinkSaidLong { link, .. }
        | Event::LinkSaidFor { link, .. }
        | Event::RequestLost { link, .. }
        | Event::RequestRefused { link, .. }
        | Event::LinkDenied { link, .. }
        | Event::LinkFailing { link, .. }
        | Event::LinkDown { link, .. }
        | Event::Measured { link, .. }
        | Event::LinkResumed { link } => link.serial,
        _ => return MAIN,
    };
    machine_of_number(number)
}

/// The same for the serial number of a link. The schema checker has numbers of its own, above those of all hosts.
pub(super) fn machine_of_number(number: u64) -> u64 {
    if super::checker::is_checker(number) { MAIN } else { number >> BITS }
}

impl Hosts {
    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut Gateway> {
        self.by_number.get_mut(&number).map(|host| &mut host.gateway)
    }

    pub(super) fn get(&self, number: u64) -> Option<&Gateway> {
        self.by_number.get(&number).map(|host| &host.gateway)
    }

    pub(super) fn numbers(&self) -> Vec<u64> {
        self.by_number.keys().copied().collect()
    }

    pub(super) fn deadlines(&self) -> impl Iterator<Item = std::time::Instant> {
        self.by_number.values().filter_map(|host| host.gateway.deadline())
    }

    fn number_of(&self, backend: &str) -> Option<u64> {
        self.by_number.iter().find(|(_, host)| host.backend == backend).map(|(number, _)| *number)
    }

    /// The machine that runs this backend here.
    pub(super) fn of_backend(&self, backend: &str) -> Option<(u64, &Gateway)> {
        let number = self.number_of(backend)?;
        Some((number, &self.by_number.get(&number)?.gateway))
    }

    /// A message of another replica is parsed.
    pub(super) fn is_parsing(&self) -> bool {
        !self.long_messages.is_empty()
    }

    /// Until when the monitor lets the processes of a link live.
    pub(super) fn live_until(&self, serial: u64) -> Option<BootTime> {
        self.by_number.get(&machine_of_number(serial)).map(|host| host.until)
    }
}

impl Driver {
    /// The machine of a link or client.
    pub(super) fn machine(&self, number: u64) -> Option<&Gateway> {
        match machine_of_number(number) {
            MAIN => Some(&self.gateway),
            host => self.hosts.get(host),
        }
    }

    /// What a host wants to be done. Calls, lists and schemas are the business of the replicas that use it.
    pub(super) fn act_of_host(&mut self, number: u64, action: Action) {
        match action {
            Action::TellClient { client, message, .. } => {
                let stream = self.hosts.by_number.get(&number).and_then(|host| host.streams.get(&client));
                if let (Some(stream), Some(replica)) = (stream, &self.cluster) {
                    replica.borrow_mut().send(*stream, message);
                }
            }
            Action::DropClient { client } => self.drop_host_client(number, client),
            Action::Connect { link } => {
                if let Some(backend) = self.machine(link.serial).and_then(|host| host.settings_of(link)).cloned() {
                    self.start(link, &backend);
                }
            }
            Action::Over => {
                if let Some(host) = self.hosts.by_number.get_mut(&number) {
                    host.is_over = true;
                }
                self.end_hosts();
            }
            Action::Called(_)
            | Action::Keep { .. }
            | Action::Separate { .. }
            | Action::Check(_)
            | Action::DropCheck { .. } => {}
            action => self.act(action),
        }
    }

    fn drop_host_client(&mut self, number: u64, client: Client) {
        let Some(host) = self.hosts.by_number.get_mut(&number) else { return };
        if let (Some(stream), Some(replica)) = (host.streams.remove(&client), &self.cluster) {
            self.hosts.clients.remove(&stream);
            replica.borrow_mut().close(stream);
        }
    }

    // ---- hosts -----------------------------------------------------------------------------------------------------

    fn start_host(&mut self, backend: String, until: BootTime) {
        let settings = self.gateway.backends().find(|other| other.name == backend).cloned();
        let Some(settings) = settings.filter(|_| !self.is_stopping()) else { return self.host_gone(&backend) };
        self.hosts.last += 1;
        let number = self.hosts.last;
        let limits = self.gateway.limits().clone();
        let settings = Gateway::hosting_settings(settings, limits);
        let known = self.gateway.offers().find(|(name, offer)| *name == backend && !offer.capabilities.is_empty());
        let cached = known.map(|(name, offer)| (name.to_owned(), offer.clone())).into_iter().collect();
        let gateway = Gateway::hosting(settings, number << BITS, home::random(), cached);
        let host = Host { backend: backend.clone(), gateway, streams: BTreeMap::new(), until, is_over: false };
        self.hosts.by_number.insert(number, host);
        self.journal.note(&format!("{backend}: this replica runs it for the cluster"));
        let what = Switch::Backend(backend);
        match self.gateway.is_switched_off(&what) {
            true => self.switch_host(&what, true),
            false => self.tell_machine(number, Event::TimePassed),
        }
    }

    /// A backend that is turned off stops where it runs.
    pub(super) fn switch_host(&mut self, what: &Switch, off: bool) {
        if let Switch::Backend(name) = what
            && let Some(host) = self.hosts.number_of(name)
        {
            self.tell_machine(host, Event::SwitchAsked { ticket: NO_TICKET, what: what.clone(), off });
        }
    }

    fn extend_host(&mut self, backend: &str, until: BootTime) {
        let Some(number) = self.hosts.number_of(backend) else { return };
        if let Some(host) = self.hosts.by_number.get_mut(&number) {
            host.until = until;
        }
        for serial in self.links.keys().copied().filter(|serial| machine_of_number(*serial) == number) {
            self.children.extend(serial, os::BootTime(until.0));
        }
    }

    fn stop_host(&mut self, backend: &str, at_once: bool) {
        let Some(number) = self.hosts.number_of(backend) else { return self.host_gone(backend) };
        self.journal.note(&format!("{backend}: its lease is over, so it stops here"));
        self.tell_machine(number, Event::StopAsked);
        if at_once {
            for serial in self.links_of(number) {
                self.disconnect(serial, true);
            }
        }
        self.end_hosts();
    }

    fn links_of(&self, number: u64) -> Vec<u64> {
        self.links.keys().copied().filter(|serial| machine_of_number(*serial) == number).collect()
    }

    /// Hosts whose last process is gone end. To be called when a link is removed.
    pub(super) fn end_hosts(&mut self) {
        let over = |(number, host): &(&u64, &Host)| host.is_over && self.links_of(**number).is_empty();
        let over: Vec<u64> = self.hosts.by_number.iter().filter(over).map(|(number, _)| *number).collect();
        for number in over {
            let Some(host) = self.hosts.by_number.remove(&number) else { continue };
            for stream in host.streams.into_values() {
                self.hosts.clients.remove(&stream);
                if let Some(replica) = &self.cluster {
                    replica.borrow_mut().abort(stream, "the owner of the backend changes");
                }
            }
            self.host_gone(&host.backend);
        }
    }

    fn host_gone(&mut self, backend: &str) {
        if let Some(replica) = &self.cluster {
            replica.borrow_mut().host_gone(backend);
        }
    }

    /// The gateway stops: each host ends, and then its lease is released.
    pub(super) fn stop_hosts(&mut self) {
        let Some(replica) = self.cluster.clone() else { return };
        replica.borrow_mut().stop();
        for number in self.hosts.numbers() {
            self.tell_machine(number, Event::StopAsked);
        }
        self.end_hosts();
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping != Stopping::No
    }

    /// After a change of the configuration.
    pub(super) fn configure_cluster(&mut self) {
        let Some(replica) = self.cluster.clone() else { return };
        let placed: Vec<Backend> =
            self.gateway.backends().filter(|backend| backend.placement == Placement::One).cloned().collect();
        let names: BTreeSet<String> = placed.iter().map(|backend| backend.name.clone()).collect();
        replica.borrow_mut().configure(names);
        for backend in placed {
            if let Some(number) = self.hosts.number_of(&backend.name) {
                let settings = Gateway::hosting_settings(backend, self.gateway.limits().clone());
                self.tell_machine(number, Event::Configured(Box::new(settings)));
            }
        }
    }

    // ---- links of the main machine to owners -----------------------------------------------------------------------

    /// Opens the link as soon as a replica owns the backend.
    pub(super) fn connect_to_owner(&mut self, link: Link, backend: &str) {
        self.add_wire(link, WireKind::Stream { backend: backend.to_owned(), stream: None });
        self.open_waiting(backend);
    }

    fn open_waiting(&mut self, owned: &str) {
        let Some(replica) = self.cluster.clone() else { return };
        let waiting = self.links.iter().filter_map(|(serial, wire)| match &wire.kind {
            WireKind::Stream { backend, stream: None } if backend == owned => Some(*serial),
            _ => None,
        });
        for serial in waiting.collect::<Vec<_>>() {
            let Some(opened) = replica.borrow_mut().open_backend(owned) else { return };
            let Some(wire) = self.links.get_mut(&serial) else { continue };
            if let WireKind::Stream { stream, .. } = &mut wire.kind {
                *stream = Some(opened);
            }
            let link = wire.link;
            self.hosts.links.insert(opened, serial);
            self.tell(Event::LinkUp { link, pid: None });
        }
    }

    /// The stream ends, and the link is down.
    pub(super) fn disconnect_stream(&mut self, serial: u64) {
        let Some(wire) = self.links.remove(&serial) else { return };
        if let WireKind::Stream { stream: Some(stream), .. } = wire.kind {
            self.hosts.links.remove(&stream);
            if let Some(replica) = &self.cluster {
                replica.borrow_mut().close(stream);
            }
        }
        self.tell(Event::LinkDown {
            link: wire.link,
            how: How::Stopped,
            stderr_tail: String::new(),
            unsent: Vec::new(),
        });
    }

    // ---- what the cluster says -------------------------------------------------------------------------------------

    pub(super) fn poll_cluster(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(replica) = self.cluster.clone() else { return false };
        let has_parsed = self.poll_long_stream_messages(&replica, cx);
        for turn in 0..EVENTS_MAX {
            let Poll::Ready(heard) = replica.borrow_mut().poll_heard(cx) else { return turn > 0 || has_parsed };
            self.cluster_heard(&replica, heard);
        }
        true
    }

    /// True if a message of another replica was parsed.
    fn poll_long_stream_messages(&mut self, replica: &SharedReplica, cx: &mut Context<'_>) -> bool {
        let mut parsed = Vec::new();
        for (stream, LongMessage { parsing, .. }) in &mut self.hosts.long_messages {
            if let Poll::Ready(walk) = Pin::new(parsing).poll(cx) {
                parsed.push((*stream, walk.ok().map(Box::new)));
            }
        }
        let has_parsed = !parsed.is_empty();
        for (stream, walk) in parsed {
            let LongMessage { message, later, .. } =
                self.hosts.long_messages.remove(&stream).expect("it was polled above");
            self.stream_said(replica, stream, message, walk);
            later.into_iter().for_each(|heard| self.cluster_heard(replica, heard));
        }
        has_parsed
    }

    /// At the end of a turn: sends what was said to other replicas in it.
    pub(super) fn flush_streams(&self) {
        if let Some(replica) = &self.cluster {
            replica.borrow_mut().loop_turned();
        }
    }

    fn cluster_heard(&mut self, replica: &SharedReplica, heard: Heard) {
        if let Heard::Said { stream, .. } | Heard::Ended { stream, .. } = &heard
            && let Some(LongMessage { later, .. }) = self.hosts.long_messages.get_mut(stream)
        {
            return later.push_back(heard);
        }
        match heard {
            Heard::BackendWanted { stream, from, backend } => self.backend_wanted(replica, stream, from, &backend),
            Heard::RequestForwarded { stream, request } => match &self.listen {
                Some(listen) => listen.serve_forwarded(stream, request),
                None => replica.borrow_mut().abort(stream, "this replica has no HTTP front"),
            },
            Heard::Said { stream, message } if message.len() > PARSED_AT_ONCE_MAX => {
                let text = message.clone();
                let parsing = compute_for_server(move || Walk::of(&text));
                self.hosts.long_messages.insert(stream, LongMessage { message, parsing, later: VecDeque::new() });
            }
            Heard::Said { stream, message } => self.stream_said(replica, stream, message, None),
            Heard::Ended { stream, how, unsent } => self.stream_ended(replica, stream, how, unsent),
            Heard::StartHost { backend, until } => self.start_host(backend, until),
            Heard::ExtendHost { backend, until } => self.extend_host(&backend, until),
            Heard::StopHost { backend, at_once } => self.stop_host(&backend, at_once),
            Heard::OwnerChanged { backend } => self.open_waiting(&backend),
            Heard::SessionMoved { key } => {
                if let Some(listen) = &mut self.listen {
                    listen.session_moved(key);
                }
            }
            Heard::Switched { what, off } => {
                // The name may be of a backend whose offer is not known yet.
                if self.gateway.is_switched_off(&what) != off {
                    self.switch_host(&what, off);
                    self.tell(Event::SwitchAsked { ticket: NO_TICKET, what, off });
                }
            }
            Heard::ShareChanged { parts } => self.tell(Event::ShareChanged { parts }),
            Heard::RememberShare { parts, age } => self.remember_share(parts, age),
            Heard::Operator { request, reply } => self.replica_asked(replica, &request, reply),
            Heard::Asked { ticket, result } => self.replica_answered(ticket, result),
            Heard::AuditPage { ticket, page } => self.audit_page(ticket, page),
            Heard::AuditReplicas { ticket, replicas } => self.audit_replicas(ticket, replicas),
            Heard::AuditNoticed(noticed) => self.audit_noticed(noticed),
            Heard::Connected => self.journal.note("connected to NATS"),
            Heard::Disconnected => {}
            Heard::NameTaken(why) => {
                self.journal
                    .note(&format!("error: {why}: give each replica a name of its own (`replica` in `[cluster]`)"));
                self.failure = Some(why);
                self.stop(true);
            }
            Heard::Note(text) => self.journal.note(&text),
        }
    }

    fn audit_noticed(&mut self, noticed: Noticed) {
        match noticed {
            Noticed::Missing(text) => self.audit_degraded(text),
            Noticed::Ahead { number, text } => {
                self.journal.number_records_after(number);
                self.audit_degraded(text);
            }
            Noticed::Unreadable(text) => self.journal.note(&text),
        }
    }

    fn audit_degraded(&mut self, text: String) {
        self.journal.note(&text);
        self.record(Record { reason: Some(text), ..Record::new(record::Event::AuditDegraded) });
    }

    /// Tells the publisher of new records in the local log.
    pub(super) fn note_appended(&mut self) {
        if let (Some(replica), Some(number)) = (&self.cluster, self.journal.last_number())
            && self.appended != number
        {
            self.appended = number;
            replica.borrow_mut().appended(number);
        }
    }

    fn backend_wanted(&mut self, replica: &SharedReplica, stream: Stream, from: Instance, backend: &str) {
        let Some(number) = self.hosts.number_of(backend).filter(|_| !self.is_stopping()) else {
            return replica.borrow_mut().abort(stream, "this replica does not run the backend");
        };
        self.hosts.last_client += 1;
        let client = number << BITS | self.hosts.last_client;
        self.hosts.clients.insert(stream, client);
        if let Some(host) = self.hosts.by_number.get_mut(&number) {
            host.streams.insert(client, stream);
        }
        let who = Who { name: format!("replica {from:016x}"), role: None, profile: None };
        self.tell(Event::ClientCame { client, front: Front::Lines, who });
    }

    /// `walk` is that of a long message.
    fn stream_said(&mut self, replica: &SharedReplica, stream: Stream, message: Bytes, walk: Option<Box<Walk>>) {
        let bytes = message.len();
        if let Some(serial) = self.hosts.links.get(&stream) {
            if let Some(link) = self.link(*serial) {
                self.tell(match walk {
                    Some(walk) => Event::LinkSaidLong { link, message, walk },
                    None => Event::LinkSaid { link, message },
                });
            }
        } else if let Some(client) = self.hosts.clients.get(&stream).copied() {
            self.tell(match walk {
                Some(walk) => Event::ClientSaidLong { client, message, walk },
                None => Event::ClientSaid { client, message },
            });
        } else {
            return;
        }
        replica.borrow_mut().consumed(stream, bytes);
    }

    fn stream_ended(&mut self, replica: &SharedReplica, stream: Stream, how: End, unsent: Vec<Bytes>) {
        if let Some(client) = self.hosts.clients.remove(&stream) {
            if let Some(host) = self.hosts.by_number.get_mut(&machine_of_number(client)) {
                host.streams.remove(&client);
            }
            return self.tell(Event::ClientLeft { client });
        }
        let Some(serial) = self.hosts.links.remove(&stream) else { return };
        let Some(wire) = self.links.remove(&serial) else { return };
        replica.borrow_mut().link_lost();
        let why = match how {
            End::Closed => "its owner closed the stream".to_owned(),
            End::Aborted(why) | End::Lost(why) => why,
        };
        let how = How::Lost(why);
        self.tell(Event::LinkDown { link: wire.link, how, stderr_tail: String::new(), unsent });
    }

    /// The status of a backend at its host, if it runs here.
    pub(super) fn hosted_status(&self, backend: &str) -> Option<BackendStatus> {
        let (_, host) = self.hosts.of_backend(backend)?;
        host.status(self.now).backends.pop()
    }
}
