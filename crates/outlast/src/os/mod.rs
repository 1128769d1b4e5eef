//! The operating system: child processes, pipes, signals, control sockets. Platforms differ only in here.
//!
//! Children are started, signalled and reaped by a [`Household`]. It is named by keys the caller
//! chooses, so no raw process id leaves this room except for words to people.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

pub use outlast_core::{sandbox::Sandbox, terminal::Size};

mod calm;
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
pub use own_files::{check_own_dir, close_own_dir, open_own, open_regular, read_own, read_regular};
pub use peer_user::peer_user;
pub use platform::{
    Announce, Claim, Hangups, Household, Keeper, Line, Listener, Outer, Peer, Sink, Source, StandIn, Stops, Window,
    become_program, born, claim_dir, claim_name, detach, finish_saying, give_back_code, is_exiting, is_ours, kill_hard,
    outer_size, remove_socket, room_for_descriptors, sockets, stand_in, stdin, stdout, strays, suspend,
    terminal_identity, terminal_size, weigh, write_stdout,
};

#[cfg(target_os = "linux")]
pub use unix::{family, open_files, sandbox_support};

/// The files that a child and those below it have open; elsewhere nobody tells.
#[cfg(not(target_os = "linux"))]
pub fn open_files(_leader: u32) -> Vec<PathBuf> {
    Vec::new()
}

/// What this system can enforce of a sandbox.
#[cfg(not(target_os = "linux"))]
pub fn sandbox_support() -> outlast_core::sandbox::Support {
    outlast_core::sandbox::Support::NotLinux
}

/// A process and those below it, parents first; elsewhere only the process itself.
#[cfg(not(target_os = "linux"))]
pub fn family(leader: u32) -> Vec<u32> {
    vec![leader]
}

/// The local user at the other end of a connection within this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerUser {
    /// Us, or the administrator.
    Same,
    Other,
    /// The system does not tell.
    Unknown,
}

/// A line on stderr, without ever waiting for its reader. Nothing in it steers a terminal or looks like a line of its own.
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

/// The environment variable by which a child's descendants are known, wherever they went.
pub const CHILD_TAG: &str = "OUTLAST_CHILD";

/// Whether a file belongs to us or to the administrator, so that nobody else decides what we do by it.
#[cfg(unix)]
pub fn is_trusted(file: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    file.uid() == nix::unistd::geteuid().as_raw() || file.uid() == 0
}

/// Directories that others may write to are rare here, and owners are not told by the standard library.
#[cfg(windows)]
pub fn is_trusted(_: &std::fs::Metadata) -> bool {
    true
}

/// The variable that says where the user's own files are.
pub const HOME: &str = if cfg!(windows) { "USERPROFILE" } else { "HOME" };

/// What runs a line as people type it, and the word before the line.
pub const SHELL: (&str, &str) = if cfg!(windows) { ("cmd", "/C") } else { ("sh", "-c") };

/// Where a path leads, with nothing in it that could lead elsewhere later.
pub fn real_path(path: &Path) -> io::Result<PathBuf> {
    let real = fs::canonicalize(path)?;
    Ok(if cfg!(windows) { plain(real) } else { real })
}

