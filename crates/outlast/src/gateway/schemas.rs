//! Checks arguments against a tool's schema.
//!
//! Schemas come from backends and arguments from clients, so both may be made to be expensive. A schema of plain types
//! is checked at once, in linear time, and so is a small schema that has only keywords of linear cost, such as SDKs generate
//! for typed parameters, if the steps that the arguments need are few. All others are compiled and evaluated in a separate
//! process ([`checker`](super::checker)), which can be killed. The backend still checks the arguments itself: this check saves
//! calls that must fail, and tells a model quickly what to correct.

use std::collections::HashMap;

use outlast_core::{
    gateway::{self, Fit},
    json::Raw,
};
use serde_json::{Map, Value};

mod cost;
pub(crate) mod validator;

use validator::Validator;

/// Schemas in the cache. At the limit all are dropped, and read again when they are needed.
const KEPT_MAX: usize = 1_024;
/// The same, in bytes of schemas.
const KEPT_BYTES_MAX: usize = 8 << 20;
/// A larger schema is not used.
const SCHEMA_MAX: usize = 256 << 10;
/// Larger arguments are not checked: reading them twice would cost more than it saves.
const ARGUMENTS_MAX: usize = gateway::ARGUMENTS_READ_MAX;
/// A larger schema, unless it is plain, is compiled in the checker process.
const SIMPLE_SCHEMA_MAX: usize = 32 << 10;
/// Larger arguments, unless the schema is plain, are checked in the checker process.
const SIMPLE_ARGUMENTS_MAX: usize = 64 << 10;

/// The cache of schemas, by their bytes.
#[derive(Default)]
pub(crate) struct Schemas {
    /// With a keyed hash, because backends choose the schemas.
    kept: HashMap<Box<[u8]>, Kind>,
    bytes: usize,
}

enum Kind {
    /// Of plain types: checked at once.
    Plain(Box<(Plain, Validator)>),
    /// Its keywords are evaluated in linear time: small arguments are checked at once.
    Simple(Box<Validator>),
    /// Checked by the checker process.
    Other,
    /// Why the schema is not used.
    Unusable(String),
}

impl Schemas {
    pub(crate) fn new() -> Schemas {
        Schemas::default()
    }

    fn kind(&mut self, schema: &[u8]) -> &Kind {
        if !self.kept.contains_key(schema)
            && (self.kept.len() >= KEPT_MAX || self.bytes + schema.len() > KEPT_BYTES_MAX)
        {
            self.kept.clear();
            self.bytes = 0;
        }
        if !self.kept.contains_key(schema) {
            self.bytes += schema.len();
            self.kept.insert(schema.into(), Kind::of(schema));
        }
        &self.kept[schema]
    }
}

impl Kind {
    fn of(schema: &[u8]) -> Kind {
        Kind::read(schema).unwrap_or_else(Kind::Unusable)
    }

    fn read(text: &[u8]) -> Result<Kind, String> {
        let schema = validator::parse(text)?;
        if let Some(plain) = Plain::of(&schema) {
            return Ok(Kind::Plain(Box::new((plain, Validator::compile(&schema)?))));
        }
        match (text.len() <= SIMPLE_SCHEMA_MAX).then(|| Validator::compile_simple(&schema)).flatten() {
            Some(validator) => Ok(Kind::Simple(Box::new(validator?))),
            None => Ok(Kind::Other),
        }
    }
}

impl gateway::Schemas for Schemas {
    fn check(&mut self, schema: &[u8], arguments: Raw<'_>) -> Option<Fit> {
        if schema.len() > SCHEMA_MAX {
            return Some(Fit::Unchecked(format!("it is larger than {} KiB", SCHEMA_MAX >> 10)));
        }
        match self.kind(schema) {
            Kind::Unusable(why) => Some(Fit::Unchecked(why.clone())),
            _ if arguments.get().len() > ARGUMENTS_MAX => Some(Fit::Fits),
            Kind::Plain(plain) if plain.0.fits(arguments) => Some(Fit::Fits),
            Kind::Plain(plain) => Some(plain.1.check(arguments.get())),
            Kind::Simple(validator) if arguments.get().len() <= SIMPLE_ARGUMENTS_MAX => {
                validator.check_if_small(arguments.get())
            }
            Kind::Simple(_) | Kind::Other => None,
        }
    }
}

