//! The terminal of a child: a pseudo console, which renders the child's output as escape sequences. The console of
//! the user is in `outer.rs`.
#![expect(unsafe_code, reason = "pseudo consoles, and processes that start in one, have no safe interface")]

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, ErrorKind, Read},
    os::windows::{
        ffi::OsStringExt,
        io::{AsRawHandle, FromRawHandle, OwnedHandle},
    },
    path::{Path, PathBuf},
    ptr,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc},
    thread,
};

use windows_sys::{
    Win32::{
        Foundation::{HANDLE, INVALID_HANDLE_VALUE},
        System::{
            Console::{COORD, HPCON},
            LibraryLoader::{
                GetProcAddress, LOAD_LIBRARY_SEARCH_APPLICATION_DIR, LOAD_LIBRARY_SEARCH_SYSTEM32, LoadLibraryExW,
            },
            SystemInformation::GetSystemDirectoryW,
            Threading::{
                CREATE_SUSPENDED, CREATE_UNICODE_ENVIRONMENT, CreateProcessW, DeleteProcThreadAttributeList,
                EXTENDED_STARTUPINFO_PRESENT, InitializeProcThreadAttributeList, PROC_THREAD_ATTRIBUTE_PSEUDOCONSOLE,
                PROCESS_INFORMATION, ResumeThread, STARTF_USESTDHANDLES, STARTUPINFOEXW, UpdateProcThreadAttribute,
            },
        },
    },
    core::{HRESULT, w},
};

use super::{
    command_line::{CommandLine, environment, wide},
    job::{Job, check},
    stream::{From, Sink, Source, To, pipe},
};
use crate::{
    CHILD_TAG, Order, Size,
    threaded::{Reader, Writer},
};

/// The escape sequence by which a pseudo console requests win32 input mode, up to its final `h` or `l`. It is removed
/// from the output: outlast and its viewers handle keys as bytes, the detach key among them, and a pseudo console
/// accepts bytes as well.
const KEYS_WISH: &[u8] = b"\x1b[?9001";

type Create = unsafe extern "system" fn(COORD, HANDLE, HANDLE, u32, *mut HPCON) -> HRESULT;
type Resize = unsafe extern "system" fn(HPCON, COORD) -> HRESULT;
type Close = unsafe extern "system" fn(HPCON);

/// The functions for pseudo consoles: of `conpty.dll` beside the program, which may be newer, or of the system.
struct Library {
    create: Create,
    resize: Resize,
    close: Close,
}

impl Library {
    fn get() -> io::Result<&'static Library> {
        static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
        let load = || Library::load(w!("conpty.dll")).or_else(|| Library::load(w!("kernel32.dll")));
        LIBRARY.get_or_init(load).as_ref().ok_or_else(|| {
            io::Error::new(
                ErrorKind::Unsupported,
                "this version of Windows has no pseudo consoles; Windows 10 1809 or later is needed",
            )
        })
    }

    /// Never loads from the current directory, which another user may control.
    fn load(name: *const u16) -> Option<Library> {
        let places = LOAD_LIBRARY_SEARCH_APPLICATION_DIR | LOAD_LIBRARY_SEARCH_SYSTEM32;
        // SAFETY: the name ends in a zero. The library stays loaded, so the functions stay valid, and they have the
        // documented types.
        unsafe {
            let library = LoadLibraryExW(name, ptr::null_mut(), places);
            if library.is_null() {
                return None;
            }
            let find = |name: &std::ffi::CStr| GetProcAddress(library, name.as_ptr().cast());
            type Found = unsafe extern "system" fn() -> isize;
            Some(Library {
                create: std::mem::transmute::<Found, Create>(find(c"CreatePseudoConsole")?),
                resize: std::mem::transmute::<Found, Resize>(find(c"ResizePseudoConsole")?),
                close: std::mem::transmute::<Found, Close>(find(c"ClosePseudoConsole")?),
            })
        }
    }
}

/// Dropping it disconnects all processes in it, and may block until their last output has been read.
#[derive(Debug)]
struct Console(HPCON);

impl Console {
    fn new(size: Size, read: &File, write: &File) -> io::Result<Console> {
        let mut console = 0;
        // SAFETY: both ends are open, and the call writes one value, which outlives the call.
        let result = unsafe {
            (Library::get()?.create)(
                coordinates(size),
                read.as_raw_handle(),
                write.as_raw_handle(),
                0,
                &raw mut console,
            )
        };
        succeeded(result).map(|()| Console(console))
    }

    fn resize(&self, size: Size) -> io::Result<()> {
        // SAFETY: the console is open until it is dropped.
        succeeded(unsafe { (Library::get()?.resize)(self.0, coordinates(size)) })
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        if let Ok(library) = Library::get() {
            // SAFETY: the console is open, and is not used after this.
            unsafe { (library.close)(self.0) };
        }
    }
}

/// Sets the size of a child's terminal.
#[derive(Clone, Debug)]
pub struct Window(Arc<Mutex<Option<Console>>>);

