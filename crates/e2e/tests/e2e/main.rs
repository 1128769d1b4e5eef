//! Tests of the real program, as a client and a server see it.

#[cfg(target_os = "linux")]
mod agents;
#[cfg(target_os = "linux")]
mod attach;
#[cfg(unix)]
mod audit;
#[cfg(target_os = "linux")]
mod book;
#[cfg(target_os = "linux")]
mod capi;
#[cfg(target_os = "linux")]
mod chaos;
#[cfg(target_os = "linux")]
mod cluster_commands;
#[cfg(target_os = "linux")]
mod config;
#[cfg(unix)]
mod control;
#[cfg(unix)]
mod crowd;
mod docs;
#[cfg(target_os = "linux")]
mod doctor;
#[cfg(target_os = "linux")]
mod exact;
#[cfg(target_os = "linux")]
mod examples;
#[cfg(target_os = "linux")]
mod exhaustion;
#[cfg(target_os = "linux")]
mod faults;
#[cfg(target_os = "linux")]
mod gateway;
#[cfg(unix)]
mod help_texts;
#[cfg(target_os = "linux")]
mod hostile;
#[cfg(unix)]
mod http;
#[cfg(target_os = "linux")]
mod json;
#[cfg(unix)]
mod matrix;
#[cfg(target_os = "linux")]
mod mcp;
#[cfg(target_os = "linux")]
mod monitors;
#[cfg(target_os = "linux")]
mod profiles;
#[cfg(unix)]
mod puppet;
#[cfg(unix)]
mod race;
#[cfg(target_os = "linux")]
mod restore;
#[cfg(target_os = "linux")]
mod run;
#[cfg(target_os = "linux")]
mod sandbox;
#[cfg(target_os = "linux")]
mod send;
#[cfg(target_os = "linux")]
mod share;
#[cfg(unix)]
mod support;
#[cfg(unix)]
mod top;
#[cfg(target_os = "linux")]
mod trust;
#[cfg(target_os = "linux")]
mod unattended;
#[cfg(target_os = "linux")]
mod waiting;
#[cfg(windows)]
mod windows;
#[cfg(unix)]
mod wrap;
