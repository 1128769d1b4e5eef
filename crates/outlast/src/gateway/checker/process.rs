//! `outlast check-schemas`: compiles schemas and checks arguments against them, one order for each line of stdin, until
//! stdin ends. It does not limit itself: the gateway kills this process when an order takes too long, and the kernel
//! when it needs too much memory.

use std::{
    io::{self, BufRead, Write},
    process::ExitCode,
};

use outlast_core::gateway::Fit;
use outlast_os as os;
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use crate::gateway::schemas::validator::{self, Validator};

/// The address space that the process may use, on systems that limit it (Linux). An order that needs more ends the
/// process.
const MEMORY_MAX: u64 = 512 << 20;

/// One line of stdout: the first says that the process is ready, each other line is the reply to an order.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Said {
    Ready,
    Compiled,
    Unusable(String),
    Fits,
    Misfit(String),
    TooCostly,
}

pub(crate) fn serve() -> ExitCode {
    os::limit_memory(MEMORY_MAX);
    let mut stdout = io::stdout().lock();
    let mut say = |said: &Said| writeln!(stdout, "{}", serde_json::to_string(said)?).and_then(|()| stdout.flush());
    let mut kept = CompiledSchemas::default();
    // The gateway sends one order at a time, none longer than the arguments that it reads.
    let lines = io::stdin().lock().split(b'\n').map_while(Result::ok);
    let mut replies = lines.filter_map(|line| kept.obey(&line));
    match say(&Said::Ready).and_then(|()| replies.try_for_each(|said| say(&said))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Compiled schemas, by the keys that the gateway gave them. The gateway says when to drop them.
#[derive(Default)]
struct CompiledSchemas(FxHashMap<u64, Validator>);

impl CompiledSchemas {
    /// `C key schema`, `E key arguments`, or `F`, the only order without a reply.
    fn obey(&mut self, line: &[u8]) -> Option<Said> {
        let line = std::str::from_utf8(line).ok()?;
        let mut words = line.splitn(3, ' ');
        let (letter, key, json) = (words.next()?, words.next(), words.next());
        if letter == "F" {
            self.0.clear();
            return None;
        }
        let (key, json) = (key?.parse().ok()?, json?);
        if letter == "C" {
            return Some(match validator::parse(json.as_bytes()).and_then(|schema| Validator::compile(&schema)) {
                Ok(validator) => {
                    self.0.insert(key, validator);
                    Said::Compiled
                }
                Err(why) => Said::Unusable(why),
            });
        }
        Some(match self.0.get(&key)?.check(json) {
            Fit::Fits => Said::Fits,
            Fit::Misfit(why) => Said::Misfit(why),
            Fit::TooCostly => Said::TooCostly,
            Fit::Unchecked(why) => Said::Unusable(why),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_but_the_last_has_one_reply() {
        let mut kept = CompiledSchemas::default();
        let table = [
            (r#"C 1 {"properties": {"a": {"enum": ["x y"]}}}"#, Some(r#""compiled""#)),
            (r#"C 2 {"type": "nonsense"}"#, Some(r#"{"unusable":"#)),
            (r#"C 3 {"pattern": "("}"#, Some(r#"{"unusable":"#)),
            (r#"E 1 {"a": "x y"}"#, Some(r#""fits""#)),
            (r#"E 1 {"a": "x"}"#, Some(r#"{"misfit":"the argument `a` does not fit"#)),
            (r#"E 2 {}"#, None),
            ("F", None),
            (r#"E 1 {}"#, None),
            ("nonsense", None),
        ];
        for (order, reply) in table {
            let said = kept.obey(order.as_bytes()).map(|said| serde_json::to_string(&said).unwrap());
            assert_eq!(said.is_some(), reply.is_some(), "{order}: {said:?}");
            assert!(said.unwrap_or_default().starts_with(reply.unwrap_or_default()), "{order}");
        }
    }
}
