//! What the program says of itself: help, man pages, completions.

use std::{
    fs,
    os::unix::fs::symlink,
    process::{Command, Output},
};

use crate::{control::World, support::OUTLAST};

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn help_explains_commands_and_topics() {
    let world = World::new();
    let table = [
        (&["help"][..], 0, "Usage: outlast <COMMAND>"),
        (&["help", "mcp"], 0, "Usage: outlast mcp [OPTIONS] -- <CMD>..."),
        (&["help", "--help"], 0, " help [COMMAND|TOPIC]..."),
        (&["help", "topics"], 0, "exit-codes"),
        (&["help", "eras"], 0, "The two eras"),
        (&["help", "polices"], 2, "did you mean `policies`?"),
        (&["restat"], 2, "did you mean `restart`?"),
        (&["mcp", "--drain", "soon", "--", "x"], 2, "`outlast mcp --help` says what there is"),
    ];
    for (args, code, words) in table {
        let output = world.outlast(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", said(&output));
        assert!(said(&output).contains(words), "{args:?}: {}", said(&output));
    }
}

#[test]
fn man_pages_are_written_where_one_wants_them() {
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

/// Real bash, asked what it would offer.
#[test]
fn bash_completes_commands_options_and_instances() {
    let world = World::new();
    let bin = world.home.path().join("bin");
    fs::create_dir(&bin).unwrap();
    symlink(OUTLAST, bin.join("outlast")).unwrap();
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
    assert_eq!(offered(&["outlast", "res"]), ["restart", "resume"]);
    assert_eq!(offered(&["outlast", "mcp", "--dr"]), ["--drain"]);
    assert_eq!(offered(&["outlast", "mcp", "--policy", "w"]), ["watchdog"]);
    let instances = offered(&["outlast", "state", ""]);
    assert!(instances.len() == 1 && instances[0].starts_with("weather-"), "{instances:?}");
    assert_eq!(offered(&["outlast", "state", "--j"]), ["--json"]);
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
    assert!(said(&output).contains("it may be `bash`, `elvish`, `fish`, `powershell` or `zsh`"), "{}", said(&output));
}
