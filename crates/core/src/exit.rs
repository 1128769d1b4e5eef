//! What the kernel reports about an exit, and what it means for the next start. It plans no restart.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The exit code with which a server requests a restart.
pub const RESTART_CODE: i32 = 42;

/// What the kernel reports about a process that exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    Code(i32),
    Signal(i32),
}

impl Exit {
    /// Exit code 128 + n as signal n: a shell, and a program that catches a signal and exits, report it this way.
    pub fn folded(self) -> Exit {
        match self {
            Exit::Code(code) if signal_name(code.saturating_sub(128)).is_some() => Exit::Signal(code - 128),
            exit => exit,
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exit::Code(code) => write!(f, "exit code {code}"),
            Exit::Signal(signal) => match signal_name(*signal) {
                Some(name) => write!(f, "signal {signal} ({name})"),
                None => write!(f, "signal {signal}"),
            },
        }
    }
}

/// How a child ended. `Display` is the part of a sentence that people and models read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum How {
    Exited(Exit),
    ClosedStdout,
    ClosedStdin,
    CouldNotStart(String),
    HandshakeLate(Duration),
    HandshakeRefused(String),
    LineTooLong,
    /// It does not read its input, and the queue is full.
    StoppedReading,
    /// Of a server that is not a child: the connection is lost.
    Lost(String),
    /// Of a server that is not a child: it runs, and does not know our session any more.
    Forgot(String),
    /// Of a server that is not a child: it requires credentials, or rejects ours.
    Unauthorized(Denied),
    /// outlast ended it, because a message was due (promised by the server itself, or requested) and none came for
    /// this long.
    Hung(Duration),
    /// The lease under which it ran ended, and all its processes were killed at that moment.
    LeaseEnded,
    /// outlast stopped it on request.
    Stopped,
}

/// The response 401 or 403 of a server over HTTP. `Display` says what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Denied {
    pub status: u16,
    /// The server's response, with its address, as one sentence without its full stop.
    pub words: String,
    /// The value of `WWW-Authenticate`.
    pub challenge: Option<String>,
    /// Whether the configuration has an `Authorization` header for it.
    pub has_credentials: bool,
}

impl Denied {
    /// What the user should configure.
    pub fn hint(&self) -> &'static str {
        match (self.status, self.has_credentials) {
            (403, _) => {
                "its credentials do not allow this: check their scope with the server, then run `outlast reload`"
            }
            (_, true) => {
                "it did not accept the `Authorization` header in `headers` of this backend: renew it, then run `outlast reload`"
            }
            (_, false) => {
                "it needs credentials: add an `Authorization` header to `headers` of this backend, then run `outlast reload`"
            }
        }
    }
}

impl fmt::Display for Denied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words)?;
        if let Some(challenge) = &self.challenge {
            write!(f, " (WWW-Authenticate: {challenge})")?;
        }
        write!(f, "; {}", self.hint())
    }
}

impl How {
    pub fn exit(&self) -> Option<&Exit> {
        match self {
            How::Exited(exit) => Some(exit),
            _ => None,
        }
    }

    /// The `exit` of our errors and of `server_status`: `{"code":1}`, `{"signal":9}` or `{"why":"closed its stdout"}`.
    pub fn to_json(&self) -> Value {
        json!(self.status())
    }

    pub fn status(&self) -> HowStatus {
        match self {
            How::Exited(Exit::Code(code)) => HowStatus::Code(*code),
            How::Exited(Exit::Signal(signal)) => HowStatus::Signal(*signal),
            how => HowStatus::Why(how.to_string()),
        }
    }
}

