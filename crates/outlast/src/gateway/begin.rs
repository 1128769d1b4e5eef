//! `outlast gateway`, from its checked arguments to its exit code. What is wrong is said before anything is started.

use std::{
    env, io,
    io::IsTerminal,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    process::ExitCode,
};

use outlast_core::{gateway::Gateway, life::Grace};
use tokio::task::{LocalSet, spawn_local};

use super::{
    Driver, Parts, Plan, STDIO_CLIENT,
    auth::Auth,
    listen::{self, Limits, Listen},
    mirrors::MirrorsByBackend,
    reload::{Reload, Source},
    schemas::Schemas,
    shelf::Shelf,
    stdio::StdioFront,
};
use crate::{
    cli::{self, GatewayCommand},
    commands::{FILES_MAX, settle_in},
    config::{self, gateway::Gateway as Config},
    control::{Control, Instance},
    home::{self, Home},
    journal::Journal,
    offload,
    os::{self, Keeper},
    report::{self, Report, shell_quote},
};

/// Where it listens if it is started at a terminal, and nobody said where.
const ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 7332);

pub fn gateway(arguments: &cli::Gateway) -> Result<ExitCode, Report> {
    match &arguments.besides {
        Some(GatewayCommand::Check(arguments)) => return config::commands::check(arguments),
        Some(GatewayCommand::HashKey(arguments)) => return config::commands::hash_key(arguments),
        None => {}
    }
    let cwd = env::current_dir()
        .map_err(|error| Report::new(report::FAILURE, "the working directory is gone").because(error))?;
    let source = Source { files: arguments.config.clone(), cwd };
    let config = source.read()?;
    if config.watched.is_empty() {
        return Err(Report::new(report::USAGE, "there is no configuration here, and so no backend")
            .hint("write an outlast.toml, or name what a client has already: outlast gateway --config .mcp.json"));
    }
    let (keeper, runtime) = settle_in()?;
    let code = LocalSet::new().block_on(&runtime, serve(arguments, source, config, keeper))?;
    drop(runtime);
    offload::finish(FILES_MAX);
    Ok(ExitCode::from(code))
}

async fn serve(arguments: &cli::Gateway, source: Source, config: Config, keeper: Keeper) -> Result<u8, Report> {
    let failed = |what: &'static str| move |error: io::Error| Report::new(report::FAILURE, what).because(error);
    let stops = os::Stops::begin().map_err(failed("cannot listen for signals"))?;
    let household = keeper.attach().map_err(failed("cannot reach the process that keeps the children"))?;
    let Fronts { stdio, listen } =
        Fronts::choose(arguments.stdio, arguments.listen, config.front.listen, io::stdin().is_terminal());
    let listen = listen.map(|address| bind(address, &config)).transpose()?;
    let stdio = stdio.then(|| StdioFront::begin(STDIO_CLIENT)).transpose();
    let stdio = stdio.map_err(failed("cannot use stdin and stdout"))?;

    let cwd = source.cwd.clone();
    let directory = || cwd.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = arguments.name.clone().or_else(|| config.name.clone()).or_else(directory);
    let name = name.unwrap_or_else(|| "gateway".to_owned());
    let id = home::new_id(&name);
    let home = Home::open(&cwd, env::home_dir().as_deref());
    let mut journal = Journal::of_gateway(&home, &id, &name);
    let words: Vec<String> = env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    let command = shell_quote(["outlast"].into_iter().chain(words.iter().skip(1).map(String::as_str)));
    journal.learn(config.settings.backends.iter().flat_map(|backend| backend.kind.texts()));
    journal.begin(&command, &cwd);
    config.notes.iter().for_each(|note| journal.note(note));
    let instance = Instance {
        id: id.clone(),
        kind: "gateway",
        name,
        cwd: cwd.clone(),
        command,
        log: home.log(&id),
        audit: home.audit(),
    };
    let (control, complaint) = Control::begin(instance, env::home_dir().as_deref());
    complaint.into_iter().for_each(|complaint| journal.note(&complaint));
    let (reload, complaint) = Reload::new(source, &config, arguments.listen, !arguments.no_watch);
    complaint.into_iter().for_each(|complaint| journal.note(&complaint));
    // Who hears this can already ask us anything.
    if let Some(listen) = &listen {
        announce(listen).iter().for_each(|note| journal.note(note));
    }

    let grace = Grace { after_stdin: arguments.stdin_grace, after_term: arguments.term_grace, ..Grace::default() };
    let plan = Plan { id, cwd, grace };
    // Another gateway in this directory, with other files, keeps its own.
    let identity = arguments.name.clone().unwrap_or_else(|| identity(&arguments.config));
    let (shelf, kept, complaint) = Shelf::open(&home, &identity, &config.settings.backends);
    complaint.into_iter().for_each(|complaint| journal.note(&complaint));
    let mirrors = MirrorsByBackend::of(&kept, &config.settings.backends);
    let gateway = Gateway::new(config.settings, home::random(), kept, Box::new(Schemas::new()));
    let parts = Parts { plan, gateway, household, stops, stdio, listen, reload, shelf, mirrors, journal, control };
    // A task among those of its connections: its turn comes with theirs, and nobody looks at the kernel in between.
    let driver = spawn_local(Driver::new(parts).run());
    driver.await.map_err(|error| Report::new(report::FAILURE, "the gateway broke").because(error))
}

