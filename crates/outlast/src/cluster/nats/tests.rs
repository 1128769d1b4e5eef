//! The layer with a real nats-server, which `cargo xtask test` fetches.

use std::{
    env, fs,
    future::poll_fn,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Instant,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;
use tokio::{io::AsyncWriteExt, net::TcpListener, task::LocalSet, time::sleep};

use super::{error::NatsError, *};
use crate::cluster::{Credentials, Tls};

/// The timeout of anything that is waited for.
const WAIT_MAX: Duration = Duration::from_secs(60);

struct Server {
    dir: TempDir,
    program: PathBuf,
    port: i32,
    child: Child,
}

impl Server {
    /// `None` without peers. The message about that bypasses the test harness.
    fn start(test: &str) -> Option<Server> {
        let Some(peers) = env::var_os("OUTLAST_PEERS").filter(|value| !value.is_empty()) else {
            let skipped =
                format!("SKIPPED {test}: no nats-server (OUTLAST_PEERS is not set; `cargo xtask test` sets it)\n");
            std::io::stderr().write_all(skipped.as_bytes()).unwrap();
            return None;
        };
        let program = Path::new(&peers).join("nats/bin/nats-server");
        let dir = tempfile::tempdir().unwrap();
        let child = run(&program, dir.path(), -1);
        let mut server = Server { dir, program, port: -1, child };
        server.wait();
        Some(server)
    }

    /// Until it accepts connections: it writes its port into a file.
    fn wait(&mut self) {
        let file = self.dir.path().join(format!("nats-server_{}.ports", self.child.id()));
        let began = Instant::now();
        loop {
            assert!(began.elapsed() < WAIT_MAX, "nats-server does not start");
            assert!(self.child.try_wait().unwrap().is_none(), "nats-server ended");
            let ports = fs::read(&file).ok().and_then(|text| serde_json::from_slice::<serde_json::Value>(&text).ok());
            if let Some(url) = ports.as_ref().and_then(|ports| ports["nats"][0].as_str()) {
                self.port = url.rsplit(':').next().unwrap().parse().unwrap();
                return;
            }
            std::thread::yield_now();
        }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn restart(&mut self) {
        self.child = run(&self.program, self.dir.path(), self.port);
        self.wait();
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.child.id()).unwrap()), signal).unwrap();
    }

    fn settings(&self, replica: &str) -> NatsSettings {
        NatsSettings {
            servers: vec![format!("nats://127.0.0.1:{}", self.port)],
            cluster: "test".to_owned(),
            prefix: "outlast".to_owned(),
            replica: replica.to_owned(),
            credentials: Credentials::None,
            tls: Tls::default(),
            replicas: 1,
            required: false,
            session_ttl: Duration::from_secs(60),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn run(program: &Path, dir: &Path, port: i32) -> Child {
    let mut command = Command::new(program);
    command.args(["-a", "127.0.0.1", "-p", &port.to_string(), "-js", "-sd"]).arg(dir.join("store"));
    command.arg("--ports_file_dir").arg(dir).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap_or_else(|error| panic!("{}: {error}; `cargo xtask peers` fetches it", program.display()))
}

fn block_on(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let local = LocalSet::new();
    local.block_on(&runtime, test);
    let _entered = runtime.enter();
    drop(local);
}

fn poll_all(nats: &mut Nats, cx: &mut Context<'_>) -> Poll<Heard> {
    match nats.poll(cx) {
        Poll::Pending => nats.poll_message(cx),
        heard => heard,
    }
}

/// Polls all of them; returns what one heard. Answers probes and requests of operators with the text reversed.
async fn any(all: &mut [&mut Nats]) -> (usize, Heard) {
    let one = poll_fn(|cx| {
        for (n, nats) in all.iter_mut().enumerate() {
            if let Poll::Ready(heard) = poll_all(nats, cx) {
                match heard {
                    Heard::Probe { packet, reply, .. } => nats.answer_probe(reply, reversed(&packet)),
                    Heard::Operator { request, reply, .. } => nats.answer(reply, reversed(&request)),
                    heard => return Poll::Ready((n, heard)),
                }
                cx.waker().wake_by_ref();
            }
        }
        Poll::Pending
    });
    timeout(WAIT_MAX, one).await.expect("something happens")
}

fn reversed(bytes: &[u8]) -> Bytes {
    bytes.iter().rev().copied().collect()
}

/// The first that fits, of the replica with this number.
async fn until<T>(all: &mut [&mut Nats], who: usize, mut pick: impl FnMut(&Heard) -> Option<T>) -> T {
    loop {
        let (n, heard) = any(all).await;
        if let Some(found) = (n == who).then(|| pick(&heard)).flatten() {
            return found;
        }
    }
}

async fn connected(all: &mut [&mut Nats]) {
    let mut left: Vec<usize> = (0..all.len()).filter(|n| !all[*n].is_connected()).collect();
    while !left.is_empty() {
        let (n, heard) = any(all).await;
        if let Heard::Connected { .. } = heard {
            left.retain(|other| *other != n);
        }
    }
}

async fn written(all: &mut [&mut Nats], ticket: u64) -> Written {
    until(all, 0, |heard| match heard {
        Heard::Written { ticket: found, result } | Heard::AuditPublished { ticket: found, result }
            if *found == ticket =>
        {
            Some(match result {
                Written::Done(revision) => Written::Done(*revision),
                Written::Conflict => Written::Conflict,
                Written::Unknown(why) => Written::Unknown(why.clone()),
            })
        }
        _ => None,
    })
    .await
}

async fn done(all: &mut [&mut Nats], ticket: u64) -> u64 {
    match written(all, ticket).await {
        Written::Done(revision) => revision,
        other => panic!("{other:?}"),
    }
}

async fn read(nats: &mut Nats, bucket: Bucket, key: &str) -> (u64, Option<Bytes>) {
    nats.read(bucket, key, 99);
    let found = |heard: &Heard| match heard {
        Heard::Read { ticket: 99, found } => Some(found.clone()),
        _ => None,
    };
    until(&mut [nats], 0, found).await.expect("it is read")
}

#[test]
fn replicas_send_packets_probes_and_requests() {
    let Some(server) = Server::start("replicas_send_packets_probes_and_requests") else { return };
    block_on(async {
        let mut a = Nats::connect(server.settings("a"), 0xa, Some("127.0.0.1:1".to_owned()));
        let mut b = Nats::connect(server.settings("b"), 0xb, None);
        let all = &mut [&mut a, &mut b];
        connected(all).await;
        assert!(all[0].server().is_some_and(|found| found.url.ends_with(&server.port.to_string())));
        let max = all[0].payload_max();
        assert!(PAYLOAD_MIN < max && max < 1 << 20, "{max}");

        // More at once than the connection takes.
        for n in 0..1000_u32 {
            all[0].publish(0xb, n.to_be_bytes().to_vec().into());
        }
        all[0].publish(0xb, vec![7; max].into());
        for n in 0..1000_u32 {
            let packet = |heard: &Heard| match heard {
                Heard::Packet { from: 0xa, packet } => Some(packet.clone()),
                _ => None,
            };
            assert_eq!(until(all, 1, packet).await, n.to_be_bytes().to_vec());
        }
        let long = |heard: &Heard| match heard {
            Heard::Packet { from: 0xa, packet } => Some(packet.len()),
            _ => None,
        };
        assert_eq!(until(all, 1, long).await, max);
        assert_eq!(all[0].dropped(), 0);

        let probed = |of: u64| {
            move |heard: &Heard| match heard {
                Heard::ProbeEnded { of: found, result } if *found == of => Some(format!("{result:?}")),
                _ => None,
            }
        };
        all[0].probe(0xb, Bytes::from_static(b"abc"), WAIT_MAX);
        assert_eq!(until(all, 0, probed(0xb)).await, r#"Answered(b"cba")"#);
        all[0].probe(0xc, Bytes::from_static(b"abc"), WAIT_MAX);
        assert_eq!(until(all, 0, probed(0xc)).await, "Dead");
        // The other replica is not polled.
        let [a, _] = all;
        a.probe(0xb, Bytes::from_static(b"abc"), Duration::from_millis(50));
        assert_eq!(until(&mut [a], 0, probed(0xb)).await, "Failed");

        let asked = |heard: &Heard| match heard {
            Heard::Asked { ticket: 5, result } => Some(result.clone()),
            _ => None,
        };
        all[0].ask(0xb, 5, Bytes::from_static(b"state"), WAIT_MAX);
        assert_eq!(until(all, 0, asked).await, Ok(Bytes::from_static(b"etats")));
        all[0].ask(0xc, 5, Bytes::from_static(b"state"), WAIT_MAX);
        assert_eq!(until(all, 0, asked).await, Err("the replica has ended".to_owned()));
    });
}

#[test]
fn buckets_are_written_by_compare_and_swap_and_watched() {
    let Some(server) = Server::start("buckets_are_written_by_compare_and_swap_and_watched") else { return };
    block_on(async {
        let mut a = Nats::connect(server.settings("a"), 0xa, None);
        let mut b = Nats::connect(server.settings("b"), 0xb, None);
        let all = &mut [&mut a, &mut b];
        connected(all).await;
        let value = |text: &'static str| Bytes::from_static(text.as_bytes());
        let [a, b] = all;
        let all = &mut [&mut **a];

        let lease = Bucket::Leases;
        assert_eq!(read(all[0], lease, "x").await, (0, None));
        all[0].write(lease, "x", Expected::Absent, value("one"), 1);
        let first = done(all, 1).await;
        all[0].write(lease, "x", Expected::Absent, value("two"), 2);
        assert!(matches!(written(all, 2).await, Written::Conflict));
        all[0].write(lease, "x", Expected::Revision(first), value("three"), 3);
        let second = done(all, 3).await;
        all[0].write(lease, "x", Expected::Revision(first), value("four"), 4);
        assert!(matches!(written(all, 4).await, Written::Conflict));
        assert_eq!(read(all[0], lease, "x").await, (second, Some(value("three"))));
        all[0].delete(lease, "x", Some(second));
        let changes = |heard: &Heard| match heard {
            Heard::Changed { bucket: Bucket::Leases, key, revision, value } => {
                Some((key.clone(), *revision, value.clone()))
            }
            _ => None,
        };
        // The other replica was not polled so far.
        let other = &mut [&mut **b];
        assert_eq!(until(other, 0, changes).await, ("x".to_owned(), first, Some(value("one"))));
        assert_eq!(until(other, 0, changes).await, ("x".to_owned(), second, Some(value("three"))));
        let deleted = until(other, 0, changes).await;
        assert_eq!((deleted.0.as_str(), deleted.2), ("x", None));
        assert_eq!(read(all[0], lease, "x").await, (deleted.1, None));
        all[0].write(lease, "x", Expected::Absent, value("five"), 5);
        assert!(done(all, 5).await > deleted.1);
        all[0].write(Bucket::State, "shares", Expected::Any, value("six"), 6);
        done(all, 6).await;

        // A replica that comes later gets the current entries.
        let mut c = Nats::connect(server.settings("c"), 0xc, None);
        let (mut lease, mut shares, mut replicas) = (None, None, std::collections::BTreeSet::new());
        let ([a], [b]) = (all, other);
        while lease.is_none() || shares.is_none() || replicas.len() < 3 {
            match any(&mut [&mut **a, &mut **b, &mut c]).await {
                (2, Heard::Changed { bucket: Bucket::Leases, value, .. }) => lease = value,
                (2, Heard::Changed { bucket: Bucket::State, value, .. }) => shares = value,
                (2, Heard::Changed { bucket: Bucket::Replicas, value: Some(value), .. }) => {
                    replicas.insert(Presence::read(&value).unwrap().instance);
                }
                _ => {}
            }
        }
        assert_eq!((lease, shares), (Some(value("five")), Some(value("six"))));
        assert_eq!(replicas, [0xa, 0xb, 0xc].into());
    });
}

#[test]
fn the_audit_stream_takes_each_record_once_and_in_order() {
    let Some(server) = Server::start("the_audit_stream_takes_each_record_once_and_in_order") else { return };
    block_on(async {
        let mut a = Nats::connect(server.settings("a"), 0xa, None);
        let mut b = Nats::connect(server.settings("b"), 0xb, None);
        connected(&mut [&mut a, &mut b]).await;
        let last = |heard: &Heard| match heard {
            Heard::LastAudit { ticket: 1, last } => {
                Some(last.as_ref().unwrap().as_ref().map(|entry| (entry.sequence, entry.id.clone())))
            }
            _ => None,
        };
        a.read_last_audit(1);
        assert_eq!(until(&mut [&mut a], 0, last).await, None);
        let body = |text: &str| Bytes::from(text.to_owned());
        a.publish_audit("a-1".to_owned(), 0, body("1"), 2);
        let first = done(&mut [&mut a], 2).await;
        a.publish_audit("a-2".to_owned(), 0, body("2"), 3);
        assert!(matches!(written(&mut [&mut a], 3).await, Written::Conflict));
        b.publish_audit("b-1".to_owned(), 0, body("b"), 4);
        done(&mut [&mut b], 4).await;
        a.publish_audit("a-2".to_owned(), first, body("2"), 5);
        let second = done(&mut [&mut a], 5).await;
        a.read_last_audit(1);
        assert_eq!(until(&mut [&mut a], 0, last).await, Some((second, "a-2".to_owned())));

        let page = |heard: &Heard| match heard {
            Heard::AuditPage { ticket: 6, page } => {
                let page = page.as_ref().unwrap();
                let text = |entry: &AuditEntry| format!("{} {} {:?}", entry.replica, entry.id, entry.body);
                Some((page.entries.iter().map(text).collect::<Vec<_>>(), page.next))
            }
            _ => None,
        };
        let all = [r#"a a-1 b"1""#, r#"b b-1 b"b""#, r#"a a-2 b"2""#].map(str::to_owned);
        let now = i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_secs()).unwrap();
        for (from, expected) in [
            (AuditFrom::Sequence(0), &all[..]),
            (AuditFrom::Sequence(second), &all[2..]),
            (AuditFrom::Time(now - 3_600), &all[..]),
            (AuditFrom::Time(now + 3_600), &[]),
        ] {
            b.read_audit(from, 6);
            assert_eq!(until(&mut [&mut b], 0, page).await, (expected.to_vec(), None), "{from:?}");
        }
    });
}

#[test]
fn a_name_belongs_to_one_live_replica() {
    let Some(server) = Server::start("a_name_belongs_to_one_live_replica") else { return };
    block_on(async {
        let settings = server.settings("a");
        let mut first = Nats::connect(settings.clone(), 1, Some("127.0.0.1:1".to_owned()));
        connected(&mut [&mut first]).await;
        let mut second = Nats::connect(settings.clone(), 2, None);
        let taken = |heard: &Heard| match heard {
            Heard::NameTaken { by } => Some(by.clone()),
            Heard::Connected { .. } => panic!("two replicas have one name"),
            _ => None,
        };
        let by = until(&mut [&mut first, &mut second], 1, taken).await;
        assert_eq!((by.instance, by.address.as_deref()), (1, Some("127.0.0.1:1")));
        let mut polled = LocalPoll(&mut first);
        let refused = tokio::select! {
            result = check(&settings, 3, true) => result,
            () = &mut polled => unreachable!("it is polled for ever"),
        };
        assert!(matches!(&refused, Err(NatsError::NameTaken { by }) if by.instance == 1), "{refused:?}");

        // A replica that ended at once is replaced at once, and so is one that said good-bye.
        drop(first);
        let mut third = Nats::connect(settings.clone(), 3, None);
        connected(&mut [&mut third]).await;
        third.close().await;
        let mut fourth = Nats::connect(settings.clone(), 4, None);
        connected(&mut [&mut fourth]).await;
        let entry = read(&mut fourth, Bucket::Replicas, "a").await.1.and_then(|entry| Presence::read(&entry));
        assert_eq!(entry.map(|entry| entry.instance), Some(4));
        fourth.close().await;
        assert_eq!(check(&settings, 5, false).await.map(|checked| checked.missing), Ok(vec![]));
    });
}

/// Polls for ever, as a loop does that hears nothing of interest.
struct LocalPoll<'a>(&'a mut Nats);

impl Future for LocalPoll<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        while poll_all(self.0, cx).is_ready() {}
        Poll::Pending
    }
}

