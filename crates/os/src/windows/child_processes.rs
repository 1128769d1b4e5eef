//! Starts children, each in its own Job Object, and reports their exits. There is no keeper process on Windows.
#![expect(unsafe_code, reason = "suspended starts and console events have no safe interface")]

use std::{
    collections::HashMap,
    env,
    ffi::{OsStr, OsString},
    io::{self, ErrorKind},
    os::windows::io::{BorrowedHandle, OwnedHandle},
    path::{Path, PathBuf},
    process::Stdio as Standard,
    sync::{Arc, mpsc as blocking},
    task::{Context, Poll},
    thread,
    time::Duration,
};

use tokio::{
    process::{ChildStderr, ChildStdin, ChildStdout, Command},
    sync::mpsc,
};
use windows_sys::Win32::System::{
    Console::{CTRL_BREAK_EVENT, GenerateConsoleCtrlEvent},
    Threading::{CREATE_NEW_PROCESS_GROUP, CREATE_SUSPENDED},
};

use super::{
    job::{Job, resume, wait_for},
    lease::Lease,
    pty::{self, Window},
    stream::{From, Sink, Source, To, keep_own_streams, pipe},
};
use crate::{BootTime, CHILD_TAG, Exit, News, Order, Pipes, Signal, Size, Stdio, threaded::Reader};

/// How long the exit of a child is held back for its last output. After that it is reported, and the rest is read
/// then.
const DRAIN_MAX: Duration = Duration::from_secs(1);

/// Empty on Windows: each child's job is created with the child.
#[derive(Debug)]
pub struct Keeper(());

impl Keeper {
    pub fn begin() -> io::Result<Keeper> {
        keep_own_streams();
        Ok(Keeper(()))
    }

    /// Registers with the current runtime.
    pub fn attach(self) -> io::Result<ChildProcesses> {
        let (tell, news) = mpsc::unbounded_channel();
        Ok(ChildProcesses { children: HashMap::new(), tell, news })
    }
}

/// All children, by key. Dropping it ends them.
#[derive(Debug)]
pub struct ChildProcesses {
    children: HashMap<u64, Child>,
    tell: mpsc::UnboundedSender<News>,
    /// Bounded by the number of children: each has three events.
    news: mpsc::UnboundedReceiver<News>,
}

#[derive(Debug)]
struct Child {
    job: Arc<Job>,
    /// Of a child with [`Order::live_until`].
    lease: Option<Lease>,
    /// The open handle keeps the process id from being reused.
    _process: OwnedHandle,
    pid: u32,
    window: Option<Window>,
}

impl ChildProcesses {
    /// Starts a child. [`News`] reports whether it started.
    pub fn spawn(&mut self, key: u64, order: &Order) -> io::Result<Pipes> {
        let mut pipes = Pipes::default();
        let mut command = command(order);
        match order.stdio {
            Stdio::Piped => {
                command.stdin(Standard::piped()).stdout(Standard::piped()).stderr(Standard::piped());
            }
            Stdio::Inherit => {
                command.stdin(Standard::inherit()).stdout(Standard::inherit()).stderr(Standard::inherit());
            }
            Stdio::Input => {
                command.stdin(Standard::piped()).stdout(Standard::null()).stderr(Standard::null());
            }
            Stdio::Build => {
                let (read, write) = pipe()?;
                command.stdin(Standard::null()).stdout(write.try_clone()?).stderr(write);
                pipes.stderr = Some(Source(From::Thread(Reader::begin("outlast-build", read)?)));
            }
            Stdio::Terminal(size) => return self.spawn_in_terminal(key, order, size),
        }
        if order.sandbox.is_some() {
            return Err(io::Error::other("only Linux can enforce a sandbox"));
        }
        let job = Job::new()?;
        match self.start(key, &mut command, job, order.live_until) {
            Ok((stdin, stdout, stderr)) => {
                pipes.stdin = stdin.map(|stdin| Sink(To::Child(stdin)));
                pipes.stdout = stdout.map(|stdout| Source(From::Stdout(stdout)));
                pipes.stderr = pipes.stderr.or(stderr.map(|stderr| Source(From::Stderr(stderr))));
            }
            Err(error) => self.tell(News::StartFailed { key, error: explain(order, &error) }),
        }
        Ok(pipes)
    }

