//! The bytes that make another terminal show the agent's screen, with its modes.

use std::fmt::Write as _;

use alacritty_terminal::{
    grid::{Cursor, Dimensions},
    index::{Column, Line},
    term::{
        TermMode,
        cell::{Cell, Flags, Hyperlink},
    },
    vte::ansi::{CharsetIndex, Color, CursorShape, NamedColor, StandardCharset},
};
use outlast_os::Size;

use super::screen::{OLD, Screen, keyboard, push_letters};

/// Ends any unfinished sequence.
const BEGIN: &str = "\x18\x1b\\\x1b[?2026h\x1b[?25l\x1b[0m";
/// Resets the terminal's modes. Moves the cursor: not before the right screen is selected, because the other one
/// keeps its cursor position.
const USUAL: &str = "\x1b[r\x1b[?6l\x1b[4l\x1b[20l\x1b[?7h\x1b(B\x1b)B\x0f\x1b]8;;\x1b\\";
const END: &str = "\x1b[?2026l";

/// How much is painted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// With the history, so that it can be scrolled back to; what the terminal shows now becomes part of its
    /// scrollback. The oldest lines, as many as `skipped`, are already there.
    WithHistory {
        skipped: usize,
    },
    Screen,
}

impl Screen {
    /// For a terminal of this size, which may differ from the agent's: then as much as fits, around the cursor.
    pub(crate) fn paint(&self, size: Size, extent: Extent) -> Vec<u8> {
        let mut paint = Paint { out: String::from(BEGIN), style: Style::default() };
        let mode = *self.term.mode();
        let is_alternate = mode.contains(TermMode::ALT_SCREEN);
        paint.out.push_str(if is_alternate { "\x1b[?1049h" } else { "\x1b[?1049l" });
        paint.out.push_str(USUAL);
        if let (false, Extent::WithHistory { skipped }) = (is_alternate, extent) {
            self.paint_history(size, skipped, &mut paint);
        }
        let grid = self.term.grid();
        let (rows, columns) = (grid.screen_lines(), grid.columns());
        let (seen_rows, seen_columns) = (rows.min(size.rows.into()), columns.min(size.columns.into()));
        let cursor = &grid.cursor;
        let cursor_row = cursor.point.line.0.max(0) as usize;
        // The last lines, and always the cursor.
        let last = (0..rows).rev().find(|row| !grid[Line(*row as i32)].is_clear()).unwrap_or(0);
        let top = (last.max(cursor_row) + 1).saturating_sub(seen_rows).min(cursor_row);
        for row in 0..usize::from(size.rows) {
            // Erasing uses the current background, so it is reset first.
            paint.dress(&Style::default());
            _ = write!(paint.out, "\x1b[{};1H\x1b[2K", row + 1);
            if row < seen_rows {
                paint.line(&grid[Line((top + row) as i32)], seen_columns);
            }
        }
        let is_whole = seen_rows == rows && seen_columns == columns;
        if is_whole {
            self.paint_saved(&grid.saved_cursor, &mut paint);
        }
        self.paint_modes(mode, is_whole, &mut paint);
        let column = cursor.point.column.0.min(seen_columns.saturating_sub(1));
        _ = write!(paint.out, "\x1b[{};{}H", (cursor_row - top).min(seen_rows.saturating_sub(1)) + 1, column + 1);
        if cursor.input_needs_wrap && is_whole {
            // A pending wrap exists only after a letter was written here.
            paint.line_at(&grid[cursor.point.line][cursor.point.column]);
        }
        paint.dress(&Style::of(&cursor.template));
        if mode.contains(TermMode::SHOW_CURSOR) {
            paint.out.push_str("\x1b[?25h");
        }
        paint.out.push_str(END);
        // The end of an unfinished sequence is sent to all viewers.
        [paint.out.as_bytes(), self.unfinished.bytes()].concat()
    }

