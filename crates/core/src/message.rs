//! The JSON-RPC envelope. One pass finds the members that a relay uses; payloads are forwarded unread.

use std::{borrow::Cow, collections::HashMap, fmt, ops::Range};

use bytes::{BufMut, Bytes, BytesMut};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

pub use crate::json::Raw;
use crate::{
    json::{DEPTH_MAX, Scan},
    mcp::{meta, notification},
};

/// U+FEFF in UTF-8, which some runtimes write before their first line.
pub const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// A parsed line. Everything borrows from the line.
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
        result: Option<Raw<'a>>,
        error: Option<Raw<'a>>,
    },
    /// The first [`MEMBERS_MAX`] elements of an array.
    Batch(Vec<Raw<'a>>),
    /// Valid JSON that is not a message of JSON-RPC.
    Other,
}

/// An id as it is written in the line. `null`, an absent id and a fraction can be forwarded but not tracked.
#[derive(Debug, Clone, Copy, Default)]
pub struct RawId<'a>(Option<Raw<'a>>);

impl<'a> RawId<'a> {
    pub fn parse(&self) -> Option<Id> {
        Id::parse(self.0?.get())
    }

    /// The byte range of the id in `line`.
    pub fn place(&self, line: &[u8]) -> Option<Range<usize>> {
        self.0.map(|raw| place(line, raw))
    }
}

/// The members of `params` that some row of the relay's tables needs; the others are not read.
#[derive(Debug)]
pub struct Params<'a> {
    text: &'a str,
    places: Places,
}

/// Start and end of a part in a line, which is far shorter than 4 GiB. A start of 0 means that the part is absent.
type Place = (u32, u32);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Places {
    known: [Place; PARAMS],
    /// The whole of `params`, if it is an object.
    whole: Place,
    /// See [`Params::may_be_ambiguous`].
    is_odd: bool,
    /// See [`Params::has_version`].
    has_version: bool,
}

const PARAMS: usize = 18;

macro_rules! params {
    ($($function:ident = $index:literal $name:literal,)*) => {
        impl<'a> Params<'a> {
            $(pub fn $function(&self) -> Option<Raw<'a>> { self.at($index) })*

            fn index(name: &str) -> Option<usize> {
                match name {
                    $($name => Some($index),)*
                    _ => None,
                }
            }
        }

        /// Every member of `params` that decides where a request goes or what it may do.
        const PARAM_NAMES: [&str; PARAMS] = [$($name),*];
    };
}
params! {
    name = 0 "name",
    meta = 1 "_meta",
    cursor = 2 "cursor",
    uri = 3 "uri",
    request_id = 4 "requestId",
    progress_token = 5 "progressToken",
    progress = 6 "progress",
    task = 7 "task",
    request_state = 8 "requestState",
    input_responses = 9 "inputResponses",
    notifications = 10 "notifications",
    protocol_version = 11 "protocolVersion",
    arguments = 12 "arguments",
    reference = 13 "ref",
    task_id = 14 "taskId",
    level = 15 "level",
    capabilities = 16 "capabilities",
    client_info = 17 "clientInfo",
}

/// The id of a request, by type and value: strings are unescaped, integers exact.
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

    /// How many bytes are compared with another id.
    pub fn size(&self) -> usize {
        match self {
            Id::Integer(_) => size_of::<i128>(),
            Id::Big(text) | Id::Text(text) => text.len(),
        }
    }
}

/// In saved states: its JSON, as text.
impl Serialize for Id {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Id, D::Error> {
        let json = String::deserialize(deserializer)?;
        Id::parse(&json).ok_or_else(|| de::Error::custom("this is not the id of a request"))
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

/// Reads the envelope of a line, or returns why the line is refused.
pub fn parse(line: &[u8]) -> Result<Message<'_>, Unreadable> {
    let not_json = |why: String| Unreadable { why, id: None, is_request: false, is_too_deep: false };
    let text = str_of(line).map_err(|error| not_json(error.to_string()))?;
    let Some((message, is_too_deep)) = envelope(text, Scan::new(text)) else {
        // serde_json reports the position of the error, for the person who has to correct it.
        let error = serde_json::from_str::<serde::de::IgnoredAny>(text).err();
        return Err(not_json(error.map_or_else(|| "not JSON".into(), |error| error.to_string())));
    };
    if !is_too_deep {
        return Ok(message);
    }
    let (id, is_request) = match message {
        Message::Request { id, .. } => (id.parse(), true),
        Message::Response { id, .. } => (id.parse(), false),
        _ => (None, false),
    };
    let why = format!("nested deeper than {DEPTH_MAX} levels");
    Err(Unreadable { why, id, is_request, is_too_deep: true })
}

/// The same for a line that was parsed before, or made of parts of such lines: only the ends of its parts are looked for.
pub fn parse_again(line: &[u8]) -> Result<Message<'_>, Unreadable> {
    let found = str_of(line).ok().and_then(|text| envelope(text, Scan::checked(text)));
    let why = || Unreadable { why: "not JSON".into(), id: None, is_request: false, is_too_deep: false };
    found.map(|(message, _)| message).ok_or_else(why)
}

