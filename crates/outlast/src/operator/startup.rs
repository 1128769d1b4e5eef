//! `outlast startup`: a systemd user unit or a launchd agent that runs `outlast restore --all` at login. The file is shown
//! before it is written, and removed completely.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use outlast_os as os;
use serde_json::json;

use crate::{
    adopt,
    cli::{
        self,
        report::{self, Report},
    },
    operator::instances::{from_home, pretty, print, print_json},
    state::home,
};

/// The name of the systemd unit.
const UNIT: &str = "outlast-restore.service";
/// The name of the launchd agent.
const LABEL: &str = "outlast.restore";
/// In the first lines of each file: only such a file is replaced or removed.
const MARK: &str = "Written by `outlast startup enable`";
/// A longer file is not one of ours.
const FILE_MAX: u64 = 64 << 10;

pub(crate) fn startup(arguments: &cli::Startup) -> Result<ExitCode, Report> {
    let user_home = env::home_dir().filter(|home| home.is_absolute()).ok_or_else(|| {
        Report::new(report::FAILURE, "there is no home directory, so nothing can be started at login").hint("set HOME")
    })?;
    let service = Service::here(&user_home)?;
    match &arguments.action {
        cli::StartupAction::Enable { yes, dry_run } => enable(&service, *yes, *dry_run),
        cli::StartupAction::Disable => disable(&service),
        cli::StartupAction::Status { json } => status(&service, *json),
    }
}

/// The program that starts other programs at login.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manager {
    Systemd,
    Launchd,
}

/// The file that makes it start outlast.
#[derive(Debug)]
struct Service {
    manager: Manager,
    home: PathBuf,
    file: PathBuf,
}

/// What is at the place of the file.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    Nothing,
    Ours(String),
    /// Anything that outlast did not write, and why it is not touched.
    Foreign(String),
}

impl Service {
    fn here(home: &Path) -> Result<Service, Report> {
        let (manager, file) = match () {
            () if cfg!(target_os = "macos") => {
                (Manager::Launchd, home.join("Library/LaunchAgents").join(format!("{LABEL}.plist")))
            }
            () if cfg!(unix) => (Manager::Systemd, home.join(".config/systemd/user").join(UNIT)),
            () => {
                return Err(Report::new(report::FAILURE, "outlast cannot start sessions at login on this system")
                    .because("only systemd and launchd are supported")
                    .hint("let the task scheduler run `outlast restore --all` at logon"));
            }
        };
        Ok(Service { manager, home: home.to_owned(), file })
    }

    /// The content of the file, for the program that runs now.
    fn text(&self) -> Result<String, Report> {
        let program = env::current_exe()
            .map_err(|error| Report::new(report::FAILURE, "the path of outlast itself is not known").because(error))?;
        let search_path = env::var("PATH").ok();
        text(self.manager, &program, search_path.as_deref()).ok_or_else(|| {
            Report::new(report::FAILURE, format!("the path of outlast cannot be written to {}", self.file.display()))
                .because("it contains a control character, or is not UTF-8")
                .hint("install outlast in another directory")
        })
    }

    fn find(&self) -> Found {
        let foreign = |why: &str| Found::Foreign(why.to_owned());
        match fs::symlink_metadata(&self.file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Found::Nothing,
            Err(error) => return Found::Foreign(report::plain(&error.to_string())),
            Ok(about) if about.is_symlink() => return foreign("it is a symbolic link"),
            Ok(_) => {}
        }
        match os::read_own(&self.file, FILE_MAX).map(String::from_utf8) {
            Ok(Ok(text)) if text.contains(MARK) => Found::Ours(text),
            Ok(_) => foreign("outlast did not write it"),
            Err(error) => Found::Foreign(report::plain(&error.to_string())),
        }
    }

    fn refuse_foreign(&self, found: &Found) -> Result<(), Report> {
        let Found::Foreign(why) = found else { return Ok(()) };
        Err(Report::new(report::FAILURE, format!("{} is not touched", self.shown()))
            .because(why)
            .hint("move it away, and run the command again"))
    }

    fn shown(&self) -> String {
        from_home(&self.file, Some(&self.home))
    }

    /// The link that `systemctl enable` creates.
    fn link(&self) -> Option<PathBuf> {
        (self.manager == Manager::Systemd).then(|| self.file.with_file_name("default.target.wants").join(UNIT))
    }

    /// launchd loads every file in its directory; systemd needs the link.
    fn is_enabled(&self) -> bool {
        let is_ours = matches!(self.find(), Found::Ours(_));
        is_ours && self.link().is_none_or(|link| link.symlink_metadata().is_ok())
    }

    /// Runs `systemctl --user`; the error is what it printed, or why it could not be run.
    fn systemctl(&self, words: &[&str]) -> Result<(), String> {
        let output = Command::new("systemctl").arg("--user").args(words).output();
        let output =
            output.map_err(|error| format!("`systemctl` cannot be run: {}", report::plain(&error.to_string())))?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let line = said.lines().find(|line| !line.trim().is_empty());
        Err(line.map_or_else(|| format!("`systemctl` ended with {}", output.status), |line| line.trim().to_owned()))
    }
}

