//! The HTTP front over real sockets, with a small machine behind it that answers as told.

mod crowd;
mod handshake;
mod limits;
mod pages;
mod profiles;
mod rights;
mod stateless;
mod streams;
mod support;
