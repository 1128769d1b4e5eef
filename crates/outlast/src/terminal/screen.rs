//! What the agent's terminal looks like, kept up to date from its bytes, so that it can be shown to whoever comes, read
//! by programs, and waited for.

use std::{
    cell::RefCell,
    hash::{DefaultHasher, Hash, Hasher},
    rc::Rc,
    time::Duration,
};

use alacritty_terminal::{
    Term,
    event::{Event, EventListener, WindowSize},
    grid::Dimensions,
    index::{Column, Line},
    term::{
        Config, TermMode,
        cell::{Cell, Flags},
    },
    vte::ansi::{Processor, Rgb, Timeout},
};

use outlast_core::{composer::Seen, seen_lines::ShownLines, stance::View};

use super::{
    guard::{Guard, Watched},
    unfinished::Unfinished,
};
use crate::os::Size;

/// Lines that have left the screen are kept up to so many,
const HISTORY_MAX: usize = 1000;
/// and so many letters: each takes 24 bytes.
const HISTORY_CELLS_MAX: usize = 120_000;
/// A title is kept up to so many letters.
const TITLE_MAX: usize = 256;
/// A control string that is longer than this, such as a title without an end, is broken off.
const STRING_MAX: usize = 1 << 20;
/// The smallest and the largest terminal that is kept; what is beyond is cut.
const SIZE_MIN: u16 = 2;
const SIZE_MAX: u16 = 1000;

/// Carried by what an agent that is gone has left behind, until it is written over. The model has no use for this bit.
pub(super) const OLD: Flags = Flags::from_bits_retain(1 << 15);

/// What we answer when nobody's terminal can: light letters on a dark ground.
const FOREGROUND: Rgb = Rgb { r: 0xd0, g: 0xd0, b: 0xd0 };
const BACKGROUND: Rgb = Rgb { r: 0x10, g: 0x10, b: 0x10 };
const FOREGROUND_INDEX: usize = 256;
const BACKGROUND_INDEX: usize = 257;
const CURSOR_INDEX: usize = 258;

/// A terminal without a window.
pub struct Screen {
    pub(super) term: Term<Ears>,
    parser: Processor<AtOnce>,
    ears: Ears,
    pub(super) watched: Watched,
    size: Size,
    title: Option<String>,
    asks: Asks,
    pub(super) unfinished: Unfinished,
    /// So many bytes in a row changed nothing.
    without_effect: usize,
}

impl std::fmt::Debug for Screen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Screen").field("size", &self.size).field("title", &self.title).finish_non_exhaustive()
    }
}

/// The screen as programs are told of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look {
    pub lines: Vec<String>,
    /// Counted from 0: row and column.
    pub cursor: (usize, usize),
    pub is_cursor_visible: bool,
}

/// What the agent has turned on, by the names that `screen` gives it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Modes {
    pub alternate: bool,
    pub bracketed_paste: bool,
    pub mouse: bool,
    pub focus: bool,
    pub application_cursor: bool,
    /// Kitty's keys, as their flags.
    pub keyboard: u8,
}

impl Screen {
    pub fn new(size: Size) -> Screen {
        let ears = Ears::default();
        let config = Config { scrolling_history: history(size), kitty_keyboard: true, ..Config::default() };
        Screen {
            term: Term::new(config, &Room::of(size), ears.clone()),
            parser: Processor::new(),
            ears,
            watched: Watched::default(),
            size,
            title: None,
            asks: Asks::default(),
            unfinished: Unfinished::default(),
            without_effect: 0,
        }
    }

    pub fn size(&self) -> Size {
        self.size
    }

