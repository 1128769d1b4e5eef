//! Routes each request of a client: it is answered here, or by the backend that owns what it names.
//! How a request reaches the backend is in [`super::calls`].

use std::{
    rc::Rc,
    time::{Duration, Instant},
};

use bytes::Bytes;

use super::{
    ARGUMENTS_READ_MAX, Action, Client, Era, Fit, Gateway, Outcome,
    backends::{BackendState, OfferState},
    calls::{Call, CallKind, HELD_BYTES_MAX, ReplyTo},
    clients::Declared,
    guard,
    lists::{OfferWait, Wants},
    messages,
    messages::Failure,
    methods, names, search,
    slots::SlotKey,
    subscriptions,
    timers::Timer,
};
use crate::{
    checker::{Asker, Job},
    json::Raw,
    mcp::{List, TASKS_PREFIX, method},
    message,
    message::{Params, RawId, pick},
    record,
    record::Record,
};

/// How long a call may wait until it is known whether its arguments fit; then it is refused.
const CHECK_MAX: Duration = Duration::from_secs(30);
/// Why arguments are refused that cannot be checked in time.
const TOO_COSTLY: &str = "checking them would take too long";
/// A longer address of a resource is not compared with templates.
const URI_MATCHED_MAX: usize = 8 << 10;

/// A request of a client, parsed.
pub(super) struct ClientRequest<'a> {
    pub reply_to: ReplyTo,
    pub said: &'a [u8],
    pub id: RawId<'a>,
    pub method: &'a str,
    pub params: &'a Params<'a>,
    pub declared: Declared,
    /// It is routed again after its arguments were checked beside the loop: it has paid its rate token.
    pub checked: Option<Checked>,
}

/// What came of checking the arguments of a call beside the loop.
#[derive(Debug)]
pub(super) struct Checked {
    /// As the tool had it then.
    schema: Bytes,
    fit: Fit,
    /// A tool whose schema changes all the time is not checked for ever.
    until: Instant,
}

/// The backend that a request goes to, and the name that it has there.
struct Target {
    owner: u32,
    /// This slot; nothing if the client decides which one.
    slot: Option<SlotKey>,
    kind: CallKind,
    shown: Option<Rc<str>>,
    own: Option<Rc<str>>,
    repeatable: bool,
}

/// Why a request has no target.
enum Missed {
    /// This backend may offer it; its offer is not known yet.
    Unresolved(u32),
    Failed(Box<Failure>),
}

impl From<Failure> for Missed {
    fn from(failure: Failure) -> Missed {
        Missed::Failed(failure.into())
    }
}

impl From<Box<Failure>> for Missed {
    fn from(failure: Box<Failure>) -> Missed {
        Missed::Failed(failure)
    }
}

impl Gateway {
    pub(super) fn route(&mut self, request: ClientRequest<'_>, now: Instant) {
        if let Some(owner) = self.unopened_shared_server().filter(|_| request.method != method::PING) {
            return self.wait_for_offer(request, owner, now);
        }
        // A backend that parses it differently would do something that no guard has checked.
        if !self.is_shared_server()
            && request.params.may_be_ambiguous()
            && let Some(name) = message::ambiguous(request.said)
        {
            return self.unknown(
                &request,
                format!("`{}` is there twice, or with other capitalisation", messages::cut(&name, 50)),
                None,
            );
        }
        let is_handshake = request.reply_to.era == Era::Handshake;
        match request.method {
            method::TOOLS_CALL => self.route_tool_call(request, now),
            method::PROMPTS_GET => self.route_prompt(request, now),
            method::RESOURCES_READ => self.route_resource(request, now),
            method::COMPLETE => self.route_completion(request, now),
            method::PING if is_handshake => self.answer_result(&request.reply_to, "{}"),
            method::DISCOVER if !is_handshake => self.discover(&request.reply_to),
            method::SET_LEVEL if is_handshake => self.log_level_requested(&request, now),
            method::SUBSCRIBE if is_handshake => self.watch_requested(&request, true, now),
            method::UNSUBSCRIBE if is_handshake => self.watch_requested(&request, false, now),
            method::LISTEN if !is_handshake => self.listen_requested(&request, now),
            method::TASKS_GET | method::TASKS_CANCEL => self.task_requested(request, now),
            method::TASKS_RESULT if is_handshake => self.task_requested(request, now),
            method::TASKS_UPDATE if !is_handshake => self.task_requested(request, now),
            method::TASKS_RESULT | method::TASKS_UPDATE => {
                let failure = Failure::method_unknown(format!("`{}` belongs to the other era of MCP", request.method));
                self.refuse(&request.reply_to, false, &failure);
            }
            method::TASKS_LIST => self.task_list_requested(request, now),
            method => match List::ALL.into_iter().find(|kind| kind.method() == method) {
                Some(kind) => self.list_requested(request.reply_to, kind, request.params.cursor(), now),
                None => self.route_unknown_method(request, now),
            },
        }
    }

