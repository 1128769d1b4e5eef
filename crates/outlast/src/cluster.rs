//! A gateway as one replica of a cluster. The settings of `[cluster]` are here; `nats` speaks with NATS, and decides nothing.

use std::{path::PathBuf, time::Duration};

use crate::{cli::report::Report, config::gateway::Secret};

pub(crate) mod audit_publisher;
#[cfg(feature = "cluster")]
pub(crate) mod nats;
#[cfg(not(feature = "cluster"))]
#[path = "cluster/nats_absent.rs"]
pub(crate) mod nats;
mod nats_events;
pub(crate) mod replica;

/// Before anything is started: whether this gateway can be a replica. Returns a note if it begins alone, because NATS cannot
/// be reached now and is not required.
#[cfg(feature = "cluster")]
pub(crate) async fn before_start(settings: &NatsSettings, instance: u64) -> Result<Option<String>, Report> {
    match nats::check(settings, instance, true).await {
        Ok(_) => Ok(None),
        Err(error) if error.may_pass() && !settings.required => {
            Ok(Some(format!("warning: the gateway starts alone, and joins the cluster later: {}", error.line())))
        }
        Err(error) => Err(error.report()),
    }
}

/// A configuration with `[cluster]` is an error in this build.
#[cfg(not(feature = "cluster"))]
#[expect(clippy::unused_async, reason = "as in a build with clusters")]
pub(crate) async fn before_start(_: &NatsSettings, _: u64) -> Result<Option<String>, Report> {
    Ok(None)
}

/// `[cluster]`, checked as far as that is possible without a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NatsSettings {
    /// `nats://host:port` or `tls://host:port`, at least one.
    pub servers: Vec<String>,
    /// The name of the cluster.
    pub cluster: String,
    /// What all subjects and names of buckets begin with.
    pub prefix: String,
    /// The name of this replica.
    pub replica: String,
    pub credentials: Credentials,
    pub tls: Tls,
    /// Copies that NATS keeps of each bucket and stream.
    pub replicas: u32,
    /// Whether the gateway refuses to start while NATS cannot be reached.
    pub required: bool,
    /// How long a session record without changes is kept.
    pub session_ttl: Duration,
}

/// How this replica identifies itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Credentials {
    None,
    /// A credentials file of `nsc`: a JWT and a seed. It is read at each connection.
    File(PathBuf),
    /// A file with the seed of an nkey. It is read at each connection.
    NkeyFile(PathBuf),
    UserAndPassword {
        user: String,
        password: Secret,
    },
    Token(Secret),
}

/// The files of TLS; all are read at each connection.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Tls {
    /// Instead of the certificate authorities of the system.
    pub ca: Option<PathBuf>,
    /// Certificate and key of this replica.
    pub own: Option<(PathBuf, PathBuf)>,
}
