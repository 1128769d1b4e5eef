//! The proof: the real program, as a client and a server would meet it.

#[cfg(unix)]
mod audit;
#[cfg(unix)]
mod control;
#[cfg(unix)]
mod crowd;
mod docs;
#[cfg(target_os = "linux")]
mod doctor;
#[cfg(unix)]
mod matrix;
#[cfg(target_os = "linux")]
mod mcp;
#[cfg(unix)]
mod puppet;
#[cfg(unix)]
mod race;
#[cfg(target_os = "linux")]
mod run;
#[cfg(unix)]
mod support;
#[cfg(unix)]
mod top;
#[cfg(unix)]
mod words;
#[cfg(unix)]
mod wrap;
