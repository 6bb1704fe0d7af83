//! What was measured, as a table and as JSON.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use super::{HORIZON_SECONDS, RESIDENT_MIB_MAX, Size};

#[derive(Debug, Default)]
pub struct Latencies(Vec<f64>);

/// Of latencies, seconds.
#[derive(Debug, Clone, Copy, Default)]
pub struct Summary {
    pub number: usize,
    pub p50: f64,
    pub p99: f64,
    pub max: f64,
}

impl Latencies {
    pub fn add(&mut self, seconds: f64) {
        self.0.push(seconds);
    }

    pub fn summary(&self) -> Summary {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let Some(last) = sorted.len().checked_sub(1) else {
            return Summary::default();
        };
        // The smallest value that at least this share does not exceed.
        let quantile = |share: f64| sorted[((sorted.len() as f64 * share).ceil() as usize).clamp(1, last + 1) - 1];
        Summary {
            number: sorted.len(),
            p50: quantile(0.5),
            p99: quantile(0.99),
            max: sorted[last],
        }
    }
}

impl Summary {
    fn milliseconds(self) -> String {
        let [p50, p99, max] = [self.p50, self.p99, self.max].map(|seconds| 1000.0 * seconds);
        format!("{p50:.1}, {p99:.1}, {max:.0}")
    }

    fn seconds(self) -> String {
        format!("{:.2}, {:.2}, {:.2}", self.p50, self.p99, self.max)
    }

    pub fn json(self) -> Value {
        json!({"number": self.number, "p50_seconds": self.p50, "p99_seconds": self.p99, "max_seconds": self.max})
    }
}

/// A line of the table: one attack.
pub struct Line {
    pub attack: &'static str,
    /// What the attacker did.
    pub attacker: String,
    pub batches: Summary,
    pub completions: Summary,
    pub closings: Summary,
    pub failed: BTreeMap<String, usize>,
    pub broken: usize,
    pub ingest_cpu_seconds: f64,
    pub serve_cpu_seconds: f64,
    pub ingest_peak_mib: u64,
    pub serve_peak_mib: u64,
}

impl Line {
    fn row(&self) -> String {
        let failed: usize = self.failed.values().sum();
        format!(
            "| {} | {} | {} | {} | {} | {} | {} | {:.1} + {:.1} | {} + {} |",
            self.attack,
            self.batches.milliseconds(),
            self.completions.milliseconds(),
            self.closings.seconds(),
            self.batches.number + self.completions.number,
            failed,
            self.broken,
            self.ingest_cpu_seconds,
            self.serve_cpu_seconds,
            self.ingest_peak_mib,
            self.serve_peak_mib,
        )
    }

    pub fn print(&self) {
        println!("{}", self.row());
        if !self.attacker.is_empty() {
            println!("    {}", self.attacker);
        }
    }

    fn json(&self) -> Value {
        json!({
            "attack": self.attack,
            "attacker": self.attacker,
            "batches": self.batches.json(),
            "completions": self.completions.json(),
            "closings": self.closings.json(),
            "failed": self.failed,
            "broken": self.broken,
            "ingest_cpu_seconds": self.ingest_cpu_seconds,
            "serve_cpu_seconds": self.serve_cpu_seconds,
            "ingest_peak_mib": self.ingest_peak_mib,
            "serve_peak_mib": self.serve_peak_mib,
        })
    }
}

/// The table of `docs/measurements/attacks.md`.
pub fn print(lines: &[Line]) {
    println!(
        "\n| attack | batches, ms: p50, p99, max | completions, ms: p50, p99, max | closings, s: p50, p99, max | honest \
         requests | failed | broken connections | CPU, s: ingest + serve | memory, MiB: ingest + serve |"
    );
    println!("|{}", "---|".repeat(9));
    for line in lines {
        println!("{}", line.row());
    }
}

/// Writes everything to the file that `SPRINGTIDE_ATTACKS_JSON` names, if it does.
pub fn write(size: Size, took: Duration, lines: &[Line]) {
    let Ok(path) = std::env::var("SPRINGTIDE_ATTACKS_JSON") else {
        return;
    };
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let processor = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let json = json!({
        "machine": {
            "processor": processor.map(|(_, name)| name),
            "cores": std::thread::available_parallelism().map_or(0, usize::from),
        },
        "seconds": took.as_secs_f64(),
        "parameters": {
            "seconds": size.seconds, "batches_per_second": size.rate, "events_per_batch": 10,
            "completions_per_second": size.completions, "attacker_connections": size.connections,
            "connections_max": size.connections_max, "horizon_seconds": HORIZON_SECONDS,
            "resident_mib_max": RESIDENT_MIB_MAX,
        },
        "attacks": lines.iter().map(Line::json).collect::<Vec<_>>(),
    });
    let path = std::path::Path::new(&path);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, serde_json::to_vec_pretty(&json).unwrap()).unwrap();
    println!("{} in {:.0} s", path.display(), took.as_secs_f64());
}
