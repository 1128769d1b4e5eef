//! Failures as C sees them: a status number, and a text that stays valid until the thread's next call.

use std::{
    any::Any,
    cell::RefCell,
    ffi::{CString, c_char},
    panic::{AssertUnwindSafe, catch_unwind},
};

use outlast_control::{client::AskError, find::FindError};

/// The status numbers of `outlast.h`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Ok = 0,
    BadArgument = 1,
    NotFound = 2,
    Unreachable = 3,
    Refused = 4,
    TimedOut = 5,
    Broken = 6,
}

#[derive(Debug)]
pub struct Failure {
    pub status: Status,
    words: String,
    code: String,
}

impl Failure {
    pub fn new(status: Status, words: impl Into<String>) -> Failure {
        Failure { status, words: words.into(), code: String::new() }
    }

    pub fn argument(words: impl Into<String>) -> Failure {
        Failure::new(Status::BadArgument, words)
    }
}

impl From<FindError> for Failure {
    /// The sentence, its cause and the hint, each on its own line.
    fn from(error: FindError) -> Failure {
        let parts = [Some(error.sentence), error.because, error.hint];
        Failure::new(Status::NotFound, parts.into_iter().flatten().collect::<Vec<_>>().join("\n"))
    }
}

impl From<AskError> for Failure {
    fn from(error: AskError) -> Failure {
        let words = error.to_string();
        match error {
            AskError::Refused(refusal) => Failure { status: Status::Refused, words, code: refusal.code },
            AskError::TooLate => Failure::new(Status::TimedOut, words),
            AskError::Ended | AskError::Nonsense | AskError::Os(_) => Failure::new(Status::Unreachable, words),
        }
    }
}

#[derive(Default)]
struct Last {
    words: CString,
    code: CString,
}

thread_local! {
    static LAST: RefCell<Last> = RefCell::default();
}

/// Runs a call and stores its failure for the thread. A panic is a failure, too.
pub(crate) fn guard(call: impl FnOnce() -> Result<(), Failure>) -> Status {
    forget();
    // State that a panic leaves inconsistent is behind the client's mutex, which is then poisoned.
    let outcome = catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(bug(&*panic)));
    match outcome {
        Ok(()) => Status::Ok,
        Err(failure) => {
            note(&failure);
            failure.status
        }
    }
}

/// Clears the failure of the previous call.
pub(crate) fn forget() {
    LAST.with_borrow_mut(|last| *last = Last::default());
}

pub(crate) fn last_words() -> *const c_char {
    LAST.with_borrow(|last| last.words.as_ptr())
}

pub(crate) fn last_code() -> *const c_char {
    LAST.with_borrow(|last| last.code.as_ptr())
}

fn note(failure: &Failure) {
    // A zero byte would end the text for C.
    let text = |words: &str| CString::new(words.replace('\0', "\u{fffd}")).unwrap_or_default();
    let last = Last { words: text(&failure.words), code: text(&failure.code) };
    LAST.with_borrow_mut(|known| *known = last);
}

fn bug(panic: &(dyn Any + Send)) -> Failure {
    let words = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    Failure::new(Status::Broken, format!("a bug in outlast's library: {}", words.unwrap_or("it did not say which")))
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[expect(unsafe_code, reason = "as C would read it")]
    fn said() -> String {
        // SAFETY: the text of this thread, which makes no other call in between.
        unsafe { CStr::from_ptr(last_words()) }.to_string_lossy().into_owned()
    }

    #[test]
    fn a_panic_is_a_status() {
        assert_eq!(guard(|| panic!("the promise broke")), Status::Broken);
        assert_eq!(said(), "a bug in outlast's library: the promise broke");
        assert_eq!(guard(|| Ok(())), Status::Ok);
        assert_eq!(said(), "");
    }

    #[test]
    fn texts_are_valid_c_strings() {
        assert_eq!(guard(|| Err(Failure::argument("a\0b"))), Status::BadArgument);
        assert_eq!(said(), "a\u{fffd}b");
        assert_eq!(std::thread::spawn(said).join().unwrap(), "", "each thread has its own");
    }
}
