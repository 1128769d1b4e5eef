//! A link over HTTP against servers that misbehave, each in one way.

use std::{
    collections::BTreeMap,
    future::{Future, poll_fn},
    rc::Rc,
    time::Duration,
};

use bytes::Bytes;
use outlast::gateway::http::{HttpClient, HttpLink, HttpSettings, LinkEvent, WaitLimits};
use outlast_core::{exit::How, gateway::Refused, message::Id};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    task::LocalSet,
};

/// A request that the server received.
#[derive(Debug, Clone)]
struct Asked {
    method: String,
    path: String,
    headers: BTreeMap<String, String>,
    body: String,
}

impl Asked {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

/// What the server does, in order; afterwards the connection stays open.
enum Act {
    Write(String),
    /// Closes the connection at once.
    Reset,
    Close,
    /// Sends nothing more, and waits for the client to close.
    Hang,
}

fn json(body: &str) -> Vec<Act> {
    respond("200 OK", "content-type: application/json\r\n", body)
}

fn respond(status: &str, headers: &str, body: &str) -> Vec<Act> {
    vec![Act::Write(format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n{body}", body.len()))]
}

/// A stream: its head, and then the bytes of `events`.
fn stream(headers: &str, events: &str) -> Act {
    let head = format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{headers}connection: close\r\n\r\n");
    Act::Write(head + events)
}

fn answer(id: u64) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{"n":{id}}}}}"#)
}

struct Server {
    url: String,
    asked: UnboundedReceiver<Asked>,
}

impl Server {
    /// `reply` gets the request and the number of earlier ones.
    async fn start(reply: impl Fn(&Asked, usize) -> Vec<Act> + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/mcp", listener.local_addr().unwrap());
        let (note, asked) = unbounded_channel();
        let reply = Rc::new(reply);
        let count = Rc::new(std::cell::Cell::new(0));
        tokio::task::spawn_local(async move {
            while let Ok((peer, _)) = listener.accept().await {
                tokio::task::spawn_local(serve(peer, reply.clone(), count.clone(), note.clone()));
            }
        });
        Server { url, asked }
    }

    async fn next(&mut self) -> Asked {
        within(self.asked.recv()).await.unwrap()
    }
}

async fn serve<F: Fn(&Asked, usize) -> Vec<Act>>(
    mut peer: TcpStream,
    reply: Rc<F>,
    count: Rc<std::cell::Cell<usize>>,
    note: UnboundedSender<Asked>,
) {
    while let Some(asked) = read(&mut peer).await {
        let before = count.replace(count.get() + 1);
        let acts = reply(&asked, before);
        let _ = note.send(asked);
        for act in acts {
            match act {
                Act::Write(text) => {
                    if peer.write_all(text.as_bytes()).await.is_err() {
                        return;
                    }
                }
                Act::Reset => {
                    peer.set_zero_linger().unwrap();
                    return;
                }
                Act::Close => return,
                Act::Hang => {
                    let _ = peer.read(&mut [0]).await;
                    return;
                }
            }
        }
    }
}

async fn read(peer: &mut TcpStream) -> Option<Asked> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end + 4;
        }
        if peer.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let mut lines = head.lines();
    let mut first = lines.next()?.split(' ');
    let (method, path) = (first.next()?.to_owned(), first.next()?.to_owned());
    let headers: BTreeMap<_, _> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    let length: usize = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    while bytes.len() < end + length {
        if peer.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
    Some(Asked { method, path, headers, body: String::from_utf8(bytes[end..].to_vec()).unwrap() })
}

/// The limit of a wait; it is reached only if the test fails.
async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future).await.expect("in time")
}

fn limits() -> WaitLimits {
    WaitLimits {
        first_byte: Duration::from_secs(20),
        tries: 3,
        retry_first: Duration::from_millis(1),
        retry_longest: Duration::from_secs(2),
        reconnect_first: Duration::from_millis(1),
        reconnect_longest: Duration::from_millis(20),
        linger: Duration::from_millis(50),
        session_end: Duration::from_secs(20),
    }
}

fn settings(url: &str) -> HttpSettings {
    HttpSettings { url: url.into(), headers: BTreeMap::new(), is_sse: false, limits: limits() }
}

fn connect(settings: &HttpSettings) -> HttpLink {
    HttpLink::connect(&HttpClient::new(Duration::from_secs(10)), settings)
}

fn run(story: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    LocalSet::new().block_on(&runtime, story);
}

/// The next report, except the one that the link fails, which precedes its end.
async fn hear(link: &mut HttpLink) -> LinkEvent {
    loop {
        match hear_all(link).await {
            LinkEvent::Failing(_) => {}
            heard => return heard,
        }
    }
}