    fn route_tool_call(&mut self, request: ClientRequest<'_>, now: Instant) {
        let Some(name) = request.params.name() else {
            return self.unknown(&request, "`params` lacks `name`".into(), None);
        };
        let name = text(name);
        let view = self.catalogue.view(self.clients[&request.reply_to.client].view());
        if view.search && search::is_ours(&name) {
            return self.search_requested(request, &name, now);
        }
        if let Some((index, entry)) = self.catalogue.find(List::Tools, &name) {
            let sees = view.sees(List::Tools, index);
            let (owner, shown, own) = (entry.owner, entry.shown.clone(), entry.own_json());
            let target = Target { owner, slot: None, kind: CallKind::Tool, shown: Some(shown), own, repeatable: false };
            return self.guard_tool_call(request, target, index, sees, now);
        }
        self.tool_not_found(request, &name, now);
    }

    /// A tool that the catalogue has: the request passes the guards in their order.
    fn guard_tool_call(&mut self, request: ClientRequest<'_>, target: Target, index: u32, sees: bool, now: Instant) {
        let client_state = &self.clients[&request.reply_to.client];
        let shown = target.shown.clone().expect("a tool has a name");
        let owner = &self.backends[&target.owner];
        let name = &owner.settings().name;
        if request.checked.is_none()
            && let Err(wait) = self.guards.take_token(&client_state.who().name, &shown, now)
        {
            let failure = Failure::rate_limited(name, &shown, wait.retry_after);
            return self.refused(&request, Some(&target), &failure);
        }
        if !self.guards.allow(client_state.role(), &shown) {
            let failure = Failure::denied(name, client_state.role(), &format!("the tool `{shown}`"));
            return self.refused(&request, Some(&target), &failure);
        }
        if !sees {
            return self.unknown(&request, format!("no tool is named `{shown}`"), Some(&shown));
        }
        let entry = self.catalogue.entry(List::Tools, index);
        let arguments = request.params.arguments().unwrap_or(Raw::checked("{}"));
        let repeatable = owner.settings().retry_annotated && entry.is_safe();
        // A backend that takes the other one of two members would get arguments that were not checked.
        if let Some(schema) = &entry.schema
            && arguments.get().len() <= ARGUMENTS_READ_MAX
            && let Some(member) = message::doubled(arguments, |member| has_word(schema, member))
        {
            let why = format!("`{}` is there twice, or with other capitalisation", messages::cut(&member, 50));
            let failure = Failure::bad_arguments(self.backends.name(target.owner), &shown, &why);
            return self.refused(&request, Some(&target), &failure);
        }
        let fit = match (&entry.schema, &request.checked) {
            (None, _) => Fit::Fits,
            (Some(schema), Some(checked)) if checked.schema == *schema => checked.fit.clone(),
            (Some(schema), _) => match self.guards.check_arguments(schema, arguments) {
                Some(fit) => fit,
                None => {
                    let schema = schema.clone();
                    return self.wait_for_check(request, &target, schema, now);
                }
            },
        };
        if !matches!(fit, Fit::Unchecked(_)) {
            self.backends.get_mut(&target.owner).into_iter().for_each(|backend| backend.note_checked(&shown));
        }
        let why = match fit {
            Fit::Fits => None,
            Fit::Misfit(why) => Some(why),
            Fit::TooCostly => Some(TOO_COSTLY.to_owned()),
            Fit::Unchecked(why) => {
                self.schema_unchecked(target.owner, &shown, why);
                None
            }
        };
        if let Some(why) = why {
            let failure = Failure::bad_arguments(self.backends.name(target.owner), &shown, &why);
            return self.refused(&request, Some(&target), &failure);
        }
        self.send(request, Target { repeatable, ..target }, now);
    }