/// A line that is not JSON, or JSON that is nested too deeply to be forwarded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable {
    pub why: String,
    is_too_deep: bool,
    is_request: bool,
    id: Option<Id>,
}

impl Unreadable {
    /// The error response for the sender of this line: under the id of its request if the line is JSON and has one.
    pub fn refusal(&self) -> Bytes {
        let id = self.id.as_ref().filter(|_| self.is_request).map_or_else(|| "null".into(), Id::to_string);
        let (code, problem) =
            if self.is_too_deep { (-32600, "this message is") } else { (-32700, "this line is not JSON:") };
        error_line(&id, code, &format!("{problem} {}; it was not forwarded", self.why), None)
    }

    /// The error response that replaces a response which is not forwarded; `None` if the line is not a response.
    pub fn instead_of_response(&self) -> Option<Bytes> {
        let id = self.id.as_ref().filter(|_| !self.is_request)?;
        Some(error_line(&id.to_string(), -32603, &format!("the answer is {}; it was not forwarded", self.why), None))
    }
}

/// How many MCP revisions of a server are read; the others are ignored.
pub const VERSIONS_MAX: usize = 64;

/// How many elements of an array are read; the others are checked and left out.
pub const MEMBERS_MAX: usize = 4096;

/// One pass over the line, and whether it is nested too deeply.
fn envelope<'a>(text: &'a str, mut scan: Scan<'a>) -> Option<(Message<'a>, bool)> {
    let message = match scan.next_byte()? {
        b'{' => {
            let (mut id, mut method, mut result, mut error) = (None, None::<Raw<'_>>, None, None);
            let mut params = Params::none(text);
            let (mut versions, mut all_params, mut is_odd) = (0, 0, false);
            scan.object(|scan, name| {
                match Envelope::of(name) {
                    Envelope::Id => is_odd |= id.replace(scan.value()?).is_some(),
                    Envelope::Method => is_odd |= method.replace(scan.value()?).is_some(),
                    Envelope::Params => {
                        all_params += 1;
                        params.scan(scan)?;
                    }
                    Envelope::Result => result = Some(scan.value()?),
                    Envelope::Error => error = Some(scan.value()?),
                    Envelope::Version => {
                        versions += 1;
                        scan.value()?;
                    }
                    Envelope::Other => {
                        is_odd |= is_like(name, &ENVELOPE);
                        scan.value()?;
                    }
                }
                Some(())
            })?;
            params.places.is_odd |= is_odd || versions > 1 || all_params > 1;
            params.places.has_version = versions > 0;
            let method = method.filter(|raw| raw.get().starts_with('"')).map(unescaped);
            match (method, id) {
                (Some(method), Some(id)) => Message::Request { id: RawId(Some(id)), method, params },
                (Some(method), None) => Message::Notification { method, params },
                (None, id) if result.is_some() || error.is_some() => Message::Response { id: RawId(id), result, error },
                (None, _) => Message::Other,
            }
        }
        b'[' => {
            let mut members = Vec::new();
            scan.array(|member| {
                if members.len() < MEMBERS_MAX {
                    members.push(member);
                }
            })?;
            Message::Batch(members)
        }
        _ => {
            scan.value()?;
            Message::Other
        }
    };
    let is_too_deep = scan.is_too_deep();
    scan.is_over().then_some((message, is_too_deep))
}

/// Whether a line is an object with the member `jsonrpc`, as every message of JSON-RPC 2.0 is.
pub fn has_version(line: &[u8]) -> bool {
    let mut found = false;
    let Ok(text) = str_of(line) else { return false };
    let mut scan = Scan::new(text);
    let walked = scan.object(|scan, name| {
        found |= matches!(Envelope::of(name), Envelope::Version);
        scan.value().map(drop)
    });
    walked.is_some() && found
}

/// Whether a line is a message of JSON-RPC: a request, a notification or a response, with its version.
pub fn is_json_rpc(line: &[u8]) -> bool {
    let is_message =
        matches!(parse(line), Ok(Message::Request { .. } | Message::Notification { .. } | Message::Response { .. }));
    is_message && has_version(line)
}

/// A member that decides what a request does and that another parser may read differently: the name occurs twice, or
/// with other capitals, which some parsers treat as the same name. The line was parsed before.
pub fn ambiguous(line: &[u8]) -> Option<String> {
    let (mut outer, mut inner) = ([false; 4], [false; PARAMS]);
    let mut found = None;
    // The scan ends at the first one.
    let _ = Scan::checked(str_of(line).ok()?).object(|scan, name| {
        found = told_apart(name, &ENVELOPE, &mut outer);
        if found.is_some() {
            return None;
        }
        if unescaped(name) == "params" && scan.next_byte() == Some(b'{') {
            return scan.object(|scan, name| {
                let is_odd = told_apart(name, &PARAM_NAMES, &mut inner);
                let value = scan.value()?;
                found = is_odd.or_else(|| ambiguous_within(&unescaped(name), value));
                found.is_none().then_some(())
            });
        }
        scan.value().map(drop)
    });
    found
}

/// The same for the members of `params` that requests are routed by.
fn ambiguous_within(name: &str, value: Raw<'_>) -> Option<String> {
    let known: &[&str] = match name {
        "ref" => &REFERENCE,
        "_meta" => &META,
        _ => return None,
    };
    let (mut seen, mut found) = ([false; META.len()], None);
    let _ = value.for_each_member(|name, _| found = found.take().or_else(|| told_apart(name, known, &mut seen)));
    found
}

/// Whether a member of `ref` or `_meta` may be ambiguous.
fn is_odd_within(value: Raw<'_>, known: &[&str]) -> bool {
    let (mut seen, mut is_odd) = (0_u32, false);
    let _ = value.for_each_member(|name, _| {
        let at = name.plain().and_then(|plain| known.iter().position(|known| *known == plain));
        match at {
            Some(at) => {
                is_odd |= seen & 1 << at != 0;
                seen |= 1 << at;
            }
            None => is_odd |= is_like(name, known),
        }
    });
    is_odd
}

const ENVELOPE: [&str; 4] = ["jsonrpc", "id", "method", "params"];
/// Of `params.ref`.
const REFERENCE: [&str; 3] = ["type", "name", "uri"];
/// Of `params._meta`.
const META: [&str; 6] = [
    meta::PROGRESS_TOKEN,
    meta::PROTOCOL_VERSION,
    meta::CLIENT_CAPABILITIES,
    meta::CLIENT_INFO,
    meta::LOG_LEVEL,
    meta::RELATED_TASK,
];

/// Whether an unknown name may be read as a known name. A name with other characters than ASCII, or with an escape,
/// always counts: it is compared exactly later.
fn is_like(name: Raw<'_>, known: &[&str]) -> bool {
    let name = name.get();
    let inner = &name[1..name.len() - 1];
    known.iter().any(|known| known.eq_ignore_ascii_case(inner)) || !inner.is_ascii() || inner.contains('\\')
}

fn told_apart(name: Raw<'_>, known: &[&str], seen: &mut [bool]) -> Option<String> {
    let name = unescaped(name);
    let index = known.iter().position(|known| folded(&name).eq(folded(known)))?;
    let is_other = std::mem::replace(&mut seen[index], true) || name != known[index];
    is_other.then(|| name.into_owned())
}

/// The name with case folded. Some parsers fold beyond ASCII, too: the long s, the Kelvin sign.
fn folded(name: &str) -> impl Iterator<Item = char> + '_ {
    name.chars().flat_map(char::to_uppercase).flat_map(char::to_lowercase)
}

