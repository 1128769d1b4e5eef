//! Arguments → checked values. Nobody downstream sees raw text.

use std::{collections::BTreeMap, ffi::OsString, net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};

use outlast_core::keys::DetachKey;

use crate::{config, duration, gateway::listen, help, history::Since, os::Sandbox, wrap::clients::Client};

/// The connection outlasts the process.
///
/// outlast owns the processes an AI agent depends on, so that a crash, a hang or a reload is a short pause and never
/// an end.
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
    Ps(Ps),
    Top(Top),
    /// Say how one instance is: its server, its restarts, its last words.
    State(Which),
    /// Print the process id of an instance's server.
    Pid(Which),
    Restart(Restart),
    Switch(Switch),
    /// Have a gateway read its configuration again: only what changed is started, stopped or restarted.
    Reload(Which),
    Inject(Inject),
    Send(Send),
    Screen(Screen),
    WaitFor(WaitFor),
    Attach(Attach),
    Stop(Stop),
    /// Start a server or an agent again that was given up on.
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
    /// The ids of what runs, for completions.
    #[command(hide = true)]
    Ids,
    #[command(hide = true)]
    AgentEvent(AgentEvent),
    #[command(hide = true)]
    DemoServer(DemoServer),
}

/// Stand between an MCP client and its stdio server: the server may die and reload, the client's connection stays.
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

    /// What people call this server [default: from the command]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// Reload the server when a file here changes; what git ignores does not count.
    #[arg(long, value_name = "PATH", num_args = 1.., help_heading = "Reloading")]
    pub watch: Vec<PathBuf>,

    /// Run this in a shell before each reload; if it fails, the old server keeps serving.
    #[arg(long, value_name = "COMMAND", help_heading = "Reloading")]
    pub build: Option<String>,

    /// Start the new server beside the old one, or stop the old one first (a port, a lock).
    #[arg(long, value_enum, default_value_t = Reload::BlueGreen, help_heading = "Reloading")]
    pub reload: Reload,

    /// How long a replaced server may finish its calls.
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, default_value = "60s", help_heading = "Reloading")]
    pub drain: Duration,

    /// Whether a tool call that was running at a crash is asked again: only if the tool is annotated as read-only or
    /// idempotent, or never.
    #[arg(long, value_enum, default_value_t = Retry::Never, help_heading = "Crashes")]
    pub retry: Retry,

    /// When to start a crashed server again: 1, 5 and 10 s apart for ever, or doubling up to 60 s.
    #[arg(long, value_enum, default_value_t = Policy::Watchdog, help_heading = "Crashes")]
    pub policy: Policy,

    /// Give up after so many restarts in a row; 0 is never [default: the policy's]
    #[arg(long, value_name = "N", value_parser = whole::<u32>, help_heading = "Crashes")]
    pub max_restarts: Option<u32>,

    /// The first crash of a server that had been ready for 5 s: come back at once, or after the delay.
    #[arg(long, value_enum, default_value_t = First::AtOnce, help_heading = "Crashes")]
    pub first_restart: First,

    /// What the server's exit code 0 means: outlast ends too, or starts it again when it is needed.
    #[arg(long, value_enum, default_value_t = OnCleanExit::End, help_heading = "Crashes")]
    pub on_clean_exit: OnCleanExit,

    /// How long a server may take for its handshake [default: 120s for the first, 30s after]
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, help_heading = "Crashes")]
    pub start_timeout: Option<Duration>,

    /// How long the first server may take for the handshake before outlast answers it, from the cache of this command's last
    /// run or with its own tools; the server goes on starting [default: 3s with a cache, 20s without]
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, help_heading = "Slow servers")]
    pub answer_after: Option<Duration>,

    /// How long a tool call may take without progress; then it is cancelled and fails, and a server that hangs is replaced.
    /// The file may set it for each tool [default: no limit]
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, help_heading = "Slow servers")]
    pub call_timeout: Option<Duration>,

    /// The same for single tools, from the file.
    #[arg(skip)]
    pub call_timeouts: BTreeMap<String, Duration>,

    /// Replace a server that uses more memory than this, with all processes below it, such as 512MB (Linux)
    /// [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = "Crashes")]
    pub memory_max: Option<u64>,

    /// The server's own tool that makes it exit with code 42: only a call of this one is answered as a success then.
    #[arg(long, value_name = "NAME", default_value = "restart_server", help_heading = "Crashes")]
    pub restart_tool: String,

    /// How often outlast reports progress of a call whose client sent a progress token and whose server reports none
    /// [default: never]
    #[arg(long, value_name = "DURATION", value_parser = heartbeat, help_heading = "Slow servers")]
    pub heartbeat: Option<Duration>,

    /// How long a request waits for a server that is down before it is answered with an error.
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, default_value = "30s", help_heading = "Crashes")]
    pub hold: Duration,

    /// How long a server may take to end after its stdin is closed; then it gets SIGTERM.
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, default_value = "1s", help_heading = "Stopping")]
    pub stdin_grace: Duration,

    /// How long it may take after SIGTERM; then it gets SIGKILL.
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, default_value = "2s", help_heading = "Stopping")]
    pub term_grace: Duration,

    /// Do not add `restart_server`, `verify_server_restarted` and `server_status` to the server's tools.
    #[arg(long)]
    pub no_tools: bool,

    /// Where the restart marker is written [default: .outlast/restart_marker]
    #[arg(long, value_name = "PATH")]
    pub marker: Option<PathBuf>,

    /// The file that sets what no option here does, in its table `[mcp]` [default: the nearest outlast.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Hand our own stdin and stdout to the server and only restart it: nothing is read, replayed or answered. Only
    /// for servers that need no handshake.
    #[arg(long, conflicts_with_all = ["watch", "build", "reload", "drain", "retry", "hold", "start_timeout", "no_tools",
        "marker", "on_clean_exit", "answer_after", "heartbeat", "call_timeout", "memory_max", "restart_tool"])]
    pub inherit: bool,

    /// From the configuration: what the server may use.
    #[arg(skip)]
    pub sandbox: Option<Sandbox>,

    /// From the configuration: files that are not used, or not as a whole.
    #[arg(skip)]
    pub warnings: Vec<String>,
}

