//! The frontmatter of a document: the settings of its session between two `---` at the top of a Markdown file.
//!
//! Only the settings of outlast are read, in a simple form: `key: value`, and one level of names under `env:`. Other
//! keys belong to other programs and are ignored.

use std::{
    io::{self, BufRead, BufReader, Read},
    path::Path,
};

/// A longer block is ignored.
const BLOCK_MAX: u64 = 64 << 10;

#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Frontmatter {
    pub cwd: Option<String>,
    pub session: Option<String>,
    /// Names and values as written, each with its line number.
    pub env: Vec<(String, String, usize)>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum FrontmatterError {
    #[error("cannot read the document {path}")]
    Unreadable { path: String, source: io::Error },
    #[error("the front matter of {path} has an error in line {line}: {what}")]
    Nonsense { path: String, line: usize, what: String },
}

impl FrontmatterError {
    pub(crate) fn hint(&self) -> Option<String> {
        match self {
            FrontmatterError::Unreadable { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                Some("the document is the argument before `--`; the agent's command follows `--`".to_owned())
            }
            FrontmatterError::Unreadable { .. } => None,
            FrontmatterError::Nonsense { .. } => {
                Some("front matter has lines of `key: value` between two lines of `---`".to_owned())
            }
        }
    }
}

pub(crate) fn read(document: &Path) -> Result<Frontmatter, FrontmatterError> {
    let path = document.display().to_string();
    let unreadable = |source| FrontmatterError::Unreadable { path: path.clone(), source };
    let mut block = Vec::new();
    let mut lines = BufReader::new(outlast_os::open_named(document).map_err(unreadable)?.take(BLOCK_MAX));
    let mut line = Vec::new();
    loop {
        line.clear();
        if lines.read_until(b'\n', &mut line).map_err(unreadable)? == 0 {
            break;
        }
        let text = String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']).to_owned();
        let is_first = block.is_empty();
        let text = if is_first { text.trim_start_matches('\u{feff}').to_owned() } else { text };
        if is_first && text != "---" {
            return Ok(Frontmatter::default());
        }
        block.push(text);
        if !is_first && matches!(block.last().map(String::as_str), Some("---" | "...")) {
            return parse(&block[1..block.len() - 1]).map_err(|(line, what)| FrontmatterError::Nonsense {
                path,
                line: line + 2,
                what,
            });
        }
    }
    match block.len() {
        0 => Ok(Frontmatter::default()),
        _ => Err(FrontmatterError::Nonsense {
            path,
            line: 1,
            what: "the front matter that begins here has no end".into(),
        }),
    }
}

/// An error carries its line number within the block, from 0.
fn parse(block: &[String]) -> Result<Frontmatter, (usize, String)> {
    let mut found = Frontmatter::default();
    let mut ours = [None, None];
    let mut theirs = [None, None];
    let mut in_env = false;
    for (number, line) in block.iter().enumerate() {
        let fail = |what: String| Err((number, what));
        let text = line.trim_start();
        if text.is_empty() || text.starts_with('#') {
            continue;
        }
        if line.starts_with([' ', '\t']) {
            if in_env {
                let Some((name, value)) = text.split_once(':') else {
                    return fail(format!("`{text}` is not `NAME: value`"));
                };
                let name = name.trim();
                if !is_name(name) {
                    return fail(format!("`{name}` is not a valid name of a variable"));
                }
                let value = scalar(value).map_err(|what| (number, what))?;
                found.env.push((name.to_owned(), value, number + 2));
            }
            continue;
        }
        in_env = false;
        // The items of a list need not be indented under their key.
        if text.starts_with("- ") || text == "-" {
            continue;
        }
        let Some((key, value)) = line.split_once(':') else {
            return fail(format!("`{line}` is not `key: value`"));
        };
        let value = value.trim();
        let slot = match key.trim() {
            "env" => match value.split('#').next().unwrap_or_default().trim() {
                "" | "{}" => {
                    in_env = true;
                    continue;
                }
                _ => return fail("write each variable of `env` on a line of its own, indented".to_owned()),
            },
            "outlast_cwd" => &mut ours[0],
            "outlast_session" => &mut ours[1],
            "agent_doc_cwd" => &mut theirs[0],
            "agent_doc_session" => &mut theirs[1],
            _ => continue,
        };
        let value = scalar(value).map_err(|what| (number, what))?;
        if value.is_empty() {
            return fail(format!("`{}` has no value", key.trim()));
        }
        *slot = Some(value);
    }
    let [ours_cwd, ours_session] = ours;
    let [theirs_cwd, theirs_session] = theirs;
    found.cwd = ours_cwd.or(theirs_cwd);
    found.session = ours_session.or(theirs_session);
    Ok(found)
}

