//! The command line as checked values; below, what commands print and how. No other module sees the raw arguments.

use std::{collections::BTreeMap, ffi::OsString, net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};

use outlast_core::keys::DetachKey;
use outlast_os::Sandbox;

pub(crate) mod commands;
pub(crate) mod completions;
pub(crate) mod duration;
pub(crate) mod full_screen;
pub mod help;
pub(crate) mod paint;
pub(crate) mod report;
pub(crate) mod table;

use crate::{adopt::clients::Client, config, gateway::listen, operator::history::Since};

/// The connection outlasts the process.
///
/// outlast starts and supervises MCP servers and agents. When one crashes, hangs or is reloaded, the client stays
/// connected.
#[derive(Debug, Parser)]
#[command(
    name = "outlast",
    version,
    max_term_width = 100,
    arg_required_else_help = true,
    disable_help_subcommand = true
)]
#[command(help_template = help::TEMPLATE, after_help = help::groups())]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Mcp(Mcp),
    Gateway(Gateway),
    Run(Run),
    Restore(Restore),
    Startup(Startup),
    Ps(Ps),
    Top(Top),
    State(ShowState),
    /// Print the process id of an instance's server.
    Pid(Which),
    Restart(Restart),
    Switch(Switch),
    /// Make a gateway read its configuration again. Only changed backends are started, stopped or replaced.
    Reload(Which),
    Inject(Inject),
    Send(Send),
    Screen(Screen),
    WaitFor(WaitFor),
    Attach(Attach),
    Stop(Stop),
    Upgrade(Upgrade),
    /// Start a server or an agent that was given up.
    Resume(Which),
    Logs(Logs),
    Audit(Audit),
    Config(config::commands::Arguments),
    Trust(Trust),
    Wrap(Wrap),
    Unwrap(Unwrap),
    Doctor(Doctor),
    Demo(Demo),
    Help(Help),
    Completions(Completions),
    Man(Man),
    /// Print the ids of the running instances, for completions.
    #[command(hide = true)]
    Ids,
    #[command(hide = true)]
    AgentEvent(AgentEvent),
    /// Post the event on stdin to the URL in OUTLAST_NOTIFY_URL, for a session.
    #[command(hide = true)]
    PostEvent,
    #[command(hide = true)]
    DemoServer(DemoServer),
    /// Check arguments against schemas, for a gateway.
    #[command(hide = true)]
    CheckSchemas,
    /// Check whether this program can continue from the state of an instance, which is on stdin.
    #[command(hide = true)]
    CheckState(CheckState),
}

