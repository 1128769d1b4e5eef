//! What only the start needed is given back.
#![cfg_attr(target_os = "linux", expect(unsafe_code, reason = "tells the kernel which pages of our code to forget"))]

/// Lets go of the pages of code that were mapped so far; those still needed come back by themselves, from the system's
/// cache. Parsing arguments and setting up touches far more code than serving does, and an idle process would keep it
/// all for as long as it lives.
pub fn give_back_code() {
    #[cfg(target_os = "linux")]
    {
        let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else { return };
        for (start, end) in maps.lines().filter_map(code) {
            // SAFETY: the range is a mapping of a file that can be read and executed but never written, so that what is
            // forgotten is exactly what the next access reads from the file again.
            unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_DONTNEED) };
        }
    }
}

/// A line of `/proc/self/maps` that speaks of a program's or library's code.
#[cfg(target_os = "linux")]
fn code(line: &str) -> Option<(usize, usize)> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let is_code = words.next()? == "r-xp" && words.nth(3)?.starts_with('/');
    let number = |text| usize::from_str_radix(text, 16).ok();
    if is_code { Some((number(start)?, number(end)?)) } else { None }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn only_the_code_of_files_is_given_back() {
        let table = [
            ("55d0c0-55d0f0 r-xp 00002000 fe:00 1234    /usr/bin/outlast", Some((0x55d0c0, 0x55d0f0))),
            ("55d0c0-55d0f0 r--p 00000000 fe:00 1234    /usr/bin/outlast", None),
            ("55d0c0-55d0f0 rw-p 00000000 fe:00 1234    /usr/bin/outlast", None),
            ("7ffc00-7ffc20 r-xp 00000000 00:00 0       [vdso]", None),
            ("7ffc00-7ffc20 r-xp 00000000 00:00 0", None),
        ];
        for (line, expected) in table {
            assert_eq!(code(line), expected, "{line}");
        }
        give_back_code(); // We go on running.
    }
}