/// Put many MCP servers behind one: each is supervised, and clients see one catalogue.
///
/// The servers stand in `outlast.toml`, or in any configuration a client already has:
///
///     outlast gateway --config .mcp.json --listen 127.0.0.1:7332
///     "command": "outlast", "args": ["gateway", "--config", "/home/me/outlast.toml", "--stdio"]
#[derive(Debug, Args)]
#[command(verbatim_doc_comment, args_conflicts_with_subcommands = true)]
pub struct Gateway {
    #[command(subcommand)]
    pub besides: Option<GatewayCommand>,

    /// A configuration: `outlast.toml`, `.mcp.json`, `.vscode/mcp.json` or `claude_desktop_config.json`; several are
    /// taken together [default: the nearest outlast.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Vec<PathBuf>,

    /// Serve one client on stdin and stdout, and end when it leaves [default: unless stdin is a terminal, or there is
    /// an address to listen on]
    #[arg(long)]
    pub stdio: bool,

    /// Serve clients over HTTP at this address, under /mcp; `localhost:7332`, `:7332` and `7332` mean this machine
    /// [default: the configuration's, or 127.0.0.1:7332 at a terminal]
    #[arg(long, value_name = "ADDR:PORT", value_parser = listen_address)]
    pub listen: Option<SocketAddr>,

    /// What people call this gateway [default: from the configuration, or its directory]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// Do not read the configuration again when a file of it changes; SIGHUP and `outlast reload` still do.
    #[arg(long)]
    pub no_watch: bool,

    /// How long a backend may take to end after its stdin is closed; then it gets SIGTERM.
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, default_value = "1s", help_heading = "Stopping")]
    pub stdin_grace: Duration,

    /// How long it may take after SIGTERM; then it gets SIGKILL.
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, default_value = "2s", help_heading = "Stopping")]
    pub term_grace: Duration,
}

/// What can be done about a gateway that does not run.
#[derive(Debug, Subcommand)]
pub enum GatewayCommand {
    Check(config::commands::Check),
    HashKey(config::commands::HashKey),
}

