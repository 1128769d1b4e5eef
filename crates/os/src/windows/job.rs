//! A Job Object: all processes in it end with it. Processes are started in `child_processes.rs` and `pty.rs`.
#![expect(unsafe_code, reason = "job objects and suspended starts have no safe interface")]

use std::{
    io,
    os::windows::io::{AsRawHandle, HandleOrNull, OwnedHandle},
    ptr,
};

use windows_sys::Win32::{
    Foundation::{CloseHandle, HANDLE, INVALID_HANDLE_VALUE},
    System::{
        Diagnostics::ToolHelp::{
            CreateToolhelp32Snapshot, TH32CS_SNAPTHREAD, THREADENTRY32, Thread32First, Thread32Next,
        },
        JobObjects::{
            AssignProcessToJobObject, CreateJobObjectW, JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE,
            JOBOBJECT_EXTENDED_LIMIT_INFORMATION, JobObjectExtendedLimitInformation, SetInformationJobObject,
            TerminateJobObject,
        },
        Threading::{
            GetExitCodeProcess, INFINITE, OpenThread, ResumeThread, THREAD_SUSPEND_RESUME, TerminateProcess,
            WaitForSingleObject,
        },
    },
};

/// The exit code of the processes in a terminated job.
pub(super) const KILLED: u32 = 1;

/// A job whose processes end when its last handle closes.
#[derive(Debug)]
pub(super) struct Job(OwnedHandle);

impl Job {
    pub(super) fn new() -> io::Result<Job> {
        // SAFETY: null means no name and default rights; the result is a new handle, or null.
        let handle = unsafe { HandleOrNull::from_raw_handle(CreateJobObjectW(ptr::null(), ptr::null())) };
        let job = Job(OwnedHandle::try_from(handle).map_err(|_| io::Error::last_os_error())?);
        // SAFETY: a zeroed limit is valid and limits nothing; the call reads exactly its size.
        let result = unsafe {
            let mut limits: JOBOBJECT_EXTENDED_LIMIT_INFORMATION = std::mem::zeroed();
            limits.BasicLimitInformation.LimitFlags = JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE;
            SetInformationJobObject(
                job.raw(),
                JobObjectExtendedLimitInformation,
                (&raw const limits).cast(),
                size_of_val(&limits) as u32,
            )
        };
        check(result).map(|()| job)
    }

    pub(super) fn assign(&self, process: &OwnedHandle) -> io::Result<()> {
        // SAFETY: both handles are open.
        check(unsafe { AssignProcessToJobObject(self.raw(), process.as_raw_handle()) })
    }

    pub(super) fn terminate(&self) {
        // SAFETY: the handle is open. The call fails only if the job has no process.
        unsafe { TerminateJobObject(self.raw(), KILLED) };
    }

    fn raw(&self) -> HANDLE {
        self.0.as_raw_handle()
    }
}

/// Resumes a suspended process. std closes the handle of its first thread, so the thread must be looked up.
pub(super) fn resume(pid: u32) -> io::Result<()> {
    // SAFETY: the snapshot and thread handles are open where they are used and closed once; the size in the entry is
    // its real size.
    unsafe {
        let snapshot = CreateToolhelp32Snapshot(TH32CS_SNAPTHREAD, 0);
        if snapshot == INVALID_HANDLE_VALUE {
            return Err(io::Error::last_os_error());
        }
        let mut entry: THREADENTRY32 = std::mem::zeroed();
        entry.dwSize = size_of::<THREADENTRY32>() as u32;
        let mut result = Err(io::Error::other("the new process has no thread"));
        let mut is_entry = Thread32First(snapshot, &raw mut entry) != 0;
        while is_entry {
            if entry.th32OwnerProcessID == pid {
                let thread = OpenThread(THREAD_SUSPEND_RESUME, 0, entry.th32ThreadID);
                result = if thread.is_null() || ResumeThread(thread) == u32::MAX {
                    Err(io::Error::last_os_error())
                } else {
                    Ok(())
                };
                if !thread.is_null() {
                    CloseHandle(thread);
                }
                break;
            }
            is_entry = Thread32Next(snapshot, &raw mut entry) != 0;
        }
        CloseHandle(snapshot);
        result
    }
}

/// Ends a process that is in no job.
pub(super) fn terminate(process: &OwnedHandle) {
    // SAFETY: the handle is open. The call fails only if the process has exited.
    unsafe { TerminateProcess(process.as_raw_handle(), KILLED) };
}

/// Waits for the exit of a process, and returns its exit code.
pub(super) fn wait_for(process: &OwnedHandle) -> i32 {
    let mut code = 0;
    // SAFETY: the handle is open, and the second call writes one number, which outlives the call.
    let is_told = unsafe {
        WaitForSingleObject(process.as_raw_handle(), INFINITE);
        GetExitCodeProcess(process.as_raw_handle(), &raw mut code) != 0
    };
    if is_told { code.cast_signed() } else { -1 }
}

pub(super) fn check(result: i32) -> io::Result<()> {
    if result == 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
