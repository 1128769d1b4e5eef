//! Columns that line up, in as much room as there is.

/// A table's columns are set apart by this.
const GAP: usize = 2;

/// What becomes of a column when there is not room for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Yield {
    /// It stays as it is.
    Never,
    /// It loses its end, down to this width.
    End(usize),
    /// It loses its beginning, down to this width: of a path the end says most.
    Beginning(usize),
    /// It is left out. The highest number goes first.
    Whole(u8),
}

#[derive(Debug, Clone)]
pub struct Column {
    pub title: &'static str,
    pub is_number: bool,
    pub yields: Yield,
}

/// The lines of a table. In `width` columns, if there is a limit: long texts are shortened first, then columns are left
/// out, and only when nothing else yields does a line grow longer.
pub fn lines(columns: &[Column], rows: &[Vec<String>], width: Option<usize>) -> Vec<String> {
    let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(|cell| tame(cell)).collect()).collect();
    let mut widths: Vec<usize> = columns
        .iter()
        .enumerate()
        .map(|(at, column)| {
            rows.iter().map(|row| length(&row[at])).chain([column.title.len()]).max().unwrap_or_default()
        })
        .collect();
    let mut shown: Vec<usize> = (0..columns.len()).collect();
    if let Some(width) = width {
        shrink(columns, &mut widths, &mut shown, width);
    }
    let titles: Vec<String> = columns.iter().map(|column| column.title.to_owned()).collect();
    std::iter::once(&titles)
        .chain(&rows)
        .map(|row| {
            let mut line = String::new();
            for &at in &shown {
                let cell = fit(&row[at], widths[at], columns[at].yields);
                let blank = " ".repeat(widths[at].saturating_sub(length(&cell)));
                let (before, after) = if columns[at].is_number { (blank.as_str(), "") } else { ("", blank.as_str()) };
                line.push_str(&format!("{before}{cell}{after}{}", " ".repeat(GAP)));
            }
            line.trim_end().to_owned()
        })
        .collect()
}

fn shrink(columns: &[Column], widths: &mut [usize], shown: &mut Vec<usize>, width: usize) {
    loop {
        let taken: usize =
            shown.iter().map(|&at| widths[at]).sum::<usize>() + GAP * shown.len().saturating_sub(1);
        let Some(excess) = taken.checked_sub(width).filter(|excess| *excess > 0) else { return };
        // The widest of those that can give something gives first.
        let giver = shown
            .iter()
            .copied()
            .filter_map(|at| match columns[at].yields {
                Yield::End(least) | Yield::Beginning(least) => {
                    let least = least.max(columns[at].title.len());
                    (widths[at] > least).then_some((widths[at], at, least))
                }
                Yield::Never | Yield::Whole(_) => None,
            })
            .max();
        if let Some((wide, at, least)) = giver {
            widths[at] = wide.saturating_sub(excess).max(least);
            continue;
        }
        let leaver = shown
            .iter()
            .enumerate()
            .filter_map(|(place, &at)| match columns[at].yields {
                Yield::Whole(order) => Some((order, place)),
                _ => None,
            })
            .max();
        match leaver {
            Some((_, place)) => shown.remove(place),
            None => return,
        };
    }
}

fn fit(cell: &str, width: usize, yields: Yield) -> String {
    if length(cell) <= width {
        return cell.to_owned();
    }
    let kept = width.saturating_sub(1);
    match yields {
        Yield::Beginning(_) => {
            let skipped = length(cell) - kept;
            format!("…{}", cell.chars().skip(skipped).collect::<String>())
        }
        _ => format!("{}…", cell.chars().take(kept).collect::<String>()),
    }
}

fn length(text: &str) -> usize {
    text.chars().count()
}

/// What would move the cursor does not: a directory may be called anything.
fn tame(cell: &str) -> String {
    cell.chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_makes_do_with_the_room_there_is() {
        let column = |title, is_number, yields| Column { title, is_number, yields };
        let columns = [
            column("ID", false, Yield::Never),
            column("KIND", false, Yield::Whole(1)),
            column("PID", true, Yield::Whole(2)),
            column("LAST-EXIT", false, Yield::End(9)),
            column("CWD", false, Yield::Beginning(8)),
        ];
        let row = |cells: [&str; 5]| cells.map(str::to_owned).to_vec();
        let rows = [
            row(["py-1abcd", "mcp", "7", "signal 9 (SIGKILL)", "~/projects/weather/server"]),
            row(["github-mcp-2bcde", "mcp", "123456", "-", "/srv/a\u{1b}[31mb\n"]),
        ];
        let mut shown = String::new();
        for width in [None, Some(70), Some(60), Some(50), Some(40), Some(10)] {
            shown.push_str(&format!("{width:?}\n{}\n", lines(&columns, &rows, width).join("\n")));
        }
        insta::assert_snapshot!(shown, @"");
    }
}
