//! Drives the gateway: `outlast gateway`. One loop turns clients, backends, files and time into events, and carries out
//! what the machine decides. Nothing in it waits.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ffi::OsString,
    io,
    io::IsTerminal,
    path::PathBuf,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::Bytes;
use outlast_core::{
    exit::{self, How},
    gateway::{
        Action, Backend, Called, Event, Front, Gateway, Kind, Link, Outcome, Refused, RefusedNotification, Sender, Who,
    },
    life::{self, Grace},
    record::{self, OfGateway, Record},
    refusals::Refusals,
};
use tokio::{
    task::spawn_local,
    time::{Sleep, sleep_until},
};

use crate::{
    control::Control,
    environment::{self, Environment},
    journal::{Journal, Origin, SessionLabel},
    memory_watch::MemoryWatch,
    os::{self, Household, News},
    report,
};

pub mod auth;
pub mod begin;
pub mod bells;
pub mod calls;
pub mod child;
pub mod desk;
pub mod http;
pub mod listen;
pub mod metrics;
pub mod mirrors;
pub mod pages;
pub mod recent;
pub mod reload;
pub mod schemas;
pub mod shelf;
pub mod stdio;

use self::{
    bells::{Rope, Tower},
    calls::Calls,
    child::{Child, Command, Heard},
    desk::Errand,
    http::{HttpClient, HttpLink, HttpSettings, Patience},
    listen::Listen,
    metrics::Metrics,
    mirrors::MirrorsByBackend,
    recent::Recent,
    reload::Reload,
    shelf::Shelf,
    stdio::StdioFront,
};

/// How long the last words to clients and the sweeping of children may take once all is over.
const FAREWELL_MAX: Duration = Duration::from_secs(1);
/// The client on stdin and stdout, where there is one. Those over HTTP are numbered from 1.
pub const STDIO_CLIENT: u64 = 0;
/// How long a connection to a backend may take.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// The bell of what is no link.
const OUTSIDE: u64 = u64::MAX;
/// Events of one kind in one turn of the loop, so that no side keeps the others waiting.
const EVENTS_MAX: usize = 256;

/// What is fixed before the loop begins.
#[derive(Debug)]
pub struct Plan {
    pub id: String,
    /// Where backends run that name no directory of their own.
    pub cwd: PathBuf,
    pub grace: Grace,
}

/// Everything around one gateway.
pub struct Driver {
    plan: Plan,
    gateway: Gateway,
    /// What happened while actions were carried out; it is told after them, so that they keep their order.
    later: VecDeque<Event>,
    is_acting: bool,
    /// What the machine decides is put here, each time anew.
    actions: Vec<Action>,

    household: Household,
    stops: os::Stops,
    /// Whether there was somebody at a terminal when we began.
    had_terminal: bool,
    stopping: Stopping,

    tower: Tower,
    rung: Vec<u64>,
    outside: Rope,
    /// By serial.
    links: BTreeMap<u64, Wire>,
    /// Names of our variables that each backend did not get, by its name.
    left_out: BTreeMap<String, Vec<String>>,
    /// Children with a deadline, by serial.
    restless: BTreeSet<u64>,
    /// Links with something to be sent in this turn.
    full: Vec<u64>,
    heard: Vec<Heard>,

    stdio: Option<StdioFront>,
    listen: Option<Listen>,
    /// Made by the first backend that needs it.
    http: Option<HttpClient>,

    journal: Journal,
    calls: Calls,
    control: Control,
    reload: Reload,
    shelf: Shelf,
    mirrors: MirrorsByBackend,
    /// The version of the catalogue that the HTTP front knows the mirrored arguments of.
    mirrored: u64,
    metrics: Metrics,
    recent: Recent,
    memory: MemoryWatch,
    /// Restarts that somebody waits for, by ticket.
    errands: BTreeMap<u64, Errand>,
    /// Which refusals are written.
    refusals: Refusals,
    /// Whose request is being carried out.
    operator: Option<Operator>,

    began: Instant,
    /// When this turn of the loop began; a turn is short.
    now: Instant,
    timer: Option<(Instant, Pin<Box<Sleep>>)>,
    /// A backend has come up, and the code for that may be given back.
    has_started: bool,
}

/// Who asks for something that is not for clients: over the control socket, by the status page, or by a signal.
#[derive(Debug, Clone, Default)]
struct Operator {
    who: String,
    peer: Option<String>,
}

/// How far the end has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stopping {
    No,
    /// The client on stdin has left, and its last answers are on their way.
    Draining {
        until: Instant,
    },
    /// The machine was told; when it does not come to an end by itself, it is brought to one.
    Asked {
        until: Instant,
    },
    /// All that is left is to be swept and said.
    Over {
        code: u8,
        until: Instant,
    },
}

/// One connection to one backend.
struct Wire {
    link: Link,
    kind: WireKind,
}

