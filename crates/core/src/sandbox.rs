//! The sandbox of one server as data: the files and TCP ports that it may use, and which kernels can enforce that. The
//! kernel enforces it; the rules are made in `os/unix/sandbox.rs` of the program.

use std::path::PathBuf;

/// Entries in each of the four lists. A longer list is refused when it is read and when it is sent.
pub const RULES_MAX: usize = 256;

/// The first Landlock ABI that controls opening, creating, renaming and truncating files.
const ABI_OF_FILES: u32 = 3;
/// The first one that controls TCP ports.
const ABI_OF_PORTS: u32 = 4;

/// What a server may use in addition to the readable system paths. Everything else is denied.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sandbox {
    pub read: Vec<PathBuf>,
    /// These may also be read and executed.
    pub write: Vec<PathBuf>,
    pub tcp_connect: Ports,
    pub tcp_bind: Ports,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ports {
    /// The sandbox has no rules.
    Any,
    Only(Vec<u16>),
}

impl Default for Ports {
    fn default() -> Ports {
        Ports::Only(Vec::new())
    }
}

/// What the running system can enforce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// The version of the Landlock ABI.
    Landlock(u32),
    /// Landlock is built into the kernel, and was disabled at boot.
    Disabled,
    /// The kernel has no Landlock, or a system call filter hides it.
    Missing,
    NotLinux,
}

/// Why a sandbox cannot be enforced, and what the user can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub why: String,
    pub hint: &'static str,
}

impl Sandbox {
    /// A sandbox is enforced as a whole or refused.
    pub fn refusal(&self, support: Support) -> Option<Refusal> {
        let refusal = |why: &str, hint| Some(Refusal { why: why.to_owned(), hint });
        let restricts_ports = self.tcp_connect != Ports::Any || self.tcp_bind != Ports::Any;
        match support {
            Support::NotLinux => refusal("only Linux can enforce a sandbox", "remove it on this system"),
            Support::Missing => refusal(
                "this kernel cannot enforce a sandbox: it has no Landlock",
                "use Linux 6.7 or later with CONFIG_SECURITY_LANDLOCK, or remove it",
            ),
            Support::Disabled => refusal(
                "this kernel cannot enforce a sandbox: Landlock is disabled",
                "add `landlock` to `lsm=` on the kernel's command line, or remove it",
            ),
            Support::Landlock(abi) if abi < ABI_OF_FILES => Some(Refusal {
                why: format!(
                    "this kernel cannot enforce a sandbox: its Landlock ABI {abi} does not control truncation"
                ),
                hint: "use Linux 6.7 or later (6.2 for files only), or remove it",
            }),
            Support::Landlock(abi) if abi < ABI_OF_PORTS && restricts_ports => Some(Refusal {
                why: format!("this kernel cannot restrict TCP ports: its Landlock ABI {abi} has no network rules"),
                hint: "use Linux 6.7 or later, or set `tcp_connect = \"any\"` and `tcp_bind = \"any\"`",
            }),
            Support::Landlock(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_is_refused_where_the_kernel_cannot_enforce_it() {
        let closed = Sandbox::default();
        let half = Sandbox { tcp_connect: Ports::Any, ..Sandbox::default() };
        let files = Sandbox { tcp_connect: Ports::Any, tcp_bind: Ports::Any, ..Sandbox::default() };
        #[rustfmt::skip]
        let table = [
            // support              sandbox  the refusal ends with
            (Support::NotLinux,     &files,  Some("only Linux can enforce a sandbox")),
            (Support::Missing,      &files,  Some("it has no Landlock")),
            (Support::Disabled,     &files,  Some("Landlock is disabled")),
            (Support::Landlock(1),  &files,  Some("its Landlock ABI 1 does not control truncation")),
            (Support::Landlock(2),  &closed, Some("its Landlock ABI 2 does not control truncation")),
            (Support::Landlock(3),  &closed, Some("its Landlock ABI 3 has no network rules")),
            (Support::Landlock(3),  &half,   Some("its Landlock ABI 3 has no network rules")),
            (Support::Landlock(3),  &files,  None),
            (Support::Landlock(4),  &closed, None),
            (Support::Landlock(99), &closed, None),
        ];
        for (support, sandbox, end) in table {
            let refusal = sandbox.refusal(support);
            assert_eq!(refusal.is_some(), end.is_some(), "{support:?} {sandbox:?}");
            if let (Some(refusal), Some(end)) = (refusal, end) {
                assert!(refusal.why.ends_with(end), "{refusal:?}");
            }
        }
    }
}
