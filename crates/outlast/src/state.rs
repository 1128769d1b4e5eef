//! The state directory and what is kept in it: audit log, log files, restart markers. Readers ignore what they do not know.

pub(crate) mod audit;
pub(crate) mod audit_numbers;
pub(crate) mod audit_reader;
pub(crate) mod audit_retention;
pub(crate) mod home;
pub(crate) mod journal;
pub(crate) mod logs;
pub(crate) mod marker;
