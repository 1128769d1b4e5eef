//! Windows: one Job Object for each child, streams on threads, pseudo consoles, named pipes.
//!
//! A job ends with its last handle, and only we have one, so nothing outlives us however we go: there is no
//! keeper process. Nobody can leave a job, so its members are the whole family, and the tag is only for them
//! to read.

mod command_line;
mod detach;
mod household;
mod job;
mod outer;
mod process;
mod pty;
mod socket;
mod stand_in;
mod stops;
mod stream;
mod terminal;
mod words;

pub use detach::{Announce, Claim, claim_name, detach};
pub use household::{Household, Keeper};
pub use outer::{Outer, outer_size, write_stdout};
pub use process::{born, is_exiting};
pub use pty::Window;
pub use socket::{Line, Listener, Peer, claim_dir, is_ours, remove_socket, sockets};
pub use stand_in::{StandIn, stand_in};
pub use stops::Stops;
pub use stream::{Hangups, Sink, Source, stdin, stdout};
pub use terminal::{become_program, kill_hard, suspend, terminal_identity, terminal_size};
pub use words::{finish_saying, say};

/// Handles are bounded by memory alone.
pub fn room_for_descriptors(wanted: u64) -> u64 {
    wanted
}

/// The system looks after our code by itself.
pub fn give_back_code() {}

/// Nothing is weighed here.
pub fn weigh(_leaders: &[u32]) -> Option<Vec<u64>> {
    None
}

/// A job ends all that is in it, so there are none; and nobody shows us another's environment.
pub fn strays() -> Option<Vec<crate::os::Stray>> {
    None
}
