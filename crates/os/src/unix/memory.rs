//! Memory of this process: releases pages that only the start needed, and sets a memory limit. The memory of children
//! is measured in `descendants.rs`.
#![cfg_attr(target_os = "linux", expect(unsafe_code, reason = "tells the kernel which pages of our code to forget"))]

/// Releases the pages of code and constants that are mapped so far; the kernel loads the pages that are still needed
/// from its cache again. Argument parsing and setup touch far more pages than serving does, and an idle process would
/// keep them until it exits.
pub fn give_back_code() {
    #[cfg(target_os = "linux")]
    for (start, length) in read_only() {
        // SAFETY: the range is mapped from a file and was never writable, so the next access reads the same bytes
        // from the file again.
        unsafe { libc::madvise(start as *mut libc::c_void, length, libc::MADV_DONTNEED) };
    }
}

/// Limits the address space of this process where the system supports it (Linux): an allocation above the limit
/// fails, which ends the process. No core file is written then.
pub fn limit_memory(bytes: u64) {
    use nix::sys::resource::{Resource, setrlimit};
    // If a limit cannot be set, the process works without it.
    let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
    #[cfg(target_os = "linux")]
    let _ = setrlimit(Resource::RLIMIT_AS, bytes, bytes);
    #[cfg(not(target_os = "linux"))]
    let _ = bytes;
}

/// Whole pages of the program and its libraries that are mapped read-only and always were: pages that the loader
/// writes to and protects afterwards belong to segments whose headers say writable.
#[cfg(target_os = "linux")]
fn read_only() -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    // SAFETY: the callback runs before this call returns, gets the pointer type that it expects, and does not unwind.
    unsafe { libc::dl_iterate_phdr(Some(note_segments), (&raw mut found).cast()) };
    found
}

#[cfg(target_os = "linux")]
unsafe extern "C" fn note_segments(
    object: *mut libc::dl_phdr_info,
    _size: libc::size_t,
    found: *mut libc::c_void,
) -> libc::c_int {
    const PAGE: usize = 4096;
    // SAFETY: the loader passes a description that is valid during the call, and `read_only` passes its own list.
    let (object, found) = unsafe { (&*object, &mut *found.cast::<Vec<(usize, usize)>>()) };
    // SAFETY: the call only returns a number.
    let vdso = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) } as usize;
    if object.dlpi_phdr.is_null() || object.dlpi_addr as usize == vdso {
        return 0; // The kernel's own code is in no file.
    }
    // SAFETY: the loader reports the number of headers.
    let headers = unsafe { std::slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into()) };
    for header in headers {
        if header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W == 0 {
            let start = object.dlpi_addr as usize + header.p_vaddr as usize;
            // Only whole pages: the last page may be shared with the next segment.
            let (first, last) = (start.next_multiple_of(PAGE), (start + header.p_filesz as usize) / PAGE * PAGE);
            if first < last {
                found.push((first, last - first));
            }
        }
    }
    0
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn only_read_only_segments_are_released() {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let segments = read_only();
        assert!(segments.len() > 2, "the program's and its libraries' code and constants");
        for (start, length) in segments {
            let holds = |line: &&str| {
                let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
                let number = |text| usize::from_str_radix(text, 16).unwrap();
                number(from) <= start && start + length <= number(to)
            };
            let line = maps.lines().find(holds).expect("one mapping holds it");
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            assert!(["r--p", "r-xp"].contains(&words[1]) && words.last().unwrap().starts_with('/'), "{line}");
        }
        static WRITTEN_BY_THE_LOADER: [&str; 2] = ["relocated", "as the program started"];
        give_back_code();
        assert_eq!(std::hint::black_box(WRITTEN_BY_THE_LOADER).concat(), "relocatedas the program started");
    }
}
