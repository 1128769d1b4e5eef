//! A text for an agent, from whoever sends it until it is proven that the agent has it.
//!
//! Nothing is typed before the composer is there, empty, and has been for a moment. Then the text goes in as one paste, is
//! waited for until it is to be seen, and is sent with Enter; it has arrived when it has left the composer again. One goes
//! after the other.

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use crate::agent::Kind;
use crate::composer::{self, Seen};

/// So many wait for their turn; the next is refused.
pub const WAITING_MAX: usize = 16;
/// What is longer is refused; a frame holds it.
pub const TEXT_MAX: usize = 512 << 10;
/// How long a composer must have been there, and empty: what is typed into one that is still being built is lost.
pub const SETTLED: Duration = Duration::from_millis(300);
/// How long a text may take to be seen.
pub const SEEN_MAX: Duration = Duration::from_secs(10);
/// How long Enter may take; then it is pressed again, as the first may have been swallowed.
pub const ENTER_MAX: Duration = Duration::from_secs(3);
/// So often Enter is pressed.
pub const PRESSES_MAX: u32 = 3;
/// So many of the last texts with a key are remembered, so that they are not sent twice.
const REMEMBERED_MAX: usize = 64;

const PASTE_BEGINS: &[u8] = b"\x1b[200~";
const PASTE_ENDS: &[u8] = b"\x1b[201~";
const ENTER: &[u8] = b"\r";
const ENTER_AS_SEQUENCE: &[u8] = b"\x1b[13u";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Letter {
    pub text: String,
    /// Enter follows.
    pub submit: bool,
    /// How long it may wait for the composer, its turn included.
    pub patience: Duration,
    /// The same key is the same text: it is sent once.
    pub key: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Type(Vec<u8>),
    Answer { ticket: u64, result: Result<Sent, Failed> },
}

/// It is there, and this is how that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    /// It was seen in the composer, and then no more.
    pub submitted: bool,
    pub presses: u32,
    /// As one paste, not as keys.
    pub as_paste: bool,
    /// For the composer, and for those before.
    pub waited: Duration,
    pub took: Duration,
    /// Under this key it had been sent before.
    pub is_repeated: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failed {
    Empty,
    TooLong,
    /// A key in a text would be a key.
    Control(char),
    TooMany,
    /// No composer was to be seen in time.
    NotReady,
    /// Somebody's own words stand there.
    Occupied(String),
    /// Lines would be sent one by one.
    NoPaste,
    /// It was typed, and never seen; this was instead.
    NotSeen(String),
    /// It still stands there.
    NotSubmitted {
        draft: String,
        presses: u32,
    },
    /// The agent ended; what was typed may have arrived.
    Ended {
        typed: bool,
    },
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
            Failed::NotSeen(_) => "not_seen",
            Failed::NotSubmitted { .. } => "not_submitted",
            Failed::Ended { .. } => "ended",
        }
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failed::Empty => f.write_str("there is nothing to send"),
            Failed::TooLong => write!(f, "more than {TEXT_MAX} bytes are too much at once"),
            Failed::Control(letter) => {
                write!(f, "the text has a control character in it, U+{:04X}", u32::from(*letter))
            }
            Failed::TooMany => write!(f, "{WAITING_MAX} texts wait already, which is the limit"),
            Failed::NotReady => f.write_str("the agent showed no place to type in time; nothing was typed"),
            Failed::Occupied(draft) => {
                write!(f, "something else stands where one types; nothing was typed. It is: {draft}")
            }
            Failed::NoPaste => f.write_str("the agent takes no pastes, and several lines would be sent one by one"),
            Failed::NotSeen(draft) if draft.is_empty() => {
                f.write_str("the text was typed and did not appear; nothing stands where one types")
            }
            Failed::NotSeen(draft) => write!(f, "the text was typed and did not appear; instead there is: {draft}"),
            Failed::NotSubmitted { draft, presses } => {
                write!(f, "Enter was pressed {presses} times and the text still stands where one types: {draft}")
            }
            Failed::Ended { typed: false } => f.write_str("the agent ended before anything was typed"),
            Failed::Ended { typed: true } => f.write_str("the agent ended; what was typed may have arrived"),
        }
    }
}

