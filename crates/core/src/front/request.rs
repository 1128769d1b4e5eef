//! One POST of the stateless era: its answer is one JSON body, or the last event of a stream.

use std::{rc::Rc, time::Instant};

use bytes::Bytes;

use super::{Action, AnswerKind, Limits, Refusal, frames};
use crate::gateway::{Client, Said};

#[derive(Debug)]
pub(super) struct Request<R> {
    client: Client,
    response: R,
    peer: Rc<str>,
    state: State,
}

#[derive(Debug)]
enum State {
    /// The response has not begun.
    Quiet { since: Instant },
    /// It is a stream, and something was sent on it then.
    Events { fed: Instant },
}

impl<R: Clone> Request<R> {
    pub(super) fn new(client: Client, peer: Rc<str>, response: R, now: Instant) -> Request<R> {
        Request { client, response, peer, state: State::Quiet { since: now } }
    }

    pub(super) fn peer(&self) -> &Rc<str> {
        &self.peer
    }

    pub(super) fn into_peer(self) -> Rc<str> {
        self.peer
    }

    pub(super) fn tell(&mut self, message: &Bytes, said: Said, now: Instant, out: &mut Vec<Action<R>>) {
        let is_answer = said != Said::Other;
        let response = self.response.clone();
        if let State::Quiet { .. } = self.state {
            if is_answer {
                let (body, kind) = (message.clone(), AnswerKind::Stateless(said));
                return out.push(Action::Answer { response, session: None, body, kind });
            }
            self.open_events(out);
        }
        self.state = State::Events { fed: now };
        out.push(Action::SendEvent {
            response: response.clone(),
            frame: frames::event(None, message),
            is_missed: false,
        });
        if is_answer {
            out.push(Action::EndEvents { response });
        }
    }

    /// Opens a stream if the answer takes long, and sends pings. Says when to look again.
    pub(super) fn time_passed(&mut self, limits: &Limits, now: Instant, out: &mut Vec<Action<R>>) -> Instant {
        match self.state {
            State::Quiet { since } if now < since + limits.quiet => since + limits.quiet,
            State::Quiet { .. } => {
                self.open_events(out);
                self.ping(limits, now, out)
            }
            State::Events { fed } if now < fed + limits.ping => fed + limits.ping,
            State::Events { .. } => self.ping(limits, now, out),
        }
    }

    /// The gateway has finished with it before it was answered.
    pub(super) fn end(&self, out: &mut Vec<Action<R>>) {
        let response = self.response.clone();
        out.push(match self.state {
            State::Quiet { .. } => Action::Refuse { response, why: Refusal::Stopping },
            State::Events { .. } => Action::EndEvents { response },
        });
    }

    fn open_events(&self, out: &mut Vec<Action<R>>) {
        out.push(Action::OpenEvents { response: self.response.clone(), client: self.client, session: None });
    }

    fn ping(&mut self, limits: &Limits, now: Instant, out: &mut Vec<Action<R>>) -> Instant {
        out.push(Action::Ping { response: self.response.clone() });
        self.state = State::Events { fed: now };
        now + limits.ping
    }
}
