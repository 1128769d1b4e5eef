//! Three nats-server processes that form one NATS cluster.

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use super::super::ledger::HUNG_AFTER;

const LOOK: Duration = Duration::from_millis(20);
/// A stopped server accepts connections and does not answer.
const PAGE_MAX: Duration = Duration::from_secs(2);

pub(super) struct Server {
    program: PathBuf,
    name: &'static str,
    dir: PathBuf,
    /// Set in all processes of the run.
    marker: (String, String),
    /// Ports of the servers that it connects to.
    routes: Vec<u16>,
    pub port: u16,
    route: u16,
    monitor: u16,
    child: Option<Child>,
}

/// Starts three servers, and waits until they have elected a leader.
pub(super) fn start(program: &Path, scratch: &Path, marker: (&str, &str)) -> Result<Vec<Server>, String> {
    // Each needs the ports of the others before it starts. They are bound all at once, so that they differ.
    let listeners: Result<Vec<TcpListener>, _> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0")).collect();
    let ports: Result<Vec<u16>, String> = listeners
        .and_then(|listeners| {
            listeners.iter().map(|listener| Ok(listener.local_addr()?.port())).collect::<Result<_, _>>()
        })
        .map_err(|error: std::io::Error| error.to_string());
    let ports = ports?;
    let mut servers: Vec<Server> = Vec::new();
    for (name, route) in ["n1", "n2", "n3"].into_iter().zip(ports.iter().copied()) {
        let mut server = Server {
            program: program.to_owned(),
            name,
            dir: scratch.join(name),
            marker: (marker.0.to_owned(), marker.1.to_owned()),
            routes: ports.iter().copied().filter(|port| *port != route).collect(),
            port: 0,
            route,
            monitor: 0,
            child: None,
        };
        fs::create_dir_all(&server.dir).map_err(|error| error.to_string())?;
        server.start()?;
        servers.push(server);
    }
    let deadline = Instant::now() + HUNG_AFTER;
    while leader(&servers).is_none() {
        if deadline < Instant::now() {
            return Err("the NATS servers have no leader".into());
        }
        thread::sleep(LOOK);
    }
    Ok(servers)
}

/// The server that leads the bucket of the leases, or all of JetStream while there is no such bucket.
pub(super) fn leader(servers: &[Server]) -> Option<usize> {
    let name = servers.iter().filter(|server| server.child.is_some()).find_map(|server| {
        let page = server.page("/jsz?accounts=true&streams=true")?;
        let accounts = page["account_details"].as_array().into_iter().flatten();
        let mut streams = accounts.flat_map(|account| account["stream_detail"].as_array().into_iter().flatten());
        let leases = streams.find(|stream| stream["name"].as_str().is_some_and(|name| name.ends_with("_leases")));
        let of_leases = leases.and_then(|stream| stream["cluster"]["leader"].as_str());
        let name = of_leases.or_else(|| page["meta_cluster"]["leader"].as_str());
        name.filter(|name| !name.is_empty()).map(str::to_owned)
    })?;
    servers.iter().position(|server| server.name == name)
}

impl Server {
    /// Starts it with the data and the ports of its last run.
    pub(super) fn start(&mut self) -> Result<(), String> {
        let port = |port: u16| if port == 0 { -1 } else { i32::from(port) };
        let routes: Vec<String> = self.routes.iter().map(|port| format!("\"nats-route://127.0.0.1:{port}\"")).collect();
        let routes = routes.join(", ");
        // Without `no_advertise` replicas would learn addresses that bypass their proxies.
        let text = format!(
            "server_name: {}\nlisten: \"127.0.0.1:{}\"\nhttp: \"127.0.0.1:{}\"\nports_file_dir: {:?}\n\
             jetstream {{ store_dir: {:?} }}\n\
             cluster {{ name: chaos, listen: \"127.0.0.1:{}\", no_advertise: true, routes: [{routes}] }}\n",
            self.name,
            port(self.port),
            port(self.monitor),
            self.dir,
            self.dir.join("store"),
            self.route,
        );
        let config = self.dir.join("nats.conf");
        fs::write(&config, text).map_err(|error| error.to_string())?;
        let log = fs::OpenOptions::new().create(true).append(true).open(self.dir.join("log"));
        let mut command = Command::new(&self.program);
        command.arg("-c").arg(config).env(&self.marker.0, &self.marker.1);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.map_err(|error| error.to_string())?);
        let child = command.spawn().map_err(|error| format!("{}: {error}", self.program.display()))?;
        let child = self.child.insert(child);
        let file = self.dir.join(format!("nats-server_{}.ports", child.id()));
        let deadline = Instant::now() + HUNG_AFTER;
        // The file is written when all listeners are open.
        let ports: Value = loop {
            if let Some(ports) = fs::read(&file).ok().and_then(|text| serde_json::from_slice(&text).ok()) {
                break ports;
            }
            if deadline < Instant::now() || child.try_wait().is_ok_and(|status| status.is_some()) {
                return Err(format!("nats-server {} does not start: {}", self.name, self.dir.join("log").display()));
            }
            thread::sleep(LOOK);
        };
        let number = |key: &str| {
            let url = ports[key][0].as_str().unwrap_or_default();
            url.rsplit(':').next().and_then(|port| port.parse().ok()).unwrap_or(0)
        };
        (self.port, self.monitor) = (number("nats"), number("monitoring"));
        Ok(())
    }

    pub(super) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It is a child of this process, and is not reaped before.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub(super) fn signal(&self, signal: Signal) -> bool {
        self.child.as_ref().is_some_and(|child| kill(Pid::from_raw(child.id() as i32), signal).is_ok())
    }

    /// A page of its monitoring endpoint.
    fn page(&self, path: &str) -> Option<Value> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.monitor)).ok()?;
        stream.set_read_timeout(Some(PAGE_MAX)).ok()?;
        write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        serde_json::from_str(text.split_once("\r\n\r\n")?.1).ok()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}
