//! One connection, from the address to verified buckets. Everything that can be wrong with it is a [`NatsError`].

use std::{
    error::Error,
    fs,
    rc::Rc,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use async_nats::{
    Client, ConnectError, ConnectErrorKind, ConnectOptions, Event, ServerError, Subscriber,
    jetstream::{
        self, ErrorCode,
        context::{AccountErrorKind, CreateStreamErrorKind, GetStreamErrorKind},
        stream::{Config, DiscardPolicy},
    },
};
use bytes::Bytes;
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};

use super::{
    Bucket, Expected, OLDEST, PAYLOAD_MIN, ServerInfo, Written,
    error::NatsError,
    names::{BUCKETS, DESCRIPTION, Names},
    operations::{Link, OPERATION_MAX, PRESENCE},
    presence,
    task::next,
};
use crate::cluster::{Credentials, NatsSettings, Tls};

/// How long one server may take to accept a connection.
const CONNECT_MAX: Duration = Duration::from_secs(2);
/// How often the server is pinged. After two pings without an answer the connection counts as lost.
const PING: Duration = Duration::from_secs(1);
/// A client that lost its connection waits this long before its only attempt to connect again, and has been dropped by then.
const NEVER_USED: Duration = Duration::from_millis(500);
/// Commands that wait for the connection. At the limit packets wait in the outbox.
const COMMANDS_MAX: usize = 128;
/// Messages of one subscription that wait. At the limit they are dropped, as a network may drop them.
const MESSAGES_MAX: usize = 1024;
/// Events of a connection that wait; further ones are dropped.
const EVENTS_MAX: usize = 64;
/// How long the whole check may take.
const CHECK_MAX: Duration = Duration::from_secs(5);
/// Between attempts of a check.
const CHECK_PAUSE: Duration = Duration::from_millis(250);
/// All records of the audit stream; the oldest are discarded.
const AUDIT_BYTES: i64 = 1 << 30;
/// How long the audit stream recognizes an id that it has stored.
const AUDIT_DUPLICATES: Duration = Duration::from_secs(120);
/// A revision that no entry has: a write that expects it changes nothing.
const NO_REVISION: u64 = u64::MAX >> 1;

/// A connection whose buckets and stream are verified.
pub(super) struct Opened {
    pub link: Link,
    pub events: mpsc::Receiver<Event>,
    pub server: ServerInfo,
    pub payload_max: usize,
    /// Other servers of the NATS cluster, as this one names them.
    pub others: Vec<String>,
    /// What was not there, and was not created.
    pub missing: Vec<String>,
}

/// The result of a check without mistakes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Checked {
    pub server: ServerInfo,
    /// Buckets and streams that the first replica will create.
    pub missing: Vec<String>,
}

/// Whether this gateway can be a replica; it does not join the cluster. With `creates` missing buckets are created, as a
/// replica does. JetStream may be electing a leader, so silence is an error only after a while.
pub(crate) async fn check(settings: &NatsSettings, instance: u64, creates: bool) -> Result<Checked, NatsError> {
    let mut silent = None;
    let attempts = async {
        loop {
            match check_all(settings, instance, creates).await {
                Err(error @ NatsError::Silent { .. }) => silent = Some(error),
                result => return result,
            }
            sleep(CHECK_PAUSE).await;
        }
    };
    match timeout(CHECK_MAX, attempts).await {
        Ok(result) => result,
        Err(_) => Err(silent.unwrap_or_else(|| NatsError::Unreachable {
            servers: settings.servers.join(", "),
            why: format!("no answer within {} s", CHECK_MAX.as_secs()),
        })),
    }
}

async fn check_all(settings: &NatsSettings, instance: u64, creates: bool) -> Result<Checked, NatsError> {
    let names = Rc::new(Names::new(settings));
    let mut opened = open(settings, &names, instance, &settings.servers, creates).await?;
    let link = opened.link.clone();
    let trial = async {
        let subscriber = subscribe(&link).await?;
        try_request(&link, subscriber).await?;
        if opened.missing.is_empty() {
            try_writes(&link).await?;
        }
        match presence::holder(&link, &settings.replica).await {
            Ok(Some(by)) => Err(NatsError::NameTaken { by }),
            Ok(None) => Ok(()),
            Err(_) if opened.missing.contains(&names.bucket(Bucket::Replicas)) => Ok(()),
            Err(why) => Err(NatsError::Silent { server: link.server(), why }),
        }
    };
    unless_denied(trial, &mut opened.events).await?;
    Ok(Checked { server: opened.server, missing: opened.missing })
}

