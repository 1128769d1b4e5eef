//! The decisions behind outlast. Every module is a plain machine: events in, actions out, time passed in.
#![forbid(unsafe_code)]

pub mod agent;
pub mod agent_event;
pub mod agent_line;
pub mod composer;
pub mod count;
pub mod debounce;
pub mod exit;
pub mod gateway;
pub mod json;
pub mod keys;
pub mod life;
pub mod message;
pub mod pace;
pub mod patience;
pub mod reason;
pub mod record;
pub mod redact;
pub mod refusals;
pub mod relay;
pub mod restarts;
pub mod same_text;
pub mod sandbox;
pub mod secret;
pub mod seen_lines;
pub mod send;
pub mod session;
pub mod stance;
pub mod terminal;
pub mod turn_record;
pub mod typing;
pub mod visible;
pub mod waiting;