enum WireKind {
    Child(Box<Child>),
    Http { link: Box<HttpLink>, rope: Rope },
}

impl Wire {
    fn child(&self) -> Option<&Child> {
        match &self.kind {
            WireKind::Child(child) => Some(child),
            WireKind::Http { .. } => None,
        }
    }

    fn rope(&self) -> &Rope {
        match &self.kind {
            WireKind::Child(child) => &child.rope,
            WireKind::Http { rope, .. } => rope,
        }
    }
}

/// What the driver is made of.
pub struct Parts {
    pub plan: Plan,
    pub gateway: Gateway,
    pub household: Household,
    pub stops: os::Stops,
    pub stdio: Option<StdioFront>,
    pub listen: Option<Listen>,
    pub reload: Reload,
    pub shelf: Shelf,
    pub mirrors: MirrorsByBackend,
    pub journal: Journal,
    pub control: Control,
}

impl Driver {
    pub fn new(parts: Parts) -> Driver {
        let Parts { plan, gateway, household, stops, stdio, listen, reload, shelf, mirrors, journal, control } = parts;
        let tower = Tower::default();
        let outside = tower.rope(OUTSIDE);
        outside.pull();
        Driver {
            plan,
            gateway,
            later: VecDeque::new(),
            is_acting: false,
            actions: Vec::new(),
            household,
            stops,
            had_terminal: io::stdin().is_terminal(),
            stopping: Stopping::No,
            outside,
            tower,
            rung: Vec::new(),
            links: BTreeMap::new(),
            left_out: BTreeMap::new(),
            restless: BTreeSet::new(),
            full: Vec::new(),
            heard: Vec::new(),
            stdio,
            listen,
            http: None,
            journal,
            calls: Calls::default(),
            control,
            reload,
            shelf,
            mirrors,
            mirrored: 0,
            metrics: Metrics::new(),
            recent: Recent::default(),
            memory: MemoryWatch::default(),
            errands: BTreeMap::new(),
            refusals: Refusals::default(),
            operator: None,
            began: Instant::now(),
            now: Instant::now(),
            timer: None,
            has_started: false,
        }
    }

