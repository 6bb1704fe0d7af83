// The libFuzzer driver, included by the `fuzz` example of each crate, which brings `TARGETS` and
// `Target` into scope.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// How often the counts are written. libFuzzer ends the process without notice.
const COUNT_EVERY: u64 = 256;

struct Run {
    target: &'static Target,
    counts: PathBuf,
    executed: AtomicU64,
    accepted: AtomicU64,
}

static RUN: OnceLock<Run> = OnceLock::new();

libfuzzer_sys::fuzz_target!(init: start(), |input: &[u8]| step(input));

/// Reads the target's name from SPRINGTIDE_FUZZ_TARGET and writes its seeds to
/// SPRINGTIDE_FUZZ_DIR/seeds/<target>. Without a name it prints the names of all targets and exits.
fn start() {
    let Ok(name) = std::env::var("SPRINGTIDE_FUZZ_TARGET") else {
        TARGETS.iter().for_each(|target| println!("{}", target.name));
        std::process::exit(0);
    };
    let target = TARGETS.iter().find(|target| target.name == name);
    let target = target.unwrap_or_else(|| panic!("SPRINGTIDE_FUZZ_TARGET={name}: unknown target"));
    let dir = PathBuf::from(std::env::var_os("SPRINGTIDE_FUZZ_DIR").expect("SPRINGTIDE_FUZZ_DIR is not set"));
    let seeds = dir.join("seeds").join(&name);
    std::fs::create_dir_all(&seeds).unwrap();
    for (index, seed) in (target.seeds)().into_iter().enumerate() {
        std::fs::write(seeds.join(format!("{index:03}")), seed).unwrap();
    }
    let counts = dir.join("counts");
    std::fs::create_dir_all(&counts).unwrap();
    let run = Run {
        target,
        counts: counts.join(name),
        executed: AtomicU64::new(0),
        accepted: AtomicU64::new(0),
    };
    assert!(RUN.set(run).is_ok(), "started twice");
}

/// Runs one input.
fn step(input: &[u8]) {
    let run = RUN.get().expect("not started");
    let accepted = u64::from((run.target.run)(input));
    let accepted = run.accepted.fetch_add(accepted, Ordering::Relaxed) + accepted;
    let executed = run.executed.fetch_add(1, Ordering::Relaxed) + 1;
    if executed.is_multiple_of(COUNT_EVERY) {
        std::fs::write(&run.counts, format!("{executed} {accepted}\n")).unwrap();
    }
}
