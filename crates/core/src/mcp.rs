//! The names that MCP gives to things: protocol revisions, methods, `_meta` members and the lists of a server.
//! What a message means for a conversation is decided in `relay` and `gateway`.

use serde::{Deserialize, Serialize};

use crate::message::{Params, Raw, pick, text};

/// Protocol revisions. They are dates, so a smaller text is an older revision.
pub mod revision {
    /// The newest revision that opens a conversation with `initialize`.
    pub const NEWEST_HANDSHAKE: &str = "2025-11-25";
    /// The first revision in which an event stream begins with an event that has only an id.
    /// Clients of earlier revisions fail on it.
    pub const FIRST_WITH_PRIMING: &str = "2025-11-25";
    /// The only revision with JSON-RPC batches.
    pub const WITH_BATCHES: &str = "2025-03-26";
    /// Every revision that opens a conversation with `initialize`, newest first.
    pub const HANDSHAKE: [&str; 4] = [NEWEST_HANDSHAKE, "2025-06-18", WITH_BATCHES, "2024-11-05"];
    /// The revision without a handshake: each request carries its version in `_meta`.
    pub const STATELESS: &str = "2026-07-28";

    /// Whether this names a revision without a handshake, a known one or a later one.
    pub fn is_stateless(version: &str) -> bool {
        let is_date = version.len() == 10
            && version.bytes().enumerate().all(|(at, byte)| match at {
                4 | 7 => byte == b'-',
                _ => byte.is_ascii_digit(),
            });
        is_date && version > NEWEST_HANDSHAKE
    }
}

/// Methods of requests.
pub mod method {
    pub const INITIALIZE: &str = "initialize";
    pub const PING: &str = "ping";
    pub const DISCOVER: &str = "server/discover";
    pub const TOOLS_LIST: &str = "tools/list";
    pub const TOOLS_CALL: &str = "tools/call";
    pub const PROMPTS_LIST: &str = "prompts/list";
    pub const PROMPTS_GET: &str = "prompts/get";
    pub const RESOURCES_LIST: &str = "resources/list";
    pub const TEMPLATES_LIST: &str = "resources/templates/list";
    pub const RESOURCES_READ: &str = "resources/read";
    pub const SUBSCRIBE: &str = "resources/subscribe";
    pub const UNSUBSCRIBE: &str = "resources/unsubscribe";
    pub const LISTEN: &str = "subscriptions/listen";
    pub const COMPLETE: &str = "completion/complete";
    pub const SET_LEVEL: &str = "logging/setLevel";
    pub const TASKS_GET: &str = "tasks/get";
    pub const TASKS_RESULT: &str = "tasks/result";
    pub const TASKS_LIST: &str = "tasks/list";
    pub const TASKS_CANCEL: &str = "tasks/cancel";
    pub const TASKS_UPDATE: &str = "tasks/update";
    pub const CREATE_MESSAGE: &str = "sampling/createMessage";
    pub const ELICIT: &str = "elicitation/create";
    pub const ROOTS_LIST: &str = "roots/list";

    /// Every request of MCP, of either side and era.
    pub const ALL: [&str; 23] = [
        INITIALIZE,
        PING,
        DISCOVER,
        TOOLS_LIST,
        TOOLS_CALL,
        PROMPTS_LIST,
        PROMPTS_GET,
        RESOURCES_LIST,
        TEMPLATES_LIST,
        RESOURCES_READ,
        SUBSCRIBE,
        UNSUBSCRIBE,
        LISTEN,
        COMPLETE,
        SET_LEVEL,
        TASKS_GET,
        TASKS_RESULT,
        TASKS_LIST,
        TASKS_CANCEL,
        TASKS_UPDATE,
        CREATE_MESSAGE,
        ELICIT,
        ROOTS_LIST,
    ];
}

/// How the methods about tasks begin.
pub const TASKS_PREFIX: &str = "tasks/";

