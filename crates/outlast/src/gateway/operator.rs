//! Requests of operators to a running gateway, over its control socket or its status page. What the machine answers
//! later is matched by ticket.

use std::{
    task::{Context, Poll},
    time::Instant,
};

use outlast_control::{
    method::{self, Method},
    server::Asked,
    wire::Refusal,
};
use outlast_core::gateway::{Event, Switch};
use serde_json::{Value, json};

use self::cluster::ClusterRequest;
use super::{
    Driver, Operator,
    state::{BackendState, GatewayState},
};
use crate::config::mistake::closest;
#[cfg(windows)]
use crate::upgrade;

pub(super) mod cluster;

/// Methods that change something; each request is recorded with its sender.
const RECORDED: [&str; 6] = ["restart", "resume", "switch", "reload", "stop", "upgrade"];

/// The ticket of a request that needs no answer.
pub(super) const NO_TICKET: u64 = 0;

/// A restart whose caller waits for the answer, with the state before it.
#[derive(Debug)]
pub(super) struct PendingRestart {
    /// The request named one backend.
    is_one: bool,
    since: Instant,
    before: Vec<(String, Option<u32>)>,
    /// The last stderr of processes of these backends that exited since then, by backend.
    stderr: Vec<(String, String)>,
}

impl PendingRestart {
    /// A process of one of its backends exited.
    pub(super) fn note_end(&mut self, backend: &str, stderr: &str) {
        if !stderr.is_empty() && self.before.iter().any(|(name, _)| name == backend) {
            self.stderr.retain(|(name, _)| name != backend);
            self.stderr.push((backend.to_owned(), stderr.to_owned()));
        }
    }

    /// The stderr of the backends that did not start, which are named in the error text.
    fn stderr_of(&self, why: &str) -> String {
        let is_named =
            |name: &str| why.contains(&format!("{name} did not")) || why.contains(&format!("{name} was not"));
        let failed = self.stderr.iter().filter(|(name, _)| is_named(name));
        failed.map(|(_, stderr)| stderr.as_str()).collect::<Vec<_>>().join("\n")
    }
}

impl Driver {
    pub(super) fn poll_control(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(Asked { ticket, method, params }) = self.control.poll(cx) else { return false };
        // Requests without an answer here are answered later: by the machine, or when the configuration was read.
        let operator = Operator { who: outlast_os::user(), peer: Some("control socket".to_owned()) };
        if let Some(answer) = self.asked_by(operator, ticket, &method, &params) {
            self.control.answer(ticket, &answer);
        }
        true
    }

    /// The same, with the sender, who is named in the record of the request.
    pub(super) fn asked_by(
        &mut self,
        operator: Operator,
        ticket: u64,
        method: &str,
        params: &Value,
    ) -> Option<Result<Value, Refusal>> {
        self.operator = Some(operator);
        if RECORDED.contains(&method) {
            let target = ["backend", "name"].iter().find_map(|member| params[*member].as_str());
            let target = match params["off"].as_bool() {
                Some(off) => target.map(|target| format!("{target} {}", if off { "off" } else { "on" })),
                None => target.map(str::to_owned),
            };
            self.operator_requested(method, target.as_deref(), params["reason"].as_str());
        }
        let answer = self.asked(ticket, method, params);
        self.operator = None;
        answer
    }

