//! The queue of one process that compiles schemas and checks arguments against them: which job it gets next, how long
//! a job may take, and when the process is replaced. It starts no process, and does not know what a schema means.

use std::{
    collections::{HashMap, VecDeque},
    time::{Duration, Instant},
};

use bytes::Bytes;

use crate::{gateway::Fit, patience::Patience};

/// How long the compilation of a schema may take. The tool of a slower schema stays unchecked.
pub const COMPILE_MAX: Duration = Duration::from_secs(3);
/// How long the check of arguments may take. Slower arguments are refused.
pub const EVALUATE_MAX: Duration = Duration::from_secs(1);
/// How long the process may take to be ready.
pub const START_MAX: Duration = Duration::from_secs(10);
/// How long calls pass unchecked after the process could not be started; the next call then starts it again.
pub const RETRY_AFTER: Duration = Duration::from_secs(1);
/// How many jobs may wait. At the bound the newest job of the asker with the most waiting jobs is refused.
pub const JOBS_MAX: usize = 1024;
/// How many bytes of arguments may wait, with the same rule.
pub const JOBS_BYTES_MAX: usize = 64 << 20;
/// How many schemas the process keeps compiled. At the bound it drops all, and they are compiled again when needed.
const KEPT_MAX: usize = 1024;
/// The same, in bytes of schemas.
const KEPT_BYTES_MAX: usize = 8 << 20;

/// Arguments to be checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Returned with the result.
    pub ticket: u64,
    /// Askers take turns.
    pub asker: Asker,
    pub schema: Bytes,
    pub arguments: Bytes,
}

/// The client of a job: its name, and its session if it has one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Asker {
    pub name: String,
    pub session: Option<u64>,
}

#[derive(Debug)]
pub enum Event {
    Asked(Job),
    /// The result is not needed any more.
    Withdrawn {
        ticket: u64,
    },
    /// The process runs and waits for orders.
    Ready,
    Replied(Reply),
    /// The process could not be started.
    StartFailed(String),
    /// No process of its group is left.
    Exited,
    TimePassed,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// [`Event::Ready`] or [`Event::StartFailed`] follows, or [`Event::Exited`].
    Start,
    Tell(Order),
    /// [`Event::Exited`] follows.
    Kill,
    Decide {
        ticket: u64,
        fit: Fit,
    },
}

/// An order to the process. Each order has one reply, except the last one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    Compile {
        key: u64,
        schema: Bytes,
    },
    Evaluate {
        key: u64,
        arguments: Bytes,
    },
    /// Drops all schemas.
    Forget,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    Compiled,
    /// The schema cannot be used, for this reason.
    Unusable(String),
    Evaluated(Fit),
}

#[derive(Debug, Default)]
pub struct Checker {
    process: Process,
    /// In the order of arrival.
    waiting: VecDeque<Waiting>,
    /// The asker that had the last turn.
    last: Option<Asker>,
    /// With a keyed hash, because backends choose the schemas.
    kept: HashMap<Bytes, SchemaState>,
    kept_bytes: usize,
    next_key: u64,
}

#[derive(Debug, Default)]
enum Process {
    #[default]
    None,
    Starting {
        by: Patience,
    },
    Idle,
    Busy {
        waiting: Waiting,
        step: Step,
        by: Patience,
    },
    /// The process was killed, or is being killed: the next one starts after `Exited`.
    Ending,
    /// The process could not be started.
    Failed {
        why: String,
        until: Instant,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Compiling,
    Evaluating,
}

#[derive(Debug)]
struct Waiting {
    job: Job,
    /// The process exited during this job, perhaps for another reason: the job gets a second attempt.
    is_second: bool,
}

#[derive(Debug)]
enum SchemaState {
    /// Not compiled by this process, or not yet.
    Known(u64),
    Compiled(u64),
    Unusable(String),
}

impl Checker {
    pub fn handle(&mut self, event: Event, now: Instant, actions: &mut Vec<Action>) {
        match event {
            Event::Asked(job) => self.asked(job, now, actions),
            Event::Withdrawn { ticket } => self.waiting.retain(|waiting| waiting.job.ticket != ticket),
            Event::Ready => {
                if let Process::Starting { .. } = self.process {
                    self.process = Process::Idle;
                }
            }
            Event::Replied(reply) => self.replied(reply, now, actions),
            Event::StartFailed(why) => self.start_failed(why, now, actions),
            Event::Exited => self.exited(now, actions),
            Event::TimePassed => self.time_passed(now, actions),
        }
        self.go_on(now, actions);
    }

