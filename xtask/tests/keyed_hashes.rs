//! Maps with texts of clients and servers as keys have a keyed hash. An attacker can compute thousands of texts with the
//! same unkeyed hash, and a map of these compares each with all others.

use std::{fs, path::Path};

/// Its keys are made by the gateway itself.
const OWN_KEYS: [&str; 1] = ["by_handle: FxHashMap<String, Task>"];

/// Types that contain bytes that another program has chosen.
const TEXTS: [&str; 5] = ["String", "str>", "&str", "[u8]", "Bytes"];

#[test]
fn no_map_with_an_unkeyed_hash_has_texts_as_keys() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    let mut found = Vec::new();
    let mut left = vec![crates.join("core/src"), crates.join("outlast/src"), crates.join("control/src")];
    while let Some(folder) = left.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path);
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                found.extend(
                    text.lines().filter(|line| has_texts(line)).map(|line| format!("{}: {line}", path.display())),
                );
            }
        }
    }
    assert!(found.is_empty(), "use the map of the standard library:\n{}", found.join("\n"));
}

fn has_texts(line: &str) -> bool {
    let is_own = OWN_KEYS.iter().any(|own| line.contains(own));
    let maps = ["FxHashMap<", "FxHashSet<"].iter().flat_map(|map| line.split(map).skip(1));
    !is_own && maps.map(key).any(|key| TEXTS.iter().any(|text| key.contains(text)))
}

/// The first type in a list of types, with its own parameters.
fn key(types: &str) -> &str {
    let mut depth = 0;
    let end = types.find(|letter| {
        match letter {
            '<' | '(' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            '>' if depth > 0 => depth -= 1,
            ',' | '>' if depth == 0 => return true,
            _ => {}
        }
        false
    });
    &types[..end.unwrap_or(types.len())]
}

#[test]
fn keys_are_read_out_of_types() {
    for (line, expected) in [
        ("names: [FxHashMap<Rc<str>, u32>; 4],", true),
        ("by_raw: FxHashMap<(u32, Rc<str>), Rc<str>>,", true),
        ("kept: FxHashMap<Bytes, Kept>,", true),
        ("seen: FxHashSet<String>", true),
        ("outer: FxHashMap<u32, FxHashMap<String, u8>>", true),
        ("calls: FxHashMap<u64, String>,", false),
        ("known: FxHashMap<[u8; 32], Known>", false),
        ("names: HashMap<String, u32>", false),
    ] {
        assert_eq!(has_texts(line), expected, "{line}");
    }
}
