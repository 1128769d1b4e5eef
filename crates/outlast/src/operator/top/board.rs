//! The state machine of `outlast top`: the rows, the selected one, and what a key does in each mode. It neither draws
//! nor sends requests.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use outlast_control::{answer::State, client::Found};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use crate::operator::instances;

/// How long a message stays in the last line.
const NEWS_MAX: Duration = Duration::from_secs(8);
/// How many lines of a log are shown; `outlast logs` shows all of it.
pub(crate) const LOG_LINES_MAX: usize = 1000;

/// One instance, as it reported itself.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Row {
    pub id: String,
    pub kind: String,
    pub state: String,
    /// For a session: the health that results from its crashes.
    pub health: Option<String>,
    pub pid: Option<u64>,
    pub uptime_s: Option<f64>,
    pub generation: Option<u64>,
    pub restarts: Option<u64>,
    pub calls_per_s: Option<f64>,
    pub p50_ms: Option<f64>,
    pub in_flight: Option<u64>,
    /// The server does not respond, and the age of its oldest request.
    pub stalled: bool,
    pub oldest_request_s: Option<f64>,
    pub next_try_s: Option<f64>,
    pub last_exit: Option<String>,
    /// Why the last reload failed, if the server still runs the old code.
    pub reload_failure: Option<String>,
    /// How long ago each of the last exits was, and whether it was a crash.
    pub ends: Vec<(f64, bool)>,
    /// Watched files that cause no reload at present.
    pub muted: Vec<String>,
    /// The last lines of its stderr.
    pub words: Vec<String>,
    pub cwd: String,
    pub command: String,
    pub log: Option<std::path::PathBuf>,
    /// Of `top --cluster`.
    pub of_cluster: Option<OfCluster>,
}

/// What a replica or a backend of a cluster shows beside its state. Empty texts for what it does not have.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct OfCluster {
    /// Of a backend; for requests.
    pub backend: Option<String>,
    pub placement: String,
    pub lease_s: Option<f64>,
    pub sessions: String,
    pub share: String,
    pub backlog: Option<u64>,
    /// The lines of the detail pane: a title of at most 7 letters, and a text.
    pub facts: Vec<(&'static str, String)>,
}

