use outlast_core::cluster::{
    BadValue, BootTime,
    leases::{Action, Event, LEASE_BYTES_MAX, Lease, Leases, Written},
};

use super::ms;

const OWN: u64 = 7;

/// One replica and its last actions.
struct Story {
    leases: Leases,
    now: BootTime,
}

impl Story {
    /// Connected, with these backends, whose keys were read as absent.
    fn new(backends: &[&str]) -> Story {
        let mut story = Story { leases: Leases::new("a".into(), OWN), now: BootTime(ms(100_000)) };
        story.configure(backends);
        let reads: Vec<Action> = backends.iter().map(|name| Action::Read { backend: (*name).into() }).collect();
        assert_eq!(story.event(Event::Connected), reads);
        story
    }

    fn event(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.leases.handle(event, self.now, &mut actions);
        actions
    }

    fn configure(&mut self, backends: &[&str]) -> Vec<Action> {
        self.event(Event::Configured { backends: backends.iter().map(|name| (*name).to_owned()).collect() })
    }

    fn changed(&mut self, revision: u64, lease: Option<Lease>) -> Vec<Action> {
        self.event(Event::Changed { backend: "x".into(), revision, lease })
    }

    fn written(&mut self, attempt: u64, result: Written) -> Vec<Action> {
        self.event(Event::Written { backend: "x".into(), attempt, result })
    }

    fn gone(&mut self) -> Vec<Action> {
        self.event(Event::HostGone { backend: "x".into() })
    }

    /// What is done until then, each at its own time.
    fn pass(&mut self, time: u64) -> Vec<Action> {
        let end = self.now + ms(time);
        let mut actions = Vec::new();
        while let Some(due) = self.leases.deadline().filter(|due| *due <= end) {
            self.now = self.now.max(due);
            actions.append(&mut self.event(Event::TimePassed));
        }
        self.now = end;
        actions
    }

    /// Owns `x` at revision 1; the write was sent at the start.
    fn owner() -> Story {
        let mut story = Story::new(&["x"]);
        assert_eq!(story.changed(0, None), [write(0, lease(1))]);
        let until = story.now + ms(9_500);
        assert_eq!(story.written(1, Written::Done { revision: 1 }), [start(until), owned(Some(("a", OWN)))]);
        story
    }
}

fn lease(attempt: u64) -> Lease {
    Lease { owner: "a".into(), instance: OWN, attempt, released: false }
}

fn of_other(attempt: u64) -> Lease {
    Lease { owner: "b".into(), instance: 8, attempt, released: false }
}

fn released(lease: Lease) -> Lease {
    Lease { released: true, ..lease }
}

fn read() -> Action {
    Action::Read { backend: "x".into() }
}

fn write(expected: u64, lease: Lease) -> Action {
    Action::Write { backend: "x".into(), expected, lease }
}

fn start(until: BootTime) -> Action {
    Action::Start { backend: "x".into(), until }
}

fn extend(until: BootTime) -> Action {
    Action::Extend { backend: "x".into(), until }
}

fn stop(at_once: bool) -> Action {
    Action::Stop { backend: "x".into(), at_once }
}

fn owned(owner: Option<(&str, u64)>) -> Action {
    Action::Owner { backend: "x".into(), owner: owner.map(|(name, instance)| (name.into(), instance)) }
}

#[test]
fn a_lease_is_renewed_every_two_seconds_and_counts_from_the_sending() {
    let mut story = Story::owner();
    assert_eq!(story.pass(1_999), []);
    assert_eq!(story.pass(1), [write(1, lease(2))]);
    let sent = story.now;
    story.pass(1_500);
    assert_eq!(story.written(2, Written::Done { revision: 2 }), [extend(sent + ms(9_500))]);
    assert_eq!(story.pass(500), [write(2, lease(3))]);
}

#[test]
fn a_host_whose_lease_is_not_renewed_is_stopped_in_time() {
    let mut story = Story::owner();
    assert_eq!(story.event(Event::Disconnected), []);
    assert_eq!(story.pass(6_499), []);
    assert_eq!(story.pass(1), [stop(false), owned(None)]);
    assert_eq!(story.pass(3_499), []);
    assert_eq!(story.pass(1), [stop(true)]);
    assert_eq!(story.gone(), []);
    // The lease is still its own: no other host can have been started.
    assert_eq!(story.event(Event::Connected), [read()]);
    assert_eq!(story.changed(1, Some(lease(1))), [write(1, lease(2))]);
}

#[test]
fn a_lease_that_is_renewed_after_the_host_was_stopped_starts_it_again() {
    let mut story = Story::owner();
    story.event(Event::Disconnected);
    story.pass(7_000);
    story.event(Event::Connected);
    assert_eq!(story.changed(1, Some(lease(1))), [write(1, lease(2))]);
    let until = story.now + ms(9_500);
    // The keeper may let the old host end in peace.
    assert_eq!(story.written(2, Written::Done { revision: 2 }), [extend(until)]);
    assert_eq!(story.gone(), [start(until), owned(Some(("a", OWN)))]);
}

