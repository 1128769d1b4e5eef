//! The stdio front: one client, over our own stdin and stdout.

use std::{
    io,
    task::{Context, Poll},
};

use bytes::Bytes;
use outlast_core::{
    gateway::Client,
    message::{self, Id},
};

use crate::{
    lines::{LINE_MAX, Line, Lines},
    os::{self, Hangups, Sink, Source},
    outbox::{BYTES_HIGH, Outbox},
};

/// A client beside others that lets more than this wait is let go, so that nobody waits for it.
const OUTBOX_MAX: usize = 64 << 20;
/// Reads in one turn of the loop.
const READS_MAX: usize = 4;

#[derive(Debug)]
pub struct StdioFront {
    /// Its number among the clients.
    pub client: Client,
    stdin: Option<Source>,
    from_client: Lines,
    stdout: Option<Sink>,
    to_client: Outbox,
    hangups: Hangups,
}

/// What a look at stdin and stdout came to.
#[derive(Debug)]
pub enum Heard {
    Said(Bytes),
    /// It says no more, and may still listen.
    Ended,
    /// Nobody listens any more.
    Broken,
}

impl StdioFront {
    pub fn begin(client: Client) -> io::Result<StdioFront> {
        Ok(StdioFront {
            client,
            stdin: Some(os::stdin()?),
            from_client: Lines::default(),
            stdout: Some(os::stdout()?),
            to_client: Outbox::default(),
            hangups: Hangups::begin()?,
        })
    }

    /// Nothing waits to be said.
    pub fn is_quiet(&self) -> bool {
        self.to_client.is_empty()
    }

    /// There is room for more; otherwise those who fill it are not to be listened to.
    pub fn is_low(&self) -> bool {
        self.to_client.is_below(BYTES_HIGH)
    }

    /// False if it has let too much wait.
    pub fn tell(&mut self, line: Bytes) -> bool {
        if self.stdout.is_some() {
            let is_line = line.ends_with(b"\n");
            self.to_client.put(line, None);
            if !is_line {
                self.to_client.put(Bytes::from_static(b"\n"), None);
            }
        }
        self.to_client.is_below(OUTBOX_MAX)
    }

    /// Nothing more is heard of it.
    pub fn stop_hearing(&mut self) {
        self.stdin = None;
    }

    pub fn close(&mut self) {
        self.stdin = None;
        self.stdout = None;
        self.to_client.clear();
    }

    /// True: there may be more at once.
    pub fn hear(&mut self, cx: &mut Context<'_>, heard: &mut Vec<Heard>) -> bool {
        // Of a client that has gone no more comes than a pipe holds, and behind it stands the end.
        let is_heard = self.is_low() || self.hangups.poll_stdin(cx).is_ready();
        for _ in 0..READS_MAX {
            let Some(stdin) = self.stdin.as_mut().filter(|_| is_heard) else { return false };
            let Poll::Ready(read) = stdin.poll_read(cx, self.from_client.room()) else { return false };
            if matches!(read, Ok(length) if length > 0) {
                while let Some(line) = self.from_client.next_line() {
                    self.judge(line, heard);
                }
                continue;
            }
            self.stdin = None;
            if let Some(line) = self.from_client.rest() {
                self.judge(line, heard);
            }
            heard.push(Heard::Ended);
            return false;
        }
        true
    }

    /// Only JSON passes.
    fn judge(&mut self, line: Line, heard: &mut Vec<Heard>) {
        match line {
            Line::Whole(line) if line.trim_ascii().is_empty() => {}
            Line::Whole(line) => match message::parse(&line) {
                Ok(_) => heard.push(Heard::Said(line)),
                Err(unreadable) => self.to_client.put(unreadable.refusal(), None),
            },
            Line::TooLong(start) => {
                let id = message::id_at_start(&start).map_or("null".to_owned(), |id: Id| id.to_string());
                let why = format!("Request too long: the limit is {} MiB", LINE_MAX >> 20);
                self.to_client.put(message::error_line(&id, -32600, &why, None), None);
            }
        }
    }

    /// Hands over what the pipe takes. True if something changed for others: room was made, or nobody listens.
    pub fn flush(&mut self, cx: &mut Context<'_>, heard: &mut Vec<Heard>) -> bool {
        let Some(stdout) = &mut self.stdout else { return false };
        let was_low = self.to_client.is_below(BYTES_HIGH);
        let is_refused =
            !self.to_client.is_empty() && matches!(self.to_client.poll_flush(stdout, cx), Poll::Ready(Err(_)));
        if is_refused || self.hangups.poll_stdout(cx).is_ready() {
            self.close();
            heard.push(Heard::Broken);
            return true;
        }
        !was_low && self.is_low()
    }
}
