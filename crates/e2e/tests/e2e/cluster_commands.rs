//! The commands with `--cluster`, against a gateway that is played by the test: it is registered, and answers for three
//! replicas. How a real gateway gathers these answers is not tested here.

use std::{
    fs,
    os::unix::net::UnixListener,
    sync::{Arc, Mutex},
    thread,
};

use serde_json::{Value, json};

use crate::{
    control::{Session, Wire, World, said, text_of},
    gateway::world::{Gate, backend},
    mcp::client::Place,
    top::Pane,
};

/// The requests that the played gateway received: the method and its parameters.
type Asked = Arc<Mutex<Vec<(String, Value)>>>;

/// A real instance, whose process the played gateways are registered with, and its registry entry.
fn base(world: &World) -> (Session, Value) {
    let base = world.start("base", &[]);
    let id = text_of(&world.ps()[0]["id"]);
    let entry = fs::read_to_string(world.run_dir().join(format!("{id}.json"))).unwrap();
    (base, serde_json::from_str(&entry).unwrap())
}

/// Registers a gateway of this cluster and answers its requests.
fn play(world: &World, entry: &Value, id: &str, cluster: &str) -> Asked {
    let socket = world.run_dir().join(format!("{id}.sock"));
    let listener = UnixListener::bind(&socket).unwrap();
    let mut entry = entry.clone();
    for (member, value) in
        [("id", json!(id)), ("kind", json!("gateway")), ("name", json!(id)), ("socket", json!(socket))]
    {
        entry[member] = value;
    }
    let asked = Asked::default();
    let (heard, cluster) = (Arc::clone(&asked), cluster.to_owned());
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            let mut wire = Wire(stream);
            let Some(request) = wire.try_hear() else { continue };
            let (method, params) = (text_of(&request["method"]), request["params"].clone());
            let answer = match answer(&cluster, &method, &params) {
                Ok(answer) => json!({"id": request["id"], "ok": answer}),
                Err(message) => json!({"id": request["id"], "error": {"code": "failed", "message": message}}),
            };
            heard.lock().unwrap().push((method, params));
            wire.send(answer.to_string().as_bytes());
        }
    });
    fs::write(world.run_dir().join(format!("{id}.json")), entry.to_string()).unwrap();
    asked
}

fn answer(cluster: &str, method: &str, params: &Value) -> Result<Value, String> {
    Ok(match method {
        "state" => json!({"state": "running", "cluster": {"name": cluster, "replica": "east-1"},
            "backends": [{"name": "files", "state": "ready"}]}),
        "cluster_state" => json!({
            "name": cluster, "replica": "east-1", "instance": "00000000000000a1",
            "nats": {"connected": true, "server": "nats://127.0.0.1:4222", "since_s": 5.0},
            "replicas": [
                {"name": "east-1", "is_self": true, "is_alive": true, "sessions": 4, "share_parts": 500_000},
                {"name": "east-2", "is_alive": true, "sessions": 1, "audit_backlog": 3},
            ],
            "backends": [
                {"name": "ledger", "placement": "one", "owner": "east-2", "lease_until_s": 8.0, "state": "ready",
                    "replica": "east-2"},
                {"name": "files", "placement": "every", "state": "ready", "pid": 77, "replica": "east-1"},
            ],
            "counters": {"takeovers": 2}, "unreachable": ["east-2"],
        }),
        "restart" if params["backend"] == "broken" => return Err("no backend is named \"broken\"".to_owned()),
        "restart" => json!({"replicas": [
            {"replica": "east-1", "answer": {"old_pid": 1, "new_pid": 2, "took_ms": 9}},
            {"replica": "east-2", "answer": {"old_pid": 3, "new_pid": 4, "took_ms": 9}},
        ], "unreachable": []}),
        "switch" => json!({"changed": true}),
        "cluster_audit" => audit_page(params),
        method => return Err(format!("{method} is not played")),
    })
}

/// Seven records of each of two replicas in turn, two on a page.
fn audit_page(params: &Value) -> Value {
    let Some(replica) = params["replica"].as_str() else { return json!({"replicas": ["east-1", "east-2"]}) };
    let first: usize = params["cursor"].as_str().map_or(0, |cursor| cursor.parse().unwrap());
    let record = |number: usize| {
        let second = number * 2 + usize::from(replica == "east-2");
        let event = if number == 3 { "gave_up" } else { "server_started" };
        let line = json!({"id": format!("{replica}-{number}"), "timestamp": format!("2026-01-13T14:32:{second:02}.000Z"),
            "props": {"event_type": event, "id": "tools-1", "detail": "\u{1b}[31mred"}});
        json!({"id": format!("{replica}-{number}"), "replica": replica, "line": line.to_string()})
    };
    let event = params["event"].as_str();
    let page = (first..7).take(2).map(record);
    let wanted = page.filter(|record| event.is_none_or(|event| record["line"].as_str().unwrap().contains(event)));
    let next = (first + 2 < 7).then(|| (first + 2).to_string());
    json!({"replicas": ["east-1", "east-2"], "records": wanted.collect::<Vec<_>>(), "next": next})
}

