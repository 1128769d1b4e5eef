//! Processes that carry our tag and have no outlast above them any more. Only Linux lets us see that.

use crate::os::Stray;

#[cfg(not(target_os = "linux"))]
pub fn strays() -> Option<Vec<Stray>> {
    None
}

/// All that we may look at; none where this system does not show them.
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

    use crate::os::{CHILD_TAG, Stray};

    /// A chain of parents is never so long, unless it changes while we follow it.
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

    /// The keeper of a living outlast is above all that it has started, wherever they went. An outlast that one of them
    /// started is nobody's orphan, either.
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
                // Gone while we looked. What it left shows next time.
                None => return true,
            }
        }
        true
    }

    fn parent(pid: u32) -> Option<u32> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name in brackets may itself hold blanks and brackets.
        stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
    }
}
