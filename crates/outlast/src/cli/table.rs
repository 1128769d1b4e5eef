//! Columns that line up, in as much room as there is.

use outlast_core::visible;

/// What stands where nothing is known.
pub(crate) const NOTHING: &str = "-";

/// What becomes of a column when there is not room for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Yield {
    /// It stays whole as long as the others can make room. In a very narrow terminal it loses its end, down to this
    /// width: the beginning of an id is enough to name an instance.
    Last(usize),
    /// It continues in further lines, between words: at the first width as soon as room is short, at the second when it is
    /// very short.
    End(usize, usize),
    /// It loses its end, at the same widths: of what a server wrote the beginning says most.
    Cut(usize, usize),
    /// It loses its beginning: of a path the end says most.
    Beginning(usize, usize),
    /// It is left out as soon as room is short. The lowest number goes first.
    Soon(u8),
    /// It is left out when nothing else helps. The lowest number goes first.
    Late(u8),
}

#[derive(Debug, Clone)]
pub(crate) struct Column {
    pub title: &'static str,
    pub is_number: bool,
    pub yields: Yield,
}

/// How many lines a cell may take; what is beyond is cut.
const CELL_LINES_MAX: usize = 4;
/// With less room than this behind a margin, a text is left to the terminal to break.
const HANGING_MIN: usize = 20;

/// How a table is laid out.
#[derive(Debug, Clone)]
struct Layout {
    shown: Vec<usize>,
    /// What the columns are set apart by.
    gap: usize,
    /// Texts may be as short as when room is very short.
    is_tight: bool,
    /// Even columns that are otherwise left whole lose their end.
    is_cut: bool,
}

/// The width of the terminal that stdout is, if it is one.
pub(crate) fn room() -> Option<usize> {
    outlast_os::terminal_size().map(|(columns, _)| usize::from(columns))
}

/// The lines of a table, in `width` columns if there is a limit.
pub(crate) fn lines(columns: &[Column], rows: &[Vec<String>], width: Option<usize>) -> Vec<String> {
    dressed(columns, rows, width, &|_, cell| cell.to_owned())
}

/// The same, with each cell below its title as `dress` makes it look: it may add colours, and no letters.
pub(crate) fn dressed(
    columns: &[Column],
    rows: &[Vec<String>],
    width: Option<usize>,
    dress: &dyn Fn(&str, &str) -> String,
) -> Vec<String> {
    let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(|cell| tame(cell)).collect()).collect();
    let mut widths: Vec<usize> = columns
        .iter()
        .enumerate()
        .map(|(at, column)| {
            rows.iter().map(|row| length(&row[at])).chain([column.title.len()]).max().unwrap_or_default()
        })
        .collect();
    let mut layout = Layout { shown: (0..columns.len()).collect(), gap: 2, is_tight: false, is_cut: false };
    if let Some(width) = width {
        layout = choose(columns, &rows, &widths, layout, width);
        shrink(columns, &mut widths, &layout, width);
    }
    let titles: Vec<String> = columns.iter().map(|column| column.title.to_owned()).collect();
    std::iter::once(&titles)
        .chain(&rows)
        .enumerate()
        .flat_map(|(line, row)| {
            let is_title = line == 0;
            let cells: Vec<(usize, Vec<String>)> =
                layout.shown.iter().map(|&at| (at, fit(&row[at], widths[at], columns[at].yields))).collect();
            let height = cells.iter().map(|(_, lines)| lines.len()).max().unwrap_or(1);
            let line = |number: usize| {
                let mut line = String::new();
                for (at, lines) in &cells {
                    let cell = lines.get(number).cloned().unwrap_or_default();
                    let blank = " ".repeat(widths[*at].saturating_sub(length(&cell)));
                    let is_number = columns[*at].is_number;
                    let (before, after) = if is_number { (blank.as_str(), "") } else { ("", blank.as_str()) };
                    let cell = if is_title || cell.is_empty() { cell } else { dress(columns[*at].title, &cell) };
                    line.push_str(&format!("{before}{cell}{after}{}", " ".repeat(layout.gap)));
                }
                line.trim_end().to_owned()
            };
            (0..height).map(line).collect::<Vec<_>>()
        })
        .collect()
}

