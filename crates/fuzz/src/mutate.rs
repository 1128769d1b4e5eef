//! Mutations of a corpus, which a seed repeats.

/// The words of inputs: the same as in the dictionary of the engine.
const WORDS: &[u8] = include_bytes!("../dictionary");

pub struct Mutator(u64);

impl Mutator {
    pub fn new(seed: u64) -> Mutator {
        Mutator(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Below `n`, by xorshift.
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from((self.0 >> 16) % n.max(1) as u64).unwrap_or(0)
    }

    /// One input of the corpus, changed in a few places.
    pub fn mutate(&mut self, corpus: &[&[u8]]) -> Vec<u8> {
        let mut input = corpus[self.below(corpus.len())].to_vec();
        for _ in 0..1 + self.below(6) {
            let other = corpus[self.below(corpus.len())];
            self.change(&mut input, other);
        }
        input
    }

    fn change(&mut self, input: &mut Vec<u8>, other: &[u8]) {
        let at = self.below(input.len() + 1);
        match self.below(8) {
            // Some lines of another input, at the start of a line.
            0 | 1 => {
                let lines: Vec<&[u8]> = other.split_inclusive(|byte| *byte == b'\n').collect();
                let from = self.below(lines.len());
                let until = (from + 1 + self.below(4)).min(lines.len());
                let at = line_start(input, at);
                input.splice(at..at, lines.get(from..until).unwrap_or_default().concat());
            }
            2 => {
                let (begin, end) = (line_start(input, at), (at + self.below(200)).min(input.len()));
                input.drain(begin..end.max(begin));
            }
            // A word, in place of some bytes or beside them.
            3 | 4 => {
                let words: Vec<Vec<u8>> = words().collect();
                let word = words[self.below(words.len())].clone();
                let end = (at + self.below(12)).min(input.len());
                input.splice(at..end, word);
            }
            5 if at < input.len() => input[at] ^= 1 << self.below(8),
            6 => input.insert(at, self.below(256) as u8),
            // The same piece once more.
            _ => {
                let end = (at + 1 + self.below(80)).min(input.len());
                let piece = input[at..end].to_vec();
                input.splice(at..at, piece);
            }
        }
    }
}

fn line_start(input: &[u8], at: usize) -> usize {
    input[..at].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1)
}

/// Lines of the dictionary: `"text"`, with `\\`, `\"` and `\xNN` as escapes.
fn words() -> impl Iterator<Item = Vec<u8>> {
    WORDS.split(|byte| *byte == b'\n').filter_map(|line| {
        let inside = line.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
        let (mut word, mut rest) = (Vec::new(), inside.iter());
        while let Some(byte) = rest.next() {
            word.push(match byte {
                b'\\' => match rest.next()? {
                    b'x' => {
                        let digit = |byte: &u8| char::from(*byte).to_digit(16);
                        (digit(rest.next()?)? * 16 + digit(rest.next()?)?) as u8
                    }
                    other => *other,
                },
                byte => *byte,
            });
        }
        Some(word)
    })
}

#[cfg(test)]
mod tests {
    use super::{Mutator, words};

    #[test]
    fn the_dictionary_is_read_as_the_engine_reads_it() {
        let lines = super::WORDS.split(|byte| *byte == b'\n').filter(|line| line.starts_with(b"\"")).count();
        assert_eq!(words().count(), lines);
        assert!(words().any(|word| word == b"\"jsonrpc\":\"2.0\""));
        assert!(words().any(|word| word == b"\xef\xbb\xbf"));
    }

    #[test]
    fn a_seed_makes_the_same_input_again() {
        let corpus: [&[u8]; 2] = [b"a\nb\n", b"c\n"];
        for seed in 0..1_000 {
            assert_eq!(Mutator::new(seed).mutate(&corpus), Mutator::new(seed).mutate(&corpus));
        }
    }
}
