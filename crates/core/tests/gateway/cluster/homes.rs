use std::{collections::BTreeSet, time::Instant};

use outlast_core::{
    cluster::homes::{self, Action, Event, Found, Home, Homes, Outcome, Stored, Written},
    front::record::{BadRecord, RECORD_BYTES_MAX, Record, RecordKey, SessionState},
    gateway::Who,
};

use super::ms;

const KEY: RecordKey = RecordKey(5);

struct Story {
    homes: Homes,
    now: Instant,
}

impl Story {
    #[expect(clippy::disallowed_methods, reason = "a story needs some instant to count from")]
    fn new() -> Story {
        let mut story = Story { homes: Homes::new(home("a", 1)), now: Instant::now() };
        assert_eq!(story.event(Event::Connected), []);
        story
    }

    /// The session is open here, at revision 3.
    fn open() -> Story {
        let mut story = Story::new();
        story.event(Event::Opened { key: KEY, revision: Some(3) });
        story
    }

    /// The session's home is cached: b, at revision 3.
    fn cached() -> Story {
        let mut story = Story::new();
        assert_eq!(story.asked(1, "anna"), [read(1)]);
        assert_eq!(story.read(1, found(3, "b", 2)), [Action::Check { instance: 2 }]);
        assert_eq!(story.event(Event::Alive { instance: 2 }), [answer(1, forward("b", 2))]);
        story
    }

    fn event(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.homes.handle(event, self.now, &mut actions);
        actions
    }

    fn asked(&mut self, ticket: u64, name: &str) -> Vec<Action> {
        self.event(Event::Asked { ticket, key: KEY, who: who(name) })
    }

    fn read(&mut self, number: u64, found: Found) -> Vec<Action> {
        self.event(Event::Read { key: KEY, number, found })
    }

    fn written(&mut self, number: u64, result: Written) -> Vec<Action> {
        self.event(Event::Written { key: KEY, number, result })
    }

    fn pass(&mut self, time: u64) -> Vec<Action> {
        self.now += ms(time);
        self.event(Event::TimePassed)
    }
}

fn who(name: &str) -> Who {
    Who { name: name.into(), role: None, profile: None }
}

fn home(name: &str, instance: u64) -> Home {
    Home { name: name.into(), instance }
}

fn record() -> Record {
    let state =
        SessionState { version: "2025-11-25".into(), initialize: "{}".into(), level: None, watches: BTreeSet::new() };
    Record { who: who("anna"), state }
}

fn found(revision: u64, name: &str, instance: u64) -> Found {
    Found::Some(Box::new(Stored { revision, record: record(), home: home(name, instance) }))
}

fn read(number: u64) -> Action {
    Action::Read { key: KEY, number }
}

fn take(number: u64, expected: u64) -> Action {
    Action::Take { key: KEY, number, expected, record: Box::new(record()), home: home("a", 1) }
}

fn answer(ticket: u64, outcome: Outcome) -> Action {
    Action::Answer { ticket, outcome }
}

fn forward(name: &str, instance: u64) -> Outcome {
    Outcome::Forward { to: home(name, instance) }
}

fn restore(revision: u64) -> Outcome {
    Outcome::Restore { record: Box::new(record()), revision }
}

#[test]
fn a_session_that_is_open_here_is_served_without_a_read() {
    let mut story = Story::open();
    assert_eq!(story.asked(1, "anna"), [answer(1, Outcome::Here)]);
    assert_eq!(story.homes.revision(KEY), Some(3));
    story.event(Event::Stored { key: KEY, revision: 8 });
    assert_eq!(story.homes.revision(KEY), Some(8));
}

#[test]
fn one_read_serves_all_requests_and_the_home_is_cached() {
    let mut story = Story::new();
    assert_eq!(story.asked(1, "anna"), [read(1)]);
    assert_eq!(story.asked(2, "anna"), []);
    assert_eq!(story.asked(3, "bert"), []);
    let check = Action::Check { instance: 2 };
    assert_eq!(story.read(1, found(3, "b", 2)), [answer(3, Outcome::NotFound), check]);
    assert_eq!(story.asked(4, "bert"), []);
    let answers = [answer(1, forward("b", 2)), answer(2, forward("b", 2)), answer(4, Outcome::NotFound)];
    assert_eq!(story.event(Event::Alive { instance: 2 }), answers);
    assert_eq!(story.asked(5, "anna"), [answer(5, forward("b", 2))]);
    assert_eq!(story.asked(6, "bert"), [answer(6, Outcome::NotFound)]);
}

