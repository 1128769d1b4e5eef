//! Three nats-server processes that form one NATS cluster.

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use super::{
    super::{ledger::HUNG_AFTER, machine::Disk},
    network::Network,
};

const LOOK: Duration = Duration::from_millis(20);
/// What the streams of a run need is much less.
const DISK_MEGABYTES: u32 = 96;
/// A stopped server accepts connections and does not answer.
const PAGE_MAX: Duration = Duration::from_secs(2);

pub(super) struct Server {
    program: PathBuf,
    name: &'static str,
    dir: PathBuf,
    /// Set in all processes of the run.
    marker: (String, String),
    network: Arc<Network>,
    node: usize,
    /// Its store is on it.
    pub disk: Disk,
    /// Nodes and ports of the servers that it connects to.
    routes: Vec<(usize, u16)>,
    pub port: u16,
    route: u16,
    monitor: u16,
    child: Option<Child>,
}

/// Starts three servers, and waits until they have elected a leader.
pub(super) fn start(
    program: &Path,
    scratch: &Path,
    marker: (&str, &str),
    network: &Arc<Network>,
) -> Result<Vec<Server>, String> {
    // Each needs the ports of the others before it starts. They are bound all at once, so that they differ.
    let listeners: Result<Vec<TcpListener>, _> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0")).collect();
    let ports: Result<Vec<u16>, String> = listeners
        .and_then(|listeners| {
            listeners.iter().map(|listener| Ok(listener.local_addr()?.port())).collect::<Result<_, _>>()
        })
        .map_err(|error: std::io::Error| error.to_string());
    let ports = ports?;
    let mut servers: Vec<Server> = Vec::new();
    for (node, (name, route)) in ["n1", "n2", "n3"].into_iter().zip(ports.iter().copied()).enumerate() {
        let dir = scratch.join(name);
        let mut server = Server {
            program: program.to_owned(),
            name,
            disk: Disk::new(&dir.join("store"), DISK_MEGABYTES),
            dir,
            marker: (marker.0.to_owned(), marker.1.to_owned()),
            network: Arc::clone(network),
            node,
            routes: ports.iter().copied().enumerate().filter(|(_, port)| *port != route).collect(),
            port: 0,
            route,
            monitor: 0,
            child: None,
        };
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
        let route = |(node, port): &(usize, u16)| format!("\"nats-route://{}:{port}\"", self.network.inner(*node));
        let routes = self.routes.iter().map(route).collect::<Vec<_>>().join(", ");
        let (inner, outer) = (self.network.inner(self.node), self.network.outer(self.node));
        // Without `no_advertise` replicas would learn addresses that bypass their proxies.
        let text = format!(
            "server_name: {}\nlisten: \"{inner}:{}\"\nhttp: \"{outer}:{}\"\nports_file_dir: {:?}\n\
             jetstream {{ store_dir: {:?}, max_file_store: 8GB }}\n\
             cluster {{ name: chaos, listen: \"{inner}:{}\", no_advertise: true, routes: [{routes}] }}\n",
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
        let mut command = self.network.command(self.node, &self.program);
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

    /// Ends it for good, and unmounts its disk.
    pub(super) fn end(mut self) {
        self.kill();
        self.disk.end(None);
    }

    pub(super) fn signal(&self, signal: Signal) -> bool {
        self.child.as_ref().is_some_and(|child| kill(Pid::from_raw(child.id() as i32), signal).is_ok())
    }

    /// False if it runs without JetStream: a server whose disk was full turns it off until it is started again.
    pub(super) fn has_jetstream(&self) -> bool {
        self.page("/varz").is_none_or(|page| page["jetstream"]["config"].is_object())
    }

    /// Where replicas reach it.
    pub(super) fn url(&self) -> String {
        format!("nats://{}:{}", self.network.inner(self.node), self.port)
    }

    /// A page of its monitoring endpoint.
    fn page(&self, path: &str) -> Option<Value> {
        let mut stream = TcpStream::connect((self.network.outer(self.node).as_str(), self.monitor)).ok()?;
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
