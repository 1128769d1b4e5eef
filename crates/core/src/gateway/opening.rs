//! The handshake with a backend in the era that it speaks, and the answers to requests of the gateway itself.
//! Lists are read in [`super::lists`].

use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::{
    Era, EraChoice, Gateway, Kind, backends::Eras, clients::ClientState, hang::HANG_MAX, links::Phase, messages,
    slots::Sharing,
};
use crate::{
    capabilities::Capabilities,
    exit::How,
    json::Raw,
    mcp::{List, method, notification, revision},
    message,
    message::pick,
};

/// How long a backend may take for a page of a list; then the last list is kept.
const LIST_MAX: Duration = Duration::from_secs(30);

/// A request of the gateway itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum OwnRequest {
    Initialize,
    Discover,
    List(List),
    /// Only whether and when it is answered matters.
    Ping,
    /// A log level, or a resource to report. The answer is ignored.
    Told,
    /// The subscription to all that a stateless backend reports.
    Listen,
    /// The state of a task, for the task list with this number.
    Task(u64),
}

impl OwnRequest {
    /// How long the answer is waited for. A handshake and a subscription have no limit of their own.
    pub(super) fn timeout(self) -> Option<Duration> {
        match self {
            OwnRequest::List(_) | OwnRequest::Task(_) | OwnRequest::Told => Some(LIST_MAX),
            OwnRequest::Ping => Some(HANG_MAX),
            OwnRequest::Initialize | OwnRequest::Discover | OwnRequest::Listen => None,
        }
    }
}

/// The capabilities that a shared backend is told. Whether a client has them is checked when a request comes. Without
/// roots, because each client has its own.
const SHARED_CAPABILITIES: &str = r#"{"sampling":{},"elicitation":{"form":{},"url":{}}}"#;
/// The same for the only client, before it has declared its capabilities.
const LONELY_CAPABILITIES: &str = r#"{"sampling":{},"elicitation":{"form":{},"url":{}},"roots":{"listChanged":true}}"#;

/// The same for a borrowed link: each call declares the capabilities of its client.
const LENT_CAPABILITIES: &str = r#"{"sampling":{},"elicitation":{"form":{},"url":{}},"roots":{}}"#;

impl Gateway {
    pub(super) fn open_link(&mut self, serial: u64, now: Instant) {
        let link_state = &self.links[&serial];
        let Some(backend) = self.backends.get(&link_state.id().backend) else { return };
        let (settings, eras) = match backend.trial().filter(|trial| trial.serial == serial) {
            Some(trial) => (&trial.settings, None),
            None => (backend.settings(), backend.eras()),
        };
        let is_http = matches!(settings.kind, Kind::Http { is_sse: false, .. });
        let era = match (settings.era, eras, link_state.sharing()) {
            (EraChoice::Handshake, ..) => Era::Handshake,
            (EraChoice::Stateless, ..) => Era::Stateless,
            (_, Some(Eras { handshake: true, .. }), Sharing::Handshake | Sharing::Session(_)) => Era::Handshake,
            (_, Some(Eras { stateless: true, handshake }), _) if is_http || !handshake => Era::Stateless,
            (_, None, Sharing::Shared) if is_http => Era::Stateless,
            _ => Era::Handshake,
        };
        self.send_opening(serial, era, now);
    }

