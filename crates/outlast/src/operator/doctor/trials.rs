//! Starts servers, several at a time, and performs the handshake with each, within a time limit. All of their
//! processes are gone when it returns.

use std::{
    collections::VecDeque,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use outlast_core::{
    exit::{Exit, How},
    life::Grace,
};
use outlast_os::{ChildProcesses, Order, Stdio};

use super::attempt::{Answer, Attempt, Step};
use crate::{
    child::{ChildEvent, Children, timer::Timer},
    cli::report,
};

/// How many servers run at the same time; the others are queued.
const AT_ONCE_MAX: usize = 8;
/// A server exits by itself when its stdin is closed; after a second it is killed.
const GRACE: Grace =
    Grace { after_stdin: Duration::from_secs(1), after_term: Duration::ZERO, settle: Duration::from_millis(50) };
/// How many of its last stderr lines are kept, to find the one that names the error.
const STDERR_KEPT: usize = 40;

/// A server that is to be started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Trial {
    pub command: Vec<String>,
    pub cwd: std::path::PathBuf,
    pub env: Vec<(String, String)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    Answers { answer: Answer, took: Duration },
    Broken { stage: Stage, why: String, stderr: Vec<String> },
}

/// The stage at which a server failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Start,
    Talk,
    /// The time limit passed.
    Late,
}

/// How often progress is reported while nothing changes.
const TICK: Duration = Duration::from_secs(1);

/// The progress of all trials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Progress {
    pub done: usize,
    /// The trials that run and have no outcome yet, by index.
    pub waiting: Vec<usize>,
}

/// The outcome of each trial, in order. `tell` is called on each change of progress and at least once per second.
pub(super) async fn run(
    processes: ChildProcesses,
    trials: &[Trial],
    patience: Duration,
    tell: &mut dyn FnMut(&Progress),
) -> Vec<Outcome> {
    let told = Told { tell, last: None, next: Instant::now() };
    let (children, timer) = (Children::new(processes), Timer::default());
    let mut all = All { children, trials, patience, runs: Vec::new(), timer, told };
    std::future::poll_fn(|cx| all.poll(cx)).await;
    all.children.close().await;
    all.runs.into_iter().map(|run| run.outcome.expect("a server that is gone has an outcome")).collect()
}

struct All<'a> {
    /// By the index of the trial.
    children: Children,
    trials: &'a [Trial],
    patience: Duration,
    /// Of the trials that have begun.
    runs: Vec<Run>,
    timer: Timer,
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
    last_words: VecDeque<String>,
    outcome: Option<Outcome>,
    is_gone: bool,
}