    fn paint_history(&self, size: Size, skipped: usize, paint: &mut Paint) {
        let grid = self.term.grid();
        // What the terminal shows now scrolls out at the top.
        _ = write!(paint.out, "\x1b[{};1H", size.rows);
        paint.out.extend(std::iter::repeat_n('\n', size.rows.into()));
        paint.out.push_str("\x1b[H");
        let count = grid.history_size().saturating_sub(skipped);
        for row in -(count as i32)..0 {
            paint.line(&grid[Line(row)], grid.columns().min(size.columns.into()));
            paint.dress(&Style::default());
            paint.out.push_str("\r\n");
        }
        // As many more lines as the last of them needs to scroll out.
        if count > 0 {
            _ = write!(paint.out, "\x1b[{};1H", size.rows);
            paint.out.extend(std::iter::repeat_n('\n', count.min(size.rows.into())));
        }
    }

    fn paint_saved(&self, saved: &Cursor<Cell>, paint: &mut Paint) {
        _ = write!(paint.out, "\x1b[{};{}H", saved.point.line.0 + 1, saved.point.column.0 + 1);
        paint.dress(&Style::of(&saved.template));
        paint.out.push_str("\x1b7");
        paint.dress(&Style::default());
    }

    /// The sequences that set all modes, for a screen of this size. Some move the cursor.
    #[cfg(unix)]
    pub(super) fn mode_sequences(&self) -> String {
        let mut paint = Paint { out: String::new(), style: Style::default() };
        let mode = *self.term.mode();
        self.paint_modes(mode, true, &mut paint);
        for (flag, number) in [(TermMode::SHOW_CURSOR, 25), (TermMode::URGENCY_HINTS, 1042), (TermMode::ORIGIN, 6)] {
            _ = write!(paint.out, "\x1b[?{number}{}", if mode.contains(flag) { 'h' } else { 'l' });
        }
        paint.out
    }

    /// Modes that are not on are turned off: the terminal may have been used by another program.
    fn paint_modes(&self, mode: TermMode, is_whole: bool, paint: &mut Paint) {
        let private = [
            (TermMode::APP_CURSOR, 1),
            (TermMode::BRACKETED_PASTE, 2004),
            (TermMode::MOUSE_REPORT_CLICK, 1000),
            (TermMode::MOUSE_DRAG, 1002),
            (TermMode::MOUSE_MOTION, 1003),
            (TermMode::UTF8_MOUSE, 1005),
            (TermMode::SGR_MOUSE, 1006),
            (TermMode::FOCUS_IN_OUT, 1004),
            (TermMode::ALTERNATE_SCROLL, 1007),
        ];
        // Turning one kind of mouse report off turns all off in some terminals.
        for is_on in [false, true] {
            for (flag, number) in private {
                if mode.contains(flag) == is_on {
                    _ = write!(paint.out, "\x1b[?{number}{}", if is_on { 'h' } else { 'l' });
                }
            }
        }
        paint.out.push_str(if mode.contains(TermMode::APP_KEYPAD) { "\x1b=" } else { "\x1b>" });
        _ = write!(paint.out, "\x1b[={};1u", keyboard(mode));
        let style = self.term.cursor_style();
        let shape = match style.shape {
            CursorShape::Underline => 4,
            CursorShape::Beam => 6,
            _ => 2,
        };
        let is_usual = style == Default::default();
        _ = write!(paint.out, "\x1b[{} q", if is_usual { 0 } else { shape - u8::from(style.blinking) });
        if let Some(title) = self.title() {
            _ = write!(paint.out, "\x1b]2;{title}\x1b\\");
        }
        if !is_whole {
            return;
        }
        if let Some((top, bottom)) = self.watched.region {
            _ = write!(paint.out, "\x1b[{top};{bottom}r");
        }
        if !mode.contains(TermMode::LINE_WRAP) {
            paint.out.push_str("\x1b[?7l");
        }
        if mode.contains(TermMode::INSERT) {
            paint.out.push_str("\x1b[4h");
        }
        if mode.contains(TermMode::LINE_FEED_NEW_LINE) {
            paint.out.push_str("\x1b[20h");
        }
        let charsets = &self.term.grid().cursor.charsets;
        for (index, name) in [(CharsetIndex::G0, '('), (CharsetIndex::G1, ')')] {
            if charsets[index] == StandardCharset::SpecialCharacterAndLineDrawing {
                _ = write!(paint.out, "\x1b{name}0");
            }
        }
        if self.watched.charset == CharsetIndex::G1 {
            paint.out.push('\x0e');
        }
    }
}

