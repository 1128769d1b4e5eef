//! Faults on `mcp`, `gateway` and `run` at the same time. `cargo xtask chaos` runs the same for longer, with other
//! seeds.

use std::process::Command;

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

fn run(args: &[&str]) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_outlast-chaos"));
    let output = command.args(args).output().expect("the program starts");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}");
    println!("{text}");
}
