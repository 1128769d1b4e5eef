//! The client's side of the conversation: its era, how it was opened, and what it has set that every later server is to
//! have set again. The other modules of the relay decide which server gets it, and when.

use std::collections::BTreeMap;

use bytes::Bytes;

use serde::{Deserialize, Serialize};

use super::{
    endpoint::Granted,
    requests::Class,
    saved::{SavedConversation, SavedEra, SavedOpening},
};
use crate::{
    capabilities::Capabilities,
    mcp::{meta, method, revision},
    message::{
        self, Edit, Id, Message, Params, Raw, VERSIONS_MAX, line, pick, pick_text, quote, request_line, splice, text,
    },
    saved::Octets,
};

#[derive(Debug)]
pub(super) struct Conversation {
    era: Era,
    /// The client is gone, or the server left on purpose and outlast leaves with it.
    is_over: bool,
    /// No server came up at first, and the client was told so.
    is_broken: bool,
}

/// The two kinds of MCP. The client's first request decides; until then the era is `Handshake`, unopened.
#[derive(Debug)]
enum Era {
    Handshake(Handshake),
    Stateless(Stateless),
}

#[derive(Debug, Default)]
struct Handshake {
    phase: Phase,
    /// The last handshake that was answered.
    opening: Option<Opening>,
    /// `initialized`, the client's bytes, and its place among what the client said.
    initialized: Option<(u64, Bytes)>,
    /// The last `logging/setLevel` that a server accepted.
    level: Option<Bytes>,
    /// The `resources/subscribe` of each URI.
    subscriptions: BTreeMap<String, Bytes>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Phase {
    #[default]
    Unopened,
    /// `initialize` was received; `initialized` was not.
    Opening,
    Ready,
}

/// The client's handshake, as each new child gets it.
#[derive(Debug)]
pub(super) struct Opening {
    /// `initialize`, the client's bytes.
    pub(super) line: Bytes,
    /// The version that the client was told.
    pub(super) version: String,
    /// The version that the last child answered with; another one only after an opening of our own.
    pub(super) spoken: String,
    pub(super) told: Capabilities,
    pub(super) answered_by: AnsweredBy,
}

/// Where the answer to an opening came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum AnsweredBy {
    Server,
    /// Outlast, as no server could.
    Outlast,
    /// The cache of the last run.
    Cache,
}

#[derive(Debug)]
struct Stateless {
    /// `_meta` of the latest request, as JSON.
    meta: Option<String>,
    /// All that the client has asked is `server/discover`: it may still fall back to `initialize`.
    is_probe: bool,
    probe: Probe,
    /// A child has answered a request.
    is_served: bool,
    /// The last discover result that reached the client, as JSON.
    discovered: Option<String>,
    /// What it promised.
    told: Option<Capabilities>,
}

/// What a child did with the client's probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Probe {
    Unanswered,
    /// The child got none, or does not speak the stateless era: it can still be initialised.
    Harmless,
    /// It may be locked to the stateless era.
    Locked,
}

impl Stateless {
    fn new(is_probe: bool) -> Stateless {
        Stateless { meta: None, is_probe, probe: Probe::Harmless, is_served: false, discovered: None, told: None }
    }

    fn version(&self) -> Option<String> {
        pick_text(Raw::parse(self.meta.as_deref()?)?, meta::PROTOCOL_VERSION)
    }
}

/// A handshake that a child answered as it should.
pub(super) struct Accepted {
    pub(super) capabilities: Capabilities,
    /// What the user should know of it.
    pub(super) note: Option<String>,
}

/// What helps when the new server and the client have no protocol version in common.
pub(super) const RECONNECT: &str = "reconnect the client to use the new server";

impl Default for Conversation {
    fn default() -> Self {
        Conversation { era: Era::Handshake(Handshake::default()), is_over: false, is_broken: false }
    }
}

impl Conversation {
    fn handshake(&self) -> Option<&Handshake> {
        match &self.era {
            Era::Handshake(handshake) => Some(handshake),
            Era::Stateless(_) => None,
        }
    }