/// The most generous layout that fits. First go the columns in which nothing stands, then those that are missed least.
fn choose(columns: &[Column], rows: &[Vec<String>], widths: &[usize], mut layout: Layout, width: usize) -> Layout {
    let fits = |layout: &Layout| {
        let least = layout.shown.iter().map(|&at| least(&columns[at], widths[at], layout));
        least.sum::<usize>() + layout.gap * layout.shown.len().saturating_sub(1) <= width
    };
    if fits(&layout) {
        return layout;
    }
    let is_empty = |at: usize| rows.iter().all(|row| row[at] == NOTHING);
    layout.shown.retain(|&at| matches!(columns[at].yields, Yield::Last(_)) || !is_empty(at));
    while !fits(&layout)
        && leave_out(&mut layout, columns, |yields| if let Yield::Soon(n) = yields { Some(n) } else { None })
    {}
    layout.is_tight = !fits(&layout);
    if !fits(&layout) {
        layout.gap = 1;
    }
    while !fits(&layout)
        && leave_out(&mut layout, columns, |yields| if let Yield::Late(n) = yields { Some(n) } else { None })
    {}
    layout.is_cut = !fits(&layout);
    // A line that is too long would be broken inside its words by the terminal, so the last columns go.
    while !fits(&layout) && layout.shown.len() > 1 {
        layout.shown.pop();
    }
    layout
}

fn leave_out(layout: &mut Layout, columns: &[Column], order: impl Fn(Yield) -> Option<u8>) -> bool {
    let next = layout.shown.iter().copied().filter_map(|at| Some((order(columns[at].yields)?, at))).min();
    if let Some((_, leaver)) = next {
        layout.shown.retain(|&at| at != leaver);
    }
    next.is_some()
}

fn least(column: &Column, width: usize, layout: &Layout) -> usize {
    match column.yields {
        Yield::End(soon, late) | Yield::Cut(soon, late) | Yield::Beginning(soon, late) => {
            width.min(if layout.is_tight { late } else { soon }.max(column.title.len()))
        }
        Yield::Last(least) if layout.is_cut => width.min(least.max(column.title.len())),
        _ => width,
    }
}

/// The widest gives first, so that no text is cut more than it must be.
fn shrink(columns: &[Column], widths: &mut [usize], layout: &Layout, width: usize) {
    let gaps = layout.gap * layout.shown.len().saturating_sub(1);
    loop {
        let taken = layout.shown.iter().map(|&at| widths[at]).sum::<usize>() + gaps;
        let giver = layout.shown.iter().copied().filter(|&at| widths[at] > least(&columns[at], widths[at], layout));
        match giver.max_by_key(|&at| widths[at]) {
            Some(at) if taken > width => widths[at] -= 1,
            _ => return,
        }
    }
}

fn fit(cell: &str, width: usize, yields: Yield) -> Vec<String> {
    if length(cell) <= width {
        return vec![cell.to_owned()];
    }
    let kept = width.saturating_sub(1);
    match yields {
        Yield::Beginning(..) => {
            let skipped = length(cell) - kept;
            vec![format!("…{}", cell.chars().skip(skipped).collect::<String>())]
        }
        Yield::Cut(..) | Yield::Last(_) => vec![format!("{}…", cell.chars().take(kept).collect::<String>())],
        _ => {
            let mut lines = wrapped(cell, width);
            if lines.len() > CELL_LINES_MAX {
                lines.truncate(CELL_LINES_MAX);
                let last = &mut lines[CELL_LINES_MAX - 1];
                *last = format!("{}…", last.chars().take(kept).collect::<String>());
            }
            lines
        }
    }
}

/// Lines of at most `width`, broken between words. A word that is longer by itself is cut.
pub(crate) fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let word = match length(word) <= width {
            true => word.to_owned(),
            false => format!("{}…", word.chars().take(width.saturating_sub(1)).collect::<String>()),
        };
        let line = lines.last_mut().expect("there is a first line");
        if line.is_empty() {
            *line = word;
        } else if length(line) + 1 + length(&word) <= width {
            line.push(' ');
            line.push_str(&word);
        } else {
            lines.push(word);
        }
    }
    lines
}

