//! Random bytes through the agent's terminal and the user's terminal, compared byte by byte.

use std::process::Command;

use super::support::OUTLAST;

const BENCH: &str = env!("CARGO_BIN_EXE_outlast-bench");

/// Megabytes without the screen model and with it, which is slow in a debug build; the benchmark does the same with a
/// gigabyte.
const MEGABYTES: &str = "32,4";

#[test]
fn every_byte_arrives_as_it_was_written() {
    let output = Command::new(BENCH)
        .args(["pty", "--only", "exact", "--json", "--exact-mb", MEGABYTES, "--outlast", OUTLAST])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_str(&said).unwrap();
    let exact = report["notes"].as_array().unwrap().iter().filter(|note| note.to_string().contains(": exact, "));
    assert_eq!(exact.count(), 2, "{report}");
}
