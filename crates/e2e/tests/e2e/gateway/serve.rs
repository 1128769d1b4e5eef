//! Many servers as one.

use serde_json::{Value, json};

use super::{
    web::{BEGUN_ID, Session, Web},
    world::{Gate, backend},
};
use crate::mcp::client::{Place, Setup, until};

#[test]
fn tools_of_all_backends_are_called_by_their_names() {
    let mut gate = Gate::stdio(Place::new(), &[backend("one", &[], ""), backend("two", &[], "")].concat());
    let (one, two) = (gate.child("one"), gate.child("two"));
    let tools = gate.client.tool_names();
    for name in ["one__echo", "two__echo", "one__pid", "two__pid"] {
        assert!(tools.iter().any(|tool| tool == name), "{name} in {tools:?}");
    }
    assert_eq!(gate.client.call("one__echo", json!({"text": "ü 漢 🦀"})), "ü 漢 🦀");
    assert_eq!(gate.client.call("one__pid", json!({})), one.to_string());
    assert_eq!(gate.client.call("two__pid", json!({})), two.to_string());
    gate.end();
}

#[test]
fn stdin_that_is_no_terminal_is_a_client() {
    let place = Place::new();
    place.write("outlast.toml", &backend("one", &[], ""));
    let mut client = Setup::gateway(&place).hasty().ready();
    assert_eq!(client.call("one__echo", json!({"text": "here"})), "here");
    client.end();
    place.is_swept();
}

#[test]
fn both_fronts_serve_at_once() {
    let place = Place::new();
    place.write("outlast.toml", &backend("one", &[], ""));
    let mut client = Setup::gateway(&place).options(["--stdio", "--listen", "127.0.0.1:0"]).hasty().ready();
    let line = client.says("listening on http://");
    let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next()).expect("an address");
    let mut session = Session::open(address);
    assert_eq!(session.call("one__pid", json!({})), client.call("one__pid", json!({})));
    // A gateway on stdio exits with its client.
    client.end();
    place.is_swept();
}

#[test]
fn a_backend_has_its_own_environment_and_directory() {
    let place = Place::new();
    std::fs::create_dir(place.path().join("inside")).expect("a directory");
    let config = backend("one", &[], "env = { SECRET = \"s-${OUTER}\", PLAIN = \"yes\" }\ncwd = \"inside\"");
    place.write("outlast.toml", &config);
    let mut client = Setup::gateway(&place).env("OUTER", "outer").options(["--stdio"]).hasty().ready();
    for (name, value) in [("SECRET", "s-outer"), ("PLAIN", "yes")] {
        assert_eq!(client.call("one__env", json!({"name": name})), value, "{name}");
    }
    let outer = client.ask("tools/call", json!({"name": "one__env", "arguments": {"name": "OUTER"}}));
    assert_eq!(outer["result"]["isError"], true, "only what it was given: {outer}");
    let pid = client.call("one__pid", json!({}));
    let cwd = std::fs::read_link(format!("/proc/{pid}/cwd")).expect("it runs");
    assert!(cwd.ends_with("inside"), "{}", cwd.display());
    let id = place.recorded("instance_started", 1)["id"].as_str().expect("an id").to_owned();
    let tag = client.call("one__generation", json!({}));
    assert!(tag.starts_with(&format!("{id}.one.")), "{tag}");
    client.end();
    place.is_swept();
    let audit = std::fs::read_to_string(place.path().join(".outlast/audit.jsonl")).expect("an audit log");
    assert!(!audit.contains("s-outer"), "secrets are not logged");
}

#[test]
fn stderr_of_a_backend_is_forwarded_with_its_name() {
    let mut gate = Gate::stdio(Place::new(), &backend("one", &[], ""));
    gate.client.call("one__stderr", json!({"text": "a word for people"}));
    gate.client.says("[one] a word for people");
    gate.client.call("one__garbage", json!({"text": "no JSON at all"}));
    gate.client.says("[one stdout, not JSON] no JSON at all");
    gate.client.call("one__garbage", json!({"text": "{\"half\": "}));
    gate.client.says("[one stdout, not JSON] {\"half\":");
    assert_eq!(gate.backend("one")["diverted"], 2);
    assert_eq!(gate.client.call("one__echo", json!({"text": "goes on"})), "goes on");
    gate.end();
}

#[test]
fn a_line_that_is_no_json_is_refused_and_has_no_other_effect() {
    let mut gate = Gate::stdio(Place::new(), &backend("one", &[], ""));
    gate.client.line("{not json");
    let answer = gate.client.answer_to("null");
    assert_eq!(answer["error"]["code"], -32700, "{answer}");
    assert_eq!(gate.client.call("one__echo", json!({"text": "goes on"})), "goes on");
    gate.end();
}

