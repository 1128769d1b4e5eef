//! `outlast mcp`, as a client meets it: over pipes, with a puppet behind it that crashes, hangs or babbles as told.

mod broken;
mod bytes;
pub mod client;
mod crash;
mod ending;
mod hang;
mod inherit;
mod many;
mod places;
mod reload;
mod replay;
mod slow;
mod tools;
mod unread;
mod words;