    fn stateless(&self) -> Option<&Stateless> {
        match &self.era {
            Era::Stateless(stateless) => Some(stateless),
            Era::Handshake(_) => None,
        }
    }

    fn stateless_mut(&mut self) -> Option<&mut Stateless> {
        match &mut self.era {
            Era::Stateless(stateless) => Some(stateless),
            Era::Handshake(_) => None,
        }
    }

    // ---- saved state ----------------------------------------------------------------------------

    /// A conversation that is over is not saved.
    pub(super) fn save(&self) -> SavedConversation {
        let octets = |line: &Bytes| Octets::of(line);
        let era = match &self.era {
            Era::Handshake(handshake) => SavedEra::Handshake {
                phase: handshake.phase,
                opening: handshake.opening.as_ref().map(|opening| SavedOpening {
                    line: octets(&opening.line),
                    version: opening.version.clone(),
                    spoken: opening.spoken.clone(),
                    told: opening.told,
                    answered_by: opening.answered_by,
                }),
                initialized: handshake.initialized.as_ref().map(|(seq, line)| (*seq, octets(line))),
                level: handshake.level.as_ref().map(octets),
                subscriptions: handshake.subscriptions.iter().map(|(uri, line)| (uri.clone(), octets(line))).collect(),
            },
            Era::Stateless(stateless) => SavedEra::Stateless {
                meta: stateless.meta.clone(),
                is_probe: stateless.is_probe,
                probe: stateless.probe,
                is_served: stateless.is_served,
                discovered: stateless.discovered.clone(),
                told: stateless.told,
            },
        };
        SavedConversation { era, is_broken: self.is_broken }
    }

    pub(super) fn restore(saved: SavedConversation) -> Conversation {
        let era = match saved.era {
            SavedEra::Handshake { phase, opening, initialized, level, subscriptions } => Era::Handshake(Handshake {
                phase,
                opening: opening.map(|opening| Opening {
                    line: opening.line.bytes(),
                    version: opening.version,
                    spoken: opening.spoken,
                    told: opening.told,
                    answered_by: opening.answered_by,
                }),
                initialized: initialized.map(|(seq, line)| (seq, line.bytes())),
                level: level.map(Octets::bytes),
                subscriptions: subscriptions.into_iter().map(|(uri, line)| (uri, line.bytes())).collect(),
            }),
            SavedEra::Stateless { meta, is_probe, probe, is_served, discovered, told } => {
                Era::Stateless(Stateless { meta, is_probe, probe, is_served, discovered, told })
            }
        };
        Conversation { era, is_over: false, is_broken: saved.is_broken }
    }

    // ---- states ---------------------------------------------------------------------------------

    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    pub(super) fn end(&mut self) {
        self.is_over = true;
    }

    pub(super) fn is_stateless(&self) -> bool {
        matches!(self.era, Era::Stateless(_))
    }

    /// The client speaks the stateless era, and not only to find out whether the server does.
    pub(super) fn is_past_probe(&self) -> bool {
        self.stateless().is_some_and(|stateless| !stateless.is_probe)
    }

    /// The client has said nothing yet that decides the era.
    pub(super) fn is_unopened(&self) -> bool {
        self.handshake().is_some_and(|handshake| handshake.phase == Phase::Unopened)
    }

    pub(super) fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// No server came up, and the client is told so.
    pub(super) fn mark_broken(&mut self) {
        self.is_broken = true;
    }