#[test]
fn n5_the_whole_cluster_is_listed_and_controlled_through_one_gateway() {
    let world = World::new();
    let (_base, entry) = base(&world);
    let asked = play(&world, &entry, "tools-1", "prod");
    let last = |method: &str| {
        let asked = asked.lock().unwrap();
        asked.iter().rev().find(|(name, _)| name == method).map(|(_, params)| params.clone()).unwrap()
    };

    let (code, stdout, stderr) = said(&world.outlast(&["ps", "--cluster"]));
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(stderr, "warning: 1 replica did not answer in time: `east-2`\n  hint: what is shown of it may be old\n");
    let lines: Vec<&str> = stdout.lines().collect();
    assert!(lines[0].starts_with("REPLICA   NAME") && lines[1].starts_with("east-1 *  prod"), "{stdout}");
    assert!(lines[2].contains("files") && lines[3].contains("unresponsive") && lines[4].contains("8.0s"), "{stdout}");
    let rows: Vec<Value> = serde_json::from_slice(&world.outlast(&["ps", "--cluster", "--json"]).stdout).unwrap();
    assert_eq!(rows.len(), 4);
    assert_eq!((&rows[1]["replica"], &rows[1]["pid"]), (&json!("east-1"), &json!(77)));
    assert_eq!(said(&world.outlast(&["top", "--cluster", "tools-1", "--once"])).1, stdout, "the same table");

    let (code, stdout, _) = said(&world.outlast(&["state", "--cluster", "tools-1"]));
    assert_eq!(code, Some(0));
    assert!(
        stdout.starts_with("prod (cluster), seen by east-1\n  nats       connected to nats://127.0.0.1:4222"),
        "{stdout}"
    );
    assert!(stdout.contains("\n  counted    2 takeovers\n"), "{stdout}");
    let state: Value = serde_json::from_slice(&world.outlast(&["state", "--cluster", "--json"]).stdout).unwrap();
    assert_eq!(state["backends"][0]["owner"], "east-2");

    let (code, stdout, stderr) = said(&world.outlast(&["restart", "--cluster", "files", "--reason", "new keys"]));
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert_eq!(stdout, "Restarted east-1/files in 9 ms: pid 1 → 2\nRestarted east-2/files in 9 ms: pid 3 → 4\n");
    let expected = json!({"backend": "files", "cluster": true, "now": false, "reason": "new keys"});
    assert_eq!(last("restart"), expected);
    let (code, _, stderr) = said(&world.outlast(&["restart", "--cluster", "tools-1/broken"]));
    assert_eq!(code, Some(1));
    assert!(stderr.starts_with("error: the restart of `tools-1/broken` failed\n  because: no backend"), "{stderr}");
    let (code, _, stderr) = said(&world.outlast(&["restart", "--cluster", "--now"]));
    assert_eq!(code, Some(2));
    assert!(stderr.starts_with("error: `--now` cannot be used together with `--cluster`\n"), "{stderr}");

    let (code, stdout, _) = said(&world.outlast(&["switch", "--cluster", "--off", "files__rm"]));
    assert_eq!((code, stdout.as_str()), (Some(0), "Turned off files__rm of tools-1\n"));
    assert_eq!(last("switch"), json!({"name": "files__rm", "off": true}));
}

