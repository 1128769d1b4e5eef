//! One requested upgrade, for any driver: the check of the new program, the answers and records, and the `execve`. When
//! each happens is decided by core's `upgrade`.

use std::{
    env,
    ffi::OsString,
    future::Future,
    io,
    path::{Path, PathBuf},
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, SystemTime},
};

use nix::errno::Errno;
use outlast_control::{answer::Upgraded, registry::Program, wire::Refusal};
use outlast_core::{
    record::{self, Record},
    upgrade::Upgrade,
};
use outlast_os::{
    self as os,
    handover::{self, FileIdentity, Handover, MemoryFile},
    offload::{Task, offload},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    OWN_VERSION,
    format::{self, Header},
};
use crate::cli::report::{self, Report};

/// How long a new program may take to read the state; then the old one continues.
const CHECK_MAX: Duration = Duration::from_secs(10);

/// A requested upgrade and what it waits for.
#[derive(Debug, Default)]
pub(crate) struct Upgrades {
    pub machine: Upgrade,
    checking: Option<Task<Result<FileIdentity, Report>>>,
    /// The file that was checked.
    checked: Option<FileIdentity>,
}

impl Upgrades {
    /// Checks the program beside the loop.
    pub(crate) fn check(&mut self, program: PathBuf, state: Vec<u8>) {
        self.checking = Some(offload(move || check(&program, &state)));
    }

    /// The result of the check.
    pub(crate) fn poll_checked(&mut self, cx: &mut Context<'_>) -> Option<Result<(), Report>> {
        let Poll::Ready(checked) = Pin::new(self.checking.as_mut()?).poll(cx) else { return None };
        self.checking = None;
        let failed = |error| Report::new(report::FAILURE, "the new program cannot be checked").because(error);
        let checked = checked.unwrap_or_else(|error: io::Error| Err(failed(error)));
        Some(checked.map(|file| self.checked = Some(file)))
    }

    /// Becomes the program that was checked. Returns only on failure, with the reason.
    pub(crate) fn become_next(&self, program: &Path, state: &MemoryFile, handover: &Handover) -> Report {
        let failed = || Report::new(report::FAILURE, format!("cannot upgrade to `{}`", program.display()));
        match handover::check_program(program) {
            Ok(file) if self.checked != Some(file) => {
                failed().because("the file was replaced after it was checked").hint("upgrade again")
            }
            Ok(_) => {
                os::finish_saying();
                let args: Vec<OsString> = env::args_os().collect();
                failed().because(handover::become_next(program, &args, state, handover))
            }
            Err(error) => failed().because(error),
        }
    }
}

/// The requests that the next program answers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Requested {
    pub tickets: Vec<u64>,
    /// When the last program stopped serving.
    pub paused: Option<SystemTime>,
}

impl Requested {
    pub(crate) fn pause(&self) -> Duration {
        self.paused.and_then(|at| at.elapsed().ok()).unwrap_or_default()
    }
}

/// The program that an instance is to become: the one that was named, or the one that it was started with.
pub(crate) fn wanted_program(named: Option<String>, own: Option<&Program>) -> Result<PathBuf, Report> {
    let Some(path) = named.map(PathBuf::from).or(own.map(|own| own.path.clone())) else {
        return Err(Report::new(report::FAILURE, "the path of the running program is not known")
            .hint("name the new one with `--program`"));
    };
    if !path.is_absolute() {
        return Err(Report::new(report::USAGE, format!("`{}` is not an absolute path", path.display())));
    }
    Ok(path)
}

/// Runs the program once with the state: it proves that it is outlast and can continue with it. It blocks.
fn check(program: &Path, state: &[u8]) -> Result<FileIdentity, Report> {
    let failed = || Report::new(report::FAILURE, format!("cannot upgrade to `{}`", program.display()));
    let checked = handover::check_program(program).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => failed().because("there is no such file"),
        _ => failed().because(&error).hint("it must be an executable file of this user or of root"),
    })?;
    let file = save(state)?;
    let own = ["check-state", "--"].map(OsString::from).into_iter();
    let args: Vec<OsString> = own.chain(env::args_os().skip(1)).collect();
    let printed = handover::try_state(program, &args, file, CHECK_MAX).map_err(|error| match error.raw_os_error() {
        Some(number) if number == Errno::ENOEXEC as i32 => failed()
            .because("it is not a program for this machine")
            .hint("install the build for this operating system and processor"),
        _ => failed().because(error),
    })?;
    if serde_json::from_str::<Value>(&printed.stdout).is_ok_and(|proof| proof["outlast"].is_string()) {
        return Ok(checked);
    }
    let said = printed.stderr.lines().find_map(|line| line.strip_prefix("error: "));
    Err(match said {
        _ if printed.is_late => failed().because(format!("it did not read the state within {} s", CHECK_MAX.as_secs())),
        // What an outlast says that does not know the command.
        Some(said) if said.contains("check-state") => failed()
            .because("it is an older version of outlast, which cannot take over a running instance")
            .hint("stop the instance, and start it with that version"),
        Some(said) => failed().because(said),
        None => failed().because("it is not outlast"),
    })
}

/// The state in a file that the next program reads.
pub(crate) fn save(state: &[u8]) -> Result<MemoryFile, Report> {
    MemoryFile::new(state).map_err(|error| {
        Report::new(report::FAILURE, "the state of the instance cannot be saved")
            .because(error)
            .hint("free some memory or disk space, and try again")
    })
}

// ---- answers and records -------------------------------------------------------------------------------------------

/// The answer of the new program.
pub(crate) fn upgraded(header: &Header, pause: Duration) -> Value {
    let pause_ms = (pause.as_secs_f64() * 1e4).round() / 10.0;
    json!(Upgraded {
        upgraded: true,
        previous_version: Some(header.outlast.clone()),
        version: Some(OWN_VERSION.to_owned()),
        pause_ms: Some(pause_ms),
        postponed: None,
    })
}

/// The answer to a request that is carried out later.
pub(crate) fn postponed(why: &str) -> Value {
    json!(Upgraded { postponed: Some(why.to_owned()), ..Upgraded::default() })
}

/// The answer to a request that failed.
pub(crate) fn refused(report: &Report) -> Refusal {
    Refusal { data: json!({"hint": report.hint}), ..Refusal::new("upgrade_failed", in_one_sentence(report)) }
}

/// The record of a finished upgrade.
pub(crate) fn record(header: &Header, pause: Duration) -> Record {
    let detail = format!(
        "from {} to {OWN_VERSION}; the state had version {}, and this program writes version {}",
        header.outlast,
        header.version,
        format::version()
    );
    let pid = Some(std::process::id());
    Record { pid, detail: Some(detail), took: Some(pause), ..Record::new(record::Event::Upgraded) }
}

/// The record of a failed upgrade.
pub(crate) fn failure(report: &Report) -> Record {
    let pid = Some(std::process::id());
    Record { pid, detail: Some(in_one_sentence(report)), ..Record::new(record::Event::UpgradeFailed) }
}

fn in_one_sentence(report: &Report) -> String {
    match &report.because {
        Some(because) => format!("{}: {because}", report.sentence),
        None => report.sentence.clone(),
    }
}
