//! The workflows of the repository call commands that exist.

use std::{collections::BTreeSet, fs, path::Path, process::Command};

#[test]
fn every_command_in_a_workflow_exists() {
    let help = Command::new(env!("CARGO_BIN_EXE_xtask")).arg("help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let known: BTreeSet<&str> = help
        .lines()
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .collect();

    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files: Vec<_> =
        fs::read_dir(root.join(".github/workflows")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.push(root.join(".ci/run"));
    let mut called = 0;
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for command in text.split("cargo xtask ").skip(1).filter_map(|rest| rest.split_whitespace().next()) {
            assert!(known.contains(command), "{}: `cargo xtask {command}`", file.display());
            called += 1;
        }
        for script in text.lines().filter_map(|line| line.trim().strip_prefix("- run: .")) {
            let path = format!(".{}", script.split_whitespace().next().unwrap_or_default());
            assert!(root.join(&path).is_file(), "{}: {path}", file.display());
        }
    }
    assert!(called >= 6, "{called}");
}
