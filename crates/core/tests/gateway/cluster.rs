//! The machines of the cluster as stories: the test is NATS, the keeper and the other replicas.

mod audit_log;
mod homes;
mod leases;
mod server_watch;
mod shares;

use std::time::Duration;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}
