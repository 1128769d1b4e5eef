//! The map in ARCHITECTURE.md names every source file once, and no file that is not there.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

#[test]
fn the_map_names_every_source_file_once() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    let (_, map) = page.split_once("```text\n").expect("the map is the first block of the page");
    let (map, _) = map.split_once("```").expect("the map has an end");

    let mut named: BTreeMap<PathBuf, usize> = BTreeMap::new();
    for file in files_of(map) {
        *named.entry(file).or_default() += 1;
    }
    let twice: Vec<&PathBuf> = named.iter().filter(|(_, times)| **times > 1).map(|(file, _)| file).collect();
    let crates = fs::read_dir(root.join("crates")).unwrap().map(|entry| entry.unwrap().path().join("src"));
    let there: Vec<PathBuf> = crates.chain([root.join("xtask/src")]).flat_map(sources_below).collect();
    let there: Vec<&Path> = there.iter().map(|file| file.strip_prefix(&root).unwrap()).collect();
    let missing: Vec<&&Path> = there.iter().filter(|file| !named.contains_key(**file)).collect();
    let gone: Vec<&PathBuf> = named.keys().filter(|file| !there.contains(&file.as_path())).collect();
    assert!(
        twice.is_empty() && missing.is_empty() && gone.is_empty(),
        "ARCHITECTURE.md\nnames twice: {twice:#?}\ndoes not name: {missing:#?}\nnames without a file: {gone:#?}"
    );
}

/// The Rust files that a map names. In each line the names stand before the first two spaces in a row, with commas between; a
/// directory ends in `/` and holds the lines that are indented further.
fn files_of(map: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders: Vec<(usize, PathBuf)> = Vec::new();
    for line in map.lines() {
        let indent = line.len() - line.trim_start().len();
        let names = line.trim_start().split("  ").next().unwrap_or_default();
        if !names.split(", ").all(|name| name.ends_with(".rs") || name.ends_with('/')) {
            continue;
        }
        while folders.last().is_some_and(|(depth, _)| *depth >= indent) {
            folders.pop();
        }
        let parent = folders.last().map(|(_, folder)| folder.clone()).unwrap_or_default();
        for name in names.split(", ") {
            match name.strip_suffix('/') {
                Some(folder) => folders.push((indent, parent.join(folder))),
                None => files.push(parent.join(name)),
            }
        }
    }
    files
}

fn sources_below(folder: PathBuf) -> Vec<PathBuf> {
    let (mut found, mut left) = (Vec::new(), vec![folder]);
    while let Some(folder) = left.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path);
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                found.push(path);
            }
        }
    }
    found
}