    pub fn deadline(&self) -> Option<Instant> {
        match &self.process {
            Process::Starting { by } | Process::Busy { by, .. } => Some(by.deadline()),
            _ => None,
        }
    }

    fn asked(&mut self, job: Job, now: Instant, actions: &mut Vec<Action>) {
        if let Process::Failed { why, until } = &self.process
            && now < *until
        {
            return actions.push(Action::Decide { ticket: job.ticket, fit: Fit::Unchecked(why.clone()) });
        }
        self.waiting.push_back(Waiting { job, is_second: false });
        let bytes: usize = self.waiting.iter().map(|waiting| waiting.job.arguments.len()).sum();
        if self.waiting.len() > JOBS_MAX || bytes > JOBS_BYTES_MAX {
            self.refuse_one(actions);
        }
    }

    /// Refuses the newest job of the asker with the most waiting jobs.
    fn refuse_one(&mut self, actions: &mut Vec<Action>) {
        let mut counts: HashMap<&Asker, usize> = HashMap::new();
        for waiting in &self.waiting {
            *counts.entry(&waiting.job.asker).or_default() += 1;
        }
        // Among equals, the job that arrived last.
        let most = counts.values().copied().max().unwrap_or_default();
        let is_of_most = |waiting: &Waiting| counts[&waiting.job.asker] == most;
        let Some(index) = self.waiting.iter().rposition(is_of_most) else { return };
        if let Some(waiting) = self.waiting.remove(index) {
            actions.push(Action::Decide { ticket: waiting.job.ticket, fit: Fit::TooCostly });
        }
    }

    fn replied(&mut self, reply: Reply, now: Instant, actions: &mut Vec<Action>) {
        let Process::Busy { waiting, step, .. } = std::mem::replace(&mut self.process, Process::Idle) else {
            // A reply without an order: the process is not to be trusted.
            self.process = Process::Ending;
            return actions.push(Action::Kill);
        };
        let ticket = waiting.job.ticket;
        match (step, reply) {
            (Step::Compiling, Reply::Compiled) => {
                if let Some(kept) = self.kept.get_mut(&waiting.job.schema)
                    && let SchemaState::Known(key) = *kept
                {
                    *kept = SchemaState::Compiled(key);
                }
                self.begin(waiting, now, actions);
            }
            (Step::Compiling, Reply::Unusable(why)) => self.unusable(&waiting.job, why, actions),
            (Step::Evaluating, Reply::Evaluated(fit)) => actions.push(Action::Decide { ticket, fit }),
            (step, _) => {
                self.over_budget(&waiting.job, step, "the checker broke on it", actions);
                self.process = Process::Ending;
                actions.push(Action::Kill);
            }
        }
    }

    fn unusable(&mut self, job: &Job, why: String, actions: &mut Vec<Action>) {
        actions.push(Action::Decide { ticket: job.ticket, fit: Fit::Unchecked(why.clone()) });
        self.kept.insert(job.schema.clone(), SchemaState::Unusable(why));
    }

    fn over_budget(&mut self, job: &Job, step: Step, why: &str, actions: &mut Vec<Action>) {
        match step {
            Step::Compiling => self.unusable(job, why.to_owned(), actions),
            Step::Evaluating => actions.push(Action::Decide { ticket: job.ticket, fit: Fit::TooCostly }),
        }
    }