    /// The arguments of a call are checked beside the loop; the call is routed again when the result is there.
    fn wait_for_check(&mut self, request: ClientRequest<'_>, target: &Target, schema: Bytes, now: Instant) {
        if self.stage.is_stopping() {
            let failure = Failure::stopping(self.backends.name(target.owner));
            return self.refused(&request, Some(target), &failure);
        }
        if self.holds_too_much(request.reply_to.client, request.said.len()) {
            let failure = Failure::held_bytes(self.backends.name(target.owner), HELD_BYTES_MAX);
            return self.refused(&request, Some(target), &failure);
        }
        let client_state = &self.clients[&request.reply_to.client];
        let session = client_state.is_session().then_some(request.reply_to.client);
        let asker = Asker { name: client_state.who().name.clone(), session };
        let message = Bytes::copy_from_slice(request.said);
        let arguments = match request.params.arguments() {
            Some(arguments) => message.slice(message::place(request.said, arguments)),
            None => Bytes::from_static(b"{}"),
        };
        let until = request.checked.map_or(now + CHECK_MAX, |checked| checked.until);
        let ticket = self.ids.number();
        let shown = target.shown.clone().expect("a tool has a name");
        self.timers.arm(Timer::OfferWaits, until);
        self.out.push(Action::Check(Job { ticket, asker, schema: schema.clone(), arguments }));
        let (backend, declared) = (target.owner, request.declared);
        let wants = Wants::Check { ticket, backend, shown, message, declared, schema };
        self.offer_waits.add(request.reply_to, wants, until);
    }

    /// Arguments were checked. The call passes all guards again: much may have changed meanwhile.
    pub(super) fn checked(&mut self, ticket: u64, fit: Fit, now: Instant) {
        let Some((OfferWait { reply_to, wants, .. }, until)) = self.offer_waits.take_check(ticket) else { return };
        let Wants::Check { backend, message, declared, schema, .. } = wants else { return };
        let Ok(message::Message::Request { id, method, params }) = message::parse_again(&message) else { return };
        let checked = Some(Checked { schema, fit, until });
        let (said, method, params) = (&message[..], &*method, &params);
        let request = ClientRequest { reply_to, said, id, method, params, declared, checked };
        if self.clients.get(&request.reply_to.client).is_some_and(|client_state| !client_state.is_allowed(now)) {
            let failure = Failure::revoked(self.backends.name(backend));
            return self.refused_of(&request, backend, &failure);
        }
        self.route(request, now);
    }

    /// A call waited too long for its arguments to be checked, or the gateway stops.
    pub(super) fn check_ended(&mut self, reply_to: &ReplyTo, backend: u32, shown: &str) {
        let name = self.backends.name(backend).to_owned();
        let failure = match self.stage.is_stopping() {
            true => Failure::stopping(&name),
            false => Failure::bad_arguments(&name, shown, TOO_COSTLY),
        };
        self.refuse(reply_to, true, &failure);
        self.report_refused(reply_to.client, method::TOOLS_CALL, Some(shown.to_owned()), Some(name), failure.outcome);
    }

    /// A tool's schema cannot be used: told once for each definition.
    fn schema_unchecked(&mut self, number: u32, shown: &Rc<str>, why: String) {
        let Some(owner) = self.backends.get_mut(&number) else { return };
        if !owner.note_unchecked(shown, &why) {
            return;
        }
        let name = owner.settings().name.clone();
        let of = record::OfGateway { tool: Some(shown.to_string()), ..record::OfGateway::default() };
        let record =
            Record { reason: Some(why), gateway: Some(Box::new(of)), ..Record::new(record::Event::SchemaUnchecked) };
        self.out.push(Action::Record(record.of_backend(&name)));
    }

    /// A name that the catalogue does not list.
    fn tool_not_found(&mut self, request: ClientRequest<'_>, name: &str, now: Instant) {
        // The server may have tools that it does not list.
        if self.is_shared_server()
            && let Some(owner) = self.backends.order().first().copied()
        {
            let (kind, shown) = (CallKind::Tool, Some(name.into()));
            return self.send(request, Target { owner, slot: None, kind, shown, own: None, repeatable: false }, now);
        }
        // A tool that is switched off is not listed, and its owner may be known.
        let off_owner = self.catalogue.off_owner(List::Tools, name);
        if self.guards.is_tool_off(name) {
            let backend = off_owner.map_or("", |owner| self.backends.name(owner));
            let failure = Failure::switched_off(backend, &format!("The tool `{name}`"));
            return match off_owner {
                Some(owner) => self.refused_of(&request, owner, &failure),
                None => self.refused_named(&request, name, &failure),
            };
        }
        match off_owner.or_else(|| self.backend_by_prefix(name)) {
            Some(owner) if self.guards.is_backend_off(self.backends.name(owner)) => {
                let backend = self.backends.name(owner);
                let failure = Failure::switched_off(backend, &format!("The backend `{backend}`"));
                self.refused_of(&request, owner, &failure);
            }
            Some(owner) if !self.backends[&owner].is_offer_confirmed() => {
                self.wait_for_offer(request, owner, now);
            }
            _ => {
                let words = self.why_unknown(List::Tools, name);
                self.unknown(&request, words, Some(name));
            }
        }
    }

