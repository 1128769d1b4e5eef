//! Resource limits of a backend.

use serde_json::json;

use super::world::{Gate, HASTY, backend};
use crate::mcp::client::{Place, is_alive, until};

#[test]
fn a_child_above_its_memory_limit_is_replaced() {
    let gate = Gate::listen(Place::new(), &backend("one", &[], &format!("{HASTY}\nmemory_max = \"64MB\"")));
    let mut session = gate.session();
    let one = gate.child("one");
    // The puppet keeps every line that it received in memory.
    for _ in 0..20 {
        session.call("one__echo", json!({"text": "x".repeat(8 << 20)}));
        if !is_alive(one) {
            break;
        }
    }
    until("the child to be replaced", || (!is_alive(one)).then_some(()));
    assert_ne!(session.call("one__pid", json!({})), one.to_string());
    gate.end();
}

#[test]
fn an_idle_child_is_stopped_and_started_by_the_next_call() {
    let gate = Gate::listen(Place::new(), &backend("one", &[], "idle_stop = \"300ms\""));
    let one = gate.child("one");
    until("the idle child to be stopped", || (!is_alive(one)).then_some(()));
    let mut session = gate.session();
    assert_ne!(session.call("one__pid", json!({})), one.to_string());
    assert_eq!(gate.place.audit_of("server_crashed").len(), 0, "it did not crash");
    gate.end();
}

#[test]
fn the_processes_of_one_backend_for_sessions_are_limited() {
    let more = "children = \"per_session\"\nchildren_max = 1";
    let gate = Gate::listen(Place::new(), &backend("one", &[], more));
    let mut first = gate.session();
    let own = first.call("one__pid", json!({}));
    let mut second = gate.session();
    let refused = second.result("one__pid", json!({}));
    assert_eq!(refused["isError"], true, "{refused}");
    assert_eq!(refused["_meta"]["outlast/failure"]["reason"], "children_max", "{refused}");
    let words = crate::mcp::client::text(&refused);
    assert!(words.contains("`children_max`") && words.contains("1 process "), "{words}");
    assert_eq!(first.call("one__pid", json!({})), own);
    gate.end();
}
