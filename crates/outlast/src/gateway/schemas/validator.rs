//! A compiled schema and its check of arguments. Its work is limited in advance where it can be counted
//! ([`cost`](super::cost)); the rest is limited by the process that does it.

use jsonschema::{
    PatternOptions,
    error::{ValidationError, ValidationErrorKind},
};
use outlast_core::gateway::Fit;
use serde_json::Value;

use super::cost::Cost;

/// Backtracking steps of a regular expression. Arguments that need more are refused.
const BACKTRACK_MAX: usize = 10_000;
/// Bytes of one compiled regular expression, and of its cache.
const PATTERN_SIZE_MAX: usize = 1 << 20;
/// The longest error text.
const WORDS_MAX: usize = 400;

pub(crate) struct Validator {
    validator: jsonschema::Validator,
    cost: Cost,
}

impl Validator {
    /// References out of the schema are not followed. The error says why the schema cannot be used.
    pub(crate) fn compile(schema: &Value) -> Result<Validator, String> {
        Validator::with_cost(schema, Cost::of(schema)?)
    }

    /// The same for a schema that can be compiled at once; nothing if it is not known to be one.
    pub(crate) fn compile_simple(schema: &Value) -> Option<Result<Validator, String>> {
        Cost::of_simple(schema).map(|cost| Validator::with_cost(schema, cost))
    }

    fn with_cost(schema: &Value, cost: Cost) -> Result<Validator, String> {
        let patterns = PatternOptions::fancy_regex()
            .backtrack_limit(BACKTRACK_MAX)
            .size_limit(PATTERN_SIZE_MAX)
            .dfa_size_limit(PATTERN_SIZE_MAX);
        let validator = jsonschema::options().offline().with_pattern_options(patterns).build(schema);
        let validator = validator.map_err(|error| shortened(error.masked().to_string()))?;
        Ok(Validator { validator, cost })
    }

    pub(crate) fn check(&self, arguments: &str) -> Fit {
        match read(arguments) {
            Ok(arguments) if self.cost.is_affordable(&arguments) => self.evaluate(&arguments),
            Ok(_) => Fit::TooCostly,
            Err(misfit) => misfit,
        }
    }

    /// The same for arguments that need few steps; nothing if they may need more.
    pub(crate) fn check_if_small(&self, arguments: &str) -> Option<Fit> {
        match read(arguments) {
            Ok(arguments) => self.cost.is_small(&arguments).then(|| self.evaluate(&arguments)),
            Err(misfit) => Some(misfit),
        }
    }

    fn evaluate(&self, arguments: &Value) -> Fit {
        // Only the first error: there could be as many as there are steps.
        match self.validator.validate(arguments) {
            Ok(()) => Fit::Fits,
            Err(error) => match error.kind() {
                ValidationErrorKind::BacktrackLimitExceeded { .. } => Fit::TooCostly,
                _ => Fit::Misfit(sentence(&error)),
            },
        }
    }
}

/// A schema as a value. JSON that is nested deeper than 127 levels is not read.
pub(crate) fn parse(schema: &[u8]) -> Result<Value, String> {
    serde_json::from_slice(schema).map_err(|error| shortened(error.to_string()))
}

fn read(arguments: &str) -> Result<Value, Fit> {
    serde_json::from_str(arguments).map_err(|_| Fit::Misfit("the arguments are not a JSON object".to_owned()))
}

/// The error and its place, without the value, which may be long or secret.
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
