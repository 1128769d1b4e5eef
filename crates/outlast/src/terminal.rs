//! Drives a session: `outlast run`. One loop carries bytes between the agent's terminal and those who look at it, and
//! carries out what the machines decide. Nothing in it waits, and no byte is changed on its way.

mod agent_hooks;
mod alternate;
mod bytes;
mod child;
mod guard;
mod hooks;
mod methods;
mod paint;
mod people;
mod plan;
mod screen;
mod sending;
mod turn_log;
mod unfinished;
mod viewers;

use std::{
    collections::BTreeMap,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use ::bytes::BytesMut;
use outlast_core::{
    agent::Agent,
    exit::How,
    life::{self, Life},
    record::Record,
    restarts::State as Health,
    seen_lines::SeenLines,
    send::Sends,
    session::{Action, Event, Mode, Session},
    terminal,
    typing::Typing,
    waiting::{self, Waiting},
};
use serde_json::json;
use tokio::time::{Sleep, sleep_until};

use self::{
    agent_hooks::AgentHooks, bytes::Pipe, child::Child, hooks::Hooks, people::Tally, turn_log::TurnLog,
    viewers::Viewers,
};
pub use self::{
    alternate::Alternate,
    paint::Extent,
    plan::{Place, Plan},
    screen::Screen,
};
use crate::{
    control::Control,
    journal::Journal,
    os::{self, Household, Outer, Sink},
    report::Report,
    session_record::{Records, State},
};

/// How long the last words and the sweeping may take once all is over.
const FAREWELL_MAX: Duration = Duration::from_secs(1);

/// Everything around one session.
pub struct Terminal {
    plan: Plan,
    place: Place,
    first: Mode,
    session: Session,
    agent: Agent,
    typing: Typing,
    sends: Sends,
    /// While `send` waits for the agent's record of a turn.
    turn_log: Option<TurnLog>,
    /// What was shown before a text that was not submitted was removed.
    screen_before: Option<String>,
    waiting: Waiting,
    household: Household,
    hooks: Hooks,
    agent_hooks: AgentHooks,
    stops: os::Stops,
    stops_heard: Tally,
    suspends_heard: Tally,

    viewers: Viewers,
    /// What terminals that left have in their scrollback.
    seen: SeenLines,
    /// Where the agent's output goes when we have no terminal.
    stdout: Option<Pipe>,
    /// We have no terminal: what we have to say stands on stderr.
    has_no_terminal: bool,
    /// What was just shown: on its way to everybody.
    fresh: BytesMut,
    /// What was shown and is not yet in the model, and since when.
    unseen: BytesMut,
    unseen_since: Option<Instant>,
    /// None if it is not kept.
    screen: Option<Screen>,
    alternate: Alternate,

    /// Where the session is written down; None if it cannot be.
    records: Option<Records>,
    /// A signal or a lost terminal ends the session, not its user.
    is_interrupted: bool,
    child: Option<Child>,
    /// When to look which conversation the agent has open, if it is one that does not say.
    learns_at: Option<Instant>,
    lives: BTreeMap<u64, Life>,
    generation: u64,
    /// Since when somebody waits for an answer.
    asked_at: BTreeMap<u64, Instant>,

    journal: Journal,
    control: Control,
    announce: Option<os::Announce>,
    /// Why the command could not be started, for when we are the one to say it.
    complaint: Option<Report>,

    now: Instant,
    timer: Option<(Instant, Pin<Box<Sleep>>)>,
    ending: Option<(u8, Instant)>,
}

/// What the parts are made of, before they meet.
pub struct Parts {
    pub plan: Plan,
    pub place: Place,
    pub session: Session,
    pub agent: Agent,
    pub records: Option<Records>,
    /// Fresh, or with the conversation of an earlier outlast.
    pub first: Mode,
    pub household: Household,
    pub stops: os::Stops,
    pub outer: Option<Outer>,
    pub stdout: Option<Sink>,
    /// Whether the screen is kept.
    pub keeps_screen: bool,
    pub journal: Journal,
    pub control: Control,
    pub announce: Option<os::Announce>,
}

impl Terminal {
    pub fn new(parts: Parts) -> Terminal {
        let now = Instant::now();
        let size = parts.outer.as_ref().map_or_else(plan::usual_size, Outer::size);
        let mut viewers = Viewers::new(size);
        if let Some(outer) = parts.outer {
            viewers.begin(outer, &parts.plan.detach_key, now);
        }
        let reads_screen = parts.keeps_screen && parts.agent.is_readable();
        Terminal {
            typing: Typing::new(parts.agent.farewells()),
            sends: Sends::new(parts.agent.kind(), parts.agent.submit()),
            turn_log: None,
            screen_before: None,
            waiting: Waiting::new(reads_screen, parts.plan.hang_timeout, now),
            agent_hooks: AgentHooks::default(),
            hooks: Hooks::new(parts.plan.notify.clone()),
            plan: parts.plan,
            place: parts.place,
            first: parts.first,
            session: parts.session,
            agent: parts.agent,
            household: parts.household,
            stops: parts.stops,
            stops_heard: Tally::default(),
            suspends_heard: Tally::default(),
            viewers,
            seen: SeenLines::default(),
            has_no_terminal: parts.stdout.is_some(),
            stdout: parts.stdout.map(Pipe::new),
            fresh: BytesMut::new(),
            unseen: BytesMut::new(),
            unseen_since: None,
            screen: parts.keeps_screen.then(|| Screen::new(size)),
            alternate: Alternate::default(),
            records: parts.records,
            is_interrupted: false,
            child: None,
            learns_at: None,
            lives: BTreeMap::new(),
            generation: 0,
            asked_at: BTreeMap::new(),
            journal: parts.journal,
            control: parts.control,
            announce: parts.announce,
            complaint: None,
            now,
            timer: None,
            ending: None,
        }
    }

    /// Runs until the session is over; the agent's exit code, or why there never was an agent.
    pub async fn run(mut self) -> Result<u8, Report> {
        let actions = self.session.begin(self.first);
        self.act_all(actions);
        let code = std::future::poll_fn(|cx| self.poll(cx)).await;
        self.journal.event("session_end", &[("code", &code)]);
        let Terminal { journal, mut control, viewers, complaint, household, .. } = self;
        let line = journal.end(code);
        control.record(&line);
        control.end();
        drop(viewers);
        household.close().await;
        complaint.map_or(Ok(code), Err)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<u8> {
        loop {
            self.now = Instant::now();
            let mut moved = self.poll_stops(cx);
            moved |= self.poll_news(cx);
            moved |= self.poll_viewers(cx);
            moved |= self.poll_control(cx);
            moved |= self.hooks.poll(cx);
            moved |= self.carry(cx);
            moved |= self.tend_sends();
            if let Some((code, until)) = self.ending {
                let is_said = self.fresh.is_empty() && self.viewers.are_drained();
                let is_quiet = is_said && self.stdout.as_ref().is_none_or(Pipe::is_empty) && self.lives.is_empty();
                if is_quiet || until <= Instant::now() {
                    return Poll::Ready(code);
                }
            }
            moved |= self.poll_time(cx);
            if !moved {
                return Poll::Pending;
            }
        }
    }

    fn tell(&mut self, event: Event) {
        let actions = self.session.handle(event, self.now);
        self.act_all(actions);
    }

    fn act_all(&mut self, actions: Vec<Action>) {
        for action in actions {
            self.act(action);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Start(mode) => self.start(mode),
            Action::Stop => self.live(self.generation, life::Event::StopAsked(How::Stopped)),
            Action::Kill => self.live(self.generation, life::Event::KillAsked),
            Action::StopHung(silent_for) => {
                // No more exactly than people would say it.
                let tenths = u64::try_from(silent_for.as_millis() / 100).unwrap_or(u64::MAX);
                let how = How::Hung(Duration::from_millis(tenths.saturating_mul(100)));
                self.live(self.generation, life::Event::StopAsked(how));
            }
            Action::Ask => {
                let exit = self.session.last_exit().map(ToString::to_string).unwrap_or_default();
                let words = format!("{} left ({exit}).", self.plan.program);
                self.say(&words, " Enter: go on with the conversation, f: a fresh one, q: quit");
            }
            Action::Note(note) => self.note(note),
            Action::Answer { ticket, result } => self.answer(ticket, result),
            Action::End(code) => {
                self.end_sends(true);
                self.keep_record(if self.is_interrupted { State::Running } else { State::Ended });
                if let Some(announce) = self.announce.take() {
                    let words =
                        self.complaint.take().map_or_else(|| "it ended at once".to_owned(), |it| it.to_string());
                    announce.say(&json!({"error": words, "code": code}).to_string());
                }
                self.viewers.end(code);
                self.ending = Some((code, Instant::now() + FAREWELL_MAX));
            }
        }
    }

    /// Tells the one who knows whether the agent waits, and carries out what it decides.
    fn watch(&mut self, event: waiting::Event) {
        let actions = self.waiting.handle(event, self.now);
        self.act_on_watch(actions);
    }

    fn act_on_watch(&mut self, actions: Vec<waiting::Action>) {
        for action in actions {
            match action {
                waiting::Action::Look => {
                    self.catch_up();
                    let screen = self.screen.as_ref();
                    let sight = screen.map(|screen| self.agent.stance(&screen.view())).unwrap_or_default();
                    let is_cursor_visible = screen.is_none_or(Screen::is_cursor_visible);
                    self.watch(waiting::Event::Looked { sight, is_cursor_visible });
                }
                waiting::Action::Answer { ticket, outcome } => self.answer_waiter(ticket, outcome),
                waiting::Action::Changed { is_waiting, stance } => {
                    let about: [(&str, &dyn std::fmt::Display); 2] = [("is", &is_waiting), ("stance", &stance.word())];
                    self.journal.event("waiting_for_input", &about);
                    self.notify(
                        "waiting_for_input",
                        json!({"waiting": is_waiting, "stance": stance.word()}),
                        is_waiting,
                    );
                }
                waiting::Action::Hung { silent_for } => {
                    self.journal.event("agent_hung", &[("silent_s", &silent_for.as_secs())]);
                    self.notify("hung", json!({"silent_s": silent_for.as_secs_f64()}), true);
                    self.tell(Event::Hung { silent_for });
                }
            }
        }
    }

    /// An event for those who subscribed and, if it calls for a person, for the command that notifies.
    fn notify(&mut self, event: &str, mut about: serde_json::Value, calls: bool) {
        about["event"] = event.into();
        about["session"] = self.plan.id.as_str().into();
        self.control.event(&about);
        if !calls || !self.hooks.are_wanted() {
            return;
        }
        about["cwd"] = self.place.cwd.path.to_string_lossy().into();
        about["program"] = self.plan.program.as_str().into();
        about["title"] = self.screen().and_then(|screen| screen.title()).into();
        about["attached"] = self.viewers.count().into();
        about["timestamp"] = crate::home::epoch().into();
        if let Some(complaint) = self.hooks.run(&about, &self.plan, &self.place, &mut self.household, self.now) {
            self.journal.note(&complaint);
        }
    }

    fn poll_time(&mut self, cx: &mut Context<'_>) -> bool {
        let lives = self.lives.values().filter_map(Life::deadline);
        let machines = [self.session.deadline(), self.viewers.deadline(), self.waiting.deadline()];
        let own =
            [self.ending.map(|(_, until)| until), self.hooks.deadline(), self.catches_up_at(), self.sends.deadline()];
        let own = own.into_iter().chain([self.learns_at, self.reads_turns_at()]);
        let Some(at) = lives.chain(machines.into_iter().chain(own).flatten()).min() else {
            self.timer = None;
            return false;
        };
        if at <= Instant::now() {
            self.now = Instant::now();
            let keys: Vec<u64> = self.lives.keys().copied().collect();
            for key in keys {
                let Some(due) = self.lives.get(&key).map(|life| life.due(os::is_exiting)) else { continue };
                self.live(key, due);
            }
            self.hooks.pass_time(self.now, &mut self.household);
            if self.catches_up_at().is_some_and(|at| at <= self.now) {
                self.catch_up();
            }
            if self.learns_at.is_some_and(|at| at <= self.now) {
                self.learn();
            }
            if self.reads_turns_at().is_some_and(|at| at <= self.now) {
                self.read_turns();
            }
            self.tell(Event::TimePassed);
            self.see(terminal::Event::TimePassed);
            self.watch(waiting::Event::TimePassed);
            self.tend_sends();
            return true;
        }
        if self.timer.as_ref().is_none_or(|(set, _)| *set != at) {
            self.timer = Some((at, Box::pin(sleep_until(at.into()))));
        }
        self.timer.as_mut().is_some_and(|(_, timer)| timer.as_mut().poll(cx).is_ready())
    }

    fn record(&mut self, record: Record) {
        let line = self.journal.record(record);
        self.control.record(&line);
    }
}

fn health_word(health: Health) -> &'static str {
    match health {
        Health::Healthy => "healthy",
        Health::Degraded => "degraded",
        Health::Halted => "halted",
    }
}