/// Own an interactive agent behind a terminal of its own: it may crash, and comes back with the same conversation.
///
/// The agent works in the directory that is named by `--cwd`, or by `outlast_cwd`
/// in the block at the top of DOCUMENT, or is the root of the project, or the
/// document's own:
///
///     outlast run -- claude
///     outlast run plan.md -- codex
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Run {
    /// A Markdown document that the session is about.
    #[arg(value_name = "DOCUMENT")]
    pub document: Option<PathBuf>,

    /// The agent's command and its arguments, after `--`.
    #[arg(required = true, last = true, value_name = "CMD")]
    pub command: Vec<OsString>,

    /// What the session is called; only one at a time can have a name [default: from the document, or a new one]
    #[arg(long, value_name = "ID", visible_alias = "name")]
    pub session: Option<String>,

    /// Where the agent works.
    #[arg(long, value_name = "DIR")]
    pub cwd: Option<PathBuf>,

    /// The agent's profile: claude, codex, shell, or NAME of `[agent.NAME]` in outlast.toml [default: by its program's name]
    ///
    /// Behind a wrapper script the program's name does not tell which agent it is. What outlast adds to the command line
    /// (the conversation to resume, hooks) then goes to its end, and the script must pass it on: `exec claude "$@"`.
    #[arg(long, value_name = "NAME")]
    pub agent: Option<String>,

    /// From the file: what `agent` names.
    #[arg(skip)]
    pub profile: outlast_core::agent::Profile,

    /// Pass this variable of outlast's own environment to the agent; `NAME*` passes all that begin so, `'*'` all.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub env_pass: Vec<String>,

    /// Which variables of outlast's own environment pass to the agent: those that are listed in the book and those of
    /// `--env-pass`, or all but PWD.
    #[arg(long, value_enum, default_value_t = Env::Listed, value_name = "WHICH")]
    pub env: Env,

    /// The file that sets what no option here does, in its table `[run]` [default: the nearest outlast.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Run in the background, without a terminal, and print the session's id. `outlast attach` shows it.
    #[arg(short, long)]
    pub detach: bool,

    /// Leaves the agent to itself in the background: a key with Ctrl, perhaps another after it, or `none`.
    #[arg(long, value_name = "KEY", value_parser = DetachKey::parse, default_value = "ctrl-\\", help_heading = "Terminal")]
    pub detach_key: DetachKey,

    /// What a lost terminal means: the agent and outlast end too, or go on in the background.
    #[arg(long, value_enum, default_value_t = OnHangup::End, help_heading = "Terminal")]
    pub on_hangup: OnHangup,

    /// Do not keep the screen: nobody can attach, read it or wait for it.
    #[arg(long, help_heading = "Terminal")]
    pub no_screen: bool,

    /// Run this in a shell, with the event as JSON on its stdin, when the agent waits for input, crashes or hangs.
    #[arg(long, value_name = "COMMAND", help_heading = "Attention")]
    pub notify: Option<String>,

    /// Restart an agent that is busy by its own account and has shown nothing for so long [default: never]
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, help_heading = "Attention")]
    pub hang_timeout: Option<Duration>,

    /// From the configuration: files that are not used, or not as a whole.
    #[arg(skip)]
    pub warnings: Vec<String>,
}

/// Which variables pass to an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Env {
    Listed,
    All,
}

/// List everything that runs under outlast, in every project.
#[derive(Debug, Args)]
pub struct Ps {
    /// An array of objects, for programs.
    #[arg(long)]
    pub json: bool,
}

/// Watch everything that runs under outlast, live: states, calls, waits and crashes.
///
/// Keys restart, stop and resume, show logs and filter; `?` lists them. Where there is no terminal, one plain table is
/// printed instead.
#[derive(Debug, Args)]
pub struct Top {
    /// Print one table and end, as when stdout is not a terminal.
    #[arg(long)]
    pub once: bool,

    /// What it shows at this moment as an array of objects, for programs.
    #[arg(long)]
    pub json: bool,
}

/// Which instance is meant.
#[derive(Debug, Args)]
pub struct Which {
    /// Its id, the beginning of it, or its name; of a gateway's backend GATEWAY/BACKEND or just its name [default: the
    /// only one in this directory]
    #[arg(value_name = "ID")]
    pub id: Option<String>,

    /// JSON, for programs.
    #[arg(long)]
    pub json: bool,
}

/// Reload a server while its client stays connected, or start an agent anew.
///
/// The new server takes over when it is ready. If it does not come up, the old one keeps serving, and this says why. An
/// agent is stopped first, and the next one takes up its conversation.
#[derive(Debug, Args)]
pub struct Restart {
    #[command(flatten)]
    pub which: Which,

