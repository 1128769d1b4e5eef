//! The JSON schema of `outlast.toml`, for editors, from the list of keys.

use outlast_core::sandbox::RULES_MAX;
use serde_json::{Map, Value, json};

use super::keys::{Key, ROOT, Shape};

pub fn schema() -> Value {
    let mut schema = table(ROOT);
    schema["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    schema["title"] = json!("outlast.toml");
    schema["description"] = json!("The configuration of outlast: gateway, mcp and run alike.");
    schema
}

fn table(keys: &'static [Key]) -> Value {
    let properties: Map<String, Value> = keys.iter().map(|key| (key.name.to_owned(), property(key))).collect();
    json!({ "type": "object", "additionalProperties": false, "properties": properties })
}

fn property(key: &Key) -> Value {
    let mut property = shape(key.shape);
    property["description"] = json!(key.about);
    if !key.default.is_empty() {
        let text = format!("x = {}", key.default);
        let document: toml_edit::DocumentMut = text.parse().expect("a default is TOML");
        property["default"] = plain(document["x"].as_value().expect("a default is a value"));
    }
    property
}

fn shape(shape: Shape) -> Value {
    let text = json!({ "type": "string" });
    let pattern = json!({ "type": "string", "minLength": 1, "pattern": "^[^\\^$()\\[\\]{}|\\\\?+\\s]+$" });
    match shape {
        Shape::Text | Shape::Path | Shape::Address => text,
        Shape::Texts | Shape::Paths => json!({ "anyOf": [{ "type": "array", "items": text }, text] }),
        Shape::Patterns => json!({ "anyOf": [{ "type": "array", "items": pattern }, pattern] }),
        Shape::Pairs => {
            json!({ "type": "object", "additionalProperties": { "type": ["string", "integer", "boolean"] } })
        }
        Shape::Count { least, most } => json!({ "type": "integer", "minimum": least, "maximum": most }),
        Shape::Truth => json!({ "type": "boolean" }),
        Shape::Span => json!({ "anyOf": [
            { "type": "string", "pattern": r"^\s*(([0-9.]+(ms|s|min|m|h|d))+|[0-9.]+)\s*$" },
            { "type": "number", "minimum": 0 },
        ] }),
        Shape::Size => json!({ "anyOf": [
            { "type": "string", "pattern": r"^\s*[0-9.]+\s*([kKmMgG]([iI]?[bB])?|[bB])?\s*$" },
            { "type": "integer", "minimum": 1 },
        ] }),
        Shape::Choice(choices) => json!({ "enum": choices }),
        Shape::Choices(choices) => json!({ "type": "array", "items": { "enum": choices } }),
        Shape::Ports { least } => {
            let port = json!({ "type": "integer", "minimum": least, "maximum": 65535 });
            json!({ "anyOf": [{ "type": "array", "items": port, "maxItems": RULES_MAX }, port, { "enum": ["any"] }] })
        }
        Shape::Children => json!({ "anyOf": [
            { "enum": ["shared", "per_session"] },
            {
                "type": "object",
                "additionalProperties": false,
                "required": ["pool"],
                "properties": { "pool": { "type": "integer", "minimum": 1, "maximum": 1000 } },
            },
        ] }),
        Shape::Table(keys) => table(keys),
        Shape::Named(keys) => json!({ "type": "object", "additionalProperties": table(keys) }),
        Shape::Many(keys) => json!({ "type": "array", "items": table(keys) }),
    }
}

fn plain(value: &toml_edit::Value) -> Value {
    match value {
        toml_edit::Value::String(text) => json!(text.value()),
        toml_edit::Value::Integer(number) => json!(number.value()),
        toml_edit::Value::Float(number) => json!(number.value()),
        toml_edit::Value::Boolean(truth) => json!(truth.value()),
        toml_edit::Value::Datetime(_) => Value::Null,
        toml_edit::Value::Array(list) => list.iter().map(plain).collect(),
        toml_edit::Value::InlineTable(table) => {
            Value::Object(table.iter().map(|(name, value)| (name.to_owned(), plain(value))).collect())
        }
    }
}
