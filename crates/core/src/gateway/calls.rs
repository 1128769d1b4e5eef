//! Requests under way: from the moment one is let through until it is answered, once.

use std::borrow::Cow;

use super::*;
use crate::message::{self, Edits, Params, Raw, RawId, patch, pick};

use guard::{Health, Pass};
use opening::Private;
use words::Failure;

/// To whom an answer is owed.
#[derive(Debug, Clone)]
pub(super) struct Whom {
    pub client: Client,
    pub id: Id,
    /// The id as the client wrote it.
    pub raw: Box<str>,
    pub era: Era,
    pub batch: Option<u64>,
}

/// What a request is for, as far as we treat it differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    Tool,
    Prompt,
    Read,
    Complete,
    /// About a task, or what a client asks of its only backend.
    Other,
    /// Ours.
    Private(Private),
}

#[derive(Debug)]
pub(super) struct Call {
    /// Nobody: it is ours.
    pub whom: Option<Whom>,
    pub what: What,
    pub method: Cow<'static, str>,
    pub place: PlaceKey,
    /// Where it was sent; nowhere while it is held.
    pub link: Option<u64>,
    /// As clients see it: a tool's or prompt's name.
    pub shown: Option<Rc<str>>,
    /// As its backend calls it, as JSON.
    pub own: Option<Rc<str>>,
    /// Its bytes, if it is held or may be asked again.
    pub message: Option<Bytes>,
    /// The progress token as the client wrote it.
    pub token: Option<Box<str>>,
    pub began: Instant,
    pub due: Option<Instant>,
    /// No progress and no question moves `due` beyond this.
    pub due_max: Instant,
    /// How often its backend has asked for input.
    pub rounds: u32,
    /// Whether its backend may be asked twice.
    pub repeatable: bool,
    pub resent: bool,
    /// How often it was sent again because it had not reached its backend, or because the backend asked for that.
    pub unsent_tries: u32,
    /// `message` is not the client's, but what a link of that era was told in vain.
    pub told_in: Option<Era>,
    pub pass: Option<Pass>,
    /// It makes a task.
    pub task: bool,
    /// What a client of the stateless era said of itself with it.
    pub says: Says,
    /// A backend of the handshake era asked something meanwhile; the client's next try brings the answers.
    pub parked: Option<Box<asks::Parked>>,
    /// A stateless backend asked something; the client's answers are gathered for our next try.
    pub inputs: Option<Box<asks::Inputs>>,
}

impl Call {
    /// It is sent: how long it may take from here on. All its rounds of questions share one `call_max`.
    pub fn sent(&mut self, settings: &Backend, now: Instant) -> Instant {
        if self.rounds == 0 {
            self.due_max = now + settings.call_max;
        }
        let due = (now + settings.call_timeout).min(self.due_max);
        self.due = Some(due);
        due
    }

    pub fn due(&self) -> Option<Instant> {
        let ask_at = self.parked.as_ref().and_then(|parked| parked.ask_at);
        self.due.into_iter().chain(ask_at).min()
    }

    /// Its client had an answer, and comes back with another try; until then it is owed nothing.
    pub fn is_parked(&self) -> bool {
        self.parked.as_ref().is_some_and(|parked| parked.is_waiting())
    }

    pub fn is_of(&self, client: Client) -> bool {
        self.whom.as_ref().is_some_and(|whom| whom.client == client)
    }
}

/// The answers to a batch, until each is there.
#[derive(Debug)]
pub(super) struct Batch {
    pub client: Client,
    /// The first request in it.
    pub about: Option<Id>,
    pub left: usize,
    pub answers: Vec<Bytes>,
}

impl Gateway {
    /// Sends a call where it belongs, or has it wait until it can be sent.
    pub(super) fn dispatch(
        &mut self,
        call: Box<Call>,
        message: &[u8],
        id: RawId<'_>,
        params: &Params<'_>,
        now: Instant,
    ) {
        let key = self.number();
        match self.serving(call.place).filter(|_| !self.must_wait(call.place, call.says, now)) {
            Some(serial) => {
                let wants_logs = call.says.level.is_some();
                self.calls.insert(key, call);
                if wants_logs {
                    self.calls.get_mut(&key).expect("just put there").link = Some(serial);
                    self.relevel_link(serial, now);
                }
                self.forward(key, serial, message, id, params, now);
            }
            None => self.hold(key, call, message, now),
        }
    }