/// What tells gateways of one directory apart: the files they are configured by.
pub fn identity(files: &[PathBuf]) -> String {
    let names: Vec<String> = files.iter().map(|file| file.to_string_lossy().into_owned()).collect();
    if names.is_empty() { config::NAME.to_owned() } else { names.join(" ") }
}

/// By which doors clients come in.
#[derive(Debug, PartialEq, Eq)]
struct Fronts {
    stdio: bool,
    listen: Option<SocketAddr>,
}

impl Fronts {
    /// What was asked for; otherwise what is configured; otherwise whatever is on the other end of stdin.
    fn choose(stdio: bool, listen: Option<SocketAddr>, configured: Option<SocketAddr>, is_terminal: bool) -> Fronts {
        if stdio || listen.is_some() {
            return Fronts { stdio, listen };
        }
        match configured {
            Some(address) => Fronts { stdio: false, listen: Some(address) },
            None if is_terminal => Fronts { stdio: false, listen: Some(ADDRESS) },
            None => Fronts { stdio: true, listen: None },
        }
    }
}

fn bind(address: SocketAddr, config: &Config) -> Result<Listen, Report> {
    Listen::bind(options(address, config)?).map_err(|error| cannot_listen(&error))
}

pub(super) fn options(address: SocketAddr, config: &Config) -> Result<listen::Options, Report> {
    let front = &config.front;
    Ok(listen::Options {
        address,
        hosts: front.hosts.clone(),
        origins: front.origins.clone(),
        auth: auth(config)?,
        tls: front.tls.clone(),
        profiles: config.settings.profiles.keys().cloned().collect(),
        limits: Limits {
            body_max: front.body_max,
            connections_max: front.connections_max,
            sessions_max: front.sessions_max,
            sessions_of_client_max: front.sessions_per_client,
            session_ttl: front.session_idle,
            ..Limits::default()
        },
    })
}

/// Where clients and browsers find the gateway, and what is dangerous about it.
pub(super) fn announce(listen: &Listen) -> Vec<String> {
    let mut notes =
        vec![format!("listening on {}/mcp", listen.url()), format!("status page: {}", listen.status_page())];
    if listen.is_readable() {
        notes.push(format!(
            "warning: {} can be reached from other machines without TLS, so tokens and results can be read on the way; \
             set `tls = {{ cert = \"…\", key = \"…\" }}` in `[gateway]`, or put a proxy with TLS in front of it",
            listen.address()
        ));
    }
    notes
}

pub(super) fn cannot_listen(error: &listen::ListenError) -> Report {
    let code = match error {
        listen::ListenError::Unguarded { .. } => report::USAGE,
        listen::ListenError::Os { .. } => report::FAILURE,
    };
    Report::of(error, error.hint(), code)
}

/// How clients prove who they are.
fn auth(config: &Config) -> Result<Option<listen::Auth>, Report> {
    let Some(settings) = config.auth.clone() else { return Ok(None) };
    let auth = Auth::load(settings)
        .map_err(|why| Report::new(report::USAGE, "nobody could prove who he is").because(why).hint("mend `[auth]`"))?;
    Ok(Some(Box::new(move |headers| {
        auth.identify(headers)
            .map_err(|error| listen::Unauthorized { challenge: error.challenge(), why: error.words().to_owned() })
    })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_come_in_where_it_was_said_or_where_they_are() {
        let [asked, configured] = ["127.0.0.1:1", "127.0.0.1:2"].map(|text| text.parse().ok());
        #[rustfmt::skip]
        let table = [
            // --stdio  --listen  configured  terminal  stdio  listen
            (true,      None,     configured, true,     true,  None),
            (false,     asked,    configured, false,    false, asked),
            (true,      asked,    None,       false,    true,  asked),
            (false,     None,     configured, false,    false, configured),
            (false,     None,     None,       true,     false, Some(ADDRESS)),
            (false,     None,     None,       false,    true,  None),
        ];
        for (stdio, listen, configured, is_terminal, serves_stdio, listens) in table {
            let fronts = Fronts::choose(stdio, listen, configured, is_terminal);
            assert_eq!(fronts, Fronts { stdio: serves_stdio, listen: listens });
        }
    }
}
