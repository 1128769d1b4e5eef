//! Every key of `outlast.toml`, as data. The reader, `config show`, the JSON schema and the reference page of the book all
//! come from this one list, so none of them can know a key that another does not.

/// One key of a table.
#[derive(Debug)]
pub struct Key {
    pub name: &'static str,
    pub shape: Shape,
    /// As it could stand in the file; empty if there is none. It is read like a value of the file, so it cannot be wrong.
    pub default: &'static str,
    /// One or two sentences for people.
    pub about: &'static str,
    pub guard: Guard,
}

/// Whether a file that outlast found by itself may set a key before the user trusts it (SPEC X1). Besides, no key of
/// such a file may refer to the environment by `${NAME}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guard {
    Never,
    /// It runs something, passes on the environment, connects to an address or opens a listener.
    Always,
    /// It is a path, which is harmless as long as it stays in the directory of the file.
    Outside,
}

#[derive(Debug, Clone, Copy)]
pub enum Shape {
    Text,
    /// Relative to the directory of the file.
    Path,
    Paths,
    Texts,
    /// Names with `*`.
    Patterns,
    /// Texts by name.
    Pairs,
    Count {
        least: u64,
        most: u64,
    },
    Truth,
    Span,
    Size,
    /// An address to listen on.
    Address,
    Choice(&'static [&'static str]),
    Choices(&'static [&'static str]),
    /// TCP ports: a list, or `"any"`.
    Ports {
        least: u16,
    },
    /// How many processes: `"shared"`, `"per_session"` or `{ pool = n }`.
    Children,
    /// `[name]`
    Table(&'static [Key]),
    /// `[name.NAME]`, in the order of the file.
    Named(&'static [Key]),
    /// `[[name]]`
    Many(&'static [Key]),
}

impl Shape {
    /// The keys of the tables below it.
    pub fn inner(self) -> Option<&'static [Key]> {
        match self {
            Shape::Table(keys) | Shape::Named(keys) | Shape::Many(keys) => Some(keys),
            _ => None,
        }
    }
}

const fn key(name: &'static str, shape: Shape, default: &'static str, about: &'static str) -> Key {
    Key { name, shape, default, about, guard: Guard::Never }
}

impl Key {
    const fn guarded(self) -> Key {
        Key { guard: Guard::Always, ..self }
    }

    const fn guarded_outside(self) -> Key {
        Key { guard: Guard::Outside, ..self }
    }
}

const ANY: Shape = Shape::Count { least: 0, most: u32::MAX as u64 };
const SOME: Shape = Shape::Count { least: 1, most: u32::MAX as u64 };

pub const ROOT: &[Key] = &[
    key("gateway", Shape::Table(GATEWAY), "", "The endpoint that clients connect to."),
    key("backend", Shape::Many(BACKEND), "", "One server behind the gateway: a command, or an address."),
    key("profile", Shape::Named(PROFILE), "", "A view of the catalogue that a client can be given."),
    key(
        "role",
        Shape::Named(ROLE),
        "",
        "What clients with this role may call. Without any role everything is allowed.",
    ),
    key(
        "auth",
        Shape::Table(AUTH),
        "",
        "Who may connect. Without it clients need no credentials, and the gateway listens on this machine only.",
    )
    .guarded(),
    key("rates", Shape::Table(RATES), "", "How often each client may call each tool."),
    key("switch", Shape::Table(SWITCH), "", "What is turned off, whoever asks."),
    key("limits", Shape::Table(LIMITS), "", "Bounds of the whole gateway."),
    key("mcp", Shape::Table(MCP), "", "What `outlast mcp` does where no option says otherwise."),
    key("run", Shape::Table(RUN), "", "What `outlast run` does where no option says otherwise."),
    key(
        "agent",
        Shape::Named(AGENT),
        "",
        "How `outlast run` drives an agent that it does not know: for a program of this name, and for `--agent NAME`.",
    ),
];

pub const GATEWAY: &[Key] = &[
    key("name", Shape::Text, "", "What people call this gateway. Otherwise it is called by its directory."),
    key(
        "listen",
        Shape::Address,
        "",
        "The address of the HTTP endpoint, such as `127.0.0.1:7332`; `localhost:7332`, `:7332` and `7332` mean this machine. Beyond this machine only with `[auth]`.",
    ).guarded(),
    key(
        "tls",
        Shape::Table(TLS),
        "",
        "The endpoint speaks HTTPS. Both files are read again when they change; if they cannot be used, those before stay in use.",
    ),
    key(
        "hosts",
        Shape::Texts,
        "",
        "Names under which clients reach the endpoint, besides those of this machine. Any other `Host` is refused.",
    ).guarded(),
    key(
        "origins",
        Shape::Texts,
        "",
        "Web pages that may connect, such as `https://app.example.com`, besides those of this machine. Any other `Origin` is refused.",
    ).guarded(),
    key("profile", Shape::Text, "", "The profile of clients that name none."),
    key(
        "sessions_max",
        SOME,
        "1024",
        "Sessions of the handshake era at a time. With one more, the one of the same client that was idle longest ends; if it has none that is idle, the new one is refused.",
    ),
    key(
        "sessions_per_client",
        SOME,
        "256",
        "The same for the sessions of one client, where clients prove who they are (`[auth]`).",
    ),
    key("session_idle", Shape::Span, "\"1h\"", "A session that nobody has used for so long is ended."),
    key("connections_max", SOME, "1024", "Open connections at a time. One more is told so and closed."),
    key("body_max", Shape::Size, "\"32MiB\"", "The largest message that is accepted."),
    key(
        "no_watch",
        Shape::Truth,
        "false",
        "The file is not read again when it changes, but on SIGHUP and by `outlast reload`.",
    ),
    key(
        "forward_unknown",
        Shape::Truth,
        "false",
        "Requests with a method that MCP does not have are forwarded for every role, not only for roles that may call everything. They are only forwarded where there is one backend.",
    ),
    key("stdin_grace", Shape::Span, "\"1s\"", "How long a backend may take to end after its stdin is closed."),
    key("term_grace", Shape::Span, "\"2s\"", "How long it may take after SIGTERM."),
];

pub const TLS: &[Key] = &[
    key("cert", Shape::Path, "", "The certificate and those that signed it, in PEM.").guarded_outside(),
    key("key", Shape::Path, "", "The private key of the certificate, in PEM.").guarded_outside(),
];

pub const BACKEND: &[Key] = &[
    key("name", Shape::Text, "", "What it is called, and what its tools begin with. Letters, digits, `_` and `-`."),
    key("command", Shape::Text, "", "The program to start. Either this or `url`.").guarded(),
    key("args", Shape::Texts, "[]", "Its arguments.").guarded(),
    key("env", Shape::Pairs, "{}", "Variables for its environment. Secrets by reference: `\"${GITHUB_TOKEN}\"`.")
        .guarded(),
    key(
        "inherit_env",
        Shape::Truth,
        "false",
        "It gets all variables of the gateway's own environment, its secrets among them, and not only the usual ones.",
    )
    .guarded(),
    key("cwd", Shape::Path, "\".\"", "Where it works.").guarded_outside(),
    key("url", Shape::Text, "", "The address of a server that runs already. Either this or `command`.").guarded(),
    key(
        "headers",
        Shape::Pairs,
        "{}",
        "Headers for each request to `url`. Secrets by reference: `\"Bearer ${TOKEN}\"`.",
    )
    .guarded(),
    key(
        "type",
        Shape::Choice(&["stdio", "http", "sse"]),
        "",
        "What is spoken to it: stdio to a command, Streamable HTTP to an address, or `sse`, the old transport with two endpoints.",
    ),
    key(
        "prefix",
        Shape::Text,
        "",
        "What its tools and prompts begin with. Otherwise its name and `__`; `\"\"` is nothing.",
    ),
    key("allow", Shape::Patterns, "", "Only these of its tools are offered, by its own names for them."),
    key("deny", Shape::Patterns, "[]", "These of its tools are not offered."),
    key("children", Shape::Children, "\"shared\"", "One process for all clients, one for each session, or a pool."),
    key(
        "children_max",
        SOME,
        "64",
        "With `children = \"per_session\"`: how many processes sessions may have at a time. A call that needs one more is refused.",
    ),
    key(
        "start",
        Shape::Choice(&["eager", "lazy"]),
        "\"eager\"",
        "When its process starts: with the gateway, or with the first request that needs it. A lazy one without a cached catalogue is started once to read it, and stopped again.",
    ),
    key(
        "era",
        Shape::Choice(&["auto", "handshake", "stateless"]),
        "\"auto\"",
        "Which revisions of MCP are spoken to it. By itself the gateway finds out.",
    ),
    key(
        "policy",
        Shape::Choice(&["exponential", "watchdog"]),
        "\"exponential\"",
        "When it is started again after a crash: doubling delays, or 1, 5 and 10 s apart for ever.",
    ),
    key(
        "max_restarts",
        ANY,
        "",
        "It is given up after so many restarts in a row; 0 is never. Otherwise 5 for `exponential`, and never for `watchdog`.",
    ),
    key(
        "first_restart",
        Shape::Choice(&["at-once", "delay"]),
        "\"at-once\"",
        "The first crash of a server that had been ready for 5 s: back at once, or after the delay.",
    ),
    key("delay_first", Shape::Span, "\"1s\"", "Of `exponential`: the first delay."),
    key("delay_max", Shape::Span, "\"60s\"", "Of `exponential`: the longest delay."),
    key(
        "call_timeout",
        Shape::Span,
        "\"60s\"",
        "A call that takes longer is cancelled and fails. Progress begins it anew.",
    ),
    key("call_max", Shape::Span, "\"10m\"", "How long a call may take in all, with whatever progress."),
    key(
        "start_timeout",
        Shape::Span,
        "\"120s\"",
        "How long it may take for its handshake. The first start of a package may be its installation.",
    ),
    key(
        "idle_stop",
        Shape::Span,
        "",
        "A process that nobody has called for so long is stopped, and started again by the next call.",
    ),
    key("memory_max", Shape::Size, "", "A process that holds more, with all below it, is replaced."),
    key(
        "sandbox",
        Shape::Table(SANDBOX),
        "",
        "What its processes may use, enforced by the kernel (Linux): see [sandbox](sandbox.md). `sandbox = {}` is the strictest.",
    ),
    key("breaker", Shape::Table(BREAKER), "", "When calls stop being sent to a backend that only fails."),
    key(
        "retry",
        Shape::Choice(&["never", "annotated"]),
        "\"never\"",
        "Whether a tool call that was running at a crash is asked again: only if the tool is annotated as read-only or idempotent, or never.",
    ),
    key("disabled", Shape::Truth, "false", "It is left out, as if it were not in the file."),
];

/// Keys of a backend that only a command has.
pub const OF_COMMANDS: &[&str] = &[
    "args",
    "env",
    "inherit_env",
    "cwd",
    "children",
    "children_max",
    "start",
    "policy",
    "max_restarts",
    "first_restart",
    "delay_first",
    "delay_max",
    "idle_stop",
    "memory_max",
    "sandbox",
];

/// Keys of a backend that only an address has.
pub const OF_ADDRESSES: &[&str] = &["headers"];

/// None of these is guarded as a whole: a file that is not trusted may restrict a server. Paths outside of its directory are
/// left out, which restricts the server further.
pub const SANDBOX: &[Key] = &[
    key("read", Shape::Paths, "", "Files and directories that may be read and executed, besides the system's.")
        .guarded_outside(),
    key("write", Shape::Paths, "", "Files and directories that may be changed, too.").guarded_outside(),
    key(
        "tcp_connect",
        Shape::Ports { least: 1 },
        "",
        "Ports that it may connect to over TCP, on any host; `\"any\"` does not restrict them. Otherwise none.",
    ),
    key(
        "tcp_bind",
        Shape::Ports { least: 0 },
        "",
        "Ports that it may listen on; 0 lets the system choose one, `\"any\"` does not restrict them. Otherwise none.",
    ),
];

pub const BREAKER: &[Key] = &[
    key("failures", ANY, "5", "Calls in a row that were lost, timed out or could not be sent; 0 is never."),
    key(
        "open",
        Shape::Span,
        "\"30s\"",
        "For so long nothing is sent. Then one call shows whether it is worth going on.",
    ),
];

pub const PROFILE: &[Key] = &[
    key("backends", Shape::Patterns, "", "Only these backends."),
    key("allow", Shape::Patterns, "", "Only these tools, by the names that clients see."),
    key("deny", Shape::Patterns, "[]", "Not these tools."),
    key("search", Shape::Truth, "false", "Three tools to search, describe and call instead of the whole list."),
];

pub const ROLE: &[Key] = &[
    key("allow", Shape::Patterns, "[\"*\"]", "Tools that may be called, by the names that clients see."),
    key("deny", Shape::Patterns, "[]", "Tools that may not. This has the last word."),
];

pub const AUTH: &[Key] = &[
    key("jwt", Shape::Table(JWT), "", "Signed tokens: `Authorization: Bearer …`."),
    key(
        "key",
        Shape::Many(API_KEY),
        "",
        "An API key: `Authorization: Bearer …` or `X-API-Key: …`. `outlast gateway hash-key` makes one.",
    ),
    key(
        "default_role",
        Shape::Text,
        "",
        "The role of tokens and keys that name none. Without it they may call nothing as soon as there are roles.",
    ),
];

pub const ALGORITHMS: &[&str] = &["HS256", "RS256", "ES256"];

pub const JWT: &[Key] = &[
    key("secret_env", Shape::Text, "", "The variable in which the secret for HS256 stands, at least 32 bytes of it."),
    key(
        "jwks",
        Shape::Path,
        "",
        "A file with the public keys for RS256 and ES256 (a JWK set). It is read again with the configuration.",
    ),
    key(
        "algorithms",
        Shape::Choices(ALGORITHMS),
        "",
        "What a token may be signed by. Otherwise HS256 with a secret, RS256 and ES256 with a key set.",
    ),
    key("issuer", Shape::Text, "", "Who must have issued it (`iss`)."),
    key("audience", Shape::Texts, "", "Whom it must be meant for (`aud`): one of these."),
    key(
        "role_claim",
        Shape::Text,
        "\"role\"",
        "Where the role stands in the token; `a.b` is `b` within `a`. Of a list the first that is known counts.",
    ),
    key("name_claim", Shape::Text, "\"sub\"", "Where the client's name stands, for rates, audit and metrics."),
    key("profile_claim", Shape::Text, "", "Where the name of a profile stands, if it does."),
    key("leeway", Shape::Span, "\"30s\"", "By how much the clocks may differ."),
];

pub const API_KEY: &[Key] = &[
    key("name", Shape::Text, "", "Whose it is, for rates, audit and metrics."),
    key("sha256", Shape::Text, "", "The SHA-256 of the key in hexadecimal. The key itself stands nowhere."),
    key("role", Shape::Text, "", "Otherwise the default role."),
    key("profile", Shape::Text, "", "Otherwise the gateway's."),
];

pub const RATES: &[Key] = &[
    key("per_minute", SOME, "", "Calls a minute of each client to each tool. Otherwise there is no limit."),
    key("burst", SOME, "", "Calls that may come at once. Otherwise as many as in a minute."),
    key(
        "tool",
        Shape::Named(RATE),
        "",
        "Of these tools, by the names that clients see, with `*`. The first that fits counts.",
    ),
];

pub const RATE: &[Key] = &[
    key("per_minute", SOME, "", "Calls a minute of each client."),
    key("burst", SOME, "", "Calls that may come at once. Otherwise as many as in a minute."),
];

pub const SWITCH: &[Key] = &[
    key("tools", Shape::Texts, "[]", "Tools that are off, by the names that clients see."),
    key("backends", Shape::Texts, "[]", "Backends that are off."),
];

pub const LIMITS: &[Key] = &[
    key("hold", Shape::Span, "\"30s\"", "How long a call waits for a backend that is down."),
    key("held_max", SOME, "256", "Calls that wait for one backend. One more fails at once."),
    key("in_flight_max", SOME, "1024", "Calls of one client at a time. One more fails at once."),
    key("page", SOME, "1000", "Elements on one page of a list."),
    key("retry_given_up", Shape::Span, "\"5m\"", "A backend that was given up is tried again this often."),
];

pub const MCP: &[Key] = &[
    key("name", Shape::Text, "", "What people call the server. Otherwise it is called by its command."),
    key("watch", Shape::Paths, "[]", "The server is reloaded when a file here changes.").guarded_outside(),
    key("build", Shape::Text, "", "This is run in a shell before each reload.").guarded(),
    key(
        "reload",
        Shape::Choice(&["blue-green", "replace"]),
        "\"blue-green\"",
        "The new server is started beside the old one, or the old one is stopped first.",
    ),
    key("drain", Shape::Span, "\"60s\"", "How long a replaced server may finish its calls."),
    key(
        "retry",
        Shape::Choice(&["never", "annotated"]),
        "\"never\"",
        "Whether a tool call that was running at a crash is asked again.",
    ),
    key(
        "policy",
        Shape::Choice(&["watchdog", "exponential"]),
        "\"watchdog\"",
        "When it is started again after a crash: 1, 5 and 10 s apart for ever, or doubling delays.",
    ),
    key("max_restarts", ANY, "", "It is given up after so many restarts in a row; 0 is never."),
    key(
        "first_restart",
        Shape::Choice(&["at-once", "delay"]),
        "\"at-once\"",
        "The first crash of a server that had been ready for 5 s: back at once, or after the delay.",
    ),
    key(
        "on_clean_exit",
        Shape::Choice(&["end", "restart"]),
        "\"end\"",
        "What the server's exit code 0 means: outlast ends too, or starts it again when it is needed.",
    ),
    key(
        "start_timeout",
        Shape::Span,
        "",
        "How long a server may take for its handshake. Otherwise 120 s for the first, and 30 s after.",
    ),
    key(
        "answer_after",
        Shape::Span,
        "",
        "How long the first server may take for the handshake before outlast answers it. Otherwise 3 s with a cache of this command's last run, and 20 s without.",
    ),
    key(
        "heartbeat",
        Shape::Span,
        "",
        "How often outlast reports progress of a call whose server reports none. Otherwise never.",
    ),
    key(
        "call_timeout",
        Shape::Span,
        "",
        "How long a tool call may take without progress; then it is cancelled and fails. Otherwise there is no limit.",
    ),
    key(
        "sandbox",
        Shape::Table(SANDBOX),
        "",
        "What the server may use, enforced by the kernel (Linux): see [sandbox](sandbox.md). `sandbox = {}` is the strictest.",
    ),
    key("tool", Shape::Named(MCP_TOOL), "", "What is different for one of the server's tools."),
    key(
        "memory_max",
        Shape::Size,
        "",
        "A server that uses more memory, with all processes below it, is replaced (Linux). Otherwise there is no limit.",
    ),
    key(
        "restart_tool",
        Shape::Text,
        "\"restart_server\"",
        "The server's own tool that makes it exit with code 42: only a call of this one is answered as a success then.",
    ),
    key("hold", Shape::Span, "\"30s\"", "How long a request waits for a server that is down."),
    key("stdin_grace", Shape::Span, "\"1s\"", "How long a server may take to end after its stdin is closed."),
    key("term_grace", Shape::Span, "\"2s\"", "How long it may take after SIGTERM."),
    key(
        "no_tools",
        Shape::Truth,
        "false",
        "`restart_server`, `verify_server_restarted` and `server_status` are not added to its tools.",
    ),
    key("marker", Shape::Path, "", "Where the restart marker is written. Otherwise `.outlast/restart_marker`.")
        .guarded_outside(),
    key(
        "inherit",
        Shape::Truth,
        "false",
        "The server gets our own stdin and stdout, and is only restarted. None of the keys that are about messages goes with it.",
    ),
];

pub const MCP_TOOL: &[Key] =
    &[key("call_timeout", Shape::Span, "", "How long a call of this tool may take; `0s` is no limit.")];

pub const AGENT: &[Key] = &[
    key(
        "resume",
        Shape::Texts,
        "[]",
        "Added to the command line at a restart, to go on with the conversation. `{id}` stands for the id that `fresh` was given. Without it the agent is restarted as it was.",
    ).guarded(),
    key(
        "fresh",
        Shape::Texts,
        "[]",
        "Added to the command line when a conversation begins. `{id}` stands for a new UUID.",
    ).guarded(),
    key(
        "prompt",
        Shape::Text,
        "",
        "What the line one types in begins with. The agent is ready when it was shown; otherwise at its first output.",
    ),
    key(
        "busy",
        Shape::Text,
        "",
        "A text in one of the last 10 lines of the screen that is there while the agent works.",
    ),
    key("submit", Shape::Text, "", "The bytes that submit what was typed, such as `\"\\u001b[13u\"`. Otherwise Enter.").guarded(),
];

pub const RUN: &[Key] = &[
    key("agent", Shape::Text, "", "The agent's profile: `claude`, `codex`, `shell`, or a name of `[agent.NAME]`."),
    key(
        "env_pass",
        Shape::Texts,
        "[]",
        "Variables of outlast's own environment that pass to the agent; `NAME*` passes all that begin so, `*` all.",
    ).guarded(),
    key(
        "env",
        Shape::Choice(&["listed", "all"]),
        "\"listed\"",
        "Which variables of outlast's own environment pass to the agent: those that [are listed](run.md) and those of `env_pass`, or all but `PWD`.",
    ).guarded(),
    key("detach", Shape::Truth, "false", "It runs in the background, without a terminal."),
    key(
        "detach_key",
        Shape::Text,
        "'ctrl-\\'",
        "Leaves the agent to itself in the background: a key with Ctrl, perhaps another after it, or `none`.",
    ),
    key(
        "on_hangup",
        Shape::Choice(&["end", "detach"]),
        "\"end\"",
        "What a lost terminal means: the agent and outlast end too, or go on in the background.",
    ),
    key("no_screen", Shape::Truth, "false", "The screen is not kept: nobody can attach, read it or wait for it."),
    key(
        "notify",
        Shape::Text,
        "",
        "This is run in a shell, with the event as JSON on its stdin, when the agent waits for input, crashes or hangs.",
    ).guarded(),
    key(
        "hang_timeout",
        Shape::Span,
        "",
        "An agent that is busy by its own account and has shown nothing for so long is restarted. Otherwise never.",
    ),
];