/// All that is to be sent to one agent.
#[derive(Clone, Debug)]
pub struct Sends {
    kind: Kind,
    waiting: VecDeque<Job>,
    /// What was sent under a key, the oldest first.
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
    /// For its turn, and for a composer that has been empty since then.
    Waiting { empty_since: Option<Instant>, occupied_by: Option<String>, cannot_paste: bool },
    /// Until it is seen.
    Typed { at: Instant, as_paste: bool, last: String },
    /// Until it is gone, or until it is time to press again.
    Pressed { typed: Instant, at: Instant, until: Instant, as_paste: bool, presses: u32 },
}

impl Sends {
    pub fn new(kind: Kind) -> Sends {
        Sends { kind, waiting: VecDeque::new(), remembered: VecDeque::new() }
    }

    /// Somebody looks at the screen for us only while this is so.
    pub fn is_busy(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// When to look again if nothing was shown meanwhile.
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

    /// The screen as it is now, and whether the agent is one to be typed to at all.
    pub fn look(&mut self, seen: &Seen, is_ready: bool, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        // A step may be the end of one text and so the beginning of the next, which then waits for a look of its own.
        if let Some(job) = self.waiting.front_mut() {
            let draft = is_ready.then(|| composer::draft(self.kind, seen)).flatten();
            match job.look(self.kind, seen, draft, now) {
                Step::None => {}
                Step::Type(bytes) => actions.push(Action::Type(bytes)),
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

    /// The agent is gone. What was not typed yet waits for the next one.
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

    /// No agent will come any more.
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
    End(Result<Sent, Failed>),
}

impl Job {
    fn look(&mut self, kind: Kind, seen: &Seen, draft: Option<String>, now: Instant) -> Step {
        let text = to_be_seen(kind, &self.letter.text);
        match &mut self.state {
            State::Waiting { empty_since, occupied_by, cannot_paste } => {
                let is_free = match &draft {
                    None => false,
                    // Without a profile the agent's own prompt stands there, and cannot be told from words.
                    Some(_) if !matches!(kind, Kind::Claude | Kind::Codex) => true,
                    Some(draft) => draft.is_empty(),
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
                let as_paste = seen.takes_pastes;
                self.state = State::Typed { at: now, as_paste, last: String::new() };
                Step::Type(match as_paste {
                    true => [PASTE_BEGINS, self.letter.text.as_bytes(), PASTE_ENDS].concat(),
                    false => self.letter.text.clone().into_bytes(),
                })
            }
            State::Typed { at, as_paste, last } => {
                let (at, as_paste) = (*at, *as_paste);
                if let Some(draft) = draft {
                    *last = draft;
                }
                match (composer::holds(last, text), self.letter.submit) {
                    (true, true) => {
                        self.state =
                            State::Pressed { typed: at, at: now, until: now + ENTER_MAX, as_paste, presses: 1 };
                        Step::Type(enter(seen))
                    }
                    (true, false) => Step::End(Ok(self.sent(at, as_paste, 0, now))),
                    (false, _) if now >= at + SEEN_MAX => Step::End(Err(Failed::NotSeen(std::mem::take(last)))),
                    (false, _) => Step::None,
                }
            }
            State::Pressed { typed, at, until, as_paste, presses } => {
                let (typed_at, was_paste, pressed) = (*typed, *as_paste, *presses);
                match draft {
                    Some(draft) if !composer::holds(&draft, text) => {
                        Step::End(Ok(self.sent(typed_at, was_paste, pressed, now)))
                    }
                    None if composer::is_bare(kind, seen) => {
                        Step::End(Ok(self.sent(typed_at, was_paste, pressed, now)))
                    }
                    _ if now < *until => Step::None,
                    // Only while it is seen to stand there: what else Enter would do nobody knows.
                    Some(_) if pressed < PRESSES_MAX => {
                        (*at, *until, *presses) = (now, now + ENTER_MAX, pressed + 1);
                        Step::Type(enter(seen))
                    }
                    None if now < *at + SEEN_MAX => {
                        *until = *at + SEEN_MAX;
                        Step::None
                    }
                    draft => {
                        let draft = draft.unwrap_or_default();
                        Step::End(Err(Failed::NotSubmitted { draft, presses: pressed }))
                    }
                }
            }
        }
    }

    fn sent(&self, typed: Instant, as_paste: bool, presses: u32, now: Instant) -> Sent {
        Sent {
            submitted: presses > 0,
            presses,
            as_paste,
            waited: typed.saturating_duration_since(self.asked),
            took: now.saturating_duration_since(typed),
            is_repeated: false,
        }
    }

    fn next_step(&self) -> Option<Instant> {
        match &self.state {
            State::Waiting { empty_since, .. } => empty_since.map(|since| since + SETTLED),
            State::Typed { at, .. } => Some(*at + SEEN_MAX),
            State::Pressed { until, .. } => Some(*until),
        }
    }

    /// Patience is for waiting; what was typed has limits of its own.
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

/// Without a profile only the line of the cursor is known, and the last of a text stands there.
fn to_be_seen(kind: Kind, text: &str) -> &str {
    match kind {
        Kind::Claude | Kind::Codex => text,
        Kind::Described | Kind::Shell | Kind::Other | Kind::Errand => {
            text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or(text)
        }
    }
}

fn enter(seen: &Seen) -> Vec<u8> {
    if seen.takes_sequences { ENTER_AS_SEQUENCE } else { ENTER }.to_vec()
}

/// A text is letters: an escape in it could end the paste and press keys.
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
            cursor: (1, 2),
            is_cursor_visible: true,
            takes_pastes: true,
            takes_sequences: false,
        }
    }

    fn typed(bytes: &[u8]) -> Vec<Action> {
        vec![Action::Type(bytes.to_vec())]
    }

    struct Story {
        sends: Sends,
        seen: Seen,
        is_ready: bool,
        now: Instant,
    }

    impl Story {
        fn new(kind: Kind) -> Story {
            Story { sends: Sends::new(kind), seen: composer(""), is_ready: true, now: birth() }
        }

        fn ask(&mut self, ticket: u64, letter: Letter) -> Vec<Action> {
            self.sends.asked(ticket, letter, self.now)
        }

        fn look(&mut self) -> Vec<Action> {
            self.sends.look(&self.seen, self.is_ready, self.now)
        }

        fn shows(&mut self, draft: &str) -> Vec<Action> {
            self.seen = composer(draft);
            self.look()
        }

        /// Looks when the machine wants to, which is never a moment that has passed.
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

    fn answer(actions: &[Action]) -> (u64, Result<(bool, u32), &'static str>) {
        match actions {
            [Action::Answer { ticket, result }] => {
                let result = result.clone().map(|sent| (sent.submitted, sent.presses));
                (*ticket, result.map_err(|failed| failed.code()))
            }
            actions => panic!("{actions:?}"),
        }
    }

    #[test]
    fn a_text_is_pasted_seen_sent_and_gone() {
        let mut story = Story::new(Kind::Codex);
        assert_eq!(story.ask(1, letter("two\r\nlines")), []);
        story.type_in("two\nlines");
        assert_eq!(story.shows(""), [], "Enter waits for the text");
        assert_eq!(story.shows("two"), []);
        assert_eq!(story.shows("two lines"), typed(b"\r"));
        assert_eq!(story.look(), []);
        assert_eq!(answer(&story.shows("")), (1, Ok((true, 1))));
        assert!(!story.sends.is_busy() && story.sends.deadline().is_none());

        let mut draft = Story::new(Kind::Codex);
        draft.ask(1, Letter { submit: false, ..letter("later") });
        draft.type_in("later");
        assert_eq!(answer(&draft.shows("later")), (1, Ok((false, 0))));
    }

    #[test]
    fn nothing_is_typed_before_there_is_a_place_for_it() {
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
        // It must stay so for a moment.
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
    fn enter_is_pressed_again_only_while_the_text_stands_there() {
        let mut story = Story::new(Kind::Codex);
        story.ask(1, letter("hello"));
        story.type_in("hello");
        assert_eq!(story.shows("hello"), typed(b"\r"));
        assert_eq!(story.wait(), typed(b"\r"));
        let mut gone = story.sends.clone();
        assert_eq!(answer(&gone.look(&composer(""), true, story.now)), (1, Ok((true, 2))));
        let mut covered = Story { sends: story.sends.clone(), seen: Seen::default(), ..Story::new(Kind::Codex) };
        covered.now = story.now;
        assert_eq!(covered.wait(), [], "a dialog came up");
        assert_eq!(answer(&covered.wait()), (1, Err("not_submitted")));
        assert_eq!(story.wait(), typed(b"\r"));
        let actions = story.wait();
        assert_eq!(answer(&actions), (1, Err("not_submitted")));
        let [Action::Answer { result: Err(failed), .. }] = &actions[..] else { panic!("{actions:?}") };
        let words = "Enter was pressed 3 times and the text still stands where one types: hello";
        assert_eq!(failed.to_string(), words);
    }

    #[test]
    fn what_is_never_seen_is_said_to_be_so() {
        let mut story = Story::new(Kind::Codex);
        story.ask(1, letter("hello"));
        story.type_in("hello");
        story.shows("hel");
        let actions = story.wait();
        assert_eq!(actions, [Action::Answer { ticket: 1, result: Err(Failed::NotSeen("hel".into())) }]);
    }

    #[test]
    fn one_goes_after_the_other_and_each_has_its_own_patience() {
        let mut story = Story::new(Kind::Codex);
        story.ask(1, letter("one"));
        story.ask(2, Letter { patience: Duration::from_secs(1), ..letter("two") });
        story.ask(3, letter("three"));
        story.type_in("one");
        assert_eq!(answer(&story.wait()), (2, Err("not_ready")));
        assert_eq!(story.shows("one"), typed(b"\r"));
        assert_eq!(answer(&story.shows("")), (1, Ok((true, 1))));
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
        let actions = story.shows("");
        assert_eq!((answer(&actions[..1]).0, answer(&actions[1..]).0), (1, 2));
        let actions = story.ask(3, keyed());
        assert_eq!(answer(&actions), (3, Ok((true, 1))));
        assert!(matches!(&actions[..], [Action::Answer { result: Ok(sent), .. }] if sent.is_repeated));
        // A failure is not remembered: it may be tried again.
        story.ask(4, Letter { key: Some("l".into()), ..letter("hello") });
        assert_eq!(answer(&story.sends.is_over()), (4, Err("ended")));
        assert_eq!(story.ask(5, Letter { key: Some("l".into()), ..letter("hello") }), []);
    }

    #[test]
    fn only_so_many_keys_are_remembered() {
        let mut story = Story::new(Kind::Codex);
        for number in 0..=REMEMBERED_MAX {
            story.seen = composer("");
            story.ask(1, Letter { key: Some(number.to_string()), ..letter("hello") });
            story.type_in("hello");
            story.shows("hello");
            story.shows("");
        }
        let again = |number: usize| Letter { key: Some(number.to_string()), ..letter("hello") };
        assert_eq!(story.ask(2, again(REMEMBERED_MAX)).len(), 1);
        assert_eq!(story.ask(3, again(0)), [], "it is sent again");
    }

    #[test]
    fn what_waits_for_an_agent_that_ended_waits_for_the_next() {
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
        assert_eq!(story.look(), typed(b"\x1b[13u"), "it asked for sequences");
        story.seen = at("heard hello. ready> ");
        assert_eq!(answer(&story.look()), (1, Ok((true, 1))));
    }

    #[test]
    fn of_many_lines_the_last_stands_at_the_cursor_of_an_agent_without_a_profile() {
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
        assert_eq!(story.look(), typed(b"\r"));
        story.seen = at(&["one", "two", "$ "]);
        assert_eq!(answer(&story.look()), (1, Ok((true, 1))));
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
        assert_eq!(story.look(), typed(b"\r"));
        story.seen = at("  hello");
        assert_eq!(story.look(), [], "it still stands there");
        story.seen = at("  ");
        assert_eq!(answer(&story.look()), (1, Ok((true, 1))));
    }

    #[test]
    fn a_text_is_letters() {
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
