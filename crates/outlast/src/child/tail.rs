//! The last lines that a child wrote to its stderr, within a number of bytes. Secrets are removed before they come here.

use std::collections::VecDeque;

/// How much of the end is kept, for the record of the exit.
const TAIL_MAX: usize = 64 << 10;

#[derive(Debug, Default)]
pub(crate) struct Tail {
    lines: VecDeque<Box<str>>,
    bytes: usize,
}

impl Tail {
    pub(super) fn push(&mut self, line: &str) {
        self.bytes += line.len() + 1;
        self.lines.push_back(line.into());
        while self.bytes > TAIL_MAX
            && let Some(oldest) = self.lines.pop_front()
        {
            self.bytes -= oldest.len() + 1;
        }
    }

    pub(crate) fn text(&self) -> String {
        let mut text = String::with_capacity(self.bytes);
        for line in &self.lines {
            text.push_str(line);
            text.push('\n');
        }
        text.truncate(text.trim_end().len());
        text
    }

    pub(super) fn to_vec(&self) -> Vec<String> {
        self.lines.iter().map(|line| line.to_string()).collect()
    }

    pub(crate) fn last(&self) -> Option<&str> {
        self.lines.back().map(|line| &**line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_stderr_is_kept() {
        let mut tail = Tail::default();
        assert_eq!((tail.text().as_str(), tail.last()), ("", None));
        for number in 0..10_000 {
            tail.push(&format!("line {number} {}", "x".repeat(20)));
        }
        let text = tail.text();
        assert!(text.len() <= TAIL_MAX && text.len() > TAIL_MAX - 100, "{}", text.len());
        assert!(text.ends_with(&format!("line 9999 {}", "x".repeat(20))));
        assert!(text.starts_with("line "), "whole lines: {}", &text[..20]);
    }
}
