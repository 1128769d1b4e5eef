//! The HTTP front as stories: clients post and listen, the gateway answers, and a store writes records.

use std::{
    rc::Rc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use outlast_core::{
    front::{
        Action, Event, HttpFront, Limits, Loaded, NoStream, Posted, Refusal, STORE_MAX, SessionId,
        record::{Change, RECORD_BYTES_MAX, Record, RecordKey, SessionState},
    },
    gateway::{Client, Said, Who},
    message::{Id, result_line},
};

const HOUR: Duration = Duration::from_secs(3600);

fn limits() -> Limits {
    Limits {
        sessions_max: 3,
        sessions_of_client_max: 2,
        session_ttl: HOUR,
        ping: Duration::from_secs(15),
        quiet: Duration::from_secs(10),
        events_max: 4,
        events_bytes_max: 4096,
        events_total_max: 8192,
    }
}

fn who(name: &str) -> Rc<Who> {
    Rc::new(Who { name: name.into(), role: None, profile: None })
}

fn key(id: SessionId) -> RecordKey {
    RecordKey(id + 1000)
}

/// A front and its last actions. The test chooses the numbers of responses.
struct Story {
    front: HttpFront<u32>,
    now: Instant,
    done: Vec<Action<u32>>,
}

impl Story {
    #[expect(clippy::disallowed_methods, reason = "a story needs some instant to count from")]
    fn new(hash: Option<fn(SessionId) -> RecordKey>) -> Story {
        Story { front: HttpFront::new(limits(), hash), now: Instant::now(), done: Vec::new() }
    }

    fn event(&mut self, event: Event<u32>) -> &mut Story {
        self.done.clear();
        self.front.handle(event, self.now, &mut self.done);
        self
    }

    fn pass(&mut self, time: Duration) -> &mut Story {
        self.now += time;
        self.event(Event::TimePassed)
    }

    /// Posts `initialize`, which is not answered yet. The session's id is the client's number.
    fn open(&mut self, client: Client, name: &str, message: &str) -> &mut Story {
        self.event(Event::Opened {
            client,
            who: who(name),
            is_known: true,
            peer: "peer".into(),
            id: Id::Integer(0),
            message: Bytes::copy_from_slice(message.as_bytes()),
            response: client as u32,
            random: client.into(),
        })
    }

    fn told(&mut self, client: Client, id: i128) -> &mut Story {
        let about = Id::Integer(id);
        let message = result_line(&about, r#"{"protocolVersion":"2025-11-25"}"#);
        self.event(Event::Told { client, message, about: Some(about), said: Said::Result })
    }

    fn say(&mut self, client: Client, about: Option<i128>) -> &mut Story {
        let message = Bytes::from_static(br#"{"jsonrpc":"2.0","method":"word"}"#);
        let about = about.map(Id::Integer);
        self.event(Event::Told { client, message, about, said: Said::Other })
    }

    fn post(&mut self, client: Client, id: i128, response: u32, change: Option<Change>) -> &mut Story {
        let requests = Posted::One { id: Id::Integer(id), message: Bytes::new(), outline: None, change };
        self.event(Event::Posted { client, peer: "peer".into(), requests, response })
    }

    fn stored(&mut self, client: Client, write: u32, is_ok: bool) -> &mut Story {
        self.event(Event::Stored { client, write, is_ok })
    }

    fn listen(&mut self, client: Client, id: SessionId, name: &str, last: Option<&str>, response: u32) -> &mut Story {
        let stream = self.front.session(id, &who(name)).unwrap().stream(last).unwrap();
        self.event(Event::Listened { client, stream, response })
    }

    /// The last actions, in words.
    fn words(&self) -> Vec<String> {
        let word = |action: &Action<u32>| match action {
            Action::SessionCame { client, who } => format!("came {client} {}", who.name),
            Action::SessionRestored { client, state, .. } => {
                format!("restored {client} {:?} {:?}", state.level, state.watches)
            }
            Action::RequestCame { client, .. } => format!("request {client}"),
            Action::Said { client, .. } | Action::SaidLong { client, .. } => format!("said {client}"),
            Action::Left { client, .. } => format!("left {client}"),
            Action::Answer { response, session, .. } => match session {
                Some(id) => format!("answer {response} opens {id}"),
                None => format!("answer {response}"),
            },
            Action::Refuse { response, why } => {
                format!("refuse {response} {}", if *why == Refusal::Stopping { "stopping" } else { "ended" })
            }
            Action::OpenEvents { response, .. } => format!("events {response}"),
            Action::SendEvent { response, frame, .. } => {
                let text = String::from_utf8_lossy(frame);
                let id = text.lines().next().unwrap_or_default().trim_start_matches("id: ").to_owned();
                format!("send {response} {id}")
            }
            Action::Ping { response } => format!("ping {response}"),
            Action::EndEvents { response } => format!("end {response}"),
            Action::Store { key, write, .. } => format!("store {key:?} {write}"),
            Action::Unstore { key } => format!("unstore {key:?}"),
        };
        self.done.iter().map(word).collect()
    }

    #[track_caller]
    fn did(&mut self, words: &[&str]) -> &mut Story {
        assert_eq!(self.words(), words);
        self
    }
}

const INITIALIZE: &str = r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{}}"#;

#[test]
fn a_session_is_stored_before_initialize_is_answered() {
    let mut story = Story::new(Some(key));
    story.open(7, "anna", INITIALIZE).did(&["came 7 anna", "said 7"]);
    story.told(7, 0).did(&["store RecordKey(1007) 1"]);
    assert!(story.front.session(7, &who("anna")).is_none(), "its id is not told yet");
    story.stored(7, 1, true).did(&["answer 7 opens 7"]);
    assert!(story.front.session(7, &who("anna")).is_some());
    assert!(story.front.session(7, &who("bert")).is_none());
    // A call does not wait for the store.
    story.post(7, 1, 20, None).did(&["said 7"]).told(7, 1).did(&["answer 20"]);
    // The end of the session removes the record.
    story.event(Event::Ended { client: 7 }).did(&["unstore RecordKey(1007)", "left 7"]);
}

#[test]
fn open_requests_of_a_session_that_moved_are_answered_and_not_refused() {
    let mut story = Story::new(Some(key));
    story.open(7, "anna", INITIALIZE).told(7, 0).stored(7, 1, true);
    story.post(7, 1, 20, None).pass(limits().quiet).did(&["events 20", "send 20 2-1-n1"]);
    story.post(7, 2, 21, None);
    story.event(Event::Moved { key: key(7) });
    let words = story.words();
    assert!(words[0].starts_with("send 20 "), "{words:?}");
    assert_eq!(words[1..], ["end 20", "answer 21", "left 7"]);
    let Some(Action::Answer { body, .. }) = story.done.get(2) else { panic!("{words:?}") };
    let answer: serde_json::Value = serde_json::from_slice(body).unwrap();
    assert_eq!((&answer["id"], &answer["error"]["code"]), (&2.into(), &7001.into()));
    assert_eq!(answer["error"]["data"]["outcome"], "unknown");
    assert!(!story.front.has_session(7));
}

#[test]
fn an_answer_waits_one_second_for_the_store() {
    for is_late in [true, false] {
        let mut story = Story::new(Some(key));
        story.open(7, "anna", INITIALIZE).told(7, 0);
        match is_late {
            true => story.pass(STORE_MAX - Duration::from_millis(1)).did(&[]).pass(Duration::from_millis(1)),
            false => story.stored(7, 1, false),
        };
        story.did(&["answer 7 opens 7"]);
        assert_eq!(story.front.counts(story.now).sessions_unrecorded, 1);
        // After a later write that succeeds, it is a session like any other.
        story.post(7, 1, 20, Some(Change::Level("info".into()))).told(7, 1).did(&["store RecordKey(1007) 2"]);
        story.stored(7, 2, true).did(&["answer 20"]);
        assert_eq!(story.front.counts(story.now).sessions_unrecorded, 0);
    }
}

#[test]
fn an_initialize_that_is_too_long_is_answered_at_once_and_not_stored() {
    let mut story = Story::new(Some(key));
    story.open(7, "anna", &"x".repeat(RECORD_BYTES_MAX + 1)).told(7, 0).did(&["answer 7 opens 7"]);
    assert_eq!(story.front.counts(story.now).sessions_unrecorded, 1);
    story.post(7, 1, 20, Some(Change::Level("info".into()))).told(7, 1).did(&["answer 20"]);
    story.event(Event::Ended { client: 7 }).did(&["left 7"]);
}

fn loaded(id: SessionId, name: &str, age: Duration) -> Loaded {
    let state = SessionState {
        version: "2025-11-25".into(),
        initialize: INITIALIZE.into(),
        level: Some("error".into()),
        watches: ["file:///a".into()].into(),
    };
    Loaded { key: key(id), record: Record { who: (*who(name)).clone(), state }, age }
}

#[test]
fn a_stored_session_is_restored_when_its_own_client_comes_back() {
    let mut story = Story::new(Some(key));
    story.event(Event::Loaded { records: vec![loaded(7, "anna", HOUR / 2)] }).did(&[]);
    assert_eq!(story.front.counts(story.now).sessions_stored, 1);
    assert_eq!(story.front.stored(7, &who("bert")), None);
    assert_eq!(story.front.stored(8, &who("anna")), None);
    assert_eq!(story.front.stored(7, &who("anna")), Some(key(7)));
    let back = Event::Returned { client: 50, key: key(7), id: 7, peer: "peer".into(), random: 4 };
    story.event(back).did(&[r#"restored 50 Some("error") {"file:///a"}"#]);
    // Event ids of this run differ from those of the run before: number 5 has an odd run in its upper half.
    story.listen(50, 7, "anna", Some("0-3"), 30).did(&["events 30"]);
    story.say(50, None).did(&["send 30 0-21474836481"]);
    let session = story.front.session(7, &who("anna")).unwrap();
    assert_eq!(session.stream(Some("2-21474836489")), Err(NoStream::Forgotten));
    assert_eq!(session.stream(Some("2-x")), Err(NoStream::NotAnId));
    // The record is written again while the session is in use, and not more often.
    story.pass(HOUR / 8).did(&["ping 30", "store RecordKey(1007) 1"]);
}

#[test]
fn the_stream_of_a_request_that_was_lost_in_a_restart_begins_anew_with_an_error() {
    let mut story = Story::new(Some(key));
    story.event(Event::Loaded { records: vec![loaded(7, "anna", HOUR / 2)] });
    story.event(Event::Returned { client: 50, key: key(7), id: 7, peer: "peer".into(), random: 4 });
    // The id names the request, which is answered. It can be asked for again: the answer may have been missed.
    for response in [30, 31] {
        story.listen(50, 7, "anna", Some("2-9-n5"), response);
        let frame = match &story.done[1] {
            Action::SendEvent { frame, .. } => String::from_utf8_lossy(frame).into_owned(),
            other => panic!("{other:?}"),
        };
        for words in [r#"data: {"jsonrpc":"2.0","id":5,"error":{"code":7001,"#, r#""outcome":"unknown""#] {
            assert!(frame.contains(words), "{frame}");
        }
        let words = story.words();
        assert_eq!(
            (&*words[0], &*words[2], words.len()),
            (&*format!("events {response}"), &*format!("end {response}"), 3)
        );
    }
    // A request of this run with the same id gets its own answer, and no other.
    story.post(50, 5, 20, None).listen(50, 7, "anna", Some("2-9-n5"), 32).did(&["events 32"]);
    story.told(50, 5).did(&["answer 20"]);
    // The stream of a batch, or one whose answer was sent, names no request: what is new for the session comes there.
    story.listen(50, 7, "anna", Some("2-9"), 33).did(&["events 33"]);
    story.say(50, None).did(&["send 33 0-21474836481"]);
}

#[test]
fn records_that_are_old_or_too_many_are_removed() {
    let mut story = Story::new(Some(key));
    let ages = [(1, HOUR / 2), (2, HOUR * 2), (3, HOUR / 4), (4, HOUR), (5, HOUR / 8)];
    let records = ages.map(|(id, age)| loaded(id, "anna", age)).into();
    story.event(Event::Loaded { records }).did(&["unstore RecordKey(1004)", "unstore RecordKey(1002)"]);
    // An eighth of the time is tolerated, because records are rewritten no more often than that.
    story.pass(HOUR / 2).did(&[]).pass(HOUR / 8).did(&["unstore RecordKey(1001)"]);
    assert_eq!(story.front.counts(story.now).sessions_stored, 2);
    // A new session of the same client replaces the one that was used longest ago.
    story.open(60, "anna", INITIALIZE).did(&["unstore RecordKey(1003)", "came 60 anna", "said 60"]);
    story.open(61, "bert", INITIALIZE).did(&["came 61 bert", "said 61"]);
    assert_eq!(story.front.has_room(&who("cleo"), true), Err(3));
}

#[test]
fn a_gateway_that_stops_leaves_its_records() {
    let mut story = Story::new(Some(key));
    story.open(7, "anna", INITIALIZE).told(7, 0).stored(7, 1, true).post(7, 1, 20, None);
    story.event(Event::Stopped).did(&["refuse 20 stopping"]);
    story.event(Event::Dropped { client: 7 }).did(&[]);
}

#[test]
fn a_client_has_so_many_sessions_and_the_idlest_makes_room() {
    let mut story = Story::new(None);
    for (client, name) in [(1, "anna"), (2, "anna")] {
        story.open(client, name, INITIALIZE).told(client, 0);
        story.now += Duration::from_secs(1);
    }
    // The first session was used last.
    story.post(1, 5, 10, None).told(1, 5).did(&["answer 10"]);
    story.open(3, "anna", INITIALIZE).did(&["left 2", "came 3 anna", "said 3"]);
    story.told(3, 0).post(1, 6, 11, None).post(3, 6, 12, None);
    assert_eq!(story.front.has_room(&who("anna"), true), Err(2), "both are in use");
    assert_eq!(story.front.has_room(&who("bert"), true), Ok(()));
}

/// All sessions are compared when events are dropped, so an eighth of the limit is free afterwards.
#[test]
fn the_sessions_that_keep_the_most_drop_events_until_an_eighth_is_free() {
    let mut story = Story::new(None);
    for client in 1..=3 {
        story.open(client, &format!("client {client}"), "{}").told(client, 0);
        story.listen(client, client.into(), &format!("client {client}"), None, 10 + client as u32);
    }
    let message = Bytes::from(format!(r#"{{"jsonrpc":"2.0","method":"{}"}}"#, "x".repeat(900)));
    let mut before = 0;
    for client in [1, 2, 3].into_iter().cycle().take(30) {
        story.event(Event::Told { client, message: message.clone(), about: None, said: Said::Other });
        let kept = story.front.kept_bytes();
        if kept < before {
            assert!(before + message.len() > 8192 && kept <= 7168, "{before} {kept}");
            return;
        }
        before = kept;
    }
    panic!("no event was dropped: {before}");
}

/// A client of an earlier revision can resume a stream only after its first event, so its response stays open for longer.
#[test]
fn without_an_event_to_begin_with_a_stream_begins_later() {
    let mut story = Story::new(None);
    let (about, result) = (Id::Integer(0), r#"{"protocolVersion":"2025-06-18"}"#);
    let message = result_line(&about, result);
    story.open(1, "anna", INITIALIZE).event(Event::Told { client: 1, message, about: Some(about), said: Said::Result });
    story.post(1, 5, 10, None).pass(Duration::from_millis(9_999)).did(&[]);
    story.pass(Duration::from_millis(1)).did(&["events 10"]);
}

#[test]
fn a_slow_answer_becomes_a_stream_that_can_be_resumed() {
    let mut story = Story::new(None);
    story.open(1, "anna", INITIALIZE).told(1, 0).did(&["answer 1 opens 1"]);
    story.post(1, 5, 10, None).pass(Duration::from_millis(999)).did(&[]);
    story.pass(Duration::from_millis(1)).did(&["events 10", "send 10 2-1-n5"]);
    story.event(Event::TimePassed).did(&[]);
    story.event(Event::ReaderLeft { client: 1, response: 10 }).did(&[]);
    story.say(1, Some(5)).did(&[]);
    story.listen(1, 1, "anna", Some("2-1-n5"), 11).did(&["events 11", "send 11 2-2-n5"]);
    story.told(1, 5).did(&["send 11 2-3", "end 11"]);
    // Four events are kept, of all streams together.
    for _ in 0..4 {
        story.say(1, None);
    }
    assert_eq!(story.front.session(1, &who("anna")).unwrap().stream(Some("2-3")), Err(NoStream::Forgotten));
    story.listen(1, 1, "anna", None, 12).did(&[
        "events 12",
        "send 12 0-4",
        "send 12 0-5",
        "send 12 0-6",
        "send 12 0-7",
    ]);
    story.pass(Duration::from_secs(15)).did(&["ping 12"]);
    // The session does not expire while it is read; then it does.
    story.pass(HOUR * 2).did(&["ping 12"]).event(Event::ReaderLeft { client: 1, response: 12 });
    story.pass(HOUR).did(&["left 1"]);
}

/// A client that missed an answer which is not kept any more must not wait for it on a stream that seems complete.
#[test]
fn the_stream_of_a_batch_is_not_resumed_where_an_answer_is_missing() {
    let batch = |ids: [i128; 3], response| {
        let messages = ids.iter().map(|_| Bytes::new()).collect();
        let requests = Posted::Batch { ids: ids.map(Id::Integer).into(), messages, changes: Vec::new() };
        Event::Posted { client: 1, peer: "peer".into(), requests, response }
    };
    let mut story = Story::new(None);
    story.open(1, "anna", INITIALIZE).told(1, 0).event(batch([5, 6, 7], 10)).told(1, 5).did(&[]);
    story.pass(Duration::from_secs(1)).did(&["events 10", "send 10 2-1", "send 10 2-2"]);
    story.event(Event::ReaderLeft { client: 1, response: 10 });
    // Four events are kept, of all streams together: the first answer is the oldest, then it is dropped.
    story.say(1, None).say(1, None).say(1, None);
    let after = |story: &Story, last: &str| story.front.session(1, &who("anna")).unwrap().stream(Some(last)).map(drop);
    assert_eq!(after(&story, "2-1"), Ok(()));
    story.say(1, None);
    assert_eq!(after(&story, "2-1"), Err(NoStream::Forgotten));
    // Its client has read that answer: it misses nothing, also when the batch is complete.
    story.listen(1, 1, "anna", Some("2-2"), 11).did(&["events 11"]);
    story.told(1, 6).did(&["send 11 2-7"]);
    assert_eq!(after(&story, "2-1"), Err(NoStream::Forgotten));
    story.told(1, 7).did(&["send 11 2-8", "end 11"]);
    assert_eq!(after(&story, "2-1"), Err(NoStream::Forgotten));
    assert_eq!(after(&story, "2-2"), Ok(()));
    // The answer after this event is the first that is kept, as in the next program.
    let saved = story.front.save(story.now).unwrap();
    story.front = HttpFront::restore(limits(), None, saved, story.now);
    assert_eq!(after(&story, "2-1"), Err(NoStream::Forgotten));
    story.listen(1, 1, "anna", Some("2-2"), 12).did(&["events 12", "send 12 2-7", "send 12 2-8", "end 12"]);
}
