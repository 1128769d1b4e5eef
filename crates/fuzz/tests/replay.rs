//! Every corpus is a regression test: each target plays its whole corpus and a number of seeded mutations of it, without an
//! engine. Findings of the engine become files of a corpus.

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    time::Duration,
};

use outlast_fuzz::{TARGETS, Target, mutate::Mutator, target};

/// How many mutations each target plays; `OUTLAST_FUZZ_MUTATIONS` and `OUTLAST_FUZZ_SEED` choose others.
const MUTATIONS: u64 = 300;
/// How much processor time one input may take in a debug build.
const INPUT_MAX: Duration = Duration::from_secs(10);
/// How large all corpora together may get.
const CORPORA_MAX: u64 = 1 << 20;

#[test]
fn relay() {
    replay("relay");
}

#[test]
fn gateway() {
    replay("gateway");
}

#[test]
fn http() {
    replay("http");
}

#[cfg(unix)]
#[test]
fn control() {
    replay("control");
}

#[test]
fn config() {
    replay("config");
}

#[test]
fn every_target_has_a_small_corpus_and_every_corpus_a_target() {
    let mut size = 0;
    for corpus in files(&corpora()) {
        let name = corpus.file_name().unwrap_or_default().to_string_lossy().into_owned();
        assert!(target(&name).is_some(), "no target named `{name}`");
        size += files(&corpus).iter().map(|file| fs::metadata(file).unwrap().len()).sum::<u64>();
    }
    assert!(size <= CORPORA_MAX, "the corpora have {size} bytes");
    for target in TARGETS {
        assert!(!files(&corpora().join(target.name)).is_empty(), "no corpus for `{}`", target.name);
    }
}

fn replay(name: &str) {
    let target = target(name).expect("a target of that name");
    let corpus: Vec<(PathBuf, Vec<u8>)> = files(&corpora().join(name))
        .into_iter()
        .map(|file| {
            let input = fs::read(&file).unwrap();
            (file, input)
        })
        .collect();
    for (file, input) in &corpus {
        play(target, input, &file.display().to_string());
    }
    let number = |name: &str, default: u64| std::env::var(name).map_or(default, |text| text.parse().expect(name));
    let from = number("OUTLAST_FUZZ_SEED", 0);
    let inputs: Vec<&[u8]> = corpus.iter().map(|(_, input)| input.as_slice()).collect();
    for seed in from..from + number("OUTLAST_FUZZ_MUTATIONS", MUTATIONS) {
        let input = Mutator::new(seed).mutate(&inputs);
        play(target, &input, &format!("seed {seed}"));
    }
}

fn play(target: &Target, input: &[u8], origin: &str) {
    let begun = cpu_time();
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (target.run)(input))) {
        let file = std::env::temp_dir().join(format!("outlast-fuzz-{}-{}", target.name, std::process::id()));
        fs::write(&file, input).unwrap();
        eprintln!("{origin}: target `{}` failed with the input in {}", target.name, file.display());
        std::panic::resume_unwind(panic);
    }
    let took = cpu_time().saturating_sub(begun);
    assert!(took <= INPUT_MAX, "{origin}: target `{}` took {took:?}", target.name);
}

/// Processor time of this thread, which a loaded machine does not lengthen. Elsewhere than on Linux it is not measured.
fn cpu_time() -> Duration {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = text.split(' ').next().and_then(|nanos| nanos.parse().ok());
    Duration::from_nanos(nanos.unwrap_or(0))
}

fn corpora() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}
