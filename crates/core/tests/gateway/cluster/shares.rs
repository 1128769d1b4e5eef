use std::time::Duration;

use outlast_core::cluster::{
    BadValue, BootTime,
    shares::{Action, Event, Found, Member, Shares, TABLE_BYTES_MAX, Table, WHOLE, Written},
};

use super::ms;

const MINUTE: u64 = 60_000;

struct Story {
    shares: Shares,
    now: BootTime,
}

impl Story {
    fn new() -> Story {
        Story { shares: Shares::new("a".into(), 1, 7), now: BootTime(ms(10_000_000)) }
    }

    /// Connected; the table was read as this at revision 5, and the next write is answered with revision 6.
    fn member(others: &[(&str, u64, u32)]) -> Story {
        let mut story = Story::new();
        assert_eq!(story.event(Event::Connected), [Action::Read]);
        let found = Found::Some { revision: 5, table: table(others) };
        let mut actions = story.event(Event::Read { found });
        actions.append(&mut story.pass(100));
        let write = actions.pop().unwrap();
        assert!(matches!(write, Action::Write { attempt: 1, expected: 5, .. }), "{write:?}");
        assert_eq!(actions, []);
        story.event(Event::Written { attempt: 1, result: Written::Done { revision: 6 } });
        story
    }

    fn event(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.shares.handle(event, self.now, &mut actions);
        actions
    }

    fn changed(&mut self, revision: u64, members: &[(&str, u64, u32)]) -> Vec<Action> {
        self.event(Event::Changed { revision, table: Some(table(members)) })
    }

    fn pass(&mut self, time: u64) -> Vec<Action> {
        let end = self.now + ms(time);
        let mut actions = Vec::new();
        while let Some(due) = self.shares.deadline().filter(|due| *due <= end) {
            self.now = self.now.max(due);
            actions.append(&mut self.event(Event::TimePassed));
        }
        self.now = end;
        actions
    }
}

/// Name, instance and parts; all renewed for the first time.
fn table(members: &[(&str, u64, u32)]) -> Table {
    let member = |(name, instance, parts): &(&str, u64, u32)| {
        ((*name).to_owned(), Member { instance: *instance, parts: *parts, renewed: 1 })
    };
    Table { members: members.iter().map(member).collect() }
}

fn parts(action: &Action) -> Vec<(&str, u32)> {
    match action {
        Action::Write { table, .. } => {
            table.members.iter().map(|(name, member)| (name.as_str(), member.parts)).collect()
        }
        other => panic!("{other:?} is no write"),
    }
}

#[test]
fn the_first_replica_has_the_whole_and_a_joiner_what_is_free() {
    let story = Story::member(&[]);
    assert_eq!(story.shares.parts(), WHOLE);
    let story = Story::member(&[("b", 2, 700_000)]);
    assert_eq!(story.shares.parts(), 300_000);
    let story = Story::member(&[("b", 2, 400_000)]);
    assert_eq!(story.shares.parts(), 500_000);
    let story = Story::member(&[("b", 2, WHOLE)]);
    assert_eq!(story.shares.parts(), 0);
}

#[test]
fn a_part_shrinks_before_it_is_written_and_grows_after_it_took_effect() {
    let mut story = Story::member(&[]);
    let mut actions = story.changed(7, &[("a", 1, WHOLE), ("b", 2, 0)]);
    actions.append(&mut story.pass(100));
    let [Action::Share { parts: 500_000 }, Action::Remember { parts: 500_000, .. }, write] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!(parts(write), [("a", 500_000), ("b", 0)]);
    assert_eq!(story.shares.parts(), 500_000);
    // No answer. The old table is still there, but the write may take effect later.
    story.event(Event::Written { attempt: 2, result: Written::Unknown });
    assert_eq!(story.pass(500), [Action::Read]);
    let found = Found::Some { revision: 7, table: table(&[("a", 1, WHOLE), ("b", 2, 0)]) };
    let mut actions = story.event(Event::Read { found });
    actions.append(&mut story.pass(100));
    assert_eq!(story.shares.parts(), 500_000);
    assert!(matches!(actions[..], [Action::Write { attempt: 3, expected: 7, .. }]), "{actions:?}");
    story.event(Event::Written { attempt: 3, result: Written::Done { revision: 8 } });

    // The other leaves: the part grows when the write is answered.
    let mut alone = table(&[("a", 1, 500_000)]);
    alone.members.get_mut("a").unwrap().renewed = 3;
    let mut actions = story.event(Event::Changed { revision: 9, table: Some(alone) });
    actions.append(&mut story.pass(100));
    assert_eq!(parts(&actions[0]), [("a", WHOLE)]);
    assert_eq!(story.shares.parts(), 500_000);
    let actions = story.event(Event::Written { attempt: 4, result: Written::Done { revision: 10 } });
    assert_eq!(actions[0], Action::Share { parts: WHOLE });
}

