//! The supported clients, and the files in which each keeps its configuration.

use std::path::{Path, PathBuf};

use clap::ValueEnum;

use super::servers::Format;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Client {
    ClaudeCode,
    ClaudeDesktop,
    #[value(name = "vscode", alias = "vs-code")]
    VsCode,
    Cursor,
    Codex,
    Gemini,
    Windsurf,
    Zed,
    Cline,
    #[value(name = "opencode", alias = "open-code")]
    OpenCode,
}

/// The directories of VS Code and its variants, below the directory for applications.
const VS_CODES: [&str; 3] = ["Code", "Code - Insiders", "VSCodium"];

impl Client {
    pub const ALL: [Client; 10] = [
        Client::ClaudeCode,
        Client::ClaudeDesktop,
        Client::VsCode,
        Client::Cursor,
        Client::Codex,
        Client::Gemini,
        Client::Windsurf,
        Client::Zed,
        Client::Cline,
        Client::OpenCode,
    ];

    pub fn title(self) -> &'static str {
        match self {
            Client::ClaudeCode => "Claude Code",
            Client::ClaudeDesktop => "Claude Desktop",
            Client::VsCode => "VS Code",
            Client::Cursor => "Cursor",
            Client::Codex => "Codex",
            Client::Gemini => "Gemini CLI",
            Client::Windsurf => "Windsurf",
            Client::Zed => "Zed",
            Client::Cline => "Cline",
            Client::OpenCode => "opencode",
        }
    }

    /// Its name on the command line.
    pub fn word(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum System {
    Linux,
    Mac,
    Windows,
}

impl System {
    pub(crate) const HERE: System = if cfg!(windows) {
        System::Windows
    } else if cfg!(target_os = "macos") {
        System::Mac
    } else {
        System::Linux
    };
}

/// The directories from which paths of configurations are built.
#[derive(Debug, Clone)]
pub(crate) struct ConfigFiles {
    pub system: System,
    pub home: PathBuf,
    pub cwd: PathBuf,
    /// `%APPDATA%`, on Windows.
    pub appdata: Option<PathBuf>,
    /// `CODEX_HOME`, if it is set.
    pub codex_home: Option<PathBuf>,
}

/// A file in which a client may configure its servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigFile {
    pub client: Option<Client>,
    pub path: PathBuf,
    pub format: Format,
    /// It belongs to a project, and so to all of its users, not to this machine.
    pub is_shared: bool,
}

impl ConfigFile {
    /// A file that the user named; its format follows from its name.
    pub fn named(path: &Path) -> ConfigFile {
        let is_toml = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("toml"));
        let format = if is_toml { Format::Toml } else { Format::Json };
        ConfigFile { client: None, path: path.to_owned(), format, is_shared: false }
    }
}

impl ConfigFiles {
    pub(crate) fn here(home: &Path, cwd: &Path) -> ConfigFiles {
        let from_environment = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        ConfigFiles {
            system: System::HERE,
            home: home.to_owned(),
            cwd: cwd.to_owned(),
            appdata: from_environment("APPDATA"),
            codex_home: from_environment("CODEX_HOME"),
        }
    }

    /// Every file that a client would read here, whether it exists or not.
    pub(crate) fn of(&self, client: Client) -> Vec<ConfigFile> {
        let place = |path: PathBuf, is_shared| ConfigFile {
            client: Some(client),
            format: ConfigFile::named(&path).format,
            path,
            is_shared,
        };
        let mine = |path: PathBuf| place(path, false);
        let ours = |file: &str| self.projects().into_iter().map(|dir| place(dir.join(file), true)).collect::<Vec<_>>();
        match client {
            Client::ClaudeCode => [ours(".mcp.json"), vec![mine(self.home.join(".claude.json"))]].concat(),
            Client::ClaudeDesktop => vec![mine(self.applications().join("Claude").join("claude_desktop_config.json"))],
            Client::VsCode => {
                let users = VS_CODES.map(|edition| mine(self.applications().join(edition).join("User/mcp.json")));
                [ours(".vscode/mcp.json"), users.into()].concat()
            }
            Client::Cursor => {
                [ours(".cursor/mcp.json"), vec![mine(self.home.join(".cursor").join("mcp.json"))]].concat()
            }
            Client::Codex => {
                let home = self.codex_home.clone().unwrap_or_else(|| self.home.join(".codex"));
                [ours(".codex/config.toml"), vec![mine(home.join("config.toml"))]].concat()
            }
            Client::Gemini => {
                [ours(".gemini/settings.json"), vec![mine(self.home.join(".gemini").join("settings.json"))]].concat()
            }
            Client::Windsurf => ["windsurf/mcp_config.json", "mcp_config.json"]
                .map(|file| mine(self.home.join(".codeium").join(file)))
                .into(),
            Client::Zed => [ours(".zed/settings.json"), vec![mine(self.zed().join("settings.json"))]].concat(),
            Client::Cline => {
                let file = "settings/cline_mcp_settings.json";
                let editors = VS_CODES.into_iter().chain(["Cursor", "Windsurf"]);
                let storage = editors.map(|editor| self.applications().join(editor).join("User/globalStorage"));
                let extensions = storage.map(|storage| mine(storage.join("saoudrizwan.claude-dev").join(file)));
                extensions.chain([mine(self.home.join(".cline/data").join(file))]).collect()
            }
            Client::OpenCode => {
                let names = ["opencode.json", "opencode.jsonc"];
                let shared = names.iter().flat_map(|name| [ours(name), ours(&format!(".opencode/{name}"))].concat());
                let own = names.iter().map(|name| mine(self.home.join(".config/opencode").join(name)));
                shared.chain(own).collect()
            }
        }
    }

