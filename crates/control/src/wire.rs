//! The wire format of a control socket: frames that hold requests, answers and events.
//!
//! A frame is a big-endian `u32` and that many bytes of UTF-8 JSON. A request is
//! `{"v":1,"id":n,"method":…,"params":{…}}` and is answered by `{"id":n,"ok":{…}}` or
//! `{"id":n,"error":{"code","message"}}`; an event has no id. Readers ignore unknown members.

use bytes::{Buf, Bytes, BytesMut};
use outlast_os::Size;
use serde_json::{Value, json};

/// The version of the requests that this program sends and understands.
pub const VERSION: u64 = 1;
/// A longer frame is refused before memory is allocated for it.
pub const FRAME_MAX: usize = 1 << 20;
/// The length at the beginning of a frame.
const HEAD: usize = 4;
/// Buffer space for one read. The buffer grows by what arrives, not by the announced length.
const READ_ROOM: usize = 4 << 10;

/// The buffer of a reader: bytes in, whole frames out.
#[derive(Debug, Default)]
pub struct Frames(BytesMut);

/// The peer announced a frame over the limit. The start of the next frame is unknown, so nothing after it can be
/// read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a frame of {0} bytes was announced; the limit is {FRAME_MAX}")]
pub struct TooLong(pub u32);

impl Frames {
    /// The bytes that have arrived and are no whole frame yet.
    pub fn rest(&self) -> &[u8] {
        &self.0
    }

    /// Continues after these bytes.
    pub fn after(rest: &[u8]) -> Frames {
        Frames(BytesMut::from(rest))
    }

    /// The buffer for the next read; it has free space.
    pub fn room(&mut self) -> &mut BytesMut {
        self.0.reserve(READ_ROOM);
        &mut self.0
    }

    /// The content of the next frame, once all of it has arrived.
    pub fn next_frame(&mut self) -> Result<Option<Bytes>, TooLong> {
        let Some(head) = self.0.first_chunk::<HEAD>() else { return Ok(None) };
        let announced = u32::from_be_bytes(*head);
        let length = usize::try_from(announced).unwrap_or(usize::MAX);
        if length > FRAME_MAX {
            return Err(TooLong(announced));
        }
        if self.0.len() < HEAD + length {
            return Ok(None);
        }
        self.0.advance(HEAD);
        let frame = self.0.split_to(length).freeze();
        if self.0.is_empty() {
            // Frees a buffer that held a long frame.
            self.0 = BytesMut::new();
        }
        Ok(Some(frame))
    }
}

/// A frame with this JSON, or `None` if it would exceed the limit.
pub fn frame(json: &str) -> Option<Vec<u8>> {
    let length = u32::try_from(json.len()).ok().filter(|_| json.len() <= FRAME_MAX)?;
    let mut frame = Vec::with_capacity(HEAD + json.len());
    frame.extend_from_slice(&length.to_be_bytes());
    frame.extend_from_slice(json.as_bytes());
    Some(frame)
}

/// A request of a client.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    pub id: u64,
    pub method: String,
    pub params: Value,
}

/// Why a request is not carried out.
#[derive(Debug, Clone, PartialEq)]
pub struct Refusal {
    /// For programs; it never changes.
    pub code: String,
    /// A sentence for people.
    pub message: String,
    /// Further data.
    pub data: Value,
}

impl Refusal {
    pub fn new(code: &str, message: impl Into<String>) -> Refusal {
        Refusal { code: code.to_owned(), message: message.into(), data: Value::Null }
    }
}

impl Request {
    /// A refusal carries the request's id if that could be read.
    pub fn read(frame: &[u8]) -> Result<Request, (Option<u64>, Refusal)> {
        let refuse = |id, code, message: String| Err((id, Refusal::new(code, message)));
        let text = match std::str::from_utf8(frame) {
            Ok(text) => text,
            Err(error) => return refuse(None, "bad_frame", format!("the frame is not UTF-8: {error}")),
        };
        let value: Value = match serde_json::from_str(text) {
            Ok(value) => value,
            Err(error) => return refuse(None, "bad_frame", format!("the frame is not JSON: {error}")),
        };
        let Some(id) = value["id"].as_u64() else {
            return refuse(None, "bad_request", "a request needs an `id`, a whole number".into());
        };
        match &value["v"] {
            Value::Null => {
                return refuse(Some(id), "bad_version", format!("a request needs a version, \"v\":{VERSION}"));
            }
            version if version.as_u64() != Some(VERSION) => {
                let message = format!("version {version} is not supported, only {VERSION}");
                return refuse(Some(id), "bad_version", message);
            }
            _ => {}
        }
        let Some(method) = value["method"].as_str() else {
            return refuse(Some(id), "bad_request", "a request needs a `method`".into());
        };
        let params = match &value["params"] {
            Value::Null => json!({}),
            params @ Value::Object(_) => params.clone(),
            _ => return refuse(Some(id), "bad_request", "`params` must be an object".into()),
        };
        Ok(Request { id, method: method.to_owned(), params })
    }

