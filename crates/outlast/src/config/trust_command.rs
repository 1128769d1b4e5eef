//! `outlast trust`: shows, records and removes the user's trust in a configuration file.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::ExitCode,
    rc::Rc,
};

use outlast_os as os;
use serde_json::json;

use super::{
    NAME, find, text_of,
    tree::{self, File, Position},
    trust::{self, Guarded, Store, Verdict},
};
use crate::{
    adopt::{
        self,
        servers::{How, Server},
    },
    cli::{
        self,
        report::{self, Report, shell_quote},
        table::{Column, Yield, lines, room},
    },
    operator::instances::{print, print_json},
};

pub(crate) fn run(arguments: &cli::Trust) -> Result<ExitCode, Report> {
    let home = env::home_dir()
        .filter(|home| home.is_absolute())
        .ok_or_else(|| Report::new(report::FAILURE, "there is no home directory to store trust in").hint("set HOME"))?;
    let cwd = report::cwd()?;
    let store = Store::of(&home);
    let file = file(arguments.path.as_deref(), &cwd)?;
    let cannot = |error: std::io::Error| {
        Report::new(report::FAILURE, "cannot write the trust record")
            .because(error)
            .hint("`outlast doctor` checks the state directory")
    };
    if arguments.remove {
        let removed = store.revoke(&file).map_err(cannot)?;
        if arguments.json {
            return print_json(&format!("{:#}\n", json!({"file": file.display().to_string(), "removed": removed})));
        }
        let words = if removed { "No longer trusted" } else { "Was not trusted" };
        return print(&format!("{words}: {}\n", file.display()));
    }
    let guarded = guarded(&file, &cwd)?;
    if !arguments.show && !guarded.is_empty() {
        store.grant(&file, &guarded).map_err(cannot)?;
    }
    let verdict = store.verdict(&file, &guarded);
    match arguments.json {
        true => print_json(&format!("{:#}\n", in_json(&file, &guarded, &verdict))),
        false => print(&in_words(&file, &guarded, &verdict)),
    }
}

fn file(named: Option<&Path>, cwd: &Path) -> Result<PathBuf, Report> {
    match named.map(|path| cwd.join(path)) {
        Some(dir) if dir.is_dir() => Ok(dir.join(NAME)),
        Some(file) => Ok(file),
        None => {
            let mut untrusted = Vec::new();
            find(cwd, &mut untrusted).ok_or_else(|| match untrusted.into_iter().next() {
                Some(file) => Report::new(report::FAILURE, file.why).hint(file.hint),
                None => Report::new(report::FAILURE, format!("no {NAME} in this directory or above"))
                    .hint("name a file or a directory: `outlast trust FILE`"),
            })
        }
    }
}

/// The values of a file that need trust: of an `outlast.toml` the guarded keys, of a client's file its servers.
pub(crate) fn guarded(path: &Path, cwd: &Path) -> Result<Vec<Guarded>, Report> {
    let shown = path.strip_prefix(cwd).unwrap_or(path).display().to_string();
    if let Ok(about) = fs::metadata(path)
        && !os::is_trusted(&about)
    {
        return Err(Report::new(report::FAILURE, format!("`{shown}` belongs to another user"))
            .hint("copy it, or name it with `--config`"));
    }
    if path.file_name().is_some_and(|name| name == NAME) {
        let file = Rc::new(File { path: path.to_owned(), shown });
        let node = text_of(&file).and_then(|text| tree::toml(&file, &text)).map_err(super::mistake::Mistakes::from)?;
        return Ok(trust::split(node, path.parent().unwrap_or(Path::new("/"))).1);
    }
    let config = adopt::Config::read(adopt::clients::ConfigFile::named(path))?;
    let file = Rc::new(File { path: path.to_owned(), shown });
    Ok(config.servers.iter().filter_map(|server| of_server(server, &file)).collect())
}

/// What a client's file starts under this name.
fn of_server(server: &Server, file: &Rc<File>) -> Option<Guarded> {
    let How::Starts(_) = server.how else { return None };
    let command = adopt::edit::command_of(server)?;
    let env: serde_json::Map<_, _> = server.env.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
    let value = json!({"command": command, "env": env, "cwd": server.cwd});
    let key = match &server.project {
        Some(project) => format!("server.{} of {project}", server.name),
        None => format!("server.{}", server.name),
    };
    Some(Guarded { key, at: Position { file: file.clone(), line: 0, column: 0 }, value })
}

fn in_json(file: &Path, guarded: &[Guarded], verdict: &Verdict) -> serde_json::Value {
    let values: Vec<serde_json::Value> = guarded
        .iter()
        .map(|value| json!({"key": value.key, "value": value.shown(), "place": value.at.to_string()}))
        .collect();
    let (trusted, why) = match verdict {
        Verdict::Trusted => (true, None),
        Verdict::Unknown => (false, Some("it was never trusted".to_owned())),
        Verdict::Changed => (false, Some("it was changed since it was trusted".to_owned())),
        Verdict::Unusable(why) => (false, Some(why.clone())),
    };
    json!({"file": file.display().to_string(), "trusted": trusted, "why": why, "values": values})
}

fn in_words(file: &Path, guarded: &[Guarded], verdict: &Verdict) -> String {
    if guarded.is_empty() {
        return format!("{} sets nothing that needs trust.\n", file.display());
    }
    let column = |title, yields| Column { title, is_number: false, yields };
    let columns =
        [column("KEY", Yield::Last(12)), column("VALUE", Yield::End(40, 16)), column("FROM", Yield::End(30, 12))];
    let row = |value: &Guarded| vec![value.key.clone(), value.shown().to_string(), value.at.to_string()];
    let rows: Vec<Vec<String>> = guarded.iter().map(row).collect();
    let mut words: String = lines(&columns, &rows, room()).into_iter().map(|line| line + "\n").collect();
    let quoted = shell_quote([file.to_string_lossy().as_ref()]);
    let hint = format!("`outlast trust {quoted}` trusts these values");
    words.push_str(&match verdict {
        Verdict::Trusted => format!("Trusted: {}\n", file.display()),
        Verdict::Unknown => format!("Not trusted: {hint}\n"),
        Verdict::Changed => format!("Changed since it was trusted: {hint}\n"),
        Verdict::Unusable(why) => format!("Not trusted: {why}\n"),
    });
    words
}