    /// A request of the client's. It may decide the era; the probe is returned if an `initialize` ends it.
    pub(super) fn hear(&mut self, method: &str, params: &Params<'_>) -> Option<Probe> {
        let meta = params.meta();
        let is_stateless = |meta: Raw<'_>| pick(meta, [meta::PROTOCOL_VERSION]).is_some_and(|[it]| it.is_some());
        let mut ended = None;
        match &mut self.era {
            Era::Handshake(handshake) => match (handshake.phase, method) {
                (_, method::INITIALIZE) => handshake.phase = Phase::Opening,
                (Phase::Unopened, method::DISCOVER) => self.era = Era::Stateless(Stateless::new(true)),
                (Phase::Unopened, _) if meta.is_some_and(is_stateless) => {
                    self.era = Era::Stateless(Stateless::new(false));
                }
                _ => {}
            },
            Era::Stateless(stateless) if stateless.is_probe => match method {
                method::INITIALIZE => {
                    ended = Some(stateless.probe);
                    self.era = Era::Handshake(Handshake { phase: Phase::Opening, ..Handshake::default() });
                }
                method::DISCOVER => {}
                _ => stateless.is_probe = !meta.is_some_and(is_stateless),
            },
            Era::Stateless(_) => {}
        }
        if let (Era::Stateless(stateless), Some(meta)) = (&mut self.era, meta) {
            // The buffer is used again: this happens for each request.
            let kept = stateless.meta.get_or_insert_default();
            kept.clear();
            kept.push_str(meta.get());
        }
        ended
    }

    /// What the client was promised in its opening. In the stateless era each subscription says for itself.
    pub(super) fn told(&self) -> Capabilities {
        match &self.era {
            Era::Handshake(handshake) => handshake.opening.as_ref().map(|opening| opening.told).unwrap_or_default(),
            Era::Stateless(stateless) => match stateless.told {
                Some(told) => told,
                None if self.is_broken => Capabilities::ALL,
                None => Capabilities::default(),
            },
        }
    }

    /// Whether a new child gets a handshake of ours before it serves. `from_cache`: the client was answered from the cache.
    pub(super) fn is_replayed(&self, from_cache: bool) -> bool {
        match &self.era {
            Era::Handshake(handshake) => handshake.opening.is_some(),
            Era::Stateless(stateless) => {
                stateless.is_served
                    || (self.is_broken && !stateless.is_probe)
                    || (from_cache && (stateless.discovered.is_some() || !stateless.is_probe))
            }
        }
    }

    /// We opened the conversation, and told of lists with nothing in them.
    pub(super) fn is_opened_by_us(&self) -> bool {
        match &self.era {
            Era::Handshake(Handshake { opening, .. }) => {
                opening.as_ref().is_some_and(|opening| opening.answered_by != AnsweredBy::Server)
            }
            Era::Stateless(_) => true,
        }
    }

    /// The protocol version that was agreed on, or that the client speaks: the name of its entry in the cache.
    pub(super) fn revision(&self) -> Option<String> {
        match &self.era {
            Era::Handshake(handshake) => handshake.opening.as_ref().and_then(|opening| version_of(&opening.line)),
            Era::Stateless(stateless) => stateless.version(),
        }
    }

    // ---- the era with a handshake ---------------------------------------------------------------

    pub(super) fn opening(&self) -> Option<&Opening> {
        self.handshake()?.opening.as_ref()
    }

    /// An `initialize` was answered. What the client sent after an earlier opening, it has not sent after this one.
    pub(super) fn opened(&mut self, opening: Opening) {
        if let Era::Handshake(handshake) = &mut self.era {
            if handshake.phase == Phase::Opening {
                handshake.initialized = None;
            }
            handshake.opening = Some(opening);
        }
    }

    /// The last open `initialize` came to nothing: the client is where it was before.
    pub(super) fn opening_failed(&mut self) {
        if let Era::Handshake(handshake) = &mut self.era
            && handshake.phase != Phase::Unopened
        {
            handshake.phase = if handshake.opening.is_some() { Phase::Ready } else { Phase::Unopened };
        }
    }

    /// The client said `initialized`.
    pub(super) fn initialized_heard(&mut self, seq: u64, line: &[u8]) {
        if let Era::Handshake(handshake) = &mut self.era {
            handshake.initialized = Some((seq, Bytes::copy_from_slice(line)));
            if handshake.phase == Phase::Opening {
                handshake.phase = Phase::Ready;
            }
        }
    }

    pub(super) fn initialized(&self) -> Option<&(u64, Bytes)> {
        self.handshake()?.initialized.as_ref()
    }

    /// `initialized`, if it came before the answer to `initialize`: both go to the next child.
    pub(super) fn early_initialized(&self) -> Option<&(u64, Bytes)> {
        let handshake = self.handshake()?;
        let is_early = handshake.opening.is_none() && handshake.phase == Phase::Ready;
        handshake.initialized.as_ref().filter(|_| is_early)
    }

