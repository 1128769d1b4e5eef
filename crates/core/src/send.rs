//! A text for an agent, from the request until the agent has recorded it as a turn.
//!
//! Nothing is typed before the composer is visible and has been empty for a moment. Then the text is pasted at once,
//! and Enter is pressed when the text is visible. The proof is the agent's own record of the turn (a hook, its
//! transcript); a composer that is empty again is no proof. A text that was not submitted is removed from the
//! composer. Texts are sent one after the other.

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::agent::Kind;
use crate::composer::{self, Seen};
use crate::count::count;
use crate::same_text::{self, Held};

mod saved;

pub use saved::Saved;

/// Texts that wait for their turn; the next is refused.
pub const WAITING_MAX: usize = 16;
/// A longer text is refused; a frame holds it.
pub const TEXT_MAX: usize = 512 << 10;
/// How long a composer must have been visible and empty: text that is typed while the agent still draws it is lost.
pub const SETTLED: Duration = Duration::from_millis(300);
/// How long a text may take to be seen.
pub const SEEN_MAX: Duration = Duration::from_secs(10);
/// How long Enter may take; then it is pressed again, because the agent may have dropped the first one.
pub const ENTER_MAX: Duration = Duration::from_secs(3);
/// How often Enter is pressed.
pub const PRESSES_MAX: u32 = 3;
/// How long the agent may take to record a turn after Enter; then the turn is unproven.
pub const RECORD_MAX: Duration = Duration::from_secs(10);
/// How long the keys that empty the composer may take; then they are typed again.
pub const REMOVE_MAX: Duration = Duration::from_secs(1);
/// How often they are typed.
pub const REMOVALS_MAX: u32 = 3;
/// Lines that are removed at once; the agents show a longer text as one mark.
const REMOVED_LINES_MAX: usize = 512;
/// Texts with a key that are remembered, so that they are not sent twice.
const REMEMBERED_MAX: usize = 64;

const PASTE_BEGINS: &[u8] = b"\x1b[200~";
const PASTE_ENDS: &[u8] = b"\x1b[201~";
const ENTER: &[u8] = b"\r";
const ENTER_AS_SEQUENCE: &[u8] = b"\x1b[13u";
/// Ctrl-E, Ctrl-U, Backspace: to the end of the line, all before the cursor away, and on to the line above. In an empty
/// composer they do nothing, but that Backspace leaves the mode for shell commands.
const REMOVE_LINE: &[u8] = b"\x05\x15\x7f";
/// A word with one of these at the end of a text opens a menu, in which Enter chooses instead of submitting.
const OPENS_MENU: [char; 4] = ['@', '$', '/', '#'];
/// Behind this, Enter is a line break.
const ESCAPES_ENTER: char = '\\';

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Letter {
    pub text: String,
    /// Enter follows.
    pub submit: bool,
    /// How long it may wait for the composer, including its place in the queue.
    pub patience: Duration,
    /// Texts with the same key are the same text: it is sent once.
    pub key: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Type(Vec<u8>),
    /// Enter follows: from now on the agent's records count.
    AwaitRecord,
    /// Keys that remove a text that was not submitted. The current screen explains the failure.
    Remove(Vec<u8>),
    Answer {
        ticket: u64,
        result: Result<Sent, Failed>,
    },
}

/// The text was typed; how far it is known to have come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sent {
    pub proof: Proof,
    pub presses: u32,
    /// As one paste, not as keys.
    pub as_paste: bool,
    /// For the composer, and for the texts before.
    pub waited: Duration,
    pub took: Duration,
    /// A text with this key was sent before.
    pub is_repeated: bool,
}

impl Sent {
    pub fn is_submitted(&self) -> bool {
        matches!(self.proof, Proof::Recorded(_))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Proof {
    /// It was to be typed only, and is visible in the composer.
    Typed,
    /// Enter was pressed, and the agent recorded no such turn.
    Unproven { has_left: bool },
    /// The agent recorded a turn with this text.
    Recorded(Source),
}

impl Proof {
    pub fn word(self) -> &'static str {
        match self {
            Proof::Typed => "typed",
            Proof::Unproven { .. } => "unproven",
            Proof::Recorded(_) => "submitted",
        }
    }
}

/// Where a turn is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    Hook,
    /// claude's file of the conversation.
    Transcript,
    /// codex's file of the conversation.
    Rollout,
}

