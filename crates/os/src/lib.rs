//! The operating system: child processes, pipes, signals, control sockets. Differences between platforms are in this
//! crate only.
//!
//! A [`ChildProcesses`] starts, signals and reaps children. The caller names each child by a key; a raw process id leaves
//! this crate only for messages to people.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

pub use outlast_core::{exit::Exit, sandbox::Sandbox, terminal::Size};

mod calm;
pub mod cause;
pub mod offload;
mod own_files;
mod peer_user;
mod threaded;
#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

#[cfg(unix)]
use unix as platform;
#[cfg(windows)]
use windows as platform;

pub use calm::calm;
pub use own_files::{
    FileLock, check_own_dir, close_own_dir, lock_own, open_named, open_own, open_regular, read_named, read_own,
    read_regular,
};
pub use peer_user::peer_user;
pub use platform::{
    Announce, BlockingStream, ChildProcesses, Claim, Hangups, Keeper, Listener, Outer, Peer, Sink, Source, StandIn,
    Stops, Window, become_program, boot_time, claim_dir, claim_name, detach, finish_saying, give_back_code, is_exiting,
    is_ours, kill_hard, limit_memory, outer_size, remove_socket, room_for_descriptors, sockets, stand_in, start_stamp,
    stdin, stdout, strays, suspend, terminal_identity, terminal_size, thread_cpu_time, weigh, write_stdout,
};

#[cfg(unix)]
pub use unix::{
    KeeperProtocol, SavedChildProcesses, SavedOuter, TheirEnd, connection, handover, inherited_connection,
    start_background, stream_pair,
};
#[cfg(target_os = "linux")]
pub use unix::{family, open_files, sandbox_support};

/// The files that a child and its descendants have open. Empty on other systems than Linux.
#[cfg(not(target_os = "linux"))]
pub fn open_files(_leader: u32) -> Vec<PathBuf> {
    Vec::new()
}

/// What this system can enforce of a sandbox.
#[cfg(not(target_os = "linux"))]
pub fn sandbox_support() -> outlast_core::sandbox::Support {
    outlast_core::sandbox::Support::NotLinux
}

/// A process and its descendants, parents first. On other systems than Linux only the process itself.
#[cfg(not(target_os = "linux"))]
pub fn family(leader: u32) -> Vec<u32> {
    vec![leader]
}

/// The local user at the other end of a connection within this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerUser {
    /// This user, or the administrator.
    Same,
    Other,
    /// The system does not report the user.
    Unknown,
}

/// Writes a line to stderr without blocking on a slow reader (on Windows it waits 100 ms at most). Control characters
/// become visible, and text after a line feed is indented.
pub fn say(line: &str) {
    platform::say(&outlast_core::visible::line(line.trim_end_matches('\n')));
}

/// The user that this process runs as, for records.
#[cfg(unix)]
pub fn user() -> String {
    format!("uid {}", nix::unistd::geteuid())
}

#[cfg(windows)]
pub fn user() -> String {
    std::env::var("USERNAME").unwrap_or_else(|_| "local user".to_owned())
}

/// The environment variable that marks a child and its descendants, in whatever group or session they are.
pub const CHILD_TAG: &str = "OUTLAST_CHILD";

/// True if this user or the administrator owns the file, so that no other user controls what outlast does by it.
#[cfg(unix)]
pub fn is_trusted(file: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    file.uid() == nix::unistd::geteuid().as_raw() || file.uid() == 0
}

/// The standard library does not report owners on Windows, and directories that other users can write to are rare
/// there.
#[cfg(windows)]
pub fn is_trusted(_: &std::fs::Metadata) -> bool {
    true
}

/// The environment variable that holds the home directory of the user.
pub const HOME: &str = if cfg!(windows) { "USERPROFILE" } else { "HOME" };

/// The shell that runs a command line, and its option before that line.
pub const SHELL: (&str, &str) = if cfg!(windows) { ("cmd", "/C") } else { ("sh", "-c") };

/// The absolute path, with all symbolic links resolved.
pub fn real_path(path: &Path) -> io::Result<PathBuf> {
    let real = fs::canonicalize(path)?;
    Ok(if cfg!(windows) { plain(real) } else { real })
}