#[test]
fn n6_the_records_of_all_replicas_are_merged_by_time() {
    let world = World::new();
    let (_base, entry) = base(&world);
    let asked = play(&world, &entry, "tools-1", "prod");
    let (code, stdout, stderr) = said(&world.outlast(&["audit", "--cluster", "--json", "--since", "2026-01-01"]));
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    let records: Vec<Value> = stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let times: Vec<&str> = records.iter().map(|record| record["timestamp"].as_str().unwrap()).collect();
    assert_eq!(times.len(), 14);
    assert!(times.is_sorted(), "{times:?}");
    let ids: Vec<&str> = records[..4].iter().map(|record| record["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["east-1-0", "east-2-0", "east-1-1", "east-2-1"]);
    assert!(!stdout.contains('\u{1b}'), "no escape sequence reaches the terminal");
    let pages = asked.lock().unwrap().iter().filter(|(method, _)| method == "cluster_audit").count();
    assert_eq!(pages, 9, "the list of replicas, and four pages of each");
    let since = |params: &Value| params["since"].as_str().map(str::to_owned);
    let last = asked.lock().unwrap().last().unwrap().1.clone();
    assert_eq!(since(&last).as_deref(), Some("2026-01-01T00:00:00.000Z"));

    let (code, stdout, _) = said(&world.outlast(&["audit", "--cluster", "tools-1", "--event", "gave_up"]));
    assert_eq!(code, Some(0));
    let lines: Vec<Vec<&str>> = stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines.len(), 3, "{stdout}");
    assert_eq!((lines[1][2], lines[2][2]), ("east-1", "east-2"), "{stdout}");
    let (code, _, stderr) = said(&world.outlast(&["audit", "--cluster", "--event", "gave-up"]));
    assert_eq!(code, Some(2));
    assert!(stderr.contains("did you mean `gave_up`?"), "{stderr}");
}

#[test]
fn a_cluster_is_chosen_by_a_gateway_in_it() {
    let world = World::new();
    let (_base, entry) = base(&world);
    let all = [
        vec!["ps", "--cluster"],
        vec!["top", "--cluster", "--once"],
        vec!["state", "--cluster"],
        vec!["restart", "--cluster"],
        vec!["switch", "--cluster", "--off", "x"],
        vec!["audit", "--cluster"],
    ];
    for command in &all {
        let (code, stdout, stderr) = said(&world.outlast(command));
        assert_eq!((code, stdout.as_str()), (Some(1), ""), "{command:?}");
        let words = "error: no gateway of this user is in a cluster\n  hint: the table `[cluster]` in a gateway's \
                     configuration puts it into one\n";
        assert_eq!(stderr, words, "{command:?}");
    }
    let (code, _, stderr) = said(&world.outlast(&["state", "--cluster", "base"]));
    assert_eq!(code, Some(1));
    assert!(stderr.contains("is not in a cluster\n"), "{stderr}");
    let (code, _, stderr) = said(&world.outlast(&["ps", "base"]));
    assert_eq!(code, Some(2), "an id is only for clusters: {stderr}");

    play(&world, &entry, "tools-1", "prod");
    play(&world, &entry, "tools-2", "test");
    let (code, _, stderr) = said(&world.outlast(&["ps", "--cluster"]));
    assert_eq!(code, Some(1));
    assert!(stderr.starts_with("error: gateways of this user are in 2 clusters\n"), "{stderr}");
    let (code, stdout, _) = said(&world.outlast(&["ps", "--cluster", "tools-2"]));
    assert_eq!(code, Some(0));
    assert!(stdout.contains("east-1 *  test"), "{stdout}");
}

#[test]
fn a_gateway_outside_of_a_cluster_refuses_what_only_a_cluster_has() {
    let gate = Gate::listen(Place::new(), &backend("one", &[], ""));
    let state = gate.state();
    assert!(state.get("cluster").is_none(), "{state}");
    let mut wire = Wire::connect(&state);
    for (id, method, params) in [
        (1, "cluster_state", json!({})),
        (2, "cluster_audit", json!({})),
        (3, "restart", json!({"cluster": true, "backend": "one"})),
    ] {
        wire.ask(id, method, params);
        let answer = wire.hear();
        assert_eq!(answer["error"]["code"], "not_in_cluster", "{method}: {answer}");
    }
    gate.end();
}

#[test]
fn top_shows_a_cluster_live() {
    let world = World::new();
    let (_base, entry) = base(&world);
    let asked = play(&world, &entry, "tools-1", "prod");
    let pane = Pane::open_with(&world, "top --cluster");
    let screen = pane.until("the replicas", |screen| screen.contains("east-2/ledger"));
    assert!(screen.contains("cluster prod  2 replicas") && screen.contains("unresponsive"), "{screen}");
    pane.press("j");
    pane.press("r");
    pane.until("the restart", |screen| screen.contains("restarted files on 2 replicas"));
    let asked = asked.lock().unwrap();
    let (_, params) = asked.iter().find(|(method, _)| method == "restart").unwrap();
    assert_eq!((&params["backend"], &params["cluster"]), (&json!("files"), &json!(true)));
    pane.press("q");
}