    /// What the client has set and every later child is to have set again.
    pub(super) fn note_granted(&mut self, class: &Class, line: &[u8]) {
        let Era::Handshake(handshake) = &mut self.era else { return };
        match class {
            Class::SetLevel => handshake.level = Some(Bytes::copy_from_slice(line)),
            Class::Subscribe(uri) => drop(handshake.subscriptions.insert(uri.clone(), Bytes::copy_from_slice(line))),
            Class::Unsubscribe(uri) => drop(handshake.subscriptions.remove(uri)),
            _ => {}
        }
    }

    /// The client's requests that set it, for a child with these capabilities, and what each restores.
    pub(super) fn granted(&self, capabilities: Capabilities) -> Vec<(Bytes, Granted)> {
        let Some(handshake) = self.handshake() else { return Vec::new() };
        let level =
            handshake.level.iter().filter(|_| capabilities.logging).map(|line| (line.clone(), Granted::LogLevel));
        let subscriptions = handshake.subscriptions.values().filter(|_| capabilities.subscribe);
        level.chain(subscriptions.map(|line| (line.clone(), Granted::Subscription))).collect()
    }

    // ---- the stateless era ----------------------------------------------------------------------

    /// The client's probe goes to a child.
    pub(super) fn probe_sent(&mut self) {
        if let Some(stateless) = self.stateless_mut() {
            stateless.probe = Probe::Unanswered;
        }
    }

    pub(super) fn probe_answered(&mut self, probe: Probe) {
        if let Some(stateless) = self.stateless_mut() {
            stateless.probe = probe;
        }
    }

    /// A child serves. `at_first`: the client was told nothing of what went wrong before.
    pub(super) fn served(&mut self, at_first: bool) {
        if let Some(stateless) = self.stateless_mut() {
            stateless.is_served = true;
        }
        self.is_broken &= !at_first;
    }

    pub(super) fn discovered(&self) -> Option<&str> {
        self.stateless()?.discovered.as_deref()
    }

    /// The client gets a discover result that promises this; `result` if it is not too large to keep.
    pub(super) fn note_discovered(&mut self, told: Capabilities, result: Option<&str>) {
        if let Some(stateless) = self.stateless_mut() {
            stateless.told = Some(told);
            if let Some(result) = result {
                stateless.discovered = Some(result.to_owned());
            }
        }
    }

    /// `_meta` for a request of our own: nothing waits for its progress or its log.
    pub(super) fn own_meta(&self) -> String {
        let mut kept = Vec::new();
        let latest = self.stateless().and_then(|stateless| Raw::parse(stateless.meta.as_deref()?));
        latest.and_then(|latest| {
            latest.for_each_member(|name, value| {
                if !matches!(name.text().as_deref(), Some(meta::PROGRESS_TOKEN | meta::LOG_LEVEL)) {
                    kept.push(format!("{}:{}", name.get(), value.get()));
                }
            })
        });
        format!("{{{}}}", kept.join(","))
    }

    // ---- our own requests to a child ------------------------------------------------------------

    /// The private handshake that a new child gets.
    pub(super) fn replay(&self, id: &Id) -> Bytes {
        match &self.era {
            Era::Handshake(handshake) => {
                let opening = handshake.opening.as_ref().expect("only an opened client is replayed");
                let line = with_id(&opening.line, id);
                // A server that has learned a newer revision since is asked for the one that the client was told.
                let is_cached = opening.answered_by == AnsweredBy::Cache;
                if is_cached { with_version(&line, &opening.version) } else { line }
            }
            Era::Stateless(_) => self.discover(id),
        }
    }

