//! The console events by which people and the system ask outlast to stop. They are only reported; the driver decides
//! what to do.

use std::{
    io,
    task::{Context, Poll},
};

use tokio::signal::windows::{
    CtrlBreak, CtrlC, CtrlClose, CtrlShutdown, ctrl_break, ctrl_c, ctrl_close, ctrl_shutdown,
};

use crate::Stop;

/// A stream of received console events.
#[derive(Debug)]
pub struct Stops {
    c: CtrlC,
    ctrl_break: CtrlBreak,
    close: CtrlClose,
    shutdown: CtrlShutdown,
}

impl Stops {
    pub fn begin() -> io::Result<Stops> {
        Ok(Stops { c: ctrl_c()?, ctrl_break: ctrl_break()?, close: ctrl_close()?, shutdown: ctrl_shutdown()? })
    }

    /// Windows has no signal that asks for an upgrade.
    pub fn poll_upgrade(&mut self, _cx: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }

    /// The next event, with the number of the corresponding Unix signal. Cancel-safe.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Stop> {
        if self.c.poll_recv(cx).is_ready() {
            return Poll::Ready(Stop { name: "Ctrl-C", number: 2 });
        }
        if self.ctrl_break.poll_recv(cx).is_ready() {
            return Poll::Ready(Stop { name: "Ctrl-Break", number: 15 });
        }
        if self.close.poll_recv(cx).is_ready() {
            return Poll::Ready(Stop { name: "close", number: 1 });
        }
        if self.shutdown.poll_recv(cx).is_ready() {
            return Poll::Ready(Stop { name: "shutdown", number: 15 });
        }
        Poll::Pending
    }
}
