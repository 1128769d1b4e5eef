//! Windows: one Job Object for each child, streams on threads, pseudo consoles, named pipes.
//!
//! A job ends with its last handle, and only outlast has one, so no process in it outlives outlast, however outlast
//! ends: there is no keeper process. A process cannot leave its job, so the job holds all descendants, and the tag
//! only informs the child.

mod boot_time;
mod child_processes;
mod command_line;
mod detach;
mod job;
mod lease;
mod outer;
mod process;
mod pty;
mod socket;
mod stand_in;
mod stderr;
mod stops;
mod stream;
mod terminal;

pub use boot_time::{boot_time, thread_cpu_time};
pub use child_processes::{ChildProcesses, Keeper};
pub use detach::{Announce, Claim, claim_name, detach};
pub use outer::{Outer, outer_size, write_stdout};
pub use process::{is_exiting, start_stamp};
pub use pty::Window;
pub use socket::{BlockingStream, Listener, Peer, claim_dir, is_ours, remove_socket, sockets};
pub use stand_in::{StandIn, stand_in};
pub use stderr::finish_saying;
pub(crate) use stderr::say;
pub use stops::Stops;
pub use stream::{Hangups, Sink, Source, stdin, stdout};
pub use terminal::{become_program, kill_hard, suspend, terminal_identity, terminal_size};

/// Windows limits the number of handles by memory only.
pub fn room_for_descriptors(wanted: u64) -> u64 {
    wanted
}

/// Does nothing: a Windows process cannot limit its own memory this way.
pub fn limit_memory(_bytes: u64) {}

/// Does nothing: the system trims the memory of idle code by itself.
pub fn give_back_code() {}

/// Memory is not measured on Windows.
pub fn weigh(_leaders: &[u32]) -> Option<Vec<u64>> {
    None
}

/// Always `None`: a job ends all its processes, so there are no strays, and the environment of another process cannot
/// be read.
pub fn strays() -> Option<Vec<crate::Stray>> {
    None
}
