//! Finds descendants that left their process group. This works on Linux only, where orphans are reparented to the
//! nearest subreaper and `/proc` shows the parents; on other systems only the group of a child is known.

use nix::{sys::signal::Signal, unistd::Pid};

/// Signals every running descendant of this process that is not in the excepted group. Returns how many running
/// descendants there are, including that group.
#[cfg(target_os = "linux")]
pub(super) fn signal(except_group: Option<Pid>, signal: Signal) -> usize {
    linux::signal(except_group, signal)
}

#[cfg(not(target_os = "linux"))]
pub(super) fn signal(_except_group: Option<Pid>, _signal: Signal) -> usize {
    0
}

/// The number of running descendants of this process.
#[cfg(target_os = "linux")]
pub(super) fn count() -> usize {
    linux::count()
}

#[cfg(not(target_os = "linux"))]
pub(super) fn count() -> usize {
    0
}

/// Kills the orphans of monitors that are gone: all descendants of the roots (the keeper, outlast) except the roots,
/// the processes in `left_alone` and the descendants of those. Returns how many were alive.
#[cfg(target_os = "linux")]
pub(super) fn kill_unmonitored(roots: &[Pid], left_alone: &[Pid]) -> usize {
    linux::kill_unmonitored(roots, left_alone)
}

#[cfg(not(target_os = "linux"))]
pub(super) fn kill_unmonitored(_roots: &[Pid], _left_alone: &[Pid]) -> usize {
    0
}

/// The resident memory of each of these children, in bytes, with all its descendants and its process group.
#[cfg(target_os = "linux")]
pub fn weigh(leaders: &[u32]) -> Option<Vec<u64>> {
    linux::weigh(leaders)
}

/// Only Linux reports it.
#[cfg(not(target_os = "linux"))]
pub fn weigh(_leaders: &[u32]) -> Option<Vec<u64>> {
    None
}

#[cfg(target_os = "linux")]
mod linux {
    #![expect(unsafe_code, reason = "nix has no pidfd calls")]

    use std::{
        fs,
        io::{self, Read},
        os::fd::{AsRawFd, FromRawFd, OwnedFd},
    };

    use nix::{
        sys::signal::{Signal, kill},
        unistd::{Pid, SysconfVar, getpid, sysconf},
    };

