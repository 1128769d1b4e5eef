//! Words for people, on stderr.
#![expect(unsafe_code, reason = "borrows file descriptor 2, which std keeps open but does not lend without a lock")]

use std::{
    os::fd::BorrowedFd,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    unistd::write,
};

/// How long one line may wait for a reader of stderr. After that it is dropped, and until the reader
/// is back no line waits at all.
const PATIENCE: Duration = Duration::from_millis(100);

/// What the kernel takes at once when it says a pipe is writable, even from a blocking writer.
const PIECE_MAX: usize = libc::PIPE_BUF;

/// True while the reader of stderr is known not to read.
static IS_STALLED: AtomicBool = AtomicBool::new(false);

/// Writes a line to stderr, whole, or drops it: a program nobody listens to goes on working.
///
/// Lines up to the system's `PIPE_BUF` are one write, so that they do not mix with others' lines.
pub fn say(line: &str) {
    let mut bytes = Vec::with_capacity(line.len() + 1);
    bytes.extend_from_slice(line.trim_end_matches('\n').as_bytes());
    bytes.push(b'\n');

    // SAFETY: std opens /dev/null in place of a closed descriptor 2 at start, and we never close it. Were
    // it closed all the same, the calls below would say so and do no harm.
    let stderr = unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) };
    let deadline = Instant::now() + PATIENCE;
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        let patience = if IS_STALLED.load(Ordering::Relaxed) {
            Duration::ZERO
        } else {
            deadline.saturating_duration_since(Instant::now())
        };
        let timeout = PollTimeout::try_from(patience).unwrap_or(PollTimeout::ZERO);
        match poll(&mut [PollFd::new(stderr, PollFlags::POLLOUT)], timeout) {
            Ok(0) => {
                IS_STALLED.store(true, Ordering::Relaxed);
                return;
            }
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(_) => return,
        }
        match write(stderr, &rest[..rest.len().min(PIECE_MAX)]) {
            Ok(count) => {
                IS_STALLED.store(false, Ordering::Relaxed);
                rest = &rest[count..];
            }
            Err(Errno::EINTR) => {}
            // Writable a moment ago, and full again: ask once more, until the deadline.
            Err(Errno::EAGAIN) if Instant::now() < deadline => {}
            Err(_) => return,
        }
    }
}
