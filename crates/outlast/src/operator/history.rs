//! The commands that read past output: `logs` and `audit`.

use std::{
    collections::VecDeque,
    env,
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::mpsc,
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use notify::{RecursiveMode, Watcher};
use outlast_control::{
    answer::lenient,
    client::{AskError, Client},
    find::{choose, registry},
    registry::Entry,
};
use outlast_core::{
    count::one_of,
    record::{self, Event},
    visible,
};
use outlast_os as os;
use serde::Deserialize;
use serde_json::json;

use crate::{
    child::watch,
    cli::{
        self, duration,
        report::{self, Report},
        table::{self, Column, Yield},
    },
    operator::{
        cluster,
        instances::{Target, print, print_json},
    },
    state::{audit::files as audit_files, home},
};

/// How long an instance may take to accept a connection, which then reports its exit.
const PATIENCE: Duration = Duration::from_secs(2);
/// Bytes of one read, backwards from the end of a log or forwards from the last position.
const PIECE: usize = 64 << 10;
/// The most bytes read from the end of a log, and from the end of each file of an audit log. Files that outlast
/// writes are smaller.
pub(crate) const READ_MAX: u64 = 16 << 20;
/// The most records that `audit` shows as a table; older ones are left out.
pub(crate) const ROWS_MAX: usize = 100_000;
/// Log files that are examined to find the newest.
const LOGS_LOOKED_AT_MAX: usize = 10_000;

// ---- logs ----------------------------------------------------------------------------------------------------

pub(crate) fn logs(arguments: &cli::Logs) -> Result<ExitCode, Report> {
    let log = find_log(arguments.id.as_deref())?;
    let cannot_read = |error: io::Error| {
        Report::new(report::FAILURE, format!("cannot read the log {}", log.path.display())).because(error)
    };
    // Started before the first read, so that no change is missed.
    let news = if arguments.follow { Some(Follow::begin(&log).map_err(cannot_read)?) } else { None };
    let mut tail = Tail::open(&log.path).map_err(cannot_read)?;
    // The lines of one backend may be few among many.
    let wanted = if log.backend.is_some() { usize::MAX } else { arguments.lines };
    let mut text = tail.last_lines(wanted).map_err(cannot_read)?;
    let missing = wanted.saturating_sub(text.lines().count());
    if missing > 0 {
        // The log was rotated recently; the older part is in `.1`.
        let mut aside = log.path.clone().into_os_string();
        aside.push(".1");
        if let Ok(older) = Tail::open(Path::new(&aside)).and_then(|mut aside| aside.last_lines(missing)) {
            text.insert_str(0, &older);
        }
    }
    let text = log.only_wanted(&text);
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    let shown = |text: String| match arguments.json {
        true => visible::json(&in_json(&text)).into_owned(),
        false => visible::text(&text).into_owned(),
    };
    print_or_end(&shown(lines[lines.len().saturating_sub(arguments.lines)..].concat()))?;
    let Some(news) = news else { return Ok(ExitCode::SUCCESS) };
    loop {
        let goes_on = news.wait();
        loop {
            let text = tail.rest(&log.path).map_err(cannot_read)?;
            if text.is_empty() {
                break;
            }
            print_or_end(&shown(log.only_wanted(&text)))?;
        }
        if !goes_on {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// Each line of a log as an object: its time, if it has one, its source, and its text.
fn in_json(text: &str) -> String {
    let object = |line: &str| {
        let bracket = |text: &str| {
            let (inside, rest) = text.strip_prefix('[')?.split_once(']')?;
            Some((inside.to_owned(), rest.strip_prefix(' ').unwrap_or(rest).to_owned()))
        };
        let is_time = |inside: &str| inside.starts_with(|letter: char| letter.is_ascii_digit());
        let (time, rest) = match bracket(line).filter(|(inside, _)| is_time(inside)) {
            Some((time, rest)) => (Some(time), rest),
            None => (None, line.to_owned()),
        };
        let (source, text) = match bracket(&rest) {
            Some((source, text)) => (Some(source), text),
            None => (None, rest),
        };
        format!("{}\n", json!({"time": time, "source": source, "text": text, "line": line}))
    };
    text.lines().map(object).collect()
}

/// The last lines of a log, for other commands.
pub(crate) fn last_lines(path: &Path, count: usize) -> io::Result<String> {
    Tail::open(path)?.last_lines(count)
}

struct LogFile {
    path: PathBuf,
    /// The instance that writes the log, if it still runs.
    running: Option<Entry>,
    /// Only the lines about this backend of a gateway.
    backend: Option<String>,
}

impl LogFile {
    fn of(target: Target) -> Result<LogFile, Report> {
        let Target { entry, backend } = target;
        let Some(path) = entry.log.clone() else {
            return Err(Report::new(report::FAILURE, format!("`{}` has no log", entry.id))
                .hint("it found no directory that it could write to"));
        };
        Ok(LogFile { path, running: (!entry.is_stale()).then_some(entry), backend })
    }

    fn only_wanted(&self, text: &str) -> String {
        let Some(backend) = &self.backend else { return text.to_owned() };
        let (said, about) = (format!("[{backend}"), format!("] [SUPERVISOR] {backend}: "));
        let is_about = |line: &&str| {
            let is_said =
                line.strip_prefix(&said).is_some_and(|rest| rest.starts_with(']') || rest.starts_with(" stdout,"));
            is_said || line.contains(&about)
        };
        text.split_inclusive('\n').filter(is_about).collect()
    }
}

/// The log of an instance that runs, or that ran in this directory.
fn find_log(wanted: Option<&str>) -> Result<LogFile, Report> {
    let entries = registry().map(|registry| registry.read()).unwrap_or_default();
    let cwd = env::current_dir().unwrap_or_default();
    let report = match target(wanted, &entries, &cwd) {
        Ok(target) => return LogFile::of(target),
        Err(report) => report,
    };
    let mut past: Vec<(SystemTime, PathBuf)> = state_dirs(&cwd)
        .iter()
        .filter_map(|dir| fs::read_dir(dir.join("logs")).ok())
        .flat_map(|files| files.flatten().take(LOGS_LOOKED_AT_MAX))
        .map(|file| file.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "log"))
        .filter(|path| {
            let id = path.file_stem().unwrap_or_default().to_string_lossy();
            wanted.is_none_or(|wanted| id.starts_with(wanted))
        })
        .map(|path| (fs::metadata(&path).and_then(|found| found.modified()).unwrap_or(UNIX_EPOCH), path))
        .collect();
    past.sort();
    // Without an id, several running instances are ambiguous. If none runs, the newest log is meant.
    let is_question = wanted.is_none() && entries.iter().any(|entry| entry.cwd == cwd);
    match past.pop() {
        Some((_, path)) if !is_question => Ok(LogFile { path, running: None, backend: None }),
        _ => Err(report),
    }
}

/// A running instance, or one backend of it. The gateways are asked for their backends only if no instance has that
/// name.
fn target(wanted: Option<&str>, entries: &[Entry], cwd: &Path) -> Result<Target, Report> {
    if let Some((gateway, backend)) = wanted.and_then(|wanted| wanted.split_once('/')) {
        let entry = choose(Some(gateway), entries, &[], cwd)?.clone();
        return Ok(Target { entry, backend: Some(backend.to_owned()) });
    }
    match choose(wanted, entries, &[], cwd) {
        Ok(entry) => Ok(Target { entry: entry.clone(), backend: None }),
        Err(_) => Target::find(wanted),
    }
}

/// Reports when there may be more to read, and when the log has ended.
struct Follow {
    news: mpsc::Receiver<bool>,
    _watcher: notify::RecommendedWatcher,
}

impl Follow {
    fn begin(log: &LogFile) -> io::Result<Follow> {
        let (tell, news) = mpsc::channel();
        let changed = tell.clone();
        // Watches the directory, not the file: after a rotation a new file has the same name.
        let name = log.path.file_name().map(ToOwned::to_owned);
        let mut watcher = watch::start_watcher(move |event: notify::Result<notify::Event>| {
            if event.is_ok_and(|event| event.paths.iter().any(|path| path.file_name() == name.as_deref())) {
                let _ = changed.send(true);
            }
        })
        .map_err(io::Error::other)?;
        let dir = log.path.parent().unwrap_or(Path::new("."));
        watcher.watch(dir, RecursiveMode::NonRecursive).map_err(io::Error::other)?;
        match &log.running {
            None => {
                let _ = tell.send(false);
            }
            Some(entry) => {
                let socket = entry.socket.clone();
                thread::Builder::new().spawn(move || {
                    let mut client = Client::connect(&socket, PATIENCE).map_err(AskError::Os);
                    // A log whose instance cannot be reached is followed until the user stops the command.
                    if let Ok(client) = &mut client
                        && client.wait_for_end(None).is_ok()
                    {
                        let _ = tell.send(false);
                    }
                })?;
            }
        }
        Ok(Follow { news, _watcher: watcher })
    }

    /// False if nothing more will be written.
    fn wait(&self) -> bool {
        let mut goes_on = self.news.recv().unwrap_or(false);
        while let Ok(more) = self.news.try_recv() {
            goes_on &= more;
        }
        goes_on
    }
}

/// A log that is read backwards from its end.
struct Tail {
    file: File,
    read: u64,
}

impl Tail {
    fn open(path: &Path) -> io::Result<Tail> {
        Ok(Tail { file: os::open_regular(OpenOptions::new().read(true), path)?, read: 0 })
    }

    fn last_lines(&mut self, count: usize) -> io::Result<String> {
        let end = self.file.seek(SeekFrom::End(0))?;
        self.read = end;
        let (mut from, mut feeds) = (end, 0);
        // The last piece of the file comes first.
        let mut pieces = Vec::new();
        // One line feed more than lines: the one before the first line.
        while from > 0 && feeds <= count && end - from < READ_MAX {
            let start = from.saturating_sub(PIECE as u64);
            self.file.seek(SeekFrom::Start(start))?;
            let mut piece = Vec::new();
            self.file.by_ref().take(from - start).read_to_end(&mut piece)?;
            feeds += memchr::memchr_iter(b'\n', &piece).count();
            pieces.push(piece);
            from = start;
        }
        pieces.reverse();
        let bytes = pieces.concat();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.split_inclusive('\n').collect();
        Ok(lines[lines.len().saturating_sub(count)..].concat())
    }

    /// What was appended since the last read, at most [`READ_MAX`] bytes; after a rotation also the content of the
    /// new file.
    fn rest(&mut self, path: &Path) -> io::Result<String> {
        let mut bytes = Vec::new();
        self.file.seek(SeekFrom::Start(self.read))?;
        self.file.by_ref().take(READ_MAX).read_to_end(&mut bytes)?;
        self.read += bytes.len() as u64;
        if (bytes.len() as u64) < READ_MAX
            && !is_same_file(&self.file, path)
            && let Ok(mut next) = Tail::open(path)
        {
            next.read = next.file.by_ref().take(READ_MAX).read_to_end(&mut bytes)? as u64;
            *self = next;
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

#[cfg(unix)]
fn is_same_file(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), fs::metadata(path)) {
        (Ok(one), Ok(other)) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        _ => true,
    }
}

#[cfg(not(unix))]
fn is_same_file(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(one), Ok(other)) => one.len() <= other.len(),
        _ => true,
    }
}

/// Exits quietly if the reader of stdout has closed it.
pub(super) fn print_or_end(text: &str) -> Result<(), Report> {
    use io::Write;
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => Err(Report::new(report::FAILURE, "cannot write to stdout").because(error)),
        Ok(()) => Ok(()),
    }
}

// ---- audit ---------------------------------------------------------------------------------------------------

pub(crate) fn audit(arguments: &cli::Audit) -> Result<ExitCode, Report> {
    if arguments.cluster {
        return cluster::audit(arguments);
    }
    let event = arguments.event.as_deref().map(known_event).transpose()?;
    let since = arguments.since.map(|since| since.from(SystemTime::now()));
    let entries = registry().map(|registry| registry.read()).unwrap_or_default();
    let cwd = env::current_dir().unwrap_or_default();
    let (running, missing) = match arguments.id.as_deref().map(|wanted| target(Some(wanted), &entries, &cwd)) {
        Some(Ok(target)) => (Some(target), None),
        Some(Err(report)) => (None, Some(report)),
        None => (None, None),
    };
    let path = match running.as_ref().and_then(|target| target.entry.audit.clone()) {
        Some(path) => path,
        None => state_dirs(&cwd).into_iter().map(|dir| dir.join("audit.jsonl")).find(|path| path.exists()).ok_or_else(
            || {
                missing.clone().unwrap_or_else(|| {
                    Report::new(report::FAILURE, "there is no audit log for this directory")
                        .hint("outlast writes one where it is started; `outlast ps` shows where that was")
                })
            },
        )?,
    };
    // The id of an instance that has exited is known only from its records.
    let wanted = running.as_ref().map(Target::id).or(arguments.id.clone());
    let wanted = wanted.as_deref();
    let is_wanted = |line: &AuditLine| {
        wanted.is_none_or(|wanted| line.props.id.starts_with(wanted))
            && event.is_none_or(|event| line.props.event_type == event.name())
            && since.as_deref().is_none_or(|since| line.timestamp.as_str() >= since)
    };
    let mut text = String::new();
    let mut rows = Rows::default();
    for file in audit_files(&path) {
        let Ok(lines) = Tail::open(&file).and_then(|mut tail| tail.last_lines(usize::MAX)) else { continue };
        for line in lines.lines() {
            // A torn line is not a record.
            let Ok(record) = serde_json::from_str::<AuditLine>(line) else { continue };
            if is_wanted(&record) {
                if arguments.json {
                    text.push_str(line);
                    text.push('\n');
                } else {
                    rows.push(row(record));
                }
            }
        }
    }
    if let Some(wanted) = arguments.id.as_deref()
        && running.is_none()
        && rows.is_empty()
        && text.is_empty()
        && event.is_none()
        && since.is_none()
    {
        // If several instances elsewhere have this name, the list of them is more helpful.
        return Err(missing
            .filter(|report| entries.iter().any(|entry| entry.name == wanted) && report.because.is_some())
            .unwrap_or_else(|| {
                Report::new(report::FAILURE, format!("this audit log has no records of `{wanted}`"))
                    .hint("`outlast audit` shows all records of this directory, `outlast ps` all running instances")
            }));
    }
    if !rows.is_empty() {
        rows.say_left_out();
        text = in_words(rows.all(), table::room());
    }
    if arguments.json { print_json(&text) } else { print(&text) }
}

/// The last records, as rows of a table.
#[derive(Default)]
pub(super) struct Rows {
    last: VecDeque<Vec<String>>,
    left_out: u64,
}

impl Rows {
    pub(super) fn push(&mut self, row: Vec<String>) {
        if self.last.len() == ROWS_MAX {
            self.last.pop_front();
            self.left_out += 1;
        }
        self.last.push_back(row);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.last.is_empty()
    }

    pub(super) fn all(&mut self) -> &[Vec<String>] {
        self.last.make_contiguous()
    }

    pub(super) fn say_left_out(&self) {
        if self.left_out > 0 {
            os::say(&format!(
                "[outlast] {} earlier records are left out; `--since`, `--event` and `--json` show others",
                self.left_out
            ));
        }
    }
}

pub(super) fn known_event(wanted: &str) -> Result<Event, Report> {
    if let Some(event) = Event::ALL.into_iter().find(|event| event.name() == wanted) {
        return Ok(event);
    }
    let names = || Event::ALL.iter().map(|event| event.name());
    let report = Report::new(report::USAGE, format!("no event is named `{wanted}`"));
    let near =
        names().map(|name| (strsim::osa_distance(wanted, name), name)).filter(|(slips, name)| *slips <= name.len() / 3);
    let part: Vec<String> = names().filter(|name| name.contains(wanted)).map(str::to_owned).collect();
    Err(match near.min() {
        Some((_, name)) => report.hint(format!("did you mean `{name}`?")),
        None if !part.is_empty() => report.hint(format!("did you mean {}?", one_of(&part, "or"))),
        None => report.hint(format!("there are {}", names().collect::<Vec<_>>().join(", "))),
    })
}

/// One line of an audit log, with the members that `audit` reads. A missing or invalid member counts as absent, and
/// unknown members are ignored.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct AuditLine {
    #[serde(deserialize_with = "lenient")]
    pub(super) timestamp: String,
    #[serde(deserialize_with = "lenient")]
    props: Props,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Props {
    #[serde(deserialize_with = "lenient")]
    event_type: String,
    #[serde(deserialize_with = "lenient")]
    id: String,
    #[serde(deserialize_with = "lenient")]
    reason: String,
    #[serde(deserialize_with = "lenient")]
    detail: String,
    #[serde(deserialize_with = "lenient")]
    pid: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    crashes: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    delay_ms: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    uptime_ms: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    took_ms: Option<u64>,
    #[serde(deserialize_with = "lenient")]
    who: Option<String>,
    #[serde(deserialize_with = "lenient")]
    method: String,
    #[serde(deserialize_with = "lenient")]
    tool: String,
    #[serde(deserialize_with = "lenient")]
    outcome: String,
    #[serde(deserialize_with = "lenient")]
    peer: Option<String>,
    #[serde(deserialize_with = "lenient")]
    suppressed: Option<u64>,
}

/// A record for people: time, source, event, and details.
pub(super) fn row(line: AuditLine) -> Vec<String> {
    let props = line.props;
    let when = line.timestamp.replacen('T', " ", 1);
    // People do not need milliseconds.
    let when = when.trim_end_matches('Z').split('.').next().unwrap_or_default().to_owned();
    let outcome = props.outcome.replace('_', " ");
    // The most important part comes first, because the end may be cut.
    let mut words = vec![props.detail, props.reason];
    match Event::ALL.into_iter().find(|event| event.name() == props.event_type) {
        Some(Event::CallEnded) => {
            let what = if props.tool.is_empty() { props.method } else { props.tool };
            words.push(format!("{what} {outcome}"));
            words.extend(props.who.map(|who| format!("for {who}")));
        }
        Some(Event::RequestRefused) => {
            words.push(format!("{} {outcome}", props.method));
            words.extend(props.peer.map(|peer| format!("from {peer}")));
            words.extend(props.suppressed.map(|count| format!("{count} more were counted, not recorded")));
        }
        Some(Event::OperatorRequested | Event::Switched) => {
            words.extend(props.who.map(|who| format!("by {who}")));
        }
        _ => {}
    }
    words.retain(|word| !word.is_empty());
    let seconds = |ms| Duration::from_millis(ms).as_secs_f64();
    words.extend(props.crashes.filter(|count| *count > 0).map(|count| format!("crash #{count}")));
    words.extend(props.uptime_ms.map(|ms| format!("after {:.1} s", seconds(ms))));
    words.extend(props.delay_ms.map(|ms| format!("next in {:.1} s", seconds(ms))));
    words.extend(props.took_ms.map(|ms| match ms {
        0..1000 => format!("took {ms} ms"),
        _ => format!("took {:.1} s", seconds(ms)),
    }));
    let is_said = |pid: u64| words.iter().any(|word| word.contains(&format!("PID {pid},")));
    let pid = props.pid.filter(|pid| *pid > 0 && !is_said(*pid));
    words.extend(pid.map(|pid| format!("pid {pid}")));
    vec![when, props.id, props.event_type, words.join(", ")]
}

fn in_words(rows: &[Vec<String>], width: Option<usize>) -> String {
    let column = |title, yields| Column { title, is_number: false, yields };
    let columns = [
        column("TIME (UTC)", Yield::Last(19)),
        column("ID", Yield::Soon(1)),
        column("EVENT", Yield::Last(12)),
        column("DETAIL", Yield::End(40, 14)),
    ];
    table::lines(&columns, rows, width).into_iter().map(|line| line + "\n").collect()
}

/// A point in time, as given on the command line.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Since {
    Ago(Duration),
    /// Milliseconds since 1970.
    At(u64),
}

