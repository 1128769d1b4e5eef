//! Many clients at once that connect, send, break off and leave at random: each gets its own answers, and no state of
//! them remains.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::support::{Front, PATIENCE, Wire, initialize, request};

const CLIENTS: u64 = 16;
const STEPS: u64 = 60;

struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

fn stateless(method: &str, id: &str, mut params: Value) -> (Vec<(&'static str, String)>, String) {
    params["_meta"] = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28",
                             "io.modelcontextprotocol/clientCapabilities": {}});
    let headers = vec![("mcp-protocol-version", "2026-07-28".to_owned()), ("mcp-method", method.to_owned())];
    (headers, request(id, method, params))
}

/// The answer to a POST, as a body or as events.
fn answer(wire: &mut Wire) -> Value {
    let answer = wire.answer();
    assert_eq!(answer.status, 200, "{answer:?}");
    if answer.header("content-type") == Some("application/json") {
        return answer.json();
    }
    let data = answer.body.lines().filter_map(|line| line.strip_prefix("data: "));
    data.map(|data| serde_json::from_str::<Value>(data).unwrap())
        .find(|message| message["result"] != Value::Null)
        .unwrap()
}

fn client(address: SocketAddr, number: u64) {
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15 ^ (number + 1));
    let mut session: Option<String> = None;
    let mut wire = Wire::connect(address);
    for step in 0..STEPS {
        let mine = format!("{number}/{step}");
        match dice.roll(8) {
            0 => wire = Wire::connect(address),
            1 => {
                if let Some(id) = session.take() {
                    assert_eq!(wire.ask("DELETE /mcp", &[("mcp-session-id", &id)]).status, 200);
                }
            }
            // A request whose connection is closed before the answer.
            2 => {
                let method = if dice.roll(2) == 0 { "hold" } else { "hold after a word" };
                match &session {
                    Some(id) => wire.send_post(&[("mcp-session-id", id)], &request(mine, method, json!({}))),
                    None => {
                        let (headers, body) = stateless(method, &mine, json!({}));
                        let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
                        wire.send_post(&headers, &body);
                    }
                }
                wire = Wire::connect(address);
            }
            // An incomplete request.
            3 => {
                wire.send("POST /mcp HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{");
                wire = Wire::connect(address);
            }
            _ if session.is_none() && dice.roll(2) == 0 => {
                let answer = wire.post(&[], &initialize("2025-06-18"));
                session = answer.header("mcp-session-id").map(str::to_owned);
            }
            what => {
                let (method, arguments) = if what < 6 { ("echo", json!(mine)) } else { ("words", json!([3, 10])) };
                let expected = if what < 6 { json!(mine) } else { json!(3) };
                let params = json!({"arguments": arguments});
                match &session {
                    Some(id) => wire.send_post(&[("mcp-session-id", id)], &request(mine.as_str(), method, params)),
                    None => {
                        let (headers, body) = stateless(method, &mine, params);
                        let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
                        wire.send_post(&headers, &body);
                    }
                }
                let answer = answer(&mut wire);
                assert_eq!((&answer["id"], &answer["result"]), (&json!(mine), &expected), "{answer}");
            }
        }
    }
    if let Some(id) = session {
        assert_eq!(Wire::connect(address).ask("DELETE /mcp", &[("mcp-session-id", &id)]).status, 200);
    }
}

#[test]
fn no_state_remains_of_many_clients() {
    let front = Front::new();
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let address = front.address;
            scope.spawn(move || client(address, number));
        }
    });
    // The connection of this request is the only one left.
    let deadline = Instant::now() + PATIENCE;
    let mut wire = front.connect();
    loop {
        let counts = wire.ask("GET /api/counts", &[]).json();
        if counts == json!([1, 0, 0]) {
            break;
        }
        assert!(Instant::now() < deadline, "connections, sessions and requests that are left: {counts}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
