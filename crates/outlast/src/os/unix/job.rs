//! Makes an agent on a terminal a job that can be stopped. The kernel ignores SIGTSTP in an orphaned process group, which is
//! what the group of a session leader is: an agent that stops itself at Ctrl-Z would wait for a SIGCONT that never comes.
//!
//! A group is not orphaned while one member has a parent in the same session and in another group. So two small processes
//! are started in the agent's session: a guard in a group of its own, and below it a member of the agent's group. Both do
//! nothing, hear no signal but SIGKILL, and end with the agent.
#![expect(unsafe_code, reason = "processes between fork and exec may only use plain system calls")]

use std::io;

/// To be called between fork and exec, by the leader of a session. A kernel that cannot tell of the leader's end (before
/// Linux 5.3) gets no guard; the agent then works, and cannot be stopped.
pub(super) fn begin() -> io::Result<()> {
    // SAFETY: plain system calls on values of this process. The monitor that was forked has one thread, so the copy may
    // fork again; the copies never return into the program, and the parent reaps the first one.
    unsafe {
        let leader = libc::getpid();
        let watch = libc::syscall(libc::SYS_pidfd_open, leader, 0) as libc::c_int;
        if watch < 0 {
            return Ok(());
        }
        match libc::fork() {
            -1 => {}
            0 => {
                // The guard goes to the monitor, so that the agent has no child that it did not start.
                if libc::fork() == 0 {
                    guard(leader, watch);
                }
                libc::_exit(0);
            }
            first => {
                while libc::waitpid(first, std::ptr::null_mut(), 0) < 0 && *libc::__errno_location() == libc::EINTR {}
            }
        }
        libc::close(watch);
    }
    Ok(())
}

/// The guard's whole life: until the leader has ended.
///
/// # Safety
///
/// Only for a process that was just forked, has one thread, and has nothing else to do.
unsafe fn guard(leader: libc::pid_t, watch: libc::c_int) -> ! {
    // SAFETY: as the caller promises; the set and the descriptor are this function's own.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
        libc::prctl(libc::PR_SET_NAME, c"outlast-job".as_ptr());
        close_all_but(watch);
        libc::setpgid(0, 0);
        let guard = libc::getpid();
        let member = libc::fork();
        if member == 0 {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::setpgid(0, leader);
            while libc::getppid() == guard {
                libc::pause();
            }
            libc::_exit(0);
        }
        let mut ended = libc::pollfd { fd: watch, events: libc::POLLIN, revents: 0 };
        while libc::poll(&raw mut ended, 1, -1) < 1 {}
        if member > 0 {
            libc::kill(member, libc::SIGKILL);
            libc::waitpid(member, std::ptr::null_mut(), 0);
        }
        libc::_exit(0)
    }
}

/// Among them are the agent's terminal, which hangs up when all have closed it, and the pipe by which the monitor learns that
/// the agent was started.
///
/// # Safety
///
/// Only where nothing uses these descriptors any more.
unsafe fn close_all_but(kept: libc::c_int) {
    // SAFETY: closes numbers; one that is not open is an error that does not matter.
    unsafe {
        let last = libc::c_uint::MAX;
        let kept_number = kept as libc::c_uint;
        let below = kept_number == 0 || libc::syscall(libc::SYS_close_range, 0, kept_number - 1, 0) == 0;
        let above = libc::syscall(libc::SYS_close_range, kept_number + 1, last, 0) == 0;
        if !(below && above) {
            // Before Linux 5.9.
            for number in
                (0..libc::sysconf(libc::_SC_OPEN_MAX).clamp(256, 65536) as libc::c_int).filter(|number| *number != kept)
            {
                libc::close(number);
            }
        }
    }
}
