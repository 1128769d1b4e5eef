//! `outlast upgrade`: replaces the program of running instances. How an instance does that is in its driver.

use std::{path::Path, process::ExitCode, time::Duration};

use outlast_control::{
    answer::Upgraded,
    client::Found,
    find::registry,
    method::{self, Method},
};
use outlast_core::count::count;
use serde_json::{Value, json};

use super::instances::{Target, ask, pretty, print, print_json};
use crate::cli::{
    self,
    report::{self, Report},
};

/// How long an instance may take to answer: it checks the program, waits for what it has begun, and reports after 10 s
/// that the upgrade is postponed.
const ANSWER_MAX: Duration = Duration::from_secs(30);

pub(crate) fn upgrade(arguments: &cli::Upgrade) -> Result<ExitCode, Report> {
    let program = arguments.program.as_deref().map(absolute).transpose()?;
    let method = Method::Upgrade(method::Upgrade { program });
    if !arguments.all {
        let target = Target::find(arguments.id.as_deref())?;
        let id = target.entry.id.clone();
        let answer = Upgraded::read(&ask(&target.entry, &method, Some(ANSWER_MAX))?);
        if arguments.json {
            return print_json(&format!("{}\n", pretty(&in_json(&id, &answer))));
        }
        return print(&in_words(&id, &answer));
    }
    let mut answers = Vec::new();
    let mut has_failed = false;
    let entries = registry()?.read();
    for entry in entries.iter().filter(|entry| !entry.is_stale()) {
        match ask(entry, &method, Some(ANSWER_MAX)).map(|answer| Upgraded::read(&answer)) {
            Ok(answer) if arguments.json => answers.push(in_json(&entry.id, &answer)),
            Ok(answer) => drop(print(&in_words(&entry.id, &answer))?),
            Err(report) => {
                has_failed = true;
                answers.push(json!({"id": entry.id, "error": report.to_json()}));
                let _ = report.print();
            }
        }
    }
    if arguments.json {
        print_json(&format!("{}\n", pretty(&answers.into())))?;
    } else if entries.is_empty() {
        print("Nothing runs under outlast.\n")?;
    }
    Ok(ExitCode::from(if has_failed { report::FAILURE } else { 0 }))
}

/// The line below `ps`, if instances run an older program than the one on disk.
pub(crate) fn hint(found: &[Found]) -> Option<String> {
    let is_outdated = |found: &&Found| found.entry.program.as_ref().is_some_and(|program| program.is_outdated());
    let outdated = found.iter().filter(is_outdated).count();
    (outdated > 0).then(|| {
        let runs = if outdated == 1 { "runs" } else { "run" };
        format!(
            "{} {runs} an older program than the one on disk: `outlast upgrade --all` replaces it in place.\n",
            count(outdated, "instance", "instances")
        )
    })
}

fn absolute(program: &Path) -> Result<String, Report> {
    let failed = || Report::new(report::USAGE, format!("cannot upgrade to `{}`", program.display()));
    let path = program.canonicalize().map_err(|error| failed().because(error))?;
    path.into_os_string().into_string().map_err(|_| failed().because("its path is not UTF-8"))
}

fn in_json(id: &str, answer: &Upgraded) -> Value {
    json!({
        "id": id,
        "upgraded": answer.upgraded,
        "version": answer.version,
        "previous_version": answer.previous_version,
        "pause_ms": answer.pause_ms,
        "postponed": answer.postponed,
    })
}

fn in_words(id: &str, answer: &Upgraded) -> String {
    if let Some(why) = &answer.postponed {
        return format!("Postponed the upgrade of {id}: {why}; it takes place as soon as that is over\n");
    }
    let named = |version: &Option<String>| version.clone().unwrap_or_else(|| "an unknown version".to_owned());
    let (from, to) = (named(&answer.previous_version), named(&answer.version));
    format!("Upgraded {id} from {from} to {to}; it paused for {} ms\n", answer.pause_ms.unwrap_or_default())
}
