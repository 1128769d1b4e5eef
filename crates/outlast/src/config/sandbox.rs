//! `sandbox` of `[mcp]` and of a backend → a checked [`Sandbox`]. Whether the kernel can enforce it is part of the check.

use std::{fs, path::PathBuf};

use outlast_core::sandbox::{Ports, RULES_MAX, Sandbox};

use super::{
    mistake::{Mistake, Mistakes},
    read::{Section, beside},
};
use crate::{os, report};

/// Nothing if the table has no sandbox. A mistake in it is noted, and then nothing may be started.
pub fn read(table: &Section, mistakes: &mut Mistakes) -> Option<Sandbox> {
    let at = table.set("sandbox")?.at.clone();
    let section = table.section("sandbox");
    let sandbox = Sandbox {
        read: paths(&section, "read", mistakes),
        write: paths(&section, "write", mistakes),
        tcp_connect: ports(&section, "tcp_connect", mistakes),
        tcp_bind: ports(&section, "tcp_bind", mistakes),
    };
    if let Some(refusal) = sandbox.refusal(os::sandbox_support()) {
        mistakes.add(Mistake::new(at, section.path.clone(), refusal.why).hint(refusal.hint));
    }
    Some(sandbox)
}

fn paths(section: &Section, name: &str, mistakes: &mut Mistakes) -> Vec<PathBuf> {
    let texts = section.texts(name);
    let key = format!("{}.{name}", section.path);
    too_many(section, name, texts.len(), mistakes);
    let mut paths = Vec::new();
    for text in texts {
        let path = beside(&text);
        let wrong = match fs::metadata(&path) {
            _ if text.value.is_empty() => "a path is empty".to_owned(),
            Ok(_) => {
                paths.push(path);
                continue;
            }
            Err(error) => format!("`{}` cannot be used: {}", text.written, report::plain(&error.to_string())),
        };
        let hint = "create it or leave it out; a relative path counts from the directory of the file";
        mistakes.add(Mistake::new(text.at.clone(), key.clone(), wrong).hint(hint));
    }
    paths
}

fn ports(section: &Section, name: &str, mistakes: &mut Mistakes) -> Ports {
    let ports = section.ports(name);
    if let Ports::Only(ports) = &ports {
        too_many(section, name, ports.len(), mistakes);
    }
    ports
}

fn too_many(section: &Section, name: &str, count: usize, mistakes: &mut Mistakes) {
    if let Some(at) = section.place(name).filter(|_| RULES_MAX < count) {
        let what = format!("{count} entries are too many");
        let hint = format!("at most {RULES_MAX}; a directory stands for all that is in it");
        mistakes.add(Mistake::new(at, format!("{}.{name}", section.path), what).hint(hint));
    }
}