#[test]
fn the_lease_of_another_is_taken_after_it_did_not_change_for_eleven_seconds() {
    let mut story = Story::new(&["x"]);
    assert_eq!(story.changed(5, Some(of_other(1))), [owned(Some(("b", 8)))]);
    story.pass(10_000);
    assert_eq!(story.changed(6, Some(of_other(2))), []);
    // The same revision again is no news.
    story.pass(5_000);
    assert_eq!(story.changed(6, Some(of_other(2))), []);
    assert_eq!(story.changed(5, Some(of_other(1))), []);
    assert_eq!(story.pass(5_999), []);
    assert_eq!(story.pass(1), [owned(None), write(6, lease(1))]);
}

#[test]
fn a_released_lease_is_taken_at_once() {
    let mut story = Story::new(&["x"]);
    story.changed(5, Some(of_other(1)));
    assert_eq!(story.changed(6, Some(released(of_other(2)))), [owned(None), write(6, lease(1))]);
}

#[test]
fn a_write_without_an_answer_counts_from_its_own_sending() {
    let mut story = Story::owner();
    story.pass(2_000);
    let sent = story.now;
    story.pass(1_000);
    assert_eq!(story.written(2, Written::Unknown), []);
    assert_eq!(story.pass(500), [read()]);
    // It took effect. The next one is due two seconds after it was sent.
    assert_eq!(story.changed(2, Some(lease(2))), [extend(sent + ms(9_500))]);
    assert_eq!(story.pass(499), []);
    assert_eq!(story.pass(1), [write(2, lease(3))]);
    // It is read again, and did not take effect.
    assert_eq!(story.pass(2_000), [read()]);
    assert_eq!(story.changed(2, Some(lease(2))), [write(2, lease(4))]);
    // Its answer is late.
    let sent = story.now.before(ms(2_000));
    assert_eq!(story.written(3, Written::Done { revision: 3 }), [extend(sent + ms(9_500))]);
}

#[test]
fn an_answer_that_comes_after_the_lease_expired_starts_nothing() {
    let mut story = Story::new(&["x"]);
    assert_eq!(story.changed(0, None), [write(0, lease(1))]);
    story.now = story.now + ms(10_000);
    // The lease is its own, and is taken anew.
    assert_eq!(story.written(1, Written::Done { revision: 1 }), [write(1, lease(2))]);
}

#[test]
fn a_host_is_stopped_at_once_if_another_has_the_lease() {
    let mut story = Story::owner();
    story.pass(2_000);
    assert_eq!(story.written(2, Written::Conflict), []);
    assert_eq!(story.pass(50), [read()]);
    assert_eq!(story.changed(9, Some(of_other(1))), [stop(true), owned(Some(("b", 8)))]);
    // It is released, but the old host still runs.
    assert_eq!(story.changed(10, Some(released(of_other(2)))), [owned(None)]);
    assert_eq!(story.pass(1_000), []);
    assert_eq!(story.gone(), [write(10, lease(3))]);
}

#[test]
fn what_is_owned_is_released_when_its_host_is_gone() {
    let mut story = Story::owner();
    assert_eq!(story.event(Event::StopAsked), [stop(false), owned(None)]);
    // It is renewed as long as the host runs.
    assert_eq!(story.pass(2_000), [write(1, lease(2))]);
    story.written(2, Written::Done { revision: 2 });
    assert!(!story.leases.is_over());
    assert_eq!(story.gone(), [write(2, released(lease(3)))]);
    assert!(!story.leases.is_over());
    assert_eq!(story.written(3, Written::Done { revision: 3 }), []);
    assert!(story.leases.is_over());
}

#[test]
fn a_backend_that_is_removed_is_released_and_forgotten() {
    let mut story = Story::owner();
    assert_eq!(story.configure(&[]), [stop(false), owned(None)]);
    assert_eq!(story.gone(), [write(1, released(lease(2)))]);
    assert_eq!(story.written(2, Written::Done { revision: 2 }), []);
    story.pass(20_000);
    assert_eq!(story.leases.deadline(), None);
    // It is read as if it were new.
    assert_eq!(story.configure(&["x"]), [read()]);
}

