//! Reads server-sent events from a stream of bytes, chunk by chunk. It does not reconnect.

use bytes::{Buf, Bytes, BytesMut};

/// The state of the reader between two chunks.
#[derive(Debug)]
pub(super) struct Events {
    buffer: BytesMut,
    /// Bytes that are known to contain no line end.
    scanned: usize,
    /// The previous line ended in a carriage return: a line feed that follows belongs to it.
    after_return: bool,
    is_start: bool,
    name: String,
    data: BytesMut,
    has_data: bool,
    /// The current event exceeds the limit; the rest of it is skipped.
    is_too_long: bool,
    /// Inside a line that is skipped.
    in_skipped_line: bool,
    max: usize,
    /// The id for resumption, of the last complete event that had one.
    pub(super) last_id: Option<String>,
    coming_id: Option<String>,
    /// The pause before a reconnect that the server asked for.
    pub(super) retry_ms: Option<u64>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    Message(Bytes),
    /// Of the old transport: the address for POST requests.
    Endpoint(String),
    TooLong,
}

impl Events {
    /// An event with more data than this is skipped and reported.
    pub(super) fn new(max: usize) -> Events {
        Events {
            buffer: BytesMut::new(),
            scanned: 0,
            after_return: false,
            is_start: true,
            name: String::new(),
            data: BytesMut::new(),
            has_data: false,
            is_too_long: false,
            in_skipped_line: false,
            max,
            last_id: None,
            coming_id: None,
            retry_ms: None,
        }
    }

    /// Starts a new stream: an incomplete event is dropped, the id for resumption is kept.
    pub(super) fn begin_again(&mut self) {
        let (last_id, retry_ms) = (self.last_id.take(), self.retry_ms);
        *self = Events { last_id, retry_ms, ..Events::new(self.max) };
    }

    pub(super) fn push(&mut self, chunk: &[u8]) {
        self.buffer.extend_from_slice(chunk);
    }

    /// The next complete event.
    pub(super) fn next_event(&mut self) -> Option<Event> {
        loop {
            let line = self.line()?;
            if line.is_empty() {
                if let Some(event) = self.dispatch() {
                    return Some(event);
                }
                continue;
            }
            self.field(&line);
        }
    }

    fn line(&mut self) -> Option<Bytes> {
        if self.after_return && !self.buffer.is_empty() {
            self.after_return = false;
            if self.buffer[0] == b'\n' {
                self.buffer.advance(1);
            }
        }
        if self.is_start {
            const MARK: &[u8] = "\u{feff}".as_bytes();
            if self.buffer.len() < MARK.len() && MARK.starts_with(&self.buffer) {
                return None;
            }
            self.is_start = false;
            if self.buffer.starts_with(MARK) {
                self.buffer.advance(MARK.len());
            }
        }
        match memchr::memchr2(b'\n', b'\r', &self.buffer[self.scanned..]) {
            Some(at) => {
                let line = self.buffer.split_to(self.scanned + at).freeze();
                self.after_return = self.buffer[0] == b'\r';
                self.buffer.advance(1);
                self.scanned = 0;
                // The end of a skipped line is not an empty line.
                if std::mem::take(&mut self.in_skipped_line) { Some(Bytes::from_static(b":")) } else { Some(line) }
            }
            None if self.buffer.len() > self.max + FIELD_MAX => {
                self.outgrow();
                self.in_skipped_line = true;
                self.buffer.clear();
                self.scanned = 0;
                None
            }
            None => {
                self.scanned = self.buffer.len();
                None
            }
        }
    }

    fn outgrow(&mut self) {
        self.is_too_long = true;
        self.data = BytesMut::new();
    }

    fn field(&mut self, line: &Bytes) {
        let (name, value) = match memchr::memchr(b':', line) {
            Some(at) => {
                let from = if line.get(at + 1) == Some(&b' ') { at + 2 } else { at + 1 };
                (&line[..at], line.slice(from..))
            }
            None => (&line[..], Bytes::new()),
        };
        match name {
            b"data" if self.is_too_long || self.data.len() + value.len() > self.max => self.outgrow(),
            b"data" => {
                if self.has_data {
                    self.data.extend_from_slice(b"\n");
                }
                self.data.extend_from_slice(&value);
                self.has_data = true;
            }
            b"event" => self.name = String::from_utf8_lossy(&value).into_owned(),
            // The specification ignores an id that contains NUL.
            b"id" if !value.contains(&0) => self.coming_id = String::from_utf8(value.to_vec()).ok(),
            b"retry" => self.retry_ms = std::str::from_utf8(&value).ok().and_then(|text| text.parse().ok()),
            _ => {}
        }
    }

