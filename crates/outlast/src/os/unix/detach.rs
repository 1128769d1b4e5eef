//! To go on without the terminal we were started from, and to be the only one of a name.
#![expect(unsafe_code, reason = "forks")]

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
};

use nix::{
    fcntl::{Flock, FlockArg},
    unistd::{ForkResult, dup2_stderr, dup2_stdin, dup2_stdout, fork, setsid},
};

use super::stream::pipe;
use crate::os::Detached;

/// Tells who started us how we fare. Unsaid, it tells that we are gone.
#[derive(Debug)]
pub struct Announce(File);

impl Announce {
    pub fn say(mut self, text: &str) {
        // Whoever waited may be gone.
        let _ = self.0.write_all(text.as_bytes());
    }
}

/// Forks. The new process has a session of its own and no terminal; the old one waits for what it announces. Must come
/// before any thread.
pub fn detach() -> io::Result<Detached> {
    let (hear, tell): (OwnedFd, OwnedFd) = pipe()?;
    // SAFETY: there is no other thread yet, so the new process finds every lock free.
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

/// A name that is ours alone for as long as this is kept, or we live.
#[derive(Debug)]
pub struct Claim {
    path: PathBuf,
    _lock: Flock<File>,
}

/// None if somebody else has it.
pub fn claim_name(path: &Path) -> io::Result<Option<Claim>> {
    loop {
        let file = crate::os::open_own(OpenOptions::new().write(true).create(true).truncate(false), path)?;
        let ours = file.metadata()?;
        let Ok(lock) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else { return Ok(None) };
        // Its last owner may have removed it between our opening and locking it: then it is nobody's name any more.
        if fs::metadata(path).is_ok_and(|now| (now.dev(), now.ino()) == (ours.dev(), ours.ino())) {
            return Ok(Some(Claim { path: path.to_owned(), _lock: lock }));
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // While we still have the lock.
        let _ = fs::remove_file(&self.path);
    }
}
