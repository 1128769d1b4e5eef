//! Every request of every client: which client sent it, how often a server executed it, and how often it was answered.

use std::collections::BTreeMap;

use serde_json::Value;

/// A client's conversation. No number is used twice.
pub(crate) type Asker = u64;

#[derive(Default)]
pub(crate) struct Ledger {
    calls: BTreeMap<u64, Call>,
    askers: Asker,
}

#[derive(Default)]
struct Call {
    asker: Asker,
    /// It may be executed again after a crash.
    is_safe: bool,
    executed: u32,
    is_answered: bool,
    /// An answer said that it was not executed.
    must_not_run: bool,
    /// A server asked for more: what an answer says is about the last attempt alone.
    is_asked_back: bool,
}

impl Ledger {
    pub(crate) fn new_asker(&mut self) -> Asker {
        self.askers += 1;
        self.askers
    }

    /// Numbers a request.
    pub(crate) fn ask(&mut self, asker: Asker, is_safe: bool) -> u64 {
        let number = self.calls.len() as u64 + 1;
        self.calls.insert(number, Call { asker, is_safe, ..Call::default() });
        number
    }

    pub(crate) fn asker_of(&self, number: u64) -> Option<Asker> {
        self.calls.get(&number).map(|call| call.asker)
    }

    /// A server has read the whole request, and executes it.
    pub(crate) fn execute(&mut self, number: u64) {
        let call = self.calls.get_mut(&number).unwrap_or_else(|| panic!("{number} was never asked"));
        assert!(call.executed == 0 || call.is_safe, "{number} was executed twice");
        assert!(!call.must_not_run, "{number} was executed, though its answer said that it was not");
        call.executed += 1;
    }

    /// A client got the answer of one of its requests.
    pub(crate) fn answer(&mut self, number: u64, asker: Asker, said: &Value) {
        let call = self.calls.get_mut(&number).unwrap_or_else(|| panic!("{number} was never asked"));
        assert_eq!(call.asker, asker, "{number} was answered to another client: {said}");
        assert!(!call.is_answered, "{number} was answered twice: {said}");
        // A question that must be answered first is no answer.
        if said["result"]["resultType"] == "input_required" {
            call.is_asked_back = true;
            return;
        }
        call.is_answered = true;
        for told in [&said["result"]["n"], &said["error"]["data"]["n"]].into_iter().filter_map(Value::as_u64) {
            assert_eq!(told, number, "{number} was answered with {said}");
            assert!(call.executed > 0, "{number} was answered as done, and no server executed it: {said}");
        }
        for failure in [&said["result"]["_meta"]["outlast/failure"], &said["error"]["data"]] {
            if (failure["outcome"] == "not_run" || failure["outcome"] == "not_sent") && !call.is_asked_back {
                // A relay asks a second gateway for what it may repeat, and that one speaks only for itself.
                assert!(call.executed == 0 || call.is_safe, "{number} was executed, and its answer says not: {said}");
                call.must_not_run = !call.is_safe;
            }
        }
    }
}