    /// One line of `/proc/PID/stat`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Process {
        pid: i32,
        parent: i32,
        group: i32,
        /// Together with the pid, this identifies a process for good.
        started: u64,
        is_alive: bool,
        /// Resident memory, in pages.
        pages: u64,
    }

    #[derive(Debug, PartialEq, Eq)]
    enum Descent {
        Ours,
        Others,
        /// The chain of parents broke off at this process: its parent exited during the scan.
        Broken(i32),
    }

    pub(super) fn signal(except_group: Option<Pid>, signal: Signal) -> usize {
        let found = below(&[getpid().as_raw()], &[]);
        for process in found.iter().filter(|process| except_group != Some(Pid::from_raw(process.group))) {
            signal_exactly(process, signal);
        }
        found.len()
    }

    pub(super) fn count() -> usize {
        below(&[getpid().as_raw()], &[]).len()
    }

    pub(super) fn kill_unmonitored(roots: &[Pid], left_alone: &[Pid]) -> usize {
        let numbers = |pids: &[Pid]| pids.iter().map(|pid| pid.as_raw()).collect::<Vec<i32>>();
        let found = below(&numbers(roots), &numbers(left_alone));
        found.iter().for_each(|process| signal_exactly(process, Signal::SIGKILL));
        found.len()
    }

    /// Every running descendant of the roots, without the roots themselves and without `left_alone`.
    fn below(roots: &[i32], left_alone: &[i32]) -> Vec<Process> {
        let processes = look();
        let is_ours = |process: &&Process| {
            process.is_alive
                && match descent(roots, left_alone, &processes, process) {
                    Descent::Ours => true,
                    Descent::Others => false,
                    // It has a new parent by now. If that is a root, it is an orphan, and so are its descendants.
                    Descent::Broken(at) => read(at).is_some_and(|now| roots.contains(&now.parent)),
                }
        };
        processes.iter().filter(is_ours).copied().collect()
    }

    pub(super) fn weigh(leaders: &[u32]) -> Option<Vec<u64>> {
        let page = u64::try_from(sysconf(SysconfVar::PAGE_SIZE).ok()??).ok()?;
        let processes = look();
        let mut weights = vec![0; leaders.len()];
        for process in &processes {
            let of = |pid: i32| leaders.iter().position(|leader| i32::try_from(*leader) == Ok(pid));
            let mut next = Some(process);
            for _ in 0..processes.len() {
                let Some(now) = next.filter(|now| now.pid > 1) else { break };
                if let Some(at) = of(now.pid).or_else(|| of(now.group)) {
                    weights[at] += process.pages * page;
                    break;
                }
                next = find(&processes, now.parent);
            }
        }
        Some(weights)
    }

    /// All visible processes, by pid.
    fn look() -> Vec<Process> {
        let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
        let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let mut processes: Vec<Process> = pids.filter_map(read).collect();
        processes.sort_unstable_by_key(|process| process.pid);
        processes
    }

    fn read(pid: i32) -> Option<Process> {
        let mut space = [0; 1024];
        let count = fs::File::open(format!("/proc/{pid}/stat")).ok()?.read(&mut space).ok()?;
        parse(pid, &space[..count])
    }

    fn parse(pid: i32, stat: &[u8]) -> Option<Process> {
        // The name is in parentheses and may contain any byte, parentheses included.
        let end = stat.iter().rposition(|&byte| byte == b')')?;
        let mut fields = std::str::from_utf8(&stat[end + 1..]).ok()?.split_ascii_whitespace();
        let state = fields.next()?;
        let parent = fields.next()?.parse().ok()?;
        let group = fields.next()?.parse().ok()?;
        let threads: i64 = fields.nth(14)?.parse().ok()?;
        let started = fields.nth(1)?.parse().ok()?;
        let pages = fields.nth(1)?.parse().ok()?;
        // A process whose first thread has exited looks like a zombie while its other threads still run.
        let is_alive = !matches!(state, "Z" | "X" | "x") || 1 < threads;
        Some(Process { pid, parent, group, started, is_alive, pages })
    }

    fn find(processes: &[Process], pid: i32) -> Option<&Process> {
        processes.binary_search_by_key(&pid, |process| process.pid).ok().map(|at| &processes[at])
    }

    fn descent(roots: &[i32], left_alone: &[i32], processes: &[Process], process: &Process) -> Descent {
        let mut below = process;
        // The processes were not read at the same moment, so a chain of parents might be a cycle.
        for _ in 0..processes.len() {
            if roots.contains(&below.pid) || left_alone.contains(&below.pid) {
                return Descent::Others;
            }
            if roots.contains(&below.parent) {
                return Descent::Ours;
            }
            if below.parent <= 1 {
                return Descent::Others;
            }
            match find(processes, below.parent) {
                // A parent that is younger than its child has reused the number of the real parent.
                Some(above) if above.started <= below.started => below = above,
                _ => return Descent::Broken(below.pid),
            }
        }
        Descent::Broken(below.pid)
    }

    /// Signals exactly this process and never a later one with the same number: it opens a pidfd first, and then
    /// checks that the number still belongs to the same process.
    fn signal_exactly(process: &Process, signal: Signal) {
        match open(process.pid) {
            Ok(handle) => {
                if read(process.pid).is_some_and(|now| now.started == process.started) {
                    // SAFETY: the pidfd is open, and a null siginfo means the siginfo of a plain kill.
                    unsafe {
                        libc::syscall(
                            libc::SYS_pidfd_send_signal,
                            handle.as_raw_fd(),
                            signal as libc::c_int,
                            std::ptr::null::<libc::siginfo_t>(),
                            0,
                        );
                    }
                }
            }
            // Kernels before 5.3, and sandboxes that forbid the call.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EINVAL)) => {
                if read(process.pid).is_some_and(|now| now.started == process.started) {
                    let _ = kill(Pid::from_raw(process.pid), signal);
                }
            }
            Err(_) => {}
        }
    }

    fn open(pid: i32) -> io::Result<OwnedFd> {
        // SAFETY: the call takes two numbers, and on success returns a new descriptor without another owner.
        unsafe {
            let fd = libc::syscall(libc::SYS_pidfd_open, pid, 0);
            if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd as i32)) }
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_process_may_have_any_name() {
            let fields = "S 7 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 98765 1000 200";
            let table = [
                (format!("9 (sh) {fields}"), true),
                (format!("9 (a) Z 1 (b)) {fields}"), true),
                (format!("9 (sh) Z{}", &fields[1..]), false),
                (format!("9 (sh) Z{}", fields[1..].replace(" 20 0 1 0 ", " 20 0 3 0 ")), true),
            ];
            for (stat, is_alive) in table {
                let expected = Process { pid: 9, parent: 7, group: 42, started: 98765, is_alive, pages: 200 };
                assert_eq!(parse(9, stat.as_bytes()), Some(expected), "{stat}");
            }
        }

        #[test]
        fn a_reused_process_id_is_no_descendant() {
            let one = |pid, parent, started| Process { pid, parent, group: pid, started, is_alive: true, pages: 1 };
            let keeper = 10;
            let processes = [
                one(1, 0, 0),
                one(11, keeper, 500),
                one(20, 1, 100),
                one(30, 20, 110),
                one(31, 11, 120),
                one(32, 11, 500),
            ];
            let table = [
                (11, Descent::Ours),
                (20, Descent::Others),
                (30, Descent::Others),
                (31, Descent::Broken(31)),
                (32, Descent::Ours),
            ];
            for (pid, expected) in table {
                let process = find(&processes, pid).unwrap();
                assert_eq!(descent(&[keeper], &[], &processes, process), expected, "{pid}");
            }
        }

        #[test]
        fn processes_with_a_monitor_are_skipped_and_orphans_are_found() {
            let one = |pid, parent| Process { pid, parent, group: pid, started: 1, is_alive: true, pages: 1 };
            let (outlast, keeper, monitor) = (10, 11, 12);
            let processes = [
                one(1, 0),
                one(9, 1),
                one(outlast, 9),
                one(keeper, outlast),
                one(monitor, keeper),
                one(13, monitor),
                one(14, 13),
                one(20, keeper),
                one(21, 20),
                one(22, outlast),
                one(23, 9),
            ];
            let ours: Vec<i32> = processes
                .iter()
                .filter(|process| descent(&[outlast, keeper], &[monitor], &processes, process) == Descent::Ours)
                .map(|process| process.pid)
                .collect();
            assert_eq!(ours, [20, 21, 22]);
        }

        #[test]
        fn the_entry_of_our_own_process_is_parsed() {
            let me = read(getpid().as_raw()).unwrap();
            assert_eq!(me.parent, nix::unistd::getppid().as_raw());
            assert_eq!(me.group, nix::unistd::getpgrp().as_raw());
            assert!(me.is_alive);
        }

        #[test]
        fn the_memory_of_a_child_includes_its_descendants() {
            let me = std::process::id();
            let alone = weigh(&[me, u32::MAX >> 1]).unwrap();
            assert!(alone[0] > 1 << 20 && alone[1] == 0, "{alone:?}");
            // The kernel updates the page count of a small process late; several megabytes are counted.
            let script = r#"sh -c 'held=$(head -c 8388608 /dev/zero | tr "\0" x); echo held; read end'; exit"#;
            let mut above = std::process::Command::new("sh")
                .args(["-c", script])
                .stdin(std::process::Stdio::piped())
                .stdout(std::process::Stdio::piped())
                .spawn()
                .unwrap();
            let mut word = [0; 5];
            io::Read::read_exact(above.stdout.as_mut().unwrap(), &mut word).unwrap();
            let weight = weigh(&[above.id()]).unwrap()[0];
            assert!(8 << 20 <= weight, "{weight}");
            drop(above.stdin.take());
            above.wait().unwrap();
        }
    }
}