/// Removes the `\\?\` prefix: `cmd` and many other programs cannot use a working directory such as `\\?\C:\…`. A path
/// that is too long for the short form, or is not on a drive, stays as it is.
fn plain(path: PathBuf) -> PathBuf {
    const PLAIN_MAX: usize = 259;
    let short = path.to_str().and_then(|text| text.strip_prefix(r"\\?\"));
    let is_on_drive = |text: &&str| text.as_bytes().get(1..3) == Some(br":\") && text.len() <= PLAIN_MAX;
    short.filter(is_on_drive).map(PathBuf::from).unwrap_or(path)
}

/// The program to start, and how to start it.
#[derive(Clone, Debug)]
pub struct Order {
    /// A path, or a name that is looked up in `PATH`. A relative path is relative to `cwd`.
    pub program: OsString,
    pub args: Vec<OsString>,
    pub cwd: PathBuf,
    /// Added to the environment of outlast, or the whole environment of the child.
    pub env: Vec<(OsString, OsString)>,
    /// The child inherits no environment of outlast. A child with a terminal never inherits it.
    pub env_is_all: bool,
    /// The value of [`CHILD_TAG`]; unique among running children.
    pub tag: String,
    pub stdio: Stdio,
    /// Linux only: on other systems a child with a sandbox is not started.
    pub sandbox: Option<Sandbox>,
    /// The end of the lease under which the child runs: at this moment all its processes are killed, even if outlast
    /// hangs or is stopped. [`ChildProcesses::extend`] moves it. `None`: no lease.
    pub live_until: Option<BootTime>,
}

/// A moment on the clock of [`boot_time`]: the time since this computer was started, including time in suspend. Only
/// processes of the same run of the system can compare two of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootTime(pub Duration);

impl BootTime {
    pub fn now() -> BootTime {
        BootTime(boot_time())
    }

    pub fn is_past(self) -> bool {
        self <= BootTime::now()
    }

    /// How long it is until then; zero if it is past.
    pub fn left(self) -> Duration {
        self.0.saturating_sub(boot_time())
    }
}

/// What a child's standard streams are connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stdio {
    /// Three pipes to outlast.
    Piped,
    /// The standard streams of outlast.
    Inherit,
    /// A pipe to stdin; what the child writes is discarded.
    Input,
    /// An empty stdin; stdout and stderr share one pipe, returned as `stderr`, so that their order is kept.
    Build,
    /// A pseudo terminal of this size: input goes to `stdin`, output comes from `stdout`. The child is a session
    /// leader. A read may report the end of the terminal as an error.
    Terminal(Size),
}

/// The result of [`detach()`], in each of the two processes.
#[derive(Debug)]
pub enum Detached {
    /// The original process, with the text that the background process announced.
    Parent(String),
    /// The background process: it has no terminal, and the original process waits for its announcement.
    Child(Announce),
}

/// The result of [`stand_in()`], in each of the two processes. The stand-in restores the terminal, however the worker
/// ends.
#[derive(Debug)]
pub enum Standing {
    /// The stand-in, after the worker has ended or left: its exit code.
    Over(u8),
    /// The process that does the work.
    Worker(StandIn),
}

/// Events of the user's terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OuterEvent {
    Resized,
    /// A request to suspend this process (SIGTSTP).
    SuspendAsked,
    /// This process was continued; another process may have used the terminal meanwhile.
    Continued,
    /// The stand-in received a request to stop. This process received it too if it was sent to both.
    StopPassed,
    /// The stand-in received a hangup of the terminal.
    HangupPassed,
    /// The stand-in received a request to suspend.
    SuspendPassed,
    /// The stand-in has exited. The terminal has been restored.
    Abandoned,
}

/// The parent's ends of a child's pipes.
#[derive(Debug, Default)]
pub struct Pipes {
    pub stdin: Option<Sink>,
    pub stdout: Option<Source>,
    pub stderr: Option<Source>,
    /// Only for a child with a terminal.
    pub window: Option<Window>,
}

/// Events of a [`ChildProcesses`]. For each key: `StartFailed`, or `Started`, then `Exited`, then `Swept`.
#[derive(Debug)]
pub enum News {
    Started {
        key: u64,
        /// For messages only: the system may have reused the number by the time it is read.
        pid: u32,
    },
    StartFailed {
        key: u64,
        /// `NotFound`: no such program or interpreter. `NotADirectory`: the working directory. `PermissionDenied`:
        /// not executable. The text of the error says which.
        error: io::Error,
    },
    Exited {
        key: u64,
        exit: Exit,
    },
    /// The moment of [`Order::live_until`] came while the child ran: all its processes are being killed, and `Exited`
    /// follows.
    LeaseEnded {
        key: u64,
    },
    Swept {
        key: u64,
    },
    /// A child with a terminal has stopped itself, as at Ctrl-Z, and waits for [`Signal::Continue`].
    Stopped {
        key: u64,
    },
    /// A sentence for the log: a process of outlast itself was killed or stopped, and how outlast reacted.
    Noticed(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// The terminal is about to close.
    HangUp,
    /// Asks the process to end.
    Terminate,
    /// Ends the process.
    Kill,
    /// Continues a stopped process.
    Continue,
}

/// A process that was started by an outlast that has since exited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stray {
    /// For messages only.
    pub pid: u32,
    /// The value of [`CHILD_TAG`].
    pub tag: String,
    pub command: Vec<String>,
}

/// A request to stop this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stop {
    pub name: &'static str,
    pub number: i32,
}

impl Stop {
    /// The terminal has closed. This is no explicit request of a person to stop.
    pub fn is_hangup(self) -> bool {
        self.number == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_owner_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("name");
        let first = claim_name(&path).unwrap();
        assert!(first.is_some());
        assert!(claim_name(&path).unwrap().is_none());
        drop(first);
        assert!(!path.exists());
        assert!(claim_name(&path).unwrap().is_some());
    }

    #[test]
    fn paths_on_a_drive_are_plain() {
        let long = format!(r"\\?\C:\{}", "x".repeat(300));
        let table = [
            (r"\\?\C:\Users\me", r"C:\Users\me"),
            (r"\\?\C:\", r"C:\"),
            (r"\\?\UNC\server\share", r"\\?\UNC\server\share"),
            (r"\\server\share", r"\\server\share"),
            (r"C:\x", r"C:\x"),
            (&long, &long),
        ];
        for (path, expected) in table {
            assert_eq!(plain(PathBuf::from(path)), Path::new(expected));
        }
    }
}