/// Keep an MCP client connected while its stdio server crashes or is reloaded.
///
/// Put it in front of the command in any client's configuration:
///
///     "command": "outlast", "args": ["mcp", "--", "python", "-m", "my_server"]
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Mcp {
    /// The server's command and its arguments, after `--`.
    #[arg(required = true, last = true, value_name = "CMD")]
    pub command: Vec<OsString>,

    /// The name of this server in `ps`, logs and errors [default: from the command]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// Reload the server when a file below this path changes; files that git ignores do not count
    #[arg(long, value_name = "PATH", num_args = 1.., help_heading = "Reloading")]
    pub watch: Vec<PathBuf>,

    /// Run this in a shell before each reload; if it fails, the old server keeps serving
    #[arg(long, value_name = "COMMAND", help_heading = "Reloading")]
    pub build: Option<String>,

    /// Start the new server beside the old one, or stop the old one first (if it uses a port or a lock)
    #[arg(long, value_enum, default_value_t = Reload::BlueGreen, help_heading = "Reloading")]
    pub reload: Reload,

    /// How long a replaced server has to finish its calls
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, default_value = "60s", help_heading = "Reloading")]
    pub drain: Duration,

    /// Send a tool call that was in flight at a crash again: never, or if the tool is annotated as read-only or
    /// idempotent
    #[arg(long, value_enum, default_value_t = Retry::Never, help_heading = "Crashes")]
    pub retry: Retry,

    /// Delays after crashes: 1 s, then 5 s, then 10 s; or doubling from 1 s to 60 s, giving up after 5 restarts
    #[arg(long, value_enum, default_value_t = Policy::Watchdog, help_heading = "Crashes")]
    pub policy: Policy,

    /// Give up after this many restarts in a row; 0 means never [default: 5 for exponential, 0 for watchdog]
    #[arg(long, value_name = "N", value_parser = whole::<u32>, help_heading = "Crashes")]
    pub max_restarts: Option<u32>,

    /// After the first crash of a server that had been ready for 5 s: start it immediately, or after the delay
    #[arg(long, value_enum, default_value_t = First::AtOnce, help_heading = "Crashes")]
    pub first_restart: First,

    /// If the server exits with code 0: end outlast too, or start the server again with the next request
    #[arg(long, value_enum, default_value_t = OnCleanExit::End, help_heading = "Crashes")]
    pub on_clean_exit: OnCleanExit,

    /// How long a server may take for its handshake [default: 120s for the first server, 30s for later ones]
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, help_heading = "Crashes")]
    pub start_timeout: Option<Duration>,

    /// Answer the handshake for the first server after this time, from the cache of this command's last run, or with
    /// outlast's own tools; the server continues to start [default: 3s with a cache, 20s without]
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, help_heading = "Slow servers")]
    pub answer_after: Option<Duration>,

    /// Cancel a tool call that gets no answer and no progress for this long, and replace the server if it hangs;
    /// `outlast.toml` can set it for each tool [default: no limit]
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, help_heading = "Slow servers")]
    pub call_timeout: Option<Duration>,

    /// The same for single tools, from the configuration.
    #[arg(skip)]
    pub call_timeouts: BTreeMap<String, Duration>,

    /// Replace a server that, with all its descendant processes, uses more memory than this, for example 512MB (Linux)
    /// [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = "Crashes")]
    pub memory_max: Option<u64>,

    /// The server's own tool that makes it exit with code 42; a call of it is then answered as successful
    #[arg(long, value_name = "NAME", default_value = "restart_server", help_heading = "Crashes")]
    pub restart_tool: String,

    /// Send progress this often for a call whose client sent a progress token and whose server sends no progress
    /// [default: never]
    #[arg(long, value_name = "DURATION", value_parser = heartbeat, help_heading = "Slow servers")]
    pub heartbeat: Option<Duration>,

    /// How long a request waits for a server that is down before it fails
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, default_value = "30s", help_heading = "Crashes")]
    pub hold: Duration,

    /// How long a server may take to exit after its stdin is closed; then it gets SIGTERM
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, default_value = "1s", help_heading = "Stopping")]
    pub stdin_grace: Duration,

    /// How long it may take to exit after SIGTERM; then it gets SIGKILL
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, default_value = "2s", help_heading = "Stopping")]
    pub term_grace: Duration,

    /// Do not add `restart_server`, `verify_server_restarted` and `server_status` to the server's tools
    #[arg(long)]
    pub no_tools: bool,

    /// The file of the restart marker [default: .outlast/restart_marker]
    #[arg(long, value_name = "PATH")]
    pub marker: Option<PathBuf>,

    /// A configuration file; its table `[mcp]` sets options that are not given here [default: the nearest outlast.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Use one server process for all clients of this user that start the same command with the same options and environment
    /// in this directory, or, with `--share=user`, in any directory
    #[arg(long, value_enum, value_name = "SCOPE", num_args = 0..=1, require_equals = true,
        default_missing_value = "directory", help_heading = "Sharing")]
    pub share: Option<Share>,

    /// With `--share`: how long the server keeps running after its last client has disconnected
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, default_value = "30s", requires = "share",
        help_heading = "Sharing")]
    pub linger: Duration,

    /// The name of the hub that this process is.
    #[arg(long, hide = true, requires = "share")]
    pub hub: Option<String>,

    /// Why this hub is not for all clients.
    #[arg(long, hide = true, requires = "hub")]
    pub hub_why: Option<String>,

    /// Give outlast's own stdin and stdout to the server, and only restart it: outlast reads, repeats and answers no
    /// messages. Only for servers that need no handshake
    #[arg(long, conflicts_with_all = ["watch", "build", "reload", "drain", "retry", "hold", "start_timeout", "no_tools",
        "marker", "on_clean_exit", "answer_after", "heartbeat", "call_timeout", "memory_max", "restart_tool", "share"])]
    pub inherit: bool,

    /// From the configuration: the files and ports that the server may use.
    #[arg(skip)]
    pub sandbox: Option<Sandbox>,

    /// From the configuration: warnings about files that are ignored, or in part.
    #[arg(skip)]
    pub warnings: Vec<String>,
}

