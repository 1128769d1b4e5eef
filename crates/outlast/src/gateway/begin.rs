//! `outlast gateway`, from its checked arguments to its exit code. Errors are reported before anything is started.

#[cfg(unix)]
use std::time::Instant;
use std::{
    env, io,
    io::IsTerminal,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::ExitCode,
};

use outlast_control::{Control, Instance};
#[cfg(unix)]
use outlast_core::gateway::{Backend, Link};
use outlast_core::{gateway::Gateway, life::Grace};
#[cfg(unix)]
use outlast_os::handover::Received;
use outlast_os::{self as os, Keeper, offload};
use tokio::task::spawn_local;

#[cfg(unix)]
use super::upgrade;
use super::{
    Driver, Parts, Plan,
    auth::Auth,
    catalogue_cache::CatalogueCache,
    listen::{self, Limits, Listen},
    mirrored::MirrorsByBackend,
    reload::{Reload, Source},
    schemas::Schemas,
    session_store::{self, SessionDirectory},
};
use crate::{
    child::{Children, own_streams::OwnStreams},
    cli::{
        self, GatewayCommand,
        commands::{FILES_MAX, settle_in},
        report::{self, Report, shell_quote},
    },
    cluster::{self, replica::Replica},
    config::{self, gateway::Gateway as Config},
    state::{
        home::{self, Home},
        journal::Journal,
    },
};
#[cfg(unix)]
use crate::{
    cli::commands::runtime,
    upgrade::format::{self, Header},
};

/// The default address if the gateway is started at a terminal without an address.
const ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 7332);

pub(crate) fn gateway(arguments: &cli::Gateway) -> Result<ExitCode, Report> {
    match &arguments.besides {
        Some(GatewayCommand::Check(arguments)) => return config::commands::check(arguments),
        Some(GatewayCommand::HashKey(arguments)) => return config::commands::hash_key(arguments),
        None => {}
    }
    let cwd = report::cwd()?;
    let source = Source { files: arguments.config.clone(), cwd };
    let config = source.read()?;
    if config.watched.is_empty() {
        return Err(Report::new(report::USAGE, "there is no configuration in this directory or above")
            .hint("write an outlast.toml, or use a client's file: outlast gateway --config .mcp.json"));
    }
    let (keeper, runtime) = settle_in()?;
    runtime.block_on(serve(arguments, source, config, keeper))?;
    drop(runtime);
    offload::finish(FILES_MAX);
    Ok(ExitCode::SUCCESS)
}

async fn serve(arguments: &cli::Gateway, source: Source, config: Config, keeper: Keeper) -> Result<(), Report> {
    let failed = |what: &'static str| move |error: io::Error| Report::new(report::FAILURE, what).because(error);
    let alone = match &config.cluster {
        Some(settings) => cluster::before_start(settings, home::random()).await?,
        None => None,
    };
    let stops = os::Stops::begin().map_err(failed("cannot listen for signals"))?;
    let processes = keeper.attach().map_err(failed("cannot reach the keeper process"))?;
    let children = Children::new(processes);
    let Fronts { stdio, listen } =
        Fronts::choose(arguments.stdio, arguments.listen, config.front.listen, io::stdin().is_terminal());
    let mut listen = listen.map(|address| bind(address, &config)).transpose()?;
    let stdio = stdio.then(OwnStreams::begin).transpose();
    let stdio = stdio.map_err(failed("cannot use stdin and stdout"))?;

    let cwd = source.cwd.clone();
    let directory = || cwd.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = arguments.name.clone().or_else(|| config.name.clone()).or_else(directory);
    let name = name.unwrap_or_else(|| "gateway".to_owned());
    let id = home::new_id(&name);
    let home = Home::open(&cwd, env::home_dir().as_deref());
    let mut journal = Journal::of_gateway(&home, &id, &name);
    journal.learn(config.settings.backends.iter().flat_map(|backend| backend.kind.texts()));
    if let Some(settings) = &config.cluster {
        journal.number_records(&settings.replica);
    }
    journal.begin(&command_line(), &cwd);
    config.notes.iter().chain(&alone).for_each(|note| journal.note(note));
    let instance = instance(&id, name.clone(), &cwd, &home);
    let (control, warning) = Control::begin(instance, env::home_dir().as_deref());
    warning.into_iter().for_each(|warning| journal.note(&warning));
    let (reload, warning) = Reload::new(source, &config, arguments.listen, !arguments.no_watch);
    warning.into_iter().for_each(|warning| journal.note(&warning));
    // The control socket is open, so the reader of these lines can use it already.
    if let Some(listen) = &listen {
        announce(listen).iter().for_each(|note| journal.note(note));
    }

    let grace = Grace { after_stdin: arguments.stdin_grace, after_term: arguments.term_grace, ..Grace::default() };
    let caches = Home::of_user(&cwd, env::home_dir().as_deref());
    let plan = Plan {
        id,
        #[cfg(unix)]
        name,
        cwd,
        grace,
        state: home.dir().map(Path::to_owned),
    };
    // Another gateway in this directory, with other files, has a cache of its own.
    let identity = arguments.name.clone().unwrap_or_else(|| identity(&arguments.config));
    let (catalogue_cache, kept, warning) = CatalogueCache::open(&caches, &identity, &config.settings.backends);
    warning.into_iter().for_each(|warning| journal.note(&warning));
    let cluster = config.cluster.clone().map(|settings| {
        let address = listen.as_ref().map(|listen| format!("{}/mcp", listen.url()));
        let log = home.audit().zip(journal.last_number());
        Replica::begin(settings, address, log)
    });
    match (&cluster, &mut listen) {
        (Some(replica), Some(listen)) => listen.join(replica.clone()),
        _ => keep_sessions(&mut listen, &home, &identity),
    }
    let mirrors = MirrorsByBackend::of(&kept, &config.settings.backends);
    let gateway = Gateway::new(config.settings, home::random(), kept, Box::new(Schemas::new()));
    let parts = Parts {
        plan,
        gateway,
        children,
        stops,
        stdio,
        listen,
        reload,
        catalogue_cache,
        mirrors,
        journal,
        control,
        cluster,
    };
    // The loop is a task like its connections, so that all of them run before the reactor is polled again.
    let driver = spawn_local(Driver::new(parts).run());
    let ended = driver.await.map_err(|error| Report::new(report::FAILURE, "the gateway failed").because(error))?;
    ended.map_err(|why| {
        Report::new(report::FAILURE, "the gateway cannot be part of its cluster")
            .because(why)
            .hint("give each replica a name of its own: `replica` in `[cluster]`")
    })
}

