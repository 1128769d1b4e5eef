//! The sandbox of a child: Landlock rules, created by the monitor and enforced between fork and exec. The
//! configuration checks the content of a sandbox; if the kernel cannot enforce it, the child is not started.
#![cfg_attr(target_os = "linux", expect(unsafe_code, reason = "`pre_exec`, and the version of Landlock"))]

use std::{
    io::{self, ErrorKind},
    process::Command,
};

#[cfg(target_os = "linux")]
pub use linux::sandbox_support;

use super::monitor::locate;
use crate::Order;

/// The error of a child that cannot enter its sandbox: std passes on a number and no text.
const NOT_ENTERED: i32 = libc::EOPNOTSUPP;

/// Makes the command start its program in the sandbox of the order, if there is one.
#[cfg(target_os = "linux")]
pub(super) fn confine(command: &mut Command, order: &Order) -> io::Result<()> {
    use std::os::unix::process::CommandExt;

    let Some(sandbox) = &order.sandbox else { return Ok(()) };
    let mut rules = Some(linux::rules(sandbox, &linux::readable(order))?);
    // SAFETY: between fork and exec only async-signal-safe calls are allowed if the parent has several threads, because
    // another thread may hold the lock of the allocator. The monitor has one thread, so the child may allocate.
    unsafe {
        command.pre_exec(move || {
            rules.take().and_then(linux::enter).ok_or_else(|| io::Error::from_raw_os_error(NOT_ENTERED))
        });
    }
    Ok(())
}

#[cfg(not(target_os = "linux"))]
pub(super) fn confine(_command: &mut Command, order: &Order) -> io::Result<()> {
    match order.sandbox {
        Some(_) => Err(io::Error::other("only Linux can enforce a sandbox")),
        None => Ok(()),
    }
}

/// Explains a failed start that the sandbox caused.
pub(super) fn explain(order: &Order, error: &io::Error) -> Option<io::Error> {
    order.sandbox.as_ref()?;
    if error.raw_os_error() == Some(NOT_ENTERED) {
        return Some(io::Error::other("the kernel did not enforce its sandbox"));
    }
    let program = locate(order).filter(|path| path.is_file() && error.kind() == ErrorKind::PermissionDenied)?;
    let program = program.display();
    Some(io::Error::other(format!("`{program}` or its interpreter is not executable, or not in `read` of its sandbox")))
}

#[cfg(target_os = "linux")]
mod linux {
    use std::{
        env, fs, io,
        path::{Path, PathBuf},
    };

    use landlock::{
        ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, NetPort, PathBeneath, PathFd, Ruleset,
        RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetStatus, Scope,
    };
    use nix::errno::Errno;
    use outlast_core::sandbox::{Ports, Sandbox, Support};

    use super::super::monitor::locate;
    use crate::Order;

    /// The system paths that every sandboxed child may read and execute; `docs/sandbox.md` lists them. A path that
    /// does not exist is left out. A symbolic link stands for its target.
    #[rustfmt::skip]
    const READABLE: &[&str] = &[
        "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store",
        "/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld.so.preload",
        "/etc/ca-certificates", "/etc/crypto-policies", "/etc/pki/ca-trust/extracted", "/etc/pki/tls/cert.pem",
        "/etc/pki/tls/certs", "/etc/pki/tls/openssl.cnf", "/etc/ssl/cert.pem", "/etc/ssl/certs", "/etc/ssl/openssl.cnf",
        "/etc/gai.conf", "/etc/host.conf", "/etc/hostname", "/etc/hosts", "/etc/nsswitch.conf", "/etc/protocols",
        "/etc/resolv.conf", "/etc/services", "/etc/group", "/etc/passwd", "/etc/locale.alias", "/etc/locale.conf",
        "/etc/localtime", "/etc/mime.types", "/etc/os-release", "/etc/timezone",
        "/proc/cpuinfo", "/proc/filesystems", "/proc/loadavg", "/proc/meminfo", "/proc/stat", "/proc/uptime",
        "/proc/version", "/proc/sys/kernel/osrelease", "/proc/sys/kernel/random", "/proc/sys/net/core/somaxconn",
        "/proc/sys/vm/overcommit_memory", "/sys/devices/system/cpu", "/sys/kernel/mm/transparent_hugepage",
        "/dev/random", "/dev/urandom",
    ];

    /// Devices that a sandboxed child may also write to.
    const DEVICES: &[&str] = &["/dev/null", "/dev/zero", "/dev/full"];

    /// The child's own directory in `/proc`. Its number is known only in the child.
    const OWN_PROCESS: &str = "/proc/self";

