//! What a terminal is told after an agent that cannot do it any more.

/// Turns off what an agent turns on and, when it is killed, leaves on. What was not on stays as it is. In this order:
/// paste marks; mouse reports of every kind and encoding; focus; synchronized output; reports of the colour scheme and of
/// the size; kitty's keyboard flags, those on the stack and those that are set; xterm's modified keys; cursor and keypad
/// keys, the backspace key; a hidden cursor and one of another shape; insertion, automatic line feeds, lines that do not
/// wrap; inverted colours, margins at the sides; links.
const CALM: &[u8] = b"\x1b[?2004l\
    \x1b[?9l\x1b[?1000l\x1b[?1001l\x1b[?1002l\x1b[?1003l\x1b[?1005l\x1b[?1006l\x1b[?1015l\x1b[?1016l\
    \x1b[?1004l\x1b[?2026l\x1b[?2031l\x1b[?2048l\
    \x1b[<9u\x1b[=0;1u\x1b[>4m\
    \x1b[?1l\x1b>\x1b[?67l\
    \x1b[?25h\x1b[0 q\x1b[4l\x1b[20l\x1b[?7h\x1b[?5l\x1b[?69l\x1b]8;;\x1b\\";
/// The beginning of it. A shell that has its prompt back may have turned these on again.
#[cfg(unix)]
pub(super) const PASTE_OFF: &[u8] = b"\x1b[?2004l";
/// Leaves the alternate screen. Only for one who is there: elsewhere it moves the cursor.
const LEAVE_ALTERNATE: &[u8] = b"\x1b[?1049l";
/// All lines scroll, letters are letters, and without colour. On the screen that is kept: the first moves the cursor, so
/// that its place is put aside.
const PLAIN: &[u8] = b"\x1b7\x1b[r\x1b8\x1b(B\x1b)B\x0f\x1b[0m";

/// What calms a terminal after an agent that cannot do it any more.
pub fn calm(is_alternate: bool) -> Vec<u8> {
    let leave = if is_alternate { LEAVE_ALTERNATE } else { b"" };
    [CALM, leave, PLAIN].concat()
}
