//! Windows: one Job Object for each child, streams on threads.
//!
//! A job ends with its last handle, and only we have one, so nothing outlives us however we go: there is no
//! keeper process. Nobody can leave a job, so its members are the whole family, and the tag is only for them
//! to read.
#![expect(unsafe_code, reason = "job objects, suspended starts and console events have no safe interface")]

use std::{
    collections::HashMap,
    env,
    ffi::{OsStr, OsString},
    fs::File,
    future::Future,
    io::{self, ErrorKind, IoSlice, Write},
    os::windows::io::{AsRawHandle, BorrowedHandle, FromRawHandle, HandleOrNull, OwnedHandle},
    path::{Path, PathBuf},
    pin::{Pin, pin},
    process::Stdio as Standard,
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
        mpsc as blocking,
    },
    task::{Context, Poll},
    thread,
    time::Duration,
};

use bytes::BytesMut;
use tokio::{
    io::{AsyncReadExt, AsyncWrite},
    process::{ChildStderr, ChildStdin, ChildStdout, Command},
    signal::windows::{CtrlBreak, CtrlC, CtrlClose, CtrlShutdown, ctrl_break, ctrl_c, ctrl_close, ctrl_shutdown},
    sync::mpsc,
};
use windows_sys::Win32::{
    Foundation::{CloseHandle, HANDLE, INVALID_HANDLE_VALUE},
    System::{
        Console::{
            CONSOLE_SCREEN_BUFFER_INFO, CTRL_BREAK_EVENT, ENABLE_VIRTUAL_TERMINAL_PROCESSING, GenerateConsoleCtrlEvent,
            GetConsoleMode, GetConsoleScreenBufferInfo, GetStdHandle, STD_OUTPUT_HANDLE, SetConsoleMode,
        },
        Diagnostics::ToolHelp::{
            CreateToolhelp32Snapshot, TH32CS_SNAPTHREAD, THREADENTRY32, Thread32First, Thread32Next,
        },
        JobObjects::{
            AssignProcessToJobObject, CreateJobObjectW, JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE,
            JOBOBJECT_EXTENDED_LIMIT_INFORMATION, JobObjectExtendedLimitInformation, SetInformationJobObject,
            TerminateJobObject,
        },
        Pipes::CreatePipe,
        Threading::{
            CREATE_NEW_PROCESS_GROUP, CREATE_SUSPENDED, OpenProcess, OpenThread, PROCESS_TERMINATE, ResumeThread,
            THREAD_SUSPEND_RESUME, TerminateProcess,
        },
    },
};

use super::{
    CHILD_TAG, Exit, News, Order, OuterEvent, Pipes, Signal, Size, Stdio, Stop,
    threaded::{Reader, Writer},
};

mod socket;

pub use socket::{Line, Listener, Peer, SOCKET_PATH_MAX, SOCKETS, born, claim_dir, remove_socket, short_dirs};

/// Whether children can be given terminals here, or a sentence that says why not.
pub const TERMINALS: Result<(), &str> = Err("an agent cannot be given a terminal of its own on Windows yet");

/// A child's terminal. There is none here yet, so there is no value of it either.
#[derive(Debug)]
pub enum Window {}

impl Window {
    pub fn resize(&self, _size: Size) -> io::Result<()> {
        match *self {}
    }
}

/// Tells who started us in the background how we fare: not yet.
#[derive(Debug)]
pub enum Announce {}

impl Announce {
    pub fn say(self, _text: &str) {
        match self {}
    }
}

pub fn detach() -> io::Result<super::Detached> {
    Err(io::Error::new(ErrorKind::Unsupported, TERMINALS.expect_err("there are none here")))
}

/// A name that is ours alone: not yet.
#[derive(Debug)]
pub enum Claim {}

pub fn claim_name(_path: &Path) -> io::Result<Option<Claim>> {
    Err(io::Error::new(ErrorKind::Unsupported, TERMINALS.expect_err("there are none here")))
}

/// One who stands in our place before the shell: not yet.
#[derive(Debug)]
pub enum StandIn {}

#[derive(Debug)]
pub enum Standing {
    Over(u8),
    Worker(StandIn),
}

