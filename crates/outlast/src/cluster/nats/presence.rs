//! The entry of this replica in the bucket `replicas`: it claims the name, and is renewed while the replica runs.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::{
    Bucket, Expected, Presence, Written,
    error::NatsError,
    operations::{Link, PRESENCE},
};

/// An entry that is not renewed expires.
pub(super) const LASTS: Duration = Duration::from_secs(10);
pub(super) const RENEW: Duration = Duration::from_secs(2);
/// How long another replica with this name may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(1);
/// Rounds of read and compare-and-swap; each fails only if another replica wrote meanwhile.
const ROUNDS_MAX: usize = 5;

/// As it is stored. Readers ignore unknown fields.
#[derive(Serialize, Deserialize)]
struct Stored {
    instance: String,
    name: String,
    version: String,
    started: u64,
    address: Option<String>,
}

impl Presence {
    pub(super) fn own(name: &str, instance: u64, address: Option<String>) -> Presence {
        let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Presence { instance, name: name.to_owned(), version, started, address }
    }

    /// An entry of the bucket `replicas`.
    pub(crate) fn read(bytes: &[u8]) -> Option<Presence> {
        let Stored { instance, name, version, started, address } = serde_json::from_slice(bytes).ok()?;
        let instance = u64::from_str_radix(&instance, 16).ok()?;
        Some(Presence { instance, name, version, started, address })
    }

    fn to_bytes(&self) -> Bytes {
        let stored = Stored {
            instance: format!("{:016x}", self.instance),
            name: self.name.clone(),
            version: self.version.clone(),
            started: self.started,
            address: self.address.clone(),
        };
        serde_json::to_vec(&stored).unwrap_or_default().into()
    }
}

/// The other replica that has this name and answers.
pub(super) async fn holder(link: &Link, name: &str) -> Result<Option<Presence>, String> {
    let (_, entry) = link.read(Bucket::Replicas, name).await?;
    Ok(match entry.as_deref().and_then(Presence::read) {
        Some(other) if other.instance != link.instance && answers(link, &other).await => Some(other),
        _ => None,
    })
}

async fn answers(link: &Link, other: &Presence) -> bool {
    link.request(other.instance, PRESENCE, Bytes::new(), ANSWER_MAX).await.is_ok()
}

/// Makes this replica the holder of its name and returns the revision. A holder that does not answer is replaced.
pub(super) async fn claim(link: &Link, own: &Presence) -> Result<u64, NatsError> {
    let mut why = String::new();
    let silent = |why: String| NatsError::Silent { server: link.server(), why };
    for _ in 0..ROUNDS_MAX {
        let (revision, entry) = link.read(Bucket::Replicas, &own.name).await.map_err(silent)?;
        if let Some(other) = entry.as_deref().and_then(Presence::read)
            && other.instance != own.instance
            && answers(link, &other).await
        {
            return Err(NatsError::NameTaken { by: other });
        }
        match renew(link, own, revision).await {
            Written::Done(revision) => return Ok(revision),
            Written::Conflict => why = "other replicas write the same entry".to_owned(),
            Written::Unknown(cause) => return Err(silent(cause)),
        }
    }
    Err(silent(why))
}

pub(super) async fn renew(link: &Link, own: &Presence, revision: u64) -> Written {
    link.write(Bucket::Replicas, &own.name, Expected::Revision(revision), own.to_bytes()).await
}

/// Deletes the entry, if it is still that of this replica. If that fails, the entry expires.
pub(super) async fn leave(link: &Link, own: &Presence) {
    if let Ok((revision, Some(entry))) = link.read(Bucket::Replicas, &own.name).await
        && Presence::read(&entry).is_some_and(|found| found.instance == own.instance)
    {
        let _ = link.delete(Bucket::Replicas, &own.name, Some(revision)).await;
    }
}
