//! `outlast completions` and `outlast man`: the command line as shells and `man` need it.

use std::{fs, path::Path, process::ExitCode};

use clap::CommandFactory;
use clap_complete::Shell;
use outlast_control::find;

use crate::{
    cli::{
        self,
        report::{self, Report},
    },
    operator::instances::print,
};

/// The commands whose first argument is an instance.
const WITH_ID: [&str; 15] = [
    "state", "pid", "restart", "stop", "resume", "upgrade", "logs", "audit", "inject", "attach", "screen", "send",
    "wait-for", "switch", "reload",
];

pub(crate) fn completions(arguments: &cli::Completions) -> Result<ExitCode, Report> {
    print(&script(arguments.shell))
}

fn script(shell: Shell) -> String {
    let mut command = visible(&cli::Cli::command());
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "outlast", &mut script);
    let script = String::from_utf8_lossy(&script).into_owned();
    let names: Vec<&str> = WITH_ID.into_iter().filter(|name| command.find_subcommand(name).is_some()).collect();
    match shell {
        Shell::Bash => script + &bash(&names),
        Shell::Zsh => zsh(&script),
        Shell::Fish => script + &fish(&names),
        _ => script,
    }
}

/// Without what is hidden: the generators offer everything they see.
fn visible(cli: &clap::Command) -> clap::Command {
    clap::Command::new("outlast")
        .version(env!("CARGO_PKG_VERSION"))
        .disable_help_subcommand(true)
        .args(cli.get_arguments().cloned())
        .subcommands(cli.get_subcommands().filter(|command| !command.is_hide_set()).cloned())
}

/// Where an instance is meant, those that run are offered; everything else is as it was generated.
fn bash(names: &[&str]) -> String {
    format!(
        r#"
_outlast_or_id() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}"
    case "${{COMP_WORDS[1]}}" in
        {})
            if [[ $COMP_CWORD -eq 2 && "$word" != -* ]]; then
                COMPREPLY=($(compgen -W "$(outlast ids 2>/dev/null)" -- "$word"))
                return 0
            fi
            ;;
    esac
    _outlast "$@"
}}
complete -F _outlast_or_id -o bashdefault -o default outlast
"#,
        names.join("|")
    )
}

fn zsh(script: &str) -> String {
    let ids = "_outlast_ids() {\n    compadd -- ${(f)\"$(outlast ids 2>/dev/null)\"}\n}\n";
    let offered: String = script
        .split_inclusive('\n')
        .map(|line| {
            let is_id = ["'::id -- ", "':id -- "].iter().any(|start| line.trim_start().starts_with(start));
            if is_id { line.replace(":_default'", ":_outlast_ids'") } else { line.to_owned() }
        })
        .collect();
    match offered.split_once('\n') {
        // The first line tells zsh what this is for.
        Some((first, rest)) => format!("{first}\n\n{ids}{rest}"),
        None => offered,
    }
}

fn fish(names: &[&str]) -> String {
    format!(
        "complete -c outlast -n \"__fish_seen_subcommand_from {}\" -f -a \"(outlast ids 2>/dev/null)\"\n",
        names.join(" ")
    )
}

/// The ids of what runs, a line each: for shells.
pub(crate) fn ids() -> Result<ExitCode, Report> {
    let entries = find::registry()?.read();
    print(&entries.iter().filter(|entry| !entry.is_stale()).map(|entry| format!("{}\n", entry.id)).collect::<String>())
}

pub(crate) fn man(arguments: &cli::Man) -> Result<ExitCode, Report> {
    let mut command = cli::Cli::command();
    command.build();
    let Some(dir) = &arguments.dir else {
        let page = clap_mangen::Man::new(command);
        let mut text = Vec::new();
        page.render(&mut text).map_err(|error| Report::new(report::FAILURE, "cannot write the page").because(error))?;
        return print(&String::from_utf8_lossy(&text));
    };
    let count = write_pages(&command, dir).map_err(|error| {
        Report::new(report::FAILURE, format!("cannot write man pages to `{}`", dir.display()))
            .because(error)
            .hint("name a directory that you can write to, such as ~/.local/share/man/man1")
    })?;
    print(&format!("Wrote {count} pages to {}\n", dir.display()))
}

