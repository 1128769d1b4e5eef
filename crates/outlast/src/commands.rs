//! Each command, from its checked arguments to its exit code.

use std::{env, io, path::Path, process::ExitCode, time::Duration};

use outlast_core::{
    life::Grace,
    relay::{self, Limits, Relay, Settings},
    restarts::{First, Policy},
};

use crate::{
    cli,
    control::{Control, Instance},
    home::{self, Home},
    inherit,
    journal::Journal,
    marker::Markers,
    mcp::{Driver, Plan},
    os::{self, Keeper},
    report::{self, Report, shell_quote},
    watch::Watch,
};

/// A thread that wrote a file is let go after this, and its memory with it.
const THREAD_KEPT: Duration = Duration::from_millis(200);
const THREADS_MAX: usize = 2;

pub fn mcp(arguments: cli::Mcp) -> Result<ExitCode, Report> {
    let cwd = env::current_dir()
        .map_err(|error| Report::new(report::FAILURE, "the working directory is gone").because(error))?;
    // Before any thread: the keeper is a fork of this process.
    let keeper = Keeper::begin().map_err(|error| {
        Report::new(report::FAILURE, "cannot start the process that keeps the children").because(error)
    })?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(THREADS_MAX)
        .thread_keep_alive(THREAD_KEPT)
        .build()
        .map_err(|error| Report::new(report::FAILURE, "cannot start").because(error))?;
    let code = runtime.block_on(serve(arguments, keeper, &cwd))?;
    runtime.shutdown_timeout(Duration::from_millis(100));
    Ok(ExitCode::from(code))
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

    let grace = Grace { after_stdin: arguments.stdin_grace, after_term: arguments.term_grace, ..Grace::default() };
    let mut command = arguments.command.iter().cloned();
    let plan = Plan {
        program: command.next().expect("clap wants at least one word"),
        args: command.collect(),
        cwd: cwd.to_owned(),
        build: arguments.build.clone(),
        grace,
        id: id.clone(),
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
    let relay = Relay::new(settings(&arguments, id, name));
    Ok(Driver::new(plan, relay, household, stops, stdin, stdout, hangups, journal, markers, watch, control).run().await)
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
fn without_secrets(words: &[String]) -> Vec<String> {
    const TELLING: [&str; 9] =
        ["key", "token", "secret", "password", "passwd", "credential", "auth", "bearer", "cookie"];
    const HIDDEN: &str = "…";
    let tells = |name: &str| {
        let name = name.to_ascii_lowercase();
        TELLING.iter().any(|telling| name.contains(telling))
    };
    let mut shown = Vec::with_capacity(words.len());
    let mut is_value = false;
    for word in words {
        let is_option = word.starts_with('-');
        let is_pair = word.split_once(['=', ':']).filter(|(name, _)| tells(name));
        shown.push(if let Some((name, _)) = is_pair {
            format!("{}{HIDDEN}", &word[..=name.len()])
        } else if is_value && !is_option {
            HIDDEN.to_owned()
        } else if let Some((scheme, rest)) = word.split_once("://")
            && let Some((_, place)) = rest.split_once('@')
        {
            format!("{scheme}://{HIDDEN}@{place}")
        } else {
            word.clone()
        });
        is_value = is_option && is_pair.is_none() && tells(word);
    }
    shown
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

    #[test]
    fn secrets_are_not_shown() {
        let table = [
            ("server --port 1 -v", "server --port 1 -v"),
            ("server --api-key sk-1 --port 1", "server --api-key … --port 1"),
            ("server --api-key=sk-1 --port=1", "server --api-key=… --port=1"),
            ("server --no-auth --port 1", "server --no-auth --port 1"),
            ("env GITHUB_TOKEN=ghp_1 A=1 server", "env GITHUB_TOKEN=… A=1 server"),
            (
                "mcp-remote https://x.y/mcp --header Authorization:Bearer_1",
                "mcp-remote https://x.y/mcp --header Authorization:…",
            ),
            ("pg postgres://me:pw@host/db", "pg postgres://…@host/db"),
        ];
        for (command, shown) in table {
            assert_eq!(without_secrets(&words(command)).join(" "), shown);
        }
    }

    fn words(command: &str) -> Vec<String> {
        command.split(' ').map(str::to_owned).collect()
    }
}
