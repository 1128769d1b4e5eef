//! What only the start needed is given back.
#![cfg_attr(target_os = "linux", expect(unsafe_code, reason = "tells the kernel which pages of our code to forget"))]

/// Lets go of the pages of code and constants that were mapped so far; those still needed come back by themselves, from
/// the system's cache. Parsing arguments and setting up touches far more of them than serving does, and an idle process
/// would keep them all for as long as it lives.
pub fn give_back_code() {
    #[cfg(target_os = "linux")]
    for (start, length) in read_only() {
        // SAFETY: the range is mapped from a file and was never writable, so that what is forgotten is exactly what the
        // next access reads from the file again.
        unsafe { libc::madvise(start as *mut libc::c_void, length, libc::MADV_DONTNEED) };
    }
}

/// Whole pages of the program and its libraries that are mapped without the right to write, and always were: what the
/// loader writes to and protects afterwards belongs to segments that are writable by their headers.
#[cfg(target_os = "linux")]
fn read_only() -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    // SAFETY: the function is called before this returns, with the pointer that it expects, and does not unwind.
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
    // SAFETY: the loader hands over a description that holds during the call, and `read_only` its own list.
    let (object, found) = unsafe { (&*object, &mut *found.cast::<Vec<(usize, usize)>>()) };
    // SAFETY: asks for a number.
    let vdso = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) } as usize;
    if object.dlpi_phdr.is_null() || object.dlpi_addr as usize == vdso {
        return 0; // The kernel's own code is in no file.
    }
    // SAFETY: the loader says how many there are.
    let headers = unsafe { std::slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into()) };
    for header in headers {
        if header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W == 0 {
            let start = object.dlpi_addr as usize + header.p_vaddr as usize;
            // Only whole pages: the last one may be shared with what comes next.
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
    fn only_what_was_never_written_is_given_back() {
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
