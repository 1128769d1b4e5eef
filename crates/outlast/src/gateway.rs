//! Drives the gateway: many backends, one endpoint.

pub mod http;
