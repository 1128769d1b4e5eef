//! The stand-in: the process that the shell waits for, so that the worker can leave the console and continue without
//! it.
//!
//! The stand-in only waits for the worker, and exits with the same code. When the worker leaves the console, the
//! stand-in exits, and the shell shows its prompt. If the worker is killed, the stand-in restores the console.
//! Windows has no fork, so the worker is the same program started again, with the same arguments.
#![expect(unsafe_code, reason = "passes pipes to another process, and hears console events")]

use std::{
    env,
    ffi::OsStr,
    fs::File,
    io::{self, Read, Write},
    os::windows::io::{AsRawHandle, FromRawHandle},
    process::Command,
    task::{Context, Poll},
};

use bytes::BytesMut;
use windows_sys::{
    Win32::{
        Foundation::{HANDLE, HANDLE_FLAG_INHERIT, SetHandleInformation},
        Storage::FileSystem::{FILE_TYPE_PIPE, GetFileType},
        System::Console::{CTRL_BREAK_EVENT, CTRL_C_EVENT, SetConsoleCtrlHandler},
    },
    core::BOOL,
};

use super::{
    job::check,
    outer::{self, Before},
    stderr::say,
    stream::pipe,
};
use crate::{Standing, threaded::Reader};

/// Marks the worker, and names its two pipes to and from the stand-in.
const LINE: &str = "OUTLAST_STAND_IN";

const LEFT: u8 = b'L';
const ALTERNATE: u8 = b'A';
const NOT_ALTERNATE: u8 = b'a';

/// The worker's connection to the stand-in.
#[derive(Debug)]
pub struct StandIn {
    /// Carries no data; its end means that the stand-in has exited.
    hears: File,
    says: File,
}

/// Starts the worker, if this process is on a console and is not the worker itself. Must be called before any thread
/// starts. `name` is used in the message when the worker is killed.
pub fn stand_in(name: &'static str) -> io::Result<Option<Standing>> {
    if let Some(line) = env::var_os(LINE) {
        // SAFETY: there is no other thread yet.
        unsafe { env::remove_var(LINE) };
        if let Some(stand_in) = StandIn::at(&line) {
            return Ok(Some(Standing::Worker(stand_in)));
        }
    }
    if !outer::is_on_terminal() {
        return Ok(None);
    }
    let before = Before::look()?;
    let (hears, _lives) = pipe()?;
    let (heard, says) = pipe()?;
    inherit(&hears, true)?;
    inherit(&says, true)?;
    // SAFETY: the function is valid as long as the program runs.
    check(unsafe { SetConsoleCtrlHandler(Some(leave_to_the_worker), 1) })?;
    let mut worker = Command::new(env::current_exe()?)
        .args(env::args_os().skip(1))
        .env(LINE, format!("{}:{}", hears.as_raw_handle().addr(), says.as_raw_handle().addr()))
        .spawn()?;
    drop((hears, says));
    let mut is_alternate = false;
    for word in heard.bytes() {
        match word {
            Ok(LEFT) => return Ok(Some(Standing::Over(0))),
            Ok(ALTERNATE) => is_alternate = true,
            Ok(NOT_ALTERNATE) => is_alternate = false,
            Ok(_) => {}
            // The worker exits; the wait below returns.
            Err(_) => break,
        }
    }
    let mut code = worker.wait()?.code().unwrap_or(1);
    if before.give_back_after(is_alternate) {
        // The process that terminates another one chooses its exit code, which may be 0.
        code = if code == 0 { 1 } else { code };
        say(&format!("[outlast] {name} was ended (exit code {code})"));
    }
    Ok(Some(Standing::Over(u8::try_from(code).unwrap_or(1))))
}

impl StandIn {
    /// `None` if these are no pipes: then another program has set the variable.
    fn at(line: &OsStr) -> Option<StandIn> {
        let (hears, says) = line.to_str()?.split_once(':')?;
        Some(StandIn { hears: inherited(hears)?, says: inherited(says)? })
    }

    /// Registers with the current runtime.
    pub(super) fn attach(self) -> io::Result<Attached> {
        Ok(Attached { hears: Reader::begin("outlast-stand-in", self.hears)?, says: self.says })
    }
}

#[derive(Debug)]
pub(super) struct Attached {
    hears: Reader,
    says: File,
}

impl Attached {
    pub(super) fn note_alternate(&self, is_alternate: bool) {
        self.say(if is_alternate { ALTERNATE } else { NOT_ALTERNATE });
    }

    /// Tells the stand-in that the worker continues without the console.
    pub(super) fn leave(&self) {
        self.say(LEFT);
    }

    fn say(&self, word: u8) {
        // The stand-in always reads; its exit is noticed elsewhere.
        let _ = (&self.says).write(&[word]);
    }

    /// Ready when the stand-in has exited, so that the shell does not wait any more.
    pub(super) fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.hears.poll_read(cx, &mut BytesMut::with_capacity(1)).map(drop)
    }
}

/// Ignores Ctrl-C and Ctrl-Break: the worker is on the same console and receives them too.
unsafe extern "system" fn leave_to_the_worker(event: u32) -> BOOL {
    [CTRL_C_EVENT, CTRL_BREAK_EVENT].contains(&event).into()
}

fn inherited(number: &str) -> Option<File> {
    let handle = number.parse::<usize>().ok()? as HANDLE;
    // SAFETY: an invalid number is only queried; a pipe was passed on by the parent process, and no other code in
    // this process owns it.
    let file = unsafe {
        if GetFileType(handle) != FILE_TYPE_PIPE {
            return None;
        }
        File::from_raw_handle(handle)
    };
    inherit(&file, false).ok()?;
    Some(file)
}

pub(super) fn inherit(file: &File, is_inherited: bool) -> io::Result<()> {
    let flag = if is_inherited { HANDLE_FLAG_INHERIT } else { 0 };
    // SAFETY: the handle is open.
    check(unsafe { SetHandleInformation(file.as_raw_handle(), HANDLE_FLAG_INHERIT, flag) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pipes_are_accepted_as_the_connection_to_the_stand_in() {
        let (read, write) = pipe().unwrap();
        let file = tempfile::tempfile().unwrap();
        let numbers =
            |one: &File, other: &File| format!("{}:{}", one.as_raw_handle().addr(), other.as_raw_handle().addr());
        for line in ["", "1", "0:0", "x:y", &numbers(&file, &write), "123456789:8"] {
            assert!(StandIn::at(OsStr::new(line)).is_none(), "{line}");
        }
        let line = numbers(&read, &write);
        std::mem::forget((read, write));
        let StandIn { mut hears, says } = StandIn::at(OsStr::new(&line)).unwrap();
        (&says).write_all(&[LEFT]).unwrap();
        drop(says);
        let mut words = Vec::new();
        hears.read_to_end(&mut words).unwrap();
        assert_eq!(words, [LEFT]);
    }
}
