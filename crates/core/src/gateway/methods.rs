//! The methods and notifications that are forwarded between clients and backends, and the refusal of all others.
//! Where a known request goes is decided in [`super::dispatch`].

use std::rc::Rc;

use super::{Action, Client, Gateway, RefusedNotification, Sender, clients, messages};
use crate::mcp::{TASKS_PREFIX, method, notification};

/// How much of a method's name is recorded if the sender chose it.
pub(super) const METHOD_SHOWN_MAX: usize = 100;

/// Notifications of a client that are forwarded to backends that only this client uses. The others of MCP are for the
/// gateway.
const FOR_OWN_BACKENDS: [&str; 2] = [notification::ROOTS_CHANGED, notification::TASK_STATUS];
/// Notifications of a backend that are forwarded unchanged to the client whose call they belong to.
const FOR_CALLER: [&str; 1] = [notification::ELICITATION_COMPLETE];

pub(super) fn is_for_own_backends(notification: &str) -> bool {
    FOR_OWN_BACKENDS.contains(&notification)
}

pub(super) fn is_for_caller(notification: &str) -> bool {
    FOR_CALLER.contains(&notification)
}

/// Whether a backend may send this request to a client in some revision of MCP.
pub(super) fn is_asked_of_clients(method: &str) -> bool {
    clients::capability_for(method).is_some() || method.starts_with(TASKS_PREFIX) && method::ALL.contains(&method)
}

/// Whether a method differs from one of MCP only in capitals, white space or control characters. A lenient backend may
/// take it for that one, and the guards would be bypassed.
pub(super) fn resembles_known(method: &str) -> bool {
    let is_noise = |letter: &char| letter.is_whitespace() || letter.is_control();
    let folded: String = method.chars().filter(|letter| !is_noise(letter)).flat_map(char::to_lowercase).collect();
    method::ALL.iter().any(|known| *known != method && known.eq_ignore_ascii_case(folded.trim_matches('/')))
}

impl Gateway {
    /// Whether methods that MCP does not have are forwarded for this client.
    pub(super) fn forwards_unknown(&self, client: Client) -> bool {
        self.settings.forward_unknown
            || self.clients.get(&client).is_some_and(|client_state| self.guards.has_all_rights(client_state.role()))
    }

    pub(super) fn refuse_client_notification(&mut self, client: Client, method: &str) {
        if let Some(client_state) = self.clients.get(&client) {
            let from = Sender::Client { client, who: Rc::clone(client_state.who()) };
            self.refuse_notification(from, method);
        }
    }

    pub(super) fn refuse_backend_notification(&mut self, serial: u64, method: &str) {
        let owner = self.links.get(&serial).and_then(|link_state| self.backends.get(&link_state.id().backend));
        if let Some(owner) = owner {
            let from = Sender::Backend(owner.name().clone());
            self.refuse_notification(from, method);
        }
    }

    fn refuse_notification(&mut self, from: Sender, method: &str) {
        let method = messages::cut(method, METHOD_SHOWN_MAX);
        self.out.push(Action::NotificationRefused(Box::new(RefusedNotification { from, method })));
    }
}
