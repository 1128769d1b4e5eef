//! Whether arguments fit a tool's schema.
//!
//! The schemas come from backends, and nobody has checked them: no reference is followed out of them, no pattern of theirs may
//! try for long, and one that cannot be understood checks nothing. The backend itself has the last word anyway; this is to
//! spare it calls that cannot be meant, and to tell a model quickly what to mend.

use jsonschema::{
    PatternOptions, Validator,
    error::{ValidationError, ValidationErrorKind},
};
use outlast_core::{gateway, json::Raw};
use rustc_hash::FxHashMap;
use serde_json::{Map, Value};

/// Compiled schemas that are kept. At the bound all are forgotten, and compiled again as they are needed.
const KEPT_MAX: usize = 1_024;
/// The same, in bytes of schemas.
const KEPT_BYTES_MAX: usize = 8 << 20;
/// A larger schema checks nothing.
const SCHEMA_MAX: usize = 256 << 10;
/// Larger arguments are not checked: reading them twice would cost more than it spares.
const ARGUMENTS_MAX: usize = 1 << 20;
/// Steps that a pattern may take back. One that needs more is taken to fit.
const BACKTRACK_MAX: usize = 100_000;
/// The longest sentence.
const WORDS_MAX: usize = 400;

/// Compiled schemas, by their bytes.
#[derive(Default)]
pub struct Schemas {
    /// Nothing: it checks nothing.
    kept: FxHashMap<Box<[u8]>, Option<Schema>>,
    bytes: usize,
}

struct Schema {
    validator: Validator,
    /// If all that it asks for can be seen at a glance.
    plain: Option<Plain>,
}

impl Schemas {
    pub fn new() -> Schemas {
        Schemas::default()
    }

    fn compiled(&mut self, schema: &[u8]) -> Option<&Schema> {
        if schema.len() > SCHEMA_MAX {
            return None;
        }
        if !self.kept.contains_key(schema) {
            if self.kept.len() >= KEPT_MAX || self.bytes + schema.len() > KEPT_BYTES_MAX {
                self.kept.clear();
                self.bytes = 0;
            }
            self.bytes += schema.len();
            self.kept.insert(schema.into(), compile(schema));
        }
        self.kept.get(schema)?.as_ref()
    }
}

fn compile(schema: &[u8]) -> Option<Schema> {
    let schema: Value = serde_json::from_slice(schema).ok()?;
    let patterns = PatternOptions::fancy_regex().backtrack_limit(BACKTRACK_MAX);
    let validator = jsonschema::options().offline().with_pattern_options(patterns).build(&schema).ok()?;
    Some(Schema { validator, plain: Plain::of(&schema) })
}

impl gateway::Schemas for Schemas {
    fn check(&mut self, schema: &[u8], arguments: Raw<'_>) -> Result<(), String> {
        if arguments.get().len() > ARGUMENTS_MAX {
            return Ok(());
        }
        let Some(Schema { validator, plain }) = self.compiled(schema) else { return Ok(()) };
        if plain.as_ref().is_some_and(|plain| plain.fits(arguments)) {
            return Ok(());
        }
        let arguments: Value =
            serde_json::from_str(arguments.get()).map_err(|_| "the arguments are no JSON object".to_owned())?;
        let is_doubt =
            |error: &ValidationError<'_>| matches!(error.kind(), ValidationErrorKind::BacktrackLimitExceeded { .. });
        match validator.iter_errors(&arguments).find(|error| !is_doubt(error)) {
            Some(error) => Err(sentence(&error)),
            None => Ok(()),
        }
    }
}

