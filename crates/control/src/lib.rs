//! The control plane of a running instance: a socket that carries frames of JSON, and a registry of the sockets. What
//! a request does is decided by the driver of the instance.

#[cfg(unix)]
use std::io;
use std::{
    path::{Path, PathBuf},
    task::{Context, Poll},
    time::{SystemTime, UNIX_EPOCH},
};

use outlast_os as os;
#[cfg(unix)]
use outlast_os::handover::{Handover, Received};
#[cfg(unix)]
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub mod answer;
pub mod client;
pub mod cluster;
pub mod find;
pub mod method;
pub mod registry;
pub mod server;
pub mod wire;

use self::{
    registry::{Entry, Program, Registration, Registry},
    server::{Asked, Server, Taken},
    wire::Refusal,
};

/// What is known of an instance before it starts.
#[derive(Debug)]
pub struct Instance {
    pub id: String,
    pub kind: &'static str,
    pub name: String,
    pub cwd: PathBuf,
    /// As a user would type it.
    pub command: String,
    pub log: Option<PathBuf>,
    pub audit: Option<PathBuf>,
    pub program: Option<Program>,
}

/// The control plane of one instance. If no socket can be opened, it receives no requests, and the instance runs on.
#[derive(Debug)]
pub struct Control {
    entry: Entry,
    open: Option<Open>,
}

#[derive(Debug)]
struct Open {
    // Dropped in this order, so that the registry has no entry whose socket is already gone.
    _registration: Registration,
    server: Server,
}

impl Control {
    /// Opens the socket and then registers it. If that fails, the second value is a sentence that says why. Must be
    /// called within the runtime.
    pub fn begin(instance: Instance, home: Option<&Path>) -> (Control, Option<String>) {
        let mut control = Control { entry: entry(instance), open: None };
        // The meaning of a relative home would depend on the current directory.
        let complaint = match home.filter(|home| home.is_absolute()) {
            None => Some("there is no home directory".to_owned()),
            Some(home) => control.open(&Registry::of(home)).err(),
        };
        let complaint = complaint
            .map(|why| format!("this instance has no control socket, so `outlast ps` does not show it ({why})"));
        (control, complaint)
    }

    fn open(&mut self, registry: &Registry) -> Result<(), String> {
        // No client can find a socket without an entry, so the registry must be writable first.
        os::claim_dir(registry.dir()).map_err(|error| format!("{}: {error}", registry.dir().display()))?;
        let mut why = "every path for the socket is too long".to_owned();
        for path in os::sockets(registry.dir(), &self.entry.id) {
            match Server::bind(&path) {
                Ok(server) => {
                    self.entry.socket = path;
                    let registration = registry.register(&self.entry).map_err(|error| error.to_string())?;
                    self.open = Some(Open { _registration: registration, server });
                    return Ok(());
                }
                Err(error) => why = format!("{}: {error}", path.display()),
            }
        }
        Err(why)
    }

    /// Its sockets and connections, for the next program.
    #[cfg(unix)]
    pub fn save(&self, handover: &mut Handover) -> SavedControl {
        SavedControl {
            started: self.entry.started,
            open: self.open.as_ref().map(|open| (self.entry.socket.clone(), open.server.save(handover))),
        }
    }

    /// Takes over the sockets and connections of the last program of this process. Must be called within the runtime.
    #[cfg(unix)]
    pub fn restore(
        instance: Instance,
        home: Option<&Path>,
        saved: SavedControl,
        received: &mut Received,
    ) -> io::Result<Control> {
        let mut control = Control { entry: entry(instance), open: None };
        control.entry.started = saved.started;
        if let (Some((socket, server)), Some(home)) = (saved.open, home) {
            let server = Server::restore(server, received, &socket)?;
            control.entry.socket = socket;
            let registration = Registry::of(home).register_again(&control.entry);
            control.open = Some(Open { _registration: registration, server });
        }
        Ok(control)
    }

    /// The file that this instance runs.
    pub fn program(&self) -> Option<&Program> {
        self.entry.program.as_ref()
    }

    /// The path of the socket, if it is open.
    pub fn socket(&self) -> Option<&Path> {
        self.open.as_ref().map(|_| self.entry.socket.as_path())
    }

    /// The next request, which must be answered under its ticket, now or later. Without a connected client this makes
    /// no system call.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Asked> {
        match &mut self.open {
            Some(open) => open.server.poll(cx),
            None => Poll::Pending,
        }
    }

    /// An unknown ticket is ignored.
    pub fn answer(&mut self, ticket: u64, result: &Result<Value, Refusal>) {
        if let Some(open) = &mut self.open {
            open.server.answer(ticket, result);
        }
    }

    pub fn subscribe(&mut self, ticket: u64) {
        if let Some(open) = &mut self.open {
            open.server.subscribe(ticket);
        }
    }

    /// Answers, and hands over the connection of the client that asked. `None` if the client has disconnected.
    pub fn take(&mut self, ticket: u64, result: &Result<Value, Refusal>) -> Option<Taken> {
        self.open.as_mut()?.server.take(ticket, result)
    }

    /// Whether the client that asked is still connected.
    pub fn is_waited_for(&self, ticket: u64) -> bool {
        self.open.as_ref().is_some_and(|open| open.server.is_waited_for(ticket))
    }

    /// Sends an event to the subscribed clients.
    pub fn event(&mut self, about: &Value) {
        if let Some(open) = &mut self.open {
            open.server.event(about);
        }
    }

    /// Sends an audit record, as its line, to the subscribed clients.
    pub fn record(&mut self, line: &str) {
        if let Some(open) = &mut self.open {
            open.server.record(line);
        }
    }

    /// Flushes what is still to be sent, then removes the socket and the entry.
    pub fn end(mut self) {
        if let Some(open) = &mut self.open {
            open.server.flush();
        }
    }

    /// Adds what is known of the instance to the state that the driver reports of its child. Members that the driver
    /// set are kept: its `pid` is the child's, and the process id of outlast is `outlast_pid`.
    pub fn complete(&self, state: &mut Value) {
        let about = self.entry.to_json();
        for member in ["id", "kind", "name", "cwd", "socket", "started", "command", "log", "audit"] {
            if state[member].is_null() {
                state[member] = about[member].clone();
            }
        }
        state["outlast_pid"] = about["pid"].clone();
    }
}

fn entry(instance: Instance) -> Entry {
    let pid = std::process::id();
    Entry {
        id: instance.id,
        kind: instance.kind.to_owned(),
        name: instance.name,
        pid,
        born: os::start_stamp(pid).unwrap_or_default(),
        started: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
        cwd: instance.cwd,
        socket: PathBuf::new(),
        command: instance.command,
        log: instance.log,
        audit: instance.audit,
        program: instance.program,
    }
}

/// A control plane as saved state.
#[cfg(unix)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SavedControl {
    started: f64,
    /// The path of the socket, and its server.
    open: Option<(PathBuf, server::SavedServer)>,
}