/// Headers of the HTTP transport, in the lower case in which HTTP libraries compare them.
pub mod header {
    pub const SESSION_ID: &str = "mcp-session-id";
    pub const PROTOCOL_VERSION: &str = "mcp-protocol-version";
    pub const METHOD: &str = "mcp-method";
    pub const NAME: &str = "mcp-name";
    /// How the headers begin that repeat an argument of a tool.
    pub const PARAM_PREFIX: &str = "mcp-param-";
}

/// The parameter that the header [`header::NAME`] of a stateless request repeats.
pub fn repeated_name<'a>(method: &str, params: &Params<'a>) -> Option<Raw<'a>> {
    match method {
        method::TOOLS_CALL | method::PROMPTS_GET => params.name(),
        method::RESOURCES_READ => params.uri(),
        method::TASKS_GET | method::TASKS_UPDATE | method::TASKS_CANCEL => params.task_id(),
        _ => None,
    }
}

/// Methods of notifications.
pub mod notification {
    pub const INITIALIZED: &str = "notifications/initialized";
    pub const CANCELLED: &str = "notifications/cancelled";
    pub const PROGRESS: &str = "notifications/progress";
    pub const MESSAGE: &str = "notifications/message";
    pub const ROOTS_CHANGED: &str = "notifications/roots/list_changed";
    pub const TOOLS_CHANGED: &str = "notifications/tools/list_changed";
    pub const PROMPTS_CHANGED: &str = "notifications/prompts/list_changed";
    pub const RESOURCES_CHANGED: &str = "notifications/resources/list_changed";
    pub const RESOURCE_UPDATED: &str = "notifications/resources/updated";
    pub const ACKNOWLEDGED: &str = "notifications/subscriptions/acknowledged";
    pub const ELICITATION_COMPLETE: &str = "notifications/elicitation/complete";
    pub const TASKS: &str = "notifications/tasks";
    pub const TASK_STATUS: &str = "notifications/tasks/status";
}

/// Members of `_meta`.
pub mod meta {
    pub const PROGRESS_TOKEN: &str = "progressToken";
    /// How the names that MCP reserves begin.
    pub const PREFIX: &str = "io.modelcontextprotocol/";
    pub const PROTOCOL_VERSION: &str = "io.modelcontextprotocol/protocolVersion";
    pub const CLIENT_INFO: &str = "io.modelcontextprotocol/clientInfo";
    pub const CLIENT_CAPABILITIES: &str = "io.modelcontextprotocol/clientCapabilities";
    pub const LOG_LEVEL: &str = "io.modelcontextprotocol/logLevel";
    pub const SERVER_INFO: &str = "io.modelcontextprotocol/serverInfo";
    pub const SUBSCRIPTION_ID: &str = "io.modelcontextprotocol/subscriptionId";
    pub const RELATED_TASK: &str = "io.modelcontextprotocol/related-task";
}

/// The four lists of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum List {
    Tools,
    Prompts,
    Resources,
    Templates,
}

/// The lists that one `list_changed` notification is about: templates belong to the resources.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    Tools,
    Prompts,
    Resources,
}

impl List {
    pub const ALL: [List; 4] = [List::Tools, List::Prompts, List::Resources, List::Templates];

    /// The list that this method asks for.
    pub fn of(method: &str) -> Option<List> {
        List::ALL.into_iter().find(|list| list.method() == method)
    }