/// Continues with the gateway of the last program of this process.
#[cfg(unix)]
pub(crate) fn gateway_again(arguments: &cli::Gateway, mut received: Received) -> Result<ExitCode, Report> {
    let failed = |error: io::Error| Report::new(report::FAILURE, "cannot read the state").because(error);
    let (header, saved) = read_state(&received.state().map_err(failed)?)?;
    let source = Source { files: arguments.config.clone(), cwd: report::cwd()? };
    let config = Config::read_again(&source.files, &source.cwd, &saved.config)?;
    let runtime = runtime()?;
    runtime.block_on(serve_again(arguments, source, config, header, saved, received))?;
    drop(runtime);
    offload::finish(FILES_MAX);
    Ok(ExitCode::SUCCESS)
}

#[cfg(unix)]
fn read_state(state: &[u8]) -> Result<(Header, upgrade::Saved), Report> {
    format::read(format::Kind::Gateway, state).map_err(|error| Report::of(&error, None, report::FAILURE))
}

/// Whether this program could continue with the gateway, with these arguments.
#[cfg(unix)]
pub(crate) fn check_gateway(arguments: &cli::Gateway, state: &[u8]) -> Result<(), Report> {
    let (_, saved) = read_state(state)?;
    saved.children.check().map_err(|error| Report::new(report::FAILURE, error.to_string()))?;
    let config = Config::read_again(&arguments.config, &report::cwd()?, &saved.config)?;
    if let Some(listen) = saved.listen {
        let options = options(listen.asked, &config)?;
        Listen::check(&options.limits, listen);
    }
    let schemas = Box::new(Schemas::new());
    let _ = Gateway::restore(config.settings, saved.gateway, schemas, |_| true, Instant::now());
    Ok(())
}

