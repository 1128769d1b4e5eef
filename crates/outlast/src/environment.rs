//! The environment of an agent: the same wherever outlast is started from.

use std::{
    env,
    ffi::{OsStr, OsString},
    path::Path,
};

/// What passes from our own environment. Names that end in `*` stand for all that begin so.
#[rustfmt::skip]
pub const PASSED: [&str; 66] = [
    // Who and where.
    "HOME", "USER", "LOGNAME", "SHELL", "PATH", "TMPDIR", "TZ", "HOSTNAME", "LANG", "LANGUAGE", "LC_*", "XDG_*",
    "EDITOR", "VISUAL", "PAGER", "DISPLAY", "WAYLAND_DISPLAY", "DBUS_SESSION_BUS_ADDRESS", "SSH_AUTH_SOCK",
    "SSH_CONNECTION", "SSH_TTY", "GPG_TTY", "BROWSER",
    // The terminal.
    "TERM", "COLORTERM", "TERM_PROGRAM", "TERM_PROGRAM_VERSION", "TERMINFO", "TERMINFO_DIRS", "TMUX", "TMUX_PANE",
    "STY", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "COLORFGBG", "VTE_VERSION", "KITTY_*", "WT_SESSION",
    // The network.
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS",
    // What the agents read.
    "ANTHROPIC_*", "CLAUDE_*", "DISABLE_*", "OPENAI_*", "CODEX_*", "GEMINI_*", "GOOGLE_*", "AWS_*", "AZURE_*",
    // The tools they call.
    "NVM_*", "VOLTA_HOME", "CARGO_HOME", "RUSTUP_HOME", "GOPATH", "JAVA_HOME", "VIRTUAL_ENV",
];

/// What passes on Windows besides: hardly any program starts without.
#[rustfmt::skip]
const PASSED_ON_WINDOWS: [&str; 27] = [
    "ALLUSERSPROFILE", "APPDATA", "COMMONPROGRAMFILES*", "COMPUTERNAME", "COMSPEC", "DRIVERDATA", "HOMEDRIVE", "HOMEPATH",
    "LOCALAPPDATA", "LOGONSERVER", "MSYSTEM", "NUMBER_OF_PROCESSORS", "OS", "PATHEXT", "PROCESSOR_*", "PROGRAMDATA",
    "PROGRAMFILES*", "PSMODULEPATH", "PUBLIC", "SESSIONNAME", "SYSTEMDRIVE", "SYSTEMROOT", "TEMP", "TMP", "USERDOMAIN*",
    "USERNAME", "USERPROFILE",
];

/// What is set for a session, whatever else is.
#[derive(Debug, Clone, Copy)]
pub struct About<'a> {
    pub session: &'a str,
    pub document: Option<&'a Path>,
    pub cwd: &'a Path,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the block at the top of the document makes no sense in line {line}: {what}")]
pub struct EnvironmentError {
    pub line: usize,
    pub what: String,
}

/// The whole environment, in this order: what passes, what the document sets, what we say of the session.
pub fn build(
    ours: impl IntoIterator<Item = (OsString, OsString)>,
    passed: &[String],
    document: &[(String, String, usize)],
    about: About<'_>,
) -> Result<Vec<(OsString, OsString)>, EnvironmentError> {
    let ours: Vec<(OsString, OsString)> = ours.into_iter().collect();
    let mut all: Vec<(OsString, OsString)> = ours.iter().filter(|(name, _)| passes(name, passed)).cloned().collect();
    let mut set = |name: &str, value: OsString| {
        all.retain(|(known, _)| !is_same(known, OsStr::new(name)));
        all.push((name.into(), value));
    };
    for (name, value, line) in document {
        let value = expand(value, &ours).map_err(|what| EnvironmentError { line: *line, what })?;
        set(name, value);
    }
    for name in ["OUTLAST_SESSION", "AGENT_DOC_SESSION"] {
        set(name, about.session.into());
    }
    if let Some(document) = about.document {
        for name in ["OUTLAST_DOCUMENT", "AGENT_DOC_DOCUMENT"] {
            set(name, document.into());
        }
    }
    set("PWD", about.cwd.into());
    Ok(all)
}

/// Our own, as it is at this moment.
pub fn ours() -> impl Iterator<Item = (OsString, OsString)> {
    env::vars_os()
}

fn passes(name: &OsStr, more: &[String]) -> bool {
    let Some(name) = name.to_str() else { return false };
    let fits = |pattern: &str| match pattern.strip_suffix('*') {
        Some(beginning) => {
            name.get(..beginning.len()).is_some_and(|start| is_same(OsStr::new(start), OsStr::new(beginning)))
        }
        None => is_same(OsStr::new(name), OsStr::new(pattern)),
    };
    let here: &[&str] = if cfg!(windows) { &PASSED_ON_WINDOWS } else { &[] };
    PASSED.iter().chain(here).any(|pattern| fits(pattern)) || more.iter().any(|pattern| fits(pattern))
}