#[test]
fn a_lost_connection_ends_what_is_in_flight_and_is_opened_again() {
    let Some(mut server) = Server::start("a_lost_connection_ends_what_is_in_flight_and_is_opened_again") else {
        return;
    };
    block_on(async {
        let mut nats = Nats::connect(server.settings("a"), 1, None);
        connected(&mut [&mut nats]).await;
        nats.write(Bucket::State, "shares", Expected::Absent, Bytes::from_static(b"x"), 1);
        let revision = done(&mut [&mut nats], 1).await;

        server.signal(Signal::SIGSTOP);
        nats.read(Bucket::State, "shares", 2);
        nats.write(Bucket::State, "shares", Expected::Any, Bytes::from_static(b"y"), 3);
        nats.probe(7, Bytes::new(), WAIT_MAX);
        server.kill();
        let mut ended = Vec::new();
        let why = until(&mut [&mut nats], 0, |heard| match heard {
            Heard::Read { ticket: 2, found: Err(_) } => {
                ended.push("read");
                None
            }
            Heard::Written { ticket: 3, result: Written::Unknown(_) } => {
                ended.push("write");
                None
            }
            Heard::ProbeEnded { of: 7, result: Probed::Failed } => {
                ended.push("probe");
                None
            }
            Heard::Disconnected { why } => Some(why.clone()),
            Heard::Changed { .. } | Heard::Watching { .. } => None,
            other => panic!("{other:?}"),
        })
        .await;
        ended.sort_unstable();
        assert_eq!((ended, why.as_str()), (vec!["probe", "read", "write"], "the connection to NATS was lost"));
        assert!(!nats.is_connected() && nats.server().is_none());

        // What is asked for without a connection fails at once, and is not done later.
        nats.publish(1, Bytes::from_static(b"late"));
        nats.write(Bucket::State, "shares", Expected::Any, Bytes::from_static(b"late"), 4);
        assert!(matches!(written(&mut [&mut nats], 4).await, Written::Unknown(_)));
        server.restart();
        connected(&mut [&mut nats]).await;
        let (found, value) = read(&mut nats, Bucket::State, "shares").await;
        assert_eq!((found, value.as_deref()), (revision, Some(&b"x"[..])));
        nats.publish(1, Bytes::from_static(b"own"));
        let packet = |heard: &Heard| match heard {
            Heard::Packet { packet, .. } => Some(packet.clone()),
            _ => None,
        };
        assert_eq!(until(&mut [&mut nats], 0, packet).await, "own", "the late packet was not sent");

        // A server that does not answer is lost, too.
        server.signal(Signal::SIGSTOP);
        until(&mut [&mut nats], 0, |heard| matches!(heard, Heard::Disconnected { .. }).then_some(())).await;
        server.signal(Signal::SIGCONT);
        connected(&mut [&mut nats]).await;
    });
}

