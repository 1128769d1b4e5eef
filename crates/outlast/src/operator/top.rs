//! The driver of `outlast top`: one loop for the terminal, the keys, the instances and time. The board decides.

use std::{
    env,
    io::{self, IsTerminal},
    path::PathBuf,
    process::ExitCode,
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

use clap::CommandFactory;
use outlast_control::{
    client::{self, Found},
    cluster::ClusterState,
    find,
    method::{Method, Restart, Stop},
    registry::{Entry, Registry},
};
use outlast_core::count::count;
use outlast_os as os;
use ratatui::{
    Terminal,
    backend::CrosstermBackend,
    crossterm::{
        event, execute,
        terminal::{BeginSynchronizedUpdate, EndSynchronizedUpdate},
    },
    layout::{Position, Rect},
};
use serde::Serialize;
use serde_json::{Value, json};

pub(crate) mod board;
pub(crate) mod screen;

use self::{
    board::{Action, Board, Event, LOG_LINES_MAX, Row},
    screen::Look,
};
use crate::{
    cli::{
        self,
        full_screen::FullScreen,
        report::{self, Report},
        table::{self, Column, Yield},
    },
    operator::{
        cluster, history,
        instances::{self, Target},
    },
};

/// How often all instances are asked for their state.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// How long all of them together may take to answer.
const SURVEY_MAX: Duration = Duration::from_millis(900);
/// How often countdowns are redrawn.
const DRAW_EVERY: Duration = Duration::from_millis(250);

/// Messages of the threads to the loop.
enum Message {
    Board(Event),
    /// The size has changed; drawing reads the new one.
    Resized,
    /// A signal was received, or the terminal is gone.
    Stopped,
}

pub(crate) fn top(arguments: &cli::Top) -> Result<ExitCode, Report> {
    let registry = find::registry()?;
    let is_live = !arguments.once && io::stdout().is_terminal() && io::stdin().is_terminal();
    if arguments.cluster && (arguments.json || !is_live) {
        return cluster::top_once(arguments);
    }
    if arguments.json {
        let found = client::survey(&registry, SURVEY_MAX);
        return instances::print_json(&format!("{}\n", instances::pretty(&in_json(&found))));
    }
    if !is_live {
        let found = client::survey(&registry, SURVEY_MAX);
        return instances::print(&in_words(&found, table::room()));
    }
    let (source, board) = if arguments.cluster {
        // A mistake is reported before the screen is taken.
        let (entry, state, _) = cluster::ask_state(arguments.id.as_deref())?;
        (Source::Cluster(Box::new(entry)), Board { cluster: Some(state.name), ..Board::default() })
    } else {
        (Source::Local(registry), Board::default())
    };
    let next = watch(&source, board)?;
    match next {
        Next::Leave => Ok(ExitCode::SUCCESS),
        Next::Attach(id) => attach(&id),
    }
}

/// Where the rows come from, and where requests go.
#[derive(Debug, Clone)]
enum Source {
    /// All instances of this user.
    Local(Registry),
    /// The gateway that reports for its cluster.
    Cluster(Box<Entry>),
}

impl Source {
    fn survey(&self) -> Event {
        match self {
            Source::Local(registry) => Event::Surveyed(Row::all(&client::survey(registry, SURVEY_MAX))),
            Source::Cluster(entry) => {
                match instances::ask_plainly(entry, &Method::ClusterState, Some(find::ANSWER_MAX)) {
                    Ok(state) => Event::Surveyed(cluster::board_rows(&ClusterState::read(&state))),
                    Err(error) => Event::SurveyFailed(format!("{} does not report: {error}", entry.id)),
                }
            }
        }
    }

    /// Sends one request for a row. A backend is reached through its gateway.
    fn do_to(&self, id: &str, method: &Method) -> Result<String, String> {
        let (owner, backend) = match id.split_once('/') {
            Some((owner, backend)) => (owner, Some(backend.to_owned())),
            None => (id, None),
        };
        match self {
            Source::Local(registry) => match registry.read().into_iter().find(|entry| entry.id == owner) {
                Some(entry) => instances::do_to(&Target { entry, backend }, method),
                None => Err(format!("{id} is gone")),
            },
            Source::Cluster(entry) => cluster::restart_line(&Target { entry: (**entry).clone(), backend }, method),
        }
    }
}

enum Next {
    Leave,
    Attach(String),
}

fn watch(source: &Source, board: Board) -> Result<Next, Report> {
    let failed = |error: io::Error| Report::new(report::FAILURE, "cannot use the terminal").because(error);
    let (tell, heard) = mpsc::channel();
    listen_for_stops(tell.clone()).map_err(failed)?;
    let screen = FullScreen::enter(true).map_err(failed)?;
    let (ask, asked) = mpsc::channel();
    ask_around(source.clone(), asked, tell.clone()).map_err(failed)?;
    listen_for_keys(tell.clone()).map_err(failed)?;
    let mut terminal = Terminal::new(CrosstermBackend::new(io::stdout())).map_err(failed)?;
    let is_refused = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let top = Top { board, look: Look { has_colours: !is_refused }, source, tell, ask };
    top.run(&heard, &screen, &mut terminal).map_err(failed)
}

struct Top<'a> {
    board: Board,
    look: Look,
    source: &'a Source,
    tell: Sender<Message>,
    /// Triggers a survey at once, before the next one is due.
    ask: Sender<()>,
}

