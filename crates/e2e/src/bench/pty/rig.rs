//! The subjects, how each is started, and the pty around it.

use std::{
    env,
    fs::{self, File},
    io::{self, Read, Write},
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    pty::{Winsize, openpty},
};
use tempfile::TempDir;

use super::child::{END, NOISE, Noise, READY, WORD};
use crate::bench::tree::{self, Process};

/// A subject that takes longer for anything counts as hung.
const PATIENCE: Duration = Duration::from_secs(120);
/// The environment variable that marks the processes of a subject.
const MARK: &str = "OUTLAST_BENCH_RUN";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Subject {
    /// The child on a pty of this program.
    Raw,
    Script,
    Dtach,
    Tmux,
    /// Without the screen model.
    OutlastPlain,
    Outlast,
}

impl Subject {
    pub(super) const ALL: [Self; 6] =
        [Self::Raw, Self::Script, Self::Dtach, Self::Tmux, Self::OutlastPlain, Self::Outlast];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw pty",
            Self::Script => "script",
            Self::Dtach => "dtach",
            Self::Tmux => "tmux",
            Self::OutlastPlain => "outlast --no-screen",
            Self::Outlast => "outlast",
        }
    }
}

pub(super) struct Stage {
    directory: TempDir,
    bench: PathBuf,
    outlast: PathBuf,
}

impl Stage {
    pub(super) fn set(outlast: Option<PathBuf>) -> io::Result<Self> {
        let bench = env::current_exe()?;
        let beside = bench.parent().expect("a program lies in a directory").join("outlast");
        // The subject is started in another directory.
        let outlast = std::path::absolute(outlast.unwrap_or(beside))?;
        Ok(Self { directory: tempfile::tempdir()?, outlast, bench })
    }

    /// Why a subject cannot be measured here, or none.
    pub(super) fn absence(&self, subject: Subject) -> Option<String> {
        let program = match subject {
            Subject::Raw => return None,
            Subject::Script => "script",
            Subject::Dtach => "dtach",
            Subject::Tmux => "tmux",
            Subject::OutlastPlain | Subject::Outlast => {
                return (!self.outlast.is_file()).then(|| format!("there is no {}", self.outlast.display()));
            }
        };
        let paths = env::var_os("PATH").unwrap_or_default();
        let is_here = env::split_paths(&paths).any(|folder| folder.join(program).is_file());
        (!is_here).then(|| format!("there is no program `{program}`"))
    }

    fn command(&self, subject: Subject, run: &str) -> Command {
        let child = [self.bench.as_os_str(), "pty".as_ref(), WORD.as_ref()];
        let socket = self.directory.path().join(format!("{run}.sock"));
        let words: Vec<&std::ffi::OsStr> = match subject {
            Subject::Raw => Vec::new(),
            Subject::Script => {
                let line = child.map(|word| word.to_string_lossy().into_owned()).join(" ");
                let mut command = Command::new("setsid");
                command.args(["-c", "script", "-q", "-f", "-c", &line, "/dev/null"]);
                return command;
            }
            Subject::Dtach => vec!["dtach".as_ref(), "-A".as_ref(), socket.as_os_str(), "-E".as_ref(), "-z".as_ref()],
            Subject::Tmux => {
                vec![
                    "tmux".as_ref(),
                    "-S".as_ref(),
                    socket.as_os_str(),
                    "-f".as_ref(),
                    "/dev/null".as_ref(),
                    "new".as_ref(),
                ]
            }
            Subject::OutlastPlain => {
                vec![self.outlast.as_os_str(), "run".as_ref(), "--no-screen".as_ref(), "--".as_ref()]
            }
            Subject::Outlast => vec![self.outlast.as_os_str(), "run".as_ref(), "--".as_ref()],
        };
        let mut command = Command::new("setsid");
        command.arg("-c").args(words).args(child);
        command
    }
}

/// One running subject.
pub(super) struct Rig {
    subject: Subject,
    bench: PathBuf,
    run: String,
    child: Child,
    master: File,
    unread: Vec<u8>,
    space: Vec<u8>,
}