#[test]
fn a_watch_goes_on_when_its_consumer_is_lost() {
    let Some(server) = Server::start("a_watch_goes_on_when_its_consumer_is_lost") else { return };
    block_on(async {
        let mut nats = Nats::connect(server.settings("a"), 1, None);
        connected(&mut [&mut nats]).await;
        let changed = |heard: &Heard| match heard {
            Heard::Changed { bucket: Bucket::State, value, .. } => value.clone(),
            _ => None,
        };
        nats.write(Bucket::State, "shares", Expected::Any, Bytes::from_static(b"w"), 1);
        assert_eq!(until(&mut [&mut nats], 0, changed).await, "w");
        let jetstream = nats.up.as_ref().unwrap().link.jetstream.clone();
        let stream = jetstream.get_stream("KV_outlast_v1_test_state").await.unwrap();
        let mut names = stream.consumer_names();
        let mut polled = LocalPoll(&mut nats);
        let deleted = tokio::select! {
            name = task::next(&mut names) => {
                let name = name.unwrap().unwrap();
                stream.delete_consumer(&name).await.unwrap();
                name
            }
            () = &mut polled => unreachable!("it is polled for ever"),
        };
        assert!(!deleted.is_empty());
        // What changes meanwhile is read when the bucket is watched again.
        nats.write(Bucket::State, "shares", Expected::Any, Bytes::from_static(b"x"), 1);
        let lost = |heard: &Heard| match heard {
            Heard::WatchLost { bucket: Bucket::State, why } => Some(why.clone()),
            Heard::Changed { bucket: Bucket::State, value, .. } => panic!("{value:?} was reported by a lost watch"),
            _ => None,
        };
        assert!(!until(&mut [&mut nats], 0, lost).await.is_empty());
        until(&mut [&mut nats], 0, |heard| matches!(heard, Heard::Watching { bucket: Bucket::State }).then_some(()))
            .await;
        assert_eq!(until(&mut [&mut nats], 0, changed).await, "x");
    });
}