impl Source {
    pub fn word(self) -> &'static str {
        match self {
            Source::Hook => "hook",
            Source::Transcript => "transcript",
            Source::Rollout => "rollout",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failed {
    Empty,
    TooLong,
    /// A control character in the text would act as a key.
    Control(char),
    TooMany,
    /// No composer was visible in time.
    NotReady,
    /// The composer holds another text.
    Occupied(String),
    /// The agent does not support pastes, so lines would be sent one by one.
    NoPaste,
    /// It was typed, and never visible; this was there instead.
    NotSeen {
        draft: String,
        is_removed: bool,
    },
    /// It was not submitted: this was in the composer.
    NotSubmitted {
        draft: String,
        presses: u32,
        is_removed: bool,
    },
    /// The agent exited; the typed text may have arrived.
    Ended {
        typed: bool,
    },
    /// The sender gave it up before it was typed.
    Withdrawn,
}

impl Failed {
    /// For programs.
    pub fn code(&self) -> &'static str {
        match self {
            Failed::Empty | Failed::TooLong | Failed::Control(_) => "bad_request",
            Failed::TooMany => "too_many",
            Failed::NotReady => "not_ready",
            Failed::Occupied(_) => "occupied",
            Failed::NoPaste => "no_paste",
            Failed::NotSeen { .. } => "not_seen",
            Failed::NotSubmitted { .. } => "not_submitted",
            Failed::Ended { .. } => "ended",
            Failed::Withdrawn => "withdrawn",
        }
    }

    /// Whether the typed text is no longer in the composer; None if nothing was typed.
    pub fn is_removed(&self) -> Option<bool> {
        match self {
            Failed::NotSeen { is_removed, .. } | Failed::NotSubmitted { is_removed, .. } => Some(*is_removed),
            _ => None,
        }
    }

    fn removed(mut self, removed: bool) -> Failed {
        if let Failed::NotSeen { is_removed, .. } | Failed::NotSubmitted { is_removed, .. } = &mut self {
            *is_removed = removed;
        }
        self
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failed::Empty => f.write_str("there is nothing to send"),
            Failed::TooLong => write!(f, "the text is longer than {TEXT_MAX} bytes"),
            Failed::Control(letter) => {
                write!(f, "the text contains a control character, U+{:04X}", u32::from(*letter))
            }
            Failed::TooMany => write!(f, "{WAITING_MAX} texts are already waiting, which is the limit"),
            Failed::NotReady => f.write_str("the agent showed no empty input field in time; nothing was typed"),
            Failed::Occupied(draft) => {
                write!(f, "the input field contains other text; nothing was typed. It is: {draft}")
            }
            Failed::NoPaste => {
                f.write_str("the agent does not support bracketed paste, and the lines would be sent one by one")
            }
            Failed::NotSeen { draft, .. } if draft.is_empty() => {
                f.write_str("the text was typed and did not appear; the input field is empty")
            }
            Failed::NotSeen { draft, is_removed } => {
                let after = removal(*is_removed);
                write!(f, "the text was typed and did not appear; {after}. Instead there was: {draft}")
            }
            Failed::NotSubmitted { draft, presses, is_removed } => {
                let times = count(*presses, "time", "times");
                let after = removal(*is_removed);
                write!(f, "Enter was pressed {times} and did not submit the text; {after}. It was: {draft}")
            }
            Failed::Ended { typed: false } => f.write_str("the agent ended before anything was typed"),
            Failed::Ended { typed: true } => f.write_str("the agent ended; what was typed may have arrived"),
            Failed::Withdrawn => f.write_str("it was given up before it was typed"),
        }
    }
}

fn removal(is_removed: bool) -> &'static str {
    if is_removed { "it was removed again" } else { "it could not be removed" }
}

/// All texts for one agent.
#[derive(Clone, Debug)]
pub struct Sends {
    kind: Kind,
    submit: Option<Vec<u8>>,
    waiting: VecDeque<Job>,
    /// Texts that were sent with a key, the oldest first.
    remembered: VecDeque<(String, Sent)>,
}

#[derive(Clone, Debug)]
struct Job {
    letter: Letter,
    tickets: Vec<u64>,
    asked: Instant,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    /// Waits for its turn, and for a composer that has been empty since then.
    Waiting { empty_since: Option<Instant>, occupied_by: Option<String>, cannot_paste: bool },
    /// Until it is visible. If only part of it can be compared, it must have been visible for a moment.
    Typed { entry: Entry, last: String, loosely_since: Option<Instant> },
    /// Until it has left the composer, or Enter is pressed again.
    Pressed { entry: Entry, until: Instant },
    /// Until the agent records it. `back_since`: it is in the composer again.
    Entered { entry: Entry, has_left: bool, until: Instant, back_since: Option<Instant> },
    /// It failed, and is removed from the composer.
    Removing { entry: Entry, failed: Failed, was_seen: bool, times: u32, until: Instant },
}

/// How a text was typed.
#[derive(Clone, Copy, Debug)]
struct Entry {
    at: Instant,
    as_paste: bool,
    presses: u32,
    /// A hook has reported it.
    is_announced: bool,
}

impl Sends {
    /// `submit`: the bytes that submit, for an agent that does not use Enter.
    pub fn new(kind: Kind, submit: Option<&str>) -> Sends {
        let submit = submit.map(|bytes| bytes.as_bytes().to_vec());
        Sends { kind, submit, waiting: VecDeque::new(), remembered: VecDeque::new() }
    }

