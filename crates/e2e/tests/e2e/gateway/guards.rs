//! G7 through the real gateway: authentication, switches, rates, roles, schemas, circuit breakers; and their traces
//! in the audit log and the metrics.

use std::{
    fs,
    process::Output,
    time::{SystemTime, UNIX_EPOCH},
};

use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{
    web::{Reply, Session, Web},
    world::{Gate, HASTY, backend, cached_catalogue, outlast},
};
use crate::mcp::client::{Place, VERSION, initialize_params, text, until};

const SECRET: &str = "0123456789abcdef0123456789abcdef";
const CI: &str = "key-of-the-machine-that-builds";
const ANN: &str = "key-of-ann-who-may-do-anything";

fn sha256(key: &str) -> String {
    Sha256::digest(key.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn auth() -> String {
    format!(
        r#"
[auth.jwt]
secret_env = "SIGNING"
issuer = "https://issuer.example.com"
[[auth.key]]
name = "ci"
sha256 = "{}"
role = "reader"
[[auth.key]]
name = "ann"
sha256 = "{}"
role = "admin"
[role.reader]
allow = ["one__echo", "one__pid"]
[role.admin]
deny = ["one__crash"]
"#,
        sha256(CI),
        sha256(ANN)
    )
}

fn guarded(more: &str) -> Gate {
    let config = backend("one", &[], HASTY) + &auth() + more;
    Gate::listen_with(Place::new(), &config, |setup| setup.env("SIGNING", SECRET))
}

fn token(algorithm: Algorithm, secret: &str, change: impl FnOnce(&mut Value)) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock").as_secs();
    let mut claims = json!({"sub": "tom", "iss": "https://issuer.example.com", "exp": now + 600, "role": "reader"});
    change(&mut claims);
    encode(&Header::new(algorithm), &claims, &EncodingKey::from_secret(secret.as_bytes())).expect("a token")
}

/// Opens a session, with this header for credentials.
fn post_initialize(gate: &Gate, header: Option<(&str, &str)>) -> Reply {
    let body = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": initialize_params(VERSION)});
    let mut headers = vec![("content-type", "application/json"), ("accept", "application/json, text/event-stream")];
    headers.extend(header);
    Web::connect(&gate.address).ask("POST", "/mcp", &headers, body.to_string().as_bytes())
}

fn error(session: &mut Session, tool: &str, arguments: Value) -> Value {
    let answer = session.ask("tools/call", json!({"name": tool, "arguments": arguments}));
    assert!(answer["error"].is_object(), "{tool}: {answer}");
    answer["error"].clone()
}

/// The outcomes of the calls of a tool in the audit log.
fn outcomes(gate: &Gate, tool: &str, count: usize) -> Vec<(String, String)> {
    until(&format!("{count} calls of {tool} in the audit log"), || {
        let calls = gate.place.audit_of("call_ended");
        let calls = calls.iter().map(|record| &record["props"]).filter(|props| props["tool"] == tool);
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let calls: Vec<_> = calls.map(|props| (word(&props["who"]), word(&props["outcome"]))).collect();
        (calls.len() >= count).then_some(calls)
    })
}

#[test]
fn requests_without_valid_credentials_are_refused() {
    let gate = guarded("");
    let bearer = |token: &str| format!("Bearer {token}");
    let expired = token(Algorithm::HS256, SECRET, |claims| claims["exp"] = json!(1_000_000_000));
    let foreign = token(Algorithm::HS256, SECRET, |claims| claims["iss"] = json!("https://evil.example.com"));
    let forged = token(Algorithm::HS256, "another secret that is long enough", |_| {});
    let stronger = token(Algorithm::HS512, SECRET, |_| {});
    let claims = token(Algorithm::HS256, SECRET, |_| {}).split('.').nth(1).expect("claims").to_owned();
    // {"alg":"none"}
    let unsigned = format!("eyJhbGciOiJub25lIn0.{claims}.");
    let table = [
        (None, "Bearer"),
        (Some(("authorization", "Basic YTpi".to_owned())), "not `Bearer` and a token"),
        (Some(("authorization", bearer("key-that-is-not-configured"))), "is not accepted"),
        (Some(("x-api-key", sha256(CI))), "is not accepted"),
        (Some(("authorization", bearer(&expired))), "has expired"),
        (Some(("authorization", bearer(&foreign))), "from another issuer"),
        (Some(("authorization", bearer(&forged))), "signature is wrong"),
        (Some(("authorization", bearer(&stronger))), "algorithm that is not accepted"),
        (Some(("authorization", bearer(&unsigned))), "is not accepted"),
    ];
    for (header, words) in &table {
        let reply = post_initialize(&gate, header.as_ref().map(|(name, value)| (*name, value.as_str())));
        assert_eq!(reply.status, 401, "{header:?}: {}", reply.text());
        let challenge = reply.header("www-authenticate").unwrap_or_default();
        assert!(challenge.starts_with("Bearer") && challenge.contains(words), "{header:?}: {challenge}");
        assert!(reply.header("mcp-session-id").is_none());
    }
    for header in [
        ("authorization", bearer(CI)),
        ("x-api-key", CI.to_owned()),
        ("authorization", bearer(&token(Algorithm::HS256, SECRET, |_| {}))),
    ] {
        let reply = post_initialize(&gate, Some((header.0, &header.1)));
        assert_eq!(reply.status, 200, "{header:?}: {}", reply.text());
    }

    let mut web = Web::connect(&gate.address);
    assert_eq!(web.get("/health").status, 200, "no credentials are needed for it");
    assert_eq!(web.get("/metrics").status, 401);
    assert_eq!(web.get("/api/state").status, 401);
    gate.end();
}

#[test]
fn a_session_belongs_to_the_client_that_opened_it() {
    let gate = guarded("");
    let mut ann = Session::open_as(&gate.address, Some(ANN));
    assert_eq!(ann.call("one__echo", json!({"text": "a"})), "a");
    let call =
        json!({"jsonrpc": "2.0", "id": 9, "method": "tools/call", "params": {"name": "one__echo", "arguments": {}}});
    for other in [None, Some(format!("Bearer {CI}"))] {
        let mut thief = Session::open_as(&gate.address, Some(CI));
        thief.id.clone_from(&ann.id);
        thief.token.clone_from(&other);
        let reply = thief.post(&call);
        assert!([401, 404].contains(&reply.status), "{other:?}: {} {}", reply.status, reply.text());
    }
    assert_eq!(ann.call("one__echo", json!({"text": "b"})), "b");
    gate.end();
}

#[test]
fn a_role_sees_and_calls_only_its_tools() {
    let gate = guarded("");
    let mut ci = Session::open_as(&gate.address, Some(CI));
    gate.child("one");
    until("the tools", || (ci.tools() == ["one__echo", "one__pid"]).then_some(()));
    assert_eq!(ci.call("one__echo", json!({"text": "a"})), "a");
    let refusal = error(&mut ci, "one__sleep", json!({"ms": 1}));
    assert_eq!(refusal["data"]["reason"], "denied", "{refusal}");

    let mut ann = Session::open_as(&gate.address, Some(ANN));
    assert!(ann.tools().contains(&"one__sleep".to_owned()));
    assert!(!ann.tools().contains(&"one__crash".to_owned()));
    assert_eq!(ann.call("one__sleep", json!({"ms": 1})), "slept");

    let mut tom = Session::open_as(
        &gate.address,
        Some(&token(Algorithm::HS256, SECRET, |claims| claims["role"] = json!("boss"))),
    );
    assert!(tom.tools().is_empty(), "a role that is not configured has no rights");
    assert_eq!(error(&mut tom, "one__echo", json!({}))["data"]["reason"], "denied");
    let pairs = outcomes(&gate, "one__sleep", 2);
    assert!(
        pairs.contains(&("ci".into(), "denied".into())) && pairs.contains(&("ann".into(), "answered".into())),
        "{pairs:?}"
    );
    let pairs = outcomes(&gate, "one__echo", 2);
    assert!(pairs.contains(&("tom".into(), "denied".into())), "{pairs:?}");
    gate.end();
}

#[test]
fn a_client_that_calls_too_often_gets_a_retry_time() {
    let gate = guarded("[rates.tool.one__echo]\nper_minute = 1\nburst = 2\n");
    let mut ci = Session::open_as(&gate.address, Some(CI));
    for _ in 0..2 {
        ci.call("one__echo", json!({"text": "a"}));
    }
    let refusal = error(&mut ci, "one__echo", json!({"text": "a"}));
    assert_eq!(refusal["data"]["reason"], "rate_limited", "{refusal}");
    let wait = refusal["data"]["retryAfter"].as_f64().expect("when to come back");
    assert!(wait > 1.0 && wait <= 60.0, "{wait}");
    // The same client on another connection shares the rate; another client, or another tool, does not.
    let mut again = Session::open_as(&gate.address, Some(CI));
    assert_eq!(error(&mut again, "one__echo", json!({}))["data"]["reason"], "rate_limited");
    again.call("one__pid", json!({}));
    Session::open_as(&gate.address, Some(ANN)).call("one__echo", json!({"text": "a"}));

    let reply = Web::connect(&gate.address).ask("GET", "/metrics", &[("x-api-key", ANN)], b"");
    assert_eq!(reply.status, 200);
    assert!(reply.header("content-type").is_some_and(|kind| kind.starts_with("application/openmetrics-text")));
    let text = reply.text();
    for line in [
        r#"outlast_rate_limited_total{backend="one",tool="one__echo"} 2"#,
        r#"outlast_calls_total{backend="one",tool="one__echo",method="tools/call",outcome="answered"} 3"#,
        r#"outlast_calls_total{backend="one",tool="one__echo",method="tools/call",outcome="rate_limited"} 2"#,
        r#"outlast_backend_up{backend="one"} 1"#,
        r#"outlast_backend_restarts_total{backend="one"} 0"#,
        r#"outlast_call_duration_seconds_count{backend="one"} 4"#,
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    assert!(text.ends_with("# EOF\n"));
    gate.end();
}

#[test]
fn a_switched_off_tool_is_off_for_all_clients() {
    let gate = guarded("[switch]\ntools = [\"one__sleep\"]\n");
    let mut ann = Session::open_as(&gate.address, Some(ANN));
    gate.child("one");
    until("the tools", || ann.tools().contains(&"one__echo".to_owned()).then_some(()));
    assert!(!ann.tools().contains(&"one__sleep".to_owned()));
    assert_eq!(error(&mut ann, "one__sleep", json!({"ms": 1}))["data"]["reason"], "switched_off");
    let said = |output: Output| assert!(output.status.success(), "{output:?}");
    said(gate.outlast(&["switch", "--on", "one__sleep"]));
    assert_eq!(ann.call("one__sleep", json!({"ms": 1})), "slept");
    said(gate.outlast(&["switch", "--off", "one__echo"]));
    assert_eq!(error(&mut ann, "one__echo", json!({}))["data"]["reason"], "switched_off");
    let pairs = outcomes(&gate, "one__sleep", 2);
    assert_eq!(pairs[0], ("ann".into(), "switched_off".into()), "{pairs:?}");
    gate.end();
}

#[test]
fn guards_are_applied_in_their_order() {
    // One tool that every guard would refuse; the guards are removed one after the other.
    let rates = "[rates]\nper_minute = 1\nburst = 1\n";
    let gate = guarded(&format!("{rates}[switch]\ntools = [\"one__sleep\"]\n"));
    let mut ci = Session::open_as(&gate.address, Some(CI));
    gate.child("one");
    for _ in 0..3 {
        assert_eq!(error(&mut ci, "one__sleep", json!([]))["data"]["reason"], "switched_off");
    }
    assert!(gate.outlast(&["switch", "--on", "one__sleep"]).status.success());
    // A call of a switched-off tool has used no rate token: the first call gets as far as its role.
    assert_eq!(error(&mut ci, "one__sleep", json!({}))["data"]["reason"], "denied");
    assert_eq!(error(&mut ci, "one__sleep", json!({}))["data"]["reason"], "rate_limited");
    gate.end();
}

#[test]
fn arguments_that_do_not_fit_never_reach_the_backend() {
    let place = Place::new();
    let schema = json!({
        "type": "object", "required": ["path"], "additionalProperties": false,
        "properties": {"path": {"type": "string"}, "lines": {"type": "array", "items": {"type": "integer"}}},
    });
    let tools = place.write("tools.json", &json!([{"name": "read", "inputSchema": schema}]).to_string());
    let gate = Gate::listen(place, &backend("one", &["--tools", &tools], HASTY));
    let mut session = gate.session();
    gate.child("one");
    until("the tools", || session.tools().contains(&"one__read".to_owned()).then_some(()));
    let refused = session.result("one__read", json!({"path": "a", "lines": [1, "s3cret"]}));
    assert_eq!(refused["isError"], true, "{refused}");
    let words = text(&refused);
    assert!(words.contains("`lines[1]`") && words.contains("integer") && !words.contains("s3cret"), "{words}");
    assert_eq!(session.result("one__read", json!({}))["isError"], true);
    session.call("one__read", json!({"path": "a", "lines": [1]}));
    let received = session.call("one__received", json!({}));
    assert_eq!(received.matches("tools/call").count(), 2, "the good one, and this question: {received}");
    assert_eq!(outcomes(&gate, "one__read", 3)[0].1, "bad_arguments");
    gate.end();
}

#[test]
fn a_backend_that_only_fails_gets_no_calls_for_a_while() {
    let more = "call_timeout = \"200ms\"\nbreaker = { failures = 2, open = \"1h\" }\n";
    let config = backend("one", &[], &format!("{HASTY}\n{more}")) + &backend("two", &[], HASTY);
    let gate = Gate::listen(Place::new(), &config);
    let mut session = gate.session();
    gate.child("one");
    gate.child("two");
    for _ in 0..2 {
        assert_eq!(session.result("one__sleep", json!({"ms": 60_000}))["isError"], true);
    }
    let refused = session.result("one__echo", json!({"text": "a"}));
    assert_eq!(refused["isError"], true, "{refused}");
    assert!(text(&refused).contains("no calls are sent to it"), "{refused}");
    assert_eq!(session.call("two__echo", json!({"text": "a"})), "a", "the others are as they were");
    assert_eq!(outcomes(&gate, "one__echo", 1)[0].1, "circuit_open");
    gate.end();
}

#[test]
fn a_changed_key_applies_as_soon_as_the_file_is_saved() {
    let gate = guarded("");
    let mut ci = Session::open_as(&gate.address, Some(CI));
    ci.tools();
    let config = backend("one", &[], HASTY) + &auth().replace(&sha256(CI), &sha256("another-key-for-the-builder"));
    gate.place.write("outlast.toml", &config);
    // The reload cuts connections that are being answered, so no request is sent before it.
    gate.place.recorded("configured", 1);
    let list = json!({"jsonrpc": "2.0", "id": 7, "method": "tools/list", "params": {}});
    assert_eq!(ci.post(&list).status, 401, "the old key");
    let mut again = Session::open_as(&gate.address, Some("another-key-for-the-builder"));
    assert!(again.tools().contains(&"one__echo".to_owned()));
    gate.end();
}

#[test]
fn a_call_that_waits_is_not_sent_with_a_key_that_was_revoked_meanwhile() {
    let place = Place::new();
    let (broken, log) = (place.join("broken"), place.join("heard.log"));
    let one = backend("one", &["--log", &log, "--fail-if", &broken], HASTY);
    let gate = Gate::listen_with(place, &(one.clone() + &auth()), |setup| setup.env("SIGNING", SECRET));
    let mut ci = Session::open_as(&gate.address, Some(CI));
    ci.call("one__pid", json!({}));
    gate.place.write("broken", "out of order");
    crate::mcp::client::signal(gate.child("one"), nix::sys::signal::Signal::SIGKILL);
    gate.place.recorded("server_crashed", 1);
    let address = gate.address.clone();
    // Its connection is cut when the key is revoked, so there is no answer to check.
    let waiting = std::thread::spawn(move || {
        drop((address, ci.ask("tools/call", json!({"name": "one__echo", "arguments": {"text": "held"}}))))
    });
    until("the call waits", || (gate.backend("one")["held"] == 1).then_some(()));
    gate.place.write("outlast.toml", &(one + &auth().replace(&sha256(CI), &sha256("another-key-for-the-builder"))));
    gate.place.recorded("configured", 1);
    std::fs::remove_file(&broken).expect("it was there");
    assert_eq!(outcomes(&gate, "one__echo", 1), [("ci".to_owned(), "denied".to_owned())]);
    let heard = std::fs::read_to_string(&log).expect("the backend's log");
    assert!(!heard.contains("held"), "{heard}");
    drop(waiting.join());
    gate.end();
}

/// 1.5 KB of it blocked the gateway for 5 s.
#[test]
fn a_schema_that_costs_too_much_leaves_its_tool_unchecked_and_is_reported() {
    let place = Place::new();
    let mut definitions = serde_json::Map::new();
    for n in 0..24 {
        let next = json!({"$ref": format!("#/$defs/d{}", n + 1)});
        definitions.insert(format!("d{n}"), json!({"anyOf": [next, next]}));
    }
    definitions.insert("d24".into(), json!({"type": "string"}));
    let bomb = json!({"$ref": "#/$defs/d0", "$defs": definitions});
    let twice = json!({"properties": {"a": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}}});
    let tools = json!([{"name": "bomb", "inputSchema": bomb}, {"name": "twice", "inputSchema": twice}]);
    place.write("tools.json", &tools.to_string());
    let tools = place.join("tools.json");
    let gate = Gate::listen(place, &backend("one", &["--tools", &tools], HASTY));
    let mut session = gate.session();
    until("the tools", || session.tools().contains(&"one__bomb".to_owned()).then_some(()));
    for _ in 0..2 {
        session.call("one__bomb", json!({"text": "it works"}));
    }
    let record = gate.place.recorded("schema_unchecked", 1);
    assert_eq!((&record["backend"], &record["tool"]), (&json!("one"), &json!("one__bomb")), "{record}");
    assert!(record["reason"].as_str().is_some_and(|why| why.contains("parts")), "{record}");
    assert_eq!(gate.place.audit_of("schema_unchecked").len(), 1);
    assert_eq!(gate.backend("one")["unchecked"][0]["tool"], "one__bomb");
    gate.client.says("the arguments of `one__bomb` are not checked");
    let deep = (0..40).fold(json!(1), |inner, _| json!({"a": inner}));
    let refused = session.result("one__twice", deep);
    assert!(refused["isError"] == true && text(&refused).contains("too long"), "{refused}");
    session.call("one__echo", json!({"text": "after it"}));
    gate.end();
}

#[test]
fn a_backend_does_not_get_the_secrets_of_the_gateway() {
    let environment_of = |pid: u32| {
        let all = std::fs::read(format!("/proc/{pid}/environ")).expect("the environment of a child of ours");
        let all: Vec<String> =
            all.split(|byte| *byte == 0).map(|one| String::from_utf8_lossy(one).into_owned()).collect();
        all
    };
    let config = backend("one", &[], &format!("{HASTY}\nenv = {{ GIVEN = \"${{TOKEN}}\" }}"))
        + &backend("two", &[], &format!("{HASTY}\ninherit_env = true"))
        + &auth();
    let gate = Gate::listen_with(Place::new(), &config, |setup| setup.env("SIGNING", SECRET).env("TOKEN", "t0ken"));
    let (one, two) = (environment_of(gate.child("one")), environment_of(gate.child("two")));
    let signing = format!("SIGNING={SECRET}");
    assert!(two.contains(&signing), "{two:?}");
    assert!(!one.iter().any(|entry| entry.contains(SECRET) || entry.starts_with("TOKEN=")), "{one:?}");
    assert!(one.contains(&"GIVEN=t0ken".to_owned()), "{one:?}");
    assert!(one.iter().any(|entry| entry.starts_with("PATH=")), "{one:?}");
    let left_out = gate.backend("one")["env_left_out"].clone();
    let has = |name: &str| left_out.as_array().is_some_and(|names| names.contains(&json!(name)));
    assert!(has("SIGNING") && has("TOKEN") && !has("PATH"), "{left_out}");
    assert_eq!(gate.backend("two")["env_left_out"], json!([]));
    let line = gate.client.says("one: variables not passed to it: ");
    assert!(line.contains("SIGNING") && line.contains("inherit_env"), "{line}");
    gate.end();
}

/// A backend that does not look for an id would run it, and no guard had checked it.
#[test]
fn a_tool_call_without_an_id_reaches_no_backend() {
    let place = Place::new();
    let log = place.join("heard.log");
    let config = backend("one", &["--log", &log], "children = \"per_session\"\n") + &auth();
    let gate = Gate::listen_with(place, &config, |setup| setup.env("SIGNING", SECRET));
    let mut ci = Session::open_as(&gate.address, Some(CI));
    ci.call("one__pid", json!({}));
    for method in ["tools/call", "notifications/strange"] {
        let note = json!({"jsonrpc": "2.0", "method": method, "params": {"name": "crash", "arguments": {}}});
        assert_eq!(ci.post(&note).status, 202);
    }
    let second = gate.place.recorded("request_refused", 2);
    let first = gate.place.recorded("request_refused", 1);
    let shown = |props: &Value| (props["who"].clone(), props["method"].clone(), props["outcome"].clone());
    assert_eq!(shown(&first), (json!("ci"), json!("tools/call"), json!("unknown_notification")));
    assert_eq!(shown(&second), (json!("ci"), json!("notifications/strange"), json!("unknown_notification")));
    assert!(first["session"].is_string() && first["peer"].is_string(), "{first}");
    let answer = ci.ask("my/method", json!({}));
    assert_eq!(answer["error"]["code"], 7014, "{answer}");
    ci.call("one__echo", json!({"text": "after it"}));
    let heard = std::fs::read_to_string(&log).expect("the backend's log");
    assert!(!heard.contains("crash") && !heard.contains("strange") && !heard.contains("my/method"), "{heard}");
    let metrics = Web::connect(&gate.address).ask("GET", "/metrics", &[("x-api-key", ANN)], b"").text();
    assert!(metrics.contains("outlast_requests_refused_total{reason=\"unknown_notification\"} 2"), "{metrics}");
    gate.end();
}

#[test]
fn the_catalogue_is_served_before_the_backends_are_ready() {
    let place = Place::new();
    let broken = place.join("broken");
    let config = backend("one", &["--fail-if", &broken], "delay_first = \"1h\"\ndelay_max = \"1h\"\n");
    let gate = Gate::listen(place, &config);
    gate.child("one");
    let mut session = gate.session();
    until("the tools", || session.tools().contains(&"one__echo".to_owned()).then_some(()));
    let Gate { place, client, .. } = gate;
    drop(session);
    crate::mcp::client::signal(client.pid(), nix::sys::signal::Signal::SIGTERM);
    let mut client = client;
    assert_eq!(client.wait().code(), Some(0), "{}", client.stderr_text());
    drop(client);

    // At the next start it does not become ready, and its offer is still known.
    place.write("broken", "out of order");
    let gate = Gate::listen(place, &config);
    assert!(gate.session().tools().contains(&"one__echo".to_owned()));
    gate.end();
}

#[test]
fn a_cached_catalogue_that_cannot_be_used_is_reported_and_replaced() {
    let config = backend("one", &[], "");
    let gate = Gate::listen(Place::new(), &config);
    gate.child("one");
    let mut session = gate.session();
    until("the tools", || session.tools().contains(&"one__echo".to_owned()).then_some(()));
    let stop = |gate: Gate| -> Place {
        let Gate { place, mut client, .. } = gate;
        crate::mcp::client::signal(client.pid(), nix::sys::signal::Signal::SIGTERM);
        assert_eq!(client.wait().code(), Some(0), "{}", client.stderr_text());
        place
    };
    let mut place = stop(gate);
    let catalogue = cached_catalogue(place.path());
    let good = fs::read_to_string(&catalogue).expect("text");
    let target = place.join("target");
    fs::write(&target, &good).expect("a file");
    for (case, why) in [
        ("torn", "it is damaged"),
        ("version", "it is of version 9"),
        ("link", "it is a symbolic link"),
        ("FIFO", "it is a FIFO, not a file"),
    ] {
        fs::remove_file(&catalogue).expect("it is ours");
        match case {
            "torn" => fs::write(&catalogue, &good[..good.len() / 2]).expect("a file"),
            "version" => fs::write(&catalogue, good.replacen("\"version\":1", "\"version\":9", 1)).expect("a file"),
            "link" => std::os::unix::fs::symlink(&target, &catalogue).expect("a link"),
            _ => nix::unistd::mkfifo(&catalogue, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO"),
        }
        let gate = Gate::listen(place, &config);
        let line = gate.client.says("the cached catalogue cannot be used and is read again from the backends");
        assert!(line.contains(why), "{case}: {line}");
        let mut session = gate.session();
        until("the tools", || session.tools().contains(&"one__echo".to_owned()).then_some(()));
        place = stop(gate);
        assert!(fs::symlink_metadata(&catalogue).is_ok_and(|found| found.is_file()), "{case}: it is written again");
        assert_eq!(fs::read_to_string(&catalogue).expect("text"), good, "{case}");
    }
    assert_eq!(fs::read_to_string(&target).expect("it is there"), good, "the link was replaced, not followed");
}

#[test]
fn a_configuration_is_checked_without_starting_anything() {
    let place = Place::new();
    let config = backend("one", &[], "") + &auth() + "[[backend]]\nname = \"gone\"\ncommand = \"no-such-program\"\n";
    place.write(
        "outlast.toml",
        &config.replace("[auth.jwt]\nsecret_env = \"SIGNING\"\nissuer = \"https://issuer.example.com\"\n", ""),
    );
    let output = outlast(&place, &["gateway", "check"]);
    assert!(output.status.success(), "{output:?}");
    let words = String::from_utf8_lossy(&output.stdout).into_owned();
    for (line, wanted) in
        [("one ", "one__*"), ("gone ", "no such command"), ("auth ", "2 keys"), ("role ", "but one__crash")]
    {
        let found = words.lines().find(|found| found.starts_with(line) && found.contains(wanted));
        assert!(found.is_some(), "{line} {wanted}\n{words}");
    }
    let summary = outlast(&place, &["gateway", "check", "--json"]);
    let summary: Value = serde_json::from_slice(&summary.stdout).expect("JSON");
    assert_eq!(summary["backends"][1]["command_found"], false, "{summary}");
    assert!(!place.path().join(".outlast").exists(), "nothing was begun");

    place.write("outlast.toml", "[[backend]]\nname = \"one\"\ncomand = \"x\"\n");
    for arguments in [&["gateway", "check"][..], &["gateway", "--stdio"]] {
        let output = outlast(&place, arguments);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let words = "error: outlast.toml:3:1: `backend.one.comand`: there is no such key in `backend.one`\n  hint: did you mean `command`?\n";
        assert_eq!(String::from_utf8_lossy(&output.stderr), words);
    }
    assert!(!place.path().join(".outlast").exists(), "nothing was begun");
}

#[test]
fn a_generated_key_authenticates_its_client() {
    let place = Place::new();
    let output = outlast(&place, &["gateway", "hash-key", "builder", "--role", "reader"]);
    let words = String::from_utf8(output.stdout).expect("words");
    let key = words.lines().next().and_then(|line| line.rsplit(' ').next()).expect("the key").to_owned();
    assert!(key.starts_with("outlast_") && key.len() == 72, "{words}");
    // The whole output is valid configuration: the key is in a comment, so the output may be piped into the file.
    let config = backend("one", &[], HASTY) + &words.replace(&key, "…") + "[role.reader]\nallow = [\"one__pid\"]\n";
    let gate = Gate::listen(place, &config);
    let mut session = Session::open_as(&gate.address, Some(&key));
    gate.child("one");
    until("the tools", || (session.tools() == ["one__pid"]).then_some(()));
    gate.end();
}

#[test]
fn remote_clients_need_credentials() {
    let place = Place::new();
    place.write("outlast.toml", &backend("one", &[], ""));
    let output = outlast(&place, &["gateway", "--listen", "0.0.0.0:0"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(words.contains("0.0.0.0") && words.contains("hint: "), "{words}");
    place.is_swept();
}
