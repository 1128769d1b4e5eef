//! A native MCP server that echoes as fast as a pipe allows, so that a benchmark of a relay measures the relay.
//!
//! It has one tool, `echo`, which returns its arguments as `structuredContent`, byte for byte. Like strict servers it
//! refuses every request but `ping` before `initialize` and `notifications/initialized`.

use std::{
    fs::File,
    io::{self, IoSlice, Read, Write},
    ops::Range,
    os::fd::AsFd,
    process::ExitCode,
};

use memchr::{memchr, memchr2};

/// The size of one read; a longer line makes the buffer grow to its length.
const READ_SIZE: usize = 256 * 1024;
/// Arguments from this size on are written from the read buffer, not copied into the batch.
const COPY_MAX: usize = 64 * 1024;

const TOOLS: &[u8] =
    br#"{"tools":[{"name":"echo","description":"The arguments, as they came","inputSchema":{"type":"object"}}]}"#;
const TOO_EARLY: &[u8] = br#"{"code":-32602,"message":"Received request before initialization was complete"}"#;
const UNKNOWN: &[u8] = br#"{"code":-32601,"message":"Method not found"}"#;
const VERSIONS: [&[u8]; 4] = [b"\"2024-11-05\"", b"\"2025-03-26\"", b"\"2025-06-18\"", b"\"2025-11-25\""];

pub(crate) fn main() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("outlast-echo: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn serve() -> io::Result<()> {
    let mut input = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut server =
        Server { output: File::from(io::stdout().as_fd().try_clone_to_owned()?), batch: Vec::new(), phase: Phase::New };
    let mut buffer = vec![0; READ_SIZE];
    // Bytes in the buffer, and how many of them are known to have no newline.
    let (mut held, mut searched) = (0, 0);
    loop {
        if buffer.len() - held < READ_SIZE / 2 {
            buffer.resize(buffer.len() * 2, 0);
        }
        let read = input.read(&mut buffer[held..])?;
        if read == 0 {
            return Ok(());
        }
        held += read;
        let mut start = 0;
        while let Some(length) = memchr(b'\n', &buffer[start.max(searched)..held]) {
            let end = start.max(searched) + length;
            server.hear(&buffer[start..end])?;
            start = end + 1;
        }
        server.flush()?;
        buffer.copy_within(start..held, 0);
        held -= start;
        searched = held;
    }
}

#[derive(PartialEq)]
enum Phase {
    New,
    Initializing,
    Ready,
}

struct Server {
    output: File,
    /// Answers to all requests of one read; written at once.
    batch: Vec<u8>,
    phase: Phase,
}

