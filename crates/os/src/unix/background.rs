//! Starts this program once more, as a process that continues when this one ends, and connections to it that need no name.
//! The new process leaves this one's session itself, with [`super::detach()`].

use std::{
    ffi::OsString,
    io::{self, Read},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    process::{Command, Stdio},
};

use super::socket::BlockingStream;

/// What the new process prints before it leaves; more is not read.
const ANNOUNCEMENT_MAX: u64 = 64 << 10;

/// One end of a connection, for a process that is started.
#[derive(Debug)]
pub struct TheirEnd(OwnedFd);

/// A connection to a process that is still to be started.
pub fn connection() -> io::Result<(BlockingStream, TheirEnd)> {
    let (ours, theirs) = UnixStream::pair()?;
    Ok((BlockingStream(ours), TheirEnd(theirs.into())))
}

/// The connection that this process was started with. Must be called before [`super::detach()`], which replaces stdin.
pub fn inherited_connection() -> io::Result<BlockingStream> {
    Ok(BlockingStream(UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?)))
}

/// Runs this program with these arguments and this environment, and returns what it announced. Blocks until then.
pub fn start_background(
    args: &[OsString],
    env: impl Iterator<Item = (OsString, OsString)>,
    connection: Option<TheirEnd>,
) -> io::Result<String> {
    #[cfg(target_os = "linux")]
    let program = "/proc/self/exe"; // The same program, even if its file was replaced.
    #[cfg(not(target_os = "linux"))]
    let program = std::env::current_exe()?;
    let mut command = Command::new(program);
    command.arg0("outlast").args(args).env_clear().envs(env);
    command.stdin(connection.map_or_else(Stdio::null, |end| Stdio::from(end.0)));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    // The command holds the other process's end of the connection, whose end could not be seen otherwise.
    drop(command);
    let mut said = String::new();
    let read = child.stdout.take().map_or(Ok(0), |stdout| stdout.take(ANNOUNCEMENT_MAX).read_to_string(&mut said));
    child.wait()?;
    read?;
    Ok(said)
}