    /// A request that names something of a backend whose offer is not known yet waits for the offer.
    pub(super) fn wait_for_offer(&mut self, request: ClientRequest<'_>, owner: u32, now: Instant) {
        let waiting = self.offer_waits.count_for(owner);
        let slot = self.first_slot(owner);
        self.make_slot(slot, Some(now));
        self.wake_slot(slot, now);
        if waiting >= self.settings.limits.held_max {
            let failure = Failure::hold_full(self.backends.name(owner), waiting);
            return self.refused_of(&request, owner, &failure);
        }
        if self.holds_too_much(request.reply_to.client, request.said.len()) {
            let failure = Failure::held_bytes(self.backends.name(owner), HELD_BYTES_MAX);
            return self.refused_of(&request, owner, &failure);
        }
        if self.slots.get(&slot).is_some_and(|slot| slot.links.is_given_up()) || self.stage.is_stopping() {
            let failure = self.slot_failure(slot, now);
            return self.refused_of(&request, owner, &failure);
        }
        self.starts_due = true;
        let until = now + self.settings.limits.hold;
        self.timers.arm(Timer::OfferWaits, until);
        let message = Bytes::copy_from_slice(request.said);
        let wants = Wants::Request { backend: owner, message, declared: request.declared, checked: request.checked };
        self.offer_waits.add(request.reply_to, wants, until);
    }

    /// The wait for a backend's offer is over: the request is routed again, or fails.
    pub(super) fn route_after_offer(
        &mut self,
        reply_to: ReplyTo,
        owner: u32,
        said: &[u8],
        declared: Declared,
        checked: Option<Checked>,
        now: Instant,
    ) {
        let Ok(message::Message::Request { id, method, params }) = message::parse_again(said) else { return };
        let request = ClientRequest { reply_to, said, id, method: &method, params: &params, declared, checked };
        if self.clients.get(&request.reply_to.client).is_some_and(|client_state| !client_state.is_allowed(now)) {
            let failure = Failure::revoked(self.backends.name(owner));
            return self.refused_of(&request, owner, &failure);
        }
        match self.backends.get(&owner).map(BackendState::offer_state) {
            Some(OfferState::Confirmed) if request.method == method::INITIALIZE => {
                self.initialize(&request.reply_to, request.params);
            }
            Some(OfferState::Confirmed) | None => self.route(request, now),
            Some(_) => {
                let failure = self.slot_failure(self.first_slot(owner), now);
                self.refused_of(&request, owner, &failure);
            }
        }
    }

    /// Why a call that passed the guards may not be sent any more: its tool or backend was switched off, or its
    /// client's role or credentials changed. The rate limit is not checked again, because a call costs one token.
    pub(super) fn refused_since(&self, call: &Call, now: Instant) -> Option<Failure> {
        if let Some(failure) = &call.withdrawn {
            return Some((**failure).clone());
        }
        let client_state = self.clients.get(&call.reply_to.as_ref()?.client)?;
        let (role, view) = (client_state.role(), self.catalogue.view(client_state.view()));
        let (owner, backend) = (call.slot.backend, self.backends.name(call.slot.backend));
        if self.guards.is_backend_off(backend) {
            return Some(Failure::switched_off(backend, &format!("The backend `{backend}`")));
        }
        if !client_state.is_allowed(now) {
            return Some(Failure::revoked(backend));
        }
        let kind = if call.kind == CallKind::Tool { List::Tools } else { List::Prompts };
        match (call.kind, &call.shown) {
            (CallKind::Tool, Some(shown)) if self.guards.is_tool_off(shown) => {
                Some(Failure::switched_off(backend, &format!("The tool `{shown}`")))
            }
            (CallKind::Other, Some(shown)) => self.task_refused(role, backend, shown),
            (CallKind::Tool | CallKind::Prompt | CallKind::Complete, Some(shown)) => {
                let what = kind.one();
                if !self.guards.allow(role, shown) {
                    return Some(Failure::denied(backend, role, &format!("the {what} `{shown}`")));
                }
                let is_hidden = match self.catalogue.find(kind, shown) {
                    Some((index, entry)) => entry.owner != owner || !view.sees(kind, index),
                    // A tool that its backend does not list at the moment was visible when the call came.
                    None => !self.may_offer(call, kind, shown),
                };
                is_hidden.then(|| Failure::unknown(format!("no {what} is named `{shown}`")))
            }
            (CallKind::Read | CallKind::Complete, _) => {
                (!view.is_open(owner)).then(|| Failure::denied(backend, role, "resources of this backend"))
            }
            (CallKind::Other, _) if !call.method.starts_with(TASKS_PREFIX) => (!self
                .forwards_unknown(call.reply_to.as_ref()?.client))
            .then(|| Failure::denied(backend, role, &format!("the method `{}`", call.method))),
            _ => None,
        }
    }

