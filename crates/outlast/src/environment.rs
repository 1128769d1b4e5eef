//! The environment of an agent: the same wherever outlast is started from, and the names of what was left out.

use std::{
    env,
    ffi::{OsStr, OsString},
    path::Path,
};

use crate::os;

mod configured;

/// Variables of outlast's own environment that every agent gets. `*` stands for any characters.
#[rustfmt::skip]
pub const PASSED: [&str; 74] = [
    // What a shell sets for each of its commands.
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
    // What the agents read.
    "ANTHROPIC_*", "CLAUDE_*", "DISABLE_*", "OPENAI_*", "CODEX_*", "GEMINI_*", "GOOGLE_*", "AWS_*", "AZURE_*",
    // The tools they call.
    "NVM_*", "VOLTA_HOME", "CARGO_HOME", "RUSTUP_HOME", "GOPATH", "JAVA_HOME", "VIRTUAL_ENV",
];

/// Of those, what holds keys and settings of agents and their models: a server behind the gateway does not get them.
#[rustfmt::skip]
pub const FOR_AGENTS: [&str; 9] = [
    "ANTHROPIC_*", "CLAUDE_*", "DISABLE_*", "OPENAI_*", "CODEX_*", "GEMINI_*", "GOOGLE_*", "AWS_*", "AZURE_*",
];

/// Besides those, for an agent with a profile.
#[rustfmt::skip]
pub const PASSED_TO_AGENTS: [&str; 5] = ["IS_SANDBOX", "*_API_KEY", "OTEL_*", "GH_TOKEN", "GITHUB_TOKEN"];

/// For claude: its limits on thinking and tools, and how it reaches its models.
#[rustfmt::skip]
pub const PASSED_TO_CLAUDE: [&str; 13] = [
    "MAX_THINKING_TOKENS", "MAX_MCP_OUTPUT_TOKENS", "MCP_*", "BASH_DEFAULT_TIMEOUT_MS", "BASH_MAX_TIMEOUT_MS",
    "BASH_MAX_OUTPUT_LENGTH", "TASK_MAX_OUTPUT_LENGTH", "SLASH_COMMAND_TOOL_CHAR_BUDGET", "API_TIMEOUT_MS", "ENABLE_*",
    "USE_BUILTIN_RIPGREP", "VERTEX_REGION_*", "CLOUD_ML_REGION",
];

/// For codex: its log.
pub const PASSED_TO_CODEX: [&str; 2] = ["RUST_LOG", "LOG_FORMAT"];

/// Variables that are not missing where they do not pass: the agent's process gets a tag of its own, and its terminal has
/// the size that these say.
const REPLACED: [&str; 3] = [os::CHILD_TAG, "COLUMNS", "LINES"];

/// The terminal type of an agent whose environment has none: what outlast's own model of a terminal understands.
const TERM_DEFAULT: &str = "xterm-256color";

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

/// Which profile an agent has, as far as its environment is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    Claude,
    Codex,
    None,
}