    /// The driver shows the screen only while this is true.
    pub fn is_busy(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// When to look again if there was no output meanwhile.
    pub fn deadline(&self) -> Option<Instant> {
        let patience = self.waiting.iter().filter_map(Job::given_up_at).min();
        [self.waiting.front().and_then(Job::next_step), patience].into_iter().flatten().min()
    }

    pub fn asked(&mut self, ticket: u64, letter: Letter, now: Instant) -> Vec<Action> {
        let refuse = |failed| vec![Action::Answer { ticket, result: Err(failed) }];
        let letter = Letter { text: letter.text.replace("\r\n", "\n").replace('\r', "\n"), ..letter };
        if let Err(failed) = check(&letter.text) {
            return refuse(failed);
        }
        if letter.key.is_some() {
            if let Some((_, sent)) = self.remembered.iter().find(|(key, _)| Some(key) == letter.key.as_ref()) {
                let sent = Sent { is_repeated: true, ..sent.clone() };
                return vec![Action::Answer { ticket, result: Ok(sent) }];
            }
            if let Some(job) = self.waiting.iter_mut().find(|job| job.letter.key == letter.key) {
                job.tickets.push(ticket);
                return Vec::new();
            }
        }
        if self.waiting.len() >= WAITING_MAX {
            return refuse(Failed::TooMany);
        }
        let state = State::Waiting { empty_since: None, occupied_by: None, cannot_paste: false };
        self.waiting.push_back(Job { letter, tickets: vec![ticket], asked: now, state });
        Vec::new()
    }

    /// The sender does not need this text any more. One that is being typed is sent all the same.
    pub fn withdraw(&mut self, ticket: u64) -> Vec<Action> {
        let is_it = |job: &Job| job.tickets == [ticket] && matches!(job.state, State::Waiting { .. });
        let mut actions = Vec::new();
        if let Some(at) = self.waiting.iter().position(is_it) {
            self.ended(at, Err(Failed::Withdrawn), &mut actions);
        }
        actions
    }

    /// The current screen, and whether the agent accepts input at all.
    pub fn look(&mut self, seen: &Seen, is_ready: bool, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        // A step may end one text and so begin the next, which then waits for a look of its own.
        if let Some(job) = self.waiting.front_mut() {
            let draft = is_ready.then(|| composer::draft(self.kind, seen)).flatten();
            match job.look(self.kind, seen, draft, now) {
                Step::None => {}
                Step::Type(bytes) => actions.push(Action::Type(bytes)),
                Step::Press { is_first } => {
                    actions.extend(is_first.then_some(Action::AwaitRecord));
                    actions.push(Action::Type(self.submit.clone().unwrap_or_else(|| enter(seen))));
                }
                Step::Remove(bytes) => actions.push(Action::Remove(bytes)),
                Step::End(result) => self.ended(0, result, &mut actions),
            }
        }
        let is_late = |job: &Job| job.given_up_at().is_some_and(|at| at <= now);
        while let Some(at) = self.waiting.iter().position(is_late) {
            let failed = self.waiting[at].why_not_yet();
            self.ended(at, Err(failed), &mut actions);
        }
        actions
    }

    /// The agent has recorded a turn with this text.
    pub fn recorded(&mut self, text: &str, source: Source, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        if let Some(job) = self.waiting.front()
            && let Some(entry) = job.pressed()
            && same_text::is_recorded_as(text, false, &job.letter.text)
        {
            let sent = job.sent(entry, Proof::Recorded(source), now);
            self.ended(0, Ok(sent), &mut actions);
        }
        actions
    }

    /// A hook reports that this text is about to be submitted. Another hook may still refuse it, so this is no proof
    /// yet. `bytes`: the length of the whole text, of which this may be only the beginning.
    pub fn announced(&mut self, text: &str, bytes: usize) {
        if let Some(job) = self.waiting.front_mut()
            && same_text::is_recorded_as(text, bytes > text.len(), &job.letter.text)
            && let State::Pressed { entry, .. } | State::Entered { entry, .. } | State::Removing { entry, .. } =
                &mut job.state
        {
            entry.is_announced = true;
        }
    }

    /// A hook reports that a turn is over: if it was announced with this text, it was submitted.
    pub fn turn_ended(&mut self, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        if let Some(job) = self.waiting.front()
            && let Some(entry) = job.pressed().filter(|entry| entry.is_announced)
        {
            let sent = job.sent(entry, Proof::Recorded(Source::Hook), now);
            self.ended(0, Ok(sent), &mut actions);
        }
        actions
    }

    /// Whether a record of the agent is needed.
    pub fn awaits_record(&self) -> bool {
        keeps_records(self.kind) && self.waiting.front().is_some_and(|job| job.pressed().is_some())
    }

    /// The agent exited. Texts that were not typed yet wait for the next one.
    pub fn agent_ended(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        let is_typed = self.waiting.front().is_some_and(|job| !matches!(job.state, State::Waiting { .. }));
        if is_typed {
            self.ended(0, Err(Failed::Ended { typed: true }), &mut actions);
        }
        for job in &mut self.waiting {
            job.state = State::Waiting { empty_since: None, occupied_by: None, cannot_paste: false };
        }
        actions
    }

    /// No agent is started again.
    pub fn is_over(&mut self) -> Vec<Action> {
        let mut actions = self.agent_ended();
        while self.is_busy() {
            self.ended(0, Err(Failed::Ended { typed: false }), &mut actions);
        }
        actions
    }

    fn ended(&mut self, at: usize, result: Result<Sent, Failed>, actions: &mut Vec<Action>) {
        let Some(job) = self.waiting.remove(at) else { return };
        if let (Some(key), Ok(sent)) = (job.letter.key, &result) {
            if self.remembered.len() == REMEMBERED_MAX {
                self.remembered.pop_front();
            }
            self.remembered.push_back((key, sent.clone()));
        }
        actions.extend(job.tickets.into_iter().map(|ticket| Action::Answer { ticket, result: result.clone() }));
    }
}

enum Step {
    None,
    Type(Vec<u8>),
    Press { is_first: bool },
    Remove(Vec<u8>),
    End(Result<Sent, Failed>),
}

impl Job {
    fn look(&mut self, kind: Kind, seen: &Seen, draft: Option<String>, now: Instant) -> Step {
        let text = to_be_seen(kind, &self.letter.text);
        let holds = |draft: &str| composer::holds(draft, text);
        let has_left = match &draft {
            Some(draft) if knows_composer(kind) => draft.is_empty(),
            Some(draft) => holds(draft) == Held::No,
            None => composer::is_bare(kind, seen),
        };
        match &mut self.state {
            State::Waiting { empty_since, occupied_by, cannot_paste } => {
                let is_free = match &draft {
                    None => false,
                    // Without a profile the agent's own prompt is there, and cannot be told from typed text.
                    Some(draft) => !knows_composer(kind) || draft.is_empty(),
                };
                *occupied_by = draft.filter(|_| !is_free);
                *cannot_paste = is_free && !seen.takes_pastes && self.letter.text.contains('\n');
                if !is_free || *cannot_paste {
                    *empty_since = None;
                    return Step::None;
                }
                let since = *empty_since.get_or_insert(now);
                if now < since + SETTLED {
                    return Step::None;
                }
                let entry = Entry { at: now, as_paste: seen.takes_pastes, presses: 0, is_announced: false };
                self.state = State::Typed { entry, last: String::new(), loosely_since: None };
                let text = [self.letter.text.as_bytes(), closing(kind, &self.letter)].concat();
                Step::Type(if entry.as_paste { [PASTE_BEGINS, &text, PASTE_ENDS].concat() } else { text })
            }
            State::Typed { entry, last, loosely_since } => {
                let mut entry = *entry;
                let held = draft.as_deref().map_or(Held::No, holds);
                if let Some(draft) = &draft {
                    last.clone_from(draft);
                }
                let is_there = match held {
                    Held::No => {
                        *loosely_since = None;
                        false
                    }
                    Held::Loosely => *loosely_since.get_or_insert(now) + SETTLED <= now,
                    Held::Exactly => true,
                };
                match (is_there, self.letter.submit) {
                    (true, true) => {
                        entry.presses = 1;
                        self.state = State::Pressed { entry, until: now + ENTER_MAX };
                        Step::Press { is_first: true }
                    }
                    (true, false) => Step::End(Ok(self.sent(entry, Proof::Typed, now))),
                    (false, _) if now >= entry.at + SEEN_MAX => {
                        let failed = Failed::NotSeen { draft: std::mem::take(last), is_removed: false };
                        self.remove(failed, entry, draft, now)
                    }
                    (false, _) => Step::None,
                }
            }
            State::Pressed { entry, .. } if has_left => {
                let entry = *entry;
                if !keeps_records(kind) {
                    return Step::End(Ok(self.sent(entry, Proof::Unproven { has_left: true }, now)));
                }
                self.state = State::Entered { entry, has_left, until: now + RECORD_MAX, back_since: None };
                Step::None
            }
            State::Pressed { until, .. } if now < *until => Step::None,
            State::Pressed { until, .. }
                if composer::submits_later(kind, seen) && now < self.asked + self.letter.patience =>
            {
                *until = now + ENTER_MAX;
                Step::None
            }
            State::Pressed { entry, until } => {
                let pressed = *entry;
                match draft {
                    // Only while the text is visible in the composer: elsewhere Enter could do anything.
                    Some(draft) if holds(&draft) != Held::No && pressed.presses < PRESSES_MAX => {
                        entry.presses += 1;
                        *until = now + ENTER_MAX;
                        Step::Press { is_first: false }
                    }
                    Some(draft) => self.not_submitted(pressed, draft, now),
                    None => {
                        let entry = pressed;
                        self.state =
                            State::Entered { entry, has_left: false, until: now + RECORD_MAX, back_since: None };
                        Step::None
                    }
                }
            }
            State::Entered { entry, has_left: left, until, back_since } => {
                let entry = *entry;
                *left |= has_left;
                match draft {
                    Some(draft) if holds(&draft) != Held::No => {
                        let since = *back_since.get_or_insert(now);
                        if since + SETTLED <= now {
                            return self.not_submitted(entry, draft, now);
                        }
                    }
                    _ => *back_since = None,
                }
                if now < *until {
                    return Step::None;
                }
                let proof = Proof::Unproven { has_left: *left };
                Step::End(Ok(self.sent(entry, proof, now)))
            }
            State::Removing { failed, was_seen, times, until, .. } => {
                if has_left {
                    return Step::End(Err(failed.clone().removed(*was_seen || knows_composer(kind))));
                }
                if now < *until {
                    return Step::None;
                }
                if draft.is_none() || *times == REMOVALS_MAX {
                    return Step::End(Err(failed.clone().removed(false)));
                }
                (*times, *until) = (*times + 1, now + REMOVE_MAX);
                Step::Remove(removal_keys(&self.letter.text))
            }
        }
    }

