//! Several gateways that act as one, over NATS: which replica runs a backend, which serves a session, which part of the rate
//! budgets each uses, and which audit records are published. What NATS does itself (replication, elections, delivery) is
//! not here; a driver speaks NATS and reports to these machines.

use std::{ops::Add, time::Duration};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

pub mod audit_log;
pub mod homes;
pub mod leases;
pub mod server_watch;
pub mod shares;
pub mod streams;

/// A random number that a gateway process of a cluster has from its start to its end.
pub type Instance = u64;

/// A moment on a clock that counts from some fixed moment and includes the time in which the machine is suspended
/// (`CLOCK_BOOTTIME`). What must end while a machine sleeps is measured with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct BootTime(pub Duration);

impl Add<Duration> for BootTime {
    type Output = BootTime;

    fn add(self, time: Duration) -> BootTime {
        BootTime(self.0 + time)
    }
}

impl BootTime {
    /// The moment so long before this one, or the beginning of the clock.
    pub fn before(self, time: Duration) -> BootTime {
        BootTime(self.0.saturating_sub(time))
    }

    /// How long ago `earlier` is at this moment; nothing if it is not over yet.
    pub fn since(self, earlier: BootTime) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// Why a value of a bucket cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadValue {
    Damaged,
    /// Of a format that this outlast does not know.
    Version(u32),
    TooLong,
}

impl std::fmt::Display for BadValue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BadValue::Damaged => f.write_str("it is damaged"),
            BadValue::Version(version) => write!(f, "it has version {version}, which this outlast does not know"),
            BadValue::TooLong => f.write_str("it is too long"),
        }
    }
}

/// A value as JSON with the version of its format. Members that are not known are ignored.
#[derive(Serialize)]
struct Versioned<T> {
    version: u32,
    #[serde(flatten)]
    value: T,
}

/// Only the version: another version may have other members.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

fn write_value<T: Serialize>(version: u32, value: T) -> Vec<u8> {
    serde_json::to_vec(&Versioned { version, value }).expect("names and numbers are JSON")
}

fn read_value<T: DeserializeOwned>(version: u32, bytes: &[u8], bytes_max: usize) -> Result<T, BadValue> {
    if bytes.len() > bytes_max {
        return Err(BadValue::TooLong);
    }
    let found: Version = serde_json::from_slice(bytes).map_err(|_| BadValue::Damaged)?;
    if found.version != version {
        return Err(BadValue::Version(found.version));
    }
    // Not `Versioned`: a flattened member is not read as strictly.
    serde_json::from_slice(bytes).map_err(|_| BadValue::Damaged)
}

/// An instance as 16 hexadecimal digits: programs that read numbers as floating point would change it.
mod hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use super::Instance;

    pub(super) fn serialize<S: Serializer>(instance: &Instance, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&format_args!("{instance:016x}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Instance, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(from)?;
        match text.len() == 16 && text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            true => Instance::from_str_radix(&text, 16).map_err(D::Error::custom),
            false => Err(D::Error::custom("not 16 hexadecimal digits")),
        }
    }
}