impl Profile {
    pub fn of(program: &str) -> Profile {
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
pub struct For<'a> {
    pub profile: Profile,
    pub args: &'a [String],
    /// What the user passes besides: `--env-pass`.
    pub passed: &'a [String],
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    pub all: Vec<(OsString, OsString)>,
    /// Names of our own variables that the agent does not have, in order.
    pub left_out: Vec<String>,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the block at the top of the document makes no sense in line {line}: {what}")]
pub struct EnvironmentError {
    pub line: usize,
    pub what: String,
}

/// The whole environment, in this order: what passes, what the document sets, what outlast says of the session.
pub fn build(
    ours: impl IntoIterator<Item = (OsString, OsString)>,
    agent: For<'_>,
    document: &[(String, String, usize)],
    about: About<'_>,
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

/// The environment of a server behind the gateway: what passes, and what its configuration sets. Secrets of the gateway, such as
/// the one that tokens are signed with, are not its business.
pub fn of_backend(
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

/// The line in the log that names what a backend was not given, and how it is passed. None if nothing was left out.
pub fn left_out_of_backend_in_words(left_out: &[String]) -> Option<String> {
    let all = format!(
        "variables not passed to it: {}; `env` in its table passes one, `inherit_env = true` all",
        left_out.join(", ")
    );
    (!left_out.is_empty()).then_some(all)
}

/// The most names in the line at the start; `state` and the log have all of them.
const NAMED_MAX: usize = 16;

/// The line at the start that names what was left out and how it is passed. None if nothing was.
pub fn left_out_in_words(program: &str, left_out: &[String]) -> Option<String> {
    let named = left_out.iter().take(NAMED_MAX).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = match left_out.len().saturating_sub(NAMED_MAX) {
        0 => String::new(),
        more => format!(" and {more} more (`outlast state` lists them)"),
    };
    let all = format!("variables not passed to {program}: {named}{more}; {HOW_TO_PASS}");
    (!left_out.is_empty()).then_some(all)
}

pub const HOW_TO_PASS: &str = "`--env-pass NAME` passes one, `--env-pass '*'` all";

/// Our own, as it is at this moment.
pub fn ours() -> impl Iterator<Item = (OsString, OsString)> {
    env::vars_os()
}

fn is_listed(name: &OsStr, agent: For<'_>) -> bool {
    // A name that is not UTF-8 fits nothing but `*` alone.
    let Some(text) = name.to_str() else { return agent.passed.iter().any(|pattern| pattern == ANYTHING) };
    let here: &[&str] = if cfg!(windows) { &PASSED_ON_WINDOWS } else { &[] };
    let mut listed = PASSED.iter().chain(here).copied().chain(agent.profile.patterns());
    listed.any(|pattern| fits(pattern, text)) || agent.passed.iter().any(|pattern| fits(pattern, text))
}

/// What passes everything.
pub const ANYTHING: &str = "*";

/// `*` stands for any characters, at the beginning, at the end, or at both.
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
        let agent = For { profile: Profile::None, args: &[], passed: &passed };
        let built = build(ours, agent, &document, about)?;
        Ok(built.all.iter().map(|(name, value)| format!("{}={}", name.display(), value.display())).collect())
    }

    #[test]
    fn only_what_is_listed_passes() {
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
        let about = About { session: "s1", document: None, cwd: Path::new("/docs") };
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
    fn everything_is_even_what_is_not_utf8() {
        use std::os::unix::ffi::OsStringExt;
        let odd = (OsString::from_vec(b"A\xff".to_vec()), OsString::from("x"));
        let about = About { session: "s1", document: None, cwd: Path::new("/docs") };
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
    fn the_line_at_the_start_names_them() {
        let names = |count: usize| (0..count).map(|at| format!("V{at}")).collect::<Vec<_>>();
        assert_eq!(left_out_in_words("claude", &[]), None);
        insta::assert_snapshot!(left_out_in_words("claude", &names(2)).unwrap(), @"variables not passed to claude: V0, V1; `--env-pass NAME` passes one, `--env-pass '*'` all");
        insta::assert_snapshot!(left_out_in_words("claude", &names(18)).unwrap(), @"variables not passed to claude: V0, V1, V2, V3, V4, V5, V6, V7, V8, V9, V10, V11, V12, V13, V14, V15 and 2 more (`outlast state` lists them); `--env-pass NAME` passes one, `--env-pass '*'` all");
    }

    #[test]
    fn what_is_not_there_is_an_error_with_its_line() {
        let error = build_from(&[], &[], &[("A", "x"), ("B", "${NONE}")], None).unwrap_err();
        assert_eq!((error.line, error.what.as_str()), (4, "there is no variable `NONE` to put in"));
        let error = build_from(&[], &[], &[("A", "${NONE")], None).unwrap_err();
        assert_eq!(error.what, "`${NONE` has no closing brace");
    }

    #[test]
    fn a_backend_gets_what_passes_and_what_it_is_given() {
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
