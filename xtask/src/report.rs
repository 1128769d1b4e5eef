//! A failed command, in words: what went wrong, why, and what to do about it.

use std::fmt::Display;
use std::process::ExitCode;

#[derive(Debug)]
pub(crate) struct Failure {
    what: String,
    because: Option<String>,
    hint: Option<String>,
    code: u8,
}

impl Failure {
    pub(crate) fn new(what: impl Into<String>) -> Failure {
        Failure { what: what.into(), because: None, hint: None, code: 1 }
    }

    pub(crate) fn usage(what: impl Into<String>) -> Failure {
        Failure { code: 2, ..Failure::new(what) }.hint("`cargo xtask --help` lists the commands")
    }

    pub(crate) fn because(self, cause: impl Display) -> Failure {
        Failure { because: Some(cause.to_string()), ..self }
    }

    pub(crate) fn hint(self, hint: impl Into<String>) -> Failure {
        Failure { hint: Some(hint.into()), ..self }
    }

    pub(crate) fn report(&self) -> ExitCode {
        eprintln!("error: {}", self.what);
        if let Some(cause) = &self.because {
            eprintln!("  because: {cause}");
        }
        if let Some(hint) = &self.hint {
            eprintln!("  hint: {hint}");
        }
        ExitCode::from(self.code)
    }
}
