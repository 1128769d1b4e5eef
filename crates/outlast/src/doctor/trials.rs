//! Starts servers and says hello to each, several at a time, within a bound, and leaves nothing of them behind.

use std::{
    collections::VecDeque,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::time::{Sleep, sleep_until};

use super::attempt::{Answer, Attempt, Step};
use crate::{
    lines::{Line, Lines},
    os::{self, Household, News, Order, Sink, Source, Stdio},
    outbox::Outbox,
    report,
};

/// How many run at a time; the others wait for their turn.
const AT_ONCE_MAX: usize = 8;
/// How long a server may take to leave when its stdin is closed; then it is killed.
const LEAVE_MAX: Duration = Duration::from_secs(1);
/// How many of its last lines are kept to find the one that says what is wrong.
const STDERR_KEPT: usize = 40;
const STDERR_LINE_MAX: usize = 4 << 10;

/// What is to be started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trial {
    pub command: Vec<String>,
    pub cwd: std::path::PathBuf,
    pub env: Vec<(String, String)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Answers { answer: Answer, took: Duration },
    Broken { stage: Stage, why: String, stderr: Vec<String> },
}

/// How far a broken one came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    Start,
    Talk,
    /// It may have needed more time.
    Late,
}

/// How often progress is told while nothing changes.
const TICK: Duration = Duration::from_secs(1);

/// How far all trials are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    pub done: usize,
    /// The trials that run and have no outcome yet, by their place in the list.
    pub waiting: Vec<usize>,
}

/// The outcome of each, in their order. `tell` hears of progress at once and at least each second.
pub async fn run(
    household: &mut Household,
    trials: &[Trial],
    patience: Duration,
    tell: &mut dyn FnMut(&Progress),
) -> Vec<Outcome> {
    let runs = trials.iter().map(|_| None).collect();
    let told = Told { tell, last: None, next: Instant::now() };
    let mut all = All { household, trials, patience, runs, next: 0, timer: None, told };
    std::future::poll_fn(|cx| all.poll(cx)).await;
    let no_news = || Outcome::Broken {
        stage: Stage::Talk,
        why: "the process that keeps the children is gone".to_owned(),
        stderr: Vec::new(),
    };
    all.runs.into_iter().map(|run| run.and_then(|run| run.outcome).unwrap_or_else(no_news)).collect()
}

struct All<'a> {
    household: &'a mut Household,
    trials: &'a [Trial],
    patience: Duration,
    runs: Vec<Option<Run>>,
    next: usize,
    timer: Option<Pin<Box<Sleep>>>,
    told: Told<'a>,
}

struct Told<'a> {
    tell: &'a mut dyn FnMut(&Progress),
    last: Option<Progress>,
    next: Instant,
}

struct Run {
    attempt: Attempt,
    began: Instant,
    stdin: Option<Sink>,
    outbox: Outbox,
    stdout: Option<Source>,
    from_stdout: Lines,
    stderr: Option<Source>,
    from_stderr: Lines,
    last_words: VecDeque<String>,
    outcome: Option<Outcome>,
    /// When it is given up on, or, once there is an outcome, killed.
    until: Instant,
    is_gone: bool,
}

