//! Calls of a backend with placement `one` that guards refuse now. Its host may hold such a call, or collect its client's
//! input, and has no guards: the client's replica asks the host not to send the call. A call that was sent is left alone.

use std::time::Instant;

use super::{
    Client, Gateway,
    calls::{Call, ReplyTo},
    messages::{Failure, WITHDRAW, WITHDRAWN, error_code},
    settings::Placement,
    timers::Timer,
};
use crate::{
    json::Raw,
    message::{self, Id},
};

impl Gateway {
    /// It is at the host of its backend, which another replica may run.
    fn is_at_host(&self, call: &Call) -> bool {
        let is_placed = || {
            let owner = self.backends.get(&call.slot.backend);
            owner.is_some_and(|owner| owner.settings().placement == Placement::One)
        };
        !self.settings.is_host && call.link.is_some() && call.reply_to.is_some() && is_placed()
    }

    /// Guards or credentials have changed: calls that they refuse now are not to be sent any more.
    pub(super) fn withdraw_refused_calls(&mut self, now: Instant) {
        let open = self.calls.iter().filter(|(_, call)| call.withdrawn.is_none() && self.is_at_host(call));
        let refused: Vec<(u64, Failure)> =
            open.filter_map(|(key, call)| Some((key, self.refused_since(call, now)?))).collect();
        for (key, failure) in refused {
            let Some(call) = self.calls.get_mut(&key) else { continue };
            let Some(serial) = call.link else { continue };
            call.withdrawn = Some(Box::new(failure));
            self.tell_link(serial, message::notification_line(WITHDRAW, &format!(r#""requestId":{key}"#)));
        }
    }

    /// When the credentials of clients expire whose calls are at a host.
    pub(super) fn withdrawal_deadlines(&self) -> impl Iterator<Item = Instant> {
        let open = self.calls.values().filter(|call| call.withdrawn.is_none() && self.is_at_host(call));
        open.filter_map(|call| self.clients.get(&call.reply_to.as_ref()?.client)?.allowed_until())
    }

    /// A call was sent to a host.
    pub(super) fn watch_credentials(&mut self, key: u64) {
        let Some(call) = self.calls.get(&key).filter(|call| self.is_at_host(call)) else { return };
        let client = call.reply_to.as_ref().and_then(|reply_to| self.clients.get(&reply_to.client));
        if let Some(until) = client.and_then(|client_state| client_state.allowed_until()) {
            self.timers.arm(Timer::Calls, until);
        }
    }

    /// The failure of a call that its host did not send because it was withdrawn.
    pub(super) fn withdrawn_failure(&mut self, key: u64, error: Option<Raw<'_>>) -> Option<Failure> {
        if error_code(error?) != Some(WITHDRAWN) {
            return None;
        }
        self.calls.get_mut(&key)?.withdrawn.take().map(|failure| *failure)
    }

    /// A replica withdraws a call. It is refused here unless it was sent; then it is not sent a second time.
    pub(super) fn call_withdrawn(&mut self, client: Client, id: &Id, now: Instant) {
        let is_it = |reply_to: &ReplyTo| reply_to.client == client && reply_to.id == *id;
        let of = |call: &Call| call.reply_to.as_ref().is_some_and(is_it);
        if let Some(key) = self.calls.keys_where(of).first().copied() {
            let Some(mut call) = self.calls.remove(&key) else { return };
            let failure = Failure::withdrawn(self.backends.name(call.slot.backend));
            match call.link {
                Some(_) if call.inputs.is_none() => {
                    call.withdrawn = Some(Box::new(failure));
                    return self.calls.insert(key, call);
                }
                Some(serial) => {
                    self.drop_requests_of_call(key, &call, "the call that this was for was refused");
                    self.call_finished(serial, now);
                }
                None => {
                    if let Some(slot) = self.slots.get_mut(&call.slot) {
                        slot.unhold(key);
                    }
                }
            }
            return self.fail(*call, failure, now);
        }
        if let Some(wait) = self.offer_waits.take_first(is_it) {
            self.refuse(&wait.reply_to, false, &Failure::withdrawn(""));
        }
    }
}
