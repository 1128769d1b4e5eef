//! Whether arguments fit a tool's schema.
//!
//! The schemas come from backends: no reference is followed out of them, and one that cannot be understood checks nothing.
//! The validator cannot be interrupted, and a thread that runs it cannot be ended, so what compiling and evaluating may cost
//! is bounded before ([`cost`]): a schema above the bound leaves its tool unchecked, and arguments above it are refused. The
//! backend itself has the last word anyway; this is to spare it calls that cannot be meant, and to tell a model quickly what
//! to mend.

use jsonschema::{
    PatternOptions, Validator,
    error::{ValidationError, ValidationErrorKind},
};
use outlast_core::{
    gateway::{self, Fit},
    json::Raw,
};
use rustc_hash::FxHashMap;
use serde_json::{Map, Value};

mod cost;

use cost::Cost;

/// Compiled schemas that are kept. At the bound all are forgotten, and compiled again as they are needed.
const KEPT_MAX: usize = 1_024;
/// The same, in bytes of schemas.
const KEPT_BYTES_MAX: usize = 8 << 20;
/// A larger schema checks nothing.
const SCHEMA_MAX: usize = 256 << 10;
/// Larger arguments are not checked: reading them twice would cost more than it spares.
const ARGUMENTS_MAX: usize = gateway::ARGUMENTS_READ_MAX;
/// Steps that a regular expression may take back. Arguments that need more are refused.
const BACKTRACK_MAX: usize = 10_000;
/// Bytes that one compiled regular expression may hold, and its cache when it is used.
const PATTERN_SIZE_MAX: usize = 1 << 20;
/// The longest sentence.
const WORDS_MAX: usize = 400;

/// Compiled schemas, by their bytes.
#[derive(Default)]
pub struct Schemas {
    /// An error is why it checks nothing.
    kept: FxHashMap<Box<[u8]>, Result<Schema, String>>,
    bytes: usize,
}

struct Schema {
    validator: Validator,
    cost: Cost,
    /// If all that it asks for can be seen at a glance.
    plain: Option<Plain>,
}

impl Schemas {
    pub fn new() -> Schemas {
        Schemas::default()
    }

    fn compiled(&mut self, schema: &[u8]) -> Result<&Schema, String> {
        if schema.len() > SCHEMA_MAX {
            return Err(format!("it is larger than {} KiB", SCHEMA_MAX >> 10));
        }
        if !self.kept.contains_key(schema) {
            if self.kept.len() >= KEPT_MAX || self.bytes + schema.len() > KEPT_BYTES_MAX {
                self.kept.clear();
                self.bytes = 0;
            }
            self.bytes += schema.len();
            self.kept.insert(schema.into(), compile(schema));
        }
        self.kept[schema].as_ref().map_err(Clone::clone)
    }
}

fn compile(schema: &[u8]) -> Result<Schema, String> {
    // It does not read JSON that is nested deeper than 127 levels.
    let schema: Value = serde_json::from_slice(schema).map_err(|error| shortened(error.to_string()))?;
    let cost = Cost::of(&schema)?;
    let patterns = PatternOptions::fancy_regex()
        .backtrack_limit(BACKTRACK_MAX)
        .size_limit(PATTERN_SIZE_MAX)
        .dfa_size_limit(PATTERN_SIZE_MAX);
    let validator = jsonschema::options().offline().with_pattern_options(patterns).build(&schema);
    let validator = validator.map_err(|error| shortened(error.masked().to_string()))?;
    Ok(Schema { validator, cost, plain: Plain::of(&schema) })
}