    /// Why a client may not continue a task that this tool has made, or get its result.
    pub(super) fn task_refused(&self, role: Option<&str>, backend: &str, shown: &str) -> Option<Failure> {
        if self.guards.is_tool_off(shown) {
            return Some(Failure::switched_off(backend, &format!("The tool `{shown}`")));
        }
        (!self.guards.allow(role, shown)).then(|| Failure::denied(backend, role, &format!("the tool `{shown}`")))
    }

    /// Whether the configuration allows the backend of a call to offer what the call names.
    fn may_offer(&self, call: &Call, kind: List, shown: &str) -> bool {
        let Some(settings) = self.backends.get(&call.slot.backend).map(BackendState::settings) else { return false };
        let own = call.own.as_deref().and_then(Raw::parse).and_then(Raw::text);
        let own = own.as_deref().unwrap_or(shown);
        (self.is_shared_server() || names::is_of(shown, &settings.prefix, own))
            && (kind != List::Tools || guard::passes(&settings.allow, &settings.deny, own))
    }

    /// The client cancelled a request that waited for a backend's offer.
    pub(super) fn offer_wait_cancelled(&mut self, wait: OfferWait) {
        self.forget(&wait.reply_to);
        if let Wants::Check { ticket, .. } = wait.wants {
            self.out.push(Action::DropCheck { ticket });
        }
        if let Wants::Request { backend, message, .. } | Wants::Check { backend, message, .. } = wait.wants
            && let Ok(message::Message::Request { method, params, .. }) = message::parse_again(&message)
        {
            let name = params.name().map(|name| text(name).into_owned());
            let backend = Some(self.backends.name(backend).to_owned());
            self.report_refused(wait.reply_to.client, &method, name, backend, Outcome::Cancelled);
        }
    }

    /// The backend that a name belongs to by its prefix. The longest prefix wins, as in `git__` and `git__hub__`.
    fn backend_by_prefix(&self, name: &str) -> Option<u32> {
        let fits = |number: &&u32| {
            let prefix = &self.backends[*number].settings().prefix;
            !prefix.is_empty() && name.starts_with(&names::plain(prefix, "")) || prefix.is_empty()
        };
        self.backends
            .order()
            .iter()
            .filter(fits)
            .max_by_key(|number| self.backends[*number].settings().prefix.len())
            .copied()
    }

    fn why_unknown(&self, kind: List, name: &str) -> String {
        let what = if kind == List::Tools { "tool" } else { "prompt" };
        match self.catalogue.collision(kind, name) {
            Some(lost) => format!(
                "no {what} is named `{name}` now: the name belongs to the backend `{}`, which does not offer it at the \
                 moment, so the one of the backend `{}` is not offered either",
                self.backends.name(lost.winner),
                self.backends.name(lost.loser)
            ),
            None => format!("no {what} is named `{name}`"),
        }
    }

    fn route_prompt(&mut self, request: ClientRequest<'_>, now: Instant) {
        let Some(name) = request.params.name() else {
            return self.unknown(&request, "`params` lacks `name`".into(), None);
        };
        let name = text(name);
        match self.prompt_target(&request, &name, CallKind::Prompt) {
            Ok(target) => self.send(request, target, now),
            Err(Missed::Unresolved(owner)) => self.wait_for_offer(request, owner, now),
            Err(Missed::Failed(failure)) => self.refused_named(&request, &name, &failure),
        }
    }

