//! The control socket: a named pipe, asynchronous for the server, and blocking with a timeout for clients. The
//! messages are defined in the control crate.
#![expect(unsafe_code, reason = "sets which users may open a pipe, and cancels reads and writes that take too long")]

use std::{
    cell::Cell,
    fmt,
    fs::{self, File, OpenOptions},
    future::Future,
    hash::{BuildHasher, RandomState},
    io::{self, ErrorKind, Read, Write},
    os::windows::{
        ffi::OsStrExt,
        fs::OpenOptionsExt,
        io::{AsRawHandle, FromRawHandle, HandleOrNull, IntoRawHandle, OwnedHandle},
    },
    path::{Path, PathBuf},
    pin::{Pin, pin},
    ptr,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use bytes::BytesMut;
use tokio::{
    io::{AsyncReadExt, AsyncWrite},
    net::windows::named_pipe::{NamedPipeClient, NamedPipeServer, ServerOptions},
};
use windows_sys::Win32::{
    Foundation::{
        ERROR_IO_PENDING, ERROR_OPERATION_ABORTED, ERROR_PIPE_BUSY, ERROR_PIPE_NOT_CONNECTED, LocalFree, WAIT_OBJECT_0,
    },
    Security::{
        Authorization::{
            ConvertSidToStringSidW, ConvertStringSecurityDescriptorToSecurityDescriptorW, SDDL_REVISION_1,
        },
        GetTokenInformation, PSECURITY_DESCRIPTOR, SECURITY_ATTRIBUTES, TOKEN_QUERY, TOKEN_USER, TokenUser,
    },
    Storage::FileSystem::{FILE_FLAG_OVERLAPPED, ReadFile, SECURITY_IDENTIFICATION, WriteFile},
    System::{
        IO::{CancelIoEx, GetOverlappedResult, OVERLAPPED},
        Pipes::{PeekNamedPipe, WaitNamedPipeW},
        Threading::{CreateEventW, GetCurrentProcess, INFINITE, OpenProcessToken, WaitForSingleObject},
    },
};

use super::job::check;

/// Buffer space for the user's SID, which is 68 bytes at most, and the struct before it.
const USER_WORDS: usize = 32;

/// Accepts only processes of the same user on this machine. Dropping it removes the name.
pub struct Listener {
    name: PathBuf,
    /// The pipe instance that the next client connects to. `None` if it could not be created.
    waiting: Option<Waiting>,
}

type Waiting = Pin<Box<dyn Future<Output = io::Result<NamedPipeServer>> + Send>>;

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Listener {
    /// Fails if any process has the name already.
    pub fn bind(path: &Path) -> io::Result<Listener> {
        Ok(Listener { name: path.to_owned(), waiting: Some(wait_at(path, true)?) })
    }

    /// The next client. Makes no system call while no client connects.
    pub fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Peer>> {
        let waiting = match &mut self.waiting {
            Some(waiting) => waiting,
            none => none.insert(wait_at(&self.name, false)?),
        };
        let met = ready!(waiting.as_mut().poll(cx));
        // If another instance cannot be created now, the next client waits until it can.
        self.waiting = wait_at(&self.name, false).ok();
        Poll::Ready(met.map(|pipe| Peer(Pipe::Theirs(pipe))))
    }
}

/// Creates an instance of the pipe that waits for a client.
fn wait_at(name: &Path, is_first: bool) -> io::Result<Waiting> {
    let ours_alone = Descriptor::of_our_user()?;
    let mut about = SECURITY_ATTRIBUTES {
        nLength: size_of::<SECURITY_ATTRIBUTES>() as u32,
        lpSecurityDescriptor: ours_alone.0,
        bInheritHandle: 0,
    };
    // SAFETY: the attributes and their descriptor outlive the call, which copies what it needs.
    let pipe = unsafe {
        ServerOptions::new()
            .first_pipe_instance(is_first)
            .reject_remote_clients(true)
            .create_with_security_attributes_raw(name, (&raw mut about).cast())?
    };
    Ok(Box::pin(async move {
        pipe.connect().await?;
        Ok(pipe)
    }))
}

/// A security descriptor that gives access to this user only, from any of its processes.
struct Descriptor(PSECURITY_DESCRIPTOR);

impl Descriptor {
    fn of_our_user() -> io::Result<Descriptor> {
        let mut words: Vec<u16> = "D:P(A;;GA;;;".encode_utf16().collect();
        words.extend(our_user()?);
        words.extend(")\0".encode_utf16());
        let mut descriptor = ptr::null_mut();
        // SAFETY: the text ends in a zero, and the call writes one pointer, to memory that must be freed here.
        check(unsafe {
            ConvertStringSecurityDescriptorToSecurityDescriptorW(
                words.as_ptr(),
                SDDL_REVISION_1,
                &raw mut descriptor,
                ptr::null_mut(),
            )
        })?;
        Ok(Descriptor(descriptor))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated for this value, and no other code has it any more.
        unsafe { LocalFree(self.0) };
    }
}

/// The SID of this user, `S-1-5-21-…`, which is the same in every session and unique.
fn our_user() -> io::Result<Vec<u16>> {
    // SAFETY: this function owns the handle that the first call returns. The second call writes at most as many bytes
    // as the buffer has, at an address with the required alignment, and the user that it points to is in the same
    // buffer. The text of the third call ends in a zero and must be freed here.
    unsafe {
        let mut token = ptr::null_mut();
        check(OpenProcessToken(GetCurrentProcess(), TOKEN_QUERY, &raw mut token))?;
        let token = OwnedHandle::from_raw_handle(token);
        let mut room = [0usize; USER_WORDS];
        let mut length = 0;
        let size = size_of_val(&room) as u32;
        check(GetTokenInformation(token.as_raw_handle(), TokenUser, room.as_mut_ptr().cast(), size, &raw mut length))?;
        let user = (*room.as_ptr().cast::<TOKEN_USER>()).User.Sid;
        let mut words = ptr::null_mut();
        check(ConvertSidToStringSidW(user, &raw mut words))?;
        let length = (0..).take_while(|at| *words.add(*at) != 0).count();
        let copied = std::slice::from_raw_parts(words, length).to_vec();
        LocalFree(words.cast());
        Ok(copied)
    }
}

/// A client that has connected, or a server that outlast has connected to.
#[derive(Debug)]
pub struct Peer(Pipe);

#[derive(Debug)]
enum Pipe {
    Theirs(NamedPipeServer),
    Ours(NamedPipeClient),
}

impl Peer {
    /// Registers a connection with the current runtime. The timeout applied to connecting only.
    pub fn of(line: BlockingStream) -> io::Result<Peer> {
        // SAFETY: the handle is open and overlapped, and from now on the client alone owns it.
        unsafe { NamedPipeClient::from_raw_handle(line.pipe.into_raw_handle()) }.map(|pipe| Peer(Pipe::Ours(pipe)))
    }

    /// The peer has closed its end, and reads nothing any more.
    pub fn is_gone(&self) -> bool {
        let handle = match &self.0 {
            Pipe::Theirs(pipe) => pipe.as_raw_handle(),
            Pipe::Ours(pipe) => pipe.as_raw_handle(),
        };
        // SAFETY: the handle is open, and the call writes nothing.
        let result =
            unsafe { PeekNamedPipe(handle, ptr::null_mut(), 0, ptr::null_mut(), ptr::null_mut(), ptr::null_mut()) };
        check(result).is_err()
    }

    /// Appends the available bytes. Ready with 0 at the end of the stream.
    pub fn poll_read(&mut self, cx: &mut Context<'_>, buffer: &mut BytesMut) -> Poll<io::Result<usize>> {
        let read = match &mut self.0 {
            Pipe::Theirs(pipe) => pin!(pipe.read_buf(buffer)).poll(cx),
            Pipe::Ours(pipe) => pin!(pipe.read_buf(buffer)).poll(cx),
        };
        read.map(end_for_hangup)
    }

    /// Writes as much as the kernel accepts at once.
    pub fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.0 {
            Pipe::Theirs(pipe) => Pin::new(pipe).poll_write(cx, bytes),
            Pipe::Ours(pipe) => Pin::new(pipe).poll_write(cx, bytes),
        }
    }
}

