//! Each command, from its checked arguments to its exit code.

use std::{
    env, io,
    path::{Path, PathBuf},
    process::ExitCode,
    rc::Rc,
    time::{Duration, Instant},
};
#[cfg(unix)]
use std::{
    ffi::OsString,
    os::unix::ffi::{OsStrExt, OsStringExt},
};

use outlast_control::{Control, Instance, answer::lenient, registry::Registry};
#[cfg(unix)]
use outlast_core::saved::Octets;
use outlast_core::{
    agent::{Agent, Kind},
    life::Grace,
    limit::OnLimit,
    relay::{self, Limits, Relay, Settings},
    restarts::{First, Policy},
    send,
    session::{Mode, Session},
};
#[cfg(unix)]
use outlast_os::handover::Received;
use outlast_os::{self as os, ChildProcesses, Keeper, Outer, offload};
use serde::Deserialize;
use serde_json::json;
use tokio::runtime::{LocalOptions, LocalRuntime};

#[cfg(unix)]
use crate::{
    agent::terminal::{upgrade as session_upgrade, viewers::Viewers},
    relay::mcp::upgrade,
    upgrade::format::{self, Header, Unreadable},
};
use crate::{
    agent::{
        frontmatter,
        session_record::{Records, SessionRecord, State},
        terminal::{self, Parts, Receiver, StartContext, Terminal},
    },
    child::{Children, environment, own_streams::OwnStreams, watch::Watch},
    cli::{
        self,
        report::{self, Report, shell_quote},
    },
    operator::instances,
    relay::{
        files::Files,
        inherit,
        mcp::{Driver, Plan},
        start_cache::StartCache,
    },
    state::{
        home::{self, Home},
        journal::Journal,
        marker::Markers,
    },
    upgrade::own_program,
};

#[cfg(unix)]
mod shared;

#[cfg(unix)]
use self::shared::begin_shared;

/// At the end of the program: how long files that are being written may take.
pub(crate) const FILES_MAX: Duration = Duration::from_millis(100);
/// How long a session of the same name may take to exit after it has left the registry.
const LEAVING_MAX: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// What a session can be called.
const ID_HINT: &str = if cfg!(windows) {
    "use up to 40 of a-z, 0-9, - and _; no - at the beginning or end; no device name such as `con` or `com1`"
} else {
    "use up to 40 of a-z, 0-9, - and _; no - at the beginning or end"
};

pub(crate) fn mcp(arguments: cli::Mcp) -> Result<ExitCode, Report> {
    let cwd = report::cwd()?;
    let unshared = match begin_shared(&arguments, &cwd)? {
        Begun::Over(code) => return Ok(code),
        Begun::Unshared(why) => why,
    };
    let (keeper, runtime) = settle_in()?;
    let code = runtime.block_on(serve(arguments, keeper, &cwd, unshared))?;
    drop(runtime);
    offload::finish(FILES_MAX);
    Ok(ExitCode::from(code))
}

/// Continues with the conversation of the last program of this process.
#[cfg(unix)]
pub(crate) fn mcp_again(arguments: cli::Mcp, mut received: Received) -> Result<ExitCode, Report> {
    let cwd = report::cwd()?;
    let state = received.state().map_err(failed("cannot read the state"))?;
    let (header, saved) = match format::read(format::Kind::Mcp, &state) {
        Err(Unreadable::OtherKind) if arguments.hub.is_some() => {
            return shared::hub_again(&arguments, &state, received, &cwd);
        }
        Err(Unreadable::OtherKind) => return shared::client_again(&arguments, &state, received, &cwd),
        read => read.map_err(unreadable)?,
    };
    let runtime = runtime()?;
    let code = runtime.block_on(serve_again(arguments, &header, saved, received, &cwd))?;
    drop(runtime);
    offload::finish(FILES_MAX);
    Ok(ExitCode::from(code))
}

#[cfg(unix)]
fn unreadable(error: Unreadable) -> Report {
    Report::of(&error, None, report::FAILURE)
}

/// Whether this program could continue with the conversation, with these arguments.
#[cfg(unix)]
pub(crate) fn check_mcp(arguments: &cli::Mcp, state: &[u8]) -> Result<(), Report> {
    let (_, saved): (_, upgrade::Saved) = match format::read(format::Kind::Mcp, state) {
        Err(Unreadable::OtherKind) if arguments.hub.is_some() => return shared::check_hub(arguments, state),
        Err(Unreadable::OtherKind) => return shared::check_client(arguments, state),
        read => read.map_err(unreadable)?,
    };
    check_relay(arguments, saved)
}

