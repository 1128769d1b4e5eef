//! The JSON-RPC envelope. One pass finds what a relay may look at; payloads pass through unread.

use std::{borrow::Cow, fmt, ops::Range};

use bytes::{BufMut, Bytes, BytesMut};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// What a line says. Everything borrows from the line.
#[derive(Debug)]
pub enum Message<'a> {
    Request {
        id: RawId<'a>,
        method: Cow<'a, str>,
        params: Params<'a>,
    },
    Notification {
        method: Cow<'a, str>,
        params: Params<'a>,
    },
    Response {
        id: RawId<'a>,
        result: Option<&'a RawValue>,
        error: Option<&'a RawValue>,
    },
    Batch(Vec<&'a RawValue>),
    /// JSON, but nothing that JSON-RPC has a name for.
    Other,
}

/// An id as it stands in the line. `null`, an absent one and a fraction can be passed on but not kept track of.
#[derive(Debug, Clone, Copy, Default)]
pub struct RawId<'a>(Option<&'a RawValue>);

impl<'a> RawId<'a> {
    pub fn parse(&self) -> Option<Id> {
        Id::parse(self.0?.get())
    }

    /// Nothing there, or `null`.
    pub fn is_null(&self) -> bool {
        self.0.is_none_or(|raw| raw.get() == "null")
    }

    /// The bytes of `line` that hold it.
    pub fn place(&self, line: &[u8]) -> Option<Range<usize>> {
        self.0.map(|raw| place(line, raw))
    }
}

/// The members of `params` that some row of the relay's tables needs; the rest is not looked at.
#[derive(Debug, Default)]
pub struct Params<'a> {
    fields: [Option<&'a RawValue>; PARAMS.len()],
    /// The object itself, for adding to it.
    pub is_object: bool,
}

const PARAMS: [&str; 15] = [
    "name",
    "_meta",
    "cursor",
    "uri",
    "requestId",
    "progressToken",
    "progress",
    "task",
    "requestState",
    "inputResponses",
    "notifications",
    "protocolVersion",
    "arguments",
    "level",
    "reason",
];

macro_rules! params {
    ($($name:ident = $index:literal),* $(,)?) => {
        impl<'a> Params<'a> {
            $(pub fn $name(&self) -> Option<&'a RawValue> { self.fields[$index] })*
        }
    };
}
params! {
    name = 0, meta = 1, cursor = 2, uri = 3, request_id = 4, progress_token = 5, progress = 6, task = 7,
    request_state = 8, input_responses = 9, notifications = 10, protocol_version = 11, arguments = 12,
    level = 13, reason = 14,
}

/// A request's id, by type and value: strings are unescaped, integers exact.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Id {
    Integer(i128),
    /// An integer that does not fit, by its digits.
    Big(Box<str>),
    Text(Box<str>),
}

impl Id {
    pub fn parse(json: &str) -> Option<Id> {
        match json.as_bytes().first()? {
            b'"' => {
                let inner = &json[1..json.len() - 1];
                if inner.contains('\\') {
                    serde_json::from_str::<String>(json).ok().map(|text| Id::Text(text.into()))
                } else {
                    Some(Id::Text(inner.into()))
                }
            }
            b'-' | b'0'..=b'9' if !json.contains(['.', 'e', 'E']) => {
                Some(json.parse().map_or_else(|_| Id::Big(json.into()), Id::Integer))
            }
            _ => None,
        }
    }

    pub fn text(text: &str) -> Id {
        Id::Text(text.into())
    }
}

/// As JSON.
impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Id::Integer(number) => write!(f, "{number}"),
            Id::Big(digits) => f.write_str(digits),
            Id::Text(text) => f.write_str(&quote(text)),
        }
    }
}

/// A string as JSON.
pub fn quote(text: &str) -> String {
    serde_json::to_string(text).expect("a string is always JSON")
}

/// The line's words, or why they are not JSON.
pub fn parse(line: &[u8]) -> Result<Message<'_>, NotJson> {
    let text = std::str::from_utf8(line).map_err(|error| NotJson(error.to_string()))?;
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let message = Envelope.deserialize(&mut deserializer).map_err(NotJson::from)?;
    deserializer.end().map_err(NotJson::from)?;
    Ok(message)
}

#[derive(Debug)]
pub struct NotJson(pub String);

impl From<serde_json::Error> for NotJson {
    fn from(error: serde_json::Error) -> Self {
        NotJson(error.to_string())
    }
}

