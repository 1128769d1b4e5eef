//! Where each request of a client goes: answered here, or by the backend that owns what it names.

use super::*;
use crate::{
    json::Raw,
    message::{self, Params, RawId, pick},
};

use calls::What;
use words::Failure;

/// A request of a client, with all that is known of it.
pub(super) struct Asked<'a> {
    pub whom: Whom,
    pub said: &'a [u8],
    pub id: RawId<'a>,
    pub method: &'a str,
    pub params: &'a Params<'a>,
    pub says: Says,
}

/// Whom a request is for, and what it is called there.
struct Target {
    owner: u32,
    /// Everybody's place, whoever asks.
    place: Option<PlaceKey>,
    what: What,
    shown: Option<Rc<str>>,
    own: Option<Rc<str>>,
    repeatable: bool,
}

/// Why a request finds no target.
enum Missed {
    /// This backend may have it, and has not said yet.
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
    pub(super) fn route(&mut self, asked: Asked<'_>, now: Instant) {
        // A backend that reads it otherwise would do what no guard has seen.
        if asked.params.may_be_ambiguous()
            && let Some(name) = message::ambiguous(asked.said)
        {
            return self.unknown(
                &asked,
                format!("`{}` is there twice, or in other capitals", words::cut(&name, 50)),
                None,
            );
        }
        let is_handshake = asked.whom.era == Era::Handshake;
        match asked.method {
            "tools/call" => self.tool_asked(asked, now),
            "prompts/get" => self.prompt_asked(asked, now),
            "resources/read" => self.resource_asked(asked, now),
            "completion/complete" => self.completion_asked(asked, now),
            "ping" if is_handshake => self.answer_result(&asked.whom, "{}"),
            "server/discover" if !is_handshake => self.discover(&asked.whom),
            "logging/setLevel" if is_handshake => self.level_asked(&asked, now),
            "resources/subscribe" if is_handshake => self.watch_asked(&asked, true, now),
            "resources/unsubscribe" if is_handshake => self.watch_asked(&asked, false, now),
            "subscriptions/listen" if !is_handshake => self.listen_asked(&asked, now),
            "tasks/get" | "tasks/cancel" => self.task_asked(asked, now),
            "tasks/result" if is_handshake => self.task_asked(asked, now),
            "tasks/update" if !is_handshake => self.task_asked(asked, now),
            "tasks/result" | "tasks/update" => {
                let failure = Failure::method_unknown(format!("`{}` is of the other era", asked.method));
                self.refuse(&asked.whom, false, &failure);
            }
            "tasks/list" => self.tasks_asked(asked, now),
            method => match List::ALL.into_iter().find(|kind| kind.method() == method) {
                Some(kind) => self.list_asked(asked.whom, kind, asked.params.cursor(), now),
                None => self.other_asked(asked, now),
            },
        }
    }

    fn tool_asked(&mut self, asked: Asked<'_>, now: Instant) {
        let Some(name) = asked.params.name() else { return self.unknown(&asked, "`params` lacks `name`".into(), None) };
        let name = text(name);
        let view = &self.views[self.guests[&asked.whom.client].view];
        if view.search && search::is_ours(&name) {
            return self.search_asked(asked, &name, now);
        }
        if let Some((index, entry)) = self.catalogue.find(List::Tools, &name) {
            let sees = view.sees(List::Tools, index);
            let (owner, shown, own) = (entry.owner, entry.shown.clone(), entry.own_json.clone());
            let target = Target { owner, place: None, what: What::Tool, shown: Some(shown), own, repeatable: false };
            return self.tool_called(asked, target, index, sees, now);
        }
        self.tool_not_found(asked, &name, now);
    }

