//! Large bodies between replicas: they arrive unchanged, calls of other sessions continue beside them, and a body over the limit
//! is refused.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};

use nix::sys::signal::Signal;
use serde_json::json;

use super::{
    super::{
        web::{BEGUN_ID, Session, Web},
        world::Gate,
    },
    Team, never_two, owner,
};
use crate::{
    mcp::client::{signal, text, until},
    support::nats::{NatsPrograms, Version},
};

const MIB: usize = 1 << 20;
/// The longest body that the replicas take: many times the window of a stream, and more than what may be unacknowledged.
const BODY_MAX: usize = 17 * MIB;

/// So many letters, not one like the other: a part that is missing or in a wrong place is noticed.
fn letters(count: usize) -> String {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(count + 8);
    while bytes.len() < count {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes().map(|byte| b'a' + byte % 26));
    }
    bytes.truncate(count);
    String::from_utf8(bytes).expect("letters")
}

/// The arguments of an echo that is a request of so many bytes.
fn filling(tool: &str, bytes: usize) -> (String, Vec<u8>) {
    let body = |text: &str| {
        let params = json!({"name": tool, "arguments": {"text": text}});
        json!({"jsonrpc": "2.0", "id": BEGUN_ID, "method": "tools/call", "params": params}).to_string()
    };
    let text = letters(bytes - body("").len());
    let body = body(&text).into_bytes();
    assert_eq!(body.len(), bytes);
    (text, body)
}

/// Calls of another session through the same replicas, one after the other, until it is stopped.
struct SmallCalls {
    answered: Arc<AtomicUsize>,
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl SmallCalls {
    fn begin(mut session: Session, tools: &'static [&'static str]) -> SmallCalls {
        let (answered, is_over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, stop) = (answered.clone(), is_over.clone());
        let thread = thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                for tool in tools {
                    assert_eq!(session.call(tool, json!({"text": "small"})), "small");
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        let calls = SmallCalls { answered, is_over, thread };
        calls.next(1);
        calls
    }

    /// Waits until so many more are answered.
    fn next(&self, count: usize) {
        let from = self.count();
        until("small calls", || (from + count <= self.count()).then_some(()));
    }

    fn count(&self) -> usize {
        self.answered.load(Ordering::Relaxed)
    }

    fn end(self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.join().expect("all were answered");
    }
}

/// The text of the answer to a request that was sent before.
fn answer_of(web: &mut Web) -> String {
    let reply = web.answer();
    let mut messages = reply.messages();
    messages.retain(|message| message["id"] == BEGUN_ID);
    match messages.as_slice() {
        [answer] => text(&answer["result"]),
        _ => panic!("status {}: {} messages: {:.300}", reply.status, messages.len(), reply.text()),
    }
}

#[test]
fn large_bodies_pass_between_replicas_unchanged_beside_small_calls() {
    let Some(programs) = NatsPrograms::find("gateway::replicas::large::large_bodies_pass_between_replicas") else {
        return;
    };
    // The smallest limit of a message that a server may have.
    let mut team = Team::with(programs.one_with(Version::Newest, "jetstream {}\nmax_payload: 65536"));
    team.more = format!("[gateway]\nbody_max = {BODY_MAX}\n");
    let (a, b) = (team.start("a"), team.start("b"));
    let (home, others) = owner(&[&a, &b]);
    let entry = others[0];
    // All sessions use the replica that is not the owner: one whose home is the owner, and one of this replica, whose calls
    // of `one` go to the owner.
    let mut elsewhere = home.session();
    elsewhere.reconnect(&entry.address);
    let small = SmallCalls::begin(elsewhere, &["each__echo", "one__echo"]);
    for (opened_at, tool, bytes) in [(home, "each__echo", BODY_MAX), (entry, "one__echo", BODY_MAX / 4)] {
        let mut session = opened_at.session();
        session.reconnect(&entry.address);
        let (sent, body) = filling(tool, bytes);
        let before = small.count();
        let received = answer_of(&mut session.begin_body(&body));
        assert!(sent == received, "{tool}: {} bytes came back as {} others", sent.len(), received.len());
        assert!(small.count() > before + 4, "{tool}: small calls waited for the large one");

        // It is refused by its length, before it is sent.
        let mut web = Web::connect(&entry.address);
        let head = format!(
            "POST /mcp HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\naccept: application/json, \
             text/event-stream\r\nmcp-session-id: {}\r\ncontent-length: {}\r\n\r\n",
            entry.address,
            session.id,
            BODY_MAX + 1
        );
        web.raw(head.as_bytes());
        let refused = web.answer();
        assert_eq!(refused.status, 413, "{}", refused.text());
        assert!(refused.text().contains(&format!("the body is larger than {BODY_MAX} bytes")), "{}", refused.text());
        assert_eq!(session.call(tool, json!({"text": "next"})), "next");
    }
    small.end();
    never_two(&[&a, &b]);
    a.end();
    b.end();
}

#[test]
fn a_replica_that_reads_nothing_does_not_slow_down_another_one() {
    let Some(team) = Team::new("gateway::replicas::large::a_replica_that_reads_nothing") else { return };
    let (entry, slow, fast) = (team.start("entry"), team.start("slow"), team.start("fast"));
    let (mut to_slow, mut to_fast) = (slow.session(), fast.session());
    to_slow.reconnect(&entry.address);
    to_fast.reconnect(&entry.address);
    assert_eq!(to_slow.call("each__echo", json!({"text": "both run"})), "both run");
    let small = SmallCalls::begin(to_fast, &["each__echo"]);
    // More than the window of a stream, for a replica that does not run.
    signal(slow.client.pid(), Signal::SIGSTOP);
    let (sent, body) = filling("each__echo", 12 * MIB);
    let mut waiting = to_slow.begin_body(&body);
    small.next(10);
    let reply = waiting.answer();
    let answer = reply.messages().into_iter().find(|message| message["id"] == BEGUN_ID);
    let answer = answer.unwrap_or_else(|| panic!("{}: {:.300}", reply.status, reply.text()));
    // If the replica was lost before any of it was sent, another one has served it.
    let is_served = answer["result"].is_object() && text(&answer["result"]) == sent;
    let is_lost = answer["error"]["data"]["outcome"] == "unknown";
    assert!(is_served || is_lost, "{:.300}", answer.to_string());
    // Its session continues at another replica.
    assert_eq!(to_slow.call("each__echo", json!({"text": "next"})), "next");
    small.next(10);
    small.end();
    signal(slow.client.pid(), Signal::SIGCONT);
    [entry, slow, fast].into_iter().for_each(Gate::end);
}
