//! Tests of the puppet, which all other tests rely on.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::process::ExitStatusExt,
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
};

use serde_json::{Value, json};

const META: &str = r#""_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{}}"#;

struct Client {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    next_id: u64,
}

impl Client {
    fn start(args: &[&str]) -> Self {
        let mut child = Command::new(crate::support::PUPPET)
            .args(args)
            .env_remove("OUTLAST_PUPPET")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the puppet starts");
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
        Self { child, stdin, stdout, next_id: 1 }
    }

    fn ready(args: &[&str]) -> Self {
        let mut client = Self::start(args);
        client.ask("initialize", json!({"protocolVersion": "2025-06-18", "capabilities": {}}));
        client.say(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#);
        client
    }

    fn say(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().expect("stdin is open");
        stdin.write_all(format!("{line}\n").as_bytes()).expect("the puppet listens");
    }

    fn hear(&mut self) -> Value {
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("stdout can be read");
        serde_json::from_str(&line).unwrap_or_else(|_| panic!("not a message: {line:?}"))
    }

    fn send(&mut self, method: &str, params: Value) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.say(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string());
        id
    }

    fn send_call(&mut self, tool: &str, arguments: Value) -> u64 {
        self.send("tools/call", json!({"name": tool, "arguments": arguments}))
    }

    fn ask(&mut self, method: &str, params: Value) -> Value {
        let id = self.send(method, params);
        let answer = self.hear();
        assert_eq!(answer["id"], id, "{answer}");
        answer
    }

    /// The text of a call that is answered next.
    fn call(&mut self, tool: &str, arguments: Value) -> String {
        let answer = self.ask("tools/call", json!({"name": tool, "arguments": arguments}));
        assert_eq!(answer["result"]["isError"], false, "{answer}");
        text(&answer)
    }

    fn tool_names(&mut self) -> Vec<String> {
        let answer = self.ask("tools/list", json!({}));
        let tools = answer["result"]["tools"].as_array().expect("a list of tools");
        tools.iter().map(|tool| tool["name"].as_str().expect("a name").to_owned()).collect()
    }

