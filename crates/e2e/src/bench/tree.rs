//! Processes in `/proc`: their descendants, memory and CPU time.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// The unit of time in `/proc`, on every architecture that is measured.
const TICK: Duration = Duration::from_millis(10);

/// One process; its start time distinguishes it from a later process with the same id.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Process {
    pub pid: u32,
    started: u64,
}

struct Stat {
    parent: u32,
    cpu_ticks: u64,
    started: u64,
}

impl Process {
    fn path(self, name: &str) -> PathBuf {
        Path::new("/proc").join(self.pid.to_string()).join(name)
    }

    pub(super) fn is_alive(self) -> bool {
        read_stat(self.pid).is_some_and(|stat| stat.started == self.started)
    }

    pub(super) fn runs(self, program: &Path) -> bool {
        fs::read_link(self.path("exe")).is_ok_and(|path| path == program)
    }

    pub(super) fn kill(self) {
        if self.is_alive() {
            // It may exit between the two steps, which is fine.
            let _ = kill(Pid::from_raw(self.pid as i32), Signal::SIGKILL);
        }
    }

    /// Resident memory in bytes, with shared pages divided among the processes that share them (PSS), so that a sum
    /// counts each page once; 0 after the process has exited.
    pub(super) fn memory(self) -> u64 {
        let rollup = fs::read_to_string(self.path("smaps_rollup")).unwrap_or_default();
        let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
        line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
    }

    /// CPU time of its first thread, in nanoseconds of the scheduler. It is counted at least at every tick of the kernel.
    pub(super) fn cpu_of_first_thread(self) -> Duration {
        let text = fs::read_to_string(self.path(&format!("task/{}/schedstat", self.pid))).unwrap_or_default();
        let nanos = text.split_whitespace().next().and_then(|number| number.parse().ok());
        Duration::from_nanos(nanos.unwrap_or(0))
    }

    pub(super) fn cpu(self) -> Duration {
        read_stat(self.pid).map_or(Duration::ZERO, |stat| TICK * stat.cpu_ticks as u32)
    }
}

/// The processes with these ids and all their descendants.
pub(super) fn descent(roots: &[u32]) -> Vec<Process> {
    let entries = fs::read_dir("/proc").expect("this benchmark needs /proc");
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let stats: BTreeMap<u32, Stat> = pids.filter_map(|pid| Some((pid, read_stat(pid)?))).collect();
    let mut found: Vec<u32> = roots.to_vec();
    let mut next = 0;
    while next < found.len() {
        let parent = found[next];
        found.extend(stats.iter().filter(|(_, stat)| stat.parent == parent).map(|(pid, _)| *pid));
        next += 1;
    }
    found.iter().filter_map(|pid| Some(Process { pid: *pid, started: stats.get(pid)?.started })).collect()
}

fn read_stat(pid: u32) -> Option<Stat> {
    let text = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
    // The name in parentheses may contain any characters, so fields are counted from its end.
    let fields: Vec<&str> = text[text.rfind(')')? + 1..].split_whitespace().collect();
    let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
    if fields.first() == Some(&"Z") {
        return None;
    }
    Some(Stat { parent: number(1)? as u32, cpu_ticks: number(11)? + number(12)?, started: number(19)? })
}
