//! `outlast mcp --share`: one server process for all clients that start the same command.
//!
//! The process that a client starts is thin: [`client`] keeps the client's connection and has no server. [`hub`] is a
//! process in a session of its own, with a relay that supervises the server, and a gateway machine that keeps the clients
//! apart. They speak over a private socket. What can be shared is decided in `outlast_core::gateway`.

pub(crate) mod client;
mod connection;
pub(crate) mod hub;
mod join;
pub(crate) mod place;
mod wire;
