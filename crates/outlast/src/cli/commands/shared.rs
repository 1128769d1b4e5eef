//! `outlast mcp --share`: the thin client of a shared server, and the hub that it starts. Where hubs cannot be used, the
//! client gets a server of its own, as without the option.

use std::{
    cell::RefCell,
    env,
    path::Path,
    process::ExitCode,
    rc::Rc,
    time::{Duration, Instant},
};

use outlast_core::{
    gateway::Gateway,
    relay::{Limits, OnCleanExit, Relay, Reload, Retry, Settings},
    restarts::{Delays, Policy},
};
use outlast_os::{self as os, Announce, BlockingStream, Claim, Detached, Listener, handover::Received, offload};
use serde_json::{Value, json};
use tokio::{
    sync::mpsc,
    task::{JoinHandle, spawn_local},
};

use super::{
    Begun, Conversation, FILES_MAX, LEAVING_MAX, LOOK_AGAIN, Names, Report, check_relay, cli, driver_again, failed,
    name_of, plan_of_mcp, runtime, settle_in, unreadable,
};
use crate::{
    child::own_streams::OwnStreams,
    cli::{Share, report},
    relay::mcp::{
        self as relay,
        upgrade::{self, InnerClient},
    },
    share::{
        client::{ThinClient, upgrade::Saved},
        hub::{Hub, HubReport, Plan, upgrade as hub},
        place::{Files, Hubs, OWN},
    },
    state::home,
    upgrade::format::{self, Header},
};

/// How many notes of the hub may wait for the log; more are dropped.
const NOTES_MAX: usize = 256;
/// For what the hub decides, and the thin client does not.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);

pub(super) fn begin_shared(arguments: &cli::Mcp, cwd: &Path) -> Result<Begun, Report> {
    let Some(scope) = arguments.share else { return Ok(Begun::Unshared(None)) };
    if arguments.inherit {
        // The configuration file sets it; on the command line the two are refused.
        return Ok(Begun::Unshared(Some("with `inherit` outlast reads no messages".to_owned())));
    }
    let place = Hubs::of(arguments, cwd, env::home_dir().as_deref(), env::vars_os());
    if let Some(name) = &arguments.hub {
        return hub(arguments, scope, name, place, cwd).map(Begun::Over);
    }
    match place {
        Ok(place) => client(arguments, place).map(Begun::Over),
        Err(why) => Ok(Begun::Unshared(Some(why))),
    }
}

// ---- the thin client ---------------------------------------------------------------------------------------

fn client(arguments: &cli::Mcp, place: Hubs) -> Result<ExitCode, Report> {
    let runtime = runtime()?;
    let code = runtime.block_on(async {
        let stops = os::Stops::begin().map_err(failed("cannot listen for signals"))?;
        let client = OwnStreams::begin().map_err(failed("cannot use stdin and stdout"))?;
        Ok::<u8, Report>(ThinClient::new(settings(arguments), place, stops, client).run().await)
    })?;
    drop(runtime);
    offload::finish(FILES_MAX);
    Ok(ExitCode::from(code))
}

/// Continues with the conversation of the last program of this process.
pub(super) fn client_again(
    arguments: &cli::Mcp,
    state: &[u8],
    mut received: Received,
    cwd: &Path,
) -> Result<ExitCode, Report> {
    let (header, saved) = read(state)?;
    let place = place_of(arguments, cwd)?;
    let runtime = runtime()?;
    let code = runtime.block_on(async {
        let stops = os::Stops::begin().map_err(failed("cannot listen for signals"))?;
        let (client, requested) = ThinClient::restore(settings(arguments), place, stops, saved, &mut received)
            .map_err(failed("cannot take over the client and its hub"))?;
        Ok::<u8, Report>(client.go_on(&header, &requested, received).await)
    })?;
    drop(runtime);
    offload::finish(FILES_MAX);
    Ok(ExitCode::from(code))
}

/// Whether this program could continue with the conversation, with these arguments.
pub(super) fn check_client(arguments: &cli::Mcp, state: &[u8]) -> Result<(), Report> {
    let (_, saved) = read(state)?;
    place_of(arguments, &report::cwd()?)?;
    let _ = Relay::restore(settings(arguments), saved.relay, Instant::now());
    Ok(())
}

fn read(state: &[u8]) -> Result<(Header, Saved), Report> {
    format::read(format::Kind::SharedClient, state).map_err(unreadable)
}

fn place_of(arguments: &cli::Mcp, cwd: &Path) -> Result<Hubs, Report> {
    Hubs::of(arguments, cwd, env::home_dir().as_deref(), env::vars_os())
        .map_err(|why| Report::new(report::FAILURE, "the server cannot be shared any more").because(why))
}

