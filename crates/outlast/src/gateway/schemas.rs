//! Whether arguments fit a tool's schema.
//!
//! The schemas come from backends, and nobody has checked them: no reference is followed out of them, no pattern of theirs may
//! try for long, and one that cannot be understood checks nothing. The backend itself has the last word anyway; this is to
//! spare it calls that cannot be meant, and to tell a model quickly what to mend.

use jsonschema::{
    PatternOptions, Validator,
    error::{ValidationError, ValidationErrorKind},
};
use outlast_core::gateway;
use rustc_hash::FxHashMap;
use serde_json::Value;

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

/// Compiled validators, by the bytes of their schemas.
#[derive(Default)]
pub struct Schemas {
    /// Nothing: it checks nothing.
    kept: FxHashMap<Box<[u8]>, Option<Validator>>,
    bytes: usize,
}

impl Schemas {
    pub fn new() -> Schemas {
        Schemas::default()
    }

    fn validator(&mut self, schema: &[u8]) -> Option<&Validator> {
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

fn compile(schema: &[u8]) -> Option<Validator> {
    let schema: Value = serde_json::from_slice(schema).ok()?;
    let patterns = PatternOptions::fancy_regex().backtrack_limit(BACKTRACK_MAX);
    jsonschema::options().offline().with_pattern_options(patterns).build(&schema).ok()
}

impl gateway::Schemas for Schemas {
    fn check(&mut self, schema: &[u8], arguments: &[u8]) -> Result<(), String> {
        if arguments.len() > ARGUMENTS_MAX {
            return Ok(());
        }
        let Some(validator) = self.validator(schema) else { return Ok(()) };
        let arguments: Value =
            serde_json::from_slice(arguments).map_err(|_| "the arguments are no JSON object".to_owned())?;
        let is_doubt =
            |error: &ValidationError<'_>| matches!(error.kind(), ValidationErrorKind::BacktrackLimitExceeded { .. });
        match validator.iter_errors(&arguments).find(|error| !is_doubt(error)) {
            Some(error) => Err(sentence(&error)),
            None => Ok(()),
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

    fn check(schema: &str, arguments: &str) -> Result<(), String> {
        Schemas::new().check(schema.as_bytes(), arguments.as_bytes())
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
            r#"{"#,
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
            assert!(schemas.check(schema.as_bytes(), format!(r#"{{"a{n}": 5}}"#).as_bytes()).is_err());
            assert!(schemas.kept.len() <= KEPT_MAX);
        }
        let mut schemas = Schemas::new();
        for n in 0..100 {
            let schema = format!(r#"{{"description": "{n}{}"}}"#, "x".repeat(SCHEMA_MAX - 100));
            schemas.check(schema.as_bytes(), b"{}").unwrap();
            assert!(schemas.bytes <= KEPT_BYTES_MAX && schemas.bytes >= schema.len());
        }
    }
}
