//! Hands this process over to another program by `execve`: the state in a memory file, and descriptors that stay open.
//! What the state contains is decided by the drivers; it is neither written nor read here.
#![expect(unsafe_code, reason = "takes over descriptors by number, changes the environment before any thread exists")]

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    ffi::{CString, OsString},
    fs::{self, File},
    io::{self, ErrorKind, Read, Seek, SeekFrom, Write},
    net::{TcpListener, TcpStream},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::{
            ffi::{OsStrExt, OsStringExt},
            fs::{MetadataExt, PermissionsExt},
        },
    },
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::{SigSet, SigmaskHow, sigprocmask},
    unistd::execve,
};

/// The environment variable of the next program: the descriptor of the state, then all others that it gets.
const DESCRIPTORS: &str = "OUTLAST_HANDOVER";

/// The longest state. It holds the queues of a conversation, which are bounded far below this.
const STATE_MAX: u64 = 512 << 20;

/// How much is read of what a program prints when it checks a state.
const PRINTED_MAX: usize = 64 << 10;

/// A file without a name that only this user can read. On Linux it is in memory, so that a full disk does not matter.
#[derive(Debug)]
pub struct MemoryFile(File);

impl MemoryFile {
    pub fn new(bytes: &[u8]) -> io::Result<MemoryFile> {
        let mut file = unnamed_file()?;
        file.write_all(bytes)?;
        file.seek(SeekFrom::Start(0))?;
        Ok(MemoryFile(file))
    }
}

#[cfg(target_os = "linux")]
fn unnamed_file() -> io::Result<File> {
    // SAFETY: the name is a C string, and the flag is known to every supported kernel.
    let fd = unsafe { libc::memfd_create(c"outlast-state".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

#[cfg(not(target_os = "linux"))]
fn unnamed_file() -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let name = format!("outlast-{}-{}.state", nix::unistd::geteuid(), std::process::id());
    let path = env::temp_dir().join(name);
    let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

/// The descriptors that the next program gets.
#[derive(Debug, Default)]
pub struct Handover(BTreeSet<RawFd>);

impl Handover {
    /// Keeps a descriptor open, and returns the number by which the next program takes it. The descriptor must stay
    /// open until then.
    pub(super) fn keep(&mut self, fd: BorrowedFd<'_>) -> i32 {
        self.0.insert(fd.as_raw_fd());
        fd.as_raw_fd()
    }

    /// The same for a TCP socket.
    pub fn keep_tcp(&mut self, socket: &impl AsFd) -> i32 {
        self.keep(socket.as_fd())
    }
}

/// Becomes another program, with the same process id, arguments and environment. Returns only on failure; then nothing
/// has changed. Signals are blocked until the next program calls [`Received::unblock_signals`].
pub fn become_next(program: &Path, args: &[OsString], state: &MemoryFile, handover: &Handover) -> io::Error {
    let text = |bytes: &[u8]| CString::new(bytes).map_err(|_| io::Error::from(ErrorKind::InvalidInput));
    let prepared = (|| {
        let numbers: Vec<String> =
            [state.0.as_raw_fd()].iter().chain(&handover.0).map(|number| number.to_string()).collect();
        let own = [(OsString::from(DESCRIPTORS), OsString::from(numbers.join(" ")))];
        let variables = env::vars_os().filter(|(name, _)| name != DESCRIPTORS).chain(own);
        let variables = variables
            .map(|(name, value)| text(&[name.as_bytes(), b"=", value.as_bytes()].concat()))
            .collect::<io::Result<Vec<CString>>>()?;
        let args = args.iter().map(|arg| text(arg.as_bytes())).collect::<io::Result<Vec<CString>>>()?;
        Ok((text(program.as_os_str().as_bytes())?, args, variables))
    })();
    let (program, args, variables) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => return error,
    };
    let mut before = SigSet::empty();
    if let Err(error) = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), Some(&mut before)) {
        return error.into();
    }
    let kept = || [state.0.as_raw_fd()].into_iter().chain(handover.0.iter().copied());
    let result = (|| {
        kept().try_for_each(|number| set_close_on_exec(number, false))?;
        execve(&program, &args, &variables)
    })();
    let _ = kept().try_for_each(|number| set_close_on_exec(number, true));
    let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&before), None);
    result.expect_err("a program that was executed does not return").into()
}

fn set_close_on_exec(number: RawFd, closes: bool) -> nix::Result<()> {
    // SAFETY: the number is that of a descriptor that its owner keeps open, see `Handover::keep`.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    fcntl(fd, FcntlArg::F_SETFD(if closes { FdFlag::FD_CLOEXEC } else { FdFlag::empty() })).map(drop)
}

/// What the last program of this process left to this one.
#[derive(Debug)]
pub struct Received {
    state: File,
    fds: BTreeMap<RawFd, OwnedFd>,
}

