//! `${NAME}` in a value: put in from the environment, so that no secret need stand in a file.

use outlast_core::secret::Part;

/// What may be referred to.
pub struct References<'a> {
    pub environment: &'a dyn Fn(&str) -> Option<String>,
    /// Names with a fixed meaning in the files of some clients, such as `workspaceFolder`.
    pub places: Vec<(&'static str, String)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    pub value: String,
    /// Those that were put in.
    pub variables: Vec<String>,
    /// Where they are in the value.
    pub parts: Vec<Part>,
}

impl References<'_> {
    /// `${NAME}`, `${NAME:-otherwise}` and `${env:NAME}` become what they stand for; `$${` is `${`. The error is what is
    /// wrong, and the fix. No value of the environment is in it.
    pub fn put_in(&self, written: &str) -> Result<Reference, (String, String)> {
        let mut value = String::with_capacity(written.len());
        let mut variables = Vec::new();
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
                    "a reference is `${NAME}`; `$${` stands for `${` itself".to_owned(),
                ));
            };
            let inner = &rest[at + 2..at + end];
            rest = &rest[at + end + 1..];
            let (start, count) = (value.len(), variables.len());
            self.one(inner, &mut value, &mut variables)?;
            parts.extend(variables.get(count).map(|name| Part { at: start..value.len(), name: name.clone() }));
        }
        value.push_str(rest);
        Ok(Reference { value, variables, parts })
    }

    fn one(&self, inner: &str, value: &mut String, variables: &mut Vec<String>) -> Result<(), (String, String)> {
        if let Some((_, place)) = self.places.iter().find(|(name, _)| *name == inner) {
            value.push_str(place);
            return Ok(());
        }
        if let Some(input) = inner.strip_prefix("input:") {
            let what = format!("`${{input:{input}}}` asks a person, and there is nobody to ask");
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
            let what = format!("`${{{inner}}}` names no variable of the environment");
            return Err((what, "a reference is `${NAME}`; `$${` stands for `${` itself".to_owned()));
        }
        let found = (self.environment)(name).filter(|found| !(found.is_empty() && otherwise.is_some()));
        match (found, otherwise) {
            (Some(found), _) => {
                variables.push(name.to_owned());
                value.push_str(&found);
            }
            (None, Some(otherwise)) => value.push_str(otherwise),
            (None, None) => {
                let what = format!("the environment has no variable `{name}`");
                return Err((what, format!("set it before outlast starts, or write `${{{name}:-otherwise}}`")));
            }
        }
        Ok(())
    }
}

/// `github-token` as a variable would be called.
fn variable_for(input: &str) -> String {
    input.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter.to_ascii_uppercase() } else { '_' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_become_what_they_stand_for() {
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
            ("${NONE}",                    Err("the environment has no variable `NONE`")),
            ("${TOKEN",                    Err("a `${` has no `}`")),
            ("${}",                        Err("`${}` names no variable of the environment")),
            ("${a-b}",                     Err("`${a-b}` names no variable of the environment")),
            ("${input:api-key}",           Err("`${input:api-key}` asks a person, and there is nobody to ask")),
        ];
        for (written, wanted) in table {
            let got = references.put_in(written);
            let got = got.as_ref().map(|got| got.value.as_str()).map_err(|(what, _)| what.as_str());
            assert_eq!(got, wanted, "{written}");
        }
        // What came from the environment is known by its place; what stands in the file is no secret.
        let shown = |written: &str| {
            let got = references.put_in(written).expect("it can be put in");
            outlast_core::secret::Resolved::new(got.value, got.parts).to_string()
        };
        assert_eq!(shown("Bearer ${TOKEN}, ${env:TOKEN}!"), "Bearer ${TOKEN}, ${TOKEN}!");
        assert_eq!(shown("${NONE:-other} ${workspaceFolder}"), "other /home/ann/project");
        let hint = references.put_in("${input:api-key}").unwrap_err().1;
        assert_eq!(hint, "put the value into the environment, and write `${API_KEY}`");
    }
}
