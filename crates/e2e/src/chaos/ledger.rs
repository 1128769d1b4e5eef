//! Every call of the run: sent, answered, executed. [`judge`] checks the promises about them.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    sync::{Condvar, Mutex, MutexGuard},
    time::{Duration, Instant},
};

/// The longest time for a call. All time limits of the run together (hold 20 s, call timeout 4 s, drain 5 s, ping 5
/// s) are well below, on a busy machine, too.
pub(super) const HUNG_AFTER: Duration = Duration::from_secs(90);

/// What an answer says about its call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The server's own answer to this call.
    Done,
    /// outlast answered: no server received the call.
    NotSent,
    /// outlast answered: the server may have executed the call.
    Unknown,
    /// Any other error, by its code and message.
    Refused(String),
    /// An answer that belongs to another call.
    Foreign(String),
}

#[derive(Clone, Debug)]
pub(super) struct Call {
    pub part: &'static str,
    /// False for requests that may be repeated, such as lists: their executions are not recorded.
    pub is_tool: bool,
    pub answers: Vec<Answer>,
    /// The driver ended the connection of this call, or the outlast that had it.
    pub is_ended: bool,
    /// Its client has waited for too long.
    pub is_hung: bool,
}

#[derive(Default)]
struct State {
    calls: BTreeMap<u64, Call>,
    /// Broken promises that do not belong to one call.
    breaches: Vec<Breach>,
    has_hung: bool,
    /// No further call is made.
    is_over: bool,
}

#[derive(Default)]
pub(super) struct Ledger {
    state: Mutex<State>,
    changed: Condvar,
}

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Breach {
    Hung {
        call: u64,
    },
    AnsweredTwice {
        call: u64,
    },
    ExecutedTwice {
        call: u64,
        pids: Vec<u32>,
    },
    /// The answer says that it was not sent, but a server executed it.
    ExecutedThoughNotSent {
        call: u64,
    },
    /// The answer is the server's, but no server executed the call.
    AnsweredThoughNotExecuted {
        call: u64,
    },
    ForeignAnswer {
        call: u64,
        text: String,
    },
    /// A server executed a call under a number that was never sent.
    NeverSent {
        call: u64,
    },
    Other(String),
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Breach::Hung { call } => write!(f, "call {call} was not answered within {} s", HUNG_AFTER.as_secs()),
            Breach::AnsweredTwice { call } => write!(f, "call {call} was answered more than once"),
            Breach::ExecutedTwice { call, pids } => write!(f, "call {call} was executed more than once, by {pids:?}"),
            Breach::ExecutedThoughNotSent { call } => {
                write!(f, "call {call} was executed, and its answer says that it was not sent")
            }
            Breach::AnsweredThoughNotExecuted { call } => {
                write!(f, "call {call} was answered as done, and no server executed it")
            }
            Breach::ForeignAnswer { call, text } => write!(f, "call {call} got the answer of another call: {text}"),
            Breach::NeverSent { call } => write!(f, "call {call} was executed and never sent"),
            Breach::Other(text) => f.write_str(text),
        }
    }
}

