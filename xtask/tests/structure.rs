//! Rules about the shape of the source that the compiler does not check: small structs in the core, imports by name, and
//! names of MCP that are defined once.

use std::{
    fs,
    path::{Path, PathBuf},
};

const FIELDS_MAX: usize = 24;

#[test]
fn no_struct_of_the_core_has_too_many_fields() {
    let mut large = Vec::new();
    for (path, text) in sources(&["core"]) {
        for (name, fields) in structs(&text) {
            if fields > FIELDS_MAX {
                large.push(format!("{}: `{name}` has {fields} fields", path.display()));
            }
        }
    }
    assert!(large.is_empty(), "make a type of fields that belong together:\n{}", large.join("\n"));
}

#[test]
fn only_tests_import_everything_from_their_parent() {
    let mut found = Vec::new();
    for (path, text) in sources(&["core", "os", "control", "outlast", "capi"]) {
        if path.ends_with("tests.rs") {
            continue;
        }
        let imports = before_tests(&text).lines().filter(|line| line.trim_start().starts_with("use super::*"));
        found.extend(imports.map(|line| format!("{}: {line}", path.display())));
    }
    assert!(found.is_empty(), "import by name:\n{}", found.join("\n"));
}

#[test]
fn names_of_mcp_are_defined_once() {
    let names = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/core/src/mcp.rs");
    let defined = fs::read_to_string(&names).unwrap();
    // `initialize` and `ping` are also words.
    let literals: Vec<&str> = before_tests(&defined)
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("pub const ")?.split('"').nth(1))
        .filter(|name| name.contains(['/', '-']))
        .collect();
    assert!(literals.contains(&"tools/call") && literals.contains(&"2026-07-28"), "{literals:?}");
    let mut found = Vec::new();
    for (path, text) in sources(&["core", "control", "outlast"]) {
        if path.ends_with("core/src/mcp.rs") || path.ends_with("tests.rs") {
            continue;
        }
        let code = before_tests(&text).lines().filter(|line| !line.trim_start().starts_with("//"));
        let again = code.filter(|line| literals.iter().any(|name| line.contains(&format!("\"{name}\""))));
        found.extend(again.map(|line| format!("{}: {}", path.display(), line.trim())));
    }
    assert!(found.is_empty(), "use the names in core/src/mcp.rs:\n{}", found.join("\n"));
}

/// The Rust files of these crates, without their integration tests.
fn sources(crates: &[&str]) -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    let mut left: Vec<PathBuf> = crates.iter().map(|name| root.join(name).join("src")).collect();
    let mut found = Vec::new();
    while let Some(folder) = left.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path);
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                found.push((path, text));
            }
        }
    }
    found
}

/// The tests of a file are its last modules, each after `#[cfg(test)]` and perhaps more attributes.
fn before_tests(text: &str) -> &str {
    let (mut at, mut attributes) = (0, None);
    for whole in text.split_inclusive('\n') {
        let line = whole.trim_start();
        let is_test = line.starts_with("#[cfg(") && line.contains("test");
        match attributes {
            Some(start) if line.starts_with("mod ") || line.starts_with("pub(super) mod ") => return &text[..start],
            Some(_) if line.starts_with("#[") => {}
            _ => attributes = is_test.then_some(at),
        }
        at += whole.len();
    }
    text
}

/// The structs in a formatted file, each with the number of its fields.
fn structs(text: &str) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    let mut open: Option<(String, usize, usize)> = None;
    for line in text.lines() {
        let indent = line.len() - line.trim_start().len();
        let code = line.trim_start();
        match &mut open {
            Some((name, depth, fields)) => {
                if indent == *depth && code.starts_with('}') {
                    found.push((std::mem::take(name), *fields));
                    open = None;
                } else if indent == *depth + 4 && is_field(code) {
                    *fields += 1;
                }
            }
            None if code.ends_with('{') => {
                let item =
                    code.strip_prefix("pub").map_or(code, |rest| rest.split_once(' ').map_or("", |(_, rest)| rest));
                if let Some(rest) = item.strip_prefix("struct ") {
                    let name = rest.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default();
                    open = Some((name.to_owned(), indent, 0));
                }
            }
            None => {}
        }
    }
    found
}

fn is_field(code: &str) -> bool {
    let is_name = |name: &str| name.split(' ').next_back().is_some_and(|name| name.chars().all(is_of_name));
    !code.starts_with(['/', '#']) && code.split_once(": ").is_some_and(|(name, _)| is_name(name))
}

fn is_of_name(letter: char) -> bool {
    letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_' || letter == '#'
}

#[test]
fn fields_are_counted() {
    let text = "
pub(super) struct Many<T> {
    /// One: a comment.
    pub one: u32,
    #[serde(default, rename = \"a: b\")]
    two: Option<T>,
    pub(super) r#type: u8,
}

struct Unit;

struct Pair(u8, u8);
";
    assert_eq!(structs(text), [("Many".to_owned(), 3)]);
}

#[test]
fn tests_are_found() {
    for (text, expected) in [
        ("use a;\n\n#[cfg(test)]\nmod tests {\n    use super::*;\n}\n", "use a;\n\n"),
        ("#[cfg(all(test, unix))]\n#[expect(unused, reason = \"x\")]\nmod tests {\n}\n", ""),
        ("#[cfg(test)]\nuse b;\nfn c() {}\n", "#[cfg(test)]\nuse b;\nfn c() {}\n"),
    ] {
        assert_eq!(before_tests(text), expected);
    }
}
