//! Writes lines for people to stderr. The process never blocks on a slow reader.
#![expect(unsafe_code, reason = "borrows file descriptor 2, which std keeps open but does not lend without a lock")]

use std::{
    collections::VecDeque,
    os::fd::BorrowedFd,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    unistd::write,
};
use outlast_core::count::count;

/// The buffer for a slow reader of stderr. A line that does not fit is dropped and counted.
const WAITING_MAX: usize = 256 * 1024;

/// How long [`finish_saying`] waits for that reader.
const PATIENCE: Duration = Duration::from_millis(100);

/// The bytes that a writable pipe accepts at once, even from a blocking writer.
const PIECE_MAX: usize = libc::PIPE_BUF;

/// The stack of the thread that waits for the reader and does nothing else.
const WAITER_STACK: usize = 64 * 1024;

static WAITING: Mutex<Waiting> = Mutex::new(Waiting { bytes: VecDeque::new(), is_attended: false, dropped: 0 });
static ATTENDED: Condvar = Condvar::new();

/// Lines that stderr did not accept at once.
struct Waiting {
    bytes: VecDeque<u8>,
    /// A thread writes the buffer; later lines are appended to it.
    is_attended: bool,
    dropped: u64,
}

/// Writes a line to stderr without waiting for its reader. Bytes that do not fit into the pipe are buffered; when the
/// buffer is full, the line is dropped, and the reader later gets the number of dropped lines.
///
/// While the buffer is empty, a line of up to `PIPE_BUF` bytes is one write, so that it does not mix with lines of
/// other processes.
pub(crate) fn say(line: &str) {
    let mut bytes = Vec::with_capacity(line.len() + 1);
    bytes.extend_from_slice(line.trim_end_matches('\n').as_bytes());
    bytes.push(b'\n');

    let mut waiting = waiting();
    if waiting.is_attended {
        if waiting.bytes.len() + bytes.len() > WAITING_MAX {
            waiting.dropped += 1;
        } else {
            waiting.bytes.extend(bytes);
        }
        return;
    }
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        match write_some(rest, PollTimeout::ZERO) {
            Ok(0) => break,
            Ok(count) => rest = &rest[count..],
            Err(_) => return,
        }
    }
    if !rest.is_empty() {
        // If no thread can be started, only the rest of this line is lost.
        let waiter = thread::Builder::new().name("outlast-stderr".into()).stack_size(WAITER_STACK);
        waiting.is_attended = waiter.spawn(attend).is_ok();
        if waiting.is_attended {
            waiting.bytes.extend(rest);
        }
    }
}

/// For the exit of the program: gives a slow reader time to read the buffer.
pub fn finish_saying() {
    let deadline = Instant::now() + PATIENCE;
    let mut waiting = waiting();
    while waiting.is_attended {
        let patience = deadline.saturating_duration_since(Instant::now());
        if patience.is_zero() {
            return;
        }
        waiting = ATTENDED.wait_timeout(waiting, patience).unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// Writes the buffer, for as long as it takes.
fn attend() {
    let mut piece = Vec::with_capacity(PIECE_MAX);
    loop {
        {
            let mut waiting = waiting();
            if waiting.bytes.is_empty() && waiting.dropped > 0 {
                let lines = count(waiting.dropped, "line was", "lines were");
                let words = format!("[outlast] {lines} dropped here, because the client did not read them\n");
                waiting.dropped = 0;
                waiting.bytes.extend(words.as_bytes());
            }
            if waiting.bytes.is_empty() {
                break finish(waiting);
            }
            piece.clear();
            piece.extend(waiting.bytes.iter().take(PIECE_MAX));
        }
        let written = write_some(&piece, PollTimeout::NONE);
        let mut waiting = waiting();
        match written {
            Ok(count) => drop(waiting.bytes.drain(..count)),
            // The reader is gone.
            Err(_) => break finish(waiting),
        }
    }
}

fn finish(mut waiting: MutexGuard<'_, Waiting>) {
    *waiting = Waiting { bytes: VecDeque::new(), is_attended: false, dropped: 0 };
    ATTENDED.notify_all();
}

fn waiting() -> MutexGuard<'static, Waiting> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many bytes stderr accepted, once it accepted some; 0 after the timeout.
fn write_some(bytes: &[u8], timeout: PollTimeout) -> Result<usize, Errno> {
    // SAFETY: std opens /dev/null in place of a closed descriptor 2 at start, and outlast never closes it. If it were
    // closed, the calls below would return an error and do no harm.
    let stderr = unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) };
    loop {
        match poll(&mut [PollFd::new(stderr, PollFlags::POLLOUT)], timeout) {
            Ok(0) => return Ok(0),
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(error) => return Err(error),
        }
        match write(stderr, &bytes[..bytes.len().min(PIECE_MAX)]) {
            Err(Errno::EINTR) => {}
            // The pipe was writable and is full again.
            Err(Errno::EAGAIN) if timeout == PollTimeout::ZERO => return Ok(0),
            Err(Errno::EAGAIN) => {}
            written => return written,
        }
    }
}