/// The relay of a thin client has no server: tools, timeouts and caches are the hub's.
fn settings(arguments: &cli::Mcp) -> Settings {
    let words: Vec<String> = arguments.command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let name = arguments.name.clone().unwrap_or_else(|| name_of(&words));
    let mut limits = Limits::default();
    limits.holding.hold_max = arguments.hold;
    limits.draining.drain_max = arguments.drain;
    limits.handshake.first_handshake_max = NEVER;
    limits.handshake.handshake_max = NEVER;
    Settings {
        id: name.clone(),
        name,
        tools: false,
        retry: match arguments.retry {
            cli::Retry::Never => Retry::Never,
            cli::Retry::Annotated => Retry::Annotated,
        },
        reload: Reload::BlueGreen,
        build: false,
        on_clean_exit: OnCleanExit::End,
        answer_after: Some(NEVER),
        cache: false,
        heartbeat: None,
        restart_tool: String::new(),
        call_timeout: None,
        call_timeouts: Default::default(),
        memory_max: None,
        policy: policy(),
        seed: home::random(),
        random: format!("{:08x}", home::random() >> 32),
        limits,
    }
}

/// The least time between two starts of a hub, in case it ends at once each time.
fn policy() -> Policy {
    let delays = [(1, 0), (3, 100), (6, 1000), (10, 5000)].map(|(from, millis)| (from, Duration::from_millis(millis)));
    Policy { delays: Delays::Steps(delays.into()), ..Policy::watchdog() }
}

// ---- the hub -----------------------------------------------------------------------------------------------

/// A thin client has started this process and waits for what it announces.
fn hub(
    arguments: &cli::Mcp,
    scope: Share,
    name: &str,
    place: Result<Hubs, String>,
    cwd: &Path,
) -> Result<ExitCode, Report> {
    let first = match name == OWN {
        true => Some(os::inherited_connection().map_err(failed("cannot use the connection of the client"))?),
        false => None,
    };
    let announce = match os::detach().map_err(failed("cannot go into the background"))? {
        Detached::Child(announce) => announce,
        Detached::Parent(said) => {
            print!("{said}");
            return Ok(ExitCode::SUCCESS);
        }
    };
    let scope = scope_of(arguments, name, scope);
    let begun = match &first {
        Some(_) => Ok(None),
        None => place.and_then(|place| place.named(name)).and_then(|files| Ok(Some((claim(&files)?, files)))),
    };
    let files = match begun {
        Ok(files) => files,
        Err(why) => {
            announce.say(&json!({"error": why}).to_string());
            return Ok(ExitCode::from(report::FAILURE));
        }
    };
    let (keeper, runtime) = match settle_in() {
        Ok(settled) => settled,
        Err(report) => {
            announce.say(&json!({"error": report.to_string()}).to_string());
            return Ok(ExitCode::from(report.code));
        }
    };
    let (claim, files) = files.map_or((None, None), |(claim, files)| (Some(Rc::new(claim)), Some(files)));
    runtime.block_on(async {
        match begin(arguments, scope, files.as_ref(), claim.clone(), first, keeper, cwd) {
            Ok((hub, server)) => {
                announce.say(&json!({"ok": true}).to_string());
                Hub::run(hub, server).await;
            }
            Err(report) => say_failed(announce, &report),
        }
    });
    drop(runtime);
    offload::finish(FILES_MAX);
    drop(claim);
    Ok(ExitCode::SUCCESS)
}

/// Which clients share a hub.
fn scope_of(arguments: &cli::Mcp, name: &str, scope: Share) -> &'static str {
    match (name == OWN, &arguments.hub_why, scope) {
        (true, ..) => "own",
        (false, Some(_), _) => "equals",
        (false, None, Share::User) => "user",
        (false, None, Share::Directory) => "directory",
    }
}

/// Continues with the hub of the last program of this process.
pub(super) fn hub_again(
    arguments: &cli::Mcp,
    state: &[u8],
    mut received: Received,
    cwd: &Path,
) -> Result<ExitCode, Report> {
    let (header, saved, hub) = read_hub(state)?;
    let (name, scope) = (arguments.hub.as_deref().unwrap_or(OWN), arguments.share.unwrap_or(Share::Directory));
    let files = files_of(arguments, name, cwd)?;
    let runtime = runtime()?;
    let claim = runtime.block_on(async {
        let stops = os::Stops::begin().map_err(failed("cannot listen for signals"))?;
        let mut conversation = plan_of_mcp(arguments, &saved.relay.id, cwd);
        let report = report_of(&mut conversation);
        let plan = hub_plan(arguments, saved.relay.id.clone(), scope_of(arguments, name, scope));
        let hub = Hub::restore(plan, hub, files.as_ref(), stops, report, &mut received)
            .map_err(failed("cannot take over the clients of the hub"))?;
        let claim = hub.claim();
        let hub = Rc::new(RefCell::new(hub));
        let inner: Rc<RefCell<dyn InnerClient>> = hub.clone();
        conversation.inner = Some(inner);
        let client = OwnStreams::restore_other(saved.rest.client.clone(), &mut received)
            .map_err(failed("cannot connect the relay"))?;
        let (driver, rest) = driver_again(arguments, conversation, saved, client, &mut received)?;
        let watched = arguments.watch.clone();
        let server = spawn_local(async move { driver.go_on(&header, rest, watched, received).await });
        Hub::run(hub, server).await;
        Ok::<_, Report>(claim)
    })?;
    drop(runtime);
    offload::finish(FILES_MAX);
    drop(claim);
    Ok(ExitCode::SUCCESS)
}

