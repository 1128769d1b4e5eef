//! The environment of an agent or a backend: the same wherever outlast is started from, with the names of the variables
//! that were left out. It does not start processes.

use std::{
    env,
    ffi::{OsStr, OsString},
    path::Path,
};

use outlast_os as os;

mod configured;

/// Variables of outlast's own environment that every agent gets. `*` stands for any characters.
#[rustfmt::skip]
pub(crate) const PASSED: [&str; 74] = [
    // Set by a shell for each of its commands.
    "OLDPWD", "SHLVL", "_", "LS_COLORS", "LESSOPEN", "LESSCLOSE", "MAIL", "SSH_CLIENT",
    // The user and the machine.
    "HOME", "USER", "LOGNAME", "SHELL", "PATH", "TMPDIR", "TZ", "HOSTNAME", "LANG", "LANGUAGE", "LC_*", "XDG_*",
    "EDITOR", "VISUAL", "PAGER", "DISPLAY", "WAYLAND_DISPLAY", "DBUS_SESSION_BUS_ADDRESS", "SSH_AUTH_SOCK",
    "SSH_CONNECTION", "SSH_TTY", "GPG_TTY", "BROWSER",
    // The terminal.
    "TERM", "COLORTERM", "TERM_PROGRAM", "TERM_PROGRAM_VERSION", "TERMINFO", "TERMINFO_DIRS", "TMUX", "TMUX_PANE",
    "STY", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "COLORFGBG", "VTE_VERSION", "KITTY_*", "WT_SESSION",
    // The network.
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS",
    // Read by the agents.
    "ANTHROPIC_*", "CLAUDE_*", "DISABLE_*", "OPENAI_*", "CODEX_*", "GEMINI_*", "GOOGLE_*", "AWS_*", "AZURE_*",
    // Read by the tools that agents call.
    "NVM_*", "VOLTA_HOME", "CARGO_HOME", "RUSTUP_HOME", "GOPATH", "JAVA_HOME", "VIRTUAL_ENV",
];

/// Those of them that belong to one login or one terminal: a restored session has others, or none.
#[rustfmt::skip]
const OF_ONE_TERMINAL: [&str; 37] = [
    "OLDPWD", "SHLVL", "_", "LS_COLORS", "LESSOPEN", "LESSCLOSE", "MAIL", "SSH_*", "PWD", "SHELL", "HOSTNAME", "XDG_*",
    "DISPLAY", "WAYLAND_DISPLAY", "DBUS_SESSION_BUS_ADDRESS", "GPG_TTY", "TERM", "COLORTERM", "TERM_PROGRAM",
    "TERM_PROGRAM_VERSION", "TERMINFO", "TERMINFO_DIRS", "TMUX", "TMUX_PANE", "STY", "NO_COLOR", "FORCE_COLOR", "CLICOLOR",
    "COLORFGBG", "VTE_VERSION", "KITTY_*", "WT_SESSION", "COLUMNS", "LINES", "OUTLAST_*", "AGENT_DOC_*", "PAGER",
];

/// Those of them with keys and settings of agents and their models: a server behind the gateway does not get them.
#[rustfmt::skip]
pub(crate) const FOR_AGENTS: [&str; 9] = [
    "ANTHROPIC_*", "CLAUDE_*", "DISABLE_*", "OPENAI_*", "CODEX_*", "GEMINI_*", "GOOGLE_*", "AWS_*", "AZURE_*",
];

/// In addition, for an agent with a profile.
#[rustfmt::skip]
pub(crate) const PASSED_TO_AGENTS: [&str; 5] = ["IS_SANDBOX", "*_API_KEY", "OTEL_*", "GH_TOKEN", "GITHUB_TOKEN"];

