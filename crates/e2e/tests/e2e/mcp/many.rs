//! P: restarts leave no process, no descriptor and no memory behind.

use super::client::{Place, Setup, descriptors, proc_number};

/// The rest of a thousand is for those who have the time: `OUTLAST_LONG=1`.
const RESTARTS: u32 = 200;
const RESTARTS_LONG: u32 = 1_000;
/// From here on nothing grows.
const SETTLED: u32 = 100;
const GROWTH_MAX_KB: u64 = 2 << 10;

#[test]
fn restarts_leave_nothing_behind() {
    let restarts = if std::env::var_os("OUTLAST_LONG").is_some() { RESTARTS_LONG } else { RESTARTS };
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    client.tool_names();
    let ours = [client.pid(), client.keeper()];
    let memory = || ours.map(|pid| proc_number(pid, "VmRSS:").expect("it runs"));
    let counts = || ours.map(|pid| descriptors(pid).len());
    let mut before = None;
    for restart in 1..=restarts {
        let report = client.restart();
        assert_eq!(report["generation"], restart + 1, "{report}");
        if restart == SETTLED {
            // Its predecessor is gone when the next restart is answered, or soon after.
            super::client::until("one server alone", || (place.family().len() == 1).then_some(()));
            before = Some((memory(), counts()));
        }
    }
    super::client::until("one server alone", || (place.family().len() == 1).then_some(()));
    let (memory_before, counts_before) = before.expect("it settled");
    let (memory_after, counts_after) = (memory(), counts());
    println!("{restarts} restarts: {memory_before:?} -> {memory_after:?} kB, {counts_before:?} -> {counts_after:?}");
    assert_eq!(counts_after, counts_before, "{:#?}", ours.map(descriptors));
    for (before, after) in memory_before.into_iter().zip(memory_after) {
        assert!(after <= before + GROWTH_MAX_KB, "{before} kB at {SETTLED}, {after} kB at {restarts}");
    }
    client.end();
    place.is_swept();
}
