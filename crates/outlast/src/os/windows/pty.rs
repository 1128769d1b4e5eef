//! A terminal for a child: a pseudo console, which draws what the child shows with escape sequences.
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
use crate::os::{
    CHILD_TAG, Order, Size,
    threaded::{Reader, Writer},
};

/// By which a pseudo console asks its terminal for keys as Windows knows them, before an `h` or an `l`. Nobody is asked:
/// keys are bytes to all of us, the key that leaves among them, and a pseudo console takes those as well.
const KEYS_WISH: &[u8] = b"\x1b[?9001";

type Create = unsafe extern "system" fn(COORD, HANDLE, HANDLE, u32, *mut HPCON) -> HRESULT;
type Resize = unsafe extern "system" fn(HPCON, COORD) -> HRESULT;
type Close = unsafe extern "system" fn(HPCON);

/// Who makes pseudo consoles: a newer one than the system's, if it lies beside our program, or the system.
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
            io::Error::new(ErrorKind::Unsupported, "this Windows has no pseudo consoles; they came with version 1809")
        })
    }

    /// Never from the directory we happen to stand in, which may be anybody's.
    fn load(name: *const u16) -> Option<Library> {
        let places = LOAD_LIBRARY_SEARCH_APPLICATION_DIR | LOAD_LIBRARY_SEARCH_SYSTEM32;
        // SAFETY: the name ends in a zero. What is loaded stays loaded, so that the functions stay where they are; and
        // they are of these types, which are the documented ones.
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

/// Dropping it hangs up on all who are in it, and may take until what they showed last was read.
#[derive(Debug)]
struct Console(HPCON);

impl Console {
    fn new(size: Size, read: &File, write: &File) -> io::Result<Console> {
        let mut console = 0;
        // SAFETY: both ends are open, and the call fills in one value, which is there and ours.
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
            // SAFETY: it is open, and nobody has it after this.
            unsafe { (library.close)(self.0) };
        }
    }
}

/// A child's terminal, as far as its size goes.
#[derive(Clone, Debug)]
pub struct Window(Arc<Mutex<Option<Console>>>);

impl Window {
    /// The child hears of it among its keys. One that was hung up on needs no size.
    pub fn resize(&self, size: Size) -> io::Result<()> {
        self.console().as_ref().map_or(Ok(()), |console| console.resize(size))
    }

    /// As when a person closes the window: whoever is in it is told, and has a few seconds. What they show until then
    /// can be read, and then comes the end.
    pub(super) fn hang_up(&self) {
        let console = self.console().take();
        if let Some(console) = console {
            // Not here: we may be the one who is to read. Where there can be no thread there is nothing better.
            let _ = thread::Builder::new().name("outlast-hang-up".into()).spawn(move || drop(console));
        }
    }

    fn console(&self) -> MutexGuard<'_, Option<Console>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Our ends, and what the console keeps of them.
pub(super) struct Pair {
    pub source: Source,
    pub sink: Sink,
    pub window: Window,
    /// Ends when all that was shown has been read.
    pub drained: mpsc::Receiver<()>,
    _theirs: [File; 2],
}

/// Of this size from the first byte on.
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

/// A process that has not run a single instruction.
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

/// Starts a program in a console, in a job, with exactly the environment that was ordered.
pub(super) fn start(order: &Order, program: &Path, window: &Window, job: &Job) -> io::Result<Suspended> {
    let mut command = CommandLine::new(program, &order.args, &cmd()?)?;
    let tag = (OsStr::new(CHILD_TAG), OsStr::new(&order.tag));
    let environment =
        environment(order.env.iter().map(|(name, value)| (name.as_os_str(), value.as_os_str())).chain([tag]))?;
    let cwd = wide(order.cwd.as_os_str())?;
    let console = window.console();
    let console = console.as_ref().ok_or(ErrorKind::BrokenPipe)?;
    let attributes = Attributes::new(console)?;
    // SAFETY: a zeroed value of either plain struct is a valid one.
    let (mut start, mut started): (STARTUPINFOEXW, PROCESS_INFORMATION) = unsafe { std::mem::zeroed() };
    start.StartupInfo.cb = size_of::<STARTUPINFOEXW>() as u32;
    // Or it would have ours wherever they are not the console's.
    start.StartupInfo.dwFlags = STARTF_USESTDHANDLES;
    start.StartupInfo.hStdInput = INVALID_HANDLE_VALUE;
    start.StartupInfo.hStdOutput = INVALID_HANDLE_VALUE;
    start.StartupInfo.hStdError = INVALID_HANDLE_VALUE;
    start.lpAttributeList = attributes.0.as_ptr().cast_mut().cast();
    // SAFETY: all texts end in a zero and live through the call, as the attributes do; the line may be written to; the
    // result is two new handles, which are ours.
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

/// What a new process is told besides: the console it is born in.
struct Attributes(Vec<usize>);

impl Attributes {
    fn new(console: &Console) -> io::Result<Attributes> {
        let mut size = 0;
        // SAFETY: without a list the call tells how much memory one takes; then it is made in so much memory, which is
        // aligned for pointers; and a console is told by its value.
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
        // SAFETY: it was made, and is not used after this.
        unsafe { DeleteProcThreadAttributeList(self.0.as_mut_ptr().cast()) };
    }
}

/// What a child shows, as a stream.
#[derive(Debug)]
struct Shown {
    from: File,
    /// What may be the beginning of the console's own wish.
    held: Vec<u8>,
    /// Dropped with this, when there is nothing more to read.
    _end: mpsc::Sender<()>,
}

impl Read for Shown {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        loop {
            let held = self.held.len();
            let count = self.from.read(&mut space[held..])?;
            space[..held].copy_from_slice(&self.held);
            self.held.clear();
            // The next read is the end again.
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

/// Moves together what stays and says how much that is. What cannot be told yet is held back.
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

/// What runs scripts.
fn cmd() -> io::Result<PathBuf> {
    let mut path = [0; 512];
    // SAFETY: the pointer and size are those of memory of ours, which the call only writes to.
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
    fn the_consoles_own_wish_is_kept_from_the_terminal_however_it_is_cut() {
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