    /// What stands in the audit log and in the restart marker.
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,

    /// Of a server under `outlast mcp`: do not wait for its calls. They fail when the new server is ready, except those
    /// that may be asked twice: these go to it.
    #[arg(long)]
    pub now: bool,

    /// Of an agent: begin a new conversation.
    #[arg(long, conflicts_with = "continue")]
    pub fresh: bool,

    /// Of an agent: go on with its conversation, as by default.
    #[arg(long)]
    pub r#continue: bool,
}

/// Turn a tool or a whole backend of a gateway off, or on again.
///
/// Calls of what is off are refused at once; a backend that is off is stopped. It lasts until it is turned on again or
/// the gateway ends; the configuration says what is off from the start.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("way").required(true))]
pub struct Switch {
    /// The gateway's id, the beginning of it, or its name [default: the only one in this directory]
    #[arg(value_name = "ID")]
    pub id: Option<String>,

    /// The tool, as clients see it, or the backend to turn off.
    #[arg(long, value_name = "NAME", group = "way")]
    pub off: Option<String>,

    /// The tool or the backend to turn on again.
    #[arg(long, value_name = "NAME", group = "way")]
    pub on: Option<String>,

    /// JSON, for programs.
    #[arg(long)]
    pub json: bool,
}

/// Type into an agent's terminal from outside.
///
/// The bytes arrive as they are. Enter is not among them unless it is asked for.
#[derive(Debug, Args)]
pub struct Inject {
    /// The session's id, the beginning of it, or its name.
    #[arg(value_name = "ID")]
    pub id: String,

    /// What to type [default: what comes on stdin]
    #[arg(value_name = "TEXT")]
    pub text: Option<String>,

    /// Press Enter after it.
    #[arg(long)]
    pub enter: bool,

    /// JSON, for programs.
    #[arg(long)]
    pub json: bool,
}

/// Send an agent a text, and see that it arrives.
///
/// Waits until the agent shows an empty place to type, pastes the text there, and waits until it is to be seen. With
/// `--submit` Enter is pressed, and the text is submitted when the agent has recorded the turn; without such a record the
/// result is `unproven`. A text that was not submitted is removed again.
#[derive(Debug, Args)]
pub struct Send {
    /// The session's id, the beginning of it, or its name.
    #[arg(value_name = "ID")]
    pub id: String,

    /// The text, of one line or many [default: what comes on stdin]
    #[arg(value_name = "TEXT")]
    pub text: Option<String>,

    /// Press Enter after it; without this it stands there for somebody else to send.
    #[arg(long)]
    pub submit: bool,

    /// How long to wait for a place to type.
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, default_value = "30s")]
    pub timeout: Duration,

    /// What was sent under this key is not sent again; then the first answer is given once more.
    #[arg(long, value_name = "TEXT")]
    pub key: Option<String>,

    /// JSON, for programs.
    #[arg(long)]
    pub json: bool,
}

/// Print what an agent's terminal shows.
#[derive(Debug, Args)]
pub struct Screen {
    #[command(flatten)]
    pub which: Which,

    /// With so many lines of what has left the screen at its top.
    #[arg(long, value_name = "N", value_parser = whole::<usize>, default_value_t = 0)]
    pub history: usize,
}

/// Wait until an agent's terminal shows something, is quiet, or waits for input.
///
/// The exit code is 0 when it does, 124 when the time is over, and 1 when it cannot any more.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("what").required(true)))]
pub struct WaitFor {
    #[command(flatten)]
    pub which: Which,

    /// Until these words are on the screen.
    #[arg(long, value_name = "TEXT", group = "what")]
    pub text: Option<String>,

    /// Until nothing was written or typed for so long.
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, group = "what")]
    pub quiet: Option<Duration>,

    /// Until it waits for input.
    #[arg(long, group = "what")]
    pub prompt: bool,

    /// No longer than this [default: as long as it takes]
    #[arg(long, value_name = "DURATION", value_parser = duration::argument)]
    pub timeout: Option<Duration>,
}

/// Show an agent's terminal here, and type into it. Several may do so at once.
///
/// Its size is that of whoever typed last.
#[derive(Debug, Args)]
pub struct Attach {
    /// The session's id, the beginning of it, or its name [default: the only one in this directory]
    #[arg(value_name = "ID")]
    pub id: Option<String>,

