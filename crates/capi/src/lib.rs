//! The control client for C, as declared in `include/outlast.h`. No panic unwinds into the caller, and every pointer
//! is checked for NULL before it is read.
#![expect(unsafe_code, reason = "the border to C: each pointer that comes over it is proven where it is used")]

use std::{
    ffi::{CStr, CString, c_char},
    path::Path,
    ptr, slice,
    time::{Duration, Instant},
};

use outlast_control::method::{Inject, Method, Mode, Restart, Send};

mod client;
mod failure;

pub use client::Client;
use failure::{Failure, Status, forget, guard};

/// Increased by an incompatible change of the interface; additions do not change it.
const API_VERSION: u32 = 1;
/// A timeout without a limit.
const FOREVER: u32 = u32::MAX;
/// The most bytes typed in one call; they fit into one frame.
const INJECT_MAX: usize = 512 << 10;

/// Once the agent can take input, a session reports the result of a text within this time.
const ARRIVAL_MAX: Duration = Duration::from_secs(60);

const CONTINUE: i32 = 0;
const FRESH: i32 = 1;

#[unsafe(no_mangle)]
pub extern "C" fn outlast_api_version() -> u32 {
    API_VERSION
}

/// # Safety
/// `which` is NULL or a text that ends with a zero byte; `client` is NULL or a writable location for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outlast_connect(which: *const c_char, timeout_ms: u32, client: *mut *mut Client) -> Status {
    guard(|| {
        // SAFETY: by this function's own contract.
        let place = unsafe { place(client, "client") }?;
        *place = ptr::null_mut();
        // SAFETY: as above.
        let which = unsafe { text(which, "which") }?.ok_or_else(|| Failure::argument("`which` is NULL"))?;
        let connected = if which.contains('/') {
            Client::at(Path::new(which), patience(timeout_ms))?
        } else {
            Client::named(which, patience(timeout_ms))?
        };
        *place = Box::into_raw(Box::new(connected));
        Ok(())
    })
}

/// # Safety
/// `client` is NULL or came from [`outlast_connect`] and was not freed; `json` is NULL or a writable location for a
/// pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outlast_state(client: *mut Client, timeout_ms: u32, json: *mut *mut c_char) -> Status {
    guard(|| {
        // SAFETY: by this function's own contract.
        let place = unsafe { place(json, "json") }?;
        *place = ptr::null_mut();
        // SAFETY: as above.
        let client = unsafe { connected(client) }?;
        *place = owned(&client.ask(&Method::State, deadline(timeout_ms))?.to_string());
        Ok(())
    })
}

/// # Safety
/// As for [`outlast_state`]; `reason` is NULL or a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outlast_restart(
    client: *mut Client,
    mode: i32,
    reason: *const c_char,
    timeout_ms: u32,
    json: *mut *mut c_char,
) -> Status {
    guard(|| {
        // SAFETY: by this function's own contract.
        let place = unsafe { optional(json) };
        // SAFETY: as above.
        let (client, reason) = unsafe { (connected(client)?, text(reason, "reason")?) };
        let mode = match mode {
            // Servers have no modes, and to continue is the default of agents.
            CONTINUE => None,
            FRESH => Some(Mode::Fresh),
            mode => return Err(Failure::argument(format!("there is no mode {mode}"))),
        };
        let reason = Some(reason.unwrap_or("requested by a program").to_owned());
        let answer =
            client.ask(&Method::Restart(Restart { reason, mode, ..Restart::default() }), deadline(timeout_ms))?;
        if let Some(place) = place {
            *place = owned(&answer.to_string());
        }
        Ok(())
    })
}

/// # Safety
/// `client` as for [`outlast_state`]; `bytes` points to `count` readable bytes, or `count` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outlast_inject(
    client: *mut Client,
    bytes: *const u8,
    count: usize,
    timeout_ms: u32,
) -> Status {
    guard(|| {
        // SAFETY: by this function's own contract.
        let client = unsafe { connected(client) }?;
        if count > INJECT_MAX {
            return Err(Failure::argument(format!("the text is longer than {INJECT_MAX} bytes")));
        }
        let bytes = match (bytes.is_null(), count) {
            (_, 0) => &[][..],
            (true, _) => return Err(Failure::argument("`bytes` is NULL")),
            // SAFETY: not NULL, `count` is within the limit, and the caller guarantees that the bytes are readable.
            (false, count) => unsafe { slice::from_raw_parts(bytes, count) },
        };
        client.ask(&Method::Inject(Inject { bytes: bytes.to_vec() }), deadline(timeout_ms))?;
        Ok(())
    })
}

/// # Safety
/// As for [`outlast_state`]; `text` is NULL or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outlast_send(
    client: *mut Client,
    text: *const c_char,
    submit: i32,
    timeout_ms: u32,
    json: *mut *mut c_char,
) -> Status {
    guard(|| {
        // SAFETY: by this function's own contract.
        let place = unsafe { optional(json) };
        // SAFETY: as above.
        let (client, text) = unsafe { (connected(client)?, self::text(text, "text")?) };
        let text = text.ok_or_else(|| Failure::argument("`text` is NULL"))?;
        let send =
            Send { text: text.to_owned(), submit: Some(submit != 0), timeout_ms: Some(timeout_ms.into()), key: None };
        let answer = client.ask(&Method::Send(send), deadline(timeout_ms).map(|at| at + ARRIVAL_MAX))?;
        if let Some(place) = place {
            *place = owned(&answer.to_string());
        }
        Ok(())
    })
}