    fn not_submitted(&mut self, entry: Entry, draft: String, now: Instant) -> Step {
        let failed = Failed::NotSubmitted { draft: draft.clone(), presses: entry.presses, is_removed: false };
        self.remove(failed, entry, Some(draft), now)
    }

    /// Keys are sent only to a visible composer: in a dialog they could be answers.
    fn remove(&mut self, failed: Failed, entry: Entry, draft: Option<String>, now: Instant) -> Step {
        match draft {
            Some(draft) if !draft.is_empty() => {
                let was_seen = matches!(failed, Failed::NotSubmitted { .. });
                self.state = State::Removing { entry, failed, was_seen, times: 1, until: now + REMOVE_MAX };
                Step::Remove(removal_keys(&self.letter.text))
            }
            draft => Step::End(Err(failed.removed(draft.is_some()))),
        }
    }

    /// How it was typed, once Enter was pressed.
    fn pressed(&self) -> Option<Entry> {
        match &self.state {
            State::Pressed { entry, .. } | State::Entered { entry, .. } | State::Removing { entry, .. } => {
                (entry.presses > 0).then_some(*entry)
            }
            State::Waiting { .. } | State::Typed { .. } => None,
        }
    }

    fn sent(&self, entry: Entry, proof: Proof, now: Instant) -> Sent {
        Sent {
            proof,
            presses: entry.presses,
            as_paste: entry.as_paste,
            waited: entry.at.saturating_duration_since(self.asked),
            took: now.saturating_duration_since(entry.at),
            is_repeated: false,
        }
    }

    fn next_step(&self) -> Option<Instant> {
        match &self.state {
            State::Waiting { empty_since, .. } => empty_since.map(|since| since + SETTLED),
            State::Typed { entry, loosely_since, .. } => {
                let loosely = loosely_since.map(|since| since + SETTLED);
                [loosely, Some(entry.at + SEEN_MAX)].into_iter().flatten().min()
            }
            State::Entered { until, back_since, .. } => {
                let back = back_since.map(|since| since + SETTLED);
                [back, Some(*until)].into_iter().flatten().min()
            }
            State::Pressed { until, .. } | State::Removing { until, .. } => Some(*until),
        }
    }

    /// The time limit applies to waiting; a typed text has limits of its own.
    fn given_up_at(&self) -> Option<Instant> {
        matches!(self.state, State::Waiting { .. }).then(|| self.asked + self.letter.patience)
    }

    fn why_not_yet(&self) -> Failed {
        match &self.state {
            State::Waiting { occupied_by: Some(draft), .. } => Failed::Occupied(draft.clone()),
            State::Waiting { cannot_paste: true, .. } => Failed::NoPaste,
            _ => Failed::NotReady,
        }
    }
}

fn knows_composer(kind: Kind) -> bool {
    matches!(kind, Kind::Claude | Kind::Codex)
}

/// Whether the agent records each turn in a known place.
fn keeps_records(kind: Kind) -> bool {
    matches!(kind, Kind::Claude | Kind::Codex)
}

/// A blank after a text that Enter would not submit as it is. Both agents drop it.
fn closing(kind: Kind, letter: &Letter) -> &'static [u8] {
    let last = letter.text.rsplit(char::is_whitespace).next().unwrap_or_default();
    // After a command alone, claude would show its arguments.
    let is_command = letter.text.starts_with('/') && last.len() == letter.text.len();
    let is_needed = (last.contains(OPENS_MENU) && !is_command) || last.ends_with(ESCAPES_ENTER);
    if knows_composer(kind) && letter.submit && is_needed { b" " } else { b"" }
}

