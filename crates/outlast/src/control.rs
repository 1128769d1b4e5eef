//! How others reach a running instance: a socket that speaks frames of JSON, and a registry that says where it is.

use std::{
    path::{Path, PathBuf},
    task::{Context, Poll},
    time::{SystemTime, UNIX_EPOCH},
};

use outlast_core::session::Mode;
use serde_json::Value;

pub mod client;
pub mod registry;
pub mod server;
pub mod wire;

use self::{
    registry::{Entry, Registration, Registry},
    server::{Asked, Server, Taken},
    wire::Refusal,
};
use crate::os;

/// What is known of an instance before it runs.
#[derive(Debug)]
pub struct Instance {
    pub id: String,
    pub kind: &'static str,
    pub name: String,
    pub cwd: PathBuf,
    /// As a person would type it.
    pub command: String,
    pub log: Option<PathBuf>,
    pub audit: Option<PathBuf>,
}

/// One instance's side of the control plane. Where there is no place for it, nobody ever asks anything, and all else
/// goes on.
#[derive(Debug)]
pub struct Control {
    entry: Entry,
    open: Option<Open>,
}

#[derive(Debug)]
struct Open {
    // In this order: who reads the registry finds no entry whose socket is gone already.
    _registration: Registration,
    server: Server,
}

impl Control {
    /// Opens the socket and then announces it. If that cannot be done, a sentence says why. Must be called within
    /// the runtime.
    pub fn begin(instance: Instance, home: Option<&Path>) -> (Control, Option<String>) {
        let pid = std::process::id();
        let entry = Entry {
            id: instance.id,
            kind: instance.kind.to_owned(),
            name: instance.name,
            pid,
            born: os::born(pid).unwrap_or_default(),
            started: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            cwd: instance.cwd,
            socket: PathBuf::new(),
            command: instance.command,
            log: instance.log,
            audit: instance.audit,
        };
        let mut control = Control { entry, open: None };
        // A relative home would change its meaning with the directory we happen to stand in.
        let complaint = match home.filter(|home| home.is_absolute()) {
            None => Some("there is no home directory".to_owned()),
            Some(home) => control.open(&Registry::of(home)).err(),
        };
        let complaint = complaint.map(|why| format!("`outlast ps` and its like cannot see this instance ({why})"));
        (control, complaint)
    }

    fn open(&mut self, registry: &Registry) -> Result<(), String> {
        // Without an entry nobody would find the socket, so this must be possible first.
        os::claim_dir(registry.dir()).map_err(|error| format!("{}: {error}", registry.dir().display()))?;
        let mut why = "every path for its socket is too long".to_owned();
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

    /// Where the socket is, if there is one.
    pub fn socket(&self) -> Option<&Path> {
        self.open.as_ref().map(|_| self.entry.socket.as_path())
    }

    /// The next thing somebody wants; it must be answered under its ticket, now or later. While nobody is there this
    /// asks the kernel nothing.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Asked> {
        match &mut self.open {
            Some(open) => open.server.poll(cx),
            None => Poll::Pending,
        }
    }

    /// A ticket that is nobody's is fine.
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

    /// Answers, and hands over the connection of whoever asked. None if they are gone.
    pub fn take(&mut self, ticket: u64, result: &Result<Value, Refusal>) -> Option<Taken> {
        self.open.as_mut()?.server.take(ticket, result)
    }

    /// Whether somebody is still there for the answer.
    pub fn is_waited_for(&self, ticket: u64) -> bool {
        self.open.as_ref().is_some_and(|open| open.server.is_waited_for(ticket))
    }

    /// Something that happened, to those who subscribed.
    pub fn event(&mut self, about: &Value) {
        if let Some(open) = &mut self.open {
            open.server.event(about);
        }
    }

    /// An audit record, as its line, to those who subscribed.
    pub fn record(&mut self, line: &str) {
        if let Some(open) = &mut self.open {
            open.server.record(line);
        }
    }

    /// Says the last words; the socket and the entry go with it.
    pub fn end(mut self) {
        if let Some(open) = &mut self.open {
            open.server.flush();
        }
    }

    /// Completes what a driver knows of its child by what is known of the instance. What the driver said stands: its
    /// `pid` is the child's, and outlast's own is `outlast_pid`.
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

/// What every kind of instance understands.
pub const METHODS: [&str; 6] = ["state", "pid", "restart", "resume", "stop", "subscribe"];

/// What a restart begins with, for every kind of instance: a mode that is not known is refused, not taken for another.
pub fn restart_mode(params: &Value) -> Result<Mode, Refusal> {
    match &params["mode"] {
        Value::Null => Ok(Mode::Continue),
        Value::String(mode) if mode == "continue" => Ok(Mode::Continue),
        Value::String(mode) if mode == "fresh" => Ok(Mode::Fresh),
        mode => {
            Err(Refusal::new("bad_request", format!("there is no mode {mode}; there are \"fresh\" and \"continue\"")))
        }
    }
}

/// Whether a restart is not to wait for calls that run.
pub fn restart_now(params: &Value) -> Result<bool, Refusal> {
    match &params["now"] {
        Value::Null => Ok(false),
        Value::Bool(now) => Ok(*now),
        _ => Err(Refusal::new("bad_request", "`now` must be true or false")),
    }
}

/// For kinds of instances that know no such restart: what is asked for is refused, not left out.
pub fn refuse_restart_now(params: &Value) -> Result<(), Refusal> {
    match restart_now(params)? {
        true => Err(Refusal::new("bad_request", "`now` is only for servers under `outlast mcp`")),
        false => Ok(()),
    }
}

/// What every kind of instance says to a method it does not have.
pub fn unknown_method(method: &str, methods: &[&str]) -> Refusal {
    Refusal::new("unknown_method", format!("there is no method `{method}`; there are {}", methods.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_restart_at_once_is_understood_or_refused_and_never_left_out() {
        let refused = |result: Result<(), Refusal>| result.err().map(|refusal| refusal.message);
        let only_mcp = Some("`now` is only for servers under `outlast mcp`".to_owned());
        let wrong = Some("`now` must be true or false".to_owned());
        let table = [
            (json!({}), Ok(false), None),
            (json!({"now": false}), Ok(false), None),
            (json!({"now": true}), Ok(true), only_mcp),
            (json!({"now": "yes"}), Err(()), wrong),
        ];
        for (params, now, elsewhere) in table {
            assert_eq!(restart_now(&params).map_err(|_| ()), now, "{params}");
            assert_eq!(refused(refuse_restart_now(&params)), elsewhere, "{params}");
        }
    }
}