    /// The link that takes calls for a place.
    pub(super) fn serving(&self, place: PlaceKey) -> Option<u64> {
        let serial = self.places.get(&place)?.current()?;
        self.links.get(&serial)?.is_ready().then_some(serial)
    }

    /// Waits for its place to be filled, bounded in time and number.
    pub(super) fn hold(&mut self, key: u64, mut call: Box<Call>, message: &[u8], now: Instant) {
        if self.stopping.is_some() {
            let failure = Failure::stopping(self.owner_name(call.place.backend));
            return self.fail(*call, failure, now);
        }
        let (hold, held_max) = (self.settings.limits.hold, self.settings.limits.held_max);
        let Some(place) = self.places.get_mut(&call.place) else {
            let failure = Failure::removed(self.owner_name(call.place.backend));
            return self.fail(*call, failure, now);
        };
        let full = place.held.len() >= held_max;
        if matches!(place.state, places::State::GivenUp { .. }) || place.is_unauthorized(now) {
            let failure = self.failure_of_place(call.place, now);
            return self.fail(*call, failure, now);
        }
        if full {
            let failure = Failure::hold_full(self.owner_name(call.place.backend), held_max);
            return self.fail(*call, failure, now);
        }
        let bytes = call.message.as_ref().map_or(message.len(), Bytes::len);
        if call.whom.as_ref().is_some_and(|whom| self.holds_too_much(whom.client, bytes)) {
            let failure = Failure::held_bytes(self.owner_name(call.place.backend), HELD_BYTES_MAX);
            return self.fail(*call, failure, now);
        }
        let Some(place) = self.places.get_mut(&call.place) else { return };
        let due = *call.due.get_or_insert(now + hold);
        if call.message.is_none() {
            call.message = Some(Bytes::copy_from_slice(message));
        }
        call.link = None;
        place.held.push_back(key);
        if let places::State::Idle = place.state {
            place.state = places::State::Waiting { at: now };
            self.starts_due = true;
        }
        self.calls.insert(key, call);
        self.wake_by(due);
    }

    /// Whether so many bytes more are too many of one client: of all its sessions, which have one name.
    pub(super) fn holds_too_much(&self, client: Client, more: usize) -> bool {
        let Some(name) = self.guests.get(&client).map(|guest| &guest.who.name) else { return false };
        let is_its = |whom: &Whom| self.guests.get(&whom.client).is_some_and(|guest| guest.who.name == *name);
        let held = self.calls.values().filter(|call| call.link.is_none());
        let held = held.filter(|call| call.whom.as_ref().is_some_and(&is_its)).filter_map(|call| call.message.as_ref());
        let waiting = self.gathering.iter().filter(|waiting| is_its(&waiting.whom));
        let waiting = waiting.filter_map(|waiting| match &waiting.wants {
            lists::Wants::Request { message, .. } => Some(message),
            lists::Wants::List(_) => None,
        });
        held.chain(waiting).map(Bytes::len).sum::<usize>().saturating_add(more) > HELD_BYTES_MAX
    }

    /// What waited for a place goes to the link that fills it, in the order it came.
    pub(super) fn release(&mut self, place: PlaceKey, now: Instant) {
        let Some(serial) = self.serving(place) else { return };
        let mut held = self.places.get_mut(&place).map(|place| mem::take(&mut place.held)).unwrap_or_default();
        while let Some(key) = held.pop_front() {
            let Some(call) = self.calls.get(&key) else { continue };
            if self.must_wait(place, call.says, now) {
                held.push_front(key);
                break;
            }
            if let Some(failure) = self.refused_by_now(call, now) {
                let call = self.calls.remove(&key).expect("found above");
                self.fail(*call, failure, now);
                continue;
            }
            let Some(call) = self.calls.get_mut(&key) else { continue };
            let Some(message) = call.message.clone() else { continue };
            if !call.repeatable {
                call.message = None;
            }
            if let Some(era) = call.told_in.take() {
                self.tell_again(key, serial, era, message, now);
                continue;
            }
            match message::parse(&message) {
                Ok(message::Message::Request { id, params, .. }) => {
                    self.forward(key, serial, &message, id, &params, now);
                }
                _ => unreachable!("only requests are held"),
            }
        }
        if let Some(place) = self.places.get_mut(&place) {
            place.held = held;
        }
    }