/// How a process ended, in the JSON of errors and states.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HowStatus {
    Code(i32),
    Signal(i32),
    Why(String),
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            How::Exited(exit) => exit.fmt(f),
            How::ClosedStdout => f.write_str("closed its stdout"),
            How::ClosedStdin => f.write_str("closed its stdin"),
            How::CouldNotStart(why) => write!(f, "could not be started: {why}"),
            How::HandshakeLate(limit) => write!(f, "did not finish its handshake in {} s", limit.as_secs_f64()),
            How::HandshakeRefused(why) => write!(f, "failed its handshake: {why}"),
            How::LineTooLong => f.write_str("wrote a line over 64 MiB"),
            How::StoppedReading => f.write_str("stopped reading its stdin"),
            How::Lost(why) => write!(f, "was lost: {why}"),
            How::Forgot(why) => write!(f, "lost its session: {why}"),
            How::Unauthorized(denied) => denied.fmt(f),
            How::Hung(silence) => write!(f, "hung: silent for {} s", silence.as_secs_f64()),
            How::LeaseEnded => f.write_str("was killed because its lease ended"),
            How::Stopped => f.write_str("was stopped"),
        }
    }
}

/// What an end means for the next start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// outlast ended it on request.
    Asked,
    /// It was ready and exited on purpose.
    Clean,
    /// It requested a restart.
    RestartRequested,
    /// Only the session was lost.
    Forgot,
    /// It was ready and crashed.
    Crashed,
    /// It failed before it was ready: also a crash, and more likely to repeat.
    NeverReady,
}

pub fn classify(how: &How, asked: bool, was_ready: bool) -> Cause {
    match how {
        _ if asked => Cause::Asked,
        // Without a lease it must not be started again by the restart policy, and it did nothing wrong.
        How::Stopped | How::LeaseEnded => Cause::Asked,
        How::Exited(Exit::Code(RESTART_CODE)) => Cause::RestartRequested,
        How::CouldNotStart(_) | How::HandshakeLate(_) | How::HandshakeRefused(_) => Cause::NeverReady,
        // An exit with 0 before the handshake is a failure for the client that waits for it.
        _ if !was_ready => Cause::NeverReady,
        How::Exited(Exit::Code(0)) => Cause::Clean,
        How::Forgot(_) => Cause::Forgot,
        How::Exited(_) | How::ClosedStdout | How::ClosedStdin | How::LineTooLong => Cause::Crashed,
        How::StoppedReading | How::Lost(_) | How::Unauthorized(_) | How::Hung(_) => Cause::Crashed,
    }
}

/// A few words for people about the usual meaning of a well-known exit.
pub fn meaning(exit: &Exit) -> Option<String> {
    let words = match *exit {
        Exit::Code(0) => "it is done",
        Exit::Code(RESTART_CODE) => "it asks to be started again",
        Exit::Code(126) => "the command exists but cannot be run",
        Exit::Code(127) => "the command was not found",
        Exit::Code(_) => match exit.folded() {
            Exit::Code(_) => return None,
            signal => return Some(format!("the shell's code for {signal}")),
        },
        Exit::Signal(signal) => match signal_name(signal)? {
            "SIGKILL" => "killed by a user, or by the system because memory ran out",
            "SIGTERM" => "it was asked to terminate",
            "SIGINT" => "interrupted, as by Ctrl-C",
            "SIGHUP" => "its terminal was closed, or its parent ended",
            "SIGSEGV" | "SIGBUS" => "it accessed invalid memory",
            "SIGABRT" => "it gave itself up: a failed assertion or a fatal error of its runtime",
            "SIGPIPE" => "it wrote to a closed pipe",
            _ => return None,
        },
    };
    Some(words.to_string())
}