/// A schema that asks for members by their types and for nothing more, as those of most tools do. What it finds to fit does;
/// of all else the validator is asked, which needs the arguments as values and takes several times as long.
struct Plain {
    /// At most 64.
    members: Vec<(Box<str>, Type)>,
    /// A bit for each member.
    required: u64,
    is_closed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Type {
    Any,
    String,
    Number,
    Integer,
    Boolean,
    Object,
    Array,
}

/// What a schema may say without asking for anything.
const REMARKS: [&str; 9] =
    ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"];

impl Plain {
    fn of(schema: &Value) -> Option<Plain> {
        let mut plain = Plain { members: Vec::new(), required: 0, is_closed: false };
        let schema = schema.as_object()?;
        for (name, member) in schema.get("properties").map_or(Some(&Map::new()), Value::as_object)? {
            plain.members.push((name.as_str().into(), Type::of(member)?));
        }
        for (name, value) in schema {
            match (name.as_str(), value) {
                ("type", Value::String(kind)) if kind == "object" => {}
                ("properties", _) => {}
                ("additionalProperties", Value::Bool(is_open)) => plain.is_closed = !is_open,
                ("required", Value::Array(names)) => {
                    for name in names {
                        plain.required |= 1 << plain.place(name.as_str()?)?;
                    }
                }
                (name, _) if REMARKS.contains(&name) => {}
                _ => return None,
            }
        }
        (schema.contains_key("type") && plain.members.len() <= 64).then_some(plain)
    }

    fn place(&self, name: &str) -> Option<usize> {
        self.members.iter().position(|(known, _)| **known == *name).filter(|place| *place < 64)
    }

    fn fits(&self, arguments: Raw<'_>) -> bool {
        let (mut seen, mut fits) = (0_u64, true);
        let is_object = arguments.for_each_member(|name, value| {
            // A name that stands twice, or is not written plainly, is for the validator to judge.
            fits &= match name.plain().map(|name| self.place(name)) {
                Some(Some(place)) => {
                    let is_first = seen & 1 << place == 0;
                    seen |= 1 << place;
                    is_first && self.members[place].1.is_of(value.get())
                }
                Some(None) => !self.is_closed,
                None => false,
            };
        });
        is_object.is_some() && fits && seen & self.required == self.required
    }
}

impl Type {
    fn of(member: &Value) -> Option<Type> {
        if member == &Value::Bool(true) {
            return Some(Type::Any);
        }
        let member = member.as_object()?;
        let is_bare = member.keys().all(|name| name == "type" || REMARKS[..8].contains(&name.as_str()));
        match member.get("type") {
            _ if !is_bare => None,
            None => Some(Type::Any),
            Some(kind) => match kind.as_str()? {
                "string" => Some(Type::String),
                "number" => Some(Type::Number),
                "integer" => Some(Type::Integer),
                "boolean" => Some(Type::Boolean),
                "object" => Some(Type::Object),
                "array" => Some(Type::Array),
                _ => None,
            },
        }
    }

    /// Of JSON that was checked.
    fn is_of(self, value: &str) -> bool {
        match (self, value.as_bytes()) {
            (Type::Any, _)
            | (Type::String, [b'"', ..])
            | (Type::Number, [b'-' | b'0'..=b'9', ..])
            | (Type::Boolean, [b't' | b'f', ..])
            | (Type::Object, [b'{', ..])
            | (Type::Array, [b'[', ..]) => true,
            // Whether 1.0 is one too is for the validator to say.
            (Type::Integer, [first, rest @ ..]) => {
                (first.is_ascii_digit() || *first == b'-') && rest.iter().all(u8::is_ascii_digit)
            }
            _ => false,
        }
    }
}

/// What is wrong and where, without the value: it may be long, and it may be secret.
fn sentence(error: &ValidationError<'_>) -> String {
    let place = place(error.instance_path().as_str());
    let words = error.masked().to_string();
    let mut words = match place.is_empty() {
        true => format!("the arguments do not fit: {words}"),
        false => format!("the argument `{place}` does not fit: {words}"),
    };
    if let Some((end, _)) = words.char_indices().nth(WORDS_MAX) {
        words.truncate(end);
        words.push('…');
    }
    words
}

/// `/items/0/name` as people write it: `items[0].name`.
fn place(pointer: &str) -> String {
    let mut place = String::new();
    for part in pointer.split('/').skip(1) {
        let part = part.replace("~1", "/").replace("~0", "~");
        if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
            place.push_str(&format!("[{part}]"));
        } else {
            place.push_str(if place.is_empty() { "" } else { "." });
            place.push_str(&part);
        }
    }
    place
}