impl gateway::Schemas for Schemas {
    fn check(&mut self, schema: &[u8], arguments: Raw<'_>) -> Fit {
        let Schema { validator, cost, plain } = match self.compiled(schema) {
            Ok(schema) => schema,
            Err(why) => return Fit::Unchecked(why),
        };
        if plain.as_ref().is_some_and(|plain| plain.fits(arguments)) || arguments.get().len() > ARGUMENTS_MAX {
            return Fit::Fits;
        }
        let Ok(arguments) = serde_json::from_str::<Value>(arguments.get()) else {
            return Fit::Misfit("the arguments are no JSON object".to_owned());
        };
        if !cost.is_affordable(&arguments) {
            return Fit::TooCostly;
        }
        // The first error alone: all of them could be as many as there are steps.
        match validator.validate(&arguments) {
            Ok(()) => Fit::Fits,
            Err(error) => match error.kind() {
                ValidationErrorKind::BacktrackLimitExceeded { .. } => Fit::TooCostly,
                _ => Fit::Misfit(sentence(&error)),
            },
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
    shorten(&mut words);
    words
}

fn shortened(mut words: String) -> String {
    shorten(&mut words);
    words
}

fn shorten(words: &mut String) {
    if let Some((end, _)) = words.char_indices().nth(WORDS_MAX) {
        words.truncate(end);
        words.push('…');
    }
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

    fn check(schema: &str, arguments: &str) -> Fit {
        Schemas::new().check(schema.as_bytes(), raw(arguments))
    }

    fn is_misfit(schema: &str, arguments: &str) -> bool {
        matches!(check(schema, arguments), Fit::Misfit(_))
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
            let said = match check(SCHEMA, arguments) {
                Fit::Misfit(words) => words,
                Fit::Fits => "fits".to_owned(),
                other => panic!("{other:?}"),
            };
            words.push_str(&format!("{arguments}\n  {said}\n"));
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
            assert!(matches!(check(schema, r#"{"path": 5}"#), Fit::Unchecked(_)), "{schema}");
        }
        assert_eq!(check("true", r#"{"path": 5}"#), Fit::Fits);
        assert!(is_misfit("false", r#"{"path": 5}"#));
        let large = format!(r#"{{"type": "string", "description": "{}"}}"#, "x".repeat(SCHEMA_MAX));
        assert_eq!(check(&large, "{}"), Fit::Unchecked("it is larger than 256 KiB".to_owned()));
        let large = format!(r#"{{"path": 5, "x": "{}"}}"#, "x".repeat(ARGUMENTS_MAX));
        assert_eq!(check(SCHEMA, &large), Fit::Fits);
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
        assert!(is_misfit(old, "[5]") && is_misfit(new, "[5]"));
        assert_eq!(check(r#"{"items": {"type": "integer"}}"#, "[5]"), Fit::Fits);
    }

    #[test]
    fn no_pattern_tries_for_long() {
        let schema = r#"{"properties": {"x": {"type": "string", "pattern": "^(a|aa)+\\1c$"}}}"#;
        let arguments = format!(r#"{{"x": "{}!"}}"#, "a".repeat(200));
        assert_eq!(check(schema, &arguments), Fit::TooCostly);
        assert!(is_misfit(schema, r#"{"x": "b"}"#), "it is a pattern like another otherwise");
    }

    /// 1.5 KB of it took 5 s and 1.5 GB.
    #[test]
    fn a_small_schema_cannot_cost_much() {
        let definitions = |count: usize, keyword: &str| {
            let next = |n: usize| format!(r##"{{"$ref": "#/$defs/d{}"}}"##, n + 1);
            let each = |n: usize| format!(r#""d{n}": {{"{keyword}": [{}, {}]}}"#, next(n), next(n));
            let each: Vec<String> = (0..count).map(each).collect();
            format!(r##"{{"$ref": "#/$defs/d0", "$defs": {{{}, "d{count}": {{"type": "string"}}}}}}"##, each.join(","))
        };
        for keyword in ["allOf", "anyOf", "oneOf"] {
            assert!(matches!(check(&definitions(24, keyword), "{}"), Fit::Unchecked(_)), "{keyword}");
            // What is just affordable is checked.
            assert!(is_misfit(&definitions(10, keyword), "{}"), "{keyword}");
        }
        let twice = r##"{"properties": {"a": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}}}"##;
        let nested = |depth: usize| format!("{}1{}", r#"{"a":"#.repeat(depth), "}".repeat(depth));
        assert_eq!(check(twice, &nested(8)), Fit::Fits);
        assert_eq!(check(twice, &nested(40)), Fit::TooCostly);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut schemas = Schemas::new();
        for n in 0..3_000 {
            let schema = format!(r#"{{"properties": {{"a{n}": {{"type": "string"}}}}}}"#);
            let fit = schemas.check(schema.as_bytes(), raw(&format!(r#"{{"a{n}": 5}}"#)));
            assert!(matches!(fit, Fit::Misfit(_)), "{fit:?}");
            assert!(schemas.kept.len() <= KEPT_MAX);
        }
        let mut schemas = Schemas::new();
        for n in 0..100 {
            let schema = format!(r#"{{"description": "{n}{}"}}"#, "x".repeat(SCHEMA_MAX - 100));
            assert_eq!(schemas.check(schema.as_bytes(), raw("{}")), Fit::Fits);
            assert!(schemas.bytes <= KEPT_BYTES_MAX && schemas.bytes >= schema.len());
        }
    }
}