#[cfg(unix)]
async fn serve_again(
    arguments: &cli::Gateway,
    source: Source,
    config: Config,
    header: Header,
    saved: upgrade::Saved,
    mut received: Received,
) -> Result<(), Report> {
    let failed = |what: &'static str| move |error: io::Error| Report::new(report::FAILURE, what).because(error);
    let stops = os::Stops::begin().map_err(failed("cannot listen for signals"))?;
    let (cwd, links) = (source.cwd.clone(), saved.links());
    let upgrade::Saved { id, name, gateway, children, control, listen: saved_listen, stdio, rest, .. } = saved;
    let grace = Grace { after_stdin: arguments.stdin_grace, after_term: arguments.term_grace, ..Grace::default() };
    let children =
        Children::restore(children, &mut received, grace).map_err(failed("cannot take over the backends"))?;
    let listen = saved_listen.as_ref().map(|saved| {
        let options = options(saved.asked, &config)?;
        Listen::restore(options, saved, &mut received).map_err(failed("cannot take over the listener"))
    });
    let mut listen = listen.transpose()?;
    let stdio = stdio.map(OwnStreams::restore).transpose().map_err(failed("cannot use stdin and stdout"))?;

    let home = Home::open(&cwd, env::home_dir().as_deref());
    let mut journal = Journal::of_gateway(&home, &id, &name);
    journal.learn(config.settings.backends.iter().flat_map(|backend| backend.kind.texts()));
    let instance = instance(&id, name.clone(), &cwd, &home);
    let control = Control::restore(instance, env::home_dir().as_deref(), control, &mut received)
        .map_err(failed("cannot take over the control socket"))?;
    let (reload, warning) = Reload::new(source, &config, arguments.listen, !arguments.no_watch);
    warning.into_iter().for_each(|warning| journal.note(&warning));
    let identity = arguments.name.clone().unwrap_or_else(|| identity(&arguments.config));
    let caches = Home::of_user(&cwd, env::home_dir().as_deref());
    let (catalogue_cache, _, warning) = CatalogueCache::open(&caches, &identity, &config.settings.backends);
    warning.into_iter().for_each(|warning| journal.note(&warning));
    keep_sessions(&mut listen, &home, &identity);
    if let (Some(listen), Some(saved)) = (&mut listen, saved_listen) {
        listen.go_on(saved, &mut received).map_err(failed("cannot take over a connection"))?;
    }
    let is_kept = |link: Link| links.contains(&link.serial);
    let schemas = Box::new(Schemas::new());
    let gateway = Gateway::restore(config.settings, gateway, schemas, is_kept, Instant::now());
    let offers = gateway.offers().map(|(name, offer)| (name.to_owned(), offer.clone())).collect();
    let backends: Vec<Backend> = gateway.backends().cloned().collect();
    let mirrors = MirrorsByBackend::of(&offers, &backends);
    let plan = Plan { id, name, cwd, grace, state: home.dir().map(Path::to_owned) };
    let parts = Parts {
        plan,
        gateway,
        children,
        stops,
        stdio,
        listen,
        reload,
        catalogue_cache,
        mirrors,
        journal,
        control,
        // A replica of a cluster is not upgraded in place.
        cluster: None,
    };
    let driver = spawn_local(Driver::new(parts).go_on(header, rest, received));
    driver.await.map_err(|error| Report::new(report::FAILURE, "the gateway failed").because(error))
}

/// The command line of this process, for people.
fn command_line() -> String {
    let words: Vec<String> = env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    shell_quote(["outlast"].into_iter().chain(words.iter().skip(1).map(String::as_str)))
}

fn instance(id: &str, name: String, cwd: &Path, home: &Home) -> Instance {
    Instance {
        id: id.to_owned(),
        kind: "gateway",
        name,
        cwd: cwd.to_owned(),
        command: command_line(),
        log: home.log(id),
        audit: home.audit(),
        program: crate::upgrade::own_program(),
    }
}

/// Sessions survive a restart of the gateway.
fn keep_sessions(listen: &mut Option<Listen>, home: &Home, identity: &str) {
    if let (Some(listen), Some(dir)) = (listen, home.dir()) {
        let dir = session_store::directory(dir, identity, &listen.asked().to_string());
        listen.keep_sessions(Box::new(SessionDirectory::open(dir)));
    }
}

/// The identity of a gateway among those of one directory: its configuration files.
pub(crate) fn identity(files: &[PathBuf]) -> String {
    let names: Vec<String> = files.iter().map(|file| file.to_string_lossy().into_owned()).collect();
    if names.is_empty() { config::NAME.to_owned() } else { names.join(" ") }
}

/// The fronts over which clients connect.
#[derive(Debug, PartialEq, Eq)]
struct Fronts {
    stdio: bool,
    listen: Option<SocketAddr>,
}

impl Fronts {
    /// The options decide; without options, the configuration; without both, whether stdin is a terminal.
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

/// The address for clients and browsers, and a warning if it is dangerous.
pub(super) fn announce(listen: &Listen) -> Vec<String> {
    let mut notes =
        vec![format!("listening on {}/mcp", listen.url()), format!("status page: {}", listen.status_page())];
    if listen.is_readable() {
        notes.push(format!(
            "warning: {} can be reached from other machines without TLS, so tokens and results are not encrypted; \
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

/// How clients authenticate.
fn auth(config: &Config) -> Result<Option<listen::Auth>, Report> {
    let Some(settings) = config.auth.clone() else { return Ok(None) };
    let auth = Auth::load(settings).map_err(|why| {
        Report::new(report::USAGE, "the authentication cannot be set up").because(why).hint("fix `[auth]`")
    })?;
    Ok(Some(Box::new(move |headers| {
        auth.identify(headers)
            .map_err(|error| listen::Unauthorized { challenge: error.challenge(), why: error.words().to_owned() })
    })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fronts_follow_options_then_configuration_then_stdin() {
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