impl Received {
    /// `None` if this process was started like any other. Must be called before any thread starts, and only once.
    pub fn begin() -> io::Result<Option<Received>> {
        let Some(list) = env::var_os(DESCRIPTORS) else { return Ok(None) };
        // SAFETY: there is no other thread yet that could read the environment.
        unsafe { env::remove_var(DESCRIPTORS) };
        let wrong = || io::Error::new(ErrorKind::InvalidData, format!("{DESCRIPTORS} is not a list of descriptors"));
        let mut fds = BTreeMap::new();
        let mut state = None;
        for number in String::from_utf8(list.into_vec()).map_err(|_| wrong())?.split(' ') {
            let number: RawFd = number.parse().map_err(|_| wrong())?;
            if number <= libc::STDERR_FILENO || fds.contains_key(&number) || state == Some(number) {
                return Err(wrong());
            }
            set_close_on_exec(number, true)?;
            // SAFETY: the descriptor is open, as the call above succeeded. At the start of the program no other part of
            // it owns descriptors above stderr, and no number is taken twice.
            fds.insert(number, unsafe { OwnedFd::from_raw_fd(number) });
            state.get_or_insert(number);
        }
        let state = state.and_then(|number| fds.remove(&number)).ok_or_else(wrong)?;
        Ok(Some(Received { state: state.into(), fds }))
    }

    /// The state, from its beginning.
    pub fn state(&mut self) -> io::Result<Vec<u8>> {
        self.state.seek(SeekFrom::Start(0))?;
        read_state(&mut self.state)
    }

    /// Takes over a descriptor by the number that [`Handover::keep`] returned.
    pub(super) fn take(&mut self, number: i32) -> io::Result<OwnedFd> {
        let missing = || io::Error::new(ErrorKind::InvalidData, format!("the descriptor {number} was not handed over"));
        self.fds.remove(&number).ok_or_else(missing)
    }

    /// A listening TCP socket that the last program kept.
    pub fn take_listener(&mut self, number: i32) -> io::Result<TcpListener> {
        let listener = TcpListener::from(self.take(number)?);
        listener.set_nonblocking(true)?;
        Ok(listener)
    }

    /// A TCP connection that the last program kept.
    pub fn take_connection(&mut self, number: i32) -> io::Result<TcpStream> {
        let connection = TcpStream::from(self.take(number)?);
        connection.set_nonblocking(true)?;
        Ok(connection)
    }

    /// Called when the handlers of this program are installed: signals that came meanwhile are delivered now.
    pub fn unblock_signals(&self) -> io::Result<()> {
        Ok(sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?)
    }
}

/// Reads a state from a file, up to the longest that there can be.
pub fn read_state(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(STATE_MAX + 1).read_to_end(&mut bytes)?;
    if STATE_MAX < bytes.len() as u64 {
        return Err(io::Error::new(ErrorKind::FileTooLarge, "the state is too long"));
    }
    Ok(bytes)
}

/// What a program printed when it checked a state, as text.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Printed {
    pub stdout: String,
    pub stderr: String,
    /// It did not exit in time, and was killed.
    pub is_late: bool,
}

/// Runs a program with the state on its stdin and returns what it prints. It blocks for at most `max`.
pub fn try_state(program: &Path, args: &[OsString], state: MemoryFile, max: Duration) -> io::Result<Printed> {
    let mut child = Command::new(program)
        .args(args)
        .stdin(OwnedFd::from(state.0))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let deadline = Instant::now() + max;
    let mut streams: [(Option<File>, Vec<u8>); 2] = [
        (child.stdout.take().map(|stream| OwnedFd::from(stream).into()), Vec::new()),
        (child.stderr.take().map(|stream| OwnedFd::from(stream).into()), Vec::new()),
    ];
    let mut is_late = false;
    while streams.iter().any(|(stream, _)| stream.is_some()) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            is_late = true;
            break;
        }
        let ready: Vec<bool> = {
            let open = streams.iter().filter_map(|(stream, _)| stream.as_ref());
            let mut fds: Vec<PollFd<'_>> = open.map(|stream| PollFd::new(stream.as_fd(), PollFlags::POLLIN)).collect();
            let _ = poll(&mut fds, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX));
            fds.iter().map(|fd| fd.any().unwrap_or(false)).collect()
        };
        let mut ready = ready.into_iter();
        for (stream, printed) in &mut streams {
            let Some(open) = stream.as_mut().filter(|_| ready.next() == Some(true)) else { continue };
            let mut space = [0; 4096];
            match open.read(&mut space) {
                Ok(count @ 1..) if printed.len() < PRINTED_MAX => printed.extend_from_slice(&space[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                _ => *stream = None,
            }
        }
    }
    if is_late {
        let _ = child.kill();
    }
    // `ChildProcesses` reaps every child of this process, and may have been faster.
    let _ = child.wait();
    let [stdout, stderr] = streams.map(|(_, printed)| String::from_utf8_lossy(&printed).into_owned());
    Ok(Printed { stdout, stderr, is_late })
}

/// Which file a program is, and in which state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileIdentity {
    device: u64,
    inode: u64,
    length: u64,
    /// Seconds and nanoseconds.
    changed: (i64, i64),
}

/// The file of a program that this process may become: it must be an executable file of this user or of root.
pub fn check_program(program: &Path) -> io::Result<FileIdentity> {
    let denied = |why: &str| io::Error::new(ErrorKind::PermissionDenied, why.to_owned());
    let found = fs::metadata(program)?;
    if !found.is_file() {
        return Err(denied("it is not a file"));
    }
    if !crate::is_trusted(&found) {
        return Err(denied("it belongs to another user"));
    }
    if found.permissions().mode() & 0o111 == 0 {
        return Err(denied("it is not executable"));
    }
    if found.permissions().mode() & 0o002 != 0 {
        return Err(denied("every user can write to it"));
    }
    Ok(FileIdentity {
        device: found.dev(),
        inode: found.ino(),
        length: found.size(),
        changed: (found.ctime(), found.ctime_nsec()),
    })
}