    /// What of it makes a difference to what is there after all of it. Text that leaves the screen, and the lines that are
    /// kept above it, before the end makes none, but for the style it is written in: that comes first.
    pub fn lasting<'a>(&self, bytes: &'a [u8]) -> (Vec<u8>, &'a [u8]) {
        if self.watched.region.is_some() || !self.unfinished.bytes().is_empty() {
            return (Vec::new(), bytes);
        }
        // The first of these lines may only move the cursor down; then each moves a line out.
        let lines = history(self.size) + 2 * self.term.grid().screen_lines();
        let end = memchr::memrchr_iter(b'\n', bytes).nth(lines).map_or(0, |end| end + 1);
        let (passing, rest) = bytes.split_at(end);
        match styles(passing).filter(|_| passing.ends_with(b"\r\n")) {
            Some(styles) => (styles, rest),
            None => (Vec::new(), bytes),
        }
    }

    /// `answers`: nobody is there whose terminal answers what the agent asks of it, so it is answered here. What is to be
    /// typed to the agent comes back.
    pub fn feed(&mut self, bytes: &[u8], answers: bool) -> Vec<u8> {
        let mut said = Vec::new();
        let mut rest = bytes;
        while let Some(end) = self.asks.find(rest) {
            let (now, later) = rest.split_at(end);
            self.take_in(now, answers, &mut said);
            if answers {
                said.extend_from_slice(concat!("\x1bP>|outlast ", env!("CARGO_PKG_VERSION"), "\x1b\\").as_bytes());
            }
            rest = later;
        }
        self.take_in(rest, answers, &mut said);
        self.unfinished.pass(bytes);
        said
    }

    fn take_in(&mut self, bytes: &[u8], answers: bool, said: &mut Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        self.watched.has_effect = false;
        let mut guard = Guard { term: &mut self.term, ears: &self.ears, watched: &mut self.watched };
        self.parser.advance(&mut guard, bytes);
        self.without_effect = if self.watched.has_effect { 0 } else { self.without_effect + bytes.len() };
        if self.without_effect > STRING_MAX {
            let mut guard = Guard { term: &mut self.term, ears: &self.ears, watched: &mut self.watched };
            self.parser.advance(&mut guard, b"\x18");
            self.without_effect = 0;
        }
        if self.ears.0.borrow().is_empty() {
            return;
        }
        for event in self.ears.0.take() {
            match event {
                Event::Title(title) => {
                    self.title = Some(title.chars().filter(|letter| !letter.is_control()).take(TITLE_MAX).collect());
                }
                Event::ResetTitle => self.title = None,
                event if answers => said.extend(self.answer(event).unwrap_or_default().into_bytes()),
                _ => {}
            }
        }
    }

    fn answer(&self, event: Event) -> Option<String> {
        match event {
            Event::PtyWrite(text) => Some(text),
            Event::ColorRequest(FOREGROUND_INDEX | CURSOR_INDEX, words) => Some(words(FOREGROUND)),
            Event::ColorRequest(BACKGROUND_INDEX, words) => Some(words(BACKGROUND)),
            Event::TextAreaSizeRequest(words) if self.size.width > 0 && self.size.height > 0 => {
                let Size { columns, rows, width, height } = self.size;
                let (cell_width, cell_height) = (width / columns.max(1), height / rows.max(1));
                Some(words(WindowSize { num_lines: rows, num_cols: columns, cell_width, cell_height }))
            }
            // The clipboard is nobody's business.
            _ => None,
        }
    }

    pub fn resize(&mut self, size: Size) {
        self.size = size;
        let config = Config { scrolling_history: history(size), kitty_keyboard: true, ..Config::default() };
        self.term.set_options(config);
        self.term.resize(Room::of(size));
        self.watched.region = None;
    }

    /// Another agent begins: what is there is none of its doing.
    pub fn begin_anew(&mut self) {
        self.title = None;
        let grid = self.term.grid_mut();
        // Also what has left the screen: a larger one brings it back.
        for row in -(grid.history_size() as i32)..grid.screen_lines() as i32 {
            for column in 0..grid.columns() {
                grid[Line(row)][Column(column)].flags.insert(OLD);
            }
        }
    }

    /// The window by which one sees what the agent is doing.
    pub fn view(&self) -> View {
        let title = self.title.clone();
        View { lines: self.own_lines(), title, is_cursor_visible: self.is_cursor_visible() }
    }

    /// The screen's lines as far as the agent that is there has written them.
    fn own_lines(&self) -> Vec<String> {
        let rows = 0..self.term.grid().screen_lines() as i32;
        rows.map(|row| self.line(row, |cell| !cell.flags.contains(OLD))).collect()
    }

    pub fn look(&self) -> Look {
        let grid = self.term.grid();
        let rows = 0..grid.screen_lines() as i32;
        let cursor = grid.cursor.point;
        Look {
            lines: rows.map(|row| self.line(row, |_| true)).collect(),
            cursor: (cursor.line.0.max(0) as usize, cursor.column.0),
            is_cursor_visible: self.is_cursor_visible(),
        }
    }

    pub fn is_cursor_visible(&self) -> bool {
        self.term.mode().contains(TermMode::SHOW_CURSOR)
    }

    /// The screen's lines, without the empty ones at its end.
    pub fn text(&self) -> String {
        let look = self.look();
        let count = look.lines.iter().rposition(|line| !line.is_empty()).map_or(0, |last| last + 1);
        look.lines[..count].join("\n")
    }

    /// What has left the screen at its top, the oldest first, up to so many lines of it.
    pub fn history(&self, max: usize) -> Vec<String> {
        let count = self.term.grid().history_size().min(max) as i32;
        (-count..0).map(|row| self.line(row, |_| true)).collect()
    }

    /// The usual screen and what has left it, line by line, as numbers that are equal where lines are. On the alternate
    /// screen there is neither to be seen.
    pub fn line_hashes(&self) -> ShownLines {
        if self.term.mode().contains(TermMode::ALT_SCREEN) {
            return ShownLines::default();
        }
        let grid = self.term.grid();
        let (history, rows) = (grid.history_size() as i32, grid.screen_lines() as i32);
        let hash = |row: i32| {
            let mut hasher = DefaultHasher::new();
            self.line(row, |_| true).hash(&mut hasher);
            hasher.finish()
        };
        ShownLines { history: (-history..0).map(hash).collect(), screen: (0..rows).map(hash).collect() }
    }

    pub fn title(&self) -> Option<&str> {
        self.title.as_deref()
    }

    pub fn modes(&self) -> Modes {
        let mode = *self.term.mode();
        Modes {
            alternate: mode.contains(TermMode::ALT_SCREEN),
            bracketed_paste: mode.contains(TermMode::BRACKETED_PASTE),
            mouse: mode.intersects(TermMode::MOUSE_MODE),
            focus: mode.contains(TermMode::FOCUS_IN_OUT),
            application_cursor: mode.contains(TermMode::APP_CURSOR),
            keyboard: keyboard(mode),
        }
    }

    /// The screen as one looks for a place to type: without what is faint, which is where nothing was typed yet.
    pub fn seen(&self) -> Seen {
        let grid = self.term.grid();
        let row = |row: i32| {
            let mut text = String::with_capacity(grid.columns());
            for column in 0..grid.columns() {
                let cell = &grid[Line(row)][Column(column)];
                if cell.flags.contains(Flags::DIM) {
                    text.push(' ');
                } else {
                    push_letters(&mut text, cell);
                }
            }
            text
        };
        let Look { cursor, is_cursor_visible, .. } = self.look();
        let mode = *self.term.mode();
        Seen {
            lines: (0..grid.screen_lines() as i32).map(row).collect(),
            cursor,
            is_cursor_visible,
            takes_pastes: mode.contains(TermMode::BRACKETED_PASTE),
            takes_sequences: mode.contains(TermMode::REPORT_ALL_KEYS_AS_ESC),
        }
    }

    /// One line, counted from the top of the screen; those that have left it are below 0.
    fn line(&self, row: i32, counts: impl Fn(&Cell) -> bool) -> String {
        let grid = self.term.grid();
        let line = &grid[Line(row)];
        let mut text = String::with_capacity(grid.columns());
        for column in 0..grid.columns() {
            match &line[Column(column)] {
                cell if counts(cell) => push_letters(&mut text, cell),
                _ => text.push(' '),
            }
        }
        text.truncate(text.trim_end().len());
        text
    }
}