impl Server {
    fn hear(&mut self, line: &[u8]) -> io::Result<()> {
        let Some(message) = Message::scan(line) else { return Ok(()) };
        let method = message.method.map(|span| &line[span]);
        let Some(id) = message.id.map(|span| &line[span]) else {
            if method == Some(b"\"notifications/initialized\"") && self.phase == Phase::Initializing {
                self.phase = Phase::Ready;
            }
            return Ok(());
        };
        match method {
            Some(b"\"tools/call\"") if self.phase == Phase::Ready => {
                let arguments = message.arguments.map_or(&b"{}"[..], |span| &line[span]);
                self.echo(id, arguments)?;
            }
            Some(b"\"initialize\"") => {
                self.phase = Phase::Initializing;
                let asked = message.version.map_or(VERSIONS[3], |span| &line[span]);
                let version = if VERSIONS.contains(&asked) { asked } else { VERSIONS[3] };
                let info =
                    br#","capabilities":{"tools":{"listChanged":false}},"serverInfo":{"name":"echo","version":"1"}}"#;
                self.answer(id, b"result", &[br#"{"protocolVersion":"#, version, info]);
            }
            Some(b"\"ping\"") => self.answer(id, b"result", &[b"{}"]),
            Some(_) if self.phase != Phase::Ready => self.answer(id, b"error", &[TOO_EARLY]),
            Some(b"\"tools/list\"") => self.answer(id, b"result", &[TOOLS]),
            Some(_) => self.answer(id, b"error", &[UNKNOWN]),
            // A response: this server never sends requests.
            None => {}
        }
        Ok(())
    }

    fn answer(&mut self, id: &[u8], kind: &[u8], body: &[&[u8]]) {
        let start: [&[u8]; 5] = [br#"{"jsonrpc":"2.0","id":"#, id, b",\"", kind, b"\":"];
        for piece in start.iter().chain(body).chain(&[&b"}\n"[..]]) {
            self.batch.extend_from_slice(piece);
        }
    }

    fn echo(&mut self, id: &[u8], arguments: &[u8]) -> io::Result<()> {
        let pieces: [&[u8]; 5] = [
            br#"{"jsonrpc":"2.0","id":"#,
            id,
            br#","result":{"content":[],"structuredContent":"#,
            arguments,
            b",\"isError\":false}}\n",
        ];
        if arguments.len() < COPY_MAX {
            for piece in pieces {
                self.batch.extend_from_slice(piece);
            }
            return Ok(());
        }
        let mut slices = [&self.batch[..], pieces[0], pieces[1], pieces[2], pieces[3], pieces[4]].map(IoSlice::new);
        let mut slices = &mut slices[..];
        while !slices.is_empty() {
            let written = self.output.write_vectored(slices)?;
            IoSlice::advance_slices(&mut slices, written);
        }
        self.batch.clear();
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.write_all(&self.batch)?;
        self.batch.clear();
        Ok(())
    }
}

/// The positions of the relevant values in a line, quotes included.
#[derive(Default)]
struct Message {
    id: Option<Range<usize>>,
    method: Option<Range<usize>>,
    version: Option<Range<usize>>,
    arguments: Option<Range<usize>>,
}

impl Message {
    fn scan(line: &[u8]) -> Option<Self> {
        let mut message = Self::default();
        let mut scanner = Scanner { text: line, at: 0 };
        scanner.members(|key, scanner| {
            if key == b"params" && scanner.next_byte()? == b'{' {
                return scanner.members(|key, scanner| {
                    let value = scanner.value()?;
                    match key {
                        b"arguments" => message.arguments = Some(value),
                        b"protocolVersion" => message.version = Some(value),
                        _ => {}
                    }
                    Some(())
                });
            }
            let value = scanner.value()?;
            match key {
                b"id" => message.id = Some(value),
                b"method" => message.method = Some(value),
                _ => {}
            }
            Some(())
        })?;
        Some(message)
    }
}

/// Scans JSON without building values; invalid JSON ends the scan.
struct Scanner<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Scanner<'a> {
    fn next_byte(&mut self) -> Option<u8> {
        while self.text.get(self.at)?.is_ascii_whitespace() {
            self.at += 1;
        }
        Some(self.text[self.at])
    }

    fn take(&mut self, byte: u8) -> Option<()> {
        (self.next_byte()? == byte).then(|| self.at += 1)
    }

    fn string(&mut self) -> Option<Range<usize>> {
        let start = self.at;
        self.take(b'"')?;
        loop {
            self.at += memchr2(b'"', b'\\', &self.text[self.at..])?;
            if self.text[self.at] == b'"' {
                self.at += 1;
                return Some(start..self.at);
            }
            self.at += 2;
            if self.text.len() < self.at {
                return None;
            }
        }
    }

    /// Calls `visit` before each value of an object; it must scan that value.
    fn members(&mut self, mut visit: impl FnMut(&'a [u8], &mut Self) -> Option<()>) -> Option<()> {
        self.take(b'{')?;
        if self.next_byte()? == b'}' {
            return self.take(b'}');
        }
        loop {
            self.next_byte()?;
            let key = self.string()?;
            self.take(b':')?;
            visit(&self.text[key.start + 1..key.end - 1], self)?;
            if self.next_byte()? == b'}' {
                return self.take(b'}');
            }
            self.take(b',')?;
        }
    }

    fn value(&mut self) -> Option<Range<usize>> {
        let first = self.next_byte()?;
        let start = self.at;
        match first {
            b'"' => return self.string(),
            b'{' | b'[' => {
                let mut depth = 0_u32;
                loop {
                    match *self.text.get(self.at)? {
                        b'"' => {
                            self.string()?;
                            continue;
                        }
                        b'{' | b'[' => depth += 1,
                        b'}' | b']' => depth -= 1,
                        _ => {}
                    }
                    self.at += 1;
                    if depth == 0 {
                        return Some(start..self.at);
                    }
                }
            }
            _ => {
                while !matches!(self.text.get(self.at)?, b',' | b'}' | b']' | b' ') {
                    self.at += 1;
                }
            }
        }
        Some(start..self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_id_method_and_arguments_at_any_position() {
        let table = [
            // line                                                            id             method      arguments
            (r#"{"id":1,"method":"m"}"#, Some("1"), Some(r#""m""#), None),
            (r#" { "method" : "m" , "id" : "a\"b" } "#, Some(r#""a\"b""#), Some(r#""m""#), None),
            (
                r#"{"params":{"arguments":{"a":"}]\\","b":[1,{}]},"name":"echo"},"id":-2}"#,
                Some("-2"),
                None,
                Some(r#"{"a":"}]\\","b":[1,{}]}"#),
            ),
            (r#"{"result":{"id":9,"method":"no","arguments":3},"id":null}"#, Some("null"), None, None),
            (r#"{"params":[{"arguments":1}],"method":"m"}"#, None, Some(r#""m""#), None),
            ("{}", None, None, None),
        ];
        for (line, id, method, arguments) in table {
            let message = Message::scan(line.as_bytes()).unwrap_or_else(|| panic!("{line} is a message"));
            let text = |span: Option<Range<usize>>| span.map(|span| &line[span]);
            let found = (text(message.id), text(message.method), text(message.arguments));
            assert_eq!(found, (id, method, arguments), "{line}");
        }
        for line in ["", "x", "[]", r#"{"id":1"#, r#"{"id":"a\"#, r#"{"id" 1}"#, r#"{"params":{"arguments":{"#] {
            assert!(Message::scan(line.as_bytes()).is_none(), "{line}");
        }
    }
}
