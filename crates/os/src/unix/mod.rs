//! Linux and macOS: a keeper process and a monitor for each child, pipes in the reactor, signals.

mod background;
mod boot_time;
mod child_processes;
mod descendants;
mod descriptors;
mod detach;
pub mod handover;
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
mod stderr;
mod stops;
mod strays;
mod stream;
mod terminal;
mod wire;

pub use background::{TheirEnd, connection, inherited_connection, start_background};
pub use boot_time::{boot_time, thread_cpu_time};
pub use child_processes::{ChildProcesses, Keeper, KeeperProtocol, SavedChildProcesses};
pub use descendants::weigh;
pub use descriptors::room_for_descriptors;
pub use detach::{Announce, Claim, claim_name, detach};
pub use memory::{give_back_code, limit_memory};
#[cfg(target_os = "linux")]
pub use open_files::{family, open_files};
pub use outer::{Outer, SavedOuter, outer_size, write_stdout};
pub use process::{is_exiting, start_stamp};
pub use pty::Window;
#[cfg(target_os = "linux")]
pub use sandbox::sandbox_support;
pub use socket::{BlockingStream, Listener, Peer, claim_dir, is_ours, remove_socket, sockets};
pub use stand_in::{StandIn, stand_in};
pub use stderr::finish_saying;
pub(crate) use stderr::say;
pub use stops::Stops;
pub use strays::strays;
pub use stream::{Hangups, Sink, Source, stdin, stdout, stream_pair};
pub use terminal::{become_program, kill_hard, suspend, terminal_identity, terminal_size};