/// A named pipe reports the end of the stream as an error; this turns it into 0 bytes.
fn end_for_hangup(read: io::Result<usize>) -> io::Result<usize> {
    match read {
        Err(error)
            if error.kind() == ErrorKind::BrokenPipe
                || error.raw_os_error() == Some(ERROR_PIPE_NOT_CONNECTED.cast_signed()) =>
        {
            Ok(0)
        }
        read => read,
    }
}

/// A blocking connection to a control socket. Reads and writes fail with `WouldBlock` after the timeout.
#[derive(Debug)]
pub struct BlockingStream {
    pipe: File,
    /// Signalled when a read or a write is done.
    done: OwnedHandle,
    patience: Cell<Option<Duration>>,
}

impl BlockingStream {
    /// The timeout applies to connecting too: a hung server accepts no connection.
    pub fn connect(path: &Path, patience: Duration) -> io::Result<BlockingStream> {
        let deadline = Instant::now() + patience;
        let name: Vec<u16> = path.as_os_str().encode_wide().chain([0]).collect();
        let pipe = loop {
            // The server may identify this user, but not impersonate it.
            let opened = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(FILE_FLAG_OVERLAPPED)
                .security_qos_flags(SECURITY_IDENTIFICATION)
                .open(path);
            match opened {
                Err(error) if error.raw_os_error() == Some(ERROR_PIPE_BUSY.cast_signed()) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(ErrorKind::WouldBlock.into());
                    }
                    // SAFETY: the name ends in a zero. After a failure, the next attempt to open returns the reason.
                    unsafe { WaitNamedPipeW(name.as_ptr(), milliseconds(left)) };
                }
                other => break other?,
            }
        };
        // SAFETY: null means no name and default rights; the result is a new handle, or null.
        let done = unsafe { HandleOrNull::from_raw_handle(CreateEventW(ptr::null(), 1, 0, ptr::null())) };
        let done = OwnedHandle::try_from(done).map_err(|_| io::Error::last_os_error())?;
        Ok(BlockingStream { pipe, done, patience: Cell::new(Some(patience)) })
    }

    /// `None` waits without a limit.
    pub fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        self.patience.set(patience);
        Ok(())
    }

    /// Begins an overlapped operation, and waits until it is done or cancels it at the timeout. Returns the number of
    /// bytes.
    fn carry_out(&self, begin: impl FnOnce(&mut OVERLAPPED) -> i32) -> io::Result<usize> {
        // SAFETY: a zeroed value of this plain struct is valid.
        let mut work: OVERLAPPED = unsafe { std::mem::zeroed() };
        work.hEvent = self.done.as_raw_handle();
        if let Err(error) = check(begin(&mut work))
            && error.raw_os_error() != Some(ERROR_IO_PENDING.cast_signed())
        {
            return Err(error);
        }
        let patience = self.patience.get().map_or(INFINITE, milliseconds);
        let mut count = 0;
        // SAFETY: the handles are open. The last call waits until the operation is over, so the kernel writes to
        // neither `work` nor the caller's bytes after it returns.
        let result = unsafe {
            if WaitForSingleObject(self.done.as_raw_handle(), patience) != WAIT_OBJECT_0 {
                // If the operation completes at this moment, its result counts.
                CancelIoEx(self.pipe.as_raw_handle(), &raw const work);
            }
            check(GetOverlappedResult(self.pipe.as_raw_handle(), &raw const work, &raw mut count, 1))
        };
        match result {
            Ok(()) => Ok(count as usize),
            Err(error) if error.raw_os_error() == Some(ERROR_OPERATION_ABORTED.cast_signed()) => {
                Err(ErrorKind::WouldBlock.into())
            }
            Err(error) => Err(error),
        }
    }
}