impl Rig {
    /// Starts it and waits for the child's first output.
    pub(super) fn start(stage: &Stage, subject: Subject) -> Result<Self, String> {
        static RUNS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let number = RUNS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let run = format!("{}-{number}", std::process::id());
        let size = Winsize { ws_row: 40, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
        let pair = openpty(Some(&size), None).map_err(|problem| problem.to_string())?;
        for end in [&pair.master, &pair.slave] {
            fcntl(end, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).map_err(|problem| problem.to_string())?;
        }
        let stdio = || pair.slave.try_clone().map(Stdio::from).map_err(|problem| problem.to_string());
        let mut command = stage.command(subject, &run);
        command.current_dir(stage.directory.path()).env("HOME", stage.directory.path());
        command.env("TERM", "xterm-256color").env("SHELL", "/bin/sh").env_remove("TMUX").env(MARK, &run);
        command.stdin(stdio()?).stdout(stdio()?).stderr(stdio()?);
        let child = command.spawn().map_err(|problem| problem.to_string())?;
        let master = File::from(pair.master);
        let bench = stage.bench.canonicalize().map_err(|problem| problem.to_string())?;
        let mut rig = Self { subject, bench, run, child, master, unread: Vec::new(), space: vec![0; 64 << 10] };
        rig.until(READY)?;
        Ok(rig)
    }

    /// Copies text; returns the time until its last word was shown.
    pub(super) fn copy(&mut self, bytes: u64) -> Result<Duration, String> {
        let since = Instant::now();
        self.press(format!("c{bytes} ").as_bytes())?;
        self.until(END)?;
        Ok(since.elapsed())
    }

    /// Presses keys; returns the median time of an echo, in µs.
    pub(super) fn echo(&mut self, keys: usize) -> Result<f64, String> {
        // None of these characters occurs in the escape sequences that a terminal multiplexer sends by itself.
        let letters = b"@#$%&!";
        let mut took = Vec::with_capacity(keys);
        for key in 0..keys {
            let letter = letters[key % letters.len()];
            self.unread.clear();
            let since = Instant::now();
            self.press(&[letter])?;
            self.until(&[letter])?;
            took.push(since.elapsed().as_secs_f64() * 1e6);
        }
        took.sort_by(f64::total_cmp);
        Ok(took[took.len() / 2])
    }

    /// Sends random bytes through it and compares every byte.
    pub(super) fn exact(&mut self, bytes: u64) -> Result<Duration, String> {
        let since = Instant::now();
        self.press(format!("x{bytes} ").as_bytes())?;
        self.until(NOISE)?;
        let (mut noise, mut expected, mut seen) = (Noise::default(), Vec::new(), 0u64);
        let mut got = std::mem::take(&mut self.unread);
        loop {
            while expected.len() < got.len() {
                let length = expected.len();
                expected.resize(length + (64 << 10), 0);
                noise.fill(&mut expected[length..]);
            }
            let take = got.len().min((bytes - seen) as usize);
            if let Some(at) = (0..take).find(|at| got[*at] != expected[*at]) {
                return Err(format!("byte {} is not what was sent", seen + at as u64));
            }
            expected.drain(..take);
            seen += take as u64;
            if seen == bytes {
                return Ok(since.elapsed());
            }
            let count = self.read()?;
            got.clear();
            got.extend_from_slice(&self.space[..count]);
        }
    }

    /// Memory of all processes between the pty and the child, in bytes.
    pub(super) fn memory(&self) -> u64 {
        self.between().into_iter().map(Process::memory).sum()
    }

    /// CPU time of the same processes so far.
    pub(super) fn cpu(&self) -> Duration {
        self.between().into_iter().map(Process::cpu).sum()
    }

    /// CPU time of the same processes while idle, in ms per second.
    pub(super) fn idle(&self, time: Duration) -> f64 {
        let between = self.between();
        let used = || between.iter().map(|process| process.cpu()).sum::<Duration>();
        let before = used();
        std::thread::sleep(time);
        used().saturating_sub(before).as_secs_f64() * 1000.0 / time.as_secs_f64()
    }

    /// Ends it and all processes that it started.
    pub(super) fn end(mut self) {
        self.clear();
    }

    fn clear(&mut self) {
        for process in self.started() {
            process.kill();
        }
        // It may have exited by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// The processes that were started for it, wherever they are in the process tree.
    fn started(&self) -> Vec<Process> {
        let mark = format!("{MARK}={}", self.run);
        let has_mark = |pid: &u32| {
            let environment = fs::read(Path::new("/proc").join(pid.to_string()).join("environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|pair| pair == mark.as_bytes())
        };
        let entries = fs::read_dir("/proc").expect("this benchmark needs /proc");
        let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let marked: Vec<u32> = pids.filter(has_mark).collect();
        tree::descent(&marked)
    }

    fn between(&self) -> Vec<Process> {
        if self.subject == Subject::Raw {
            return Vec::new();
        }
        let mut between: Vec<Process> = Vec::new();
        for process in self.started() {
            if !process.runs(&self.bench) && !between.contains(&process) {
                between.push(process);
            }
        }
        between
    }

    fn press(&mut self, keys: &[u8]) -> Result<(), String> {
        self.master.write_all(keys).map_err(|problem| problem.to_string())
    }

    /// Reads up to and including these words.
    fn until(&mut self, words: &[u8]) -> Result<(), String> {
        loop {
            if let Some(at) = memchr::memmem::find(&self.unread, words) {
                self.unread.drain(..at + words.len());
                return Ok(());
            }
            let keep = self.unread.len().saturating_sub(words.len());
            self.unread.drain(..keep);
            let count = self.read()?;
            self.unread.extend_from_slice(&self.space[..count]);
        }
    }

    fn read(&mut self) -> Result<usize, String> {
        let mut ready = [PollFd::new(self.master.as_fd(), PollFlags::POLLIN)];
        let patience = PollTimeout::try_from(PATIENCE).map_err(|problem| problem.to_string())?;
        match poll(&mut ready, patience) {
            Ok(0) => return Err("nothing more is shown".into()),
            Ok(_) => {}
            Err(problem) => return Err(problem.to_string()),
        }
        match self.master.read(&mut self.space) {
            Ok(0) => Err("it ended".into()),
            Ok(count) => Ok(count),
            Err(problem) => Err(format!("it ended: {problem}")),
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.clear();
    }
}
