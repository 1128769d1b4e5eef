//! The last lines that a child wrote to its stderr, within a number of bytes.

use std::collections::VecDeque;

use crate::cut::head;

#[derive(Debug, Default)]
pub(super) struct Tail {
    lines: VecDeque<String>,
    bytes: usize,
}

impl Tail {
    /// Adds a line; the oldest lines are dropped beyond `bytes_max`, and a longer line is cut.
    pub(super) fn push(&mut self, mut line: String, bytes_max: usize) {
        line.truncate(head(&line, bytes_max).len());
        self.bytes += line.len();
        self.lines.push_back(line);
        while self.bytes > bytes_max {
            self.bytes -= self.lines.pop_front().map_or(0, |line| line.len());
        }
    }

    pub(super) fn to_vec(&self) -> Vec<String> {
        self.lines.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::Tail;

    #[test]
    fn a_tail_keeps_the_last_lines_within_its_bytes() {
        let table: [(&[&str], &[&str]); 4] = [
            // pushed                   kept
            (&["a", "b"], &["a", "b"]),
            (&["aaa", "bbb", "ccc"], &["bbb", "ccc"]),
            (&["a", "bbbbbbbbb"], &["bbbbbb"]),
            // A letter of two bytes is not cut in half.
            (&["aaaaaé"], &["aaaaa"]),
        ];
        for (pushed, kept) in table {
            let mut tail = Tail::default();
            pushed.iter().for_each(|line| tail.push((*line).to_owned(), 6));
            assert_eq!(tail.to_vec(), kept, "{pushed:?}");
        }
    }
}