/// A name that occurs twice in an object within a value. Names that differ only by case count too, where `is_read` is
/// true for one of them; at the top level they always count.
pub fn doubled(value: Raw<'_>, is_read: impl Fn(&str) -> bool) -> Option<String> {
    let text = value.get();
    let bytes = text.as_bytes();
    // The names of each open object; an array has none.
    let mut open: Vec<Vec<Cow<'_, str>>> = Vec::new();
    let mut at = 0;
    while let Some(step) = memchr::memchr3(b'"', b'{', b'}', &bytes[at..]) {
        at += step;
        match bytes[at] {
            b'{' => open.push(Vec::new()),
            b'}' => {
                let is_top = open.len() == 1;
                if let Some(found) = open.pop().and_then(|names| doubled_name(names, |name| is_top || is_read(name))) {
                    return Some(found);
                }
            }
            _ => {
                let end = end_of_text(bytes, at)?;
                // In JSON a colon follows only names.
                if bytes[end..].trim_ascii_start().first() == Some(&b':')
                    && let Some(names) = open.last_mut()
                {
                    names.push(unescaped(Raw::checked(&text[at..end])));
                }
                at = end;
                continue;
            }
        }
        at += 1;
    }
    None
}

/// The position after the quotation mark that ends the string at `start`.
fn end_of_text(bytes: &[u8], start: usize) -> Option<usize> {
    let mut at = start + 1;
    loop {
        at += memchr::memchr2(b'"', b'\\', bytes.get(at..)?)?;
        match bytes[at] {
            b'"' => return Some(at + 1),
            _ => at += 2,
        }
    }
}

