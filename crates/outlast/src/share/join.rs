//! Connects to the hub of a command, or starts it. All of this blocks, and runs beside the loop.

use std::{
    ffi::OsString,
    io::{self, ErrorKind, Read, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use outlast_os::{self as os, BlockingStream, TheirEnd};
use serde_json::Value;

use super::{
    place::{self, Files, Hubs, OWN},
    wire::{FromHub, GREETING_MAX, Hello},
};

/// How long a hub may take to answer a greeting; then the client gets a server of its own.
const WELCOME_MAX: Duration = Duration::from_secs(5);
/// How long another client may take to start the hub; then this one gets a server of its own.
const START_MAX: Duration = Duration::from_secs(20);
/// How often the claim of another client that starts the hub is looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Which hub a client uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Target {
    Shared,
    /// The one for clients with equal capabilities, for this reason.
    Equals(String),
    /// One of its own, for this reason.
    Own(String),
}

/// All that is needed to join.
#[derive(Debug, Clone)]
pub(super) struct Joining {
    pub place: Hubs,
    pub hello: Hello,
    /// The arguments of this program.
    pub args: Vec<OsString>,
}

/// A connection to a hub that has welcomed the client.
#[derive(Debug)]
pub(super) struct Joined {
    pub line: BlockingStream,
    pub id: String,
    pub pid: u32,
    pub target: Target,
    /// What was read after the welcome.
    pub early: Vec<u8>,
}

/// Why a hub cannot be used.
enum Refused {
    /// There is none, or it ends.
    Gone,
    Apart {
        why: String,
        with_equals: bool,
    },
    /// A sentence for people.
    Trouble(String),
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Refused {
        Refused::Trouble(os::cause::plain(&error.to_string()))
    }
}

/// Tries the hub that is wanted; a client that cannot share it gets another one, or one of its own.
pub(super) fn join(joining: &Joining, target: Target) -> Result<Joined, String> {
    let mut target = target;
    loop {
        let capabilities = match &target {
            Target::Shared => None,
            Target::Equals(_) => Some(joining.hello.capabilities.as_str()),
            Target::Own(_) => return joining.own(target),
        };
        let joined = joining.place.files(capabilities).map_err(Refused::Trouble);
        target = match (joined.and_then(|files| joining.named(&files, &target)), target) {
            (Ok(joined), _) => return Ok(joined),
            (Err(Refused::Apart { why, with_equals: true }), Target::Shared) => Target::Equals(why),
            (Err(Refused::Apart { why, .. }), _) => Target::Own(why),
            (Err(Refused::Gone), _) => Target::Own("the hub ended again and again".to_owned()),
            (Err(Refused::Trouble(why)), _) => Target::Own(why),
        };
    }
}

impl Joining {
    /// The hub with this name. One client at a time starts it, and the others wait for that.
    fn named(&self, files: &Files, target: &Target) -> Result<Joined, Refused> {
        let until = Instant::now() + START_MAX;
        loop {
            match self.connect(&files.socket, target) {
                Err(Refused::Gone) => {}
                other => return other,
            }
            if let Some(_claim) = os::claim_name(&files.start)? {
                // Another client may have started it since.
                match self.connect(&files.socket, target) {
                    Err(Refused::Gone) => {}
                    other => return other,
                }
                self.start(&files.name, target, None)?;
                match self.connect(&files.socket, target) {
                    Err(Refused::Gone) if Instant::now() < until => continue,
                    other => return other,
                }
            }
            if until <= Instant::now() {
                return Err(Refused::Trouble("another client does not finish starting the hub".to_owned()));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// A hub that only this client knows. It needs no file.
    fn own(&self, target: Target) -> Result<Joined, String> {
        let begun = os::connection().map_err(Refused::from).and_then(|(line, theirs)| {
            self.start(OWN, &target, Some(theirs))?;
            self.greet(line, &target)
        });
        begun.map_err(|refused| match refused {
            Refused::Gone => "the process that was to supervise the server ended".to_owned(),
            Refused::Apart { why, .. } | Refused::Trouble(why) => why,
        })
    }

    fn start(&self, name: &str, target: &Target, theirs: Option<TheirEnd>) -> Result<(), Refused> {
        // `outlast mcp …`: the options of a hub come before all others.
        let mut args: Vec<OsString> = self.args.iter().skip(1).take(1).cloned().collect();
        args.extend(["--hub".into(), name.into()]);
        if let Target::Equals(why) | Target::Own(why) = target {
            args.push(format!("--hub-why={why}").into());
        }
        args.extend(self.args.iter().skip(2).cloned());
        let env = place::environment(&self.hello.cwd);
        let said = os::start_background(&args, env.into_iter(), theirs)?;
        let said: Value = serde_json::from_str(&said).unwrap_or_default();
        match (said["ok"] == true, said["error"].as_str()) {
            (true, _) => Ok(()),
            (false, Some(error)) => Err(Refused::Trouble(error.to_owned())),
            (false, None) => Err(Refused::Trouble("the hub of the server ended at its start".to_owned())),
        }
    }

    fn connect(&self, socket: &Path, target: &Target) -> Result<Joined, Refused> {
        match BlockingStream::connect(socket, WELCOME_MAX) {
            Ok(line) if line.is_own_user() => self.greet(line, target),
            Ok(_) => Err(Refused::Trouble(format!("{} belongs to another user", socket.display()))),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
                Err(Refused::Gone)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn greet(&self, mut line: BlockingStream, target: &Target) -> Result<Joined, Refused> {
        line.set_patience(Some(WELCOME_MAX))?;
        // A hub that ends closes the connection, or is not there any more to read.
        line.write_all(&self.hello.to_line()).map_err(|_| Refused::Gone)?;
        let mut said = Vec::new();
        let end = loop {
            if let Some(end) = memchr::memchr(b'\n', &said) {
                break end;
            }
            let mut some = [0; 4096];
            match line.read(&mut some) {
                Ok(0) => return Err(Refused::Gone),
                Ok(length) if said.len() < GREETING_MAX => said.extend_from_slice(&some[..length]),
                Ok(_) => return Err(Refused::Trouble("the hub's greeting is too long".to_owned())),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Err(Refused::Trouble("the hub does not answer".to_owned()));
                }
                Err(_) => return Err(Refused::Gone),
            }
        };
        let early = said.split_off(end + 1);
        match FromHub::read(&said) {
            Some(FromHub::Welcome { id, pid }) => Ok(Joined { line, id, pid, target: target.clone(), early }),
            Some(FromHub::Apart { why, with_equals }) => Err(Refused::Apart { why, with_equals }),
            _ => Err(Refused::Trouble("the hub does not answer as a hub does".to_owned())),
        }
    }
}

/// The directory of this process, for the greeting.
pub(super) fn here() -> PathBuf {
    std::env::current_dir().unwrap_or_default()
}