#[test]
fn a_watch_of_a_bucket_that_is_made_anew_reports_its_entries() {
    let Some(server) = Server::start("a_watch_of_a_bucket_that_is_made_anew_reports_its_entries") else { return };
    block_on(async {
        let mut nats = Nats::connect(server.settings("a"), 1, None);
        connected(&mut [&mut nats]).await;
        let changed = |heard: &Heard| match heard {
            Heard::Changed { bucket: Bucket::State, value, .. } => value.clone(),
            _ => None,
        };
        for (ticket, value) in [(1, &b"u"[..]), (2, b"v"), (3, b"w")] {
            nats.write(Bucket::State, "shares", Expected::Any, Bytes::from_static(value), ticket);
            assert_eq!(until(&mut [&mut nats], 0, changed).await, value);
        }
        // Its numbers begin at 1 again, below those that were seen.
        let jetstream = nats.up.as_ref().unwrap().link.jetstream.clone();
        let mut polled = LocalPoll(&mut nats);
        let again = async {
            let stream = jetstream.get_stream("KV_outlast_v1_test_state").await.unwrap();
            let config = stream.cached_info().config.clone();
            jetstream.delete_stream("KV_outlast_v1_test_state").await.unwrap();
            jetstream.create_stream(config).await.unwrap();
        };
        tokio::select! {
            () = again => {}
            () = &mut polled => unreachable!("it is polled for ever"),
        }
        nats.write(Bucket::State, "shares", Expected::Any, Bytes::from_static(b"x"), 4);
        assert_eq!(until(&mut [&mut nats], 0, changed).await, "x");
    });
}

