//! The variables that an agent's own configuration names: files and arguments are searched for names. Nothing else in
//! them is interpreted.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs::OpenOptions,
    io::Read,
    path::{Path, PathBuf},
};

use outlast_os as os;

use super::Profile;

/// How much of each file is searched; a name after that must be passed by `--env-pass`.
const SEARCHED_MAX: u64 = 4 << 20;

/// The names in the agent's files, as the agent finds them from its directory and its environment, and in its
/// arguments.
pub(super) fn names(profile: Profile, args: &[String], cwd: &Path, ours: &[(OsString, OsString)]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    if profile == Profile::None {
        return found;
    }
    for arg in args {
        found.extend(names_in(arg, profile));
    }
    let value = |name: &str| ours.iter().find(|(known, _)| known == name).map(|(_, value)| PathBuf::from(value));
    let home = value(os::HOME);
    let below = |dir: &str| home.as_ref().map(|home| home.join(dir));
    let (user, project): (Vec<PathBuf>, &[&str]) = match profile {
        Profile::None => (Vec::new(), &[]),
        Profile::Claude => {
            let dir = value("CLAUDE_CONFIG_DIR");
            let state = dir.clone().or_else(|| home.clone()).map(|dir| dir.join(".claude.json"));
            let settings = dir.or_else(|| below(".claude")).map(|dir| dir.join("settings.json"));
            let project = &[".mcp.json", ".claude/settings.json", ".claude/settings.local.json"];
            (state.into_iter().chain(settings).collect(), project)
        }
        Profile::Codex => {
            let dir = value("CODEX_HOME").or_else(|| below(".codex"));
            (dir.map(|dir| dir.join("config.toml")).into_iter().collect(), &[".codex/config.toml"])
        }
    };
    let in_project = cwd.ancestors().flat_map(|dir| project.iter().map(move |file| dir.join(file)));
    // `--mcp-config` and `--settings` take a file.
    let in_args = args.iter().map(|arg| arg.split_once('=').map_or(arg.as_str(), |(_, value)| value));
    let in_args = in_args.filter(|arg| arg.ends_with(".json") || arg.ends_with(".toml")).map(|arg| cwd.join(arg));
    for file in user.into_iter().chain(in_project).chain(in_args) {
        if let Some(text) = beginning(&file) {
            found.extend(names_in(&text, profile));
        }
    }
    found
}

/// `None` if the file does not exist or cannot be read.
fn beginning(file: &Path) -> Option<String> {
    // A link is followed, as the agent does; a FIFO is not read.
    let file = os::open_regular(OpenOptions::new().read(true), &os::real_path(file).ok()?).ok()?;
    let mut bytes = Vec::new();
    file.take(SEARCHED_MAX).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// `$NAME` and `${NAME…`; for codex, which has keys for names (`env_key`, `bearer_token_env_var`, `env_vars`), also
/// `"NAME"`.
fn names_in(text: &str, profile: Profile) -> BTreeSet<String> {
    let bytes = text.as_bytes();
    let is_letter = |at: usize| bytes.get(at).is_some_and(|byte| byte.is_ascii_alphanumeric() || *byte == b'_');
    let mut found = BTreeSet::new();
    let mut at = 0;
    while at < bytes.len() {
        if !is_letter(at) {
            at += 1;
            continue;
        }
        let end = (at..).find(|end| !is_letter(*end)).unwrap_or(bytes.len());
        let before = &bytes[..at];
        let quote = before.last().copied().filter(|quote| matches!(quote, b'"' | b'\''));
        let is_quoted = profile == Profile::Codex && quote.is_some() && bytes.get(end).copied() == quote;
        if before.ends_with(b"$") || before.ends_with(b"${") || is_quoted {
            found.insert(text[at..end].to_owned());
        }
        at = end;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_texts() {
        #[rustfmt::skip]
        let table: [(Profile, &str, &[&str]); 5] = [
            (Profile::Claude, r#"{"env":{"A":"${TOKEN}","B":"x${OTHER:-y}"}}"#,  &["OTHER", "TOKEN"]),
            (Profile::Claude, r#"{"command":"curl -H $AUTH \"PLAIN\""}"#,         &["AUTH"]),
            (Profile::Claude, "$ ${ $",                                         &[]),
            (Profile::Codex,  r#"env_key="XKEY" env_vars = ["A_B", 'C']"#,       &["A_B", "C", "XKEY"]),
            (Profile::Codex,  r#"name = "two words" open = "never"#,             &[]),
        ];
        for (profile, text, expected) in table {
            assert_eq!(names_in(text, profile).into_iter().collect::<Vec<_>>(), expected, "{text}");
        }
    }

    #[test]
    fn names_are_found_where_agents_keep_their_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let project = dir.path().join("work/project/inner");
        std::fs::create_dir_all(&project).unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("home/.claude.json", "${STATE}");
        write("home/.claude/settings.json", "${USER_SETTINGS}");
        write("work/project/.mcp.json", "${PROJECT}");
        write("work/project/inner/.claude/settings.local.json", "${LOCAL}");
        write("work/project/inner/servers.json", "${SERVERS}");
        write("home/.codex/config.toml", "env_key = 'XKEY'");
        write("elsewhere/.claude.json", "${ELSEWHERE}");
        let found = |profile, args: &[&str], more: &[(&str, PathBuf)]| {
            let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
            let home = [(OsString::from(os::HOME), dir.path().join("home").into_os_string())];
            let more = more.iter().map(|(name, value)| (OsString::from(name), value.clone().into_os_string()));
            let ours: Vec<_> = home.into_iter().chain(more).collect();
            names(profile, &args, &project, &ours).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(found(Profile::Claude, &[], &[]), ["LOCAL", "PROJECT", "STATE", "USER_SETTINGS"]);
        let elsewhere = [("CLAUDE_CONFIG_DIR", dir.path().join("elsewhere"))];
        let args = ["--mcp-config=servers.json", "--settings", r#"{"apiKeyHelper":"echo $HELPER"}"#];
        assert_eq!(found(Profile::Claude, &args, &elsewhere), ["ELSEWHERE", "HELPER", "LOCAL", "PROJECT", "SERVERS"]);
        assert_eq!(found(Profile::Codex, &["-c", r#"env_key="YKEY""#], &[]), ["XKEY", "YKEY"]);
        assert!(found(Profile::None, &["$A"], &[]).is_empty());
    }
}
