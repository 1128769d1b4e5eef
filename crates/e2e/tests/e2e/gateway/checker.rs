//! The process that checks arguments against schemas that the gateway does not check itself: a hostile schema delays
//! neither the gateway nor other clients, and the process can be killed at any time.

use std::{fs, thread};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::world::{Gate, HASTY, backend};
use crate::mcp::client::{Place, is_alive, signal, text, until};

/// A tool whose schema has a regular expression, which the checker process evaluates.
fn choice() -> Value {
    json!({"name": "choice", "inputSchema": {"properties": {"mode": {"pattern": "^(read|write)$"}}}})
}

fn gate(tools: &[Value], more: impl FnOnce(crate::mcp::client::Setup) -> crate::mcp::client::Setup) -> Gate {
    let place = Place::new();
    let tools = place.write("tools.json", &Value::from(tools.to_vec()).to_string());
    let gate = Gate::listen_with(place, &backend("one", &["--tools", &tools], HASTY), more);
    gate.child("one");
    let mut session = gate.session();
    until("the tools", || session.tools().contains(&"one__choice".to_owned()).then_some(()));
    gate
}

/// The process that checks schemas, if there is one.
fn checker(gate: &Gate) -> Option<u32> {
    let parent = |pid: u32| -> Option<u32> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit(") ").next()?.split(' ').nth(1)?.parse().ok()
    };
    let is_below = |pid: u32| std::iter::successors(Some(pid), |pid| parent(*pid)).any(|pid| pid == gate.client.pid());
    let pids = fs::read_dir("/proc").expect("Linux").filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|words| words.ends_with("\0check-schemas\0"))
    })
    .find(|pid| is_below(*pid))
}

#[test]
fn the_checker_is_started_when_it_is_needed_and_gets_no_environment() {
    let gate = gate(&[choice()], |setup| setup.env("GITHUB_TOKEN", "s3cret"));
    let mut session = gate.session();
    session.call("one__echo", json!({"text": "plain types"}));
    assert_eq!(checker(&gate), None);
    session.call("one__choice", json!({"mode": "read"}));
    let pid = checker(&gate).expect("a process");
    let environment = fs::read_to_string(format!("/proc/{pid}/environ")).expect("it is ours");
    assert!(!environment.contains("s3cret") && !environment.contains("HOME="), "{environment:?}");
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).expect("it is ours");
    assert!(limits.lines().any(|line| line.starts_with("Max address space") && line.contains("536870912")), "{limits}");
    let refused = session.result("one__choice", json!({"mode": "s3cret"}));
    assert!(refused["isError"] == true && text(&refused).contains("`mode`"), "{refused}");
    assert!(!text(&refused).contains("s3cret"), "{refused}");
    gate.end();
}

/// The process belongs to the program that started it.
#[test]
fn another_program_starts_a_checker_of_its_own() {
    let gate = gate(&[choice()], |setup| setup);
    let mut session = gate.session();
    session.call("one__choice", json!({"mode": "read"}));
    for round in 1..=3 {
        let pid = checker(&gate).expect("a process");
        let output = gate.outlast(&["upgrade", "--program", crate::mcp::client::OUTLAST]);
        assert!(output.status.success(), "{output:?}");
        until("its end", || (!is_alive(pid)).then_some(()));
        session.call("one__choice", json!({"mode": "read"}));
        assert_eq!(session.result("one__choice", json!({"mode": "x"}))["isError"], true);
        assert_eq!(gate.place.audit_of("upgraded").len(), round);
    }
    gate.end();
}

