//! Writes lines for people to stderr. A slow reader blocks the process for a bounded time only.

use std::{
    io::{self, Write},
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
        mpsc as blocking,
    },
    thread,
    time::Duration,
};

/// How long a caller waits until its line is written. After that no caller waits until the reader reads again, and a
/// line that does not fit into the queue is dropped.
const PATIENCE: Duration = Duration::from_millis(100);

/// True while the reader of stderr does not read.
static IS_STALLED: AtomicBool = AtomicBool::new(false);

type Spoken = (Vec<u8>, blocking::Sender<()>);

/// Writes a whole line to stderr or drops it, so that the program works without a reader.
pub(crate) fn say(line: &str) {
    static WRITER: OnceLock<Option<blocking::SyncSender<Spoken>>> = OnceLock::new();
    let writer = WRITER.get_or_init(|| {
        // A blocking write cannot be cancelled on Windows, so a thread does it, and one more line may be queued.
        let (lines, work) = blocking::sync_channel::<Spoken>(1);
        let write = move || {
            for (line, done) in work {
                let _ = io::stderr().write_all(&line);
                IS_STALLED.store(false, Ordering::Relaxed);
                // The caller may have stopped waiting.
                let _ = done.send(());
            }
        };
        thread::Builder::new().name("outlast-stderr".into()).spawn(write).ok().map(|_| lines)
    });
    let mut bytes = line.trim_end_matches('\n').as_bytes().to_vec();
    bytes.push(b'\n');
    let (done, wait) = blocking::channel();
    let is_sent = writer.as_ref().is_some_and(|writer| writer.try_send((bytes, done)).is_ok());
    if is_sent && !IS_STALLED.load(Ordering::Relaxed) && wait.recv_timeout(PATIENCE).is_err() {
        IS_STALLED.store(true, Ordering::Relaxed);
    }
}

/// Does nothing: `say` has waited for each line.
pub fn finish_saying() {}
