//! The handshake with a backend, in the era it turns out to speak, and our own requests to it.

use super::*;
use crate::{
    json::Raw,
    message::{self, pick},
};

use links::{Has, Phase};

/// How long a backend may take for a page of a list; then the list stays as it was.
const LIST_MAX: Duration = Duration::from_secs(30);

/// A request of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Private {
    Initialize,
    Discover,
    List(List),
    /// Whatever comes of it, or nothing: only the time to wait matters.
    Ping,
    /// Told, not asked: a level, a resource to watch.
    Told,
    /// What a stateless backend has to say unasked.
    Listen,
    /// How a task is, for a list of them, by the number of the list.
    Task(u64),
}

impl Private {
    /// How long it is waited for; a handshake and a hang have bounds of their own.
    pub fn patience(self) -> Option<Duration> {
        match self {
            Private::List(_) | Private::Task(_) | Private::Told => Some(LIST_MAX),
            Private::Ping => Some(HANG_MAX),
            Private::Initialize | Private::Discover | Private::Listen => None,
        }
    }
}

/// What we say that our clients can do, to a backend that they share. Whether the one that is asked can is seen when it is
/// asked. No roots: which of many clients' would they be?
const SHARED_CAPABILITIES: &str = r#"{"sampling":{},"elicitation":{"form":{},"url":{}}}"#;
/// The same where one client is alone, and has not said yet what it can do.
const LONELY_CAPABILITIES: &str = r#"{"sampling":{},"elicitation":{"form":{},"url":{}},"roots":{"listChanged":true}}"#;

/// The same where one call is alone, and each says for itself what its client can do.
const LENT_CAPABILITIES: &str = r#"{"sampling":{},"elicitation":{"form":{},"url":{}},"roots":{}}"#;

impl Gateway {
    pub(super) fn open_link(&mut self, serial: u64, now: Instant) {
        let connection = &self.links[&serial];
        let Some(owner) = self.owners.get(&connection.link.backend) else { return };
        let (settings, eras) = match owner.trial.as_ref().filter(|trial| trial.serial == serial) {
            Some(trial) => (&trial.settings, None),
            None => (&owner.settings, owner.eras),
        };
        let is_http = matches!(settings.kind, Kind::Http { is_sse: false, .. });
        let era = match (settings.era, eras, connection.place.seat) {
            (EraChoice::Handshake, ..) => Era::Handshake,
            (EraChoice::Stateless, ..) => Era::Stateless,
            (_, Some(Eras { handshake: true, .. }), Seat::Second | Seat::Session(_)) => Era::Handshake,
            (_, Some(Eras { stateless: true, handshake }), _) if is_http || !handshake => Era::Stateless,
            (_, None, Seat::Shared) if is_http => Era::Stateless,
            _ => Era::Handshake,
        };
        self.ask_opening(serial, era, now);
    }

