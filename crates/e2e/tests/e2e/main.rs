//! The proof: the real program, as a client and a server would meet it.

#[cfg(unix)]
mod control;
#[cfg(unix)]
mod matrix;
#[cfg(unix)]
mod puppet;
#[cfg(target_os = "linux")]
mod run;
#[cfg(unix)]
mod support;