    fn start_failed(&mut self, why: String, now: Instant, actions: &mut Vec<Action>) {
        let why = format!("the process that checks schemas could not be started: {why}");
        for waiting in self.waiting.drain(..) {
            actions.push(Action::Decide { ticket: waiting.job.ticket, fit: Fit::Unchecked(why.clone()) });
        }
        self.process = Process::Failed { why, until: now + RETRY_AFTER };
    }

    fn exited(&mut self, now: Instant, actions: &mut Vec<Action>) {
        for kept in self.kept.values_mut() {
            if let SchemaState::Compiled(key) = *kept {
                *kept = SchemaState::Known(key);
            }
        }
        match std::mem::take(&mut self.process) {
            Process::Starting { .. } => self.start_failed("it exited at once".to_owned(), now, actions),
            Process::Busy { waiting, step, .. } if waiting.is_second => {
                self.over_budget(&waiting.job, step, "compiling it ended the process that did it", actions);
            }
            Process::Busy { waiting, .. } => self.waiting.push_front(Waiting { is_second: true, ..waiting }),
            failed @ Process::Failed { .. } => self.process = failed,
            Process::None | Process::Idle | Process::Ending => {}
        }
    }

    fn time_passed(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let (Process::Starting { by } | Process::Busy { by, .. }) = &mut self.process else { return };
        if !by.is_over(now) {
            return;
        }
        actions.push(Action::Kill);
        match std::mem::replace(&mut self.process, Process::Ending) {
            Process::Busy { waiting, step, by } => {
                let why = format!("compiling it takes longer than {} s", by.length().as_secs());
                self.over_budget(&waiting.job, step, &why, actions);
            }
            _ => self.start_failed("it was not ready in time".to_owned(), now, actions),
        }
    }

    /// Gives the process the next job, if it can take one.
    fn go_on(&mut self, now: Instant, actions: &mut Vec<Action>) {
        while !self.waiting.is_empty() {
            match &self.process {
                Process::None => {}
                Process::Failed { until, .. } if *until <= now => {}
                Process::Idle => {
                    let Some(waiting) = self.next() else { return };
                    self.last = Some(waiting.job.asker.clone());
                    self.begin(waiting, now, actions);
                    continue;
                }
                _ => return,
            }
            self.process = Process::Starting { by: Patience::new(START_MAX, now) };
            actions.push(Action::Start);
        }
    }

    /// The oldest job of another asker than the last one; otherwise the oldest of all.
    fn next(&mut self) -> Option<Waiting> {
        let is_first = |waiting: &Waiting| waiting.is_second || Some(&waiting.job.asker) != self.last.as_ref();
        let index = self.waiting.iter().position(is_first).unwrap_or(0);
        self.waiting.remove(index)
    }

    fn begin(&mut self, waiting: Waiting, now: Instant, actions: &mut Vec<Action>) {
        let job = &waiting.job;
        let (order, step, length) = match self.kept.get(&job.schema) {
            Some(SchemaState::Unusable(why)) => {
                return actions.push(Action::Decide { ticket: job.ticket, fit: Fit::Unchecked(why.clone()) });
            }
            Some(SchemaState::Compiled(key)) => {
                let order = Order::Evaluate { key: *key, arguments: job.arguments.clone() };
                (order, Step::Evaluating, EVALUATE_MAX)
            }
            Some(SchemaState::Known(key)) => {
                (Order::Compile { key: *key, schema: job.schema.clone() }, Step::Compiling, COMPILE_MAX)
            }
            None => {
                let key = self.keep(job.schema.clone(), actions);
                (Order::Compile { key, schema: job.schema.clone() }, Step::Compiling, COMPILE_MAX)
            }
        };
        actions.push(Action::Tell(order));
        self.process = Process::Busy { waiting, step, by: Patience::new(length, now) };
    }

