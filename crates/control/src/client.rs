//! The client side of the control socket: blocking calls, each with a deadline.

use std::{
    io::{self, ErrorKind, Read, Write},
    path::Path,
    time::{Duration, Instant},
};

use outlast_os as os;
use serde_json::Value;

use super::{
    method::Method,
    registry::{Entry, Registry},
    wire::{self, Frames, Refusal, Request, Said},
};

/// The shortest read timeout. A caller whose deadline has passed still reads an answer that has arrived by then.
const LAST_LOOK: Duration = Duration::from_millis(1);

#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// The instance answered with a refusal.
    #[error("{}", .0.message)]
    Refused(Refusal),
    #[error("it did not answer in time")]
    TooLate,
    #[error("it ended before it answered")]
    Ended,
    #[error("its answer is not valid")]
    Nonsense,
    #[error(transparent)]
    Os(#[from] io::Error),
}

/// A connection to one instance.
#[derive(Debug)]
pub struct Client {
    line: os::BlockingStream,
    frames: Frames,
    next_id: u64,
}

impl Client {
    pub fn connect(socket: &Path, patience: Duration) -> io::Result<Client> {
        Ok(Client { line: os::BlockingStream::connect(socket, patience)?, frames: Frames::default(), next_id: 1 })
    }

    /// The connection and the bytes that were received on it, for a caller that has switched it to another protocol.
    pub fn into_parts(self) -> (os::BlockingStream, Frames) {
        (self.line, self.frames)
    }

    /// Sends a request and waits for its answer until the deadline. Without a deadline it waits without a limit.
    pub fn ask(&mut self, method: &Method, deadline: Option<Instant>) -> Result<Value, AskError> {
        let id = self.send(method, None)?;
        self.answer_to(id, deadline)
    }

    /// Sends a request, to the instance or to one backend of a gateway.
    pub fn send(&mut self, method: &Method, backend: Option<&str>) -> Result<u64, AskError> {
        let id = self.next_id;
        self.next_id += 1;
        let mut params = method.params();
        if let Some(backend) = backend {
            params["backend"] = backend.into();
        }
        let request = Request { id, method: method.name().to_owned(), params };
        let frame = wire::frame(&request.to_json()).ok_or_else(|| {
            AskError::Refused(Refusal::new("too_long", format!("a request can have at most {} bytes", wire::FRAME_MAX)))
        })?;
        self.line.write_all(&frame).map_err(late)?;
        Ok(id)
    }

    pub fn answer_to(&mut self, id: u64, deadline: Option<Instant>) -> Result<Value, AskError> {
        loop {
            match self.hear(deadline)? {
                // An answer without an id is about the whole connection, and so about this request.
                Said::Answer { id: answered, result } if answered.is_none_or(|answered| answered == id) => {
                    return result.map_err(AskError::Refused);
                }
                Said::Answer { .. } | Said::Record(_) | Said::Unknown => {}
            }
        }
    }

    /// The next message of the instance, an answer or an event.
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

    /// Waits until the instance has exited. Without a deadline it waits without a limit.
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

/// One instance, and the state that it reported.
#[derive(Debug)]
pub struct Found {
    pub entry: Entry,
    /// `None` if the instance runs and did not answer in time.
    pub state: Option<Value>,
}

/// Asks all running instances for their state. All requests are sent before the first answer is read, so the survey
/// takes as long as the slowest instance, not as long as all of them in sequence. Entries of instances that were
/// killed are removed.
pub fn survey(registry: &Registry, patience: Duration) -> Vec<Found> {
    let deadline = Instant::now() + patience;
    let asked: Vec<_> = registry
        .read()
        .into_iter()
        .filter_map(|entry| {
            let asked = Client::connect(&entry.socket, patience).map_err(AskError::Os).and_then(|mut client| {
                let id = client.send(&Method::State, None)?;
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

/// True if an instance that did not answer has exited. If it was killed, its entry and its socket are removed.
pub fn is_gone(registry: &Registry, entry: &Entry) -> bool {
    if !registry.has(&entry.id) {
        return true;
    }
    let is_stale = entry.is_stale();
    if is_stale {
        registry.sweep(entry);
    }
    is_stale
}