    /// `Terminate` is a Ctrl-Break, which only console programs on the console of outlast receive; most servers exit
    /// when their stdin closes. A child with its own terminal loses the terminal instead. `Kill` ends the whole job.
    /// No error if the child has exited.
    pub fn signal(&mut self, key: u64, signal: Signal) {
        let Some(child) = self.children.get(&key) else { return };
        match signal {
            Signal::HangUp | Signal::Terminate if child.window.is_some() => {
                child.window.iter().for_each(Window::hang_up);
            }
            Signal::HangUp | Signal::Terminate => {
                // SAFETY: the call takes two numbers. The child leads its own process group, so outlast does not
                // receive the event, and the open handle keeps the number from being reused.
                unsafe { GenerateConsoleCtrlEvent(CTRL_BREAK_EVENT, child.pid) };
            }
            Signal::Kill => child.job.terminate(),
            // Windows has no job control, so no child is stopped.
            Signal::Continue => {}
        }
    }

    /// Moves the end of the lease of a child to a later moment. Changes nothing for a child without a lease, for a moment
    /// that is not later, and for a lease that has ended.
    pub fn extend(&mut self, key: u64, until: BootTime) {
        if let Some(lease) = self.children.get(&key).and_then(|child| child.lease.as_ref()) {
            lease.extend(until);
        }
    }

    /// Ends all remaining descendants of an exited child; [`News::Swept`] follows.
    pub fn sweep(&mut self, key: u64) {
        if let Some(child) = self.children.remove(&key) {
            child.job.terminate();
        }
        self.tell(News::Swept { key });
    }

