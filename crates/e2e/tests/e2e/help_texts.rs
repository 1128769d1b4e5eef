//! The texts of the program about itself: help, man pages, completions.

use std::{
    fs,
    io::Write,
    os::unix::fs::symlink,
    path::PathBuf,
    process::{Command, Output},
    thread,
    time::{Duration, Instant},
};

use crate::{control::World, support::OUTLAST};

/// Nothing here takes long; a longer wait would never end.
const PATIENCE: Duration = Duration::from_secs(60);

impl World {
    /// A directory with the program under its usual name.
    fn with_program(&self) -> PathBuf {
        let bin = self.home.path().join("bin");
        fs::create_dir(&bin).unwrap();
        symlink(OUTLAST, bin.join("outlast")).unwrap();
        bin
    }
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn help_explains_commands_and_topics() {
    let world = World::new();
    let table = [
        (&[][..], 0, "Run and supervise:\n  mcp "),
        (&["help"], 0, "Usage: outlast <COMMAND>"),
        (&["help", "mcp"], 0, "Usage: outlast mcp [OPTIONS] -- <CMD>..."),
        (&["help", "--help"], 0, " help [COMMAND|TOPIC]..."),
        (&["help", "topics"], 0, "exit-codes"),
        (&["help", "eras"], 0, "The two eras"),
        (&["help", "polices"], 2, "did you mean `policies`?"),
        (&["restat"], 2, "did you mean `restart`?"),
        (&["mcp", "--drain", "soon", "--", "x"], 2, "`outlast mcp --help` lists the options"),
    ];
    for (args, code, words) in table {
        let output = world.outlast(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", said(&output));
        assert!(said(&output).contains(words), "{args:?}: {}", said(&output));
    }
}

#[test]
fn man_pages_are_written_to_the_given_directory() {
    let world = World::new();
    let dir = world.project.path().join("man/man1");
    let output = world.outlast(&["man", dir.to_str().unwrap()]);
    assert!(output.status.success(), "{}", said(&output));
    let page = fs::read_to_string(dir.join("outlast-wrap.1")).unwrap();
    assert!(page.contains("unwrap") && page.contains(".SH OPTIONS"), "{page}");
    assert!(said(&world.outlast(&["man"])).contains(".TH outlast 1"));

    fs::write(world.project.path().join("file"), "").unwrap();
    let output = world.outlast(&["man", "file"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).starts_with("error: cannot write man pages to `file`\n  because: "), "{}", said(&output));
}

/// Completions of a real bash.
#[test]
fn bash_completes_commands_options_and_instances() {
    let world = World::new();
    let bin = world.with_program();
    let _weather = world.start("weather", &[]);
    let offered = |words: &[&str]| {
        let line = words.join(" ");
        let script = format!(
            r#"source <(outlast completions bash); COMP_WORDS=({line}); [ -n "{last}" ] || COMP_WORDS+=(""); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
            complete -p outlast | grep -q _outlast_or_id || exit 9
            _outlast_or_id outlast "{last}" "{before}"; printf '%s\n' "${{COMPREPLY[@]}}""#,
            last = words.last().unwrap(),
            before = words[words.len() - 2],
        );
        let output = Command::new("bash")
            .args(["--norc", "-c", &script])
            .env("HOME", world.home.path())
            .env("PATH", format!("{}:/usr/bin:/bin", bin.display()))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", said(&output));
        said(&output).lines().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(offered(&["outlast", "res"]), ["restore", "restart", "resume"]);
    assert_eq!(offered(&["outlast", "mcp", "--dr"]), ["--drain"]);
    assert_eq!(offered(&["outlast", "mcp", "--policy", "w"]), ["watchdog"]);
    let instances = offered(&["outlast", "state", ""]);
    assert!(instances.len() == 1 && instances[0].starts_with("weather-"), "{instances:?}");
    assert_eq!(offered(&["outlast", "state", "--j"]), ["--json"]);
}

/// Whether a shell is installed; if not, the user sees a message.
fn has(shell: &str, test: &str) -> bool {
    let is_here = Command::new(shell).arg("--version").output().is_ok();
    if !is_here {
        let skipped = format!("SKIPPED {test}: no {shell} (`cargo xtask test` installs it)\n");
        std::io::stderr().write_all(skipped.as_bytes()).expect("stderr is open");
    }
    is_here
}

/// Completions of a real fish.
#[test]
fn fish_completes_commands_options_and_instances() {
    if !has("fish", "fish_completes_commands_options_and_instances") {
        return;
    }
    let world = World::new();
    let bin = world.with_program();
    let _weather = world.start("weather", &[]);
    let offered = |line: &str| {
        let script = format!("outlast completions fish | source; complete -C '{line}'");
        let output = Command::new("fish")
            .args(["--no-config", "-c", &script])
            .env("HOME", world.home.path())
            .env("PATH", format!("{}:/usr/bin:/bin", bin.display()))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", said(&output));
        let lines = String::from_utf8_lossy(&output.stdout).into_owned();
        lines.lines().map(|line| line.split('\t').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(offered("outlast res"), ["restart", "restore", "resume"]);
    assert_eq!(offered("outlast mcp --dr"), ["--drain"]);
    assert_eq!(offered("outlast mcp --policy w"), ["watchdog"]);
    let instances = offered("outlast state ");
    assert!(instances.len() == 1 && instances[0].starts_with("weather-"), "{instances:?}");
}

/// A real zsh in a terminal, with Tab.
#[test]
fn zsh_completes_commands_options_and_instances() {
    if !has("zsh", "zsh_completes_commands_options_and_instances") {
        return;
    }
    let world = World::new();
    let bin = world.with_program();
    let _weather = world.start("weather", &[]);
    let functions = world.home.path().join("functions");
    fs::create_dir(&functions).unwrap();
    let script = world.outlast(&["completions", "zsh"]).stdout;
    fs::write(functions.join("_outlast"), script).unwrap();
    let begin = format!("fpath=({} $fpath)\nPS1='zsh> '\nautoload -Uz compinit\ncompinit -u\n", functions.display());
    fs::write(world.home.path().join(".zshrc"), begin).unwrap();
    let tmux = |args: &[&str]| {
        let output = Command::new("tmux")
            .env("HOME", world.home.path())
            .env("ZDOTDIR", world.home.path())
            .env("PATH", format!("{}:/usr/bin:/bin", bin.display()))
            .env("LC_ALL", "C.UTF-8")
            .env_remove("TMUX")
            .arg("-S")
            .arg(world.home.path().join("tmux"))
            .args(["-f", "/dev/null"])
            .args(args)
            .output()
            .expect("tmux is not here, and without it this cannot be shown");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let _end = End(&tmux);
    tmux(&["new-session", "-d", "-x", "200", "-y", "40", "zsh"]);
    let shows = |words: &str| {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let screen = tmux(&["capture-pane", "-p"]);
            if screen.contains(words) {
                return screen;
            }
            assert!(Instant::now() < deadline, "{words:?} is not in\n{screen}");
            thread::sleep(Duration::from_millis(20));
        }
    };
    shows("zsh>");
    for (typed, completed) in [
        ("outlast resta", "zsh> outlast restart"),
        ("outlast mcp --dr", "zsh> outlast mcp --drain"),
        ("outlast mcp --policy w", "zsh> outlast mcp --policy watchdog"),
        ("outlast state we", "zsh> outlast state weather-"),
    ] {
        tmux(&["send-keys", "-l", typed]);
        shows(&format!("zsh> {typed}"));
        tmux(&["send-keys", "Tab"]);
        shows(completed);
        tmux(&["send-keys", "C-u", "C-l"]);
        // The line is cleared before the next is typed.
        let deadline = Instant::now() + PATIENCE;
        while tmux(&["capture-pane", "-p"]).contains("outlast") {
            assert!(Instant::now() < deadline, "the line stays");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Ends its tmux server with the test.
struct End<'a>(&'a dyn Fn(&[&str]) -> String);

impl Drop for End<'_> {
    fn drop(&mut self) {
        (self.0)(&["kill-server"]);
    }
}

#[test]
fn every_shell_has_a_script() {
    let world = World::new();
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let output = world.outlast(&["completions", shell]);
        assert!(output.status.success() && output.stdout.len() > 1000, "{shell}");
        assert!(!said(&output).contains("demo-server"), "{shell}: what is hidden is not offered");
    }
    let output = world.outlast(&["completions", "nu"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("use `bash`, `elvish`, `fish`, `powershell` or `zsh`"), "{}", said(&output));
}
