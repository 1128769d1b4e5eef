//! What `outlast top` knows and is asked: the rows, which of them is chosen, and what a key means now.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use serde_json::Value;

use crate::{
    control::client::Found,
    instances::{self, failed_reload},
};

/// How long a piece of news stands in the last line.
const NEWS_MAX: Duration = Duration::from_secs(8);
/// What of a log is shown; the whole of it is a matter of `outlast logs`.
pub const LOG_LINES_MAX: usize = 1000;

/// One instance, as it said of itself.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Row {
    pub id: String,
    pub kind: String,
    pub state: String,
    /// Of a session: what its crashes have made of it.
    pub health: Option<String>,
    pub pid: Option<u64>,
    pub uptime_s: Option<f64>,
    pub generation: Option<u64>,
    pub restarts: Option<u64>,
    pub calls_per_s: Option<f64>,
    pub p50_ms: Option<f64>,
    pub in_flight: Option<u64>,
    /// The server does not answer, and for how long its oldest request has waited.
    pub stalled: bool,
    pub oldest_request_s: Option<f64>,
    pub next_try_s: Option<f64>,
    pub last_exit: Option<String>,
    /// Why the last reload failed, if the server still runs the old code.
    pub reload_failure: Option<String>,
    /// How long ago each of the last ends was, and whether it was a crash.
    pub ends: Vec<(f64, bool)>,
    /// Watched files that cause no reload for now.
    pub muted: Vec<String>,
    /// The end of its stderr.
    pub words: Vec<String>,
    pub cwd: String,
    pub command: String,
    pub log: Option<std::path::PathBuf>,
}

impl Row {
    /// An instance, and behind it the backends it has, if it is a gateway.
    pub fn all(found: &[Found]) -> Vec<Row> {
        let with_backends = |found: &Found| {
            let row = Row::of(found);
            let backends = found.state.as_ref().and_then(|state| state["backends"].as_array());
            let below = backends.into_iter().flatten().map(|state| Row {
                id: format!("{}/{}", row.id, state["name"].as_str().unwrap_or_default()),
                kind: "backend".to_owned(),
                cwd: row.cwd.clone(),
                command: state["command"].as_str().unwrap_or_default().to_owned(),
                log: row.log.clone(),
                ..Row::said(state)
            });
            let below: Vec<Row> = below.collect();
            [vec![row], below].concat()
        };
        found.iter().flat_map(with_backends).collect()
    }

    fn of(found: &Found) -> Row {
        let entry = &found.entry;
        Row {
            id: entry.id.clone(),
            kind: entry.kind.clone(),
            cwd: entry.cwd.display().to_string(),
            command: entry.command.clone(),
            log: entry.log.clone(),
            ..Row::said(found.state.as_ref().unwrap_or(&Value::Null))
        }
    }

    /// What it said of itself.
    fn said(state: &Value) -> Row {
        let text = |member: &str| state[member].as_str().map(str::to_owned);
        let ends = state["last_exits"].as_array().into_iter().flatten();
        Row {
            state: text("state").unwrap_or_else(|| "unresponsive".to_owned()),
            health: text("health").filter(|health| health != "healthy"),
            pid: state["pid"].as_u64(),
            uptime_s: state["uptime_s"].as_f64(),
            generation: state["generation"].as_u64(),
            restarts: state["restarts"].as_u64(),
            calls_per_s: state["calls_per_s"].as_f64(),
            p50_ms: state["p50_ms"].as_f64(),
            in_flight: state["in_flight"].as_u64(),
            stalled: state["stalled"] == true,
            oldest_request_s: state["oldest_request_s"].as_f64(),
            next_try_s: state["next_try_s"].as_f64(),
            last_exit: instances::last_exit_in_words(state),
            reload_failure: failed_reload(state).map(|last| last["error"].as_str().unwrap_or_default().to_owned()),
            ends: ends.filter_map(|end| Some((end["seconds_ago"].as_f64()?, end["crashed"] == true))).collect(),
            muted: state["muted"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|path| path.as_str().map(str::to_owned))
                .collect(),
            words: text("last_stderr")
                .or_else(|| text("stderr_tail"))
                .unwrap_or_default()
                .lines()
                .map(str::to_owned)
                .collect(),
            ..Row::default()
        }
    }

