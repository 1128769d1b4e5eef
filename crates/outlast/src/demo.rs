//! `outlast demo`: the real program between a client and a server of the demo's own, and what the client sees. What
//! happens is decided in `story`.

mod screen;
mod server;
mod story;
mod sums;

use std::{
    env, fs,
    future::poll_fn,
    io::{self, BufRead, BufReader, IsTerminal, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};

use outlast_os as os;
use serde_json::json;
use tokio::{
    sync::mpsc,
    time::{sleep_until, timeout},
};

use crate::{
    cli::{
        self,
        report::{self, Report},
    },
    state::home,
};
use screen::{Lines, Screen};
use story::{Action, Event, Story};

pub(crate) use server::serve;

/// The time between two frames.
const FRAME: Duration = Duration::from_millis(40);
/// Lines from outlast in the queue; at the limit they are read later, and outlast waits (backpressure).
const HEARD_MAX: usize = 256;
/// How long outlast may take to exit after its stdin is closed; then it is killed, which its exit code shows.
const GOODBYE_MAX: Duration = Duration::from_secs(10);
/// How much of outlast's log is shown after a failure.
const LOG_LINES: usize = 12;

pub(crate) fn run(arguments: &cli::Demo) -> Result<ExitCode, Report> {
    tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .map_err(|error| cannot("start", error))?
        .block_on(show(arguments))
}

async fn show(arguments: &cli::Demo) -> Result<ExitCode, Report> {
    let mut stops = os::Stops::begin().map_err(|error| cannot("listen for signals", error))?;
    let stage = Stage::begin().map_err(|error| cannot("make a temporary directory", error))?;
    stage.load(story::FIRST).map_err(|error| cannot("write a file for its server", error))?;
    let mut relay = Relay::begin(&stage).map_err(|error| cannot("start outlast", error))?;
    let mut story = Story::new(relay.process.id(), Instant::now());
    let mut show = Show::begin(arguments).map_err(cannot_write)?;

    let played = play(&mut story, &stage, &mut relay, &mut show, &mut stops).await;
    let end = Instant::now();
    // In every case outlast exits before its directory is removed.
    let code = relay.end().await;
    if let Some(stop) = played.map_err(cannot_write)? {
        show.stop(stop).map_err(cannot_write)?;
        return Ok(ExitCode::from(u8::try_from(128 + stop.number).unwrap_or(report::FAILURE)));
    }
    match code {
        Ok(Some(0)) => {}
        Ok(code) => story.complaints.push(match code {
            Some(code) => format!("outlast ended with code {code}"),
            None => "outlast had to be killed".to_owned(),
        }),
        Err(error) => story.complaints.push(format!("the exit status of outlast is unknown: {error}")),
    }
    show.finish(&story, end).map_err(cannot_write)?;
    if story.complaints.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let log = stage.log_tail();
    let report = Report::new(report::FAILURE, "the demo did not run as expected")
        .because(story.complaints.join("\n"))
        .hint(format!("the cause is a bug of outlast or a very busy machine; the end of its log:\n{log}"));
    // Programs have the result from the sums.
    if arguments.json { Ok(report.print()) } else { Err(report) }
}

/// Runs until the story is over or interrupted. It fails only when nothing can be shown.
async fn play(
    story: &mut Story,
    stage: &Stage,
    relay: &mut Relay,
    show: &mut Show,
    stops: &mut os::Stops,
) -> io::Result<Option<os::Stop>> {
    let mut actions = story.begin();
    loop {
        let done = actions.into_iter().try_for_each(|action| act(action, stage, relay));
        if let Err(why) = done {
            // The story is over, and has no deadline.
            story.handle(Event::CouldNot(why), Instant::now());
        }
        if story.is_over() {
            return Ok(None);
        }
        let event = loop {
            show.update(story)?;
            tokio::select! {
                // Ctrl-C reaches outlast too: the request to stop is handled before its exit.
                biased;
                stop = poll_fn(|cx| stops.poll_next(cx)) => return Ok(Some(stop)),
                heard = relay.heard.recv() => {
                    break heard.map_or(Event::Ended, |(line, at)| Event::Heard { line, at });
                }
                () = until(story.deadline()) => break Event::TimePassed,
                () = until(show.next_frame()) => {}
            }
        };
        actions = story.handle(event, Instant::now());
    }
}

fn act(action: Action, stage: &Stage, relay: &mut Relay) -> Result<(), String> {
    match action {
        Action::Say(line) => relay.say(&line).map_err(|error| format!("outlast does not read its stdin: {error}")),
        Action::Load(code) => stage.load(code).map_err(|error| format!("the server's file cannot be written: {error}")),
        Action::Kill(pid) => os::kill_hard(pid).map_err(|error| format!("pid {pid} cannot be killed: {error}")),
    }
}

fn cannot(what: &str, error: io::Error) -> Report {
    Report::new(report::FAILURE, format!("the demo cannot {what}")).because(error)
}

fn cannot_write(error: io::Error) -> Report {
    cannot("write to stdout", error)
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

/// A directory for the server's file and for outlast's state. Dropping it removes it.
struct Stage(PathBuf);

impl Stage {
    fn begin() -> io::Result<Stage> {
        let dir = env::temp_dir().join(format!("outlast-demo-{:016x}", home::random()));
        fs::create_dir(&dir)?;
        Ok(Stage(dir))
    }

    fn dir(&self) -> &Path {
        &self.0
    }

    fn server_file(&self) -> PathBuf {
        self.0.join("server.json")
    }

    fn log_file(&self) -> PathBuf {
        self.0.join("outlast.log")
    }

    fn load(&self, code: &str) -> io::Result<()> {
        fs::write(self.server_file(), code)
    }

    fn log_tail(&self) -> String {
        let log = fs::read(self.log_file()).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// `outlast mcp`, as a client starts it.
struct Relay {
    process: Child,
    stdin: Option<ChildStdin>,
    heard: mpsc::Receiver<(String, Instant)>,
}

impl Relay {
    fn begin(stage: &Stage) -> io::Result<Relay> {
        let program = env::current_exe()?;
        let mut process = Command::new(&program)
            .args(["mcp", "--name", "demo", "--"])
            .arg(&program)
            .arg("demo-server")
            .arg(stage.server_file())
            .current_dir(stage.dir())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(stage.log_file())?)
            .spawn()?;
        let stdin = process.stdin.take();
        let stdout = process.stdout.take().expect("stdout was asked to be a pipe");
        let (tell, heard) = mpsc::channel(HEARD_MAX);
        thread::Builder::new().name("outlast-demo".into()).spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { break };
                if tell.blocking_send((line, Instant::now())).is_err() {
                    break;
                }
            }
        })?;
        Ok(Relay { process, stdin, heard })
    }

    /// The pipe has room for all messages of the story, so this does not block.
    fn say(&mut self, line: &str) -> io::Result<()> {
        let stdin = self.stdin.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        stdin.write_all(format!("{line}\n").as_bytes())
    }

    /// Closes stdin, as a client does. Returns the exit code, unless it took too long.
    async fn end(&mut self) -> io::Result<Option<i32>> {
        self.stdin = None;
        let goodbye = async { while self.heard.recv().await.is_some() {} };
        if timeout(GOODBYE_MAX, goodbye).await.is_err() {
            self.process.kill()?;
        }
        // Its stdout is closed, so it is about to exit.
        Ok(self.process.wait()?.code())
    }
}

