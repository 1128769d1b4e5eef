//! Each command, from its checked arguments to its exit code.

use std::{
    env, io,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use outlast_core::{
    agent::{Agent, Kind},
    life::Grace,
    relay::{self, Limits, Relay, Settings},
    restarts::{First, Policy},
    session::{Mode, Session},
};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::{
    cli,
    control::{Control, Instance, registry::Registry},
    environment, frontmatter,
    home::{self, Home},
    inherit, instances,
    journal::Journal,
    marker::Markers,
    mcp::{Driver, Plan},
    offload,
    os::{self, Keeper, Outer},
    report::{self, Report, shell_quote},
    session_record::{Records, SessionRecord, State},
    start_cache::StartCache,
    terminal::{self, Parts, Place, Terminal},
    watch::Watch,
};

/// At the end of the program: how long files that are being written may take.
pub const FILES_MAX: Duration = Duration::from_millis(100);
/// How long a session of the same name may take to be gone after its last word.
const LEAVING_MAX: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// What a session can be called.
const ID_HINT: &str = if cfg!(windows) {
    "up to 40 of a-z, 0-9, - and _, beginning and ending with no -, and no device as `con` or `com1`"
} else {
    "up to 40 of a-z, 0-9, - and _, beginning and ending with no -"
};

pub fn mcp(arguments: cli::Mcp) -> Result<ExitCode, Report> {
    let cwd = env::current_dir()
        .map_err(|error| Report::new(report::FAILURE, "the working directory is gone").because(error))?;
    let (keeper, runtime) = settle_in()?;
    let code = runtime.block_on(serve(arguments, keeper, &cwd))?;
    drop(runtime);
    offload::finish(FILES_MAX);
    Ok(ExitCode::from(code))
}

/// The keeper first, before any thread, as it is a fork of this process; then the loop's runtime.
pub fn settle_in() -> Result<(Keeper, Runtime), Report> {
    let keeper = Keeper::begin().map_err(|error| {
        Report::new(report::FAILURE, "cannot start the process that keeps the children").because(error)
    })?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .map_err(|error| Report::new(report::FAILURE, "cannot start").because(error))?;
    Ok((keeper, runtime))
}

async fn serve(arguments: cli::Mcp, keeper: Keeper, cwd: &Path) -> Result<u8, Report> {
    let failed = |what: &'static str| move |error: io::Error| Report::new(report::FAILURE, what).because(error);
    let stops = os::Stops::begin().map_err(failed("cannot listen for signals"))?;
    let household = keeper.attach().map_err(failed("cannot reach the process that keeps the children"))?;
    let watch = match arguments.watch.as_slice() {
        [] => None,
        paths => Some(Watch::begin(paths, cwd).map_err(|error| Report::of(&error, error.hint(), report::USAGE))?),
    };

    let words: Vec<String> = arguments.command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let name = arguments.name.clone().unwrap_or_else(|| name_of(&words));
    let id = home::new_id(&name);
    let home = Home::open(cwd, env::home_dir().as_deref());
    let mut journal = Journal::new(&home, &id, &name);
    let command_line = shell_quote(without_secrets(&words).iter().map(String::as_str));
    journal.begin(&command_line, cwd);
    arguments.warnings.iter().for_each(|warning| journal.note(warning));

    let grace = Grace { after_stdin: arguments.stdin_grace, after_term: arguments.term_grace, ..Grace::default() };
    let mut command = arguments.command.iter().cloned();
    let plan = Plan {
        program: command.next().expect("clap wants at least one word"),
        args: command.collect(),
        cwd: cwd.to_owned(),
        build: arguments.build.clone(),
        grace,
        id: id.clone(),
        sandbox: arguments.sandbox.clone(),
        watches_memory: arguments.memory_max.is_some(),
        cache: env::home_dir()
            .filter(|home| home.is_absolute() && !arguments.inherit)
            .map(|home| StartCache::of(&home, arguments.command.iter().map(|word| word.as_os_str()), cwd)),
    };
    let instance = Instance {
        id: id.clone(),
        kind: "mcp",
        name: name.clone(),
        cwd: cwd.to_owned(),
        command: command_line,
        log: home.log(&id),
        audit: home.audit(),
    };
    let (control, complaint) = Control::begin(instance, env::home_dir().as_deref());
    if let Some(complaint) = complaint {
        journal.note(&complaint);
    }
    if arguments.inherit {
        return Ok(inherit::run(plan, policy(&arguments), household, stops, journal, control).await);
    }
    let stdin = os::stdin().map_err(failed("cannot read stdin"))?;
    let stdout = os::stdout().map_err(failed("cannot write to stdout"))?;
    let hangups = os::Hangups::begin().map_err(failed("cannot watch stdin and stdout"))?;
    let markers = Markers::new(&home, &id, arguments.marker.clone());
    let mut settings = settings(&arguments, id, name);
    settings.cache = plan.cache.is_some();
    let relay = Relay::new(settings);
    Ok(Driver::new(plan, relay, household, stops, stdin, stdout, hangups, journal, markers, watch, control).run().await)
}

pub fn run(arguments: cli::Run) -> Result<ExitCode, Report> {
    let here = env::current_dir()
        .map_err(|error| Report::new(report::FAILURE, "the working directory is gone").because(error))?;
    let plan = plan(&arguments, here)?;
    // What is wrong is said before there is anything to clean up.
    let place = plan.place()?;
    if arguments.hang_timeout.is_some()
        && (arguments.no_screen || !Agent::new(&plan.program, &plan.args, plan.profile.clone()).is_readable())
    {
        return Err(Report::new(report::USAGE, format!("a hang of `{}` cannot be seen", plan.program))
            .because("`--hang-timeout` needs an agent whose screen says that it is busy")
            .hint("it works for claude and codex, without `--no-screen`"));
    }
    arguments.warnings.iter().for_each(|warning| os::say(&format!("[outlast] {warning}")));
    if let Some(words) = environment::left_out_in_words(&plan.program, &place.left_out) {
        os::say(&format!("[outlast] {words}"));
    }
    // Before the shell stands one who only waits for us, so that we can leave it.
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
        (Ok(claim), _) => claim,
        (Err(report), false) => return Err(report),
        (Err(report), true) => {
            // Nobody sees what we say, but somebody waits for it.
            let said = json!({"error": report.to_string(), "code": report.code}).to_string();
            announce.into_iter().for_each(|announce| announce.say(&said));
            return Ok(ExitCode::from(report.code));
        }
    };
    let (keeper, runtime) = settle_in()?;
    let code = runtime.block_on(own(plan, place, keeper, announce, stand_in, !arguments.no_screen));
    drop(runtime);
    offload::finish(FILES_MAX);
    drop(claim);
    code.map(ExitCode::from)
}