    /// The state in one word; a server that does not answer is `stalled`.
    pub fn short_state(&self) -> &str {
        if self.stalled { "stalled" } else { &self.state }
    }

    /// The state, and what else is wrong.
    pub fn shown_state(&self) -> String {
        let suffix = match (&self.reload_failure, self.stalled) {
            (_, true) => instances::STALLED,
            (Some(_), _) => instances::RELOAD_FAILED,
            (None, false) => "",
        };
        format!("{}{suffix}", self.state)
    }

    /// Whether somebody who types this means this one.
    fn holds(&self, filter: &str) -> bool {
        let filter = filter.to_lowercase();
        [&self.id, &self.kind, &self.state, &self.cwd, &self.command]
            .iter()
            .any(|text| text.to_lowercase().contains(&filter))
    }
}

#[derive(Debug)]
pub enum Event {
    /// Everybody was asked, and this is what there is.
    Surveyed(Vec<Row>),
    Pressed(KeyEvent),
    /// Something that was asked for is done, or not.
    Done {
        id: String,
        result: Result<String, String>,
    },
    LogRead {
        id: String,
        lines: Result<Vec<String>, String>,
    },
    TimePassed,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    Restart(String),
    Resume(String),
    Stop {
        id: String,
        force: bool,
    },
    Attach(String),
    ReadLog(String),
    /// To the shell, for a while.
    Suspend,
    Leave,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mode {
    List,
    /// A filter is being typed.
    Filter,
    Help,
    /// Nothing is stopped that nobody meant to stop.
    Sure {
        id: String,
        force: bool,
    },
    Log(Log),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Log {
    pub id: String,
    pub lines: Vec<String>,
    /// How many lines up from the end; at 0 it follows.
    pub up: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct News {
    pub words: String,
    pub is_bad: bool,
    until: Instant,
}

#[derive(Debug)]
pub struct Board {
    pub rows: Vec<Row>,
    /// When they were asked; none before the first time.
    pub asked: Option<Instant>,
    /// By id: rows come and go above it.
    pub chosen: Option<String>,
    pub filter: String,
    pub mode: Mode,
    pub news: Option<News>,
    /// What was asked of whom, and is not done yet.
    pub busy: BTreeMap<String, &'static str>,
}

impl Default for Board {
    fn default() -> Board {
        Board {
            rows: Vec::new(),
            asked: None,
            chosen: None,
            filter: String::new(),
            mode: Mode::List,
            news: None,
            busy: BTreeMap::new(),
        }
    }
}

impl Board {
    pub fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Surveyed(rows) => {
                self.rows = rows;
                self.asked = Some(now);
                self.choose_somebody();
                match &self.mode {
                    Mode::Log(log) => vec![Action::ReadLog(log.id.clone())],
                    _ => Vec::new(),
                }
            }
            Event::Pressed(key) => self.pressed(key, now),
            Event::Done { id, result } => {
                self.busy.remove(&id);
                let is_bad = result.is_err();
                self.say(result.unwrap_or_else(|words| words), is_bad, now);
                Vec::new()
            }
            Event::LogRead { id, lines } => {
                self.log_read(&id, lines, now);
                Vec::new()
            }
            Event::TimePassed => {
                if self.news.as_ref().is_some_and(|news| news.until <= now) {
                    self.news = None;
                }
                Vec::new()
            }
        }
    }

    /// Those that the filter lets through.
    pub fn shown(&self) -> Vec<&Row> {
        self.rows.iter().filter(|row| row.holds(&self.filter)).collect()
    }

    pub fn chosen_row(&self) -> Option<&Row> {
        self.shown().into_iter().find(|row| Some(&row.id) == self.chosen.as_ref())
    }

    /// How much of a wait is left now, of what was left when it was asked.
    pub fn left(&self, row: &Row, now: Instant) -> Option<f64> {
        let since = self.asked.map_or(0.0, |asked| now.saturating_duration_since(asked).as_secs_f64());
        row.next_try_s.map(|left| (left - since).max(0.0))
    }

    fn pressed(&mut self, key: KeyEvent, now: Instant) -> Vec<Action> {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if is_control => return vec![Action::Leave],
            KeyCode::Char('z') if is_control => return vec![Action::Suspend],
            _ => {}
        }
        match self.mode.clone() {
            Mode::List => self.pressed_in_list(key.code, now),
            Mode::Filter => self.pressed_in_filter(key.code),
            Mode::Help => {
                self.mode = Mode::List;
                Vec::new()
            }
            Mode::Sure { id, force } => {
                self.mode = Mode::List;
                if !matches!(key.code, KeyCode::Char('y' | 'Y')) {
                    return Vec::new();
                }
                self.busy.insert(id.clone(), "stopping");
                vec![Action::Stop { id, force }]
            }
            Mode::Log(log) => self.pressed_in_log(key.code, log),
        }
    }

