//! nats-server processes on loopback, alone or as a NATS cluster of three, and a small client for what tests look at.

use std::{
    env, fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::mcp::client::until;

/// The timeout of one answer.
const ANSWER_MAX: Duration = Duration::from_secs(60);

#[derive(Clone, Copy)]
pub(crate) enum Version {
    Newest,
    Oldest,
}

/// The directory in which `cargo xtask peers` put both versions.
pub(crate) struct NatsPrograms(PathBuf);

impl NatsPrograms {
    /// `None` if they were not fetched. The message about that bypasses the test harness.
    pub(crate) fn find(test: &str) -> Option<NatsPrograms> {
        if let Some(folder) = env::var_os("OUTLAST_PEERS").filter(|value| !value.is_empty()) {
            return Some(NatsPrograms(PathBuf::from(folder)));
        }
        let skipped =
            format!("SKIPPED {test}: no nats-server (OUTLAST_PEERS is not set; `cargo xtask test` sets it)\n");
        std::io::stderr().write_all(skipped.as_bytes()).expect("stderr is open");
        None
    }

    fn program(&self, version: Version) -> PathBuf {
        let folder = match version {
            Version::Newest => "nats",
            Version::Oldest => "nats-oldest",
        };
        self.0.join(folder).join("bin/nats-server")
    }

    /// One server with JetStream.
    pub(crate) fn one(&self) -> NatsServer {
        self.one_with(Version::Newest, "jetstream {}")
    }

    /// One server with these lines in its configuration. `jetstream {}` enables JetStream.
    pub(crate) fn one_with(&self, version: Version, lines: &str) -> NatsServer {
        NatsServer::start(self.program(version), "one", lines, None)
    }

    /// A NATS cluster of three, which has elected its leader.
    pub(crate) fn three(&self) -> NatsCluster {
        self.three_with("")
    }

    pub(crate) fn three_with(&self, lines: &str) -> NatsCluster {
        // Each node has to know the ports of all: they are free as long as these listeners are open, and taken at once.
        let routes = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").expect("a port"));
        let ports = routes.each_ref().map(|listener| listener.local_addr().expect("bound").port());
        drop(routes);
        let lines = format!("jetstream {{}}\n{lines}");
        let start = |n: usize| {
            NatsServer::start(
                self.program(Version::Newest),
                ["one", "two", "three"][n],
                &lines,
                Some((ports[n], ports)),
            )
        };
        let cluster = NatsCluster { nodes: (0..3).map(start).collect() };
        cluster.has_leader();
        cluster
    }
}

pub(crate) struct NatsCluster {
    pub nodes: Vec<NatsServer>,
}

impl NatsCluster {
    pub(crate) fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(NatsServer::url).collect()
    }

    /// Waits until the running servers have a leader of JetStream.
    pub(crate) fn has_leader(&self) -> String {
        let running = || self.nodes.iter().filter(|node| node.is_running());
        // For a while the others name a leader that is gone.
        until("a leader of JetStream", || {
            running().filter_map(NatsServer::leader).find(|leader| running().any(|node| node.name == leader))
        })
    }

    /// Restarts the other nodes with another password for each other: this one runs on, and has lost its peers.
    pub(crate) fn isolate(&mut self, alone: usize) {
        let others = self.nodes.iter_mut().enumerate().filter(|(index, _)| *index != alone).map(|(_, node)| node);
        let mut others: Vec<&mut NatsServer> = others.collect();
        others.iter_mut().for_each(|node| node.kill());
        for node in &mut others {
            node.route_password = "second";
            node.restart();
        }
        until("a leader of JetStream among the others", || {
            let leader = others.iter().find_map(|node| node.leader())?;
            others.iter().any(|node| node.name == leader).then_some(())
        });
    }

    /// The node with this name.
    pub(crate) fn node(&mut self, name: &str) -> &mut NatsServer {
        self.nodes.iter_mut().find(|node| node.name == name).expect("a node of this cluster")
    }
}