#[test]
fn a_write_without_an_answer_counts_when_it_is_seen() {
    let mut story = Story::new();
    story.event(Event::Connected);
    let mut actions = story.event(Event::Read { found: Found::None });
    actions.append(&mut story.pass(100));
    let Action::Write { attempt: 1, expected: 0, table } = actions.remove(0) else { panic!("{actions:?}") };
    story.event(Event::Written { attempt: 1, result: Written::Unknown });
    assert_eq!(story.shares.parts(), 0);
    let actions = story.event(Event::Changed { revision: 1, table: Some(table) });
    assert_eq!(actions[0], Action::Share { parts: WHOLE });
}

/// Seeds 35582 and 56374 of the cluster world: the replica used nothing until its next renewal, a minute later.
#[test]
fn a_write_that_took_effect_after_it_was_given_up_is_written_again_at_once() {
    let mut story = Story::member(&[("b", 2, WHOLE)]);
    let mut actions = story.changed(7, &[("a", 1, 0), ("b", 2, 500_000)]);
    actions.append(&mut story.pass(100));
    assert!(matches!(actions[..], [Action::Write { attempt: 2, expected: 7, .. }]), "{actions:?}");
    // The connection is lost, and the write is repeated over the next one. The first one takes effect after all.
    story.event(Event::Disconnected);
    assert_eq!(story.event(Event::Connected), [Action::Read]);
    let found = Found::Some { revision: 7, table: table(&[("a", 1, 0), ("b", 2, 500_000)]) };
    let mut actions = story.event(Event::Read { found });
    actions.append(&mut story.pass(100));
    assert!(matches!(actions[..], [Action::Write { attempt: 3, expected: 7, .. }]), "{actions:?}");
    let mut stored = table(&[("a", 1, 500_000), ("b", 2, 500_000)]);
    stored.members.get_mut("a").unwrap().renewed = 2;
    story.event(Event::Changed { revision: 8, table: Some(stored.clone()) });
    story.event(Event::Written { attempt: 3, result: Written::Conflict });
    assert_eq!(story.pass(1_000), [Action::Read]);
    let mut actions = story.event(Event::Read { found: Found::Some { revision: 8, table: stored } });
    actions.append(&mut story.pass(100));
    assert!(matches!(actions[..], [Action::Write { attempt: 4, expected: 8, .. }]), "{actions:?}");
    story.event(Event::Written { attempt: 4, result: Written::Done { revision: 9 } });
    assert_eq!(story.shares.parts(), 500_000);
}

#[test]
fn a_replica_that_cannot_renew_for_an_hour_uses_nothing() {
    let mut story = Story::member(&[]);
    assert!(matches!(story.pass(MINUTE)[..], [Action::Write { attempt: 2, .. }]));
    story.event(Event::Disconnected);
    assert_eq!(story.pass(58 * MINUTE), []);
    let actions = story.pass(MINUTE + 1);
    assert_eq!(actions, [Action::Share { parts: 0 }, Action::Remember { parts: 0, age: Duration::ZERO }]);
    story.event(Event::Connected);
    let mut own = table(&[("a", 1, WHOLE)]);
    own.members.get_mut("a").unwrap().renewed = 1;
    let found = Found::Some { revision: 6, table: own };
    let mut actions = story.event(Event::Read { found });
    actions.append(&mut story.pass(100));
    assert_eq!(parts(&actions[0]), [("a", WHOLE)]);
    assert_eq!(story.shares.parts(), 0);
    story.event(Event::Written { attempt: 3, result: Written::Done { revision: 7 } });
    assert_eq!(story.shares.parts(), WHOLE);
}

#[test]
fn a_member_that_does_not_renew_is_removed_after_more_than_an_hour() {
    let mut story = Story::member(&[("b", 2, 500_000)]);
    let start = story.now;
    loop {
        let actions = story.pass(1_000);
        let Some(write) = actions.first() else { continue };
        let Action::Write { attempt, .. } = write else { panic!("{write:?}") };
        let is_removed = parts(write) == [("a", WHOLE)];
        assert_eq!(is_removed, story.now.since(start) >= ms(65 * MINUTE - 1_000), "{:?}", story.now.since(start));
        if is_removed {
            break;
        }
        let result = Written::Done { revision: 6 + attempt };
        story.event(Event::Written { attempt: *attempt, result });
    }
}