/// Whether two names are one variable's.
fn is_same(one: &OsStr, other: &OsStr) -> bool {
    if cfg!(windows) { one.eq_ignore_ascii_case(other) } else { one == other }
}

/// `${NAME}` and `${NAME:-otherwise}`; a lone `$` stands for itself.
fn expand(text: &str, ours: &[(OsString, OsString)]) -> Result<OsString, String> {
    let mut value = OsString::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("${") {
        value.push(before);
        let Some((inside, after)) = after.split_once('}') else { return Err(format!("`{text}` has no closing brace")) };
        let (name, otherwise) = match inside.split_once(":-") {
            Some((name, otherwise)) => (name, Some(otherwise)),
            None => (inside, None),
        };
        let known = ours.iter().find(|(known, _)| is_same(known, OsStr::new(name))).map(|(_, value)| value.as_os_str());
        match (known, otherwise) {
            (Some(known), _) if !known.is_empty() || otherwise.is_none() => value.push(known),
            (_, Some(otherwise)) => value.push(otherwise),
            _ => return Err(format!("there is no variable `{name}` to put in")),
        }
        rest = after;
    }
    value.push(rest);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build_from(
        ours: &[(&str, &str)],
        passed: &[&str],
        document: &[(&str, &str)],
        path: Option<&str>,
    ) -> Result<Vec<String>, EnvironmentError> {
        let ours = ours.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
        let passed: Vec<String> = passed.iter().map(|&name| name.to_owned()).collect();
        let document: Vec<_> = document
            .iter()
            .enumerate()
            .map(|(at, (name, value))| (name.to_string(), value.to_string(), at + 3))
            .collect();
        let about = About { session: "s1", document: path.map(Path::new), cwd: Path::new("/docs") };
        let all = build(ours, &passed, &document, about)?;
        Ok(all.iter().map(|(name, value)| format!("{}={}", name.display(), value.display())).collect())
    }

    #[test]
    fn only_what_is_listed_passes() {
        let ours =
            [("HOME", "/h"), ("SECRET", "x"), ("LC_ALL", "C"), ("MINE", "1"), ("PWD", "/elsewhere"), ("MY_A", "2")];
        let all = build_from(&ours, &["MINE", "MY_*"], &[], None).unwrap();
        #[rustfmt::skip]
        assert_eq!(all, ["HOME=/h", "LC_ALL=C", "MINE=1", "MY_A=2", "OUTLAST_SESSION=s1", "AGENT_DOC_SESSION=s1",
            "PWD=/docs"]);
    }

    #[cfg(windows)]
    #[test]
    fn names_are_the_same_in_any_case_and_what_every_program_needs_passes() {
        let ours =
            [("Path", "p"), ("SystemRoot", "r"), ("CommonProgramFiles(x86)", "c"), ("Secret", "x"), ("my_a", "2")];
        let all = build_from(&ours, &["MY_*"], &[("PATH", "${path};q")], None).unwrap();
        #[rustfmt::skip]
        assert_eq!(all, ["SystemRoot=r", "CommonProgramFiles(x86)=c", "my_a=2", "PATH=p;q", "OUTLAST_SESSION=s1",
            "AGENT_DOC_SESSION=s1", "PWD=/docs"]);
    }

    #[test]
    fn the_document_adds_and_the_session_has_the_last_word() {
        let ours = [("HOME", "/h"), ("SECRET", "x"), ("EMPTY", "")];
        let document = [
            ("HOME", "${HOME}/inner"),
            ("TOKEN", "${SECRET}"),
            ("B", "${NONE:-other}${EMPTY:-one}${EMPTY}"),
            ("PRICE", "$5"),
            ("PWD", "/wrong"),
        ];
        let all = build_from(&ours, &[], &document, Some("/docs/plan.md")).unwrap();
        #[rustfmt::skip]
        assert_eq!(all, ["HOME=/h/inner", "TOKEN=x", "B=otherone", "PRICE=$5", "OUTLAST_SESSION=s1",
            "AGENT_DOC_SESSION=s1", "OUTLAST_DOCUMENT=/docs/plan.md", "AGENT_DOC_DOCUMENT=/docs/plan.md", "PWD=/docs"]);
    }

    #[test]
    fn what_is_not_there_is_an_error_with_its_line() {
        let error = build_from(&[], &[], &[("A", "x"), ("B", "${NONE}")], None).unwrap_err();
        assert_eq!((error.line, error.what.as_str()), (4, "there is no variable `NONE` to put in"));
        let error = build_from(&[], &[], &[("A", "${NONE")], None).unwrap_err();
        assert_eq!(error.what, "`${NONE` has no closing brace");
    }
}
