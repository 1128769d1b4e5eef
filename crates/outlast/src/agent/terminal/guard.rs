//! A filter in front of the screen model: it bounds what would grow without limit, and notes state that a repaint
//! needs but the model does not expose.

use alacritty_terminal::{
    Term,
    event::{Event, EventListener},
    grid::Dimensions,
    index::{Column, Line},
    term::{TermMode, cell::Flags},
    vte::ansi::{
        Attr, CharsetIndex, ClearMode, CursorShape, CursorStyle, Handler, Hyperlink, KeyboardModes,
        KeyboardModesApplyBehavior, LineClearMode, Mode, PrivateMode, Rgb, StandardCharset, TabulationClearMode,
    },
};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::screen::ModelEvents;

/// Joins two emoji into one.
const JOINER: char = '\u{200d}';
/// Turns a narrow symbol into a wide emoji.
const AS_EMOJI: char = '\u{fe0f}';

/// Combining marks on one letter; further ones are dropped.
const MARKS_MAX: usize = 16;
/// Stacked titles and keyboard modes; one more replaces the last.
const ASIDE_MAX: usize = 32;
const TITLE_MAX: usize = 1024;
/// A longer link is shown as plain text.
const LINK_MAX: usize = 2048;

/// State that the model does not expose.
#[derive(Debug, Default)]
pub(super) struct Watched {
    /// Output had an effect since this was last cleared.
    pub has_effect: bool,
    /// The scrolling region, from 1, if it is not the whole screen.
    pub region: Option<(usize, usize)>,
    pub charset: CharsetIndex,
    /// The letter that a sequence would repeat.
    #[cfg(unix)]
    pub last_letter: Option<char>,
    pub marks: usize,
    /// The last character was a joiner.
    pub is_joined: bool,
    pub title: Option<String>,
    /// Titles that were put aside.
    pub titles: Vec<Option<String>>,
    /// Keyboard modes that were put aside, on the main screen and on the alternate one.
    pub keyboards: [Vec<KeyboardModes>; 2],
}

pub(super) struct Guard<'a> {
    pub term: &'a mut Term<ModelEvents>,
    pub events: &'a ModelEvents,
    pub watched: &'a mut Watched,
}

impl Guard<'_> {
    fn keyboards(&mut self) -> &mut Vec<KeyboardModes> {
        &mut self.watched.keyboards[usize::from(self.term.mode().contains(TermMode::ALT_SCREEN))]
    }

    /// The cell that was written last.
    fn last_cell(&self) -> (Line, Column) {
        let grid = self.term.grid();
        let (line, mut column) = (grid.cursor.point.line, grid.cursor.point.column);
        if !grid.cursor.input_needs_wrap {
            column.0 = column.saturating_sub(1);
        }
        if grid[line][column].flags.contains(Flags::WIDE_CHAR_SPACER) {
            column.0 = column.saturating_sub(1);
        }
        (line, column)
    }

    /// The agents count a family or a hand with a skin tone as one character of two cells, as newer terminals do. The
    /// model would count each part.
    fn is_part_of_emoji(&self, letter: char) -> bool {
        let is_colour = ('\u{1f3fb}'..='\u{1f3ff}').contains(&letter);
        let is_symbol = matches!(letter, '\u{2190}'..='\u{2bff}' | '\u{1f000}'..);
        if !(is_colour || self.watched.is_joined && is_symbol) {
            return false;
        }
        let (line, column) = self.last_cell();
        self.term.grid()[line][column].flags.contains(Flags::WIDE_CHAR)
    }

    fn add_to_emoji(&mut self, letter: char) {
        let (line, column) = self.last_cell();
        self.term.grid_mut()[line][column].push_zerowidth(letter);
    }

    /// A symbol that was written into one cell gets two, if there is space.
    fn widen(&mut self) {
        let (line, column) = self.last_cell();
        let cell = &self.term.grid()[line][column];
        let is_wide = [cell.c, AS_EMOJI].iter().collect::<String>().width() == 2;
        if !is_wide || cell.flags.contains(Flags::WIDE_CHAR) || column.0 + 1 >= self.term.columns() {
            return;
        }
        self.term.grid_mut()[line][column].flags.insert(Flags::WIDE_CHAR);
        self.term.grid_mut().cursor.template.flags.insert(Flags::WIDE_CHAR_SPACER);
        self.term.input(' ');
        self.term.grid_mut().cursor.template.flags.remove(Flags::WIDE_CHAR_SPACER);
    }
}

/// Handler methods that are passed on unchanged.
macro_rules! pass {
    ($($name:ident($($argument:ident: $kind:ty),*);)*) => {
        $(
            #[inline]
            fn $name(&mut self, $($argument: $kind),*) {
                self.watched.has_effect = true;
                self.watched.is_joined = false;
                self.term.$name($($argument),*);
            }
        )*
    };
}