    /// Only look: nothing that is typed reaches the agent, and its size stays as it is.
    #[arg(long)]
    pub watch: bool,

    /// Leaves the agent to itself: a key with Ctrl, perhaps another after it, or `none`.
    #[arg(long, value_name = "KEY", value_parser = DetachKey::parse, default_value = "ctrl-\\")]
    pub detach_key: DetachKey,
}

/// End an instance: its server, and outlast itself.
#[derive(Debug, Args)]
pub struct Stop {
    #[command(flatten)]
    pub which: Which,

    /// At once: the server is killed, and what it was asked stays unanswered.
    #[arg(long)]
    pub force: bool,
}

/// Show what an instance and its server said.
#[derive(Debug, Args)]
pub struct Logs {
    /// Its id, the beginning of it, or its name; also of one that ended in this directory [default: the only one that
    /// runs here, or else the last that did]
    #[arg(value_name = "ID")]
    pub id: Option<String>,

    /// Go on as more is said, until the instance ends.
    #[arg(short, long)]
    pub follow: bool,

    /// How many lines, from the end.
    #[arg(short = 'n', long, value_name = "N", value_parser = whole::<usize>, default_value_t = 100)]
    pub lines: usize,

    /// An object for each line: `time`, `source`, `text`, and the `line` as it stands.
    #[arg(long)]
    pub json: bool,
}

/// Show what happened in this directory, or to one instance: starts, crashes, restarts and why.
#[derive(Debug, Args)]
pub struct Audit {
    /// An instance's id, the beginning of it, or its name [default: all in this directory]
    #[arg(value_name = "ID")]
    pub id: Option<String>,

    /// Only what came after: a time ago, such as 10m, 2h or 7d, or a moment in UTC, such as 2026-01-13T14:32
    #[arg(long, value_name = "TIME", value_parser = Since::parse)]
    pub since: Option<Since>,

    /// Only events of this type, such as `server_crashed`.
    #[arg(long, value_name = "EVENT")]
    pub event: Option<String>,

    /// The lines as they stand in the log, for jq.
    #[arg(long)]
    pub json: bool,
}

/// Put outlast in front of every stdio server in your clients' configurations.
///
/// Finds the configurations of Claude Code, Claude Desktop, VS Code, Cursor, Codex, Gemini CLI, Windsurf, Zed, Cline and
/// opencode, here and in your home directory, shows what would change, and asks; `s` asks for each server. Comments,
/// order and layout stay; a backup is kept, and `outlast unwrap` restores the file byte for byte.
#[derive(Debug, Args)]
pub struct Wrap {
    #[command(flatten)]
    pub which: WhichFiles,

    /// How outlast is called there [default: its whole path; in a project's file `outlast`, if PATH has it]
    #[arg(long, value_name = "COMMAND")]
    pub command: Option<String>,
}

/// Take outlast out of your clients' configurations again.
///
/// A file that nobody changed since is restored byte for byte; in any other, only what `wrap` has put in is taken out.
#[derive(Debug, Args)]
pub struct Unwrap {
    #[command(flatten)]
    pub which: WhichFiles,
}

/// Which configurations are meant, and how.
#[derive(Debug, Args)]
pub struct WhichFiles {
    /// Only these files [default: all that are found]
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,

    /// Only the files of this client; may be given more than once.
    #[arg(long, value_name = "NAME", value_enum, conflicts_with = "files")]
    pub client: Vec<Client>,

    /// Only the server of this name; may be given more than once.
    #[arg(long, value_name = "NAME")]
    pub server: Vec<String>,

    /// Do not ask.
    #[arg(short, long)]
    pub yes: bool,

    /// Show what would be done, and do nothing.
    #[arg(long, conflicts_with = "yes")]
    pub dry_run: bool,

    /// JSON, for programs: what became of each file and each server. It asks no question, so it needs `--yes` or
    /// `--dry-run`.
    #[arg(long)]
    pub json: bool,
}

