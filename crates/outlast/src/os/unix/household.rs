//! Our side of the keeper: orders out, news in.
#![expect(
    unsafe_code,
    reason = "forks the keeper, joins the reactor, borrows our standard descriptors to hand them on"
)]

use std::{
    collections::VecDeque,
    io::{self, ErrorKind, IoSlice},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    task::{Context, Poll, ready},
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::{
        socket::{
            AddressFamily, ControlMessage, MsgFlags, Shutdown, SockFlag, SockType, sendmsg, shutdown, socketpair,
        },
        wait::{WaitPidFlag, waitpid},
    },
    unistd::{ForkResult, Pid, fork},
};
use tokio::io::unix::AsyncFd;

use super::{
    keeper, pty,
    stream::{pipe_from_child, pipe_to_child, set_nonblocking},
    wire,
};
use crate::os::{News, Order, Pipes, Signal, Stdio};

/// How long [`Household::close`] waits for the keeper, which takes a second at most unless a process
/// cannot even be killed; then the keeper stays behind to see to that.
const CLOSE_MAX: Duration = Duration::from_secs(3);

/// How much news is read at once.
const READ_MAX: usize = 4096;

/// The keeper process, before there is a runtime.
#[derive(Debug)]
pub struct Keeper {
    socket: OwnedFd,
    pid: Pid,
}

impl Keeper {
    /// Forks the keeper. It stays until the [`Household`] it serves is gone, and ends what is left then.
    ///
    /// Must come before any thread: a forked process has only the thread that forked, and would wait for
    /// ever for whatever lock another one held. On Linux a second thread is an error here.
    pub fn begin() -> io::Result<Keeper> {
        #[cfg(target_os = "linux")]
        if 1 < std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count) {
            return Err(io::Error::other("the keeper must be forked before any thread exists"));
        }
        let (ours, keepers) = socket_pair()?;
        // SAFETY: there is no other thread (see above), so the new process finds every lock free, and it
        // never returns from the block below.
        match unsafe { fork() }? {
            ForkResult::Child => {
                drop(ours);
                keeper::main(keepers)
            }
            ForkResult::Parent { child } => Ok(Keeper { socket: ours, pid: child }),
        }
    }

    /// Joins the runtime we are in.
    pub fn attach(self) -> io::Result<Household> {
        set_nonblocking(&self.socket)?;
        // SAFETY: an owned descriptor stays the same, and open, for as long as its owner is.
        let socket = unsafe { AsyncFd::register(self.socket) }.map_err(|error| error.into_parts().1)?;
        Ok(Household { socket, keeper: self.pid, outbox: VecDeque::new(), inbox: Vec::new(), is_lost: false })
    }
}

/// All our children, by key. Dropping it ends them.
#[derive(Debug)]
pub struct Household {
    socket: AsyncFd<OwnedFd>,
    keeper: Pid,
    /// Bounded by what the caller asks for between two turns of its loop: the keeper only ever works.
    outbox: VecDeque<Letter>,
    inbox: Vec<u8>,
    is_lost: bool,
}

#[derive(Debug)]
struct Letter {
    bytes: Vec<u8>,
    sent: usize,
    /// They leave with the first byte.
    fds: Vec<OwnedFd>,
}

impl Household {
    /// Orders a child. Never waits: whether it could be started is news.
    pub fn spawn(&mut self, key: u64, order: &Order) -> io::Result<Pipes> {
        let bytes = wire::encode_spawn(key, order)?;
        let mut pipes = Pipes::default();
        let fds = match order.stdio {
            Stdio::Piped => {
                let (stdin, theirs) = pipe_to_child()?;
                let (stdout, output) = pipe_from_child()?;
                let (stderr, errors) = pipe_from_child()?;
                pipes = Pipes { stdin: Some(stdin), stdout: Some(stdout), stderr: Some(stderr), window: None };
                vec![theirs, output, errors]
            }
            Stdio::Inherit => [libc::STDIN_FILENO, libc::STDOUT_FILENO, libc::STDERR_FILENO]
                // SAFETY: std opens /dev/null in place of closed standard descriptors at start, and we never
                // close them.
                .map(|number| unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned())
                .into_iter()
                .collect::<io::Result<_>>()?,
            Stdio::Build => {
                let (both, output) = pipe_from_child()?;
                pipes.stderr = Some(both);
                let errors = output.try_clone()?;
                vec![std::fs::File::open("/dev/null")?.into(), output, errors]
            }
            Stdio::Terminal(size) => {
                let pair = pty::open(size)?;
                pipes.stdin = Some(pair.sink);
                pipes.stdout = Some(pair.source);
                pipes.window = Some(pair.window);
                vec![pair.theirs.try_clone()?, pair.theirs.try_clone()?, pair.theirs]
            }
        };
        self.post(bytes, fds);
        Ok(pipes)
    }

