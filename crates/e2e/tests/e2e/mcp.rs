//! `outlast mcp`, as a client sees it: over pipes, with a puppet behind it that crashes, hangs or writes garbage.

mod broken;
mod bytes;
pub(crate) mod client;
mod crash;
mod ending;
mod error_texts;
mod hang;
mod inherit;
mod many;
mod places;
mod reload;
mod replay;
mod slow;
mod tools;
mod unread;
pub(crate) mod upgrade;