async fn hear_all(link: &mut HttpLink) -> LinkEvent {
    within(poll_fn(|cx| link.poll(cx))).await
}

async fn hear_refused(link: &mut HttpLink) -> Refused {
    match hear(link).await {
        LinkEvent::Refused { refused, .. } => *refused,
        other => panic!("{other:?}"),
    }
}

async fn hear_said(link: &mut HttpLink) -> String {
    match hear(link).await {
        LinkEvent::Said(line) | LinkEvent::SaidFor { message: line, .. } => String::from_utf8(line.to_vec()).unwrap(),
        other => panic!("{other:?}"),
    }
}

async fn hear_lost(link: &mut HttpLink) -> (Id, bool, String) {
    match hear(link).await {
        LinkEvent::Lost { id, was_sent, why } => (id, was_sent, why),
        other => panic!("{other:?}"),
    }
}

async fn hear_down(link: &mut HttpLink) -> (String, bool) {
    match hear(link).await {
        LinkEvent::Down { why, is_forgotten } => (why, is_forgotten),
        other => panic!("{other:?}"),
    }
}

fn request(id: u64, method: &str) -> Bytes {
    format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"method\":\"{method}\",\"params\":{{\"name\":\"t\"}}}}\n").into()
}

fn stateless(id: u64, method: &str, params: &str) -> Bytes {
    let meta = r#""_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}"#;
    let comma = if params.is_empty() { "" } else { "," };
    format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{{{meta}{comma}{params}}}}}"#).into()
}

const INITIALIZE: &str =
    r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{}}}"#;
const INITIALIZED: &str = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;
const INITIALIZE_RESULT: &str = r#"{"jsonrpc":"2.0","id":0,"result":{"protocolVersion":"2025-06-18"}}"#;

/// The answers of a correct server of the handshake era to the opening; `None` for other requests.
fn opening(asked: &Asked) -> Option<Vec<Act>> {
    if asked.body.contains("\"initialize\"") {
        let headers = "content-type: application/json\r\nmcp-session-id: s1\r\n";
        return Some(respond("200 OK", headers, INITIALIZE_RESULT));
    }
    if asked.body.contains("notifications/initialized") {
        return Some(respond("202 Accepted", "", ""));
    }
    (asked.method == "GET").then(|| respond("405 Method Not Allowed", "", ""))
}

async fn open(link: &mut HttpLink) {
    link.send(INITIALIZE.into());
    assert_eq!(hear_said(link).await, INITIALIZE_RESULT);
    link.send(INITIALIZED.into());
}

#[test]
fn a_session_is_opened_used_and_closed() {
    run(async {
        let mut server = Server::start(|asked, _| {
            opening(asked).unwrap_or_else(|| match asked.method.as_str() {
                "DELETE" => respond("200 OK", "", ""),
                _ => json(&answer(1)),
            })
        })
        .await;
        let mut settings = settings(&server.url);
        settings.headers.insert("Authorization".into(), "Bearer b".into());
        let mut link = connect(&settings);
        open(&mut link).await;
        // Sent before `initialized` was accepted, but posted after it.
        link.send(request(1, "tools/list"));
        assert_eq!(hear_said(&mut link).await, answer(1));
        link.close(false);
        assert_eq!(hear_down(&mut link).await, ("the link was closed".into(), false));

        let first = server.next().await;
        assert_eq!((first.header("mcp-session-id"), first.header("mcp-protocol-version")), (None, None));
        assert_eq!(first.header("accept"), Some("application/json, text/event-stream"));
        let mut rest = vec![server.next().await];
        assert!(rest[0].body.contains("initialized"));
        rest.extend([server.next().await, server.next().await, server.next().await]);
        for asked in &rest {
            assert_eq!(asked.header("mcp-session-id"), Some("s1"), "{asked:?}");
            assert_eq!(asked.header("mcp-protocol-version"), Some("2025-06-18"), "{asked:?}");
            assert_eq!(asked.header("authorization"), Some("Bearer b"), "{asked:?}");
        }
        assert_eq!(rest.last().unwrap().method, "DELETE");
        assert!(rest.iter().any(|asked| asked.method == "GET"));
    });
}

