//! The console on stdout, and running or ending other programs.
#![expect(unsafe_code, reason = "consoles and processes have no safe interface")]

use std::{
    io,
    os::windows::io::{AsRawHandle, HandleOrNull, OwnedHandle},
    path::Path,
};

use windows_sys::Win32::System::{
    Console::{
        CONSOLE_SCREEN_BUFFER_INFO, ENABLE_VIRTUAL_TERMINAL_PROCESSING, GetConsoleMode, GetConsoleScreenBufferInfo,
        GetStdHandle, STD_OUTPUT_HANDLE, SetConsoleMode,
    },
    Threading::{OpenProcess, PROCESS_TERMINATE, TerminateProcess},
};

use super::job::KILLED;

/// Columns and rows of the console on stdout; `None` if stdout is no console or does not support escape sequences.
pub fn terminal_size() -> Option<(u16, u16)> {
    // SAFETY: the handle belongs to the process and stays open; a handle that is no console is an error; each call
    // writes one plain value, which outlives the call.
    let info = unsafe {
        let console = GetStdHandle(STD_OUTPUT_HANDLE);
        let mut mode = 0;
        let mut info: CONSOLE_SCREEN_BUFFER_INFO = std::mem::zeroed();
        let draws = GetConsoleMode(console, &raw mut mode) != 0
            && SetConsoleMode(console, mode | ENABLE_VIRTUAL_TERMINAL_PROCESSING) != 0
            && GetConsoleScreenBufferInfo(console, &raw mut info) != 0;
        draws.then_some(info)?
    };
    let columns = u16::try_from(info.srWindow.Right - info.srWindow.Left + 1).ok()?;
    let rows = u16::try_from(info.srWindow.Bottom - info.srWindow.Top + 1).ok()?;
    (columns > 0 && rows > 0).then_some((columns, rows))
}

/// Kills a process by its process id. Only for `outlast demo`, which crashes the demo's server. All other code ends a
/// child through its job, which cannot end an unrelated process.
pub fn kill_hard(pid: u32) -> io::Result<()> {
    // SAFETY: opening takes plain numbers; a null handle is an error, and any other handle is owned here.
    let process = unsafe { HandleOrNull::from_raw_handle(OpenProcess(PROCESS_TERMINATE, 0, pid)) };
    let process = OwnedHandle::try_from(process).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: the handle is open and has the right to terminate.
    match unsafe { TerminateProcess(process.as_raw_handle(), KILLED) } {
        0 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Does nothing: Windows has no job control.
pub fn suspend() {}

/// Runs another program, waits for it and exits with its code, because a Windows process cannot replace itself.
/// Returns only if the program could not be started, with the reason.
pub fn become_program(program: &Path, args: &[&str]) -> io::Error {
    match std::process::Command::new(program).args(args).status() {
        Ok(status) => std::process::exit(status.code().unwrap_or(1)),
        Err(error) => error,
    }
}

/// Always `None`: a console has no name that outlives a program.
pub fn terminal_identity() -> Option<String> {
    None
}