/// The output for people.
enum Show {
    Picture {
        screen: Screen,
        next: Instant,
    },
    Plain(Lines),
    /// Nothing before the sums.
    Sums,
}

impl Show {
    fn begin(arguments: &cli::Demo) -> io::Result<Show> {
        if arguments.json {
            return Ok(Show::Sums);
        }
        let is_dumb = env::var_os("TERM").is_some_and(|term| term == "dumb");
        if arguments.plain || is_dumb || !io::stdout().is_terminal() || os::terminal_size().is_none() {
            return Ok(Show::Plain(Lines::default()));
        }
        let colour = env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Ok(Show::Picture { screen: Screen::begin(colour)?, next: Instant::now() })
    }

    fn next_frame(&self) -> Option<Instant> {
        match self {
            Show::Picture { next, .. } => Some(*next),
            Show::Plain(_) | Show::Sums => None,
        }
    }

    fn update(&mut self, story: &Story) -> io::Result<()> {
        match self {
            Show::Picture { screen, next } => {
                let now = Instant::now();
                if *next <= now {
                    *next = now + FRAME;
                    screen.draw(story, now, size())?;
                }
                Ok(())
            }
            Show::Plain(lines) => print(&lines.next(story)),
            Show::Sums => Ok(()),
        }
    }

    fn finish(&mut self, story: &Story, now: Instant) -> io::Result<()> {
        match self {
            Show::Picture { screen, .. } => screen.finish(story, now, size()),
            Show::Plain(lines) => print(&format!("{}\n{}", lines.next(story), lines.finish(story))),
            Show::Sums => print(&format!("{:#}\n", sums::in_json(story, now))),
        }
    }

    fn stop(&mut self, stop: os::Stop) -> io::Result<()> {
        if let Show::Picture { screen, .. } = self {
            screen.leave()?;
        }
        match self {
            Show::Sums => print(&format!("{:#}\n", json!({"stopped_by": stop.name}))),
            _ => print(&format!("\nstopped by {}\n", stop.name)),
        }
    }
}

fn size() -> (usize, usize) {
    os::terminal_size().map_or((80, 24), |(columns, rows)| (columns.into(), rows.into()))
}

fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}