impl Row {
    /// Each instance, followed by its backends if it is a gateway.
    pub(crate) fn all(found: &[Found]) -> Vec<Row> {
        let with_backends = |found: &Found| {
            let row = Row::of(found);
            let state = found.state.as_ref().map(State::read).unwrap_or_default();
            let below = state.backends.into_iter().flatten().map(|state| Row {
                id: format!("{}/{}", row.id, state.name),
                kind: "backend".to_owned(),
                cwd: row.cwd.clone(),
                command: state.command.clone(),
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
            ..Row::said(found.state.as_ref().map(State::read).unwrap_or_default())
        }
    }

    /// A row from the reported state.
    fn said(state: State) -> Row {
        let last_exit = state.last_exit_text().map(str::to_owned);
        let reload_failure = state.failed_reload().map(|last| last.error.clone());
        let stderr = state.last_stderr.as_deref().unwrap_or(&state.stderr_tail);
        Row {
            words: stderr.lines().map(str::to_owned).collect(),
            state: state.state.unwrap_or_else(|| instances::UNRESPONSIVE.to_owned()),
            health: state.health.filter(|health| health != "healthy"),
            pid: state.pid,
            uptime_s: state.uptime_s,
            generation: state.generation,
            restarts: state.restarts,
            calls_per_s: state.calls_per_s,
            p50_ms: state.p50_ms,
            in_flight: state.in_flight,
            stalled: state.stalled,
            oldest_request_s: state.oldest_request_s,
            next_try_s: state.next_try_s,
            last_exit,
            reload_failure,
            ends: state.last_exits.iter().filter_map(|end| Some((end.seconds_ago?, end.crashed))).collect(),
            muted: state.muted,
            ..Row::default()
        }
    }

    /// The state in one word; a server that does not respond is `stalled`.
    pub(crate) fn short_state(&self) -> &str {
        if self.stalled { "stalled" } else { &self.state }
    }

    /// The state, and other problems of the instance.
    pub(crate) fn shown_state(&self) -> String {
        let suffix = match (&self.reload_failure, self.stalled) {
            (_, true) => instances::STALLED,
            (Some(_), _) => instances::RELOAD_FAILED,
            (None, false) => "",
        };
        format!("{}{suffix}", self.state)
    }

    /// Whether the row matches a typed filter.
    fn holds(&self, filter: &str) -> bool {
        let filter = filter.to_lowercase();
        [&self.id, &self.kind, &self.state, &self.cwd, &self.command]
            .iter()
            .any(|text| text.to_lowercase().contains(&filter))
    }
}

#[derive(Debug)]
pub(crate) enum Event {
    /// All instances were asked for their state; these are the rows.
    Surveyed(Vec<Row>),
    /// The gateway that reports for its cluster did not answer. The old rows stay.
    SurveyFailed(String),
    Pressed(KeyEvent),
    /// A request has succeeded or failed.
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
pub(crate) enum Action {
    Restart(String),
    Resume(String),
    Stop {
        id: String,
        force: bool,
    },
    Attach(String),
    ReadLog(String),
    /// Stop `outlast top` and return to the shell, as Ctrl-Z does.
    Suspend,
    Leave,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Mode {
    List,
    /// A filter is being typed.
    Filter,
    Help,
    /// The user is asked to confirm a stop.
    Sure {
        id: String,
        force: bool,
    },
    Log(Log),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Log {
    pub id: String,
    pub lines: Vec<String>,
    /// How many lines above the end are shown; at 0 the view follows the log.
    pub up: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StatusLine {
    pub words: String,
    pub is_bad: bool,
    until: Instant,
}

#[derive(Debug)]
pub(crate) struct Board {
    /// The name of the cluster with `--cluster`.
    pub cluster: Option<String>,
    pub rows: Vec<Row>,
    /// When the instances were last asked; `None` before the first time.
    pub asked: Option<Instant>,
    /// By id, because rows above it appear and disappear.
    pub chosen: Option<String>,
    pub filter: String,
    pub mode: Mode,
    pub news: Option<StatusLine>,
    /// Requests that are not answered yet, by instance.
    pub busy: BTreeMap<String, &'static str>,
}

impl Default for Board {
    fn default() -> Board {
        Board {
            cluster: None,
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
    pub(crate) fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Surveyed(rows) => {
                self.rows = rows;
                self.asked = Some(now);
                self.choose_a_row();
                match &self.mode {
                    Mode::Log(log) => vec![Action::ReadLog(log.id.clone())],
                    _ => Vec::new(),
                }
            }
            Event::SurveyFailed(why) => {
                self.say(why, true, now);
                Vec::new()
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

    /// The rows that match the filter.
    pub(crate) fn shown(&self) -> Vec<&Row> {
        self.rows.iter().filter(|row| row.holds(&self.filter)).collect()
    }

    pub(crate) fn chosen_row(&self) -> Option<&Row> {
        self.shown().into_iter().find(|row| Some(&row.id) == self.chosen.as_ref())
    }

    /// Seconds until the next start attempt: what was left at the last survey, less the time since.
    pub(crate) fn left(&self, row: &Row, now: Instant) -> Option<f64> {
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
                self.choose_a_row();
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

    /// The keys that act on the selected instance.
    fn pressed_for_one(&mut self, key: KeyCode, now: Instant) -> Vec<Action> {
        let Some(row) = self.chosen_row().cloned() else { return Vec::new() };
        let id = row.id.clone();
        match (key, &row.of_cluster) {
            (KeyCode::Char('r'), Some(OfCluster { backend: None, .. })) => {
                self.say(format!("{id} is a replica: select a backend to restart it"), true, now);
                return Vec::new();
            }
            (KeyCode::Char('r'), _) | (_, None) => {}
            (KeyCode::Char('s' | 'K' | 'u' | 'a' | 'l') | KeyCode::Enter, Some(_)) => {
                self.say("with --cluster only a restart is possible".to_owned(), true, now);
                return Vec::new();
            }
            _ => return Vec::new(),
        }
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
                self.say(format!("{id} has no log"), true, now);
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
        self.choose_a_row();
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
            // Lines that are appended do not move a view that was scrolled up.
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

    /// Selects a row whenever there is a row.
    fn choose_a_row(&mut self) {
        if self.chosen_row().is_none() {
            self.chosen = self.shown().first().map(|row| row.id.clone());
        }
    }

    fn say(&mut self, words: String, is_bad: bool, now: Instant) {
        self.news = Some(StatusLine { words, is_bad, until: now + NEWS_MAX });
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
            self.board.chosen.as_deref().unwrap_or("none")
        }
    }

    #[test]
    fn the_selection_stays_while_the_list_changes() {
        let mut story = Story::new();
        assert_eq!(story.chosen(), "weather-1");
        story.press("↓");
        assert_eq!(story.chosen(), "github-2");
        story.survey(&[row("new", "mcp"), row("github-2", "mcp")]);
        assert_eq!(story.chosen(), "github-2");
        story.survey(&[row("new", "mcp")]);
        assert_eq!(story.chosen(), "new", "it is gone, and another one is there");
        story.survey(&[]);
        assert_eq!(story.chosen(), "none");
        assert_eq!(story.press("rsla↓↑"), [], "no instance is selected");
    }

    #[test]
    fn keys_act_on_the_selected_instance() {
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
    fn an_open_log_is_refreshed_until_it_is_closed() {
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
        assert_eq!(story.board.news, None, "the log is closed");
    }

    #[test]
    fn a_gateway_is_followed_by_its_backends() {
        use outlast_control::registry::Entry;
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
            program: None,
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
    fn only_backends_of_a_cluster_are_restarted() {
        let mut story = Story::new();
        story.board.cluster = Some("prod".into());
        let of_cluster =
            |backend: Option<&str>| Some(OfCluster { backend: backend.map(str::to_owned), ..OfCluster::default() });
        story.survey(&[
            Row { of_cluster: of_cluster(None), ..row("east-1", "gateway") },
            Row { of_cluster: of_cluster(Some("files")), ..row("east-1/files", "backend") },
        ]);
        assert_eq!(story.press("r"), []);
        let news = |story: &Story| story.board.news.as_ref().unwrap().words.clone();
        assert_eq!(news(&story), "east-1 is a replica: select a backend to restart it");
        assert_eq!(story.press("↓r"), [Action::Restart("east-1/files".into())]);
        assert_eq!(story.press("sKual⏎xy"), []);
        assert_eq!(news(&story), "with --cluster only a restart is possible");
        assert_eq!(story.board.mode, Mode::List);
        story.board.handle(Event::SurveyFailed("tools-1 did not answer".into()), story.now);
        assert_eq!((news(&story).as_str(), story.board.rows.len()), ("tools-1 did not answer", 2));
    }

    #[test]
    fn waits_are_counted_down_between_two_surveys() {
        let mut story = Story::new();
        story.survey(&[Row { next_try_s: Some(4.0), ..row("a", "mcp") }]);
        let row = story.board.rows[0].clone();
        assert_eq!(story.board.left(&row, story.now + Duration::from_millis(1500)), Some(2.5));
        assert_eq!(story.board.left(&row, story.now + Duration::from_secs(9)), Some(0.0));
    }

    #[test]
    fn messages_expire() {
        let mut story = Story::new();
        story.board.handle(Event::Done { id: "x".into(), result: Ok("done".into()) }, story.now);
        assert!(story.board.news.is_some());
        story.board.handle(Event::TimePassed, story.now + NEWS_MAX);
        assert!(story.board.news.is_none());
    }
}
