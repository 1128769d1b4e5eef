//! Drives the gateway: `outlast gateway`.

pub mod auth;
pub mod metrics;
pub mod schemas;
pub mod shelf;