impl Since {
    /// In the format of the log, in which times sort as texts.
    pub(super) fn from(self, now: SystemTime) -> String {
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let millis = match self {
            Since::Ago(ago) => u64::try_from(now.saturating_sub(ago).as_millis()).unwrap_or(u64::MAX),
            Since::At(millis) => millis,
        };
        record::iso(millis)
    }

    /// A duration, such as `90s`, `10m` or `7d`; or a time in UTC: `2026-01-13`, `2026-01-13T14:32`,
    /// `2026-01-13T14:32:45.123Z`.
    pub fn parse(text: &str) -> Result<Since, String> {
        // A bare number could be a year, so a duration needs its unit here.
        if let Some(ago) = duration::parse(text).filter(|_| text.ends_with(|last: char| last.is_ascii_alphabetic())) {
            return Ok(Since::Ago(ago));
        }
        moment(text).map(Since::At).ok_or_else(|| {
            "expected a time ago such as 10m, 2h or 7d, or a time such as 2026-01-13T14:32:45Z".to_owned()
        })
    }
}

/// Milliseconds since 1970 of a time in UTC; parts left out at the end are zero.
fn moment(text: &str) -> Option<u64> {
    let text = text.strip_suffix('Z').unwrap_or(text);
    let (date, time) = text.split_once(['T', ' ']).unwrap_or((text, "0:0:0"));
    let numbers = |text: &str, separator| -> Option<Vec<f64>> {
        text.split(separator).map(|part| part.parse().ok().filter(|number: &f64| *number >= 0.0)).collect()
    };
    let [year, month, day] = numbers(date, '-')?[..] else { return None };
    let (hour, minute, second) = match numbers(time, ':')?[..] {
        [hour, minute] => (hour, minute, 0.0),
        [hour, minute, second] => (hour, minute, second),
        _ => return None,
    };
    let is_sound = (1970.0..=9999.0).contains(&year) && hour < 24.0 && minute < 60.0 && second < 61.0;
    let month = time::Month::try_from(month as u8).ok().filter(|_| is_sound)?;
    let midnight = time::Date::from_calendar_date(year as i32, month, day as u8).ok()?.midnight().assume_utc();
    let seconds = midnight.unix_timestamp() as f64 + hour * 3600.0 + minute * 60.0 + second;
    Some((seconds * 1000.0) as u64)
}

