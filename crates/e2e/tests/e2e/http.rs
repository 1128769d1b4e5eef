//! A backend over HTTP, with real servers.

use std::{
    collections::BTreeMap,
    future::poll_fn,
    io::{BufRead, BufReader},
    net::TcpListener,
    process::{Child, Command, Stdio},
    sync::mpsc::{Sender, channel},
    thread,
    time::Duration,
};

use outlast::gateway::http::{HttpClient, HttpLink, HttpSettings, LinkEvent, WaitLimits};
use serde_json::{Value, json};

use crate::support::peers::Peers;

/// Well above the slow start of a server on a busy machine.
const ANSWER_MAX: Duration = Duration::from_secs(180);

/// A server process on its own port.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    /// Waits until it prints `ready`, on either stream.
    fn start(mut command: Command, url: String, ready: &'static str) -> Server {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (heard, said) = channel::<String>();
        listen(child.stdout.take().unwrap(), heard.clone());
        listen(child.stderr.take().unwrap(), heard);
        let mut words = Vec::new();
        while !words.last().is_some_and(|line: &String| line.contains(ready)) {
            match said.recv_timeout(ANSWER_MAX) {
                Ok(line) => words.push(line),
                Err(error) => panic!("the server does not start ({error}): {words:?}"),
            }
        }
        Server { child, url }
    }

    fn stop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Reads to the end, so that the server never blocks on its output.
fn listen(stream: impl std::io::Read + Send + 'static, heard: Sender<String>) {
    thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            let _ = heard.send(line);
        }
    });
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn everything(peers: &Peers, transport: &str, path: &str, port: u16) -> Server {
    let mut command = Command::new(peers.node());
    command.arg(peers.package("server-everything/dist/index.js")).arg(transport).env("PORT", port.to_string());
    Server::start(command, format!("http://127.0.0.1:{port}/{path}"), "on port")
}

fn fastmcp(peers: &Peers, port: u16) -> Server {
    let mut command = Command::new(peers.python("python-2"));
    command.arg(Peers::script("servers/python_fastmcp_http.py")).arg(port.to_string());
    Server::start(command, format!("http://127.0.0.1:{port}/mcp"), "Uvicorn running")
}

struct Link(HttpLink);

impl Link {
    fn connect(server: &Server, is_sse: bool) -> Link {
        let client = HttpClient::new(Duration::from_secs(60));
        let headers = BTreeMap::from([("x-caller".to_owned(), "outlast".to_owned())]);
        let settings = HttpSettings { url: server.url.clone(), headers, is_sse, limits: WaitLimits::default() };
        Link(HttpLink::connect(&client, &settings))
    }

    async fn hear(&mut self) -> LinkEvent {
        tokio::time::timeout(ANSWER_MAX, poll_fn(|cx| self.0.poll(cx))).await.expect("in time")
    }

    /// The answer; notifications in between are ignored.
    async fn ask(&mut self, id: u64, method: &str, params: Value) -> Value {
        self.0.send(json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string().into());
        loop {
            match self.hear().await {
                LinkEvent::Said(message) | LinkEvent::SaidFor { message, .. } => {
                    let message: Value = serde_json::from_slice(&message).expect("JSON");
                    if message["id"] == id && message.get("method").is_none() {
                        return message;
                    }
                }
                LinkEvent::Note(note) => eprintln!("note: {note}"),
                LinkEvent::Failing(_) => {}
                other => panic!("{method}: {other:?}"),
            }
        }
    }

    async fn open(&mut self) {
        let info = json!({"name": "proof", "version": "1"});
        let params = json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info});
        let opened = self.ask(0, "initialize", params).await;
        assert_eq!(opened["result"]["protocolVersion"], "2025-11-25", "{opened}");
        self.0.send(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#.into());
    }

    async fn call(&mut self, id: u64, tool: &str, arguments: Value) -> String {
        let answer = self.ask(id, "tools/call", json!({"name": tool, "arguments": arguments})).await;
        answer["result"]["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
    }

    /// Reads until the link is down; returns the reason.
    async fn end(&mut self) -> (String, bool) {
        loop {
            if let LinkEvent::Down { why, is_forgotten } = self.hear().await {
                return (why, is_forgotten);
            }
        }
    }
}