    fn keep(&mut self, schema: Bytes, actions: &mut Vec<Action>) -> u64 {
        if self.kept.len() >= KEPT_MAX || self.kept_bytes + schema.len() > KEPT_BYTES_MAX {
            self.kept.clear();
            self.kept_bytes = 0;
            actions.push(Action::Tell(Order::Forget));
        }
        self.kept_bytes += schema.len();
        self.next_key += 1;
        self.kept.insert(schema, SchemaState::Known(self.next_key));
        self.next_key
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(ticket: u64, session: u64, schema: &'static str) -> Job {
        let asker = Asker { name: "local".into(), session: Some(session) };
        Job { ticket, asker, schema: Bytes::from_static(schema.as_bytes()), arguments: Bytes::from_static(b"{}") }
    }

    struct Story {
        checker: Checker,
        now: Instant,
    }

    impl Story {
        #[expect(clippy::disallowed_methods, reason = "a test needs some instant to count from")]
        fn new() -> Story {
            Story { checker: Checker::default(), now: Instant::now() }
        }

        /// The actions, in a few words.
        fn event(&mut self, event: Event) -> String {
            let mut actions = Vec::new();
            self.checker.handle(event, self.now, &mut actions);
            let words = actions.iter().map(|action| match action {
                Action::Start => "start".to_owned(),
                Action::Kill => "kill".to_owned(),
                Action::Tell(Order::Compile { key, .. }) => format!("compile {key}"),
                Action::Tell(Order::Evaluate { key, .. }) => format!("evaluate {key}"),
                Action::Tell(Order::Forget) => "forget".to_owned(),
                Action::Decide { ticket, fit: Fit::Unchecked(why) } => format!("{ticket} unchecked: {why}"),
                Action::Decide { ticket, fit } => format!("{ticket} {fit:?}"),
            });
            words.collect::<Vec<_>>().join(", ")
        }

        fn pass(&mut self, time: Duration) -> String {
            self.now += time;
            self.event(Event::TimePassed)
        }
    }

    const FITS: Reply = Reply::Evaluated(Fit::Fits);

    #[test]
    fn one_job_at_a_time_and_a_budget_for_each() {
        let mut story = Story::new();
        let steps: Vec<(&str, Event, &str)> = vec![
            ("the first job starts it", Event::Asked(job(1, 1, "a")), "start"),
            ("others wait", Event::Asked(job(2, 1, "a")), ""),
            ("a schema is compiled once", Event::Ready, "compile 1"),
            ("then its job is done", Event::Replied(Reply::Compiled), "evaluate 1"),
            ("and the next", Event::Replied(FITS), "1 Fits, evaluate 1"),
            ("until there is none", Event::Replied(Reply::Evaluated(Fit::TooCostly)), "2 TooCostly"),
            ("it stays for the next", Event::Asked(job(3, 1, "b")), "compile 2"),
            ("what cannot be used", Event::Replied(Reply::Unusable("no".into())), "3 unchecked: no"),
            ("is not compiled again", Event::Asked(job(4, 1, "b")), "4 unchecked: no"),
            ("killed while idle", Event::Exited, ""),
            ("it is started again", Event::Asked(job(5, 1, "a")), "start"),
            ("and compiles again", Event::Ready, "compile 1"),
            ("killed by another: once more", Event::Exited, "start"),
            ("", Event::Ready, "compile 1"),
            ("", Event::Replied(Reply::Compiled), "evaluate 1"),
            ("the job that ends it twice", Event::Exited, "5 TooCostly"),
            ("withdrawn before it began", Event::Asked(job(6, 1, "a")), "start"),
            ("", Event::Withdrawn { ticket: 6 }, ""),
            ("", Event::Ready, ""),
            ("an answer to nothing", Event::Replied(FITS), "kill"),
            ("waits until it is gone", Event::Asked(job(7, 1, "a")), ""),
            ("", Event::Exited, "start"),
        ];
        for (what, event, does) in steps {
            assert_eq!(story.event(event), does, "{what}");
        }
    }

    #[test]
    fn a_job_over_its_budget_ends_the_process_and_not_the_queue() {
        let mut story = Story::new();
        story.event(Event::Asked(job(1, 1, "a")));
        story.event(Event::Asked(job(2, 2, "b")));
        assert_eq!(story.event(Event::Ready), "compile 1");
        assert_eq!(story.pass(COMPILE_MAX), "kill, 1 unchecked: compiling it takes longer than 3 s");
        assert_eq!(story.event(Event::Asked(job(3, 1, "a"))), "");
        assert_eq!(story.event(Event::Exited), "start");
        assert_eq!(story.event(Event::Ready), "compile 2");
        assert_eq!(story.event(Event::Replied(Reply::Compiled)), "evaluate 2");
        assert_eq!(story.pass(EVALUATE_MAX), "kill, 2 TooCostly");
        assert_eq!(story.event(Event::Exited), "start");
        assert_eq!(story.event(Event::Ready), "3 unchecked: compiling it takes longer than 3 s");
    }

    #[test]
    fn without_a_process_calls_pass_unchecked_until_it_can_be_started() {
        let mut story = Story::new();
        story.event(Event::Asked(job(1, 1, "a")));
        let said = story.event(Event::StartFailed("no".into()));
        assert_eq!(said, "1 unchecked: the process that checks schemas could not be started: no");
        assert!(story.event(Event::Asked(job(2, 1, "a"))).starts_with("2 unchecked"));
        story.now += RETRY_AFTER;
        assert_eq!(story.event(Event::Asked(job(3, 1, "a"))), "start");
        assert!(story.pass(START_MAX).ends_with("it was not ready in time"));
        assert_eq!(story.event(Event::Exited), "");
        story.now += RETRY_AFTER;
        assert_eq!(story.event(Event::Asked(job(4, 1, "a"))), "start");
        assert!(story.event(Event::Exited).starts_with("4 unchecked"));
    }

    #[test]
    fn clients_take_turns_and_the_client_with_most_jobs_is_refused() {
        let mut story = Story::new();
        for ticket in 0..JOBS_MAX as u64 {
            story.event(Event::Asked(job(ticket, 1, "a")));
        }
        let last = JOBS_MAX as u64 - 1;
        assert_eq!(story.event(Event::Asked(job(5_000, 2, "a"))), format!("{last} TooCostly"));
        assert_eq!(story.event(Event::Asked(job(5_001, 1, "a"))), "5001 TooCostly");
        story.event(Event::Ready);
        story.event(Event::Replied(Reply::Compiled));
        for done in [0, 5_000, 1, 2] {
            assert_eq!(story.event(Event::Replied(FITS)), format!("{done} Fits, evaluate 1"));
        }
        let large = Job { arguments: vec![b' '; JOBS_BYTES_MAX].into(), ..job(6_000, 3, "a") };
        assert!(story.event(Event::Asked(large)).ends_with("TooCostly"), "bytes are bounded, too");
    }

    #[test]
    fn the_compiled_schemas_are_bounded() {
        let mut story = Story::new();
        story.event(Event::Asked(job(0, 1, "a")));
        story.event(Event::Ready);
        story.event(Event::Replied(Reply::Compiled));
        story.event(Event::Replied(FITS));
        let mut forgotten = 0;
        for n in 1..3_000_u64 {
            let said = story.event(Event::Asked(Job { schema: n.to_string().into(), ..job(n, 1, "") }));
            forgotten += usize::from(said.starts_with("forget, compile"));
            assert_eq!(story.event(Event::Replied(Reply::Unusable("no".into()))), format!("{n} unchecked: no"));
            assert!(story.checker.kept.len() <= KEPT_MAX);
        }
        assert_eq!(forgotten, 2);
    }
}
