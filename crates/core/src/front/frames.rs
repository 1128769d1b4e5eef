//! Server-sent events as bytes, and the ids by which a client resumes a stream.

use std::fmt;

use bytes::{BufMut, Bytes, BytesMut};

use crate::message::Id;

/// A comment; readers of events skip it.
pub const PING: &[u8] = b":\n\n";

/// The longest request id, in bytes, that an event id contains. A lost request with a longer one is not answered.
const REQUEST_MAX: usize = 64;

/// The id of an event, as the client returns it in `Last-Event-ID`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventId {
    pub stream: u32,
    pub number: u64,
    /// The request whose answer comes later in this stream. A gateway that has lost the request can answer it.
    pub request: Option<Id>,
}

/// Only characters that are permitted in a header.
impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.stream, self.number)?;
        match &self.request {
            Some(Id::Integer(number)) => write!(f, "-n{number}"),
            Some(Id::Text(text)) if text.len() <= REQUEST_MAX => {
                f.write_str("-t")?;
                text.bytes().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
            Some(Id::Text(_) | Id::Big(_)) | None => Ok(()),
        }
    }
}

impl EventId {
    /// None if the text has not the form that [`EventId`] is written in.
    pub fn read(id: &str) -> Option<EventId> {
        let mut parts = id.splitn(3, '-');
        let (stream, number) = (plain(parts.next()?)?, plain(parts.next()?)?);
        let request = match parts.next().map(|tag| tag.split_at_checked(1)) {
            None => None,
            Some(Some(("n", digits))) if digits.len() <= REQUEST_MAX => Some(Id::Integer(digits.parse().ok()?)),
            Some(Some(("t", digits))) => Some(Id::Text(text_of(digits)?.into())),
            Some(_) => return None,
        };
        Some(EventId { stream: stream.parse().ok()?, number: number.parse().ok()?, request })
    }
}

fn plain(digits: &str) -> Option<&str> {
    (!digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())).then_some(digits)
}

/// The text of hexadecimal digits.
fn text_of(digits: &str) -> Option<String> {
    let is_hex = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !is_hex || !digits.len().is_multiple_of(2) || digits.len() > 2 * REQUEST_MAX {
        return None;
    }
    let bytes = (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).ok());
    String::from_utf8(bytes.collect::<Option<_>>()?).ok()
}

/// One event with a message. A line feed in JSON text is white space, and would end the event's line.
pub fn event(id: Option<&EventId>, message: &[u8]) -> Bytes {
    let message = message.trim_ascii();
    let mut frame = BytesMut::with_capacity(message.len() + 48);
    if let Some(id) = id {
        frame.put_slice(format!("id: {id}\n").as_bytes());
    }
    frame.put_slice(b"data: ");
    let start = frame.len();
    frame.put_slice(message);
    if memchr::memchr2(b'\n', b'\r', message).is_some() {
        for byte in &mut frame[start..] {
            if matches!(byte, b'\n' | b'\r') {
                *byte = b' ';
            }
        }
    }
    frame.put_slice(b"\n\n");
    frame.freeze()
}

/// An id by which a stream can be resumed, and no message.
pub fn prime(id: &EventId) -> Bytes {
    format!("id: {id}\ndata:\n\n").into()
}

/// An event of the status page.
pub fn named(name: &str, data: &str) -> Bytes {
    let data = data.trim_end().replace(['\n', '\r'], " ");
    format!("event: {name}\ndata: {data}\n\n").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_json_becomes_one_data_line_of_an_event() {
        let table = [
            ("{}", "data: {}\n\n"),
            ("{\"a\":1}\n", "data: {\"a\":1}\n\n"),
            ("{\r\n  \"a\": \"x\\ny\"\n}", "data: {    \"a\": \"x\\ny\" }\n\n"),
        ];
        for (message, frame) in table {
            assert_eq!(event(None, message.as_bytes()), frame);
        }
        let id = EventId { stream: 3, number: 9, request: Some(Id::Integer(5)) };
        assert_eq!(event(Some(&id), b"1"), "id: 3-9-n5\ndata: 1\n\n");
        assert_eq!(named("state", "{\n}\n"), "event: state\ndata: { }\n\n");
    }

    #[test]
    fn event_ids_are_read_as_they_are_written() {
        let id = |stream, number, request| EventId { stream, number, request };
        let long = Id::text(&"x".repeat(REQUEST_MAX));
        let table = [
            (id(0, 1, None), "0-1"),
            (id(12, u64::MAX, None), "12-18446744073709551615"),
            (id(2, 1, Some(Id::Integer(7))), "2-1-n7"),
            (id(2, 1, Some(Id::Integer(-7))), "2-1-n-7"),
            (id(2, 1, Some(Id::text(""))), "2-1-t"),
            (id(2, 1, Some(Id::text("a\nä"))), "2-1-t610ac3a4"),
            (id(2, 1, Some(long)), &format!("2-1-t{}", "78".repeat(REQUEST_MAX))),
        ];
        for (id, text) in table {
            assert_eq!(id.to_string(), text);
            assert_eq!(EventId::read(text), Some(id), "{text}");
        }
    }

    #[test]
    fn an_event_id_is_bounded() {
        for request in [Id::text(&"x".repeat(REQUEST_MAX + 1)), Id::Big("9".repeat(100).into())] {
            let id = EventId { stream: 2, number: 1, request: Some(request) };
            assert_eq!(id.to_string(), "2-1");
        }
    }

    #[test]
    fn an_invalid_event_id_is_refused() {
        let long = format!("1-2-t{}", "78".repeat(REQUEST_MAX + 1));
        let many = format!("1-2-n{}", "0".repeat(REQUEST_MAX + 1));
        let texts = [
            "",
            "-",
            "1-",
            "-1",
            "1",
            "1-2-3",
            "+1-2",
            "4294967296-1",
            "1-18446744073709551616",
            "a-b",
            "1-2-",
            "1-2-n",
            "1-2-nx",
            "1-2-n1-2",
            "1-2-t6",
            "1-2-tzz",
            "1-2-tff",
            "1-2-t+1",
            "1-2-ä",
            &long,
            &many,
        ];
        for text in texts {
            assert_eq!(EventId::read(text), None, "{text:?}");
        }
    }
}
