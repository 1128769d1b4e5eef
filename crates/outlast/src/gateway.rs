//! Drives the gateway: `outlast gateway`. One loop turns clients, backends, files and time into events, and carries out
//! what the machine decides. Nothing in it waits.

use std::{
    collections::{BTreeMap, VecDeque},
    future::Future,
    io::{self, IsTerminal},
    path::PathBuf,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use outlast_control::Control;
use outlast_core::{
    checker as checker_events,
    gateway::{Action, Backend, Event, Front, Gateway, Who},
    life::Grace,
    refusals::Refusals,
};
use outlast_os as os;
use tokio::task::spawn_local;

use crate::{
    child::{Children, memory_watch::MemoryWatch, own_streams::OwnStreams, timer::Timer},
    cluster::replica::{Replica, SharedReplica},
    state::journal::Journal,
};

pub(crate) mod auth;
pub(crate) mod begin;
mod calls;
pub(crate) mod catalogue_cache;
pub(crate) mod checker;
mod hosts;
pub mod http;
mod links;
pub mod listen;
pub(crate) mod metrics;
pub mod mirrored;
mod operator;
mod pages;
mod ready_set;
mod recent;
mod records;
mod reload;
pub(crate) mod schemas;
pub(crate) mod session_store;
mod state;
mod stdio;
mod turns;
#[cfg(unix)]
pub(crate) mod upgrade;

use self::{
    calls::Calls,
    catalogue_cache::CatalogueCache,
    checker::Checker,
    hosts::{Hosts, MAIN},
    http::HttpClient,
    links::{LongMessage, Wire, WireKind},
    listen::Listen,
    metrics::Metrics,
    mirrored::MirrorsByBackend,
    operator::{PendingRestart, cluster::ClusterRequests},
    ready_set::{ReadySet, ReadyWaker},
    recent::Recent,
    reload::Reload,
    stdio::{HeldLines, LongLine},
    turns::Turns,
};
#[cfg(unix)]
use crate::upgrade::requests::Upgrades;

/// How long the last messages to clients and the sweep of children may take at the end.
const LAST_MESSAGES_MAX: Duration = Duration::from_secs(1);
/// The client on stdin and stdout, if there is one. Clients over HTTP are numbered from 1.
pub(crate) const STDIO_CLIENT: u64 = 0;
/// The ready key of signals, news of children and changed files, which belong to no link.
const OUTSIDE: u64 = u64::MAX;
/// Events of one kind in one turn of the loop, so that no source starves the others.
const EVENTS_MAX: usize = 256;
/// After this time the turn of the loop ends, so that the runtime polls the connections of clients. The next turn continues
/// with the other links.
const TURN_MAX: Duration = Duration::from_millis(5);

/// What is fixed before the loop starts.
#[derive(Debug)]
pub(crate) struct Plan {
    pub id: String,
    #[cfg(unix)]
    pub name: String,
    /// The working directory of backends that configure none.
    pub cwd: PathBuf,
    pub grace: Grace,
    /// The state directory, if there is one.
    pub state: Option<PathBuf>,
}

/// Everything around one gateway.
pub(crate) struct Driver {
    plan: Plan,
    gateway: Gateway,
    /// Events that occurred while actions were carried out. The machine gets them afterwards, so that actions keep
    /// their order.
    later: VecDeque<(u64, Event)>,
    is_acting: bool,
    /// A buffer for the machine's actions, used again for each event.
    actions: Vec<Action>,

    stops: os::Stops,
    /// Whether stdin was a terminal at the start.
    had_terminal: bool,
    stopping: Stopping,

    ready_set: ReadySet,
    ready: Vec<u64>,
    outside: ReadyWaker,
    /// By serial number.
    links: BTreeMap<u64, Wire>,
    /// The processes of links, and the schema checker, by the same numbers.
    children: Children,
    /// Messages that are parsed beside the loop, by the serial number of their link.
    long_messages: BTreeMap<u64, LongMessage>,
    /// Names of outlast's variables that each backend did not get, by backend name.
    left_out: BTreeMap<String, Vec<String>>,
    /// Serial numbers of links with unsent lines in this turn.
    to_flush: Vec<u64>,

    /// This gateway as a replica of a cluster.
    cluster: Option<SharedReplica>,
    /// Backends that this replica runs for the cluster.
    hosts: Hosts,
    cluster_requests: ClusterRequests,
    /// The number of the last record that the publisher of audit records knows.
    appended: u64,
    /// Why the gateway ends by itself.
    failure: Option<String>,

    stdio: Option<OwnStreams>,
    held_lines: HeldLines,
    long_line: Option<LongLine>,
    listen: Option<Listen>,
    /// Created by the first backend that needs it.
    http: Option<HttpClient>,

    journal: Journal,
    calls: Calls,
    control: Control,
    reload: Reload,
    catalogue_cache: CatalogueCache,
    mirrors: MirrorsByBackend,
    /// The version of the catalogue for which the HTTP front has the mirrored arguments.
    mirrored: u64,
    metrics: Metrics,
    recent: Recent,
    memory: MemoryWatch,
    checker: Checker,
    /// Restarts whose caller waits for the answer, by ticket.
    pending_restarts: BTreeMap<u64, PendingRestart>,
    /// Which refusals get a record.
    refusals: Refusals,
    /// The operator whose request is being carried out.
    operator: Option<Operator>,
    #[cfg(unix)]
    upgrades: Upgrades,
    #[cfg(unix)]
    handover: upgrade::HandoverTimes,

    began: Instant,
    /// When this turn of the loop began.
    turn_began: Instant,
    /// The time that the machines get. It is read a few times in each turn.
    now: Instant,
    timer: Timer,
    /// The last turn ended before the time was checked, so the next one begins with it.
    is_time_first: bool,
    turns: Turns,
    /// A backend has started, so the memory of the start-up code can be returned.
    has_started: bool,
}

/// The sender of a request that clients cannot make: over the control socket, from the status page, or by a signal.
#[derive(Debug, Clone, Default)]
struct Operator {
    who: String,
    peer: Option<String>,
}

/// How far the gateway's stop has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stopping {
    No,
    /// The client on stdin has left; its last answers are still to be written.
    Draining {
        until: Instant,
    },
    /// The machine was told to stop. At the deadline the driver ends the children itself.
    Asked {
        until: Instant,
    },
    /// Only the sweep of children and the last messages are left.
    Over {
        until: Instant,
    },
}

