//! Backends over HTTP that refuse, forget their sessions or answer with something other than JSON-RPC.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{Receiver, channel},
    },
    thread,
};

use serde_json::{Value, json};

use super::world::Gate;
use crate::{
    mcp::client::{PATIENCE, Place, until},
    support::peers::Peers,
};

const CHALLENGE: &str = r#"Bearer error="invalid_token", resource_metadata="https://id.example/.well-known""#;
const OAUTH_BODY: &str = r#"{"error":"invalid_token","error_description":"The access token expired"}"#;

/// One HTTP request to a [`Remote`].
struct Asked {
    method: String,
    body: Value,
}

impl Asked {
    fn is(&self, method: &str) -> bool {
        self.body["method"] == method
    }

    /// The argument of the tool, which names the case.
    fn case(&self) -> &str {
        self.body["params"]["arguments"]["case"].as_str().unwrap_or_default()
    }
}

/// A response head and body, sent literally.
struct Given {
    status: &'static str,
    headers: String,
    body: String,
}

fn given(status: &'static str, headers: &str, body: impl Into<String>) -> Given {
    Given { status, headers: headers.to_owned(), body: body.into() }
}

fn as_json(body: &Value) -> Given {
    given("200 OK", "content-type: application/json\r\n", body.to_string())
}

/// A server on its own port, in threads that end with the test.
struct Remote {
    url: String,
}

impl Remote {
    fn start(answer: impl Fn(&Asked) -> Given + Send + Sync + 'static) -> Remote {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/mcp", listener.local_addr().expect("an address"));
        let answer = Arc::new(answer);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let answer = answer.clone();
                thread::spawn(move || while serve(&stream, &*answer).is_some() {});
            }
        });
        Remote { url }
    }

    fn config(&self, more: &str) -> String {
        format!("[[backend]]\nname = \"far\"\nurl = {:?}\n{more}\n", self.url)
    }
}

fn serve(stream: &TcpStream, answer: &dyn Fn(&Asked) -> Given) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|count| *count > 0)?;
    let method = line.split(' ').next()?.to_owned();
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|count| *count > 0)?;
        let line = line.trim().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("content-length: ") {
            length = value.parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let Given { status, headers, body } =
        answer(&Asked { method, body: serde_json::from_slice(&body).unwrap_or_default() });
    let mut writer = stream;
    if headers.contains("content-length") || headers.contains("connection: close") {
        write!(writer, "HTTP/1.1 {status}\r\n{headers}\r\n{body}").ok()?;
        return None;
    }
    write!(writer, "HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n{body}", body.len()).ok()
}

/// The answer of a correct server to everything but calls; none to calls.
fn sound(asked: &Asked, is_stateless: bool) -> Option<Given> {
    let id = &asked.body["id"];
    let capabilities = json!({"tools": {}});
    let mut result = match asked.body["method"].as_str() {
        _ if asked.method == "GET" => return Some(given("405 Method Not Allowed", "", "")),
        _ if asked.method == "DELETE" => return Some(given("200 OK", "", "")),
        Some("initialize") if !is_stateless => {
            let result = json!({"protocolVersion": "2025-11-25", "capabilities": capabilities,
                "serverInfo": {"name": "far", "version": "1"}});
            let headers = "content-type: application/json\r\nmcp-session-id: s1\r\n";
            return Some(given("200 OK", headers, json!({"jsonrpc": "2.0", "id": id, "result": result}).to_string()));
        }
        Some("server/discover") if is_stateless => {
            json!({"supportedVersions": ["2026-07-28"], "capabilities": capabilities})
        }
        Some("tools/list") => json!({"tools": [{"name": "do", "inputSchema": {"type": "object"}}]}),
        Some("tools/call") => return None,
        Some(method) if method.starts_with("notifications/") => return Some(given("202 Accepted", "", "")),
        _ => {
            let error = json!({"code": -32601, "message": "no such method"});
            return Some(as_json(&json!({"jsonrpc": "2.0", "id": id, "error": error})));
        }
    };
    if is_stateless {
        result["resultType"] = json!("complete");
    }
    Some(as_json(&json!({"jsonrpc": "2.0", "id": id, "result": result})))
}

/// Whether this is the one response to a request, as JSON-RPC defines it.
fn is_response(message: &Value, id: &Value) -> bool {
    let Some(members) = message.as_object() else { return false };
    let known = ["jsonrpc", "id", "result", "error"];
    let is_error = |error: &Value| error["code"].is_i64() && error["message"].is_string();
    members.keys().all(|name| known.contains(&name.as_str()))
        && message["jsonrpc"] == "2.0"
        && message["id"] == *id
        && (members.contains_key("result") != members.contains_key("error"))
        && members.get("error").is_none_or(is_error)
}