#[cfg(unix)]
fn check_relay(arguments: &cli::Mcp, saved: upgrade::Saved) -> Result<(), Report> {
    saved.children.check().map_err(|error| Report::new(report::FAILURE, error.to_string()))?;
    let _ = Relay::restore(settings(arguments, String::new(), String::new()), saved.relay, Instant::now());
    Ok(())
}

/// The result of `--share`.
enum Begun {
    /// The client of a shared server is gone, or its hub is over.
    Over(ExitCode),
    /// This process is to run the server itself: the option is not given, or cannot be used for this reason.
    Unshared(Option<String>),
}

#[cfg(not(unix))]
fn begin_shared(arguments: &cli::Mcp, _cwd: &Path) -> Result<Begun, Report> {
    Ok(Begun::Unshared(arguments.share.map(|_| "`--share` is not supported on this system".to_owned())))
}

/// The keeper first, before any thread, as it is a fork of this process; then the loop's runtime.
pub(crate) fn settle_in() -> Result<(Keeper, LocalRuntime), Report> {
    let keeper = Keeper::begin()
        .map_err(|error| Report::new(report::FAILURE, "cannot start the keeper process").because(error))?;
    Ok((keeper, runtime()?))
}

/// All tasks are in one queue: those of this program, which stay on their thread, and those that libraries spawn.
pub(crate) fn runtime() -> Result<LocalRuntime, Report> {
    tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build_local(LocalOptions::default())
        .map_err(|error| Report::new(report::FAILURE, "cannot start").because(error))
}

