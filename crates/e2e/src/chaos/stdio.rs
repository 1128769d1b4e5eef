//! A client on the stdin and stdout of an outlast: `mcp`, or `gateway --stdio`.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    os::fd::AsFd,
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::Value;

use super::{
    ledger::{HUNG_AFTER, Ledger},
    message::{Request, initialize, initialized, meaning},
    processes::Process,
};

/// How often the reader checks whether it should continue.
const LOOK: Duration = Duration::from_millis(20);

/// One outlast and its only client.
pub(super) struct Connection {
    part: &'static str,
    pub outlast: Process,
    ledger: Arc<Ledger>,
    child: Mutex<Child>,
    stdin: Mutex<Option<ChildStdin>>,
    /// Calls without an answer, and whether each is an echo. None once the driver ends the connection.
    open: Mutex<Option<BTreeMap<u64, bool>>>,
    is_initialized: Mutex<bool>,
    initialized: Condvar,
    is_broken: AtomicBool,
    slow_until: Mutex<Instant>,
    reader: Mutex<Option<JoinHandle<()>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no thread panics while it holds this")
}

impl Connection {
    /// Starts outlast and makes the handshake.
    pub(super) fn open(part: &'static str, mut command: Command, ledger: &Arc<Ledger>) -> io::Result<Arc<Connection>> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let stdout = child.stdout.take().expect("stdout is piped");
        let outlast = Process::of(child.id()).ok_or_else(|| io::Error::other("outlast ended at once"))?;
        let connection = Arc::new(Connection {
            part,
            outlast,
            ledger: Arc::clone(ledger),
            stdin: Mutex::new(child.stdin.take()),
            child: Mutex::new(child),
            open: Mutex::new(Some(BTreeMap::new())),
            is_initialized: Mutex::new(false),
            initialized: Condvar::new(),
            is_broken: AtomicBool::new(false),
            slow_until: Mutex::new(Instant::now()),
            reader: Mutex::new(None),
        });
        let reader = Arc::clone(&connection);
        *lock(&connection.reader) = Some(thread::spawn(move || reader.read(stdout)));
        connection.write(&initialize());
        let is_open = lock(&connection.is_initialized);
        let waited = connection.initialized.wait_timeout_while(is_open, HUNG_AFTER, |is_open| !*is_open);
        if waited.expect("no thread panics while it holds this").1.timed_out() {
            ledger.breach(format!("{part}: the handshake was not answered"));
        }
        connection.write(&initialized());
        Ok(connection)
    }

    /// Sends a request and does not wait; returns its number in the ledger. None once the run is over.
    pub(super) fn send(&self, request: &Request) -> Option<u64> {
        let call = self.ledger.sent(self.part, request.is_tool())?;
        match &mut *lock(&self.open) {
            Some(open) => drop(open.insert(call, request.is_echo())),
            None => {
                self.ledger.ended(call);
                return Some(call);
            }
        }
        self.write(&request.message(call));
        Some(call)
    }

    fn write(&self, message: &Value) {
        if let Some(stdin) = &mut *lock(&self.stdin) {
            // If outlast has exited, the reader of the other pipe notices.
            let _ = stdin.write_all(format!("{message}\n").as_bytes());
        }
    }

    /// The client reads nothing for this time.
    pub(super) fn read_nothing_for(&self, time: Duration) {
        *lock(&self.slow_until) = Instant::now() + time;
    }

    /// The driver ends this connection: open calls need no answer from here on.
    pub(super) fn give_up(&self) {
        for call in lock(&self.open).take().unwrap_or_default().into_keys() {
            self.ledger.ended(call);
        }
    }

    /// Closes stdout, as a client that crashed, and then stdin.
    pub(super) fn vanish(&self) {
        self.give_up();
        self.is_broken.store(true, Ordering::SeqCst);
        if let Some(reader) = lock(&self.reader).take() {
            reader.join().expect("the reader does not panic");
        }
        self.close_stdin();
    }

    pub(super) fn close_stdin(&self) {
        *lock(&self.stdin) = None;
    }

    /// Waits until outlast exits.
    pub(super) fn wait(&self) -> Option<ExitStatus> {
        let deadline = Instant::now() + HUNG_AFTER;
        while Instant::now() < deadline {
            if let Ok(Some(status)) = lock(&self.child).try_wait() {
                return Some(status);
            }
            thread::sleep(LOOK);
        }
        None
    }

    fn read(&self, mut stdout: ChildStdout) {
        let (mut pending, mut chunk) = (Vec::new(), vec![0; 64 << 10]);
        while !self.is_broken.load(Ordering::SeqCst) {
            if Instant::now() < *lock(&self.slow_until) {
                thread::sleep(LOOK);
                continue;
            }
            let mut sources = [PollFd::new(stdout.as_fd(), PollFlags::POLLIN)];
            let timeout = PollTimeout::try_from(LOOK).expect("a short time");
            if !matches!(poll(&mut sources, timeout), Ok(count) if count > 0) {
                continue;
            }
            let count = stdout.read(&mut chunk).unwrap_or(0);
            if count == 0 {
                return self.read_end();
            }
            pending.extend_from_slice(&chunk[..count]);
            let mut start = 0;
            while let Some(length) = memchr::memchr(b'\n', &pending[start..]) {
                self.hear(&pending[start..start + length]);
                start += length + 1;
            }
            pending.drain(..start);
        }
    }

    fn read_end(&self) {
        // At the end of the run stdin is closed, and calls without an answer by then are lost. They stay open.
        if lock(&self.stdin).is_some() && lock(&self.open).is_some() {
            self.ledger.breach(format!("{}: outlast {} closed its stdout", self.part, self.outlast.pid));
            self.give_up();
        }
    }

    fn hear(&self, line: &[u8]) {
        let Ok(message) = serde_json::from_slice::<Value>(line) else {
            let text: String = String::from_utf8_lossy(line).chars().take(200).collect();
            return self.ledger.breach(format!("{}: no JSON on stdout: {text}", self.part));
        };
        if message.get("method").is_some() {
            return;
        }
        match message["id"].as_u64() {
            Some(0) => {
                *lock(&self.is_initialized) = true;
                self.initialized.notify_all();
            }
            Some(call) => {
                let is_echo = lock(&self.open).as_mut().and_then(|open| open.remove(&call)).unwrap_or(false);
                self.ledger.answered(call, meaning(&message, call, is_echo));
            }
            None => self.ledger.breach(format!("{}: an answer without an id: {message}", self.part)),
        }
    }
}
