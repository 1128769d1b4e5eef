//! Linux and macOS: a keeper process, pipes in the reactor, signals.

mod descendants;
mod household;
mod keeper;
mod memory;
mod process;
mod socket;
mod stops;
mod stream;
mod terminal;
mod wire;
mod words;

pub use household::{Household, Keeper};
pub use memory::give_back_code;
pub use process::born;
pub use socket::{Line, Listener, Peer, SOCKET_PATH_MAX, SOCKETS, claim_dir, remove_socket, short_dirs};
pub use stops::Stops;
pub use stream::{Hangups, Sink, Source, stdin, stdout};
pub use terminal::{kill_hard, terminal_size};
pub use words::{finish_saying, say};