fn run(story: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(story);
}

fn names(answer: &Value) -> Vec<&str> {
    answer["result"]["tools"]
        .as_array()
        .unwrap_or_else(|| panic!("{answer}"))
        .iter()
        .filter_map(|tool| tool["name"].as_str())
        .collect()
}

#[test]
fn server_everything_is_used_in_a_session() {
    let Some(peers) = Peers::find("http::server_everything_is_used_in_a_session") else { return };
    run(async {
        let port = free_port();
        let mut server = everything(&peers, "streamableHttp", "mcp", port);
        let mut link = Link::connect(&server, false);
        link.open().await;
        assert!(names(&link.ask(1, "tools/list", json!({})).await).contains(&"echo"));
        assert_eq!(link.call(2, "echo", json!({"message": "é"})).await, "Echo: é");
        let sum = link.call(3, "get-sum", json!({"a": 2, "b": 3})).await;
        assert!(sum.contains('5'), "{sum}");

        // A new process on the same port does not know the session.
        server.stop();
        server = everything(&peers, "streamableHttp", "mcp", port);
        link.0.send(json!({"jsonrpc": "2.0", "id": 4, "method": "tools/list"}).to_string().into());
        let (why, is_forgotten) = link.end().await;
        assert!(is_forgotten, "{why}");
        let mut link = Link::connect(&server, false);
        link.open().await;
        assert_eq!(link.call(1, "echo", json!({"message": "again"})).await, "Echo: again");
        link.0.close(false);
        assert_eq!(link.end().await, ("the link was closed".into(), false));
    });
}

#[test]
fn server_everything_is_used_over_the_old_transport() {
    let Some(peers) = Peers::find("http::server_everything_is_used_over_the_old_transport") else { return };
    run(async {
        let mut server = everything(&peers, "sse", "sse", free_port());
        let mut link = Link::connect(&server, true);
        link.open().await;
        assert!(names(&link.ask(1, "tools/list", json!({})).await).contains(&"echo"));
        assert_eq!(link.call(2, "echo", json!({"message": "é"})).await, "Echo: é");
        server.stop();
        let (why, is_forgotten) = link.end().await;
        assert!(!is_forgotten && why.ends_with("ended its stream"), "{why}");
    });
}

#[test]
fn fastmcp_is_used_in_both_eras() {
    let Some(peers) = Peers::find("http::fastmcp_is_used_in_both_eras") else { return };
    run(async {
        let mut server = fastmcp(&peers, free_port());
        let pid = server.child.id().to_string();

        let mut session = Link::connect(&server, false);
        session.open().await;
        assert_eq!(names(&session.ask(1, "tools/list", json!({})).await), ["echo", "pid"]);
        assert_eq!(session.call(2, "pid", json!({})).await, pid);

        let mut stateless = Link::connect(&server, false);
        let meta = json!({
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientCapabilities": {},
            "io.modelcontextprotocol/clientInfo": {"name": "proof", "version": "1"},
        });
        let discovered = stateless.ask(1, "server/discover", json!({"_meta": meta})).await;
        assert!(discovered["result"]["supportedVersions"].to_string().contains("2026-07-28"), "{discovered}");
        let params = json!({"_meta": meta, "name": "echo", "arguments": {"text": "é"}});
        let echoed = stateless.ask(2, "tools/call", params).await;
        assert_eq!(echoed["result"]["content"][0]["text"], "é", "{echoed}");
        let unknown = stateless.ask(3, "no/such", json!({"_meta": meta})).await;
        assert_eq!(unknown["error"]["code"], -32601, "a refusal in words of HTTP comes as the answer it is: {unknown}");

        server.stop();
        stateless.0.send(
            json!({"jsonrpc": "2.0", "id": 4, "method": "tools/list", "params": {"_meta": meta}}).to_string().into(),
        );
        let (why, is_forgotten) = stateless.end().await;
        assert!(!is_forgotten && why.starts_with("cannot connect"), "{why}");
    });
}
