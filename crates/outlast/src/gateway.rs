//! Drives the gateway: `outlast gateway`.

pub mod auth;
