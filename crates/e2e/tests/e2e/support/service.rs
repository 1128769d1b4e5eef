//! A stand-in for the services that claude and codex use, which are not available here: it listens on loopback and
//! answers each turn with a fixed text. Everything else about the agents is real.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Part of every answer.
pub(crate) const ANSWER: &str = "SERVICE-ANSWER";

/// A turn with this word is answered in many pieces, each with words that the agents themselves show while they work.
pub(crate) const SLOWLY: &str = "SLOWLY";
const PIECES: usize = 40;
const PAUSE: Duration = Duration::from_millis(250);

pub(crate) struct Service {
    port: u16,
    heard: Arc<Mutex<Vec<Vec<String>>>>,
    /// In seconds since 1970: until then each turn is refused, because the usage limit is reached.
    limited_until: Arc<AtomicU64>,
}

impl Service {
    /// Serves until the test's process ends.
    pub(crate) fn start() -> Service {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("it is bound").port();
        let heard: Arc<Mutex<Vec<Vec<String>>>> = Arc::default();
        let hearing = Arc::clone(&heard);
        let limited_until: Arc<AtomicU64> = Arc::default();
        let limit = Arc::clone(&limited_until);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (heard, limit) = (Arc::clone(&hearing), Arc::clone(&limit));
                thread::spawn(move || while serve(&stream, &heard, &limit).is_some() {});
            }
        });
        Service { port, heard, limited_until }
    }

    /// From now on, the account has reached its limit; returns when it is over.
    pub(crate) fn limit_for(&self, seconds: u64) -> u64 {
        let until = now() + seconds;
        self.limited_until.store(until, Ordering::SeqCst);
        until
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// How many turns of the user contain these words, in the longest conversation that was received.
    pub(crate) fn turns_with(&self, words: &str) -> usize {
        let heard = self.heard.lock().expect("no thread panics while it holds this");
        heard.iter().map(|turns| turns.iter().filter(|turn| turn.contains(words)).count()).max().unwrap_or_default()
    }

    /// Whether a turn with all these words was received. It may also be cut: an agent summarises earlier turns.
    pub(crate) fn has_heard(&self, words: &str) -> bool {
        let heard = self.heard.lock().expect("no thread panics while it holds this");
        heard.iter().flatten().any(|turn| turn.contains(words))
    }

    /// The user's turns, unchanged, in the longest conversation that was received.
    pub(crate) fn longest(&self) -> Vec<String> {
        let heard = self.heard.lock().expect("no thread panics while it holds this");
        heard.iter().max_by_key(|turns| turns.len()).cloned().unwrap_or_default()
    }
}

/// Serves one request of a connection; none at its end.
fn serve(stream: &TcpStream, heard: &Mutex<Vec<Vec<String>>>, limited_until: &AtomicU64) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let mut first = String::new();
    reader.read_line(&mut first).ok().filter(|count| *count > 0)?;
    let path = first.split(' ').nth(1)?.to_owned();
    let (mut length, mut is_chunked, mut is_expected) = (0, false, false);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|count| *count > 0)?;
        let line = line.trim().to_ascii_lowercase();
        match line.split_once(": ") {
            _ if line.is_empty() => break,
            Some(("content-length", value)) => length = value.parse().ok()?,
            Some(("transfer-encoding", value)) => is_chunked = value.contains("chunked"),
            Some(("expect", _)) => is_expected = true,
            _ => {}
        }
    }
    let mut writer = stream;
    if is_expected {
        writer.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").ok()?;
    }
    let mut body = Vec::new();
    if is_chunked {
        loop {
            let mut size = String::new();
            reader.read_line(&mut size).ok()?;
            let size = u64::from_str_radix(size.trim(), 16).ok()?;
            reader.by_ref().take(size).read_to_end(&mut body).ok()?;
            reader.read_line(&mut String::new()).ok()?;
            if size == 0 {
                break;
            }
        }
    } else {
        reader.by_ref().take(length).read_to_end(&mut body).ok()?;
    }
    let asked: Value = serde_json::from_slice(&body).unwrap_or_default();
    let until = limited_until.load(Ordering::SeqCst);
    if until > now() && (path.contains("/responses") || path.contains("/messages") && !path.contains("count_tokens")) {
        return writer.write_all(refusal(&path, until).as_bytes()).ok();
    }
    let turns = turns_in(&asked);
    if !turns.is_empty() {
        heard.lock().expect("no thread panics while it holds this").push(turns);
    }
    let words = words_for(turns_in(&asked).last().map(String::as_str).unwrap_or_default());
    let is_slow = words.len() > 1;
    let (status, kind, answer) = answer(&path, &asked, &words);
    let head = format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n", answer.len());
    writer.write_all(head.as_bytes()).ok()?;
    for event in answer.split_inclusive("\n\n") {
        writer.write_all(event.as_bytes()).ok()?;
        if is_slow && event.contains("delta") {
            thread::sleep(PAUSE);
        }
    }
    Some(())
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock").as_secs()
}

