//! The JSON schema of `outlast.toml`, for editors, derived from the types of the tables.

use serde_json::{Map, Value, json};

use super::{keys::Root, table::Key, tree};

pub(crate) fn schema() -> Value {
    let mut schema = table(Root::KEYS);
    schema["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    schema["title"] = json!("outlast.toml");
    schema["description"] = json!("The configuration of outlast: gateway, mcp and run.");
    schema
}

pub(crate) fn table(keys: &[Key]) -> Value {
    let properties: Map<String, Value> = keys.iter().map(|key| (key.name.to_owned(), property(key))).collect();
    json!({ "type": "object", "additionalProperties": false, "properties": properties })
}

fn property(key: &Key) -> Value {
    let mut property = (key.kind)().1;
    property["description"] = json!(key.about);
    if !key.default.is_empty() {
        property["default"] = tree::default(key.default).json();
    }
    property
}
