//! Processes that are not children of outlast: whether a process id still belongs to the same process. Signalling is
//! not done here.

#[cfg(target_os = "macos")]
#[expect(unsafe_code, reason = "the start of a process is told only by proc_pidinfo")]
mod start {
    /// Microseconds since 1970.
    pub(super) fn of(pid: u32) -> Option<String> {
        let mut info = std::mem::MaybeUninit::<libc::proc_bsdinfo>::zeroed();
        let size = libc::c_int::try_from(size_of::<libc::proc_bsdinfo>()).ok()?;
        let pid = libc::c_int::try_from(pid).ok()?;
        // SAFETY: the pointer and size describe memory of this function, which the kernel only writes to.
        let filled = unsafe { libc::proc_pidinfo(pid, libc::PROC_PIDTBSDINFO, 0, info.as_mut_ptr().cast(), size) };
        if filled != size {
            return None;
        }
        // SAFETY: the kernel filled all of it, and the zeros before that are a valid value too.
        let info = unsafe { info.assume_init() };
        Some(format!("{}.{:06}", info.pbi_start_tvsec, info.pbi_start_tvusec))
    }
}

#[cfg(target_os = "linux")]
mod start {
    use std::fs;

    /// Clock ticks since the boot of the machine, and the id of that boot: process ids and ticks start again with
    /// each boot.
    pub(super) fn of(pid: u32) -> Option<String> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name is in parentheses and may itself contain blanks and parentheses.
        let ticks = stat.rsplit_once(") ")?.1.split(' ').nth(19)?.to_owned();
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Some(format!("{}-{ticks}", boot.split('-').next().unwrap_or_default()))
    }
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
mod start {
    use nix::{errno::Errno, sys::signal::kill, unistd::Pid};

    /// Reports only whether the process exists: a reused process id cannot be distinguished here.
    pub(super) fn of(pid: u32) -> Option<String> {
        let pid = Pid::from_raw(i32::try_from(pid).ok()?);
        (kill(pid, None) != Err(Errno::ESRCH)).then(String::new)
    }
}

/// Whether this process has begun to exit, even if its exit is not visible yet. Only Linux reports it.
#[cfg(target_os = "linux")]
pub fn is_exiting(pid: u32) -> bool {
    /// `PF_EXITING` of the kernel: set before the process closes its files.
    const EXITING: u64 = 4;
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    let flags = stat.rsplit_once(") ").and_then(|(_, fields)| fields.split(' ').nth(6)?.parse::<u64>().ok());
    flags.is_some_and(|flags| flags & EXITING != 0)
}

#[cfg(not(target_os = "linux"))]
pub fn is_exiting(_pid: u32) -> bool {
    false
}

/// A text that identifies this process among all processes with this number; `None` if there is no such process.
pub fn start_stamp(pid: u32) -> Option<String> {
    start::of(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_identified_by_its_start_time() {
        let ours = start_stamp(std::process::id());
        assert!(ours.is_some());
        assert_eq!(start_stamp(std::process::id()), ours);
        assert_ne!(start_stamp(1), ours);
        assert_eq!(start_stamp(u32::MAX), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_that_is_not_reaped_yet_has_begun_to_exit() {
        let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        assert!(!is_exiting(child.id()));
        let end = nix::sys::wait::WaitPidFlag::WEXITED | nix::sys::wait::WaitPidFlag::WNOWAIT;
        drop(child.stdin.take());
        nix::sys::wait::waitid(nix::sys::wait::Id::Pid(nix::unistd::Pid::from_raw(child.id() as i32)), end).unwrap();
        assert!(is_exiting(child.id()));
        child.wait().unwrap();
        assert!(!is_exiting(child.id()), "it is gone");
    }
}