/// The name of a signal on this system; none for real-time signals, which have only numbers.
pub fn signal_name(signal: i32) -> Option<&'static str> {
    #[rustfmt::skip]
    const LINUX: [&str; 31] = [
        "SIGHUP", "SIGINT", "SIGQUIT", "SIGILL", "SIGTRAP", "SIGABRT", "SIGBUS", "SIGFPE",
        "SIGKILL", "SIGUSR1", "SIGSEGV", "SIGUSR2", "SIGPIPE", "SIGALRM", "SIGTERM", "SIGSTKFLT",
        "SIGCHLD", "SIGCONT", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG", "SIGXCPU",
        "SIGXFSZ", "SIGVTALRM", "SIGPROF", "SIGWINCH", "SIGIO", "SIGPWR", "SIGSYS",
    ];
    #[rustfmt::skip]
    const BSD: [&str; 31] = [
        "SIGHUP", "SIGINT", "SIGQUIT", "SIGILL", "SIGTRAP", "SIGABRT", "SIGEMT", "SIGFPE",
        "SIGKILL", "SIGBUS", "SIGSEGV", "SIGSYS", "SIGPIPE", "SIGALRM", "SIGTERM", "SIGURG",
        "SIGSTOP", "SIGTSTP", "SIGCONT", "SIGCHLD", "SIGTTIN", "SIGTTOU", "SIGIO", "SIGXCPU",
        "SIGXFSZ", "SIGVTALRM", "SIGPROF", "SIGWINCH", "SIGINFO", "SIGUSR1", "SIGUSR2",
    ];
    let names = if cfg!(any(target_os = "linux", target_os = "android")) { LINUX } else { BSD };
    let index = usize::try_from(signal).ok()?.checked_sub(1)?;
    names.get(index).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(code: i32) -> How {
        How::Exited(Exit::Code(code))
    }

    fn signal(signal: i32) -> How {
        How::Exited(Exit::Signal(signal))
    }

    fn denied(status: u16) -> Denied {
        let words = format!("http://a answered {status}");
        Denied { status, words, challenge: Some("Bearer".into()), has_credentials: false }
    }

    #[test]
    fn a_denied_request_gets_a_hint() {
        #[rustfmt::skip]
        let table = [
            // status, credentials, words
            (401, false, "http://a answered 401 (WWW-Authenticate: Bearer); it needs credentials: add an `Authorization` header to `headers` of this backend, then run `outlast reload`"),
            (401, true,  "http://a answered 401 (WWW-Authenticate: Bearer); it did not accept the `Authorization` header in `headers` of this backend: renew it, then run `outlast reload`"),
            (403, true,  "http://a answered 403 (WWW-Authenticate: Bearer); its credentials do not allow this: check their scope with the server, then run `outlast reload`"),
        ];
        for (status, has_credentials, words) in table {
            assert_eq!(How::Unauthorized(Denied { has_credentials, ..denied(status) }).to_string(), words);
        }
    }

    #[test]
    fn exits_have_their_causes() {
        use Cause::*;
        let late = || How::HandshakeLate(Duration::from_secs(30));
        #[rustfmt::skip]
        let table = [
            // how                               asked  ready  means
            (code(0),                            false, true,  Clean),
            (code(0),                            false, false, NeverReady),
            (code(1),                            false, true,  Crashed),
            (code(1),                            false, false, NeverReady),
            (code(42),                           false, true,  RestartRequested),
            (code(42),                           false, false, RestartRequested),
            (code(127),                          false, false, NeverReady),
            (code(143),                          false, true,  Crashed),
            (signal(9),                          false, true,  Crashed),
            (signal(15),                         false, false, NeverReady),
            (How::ClosedStdout,                  false, true,  Crashed),
            (How::ClosedStdout,                  false, false, NeverReady),
            (How::ClosedStdin,                   false, true,  Crashed),
            (How::ClosedStdin,                   false, false, NeverReady),
            (How::LineTooLong,                   false, true,  Crashed),
            (How::LineTooLong,                   false, false, NeverReady),
            (How::StoppedReading,                false, true,  Crashed),
            (How::Lost("no answer".into()),      false, true,  Crashed),
            (How::Forgot("404".into()),          false, true,  Forgot),
            (How::Forgot("404".into()),          false, false, NeverReady),
            (How::Lost("no answer".into()),      false, false, NeverReady),
            (How::Unauthorized(denied(401)),     false, true,  Crashed),
            (How::Unauthorized(denied(401)),     false, false, NeverReady),
            (How::Hung(Duration::from_secs(5)),  false, true,  Crashed),
            (How::CouldNotStart("no".into()),    false, false, NeverReady),
            (late(),                             false, false, NeverReady),
            (late(),                             false, true,  NeverReady),
            (How::HandshakeRefused("no".into()), false, false, NeverReady),
            (How::Stopped,                       false, true,  Asked),
            (How::LeaseEnded,                    false, true,  Asked),
            (How::LeaseEnded,                    false, false, Asked),
            (code(0),                            true,  true,  Asked),
            (code(1),                            true,  true,  Asked),
            (code(42),                           true,  true,  Asked),
            (signal(9),                          true,  false, Asked),
            (How::CouldNotStart("no".into()),    true,  false, Asked),
        ];
        for (how, asked, ready, means) in table {
            assert_eq!(classify(&how, asked, ready), means, "{how}, asked {asked}, ready {ready}");
        }
    }

    #[test]
    fn an_exit_as_text_and_as_json() {
        #[rustfmt::skip]
        let table = [
            // how, words, json
            (code(1),                                         "exit code 1",                             r#"{"code":1}"#),
            (code(-1),                                        "exit code -1",                            r#"{"code":-1}"#),
            (signal(9),                                       "signal 9 (SIGKILL)",                      r#"{"signal":9}"#),
            (signal(64),                                      "signal 64",                               r#"{"signal":64}"#),
            (How::ClosedStdout,                               "closed its stdout",                       r#"{"why":"closed its stdout"}"#),
            (How::ClosedStdin,                                "closed its stdin",                        r#"{"why":"closed its stdin"}"#),
            (How::CouldNotStart("permission denied".into()),  "could not be started: permission denied", r#"{"why":"could not be started: permission denied"}"#),
            (How::HandshakeLate(Duration::from_secs(30)),     "did not finish its handshake in 30 s",    r#"{"why":"did not finish its handshake in 30 s"}"#),
            (How::HandshakeLate(Duration::from_millis(1500)), "did not finish its handshake in 1.5 s",   r#"{"why":"did not finish its handshake in 1.5 s"}"#),
            (How::HandshakeRefused("another version".into()), "failed its handshake: another version",   r#"{"why":"failed its handshake: another version"}"#),
            (How::LineTooLong,                                "wrote a line over 64 MiB",                r#"{"why":"wrote a line over 64 MiB"}"#),
            (How::StoppedReading,                             "stopped reading its stdin",               r#"{"why":"stopped reading its stdin"}"#),
            (How::Lost("no answer".into()),                   "was lost: no answer",                     r#"{"why":"was lost: no answer"}"#),
            (How::Hung(Duration::from_secs(5)),               "hung: silent for 5 s",                 r#"{"why":"hung: silent for 5 s"}"#),
            (How::LeaseEnded,                                 "was killed because its lease ended",      r#"{"why":"was killed because its lease ended"}"#),
            (How::Stopped,                                    "was stopped",                             r#"{"why":"was stopped"}"#),
        ];
        for (how, words, json) in table {
            assert_eq!(how.to_string(), words);
            assert_eq!(how.to_json().to_string(), json);
            assert_eq!(how.exit().is_some(), matches!(how, How::Exited(_)));
        }
    }

    #[test]
    fn well_known_exit_codes_have_a_meaning() {
        #[rustfmt::skip]
        let table = [
            (Exit::Code(0),        Some("it is done")),
            (Exit::Code(1),        None),
            (Exit::Code(42),       Some("it asks to be started again")),
            (Exit::Code(126),      Some("the command exists but cannot be run")),
            (Exit::Code(127),      Some("the command was not found")),
            (Exit::Code(128),      None),
            (Exit::Code(130),      Some("the shell's code for signal 2 (SIGINT)")),
            (Exit::Code(137),      Some("the shell's code for signal 9 (SIGKILL)")),
            (Exit::Code(255),      None),
            (Exit::Code(i32::MIN), None),
            (Exit::Signal(9),      Some("killed by a user, or by the system because memory ran out")),
            (Exit::Signal(11),     Some("it accessed invalid memory")),
            (Exit::Signal(64),     None),
        ];
        for (exit, words) in table {
            assert_eq!(meaning(&exit).as_deref(), words, "{exit}");
        }
    }

    #[test]
    fn a_shells_code_folds_into_its_signal() {
        #[rustfmt::skip]
        let table = [
            (Exit::Code(143),  Exit::Signal(15)),
            (Exit::Code(129),  Exit::Signal(1)),
            (Exit::Code(128),  Exit::Code(128)),
            (Exit::Code(255),  Exit::Code(255)),
            (Exit::Code(15),   Exit::Code(15)),
            (Exit::Signal(15), Exit::Signal(15)),
        ];
        for (exit, folded) in table {
            assert_eq!(exit.folded(), folded);
        }
    }
}
