//! What would change in a text, as everybody reads it: a unified diff.

use crate::paint::Paint;

/// Lines shown around a change.
const AROUND: usize = 3;
/// A longer line is shown only around what changes in it: some clients write a whole file as one line.
const LINE_MAX: usize = 240;
const LINE_AROUND: usize = 60;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Same,
    Gone,
    New,
}

/// Nothing at all if nothing changes.
pub fn unified(name: &str, old: &str, new: &str, paint: Paint) -> String {
    let (old, new): (Vec<&str>, Vec<&str>) = (lines(old), lines(new));
    let steps = steps(&old, &new);
    if steps.iter().all(|step| *step == Step::Same) {
        return String::new();
    }
    let mut text = paint.bold(&format!("--- {name}\n+++ {name}")) + "\n";
    let mut at = (0, 0);
    let mut from = 0;
    while let Some(first) = steps[from..].iter().position(|step| *step != Step::Same).map(|first| from + first) {
        // Changes that are near to each other stand together.
        let mut end = first;
        let mut last = first;
        while end < steps.len() && end <= last + 2 * AROUND {
            if steps[end] != Step::Same {
                last = end;
            }
            end += 1;
        }
        let (begin, end) = (first.saturating_sub(AROUND).max(from), (last + 1 + AROUND).min(steps.len()));
        at = advance(at, &steps[from..begin]);
        let after = advance(at, &steps[begin..end]);
        let range = |from: usize, to: usize| format!("{},{}", if from == to { from } else { from + 1 }, to - from);
        text.push_str(&paint.cyan(&format!("@@ -{} +{} @@", range(at.0, after.0), range(at.1, after.1))));
        text.push('\n');
        for &step in &steps[begin..end] {
            let next = advance(at, &[step]);
            match step {
                Step::Same => text.push_str(&format!(" {}\n", shown(old[at.0], None))),
                Step::Gone => {
                    let line = shown(old[at.0], new.get(at.1).copied());
                    text.push_str(&(paint.red(&format!("-{line}")) + "\n"));
                }
                Step::New => {
                    let line = shown(new[at.1], at.0.checked_sub(1).and_then(|before| old.get(before)).copied());
                    text.push_str(&(paint.green(&format!("+{line}")) + "\n"));
                }
            }
            at = next;
        }
        from = end;
    }
    text
}

/// The last line without an end is one, too; line ends themselves are compared, and shown where they differ.
fn lines(text: &str) -> Vec<&str> {
    text.split_inclusive('\n').collect()
}

fn advance((old, new): (usize, usize), steps: &[Step]) -> (usize, usize) {
    let count = |skipped: Step| steps.iter().filter(|step| **step != skipped).count();
    (old + count(Step::New), new + count(Step::Gone))
}

/// A line, or of a long one the part in which it differs from the other.
fn shown(line: &str, other: Option<&str>) -> String {
    let line: Vec<char> = line.trim_end_matches(['\n', '\r']).chars().map(tame).collect();
    if line.len() <= LINE_MAX {
        return line.into_iter().collect();
    }
    let other: Vec<char> = other.unwrap_or_default().trim_end_matches(['\n', '\r']).chars().map(tame).collect();
    let before = line.iter().zip(&other).take_while(|(one, other)| one == other).count();
    let most = line.len().min(other.len()) - before.min(line.len().min(other.len()));
    let after = line.iter().rev().zip(other.iter().rev()).take(most).take_while(|(one, other)| one == other).count();
    let begin = before.saturating_sub(LINE_AROUND);
    let end = (line.len() - after + LINE_AROUND).min(line.len()).min(begin + LINE_MAX.max(LINE_AROUND * 2));
    let dots = |is_cut: bool| if is_cut { "…" } else { "" };
    format!("{}{}{}", dots(begin > 0), line[begin..end].iter().collect::<String>(), dots(end < line.len()))
}

/// What would move the cursor does not.
fn tame(letter: char) -> char {
    if letter.is_control() && letter != '\t' { '?' } else { letter }
}

/// The shortest way from one text to the other, line by line (Myers), after what is the same at both ends.
fn steps(old: &[&str], new: &[&str]) -> Vec<Step> {
    let head = old.iter().zip(new).take_while(|(one, other)| one == other).count();
    let rest = (old.len() - head).min(new.len() - head);
    let tail = old.iter().rev().zip(new.iter().rev()).take(rest).take_while(|(one, other)| one == other).count();
    let mut steps = vec![Step::Same; head];
    steps.extend(shortest(&old[head..old.len() - tail], &new[head..new.len() - tail]));
    steps.extend(vec![Step::Same; tail]);
    steps
}