    /// The one way of a client's request to a backend: its id and progress token become ours, its name the backend's.
    pub(super) fn forward(
        &mut self,
        key: u64,
        serial: u64,
        message: &[u8],
        id: RawId<'_>,
        params: &Params<'_>,
        now: Instant,
    ) {
        let (Some(connection), Some(call)) = (self.links.get_mut(&serial), self.calls.get_mut(&key)) else { return };
        let settings = &self.owners[&call.place.backend].settings;
        connection.in_flight += 1;
        connection.is_probe = false;
        connection.last_used = now;
        call.link = Some(serial);
        let due = call.sent(settings, now);
        let is_translated = connection.era == Era::Stateless
            && call.whom.as_ref().is_some_and(|whom| whom.era == Era::Handshake)
            && matches!(call.what, What::Tool | What::Prompt | What::Read);
        // Over HTTP a request may turn out never to have left.
        let may_stay = matches!(settings.kind, Kind::Http { .. });
        if (call.repeatable || is_translated || may_stay) && call.message.is_none() && message.len() <= KEPT_BYTES_MAX {
            // A copy: a slice would keep the whole read buffer alive.
            call.message = Some(Bytes::copy_from_slice(message));
        }

        let number = key.to_string();
        let mut edits = Edits::default();
        if let Some(at) = id.place(message) {
            edits.push(at, &number);
        }
        let named = match call.what {
            What::Complete => {
                params.reference().and_then(|reference| pick(reference, ["name"])).and_then(|[name]| name)
            }
            _ => params.name(),
        };
        if let (Some(own), Some(name)) = (&call.own, named) {
            edits.push(message::place(message, name), own);
        }
        let token = params.meta().and_then(|meta| pick(meta, ["progressToken"])).and_then(|[token]| token);
        call.token = token.map(|token| token.get().into());
        // A server of the handshake era may refuse what says that it is of the other.
        let is_from_stateless = call.whom.as_ref().is_some_and(|whom| whom.era == Era::Stateless);
        let plain = match params.meta() {
            Some(meta) if is_from_stateless && connection.era == Era::Handshake => {
                words::meta_of_handshake(meta, &number).map(|plain| (message::place(message, meta), plain))
            }
            _ => None,
        };
        match (&plain, token) {
            (Some((at, plain)), _) => edits.push(at.clone(), plain),
            (None, Some(token)) => edits.push(message::place(message, token), &number),
            (None, None) => {}
        }
        let meta = match (call.whom.as_ref().map(|whom| (whom.era, whom.client)), connection.era) {
            (Some((Era::Handshake, client)), Era::Stateless) => words::meta_members(self.guests.get(&client)),
            _ => String::new(),
        };
        let added;
        if !meta.is_empty() {
            added = words::add_meta(message, params, &meta);
            edits.push(added.0.clone(), &added.1);
        }
        let told = edits.apply(message);
        let link = connection.link;
        self.out.push(Action::TellLink { link, message: told });
        self.wake_by(due);
    }