impl Top<'_> {
    fn run(
        mut self,
        heard: &Receiver<Message>,
        screen: &FullScreen,
        terminal: &mut Terminal<CrosstermBackend<io::Stdout>>,
    ) -> io::Result<Next> {
        loop {
            // The terminal shows each frame at once (synchronized update).
            execute!(io::stdout(), BeginSynchronizedUpdate)?;
            terminal.draw(|frame| screen::draw(&self.board, self.look, frame, Instant::now()))?;
            execute!(io::stdout(), EndSynchronizedUpdate)?;
            let event = match heard.recv_timeout(DRAW_EVERY) {
                Ok(Message::Board(event)) => event,
                Ok(Message::Resized) => continue,
                Err(RecvTimeoutError::Timeout) => Event::TimePassed,
                Ok(Message::Stopped) | Err(RecvTimeoutError::Disconnected) => return Ok(Next::Leave),
            };
            for action in self.board.handle(event, Instant::now()) {
                match action {
                    Action::Leave => return Ok(Next::Leave),
                    Action::Attach(id) => return Ok(Next::Attach(id)),
                    Action::Suspend => {
                        screen.hide()?;
                        os::suspend();
                        screen.show()?;
                        // A resize makes ratatui redraw everything.
                        let size = terminal.size()?;
                        terminal.resize(Rect::from((Position::ORIGIN, size)))?;
                    }
                    Action::ReadLog(id) => self.read_log(id),
                    Action::Restart(id) => {
                        let reason = Some("requested in outlast top".to_owned());
                        let cluster = matches!(self.source, Source::Cluster(_));
                        self.do_to(id, Method::Restart(Restart { reason, cluster, ..Restart::default() }));
                    }
                    Action::Resume(id) => self.do_to(id, Method::Resume),
                    Action::Stop { id, force } => self.do_to(id, Method::Stop(Stop { graceful: Some(!force) })),
                }
            }
        }
    }

    /// On its own thread, because a restart takes as long as a build and a handshake.
    fn do_to(&self, id: String, method: Method) {
        let (tell, ask, source) = (self.tell.clone(), self.ask.clone(), self.source.clone());
        let failed = (tell.clone(), id.clone());
        let doing = thread::Builder::new().spawn(move || {
            let result = source.do_to(&id, &method);
            // If this fails, the loop has ended.
            let _ = tell.send(Message::Board(Event::Done { id, result }));
            let _ = ask.send(());
        });
        if let Err(error) = doing {
            let (tell, id) = failed;
            let result = Err(format!("no thread can be started: {}", report::plain(&error.to_string())));
            let _ = tell.send(Message::Board(Event::Done { id, result }));
        }
    }

    fn read_log(&self, id: String) {
        let path = self.board.rows.iter().find(|row| row.id == id).and_then(|row| row.log.clone());
        let lines = match path {
            Some(path) => last_lines(path),
            None => Err(format!("{id} has ended; `outlast logs {id}` shows its log")),
        };
        let _ = self.tell.send(Message::Board(Event::LogRead { id, lines }));
    }
}

fn last_lines(path: PathBuf) -> Result<Vec<String>, String> {
    let text = history::last_lines(&path, LOG_LINES_MAX)
        .map_err(|error| format!("cannot read {}: {}", path.display(), report::plain(&error.to_string())))?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// Surveys all instances repeatedly, until the loop has ended.
fn ask_around(source: Source, asked: Receiver<()>, tell: Sender<Message>) -> io::Result<()> {
    let survey = thread::Builder::new().spawn(move || {
        loop {
            if tell.send(Message::Board(source.survey())).is_err() {
                return;
            }
            match asked.recv_timeout(ASK_EVERY) {
                Err(RecvTimeoutError::Disconnected) => return,
                Ok(()) | Err(RecvTimeoutError::Timeout) => {}
            }
        }
    });
    survey.map(drop)
}

fn listen_for_keys(tell: Sender<Message>) -> io::Result<()> {
    let keys = thread::Builder::new().spawn(move || {
        loop {
            let heard = match event::read() {
                Ok(event::Event::Key(key)) if key.kind != event::KeyEventKind::Release => {
                    Message::Board(Event::Pressed(key))
                }
                Ok(event::Event::Resize(..)) => Message::Resized,
                Ok(_) => continue,
                Err(_) => Message::Stopped,
            };
            let is_over = matches!(heard, Message::Stopped);
            if tell.send(heard).is_err() || is_over {
                return;
            }
        }
    });
    keys.map(drop)
}

/// A signal is an event of the loop, so that the terminal is restored before the exit.
fn listen_for_stops(tell: Sender<Message>) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let mut stops = {
        let _inside = runtime.enter();
        os::Stops::begin()?
    };
    let listening = thread::Builder::new().spawn(move || {
        runtime.block_on(std::future::poll_fn(|cx| stops.poll_next(cx)));
        let _ = tell.send(Message::Stopped);
    });
    listening.map(drop)
}