fn doubled_name(names: Vec<Cow<'_, str>>, is_read: impl Fn(&str) -> bool) -> Option<String> {
    if names.len() < 2 {
        return None;
    }
    // With a keyed hash: clients choose the names, and could choose many with the same unkeyed hash.
    let mut seen: HashMap<String, Cow<'_, str>> = HashMap::new();
    for name in names {
        let key = if name.is_ascii() { name.to_ascii_lowercase() } else { folded(&name).collect() };
        if let Some(other) = seen.get(&key)
            && (*other == name || is_read(&name) || is_read(other))
        {
            return Some(name.into_owned());
        }
        seen.insert(key, name);
    }
    None
}

/// A member of the envelope.
enum Envelope {
    Id,
    Method,
    Params,
    Result,
    Error,
    Version,
    Other,
}

impl Envelope {
    fn of(name: Raw<'_>) -> Envelope {
        match name.get() {
            r#""id""# => Envelope::Id,
            r#""method""# => Envelope::Method,
            r#""params""# => Envelope::Params,
            r#""result""# => Envelope::Result,
            r#""error""# => Envelope::Error,
            r#""jsonrpc""# => Envelope::Version,
            // A name with an escape is unusual, and still the same name.
            other if other.contains('\\') => match name.text().as_deref() {
                Some("id") => Envelope::Id,
                Some("method") => Envelope::Method,
                Some("params") => Envelope::Params,
                Some("result") => Envelope::Result,
                Some("error") => Envelope::Error,
                _ => Envelope::Other,
            },
            _ => Envelope::Other,
        }
    }
}

/// The content of a string; it is copied only if it has an escape.
fn unescaped(raw: Raw<'_>) -> Cow<'_, str> {
    match raw.plain() {
        Some(plain) => Cow::Borrowed(plain),
        None => Cow::Owned(raw.text().unwrap_or_default()),
    }
}

impl<'a> Params<'a> {
    fn none(text: &'a str) -> Params<'a> {
        Params { text, places: Places { known: [(0, 0); PARAMS], whole: (0, 0), is_odd: false, has_version: false } }
    }

    /// True if the message of these params has the member `jsonrpc`.
    pub fn has_version(&self) -> bool {
        self.places.has_version
    }

    /// The whole of `params`, if it is an object.
    pub fn whole(&self) -> Option<Raw<'a>> {
        between(self.text, self.places.whole)
    }

    /// False if no member of the whole request occurs twice or with other capitals; [`ambiguous`] then finds nothing.
    pub fn may_be_ambiguous(&self) -> bool {
        self.places.is_odd
            || self.meta().is_some_and(|meta| is_odd_within(meta, &META))
            || self.reference().is_some_and(|reference| is_odd_within(reference, &REFERENCE))
    }

    fn at(&self, index: usize) -> Option<Raw<'a>> {
        between(self.text, self.places.known[index])
    }

    fn scan(&mut self, scan: &mut Scan<'a>) -> Option<()> {
        *self = Params::none(self.text);
        if scan.next_byte()? != b'{' {
            return scan.value().map(drop);
        }
        let start = scan.position();
        scan.object(|scan, name| {
            let value = scan.value()?;
            match Params::index(&unescaped(name)) {
                Some(index) => {
                    let end = scan.position();
                    let place = ((end - value.get().len()) as u32, end as u32);
                    self.places.is_odd |= std::mem::replace(&mut self.places.known[index], place) != (0, 0);
                }
                None => self.places.is_odd |= is_like(name, &PARAM_NAMES),
            }
            Some(())
        })?;
        self.places.whole = (start as u32, scan.position() as u32);
        Some(())
    }
}

fn between(text: &str, place: Place) -> Option<Raw<'_>> {
    match place {
        (0, _) => None,
        (start, end) => Some(Raw::checked(&text[start as usize..end as usize])),
    }
}

/// The line as text. The check of the standard library takes tens of milliseconds for a long line that is not ASCII.
fn str_of(line: &[u8]) -> Result<&str, simdutf8::compat::Utf8Error> {
    simdutf8::compat::from_utf8(line)
}

/// The positions of the parts of a request, so that its bytes need not be parsed again.
#[derive(Debug, Clone)]
pub struct Outline {
    id: Place,
    method: Method,
    params: Places,
}

#[derive(Debug, Clone)]
enum Method {
    At(Place),
    /// It has an escape.
    Is(Box<str>),
}

impl Outline {
    /// The outline of a parsed request.
    pub fn of(line: &[u8], request: &Message<'_>) -> Option<Outline> {
        let Message::Request { id, method, params } = request else { return None };
        let place = |range: Range<usize>| (range.start as u32, range.end as u32);
        let method = match method {
            Cow::Borrowed(method) => Method::At(place(place_of(line, method))),
            Cow::Owned(method) => Method::Is(method.as_str().into()),
        };
        Some(Outline { id: place(id.place(line)?), method, params: params.places.clone() })
    }