/// The named members of an object, last one first if a name stands twice; `None` if it is no object.
pub fn pick<'a, const N: usize>(raw: &'a RawValue, names: [&str; N]) -> Option<[Option<&'a RawValue>; N]> {
    let mut deserializer = serde_json::Deserializer::from_str(raw.get());
    Pick(names).deserialize(&mut deserializer).ok().flatten()
}

/// One member, as a string.
pub fn pick_text(raw: &RawValue, name: &str) -> Option<String> {
    text(pick(raw, [name])?[0]?)
}

/// A JSON string's content.
pub fn text(raw: &RawValue) -> Option<String> {
    serde_json::from_str(raw.get()).ok()
}

/// An array's members; `None` if it is no array.
pub fn members(raw: &RawValue) -> Option<Vec<&RawValue>> {
    serde_json::from_str(raw.get()).ok()
}

/// Where a part stands in the line it was parsed from.
pub fn place(line: &[u8], part: &RawValue) -> Range<usize> {
    let start = part.get().as_ptr() as usize - line.as_ptr() as usize;
    debug_assert!(start + part.get().len() <= line.len(), "a part of another line");
    start..start + part.get().len()
}

/// A replacement of some bytes of a line.
#[derive(Debug)]
pub struct Edit {
    pub at: Range<usize>,
    pub with: String,
}

impl Edit {
    pub fn replace(line: &[u8], part: &RawValue, with: impl Into<String>) -> Edit {
        Edit { at: place(line, part), with: with.into() }
    }

    /// Adds to an object or array, after what it holds.
    pub fn append(line: &[u8], container: &RawValue, with: &str) -> Edit {
        let at = place(line, container).end - 1;
        let inner = &container.get()[1..container.get().len() - 1];
        let empty = inner.bytes().all(|byte| byte.is_ascii_whitespace());
        Edit { at: at..at, with: if empty { with.to_owned() } else { format!(",{with}") } }
    }

    /// Sets one member of an object, whether or not it was there.
    pub fn set(line: &[u8], object: &RawValue, name: &str, value: &str) -> Option<Edit> {
        match pick(object, [name])? {
            [Some(old)] => Some(Edit::replace(line, old, value)),
            [None] => Some(Edit::append(line, object, &format!("{}:{value}", quote(name)))),
        }
    }
}

/// The line with some bytes replaced and all others as they were. Edits must not overlap.
pub fn splice(line: &[u8], mut edits: Vec<Edit>) -> Bytes {
    edits.sort_by_key(|edit| edit.at.start);
    let grown: usize = edits.iter().map(|edit| edit.with.len()).sum();
    let mut out = BytesMut::with_capacity(line.len() + grown);
    let mut from = 0;
    for edit in edits {
        out.put_slice(&line[from..edit.at.start]);
        out.put_slice(edit.with.as_bytes());
        from = edit.at.end;
    }
    out.put_slice(&line[from..]);
    out.freeze()
}

/// A whole line from its text.
pub fn line(text: String) -> Bytes {
    let mut bytes = text.into_bytes();
    bytes.push(b'\n');
    bytes.into()
}