/// A text of several words behind a margin, of which the first line has its own already. Without a limit it is one line.
pub(crate) fn hanging(text: &str, margin: usize, width: Option<usize>) -> String {
    let Some(width) = width.filter(|width| *width >= margin + HANGING_MIN) else { return text.to_owned() };
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split(' ') {
        // A long word has a line of its own and is left whole: it may be a path that is copied.
        if !line.is_empty() && margin + length(&line) + 1 + length(word) > width {
            lines.push(std::mem::take(&mut line));
        } else if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines.join(&format!("\n{}", " ".repeat(margin)))
}

fn length(text: &str) -> usize {
    text.chars().count()
}

/// What would move the cursor does not: a directory may be called anything.
fn tame(cell: &str) -> String {
    visible::text(cell).replace(['\n', '\t'], "?")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_fits_the_width_of_the_terminal() {
        let column = |title, is_number, yields| Column { title, is_number, yields };
        let columns = [
            column("ID", false, Yield::Last(8)),
            column("KIND", false, Yield::Soon(1)),
            column("PID", true, Yield::Late(1)),
            column("LAST-EXIT", false, Yield::End(12, 9)),
            column("CWD", false, Yield::Beginning(16, 8)),
            column("NEXT", true, Yield::Late(2)),
        ];
        let row = |cells: [&str; 6]| cells.map(str::to_owned).to_vec();
        let rows = [
            row(["py-1abcd", "mcp", "7", "signal 9 (SIGKILL)", "~/projects/weather/server", "-"]),
            row(["github-mcp-2bcde", "mcp", "123456", "-", "/srv/a\u{1b}[31mb\n", "-"]),
        ];
        let mut shown = String::new();
        for width in [None, Some(70), Some(60), Some(50), Some(40), Some(10)] {
            shown.push_str(&format!("{width:?}\n{}\n", lines(&columns, &rows, width).join("\n")));
        }
        for width in 8..120 {
            let shown = lines(&columns, &rows, Some(width));
            assert!(shown.iter().all(|line| length(line) <= width), "{width}: {shown:#?}");
        }
        insta::assert_snapshot!(shown, @"
        None
        ID                KIND     PID  LAST-EXIT           CWD                        NEXT
        py-1abcd          mcp        7  signal 9 (SIGKILL)  ~/projects/weather/server     -
        github-mcp-2bcde  mcp   123456  -                   /srv/ab?                      -
        Some(70)
        ID                KIND     PID  LAST-EXIT       CWD               NEXT
        py-1abcd          mcp        7  signal 9        …/weather/server     -
                                        (SIGKILL)
        github-mcp-2bcde  mcp   123456  -               /srv/ab?             -
        Some(60)
        ID                   PID  LAST-EXIT         CWD
        py-1abcd               7  signal 9          …/weather/server
                                  (SIGKILL)
        github-mcp-2bcde  123456  -                 /srv/ab?
        Some(50)
        ID                   PID  LAST-EXIT    CWD
        py-1abcd               7  signal 9     …her/server
                                  (SIGKILL)
        github-mcp-2bcde  123456  -            /srv/ab?
        Some(40)
        ID               LAST-EXIT   CWD
        py-1abcd         signal 9    …her/server
                         (SIGKILL)
        github-mcp-2bcde -           /srv/ab?
        Some(10)
        ID
        py-1abcd
        github-mc…
        ");
    }

    #[test]
    fn texts_break_between_words() {
        assert_eq!(wrapped("signal 9 (SIGKILL)", 12), ["signal 9", "(SIGKILL)"]);
        assert_eq!(wrapped("a-word-that-is-too-long b", 8), ["a-word-…", "b"]);
        assert_eq!(wrapped("", 8), [""]);
        assert_eq!(hanging("one two three four five", 4, Some(24)), "one two three four\n    five");
        assert_eq!(
            hanging("one /a/path/that/is/longer/than/that two", 2, Some(24)),
            "one\n  /a/path/that/is/longer/than/that\n  two"
        );
        assert_eq!(hanging("one two", 4, None), "one two");
    }
}