    fn ask_opening(&mut self, serial: u64, era: Era, now: Instant) {
        let Some(connection) = self.links.get_mut(&serial) else { return };
        connection.era = era;
        match era {
            Era::Stateless => drop(self.ask_link(serial, Private::Discover, "server/discover", "", era, now)),
            Era::Handshake => {
                let seat = connection.place.seat;
                let alone = self.only_client();
                let own = match seat {
                    Seat::Session(client) => self.guests.get(&client),
                    Seat::Lent(_) => None,
                    _ => alone.and_then(|client| self.guests.get(&client)),
                };
                let unsaid = if alone.is_some() { LONELY_CAPABILITIES } else { SHARED_CAPABILITIES };
                let unsaid = if matches!(seat, Seat::Lent(_)) { LENT_CAPABILITIES } else { unsaid };
                let capabilities = own.and_then(|guest| guest.capabilities.as_deref()).unwrap_or(unsaid);
                let info = own.and_then(|guest| guest.info.clone()).unwrap_or_else(|| words::info().into());
                let version = own.and_then(|guest| guest.version()).unwrap_or(HANDSHAKE_VERSIONS[0]);
                let params =
                    format!(r#""protocolVersion":"{version}","capabilities":{capabilities},"clientInfo":{info}"#);
                self.ask_link(serial, Private::Initialize, "initialize", &params, era, now);
            }
        }
    }

    /// A backend answered a request of ours.
    pub(super) fn private_answered(
        &mut self,
        serial: u64,
        private: Private,
        key: u64,
        result: Option<Raw<'_>>,
        error: Option<Raw<'_>>,
        now: Instant,
    ) {
        match private {
            Private::Initialize | Private::Discover => match (result, error) {
                (Some(result), None) => self.opened(serial, private, result, now),
                (_, error) => {
                    let words = error.map_or_else(|| "an answer without a result".into(), words::error_words);
                    self.opening_refused(serial, private, &words, now);
                }
            },
            Private::List(kind) => self.listed(serial, kind, result, error, now),
            // One that has no subscriptions says so once; one that ends ours is asked again after a while.
            Private::Listen => self.listen_ended(serial, key, error.is_none(), now),
            Private::Task(list) => self.task_listed(list, key, result, now),
            Private::Ping => self.pinged(serial, now),
            Private::Told => {}
        }
    }

    pub(super) fn private_late(&mut self, serial: u64, private: Private, key: u64, now: Instant) {
        match private {
            Private::List(kind) => self.list_failed(serial, kind, "it did not answer", now),
            Private::Task(list) => self.task_listed(list, key, None, now),
            // One that says nothing at all is another matter.
            Private::Ping if self.links.get(&serial).is_some_and(|link| link.suspected.is_some()) => {}
            Private::Ping => self.pinged(serial, now),
            Private::Initialize | Private::Discover | Private::Told | Private::Listen => {}
        }
    }

    /// An HTTP backend will not answer a request of ours.
    pub(super) fn private_failed(&mut self, serial: u64, private: Private, key: u64, why: &str, now: Instant) {
        match private {
            Private::Initialize | Private::Discover => self.opening_refused(serial, private, why, now),
            Private::List(kind) => self.list_failed(serial, kind, why, now),
            Private::Listen => self.listen_ended(serial, key, true, now),
            Private::Task(list) => self.task_listed(list, key, None, now),
            Private::Ping | Private::Told => {}
        }
    }

    pub(super) fn opening_refused(&mut self, serial: u64, private: Private, words: &str, now: Instant) {
        let Some(connection) = self.links.get_mut(&serial) else { return };
        if !matches!(connection.phase, Phase::Opening { .. }) {
            return;
        }
        let link = connection.link;
        let is_first = connection.refused.is_none();
        let choice = self.settings_of(link).map(|settings| settings.era);
        let Some(connection) = self.links.get_mut(&serial) else { return };
        if choice == Some(EraChoice::Auto) && is_first {
            connection.refused = Some(words.to_owned());
            let other = if private == Private::Initialize { Era::Stateless } else { Era::Handshake };
            return self.ask_opening(serial, other, now);
        }
        let words = match connection.refused.take() {
            // What it said to `initialize` is what people know how to look for.
            Some(first) if private == Private::Discover => first,
            _ => words.to_owned(),
        };
        self.part(serial, How::HandshakeRefused(words), true, now);
    }

    fn opened(&mut self, serial: u64, private: Private, result: Raw<'_>, now: Instant) {
        let Some(connection) = self.links.get_mut(&serial) else { return };
        if !matches!(connection.phase, Phase::Opening { .. }) {
            return;
        }
        let picked = pick(result, ["capabilities", "instructions", "protocolVersion", "supportedVersions"]);
        let Some([capabilities, instructions, version, versions]) = picked else {
            return self.opening_refused(serial, private, "an answer that is no object", now);
        };
        let (backend, place) = (connection.link.backend, connection.place);
        connection.has = has(capabilities);
        let eras = match private {
            Private::Initialize => {
                connection.version = version.and_then(Raw::text).unwrap_or_default();
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
                if !versions.iter().any(|version| version == STATELESS_VERSION) {
                    let words = format!("it knows {} and not {STATELESS_VERSION}", versions.join(", "));
                    return self.opening_refused(serial, private, &words, now);
                }
                connection.version = STATELESS_VERSION.into();
                let handshake = versions.iter().any(|version| HANDSHAKE_VERSIONS.contains(&version.as_str()));
                Eras { handshake, stateless: true }
            }
        };
        if let Some(owner) = self.owners.get_mut(&backend) {
            let trial = owner.trial.as_deref_mut().filter(|trial| trial.serial == serial);
            let (settings, known) = match trial {
                Some(trial) => (&trial.settings, &mut trial.eras),
                None => (&owner.settings, &mut owner.eras),
            };
            // A second link learns nothing new of what the first one knows.
            let is_http = matches!(settings.kind, Kind::Http { .. });
            if place.seat != Seat::Second || known.is_none() {
                // A process that speaks both is asked for one of them; only over HTTP are there two links, and only where
                // nobody chose.
                let may_be_two = is_http && settings.era == EraChoice::Auto;
                let eras = Eras { handshake: eras.handshake && (may_be_two || !eras.stateless), ..eras };
                *known = Some(eras);
            }
            let connection = self.links.get_mut(&serial).expect("found above");
            let capabilities = capabilities.map_or(b"{}" as &[u8], |raw| raw.get().as_bytes());
            connection.fetch.offer.capabilities = Bytes::copy_from_slice(capabilities);
            connection.fetch.offer.instructions = instructions.and_then(Raw::text);
        }
        if private == Private::Initialize {
            self.tell_link(serial, message::line(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#.into()));
        }
        // One that is on trial takes over when its lists are read.
        if self.trial_of(serial).is_none() {
            self.place_filled(serial, now);
            self.restore(serial, now);
        }
        self.fetch_all(serial, now);
    }
}

fn has(capabilities: Option<Raw<'_>>) -> Has {
    let Some(capabilities) = capabilities else { return Has::default() };
    let names = ["tools", "prompts", "resources", "logging", "completions", "tasks"];
    let [tools, prompts, resources, logging, completions, tasks] = pick(capabilities, names).unwrap_or_default();
    let is_there = |raw: Option<Raw<'_>>| raw.is_some_and(|raw| raw.get().starts_with('{'));
    let subscribe = resources.and_then(|resources| pick(resources, ["subscribe"])).and_then(|[flag]| flag);
    Has {
        tools: is_there(tools),
        prompts: is_there(prompts),
        resources: is_there(resources),
        subscribe: subscribe.is_some_and(|flag| flag.get() == "true"),
        logging: is_there(logging),
        completions: is_there(completions),
        tasks: is_there(tasks),
    }
}
