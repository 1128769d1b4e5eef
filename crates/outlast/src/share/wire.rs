//! The lines between a thin client and its hub. Most are MCP messages; a line that begins with [`MARK`], which no JSON
//! does, is between the two programs.

use std::path::PathBuf;

use bytes::Bytes;
use serde_json::{Value, json};

/// The first byte of a line that is no MCP message.
const MARK: u8 = b'!';
/// The version of these lines. It is part of a hub's name, so that other versions use other hubs.
pub(super) const VERSION: u64 = 1;
/// A longer greeting is not read.
pub(super) const GREETING_MAX: usize = 256 << 10;

/// The first line of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hello {
    /// The process id of the thin client, and of the program that started it.
    pub pid: u32,
    pub parent: u32,
    pub cwd: PathBuf,
    /// As JSON: what the client's first message declares.
    pub capabilities: String,
    pub info: Option<String>,
    pub version: Option<String>,
}

/// What a hub tells a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum FromHub {
    /// The answer to the greeting: the client may use this hub, whose id and process id these are.
    Welcome { id: String, pid: u32 },
    /// The other answer: the client cannot use this hub. It may share another one with clients of equal capabilities.
    Apart { why: String, with_equals: bool },
    /// The client is to change to a server of its own. Its open requests are still answered.
    Move { why: String },
    /// The hub has become this program, and the client is to become it, too. An older client ignores this line.
    Upgrade { program: String },
    /// The server is over, as outlast would be without a hub; the client exits with this code.
    End { code: u8 },
}

/// Whether a line is between the two programs.
pub(super) fn is_ours(line: &[u8]) -> bool {
    line.first() == Some(&MARK)
}

impl Hello {
    pub(super) fn to_line(&self) -> Bytes {
        line(&json!({
            "v": VERSION,
            "pid": self.pid,
            "parent": self.parent,
            "cwd": self.cwd.to_string_lossy(),
            "capabilities": self.capabilities,
            "info": self.info,
            "version": self.version,
        }))
    }

    pub(super) fn read(line: &[u8]) -> Option<Hello> {
        let value = value(line)?;
        let number = |member: &str| u32::try_from(value[member].as_u64()?).ok();
        let text = |member: &str| value[member].as_str().map(str::to_owned);
        (value["v"] == VERSION).then_some(())?;
        Some(Hello {
            pid: number("pid")?,
            parent: number("parent")?,
            cwd: text("cwd")?.into(),
            capabilities: text("capabilities")?,
            info: text("info"),
            version: text("version"),
        })
    }
}

impl FromHub {
    pub(super) fn to_line(&self) -> Bytes {
        line(&match self {
            FromHub::Welcome { id, pid } => json!({"welcome": {"id": id, "pid": pid}}),
            FromHub::Apart { why, with_equals } => json!({"apart": {"why": why, "with_equals": with_equals}}),
            FromHub::Move { why } => json!({"move": {"why": why}}),
            FromHub::Upgrade { program } => json!({"upgrade": {"program": program}}),
            FromHub::End { code } => json!({"end": {"code": code}}),
        })
    }

    pub(super) fn read(line: &[u8]) -> Option<FromHub> {
        let value = value(line)?;
        let (name, about) = value.as_object()?.iter().next()?;
        let why = || about["why"].as_str().map(str::to_owned);
        match name.as_str() {
            "welcome" => {
                let pid = u32::try_from(about["pid"].as_u64()?).ok()?;
                Some(FromHub::Welcome { id: about["id"].as_str()?.to_owned(), pid })
            }
            "apart" => Some(FromHub::Apart { why: why()?, with_equals: about["with_equals"].as_bool()? }),
            "move" => Some(FromHub::Move { why: why()? }),
            "upgrade" => Some(FromHub::Upgrade { program: about["program"].as_str()?.to_owned() }),
            "end" => Some(FromHub::End { code: u8::try_from(about["code"].as_u64()?).ok()? }),
            _ => None,
        }
    }
}

fn line(value: &Value) -> Bytes {
    format!("{}{value}\n", char::from(MARK)).into()
}

fn value(line: &[u8]) -> Option<Value> {
    serde_json::from_slice(line.strip_prefix(&[MARK])?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_they_were_written() {
        let hello = Hello {
            pid: 1,
            parent: 2,
            cwd: "/a\nb".into(),
            capabilities: r#"{"roots":{}}"#.into(),
            info: None,
            version: Some("2025-11-25".into()),
        };
        let line = hello.to_line();
        assert!(is_ours(&line) && line.iter().filter(|byte| **byte == b'\n').count() == 1);
        assert_eq!(Hello::read(&line), Some(hello));
        let why = "\"why\"".to_owned();
        for said in [
            FromHub::Welcome { id: "py-1".into(), pid: 7 },
            FromHub::Apart { why: why.clone(), with_equals: true },
            FromHub::Move { why },
            FromHub::Upgrade { program: "/usr/bin/outlast".into() },
            FromHub::End { code: 3 },
        ] {
            assert_eq!(FromHub::read(&said.to_line()), Some(said));
        }
        for wrong in ["", "!", "!{}", "{\"end\":{\"code\":0}}", "!{\"end\":{\"code\":256}}", "![1]", "!{\"v\":2}"] {
            assert_eq!(FromHub::read(wrong.as_bytes()), None, "{wrong}");
            assert_eq!(Hello::read(wrong.as_bytes()), None, "{wrong}");
        }
    }
}