    pub fn to_json(&self) -> String {
        json!({"v": VERSION, "id": self.id, "method": self.method, "params": self.params}).to_string()
    }
}

/// A message of an instance.
#[derive(Debug, Clone, PartialEq)]
pub enum Said {
    /// Has no id if the refused request had none that could be read.
    Answer { id: Option<u64>, result: Result<Value, Refusal> },
    /// An audit record, for subscribed clients.
    Record(Value),
    /// A message of a later version.
    Unknown,
}

impl Said {
    /// `None` if it is not JSON.
    pub fn read(frame: &[u8]) -> Option<Said> {
        let mut value: Value = serde_json::from_slice(frame).ok()?;
        let id = value["id"].as_u64();
        if let Some(ok) = value.get_mut("ok") {
            return Some(Said::Answer { id, result: Ok(ok.take()) });
        }
        if let Some(error) = value.get_mut("error") {
            let text = |member: &Value| member.as_str().unwrap_or_default().to_owned();
            let (code, message) = (text(&error["code"]), text(&error["message"]));
            let refusal = Refusal { code, message, data: error["data"].take() };
            return Some(Said::Answer { id, result: Err(refusal) });
        }
        match value["event"].as_str() {
            Some("record") => Some(Said::Record(value["record"].take())),
            _ => Some(Said::Unknown),
        }
    }
}

/// An answer as a frame. An answer that is too long becomes a refusal, which is short enough.
pub fn answer(id: Option<u64>, result: &Result<Value, Refusal>) -> Vec<u8> {
    let json = match result {
        Ok(ok) => json!({"id": id, "ok": ok}),
        Err(refusal) => {
            let mut error = json!({"code": refusal.code, "message": refusal.message});
            if !refusal.data.is_null() {
                error["data"] = refusal.data.clone();
            }
            json!({"id": id, "error": error})
        }
    };
    frame(&json.to_string()).unwrap_or_else(|| {
        let message = format!("the answer would be longer than {FRAME_MAX} bytes");
        answer(id, &Err(Refusal::new("too_long", message)))
    })
}

/// An event for subscribed clients; `about` has a member `event`.
pub fn event(about: &Value) -> Option<Vec<u8>> {
    frame(&about.to_string())
}

/// The head of a frame between an instance and a viewer of its terminal: the length, and the letter of its kind.
pub fn viewer_head(kind: u8, length: usize) -> [u8; HEAD + 1] {
    let [a, b, c, d] = u32::try_from(length + 1).unwrap_or(u32::MAX).to_be_bytes();
    [a, b, c, d, kind]
}

/// Columns, rows, width and height of a terminal, each as two bytes.
pub fn viewer_size(bytes: &[u8]) -> Option<Size> {
    let mut numbers = bytes.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
    let (columns, rows) = (numbers.next()?, numbers.next()?);
    let (width, height) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    (columns > 0 && rows > 0).then_some(Size { columns, rows, width, height })
}

pub fn viewer_size_in_bytes(size: Size) -> Vec<u8> {
    [size.columns, size.rows, size.width, size.height].iter().flat_map(|number| number.to_be_bytes()).collect()
}