    /// `None` if the request is answered later.
    fn asked(&mut self, ticket: u64, method: &str, params: &Value) -> Option<Result<Value, Refusal>> {
        let backend = match self.named_backend(params) {
            Ok(backend) => backend,
            Err(refusal) => return Some(Err(refusal)),
        };
        let method = match Method::read(method::Kind::Gateway, method, params) {
            Ok(method) => method,
            Err(refusal) => return Some(Err(refusal)),
        };
        let named = backend.as_deref().and_then(|name| self.backend_state(name));
        match method {
            Method::State => Some(Ok(self.state(backend.as_deref()))),
            Method::Pid => {
                let pid = match &backend {
                    Some(_) => named.and_then(|state| state.pid),
                    None => Some(std::process::id()),
                };
                Some(Ok(json!({"pid": pid})))
            }
            Method::ClusterState => self.ask_cluster(ticket, ClusterRequest::State),
            Method::ClusterAudit(audit) => self.ask_cluster(ticket, ClusterRequest::Audit(audit)),
            Method::Restart(restart) if restart.cluster => {
                let reason = restart.reason().to_owned();
                self.ask_cluster(ticket, ClusterRequest::Restart { backend, reason })
            }
            Method::Restart(_) if named.as_ref().is_some_and(BackendState::is_off) => {
                let name = backend.unwrap_or_default();
                let message = format!("the backend `{name}` is off; `outlast resume {name}` turns it on");
                Some(Err(Refusal::new("off", message)))
            }
            Method::Restart(restart) => {
                let reason = restart.reason().to_owned();
                if let Some(placed) = backend.clone().filter(|name| self.is_placed(name)) {
                    return self.restart_placed(ticket, placed, &reason);
                }
                self.begin_restart(ticket, backend.clone());
                self.tell(Event::RestartAsked { ticket, backend, reason });
                None
            }
            Method::Resume => {
                let names: Vec<String> = match &named {
                    Some(state) if state.is_away() || state.is_off() => vec![state.name.clone()],
                    Some(state) => return Some(Ok(json!({"resumed": false, "state": state.state}))),
                    None => {
                        let GatewayState { state, backends, .. } = self.gateway_state();
                        let away = backends.into_iter().filter(BackendState::is_away);
                        let names: Vec<String> = away.map(|backend| backend.name).collect();
                        if names.is_empty() {
                            return Some(Ok(json!({"resumed": false, "state": state})));
                        }
                        names
                    }
                };
                self.begin_restart(ticket, backend.clone());
                // The other backends are not touched.
                if let Some(pending) = self.pending_restarts.get_mut(&ticket) {
                    pending.before.retain(|(name, _)| names.contains(name));
                }
                // Turns a backend on that an operator turned off.
                if let Some(backend) = backend.clone() {
                    self.store_switch(&Switch::Backend(backend.clone()), false);
                    self.tell(Event::SwitchAsked { ticket: NO_TICKET, what: Switch::Backend(backend), off: false });
                }
                self.tell(Event::ResumeAsked { ticket, backend });
                None
            }
            Method::Switch(method::Switch { name, off }) => {
                let what = match (backend, name) {
                    (Some(backend), _) => Switch::Backend(backend),
                    (None, Some(name)) if self.has_backend(&name) => Switch::Backend(name),
                    (None, Some(name)) => Switch::Tool(name),
                    (None, None) => {
                        return Some(Err(Refusal::new("bad_request", "`name` must name a tool or a backend")));
                    }
                };
                if !self.gateway.can_switch(&what) {
                    return Some(Err(self.nothing_to_switch(&what)));
                }
                self.store_switch(&what, off);
                self.tell(Event::SwitchAsked { ticket, what, off });
                None
            }
            Method::Reload => {
                self.journal.note("Reading the configuration, as requested");
                self.reload(Some(ticket));
                None
            }
            // One backend is turned off, and its child is stopped.
            Method::Stop(_) if backend.is_some() => {
                let what = Switch::Backend(backend.unwrap_or_default());
                self.store_switch(&what, true);
                self.tell(Event::SwitchAsked { ticket, what, off: true });
                None
            }
            Method::Stop(stop) => {
                let graceful = stop.is_graceful();
                self.journal.note(if graceful { "Stop requested" } else { "Stop at once requested" });
                self.stop(graceful);
                Some(Ok(json!({"stopping": true})))
            }
            Method::Subscribe => {
                self.control.subscribe(ticket);
                None
            }
            #[cfg(unix)]
            Method::Upgrade(upgrade) => {
                // Answered when it is done, by the next program.
                self.ask_upgrade(Some(ticket), upgrade.program);
                None
            }
            #[cfg(windows)]
            Method::Upgrade(_) => Some(Err(upgrade::unsupported(upgrade::NOT_ON_WINDOWS))),
            method => Some(Err(method::Kind::Gateway.unknown(method.name()))),
        }
    }

