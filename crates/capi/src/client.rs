//! One connection, which several threads may use in turn.

use std::{
    path::Path,
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

use outlast_control::{
    client::{self, AskError},
    find,
    method::{Method, Stop},
};
use serde_json::Value;

use crate::failure::{Failure, Status};

pub struct Client {
    line: Mutex<Connection>,
}

enum Connection {
    Open(client::Client),
    /// A request was sent in part, or the instance has disconnected: later answers could not be matched to requests.
    Lost,
}

impl Client {
    /// By id, by name, or by the beginning of an id.
    pub fn named(which: &str, patience: Duration) -> Result<Client, Failure> {
        let entry = find::find(Some(which))?;
        Client::at(&entry.socket, patience)
    }

    pub fn at(socket: &Path, patience: Duration) -> Result<Client, Failure> {
        let line = client::Client::connect(socket, patience).map_err(|error| {
            Failure::new(Status::Unreachable, format!("no process listens at {}\n{error}", socket.display()))
        })?;
        Ok(Client { line: Mutex::new(Connection::Open(line)) })
    }

    pub fn ask(&self, method: &Method, deadline: Option<Instant>) -> Result<Value, Failure> {
        let mut line = self.line()?;
        ask(&mut line, method, deadline)
    }

    /// Asks the instance to stop and waits until it has exited.
    pub fn stop(&self, force: bool, deadline: Option<Instant>) -> Result<(), Failure> {
        let mut line = self.line()?;
        ask(&mut line, &Method::Stop(Stop { graceful: Some(!force) }), deadline)?;
        let Connection::Open(client) = &mut *line else { return Err(lost()) };
        client.wait_for_end(deadline)?;
        *line = Connection::Lost;
        Ok(())
    }

    fn line(&self) -> Result<MutexGuard<'_, Connection>, Failure> {
        self.line.lock().map_err(|_| Failure::new(Status::Broken, "a bug in outlast's library broke this client"))
    }
}

fn ask(line: &mut Connection, method: &Method, deadline: Option<Instant>) -> Result<Value, Failure> {
    let Connection::Open(client) = line else { return Err(lost()) };
    let answer = match client.send(method, None) {
        Ok(id) => client.answer_to(id, deadline),
        Err(error) => {
            if !matches!(error, AskError::Refused(_)) {
                *line = Connection::Lost;
            }
            return Err(error.into());
        }
    };
    // A late answer is recognised by its id when it arrives.
    if let Err(AskError::Ended | AskError::Nonsense | AskError::Os(_)) = answer {
        *line = Connection::Lost;
    }
    Ok(answer?)
}

fn lost() -> Failure {
    Failure::new(Status::Unreachable, "the connection is gone; connect again")
}