/// An audit record, as its finished line, as an event. Records are shorter than a frame.
pub fn record(line: &str) -> Option<Vec<u8>> {
    frame(&format!(r#"{{"event":"record","record":{}}}"#, line.trim_end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(frames: &mut Frames, bytes: &[u8]) -> Result<Option<Bytes>, TooLong> {
        frames.room().extend_from_slice(bytes);
        frames.next_frame()
    }

    #[test]
    fn frames_are_complete_wherever_reads_are_split() {
        let whole = [frame("{}").unwrap(), frame(r#"{"a":1}"#).unwrap()].concat();
        let mut frames = Frames::default();
        let mut heard = Vec::new();
        for byte in whole {
            heard.extend(feed(&mut frames, &[byte]).unwrap());
        }
        assert_eq!(heard, [&b"{}"[..], br#"{"a":1}"#]);
    }

    #[test]
    fn a_size_is_read_as_it_was_written() {
        let size = Size { columns: 101, rows: 33, width: 909, height: 600 };
        assert_eq!(viewer_size(&viewer_size_in_bytes(size)), Some(size));
        assert_eq!(viewer_size(&[0, 80, 0, 24]), Some(Size { columns: 80, rows: 24, width: 0, height: 0 }));
        for bytes in [&[][..], &[0, 80], &[0, 80, 0], &[0, 0, 0, 24], &[0, 80, 0, 0]] {
            assert_eq!(viewer_size(bytes), None, "{bytes:?}");
        }
        let mut frames = Frames::default();
        let head = viewer_head(b'i', 3);
        assert_eq!(feed(&mut frames, &[&head[..], b"abc"].concat()).unwrap().unwrap(), &b"iabc"[..]);
    }

    #[test]
    fn an_incomplete_frame_waits_and_a_length_above_the_limit_is_an_error() {
        #[rustfmt::skip]
        let table = [
            (&b""[..],                      Ok(None)),
            (b"\0\0\0",                     Ok(None)),
            (b"\0\0\0\x05half",             Ok(None)),
            (b"\0\0\0\0",                   Ok(Some(Bytes::new()))),
            (b"\0\x10\0\x01{",              Err(TooLong(FRAME_MAX as u32 + 1))),
            (b"\xff\xff\xff\xff{",          Err(TooLong(u32::MAX))),
        ];
        for (bytes, expected) in table {
            let mut frames = Frames::default();
            assert_eq!(feed(&mut frames, bytes), expected, "{bytes:?}");
            assert!(frames.0.capacity() <= 2 * READ_ROOM, "{bytes:?}");
        }
    }

    #[test]
    fn the_longest_frame_is_sent_and_a_longer_frame_is_refused() {
        let longest = "x".repeat(FRAME_MAX);
        let mut frames = Frames::default();
        assert_eq!(feed(&mut frames, &frame(&longest).unwrap()).unwrap().unwrap().len(), FRAME_MAX);
        assert_eq!(frame(&format!("{longest}x")), None);
        let answer = answer(Some(7), &Ok(json!({"text": longest})));
        let Some(Said::Answer { id: Some(7), result: Err(refusal) }) = Said::read(&answer[HEAD..]) else {
            panic!("it is refused");
        };
        assert_eq!(refusal.code, "too_long");
    }

    #[test]
    fn a_request_is_read_or_refused_with_a_sentence() {
        let mut words = String::new();
        for frame in [
            &b"\xff\xfe"[..],
            b"{\"v\":1",
            b"",
            b"[]",
            br#"{"v":1,"method":"state"}"#,
            br#"{"v":1,"id":"one","method":"state"}"#,
            br#"{"id":1,"method":"state"}"#,
            br#"{"v":2,"id":2,"method":"state"}"#,
            br#"{"v":"1","id":3,"method":"state"}"#,
            br#"{"v":1,"id":4}"#,
            br#"{"v":1,"id":5,"method":"state","params":[]}"#,
        ] {
            let (id, refusal) = Request::read(frame).unwrap_err();
            words.push_str(&format!("{id:?} {}: {}\n", refusal.code, refusal.message));
        }
        insta::assert_snapshot!(words, @r#"
        None bad_frame: the frame is not UTF-8: invalid utf-8 sequence of 1 bytes from index 0
        None bad_frame: the frame is not JSON: EOF while parsing an object at line 1 column 6
        None bad_frame: the frame is not JSON: EOF while parsing a value at line 1 column 0
        None bad_request: a request needs an `id`, a whole number
        None bad_request: a request needs an `id`, a whole number
        None bad_request: a request needs an `id`, a whole number
        Some(1) bad_version: a request needs a version, "v":1
        Some(2) bad_version: version 2 is not supported, only 1
        Some(3) bad_version: version "1" is not supported, only 1
        Some(4) bad_request: a request needs a `method`
        Some(5) bad_request: `params` must be an object
        "#);
        let request = Request { id: 6, method: "state".into(), params: json!({}) };
        assert_eq!(Request::read(request.to_json().as_bytes()), Ok(request.clone()));
        assert_eq!(Request::read(br#"{"v":1,"id":6,"method":"state","new":true}"#), Ok(request));
    }

    #[test]
    fn answers_and_records_are_parsed() {
        let refusal = Refusal { data: json!({"a": 1}), ..Refusal::new("no", "not now") };
        #[rustfmt::skip]
        let table = [
            (answer(Some(1), &Ok(json!({"pid": 7}))), Said::Answer { id: Some(1), result: Ok(json!({"pid": 7})) }),
            (answer(None, &Err(refusal.clone())),     Said::Answer { id: None, result: Err(refusal) }),
            (record("{\"level\":\"INFO\"}\n").unwrap(), Said::Record(json!({"level": "INFO"}))),
            (frame(r#"{"event":"later"}"#).unwrap(),  Said::Unknown),
        ];
        for (frame, said) in table {
            assert_eq!(Said::read(&frame[HEAD..]), Some(said));
        }
        assert_eq!(Said::read(b"nonsense"), None);
    }
}
