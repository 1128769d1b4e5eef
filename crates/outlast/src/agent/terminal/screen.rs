//! The model of the agent's screen, updated from its output, so that it can be painted for viewers, read by programs,
//! and waited for.

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

use outlast_core::{
    composer::Seen,
    seen_lines::ShownLines,
    stance::View,
    vt::{self, ESCAPE, Token, Unfinished},
};
use outlast_os::Size;

use super::guard::{Guard, Watched};

#[cfg(unix)]
mod saved;

#[cfg(unix)]
pub(crate) use self::saved::SavedScreen;

/// Lines of history above the screen,
const HISTORY_MAX: usize = 1000;
/// and their cells: each takes 24 bytes. Older lines are dropped.
const HISTORY_CELLS_MAX: usize = 120_000;
/// Letters of a title; the rest is cut.
const TITLE_MAX: usize = 256;
/// A longer control string, such as a title without an end, is cut off.
const STRING_MAX: usize = 1 << 20;
/// The smallest and the largest screen; other sizes are clamped.
const SIZE_MIN: u16 = 2;
const SIZE_MAX: u16 = 1000;

/// Marks cells that an earlier agent wrote, until they are overwritten. The model does not use this bit.
pub(super) const OLD: Flags = Flags::from_bits_retain(1 << 15);

/// The colours that are reported when no terminal answers: light text on a dark background.
const FOREGROUND: Rgb = Rgb { r: 0xd0, g: 0xd0, b: 0xd0 };
const BACKGROUND: Rgb = Rgb { r: 0x10, g: 0x10, b: 0x10 };
const FOREGROUND_INDEX: usize = 256;
const BACKGROUND_INDEX: usize = 257;
const CURSOR_INDEX: usize = 258;

/// The screen of a terminal without a window.
pub(crate) struct Screen {
    pub(super) term: Term<ModelEvents>,
    parser: Processor<NoDelay>,
    events: ModelEvents,
    pub(super) watched: Watched,
    size: Size,
    title: Option<String>,
    asks: NameQuery,
    pub(super) unfinished: Unfinished,
    /// Bytes in a row that changed nothing.
    without_effect: usize,
}

impl std::fmt::Debug for Screen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Screen").field("size", &self.size).field("title", &self.title).finish_non_exhaustive()
    }
}

/// The screen as programs get it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Look {
    pub lines: Vec<String>,
    /// Row and column, from 0.
    pub cursor: (usize, usize),
    pub is_cursor_visible: bool,
}

/// The modes that the agent has turned on, by the names that `screen` gives them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Modes {
    pub alternate: bool,
    pub bracketed_paste: bool,
    pub mouse: bool,
    pub focus: bool,
    pub application_cursor: bool,
    /// Flags of the kitty keyboard protocol.
    pub keyboard: u8,
}

impl Screen {
    pub(crate) fn new(size: Size) -> Screen {
        let events = ModelEvents::default();
        let config = Config { scrolling_history: history(size), kitty_keyboard: true, ..Config::default() };
        Screen {
            term: Term::new(config, &Room::of(size), events.clone()),
            parser: Processor::new(),
            events,
            watched: Watched::default(),
            size,
            title: None,
            asks: NameQuery::default(),
            unfinished: Unfinished::default(),
            without_effect: 0,
        }
    }

    pub(crate) fn size(&self) -> Size {
        self.size
    }

