//! Continues in the background without the console, and claims a name for one process.
#![expect(unsafe_code, reason = "takes over a handle of its own process")]

use std::{
    env,
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    os::windows::{fs::OpenOptionsExt, io::FromRawHandle, process::CommandExt},
    path::Path,
    process::{Command, Stdio},
};

use windows_sys::Win32::{
    Foundation::{ERROR_ACCESS_DENIED, ERROR_SHARING_VIOLATION, GENERIC_WRITE},
    Storage::FileSystem::{DELETE, FILE_FLAG_DELETE_ON_CLOSE},
    System::{
        Console::{GetStdHandle, STD_OUTPUT_HANDLE},
        Threading::{CREATE_BREAKAWAY_FROM_JOB, CREATE_NEW_PROCESS_GROUP, DETACHED_PROCESS},
    },
};

use super::{outer::forget_streams, stand_in::inherit, stream::keep_own_streams};
use crate::Detached;

/// The environment variable that marks the background process.
const BACKGROUND: &str = "OUTLAST_BACKGROUND";

/// Reports to the process that started this one. If it is dropped unused, that process sees that this one has ended.
#[derive(Debug)]
pub struct Announce(File);

impl Announce {
    pub fn say(mut self, text: &str) {
        // The waiting process may have exited.
        let _ = self.0.write_all(text.as_bytes());
    }
}

/// Starts the same program again, with the same arguments and without a console; the new process calls this function
/// too. The original process waits for its announcement. Must be called before any thread starts.
pub fn detach() -> io::Result<Detached> {
    if env::var_os(BACKGROUND).is_some() {
        // SAFETY: there is no other thread yet.
        unsafe { env::remove_var(BACKGROUND) };
        // SAFETY: the parent created this handle for the announcement, and no other code has it: stdout is the null
        // device from the next line on, and nothing was written to it before.
        let announce = unsafe { File::from_raw_handle(GetStdHandle(STD_OUTPUT_HANDLE)) };
        forget_streams()?;
        inherit(&announce, false)?;
        return Ok(Detached::Child(Announce(announce)));
    }
    keep_own_streams();
    let begin = |flags: u32| {
        Command::new(env::current_exe()?)
            .args(env::args_os().skip(1))
            .env(BACKGROUND, "1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .creation_flags(DETACHED_PROCESS | CREATE_NEW_PROCESS_GROUP | flags)
            .spawn()
    };
    // The job of this process may allow a breakaway or not.
    let mut other = match begin(CREATE_BREAKAWAY_FROM_JOB) {
        Err(error) if error.raw_os_error() == Some(ERROR_ACCESS_DENIED.cast_signed()) => begin(0)?,
        other => other?,
    };
    let mut said = String::new();
    if let Some(mut stdout) = other.stdout.take() {
        stdout.read_to_string(&mut said)?;
    }
    Ok(Detached::Parent(said))
}

/// A name that only this process has, until this is dropped or the process ends. The file is deleted with its handle.
#[derive(Debug)]
pub struct Claim {
    _file: File,
}

/// `None` if another process has the name.
pub fn claim_name(path: &Path) -> io::Result<Option<Claim>> {
    let opened = OpenOptions::new()
        .create(true)
        .write(true)
        .access_mode(GENERIC_WRITE | DELETE)
        .share_mode(0)
        .custom_flags(FILE_FLAG_DELETE_ON_CLOSE)
        .open(path);
    match opened {
        Ok(file) => Ok(Some(Claim { _file: file })),
        Err(error) if error.raw_os_error() == Some(ERROR_SHARING_VIOLATION.cast_signed()) => Ok(None),
        Err(error) => Err(error),
    }
}
