//! Finds processes that have the tag of outlast and no outlast among their ancestors. Only Linux shows environments
//! and parents; nothing is killed here.

use crate::Stray;

#[cfg(not(target_os = "linux"))]
pub fn strays() -> Option<Vec<Stray>> {
    None
}

/// All strays that this user may inspect; `None` if `/proc` cannot be read.
#[cfg(target_os = "linux")]
pub fn strays() -> Option<Vec<Stray>> {
    let entries = std::fs::read_dir("/proc").ok()?;
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mut strays: Vec<Stray> = pids.filter_map(linux::stray).collect();
    strays.sort_by_key(|stray| stray.pid);
    Some(strays)
}

#[cfg(target_os = "linux")]
mod linux {
    use std::fs;

    use crate::{CHILD_TAG, Stray};

    /// The longest chain of parents that is followed. A longer one has changed while it was read.
    const PARENTS_MAX: usize = 256;

    pub(super) fn stray(pid: u32) -> Option<Stray> {
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let entry = environment
            .split(|byte| *byte == 0)
            .find_map(|entry| entry.strip_prefix(CHILD_TAG.as_bytes())?.strip_prefix(b"="))?;
        let tag = String::from_utf8_lossy(entry).into_owned();
        if has_outlast_above(pid) {
            return None;
        }
        let command = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let words = command.split(|byte| *byte == 0).filter(|word| !word.is_empty());
        let words: Vec<String> = words.map(|word| String::from_utf8_lossy(word).into_owned()).collect();
        Some(Stray { pid, tag, command: words })
    }

    /// The keeper of a running outlast is an ancestor of all processes that the outlast started. An outlast that such
    /// a process started is itself no stray.
    fn has_outlast_above(pid: u32) -> bool {
        let mut above = pid;
        for _ in 0..PARENTS_MAX {
            let is_outlast = fs::read_link(format!("/proc/{above}/exe"))
                .is_ok_and(|exe| exe.file_name().is_some_and(|name| name.to_string_lossy().starts_with("outlast")));
            if is_outlast {
                return true;
            }
            match parent(above) {
                Some(parent) if parent > 1 => above = parent,
                Some(_) => return false,
                // The process exited during the scan. The next scan finds the processes that it left.
                None => return true,
            }
        }
        true
    }

    fn parent(pid: u32) -> Option<u32> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name is in parentheses and may itself contain blanks and parentheses.
        stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
    }
}