    /// Directories that exist if the client is or was installed.
    pub(crate) fn traces(&self, client: Client) -> Vec<PathBuf> {
        let home = |name: &str| self.home.join(name);
        match client {
            Client::ClaudeCode => vec![home(".claude"), home(".claude.json")],
            Client::ClaudeDesktop => vec![self.applications().join("Claude")],
            Client::VsCode => VS_CODES.map(|name| self.applications().join(name)).into(),
            Client::Cursor => vec![home(".cursor"), self.applications().join("Cursor")],
            Client::Codex => vec![self.codex_home.clone().unwrap_or_else(|| home(".codex"))],
            Client::Gemini => vec![home(".gemini")],
            Client::Windsurf => vec![home(".codeium/windsurf"), self.applications().join("Windsurf")],
            Client::Zed => vec![self.zed()],
            Client::Cline => {
                let storage =
                    |editor: &str| self.applications().join(editor).join("User/globalStorage/saoudrizwan.claude-dev");
                VS_CODES.map(storage).into_iter().chain([home(".cline")]).collect()
            }
            Client::OpenCode => vec![home(".config/opencode")],
        }
    }

    /// The current directory, and its parents as long as they belong to the same repository. The home directory is
    /// not a project.
    fn projects(&self) -> Vec<PathBuf> {
        let around: Vec<&Path> = self.cwd.ancestors().collect();
        let root = around.iter().position(|dir| dir.join(".git").exists()).unwrap_or(0);
        around[..=root].iter().filter(|dir| **dir != self.home).map(|dir| dir.to_path_buf()).collect()
    }

    /// Zed uses `~/.config` on macOS, too.
    fn zed(&self) -> PathBuf {
        match self.system {
            System::Linux | System::Mac => self.home.join(".config/zed"),
            System::Windows => self.applications().join("Zed"),
        }
    }

    fn applications(&self) -> PathBuf {
        match self.system {
            System::Linux => self.home.join(".config"),
            System::Mac => self.home.join("Library").join("Application Support"),
            System::Windows => self.appdata.clone().unwrap_or_else(|| self.home.join("AppData").join("Roaming")),
        }
    }
}

// The paths of all three systems, in the notation of this one.
#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn every_client_is_searched_at_its_own_path() {
        let mut words = String::new();
        for system in [System::Linux, System::Mac, System::Windows] {
            let appdata = (system == System::Windows).then(|| "/c/Users/me/AppData/Roaming".into());
            let codex_home = (system == System::Mac).then(|| "/srv/codex".into());
            let places = ConfigFiles { system, home: "/home/me".into(), cwd: "/srv/app".into(), appdata, codex_home };
            words.push_str(&format!("{system:?}\n"));
            for client in Client::ALL {
                for place in places.of(client) {
                    let shared = if place.is_shared { " (shared)" } else { "" };
                    words.push_str(&format!("  {:14} {}{shared}\n", client.word(), place.path.display()));
                }
            }
        }
        insta::assert_snapshot!(words);
    }

    #[test]
    fn a_project_is_a_repository_and_the_home_directory_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("app/src/deep");
        std::fs::create_dir_all(&inner).unwrap();
        let places = |home: &Path, cwd: &Path| ConfigFiles {
            system: System::Linux,
            home: home.to_owned(),
            cwd: cwd.to_owned(),
            appdata: None,
            codex_home: None,
        };
        assert_eq!(places(Path::new("/nowhere"), &inner).projects(), std::slice::from_ref(&inner));
        std::fs::create_dir(dir.path().join("app/.git")).unwrap();
        let found = places(Path::new("/nowhere"), &inner).projects();
        assert_eq!(found, [inner.clone(), dir.path().join("app/src"), dir.path().join("app")]);
        assert_eq!(places(dir.path(), dir.path()).projects(), Vec::<PathBuf>::new());
    }
}
