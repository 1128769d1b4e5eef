//! The parts that the saved state of every machine consists of: moments and bytes. A machine that can be saved has a
//! module `saved` with its wire types; which program reads the state, and how it gets there, is not known here.
//!
//! Plain values (ids, causes, kinds of requests) are written by serde as they are. Everything with a moment, bytes or an
//! index has a wire type, and is converted by hand. A test compares the format with a stored one, so that a change of it
//! is noticed: it needs a new version of the state, and a migration.

use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// A moment, in nanoseconds after the state was saved; negative if it was before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment(i64);

impl Moment {
    pub fn of(at: Instant, now: Instant) -> Moment {
        let nanos = |length: Duration| i64::try_from(length.as_nanos()).unwrap_or(i64::MAX);
        Moment(if at < now { -nanos(now - at) } else { nanos(at - now) })
    }

    /// The same moment for a program that continues at `now`. A moment before the clock of the system began is `now`.
    pub fn at(self, now: Instant) -> Instant {
        let length = Duration::from_nanos(self.0.unsigned_abs());
        let at = if self.0 < 0 { now.checked_sub(length) } else { now.checked_add(length) };
        at.unwrap_or(now)
    }
}

/// Bytes: as text if they are UTF-8, which messages always are; otherwise in hexadecimal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Octets {
    Text(String),
    Hex { hex: String },
}

impl Octets {
    pub fn of(bytes: &[u8]) -> Octets {
        match std::str::from_utf8(bytes) {
            Ok(text) => Octets::Text(text.to_owned()),
            Err(_) => Octets::Hex { hex: bytes.iter().map(|byte| format!("{byte:02x}")).collect() },
        }
    }

    /// The bytes; pairs that are not hexadecimal are left out.
    pub fn bytes(self) -> Bytes {
        match self {
            Octets::Text(text) => text.into(),
            Octets::Hex { hex } => {
                let digits: Vec<u8> =
                    hex.chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit as u8).collect();
                digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a test needs one moment to count from")]
    fn a_moment_keeps_its_distance() {
        let (saved, restored) = (Instant::now(), Instant::now() + Duration::from_secs(7));
        for nanos in [0, 1, 999_999_999, 86_400_000_000_000] {
            let length = Duration::from_nanos(nanos);
            assert_eq!(Moment::of(saved + length, saved).at(restored), restored + length);
        }
        let before = Duration::from_millis(3);
        assert_eq!(Moment::of(saved - before, saved).at(restored), restored - before);
    }

    #[test]
    fn any_bytes_are_read_back_unchanged() {
        for bytes in [&b""[..], b"{\"a\":1}\n", "ü".as_bytes(), &[0xff, 0x00, 0x7f], &"ü".as_bytes()[..1]] {
            let text = serde_json::to_string(&Octets::of(bytes)).unwrap();
            assert_eq!(serde_json::from_str::<Octets>(&text).unwrap().bytes(), bytes, "{text}");
        }
    }
}
