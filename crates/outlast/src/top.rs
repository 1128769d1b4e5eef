//! Drives the board: `outlast top`. The terminal, the keys, the instances and time, in one loop.

use std::{
    env,
    io::{self, IsTerminal, Write},
    panic,
    path::PathBuf,
    process::ExitCode,
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

use clap::CommandFactory;
use outlast_core::count::count;
use ratatui::{
    Terminal,
    backend::CrosstermBackend,
    crossterm::{
        cursor, event, execute,
        terminal::{
            BeginSynchronizedUpdate, EndSynchronizedUpdate, EnterAlternateScreen, LeaveAlternateScreen,
            disable_raw_mode, enable_raw_mode,
        },
    },
    layout::{Position, Rect},
};
use serde_json::{Value, json};

pub mod board;
pub mod screen;

use self::{
    board::{Action, Board, Event, LOG_LINES_MAX, Row},
    screen::Look,
};
use crate::{
    cli,
    control::{
        client::{self, Found},
        registry::Registry,
    },
    history, instances, os,
    report::{self, Report},
    table::{self, Column, Yield},
};

/// How often everybody is asked.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// How long all of them together may take to answer.
const SURVEY_MAX: Duration = Duration::from_millis(900);
/// How often what is counted down is drawn anew.
const DRAW_EVERY: Duration = Duration::from_millis(250);

/// What the threads around the loop tell it.
enum Heard {
    Board(Event),
    /// The size is another one; drawing finds out which.
    Resized,
    /// A signal, or a terminal that is gone.
    Stopped,
}

pub fn top(arguments: &cli::Top) -> Result<ExitCode, Report> {
    let registry = instances::registry()?;
    if arguments.json {
        let found = client::survey(&registry, SURVEY_MAX);
        return instances::print_json(&format!("{}\n", instances::pretty(&in_json(&found))));
    }
    if arguments.once || !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        let found = client::survey(&registry, SURVEY_MAX);
        return instances::print(&in_words(&found, table::room()));
    }
    let next = watch(&registry)?;
    match next {
        Next::Leave => Ok(ExitCode::SUCCESS),
        Next::Attach(id) => attach(&id),
    }
}

enum Next {
    Leave,
    Attach(String),
}

fn watch(registry: &Registry) -> Result<Next, Report> {
    let failed = |error: io::Error| Report::new(report::FAILURE, "cannot use the terminal").because(error);
    let (tell, heard) = mpsc::channel();
    listen_for_stops(tell.clone()).map_err(failed)?;
    let screen = Screen::enter().map_err(failed)?;
    let (ask, asked) = mpsc::channel();
    ask_around(registry.clone(), asked, tell.clone()).map_err(failed)?;
    listen_for_keys(tell.clone()).map_err(failed)?;
    let mut terminal = Terminal::new(CrosstermBackend::new(io::stdout())).map_err(failed)?;
    let is_refused = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let top = Top { board: Board::default(), look: Look { has_colours: !is_refused }, registry, tell, ask };
    let next = top.run(&heard, &mut terminal);
    drop(screen);
    next.map_err(failed)
}

struct Top<'a> {
    board: Board,
    look: Look,
    registry: &'a Registry,
    tell: Sender<Heard>,
    /// Asks everybody at once, without waiting for the next time.
    ask: Sender<()>,
}

impl Top<'_> {
    fn run(
        mut self,
        heard: &Receiver<Heard>,
        terminal: &mut Terminal<CrosstermBackend<io::Stdout>>,
    ) -> io::Result<Next> {
        loop {
            // The terminal shows the whole of it at once, or nothing of it yet.
            execute!(io::stdout(), BeginSynchronizedUpdate)?;
            terminal.draw(|frame| screen::draw(&self.board, self.look, frame, Instant::now()))?;
            execute!(io::stdout(), EndSynchronizedUpdate)?;
            let event = match heard.recv_timeout(DRAW_EVERY) {
                Ok(Heard::Board(event)) => event,
                Ok(Heard::Resized) => continue,
                Err(RecvTimeoutError::Timeout) => Event::TimePassed,
                Ok(Heard::Stopped) | Err(RecvTimeoutError::Disconnected) => return Ok(Next::Leave),
            };
            for action in self.board.handle(event, Instant::now()) {
                match action {
                    Action::Leave => return Ok(Next::Leave),
                    Action::Attach(id) => return Ok(Next::Attach(id)),
                    Action::Suspend => {
                        Screen::show(false)?;
                        os::suspend();
                        Screen::show(true)?;
                        // As if it were another size: all of it is drawn anew.
                        let size = terminal.size()?;
                        terminal.resize(Rect::from((Position::ORIGIN, size)))?;
                    }
                    Action::ReadLog(id) => self.read_log(id),
                    Action::Restart(id) => self.do_to(id, "restart", json!({"reason": "asked for in outlast top"})),
                    Action::Resume(id) => self.do_to(id, "resume", json!({})),
                    Action::Stop { id, force } => self.do_to(id, "stop", json!({"graceful": !force})),
                }
            }
        }
    }

    /// In a thread of its own: a restart takes as long as a build and a handshake do.
    fn do_to(&self, id: String, method: &'static str, mut params: serde_json::Value) {
        let (tell, ask) = (self.tell.clone(), self.ask.clone());
        // One behind a gateway is reached through it.
        let (owner, backend) = match id.split_once('/') {
            Some((owner, backend)) => (owner, Some(backend)),
            None => (id.as_str(), None),
        };
        if let Some(backend) = backend {
            params["backend"] = backend.into();
        }
        let entry = self.registry.read().into_iter().find(|entry| entry.id == owner);
        let failed = (tell.clone(), id.clone());
        let doing = thread::Builder::new().spawn(move || {
            let result = match entry {
                Some(entry) => instances::do_to(&entry, method, params),
                None => Err(format!("{id} is gone")),
            };
            // Nobody is there any more to be told, if this fails.
            let _ = tell.send(Heard::Board(Event::Done { id, result }));
            let _ = ask.send(());
        });
        if let Err(error) = doing {
            let (tell, id) = failed;
            let result = Err(format!("no thread can be started: {}", report::plain(&error.to_string())));
            let _ = tell.send(Heard::Board(Event::Done { id, result }));
        }
    }

    fn read_log(&self, id: String) {
        let path = self.board.rows.iter().find(|row| row.id == id).and_then(|row| row.log.clone());
        let lines = match path {
            Some(path) => last_lines(path),
            None => Err(format!("{id} is gone; `outlast logs {id}` shows what it left")),
        };
        let _ = self.tell.send(Heard::Board(Event::LogRead { id, lines }));
    }
}

