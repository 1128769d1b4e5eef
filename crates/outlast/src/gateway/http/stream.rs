//! Messages of a server that belong to no request: the GET stream of a session, kept open, and the one stream of the
//! old transport.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::{
    HeaderMap, Method, Response, StatusCode, Uri,
    body::Incoming,
    header::{ACCEPT, CONTENT_TYPE, HeaderValue},
};
use tokio::{
    sync::mpsc::Sender,
    time::{Instant, sleep, timeout},
};

use super::{
    TaskReport, WaitLimits,
    client::{Failed, Target, origin, resolve},
    events::{Event, Events},
    exchange::{self, Piece, Tries, pieces, read_refusal},
    headers,
};
use crate::child::lines::LINE_MAX;

pub(super) struct Stream {
    pub(super) target: Arc<Target>,
    pub(super) headers: HeaderMap,
    pub(super) limits: WaitLimits,
    pub(super) news: Sender<TaskReport>,
}

impl Stream {
    /// The GET stream of a session. Servers need not have one; if there is one, it is read as long as the session
    /// lasts.
    pub(super) async fn listen(self) {
        let mut events = Events::new(LINE_MAX);
        let mut pause = self.limits.reconnect_first;
        let mut unreachable = Tries::new(&self.limits);
        loop {
            let began = Instant::now();
            match self.ask(&events).await {
                Err(failed) if failed.is_unreachable => {
                    if unreachable.next(None).is_none() {
                        return self.tell(TaskReport::Unreachable(failed.why)).await;
                    }
                }
                Err(_) => {}
                Ok(response) => {
                    unreachable.succeed();
                    match response.status() {
                        StatusCode::METHOD_NOT_ALLOWED => return,
                        StatusCode::TOO_MANY_REQUESTS => {}
                        status if status.is_client_error() => return self.refused(response).await,
                        status if !status.is_success() || !is_events(&response) => {}
                        _ => {
                            events.begin_again();
                            if self.read(response, &mut events).await
                                || began.elapsed() >= self.limits.reconnect_longest
                            {
                                pause = self.limits.reconnect_first;
                            }
                        }
                    }
                }
            }
            // A stream that ends at once without a message is opened again after longer and longer pauses.
            sleep(events.retry_ms.map_or(pause, Duration::from_millis).min(self.limits.reconnect_longest)).await;
            pause = (pause * 2).min(self.limits.reconnect_longest);
        }
    }

    /// A stream that was refused is not requested again in this session.
    async fn refused(&self, response: Response<Incoming>) {
        let refusal = read_refusal(response, &self.limits).await;
        let name = self.target.name();
        let news = match () {
            () if self.headers.contains_key(headers::SESSION) && refusal.forgets_session(None) => TaskReport::Forgotten,
            () if refusal.is_denied() => TaskReport::Denied(refusal.refused(&name, Bytes::new())),
            () => TaskReport::Note(format!("it offers no event stream: {}", refusal.words(&name))),
        };
        self.tell(news).await;
    }

    /// The stream of the old transport: it starts with the address for POST requests, and its end is the end of the
    /// link.
    pub(super) async fn listen_to_old(self) {
        let mut events = Events::new(LINE_MAX);
        let why = match timeout(self.limits.first_byte, self.ask(&events)).await {
            Err(_) => format!("{} sent nothing for {} s", self.target.name(), self.limits.first_byte.as_secs_f32()),
            Ok(Err(failed)) => failed.why,
            Ok(Ok(response)) if !response.status().is_success() => {
                let refusal = read_refusal(response, &self.limits).await;
                let words = refusal.words(&self.target.name());
                if refusal.is_denied() {
                    self.tell(TaskReport::Denied(refusal.refused(&self.target.name(), Bytes::new()))).await;
                }
                words
            }
            Ok(Ok(response)) if !is_events(&response) => {
                format!("{} has no event stream at this address", self.target.name())
            }
            Ok(Ok(response)) => {
                self.read(response, &mut events).await;
                format!("{} ended its stream", self.target.name())
            }
        };
        self.tell(TaskReport::Unreachable(why)).await;
    }

    async fn ask(&self, events: &Events) -> Result<Response<Incoming>, Failed> {
        let mut headers = self.headers.clone();
        headers.insert(ACCEPT, HeaderValue::from_static("text/event-stream"));
        if let Some(id) = events.last_id.as_deref().and_then(|id| HeaderValue::try_from(id).ok()) {
            headers.insert(headers::LAST_EVENT, id);
        }
        self.target.ask(&Method::GET, &self.target.url, &headers, &Bytes::new()).await
    }

    /// Reads to the end. True if there was a message.
    async fn read(&self, response: Response<Incoming>, events: &mut Events) -> bool {
        let mut body = response.into_body();
        let mut heard = false;
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame else { break };
            let Ok(chunk) = frame.into_data() else { continue };
            events.push(&chunk);
            while let Some(event) = events.next_event() {
                heard = true;
                self.hear(event).await;
            }
        }
        heard
    }

    async fn hear(&self, event: Event) {
        let name = self.target.name();
        match event {
            Event::Message(data) => match pieces(&data).await {
                Ok(pieces) => {
                    for Piece { message, answers, walk } in pieces {
                        self.tell(TaskReport::Said { message, answers, within: None, walk }).await;
                    }
                }
                Err(error) => {
                    self.tell(TaskReport::Note(format!("{name}: an event is not JSON and was dropped: {error}"))).await;
                }
            },
            Event::TooLong => self.tell(TaskReport::Note(exchange::too_long(&name))).await,
            Event::Endpoint(reference) => self.tell(self.endpoint(&reference)).await,
        }
    }

    /// The headers may contain credentials, so requests go only to the server itself.
    fn endpoint(&self, reference: &str) -> TaskReport {
        let endpoint: Option<Uri> = resolve(&self.target.url, reference);
        match endpoint.filter(|endpoint| origin(endpoint) == origin(&self.target.url)) {
            Some(endpoint) => TaskReport::Endpoint(endpoint),
            None => TaskReport::Unreachable(format!("{} names another server as its endpoint", self.target.name())),
        }
    }

    async fn tell(&self, news: TaskReport) {
        // The send fails if the link was dropped.
        let _ = self.news.send(news).await;
    }
}

fn is_events(response: &Response<Incoming>) -> bool {
    let kind = response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    kind.trim_start().to_ascii_lowercase().starts_with("text/event-stream")
}