/// Tries each server once, in this order.
pub(super) async fn open(
    settings: &NatsSettings,
    names: &Rc<Names>,
    instance: u64,
    servers: &[String],
    creates: bool,
) -> Result<Opened, NatsError> {
    let mut failures: Vec<(String, String)> = Vec::new();
    for server in servers {
        match open_one(settings, names, instance, server, creates).await {
            // Another server may be in reach; any other error is one of the whole cluster.
            Err(NatsError::Unreachable { servers, why }) => failures.push((servers, why)),
            result => return result,
        }
    }
    let why = match failures.iter().all(|(_, why)| *why == failures[0].1) {
        true => failures.first().map(|(_, why)| why.clone()).unwrap_or_default(),
        false => failures.iter().map(|(server, why)| format!("{server}: {why}")).collect::<Vec<_>>().join("; "),
    };
    Err(NatsError::Unreachable { servers: servers.join(", "), why })
}

async fn open_one(
    settings: &NatsSettings,
    names: &Rc<Names>,
    instance: u64,
    server: &str,
    creates: bool,
) -> Result<Opened, NatsError> {
    let (client, mut events) = connect(settings, names, instance, server).await?;
    let info = client.server_info();
    let shown = server.to_owned();
    if !is_new_enough(&info.version) {
        return Err(NatsError::TooOld { server: shown, version: info.version });
    }
    if info.max_payload < PAYLOAD_MIN {
        return Err(NatsError::PayloadTooSmall { server: shown, max: info.max_payload });
    }
    let jetstream = jetstream::context::ContextBuilder::new().timeout(OPERATION_MAX).build(client.clone());
    let link = Link { client, jetstream, names: names.clone(), instance, server: Rc::from(server) };
    let missing = unless_denied(ensure_all(&link, settings, creates), &mut events).await?;
    let scheme = server.split_once("://").map_or("nats", |(scheme, _)| scheme);
    Ok(Opened {
        link,
        events,
        server: ServerInfo { url: shown, version: info.version, cluster: info.cluster },
        payload_max: info.max_payload - super::OVERHEAD,
        others: info.connect_urls.iter().map(|other| format!("{scheme}://{other}")).collect(),
        missing,
    })
}

async fn connect(
    settings: &NatsSettings,
    names: &Names,
    instance: u64,
    server: &str,
) -> Result<(Client, mpsc::Receiver<Event>), NatsError> {
    let (tell, events) = mpsc::channel(EVENTS_MAX);
    let has_connected = AtomicBool::new(false);
    let options = ConnectOptions::new()
        .name(format!("outlast {}", settings.replica))
        .custom_inbox_prefix(names.inbox(instance))
        .connection_timeout(CONNECT_MAX)
        .request_timeout(Some(OPERATION_MAX))
        .ping_interval(PING)
        .client_capacity(COMMANDS_MAX)
        .subscription_capacity(MESSAGES_MAX)
        // A client is used for one connection: what waits in it when the connection is lost must not be sent later. It
        // cannot be kept from trying once more, so that attempt comes when the client has been dropped.
        .ignore_discovered_servers()
        .max_reconnects(1)
        .reconnect_delay_callback(move |_| match has_connected.swap(true, Ordering::Relaxed) {
            false => Duration::ZERO,
            true => NEVER_USED,
        })
        .event_callback(move |event| {
            let _ = tell.try_send(event);
            async {}
        });
    let options = identified(options, &settings.credentials).await?;
    let options = encrypted(options, settings);
    match options.connect(server).await {
        Ok(client) => Ok((client, events)),
        Err(error) => Err(refusal(server, &error)),
    }
}

async fn identified(options: ConnectOptions, credentials: &Credentials) -> Result<ConnectOptions, NatsError> {
    let unreadable =
        |path: &std::path::Path, why: &dyn Error| NatsError::Credentials { why: format!("{}: {why}", path.display()) };
    let text = |secret: &crate::config::gateway::Secret| String::from_utf8_lossy(&secret.0).into_owned();
    Ok(match credentials {
        Credentials::None => options,
        Credentials::File(path) => options.credentials_file(path).await.map_err(|error| unreadable(path, &error))?,
        Credentials::NkeyFile(path) => {
            let seed = fs::read_to_string(path).map_err(|error| unreadable(path, &error))?;
            options.nkey(seed.trim().to_owned())
        }
        Credentials::UserAndPassword { user, password } => options.user_and_password(user.clone(), text(password)),
        Credentials::Token(token) => options.token(text(token)),
    })
}