    /// The request again, from the same line.
    pub fn read<'a>(&self, line: &'a [u8]) -> Option<Message<'a>> {
        let text = str_of(line).ok()?;
        let params = Params { text, places: self.params.clone() };
        let method = match &self.method {
            Method::At(place) => Cow::Borrowed(between(text, *place)?.get()),
            Method::Is(method) => Cow::Owned(method.to_string()),
        };
        Some(Message::Request { id: RawId(between(text, self.id)), method, params })
    }
}

/// A longer message is parsed on another thread, because that takes longer than a turn of an event loop may take.
pub const PARSED_AT_ONCE_MAX: usize = 4 << 20;

/// The result of parsing a message, without the message.
#[derive(Debug, PartialEq, Eq)]
pub struct Walk(Result<Walked, Unreadable>);

#[derive(Debug, PartialEq, Eq)]
enum Walked {
    Request { id: Place, method: Box<str>, params: Places },
    Notification { method: Box<str>, params: Places },
    Response { id: Place, result: Place, error: Place },
    Batch(Vec<Place>),
    Other,
}

impl Walk {
    /// Parses a line.
    pub fn of(line: &[u8]) -> Walk {
        let of = |raw: Raw<'_>| {
            let range = place(line, raw);
            (range.start as u32, range.end as u32)
        };
        let maybe = |raw: Option<Raw<'_>>| raw.map_or((0, 0), of);
        Walk(parse(line).map(|message| match message {
            Message::Request { id, method, params } => {
                Walked::Request { id: maybe(id.0), method: (*method).into(), params: params.places }
            }
            Message::Notification { method, params } => {
                Walked::Notification { method: (*method).into(), params: params.places }
            }
            Message::Response { id, result, error } => {
                Walked::Response { id: maybe(id.0), result: maybe(result), error: maybe(error) }
            }
            Message::Batch(members) => Walked::Batch(members.into_iter().map(of).collect()),
            Message::Other => Walked::Other,
        }))
    }

    /// The message, from the same line.
    pub fn read<'a>(&self, line: &'a [u8]) -> Result<Message<'a>, Unreadable> {
        let walked = self.0.as_ref().map_err(Clone::clone)?;
        let text = str_of(line).expect("it was parsed");
        Ok(match walked {
            Walked::Request { id, method, params } => Message::Request {
                id: RawId(between(text, *id)),
                method: Cow::Owned(method.to_string()),
                params: Params { text, places: params.clone() },
            },
            Walked::Notification { method, params } => Message::Notification {
                method: Cow::Owned(method.to_string()),
                params: Params { text, places: params.clone() },
            },
            Walked::Response { id, result, error } => Message::Response {
                id: RawId(between(text, *id)),
                result: between(text, *result),
                error: between(text, *error),
            },
            Walked::Batch(members) => {
                Message::Batch(members.iter().filter_map(|member| between(text, *member)).collect())
            }
            Walked::Other => Message::Other,
        })
    }
}

/// The named members of an object; the last one if a name occurs twice. `None` if the value is not an object.
pub fn pick<'a, const N: usize>(raw: Raw<'a>, names: [&str; N]) -> Option<[Option<Raw<'a>>; N]> {
    let mut found = [None; N];
    raw.for_each_member(|name, value| {
        let name = unescaped(name);
        if let Some(index) = names.iter().position(|wanted| *wanted == name) {
            found[index] = Some(value);
        }
    })?;
    Some(found)
}

/// One member, as a string.
pub fn pick_text(raw: Raw<'_>, name: &str) -> Option<String> {
    pick(raw, [name])?[0]?.text()
}

/// A JSON string's content.
pub fn text(raw: Raw<'_>) -> Option<String> {
    raw.text()
}

/// The byte range of a part in the line it was parsed from.
pub fn place(line: &[u8], part: Raw<'_>) -> Range<usize> {
    place_of(line, part.get())
}

fn place_of(line: &[u8], part: &str) -> Range<usize> {
    let start = part.as_ptr() as usize - line.as_ptr() as usize;
    debug_assert!(start + part.len() <= line.len(), "a part of another line");
    start..start + part.len()
}

/// A replacement of some bytes of a line.
#[derive(Debug)]
pub struct Edit {
    pub at: Range<usize>,
    pub with: String,
}

impl Edit {
    pub fn replace(line: &[u8], part: Raw<'_>, with: impl Into<String>) -> Edit {
        Edit { at: place(line, part), with: with.into() }
    }

    /// Adds to an object or array, after its last element.
    pub fn append(line: &[u8], container: Raw<'_>, with: &str) -> Edit {
        let at = place(line, container).end - 1;
        let inner = &container.get()[1..container.get().len() - 1];
        let empty = inner.bytes().all(|byte| byte.is_ascii_whitespace());
        Edit { at: at..at, with: if empty { with.to_owned() } else { format!(",{with}") } }
    }

