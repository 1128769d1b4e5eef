//! A client of the cluster that sends each request to another replica.

use std::{
    io,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use super::{
    super::{
        http::{Http, Reply},
        ledger::{Answer, HUNG_AFTER},
        message::{Request, meaning},
        random::Random,
    },
    team::{Life, REPLICAS, Team},
};

/// Pause before a request is made again.
const AGAIN: Duration = Duration::from_millis(100);

/// What clients saw besides answers.
#[derive(Default)]
pub(super) struct Seen {
    /// Responses that became a stream, and ended without the answer.
    pub cut_streams: AtomicU64,
    /// Connections that broke with the replica.
    pub broken: AtomicU64,
    /// Sessions that were opened while there were faults.
    pub opened: AtomicU64,
    /// Of these, sessions of a replica that reports local ones.
    pub local: AtomicU64,
}

pub(super) struct Client<'a> {
    team: &'a Team,
    seen: &'a Seen,
    http: Http,
    name: String,
}

impl<'a> Client<'a> {
    pub(super) fn stateless(team: &'a Team, seen: &'a Seen, name: String) -> Client<'a> {
        Client { team, seen, http: Http::stateless("", &team.ledger), name }
    }

    /// A session on this replica. None if the replica ended meanwhile, or refused.
    pub(super) fn open(team: &'a Team, seen: &'a Seen, name: String, life: &Life) -> Option<Client<'a>> {
        match Http::open(&life.address, &team.ledger) {
            Ok(http) => Some(Client { team, seen, http, name }),
            Err(error) => {
                if !life.is_ended.load(Ordering::SeqCst) {
                    team.ledger.breach(format!("{name}: no session: {error}"));
                }
                None
            }
        }
    }

    /// Another client with the same session.
    pub(super) fn again(&self) -> Client<'a> {
        Client { team: self.team, seen: self.seen, http: self.http.again(), name: self.name.clone() }
    }

    /// Makes a call through this replica, and waits for what comes of it. None once the run is over.
    pub(super) fn call(&mut self, life: &Life, part: &'static str, request: &Request) -> Option<u64> {
        let call = self.team.ledger.sent(part, request.is_tool())?;
        self.http.switch(&life.address);
        let message = self.http.message(request, call);
        match self.http.post(&message, request.tool.as_deref()) {
            Ok(reply) => self.take(call, request, &reply),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                self.team.ledger.hung(call);
            }
            Err(error) => {
                if !life.is_ended.load(Ordering::SeqCst) {
                    self.team.ledger.breach(format!(
                        "{}: the connection of call {call} failed, and its replica runs: {error}",
                        self.name
                    ));
                }
                self.seen.broken.fetch_add(1, Ordering::Relaxed);
                self.team.ledger.ended(call);
            }
        }
        Some(call)
    }

    fn take(&self, call: u64, request: &Request, reply: &Reply) {
        let ledger = &self.team.ledger;
        let messages = reply.messages();
        let answers: Vec<_> = messages.iter().filter(|message| message["id"] == call).collect();
        for answer in &answers {
            ledger.answered(call, meaning(answer, call, request.is_echo()));
        }
        if !answers.is_empty() {
            return;
        }
        let text: String = String::from_utf8_lossy(&reply.body).chars().take(200).collect();
        let is_stream = reply.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
        match reply.status {
            // The home of the session was lost after the stream had begun.
            200 if is_stream => {
                self.seen.cut_streams.fetch_add(1, Ordering::Relaxed);
                ledger.ended(call);
            }
            // "Try again": the client may repeat the call, so it must not have run.
            503 => {
                *self.team.unavailable().entry(text).or_default() += 1;
                ledger.answered(call, Answer::NotSent);
            }
            status => {
                if status == 404 || status == 200 {
                    ledger.breach(format!("{}: call {call} got HTTP {status}: {text}", self.name));
                }
                ledger.answered(call, Answer::Refused(format!("HTTP {status}: {text}")));
            }
        }
    }

    /// Calls all the time, until the faults have ended and everything was restored.
    pub(super) fn keep_calling(&mut self, random: &mut Random) {
        while !self.team.is_restored() {
            let pause = Duration::from_millis(random.between(1, 40));
            self.call_any(random);
            thread::sleep(pause);
        }
    }

    /// A usual request through any replica.
    pub(super) fn call_any(&mut self, random: &mut Random) {
        let backends: &[&'static str] =
            if self.http.has_session() { &["each", "one", "own"] } else { &["each", "one"] };
        let backend = backends[random.between(0, backends.len() as u64) as usize];
        let request = Request::any(random, &format!("{backend}__"));
        let replica = random.between(0, REPLICAS.len() as u64) as usize;
        if let Some(life) = self.team.life(replica).filter(|life| !life.is_ended.load(Ordering::SeqCst)) {
            self.call(&life, backend, &request);
        }
    }

    /// After the faults: each backend answers through each replica, without a new `initialize`.
    pub(super) fn must_go_on(&mut self) {
        let backends: &[&'static str] =
            if self.http.has_session() { &["own", "each", "one"] } else { &["each", "one"] };
        for (replica, name) in REPLICAS.into_iter().enumerate() {
            for backend in backends {
                let request = Request::tool(format!("{backend}__echo"), json!({}));
                let deadline = Instant::now() + HUNG_AFTER;
                loop {
                    let call = self.team.life(replica).and_then(|life| self.call(&life, backend, &request));
                    let last = call.and_then(|call| self.team.ledger.last_answer(call));
                    if last == Some(Answer::Done) {
                        break;
                    }
                    if deadline < Instant::now() {
                        let problem =
                            format!("{}: `{backend}` does not answer through replica {name}: {last:?}", self.name);
                        return self.team.ledger.breach(problem);
                    }
                    thread::sleep(AGAIN);
                }
            }
        }
    }
}