/// Where the state of this directory may be. Creates nothing.
fn state_dirs(cwd: &Path) -> Vec<PathBuf> {
    home::candidates(cwd, env::home_dir().as_deref())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn shown(record: &Value) -> Vec<String> {
        row(serde_json::from_value(record.clone()).unwrap())
    }

    #[test]
    fn a_line_of_a_log_is_an_object_for_programs() {
        let log = "[2026-01-13T14:32:01.000Z] [SUPERVISOR] Server started\n[1763239200] [supervisor] resize rows=24\n\
                   [time] listening on [::1]\nno brackets\n";
        let expected = [
            json!({"time": "2026-01-13T14:32:01.000Z", "source": "SUPERVISOR", "text": "Server started",
                "line": "[2026-01-13T14:32:01.000Z] [SUPERVISOR] Server started"}),
            json!({"time": "1763239200", "source": "supervisor", "text": "resize rows=24",
                "line": "[1763239200] [supervisor] resize rows=24"}),
            json!({"time": null, "source": "time", "text": "listening on [::1]", "line": "[time] listening on [::1]"}),
            json!({"time": null, "source": null, "text": "no brackets", "line": "no brackets"}),
        ];
        let objects = in_json(log);
        let objects: Vec<Value> = objects.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(objects, expected);
    }

    #[test]
    fn a_point_in_time_is_parsed() {
        let at = |text: &str| match Since::parse(text) {
            Ok(Since::At(millis)) => record::iso(millis),
            other => format!("{other:?}"),
        };
        let table = [
            ("2026-01-13T14:32:45.123Z", "2026-01-13T14:32:45.123Z"),
            ("2026-01-13 14:32", "2026-01-13T14:32:00.000Z"),
            ("2024-02-29", "2024-02-29T00:00:00.000Z"),
            ("2000-03-01", "2000-03-01T00:00:00.000Z"),
            ("1970-01-01", "1970-01-01T00:00:00.000Z"),
        ];
        for (text, iso) in table {
            assert_eq!(at(text), iso, "{text}");
        }
        for (text, seconds) in
            [("90s", 90), ("10m", 600), ("2h", 7200), ("1.5h", 5400), ("7d", 604_800), ("1h30m", 5400)]
        {
            assert_eq!(Since::parse(text), Ok(Since::Ago(Duration::from_secs(seconds))), "{text}");
        }
        for text in ["", "soon", "-1h", "2026", "2026-13-01", "2026-02-30", "2026-01-13T25:00", "10"] {
            assert!(Since::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_record_is_shown_as_one_line() {
        let record = json!({
            "timestamp": "2026-01-13T14:32:45.123Z",
            "props": {"event_type": "server_crashed", "id": "py-1abcd", "pid": 7, "detail": "exit code 1",
                "uptime_ms": 61_000, "delay_ms": 1500, "crashes": 2},
        });
        let later = json!({"timestamp": "2026-01-13T14:32:46Z",
            "props": {"event_type": "later", "id": "py-1abcd", "reason": "a\nb"}});
        let begun = json!({"timestamp": "2026-01-13T14:32:47Z", "props": {"event_type": "instance_started",
            "id": "py-1abcd", "pid": 9, "detail": "outlast 0.1.0, PID 9, in /srv: python"}});
        let called = json!({"timestamp": "2026-01-13T14:32:48Z", "props": {"event_type": "call_ended", "id": "all-1abcd",
            "tool": "github__search", "method": "tools/call", "outcome": "timed_out", "who": "ci", "took_ms": 30_000}});
        let listed = json!({"timestamp": "2026-01-13T14:32:49Z", "props": {"event_type": "call_ended", "id": "all-1abcd",
            "method": "resources/read", "outcome": "answered", "took_ms": 7}});
        insta::assert_snapshot!(in_words(&[shown(&begun), shown(&called), shown(&listed)], None), @"
        TIME (UTC)           ID         EVENT             DETAIL
        2026-01-13 14:32:47  py-1abcd   instance_started  outlast 0.1.0, PID 9, in /srv: python
        2026-01-13 14:32:48  all-1abcd  call_ended        github__search timed out, for ci, took 30.0 s
        2026-01-13 14:32:49  all-1abcd  call_ended        resources/read answered, took 7 ms
        ");
        let rows = [shown(&record), shown(&later)];
        insta::assert_snapshot!(in_words(&rows, None), @"
        TIME (UTC)           ID        EVENT           DETAIL
        2026-01-13 14:32:45  py-1abcd  server_crashed  exit code 1, crash #2, after 61.0 s, next in 1.5 s, pid 7
        2026-01-13 14:32:46  py-1abcd  later           a?b
        ");
        insta::assert_snapshot!(in_words(&rows, Some(80)), @"
        TIME (UTC)           EVENT           DETAIL
        2026-01-13 14:32:45  server_crashed  exit code 1, crash #2, after 61.0 s, next
                                             in 1.5 s, pid 7
        2026-01-13 14:32:46  later           a?b
        ");
    }

    #[test]
    fn an_invalid_member_of_a_record_counts_as_absent() {
        let record = json!({"timestamp": 7, "level": "INFO", "props": {"event_type": "server_crashed", "id": "py-1abcd",
            "pid": "seven", "detail": ["exit code 1"], "crashes": 2, "later": {}}});
        assert_eq!(shown(&record), ["", "py-1abcd", "server_crashed", "crash #2"]);
        assert_eq!(shown(&json!({"timestamp": "2026-01-13T14:32:45Z"})), ["2026-01-13 14:32:45", "", "", ""]);
    }

    #[test]
    fn the_last_records_are_kept() {
        let mut rows = Rows::default();
        (0..ROWS_MAX + 3).for_each(|number| rows.push(vec![number.to_string()]));
        assert_eq!((rows.last.len(), rows.left_out), (ROWS_MAX, 3));
        assert_eq!(rows.last[0], ["3"]);
    }

    #[test]
    fn the_end_of_a_log_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.log");
        let text: String = (0..20_000).map(|n| format!("line {n}\n")).collect();
        fs::write(&path, format!("{text}unfinished")).unwrap();
        let mut tail = Tail::open(&path).unwrap();
        assert_eq!(tail.last_lines(2).unwrap(), "line 19999\nunfinished");
        assert_eq!(tail.last_lines(15_000).unwrap().lines().next(), Some("line 5001"));
        assert_eq!(tail.last_lines(30_000).unwrap().lines().count(), 20_001);
        assert_eq!(tail.last_lines(0).unwrap(), "");
        fs::write(&path, format!("{text}unfinished no more\n")).unwrap();
        assert_eq!(tail.rest(&path).unwrap(), " no more\n");
        fs::rename(&path, dir.path().join("x.log.1")).unwrap();
        assert_eq!(tail.rest(&path).unwrap(), "");
        fs::write(&path, "next\n").unwrap();
        assert_eq!(tail.rest(&path).unwrap(), "next\n");
    }

    #[test]
    fn an_unknown_event_gets_a_suggestion() {
        assert_eq!(known_event("gave_up"), Ok(Event::GaveUp));
        let mut words = String::new();
        for wanted in ["server_crash", "marker", "nonsense"] {
            words.push_str(&known_event(wanted).unwrap_err().to_string());
        }
        insta::assert_snapshot!(words, @"
        error: no event is named `server_crash`
          hint: did you mean `server_crashed`?
        error: no event is named `marker`
          hint: did you mean `restart_marker_written` or `restart_marker_failed`?
        error: no event is named `nonsense`
          hint: there are instance_started, instance_ended, server_restart_requested, restart_marker_written, server_exiting, server_started, server_stopped, server_crashed, restart_throttled, reload_failed, gave_up, server_restart_verified, audit_degraded, restart_marker_failed, protocol_noted, conversation_noted, watch_muted, watch_unmuted, call_ended, schema_unchecked, switched, configured, request_refused, operator_requested, server_hung, server_too_large, upgraded, upgrade_failed
        ");
    }
}
