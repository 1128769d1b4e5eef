//! Job control for an agent on a terminal. The kernel ignores SIGTSTP in an orphaned process group, and the group of
//! a session leader is orphaned: an agent that stops itself at Ctrl-Z would wait for a SIGCONT that never comes.
//!
//! A group is not orphaned while one member has a parent in the same session and in another group. So two small
//! processes are started in the agent's session: a guard in its own group, and its child in the agent's group. Both
//! do nothing, block every signal but SIGKILL, and exit with the agent.
#![expect(unsafe_code, reason = "processes between fork and exec may only use plain system calls")]

use std::io;

/// Called between fork and exec, by a session leader. On a kernel without pidfds (before Linux 5.3) there is no
/// guard; the agent then works, but cannot be stopped.
pub(super) fn begin() -> io::Result<()> {
    // SAFETY: plain system calls on values of this process. The forked monitor has one thread, so this copy may fork
    // again; the copies never return into the program, and the parent reaps the first one.
    unsafe {
        let leader = libc::getpid();
        let watch = libc::syscall(libc::SYS_pidfd_open, leader, 0) as libc::c_int;
        if watch < 0 {
            return Ok(());
        }
        match libc::fork() {
            -1 => {}
            0 => {
                // The guard is reparented to the monitor, so that the agent has no child that it did not start.
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

/// The main function of the guard. It runs until the leader has exited.
///
/// # Safety
///
/// Only for a process that was just forked, has one thread, and has nothing else to do.
unsafe fn guard(leader: libc::pid_t, watch: libc::c_int) -> ! {
    // SAFETY: the caller guarantees the above; the set and the descriptor belong to this function.
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

/// Closes all descriptors but one. Among them are the agent's terminal, which hangs up when all processes have closed
/// it, and the pipe that tells the monitor that the agent was started.
///
/// # Safety
///
/// Only if no other code uses these descriptors any more.
unsafe fn close_all_but(kept: libc::c_int) {
    // SAFETY: closes numbers; closing a number that is not open is a harmless error.
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