    /// The next event. Cancel-safe.
    pub fn poll_news(&mut self, cx: &mut Context<'_>) -> Poll<News> {
        match self.news.poll_recv(cx) {
            Poll::Ready(Some(news)) => Poll::Ready(news),
            // `ChildProcesses` itself has a sender, so the channel does not close.
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }

    /// Ends every child. Does not wait: the system finishes the termination.
    pub async fn close(self) {
        for child in self.children.values() {
            child.job.terminate();
        }
    }

    fn spawn_in_terminal(&mut self, key: u64, order: &Order, size: Size) -> io::Result<Pipes> {
        let pair = pty::open(size)?;
        let job = Job::new()?;
        match self.start_in_terminal(key, order, &pair.window, pair.drained, job) {
            Ok(()) => {
                Ok(Pipes { stdin: Some(pair.sink), stdout: Some(pair.source), window: Some(pair.window), stderr: None })
            }
            Err(error) => {
                self.tell(News::StartFailed { key, error: explain(order, &error) });
                Ok(Pipes::default())
            }
        }
    }

    fn start_in_terminal(
        &mut self,
        key: u64,
        order: &Order,
        window: &Window,
        drained: blocking::Receiver<()>,
        job: Job,
    ) -> io::Result<()> {
        let program = locate(order).ok_or(ErrorKind::NotFound)?;
        let job = Arc::new(job);
        let lease = self.begin_lease(key, order.live_until, &job)?;
        let child = pty::start(order, &program, window, &job)?;
        let pid = child.pid;
        let (process, kept, tell) = (child.process.try_clone()?, child.process.try_clone()?, self.tell.clone());
        let theirs = window.clone();
        let wait = move || {
            let exit = Exit::Code(wait_for(&process));
            // Other processes may still use the terminal and would keep it open; it belongs to the child that has
            // exited.
            theirs.hang_up();
            // The console renders the last output now. The caller reads the rest after the exit is reported, if not
            // before.
            let _ = drained.recv_timeout(DRAIN_MAX);
            // The receiver is gone if `ChildProcesses` was dropped.
            let _ = tell.send(News::Exited { key, exit });
        };
        if let Err(error) = thread::Builder::new().name("outlast-agent".into()).spawn(wait) {
            job.terminate();
            return Err(error);
        }
        self.tell(News::Started { key, pid });
        if child.resume().is_err() {
            // The waiting thread reports the exit.
            job.terminate();
        }
        self.children.insert(key, Child { job, lease, _process: kept, pid, window: Some(window.clone()) });
        Ok(())
    }

    /// Before the child runs: no child runs without the thread that ends it.
    fn begin_lease(&self, key: u64, until: Option<BootTime>, job: &Arc<Job>) -> io::Result<Option<Lease>> {
        until.map(|until| Lease::begin(key, until, Arc::clone(job), self.tell.clone())).transpose()
    }

    /// Starts the child suspended, so that it is in its job before it can start another process.
    fn start(
        &mut self,
        key: u64,
        command: &mut Command,
        job: Job,
        live_until: Option<BootTime>,
    ) -> io::Result<(Option<ChildStdin>, Option<ChildStdout>, Option<ChildStderr>)> {
        let job = Arc::new(job);
        let lease = self.begin_lease(key, live_until, &job)?;
        let mut child = command.creation_flags(CREATE_SUSPENDED | CREATE_NEW_PROCESS_GROUP).spawn()?;
        let (Some(pid), Some(handle)) = (child.id(), child.raw_handle()) else {
            return Err(io::Error::other("it ended before it was started"));
        };
        // SAFETY: the child owns the handle and is not waited for yet.
        let process = unsafe { BorrowedHandle::borrow_raw(handle) }.try_clone_to_owned()?;
        if let Err(error) = job.assign(&process).and_then(|()| resume(pid)) {
            // The child has not run yet.
            let _ = child.start_kill();
            return Err(error);
        }
        self.children.insert(key, Child { job, lease, _process: process, pid, window: None });
        self.tell(News::Started { key, pid });
        let streams = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let tell = self.tell.clone();
        tokio::spawn(async move {
            // A wait fails only for an invalid handle; then at least the exit is reported.
            let code = child.wait().await.ok().and_then(|status| status.code()).unwrap_or(-1);
            // The receiver is gone if `ChildProcesses` was dropped.
            let _ = tell.send(News::Exited { key, exit: Exit::Code(code) });
        });
        Ok(streams)
    }

    fn tell(&self, news: News) {
        self.tell.send(news).expect("we have the receiver ourselves");
    }
}

fn command(order: &Order) -> Command {
    let mut command = Command::new(locate(order).unwrap_or_else(|| order.program.clone().into()));
    if order.env_is_all {
        command.env_clear();
    }
    command
        .args(&order.args)
        .current_dir(&order.cwd)
        .envs(order.env.iter().map(|(name, value)| (name, value)))
        .env(CHILD_TAG, &order.tag);
    command
}

/// The path of the program. The system itself finds only `.exe` files, but `npx` and others are scripts with other
/// extensions, which people leave out.
fn locate(order: &Order) -> Option<PathBuf> {
    let program = Path::new(&order.program);
    let find = |folder: &Path| {
        let plain = folder.join(program);
        if plain.extension().is_some() && plain.is_file() {
            return Some(plain);
        }
        let endings = env::var("PATHEXT").unwrap_or_else(|_| ".EXE;.CMD;.BAT;.COM".into());
        let named = |ending: &str| PathBuf::from([plain.as_os_str(), OsStr::new(ending)].concat_os());
        endings.split(';').map(named).find(|path| path.is_file())
    };
    if 1 < program.components().count() || program.is_absolute() {
        return find(&order.cwd);
    }
    let is_path = |name: &OsString| name.eq_ignore_ascii_case("PATH");
    let ordered = order.env.iter().rev().find(|(name, _)| is_path(name)).map(|(_, value)| value.clone());
    let path = ordered.or_else(|| env::var_os("PATH"))?;
    env::split_paths(&path).find_map(|folder| find(&folder))
}

trait ConcatOs {
    fn concat_os(&self) -> OsString;
}

impl ConcatOs for [&OsStr; 2] {
    fn concat_os(&self) -> OsString {
        let mut whole = self[0].to_owned();
        whole.push(self[1]);
        whole
    }
}

/// Says what is missing: the system has one error for a missing program and a missing directory.
fn explain(order: &Order, error: &io::Error) -> io::Error {
    let cwd = order.cwd.display();
    if !order.cwd.exists() {
        return io::Error::new(ErrorKind::NotADirectory, format!("the working directory `{cwd}` does not exist"));
    }
    if !order.cwd.is_dir() {
        return io::Error::new(ErrorKind::NotADirectory, format!("the working directory `{cwd}` is a file"));
    }
    match error.kind() {
        ErrorKind::NotFound => {
            io::Error::new(ErrorKind::NotFound, format!("no program named `{}`", order.program.to_string_lossy()))
        }
        kind => io::Error::new(kind, error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, io::IoSlice};

    use bytes::{Buf, BytesMut};

    use super::*;

    const KEY: u64 = 7;

    fn order(program: &str, args: &[&str]) -> Order {
        Order {
            program: program.into(),
            args: args.iter().map(OsString::from).collect(),
            cwd: env::temp_dir(),
            env: env::vars_os().collect(),
            tag: "test".into(),
            env_is_all: false,
            stdio: Stdio::Terminal(Size { columns: 90, rows: 30, width: 0, height: 0 }),
            sandbox: None,
            live_until: None,
        }
    }

    fn with_processes<T>(work: impl AsyncFnOnce(&mut ChildProcesses) -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut processes = Keeper::begin().unwrap().attach().unwrap();
            work(&mut processes).await
        })
    }

