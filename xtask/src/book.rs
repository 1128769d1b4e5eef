//! Builds the book as HTML with mdbook, and checks every link within it.

use crate::report::Failure;
use crate::{cargo, must, peers, root, target};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The version that the book was last built with; another one on `PATH` is accepted.
const MDBOOK: &str = "0.4.52";

pub(crate) fn build() -> Result<(), Failure> {
    let folder = target().join("book");
    let mut command = Command::new(mdbook()?);
    must_be_silent(command.arg("build").arg("--dest-dir").arg(&folder).current_dir(root()))?;
    let pages = pages(&folder).map_err(|error| Failure::new("cannot read the book that was built").because(error))?;
    let broken = broken_links(&pages);
    if !broken.is_empty() {
        return Err(Failure::new("links of the book lead nowhere").because(broken.join("\n")));
    }
    println!("{} pages in {}", pages.len(), folder.display());
    Ok(())
}

/// The mdbook on `PATH`, or one that is built once and kept beside the peers.
fn mdbook() -> Result<PathBuf, Failure> {
    let works = |program: &Path| Command::new(program).arg("--version").output().is_ok_and(|it| it.status.success());
    let on_path = PathBuf::from("mdbook");
    if works(&on_path) {
        return Ok(on_path);
    }
    let place = peers::cache()?.join("outlast-peers").join(format!("mdbook-{MDBOOK}"));
    let kept = place.join("bin").join(format!("mdbook{}", std::env::consts::EXE_SUFFIX));
    if !works(&kept) {
        eprintln!("book: building mdbook {MDBOOK} into {}", place.display());
        let mut install = cargo(["install", "mdbook", "--locked", "--no-default-features", "--version", MDBOOK]);
        install.arg("--root").arg(&place);
        must(install, "mdbook cannot be built")?;
    }
    Ok(kept)
}

/// A warning of mdbook is an error in the book.
fn must_be_silent(command: &mut Command) -> Result<(), Failure> {
    let output = command.output().map_err(|error| crate::cannot_run(command, error))?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let complaints: Vec<&str> =
        said.lines().filter(|line| line.contains("[WARN]") || line.contains("[ERROR]")).collect();
    if output.status.success() && complaints.is_empty() {
        return Ok(());
    }
    let words = if complaints.is_empty() { said.trim().to_owned() } else { complaints.join("\n") };
    Err(Failure::new("the book does not build").because(words))
}

/// The text of each page, by its path below the directory; pages that repeat others are left out.
fn pages(folder: &Path) -> std::io::Result<BTreeMap<String, String>> {
    let (mut pages, mut left) = (BTreeMap::new(), vec![(folder.to_owned(), String::new())]);
    while let Some((folder, above)) = left.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let name = format!("{above}{}", path.file_name().unwrap_or_default().to_string_lossy());
            let is_page = name.ends_with(".html") && !["print.html", "404.html", "toc.html"].contains(&name.as_str());
            if path.is_dir() {
                left.push((path, format!("{name}/")));
            } else if is_page {
                pages.insert(name, fs::read_to_string(&path)?);
            }
        }
    }
    Ok(pages)
}

fn broken_links(pages: &BTreeMap<String, String>) -> Vec<String> {
    let places: BTreeMap<&str, BTreeSet<&str>> =
        pages.iter().map(|(name, text)| (name.as_str(), attributes(text, "id").collect())).collect();
    let mut broken = Vec::new();
    for (name, text) in pages {
        for link in attributes(text, "href").filter(|link| !link.contains(':')) {
            let (page, place) = link.split_once('#').unwrap_or((link, ""));
            let page = if page.is_empty() { name.clone() } else { target_of(name, page) };
            let leads = match places.get(page.as_str()) {
                Some(places) => place.is_empty() || places.contains(place),
                // A picture, a style sheet, or a page that mdbook generates.
                None => !page.ends_with(".html") || page == "print.html",
            };
            if !leads {
                broken.push(format!("{name}: {link}"));
            }
        }
    }
    broken
}

/// The page that a relative link on `page` points to.
fn target_of(page: &str, link: &str) -> String {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in link.split('/') {
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

fn attributes<'a>(text: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let start = format!(" {name}=\"");
    let mut rest = text;
    std::iter::from_fn(move || {
        let at = rest.find(&start)? + start.len();
        let (value, later) = rest[at..].split_once('"')?;
        rest = later;
        Some(value)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_link_is_found() {
        let page = |name: &str, text: &str| (name.to_owned(), text.to_owned());
        let pages = BTreeMap::from([
            page(
                "a.html",
                r##"<h2 id="one"></h2><a href="b.html#two"></a><a href="#one"></a><a href="https://x.y/"></a>"##,
            ),
            page(
                "b.html",
                r#"<h2 id="two"></h2><a href="a.html#gone"></a><a href="none.html"></a><link href="x.css">"#,
            ),
            page("in/c.html", r#"<a href="../a.html#one"></a><a href="../b.html#gone"></a><a href="a.html"></a>"#),
        ]);
        assert_eq!(
            broken_links(&pages),
            ["b.html: a.html#gone", "b.html: none.html", "in/c.html: ../b.html#gone", "in/c.html: a.html"]
        );
    }
}
