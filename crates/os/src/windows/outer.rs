//! The console of the user: made raw for an agent, and restored in every case. The terminal of the agent is in
//! `pty.rs`.
#![expect(unsafe_code, reason = "consoles have no safe interface")]

use std::{
    fs::File,
    io::{self, Read, Write},
    mem::ManuallyDrop,
    os::windows::io::{AsRawHandle, BorrowedHandle, FromRawHandle, IntoRawHandle},
    panic,
    sync::{
        Mutex, Once, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use tokio::sync::mpsc;
use windows_sys::Win32::{
    Globalization::CP_UTF8,
    System::Console::{
        CONSOLE_MODE, CONSOLE_SCREEN_BUFFER_INFO, DISABLE_NEWLINE_AUTO_RETURN, ENABLE_EXTENDED_FLAGS,
        ENABLE_INSERT_MODE, ENABLE_PROCESSED_OUTPUT, ENABLE_QUICK_EDIT_MODE, ENABLE_VIRTUAL_TERMINAL_INPUT,
        ENABLE_VIRTUAL_TERMINAL_PROCESSING, ENABLE_WINDOW_INPUT, ENABLE_WRAP_AT_EOL_OUTPUT, FreeConsole,
        GetConsoleMode, GetConsoleOutputCP, GetConsoleScreenBufferInfo, GetStdHandle, INPUT_RECORD, KEY_EVENT,
        KEY_EVENT_RECORD, LEFT_CTRL_PRESSED, RIGHT_CTRL_PRESSED, ReadConsoleInputW, STD_ERROR_HANDLE, STD_HANDLE,
        STD_INPUT_HANDLE, STD_OUTPUT_HANDLE, SetConsoleMode, SetConsoleOutputCP, SetStdHandle,
    },
};

use super::{
    job::check,
    stand_in::{Attached, StandIn},
    stream::{From, Sink, Source, To},
};
use crate::{
    OuterEvent, Size,
    calm::calm,
    threaded::{Reader, Writer},
};

/// The most records of one read from the console.
const RECORDS_MAX: usize = 128;
/// The Alt key: a character entered by its number arrives when this key is released.
const ALT: u16 = 0x12;
const SPACE: u16 = 0x20;
const TWO: u16 = 0x32;

/// The settings of the console before outlast changed them.
static BEFORE: Mutex<Option<Before>> = Mutex::new(None);
static IS_RAW: AtomicBool = AtomicBool::new(false);
static IS_ALTERNATE: AtomicBool = AtomicBool::new(false);
static HOOK: Once = Once::new();

/// The user's console in raw mode. Dropping it restores the console.
#[derive(Debug)]
pub struct Outer {
    pub source: Source,
    pub sink: Sink,
    resized: mpsc::Receiver<()>,
    stand_in: Attached,
    is_abandoned: bool,
}

impl Outer {
    /// A stand-in exists only if stdin and stdout are both a console.
    pub fn begin(stand_in: StandIn) -> io::Result<Outer> {
        let stand_in = stand_in.attach()?;
        let before = Before::look()?;
        *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
        HOOK.call_once(|| {
            let next = panic::take_hook();
            panic::set_hook(Box::new(move |panic| {
                give_back();
                next(panic);
            }));
        });
        // One pending message is enough to report a change.
        let (tell, resized) = mpsc::channel(1);
        let keys = Keys { from: own(STD_INPUT_HANDLE)?, typist: Typist::default(), size: outer_size(), resized: tell };
        let outer = Outer {
            source: Source(From::Thread(Reader::begin("outlast-console-keys", keys)?)),
            sink: Sink(To::Thread(Writer::begin("outlast-console", own(STD_OUTPUT_HANDLE)?)?)),
            resized,
            stand_in,
            is_abandoned: false,
        };
        outer.make_raw()?;
        Ok(outer)
    }

    /// Passes every key on as the bytes of a terminal, Ctrl-C too, without echo. Output is UTF-8 with escape
    /// sequences.
    pub fn make_raw(&self) -> io::Result<()> {
        let before = *BEFORE.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(before) = before else { return Ok(()) };
        IS_RAW.store(true, Ordering::Relaxed);
        before.raw().apply()
    }

    /// Windows has no job control.
    pub fn suspend(&self) {}

    /// Always false: Windows has no job control.
    pub fn is_job(&self) -> bool {
        false
    }

    /// Restores the console and lets the shell show its prompt. The process continues without the console. `words` is
    /// the last output to it.
    pub fn leave(self, words: &str) -> io::Result<()> {
        give_back();
        write_stdout(words);
        forget_streams()?;
        // SAFETY: the call takes no arguments. Threads that use handles of the console get an error from now on, and
        // end.
        unsafe { FreeConsole() };
        self.stand_in.leave();
        Ok(())
    }

    /// The next event of the console. Cancel-safe.
    pub fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<OuterEvent> {
        if let Poll::Ready(Some(())) = self.resized.poll_recv(cx) {
            return Poll::Ready(OuterEvent::Resized);
        }
        if self.is_abandoned || self.stand_in.poll_gone(cx).is_pending() {
            return Poll::Pending;
        }
        self.is_abandoned = true;
        give_back();
        Poll::Ready(OuterEvent::Abandoned)
    }

    /// The current size; a default if there is none.
    pub fn size(&self) -> Size {
        outer_size()
    }

    /// Whether the output has switched to the alternate screen, which must be left at the end.
    pub fn note_alternate(&self, is_alternate: bool) {
        if IS_ALTERNATE.swap(is_alternate, Ordering::Relaxed) != is_alternate {
            self.stand_in.note_alternate(is_alternate);
        }
    }
}

impl Drop for Outer {
    fn drop(&mut self) {
        give_back();
        *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// The settings of a console that outlast changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Before {
    input: CONSOLE_MODE,
    output: CONSOLE_MODE,
    code_page: u32,
}

impl Before {
    /// The current settings.
    pub(super) fn look() -> io::Result<Before> {
        let (mut input, mut output) = (0, 0);
        // SAFETY: the handles belong to the process; a handle that is no console is an error; each call writes one
        // number, which outlives the call.
        unsafe {
            check(GetConsoleMode(GetStdHandle(STD_INPUT_HANDLE), &raw mut input))?;
            check(GetConsoleMode(GetStdHandle(STD_OUTPUT_HANDLE), &raw mut output))?;
            Ok(Before { input, output, code_page: GetConsoleOutputCP() })
        }
    }

    fn raw(self) -> Before {
        // The user's setting for mouse selection stays.
        let theirs = ENABLE_EXTENDED_FLAGS | ENABLE_QUICK_EDIT_MODE | ENABLE_INSERT_MODE;
        Before {
            input: self.input & theirs | ENABLE_VIRTUAL_TERMINAL_INPUT | ENABLE_WINDOW_INPUT,
            output: ENABLE_PROCESSED_OUTPUT
                | ENABLE_WRAP_AT_EOL_OUTPUT
                | ENABLE_VIRTUAL_TERMINAL_PROCESSING
                | DISABLE_NEWLINE_AUTO_RETURN,
            code_page: CP_UTF8,
        }
    }

    fn apply(self) -> io::Result<()> {
        // SAFETY: the handles belong to the process; a handle that is no console is an error.
        unsafe {
            check(SetConsoleMode(GetStdHandle(STD_OUTPUT_HANDLE), self.output))?;
            check(SetConsoleOutputCP(self.code_page))?;
            check(SetConsoleMode(GetStdHandle(STD_INPUT_HANDLE), self.input))
        }
    }

    /// Restores the console for a process that cannot do it itself. True if the settings were changed.
    pub(super) fn give_back_after(self, is_alternate: bool) -> bool {
        if Before::look().is_ok_and(|now| now == self) {
            return false;
        }
        write_bytes(&calm(is_alternate));
        // A console that has closed needs no reset.
        let _ = self.apply();
        true
    }
}

/// Restores the console. Quick, and safe to call twice.
fn give_back() {
    if !IS_RAW.swap(false, Ordering::Relaxed) {
        return;
    }
    write_bytes(&calm(IS_ALTERNATE.swap(false, Ordering::Relaxed)));
    // A panicking thread may hold the lock.
    if let Ok(before) = BEFORE.try_lock()
        && let Some(before) = *before
    {
        let _ = before.apply();
    }
}

/// The current size of the user's console; a default if there is none.
pub fn outer_size() -> Size {
    // SAFETY: the handle belongs to the process; a handle that is no console is an error; the call writes one plain
    // value, which outlives the call.
    let info = unsafe {
        let mut info: CONSOLE_SCREEN_BUFFER_INFO = std::mem::zeroed();
        (GetConsoleScreenBufferInfo(GetStdHandle(STD_OUTPUT_HANDLE), &raw mut info) != 0).then_some(info)
    };
    let side = |first: i16, last: i16| u16::try_from(i32::from(last) - i32::from(first) + 1).unwrap_or_default();
    let size = info.map(|info| info.srWindow).map(|window| Size {
        columns: side(window.Left, window.Right),
        rows: side(window.Top, window.Bottom),
        width: 0,
        height: 0,
    });
    size.filter(|size| size.columns > 0 && size.rows > 0).unwrap_or_default()
}

/// Writes a short text to stdout at once. An error is ignored: the console has closed.
pub fn write_stdout(words: &str) {
    write_bytes(words.as_bytes());
}

pub(super) fn is_on_terminal() -> bool {
    Before::look().is_ok()
}

/// Connects the standard streams to the null device.
pub(super) fn forget_streams() -> io::Result<()> {
    for stream in [STD_INPUT_HANDLE, STD_OUTPUT_HANDLE, STD_ERROR_HANDLE] {
        let null = File::options().read(true).write(true).open("NUL")?;
        // SAFETY: the handle is open and is never closed. The previous handle stays open too: another thread may use
        // it.
        check(unsafe { SetStdHandle(stream, null.into_raw_handle()) })?;
    }
    Ok(())
}

fn write_bytes(bytes: &[u8]) {
    // SAFETY: the handle belongs to the process and stays open, as it is not dropped; an invalid handle is an error.
    let mut stdout = unsafe { ManuallyDrop::new(File::from_raw_handle(GetStdHandle(STD_OUTPUT_HANDLE))) };
    let _ = stdout.write_all(bytes);
}

/// A duplicate handle of a standard stream.
fn own(stream: STD_HANDLE) -> io::Result<File> {
    // SAFETY: the handle belongs to the process and is only borrowed here.
    Ok(unsafe { BorrowedHandle::borrow_raw(GetStdHandle(stream)) }.try_clone_to_owned()?.into())
}

/// The keys of a console as the bytes of a terminal. Changes of the size arrive as records in the same input.
#[derive(Debug)]
struct Keys {
    from: File,
    typist: Typist,
    /// The last known size.
    size: Size,
    resized: mpsc::Sender<()>,
}

impl Read for Keys {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        while self.typist.bytes.is_empty() {
            let mut records = [INPUT_RECORD::default(); RECORDS_MAX];
            let mut count = 0;
            // SAFETY: the handle is open, and the call writes at most that many records, which outlive the call.
            check(unsafe {
                ReadConsoleInputW(self.from.as_raw_handle(), records.as_mut_ptr(), RECORDS_MAX as u32, &raw mut count)
            })?;
            for record in &records[..count as usize] {
                if u32::from(record.EventType) == KEY_EVENT {
                    // SAFETY: the event type says which member of the union is set.
                    self.typist.press(unsafe { &record.Event.KeyEvent });
                }
            }
            // A record of a size change causes the wake-up, but not every change of the window has a record, so the
            // size is compared.
            let size = outer_size();
            if std::mem::replace(&mut self.size, size) != size {
                // A message that is already queued reports the same.
                let _ = self.resized.try_send(());
            }
        }
        let count = self.typist.bytes.len().min(space.len());
        space[..count].copy_from_slice(&self.typist.bytes[..count]);
        self.typist.bytes.drain(..count);
        Ok(count)
    }
}

/// Assembles characters from UTF-16 units. The console has already turned all other keys into escape sequences.
#[derive(Debug, Default)]
struct Typist {
    bytes: Vec<u8>,
    /// The first half of a surrogate pair.
    half: Option<u16>,
}

impl Typist {
    fn press(&mut self, key: &KEY_EVENT_RECORD) {
        // SAFETY: every bit pattern is a number.
        let unit = unsafe { key.uChar.UnicodeChar };
        let is_down = key.bKeyDown != 0;
        if !is_down && (key.wVirtualKeyCode != ALT || unit == 0) {
            return;
        }
        let with_ctrl = key.dwControlKeyState & (LEFT_CTRL_PRESSED | RIGHT_CTRL_PRESSED) != 0;
        // A key without a character; but Ctrl with the space bar or the 2 key is a zero byte.
        if unit == 0 && !(with_ctrl && [SPACE, TWO].contains(&key.wVirtualKeyCode)) {
            return;
        }
        for _ in 0..key.wRepeatCount.max(1) {
            self.push(unit);
        }
    }

    fn push(&mut self, unit: u16) {
        let units = self.half.take().into_iter().chain([unit]);
        for letter in char::decode_utf16(units) {
            match letter {
                Ok(letter) => self.bytes.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes()),
                // The second half comes next.
                Err(half) if half.unpaired_surrogate() == unit && (0xd800..0xdc00).contains(&unit) => {
                    self.half = Some(unit);
                }
                Err(_) => self.bytes.extend_from_slice("\u{fffd}".as_bytes()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use windows_sys::Win32::System::Console::KEY_EVENT_RECORD_0;

    use super::*;

    fn key(is_down: bool, code: u16, unit: u16, state: u32) -> KEY_EVENT_RECORD {
        KEY_EVENT_RECORD {
            bKeyDown: is_down.into(),
            wRepeatCount: 1,
            wVirtualKeyCode: code,
            wVirtualScanCode: 0,
            uChar: KEY_EVENT_RECORD_0 { UnicodeChar: unit },
            dwControlKeyState: state,
        }
    }

    fn typed(keys: &[KEY_EVENT_RECORD]) -> Vec<u8> {
        let mut typist = Typist::default();
        keys.iter().for_each(|key| typist.press(key));
        typist.bytes
    }

    #[test]
    fn keys_become_the_bytes_of_a_terminal() {
        let letter = |unit| [key(true, 0, unit, 0), key(false, 0, unit, 0)];
        let text = |text: &str| text.encode_utf16().flat_map(letter).collect::<Vec<_>>();
        for words in ["plain", "\x1b[A", "zażółć", "🦀🦀", "\x03\x04\x1a\x1c"] {
            assert_eq!(typed(&text(words)), words.as_bytes(), "{words:?}");
        }
        let ctrl = LEFT_CTRL_PRESSED;
        assert_eq!(typed(&[key(true, 0x11, 0, ctrl), key(true, SPACE, 0, ctrl)]), b"\0", "Ctrl alone is no key");
        assert_eq!(typed(&[key(true, 0x10, 0, 0), key(false, ALT, 0, 0)]), b"", "nor is Shift, nor is Alt");
        assert_eq!(typed(&[key(false, ALT, 0x2014, 0)]), "—".as_bytes(), "by its number");
        assert_eq!(typed(&[KEY_EVENT_RECORD { wRepeatCount: 3, ..key(true, 0, b'x'.into(), 0) }]), b"xxx");
        let [high, low] = [0xd83e, 0xdd80];
        assert_eq!(typed(&[letter(high), letter(b'a'.into())].concat()), "\u{fffd}a".as_bytes(), "half a letter");
        assert_eq!(typed(&letter(low)), "\u{fffd}".as_bytes());
    }

    #[test]
    fn a_raw_console_reports_every_key_and_its_size() {
        let before = Before { input: 0x1f7, output: 3, code_page: 437 };
        let raw = before.raw();
        assert_eq!(raw.input & 0x7, 0, "no echo, no lines, and Ctrl-C is a key");
        assert_ne!(raw.input & ENABLE_VIRTUAL_TERMINAL_INPUT, 0);
        assert_eq!(raw.input & ENABLE_QUICK_EDIT_MODE, before.input & ENABLE_QUICK_EDIT_MODE);
        assert_eq!(raw.code_page, CP_UTF8);
    }
}
