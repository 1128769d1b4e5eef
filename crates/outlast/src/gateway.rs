//! Drives the gateway: `outlast gateway`.

pub mod listen;
