//! What the machine gives to loops that do nothing else: on one core, and on all beside each other.

use crate::{ROUNDS, alone, best};
use rayon::prelude::*;
use std::hint::black_box;
use twox_hash::XxHash3_128;

pub struct Machine {
    processor: String,
    cores: usize,
    /// Name, GB/s on one core, on all.
    speeds: Vec<(&'static str, f64, f64)>,
}

/// From the first two parts, into the third.
type Loop = dyn Fn(&[u8], &[u8], &mut [u8]) + Sync;

/// A core's share of a loop: as large as what a frame's codec has at hand.
const PART: usize = 2 << 20;

pub fn measure(bytes: usize, cores: usize) -> Machine {
    let a: Vec<u8> = (0..bytes as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let b = a.clone();
    let mut c = a.clone();
    let mut speeds = vec![];
    let mut both = |name, one: &Loop| {
        let parts = |c: &mut [u8], all: bool| {
            let parts = a.par_chunks(PART).zip(b.par_chunks(PART)).zip(c.par_chunks_mut(PART));
            if all {
                parts.for_each(|((a, b), c)| one(a, b, c));
            } else {
                let parts = a.chunks(PART).zip(b.chunks(PART)).zip(c.chunks_mut(PART));
                parts.for_each(|((a, b), c)| one(a, b, c));
            }
        };
        let single = alone(bytes, ROUNDS, || (), |()| parts(&mut c, false));
        let all = best(bytes, ROUNDS, || (), |()| parts(&mut c, true));
        speeds.push((name, single, all));
    };
    both("memcpy", &|a, _, c| c.copy_from_slice(a));
    both("compare old and new", &|a, b, _| assert!(black_box(a) == black_box(b)));
    both("XXH3-128", &|a, _, _| {
        black_box(XxHash3_128::oneshot(a));
    });
    both("BLAKE3", &|a, _, _| {
        black_box(blake3::hash(a));
    });
    Machine {
        processor: processor(),
        cores,
        speeds,
    }
}

fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let kinds = format!("{:?}", artifact::isa::Isa::best());
    format!("{}, {kinds}", name.map_or("unknown processor", |(_, name)| name))
}

impl Machine {
    pub fn describe(&self) -> String {
        let speeds = self
            .speeds
            .iter()
            .map(|(name, one, all)| format!("{name} {one:.1} ({all:.1})"));
        let speeds: Vec<_> = speeds.collect();
        format!(
            "{}, {} cores. GB/s on one core (on all): {}",
            self.processor,
            self.cores,
            speeds.join(", ")
        )
    }

    pub fn json(&self) -> serde_json::Value {
        let speed = |&(name, one, all): &(&str, f64, f64)| serde_json::json!({"what": name, "gb_per_second": one, "gb_per_second_all_cores": all});
        serde_json::json!({
            "processor": self.processor, "cores": self.cores,
            "speeds": self.speeds.iter().map(speed).collect::<Vec<_>>(),
        })
    }
}
