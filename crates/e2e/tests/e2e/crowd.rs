//! Two hundred instances at once: real sockets, each answered by a task of its own.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use outlast_control::{
    client::survey,
    registry::{Entry, Registration, Registry},
};
use outlast_os as os;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::oneshot,
};

use crate::control::World;

const CROWD: usize = 200;
/// The promised time for the whole of `outlast ps`; a debug build gets more. On a machine that is busy with other
/// tests there are several attempts.
const PROMISED: Duration = Duration::from_millis(if cfg!(debug_assertions) { 2000 } else { 100 });
const TRIES: usize = 20;

struct Crowd {
    registrations: Vec<Registration>,
    answering: Answering,
}

/// The thread that answers for all; it ends when this is dropped.
struct Answering {
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Answering {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// Registers instances with the pid of this process, and answers for them; the first `deaf` instances never answer.
fn crowd(registry: &Registry, deaf: usize) -> Crowd {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
    let pid = std::process::id();
    let register = |number: usize| {
        let id = format!("server-{number:03}");
        let socket = registry.dir().join(format!("{id}.sock"));
        let entry = Entry {
            id: id.clone(),
            kind: "mcp".into(),
            name: "server".into(),
            pid,
            born: os::start_stamp(pid).unwrap(),
            started: number as f64,
            cwd: "/srv/project".into(),
            socket: socket.clone(),
            command: "python -m server".into(),
            log: None,
            audit: None,
            program: None,
        };
        let registration = registry.register(&entry).unwrap();
        let listener = {
            let _inside = runtime.enter();
            UnixListener::bind(&socket).unwrap()
        };
        fs::set_permissions(&socket, fs::Permissions::from_mode(0o600)).unwrap();
        runtime.spawn(async move {
            let mut kept = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                if number < deaf {
                    kept.push(stream);
                } else {
                    tokio::spawn(answer(stream));
                }
            }
        });
        registration
    };
    let registrations = (0..CROWD).map(register).collect();
    let (end, ended) = oneshot::channel();
    let thread = thread::spawn(move || drop(runtime.block_on(ended)));
    Crowd { registrations, answering: Answering { end: Some(end), thread: Some(thread) } }
}

async fn answer(mut stream: UnixStream) -> std::io::Result<()> {
    loop {
        let mut body = vec![0; stream.read_u32().await? as usize];
        stream.read_exact(&mut body).await?;
        let request: Value = serde_json::from_slice(&body)?;
        // As long as the state of a server with output on stderr.
        let state =
            json!({"state": "ready", "pid": 4242, "uptime_s": 12.5, "restarts": 0, "stderr_tail": "x".repeat(4000)});
        let answer = json!({"id": request["id"], "ok": state}).to_string();
        stream.write_u32(answer.len() as u32).await?;
        stream.write_all(answer.as_bytes()).await?;
    }
}

fn registry(home: &Path) -> Registry {
    let registry = Registry::of(home);
    os::claim_dir(registry.dir()).unwrap();
    registry
}

#[test]
fn ps_of_two_hundred_answers_at_once() {
    let world = World::new();
    let _crowd = crowd(&registry(world.home.path()), 0);
    let mut quickest = Duration::MAX;
    for _ in 0..TRIES {
        let start = Instant::now();
        let rows = world.ps();
        quickest = quickest.min(start.elapsed());
        assert_eq!(rows.len(), CROWD);
        assert!(rows.iter().all(|row| row["state"] == "ready"), "{rows:?}");
        if quickest < PROMISED {
            break;
        }
    }
    println!("ps of {CROWD} instances took {quickest:?}");
    assert!(quickest < PROMISED, "{quickest:?}");
}

#[test]
fn instances_that_do_not_answer_delay_ps_up_to_its_limit() {
    let world = World::new();
    let registry = registry(world.home.path());
    let _crowd = crowd(&registry, 150);
    let patience = Duration::from_secs(4);
    let start = Instant::now();
    let found = survey(&registry, patience);
    assert!(start.elapsed() < 10 * patience, "one bound for all together, not one for each: {:?}", start.elapsed());
    assert_eq!(found.len(), CROWD);
    assert_eq!(found.iter().filter(|found| found.state.is_none()).count(), 150);
}

#[test]
fn files_of_killed_instances_are_removed() {
    let world = World::new();
    let registry = registry(world.home.path());
    let crowd = crowd(&registry, 0);
    // They end without cleanup, as at a power cut: entries and sockets stay.
    std::mem::forget(crowd.registrations);
    drop(crowd.answering);
    let entries = fs::read_dir(registry.dir()).unwrap().flatten().map(|file| file.path());
    for entry in entries.filter(|path| path.extension().is_some_and(|extension| extension == "json")) {
        let text = fs::read_to_string(&entry).unwrap();
        let mut value: Value = serde_json::from_str(&text).unwrap();
        value["born"] = json!("long ago");
        fs::write(&entry, value.to_string()).unwrap();
    }
    assert_eq!(fs::read_dir(registry.dir()).unwrap().count(), 2 * CROWD);
    assert_eq!(world.ps(), Vec::<Value>::new());
    assert_eq!(fs::read_dir(registry.dir()).unwrap().count(), 0, "neither entry nor socket is left");
}
