//! Drives a session: `outlast run`. One loop copies bytes between the agent's terminal and its viewers and carries
//! out what the machines decide. It never blocks, and changes no byte.

mod agent_hooks;
mod answers;
mod bytes;
mod child;
mod guard;
mod hooks;
mod limits;
mod methods;
mod paint;
mod people;
mod plan;
mod screen;
mod sending;
mod turn_log;
#[cfg(unix)]
pub(crate) mod upgrade;
pub(crate) mod viewers;

#[cfg(unix)]
use std::rc::Rc;
use std::{
    collections::{BTreeMap, BTreeSet},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use ::bytes::BytesMut;
use outlast_control::Control;
#[cfg(unix)]
use outlast_core::saved::Octets;
use outlast_core::{
    agent::Agent,
    alternate_screen::AlternateScreen,
    exit::How,
    limit::{self, Limit},
    on_resume::OnResume,
    record::Record,
    restarts::State as Health,
    seen_lines::SeenLines,
    send::Sends,
    session::{Action, Event, Mode, Note, Session},
    stance::{Sight, Stance},
    terminal,
    typing::Typing,
    waiting::{self, Waiting},
};
use outlast_os::{self as os, Outer, Sink};
use serde_json::json;

use self::{
    agent_hooks::AgentHooks, answers::Answers, bytes::Pipe, child::Running, hooks::Hooks, people::Tally, sending::Own,
    turn_log::TurnLog, viewers::Viewers,
};
pub(crate) use self::{
    plan::{Plan, Receiver, StartContext},
    screen::Screen,
};
#[cfg(unix)]
use crate::upgrade::requests::Upgrades;
use crate::{
    agent::session_record::{Records, State},
    child::{Children, timer::Timer},
    cli::report::{self, Report},
    state::journal::Journal,
};

/// How long the final output and the sweep of the process tree may take.
const FINAL_OUTPUT_MAX: Duration = Duration::from_secs(1);

/// Everything that belongs to one session.
pub(crate) struct Terminal {
    plan: Plan,
    place: StartContext,
    first: Mode,
    session: Session,
    agent: Agent,
    typing: Typing,
    sends: Sends,
    /// While `send` waits for the agent's record of a turn.
    turn_log: Option<TurnLog>,
    /// The screen before a text that was not submitted was removed from it.
    screen_before: Option<String>,
    waiting: Waiting,
    /// The agent by its generation, and notify commands.
    children: Children,
    limit: Limit,
    on_resume: OnResume,
    /// The agent's answers to its last turns.
    answers: Answers,
    /// The last agent ended during a turn.
    was_at_work: bool,
    /// What the record says of the running turn.
    recorded_turn: bool,
    hooks: Hooks,
    agent_hooks: AgentHooks,
    stops: os::Stops,
    stops_heard: Tally,
    suspends_heard: Tally,

    viewers: Viewers,
    /// The scrollback of terminals that detached.
    seen: SeenLines,
    /// Where the agent's output goes when outlast has no terminal.
    stdout: Option<Pipe>,
    /// outlast has no terminal: its own messages go to stderr.
    has_no_terminal: bool,
    /// Output that is being sent to the viewers.
    fresh: BytesMut,
    /// Output that the screen model has not parsed yet, and since when.
    unseen: BytesMut,
    unseen_since: Option<Instant>,
    /// None if no screen is kept.
    screen: Option<Screen>,
    alternate: AlternateScreen,

    /// The session records on disk; None if they cannot be written.
    records: Option<Records>,
    /// The last attempt to write the record failed, and the log says so.
    is_record_lost: bool,
    /// A signal or a lost terminal ends the session, not its user.
    is_interrupted: bool,
    /// The session ends because the agent reached its usage limit.
    is_stopped_by_limit: bool,
    running: Option<Running>,
    /// When to look up the agent's open conversation, for agents that do not report it.
    learns_at: Option<Instant>,
    generation: u64,
    /// `wait_for` requests for the end of a turn.
    turn_waiters: BTreeSet<u64>,
    /// When each restart or stop was requested.
    asked_at: BTreeMap<u64, Instant>,

    journal: Journal,
    control: Control,
    /// The name of the session; released after all else.
    #[cfg(unix)]
    claim: Option<Rc<os::Claim>>,
    /// Where the log and the records are: the directory of the first agent.
    #[cfg(unix)]
    home: Octets,
    #[cfg(unix)]
    upgrades: Upgrades,
    announce: Option<os::Announce>,
    /// Why the command could not be started, if this process reports it.
    complaint: Option<Report>,

    now: Instant,
    timer: Timer,
    ending: Option<(u8, Instant)>,
}

/// What a session is built from.
pub(crate) struct Parts {
    pub plan: Plan,
    pub place: StartContext,
    pub session: Session,
    pub agent: Agent,
    pub records: Option<Records>,
    /// Fresh, or with the conversation of an earlier session.
    pub first: Mode,
    /// The earlier session was interrupted during a turn.
    pub was_in_turn: bool,
    pub children: Children,
    pub stops: os::Stops,
    pub outer: Option<Outer>,
    pub stdout: Option<Sink>,
    /// Whether the screen is kept.
    pub keeps_screen: bool,
    pub journal: Journal,
    pub control: Control,
    #[cfg(unix)]
    pub claim: Option<Rc<os::Claim>>,
    /// The directory that the log and the records belong to.
    #[cfg(unix)]
    pub home: Octets,
    pub announce: Option<os::Announce>,
}

impl Terminal {
    pub(crate) fn new(parts: Parts) -> Terminal {
        let now = Instant::now();
        let size = parts.outer.as_ref().map_or_else(plan::usual_size, Outer::size);
        let mut viewers = Viewers::new(size);
        if let Some(outer) = parts.outer {
            viewers.begin(outer, &parts.plan.detach_key, now);
        }
        let reads_screen = parts.keeps_screen && parts.agent.is_readable();
        let mut on_resume = OnResume::new(parts.plan.on_resume.clone());
        if parts.was_in_turn {
            on_resume.was_interrupted();
        }
        Terminal {
            typing: Typing::new(parts.agent.quit_words()),
            sends: Sends::new(parts.agent.kind(), parts.agent.submit()),
            turn_log: None,
            screen_before: None,
            waiting: Waiting::new(reads_screen, parts.plan.hang_timeout, now),
            limit: Limit::new(parts.plan.on_limit),
            on_resume,
            answers: Answers::default(),
            was_at_work: false,
            recorded_turn: false,
            agent_hooks: AgentHooks::default(),
            hooks: Hooks::new(parts.plan.notify.clone()),
            plan: parts.plan,
            place: parts.place,
            first: parts.first,
            session: parts.session,
            agent: parts.agent,
            children: parts.children,
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
            alternate: AlternateScreen::default(),
            records: parts.records,
            is_record_lost: false,
            is_interrupted: false,
            is_stopped_by_limit: false,
            running: None,
            learns_at: None,
            generation: 0,
            turn_waiters: BTreeSet::new(),
            asked_at: BTreeMap::new(),
            journal: parts.journal,
            control: parts.control,
            #[cfg(unix)]
            claim: parts.claim,
            #[cfg(unix)]
            home: parts.home,
            #[cfg(unix)]
            upgrades: Upgrades::default(),
            announce: parts.announce,
            complaint: None,
            now,
            timer: Timer::default(),
            ending: None,
        }
    }

    /// Runs until the session is over. Returns the agent's exit code, or why it was never started.
    pub(crate) async fn run(mut self) -> Result<u8, Report> {
        let actions = self.session.begin(self.first);
        self.act_all(actions);
        self.serve().await
    }

    async fn serve(mut self) -> Result<u8, Report> {
        let code = std::future::poll_fn(|cx| self.poll(cx)).await;
        self.journal.event("session_end", &[("code", &code)]);
        let Terminal { journal, mut control, viewers, complaint, children, .. } = self;
        let line = journal.end(code);
        control.record(&line);
        control.end();
        drop(viewers);
        children.close().await;
        complaint.map_or(Ok(code), Err)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<u8> {
        loop {
            self.now = Instant::now();
            let mut moved = self.poll_stops(cx);
            moved |= self.children.poll_news(cx, self.now);
            moved |= self.hear_children();
            moved |= self.poll_viewers(cx);
            moved |= self.poll_control(cx);
            self.children.flush_all(cx, self.now);
            moved |= self.hooks.poll(cx, &mut self.children, self.now);
            moved |= self.carry(cx);
            moved |= self.hear_children();
            moved |= self.tend_sends();
            if let Some((code, until)) = self.ending {
                let is_said = self.fresh.is_empty() && self.viewers.are_drained();
                let has_agent = self.children.keys().any(|key| !hooks::is_hook(key));
                let is_quiet = is_said && self.stdout.as_ref().is_none_or(Pipe::is_empty) && !has_agent;
                if is_quiet || until <= Instant::now() {
                    return Poll::Ready(code);
                }
            }
            moved |= self.poll_time(cx);
            #[cfg(unix)]
            {
                moved |= self.poll_upgrade(cx);
            }
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
            Action::Stop => self.children.stop(self.generation, How::Stopped, self.now),
            Action::Kill => self.children.kill(self.generation, self.now),
            Action::StopHung(silent_for) => {
                // As exact as a person needs it.
                let tenths = u64::try_from(silent_for.as_millis() / 100).unwrap_or(u64::MAX);
                let how = How::Hung(Duration::from_millis(tenths.saturating_mul(100)));
                self.children.stop(self.generation, how, self.now);
            }
            Action::Ask => {
                let exit = self.session.last_exit().map(ToString::to_string).unwrap_or_default();
                let words = format!("{} exited ({exit}).", self.plan.program);
                self.say(&words, " Enter: continue, f: new conversation, q: quit");
            }
            Action::Note(note) => {
                if let Note::Ended { class, .. } = &note {
                    self.on_resume.agent_ended(*class, self.was_at_work);
                }
                self.note(note);
            }
            Action::Answer { ticket, result } => self.answer(ticket, result),
            Action::End(code) => {
                let code = if self.is_stopped_by_limit { report::LIMITED } else { code };
                self.end_sends(true);
                // A restored session whose agent never ran can be restored again.
                let stays = self.is_interrupted || (self.plan.is_restored && !self.session.has_run());
                self.keep_record(if stays { State::Running } else { State::Ended });
                if let Some(announce) = self.announce.take() {
                    let words =
                        self.complaint.take().map_or_else(|| "it ended at once".to_owned(), |it| it.to_string());
                    announce.say(&json!({"error": words, "code": code}).to_string());
                }
                self.viewers.end(code);
                self.ending = Some((code, Instant::now() + FINAL_OUTPUT_MAX));
            }
        }
    }

    /// Tells the machine that decides whether the agent waits, and carries out its actions.
    fn watch(&mut self, event: waiting::Event) {
        match &event {
            waiting::Event::AgentEnded => self.was_at_work = self.waiting.is_at_work(),
            waiting::Event::AgentStarted => {
                let mode = self.running.as_ref().map_or(Mode::Fresh, |running| running.mode);
                self.on_resume.agent_started(mode);
            }
            waiting::Event::TurnBegan => {
                self.on_resume.turn_began();
                self.withdraw_own(Own::AfterCrash);
            }
            _ => {}
        }
        self.limit_hears(&event);
        let actions = self.waiting.handle(event, self.now);
        self.act_on_watch(actions);
        // If outlast itself ends during a turn, a later session knows.
        if self.running.is_some() && self.has_open_turn() != self.recorded_turn {
            self.recorded_turn = self.has_open_turn();
            self.keep_record(State::Running);
        }
    }

    /// A turn runs or was interrupted, and `--on-resume` makes the agent continue with it.
    fn has_open_turn(&self) -> bool {
        self.on_resume.is_wanted() && (self.waiting.is_at_work() || self.on_resume.is_owed())
    }

    fn act_on_watch(&mut self, actions: Vec<waiting::Action>) {
        for action in actions {
            match action {
                waiting::Action::Look => {
                    self.catch_up();
                    let screen = self.screen.as_ref();
                    let view = screen.map(Screen::view).unwrap_or_default();
                    let sight = if screen.is_some() { self.agent.stance(&view) } else { Sight::default() };
                    let is_cursor_visible = screen.is_none_or(Screen::is_cursor_visible);
                    self.look_for_limit(&view);
                    self.watch(waiting::Event::Looked { sight, is_cursor_visible });
                }
                waiting::Action::Answer { ticket, outcome } => self.answer_waiter(ticket, outcome),
                waiting::Action::TurnEnded { is_reported } => self.turn_ended(is_reported),
                waiting::Action::Changed { is_waiting, stance } => {
                    let about: [(&str, &dyn std::fmt::Display); 2] = [("is", &is_waiting), ("stance", &stance.word())];
                    self.journal.event("waiting_for_input", &about);
                    let mut about = json!({"waiting": is_waiting, "stance": stance.word()});
                    if is_waiting {
                        self.answers.add_new_to(&mut about);
                    }
                    self.notify("waiting_for_input", about, is_waiting);
                    if is_waiting && stance != Stance::Dialog {
                        self.go_on_after_crash();
                    }
                }
                waiting::Action::Hung { silent_for } => {
                    self.journal.event("agent_hung", &[("silent_s", &silent_for.as_secs())]);
                    self.notify("hung", json!({"silent_s": silent_for.as_secs_f64()}), true);
                    self.tell(Event::Hung { silent_for });
                }
            }
        }
    }

    /// The agent waits: tells it to continue with a turn that a crash interrupted.
    pub(super) fn go_on_after_crash(&mut self) {
        if self.limit.seen().is_none()
            && let Some(text) = self.on_resume.waits()
        {
            self.send_own(Own::AfterCrash, text);
        }
    }

    /// Sends an event to subscribers and, if it needs a person, to the notify command.
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
        about["timestamp"] = crate::state::home::epoch().into();
        for complaint in self.hooks.run(&about, &self.plan, &self.place, &mut self.children, self.now) {
            self.journal.note(&complaint);
        }
    }

    fn poll_time(&mut self, cx: &mut Context<'_>) -> bool {
        let machines = [
            self.children.deadline(),
            self.session.deadline(),
            self.viewers.deadline(),
            self.waiting.deadline(),
            self.limit.deadline(),
        ];
        let own =
            [self.ending.map(|(_, until)| until), self.hooks.deadline(), self.catches_up_at(), self.sends.deadline()];
        #[cfg(unix)]
        let upgrade = self.upgrades.machine.deadline();
        #[cfg(windows)]
        let upgrade = None;
        let own = own.into_iter().chain([self.learns_at, self.reads_turns_at(), upgrade]);
        if !self.timer.poll(machines.into_iter().chain(own).flatten().min(), Instant::now(), cx) {
            return false;
        }
        self.now = Instant::now();
        self.children.time_passed(self.now);
        self.hear_children();
        self.hooks.time_passed(self.now, &mut self.children);
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
        self.tell_limit(limit::Event::TimePassed);
        self.tend_sends();
        true
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