    fn pressed_in_list(&mut self, key: KeyCode, now: Instant) -> Vec<Action> {
        match key {
            KeyCode::Char('q') => return vec![Action::Leave],
            KeyCode::Esc if self.filter.is_empty() => return vec![Action::Leave],
            KeyCode::Esc => {
                self.filter.clear();
                self.choose_somebody();
            }
            KeyCode::Up | KeyCode::Char('k') => self.step(-1),
            KeyCode::Down | KeyCode::Char('j') => self.step(1),
            KeyCode::PageUp => self.step(-10),
            KeyCode::PageDown => self.step(10),
            KeyCode::Home | KeyCode::Char('g') => self.step(isize::MIN / 2),
            KeyCode::End | KeyCode::Char('G') => self.step(isize::MAX / 2),
            KeyCode::Char('/') => self.mode = Mode::Filter,
            KeyCode::Char('?' | 'h') => self.mode = Mode::Help,
            key => return self.pressed_for_one(key, now),
        }
        Vec::new()
    }

    /// The keys that are about whoever is chosen.
    fn pressed_for_one(&mut self, key: KeyCode, now: Instant) -> Vec<Action> {
        let Some(row) = self.chosen_row().cloned() else { return Vec::new() };
        let id = row.id.clone();
        match key {
            KeyCode::Char('r') => {
                self.busy.insert(id.clone(), "restarting");
                vec![Action::Restart(id)]
            }
            KeyCode::Char('u') => {
                self.busy.insert(id.clone(), "resuming");
                vec![Action::Resume(id)]
            }
            KeyCode::Char('s') => {
                self.mode = Mode::Sure { id, force: false };
                Vec::new()
            }
            KeyCode::Char('K') => {
                self.mode = Mode::Sure { id, force: true };
                Vec::new()
            }
            KeyCode::Char('a') if row.kind == "session" => vec![Action::Attach(id)],
            KeyCode::Char('a') => {
                self.say(format!("{id} is a server: it has no terminal to attach to"), true, now);
                Vec::new()
            }
            KeyCode::Char('l') | KeyCode::Enter if row.log.is_some() => {
                self.mode = Mode::Log(Log { id: id.clone(), lines: Vec::new(), up: 0 });
                vec![Action::ReadLog(id)]
            }
            KeyCode::Char('l') | KeyCode::Enter => {
                self.say(format!("{id} writes no log"), true, now);
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    fn pressed_in_filter(&mut self, key: KeyCode) -> Vec<Action> {
        match key {
            KeyCode::Enter => self.mode = Mode::List,
            KeyCode::Esc => {
                self.filter.clear();
                self.mode = Mode::List;
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Up => self.step(-1),
            KeyCode::Down => self.step(1),
            KeyCode::Char(letter) => self.filter.push(letter),
            _ => {}
        }
        self.choose_somebody();
        Vec::new()
    }

    fn pressed_in_log(&mut self, key: KeyCode, log: Log) -> Vec<Action> {
        let most = log.lines.len().saturating_sub(1);
        let up = match key {
            KeyCode::Up | KeyCode::Char('k') => log.up + 1,
            KeyCode::Down | KeyCode::Char('j') => log.up.saturating_sub(1),
            KeyCode::PageUp => log.up + 20,
            KeyCode::PageDown | KeyCode::Char(' ') => log.up.saturating_sub(20),
            KeyCode::Home | KeyCode::Char('g') => most,
            KeyCode::End | KeyCode::Char('G') => 0,
            KeyCode::Esc | KeyCode::Enter | KeyCode::Char('q' | 'l') => {
                self.mode = Mode::List;
                return Vec::new();
            }
            _ => log.up,
        };
        self.mode = Mode::Log(Log { up: up.min(most), ..log });
        Vec::new()
    }

    fn log_read(&mut self, id: &str, lines: Result<Vec<String>, String>, now: Instant) {
        let Mode::Log(log) = &mut self.mode else { return };
        if log.id != id {
            return;
        }
        match lines {
            // Whoever reads further up stays where they are while more is written.
            Ok(lines) => {
                let more = if log.up > 0 { lines.len().saturating_sub(log.lines.len()) } else { 0 };
                log.up += more;
                log.lines = lines;
            }
            Err(why) => {
                self.mode = Mode::List;
                self.say(why, true, now);
            }
        }
    }

    fn step(&mut self, by: isize) {
        let shown = self.shown();
        let Some(last) = shown.len().checked_sub(1) else { return };
        let at = shown.iter().position(|row| Some(&row.id) == self.chosen.as_ref()).unwrap_or(0);
        let next = (at as isize).saturating_add(by).clamp(0, last as isize) as usize;
        self.chosen = Some(shown[next].id.clone());
    }

    /// Somebody is chosen whenever there is somebody.
    fn choose_somebody(&mut self) {
        if self.chosen_row().is_none() {
            self.chosen = self.shown().first().map(|row| row.id.clone());
        }
    }

    fn say(&mut self, words: String, is_bad: bool, now: Instant) {
        self.news = Some(News { words, is_bad, until: now + NEWS_MAX });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(id: &str, kind: &str) -> Row {
        let (id, kind) = (id.to_owned(), kind.to_owned());
        Row { id, kind, state: "ready".into(), log: Some("/x.log".into()), ..Row::default() }
    }

    struct Story {
        board: Board,
        now: Instant,
    }

    impl Story {
        fn new() -> Story {
            let mut story = Story { board: Board::default(), now: Instant::now() };
            story.survey(&[row("weather-1", "mcp"), row("github-2", "mcp"), row("night", "session")]);
            story
        }

        fn survey(&mut self, rows: &[Row]) -> Vec<Action> {
            self.board.handle(Event::Surveyed(rows.to_vec()), self.now)
        }

        fn press(&mut self, keys: &str) -> Vec<Action> {
            let mut actions = Vec::new();
            for key in keys.chars() {
                let key = match key {
                    '↑' => KeyCode::Up,
                    '↓' => KeyCode::Down,
                    '⏎' => KeyCode::Enter,
                    '⎋' => KeyCode::Esc,
                    '⌫' => KeyCode::Backspace,
                    letter => KeyCode::Char(letter),
                };
                actions.extend(self.board.handle(Event::Pressed(KeyEvent::from(key)), self.now));
            }
            actions
        }

        fn chosen(&self) -> &str {
            self.board.chosen.as_deref().unwrap_or("nobody")
        }
    }

    #[test]
    fn the_chosen_one_stays_chosen_while_others_come_and_go() {
        let mut story = Story::new();
        assert_eq!(story.chosen(), "weather-1");
        story.press("↓");
        assert_eq!(story.chosen(), "github-2");
        story.survey(&[row("new", "mcp"), row("github-2", "mcp")]);
        assert_eq!(story.chosen(), "github-2");
        story.survey(&[row("new", "mcp")]);
        assert_eq!(story.chosen(), "new", "it is gone, and another one is there");
        story.survey(&[]);
        assert_eq!(story.chosen(), "nobody");
        assert_eq!(story.press("rsla↓↑"), [], "nobody is there to do anything to");
    }

    #[test]
    fn keys_reach_whoever_is_chosen() {
        let mut story = Story::new();
        let id = || "weather-1".to_owned();
        assert_eq!(story.press("r"), [Action::Restart(id())]);
        assert_eq!(story.board.busy.get("weather-1"), Some(&"restarting"));
        story.board.handle(Event::Done { id: id(), result: Err("no".into()) }, story.now);
        assert!(story.board.busy.is_empty() && story.board.news.as_ref().unwrap().is_bad);
        assert_eq!(story.press("u"), [Action::Resume(id())]);
        assert_eq!(story.press("s"), [], "first the question");
        assert_eq!(story.press("n"), []);
        assert_eq!(story.press("sy"), [Action::Stop { id: id(), force: false }]);
        assert_eq!(story.press("Ky"), [Action::Stop { id: id(), force: true }]);
        assert_eq!(story.press("a"), [], "it has no terminal");
        assert_eq!(story.press("↓↓a"), [Action::Attach("night".into())]);
        assert_eq!(story.press("?q"), [], "any key leaves the help");
        assert_eq!(story.press("q"), [Action::Leave]);
    }

    #[test]
    fn a_filter_narrows_the_list_and_is_undone() {
        let mut story = Story::new();
        story.press("/GIT");
        assert_eq!((story.board.shown().len(), story.chosen()), (1, "github-2"));
        story.press("⌫⌫⌫q");
        assert_eq!(story.board.shown().len(), 0, "a letter is a letter while a filter is typed");
        story.press("⌫⏎");
        assert_eq!((story.board.shown().len(), &story.board.mode), (3, &Mode::List));
        story.press("/sess⏎");
        assert_eq!(story.chosen(), "night");
        assert_eq!(story.press("⎋"), [], "first the filter goes");
        assert_eq!(story.board.shown().len(), 3);
        assert_eq!(story.press("⎋"), [Action::Leave]);
    }

    #[test]
    fn a_log_is_read_again_and_again_until_it_is_left() {
        let mut story = Story::new();
        let read = || vec![Action::ReadLog("weather-1".into())];
        let rows = [row("weather-1", "mcp")];
        assert_eq!(story.press("l"), read());
        let lines = |count: usize| (0..count).map(|n| format!("line {n}")).collect::<Vec<_>>();
        let id = || "weather-1".to_owned();
        story.board.handle(Event::LogRead { id: id(), lines: Ok(lines(10)) }, story.now);
        assert_eq!(story.survey(&rows), read());
        story.press("↑↑");
        story.board.handle(Event::LogRead { id: id(), lines: Ok(lines(15)) }, story.now);
        let Mode::Log(log) = &story.board.mode else { panic!() };
        assert_eq!(log.up, 7, "what is read does not run away");
        story.press("q");
        assert_eq!(story.survey(&rows), []);
        story.board.handle(Event::LogRead { id: id(), lines: Err("late".into()) }, story.now);
        assert_eq!(story.board.news, None, "nobody reads it any more");
    }

    #[test]
    fn a_gateway_is_followed_by_its_backends() {
        use crate::control::registry::Entry;
        let entry = Entry {
            id: "tools-1".into(),
            kind: "gateway".into(),
            name: "tools".into(),
            pid: 1,
            born: String::new(),
            started: 0.0,
            cwd: "/srv".into(),
            socket: "/x.sock".into(),
            command: "outlast gateway".into(),
            log: None,
            audit: None,
        };
        let state = serde_json::json!({"state": "running", "backends": [
            {"name": "github", "state": "ready", "pid": 7, "in_flight": 2, "last_stderr": "now", "stderr_tail": "then"},
            {"name": "files", "state": "backoff", "next_try_s": 4.0},
        ]});
        let rows = Row::all(&[Found { entry, state: Some(state) }]);
        let told: Vec<(&str, &str, &str)> =
            rows.iter().map(|row| (row.id.as_str(), row.kind.as_str(), row.state.as_str())).collect();
        let expected = [
            ("tools-1", "gateway", "running"),
            ("tools-1/github", "backend", "ready"),
            ("tools-1/files", "backend", "backoff"),
        ];
        assert_eq!(told, expected);
        assert_eq!((rows[1].in_flight, rows[2].next_try_s), (Some(2), Some(4.0)));
        assert_eq!(rows[1].words, ["now"], "not the last words of the one before it");
    }

    #[test]
    fn waits_are_counted_down_between_two_questions() {
        let mut story = Story::new();
        story.survey(&[Row { next_try_s: Some(4.0), ..row("a", "mcp") }]);
        let row = story.board.rows[0].clone();
        assert_eq!(story.board.left(&row, story.now + Duration::from_millis(1500)), Some(2.5));
        assert_eq!(story.board.left(&row, story.now + Duration::from_secs(9)), Some(0.0));
    }

    #[test]
    fn news_grow_old() {
        let mut story = Story::new();
        story.board.handle(Event::Done { id: "x".into(), result: Ok("done".into()) }, story.now);
        assert!(story.board.news.is_some());
        story.board.handle(Event::TimePassed, story.now + NEWS_MAX);
        assert!(story.board.news.is_none());
    }
}
