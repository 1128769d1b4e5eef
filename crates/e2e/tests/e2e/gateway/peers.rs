//! Real servers behind the gateway, and real SDKs in front of it: each server is killed while each client keeps its
//! only connection.

use std::{
    io::{BufRead, BufReader},
    net::TcpListener,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::world::{Gate, outlast_in};
use crate::{
    mcp::client::{PATIENCE, Place, signal, until},
    support::{
        outlast,
        peers::{Client, Peer, Peers, Project, Server, text},
    },
};

/// One call for each backend, and a part of the right answer.
fn questions(project: &Project) -> [(&'static str, &'static str, Value, &'static str); 6] {
    let path = text(&project.path());
    [
        ("everything", "echo", json!({"message": "it lives"}), "Echo: it lives"),
        ("files", "read_text_file", json!({"path": format!("{path}/hello.txt")}), "hello from a file"),
        ("memory", "search_nodes", json!({"query": "outlast"}), "a connection outlasts a process"),
        ("time", "get_current_time", json!({"timezone": "UTC"}), "UTC"),
        ("git", "git_log", json!({"repo_path": format!("{path}/repository")}), "the first commit"),
        ("fast", "echo", json!({"text": "ü 漢 🦀"}), "ü 漢 🦀"),
    ]
}

/// A project with all the servers in its configuration. The HTTP server runs by itself.
struct World {
    project: Project,
    python: String,
    port: u16,
    fast: Child,
}

/// The server over HTTP, once it listens.
fn start_fast(python: &str, port: u16) -> Child {
    let mut fast = Command::new(python)
        .arg(Peers::script("servers/python_fastmcp_http.py"))
        .arg(port.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the server starts");
    let mut said = BufReader::new(fast.stderr.take().expect("stderr is piped")).lines().map_while(Result::ok);
    assert!(said.any(|line| line.contains("Uvicorn running")), "the server over HTTP does not start");
    thread::spawn(move || said.for_each(drop));
    fast
}

impl World {
    fn new(peers: &Peers) -> World {
        let project = Project::new(peers, Server::Filesystem);
        let path = text(&project.path());
        let memory = json!({
            "type": "entity", "name": "outlast", "entityType": "program",
            "observations": ["a connection outlasts a process"],
        });
        std::fs::write(format!("{path}/memory.jsonl"), memory.to_string()).expect("the project is ours");
        for words in [
            &["init", "-q", "repository"][..],
            &[
                "-C",
                "repository",
                "-c",
                "user.name=a",
                "-c",
                "user.email=a@b.c",
                "commit",
                "-q",
                "--allow-empty",
                "-m",
                "the first commit",
            ],
        ] {
            let made = Command::new("git").args(words).current_dir(&path).env("HOME", &path).status();
            assert!(made.is_ok_and(|status| status.success()), "git {words:?}");
        }
        let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a port").port();
        let (node, python) = (text(&peers.node()), text(&peers.python("python-2")));
        let package = |name: &str| text(&peers.package(&format!("{name}/dist/index.js")));
        let stdio = |name: &str, command: &str, args: &[&str], more: &str| {
            format!("[[backend]]\nname = {name:?}\ncommand = {command:?}\nargs = {args:?}\n{more}\n")
        };
        let config = [
            stdio("everything", &node, &[&package("server-everything"), "stdio"], ""),
            stdio("files", &node, &[&package("server-filesystem"), &path], ""),
            stdio(
                "memory",
                &node,
                &[&package("server-memory")],
                &format!("env = {{ MEMORY_FILE_PATH = \"{path}/memory.jsonl\" }}"),
            ),
            stdio("time", &python, &["-m", "mcp_server_time"], ""),
            stdio("git", &python, &["-m", "mcp_server_git", "--repository", &format!("{path}/repository")], ""),
            format!("[[backend]]\nname = \"fast\"\nurl = \"http://127.0.0.1:{port}/mcp\"\n"),
        ];
        std::fs::write(format!("{path}/outlast.toml"), config.concat()).expect("the project is ours");
        let fast = start_fast(&python, port);
        World { project, python, port, fast }
    }

    /// The ready child of a backend, in the newest gateway: some clients first start one to inspect it.
    fn child(&self, name: &str) -> Option<u32> {
        let output = outlast_in(&self.project.path(), &["ps", "--json"]);
        let rows: Vec<Value> = serde_json::from_slice(&output.stdout).expect("an array of rows");
        let is_it = |row: &&Value| row["kind"] == "backend" && row["name"] == name;
        let newest = |row: &&Value| row["started"].as_f64().map(f64::to_bits);
        let row = rows.iter().filter(is_it).max_by_key(newest)?;
        (row["state"] == "ready").then_some(())?;
        row["child_pid"].as_u64().and_then(|pid| u32::try_from(pid).ok())
    }

    /// All backends answer; each child is killed in turn, and all answer again over the same connection.
    fn outlives_everything(&mut self, peer: &mut Peer) -> Result<(), String> {
        let questions = questions(&self.project);
        // A list does not wait for a slow backend; later entries are announced.
        let deadline = Instant::now() + PATIENCE;
        loop {
            let tools = peer.tools()?;
            let is_offered =
                |(backend, tool, ..): &&(&str, &str, Value, &str)| tools.contains(&format!("{backend}__{tool}"));
            match questions.iter().find(|question| !is_offered(question)) {
                None => break,
                Some((backend, tool, ..)) if deadline <= Instant::now() => {
                    return Err(format!("{backend}__{tool} is not offered: {tools:?}"));
                }
                Some(_) => thread::sleep(Duration::from_millis(50)),
            }
        }
        let answers = |peer: &mut Peer, at: usize| {
            let (backend, tool, arguments, answer) = &questions[at];
            let said = peer.call(&format!("{backend}__{tool}"), arguments.clone())?;
            match !said.is_error && said.text.contains(answer) {
                true => Ok(()),
                false => Err(format!("{backend}__{tool} answered {said:?}")),
            }
        };
        for at in 0..questions.len() {
            answers(peer, at)?;
        }
        for (backend, ..) in questions.iter().filter(|(backend, ..)| *backend != "fast") {
            let pid = until(&format!("{backend} to be ready"), || self.child(backend));
            signal(pid, Signal::SIGKILL);
            until(&format!("{backend} to be replaced"), || self.child(backend).filter(|new| *new != pid));
            for at in 0..questions.len() {
                answers(peer, at).map_err(|error| format!("after kill -9 of {backend}: {error}"))?;
            }
        }
        // The HTTP backend is not a child of outlast: it is stopped and started again, and has lost every session.
        let at = questions.len() - 1;
        let _ = self.fast.kill();
        let _ = self.fast.wait();
        self.fast = start_fast(&self.python, self.port);
        let deadline = Instant::now() + PATIENCE;
        // A call with the lost session may fail once, as the answer of a tool; the next one uses a new session.
        while let Err(error) = answers(peer, at) {
            if deadline <= Instant::now() {
                return Err(format!("after a restart of fast: {error}"));
            }
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.fast.kill();
        let _ = self.fast.wait();
    }
}

fn over_stdio(test: &str, client: Client) {
    let Some(peers) = Peers::find(test) else { return };
    let mut world = World::new(&peers);
    let command = [text(&outlast()), "gateway".into(), "--config".into(), "outlast.toml".into(), "--stdio".into()];
    let story = Peer::start(client, &world.project, &command).and_then(|mut peer| {
        world.outlives_everything(&mut peer)?;
        peer.close()
    });
    story.unwrap_or_else(|error| panic!("{client:?}: {error}\n{}", world.project.stderr_tail()));
}

fn over_http(test: &str, clients: &[Client]) {
    let Some(peers) = Peers::find(test) else { return };
    let mut world = World::new(&peers);
    let path = world.project.path();
    let mut gateway = Command::new(outlast())
        .args(["gateway", "--config", "outlast.toml", "--listen", "127.0.0.1:0"])
        .current_dir(&path)
        .env("HOME", &path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut said = BufReader::new(gateway.stderr.take().expect("stderr is piped")).lines().map_while(Result::ok);
    let line = said.find(|line| line.contains("listening on http://")).expect("it listens");
    thread::spawn(move || said.for_each(drop));
    let url = line.split("listening on ").nth(1).and_then(|rest| rest.split_whitespace().next()).expect("a url");
    let mut failures = Vec::new();
    for client in clients {
        let story = Peer::connect(*client, &world.project, url).and_then(|mut peer| {
            world.outlives_everything(&mut peer)?;
            peer.close()
        });
        failures.extend(story.err().map(|error| format!("{client:?}: {error}\n{}", world.project.stderr_tail())));
    }
    signal(gateway.id(), Signal::SIGTERM);
    assert_eq!(gateway.wait().expect("our child").code(), Some(0));
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

#[test]
fn python_over_stdio() {
    over_stdio("gateway::peers::python_over_stdio", Client::PythonMcp2);
}

#[test]
fn python_1_over_stdio() {
    over_stdio("gateway::peers::python_1_over_stdio", Client::PythonMcp1);
}

#[test]
fn typescript_1_over_stdio() {
    over_stdio("gateway::peers::typescript_1_over_stdio", Client::TsSdk1);
}

#[test]
fn typescript_2_over_stdio() {
    over_stdio("gateway::peers::typescript_2_over_stdio", Client::TsClient2Auto);
}

#[test]
fn rust_over_stdio() {
    over_stdio("gateway::peers::rust_over_stdio", Client::Rmcp);
}

#[test]
fn rust_stateless_over_stdio() {
    over_stdio("gateway::peers::rust_stateless_over_stdio", Client::RmcpAuto);
}

#[test]
fn python_over_http() {
    let clients = [Client::PythonMcp2, Client::PythonMcp1, Client::PythonFastmcp];
    over_http("gateway::peers::python_over_http", &clients);
}

#[test]
fn typescript_over_http() {
    let clients = [Client::TsSdk1, Client::TsClient2, Client::TsClient2Auto];
    over_http("gateway::peers::typescript_over_http", &clients);
}

#[test]
fn rust_over_http() {
    over_http("gateway::peers::rust_over_http", &[Client::Rmcp, Client::RmcpAuto]);
}

/// server-everything has a tool that is a task: its client finds it in the list of its tasks, and no other client
/// does.
#[test]
fn tasks_of_a_real_server_are_listed_for_their_own_client() {
    let Some(peers) = Peers::find("gateway::peers::tasks_of_a_real_server_are_listed_for_their_own_client") else {
        return;
    };
    let (node, script) = (text(&peers.node()), text(&peers.package("server-everything/dist/index.js")));
    let config = format!("[[backend]]\nname = \"all\"\ncommand = {node:?}\nargs = [{script:?}, \"stdio\"]\n");
    let gate = Gate::listen(Place::new(), &config);
    until("what it offers", || (gate.backend("all")["catalogue"] == "confirmed").then_some(()));
    let (mut one, mut two) = (gate.session(), gate.session());
    let params =
        json!({"name": "all__simulate-research-query", "arguments": {"topic": "rust"}, "task": {"ttl": 60_000}});
    let made: Vec<Value> =
        (0..2).map(|_| one.ask("tools/call", params.clone())["result"]["task"]["taskId"].clone()).collect();
    assert!(made.iter().all(Value::is_string), "{made:?}");
    let listed = one.ask("tasks/list", json!({}));
    let ids: Vec<&Value> =
        listed["result"]["tasks"].as_array().expect("a list").iter().map(|task| &task["taskId"]).collect();
    assert_eq!(ids, made.iter().collect::<Vec<_>>(), "{listed}");
    assert!(listed["result"]["tasks"][0]["status"].is_string(), "{listed}");
    assert_eq!(two.ask("tasks/list", json!({}))["result"]["tasks"], json!([]));
    gate.end();
}

/// One session of an HTTP backend serves all clients; a server request on the stream of a call belongs to that
/// client.
#[test]
fn an_http_server_sends_a_request_to_one_client_while_it_serves_another() {
    let test = "gateway::peers::an_http_server_sends_a_request_to_one_client_while_it_serves_another";
    let Some(peers) = Peers::find(test) else { return };
    let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a port").port();
    let mut server = Command::new(peers.node())
        .arg(peers.package("server-everything/dist/index.js"))
        .arg("streamableHttp")
        .env("PORT", port.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the server starts");
    let mut said = BufReader::new(server.stderr.take().expect("stderr is piped")).lines().map_while(Result::ok);
    assert!(said.any(|line| line.contains("on port")), "the server over HTTP does not start");
    thread::spawn(move || said.for_each(drop));
    let gate =
        Gate::listen(Place::new(), &format!("[[backend]]\nname = \"all\"\nurl = \"http://127.0.0.1:{port}/mcp\"\n"));
    until("what it offers", || (gate.backend("all")["catalogue"] == "confirmed").then_some(()));
    let mut other = gate.session();
    let long = json!({"duration": 4, "steps": 2});
    let busy = thread::spawn(move || other.call("all__trigger-long-running-operation", long));
    until("the other call", || (gate.backend("all")["in_flight"] == 1).then_some(()));
    let params = json!({"name": "all__trigger-elicitation-request", "arguments": {}});
    let reply = super::web::stateless(&gate.address, "tools/call", params, json!({"elicitation": {"form": {}}}));
    let asked = reply.messages().pop().expect("an answer")["result"].clone();
    assert_eq!(asked["inputRequests"]["ask0"]["method"], "elicitation/create", "{asked}");
    assert!(busy.join().expect("a call").contains("completed"));
    gate.end();
    let _ = server.kill();
    let _ = server.wait();
}
