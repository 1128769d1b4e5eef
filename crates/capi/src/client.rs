//! One connection that several threads may use, one after the other.

use std::{
    path::Path,
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

use outlast::{
    control::client::{self, AskError},
    instances,
};
use serde_json::{Value, json};

use crate::failure::{Failure, Status};

pub struct Client {
    line: Mutex<Line>,
}

enum Line {
    Open(client::Client),
    /// A request went out in part, or nobody is there: whatever came next would make no sense.
    Lost,
}

impl Client {
    /// By id, by name, or by the beginning of an id.
    pub fn named(which: &str, patience: Duration) -> Result<Client, Failure> {
        let entry = instances::find(Some(which)).map_err(|report| Failure::of_report(&report))?;
        Client::at(&entry.socket, patience)
    }

    pub fn at(socket: &Path, patience: Duration) -> Result<Client, Failure> {
        let line = client::Client::connect(socket, patience).map_err(|error| {
            Failure::new(Status::Unreachable, format!("nobody listens at {}\n{error}", socket.display()))
        })?;
        Ok(Client { line: Mutex::new(Line::Open(line)) })
    }

    pub fn ask(&self, method: &str, params: Value, deadline: Option<Instant>) -> Result<Value, Failure> {
        let mut line = self.line()?;
        ask(&mut line, method, params, deadline)
    }

    /// Asks for the end and waits for it.
    pub fn stop(&self, force: bool, deadline: Option<Instant>) -> Result<(), Failure> {
        let mut line = self.line()?;
        ask(&mut line, "stop", json!({"graceful": !force}), deadline)?;
        let Line::Open(client) = &mut *line else { return Err(lost()) };
        client.wait_for_end(deadline)?;
        *line = Line::Lost;
        Ok(())
    }

    fn line(&self) -> Result<MutexGuard<'_, Line>, Failure> {
        self.line.lock().map_err(|_| Failure::new(Status::Broken, "a bug in outlast's library broke this client"))
    }
}

fn ask(line: &mut Line, method: &str, params: Value, deadline: Option<Instant>) -> Result<Value, Failure> {
    let Line::Open(client) = line else { return Err(lost()) };
    let answer = match client.send(method, params) {
        Ok(id) => client.answer_to(id, deadline),
        Err(error) => {
            if !matches!(error, AskError::Refused(_)) {
                *line = Line::Lost;
            }
            return Err(error.into());
        }
    };
    // An answer that is late is known by its id when it comes.
    if let Err(AskError::Ended | AskError::Nonsense | AskError::Os(_)) = answer {
        *line = Line::Lost;
    }
    Ok(answer?)
}

fn lost() -> Failure {
    Failure::new(Status::Unreachable, "the connection is gone; connect again")
}
