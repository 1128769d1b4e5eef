//! The reference page of the book, from the list of keys. A test holds `docs/configuration.md` to it.

use super::keys::{Guard, Key, ROOT, Shape};

const BEGINNING: &str = include_str!("pages/beginning.md");

/// The whole page.
pub fn page() -> String {
    let mut page = BEGINNING.to_owned();
    for key in ROOT {
        table(key, key.name, &mut page);
    }
    page
}

fn table(key: &Key, path: &str, page: &mut String) {
    let Some(keys) = key.shape.inner() else { return };
    let title = match key.shape {
        Shape::Named(_) => format!("[{path}.NAME]"),
        Shape::Many(_) => format!("[[{path}]]"),
        _ => format!("[{path}]"),
    };
    let trust = needs_trust(key.guard);
    page.push_str(&format!(
        "\n## `{title}`\n\n{}{trust}\n\n| key | value | default | |\n|---|---|---|---|\n",
        key.about
    ));
    for key in keys.iter().filter(|key| key.shape.inner().is_none()) {
        let default = if key.default.is_empty() { String::new() } else { format!("`{}`", key.default) };
        let (name, what) = (key.name, what(key.shape));
        let (about, trust) = (key.about.replace('|', "\\|"), needs_trust(key.guard));
        page.push_str(&format!("| `{name}` | {what} | {default} | {about}{trust} |\n"));
    }
    for key in keys.iter().filter(|key| key.shape.inner().is_some()) {
        table(key, &format!("{path}.{}", key.name), page);
    }
}

fn needs_trust(guard: Guard) -> &'static str {
    match guard {
        Guard::Never => "",
        Guard::Always => " Needs [trust](trust.md).",
        Guard::Outside => " Outside of the file's directory it needs [trust](trust.md).",
    }
}

fn what(shape: Shape) -> String {
    let choices =
        |choices: &[&str]| choices.iter().map(|choice| format!("`\"{choice}\"`")).collect::<Vec<_>>().join(", ");
    match shape {
        Shape::Text => "text".to_owned(),
        Shape::Path => "path".to_owned(),
        Shape::Paths => "paths".to_owned(),
        Shape::Texts => "texts".to_owned(),
        Shape::Patterns => "patterns".to_owned(),
        Shape::Pairs => "table of texts".to_owned(),
        Shape::Count { .. } => "number".to_owned(),
        Shape::Truth => "`true`, `false`".to_owned(),
        Shape::Span => "time".to_owned(),
        Shape::Size => "size".to_owned(),
        Shape::Address => "address".to_owned(),
        Shape::Choice(values) => choices(values),
        Shape::Choices(values) => format!("list of {}", choices(values)),
        Shape::Children => "`\"shared\"`, `\"per_session\"`, `{ pool = 4 }`".to_owned(),
        Shape::Ports { .. } => "ports, `\"any\"`".to_owned(),
        Shape::Table(_) | Shape::Named(_) | Shape::Many(_) => String::new(),
    }
}
