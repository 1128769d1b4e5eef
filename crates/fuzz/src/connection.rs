//! One client's connection to a server that runs on the same thread: all that was sent and received.

use std::io::{ErrorKind, Read, Write};

/// How often a long message is continued; the server reads in between.
pub const WRITES_MAX: usize = 10_000;

pub struct Connection<S> {
    pub stream: S,
    pub sent: Vec<u8>,
    pub received: Vec<u8>,
    pub is_half_closed: bool,
}

impl<S: Read + Write> Connection<S> {
    /// The stream does not block.
    pub fn new(stream: S) -> Connection<S> {
        Connection { stream, sent: Vec::new(), received: Vec::new(), is_half_closed: false }
    }

    /// Writes what the server takes now. Returns the rest; nothing if all was sent or the server has closed the
    /// connection, which it may do at any time.
    pub fn write<'a>(&mut self, bytes: &'a [u8]) -> Option<&'a [u8]> {
        if self.is_half_closed {
            return None;
        }
        match self.stream.write(bytes) {
            Ok(count) => {
                self.sent.extend_from_slice(&bytes[..count]);
                Some(&bytes[count..]).filter(|rest| !rest.is_empty())
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Some(bytes),
            Err(_) => None,
        }
    }
}