    /// A tool that is there: through the guards to its backend, in the order that the guards have.
    fn tool_called(&mut self, asked: Asked<'_>, target: Target, index: u32, sees: bool, now: Instant) {
        let guest = &self.guests[&asked.whom.client];
        let shown = target.shown.clone().expect("a tool has a name");
        let owner = &self.owners[&target.owner];
        let name = &owner.settings.name;
        if let Err(wait) = self.buckets.take(&guest.who.name, &shown, now) {
            let failure = Failure::rate_limited(name, &shown, wait.retry_after);
            return self.refused(&asked, Some(&target), &failure);
        }
        if !self.roles.allow(guest.who.role.as_deref(), &shown) {
            let failure = Failure::denied(name, guest.who.role.as_deref(), &format!("the tool `{shown}`"));
            return self.refused(&asked, Some(&target), &failure);
        }
        if !sees {
            return self.unknown(&asked, format!("there is no tool `{shown}`"), Some(&shown));
        }
        let entry = self.catalogue.entry(List::Tools, index);
        let arguments = asked.params.arguments().unwrap_or(Raw::checked("{}"));
        let repeatable = owner.settings.retry_annotated && entry.is_safe;
        // A backend that takes the other one of two members would get arguments that were not checked.
        if let Some(schema) = &entry.schema
            && arguments.get().len() <= ARGUMENTS_READ_MAX
            && let Some(member) = message::doubled(arguments, |member| has_word(schema, member))
        {
            let why = format!("`{}` is there twice, or in other capitals", words::cut(&member, 50));
            let failure = Failure::bad_arguments(self.owner_name(target.owner), &shown, &why);
            return self.refused(&asked, Some(&target), &failure);
        }
        let fit = entry.schema.as_ref().map_or(Fit::Fits, |schema| self.schemas.0.check(schema, arguments));
        let why = match fit {
            Fit::Fits => None,
            Fit::Misfit(why) => Some(why),
            Fit::TooCostly => Some("to check them would take too long".to_owned()),
            Fit::Unchecked(why) => {
                self.schema_unchecked(target.owner, &shown, why);
                None
            }
        };
        if let Some(why) = why {
            let failure = Failure::bad_arguments(self.owner_name(target.owner), &shown, &why);
            return self.refused(&asked, Some(&target), &failure);
        }
        self.send(asked, Target { repeatable, ..target }, now);
    }

    /// A tool's schema cannot be used: told once for each definition.
    fn schema_unchecked(&mut self, number: u32, shown: &Rc<str>, why: String) {
        let Some(owner) = self.owners.get_mut(&number) else { return };
        if owner.unchecked.len() >= UNCHECKED_MAX || owner.unchecked.get(shown) == Some(&why) {
            return;
        }
        owner.unchecked.insert(shown.clone(), why.clone());
        let name = owner.settings.name.clone();
        let of = record::OfGateway { tool: Some(shown.to_string()), ..record::OfGateway::default() };
        let record =
            Record { reason: Some(why), gateway: Some(Box::new(of)), ..Record::new(record::Event::SchemaUnchecked) };
        self.out.push(Action::Record(record.of_backend(&name)));
    }

    /// A name that the catalogue does not have, or not any more.
    fn tool_not_found(&mut self, asked: Asked<'_>, name: &str, now: Instant) {
        // What is switched off is not listed, and its owner may be known all the same.
        let off_owner = self.catalogue.off_owner(List::Tools, name);
        if self.switches.is_tool_off(name) {
            let backend = off_owner.map_or("", |owner| self.owner_name(owner));
            let failure = Failure::switched_off(backend, &format!("The tool `{name}`"));
            return match off_owner {
                Some(owner) => self.refused_of(&asked, owner, &failure),
                None => self.refused_named(&asked, name, &failure),
            };
        }
        match off_owner.or_else(|| self.owner_by_prefix(name)) {
            Some(owner) if self.switches.is_backend_off(self.owner_name(owner)) => {
                let backend = self.owner_name(owner);
                let failure = Failure::switched_off(backend, &format!("The backend `{backend}`"));
                self.refused_of(&asked, owner, &failure);
            }
            Some(owner) if self.owners[&owner].standing != Standing::Confirmed => {
                self.wait_for_offer(asked, owner, now);
            }
            _ => {
                let words = self.why_unknown(List::Tools, name);
                self.unknown(&asked, words, Some(name));
            }
        }
    }