struct Paint {
    out: String,
    /// The terminal's current style.
    style: Style,
}

impl Paint {
    /// The cells of a line up to the last that shows something.
    fn line(&mut self, line: &alacritty_terminal::grid::Row<Cell>, columns: usize) {
        let cells = (0..columns).map(|column| &line[Column(column)]);
        let shows = |cell: &Cell| cell.c != ' ' && !cell.c.is_control() || Style::of(cell) != Style::default();
        let count = cells.clone().collect::<Vec<_>>().iter().rposition(|cell| shows(cell)).map_or(0, |last| last + 1);
        for (column, cell) in cells.take(count).enumerate() {
            // Half of a wide letter does not fit.
            if cell.flags.contains(Flags::WIDE_CHAR) && column + 1 == columns {
                break;
            }
            self.line_at(cell);
        }
    }

    fn line_at(&mut self, cell: &Cell) {
        self.dress(&Style::of(cell));
        if cell.flags.contains(Flags::LEADING_WIDE_CHAR_SPACER) {
            self.out.push(' ');
        }
        push_letters(&mut self.out, cell);
    }

    fn dress(&mut self, style: &Style) {
        if self.style == *style {
            return;
        }
        if self.style.link != style.link {
            match &style.link {
                Some(link) => _ = write!(self.out, "\x1b]8;id={};{}\x1b\\", link.id(), link.uri()),
                None => self.out.push_str("\x1b]8;;\x1b\\"),
            }
        }
        self.out.push_str("\x1b[0");
        let flags = [
            (Flags::BOLD, "1"),
            (Flags::DIM, "2"),
            (Flags::ITALIC, "3"),
            (Flags::UNDERLINE, "4"),
            (Flags::DOUBLE_UNDERLINE, "4:2"),
            (Flags::UNDERCURL, "4:3"),
            (Flags::DOTTED_UNDERLINE, "4:4"),
            (Flags::DASHED_UNDERLINE, "4:5"),
            (Flags::INVERSE, "7"),
            (Flags::HIDDEN, "8"),
            (Flags::STRIKEOUT, "9"),
        ];
        for (flag, number) in flags {
            if style.flags.contains(flag) {
                _ = write!(self.out, ";{number}");
            }
        }
        self.colour(style.foreground, 30, 90, 38);
        self.colour(style.background, 40, 100, 48);
        match style.underline {
            Some(Color::Indexed(index)) => _ = write!(self.out, ";58:5:{index}"),
            Some(Color::Spec(rgb)) => _ = write!(self.out, ";58:2::{}:{}:{}", rgb.r, rgb.g, rgb.b),
            Some(Color::Named(_)) | None => {}
        }
        self.out.push('m');
        self.style = style.clone();
    }

    fn colour(&mut self, colour: Color, plain: usize, bright: usize, other: usize) {
        match colour {
            Color::Named(name) => match name as usize {
                number @ 0..8 => _ = write!(self.out, ";{}", plain + number),
                number @ 8..16 => _ = write!(self.out, ";{}", bright + number - 8),
                _ => {}
            },
            Color::Indexed(index) => _ = write!(self.out, ";{other};5;{index}"),
            Color::Spec(rgb) => _ = write!(self.out, ";{other};2;{};{};{}", rgb.r, rgb.g, rgb.b),
        }
    }
}

/// The style of letters.
#[derive(Clone, Debug, PartialEq)]
struct Style {
    foreground: Color,
    background: Color,
    flags: Flags,
    underline: Option<Color>,
    link: Option<Hyperlink>,
}

impl Default for Style {
    fn default() -> Style {
        Style {
            foreground: Color::Named(NamedColor::Foreground),
            background: Color::Named(NamedColor::Background),
            flags: Flags::empty(),
            underline: None,
            link: None,
        }
    }
}