#[test]
fn what_was_remembered_is_used_until_it_is_an_hour_old() {
    let remembered = |parts, minutes| Event::Remembered { parts, age: ms(minutes * MINUTE) };
    let mut story = Story::new();
    assert_eq!(story.event(remembered(300_000, 59)), [Action::Share { parts: 300_000 }]);
    assert_eq!(story.pass(MINUTE)[0], Action::Share { parts: 0 });
    let mut story = Story::new();
    assert_eq!(story.event(remembered(300_000, 60)), []);

    // The table has less: it was written before the process ended.
    let mut story = Story::new();
    story.event(remembered(300_000, 5));
    story.event(Event::Connected);
    let found = Found::Some { revision: 9, table: table(&[("a", 99, 200_000), ("b", 2, 800_000)]) };
    let actions = story.event(Event::Read { found });
    assert_eq!(actions[0], Action::Share { parts: 200_000 });
    // What is remembered stays as old as it is.
    assert_eq!(actions[1], Action::Remember { parts: 200_000, age: ms(5 * MINUTE) });
}

#[test]
fn a_replica_that_stops_removes_itself() {
    let mut story = Story::member(&[("b", 2, 500_000)]);
    let mut actions = story.event(Event::StopAsked);
    actions.append(&mut story.pass(100));
    assert_eq!(actions[0], Action::Share { parts: 0 });
    assert!(matches!(actions[1], Action::Remember { parts: 0, .. }));
    assert_eq!(parts(&actions[2]), [("b", 500_000)]);
    assert!(!story.shares.is_over());
    story.event(Event::Written { attempt: 2, result: Written::Done { revision: 7 } });
    assert!(story.shares.is_over());

    let mut story = Story::member(&[]);
    story.event(Event::StopAsked);
    story.pass(2_000);
    assert!(story.shares.is_over());
}

#[test]
fn a_process_whose_name_another_has_taken_uses_nothing() {
    let mut story = Story::member(&[]);
    let actions = story.changed(9, &[("a", 77, WHOLE)]);
    assert_eq!(actions[0], Action::Share { parts: 0 });
    assert_eq!(story.pass(10 * MINUTE), []);
}

#[test]
fn a_table_that_was_deleted_is_written_with_the_parts_of_the_others() {
    let mut story = Story::member(&[("b", 2, 500_000)]);
    let mut actions = story.event(Event::Changed { revision: 9, table: None });
    actions.append(&mut story.pass(100));
    assert_eq!(parts(&actions[0]), [("a", 500_000), ("b", 500_000)]);
}

#[test]
fn after_a_conflict_the_table_is_read() {
    let mut story = Story::new();
    story.event(Event::Connected);
    story.event(Event::Read { found: Found::None });
    story.pass(100);
    let mut actions = story.event(Event::Written { attempt: 1, result: Written::Conflict });
    actions.append(&mut story.pass(100));
    assert_eq!(actions, [Action::Read]);
    assert_eq!(story.event(Event::Read { found: Found::Failed }), []);
    assert_eq!(story.pass(500), [Action::Read]);
}

#[test]
fn a_table_is_read_as_it_was_written() {
    let written = table(&[("a", 1, 600_000), ("b", 255, 400_000)]);
    assert_eq!(Table::decode(&written.encode()), Ok(written.clone()));
    let text = String::from_utf8(table(&[("b", 255, 400_000)]).encode()).unwrap();
    let known = r#"{"version":1,"members":{"b":{"instance":"00000000000000ff","parts":400000,"renewed":1}}}"#;
    assert_eq!(text, known);
    let table = [
        (known.replace("\"parts\"", "\"new\":{},\"parts\""), Ok(table(&[("b", 255, 400_000)]))),
        (known.replace(":1,", ":2,"), Err(BadValue::Version(2))),
        // More than the whole.
        (known.replace("400000", "1000001"), Err(BadValue::Damaged)),
        (known.replace("400000", "-1"), Err(BadValue::Damaged)),
        (known.replace("\"parts\"", "\"part\""), Err(BadValue::Damaged)),
        ("[]".to_owned(), Err(BadValue::Damaged)),
    ];
    for (text, read) in table {
        assert_eq!(Table::decode(text.as_bytes()), read, "{text}");
    }
    assert_eq!(Table::decode(&vec![b' '; TABLE_BYTES_MAX + 1]), Err(BadValue::TooLong));
}
