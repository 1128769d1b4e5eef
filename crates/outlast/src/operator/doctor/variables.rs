//! The variables that clients fill into a configuration before they start a server.

use std::{env, path::Path};

pub(super) struct Variables<'a> {
    pub folder: &'a Path,
    pub home: &'a Path,
}

impl Variables<'_> {
    /// Fills in `${NAME}`, `${NAME:-instead}`, `${env:NAME}`, `${workspaceFolder}` and `${userHome}`. The error names
    /// the variable that has no value here.
    pub(super) fn fill(&self, text: &str) -> Result<String, String> {
        let mut filled = String::new();
        let mut rest = text;
        while let Some(at) = rest.find("${") {
            filled.push_str(&rest[..at]);
            let Some(end) = rest[at..].find('}').map(|end| at + end) else { break };
            filled.push_str(&self.value(&rest[at + 2..end])?);
            rest = &rest[end + 1..];
        }
        filled.push_str(rest);
        Ok(filled)
    }

    fn value(&self, name: &str) -> Result<String, String> {
        match name {
            "workspaceFolder" | "workspaceRoot" => return Ok(self.folder.display().to_string()),
            "userHome" => return Ok(self.home.display().to_string()),
            "pathSeparator" | "/" => return Ok(std::path::MAIN_SEPARATOR.to_string()),
            name if name.starts_with("input:") => return Err("its client asks for a value first".to_owned()),
            _ => {}
        }
        let name = name.strip_prefix("env:").unwrap_or(name);
        let (name, instead) = match name.split_once(":-") {
            Some((name, instead)) => (name, Some(instead)),
            None => (name, None),
        };
        env::var(name).ok().or(instead.map(str::to_owned)).ok_or_else(|| format!("`{name}` is not set here"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_filled_in_as_clients_do() {
        let variables = Variables { folder: Path::new("/srv/app"), home: Path::new("/home/me") };
        let path = env::var("PATH").unwrap();
        let table = [
            ("plain $5 {x}", Ok("plain $5 {x}".to_owned())),
            ("${workspaceFolder}/bin:${userHome}", Ok("/srv/app/bin:/home/me".to_owned())),
            ("${PATH}", Ok(path.clone())),
            ("a${env:PATH}b", Ok(format!("a{path}b"))),
            ("${OUTLAST_NO_SUCH:-x}", Ok("x".to_owned())),
            ("${OUTLAST_NO_SUCH}", Err("`OUTLAST_NO_SUCH` is not set here".to_owned())),
            ("${input:token}", Err("its client asks for a value first".to_owned())),
            ("${open", Ok("${open".to_owned())),
        ];
        for (text, filled) in table {
            assert_eq!(variables.fill(text), filled, "{text}");
        }
    }
}