async fn own(
    plan: terminal::Plan,
    place: Place,
    keeper: Keeper,
    announce: Option<os::Announce>,
    stand_in: Option<os::StandIn>,
    keeps_screen: bool,
) -> Result<u8, Report> {
    let failed = |what: &'static str| move |error: io::Error| Report::new(report::FAILURE, what).because(error);
    let stops = os::Stops::begin().map_err(failed("cannot listen for signals"))?;
    let household = keeper.attach().map_err(failed("cannot reach the process that keeps the children"))?;
    let words: Vec<&str> = [plan.program.as_str()].into_iter().chain(plan.args.iter().map(String::as_str)).collect();
    let command = shell_quote(words.iter().copied());
    let name = name_of(&words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>());
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
    let instance = Instance {
        id: plan.id.clone(),
        kind: "session",
        name,
        cwd: place.cwd.path.clone(),
        command,
        log: home.log(&plan.id),
        audit: home.audit(),
    };
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
    let session = Session::new(Policy::session(), home::random(), outer.is_some());
    let mut agent = Agent::new(&plan.program, &plan.args, plan.profile.clone());
    let records = env::home_dir().filter(|home| home.is_absolute()).map(|home| Records::of(&home));
    let first = match earlier(records.as_ref(), &plan, &place, &agent) {
        None => Mode::Fresh,
        Some(record) => {
            let id = record.conversation.clone().unwrap_or_default();
            journal.event("session_continued", &[("conversation", &id)]);
            let is_same = [&plan.program].into_iter().chain(&plan.args).eq(&record.command);
            agent.go_on(record.conversation, is_same);
            Mode::Continue
        }
    };
    if let Some(records) = &records {
        records.prune();
    }
    let parts = Parts {
        plan,
        place,
        session,
        agent,
        records,
        first,
        household,
        stops,
        outer,
        stdout,
        keeps_screen,
        journal,
        control,
        announce,
    };
    Terminal::new(parts).run().await
}

