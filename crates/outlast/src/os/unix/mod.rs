//! Linux and macOS: a keeper process and a monitor for each child, pipes in the reactor, signals.

mod descendants;
mod descriptors;
mod detach;
mod household;
#[cfg(target_os = "linux")]
mod job;
mod keeper;
mod memory;
mod monitor;
#[cfg(target_os = "linux")]
mod open_files;
mod outer;
mod process;
mod pty;
mod sandbox;
mod socket;
mod stand_in;
mod stops;
mod strays;
mod stream;
mod terminal;
mod wire;
mod words;

pub use descendants::weigh;
pub use descriptors::room_for_descriptors;
pub use detach::{Announce, Claim, claim_name, detach};
pub use household::{Household, Keeper};
pub use memory::give_back_code;
#[cfg(target_os = "linux")]
pub use open_files::{family, open_files};
pub use outer::{Outer, outer_size, write_stdout};
pub use process::{born, is_exiting};
pub use pty::Window;
#[cfg(target_os = "linux")]
pub use sandbox::sandbox_support;
pub use socket::{Line, Listener, Peer, claim_dir, is_ours, remove_socket, sockets};
pub use stand_in::{StandIn, stand_in};
pub use stops::Stops;
pub use strays::strays;
pub use stream::{Hangups, Sink, Source, stdin, stdout};
pub use terminal::{become_program, kill_hard, suspend, terminal_identity, terminal_size};
pub use words::{finish_saying, say};