/// One page for outlast and one for each command, `outlast-mcp.1` and so on.
fn write_pages(command: &clap::Command, dir: &Path) -> std::io::Result<usize> {
    fs::create_dir_all(dir)?;
    let mut count = 0;
    let mut left = vec![(command.clone(), "outlast".to_owned())];
    while let Some((command, name)) = left.pop() {
        for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
            left.push((inner.clone(), format!("{name}-{}", inner.get_name())));
        }
        let mut text = Vec::new();
        let page = clap_mangen::Man::new(command.clone().display_name(name.clone()));
        page.title(name.to_uppercase()).render(&mut text)?;
        fs::write(dir.join(format!("{name}.1")), text)?;
        count += 1;
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_are_completed_where_an_instance_is_expected() {
        for (shell, words) in [
            (Shell::Bash, "compgen -W \"$(outlast ids 2>/dev/null)\""),
            (Shell::Zsh, ":_outlast_ids'"),
            (Shell::Fish, "-a \"(outlast ids 2>/dev/null)\""),
        ] {
            assert!(script(shell).contains(words), "{shell}");
        }
        assert!(script(Shell::Zsh).starts_with("#compdef outlast\n"));
        assert!(script(Shell::PowerShell).contains("Register-ArgumentCompleter"));
        assert!(!script(Shell::Bash).contains("demo-server"), "what is hidden is not offered");
    }

    /// PowerShell is not to be had everywhere, so its script is read as it would read it: strings end, brackets match, and
    /// each command has a block with all its options.
    #[test]
    fn powershell_finds_every_command_and_option() {
        let script = script(Shell::PowerShell);
        let (mut open, mut is_quoted) = (Vec::new(), false);
        for letter in script.chars() {
            match letter {
                // A doubled one within a string ends it and begins it again, which comes to the same.
                '\'' => is_quoted = !is_quoted,
                _ if is_quoted => {}
                '(' | '{' | '[' => open.push(letter),
                ')' => assert_eq!(open.pop(), Some('('), "{script}"),
                '}' => assert_eq!(open.pop(), Some('{'), "{script}"),
                ']' => assert_eq!(open.pop(), Some('['), "{script}"),
                _ => {}
            }
        }
        assert!(!is_quoted && open.is_empty(), "something does not end");
        let mut command = visible(&cli::Cli::command());
        command.build();
        let mut left = vec![(command, "outlast".to_owned())];
        let mut count = 0;
        while let Some((command, path)) = left.pop() {
            let (_, block) = script.split_once(&format!("\n        '{path}' {{\n")).expect(&path);
            let block = block.split("\n            break\n").next().unwrap_or_default();
            let options = command.get_arguments().filter(|argument| !argument.is_hide_set());
            for option in options.filter_map(|argument| argument.get_long()) {
                assert!(block.contains(&format!("::new('--{option}', ")), "{path} --{option}");
                count += 1;
            }
            for inner in command.get_subcommands() {
                assert!(block.contains(&format!("::new('{}', ", inner.get_name())), "{path} {}", inner.get_name());
                left.push((inner.clone(), format!("{path};{}", inner.get_name())));
            }
        }
        assert!(count > 80, "only {count} options");
    }

    #[test]
    fn every_command_has_a_page() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = cli::Cli::command();
        command.build();
        let count = write_pages(&command, dir.path()).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), count);
        for name in ["outlast", "outlast-mcp", "outlast-run", "outlast-wrap", "outlast-top", "outlast-doctor"] {
            let page = fs::read_to_string(dir.path().join(format!("{name}.1"))).unwrap();
            assert!(page.contains(".SH NAME") && page.contains(&name.replace('-', "\\-")), "{page}");
        }
        assert!(!dir.path().join("outlast-demo-server.1").exists());
    }
}
