//! The page `docs/internals/relay.md` and the tests in this directory name the same rows.

use std::{collections::BTreeSet, fs, path::Path};

#[test]
fn each_row_of_the_page_has_a_test_of_its_name_and_each_such_test_a_row() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("../../docs/internals/relay.md")).unwrap();
    let rows: BTreeSet<&str> = page.lines().filter_map(row_of_line).collect();
    assert!(rows.len() > 100, "the page has rows: {rows:?}");

    let files = fs::read_dir(root.join("tests/rows")).unwrap().map(|entry| entry.unwrap().path());
    let sources: Vec<String> = files.map(|file| fs::read_to_string(file).unwrap()).collect();
    let tested: BTreeSet<&str> = sources.iter().flat_map(|source| rows_of_tests(source)).collect();

    let untested: Vec<_> = rows.difference(&tested).collect();
    let unknown: Vec<_> = tested.difference(&rows).collect();
    assert!(
        untested.is_empty() && unknown.is_empty(),
        "rows without a test: {untested:?}; tests without a row: {unknown:?}"
    );
}

#[test]
fn no_row_is_on_the_page_twice() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/internals/relay.md")).unwrap();
    let mut seen = BTreeSet::new();
    let twice: Vec<&str> = page.lines().filter_map(row_of_line).filter(|row| !seen.insert(*row)).collect();
    assert!(twice.is_empty(), "{twice:?}");
}

/// The id in the first column of a table.
fn row_of_line(line: &str) -> Option<&str> {
    let (id, _) = line.strip_prefix("| ")?.split_once(" |")?;
    is_row(id).then_some(id)
}

/// The ids that the names of tests begin with.
fn rows_of_tests(source: &str) -> impl Iterator<Item = &str> {
    let tests = source.split("#[test]\n").skip(1);
    tests.filter_map(|test| {
        let (name, _) = test.trim_start().strip_prefix("fn ")?.split_once('(')?;
        let (id, _) = name.split_once('_')?;
        is_row(id).then_some(id)
    })
}

/// A letter, a number, and an optional letter.
fn is_row(id: &str) -> bool {
    let Some(rest) = id.strip_prefix(|first: char| first.is_ascii_lowercase()) else { return false };
    let number = rest.strip_suffix(|last: char| last.is_ascii_lowercase()).unwrap_or(rest);
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}