/// They are longer than those that the event loop parses itself.
#[test]
fn long_messages_pass_both_ways() {
    let (text, bytes) = ("x".repeat(5 << 20), 9 << 20);
    let far = Gate::listen(Place::new(), &backend("one", &[], ""));
    let config = format!("[[backend]]\nname = \"far\"\nurl = \"http://{}/mcp\"\nprefix = \"\"\n", far.address);
    let near = Gate::listen(Place::new(), &config);
    near.is("far", "ready");
    // The backend is a process, and then an HTTP server.
    for gate in [&far, &near] {
        let mut session = Session::open_declaring(&gate.address, json!({"sampling": {}}));
        assert_eq!(session.call("one__echo", json!({"text": text})).len(), text.len());
        assert_eq!(session.call("one__big", json!({"bytes": bytes})).len(), bytes);
        // A long question of the server, and a long answer of the client.
        let question = json!({"method": "sampling/createMessage", "params": {"messages": [], "systemPrompt": text}});
        let mut call = session.begin("one__ask", &question, None);
        call.head();
        let asked = call.event();
        assert_eq!(asked["params"]["systemPrompt"], text);
        let content = json!({"role": "assistant", "model": "m", "content": {"type": "text", "text": text}});
        let answer = json!({"jsonrpc": "2.0", "id": asked["id"], "result": content});
        assert_eq!(session.post(&answer).status, 202);
        let answer = call.event();
        assert_eq!(answer["id"], BEGUN_ID);
        assert!(crate::mcp::client::text(&answer["result"]).contains(&text));

        for refused in [
            json!([{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": {"long": text}}]),
            json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": {"message": text}}),
        ] {
            let reply = session.post(&refused);
            assert_eq!(reply.status, 413, "{}", reply.text());
            assert!(reply.text().contains("may have at most 4 MiB"), "{}", reply.text());
        }
        assert_eq!(session.call("one__echo", json!({"text": "continues"})), "continues");
    }
    near.end();
    far.end();
}

#[test]
fn lines_on_stdin_do_not_overtake_a_long_one() {
    let mut gate = Gate::stdio(Place::new(), &backend("one", &[], ""));
    let long = "x".repeat(8 << 20);
    let first = gate.client.send_call("one__echo", json!({"text": long}));
    let (second, third) =
        (gate.client.send_call("one__received", json!({})), gate.client.send_call("one__pid", json!({})));
    assert_eq!(crate::mcp::client::text(&gate.client.answer(first)["result"]).len(), long.len());
    let received = crate::mcp::client::text(&gate.client.answer(second)["result"]);
    assert!(received.contains(&long), "the long call came first");
    gate.client.answer(third);
    // One that is not JSON is refused.
    gate.client.line(&format!("[\"{long}\",]"));
    assert_eq!(gate.client.answer_to("null")["error"]["code"], -32700);
    assert_eq!(gate.client.call("one__echo", json!({"text": "goes on"})), "goes on");
    gate.end();
}

/// The gateway reads them while it answers the first one; their ends are at any place of its buffers.
#[test]
fn requests_that_are_sent_together_are_all_answered() {
    let gate = Gate::listen(Place::new(), &backend("one", &[], ""));
    gate.is("one", "ready");
    let mut web = Web::connect(&gate.address);
    let request = |id: usize, tool: &str, arguments: Value, length: usize| {
        let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientCapabilities": {}, "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}});
        let params = json!({"name": tool, "arguments": arguments, "_meta": meta});
        let body = json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}).to_string();
        let head = format!(
            "POST /mcp HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n\
             accept: application/json, text/event-stream\r\nmcp-protocol-version: 2026-07-28\r\n\
             mcp-method: tools/call\r\nmcp-name: {tool}\r\ncontent-length: {}\r\nx-pad: ",
            gate.address,
            body.len()
        );
        let pad = "p".repeat(length.saturating_sub(head.len() + "\r\n\r\n".len() + body.len()));
        format!("{head}{pad}\r\n\r\n{body}")
    };
    for length in [0, 1024, 1111, 2048] {
        web.raw(request(0, "one__sleep", json!({"ms": 50}), 0).as_bytes());
        let more: Vec<String> = (1..=24).map(|id| request(id, "one__echo", json!({"text": "x"}), length)).collect();
        web.raw(more.concat().as_bytes());
        for id in 0..=24 {
            let reply = web.answer();
            assert_eq!(
                reply.messages().last().map(|message| message["id"].clone()),
                Some(json!(id)),
                "{}",
                reply.text()
            );
        }
    }
}