impl Ledger {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while it holds the ledger")
    }

    /// The number of a new call, unless the run is over.
    pub(super) fn sent(&self, part: &'static str, is_tool: bool) -> Option<u64> {
        let mut state = self.lock();
        if state.is_over {
            return None;
        }
        let call = state.calls.len() as u64 + 1;
        state.calls.insert(call, Call { part, is_tool, answers: Vec::new(), is_ended: false, is_hung: false });
        Some(call)
    }

    pub(super) fn answered(&self, call: u64, answer: Answer) {
        let mut state = self.lock();
        match state.calls.get_mut(&call) {
            Some(known) => known.answers.push(answer),
            None => state.breaches.push(Breach::Other(format!("an answer to call {call}, which was never sent"))),
        }
        self.changed.notify_all();
    }

    /// The driver is about to end the connection of this call. An answered call stays answered.
    pub(super) fn ended(&self, call: u64) {
        if let Some(known) = self.lock().calls.get_mut(&call) {
            known.is_ended = true;
        }
        self.changed.notify_all();
    }

    /// Waits until a call is answered or ended; false if it hangs.
    pub(super) fn wait(&self, call: u64) -> bool {
        let deadline = Instant::now() + HUNG_AFTER;
        let mut state = self.lock();
        loop {
            if state.calls.get(&call).is_none_or(|known| known.is_ended || !known.answers.is_empty()) {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(state);
                self.hung(call);
                return false;
            }
            state = self.changed.wait_timeout(state, left).expect("no thread panics while it holds the ledger").0;
        }
    }

    /// The client of this call has waited for too long: a later answer does not change that.
    pub(super) fn hung(&self, call: u64) {
        let mut state = self.lock();
        state.has_hung = true;
        if let Some(known) = state.calls.get_mut(&call) {
            known.is_hung = true;
        }
    }

    pub(super) fn breach(&self, text: String) {
        eprintln!("chaos: {text}");
        self.lock().breaches.push(Breach::Other(text));
    }

    pub(super) fn has_breach(&self) -> bool {
        let state = self.lock();
        state.has_hung || !state.breaches.is_empty()
    }

    /// No further call gets a number.
    pub(super) fn close(&self) {
        self.lock().is_over = true;
    }

    pub(super) fn last_answer(&self, call: u64) -> Option<Answer> {
        self.lock().calls.get(&call)?.answers.last().cloned()
    }

    /// Answers that are neither the server's nor say whether the call was sent: their codes, counted.
    pub(super) fn refusals(&self) -> BTreeMap<String, u64> {
        let mut refusals = BTreeMap::new();
        for answer in self.lock().calls.values().filter_map(|call| call.answers.first()) {
            if let Answer::Refused(text) = answer {
                *refusals.entry(text.clone()).or_default() += 1;
            }
        }
        refusals
    }

    /// Called after all processes have ended.
    pub(super) fn judge(&self, executions: &[(u64, u32)]) -> (BTreeMap<&'static str, Tally>, Vec<Breach>) {
        let state = self.lock();
        let (tallies, mut breaches) = judge(&state.calls, executions);
        breaches.extend(state.breaches.iter().cloned());
        (tallies, breaches)
    }
}

/// The calls of one part, counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub sent: u64,
    pub done: u64,
    pub not_sent: u64,
    pub unknown: u64,
    pub refused: u64,
    /// Not answered, because the driver ended their connection.
    pub ended: u64,
    pub hung: u64,
    pub executed: u64,
    pub answered_twice: u64,
    pub executed_twice: u64,
}

/// `executions`: call and process, in the order of the file.
pub(super) fn judge(
    calls: &BTreeMap<u64, Call>,
    executions: &[(u64, u32)],
) -> (BTreeMap<&'static str, Tally>, Vec<Breach>) {
    let mut executed: HashMap<u64, Vec<u32>> = HashMap::new();
    for (call, pid) in executions {
        executed.entry(*call).or_default().push(*pid);
    }
    let mut tallies: BTreeMap<&'static str, Tally> = BTreeMap::new();
    let mut breaches: Vec<Breach> = executed
        .keys()
        .filter(|call| !calls.contains_key(call))
        .map(|call| Breach::NeverSent { call: *call })
        .collect();
    for (&number, call) in calls {
        let tally = tallies.entry(call.part).or_default();
        let pids = executed.get(&number).map_or(&[][..], Vec::as_slice);
        tally.sent += 1;
        tally.executed += u64::from(!pids.is_empty());
        if pids.len() > 1 {
            tally.executed_twice += 1;
            breaches.push(Breach::ExecutedTwice { call: number, pids: pids.to_vec() });
        }
        if call.answers.len() > 1 {
            tally.answered_twice += 1;
            breaches.push(Breach::AnsweredTwice { call: number });
        }
        match call.answers.first() {
            None if call.is_ended && !call.is_hung => tally.ended += 1,
            _ if call.is_hung || call.answers.is_empty() => {
                tally.hung += 1;
                breaches.push(Breach::Hung { call: number });
            }
            Some(Answer::Done) => {
                tally.done += 1;
                if call.is_tool && pids.is_empty() {
                    breaches.push(Breach::AnsweredThoughNotExecuted { call: number });
                }
            }
            Some(Answer::NotSent) => {
                tally.not_sent += 1;
                if !pids.is_empty() {
                    breaches.push(Breach::ExecutedThoughNotSent { call: number });
                }
            }
            Some(Answer::Unknown) => tally.unknown += 1,
            Some(Answer::Refused(_)) => tally.refused += 1,
            None => unreachable!("a call without an answer was counted above"),
            Some(Answer::Foreign(text)) => {
                breaches.push(Breach::ForeignAnswer { call: number, text: text.clone() });
            }
        }
    }
    (tallies, breaches)
}