    /// Runs until somebody ends it; the exit code.
    pub async fn run(mut self) -> u8 {
        spawn_local(self.tower.porter());
        self.show_mirrors();
        // Backends begin to start.
        self.tell(Event::TimePassed);
        if self.stdio.is_some() {
            let who = Who { name: "local".to_owned(), role: None, profile: None };
            self.tell(Event::ClientCame { client: STDIO_CLIENT, front: Front::Lines, who });
        }
        let code = std::future::poll_fn(|cx| self.poll(cx)).await;
        self.calls.write(&mut self.journal);
        self.shelf.finish().await;
        let line = self.journal.end(code);
        self.control.record(&line);
        self.control.end();
        code
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<u8> {
        self.tower.listen(cx);
        loop {
            self.now = Instant::now();
            // Mostly one look finds all there is and another one nothing; the rest need not be asked in between.
            let mut moved = self.poll_talk(cx) && self.poll_talk(cx);
            moved |= self.poll_memory(cx);
            moved |= self.poll_shelf(cx);
            moved |= self.poll_control(cx);
            moved |= self.flush(cx);
            moved |= self.poll_time(cx);
            if let Stopping::Over { code, until } = self.stopping {
                let is_said = self.stdio.as_ref().is_none_or(StdioFront::is_quiet)
                    && self.listen.as_mut().is_none_or(|listen| listen.poll_over(cx).is_ready());
                if is_said && self.links.is_empty() || until <= self.now {
                    return Poll::Ready(code);
                }
            }
            if !moved {
                if std::mem::take(&mut self.has_started) {
                    os::give_back_code();
                }
                return Poll::Pending;
            }
        }
    }

    fn tell(&mut self, event: Event) {
        if self.is_acting {
            return self.later.push_back(event);
        }
        self.is_acting = true;
        let mut actions = std::mem::take(&mut self.actions);
        let mut next = Some(event);
        while let Some(event) = next {
            self.gateway.handle_into(event, self.now, &mut actions);
            for action in actions.drain(..) {
                self.act(action);
            }
            next = self.later.pop_front();
        }
        self.actions = actions;
        self.is_acting = false;
        // Names in the catalogue can change with any event, and mirrored arguments are found by them.
        if self.mirrored != self.gateway.catalogue_version() {
            self.show_mirrors();
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::TellClient { client: STDIO_CLIENT, message, .. } => self.tell_stdio(message),
            Action::TellClient { client, message, about, said } => {
                if let Some(listen) = &mut self.listen {
                    listen.tell(client, message, about.as_ref(), said);
                }
            }
            Action::DropClient { client: STDIO_CLIENT } => {
                self.stdio.as_mut().into_iter().for_each(StdioFront::close);
                self.stop(true);
            }
            Action::DropClient { client } => {
                if let Some(listen) = &mut self.listen {
                    listen.drop_client(client);
                }
            }
            Action::Connect { link } => self.connect(link),
            Action::TellLink { link, message } => self.tell_link(link, message),
            Action::Disconnect { link, at_once } => self.hang_up(link.serial, at_once),
            Action::Record(record) => self.record(record),
            Action::Divert { link, message } => {
                if let Some(child) = self.child(link.serial) {
                    child.diverted += 1;
                    let backend = child.backend.clone();
                    let is_json = outlast_core::message::parse(&message).is_ok();
                    self.journal.diverted_of(&backend, &message, is_json);
                }
            }
            Action::Note(text) => self.journal.note(&text),
            Action::NotificationRefused(refused) => self.notification_refused(*refused),
            Action::Called(called) => self.called(&called),
            Action::Keep { backend, catalogue } => {
                if self.mirrors.learn(&backend, &catalogue) {
                    self.show_mirrors();
                }
                // It is cached for the command that was asked, which may have changed since the configuration was read.
                let backends: Vec<Backend> = self.gateway.backends().cloned().collect();
                self.shelf.configure(&backends, self.now);
                self.shelf.keep(&backend, catalogue, self.now);
            }
            Action::Answer { ticket, result } => self.answer(ticket, result),
            Action::Over => self.finish(0),
        }
    }

    fn called(&mut self, called: &Called) {
        self.metrics.called(called);
        if is_refused(called.outcome) {
            match self.refusals.add(called.outcome.name(), self.now) {
                None => return,
                Some(0) => {}
                Some(suppressed) => self.suppressed(called.outcome.name(), suppressed),
            }
        }
        let origin = self.origin(called.client);
        let line = self.calls.add(called, &origin, &mut self.journal, self.now);
        self.control.record(line);
        Driver::publish_to(&mut self.listen, "record", line);
    }

    /// Refusals that were counted and not written.
    fn suppressed(&mut self, kind: &'static str, count: u64) {
        let of = OfGateway { outcome: Some(kind), suppressed: Some(count), ..OfGateway::default() };
        self.record(Record { gateway: Some(Box::new(of)), ..Record::new(record::Event::RequestRefused) });
    }

    /// A request was refused by the front.
    fn refused(&mut self, refused: listen::Refused) {
        self.metrics.refused(refused.kind);
        let Some(suppressed) = self.refusals.add(refused.kind, self.now) else { return };
        let told: serde_json::Value = serde_json::from_slice(&refused.told).unwrap_or_default();
        let reason = told["error"]["message"].as_str().map(str::to_owned);
        let of = OfGateway {
            who: refused.who.as_ref().map(|who| who.name.clone()),
            role: refused.who.as_ref().and_then(|who| who.role.clone()),
            method: Some(format!("{} {}", refused.method, report::plain(&refused.path))),
            outcome: Some(refused.kind),
            peer: Some(refused.peer.to_string()),
            session: refused.session.map(|digits| SessionLabel::Http(digits).to_string()),
            suppressed: Some(suppressed).filter(|count| *count > 0),
            ..OfGateway::default()
        };
        self.record(Record { reason, gateway: Some(Box::new(of)), ..Record::new(record::Event::RequestRefused) });
    }

    fn notification_refused(&mut self, refused: RefusedNotification) {
        const KIND: &str = "unknown_notification";
        self.metrics.refused(KIND);
        let Some(suppressed) = self.refusals.add(KIND, self.now) else { return };
        let mut of = OfGateway {
            method: Some(report::plain(&refused.method)),
            outcome: Some(KIND),
            suppressed: Some(suppressed).filter(|count| *count > 0),
            ..OfGateway::default()
        };
        match refused.from {
            Sender::Client { client, who } => {
                let origin = self.origin(client);
                of.who = Some(who.name.clone());
                of.role = who.role.clone();
                of.peer = origin.peer.map(|peer| peer.to_string());
                of.session = origin.session.map(|session| session.to_string());
            }
            Sender::Backend(name) => of.backend = Some(name.to_string()),
        }
        let reason = Some("only notifications of MCP are forwarded".to_owned());
        self.record(Record { reason, gateway: Some(Box::new(of)), ..Record::new(record::Event::RequestRefused) });
    }

    /// Where a client is, and its session.
    fn origin(&self, client: u64) -> Origin {
        match (client, &self.listen) {
            (STDIO_CLIENT, _) => Origin { peer: None, session: Some(SessionLabel::Stdio) },
            (client, Some(listen)) => listen.origin(client),
            (_, None) => Origin::default(),
        }
    }

    fn record(&mut self, mut record: Record) {
        // The machine knows its backends by name, and not what the gateway itself is called.
        if record.kind == Some("backend")
            && let Some(name) = record.id.take()
        {
            record = record.of_backend(&name);
        }
        // What an operator asked for is recorded with who it was.
        if matches!(record.event, record::Event::Switched | record::Event::ServerRestartRequested)
            && let Some(operator) = &self.operator
        {
            let of = record.gateway.get_or_insert_default();
            of.who.get_or_insert_with(|| operator.who.clone());
            of.peer = of.peer.take().or_else(|| operator.peer.clone());
        }
        self.calls.write(&mut self.journal);
        let line = self.journal.record(record);
        self.control.record(&line);
        self.publish("record", &line);
        self.recent.add(&line, self.now);
    }

    // ---- the end -----------------------------------------------------------------------------------------------

    /// Politely; a second time at once.
    fn stop(&mut self, graceful: bool) {
        if let Some(stdio) = &mut self.stdio {
            stdio.stop_hearing();
        }
        let was_asked = matches!(self.stopping, Stopping::Asked { .. } | Stopping::Over { .. });
        if !was_asked {
            let grace = self.plan.grace;
            self.stopping = Stopping::Asked { until: self.now + grace.after_stdin + grace.after_term + FAREWELL_MAX };
            self.tell(Event::StopAsked);
        }
        if was_asked || !graceful {
            self.kill_all();
        }
    }

    fn kill_all(&mut self) {
        for serial in self.links.keys().copied().collect::<Vec<_>>() {
            self.hang_up(serial, true);
        }
    }

    fn finish(&mut self, code: u8) {
        if !matches!(self.stopping, Stopping::Over { .. }) {
            self.listen.as_mut().into_iter().for_each(Listen::close);
            self.stopping = Stopping::Over { code, until: self.now + FAREWELL_MAX };
        }
    }

    fn poll_stops(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(stop) = self.stops.poll_next(cx) else { return false };
        // A terminal that was closed tells its programs to go; without that, the signal means the configuration.
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

    // ---- backends ----------------------------------------------------------------------------------------------

    fn connect(&mut self, link: Link) {
        let Some(backend) = self.gateway.settings_of(link).cloned() else { return };
        match &backend.kind {
            Kind::Stdio { .. } => self.start(link, &backend),
            Kind::Http { url, headers, is_sse } => {
                let client = self.http.get_or_insert_with(|| HttpClient::new(CONNECT_MAX));
                let settings = HttpSettings {
                    url: url.expose().to_owned(),
                    headers: headers.iter().map(|(name, value)| (name.clone(), value.expose().to_owned())).collect(),
                    is_sse: *is_sse,
                    patience: Patience::default(),
                };
                let http = Box::new(HttpLink::connect(client, &settings));
                let rope = self.tower.rope(link.serial);
                rope.pull();
                self.links.insert(link.serial, Wire { link, kind: WireKind::Http { link: http, rope } });
                self.tell(Event::LinkUp { link, pid: None });
            }
        }
    }

    fn start(&mut self, link: Link, backend: &Backend) {
        let Kind::Stdio { command, args, env, cwd, sandbox } = &backend.kind else { return };
        let cwd = cwd.as_ref().map_or_else(|| self.plan.cwd.clone(), |cwd| self.plan.cwd.join(cwd.expose()));
        let args: Vec<String> = args.iter().map(|word| word.expose().to_owned()).collect();
        let configured = env.iter().map(|(name, value)| (OsString::from(name), OsString::from(value.expose())));
        let env = match backend.inherit_env {
            true => configured.collect(),
            false => {
                let Environment { all, left_out } = environment::of_backend(environment::ours(), configured, &cwd);
                self.env_left_out(&backend.name, left_out);
                all
            }
        };
        let order = Command {
            program: command.expose(),
            args: &args,
            env,
            env_is_all: !backend.inherit_env,
            cwd: &cwd,
            tag: format!("{}.{}.{}", self.plan.id, backend.name, link.serial),
            sandbox: sandbox.clone(),
        };
        match self.keeper().spawn(link.serial, &order.order()) {
            Ok(pipes) => {
                let child = Child::new(&backend.name, pipes, self.plan.grace, self.tower.rope(link.serial));
                self.links.insert(link.serial, Wire { link, kind: WireKind::Child(Box::new(child)) });
            }
            Err(error) => {
                let how = self.masked(How::CouldNotStart(report::plain(&error.to_string())));
                self.tell(Event::LinkDown { link, how, stderr_tail: String::new(), unsent: Vec::new() });
            }
        }
    }

    /// Variables of ours that a backend does not get; told when that changes.
    fn env_left_out(&mut self, backend: &str, left_out: Vec<String>) {
        if self.left_out.get(backend) == Some(&left_out) {
            return;
        }
        if let Some(words) = environment::left_out_of_backend_in_words(&left_out) {
            self.journal.note(&format!("{backend}: {words}"));
        }
        self.left_out.insert(backend.to_owned(), left_out);
    }

    fn tell_link(&mut self, link: Link, message: Bytes) {
        let Some(wire) = self.links.get_mut(&link.serial) else { return };
        match &mut wire.kind {
            WireKind::Http { link, .. } => link.send(message),
            WireKind::Child(child) => match child.put(message) {
                true => self.full.push(link.serial),
                false => self.live(link.serial, life::Event::StopAsked(How::StoppedReading)),
            },
        }
    }

    fn hang_up(&mut self, serial: u64, at_once: bool) {
        if let Some(Wire { kind: WireKind::Http { link, .. }, .. }) = self.links.get_mut(&serial) {
            return link.close(at_once);
        }
        let event = if at_once { life::Event::KillAsked } else { life::Event::StopAsked(How::Stopped) };
        self.live(serial, event);
    }

    /// For an order. What the keeper does not take at once is sent when its news are asked for.
    fn keeper(&mut self) -> &mut Household {
        self.outside.pull();
        &mut self.household
    }

    fn child(&mut self, serial: u64) -> Option<&mut Child> {
        match &mut self.links.get_mut(&serial)?.kind {
            WireKind::Child(child) => Some(child),
            WireKind::Http { .. } => None,
        }
    }

    fn poll_news(&mut self, cx: &mut Context<'_>) -> bool {
        for turn in 0..EVENTS_MAX {
            let Poll::Ready(news) = self.household.poll_news(cx) else { return turn > 0 };
            match news {
                News::Started { key, pid } => {
                    if let Some(child) = self.child(key) {
                        child.pid = pid;
                        // What it said in the meantime is heard now: the machine did not know it before.
                        child.rope.pull();
                        self.live(key, life::Event::Started { pid });
                    }
                }
                News::StartFailed { key, error } => {
                    self.live(key, life::Event::StartFailed(report::plain(&error.to_string())));
                }
                News::Exited { key, exit } => {
                    let exit = match exit {
                        os::Exit::Code(code) => exit::Exit::Code(code),
                        os::Exit::Signal(signal) => exit::Exit::Signal(signal),
                    };
                    // Its last words may be in the pipe already.
                    self.child(key).into_iter().for_each(|child| child.rope.pull());
                    self.live(key, life::Event::Exited(exit));
                }
                News::Swept { key } => self.live(key, life::Event::Swept),
                // Only of children with a terminal.
                News::Stopped { .. } => {}
                News::Noticed(sentence) => self.journal.note(&format!("WARNING: {sentence}")),
                News::KeeperLost => {
                    self.journal
                        .note("the process that keeps the children is gone; no backend can be started any more");
                    self.stop(true);
                    self.finish(1);
                }
            }
        }
        true
    }

    /// Tells a life what happened, and carries out what it decides.
    fn live(&mut self, serial: u64, event: life::Event) {
        let now = self.now;
        let Some(child) = self.child(serial) else { return };
        for action in child.life.handle(event, now) {
            let Some(child) = self.child(serial) else { return };
            match action {
                life::Action::CloseStdin => child.close_stdin(),
                life::Action::Terminate => self.keeper().signal(serial, os::Signal::Terminate),
                life::Action::Kill => self.keeper().signal(serial, os::Signal::Kill),
                life::Action::Sweep => self.keeper().sweep(serial),
                life::Action::DropStdout => {
                    let mut heard = std::mem::take(&mut self.heard);
                    self.child(serial).into_iter().for_each(|child| child.drain_stdout(&mut heard));
                    self.hear(serial, &mut heard);
                    self.heard = heard;
                }
                life::Action::ReportStarted => {
                    let pid = child.pid;
                    self.has_started = true;
                    if let Some(link) = self.links.get(&serial).map(|wire| wire.link) {
                        self.tell(Event::LinkUp { link, pid: Some(pid) });
                    }
                    self.set_memory_watch();
                }
                life::Action::Report(gone) => self.report_gone(serial, gone),
            }
        }
        match self.child(serial).map(|child| (child.life.is_over(), child.life.deadline())) {
            Some((true, _)) => {
                self.links.remove(&serial);
                self.restless.remove(&serial);
            }
            Some((_, Some(_))) => drop(self.restless.insert(serial)),
            _ => drop(self.restless.remove(&serial)),
        }
    }

    fn report_gone(&mut self, serial: u64, gone: life::Gone) {
        let mut heard = std::mem::take(&mut self.heard);
        self.child(serial).into_iter().for_each(|child| child.drain_stderr(&mut heard));
        self.hear(serial, &mut heard);
        self.heard = heard;
        let Some(link) = self.links.get(&serial).map(|wire| wire.link) else { return };
        let Some(child) = self.child(serial) else { return };
        let unsent = child.close();
        let stderr_tail = child.tail.text();
        let stderr_tail = self.journal.mask().hide(&stderr_tail).into_owned();
        let how = self.masked(gone.how);
        if let Some(backend) = self.gateway.backend(link.backend) {
            self.errands.values_mut().for_each(|errand| errand.note_end(&backend.name, &stderr_tail));
        }
        self.tell(Event::LinkDown { link, how, stderr_tail, unsent });
    }

    /// What is told of an end reaches clients, operators and files: values of references are not in it.
    fn masked(&self, how: How) -> How {
        let hide = |why: String| self.journal.mask().hide(&why).into_owned();
        match how {
            How::CouldNotStart(why) => How::CouldNotStart(hide(why)),
            How::Lost(why) => How::Lost(hide(why)),
            How::Forgot(why) => How::Forgot(hide(why)),
            how => how,
        }
    }

    fn mask_refusal(&self, refused: &mut Refused) {
        let hide = |text: &mut String| *text = self.journal.mask().hide(text).into_owned();
        hide(&mut refused.words);
        refused.challenge.as_mut().map(hide);
        refused.body.as_mut().map(hide);
    }

    /// What backends and clients say.
    fn poll_talk(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = self.poll_rung();
        moved |= self.poll_stdio(cx);
        moved |= self.poll_listen(cx);
        moved
    }

    /// Those that have something to say.
    fn poll_rung(&mut self) -> bool {
        let mut rung = std::mem::take(&mut self.rung);
        self.tower.take(&mut rung);
        let moved = !rung.is_empty();
        for key in rung.drain(..) {
            match key {
                OUTSIDE => self.poll_outside(),
                serial => self.poll_link(serial),
            }
        }
        self.rung = rung;
        moved
    }

    /// Signals, news of children and changed files: they are rare, so nobody asks for them before they ring.
    fn poll_outside(&mut self) {
        let rope = self.outside.clone();
        let mut cx = Context::from_waker(rope.waker());
        let mut moved = self.poll_stops(&mut cx);
        moved |= self.poll_news(&mut cx);
        moved |= self.poll_reload(&mut cx);
        if moved {
            rope.pull();
        }
    }

    fn poll_link(&mut self, serial: u64) {
        if self.links.get(&serial).is_some_and(|wire| wire.child().is_none()) {
            return self.poll_http(serial);
        }
        // Where one client is all there is, nobody says more than it takes. Beside others it is let go instead.
        let is_low = self.listen.is_some() || self.stdio.as_ref().is_none_or(StdioFront::is_low);
        let mut heard = std::mem::take(&mut self.heard);
        if let Some(child) = self.child(serial) {
            let rope = child.rope.clone();
            let mut cx = Context::from_waker(rope.waker());
            let mut has_more = child.hear_stderr(&mut cx, &mut heard);
            // What it says before we heard that it started waits until then: the machine does not know it yet.
            if child.pid != 0 && is_low {
                has_more |= child.hear_stdout(&mut cx, &mut heard);
            }
            if has_more {
                rope.pull();
            }
            // There may be room in its stdin again.
            self.full.push(serial);
            self.hear(serial, &mut heard);
        }
        self.heard = heard;
    }

    fn poll_http(&mut self, serial: u64) {
        for _ in 0..EVENTS_MAX {
            let Some(Wire { link, kind: WireKind::Http { link: http, rope } }) = self.links.get_mut(&serial) else {
                return;
            };
            let link = *link;
            let Poll::Ready(heard) = http.poll(&mut Context::from_waker(rope.waker())) else { return };
            match heard {
                http::Heard::Said(message) => self.tell(Event::LinkSaid { link, message }),
                http::Heard::SaidFor { id, message } => self.tell(Event::LinkSaidFor { link, id, message }),
                http::Heard::Lost { id, was_sent, why } => {
                    let why = self.journal.mask().hide(&why).into_owned();
                    self.tell(Event::RequestLost { link, id, was_sent, why });
                }
                http::Heard::Refused { id, mut refused } => {
                    self.mask_refusal(&mut refused);
                    self.tell(Event::RequestRefused { link, id, refused });
                }
                http::Heard::Denied(mut refused) => {
                    self.mask_refusal(&mut refused);
                    self.tell(Event::LinkDenied { link, refused });
                }
                http::Heard::Failing(how) => {
                    let how = self.masked(how);
                    self.tell(Event::LinkFailing { link, how });
                }
                http::Heard::Note(text) => {
                    if let Some(backend) = self.gateway.backend(link.backend) {
                        let text = format!("{}: {text}", backend.name);
                        self.journal.note(&text);
                    }
                }
                http::Heard::Down { why, is_forgotten } => {
                    self.links.remove(&serial);
                    let how = self.masked(if is_forgotten { How::Forgot(why) } else { How::Lost(why) });
                    return self.tell(Event::LinkDown { link, how, stderr_tail: String::new(), unsent: Vec::new() });
                }
            }
        }
        // The others first.
        self.links.get(&serial).into_iter().for_each(|wire| wire.rope().pull());
    }

    fn hear(&mut self, serial: u64, heard: &mut Vec<Heard>) {
        let Some(link) = self.links.get(&serial).map(|wire| wire.link) else { return heard.clear() };
        for heard in heard.drain(..) {
            match heard {
                Heard::Said(line) if line.trim_ascii().is_empty() => {}
                Heard::Said(message) => self.tell(Event::LinkSaid { link, message }),
                Heard::Logged(text) => {
                    if let Some(child) = self.links.get(&serial).and_then(Wire::child) {
                        self.journal.stderr_of(&child.backend, &text);
                    }
                }
                Heard::TooLong => self.live(serial, life::Event::StopAsked(How::LineTooLong)),
                Heard::StdoutClosed => self.live(serial, life::Event::StdoutClosed),
            }
        }
    }

    /// One write for each that has something to be sent, however much was said in this turn.
    fn flush(&mut self, cx: &mut Context<'_>) -> bool {
        let mut full = std::mem::take(&mut self.full);
        full.sort_unstable();
        full.dedup();
        let mut refused = Vec::new();
        for &serial in &full {
            if let Some(child) = self.child(serial) {
                let rope = child.rope.clone();
                if !child.flush(&mut Context::from_waker(rope.waker())) {
                    refused.push(serial);
                }
            }
        }
        full.clear();
        self.full = full;
        let mut moved = !refused.is_empty();
        for serial in refused {
            self.live(serial, life::Event::StdinRefused);
        }
        moved |= self.flush_stdio(cx);
        moved
    }

    // ---- the client on stdin and stdout --------------------------------------------------------------------------

    fn poll_stdio(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(stdio) = &mut self.stdio else { return false };
        let mut heard = Vec::new();
        let has_more = stdio.hear(cx, &mut heard);
        let moved = has_more || !heard.is_empty();
        self.heard_stdio(heard);
        moved
    }

    fn heard_stdio(&mut self, heard: Vec<stdio::Heard>) {
        for heard in heard {
            match heard {
                stdio::Heard::Said(message) => self.tell(Event::ClientSaid { client: STDIO_CLIENT, message }),
                stdio::Heard::Ended if self.stopping == Stopping::No => {
                    // Who says it all at once and leaves is answered as well.
                    let grace = self.plan.grace;
                    self.stopping = Stopping::Draining { until: self.now + grace.after_stdin + grace.after_term };
                }
                stdio::Heard::Ended => {}
                stdio::Heard::Broken => {
                    self.tell(Event::ClientLeft { client: STDIO_CLIENT });
                    if !matches!(self.stopping, Stopping::Asked { .. } | Stopping::Over { .. }) {
                        self.stop(true);
                    }
                }
            }
        }
    }

    fn tell_stdio(&mut self, message: Bytes) {
        let Some(stdio) = &mut self.stdio else { return };
        if !stdio.tell(message) && self.listen.is_some() {
            self.journal.note("the client on stdout takes nothing any more, and is let go");
            stdio.close();
            self.tell(Event::ClientLeft { client: STDIO_CLIENT });
        }
    }

    fn flush_stdio(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(stdio) = &mut self.stdio else { return false };
        let mut heard = Vec::new();
        let has_room = stdio.flush(cx, &mut heard);
        if has_room {
            // Those who were not listened to for want of room.
            self.links.values().for_each(|wire| wire.rope().pull());
        }
        self.heard_stdio(heard);
        has_room
    }

    // ---- clients over HTTP ---------------------------------------------------------------------------------------

    fn poll_listen(&mut self, cx: &mut Context<'_>) -> bool {
        for turn in 0..EVENTS_MAX {
            let Some(listen) = &mut self.listen else { return false };
            let Poll::Ready(heard) = listen.poll(cx) else { return turn > 0 };
            match heard {
                listen::Heard::Came { client, front, who } => self.tell(Event::ClientCame { client, front, who }),
                listen::Heard::Said { client, message } => self.tell(Event::ClientSaid { client, message }),
                listen::Heard::Asked { client, message, outline } => {
                    self.tell(Event::ClientAsked { client, message, outline });
                }
                listen::Heard::Left { client } => self.tell(Event::ClientLeft { client }),
                listen::Heard::Allowed { client, until } => self.tell(Event::ClientAllowed { client, until }),
                listen::Heard::Page(page) => self.turn_page(*page),
                listen::Heard::Refused(refused) => self.refused(*refused),
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
        self.now = Instant::now();
        if let Stopping::Draining { until } = self.stopping
            && (until <= self.now || self.gateway.in_flight(STDIO_CLIENT) == 0)
        {
            self.stop(true);
            return true;
        }
        let stopping = match self.stopping {
            Stopping::No => None,
            Stopping::Draining { until } | Stopping::Asked { until } | Stopping::Over { until, .. } => Some(until),
        };
        let lives = self.restless.iter().filter_map(|serial| self.links.get(serial)?.child()?.life.deadline());
        let files = [self.calls.deadline(), self.shelf.deadline(), self.refusals.deadline()];
        let others = [self.gateway.deadline(), self.memory.deadline(), stopping].into_iter().chain(files);
        let Some(at) = lives.chain(others.flatten()).min() else {
            self.timer = None;
            return false;
        };
        if at <= self.now {
            self.time_passed();
            return true;
        }
        match &mut self.timer {
            Some((set, timer)) => {
                if *set != at {
                    timer.as_mut().reset(at.into());
                    *set = at;
                }
            }
            None => self.timer = Some((at, Box::pin(sleep_until(at.into())))),
        }
        let (_, timer) = self.timer.as_mut().expect("set above");
        std::future::Future::poll(timer.as_mut(), cx).is_ready()
    }

    fn time_passed(&mut self) {
        self.tell(Event::TimePassed);
        for serial in self.restless.iter().copied().collect::<Vec<_>>() {
            let Some(due) = self.child(serial).map(|child| child.life.due(os::is_exiting)) else { continue };
            self.live(serial, due);
        }
        self.calls.time_passed(&mut self.journal, self.now);
        self.shelf.time_passed(self.now);
        for (kind, count) in self.refusals.due(self.now) {
            self.suppressed(kind, count);
        }
        if self.memory.deadline().is_some_and(|due| due <= self.now) {
            let children = self.weighed();
            self.memory.measure(children, self.now);
        }
        if let Stopping::Asked { until } = self.stopping
            && until <= self.now
        {
            self.kill_all();
            self.finish(0);
        }
    }

    fn poll_shelf(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(complaint) = self.shelf.poll(cx) else { return false };
        self.journal.note(&complaint);
        true
    }

    // ---- memory --------------------------------------------------------------------------------------------------

    /// Children with a limit, by serial and process.
    fn weighed(&self) -> Vec<(u64, u32)> {
        let mut weighed = Vec::new();
        for (serial, wire) in &self.links {
            let limit = self.gateway.backend(wire.link.backend).and_then(|backend| backend.memory_max);
            if let Some(child) = wire.child().filter(|child| limit.is_some() && child.pid != 0) {
                weighed.push((*serial, child.pid));
            }
        }
        weighed
    }

    fn set_memory_watch(&mut self) {
        self.memory.set(!self.weighed().is_empty(), self.now);
    }

    fn poll_memory(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(found) = self.memory.poll(cx) else { return false };
        for (serial, rss) in found {
            if let Some(link) = self.links.get(&serial).map(|wire| wire.link) {
                self.tell(Event::Measured { link, rss });
            }
        }
        self.set_memory_watch();
        true
    }

    /// One record for each thing that an operator asks for.
    fn operator_requested(&mut self, method: &str, target: Option<&str>, reason: Option<&str>) {
        let operator = self.operator.clone().unwrap_or_default();
        let detail = target.map_or_else(|| method.to_owned(), |target| format!("{method} {target}"));
        let of = OfGateway {
            who: Some(operator.who),
            peer: operator.peer,
            method: Some(method.to_owned()),
            ..OfGateway::default()
        };
        let record = Record::new(record::Event::OperatorRequested);
        let reason = reason.map(str::to_owned);
        self.record(Record { detail: Some(detail), reason, gateway: Some(Box::new(of)), ..record });
    }

    fn configured(&mut self, detail: &str, who: &str) {
        self.reload.failed = None;
        let of = OfGateway { who: Some(who.to_owned()), ..OfGateway::default() };
        let record = Record::new(record::Event::Configured);
        self.record(Record { detail: Some(detail.to_owned()), gateway: Some(Box::new(of)), ..record });
    }

    fn refuse_config(&mut self, why: &str, who: &str) {
        let reason = "the configuration was refused, and the one before stays".to_owned();
        let of = OfGateway { who: Some(who.to_owned()), ..OfGateway::default() };
        let record = Record { gateway: Some(Box::new(of)), ..Record::new(record::Event::ReloadFailed) };
        self.record(Record { reason: Some(reason), detail: Some(why.to_owned()), ..record });
        self.reload.failed = Some((self.now, why.to_owned()));
    }
}

/// Whether a call was refused by a guard, or for being for nothing that there is: anybody can make as many as they like.
fn is_refused(outcome: Outcome) -> bool {
    matches!(
        outcome,
        Outcome::SwitchedOff
            | Outcome::RateLimited
            | Outcome::Denied
            | Outcome::BadArguments
            | Outcome::CircuitOpen
            | Outcome::Unknown
    )
}
