//! Runs every target briefly with its seeds and mutations of them. The inputs are the same every
//! time, and a failure prints its input. SPRINGTIDE_FUZZ_RUNS=1000000 runs more.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use super::{TARGETS, Target};

/// Accepted inputs that are mutated further.
const POOL_MAX: usize = 256;
const INPUT_BYTES_MAX: usize = 32 * 1024;
/// Tokens of the formats.
const WORDS: [&[u8]; 44] = [
    b"null",
    b"true",
    b"false",
    b"0",
    b"-0.0",
    b"1",
    b"-1",
    b"1e308",
    b"1e-400",
    b"0.1",
    b"4294967295",
    b"2147483648",
    b"18446744073709551616",
    b"9007199254740993",
    b"0.30000000000000004",
    b"\"\"",
    b"\"\\u0000\"",
    b"\"\\ud800\"",
    b"[]",
    b"{}",
    b"[[[[[[[[",
    b"{\"a\":",
    b",",
    b":",
    b"\"",
    b"\n\n",
    b"\xff",
    b"\x00",
    b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01",
    b"\x1f\x8b",
    b"\x28\xb5\x2f\xfd",
    b"EVNT",
    b"generation_id",
    b"episode_id",
    b"comment",
    b"demonstration",
    b"1970-01-01T00:00:00Z",
    b"9999-12-31T23:59:60Z",
    b"00000000-0000-7000-8000-000000000000",
    b"((((((((",
    b"all.kept",
    b".map(x, x)",
    b"springtide-replayed: 1/2\n",
    b"\"feedback\":{}",
];

fn check(target: &Target) {
    let runs = std::env::var("SPRINGTIDE_FUZZ_RUNS").map_or(target.test_inputs, |runs| runs.parse().unwrap());
    let mut random = StdRng::seed_from_u64(0x5EED);
    let mut pool = (target.seeds)();
    let mut accepted = 0;
    for input in pool.clone() {
        accepted += u32::from(run(target, &input));
    }
    assert!(accepted > 0, "{}: no seed is accepted", target.name);
    for _ in 0..runs {
        let mut input = pool.choose(&mut random).unwrap().clone();
        for _ in 0..random.random_range(1..4) {
            mutate(&mut input, &pool, &mut random);
        }
        input.truncate(INPUT_BYTES_MAX);
        if run(target, &input) {
            accepted += 1;
            if pool.len() < POOL_MAX {
                pool.push(input);
            } else {
                let place = random.random_range(0..POOL_MAX);
                pool[place] = input;
            }
        }
    }
    println!("{}: {runs} inputs, {accepted} accepted", target.name);
}

fn run(target: &Target, input: &[u8]) -> bool {
    catch_unwind(AssertUnwindSafe(|| (target.run)(input))).unwrap_or_else(|panic| {
        eprintln!("{}: {}", target.name, input.escape_ascii());
        resume_unwind(panic)
    })
}

fn mutate(input: &mut Vec<u8>, pool: &[Vec<u8>], random: &mut StdRng) {
    let at = random.random_range(0..=input.len());
    let end = (at + random.random_range(0..16)).min(input.len());
    match random.random_range(0..9) {
        0 if at < input.len() => input[at] ^= 1 << random.random_range(0..8),
        1 if at < input.len() => input[at] = random.random(),
        2 => drop(input.drain(at..end)),
        3 => input.insert(at, random.random()),
        4 => drop(input.splice(at..end, WORDS.choose(random).unwrap().iter().copied())),
        5 => {
            let copy = input[at..end].to_vec();
            let to = random.random_range(0..=input.len());
            drop(input.splice(to..to, copy));
        }
        6 => input.truncate(at),
        7 => {
            let other = pool.choose(random).unwrap();
            let from = random.random_range(0..=other.len());
            let length = random.random_range(0..64).min(other.len() - from);
            drop(input.splice(at..end, other[from..from + length].iter().copied()));
        }
        _ => {
            // Digits stay digits, so numbers and ids stay valid.
            let digits = input.iter_mut().skip(at).filter(|byte| byte.is_ascii_digit());
            digits
                .take(3)
                .for_each(|digit| *digit = b'0' + random.random_range(0..10));
        }
    }
}

/// One test for each target, by its name.
macro_rules! targets {
    ($($name:ident)*) => {
        $(#[test] fn $name() {
            let target = TARGETS.iter().find(|target| target.name == stringify!($name));
            check(target.unwrap());
        })*

        #[test]
        fn every_target_has_a_test() {
            let tested = [$(stringify!($name)),*];
            assert!(TARGETS.iter().map(|target| target.name).eq(tested));
        }
    };
}

targets! {
    event_protobuf event_json announcement dlq_record dlq_repair dlq_position http_feedback http_generation http_retraction
    http_episode_end http_batch http_cloudevent http_cloudevent_batch http_request http_compressed
    reward_expression ingest_options spool_segment spool_folder
}
