//! Where the hub of a command is: its name, which is the same for all clients that can share it, and its files.

use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
};

use outlast_os as os;
use sha2::{Digest, Sha256};

use super::wire;
use crate::{
    cli::{self, Share},
    state::home::state_dir,
};

/// Variables that differ between the windows of one user and mean nothing to a server. They do not tell servers apart, and
/// a shared server does not get them. The book has this list.
pub(crate) const OF_WINDOWS: [&str; 39] = [
    "ALACRITTY_LOG",
    "ALACRITTY_SOCKET",
    "ALACRITTY_WINDOW_ID",
    "CLAUDE_CODE_SSE_PORT",
    "COLUMNS",
    "GNOME_TERMINAL_SCREEN",
    "GPG_TTY",
    "ITERM_SESSION_ID",
    "KITTY_LISTEN_ON",
    "KITTY_PID",
    "KITTY_WINDOW_ID",
    "KONSOLE_DBUS_SESSION",
    "KONSOLE_DBUS_WINDOW",
    "LINES",
    "OLDPWD",
    "OUTLAST_CHILD",
    "OUTLAST_DOCUMENT",
    "OUTLAST_SESSION",
    "PWD",
    "SHLVL",
    "SSH_CLIENT",
    "SSH_CONNECTION",
    "SSH_TTY",
    "STY",
    "TERM_SESSION_ID",
    "TMUX",
    "TMUX_PANE",
    "TTY",
    "VSCODE_GIT_IPC_HANDLE",
    "VSCODE_IPC_HOOK",
    "VSCODE_IPC_HOOK_CLI",
    "VSCODE_PID",
    "WEZTERM_PANE",
    "WEZTERM_UNIX_SOCKET",
    "WINDOW",
    "WINDOWID",
    "WT_SESSION",
    "XDG_SESSION_ID",
    "_",
];

/// In place of a name: a hub for the client that starts it, which is connected to its stdin.
pub(crate) const OWN: &str = "own";
/// How many hexadecimal digits of the hash a name has.
const NAME_DIGITS: usize = 32;

/// The hubs of one command.
#[derive(Debug, Clone)]
pub(crate) struct Hubs {
    dir: PathBuf,
    /// A hash of all that the clients of a hub have in common.
    key: [u8; 32],
}

/// The files of one hub.
#[derive(Debug, Clone)]
pub(crate) struct Files {
    pub name: String,
    pub socket: PathBuf,
    /// Claimed by the hub while it runs.
    pub claim: PathBuf,
    /// Claimed by a client while it starts the hub.
    pub start: PathBuf,
}

impl Hubs {
    /// Fails with a sentence if hubs cannot be used, because of files of another user or because there is no room for them.
    pub(crate) fn of(
        arguments: &cli::Mcp,
        cwd: &Path,
        home: Option<&Path>,
        env: impl Iterator<Item = (OsString, OsString)>,
    ) -> Result<Hubs, String> {
        let Some(home) = home.filter(|home| home.is_absolute()) else {
            return Err("there is no home directory".to_owned());
        };
        let dir = state_dir(home).join("share");
        claim(&dir)?;
        let place = Hubs { dir, key: key(arguments, cwd, env) };
        place.files(None)?;
        Ok(place)
    }

    /// The files of the hub for all clients, or of the one for clients with these capabilities.
    pub(super) fn files(&self, capabilities: Option<&str>) -> Result<Files, String> {
        let mut hash = Sha256::new();
        hash.update(self.key);
        if let Some(capabilities) = capabilities {
            // The order of members does not matter.
            let parsed = serde_json::from_str::<serde_json::Value>(capabilities);
            hash.update(parsed.map_or_else(|_| capabilities.to_owned(), |parsed| parsed.to_string()));
        }
        let name: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        self.named(&name[..NAME_DIGITS])
    }

    /// The files of the hub with this name.
    pub(crate) fn named(&self, name: &str) -> Result<Files, String> {
        let socket = os::sockets(&self.dir, name).into_iter().next().ok_or("every path for the socket is too long")?;
        if let Some(dir) = socket.parent().filter(|dir| *dir != self.dir) {
            claim(dir)?;
        }
        if !os::is_ours(&socket) {
            return Err(format!("{} belongs to another user", socket.display()));
        }
        let file = |suffix: &str| self.dir.join(format!("{name}.{suffix}"));
        Ok(Files { name: name.to_owned(), claim: file("lock"), start: file("start"), socket })
    }
}