fn is_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|letter: char| letter.is_ascii_digit())
        && name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
}

/// A scalar value: plain, or in single or double quotes.
fn scalar(text: &str) -> Result<String, String> {
    let text = text.trim();
    let Some(quote) = text.chars().next().filter(|first| matches!(first, '"' | '\'')) else {
        if text.starts_with(['{', '[', '|', '>', '&', '*', '!']) {
            return Err(format!("`{text}` is not a plain value; put it in quotes if it is one"));
        }
        // A comment starts after white space.
        let end = text.match_indices('#').find(|(at, _)| *at == 0 || text[..*at].ends_with([' ', '\t']));
        return Ok(text[..end.map_or(text.len(), |(at, _)| at)].trim_end().to_owned());
    };
    let mut value = String::new();
    let mut letters = text[1..].chars().peekable();
    loop {
        match letters.next() {
            None => return Err(format!("`{text}` has no closing quote")),
            Some('\'') if quote == '\'' && letters.peek() == Some(&'\'') => {
                letters.next();
                value.push('\'');
            }
            Some('\\') if quote == '"' => match letters.next() {
                Some('n') => value.push('\n'),
                Some('t') => value.push('\t'),
                Some(letter @ ('"' | '\\' | '/')) => value.push(letter),
                _ => return Err(format!("`{text}` has an unknown escape")),
            },
            Some(letter) if letter == quote => break,
            Some(letter) => value.push(letter),
        }
    }
    let rest: String = letters.collect();
    let rest = rest.trim();
    if rest.is_empty() || rest.starts_with('#') { Ok(value) } else { Err(format!("`{rest}` follows the value")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Frontmatter, FrontmatterError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("plan.md");
        std::fs::write(&path, text).unwrap();
        read(&path)
    }

    #[test]
    fn our_keys_are_found_among_others() {
        let text = "\u{feff}---\r\ntitle: A plan: with a colon\r\ntags:\r\n- one\r\n  - two\r\nagent_doc_cwd: ../x\r\n\
            outlast_cwd: 'it''s here' # ours counts\r\nagent_doc_session: abc\r\n# a comment\r\nenv:\r\n  A: 1\r\n\
            \x20 B: \"two \\\"words\\\" # no comment\"\r\n\r\n  C: ${HOME}/x # a comment\r\n  D:\r\nother:\r\n  E: no\r\n\
            ---\r\nenv:\r\n";
        let found = of(text).unwrap();
        assert_eq!((found.cwd.as_deref(), found.session.as_deref()), (Some("it's here"), Some("abc")));
        let env: Vec<_> = found.env.iter().map(|(name, value, line)| (name.as_str(), value.as_str(), *line)).collect();
        assert_eq!(
            env,
            [("A", "1", 11), ("B", "two \"words\" # no comment", 12), ("C", "${HOME}/x", 14), ("D", "", 15)]
        );
    }

    #[test]
    fn a_document_without_frontmatter_has_no_settings() {
        for text in ["", "# Title\n---\nenv:\n", "----\na: b\n", "---\n---\n"] {
            assert_eq!(of(text).unwrap(), Frontmatter::default(), "{text:?}");
        }
    }

    #[test]
    fn an_invalid_value_is_reported_with_its_line() {
        let mut words = String::new();
        for text in [
            "---\ntitle: x\n",
            "---\n\njust words\n---\n",
            "---\nenv: {A: 1}\n---\n",
            "---\nenv:\n  A 1\n---\n",
            "---\nenv:\n  1A: x\n---\n",
            "---\nenv:\n  A: [1]\n---\n",
            "---\nenv:\n  A: \"x\n---\n",
            "---\nenv:\n  A: 'x' y\n---\n",
            "---\noutlast_cwd:\n---\n",
        ] {
            let error = of(text).unwrap_err().to_string();
            words.push_str(&error[error.find("plan.md").unwrap()..]);
            words.push('\n');
        }
        insta::assert_snapshot!(words, @r#"
        plan.md has an error in line 1: the front matter that begins here has no end
        plan.md has an error in line 3: `just words` is not `key: value`
        plan.md has an error in line 2: write each variable of `env` on a line of its own, indented
        plan.md has an error in line 3: `A 1` is not `NAME: value`
        plan.md has an error in line 3: `1A` is not a valid name of a variable
        plan.md has an error in line 3: `[1]` is not a plain value; put it in quotes if it is one
        plan.md has an error in line 3: `"x` has no closing quote
        plan.md has an error in line 3: `y` follows the value
        plan.md has an error in line 2: `outlast_cwd` has no value
        "#);
    }
}
