//! The child of each subject: keys on its stdin control it.
//!
//! - `c` and a number up to a blank: writes this many bytes of text, then a last word
//! - `x` and a number up to a blank: writes this many random bytes, in raw mode
//! - any other key while `e` is on: is echoed at once

use std::io::{Read, Write, stdin, stdout};

use nix::sys::termios::{OutputFlags, SetArg, cfmakeraw, tcgetattr, tcsetattr};

/// The argument that makes the benchmark be the child.
pub(super) const WORD: &str = "child";
pub(super) const READY: &[u8] = b"BENCH-READY";
pub(super) const END: &[u8] = b"BENCH-END";
pub(super) const NOISE: &[u8] = b"BENCH-NOISE";
/// Keys per line.
const LINE: usize = 60;

pub(super) fn run(_: impl Iterator<Item = String>) -> Result<(), String> {
    let problem = |problem: std::io::Error| problem.to_string();
    set_raw(true)?;
    let mut out = stdout().lock();
    out.write_all(READY).and_then(|()| out.flush()).map_err(problem)?;
    let mut keys = stdin().lock();
    let mut key = [0];
    let mut echoed = 0;
    while keys.read(&mut key).map_err(problem)? > 0 {
        match key[0] {
            b'c' => {
                let count = number(&mut keys)?;
                // As most programs write: the terminal converts the line ends.
                set_raw(false)?;
                write_repeated(&mut out, &text(), count).map_err(problem)?;
                set_raw(true)?;
                out.write_all(END).and_then(|()| out.flush()).map_err(problem)?;
            }
            b'x' => {
                let mut left = number(&mut keys)?;
                out.write_all(NOISE).map_err(problem)?;
                let mut noise = Noise::default();
                let mut block = vec![0; 64 << 10];
                while left > 0 {
                    let size = left.min(block.len() as u64) as usize;
                    noise.fill(&mut block[..size]);
                    out.write_all(&block[..size]).map_err(problem)?;
                    left -= size as u64;
                }
                out.flush().map_err(problem)?;
            }
            other => {
                if echoed % LINE == 0 {
                    out.write_all(b"\r\n").map_err(problem)?;
                }
                echoed += 1;
                out.write_all(&[other]).and_then(|()| out.flush()).map_err(problem)?;
            }
        }
    }
    Ok(())
}

/// Pseudo-random bytes that both ends can generate.
pub(super) struct Noise(u64);

impl Default for Noise {
    fn default() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }
}

impl Noise {
    /// Generates whole words, so that the block size does not matter: all blocks but the last have a multiple of
    /// eight bytes.
    pub(super) fn fill(&mut self, block: &mut [u8]) {
        for word in block.chunks_mut(8) {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            word.copy_from_slice(&self.0.to_le_bytes()[..word.len()]);
        }
    }
}

/// Lines of words, some of them coloured.
fn text() -> Vec<u8> {
    let mut text = Vec::new();
    let mut number = 0;
    while text.len() < 60 << 10 {
        number += 1;
        let words = format!("{number:6} the quick brown fox jumps over the lazy dog, and then it does so again\n");
        let words = if number % 8 == 0 { format!("\x1b[32m{}\x1b[0m\n", words.trim_end()) } else { words };
        text.extend_from_slice(words.as_bytes());
    }
    text
}

fn write_repeated(out: &mut impl Write, text: &[u8], mut count: u64) -> std::io::Result<()> {
    while count > 0 {
        let size = count.min(text.len() as u64) as usize;
        out.write_all(&text[..size])?;
        count -= size as u64;
    }
    out.flush()
}

fn number(keys: &mut impl Read) -> Result<u64, String> {
    let mut digits = String::new();
    let mut key = [0];
    while keys.read(&mut key).map_err(|problem| problem.to_string())? > 0 && key[0] != b' ' {
        digits.push(key[0].into());
    }
    digits.parse().map_err(|_| format!("`{digits}` is no number"))
}

fn set_raw(is_bare: bool) -> Result<(), String> {
    let set = || -> nix::Result<()> {
        let mut termios = tcgetattr(stdin())?;
        cfmakeraw(&mut termios);
        if !is_bare {
            termios.output_flags |= OutputFlags::OPOST | OutputFlags::ONLCR;
        }
        tcsetattr(stdin(), SetArg::TCSADRAIN, &termios)
    };
    set().map_err(|problem| format!("there is no terminal: {problem}"))
}