impl Window {
    /// The child gets the new size as an input event. No error if the console is already closed.
    pub fn resize(&self, size: Size) -> io::Result<()> {
        self.console().as_ref().map_or(Ok(()), |console| console.resize(size))
    }

    /// Closes the console, as when a person closes the window: the processes in it are notified and have a few
    /// seconds. Their output until then can be read; then the stream ends.
    pub(super) fn hang_up(&self) {
        let console = self.console().take();
        if let Some(console) = console {
            // On another thread, because this thread may be the reader of the output. If no thread can be started,
            // the console is dropped here.
            let _ = thread::Builder::new().name("outlast-hang-up".into()).spawn(move || drop(console));
        }
    }

    fn console(&self) -> MutexGuard<'_, Option<Console>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The ends of outlast, and the files that the console needs.
pub(super) struct Pair {
    pub source: Source,
    pub sink: Sink,
    pub window: Window,
    /// Disconnected when all output has been read.
    pub drained: mpsc::Receiver<()>,
    _theirs: [File; 2],
}

/// Opens a terminal that has this size from the first byte on.
pub(super) fn open(size: Size) -> io::Result<Pair> {
    let (keys_out, keys_in) = pipe()?;
    let (shown_out, shown_in) = pipe()?;
    let console = Console::new(size, &keys_out, &shown_in)?;
    let (end, drained) = mpsc::channel();
    let shown = Shown { from: shown_out, held: Vec::new(), _end: end };
    Ok(Pair {
        source: Source(From::Thread(Reader::begin("outlast-shown", shown)?)),
        sink: Sink(To::Thread(Writer::begin("outlast-keys", keys_in)?)),
        window: Window(Arc::new(Mutex::new(Some(console)))),
        drained,
        _theirs: [keys_out, shown_in],
    })
}

/// A process that was created suspended and has not run yet.
pub(super) struct Suspended {
    pub process: OwnedHandle,
    pub pid: u32,
    thread: OwnedHandle,
}

impl Suspended {
    pub(super) fn resume(self) -> io::Result<()> {
        // SAFETY: the handle is open.
        let result = unsafe { ResumeThread(self.thread.as_raw_handle()) };
        if result == u32::MAX { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// Starts a program in a console, in a job, with exactly the ordered environment.
pub(super) fn start(order: &Order, program: &Path, window: &Window, job: &Job) -> io::Result<Suspended> {
    let mut command = CommandLine::new(program, &order.args, &cmd()?)?;
    let tag = (OsStr::new(CHILD_TAG), OsStr::new(&order.tag));
    let environment =
        environment(order.env.iter().map(|(name, value)| (name.as_os_str(), value.as_os_str())).chain([tag]))?;
    let cwd = wide(order.cwd.as_os_str())?;
    let console = window.console();
    let console = console.as_ref().ok_or(ErrorKind::BrokenPipe)?;
    let attributes = Attributes::new(console)?;
    // SAFETY: a zeroed value of either plain struct is valid.
    let (mut start, mut started): (STARTUPINFOEXW, PROCESS_INFORMATION) = unsafe { std::mem::zeroed() };
    start.StartupInfo.cb = size_of::<STARTUPINFOEXW>() as u32;
    // Otherwise the child inherits those standard handles of outlast that are not the console's.
    start.StartupInfo.dwFlags = STARTF_USESTDHANDLES;
    start.StartupInfo.hStdInput = INVALID_HANDLE_VALUE;
    start.StartupInfo.hStdOutput = INVALID_HANDLE_VALUE;
    start.StartupInfo.hStdError = INVALID_HANDLE_VALUE;
    start.lpAttributeList = attributes.0.as_ptr().cast_mut().cast();
    // SAFETY: all texts end in a zero and outlive the call, as the attributes do; the command line is mutable; the
    // result is two new handles, which this process owns.
    let suspended = unsafe {
        check(CreateProcessW(
            command.program.as_ptr(),
            command.line.as_mut_ptr(),
            ptr::null(),
            ptr::null(),
            0,
            CREATE_SUSPENDED | CREATE_UNICODE_ENVIRONMENT | EXTENDED_STARTUPINFO_PRESENT,
            environment.as_ptr().cast(),
            cwd.as_ptr(),
            &raw const start.StartupInfo,
            &raw mut started,
        ))?;
        Suspended {
            process: OwnedHandle::from_raw_handle(started.hProcess),
            pid: started.dwProcessId,
            thread: OwnedHandle::from_raw_handle(started.hThread),
        }
    };
    if let Err(error) = job.assign(&suspended.process) {
        super::job::terminate(&suspended.process);
        return Err(error);
    }
    Ok(suspended)
}

/// Attributes of a new process: the pseudo console that it starts in.
struct Attributes(Vec<usize>);

impl Attributes {
    fn new(console: &Console) -> io::Result<Attributes> {
        let mut size = 0;
        // SAFETY: without a list, the call returns the required size; the list is then initialized in memory of that
        // size, which is aligned for pointers; a console is passed by value.
        unsafe {
            InitializeProcThreadAttributeList(ptr::null_mut(), 1, 0, &raw mut size);
            let mut list: Vec<usize> = vec![0; size.div_ceil(size_of::<usize>())];
            check(InitializeProcThreadAttributeList(list.as_mut_ptr().cast(), 1, 0, &raw mut size))?;
            let mut attributes = Attributes(list);
            check(UpdateProcThreadAttribute(
                attributes.0.as_mut_ptr().cast(),
                0,
                PROC_THREAD_ATTRIBUTE_PSEUDOCONSOLE as usize,
                console.0 as *const _,
                size_of::<HPCON>(),
                ptr::null_mut(),
                ptr::null(),
            ))?;
            Ok(attributes)
        }
    }
}

impl Drop for Attributes {
    fn drop(&mut self) {
        // SAFETY: the list was initialized, and is not used after this.
        unsafe { DeleteProcThreadAttributeList(self.0.as_mut_ptr().cast()) };
    }
}

/// The output of a child as a stream, without the request for win32 input mode.
#[derive(Debug)]
struct Shown {
    from: File,
    /// Bytes that may be the beginning of that request.
    held: Vec<u8>,
    /// Dropped with this, when all output has been read.
    _end: mpsc::Sender<()>,
}

impl Read for Shown {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        loop {
            let held = self.held.len();
            let count = self.from.read(&mut space[held..])?;
            space[..held].copy_from_slice(&self.held);
            self.held.clear();
            // The next read returns the end again.
            if count == 0 {
                return Ok(held);
            }
            let kept = without_wish(&mut space[..held + count], &mut self.held);
            if kept > 0 {
                return Ok(kept);
            }
        }
    }
}

/// Removes the requests in place, and returns the length of the remaining bytes. An incomplete sequence at the end is
/// held back.
fn without_wish(bytes: &mut [u8], held: &mut Vec<u8>) -> usize {
    let (mut from, mut kept) = (0, 0);
    while from < bytes.len() {
        let until = memchr::memchr(b'\x1b', &bytes[from..]).map_or(bytes.len(), |at| from + at);
        bytes.copy_within(from..until, kept);
        kept += until - from;
        from = until;
        let rest = &bytes[from..];
        match rest.strip_prefix(KEYS_WISH) {
            Some([b'h' | b'l', ..]) => from += KEYS_WISH.len() + 1,
            Some([]) => {
                held.extend_from_slice(rest);
                break;
            }
            None if KEYS_WISH.starts_with(rest) => {
                held.extend_from_slice(rest);
                break;
            }
            _ => {
                bytes[kept] = bytes[from];
                (from, kept) = (from + 1, kept + 1);
            }
        }
    }
    kept
}

/// The path of `cmd.exe`, which runs scripts.
fn cmd() -> io::Result<PathBuf> {
    let mut path = [0; 512];
    // SAFETY: the pointer and size describe memory of this function, which the call only writes to.
    let length = unsafe { GetSystemDirectoryW(path.as_mut_ptr(), path.len() as u32) } as usize;
    if length == 0 || length >= path.len() {
        return Err(io::Error::last_os_error());
    }
    Ok(PathBuf::from(OsString::from_wide(&path[..length])).join("cmd.exe"))
}

fn coordinates(size: Size) -> COORD {
    let side = |side: u16| i16::try_from(side).unwrap_or(i16::MAX).max(1);
    COORD { X: side(size.columns), Y: side(size.rows) }
}

fn succeeded(result: HRESULT) -> io::Result<()> {
    if result >= 0 { Ok(()) } else { Err(io::Error::other(format!("the pseudo console says {result:#010x}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn win32_input_mode_is_removed_wherever_reads_are_split() {
        let table = [
            ("\x1b[?9001h\x1b[?1004hhello", "\x1b[?1004hhello"),
            ("a\x1b[?9001lb\x1b[?9001hc", "abc"),
            ("\x1b[?9001", "\x1b[?9001"),
            ("\x1b[?9001x\x1b\x1b[?9001h\x1b", "\x1b[?9001x\x1b\x1b"),
            ("\x1b[?900\x1b[?9001h", "\x1b[?900"),
            ("plain \x1b[0m text", "plain \x1b[0m text"),
        ];
        for (shown, expected) in table {
            for piece in 1..=shown.len() {
                let (mut all, mut held) = (Vec::new(), Vec::new());
                for bytes in shown.as_bytes().chunks(piece) {
                    let mut space = [&held[..], bytes].concat();
                    held.clear();
                    let kept = without_wish(&mut space, &mut held);
                    all.extend_from_slice(&space[..kept]);
                }
                all.extend_from_slice(&held);
                assert_eq!(String::from_utf8(all).unwrap(), expected, "in pieces of {piece}");
            }
        }
    }
}