/// The environment of a hub and its server.
pub(super) fn environment(cwd: &Path) -> Vec<(OsString, OsString)> {
    let own = [(OsString::from("PWD"), cwd.as_os_str().to_owned())];
    std::env::vars_os().filter(|(name, _)| !is_of_window(name)).chain(own).collect()
}

/// A directory that only this user can use.
fn claim(dir: &Path) -> Result<(), String> {
    os::claim_dir(dir).map_err(|error| {
        let (path, why) = (dir.display().to_string(), os::cause::plain(&error.to_string()));
        if why.contains(&path) { why } else { format!("{path}: {why}") }
    })
}

fn is_of_window(name: &OsStr) -> bool {
    OF_WINDOWS.iter().any(|known| name == *known)
}

fn key(arguments: &cli::Mcp, cwd: &Path, env: impl Iterator<Item = (OsString, OsString)>) -> [u8; 32] {
    let mut hash = Sha256::new();
    let mut add = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_be_bytes());
        hash.update(bytes);
    };
    add(&wire::VERSION.to_be_bytes());
    add(arguments.in_common().as_bytes());
    if arguments.share == Some(Share::Directory) {
        add(cwd.as_os_str().as_encoded_bytes());
    }
    let mut env: Vec<(OsString, OsString)> = env.filter(|(name, _)| !is_of_window(name)).collect();
    env.sort();
    for (name, value) in env {
        add(name.as_encoded_bytes());
        add(value.as_encoded_bytes());
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn key_of(line: &str, cwd: &str, env: &[(&str, &str)]) -> [u8; 32] {
        let cli = cli::Cli::try_parse_from(line.split(' ')).unwrap();
        let cli::Command::Mcp(arguments) = cli.command else { panic!("{line}") };
        let env = env.iter().map(|(name, value)| ((*name).into(), (*value).into()));
        key(&arguments, Path::new(cwd), env)
    }

    #[test]
    fn clients_with_the_same_command_directory_and_environment_share() {
        let first = key_of("outlast mcp --share -- py server.py", "/a", &[("HOME", "/h"), ("TMUX_PANE", "1")]);
        let table = [
            // line                                                cwd   environment                             shares
            ("outlast mcp --share -- py server.py", "/a", &[("TMUX_PANE", "2"), ("HOME", "/h")][..], true),
            ("outlast mcp --share=directory -- py server.py", "/a", &[("HOME", "/h"), ("SHLVL", "4")], true),
            ("outlast mcp --name x --linger 1s --share -- py server.py", "/a", &[("HOME", "/h")], true),
            ("outlast mcp --share -- py server.py x", "/a", &[("HOME", "/h")], false),
            ("outlast mcp --share -- py server.py", "/b", &[("HOME", "/h")], false),
            ("outlast mcp --share -- py server.py", "/a", &[("HOME", "/g")], false),
            ("outlast mcp --share -- py server.py", "/a", &[("HOME", "/h"), ("TOKEN", "t")], false),
            ("outlast mcp --share --no-tools -- py server.py", "/a", &[("HOME", "/h")], false),
            ("outlast mcp --share=user -- py server.py", "/a", &[("HOME", "/h")], false),
        ];
        for (line, cwd, env, shares) in table {
            assert_eq!(key_of(line, cwd, env) == first, shares, "{line} in {cwd} with {env:?}");
        }
        let user = |cwd: &str| key_of("outlast mcp --share=user -- py server.py", cwd, &[]);
        assert_eq!(user("/a"), user("/b"));
    }

    #[test]
    fn the_list_of_variables_is_sorted() {
        assert!(OF_WINDOWS.is_sorted());
    }

    #[test]
    fn clients_of_equal_capabilities_have_one_more_hub() {
        let place = Hubs { dir: "/x".into(), key: [7; 32] };
        let name = |capabilities| place.files(capabilities).unwrap().name;
        assert_eq!(name(Some(r#"{"a":1,"b":2}"#)), name(Some(r#"{ "b": 2, "a": 1 }"#)));
        assert_ne!(name(Some("{}")), name(None));
        assert_eq!(name(None).len(), NAME_DIGITS);
    }
}