fn last_lines(path: PathBuf) -> Result<Vec<String>, String> {
    let text = history::last_lines(&path, LOG_LINES_MAX)
        .map_err(|error| format!("cannot read {}: {}", path.display(), report::plain(&error.to_string())))?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// Asks everybody, again and again, until nobody listens.
fn ask_around(registry: Registry, asked: Receiver<()>, tell: Sender<Heard>) -> io::Result<()> {
    let survey = thread::Builder::new().spawn(move || {
        loop {
            let rows = Row::all(&client::survey(&registry, SURVEY_MAX));
            if tell.send(Heard::Board(Event::Surveyed(rows))).is_err() {
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

fn listen_for_keys(tell: Sender<Heard>) -> io::Result<()> {
    let keys = thread::Builder::new().spawn(move || {
        loop {
            let heard = match event::read() {
                Ok(event::Event::Key(key)) if key.kind != event::KeyEventKind::Release => {
                    Heard::Board(Event::Pressed(key))
                }
                Ok(event::Event::Resize(..)) => Heard::Resized,
                Ok(_) => continue,
                Err(_) => Heard::Stopped,
            };
            let is_over = matches!(heard, Heard::Stopped);
            if tell.send(heard).is_err() || is_over {
                return;
            }
        }
    });
    keys.map(drop)
}

/// A signal must find the terminal restored, so it is heard like a key.
fn listen_for_stops(tell: Sender<Heard>) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let mut stops = {
        let _inside = runtime.enter();
        os::Stops::begin()?
    };
    let listening = thread::Builder::new().spawn(move || {
        runtime.block_on(std::future::poll_fn(|cx| stops.poll_next(cx)));
        let _ = tell.send(Heard::Stopped);
    });
    listening.map(drop)
}

/// The terminal while it is ours. It is given back when this is dropped, and when we panic.
struct Screen;

impl Screen {
    fn enter() -> io::Result<Screen> {
        let complain = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            let _ = Screen::show(false);
            complain(panic);
        }));
        Screen::show(true)?;
        Ok(Screen)
    }

    fn show(is_ours: bool) -> io::Result<()> {
        if is_ours {
            enable_raw_mode()?;
            execute!(io::stdout(), EnterAlternateScreen, cursor::Hide)
        } else {
            // Each of them is tried, whatever becomes of the others.
            let left = execute!(io::stdout(), EndSynchronizedUpdate, LeaveAlternateScreen, cursor::Show);
            let cooked = disable_raw_mode();
            io::stdout().flush()?;
            left.and(cooked)
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = Screen::show(false);
    }
}

/// Becomes `outlast attach`.
fn attach(id: &str) -> Result<ExitCode, Report> {
    if cli::Cli::command().find_subcommand("attach").is_none() {
        return Err(Report::new(report::FAILURE, "this outlast cannot attach to a session")
            .hint(format!("`outlast inject {id} TEXT --enter` types to it, `outlast logs {id}` shows its life")));
    }
    let exe = env::current_exe()
        .map_err(|error| Report::new(report::FAILURE, "where outlast itself lies is not known").because(error))?;
    let error = os::become_program(&exe, &["attach", id]);
    Err(Report::new(report::FAILURE, format!("cannot attach to `{id}`")).because(error))
}

/// What `ps` tells of each, and what only this shows.
fn in_json(found: &[Found]) -> Value {
    let rows = instances::in_json(found).into_iter().zip(Row::all(found));
    let rows = rows.map(|(mut row, shown)| {
        row["health"] = shown.health.as_deref().into();
        row["last_words"] = last_words(&shown).into();
        row["muted"] = shown.muted.clone().into();
        let ends = shown.ends.iter();
        row["ends"] = ends.map(|(ago, crashed)| json!({"seconds_ago": ago, "crashed": crashed})).collect();
        row
    });
    rows.collect()
}

fn last_words(row: &Row) -> Option<String> {
    row.words.iter().rev().find(|line| !line.trim().is_empty()).cloned()
}

/// One plain table, where there is no terminal to draw on.
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
