//! The alternate screen of the user's terminal, for `top` and `demo`. It draws nothing itself.

use std::{
    cell::Cell,
    io::{self, Write},
    panic,
};

use ratatui::crossterm::{
    cursor, execute,
    terminal::{EndSynchronizedUpdate, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode},
};

/// The terminal shows the alternate screen without a cursor. The normal screen is shown again on drop and on a panic.
pub(crate) struct FullScreen {
    /// In raw mode keys are read one by one and not echoed.
    is_raw: bool,
    /// The sequence that shows the normal screen also moves the cursor, so it is written once.
    is_shown: Cell<bool>,
}

impl FullScreen {
    pub(crate) fn enter(is_raw: bool) -> io::Result<FullScreen> {
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            let _ = leave(is_raw);
            report(panic);
        }));
        let screen = FullScreen { is_raw, is_shown: Cell::new(false) };
        screen.show()?;
        Ok(screen)
    }

    pub(crate) fn show(&self) -> io::Result<()> {
        self.is_shown.set(true);
        if self.is_raw {
            enable_raw_mode()?;
        }
        execute!(io::stdout(), EnterAlternateScreen, cursor::Hide)
    }

    /// Shows the normal screen until `show`.
    pub(crate) fn hide(&self) -> io::Result<()> {
        if self.is_shown.replace(false) { leave(self.is_raw) } else { Ok(()) }
    }
}

impl Drop for FullScreen {
    fn drop(&mut self) {
        // If the terminal is gone, the error does not matter.
        let _ = self.hide();
    }
}

/// Each step is tried even if another one fails.
fn leave(is_raw: bool) -> io::Result<()> {
    let left = execute!(io::stdout(), EndSynchronizedUpdate, LeaveAlternateScreen, cursor::Show);
    let cooked = if is_raw { disable_raw_mode() } else { Ok(()) };
    io::stdout().flush()?;
    left.and(cooked)
}
