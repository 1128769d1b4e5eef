//! The clock that includes time in suspend, with an alarm on it, and the clock of the CPU time of a thread.
#![expect(unsafe_code, reason = "clocks and timer descriptors have no safe interface here")]

#[cfg(target_os = "linux")]
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use crate::BootTime;

#[cfg(target_os = "linux")]
const CLOCK: libc::clockid_t = libc::CLOCK_BOOTTIME;
/// On macOS this clock includes sleep, other than `CLOCK_UPTIME_RAW`.
#[cfg(target_vendor = "apple")]
const CLOCK: libc::clockid_t = libc::CLOCK_MONOTONIC_RAW;
#[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
const CLOCK: libc::clockid_t = libc::CLOCK_MONOTONIC;

/// The time since an arbitrary moment that is the same for all processes, at or before the start of the system. It
/// includes time in suspend.
pub fn boot_time() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec, which outlives it.
    let result = unsafe { libc::clock_gettime(CLOCK, &raw mut now) };
    assert_eq!(result, 0, "every supported kernel has this clock");
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

/// The CPU time that this thread has used. `None` if the system does not tell.
pub fn thread_cpu_time() -> Option<Duration> {
    let mut used = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec, which outlives it.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut used) };
    (result == 0).then(|| Duration::new(used.tv_sec.unsigned_abs(), used.tv_nsec.unsigned_abs() as u32))
}

/// How long a wait may take on systems that have no timer which counts suspend: the clock is read after each wait.
#[cfg(not(target_os = "linux"))]
const LOOK_MAX: Duration = Duration::from_millis(100);

/// Wakes a `poll` at a moment of the clock, also if the computer was suspended then: right after it resumes.
#[derive(Debug)]
pub(super) struct Alarm {
    #[cfg(target_os = "linux")]
    timer: OwnedFd,
}

impl Alarm {
    #[cfg(target_os = "linux")]
    pub(super) fn at(moment: BootTime) -> io::Result<Alarm> {
        // SAFETY: the call takes two numbers and returns a new descriptor, or -1.
        let fd = unsafe { libc::timerfd_create(CLOCK, libc::TFD_CLOEXEC | libc::TFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just created for this process.
        let alarm = Alarm { timer: unsafe { OwnedFd::from_raw_fd(fd) } };
        alarm.set(moment)?;
        Ok(alarm)
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn at(_moment: BootTime) -> io::Result<Alarm> {
        Ok(Alarm {})
    }

    /// Moves the alarm.
    #[cfg(target_os = "linux")]
    pub(super) fn set(&self, moment: BootTime) -> io::Result<()> {
        // Zero would disarm it. A moment beyond the range of the kernel is as good as never.
        let at = moment.0.max(Duration::from_nanos(1));
        let value = libc::timespec {
            tv_sec: at.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: at.subsec_nanos().into(),
        };
        let spec = libc::itimerspec { it_interval: libc::timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        // SAFETY: the descriptor is open, and the call reads one itimerspec, which outlives it.
        let result = unsafe {
            libc::timerfd_settime(
                self.timer.as_raw_fd(),
                libc::TFD_TIMER_ABSTIME,
                &raw const spec,
                std::ptr::null_mut(),
            )
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn set(&self, _moment: BootTime) -> io::Result<()> {
        Ok(())
    }

    /// Readable when the moment has come.
    #[cfg(target_os = "linux")]
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.timer.as_fd())
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The longest wait until the clock must be read again. `None` if the descriptor wakes the wait.
    #[cfg(target_os = "linux")]
    pub(super) fn wait_max(_moment: BootTime) -> Option<Duration> {
        None
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn wait_max(moment: BootTime) -> Option<Duration> {
        Some(moment.left().min(LOOK_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_goes_on_and_is_not_behind_the_one_that_stops_in_suspend() {
        let (first, second) = (boot_time(), boot_time());
        assert!(Duration::ZERO < first && first <= second);
        let mut running = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call writes one timespec, which outlives it.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut running) };
        let running = Duration::new(running.tv_sec.unsigned_abs(), running.tv_nsec.unsigned_abs() as u32);
        assert!(running <= boot_time() + Duration::from_millis(1), "{running:?}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn an_alarm_fires_at_its_moment_and_at_once_for_a_past_one() {
        use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
        let is_due = |alarm: &Alarm, wait: PollTimeout| {
            let fd = alarm.descriptor().unwrap();
            poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], wait).unwrap() == 1
        };
        let alarm = Alarm::at(BootTime(Duration::ZERO)).unwrap();
        assert!(is_due(&alarm, PollTimeout::ZERO));
        alarm.set(BootTime(boot_time() + Duration::from_secs(3600))).unwrap();
        assert!(!is_due(&alarm, PollTimeout::ZERO), "it was moved");
        let soon = BootTime(boot_time() + Duration::from_millis(20));
        alarm.set(soon).unwrap();
        assert!(is_due(&alarm, PollTimeout::NONE));
        assert!(soon.is_past());
        alarm.set(BootTime(Duration::MAX)).unwrap();
        assert!(!is_due(&alarm, PollTimeout::ZERO), "never");
    }
}
