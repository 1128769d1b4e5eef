//! Reads `sandbox` of `[mcp]` and of a backend into a checked [`Sandbox`]. Whether the kernel can enforce it is part of
//! the check.

use std::{fs, path::PathBuf};

use outlast_core::sandbox::{Ports, RULES_MAX, Sandbox};
use outlast_os as os;

use super::{keys, mistake::Mistakes, table::Set, values::FilePath};
use crate::cli::report;

/// `None` if the table has no sandbox. An error in it is collected, and then nothing may be started.
pub(crate) fn read(table: &Set<keys::Sandbox>, mistakes: &mut Mistakes) -> Option<Sandbox> {
    if !table.is_set {
        return None;
    }
    let sandbox = Sandbox {
        read: paths(&table.read, mistakes),
        write: paths(&table.write, mistakes),
        tcp_connect: ports(&table.tcp_connect, &table.tcp_connect.0, mistakes),
        tcp_bind: ports(&table.tcp_bind, &table.tcp_bind.0, mistakes),
    };
    if let Some(refusal) = sandbox.refusal(os::sandbox_support()) {
        mistakes.wrong(&table.spot, refusal.why, refusal.hint);
    }
    Some(sandbox)
}

fn paths(set: &Set<Vec<FilePath>>, mistakes: &mut Mistakes) -> Vec<PathBuf> {
    limit(set, set.len(), mistakes);
    let mut paths = Vec::new();
    for path in set.iter() {
        let wrong = match fs::metadata(&**path) {
            _ if path.text.is_empty() => "a path is empty".to_owned(),
            Ok(_) => {
                paths.push(path.to_path_buf());
                continue;
            }
            Err(error) => format!("`{}` cannot be used: {}", path.text.written, report::plain(&error.to_string())),
        };
        let hint = "create it or remove it; a relative path counts from the directory of the file";
        mistakes.wrong(&path.text.spot, wrong, hint);
    }
    paths
}

fn ports<T>(set: &Set<T>, ports: &Ports, mistakes: &mut Mistakes) -> Ports {
    if let Ports::Only(ports) = ports {
        limit(set, ports.len(), mistakes);
    }
    ports.clone()
}

fn limit<T>(set: &Set<T>, count: usize, mistakes: &mut Mistakes) {
    if RULES_MAX < count {
        let hint = format!("at most {RULES_MAX} are allowed; a directory includes everything in it");
        mistakes.wrong(&set.spot, format!("{count} entries are too many"), hint);
    }
}