/// # Safety
/// `client` as for [`outlast_state`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outlast_stop(client: *mut Client, force: i32, timeout_ms: u32) -> Status {
    guard(|| {
        // SAFETY: by this function's own contract.
        let client = unsafe { connected(client) }?;
        client.stop(force != 0, deadline(timeout_ms))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn outlast_last_error() -> *const c_char {
    failure::last_words()
}

#[unsafe(no_mangle)]
pub extern "C" fn outlast_last_code() -> *const c_char {
    failure::last_code()
}

/// # Safety
/// `client` is NULL or came from [`outlast_connect`], was not freed, and no other thread uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outlast_free(client: *mut Client) {
    forget();
    if !client.is_null() {
        // SAFETY: made by `Box::into_raw` in `outlast_connect`, and freed once.
        drop(unsafe { Box::from_raw(client) });
    }
}

/// # Safety
/// `text` is NULL or was returned by a function of this library, and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outlast_free_text(text: *mut c_char) {
    forget();
    if !text.is_null() {
        // SAFETY: made by `CString::into_raw` in `owned`, and freed once.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// # Safety
/// `client` is NULL or was not freed.
unsafe fn connected<'a>(client: *mut Client) -> Result<&'a Client, Failure> {
    // SAFETY: by this function's own contract. The reference is shared: several threads may hold one, and `Client` is
    // made for that.
    unsafe { client.as_ref() }.ok_or_else(|| Failure::argument("`client` is NULL"))
}

/// # Safety
/// `place` is NULL or a writable location.
unsafe fn place<'a, T>(place: *mut *mut T, name: &str) -> Result<&'a mut *mut T, Failure> {
    // SAFETY: by this function's own contract.
    unsafe { place.as_mut() }.ok_or_else(|| Failure::argument(format!("`{name}` is NULL")))
}

/// An optional output location; it is set to NULL.
///
/// # Safety
/// `place` is NULL or a writable location.
unsafe fn optional<'a, T>(place: *mut *mut T) -> Option<&'a mut *mut T> {
    // SAFETY: by this function's own contract.
    let place = unsafe { place.as_mut() }?;
    *place = ptr::null_mut();
    Some(place)
}

/// # Safety
/// `text` is NULL, or ends with a zero byte and stays valid during the call.
unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<Option<&'a str>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL; the rest is this function's own contract.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| Failure::argument(format!("`{name}` is not UTF-8")))
}

/// JSON contains no zero byte: it is written as `\u0000`.
fn owned(json: &str) -> *mut c_char {
    CString::new(json).unwrap_or_default().into_raw()
}

fn patience(timeout_ms: u32) -> Duration {
    Duration::from_millis(timeout_ms.into())
}

fn deadline(timeout_ms: u32) -> Option<Instant> {
    (timeout_ms != FOREVER).then(|| Instant::now() + patience(timeout_ms))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const HEADER: &str = include_str!("../include/outlast.h");

    /// Every text that stands between `before` and `after`.
    fn between<'a>(text: &'a str, before: &'a str, after: char) -> BTreeSet<&'a str> {
        text.split(before).skip(1).filter_map(|rest| rest.split(after).next()).collect()
    }

    #[test]
    fn the_header_and_the_library_name_the_same() {
        let source = include_str!("lib.rs");
        let ours = between(source, "extern \"C\" fn ", '(');
        let declared: BTreeSet<&str> = HEADER
            .lines()
            .filter(|line| line.starts_with(char::is_alphabetic))
            .filter_map(|line| line.split_once('(').and_then(|(before, _)| before.rsplit([' ', '*']).next()))
            .filter(|name| name.starts_with("outlast_"))
            .collect();
        assert_eq!(declared, ours.into_iter().filter(|name| name.starts_with("outlast_")).collect());
    }

    #[test]
    fn the_header_and_the_library_count_alike() {
        let number = |name: &str| -> i64 {
            let rest = HEADER.split(&format!("#define {name} ")).nth(1).unwrap_or_else(|| panic!("no {name}"));
            rest.split_whitespace().next().unwrap().parse().unwrap()
        };
        #[rustfmt::skip]
        let table = [
            ("OUTLAST_API_VERSION",  i64::from(API_VERSION)),
            ("OUTLAST_OK",           i64::from(Status::Ok as i32)),
            ("OUTLAST_BAD_ARGUMENT", i64::from(Status::BadArgument as i32)),
            ("OUTLAST_NOT_FOUND",    i64::from(Status::NotFound as i32)),
            ("OUTLAST_UNREACHABLE",  i64::from(Status::Unreachable as i32)),
            ("OUTLAST_REFUSED",      i64::from(Status::Refused as i32)),
            ("OUTLAST_TIMED_OUT",    i64::from(Status::TimedOut as i32)),
            ("OUTLAST_BROKEN",       i64::from(Status::Broken as i32)),
            ("OUTLAST_CONTINUE",     i64::from(CONTINUE)),
            ("OUTLAST_FRESH",        i64::from(FRESH)),
        ];
        for (name, ours) in table {
            assert_eq!(number(name), ours, "{name}");
        }
    }
}