/// For claude: its limits on thinking and tools, and its connection to models.
#[rustfmt::skip]
pub(crate) const PASSED_TO_CLAUDE: [&str; 13] = [
    "MAX_THINKING_TOKENS", "MAX_MCP_OUTPUT_TOKENS", "MCP_*", "BASH_DEFAULT_TIMEOUT_MS", "BASH_MAX_TIMEOUT_MS",
    "BASH_MAX_OUTPUT_LENGTH", "TASK_MAX_OUTPUT_LENGTH", "SLASH_COMMAND_TOOL_CHAR_BUDGET", "API_TIMEOUT_MS", "ENABLE_*",
    "USE_BUILTIN_RIPGREP", "VERTEX_REGION_*", "CLOUD_ML_REGION",
];

/// For codex: its log.
pub(crate) const PASSED_TO_CODEX: [&str; 2] = ["RUST_LOG", "LOG_FORMAT"];

/// Variables that are not reported as left out: the agent's process gets a tag of its own, and its terminal has the
/// size that these give.
const REPLACED: [&str; 3] = [os::CHILD_TAG, "COLUMNS", "LINES"];

/// The terminal type of an agent whose environment has none: the type that outlast's terminal model implements.
const TERM_DEFAULT: &str = "xterm-256color";

/// Additional variables on Windows: most programs do not start without them.
#[rustfmt::skip]
const PASSED_ON_WINDOWS: [&str; 27] = [
    "ALLUSERSPROFILE", "APPDATA", "COMMONPROGRAMFILES*", "COMPUTERNAME", "COMSPEC", "DRIVERDATA", "HOMEDRIVE", "HOMEPATH",
    "LOCALAPPDATA", "LOGONSERVER", "MSYSTEM", "NUMBER_OF_PROCESSORS", "OS", "PATHEXT", "PROCESSOR_*", "PROGRAMDATA",
    "PROGRAMFILES*", "PSMODULEPATH", "PUBLIC", "SESSIONNAME", "SYSTEMDRIVE", "SYSTEMROOT", "TEMP", "TMP", "USERDOMAIN*",
    "USERNAME", "USERPROFILE",
];

/// Variables of the session, which override all others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SessionVariables<'a> {
    pub session: &'a str,
    pub document: Option<&'a Path>,
    pub cwd: &'a Path,
}

/// The profile of an agent, as far as its environment is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    Claude,
    Codex,
    None,
}

impl Profile {
    pub(crate) fn of(program: &str) -> Profile {
        let name = program.rsplit(['/', '\\']).next().unwrap_or(program);
        match name.strip_suffix(".exe").unwrap_or(name) {
            "claude" => Profile::Claude,
            "codex" => Profile::Codex,
            _ => Profile::None,
        }
    }

    fn patterns(self) -> impl Iterator<Item = &'static str> {
        let (agents, own): (&[&str], &[&str]) = match self {
            Profile::Claude => (&PASSED_TO_AGENTS, &PASSED_TO_CLAUDE),
            Profile::Codex => (&PASSED_TO_AGENTS, &PASSED_TO_CODEX),
            Profile::None => (&[], &[]),
        };
        agents.iter().chain(own).copied()
    }
}