/// The record of the same session, if it was interrupted: outlast was killed, lost its terminal, or the machine went down.
/// A session that its user ended begins anew; so does one of another agent or in another directory.
fn earlier(records: Option<&Records>, plan: &terminal::Plan, place: &Place, agent: &Agent) -> Option<SessionRecord> {
    let record = records?.read(&plan.id)?;
    let is_same_agent = record.agent == agent.kind().word();
    let is_here = record.cwd == place.cwd.path;
    let goes_on = matches!(agent.kind(), Kind::Claude | Kind::Codex | Kind::Described | Kind::Other);
    (record.state == State::Running && is_same_agent && is_here && goes_on).then_some(record)
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
            return Err(Report::new(report::USAGE, format!("a session cannot be called `{id}`")).hint(ID_HINT));
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
        notify: arguments.notify.clone(),
        hang_timeout: arguments.hang_timeout,
    })
}

/// The name is ours as long as this is kept. Where there is no place to write it down, nobody else can either.
fn claim(id: &str) -> Result<Option<os::Claim>, Report> {
    let Some(home) = env::home_dir().filter(|home| home.is_absolute()) else { return Ok(None) };
    let registry = Registry::of(&home);
    if os::claim_dir(registry.dir()).is_err() {
        return Ok(None);
    }
    let path = registry.dir().join(format!("{id}.lock"));
    let deadline = Instant::now() + LEAVING_MAX;
    let mut claim = os::claim_name(&path);
    // One who has it and cannot be found any more is about to let go of it.
    while matches!(claim, Ok(None)) && !registry.has(id) && Instant::now() < deadline {
        std::thread::sleep(LOOK_AGAIN);
        claim = os::claim_name(&path);
    }
    match claim {
        Ok(Some(claim)) => Ok(Some(claim)),
        Err(_) => Ok(None),
        Ok(None) => {
            let pid = registry.read().into_iter().find(|entry| entry.id == id).map(|entry| entry.pid);
            let pid = pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
            Err(Report::new(report::FAILURE, format!("the session `{id}` runs already{pid}"))
                .hint(format!("`outlast state {id}` says how it is, and `outlast stop {id}` ends it")))
        }
    }
}

/// What the one in the background said of its start.
fn announced(said: &str) -> Result<ExitCode, Report> {
    let said: Value = serde_json::from_str(said).unwrap_or_default();
    if let Some(id) = said["id"].as_str() {
        return instances::print(&format!("{id}\n"));
    }
    let code = said["code"].as_u64().and_then(|code| u8::try_from(code).ok()).filter(|code| *code > 0);
    match said["error"].as_str() {
        // It is a report already, as it would stand here.
        Some(words) if words.starts_with("error: ") => {
            // Several lines, each of which was made by a report.
            eprintln!("{}", outlast_core::visible::text(words.trim_end()));
            Ok(ExitCode::from(code.unwrap_or(report::FAILURE)))
        }
        words => Err(Report::new(code.unwrap_or(report::FAILURE), "the session ended before it began")
            .because(words.unwrap_or("it said nothing"))),
    }
}

fn settings(arguments: &cli::Mcp, id: String, name: String) -> Settings {
    let mut limits = Limits { hold_max: arguments.hold, drain_max: arguments.drain, ..Limits::default() };
    if let Some(timeout) = arguments.start_timeout {
        limits.first_handshake_max = timeout;
        limits.handshake_max = timeout;
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

/// What people would call a server that is started like this: the script or module rather than its interpreter.
fn name_of(words: &[String]) -> String {
    const RUNNERS: [&str; 12] =
        ["python", "python3", "node", "npx", "uv", "uvx", "deno", "bun", "sh", "bash", "env", "cargo"];
    let stem = |word: &str| {
        Path::new(word).file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_else(|| word.to_owned())
    };
    let mut rest = words.iter().filter(|word| !word.starts_with('-') && !word.contains('='));
    let first = rest.next().map(|word| stem(word)).unwrap_or_else(|| "server".to_owned());
    let is_runner = RUNNERS.contains(&first.as_str()) || first.starts_with("python");
    // What stands after `sh -c` is no name.
    let is_name = |word: &&String| *word != "run" && !word.contains(char::is_whitespace);
    let name = if is_runner { rest.find(is_name).map(|word| stem(word)) } else { None };
    name.unwrap_or(first)
}

/// A command for logs and listings: what looks like a secret in it is left out.
pub fn without_secrets(words: &[String]) -> Vec<String> {
    outlast_core::redact::command(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_called_by_its_script() {
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