#[test]
fn health_and_metrics_are_served() {
    let gate = Gate::listen(Place::new(), &backend("one", &[], ""));
    gate.child("one");
    let mut session = gate.session();
    session.call("one__echo", json!({"text": "counted"}));
    let mut web = Web::connect(&gate.address);
    assert_eq!(web.get("/health").status, 200);
    let ready = web.get("/ready");
    assert_eq!(ready.status, 200, "{}", ready.text());
    let metrics = web.get("/metrics");
    assert_eq!(metrics.status, 200);
    let text = metrics.text();
    assert!(text.contains("one__echo") && text.contains("# EOF"), "{text}");
    gate.end();
}

#[test]
fn the_cached_catalogue_is_served_at_once_and_marked_stale() {
    let place = Place::new();
    let more = place.join("more");
    let config = backend("slow", &["--more", &more], "");
    let mut gate = Gate::listen(place, &config);
    // A ready backend may not have sent its lists yet.
    until("what it offers", || (gate.backend("slow")["catalogue"] == "confirmed").then_some(()));
    crate::mcp::client::signal(gate.client.pid(), nix::sys::signal::Signal::SIGTERM);
    gate.client.wait();

    gate.place.write("more", "--slow-start\n4000\n");
    let gate = Gate::listen(gate.place, &config);
    let mut session = gate.session();
    let tools = session.tools();
    let slow = gate.backend("slow");
    assert_eq!((&slow["state"], &slow["stale"]), (&json!("starting"), &json!(true)), "{slow}");
    assert!(tools.iter().any(|tool| tool == "slow__echo"), "{tools:?}");
    // A call waits until the backend is ready.
    assert_eq!(session.call("slow__echo", json!({"text": "at last"})), "at last");
    assert_eq!(gate.is("slow", "ready")["stale"], false);
    gate.end();
}

/// A clone of a project can contain any file, also one that looks like what an earlier gateway has cached.
#[cfg(unix)]
#[test]
fn a_cached_catalogue_in_the_project_is_not_used() {
    let place = Place::new();
    let more = place.join("more");
    let config = backend("slow", &["--more", &more], "");
    let mut gate = Gate::listen(place, &config);
    until("what it offers", || (gate.backend("slow")["catalogue"] == "confirmed").then_some(()));
    crate::mcp::client::signal(gate.client.pid(), nix::sys::signal::Signal::SIGTERM);
    gate.client.wait();

    let cached = super::world::cached_catalogue(gate.place.path());
    let planted = gate.place.path().join(".outlast").join(cached.file_name().expect("a name"));
    std::fs::rename(&cached, &planted).expect("the directory of the project");
    gate.place.write("more", "--slow-start\n4000\n");
    let gate = Gate::listen(gate.place, &config);
    let mut session = gate.session();
    let tools = session.tools();
    assert!(!tools.iter().any(|tool| tool == "slow__echo"), "{tools:?}");
    assert_eq!(gate.is("slow", "ready")["stale"], false);
    gate.end();
}

#[test]
fn each_session_may_have_a_process_of_its_own() {
    let config = [backend("own", &[], "children = \"per_session\""), backend("shared", &[], "")].concat();
    let gate = Gate::listen(Place::new(), &config);
    let (mut one, mut two) = (gate.session(), gate.session());
    let pid = |session: &mut super::web::Session, tool: &str| session.call(tool, json!({}));
    assert_ne!(pid(&mut one, "own__pid"), pid(&mut two, "own__pid"));
    assert_eq!(pid(&mut one, "own__pid"), pid(&mut one, "own__pid"));
    assert_eq!(pid(&mut one, "shared__pid"), pid(&mut two, "shared__pid"));
    gate.end();
}