    /// Something of a backend that has not said yet what it offers: it is judged when that is known.
    fn wait_for_offer(&mut self, asked: Asked<'_>, owner: u32, now: Instant) {
        let waiting = self.gathering.iter().filter(|waiting| waiting.is_for(owner)).count();
        let place = self.first_place(owner);
        self.make_place(place, places::State::Waiting { at: now });
        self.wake_place(place, now);
        let is_given_up = |place: &Place| matches!(place.state, places::State::GivenUp { .. });
        if waiting >= self.settings.limits.held_max {
            let failure = Failure::hold_full(self.owner_name(owner), waiting);
            return self.refused_of(&asked, owner, &failure);
        }
        if self.holds_too_much(asked.whom.client, asked.said.len()) {
            let failure = Failure::held_bytes(self.owner_name(owner), HELD_BYTES_MAX);
            return self.refused_of(&asked, owner, &failure);
        }
        if self.places.get(&place).is_some_and(is_given_up) || self.stopping.is_some() {
            let failure = self.failure_of_place(place, now);
            return self.refused_of(&asked, owner, &failure);
        }
        self.starts_due = true;
        let until = now + self.settings.limits.hold;
        self.wake_by(until);
        let message = Bytes::copy_from_slice(asked.said);
        let wants = lists::Wants::Request { owner, message, says: asked.says };
        self.gathering.push(Gathering { whom: asked.whom, wants, until });
    }

    /// What waited for its backend's offer is asked anew, or fails.
    pub(super) fn judge(&mut self, whom: Whom, owner: u32, said: &[u8], says: Says, now: Instant) {
        let Ok(message::Message::Request { id, method, params }) = message::parse(said) else { return };
        let asked = Asked { whom, said, id, method: &method, params: &params, says };
        if self.guests.get(&asked.whom.client).is_some_and(|guest| !guest.is_allowed(now)) {
            let failure = Failure::revoked(self.owner_name(owner));
            return self.refused_of(&asked, owner, &failure);
        }
        match self.owners.get(&owner).map(|owner| owner.standing) {
            Some(Standing::Confirmed) | None => self.route(asked, now),
            Some(_) => {
                let failure = self.failure_of_place(self.first_place(owner), now);
                self.refused_of(&asked, owner, &failure);
            }
        }
    }

    /// Why a call that was let through earlier may not be sent any more: meanwhile its tool or backend was switched off, its
    /// client's role changed, or its client's credentials ended. The rate is not asked again: a call costs one token.
    pub(super) fn refused_by_now(&self, call: &Call, now: Instant) -> Option<Failure> {
        let guest = self.guests.get(&call.whom.as_ref()?.client)?;
        let (role, view) = (guest.who.role.as_deref(), &self.views[guest.view]);
        let (owner, backend) = (call.place.backend, self.owner_name(call.place.backend));
        if self.switches.is_backend_off(backend) {
            return Some(Failure::switched_off(backend, &format!("The backend `{backend}`")));
        }
        if !guest.is_allowed(now) {
            return Some(Failure::revoked(backend));
        }
        let kind = if call.what == What::Tool { List::Tools } else { List::Prompts };
        match (call.what, &call.shown) {
            (What::Tool, Some(shown)) if self.switches.is_tool_off(shown) => {
                Some(Failure::switched_off(backend, &format!("The tool `{shown}`")))
            }
            (What::Tool | What::Prompt | What::Complete, Some(shown)) => {
                let what = kind.one();
                if !self.roles.allow(role, shown) {
                    return Some(Failure::denied(backend, role, &format!("the {what} `{shown}`")));
                }
                // What its backend does not list at the moment was visible when the call came.
                let is_hidden = self.catalogue.find(kind, shown).is_some_and(|(index, _)| !view.sees(kind, index));
                is_hidden.then(|| Failure::unknown(format!("there is no {what} `{shown}`")))
            }
            (What::Read | What::Complete, _) => {
                (!view.is_open(owner)).then(|| Failure::denied(backend, role, "resources of this backend"))
            }
            (What::Other, _) if !call.method.starts_with("tasks/") => (!self
                .forwards_unknown(call.whom.as_ref()?.client))
            .then(|| Failure::denied(backend, role, &format!("the method `{}`", call.method))),
            _ => None,
        }
    }

