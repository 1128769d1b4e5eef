//! Planted bugs: patches of the core that each break one promise. The world that a patch names must find it, or it would not
//! find such a bug in the real code either. It does not change the checkout: it works in a copy in the target folder.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use super::{Failure, cannot_run, cargo, root, target};

/// Where the patches are in the workspace.
const FOLDER: &str = "crates/core/tests/planted";
/// A bug must be found within so many seeds.
const SEEDS_MAX: &str = "1000";
/// Lines of output that are shown of a build that failed.
const LINES_SHOWN: usize = 40;

/// Runs all, or those whose file names contain one of these texts.
pub(crate) fn run(names: &[String]) -> Result<(), Failure> {
    let folder = target().join("planted");
    let mut missed = Vec::new();
    let mut count = 0;
    for patch in patches().map_err(|error| Failure::new(format!("cannot read {FOLDER}")).because(error))? {
        let name = patch.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if !names.is_empty() && !names.iter().any(|text| name.contains(text)) {
            continue;
        }
        count += 1;
        let copy = folder.join("checkout");
        copy_checkout(&copy).map_err(|error| Failure::new("cannot copy the checkout").because(error))?;
        apply(&patch, &copy, &[])?;
        let text = fs::read_to_string(&patch)
            .map_err(|error| Failure::new(format!("cannot read {}", patch.display())).because(error))?;
        let (_, world) = read_head(&text)
            .ok_or_else(|| Failure::new(format!("{} does not name its promise and its world", patch.display())))?;
        match seed_that_finds(world, &copy, &folder.join("target"))? {
            Some(seed) => println!("{name}: found by {world} at seed {seed}"),
            None => {
                println!("{name}: NOT FOUND by {world} within {SEEDS_MAX} seeds");
                missed.push(name);
            }
        }
    }
    match missed.is_empty() {
        true if count == 0 => Err(Failure::usage(format!("no planted bug is named {}", names.join(" or ")))),
        true => Ok(()),
        false => Err(Failure::new(format!("the simulated world does not find {}", missed.join(", ")))),
    }
}

/// All patches, in the order of their names.
fn patches() -> io::Result<Vec<PathBuf>> {
    let mut patches = Vec::new();
    for entry in fs::read_dir(root().join(FOLDER))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "patch") {
            patches.push(path);
        }
    }
    patches.sort();
    Ok(patches)
}

/// Copies every file that git tracks or would track. A file that is the same already is not written, so that cargo
/// builds only what a patch changes.
fn copy_checkout(copy: &Path) -> io::Result<()> {
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()?;
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    for name in listed.split('\0').filter(|name| !name.is_empty()) {
        // A file that was deleted and not committed is listed as well.
        let Ok(content) = fs::read(root().join(name)) else { continue };
        let to = copy.join(name);
        if fs::read(&to).is_ok_and(|known| known == content) {
            continue;
        }
        fs::create_dir_all(to.parent().expect("a file is in a folder"))?;
        fs::write(&to, content)?;
    }
    Ok(())
}

/// Applies a patch to a checkout. `--check` only finds out whether it applies.
fn apply(patch: &Path, checkout: &Path, options: &[&str]) -> Result<(), Failure> {
    let mut command = Command::new("git");
    // Without this, git would look for the files in the checkout around a copy.
    command.env("GIT_CEILING_DIRECTORIES", checkout.parent().expect("it is in a folder"));
    command.arg("apply").args(options).arg(patch).current_dir(checkout);
    let Output { status, stderr, .. } = command.output().map_err(|error| cannot_run(&command, error))?;
    match status.success() {
        true => Ok(()),
        false => Err(Failure::new(format!("{} does not apply", patch.display()))
            .because(String::from_utf8_lossy(&stderr).trim())
            .hint("CONTRIBUTING.md says how to write it anew")),
    }
}

/// The promise that a patch breaks, and the world that must find it: the two paragraphs before the change.
fn read_head(text: &str) -> Option<(&str, &str)> {
    let (head, _) = text.split_once("\n\ndiff ")?;
    let (promise, world) = head.split_once("\n\nWorld: ")?;
    let is_line = |text: &str| text.lines().count() == 1;
    (is_line(promise) && promise.ends_with('.') && is_line(world)).then_some((promise, world))
}

/// The seed whose world fails in this copy.
fn seed_that_finds(world: &str, copy: &Path, target: &Path) -> Result<Option<u64>, Failure> {
    // Most bugs are found within a hundred seeds, so that building quickly counts more than running quickly.
    let mut command = cargo(["test", "-p", "outlast-core", "--test", "sim", &format!("{world}::")]);
    command.current_dir(copy).env("CARGO_TARGET_DIR", target).env("RUST_BACKTRACE", "0");
    command.env("OUTLAST_SEEDS", SEEDS_MAX).env("OUTLAST_SEED_FROM", "0");
    let Output { status, stdout, stderr } = command.output().map_err(|error| cannot_run(&command, error))?;
    if status.success() {
        return Ok(None);
    }
    let text = [String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr)].concat();
    match text.lines().find_map(read_seed) {
        Some(seed) => Ok(Some(seed)),
        None => {
            let lines: Vec<&str> = text.lines().collect();
            eprintln!("{}", lines[lines.len().saturating_sub(LINES_SHOWN)..].join("\n"));
            Err(Failure::new("the patched simulation does not build, or ended without a seed"))
        }
    }
}

/// `seed 17 fails; …`
fn read_seed(line: &str) -> Option<u64> {
    line.strip_prefix("seed ")?.split_once(" fails")?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_planted_bug_applies_and_says_which_promise_it_breaks() {
        let patches = patches().unwrap();
        assert!(patches.len() >= 12, "{patches:?}");
        for patch in patches {
            apply(&patch, &root(), &["--check"]).unwrap_or_else(|failure| panic!("{failure:?}"));
            let text = fs::read_to_string(&patch).unwrap();
            let (_, world) = read_head(&text).unwrap_or_else(|| panic!("{}: {text}", patch.display()));
            let module = root().join("crates/core/tests/sim").join(format!("{world}.rs"));
            assert!(module.is_file(), "there is no world {world}");
            let (_, diff) = text.split_once("\n\ndiff ").expect("it changes something");
            let mut changed = diff.lines().filter_map(|line| line.strip_prefix("+++ b/"));
            assert!(changed.all(|file| file.starts_with("crates/core/src/")), "{} changes more", patch.display());
        }
    }

    #[test]
    fn a_patch_names_its_promise_and_its_world() {
        let table = [
            ("A thing is lost.\n\nWorld: joined\n\ndiff --git", Some(("A thing is lost.", "joined"))),
            ("A thing is lost.\n\ndiff --git", None),
            ("A thing\nis lost.\n\nWorld: joined\n\ndiff --git", None),
            ("A thing is lost\n\nWorld: joined\n\ndiff --git", None),
        ];
        for (text, head) in table {
            assert_eq!(read_head(text), head, "{text}");
        }
    }

    #[test]
    fn the_seed_is_read_from_the_line_of_a_failed_world() {
        let table = [
            ("seed 17 fails; again: OUTLAST_SEED_FROM=17 OUTLAST_SEEDS=1", Some(17)),
            ("seed 17: a promise", None),
            ("test result: FAILED", None),
        ];
        for (line, seed) in table {
            assert_eq!(read_seed(line), seed, "{line}");
        }
    }
}
