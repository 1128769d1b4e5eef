//! Processes of a session, found and ended as a whole.

use std::fs;

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// All processes below this one, from /proc.
pub(crate) fn below(root: u64) -> Vec<u64> {
    let parents: Vec<(u64, u64)> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid: u64| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            // The name of the program, in brackets, may contain anything.
            Some((pid, stat.rsplit(')').next()?.split_whitespace().nth(1)?.parse().ok()?))
        })
        .collect();
    let mut found = vec![root];
    let mut next = 0;
    while next < found.len() {
        let parent = found[next];
        found.extend(parents.iter().filter(|(_, above)| *above == parent).map(|(pid, _)| *pid));
        next += 1;
    }
    found.split_off(1)
}

/// None of them sees that another one is gone before it is killed itself.
pub(crate) fn kill_at_once(all: &[u64]) {
    for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
        for pid in all {
            // It may have ended meanwhile.
            let _ = kill(Pid::from_raw(i32::try_from(*pid).expect("it is a process id")), signal);
        }
    }
}