    fn end(mut self) -> ExitStatus {
        self.stdin = None;
        self.child.wait().expect("our child")
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text(answer: &Value) -> String {
    answer["result"]["content"][0]["text"].as_str().unwrap_or_else(|| panic!("no text in {answer}")).to_owned()
}

fn path_in(directory: &tempfile::TempDir, name: &str) -> String {
    directory.path().join(name).to_str().expect("a UTF-8 path").to_owned()
}

#[test]
fn refuses_requests_before_the_whole_handshake() {
    let mut client = Client::start(&[]);
    let refused = "Received request before initialization was complete";
    assert_eq!(client.ask("ping", json!({}))["result"], json!({}));
    assert_eq!(client.ask("tools/list", json!({}))["error"], json!({"code": -32602, "message": refused}));

    let answer = client.ask("initialize", json!({"protocolVersion": "2024-11-05", "capabilities": {}}));
    assert_eq!(answer["result"]["protocolVersion"], "2024-11-05");
    assert_eq!(client.ask("tools/list", json!({}))["error"]["message"], refused);

    client.say(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#);
    assert!(client.tool_names().contains(&"echo".to_owned()));
    assert_eq!(client.ask("no/such", json!({}))["error"]["code"], -32601);
    assert_eq!(client.end().code(), Some(0));
}

#[test]
fn answers_an_unknown_version_with_its_newest_or_with_the_only_one() {
    for (args, asked, answered) in [
        (&[][..], "1999-01-01", "2025-11-25"),
        (&[], "2025-03-26", "2025-03-26"),
        (&["--version-only", "2025-06-18"], "2025-11-25", "2025-06-18"),
    ] {
        let mut client = Client::start(args);
        let answer = client.ask("initialize", json!({"protocolVersion": asked, "capabilities": {}}));
        assert_eq!(answer["result"]["protocolVersion"], answered);
    }
}

#[test]
fn the_first_request_decides_the_era() {
    let mut client = Client::start(&[]);
    client.say(&format!(r#"{{"jsonrpc":"2.0","id":"d","method":"server/discover","params":{{{META}}}}}"#));
    let result = &client.hear()["result"];
    assert_eq!(result["supportedVersions"], json!(["2026-07-28"]));
    assert_eq!(result["resultType"], "complete");
    assert_eq!(result["cacheScope"], "private");
    assert!(result["ttlMs"].is_u64());

    let refusal = client.ask("initialize", json!({"protocolVersion": "2025-11-25"}));
    assert_eq!(refusal["error"]["code"], -32022);
    assert_eq!(refusal["error"]["data"], json!({"supported": ["2026-07-28"], "requested": "2025-11-25"}));
    assert_eq!(client.ask("tools/list", json!({}))["error"]["code"], -32602, "no envelope");
    client.say(&format!(r#"{{"jsonrpc":"2.0","id":2,"method":"ping","params":{{{META}}}}}"#));
    assert_eq!(client.hear()["error"]["code"], -32601);

    let mut legacy = Client::start(&["--era", "legacy"]);
    legacy.say(&format!(r#"{{"jsonrpc":"2.0","id":1,"method":"server/discover","params":{{{META}}}}}"#));
    assert_eq!(legacy.hear()["error"]["code"], -32602);
    assert!(legacy.ask("initialize", json!({}))["result"].is_object());

    let mut modern = Client::start(&["--era", "modern"]);
    assert_eq!(modern.ask("initialize", json!({"protocolVersion": "2025-11-25"}))["error"]["code"], -32022);
}

#[test]
fn a_listen_is_acknowledged_and_gets_its_granted_notifications() {
    let mut client = Client::start(&["--resources"]);
    let filter =
        r#""notifications":{"toolsListChanged":true,"promptsListChanged":true,"resourceSubscriptions":["puppet://a"]}"#;
    client
        .say(&format!(r#"{{"jsonrpc":"2.0","id":"l","method":"subscriptions/listen","params":{{{filter},{META}}}}}"#));
    let meta = json!({"io.modelcontextprotocol/subscriptionId": "l"});
    let granted = json!({"toolsListChanged": true, "resourceSubscriptions": ["puppet://a"]});
    let acknowledged = "notifications/subscriptions/acknowledged";
    let params = json!({"_meta": meta, "notifications": granted});
    assert_eq!(client.hear(), json!({"jsonrpc": "2.0", "method": acknowledged, "params": params}));

    let mut call = |tool: &str, arguments: &str| {
        let params = format!(r#"{{"name":"{tool}","arguments":{arguments},{META}}}"#);
        client.say(&format!(r#"{{"jsonrpc":"2.0","id":9,"method":"tools/call","params":{params}}}"#));
        client.hear()
    };
    let changed = call("announce", r#"{"what":"tools"}"#);
    assert_eq!(changed["method"], "notifications/tools/list_changed");
    assert_eq!(changed["params"]["_meta"], meta);
    assert_eq!(text(&call("announce", r#"{"what":"prompts"}"#)), "announced to 1", "the answer to the call before");
    assert_eq!(text(&call("pid", "{}")), "announced to 0", "prompts were not granted");
    call("pid", "{}");
    let updated = call("touch", r#"{"uri":"puppet://a"}"#);
    assert!(text(&updated).parse::<u32>().is_ok());
    let updated = call("pid", "{}");
    assert_eq!(updated["params"], json!({"_meta": meta, "uri": "puppet://a"}));
}

#[test]
fn sixty_four_calls_run_at_once() {
    let mut client = Client::ready(&[]);
    for _ in 0..32 {
        client.send_call("sleep", json!({"ms": 600_000}));
    }
    let asking: Vec<_> = (0..32).map(|_| client.send_call("ask", json!({"method": "ping"}))).collect();
    let questions: Vec<_> = asking.iter().map(|_| client.hear()["id"].clone()).collect();
    // Answered in reverse order, so that no call can have waited for an earlier one.
    for (call, question) in asking.iter().zip(questions).rev() {
        client.say(&json!({"jsonrpc": "2.0", "id": question, "result": {}}).to_string());
        assert_eq!(client.hear()["id"], *call);
    }
    assert_eq!(client.call("sleep", json!({"ms": 1})), "slept", "a short one passes the long ones");
}

#[test]
fn a_cancelled_call_is_not_answered() {
    let mut client = Client::ready(&[]);
    let id = client.send_call("sleep", json!({"ms": 60_000}));
    let params = json!({"requestId": id});
    client.say(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}).to_string());
    assert_eq!(client.call("echo", json!({"text": "next"})), "next");
    assert_eq!(client.end().code(), Some(0), "nothing is left to wait for");
}

#[test]
fn returns_every_line_unchanged() {
    let directory = tempfile::tempdir().expect("a directory");
    let log = path_in(&directory, "log");
    let mut client = Client::start(&["--log", &log]);
    let odd = r#"{ "jsonrpc":"2.0", "id" : 1e2, "method":"ping","zusätzlich":12345678901234567890123 }"#;
    client.say(odd);
    assert_eq!(client.hear()["result"], json!({}));
    client.say("not a message");
    client.ask("initialize", json!({}));
    client.say(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#);
    let lines: Vec<String> = serde_json::from_str(&client.call("received", json!({}))).expect("an array");
    assert_eq!(lines[..2], [odd, "not a message"]);
    assert_eq!(lines.len(), 5);

    let pid = client.child.id();
    let logged: String = lines.iter().map(|line| format!("{pid} {line}\n")).collect();
    assert_eq!(fs::read_to_string(log).expect("a log"), logged);
}

#[test]
fn echoes_text_or_the_exact_bytes() {
    let mut client = Client::ready(&[]);
    assert_eq!(client.call("echo", json!({"text": "hi\n\"you\""})), "hi\n\"you\"");
    client.say(r#"{"jsonrpc":"2.0","id":"x\u0031","method":"tools/call","params":{"name":"echo","arguments":{ "b":1.0, "a":9007199254740993 }}}"#);
    let answer = client.hear();
    assert_eq!(text(&answer), r#"{ "b":1.0, "a":9007199254740993 }"#);
    assert_eq!(answer["id"], "x1");
    assert_eq!(client.call("big", json!({"bytes": 1 << 20})).len(), 1 << 20);
}

#[test]
fn exits_as_requested() {
    for (tool, arguments, answer, code, signal) in [
        ("crash", json!({"code": 7}), false, Some(7), None),
        ("exit", json!({"code": 5}), true, Some(5), None),
        ("exit", json!({"code": 6, "answer": false}), false, Some(6), None),
        ("kill_self", json!({"signal": 9}), false, None, Some(9)),
        ("kill_self", json!({"signal": "SIGTERM"}), false, None, Some(15)),
        ("restart_server", json!({}), false, Some(42), None),
        ("restart_server", json!({"answer": true}), true, Some(42), None),
    ] {
        let mut client = Client::ready(&["--own-restart"]);
        client.send_call(tool, arguments.clone());
        let mut said = String::new();
        client.stdout.read_line(&mut said).expect("stdout can be read");
        assert_eq!(!said.is_empty(), answer, "{tool} {arguments}");
        let status = client.child.wait().expect("our child");
        assert_eq!((status.code(), status.signal()), (code, signal), "{tool} {arguments}");
    }
}

#[test]
fn crashes_once() {
    let directory = tempfile::tempdir().expect("a directory");
    let once = json!({"once": path_in(&directory, "once")});
    let mut first = Client::ready(&[]);
    first.send_call("crash", once.clone());
    assert_eq!(first.child.wait().expect("our child").code(), Some(1));
    assert_eq!(Client::ready(&[]).call("crash", once), "survived");
}

#[test]
fn fails_to_start_while_its_code_is_broken() {
    let directory = tempfile::tempdir().expect("a directory");
    let broken = path_in(&directory, "broken");
    fs::write(&broken, "SyntaxError: line 3").expect("a file");
    let mut client = Client::start(&["--fail-if", &broken]);
    let mut said = String::new();
    BufReader::new(client.child.stderr.take().expect("stderr is piped")).read_line(&mut said).expect("stderr");
    assert_eq!(said, "SyntaxError: line 3\n");
    assert_eq!(client.end().code(), Some(3));
    fs::remove_file(&broken).expect("the file is there");
    assert_eq!(Client::ready(&["--fail-if", &broken]).end().code(), Some(0));
}

#[test]
fn takes_more_tools_and_more_flags_from_files() {
    let directory = tempfile::tempdir().expect("a directory");
    let (tools, more) = (path_in(&directory, "tools.json"), path_in(&directory, "more"));
    fs::write(&tools, r#"[{"name":"mine","inputSchema":{"type":"object"},"_meta":{"puppet/as":"pid"}}]"#)
        .expect("a file");
    let args = ["--tools", &tools, "--more", &more];
    let mut client = Client::ready(&args);
    assert_eq!(client.tool_names().last().map(String::as_str), Some("mine"));
    assert_eq!(client.call("mine", json!({})), client.child.id().to_string());

    fs::write(&tools, "[]").expect("a file");
    assert_eq!(client.call("set_tools", json!({"file": tools})), "0 more tools");
    assert!(!client.tool_names().contains(&"mine".to_owned()));

    fs::write(&more, "--version-only\n2024-11-05\n").expect("a file");
    let mut next = Client::start(&args);
    let answer = next.ask("initialize", json!({"protocolVersion": "2025-11-25"}));
    assert_eq!(answer["result"]["protocolVersion"], "2024-11-05");
}

#[test]
fn pages_hold_every_tool_once() {
    let whole = Client::ready(&[]).tool_names();
    let mut client = Client::ready(&["--page", "5"]);
    let (mut names, mut params) = (Vec::new(), json!({}));
    loop {
        let result = client.ask("tools/list", params)["result"].take();
        let page = result["tools"].as_array().expect("a page");
        assert!(page.len() <= 5);
        names.extend(page.iter().map(|tool| tool["name"].as_str().expect("a name").to_owned()));
        let Some(cursor) = result["nextCursor"].as_str() else { break };
        params = json!({"cursor": cursor});
    }
    assert_eq!(names, whole);
    assert_eq!(client.ask("tools/list", json!({"cursor": "stale"}))["error"]["code"], -32602);
}

#[test]
fn asks_the_client_and_reports_progress_and_logs() {
    let mut client = Client::ready(&["--logging"]);
    let call = client.send_call("ask", json!({"method": "roots/list"}));
    assert_eq!(client.hear(), json!({"jsonrpc": "2.0", "id": 0, "method": "roots/list"}));
    let response = r#"{"jsonrpc":"2.0","id":0,"result":{"roots":[]}}"#;
    client.say(response);
    let answer = client.hear();
    assert_eq!((answer["id"].as_u64(), text(&answer)), (Some(call), response.to_owned()));

    let params = json!({"name": "progress", "arguments": {"steps": 2, "ms": 1}, "_meta": {"progressToken": "t"}});
    client.send("tools/call", params);
    for step in 1..=2 {
        let params = json!({"progressToken": "t", "progress": step, "total": 2});
        assert_eq!(client.hear()["params"], params);
    }
    assert_eq!(text(&client.hear()), "2 steps");

    client.ask("logging/setLevel", json!({"level": "warning"}));
    assert_eq!(client.call("log", json!({"level": "info", "text": "a"})), "below the level");
    client.send_call("log", json!({"level": "error", "text": "b"}));
    assert_eq!(client.hear()["params"]["data"], "b");
    assert_eq!(text(&client.hear()), "logged");
}

#[test]
fn resources_are_touched_for_subscribers_only() {
    let mut client = Client::ready(&["--resources", "--prompts"]);
    let uri = json!({"uri": "puppet://a"});
    assert_eq!(client.call("touch", uri.clone()), "announced to 0");
    client.ask("resources/subscribe", uri.clone());
    client.send_call("touch", uri.clone());
    assert_eq!(client.hear()["params"], uri);
    assert_eq!(text(&client.hear()), "announced to 1");
    let state: Value = serde_json::from_str(&client.call("state", json!({}))).expect("JSON");
    assert_eq!(state["subscribed"], json!(["puppet://a"]));
    client.ask("resources/unsubscribe", uri.clone());
    assert_eq!(client.call("touch", uri), "announced to 0");
    assert_eq!(client.ask("prompts/list", json!({}))["result"]["prompts"][0]["name"], "greet");
}

#[test]
#[cfg(target_os = "linux")]
fn grandchildren_behave_as_requested() {
    use nix::{
        sys::signal::{Signal, kill},
        unistd::{Pid, getsid},
    };
    let mut client = Client::ready(&[]);
    let arguments = json!({"setsid": true, "ignore_term": true, "hold_stdout": true});
    let pid: i32 = client.call("grandchild", arguments).parse().expect("a pid");
    assert_eq!(getsid(Some(Pid::from_raw(pid))), Ok(Pid::from_raw(pid)));
    let proc = std::path::Path::new("/proc").join(pid.to_string());
    let status = fs::read_to_string(proc.join("status")).expect("it lives");
    let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("a mask").trim();
    assert_ne!(u64::from_str_radix(blocked, 16).expect("a mask") & (1 << 14), 0, "SIGTERM is blocked");
    let stdout = |pid: &str| fs::read_link(std::path::Path::new("/proc").join(pid).join("fd/1")).expect("a descriptor");
    assert_eq!(stdout(&pid.to_string()), stdout(&client.child.id().to_string()));
    kill(Pid::from_raw(pid), Signal::SIGKILL).expect("it is ours");
}

#[test]
fn writes_garbage_hangs_and_closes() {
    let mut client = Client::ready(&[]);
    client.send_call("garbage", json!({"text": "DEBUG: hello"}));
    let mut line = String::new();
    client.stdout.read_line(&mut line).expect("stdout can be read");
    assert_eq!(line, "DEBUG: hello\n");
    assert_eq!(text(&client.hear()), "said");

    client.send_call("close_stdout", json!({}));
    line.clear();
    assert_eq!(client.stdout.read_line(&mut line).expect("the end"), 0);
    assert_eq!(client.child.try_wait().expect("our child"), None, "it lives on");
    assert_eq!(client.end().code(), Some(0));

    let mut client = Client::ready(&["--ignore-eof", "--ignore-term"]);
    let sleeping = client.send_call("sleep", json!({"ms": 50}));
    let hanging = client.send_call("hang", json!({"answer": true}));
    client.send("ping", json!({}));
    let answered = [client.hear()["id"].as_u64(), client.hear()["id"].as_u64()];
    assert!(answered.contains(&Some(hanging)) && answered.contains(&Some(sleeping)), "but not the ping: {answered:?}");
}