/// What the driver is made of.
pub(crate) struct Parts {
    pub plan: Plan,
    pub gateway: Gateway,
    pub children: Children,
    pub stops: os::Stops,
    pub stdio: Option<OwnStreams>,
    pub listen: Option<Listen>,
    pub reload: Reload,
    pub catalogue_cache: CatalogueCache,
    pub mirrors: MirrorsByBackend,
    pub journal: Journal,
    pub control: Control,
    pub cluster: Option<SharedReplica>,
}

impl Driver {
    pub(crate) fn new(parts: Parts) -> Driver {
        let ready_set = ReadySet::default();
        let outside = ready_set.waker(OUTSIDE);
        outside.wake();
        Driver {
            plan: parts.plan,
            gateway: parts.gateway,
            later: VecDeque::new(),
            is_acting: false,
            actions: Vec::new(),
            stops: parts.stops,
            had_terminal: io::stdin().is_terminal(),
            stopping: Stopping::No,
            outside,
            ready_set,
            ready: Vec::new(),
            links: BTreeMap::new(),
            children: parts.children,
            long_messages: BTreeMap::new(),
            left_out: BTreeMap::new(),
            to_flush: Vec::new(),
            cluster: parts.cluster,
            hosts: Hosts::default(),
            cluster_requests: ClusterRequests::default(),
            appended: 0,
            failure: None,
            stdio: parts.stdio,
            held_lines: HeldLines::default(),
            long_line: None,
            listen: parts.listen,
            http: None,
            journal: parts.journal,
            calls: Calls::default(),
            control: parts.control,
            reload: parts.reload,
            catalogue_cache: parts.catalogue_cache,
            mirrors: parts.mirrors,
            mirrored: 0,
            metrics: Metrics::new(),
            recent: Recent::default(),
            memory: MemoryWatch::default(),
            checker: Checker::default(),
            pending_restarts: BTreeMap::new(),
            refusals: Refusals::default(),
            operator: None,
            #[cfg(unix)]
            upgrades: Upgrades::default(),
            #[cfg(unix)]
            handover: upgrade::HandoverTimes::default(),
            began: Instant::now(),
            turn_began: Instant::now(),
            now: Instant::now(),
            timer: Timer::default(),
            is_time_first: false,
            turns: Turns::new(Instant::now()),
            has_started: false,
        }
    }