pub(crate) struct NatsServer {
    dir: TempDir,
    program: PathBuf,
    name: &'static str,
    lines: String,
    /// Of a node of a cluster: its own port for the other nodes, and those of all.
    routes: Option<(u16, [u16; 3])>,
    /// Of a node of a cluster: the other nodes must have the same.
    route_password: &'static str,
    pub port: u16,
    monitor: u16,
    child: Option<Child>,
}

impl NatsServer {
    fn start(program: PathBuf, name: &'static str, lines: &str, routes: Option<(u16, [u16; 3])>) -> NatsServer {
        let dir = TempDir::new().expect("a directory");
        let lines = lines.to_owned();
        let mut server =
            NatsServer { dir, program, name, lines, routes, route_password: "first", port: 0, monitor: 0, child: None };
        server.restart();
        server
    }

    pub(crate) fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    pub(crate) fn is_running(&self) -> bool {
        self.child.is_some()
    }

    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("it is a child of this process");
            child.wait().expect("it is a child of this process");
        }
    }

    /// Starts it, with the data and the ports of its last run.
    pub(crate) fn restart(&mut self) {
        self.kill();
        let port = |port: u16| if port == 0 { -1 } else { i32::from(port) };
        let dir = self.dir.path();
        // The limit is only a number: by default it depends on the free space of the disk.
        let jetstream = format!("jetstream {{ store_dir: {:?}, max_file_store: 8GB }}", dir.join("store"));
        let mut text = format!(
            "server_name: {}\nlisten: \"127.0.0.1:{}\"\nhttp: \"127.0.0.1:{}\"\nports_file_dir: {:?}\n{}\n",
            self.name,
            port(self.port),
            port(self.monitor),
            dir,
            self.lines.replace("jetstream {}", &jetstream),
        );
        if let Some((own, all)) = self.routes {
            let password = self.route_password;
            let routes = all.map(|port| format!("\"nats-route://node:{password}@127.0.0.1:{port}\"")).join(", ");
            text += &format!(
                "cluster {{ name: test, listen: \"127.0.0.1:{own}\", routes: [{routes}], authorization {{ user: node, \
                 password: {password} }} }}\n"
            );
        }
        let config = dir.join("nats.conf");
        fs::write(&config, text).expect("it is our directory");
        let log = fs::File::create(dir.join("log")).expect("it is our directory");
        let mut command = Command::new(&self.program);
        command.arg("-c").arg(config).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command.spawn();
        let mut child = child.unwrap_or_else(|error| {
            panic!("{}: {error}; `cargo xtask peers` fetches it", self.program.display());
        });
        let file = dir.join(format!("nats-server_{}.ports", child.id()));
        // The file is written when all listeners are open.
        let ports: Value = until("nats-server", || {
            let ended = child.try_wait().expect("it is a child of this process");
            assert!(ended.is_none(), "{}", fs::read_to_string(dir.join("log")).unwrap_or_default());
            serde_json::from_slice(&fs::read(&file).ok()?).ok()
        });
        let number = |key: &str| {
            let url = ports[key][0].as_str().unwrap_or_default();
            url.rsplit(':').next().and_then(|port| port.parse().ok()).unwrap_or(0)
        };
        (self.port, self.monitor) = (number("nats"), number("monitoring"));
        self.child = Some(child);
    }

    /// The leader of JetStream, as this server knows it.
    fn leader(&self) -> Option<String> {
        let page = self.page("/jsz")?;
        page["meta_cluster"]["leader"].as_str().filter(|name| !name.is_empty()).map(str::to_owned)
    }

    /// A page of its monitoring endpoint.
    pub(crate) fn page(&self, path: &str) -> Option<Value> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.monitor)).ok()?;
        stream.set_read_timeout(Some(ANSWER_MAX)).ok()?;
        write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        serde_json::from_str(text.split_once("\r\n\r\n")?.1).ok()
    }

    /// All files of JetStream, one after the other.
    pub(crate) fn stored(&self) -> Vec<u8> {
        fn read(folder: &Path, bytes: &mut Vec<u8>) {
            // Files come and go while it runs.
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                match entry.path().is_dir() {
                    true => read(&entry.path(), bytes),
                    false => bytes.extend(fs::read(entry.path()).unwrap_or_default()),
                }
            }
        }
        let mut bytes = Vec::new();
        read(&self.dir.path().join("store"), &mut bytes);
        bytes
    }

    pub(crate) fn client(&self) -> NatsClient {
        NatsClient::connect(self.port, &json!({}))
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A client with one request at a time.
pub(crate) struct NatsClient {
    stream: TcpStream,
    reader: BufReader<TcpStream>,
    requests: u64,
}

/// A message to a subscription.
pub(crate) struct NatsMessage {
    pub reply: Option<String>,
    pub payload: Vec<u8>,
}

impl NatsClient {
    /// `user` has `user` and `pass`, or is empty.
    pub(crate) fn connect(port: u16, user: &Value) -> NatsClient {
        let stream = TcpStream::connect(("127.0.0.1", port)).expect("nats-server listens");
        stream.set_read_timeout(Some(ANSWER_MAX)).expect("a socket");
        let reader = BufReader::new(stream.try_clone().expect("a socket"));
        let mut client = NatsClient { stream, reader, requests: 0 };
        let info = client.line();
        assert!(info.starts_with("INFO "), "{info}");
        let mut options = json!({ "verbose": false, "pedantic": false, "headers": true, "no_responders": true });
        for (key, value) in user.as_object().into_iter().flatten() {
            options[key] = value.clone();
        }
        client.say(&format!("CONNECT {options}\r\nPING\r\n"), b"");
        assert_eq!(client.line(), "PONG");
        client.subscribe("_INBOX.test.*", 1);
        client
    }

    pub(crate) fn subscribe(&mut self, subject: &str, number: u64) {
        self.say(&format!("SUB {subject} {number}\r\nPING\r\n"), b"");
        assert_eq!(self.line(), "PONG");
    }

    pub(crate) fn publish(&mut self, subject: &str, payload: &[u8]) {
        self.say(&format!("PUB {subject} {}\r\n", payload.len()), &[payload, b"\r\n"].concat());
    }

    pub(crate) fn request(&mut self, subject: &str, payload: &[u8]) -> Vec<u8> {
        self.requests += 1;
        let reply = format!("_INBOX.test.{}", self.requests);
        self.say(&format!("PUB {subject} {reply} {}\r\n", payload.len()), &[payload, b"\r\n"].concat());
        self.next().payload
    }

    /// A request to the API of JetStream.
    pub(crate) fn jetstream(&mut self, subject: &str, request: &Value) -> Value {
        let answer = self.request(&format!("$JS.API.{subject}"), request.to_string().as_bytes());
        serde_json::from_slice(&answer).expect("JSON")
    }

    /// The next message of any subscription.
    pub(crate) fn next(&mut self) -> NatsMessage {
        loop {
            let line = self.line();
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            let (headers, total) = match words.as_slice() {
                ["PING"] => {
                    self.say("PONG\r\n", b"");
                    continue;
                }
                ["MSG", _, _, .., total] => (0, *total),
                ["HMSG", _, _, .., headers, total] => (headers.parse().expect("a length"), *total),
                ["INFO", ..] | ["PONG"] => continue,
                other => panic!("nats-server said {other:?}"),
            };
            let has_reply = words.len() == if headers == 0 { 5 } else { 6 };
            let mut payload = vec![0; total.parse::<usize>().expect("a length") + 2];
            self.reader.read_exact(&mut payload).expect("a whole message");
            payload.truncate(payload.len() - 2);
            return NatsMessage { reply: has_reply.then(|| words[3].to_owned()), payload: payload.split_off(headers) };
        }
    }

    fn say(&mut self, line: &str, rest: &[u8]) {
        self.stream.write_all(&[line.as_bytes(), rest].concat()).expect("nats-server reads");
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.reader.read_line(&mut line).expect("nats-server answers");
        line.trim_end().to_owned()
    }
}