/// Replaces this process by `outlast attach`.
fn attach(id: &str) -> Result<ExitCode, Report> {
    if cli::Cli::command().find_subcommand("attach").is_none() {
        return Err(Report::new(report::FAILURE, "this outlast cannot attach to a session")
            .hint(format!("`outlast inject {id} TEXT --enter` types into it, `outlast logs {id}` shows its log")));
    }
    let exe = env::current_exe()
        .map_err(|error| Report::new(report::FAILURE, "the path of outlast itself is unknown").because(error))?;
    let error = os::become_program(&exe, &["attach", id]);
    Err(Report::new(report::FAILURE, format!("cannot attach to `{id}`")).because(error))
}

/// One object of `top --json`: that of `ps --json`, and the members that only `top` has.
#[derive(Serialize)]
struct TopRow {
    #[serde(flatten)]
    row: Value,
    health: Option<String>,
    last_words: Option<String>,
    muted: Vec<String>,
    ends: Vec<End>,
}

#[derive(Serialize)]
struct End {
    seconds_ago: f64,
    crashed: bool,
}

fn in_json(found: &[Found]) -> Value {
    let rows = instances::in_json(found).into_iter().zip(Row::all(found));
    let rows = rows.map(|(row, shown)| TopRow {
        row,
        health: shown.health.clone(),
        last_words: last_words(&shown),
        muted: shown.muted.clone(),
        ends: shown
            .ends
            .iter()
            .map(|(seconds_ago, crashed)| End { seconds_ago: *seconds_ago, crashed: *crashed })
            .collect(),
    });
    json!(rows.collect::<Vec<TopRow>>())
}

fn last_words(row: &Row) -> Option<String> {
    row.words.iter().rev().find(|line| !line.trim().is_empty()).cloned()
}

/// One plain table, for output that is not a terminal.
fn in_words(found: &[Found], width: Option<usize>) -> String {
    if found.is_empty() {
        return "Nothing runs under outlast.\n".to_owned();
    }
    let column = |title, is_number, yields| Column { title, is_number, yields };
    let columns = [
        column("ID", false, Yield::Last(12)),
        column("STATE", false, Yield::End(12, 12)),
        column("UPTIME", true, Yield::Late(3)),
        column("GEN", true, Yield::Soon(1)),
        column("RESTARTS", true, Yield::Late(4)),
        column("CALLS/S", true, Yield::Last(7)),
        column("P50", true, Yield::Last(5)),
        column("FLIGHT", true, Yield::Late(2)),
        column("NEXT", true, Yield::Late(1)),
        column("LAST-EXIT", false, Yield::End(12, 9)),
        column("LAST-WORDS", false, Yield::Cut(20, 10)),
    ];
    let rows: Vec<Vec<String>> = Row::all(found)
        .into_iter()
        .map(|row| {
            let (words, state) = (last_words(&row), row.shown_state());
            let or_nothing = |text: Option<String>| text.unwrap_or_else(|| table::NOTHING.to_owned());
            vec![
                row.id,
                state
                    + &match row.muted.len() {
                        0 => String::new(),
                        muted => format!(", {} muted", count(muted, "file", "files")),
                    },
                or_nothing(row.uptime_s.map(instances::in_short)),
                or_nothing(row.generation.map(|generation| generation.to_string())),
                or_nothing(row.restarts.map(|restarts| restarts.to_string())),
                or_nothing(row.calls_per_s.map(screen::rate_in_words)),
                or_nothing(row.p50_ms.map(screen::ms_in_words)),
                or_nothing(row.in_flight.map(|count| count.to_string())),
                or_nothing(row.next_try_s.map(instances::in_short)),
                or_nothing(row.last_exit),
                or_nothing(words),
            ]
        })
        .collect();
    table::lines(&columns, &rows, width).into_iter().map(|line| line + "\n").collect()
}
