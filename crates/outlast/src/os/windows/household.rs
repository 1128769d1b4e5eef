//! Children: each in a Job Object of its own.
#![expect(unsafe_code, reason = "suspended starts and console events have no safe interface")]

use std::{
    collections::HashMap,
    env,
    ffi::{OsStr, OsString},
    io::{self, ErrorKind},
    os::windows::io::{BorrowedHandle, OwnedHandle},
    path::{Path, PathBuf},
    process::Stdio as Standard,
    sync::mpsc as blocking,
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
    pty::{self, Window},
    stream::{From, Sink, Source, To, keep_own_streams, pipe},
};
use crate::os::{CHILD_TAG, Exit, News, Order, Pipes, Signal, Size, Stdio, threaded::Reader};

/// How long the end of a child is kept back for what it showed last. After that it is told, and the rest is read then.
const DRAIN_MAX: Duration = Duration::from_secs(1);

/// Nothing on Windows: each child's job is made with it.
#[derive(Debug)]
pub struct Keeper(());

impl Keeper {
    pub fn begin() -> io::Result<Keeper> {
        keep_own_streams();
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
    window: Option<Window>,
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
            Stdio::Terminal(size) => return self.spawn_in_terminal(key, order, size),
        }
        if order.sandbox.is_some() {
            return Err(io::Error::other("only Linux can enforce a sandbox"));
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
    /// their stdin does. Whoever has a terminal of its own loses it instead. `Kill` ends the whole job. Already gone is
    /// fine.
    pub fn signal(&mut self, key: u64, signal: Signal) {
        let Some(child) = self.children.get(&key) else { return };
        match signal {
            Signal::HangUp | Signal::Terminate if child.window.is_some() => {
                child.window.iter().for_each(Window::hang_up);
            }
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
        let child = pty::start(order, &program, window, &job)?;
        let pid = child.pid;
        let (process, kept, tell) = (child.process.try_clone()?, child.process.try_clone()?, self.tell.clone());
        let theirs = window.clone();
        let wait = move || {
            let exit = Exit::Code(wait_for(&process));
            // Others may still be there, and would keep the terminal; it was the child's.
            theirs.hang_up();
            // What it showed last is drawn now. Whoever listens reads on when it hears of the end, if not before.
            let _ = drained.recv_timeout(DRAIN_MAX);
            // Nobody listens any more when the household is gone.
            let _ = tell.send(News::Exited { key, exit });
        };
        if let Err(error) = thread::Builder::new().name("outlast-agent".into()).spawn(wait) {
            job.terminate();
            return Err(error);
        }
        self.tell(News::Started { key, pid });
        if child.resume().is_err() {
            // Its end is told.
            job.terminate();
        }
        self.children.insert(key, Child { job, _process: kept, pid, window: Some(window.clone()) });
        Ok(())
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
        self.children.insert(key, Child { job, _process: process, pid, window: None });
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
        }
    }

    fn with_household<T>(work: impl AsyncFnOnce(&mut Household) -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut household = Keeper::begin().unwrap().attach().unwrap();
            work(&mut household).await
        })
    }

    async fn news(household: &mut Household) -> News {
        poll_fn(|cx| household.poll_news(cx)).await
    }

    async fn exit(household: &mut Household) -> Exit {
        match news(household).await {
            News::Exited { key: KEY, exit } => exit,
            other => panic!("{other:?}"),
        }
    }

    async fn start(household: &mut Household, order: &Order) -> Pipes {
        let pipes = household.spawn(KEY, order).unwrap();
        match news(household).await {
            News::Started { key: KEY, pid } => assert_ne!(pid, 0),
            other => panic!("{other:?}"),
        }
        pipes
    }

    /// All that is shown, to the end or until these words are among it.
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
    fn the_last_words_of_a_child_are_read_and_its_exit_code_is_told() {
        with_household(async |household| {
            let mut pipes = start(household, &order("cmd", &["/c", "echo first words& echo last words& exit 7"])).await;
            let text = shown(pipes.stdout.as_mut().unwrap(), None).await;
            assert!(text.contains("first words") && text.contains("last words"), "{text:?}");
            assert!(!text.contains("\x1b[?9001h"), "{text:?}");
            assert_eq!(exit(household).await, Exit::Code(7));
            pipes.window.unwrap().resize(Size::default()).unwrap();
            household.sweep(KEY);
            assert!(matches!(news(household).await, News::Swept { key: KEY }));
        });
    }

    #[test]
    fn what_is_typed_arrives_and_a_resize_is_taken() {
        with_household(async |household| {
            let mut pipes = start(household, &order("cmd", &["/k", "prompt $g"])).await;
            // At its prompt.
            shown(pipes.stdout.as_mut().unwrap(), Some(">")).await;
            pipes.window.as_ref().unwrap().resize(Size { columns: 100, rows: 40, width: 0, height: 0 }).unwrap();
            press(pipes.stdin.as_mut().unwrap(), b"exit 5\r").await;
            assert_eq!(exit(household).await, Exit::Code(5));
        });
    }

    #[test]
    fn a_child_can_be_hung_up_on_and_killed() {
        with_household(async |household| {
            for signal in [Signal::Kill, Signal::HangUp] {
                let mut pipes = start(household, &order("cmd", &["/k", "echo ready"])).await;
                shown(pipes.stdout.as_mut().unwrap(), Some("ready")).await;
                household.signal(KEY, signal);
                shown(pipes.stdout.as_mut().unwrap(), None).await;
                let exit = exit(household).await;
                assert!(signal != Signal::Kill || exit == Exit::Code(1), "{exit:?}");
                household.sweep(KEY);
                assert!(matches!(news(household).await, News::Swept { key: KEY }));
            }
        });
    }

    #[test]
    fn one_who_is_not_listened_to_is_still_heard_to_end() {
        with_household(async |household| {
            let mut pipes = start(household, &order("cmd", &["/c", "echo unread& exit 4"])).await;
            assert_eq!(exit(household).await, Exit::Code(4));
            let text = shown(pipes.stdout.as_mut().unwrap(), None).await;
            assert!(text.contains("unread"), "{text:?}");
        });
    }

    #[test]
    fn what_cannot_be_started_is_told_by_its_reason() {
        with_household(async |household| {
            let nowhere = Order { cwd: env::temp_dir().join("outlast-no-such-directory"), ..order("cmd", &[]) };
            for (order, kind) in
                [(order("outlast-no-such-program", &[]), ErrorKind::NotFound), (nowhere, ErrorKind::NotADirectory)]
            {
                household.spawn(KEY, &order).unwrap();
                match news(household).await {
                    News::StartFailed { key: KEY, error } => assert_eq!(error.kind(), kind, "{error}"),
                    other => panic!("{other:?}"),
                }
            }
        });
    }
}