/// `unshared` is why a server that was to be shared is not.
async fn serve(arguments: cli::Mcp, keeper: Keeper, cwd: &Path, unshared: Option<String>) -> Result<u8, Report> {
    let mut conversation = Conversation::begin(&arguments, keeper, cwd)?;
    if let Some(why) = unshared {
        conversation.journal.note(&format!("the server is not shared: {why}"));
        let share = json!({"share": {"scope": "own", "why_not_all": why}});
        conversation.plan.more_state = Some(Box::new(move || share.clone()));
    }
    if arguments.inherit {
        let Conversation { plan, processes, stops, journal, control, .. } = conversation;
        return Ok(inherit::run(plan, policy(&arguments), processes, stops, journal, control).await);
    }
    let client = OwnStreams::begin().map_err(failed("cannot use stdin and stdout"))?;
    Ok(conversation.driver(&arguments, client).run().await)
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> Report {
    move |error| Report::new(report::FAILURE, what).because(error)
}

/// Everything around the conversation with one server, except its client.
struct Conversation {
    id: String,
    name: String,
    home: Home,
    plan: Plan,
    processes: ChildProcesses,
    stops: os::Stops,
    journal: Journal,
    control: Control,
    watch: Option<Watch>,
}

impl Conversation {
    fn begin(arguments: &cli::Mcp, keeper: Keeper, cwd: &Path) -> Result<Conversation, Report> {
        let stops = os::Stops::begin().map_err(failed("cannot listen for signals"))?;
        let processes = keeper.attach().map_err(failed("cannot reach the keeper process"))?;
        let watch = match arguments.watch.as_slice() {
            [] => None,
            paths => Some(Watch::begin(paths, cwd).map_err(|error| Report::of(&error, error.hint(), report::USAGE))?),
        };

        let names = Names::of(arguments);
        let id = home::new_id(&names.name);
        let home = Home::open(cwd, env::home_dir().as_deref());
        let mut journal = Journal::new(&home, &id, &names.name);
        journal.begin(&names.command_line, cwd);
        arguments.warnings.iter().for_each(|warning| journal.note(warning));
        let plan = plan_of_mcp(arguments, &id, cwd);
        let (control, complaint) = Control::begin(names.instance(&id, &home, cwd), env::home_dir().as_deref());
        if let Some(complaint) = complaint {
            journal.note(&complaint);
        }
        Ok(Conversation { id, name: names.name, home, plan, processes, stops, journal, control, watch })
    }

    /// With this client.
    fn driver(self, arguments: &cli::Mcp, client: OwnStreams) -> Driver {
        let Conversation { id, name, home, plan, processes, stops, journal, control, watch } = self;
        let cwd = plan.cwd.clone();
        let cache = cache_of(arguments, &cwd);
        let settings = Settings { cache: cache.is_some(), ..settings(arguments, id.clone(), name) };
        let markers = Markers::new(&home, &id, arguments.marker.clone());
        let files = Files::new(cwd, markers, cache, watch);
        Driver::new(plan, Relay::new(settings), Children::new(processes), stops, client, journal, files, control)
    }
}

#[cfg(unix)]
async fn serve_again(
    arguments: cli::Mcp,
    header: &Header,
    saved: upgrade::Saved,
    mut received: Received,
    cwd: &Path,
) -> Result<u8, Report> {
    let client = OwnStreams::restore(saved.rest.client.clone()).map_err(failed("cannot use stdin and stdout"))?;
    let plan = plan_of_mcp(&arguments, &saved.relay.id, cwd);
    let (driver, rest) = driver_again(&arguments, plan, saved, client, &mut received)?;
    Ok(driver.go_on(header, rest, arguments.watch, received).await)
}

/// The driver of the last program of this process, with this client.
#[cfg(unix)]
fn driver_again(
    arguments: &cli::Mcp,
    plan: Plan,
    saved: upgrade::Saved,
    client: OwnStreams,
    received: &mut Received,
) -> Result<(Driver, upgrade::SavedRest), Report> {
    let stops = os::Stops::begin().map_err(failed("cannot listen for signals"))?;
    let names = Names::of(arguments);
    let (id, cwd) = (plan.id.clone(), plan.cwd.clone());
    let home = Home::open(&cwd, env::home_dir().as_deref());
    let journal = Journal::new(&home, &id, &names.name);
    let children =
        Children::restore(saved.children, received, plan.grace).map_err(failed("cannot take over the server"))?;
    let instance = names.instance(&id, &home, &cwd);
    let control = Control::restore(instance, env::home_dir().as_deref(), saved.control, received)
        .map_err(failed("cannot take over the control socket"))?;
    let cache = cache_of(arguments, &cwd);
    let settings = Settings { cache: cache.is_some(), ..settings(arguments, id.clone(), names.name) };
    let files = Files::new(cwd, Markers::new(&home, &id, arguments.marker.clone()), cache, None);
    let relay = Relay::restore(settings, saved.relay, Instant::now());
    Ok((Driver::new(plan, relay, children, stops, client, journal, files, control), saved.rest))
}

/// How an instance of `outlast mcp` is called.
struct Names {
    name: String,
    /// As a user would type it, without secrets.
    command_line: String,
}

impl Names {
    fn of(arguments: &cli::Mcp) -> Names {
        let words: Vec<String> = arguments.command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        Names {
            name: arguments.name.clone().unwrap_or_else(|| name_of(&words)),
            command_line: shell_quote(without_secrets(&words).iter().map(String::as_str)),
        }
    }

    fn instance(&self, id: &str, home: &Home, cwd: &Path) -> Instance {
        Instance {
            id: id.to_owned(),
            kind: "mcp",
            name: self.name.clone(),
            cwd: cwd.to_owned(),
            command: self.command_line.clone(),
            log: home.log(id),
            audit: home.audit(),
            program: own_program(),
        }
    }
}

fn plan_of_mcp(arguments: &cli::Mcp, id: &str, cwd: &Path) -> Plan {
    let mut command = arguments.command.iter().cloned();
    Plan {
        program: command.next().expect("clap wants at least one word"),
        args: command.collect(),
        cwd: cwd.to_owned(),
        build: arguments.build.clone(),
        grace: Grace { after_stdin: arguments.stdin_grace, after_term: arguments.term_grace, ..Grace::default() },
        id: id.to_owned(),
        sandbox: arguments.sandbox.clone(),
        watches_memory: arguments.memory_max.is_some(),
        more_state: None,
        notes: None,
        #[cfg(unix)]
        inner: None,
    }
}

fn cache_of(arguments: &cli::Mcp, cwd: &Path) -> Option<StartCache> {
    let home = env::home_dir().filter(|home| home.is_absolute())?;
    Some(StartCache::of(&home, arguments.command.iter().map(|word| word.as_os_str()), cwd))
}

pub(crate) fn run(arguments: cli::Run) -> Result<ExitCode, Report> {
    let here = report::cwd()?;
    let plan = plan(&arguments, here)?;
    // Errors are reported before there is anything to clean up.
    let place = plan.place()?;
    if arguments.restored {
        check_restorable(&plan, &place)?;
    }
    if arguments.hang_timeout.is_some()
        && (arguments.no_screen || !Agent::new(&plan.program, &plan.args, plan.profile.clone()).is_readable())
    {
        return Err(Report::new(report::USAGE, format!("outlast cannot detect that `{}` hangs", plan.program))
            .because("`--hang-timeout` needs an agent whose screen shows that it is busy")
            .hint("it works for claude and codex, without `--no-screen`"));
    }
    check_unattended(&arguments, &plan)?;
    arguments.warnings.iter().for_each(|warning| os::say(&format!("[outlast] {warning}")));
    if let Some(words) = environment::left_out_in_words(&plan.program, &place.left_out) {
        os::say(&format!("[outlast] {words}"));
    }
    // The shell waits for the stand-in, which waits for this process, so that this process can leave the terminal.
    let standing = if arguments.detach { Ok(None) } else { os::stand_in("outlast itself") };
    let stand_in =
        match standing.map_err(|error| Report::new(report::FAILURE, "cannot use the terminal").because(error))? {
            Some(os::Standing::Over(code)) => return Ok(ExitCode::from(code)),
            Some(os::Standing::Worker(stand_in)) => Some(stand_in),
            None => None,
        };
    let announce = if arguments.detach {
        let detached = os::detach()
            .map_err(|error| Report::new(report::FAILURE, "cannot go into the background").because(error))?;
        match detached {
            os::Detached::Parent(said) => return announced(&said),
            os::Detached::Child(announce) => Some(announce),
        }
    } else {
        None
    };
    let claim = match (claim(&plan.id), announce.is_some()) {
        (Ok(claim), _) => claim.map(Rc::new),
        (Err(report), false) => return Err(report),
        (Err(report), true) => {
            // This process has no terminal any more; the process that started it waits for the error and prints it.
            let said = json!({"error": report.to_string(), "code": report.code}).to_string();
            announce.into_iter().for_each(|announce| announce.say(&said));
            return Ok(ExitCode::from(report.code));
        }
    };
    let (keeper, runtime) = settle_in()?;
    let code = runtime.block_on(own(plan, place, keeper, announce, stand_in, !arguments.no_screen, claim.clone()));
    drop(runtime);
    offload::finish(FILES_MAX);
    drop(claim);
    code.map(ExitCode::from)
}

async fn own(
    plan: terminal::Plan,
    place: StartContext,
    keeper: Keeper,
    announce: Option<os::Announce>,
    stand_in: Option<os::StandIn>,
    keeps_screen: bool,
    claim: Option<Rc<os::Claim>>,
) -> Result<u8, Report> {
    let stops = os::Stops::begin().map_err(failed("cannot listen for signals"))?;
    let processes = keeper.attach().map_err(failed("cannot reach the keeper process"))?;
    let (name, command) = names_of_session(&plan);
    let home = Home::open(&place.cwd.path, env::home_dir().as_deref());
    // The log of a session is not on stderr, and the terminal is not the agent's yet.
    if let Some(note) = home.note().filter(|_| announce.is_none()) {
        os::say(&format!("[outlast] {note}"));
    }
    let mut journal = Journal::of_session(&home, &plan.id, &name);
    journal.event(
        "session_start",
        &[("session", &plan.id), ("pid", &std::process::id()), ("version", &env!("CARGO_PKG_VERSION"))],
    );
    journal.begin(&command, &place.cwd.path);
    let instance = instance_of_session(&plan.id, name, command, &place.cwd.path, &home);
    let (control, complaint) = Control::begin(instance, env::home_dir().as_deref());
    if let Some(complaint) = complaint {
        journal.note(&complaint);
    }
    let outer = stand_in.map(Outer::begin).transpose().map_err(failed("cannot use the terminal"))?;
    let stdout = match outer {
        Some(_) => None,
        None if announce.is_some() => None,
        None => Some(os::stdout().map_err(failed("cannot write to stdout"))?),
    };
    let mut session = Session::new(Policy::session(), home::random(), outer.is_some());
    if plan.is_restored {
        session.keep_conversation();
    }
    let mut agent = Agent::new(&plan.program, &plan.args, plan.profile.clone());
    let records = env::home_dir().filter(|home| home.is_absolute()).map(|home| Records::of(&home));
    let earlier = records.as_ref().map_or(Ok(None), |records| records.read(&plan.id)).unwrap_or_else(|complaint| {
        journal.note(&complaint);
        None
    });
    let mut was_in_turn = false;
    let first = match earlier.filter(|record| goes_on(record, &place, &agent)) {
        None => Mode::Fresh,
        Some(record) => {
            let id = record.conversation.clone().unwrap_or_default();
            journal.event("session_continued", &[("conversation", &id)]);
            was_in_turn = record.in_turn;
            let is_same = [&plan.program].into_iter().chain(&plan.args).eq(&record.command);
            agent.go_on(record.conversation, is_same);
            Mode::Continue
        }
    };
    if let Some(records) = &records {
        records.prune();
    }
    let parts = Parts {
        #[cfg(unix)]
        home: Octets::of(place.cwd.path.as_os_str().as_bytes()),
        plan,
        place,
        session,
        agent,
        records,
        first,
        was_in_turn,
        children: Children::new(processes),
        stops,
        outer,
        stdout,
        keeps_screen,
        journal,
        control,
        #[cfg(unix)]
        claim,
        announce,
    };
    // Only an upgrade in place needs it; the caller has it, too.
    #[cfg(windows)]
    drop(claim);
    Terminal::new(parts).run().await
}

/// The name of a session, and its command as a user would type it.
fn names_of_session(plan: &terminal::Plan) -> (String, String) {
    let words: Vec<String> = [&plan.program].into_iter().chain(&plan.args).cloned().collect();
    (name_of(&words), shell_quote(words.iter().map(String::as_str)))
}

fn instance_of_session(id: &str, name: String, command: String, cwd: &Path, home: &Home) -> Instance {
    Instance {
        id: id.to_owned(),
        kind: "session",
        name,
        cwd: cwd.to_owned(),
        command,
        log: home.log(id),
        audit: home.audit(),
        program: own_program(),
    }
}

/// Continues with the session of the last program of this process.
#[cfg(unix)]
pub(crate) fn run_again(arguments: &cli::Run, mut received: Received) -> Result<ExitCode, Report> {
    let (header, saved) = read_session(&received.state().map_err(failed("cannot read the state"))?)?;
    let path = env::home_dir().map(|home| Registry::of(&home).claim_path(&saved.id));
    let claim = saved.claim.zip(path).map(|(number, path)| os::Claim::restore(&mut received, number, &path));
    // The session can continue without it; another one of the same name could then be started.
    let claim = claim.and_then(Result::ok).map(Rc::new);
    let runtime = runtime()?;
    let code = runtime.block_on(own_again(arguments, &header, saved, received, claim.clone()));
    drop(runtime);
    offload::finish(FILES_MAX);
    drop(claim);
    code.map(ExitCode::from)
}

#[cfg(unix)]
fn read_session(state: &[u8]) -> Result<(Header, session_upgrade::Saved), Report> {
    format::read(format::Kind::Session, state).map_err(unreadable)
}

/// Whether this program could continue with the session, with these arguments.
#[cfg(unix)]
pub(crate) fn check_session(arguments: &cli::Run, state: &[u8]) -> Result<(), Report> {
    let (_, saved) = read_session(state)?;
    saved.children.check().map_err(|error| Report::new(report::FAILURE, error.to_string()))?;
    plan(arguments, report::cwd()?)?;
    let _ = Session::restore(Policy::session(), saved.session, Instant::now());
    saved.rest.check();
    Ok(())
}

#[cfg(unix)]
async fn own_again(
    arguments: &cli::Run,
    header: &Header,
    saved: session_upgrade::Saved,
    mut received: Received,
    claim: Option<Rc<os::Claim>>,
) -> Result<u8, Report> {
    // First of all, so that the user's terminal is given back if anything else fails.
    let viewers = Viewers::restore(saved.viewers, &arguments.detach_key, &mut received, Instant::now())
        .map_err(failed("cannot take over the terminal"))?;
    let stops = os::Stops::begin().map_err(failed("cannot listen for signals"))?;
    let plan = terminal::Plan { id: saved.id, ..plan(arguments, report::cwd()?)? };
    let (name, command) = names_of_session(&plan);
    let began_in = PathBuf::from(OsString::from_vec(saved.home.clone().bytes().to_vec()));
    let home = Home::open(&began_in, env::home_dir().as_deref());
    let journal = Journal::of_session(&home, &plan.id, &name);
    let children =
        Children::restore(saved.children, &mut received, plan.grace).map_err(failed("cannot take over the agent"))?;
    let instance = instance_of_session(&plan.id, name, command, &began_in, &home);
    let control = Control::restore(instance, env::home_dir().as_deref(), saved.control, &mut received)
        .map_err(failed("cannot take over the control socket"))?;
    let parts = Parts {
        session: Session::restore(Policy::session(), saved.session, Instant::now()),
        agent: Agent::new(&plan.program, &plan.args, plan.profile.clone()),
        plan,
        place: StartContext::restore(saved.place),
        records: env::home_dir().filter(|home| home.is_absolute()).map(|home| Records::of(&home)),
        // The agent was started already.
        first: Mode::Continue,
        was_in_turn: false,
        children,
        stops,
        // Restored with the other viewers.
        outer: None,
        stdout: None,
        keeps_screen: false,
        journal,
        control,
        claim,
        home: saved.home,
        announce: None,
    };
    let (terminal, requested) =
        Terminal::restore(parts, saved.rest, viewers).map_err(failed("cannot write to stdout"))?;
    terminal.go_on(header, requested, received).await
}

/// What is to be done without a person must be possible with this agent.
fn check_unattended(arguments: &cli::Run, plan: &terminal::Plan) -> Result<(), Report> {
    let agent = Agent::new(&plan.program, &plan.args, plan.profile.clone());
    if arguments.on_limit != cli::OnLimit::Tell && (arguments.no_screen || !agent.shows_limits()) {
        let sentence = format!("outlast cannot detect the usage limit of `{}`", plan.program);
        return Err(Report::new(report::USAGE, sentence)
            .because("`--on-limit` needs an agent whose screen shows the limit")
            .hint("it works for claude, codex and agents with `limit` in `[agent.NAME]`, without `--no-screen`"));
    }
    let Some(text) = &arguments.on_resume else { return Ok(()) };
    let wrong = |why: &dyn std::fmt::Display| {
        Report::new(report::USAGE, "the text of `--on-resume` cannot be sent").because(why)
    };
    if arguments.no_screen {
        return Err(wrong(&"a text is sent to an agent whose screen outlast sees").hint("remove `--no-screen`"));
    }
    send::check(text).map_err(|failed| wrong(&failed).hint("give it as one text, for example `--on-resume 'Go on.'`"))
}

/// A restored session has the agent and the directory of its record, because its conversation belongs to them.
fn check_restorable(plan: &terminal::Plan, place: &StartContext) -> Result<(), Report> {
    let failed = |why: String| {
        Report::new(report::FAILURE, format!("the session `{}` cannot continue its conversation", plan.id)).because(why)
    };
    let records = env::home_dir().filter(|home| home.is_absolute()).map(|home| Records::of(&home));
    let record = records.map_or(Ok(None), |records| records.read(&plan.id)).map_err(failed)?;
    let Some(record) = record else { return Err(failed("it has no record".to_owned())) };
    let kind = Agent::new(&plan.program, &plan.args, plan.profile.clone()).kind();
    if record.cwd != place.cwd.path {
        let why = format!("its directory was {}, and is now {}", record.cwd.display(), place.cwd.path.display());
        return Err(failed(why).hint("the document or the project changed: `outlast run` begins a new conversation"));
    }
    if record.agent != kind.word() {
        let why = format!("its agent was {}, and is now {}", record.agent, kind.word());
        return Err(failed(why).hint("the configuration changed: `outlast run` begins a new conversation"));
    }
    Ok(())
}

/// Whether the session was interrupted: outlast was killed, lost its terminal, or the machine was shut down. A session that
/// its user ended begins anew; so does one of another agent or in another directory.
fn goes_on(record: &SessionRecord, place: &StartContext, agent: &Agent) -> bool {
    let is_same_agent = record.agent == agent.kind().word();
    let is_here = record.cwd == place.cwd.path;
    let can_go_on = matches!(agent.kind(), Kind::Claude | Kind::Codex | Kind::Described | Kind::Other);
    record.state == State::Running && is_same_agent && is_here && can_go_on
}

fn plan(arguments: &cli::Run, here: PathBuf) -> Result<terminal::Plan, Report> {
    let mut words = Vec::new();
    for word in &arguments.command {
        let text = word.to_str().ok_or_else(|| {
            Report::new(report::USAGE, format!("`{}` in the agent's command is not UTF-8", word.to_string_lossy()))
        })?;
        words.push(text.to_owned());
    }
    let said = match &arguments.document {
        Some(document) => {
            frontmatter::read(&here.join(document))
                .map_err(|error| Report::of(&error, error.hint(), report::USAGE))?
                .session
        }
        None => None,
    };
    let id = match arguments.session.clone().or(said) {
        None => home::new_id(&name_of(&words)),
        Some(id) if home::is_id(&id) => id,
        Some(id) => {
            return Err(Report::new(report::USAGE, format!("`{id}` is not a valid session id")).hint(ID_HINT));
        }
    };
    let program = words.remove(0);
    let everything = (arguments.env == cli::Env::All).then(|| environment::ANYTHING.to_owned());
    Ok(terminal::Plan {
        id,
        program,
        args: words,
        profile: arguments.profile.clone(),
        document: arguments.document.clone(),
        cwd: arguments.cwd.clone(),
        env_pass: arguments.env_pass.iter().cloned().chain(everything).collect(),
        here,
        grace: Grace::default(),
        detach_key: arguments.detach_key.clone(),
        outlives_terminal: arguments.on_hangup == cli::OnHangup::Detach,
        notify: arguments.notify.iter().map(|text| Receiver::read(text)).collect(),
        hang_timeout: arguments.hang_timeout,
        on_limit: match arguments.on_limit {
            cli::OnLimit::Tell => OnLimit::Tell,
            cli::OnLimit::Wait => OnLimit::Wait,
            cli::OnLimit::Stop => OnLimit::Stop,
        },
        on_resume: arguments.on_resume.clone(),
        is_restored: arguments.restored,
        options: arguments.options.clone(),
    })
}

/// The name of a session is claimed as long as the result is kept. Without a home directory no process can claim names, and
/// there is nothing to hold.
fn claim(id: &str) -> Result<Option<os::Claim>, Report> {
    let Some(home) = env::home_dir().filter(|home| home.is_absolute()) else { return Ok(None) };
    let registry = Registry::of(&home);
    if os::claim_dir(registry.dir()).is_err() {
        return Ok(None);
    }
    let path = registry.claim_path(id);
    let deadline = Instant::now() + LEAVING_MAX;
    let mut claim = os::claim_name(&path);
    let is_running = || registry.read().iter().any(|entry| entry.id == id && !entry.is_stale());
    // A process that holds the name and is not in the registry is about to exit. One that removes the files of a killed
    // session holds the name of that session meanwhile.
    while matches!(claim, Ok(None)) && !is_running() && Instant::now() < deadline {
        std::thread::sleep(LOOK_AGAIN);
        claim = os::claim_name(&path);
    }
    match claim {
        Ok(Some(claim)) => Ok(Some(claim)),
        Err(_) => Ok(None),
        Ok(None) => {
            let pid = registry.read().into_iter().find(|entry| entry.id == id).map(|entry| entry.pid);
            let pid = pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
            Err(Report::new(report::FAILURE, format!("the session `{id}` is already running{pid}"))
                .hint(format!("`outlast state {id}` shows it, `outlast stop {id}` stops it")))
        }
    }
}

/// What a session that is started in the background reports of its start.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Announced {
    /// The id of the session, if its agent was started.
    #[serde(deserialize_with = "lenient")]
    id: Option<String>,
    #[serde(deserialize_with = "lenient")]
    error: Option<String>,
    /// The exit code for the error.
    #[serde(deserialize_with = "lenient")]
    code: Option<u8>,
}