impl All<'_> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let now = Instant::now();
            self.start_more(now);
            let mut moved = self.children.poll_news(cx, now);
            moved |= self.children.poll_outputs(true, cx, now);
            while let Some(event) = self.children.next_event() {
                self.heard(event, now);
                moved = true;
            }
            self.children.flush_all(cx, now);
            if self.runs.len() == self.trials.len() && self.runs.iter().all(|run| run.is_gone) {
                return Poll::Ready(());
            }
            self.tell(now);
            if !moved && !self.poll_time(cx) {
                return Poll::Pending;
            }
        }
    }

    fn tell(&mut self, now: Instant) {
        let waiting = self.runs.iter().enumerate().filter(|(_, run)| run.outcome.is_none()).map(|(at, _)| at);
        let waiting: Vec<usize> = waiting.collect();
        let progress = Progress { done: self.runs.len() - waiting.len(), waiting };
        if self.told.last.as_ref() != Some(&progress) || self.told.next <= now {
            (self.told.tell)(&progress);
            self.told.next = now + TICK;
            self.told.last = Some(progress);
        }
    }

    fn start_more(&mut self, now: Instant) {
        while self.runs.iter().filter(|run| !run.is_gone).count() < AT_ONCE_MAX
            && let Some(trial) = self.trials.get(self.runs.len())
        {
            let at = self.runs.len();
            let order = Order {
                program: trial.command.first().cloned().unwrap_or_default().into(),
                args: trial.command.iter().skip(1).map(Into::into).collect(),
                cwd: trial.cwd.clone(),
                env: trial.env.iter().map(|(name, value)| (name.into(), value.into())).collect(),
                tag: format!("doctor-{}.{at}", std::process::id()),
                env_is_all: false,
                stdio: Stdio::Piped,
                sandbox: None,
                live_until: None,
            };
            let mut run = Run::new(now);
            match self.children.start(at as u64, &order, GRACE) {
                Ok(()) => {
                    if let Some(child) = self.children.get_mut(at as u64) {
                        // The exit of the process follows, and says more than the end of a pipe.
                        child.let_close_pipes();
                        child.put(run.attempt.hello().into(), None);
                    }
                }
                Err(error) => run.could_not_start(&error),
            }
            self.runs.push(run);
        }
    }

    fn heard(&mut self, event: ChildEvent, now: Instant) {
        match event {
            ChildEvent::Said { key, line } => {
                let run = &mut self.runs[key as usize];
                if run.outcome.is_some() {
                    return;
                }
                match run.attempt.heard(&String::from_utf8_lossy(&line)) {
                    Step::Wait => {}
                    Step::Say(lines) => {
                        if let Some(child) = self.children.get_mut(key) {
                            lines.into_iter().for_each(|line| child.put(line.into(), None));
                        }
                    }
                    Step::Answers(answer) => {
                        let took = run.began.elapsed();
                        self.end(key, Outcome::Answers { answer, took }, now);
                    }
                    Step::Refuses(why) => {
                        let outcome = run.broken(Stage::Talk, format!("it refused the handshake: {why}"));
                        self.end(key, outcome, now);
                    }
                }
            }
            ChildEvent::Logged { key, redacted, .. } => self.runs[key as usize].keep_words(redacted),
            ChildEvent::StartFailed { key, error } => self.runs[key as usize].could_not_start(&error),
            ChildEvent::Gone { key, how, .. } => {
                let how = match how {
                    How::Exited(Exit::Code(code)) => format!("exit code {code}"),
                    How::Exited(Exit::Signal(signal)) => format!("signal {signal}"),
                    how => how.to_string(),
                };
                let run = &mut self.runs[key as usize];
                let outcome = run.broken(Stage::Talk, format!("it ended with {how} before it answered"));
                // A last line without a line feed, such as a prompt, is read only now.
                if let Outcome::Broken { stderr, .. } = run.outcome.get_or_insert(outcome)
                    && stderr.is_empty()
                {
                    stderr.extend(run.last_words.drain(..));
                }
            }
            ChildEvent::Cleared { key } => self.runs[key as usize].is_gone = true,
            ChildEvent::Started { .. } | ChildEvent::Suspended { .. } | ChildEvent::Noticed(_) => {}
        }
    }

    /// Only the first outcome counts.
    fn end(&mut self, key: u64, outcome: Outcome, now: Instant) {
        self.runs[key as usize].outcome.get_or_insert(outcome);
        self.children.stop(key, How::Stopped, now);
    }

    /// True if a deadline has passed.
    fn poll_time(&mut self, cx: &mut Context<'_>) -> bool {
        let patience = self.patience;
        let late = self.runs.iter().filter(|run| run.outcome.is_none()).map(|run| run.began + patience);
        let deadline = late.chain(self.children.deadline()).chain([self.told.next]).min();
        if !self.timer.poll(deadline, Instant::now(), cx) {
            return false;
        }
        let now = Instant::now();
        self.children.time_passed(now);
        for at in 0..self.runs.len() {
            let run = &self.runs[at];
            if run.outcome.is_none() && run.began + patience <= now {
                let why = format!("it did not answer within {} s", patience.as_secs_f64());
                let outcome = run.broken(Stage::Late, why);
                self.end(at as u64, outcome, now);
            }
        }
        true
    }
}

impl Run {
    fn new(began: Instant) -> Run {
        Run { attempt: Attempt::default(), began, last_words: VecDeque::new(), outcome: None, is_gone: false }
    }

    fn could_not_start(&mut self, error: &std::io::Error) {
        let why = format!("it cannot be started: {}", report::plain(&error.to_string()));
        self.outcome.get_or_insert(Outcome::Broken { stage: Stage::Start, why, stderr: Vec::new() });
        self.is_gone = true;
    }

    fn broken(&self, stage: Stage, why: String) -> Outcome {
        Outcome::Broken { stage, why, stderr: self.last_words.iter().cloned().collect() }
    }

    fn keep_words(&mut self, words: String) {
        if !words.is_empty() {
            self.last_words.push_back(words);
        }
        if self.last_words.len() > STDERR_KEPT {
            self.last_words.pop_front();
        }
    }
}