impl Style {
    fn of(cell: &Cell) -> Style {
        let layout =
            OLD | Flags::WRAPLINE | Flags::WIDE_CHAR | Flags::WIDE_CHAR_SPACER | Flags::LEADING_WIDE_CHAR_SPACER;
        Style {
            foreground: cell.fg,
            background: cell.bg,
            flags: cell.flags.difference(layout),
            underline: cell.underline_color(),
            link: cell.hyperlink(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(columns: u16, rows: u16) -> Size {
        Size { columns, rows, width: 0, height: 0 }
    }

    fn screen(bytes: &[u8]) -> Screen {
        let mut screen = Screen::new(size(20, 5));
        screen.feed(bytes, false);
        screen
    }

    /// What a repaint must restore, cell by cell.
    fn everything(screen: &Screen) -> impl PartialEq + std::fmt::Debug + use<> {
        let grid = screen.term.grid();
        let plain = |cell: &Cell| {
            let mut text = String::new();
            push_letters(&mut text, cell);
            (text, Style::of(cell))
        };
        let cells: Vec<_> = grid.display_iter().map(|cell| plain(&cell)).collect();
        let cursor = &grid.cursor;
        let keys = *screen.term.mode();
        let cursor = (cursor.point, cursor.input_needs_wrap, Style::of(&cursor.template), cursor.charsets);
        (cells, cursor, keys, screen.title().map(str::to_owned), screen.watched.region, screen.term.cursor_style())
    }

    const SCREENS: [&str; 12] = [
        "",
        "plain text\r\nand a second line",
        "\x1b[1;31mred\x1b[0m \x1b[38;5;200;48;2;1;2;3mmany\x1b[4:3;58:5:9mcurly\x1b[0;7mturned\x1b[0;2;3;9m!\x1b[97;100mx",
        "\x1b[44m\x1b[2J\x1b[3;4Hblue\x1b[K",
        "日本語 e\u{301} 😀 ok",
        "01234567890123456789",
        "\x1b[5;1H01234567890123456789",
        "\x1b]2;a title\x07\x1b[?2004h\x1b[?1002h\x1b[?1006h\x1b[?1004h\x1b[?1h\x1b=\x1b[>5u\x1b[5 q\x1b[?25l",
        "below\x1b[?1049h\x1b[2;2Habove\x1b[32m",
        "\x1b[2;4r\x1b[?7l\x1b[4h\x1b[2;3Hx",
        "\x1b(0lqqk\x1b(B\x1b)0\x0eqq",
        "\x1b]8;;https://example.org/\x1b\\link\x1b]8;;\x1b\\ no\x1b[2;2H\x1b7\x1b[4;4H",
    ];

    #[cfg(unix)]
    #[test]
    fn modes_that_an_agent_left_on_are_turned_off() {
        let manner = |screen: &Screen| {
            let cursor = &screen.term.grid().cursor;
            let letters = (Style::of(&cursor.template), cursor.charsets, screen.watched.charset);
            (*screen.term.mode(), screen.watched.region, screen.term.cursor_style(), letters)
        };
        for bytes in SCREENS {
            let mut here = screen(bytes.as_bytes());
            let is_alternate = here.term.mode().contains(TermMode::ALT_SCREEN);
            let place = here.term.grid().cursor.point;
            here.feed(&outlast_os::calm(is_alternate), false);
            assert_eq!(manner(&here), manner(&screen(b"")), "{bytes:?}");
            assert!(is_alternate || here.term.grid().cursor.point == place, "{bytes:?}");
        }
    }

    #[test]
    fn below_the_alternate_screen_the_cursor_keeps_its_place() {
        let agent = screen(b"\x1b[?1049h\x1b[2;4rvim");
        let mut here = screen(b"$ ls\r\nfile\r\n$ outlast attach\r\n");
        here.feed(&agent.paint(size(20, 5), Extent::WithHistory { skipped: 0 }), false);
        here.feed(b"\x1b[?1049l[left]", false);
        assert_eq!(here.text().lines().collect::<Vec<_>>(), ["$ ls", "file", "$ outlast attach", "[left]"]);
    }

    #[test]
    fn a_repaint_restores_everything() {
        for bytes in SCREENS {
            let there = screen(bytes.as_bytes());
            // Whatever the terminal showed before, and wherever its output was cut.
            for before in SCREENS.iter().chain(&["\x1b]2;half a title", "\x1b[3", "\x1b[?1049h\x1b[7mtext"]) {
                let mut here = screen(before.as_bytes());
                here.feed(&there.paint(size(20, 5), Extent::Screen), false);
                if there.title().is_none() {
                    // A title cannot be removed.
                    here = {
                        let mut here = screen(before.split("\x1b]2;").next().unwrap().as_bytes());
                        here.feed(&there.paint(size(20, 5), Extent::Screen), false);
                        here
                    };
                }
                assert_eq!(everything(&here), everything(&there), "{bytes:?} after {before:?}");
            }
        }
    }

    #[test]
    fn both_screens_stay_equal() {
        for bytes in SCREENS {
            let mut there = screen(bytes.as_bytes());
            let mut here = screen(b"");
            here.feed(&there.paint(size(20, 5), Extent::Screen), false);
            for more in ["x", "yz\r\n", "\x1b[31m1\x1b8saved", "\n\n\n\n\nend"] {
                there.feed(more.as_bytes(), false);
                here.feed(more.as_bytes(), false);
                assert_eq!(everything(&here), everything(&there), "{bytes:?} and {more:?}");
            }
        }
    }

    #[test]
    fn a_viewer_that_attaches_in_a_sequence_gets_its_beginning() {
        let text = "one\x1b[1;31mtwo \x1b]2;title\x1b\\日本 \x1b(0q\x1b(B\x1b[?25lend";
        for at in 0..text.len() {
            let mut there = screen(&text.as_bytes()[..at]);
            let mut here = screen(b"");
            here.feed(&there.paint(size(20, 5), Extent::Screen), false);
            there.feed(&text.as_bytes()[at..], false);
            here.feed(&text.as_bytes()[at..], false);
            assert_eq!(everything(&here), everything(&there), "cut at {at}");
        }
    }

    #[test]
    fn the_history_can_be_scrolled_back_to() {
        let lines: Vec<String> = (0..12).map(|n| format!("line {n}")).collect();
        let there = screen(lines.join("\r\n").as_bytes());
        let mut here = screen(b"a shell\r\n$ attach\r\n");
        here.feed(&there.paint(size(20, 5), Extent::WithHistory { skipped: 0 }), false);
        assert_eq!(everything(&here), everything(&there));
        let history = here.history(99);
        let found: Vec<&String> = history.iter().filter(|line| line.starts_with("line")).collect();
        assert_eq!(found, lines[..7].iter().collect::<Vec<_>>(), "{history:?}");
        assert!(history.contains(&"$ attach".to_owned()), "{history:?}");
    }

    #[test]
    fn in_a_smaller_window_the_cursor_is_seen() {
        let there = screen(b"one\r\ntwo\r\nthree\r\nfour is long\r\nfive");
        let mut here = Screen::new(size(6, 2));
        here.feed(&there.paint(size(6, 2), Extent::Screen), false);
        assert_eq!(here.text(), "four i\nfive");
        assert_eq!(here.look().cursor, (1, 4));
        let there = screen(b"one\r\ntwo\r\nthree\x1b[2;2H");
        here.feed(&there.paint(size(6, 2), Extent::Screen), false);
        assert_eq!(here.text(), "two\nthree");
        assert_eq!(here.look().cursor, (0, 1));
        // With few lines, from the top.
        let there = screen(b"one\r\ntwo");
        here.feed(&there.paint(size(6, 2), Extent::Screen), false);
        assert_eq!(here.text(), "one\ntwo");
        // A larger terminal is empty around it.
        let there = screen(b"one\r\ntwo\r\nthree\x1b[2;2H");
        let mut here = Screen::new(size(30, 8));
        here.feed(b"\x1b[8;1Hold", false);
        here.feed(&there.paint(size(30, 8), Extent::Screen), false);
        assert_eq!(here.text(), "one\ntwo\nthree");
    }
}
