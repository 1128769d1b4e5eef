use std::time::Instant;

use bytes::Bytes;
use outlast_core::cluster::audit_log::{self, Action, AuditLog, Event, Last, Line, Loaded, Published};

use super::ms;

struct Story {
    log: AuditLog,
    now: Instant,
}

impl Story {
    #[expect(clippy::disallowed_methods, reason = "a story needs some instant to count from")]
    fn new() -> Story {
        Story { log: AuditLog::new("a".into(), 8), now: Instant::now() }
    }

    /// Connected; the local log has records up to 9, and the stream those up to 4, in 2 messages.
    fn behind() -> Story {
        let mut story = Story::new();
        assert_eq!(story.event(Event::Appended { up_to: 9 }), []);
        assert_eq!(story.event(Event::Connected), [Action::ReadLast]);
        assert_eq!(story.last(2, "a-4"), [load(Some(4))]);
        story
    }

    fn event(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.log.handle(event, self.now, &mut actions);
        actions
    }

    fn last(&mut self, sequence: u64, id: &str) -> Vec<Action> {
        self.event(Event::LastRead { last: Last::Some { sequence, id: id.into() } })
    }

    fn loaded(&mut self, after: Option<u64>, numbers: std::ops::Range<u64>) -> Vec<Action> {
        let line = |number| Line { number, bytes: Bytes::from(format!("r{number}\n")) };
        let lines = numbers.map(line).collect();
        self.event(Event::Loaded(Loaded { after, lines, is_end: false, is_missing: false }))
    }

    fn published(&mut self, batch: u64, result: Published) -> Vec<Action> {
        self.event(Event::Published { batch, result })
    }

    fn pass(&mut self, time: u64) -> Vec<Action> {
        self.now += ms(time);
        self.event(Event::TimePassed)
    }
}

fn load(after: Option<u64>) -> Action {
    Action::Load { after, bytes_max: 8 }
}

fn publish(batch: u64, id: &str, expected_last: u64, body: &'static str) -> Action {
    Action::Publish { batch, id: id.into(), expected_last, body: body.into() }
}

#[test]
fn the_stream_continues_after_its_last_record_in_whole_lines() {
    let mut story = Story::behind();
    assert_eq!(story.log.counts().backlog, Some(5));
    // Two lines are as many as fit.
    assert_eq!(story.loaded(Some(4), 5..10), [publish(1, "a-6", 2, "r5\nr6\n")]);
    assert_eq!(story.published(1, Published::Done { sequence: 11 }), [load(Some(6))]);
    assert_eq!(story.loaded(Some(6), 7..9), [publish(2, "a-8", 11, "r7\nr8\n")]);
    // More comes meanwhile. One batch is on its way at a time.
    assert_eq!(story.event(Event::Appended { up_to: 10 }), []);
    assert_eq!(story.published(2, Published::Done { sequence: 12 }), [load(Some(8))]);
    assert_eq!(story.loaded(Some(8), 9..11), [publish(3, "a-10", 12, "r9\nr10\n")]);
    assert_eq!(story.published(3, Published::Done { sequence: 13 }), []);
    assert_eq!((story.log.counts().backlog, story.log.counts().published), (Some(0), 6));
    assert_eq!(story.log.deadline(), None);
}

#[test]
fn after_any_failure_the_end_of_the_stream_is_read_first() {
    let mut story = Story::behind();
    story.loaded(Some(4), 5..7);
    // Another message is there: an earlier publish took effect.
    assert_eq!(story.published(1, Published::WrongLast), [Action::ReadLast]);
    assert_eq!(story.last(3, "a-6"), [load(Some(6))]);
    assert_eq!(story.loaded(Some(6), 7..8), [publish(2, "a-7", 3, "r7\n")]);
    // Wrong for the second time: it does not go round in circles.
    assert_eq!(story.published(2, Published::Failed), []);
    assert_eq!(story.pass(999), []);
    assert_eq!(story.pass(1), [Action::ReadLast]);
    assert_eq!(story.event(Event::LastRead { last: Last::Failed }), []);
    assert_eq!(story.pass(1_000), [Action::ReadLast]);
    // No answer at all.
    assert_eq!(story.pass(10_000), [Action::ReadLast]);
    story.last(4, "a-7");
    story.loaded(Some(7), 8..9);
    assert_eq!(story.pass(10_000), [Action::ReadLast]);
    assert_eq!(story.log.counts().backlog, None);
}