/// The letters of one cell; the second half of a wide one has none.
pub(super) fn push_letters(text: &mut String, cell: &Cell) {
    if cell.flags.intersects(Flags::WIDE_CHAR_SPACER | Flags::LEADING_WIDE_CHAR_SPACER) {
        return;
    }
    // A tab leaves itself behind for those who copy; on the screen it is blank.
    text.push(if cell.c.is_control() { ' ' } else { cell.c });
    text.extend(cell.zerowidth().into_iter().flatten());
}

pub(super) fn keyboard(mode: TermMode) -> u8 {
    let flags = [
        TermMode::DISAMBIGUATE_ESC_CODES,
        TermMode::REPORT_EVENT_TYPES,
        TermMode::REPORT_ALTERNATE_KEYS,
        TermMode::REPORT_ALL_KEYS_AS_ESC,
        TermMode::REPORT_ASSOCIATED_TEXT,
    ];
    flags.iter().enumerate().map(|(bit, flag)| u8::from(mode.contains(*flag)) << bit).sum()
}

/// The sequences in a text that say how letters look, from the last on that begins anew. Nothing if there is any other, or
/// what may be the first half of one.
fn styles(text: &[u8]) -> Option<Vec<u8>> {
    let is_plain = |byte: &u8| matches!(byte, 0x20..=0x7e | b'\r' | b'\n' | b'\t' | 0x80..=0xc1 | 0xc3..=0xff);
    let mut styles = Vec::new();
    let mut rest = text;
    loop {
        let start = memchr::memchr(0x1b, rest).unwrap_or(rest.len());
        if !rest[..start].iter().all(is_plain) {
            return None;
        }
        if start == rest.len() {
            return Some(styles);
        }
        let inside = rest[start..].strip_prefix(b"\x1b[")?;
        let length = inside.iter().position(|byte| !matches!(byte, b'0'..=b'9' | b';' | b':'))?;
        if inside[length] != b'm' {
            return None;
        }
        if matches!(&inside[..length], b"" | b"0") {
            styles.clear();
        }
        styles.extend_from_slice(&rest[start..start + 2 + length + 1]);
        rest = &inside[length + 1..];
    }
}