pub fn stand_in(_name: &'static str) -> io::Result<Option<Standing>> {
    Ok(None)
}

/// The terminal we are on, lent to a child: not yet.
#[derive(Debug)]
pub struct Outer {
    pub source: Source,
    pub sink: Sink,
    nobody: std::convert::Infallible,
}

impl Outer {
    pub fn begin(stand_in: StandIn) -> io::Result<Outer> {
        match stand_in {}
    }

    pub fn leave(self, _words: &str) -> io::Result<()> {
        match self.nobody {}
    }

    pub fn make_raw(&self) -> io::Result<()> {
        match self.nobody {}
    }

    pub fn suspend(&self) {
        match self.nobody {}
    }

    pub fn is_job(&self) -> bool {
        match self.nobody {}
    }

    pub fn poll_event(&mut self, _cx: &mut Context<'_>) -> Poll<OuterEvent> {
        match self.nobody {}
    }

    pub fn size(&self) -> Size {
        match self.nobody {}
    }

    pub fn note_alternate(&self, _is_alternate: bool) {
        match self.nobody {}
    }
}

pub fn outer_size() -> Size {
    Size::default()
}

pub fn write_stdout(_words: &str) {}

pub fn calm(_is_alternate: bool) -> Vec<u8> {
    Vec::new()
}

/// The exit code of whoever is in a job that we end.
const KILLED: u32 = 1;

/// How long a line may wait for a reader of stderr. After that it is dropped, and until the reader is back
/// no line waits at all.
const PATIENCE: Duration = Duration::from_millis(100);

/// Nothing on Windows: each child's job is made with it.
#[derive(Debug)]
pub struct Keeper(());

impl Keeper {
    pub fn begin() -> io::Result<Keeper> {
        Ok(Keeper(()))
    }

    /// Joins the runtime we are in.
    pub fn attach(self) -> io::Result<Household> {
        let (tell, news) = mpsc::unbounded_channel();
        Ok(Household { children: HashMap::new(), tell, news })
    }
}

/// All our children, by key. Dropping it ends them.
#[derive(Debug)]
pub struct Household {
    children: HashMap<u64, Child>,
    tell: mpsc::UnboundedSender<News>,
    /// Bounded by the number of children: each has three pieces of news.
    news: mpsc::UnboundedReceiver<News>,
}

#[derive(Debug)]
struct Child {
    job: Job,
    /// A process id is not used again while someone has a handle.
    _process: OwnedHandle,
    pid: u32,
}