    /// What the running kernel can enforce.
    pub fn sandbox_support() -> Support {
        const VERSION: u32 = 1;
        // SAFETY: with this flag, no attributes and no size, the call only returns the version.
        let abi =
            unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<libc::c_void>(), 0, VERSION) };
        match u32::try_from(abi) {
            Ok(abi) => Support::Landlock(abi),
            Err(_) if Errno::last() == Errno::EOPNOTSUPP => Support::Disabled,
            Err(_) => Support::Missing,
        }
    }

    /// The paths that this child may read besides those of its sandbox: the system's, its working directory and the
    /// directory of its program.
    pub(super) fn readable(order: &Order) -> Vec<PathBuf> {
        let home = env::home_dir().map(|home| fs::canonicalize(&home).unwrap_or(home));
        let mut paths: Vec<PathBuf> = READABLE.iter().map(PathBuf::from).collect();
        if let Ok(cwd) = fs::canonicalize(&order.cwd)
            && !is_too_wide(&cwd, home.as_deref())
        {
            paths.push(cwd);
        }
        // The program may be a symbolic link to a program that finds its libraries beside itself.
        let program = locate(order);
        let real = program.as_ref().and_then(|program| fs::canonicalize(program).ok());
        for program in program.into_iter().chain(real) {
            let dir = program.parent().and_then(|dir| fs::canonicalize(dir).ok());
            match dir.filter(|dir| !is_too_wide(dir, home.as_deref())) {
                Some(dir) => paths.push(dir),
                None => paths.push(program),
            }
        }
        paths
    }

    /// A sandbox protects the home directory and the directories above it: they are readable only if the sandbox
    /// names them.
    fn is_too_wide(dir: &Path, home: Option<&Path>) -> bool {
        dir == Path::new("/") || home.is_some_and(|home| home.starts_with(dir))
    }

    /// The rules of a sandbox, not enforced yet. An error if the kernel cannot enforce all of them.
    pub(super) fn rules(sandbox: &Sandbox, readable: &[PathBuf]) -> io::Result<RulesetCreated> {
        let support = sandbox_support();
        if let Some(refusal) = sandbox.refusal(support) {
            return Err(io::Error::other(refusal.why));
        }
        // The kernel controls device ioctls from version 5 on, and signals and abstract sockets from version 6 on:
        // `docs/sandbox.md` promises them only there. Later versions control more than the sandbox covers.
        let abi = match support {
            Support::Landlock(..4) => ABI::V3,
            Support::Landlock(4) => ABI::V4,
            Support::Landlock(5) => ABI::V5,
            _ => ABI::V6,
        };
        make(sandbox, readable, abi).map_err(|error| io::Error::other(format!("the sandbox cannot be set up: {error}")))
    }

    fn make(
        sandbox: &Sandbox,
        readable: &[PathBuf],
        abi: ABI,
    ) -> Result<RulesetCreated, Box<dyn std::error::Error + Send + Sync>> {
        let everything = AccessFs::from_all(abi);
        let mut rules = Ruleset::default().set_compatibility(CompatLevel::HardRequirement).handle_access(everything)?;
        let ports = [(&sandbox.tcp_connect, AccessNet::ConnectTcp), (&sandbox.tcp_bind, AccessNet::BindTcp)];
        for (ports, access) in ports {
            if *ports != Ports::Any {
                rules = rules.handle_access(access)?;
            }
        }
        if ABI::V6 <= abi {
            rules = rules.scope(Scope::from_all(abi))?;
        }
        let mut rules = rules.create()?;

        let reading = AccessFs::from_read(abi);
        for path in readable {
            if let Ok(file) = PathFd::new(path) {
                rules = rules.add_rule(beneath(file, path, reading, abi))?;
            }
        }
        for path in DEVICES {
            if let Ok(file) = PathFd::new(path) {
                rules = rules.add_rule(PathBeneath::new(file, AccessFs::from_file(abi) & !AccessFs::Execute))?;
            }
        }
        for (paths, access) in [(&sandbox.read, reading), (&sandbox.write, everything)] {
            for path in paths {
                let file = PathFd::new(path).map_err(|error| match error {
                    landlock::PathFdError::OpenCall { source, .. } => format!("`{}`: {source}", path.display()),
                    other => other.to_string(),
                })?;
                rules = rules.add_rule(beneath(file, path, access, abi))?;
            }
        }
        for (ports, access) in ports {
            let Ports::Only(ports) = ports else { continue };
            for port in ports {
                rules = rules.add_rule(NetPort::new(*port, access))?;
            }
        }
        Ok(rules)
    }

    /// The kernel refuses directory rights for a file.
    fn beneath(file: PathFd, path: &Path, access: BitFlags<AccessFs>, abi: ABI) -> PathBeneath<PathFd> {
        let access = if path.is_dir() { access } else { access & AccessFs::from_file(abi) };
        PathBeneath::new(file, access)
    }

    /// Enforces the rules for this process and all its descendants, permanently; `None` on failure. From then on the
    /// process gains no privileges by exec.
    pub(super) fn enter(rules: RulesetCreated) -> Option<()> {
        let rules = match PathFd::new(OWN_PROCESS) {
            Ok(own) => rules.add_rule(PathBeneath::new(own, AccessFs::from_read(ABI::V3))).ok()?,
            // There is no /proc here.
            Err(_) => rules,
        };
        let status = rules.restrict_self().ok()?;
        (status.ruleset == RulesetStatus::FullyEnforced && status.no_new_privs).then_some(())
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use crate::Stdio;

        fn order(program: &Path, cwd: &Path) -> Order {
            Order {
                program: program.into(),
                args: vec![],
                cwd: cwd.to_owned(),
                env: vec![],
                env_is_all: false,
                tag: String::new(),
                stdio: Stdio::Piped,
                sandbox: Some(Sandbox::default()),
                live_until: None,
            }
        }

        #[test]
        fn the_home_directory_and_those_above_it_are_too_wide() {
            let home = Some(Path::new("/home/me"));
            let table = [("/", true), ("/home", true), ("/home/me", true), ("/home/me/x", false), ("/home/you", false)];
            for (dir, expected) in table {
                assert_eq!(is_too_wide(Path::new(dir), home), expected, "{dir}");
            }
            assert!(is_too_wide(Path::new("/"), None) && !is_too_wide(Path::new("/srv"), None));
        }

        #[test]
        fn the_working_directory_and_the_programs_directory_are_readable() {
            let dir = tempfile::tempdir().unwrap();
            let root = fs::canonicalize(dir.path()).unwrap();
            for name in ["work", "bin", "real"] {
                fs::create_dir(root.join(name)).unwrap();
            }
            fs::write(root.join("real/server"), "").unwrap();
            std::os::unix::fs::symlink("../real/server", root.join("bin/server")).unwrap();
            let paths = readable(&order(&root.join("bin/server"), &root.join("work")));
            for name in ["work", "bin", "real"] {
                assert!(paths.contains(&root.join(name)), "{name}: {paths:?}");
            }
            assert!(!paths.contains(&root));

            let paths = readable(&order(Path::new("no-such-program"), Path::new("/")));
            assert!(!paths.contains(&PathBuf::from("/")), "{paths:?}");
        }

        #[test]
        fn failed_starts_are_explained() {
            let dir = tempfile::tempdir().unwrap();
            let program = dir.path().join("server");
            fs::write(&program, "").unwrap();
            let sandboxed = order(&program, dir.path());
            let free = Order { sandbox: None, ..sandboxed.clone() };
            let [denied, missing, other] =
                [libc::EACCES, libc::ENOENT, super::super::NOT_ENTERED].map(io::Error::from_raw_os_error);
            let words = |order, error| super::super::explain(order, error).map(|error| error.to_string());
            assert!(words(&sandboxed, &denied).unwrap().ends_with("not in `read` of its sandbox"));
            assert_eq!(words(&sandboxed, &other).unwrap(), "the kernel did not enforce its sandbox");
            assert_eq!(words(&sandboxed, &missing), None);
            assert_eq!(words(&free, &denied), None);
        }

        #[test]
        fn the_book_lists_every_readable_path() {
            let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/sandbox.md");
            let page = fs::read_to_string(page).unwrap();
            let (_, rest) = page.split_once("## What every sandboxed server can read").unwrap();
            let (list, _) = rest.split_once("\nException: ").unwrap();
            let mut listed: Vec<&str> =
                list.split('`').skip(1).step_by(2).filter(|word| word.starts_with('/')).collect();
            let mut known: Vec<&str> = READABLE.iter().chain(DEVICES).copied().chain([OWN_PROCESS]).collect();
            listed.sort_unstable();
            known.sort_unstable();
            assert_eq!(listed, known);
        }

        #[test]
        fn all_rules_are_created_or_none() {
            let dir = tempfile::tempdir().unwrap();
            let file = dir.path().join("file");
            fs::write(&file, "").unwrap();
            let sandbox = Sandbox {
                read: vec![file.clone()],
                write: vec![dir.path().to_owned(), file],
                tcp_connect: Ports::Only(vec![443, 443]),
                tcp_bind: Ports::Only(vec![0, 65535]),
            };
            let missing = Sandbox { write: vec![dir.path().join("missing")], ..sandbox.clone() };
            if sandbox.refusal(sandbox_support()).is_some() {
                assert!(rules(&sandbox, &[]).is_err());
                return;
            }
            rules(&sandbox, &[PathBuf::from("/no/such/path")]).unwrap();
            let error = rules(&missing, &[]).unwrap_err().to_string();
            assert!(error.starts_with("the sandbox cannot be set up: `"), "{error}");
            assert!(error.contains("missing`: No such file"), "{error}");
        }
    }
}
