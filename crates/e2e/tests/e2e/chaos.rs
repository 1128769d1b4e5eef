//! Faults on `mcp`, `gateway` and `run` at the same time. `cargo xtask chaos` runs the same for longer, with other
//! seeds.

use std::{io::Write, process::Command};

use crate::support::nats::NatsPrograms;

/// Any number; another one gives another order of the faults.
const SEED: &str = "16";

#[test]
fn thirty_seconds_of_faults_break_no_promise() {
    run(&["--seconds", "30", "--seed", SEED]);
}

#[test]
fn thirty_seconds_of_faults_in_a_cluster_break_no_promise() {
    if NatsPrograms::find("chaos::thirty_seconds_of_faults_in_a_cluster_break_no_promise").is_some() {
        run(&["--cluster", "--seconds", "30", "--seed", SEED]);
    }
}

/// Each kind of partition comes once, on its own: one side without a quorum, most replicas on it, and no quorum at all.
#[test]
fn partitions_by_network_namespaces_break_no_promise() {
    const TEST: &str = "chaos::partitions_by_network_namespaces_break_no_promise";
    if NatsPrograms::find(TEST).is_none() {
        return;
    }
    let said = run(&["--cluster", "--recovery", "--only", "network", "--seconds", "1", "--seed", SEED]);
    if let Some(skipped) = said.lines().find(|line| line.contains("SKIPPED network namespaces")) {
        let _ = writeln!(std::io::stderr(), "SKIPPED {TEST}: {skipped}");
        return;
    }
    for kind in ["PartitionMinority", "PartitionMajority", "PartitionAll", "CutOwner", "SilenceOwner"] {
        assert!(said.contains(&format!("| {kind}")), "{said}");
    }
    // The namespaces have ended with the program, and their names are known nowhere.
    let left = std::fs::read_dir("/run/netns").into_iter().flatten().flatten();
    let left: Vec<_> =
        left.map(|entry| entry.file_name()).filter(|name| ["n1", "a"].iter().any(|own| name == own)).collect();
    assert!(left.is_empty(), "{left:?}");
}

fn run(args: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_outlast-chaos"));
    let output = command.args(args).output().expect("the program starts");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    // Beside the line of the test, where a shortened log still has them.
    for broken in text.lines().filter(|line| line.starts_with("BROKEN")) {
        let _ = writeln!(std::io::stderr(), "{broken}");
    }
    assert!(output.status.success(), "{text}");
    println!("{text}");
    text
}