    /// In a cluster a switch applies to all replicas.
    fn store_switch(&mut self, what: &Switch, off: bool) {
        if let Some(replica) = &self.cluster {
            replica.borrow_mut().switch(what, off);
        }
        self.switch_host(what, off);
    }

    fn named_backend(&self, params: &Value) -> Result<Option<String>, Refusal> {
        match &params["backend"] {
            Value::Null => Ok(None),
            Value::String(name) if self.has_backend(name) => Ok(Some(name.clone())),
            name => {
                let all: Vec<&str> = self.gateway.backends().map(|backend| backend.name.as_str()).collect();
                let message = format!("no backend is named {name}; known are {}", all.join(", "));
                Err(Refusal { data: json!({"backends": all}), ..Refusal::new("unknown_backend", message) })
            }
        }
    }

    fn nothing_to_switch(&self, what: &Switch) -> Refusal {
        let (Switch::Tool(name) | Switch::Backend(name)) = what;
        let known: Vec<String> = self.gateway.names_to_switch().collect();
        let hint = match closest(name, known.iter().map(String::as_str)) {
            Some(known) => format!("did you mean `{known}`?"),
            None => "`outlast state` lists the backends and their tools".to_owned(),
        };
        let message = format!("no backend and no tool is named `{name}`");
        Refusal { data: json!({"hint": hint}), ..Refusal::new("unknown_name", message) }
    }

    fn has_backend(&self, name: &str) -> bool {
        self.gateway.backends().any(|backend| backend.name == name)
    }

    /// Stores the state before a restart, for the answer to the caller.
    pub(super) fn begin_restart(&mut self, ticket: u64, backend: Option<String>) {
        let before = self.pids(backend.as_deref());
        self.pending_restarts
            .insert(ticket, PendingRestart { is_one: backend.is_some(), since: self.now, before, stderr: Vec::new() });
    }

    fn end_restart(&self, pending: PendingRestart) -> Value {
        let took_ms = u64::try_from(self.now.saturating_duration_since(pending.since).as_millis()).unwrap_or(u64::MAX);
        let mut backends = Vec::new();
        for (name, old) in pending.before {
            let new = self.pids(Some(&name)).pop().and_then(|(_, pid)| pid);
            backends.push(json!({"name": name, "old_pid": old, "new_pid": new, "took_ms": took_ms}));
        }
        if pending.is_one { backends.pop().unwrap_or_default() } else { json!({"backends": backends}) }
    }

    pub(super) fn answer(&mut self, ticket: u64, result: Result<Value, String>) {
        // A failed reload is logged backend by backend already.
        if let Some(answer) = self.reload_outcome(ticket, &result) {
            return self.answer_asked(ticket, &answer);
        }
        if let Err(why) = &result {
            self.journal.note(why);
        }
        let mut stderr_tail = String::new();
        let result = match (self.pending_restarts.remove(&ticket), result) {
            (Some(pending), Ok(_)) => Ok(self.end_restart(pending)),
            (Some(pending), Err(why)) => {
                stderr_tail = pending.stderr_of(&why);
                Err(why)
            }
            (None, result) => result,
        };
        let result = result.map_err(|why| {
            let mut refusal = Refusal::new("failed", self.journal.mask().hide(&why).into_owned());
            if !stderr_tail.is_empty() {
                refusal.data = json!({"stderr_tail": stderr_tail});
            }
            refusal
        });
        self.answer_asked(ticket, &result);
    }
}