pub fn result_line(id: &Id, result: &str) -> Bytes {
    line(format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#))
}

/// `id` is JSON: an id as text, or `null`.
pub fn error_line(id: &str, code: i32, message: &str, data: Option<&str>) -> Bytes {
    let message = quote(message);
    line(match data {
        Some(data) => {
            format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":{code},"message":{message},"data":{data}}}}}"#)
        }
        None => format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":{code},"message":{message}}}}}"#),
    })
}

/// The id in the start of a line too long to be kept whole, if it shows there.
pub fn id_at_start(start: &[u8]) -> Option<Id> {
    // The depth of braces tells the request's own `id` from one inside its payload.
    let (mut depth, mut at) = (0usize, 0);
    let mut key: Option<&[u8]> = None;
    while at < start.len() {
        match start[at] {
            b'"' => {
                let mut end = at + 1;
                while end < start.len() && start[end] != b'"' {
                    end += if start[end] == b'\\' { 2 } else { 1 };
                }
                if end >= start.len() {
                    return None;
                }
                let string = &start[at..=end];
                if depth == 1 && key == Some(b"\"id\"") {
                    return Id::parse(std::str::from_utf8(string).ok()?);
                }
                key = (depth == 1).then_some(string);
                at = end;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            b',' if depth == 1 => key = None,
            b'-' | b'0'..=b'9' if depth == 1 && key == Some(b"\"id\"") => {
                let end = start[at..].iter().position(|byte| matches!(byte, b',' | b'}' | b' '))? + at;
                return Id::parse(std::str::from_utf8(&start[at..end]).ok()?);
            }
            _ => {}
        }
        at += 1;
    }
    None
}

// ---- one pass over the line -------------------------------------------------------------------

struct Envelope;

#[derive(Clone, Copy)]
enum Member {
    Id,
    Method,
    Params,
    Result,
    Error,
    Other,
}

struct MemberName;

impl<'de> DeserializeSeed<'de> for MemberName {
    type Value = Member;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Member, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for MemberName {
    type Value = Member;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }
    fn visit_str<E>(self, name: &str) -> Result<Member, E> {
        Ok(match name {
            "id" => Member::Id,
            "method" => Member::Method,
            "params" => Member::Params,
            "result" => Member::Result,
            "error" => Member::Error,
            _ => Member::Other,
        })
    }
}

impl<'de> DeserializeSeed<'de> for Envelope {
    type Value = Message<'de>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Message<'de>, D::Error> {
        deserializer.deserialize_any(self)
    }
}

macro_rules! scalars {
    ($value:ty, $is:expr) => {
        fn visit_bool<E>(self, _: bool) -> Result<$value, E> {
            Ok($is)
        }
        fn visit_i64<E>(self, _: i64) -> Result<$value, E> {
            Ok($is)
        }
        fn visit_u64<E>(self, _: u64) -> Result<$value, E> {
            Ok($is)
        }
        fn visit_f64<E>(self, _: f64) -> Result<$value, E> {
            Ok($is)
        }
        fn visit_str<E>(self, _: &str) -> Result<$value, E> {
            Ok($is)
        }
        fn visit_unit<E>(self) -> Result<$value, E> {
            Ok($is)
        }
    };
}

impl<'de> Visitor<'de> for Envelope {
    type Value = Message<'de>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }
    scalars!(Message<'de>, Message::Other);

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Message<'de>, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = seq.next_element()? {
            members.push(member);
        }
        Ok(Message::Batch(members))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Message<'de>, A::Error> {
        let (mut id, mut method, mut result, mut error) = (None, None::<&RawValue>, None, None);
        let mut params = Params::default();
        while let Some(member) = map.next_key_seed(MemberName)? {
            match member {
                Member::Id => id = Some(map.next_value()?),
                Member::Method => method = Some(map.next_value()?),
                Member::Params => params = map.next_value_seed(PickParams)?,
                Member::Result => result = Some(map.next_value()?),
                Member::Error => error = Some(map.next_value()?),
                Member::Other => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        let method = method.and_then(|raw| {
            let json = raw.get();
            let inner = json.strip_prefix('"')?.strip_suffix('"')?;
            if inner.contains('\\') { text(raw).map(Cow::Owned) } else { Some(Cow::Borrowed(inner)) }
        });
        Ok(match (method, id) {
            (Some(method), Some(id)) => Message::Request { id: RawId(Some(id)), method, params },
            (Some(method), None) => Message::Notification { method, params },
            (None, id) if result.is_some() || error.is_some() => Message::Response { id: RawId(id), result, error },
            (None, _) => Message::Other,
        })
    }
}

struct PickParams;

impl<'de> DeserializeSeed<'de> for PickParams {
    type Value = Params<'de>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Params<'de>, D::Error> {
        let fields = Pick(PARAMS).deserialize(deserializer)?;
        Ok(Params { is_object: fields.is_some(), fields: fields.unwrap_or_default() })
    }
}

/// Takes the named members out of an object; anything that is no object is passed over.
struct Pick<'n, const N: usize>([&'n str; N]);

impl<'de, const N: usize> DeserializeSeed<'de> for Pick<'_, N> {
    type Value = Option<[Option<&'de RawValue>; N]>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, const N: usize> Visitor<'de> for Pick<'_, N> {
    type Value = Option<[Option<&'de RawValue>; N]>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }
    scalars!(Self::Value, None);

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = [None; N];
        while let Some(index) = map.next_key_seed(Name(&self.0))? {
            match index {
                Some(index) => found[index] = Some(map.next_value()?),
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(Some(found))
    }
}

struct Name<'n>(&'n [&'n str]);

impl<'de> DeserializeSeed<'de> for Name<'_> {
    type Value = Option<usize>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Option<usize>, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Name<'_> {
    type Value = Option<usize>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }
    fn visit_str<E>(self, name: &str) -> Result<Option<usize>, E> {
        Ok(self.0.iter().position(|wanted| *wanted == name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(line: &str) -> String {
        match parse(line.as_bytes()) {
            Ok(Message::Request { id, method, .. }) => format!("request {:?} {method}", id.parse()),
            Ok(Message::Notification { method, .. }) => format!("notification {method}"),
            Ok(Message::Response { id, result, error }) => {
                format!("response {:?} {}{}", id.parse(), u8::from(result.is_some()), u8::from(error.is_some()))
            }
            Ok(Message::Batch(members)) => format!("batch of {}", members.len()),
            Ok(Message::Other) => "other".into(),
            Err(_) => "not json".into(),
        }
    }

    #[test]
    fn every_line_has_one_kind() {
        let table = [
            (r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#, "request Some(Integer(1)) ping"),
            (r#"{"id":"a\u0062","method":"x\/y","params":[1]}"#, r#"request Some(Text("ab")) x/y"#),
            (r#"{"id":-7,"method":"m","params":null}"#, "request Some(Integer(-7)) m"),
            (r#"{"id":null,"method":"m"}"#, "request None m"),
            (r#"{"id":1.5,"method":"m"}"#, "request None m"),
            (r#"{"method":"n","params":{"a":{"id":9}}}"#, "notification n"),
            (r#"{"id":1,"result":null}"#, "response Some(Integer(1)) 10"),
            (r#"{"error":{}}"#, "response None 01"),
            (r#"[{"id":1,"method":"m"},2]"#, "batch of 2"),
            ("[]", "batch of 0"),
            ("{}", "other"),
            ("17", "other"),
            (r#""text""#, "other"),
            (r#"{"id":1,"method":5}"#, "other"),
            ("", "not json"),
            ("Listening on port 3000", "not json"),
            (r#"{"id":1,"method":"m"} x"#, "not json"),
            (r#"{"id":1,"method":"m","params":{bad}}"#, "not json"),
            (r#"{"id":1,"method":"m""#, "not json"),
        ];
        for (line, expected) in table {
            assert_eq!(kind(line), expected, "{line}");
        }
        assert!(parse(b"{\"id\":1,\"method\":\"\xff\"}").is_err(), "JSON is UTF-8");
    }

    #[test]
    fn ids_compare_by_type_and_value() {
        let same = [("1", "1"), (r#""é""#, r#""\u00e9""#), ("0", "-0")];
        for (left, right) in same {
            assert_eq!(Id::parse(left), Id::parse(right));
        }
        assert_ne!(Id::parse("1"), Id::parse(r#""1""#));
        let huge = "123456789012345678901234567890123456789012345678901234567890";
        assert_eq!(Id::parse(huge).unwrap().to_string(), huge);
        assert_eq!(Id::parse(r#""a\"b""#).unwrap().to_string(), r#""a\"b""#);
    }

    #[test]
    fn edits_leave_the_rest_alone() {
        let line = br#"{ "a" : {"x":1.0} , "b":[ ], "c":[7] }"#;
        let text = std::str::from_utf8(line).unwrap();
        let raw: &RawValue = serde_json::from_str(text).unwrap();
        let [a, b, c] = pick(raw, ["a", "b", "c"]).unwrap().map(Option::unwrap);
        let edits = vec![
            Edit::append(line, c, "8"),
            Edit::append(line, b, "9"),
            Edit::set(line, a, "x", "true").unwrap(),
            Edit::set(line, raw, "d", "null").unwrap(),
        ];
        assert_eq!(splice(line, edits), r#"{ "a" : {"x":true} , "b":[ 9], "c":[7,8] ,"d":null}"#);
    }

    #[test]
    fn the_id_of_a_cut_line_is_found_where_it_shows() {
        let table = [
            (r#"{"jsonrpc":"2.0","id":5,"method":"x","params":{"a":"#, Some(Id::Integer(5))),
            (r#"{"method":"x","params":{"id":3},"id":"q","z":"#, Some(Id::text("q"))),
            (r#"{"method":"x","params":{"id":3,"#, None),
            (r#"{"id":12"#, None),
        ];
        for (start, id) in table {
            assert_eq!(id_at_start(start.as_bytes()), id, "{start}");
        }
    }
}
