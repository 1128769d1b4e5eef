//! Passes options to the linker that make a release build for Linux smaller: no unwind tables, one copy of equal functions, and
//! relocations in a compact form. A linker that the user has chosen may not know these options, and gets none of them.

use std::{env, path::Path, process::Command};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=no_unwind_tables.ld");
    if !is_release() || variable("CARGO_CFG_TARGET_OS") != "linux" || has_own_linker() {
        return;
    }
    let link = |option: &str| println!("cargo::rustc-link-arg-bins={option}");
    if uses_lld() {
        link("-Wl,--icf=all");
    }
    // The start code of a static C library may refer to unwind tables.
    if variable("CARGO_CFG_TARGET_FEATURE").contains("crt-static") {
        return;
    }
    // 1.3 MB: a panic aborts and the program is stripped, so nothing reads them.
    link("-Wl,--no-eh-frame-hdr");
    link(&format!("-T{}/no_unwind_tables.ld", variable("CARGO_MANIFEST_DIR")));
    // 0.5 MB. A program with them runs with glibc 2.36 or newer, which the computer that builds it must have, too.
    if variable("TARGET") == variable("HOST") && Some((2, 36)) <= version(&output("getconf", "GNU_LIBC_VERSION")) {
        link("-Wl,-z,pack-relative-relocs");
    }
}

/// Not a profile that inherits from it: some unwind after a panic. Its name is only in the path `…/release/build/…/out`.
fn is_release() -> bool {
    let out = variable("OUT_DIR");
    Path::new(&out).ancestors().nth(3).is_some_and(|folder| folder.ends_with("release"))
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_default()
}

fn has_own_linker() -> bool {
    println!("cargo::rerun-if-env-changed=LD_PRELOAD");
    let flags = variable("CARGO_ENCODED_RUSTFLAGS");
    env::var_os("RUSTC_LINKER").is_some() || flags.contains("link") || variable("LD_PRELOAD").contains("mold")
}

/// Since Rust 1.90 lld is the linker for this target unless the user chooses another one.
fn uses_lld() -> bool {
    let is_default = variable("TARGET") == "x86_64-unknown-linux-gnu";
    is_default && Some((1, 90)) <= version(&output(&variable("RUSTC"), "--version"))
}

fn output(program: &str, argument: &str) -> String {
    let output = Command::new(program).arg(argument).output();
    output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
}

/// The version in a text such as `rustc 1.95.0 (…)` or `glibc 2.36`.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split_whitespace().nth(1)?.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}
