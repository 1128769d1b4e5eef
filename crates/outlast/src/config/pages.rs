//! The reference page of the book, derived from the types of the tables. A test compares `docs/configuration.md` with it.

use super::{
    keys::Root,
    table::{Guard, Key, Shape},
};

const BEGINNING: &str = include_str!("pages/beginning.md");

/// The whole page.
pub(crate) fn page() -> String {
    let mut page = BEGINNING.to_owned();
    for key in Root::KEYS {
        table(key, key.name, &mut page);
    }
    page
}

fn table(key: &Key, path: &str, page: &mut String) {
    let keys = key.shape.keys();
    let title = match key.shape {
        Shape::Named(_) => format!("[{path}.NAME]"),
        Shape::Many(_) => format!("[[{path}]]"),
        _ => format!("[{path}]"),
    };
    let trust = needs_trust(key.guard);
    page.push_str(&format!(
        "\n## `{title}`\n\n{}{trust}\n\n| key | value | default | meaning |\n|---|---|---|---|\n",
        key.about
    ));
    for key in keys.iter().filter(|key| key.shape.is_leaf()) {
        let default = if key.default.is_empty() { String::new() } else { format!("`{}`", key.default) };
        let (name, what) = (key.name, (key.kind)().0);
        let (about, trust) = (key.about.replace('|', "\\|"), needs_trust(key.guard));
        page.push_str(&format!("| `{name}` | {what} | {default} | {about}{trust} |\n"));
    }
    for key in keys.iter().filter(|key| !key.shape.is_leaf()) {
        table(key, &format!("{path}.{}", key.name), page);
    }
}

fn needs_trust(guard: Guard) -> &'static str {
    match guard {
        Guard::Never => "",
        Guard::Always => " Needs [trust](trust.md).",
        Guard::Outside => " A path outside of the file's directory needs [trust](trust.md).",
    }
}