#[test]
fn servers_that_cannot_be_used_are_refused() {
    block_on(async {
        let info = |version: &str, max: usize| {
            format!(
                "INFO {{\"server_id\":\"x\",\"version\":\"{version}\",\"headers\":true,\"max_payload\":{max}}}\r\nPONG\r\n"
            )
        };
        for (said, expected) in [
            (info("2.9.25", 1 << 20), "has version 2.9.25, and outlast needs 2.10 or newer"),
            (info("1.4.1", 1 << 20), "has version 1.4.1, and outlast needs 2.10 or newer"),
            (info("2.10.0", 32 << 10), "accepts messages up to 32768 bytes, and outlast needs 65536"),
            (info("2.10.0", 1 << 20).replace("PONG", "-ERR 'Authorization Violation'"), "refuses the credentials"),
            ("HTTP/1.1 400 Bad Request\r\n\r\n".to_owned(), "cannot reach NATS"),
        ] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let url = format!("nats://{}", listener.local_addr().unwrap());
            let settings = NatsSettings {
                servers: vec![url.clone()],
                cluster: "test".to_owned(),
                prefix: "outlast".to_owned(),
                replica: "a".to_owned(),
                credentials: Credentials::None,
                tls: Tls::default(),
                replicas: 1,
                required: false,
                session_ttl: Duration::from_secs(60),
            };
            let serve = async {
                let (mut stream, _) = listener.accept().await.unwrap();
                stream.write_all(said.as_bytes()).await.unwrap();
                sleep(WAIT_MAX).await;
            };
            let result = tokio::select! {
                result = check(&settings, 1, true) => result,
                () = serve => panic!("no answer"),
            };
            let report = result.unwrap_err().report().to_string();
            assert!(report.contains(expected) && report.contains(&url) && report.contains("hint: "), "{report}");
        }
    });
}