impl All<'_> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            self.start_more();
            let mut moved = false;
            while let Poll::Ready(news) = self.household.poll_news(cx) {
                if matches!(news, News::KeeperLost) {
                    return Poll::Ready(());
                }
                self.heard(news);
                moved = true;
            }
            for at in 0..self.runs.len() {
                moved |= self.poll_one(at, cx);
            }
            if self.next == self.trials.len() && self.runs.iter().flatten().all(|run| run.is_gone) {
                return Poll::Ready(());
            }
            self.tell();
            if !moved && !self.poll_time(cx) {
                return Poll::Pending;
            }
        }
    }

    fn tell(&mut self) {
        let runs = || self.runs.iter().enumerate().filter_map(|(at, run)| Some((at, run.as_ref()?)));
        let progress = Progress {
            done: runs().filter(|(_, run)| run.outcome.is_some()).count(),
            waiting: runs().filter(|(_, run)| run.outcome.is_none()).map(|(at, _)| at).collect(),
        };
        let now = Instant::now();
        if self.told.last.as_ref() != Some(&progress) || self.told.next <= now {
            (self.told.tell)(&progress);
            self.told.next = now + TICK;
            self.told.last = Some(progress);
        }
    }

    fn start_more(&mut self) {
        while self.next < self.trials.len()
            && self.runs.iter().flatten().filter(|run| !run.is_gone).count() < AT_ONCE_MAX
        {
            let at = self.next;
            self.next += 1;
            let trial = &self.trials[at];
            let order = Order {
                program: trial.command.first().cloned().unwrap_or_default().into(),
                args: trial.command.iter().skip(1).map(Into::into).collect(),
                cwd: trial.cwd.clone(),
                env: trial.env.iter().map(|(name, value)| (name.into(), value.into())).collect(),
                tag: format!("doctor-{}.{at}", std::process::id()),
                env_is_all: false,
                stdio: Stdio::Piped,
                sandbox: None,
            };
            let now = Instant::now();
            let mut run = Run::new(now, now + self.patience);
            match self.household.spawn(at as u64, &order) {
                Ok(pipes) => {
                    (run.stdin, run.stdout, run.stderr) = (pipes.stdin, pipes.stdout, pipes.stderr);
                    run.say(&run.attempt.hello());
                }
                Err(error) => run.could_not_start(&error),
            }
            self.runs[at] = Some(run);
        }
    }

    fn heard(&mut self, news: News) {
        match news {
            News::StartFailed { key, error } => {
                if let Some(run) = self.run(key) {
                    run.could_not_start(&error);
                }
            }
            News::Exited { key, exit } => {
                if let Some(run) = self.run(key) {
                    run.exited(exit);
                }
                self.household.sweep(key);
            }
            News::Swept { key } => {
                if let Some(run) = self.run(key) {
                    run.is_gone = true;
                }
            }
            News::Started { .. } | News::Stopped { .. } | News::Noticed(_) | News::KeeperLost => {}
        }
    }

    fn run(&mut self, key: u64) -> Option<&mut Run> {
        usize::try_from(key).ok().and_then(|at| self.runs.get_mut(at)).and_then(Option::as_mut)
    }

    fn poll_one(&mut self, at: usize, cx: &mut Context<'_>) -> bool {
        let Some(run) = &mut self.runs[at] else { return false };
        let mut moved = run.poll_stderr(cx) | run.poll_stdout(cx);
        moved |= run.flush(cx);
        let now = Instant::now();
        if run.is_gone || now < run.until {
            return moved;
        }
        if run.outcome.is_none() {
            let stderr = run.last_words();
            let why = format!("it did not answer within {} s", self.patience.as_secs_f64());
            run.end(Outcome::Broken { stage: Stage::Late, why, stderr });
        } else {
            run.until = now + LEAVE_MAX;
            self.household.signal(at as u64, os::Signal::Kill);
        }
        true
    }

    /// True if something became due.
    fn poll_time(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(soonest) = self.runs.iter().flatten().filter(|run| !run.is_gone).map(|run| run.until).min() else {
            return false;
        };
        let timer = self.timer.insert(Box::pin(sleep_until(soonest.min(self.told.next).into())));
        timer.as_mut().poll(cx).is_ready()
    }
}

impl Run {
    fn new(began: Instant, until: Instant) -> Run {
        Run {
            attempt: Attempt::default(),
            began,
            stdin: None,
            outbox: Outbox::default(),
            stdout: None,
            from_stdout: Lines::default(),
            stderr: None,
            from_stderr: Lines::in_pieces(STDERR_LINE_MAX),
            last_words: VecDeque::new(),
            outcome: None,
            until,
            is_gone: false,
        }
    }