    /// Sets one member of an object, present or not.
    pub fn set(line: &[u8], object: Raw<'_>, name: &str, value: &str) -> Option<Edit> {
        match pick(object, [name])? {
            [Some(old)] => Some(Edit::replace(line, old, value)),
            [None] => Some(Edit::append(line, object, &format!("{}:{value}", quote(name)))),
        }
    }
}

/// The line with some bytes replaced and all others unchanged. Edits must not overlap.
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

/// The same for a few edits with borrowed text. The result is always one line: white space around the message is
/// removed, a line feed is added, and a line break within it, which can only be between two tokens, becomes a space.
pub fn patch(message: &[u8], edits: &mut [(Range<usize>, &str)]) -> Bytes {
    edits.sort_unstable_by_key(|(at, _)| (at.start, at.end));
    let end = message.trim_ascii_end().len();
    let mut from = message.len() - message.trim_ascii_start().len();
    // The exact length, so that the bytes can be shared without spare capacity.
    let (gone, come) = edits.iter().fold((0, 0), |(gone, come), (at, with)| (gone + at.len(), come + with.len()));
    let mut out = Vec::with_capacity(end - from - gone + come + 1);
    for (at, with) in edits {
        out.extend_from_slice(&message[from..at.start]);
        out.extend_from_slice(with.as_bytes());
        from = at.end;
    }
    out.extend_from_slice(&message[from..end]);
    let mut at = 0;
    while let Some(found) = memchr::memchr2(b'\n', b'\r', &out[at..]) {
        at += found;
        out[at] = b' ';
    }
    out.push(b'\n');
    out.into()
}

