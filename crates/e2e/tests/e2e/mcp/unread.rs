//! A server that does not read its input (u1 to u3): outlast still reads and answers the client.

use serde_json::{Value, json};

use super::client::{Place, Setup, text};

const MIB: usize = 1 << 20;
/// More than the 8 MiB that may be queued, and the pipes.
const CALLS: usize = 24;

#[test]
fn a_server_that_stops_reading_does_not_stop_the_conversation() {
    let place = Place::new();
    let mut client = Setup::new(&place).hasty().options(["--drain", "2"]).ready();
    let old = client.server_pid();
    client.call("hang", json!({"answer": true}));
    let letters = "x".repeat(MIB);
    let asked: Vec<u64> =
        (0..CALLS).map(|n| client.send_call("echo", json!({"text": format!("{n} {letters}")}))).collect();

    // Every call before this one was read, or this one would wait for them.
    let status = client.status();
    assert_eq!(status["state"], "ready", "{status}");
    assert!(status["queued_bytes"].as_u64().is_some_and(|bytes| bytes >= 8 * MIB as u64), "{status}");

    // The queue goes to the next server; only lines that the old pipe took, or began to take, stay there.
    let report = client.restart();
    assert_eq!(report["old_pid"], old, "{report}");
    let (mut served, mut refused, mut lost) = (0, 0, 0);
    for id in asked {
        let answer = client.answer(id);
        let failure = &answer["result"]["_meta"]["outlast/failure"];
        match failure["reason"].as_str() {
            None => {
                assert!(text(&answer["result"]).len() > MIB);
                served += 1;
            }
            Some("hold_full") => {
                assert_eq!(failure["limit"], "queued_bytes_max", "{failure}");
                assert_eq!(failure["outcome"], "not_sent", "{failure}");
                assert_eq!(failure["exit"], Value::Null, "{failure}");
                refused += 1;
            }
            Some(_) => {
                assert_eq!((&failure["reason"], &failure["outcome"]), (&json!("drain_over"), &json!("unknown")));
                lost += 1;
            }
        }
    }
    assert!(served >= 7 && refused >= 8 && lost <= 3, "served {served}, refused {refused}, lost {lost}");
    assert_ne!(client.server_pid(), old);
    client.end();
}

#[test]
fn a_server_that_reads_slowly_refuses_nothing() {
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    let letters = "x".repeat(MIB);
    let asked: Vec<u64> = (0..CALLS).map(|_| client.send_call("echo", json!({"text": letters}))).collect();
    for id in asked {
        assert_eq!(text(&client.answer(id)["result"]).len(), MIB);
    }
    client.end();
}