fn history(size: Size) -> usize {
    HISTORY_MAX.min(HISTORY_CELLS_MAX / usize::from(size.columns.max(1)))
}

/// What the model has to tell besides what it shows.
#[derive(Clone, Default)]
pub(super) struct Ears(Rc<RefCell<Vec<Event>>>);

impl EventListener for Ears {
    fn send_event(&self, event: Event) {
        let is_of_interest = matches!(
            event,
            Event::Title(_)
                | Event::ResetTitle
                | Event::PtyWrite(_)
                | Event::ColorRequest(..)
                | Event::TextAreaSizeRequest(_)
        );
        if is_of_interest {
            self.0.borrow_mut().push(event);
        }
    }
}

/// Updates that are to appear at once are not held back: nobody sees the model flicker.
#[derive(Default)]
struct AtOnce;

impl Timeout for AtOnce {
    fn set_timeout(&mut self, _: Duration) {}

    fn clear_timeout(&mut self) {}

    fn pending_timeout(&self) -> bool {
        false
    }
}

struct Room {
    columns: usize,
    rows: usize,
}

impl Room {
    fn of(size: Size) -> Room {
        let within = |number: u16| usize::from(number.clamp(SIZE_MIN, SIZE_MAX));
        Room { columns: within(size.columns), rows: within(size.rows) }
    }
}

impl Dimensions for Room {
    fn total_lines(&self) -> usize {
        self.rows
    }

    fn screen_lines(&self) -> usize {
        self.rows
    }

    fn columns(&self) -> usize {
        self.columns
    }
}

/// Finds where the agent asks for the terminal's name, `CSI > 0 q`, which the model does not know.
#[derive(Debug, Default)]
struct Asks {
    /// So many of its bytes have been seen.
    seen: u8,
}

