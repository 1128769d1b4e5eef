//! One server that many clients use as if each had it alone (`outlast mcp --share`).
//! Behind the only link is a relay, which supervises the server's processes: here nothing is timed, checked or renamed, and
//! the gateway only keeps the clients apart. It does not start servers for clients that cannot share this one.

use std::{
    collections::BTreeMap,
    mem,
    time::{Duration, Instant},
};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::{
    Action, Backend, Children, Client, Era, EraChoice, Fit, Gateway, Kind, Limits, Placement, Rates, Said, Saved,
    Schemas, Settings, Start, clients, clients::ClientState, messages, opening::OwnRequest,
};
use crate::{
    json::Raw,
    mcp::{meta, method, revision},
    message,
    message::{Edit, Message, patch, pick, quote, splice},
    restarts::Policy,
    saved::Octets,
};

/// The relay behind the link has limits for all that takes time, so the gateway has none.
const NEVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// How many requests of one client may be open; one more fails at once.
const OPEN_MAX: usize = 10_000;

/// How many requests of the server are kept until a client can be asked; the next one is refused.
const EARLY_MAX: usize = 64;

/// A request of the server that any client may be meant by.
const UNATTRIBUTED: &str = "the server asks its client something, and it is unknown which of several clients it means";
/// A server has one set of roots.
const ROOTS: &str = "the server asks for the roots of its client, and each client has its own";
const OTHER_CAPABILITIES: &str = "the server was told other client capabilities than this client has";

/// What the server is told of its clients. All of them have the same capabilities.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedClients {
    /// As JSON.
    pub capabilities: String,
    /// `clientInfo` of the first client, as JSON.
    pub info: Option<String>,
    /// The revision that the first client asked for.
    pub version: Option<String>,
}

impl SharedClients {
    fn can(&self, capability: &str) -> bool {
        let declared = Raw::parse(&self.capabilities).and_then(|raw| pick(raw, [capability]));
        declared.is_some_and(|[member]| member.is_some())
    }
}

/// Why a client gets a server of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Apart {
    pub why: &'static str,
    /// It can share another server with clients that have its capabilities.
    pub with_equals: bool,
}

#[derive(Debug)]
pub(super) struct SharedServer {
    clients: SharedClients,
    opening: Option<ServerOpening>,
    /// Why it is for one client only.
    exclusive: Option<Exclusive>,
    /// Requests of the server from before the first client has finished its handshake: the link and the line.
    early: Vec<(u64, Bytes)>,
}

/// Why a server is for one client only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Exclusive {
    Roots,
    Unattributed,
}

impl Exclusive {
    fn why(self) -> &'static str {
        match self {
            Exclusive::Roots => ROOTS,
            Exclusive::Unattributed => UNATTRIBUTED,
        }
    }
}

/// The shared server as saved state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedSharedServer {
    capabilities: String,
    info: Option<String>,
    version: Option<String>,
    opening: Option<(Era, String)>,
    exclusive: Option<Exclusive>,
    early: Vec<(u64, Octets)>,
}

/// The server's answer to the handshake.
#[derive(Debug)]
struct ServerOpening {
    era: Era,
    /// The whole result, as JSON on one line.
    result: Box<str>,
}

/// The server checks the arguments of its tools.
pub(super) struct Unchecked;

impl Schemas for Unchecked {
    fn check(&mut self, _schema: &[u8], _arguments: Raw<'_>) -> Option<Fit> {
        Some(Fit::Fits)
    }
}

impl SharedServer {
    pub(super) fn clients(&self) -> &SharedClients {
        &self.clients
    }

    pub(super) fn save(&self) -> SavedSharedServer {
        SavedSharedServer {
            capabilities: self.clients.capabilities.clone(),
            info: self.clients.info.clone(),
            version: self.clients.version.clone(),
            opening: self.opening.as_ref().map(|opening| (opening.era, opening.result.to_string())),
            exclusive: self.exclusive,
            early: self.early.iter().map(|(serial, said)| (*serial, Octets::of(said))).collect(),
        }
    }

