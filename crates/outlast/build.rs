//! Leaves the unwind tables (1.3 MB) out of a release build for Linux. A panic aborts and the program is stripped, so nothing
//! reads them. Static builds keep them, because the start code of a static C library may refer to them.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=no_unwind_tables.ld");
    let is_linux = env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "linux");
    let is_release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let is_static = env::var("CARGO_CFG_TARGET_FEATURE").is_ok_and(|features| features.contains("crt-static"));
    if is_linux && is_release && !is_static {
        let directory = env::var("CARGO_MANIFEST_DIR").expect("cargo sets the directory of the manifest");
        println!("cargo::rustc-link-arg-bins=-Wl,--no-eh-frame-hdr");
        println!("cargo::rustc-link-arg-bins=-T{directory}/no_unwind_tables.ld");
    }
}