#[test]
fn two_wrong_ends_in_a_row_are_not_answered_at_once() {
    let mut story = Story::behind();
    story.loaded(Some(4), 5..6);
    assert_eq!(story.published(1, Published::WrongLast), [Action::ReadLast]);
    story.last(2, "a-4");
    story.loaded(Some(4), 5..6);
    assert_eq!(story.published(2, Published::WrongLast), []);
    assert_eq!(story.pass(1_000), [Action::ReadLast]);
}

#[test]
fn late_answers_of_an_earlier_connection_are_ignored() {
    let mut story = Story::behind();
    story.loaded(Some(4), 5..6);
    assert_eq!(story.event(Event::Disconnected), []);
    assert_eq!(story.published(1, Published::Done { sequence: 3 }), []);
    assert_eq!(story.last(2, "a-4"), []);
    assert_eq!(story.event(Event::Connected), [Action::ReadLast]);
    assert_eq!(story.published(1, Published::Done { sequence: 3 }), []);
    assert_eq!(story.last(3, "a-5"), [load(Some(5))]);
    assert_eq!(story.loaded(Some(4), 5..7), []);
    // Lines that are in the stream are skipped.
    assert_eq!(story.loaded(Some(5), 5..7), [publish(2, "a-6", 3, "r6\n")]);
}

#[test]
fn an_empty_stream_gets_all_that_is_left_and_lost_lines_are_counted() {
    let mut story = Story::new();
    story.event(Event::Appended { up_to: 1_000_002 });
    story.event(Event::Connected);
    assert_eq!(story.event(Event::LastRead { last: Last::None }), [load(None)]);
    assert_eq!(story.loaded(None, 1_000_001..1_000_002), [publish(1, "a-1000001", 0, "r1000001\n")]);
    assert_eq!(story.log.counts().backlog, Some(2));
    assert_eq!(story.published(1, Published::Done { sequence: 1 }), [load(Some(1_000_001))]);
    let line = Line { number: 1_000_005, bytes: "r\n".into() };
    let loaded = Loaded { after: Some(1_000_001), lines: vec![line], is_end: true, is_missing: true };
    assert_eq!(story.event(Event::Loaded(loaded)), [publish(2, "a-1000005", 1, "r\n")]);
    assert_eq!(story.log.counts().gaps, 1);
}

#[test]
fn a_log_that_cannot_be_read_is_tried_again() {
    let mut story = Story::behind();
    assert_eq!(story.loaded(Some(4), 0..0), []);
    assert_eq!(story.pass(1_000), [load(Some(4))]);
}

#[test]
fn a_stream_with_a_message_of_another_program_is_left_alone() {
    let mut story = Story::new();
    story.event(Event::Appended { up_to: 9 });
    story.event(Event::Connected);
    assert_eq!(story.last(5, "b-3"), []);
    assert_eq!(story.pass(1_000), [Action::ReadLast]);
}

#[test]
fn ids_are_read_as_they_were_written() {
    let table = [
        ("a", "a-17", Some(17)),
        ("a-1", "a-1-17", Some(17)),
        ("a", "a-1-17", None),
        ("a", "b-17", None),
        ("a", "a-+17", None),
        ("a", "a-", None),
        ("a", "a-99999999999999999999999", None),
    ];
    for (replica, id, number) in table {
        assert_eq!(audit_log::number(replica, id), number, "{id}");
    }
    assert_eq!(audit_log::number("a", &audit_log::id("a", u64::MAX)), Some(u64::MAX));
}
