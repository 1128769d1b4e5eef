//! The least cost of an HTTP endpoint in front of one stdio server: no policy and no names. It reads only the id of
//! each message, because all clients share one server and all count from one.
//!
//! `outlast-hop PORT SERVER`. Ids are found where the benchmark's client and server write them: nothing is parsed.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    convert::Infallible,
    env, io,
    ops::Range,
    os::fd::OwnedFd,
    process::{Command, ExitCode, Stdio},
    rc::Rc,
};

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::{
    Request, Response, StatusCode,
    body::Incoming,
    header::{CONTENT_TYPE, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use memchr::{memchr, memmem};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, unix::pipe},
    sync::{Notify, oneshot},
    task::{LocalSet, spawn_local},
};

const INITIALIZE: &[u8] = b"{\"jsonrpc\":\"2.0\",\"id\":0,\"method\":\"initialize\",\"params\":{\"protocolVersion\":\"2025-11-25\",\"capabilities\":{}}}\n{\"jsonrpc\":\"2.0\",\"method\":\"notifications/initialized\"}\n";

#[derive(Default)]
struct Server {
    /// The requests that wait for an answer, by the hop's own id.
    waiting: RefCell<HashMap<u64, oneshot::Sender<Bytes>>>,
    next: Cell<u64>,
    outbox: RefCell<BytesMut>,
    has_more: Notify,
}

impl Server {
    async fn ask(&self, line: &[u8]) -> Option<Bytes> {
        let place = id_of(line)?;
        let id = &line[place.clone()];
        let number = self.next.replace(self.next.get() + 1);
        let (answer, answered) = oneshot::channel();
        self.waiting.borrow_mut().insert(number, answer);
        {
            let mut outbox = self.outbox.borrow_mut();
            outbox.extend_from_slice(&line[..place.start]);
            outbox.extend_from_slice(number.to_string().as_bytes());
            outbox.extend_from_slice(line[place.end..].trim_ascii_end());
            outbox.extend_from_slice(b"\n");
        }
        self.has_more.notify_one();
        let answer = answered.await.ok()?;
        let place = id_of(&answer)?;
        Some([&answer[..place.start], id, &answer[place.end..]].concat().into())
    }

    async fn write(&self, mut pipe: pipe::Sender) {
        loop {
            let batch = self.outbox.borrow_mut().split();
            if batch.is_empty() {
                self.has_more.notified().await;
            } else if pipe.write_all(&batch).await.is_err() {
                return;
            }
        }
    }

    async fn read(&self, mut pipe: pipe::Receiver) {
        let mut buffer = BytesMut::new();
        while pipe.read_buf(&mut buffer).await.is_ok_and(|read| read > 0) {
            while let Some(end) = memchr(b'\n', &buffer) {
                let line = buffer.split_to(end + 1).freeze();
                let number = id_of(&line).and_then(|place| std::str::from_utf8(&line[place]).ok()?.parse().ok());
                if let Some(answer) = number.and_then(|number: u64| self.waiting.borrow_mut().remove(&number)) {
                    let _ = answer.send(line);
                }
            }
            buffer.reserve(64 << 10);
        }
    }
}

fn id_of(message: &[u8]) -> Option<Range<usize>> {
    let start = memmem::find(message, b"\"id\":")? + 5;
    let length = message[start..].iter().position(|byte| matches!(byte, b',' | b'}'))?;
    Some(start..start + length)
}

pub(crate) fn main() -> ExitCode {
    let mut args = env::args().skip(1);
    let (Some(port), Some(server)) = (args.next(), args.next()) else {
        eprintln!("usage: outlast-hop PORT SERVER");
        return ExitCode::from(2);
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    match LocalSet::new().block_on(&runtime, serve(&port, &server)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("outlast-hop: {problem}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(port: &str, program: &str) -> io::Result<()> {
    let mut child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let stdin = pipe::Sender::from_owned_fd(OwnedFd::from(child.stdin.take().expect("stdin is piped")))?;
    let stdout = pipe::Receiver::from_owned_fd(OwnedFd::from(child.stdout.take().expect("stdout is piped")))?;
    let server = Rc::new(Server::default());
    let (writer, reader) = (server.clone(), server.clone());
    spawn_local(async move { writer.write(stdin).await });
    spawn_local(async move { reader.read(stdout).await });
    let opened = server.ask(INITIALIZE).await.ok_or_else(|| io::Error::other("the server does not answer"))?;

    let listener = TcpListener::bind(format!("127.0.0.1:{port}")).await?;
    loop {
        let (peer, _) = listener.accept().await?;
        peer.set_nodelay(true)?;
        let (server, opened) = (server.clone(), opened.clone());
        let service = service_fn(move |request| answer(server.clone(), opened.clone(), request));
        spawn_local(async move {
            let _ = http1::Builder::new().serve_connection(TokioIo::new(peer), service).await;
        });
    }
}

async fn answer(
    server: Rc<Server>,
    opened: Bytes,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let refuse = |status| {
        let mut response = Response::new(Full::default());
        *response.status_mut() = status;
        Ok(response)
    };
    let Ok(body) = request.into_body().collect().await else { return refuse(StatusCode::BAD_REQUEST) };
    let body = body.to_bytes();
    let line = if memmem::find(&body, b"\"method\":\"initialize\"").is_some() {
        // One handshake was made for all clients; each gets its result under its own id.
        let id = id_of(&body).map_or(&b"0"[..], |place| &body[place]);
        let text = String::from_utf8_lossy(&opened).replacen(
            "\"id\":0",
            &format!("\"id\":{}", String::from_utf8_lossy(id)),
            1,
        );
        Bytes::from(text)
    } else if id_of(&body).is_none() {
        return refuse(StatusCode::ACCEPTED);
    } else {
        match server.ask(&body).await {
            Some(line) => line,
            None => return refuse(StatusCode::BAD_GATEWAY),
        }
    };
    let mut response = Response::new(Full::new(line));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}