    pub(super) fn restore(saved: SavedSharedServer) -> SharedServer {
        let SavedSharedServer { capabilities, info, version, opening, exclusive, early } = saved;
        SharedServer {
            clients: SharedClients { capabilities, info, version },
            opening: opening.map(|(era, result)| ServerOpening { era, result: result.into() }),
            exclusive,
            early: early.into_iter().map(|(serial, said)| (serial, said.bytes())).collect(),
        }
    }
}

impl ServerOpening {
    /// Members of the result.
    fn pick<const N: usize>(&self, names: [&str; N]) -> [Option<Raw<'_>>; N] {
        Raw::parse(&self.result).and_then(|result| pick(result, names)).unwrap_or([None; N])
    }

    /// The server's name and version.
    fn info(&self) -> Option<&str> {
        let [info, members] = self.pick(["serverInfo", "_meta"]);
        let in_meta = members.and_then(|members| pick(members, [meta::SERVER_INFO])).and_then(|[info]| info);
        info.or(in_meta).map(Raw::get)
    }

    /// The revision that a client of the handshake era is answered with: the one that it wants, or an older one of the
    /// server.
    fn version_for(&self, wanted: &str) -> String {
        let [version] = self.pick(["protocolVersion"]);
        let own = version.and_then(Raw::text).unwrap_or_else(|| revision::NEWEST_HANDSHAKE.to_owned());
        match revision::HANDSHAKE.contains(&wanted) && *wanted < *own {
            true => wanted.to_owned(),
            false => own,
        }
    }