/// As programs know it: `cmd` and many others cannot work in a directory that is named `\\?\C:\…`. A path that is too long
/// for the short form, or not on a drive, stays.
fn plain(path: PathBuf) -> PathBuf {
    const PLAIN_MAX: usize = 259;
    let short = path.to_str().and_then(|text| text.strip_prefix(r"\\?\"));
    let is_on_drive = |text: &&str| text.as_bytes().get(1..3) == Some(br":\") && text.len() <= PLAIN_MAX;
    short.filter(is_on_drive).map(PathBuf::from).unwrap_or(path)
}

/// What to start, and how.
#[derive(Clone, Debug)]
pub struct Order {
    /// A path, or a name to be found on `PATH`. A relative path starts at `cwd`.
    pub program: OsString,
    pub args: Vec<OsString>,
    pub cwd: PathBuf,
    /// Additions to our own environment, or all that the child has.
    pub env: Vec<(OsString, OsString)>,
    /// It gets nothing of our own environment. A child with a terminal never does.
    pub env_is_all: bool,
    /// The value of [`CHILD_TAG`]. No two living children share one.
    pub tag: String,
    pub stdio: Stdio,
    /// Linux only: elsewhere such a child is not started.
    pub sandbox: Option<Sandbox>,
}

/// Where a child's standard streams lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stdio {
    /// Three pipes to us.
    Piped,
    /// Our own three streams.
    Inherit,
    /// Nothing to read; both outputs in one pipe, handed back as `stderr`, so that they keep their order.
    Build,
    /// A terminal of this size, the child's own: what is typed goes to `stdin`, what is shown comes from `stdout`. The
    /// child leads a session. An end may be an error too.
    Terminal(Size),
}

/// Two of us, where there was one.
#[derive(Debug)]
pub enum Detached {
    /// We are where we were, and this is what the other one announced.
    Parent(String),
    /// We have no terminal, and somebody waits to hear how we fare.
    Child(Announce),
}

/// Two of us, so that one can give the terminal back whatever becomes of the other.
#[derive(Debug)]
pub enum Standing {
    /// We are the one who stood in, and it is over: our exit code.
    Over(u8),
    /// We are to do the work.
    Worker(StandIn),
}

/// What may happen to the terminal we are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OuterEvent {
    Resized,
    /// Somebody wants us to stop for a while.
    SuspendAsked,
    /// We go on; the terminal may have been somebody else's.
    Continued,
    /// Whoever stands in for us was told to stop; so were we, if it was meant for both.
    StopPassed,
    /// The same of a terminal that is gone.
    HangupPassed,
    /// The same of `SuspendAsked`.
    SuspendPassed,
    /// Whoever stood in for us is gone. The terminal has been given back.
    Abandoned,
}

/// Our ends of a child's pipes.
#[derive(Debug, Default)]
pub struct Pipes {
    pub stdin: Option<Sink>,
    pub stdout: Option<Source>,
    pub stderr: Option<Source>,
    /// Of a child with a terminal.
    pub window: Option<Window>,
}

/// What a [`Household`] has to tell. For each key: `StartFailed`, or `Started`, then `Exited`, then `Swept`.
#[derive(Debug)]
pub enum News {
    Started {
        key: u64,
        /// For words only: it may be someone else's by the time it is read.
        pid: u32,
    },
    StartFailed {
        key: u64,
        /// `NotFound`: no such program (or no such interpreter). `NotADirectory`: the working directory.
        /// `PermissionDenied`: not executable. The words say which.
        error: io::Error,
    },
    Exited {
        key: u64,
        exit: Exit,
    },
    Swept {
        key: u64,
    },
    /// A child with a terminal stopped itself, as at Ctrl-Z, and waits for [`Signal::Continue`].
    Stopped {
        key: u64,
    },
    /// A sentence for the log: a process of outlast's own was killed or stopped, and what was done about it.
    Noticed(String),
    /// Nothing can be started or signalled any more. Told once.
    KeeperLost,
}

/// How a process ended, as the kernel told it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Code(i32),
    Signal(i32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// The terminal is about to go.
    HangUp,
    /// Asks to end.
    Terminate,
    /// Ends.
    Kill,
    /// Goes on, if it was stopped.
    Continue,
}

/// A process that an outlast started and did not live to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stray {
    /// For words only.
    pub pid: u32,
    /// The value of [`CHILD_TAG`].
    pub tag: String,
    pub command: Vec<String>,
}

/// Someone wants us to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stop {
    pub name: &'static str,
    pub number: i32,
}

impl Stop {
    /// The terminal is gone, and with it perhaps the person, but nobody said so.
    pub fn is_hangup(self) -> bool {
        self.number == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_owners_at_a_time() {
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