#[test]
fn a_session_whose_home_is_lost_is_taken_over() {
    let mut story = Story::cached();
    // A request that was forwarded found it out.
    assert_eq!(story.event(Event::Lost { instance: 2 }), []);
    assert_eq!(story.asked(2, "anna"), [read(2)]);
    assert_eq!(story.asked(3, "anna"), []);
    assert_eq!(story.read(2, found(3, "b", 2)), [Action::Check { instance: 2 }]);
    assert_eq!(story.event(Event::Lost { instance: 2 }), [take(3, 3)]);
    let answers = [answer(2, restore(4)), answer(3, Outcome::Here)];
    assert_eq!(story.written(3, Written::Done { revision: 4 }), answers);
    assert_eq!(story.asked(4, "anna"), [answer(4, Outcome::Here)]);
    assert_eq!(story.homes.counts().taken, 1);
}

#[test]
fn a_session_of_an_earlier_process_of_this_replica_is_taken_without_a_check() {
    let mut story = Story::new();
    story.asked(1, "anna");
    assert_eq!(story.read(1, found(3, "a", 99)), [take(2, 3)]);
    // Its own record, without the session: an earlier take had no answer.
    assert_eq!(story.written(2, Written::Failed), [answer(1, Outcome::Unavailable)]);
    assert_eq!(story.asked(2, "anna"), [read(3)]);
    assert_eq!(story.read(3, found(4, "a", 1)), [answer(2, restore(4))]);
}

#[test]
fn a_take_that_is_not_the_first_reads_again_but_not_for_ever() {
    let mut story = Story::new();
    story.asked(1, "anna");
    let mut number = 1;
    for round in 1..=5 {
        assert_eq!(story.read(number, found(round, "a", 99)), [take(number + 1, round)]);
        let actions = story.written(number + 1, Written::Conflict);
        number += 2;
        match round {
            5 => assert_eq!(actions, [answer(1, Outcome::Unavailable)]),
            _ => assert_eq!(actions, [read(number)]),
        }
    }
}

#[test]
fn reads_checks_and_takes_do_not_wait_for_ever() {
    let mut story = Story::new();
    story.asked(1, "anna");
    assert_eq!(story.pass(999), []);
    assert_eq!(story.pass(1), [answer(1, Outcome::Unavailable)]);
    // Its answer is late: another request asks for itself.
    assert_eq!(story.asked(2, "anna"), [read(2)]);
    assert_eq!(story.read(1, Found::None), []);
    story.read(2, found(3, "b", 2));
    assert_eq!(story.pass(4_000), [answer(2, Outcome::Unavailable)]);
    assert_eq!(story.event(Event::Lost { instance: 2 }), []);
    assert_eq!(story.asked(3, "anna"), [read(3)]);
    assert_eq!(story.read(3, Found::Failed), [answer(3, Outcome::Unavailable)]);
    assert_eq!(story.homes.deadline(), None);
}

#[test]
fn after_a_pause_a_new_connection_or_a_gap_of_the_watch_the_record_is_read_first() {
    for event in [Event::Paused, Event::Connected, Event::Missed] {
        let mut story = Story::open();
        assert_eq!(story.event(event.clone()), []);
        assert_eq!(story.asked(1, "anna"), [read(1)]);
        // What was asked for before the next pause is too old.
        assert_eq!(story.event(event), [read(2)]);
        assert_eq!(story.read(1, found(3, "a", 1)), []);
        assert_eq!(story.read(2, found(3, "a", 1)), [answer(1, Outcome::Here)]);
        assert_eq!(story.asked(2, "anna"), [answer(2, Outcome::Here)]);
    }
    let mut story = Story::open();
    story.event(Event::Paused);
    story.asked(1, "anna");
    let actions = [Action::Drop { key: KEY }, Action::Check { instance: 2 }];
    assert_eq!(story.read(1, found(4, "b", 2)), actions);
    // Ended by its new home.
    let mut story = Story::open();
    story.event(Event::Paused);
    story.asked(1, "anna");
    assert_eq!(story.read(1, Found::None), [Action::Drop { key: KEY }, answer(1, Outcome::NotFound)]);
}