    /// The client took it back before anybody knew whether it can be done.
    pub(super) fn waited_in_vain(&mut self, waiting: Gathering) {
        self.forget(&waiting.whom);
        if let lists::Wants::Request { owner, message, .. } = waiting.wants
            && let Ok(message::Message::Request { method, params, .. }) = message::parse(&message)
        {
            let name = params.name().map(|name| text(name).into_owned());
            let backend = Some(self.owner_name(owner).to_owned());
            self.count_refused(waiting.whom.client, &method, name, backend, Outcome::Cancelled);
        }
    }

    /// Which backend a name would be of, by its prefix. The longest wins, as in `git__` and `git__hub__`.
    fn owner_by_prefix(&self, name: &str) -> Option<u32> {
        let fits = |number: &&u32| {
            let prefix = &self.owners[*number].settings.prefix;
            !prefix.is_empty() && name.starts_with(&names::plain(prefix, "")) || prefix.is_empty()
        };
        self.order.iter().filter(fits).max_by_key(|number| self.owners[*number].settings.prefix.len()).copied()
    }

    fn why_unknown(&self, kind: List, name: &str) -> String {
        let what = if kind == List::Tools { "tool" } else { "prompt" };
        match self.catalogue.collision(kind, name) {
            Some(lost) => format!(
                "there is no {what} `{name}` now: the name belongs to the backend `{}`, which does not offer it at the \
                 moment, so that of the backend `{}` is left out",
                self.owner_name(lost.winner),
                self.owner_name(lost.loser)
            ),
            None => format!("there is no {what} `{name}`"),
        }
    }

    fn prompt_asked(&mut self, asked: Asked<'_>, now: Instant) {
        let Some(name) = asked.params.name() else { return self.unknown(&asked, "`params` lacks `name`".into(), None) };
        let name = text(name);
        match self.prompt_target(&asked, &name, What::Prompt) {
            Ok(target) => self.send(asked, target, now),
            Err(Missed::Unresolved(owner)) => self.wait_for_offer(asked, owner, now),
            Err(Missed::Failed(failure)) => self.refused_named(&asked, &name, &failure),
        }
    }

    fn prompt_target(&self, asked: &Asked<'_>, name: &str, what: What) -> Result<Target, Missed> {
        let guest = &self.guests[&asked.whom.client];
        if let Some((index, entry)) = self.catalogue.find(List::Prompts, name) {
            if !self.roles.allow(guest.who.role.as_deref(), name) {
                let backend = self.owner_name(entry.owner);
                let failure = Failure::denied(backend, guest.who.role.as_deref(), &format!("the prompt `{name}`"));
                return Err(failure.into());
            }
            if !self.views[guest.view].sees(List::Prompts, index) {
                return Err(Failure::unknown(format!("there is no prompt `{name}`")).into());
            }
            let (owner, shown, own) = (entry.owner, Some(entry.shown.clone()), entry.own_json.clone());
            return Ok(Target { owner, place: None, what, shown, own, repeatable: true });
        }
        match self.owner_by_prefix(name) {
            Some(owner) if self.switches.is_backend_off(self.owner_name(owner)) => {
                let backend = self.owner_name(owner);
                Err(Failure::switched_off(backend, &format!("The backend `{backend}`")).into())
            }
            Some(owner) if self.owners[&owner].standing != Standing::Confirmed => Err(Missed::Unresolved(owner)),
            _ => Err(Failure::unknown(self.why_unknown(List::Prompts, name)).into()),
        }
    }

