//! Fuzz targets for all code that reads bytes from outside. Each target plays an input against the real code and
//! panics if a promise is broken.
//!
//! `cargo test -p outlast-fuzz` replays the corpora with a few seeded mutations; `cargo xtask fuzz` runs a target under
//! libFuzzer, guided by coverage.

use std::time::Instant;

pub mod config;
pub mod connection;
#[cfg(unix)]
pub mod control;
pub mod gateway;
pub mod http;
pub mod json;
pub mod mutate;
pub mod relay;
pub mod script;

/// One target: its name, which is also the name of its corpus, and what it does with an input.
pub struct Target {
    pub name: &'static str,
    pub run: fn(&[u8]),
}

pub const TARGETS: &[Target] = &[
    Target { name: "relay", run: relay::run },
    Target { name: "gateway", run: gateway::run },
    Target { name: "http", run: http::run },
    #[cfg(unix)]
    Target { name: "control", run: control::run },
    Target { name: "config", run: config::run },
];

pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

/// A fixed start instant.
fn birth() -> Instant {
    Instant::now()
}
