//! Drives the gateway: `outlast gateway`.

pub mod auth;
pub mod listen;
pub mod metrics;
pub mod schemas;
pub mod shelf;