    fn say(&mut self, line: &str) {
        self.outbox.put(Bytes::copy_from_slice(line.as_bytes()), None);
    }

    fn could_not_start(&mut self, error: &std::io::Error) {
        let why = format!("it cannot be started: {}", report::plain(&error.to_string()));
        self.end(Outcome::Broken { stage: Stage::Start, why, stderr: Vec::new() });
        self.is_gone = true;
    }

    fn exited(&mut self, exit: os::Exit) {
        while let Some(stderr) = &mut self.stderr
            && let Some(Ok(1..)) = stderr.read_now(self.from_stderr.room())
        {
            self.keep_words();
        }
        // What it said before it went counts.
        while let Some(stdout) = &mut self.stdout
            && let Some(Ok(1..)) = stdout.read_now(self.from_stdout.room())
        {
            self.heard_lines();
        }
        let how = match exit {
            os::Exit::Code(code) => format!("exit code {code}"),
            os::Exit::Signal(signal) => format!("signal {signal}"),
        };
        let stderr = self.last_words();
        self.end(Outcome::Broken {
            stage: Stage::Talk,
            why: format!("it ended with {how} before it answered"),
            stderr,
        });
    }

    /// The first outcome is the one. Its stdin is closed, and it has a moment to leave.
    fn end(&mut self, outcome: Outcome) {
        if self.outcome.is_none() {
            self.outcome = Some(outcome);
            self.until = Instant::now() + LEAVE_MAX;
        }
        self.stdin = None;
    }

    fn poll_stdout(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(stdout) = &mut self.stdout else { return false };
        let Poll::Ready(read) = stdout.poll_read(cx, self.from_stdout.room()) else { return false };
        match read {
            Ok(1..) => self.heard_lines(),
            // Its end says more than this does, and follows.
            Ok(0) | Err(_) => self.stdout = None,
        }
        true
    }

    fn heard_lines(&mut self) {
        while let Some(line) = self.from_stdout.next_line() {
            let Line::Whole(line) = line else { continue };
            if self.outcome.is_some() {
                continue;
            }
            match self.attempt.heard(&String::from_utf8_lossy(&line)) {
                Step::Wait => {}
                Step::Say(lines) => lines.iter().for_each(|line| self.say(line)),
                Step::Answers(answer) => self.end(Outcome::Answers { answer, took: self.began.elapsed() }),
                Step::Refuses(why) => {
                    let stderr = self.last_words();
                    self.end(Outcome::Broken {
                        stage: Stage::Talk,
                        why: format!("it refuses the handshake: {why}"),
                        stderr,
                    });
                }
            }
        }
    }

    fn poll_stderr(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(stderr) = &mut self.stderr else { return false };
        let Poll::Ready(read) = stderr.poll_read(cx, self.from_stderr.room()) else { return false };
        match read {
            Ok(1..) => self.keep_words(),
            Ok(0) | Err(_) => self.stderr = None,
        }
        true
    }

    fn keep_words(&mut self) {
        while let Some(Line::Whole(line)) = self.from_stderr.next_line() {
            let words = String::from_utf8_lossy(&line).trim_end().to_owned();
            if !words.is_empty() {
                self.last_words.push_back(words);
            }
            if self.last_words.len() > STDERR_KEPT {
                self.last_words.pop_front();
            }
        }
    }

    fn last_words(&mut self) -> Vec<String> {
        if let Some(Line::Whole(rest)) = self.from_stderr.rest() {
            self.last_words.push_back(String::from_utf8_lossy(&rest).trim_end().to_owned());
        }
        self.last_words.iter().cloned().collect()
    }

    fn flush(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(stdin) = &mut self.stdin else { return false };
        if self.outbox.is_empty() {
            return false;
        }
        // A pipe that refuses belongs to one that is ending, and its end says why.
        if let Poll::Ready(Err(_)) = self.outbox.poll_flush(stdin, cx) {
            self.stdin = None;
        }
        false
    }
}
