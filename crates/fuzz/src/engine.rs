//! The program that `cargo xtask fuzz` runs: libFuzzer around the target that `OUTLAST_FUZZ_TARGET` names.
#![no_main]

use std::{env, sync::LazyLock};

use libfuzzer_sys::fuzz_target;
use outlast_fuzz::{Target, target};

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = env::var("OUTLAST_FUZZ_TARGET").expect("OUTLAST_FUZZ_TARGET names the target");
    target(&name).unwrap_or_else(|| panic!("no target named `{name}`"))
});

fuzz_target!(|input: &[u8]| (TARGET.run)(input));