    /// A request that every server of this era answers without work.
    pub(super) fn ping(&self, id: &Id) -> Bytes {
        match &self.era {
            Era::Handshake(_) => line(format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{}"}}"#, method::PING)),
            Era::Stateless(_) => self.discover(id),
        }
    }

    fn discover(&self, id: &Id) -> Bytes {
        request_line(id, method::DISCOVER, &format!(r#""_meta":{}"#, self.own_meta()))
    }

    /// The answer of a child to our private handshake: accepted, or why it is not.
    pub(super) fn check_replay(&mut self, result: Option<Raw<'_>>, error: Option<Raw<'_>>) -> Result<Accepted, String> {
        match (result, &mut self.era) {
            (Some(result), Era::Handshake(handshake)) => {
                check_initialize(handshake.opening.as_mut().expect("only an opened client is replayed"), result)
            }
            (Some(result), Era::Stateless(stateless)) => check_discover(stateless, result),
            (None, era) => Err(refusal(error, matches!(era, Era::Stateless(_)))),
        }
    }
}

fn check_initialize(opening: &mut Opening, result: Raw<'_>) -> Result<Accepted, String> {
    let [version, capabilities] = pick(result, ["protocolVersion", "capabilities"]).unwrap_or_default();
    let speaks = version.and_then(text).unwrap_or_default();
    let told = &opening.version;
    let mut note = None;
    if speaks != *told {
        // Revisions are dates, so the older one is the smaller text.
        let is_older = speaks < *told && revision::HANDSHAKE.contains(&speaks.as_str());
        if opening.answered_by == AnsweredBy::Server || !is_older {
            return Err(format!("speaks {speaks}, the client was promised {told}: {RECONNECT}"));
        }
        note = Some(format!("The server uses MCP revision {speaks}; the client was told {told}: reconnect the client"));
    }
    opening.spoken = speaks;
    Ok(Accepted { capabilities: Capabilities::parse(capabilities, |_| true), note })
}

fn check_discover(stateless: &Stateless, result: Raw<'_>) -> Result<Accepted, String> {
    let [versions, capabilities] = pick(result, ["supportedVersions", "capabilities"]).unwrap_or_default();
    let (versions, _) = versions.and_then(|list| list.first_elements(VERSIONS_MAX)).unwrap_or_default();
    let versions: Vec<String> = versions.into_iter().filter_map(text).collect();
    let version = stateless.version().unwrap_or_default();
    if versions.contains(&version) {
        Ok(Accepted { capabilities: Capabilities::parse(capabilities, |_| true), note: None })
    } else {
        Err(format!("speaks {}, the client speaks {version}: {RECONNECT}", versions.join(", ")))
    }
}

fn refusal(error: Option<Raw<'_>>, stateless: bool) -> String {
    let Some(error) = error else { return "answered with neither a result nor an error".into() };
    let said = error_message(error);
    match (stateless, error_code(error)) {
        (true, Some(-32022)) => format!("speaks another version ({said}): {RECONNECT}"),
        (true, _) => format!("refused `server/discover`, so it does not speak the client's era: {said}"),
        (false, _) => format!("refused the handshake: {said}"),
    }
}

/// The code of a JSON-RPC error.
pub(super) fn error_code(error: Raw<'_>) -> Option<i64> {
    pick(error, ["code"])?[0]?.get().parse().ok()
}

/// The message of a JSON-RPC error.
pub(super) fn error_message(error: Raw<'_>) -> String {
    pick_text(error, "message").unwrap_or_else(|| quote(error.get()))
}

/// The protocol version that an `initialize` asks for.
pub(super) fn version_of(line: &[u8]) -> Option<String> {
    match message::parse(line).ok()? {
        Message::Request { params, .. } => params.protocol_version().and_then(text),
        _ => None,
    }
}

/// The client's bytes under another id.
pub(super) fn with_id(line: &Bytes, id: &Id) -> Bytes {
    match message::parse(line) {
        Ok(Message::Request { id: old, .. }) => {
            let at = old.place(line).expect("a request has an id");
            splice(line, vec![Edit { at, with: id.to_string() }])
        }
        _ => line.clone(),
    }
}

/// An `initialize` that asks for another protocol version.
fn with_version(line: &Bytes, version: &str) -> Bytes {
    match message::parse(line) {
        Ok(Message::Request { params, .. }) => match params.protocol_version() {
            Some(asked) => splice(line, vec![Edit::replace(line, asked, quote(version))]),
            None => line.clone(),
        },
        _ => line.clone(),
    }
}