    fn resource_asked(&mut self, asked: Asked<'_>, now: Instant) {
        let Some(uri) = asked.params.uri() else { return self.unknown(&asked, "`params` lacks `uri`".into(), None) };
        let uri = text(uri);
        match self.resource_owner(asked.whom.client, &uri) {
            Ok(owner) => {
                let repeatable = asked.params.request_state().is_none();
                let target = Target { owner, place: None, what: What::Read, shown: None, own: None, repeatable };
                self.send(asked, target, now);
            }
            Err(mut failure) => {
                // It may be of a backend that has not said yet what it has.
                let unheard = |number: &&u32| self.owners[*number].standing == Standing::Unknown;
                if failure.outcome == Outcome::Unknown
                    && self.stopping.is_none()
                    && let Some(owner) = self.order.iter().find(unheard).copied()
                {
                    return self.wait_for_offer(asked, owner, now);
                }
                // The older era has a code of its own for this.
                if asked.whom.era == Era::Handshake && failure.outcome == Outcome::Unknown {
                    failure.code = -32002;
                }
                self.refused(&asked, None, &failure);
            }
        }
    }

    /// Who has a resource: the backend that lists it, then one with a template that fits, then the only one that has any.
    pub(super) fn resource_owner(&self, client: Client, uri: &str) -> Result<u32, Box<Failure>> {
        let guest = &self.guests[&client];
        let view = &self.views[guest.view];
        let listed = self.catalogue.find(List::Resources, uri).map(|(index, entry)| (index, entry.owner));
        let by_template = || {
            let is_short = uri.len() <= URI_MATCHED_MAX;
            let templates = self.catalogue.all(List::Templates).iter().enumerate().filter(|_| is_short);
            let fitting = templates.filter(|(_, entry)| subscriptions::fits_template(&entry.own, uri));
            // The one that says most of the address, as `file:///{path}` fits whatever `file:///logs/{day}` does.
            fitting.max_by_key(|(_, entry)| entry.own.find('{')).map(|(index, entry)| (index as u32, entry.owner))
        };
        let found = match listed {
            Some((index, owner)) => Some((view.sees(List::Resources, index), owner)),
            None => by_template().map(|(index, owner)| (view.sees(List::Templates, index), owner)),
        };
        if let Some((sees, owner)) = found {
            return match sees {
                true => Ok(owner),
                false => {
                    Err(Failure::denied(self.owner_name(owner), guest.who.role.as_deref(), &format!("`{uri}`")).into())
                }
            };
        }
        // Who is the only one, nobody knows before all have spoken.
        if self.owners.values().any(|owner| owner.standing == Standing::Unknown) {
            return Err(Failure::unknown(format!("no backend lists the resource `{}`", words::cut(uri, 200))).into());
        }
        let mut with_any = self.order.iter().copied().filter(|number| {
            let owner = &self.owners[number];
            let text = std::str::from_utf8(&owner.offer.capabilities).ok().and_then(Raw::parse);
            !self.switches.is_backend_off(&owner.settings.name)
                && view.is_open(*number)
                && text.and_then(|raw| pick(raw, ["resources"])).is_some_and(|[member]| member.is_some())
        });
        match (with_any.next(), with_any.next()) {
            (Some(owner), None) => Ok(owner),
            (Some(_), Some(_)) => {
                Err(Failure::unknown(format!("no backend lists the resource `{}`", words::cut(uri, 200))).into())
            }
            (None, _) => Err(Failure::unknown("no backend has resources".into()).into()),
        }
    }

