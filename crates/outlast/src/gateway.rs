//! Drives the gateway: many backends, one endpoint.

pub mod auth;
pub mod http;
pub mod listen;
pub mod metrics;
pub mod schemas;
pub mod shelf;