fn odd_answer(asked: &Asked) -> Given {
    let id = &asked.body["id"];
    let json_of = |status, body: String| given(status, "content-type: application/json\r\n", body);
    match asked.case() {
        "html" => given("200 OK", "content-type: text/html\r\n", "<p>Welcome</p>"),
        "empty" => given("200 OK", "", ""),
        "accepted" => given("202 Accepted", "", ""),
        "500" => given("500 Internal Server Error", "content-type: text/html\r\n", "<h1>oops</h1>"),
        "503" => given("503 Service Unavailable", "", ""),
        "404" => given("404 Not Found", "content-type: text/html\r\n", "<h1>no such page</h1>"),
        "413" => json_of("413 Payload Too Large", r#"{"error":"too large"}"#.into()),
        "error that is a string" => {
            json_of("200 OK", format!(r#"{{"jsonrpc":"2.0","id":{id},"error":"invalid_token"}}"#))
        }
        "error that is a string, 400" => json_of("400 Bad Request", format!(r#"{{"id":{id},"error":"no"}}"#)),
        "error without an id" => json_of("400 Bad Request", r#"{"error":{"message":"no code"}}"#.into()),
        "error without a message" => {
            json_of("200 OK", format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":1}}}}"#))
        }
        "both" => json_of("200 OK", format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{"content":[]}},"error":null}}"#)),
        "no version" => json_of("200 OK", format!(r#"{{"id":{id},"result":{{"content":[]}}}}"#)),
        "not JSON-RPC" => json_of("200 OK", r#"{"hello":"world"}"#.into()),
        "not an object" => json_of("200 OK", "[1, \"two\"]".into()),
        "another id" => json_of("200 OK", r#"{"jsonrpc":"2.0","id":99999,"result":{}}"#.into()),
        "wrong type" => {
            given("200 OK", "content-type: text/plain\r\n", format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{}}}}"#))
        }
        "cut JSON" => given("200 OK", "content-type: application/json\r\ncontent-length: 900\r\n", "{\"jsonrpc\""),
        "cut stream" => {
            given("200 OK", "content-type: text/event-stream\r\nconnection: close\r\n", "data: {\"jsonrpc\":")
        }
        "403" => given(
            "403 Forbidden",
            &format!("content-type: application/json\r\nwww-authenticate: {CHALLENGE}\r\n"),
            r#"{"error":"insufficient_scope"}"#,
        ),
        "429" => given("429 Too Many Requests", "retry-after: 7\r\n", "slow down"),
        case => panic!("no such case: {case}"),
    }
}

const ODD_CASES: [&str; 21] = [
    "html",
    "empty",
    "accepted",
    "500",
    "503",
    "404",
    "413",
    "error that is a string",
    "error that is a string, 400",
    "error without an id",
    "error without a message",
    "both",
    "no version",
    "not JSON-RPC",
    "not an object",
    "another id",
    "wrong type",
    "cut JSON",
    "cut stream",
    "403",
    "429",
];

#[test]
fn any_answer_of_an_http_backend_becomes_one_valid_response() {
    for is_stateless in [false, true] {
        let remote = Remote::start(move |asked| sound(asked, is_stateless).unwrap_or_else(|| odd_answer(asked)));
        // The breaker is not tested here.
        let config = remote.config("breaker = { failures = 0 }\ncall_timeout = \"20s\"");
        let mut gate = Gate::stdio(Place::new(), &config);
        until("the catalogue", || {
            let tools = gate.client.ask("tools/list", json!({}));
            tools["result"]["tools"].to_string().contains("far__do").then_some(())
        });
        for case in ODD_CASES {
            let id = json!(format!("case {case}"));
            gate.client.owed(&id.to_string());
            let params = json!({"name": "far__do", "arguments": {"case": case}});
            gate.client
                .line(&json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}).to_string());
            let answer = gate.client.answer_to(&id.to_string());
            assert!(is_response(&answer, &id), "{case}: {answer}");
            let text = answer.to_string();
            match case {
                "both" | "no version" => assert!(answer["result"]["content"].is_array(), "{case}: {text}"),
                "403" => assert!(
                    answer["error"]["code"] == 403
                        && answer["error"]["data"]["www_authenticate"] == CHALLENGE
                        && text.contains("insufficient_scope")
                        && answer["error"]["data"]["outcome"] == "not_run",
                    "{text}"
                ),
                "429" => assert!(
                    answer["error"]["code"] == 429 && answer["error"]["data"]["retry_after_ms"] == 7000,
                    "{text}"
                ),
                "413" => assert!(answer["error"]["code"] == 413 && text.contains("too large"), "{text}"),
                // Without a session it is a refusal; with one it would mean that the session is lost.
                "404" => {}
                _ => assert!(answer.get("error").is_some() || answer["result"]["isError"] == true, "{case}: {text}"),
            }
        }
        gate.end();
    }
}

fn locked() -> Given {
    let headers = format!("content-type: application/json\r\nwww-authenticate: {CHALLENGE}\r\n");
    given("401 Unauthorized", &headers, OAUTH_BODY)
}

/// What an operator and a client see of a backend that requires credentials.
fn is_told_of_credentials(text: &str) {
    for part in ["401 Unauthorized", CHALLENGE, "`headers`", "outlast reload"] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
}

#[test]
fn a_backend_that_needs_credentials_is_not_ready_and_shows_a_hint() {
    for is_stateless in [false, true] {
        let is_locked = Arc::new(AtomicBool::new(false));
        let locks = is_locked.clone();
        let remote = Remote::start(move |asked| match locks.load(Ordering::SeqCst) {
            true => locked(),
            false => sound(asked, is_stateless).unwrap_or_else(|| {
                as_json(&json!({"jsonrpc": "2.0", "id": asked.body["id"], "result": {"content": []}}))
            }),
        });
        let mut gate = Gate::stdio(Place::new(), &remote.config(""));
        until("the catalogue", || {
            let tools = gate.client.ask("tools/list", json!({}));
            tools["result"]["tools"].to_string().contains("far__do").then_some(())
        });
        is_locked.store(true, Ordering::SeqCst);
        let id = gate.client.send_call("far__do", json!({}));
        let answer = gate.client.answer(id);
        assert!(is_response(&answer, &json!(id)), "{answer}");
        let error = &answer["error"];
        assert_eq!((&error["code"], &error["data"]["outcome"]), (&json!(401), &json!("not_run")), "{answer}");
        assert_eq!(
            (&error["data"]["reason"], &error["data"]["www_authenticate"]),
            (&json!("unauthorized"), &json!(CHALLENGE))
        );
        is_told_of_credentials(error["message"].as_str().unwrap_or_default());
        // The handshake is refused as well, so it stays down, and its cause stays known.
        let state = gate.is("far", "backoff");
        is_told_of_credentials(state["last_exit"].as_str().unwrap_or_default());
        is_told_of_credentials(&gate.client.says("401"));
        let words = String::from_utf8_lossy(&gate.outlast(&["state"]).stdout).into_owned();
        is_told_of_credentials(&words.split_whitespace().collect::<Vec<_>>().join(" "));
        // A later call gets the same error at once.
        let id = gate.client.send_call("far__do", json!({}));
        let answer = gate.client.answer(id);
        is_told_of_credentials(answer["error"]["message"].as_str().unwrap_or_default());
        // With the right credentials it serves again.
        is_locked.store(false, Ordering::SeqCst);
        let resumed = gate.outlast(&["resume", "far"]);
        let said = String::from_utf8_lossy(&resumed.stdout).into_owned();
        assert!(resumed.status.success() && !said.contains("null"), "{said}");
        gate.is("far", "ready");
        let id = gate.client.send_call("far__do", json!({}));
        assert!(gate.client.answer(id)["result"]["content"].is_array());
        gate.end();
    }
}

#[test]
fn a_stream_that_needs_credentials_ends_the_session() {
    let is_locked = Arc::new(AtomicBool::new(true));
    let locks = is_locked.clone();
    let remote = Remote::start(move |asked| match asked.method.as_str() {
        "GET" if locks.load(Ordering::SeqCst) => locked(),
        _ => sound(asked, false).unwrap_or_else(|| as_json(&Value::Null)),
    });
    let gate = Gate::stdio(Place::new(), &remote.config(""));
    let state = gate.is("far", "backoff");
    is_told_of_credentials(state["last_exit"].as_str().unwrap_or_default());
    gate.end();
}

#[test]
fn a_busy_backend_is_retried_at_its_retry_time_and_the_client_gets_it() {
    let asked_for_lists = Arc::new(AtomicUsize::new(0));
    let lists = asked_for_lists.clone();
    let remote = Remote::start(move |asked| match asked.is("tools/list") {
        true if lists.fetch_add(1, Ordering::SeqCst) < 2 => given("429 Too Many Requests", "retry-after: 1\r\n", ""),
        _ => sound(asked, false).unwrap_or_else(|| given("503 Service Unavailable", "retry-after: 9\r\n", "")),
    });
    let gate = Gate::listen(Place::new(), &remote.config(""));
    until("the catalogue", || (gate.backend("far")["catalogue"] == "confirmed").then_some(()));
    assert_eq!(asked_for_lists.load(Ordering::SeqCst), 3);
    let mut session = gate.session();
    let params = json!({"name": "far__do", "arguments": {}});
    let reply = session.post(&json!({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}));
    let answer = reply.messages().pop().expect("an answer");
    assert!(is_response(&answer, &json!(7)), "{answer}");
    assert_eq!(answer["error"]["code"], 503, "{answer}");
    assert_eq!(answer["error"]["data"]["retry_after_ms"], 9000, "{answer}");
    assert_eq!(reply.header("retry-after"), Some("9"), "{:?}", reply.headers);
    gate.end();
}

#[test]
fn texts_about_an_http_backend_name_no_process() {
    let remote = Remote::start(|asked| sound(asked, false).unwrap_or_else(|| as_json(&Value::Null)));
    let gate = Gate::listen(Place::new(), &remote.config(""));
    gate.is("far", "ready");
    let restarted = gate.outlast(&["restart", "far"]);
    let said = String::from_utf8_lossy(&restarted.stdout).into_owned();
    assert!(restarted.status.success() && said.starts_with("Restarted ") && said.trim_end().ends_with("ms"), "{said}");
    let log = gate.client.stderr_text();
    let texts = [&["state"][..], &["state", "far"], &["ps"], &["audit"], &["logs"]]
        .map(|args| String::from_utf8_lossy(&gate.outlast(args).stdout).into_owned());
    for text in texts.iter().chain([&said, &log]) {
        assert!(!text.is_empty() && !text.contains("null") && !text.contains("PID: 0"), "{text}");
    }
    gate.end();
}

/// The real server-everything on a port, until it is dropped.
struct Everything(Child);

impl Everything {
    fn start(peers: &Peers, port: u16) -> Everything {
        let mut command = Command::new(peers.node());
        command.arg(peers.package("server-everything/dist/index.js")).arg("streamableHttp");
        command.env("PORT", port.to_string()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("node starts");
        let mut said = BufReader::new(child.stderr.take().expect("stderr is piped")).lines().map_while(Result::ok);
        assert!(said.any(|line| line.contains("listening on port")), "server-everything does not start");
        thread::spawn(move || said.for_each(drop));
        Everything(child)
    }
}

impl Drop for Everything {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn server_everything_is_restarted_under_load_and_no_refused_call_is_unknown() {
    let Some(peers) = Peers::find("gateway::remote::server_everything_is_restarted_under_load") else { return };
    const CLIENTS: usize = 6;
    const RESTARTS: usize = 3;
    let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a port").port();
    let mut server = Everything::start(&peers, port);
    let config = format!("[[backend]]\nname = \"all\"\nurl = \"http://127.0.0.1:{port}/mcp\"\n");
    let gate = Gate::listen(Place::new(), &config);
    until("the catalogue", || (gate.backend("all")["catalogue"] == "confirmed").then_some(()));
    let is_over = Arc::new(AtomicBool::new(false));
    let (heard, answers) = channel::<Value>();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (mut session, is_over, heard) = (gate.session(), is_over.clone(), heard.clone());
            thread::spawn(move || {
                while !is_over.load(Ordering::SeqCst) {
                    let _ = heard.send(session.result("all__echo", json!({"message": "here"})));
                }
            })
        })
        .collect();
    drop(heard);
    let mut all = Vec::new();
    for _ in 0..RESTARTS {
        hear_good(&answers, &mut all, 50);
        drop(server);
        server = Everything::start(&peers, port);
        hear_good(&answers, &mut all, 50);
    }
    is_over.store(true, Ordering::SeqCst);
    clients.into_iter().for_each(|client| client.join().expect("every call is answered"));
    all.extend(answers);
    // A call on a broken connection may have run. All others were refused, or waited, and were sent again.
    let failed: Vec<&Value> = all.iter().filter(|result| result["isError"] == true).collect();
    for result in &failed {
        let words = crate::mcp::client::text(result);
        assert!(words.contains("lost the connection to") || words.contains("broke off its answer"), "{words}");
    }
    assert!(failed.len() < all.len() / 2, "{} of {}", failed.len(), all.len());

    // Restarted while no call is open, it refuses the first calls: it does not know their session.
    let mut sessions: Vec<_> = (0..CLIENTS).map(|_| gate.session()).collect();
    drop(server);
    let server = Everything::start(&peers, port);
    let calls = sessions
        .drain(..)
        .map(|mut session| thread::spawn(move || session.call("all__echo", json!({"message": "again"}))));
    for call in calls.collect::<Vec<_>>() {
        assert_eq!(call.join().expect("every call succeeds"), "Echo: again");
    }
    drop(server);
    gate.end();
}

/// Waits for this many successful calls.
fn hear_good(answers: &Receiver<Value>, all: &mut Vec<Value>, mut count: usize) {
    while count > 0 {
        let result = answers.recv_timeout(PATIENCE).expect("an answer in time");
        count -= usize::from(result["isError"] != true);
        all.push(result);
    }
}