    fn prompt_target(&self, request: &ClientRequest<'_>, name: &str, kind: CallKind) -> Result<Target, Missed> {
        let client_state = &self.clients[&request.reply_to.client];
        if let Some((index, entry)) = self.catalogue.find(List::Prompts, name) {
            if !self.guards.allow(client_state.role(), name) {
                let backend = self.backends.name(entry.owner);
                let failure = Failure::denied(backend, client_state.role(), &format!("the prompt `{name}`"));
                return Err(failure.into());
            }
            if !self.catalogue.view(client_state.view()).sees(List::Prompts, index) {
                return Err(Failure::unknown(format!("no prompt is named `{name}`")).into());
            }
            let (owner, shown, own) = (entry.owner, Some(entry.shown.clone()), entry.own_json());
            return Ok(Target { owner, slot: None, kind, shown, own, repeatable: true });
        }
        match self.backend_by_prefix(name) {
            Some(owner) if self.guards.is_backend_off(self.backends.name(owner)) => {
                let backend = self.backends.name(owner);
                Err(Failure::switched_off(backend, &format!("The backend `{backend}`")).into())
            }
            Some(owner) if self.is_shared_server() => {
                Ok(Target { owner, slot: None, kind, shown: Some(name.into()), own: None, repeatable: true })
            }
            Some(owner) if !self.backends[&owner].is_offer_confirmed() => Err(Missed::Unresolved(owner)),
            _ => Err(Failure::unknown(self.why_unknown(List::Prompts, name)).into()),
        }
    }

    fn route_resource(&mut self, request: ClientRequest<'_>, now: Instant) {
        let Some(uri) = request.params.uri() else {
            return self.unknown(&request, "`params` lacks `uri`".into(), None);
        };
        let uri = text(uri);
        match self.resource_owner(request.reply_to.client, &uri) {
            Ok(owner) => {
                let repeatable = request.params.request_state().is_none();
                let target = Target { owner, slot: None, kind: CallKind::Read, shown: None, own: None, repeatable };
                self.send(request, target, now);
            }
            Err(mut failure) => {
                // It may belong to a backend whose offer is not known yet.
                let unheard = |number: &&u32| self.backends[*number].is_offer_unknown();
                if failure.outcome == Outcome::Unknown
                    && !self.stage.is_stopping()
                    && let Some(owner) = self.backends.order().iter().find(unheard).copied()
                {
                    return self.wait_for_offer(request, owner, now);
                }
                // The handshake era has another code for this.
                if request.reply_to.era == Era::Handshake && failure.outcome == Outcome::Unknown {
                    failure.code = -32002;
                }
                self.refused(&request, None, &failure);
            }
        }
    }

    /// The owner of a resource: the backend that lists it, then one with a template that fits, then the only backend
    /// with resources.
    pub(super) fn resource_owner(&self, client: Client, uri: &str) -> Result<u32, Box<Failure>> {
        let client_state = &self.clients[&client];
        let view = self.catalogue.view(client_state.view());
        let listed = self.catalogue.find(List::Resources, uri).map(|(index, entry)| (index, entry.owner));
        let by_template = || {
            let is_short = uri.len() <= URI_MATCHED_MAX;
            let templates = self.catalogue.all(List::Templates).iter().enumerate().filter(|_| is_short);
            let fitting = templates.filter(|(_, entry)| subscriptions::fits_template(entry.own(), uri));
            // The template with the longest fixed beginning: `file:///{path}` fits everything that `file:///logs/{day}`
            // does.
            fitting.max_by_key(|(_, entry)| entry.own().find('{')).map(|(index, entry)| (index as u32, entry.owner))
        };
        let found = match listed {
            Some((index, owner)) => Some((view.sees(List::Resources, index), owner)),
            None => by_template().map(|(index, owner)| (view.sees(List::Templates, index), owner)),
        };
        if let Some((sees, owner)) = found {
            return match sees {
                true => Ok(owner),
                false => {
                    Err(Failure::denied(self.backends.name(owner), client_state.role(), &format!("`{uri}`")).into())
                }
            };
        }
        // Which backend is the only one with resources is known when all offers are.
        if self.backends.values().any(|backend| backend.is_offer_unknown()) {
            return Err(Failure::unknown(format!("no backend lists the resource `{}`", messages::cut(uri, 200))).into());
        }
        let mut with_any = self.backends.order().iter().copied().filter(|number| {
            let backend = &self.backends[number];
            !self.guards.is_backend_off(backend.name())
                && view.is_open(*number)
                && backend.capability("resources").is_some()
        });
        match (with_any.next(), with_any.next()) {
            (Some(owner), None) => Ok(owner),
            (Some(_), Some(_)) => {
                Err(Failure::unknown(format!("no backend lists the resource `{}`", messages::cut(uri, 200))).into())
            }
            (None, _) => Err(Failure::unknown("no backend has resources".into()).into()),
        }
    }