fn shortest(old: &[&str], new: &[&str]) -> Vec<Step> {
    let (rows, columns) = (old.len() as isize, new.len() as isize);
    let most = (rows + columns) as usize;
    let at = |diagonal: isize| (diagonal + most as isize) as usize;
    // How far down each diagonal one comes with so many changes; a copy for each number of them, to find the way back.
    let mut reach = vec![0_isize; 2 * most + 2];
    let mut trace = Vec::new();
    for changes in 0..=most as isize {
        trace.push(reach.clone());
        for diagonal in (-changes..=changes).step_by(2) {
            let goes_down =
                diagonal == -changes || (diagonal != changes && reach[at(diagonal - 1)] < reach[at(diagonal + 1)]);
            let mut row = if goes_down { reach[at(diagonal + 1)] } else { reach[at(diagonal - 1)] + 1 };
            // Rows are lines of the old text here, so "down" is a new line.
            while row < rows && row - diagonal < columns && old[row as usize] == new[(row - diagonal) as usize] {
                row += 1;
            }
            reach[at(diagonal)] = row;
            if row >= rows && row - diagonal >= columns {
                return back(&trace, rows, columns, at);
            }
        }
    }
    unreachable!("every text can be turned into every other")
}

fn back(trace: &[Vec<isize>], mut row: isize, mut column: isize, at: impl Fn(isize) -> usize) -> Vec<Step> {
    let mut steps = Vec::new();
    for (changes, reach) in trace.iter().enumerate().rev() {
        let (changes, diagonal) = (changes as isize, row - column);
        let goes_down =
            diagonal == -changes || (diagonal != changes && reach[at(diagonal - 1)] < reach[at(diagonal + 1)]);
        let before = if goes_down { diagonal + 1 } else { diagonal - 1 };
        let from = if changes == 0 { 0 } else { reach[at(before)] };
        let start = if changes == 0 {
            0
        } else if goes_down {
            from
        } else {
            from + 1
        };
        while row > start {
            steps.push(Step::Same);
            row -= 1;
            column -= 1;
        }
        if changes > 0 {
            steps.push(if goes_down { Step::New } else { Step::Gone });
            (row, column) = (from, from - before);
        }
    }
    steps.reverse();
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_stands_in_its_surroundings() {
        let old: String = (1..=30).map(|n| format!("line {n}\n")).collect();
        let new =
            old.replace("line 5\n", "line five\nand more\n").replace("line 11\n", "").replace("line 25\n", "25\n");
        insta::assert_snapshot!(unified("a.json", &old, &new, Paint::plain()), @"
        --- a.json
        +++ a.json
        @@ -2,13 +2,13 @@
         line 2
         line 3
         line 4
        -line 5
        +line five
        +and more
         line 6
         line 7
         line 8
         line 9
         line 10
        -line 11
         line 12
         line 13
         line 14
        @@ -22,7 +22,7 @@
         line 22
         line 23
         line 24
        -line 25
        +25
         line 26
         line 27
         line 28
        ");
        assert_eq!(unified("a", &old, &old, Paint::plain()), "");
        assert_eq!(unified("a", "", "x", Paint::plain()), "--- a\n+++ a\n@@ -0,0 +1,1 @@\n+x\n");
        assert_eq!(unified("a", "x\n", "", Paint::plain()), "--- a\n+++ a\n@@ -1,1 +0,0 @@\n-x\n");
    }

    #[test]
    fn a_long_line_is_shown_where_it_changes() {
        let (before, after) = ("x".repeat(1000), "y".repeat(1000));
        let shown = unified("a", &format!("{before}old{after}"), &format!("{before}fresh{after}"), Paint::plain());
        let around = |middle: &str| format!("…{}{middle}{}…", "x".repeat(60), "y".repeat(60));
        assert_eq!(shown, format!("--- a\n+++ a\n@@ -1,1 +1,1 @@\n-{}\n+{}\n", around("old"), around("fresh")));
    }

    #[test]
    fn the_way_leads_from_the_one_to_the_other() {
        // All pairs of short texts over two letters: whatever was chosen, applied to the one it makes the other.
        let texts: Vec<Vec<&str>> = (0..=5)
            .flat_map(|length| {
                (0..1_u32 << length)
                    .map(move |bits| (0..length).map(|at| ["a", "b"][(bits >> at & 1) as usize]).collect())
            })
            .collect();
        for old in &texts {
            for new in &texts {
                let (mut made, mut at) = (Vec::new(), (0, 0));
                for step in steps(old, new) {
                    match step {
                        Step::Same => made.push(old[at.0]),
                        Step::New => made.push(new[at.1]),
                        Step::Gone => {}
                    }
                    at = advance(at, &[step]);
                }
                assert_eq!((&made, at), (new, (old.len(), new.len())), "{old:?}");
            }
        }
    }
}