/// Whether this program could continue with the hub, with these arguments.
pub(super) fn check_hub(arguments: &cli::Mcp, state: &[u8]) -> Result<(), Report> {
    let (_, saved, hub) = read_hub(state)?;
    files_of(arguments, arguments.hub.as_deref().unwrap_or(OWN), &report::cwd()?)?;
    if Gateway::restore_shared_server("", hub.gateway, Instant::now()).is_none() {
        return Err(Report::new(report::FAILURE, "the state is not that of a hub"));
    }
    check_relay(arguments, saved)
}

fn read_hub(state: &[u8]) -> Result<(Header, upgrade::Saved, hub::Saved), Report> {
    let (header, mut saved): (_, upgrade::Saved) = format::read(format::Kind::Hub, state).map_err(unreadable)?;
    let hub = format::from_value(&saved.inner.take().unwrap_or_default()).map_err(unreadable)?;
    Ok((header, saved, hub))
}

/// The files of a hub with a name.
fn files_of(arguments: &cli::Mcp, name: &str, cwd: &Path) -> Result<Option<Files>, Report> {
    let of = |why| Report::new(report::FAILURE, "the files of the hub cannot be used").because(why);
    match name == OWN {
        true => Ok(None),
        false => place_of(arguments, cwd)?.named(name).map(Some).map_err(of),
    }
}

/// What the relay reports about the hub.
fn report_of(plan: &mut relay::Plan) -> HubReport {
    let state = Rc::new(RefCell::new(Value::Null));
    let (notes, notes_heard) = mpsc::channel(NOTES_MAX);
    let shown = Rc::clone(&state);
    plan.more_state = Some(Box::new(move || shown.borrow().clone()));
    plan.notes = Some(notes_heard);
    HubReport { state, notes }
}

fn hub_plan(arguments: &cli::Mcp, id: String, scope: &'static str) -> Plan {
    let name = Names::of(arguments).name;
    Plan { id, name, linger: arguments.linger, scope, why: arguments.hub_why.clone(), seed: home::random() }
}

fn say_failed(announce: Announce, report: &Report) {
    announce.say(&json!({"error": report.to_string()}).to_string());
}

/// A hub of the same name may still be ending.
fn claim(files: &Files) -> Result<Claim, String> {
    let deadline = Instant::now() + LEAVING_MAX;
    loop {
        match os::claim_name(&files.claim) {
            Ok(Some(claim)) => return Ok(claim),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(LOOK_AGAIN),
            Ok(None) => return Err("another hub of this server does not end".to_owned()),
            Err(error) => return Err(format!("{}: {}", files.claim.display(), report::plain(&error.to_string()))),
        }
    }
}

fn begin(
    arguments: &cli::Mcp,
    scope: &'static str,
    files: Option<&Files>,
    claim: Option<Rc<Claim>>,
    first: Option<BlockingStream>,
    keeper: os::Keeper,
    cwd: &Path,
) -> Result<(Rc<RefCell<Hub>>, JoinHandle<u8>), Report> {
    let listener = match files {
        Some(files) => Some(Listener::bind(&files.socket).map_err(failed("cannot open the socket of the hub"))?),
        None => None,
    };
    let stops = os::Stops::begin().map_err(failed("cannot listen for signals"))?;
    let [ours, relays] = os::stream_pair().map_err(failed("cannot connect the relay"))?;
    let mut conversation = Conversation::begin(arguments, keeper, cwd)?;
    let report = report_of(&mut conversation.plan);
    let plan = hub_plan(arguments, conversation.id.clone(), scope);
    let mut hub = Hub::new(plan, listener, claim, ours, stops, report);
    if let Some(line) = first {
        hub.seat(line).map_err(failed("cannot use the connection of the client"))?;
    }
    let hub = Rc::new(RefCell::new(hub));
    let inner: Rc<RefCell<dyn InnerClient>> = hub.clone();
    conversation.plan.inner = Some(inner);
    let client = OwnStreams::over(relays).map_err(failed("cannot connect the relay"))?;
    let server = spawn_local(conversation.driver(arguments, client).run());
    Ok((hub, server))
}