    /// Runs until the gateway is stopped. An error says why it stopped by itself.
    pub(crate) async fn run(mut self) -> Result<(), String> {
        spawn_local(self.ready_set.forward_wakes());
        self.show_mirrors();
        self.recall_share();
        self.configure_cluster();
        // Starts the backends.
        self.tell(Event::TimePassed);
        if self.stdio.is_some() {
            let who = Who { name: "local".to_owned(), role: None, profile: None };
            self.tell(Event::ClientCame { client: STDIO_CLIENT, front: Front::Lines, who });
        }
        self.run_loop().await
    }

    async fn run_loop(mut self) -> Result<(), String> {
        std::future::poll_fn(|cx| self.poll(cx)).await;
        if let Some(replica) = self.cluster.take() {
            let _ = tokio::time::timeout(LAST_MESSAGES_MAX, Replica::leave(replica)).await;
        }
        self.calls.write(&mut self.journal);
        self.catalogue_cache.finish().await;
        let line = self.journal.end(u8::from(self.failure.is_some()));
        self.control.record(&line);
        self.control.end();
        self.failure.map_or(Ok(()), Err)
    }

    /// One turn of the loop.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.turn_began = Instant::now();
        self.turns.begin(self.turn_began);
        let polled = self.poll_sources(cx);
        // `now` was read after everything that this turn found.
        self.turns.end(self.now.duration_since(self.turn_began), self.now);
        polled
    }

    fn poll_sources(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.ready_set.register(cx);
        loop {
            self.now = Instant::now();
            if self.is_turn_over() {
                self.flush_streams();
                // The connections of clients are tasks of their own; they and the sockets are polled before the next turn.
                let _ = std::pin::pin!(tokio::task::yield_now()).poll(cx);
                return Poll::Pending;
            }
            if std::mem::take(&mut self.is_time_first) && self.poll_time(cx) {
                continue;
            }
            // Usually the first poll finds all messages and the second one none; the other sources are not polled in
            // between.
            let mut moved = self.poll_talk(cx) && (self.is_long() || self.poll_talk(cx));
            moved |= self.poll_memory(cx);
            moved |= self.poll_catalogue_cache(cx);
            moved |= self.poll_control(cx);
            moved |= self.poll_cluster(cx);
            moved |= self.flush(cx);
            #[cfg(unix)]
            {
                moved |= self.poll_upgrade(cx);
            }
            self.now = Instant::now();
            self.is_time_first = self.is_turn_over();
            moved |= self.is_time_first || self.poll_time(cx);
            self.note_appended();
            if let Stopping::Over { until } = self.stopping {
                let is_said = self.stdio.as_ref().is_none_or(|stdio| stdio.queued() == 0)
                    && self.listen.as_mut().is_none_or(|listen| listen.poll_over(cx).is_ready());
                let is_released = self.cluster.as_ref().is_none_or(|replica| replica.borrow().is_over());
                if is_said && self.links.is_empty() && is_released || until <= self.now {
                    self.flush_streams();
                    return Poll::Ready(());
                }
            }
            if !moved {
                self.flush_streams();
                if std::mem::take(&mut self.has_started) {
                    os::give_back_code();
                }
                return Poll::Pending;
            }
        }
    }

    fn is_turn_over(&self) -> bool {
        self.now.duration_since(self.turn_began) > TURN_MAX
    }

    fn tell(&mut self, event: Event) {
        self.tell_machine(hosts::machine_of(&event), event);
    }

    fn tell_machine(&mut self, machine: u64, event: Event) {
        if self.is_acting {
            return self.later.push_back((machine, event));
        }
        self.is_acting = true;
        let mut actions = std::mem::take(&mut self.actions);
        let mut next = Some((machine, event));
        while let Some((machine, event)) = next {
            if machine == MAIN {
                self.gateway.handle_into(event, self.now, &mut actions);
            } else if let Some(host) = self.hosts.get_mut(machine) {
                host.handle_into(event, self.now, &mut actions);
            }
            for action in actions.drain(..) {
                match machine {
                    MAIN => self.act(action),
                    host => self.act_of_host(host, action),
                }
            }
            next = self.later.pop_front();
        }
        self.actions = actions;
        self.is_acting = false;
        // Names in the catalogue can change with any event, and mirrored arguments are looked up by them.
        if self.mirrored != self.gateway.catalogue_version() {
            self.show_mirrors();
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::TellClient { client: STDIO_CLIENT, message, .. } => self.tell_stdio(message),
            Action::TellClient { client, message, about, said } => {
                if let Some(listen) = &mut self.listen {
                    listen.tell(client, message, about, said);
                }
            }
            Action::DropClient { client: STDIO_CLIENT } => {
                self.stdio.as_mut().into_iter().for_each(OwnStreams::close);
                self.stop(true);
            }
            Action::DropClient { client } => {
                if let Some(listen) = &mut self.listen {
                    listen.drop_client(client);
                }
            }
            // Only the hub of a shared server has such clients.
            Action::Separate { .. } => {}
            Action::Connect { link } => self.connect(link),
            Action::TellLink { link, message } => self.tell_link(link, message),
            Action::Disconnect { link, at_once } => self.disconnect(link.serial, at_once),
            Action::Record(record) => self.record(record),
            Action::Divert { link, message, is_json } => {
                let wire = self.links.get_mut(&link.serial).map(|wire| &mut wire.kind);
                if let Some(WireKind::Child { backend, diverted }) = wire {
                    *diverted += 1;
                    self.journal.diverted_of(backend, &message, is_json);
                }
            }
            Action::Note(text) => self.journal.note(&text),
            Action::NotificationRefused(refused) => self.notification_refused(*refused),
            Action::Called(called) => self.called(&called),
            Action::Keep { backend, catalogue } => {
                if self.mirrors.learn(&backend, &catalogue) {
                    self.show_mirrors();
                }
                // The catalogue is cached for the command that was asked, which may have changed since the
                // configuration was read.
                let backends: Vec<Backend> = self.gateway.backends().cloned().collect();
                self.catalogue_cache.configure(&backends, self.now);
                self.catalogue_cache.keep(&backend, catalogue, self.now);
            }
            Action::Answer { ticket, result } => self.answer(ticket, result),
            Action::Check(job) => self.tell_checker(checker_events::Event::Asked(job)),
            Action::DropCheck { ticket } => self.tell_checker(checker_events::Event::Withdrawn { ticket }),
            Action::Over => self.finish(),
        }
    }

    // ---- stopping ----------------------------------------------------------------------------------------------

    /// Stops gracefully; a second request stops at once.
    fn stop(&mut self, graceful: bool) {
        if let Some(stdio) = &mut self.stdio {
            stdio.stop_reading();
        }
        let was_asked = matches!(self.stopping, Stopping::Asked { .. } | Stopping::Over { .. });
        if !was_asked {
            let grace = self.plan.grace;
            self.stopping =
                Stopping::Asked { until: self.now + grace.after_stdin + grace.after_term + LAST_MESSAGES_MAX };
            self.tell(Event::StopAsked);
            self.stop_hosts();
        }
        if was_asked || !graceful {
            self.kill_all();
        }
    }

    fn kill_all(&mut self) {
        for serial in self.links.keys().copied().collect::<Vec<_>>() {
            self.disconnect(serial, true);
        }
    }

    fn finish(&mut self) {
        if !matches!(self.stopping, Stopping::Over { .. }) {
            self.end_checker();
            self.listen.as_mut().into_iter().for_each(Listen::close);
            self.stopping = Stopping::Over { until: self.now + LAST_MESSAGES_MAX };
        }
    }

    fn poll_stops(&mut self, cx: &mut Context<'_>) -> bool {
        #[cfg(unix)]
        if self.stops.poll_upgrade(cx).is_ready() {
            self.ask_upgrade(None, None);
        }
        let Poll::Ready(stop) = self.stops.poll_next(cx) else { return false };
        // SIGHUP after the terminal was closed means stop. In all other cases it means reload.
        let lost_terminal = self.had_terminal && !io::stdin().is_terminal();
        if stop.name == "SIGHUP" && !lost_terminal {
            self.operator = Some(Operator { who: "signal SIGHUP".to_owned(), peer: None });
            self.operator_requested("reload", None, None);
            self.reload(None);
            self.operator = None;
        } else {
            self.operator = Some(Operator { who: format!("signal {}", stop.name), peer: None });
            self.operator_requested("stop", None, None);
            self.journal.note(&format!("{} received, stopping", stop.name));
            self.stop(true);
            self.operator = None;
        }
        true
    }

    /// Messages of backends and clients.
    fn poll_talk(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = self.poll_ready();
        moved |= self.poll_stdio(cx);
        moved |= self.poll_listen(cx);
        moved
    }

    /// Polls the links whose waker fired.
    fn poll_ready(&mut self) -> bool {
        let mut ready = std::mem::take(&mut self.ready);
        self.ready_set.take(&mut ready);
        let moved = !ready.is_empty();
        let mut polled = 0;
        while let Some(key) = ready.get(polled) {
            match *key {
                OUTSIDE => self.poll_outside(),
                serial => self.poll_link(serial),
            }
            polled += 1;
            if polled < ready.len() && self.is_long() {
                self.ready_set.put_back(ready.drain(polled..));
            }
        }
        ready.clear();
        self.ready = ready;
        moved
    }

    /// Reads the clock: whether the turn is to end.
    fn is_long(&self) -> bool {
        self.turn_began.elapsed() > TURN_MAX
    }

    /// Signals, news of children and changed files. They are rare, so they are polled only when their waker fires.
    fn poll_outside(&mut self) {
        let waker = self.outside.clone();
        let mut cx = Context::from_waker(waker.rearm());
        let mut moved = self.poll_stops(&mut cx);
        moved |= self.poll_news(&mut cx);
        moved |= self.poll_reload(&mut cx);
        if moved {
            waker.wake();
        }
    }

    // ---- clients over HTTP ---------------------------------------------------------------------------------------

    fn poll_listen(&mut self, cx: &mut Context<'_>) -> bool {
        for turn in 0..EVENTS_MAX {
            let Some(listen) = &mut self.listen else { return false };
            let Poll::Ready(heard) = listen.poll(cx) else { return turn > 0 };
            match heard {
                listen::FrontEvent::Came { client, front, who } => self.tell(Event::ClientCame { client, front, who }),
                listen::FrontEvent::Restored { client, who, state } => {
                    self.tell(Event::ClientRestored { client, who, state });
                }
                listen::FrontEvent::Note(text) => self.journal.note(&text),
                listen::FrontEvent::Said { client, message } => self.tell(Event::ClientSaid { client, message }),
                listen::FrontEvent::Requested { client, message, outline } => {
                    self.tell(Event::ClientRequested { client, message, outline });
                }
                listen::FrontEvent::SaidLong { client, message, walk } => {
                    self.tell(Event::ClientSaidLong { client, message, walk });
                }
                listen::FrontEvent::Left { client } => self.tell(Event::ClientLeft { client }),
                listen::FrontEvent::Allowed { client, until } => self.tell(Event::ClientAllowed { client, until }),
                listen::FrontEvent::Page(page) => self.turn_page(*page),
                listen::FrontEvent::Refused(refused) => self.refused(*refused),
            }
        }
        true
    }

    fn show_mirrors(&mut self) {
        self.mirrored = self.gateway.catalogue_version();
        if let Some(listen) = &mut self.listen {
            listen.set_mirrors(self.mirrors.shown(&self.gateway));
        }
    }

    fn publish(&mut self, name: &str, data: &str) {
        Driver::publish_to(&mut self.listen, name, data);
    }

    fn publish_to(listen: &mut Option<Listen>, name: &str, data: &str) {
        if let Some(listen) = listen.as_mut().filter(|listen| listen.has_watchers()) {
            listen.publish(None, name, data.trim_end());
        }
    }

    // ---- time ----------------------------------------------------------------------------------------------------

    fn poll_time(&mut self, cx: &mut Context<'_>) -> bool {
        if let Stopping::Draining { until } = self.stopping
            && (until <= self.now || self.gateway.in_flight(STDIO_CLIENT) == 0)
        {
            self.stop(true);
            return true;
        }
        let stopping = match self.stopping {
            Stopping::No => None,
            Stopping::Draining { until } | Stopping::Asked { until } | Stopping::Over { until } => Some(until),
        };
        let files = [self.calls.deadline(), self.catalogue_cache.deadline(), self.refusals.deadline()];
        let checker = self.checker.machine.deadline();
        #[cfg(unix)]
        let upgrade = self.upgrade_deadline();
        #[cfg(windows)]
        let upgrade = None;
        let own = [self.memory.deadline(), checker, stopping, upgrade];
        let machines = [self.gateway.deadline(), self.children.deadline()].into_iter().chain(own);
        let hosts = self.hosts.deadlines();
        let deadline = machines.chain(files).flatten().chain(hosts).chain(self.cluster_requests.deadline()).min();
        if !self.timer.poll(deadline, self.now, cx) {
            return false;
        }
        self.now = Instant::now();
        self.time_passed();
        true
    }

    fn time_passed(&mut self) {
        self.tell(Event::TimePassed);
        for host in self.hosts.numbers() {
            self.tell_machine(host, Event::TimePassed);
        }
        self.end_late_cluster_requests();
        if self.checker.machine.deadline().is_some_and(|due| due <= self.now) {
            self.tell_checker(checker_events::Event::TimePassed);
        }
        self.children.time_passed(self.now);
        self.hear_children();
        self.calls.time_passed(&mut self.journal, self.now);
        self.catalogue_cache.time_passed(self.now);
        for (kind, count) in self.refusals.due(self.now) {
            self.suppressed(kind, count);
        }
        if self.memory.deadline().is_some_and(|due| due <= self.now) {
            let children = self.with_memory_limit();
            self.memory.measure(children, self.now);
        }
        if let Stopping::Asked { until } = self.stopping
            && until <= self.now
        {
            self.kill_all();
            self.finish();
        }
    }

    fn poll_catalogue_cache(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(warning) = self.catalogue_cache.poll(cx) else { return false };
        self.journal.note(&warning);
        true
    }
}