#[test]
fn without_a_connection_open_sessions_are_served_but_not_right_after_a_pause() {
    let mut story = Story::open();
    story.event(Event::Disconnected);
    assert_eq!(story.asked(1, "anna"), [answer(1, Outcome::Here)]);
    let other = Event::Asked { ticket: 2, key: RecordKey(6), who: who("anna") };
    assert_eq!(story.event(other), [answer(2, Outcome::Unavailable)]);
    story.event(Event::Paused);
    assert_eq!(story.asked(3, "anna"), [answer(3, Outcome::Unavailable)]);
    story.pass(2_000);
    assert_eq!(story.asked(4, "anna"), [answer(4, Outcome::Here)]);

    let mut story = Story::open();
    story.event(Event::Paused);
    assert_eq!(story.asked(1, "anna"), [read(1)]);
    assert_eq!(story.event(Event::Disconnected), [answer(1, Outcome::Unavailable)]);
}

/// Seeds 10291 and 51897 of the cluster world: another replica had taken the session over during the first pause.
#[test]
fn a_session_that_was_not_verified_stays_in_doubt_when_the_next_connection_is_lost() {
    for before in [Event::Paused, Event::Connected] {
        let mut story = Story::open();
        story.event(before);
        story.pass(5_000);
        story.event(Event::Disconnected);
        assert_eq!(story.asked(1, "anna"), [answer(1, Outcome::Unavailable)]);
        story.pass(2_000);
        assert_eq!(story.asked(2, "anna"), [answer(2, Outcome::Here)]);
    }
}

#[test]
fn the_watch_ends_sessions_that_another_replica_has_taken() {
    let mut story = Story::open();
    assert!(story.homes.is_of_interest(KEY));
    let changed = |revision, home| Event::Changed { key: KEY, revision, home };
    // The watch is behind.
    assert_eq!(story.event(changed(2, Some(home("b", 2)))), []);
    assert_eq!(story.event(changed(4, Some(home("a", 1)))), []);
    assert_eq!(story.homes.revision(KEY), Some(4));
    assert_eq!(story.event(changed(5, Some(home("b", 2)))), [Action::Drop { key: KEY }]);
    assert!(!story.homes.is_of_interest(KEY));

    let mut story = Story::cached();
    story.event(changed(4, Some(home("b", 2))));
    assert_eq!(story.asked(2, "anna"), [answer(2, forward("b", 2))]);
    story.event(changed(5, Some(home("c", 3))));
    assert_eq!(story.asked(3, "anna"), [read(2)]);
}

#[test]
fn a_take_that_the_watch_shows_as_taken_again_is_not_served() {
    let mut story = Story::new();
    story.asked(1, "anna");
    story.read(1, found(3, "a", 99));
    story.event(Event::Changed { key: KEY, revision: 4, home: Some(home("a", 1)) });
    story.event(Event::Changed { key: KEY, revision: 5, home: Some(home("b", 2)) });
    assert_eq!(story.written(2, Written::Done { revision: 4 }), [read(3)]);
    // So is a read that is older than the watch.
    assert_eq!(story.read(3, found(4, "a", 1)), [read(4)]);
    assert_eq!(story.read(4, found(5, "b", 2)), [Action::Check { instance: 2 }]);
}

#[test]
fn a_home_that_refuses_is_asked_again_only_if_the_record_changed() {
    let mut story = Story::cached();
    story.event(Event::Refused { key: KEY, by: 2 });
    assert_eq!(story.asked(2, "anna"), [read(2)]);
    assert_eq!(story.read(2, found(4, "b", 2)), [Action::Check { instance: 2 }]);
    story.event(Event::Alive { instance: 2 });
    story.event(Event::Refused { key: KEY, by: 2 });
    story.asked(3, "anna");
    assert_eq!(story.read(3, found(4, "b", 2)), [take(4, 4)]);
}

#[test]
fn a_session_that_ended_here_does_not_come_back() {
    let mut story = Story::open();
    story.event(Event::Paused);
    story.asked(1, "anna");
    assert_eq!(story.event(Event::Closed { key: KEY }), [answer(1, Outcome::NotFound)]);
    assert_eq!(story.read(1, found(3, "a", 1)), []);
    assert_eq!(story.asked(2, "anna"), [answer(2, Outcome::NotFound)]);
}

