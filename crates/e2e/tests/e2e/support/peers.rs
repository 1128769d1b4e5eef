//! The real peers: clients and servers on real SDKs, at the versions that `crates/e2e/peers` pins.
//!
//! A client is a script (or, for Rust, a thread) that starts the program with its SDK's own transport and carries out
//! the operations of the test, one operation and one answer per line. So the whole story is in the test.

use rmcp::ClientHandler;
use rmcp::model::{CallToolRequestParams, ProgressNotificationParam, ProtocolVersion};
use rmcp::service::{ClientServiceExt, NotificationContext, RoleClient};
use rmcp::transport::{
    StreamableHttpClientTransport, TokioChildProcess, streamable_http_client::StreamableHttpClientTransportConfig,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;
use tokio::sync::mpsc::UnboundedSender;

/// The timeout of any answer: well above a slow start of a server on a busy machine, well below an SDK's own timeout,
/// so that a hung call is distinguished from a late one.
const ANSWER_MAX: Duration = Duration::from_secs(180);

/// How many lines of stderr a failure quotes.
const STDERR_LINES_MAX: usize = 40;

/// The directory in which `cargo xtask peers` put them.
#[derive(Clone)]
pub(crate) struct Peers(PathBuf);

impl Peers {
    /// None if they were not fetched. The message about that bypasses the test harness, which would capture a
    /// `println!`.
    pub(crate) fn find(test: &str) -> Option<Peers> {
        if let Some(folder) = std::env::var_os("OUTLAST_PEERS").filter(|value| !value.is_empty()) {
            let folder = PathBuf::from(folder);
            assert!(folder.join("node").is_dir(), "no peers in {}: `cargo xtask peers` fetches them", folder.display());
            return Some(Peers(folder));
        }
        let skipped = format!("SKIPPED {test}: no real peers (OUTLAST_PEERS is not set; `cargo xtask test` sets it)\n");
        std::io::stderr().write_all(skipped.as_bytes()).expect("stderr is open");
        None
    }

    pub(crate) fn python(&self, environment: &str) -> PathBuf {
        self.0.join(environment).join("bin/python")
    }

    pub(crate) fn node(&self) -> PathBuf {
        self.0.join("node/node_modules/node/bin/node")
    }

    /// The folders of `claude`, of `codex`, and of the Node that runs it.
    #[cfg(target_os = "linux")]
    pub(crate) fn agents_path(&self) -> String {
        let agents = self.0.join("agents/node_modules/.bin");
        assert!(agents.join("claude").exists(), "no agents in {}: `cargo xtask peers` fetches them", self.0.display());
        let node = self.node().parent().expect("it is in a folder").to_owned();
        format!("{}:{}:/usr/local/bin:/usr/bin:/bin", text(&agents), text(&node))
    }

    pub(crate) fn package(&self, file: &str) -> PathBuf {
        self.0.join("node/node_modules/@modelcontextprotocol").join(file)
    }

    pub(crate) fn script(file: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("peers").join(file)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Era {
    Handshake,
    Stateless,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Client {
    PythonMcp2,
    /// Held to the handshake, as `PythonFastmcpHandshake` is.
    PythonMcp2Handshake,
    PythonMcp1,
    PythonFastmcp,
    PythonFastmcpHandshake,
    TsSdk1,
    TsClient2,
    TsClient2Auto,
    Rmcp,
    RmcpAuto,
}

impl Client {
    /// The newest era it asks for.
    fn era(self) -> Era {
        match self {
            Client::PythonMcp2 | Client::PythonFastmcp | Client::TsClient2Auto | Client::RmcpAuto => Era::Stateless,
            Client::PythonMcp2Handshake
            | Client::PythonMcp1
            | Client::PythonFastmcpHandshake
            | Client::TsSdk1
            | Client::TsClient2
            | Client::Rmcp => Era::Handshake,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Server {
    PythonMcp2,
    PythonMcp1,
    PythonFastmcp,
    TsSdk1,
    TsServer2Serve,
    TsServer2Connect,
    Everything,
    Memory,
    Filesystem,
}

impl Server {
    pub(crate) const ALL: [Server; 9] = [
        Server::PythonMcp2,
        Server::PythonMcp1,
        Server::PythonFastmcp,
        Server::TsSdk1,
        Server::TsServer2Serve,
        Server::TsServer2Connect,
        Server::Everything,
        Server::Memory,
        Server::Filesystem,
    ];

    /// The newest era it answers to.
    fn era(self) -> Era {
        match self {
            Server::PythonMcp2 | Server::PythonFastmcp | Server::TsServer2Serve => Era::Stateless,
            _ => Era::Handshake,
        }
    }

    /// The version that client and server agree on without outlast.
    pub(crate) fn era_with(self, client: Client) -> Era {
        match (client.era(), self.era()) {
            (Era::Stateless, Era::Stateless) => Era::Stateless,
            _ => Era::Handshake,
        }
    }

    /// The script of our own servers; the others have none that a test could change.
    fn source(self) -> Option<&'static str> {
        match self {
            Server::PythonMcp2 => Some("python_mcp2.py"),
            Server::PythonMcp1 => Some("python_mcp1.py"),
            Server::PythonFastmcp => Some("python_fastmcp.py"),
            Server::TsSdk1 => Some("ts_sdk1.mjs"),
            Server::TsServer2Serve => Some("ts_server2_serve.mjs"),
            Server::TsServer2Connect => Some("ts_server2_connect.mjs"),
            Server::Everything | Server::Memory | Server::Filesystem => None,
        }
    }
}

/// A server as a user has it: a project directory, and a command line.
pub(crate) struct Project {
    folder: TempDir,
    peers: Peers,
    pub server: Server,
    pub command: Vec<String>,
    environment: BTreeMap<String, String>,
}

impl Project {
    pub(crate) fn new(peers: &Peers, server: Server) -> Project {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().canonicalize().expect("the folder is there");
        // Node looks for packages beside the script, whatever the working directory is.
        std::os::unix::fs::symlink(peers.0.join("node/node_modules"), path.join("node_modules")).expect("a link");

        // Clients pass HOME on, and the program keeps a registry there: each project has its own.
        let mut environment = BTreeMap::from([("HOME".to_owned(), text(&path))]);
        let command = match server {
            Server::PythonMcp1 => vec![text(&peers.python("python-1")), text(&path.join("server.py"))],
            Server::PythonMcp2 | Server::PythonFastmcp => {
                vec![text(&peers.python("python-2")), text(&path.join("server.py"))]
            }
            Server::TsSdk1 | Server::TsServer2Serve | Server::TsServer2Connect => {
                vec![text(&peers.node()), text(&path.join("server.mjs"))]
            }
            Server::Everything => {
                vec![text(&peers.node()), text(&peers.package("server-everything/dist/index.js")), "stdio".into()]
            }
            Server::Memory => {
                let memory = path.join("memory.jsonl");
                let entity = json!({
                    "type": "entity",
                    "name": "outlast",
                    "entityType": "program",
                    "observations": ["a connection outlasts a process"],
                });
                fs::write(&memory, entity.to_string()).expect("a file");
                environment.insert("MEMORY_FILE_PATH".into(), text(&memory));
                vec![text(&peers.node()), text(&peers.package("server-memory/dist/index.js"))]
            }
            Server::Filesystem => {
                fs::write(path.join("hello.txt"), "hello from a file\n").expect("a file");
                vec![text(&peers.node()), text(&peers.package("server-filesystem/dist/index.js")), text(&path)]
            }
        };
        let project = Project { folder, peers: peers.clone(), server, command, environment };
        project.write_version("1");
        project
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().canonicalize().expect("the folder is there")
    }

    /// The same server with another answer to `version`, as after an edit.
    pub(crate) fn write_version(&self, version: &str) {
        if let Some(source) = self.server.source() {
            let original = fs::read_to_string(Peers::script("servers").join(source)).expect("the server's source");
            let edited = original
                .replace("VERSION = \"1\"", &format!("VERSION = \"{version}\""))
                .replace("VERSION = '1'", &format!("VERSION = '{version}'"));
            self.write(&edited);
        }
    }

    /// A source that neither Python nor Node can read.
    pub(crate) fn write_broken(&self) {
        self.write("this is not a program (\n");
    }

    fn write(&self, source: &str) {
        let main = Path::new(self.command.last().expect("a command has words"));
        fs::write(main, source).expect("the project is ours");
    }

    /// The end of stderr of all processes: the client, the program, the server.
    pub(crate) fn stderr_tail(&self) -> String {
        let written = fs::read(self.path().join("stderr.log")).unwrap_or_default();
        let lines: Vec<String> =
            String::from_utf8_lossy(&written).lines().map(|line| format!("    | {line}")).collect();
        lines[lines.len().saturating_sub(STDERR_LINES_MAX)..].join("\n")
    }

    fn stderr_file(&self) -> File {
        File::options().create(true).append(true).open(self.path().join("stderr.log")).expect("the project is ours")
    }

    /// The Inspector's command line mode: it starts `command`, sends `arguments`, prints and exits.
    pub(crate) fn inspect(&self, arguments: &[&str], command: &[String]) -> Result<Value, String> {
        let mut inspector = Command::new(self.peers.node())
            .arg(self.peers.package("inspector/clients/launcher/build/index.js"))
            .arg("--cli")
            .args(arguments)
            .args(self.environment.iter().flat_map(|(name, value)| ["-e".to_owned(), format!("{name}={value}")]))
            .arg("--")
            .args(command)
            .env("HOME", self.path())
            .env("MCP_CATALOG_PATH", self.path().join("catalog.json"))
            .current_dir(self.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(self.stderr_file())
            .spawn()
            .map_err(|error| format!("the Inspector does not start: {error}"))?;
        let mut stdout = inspector.stdout.take().expect("stdout is piped");
        let (heard, said) = channel();
        thread::spawn(move || {
            let mut words = String::new();
            // Output that is not text is not an answer, and is reported as invalid JSON.
            let _ = stdout.read_to_string(&mut words);
            let _ = heard.send(words);
        });
        let said = said.recv_timeout(ANSWER_MAX);
        let _ = inspector.kill();
        let _ = inspector.wait();
        let said = said.map_err(|_| "the Inspector does not end".to_owned())?;
        serde_json::from_str(&said).map_err(|error| format!("the Inspector says no JSON ({error}): {said}"))
    }
}

/// One connected client. Its server is `command`: the program in front of the server, or the server itself.
pub(crate) struct Peer {
    operations: Operations,
    answers: Receiver<Value>,
    /// The protocol revision it agreed on.
    pub version: String,
}

enum Operations {
    Script { child: Child, stdin: Option<ChildStdin> },
    Thread(UnboundedSender<Value>),
}

/// The result of a tool call, in the terms that all SDKs share.
#[derive(Debug)]
pub(crate) struct Said {
    pub is_error: bool,
    pub text: String,
    structured: Value,
}

impl Said {
    /// A field of the structured result, which outlast's tools also give as text.
    pub(crate) fn field(&self, name: &str) -> Value {
        if let Some(value) = self.structured.get(name) {
            return value.clone();
        }
        serde_json::from_str::<Value>(&self.text).map(|value| value[name].clone()).unwrap_or_default()
    }
}

impl Peer {
    pub(crate) fn start(client: Client, project: &Project, command: &[String]) -> Result<Peer, String> {
        let setup = Setup {
            command: command[0].clone(),
            args: command[1..].to_vec(),
            env: project.environment.clone(),
            cwd: project.path(),
        };
        let (answered, answers) = channel();
        let operations = match client {
            Client::Rmcp | Client::RmcpAuto => {
                rmcp_thread(client, Way::Program(setup, project.stderr_file()), answered)
            }
            _ => {
                let setup = json!({"command": setup.command, "args": setup.args, "env": setup.env, "cwd": setup.cwd});
                script(client, &setup, project, answered)?
            }
        };
        Peer::opened(operations, answers)
    }

    /// Over HTTP, to a running server.
    #[cfg(target_os = "linux")]
    pub(crate) fn connect(client: Client, project: &Project, url: &str) -> Result<Peer, String> {
        Peer::connect_as(client, project, url, None)
    }

    /// With a bearer token.
    pub(crate) fn connect_as(
        client: Client,
        project: &Project,
        url: &str,
        token: Option<&str>,
    ) -> Result<Peer, String> {
        let (answered, answers) = channel();
        let operations = match client {
            Client::Rmcp | Client::RmcpAuto => {
                rmcp_thread(client, Way::Url(url.to_owned(), token.map(str::to_owned)), answered)
            }
            _ => {
                let headers = token.map(|token| json!({"Authorization": format!("Bearer {token}")}));
                script(client, &json!({"url": url, "headers": headers}), project, answered)?
            }
        };
        Peer::opened(operations, answers)
    }

    fn opened(operations: Operations, answers: Receiver<Value>) -> Result<Peer, String> {
        let mut peer = Peer { operations, answers, version: String::new() };
        let opened = peer.answer().map_err(|error| format!("cannot connect: {error}"))?;
        peer.version = opened["version"].as_str().unwrap_or_default().to_owned();
        Ok(peer)
    }

    /// The dates of revisions sort as strings; the first stateless one is 2026-07-28.
    pub(crate) fn era(&self) -> Era {
        if self.version.as_str() >= "2026-07-28" { Era::Stateless } else { Era::Handshake }
    }

    pub(crate) fn call(&mut self, tool: &str, arguments: Value) -> Result<Said, String> {
        self.begin_call(tool, arguments).and_then(|()| self.end_call()).map_err(|error| format!("{tool}: {error}"))
    }

    /// Starts a call and does not wait for its answer.
    pub(crate) fn begin_call(&mut self, tool: &str, arguments: Value) -> Result<(), String> {
        self.tell(&json!({"op": "call", "tool": tool, "args": arguments}))
    }

    /// The answer to the call that [`Peer::begin_call`] started.
    pub(crate) fn end_call(&mut self) -> Result<Said, String> {
        self.answer().map(|answer| said(&answer))
    }

    /// The result of a call, and the messages of the progress that was reported for it.
    pub(crate) fn progress(&mut self, tool: &str, arguments: Value) -> Result<(Said, Vec<String>), String> {
        self.tell(&json!({"op": "progress", "tool": tool, "args": arguments}))?;
        let mut answer = self.answer()?;
        let heard = serde_json::from_value(answer["progress"].take()).map_err(|error| error.to_string())?;
        Ok((said(&answer), heard))
    }

    pub(crate) fn tools(&mut self) -> Result<Vec<String>, String> {
        let answer = self.ask(json!({"op": "list"})).map_err(|error| format!("tools/list: {error}"))?;
        serde_json::from_value(answer["tools"].clone()).map_err(|error| format!("tools/list: {error}"))
    }

    pub(crate) fn close(mut self) -> Result<(), String> {
        self.ask(json!({"op": "close"})).map(drop).map_err(|error| format!("close: {error}"))
    }

    fn ask(&mut self, operation: Value) -> Result<Value, String> {
        self.tell(&operation)?;
        self.answer()
    }

    fn tell(&mut self, operation: &Value) -> Result<(), String> {
        match &mut self.operations {
            Operations::Script { stdin, .. } => {
                let stdin = stdin.as_mut().expect("stdin is open until the end");
                writeln!(stdin, "{operation}").map_err(|error| format!("the client is gone: {error}"))
            }
            Operations::Thread(operations) => {
                operations.send(operation.clone()).map_err(|_| "the client is gone".to_owned())
            }
        }
    }

    fn answer(&mut self) -> Result<Value, String> {
        let mut answer =
            self.answers.recv_timeout(ANSWER_MAX).map_err(|error| format!("no answer from the client: {error}"))?;
        match answer["error"].take() {
            Value::Null => Ok(answer["ok"].take()),
            error => Err(error.as_str().unwrap_or_default().to_owned()),
        }
    }
}

fn said(answer: &Value) -> Said {
    Said {
        is_error: answer["isError"] == true,
        text: answer["text"].as_str().unwrap_or_default().to_owned(),
        structured: answer["structured"].clone(),
    }
}

/// A client of a failed story must not outlive it.
impl Drop for Peer {
    fn drop(&mut self) {
        if let Operations::Script { child, stdin } = &mut self.operations {
            drop(stdin.take());
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

struct Setup {
    command: String,
    args: Vec<String>,
    env: BTreeMap<String, String>,
    cwd: PathBuf,
}

fn script(client: Client, setup: &Value, project: &Project, answered: Sender<Value>) -> Result<Operations, String> {
    let peers = &project.peers;
    let (program, file, mode) = match client {
        Client::PythonMcp2 => (peers.python("python-2"), "python_mcp2.py", None),
        Client::PythonMcp1 => (peers.python("python-1"), "python_mcp1.py", None),
        Client::PythonMcp2Handshake => (peers.python("python-2"), "python_mcp2.py", Some("legacy")),
        Client::PythonFastmcp => (peers.python("python-2"), "python_fastmcp.py", None),
        Client::PythonFastmcpHandshake => (peers.python("python-2"), "python_fastmcp.py", Some("legacy")),
        Client::TsSdk1 => (peers.node(), "ts_sdk1.mjs", None),
        Client::TsClient2 => (peers.node(), "ts_client2.mjs", Some("legacy")),
        Client::TsClient2Auto => (peers.node(), "ts_client2.mjs", Some("auto")),
        Client::Rmcp | Client::RmcpAuto => unreachable!("rmcp runs in a thread"),
    };
    let place = project.path().join("client");
    fs::create_dir_all(&place).map_err(|error| error.to_string())?;
    for name in [file, "line.py", "line.mjs"] {
        fs::copy(Peers::script("clients").join(name), place.join(name)).map_err(|error| error.to_string())?;
    }
    let mut child = Command::new(program)
        .arg(place.join(file))
        .arg(setup.to_string())
        .args(mode)
        .env("HOME", project.path())
        .current_dir(project.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(project.stderr_file())
        .spawn()
        .map_err(|error| format!("the client does not start: {error}"))?;

    let lines = BufReader::new(child.stdout.take().expect("stdout is piped")).lines();
    thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            let answer = serde_json::from_str(&line).unwrap_or_else(|_| json!({"error": format!("babble: {line}")}));
            if answered.send(answer).is_err() {
                return;
            }
        }
    });
    let stdin = child.stdin.take();
    Ok(Operations::Script { child, stdin })
}

/// How rmcp reaches its server: it starts it, or connects to it.
enum Way {
    Program(Setup, File),
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "the gateway over HTTP is met on Linux"))]
    Url(String, Option<String>),
}

/// The messages of progress notifications, as rmcp reports them.
#[derive(Clone, Default)]
struct Progress(Arc<Mutex<Vec<String>>>);

impl Progress {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().expect("no thread panics while it holds this"))
    }
}

impl ClientHandler for Progress {
    async fn on_progress(&self, params: ProgressNotificationParam, _context: NotificationContext<RoleClient>) {
        self.0.lock().expect("no thread panics while it holds this").extend(params.message);
    }
}

/// The same operations on rmcp, in this process: a dev-dependency cannot be a separate program.
fn rmcp_thread(client: Client, way: Way, answered: Sender<Value>) -> Operations {
    let (operations, mut asked) = tokio::sync::mpsc::unbounded_channel::<Value>();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let outcome: Result<Value, String> = runtime.block_on(async {
            let lifecycle = match client {
                Client::RmcpAuto => rmcp::service::ClientLifecycleMode::Auto {
                    preferred_versions: vec![ProtocolVersion::V_2026_07_28],
                    legacy_version: None,
                },
                _ => rmcp::service::ClientLifecycleMode::Initialize,
            };
            let progress = Progress::default();
            let handler = progress.clone();
            let client = match way {
                Way::Program(setup, stderr) => {
                    let mut command = tokio::process::Command::new(&setup.command);
                    command.args(&setup.args).envs(&setup.env).current_dir(&setup.cwd);
                    let (transport, _) = TokioChildProcess::builder(command)
                        .stderr(stderr)
                        .spawn()
                        .map_err(|error| error.to_string())?;
                    handler.serve_with_lifecycle(transport, lifecycle).await
                }
                Way::Url(url, token) => {
                    let mut config = StreamableHttpClientTransportConfig::with_uri(url);
                    config.auth_header = token;
                    handler.serve_with_lifecycle(StreamableHttpClientTransport::from_config(config), lifecycle).await
                }
            };
            let client = client.map_err(|error| error.to_string())?;
            let version = client.peer_info().map(|info| info.protocol_version.to_string());
            let _ = answered.send(json!({"ok": {"version": version}}));

            while let Some(operation) = asked.recv().await {
                let answer = match operation["op"].as_str() {
                    Some("call" | "progress") => {
                        progress.take();
                        let tool = operation["tool"].as_str().unwrap_or_default().to_owned();
                        let arguments = operation["args"].as_object().cloned().unwrap_or_default();
                        let asked = CallToolRequestParams::new(tool).with_arguments(arguments);
                        client.call_tool(asked).await.map(|result| {
                            let text: String = result
                                .content
                                .iter()
                                .filter_map(|block| block.as_text())
                                .map(|text| &*text.text)
                                .collect();
                            let progress = progress.take();
                            json!({"isError": result.is_error, "text": text, "structured": result.structured_content, "progress": progress})
                        })
                    }
                    Some("list") => client
                        .list_all_tools()
                        .await
                        .map(|tools| json!({"tools": tools.iter().map(|tool| tool.name.as_ref()).collect::<Vec<_>>()})),
                    _ => break,
                };
                let answer = match answer {
                    Ok(answer) => json!({"ok": answer}),
                    Err(error) => json!({"error": error.to_string()}),
                };
                if answered.send(answer).is_err() {
                    break;
                }
            }
            client.cancel().await.map_err(|error| error.to_string())?;
            Ok(json!({"closed": true}))
        });
        // The receiver is dropped if the test failed before.
        let _ = answered.send(match outcome {
            Ok(closed) => json!({"ok": closed}),
            Err(error) => json!({"error": error}),
        });
    });
    Operations::Thread(operations)
}

pub(crate) fn text(path: &Path) -> String {
    path.to_str().expect("paths of tests are plain").to_owned()
}
