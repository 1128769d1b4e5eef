//! An MCP server whose lists cost a gateway as much as possible: `outlast-bench lists KIND CHANGING`.
//! With `updates` its tool reports a changed resource thousands of times; in other lists no tool does anything.

use std::{
    io::{self, BufRead, Write},
    process::ExitCode,
};

use serde_json::{Value, json};

/// Elements of each list; more than a gateway keeps.
const ITEMS: usize = 60_000;
/// Bytes of one list of few, large elements.
const LARGE_BYTES: usize = 4 << 20;
/// Notifications of a changed resource: in one batch, and on lines of their own.
const UPDATES_IN_BATCH: usize = 4_096;
const UPDATES: usize = 2_000;
/// The resource that changes.
pub(super) const URI: &str = "x://0/0";
/// Levels of one element, which is below the limit for a message.
const LEVELS: usize = 9_900;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::bench) enum Kind {
    /// Many names that no other server has.
    Names,
    /// Many names that all other servers have, too, and that are equal once their characters are replaced.
    Colliding,
    /// Few elements that are large.
    Large,
    /// Elements that are nested deeply.
    Deep,
    /// Few elements of many numbers and escape sequences.
    Numbers,
    /// One element, whose changes are reported.
    Updates,
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Names => "names",
            Kind::Colliding => "colliding",
            Kind::Large => "large",
            Kind::Deep => "deep",
            Kind::Numbers => "numbers",
            Kind::Updates => "updates",
        }
    }

    fn named(name: &str) -> Option<Kind> {
        let kinds = [Kind::Names, Kind::Colliding, Kind::Large, Kind::Deep, Kind::Numbers, Kind::Updates];
        kinds.into_iter().find(|kind| kind.name() == name)
    }

    /// The elements of a list. `variant` makes two lists differ in every element.
    fn items(self, variant: usize) -> String {
        let schema = r#""inputSchema":{"type":"object"}"#;
        let many = |name: &dyn Fn(usize) -> String| -> Vec<String> {
            (0..ITEMS)
                .map(|n| {
                    let name = name(n);
                    let address = format!(r#""uri":"x://{name}/{variant}","uriTemplate":"x://{name}/{variant}/{{v}}""#);
                    format!(r#"{{"name":"{name}",{address},"description":"{variant}",{schema}}}"#)
                })
                .collect()
        };
        let few = |count: usize, filling: &str| -> Vec<String> {
            (0..count)
                .map(|n| {
                    let address = format!(r#""uri":"x://{n}/{variant}","uriTemplate":"x://{n}/{variant}/{{v}}""#);
                    format!(r#"{{"filling":{filling},"name":"n{n}",{address},"description":"{variant}",{schema}}}"#)
                })
                .collect()
        };
        let deep = format!("{}1{}", "[".repeat(LEVELS), "]".repeat(LEVELS));
        let items = match self {
            Kind::Names => many(&|n| format!("name{n}of{variant}")),
            // `.`, `:` and others become `_`.
            Kind::Colliding => many(&|n| (0..17).map(|bit| if n >> bit & 1 == 1 { '.' } else { ':' }).collect()),
            Kind::Large => few(64, &format!("\"{}\"", "x".repeat(LARGE_BYTES / 64))),
            Kind::Deep => few(LARGE_BYTES / deep.len(), &deep),
            Kind::Updates => few(1, "0"),
            Kind::Numbers => {
                // No branch of a parser is predicted well.
                let parts = ["1,", "-20.5e3,", r#""\n","#, "300,", r#""a\"\u0041\\","#, "0,"];
                let part = |n: usize| parts[(n * n / 7 + n) % parts.len()];
                let filling: String = (0..LARGE_BYTES / 64 / 6).map(part).collect();
                few(64, &format!("[{filling}1]"))
            }
        };
        items.join(",")
    }
}

/// Serves on stdin and stdout until stdin ends.
pub(in crate::bench) fn main(mut words: impl Iterator<Item = String>) -> Option<ExitCode> {
    let kind = Kind::named(&words.next()?)?;
    let is_changing = words.next()? == "changing";
    Some(match serve(kind, is_changing) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    })
}

fn serve(kind: Kind, is_changing: bool) -> io::Result<()> {
    let lists = [kind.items(0), kind.items(1)];
    let mut answered = 0;
    let mut output = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let request: Value = serde_json::from_str(&line?)?;
        let Some(id) = request.get("id") else { continue };
        let method = request["method"].as_str().unwrap_or_default();
        let changes = json!({"listChanged": true, "subscribe": true});
        let member = match method {
            "tools/list" => "tools",
            "prompts/list" => "prompts",
            "resources/list" => "resources",
            "resources/templates/list" => "resourceTemplates",
            "initialize" => {
                let capabilities = json!({"tools": changes, "prompts": changes, "resources": changes});
                let version = &request["params"]["protocolVersion"];
                let info = json!({"name": "lists", "version": "1"});
                let result = json!({"protocolVersion": version, "capabilities": capabilities, "serverInfo": info});
                writeln!(output, r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#)?;
                output.flush()?;
                continue;
            }
            "tools/call" if kind == Kind::Updates => {
                let update = format!(
                    r#"{{"jsonrpc":"2.0","method":"notifications/resources/updated","params":{{"uri":"{URI}"}}}}"#
                );
                writeln!(output, "[{}]", vec![update.as_str(); UPDATES_IN_BATCH].join(","))?;
                for _ in 0..UPDATES {
                    writeln!(output, "{update}")?;
                }
                writeln!(output, r#"{{"jsonrpc":"2.0","id":{id},"result":{{"content":[]}}}}"#)?;
                output.flush()?;
                continue;
            }
            "ping" | "resources/subscribe" => {
                writeln!(output, r#"{{"jsonrpc":"2.0","id":{id},"result":{{}}}}"#)?;
                output.flush()?;
                continue;
            }
            _ => {
                let error = r#"{"code":-32601,"message":"Method not found"}"#;
                writeln!(output, r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#)?;
                output.flush()?;
                continue;
            }
        };
        // Four lists are one offer.
        let list = &lists[answered / 4 % 2];
        answered += 1;
        writeln!(output, r#"{{"jsonrpc":"2.0","id":{id},"result":{{"{member}":[{list}]}}}}"#)?;
        if is_changing && answered % 4 == 0 {
            for family in ["tools", "prompts", "resources"] {
                writeln!(output, r#"{{"jsonrpc":"2.0","method":"notifications/{family}/list_changed"}}"#)?;
            }
        }
        output.flush()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_lists_valid_elements() {
        for kind in [Kind::Names, Kind::Colliding, Kind::Large, Kind::Numbers, Kind::Updates] {
            let items: Value = serde_json::from_str(&format!("[{}]", kind.items(1))).expect("valid JSON");
            assert!(items[0]["name"].is_string(), "{kind:?}");
        }
    }
}
