//! Every key of `outlast.toml`. The tables here are the types of a configuration that was read; `config show`, the JSON
//! schema, the reference page of the book, the defaults and the guarded keys are derived from them.

use std::time::Duration;

use clap::{ArgMatches, ValueEnum};
use outlast_core::{
    gateway::{Children, Pattern},
    keys::DetachKey,
};
use serde_json::Value as Json;

use super::{
    flags::is_given,
    mistake::Spot,
    schema,
    show::{self, Setting},
    table::{Field, Guard, Head, Key, Reader, Set, Shape, Table, Value, tables},
    tree::Node,
    values::{Choice, Count, FilePath, Hidden, Listener, Many, Named, Pairs, Parsed, Plain, Ports, Size, Text},
};
use crate::cli;

tables! {
    Root {
        /// The gateway and the endpoint that clients connect to.
        gateway: Gateway,
        /// One server behind the gateway: a command that it starts, or an address that it connects to.
        backend: Many<Backend>,
        /// A view of the catalogue: which backends and tools a client sees.
        profile: Named<Profile>,
        /// The tools that clients with this role may call. If there is no role, every client may call every tool.
        role: Named<Role>,
        /// Authentication. Without this table clients need no credentials, and the gateway listens on loopback only.
        auth: Auth | guarded,
        /// How often each client may call each tool.
        rates: Rates,
        /// Tools and backends that are off for all clients.
        switch: Switch,
        /// Limits of the whole gateway.
        limits: Limits,
        /// Several gateways that act as one, on NATS with JetStream. Without this table the gateway uses no NATS.
        cluster: Cluster | guarded,
        /// Defaults of each `outlast mcp` that finds this file; command-line options take precedence. `--config FILE`
        /// names a file for one server.
        mcp: Mcp,
        /// Defaults of `outlast run`. Command-line options take precedence.
        run: Run,
        /// How `outlast run` starts and reads an agent other than claude and codex: for a program of this name, and for
        /// `--agent NAME`.
        agent: Named<Agent>,
    }

    Gateway (cli::Gateway) {
        /// The name of the gateway in `ps`, logs and errors. Default: the name of its directory.
        name: Option<Text>,
        /// The address of the HTTP endpoint, such as `127.0.0.1:7332`; `localhost:7332`, `:7332` and `7332` mean
        /// `127.0.0.1:7332`. An address beyond loopback needs `[auth]`.
        listen: Option<Parsed<Listener>> | guarded,
        /// TLS for the endpoint. Both files are read again when one of them changes; if the new files cannot be used,
        /// the old files stay in use.
        tls: Tls,
        /// Host names by which clients reach the endpoint, besides loopback names. A request with any other `Host` is
        /// refused. Exception: beyond loopback, every `Host` is accepted if this list is empty.
        hosts: Vec<Text> | guarded,
        /// Origins whose pages may use the gateway in a browser, such as `https://app.example.com`. Requests of pages
        /// from loopback and from `hosts` are also accepted, but only pages of listed origins get `Access-Control-*`
        /// headers. Requests with any other `Origin` are refused.
        origins: Vec<Text> | guarded,
        /// The profile of clients that do not choose a profile.
        profile: Option<Text>,
        /// How many sessions of the handshake era can be open. At the limit, a new session ends the longest idle
        /// session of the same client; if that client has no idle session, the new session is refused.
        sessions_max: Count<1> = 1024,
        /// How many sessions of the handshake era one client can have open. At the limit, a new session ends the
        /// longest idle session of the client; if it has no idle session, the new session is refused. Applies with
        /// `[auth]`.
        sessions_per_client: Count<1> = 256,
        /// A session without requests and connections for this long is ended.
        session_idle: Duration = "1h",
        /// How many connections can be open. At the limit, of the address with the most connections that wait for a
        /// request, the longest waiting connection is closed. If the address of the new connection has as many, the new
        /// connection gets status 503.
        connections_max: Count<1> = 1024,
        /// The largest request body. With `[cluster]` at most 64 MiB.
        body_max: Size = "32MiB",
        /// Do not read the file again when it changes; SIGHUP and `outlast reload` still do.
        no_watch: bool = false | option,
        /// Forward a request with a method that MCP does not define, even if the role of the client may not call every
        /// tool. Such a request is forwarded only if there is exactly one backend.
        forward_unknown: bool = false,
        /// How long a backend may take to exit after its stdin is closed; then it gets SIGTERM.
        stdin_grace: Duration = "1s" | option,
        /// How long a backend may take to exit after SIGTERM; then it gets SIGKILL.
        term_grace: Duration = "2s" | option,
    }

    Tls {
        /// The certificate chain, in PEM.
        cert: Option<FilePath> | outside,
        /// The private key, in PEM.
        key: Option<FilePath> | outside,
    }

    Backend {
        /// The name of the backend, and by default the prefix of its tools. Letters, digits, `_` and `-`.
        name: Option<Text>,
        /// The program to start. A backend has either `command` or `url`.
        command: Option<Text> | guarded,
        /// Its arguments.
        args: Vec<Text> = [] | guarded,
        /// Environment variables. Refer to secrets: `"${GITHUB_TOKEN}"`.
        env: Pairs = {} | guarded,
        /// Pass all environment variables of the gateway, including its secrets, not only the usual ones.
        inherit_env: bool = false | guarded,
        /// Its working directory.
        cwd: FilePath = "." | outside,
        /// The address of a running server. A backend has either `url` or `command`.
        url: Option<Text> | guarded,
        /// Headers of each request to `url`. Refer to secrets: `"Bearer ${TOKEN}"`.
        headers: Pairs = {} | guarded,
        /// The transport: `stdio` for a command, `http` (Streamable HTTP) for an address, or `sse`, the old transport
        /// with two endpoints.
        transport ["type"]: Option<Choice<Transport>>,
        /// What the names of its tools and prompts begin with. Default: its name and `__`. `""` means no prefix.
        prefix: Option<Text>,
        /// Offer only these tools of the backend, by its own names.
        allow: Vec<Pattern>,
        /// Do not offer these tools of the backend, by its own names.
        deny: Vec<Pattern> = [],
        /// One process for all clients, one for each session, or a pool.
        children: Children = "shared",
        /// With `children = "per_session"`: how many processes can run for sessions. A call that needs a further
        /// process is refused.
        children_max: Count<1> = 64,
        /// When its process starts: with the gateway, or with the first request that needs it. A lazy backend without a
        /// cached catalogue is started once to read its lists, and stopped again.
        start: Choice<Start> = "eager",
        /// In a cluster: each gateway runs its own processes, or one gateway runs them for all. Needs `[cluster]`.
        placement: Choice<Placement> = "every",
        /// Which revisions of MCP the backend uses. With `auto` the gateway tries one era, and then the other era if
        /// the backend refuses.
        era: Choice<Era> = "auto",
        /// Delays after crashes. `exponential`: from `delay_first` doubling to `delay_max`. `watchdog`: 1 s, then 5 s,
        /// then 10 s.
        policy: Choice<cli::Policy> = "exponential",
        /// Give up after this many restarts in a row; 0 means never. Default: 5 for `exponential`, never for
        /// `watchdog`.
        max_restarts: Option<Count<0>>,
        /// After the first crash of a server that had been ready for 5 s: start it immediately, or after the delay.
        first_restart: Choice<cli::First> = "at-once",
        /// The first delay of `exponential`.
        delay_first: Duration = "1s",
        /// The longest delay of `exponential`.
        delay_max: Duration = "60s",
        /// A call without an answer for this long is cancelled and fails. Progress starts the time again.
        call_timeout: Duration = "60s",
        /// The longest time of a call, even with progress.
        call_max: Duration = "10m",
        /// How long its handshake may take. The first start may install a package.
        start_timeout: Duration = "120s",
        /// Stop a process that got no requests for this long; the next request starts it again. Default: never; a
        /// [borrowed process](routing.md#what-a-backend-asks) is stopped after at most 1 minute.
        idle_stop: Option<Duration>,
        /// Replace a process that, together with all its descendant processes, uses more memory than this (Linux).
        /// Default: no limit.
        memory_max: Option<Size>,
        /// The files and TCP ports that its processes may use (Linux): see [sandbox](sandbox.md). `sandbox = {}` is the
        /// strictest.
        sandbox: Sandbox,
        /// The circuit breaker: when the gateway stops sending calls to a backend that fails.
        breaker: Breaker,
        /// Whether a tool call that was in flight at a crash is sent again: never, or if the tool is annotated as
        /// read-only or idempotent.
        retry: Choice<cli::Retry> = "never",
        /// Ignore this backend.
        disabled: bool = false,
    }

    // None of these is guarded as a whole: a file that is not trusted may restrict a server. Paths outside its directory
    // are left out, which restricts the server further.
    Sandbox {
        /// Files and directories to read and execute, besides those of the system.
        read: Vec<FilePath> | outside,
        /// Files and directories to read, execute and change.
        write: Vec<FilePath> | outside,
        /// TCP ports to connect to, on any host; `"any"` for all. Default: none.
        tcp_connect: Ports<1>,
        /// TCP ports to listen on; 0 lets the system choose one, `"any"` for all. Default: none.
        tcp_bind: Ports<0>,
    }

    Breaker {
        /// The circuit opens after this many failures in a row; 0 means never. A failure is a call that timed out, or a
        /// call to an HTTP backend that was sent and got no valid answer. A call that is lost because a process ended
        /// is not a failure.
        failures: Count<0> = 5,
        /// How long no call is sent. Then one call is let through; if it is answered, the circuit closes.
        open: Duration = "30s",
    }

    Profile {
        /// Only these backends are visible.
        backends: Vec<Pattern>,
        /// Only these tools are visible, by the names that clients see.
        allow: Vec<Pattern>,
        /// These tools are not visible.
        deny: Vec<Pattern> = [],
        /// Offer the tools `search_tools`, `describe_tool` and `call_tool` instead of the whole list.
        search: bool = false,
    }

    Role {
        /// Tools that this role may call, by the names that clients see. With `["*"]` and an empty `deny`, the clients of
        /// this role are [operators](http.md#pages).
        allow: Vec<Pattern> = ["*"],
        /// Tools that this role may not call. `deny` takes precedence over `allow`.
        deny: Vec<Pattern> = [],
    }

    Auth {
        /// Signed tokens: `Authorization: Bearer …`.
        jwt: Jwt,
        /// An API key: `Authorization: Bearer …` or `X-API-Key: …`. `outlast gateway hash-key` creates one.
        key: Many<ApiKey>,
        /// The role of tokens and keys without a role. If there are roles, a client without a role may call nothing.
        default_role: Option<Text>,
    }

    Jwt {
        /// The environment variable with the secret for HS256, at least 32 bytes.
        secret_env: Option<Text>,
        /// A file with the public keys for RS256 and ES256 (a JWK set). It is read again when it changes.
        jwks: Option<FilePath>,
        /// The accepted signature algorithms. Default: HS256 with a secret, RS256 and ES256 with a key set.
        algorithms: Vec<Choice<Algorithm>>,
        /// The required issuer (`iss`).
        issuer: Option<Text>,
        /// The accepted audiences (`aud`): the token must contain at least one of these.
        audience: Vec<Text>,
        /// The claim with the role; `a.b` is `b` within `a`. If the claim is a list, its first known role is used.
        role_claim: Text = "role",
        /// The claim with the client's name, for rates and the audit log.
        name_claim: Text = "sub",
        /// The claim with the name of a profile.
        profile_claim: Option<Text>,
        /// The accepted difference of the clocks.
        leeway: Duration = "30s",
    }

    ApiKey {
        /// The client's name, for rates and the audit log.
        name: Option<Text>,
        /// The SHA-256 of the key in hexadecimal. The key itself is not stored.
        sha256: Option<Text>,
        /// Its role. Default: `default_role`.
        role: Option<Text>,
        /// Its profile. Default: the gateway's.
        profile: Option<Text>,
    }

    Rates {
        /// Calls per minute of each client to each tool. Default: no limit.
        per_minute: Option<Count<1>>,
        /// How many calls may come at the same time. Default: as many as per minute.
        burst: Option<Count<1>>,
        /// How often each client may call the tools of this name, as clients see it, with `*`. If several tables match
        /// a tool, the first table applies.
        tool: Named<Rate>,
    }

    Rate {
        /// Calls per minute of each client.
        per_minute: Option<Count<1>>,
        /// How many calls may come at the same time. Default: as many as per minute.
        burst: Option<Count<1>>,
    }

    Switch {
        /// Tools that are off, by the names that clients see.
        tools: Vec<Text> = [],
        /// Backends that are off.
        backends: Vec<Text> = [],
    }

    Limits {
        /// How long a call waits for a backend that is down.
        hold: Duration = "30s",
        /// How many calls can wait for one backend. A further one fails immediately.
        held_max: Count<1> = 256,
        /// How many requests one client can have in flight. A further one fails immediately.
        in_flight_max: Count<1> = 1024,
        /// How many elements a page of a list has.
        page: Count<1> = 1000,
        /// How often a backend that was given up is tried again.
        retry_given_up: Duration = "5m",
    }

    Cluster {
        /// The NATS servers, such as `nats://10.0.0.5:4222`, or `tls://…` for TLS. Several servers of one NATS cluster
        /// can be given; the gateway also learns the other servers of this NATS cluster.
        nats: Vec<Text>,
        /// The name of the cluster, the same for all its gateways. Letters, digits, `_` and `-`.
        name: Option<Text>,
        /// The name of this gateway in the cluster, different from all others. Letters, digits, `_` and `-`. Default:
        /// the host name.
        replica: Option<Text>,
        /// What the names of all subjects, buckets and streams in NATS begin with. Letters, digits, `_` and `-`.
        prefix: Text = "outlast",
        /// How many copies NATS keeps of each bucket and stream: 1, or 3 with a NATS cluster of three servers.
        replicas: Count<1> = 1,
        /// Do not start without NATS. By default, if NATS cannot be reached, the gateway starts alone and joins the
        /// cluster later.
        required: bool = false,
        /// A credentials file as `nsc` writes it. At most one of `credentials`, `nkey`, `user` and `token` can be given.
        credentials: Option<FilePath>,
        /// A file with the seed of an nkey.
        nkey: Option<FilePath>,
        /// The user name.
        user: Option<Text>,
        /// The password of `user`. Refer to a secret: `"${NATS_PASSWORD}"`.
        password: Option<Hidden>,
        /// A token. Refer to a secret: `"${NATS_TOKEN}"`.
        token: Option<Hidden>,
        /// Certificate authorities for TLS, in PEM. Default: those of the system.
        tls_ca: Option<FilePath>,
        /// The certificate of this gateway for TLS, in PEM.
        tls_cert: Option<FilePath>,
        /// The private key of `tls_cert`, in PEM.
        tls_key: Option<FilePath>,
    }

    Mcp (cli::Mcp) {
        /// The name of the server in `ps`, logs and errors. Default: from its command.
        name: Option<Text> | option,
        /// Reload the server when a file under one of these paths changes.
        watch: Vec<FilePath> = [] | outside | option,
        /// A shell command to run before each reload.
        build: Option<Text> | guarded | option,
        /// Start the new server beside the old one, or stop the old one first.
        reload: Choice<cli::Reload> = "blue-green" | option,
        /// How long a replaced server has to finish its calls.
        drain: Duration = "60s" | option,
        /// Whether a tool call that was in flight at a crash is sent again: never, or if the tool is annotated as
        /// read-only or idempotent.
        retry: Choice<cli::Retry> = "never" | option,
        /// Delays after crashes. `watchdog`: 1 s, then 5 s, then 10 s. `exponential`: from 1 s doubling to 60 s.
        policy: Choice<cli::Policy> = "watchdog" | option,
        /// Give up after this many restarts in a row; 0 means never. Default: 5 for `exponential`, never for
        /// `watchdog`.
        max_restarts: Option<Count<0>> | option,
        /// After the first crash of a server that had been ready for 5 s: start it immediately, or after the delay.
        first_restart: Choice<cli::First> = "at-once" | option,
        /// If the server exits with code 0: end outlast, or start the server again with the next request.
        on_clean_exit: Choice<cli::OnCleanExit> = "end" | option,
        /// How long a server may take for its handshake. Default: 120 s for the first server, 30 s for later ones.
        start_timeout: Option<Duration> | option,
        /// After this time outlast answers the handshake for the first server. Default: 3 s with a cache of this
        /// command's last run, 20 s without.
        answer_after: Option<Duration> | option,
        /// How often outlast sends progress for a call whose server sends none. Default: never.
        heartbeat: Option<Duration> | option,
        /// A tool call without an answer or progress for this long is cancelled and fails. Default: no limit.
        call_timeout: Option<Duration> | option,
        /// The files and TCP ports that the server may use (Linux): see [sandbox](sandbox.md). `sandbox = {}` is the
        /// strictest.
        sandbox: Sandbox,
        /// Settings for one of the server's tools.
        tool: Named<McpTool>,
        /// Replace a server that, together with all its descendant processes, uses more memory than this (Linux).
        /// Default: no limit.
        memory_max: Option<Size> | option,
        /// The server's own tool that makes it exit with code 42; a call of this tool is then answered as successful.
        restart_tool: Text = "restart_server" | option,
        /// How long a request waits for a server that is down before it fails.
        hold: Duration = "30s" | option,
        /// How long a server may take to exit after its stdin is closed; then it gets SIGTERM.
        stdin_grace: Duration = "1s" | option,
        /// How long a server may take to exit after SIGTERM; then it gets SIGKILL.
        term_grace: Duration = "2s" | option,
        /// Do not add `restart_server`, `verify_server_restarted` and `server_status` to the server's tools.
        no_tools: bool = false | option,
        /// The file of the restart marker. Default: `.outlast/restart_marker`.
        marker: Option<FilePath> | outside | option,
        /// Give outlast's own stdin and stdout to the server, and only restart it. Keys that concern messages cannot be
        /// set with it.
        inherit: bool = false | option,
    }

    McpTool {
        /// A call of this tool without an answer or progress for this long is cancelled and fails; `0s` means no limit.
        call_timeout: Option<Duration>,
    }

    Agent {
        /// Arguments added at a restart, to continue the conversation. `{id}` is the same UUID as in `fresh`. Default:
        /// the agent is started with the same command line.
        resume: Vec<Text> = [] | guarded,
        /// Arguments added when a conversation begins. `{id}` is a new UUID.
        fresh: Vec<Text> = [] | guarded,
        /// The beginning of the input line. The agent is ready when this is shown. Default: it is ready at its first
        /// output.
        prompt: Option<Text>,
        /// A text that one of the last 10 lines of the screen contains while the agent works.
        busy: Option<Text>,
        /// The beginning of the line in which the agent says that its usage limit is reached, among the last 10 lines of the
        /// screen. A time after it (`resets 3pm`, `resets in 2h`) is the end of the limit.
        limit: Option<Text>,
        /// The bytes that submit a typed text, such as `"\u001b[13u"`. Default: Enter.
        submit: Option<Text> | guarded,
    }

    Run (cli::Run) {
        /// The agent's profile: `claude`, `codex`, `shell`, or a name of `[agent.NAME]`.
        agent: Option<Text> | option,
        /// Further variables of outlast's environment that the agent gets; `NAME*` means all that begin with `NAME`,
        /// and `*` means all.
        env_pass: Vec<Text> = [] | guarded | option,
        /// Which variables of outlast's environment the agent gets: [the listed
        /// ones](run.md#the-environment-of-the-agent) and those of `env_pass`, or all except `PWD`.
        env: Choice<cli::Env> = "listed" | guarded | option,
        /// Run in the background, without a terminal.
        detach: bool = false | option,
        /// The detach key, for example `ctrl-a d`; `none` disables it.
        detach_key: Parsed<DetachKey> = "ctrl-\\" | option,
        /// If the terminal is closed: end the agent and outlast, or continue in the background.
        on_hangup: Choice<cli::OnHangup> = "end" | option,
        /// Do not keep a [screen model](glossary.md#agents). `attach`, `screen`, `send` and `wait-for` (except
        /// `--quiet`) then do not work.
        no_screen: bool = false | option,
        /// Shell commands to run, with the event as JSON on their stdin, when the agent waits for input, crashes, hangs or
        /// is limited. A URL gets the event as a POST, and `ntfy:URL` a message as [ntfy](run.md#notifications) expects it.
        notify: Vec<Text> = [] | guarded | option,
        /// Restart an agent that is busy and whose screen has not changed for this long (claude and codex). Default:
        /// never.
        hang_timeout: Option<Duration> | option,
        /// At the [usage limit](run.md#usage-limits) of the agent: show the limit and notify, also continue when it is
        /// over, or end with exit code 75.
        on_limit: Choice<cli::OnLimit> = "tell" | option,
        /// After a crash during a turn, [send this text](run.md#interrupted-turns) to the restarted agent, once.
        on_resume: Option<Text> | guarded | option,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    Stdio,
    Http,
    Sse,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Start {
    Eager,
    Lazy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Placement {
    Every,
    One,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Era {
    Auto,
    Handshake,
    Stateless,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "UPPER")]
pub(crate) enum Algorithm {
    Hs256,
    Rs256,
    Es256,
}

impl Algorithm {
    /// In a token.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// Keys of a backend with a command.
pub(crate) const OF_COMMANDS: &str = "args env inherit_env cwd children children_max start policy max_restarts \
     first_restart delay_first delay_max idle_stop memory_max sandbox";