    fn dispatch(&mut self) -> Option<Event> {
        if let Some(id) = self.coming_id.take() {
            self.last_id = (!id.is_empty()).then_some(id);
        }
        let name = std::mem::take(&mut self.name);
        let data = std::mem::take(&mut self.data).freeze();
        self.has_data = false;
        if std::mem::take(&mut self.is_too_long) {
            return Some(Event::TooLong);
        }
        match name.as_str() {
            // An event without data only sets the id for resumption.
            _ if data.is_empty() => None,
            "" | "message" => Some(Event::Message(data)),
            "endpoint" => Some(Event::Endpoint(String::from_utf8(data.to_vec()).ok()?)),
            _ => None,
        }
    }
}

/// The part of a line that is not data: the field name.
const FIELD_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn message(text: &str) -> Event {
        Event::Message(Bytes::copy_from_slice(text.as_bytes()))
    }

    fn all(events: &mut Events, text: &[u8]) -> Vec<Event> {
        events.push(text);
        std::iter::from_fn(|| events.next_event()).collect()
    }

    #[test]
    fn events_are_parsed_as_specified() {
        let table: [(&str, Vec<Event>); 10] = [
            ("data: a\n\n", vec![message("a")]),
            ("event: message\r\ndata:a\r\n\r\n", vec![message("a")]),
            ("data: a\rdata: b\r\r", vec![message("a\nb")]),
            (": ping\n\ndata: a\n\n", vec![message("a")]),
            ("\u{feff}data: a\n\n", vec![message("a")]),
            ("id: 7\ndata: \n\n", vec![]),
            ("event: ping\ndata: x\n\n", vec![]),
            ("event: endpoint\ndata: /messages?id=1\n\n", vec![Event::Endpoint("/messages?id=1".into())]),
            ("data: a\n\ndata: half", vec![message("a")]),
            ("data: a\n\ndata: b\n\n", vec![message("a"), message("b")]),
        ];
        for (text, expected) in table {
            assert_eq!(all(&mut Events::new(100), text.as_bytes()), expected, "{text:?}");
        }
    }

    /// The result does not depend on where the network splits the stream.
    #[test]
    fn chunk_borders_do_not_matter() {
        let text =
            "\u{feff}id: 1\r\ndata: é\r\ndata: b\r\n\r\n\r\nevent: message\ndata: c\rid: 2\r\r: x\n\ndata: d\n\n";
        let whole = all(&mut Events::new(100), text.as_bytes());
        assert_eq!(whole, [message("é\nb"), message("c"), message("d")]);
        for first in 0..text.len() {
            for second in first..text.len() {
                let mut events = Events::new(100);
                let bytes = text.as_bytes();
                let mut heard = all(&mut events, &bytes[..first]);
                heard.extend(all(&mut events, &bytes[first..second]));
                heard.extend(all(&mut events, &bytes[second..]));
                assert_eq!(heard, whole, "cut at {first} and {second}");
                assert_eq!(events.last_id.as_deref(), Some("2"));
            }
        }
    }

    #[test]
    fn the_resumption_id_is_that_of_the_last_complete_event() {
        let mut events = Events::new(100);
        all(&mut events, b"id: 1\nretry: 250\ndata: a\n\nid: 2\ndata: b");
        assert_eq!((events.last_id.as_deref(), events.retry_ms), (Some("1"), Some(250)));
        events.begin_again();
        assert_eq!(all(&mut events, b"data: b\n\n"), [message("b")]);
        assert_eq!((events.last_id.as_deref(), events.retry_ms), (Some("1"), Some(250)));
    }

    #[test]
    fn an_event_over_the_limit_is_skipped() {
        let long = "x".repeat(300);
        let texts = [
            format!("data: {long}\n\ndata: a\n\n"),
            format!("data: {}\ndata: {}\n\ndata: a\n\n", &long[..60], &long[..60]),
        ];
        for text in texts {
            let mut events = Events::new(100);
            let mut heard = Vec::new();
            for piece in text.as_bytes().chunks(7) {
                heard.extend(all(&mut events, piece));
                assert!(events.buffer.len() <= 100 + FIELD_MAX + 7, "held: {}", events.buffer.len());
            }
            assert_eq!(heard, [Event::TooLong, message("a")]);
        }
    }
}