impl Read for BlockingStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let room = u32::try_from(buffer.len()).unwrap_or(u32::MAX);
        // SAFETY: the pointer and length describe memory that is borrowed until this returns, and `carry_out` returns
        // only when the kernel is done with it.
        end_for_hangup(self.carry_out(|work| unsafe {
            ReadFile(self.pipe.as_raw_handle(), buffer.as_mut_ptr(), room, ptr::null_mut(), work)
        }))
    }
}

impl Write for BlockingStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        // SAFETY: as in `read`.
        self.carry_out(|work| unsafe {
            WriteFile(self.pipe.as_raw_handle(), bytes.as_ptr(), length, ptr::null_mut(), work)
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Creates a directory if needed. It is below the user's profile, which other users cannot access.
pub fn claim_dir(dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir)
}

/// The owner is not checked on Windows: the directory is below the user's profile.
pub fn is_ours(_path: &Path) -> bool {
    true
}

/// Possible names of the socket of this id. All users share these names, so part of the name is random, and no other
/// user can claim it in advance.
pub fn sockets(_dir: &Path, id: &str) -> Vec<PathBuf> {
    let tail = RandomState::new().hash_one((std::process::id(), id));
    vec![PathBuf::from(format!(r"\\.\pipe\outlast-{id}-{tail:016x}"))]
}

/// Does nothing: a pipe disappears with the process that created it.
pub fn remove_socket(_path: &Path) {}

fn milliseconds(patience: Duration) -> u32 {
    u32::try_from(patience.as_millis()).unwrap_or(INFINITE - 1).clamp(1, INFINITE - 1)
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, thread};

    use windows_sys::Win32::Security::{
        Authorization::ConvertSecurityDescriptorToStringSecurityDescriptorW, DACL_SECURITY_INFORMATION,
        GetKernelObjectSecurity,
    };

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn name() -> PathBuf {
        sockets(Path::new(""), "test").remove(0)
    }

    fn block_on<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
    }

    async fn read(peer: &mut Peer, buffer: &mut BytesMut) -> usize {
        poll_fn(|cx| peer.poll_read(cx, buffer)).await.unwrap()
    }

    async fn write_all(peer: &mut Peer, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let count = poll_fn(|cx| peer.poll_write(cx, bytes)).await.unwrap();
            bytes = &bytes[count..];
        }
    }

    #[test]
    fn a_client_is_accepted_and_answered_and_sees_the_close() {
        let path = name();
        block_on(async {
            let mut listener = Listener::bind(&path).unwrap();
            let mut asking = Vec::new();
            for number in 0..3u8 {
                let path = path.clone();
                let ask = thread::Builder::new().spawn(move || {
                    let mut line = BlockingStream::connect(&path, PATIENCE).unwrap();
                    line.write_all(&[number; 3]).unwrap();
                    let mut answer = Vec::new();
                    line.read_to_end(&mut answer).unwrap();
                    answer
                });
                asking.push(ask.unwrap());
            }
            for _ in 0..3 {
                let mut peer = poll_fn(|cx| listener.poll_accept(cx)).await.unwrap();
                let mut heard = BytesMut::new();
                while heard.len() < 3 {
                    assert_ne!(read(&mut peer, &mut heard).await, 0);
                }
                assert!(!peer.is_gone());
                // More than the pipe holds.
                write_all(&mut peer, &[heard[0]; 200_000]).await;
            }
            for (number, asking) in asking.into_iter().enumerate() {
                let answer = crate::offload::offload(|| asking.join().unwrap()).await.unwrap();
                assert_eq!(answer.len(), 200_000);
                assert!(answer.iter().all(|byte| usize::from(*byte) == number));
            }
        });
    }

    #[test]
    fn a_read_times_out_and_later_bytes_are_not_lost() {
        let path = name();
        block_on(async {
            let mut listener = Listener::bind(&path).unwrap();
            let mut line = BlockingStream::connect(&path, PATIENCE).unwrap();
            line.set_patience(Some(Duration::from_millis(1))).unwrap();
            let mut byte = [0];
            assert_eq!(line.read(&mut byte).unwrap_err().kind(), ErrorKind::WouldBlock);
            let mut peer = poll_fn(|cx| listener.poll_accept(cx)).await.unwrap();
            write_all(&mut peer, b"x").await;
            line.set_patience(Some(PATIENCE)).unwrap();
            assert_eq!((line.read(&mut byte).unwrap(), byte), (1, *b"x"));
            line.set_patience(Some(Duration::from_millis(1))).unwrap();
            let too_much = vec![0; 1 << 20];
            assert_eq!(
                line.write_all(&too_much).unwrap_err().kind(),
                ErrorKind::WouldBlock,
                "the other end does not read"
            );
            drop(line);
            let mut heard = BytesMut::new();
            while read(&mut peer, &mut heard).await > 0 {}
            assert!(peer.is_gone());
        });
    }

    #[test]
    fn a_name_is_free_when_its_listener_is_dropped() {
        let path = name();
        block_on(async {
            assert_eq!(BlockingStream::connect(&path, PATIENCE).unwrap_err().kind(), ErrorKind::NotFound);
            let listener = Listener::bind(&path).unwrap();
            assert!(BlockingStream::connect(&path, PATIENCE).is_ok());
            drop(listener);
            assert_eq!(BlockingStream::connect(&path, PATIENCE).unwrap_err().kind(), ErrorKind::NotFound);
            assert!(Listener::bind(&path).is_ok());
        });
    }

    #[test]
    fn a_connection_can_be_moved_into_a_runtime() {
        let path = name();
        block_on(async {
            let mut listener = Listener::bind(&path).unwrap();
            let mut ours = Peer::of(BlockingStream::connect(&path, PATIENCE).unwrap()).unwrap();
            let mut theirs = poll_fn(|cx| listener.poll_accept(cx)).await.unwrap();
            write_all(&mut ours, b"ask").await;
            let mut heard = BytesMut::new();
            while heard.len() < 3 {
                read(&mut theirs, &mut heard).await;
            }
            write_all(&mut theirs, b"told").await;
            drop(theirs);
            let mut answer = BytesMut::new();
            while read(&mut ours, &mut answer).await > 0 {}
            assert_eq!((&heard[..], &answer[..]), (&b"ask"[..], &b"told"[..]));
        });
    }

    #[test]
    fn only_our_user_can_connect() {
        let user = String::from_utf16(&our_user().unwrap()).unwrap();
        assert!(user.starts_with("S-1-"), "{user}");
        let path = name();
        block_on(async {
            let _listener = Listener::bind(&path).unwrap();
            let line = BlockingStream::connect(&path, PATIENCE).unwrap();
            let mut room = [0usize; 64];
            let (mut size, mut words, mut length) = (0, ptr::null_mut(), 0);
            // SAFETY: the handle is open; the call writes at most as many bytes as the buffer has; the text has the
            // returned length, and is never freed.
            let who = unsafe {
                let about = room.as_mut_ptr().cast();
                let handle = line.pipe.as_raw_handle();
                check(GetKernelObjectSecurity(
                    handle,
                    DACL_SECURITY_INFORMATION,
                    about,
                    size_of_val(&room) as u32,
                    &raw mut size,
                ))
                .unwrap();
                check(ConvertSecurityDescriptorToStringSecurityDescriptorW(
                    about,
                    SDDL_REVISION_1,
                    DACL_SECURITY_INFORMATION,
                    &raw mut words,
                    &raw mut length,
                ))
                .unwrap();
                String::from_utf16_lossy(std::slice::from_raw_parts(words, length as usize))
            };
            assert_eq!(who.matches("(A;").count(), 1, "{who}");
            assert_eq!(who.matches('(').count(), 1, "{who}");
            assert!(who.contains(&user), "{who}");
        });
    }
}