    pub fn method(self) -> &'static str {
        match self {
            List::Tools => method::TOOLS_LIST,
            List::Prompts => method::PROMPTS_LIST,
            List::Resources => method::RESOURCES_LIST,
            List::Templates => method::TEMPLATES_LIST,
        }
    }

    /// The member of the result that holds the items.
    pub fn member(self) -> &'static str {
        match self {
            List::Tools => "tools",
            List::Prompts => "prompts",
            List::Resources => "resources",
            List::Templates => "resourceTemplates",
        }
    }

    /// The member of an item that identifies it.
    pub fn key(self) -> &'static str {
        match self {
            List::Tools | List::Prompts => "name",
            List::Resources => "uri",
            List::Templates => "uriTemplate",
        }
    }

    /// What people call one item.
    pub fn one(self) -> &'static str {
        match self {
            List::Tools => "tool",
            List::Prompts => "prompt",
            List::Resources => "resource",
            List::Templates => "resource template",
        }
    }

    pub fn family(self) -> Family {
        match self {
            List::Tools => Family::Tools,
            List::Prompts => Family::Prompts,
            List::Resources | List::Templates => Family::Resources,
        }
    }
}

/// How many items of one page are read.
pub const PAGE_ITEMS_MAX: usize = 100_000;

/// One page of a list.
pub struct Page<'a> {
    /// The first [`PAGE_ITEMS_MAX`].
    pub items: Vec<Raw<'a>>,
    /// There are more.
    pub is_cut: bool,
    pub array: Raw<'a>,
    /// The cursor of the next page.
    pub next: Option<String>,
}

impl<'a> Page<'a> {
    pub fn parse(list: List, result: Raw<'a>) -> Option<Page<'a>> {
        let [array, next] = pick(result, [list.member(), "nextCursor"])?;
        let array = array?;
        let (items, is_cut) = array.first_elements(PAGE_ITEMS_MAX)?;
        Some(Page { items, is_cut, array, next: next.and_then(text) })
    }
}

impl Family {
    pub const ALL: [Family; 3] = [Family::Tools, Family::Prompts, Family::Resources];

    /// The family that this notification is about.
    pub fn of(notification: &str) -> Option<Family> {
        Family::ALL.into_iter().find(|family| family.method() == notification)
    }

    /// The notification that a list of this family changed.
    pub fn method(self) -> &'static str {
        match self {
            Family::Tools => notification::TOOLS_CHANGED,
            Family::Prompts => notification::PROMPTS_CHANGED,
            Family::Resources => notification::RESOURCES_CHANGED,
        }
    }

    /// The capability that a server declares for it.
    pub fn name(self) -> &'static str {
        match self {
            Family::Tools => "tools",
            Family::Prompts => "prompts",
            Family::Resources => "resources",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Family, List, meta, method, revision};

    #[test]
    fn each_list_is_found_by_its_method_and_each_family_by_its_notification() {
        for list in List::ALL {
            assert_eq!(List::of(list.method()), Some(list));
            assert!(method::ALL.contains(&list.method()));
        }
        for family in Family::ALL {
            assert_eq!(Family::of(family.method()), Some(family));
        }
        assert_eq!((List::of("tools/call"), Family::of("notifications/message")), (None, None));
    }

    #[test]
    fn revisions_are_ordered_as_text() {
        assert!(revision::HANDSHAKE.is_sorted_by(|newer, older| newer > older));
        assert!(revision::STATELESS > revision::NEWEST_HANDSHAKE);
    }

    #[test]
    fn a_revision_names_its_era() {
        let table = [
            ("2026-07-28", true),
            ("2027-01-01", true),
            ("2025-11-25", false),
            ("2025-03-26", false),
            ("1999-01-01", false),
            ("draft", false),
            ("", false),
            ("2026-07-2x", false),
            ("2026/07/28", false),
            ("2026-07-281", false),
        ];
        for (version, is) in table {
            assert_eq!(revision::is_stateless(version), is, "{version}");
        }
    }

    #[test]
    fn reserved_meta_names_begin_with_the_prefix() {
        let reserved = [
            meta::PROTOCOL_VERSION,
            meta::CLIENT_INFO,
            meta::CLIENT_CAPABILITIES,
            meta::LOG_LEVEL,
            meta::SERVER_INFO,
            meta::SUBSCRIPTION_ID,
            meta::RELATED_TASK,
        ];
        assert!(reserved.iter().all(|name| name.starts_with(meta::PREFIX)));
    }
}
