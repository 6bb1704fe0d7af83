//! Size and speed of deltas, compared with other codecs on the same pairs, with the entropy bound,
//! and with the speed of this machine's memory and hashes. `make bench NAME=delta`.
//!
//! Pairs are synthetic: weights of N(0, 0.02) whose fp32 masters move as with AdamW in its steady
//! state, at four learning rates. `--pairs DIR` adds the folders of DIR that have a
//! `model.safetensors`, each with the next one by name. `--quantized` measures quantized copies of
//! the pairs instead: `make bench NAME=quant`. `--mib N` is the size of a synthetic pair in MiB of bf16.
//! `--programs` also runs bsdiff and xdelta3 if they are installed.
//!
//! Times on all cores are the best of several rounds. Times on one core are the mean CPU time of
//! the thread if Linux reports it, so that other work on the machine counts less. GB/s are bytes of
//! the model, not of the delta. The benchmark asserts no figures.

mod machine;
mod ours;
mod pairs;
mod quantized;
mod rivals;

use std::time::Instant;

const ROUNDS: usize = 5;

/// One way on one pair.
struct Row {
    pair: String,
    way: String,
    delta_bytes: usize,
    model_bytes: usize,
    /// GB/s; none where it was not measured.
    encode: Option<f64>,
    apply: Option<f64>,
    encode_all: Option<f64>,
    apply_all: Option<f64>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut options = Options::default();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--pairs" => options.folder = Some(arguments.next().ok_or("--pairs takes a folder")?.into()),
            "--mib" => options.mib = arguments.next().ok_or("--mib takes a number")?.parse()?,
            "--json" => options.json = Some(arguments.next().ok_or("--json takes a path")?.into()),
            "--programs" => options.programs = true,
            "--quantized" => options.quantized = true,
            "--bench" => {}
            other => return Err(format!("unknown argument {other}").into()),
        }
    }
    let cores = std::thread::available_parallelism()?.get();
    let machine = machine::measure(options.mib << 20, cores);
    println!("{}", machine.describe());
    let mut pairs = pairs::synthetic(options.mib << 20);
    if let Some(folder) = &options.folder {
        pairs.extend(pairs::read(folder)?);
    }
    if options.quantized {
        println!("\n{}", quantized::HEAD);
        let mut rows = vec![];
        for pair in &pairs {
            rows.extend(quantized::rows(pair, cores)?);
        }
        let report = serde_json::json!({"machine": machine.json(), "rounds": ROUNDS, "rows": rows});
        return write(options.json.as_deref(), &report);
    }
    let mut rows = vec![];
    let mut bounds = vec![];
    println!(
        "\n| pair | way | ratio | encode, GB/s | verified apply, GB/s | encode, {cores} cores | apply, {cores} cores |"
    );
    println!("|---|---|---|---|---|---|---|");
    for pair in &pairs {
        let bound = pairs::bounds(pair);
        println!(
            "| {} | {:.3}% of {} weights change; H(p) + sign **{:.1}×**, given the exponent **{:.1}×**; {:.0}% of them by one | | | | | |",
            pair.name,
            100.0 * bound.changed,
            bound.weights,
            bound.plain,
            bound.by_exponent,
            100.0 * bound.single_steps
        );
        bounds.push((pair.name.clone(), bound));
        let mut found = ours::rows(pair, cores)?;
        found.extend(rivals::rows(pair, cores)?);
        if options.programs {
            found.extend(rivals::programs(pair)?);
        }
        for row in found {
            println!("{}", row.line());
            rows.push(row);
        }
    }
    let report = serde_json::json!({
        "machine": machine.json(), "rounds": ROUNDS,
        "bounds": bounds.iter().map(|(name, bound)| bound.json(name)).collect::<Vec<_>>(),
        "rows": rows.iter().map(Row::json).collect::<Vec<_>>(),
    });
    write(options.json.as_deref(), &report)
}

fn write(path: Option<&std::path::Path>, report: &serde_json::Value) -> Result<(), Box<dyn std::error::Error>> {
    let Some(path) = path else { return Ok(()) };
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    Ok(std::fs::write(path, format!("{report:#}\n"))?)
}

struct Options {
    folder: Option<std::path::PathBuf>,
    json: Option<std::path::PathBuf>,
    mib: usize,
    programs: bool,
    quantized: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            folder: None,
            json: None,
            mib: 64,
            programs: false,
            quantized: false,
        }
    }
}

impl Row {
    fn line(&self) -> String {
        let speed = |speed: Option<f64>| speed.map_or(String::new(), |speed| format!("{speed:.2}"));
        format!(
            "| {} | {} | {:.1} | {} | {} | {} | {} |",
            self.pair,
            self.way,
            self.model_bytes as f64 / self.delta_bytes as f64,
            speed(self.encode),
            speed(self.apply),
            speed(self.encode_all),
            speed(self.apply_all)
        )
    }

    fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "pair": self.pair, "way": self.way, "model_bytes": self.model_bytes, "delta_bytes": self.delta_bytes,
            "ratio": self.model_bytes as f64 / self.delta_bytes as f64,
            "encode_gb_per_second": self.encode, "apply_gb_per_second": self.apply,
            "encode_gb_per_second_all_cores": self.encode_all, "apply_gb_per_second_all_cores": self.apply_all,
        })
    }
}

/// GB/s of the best of the rounds, by the clock on the wall; `before` prepares each.
fn best<T>(bytes: usize, rounds: usize, mut before: impl FnMut() -> T, mut run: impl FnMut(&mut T)) -> f64 {
    let mut least = f64::INFINITY;
    for _ in 0..rounds {
        let mut state = before();
        let started = Instant::now();
        run(&mut state);
        least = least.min(started.elapsed().as_secs_f64());
    }
    bytes as f64 / least / 1e9
}

/// GB/s of what one thread does alone, in the time that it ran, over all rounds.
fn alone<T>(bytes: usize, rounds: usize, mut before: impl FnMut() -> T, mut run: impl FnMut(&mut T)) -> f64 {
    let began = Instant::now();
    let ran = || -> Option<u64> {
        let schedule = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        schedule.split(' ').next()?.parse().ok()
    };
    let now_ns = || ran().unwrap_or_else(|| began.elapsed().as_nanos() as u64);
    let mut spent_ns = 0;
    for _ in 0..rounds {
        let mut state = before();
        let started = now_ns();
        run(&mut state);
        spent_ns += now_ns() - started;
    }
    (bytes * rounds) as f64 / spent_ns.max(1) as f64
}
