//! The HTTP front over real sockets, with a small scripted machine behind it.

mod crowd;
mod handshake;
mod limits;
mod pages;
mod profiles;
mod rights;
mod stateless;
mod streams;
mod support;
