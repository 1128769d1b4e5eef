//! The clock that includes time in suspend.
#![expect(unsafe_code, reason = "the clock has no safe interface")]

use std::time::Duration;

use windows_sys::Win32::System::SystemInformation::GetTickCount64;

/// The time since the system was started, including time in suspend. It moves in steps of 10 to 16 ms.
pub fn boot_time() -> Duration {
    // SAFETY: the call takes nothing and returns a number.
    Duration::from_millis(unsafe { GetTickCount64() })
}

/// The CPU time that this thread has used: Windows counts it only in steps of 10 to 16 ms, so it is not read.
pub fn thread_cpu_time() -> Option<Duration> {
    None
}