fn encrypted(options: ConnectOptions, settings: &NatsSettings) -> ConnectOptions {
    let Tls { ca, own } = &settings.tls;
    let is_required = ca.is_some() || own.is_some() || settings.servers.iter().any(|url| url.starts_with("tls://"));
    let options = options.require_tls(is_required);
    let options = match ca {
        Some(path) => options.add_root_certificates(path.clone()),
        None => options,
    };
    match own {
        Some((cert, key)) => options.add_client_certificate(cert.clone(), key.clone()),
        None => options,
    }
}

fn refusal(server: &str, error: &ConnectError) -> NatsError {
    let mut cause: &dyn Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    let (server, why) = (server.to_owned(), cause.to_string());
    let is_about_tls = || why.contains("certificate") || why.contains("tls") || why.contains("TLS");
    match error.kind() {
        ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => {
            NatsError::Refused { server, why: why.trim_start_matches("nats: ").to_owned() }
        }
        ConnectErrorKind::Tls => NatsError::Tls { server, why },
        ConnectErrorKind::Io if is_about_tls() => NatsError::Tls { server, why },
        ConnectErrorKind::TimedOut => NatsError::Unreachable { servers: server, why: "no answer".to_owned() },
        _ => NatsError::Unreachable { servers: server, why },
    }
}

fn is_new_enough(version: &str) -> bool {
    let numbers = |version: &str| {
        let mut numbers = version.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
        Some((numbers.next()?, numbers.next()?))
    };
    numbers(OLDEST) <= numbers(version)
}

/// Ends a step as soon as the server denies a permission, because it does not answer what it denies.
async fn unless_denied<T>(
    step: impl Future<Output = Result<T, NatsError>>,
    events: &mut mpsc::Receiver<Event>,
) -> Result<T, NatsError> {
    let denied = async {
        while let Some(event) = events.recv().await {
            if let Event::ServerError(ServerError::Other(said)) = event
                && let Some(why) = denial(&said)
            {
                return NatsError::Denied { why };
            }
        }
        std::future::pending().await
    };
    tokio::select! {
        result = step => result,
        error = denied => Err(error),
    }
}

/// What the server denies, if that is what it says: `Permissions Violation for Publish to "x"`.
fn denial(said: &str) -> Option<String> {
    let (_, denied) = said.split_once("Permissions Violation for ")?;
    let (what, subject) = denied.split_once(" to ").unwrap_or((denied, ""));
    Some(match what {
        "Publish" => format!("it may not publish to {subject}"),
        "Subscription" => format!("it may not subscribe to {subject}"),
        _ => format!("the server denies {denied}"),
    })
}

/// Verifies JetStream, the buckets and the audit stream; creates what is missing, or returns its names.
async fn ensure_all(link: &Link, settings: &NatsSettings, creates: bool) -> Result<Vec<String>, NatsError> {
    if let Err(error) = link.jetstream.query_account().await {
        let (server, why) = (link.server(), error.to_string());
        let is_off = match error.kind() {
            AccountErrorKind::JetStreamUnavailable => true,
            AccountErrorKind::JetStream(error) => {
                [ErrorCode::JETSTREAM_NOT_ENABLED, ErrorCode::JETSTREAM_NOT_ENABLED_FOR_ACCOUNT]
                    .contains(&error.error_code())
            }
            _ => false,
        };
        return Err(match is_off {
            true => NatsError::NoJetStream { server },
            false => NatsError::Silent { server, why },
        });
    }
    let mut missing = Vec::new();
    for bucket in BUCKETS {
        let what = link.names.bucket(bucket);
        if !ensure(link, bucket_config(link, bucket, settings), &what, settings, creates).await? {
            missing.push(what);
        }
    }
    let what = link.names.audit_stream();
    if !ensure(link, audit_config(link, settings), &what, settings, creates).await? {
        missing.push(what);
    }
    Ok(missing)
}

fn bucket_config(link: &Link, bucket: Bucket, settings: &NatsSettings) -> Config {
    Config {
        name: link.names.stream_of(bucket),
        description: Some(DESCRIPTION.to_owned()),
        subjects: vec![link.names.key(bucket, ">")],
        max_messages_per_subject: 1,
        max_age: match bucket {
            Bucket::Replicas => presence::LASTS,
            Bucket::Sessions => settings.session_ttl,
            Bucket::Leases | Bucket::State => Duration::ZERO,
        },
        allow_rollup: true,
        deny_delete: true,
        allow_direct: true,
        discard: DiscardPolicy::New,
        num_replicas: settings.replicas as usize,
        ..Config::default()
    }
}