fn announced(line: &str) -> Result<ExitCode, Report> {
    let announced: Announced = serde_json::from_str(line).unwrap_or_default();
    if let Some(id) = announced.id {
        return instances::print(&format!("{id}\n"));
    }
    let code = announced.code.filter(|code| *code > 0).unwrap_or(report::FAILURE);
    match announced.error {
        // It is already a complete report.
        Some(words) if words.starts_with("error: ") => {
            // Several lines, each of which was made by a report.
            eprintln!("{}", outlast_core::visible::text(words.trim_end()));
            Ok(ExitCode::from(code))
        }
        words => Err(Report::new(code, "the session ended before the agent was started")
            .because(words.as_deref().unwrap_or("it printed nothing"))),
    }
}

fn settings(arguments: &cli::Mcp, id: String, name: String) -> Settings {
    let mut limits = Limits::default();
    limits.holding.hold_max = arguments.hold;
    limits.draining.drain_max = arguments.drain;
    if let Some(timeout) = arguments.start_timeout {
        limits.handshake.first_handshake_max = timeout;
        limits.handshake.handshake_max = timeout;
    }
    Settings {
        id,
        name,
        tools: !arguments.no_tools,
        retry: match arguments.retry {
            cli::Retry::Never => relay::Retry::Never,
            cli::Retry::Annotated => relay::Retry::Annotated,
        },
        reload: match arguments.reload {
            cli::Reload::BlueGreen => relay::Reload::BlueGreen,
            cli::Reload::Replace => relay::Reload::Replace,
        },
        build: arguments.build.is_some(),
        on_clean_exit: match arguments.on_clean_exit {
            cli::OnCleanExit::End => relay::OnCleanExit::End,
            cli::OnCleanExit::Restart => relay::OnCleanExit::Restart,
        },
        answer_after: arguments.answer_after,
        cache: false,
        heartbeat: arguments.heartbeat,
        restart_tool: arguments.restart_tool.clone(),
        call_timeout: arguments.call_timeout,
        call_timeouts: arguments.call_timeouts.clone(),
        memory_max: arguments.memory_max,
        policy: policy(arguments),
        seed: home::random(),
        random: format!("{:08x}", home::random() >> 32),
        limits,
    }
}