    fn route_completion(&mut self, request: ClientRequest<'_>, now: Instant) {
        let reference = request.params.reference().and_then(|raw| pick(raw, ["name", "uri"]));
        let target = match reference {
            Some([Some(name), _]) => self.prompt_target(&request, &text(name), CallKind::Complete),
            Some([None, Some(uri)]) => self
                .resource_owner_of_template(request.reply_to.client, &text(uri))
                .map(|owner| Target {
                    owner,
                    slot: None,
                    kind: CallKind::Complete,
                    shown: None,
                    own: None,
                    repeatable: true,
                })
                .map_err(Missed::from),
            _ => Err(Failure::unknown("`params.ref` names neither a prompt nor a resource".into()).into()),
        };
        match target {
            // A backend without completions has no values.
            Ok(target) if self.cannot_complete(target.owner) => {
                let complete = if request.reply_to.era == Era::Stateless { r#","resultType":"complete""# } else { "" };
                self.answer_result(&request.reply_to, &format!(r#"{{"completion":{{"values":[]}}{complete}}}"#));
                let backend = Some(self.backends.name(target.owner).to_owned());
                self.report_refused(request.reply_to.client, request.method, None, backend, Outcome::Answered);
            }
            Ok(target) => self.send(request, target, now),
            Err(Missed::Unresolved(owner)) => self.wait_for_offer(request, owner, now),
            Err(Missed::Failed(failure)) => self.refused(&request, None, &failure),
        }
    }

    fn resource_owner_of_template(&self, client: Client, uri: &str) -> Result<u32, Box<Failure>> {
        match self.catalogue.find(List::Templates, uri) {
            Some((index, entry)) if self.catalogue.view(self.clients[&client].view()).sees(List::Templates, index) => {
                Ok(entry.owner)
            }
            _ => self.resource_owner(client, uri),
        }
    }

    fn cannot_complete(&self, owner: u32) -> bool {
        let Some(serial) = self.serving(self.first_slot(owner)) else { return false };
        !self.links[&serial].has().completions
    }

    /// A request with a method that MCP does not have is only forwarded to a single backend, because no guard of tools
    /// applies to it, and only for clients that may call every tool, or if that is configured.
    fn route_unknown_method(&mut self, request: ClientRequest<'_>, now: Instant) {
        let client = request.reply_to.client;
        match self.backends.order()[..] {
            [_] if !self.is_shared_server() && methods::resembles_known(request.method) => {
                let words = format!(
                    "`{}` resembles an MCP method, but is spelled differently",
                    messages::cut(request.method, 100)
                );
                self.refused(&request, None, &Failure::method_unknown(words));
            }
            [owner] if !is_of_other_era(request.method) && !self.forwards_unknown(client) => {
                let what = format!(
                    "the method `{}`, which is not part of MCP (`forward_unknown` in [gateway] allows it)",
                    messages::cut(request.method, 100)
                );
                let role = self.clients[&client].who().role.clone();
                let failure = Failure::denied(self.backends.name(owner), role.as_deref(), &what);
                self.refused(&request, None, &failure);
            }
            [owner] if !self.guards.is_backend_off(self.backends.name(owner)) && !is_of_other_era(request.method) => {
                let target =
                    Target { owner, slot: None, kind: CallKind::Other, shown: None, own: None, repeatable: false };
                self.send(request, target, now);
            }
            _ if is_of_other_era(request.method) => {
                let words = format!("`{}` is not part of the revision of MCP that this client speaks", request.method);
                self.refused(&request, None, &Failure::method_unknown(words));
            }
            _ => {
                let words = format!("unknown method `{}`", messages::cut(request.method, 100));
                self.refused(&request, None, &Failure::method_unknown(words));
            }
        }
    }

    /// Sends a request about a task to the slot that works on it.
    /// `shown` is the tool that made the task which the request is about, if it is checked again.
    pub(super) fn send_to(
        &mut self,
        request: ClientRequest<'_>,
        slot: SlotKey,
        own: Rc<str>,
        shown: Option<Rc<str>>,
        now: Instant,
    ) {
        let owner = slot.backend;
        let (slot, own) = (Some(slot), Some(own));
        let target = Target { owner, slot, kind: CallKind::Other, shown, own, repeatable: false };
        self.send(request, target, now);
    }

    /// The circuit breaker is the last guard; then the request becomes a call.
    fn send(&mut self, request: ClientRequest<'_>, target: Target, now: Instant) {
        if let Some(state) = request.params.request_state()
            && self.resume_parked(&request, state, now)
        {
            return;
        }
        let slot = match target.slot {
            Some(slot) => slot,
            None => match self.slot_for(target.owner, &request.reply_to, request.declared, now) {
                Ok(slot) => slot,
                Err(failure) => return self.refused(&request, Some(&target), &failure),
            },
        };
        let Some(owner) = self.backends.get_mut(&target.owner) else {
            return self.refused(&request, Some(&target), &Failure::removed(""));
        };
        let pass = match owner.ask_breaker(now) {
            Ok(pass) => Some(pass),
            Err(wait) => {
                let failure = Failure::circuit_open(&owner.settings().name, wait.retry_after);
                return self.refused(&request, Some(&target), &failure);
            }
        };
        let ClientRequest { reply_to, said, id, method, params, declared, .. } = request;
        let call = Call {
            shown: target.shown,
            own: target.own,
            repeatable: target.repeatable,
            pass,
            task: params.task().is_some(),
            reply_to: Some(reply_to),
            ..Call::new(target.kind, method_name(method), slot, declared, now)
        };
        self.dispatch(Box::new(call), said, id, params, now);
    }

    fn refused(&mut self, request: &ClientRequest<'_>, target: Option<&Target>, failure: &Failure) {
        let is_tool = request.method == method::TOOLS_CALL;
        self.refuse(&request.reply_to, is_tool, failure);
        let backend = target.map(|target| self.backends.name(target.owner).to_owned());
        let shown = target.and_then(|target| target.shown.as_deref().map(str::to_owned));
        self.report_refused(request.reply_to.client, request.method, shown, backend, failure.outcome);
    }

    /// Refuses a request that names something of a backend whose offer is not known.
    pub(super) fn refused_of(&mut self, request: &ClientRequest<'_>, owner: u32, failure: &Failure) {
        let shown = request.params.name().map(|name| text(name).as_ref().into());
        let target = Target { owner, slot: None, kind: CallKind::Other, shown, own: None, repeatable: false };
        self.refused(request, Some(&target), failure);
    }

    fn refused_named(&mut self, request: &ClientRequest<'_>, name: &str, failure: &Failure) {
        self.refuse(&request.reply_to, request.method == method::TOOLS_CALL, failure);
        let name = Some(messages::cut(name, 200));
        self.report_refused(request.reply_to.client, request.method, name, None, failure.outcome);
    }

    pub(super) fn unknown(&mut self, request: &ClientRequest<'_>, words: String, name: Option<&str>) {
        let failure = Failure::unknown(words);
        match name {
            Some(name) => self.refused_named(request, name, &failure),
            None => self.refused(request, None, &failure),
        }
    }
}

/// The content of a string, copied only if something in it is escaped. Empty if it is not a string.
fn text(raw: Raw<'_>) -> std::borrow::Cow<'_, str> {
    match raw.plain() {
        Some(plain) => plain.into(),
        None => raw.text().unwrap_or_default().into(),
    }
}

/// Whether a schema contains this name.
fn has_word(schema: &[u8], member: &str) -> bool {
    memchr::memmem::find(schema, message::quote(member).as_bytes()).is_some()
}

/// Methods that one era has and the other does not. They are not forwarded to a single backend.
fn is_of_other_era(method: &str) -> bool {
    let both = [method::INITIALIZE, method::PING, method::DISCOVER, method::SET_LEVEL, method::SUBSCRIBE];
    both.contains(&method) || [method::UNSUBSCRIBE, method::LISTEN].contains(&method)
}

fn method_name(method: &str) -> std::borrow::Cow<'static, str> {
    match method {
        method::TOOLS_CALL => method::TOOLS_CALL.into(),
        method::PROMPTS_GET => method::PROMPTS_GET.into(),
        method::RESOURCES_READ => method::RESOURCES_READ.into(),
        method::COMPLETE => method::COMPLETE.into(),
        other => messages::cut(other, 100).into(),
    }
}