fn removal_keys(text: &str) -> Vec<u8> {
    let lines = text.lines().count().min(REMOVED_LINES_MAX) + 1;
    REMOVE_LINE.repeat(lines)
}

/// Without a profile only the line of the cursor is known, which holds the end of a text.
fn to_be_seen(kind: Kind, text: &str) -> &str {
    match kind {
        Kind::Claude | Kind::Codex => text,
        Kind::Described | Kind::Shell | Kind::Other | Kind::NotInteractive => {
            text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or(text)
        }
    }
}

fn enter(seen: &Seen) -> Vec<u8> {
    if seen.takes_sequences { ENTER_AS_SEQUENCE } else { ENTER }.to_vec()
}

/// A text has no control characters: an escape in it could end the paste and press keys.
pub fn check(text: &str) -> Result<(), Failed> {
    if text.trim().is_empty() {
        return Err(Failed::Empty);
    }
    if text.len() > TEXT_MAX {
        return Err(Failed::TooLong);
    }
    match text.chars().find(|letter| letter.is_control() && !matches!(letter, '\n' | '\t')) {
        Some(letter) => Err(Failed::Control(letter)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::disallowed_methods, reason = "a test needs some instant to count from")]
    fn birth() -> Instant {
        Instant::now()
    }

    fn letter(text: &str) -> Letter {
        Letter { text: text.to_owned(), submit: true, patience: Duration::from_secs(30), key: None }
    }

    /// A codex whose composer holds this.
    fn composer(draft: &str) -> Seen {
        let lines = format!("• an answer\n› {draft}\n\n  model");
        Seen {
            lines: lines.lines().map(str::to_owned).collect(),
            last_line: "  model".into(),
            cursor: (1, 2),
            is_cursor_visible: true,
            takes_pastes: true,
            takes_sequences: false,
        }
    }

    /// An agent without a profile, which has written this before its cursor.
    fn at_cursor(line: &str) -> Seen {
        Seen {
            lines: vec!["before".into(), line.into()],
            cursor: (1, line.chars().count()),
            is_cursor_visible: true,
            takes_pastes: true,
            ..Seen::default()
        }
    }

    fn typed(bytes: &[u8]) -> Vec<Action> {
        vec![Action::Type(bytes.to_vec())]
    }

    /// The first Enter: from then on records count.
    fn entered(bytes: &[u8]) -> Vec<Action> {
        vec![Action::AwaitRecord, Action::Type(bytes.to_vec())]
    }

    fn removed(lines: usize) -> Vec<Action> {
        vec![Action::Remove(REMOVE_LINE.repeat(lines + 1))]
    }

    struct Story {
        sends: Sends,
        seen: Seen,
        is_ready: bool,
        now: Instant,
    }

    impl Story {
        fn new(kind: Kind) -> Story {
            Story { sends: Sends::new(kind, None), seen: composer(""), is_ready: true, now: birth() }
        }

        fn ask(&mut self, ticket: u64, letter: Letter) -> Vec<Action> {
            self.sends.asked(ticket, letter, self.now)
        }

        fn look(&mut self) -> Vec<Action> {
            self.sends.look(&self.seen, self.is_ready, self.now)
        }

        fn records(&mut self, text: &str) -> Vec<Action> {
            self.sends.recorded(text, Source::Rollout, self.now)
        }

        fn shows(&mut self, draft: &str) -> Vec<Action> {
            self.seen = composer(draft);
            self.look()
        }

        /// Looks when the machine asks for it, never at a time that has passed.
        fn wait(&mut self) -> Vec<Action> {
            let next = self.sends.deadline().expect("something is awaited");
            assert!(next > self.now, "it would look without end");
            self.now = next;
            self.look()
        }

        fn type_in(&mut self, text: &str) {
            assert_eq!(self.look(), []);
            assert_eq!(self.wait(), typed(format!("\x1b[200~{text}\x1b[201~").as_bytes()));
        }
    }

    fn answer(actions: &[Action]) -> (u64, Result<(&'static str, u32), &'static str>) {
        match actions {
            [Action::Answer { ticket, result }] => {
                let result = result.clone().map(|sent| (sent.proof.word(), sent.presses));
                (*ticket, result.map_err(|failed| failed.code()))
            }
            actions => panic!("{actions:?}"),
        }
    }

    #[test]
    fn a_text_that_was_not_typed_yet_can_be_withdrawn() {
        let mut story = Story::new(Kind::Codex);
        story.ask(1, letter("one"));
        story.ask(2, letter("two"));
        assert_eq!(answer(&story.sends.withdraw(2)), (2, Err("withdrawn")));
        assert_eq!(story.sends.withdraw(2), []);
        story.type_in("one");
        assert_eq!(story.sends.withdraw(1), [], "it is typed");
        assert!(story.sends.is_busy());
    }

    #[test]
    fn a_text_is_pasted_seen_sent_and_recorded() {
        let mut story = Story::new(Kind::Codex);
        assert_eq!(story.ask(1, letter("two\r\nlines")), []);
        story.type_in("two\nlines");
        assert_eq!(story.shows(""), [], "Enter waits for the text");
        assert_eq!(story.shows("two"), []);
        assert_eq!(story.records("two lines"), [], "not yet entered");
        assert_eq!(story.shows("two lines"), entered(b"\r"));
        assert_eq!(story.look(), []);
        assert_eq!(story.shows(""), [], "that it left the composer is no proof");
        assert!(story.sends.awaits_record());
        assert_eq!(story.records("two other lines"), []);
        assert_eq!(answer(&story.records("two\nlines")), (1, Ok(("submitted", 1))));
        assert!(!story.sends.is_busy() && story.sends.deadline().is_none());

        let mut draft = Story::new(Kind::Codex);
        draft.ask(1, Letter { submit: false, ..letter("later") });
        draft.type_in("later");
        assert_eq!(answer(&draft.shows("later")), (1, Ok(("typed", 0))));
    }

    #[test]
    fn a_turn_that_is_not_recorded_is_unproven() {
        let mut story = Story::new(Kind::Codex);
        story.ask(1, letter("/help me"));
        story.type_in("/help me");
        story.shows("/help me");
        assert_eq!(story.shows(""), []);
        assert_eq!(answer(&story.wait()), (1, Ok(("unproven", 1))));
        // A dialog covers the composer.
        story.seen = composer("");
        story.ask(2, letter("hello"));
        story.type_in("hello");
        story.shows("hello");
        story.seen = Seen::default();
        assert_eq!((story.look(), story.wait()), (vec![], vec![]));
        let actions = story.wait();
        let [Action::Answer { result: Ok(sent), .. }] = &actions[..] else { panic!("{actions:?}") };
        assert_eq!((sent.proof, sent.is_submitted()), (Proof::Unproven { has_left: false }, false));
    }

    #[test]
    fn a_text_that_enter_would_not_submit_gets_a_blank() {
        #[rustfmt::skip]
        let table = [
            ("hello",           "hello"),
            ("a/b c",           "a/b c"),
            ("ends in \\",      "ends in \\ "),
            ("what is $x",      "what is $x "),
            ("see @src/a",      "see @src/a "),
            ("/clear",          "/clear"),
            ("/x see @y",       "/x see @y "),
            ("!cat a/b",        "!cat a/b "),
            ("it is #1",        "it is #1 "),
        ];
        for (text, pasted) in table {
            let mut story = Story::new(Kind::Codex);
            story.ask(1, letter(text));
            story.type_in(pasted);
            assert_eq!(story.shows(text), entered(b"\r"));
            assert_eq!(answer(&story.records(text)), (1, Ok(("submitted", 1))));
            // A person continues a draft.
            let mut draft = Story::new(Kind::Codex);
            draft.ask(1, Letter { submit: false, ..letter(text) });
            draft.type_in(text);
        }
        let mut other = Story { seen: at_cursor("$ "), ..Story::new(Kind::Other) };
        other.ask(1, letter("ls /tmp"));
        other.look();
        assert_eq!(other.wait(), typed(b"\x1b[200~ls /tmp\x1b[201~"));
    }

    #[test]
    fn a_text_that_was_not_submitted_is_removed() {
        // Enter made a line break.
        let mut story = Story::new(Kind::Codex);
        story.ask(1, letter("hello"));
        story.type_in("hello");
        story.shows("hello");
        assert_eq!(story.shows("hello, and what was chosen"), []);
        assert_eq!(story.wait(), removed(1), "Enter is not pressed on another text");
        let mut stuck = Story { sends: story.sends.clone(), ..Story::new(Kind::Codex) };
        (stuck.seen, stuck.now) = (story.seen.clone(), story.now);
        let actions = story.shows("");
        let [Action::Answer { result: Err(failed), .. }] = &actions[..] else { panic!("{actions:?}") };
        assert_eq!((failed.code(), failed.is_removed()), ("not_submitted", Some(true)));
        for _ in 1..REMOVALS_MAX {
            assert_eq!(stuck.wait(), removed(1));
        }
        let actions = stuck.wait();
        let [Action::Answer { result: Err(failed), .. }] = &actions[..] else { panic!("{actions:?}") };
        assert_eq!(failed.is_removed(), Some(false));
        // The agent put it back, as codex does with a command that it does not know.
        let mut back = Story::new(Kind::Codex);
        back.ask(1, letter("/zzz"));
        back.type_in("/zzz");
        back.shows("/zzz");
        assert_eq!((back.shows(""), back.shows("/zzz")), (vec![], vec![]));
        assert_eq!(back.wait(), removed(1));
        assert_eq!(answer(&back.shows("")), (1, Err("not_submitted")));
        // A late record is proof, too.
        let mut late = Story::new(Kind::Codex);
        late.ask(1, letter("hello"));
        late.type_in("hello");
        late.shows("hello");
        late.shows("x");
        late.wait();
        assert_eq!(answer(&late.records("hello")), (1, Ok(("submitted", 1))));
    }

    #[test]
    fn a_turn_that_a_hook_announced_is_proven_when_it_ends() {
        let mut story = Story::new(Kind::Codex);
        story.ask(1, letter("hello"));
        story.type_in("hello");
        story.sends.announced("hello", 5);
        assert_eq!(story.shows("hello"), entered(b"\r"));
        assert_eq!(story.sends.turn_ended(story.now), [], "another turn, or another text");
        story.sends.announced("another", 7);
        assert_eq!(story.sends.turn_ended(story.now), []);
        story.shows("");
        story.sends.announced("hello", 5);
        let mut refused = Story { sends: story.sends.clone(), ..Story::new(Kind::Codex) };
        refused.now = story.now;
        let actions = story.sends.turn_ended(story.now);
        let [Action::Answer { result: Ok(sent), .. }] = &actions[..] else { panic!("{actions:?}") };
        assert_eq!(sent.proof, Proof::Recorded(Source::Hook));
        // Another hook refused it: claude puts it back.
        assert_eq!(refused.shows("hello"), []);
        assert_eq!(refused.wait(), removed(1));
        assert_eq!(answer(&refused.shows("")), (1, Err("not_submitted")));
    }

    #[test]
    fn a_text_that_looks_different_is_entered_after_a_moment() {
        for (text, shown) in [("a\u{200b}b", "ab"), ("cafe\u{301}", "caf\u{e9}"), ("👨‍👩‍👧", "👨")] {
            let mut story = Story::new(Kind::Codex);
            story.ask(1, letter(text));
            story.type_in(text);
            assert_eq!(story.shows(shown), []);
            assert_eq!(story.wait(), entered(b"\r"), "{text}");
            story.shows("");
            assert_eq!(answer(&story.records(text)), (1, Ok(("submitted", 1))));
        }
    }

    #[test]
    fn a_described_agent_is_sent_its_submit_key() {
        let sends = Sends::new(Kind::Described, Some("\n\n"));
        let mut story = Story { sends, seen: at_cursor("ask> "), ..Story::new(Kind::Described) };
        story.ask(1, letter("hello"));
        story.look();
        story.wait();
        story.seen = at_cursor("ask> hello");
        assert_eq!(story.look(), entered(b"\n\n"));
        story.seen = at_cursor("ask> ");
        assert_eq!(answer(&story.look()), (1, Ok(("unproven", 1))), "it keeps no record that is known");
    }

    #[test]
    fn nothing_is_typed_before_the_composer_is_ready() {
        type Change = fn(&mut Story);
        #[rustfmt::skip]
        let table: [(&str, Change, &str); 4] = [
            ("the agent is not up",     |story| story.is_ready = false,                  "not_ready"),
            ("no composer is shown",    |story| story.seen = Seen::default(),            "not_ready"),
            ("a person is typing",      |story| story.seen = composer("a thought"),      "occupied"),
            ("it takes no pastes",      |story| story.seen.takes_pastes = false,         "no_paste"),
        ];
        for (what, change, code) in table {
            let mut story = Story::new(Kind::Codex);
            change(&mut story);
            story.ask(1, letter("a\nb"));
            assert_eq!(story.look(), [], "{what}");
            assert_eq!(answer(&story.wait()), (1, Err(code)), "{what}");
        }
        // It must stay empty for a moment.
        let mut story = Story::new(Kind::Codex);
        story.ask(1, letter("a"));
        story.look();
        story.now += SETTLED / 2;
        assert_eq!(story.shows("x"), []);
        story.now += SETTLED;
        assert_eq!(story.shows(""), []);
        story.type_in("a");
    }

    #[test]
    fn a_text_that_is_submitted_after_the_start_is_waited_for() {
        let mut story = Story::new(Kind::Codex);
        story.ask(1, letter("hello"));
        story.type_in("hello");
        assert_eq!(story.shows("hello"), entered(b"\r"));
        story.seen.last_line = "  Waiting for startup  · esc cancel".into();
        let mut stuck = Story { sends: story.sends.clone(), seen: story.seen.clone(), ..Story::new(Kind::Codex) };
        stuck.now = story.now;
        for _ in 0..5 {
            assert_eq!(story.wait(), []);
        }
        assert_eq!(story.shows(""), []);
        assert_eq!(answer(&story.records("hello")), (1, Ok(("submitted", 1))));
        // Not longer than the text may take.
        let presses = std::iter::repeat_with(|| stuck.wait()).position(|actions| actions == typed(b"\r"));
        assert!(presses.is_some_and(|looks| looks <= 10), "{presses:?}");
    }

    #[test]
    fn enter_is_pressed_again_only_while_the_text_is_visible() {
        let mut story = Story::new(Kind::Codex);
        story.ask(1, letter("hello"));
        story.type_in("hello");
        assert_eq!(story.shows("hello"), entered(b"\r"));
        assert_eq!(story.wait(), typed(b"\r"));
        let mut gone = story.sends.clone();
        assert_eq!(gone.look(&composer(""), true, story.now), []);
        let recorded = gone.recorded("hello", Source::Rollout, story.now);
        assert_eq!(answer(&recorded), (1, Ok(("submitted", 2))));
        let mut covered = Story { sends: story.sends.clone(), seen: Seen::default(), ..Story::new(Kind::Codex) };
        covered.now = story.now;
        assert_eq!(covered.wait(), [], "a dialog came up");
        assert_eq!(answer(&covered.wait()), (1, Ok(("unproven", 2))));
        assert_eq!(story.wait(), typed(b"\r"));
        assert_eq!(story.wait(), removed(1));
        let actions = story.shows("");
        assert_eq!(answer(&actions), (1, Err("not_submitted")));
        let [Action::Answer { result: Err(failed), .. }] = &actions[..] else { panic!("{actions:?}") };
        let words = "Enter was pressed 3 times and did not submit the text; it was removed again. It was: hello";
        assert_eq!(failed.to_string(), words);
    }

    #[test]
    fn a_text_that_is_never_visible_is_reported() {
        let mut story = Story::new(Kind::Codex);
        story.ask(1, letter("hello"));
        story.type_in("hello");
        story.shows("hel");
        assert_eq!(story.wait(), removed(1));
        let actions = story.shows("");
        let failed = Failed::NotSeen { draft: "hel".into(), is_removed: true };
        assert_eq!(actions, [Action::Answer { ticket: 1, result: Err(failed) }]);
        // No keys are sent to a dialog.
        let mut story = Story::new(Kind::Codex);
        story.ask(1, letter("hello"));
        story.type_in("hello");
        story.seen = Seen::default();
        assert_eq!(answer(&story.wait()), (1, Err("not_seen")));
    }

    #[test]
    fn texts_are_sent_in_order_and_each_has_its_own_time_limit() {
        let mut story = Story::new(Kind::Codex);
        story.ask(1, letter("one"));
        story.ask(2, Letter { patience: Duration::from_secs(1), ..letter("two") });
        story.ask(3, letter("three"));
        story.type_in("one");
        assert_eq!(answer(&story.wait()), (2, Err("not_ready")));
        assert_eq!(story.shows("one"), entered(b"\r"));
        assert_eq!(story.shows(""), []);
        assert_eq!(answer(&story.records("one")), (1, Ok(("submitted", 1))));
        story.type_in("three");
        for ticket in 0..WAITING_MAX as u64 - 1 {
            assert_eq!(story.ask(10 + ticket, letter("more")), []);
        }
        assert_eq!(answer(&story.ask(99, letter("too many"))), (99, Err("too_many")));
    }

    #[test]
    fn a_key_is_sent_once() {
        let keyed = || Letter { key: Some("k".into()), ..letter("hello") };
        let mut story = Story::new(Kind::Codex);
        story.ask(1, keyed());
        assert_eq!(story.ask(2, keyed()), []);
        story.type_in("hello");
        story.shows("hello");
        story.shows("");
        let actions = story.records("hello");
        assert_eq!((answer(&actions[..1]).0, answer(&actions[1..]).0), (1, 2));
        let actions = story.ask(3, keyed());
        assert_eq!(answer(&actions), (3, Ok(("submitted", 1))));
        assert!(matches!(&actions[..], [Action::Answer { result: Ok(sent), .. }] if sent.is_repeated));
        // A failure is not remembered: the text may be sent again.
        story.ask(4, Letter { key: Some("l".into()), ..letter("hello") });
        assert_eq!(answer(&story.sends.is_over()), (4, Err("ended")));
        assert_eq!(story.ask(5, Letter { key: Some("l".into()), ..letter("hello") }), []);
    }

    #[test]
    fn the_number_of_remembered_keys_is_bounded() {
        let mut story = Story::new(Kind::Codex);
        for number in 0..=REMEMBERED_MAX {
            story.seen = composer("");
            story.ask(1, Letter { key: Some(number.to_string()), ..letter("hello") });
            story.type_in("hello");
            story.shows("hello");
            story.shows("");
            story.records("hello");
        }
        let again = |number: usize| Letter { key: Some(number.to_string()), ..letter("hello") };
        assert_eq!(story.ask(2, again(REMEMBERED_MAX)).len(), 1);
        assert_eq!(story.ask(3, again(0)), [], "it is sent again");
    }

    #[test]
    fn a_text_for_an_agent_that_exited_waits_for_the_next() {
        let mut story = Story::new(Kind::Codex);
        story.ask(1, letter("one"));
        story.ask(2, letter("two"));
        story.type_in("one");
        let actions = story.sends.agent_ended();
        assert_eq!(actions, [Action::Answer { ticket: 1, result: Err(Failed::Ended { typed: true }) }]);
        story.type_in("two");
        assert_eq!(story.sends.is_over().len(), 1);
    }

    #[test]
    fn an_agent_without_a_profile_is_typed_to_at_its_cursor() {
        let at = |line: &str| Seen {
            lines: vec!["before".into(), line.into()],
            cursor: (1, line.chars().count()),
            is_cursor_visible: true,
            takes_sequences: true,
            ..Seen::default()
        };
        let mut story = Story { seen: at("ready> "), ..Story::new(Kind::Other) };
        story.ask(1, letter("hello"));
        story.look();
        assert_eq!(story.wait(), typed(b"hello"));
        story.seen = at("ready> hello");
        assert_eq!(story.look(), entered(b"\x1b[13u"), "it asked for sequences");
        story.seen = at("heard hello. ready> ");
        assert_eq!(answer(&story.look()), (1, Ok(("unproven", 1))));
    }

    #[test]
    fn the_last_line_is_at_the_cursor_of_an_agent_without_a_profile() {
        let at = |lines: &[&str]| Seen {
            lines: lines.iter().map(|line| (*line).to_owned()).collect(),
            cursor: (lines.len() - 1, lines.last().unwrap().chars().count()),
            is_cursor_visible: true,
            takes_pastes: true,
            ..Seen::default()
        };
        let mut story = Story { seen: at(&["$ "]), ..Story::new(Kind::Other) };
        story.ask(1, letter("echo one\necho two\n"));
        story.look();
        assert_eq!(story.wait(), typed(b"\x1b[200~echo one\necho two\n\x1b[201~"));
        story.seen = at(&["$ echo one", "> "]);
        assert_eq!(story.look(), [], "half of it");
        story.seen = at(&["$ echo one", "> echo two"]);
        assert_eq!(story.look(), entered(b"\r"));
        story.seen = at(&["one", "two", "$ "]);
        assert_eq!(answer(&story.look()), (1, Ok(("unproven", 1))));
    }

    #[test]
    fn claude_at_work_with_a_faint_sign_has_taken_the_text() {
        let rule = "─".repeat(40);
        let at = |line: &str| Seen {
            lines: vec!["❯ old".into(), rule.clone(), line.into(), rule.clone(), "  auto mode on".into()],
            cursor: (2, 2),
            takes_pastes: true,
            ..Seen::default()
        };
        let mut story = Story { seen: at("❯ "), ..Story::new(Kind::Claude) };
        story.ask(1, letter("hello"));
        story.look();
        assert_eq!(story.wait(), typed(b"\x1b[200~hello\x1b[201~"));
        story.seen = at("❯ hello");
        assert_eq!(story.look(), entered(b"\r"));
        story.seen = at("  hello");
        assert_eq!(story.look(), [], "it still stands there");
        story.seen = at("  ");
        assert_eq!(story.look(), []);
        assert!(story.sends.awaits_record());
        assert_eq!(answer(&story.wait()), (1, Ok(("unproven", 1))));
    }

    #[test]
    fn a_text_has_no_control_characters() {
        #[rustfmt::skip]
        let table = [
            ("",                            Some("bad_request")),
            (" \n\t",                       Some("bad_request")),
            ("end\x1b[201~\x03",            Some("bad_request")),
            ("nul\0",                       Some("bad_request")),
            ("tab\tand\nline",              None),
            ("日本 ünïcode",                 None),
        ];
        for (text, code) in table {
            let actions = Story::new(Kind::Codex).ask(1, letter(text));
            assert_eq!((!actions.is_empty()).then(|| answer(&actions).1.unwrap_err()), code, "{text:?}");
        }
        let long = letter(&"x".repeat(TEXT_MAX + 1));
        assert_eq!(answer(&Story::new(Kind::Codex).ask(1, long)), (1, Err("bad_request")));
    }
}