#[test]
fn the_version_in_a_long_answer_to_initialize_is_used() {
    run(async {
        let long = INITIALIZE_RESULT.replace("}}", &format!(r#","instructions":"{}"}}}}"#, "x".repeat(5 << 20)));
        let mut server = Server::start(move |asked, _| match asked.body.contains("\"initialize\"") {
            true => json(&long),
            false => opening(asked).unwrap_or_else(|| json(&answer(1))),
        })
        .await;
        let mut link = connect(&settings(&server.url));
        link.send(INITIALIZE.into());
        assert!(matches!(hear(&mut link).await, LinkEvent::SaidLong { .. }));
        link.send(INITIALIZED.into());
        server.next().await;
        assert_eq!(server.next().await.header("mcp-protocol-version"), Some("2025-06-18"));
    });
}

#[test]
fn a_stateless_request_repeats_its_method_in_headers() {
    run(async {
        let tools = r#"{"jsonrpc":"2.0","id":1,"result":{"tools":[{"name":"t","inputSchema":{"properties":{"region":{"type":"string","x-mcp-header":"Region"}}}}]}}"#;
        let mut server =
            Server::start(move |_, before| json(if before == 0 { tools } else { r#"{"id":2,"result":{}}"# })).await;
        let mut link = connect(&settings(&server.url));
        link.send(stateless(1, "tools/list", ""));
        hear_said(&mut link).await;
        link.send(stateless(2, "tools/call", r#""name":"t","arguments":{"region":"eu"}"#));
        hear_said(&mut link).await;
        server.next().await;
        let call = server.next().await;
        assert_eq!(call.header("mcp-protocol-version"), Some("2026-07-28"));
        assert_eq!(call.header("mcp-method"), Some("tools/call"));
        assert_eq!(call.header("mcp-name"), Some("t"));
        assert_eq!(call.header("mcp-param-region"), Some("eu"));
        assert_eq!(call.header("mcp-session-id"), None);
        link.close(false);
        assert_eq!(hear_down(&mut link).await, ("the link was closed".into(), false), "there is no session to end");
    });
}

#[test]
fn messages_of_a_stream_are_reported_before_it_ends() {
    run(async {
        let server = Server::start(|_, _| {
            let note = r#"{"jsonrpc":"2.0","method":"notifications/progress"}"#;
            vec![stream("", &format!(": hello\n\ndata: {note}\n\n")), Act::Hang]
        })
        .await;
        let mut link = connect(&settings(&server.url));
        link.send(request(1, "tools/call"));
        let said = hear(&mut link).await;
        assert!(matches!(&said, LinkEvent::SaidFor { id: Id::Integer(1), .. }), "{said:?}");
    });
}

#[test]
fn an_unreachable_server_loses_the_request_and_ends_the_link() {
    run(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/mcp", listener.local_addr().unwrap());
        drop(listener);
        let mut link = connect(&settings(&url));
        link.send(request(1, "tools/call"));
        let (id, was_sent, why) = hear_lost(&mut link).await;
        assert_eq!((id, was_sent), (Id::Integer(1), false));
        assert!(why.starts_with("cannot connect to http://127.0.0.1:"), "{why}");
        assert_eq!(hear_down(&mut link).await, (why, false));
        link.send(request(2, "tools/call"));
        assert_eq!(hear_lost(&mut link).await.0, Id::Integer(2), "and what is sent later is lost too");
    });
}

#[test]
fn a_server_that_starts_late_is_reached() {
    run(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let mut settings = settings(&format!("http://{address}/mcp"));
        settings.limits.retry_first = Duration::from_millis(100);
        settings.limits.tries = 8;
        settings.limits.retry_longest = Duration::from_secs(60);
        let mut link = connect(&settings);
        link.send(request(1, "tools/call"));
        let came = tokio::task::spawn_local(async move {
            let listener = TcpListener::bind(address).await.unwrap();
            let (mut peer, _) = listener.accept().await.unwrap();
            read(&mut peer).await.unwrap();
            let Some(Act::Write(text)) = json(&answer(1)).pop() else { unreachable!() };
            peer.write_all(text.as_bytes()).await.unwrap();
        });
        assert_eq!(hear_said(&mut link).await, answer(1));
        came.await.unwrap();
    });
}

#[test]
fn a_reset_loses_a_call_and_repeats_a_safe_request() {
    run(async {
        let mut server = Server::start(|asked, before| {
            if before == 0 || asked.body.contains("tools/call") { vec![Act::Reset] } else { json(&answer(1)) }
        })
        .await;
        let mut link = connect(&settings(&server.url));
        link.send(request(1, "tools/list"));
        assert_eq!(hear_said(&mut link).await, answer(1));
        link.send(request(2, "tools/call"));
        let (id, was_sent, why) = hear_lost(&mut link).await;
        assert_eq!((id, was_sent), (Id::Integer(2), true), "{why}");
        for _ in 0..3 {
            server.next().await;
        }
        assert!(server.asked.try_recv().is_err(), "a call is not asked twice");
    });
}

#[test]
fn a_lost_session_ends_the_link_and_its_requests() {
    let refusals = [
        (
            "404 Not Found",
            r#"{"jsonrpc":"2.0","id":"server-error","error":{"code":-32600,"message":"Session not found"}}"#,
        ),
        ("404 Not Found", ""),
        (
            "400 Bad Request",
            r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"No valid session ID provided"}}"#,
        ),
    ];
    for (status, body) in refusals {
        run(async move {
            let server = Server::start(move |asked, _| {
                opening(asked).unwrap_or_else(|| match asked.body.contains("\"id\":1,") {
                    true => vec![Act::Hang],
                    false => respond(status, "content-type: application/json\r\n", body),
                })
            })
            .await;
            let mut link = connect(&settings(&server.url));
            open(&mut link).await;
            link.send(request(1, "tools/call"));
            link.send(request(2, "tools/call"));
            let failing = hear_all(&mut link).await;
            assert!(
                matches!(failing, LinkEvent::Failing(How::Forgot(_))),
                "before what is to be sent elsewhere: {failing:?}"
            );
            let (id, was_sent, why) = hear_lost(&mut link).await;
            assert_eq!((id, was_sent), (Id::Integer(2), false), "refused, so not acted on: {why}");
            // Nothing is sent on it any more; open requests continue.
            link.send(request(3, "tools/call"));
            let (id, was_sent, _) = hear_lost(&mut link).await;
            assert_eq!((id, was_sent), (Id::Integer(3), false));
            link.send(r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}"#.into());
            let (id, was_sent, _) = hear_lost(&mut link).await;
            assert_eq!((id, was_sent), (Id::Integer(1), true));
            let (why, is_forgotten) = hear_down(&mut link).await;
            assert!(is_forgotten && why.contains("does not know our session any more"), "{why}");
        });
    }
}

#[test]
fn a_stream_that_cannot_be_resumed_is_not_a_refused_call() {
    run(async {
        let server = Server::start(|asked, _| {
            opening(asked).filter(|_| asked.header("last-event-id").is_none()).unwrap_or_else(|| {
                match asked.header("last-event-id") {
                    Some(_) => respond("404 Not Found", "", "Session not found"),
                    None => vec![stream("", "id: 7\nretry: 1\ndata:\n\n"), Act::Close],
                }
            })
        })
        .await;
        let mut link = connect(&settings(&server.url));
        open(&mut link).await;
        link.send(request(1, "tools/call"));
        let (_, was_sent, why) = hear_lost(&mut link).await;
        assert!(was_sent && why.contains("broke off its answer"), "{why}");
        assert!(hear_down(&mut link).await.1);
    });
}

#[test]
fn late_requests_are_lost_before_the_end_is_reported() {
    run(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/mcp", listener.local_addr().unwrap());
        drop(listener);
        let mut link = connect(&settings(&url));
        link.send(request(1, "tools/call"));
        assert!(matches!(hear_all(&mut link).await, LinkEvent::Failing(How::Lost(_))));
        link.send(request(2, "tools/call"));
        for id in [1, 2] {
            let (lost, was_sent, _) = hear_lost(&mut link).await;
            assert_eq!((lost, was_sent), (Id::Integer(id), false));
        }
        hear_down(&mut link).await;
    });
}

#[test]
fn missing_credentials_are_reported_with_the_challenge() {
    const CHALLENGE: &str = "www-authenticate: Bearer realm=\"a\"\r\ncontent-type: application/json\r\n";
    run(async {
        // For a request, whatever its body.
        let bodies =
            [r#"{"error":"invalid_token"}"#, r#"{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":"no"}}"#, ""];
        for body in bodies {
            let server = Server::start(move |_, _| respond("401 Unauthorized", CHALLENGE, body)).await;
            let mut link = connect(&settings(&server.url));
            link.send(stateless(1, "tools/call", ""));
            let refused = hear_refused(&mut link).await;
            assert_eq!((refused.status, refused.challenge.as_deref()), (401, Some("Bearer realm=\"a\"")), "{body}");
            assert!(refused.words.ends_with("answered 401 Unauthorized"), "{}", refused.words);
        }
        // For a notification, for the stream of a session, and for that of the old transport.
        for refuses in ["POST", "GET"] {
            let server = Server::start(move |asked, _| {
                let is_it = asked.method == refuses && !asked.body.contains("\"initialize\"");
                if is_it { respond("401 Unauthorized", CHALLENGE, "") } else { opening(asked).unwrap() }
            })
            .await;
            let mut link = connect(&settings(&server.url));
            open(&mut link).await;
            let heard = hear(&mut link).await;
            assert!(
                matches!(&heard, LinkEvent::Denied(refused) if refused.challenge.is_some()),
                "{refuses}: {heard:?}"
            );
        }
        let server = Server::start(|_, _| respond("401 Unauthorized", CHALLENGE, "")).await;
        let mut link = connect(&HttpSettings { is_sse: true, ..settings(&server.url) });
        assert!(matches!(hear_all(&mut link).await, LinkEvent::Denied(refused) if refused.status == 401));
        hear_down(&mut link).await;
    });
}

#[test]
fn refusals_are_answers_and_failures_are_not() {
    run(async {
        let server = Server::start(|asked, _| match asked.body.split("\"id\":").nth(1).unwrap().as_bytes()[0] {
            b'1' => respond("401 Unauthorized", "content-type: text/plain\r\n", "no  token\n"),
            b'2' => respond(
                "400 Bad Request",
                "content-type: application/json\r\n",
                r#"{"id":2,"error":{"code":-32020,"message":"m"}}"#,
            ),
            b'3' => respond(
                "400 Bad Request",
                "content-type: application/json\r\n",
                r#"{"id":null,"error":{"code":-32022,"message":"v"}}"#,
            ),
            b'4' => respond(
                "404 Not Found",
                "content-type: application/json\r\n",
                r#"{"id":4,"error":{"code":-32601,"message":"u"}}"#,
            ),
            b'5' => respond("500 Internal Server Error", "content-type: text/html\r\n", "<h1>oops</h1>"),
            _ => respond("202 Accepted", "", ""),
        })
        .await;
        let mut link = connect(&settings(&server.url));
        let url = server.url.strip_suffix("/mcp").unwrap();
        for (id, status, words, body) in
            [(1, 401, "401 Unauthorized", "no token"), (5, 500, "500 Internal Server Error", "<h1>oops</h1>")]
        {
            let line = stateless(id, "tools/call", "");
            link.send(line.clone());
            let refused = hear_refused(&mut link).await;
            assert_eq!((refused.status, refused.words), (status, format!("{url} answered {words}")));
            assert_eq!((refused.body.as_deref(), refused.line), (Some(body), line));
        }
        for (id, code, words) in [(2, -32020, "m"), (3, -32022, "v"), (4, -32601, "u")] {
            link.send(stateless(id, "tools/call", ""));
            let expected = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":{code},"message":"{words}"}}}}"#);
            assert_eq!(hear_said(&mut link).await.trim_end(), expected);
        }
        link.send(stateless(6, "tools/call", ""));
        assert_eq!(hear_lost(&mut link).await.2, "it was accepted without an answer");
    });
}

#[test]
fn a_busy_server_sets_the_pause() {
    run(async {
        let server = Server::start(|_, before| match before {
            0 => respond("503 Service Unavailable", "retry-after: 0\r\n", ""),
            _ => respond("429 Too Many Requests", "retry-after: 3600\r\n", ""),
        })
        .await;
        let mut link = connect(&settings(&server.url));
        for (id, status, seconds) in [(1, 503, 0), (2, 429, 3600)] {
            link.send(request(id, "tools/list"));
            let refused = hear_refused(&mut link).await;
            assert_eq!((refused.status, refused.retry_after), (status, Some(Duration::from_secs(seconds))));
        }
    });
}

#[test]
fn a_response_without_jsonrpc_gets_it() {
    run(async {
        let server = Server::start(|asked, _| match asked.body.contains("\"id\":1,") {
            true => json("\n{\"id\":1,\"result\":{\"jsonrpc\":\"2.0\"}}"),
            false => json(&format!(r#"{{"result":{{"text":"{}"}},"id":2}}"#, "x".repeat(100))),
        })
        .await;
        let mut link = connect(&settings(&server.url));
        link.send(request(1, "tools/call"));
        assert_eq!(hear_said(&mut link).await, r#"{"jsonrpc":"2.0","id":1,"result":{"jsonrpc":"2.0"}}"#);
        link.send(request(2, "tools/call"));
        assert!(hear_said(&mut link).await.starts_with(r#"{"jsonrpc":"2.0","result":"#));
    });
}

#[test]
fn an_invalid_answer_is_lost_with_a_reason() {
    type Reply = fn() -> Vec<Act>;
    let table: [(Reply, &str); 7] = [
        (|| json("{nonsense"), "invalid JSON"),
        (|| json(&answer(99)), "without this request's id"),
        (
            || respond("200 OK", "content-type: text/html\r\n", "<p>"),
            "`text/html`, which is neither JSON nor an event stream",
        ),
        (|| vec![stream("", "data: {\"jsonrpc\":\"2.0\",\"id\":1,\"res"), Act::Close], "broke off its answer"),
        (|| vec![stream("", ""), Act::Close], "broke off its answer"),
        (
            || {
                vec![
                    Act::Write(
                        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{".into(),
                    ),
                    Act::Close,
                ]
            },
            "broke off its answer",
        ),
        (|| vec![Act::Write("SSH-2.0-OpenSSH\r\n".into()), Act::Close], "lost the connection"),
    ];
    for (acts, reason) in table {
        run(async move {
            let server = Server::start(move |_, _| acts()).await;
            let mut link = connect(&settings(&server.url));
            link.send(request(1, "tools/call"));
            let (id, was_sent, why) = hear_lost(&mut link).await;
            assert_eq!((id, was_sent), (Id::Integer(1), true));
            assert!(why.contains(reason), "{why}");
        });
    }
}

#[test]
fn garbage_between_events_is_noted_and_the_answer_arrives() {
    run(async {
        let server =
            Server::start(|_, _| vec![stream("", &format!("data: garbage\n\ndata: {}\n\n", answer(1))), Act::Close])
                .await;
        let mut link = connect(&settings(&server.url));
        link.send(request(1, "tools/call"));
        match hear(&mut link).await {
            LinkEvent::Note(note) => assert!(note.contains("not JSON"), "{note}"),
            other => panic!("{other:?}"),
        }
        assert_eq!(hear_said(&mut link).await, answer(1));
    });
}

#[test]
fn an_answer_over_the_limit_is_lost() {
    run(async {
        let server = Server::start(|asked, _| {
            let mib = "x".repeat(1 << 20);
            let mut acts = vec![match asked.body.contains("\"id\":1") {
                true => Act::Write(
                    "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100000000\r\n\r\n\"".into(),
                ),
                false => stream("", "data: "),
            }];
            acts.extend((0..65).map(|_| Act::Write(mib.clone())));
            acts.push(Act::Write("\n\n".into()));
            acts.push(Act::Hang);
            acts
        })
        .await;
        let mut link = connect(&settings(&server.url));
        for id in [1, 2] {
            link.send(request(id, "tools/call"));
            let (_, was_sent, why) = hear_lost(&mut link).await;
            assert!(was_sent && why.contains("more than 64 MiB"), "{why}");
        }
    });
}

#[test]
fn the_wait_for_a_list_has_a_limit() {
    run(async {
        let server = Server::start(|_, _| vec![Act::Hang]).await;
        let mut settings = settings(&server.url);
        settings.limits.first_byte = Duration::from_millis(10);
        settings.limits.tries = 1;
        let mut link = connect(&settings);
        link.send(request(1, "tools/list"));
        let (_, was_sent, why) = hear_lost(&mut link).await;
        assert!(was_sent && why.contains("sent nothing for"), "{why}");
    });
}

#[test]
fn a_broken_stream_is_resumed_if_possible() {
    run(async {
        let mut server = Server::start(|asked, before| {
            opening(asked).filter(|_| asked.header("last-event-id").is_none()).unwrap_or_else(|| match before {
                _ if asked.header("last-event-id") == Some("7") => {
                    vec![stream("", &format!("id: 8\ndata: {}\n\n", answer(1))), Act::Close]
                }
                _ => vec![stream("", "id: 7\nretry: 1\ndata:\n\ndata: {\"half"), Act::Close],
            })
        })
        .await;
        let mut link = connect(&settings(&server.url));
        open(&mut link).await;
        link.send(request(1, "tools/call"));
        assert_eq!(hear_said(&mut link).await, answer(1));
        let mut resumed = server.next().await;
        while resumed.header("last-event-id").is_none() {
            resumed = server.next().await;
        }
        assert_eq!((resumed.method.as_str(), resumed.header("mcp-session-id")), ("GET", Some("s1")));

        // The stateless era has no resumption.
        link.send(stateless(2, "tools/call", ""));
        assert!(hear_lost(&mut link).await.2.contains("broke off"));
    });
}

#[test]
fn the_stream_of_a_session_is_kept_open() {
    run(async {
        let mut server = Server::start(|asked, _| match asked.method.as_str() {
            "GET" => {
                let next = asked.header("last-event-id").map_or(1, |id| id.parse::<u64>().unwrap() + 1);
                let note = format!(r#"{{"jsonrpc":"2.0","method":"notifications/message","params":{{"n":{next}}}}}"#);
                vec![stream("", &format!("id: {next}\ndata: {note}\n\n")), Act::Close]
            }
            _ => opening(asked).unwrap(),
        })
        .await;
        let mut link = connect(&settings(&server.url));
        open(&mut link).await;
        for next in 1..=3 {
            assert!(hear_said(&mut link).await.contains(&format!("\"n\":{next}")));
        }
        server.next().await;
    });
}

#[test]
fn a_lost_session_is_noticed_without_a_call() {
    run(async {
        let server = Server::start(|asked, before| match asked.method.as_str() {
            "GET" if before < 3 => vec![stream("", ": hello\n\n"), Act::Close],
            "GET" => respond("404 Not Found", "", ""),
            _ => opening(asked).unwrap(),
        })
        .await;
        let mut link = connect(&settings(&server.url));
        open(&mut link).await;
        assert!(hear_down(&mut link).await.1);
    });
}

#[test]
fn cancelling_a_stateless_request_closes_its_stream() {
    run(async {
        let (left, mut has_left) = unbounded_channel();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/mcp", listener.local_addr().unwrap());
        tokio::task::spawn_local(async move {
            let (mut peer, _) = listener.accept().await.unwrap();
            read(&mut peer).await.unwrap();
            let Act::Write(text) = stream("", "data: {\"jsonrpc\":\"2.0\",\"method\":\"m\"}\n\n") else {
                unreachable!()
            };
            peer.write_all(text.as_bytes()).await.unwrap();
            left.send(peer.read(&mut [0]).await.unwrap_or(0)).unwrap();
        });
        let mut link = connect(&settings(&url));
        link.send(stateless(1, "tools/call", ""));
        hear_said(&mut link).await;
        link.send(r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}"#.into());
        assert_eq!(hear_lost(&mut link).await.2, "it was cancelled");
        assert_eq!(within(has_left.recv()).await, Some(0));
    });
}

#[test]
fn cancelling_in_a_session_tells_the_server_and_stops_waiting() {
    run(async {
        let mut server = Server::start(|asked, _| {
            opening(asked).unwrap_or_else(|| match asked.body.contains("cancelled") {
                true => respond("202 Accepted", "", ""),
                false => vec![stream("", ""), Act::Hang],
            })
        })
        .await;
        let mut link = connect(&settings(&server.url));
        open(&mut link).await;
        link.send(request(1, "tools/call"));
        tokio::select! {
            heard = hear(&mut link) => panic!("{heard:?}"),
            () = async { while !server.next().await.body.contains("tools/call") {} } => {}
        }
        link.send(r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}"#.into());
        while !server.next().await.body.contains("cancelled") {}
        assert_eq!(hear_lost(&mut link).await.2, "it was cancelled");
    });
}

#[test]
fn credentials_stay_with_the_server_they_are_for() {
    run(async {
        let mut other = Server::start(|_, _| json(&answer(1))).await;
        let elsewhere = other.url.clone();
        let mut server = Server::start(move |asked, _| match asked.path.as_str() {
            "/mcp" => respond("307 Temporary Redirect", "location: /mcp/\r\n", ""),
            _ if asked.body.contains("\"id\":1") => json(&answer(1)),
            _ => respond("307 Temporary Redirect", &format!("location: {elsewhere}\r\n"), ""),
        })
        .await;
        let mut settings = settings(&server.url);
        settings.headers.insert("authorization".into(), "Bearer b".into());
        let mut link = connect(&settings);
        link.send(request(1, "tools/call"));
        assert_eq!(hear_said(&mut link).await, answer(1), "a redirect at home is followed");
        link.send(request(2, "tools/call"));
        let (_, _, why) = hear_lost(&mut link).await;
        assert!(why.contains("redirects to another server"), "{why}");
        assert!(other.asked.try_recv().is_err());
        server.next().await;
    });
}

#[test]
fn a_batch_is_split() {
    run(async {
        let server =
            Server::start(|_, _| json(&format!("[{},\n{}]", r#"{"jsonrpc":"2.0","method":"m"}"#, answer(1)))).await;
        let mut link = connect(&settings(&server.url));
        link.send(request(1, "tools/call"));
        assert_eq!(hear_said(&mut link).await, r#"{"jsonrpc":"2.0","method":"m"}"#);
        assert_eq!(hear_said(&mut link).await, answer(1));
    });
}

#[test]
fn closing_loses_open_requests() {
    run(async {
        let mut server = Server::start(|_, _| vec![Act::Hang]).await;
        let mut link = connect(&settings(&server.url));
        link.send(request(1, "tools/call"));
        server.next().await;
        link.close(true);
        assert_eq!(hear_lost(&mut link).await.0, Id::Integer(1));
        assert_eq!(hear_down(&mut link).await.0, "the link was closed");
    });
}

#[test]
fn an_invalid_address_is_an_unreachable_server() {
    run(async {
        let mut link = connect(&settings("not an address"));
        assert!(hear_down(&mut link).await.0.starts_with("its url is not valid"));
    });
}

#[test]
fn the_wait_for_tls_has_a_limit() {
    run(async {
        // One refuses TLS, one sends nothing.
        let refuses = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let urls = [&refuses, &silent].map(|listener| format!("https://{}/mcp", listener.local_addr().unwrap()));
        tokio::task::spawn_local(async move {
            while let Ok((mut peer, _)) = refuses.accept().await {
                let _ = peer.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
            }
        });
        for url in urls {
            let mut link = HttpLink::connect(&HttpClient::new(Duration::from_millis(50)), &settings(&url));
            link.send(request(1, "tools/call"));
            let (_, was_sent, why) = hear_lost(&mut link).await;
            assert!(!was_sent && why.starts_with("cannot connect to https://"), "{why}");
            assert_eq!(hear_down(&mut link).await, (why, false));
        }
    });
}

/// The old transport: one stream, which begins with the address for POST requests.
mod old {
    use super::*;

    fn old(server: &Server) -> HttpSettings {
        HttpSettings { is_sse: true, ..settings(&server.url) }
    }

    #[test]
    fn answers_arrive_on_the_stream() {
        run(async {
            let (say, said) = unbounded_channel::<String>();
            let said = Rc::new(std::cell::RefCell::new(Some(said)));
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let url = format!("http://{}/sse", listener.local_addr().unwrap());
            tokio::task::spawn_local(async move {
                while let Ok((mut peer, _)) = listener.accept().await {
                    let (say, said) = (say.clone(), said.clone());
                    tokio::task::spawn_local(async move {
                        while let Some(asked) = read(&mut peer).await {
                            if asked.method == "GET" {
                                let Act::Write(text) = stream("", "event: endpoint\ndata: /post?s=1\n\n") else {
                                    unreachable!()
                                };
                                peer.write_all(text.as_bytes()).await.unwrap();
                                let mut said = said.take().unwrap();
                                while let Some(text) = said.recv().await {
                                    if text.is_empty() {
                                        return;
                                    }
                                    peer.write_all(format!("event: message\r\ndata: {text}\r\n\r\n").as_bytes())
                                        .await
                                        .unwrap();
                                }
                            }
                            assert_eq!(asked.path, "/post?s=1");
                            let Some(Act::Write(text)) = respond("202 Accepted", "", "Accepted").pop() else {
                                unreachable!()
                            };
                            peer.write_all(text.as_bytes()).await.unwrap();
                            say.send(if asked.body.contains("\"id\":1") { answer(1) } else { String::new() }).unwrap();
                        }
                    });
                }
            });
            let mut link = connect(&HttpSettings { is_sse: true, ..settings(&url) });
            // Sent before the address is known.
            link.send(request(1, "tools/call"));
            assert_eq!(hear_said(&mut link).await, answer(1));
            link.send(request(2, "tools/call"));
            let (id, was_sent, why) = hear_lost(&mut link).await;
            assert_eq!((id, was_sent), (Id::Integer(2), true));
            assert!(why.ends_with("ended its stream"), "{why}");
            assert_eq!(hear_down(&mut link).await, (why, false));
        });
    }

    #[test]
    fn nothing_is_posted_to_another_server() {
        run(async {
            let server =
                Server::start(|_, _| vec![stream("", "event: endpoint\ndata: http://127.0.0.1:1/post\n\n"), Act::Hang])
                    .await;
            let mut link = connect(&old(&server));
            link.send(request(1, "tools/call"));
            let (_, was_sent, why) = hear_lost(&mut link).await;
            assert!(!was_sent && why.contains("another server"), "{why}");
            assert_eq!(hear_down(&mut link).await, (why, false));
        });
    }

    #[test]
    fn a_refused_stream_is_an_unreachable_server() {
        run(async {
            let server = Server::start(|_, _| respond("404 Not Found", "", "")).await;
            let mut link = connect(&old(&server));
            let (why, is_forgotten) = hear_down(&mut link).await;
            assert!(!is_forgotten && why.contains("answered 404 Not Found"), "{why}");
        });
    }
}