    fn completion_asked(&mut self, asked: Asked<'_>, now: Instant) {
        let reference = asked.params.reference().and_then(|raw| pick(raw, ["name", "uri"]));
        let target = match reference {
            Some([Some(name), _]) => self.prompt_target(&asked, &text(name), What::Complete),
            Some([None, Some(uri)]) => self
                .resource_owner_of_template(asked.whom.client, &text(uri))
                .map(|owner| Target {
                    owner,
                    place: None,
                    what: What::Complete,
                    shown: None,
                    own: None,
                    repeatable: true,
                })
                .map_err(Missed::from),
            _ => Err(Failure::unknown("`params.ref` names neither a prompt nor a resource".into()).into()),
        };
        match target {
            // A backend that completes nothing has nothing to say.
            Ok(target) if self.cannot_complete(target.owner) => {
                let complete = if asked.whom.era == Era::Stateless { r#","resultType":"complete""# } else { "" };
                self.answer_result(&asked.whom, &format!(r#"{{"completion":{{"values":[]}}{complete}}}"#));
                let backend = Some(self.owner_name(target.owner).to_owned());
                self.count_refused(asked.whom.client, asked.method, None, backend, Outcome::Answered);
            }
            Ok(target) => self.send(asked, target, now),
            Err(Missed::Unresolved(owner)) => self.wait_for_offer(asked, owner, now),
            Err(Missed::Failed(failure)) => self.refused(&asked, None, &failure),
        }
    }

    fn resource_owner_of_template(&self, client: Client, uri: &str) -> Result<u32, Box<Failure>> {
        match self.catalogue.find(List::Templates, uri) {
            Some((index, entry)) if self.views[self.guests[&client].view].sees(List::Templates, index) => {
                Ok(entry.owner)
            }
            _ => self.resource_owner(client, uri),
        }
    }

    fn cannot_complete(&self, owner: u32) -> bool {
        let Some(serial) = self.serving(self.first_place(owner)) else { return false };
        !self.links[&serial].has.completions
    }

    /// A method that MCP does not have can only be for a backend that is alone, and no guard of tools applies to it: it is
    /// forwarded for clients that may call everything, or if that is configured.
    fn other_asked(&mut self, asked: Asked<'_>, now: Instant) {
        let client = asked.whom.client;
        match self.order[..] {
            [_] if methods::resembles_known(asked.method) => {
                let words = format!("`{}` is spelled unlike the method it resembles", words::cut(asked.method, 100));
                self.refused(&asked, None, &Failure::method_unknown(words));
            }
            [owner] if !is_of_other_era(asked.method) && !self.forwards_unknown(client) => {
                let what = format!(
                    "the method `{}`, which is not part of MCP (`forward_unknown` in [gateway] allows it)",
                    words::cut(asked.method, 100)
                );
                let role = self.guests[&client].who.role.clone();
                let failure = Failure::denied(self.owner_name(owner), role.as_deref(), &what);
                self.refused(&asked, None, &failure);
            }
            [owner] if !self.switches.is_backend_off(self.owner_name(owner)) && !is_of_other_era(asked.method) => {
                let target =
                    Target { owner, place: None, what: What::Other, shown: None, own: None, repeatable: false };
                self.send(asked, target, now);
            }
            _ if is_of_other_era(asked.method) => {
                let words = format!("`{}` is not part of the revision of MCP that this client speaks", asked.method);
                self.refused(&asked, None, &Failure::method_unknown(words));
            }
            _ => {
                let words = format!("the gateway does not know the method `{}`", words::cut(asked.method, 100));
                self.refused(&asked, None, &Failure::method_unknown(words));
            }
        }
    }

    /// About something that a link already has.
    pub(super) fn send_to(&mut self, asked: Asked<'_>, place: PlaceKey, now: Instant) {
        let owner = place.backend;
        let target = Target { owner, place: Some(place), what: What::Other, shown: None, own: None, repeatable: false };
        self.send(asked, target, now);
    }

    /// The last guard, and away.
    fn send(&mut self, asked: Asked<'_>, target: Target, now: Instant) {
        if let Some(state) = asked.params.request_state()
            && self.resume_parked(&asked, state, now)
        {
            return;
        }
        let place = match target.place {
            Some(place) => place,
            None => match self.place_for(target.owner, &asked.whom, asked.says, now) {
                Ok(place) => place,
                Err(failure) => return self.refused(&asked, Some(&target), &failure),
            },
        };
        let Some(owner) = self.owners.get_mut(&target.owner) else {
            return self.refused(&asked, Some(&target), &Failure::removed(""));
        };
        let pass = match owner.breaker.ask(now) {
            Ok(pass) => Some(pass),
            Err(wait) => {
                let failure = Failure::circuit_open(&owner.settings.name, wait.retry_after);
                return self.refused(&asked, Some(&target), &failure);
            }
        };
        let Asked { whom, said, id, method, params, says } = asked;
        let call = Call {
            what: target.what,
            method: method_word(method),
            place,
            link: None,
            shown: target.shown,
            own: target.own,
            message: None,
            token: None,
            began: now,
            due: None,
            due_max: now,
            rounds: 0,
            repeatable: target.repeatable,
            resent: false,
            unsent_tries: 0,
            told_in: None,
            pass,
            task: params.task().is_some(),
            says,
            parked: None,
            inputs: None,
            whom: Some(whom),
        };
        self.dispatch(Box::new(call), said, id, params, now);
    }

    fn refused(&mut self, asked: &Asked<'_>, target: Option<&Target>, failure: &Failure) {
        let is_tool = asked.method == "tools/call";
        self.refuse(&asked.whom, is_tool, failure);
        let backend = target.map(|target| self.owner_name(target.owner).to_owned());
        let shown = target.and_then(|target| target.shown.as_deref().map(str::to_owned));
        self.count_refused(asked.whom.client, asked.method, shown, backend, failure.outcome);
    }

    /// Something that its backend has not said yet whether it has.
    fn refused_of(&mut self, asked: &Asked<'_>, owner: u32, failure: &Failure) {
        let shown = asked.params.name().map(|name| text(name).as_ref().into());
        let target = Target { owner, place: None, what: What::Other, shown, own: None, repeatable: false };
        self.refused(asked, Some(&target), failure);
    }

    fn refused_named(&mut self, asked: &Asked<'_>, name: &str, failure: &Failure) {
        self.refuse(&asked.whom, asked.method == "tools/call", failure);
        let name = Some(words::cut(name, 200));
        self.count_refused(asked.whom.client, asked.method, name, None, failure.outcome);
    }

    pub(super) fn unknown(&mut self, asked: &Asked<'_>, words: String, name: Option<&str>) {
        let failure = Failure::unknown(words);
        match name {
            Some(name) => self.refused_named(asked, name, &failure),
            None => self.refused(asked, None, &failure),
        }
    }
}

/// A string's content; copied only if something in it is escaped, or if it is no string.
fn text(raw: Raw<'_>) -> std::borrow::Cow<'_, str> {
    match raw.plain() {
        Some(plain) => plain.into(),
        None => raw.text().unwrap_or_default().into(),
    }
}

/// Whether a schema names this member somewhere.
fn has_word(schema: &[u8], member: &str) -> bool {
    memchr::memmem::find(schema, message::quote(member).as_bytes()).is_some()
}

/// Methods that a client of the one era has and a backend of the other does not: never passed on by accident.
fn is_of_other_era(method: &str) -> bool {
    let both = ["initialize", "ping", "server/discover", "logging/setLevel", "resources/subscribe"];
    both.contains(&method) || ["resources/unsubscribe", "subscriptions/listen"].contains(&method)
}

fn method_word(method: &str) -> std::borrow::Cow<'static, str> {
    match method {
        "tools/call" => "tools/call".into(),
        "prompts/get" => "prompts/get".into(),
        "resources/read" => "resources/read".into(),
        "completion/complete" => "completion/complete".into(),
        other => words::cut(other, 100).into(),
    }
}