fn enable(service: &Service, yes: bool, dry_run: bool) -> Result<ExitCode, Report> {
    let text = service.text()?;
    let found = service.find();
    service.refuse_foreign(&found)?;
    if found == Found::Ours(text.clone()) && service.is_enabled() {
        return print(&format!("Enabled already: {}\n", service.shown()));
    }
    print(&format!("{}:\n\n{text}\n", service.shown()))?;
    if dry_run {
        return print("Nothing was written.\n");
    }
    if !yes && !adopt::is_confirmed("Write this file? [y/N] ")? {
        print("Nothing was written.\n")?;
        return Ok(ExitCode::from(report::FAILURE));
    }
    write(&service.file, text.as_bytes()).map_err(|error| {
        Report::new(report::FAILURE, format!("cannot write {}", service.shown()))
            .because(error)
            .hint("nothing was changed; free some space or correct the directory, and run the command again")
    })?;
    if service.manager == Manager::Systemd {
        let enabled = service.systemctl(&["daemon-reload"]).and_then(|()| service.systemctl(&["enable", UNIT]));
        enabled.map_err(|because| {
            Report::new(report::FAILURE, format!("{} is written, but systemd does not start it", service.shown()))
                .because(because)
                .hint(format!(
                    "with a running systemd, `systemctl --user enable {UNIT}` completes it; without systemd, run \
                     `outlast restore --all` after each login; `outlast startup disable` removes the file"
                ))
        })?;
    }
    print(&format!("Enabled: `outlast restore --all` runs at {}.\n{}", when(service.manager), advice(service)))
}

fn disable(service: &Service) -> Result<ExitCode, Report> {
    let found = service.find();
    service.refuse_foreign(&found)?;
    let link = service.link().filter(|link| link.symlink_metadata().is_ok());
    if found == Found::Nothing && link.is_none() {
        return print("Not enabled: there is nothing to remove.\n");
    }
    let removed = |file: &Path| match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Report::new(report::FAILURE, format!("cannot remove {}", from_home(file, Some(&service.home))))
                .because(error))
        }
        _ => Ok(()),
    };
    // Without a running systemd, the link is removed below.
    if service.manager == Manager::Systemd && link.is_some() {
        let _ = service.systemctl(&["disable", UNIT]);
    }
    removed(&service.file)?;
    if let Some(link) = link {
        removed(&link)?;
        // Only an empty directory is removed.
        let _ = link.parent().map(fs::remove_dir);
    }
    if service.manager == Manager::Systemd {
        let _ = service.systemctl(&["daemon-reload"]);
    }
    print(&format!("Disabled: {} is removed. Sessions that run now are not affected.\n", service.shown()))
}

fn status(service: &Service, as_json: bool) -> Result<ExitCode, Report> {
    let found = service.find();
    let is_current = matches!(&found, Found::Ours(text) if service.text().is_ok_and(|now| now == *text));
    let is_enabled = service.is_enabled();
    if as_json {
        let state = json!({
            "enabled": is_enabled,
            "file": service.file.to_string_lossy(),
            "exists": found != Found::Nothing,
            "current": is_current,
            "at_boot": starts_at_boot(service),
        });
        return print_json(&format!("{}\n", pretty(&state)));
    }
    let words = match (&found, is_enabled) {
        (Found::Nothing, _) => "Not enabled: `outlast startup enable` shows and writes what is needed.\n".to_owned(),
        (Found::Foreign(why), _) => format!("Not enabled: {} is not outlast's ({why}).\n", service.shown()),
        (Found::Ours(_), false) => format!(
            "Not enabled: {} is written, but systemd does not start it; `systemctl --user enable {UNIT}` does.\n",
            service.shown()
        ),
        (Found::Ours(_), true) => {
            let differs = match is_current {
                true => "",
                false => "The file differs from what this outlast would write: `outlast startup enable` updates it.\n",
            };
            let when = when(service.manager);
            format!(
                "Enabled: `outlast restore --all` runs at {when} ({}).\n{differs}{}",
                service.shown(),
                advice(service)
            )
        }
    };
    print(&words)
}

fn when(manager: Manager) -> &'static str {
    match manager {
        Manager::Systemd => "the start of your user manager",
        Manager::Launchd => "login",
    }
}

/// systemd starts the user manager at the first login, or at boot if the user lingers.
fn starts_at_boot(service: &Service) -> bool {
    let user = env::var("USER").or_else(|_| env::var("LOGNAME")).unwrap_or_default();
    let is_name = !user.is_empty() && !user.contains('/');
    service.manager == Manager::Systemd && is_name && Path::new("/var/lib/systemd/linger").join(user).exists()
}

fn advice(service: &Service) -> &'static str {
    match service.manager {
        Manager::Systemd if !starts_at_boot(service) => {
            "This is at your first login; `loginctl enable-linger` makes it happen at boot.\n"
        }
        _ => "",
    }
}

