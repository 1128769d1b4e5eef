//! The model of a screen as saved state: both screens with their cells, the history, the cursors and the modes. Colours are
//! not part of it that a program redefined: they change no picture.

use std::collections::HashMap;

use alacritty_terminal::{
    Term,
    grid::{Cursor, Dimensions, Grid},
    index::{Column, Line},
    term::{
        TermMode,
        cell::{Cell, Flags, Hyperlink},
    },
    vte::ansi::{
        CharsetIndex, Color, Handler, KeyboardModes, KeyboardModesApplyBehavior, NamedColor, Rgb, StandardCharset,
        TabulationClearMode,
    },
};
use outlast_core::saved::Octets;
use outlast_os::Size;
use serde::{Deserialize, Serialize};

use super::{Guard, ModelEvents, OLD, Screen, keyboard};

/// The bits of a saved style, in this order. The order is part of the format.
const FLAGS: [Flags; 15] = [
    Flags::INVERSE,
    Flags::BOLD,
    Flags::ITALIC,
    Flags::UNDERLINE,
    Flags::WRAPLINE,
    Flags::WIDE_CHAR,
    Flags::WIDE_CHAR_SPACER,
    Flags::DIM,
    Flags::HIDDEN,
    Flags::STRIKEOUT,
    Flags::LEADING_WIDE_CHAR_SPACER,
    Flags::DOUBLE_UNDERLINE,
    Flags::UNDERCURL,
    Flags::DOTTED_UNDERLINE,
    Flags::DASHED_UNDERLINE,
];
const OLD_BIT: u32 = 1 << 31;

/// Colours by name, in the order of their numbers from [`NAMED_FROM`] on.
const NAMED: [NamedColor; 18] = [
    NamedColor::Foreground,
    NamedColor::Background,
    NamedColor::Black,
    NamedColor::Red,
    NamedColor::Green,
    NamedColor::Yellow,
    NamedColor::Blue,
    NamedColor::Magenta,
    NamedColor::Cyan,
    NamedColor::White,
    NamedColor::BrightBlack,
    NamedColor::BrightRed,
    NamedColor::BrightGreen,
    NamedColor::BrightYellow,
    NamedColor::BrightBlue,
    NamedColor::BrightMagenta,
    NamedColor::BrightCyan,
    NamedColor::BrightWhite,
];
const NAMED_FROM: u16 = 256;

