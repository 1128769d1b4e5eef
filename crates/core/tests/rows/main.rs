//! One client's conversation, row by row: each test is named after the row of `docs/internals/relay.md` that it proves.

mod backlog;
mod client;
mod edits;
mod errors;
mod events;
mod handshake;
mod hang;
mod lists;
mod modern;
mod notes;
mod page;
mod records;
mod reload;
mod reports;
mod server;
mod slow;
mod story;
mod tools;