impl Handler for Guard<'_> {
    #[inline]
    fn input(&mut self, letter: char) {
        self.watched.has_effect = true;
        #[cfg(unix)]
        {
            self.watched.last_letter = Some(letter);
        }
        let is_mark = !letter.is_ascii() && letter.width() == Some(0);
        let is_part = !letter.is_ascii() && !is_mark && self.is_part_of_emoji(letter);
        if is_mark || is_part {
            self.watched.marks += 1;
            if self.watched.marks > MARKS_MAX {
                return;
            }
        } else {
            self.watched.marks = 0;
        }
        match is_part {
            true => self.add_to_emoji(letter),
            false => self.term.input(letter),
        }
        self.watched.is_joined = letter == JOINER;
        if letter == AS_EMOJI {
            self.widen();
        }
    }

    fn set_title(&mut self, title: Option<String>) {
        self.watched.has_effect = true;
        self.watched.title = title.map(|title| title.chars().take(TITLE_MAX).collect());
        self.term.set_title(self.watched.title.clone());
    }

    fn push_title(&mut self) {
        self.watched.has_effect = true;
        if self.watched.titles.len() < ASIDE_MAX {
            self.watched.titles.push(self.watched.title.clone());
            self.term.push_title();
        }
    }

    fn pop_title(&mut self) {
        self.watched.has_effect = true;
        if let Some(title) = self.watched.titles.pop() {
            self.watched.title = title;
        }
        self.term.pop_title();
    }

    fn set_hyperlink(&mut self, link: Option<Hyperlink>) {
        self.watched.has_effect = true;
        let length = |link: &Hyperlink| link.uri.len() + link.id.as_ref().map_or(0, String::len);
        self.term.set_hyperlink(link.filter(|link| length(link) <= LINK_MAX));
    }

    fn identify_terminal(&mut self, intermediate: Option<char>) {
        self.watched.has_effect = true;
        let words = match intermediate {
            None => "\x1b[?62;22c",
            Some('>') => "\x1b[>1;10;0c",
            Some(_) => return,
        };
        self.events.send_event(Event::PtyWrite(words.to_owned()));
    }

    fn push_keyboard_mode(&mut self, mode: KeyboardModes) {
        self.watched.has_effect = true;
        if self.keyboards().len() >= ASIDE_MAX {
            self.keyboards().pop();
            self.term.pop_keyboard_modes(1);
        }
        self.keyboards().push(mode);
        self.term.push_keyboard_mode(mode);
    }

    fn pop_keyboard_modes(&mut self, count: u16) {
        self.watched.has_effect = true;
        let left = self.keyboards().len().saturating_sub(usize::from(count));
        self.keyboards().truncate(left);
        self.term.pop_keyboard_modes(count);
    }

    fn reset_state(&mut self) {
        *self.watched = Watched { has_effect: true, ..Watched::default() };
        self.term.reset_state();
    }

    fn set_scrolling_region(&mut self, top: usize, bottom: Option<usize>) {
        self.watched.has_effect = true;
        self.watched.region = bottom.map(|bottom| (top, bottom)).filter(|(top, bottom)| top < bottom);
        self.term.set_scrolling_region(top, bottom);
    }

    fn set_active_charset(&mut self, charset: CharsetIndex) {
        self.watched.has_effect = true;
        self.watched.charset = charset;
        self.term.set_active_charset(charset);
    }

    pass! {
        set_cursor_style(a: Option<CursorStyle>);
        set_cursor_shape(a: CursorShape);
        goto(a: i32, b: usize);
        goto_line(a: i32);
        goto_col(a: usize);
        insert_blank(a: usize);
        move_up(a: usize);
        move_down(a: usize);
        device_status(a: usize);
        move_forward(a: usize);
        move_backward(a: usize);
        move_down_and_cr(a: usize);
        move_up_and_cr(a: usize);
        put_tab(a: u16);
        backspace();
        carriage_return();
        linefeed();
        bell();
        substitute();
        newline();
        set_horizontal_tabstop();
        scroll_up(a: usize);
        scroll_down(a: usize);
        insert_blank_lines(a: usize);
        delete_lines(a: usize);
        erase_chars(a: usize);
        delete_chars(a: usize);
        move_backward_tabs(a: u16);
        move_forward_tabs(a: u16);
        save_cursor_position();
        restore_cursor_position();
        clear_line(a: LineClearMode);
        clear_screen(a: ClearMode);
        clear_tabs(a: TabulationClearMode);
        set_tabs(a: u16);
        reverse_index();
        terminal_attribute(a: Attr);
        set_mode(a: Mode);
        unset_mode(a: Mode);
        report_mode(a: Mode);
        set_private_mode(a: PrivateMode);
        unset_private_mode(a: PrivateMode);
        report_private_mode(a: PrivateMode);
        set_keypad_application_mode();
        unset_keypad_application_mode();
        configure_charset(a: CharsetIndex, b: StandardCharset);
        set_color(a: usize, b: Rgb);
        dynamic_color_sequence(a: String, b: usize, c: &str);
        reset_color(a: usize);
        clipboard_store(a: u8, b: &[u8]);
        clipboard_load(a: u8, b: &str);
        decaln();
        text_area_size_pixels();
        text_area_size_chars();
        report_keyboard_mode();
        set_keyboard_mode(a: KeyboardModes, b: KeyboardModesApplyBehavior);
    }
}