impl Mcp {
    /// All that clients must have in common to share a server, except directory and environment.
    pub(crate) fn in_common(&self) -> String {
        let Mcp {
            command,
            name: _,
            watch,
            build,
            reload,
            drain,
            retry,
            policy,
            max_restarts,
            first_restart,
            on_clean_exit,
            start_timeout,
            answer_after,
            call_timeout,
            call_timeouts,
            memory_max,
            restart_tool,
            heartbeat,
            hold,
            stdin_grace,
            term_grace,
            no_tools,
            marker,
            config,
            share,
            linger: _,
            hub: _,
            hub_why: _,
            inherit,
            sandbox,
            warnings: _,
        } = self;
        let reloading = (watch, build, reload, drain, marker);
        let crashes = (retry, policy, max_restarts, first_restart, on_clean_exit, start_timeout, memory_max, hold);
        let calls = (answer_after, call_timeout, call_timeouts, restart_tool, heartbeat, no_tools);
        let others = (stdin_grace, term_grace, config, share, inherit, sandbox);
        format!("{:?}", (command, reloading, crashes, calls, others))
    }
}

/// Which clients share a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Share {
    Directory,
    User,
}

/// Put many MCP servers behind one endpoint; each is supervised separately.
///
/// The servers are in `outlast.toml`, or in the configuration file of an MCP client:
///
///     outlast gateway --config .mcp.json --listen 127.0.0.1:7332
///     "command": "outlast", "args": ["gateway", "--config", "/home/me/outlast.toml", "--stdio"]
#[derive(Debug, Args)]
#[command(verbatim_doc_comment, args_conflicts_with_subcommands = true)]
pub struct Gateway {
    #[command(subcommand)]
    pub besides: Option<GatewayCommand>,

    /// A configuration file: `outlast.toml`, `.mcp.json`, `.vscode/mcp.json` or `claude_desktop_config.json`; can be
    /// given several times [default: the nearest outlast.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Vec<PathBuf>,

    /// Serve one client on stdin and stdout, and end when it disconnects [default: on, if stdin is not a terminal and
    /// there is no address to listen on]
    #[arg(long)]
    pub stdio: bool,

    /// Serve clients over HTTP at this address, path /mcp; `localhost:7332`, `:7332` and `7332` mean 127.0.0.1:7332
    /// [default: the configuration's address; in a terminal 127.0.0.1:7332]
    #[arg(long, value_name = "ADDR:PORT", value_parser = listen_address)]
    pub listen: Option<SocketAddr>,

    /// The name of this gateway in `ps`, logs and errors [default: from the configuration, or its directory]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// Do not read the configuration again when its file changes; SIGHUP and `outlast reload` still do
    #[arg(long)]
    pub no_watch: bool,

    /// How long a backend may take to exit after its stdin is closed; then it gets SIGTERM
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, default_value = "1s", help_heading = "Stopping")]
    pub stdin_grace: Duration,

    /// How long it may take to exit after SIGTERM; then it gets SIGKILL
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, default_value = "2s", help_heading = "Stopping")]
    pub term_grace: Duration,
}

/// Commands that need no running gateway.
#[derive(Debug, Subcommand)]
pub enum GatewayCommand {
    Check(config::commands::Check),
    HashKey(config::commands::HashKey),
}