/// The edits of one message, at most four.
#[derive(Debug, Default)]
pub struct Edits<'a> {
    list: [(Range<usize>, &'a str); 4],
    count: usize,
}

impl<'a> Edits<'a> {
    pub fn push(&mut self, at: Range<usize>, with: &'a str) {
        self.list[self.count] = (at, with);
        self.count += 1;
    }

    /// See [`patch`].
    pub fn apply(mut self, message: &[u8]) -> Bytes {
        patch(message, &mut self.list[..self.count])
    }
}

/// A whole line from its text.
pub fn line(text: String) -> Bytes {
    let mut bytes = text.into_bytes();
    bytes.push(b'\n');
    bytes.into()
}

/// `id` is JSON: an id, or its text.
pub fn result_line(id: impl fmt::Display, result: &str) -> Bytes {
    line(format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#))
}

/// `params` is the inside of an object, which is left out if it is empty.
pub fn notification_line(method: &str, params: &str) -> Bytes {
    line(match params {
        "" => format!(r#"{{"jsonrpc":"2.0","method":"{method}"}}"#),
        _ => format!(r#"{{"jsonrpc":"2.0","method":"{method}","params":{{{params}}}}}"#),
    })
}

/// Cancels a request. The reason is JSON.
pub fn cancelled_line(id: impl fmt::Display, reason: Option<&str>) -> Bytes {
    let reason = reason.map_or_else(String::new, |reason| format!(r#","reason":{reason}"#));
    notification_line(notification::CANCELLED, &format!(r#""requestId":{id}{reason}"#))
}

/// `params` is the inside of an object.
pub fn request_line(id: impl fmt::Display, method: &str, params: &str) -> Bytes {
    line(format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{{{params}}}}}"#))
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

/// The id in the start of a line that is too long to be kept whole, if the start contains it.
pub fn id_at_start(start: &[u8]) -> Option<Id> {
    // The depth of braces distinguishes the `id` of the request from one inside its payload.
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
                    return checked_id(string);
                }
                key = (depth == 1).then_some(string);
                at = end;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            b',' if depth == 1 => key = None,
            b'-' | b'0'..=b'9' if depth == 1 && key == Some(b"\"id\"") => {
                let end = start[at..].iter().position(|byte| matches!(byte, b',' | b'}' | b' '))? + at;
                return checked_id(&start[at..end]);
            }
            _ => {}
        }
        at += 1;
    }
    None
}

/// An id from text that was not checked before: an answer must not contain what is not JSON.
fn checked_id(text: &[u8]) -> Option<Id> {
    Id::parse(Raw::parse(std::str::from_utf8(text).ok()?)?.get())
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
    fn a_patched_message_is_one_line_and_otherwise_unchanged() {
        let said = b" {\"id\":7,\n \"x\":[1.50,\t2]\r\n} \n";
        let at = |part: &[u8]| {
            let start = said.windows(part.len()).position(|window| window == part).expect("it is there");
            start..start + part.len()
        };
        let table = [
            (vec![], "{\"id\":7,  \"x\":[1.50,\t2]  }\n"),
            (vec![(at(b"7"), "\"q\"")], "{\"id\":\"q\",  \"x\":[1.50,\t2]  }\n"),
            (vec![(at(b"2]"), "3]"), (at(b"7"), "8")], "{\"id\":8,  \"x\":[1.50,\t3]  }\n"),
        ];
        for (mut edits, line) in table {
            assert_eq!(patch(said, &mut edits), line);
        }
    }

    #[test]
    fn an_outline_gives_the_same_request_again() {
        let table = [
            r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"a","arguments":{"x":[1]},"_meta":{}}}"#,
            r#" {"params" : {"uri":"ü","cursor":"c"}, "method":"resources/read","id":"\u0061"} "#,
            r#"{"id":1,"method":"m","params":[1]}"#,
            r#"{"id":null,"method":"m","ID":2}"#,
            r#"{"method":"m","id":-0}"#,
            r#"{"id":1,"method":"\u006d"}"#,
        ];
        for line in table {
            let first = parse(line.as_bytes()).unwrap();
            let again = Outline::of(line.as_bytes(), &first).expect("a request").read(line.as_bytes()).unwrap();
            assert_eq!(format!("{first:?}"), format!("{again:?}"), "{line}");
        }
        for line in [r#"{"method":"m"}"#, r#"{"id":1,"result":{}}"#, "[]", "1"] {
            assert!(Outline::of(line.as_bytes(), &parse(line.as_bytes()).unwrap()).is_none(), "{line}");
        }
    }

    #[test]
    fn a_walk_gives_the_same_message_again() {
        let deep = format!(r#"{{"id":7,"result":{}{}}}"#, "[".repeat(DEPTH_MAX + 2), "]".repeat(DEPTH_MAX + 2));
        let table = [
            r#"{"jsonrpc":"2.0","id":7,"method":"m","params":{"name":"a","arguments":{"x":[1]}}}"#,
            r#" {"params" : {"uri":"ü","progressToken":1}, "jsonrpc":"2.0", "method":"\u006e"} "#,
            r#"{"id":"a","result":{"tools":[]}}"#,
            r#"{"error":{"code":1}}"#,
            r#"[{"id":1,"result":{}}, 7]"#,
            "[]",
            "17",
            "{",
            &deep,
        ];
        for line in table {
            let walked = Walk::of(line.as_bytes()).read(line.as_bytes());
            assert_eq!(format!("{walked:?}"), format!("{:?}", parse(line.as_bytes())), "{line}");
        }
    }

    #[test]
    fn params_are_found_as_a_whole_if_they_are_an_object() {
        let table = [
            (r#"{"id":1,"method":"m","params": {"name":"x", "n":1} }"#, Some(r#"{"name":"x", "n":1}"#)),
            (r#"{"id":1,"method":"m","params":{}}"#, Some("{}")),
            (r#"{"id":1,"method":"m","params":[1]}"#, None),
            (r#"{"id":1,"method":"m"}"#, None),
        ];
        for (line, whole) in table {
            let Ok(Message::Request { params, .. }) = parse(line.as_bytes()) else { panic!("a request: {line}") };
            assert_eq!(params.whole().map(Raw::get), whole, "{line}");
        }
    }

    #[test]
    fn every_line_has_one_kind() {
        let table = [
            (r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#, "request Some(Integer(1)) ping"),
            (r#"{"id":"a\u0062","method":"x\/y","params":[1]}"#, r#"request Some(Text("ab")) x/y"#),
            (r#"{"\u0069d":3,"m\u0065thod":"m"}"#, "request Some(Integer(3)) m"),
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
    fn edits_change_nothing_else() {
        let line = br#"{ "a" : {"x":1.0} , "b":[ ], "c":[7] }"#;
        let text = std::str::from_utf8(line).unwrap();
        let raw = Raw::parse(text).unwrap();
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
    fn the_id_of_a_truncated_line_is_found_if_it_is_present() {
        let table = [
            (r#"{"jsonrpc":"2.0","id":5,"method":"x","params":{"a":"#, Some(Id::Integer(5))),
            (r#"{"method":"x","params":{"id":3},"id":"q","z":"#, Some(Id::text("q"))),
            (r#"{"method":"x","params":{"id":3,"#, None),
            (r#"{"id":12"#, None),
            // Not JSON, so that no answer can carry it.
            (r#"{"id":12:{}}"#, None),
            (r#"{"id":-,"method":"x""#, None),
            (r#"{"id":007,"method":"x""#, None),
        ];
        for (start, id) in table {
            assert_eq!(id_at_start(start.as_bytes()), id, "{start}");
        }
    }

    #[test]
    fn ambiguous_json_is_detected() {
        let table = [
            (r#"{"jsonrpc":"2.0","id":1,"method":"m","params":{"name":"a","arguments":{"name":1,"Name":2}}}"#, None),
            (r#"{"id":1,"method":"m","params":{"name":"a","names":1}}"#, None),
            (r#"{"id":1,"method":"m","params":[1]}"#, None),
            (r#"{"id":1,"method":"m","params":{"name":"a","name":"b"}}"#, Some("name")),
            (r#"{"id":1,"method":"m","params":{"name":"a","Name":"b"}}"#, Some("Name")),
            (r#"{"id":1,"method":"m","params":{"name":"a","n\u0061me":"b"}}"#, Some("name")),
            (r#"{"id":1,"method":"m","params":{"Arguments":{}}}"#, Some("Arguments")),
            (r#"{"id":1,"method":"m","params":{"taskId":"a","taskId":"b"}}"#, Some("taskId")),
            (r#"{"id":1,"method":"m","params":{"taskid":"a"}}"#, Some("taskid")),
            (r#"{"id":1,"method":"m","params":{"cursor":"a","CURSOR":"b"}}"#, Some("CURSOR")),
            (r#"{"id":1,"method":"m","params":{"uri":"a","Uri":"b"}}"#, Some("Uri")),
            (r#"{"id":1,"method":"m","params":{"requestState":"a","requeststate":"b"}}"#, Some("requeststate")),
            (r#"{"id":1,"method":"m","params":{"ref":{"name":"a","Name":"b"}}}"#, Some("Name")),
            (r#"{"id":1,"method":"m","params":{"ref":{"uri":"a","uri":"b"}}}"#, Some("uri")),
            (r#"{"id":1,"method":"m","params":{"ref":{"type":"ref/prompt","name":"a","other":1}}}"#, None),
            (
                r#"{"id":1,"method":"m","params":{"_meta":{"progressToken":1,"progressToken":2}}}"#,
                Some("progressToken"),
            ),
            (r#"{"id":1,"method":"m","params":{"_meta":{"progresstoken":1}}}"#, Some("progresstoken")),
            (r#"{"id":1,"method":"m","params":{"_meta":{"progressToken":1,"my/own":2,"My/own":3}}}"#, None),
            (r#"{"id":1,"method":"m","params":{"arguments":{"cursor":1,"Cursor":2}}}"#, None),
            ("{\"id\":1,\"method\":\"m\",\"params\":{\"argument\u{17f}\":{}}}", Some("argument\u{17f}")),
            (r#"{"id":1,"method":"m","params":{},"Params":{"name":"b"}}"#, Some("Params")),
            (r#"{"id":1,"method":"m","METHOD":"n"}"#, Some("METHOD")),
            (r#"{"id":1,"id":2,"method":"m"}"#, Some("id")),
            (r#"{"id":1,"\u0069d":2,"method":"m"}"#, Some("id")),
            (r#"{"id":1,"method":"m","jsonrpc":"2.0","json\u0072pc":"2.0"}"#, Some("jsonrpc")),
            (r#"{"id":1,"method":"m","params":[1],"params":{"uri":"x"}}"#, Some("params")),
            ("{\"id\":1,\"\u{212a}\":0,\"method\":\"m\",\"\u{212a}id\":1,\"JSONRPC\":1}", Some("JSONRPC")),
        ];
        for (line, expected) in table {
            assert_eq!(ambiguous(line.as_bytes()).as_deref(), expected, "{line}");
            let Ok(Message::Request { params, .. }) = parse(line.as_bytes()) else { panic!("no request: {line}") };
            assert_eq!(params.may_be_ambiguous(), expected.is_some(), "{line}");
        }
    }

    #[test]
    fn a_duplicate_name_is_found_at_any_depth() {
        let table = [
            (r#"{"a":1,"b":{"a":2},"c":[{"a":3},{"a":4}]}"#, None),
            (r#"{"a":1,"a":1}"#, Some("a")),
            (r#"{"a":1,"A":1}"#, Some("A")),
            (r#"{"a":1,"\u0061":1}"#, Some("a")),
            ("{\"k\":1,\"\u{212a}\":1}", Some("\u{212a}")),
            (r#"{"x":[[{"a":1,"a":2}]]}"#, Some("a")),
            // Within a value, names that `is_read` does not know may differ by case: they are data.
            (r#"{"x":{"path":1,"Path":2}}"#, Some("Path")),
            (r#"{"x":{"Path":1,"PATH":2}}"#, None),
            (r#"{"x":{"env":1,"ENV":2}}"#, None),
            (r#"{"a":"{\"a\":1,\"a\":2}","b":"\\"}"#, None),
            (r#"["a","a",{"a" : 1 , "a" : 2}]"#, Some("a")),
            ("17", None),
        ];
        for (text, expected) in table {
            let found = doubled(Raw::parse(text).unwrap(), |name| name == "path");
            assert_eq!(found.as_deref(), expected, "{text}");
        }
    }
}