    /// Signals the child's group and what left it but carries its tag. Already gone is fine.
    pub fn signal(&mut self, key: u64, signal: Signal) {
        self.post(wire::encode_signal(key, signal), Vec::new());
    }

    /// Kills whatever an ended child has left, in its group or out of it; [`News::Swept`] follows. Each
    /// child that has exited is to be swept: until then its process id is kept from being used again.
    pub fn sweep(&mut self, key: u64) {
        self.post(wire::encode_sweep(key), Vec::new());
    }

    /// The next piece of news. Cancel-safe.
    pub fn poll_news(&mut self, cx: &mut Context<'_>) -> Poll<News> {
        if self.is_lost {
            return Poll::Pending;
        }
        match self.try_poll_news(cx) {
            Poll::Ready(Ok(news)) => Poll::Ready(news),
            Poll::Ready(Err(_)) => {
                self.is_lost = true;
                self.outbox.clear();
                // It is a zombie now, or soon: then `Drop` reaps it.
                self.reap(WaitPidFlag::WNOHANG);
                Poll::Ready(News::KeeperLost)
            }
            Poll::Pending => Poll::Pending,
        }
    }

    /// Ends every child and waits for the keeper to be done, a bounded time.
    pub async fn close(mut self) {
        if self.is_lost {
            return;
        }
        // The keeper reads an end of file, as it would if we had been killed.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Write);
        self.outbox.clear();
        let gone = std::future::poll_fn(|cx| {
            loop {
                if ready!(self.try_poll_news(cx)).is_err() {
                    return Poll::Ready(());
                }
            }
        });
        if tokio::time::timeout(CLOSE_MAX, gone).await.is_ok() {
            // Its end of the socket closed as it exited, so this takes no time.
            self.reap(WaitPidFlag::empty());
        }
        self.is_lost = true;
    }

    /// An error means that the keeper is gone.
    fn try_poll_news(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<News>> {
        loop {
            if let Some(news) = wire::take_news(&mut self.inbox)? {
                return Poll::Ready(Ok(news));
            }
            while !self.outbox.is_empty() {
                let Poll::Ready(readiness) = self.socket.poll_write_ready(cx) else { break };
                let mut readiness = readiness?;
                match send_next(self.socket.get_ref(), &mut self.outbox) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => readiness.clear_ready(),
                    // What the keeper said before it went is still to be read.
                    Err(_) => self.outbox.clear(),
                    Ok(()) => {}
                }
            }
            let mut readiness = ready!(self.socket.poll_read_ready(cx))?;
            let mut space = [0; READ_MAX];
            match nix::unistd::read(self.socket.get_ref(), &mut space) {
                Ok(0) => return Poll::Ready(Err(ErrorKind::UnexpectedEof.into())),
                Ok(count) => {
                    self.inbox.extend_from_slice(&space[..count]);
                    if count < space.len() {
                        readiness.clear_ready();
                    }
                }
                Err(Errno::EAGAIN) => readiness.clear_ready(),
                Err(Errno::EINTR) => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }

    fn post(&mut self, bytes: Vec<u8>, fds: Vec<OwnedFd>) {
        if self.is_lost {
            return;
        }
        self.outbox.push_back(Letter { bytes, sent: 0, fds });
        // Usually there is room, and the order is out at once. If not, `poll_news` sees to it.
        while !self.outbox.is_empty() && send_next(self.socket.get_ref(), &mut self.outbox).is_ok() {}
    }

    fn reap(&mut self, options: WaitPidFlag) {
        while waitpid(self.keeper, Some(options)) == Err(Errno::EINTR) {}
    }
}

impl Drop for Household {
    fn drop(&mut self) {
        self.reap(WaitPidFlag::WNOHANG);
    }
}

/// Sends what the kernel takes of the first letter, which there is.
fn send_next(socket: &OwnedFd, outbox: &mut VecDeque<Letter>) -> io::Result<()> {
    let Some(letter) = outbox.front_mut() else { return Ok(()) };
    let fds: Vec<RawFd> = letter.fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&fds)];
    let control: &[_] = if fds.is_empty() { &[] } else { &rights };
    let rest = [IoSlice::new(&letter.bytes[letter.sent..])];
    match sendmsg::<()>(socket.as_fd().as_raw_fd(), &rest, control, MsgFlags::empty(), None) {
        Ok(count) => {
            letter.fds.clear();
            letter.sent += count;
        }
        Err(Errno::EINTR) => {}
        Err(error) => return Err(error.into()),
    }
    if letter.sent == letter.bytes.len() {
        outbox.pop_front();
    }
    Ok(())
}

fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    #[cfg(target_os = "linux")]
    return Ok(socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::SOCK_CLOEXEC)?);
    #[cfg(not(target_os = "linux"))]
    {
        use nix::fcntl::{FcntlArg, FdFlag, fcntl};
        let pair = socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::empty())?;
        for end in [&pair.0, &pair.1] {
            fcntl(end, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        }
        Ok(pair)
    }
}
