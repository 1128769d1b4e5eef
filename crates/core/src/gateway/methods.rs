//! Methods that are forwarded between clients and backends: which of them MCP has, and what becomes of all others.
//! Where a known request goes is decided in [`super::dispatch`].

use super::{Action, Client, Gateway, METHOD_SHOWN_MAX, Rc, RefusedNotification, Sender, guests, words};

/// Every request of MCP, of either side and era.
const REQUESTS: [&str; 23] = [
    "initialize",
    "ping",
    "server/discover",
    "tools/list",
    "tools/call",
    "prompts/list",
    "prompts/get",
    "resources/list",
    "resources/templates/list",
    "resources/read",
    "resources/subscribe",
    "resources/unsubscribe",
    "subscriptions/listen",
    "completion/complete",
    "logging/setLevel",
    "tasks/get",
    "tasks/result",
    "tasks/list",
    "tasks/cancel",
    "tasks/update",
    "sampling/createMessage",
    "elicitation/create",
    "roots/list",
];

/// Notifications of a client that reach the backends that it has to itself. The others that MCP has are for the gateway.
const FOR_OWN_BACKENDS: [&str; 2] = ["notifications/roots/list_changed", "notifications/tasks/status"];
/// Notifications of a backend that reach the client whose call they are for, unchanged.
const FOR_CALLER: [&str; 1] = ["notifications/elicitation/complete"];

pub(super) fn is_for_own_backends(notification: &str) -> bool {
    FOR_OWN_BACKENDS.contains(&notification)
}

pub(super) fn is_for_caller(notification: &str) -> bool {
    FOR_CALLER.contains(&notification)
}

/// Whether a backend may ask a client for this in some revision of MCP.
pub(super) fn is_asked_of_clients(method: &str) -> bool {
    guests::capability_for(method).is_some() || method.starts_with("tasks/") && REQUESTS.contains(&method)
}

/// Whether a method is written like one of MCP but for capitals, white space or control characters. A lenient backend may
/// take it for that one, and its guards would be skipped.
pub(super) fn resembles_known(method: &str) -> bool {
    let is_noise = |letter: &char| letter.is_whitespace() || letter.is_control();
    let folded: String = method.chars().filter(|letter| !is_noise(letter)).flat_map(char::to_lowercase).collect();
    REQUESTS.iter().any(|known| *known != method && known.eq_ignore_ascii_case(folded.trim_matches('/')))
}

impl Gateway {
    /// Whether methods that MCP does not have are forwarded for this client.
    pub(super) fn forwards_unknown(&self, client: Client) -> bool {
        self.settings.forward_unknown
            || self.guests.get(&client).is_some_and(|guest| self.roles.has_all(guest.who.role.as_deref()))
    }

    pub(super) fn refuse_note_of_client(&mut self, client: Client, method: &str) {
        if let Some(guest) = self.guests.get(&client) {
            let from = Sender::Client { client, who: Rc::clone(&guest.who) };
            self.refuse_note(from, method);
        }
    }

    pub(super) fn refuse_note_of_link(&mut self, serial: u64, method: &str) {
        let owner = self.links.get(&serial).and_then(|connection| self.owners.get(&connection.link.backend));
        if let Some(owner) = owner {
            let from = Sender::Backend(owner.name.clone());
            self.refuse_note(from, method);
        }
    }

    fn refuse_note(&mut self, from: Sender, method: &str) {
        let method = words::cut(method, METHOD_SHOWN_MAX);
        self.out.push(Action::NotificationRefused(Box::new(RefusedNotification { from, method })));
    }
}