    fn send_opening(&mut self, serial: u64, era: Era, now: Instant) {
        let Some(link_state) = self.links.get_mut(&serial) else { return };
        link_state.set_era(era);
        match era {
            Era::Stateless => {
                self.send_own_request(serial, OwnRequest::Discover, method::DISCOVER, "", era, now);
            }
            Era::Handshake => {
                let sharing = link_state.sharing();
                let alone = self.clients.only();
                let own = match sharing {
                    Sharing::Session(client) => self.clients.get(&client),
                    Sharing::Borrowed(_) => None,
                    _ => alone.and_then(|client| self.clients.get(&client)),
                };
                let shared = self.shared.as_ref().map(|shared| shared.clients());
                let unsaid = if alone.is_some() { LONELY_CAPABILITIES } else { SHARED_CAPABILITIES };
                let unsaid = if matches!(sharing, Sharing::Borrowed(_)) { LENT_CAPABILITIES } else { unsaid };
                let own_capabilities = shared.map(|shared| &*shared.capabilities);
                let capabilities = own_capabilities.or(own.and_then(ClientState::capabilities)).unwrap_or(unsaid);
                let ours = messages::info();
                let own_info = shared.and_then(|shared| shared.info.as_deref());
                let info = own_info.or(own.and_then(ClientState::info)).unwrap_or(&ours);
                let own_version = shared.and_then(|shared| shared.version.as_deref());
                let version = own_version.or(own.and_then(ClientState::version)).unwrap_or(revision::NEWEST_HANDSHAKE);
                let params =
                    format!(r#""protocolVersion":"{version}","capabilities":{capabilities},"clientInfo":{info}"#);
                self.send_own_request(serial, OwnRequest::Initialize, method::INITIALIZE, &params, era, now);
            }
        }
    }

    /// A backend answered a request of the gateway.
    pub(super) fn own_request_answered(
        &mut self,
        serial: u64,
        own_request: OwnRequest,
        key: u64,
        result: Option<Raw<'_>>,
        error: Option<Raw<'_>>,
        now: Instant,
    ) {
        match own_request {
            OwnRequest::Initialize | OwnRequest::Discover => match (result, error) {
                (Some(result), None) => self.opened(serial, own_request, result, now),
                (_, error) => {
                    let words = error.map_or_else(|| "an answer without a result".into(), messages::error_words);
                    self.opening_refused(serial, own_request, &words, now);
                }
            },
            OwnRequest::List(kind) => self.listed(serial, kind, result, error, now),
            // A backend that refuses has no subscriptions; one that ended it is asked again later.
            OwnRequest::Listen => self.listen_ended(serial, key, error.is_none(), now),
            OwnRequest::Task(list) => self.task_listed(list, key, result, now),
            OwnRequest::Ping => self.ping_answered(serial, now),
            OwnRequest::Told => {}
        }
    }

    pub(super) fn own_request_late(&mut self, serial: u64, own_request: OwnRequest, key: u64, now: Instant) {
        match own_request {
            OwnRequest::List(kind) => self.list_failed(serial, kind, "it did not answer", now),
            OwnRequest::Task(list) => self.task_listed(list, key, None, now),
            // A link that sends nothing at all is handled as hung.
            OwnRequest::Ping if self.links.get(&serial).is_some_and(|link| link.liveness.is_suspected()) => {}
            OwnRequest::Ping => self.ping_answered(serial, now),
            OwnRequest::Initialize | OwnRequest::Discover | OwnRequest::Told | OwnRequest::Listen => {}
        }
    }

    /// An HTTP backend will not answer a request of the gateway.
    pub(super) fn own_request_failed(
        &mut self,
        serial: u64,
        own_request: OwnRequest,
        key: u64,
        why: &str,
        now: Instant,
    ) {
        match own_request {
            OwnRequest::Initialize | OwnRequest::Discover => self.opening_refused(serial, own_request, why, now),
            OwnRequest::List(kind) => self.list_failed(serial, kind, why, now),
            OwnRequest::Listen => self.listen_ended(serial, key, true, now),
            OwnRequest::Task(list) => self.task_listed(list, key, None, now),
            OwnRequest::Ping | OwnRequest::Told => {}
        }
    }

    pub(super) fn opening_refused(&mut self, serial: u64, own_request: OwnRequest, text: &str, now: Instant) {
        let Some(link_state) = self.links.get_mut(&serial) else { return };
        if !matches!(link_state.phase(), Phase::Opening { .. }) {
            return;
        }
        let link = link_state.id();
        let first = link_state.refused(text);
        let choice = self.settings_of(link).map(|settings| settings.era);
        if choice == Some(EraChoice::Auto) && first.is_none() {
            let other = if own_request == OwnRequest::Initialize { Era::Stateless } else { Era::Handshake };
            return self.send_opening(serial, other, now);
        }
        let text = match first {
            // What it answered to `initialize` is the error that people search for.
            Some(first) if own_request == OwnRequest::Discover => first,
            _ => text.to_owned(),
        };
        self.stop_link(serial, How::HandshakeRefused(text), true, now);
    }

    fn opened(&mut self, serial: u64, own_request: OwnRequest, result: Raw<'_>, now: Instant) {
        let Some(link_state) = self.links.get_mut(&serial) else { return };
        if !matches!(link_state.phase(), Phase::Opening { .. }) {
            return;
        }
        let picked = pick(result, ["capabilities", "instructions", "protocolVersion", "supportedVersions"]);
        let Some([capabilities, instructions, version, versions]) = picked else {
            return self.opening_refused(serial, own_request, "an answer that is not an object", now);
        };
        let (backend, sharing) = (link_state.id().backend, link_state.sharing());
        let has = Capabilities::parse(capabilities, |raw| raw.get().starts_with('{'));
        let eras = match own_request {
            OwnRequest::Initialize => {
                link_state.set_server(version.and_then(Raw::text).unwrap_or_default(), has);
                Eras { handshake: true, stateless: false }
            }
            _ => {
                let versions: Vec<String> = versions
                    .and_then(|list| list.first_elements(message::VERSIONS_MAX))
                    .unwrap_or_default()
                    .0
                    .into_iter()
                    .filter_map(Raw::text)
                    .collect();
                if !versions.iter().any(|version| version == revision::STATELESS) {
                    let words = format!("it knows {} and not {}", versions.join(", "), revision::STATELESS);
                    return self.opening_refused(serial, own_request, &words, now);
                }
                link_state.set_server(revision::STATELESS.into(), has);
                let handshake = versions.iter().any(|version| revision::HANDSHAKE.contains(&version.as_str()));
                Eras { handshake, stateless: true }
            }
        };
        if let Some(backend) = self.backends.get_mut(&backend) {
            let trial = backend.trial().filter(|trial| trial.serial == serial);
            let (settings, known, is_trial) = match trial {
                Some(trial) => (&trial.settings, trial.eras, true),
                None => (backend.settings(), backend.eras(), false),
            };
            // The second link of an HTTP backend learns nothing that the first one did not.
            if sharing != Sharing::Handshake || known.is_none() {
                // A process that supports both eras is used in one; HTTP has a link for each, unless one is configured.
                let may_be_two = matches!(settings.kind, Kind::Http { .. }) && settings.era == EraChoice::Auto;
                let eras = Eras { handshake: eras.handshake && (may_be_two || !eras.stateless), ..eras };
                match backend.trial_mut().filter(|_| is_trial) {
                    Some(trial) => trial.eras = Some(eras),
                    None => backend.learn_eras(eras),
                }
            }
            let link_state = self.links.get_mut(&serial).expect("found above");
            let capabilities = capabilities.map_or(b"{}" as &[u8], |raw| raw.get().as_bytes());
            let instructions = instructions.and_then(Raw::text);
            link_state.fetch.begin(Bytes::copy_from_slice(capabilities), instructions);
        }
        self.shared_server_opened(own_request, result);
        if own_request == OwnRequest::Initialize {
            self.tell_link(serial, message::notification_line(notification::INITIALIZED, ""));
        }
        // A link on trial takes over when its lists are read.
        if self.trial_of(serial).is_none() {
            self.slot_filled(serial, now);
            self.restore_subscriptions(serial, now);
        }
        self.fetch_all(serial, now);
    }
}
