//! Processes in `/proc`: the tree below a process, their commands and their resources.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::{
        signal::{Signal, kill},
        wait::{WaitPidFlag, waitpid},
    },
    unistd::Pid,
};

/// One process; its start time distinguishes it from a later process with the same id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Process {
    pub pid: u32,
    started: u64,
}

struct Stat {
    parent: u32,
    started: u64,
}

impl Process {
    pub(super) fn of(pid: u32) -> Option<Process> {
        Some(Process { pid, started: read_stat(pid)?.started })
    }

    fn path(self, name: &str) -> PathBuf {
        Path::new("/proc").join(self.pid.to_string()).join(name)
    }

    /// False for a zombie.
    pub(super) fn is_alive(self) -> bool {
        read_stat(self.pid).is_some_and(|stat| stat.started == self.started)
    }

    pub(super) fn runs(self, program: &Path) -> bool {
        fs::read_link(self.path("exe")).is_ok_and(|path| path == program)
    }

    /// For reports.
    pub(super) fn command(self) -> String {
        let line = fs::read(self.path("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).replace('\0', " ").trim().to_owned()
    }

    /// Sends a signal if it is still the same process.
    pub(super) fn signal(self, signal: Signal) -> bool {
        self.is_alive() && kill(Pid::from_raw(self.pid as i32), signal).is_ok()
    }

    /// Bytes, without those of files: how many processes share the pages of a program changes with every other process of
    /// it. Pages that several processes share are divided among them.
    pub(super) fn memory(self) -> u64 {
        let rollup = fs::read_to_string(self.path("smaps_rollup")).unwrap_or_default();
        let line = rollup.lines().find_map(|line| line.strip_prefix("Pss_Anon:"));
        line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
    }

    pub(super) fn descriptors(self) -> usize {
        fs::read_dir(self.path("fd")).map_or(0, Iterator::count)
    }

    fn has_variable(self, assignment: &str) -> bool {
        let environ = fs::read(self.path("environ")).unwrap_or_default();
        environ.split(|byte| *byte == 0).any(|variable| variable == assignment.as_bytes())
    }
}

/// All processes, by id.
struct Table(BTreeMap<u32, Stat>);

impl Table {
    fn read() -> Table {
        let entries = fs::read_dir("/proc").expect("this program needs /proc");
        let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        Table(pids.filter_map(|pid| Some((pid, read_stat(pid)?))).collect())
    }

    fn children(&self, parent: u32) -> impl Iterator<Item = Process> {
        let children = self.0.iter().filter(move |(_, stat)| stat.parent == parent);
        children.map(|(pid, stat)| Process { pid: *pid, started: stat.started })
    }
}

/// All descendants of a process.
pub(super) fn below(root: u32) -> Vec<Process> {
    let table = Table::read();
    let mut found: Vec<Process> = table.children(root).collect();
    let mut next = 0;
    while next < found.len() {
        let parent = found[next].pid;
        found.extend(table.children(parent));
        next += 1;
    }
    found
}

pub(super) fn children(parent: u32) -> Vec<Process> {
    Table::read().children(parent).collect()
}

pub(super) fn parent(process: Process) -> Option<Process> {
    Process::of(read_stat(process.pid)?.parent)
}

/// All processes with this variable in their environment.
pub(super) fn marked(assignment: &str) -> Vec<Process> {
    let table = Table::read();
    let all = table.0.iter().map(|(pid, stat)| Process { pid: *pid, started: stat.started });
    all.filter(|process| process.has_variable(assignment)).collect()
}

/// Waits until all have exited, and reaps those that this process inherited; returns those that are left at the
/// deadline.
pub(super) fn wait_gone(processes: &[Process], at_most: Duration) -> Vec<Process> {
    let deadline = Instant::now() + at_most;
    loop {
        let left: Vec<Process> = processes.iter().copied().filter(|process| process.is_alive()).collect();
        if left.is_empty() || deadline < Instant::now() {
            for process in processes {
                // Processes with another parent cannot be reaped here.
                let _ = waitpid(Pid::from_raw(process.pid as i32), Some(WaitPidFlag::WNOHANG));
            }
            return left;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

fn read_stat(pid: u32) -> Option<Stat> {
    let text = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
    // The name in parentheses may contain any characters, so fields are counted from its end.
    let fields: Vec<&str> = text[text.rfind(')')? + 1..].split_whitespace().collect();
    let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
    if fields.first() == Some(&"Z") {
        return None;
    }
    Some(Stat { parent: number(1)? as u32, started: number(19)? })
}
