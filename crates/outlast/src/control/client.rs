//! The asking side: plain and blocking, with an end to its patience.

use std::{
    io::{self, ErrorKind, Read, Write},
    path::Path,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{
    registry::{Entry, Registry},
    wire::{self, Frames, Refusal, Request, Said},
};
use crate::os;

/// Whoever is late with listening still hears what was said in time.
const LAST_LOOK: Duration = Duration::from_millis(1);

#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// It answered, and would not.
    #[error("{}", .0.message)]
    Refused(Refusal),
    #[error("it did not answer in time")]
    TooLate,
    #[error("it ended before it answered")]
    Ended,
    #[error("what it said made no sense")]
    Nonsense,
    #[error(transparent)]
    Os(#[from] io::Error),
}

/// A connection to one instance.
#[derive(Debug)]
pub struct Client {
    line: os::Line,
    frames: Frames,
    next_id: u64,
}

impl Client {
    pub fn connect(socket: &Path, patience: Duration) -> io::Result<Client> {
        Ok(Client { line: os::Line::connect(socket, patience)?, frames: Frames::default(), next_id: 1 })
    }

    /// The connection itself, for one who has asked for another use of it, and what came on it already.
    pub fn into_parts(self) -> (os::Line, Frames) {
        (self.line, self.frames)
    }

    /// Asks, and waits for the answer: until the deadline, or for as long as it takes.
    pub fn ask(&mut self, method: &str, params: Value, deadline: Option<Instant>) -> Result<Value, AskError> {
        let id = self.send(method, params)?;
        self.answer_to(id, deadline)
    }

    pub fn send(&mut self, method: &str, params: Value) -> Result<u64, AskError> {
        let id = self.next_id;
        self.next_id += 1;
        let request = Request { id, method: method.to_owned(), params };
        let frame = wire::frame(&request.to_json()).ok_or_else(|| {
            AskError::Refused(Refusal::new("too_long", format!("a request may have {} bytes", wire::FRAME_MAX)))
        })?;
        self.line.write_all(&frame).map_err(late)?;
        Ok(id)
    }

    pub fn answer_to(&mut self, id: u64, deadline: Option<Instant>) -> Result<Value, AskError> {
        loop {
            match self.hear(deadline)? {
                // Without an id it is about the connection, and so about us.
                Said::Answer { id: answered, result } if answered.is_none_or(|answered| answered == id) => {
                    return result.map_err(AskError::Refused);
                }
                Said::Answer { .. } | Said::Record(_) | Said::Unknown => {}
            }
        }
    }

    /// Whatever is said next.
    pub fn hear(&mut self, deadline: Option<Instant>) -> Result<Said, AskError> {
        loop {
            match self.frames.next_frame() {
                Ok(Some(frame)) => return Said::read(&frame).ok_or(AskError::Nonsense),
                Ok(None) => {}
                Err(_) => return Err(AskError::Nonsense),
            }
            let patience = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            self.line.set_patience(patience.map(|patience| patience.max(LAST_LOOK)))?;
            let mut bytes = [0; 8 << 10];
            match self.line.read(&mut bytes) {
                Ok(0) => return Err(AskError::Ended),
                Ok(count) => self.frames.room().extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(late(error)),
            }
        }
    }

    /// Waits until the instance is gone: until the deadline, or for as long as it takes.
    pub fn wait_for_end(&mut self, deadline: Option<Instant>) -> Result<(), AskError> {
        loop {
            match self.hear(deadline) {
                Ok(_) => {}
                Err(AskError::Ended) => return Ok(()),
                Err(AskError::Os(error)) if error.kind() == ErrorKind::ConnectionReset => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}

fn late(error: io::Error) -> AskError {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => AskError::TooLate,
        ErrorKind::BrokenPipe => AskError::Ended,
        _ => AskError::Os(error),
    }
}

/// One instance, and what it said of itself when it was asked.
#[derive(Debug)]
pub struct Found {
    pub entry: Entry,
    /// Nothing: it runs, and did not answer in time.
    pub state: Option<Value>,
}

/// Everything that runs, each asked for its state. All are asked before any is listened to, so that it takes as long
/// as the slowest and not as long as all together. What is left of the dead is removed.
pub fn survey(registry: &Registry, patience: Duration) -> Vec<Found> {
    let deadline = Instant::now() + patience;
    let asked: Vec<_> = registry
        .read()
        .into_iter()
        .filter_map(|entry| {
            let asked = Client::connect(&entry.socket, patience).map_err(AskError::Os).and_then(|mut client| {
                let id = client.send("state", json!({}))?;
                Ok((client, id))
            });
            match asked {
                Ok(asked) => Some((entry, Some(asked))),
                Err(_) if is_gone(registry, &entry) => None,
                Err(_) => Some((entry, None)),
            }
        })
        .collect();
    let heard = asked.into_iter().filter_map(|(entry, asked)| {
        let Some((mut client, id)) = asked else { return Some(Found { entry, state: None }) };
        match client.answer_to(id, Some(deadline)) {
            Ok(state) => Some(Found { entry, state: Some(state) }),
            Err(_) if is_gone(registry, &entry) => None,
            Err(_) => Some(Found { entry, state: None }),
        }
    });
    heard.collect()
}

/// Nobody answered: it ended just now, or it was killed, and then its traces are removed.
pub fn is_gone(registry: &Registry, entry: &Entry) -> bool {
    if !registry.has(&entry.id) {
        return true;
    }
    let is_dead = entry.is_dead();
    if is_dead {
        registry.sweep(entry);
    }
    is_dead
}