/// In the form of the SDKs for Python and TypeScript.
#[test]
fn the_schemas_that_sdks_generate_need_no_checker() {
    let item = json!({"type": "object", "properties": {"n": {"type": "integer", "maximum": 5}}, "required": ["n"]});
    let python = json!({"type": "object", "title": "saveArguments", "$defs": {"Item": item}, "properties": {
        "mode": {"anyOf": [{"enum": ["read", "write"], "type": "string"}, {"type": "null"}], "default": null},
        "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}, "title": "Items"}}});
    let typescript = json!({"$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
        "additionalProperties": false, "properties": {
            "mode": {"type": "string", "minLength": 1, "maxLength": 5},
            "items": {"type": "array", "items": item, "maxItems": 2}}});
    let tools = [
        choice(),
        json!({"name": "python", "inputSchema": python}),
        json!({"name": "typescript", "inputSchema": typescript}),
    ];
    let gate = gate(&tools, |setup| setup);
    let mut session = gate.session();
    for tool in ["one__python", "one__typescript"] {
        let right = session.result(tool, json!({"mode": "read", "items": [{"n": 5}]}));
        assert_ne!(right["isError"], true, "{right}");
        for (wrong, place) in [
            (json!({"mode": "s3cret"}), "`mode`"),
            (json!({"items": [{"n": 6}]}), "`items[0].n`"),
            (json!({"items": [{}]}), "`items[0]`"),
        ] {
            let refused = session.result(tool, wrong);
            assert!(refused["isError"] == true && text(&refused).contains(place), "{tool}: {refused}");
            assert!(!text(&refused).contains("s3cret"), "{refused}");
        }
    }
    assert_eq!(checker(&gate), None);
    gate.end();
}

/// Its cost cannot be computed in advance, and is 2 to the power of the depth of the arguments.
fn endless() -> Value {
    let twice = json!({"allOf": [{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/tree"}]});
    let tree = json!({"properties": {"a": twice}});
    json!({"name": "endless", "inputSchema": {"$ref": "#/$defs/tree", "$defs": {"tree": tree, "x": {"$id": "inner"}}}})
}

/// Another client calls until the hostile call has ended: how often it was answered, and the result of the hostile
/// call.
fn meanwhile(gate: &Gate, tool: &str, arguments: Value) -> (usize, Value) {
    let (mut hostile, mut other) = (gate.session(), gate.session());
    thread::scope(|scope| {
        let hostile = scope.spawn(move || hostile.result(tool, arguments));
        let mut calls = 0;
        while !hostile.is_finished() {
            assert_eq!(other.call("one__echo", json!({"text": "meanwhile"})), "meanwhile");
            calls += 1;
        }
        (calls, hostile.join().expect("an answer"))
    })
}

#[test]
fn hostile_arguments_are_refused_and_delay_no_other_client() {
    let gate = gate(&[choice(), endless()], |setup| setup);
    let mut session = gate.session();
    session.call("one__endless", json!({"a": {"a": 1}}));
    let first = checker(&gate).expect("a process");
    let deep = (0..60).fold(json!(1), |inner, _| json!({"a": inner}));
    let (calls, refused) = meanwhile(&gate, "one__endless", deep);
    assert!(refused["isError"] == true && text(&refused).contains("too long"), "{refused}");
    // The budget of the hostile call is a second: a gateway that waited for it would have answered once.
    assert!(calls > 5, "{calls}");
    session.call("one__choice", json!({"mode": "read"}));
    assert_ne!(checker(&gate), Some(first), "it was replaced");
    assert_eq!(session.result("one__choice", json!({"mode": "none"}))["isError"], true, "it checks as before");
    gate.end();
}

/// 1.5 KB of it took 5 s and 1.5 GB. With an `$id` inside, its cost cannot be computed in advance.
#[test]
fn calls_of_a_schema_that_needs_all_memory_are_refused_and_delay_no_other_client() {
    let mut definitions = serde_json::Map::new();
    for n in 0..24 {
        let next = json!({"$ref": format!("#/$defs/d{}", n + 1)});
        definitions.insert(format!("d{n}"), json!({"anyOf": [next, next], "oneOf": [next, next]}));
    }
    definitions.insert("d24".into(), json!({"type": "string", "$id": "inner"}));
    let bomb = json!({"name": "bomb", "inputSchema": {"$ref": "#/$defs/d0", "$defs": definitions}});
    let gate = gate(&[choice(), bomb], |setup| setup);
    let (calls, refused) = meanwhile(&gate, "one__bomb", json!({}));
    assert!(refused["isError"] == true && text(&refused).contains("too long"), "{refused}");
    assert!(calls > 5, "{calls}");
    assert_eq!(gate.session().result("one__choice", json!({"mode": "none"}))["isError"], true, "others are checked");
    gate.end();
}

/// Thousands of large expressions.
#[test]
fn a_schema_that_takes_too_long_to_compile_is_not_used_and_delays_no_other_client() {
    let patterns: Vec<Value> = (0..3_000).map(|n| json!({"pattern": format!("\\p{{L}}{{1,10}}x{n}")})).collect();
    let schema = json!({"$defs": {"x": {"$id": "inner"}}, "properties": {"mode": {"anyOf": patterns}}});
    let gate = gate(&[choice(), json!({"name": "patterns", "inputSchema": schema})], |setup| setup);
    let (calls, answered) = meanwhile(&gate, "one__patterns", json!({"mode": "read"}));
    assert_ne!(answered["isError"], true, "it is not checked, and works: {answered}");
    assert!(calls > 5, "{calls}");
    let record = gate.place.recorded("schema_unchecked", 1);
    assert_eq!((&record["backend"], &record["tool"]), (&json!("one"), &json!("one__patterns")), "{record}");
    assert!(record["reason"].as_str().is_some_and(|why| why.contains("compiling it")), "{record}");
    assert_eq!(gate.backend("one")["unchecked"][0]["tool"], "one__patterns");
    assert_eq!(gate.session().result("one__choice", json!({"mode": "none"}))["isError"], true, "others are checked");
    gate.end();
}

#[test]
fn a_killed_checker_is_replaced() {
    let gate = gate(&[choice()], |setup| setup);
    let mut session = gate.session();
    let mut before = None;
    for _ in 0..3 {
        session.call("one__choice", json!({"mode": "read"}));
        assert_eq!(session.result("one__choice", json!({"mode": "none"}))["isError"], true);
        let pid = checker(&gate).expect("a process");
        assert_ne!(before.replace(pid), Some(pid));
        signal(pid, Signal::SIGKILL);
        until("its end", || (checker(&gate) != Some(pid)).then_some(()));
    }
    gate.end();
}

#[test]
fn killing_the_gateway_leaves_no_checker() {
    let mut gate = gate(&[choice()], |setup| setup);
    gate.session().call("one__choice", json!({"mode": "read"}));
    let pid = checker(&gate).expect("a process");
    signal(gate.client.pid(), Signal::SIGKILL);
    gate.client.wait();
    until("it is gone", || (!is_alive(pid)).then_some(()));
}
