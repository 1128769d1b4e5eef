//! What operators ask of a running gateway, over its socket or its status page, and what they are told.

use std::{
    task::{Context, Poll},
    time::Instant,
};

use outlast_core::{
    gateway::{Event, Kind, Switch},
    secret::Resolved,
};
use serde_json::{Value, json};

use super::{Driver, Operator, Stopping, Wire, listen::Listen};
use crate::{
    commands::without_secrets,
    config::mistake::closest,
    control::{self, server::Asked, wire::Refusal},
    report::shell_quote,
};

/// What a gateway understands.
const METHODS: [&str; 8] = ["state", "pid", "restart", "resume", "switch", "reload", "stop", "subscribe"];

/// What changes something, and is recorded with who asked for it.
const RECORDED: [&str; 5] = ["restart", "resume", "switch", "reload", "stop"];

/// A ticket that nobody waits for.
const NOBODY: u64 = 0;

/// A restart that somebody waits for, and how things were before it.
#[derive(Debug)]
pub(super) struct Errand {
    /// It is about one backend.
    is_one: bool,
    since: Instant,
    before: Vec<(String, Value)>,
    /// What processes of these backends that ended since then last wrote to stderr, by backend.
    stderr: Vec<(String, String)>,
}

impl Errand {
    /// A process of one of its backends ended.
    pub(super) fn note_end(&mut self, backend: &str, stderr: &str) {
        if !stderr.is_empty() && self.before.iter().any(|(name, _)| name == backend) {
            self.stderr.retain(|(name, _)| name != backend);
            self.stderr.push((backend.to_owned(), stderr.to_owned()));
        }
    }

