//! The files that a child and its descendants have open. Only Linux reports them without administrator rights.

use std::{fs, path::PathBuf};

/// The most processes that are examined. An agent has fewer of its own.
const PROCESSES_MAX: usize = 64;
/// The most files of each process.
const FILES_MAX: usize = 4096;

/// Pipes, sockets and the like are left out: their names are not absolute paths. A process that has exited has no
/// files.
pub fn open_files(leader: u32) -> Vec<PathBuf> {
    let family = family(leader);
    let files = |pid: &u32| {
        let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        open.take(FILES_MAX).filter_map(|link| fs::read_link(link.path()).ok()).collect::<Vec<_>>()
    };
    let mut all: Vec<PathBuf> = family.iter().flat_map(files).filter(|path| path.is_absolute()).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// A process and its descendants, parents first. If the system does not list children, only the process itself.
pub fn family(leader: u32) -> Vec<u32> {
    let mut family = vec![leader];
    let mut at = 0;
    while let Some(&pid) = family.get(at) {
        let below = children(pid);
        let room = PROCESSES_MAX - family.len();
        family.extend(below.into_iter().take(room));
        at += 1;
    }
    family
}

/// The children are listed for each thread that started them.
fn children(pid: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let listed = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    listed
        .flat_map(|list| list.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect()
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        process::{Command, Stdio},
    };

    use super::*;

    #[test]
    fn open_files_of_a_grandchild_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().canonicalize().unwrap().join("kept");
        // The outer shell has another command to run, so that it does not exec the inner one.
        let script = format!("sh -c 'exec 3>{}; echo open; read line'; echo over", path.display());
        let mut shell = Command::new("sh")
            .args(["-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a shell");
        let mut lines = BufReader::new(shell.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "open");
        assert!(open_files(shell.id()).contains(&path));
        drop(shell.stdin.take());
        assert_eq!(lines.next().unwrap().unwrap(), "over");
        shell.wait().unwrap();
        assert_eq!(open_files(shell.id()), Vec::<PathBuf>::new(), "it is gone");
    }
}