/// The agent whose environment is built.
#[derive(Debug, Clone, Copy)]
pub(crate) struct For<'a> {
    pub profile: Profile,
    pub args: &'a [String],
    /// Names that the user adds: `--env-pass`.
    pub passed: &'a [String],
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Environment {
    pub all: Vec<(OsString, OsString)>,
    /// Names of outlast's variables that the agent does not get, in order.
    pub left_out: Vec<String>,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the front matter of the document has an error in line {line}: {what}")]
pub(crate) struct EnvironmentError {
    pub line: usize,
    pub what: String,
}

/// The whole environment, in this order: variables that pass, variables of the document, variables of the session.
pub(crate) fn build(
    ours: impl IntoIterator<Item = (OsString, OsString)>,
    agent: For<'_>,
    document: &[(String, String, usize)],
    about: SessionVariables<'_>,
) -> Result<Environment, EnvironmentError> {
    let ours: Vec<(OsString, OsString)> = ours.into_iter().collect();
    let configured = configured::names(agent.profile, agent.args, about.cwd, &ours);
    let passes = |name: &OsStr| {
        is_listed(name, agent) || name.to_str().is_some_and(|name| configured.iter().any(|known| known == name))
    };
    let mut all: Vec<(OsString, OsString)> = ours.iter().filter(|(name, _)| passes(name)).cloned().collect();
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
    if cfg!(unix) && all.iter().all(|(name, value)| name != "TERM" || value.is_empty()) {
        all.retain(|(name, _)| name != "TERM");
        all.push(("TERM".into(), TERM_DEFAULT.into()));
    }
    let left_out = left_out(&ours, &all);
    Ok(Environment { all, left_out })
}

/// Names of variables that an agent got from outlast's environment and that do not belong to one login or terminal: those
/// that a restored session needs again.
pub(crate) fn worth_restoring(all: &[(OsString, OsString)]) -> Vec<String> {
    let is_of_one_terminal = |name: &str| OF_ONE_TERMINAL.iter().any(|pattern| fits(pattern, name));
    let names = all.iter().filter(|(name, value)| env::var_os(name).as_ref() == Some(value));
    let mut names: Vec<String> = names.filter_map(|(name, _)| name.to_str().map(str::to_owned)).collect();
    names.retain(|name| !is_of_one_terminal(name));
    names.sort_unstable();
    names
}

/// The environment of a server behind the gateway: variables that pass, and those of its configuration. It does not get
/// secrets of the gateway, such as the key of tokens.
pub(crate) fn of_backend(
    ours: impl IntoIterator<Item = (OsString, OsString)>,
    configured: impl IntoIterator<Item = (OsString, OsString)>,
    cwd: &Path,
) -> Environment {
    let nothing = For { profile: Profile::None, args: &[], passed: &[] };
    let is_for_agents =
        |name: &OsStr| name.to_str().is_some_and(|name| FOR_AGENTS.iter().any(|pattern| fits(pattern, name)));
    let passes = |name: &OsStr| is_listed(name, nothing) && !is_for_agents(name);
    let ours: Vec<(OsString, OsString)> = ours.into_iter().collect();
    let mut all: Vec<(OsString, OsString)> = ours.iter().filter(|(name, _)| passes(name)).cloned().collect();
    for (name, value) in [("PWD".into(), cwd.into())].into_iter().chain(configured) {
        all.retain(|(known, _)| !is_same(known, &name));
        all.push((name, value));
    }
    let left_out = left_out(&ours, &all);
    Environment { all, left_out }
}

fn left_out(ours: &[(OsString, OsString)], all: &[(OsString, OsString)]) -> Vec<String> {
    let is_there =
        |name: &OsStr| REPLACED.iter().any(|known| name == *known) || all.iter().any(|(known, _)| is_same(known, name));
    let left_out = ours.iter().map(|(name, _)| name).filter(|name| !is_there(name));
    let mut left_out: Vec<String> = left_out.map(|name| name.to_string_lossy().into_owned()).collect();
    left_out.sort_unstable();
    left_out
}

/// The log line that names the variables a backend did not get, and how to pass them. `None` if none was left out.
pub(crate) fn left_out_of_backend_in_words(left_out: &[String]) -> Option<String> {
    let all = format!(
        "variables not passed to it: {}; `env` in its table passes one, `inherit_env = true` all",
        left_out.join(", ")
    );
    (!left_out.is_empty()).then_some(all)
}

/// The most names in the line at the start; `state` and the log have all of them.
const NAMED_MAX: usize = 16;

/// The line at the start that names the variables that were left out, and how to pass them. `None` if none was left
/// out.
pub(crate) fn left_out_in_words(program: &str, left_out: &[String]) -> Option<String> {
    let named = left_out.iter().take(NAMED_MAX).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = match left_out.len().saturating_sub(NAMED_MAX) {
        0 => String::new(),
        more => format!(" and {more} more (`outlast state` lists them)"),
    };
    let all = format!("variables not passed to {program}: {named}{more}; {HOW_TO_PASS}");
    (!left_out.is_empty()).then_some(all)
}

pub(crate) const HOW_TO_PASS: &str = "`--env-pass NAME` passes one, `--env-pass '*'` all";

/// The environment of outlast itself, at this moment.
pub(crate) fn ours() -> impl Iterator<Item = (OsString, OsString)> {
    env::vars_os()
}

fn is_listed(name: &OsStr, agent: For<'_>) -> bool {
    // A name that is not UTF-8 matches only `*`.
    let Some(text) = name.to_str() else { return agent.passed.iter().any(|pattern| pattern == ANYTHING) };
    let here: &[&str] = if cfg!(windows) { &PASSED_ON_WINDOWS } else { &[] };
    let mut listed = PASSED.iter().chain(here).copied().chain(agent.profile.patterns());
    listed.any(|pattern| fits(pattern, text)) || agent.passed.iter().any(|pattern| fits(pattern, text))
}

/// The pattern that passes everything.
pub(crate) const ANYTHING: &str = "*";

/// `*` stands for any characters, at the start, at the end, or at both.
fn fits(pattern: &str, name: &str) -> bool {
    let (pattern, name) = match cfg!(windows) {
        true => (pattern.to_ascii_uppercase(), name.to_ascii_uppercase()),
        false => (pattern.to_owned(), name.to_owned()),
    };
    let (inside, is_open_before) = pattern.strip_prefix('*').map_or((pattern.as_str(), false), |rest| (rest, true));
    let (inside, is_open_after) = inside.strip_suffix('*').map_or((inside, false), |rest| (rest, true));
    match (is_open_before, is_open_after) {
        (false, false) => name == inside,
        (true, false) => name.ends_with(inside),
        (false, true) => name.starts_with(inside),
        (true, true) => name.contains(inside),
    }
}

/// Whether two names mean the same variable.
fn is_same(one: &OsStr, other: &OsStr) -> bool {
    if cfg!(windows) { one.eq_ignore_ascii_case(other) } else { one == other }
}

/// `${NAME}` and `${NAME:-otherwise}`; a single `$` stands for itself.
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
            _ => return Err(format!("the environment variable `{name}` is not set")),
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
        let about = SessionVariables { session: "s1", document: path.map(Path::new), cwd: Path::new("/docs") };
        let agent = For { profile: Profile::None, args: &[], passed: &passed };
        let built = build(ours, agent, &document, about)?;
        Ok(built.all.iter().map(|(name, value)| format!("{}={}", name.display(), value.display())).collect())
    }

    #[test]
    fn only_listed_variables_are_passed() {
        let ours = [
            ("TERM", "t"),
            ("HOME", "/h"),
            ("SECRET", "x"),
            ("LC_ALL", "C"),
            ("MINE", "1"),
            ("PWD", "/elsewhere"),
            ("MY_A", "2"),
        ];
        let all = build_from(&ours, &["MINE", "MY_*"], &[], None).unwrap();
        #[rustfmt::skip]
        assert_eq!(all, ["TERM=t", "HOME=/h", "LC_ALL=C", "MINE=1", "MY_A=2", "OUTLAST_SESSION=s1", "AGENT_DOC_SESSION=s1",
            "PWD=/docs"]);
    }

    #[cfg(windows)]
    #[test]
    fn names_ignore_case_and_system_variables_pass() {
        let ours =
            [("Path", "p"), ("SystemRoot", "r"), ("CommonProgramFiles(x86)", "c"), ("Secret", "x"), ("my_a", "2")];
        let all = build_from(&ours, &["MY_*"], &[("PATH", "${path};q")], None).unwrap();
        #[rustfmt::skip]
        assert_eq!(all, ["SystemRoot=r", "CommonProgramFiles(x86)=c", "my_a=2", "PATH=p;q", "OUTLAST_SESSION=s1",
            "AGENT_DOC_SESSION=s1", "PWD=/docs"]);
    }

    #[test]
    fn the_document_adds_variables_and_the_session_overrides_them() {
        let ours = [("TERM", "t"), ("HOME", "/h"), ("SECRET", "x"), ("EMPTY", "")];
        let document = [
            ("HOME", "${HOME}/inner"),
            ("TOKEN", "${SECRET}"),
            ("B", "${NONE:-other}${EMPTY:-one}${EMPTY}"),
            ("PRICE", "$5"),
            ("PWD", "/wrong"),
        ];
        let all = build_from(&ours, &[], &document, Some("/docs/plan.md")).unwrap();
        #[rustfmt::skip]
        assert_eq!(all, ["TERM=t", "HOME=/h/inner", "TOKEN=x", "B=otherone", "PRICE=$5", "OUTLAST_SESSION=s1",
            "AGENT_DOC_SESSION=s1", "OUTLAST_DOCUMENT=/docs/plan.md", "AGENT_DOC_DOCUMENT=/docs/plan.md", "PWD=/docs"]);
    }

    fn built(ours: &[(&str, &str)], profile: Profile, passed: &[&str]) -> Environment {
        let ours = ours.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
        let passed: Vec<String> = passed.iter().map(|&name| name.to_owned()).collect();
        let document = [("SET".to_owned(), "x".to_owned(), 1)];
        let about = SessionVariables { session: "s1", document: None, cwd: Path::new("/docs") };
        build(ours, For { profile, args: &[], passed: &passed }, &document, about).unwrap()
    }

    #[test]
    fn variables_that_are_left_out_are_named() {
        let ours = [
            ("PWD", "/elsewhere"),
            ("SECRET", "x"),
            ("HOME", "/h"),
            ("OUTLAST_CHILD", "a.1"),
            ("COLUMNS", "80"),
            ("SET", "by the document"),
            ("OUTLAST_SESSION", "another"),
            ("IS_SANDBOX", "1"),
            ("MAX_THINKING_TOKENS", "9"),
            ("RUST_LOG", "info"),
            ("DEEPSEEK_API_KEY", "k"),
            ("GH_TOKEN", "t"),
            ("OTEL_SERVICE_NAME", "n"),
            ("MY_API_KEY_FILE", "f"),
        ];
        let all = ["DEEPSEEK_API_KEY", "GH_TOKEN", "IS_SANDBOX", "MAX_THINKING_TOKENS", "MY_API_KEY_FILE"];
        let all = [&all[..], &["OTEL_SERVICE_NAME", "RUST_LOG", "SECRET"]].concat();
        #[rustfmt::skip]
        let table: [(Profile, &[&str], &[&str]); 7] = [
            (Profile::None,   &[],                     &all),
            (Profile::Claude, &[],                     &["MY_API_KEY_FILE", "RUST_LOG", "SECRET"]),
            (Profile::Codex,  &[],                     &["MAX_THINKING_TOKENS", "MY_API_KEY_FILE", "SECRET"]),
            (Profile::Claude, &["SECRET", "RUST*"],    &["MY_API_KEY_FILE"]),
            (Profile::Claude, &["*_FILE", "*ECRE*"],   &["RUST_LOG"]),
            (Profile::Claude, &["*"],                  &[]),
            (Profile::None,   &["*"],                  &[]),
        ];
        for (profile, passed, left_out) in table {
            let built = built(&ours, profile, passed);
            assert_eq!(built.left_out, left_out, "{profile:?} {passed:?}");
            assert!(built.all.contains(&("PWD".into(), "/docs".into())));
        }
    }

    #[cfg(unix)]
    #[test]
    fn the_pattern_for_everything_includes_names_that_are_not_utf8() {
        use std::os::unix::ffi::OsStringExt;
        let odd = (OsString::from_vec(b"A\xff".to_vec()), OsString::from("x"));
        let about = SessionVariables { session: "s1", document: None, cwd: Path::new("/docs") };
        for (passed, is_passed) in [("B", false), ("*", true)] {
            let passed = [passed.to_owned()];
            let agent = For { profile: Profile::None, args: &[], passed: &passed };
            let built = build([odd.clone()], agent, &[], about).unwrap();
            assert_eq!((built.all.contains(&odd), built.left_out.is_empty()), (is_passed, is_passed));
        }
    }

    #[cfg(unix)]
    #[test]
    fn an_agent_always_has_a_terminal_type() {
        for (ours, expected) in
            [(&[][..], "xterm-256color"), (&[("TERM", "")], "xterm-256color"), (&[("TERM", "dumb")], "dumb")]
        {
            let built = built(ours, Profile::None, &[]);
            let term: Vec<_> = built.all.iter().filter(|(name, _)| name == "TERM").map(|(_, value)| value).collect();
            assert_eq!(term, [expected], "{ours:?}");
        }
    }

    #[test]
    fn the_line_at_the_start_names_variables_that_were_left_out() {
        let names = |count: usize| (0..count).map(|at| format!("V{at}")).collect::<Vec<_>>();
        assert_eq!(left_out_in_words("claude", &[]), None);
        insta::assert_snapshot!(left_out_in_words("claude", &names(2)).unwrap(), @"variables not passed to claude: V0, V1; `--env-pass NAME` passes one, `--env-pass '*'` all");
        insta::assert_snapshot!(left_out_in_words("claude", &names(18)).unwrap(), @"variables not passed to claude: V0, V1, V2, V3, V4, V5, V6, V7, V8, V9, V10, V11, V12, V13, V14, V15 and 2 more (`outlast state` lists them); `--env-pass NAME` passes one, `--env-pass '*'` all");
    }

    #[test]
    fn a_missing_variable_is_an_error_with_its_line() {
        let error = build_from(&[], &[], &[("A", "x"), ("B", "${NONE}")], None).unwrap_err();
        assert_eq!((error.line, error.what.as_str()), (4, "the environment variable `NONE` is not set"));
        let error = build_from(&[], &[], &[("A", "${NONE")], None).unwrap_err();
        assert_eq!(error.what, "`${NONE` has no closing brace");
    }

    #[test]
    fn a_backend_gets_passed_and_configured_variables() {
        let named = |pairs: &[(&str, &str)]| -> Vec<(OsString, OsString)> {
            pairs.iter().map(|(name, value)| (name.into(), value.into())).collect()
        };
        let ours = named(&[
            ("PATH", "/bin"),
            ("HOME", "/home/ann"),
            ("PWD", "/elsewhere"),
            ("SIGNING", "secret"),
            ("GITHUB_TOKEN", "secret"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("ANTHROPIC_API_KEY", "secret"),
            ("LC_ALL", "C"),
        ]);
        let built = of_backend(ours, named(&[("GITHUB_TOKEN", "its own"), ("HOME", "/srv")]), Path::new("/work"));
        let mut all = built.all;
        all.sort();
        assert_eq!(
            all,
            named(&[
                ("GITHUB_TOKEN", "its own"),
                ("HOME", "/srv"),
                ("LC_ALL", "C"),
                ("PATH", "/bin"),
                ("PWD", "/work")
            ])
        );
        assert_eq!(built.left_out, ["ANTHROPIC_API_KEY", "AWS_SECRET_ACCESS_KEY", "SIGNING"]);
        let words = left_out_of_backend_in_words(&built.left_out).unwrap();
        assert!(words.contains("SIGNING") && words.contains("inherit_env") && !words.contains("secret"), "{words}");
        assert!(FOR_AGENTS.iter().all(|pattern| PASSED.contains(pattern)));
    }
}