    /// What those that did not come up wrote, by the sentence that says so.
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
        // What is answered later is answered by the machine, or when the configuration was read.
        let operator = Operator { who: crate::os::user(), peer: Some("control socket".to_owned()) };
        if let Some(answer) = self.asked_by(operator, ticket, &method, &params) {
            self.control.answer(ticket, &answer);
        }
        true
    }

    /// The same, with who asks: it is in the records of what was asked for.
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

    /// Nothing: it is answered later.
    fn asked(&mut self, ticket: u64, method: &str, params: &Value) -> Option<Result<Value, Refusal>> {
        let backend = match self.named_backend(params) {
            Ok(backend) => backend,
            Err(refusal) => return Some(Err(refusal)),
        };
        match method {
            "state" => Some(Ok(self.state(backend.as_deref()))),
            "pid" => {
                let pid = match &backend {
                    Some(_) => self.state(backend.as_deref())["pid"].take(),
                    None => std::process::id().into(),
                };
                Some(Ok(json!({"pid": pid})))
            }
            "restart" if control::refuse_restart_now(params).is_err() => {
                Some(control::refuse_restart_now(params).map(|()| Value::Null))
            }
            "restart" if control::restart_mode(params).is_err() => {
                Some(control::restart_mode(params).map(|_| Value::Null))
            }
            "restart" if backend.is_some() && self.state(backend.as_deref())["state"] == "off" => {
                let name = backend.unwrap_or_default();
                let message = format!("the backend `{name}` is off; `outlast resume {name}` turns it on");
                Some(Err(Refusal::new("off", message)))
            }
            "restart" => {
                let reason = params["reason"].as_str().unwrap_or("asked for from outside").to_owned();
                self.begin_errand(ticket, backend.clone());
                self.tell(Event::RestartAsked { ticket, backend, reason });
                None
            }
            "resume" => {
                let state = self.state(backend.as_deref());
                let is_away = |state: &Value| matches!(state["state"].as_str(), Some("given_up" | "backoff" | "idle"));
                let names = match (&backend, state["backends"].as_array()) {
                    (None, Some(all)) => all.iter().filter(|one| is_away(one)).map(|one| one["name"].clone()).collect(),
                    _ if is_away(&state) || state["state"] == "off" => vec![state["name"].clone()],
                    _ => Vec::new(),
                };
                if names.is_empty() {
                    return Some(Ok(json!({"resumed": false, "state": state["state"]})));
                }
                self.begin_errand(ticket, backend.clone());
                // The others are not touched.
                if let Some(errand) = self.errands.get_mut(&ticket) {
                    errand.before.retain(|(name, _)| names.iter().any(|away| away == name));
                }
                // What was stopped by hand is wanted again.
                if let Some(backend) = backend.clone() {
                    self.tell(Event::SwitchAsked { ticket: NOBODY, what: Switch::Backend(backend), off: false });
                }
                self.tell(Event::ResumeAsked { ticket, backend });
                None
            }
            "switch" => {
                let Some(off) = params["off"].as_bool() else {
                    return Some(Err(Refusal::new("bad_request", "`off` must be true or false")));
                };
                let what = match (backend, params["name"].as_str()) {
                    (Some(backend), _) => Switch::Backend(backend),
                    (None, Some(name)) if self.has_backend(name) => Switch::Backend(name.to_owned()),
                    (None, Some(name)) => Switch::Tool(name.to_owned()),
                    (None, None) => {
                        return Some(Err(Refusal::new("bad_request", "`name` must name a tool or a backend")));
                    }
                };
                if !self.gateway.can_switch(&what) {
                    return Some(Err(self.nothing_to_switch(&what)));
                }
                self.tell(Event::SwitchAsked { ticket, what, off });
                None
            }
            "reload" => {
                self.journal.note("Reading the configuration, as was asked for");
                self.reload(Some(ticket));
                None
            }
            // One backend is turned off, and with it goes its child.
            "stop" if backend.is_some() => {
                let what = Switch::Backend(backend.unwrap_or_default());
                self.tell(Event::SwitchAsked { ticket, what, off: true });
                None
            }
            "stop" => {
                let graceful = params["graceful"].as_bool().unwrap_or(true);
                self.journal.note(if graceful { "Stop requested" } else { "Stop at once requested" });
                self.stop(graceful);
                Some(Ok(json!({"stopping": true})))
            }
            "subscribe" => {
                self.control.subscribe(ticket);
                None
            }
            method => Some(Err(control::unknown_method(method, &METHODS))),
        }
    }

    fn named_backend(&self, params: &Value) -> Result<Option<String>, Refusal> {
        match &params["backend"] {
            Value::Null => Ok(None),
            Value::String(name) if self.has_backend(name) => Ok(Some(name.clone())),
            name => {
                let all: Vec<&str> = self.gateway.backends().map(|backend| backend.name.as_str()).collect();
                let message = format!("there is no backend {name}; there are {}", all.join(", "));
                Err(Refusal { data: json!({"backends": all}), ..Refusal::new("unknown_backend", message) })
            }
        }
    }

    fn nothing_to_switch(&self, what: &Switch) -> Refusal {
        let (Switch::Tool(name) | Switch::Backend(name)) = what;
        let known: Vec<String> = self.gateway.names_to_switch().collect();
        let hint = match closest(name, known.iter().map(String::as_str)) {
            Some(known) => format!("did you mean `{known}`?"),
            None => "`outlast state` names the backends and their tools".to_owned(),
        };
        let message = format!("there is no backend and no tool `{name}`");
        Refusal { data: json!({"hint": hint}), ..Refusal::new("unknown_name", message) }
    }

    fn has_backend(&self, name: &str) -> bool {
        self.gateway.backends().any(|backend| backend.name == name)
    }

    /// Of the whole gateway, or of one backend.
    pub(super) fn state(&self, backend: Option<&str>) -> Value {
        let mut state = self.gateway.status(self.now);
        let mut backends: Vec<Value> = match state["backends"].take() {
            Value::Array(backends) => backends.into_iter().map(|backend| self.of_backend(backend)).collect(),
            _ => Vec::new(),
        };
        if let Some(name) = backend {
            let at = backends.iter().position(|one| one["name"] == name);
            let mut one = at.map(|at| backends.swap_remove(at)).unwrap_or_else(|| json!({}));
            one["id"] = format!("{}/{name}", self.plan.id).into();
            one["kind"] = "backend".into();
            self.control.complete(&mut one);
            self.journal.mask().hide_in(&mut one);
            return one;
        }
        let restarts: u64 = backends.iter().filter_map(|one| one["restarts"].as_u64()).sum();
        state["state"] = if self.stopping == Stopping::No { "running" } else { "stopping" }.into();
        state["uptime_s"] = self.now.saturating_duration_since(self.began).as_secs_f64().into();
        state["restarts"] = restarts.into();
        state["listen"] = self.listen.as_ref().map(|listen| format!("{}/mcp", listen.url())).into();
        state["status_page"] = self.listen.as_ref().map(Listen::status_page).into();
        self.put_clients(&mut state);
        state["page"] = self.listen.as_ref().map(Listen::page_with_token).into();
        state["stdio"] = self.stdio.is_some().into();
        state["last_reload"] = match &self.reload.failed {
            Some((at, why)) => json!({
                "ok": false,
                "error": why,
                "seconds_ago": self.now.saturating_duration_since(*at).as_secs_f64(),
            }),
            None => Value::Null,
        };
        state["backends"] = backends.into();
        self.control.complete(&mut state);
        self.journal.mask().hide_in(&mut state);
        state
    }

    /// Clients of both eras. One of the stateless era has no connection: it counts for a while after its last request.
    pub(super) fn put_clients(&self, state: &mut Value) {
        let stdio = usize::from(self.stdio.is_some());
        let (sessions, stateless) = match &self.listen {
            Some(listen) => (listen.counts().sessions, listen.counts().stateless),
            None => (0, 0),
        };
        state["clients"] = (stdio + sessions + stateless).into();
        state["clients_by_kind"] = json!({"stdio": stdio, "sessions": sessions, "stateless": stateless});
    }

    /// What the machine knows of a backend in the words that all kinds of instances share, and what its newest child said.
    fn of_backend(&self, mut state: Value) -> Value {
        let seconds = |value: &Value| value.as_f64().map(|millis| millis / 1000.0);
        for (from, to) in [("uptime_ms", "uptime_s"), ("next_try_ms", "next_try_s")] {
            state[to] = seconds(&state[from]).into();
        }
        let word = match state["state"].as_str() {
            Some("connecting") => "starting".into(),
            Some("waiting") => "backoff".into(),
            _ => state["state"].take(),
        };
        state["state"] = word;
        state["transport"] = state["kind"].take();
        state["exit"] = state["last_exit"].take();
        state["last_exit"] = state["exit"]["words"].clone();
        state["tool_names"] = state["tools"].take();
        state["tools"] = state["tool_names"].as_array().map(Vec::len).into();
        state["stale"] = (state["catalogue"] == "stale").into();
        let name = state["name"].as_str().unwrap_or_default().to_owned();
        let children = self.links.values().filter_map(Wire::child).filter(|child| child.backend == name);
        let mut diverted = 0;
        for child in children {
            diverted += child.diverted;
            state["last_stderr"] = child.tail.last().into();
        }
        state["diverted"] = diverted.into();
        let settings = self.gateway.backends().find(|backend| backend.name == name);
        let left_out = self.left_out.get(&name).filter(|_| settings.is_some_and(|backend| !backend.inherit_env));
        state["env_left_out"] = left_out.cloned().unwrap_or_default().into();
        let kind = settings.map(|backend| &backend.kind);
        state["command"] = match kind {
            Some(Kind::Stdio { command, args, .. }) => {
                let words: Vec<String> = [command].into_iter().chain(args).map(Resolved::to_string).collect();
                shell_quote(without_secrets(&words).iter().map(String::as_str)).into()
            }
            Some(Kind::Http { url, .. }) => without_secrets(&[url.to_string()]).concat().into(),
            None => Value::Null,
        };
        if let Some(state) = state.as_object_mut() {
            for member in ["uptime_ms", "next_try_ms", "kind"] {
                state.remove(member);
            }
        }
        state
    }

    /// Notes how things are, so that whoever asked can be told what became of it.
    fn begin_errand(&mut self, ticket: u64, backend: Option<String>) {
        let before = self.pids(backend.as_deref());
        self.errands.insert(ticket, Errand { is_one: backend.is_some(), since: self.now, before, stderr: Vec::new() });
    }

    /// The process of each backend, or of one.
    fn pids(&self, backend: Option<&str>) -> Vec<(String, Value)> {
        let mut state = self.gateway.status(self.now);
        let backends = state["backends"].as_array_mut().map(std::mem::take).unwrap_or_default();
        let mut pids = Vec::new();
        for mut one in backends {
            let name = one["name"].as_str().unwrap_or_default().to_owned();
            if backend.is_none_or(|backend| backend == name) {
                pids.push((name, one["pid"].take()));
            }
        }
        pids
    }

    fn end_errand(&self, errand: Errand) -> Value {
        let took_ms = u64::try_from(self.now.saturating_duration_since(errand.since).as_millis()).unwrap_or(u64::MAX);
        let mut backends = Vec::new();
        for (name, old) in errand.before {
            let new = self.pids(Some(&name)).pop().map(|(_, pid)| pid).unwrap_or_default();
            backends.push(json!({"name": name, "old_pid": old, "new_pid": new, "took_ms": took_ms}));
        }
        if errand.is_one { backends.pop().unwrap_or_default() } else { json!({"backends": backends}) }
    }

    pub(super) fn answer(&mut self, ticket: u64, result: Result<Value, String>) {
        // What failed is in the log already, backend by backend.
        if let Some(answer) = self.reload_outcome(ticket, &result) {
            return self.answer_asked(ticket, &answer);
        }
        if let Err(why) = &result {
            self.journal.note(why);
        }
        let mut stderr_tail = String::new();
        let result = match (self.errands.remove(&ticket), result) {
            (Some(errand), Ok(_)) => Ok(self.end_errand(errand)),
            (Some(errand), Err(why)) => {
                stderr_tail = errand.stderr_of(&why);
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
