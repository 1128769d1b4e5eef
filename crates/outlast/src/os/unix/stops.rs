//! The signals by which people and systems ask us to stop.
#![expect(unsafe_code, reason = "asks the kernel how a signal is treated, which nix cannot do without changing it")]

use std::{
    io,
    task::{Context, Poll},
};

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::os::Stop;

/// Each stop signal once it has come.
#[derive(Debug)]
pub struct Stops(Vec<(Signal, Stop)>);

impl Stops {
    /// From now on the signals stop nothing by themselves. A client that wants us to go is heard, even if
    /// whoever started us had the signal ignored, as a shell does for what it puts in the background.
    pub fn begin() -> io::Result<Stops> {
        let all = [
            Stop { name: "SIGTERM", number: libc::SIGTERM },
            Stop { name: "SIGINT", number: libc::SIGINT },
            Stop { name: "SIGHUP", number: libc::SIGHUP },
        ];
        all.into_iter()
            .map(|stop| Ok((signal(SignalKind::from_raw(stop.number))?, stop)))
            .collect::<io::Result<Vec<_>>>()
            .map(Stops)
    }

    /// The next signal. Cancel-safe.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Stop> {
        for (signal, stop) in &mut self.0 {
            if signal.poll_recv(cx).is_ready() {
                return Poll::Ready(*stop);
            }
        }
        Poll::Pending
    }
}

pub(super) fn is_ignored(signal: i32) -> bool {
    // SAFETY: a zeroed sigaction is a valid value of that plain C struct, and with a null new action
    // the call only writes into it.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    }
}