#[cfg(test)]
mod tests {
    use outlast_core::gateway::Schemas as _;

    use super::*;

    const SCHEMA: &str = r##"{
        "type": "object",
        "properties": {
            "path": { "type": "string", "minLength": 1 },
            "mode": { "enum": ["read", "write"] },
            "items": { "type": "array", "items": { "$ref": "#/$defs/item" } },
            "code": { "type": "string", "pattern": "^[a-z]+$" }
        },
        "required": ["path"],
        "additionalProperties": false,
        "$defs": { "item": { "type": "object", "properties": { "n": { "type": "integer", "maximum": 5 } } } }
    }"##;

    fn raw(text: &str) -> Raw<'_> {
        Raw::parse(text).unwrap()
    }

    fn check(schema: &str, arguments: &str) -> Result<(), String> {
        Schemas::new().check(schema.as_bytes(), raw(arguments))
    }

    #[test]
    fn what_does_not_fit_is_named_with_its_place_and_without_its_value() {
        let mut words = String::new();
        for arguments in [
            r#"{"path": "a", "mode": "read", "items": [{"n": 5}]}"#,
            r#"{}"#,
            r#"{"path": 5}"#,
            r#"{"path": ""}"#,
            r#"{"path": "a", "mode": "s3cret"}"#,
            r#"{"path": "a", "items": [{}, {"n": "s3cret"}]}"#,
            r#"{"path": "a", "items": [{"n": 6}]}"#,
            r#"{"path": "a", "paht": "s3cret"}"#,
            r#"{"path": "a", "code": "S3"}"#,
            r#"[]"#,
        ] {
            let said = check(SCHEMA, arguments);
            words.push_str(&format!("{arguments}\n  {}\n", said.err().unwrap_or_else(|| "fits".to_owned())));
        }
        assert_eq!(words.matches("s3cret").count(), 3, "only in what was asked: {words}");
        insta::assert_snapshot!(words);
    }

    #[test]
    fn a_schema_that_cannot_be_understood_checks_nothing() {
        for schema in [
            "not JSON",
            r#"{"type": "nonsense"}"#,
            r#"{"properties": {"path": {"pattern": "("}}}"#,
            r#"{"$ref": "http://127.0.0.1:1/schema.json"}"#,
            r#"{"$ref": "file:///etc/hostname"}"#,
            r#"{"properties": {"path": {"$ref": "https://example.com/x"}}}"#,
        ] {
            assert_eq!(check(schema, r#"{"path": 5}"#), Ok(()), "{schema}");
        }
        assert_eq!(check("true", r#"{"path": 5}"#), Ok(()));
        assert!(check("false", r#"{"path": 5}"#).is_err());
        let large = format!(r#"{{"type": "string", "description": "{}"}}"#, "x".repeat(SCHEMA_MAX));
        assert_eq!(check(&large, "{}"), Ok(()));
        let large = format!(r#"{{"path": 5, "x": "{}"}}"#, "x".repeat(ARGUMENTS_MAX));
        assert_eq!(check(SCHEMA, &large), Ok(()));
    }

    /// What fits at a glance fits; and what most tools ask for is seen at a glance.
    #[test]
    fn a_glance_and_the_validator_agree() {
        let values = [r#""a""#, r#""""#, "1", "-1", "1.0", "1e2", "-0.5", "true", "false", "null", "{}", "[]", "[1]"];
        let types = ["string", "number", "integer", "boolean", "object", "array"];
        let member = |kind: &str| format!(r#"{{"type": "{kind}", "description": "x", "default": 1}}"#);
        let mut glances = 0;
        for kind in types.iter().map(|kind| member(kind)).chain(["true".into(), "{}".into()]) {
            for rest in ["", r#", "required": ["a"]"#, r#", "additionalProperties": false, "title": "t""#] {
                let text = format!(r#"{{"type": "object", "properties": {{"a": {kind}, "b": {kind}}}{rest}}}"#);
                let schema = compile(text.as_bytes()).unwrap();
                let plain = schema.plain.expect("it is plain");
                for value in values {
                    for arguments in [
                        format!(r#"{{"a": {value}}}"#),
                        format!(r#"{{"b": {value}, "a" :{value}}}"#),
                        format!(r#"{{"a": {value}, "a": "twice"}}"#),
                        format!(r#"{{"\u0061": {value}}}"#),
                        format!(r#"{{"a": {value}, "c": 1}}"#),
                        format!(r#"{{"c": {value}}}"#),
                        value.to_owned(),
                        "{}".to_owned(),
                    ] {
                        let fits = plain.fits(raw(&arguments));
                        glances += usize::from(fits);
                        let is_valid = schema.validator.is_valid(&serde_json::from_str(&arguments).unwrap());
                        assert!(!fits || is_valid, "{text} {arguments}");
                    }
                }
            }
        }
        assert!(glances > 500, "{glances}");
    }

    #[test]
    fn what_cannot_be_seen_at_a_glance_is_left_to_the_validator() {
        let wide: Vec<String> = (0..65).map(|number| format!(r#""m{number}": {{}}"#)).collect();
        for schema in [
            SCHEMA,
            "true",
            r#"{"properties": {}}"#,
            r#"{"type": ["object", "null"]}"#,
            r#"{"type": "object", "minProperties": 1}"#,
            r#"{"type": "object", "required": ["a"]}"#,
            r#"{"type": "object", "additionalProperties": {"type": "string"}}"#,
            r#"{"type": "object", "properties": {"a": {"type": "string", "minLength": 1}}}"#,
            r#"{"type": "object", "properties": {"a": {"type": ["string", "null"]}}}"#,
            r#"{"type": "object", "properties": {"a": {"enum": [1]}}}"#,
            r#"{"type": "object", "properties": {"a": false}}"#,
            r##"{"type": "object", "properties": {"a": {"$ref": "#"}}}"##,
            &format!(r#"{{"type": "object", "properties": {{{}}}}}"#, wide.join(",")),
        ] {
            assert!(compile(schema.as_bytes()).unwrap().plain.is_none(), "{schema}");
        }
    }

    #[test]
    fn the_revisions_of_json_schema_are_told_apart() {
        let old = r#"{"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "string"}]}"#;
        let new = r#"{"prefixItems": [{"type": "string"}]}"#;
        assert!(check(old, "[5]").is_err() && check(new, "[5]").is_err());
        assert_eq!(check(r#"{"items": {"type": "integer"}}"#, "[5]"), Ok(()));
    }

    #[test]
    fn no_pattern_tries_for_long() {
        let schema = r#"{"properties": {"x": {"type": "string", "pattern": "^(a|aa)+\\1c$"}}}"#;
        let arguments = format!(r#"{{"x": "{}!"}}"#, "a".repeat(200));
        assert_eq!(check(schema, &arguments), Ok(()), "it gave up, and so it is the backend's to say");
        assert!(check(schema, r#"{"x": "b"}"#).is_err(), "it is a pattern like another otherwise");
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut schemas = Schemas::new();
        for n in 0..3_000 {
            let schema = format!(r#"{{"properties": {{"a{n}": {{"type": "string"}}}}}}"#);
            assert!(schemas.check(schema.as_bytes(), raw(&format!(r#"{{"a{n}": 5}}"#))).is_err());
            assert!(schemas.kept.len() <= KEPT_MAX);
        }
        let mut schemas = Schemas::new();
        for n in 0..100 {
            let schema = format!(r#"{{"description": "{n}{}"}}"#, "x".repeat(SCHEMA_MAX - 100));
            schemas.check(schema.as_bytes(), raw("{}")).unwrap();
            assert!(schemas.bytes <= KEPT_BYTES_MAX && schemas.bytes >= schema.len());
        }
    }
}