/// The file that servers append `CALL PID` to.
pub(super) fn read_executions(text: &str) -> Result<Vec<(u64, u32)>, String> {
    let read = |line: &str| {
        let (call, pid) = line.split_once(' ')?;
        Some((call.parse().ok()?, pid.parse().ok()?))
    };
    text.lines().map(|line| read(line).ok_or_else(|| format!("`{line}` in the ledger of executions"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_broken_promise_is_found() {
        let call = |answers: &[Answer], is_ended| Call {
            part: "p",
            is_tool: true,
            answers: answers.to_vec(),
            is_ended,
            is_hung: false,
        };
        let foreign = Answer::Foreign("x".into());
        let table = [
            // answers                                  ended  executed by   breach
            (&[Answer::Done][..], false, &[1][..], None),
            (&[Answer::NotSent], false, &[], None),
            (&[Answer::Unknown], false, &[], None),
            (&[Answer::Unknown], false, &[1], None),
            (&[Answer::Refused("no".into())], false, &[1], None),
            (&[], true, &[], None),
            (&[], true, &[1], None),
            (&[Answer::Done], true, &[1], None),
            (&[], false, &[], Some(Breach::Hung { call: 1 })),
            (&[], false, &[1], Some(Breach::Hung { call: 1 })),
            (&[], true, &[1, 2], Some(Breach::ExecutedTwice { call: 1, pids: vec![1, 2] })),
            (&[Answer::Unknown], false, &[1, 1], Some(Breach::ExecutedTwice { call: 1, pids: vec![1, 1] })),
            (&[Answer::Done, Answer::Done], false, &[1], Some(Breach::AnsweredTwice { call: 1 })),
            (&[Answer::Done, Answer::Unknown], true, &[1], Some(Breach::AnsweredTwice { call: 1 })),
            (&[Answer::NotSent], false, &[1], Some(Breach::ExecutedThoughNotSent { call: 1 })),
            (&[Answer::NotSent], true, &[1], Some(Breach::ExecutedThoughNotSent { call: 1 })),
            (&[Answer::Done], false, &[], Some(Breach::AnsweredThoughNotExecuted { call: 1 })),
            (&[foreign], false, &[1], Some(Breach::ForeignAnswer { call: 1, text: "x".into() })),
        ];
        for (answers, is_ended, pids, breach) in table {
            let calls = BTreeMap::from([(1, call(answers, is_ended))]);
            let executions: Vec<(u64, u32)> = pids.iter().map(|pid| (1, *pid)).collect();
            let (tallies, breaches) = judge(&calls, &executions);
            assert_eq!(breaches, breach.into_iter().collect::<Vec<_>>(), "{answers:?} {is_ended} {pids:?}");
            assert_eq!(tallies["p"].sent, 1);
        }
        // A call whose client has waited for too long is a breach, even with a late answer or an ended connection.
        for late in [call(&[], true), call(&[Answer::Done], false)] {
            let calls = BTreeMap::from([(1, Call { is_hung: true, ..late })]);
            assert_eq!(judge(&calls, &[(1, 1)]).1, [Breach::Hung { call: 1 }]);
        }
        assert_eq!(judge(&BTreeMap::new(), &[(3, 1)]).1, [Breach::NeverSent { call: 3 }]);
    }

    #[test]
    fn a_list_is_answered_without_an_execution() {
        let call = Call { part: "p", is_tool: false, answers: vec![Answer::Done], is_ended: false, is_hung: false };
        let (tallies, breaches) = judge(&BTreeMap::from([(1, call)]), &[]);
        assert_eq!((tallies["p"].done, breaches), (1, vec![]));
    }

    #[test]
    fn a_torn_line_of_the_ledger_is_an_error() {
        assert_eq!(read_executions("1 20\n2 20\n"), Ok(vec![(1, 20), (2, 20)]));
        assert!(read_executions("1 20\n2\n").is_err());
    }
}