    /// The part of the output that matters for the final screen. Text that scrolls out of the history does not,
    /// except for the style that it leaves: that comes first.
    pub(crate) fn lasting<'a>(&self, bytes: &'a [u8]) -> (Vec<u8>, &'a [u8]) {
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

    /// `answers`: no terminal answers the agent's queries, so the model does. Returns what is to be typed to the
    /// agent.
    pub(crate) fn feed(&mut self, bytes: &[u8], answers: bool) -> Vec<u8> {
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
        let mut guard = Guard { term: &mut self.term, events: &self.events, watched: &mut self.watched };
        self.parser.advance(&mut guard, bytes);
        self.without_effect = if self.watched.has_effect { 0 } else { self.without_effect + bytes.len() };
        if self.without_effect > STRING_MAX {
            let mut guard = Guard { term: &mut self.term, events: &self.events, watched: &mut self.watched };
            self.parser.advance(&mut guard, b"\x18");
            self.without_effect = 0;
        }
        if self.events.0.borrow().is_empty() {
            return;
        }
        for event in self.events.0.take() {
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
            // The clipboard is not ours to read.
            _ => None,
        }
    }

    pub(crate) fn resize(&mut self, size: Size) {
        self.size = size;
        let config = Config { scrolling_history: history(size), kitty_keyboard: true, ..Config::default() };
        self.term.set_options(config);
        self.term.resize(Room::of(size));
        self.watched.region = None;
    }

    /// A new agent starts: what is on the screen is not its output.
    pub(crate) fn begin_anew(&mut self) {
        self.title = None;
        let grid = self.term.grid_mut();
        // Also in the history: a larger screen brings it back.
        for row in -(grid.history_size() as i32)..grid.screen_lines() as i32 {
            for column in 0..grid.columns() {
                grid[Line(row)][Column(column)].flags.insert(OLD);
            }
        }
    }

    /// The window, for the detection of what the agent is doing.
    pub(crate) fn view(&self) -> View {
        let title = self.title.clone();
        View { lines: self.own_lines(), title, is_cursor_visible: self.is_cursor_visible() }
    }

    /// The lines of the screen, without what an earlier agent wrote.
    fn own_lines(&self) -> Vec<String> {
        let rows = 0..self.term.grid().screen_lines() as i32;
        rows.map(|row| self.line(row, |cell| !cell.flags.contains(OLD))).collect()
    }

    pub(crate) fn look(&self) -> Look {
        let grid = self.term.grid();
        let rows = 0..grid.screen_lines() as i32;
        let cursor = grid.cursor.point;
        Look {
            lines: rows.map(|row| self.line(row, |_| true)).collect(),
            cursor: (cursor.line.0.max(0) as usize, cursor.column.0),
            is_cursor_visible: self.is_cursor_visible(),
        }
    }

    pub(crate) fn is_cursor_visible(&self) -> bool {
        self.term.mode().contains(TermMode::SHOW_CURSOR)
    }

    /// The lines of the screen, without the empty ones at its end.
    pub(crate) fn text(&self) -> String {
        let look = self.look();
        let count = look.lines.iter().rposition(|line| !line.is_empty()).map_or(0, |last| last + 1);
        look.lines[..count].join("\n")
    }

    /// The history above the screen, the oldest line first, at most so many lines.
    pub(crate) fn history(&self, max: usize) -> Vec<String> {
        let count = self.term.grid().history_size().min(max) as i32;
        (-count..0).map(|row| self.line(row, |_| true)).collect()
    }

    /// The main screen and its history as one hash per line. On the alternate screen there is neither.
    pub(crate) fn line_hashes(&self) -> ShownLines {
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

    pub(crate) fn title(&self) -> Option<&str> {
        self.title.as_deref()
    }

    pub(crate) fn modes(&self) -> Modes {
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

    /// The screen for the detection of the composer: without faint text, which was not typed.
    pub(crate) fn seen(&self) -> Seen {
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
        let last_line = (0..grid.screen_lines() as i32).rev().map(|row| self.line(row, |_| true));
        Seen {
            lines: (0..grid.screen_lines() as i32).map(row).collect(),
            last_line: last_line.into_iter().find(|line| !line.is_empty()).unwrap_or_default(),
            cursor,
            is_cursor_visible,
            takes_pastes: mode.contains(TermMode::BRACKETED_PASTE),
            takes_sequences: mode.contains(TermMode::REPORT_ALL_KEYS_AS_ESC),
        }
    }

    /// One line, counted from the top of the screen; lines of the history are below 0.
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

/// Appends the letters of one cell; the second half of a wide letter has none.
pub(super) fn push_letters(text: &mut String, cell: &Cell) {
    if cell.flags.intersects(Flags::WIDE_CHAR_SPACER | Flags::LEADING_WIDE_CHAR_SPACER) {
        return;
    }
    // The model keeps a tab character for copying; on the screen it is blank.
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

/// The style sequences (SGR) of a text, from the last reset on. None if the text has any other sequence, or the first half
/// of one.
fn styles(text: &[u8]) -> Option<Vec<u8>> {
    let is_plain = |byte: &u8| matches!(byte, 0x20..=0x7e | b'\r' | b'\n' | b'\t' | 0x80..=0xc1 | 0xc3..=0xff);
    let mut styles = Vec::new();
    let mut rest = text;
    loop {
        let start = memchr::memchr(ESCAPE, rest).unwrap_or(rest.len());
        if !rest[..start].iter().all(is_plain) {
            return None;
        }
        if start == rest.len() {
            return Some(styles);
        }
        let (Token::Control { parameters, end: b'm' }, length) = vt::output(&rest[start..])? else { return None };
        if !parameters.iter().all(|byte| matches!(byte, b'0'..=b'9' | b';' | b':')) {
            return None;
        }
        if matches!(parameters, b"" | b"0") {
            styles.clear();
        }
        styles.extend_from_slice(&rest[start..start + length]);
        rest = &rest[start + length..];
    }
}

fn history(size: Size) -> usize {
    HISTORY_MAX.min(HISTORY_CELLS_MAX / usize::from(size.columns.max(1)))
}

/// Receives events of the model, such as replies and titles.
#[derive(Clone, Default)]
pub(super) struct ModelEvents(Rc<RefCell<Vec<Event>>>);

impl EventListener for ModelEvents {
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

/// Synchronized updates are not delayed: the model is never seen while it changes.
#[derive(Default)]
struct NoDelay;

impl Timeout for NoDelay {
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

/// Finds the query for the terminal's name, `CSI > 0 q`, which the model does not know.
#[derive(Debug, Default)]
struct NameQuery {
    /// How many of its bytes have been seen.
    seen: u8,
}

impl NameQuery {
    /// The end of the next query.
    fn find(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        while at < bytes.len() {
            if self.seen == 0 {
                at += memchr::memchr(ESCAPE, &bytes[at..])?;
            }
            self.seen = match (self.seen, bytes[at]) {
                (_, ESCAPE) => 1,
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
    fn the_screen_shows_the_output() {
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
    fn faint_text_was_not_typed() {
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
    fn queries_are_answered_in_order_and_only_without_a_terminal() {
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
        // In reads of any size.
        let mut screen = screen(20, 5);
        let said: Vec<u8> = b"\x1b[>0q".iter().flat_map(|byte| screen.feed(&[*byte], true)).collect();
        assert_eq!(String::from_utf8(said).unwrap(), named);
        assert_eq!(screen.feed(b"\x1b[6n\x1b[>q\x1b[c\x1b]11;?\x07", false), b"");
    }

    #[test]
    fn output_of_an_earlier_agent_is_not_the_next_agents() {
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
    fn output_that_scrolls_away_makes_no_difference() {
        let everything = |screen: &Screen| {
            (
                screen.look(),
                screen.history(usize::MAX),
                screen.paint(screen.size(), crate::agent::terminal::paint::Extent::WithHistory { skipped: 0 }),
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
    fn the_screen_is_resized() {
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
    fn no_output_breaks_the_model_or_fills_the_memory() {
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
