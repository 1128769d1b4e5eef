//! The planned change of a text, as a unified diff. Of long lines only the changed parts are shown: some clients
//! write a whole file as one line.

use std::time::Duration;

use similar::{DiffOp, TextDiff};

use crate::cli::paint::Paint;

/// Lines shown around a change.
const AROUND: usize = 3;
/// A longer line is shown only around its changes.
const LINE_MAX: usize = 240;
/// Characters shown around each change in such a line.
const LINE_AROUND: usize = 60;
/// How much of one long line is shown at most; the rest is cut.
const LINE_SHOWN_MAX: usize = 8_000;
/// Time limit of the search for the shortest diff; after it a longer one is shown.
const SEARCH_MAX: Duration = Duration::from_millis(500);

/// Empty if nothing changes.
pub(crate) fn unified(name: &str, old: &str, new: &str, paint: Paint) -> String {
    let (old, new): (Vec<&str>, Vec<&str>) = (lines(old), lines(new));
    if old == new {
        return String::new();
    }
    let diff = TextDiff::configure().timeout(SEARCH_MAX).diff_slices(&old, &new);
    let mut text = paint.bold(&format!("--- {name}\n+++ {name}")) + "\n";
    for group in diff.grouped_ops(AROUND) {
        let (Some(first), Some(last)) = (group.first(), group.last()) else { continue };
        let (from, to) = (first.old_range().start, last.old_range().end);
        let (new_from, new_to) = (first.new_range().start, last.new_range().end);
        text.push_str(&paint.cyan(&format!("@@ -{} +{} @@", range(from, to), range(new_from, new_to))));
        text.push('\n');
        for op in group {
            let (old, new) = (&old[op.old_range()], &new[op.new_range()]);
            if let DiffOp::Equal { .. } = op {
                old.iter().for_each(|line| text.push_str(&format!(" {}\n", shown(line, None))));
                continue;
            }
            for (at, line) in old.iter().enumerate() {
                text.push_str(&(paint.red(&format!("-{}", shown(line, new.get(at).copied()))) + "\n"));
            }
            for (at, line) in new.iter().enumerate() {
                text.push_str(&(paint.green(&format!("+{}", shown(line, old.get(at).copied()))) + "\n"));
            }
        }
    }
    text
}

fn range(from: usize, to: usize) -> String {
    format!("{},{}", if from == to { from } else { from + 1 }, to - from)
}

/// A last line without a line end counts, too. Line ends are compared, and shown where they differ.
fn lines(text: &str) -> Vec<&str> {
    text.split_inclusive('\n').collect()
}

/// A line; of a long one only the parts that differ from the other.
fn shown(line: &str, other: Option<&str>) -> String {
    let line = line.trim_end_matches(['\n', '\r']);
    let parts = match other {
        _ if line.chars().count() <= LINE_MAX => line.to_owned(),
        Some(other) => changed_parts(line, other.trim_end_matches(['\n', '\r'])),
        None => cut(line, LINE_MAX),
    };
    parts.chars().map(tame).collect()
}

fn changed_parts(line: &str, other: &str) -> String {
    // The common start and end are removed by characters; the rest is compared by words.
    let same = line.char_indices().zip(other.chars()).find(|((_, one), other)| one != other);
    let (head, rest) = line.split_at(same.map_or(line.len().min(other.len()), |((at, _), _)| at));
    let other = &other[head.len()..];
    let same = rest.char_indices().rev().zip(other.chars().rev()).take_while(|((_, one), other)| one == other);
    let (rest, tail) = rest.split_at(same.last().map_or(rest.len(), |((at, _), _)| at));
    let (mine, others) = (words(rest), words(&other[..other.len() - tail.len()]));
    let diff = TextDiff::configure().timeout(SEARCH_MAX).diff_slices(&mine, &others);
    let mut parts = context(head, false, true);
    for op in diff.ops() {
        let text = mine[op.old_range()].concat();
        match op {
            DiffOp::Equal { .. } => parts.push_str(&context(&text, true, true)),
            _ => parts.push_str(&text),
        }
    }
    parts.push_str(&context(tail, true, false));
    cut(&parts, LINE_SHOWN_MAX)
}

/// Unchanged text, cut to the part that is near a change before or after it.
fn context(text: &str, has_before: bool, has_after: bool) -> String {
    let letters: Vec<char> = text.chars().collect();
    let head = if has_before { LINE_AROUND.min(letters.len()) } else { 0 };
    let tail = if has_after { LINE_AROUND.min(letters.len() - head) } else { 0 };
    let dots = if head + tail < letters.len() { "…" } else { "" };
    let part = |letters: &[char]| letters.iter().collect::<String>();
    format!("{}{dots}{}", part(&letters[..head]), part(&letters[letters.len() - tail..]))
}

/// Splits after each character that is neither a letter nor a digit.
fn words(line: &str) -> Vec<&str> {
    line.split_inclusive(|letter: char| !letter.is_alphanumeric()).collect()
}

fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Replaces characters that would move the cursor.
fn tame(letter: char) -> char {
    if outlast_core::visible::is_control(letter) && letter != '\t' { '?' } else { letter }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_shown_with_its_context() {
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
    fn every_change_of_a_long_line_is_shown() {
        let servers: Vec<String> =
            (0..9).map(|n| format!("\"s{n}\":{{\"command\":\"a\",\"env\":\"{}\"}}", "x".repeat(200))).collect();
        let old = format!("{{\"mcpServers\":{{{}}}}}", servers.join(","));
        let new = old.replace("\"command\":\"a\"", "\"command\":\"outlast\"");
        let shown = unified("a", &old, &new, Paint::plain());
        let added = shown.lines().find(|line| line.starts_with("+{")).unwrap();
        assert_eq!(added.matches("\"outlast\"").count(), 9, "{added}");
        assert!(added.len() < old.len(), "what stays is left out");
    }

    #[test]
    fn each_of_several_long_lines_is_compared_with_its_own() {
        let pad = "x".repeat(300);
        let text = |word: &str| format!("{pad} one {word}\n{pad} two {word}\n");
        let shown = unified("a", &text("old"), &text("new"), Paint::plain());
        let lines: Vec<&str> = shown.lines().skip(3).collect();
        let ends = ["one old", "two old", "one new", "two new"];
        assert_eq!(lines.len(), 4, "{shown}");
        for (line, end) in lines.iter().zip(ends) {
            assert!(line.ends_with(end) && line.len() < 100, "{line}");
        }
    }
}