/// Run an interactive agent in a terminal of its own. After a crash it is started again with the same conversation.
///
///     outlast run -- claude
///     outlast run plan.md -- codex
///
/// The directory of the agent is, in this order: `--cwd`; `outlast_cwd` in the front
/// matter of DOCUMENT; the project root of DOCUMENT; the directory of DOCUMENT;
/// without a DOCUMENT the current directory.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Run {
    /// A Markdown document that the session is about; its front matter can set directory, name and environment
    #[arg(value_name = "DOCUMENT")]
    pub document: Option<PathBuf>,

    /// The agent's command and its arguments, after `--`.
    #[arg(required = true, last = true, value_name = "CMD")]
    pub command: Vec<OsString>,

    /// The id of the session; only one running session can have it [default: from the document, or a new id]
    #[arg(long, value_name = "ID", visible_alias = "name")]
    pub session: Option<String>,

    /// The directory of the agent
    #[arg(long, value_name = "DIR")]
    pub cwd: Option<PathBuf>,

    /// The agent's profile: claude, codex, shell, or NAME of `[agent.NAME]` in outlast.toml [default: by the program's name]
    ///
    /// Needed for a wrapper script. outlast adds its arguments (the conversation to resume, hooks) at the end of the
    /// command line, and the script must pass them on: `exec claude "$@"`.
    #[arg(long, value_name = "NAME")]
    pub agent: Option<String>,

    /// From the configuration: the profile that `agent` names.
    #[arg(skip)]
    pub profile: outlast_core::agent::Profile,

    /// Also pass this variable of outlast's environment to the agent; `NAME*` passes all that begin with NAME, `'*'` all
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub env_pass: Vec<String>,

    /// Which variables of outlast's environment the agent gets: those listed in the book and those of `--env-pass`, or
    /// all except PWD
    #[arg(long, value_enum, default_value_t = Env::Listed, value_name = "WHICH")]
    pub env: Env,

    /// A configuration file; its table `[run]` sets options that are not given here [default: the nearest outlast.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Run in the background, without a terminal, and print the session's id; `outlast attach` shows it
    #[arg(short, long)]
    pub detach: bool,

    /// Detach key, for example `ctrl-\` or `ctrl-a d`; `none` disables it
    #[arg(long, value_name = "KEY", value_parser = DetachKey::parse, default_value = "ctrl-\\", help_heading = "Terminal")]
    pub detach_key: DetachKey,

    /// If the terminal is closed: end the agent and outlast, or continue in the background
    #[arg(long, value_enum, default_value_t = OnHangup::End, help_heading = "Terminal")]
    pub on_hangup: OnHangup,

    /// Do not keep a model of the screen; `attach`, `screen`, `send` and `wait-for` (except `--quiet`) then do not work
    #[arg(long, help_heading = "Terminal")]
    pub no_screen: bool,

    /// Run this in a shell, with the event as JSON on its stdin, when the agent waits for input, crashes, hangs or is limited;
    /// a URL gets the event as a POST, and `ntfy:URL` a message as ntfy expects it. Can be given several times
    #[arg(long, value_name = "COMMAND|URL", help_heading = "Attention")]
    pub notify: Vec<String>,

    /// Restart an agent that is busy and whose screen has not changed for this long; claude and codex only [default: never]
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, help_heading = "Attention")]
    pub hang_timeout: Option<Duration>,

    /// At the agent's usage limit: show it and notify, continue when it is over, or end with exit code 75
    #[arg(long, value_enum, default_value_t = OnLimit::Tell, help_heading = "Unattended work")]
    pub on_limit: OnLimit,

    /// After a crash during a turn, send this text to the restarted agent, once [default: none is sent]
    #[arg(long, value_name = "TEXT", help_heading = "Unattended work")]
    pub on_resume: Option<String>,

    /// `outlast restore` starts it: only with the directory and the agent of its record, and with the same conversation
    #[arg(long, hide = true)]
    pub restored: bool,

    /// The options as they were written, for the record of the session.
    #[arg(skip)]
    pub options: Vec<String>,

    /// From the configuration: warnings about files that are ignored, or in part.
    #[arg(skip)]
    pub warnings: Vec<String>,
}

/// The options of `outlast run` as they were written, for the record of the session. Those that name the session, or its
/// terminal, are left out: a restore sets them.
pub(crate) fn options_of_run(args: &[OsString]) -> Vec<String> {
    let words = args.iter().skip(1).skip_while(|word| *word != "run").skip(1).take_while(|word| *word != "--");
    let mut options = Vec::new();
    let mut words = words.map(|word| word.to_string_lossy().into_owned());
    while let Some(word) = words.next() {
        match word.as_str() {
            "-d" | "--detach" | "--restored" => {}
            "--session" | "--name" => drop(words.next()),
            word if word.starts_with("--session=") || word.starts_with("--name=") => {}
            _ => options.push(word),
        }
    }
    options
}

/// What follows when an agent has reached its usage limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnLimit {
    Tell,
    Wait,
    Stop,
}

/// Which variables an agent gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Env {
    Listed,
    All,
}

/// Start interrupted sessions of `outlast run` again, after a reboot or a kill.
///
/// Without an ID, all sessions are started that ran when outlast or the machine ended, one after the other, in the
/// background: each with its options, its directory and its conversation. Sessions that you ended are not started. One that
/// cannot be started is reported, and can be restored later.
#[derive(Debug, Args)]
pub struct Restore {
    /// Only this session
    #[arg(value_name = "ID")]
    pub id: Option<String>,

    /// All sessions (default)
    #[arg(long, conflicts_with = "id")]
    pub all: bool,

    /// Show the sessions that can be restored, and start none
    #[arg(long)]
    pub list: bool,