fn policy(arguments: &cli::Mcp) -> Policy {
    let mut policy = match arguments.policy {
        cli::Policy::Watchdog => Policy::watchdog(),
        cli::Policy::Exponential => Policy::exponential(),
    };
    if let Some(max) = arguments.max_restarts {
        policy.restarts_max = (max > 0).then_some(max);
    }
    policy.first = match arguments.first_restart {
        cli::First::AtOnce => First::AtOnce,
        cli::First::Delay => First::Delay,
    };
    policy
}

/// The name of a server that is started like this: the script or module rather than its interpreter.
fn name_of(words: &[String]) -> String {
    const RUNNERS: [&str; 12] =
        ["python", "python3", "node", "npx", "uv", "uvx", "deno", "bun", "sh", "bash", "env", "cargo"];
    let stem = |word: &str| {
        Path::new(word).file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_else(|| word.to_owned())
    };
    let mut rest = words.iter().filter(|word| !word.starts_with('-') && !word.contains('='));
    let first = rest.next().map(|word| stem(word)).unwrap_or_else(|| "server".to_owned());
    let is_runner = RUNNERS.contains(&first.as_str()) || first.starts_with("python");
    // The argument of `sh -c` is a script, not a name.
    let is_name = |word: &&String| *word != "run" && !word.contains(char::is_whitespace);
    let name = if is_runner { rest.find(is_name).map(|word| stem(word)) } else { None };
    name.unwrap_or(first)
}

/// A command for logs and listings, without arguments that look like secrets.
pub(crate) fn without_secrets(words: &[String]) -> Vec<String> {
    outlast_core::redact::command(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_named_after_its_script() {
        let table = [
            ("python -m my_server", "my_server"),
            ("/usr/bin/python3.11 -u /srv/weather.py --port 1", "weather"),
            ("npx -y @modelcontextprotocol/server-everything", "server-everything"),
            ("uv run server.py", "server"),
            ("/opt/bin/github-mcp stdio", "github-mcp"),
            ("env A=1 node index.js", "node"),
            ("python", "python"),
        ];
        for (command, name) in table {
            assert_eq!(name_of(&words(command)), name, "{command}");
        }
        assert_eq!(name_of(&["bash", "-c", "cd app && python server.py"].map(str::to_owned)), "bash");
    }

    fn words(command: &str) -> Vec<String> {
        command.split(' ').map(str::to_owned).collect()
    }
}