/// Seed 1796 of the cluster world: the backend was removed from the configuration for a moment.
#[test]
fn no_host_is_started_under_a_lease_that_is_being_released() {
    let mut story = Story::owner();
    assert_eq!(story.configure(&[]), [stop(false), owned(None)]);
    assert_eq!(story.gone(), [write(1, released(lease(2)))]);
    // The release may take effect at any moment, and another replica may take the lease right after it.
    assert_eq!(story.configure(&["x"]), []);
    assert_eq!(story.written(2, Written::Done { revision: 2 }), [write(2, lease(3))]);

    // A release whose outcome is not known: what the bucket has is read, and the lease is taken anew.
    let mut story = Story::owner();
    story.configure(&[]);
    assert_eq!(story.gone(), [write(1, released(lease(2)))]);
    story.configure(&["x"]);
    assert_eq!(story.written(2, Written::Unknown), []);
    assert_eq!(story.pass(1_000), [read()]);
    assert_eq!(story.changed(1, Some(lease(1))), [write(1, lease(3))]);
    let until = story.now + ms(9_500);
    assert_eq!(story.written(3, Written::Done { revision: 2 }), [start(until), owned(Some(("a", OWN)))]);
}

#[test]
fn a_key_or_bucket_that_was_deleted_is_not_taken_while_its_host_may_run() {
    let mut story = Story::new(&["x"]);
    story.changed(5, Some(of_other(1)));
    assert_eq!(story.changed(6, None), [owned(None)]);
    assert_eq!(story.pass(10_999), []);
    assert_eq!(story.pass(1), [write(6, lease(1))]);

    let mut story = Story::owner();
    story.event(Event::Disconnected);
    assert_eq!(story.event(Event::Cleared), [stop(true), owned(None)]);
    story.gone();
    assert_eq!(story.event(Event::Connected), [read()]);
    assert_eq!(story.changed(0, None), []);
    assert_eq!(story.pass(10_999), []);
    assert_eq!(story.pass(1), [write(0, lease(2))]);
}

#[test]
fn the_more_a_replica_has_the_later_it_takes_the_next() {
    let mut story = Story::new(&["x", "y", "z"]);
    let free = |backend: &str| Event::Changed { backend: backend.into(), revision: 0, lease: None };
    let taken = |actions: Vec<Action>| {
        let names = actions.into_iter().filter_map(|action| match action {
            Action::Write { backend, .. } => Some(backend),
            _ => None,
        });
        names.collect::<String>()
    };
    assert_eq!(taken(story.event(free("x"))), "x");
    assert_eq!(taken(story.event(free("y"))), "");
    assert_eq!(taken(story.event(free("z"))), "");
    assert_eq!(taken(story.pass(99)), "");
    assert_eq!(taken(story.pass(1)), "y");
    assert_eq!(taken(story.pass(100)), "z");
}

#[test]
fn requests_at_the_same_time_are_bounded_and_leases_in_use_come_first() {
    let names: Vec<String> = (0..1_000).map(|number| format!("b{number:04}")).collect();
    let mut leases = Leases::new("a".into(), OWN);
    let (now, mut actions) = (BootTime(ms(5_000)), Vec::new());
    leases.handle(Event::Configured { backends: names.iter().cloned().collect() }, now, &mut actions);
    leases.handle(Event::Connected, now, &mut actions);
    let mut reads = 0;
    while let Some(Action::Read { backend }) = actions.pop() {
        assert!(actions.len() < 128);
        reads += 1;
        let lease = Some(of_other(1));
        leases.handle(Event::Changed { backend, revision: 1, lease }, now, &mut actions);
        actions.retain(|action| matches!(action, Action::Read { .. }));
    }
    assert_eq!(reads, names.len());
}

#[test]
fn a_lease_is_read_as_it_was_written() {
    let written = Lease { instance: u64::MAX, ..lease(3) };
    assert_eq!(Lease::decode(&written.encode()), Ok(written.clone()));
    assert_eq!(
        String::from_utf8(released(lease(1)).encode()).unwrap(),
        r#"{"version":1,"owner":"a","instance":"0000000000000007","attempt":1,"released":true}"#
    );
    let table = [
        (r#"{"version":1,"owner":"a","instance":"ffffffffffffffff","attempt":3,"new":[1]}"#, Ok(written)),
        (r#"{"version":2,"keeper":{}}"#, Err(BadValue::Version(2))),
        (r#"{"version":1,"owner":"a","instance":"7","attempt":3}"#, Err(BadValue::Damaged)),
        (r#"{"version":1,"owner":"a","instance":"+fffffffffffffff","attempt":3}"#, Err(BadValue::Damaged)),
        (r#"{"version":1,"owner":"a","instance":"ffffffffffffffff","attempt":-3}"#, Err(BadValue::Damaged)),
        (r#"{"version":1,"owner":"a","instance":"ffffffffffffffff"}"#, Err(BadValue::Damaged)),
        (r#"{"owner":"a"}"#, Err(BadValue::Damaged)),
        ("\u{1F980}", Err(BadValue::Damaged)),
        ("", Err(BadValue::Damaged)),
    ];
    for (text, lease) in table {
        assert_eq!(Lease::decode(text.as_bytes()), lease, "{text}");
    }
    assert_eq!(Lease::decode(" ".repeat(LEASE_BYTES_MAX + 1).as_bytes()), Err(BadValue::TooLong));
}