/// What the providers answer to a turn beyond the limit.
fn refusal(path: &str, until: u64) -> String {
    let (headers, body) = if path.contains("/responses") {
        let error = json!({"type": "usage_limit_reached", "message": "x", "plan_type": "plus", "resets_at": until});
        (String::new(), json!({"error": error}))
    } else {
        let unified = [
            ("status", "rejected".to_owned()),
            ("reset", until.to_string()),
            ("representative-claim", "five_hour".to_owned()),
            ("overage-status", "rejected".to_owned()),
            ("overage-disabled-reason", "org_level_disabled".to_owned()),
        ];
        let header = |(name, value): (&str, String)| format!("anthropic-ratelimit-unified-{name}: {value}\r\n");
        let error = json!({"type": "rate_limit_error", "message": "x"});
        (unified.into_iter().map(header).collect(), json!({"type": "error", "error": error}))
    };
    let body = body.to_string();
    format!(
        "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\n{headers}content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// The answer, in pieces.
fn words_for(turn: &str) -> Vec<String> {
    if !turn.contains(SLOWLY) {
        return vec![ANSWER.to_owned()];
    }
    let lines = (1..=PIECES).map(|number| format!("You may press esc to interrupt, line {number}.\n\n"));
    lines.chain([ANSWER.to_owned()]).collect()
}

/// The user's turns in a request, oldest first.
fn turns_in(asked: &Value) -> Vec<String> {
    let messages = asked["messages"].as_array().or_else(|| asked["input"].as_array());
    let by_person = messages.into_iter().flatten().filter(|message| message["role"] == "user");
    let text = |message: &Value| match &message["content"] {
        Value::String(text) => text.clone(),
        content => content.as_array().into_iter().flatten().filter_map(|part| part["text"].as_str()).collect(),
    };
    by_person.map(text).collect()
}

fn answer(path: &str, asked: &Value, words: &[String]) -> (&'static str, &'static str, String) {
    const STREAM: &str = "text/event-stream";
    const JSON: &str = "application/json";
    if path.contains("count_tokens") {
        return ("200 OK", JSON, json!({"input_tokens": 1}).to_string());
    }
    if path.contains("/messages") {
        let usage = json!({"input_tokens": 1, "output_tokens": 1});
        let message = |content: Value, stop: Value| {
            json!({"id": "msg_1", "type": "message", "role": "assistant", "model": asked["model"], "content": content,
                "stop_reason": stop, "stop_sequence": null, "usage": usage})
        };
        if asked["stream"] != true {
            let whole = message(json!([{"type": "text", "text": words.concat()}]), json!("end_turn"));
            return ("200 OK", JSON, whole.to_string());
        }
        let text = json!({"type": "text", "text": ""});
        let delta = |text: &String| {
            let delta = json!({"type": "text_delta", "text": text});
            ("content_block_delta", json!({"index": 0, "delta": delta}))
        };
        let stop = json!({"stop_reason": "end_turn", "stop_sequence": null});
        let before = [
            ("message_start", json!({"message": message(json!([]), Value::Null)})),
            ("content_block_start", json!({"index": 0, "content_block": text})),
        ];
        let after = [
            ("content_block_stop", json!({"index": 0})),
            ("message_delta", json!({"delta": stop, "usage": {"output_tokens": 1}})),
            ("message_stop", json!({})),
        ];
        return ("200 OK", STREAM, stream(before.into_iter().chain(words.iter().map(delta)).chain(after)));
    }
    if path.contains("/responses") {
        let content = json!([{"type": "output_text", "text": words.concat(), "annotations": []}]);
        let item = |content: Value| json!({"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": content});
        let usage = json!({"input_tokens": 1, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 1,
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 2});
        let response = |status: &str, output: Value| {
            json!({"id": "r1", "object": "response", "created_at": 0, "status": status, "model": asked["model"],
                "output": output, "usage": usage})
        };
        let delta = |text: &String| {
            let delta = json!({"item_id": "m1", "output_index": 0, "content_index": 0, "delta": text});
            ("response.output_text.delta", delta)
        };
        let before = [
            ("response.created", json!({"response": response("in_progress", json!([]))})),
            ("response.output_item.added", json!({"output_index": 0, "item": item(json!([]))})),
        ];
        let after = [
            ("response.output_item.done", json!({"output_index": 0, "item": item(content.clone())})),
            ("response.completed", json!({"response": response("completed", json!([item(content)]))})),
        ];
        return ("200 OK", STREAM, stream(before.into_iter().chain(words.iter().map(delta)).chain(after)));
    }
    ("404 Not Found", JSON, "{}".to_owned())
}

fn stream<'a>(events: impl Iterator<Item = (&'a str, Value)>) -> String {
    let event = |(name, mut data): (&str, Value)| {
        data["type"] = json!(name);
        format!("event: {name}\ndata: {data}\n\n")
    };
    events.map(event).collect()
}
