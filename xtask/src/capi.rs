//! Builds the C library as users install it: shared, static, and the header.

use crate::report::Failure;
use crate::{cannot_run, cargo, must, root, target};
use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

const NAME: &str = "outlast_client";
/// The output line of rustc that lists the system libraries which a static library needs.
const SYSTEMS_OWN: &str = "native-static-libs: ";
const PROGRAM: &str =
    "#include \"outlast.h\"\nint main(void) { return outlast_api_version() != OUTLAST_API_VERSION; }\n";

pub(crate) fn build() -> Result<(), Failure> {
    must(cargo(["build", "--profile", "capi", "-p", "outlast-capi"]), "the library for C does not build")?;
    let made = target().join("capi");
    let place = target().join("capi").join("outlast-capi");
    let cannot_write = |error| Failure::new(format!("cannot write to {}", place.display())).because(error);
    fs::create_dir_all(&place).map_err(cannot_write)?;

    let mut whole = cargo(["rustc", "--profile", "capi", "-p", "outlast-capi", "--lib", "--crate-type", "staticlib"]);
    whole.args(["--", "--print", "native-static-libs"]).stderr(Stdio::piped());
    let output = whole.output().map_err(|error| cannot_run(&whole, error))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(Failure::new("the static library for C does not build").because(said));
    }
    let systems_own = said.lines().find_map(|line| line.split_once(SYSTEMS_OWN)).map_or("", |(_, libraries)| libraries);

    let shared = format!("{DLL_PREFIX}{NAME}{DLL_SUFFIX}");
    let fixed = if cfg!(windows) { format!("{NAME}.lib") } else { format!("lib{NAME}.a") };
    for name in [&shared, &fixed] {
        fs::copy(made.join(name), place.join(name)).map_err(cannot_write)?;
    }
    fs::copy(root().join("crates/capi/include/outlast.h"), place.join("outlast.h")).map_err(cannot_write)?;
    if cfg!(unix) {
        check(&place, &shared, systems_own)?;
    }
    for name in [&shared, &fixed, "outlast.h"] {
        let size = fs::metadata(place.join(name)).map_or(0, |found| found.len());
        println!("{:>10}  {}", size, place.join(name).display());
    }
    println!("a program with the static one needs besides: {systems_own}");
    Ok(())
}

/// Checks that a program with each of them starts, and finds the version it was built for.
fn check(place: &Path, shared: &str, systems_own: &str) -> Result<(), Failure> {
    let cannot_write = |error| Failure::new(format!("cannot write to {}", place.display())).because(error);
    let source = place.join("check.c");
    fs::write(&source, PROGRAM).map_err(cannot_write)?;
    let fixed = place.join(format!("lib{NAME}.a"));
    for (library, besides) in [(place.join(shared), ""), (fixed, systems_own)] {
        let program = place.join("check");
        let mut compiler = Command::new("cc");
        compiler.arg("-I").arg(place).arg(&source).arg(&library).args(besides.split_whitespace());
        compiler.arg(format!("-Wl,-rpath,{}", place.display())).arg("-o").arg(&program);
        must(compiler, &format!("no program can be made with {}", library.display()))?;
        must(Command::new(&program), &format!("a program with {} does not run", library.display()))?;
        fs::remove_file(&program).map_err(cannot_write)?;
    }
    fs::remove_file(&source).map_err(cannot_write)
}
