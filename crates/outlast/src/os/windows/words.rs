//! Words for people, on stderr.

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

/// How long a line may wait for a reader of stderr. After that it is dropped, and until the reader is back
/// no line waits at all.
const PATIENCE: Duration = Duration::from_millis(100);

/// True while the reader of stderr is known not to read.
static IS_STALLED: AtomicBool = AtomicBool::new(false);

type Spoken = (Vec<u8>, blocking::Sender<()>);

/// Writes a line to stderr, whole, or drops it: a program nobody listens to goes on working.
pub fn say(line: &str) {
    static WRITER: OnceLock<Option<blocking::SyncSender<Spoken>>> = OnceLock::new();
    let writer = WRITER.get_or_init(|| {
        // A write cannot be called off here, so a thread makes it, and one line may wait behind it.
        let (lines, work) = blocking::sync_channel::<Spoken>(1);
        let write = move || {
            for (line, done) in work {
                let _ = io::stderr().write_all(&line);
                IS_STALLED.store(false, Ordering::Relaxed);
                // Whoever asked may have stopped waiting.
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

/// Each line was waited for already.
pub fn finish_saying() {}
