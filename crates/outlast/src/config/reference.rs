//! `${NAME}` in a value: replaced from the environment, so that secrets need not be in a file.

use outlast_core::secret::{Part, Resolved};

/// The names that can be referred to.
pub(crate) struct References<'a> {
    pub environment: &'a dyn Fn(&str) -> Option<String>,
    /// Names with a fixed meaning in the files of some clients, such as `workspaceFolder`.
    pub places: Vec<(&'static str, String)>,
}

impl References<'_> {
    /// Replaces `${NAME}`, `${NAME:-otherwise}` and `${env:NAME}`; `$${` is `${`. The error is the cause and the fix,
    /// and contains no value of the environment.
    pub(crate) fn put_in(&self, written: &str) -> Result<Resolved, (String, String)> {
        let mut value = String::with_capacity(written.len());
        let mut parts = Vec::new();
        let mut rest = written;
        while let Some(at) = rest.find("${") {
            if rest[..at].ends_with('$') {
                value.push_str(&rest[..at - 1]);
                value.push_str("${");
                rest = &rest[at + 2..];
                continue;
            }
            value.push_str(&rest[..at]);
            let Some(end) = rest[at..].find('}') else {
                return Err((
                    "a `${` has no `}`".to_owned(),
                    "a reference is `${NAME}`; `$${` means `${` itself".to_owned(),
                ));
            };
            let inner = &rest[at + 2..at + end];
            rest = &rest[at + end + 1..];
            let (found, variable) = self.one(inner)?;
            let start = value.len();
            value.push_str(&found);
            parts.extend(variable.map(|name| Part { at: start..value.len(), name: name.to_owned() }));
        }
        value.push_str(rest);
        Ok(Resolved::new(value, parts))
    }

    /// The value of a reference, and the variable that it comes from.
    fn one<'w>(&self, inner: &'w str) -> Result<(String, Option<&'w str>), (String, String)> {
        if let Some((_, place)) = self.places.iter().find(|(name, _)| *name == inner) {
            return Ok((place.clone(), None));
        }
        if let Some(input) = inner.strip_prefix("input:") {
            let what = format!("`${{input:{input}}}` asks the user for a value, which a gateway cannot do");
            let hint = format!("put the value into the environment, and write `${{{}}}`", variable_for(input));
            return Err((what, hint));
        }
        let inner = inner.strip_prefix("env:").unwrap_or(inner);
        let (name, otherwise) = match inner.split_once(":-") {
            Some((name, otherwise)) => (name, Some(otherwise)),
            None => (inner, None),
        };
        let is_name = !name.is_empty()
            && !name.starts_with(|letter: char| letter.is_ascii_digit())
            && name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_');
        if !is_name {
            let what = format!("`${{{inner}}}` is not the name of an environment variable");
            return Err((what, "a reference is `${NAME}`; `$${` means `${` itself".to_owned()));
        }
        let found = (self.environment)(name).filter(|found| !(found.is_empty() && otherwise.is_some()));
        match (found, otherwise) {
            (Some(found), _) => Ok((found, Some(name))),
            (None, Some(otherwise)) => Ok((otherwise.to_owned(), None)),
            (None, None) => {
                let what = format!("the environment variable `{name}` is not set");
                Err((what, format!("set it before outlast starts, or write `${{{name}:-default}}`")))
            }
        }
    }
}

/// `github-token` in the form of a variable name.
fn variable_for(input: &str) -> String {
    input.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter.to_ascii_uppercase() } else { '_' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_replaced() {
        let environment = |name: &str| match name {
            "TOKEN" => Some("s3cret".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        };
        let references =
            References { environment: &environment, places: vec![("workspaceFolder", "/home/ann/project".to_owned())] };
        #[rustfmt::skip]
        let table = [
            ("plain",                      Ok("plain")),
            ("Bearer ${TOKEN}",            Ok("Bearer s3cret")),
            ("${TOKEN}${TOKEN}!",          Ok("s3crets3cret!")),
            ("${env:TOKEN}",               Ok("s3cret")),
            ("${TOKEN:-other}",            Ok("s3cret")),
            ("${NONE:-other}",             Ok("other")),
            ("${NONE:-}",                  Ok("")),
            ("${EMPTY}",                   Ok("")),
            ("${EMPTY:-other}",            Ok("other")),
            ("$${TOKEN}",                  Ok("${TOKEN}")),
            ("$TOKEN costs 5$",            Ok("$TOKEN costs 5$")),
            ("${workspaceFolder}/data",    Ok("/home/ann/project/data")),
            ("${NONE}",                    Err("the environment variable `NONE` is not set")),
            ("${TOKEN",                    Err("a `${` has no `}`")),
            ("${}",                        Err("`${}` is not the name of an environment variable")),
            ("${a-b}",                     Err("`${a-b}` is not the name of an environment variable")),
            ("${input:api-key}",           Err("`${input:api-key}` asks the user for a value, which a gateway cannot do")),
        ];
        for (written, wanted) in table {
            let got = references.put_in(written);
            let got = got.as_ref().map(Resolved::expose).map_err(|(what, _)| what.as_str());
            assert_eq!(got, wanted, "{written}");
        }
        // A value from the environment is known by its position; text of the file is no secret.
        let shown = |written: &str| references.put_in(written).expect("it can be put in").to_string();
        assert_eq!(shown("Bearer ${TOKEN}, ${env:TOKEN}!"), "Bearer ${TOKEN}, ${TOKEN}!");
        assert_eq!(shown("${NONE:-other} ${workspaceFolder}"), "other /home/ann/project");
        let hint = references.put_in("${input:api-key}").unwrap_err().1;
        assert_eq!(hint, "put the value into the environment, and write `${API_KEY}`");
    }
}