    /// Print JSON: an array of objects
    #[arg(long)]
    pub json: bool,
}

/// Restore interrupted sessions at each login: a systemd user unit, or a launchd agent.
#[derive(Debug, Args)]
pub struct Startup {
    #[command(subcommand)]
    pub action: StartupAction,
}

#[derive(Debug, Subcommand)]
pub enum StartupAction {
    /// Show the file that is needed, ask, and write it
    Enable {
        /// Do not ask
        #[arg(short, long)]
        yes: bool,

        /// Show the file, and write nothing
        #[arg(long, conflicts_with = "yes")]
        dry_run: bool,
    },
    /// Remove the file
    Disable,
    /// Show whether interrupted sessions are restored at login
    Status {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// List everything that runs under outlast, in every project.
#[derive(Debug, Args)]
pub struct Ps {
    /// With `--cluster`: a gateway in the cluster, by its id, the beginning of it, or its name
    /// [default: any gateway, if only one cluster is found]
    #[arg(value_name = "ID", requires = "cluster")]
    pub id: Option<String>,

    /// List all replicas of a gateway's cluster instead, each with its backends
    #[arg(long)]
    pub cluster: bool,

    /// Print JSON: an array of objects
    #[arg(long)]
    pub json: bool,
}

/// Show everything that runs under outlast, live: states, calls, latencies and crashes.
///
/// Keys restart, stop and resume, show logs and filter; `?` lists them. Without a terminal it prints one plain table.
#[derive(Debug, Args)]
pub struct Top {
    /// With `--cluster`: a gateway in the cluster, by its id, the beginning of it, or its name
    /// [default: any gateway, if only one cluster is found]
    #[arg(value_name = "ID", requires = "cluster")]
    pub id: Option<String>,

    /// Show all replicas of a gateway's cluster instead, each with its backends; only restarts are possible there
    #[arg(long)]
    pub cluster: bool,

    /// Print one table and exit
    #[arg(long)]
    pub once: bool,

    /// Print JSON: an array of objects, once
    #[arg(long)]
    pub json: bool,
}

/// The instance that a command is for.
#[derive(Debug, Args)]
pub struct Which {
    /// The id of the instance, the beginning of it, or its name; a gateway's backend is GATEWAY/BACKEND, or its name
    /// [default: the only instance in this directory]
    #[arg(value_name = "ID")]
    pub id: Option<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Show one instance: its server, its restarts, the end of its stderr.
#[derive(Debug, Args)]
pub struct ShowState {
    #[command(flatten)]
    pub which: Which,

    /// Show the gateway's cluster: replicas, owners of backends, leases, NATS. ID is a gateway in it
    #[arg(long)]
    pub cluster: bool,
}

/// Reload a server while its client stays connected, or restart an agent.
///
/// The new server takes over when it is ready. If it does not become ready, the old one keeps serving, and the error is
/// printed. An agent is stopped first, and started again with the same conversation.
#[derive(Debug, Args)]
pub struct Restart {
    #[command(flatten)]
    pub which: Which,

    /// The reason, for the audit log and the restart marker
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,

    /// Restart a backend in the whole cluster: with `placement = "one"` at its owner, otherwise on every replica.
    /// ID is the backend; a gateway means all its backends
    #[arg(long)]
    pub cluster: bool,

    /// Only `outlast mcp`: do not wait for calls in flight. They fail when the new server is ready; requests that are
    /// safe to repeat go to the new server
    #[arg(long)]
    pub now: bool,

    /// Only agents: start a new conversation
    #[arg(long, conflicts_with = "continue")]
    pub fresh: bool,

    /// Only agents: continue the conversation (default)
    #[arg(long)]
    pub r#continue: bool,
}

/// Turn a tool or a backend of a gateway off or on.
///
/// Calls of a tool that is off are refused immediately; a backend that is off is stopped. This lasts until the tool or
/// backend is turned on again, or the gateway ends. `[switch]` in the configuration sets what is off at the start.
///
/// In a cluster a switch always applies to all replicas, and stays when they end.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("way").required(true))]
pub struct Switch {
    /// The id of the gateway, the beginning of it, or its name [default: the only one in this directory]
    #[arg(value_name = "ID")]
    pub id: Option<String>,

    /// The tool, by the name that clients see, or the backend to turn off
    #[arg(long, value_name = "NAME", group = "way")]
    pub off: Option<String>,

    /// The tool or the backend to turn on
    #[arg(long, value_name = "NAME", group = "way")]
    pub on: Option<String>,

    /// Use any gateway in a cluster if no ID is given. A switch applies to the whole cluster with and without this option
    #[arg(long)]
    pub cluster: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Type into an agent's terminal.
///
/// The agent gets the bytes unchanged. Enter is pressed only with `--enter`.
#[derive(Debug, Args)]
pub struct Inject {
    /// The id of the session, the beginning of it, or its name
    #[arg(value_name = "ID")]
    pub id: String,

    /// The text to type [default: read from stdin]
    #[arg(value_name = "TEXT")]
    pub text: Option<String>,

    /// Press Enter after the text
    #[arg(long)]
    pub enter: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Send a text to an agent, and verify that it arrived.
///
/// Waits until the agent shows an empty input field, pastes the text, and waits until the text is shown there. With
/// `--submit` it presses Enter and waits until the agent has recorded the turn; without such a record the result is
/// `unproven`. A text that could not be submitted is removed again.
#[derive(Debug, Args)]
pub struct Send {
    /// The id of the session, the beginning of it, or its name
    #[arg(value_name = "ID")]
    pub id: String,

    /// The text, one line or several [default: read from stdin]
    #[arg(value_name = "TEXT")]
    pub text: Option<String>,

    /// Press Enter after the text; without this option the text stays in the input field
    #[arg(long)]
    pub submit: bool,

    /// How long to wait for an empty input field
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, default_value = "30s")]
    pub timeout: Duration,

    /// Send the text only if no text was sent with this key yet; otherwise print the answer of the first command again
    #[arg(long, value_name = "TEXT")]
    pub key: Option<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Print the screen of an agent's terminal.
#[derive(Debug, Args)]
pub struct Screen {
    #[command(flatten)]
    pub which: Which,

    /// Also print this many lines that have scrolled off the screen
    #[arg(long, value_name = "N", value_parser = whole::<usize>, default_value_t = 0)]
    pub history: usize,
}

/// Wait until an agent's terminal shows something or is quiet, or the agent waits for input or has finished a turn.
///
/// The exit code is 0 if it happened, 124 if the time is over, and 1 if it cannot happen any more.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("what").required(true)))]
pub struct WaitFor {
    #[command(flatten)]
    pub which: Which,

    /// Wait until this text is on the screen
    #[arg(long, value_name = "TEXT", group = "what")]
    pub text: Option<String>,

    /// Wait until nothing was written or typed for this long
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, group = "what")]
    pub quiet: Option<Duration>,

    /// Wait until the agent waits for input
    #[arg(long, group = "what")]
    pub prompt: bool,

    /// Wait until the turn that was submitted last is over, and print the agent's answer
    #[arg(long, group = "what")]
    pub turn: bool,

    /// How long to wait [default: no limit]
    #[arg(long, value_name = "DURATION", value_parser = duration::argument)]
    pub timeout: Option<Duration>,
}

/// Show an agent's terminal here, and type into it. Several terminals can be attached.
///
/// The agent's terminal has the size of the attached terminal that was typed into last.
#[derive(Debug, Args)]
pub struct Attach {
    /// The id of the session, the beginning of it, or its name [default: the only one in this directory]
    #[arg(value_name = "ID")]
    pub id: Option<String>,

    /// Read only: typed keys do not reach the agent, and its size does not change
    #[arg(long)]
    pub watch: bool,

    /// Detach key, for example `ctrl-\` or `ctrl-a d`; `none` disables it
    #[arg(long, value_name = "KEY", value_parser = DetachKey::parse, default_value = "ctrl-\\")]
    pub detach_key: DetachKey,
}

/// Stop an instance: its server or agent, and outlast itself.
#[derive(Debug, Args)]
pub struct Stop {
    #[command(flatten)]
    pub which: Which,

    /// Kill the server immediately; requests in flight stay unanswered
    #[arg(long)]
    pub force: bool,
}

/// Replace the program of running instances by the one that is on disk now.
///
/// Clients, servers, agents and terminals stay connected. The new program first proves that it can read the state of the
/// instance; otherwise the old one continues. SIGUSR2 does the same. Not on Windows.
#[derive(Debug, Args)]
pub struct Upgrade {
    /// The id of the instance, the beginning of it, or its name [default: the only instance in this directory]
    #[arg(value_name = "ID", conflicts_with = "all")]
    pub id: Option<String>,

    /// Every instance of this user
    #[arg(long)]
    pub all: bool,

    /// The new program; it must belong to this user or to root [default: the file that the instance was started
    /// from]
    #[arg(long, value_name = "PATH")]
    pub program: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The arguments of the instance.
#[derive(Debug, Args)]
pub struct CheckState {
    #[arg(required = true, last = true, value_name = "ARGS")]
    pub args: Vec<OsString>,
}

/// Show the log of an instance and the stderr of its server.
#[derive(Debug, Args)]
pub struct Logs {
    /// The id of the instance, the beginning of it, or its name; also of one that has ended in this directory
    /// [default: the only running instance in this directory, or the last one]
    #[arg(value_name = "ID")]
    pub id: Option<String>,

    /// Print new lines as they are written, until the instance ends
    #[arg(short, long)]
    pub follow: bool,

    /// How many lines to print, from the end
    #[arg(short = 'n', long, value_name = "N", value_parser = whole::<usize>, default_value_t = 100)]
    pub lines: usize,

    /// Print JSON, one object for each line: `time`, `source`, `text`, and the unchanged `line`
    #[arg(long)]
    pub json: bool,
}

/// Show the audit log of this directory, or of one instance: starts, crashes, restarts and their reasons.
#[derive(Debug, Args)]
pub struct Audit {
    /// The id of an instance, the beginning of it, or its name [default: all in this directory]
    #[arg(value_name = "ID")]
    pub id: Option<String>,

    /// Only records after this time: 10m, 2h or 7d ago, or a time in UTC such as 2026-01-13T14:32
    #[arg(long, value_name = "TIME", value_parser = Since::parse)]
    pub since: Option<Since>,

    /// Only records of this event type, for example `server_crashed`
    #[arg(long, value_name = "EVENT")]
    pub event: Option<String>,

    /// Show the published records of all replicas of a gateway's cluster, merged by time. ID is a gateway in it
    #[arg(long)]
    pub cluster: bool,

    /// Print the lines of the log unchanged, one JSON object each
    #[arg(long)]
    pub json: bool,
}

/// Put outlast in front of every stdio server in your clients' configurations.
///
/// Finds the configurations of Claude Code, Claude Desktop, VS Code, Cursor, Codex, Gemini CLI, Windsurf, Zed, Cline and
/// opencode, here and in your home directory, shows the changes as a diff, and asks; `s` asks for each server. Comments,
/// order and layout are kept. `outlast unwrap` restores the file, byte for byte if it has not changed since.
#[derive(Debug, Args)]
pub struct Wrap {
    #[command(flatten)]
    pub which: WhichFiles,

    /// The command to write for outlast [default: its full path; in a project's file `outlast`, if it is on PATH]
    #[arg(long, value_name = "COMMAND")]
    pub command: Option<String>,

    /// Also write `--share`: all clients that start the same command in the same directory use one server process
    #[arg(long)]
    pub share: bool,
}

/// Remove outlast from your clients' configurations.
///
/// A file that has not changed since `outlast wrap` is restored byte for byte; in any other file, only the changes of
/// `outlast wrap` are undone.
#[derive(Debug, Args)]
pub struct Unwrap {
    #[command(flatten)]
    pub which: WhichFiles,
}

/// The configuration files that a command is for.
#[derive(Debug, Args)]
pub struct WhichFiles {
    /// Only these files [default: all that are found]
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,

    /// Only the files of this client; can be given several times
    #[arg(long, value_name = "NAME", value_enum, conflicts_with = "files")]
    pub client: Vec<Client>,

    /// Only the server of this name; can be given several times
    #[arg(long, value_name = "NAME")]
    pub server: Vec<String>,

    /// Do not ask
    #[arg(short, long)]
    pub yes: bool,

    /// Show what would change, and write nothing
    #[arg(long, conflicts_with = "yes")]
    pub dry_run: bool,

    /// Print JSON: the result for each file and server; needs `--yes` or `--dry-run`
    #[arg(long)]
    pub json: bool,
}

/// Trust a configuration file of a project, so that it can run commands, read the environment and listen.
///
/// outlast reads the nearest `outlast.toml`. Until you trust this file, outlast ignores the keys that run commands, read or
/// pass on the environment, name a path outside of the file's directory, connect or listen. Trust is for the current
/// values of these keys: when one of them changes, the file must be trusted again. A file that you name with `--config`
/// needs no trust. `outlast doctor` starts the servers in a project's client files (`.mcp.json` and others) only if you
/// trust the file or have wrapped it.
#[derive(Debug, Args)]
pub struct Trust {
    /// A file, or a directory with an outlast.toml in it [default: the nearest outlast.toml]
    #[arg(value_name = "FILE|DIR")]
    pub path: Option<PathBuf>,

    /// List the values that need trust, and whether they are trusted; change nothing
    #[arg(long, conflicts_with = "remove")]
    pub show: bool,

    /// No longer trust the file
    #[arg(long)]
    pub remove: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Find problems with your clients, their servers and outlast itself, and say how to fix them.
///
/// Reads the configurations that `outlast wrap` knows, and starts each stdio server in them once to test its handshake.
/// Looks for instances that do not answer and for orphaned processes, and checks the state directory. Servers in files
/// of a project are started only if you wrapped or trust the file (`outlast trust FILE`), or agree when asked. Nothing
/// is changed. The exit code is 1 if there is a problem.
#[derive(Debug, Args)]
pub struct Doctor {
    /// Start no servers
    #[arg(long)]
    pub no_start: bool,

    /// How long each server may take to answer
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, default_value = "20s", conflicts_with = "no_start")]
    pub timeout: Duration,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Show in ten seconds how a connection survives a reload, a broken reload and a kill -9 of its server.
///
/// Starts `outlast mcp` with a small server in a temporary directory, and calls the server continuously while it is
/// reloaded with a changed tool, reloaded with broken code, and killed. Shows what the client saw, as measured.
///
/// It changes none of your files and leaves nothing behind. The exit code is 0 if every call was answered.
#[derive(Debug, Args)]
pub struct Demo {
    /// Print plain lines, as when stdout is not a terminal
    #[arg(long)]
    pub plain: bool,

    /// Print only the totals, as JSON
    #[arg(long, conflicts_with = "plain")]
    pub json: bool,
}

/// Explain a command or a topic.
///
/// `outlast help topics` lists the topics.
#[derive(Debug, Args)]
pub struct Help {
    /// A command or a topic [default: all commands]
    #[arg(value_name = "COMMAND|TOPIC")]
    pub words: Vec<String>,
}

/// Print a completion script for your shell: commands, options and instances.
///
///     bash        outlast completions bash > ~/.local/share/bash-completion/completions/outlast
///     zsh         outlast completions zsh > "${fpath[1]}/_outlast"
///     fish        outlast completions fish > ~/.config/fish/completions/outlast.fish
///     PowerShell  outlast completions powershell >> $PROFILE
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Completions {
    #[arg(value_name = "SHELL", value_enum)]
    pub shell: clap_complete::Shell,
}

/// Write the man pages of outlast and its commands.
#[derive(Debug, Args)]
pub struct Man {
    /// The directory to write to; created if needed [default: print outlast(1) to stdout]
    #[arg(value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// For an agent's hook: sends the event on stdin to the session that started the agent. It prints nothing and always
/// succeeds, because an agent interprets a hook's output and exit code.
#[derive(Debug, Args)]
pub struct AgentEvent {
    /// The session's control socket
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,

    /// The generation of the agent
    #[arg(long, value_name = "NUMBER")]
    pub generation: u64,
}

/// The server of the demo.
#[derive(Debug, Args)]
pub struct DemoServer {
    /// The file that defines its tools
    pub file: PathBuf,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Reload {
    #[value(alias = "bluegreen")]
    BlueGreen,
    Replace,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Retry {
    Never,
    Annotated,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Policy {
    Watchdog,
    Exponential,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum First {
    AtOnce,
    Delay,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnHangup {
    End,
    Detach,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum OnCleanExit {
    End,
    Restart,
}

fn whole<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| "expected a whole number in range".to_owned())
}

fn size(text: &str) -> Result<u64, String> {
    let size = config::values::size(text).filter(|size| *size > 0);
    size.ok_or_else(|| "expected a size such as `512MB`, `1.5GB` or `64KiB`, or a number of bytes".to_owned())
}

fn listen_address(text: &str) -> Result<SocketAddr, String> {
    listen::address::parse(text).ok_or_else(|| listen::address::FORMS.replace('"', "`"))
}

/// The shortest time between two heartbeats of a call.
pub const HEARTBEAT_MIN: Duration = Duration::from_millis(100);

fn heartbeat(text: &str) -> Result<Duration, String> {
    duration::argument(text).and_then(|every| match every {
        every if every < HEARTBEAT_MIN => Err("expected at least 100ms".to_owned()),
        every => Ok(every),
    })
}
