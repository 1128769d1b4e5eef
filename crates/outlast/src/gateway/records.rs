//! What the gateway writes into the audit log: calls, refusals, and requests of operators. Refusals that repeat are counted
//! and not written one by one.

use outlast_core::{
    gateway::{Called, Outcome, RefusedNotification, Sender},
    record::{self, OfGateway, Record},
};

use super::{Driver, STDIO_CLIENT, listen};
use crate::{
    cli::report,
    state::journal::{Origin, SessionLabel},
};

impl Driver {
    pub(super) fn called(&mut self, called: &Called) {
        self.metrics.called(called);
        if is_refused(called.outcome) {
            match self.refusals.add(called.outcome.name(), self.now) {
                None => return,
                Some(0) => {}
                Some(suppressed) => self.suppressed(called.outcome.name(), suppressed),
            }
        }
        let origin = self.origin(called.client);
        let line = self.calls.add(called, &origin, &mut self.journal, self.now);
        self.control.record(line);
        Driver::publish_to(&mut self.listen, "record", line);
    }

    /// Records refusals that were counted and not written one by one.
    pub(super) fn suppressed(&mut self, kind: &'static str, count: u64) {
        let of = OfGateway { outcome: Some(kind), suppressed: Some(count), ..OfGateway::default() };
        self.record(Record { gateway: Some(Box::new(of)), ..Record::new(record::Event::RequestRefused) });
    }

    /// The front refused a request.
    pub(super) fn refused(&mut self, refused: listen::Refused) {
        self.metrics.refused(refused.kind);
        let Some(suppressed) = self.refusals.add(refused.kind, self.now) else { return };
        let told: serde_json::Value = serde_json::from_slice(&refused.told).unwrap_or_default();
        let reason = told["error"]["message"].as_str().map(str::to_owned);
        let of = OfGateway {
            who: refused.who.as_ref().map(|who| who.name.clone()),
            role: refused.who.as_ref().and_then(|who| who.role.clone()),
            method: Some(format!("{} {}", refused.method, report::plain(&refused.path))),
            outcome: Some(refused.kind),
            peer: Some(refused.peer.to_string()),
            session: refused.session.map(|digits| SessionLabel::Http(digits).to_string()),
            suppressed: Some(suppressed).filter(|count| *count > 0),
            ..OfGateway::default()
        };
        self.record(Record { reason, gateway: Some(Box::new(of)), ..Record::new(record::Event::RequestRefused) });
    }

    pub(super) fn notification_refused(&mut self, refused: RefusedNotification) {
        const KIND: &str = "unknown_notification";
        self.metrics.refused(KIND);
        let Some(suppressed) = self.refusals.add(KIND, self.now) else { return };
        let mut of = OfGateway {
            method: Some(report::plain(&refused.method)),
            outcome: Some(KIND),
            suppressed: Some(suppressed).filter(|count| *count > 0),
            ..OfGateway::default()
        };
        match refused.from {
            Sender::Client { client, who } => {
                let origin = self.origin(client);
                of.who = Some(who.name.clone());
                of.role = who.role.clone();
                of.peer = origin.peer.map(|peer| peer.to_string());
                of.session = origin.session.map(|session| session.to_string());
            }
            Sender::Backend(name) => of.backend = Some(name.to_string()),
        }
        let reason = Some("only notifications of MCP are forwarded".to_owned());
        self.record(Record { reason, gateway: Some(Box::new(of)), ..Record::new(record::Event::RequestRefused) });
    }

    /// The address and the session of a client.
    pub(super) fn origin(&self, client: u64) -> Origin {
        match (client, &self.listen) {
            (STDIO_CLIENT, _) => Origin { peer: None, session: Some(SessionLabel::Stdio) },
            (client, Some(listen)) => listen.origin(client),
            (_, None) => Origin::default(),
        }
    }

    pub(super) fn record(&mut self, mut record: Record) {
        // The machine knows its backends by name, and not the name of the gateway.
        if record.kind == Some("backend")
            && let Some(name) = record.id.take()
        {
            record = record.of_backend(&name);
        }
        // The record of an operator's request names the operator.
        if matches!(record.event, record::Event::Switched | record::Event::ServerRestartRequested)
            && let Some(operator) = &self.operator
        {
            let of = record.gateway.get_or_insert_default();
            of.who.get_or_insert_with(|| operator.who.clone());
            of.peer = of.peer.take().or_else(|| operator.peer.clone());
        }
        self.calls.write(&mut self.journal);
        let line = self.journal.record(record);
        self.control.record(&line);
        self.publish("record", &line);
        self.recent.add(&line, self.now);
    }

    /// One record for each request of an operator.
    pub(super) fn operator_requested(&mut self, method: &str, target: Option<&str>, reason: Option<&str>) {
        let operator = self.operator.clone().unwrap_or_default();
        let detail = target.map_or_else(|| method.to_owned(), |target| format!("{method} {target}"));
        let of = OfGateway {
            who: Some(operator.who),
            peer: operator.peer,
            method: Some(method.to_owned()),
            ..OfGateway::default()
        };
        let record = Record::new(record::Event::OperatorRequested);
        let reason = reason.map(str::to_owned);
        self.record(Record { detail: Some(detail), reason, gateway: Some(Box::new(of)), ..record });
    }

    pub(super) fn configured(&mut self, detail: &str, who: &str) {
        self.reload.failed = None;
        let of = OfGateway { who: Some(who.to_owned()), ..OfGateway::default() };
        let record = Record::new(record::Event::Configured);
        self.record(Record { detail: Some(detail.to_owned()), gateway: Some(Box::new(of)), ..record });
    }

    pub(super) fn refuse_config(&mut self, why: &str, who: &str) {
        let reason = "the configuration was refused, and the previous one stays in force".to_owned();
        let of = OfGateway { who: Some(who.to_owned()), ..OfGateway::default() };
        let record = Record { gateway: Some(Box::new(of)), ..Record::new(record::Event::ReloadFailed) };
        self.record(Record { reason: Some(reason), detail: Some(why.to_owned()), ..record });
        self.reload.failed = Some((self.now, why.to_owned()));
    }
}

/// Whether a call was refused by a guard, or named something that does not exist. Clients can cause any number of
/// these.
fn is_refused(outcome: Outcome) -> bool {
    matches!(
        outcome,
        Outcome::SwitchedOff
            | Outcome::RateLimited
            | Outcome::Denied
            | Outcome::BadArguments
            | Outcome::CircuitOpen
            | Outcome::Unknown
    )
}