impl Asks {
    /// The end of the next one.
    fn find(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        while at < bytes.len() {
            if self.seen == 0 {
                at += memchr::memchr(0x1b, &bytes[at..])?;
            }
            self.seen = match (self.seen, bytes[at]) {
                (_, 0x1b) => 1,
                (1, b'[') => 2,
                (2, b'>') => 3,
                (3, b'0') => 4,
                (3 | 4, b'q') => {
                    self.seen = 0;
                    return Some(at + 1);
                }
                _ => 0,
            };
            at += 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn screen(columns: u16, rows: u16) -> Screen {
        Screen::new(Size { columns, rows, width: 0, height: 0 })
    }

    fn answers(bytes: &[u8]) -> String {
        let mut screen = screen(20, 5);
        screen.feed(b"two\r\nlines", true);
        String::from_utf8(screen.feed(bytes, true)).unwrap()
    }

    #[test]
    fn it_shows_what_was_written() {
        let mut screen = screen(10, 3);
        screen.feed("one\r\ntwo\tx\r\n\x1b[1;31m日本\x1b[0m e\u{301}\x1b[?25l\x1b]2;a title\u{7}".as_bytes(), false);
        assert_eq!(screen.look().lines, ["one", "two     x", "日本 e\u{301}"]);
        assert_eq!(screen.look().cursor, (2, 6));
        assert!(!screen.look().is_cursor_visible);
        assert_eq!(screen.title(), Some("a title"));
        screen.feed(b"\r\nfour\r\n\r\n", false);
        assert_eq!(screen.text(), "four");
        assert_eq!(screen.history(2), ["two     x", "日本 e\u{301}"]);
        assert_eq!(screen.history(99).len(), 3);
    }

    #[test]
    fn an_emoji_of_many_characters_has_two_cells() {
        for emoji in ["👨‍👩‍👧", "👍🏽", "👩‍⚕️", "❤️", "🏳️‍🌈", "🤷🏽‍♂️", "日"]
        {
            let mut screen = screen(12, 2);
            screen.feed(format!("a{emoji}b").as_bytes(), false);
            assert_eq!(screen.look().cursor, (0, 4), "{emoji}");
            assert_eq!(screen.look().lines[0], format!("a{emoji}b"));
        }
        // At the edge, and after the cursor was moved.
        let mut edge = screen(2, 2);
        edge.feed("❤️👍🏽x".as_bytes(), false);
        assert_eq!(edge.look().lines, ["👍🏽", "x"].map(str::to_owned), "the first line scrolled away");
        let mut moved = screen(12, 2);
        moved.feed("👍\u{200d}\x1b[6G👍".as_bytes(), false);
        assert_eq!(moved.look().cursor, (0, 7));
    }

    #[test]
    fn what_is_faint_was_not_typed() {
        let mut screen = screen(20, 2);
        screen.feed("› \x1b[2mAsk anything\x1b[22m\x1b[1;3H\x1b[?2004h\x1b[>8u".as_bytes(), false);
        let seen = screen.seen();
        assert_eq!((seen.lines[0].trim_end(), seen.cursor), ("›", (0, 2)));
        assert!(seen.is_cursor_visible && seen.takes_pastes && seen.takes_sequences);
    }

    #[test]
    fn modes_are_known() {
        let mut screen = screen(10, 3);
        assert_eq!(screen.modes(), Modes::default());
        screen.feed(b"\x1b[?1049h\x1b[?2004h\x1b[?1002h\x1b[?1004h\x1b[?1h\x1b[>5u", false);
        let all = Modes {
            alternate: true,
            bracketed_paste: true,
            mouse: true,
            focus: true,
            application_cursor: true,
            keyboard: 5,
        };
        assert_eq!(screen.modes(), all);
        screen.feed(b"\x1b[<u\x1b[?1049l\x1b[?2004l\x1b[?1002l\x1b[?1004l\x1b[?1l", false);
        assert_eq!(screen.modes(), Modes::default());
    }

    #[test]
    fn what_the_agent_asks_is_answered_in_order_and_only_if_nobody_else_does() {
        #[rustfmt::skip]
        let table: [(&[u8], &str); 10] = [
            (b"\x1b[6n",            "\x1b[2;6R"),
            (b"\x1b[5n",            "\x1b[0n"),
            (b"\x1b[c",             "\x1b[?62;22c"),
            (b"\x1b[>c",            "\x1b[>1;10;0c"),
            (b"\x1b[?u",            "\x1b[?0u"),
            (b"\x1b]11;?\x07",      "\x1b]11;rgb:1010/1010/1010\x07"),
            (b"\x1b]10;?\x1b\\",    "\x1b]10;rgb:d0d0/d0d0/d0d0\x1b\\"),
            (b"\x1b[?2004$p",       "\x1b[?2004;2$y"),
            (b"\x1b[18t",           "\x1b[8;5;20t"),
            (b"no question",        ""),
        ];
        for (asked, expected) in table {
            assert_eq!(answers(asked), expected, "{asked:?}");
        }
        let named = answers(b"\x1b[>0q");
        assert!(named.starts_with("\x1bP>|outlast ") && named.ends_with("\x1b\\"), "{named:?}");
        let all = answers(b"\x1b[6n\x1b[>q\x1b[?u\x1b[c");
        assert_eq!(all, format!("\x1b[2;6R{named}\x1b[?0u\x1b[?62;22c"));
        // However it is cut.
        let mut screen = screen(20, 5);
        let said: Vec<u8> = b"\x1b[>0q".iter().flat_map(|byte| screen.feed(&[*byte], true)).collect();
        assert_eq!(String::from_utf8(said).unwrap(), named);
        assert_eq!(screen.feed(b"\x1b[6n\x1b[>q\x1b[c\x1b]11;?\x07", false), b"");
    }

    #[test]
    fn what_an_agent_before_has_left_is_not_the_next_one_s() {
        let mut screen = screen(20, 4);
        screen.feed(b"esc to interrupt\r\nold", false);
        screen.begin_anew();
        assert_eq!(screen.own_lines(), ["", "", "", ""]);
        screen.feed(b" new\r\nmore\r\n\r\nlast", false);
        assert_eq!(screen.own_lines(), ["    new", "more", "", "last"]);
        assert_eq!(screen.text(), "old new\nmore\n\nlast");
        screen.feed(b"\x1b[2J\x1b[Hall its own", false);
        assert_eq!(screen.own_lines()[0], "all its own");
        screen.begin_anew();
        screen.resize(Size { columns: 30, rows: 6, width: 0, height: 0 });
        assert_eq!(screen.own_lines().concat(), "");
    }

    #[test]
    fn what_passes_makes_no_difference() {
        let everything = |screen: &Screen| {
            (
                screen.look(),
                screen.history(usize::MAX),
                screen.paint(screen.size(), crate::terminal::Extent::WithHistory { skipped: 0 }),
            )
        };
        let text = |count: usize| -> String {
            let line = |n: usize| match n % 8 {
                0 => format!("\x1b[0m\x1b[1;38:5:{}mstyle {n}\x1b[4m\r\n", n % 256),
                _ => format!("{n} {}日本\tx\r\n", "wide ".repeat(n % 30)),
            };
            (0..count).map(line).collect()
        };
        let befores = ["", "first\r\n\r\n", "\x1b[31mred\x1b[3;5H", "\x1b[2;3r", "\x1b[", "\x1b[?1049h"];
        let mut passed = 0;
        for before in befores {
            for count in [10, 1000, 1100, 5000] {
                let text = text(count) + "the last";
                let (mut whole, mut part) = (screen(80, 24), screen(80, 24));
                whole.feed(before.as_bytes(), false);
                part.feed(before.as_bytes(), false);
                let (styles, rest) = part.lasting(text.as_bytes());
                passed += usize::from(rest.len() < text.len());
                whole.feed(text.as_bytes(), false);
                part.feed(&styles, false);
                part.feed(rest, false);
                assert_eq!(everything(&part), everything(&whole), "{before:?} and {count} lines");
            }
        }
        assert_eq!(passed, 8, "where nothing but text is written, and enough of it");
        for control in ["\x1b[31K", "\x1b[>4m", "\x1b", "\u{9b}31m", "\x0e", "\x07"] {
            let text = format!("{control}\r\n{}", text(5000));
            assert_eq!(screen(80, 24).lasting(text.as_bytes()), (Vec::new(), text.as_bytes()), "{control:?}");
        }
    }

    #[test]
    fn it_follows_the_size() {
        let mut screen = screen(10, 3);
        screen.feed(b"0123456789abc", false);
        screen.resize(Size { columns: 20, rows: 4, width: 0, height: 0 });
        assert_eq!(screen.text(), "0123456789abc");
        for columns in [0, 1, u16::MAX] {
            screen.resize(Size { columns, rows: columns, width: 0, height: 0 });
            screen.feed("wide 日\r\n".as_bytes(), false);
        }
    }

    #[test]
    fn nothing_that_is_written_can_break_it_or_fill_the_memory() {
        let mut screen = screen(10, 3);
        for _ in 0..10_000 {
            screen.feed(b"\x1b[>1u\x1b[22t\x1b[?1049h\x1b[>1u\x1b[?1049l", false);
        }
        screen.feed(b"\x1b]2;", false);
        for _ in 0..4 {
            screen.feed(&[b'x'; 512 << 10], false);
        }
        screen.feed(b"\x1bcback", false);
        assert_eq!(screen.text(), "back");
        let mut seed = 7u32;
        for _ in 0..2_000 {
            let bytes: Vec<u8> = std::iter::repeat_with(|| {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let byte = (seed >> 24) as u8;
                if byte < 64 { b"\x1b[]?;0123456789hlmHJKrSTLMPX@>u\x07\n"[usize::from(byte) % 33] } else { byte }
            })
            .take(512)
            .collect();
            screen.feed(&bytes, true);
            screen.look();
        }
    }
}
