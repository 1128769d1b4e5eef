//! Continues in the background without the terminal, and claims a name for one process.
#![expect(unsafe_code, reason = "forks")]

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

use nix::{
    fcntl::{Flock, FlockArg},
    unistd::{ForkResult, dup2_stderr, dup2_stdin, dup2_stdout, fork, setsid},
};

use super::{
    handover::{Handover, Received},
    stream::pipe,
};
use crate::Detached;

/// Reports to the process that started this one. If it is dropped unused, that process sees that this one has ended.
#[derive(Debug)]
pub struct Announce(File);

impl Announce {
    pub fn say(mut self, text: &str) {
        // The waiting process may have exited.
        let _ = self.0.write_all(text.as_bytes());
    }
}

/// Forks. The new process has its own session and no terminal; the original process waits for its announcement. Must
/// be called before any thread starts.
pub fn detach() -> io::Result<Detached> {
    let (hear, tell): (OwnedFd, OwnedFd) = pipe()?;
    // SAFETY: there is no other thread yet, so every lock is free in the new process.
    match unsafe { fork() }? {
        ForkResult::Parent { .. } => {
            drop(tell);
            let mut said = String::new();
            File::from(hear).read_to_string(&mut said)?;
            Ok(Detached::Parent(said))
        }
        ForkResult::Child => {
            drop(hear);
            setsid()?;
            let null = File::options().read(true).write(true).open("/dev/null")?;
            dup2_stdin(&null)?;
            dup2_stdout(&null)?;
            dup2_stderr(&null)?;
            Ok(Detached::Child(Announce(File::from(tell))))
        }
    }
}

/// A name that only this process has, until this is dropped or the process ends.
#[derive(Debug)]
pub struct Claim {
    path: PathBuf,
    lock: Flock<File>,
}

/// `None` if another process has the name.
pub fn claim_name(path: &Path) -> io::Result<Option<Claim>> {
    loop {
        let file = crate::open_own(OpenOptions::new().write(true).create(true).truncate(false), path)?;
        let ours = file.metadata()?;
        let Ok(lock) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else { return Ok(None) };
        // The last owner may have removed the file between the opening and the locking; then the lock claims nothing.
        if fs::metadata(path).is_ok_and(|now| (now.dev(), now.ino()) == (ours.dev(), ours.ino())) {
            return Ok(Some(Claim { path: path.to_owned(), lock }));
        }
    }
}

impl Claim {
    /// Keeps the lock for the next program.
    pub fn keep(&self, handover: &mut Handover) -> i32 {
        handover.keep(self.lock.as_fd())
    }

    /// The claim that the last program kept, with the same path.
    pub fn restore(received: &mut Received, number: i32, path: &Path) -> io::Result<Claim> {
        // The lock belongs to the open file, so this process has it still.
        let lock = Flock::lock(File::from(received.take(number)?), FlockArg::LockExclusiveNonblock);
        Ok(Claim { path: path.to_owned(), lock: lock.map_err(|(_, error)| error)? })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Removed while the lock is still held.
        let _ = fs::remove_file(&self.path);
    }
}
