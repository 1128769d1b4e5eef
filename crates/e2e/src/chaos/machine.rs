//! Resources that all parts share: the disk of the state directory, which can be full, the wall clock, which can jump, and
//! the namespaces of the run.

use std::{
    env,
    fs::{self, OpenOptions},
    os::unix::{fs::FileExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::processes::{self, Process};

/// Set for this program once it has a mount namespace of its own: to `network` if it has a network namespace, too.
const INSIDE: &str = "OUTLAST_CHAOS_INSIDE";
/// Where `ip netns` keeps the names of network namespaces.
const NAMES: &str = "/run/netns";
/// With this limit no file of the state directory can grow.
const FILE_MAX: u64 = 64;

/// Starts this program again in its own mount namespace, so that a mount cannot outlive it, and, if it `needs_network`, in
/// its own network namespace. Returns if that is not permitted.
pub(super) fn enter_namespace(needs_network: bool) {
    if env::var_os(INSIDE).is_some() || !runs("unshare", &["--mount", "true"]) {
        return;
    }
    let has_network = needs_network && runs("unshare", &["--mount", "--net", "ip", "link"]);
    let Ok(program) = env::current_exe() else { return };
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private"]);
    command.args(has_network.then_some("--net")).arg("--").arg(program).args(env::args_os().skip(1));
    let error = command.env(INSIDE, if has_network { "network" } else { "mount" }).exec();
    eprintln!("chaos: cannot start again in a mount namespace: {error}");
}

/// Whether network namespaces can be made here. Their names are in a file system of this run, and vanish with it.
pub(super) fn has_network() -> Result<(), String> {
    match env::var(INSIDE).as_deref() {
        Ok("network") => {}
        Ok(_) => return Err("no network namespace is permitted here, or there is no `ip` (iproute2)".to_owned()),
        Err(_) => return Err("no namespace is permitted here: that needs root".to_owned()),
    }
    fs::create_dir_all(NAMES).map_err(|error| format!("{NAMES}: {error}"))?;
    match runs("mount", &["-t", "tmpfs", "-o", "size=1m", "outlast-chaos", NAMES]) {
        true => Ok(()),
        false => Err(format!("no file system can be mounted on {NAMES}")),
    }
}

fn runs(program: &str, args: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

pub(super) enum Disk {
    /// A small file system of its own, on the state directory.
    Small { path: PathBuf },
    /// No file of outlast may grow: RLIMIT_FSIZE.
    FileLimit,
}

impl Disk {
    pub(super) fn new(state: &Path, megabytes: u32) -> Disk {
        fs::create_dir_all(state).expect("a directory for the state");
        let path = state.to_str().expect("a path in UTF-8");
        let size = format!("size={megabytes}m,mode=700");
        let mounts =
            env::var_os(INSIDE).is_some() && runs("mount", &["-t", "tmpfs", "-o", &size, "outlast-chaos", path]);
        if mounts { Disk::Small { path: state.to_owned() } } else { Disk::FileLimit }
    }

    pub(super) fn name(&self) -> &'static str {
        match self {
            Disk::Small { .. } => "a small tmpfs on the directory, filled to the last byte",
            Disk::FileLimit => "RLIMIT_FSIZE of outlast, as no file system can be mounted here",
        }
    }

    /// Unmounts the file system. Its content is copied to `to` first, if that is given.
    pub(super) fn end(&self, to: Option<&Path>) {
        let Disk::Small { path } = self else { return };
        let text = |path: &Path| path.to_str().expect("a path in UTF-8").to_owned();
        if let Some(to) = to {
            runs("cp", &["-r", &text(path), &text(to)]);
        }
        if !runs("umount", &[&text(path)]) {
            eprintln!("chaos: cannot unmount {}", path.display());
        }
    }

    /// Fills the disk: from now on no byte can be added.
    pub(super) fn fill(&self, outlasts: &[Process]) -> Result<(), String> {
        match self {
            Disk::Small { path } => {
                let mut block = vec![0_u8; 1 << 20];
                let file = fs::File::create(path.join("ballast")).map_err(|error| error.to_string())?;
                let mut at = 0;
                // Down to single bytes, because an existing page may have room for a few.
                while !block.is_empty() {
                    match file.write_at(&block, at) {
                        Ok(0) | Err(_) => block.truncate(block.len() / 2),
                        Ok(count) => at += count as u64,
                    }
                }
                Ok(())
            }
            Disk::FileLimit => set_limit(outlasts, "fsize", &FILE_MAX.to_string()),
        }
    }

    pub(super) fn free(&self, outlasts: &[Process]) -> Result<(), String> {
        match self {
            Disk::Small { path } => fs::remove_file(path.join("ballast")).map_err(|error| error.to_string()),
            Disk::FileLimit => {
                // Keepers that were started meanwhile have the limit, too, and so have all their children.
                for _ in 0..2 {
                    set_limit(outlasts, "fsize", "unlimited")?;
                    for outlast in outlasts {
                        set_limit(&processes::below(outlast.pid), "fsize", "unlimited")?;
                    }
                }
                Ok(())
            }
        }
    }
}

/// Sets the soft limit of processes; the hard one stays.
pub(super) fn set_limit(processes: &[Process], limit: &str, value: &str) -> Result<(), String> {
    for process in processes {
        let args = ["--pid", &process.pid.to_string(), &format!("--{limit}={value}:")];
        if !runs("prlimit", &args) && process.is_alive() {
            return Err(format!("prlimit {} failed", args.join(" ")));
        }
    }
    Ok(())
}

/// The wall clock of all outlast processes of the run.
pub(super) struct Clock {
    library: PathBuf,
    offset: PathBuf,
}

impl Clock {
    /// None without a C compiler.
    pub(super) fn new(scratch: &Path) -> Option<Clock> {
        let (source, library) = (scratch.join("clock.c"), scratch.join("clock.so"));
        fs::write(&source, include_str!("clock.c")).expect("the scratch directory can be written");
        let (source, output) = (source.to_str()?, library.to_str()?);
        if !runs("cc", &["-shared", "-fPIC", "-O1", "-o", output, source, "-ldl"]) {
            return None;
        }
        let offset = scratch.join("clock");
        fs::write(&offset, 0_i64.to_ne_bytes()).expect("the scratch directory can be written");
        Some(Clock { library, offset })
    }

    pub(super) fn environment(&self) -> [(&'static str, &Path); 2] {
        [("LD_PRELOAD", &self.library), ("OUTLAST_CHAOS_CLOCK", &self.offset)]
    }

    pub(super) fn set(&self, seconds: i64) {
        let file = OpenOptions::new().write(true).open(&self.offset).expect("the scratch directory can be written");
        file.write_at(&seconds.to_ne_bytes(), 0).expect("the scratch directory can be written");
    }
}
