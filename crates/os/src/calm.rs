//! The escape sequences that reset a terminal after an agent that did not do it itself, for example because it was
//! killed.

/// Turns off the modes that an agent turns on and leaves on when it is killed. A mode that is off is not changed. In
/// this order: bracketed paste; mouse reports of every kind and encoding; focus reports; synchronized output; reports
/// of the colour scheme and of the size; kitty's keyboard flags, those on the stack and those that are set; xterm's
/// modified keys; application cursor and keypad keys, the backspace key; a hidden cursor and its shape; insert mode,
/// automatic line feeds, disabled line wrap; inverted colours, left and right margins; hyperlinks.
const CALM: &[u8] = b"\x1b[?2004l\
    \x1b[?9l\x1b[?1000l\x1b[?1001l\x1b[?1002l\x1b[?1003l\x1b[?1005l\x1b[?1006l\x1b[?1015l\x1b[?1016l\
    \x1b[?1004l\x1b[?2026l\x1b[?2031l\x1b[?2048l\
    \x1b[<9u\x1b[=0;1u\x1b[>4m\
    \x1b[?1l\x1b>\x1b[?67l\
    \x1b[?25h\x1b[0 q\x1b[4l\x1b[20l\x1b[?7h\x1b[?5l\x1b[?69l\x1b]8;;\x1b\\";
/// The beginning of `CALM`. A shell that shows its prompt again may have turned these modes on again.
#[cfg(unix)]
pub(super) const PASTE_OFF: &[u8] = b"\x1b[?2004l";
/// Leaves the alternate screen. Sent only while the alternate screen is shown: on the main screen it moves the
/// cursor.
const LEAVE_ALTERNATE: &[u8] = b"\x1b[?1049l";
/// Resets the scroll region, the character sets and the colours of the main screen. Resetting the scroll region moves
/// the cursor, so its position is saved and restored.
const PLAIN: &[u8] = b"\x1b7\x1b[r\x1b8\x1b(B\x1b)B\x0f\x1b[0m";

/// The escape sequences that reset a terminal after an agent that did not do it itself.
pub fn calm(is_alternate: bool) -> Vec<u8> {
    let leave = if is_alternate { LEAVE_ALTERNATE } else { b"" };
    [CALM, leave, PLAIN].concat()
}
