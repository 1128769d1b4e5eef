//! Tools and calls that cost a gateway as much as its limits allow, or would cost far more without them.

use serde_json::{Map, Value, json};

/// Of each kind, so that each is compiled anew.
const COPIES: usize = 20;

/// A list of tools: thousands that say little, and some whose schemas are costly to compile or to evaluate.
pub fn definitions() -> String {
    let plain = (0..5_000).map(|n| json!({"name": format!("plain{n}"), "inputSchema": {"type": "object"}}));
    let costly = (0..COPIES).flat_map(|copy| {
        schemas().into_iter().map(move |(name, mut schema)| {
            schema["title"] = json!(copy);
            json!({"name": format!("{name}{copy}"), "inputSchema": schema})
        })
    });
    Value::Array(plain.chain(costly).collect()).to_string()
}

/// Calls of them, each with arguments that are as bad for it as can be: name and arguments as JSON.
pub fn calls() -> Vec<(String, String)> {
    let nested = |depth: usize| format!("{}1{}", r#"{"a":"#.repeat(depth), "}".repeat(depth));
    let numbers = |count: usize| format!(r#"{{"a":[{}1]}}"#, "1,".repeat(count));
    let arguments = [
        ("doubling", "{}".to_owned()),
        ("large", r#"{"p1":5}"#.to_owned()),
        ("patterns", format!(r#"{{"a":"{}!"}}"#, "a".repeat(10_000))),
        ("twice", nested(12)),
        ("twice", nested(120)),
        ("wide", numbers(100)),
        ("wide", numbers(100_000)),
        ("unique", numbers(9_000)),
        ("plain", nested(9_000)),
    ];
    let each = |copy: usize| {
        arguments.iter().map(move |(name, arguments)| (format!("hostile__{name}{copy}"), arguments.clone()))
    };
    (0..COPIES).flat_map(each).collect()
}

fn schemas() -> Vec<(&'static str, Value)> {
    let mut definitions = Map::new();
    for n in 0..24 {
        let next = json!({"$ref": format!("#/$defs/d{}", n + 1)});
        definitions.insert(format!("d{n}"), json!({"anyOf": [next, next]}));
    }
    definitions.insert("d24".into(), json!({"type": "string"}));
    let large: Map<String, Value> =
        (0..2_400).map(|n| (format!("p{n}"), json!({"anyOf": [{"type": "string"}]}))).collect();
    let patterns: Vec<Value> = (0..60).map(|n| json!({"pattern": format!("^(a|aa|[a-z{n}]){{1,100}}x$")})).collect();
    vec![
        ("doubling", json!({"$ref": "#/$defs/d0", "$defs": definitions})),
        ("large", json!({"type": "object", "properties": large})),
        ("patterns", json!({"properties": {"a": {"anyOf": patterns}}})),
        ("twice", json!({"properties": {"a": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}}})),
        ("wide", json!({"properties": {"a": {"items": {"allOf": vec![json!({"type": "integer"}); 1_000]}}}})),
        ("unique", json!({"properties": {"a": {"uniqueItems": true}}})),
    ]
}