/// Writes the file whole, readable by all, as the other files of its directory are.
fn write(file: &Path, bytes: &[u8]) -> io::Result<()> {
    if let Some(dir) = file.parent() {
        fs::create_dir_all(dir)?;
    }
    home::write_private(file, bytes)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(file, fs::Permissions::from_mode(0o644))?;
    }
    Ok(())
}

/// None if the program's path cannot be written in the file.
fn text(manager: Manager, program: &Path, search_path: Option<&str>) -> Option<String> {
    let is_plain = |text: &&str| !text.chars().any(char::is_control);
    let program = program.to_str().filter(is_plain)?;
    // Agents are found by it: the user manager has a shorter one than a shell.
    let search_path = search_path.filter(is_plain);
    Some(match manager {
        Manager::Systemd => systemd_unit(program, search_path),
        Manager::Launchd => launchd_agent(program, search_path),
    })
}

fn systemd_unit(program: &str, search_path: Option<&str>) -> String {
    let quoted = |text: &str| format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%"));
    let environment =
        search_path.map(|path| format!("Environment={}\n", quoted(&format!("PATH={path}")))).unwrap_or_default();
    // The restored sessions stay in the unit's control group: the unit stays active, and stopping it stops them. They are
    // stopped by a signal, so the next start restores them.
    format!(
        "# {MARK}; `outlast startup disable` removes it.\n\
         [Unit]\n\
         Description=Sessions of outlast that were interrupted\n\
         \n\
         [Service]\n\
         Type=oneshot\n\
         RemainAfterExit=yes\n\
         {environment}\
         ExecStart={} restore --all\n\
         TimeoutStartSec=infinity\n\
         TimeoutStopSec=15\n\
         \n\
         [Install]\n\
         WantedBy=default.target\n",
        quoted(program).replace('$', "$$")
    )
}

fn launchd_agent(program: &str, search_path: Option<&str>) -> String {
    let escaped = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let environment = search_path.map(|path| {
        format!(
            "\t<key>EnvironmentVariables</key>\n\t<dict>\n\t\t<key>PATH</key>\n\t\t<string>{}</string>\n\t</dict>\n",
            escaped(path)
        )
    });
    // Without AbandonProcessGroup, launchd would end the sessions with the command that started them.
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
         <!-- {MARK}; `outlast startup disable` removes it. -->\n\
         <!DOCTYPE plist PUBLIC \"-//Apple//DTD PLIST 1.0//EN\" \"http://www.apple.com/DTDs/PropertyList-1.0.dtd\">\n\
         <plist version=\"1.0\">\n\
         <dict>\n\
         \t<key>Label</key>\n\
         \t<string>{LABEL}</string>\n\
         \t<key>ProgramArguments</key>\n\
         \t<array>\n\
         \t\t<string>{}</string>\n\
         \t\t<string>restore</string>\n\
         \t\t<string>--all</string>\n\
         \t</array>\n\
         {}\
         \t<key>RunAtLoad</key>\n\
         \t<true/>\n\
         \t<key>AbandonProcessGroup</key>\n\
         \t<true/>\n\
         </dict>\n\
         </plist>\n",
        escaped(program),
        environment.unwrap_or_default()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROGRAM: &str = "/opt/my tools/50%/out\"last";
    const PATHS: &str = "/opt/my tools/50%:/usr/bin:/home/u/$x";

    #[test]
    fn the_systemd_unit_reads_well() {
        insta::assert_snapshot!(systemd_unit(PROGRAM, Some(PATHS)));
    }

    #[test]
    fn the_launchd_agent_reads_well() {
        insta::assert_snapshot!(launchd_agent("/opt/a & b/outlast", Some("/usr/bin:/opt/<x>")));
    }

    #[test]
    fn a_path_with_invalid_characters_is_left_out() {
        let text = |program: &str, paths: &str| text(Manager::Systemd, Path::new(program), Some(paths));
        assert_eq!(text("/a\nExecStart=b", "/usr/bin"), None);
        assert!(!text("/outlast", "/a\nb").unwrap().contains("PATH="));
    }

    /// systemd's own check, where it is installed.
    #[cfg(target_os = "linux")]
    #[test]
    fn systemd_accepts_the_unit() {
        let dir = tempfile::tempdir().unwrap();
        let unit = dir.path().join(UNIT);
        let verify = || {
            let mut command = Command::new("systemd-analyze");
            command.env("XDG_RUNTIME_DIR", dir.path()).args(["verify", "--user"]).arg(&unit).output()
        };
        fs::write(&unit, systemd_unit("/bin/sh", Some(PATHS))).unwrap();
        let Ok(output) = verify() else {
            eprintln!("skipped: there is no systemd-analyze");
            return;
        };
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && !said.contains(UNIT), "{said}");
        // The check finds a mistake in the file.
        fs::write(&unit, systemd_unit("/bin/sh", None).replace("Type=oneshot", "Type=sometimes")).unwrap();
        let said = verify().unwrap();
        assert!(String::from_utf8_lossy(&said.stderr).contains("sometimes"));
    }
}