impl Household {
    /// Starts a child. Whether that went well is news.
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
            Stdio::Build => {
                let (read, write) = pipe()?;
                command.stdin(Standard::null()).stdout(write.try_clone()?).stderr(write);
                pipes.stderr = Some(Source(From::Thread(Reader::begin("outlast-build", read)?)));
            }
            Stdio::Terminal(_) => {
                return Err(io::Error::new(ErrorKind::Unsupported, TERMINALS.expect_err("there are none here")));
            }
        }
        let job = Job::new()?;
        match self.start(key, &mut command, job) {
            Ok((stdin, stdout, stderr)) => {
                pipes.stdin = stdin.map(|stdin| Sink(To::Child(stdin)));
                pipes.stdout = stdout.map(|stdout| Source(From::Stdout(stdout)));
                pipes.stderr = pipes.stderr.or(stderr.map(|stderr| Source(From::Stderr(stderr))));
            }
            Err(error) => self.tell(News::StartFailed { key, error: explain(order, &error) }),
        }
        Ok(pipes)
    }

    /// `Terminate` is a Ctrl-Break, which only console programs on our console hear; most servers end when
    /// their stdin does. `Kill` ends the whole job. Already gone is fine.
    pub fn signal(&mut self, key: u64, signal: Signal) {
        let Some(child) = self.children.get(&key) else { return };
        match signal {
            Signal::HangUp | Signal::Terminate => {
                // SAFETY: takes two numbers. The child is the leader of a group of its own, so the event does
                // not come back to us, and its number is not someone else's while we have a handle.
                unsafe { GenerateConsoleCtrlEvent(CTRL_BREAK_EVENT, child.pid) };
            }
            Signal::Kill => child.job.terminate(),
            // Nobody stops here.
            Signal::Continue => {}
        }
    }

    /// Ends whatever an ended child has left; [`News::Swept`] follows.
    pub fn sweep(&mut self, key: u64) {
        if let Some(child) = self.children.remove(&key) {
            child.job.terminate();
        }
        self.tell(News::Swept { key });
    }

    /// The next piece of news. Cancel-safe.
    pub fn poll_news(&mut self, cx: &mut Context<'_>) -> Poll<News> {
        // We have a sender ourselves, so the channel does not end.
        self.news.poll_recv(cx).map(|news| news.unwrap_or(News::KeeperLost))
    }

    /// Ends every child. The system does the rest by itself.
    pub async fn close(self) {
        for child in self.children.values() {
            child.job.terminate();
        }
    }

    /// Suspended, so that it is in its job before it can start anyone.
    fn start(
        &mut self,
        key: u64,
        command: &mut Command,
        job: Job,
    ) -> io::Result<(Option<ChildStdin>, Option<ChildStdout>, Option<ChildStderr>)> {
        let mut child = command.creation_flags(CREATE_SUSPENDED | CREATE_NEW_PROCESS_GROUP).spawn()?;
        let (Some(pid), Some(handle)) = (child.id(), child.raw_handle()) else {
            return Err(io::Error::other("it ended before it began"));
        };
        // SAFETY: the child owns the handle and is not waited for yet.
        let process = unsafe { BorrowedHandle::borrow_raw(handle) }.try_clone_to_owned()?;
        if let Err(error) = job.assign(&process).and_then(|()| resume(pid)) {
            // It has not run a single instruction.
            let _ = child.start_kill();
            return Err(error);
        }
        self.children.insert(key, Child { job, _process: process, pid });
        self.tell(News::Started { key, pid });
        let streams = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let tell = self.tell.clone();
        tokio::spawn(async move {
            // A wait fails only for a handle that is none; then at least the end is reported.
            let code = child.wait().await.ok().and_then(|status| status.code()).unwrap_or(-1);
            // Nobody listens any more when the household is gone.
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
    command
        .args(&order.args)
        .current_dir(&order.cwd)
        .envs(order.env.iter().map(|(name, value)| (name, value)))
        .env(CHILD_TAG, &order.tag);
    command
}

/// Where the program is. The system itself looks only for `.exe`, but `npx` and its like are scripts with
/// other endings, which people leave out.
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

/// Says what is missing: the system has one word for a missing program and a missing directory.
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

/// A job whose members end with it.
#[derive(Debug)]
struct Job(OwnedHandle);

impl Job {
    fn new() -> io::Result<Job> {
        // SAFETY: null asks for no name and the usual rights; the result is a new handle, or null.
        let handle = unsafe { HandleOrNull::from_raw_handle(CreateJobObjectW(ptr::null(), ptr::null())) };
        let job = Job(OwnedHandle::try_from(handle).map_err(|_| io::Error::last_os_error())?);
        // SAFETY: a zeroed limit is a valid one that limits nothing; the call reads just its size.
        let result = unsafe {
            let mut limits: JOBOBJECT_EXTENDED_LIMIT_INFORMATION = std::mem::zeroed();
            limits.BasicLimitInformation.LimitFlags = JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE;
            SetInformationJobObject(
                job.raw(),
                JobObjectExtendedLimitInformation,
                (&raw const limits).cast(),
                size_of_val(&limits) as u32,
            )
        };
        check(result).map(|()| job)
    }

    fn assign(&self, process: &OwnedHandle) -> io::Result<()> {
        // SAFETY: both handles are open.
        check(unsafe { AssignProcessToJobObject(self.raw(), process.as_raw_handle()) })
    }

    fn terminate(&self) {
        // SAFETY: the handle is open. It fails only if there is nobody in the job.
        unsafe { TerminateJobObject(self.raw(), KILLED) };
    }

    fn raw(&self) -> HANDLE {
        self.0.as_raw_handle()
    }
}

/// Lets a suspended process go. std closes the handle of its first thread, so that must be looked up.
fn resume(pid: u32) -> io::Result<()> {
    // SAFETY: the snapshot and thread handles are open where they are used and closed once; the entry has
    // the size it says.
    unsafe {
        let snapshot = CreateToolhelp32Snapshot(TH32CS_SNAPTHREAD, 0);
        if snapshot == INVALID_HANDLE_VALUE {
            return Err(io::Error::last_os_error());
        }
        let mut entry: THREADENTRY32 = std::mem::zeroed();
        entry.dwSize = size_of::<THREADENTRY32>() as u32;
        let mut result = Err(io::Error::other("the new process has no thread"));
        let mut is_entry = Thread32First(snapshot, &raw mut entry) != 0;
        while is_entry {
            if entry.th32OwnerProcessID == pid {
                let thread = OpenThread(THREAD_SUSPEND_RESUME, 0, entry.th32ThreadID);
                result = if thread.is_null() || ResumeThread(thread) == u32::MAX {
                    Err(io::Error::last_os_error())
                } else {
                    Ok(())
                };
                if !thread.is_null() {
                    CloseHandle(thread);
                }
                break;
            }
            is_entry = Thread32Next(snapshot, &raw mut entry) != 0;
        }
        CloseHandle(snapshot);
        result
    }
}

fn pipe() -> io::Result<(File, File)> {
    let (mut read, mut write) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the call fills in two new handles, which nobody else owns.
    unsafe {
        check(CreatePipe(&raw mut read, &raw mut write, ptr::null(), 0))?;
        Ok((File::from_raw_handle(read), File::from_raw_handle(write)))
    }
}

fn check(result: i32) -> io::Result<()> {
    if result == 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Something to read.
#[derive(Debug)]
pub struct Source(From);

#[derive(Debug)]
enum From {
    Stdout(ChildStdout),
    Stderr(ChildStderr),
    Thread(Reader),
}

impl Source {
    /// Reads into the spare capacity of `buf`; 0 is the end. Cancel-safe.
    pub fn poll_read(&mut self, cx: &mut Context<'_>, buf: &mut BytesMut) -> Poll<io::Result<usize>> {
        if buf.len() == buf.capacity() {
            buf.reserve(8 * 1024);
        }
        match &mut self.0 {
            From::Stdout(stdout) => pin!(stdout.read_buf(buf)).poll(cx),
            From::Stderr(stderr) => pin!(stderr.read_buf(buf)).poll(cx),
            From::Thread(reader) => reader.poll_read(cx, buf),
        }
    }
}

impl Source {
    /// Pipes have the room they were made with.
    pub fn widen(&self) {}

    /// What is there at this moment.
    pub fn read_now(&mut self, buf: &mut BytesMut) -> Option<io::Result<usize>> {
        match self.poll_read(&mut Context::from_waker(std::task::Waker::noop()), buf) {
            Poll::Ready(read) => Some(read),
            Poll::Pending => None,
        }
    }
}

/// Something to write. Dropping it closes a child's pipe.
#[derive(Debug)]
pub struct Sink(To);

#[derive(Debug)]
enum To {
    Child(ChildStdin),
    Thread(Writer),
}

impl Sink {
    /// As [`Source::widen`].
    pub fn widen(&self) {}

    /// Writes what fits. After `Pending` the next call must begin with the same bytes.
    pub fn poll_write(&mut self, cx: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        match &mut self.0 {
            To::Child(stdin) => Pin::new(stdin).poll_write_vectored(cx, slices),
            To::Thread(writer) => writer.poll_write(cx, slices),
        }
    }
}

/// Our own stdin, whatever it is.
pub fn stdin() -> io::Result<Source> {
    Ok(Source(From::Thread(Reader::begin("outlast-stdin", io::stdin())?)))
}

/// Our own stdout, whatever it is.
pub fn stdout() -> io::Result<Sink> {
    Ok(Sink(To::Thread(Writer::begin("outlast-stdout", io::stdout())?)))
}

/// Here a hang-up is learned of by the next read or write, on the threads that do them.
#[derive(Debug)]
pub struct Hangups;

impl Hangups {
    pub fn begin() -> io::Result<Hangups> {
        Ok(Hangups)
    }

    pub fn poll_stdin(&mut self, _cx: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }

    pub fn poll_stdout(&mut self, _cx: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
}

/// Console events by which people and the system ask us to stop.
#[derive(Debug)]
pub struct Stops {
    c: CtrlC,
    ctrl_break: CtrlBreak,
    close: CtrlClose,
    shutdown: CtrlShutdown,
}

impl Stops {
    pub fn begin() -> io::Result<Stops> {
        Ok(Stops { c: ctrl_c()?, ctrl_break: ctrl_break()?, close: ctrl_close()?, shutdown: ctrl_shutdown()? })
    }

    /// The next event, with the number of the signal that means the same elsewhere. Cancel-safe.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Stop> {
        if self.c.poll_recv(cx).is_ready() {
            return Poll::Ready(Stop { name: "Ctrl-C", number: 2 });
        }
        if self.ctrl_break.poll_recv(cx).is_ready() {
            return Poll::Ready(Stop { name: "Ctrl-Break", number: 15 });
        }
        if self.close.poll_recv(cx).is_ready() {
            return Poll::Ready(Stop { name: "close", number: 1 });
        }
        if self.shutdown.poll_recv(cx).is_ready() {
            return Poll::Ready(Stop { name: "shutdown", number: 15 });
        }
        Poll::Pending
    }
}

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

/// Columns and rows of the console on stdout; none if it is no console or draws no escape sequences.
pub fn terminal_size() -> Option<(u16, u16)> {
    // SAFETY: the handle is the process's own and stays open; a handle that is no console is an error; and both
    // calls write one plain value each, which is there and ours.
    let info = unsafe {
        let console = GetStdHandle(STD_OUTPUT_HANDLE);
        let mut mode = 0;
        let mut info: CONSOLE_SCREEN_BUFFER_INFO = std::mem::zeroed();
        let draws = GetConsoleMode(console, &raw mut mode) != 0
            && SetConsoleMode(console, mode | ENABLE_VIRTUAL_TERMINAL_PROCESSING) != 0
            && GetConsoleScreenBufferInfo(console, &raw mut info) != 0;
        draws.then_some(info)?
    };
    let columns = u16::try_from(info.srWindow.Right - info.srWindow.Left + 1).ok()?;
    let rows = u16::try_from(info.srWindow.Bottom - info.srWindow.Top + 1).ok()?;
    (columns > 0 && rows > 0).then_some((columns, rows))
}

/// Ends a process without a warning, by its bare id: for `outlast demo` alone, which plays the one who does such
/// things to the demo's server. All else is ended through its job, which cannot hit a stranger.
pub fn kill_hard(pid: u32) -> io::Result<()> {
    // SAFETY: opening takes plain numbers; a null handle is an error, and any other is ours to close.
    let process = unsafe { HandleOrNull::from_raw_handle(OpenProcess(PROCESS_TERMINATE, 0, pid)) };
    let process = OwnedHandle::try_from(process).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: the handle is open and may terminate.
    match unsafe { TerminateProcess(process.as_raw_handle(), KILLED) } {
        0 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Handles are bounded by memory alone.
pub fn room_for_descriptors(wanted: u64) -> u64 {
    wanted
}

/// The system looks after our code by itself.
pub fn give_back_code() {}

/// Nothing is weighed here.
pub fn weigh(_leaders: &[u32]) -> Option<Vec<u64>> {
    None
}

/// There is no such thing here.
pub fn suspend() {}

/// Another program takes our place: no process can turn into another here, so we wait for it and end as it does. What
/// comes back is why it could not be started.
pub fn become_program(program: &Path, args: &[&str]) -> io::Error {
    match std::process::Command::new(program).args(args).status() {
        Ok(status) => std::process::exit(status.code().unwrap_or(1)),
        Err(error) => error,
    }
}

/// A job ends all that is in it, so there are none; and nobody shows us another's environment.
pub fn strays() -> Option<Vec<crate::os::Stray>> {
    None
}

/// Who owns what is not asked here: the directory lies below the user's own.
pub fn is_ours(_path: &Path) -> bool {
    true
}
