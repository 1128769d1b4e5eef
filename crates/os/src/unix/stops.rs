//! The signals by which people and the system ask outlast to stop. They are only reported; the driver decides what to
//! do.
#![expect(unsafe_code, reason = "asks the kernel how a signal is treated, which nix cannot do without changing it")]

use std::{
    io,
    task::{Context, Poll},
};

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::Stop;

/// A stream of received stop signals, and of SIGUSR2.
#[derive(Debug)]
pub struct Stops {
    stops: Vec<(Signal, Stop)>,
    upgrade: Signal,
}

impl Stops {
    /// From now on the signals do not end the process. They are handled even if the parent had them ignored, as a
    /// shell does for background processes, so that a client can always stop outlast.
    pub fn begin() -> io::Result<Stops> {
        let all = [
            Stop { name: "SIGTERM", number: libc::SIGTERM },
            Stop { name: "SIGINT", number: libc::SIGINT },
            Stop { name: "SIGHUP", number: libc::SIGHUP },
        ];
        let stops = all.into_iter().map(|stop| Ok((signal(SignalKind::from_raw(stop.number))?, stop)));
        Ok(Stops { stops: stops.collect::<io::Result<_>>()?, upgrade: signal(SignalKind::user_defined2())? })
    }

    /// The next signal. Cancel-safe.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Stop> {
        for (signal, stop) in &mut self.stops {
            if signal.poll_recv(cx).is_ready() {
                return Poll::Ready(*stop);
            }
        }
        Poll::Pending
    }

    /// Ready when SIGUSR2 came, which requests an upgrade to the program that is on disk now. Cancel-safe.
    pub fn poll_upgrade(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.upgrade.poll_recv(cx).map(drop)
    }
}

pub(super) fn is_ignored(signal: i32) -> bool {
    // SAFETY: a zeroed sigaction is a valid value of that plain C struct, and with a null new action the call only
    // writes into it.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    }
}
