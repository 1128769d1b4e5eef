//! The pages of a gateway's HTTP front: health, metrics, and the requests of the status page.

use bytes::Bytes;
use hyper::StatusCode;
use outlast_control::wire::Refusal;
use serde_json::{Value, json};

use super::{
    Driver, Operator, Stopping,
    listen::{Page, PageAnswer},
    metrics::{self, BackendGauges, ClusterFigures},
    operator::cluster::ClusterRequest,
    state::Placed,
};

/// Marks the tickets of pages among those of the control socket.
const PAGE: u64 = 1 << 63;
/// The methods that a page may call.
const ORDERS: [&str; 4] = ["restart", "resume", "switch", "reload"];

impl Driver {
    pub(super) fn turn_page(&mut self, page: Page) {
        let ticket = page.ticket;
        let answer = match (page.method.as_str(), page.path.as_str()) {
            ("GET", "/health") => self.health(),
            ("GET", "/ready") => self.readiness(),
            ("GET", "/metrics") => {
                let backends = self.gateway.status(self.now).backends.into_iter();
                let backends: Vec<BackendGauges> = backends.map(BackendGauges::from).collect();
                let clients = self.client_counts();
                self.metrics.set_cluster(self.cluster_state().as_ref().map(ClusterFigures::of).as_ref());
                self.metrics.set_turn(self.turns.take());
                let body = Bytes::from(self.metrics.text(&backends, &clients));
                PageAnswer { status: StatusCode::OK, kind: metrics::KIND, headers: Vec::new(), body }
            }
            // Errors and stderr of backends are not shown to every client that may call a tool.
            (_, path) if path.starts_with("/api/") && !self.gateway.is_operator(&page.who) => {
                refuse(StatusCode::FORBIDDEN, "only a role that may call every tool may see and control the gateway")
            }
            ("GET", "/api/state") => json_page(StatusCode::OK, &self.state(None)),
            ("GET", "/api/cluster") => match self.ask_cluster(ticket | PAGE, ClusterRequest::State) {
                Some(answer) => answer_page(&answer),
                None => return,
            },
            ("GET", "/api/events") => {
                if let Some(listen) = &mut self.listen {
                    listen.watch(ticket);
                    listen.publish(Some(ticket), "history", &self.recent.json(self.now));
                }
                return;
            }
            ("POST", path) => match self.order(&page, path) {
                Some(answer) => answer,
                None => return,
            },
            _ => refuse(StatusCode::NOT_FOUND, "there is no such page"),
        };
        self.show(ticket, answer);
    }

    /// `None` if the request is answered later.
    fn order(&mut self, page: &Page, path: &str) -> Option<PageAnswer> {
        let method = path.strip_prefix("/api/").filter(|method| ORDERS.contains(method));
        let Some(method) = method else { return Some(refuse(StatusCode::NOT_FOUND, "there is no such page")) };
        let params: Value = match page.body.as_ref() {
            b"" => json!({}),
            body => match serde_json::from_slice(body) {
                Ok(params @ Value::Object(_)) => params,
                _ => return Some(refuse(StatusCode::BAD_REQUEST, "expected a JSON object")),
            },
        };
        let operator = Operator { who: page.who.name.clone(), peer: Some(page.peer.to_string()) };
        self.asked_by(operator, page.ticket | PAGE, method, &params).map(|answer| answer_page(&answer))
    }

    /// Answers a request of the control socket or of a page.
    pub(super) fn answer_asked(&mut self, ticket: u64, answer: &Result<Value, Refusal>) {
        if self.answer_replica(ticket, answer) {
        } else if ticket & PAGE == 0 {
            self.control.answer(ticket, answer);
        } else {
            self.show(ticket & !PAGE, answer_page(answer));
        }
    }

    fn show(&mut self, ticket: u64, answer: PageAnswer) {
        if let Some(listen) = &mut self.listen {
            listen.answer_page(ticket, answer);
        }
    }

    /// The process answers, so it is alive.
    fn health(&self) -> PageAnswer {
        json_page(StatusCode::OK, &json!({"status": "ok", "version": env!("CARGO_PKG_VERSION")}))
    }

    /// Ready for calls: every backend has started once or has failed, and the gateway is not stopping.
    fn readiness(&self) -> PageAnswer {
        let mut backends = serde_json::Map::new();
        let mut is_ready = self.stopping == Stopping::No;
        for backend in self.gateway_state().backends {
            // A backend that another replica may run does not keep this one from serving.
            let is_placed = matches!(backend.placed, Some(Placed::One { .. }));
            is_ready &= backend.state != Some("starting") || backend.restarts != 0 || is_placed;
            let of_backend = json!({"state": backend.state, "next_try_s": backend.next_try_s});
            backends.insert(backend.name, of_backend);
        }
        let status = if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        let mut page = json!({"ready": is_ready, "backends": backends});
        // Without NATS the gateway still serves what it can alone.
        if let Some(cluster) = self.cluster_state() {
            page["cluster"] = json!({"name": cluster.name, "connected": cluster.nats.connected});
        }
        json_page(status, &page)
    }
}

fn json_page(status: StatusCode, value: &Value) -> PageAnswer {
    let body = Bytes::from(format!("{value}\n"));
    PageAnswer { status, kind: "application/json", headers: Vec::new(), body }
}

fn refuse(status: StatusCode, why: &str) -> PageAnswer {
    json_page(status, &json!({"error": {"code": "refused", "message": why}}))
}

fn answer_page(answer: &Result<Value, Refusal>) -> PageAnswer {
    match answer {
        Ok(value) => json_page(StatusCode::OK, value),
        Err(refusal) => {
            let error = json!({"code": refusal.code, "message": refusal.message});
            json_page(StatusCode::CONFLICT, &json!({"error": error}))
        }
    }
}
