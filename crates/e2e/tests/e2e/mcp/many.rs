//! P: restarts leak no process, no descriptor and no memory.

use super::client::{Place, Setup, descriptors, proc_number, until};

const RESTARTS: u32 = 1_000;
/// From here on nothing grows.
const SETTLED: u32 = 100;
const GROWTH_MAX_KB: u64 = 1 << 10;

#[test]
fn restarts_leave_nothing_behind() {
    let place = Place::new();
    let mut client = Setup::new(&place).ready();
    client.tool_names();
    let ours = [client.pid(), client.keeper()];
    // Only anonymous memory: pages of the program file are loaded and dropped at any time.
    let memory = || ours.map(|pid| proc_number(pid, "RssAnon:").expect("it runs"));
    let counts = || ours.map(|pid| descriptors(pid).len());
    let mut before = None;
    for restart in 1..=RESTARTS {
        let report = client.restart();
        assert_eq!(report["generation"], restart + 1, "{report}");
        if restart == SETTLED {
            // Its predecessor has exited when the next restart is answered, or soon after.
            until("one server alone", || (place.family().len() == 1).then_some(()));
            before = Some((memory(), counts()));
        }
    }
    until("one server alone", || (place.family().len() == 1).then_some(()));
    let (memory_before, counts_before) = before.expect("it settled");
    // The keeper opens the process table now and then, so its count may be higher for a moment.
    let is_low = |counts: [usize; 2]| counts.iter().zip(counts_before).all(|(after, before)| *after <= before);
    until(&format!("{:#?} to be closed", ours.map(descriptors)), || is_low(counts()).then_some(()));
    let (memory_after, counts_after) = (memory(), counts());
    println!("{RESTARTS} restarts: {memory_before:?} -> {memory_after:?} kB, {counts_before:?} -> {counts_after:?}");
    for (before, after) in memory_before.into_iter().zip(memory_after) {
        assert!(after <= before + GROWTH_MAX_KB, "{before} kB at {SETTLED}, {after} kB at {RESTARTS}");
    }
    client.end();
    place.is_swept();
}
