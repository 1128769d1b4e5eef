//! Tools and calls that cost a gateway as much as its limits allow, or far more without its limits.

use serde_json::{Map, Value, json};

/// Copies of each kind, so that each is compiled separately.
const COPIES: usize = 20;

/// A list of tools: thousands of short ones, and some whose schemas are costly to compile or to evaluate.
pub(super) fn definitions() -> String {
    let plain = (0..5_000).map(|n| json!({"name": format!("plain{n}"), "inputSchema": {"type": "object"}}));
    let alike = names_of_one_hash("hostile__", "021a542", "ccckwxow", 10_000);
    let alike = alike.map(|name| json!({"name": name, "inputSchema": {"type": "object"}}));
    let costly = (0..COPIES).flat_map(|copy| {
        schemas().into_iter().map(move |(name, mut schema)| {
            schema["title"] = json!(copy);
            json!({"name": format!("{name}{copy}"), "inputSchema": schema})
        })
    });
    Value::Array(plain.chain(alike).chain(costly).collect()).to_string()
}

/// Calls of these tools, each with the worst arguments for it: name and arguments as JSON.
pub(super) fn calls() -> Vec<(String, String)> {
    let nested = |depth: usize| format!("{}1{}", r#"{"a":"#.repeat(depth), "}".repeat(depth));
    let numbers = |count: usize| format!(r#"{{"a":[{}1]}}"#, "1,".repeat(count));
    let alike = names_of_one_hash("", "aaaaaaaa000d743a", "l8nih-2i", 14_000).map(|name| format!(r#""{name}":1"#));
    let alike: Vec<String> = alike.collect();
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
        ("plain", format!("{{{}}}", alike.join(","))),
    ];
    let each = |copy: usize| {
        arguments.iter().map(move |(name, arguments)| (format!("hostile__{name}{copy}"), arguments.clone()))
    };
    (0..COPIES).flat_map(each).collect()
}

/// Names that are all equal for the hash of rustc-hash, if this prefix is put before them: the third block begins with the hash of the
/// first, so that the rest of the third does not count.
fn names_of_one_hash(prefix: &str, first: &str, third: &str, count: usize) -> impl Iterator<Item = String> {
    assert_eq!((prefix.len() + first.len(), third.len()), (16, 8), "the blocks have 16 bytes");
    (0..count).map(move |n| format!("{first}{:a<16}{third}{n:08x}{:a<16}", "", ""))
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
