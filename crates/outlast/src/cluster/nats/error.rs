//! Why a replica cannot use NATS, for people: a sentence, a cause and a hint.

use super::{OLDEST, PAYLOAD_MIN, Presence};
use crate::cli::report::{self, Report};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NatsError {
    #[error("cannot reach NATS at {servers}")]
    Unreachable { servers: String, why: String },
    #[error("NATS at {server} does not answer")]
    Silent { server: String, why: String },
    #[error("NATS at {server} refuses the credentials of this replica")]
    Refused { server: String, why: String },
    #[error("cannot read the credentials for NATS")]
    Credentials { why: String },
    #[error("cannot use TLS with NATS at {server}")]
    Tls { server: String, why: String },
    #[error("NATS at {server} has version {version}, and outlast needs {OLDEST} or newer")]
    TooOld { server: String, version: String },
    #[error("NATS at {server} offers no JetStream")]
    NoJetStream { server: String },
    #[error("NATS at {server} accepts messages up to {max} bytes, and outlast needs {PAYLOAD_MIN}")]
    PayloadTooSmall { server: String, max: usize },
    #[error("the NATS user of this replica lacks a permission")]
    Denied { why: String },
    #[error("{what} was not made by this version of outlast")]
    OtherVersion { what: String, found: String },
    #[error("{what} has {found} copies in NATS, and `replicas` is {wanted}")]
    OtherReplicas { what: String, found: usize, wanted: u32 },
    #[error("cannot create {what} in NATS")]
    NotCreated { what: String, why: String, is_final: bool },
    #[error("another replica of this cluster has the name `{}`", .by.name)]
    NameTaken { by: Presence },
}

impl NatsError {
    /// Whether it may pass without a change of the configuration: the gateway can begin alone and join later.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            NatsError::Unreachable { .. } | NatsError::Silent { .. } => true,
            NatsError::NotCreated { is_final, .. } => !is_final,
            _ => false,
        }
    }

    pub(crate) fn report(&self) -> Report {
        let report = Report::new(report::FAILURE, self.to_string()).hint(self.hint());
        match self.because() {
            Some(because) => report.because(because),
            None => report,
        }
    }

    /// One line, for the log.
    pub(crate) fn line(&self) -> String {
        match self.because() {
            Some(because) => format!("{self}: {}", report::plain(&because)),
            None => self.to_string(),
        }
    }

    fn because(&self) -> Option<String> {
        match self {
            NatsError::Unreachable { why, .. }
            | NatsError::Silent { why, .. }
            | NatsError::Refused { why, .. }
            | NatsError::Credentials { why }
            | NatsError::Tls { why, .. }
            | NatsError::Denied { why }
            | NatsError::NotCreated { why, .. } => Some(why.clone()),
            NatsError::NoJetStream { .. } => {
                Some("it is not enabled on this server, or not for the account of this replica".to_owned())
            }
            NatsError::OtherVersion { found, .. } => Some(match found.as_str() {
                "" => "it has no description".to_owned(),
                found => format!("its description is `{found}`"),
            }),
            NatsError::NameTaken { by } => Some(match &by.address {
                Some(address) => format!("it listens on {address} and answers"),
                None => "it answers".to_owned(),
            }),
            NatsError::TooOld { .. } | NatsError::PayloadTooSmall { .. } | NatsError::OtherReplicas { .. } => None,
        }
    }

    fn hint(&self) -> String {
        match self {
            NatsError::Unreachable { .. } => "start nats-server, or correct `nats` in [cluster]".to_owned(),
            NatsError::Silent { .. } => "JetStream needs a majority of its servers: look at their logs".to_owned(),
            NatsError::Refused { .. } => {
                "correct `credentials`, `nkey`, `user` and `password`, or `token` in [cluster]".to_owned()
            }
            NatsError::Credentials { .. } => "correct `credentials` or `nkey` in [cluster]".to_owned(),
            NatsError::Tls { .. } => "correct `tls_ca`, `tls_cert` and `tls_key` in [cluster]".to_owned(),
            NatsError::TooOld { .. } => "install a newer nats-server".to_owned(),
            NatsError::NoJetStream { .. } => {
                "start nats-server with JetStream (`-js`), and enable it for the account of this user".to_owned()
            }
            NatsError::PayloadTooSmall { .. } => {
                "raise `max_payload` in the configuration of nats-server; its default is 1 MB".to_owned()
            }
            NatsError::Denied { .. } => {
                "allow its user the subjects `PREFIX.v1.NAME.>` (both ways), `$KV.>` and `$JS.API.>`, with `prefix` and \
                 `name` of [cluster]"
                    .to_owned()
            }
            NatsError::OtherVersion { .. } => {
                "use another `name` or `prefix` in [cluster], or the version of outlast that made it".to_owned()
            }
            NatsError::OtherReplicas { found, .. } => {
                format!("set `replicas = {found}` in [cluster], or change the stream with the tools of NATS")
            }
            NatsError::NotCreated { is_final: true, .. } => {
                "set `replicas = 1` in [cluster], or run nats-server as a cluster of three".to_owned()
            }
            NatsError::NotCreated { .. } => "look at the log of nats-server".to_owned(),
            NatsError::NameTaken { .. } => "give each replica its own name: `replica` in [cluster]".to_owned(),
        }
    }
}