const CHARSETS: [CharsetIndex; 4] = [CharsetIndex::G0, CharsetIndex::G1, CharsetIndex::G2, CharsetIndex::G3];

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedScreen {
    size: Size,
    /// Lines and cursors refer to these by their places.
    styles: Vec<SavedStyle>,
    main: SavedGrid,
    /// If it is shown.
    alternate: Option<SavedGrid>,
    /// The sequences that set the modes.
    modes: String,
    /// The flags of the kitty keyboard protocol that are on.
    keyboard: u8,
    /// The stacks of keyboard modes of the main and of the alternate screen.
    keyboards: [Vec<u8>; 2],
    /// The character set in use.
    charset: u8,
    /// If they are not those of every new terminal.
    tabs: Option<Vec<usize>>,
    title: Option<String>,
    /// The title that the model knows; that of an earlier agent is not shown any more.
    model_title: Option<String>,
    titles: Vec<Option<String>>,
    last_letter: Option<char>,
    marks: usize,
    is_joined: bool,
    unfinished: Octets,
    without_effect: usize,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct SavedGrid {
    /// Of the lines, so many are above the screen.
    history: usize,
    lines: Vec<SavedLine>,
    cursor: SavedCursor,
    saved_cursor: SavedCursor,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct SavedLine {
    /// Cells of one style, and a letter for each of them; cells at the end that were never written are left out.
    cells: Vec<(usize, String)>,
    /// Combining marks, with the column of their letter.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    marks: Vec<(usize, String)>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct SavedCursor {
    line: i32,
    column: usize,
    style: usize,
    /// Which of the four character sets draw lines.
    draws_lines: [bool; 4],
    needs_wrap: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct SavedStyle {
    foreground: SavedColour,
    background: SavedColour,
    flags: u32,
    underline: Option<SavedColour>,
    /// Its id and its address.
    link: Option<(String, String)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
enum SavedColour {
    /// Of the palette; from [`NAMED_FROM`] on one with a name.
    Number(u16),
    Exact(u8, u8, u8),
}

impl Screen {
    /// Why it cannot be saved now: the beginning of an open sequence is not known any more.
    pub(crate) fn is_in_long_sequence(&self) -> bool {
        self.unfinished.is_cut()
    }

    /// The model is the same afterwards. It must be changed meanwhile, because it shows only one of its screens.
    pub(crate) fn save(&mut self) -> SavedScreen {
        let modes = self.mode_sequences();
        let keyboard = keyboard(*self.term.mode());
        let mut styles = Styles::default();
        let (main, alternate) = if self.term.mode().contains(TermMode::ALT_SCREEN) {
            let above = self.term.grid().clone();
            let alternate = styles.save(&above);
            self.term.swap_alt();
            let main = styles.save(self.term.grid());
            self.term.swap_alt();
            *self.term.grid_mut() = above;
            self.set_keyboard(keyboard);
            (main, Some(alternate))
        } else {
            (styles.save(self.term.grid()), None)
        };
        let watched = &self.watched;
        SavedScreen {
            size: self.size,
            main,
            alternate,
            modes,
            keyboard,
            keyboards: [0, 1].map(|screen| watched.keyboards[screen].iter().map(KeyboardModes::bits).collect()),
            charset: watched.charset as u8,
            title: self.title.clone(),
            model_title: watched.title.clone(),
            titles: watched.titles.clone(),
            last_letter: watched.last_letter,
            marks: watched.marks,
            is_joined: watched.is_joined,
            unfinished: Octets::of(self.unfinished.bytes()),
            without_effect: self.without_effect,
            tabs: tabs(&mut self.term),
            styles: styles.all,
        }
    }

    pub(crate) fn restore(saved: SavedScreen) -> Screen {
        let mut screen = Screen::new(saved.size);
        // The parser remembers it: a sequence repeats it.
        if let Some(letter) = saved.last_letter {
            screen.feed(letter.encode_utf8(&mut [0; 4]).as_bytes(), false);
        }
        let styles: Vec<Cell> = saved.styles.iter().map(SavedStyle::cell).collect();
        let [main_keyboards, alternate_keyboards] = saved.keyboards;
        if !alternate_keyboards.is_empty() {
            screen.term.swap_alt();
            screen.push_keyboards(&alternate_keyboards);
            screen.term.swap_alt();
        }
        screen.push_keyboards(&main_keyboards);
        restore_tabs(&mut screen.term, saved.tabs.as_deref());
        screen.guarded(|guard| {
            for title in saved.titles {
                guard.set_title(title);
                guard.push_title();
            }
            guard.set_title(saved.model_title);
        });
        saved.main.fill(screen.term.grid_mut(), &styles);
        if saved.alternate.is_some() {
            screen.term.swap_alt();
        }
        // Some of them move the cursor.
        screen.feed(saved.modes.as_bytes(), false);
        screen.set_keyboard(saved.keyboard);
        if let Some(charset) = CHARSETS.get(usize::from(saved.charset)) {
            screen.guarded(|guard| guard.set_active_charset(*charset));
        }
        match &saved.alternate {
            Some(alternate) => alternate.fill(screen.term.grid_mut(), &styles),
            None => saved.main.place_cursors(screen.term.grid_mut(), &styles),
        }
        screen.feed(&saved.unfinished.bytes(), false);
        screen.title = saved.title;
        screen.watched.last_letter = saved.last_letter;
        screen.watched.marks = saved.marks;
        screen.watched.is_joined = saved.is_joined;
        screen.without_effect = saved.without_effect;
        screen
    }

    fn guarded(&mut self, act: impl FnOnce(&mut Guard<'_>)) {
        act(&mut Guard { term: &mut self.term, events: &self.events, watched: &mut self.watched });
    }

    fn push_keyboards(&mut self, modes: &[u8]) {
        self.guarded(|guard| {
            modes.iter().for_each(|mode| guard.push_keyboard_mode(KeyboardModes::from_bits_truncate(*mode)));
        });
    }

    fn set_keyboard(&mut self, flags: u8) {
        let (mode, replace) = (KeyboardModes::from_bits_truncate(flags), KeyboardModesApplyBehavior::Replace);
        Handler::set_keyboard_mode(&mut self.term, mode, replace);
    }
}

/// The styles that lines refer to.
#[derive(Default)]
struct Styles {
    all: Vec<SavedStyle>,
    places: HashMap<SavedStyle, usize>,
}

impl Styles {
    fn place(&mut self, cell: &Cell) -> usize {
        let style = SavedStyle::of(cell);
        if let Some(place) = self.places.get(&style) {
            return *place;
        }
        let place = self.all.len();
        self.all.push(style.clone());
        self.places.insert(style, place);
        place
    }

    fn save(&mut self, grid: &Grid<Cell>) -> SavedGrid {
        let (history, rows) = (grid.history_size(), grid.screen_lines());
        SavedGrid {
            history,
            lines: (-(history as i32)..rows as i32).map(|row| self.line(grid, Line(row))).collect(),
            cursor: self.cursor(&grid.cursor),
            saved_cursor: self.cursor(&grid.saved_cursor),
        }
    }

    fn line(&mut self, grid: &Grid<Cell>, line: Line) -> SavedLine {
        let cells = &grid[line][..];
        let unwritten = Cell::default();
        let used = cells.iter().rposition(|cell| *cell != unwritten).map_or(0, |last| last + 1);
        let mut saved = SavedLine::default();
        let mut last: Option<&Cell> = None;
        for (column, cell) in cells[..used].iter().enumerate() {
            match saved.cells.last_mut().filter(|_| last.is_some_and(|last| is_same_style(last, cell))) {
                Some((_, letters)) => letters.push(cell.c),
                None => saved.cells.push((self.place(cell), cell.c.to_string())),
            }
            if let Some(marks) = cell.zerowidth().filter(|marks| !marks.is_empty()) {
                saved.marks.push((column, marks.iter().collect()));
            }
            last = Some(cell);
        }
        saved
    }

    fn cursor(&mut self, cursor: &Cursor<Cell>) -> SavedCursor {
        SavedCursor {
            line: cursor.point.line.0,
            column: cursor.point.column.0,
            style: self.place(&cursor.template),
            draws_lines: CHARSETS
                .map(|charset| cursor.charsets[charset] == StandardCharset::SpecialCharacterAndLineDrawing),
            needs_wrap: cursor.input_needs_wrap,
        }
    }
}

fn is_same_style(one: &Cell, other: &Cell) -> bool {
    let extra = |cell: &Cell| (cell.underline_color(), cell.hyperlink());
    let is_plain = one.extra.is_none() && other.extra.is_none();
    (one.fg, one.bg, one.flags) == (other.fg, other.bg, other.flags) && (is_plain || extra(one) == extra(other))
}

impl SavedGrid {
    /// Writes the lines into a new grid. Lines and columns that it does not have are left out.
    fn fill(&self, grid: &mut Grid<Cell>, styles: &[Cell]) {
        let (rows, columns) = (grid.screen_lines() as i32, grid.columns());
        grid.reset();
        for _ in 0..self.history {
            grid.scroll_up(&(Line(0)..Line(rows)), 1);
        }
        let above = grid.history_size() as i32;
        for (row, line) in (-(self.history as i32)..).zip(&self.lines) {
            if !(-above..rows).contains(&row) {
                continue;
            }
            let mut column = 0;
            for (style, letters) in &line.cells {
                let style = styles.get(*style).cloned().unwrap_or_default();
                for letter in letters.chars().take(columns.saturating_sub(column)) {
                    grid[Line(row)][Column(column)] = Cell { c: letter, ..style.clone() };
                    column += 1;
                }
            }
            for (column, marks) in line.marks.iter().filter(|(column, _)| *column < columns) {
                marks.chars().for_each(|mark| grid[Line(row)][Column(*column)].push_zerowidth(mark));
            }
        }
        self.place_cursors(grid, styles);
    }

    fn place_cursors(&self, grid: &mut Grid<Cell>, styles: &[Cell]) {
        let (rows, columns) = (grid.screen_lines(), grid.columns());
        let restored = |saved: &SavedCursor| {
            let mut cursor = Cursor::<Cell>::default();
            cursor.point.line = Line(saved.line.clamp(0, rows as i32 - 1));
            cursor.point.column = Column(saved.column.min(columns - 1));
            cursor.template = styles.get(saved.style).cloned().unwrap_or_default();
            cursor.input_needs_wrap = saved.needs_wrap;
            for (charset, draws) in CHARSETS.into_iter().zip(saved.draws_lines) {
                cursor.charsets[charset] = match draws {
                    true => StandardCharset::SpecialCharacterAndLineDrawing,
                    false => StandardCharset::Ascii,
                };
            }
            cursor
        };
        grid.cursor = restored(&self.cursor);
        grid.saved_cursor = restored(&self.saved_cursor);
    }
}

impl SavedStyle {
    fn of(cell: &Cell) -> SavedStyle {
        let flags = FLAGS.iter().enumerate().map(|(bit, flag)| u32::from(cell.flags.contains(*flag)) << bit).sum();
        SavedStyle {
            foreground: SavedColour::of(cell.fg),
            background: SavedColour::of(cell.bg),
            flags: if cell.flags.contains(OLD) { flags | OLD_BIT } else { flags },
            underline: cell.underline_color().map(SavedColour::of),
            link: cell.hyperlink().map(|link| (link.id().to_owned(), link.uri().to_owned())),
        }
    }

    /// A blank of this style.
    fn cell(&self) -> Cell {
        let mut cell = Cell {
            fg: self.foreground.colour(),
            bg: self.background.colour(),
            flags: Flags::empty(),
            ..Cell::default()
        };
        for (bit, flag) in FLAGS.into_iter().enumerate() {
            if self.flags & (1 << bit) != 0 {
                cell.flags.insert(flag);
            }
        }
        if self.flags & OLD_BIT != 0 {
            cell.flags.insert(OLD);
        }
        cell.set_underline_color(self.underline.map(SavedColour::colour));
        cell.set_hyperlink(self.link.clone().map(|(id, uri)| Hyperlink::new(Some(id), uri)));
        cell
    }
}

impl SavedColour {
    fn of(colour: Color) -> SavedColour {
        match colour {
            Color::Named(name) => {
                let place = NAMED.iter().position(|known| *known == name).unwrap_or(0);
                SavedColour::Number(NAMED_FROM + place as u16)
            }
            Color::Indexed(index) => SavedColour::Number(index.into()),
            Color::Spec(Rgb { r, g, b }) => SavedColour::Exact(r, g, b),
        }
    }

    fn colour(self) -> Color {
        match self {
            SavedColour::Number(number) => match u8::try_from(number) {
                Ok(index) => Color::Indexed(index),
                Err(_) => Color::Named(NAMED.get(usize::from(number - NAMED_FROM)).copied().unwrap_or(NAMED[0])),
            },
            SavedColour::Exact(r, g, b) => Color::Spec(Rgb { r, g, b }),
        }
    }
}

/// The tab stops, if they are not those of every new terminal. The model shows them only by the way of the cursor.
fn tabs(term: &mut Term<ModelEvents>) -> Option<Vec<usize>> {
    let before = term.grid().cursor.point.column;
    term.grid_mut().cursor.point.column = Column(0);
    let mut found = Vec::new();
    loop {
        let last = term.grid().cursor.point.column;
        term.move_forward_tabs(1);
        match term.grid().cursor.point.column {
            column if column == last => break,
            column => found.push(column.0),
        }
    }
    term.grid_mut().cursor.point.column = before;
    // The last column ends the search, tab stop or not.
    let end = term.columns() - 1;
    found.retain(|column| *column != end);
    let usual = (8..end).step_by(8);
    (!found.iter().copied().eq(usual)).then_some(found)
}

fn restore_tabs(term: &mut Term<ModelEvents>, tabs: Option<&[usize]>) {
    let Some(tabs) = tabs else { return };
    term.clear_tabs(TabulationClearMode::All);
    let columns = term.columns();
    for column in [0].iter().chain(tabs).filter(|column| **column < columns) {
        term.grid_mut().cursor.point.column = Column(*column);
        term.set_horizontal_tabstop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::terminal::paint::Extent;

    fn screen(bytes: &[u8]) -> Screen {
        let mut screen = Screen::new(Size { columns: 20, rows: 5, width: 0, height: 0 });
        screen.feed(bytes, false);
        screen
    }

    fn again(screen: &mut Screen) -> Screen {
        let saved = screen.save();
        let text = serde_json::to_string(&saved).unwrap();
        let mut restored = Screen::restore(serde_json::from_str(&text).unwrap());
        assert_eq!(restored.save(), saved);
        assert_eq!(screen.save(), saved, "to save it changes nothing");
        restored
    }

    /// What viewers and programs see, and what they would see after more output.
    fn everything(screen: &mut Screen) -> (String, Vec<String>, Vec<String>) {
        let mut seen = vec![format!("{:?} {:?} {:?}", screen.look(), screen.modes(), screen.history(usize::MAX))];
        let picture = |screen: &Screen| {
            String::from_utf8_lossy(&screen.paint(screen.size(), Extent::WithHistory { skipped: 0 })).into_owned()
        };
        let first = picture(screen);
        let mut own = vec![screen.own_lines().join("|")];
        let steps: [&[u8]; 12] = [
            b"x",
            b"\x1b[3b",
            "\u{301}👍".as_bytes(),
            b"\ty\x1b[Zz\r\n",
            b"\x1b8here\x1b[?6l",
            b"\x0eq\x0fq",
            b"\n\n\nscrolled\x1b[2;2H\x1bMup",
            b"\x1b[23t\x1b[<u",
            b"\x1b[?1049lmain\x1b[<1u",
            b"\x1b[?1049habove\x1b[?u\x1b[?1049l",
            b"\x1b]2;half",
            b" a title\x07\x1b[2;8H\ttab",
        ];
        for step in steps {
            let said = screen.feed(step, true);
            seen.push(format!("{step:?}: {:?} {:?} {}", screen.title(), said, picture(screen)));
        }
        // Lines that were wrapped are joined again.
        for (columns, rows) in [(40, 3), (12, 7), (20, 5)] {
            screen.resize(Size { columns, rows, width: 0, height: 0 });
            seen.push(picture(screen));
            own.push(screen.own_lines().join("|"));
        }
        (first, seen, own)
    }

    #[test]
    fn a_restored_screen_is_the_same_now_and_later() {
        let table = [
            "",
            "plain text\r\nand a second line",
            "\x1b[1;31mred\x1b[0m \x1b[38;5;200;48;2;1;2;3mmany\x1b[4:3;58:5:9mcurly\x1b[0;7mturned\x1b[0;2;3;9m!\x1b[97;100mx",
            "\x1b[44m\x1b[2J\x1b[3;4Hblue\x1b[K",
            "日本語 e\u{301} 😀 👨‍👩‍👧 ok",
            "a long line that wraps at the edge of this small screen, several times over",
            "01234567890123456789",
            "\x1b]2;one\x07\x1b[22t\x1b]2;two\x07\x1b[22t\x1b]2;three\x07\x1b[?2004h\x1b[?1002h\x1b[?1006h\x1b[>1u\x1b[>5u\x1b[5 q\x1b[?25l",
            "below\x1b[31m\x1b[?1049h\x1b[44m\x1b[2;2Habove\x1b[>3u\x1b[32m",
            "\x1b[?1049h\x1b[>3u\x1b[?1049lmain, and modes of the other screen",
            "\x1b[2;4r\x1b[?6h\x1b[?7l\x1b[4h\x1b[2;3Hx",
            "\x1b(0lqqk\x1b(B\x1b)0\x0eqq",
            "\x1b]8;;https://example.org/\x1b\\link\x1b]8;;\x1b\\ no\x1b[2;2H\x1b7\x1b[4;4H",
            "\x1b[3g\x1b[5G\x1bH\x1b[11G\x1bHtabs\r",
            "cut\x1b[38;5",
            "cut \u{e9}\x1b]2;a tit",
        ];
        for text in table {
            for more in ["", "\r\nmore\r\nthan\r\nfits\r\non\r\nit\r\nand\r\nthe \x1b[7mend"] {
                let bytes = [text, more].concat();
                let mut there = screen(bytes.as_bytes());
                let mut here = again(&mut there);
                assert_eq!(everything(&mut here), everything(&mut there), "{bytes:?}");
            }
        }
        // The output of an earlier agent is still that of an earlier one.
        let mut there = screen(b"old\r\nlines");
        there.begin_anew();
        there.feed(b" new", false);
        let mut here = again(&mut there);
        assert_eq!(here.own_lines(), ["", "      new", "", "", ""]);
        assert_eq!(everything(&mut here), everything(&mut there));
    }

    #[test]
    fn it_may_be_saved_at_any_byte_but_within_a_long_sequence() {
        let text = "one\x1b[1;31mtwo \x1b]2;title\x1b\\日本 \x1b(0q\x1b(B\x1b[?25l\x1b[?1049hend\x1b[>0q";
        for at in 0..text.len() {
            let mut there = screen(&text.as_bytes()[..at]);
            let mut here = again(&mut there);
            assert_eq!(here.feed(&text.as_bytes()[at..], true), there.feed(&text.as_bytes()[at..], true));
            assert_eq!(everything(&mut here), everything(&mut there), "cut at {at}");
        }
        let mut long = screen(b"\x1b]52;c;");
        assert!(!long.is_in_long_sequence());
        long.feed(&[b'x'; 100_000], false);
        assert!(long.is_in_long_sequence());
        long.feed(b"\x07", false);
        assert!(!long.is_in_long_sequence());
    }

    #[test]
    fn no_output_makes_a_difference() {
        let mut seed = 11u32;
        let mut there = screen(b"");
        for round in 0..300 {
            let bytes: Vec<u8> = std::iter::repeat_with(|| {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let byte = (seed >> 24) as u8;
                if byte < 96 { b"\x1b[]?;0123456789hlmHJKrSTLMPX@>ubgI\x07\n"[usize::from(byte) % 36] } else { byte }
            })
            .take(96)
            .collect();
            there.feed(&bytes, false);
            let here = again(&mut there);
            let picture = |screen: &Screen| screen.paint(screen.size(), Extent::WithHistory { skipped: 0 });
            assert_eq!(picture(&here), picture(&there), "round {round}");
            assert_eq!(here.history(usize::MAX), there.history(usize::MAX), "round {round}");
        }
    }

    /// A program reads what the last one wrote. If this fails, the format of the state has changed: it needs a new version
    /// and a migration from this one.
    #[test]
    fn the_format_is_that_of_its_version() {
        let text = "a\x1b[1;31mb\x1b]8;id=1;https://example.org/\x1b\\c\x1b]8;;\x1b\\\r\n\x1b[48;2;1;2;3me\u{301}\x1b[>5u\x1b[?1049hx";
        let saved = serde_json::to_string(&screen(text.as_bytes()).save()).unwrap();
        assert_eq!(saved, include_str!("saved-1.json").trim_end());
    }
}