/// Trust a configuration file of a project: what it sets to be run, passed on, watched or listened on is then used.
///
/// outlast uses an `outlast.toml` that it finds in a directory. Until you trust the file, it ignores those keys in it that
/// run commands, pass on or read the environment, lead out of the directory, connect to an address or listen. Trust is
/// recorded for exactly these values: when one of them changes, the file must be trusted again. A file that you name by
/// `--config` needs no trust. `outlast doctor` starts the servers of a project's client files (`.mcp.json` and others) only
/// if you trust the file or have wrapped it.
#[derive(Debug, Args)]
pub struct Trust {
    /// A file, or a directory with an outlast.toml in it [default: the nearest outlast.toml]
    #[arg(value_name = "FILE|DIR")]
    pub path: Option<PathBuf>,

    /// List the values that need trust, and whether they are trusted. Nothing is changed.
    #[arg(long, conflicts_with = "remove")]
    pub show: bool,

    /// Trust the file no longer.
    #[arg(long)]
    pub remove: bool,

    /// JSON, for programs.
    #[arg(long)]
    pub json: bool,
}

/// Look for what is wrong with your clients, their servers and outlast itself, and say how to mend it.
///
/// Reads the configurations that `outlast wrap` knows, starts each stdio server in them once to shake hands with it, and
/// looks for instances that hang, for processes that an outlast left behind, and at the state directory. Servers in files
/// of a project are started only if you wrapped the file or trust it (`outlast trust FILE`), or say so when asked on a
/// terminal. Nothing is changed. The exit code is 1 if there is a problem.
#[derive(Debug, Args)]
pub struct Doctor {
    /// Start no servers: only look.
    #[arg(long)]
    pub no_start: bool,

    /// How long each server may take to answer.
    #[arg(long, value_name = "DURATION", value_parser = duration::argument, default_value = "20s", conflicts_with = "no_start")]
    pub timeout: Duration,

    /// JSON, for programs.
    #[arg(long)]
    pub json: bool,
}

/// Watch a connection outlast its server, in ten seconds: a reload, a broken reload, a kill -9.
///
/// Starts `outlast mcp` with a small server of its own in a temporary directory, and calls the server without a pause
/// while it is reloaded with a changed tool, reloaded with broken code, and killed. Shows what the client saw of each,
/// all of it measured, and ends with the sums.
///
/// Nothing of yours is touched and nothing is left behind. The exit code is 0 if every call was answered.
#[derive(Debug, Args)]
pub struct Demo {
    /// Plain lines instead of a picture, as when stdout is not a terminal.
    #[arg(long)]
    pub plain: bool,

    /// Only the sums, as JSON, for programs.
    #[arg(long, conflicts_with = "plain")]
    pub json: bool,
}

/// Explain a command, or a topic of the book.
///
/// `outlast help topics` lists the topics.
#[derive(Debug, Args)]
pub struct Help {
    /// A command or a topic [default: all commands]
    #[arg(value_name = "COMMAND|TOPIC")]
    pub words: Vec<String>,
}

/// Print a script that completes outlast's commands, options and instances in your shell.
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

/// Write the man pages of outlast and all its commands.
#[derive(Debug, Args)]
pub struct Man {
    /// Where to; it is made if it is not there [default: outlast(1) alone, to stdout]
    #[arg(value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// Run by an agent's hook: passes the event on stdin on to the session that started the agent. It prints nothing and
/// always succeeds, because an agent takes a hook's output and exit code for instructions.
#[derive(Debug, Args)]
pub struct AgentEvent {
    /// The session's control socket.
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,

    /// Which start of the agent this is.
    #[arg(long, value_name = "NUMBER")]
    pub generation: u64,
}

/// The demo's own server.
#[derive(Debug, Args)]
pub struct DemoServer {
    /// What it reads its tools from.
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
    text.parse().map_err(|_| "a whole number is wanted, and not too large a one".to_owned())
}

fn size(text: &str) -> Result<u64, String> {
    let size = config::read::size(text).filter(|size| *size > 0);
    size.ok_or_else(|| "write `512MB`, `1.5GB` or `64KiB`, or a number of bytes".to_owned())
}

fn listen_address(text: &str) -> Result<SocketAddr, String> {
    listen::address::parse(text).ok_or_else(|| listen::address::FORMS.replace('"', "`"))
}

/// The shortest time between two heartbeats of a call.
pub const HEARTBEAT_MIN: Duration = Duration::from_millis(100);

fn heartbeat(text: &str) -> Result<Duration, String> {
    duration::argument(text).and_then(|every| match every {
        every if every < HEARTBEAT_MIN => Err("at least 100ms are wanted".to_owned()),
        every => Ok(every),
    })
}