/// A schema that only constrains the types of members, as those of most tools do. Arguments that fit here are valid;
/// all others go to the validator, which needs them as values and takes several times as long.
struct Plain {
    /// At most 64.
    members: Vec<(Box<str>, Type)>,
    /// One bit for each member.
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

/// Keywords that constrain nothing.
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
            // A name that occurs twice or has escapes is left to the validator.
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
            // Whether 1.0 is an integer is left to the validator.
            (Type::Integer, [first, rest @ ..]) => {
                (first.is_ascii_digit() || *first == b'-') && rest.iter().all(u8::is_ascii_digit)
            }
            _ => false,
        }
    }
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

    /// At once, or as the checker process does.
    fn check(schema: &str, arguments: &str) -> Fit {
        let beside = || match compile(schema) {
            Ok(validator) => validator.check(arguments),
            Err(why) => Fit::Unchecked(why),
        };
        Schemas::new().check(schema.as_bytes(), raw(arguments)).unwrap_or_else(beside)
    }

    fn compile(schema: &str) -> Result<Validator, String> {
        validator::parse(schema.as_bytes()).and_then(|schema| Validator::compile(&schema))
    }

    fn is_misfit(schema: &str, arguments: &str) -> bool {
        matches!(check(schema, arguments), Fit::Misfit(_))
    }

    #[test]
    fn an_error_names_the_place_and_not_the_value() {
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
    fn an_invalid_schema_is_not_used() {
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

    /// Arguments that the quick check accepts are valid, and it accepts those of most tools.
    #[test]
    fn the_quick_check_and_the_validator_agree() {
        let values = [r#""a""#, r#""""#, "1", "-1", "1.0", "1e2", "-0.5", "true", "false", "null", "{}", "[]", "[1]"];
        let types = ["string", "number", "integer", "boolean", "object", "array"];
        let member = |kind: &str| format!(r#"{{"type": "{kind}", "description": "x", "default": 1}}"#);
        let mut glances = 0;
        for kind in types.iter().map(|kind| member(kind)).chain(["true".into(), "{}".into()]) {
            for rest in ["", r#", "required": ["a"]"#, r#", "additionalProperties": false, "title": "t""#] {
                let text = format!(r#"{{"type": "object", "properties": {{"a": {kind}, "b": {kind}}}{rest}}}"#);
                let Kind::Plain(plain) = Kind::of(text.as_bytes()) else { panic!("it is plain: {text}") };
                let (plain, validator) = *plain;
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
                        let is_valid = validator.check(&arguments) == Fit::Fits;
                        assert!(!fits || is_valid, "{text} {arguments}");
                    }
                }
            }
        }
        assert!(glances > 500, "{glances}");
    }

    /// As the SDKs for Python (pydantic) and TypeScript (zod) write them.
    #[test]
    fn schemas_that_sdks_generate_are_checked_at_once_with_the_verdict_of_the_checker() {
        let values = [
            r#""a""#,
            r#""read""#,
            r#""""#,
            r#""0123456789012345678901234567890123456789""#,
            "0",
            "1",
            "5",
            "-1",
            "1.0",
            "1.5",
            "1e400",
            "123456789012345678901234567890",
            "true",
            "null",
            "{}",
            r#"{"n": 1}"#,
            r#"{"n": 6}"#,
            r#"{"n": null}"#,
            r#"{"n": 1, "x": 2}"#,
            r#"{"kind": "a", "n": 1}"#,
            r#"{"n": "s", "n": 1}"#,
            "[]",
            "[1]",
            r#"["read", "a"]"#,
            "[1, 2, 3, 4]",
            r#"[{"n": 1}, {"n": "s"}]"#,
        ];
        let members = [
            r#"{"anyOf": [{"type": "string"}, {"type": "null"}], "default": null, "title": "A"}"#,
            r#"{"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}"#,
            r#"{"type": ["string", "null"]}"#,
            r#"{"enum": ["read", "write"], "type": "string"}"#,
            r#"{"const": 1}"#,
            r#"{"const": {"n": 1}}"#,
            r#"{"type": "integer", "minimum": 1, "maximum": 5, "default": 1}"#,
            r#"{"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991}"#,
            r#"{"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 5}"#,
            r#"{"type": "string", "minLength": 1, "maxLength": 10}"#,
            r#"{"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}"#,
            r#"{"type": "array", "prefixItems": [{"type": "string"}, {"type": "string"}], "maxItems": 2}"#,
            r#"{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": false}"#,
            r#"{"type": "object", "additionalProperties": {"type": "integer"}, "propertyNames": {"type": "string"}}"#,
            r#"{"type": "object", "minProperties": 1, "maxProperties": 1}"#,
            r##"{"$ref": "#/$defs/item"}"##,
            r##"{"type": "array", "items": {"$ref": "#/$defs/item"}}"##,
            r##"{"oneOf": [{"$ref": "#/$defs/item"}, {"type": "integer"}], "discriminator": {"propertyName": "kind"}}"##,
            r##"{"allOf": [{"$ref": "#/$defs/item"}], "description": "x"}"##,
            r##"{"$ref": "#/properties/b"}"##,
            r#"{"not": {}}"#,
            "false",
        ];
        let item = r#"{"type": "object", "properties": {"n": {"type": "integer", "maximum": 5}, "kind": {"const": "a"}}, "required": ["n"]}"#;
        for member in members {
            for rest in ["", r#", "required": ["a"]"#, r#", "$schema": "http://json-schema.org/draft-07/schema#""#] {
                let text = format!(
                    r#"{{"type": "object", "properties": {{"a": {member}, "b": {{"type": "string", "maxLength": 3}}}},
                        "additionalProperties": false, "$defs": {{"item": {item}}}{rest}}}"#
                );
                let validator = compile(&text).unwrap_or_else(|why| panic!("{why}: {text}"));
                let mut schemas = Schemas::new();
                let (mut fits, mut misfits) = (0, 0);
                for value in values {
                    for arguments in [
                        format!(r#"{{"a": {value}}}"#),
                        format!(r#"{{"b": {value}, "a": "x"}}"#),
                        format!(r#"{{"c": {value}}}"#),
                        value.to_owned(),
                    ] {
                        let at_once = schemas.check(text.as_bytes(), raw(&arguments));
                        let at_once = at_once.unwrap_or_else(|| panic!("not at once: {text} {arguments}"));
                        assert_eq!(at_once, validator.check(&arguments), "{text} {arguments}");
                        let is_of_member = arguments.starts_with(r#"{"a""#);
                        fits += usize::from(is_of_member && at_once == Fit::Fits);
                        misfits += usize::from(is_of_member && at_once != Fit::Fits);
                    }
                }
                let is_possible = !["false", r#"{"not": {}}"#].contains(&member);
                assert!((fits > 0) == is_possible && misfits > 0, "{fits} {misfits}: {text}");
            }
        }
    }

    #[test]
    fn other_schemas_go_to_the_checker_process() {
        let in_member = |member: &str| format!(r#"{{"type": "object", "properties": {{"a": {member}}}}}"#);
        let many: Vec<String> = (0..600).map(|number| format!(r#""m{number}": {{"minLength": 1}}"#)).collect();
        let long = format!(r#"{{"enum": ["{}"]}}"#, "x".repeat(SIMPLE_SCHEMA_MAX));
        let nested = format!("{}true{}", r#"{"not": "#.repeat(25), "}".repeat(25));
        for schema in [
            SCHEMA.to_owned(),
            in_member(r#"{"type": "string", "pattern": "a"}"#),
            in_member(r#"{"type": "string", "format": "email"}"#),
            in_member(r#"{"type": "array", "uniqueItems": true}"#),
            in_member(r#"{"type": "number", "multipleOf": 0.1}"#),
            in_member(r#"{"patternProperties": {"a": true}}"#),
            in_member(r#"{"if": {"type": "string"}, "then": {"minLength": 1}}"#),
            in_member(r#"{"unevaluatedProperties": false}"#),
            in_member(r##"{"$ref": "#"}"##),
            in_member(r##"{"$ref": "#name"}"##),
            in_member(r##"{"items": {"$ref": "#/properties/a"}}"##),
            in_member(r#"{"$ref": "https://example.com/x"}"#),
            // A reference may lead to what is not a subschema where it stands.
            in_member(r##"{"default": {"x": {"pattern": "a"}}, "anyOf": [{"$ref": "#/properties/a/default/x"}]}"##),
            r#"{"type": "object", "minLength": 1, "$defs": {"x": {"$id": "item"}}}"#.to_owned(),
            in_member(&nested),
            in_member(&long),
            format!(r#"{{"type": "object", "properties": {{{}}}}}"#, many.join(",")),
        ] {
            assert!(matches!(Kind::of(schema.as_bytes()), Kind::Other), "{schema}");
            assert_eq!(Schemas::new().check(schema.as_bytes(), raw("{}")), None, "{schema}");
        }
    }

    /// The steps of a schema multiply with the values that they are applied to.
    #[test]
    fn arguments_that_need_many_steps_go_to_the_checker_process() {
        let branches: Vec<String> = (0..200).map(|number| format!(r#"{{"const": {number}}}"#)).collect();
        let schema = format!(
            r#"{{"type": "object", "properties": {{"a": {{"type": "array", "items": {{"anyOf": [{}]}}}}, "b": {{"minLength": 1}}}}}}"#,
            branches.join(",")
        );
        let mut schemas = Schemas::new();
        let mut check = |arguments: &str| schemas.check(schema.as_bytes(), raw(arguments));
        let numbers = |count: usize| format!(r#"{{"a": [{}]}}"#, vec!["199"; count].join(","));
        assert_eq!(check(&numbers(10)), Some(Fit::Fits));
        assert_eq!(check(&numbers(1_000)), None);
        let schema = schema.replace("\"const\"", "\"minimum\"");
        let mut check = |arguments: &str| schemas.check(schema.as_bytes(), raw(arguments));
        assert_eq!(check(r#"{"a": [[1]]}"#), Some(Fit::Fits));
        assert_eq!(check(&format!(r#"{{"a": [[{}]]}}"#, vec!["1"; 9_000].join(","))), None, "each error has a copy");
        let text = |length: usize| format!(r#"{{"b": "{}"}}"#, "x".repeat(length));
        assert_eq!(check(&text(SIMPLE_ARGUMENTS_MAX - 100)), Some(Fit::Fits), "a long text is one value");
        assert_eq!(check(&text(SIMPLE_ARGUMENTS_MAX)), None);
    }

    #[test]
    fn each_revision_of_json_schema_has_its_own_rules() {
        let old = r#"{"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "string"}]}"#;
        let new = r#"{"prefixItems": [{"type": "string"}]}"#;
        assert!(is_misfit(old, "[5]") && is_misfit(new, "[5]"));
        assert_eq!(check(r#"{"items": {"type": "integer"}}"#, "[5]"), Fit::Fits);
    }

    /// The target of a dynamic reference is known only during the evaluation.
    #[test]
    fn dynamic_references_and_nested_ids_are_followed() {
        let tree = r##"{"$id": "https://example.com/tree", "$dynamicAnchor": "node", "type": "object",
            "properties": {"children": {"type": "array", "items": {"$dynamicRef": "#node"}}}}"##;
        assert_eq!(check(tree, r#"{"children": [{"children": []}]}"#), Fit::Fits);
        assert!(is_misfit(tree, r#"{"children": [{"children": 5}]}"#));
        let nested = r#"{"$ref": "item", "$defs": {"x": {"$id": "item", "required": ["a"]}}}"#;
        assert_eq!(check(nested, r#"{"a": 1}"#), Fit::Fits);
        assert!(is_misfit(nested, "{}"));
        let outside = r#"{"$ref": "https://example.com/x", "$defs": {"x": {"$id": "item"}}}"#;
        assert!(matches!(check(outside, "{}"), Fit::Unchecked(_)), "nothing is fetched");
    }

    #[test]
    fn a_regular_expression_has_a_step_limit() {
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
            // A schema just below the limit is checked.
            assert!(is_misfit(&definitions(10, keyword), "{}"), "{keyword}");
        }
        let twice = r##"{"properties": {"a": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}}}"##;
        let nested = |depth: usize| format!("{}1{}", r#"{"a":"#.repeat(depth), "}".repeat(depth));
        assert_eq!(check(twice, &nested(8)), Fit::Fits);
        assert_eq!(check(twice, &nested(40)), Fit::TooCostly);
    }

    #[test]
    fn the_cache_is_bounded() {
        let mut schemas = Schemas::new();
        for n in 0..3_000 {
            let schema = format!(r#"{{"type": "object", "properties": {{"a{n}": {{"type": "string"}}}}}}"#);
            let fit = schemas.check(schema.as_bytes(), raw(&format!(r#"{{"a{n}": 5}}"#)));
            assert!(matches!(fit, Some(Fit::Misfit(_))), "{fit:?}");
            assert!(schemas.kept.len() <= KEPT_MAX);
        }
        let mut schemas = Schemas::new();
        for n in 0..100 {
            let schema = format!(r#"{{"type": "object", "description": "{n}{}"}}"#, "x".repeat(SCHEMA_MAX - 100));
            assert_eq!(schemas.check(schema.as_bytes(), raw("{}")), Some(Fit::Fits));
            assert!(schemas.bytes <= KEPT_BYTES_MAX && schemas.bytes >= schema.len());
        }
    }
}