    async fn news(processes: &mut ChildProcesses) -> News {
        poll_fn(|cx| processes.poll_news(cx)).await
    }

    async fn exit(processes: &mut ChildProcesses) -> Exit {
        match news(processes).await {
            News::Exited { key: KEY, exit } => exit,
            other => panic!("{other:?}"),
        }
    }

    async fn start(processes: &mut ChildProcesses, order: &Order) -> Pipes {
        let pipes = processes.spawn(KEY, order).unwrap();
        match news(processes).await {
            News::Started { key: KEY, pid } => assert_ne!(pid, 0),
            other => panic!("{other:?}"),
        }
        pipes
    }

    /// All output, to the end or until it contains this text.
    async fn shown(source: &mut Source, until: Option<&str>) -> String {
        let mut all = BytesMut::new();
        loop {
            let text = String::from_utf8_lossy(&all).into_owned();
            if until.is_some_and(|words| text.contains(words)) {
                return text;
            }
            if poll_fn(|cx| source.poll_read(cx, &mut all)).await.unwrap() == 0 {
                return text;
            }
        }
    }

    async fn press(sink: &mut Sink, mut keys: &[u8]) {
        while !keys.is_empty() {
            let count = poll_fn(|cx| sink.poll_write(cx, &[IoSlice::new(keys)])).await.unwrap();
            keys.advance(count);
        }
    }

    #[test]
    fn the_last_output_of_a_child_is_read_and_its_exit_code_is_reported() {
        with_processes(async |processes| {
            let mut pipes = start(processes, &order("cmd", &["/c", "echo first words& echo last words& exit 7"])).await;
            let text = shown(pipes.stdout.as_mut().unwrap(), None).await;
            assert!(text.contains("first words") && text.contains("last words"), "{text:?}");
            assert!(!text.contains("\x1b[?9001h"), "{text:?}");
            assert_eq!(exit(processes).await, Exit::Code(7));
            pipes.window.unwrap().resize(Size::default()).unwrap();
            processes.sweep(KEY);
            assert!(matches!(news(processes).await, News::Swept { key: KEY }));
        });
    }

    #[test]
    fn typed_input_arrives_and_a_resize_is_applied() {
        with_processes(async |processes| {
            let mut pipes = start(processes, &order("cmd", &["/k", "prompt $g"])).await;
            // The shell shows its prompt.
            shown(pipes.stdout.as_mut().unwrap(), Some(">")).await;
            pipes.window.as_ref().unwrap().resize(Size { columns: 100, rows: 40, width: 0, height: 0 }).unwrap();
            press(pipes.stdin.as_mut().unwrap(), b"exit 5\r").await;
            assert_eq!(exit(processes).await, Exit::Code(5));
        });
    }

    #[test]
    fn a_child_can_be_hung_up_and_killed() {
        with_processes(async |processes| {
            for signal in [Signal::Kill, Signal::HangUp] {
                let mut pipes = start(processes, &order("cmd", &["/k", "echo ready"])).await;
                shown(pipes.stdout.as_mut().unwrap(), Some("ready")).await;
                processes.signal(KEY, signal);
                shown(pipes.stdout.as_mut().unwrap(), None).await;
                let exit = exit(processes).await;
                assert!(signal != Signal::Kill || exit == Exit::Code(1), "{exit:?}");
                processes.sweep(KEY);
                assert!(matches!(news(processes).await, News::Swept { key: KEY }));
            }
        });
    }

    #[test]
    fn the_exit_of_a_child_whose_output_is_not_read_is_reported() {
        with_processes(async |processes| {
            let mut pipes = start(processes, &order("cmd", &["/c", "echo unread& exit 4"])).await;
            assert_eq!(exit(processes).await, Exit::Code(4));
            let text = shown(pipes.stdout.as_mut().unwrap(), None).await;
            assert!(text.contains("unread"), "{text:?}");
        });
    }

    #[test]
    fn a_failed_start_is_reported_with_its_reason() {
        with_processes(async |processes| {
            let nowhere = Order { cwd: env::temp_dir().join("outlast-no-such-directory"), ..order("cmd", &[]) };
            for (order, kind) in
                [(order("outlast-no-such-program", &[]), ErrorKind::NotFound), (nowhere, ErrorKind::NotADirectory)]
            {
                processes.spawn(KEY, &order).unwrap();
                match news(processes).await {
                    News::StartFailed { key: KEY, error } => assert_eq!(error.kind(), kind, "{error}"),
                    other => panic!("{other:?}"),
                }
            }
        });
    }
}