    fn initialize_result(&self, version: &str) -> String {
        let version = quote(version);
        if self.era == Era::Handshake
            && let Some(result) = Raw::parse(&self.result)
            && let Some(edit) = Edit::set(self.result.as_bytes(), result, "protocolVersion", &version)
        {
            let told = splice(self.result.as_bytes(), vec![edit]);
            return String::from_utf8(told.into()).expect("text with text in it");
        }
        let [capabilities, instructions] = self.pick(["capabilities", "instructions"]);
        let own = messages::info();
        let instructions = instructions.map_or_else(String::new, |text| format!(r#","instructions":{}"#, text.get()));
        format!(
            r#"{{"protocolVersion":{version},"capabilities":{},"serverInfo":{}{instructions}}}"#,
            capabilities.map_or("{}", Raw::get),
            self.info().unwrap_or(&own)
        )
    }
}

impl Gateway {
    /// A gateway before one server, which is opened with the first event. The driver connects its only link to the relay of
    /// the server.
    pub fn of_shared_server(name: &str, clients: SharedClients, seed: u64) -> Gateway {
        let settings = shared_settings(name);
        let mut gateway = Gateway::new(settings, seed, BTreeMap::new(), Box::new(Unchecked));
        gateway.backends.values_mut().for_each(|backend| backend.mark_shared());
        gateway.shared = Some(SharedServer { clients, opening: None, exclusive: None, early: Vec::new() });
        gateway
    }

    /// Continues where a gateway before the server of this name was saved. `None` if another kind of gateway was.
    pub fn restore_shared_server(name: &str, saved: Saved, now: Instant) -> Option<Gateway> {
        let gateway = Gateway::restore(shared_settings(name), saved, Box::new(Unchecked), |_| true, now);
        gateway.is_shared_server().then_some(gateway)
    }

    /// Whether one more client with these capabilities, as JSON, can use the shared server.
    pub fn admit(&self, capabilities: &str) -> Result<(), Apart> {
        let Some(shared) = &self.shared else { return Ok(()) };
        if !is_same_json(&shared.clients.capabilities, capabilities) {
            return Err(Apart { why: OTHER_CAPABILITIES, with_equals: true });
        }
        match shared.exclusive {
            Some(exclusive) => Err(Apart { why: exclusive.why(), with_equals: false }),
            None => Ok(()),
        }
    }

    /// Why the shared server is for one client only. When that client leaves, the server knows things of it that no other
    /// client should meet.
    pub fn exclusive(&self) -> Option<&'static str> {
        self.shared.as_ref()?.exclusive.map(Exclusive::why)
    }

    pub(super) fn is_shared_server(&self) -> bool {
        self.shared.is_some()
    }

    /// The backend whose handshake and lists a client of the shared server has to wait for.
    pub(super) fn unopened_shared_server(&self) -> Option<u32> {
        self.shared.as_ref()?;
        let (number, backend) = self.backends.in_order().next()?;
        (!backend.is_offer_confirmed() && !self.stage.is_stopping()).then_some(number)
    }

    pub(super) fn shared_server_opened(&mut self, own_request: OwnRequest, result: Raw<'_>) {
        if let Some(shared) = &mut self.shared {
            let era = if own_request == OwnRequest::Initialize { Era::Handshake } else { Era::Stateless };
            let result = result.get().replace(['\n', '\r'], " ").into();
            shared.opening = Some(ServerOpening { era, result });
        }
    }

    /// The shared server's own answer to `initialize`, with the revision that is agreed on.
    pub(super) fn shared_initialize_result(&self, wanted: &str) -> Option<(String, String)> {
        let opening = self.shared.as_ref()?.opening.as_ref()?;
        let version = opening.version_for(wanted);
        let result = opening.initialize_result(&version);
        Some((version, result))
    }

    /// The shared server's own answer to `server/discover`.
    pub(super) fn shared_discover_result(&self, versions: &serde_json::Value) -> Option<String> {
        let opening = self.shared.as_ref()?.opening.as_ref()?;
        if opening.era == Era::Stateless {
            return Some(opening.result.to_string());
        }
        let [capabilities, instructions] = opening.pick(["capabilities", "instructions"]);
        let instructions = instructions.map_or_else(String::new, |text| format!(r#","instructions":{}"#, text.get()));
        Some(format!(
            r#"{{"supportedVersions":{versions},"capabilities":{}{instructions}{}}}"#,
            capabilities.map_or("{}", Raw::get),
            self.freshness(),
        ))
    }

    /// The name and version that clients see: the shared server's, or the gateway's.
    pub(super) fn server_info(&self) -> String {
        let opening = self.shared.as_ref().and_then(|shared| shared.opening.as_ref());
        opening.and_then(ServerOpening::info).map_or_else(messages::info, str::to_owned)
    }

    /// The server asks for roots, which belong to one client, or asks something that cannot be attributed. From now on it
    /// is for one client: `keeps` or the first one. The others are sent to servers of their own.
    pub(super) fn make_exclusive(&mut self, method: &str, keeps: Option<Client>) {
        let Some(shared) = self.shared.as_mut().filter(|shared| shared.exclusive.is_none()) else { return };
        if clients::capability_for(method).is_some_and(|capability| !shared.clients.can(capability)) {
            return; // No client can be meant.
        }
        let exclusive = if method == method::ROOTS_LIST { Exclusive::Roots } else { Exclusive::Unattributed };
        shared.exclusive = Some(exclusive);
        let why = exclusive.why();
        let clients = self.clients.numbers();
        let keeps = keeps.or(clients.first().copied());
        for client in clients.into_iter().filter(|client| Some(*client) != keeps) {
            self.out.push(Action::Separate { client, why });
        }
    }

    /// Keeps a request that the server sends right after its handshake. The client cannot be asked before it has the answer
    /// to its own handshake. A request that may be for a call that was just cancelled is refused: it must not reach the next
    /// client. False if a client can be asked.
    pub(super) fn keep_early_request(&mut self, serial: u64, said: &[u8], raw: &str, now: Instant) -> bool {
        let is_too_early = !self.clients.values().any(ClientState::hears_changes) && self.calls.of_clients() == 0;
        if self.is_shared_server() && is_too_early && self.links[&serial].abandoned.has_any(now) {
            self.tell_link(serial, message::error_line(raw, -32800, "the call that this was for is over", None));
            return true;
        }
        match &mut self.shared {
            Some(shared) if is_too_early && shared.early.len() < EARLY_MAX => {
                shared.early.push((serial, Bytes::copy_from_slice(said)));
                true
            }
            _ => false,
        }
    }

    /// A client has finished its handshake, so the requests that were kept can be sent to it.
    pub(super) fn release_early_requests(&mut self, now: Instant) {
        let early = self.shared.as_mut().map(|shared| mem::take(&mut shared.early)).unwrap_or_default();
        for (serial, said) in early {
            if self.links.contains_key(&serial)
                && let Ok(Message::Request { id, method, params }) = message::parse_again(&said)
            {
                self.backend_requested(serial, &said, id, &method, &params, now);
            }
        }
    }

    /// A notification of the server that MCP does not have: for the only client, or the only one with calls in flight.
    pub(super) fn forward_unknown_notification(&mut self, serial: u64, said: &[u8], now: Instant) {
        match self.clients.only() {
            Some(client) => {
                let message = patch(said, &mut []);
                self.out.push(Action::TellClient { client, message, about: None, said: Said::Other });
            }
            None => self.forward_notification(serial, said, now),
        }
    }
}

/// What a gateway before the server of this name is configured with.
fn shared_settings(name: &str) -> Settings {
    let backend = Backend {
        name: name.to_owned(),
        kind: Kind::Stdio { command: "".into(), args: vec![], env: BTreeMap::new(), cwd: None, sandbox: None },
        prefix: String::new(),
        allow: vec![],
        deny: vec![],
        children: Children::Shared,
        children_max: 1,
        start: Start::Eager,
        placement: Placement::Every,
        inherit_env: false,
        era: EraChoice::Auto,
        policy: Policy::watchdog(),
        call_timeout: NEVER,
        call_max: NEVER,
        start_timeout: NEVER,
        idle_stop: None,
        memory_max: None,
        breaker_failures: 0,
        breaker_open: Duration::ZERO,
        retry_annotated: false,
    };
    Settings {
        backends: vec![backend],
        profiles: BTreeMap::new(),
        default_profile: None,
        roles: BTreeMap::new(),
        rates: Rates::default(),
        switched_off: vec![],
        forward_unknown: true,
        is_host: false,
        limits: Limits {
            hold: NEVER,
            held_max: OPEN_MAX,
            in_flight_max: OPEN_MAX,
            page: usize::MAX,
            retry_given_up: NEVER,
        },
    }
}

/// Whether two texts are the same JSON. The order of members does not matter.
fn is_same_json(one: &str, other: &str) -> bool {
    let parsed = |text: &str| serde_json::from_str::<serde_json::Value>(text).ok();
    one == other || parsed(one).is_some_and(|one| Some(one) == parsed(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_gets_the_revision_that_both_sides_know() {
        let opening = |version: &str| ServerOpening {
            era: Era::Handshake,
            result: format!(r#"{{"protocolVersion":"{version}","x":1}}"#).into(),
        };
        let table = [
            // server      wanted        answered
            ("2025-11-25", "2025-11-25", "2025-11-25"),
            ("2025-11-25", "2025-06-18", "2025-06-18"),
            ("2024-11-05", "2025-11-25", "2024-11-05"),
            ("2025-06-18", "2031-01-01", "2025-06-18"),
            ("2024-10-07", "2025-06-18", "2024-10-07"),
        ];
        for (server, wanted, answered) in table {
            assert_eq!(opening(server).version_for(wanted), answered, "{server} {wanted}");
        }
        assert_eq!(opening("a").initialize_result("b"), r#"{"protocolVersion":"b","x":1}"#);
    }
}