    /// A backend's answer to something that was asked of this link.
    pub(super) fn answered(
        &mut self,
        serial: u64,
        message: &[u8],
        id: RawId<'_>,
        result: Option<Raw<'_>>,
        error: Option<Raw<'_>>,
        now: Instant,
    ) {
        let key = match id.parse() {
            Some(Id::Integer(number)) => u64::try_from(number).ok(),
            _ => None,
        };
        // An answer to a request that was cancelled or late, or to none at all, is nobody's.
        let is_its_own = |key: &u64| self.calls.get(key).is_some_and(|call| call.link == Some(serial));
        let Some(key) = key.filter(is_its_own) else {
            return self.lay(serial, key);
        };
        // `"error": null` beside a result means no error to most readers.
        let is_regular = error.is_none() || result.is_none() && error.is_some_and(words::is_error_object);
        let (result, error) = match (result, error) {
            (Some(result), Some(error)) if error.get() == "null" => (Some(result), None),
            (None, Some(error)) if !is_regular => {
                let what = words::cut(error.get(), 100);
                return self.lose_request(serial, key, true, &format!("its error is not one of JSON-RPC: {what}"), now);
            }
            parts => parts,
        };
        let call = &self.calls[&key];
        if let What::Private(private) = call.what {
            self.calls.remove(&key);
            return self.private_answered(serial, private, key, result, error, now);
        }
        self.served(serial);
        let call = &self.calls[&key];
        if let Some(whom) = &call.whom
            && whom.era == Era::Handshake
            && self.links[&serial].era == Era::Stateless
            && let Some(result) = result
            && self.input_required(key, result, now)
        {
            return;
        }
        if self.calls[&key].parked.is_some() && self.keep_answer(key, message, now) {
            return;
        }
        let call = self.calls.remove(&key).expect("found above");
        self.drop_asks_of(key, &call, "the call that this was for is over");
        self.call_over(serial, now);
        let Some(whom) = &call.whom else { return };

        let failed = error.is_some() || call.what == What::Tool && result.is_some_and(is_error);
        if (call.task || whom.era == Era::Stateless && call.what == What::Tool)
            && let Some(result) = result
            && !self.note_task(&call, serial, result)
        {
            let name = self.owner_name(call.place.backend);
            let failure = Failure::same_task(name);
            self.refuse(whom, false, &failure);
            return self.called(&call, failure.outcome, now);
        }
        // A server with a handshake cannot know what this one request declared; what it lacked has an error of its own.
        if failed
            && whom.era == Era::Stateless
            && let Some(capability) = result.or(error).and_then(words::undeclared_in)
        {
            let name = self.owner_name(call.place.backend);
            let words = format!("The backend `{name}` needs the client capability `{capability}` for this.");
            let data = format!(r#"{{"requiredCapabilities":{{"{capability}":{{}}}}}}"#);
            self.answer_error(whom, -32021, &words, Some(&data));
            return self.called(&call, Outcome::Failed, now);
        }
        if !is_regular {
            // Both a result and an error: the client gets one of them.
            match (error, result) {
                (Some(error), _) => {
                    let line = format!(r#"{{"jsonrpc":"2.0","id":{},"error":{}}}"#, whom.raw, error.get());
                    self.answer(whom, message::line(line), Said::Error);
                }
                (None, result) => self.answer_result(whom, result.map_or("{}", Raw::get)),
            }
            let outcome = if failed { Outcome::Failed } else { Outcome::Answered };
            return self.called(&call, outcome, now);
        }
        let mut edits = Edits::default();
        if let Some(at) = id.place(message) {
            edits.push(at, &whom.raw);
        }
        let added;
        if whom.era == Era::Stateless
            && self.links.get(&serial).is_none_or(|connection| connection.era == Era::Handshake)
        {
            added = result.and_then(|result| words::complete(message, result, call.what));
            if let Some((at, with)) = &added {
                edits.push(at.clone(), with);
            }
            if let Some((at, with)) = error.and_then(|error| words::error_for_stateless(message, error)) {
                edits.push(at, with);
            }
        }
        let told = edits.apply(message);
        self.answer(whom, told, if error.is_some() { Said::Error } else { Said::Result });
        let outcome = if failed { Outcome::Failed } else { Outcome::Answered };
        self.called(&call, outcome, now);
    }

    /// A link does what it is there for.
    fn served(&mut self, serial: u64) {
        if let Some(connection) = self.links.get_mut(&serial) {
            connection.answered = self.next;
            connection.is_doubted = false;
        }
    }

    /// One request less on a link: it may be waiting for that.
    pub(super) fn call_over(&mut self, serial: u64, now: Instant) {
        if let Some(connection) = self.links.get_mut(&serial) {
            connection.in_flight = connection.in_flight.saturating_sub(1);
            connection.last_used = now;
            if connection.in_flight == 0 {
                self.link_quiet(serial, now);
            }
        }
    }

    /// The one answer to a request.
    pub(super) fn answer(&mut self, whom: &Whom, message: Bytes, said: Said) {
        if let Some(guest) = self.guests.get_mut(&whom.client) {
            guest.in_flight = guest.in_flight.saturating_sub(1);
        } else {
            return;
        }
        match whom.batch {
            None => {
                self.out.push(Action::TellClient { client: whom.client, message, about: Some(whom.id.clone()), said })
            }
            Some(batch) => self.batch_answered(batch, Some(message)),
        }
    }

    pub(super) fn batch_answered(&mut self, key: u64, answer: Option<Bytes>) {
        let Some(batch) = self.batches.get_mut(&key) else { return };
        batch.answers.extend(answer);
        batch.left -= 1;
        if batch.left > 0 {
            return;
        }
        let batch = self.batches.remove(&key).expect("found above");
        if !batch.answers.is_empty() {
            let parts: Vec<&[u8]> = batch.answers.iter().map(|line| line.trim_ascii_end()).collect();
            let message = [b"[" as &[u8], &parts.join(&b","[..]), b"]\n"].concat().into();
            self.out.push(Action::TellClient { client: batch.client, message, about: batch.about, said: Said::Other });
        }
    }

    pub(super) fn answer_result(&mut self, whom: &Whom, result: &str) {
        let line = message::line(format!(r#"{{"jsonrpc":"2.0","id":{},"result":{result}}}"#, whom.raw));
        self.answer(whom, line, Said::Result);
    }

    pub(super) fn answer_error(&mut self, whom: &Whom, code: i32, words: &str, data: Option<&str>) {
        let line = message::error_line(&whom.raw, code, words, data);
        self.answer(whom, line, Said::Error);
    }

    /// Bad news for a call that is in no table any more.
    pub(super) fn fail(&mut self, call: Call, failure: Failure, now: Instant) {
        let Some(whom) = &call.whom else { return };
        if !call.is_parked() {
            self.refuse(whom, call.what == What::Tool && !call.task, &failure);
        }
        self.called(&call, failure.outcome, now);
    }

    /// A tool call's failure is a result, which the model gets to see, unless somebody decided that it must not be made.
    pub(super) fn refuse(&mut self, whom: &Whom, is_tool: bool, failure: &Failure) {
        if is_tool && failure.is_told_to_model {
            let result = failure.as_tool_result(whom.era);
            self.answer_result(whom, &result);
        } else {
            let data = failure.data().to_string();
            self.answer_error(whom, failure.code, &failure.message, Some(&data));
        }
    }

    /// For audit and metrics, on every way out; and for the breaker.
    pub(super) fn called(&mut self, call: &Call, outcome: Outcome, now: Instant) {
        // A backend that went away is not ill but gone: that is for its restarts, and who comes meanwhile waits for it.
        let is_there = |serial: u64| self.links.get(&serial).is_some_and(|connection| !connection.is_recorded);
        let is_gone = call.link.is_some_and(|serial| !is_there(serial));
        // Calls that break off together, as when the server behind HTTP is restarted, are one failure and not many in a row.
        let is_same_failure = outcome == Outcome::Lost
            && self.owners.get_mut(&call.place.backend).is_some_and(|owner| {
                let last = owner.lost_at.filter(|last| call.began <= *last);
                owner.lost_at = Some(now);
                last.is_some()
            });
        let health = match outcome {
            Outcome::Lost if is_same_failure => Health::Unknown,
            Outcome::Answered | Outcome::Failed => Health::Well,
            Outcome::Lost if is_gone => Health::Unknown,
            Outcome::Lost | Outcome::TimedOut => Health::Ill,
            _ => Health::Unknown,
        };
        let mut backend = None;
        let mut opened = false;
        if let Some(owner) = self.owners.get_mut(&call.place.backend) {
            backend = Some(owner.name.clone());
            opened = call.pass.is_some_and(|pass| owner.breaker.heard(pass, health, now));
            if call.whom.is_some() && health == Health::Well {
                owner.pace.note(call.began, now);
                self.pace.note(call.began, now);
            }
        }
        if opened {
            let name = backend.as_deref().unwrap_or_default();
            self.note(format!("{name}: too many failures in a row; its circuit is open"));
        }
        let Some(whom) = &call.whom else { return };
        let guest = self.guests.get(&whom.client).map(|guest| &guest.who);
        // A call that waits for its client's next try outlives the client that made it.
        let Some(who) = guest.or_else(|| call.parked.as_ref().map(|parked| &parked.who)) else { return };
        self.out.push(Action::Called(Called {
            client: whom.client,
            who: Rc::clone(who),
            method: call.method.clone(),
            tool: call.shown.clone(),
            backend,
            outcome,
            took: now.saturating_duration_since(call.began),
            is_known: true,
        }));
    }

    /// The same for what never became a call.
    pub(super) fn count_refused(
        &mut self,
        client: Client,
        method: &str,
        tool: Option<String>,
        backend: Option<String>,
        outcome: Outcome,
    ) {
        let Some(guest) = self.guests.get(&client) else { return };
        let (who, method) = (Rc::clone(&guest.who), words::cut(method, 100).into());
        let is_known = tool.as_ref().is_some_and(|tool| self.catalogue.has_name(tool));
        let (tool, backend, took) = (tool.map(Rc::from), backend.map(Rc::from), Duration::ZERO);
        self.out.push(Action::Called(Called { client, who, method, tool, backend, outcome, took, is_known }));
    }

    /// Progress on a call: it has more time, and the client hears of it under its own token.
    pub(super) fn progressed(&mut self, serial: u64, message: &[u8], params: &Params<'_>, now: Instant) {
        let Some(token) = params.progress_token() else { return };
        let Some(key) = token.get().parse::<u64>().ok() else { return };
        let Some(call) = self.calls.get_mut(&key).filter(|call| call.link == Some(serial)) else { return };
        if let Some(owner) = self.owners.get(&call.place.backend) {
            call.due = Some((now + owner.settings.call_timeout).min(call.due_max));
        }
        if let (Some(whom), Some(theirs), false) = (&call.whom, &call.token, call.is_parked()) {
            let told = patch(message, &mut [(message::place(message, token), &**theirs)]);
            self.out.push(Action::TellClient {
                client: whom.client,
                message: told,
                about: Some(whom.id.clone()),
                said: Said::Other,
            });
        }
        self.served(serial);
    }
}

/// Whether a tool's result says that it failed. Most do not have the word at all, or have it with a no behind it; only
/// where it stands with a yes, it may be the tool's and not the payload's.
fn is_error(result: Raw<'_>) -> bool {
    const NAME: &[u8] = b"\"isError\"";
    static FINDER: std::sync::LazyLock<memchr::memmem::Finder<'static>> =
        std::sync::LazyLock::new(|| memchr::memmem::Finder::new(NAME));
    let text = result.get().as_bytes();
    let is_yes = |at: usize| {
        let rest = text[at + NAME.len()..].trim_ascii_start().strip_prefix(b":");
        rest.is_some_and(|rest| rest.trim_ascii_start().starts_with(b"true"))
    };
    FINDER.find_iter(text).any(is_yes)
        && pick(result, ["isError"]).is_some_and(|[flag]| flag.is_some_and(|flag| flag.get() == "true"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_failed_if_its_own_result_says_so() {
        let table = [
            (r#"{"content":[]}"#, false),
            (r#"{"content":[],"isError":false}"#, false),
            (r#"{"content":[],"isError":true}"#, true),
            ("{\"isError\" \t: \n true ,\"content\":[]}", true),
            (r#"{"isError":"true"}"#, false),
            (r#"{"structuredContent":{"isError":true}}"#, false),
            (r#"{"structuredContent":{"isError":true},"isError":false}"#, false),
            (r#"{"structuredContent":{"isError":false},"isError":true}"#, true),
            (r#"{"content":[{"text":"\"isError\":true"}]}"#, false),
            ("[]", false),
        ];
        for (result, failed) in table {
            assert_eq!(is_error(Raw::parse(result).unwrap()), failed, "{result}");
        }
    }
}