fn audit_config(link: &Link, settings: &NatsSettings) -> Config {
    Config {
        name: link.names.audit_stream(),
        description: Some(DESCRIPTION.to_owned()),
        subjects: vec![link.names.audit_subjects()],
        max_bytes: AUDIT_BYTES,
        discard: DiscardPolicy::Old,
        duplicate_window: AUDIT_DUPLICATES,
        num_replicas: settings.replicas as usize,
        ..Config::default()
    }
}

/// False if it is not there and was not created.
async fn ensure(
    link: &Link,
    config: Config,
    what: &str,
    settings: &NatsSettings,
    creates: bool,
) -> Result<bool, NatsError> {
    let silent = |why: String| NatsError::Silent { server: link.server(), why };
    let found = match link.jetstream.get_stream(&config.name).await {
        Ok(stream) => stream.cached_info().config.clone(),
        Err(error) => match error.kind() {
            GetStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND => {
                // A check that creates nothing finds this, too.
                if config.num_replicas > 1 && link.client.server_info().cluster.is_none() {
                    let why = "the server is not part of a NATS cluster, so it cannot keep copies".to_owned();
                    return Err(NatsError::NotCreated { what: named(what), why, is_final: true });
                }
                if !creates {
                    return Ok(false);
                }
                match link.jetstream.create_stream(config.clone()).await {
                    Ok(stream) => stream.cached_info().config.clone(),
                    Err(error) => match error.kind() {
                        CreateStreamErrorKind::TimedOut => return Err(silent(error.to_string())),
                        // Another replica created it meanwhile.
                        CreateStreamErrorKind::JetStream(error)
                            if error.error_code() == ErrorCode::STREAM_NAME_EXIST =>
                        {
                            let stream = link.jetstream.get_stream(&config.name).await;
                            stream.map_err(|error| silent(error.to_string()))?.cached_info().config.clone()
                        }
                        kind => {
                            let is_final = matches!(&kind, CreateStreamErrorKind::JetStream(error)
                                if error.error_code() == ErrorCode::STREAM_REPLICAS_NOT_SUPPORTED);
                            let (what, why) = (named(what), kind.to_string());
                            return Err(NatsError::NotCreated { what, why, is_final });
                        }
                    },
                }
            }
            _ => return Err(silent(error.to_string())),
        },
    };
    if found.description.as_deref() != Some(DESCRIPTION) {
        let found = found.description.unwrap_or_default();
        return Err(NatsError::OtherVersion { what: named(what), found });
    }
    if found.num_replicas != config.num_replicas {
        let (what, found) = (named(what), found.num_replicas);
        return Err(NatsError::OtherReplicas { what, found, wanted: settings.replicas });
    }
    // Records live as long as the replica with the longest `session_idle` wants.
    if creates && found.max_age < config.max_age {
        let longer = Config { max_age: config.max_age, ..found };
        link.jetstream.update_stream(longer).await.map_err(|error| silent(error.to_string()))?;
    }
    Ok(true)
}

fn named(what: &str) -> String {
    let kind = if what.ends_with("_audit") { "stream" } else { "bucket" };
    format!("the {kind} `{what}`")
}

/// The subscription of this replica.
pub(super) async fn subscribe(link: &Link) -> Result<Subscriber, NatsError> {
    let subscriber = link.client.subscribe(link.names.replica(link.instance)).await;
    subscriber.map_err(|error| NatsError::Silent { server: link.server(), why: error.to_string() })
}

/// A request to the own subscription: both directions are permitted.
async fn try_request(link: &Link, mut subscriber: Subscriber) -> Result<(), NatsError> {
    let request = link.request(link.instance, PRESENCE, Bytes::new(), OPERATION_MAX);
    let answer = async {
        if let Some(message) = next(&mut subscriber).await
            && let Some(reply) = message.reply
        {
            let _ = link.client.publish(reply, Bytes::new()).await;
        }
    };
    let (result, ()) = tokio::join!(request, answer);
    result.map(drop).map_err(|(_, why)| NatsError::Silent { server: link.server(), why })
}

/// Writes that change nothing, because they expect a revision that no entry has.
async fn try_writes(link: &Link) -> Result<(), NatsError> {
    let nothing = Bytes::new;
    for bucket in BUCKETS {
        accepted(link, link.write(bucket, "check", Expected::Revision(NO_REVISION), nothing()).await)?;
    }
    accepted(link, link.publish_audit("check", NO_REVISION, nothing()).await)
}

fn accepted(link: &Link, written: Written) -> Result<(), NatsError> {
    match written {
        Written::Conflict | Written::Done(_) => Ok(()),
        Written::Unknown(why) => Err(NatsError::Silent { server: link.server(), why }),
    }
}
