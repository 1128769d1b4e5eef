//! Processes that are not children of outlast: whether a process id still belongs to the same process. Nothing is
//! ended here.
#![expect(unsafe_code, reason = "processes have no safe interface")]

use std::os::windows::io::{AsRawHandle, HandleOrNull, OwnedHandle};

use windows_sys::Win32::{
    Foundation::{FILETIME, WAIT_TIMEOUT},
    System::Threading::{
        GetProcessTimes, OpenProcess, PROCESS_QUERY_LIMITED_INFORMATION, PROCESS_SYNCHRONIZE, WaitForSingleObject,
    },
};

/// A text that identifies this process among all processes with this number; `None` if there is no such process.
pub fn start_stamp(pid: u32) -> Option<String> {
    let rights = PROCESS_QUERY_LIMITED_INFORMATION | PROCESS_SYNCHRONIZE;
    // SAFETY: opening takes plain numbers; a null handle is an error, and any other handle is owned here.
    let process = unsafe { HandleOrNull::from_raw_handle(OpenProcess(rights, 0, pid)) };
    let process = OwnedHandle::try_from(process).ok()?;
    let mut times = [FILETIME::default(); 4];
    let [birth, death, kernel, user] = &mut times;
    // SAFETY: the handle is open, and the calls write four plain values, which outlive them.
    let is_told = unsafe {
        // An exited process exists as long as any process has a handle to it.
        WaitForSingleObject(process.as_raw_handle(), 0) == WAIT_TIMEOUT
            && GetProcessTimes(process.as_raw_handle(), birth, death, kernel, user) != 0
    };
    is_told.then(|| (u64::from(birth.dwHighDateTime) << 32 | u64::from(birth.dwLowDateTime)).to_string())
}

/// Windows does not report it; the end of a pipe and the exit come together.
pub fn is_exiting(_pid: u32) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_identified_by_its_start_time() {
        let ours = start_stamp(std::process::id());
        assert!(ours.is_some());
        assert_eq!(start_stamp(std::process::id()), ours);
        assert_eq!(start_stamp(u32::MAX), None);
        let mut other = std::process::Command::new("cmd").args(["/c", "exit"]).spawn().unwrap();
        let pid = other.id();
        other.wait().unwrap();
        assert_eq!(start_stamp(pid), None, "it ended, though its number is still taken");
    }
}
