//! Processes that are not our children, known by number: whether one is still the one it was.
#![expect(unsafe_code, reason = "processes have no safe interface")]

use std::os::windows::io::{AsRawHandle, HandleOrNull, OwnedHandle};

use windows_sys::Win32::{
    Foundation::{FILETIME, WAIT_TIMEOUT},
    System::Threading::{
        GetProcessTimes, OpenProcess, PROCESS_QUERY_LIMITED_INFORMATION, PROCESS_SYNCHRONIZE, WaitForSingleObject,
    },
};

/// A word that no other process of this number has, or nothing if there is no such process.
pub fn born(pid: u32) -> Option<String> {
    let rights = PROCESS_QUERY_LIMITED_INFORMATION | PROCESS_SYNCHRONIZE;
    // SAFETY: opening takes plain numbers; a null handle is an error, and any other is ours to close.
    let process = unsafe { HandleOrNull::from_raw_handle(OpenProcess(rights, 0, pid)) };
    let process = OwnedHandle::try_from(process).ok()?;
    let mut times = [FILETIME::default(); 4];
    let [birth, death, kernel, user] = &mut times;
    // SAFETY: the handle is open, and the calls write four plain values, which are there and ours.
    let is_told = unsafe {
        // One that ended is there for as long as somebody has a handle.
        WaitForSingleObject(process.as_raw_handle(), 0) == WAIT_TIMEOUT
            && GetProcessTimes(process.as_raw_handle(), birth, death, kernel, user) != 0
    };
    is_told.then(|| (u64::from(birth.dwHighDateTime) << 32 | u64::from(birth.dwLowDateTime)).to_string())
}

/// Here nothing tells, and a pipe's end and the exit come together.
pub fn is_exiting(_pid: u32) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_start() {
        let ours = born(std::process::id());
        assert!(ours.is_some());
        assert_eq!(born(std::process::id()), ours);
        assert_eq!(born(u32::MAX), None);
        let mut other = std::process::Command::new("cmd").args(["/c", "exit"]).spawn().unwrap();
        let pid = other.id();
        other.wait().unwrap();
        assert_eq!(born(pid), None, "it ended, though its number is still taken");
    }
}