#[test]
fn a_session_whose_request_left_before_it_was_opened_is_read_again() {
    let mut story = Story::new();
    story.asked(1, "anna");
    assert_eq!(story.read(1, found(3, "a", 1)), [answer(1, restore(3))]);
    assert_eq!(story.asked(2, "anna"), [answer(2, Outcome::Here)]);
    assert_eq!(story.event(Event::Unopened { key: KEY }), []);
    assert_eq!(story.asked(3, "anna"), [read(2)]);
    assert_eq!(story.read(2, found(3, "a", 1)), [answer(3, restore(3))]);
}

#[test]
fn a_local_session_stays_unless_its_record_shows_another_home() {
    for (found, is_here) in [(Found::None, true), (found(1, "a", 1), true), (found(2, "b", 2), false)] {
        let mut story = Story::new();
        story.event(Event::Opened { key: KEY, revision: None });
        assert_eq!(story.asked(1, "anna"), [answer(1, Outcome::Here)]);
        assert_eq!(story.homes.counts().local, 1);
        story.event(Event::Paused);
        assert_eq!(story.asked(2, "anna"), [read(1)]);
        let actions = story.read(1, found);
        match is_here {
            true => assert_eq!(actions, [answer(2, Outcome::Here)]),
            false => assert_eq!(actions, [Action::Drop { key: KEY }, Action::Check { instance: 2 }]),
        }
    }
}

#[test]
fn a_write_that_found_another_revision_makes_the_session_doubtful() {
    let mut story = Story::open();
    story.event(Event::Conflicted { key: KEY });
    assert_eq!(story.asked(1, "anna"), [read(1)]);
    assert_eq!(story.read(1, found(6, "a", 1)), [answer(1, Outcome::Here)]);
    assert_eq!(story.homes.revision(KEY), Some(6));
}

#[test]
fn waiting_requests_and_the_cache_are_bounded() {
    let mut story = Story::new();
    let mut refused = 0;
    for ticket in 0..1_001 {
        refused += story.asked(ticket, "anna").iter().filter(|action| **action != read(1)).count();
    }
    assert_eq!(refused, 1);
    for number in 0..10_000 {
        let asked = Event::Asked { ticket: 5_000 + number, key: RecordKey(100 + u128::from(number)), who: who("anna") };
        let actions = story.event(asked);
        let outcome = answer(5_000 + number, Outcome::Unavailable);
        assert_eq!(actions == [outcome], number == 9_999, "{number}");
    }
    let mut story = Story::new();
    for number in 1..=100_001 {
        let key = RecordKey(number);
        story.event(Event::Asked { ticket: 1, key, who: who("anna") });
        story.event(Event::Read { key, number: number as u64, found: found(3, "b", 2) });
        story.event(Event::Alive { instance: 2 });
    }
    assert_eq!(story.homes.counts().cached, 50_001);
}

#[test]
fn a_value_is_read_as_it_was_written() {
    let text = homes::encode(KEY, &record(), &home("a", 255)).unwrap();
    assert_eq!(homes::decode(KEY, &text), Ok((record(), home("a", 255))));
    assert_eq!(homes::decode_home(&text), Ok(home("a", 255)));
    assert_eq!(homes::decode(RecordKey(6), &text), Err(BadRecord::Foreign));
    let text = String::from_utf8(text).unwrap();
    assert!(text.starts_with("{\"version\":1,\"home\":\"a\",\"instance\":\"00000000000000ff\"}\n"), "{text}");
    let table = [
        (text.replacen('{', r#"{"new":[],"#, 1), Ok((record(), home("a", 255)))),
        (text.replacen("\"version\":1", "\"version\":3", 1), Err(BadRecord::Version(3))),
        (text.replace("00ff", "0xff"), Err(BadRecord::Damaged)),
        (text.replace("anna", "bert"), Err(BadRecord::Damaged)),
        (text.replacen('\n', " ", 3), Err(BadRecord::Damaged)),
        (String::new(), Err(BadRecord::Damaged)),
        (format!("{}\n", " ".repeat(1_025)), Err(BadRecord::Damaged)),
    ];
    for (text, read) in table {
        assert_eq!(homes::decode(KEY, text.as_bytes()), read, "{text:.80}");
    }
    assert_eq!(homes::encode(KEY, &record(), &home(&"x".repeat(1_024), 1)), Err(BadRecord::TooLong));
    let mut long = record();
    long.state.initialize = "x".repeat(RECORD_BYTES_MAX).into();
    assert_eq!(homes::encode(KEY, &long, &home("a", 1)), Err(BadRecord::TooLong));
}