#[test]
fn a_stateless_client_gets_requests_of_a_handshake_server_during_other_calls() {
    let config = backend("own", &["--era", "legacy"], "children = \"per_session\"");
    let gate = Gate::listen(Place::new(), &config);
    let can = json!({"elicitation": {}});
    let post = |params: serde_json::Value, capabilities: &serde_json::Value| {
        let reply = super::web::stateless(&gate.address, "tools/call", params, capabilities.clone());
        (reply.status, reply.messages().pop().unwrap_or_else(|| panic!("no answer: {}", reply.text())))
    };
    let ask = |word: &str| json!({"name": "own__ask", "arguments": {"method": "elicitation/create", "params": {"message": word}}});
    // Two calls are open at the same time; the third does not matter here.
    let asked = ["first", "second"].map(|word| {
        let (_, answer) = post(ask(word), &can);
        let asked = answer["result"]["inputRequests"]["ask0"]["params"]["message"].clone();
        assert_eq!(asked, word, "{answer}");
        answer["result"]["requestState"].clone()
    });
    assert_eq!(
        post(json!({"name": "own__echo", "arguments": {"text": "third"}}), &can).1["result"]["content"][0]["text"],
        "third"
    );
    for (state, word) in asked.into_iter().zip(["first", "second"]) {
        let mut params = ask(word);
        params["requestState"] = state;
        params["inputResponses"] = json!({"ask0": {"action": "accept", "content": {"said": word}}});
        let (status, answer) = post(params, &can);
        let text = crate::mcp::client::text(&answer["result"]);
        assert!(status == 200 && text.contains(&format!(r#""said":"{word}""#)), "{answer}");
    }
    // A client without the capability gets an error that names it; the puppet forwards the error.
    let (_, answer) = post(ask("unknown"), &json!({}));
    let text = crate::mcp::client::text(&answer["result"]);
    assert!(text.contains("did not declare the capability `elicitation`"), "{answer}");
    let seats = gate.backend("own")["links"].to_string();
    assert!(seats.contains("lent"), "{seats}");
    gate.end();
}

#[test]
fn the_status_page_reads_state_and_sends_operator_requests() {
    let gate = Gate::listen(Place::new(), &backend("one", &[], ""));
    let one = gate.child("one");
    let mut web = Web::connect(&gate.address);
    let page = web.get("/");
    assert_eq!(page.status, 200);
    assert!(page.text().contains("/api/"), "the page asks for what it shows");
    let json_of = |reply: super::web::Reply| serde_json::from_slice::<serde_json::Value>(&reply.body).expect("JSON");
    let state = json_of(web.get("/api/state"));
    assert_eq!(state["backends"][0]["pid"], one, "{state}");
    let token = json_of(web.get("/api/token"))["token"].as_str().expect("a token").to_owned();
    let mut order = |path: &str, token: &str, body: serde_json::Value| {
        let headers = [("content-type", "application/json"), ("x-outlast-token", token)];
        web.ask("POST", path, &headers, body.to_string().as_bytes())
    };
    assert_eq!(order("/api/restart", "guessed", json!({"backend": "one"})).status, 403);
    assert_eq!(gate.child("one"), one, "not touched");
    let restarted = order("/api/restart", &token, json!({"backend": "one", "reason": "by the page"}));
    assert_eq!(restarted.status, 200, "{}", restarted.text());
    assert_ne!(gate.child("one"), one);
    assert_eq!(gate.place.recorded("server_restart_requested", 1)["reason"], "by the page");
    let off = order("/api/switch", &token, json!({"name": "one__echo", "off": true}));
    assert_eq!(off.status, 200, "{}", off.text());
    assert_eq!(gate.state()["switched_off"], json!([{"tool": "one__echo"}]));
    let unknown = order("/api/restart", &token, json!({"backend": "unknown"}));
    assert_eq!(unknown.status, 409, "{}", unknown.text());
    assert_eq!(order("/api/stop", &token, json!({})).status, 404, "a page ends nothing");
    gate.end();
}

#[test]
fn a_slow_backend_without_a_cached_catalogue_does_not_delay_the_first_list() {
    let config = [backend("quick", &[], ""), backend("slow", &["--slow-start", "10000"], "")].concat();
    let gate = Gate::listen(Place::new(), &config);
    gate.is("quick", "ready");
    let tools = gate.session().tools();
    assert_eq!(gate.backend("slow")["state"], "starting");
    assert!(tools.iter().any(|tool| tool == "quick__echo") && !tools.iter().any(|tool| tool.starts_with("slow__")));
    gate.end();
}

#[test]
fn a_lazy_backend_starts_with_the_first_request_that_needs_it() {
    let config = backend("one", &[], "start = \"lazy\"");
    let mut gate = Gate::listen(Place::new(), &config);
    // Nothing is cached: the backend is started once to read its lists, and stopped again.
    let idle = gate.is("one", "idle");
    assert_eq!((&idle["catalogue"], &idle["pid"]), (&json!("confirmed"), &json!(null)), "{idle}");
    assert_eq!(gate.place.recorded("server_stopped", 1)["backend"], "one");
    crate::mcp::client::signal(gate.client.pid(), nix::sys::signal::Signal::SIGTERM);
    gate.client.wait();

    // With a cache no process is started.
    let started = gate.place.audit_of("server_started").len();
    let gate = Gate::listen(gate.place, &config);
    let mut session = gate.session();
    assert!(session.tools().iter().any(|tool| tool == "one__echo"));
    assert_eq!(
        (gate.backend("one")["state"].clone(), gate.backend("one")["stale"].clone()),
        (json!("idle"), json!(true))
    );
    assert_eq!(gate.place.audit_of("server_started").len(), started);
    let pid = session.call("one__pid", json!({}));
    assert_eq!(gate.child("one").to_string(), pid);
    assert_eq!(session.call("one__pid", json!({})), pid, "it stays");
    gate.end();
}
