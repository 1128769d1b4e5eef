//! Linux and macOS: a keeper process, pipes in the reactor, signals.

mod descendants;
mod household;
mod keeper;
mod stops;
mod stream;
mod terminal;
mod wire;
mod words;

pub use household::{Household, Keeper};
pub use stops::Stops;
pub use stream::{Hangups, Sink, Source, stdin, stdout};
pub use terminal::{kill_hard, terminal_size};
pub use words::say;
