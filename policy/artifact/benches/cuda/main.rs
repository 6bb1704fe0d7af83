//! Deltas of a model in a GPU's memory, compared with all cores of the CPU: finding the changes,
//! writing a patch (the pause), hashing the changed frames. `make bench NAME=cuda`. The results of both
//! must be the same bytes.
//!
//! The model is synthetic: `--mib N` MiB of bf16 weights around 0, 256 MiB per tensor. The next
//! version moves one weight in a hundred to a neighboring value. Times are wall-clock times, the
//! best of several rounds. GB/s are bytes of one model. The benchmark asserts no figures.

use std::collections::BTreeMap;
use std::error::Error;
use std::time::Instant;

use artifact::checkpoint::Checkpoint;
use artifact::delta::{self, Changes, FRAME_WEIGHTS, Patch, PatchState};
use artifact::device::{Device, Tensor};
use artifact::tensor::TensorData;
use artifact::threads::Threads;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rayon::prelude::*;
use safetensors::Dtype;

const ROUNDS: usize = 5;
const TENSOR_MIB: usize = 256;
/// Weights that move, out of a hundred.
const CHANGED_PERCENT: u32 = 1;

struct Report {
    model_bytes: usize,
    rows: Vec<serde_json::Value>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let (mut mib, mut json) = (16_384, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--mib" => mib = arguments.next().ok_or("--mib takes a number")?.parse::<usize>()?,
            "--json" => json = Some(std::path::PathBuf::from(arguments.next().ok_or("--json takes a path")?)),
            "--bench" => {}
            other => return Err(format!("unknown argument {other}").into()),
        }
    }
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(error) => {
            eprintln!("nothing was measured: {error}");
            std::process::exit(1);
        }
    };
    let cores = std::thread::available_parallelism()?.get();
    let threads = Threads::new(cores)?;
    let (base, result) = synthetic(mib)?;
    let mut report = Report {
        model_bytes: base.tensor_bytes() as usize,
        rows: vec![],
    };
    println!(
        "{}, {cores} cores; a model of {mib} MiB, {CHANGED_PERCENT}% changed",
        device.name()?
    );
    println!("\n| what | where | ms | GB/s |\n|---|---|---|---|");

    let (old, new) = (upload(&device, &base)?, upload(&device, &result)?);
    let find = || -> Result<Changes, Box<dyn Error>> {
        let tensors = base.tensors.iter();
        let found = tensors.map(|(name, tensor)| {
            let changes = device.changes(tensor.dtype, &old[name], &new[name])?;
            Ok((name.clone(), changes))
        });
        found.collect()
    };
    let changes = report.time("compare and compact, and what changed to the host", "GPU", find)?;
    report.time("compare and count", "CPU", || {
        Ok(base
            .tensors
            .par_iter()
            .map(|(name, _)| counted(&base, &result, name))
            .sum::<u64>())
    })?;
    let (encoded, found) = report.time("a delta of what the GPU found", "GPU, CPU", || {
        Ok(delta::encode_changes(&base, &changes, &threads)?)
    })?;
    drop(changes);
    let delta = report.time("a delta", "CPU", || Ok(delta::encode(&base, &result, &threads)?))?;
    if encoded != result || found != delta {
        return Err("the delta of what the GPU found is another one than the CPU's".into());
    }
    drop((encoded, found, new));

    let root = base.root();
    let patch = report.time("decode to a patch", "CPU", || {
        Ok(Patch::decode(&base, root, &delta, &threads)?)
    })?;
    let staged = report.time("bring the patch to the GPU", "GPU", || Ok(device.stage(&patch, &old)?))?;
    report.time("write it there: the pause", "GPU", || {
        staged.write()?;
        Ok(())
    })?;
    let state = report.time("hash the frames that changed", "GPU", || Ok(staged.state()?))?;
    if state != PatchState::Result {
        return Err(format!("the GPU holds {state:?} instead of the result").into());
    }
    report.time("take it back", "GPU", || {
        staged.revert()?;
        Ok(())
    })?;
    staged.apply()?;
    for (name, tensor) in &result.tensors {
        if old[name].download()? != **tensor.bytes {
            return Err(format!("`{name}` has other bytes on the GPU").into());
        }
    }
    let mut host: Vec<_> = base.tensors.iter().map(|(name, t)| (name, t.bytes.to_vec())).collect();
    report.time("write it", "CPU", || {
        host.par_iter_mut()
            .try_for_each(|(name, bytes)| patch.write(name, bytes))?;
        Ok(())
    })?;

    if let Some(path) = json {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let report = serde_json::json!({
            "gpu": device.name()?, "cores": cores, "model_bytes": report.model_bytes, "delta_bytes": delta.len(),
            "changed_weights": patch.weights(), "rounds": ROUNDS, "rows": report.rows,
        });
        std::fs::write(path, format!("{report:#}\n"))?;
    }
    Ok(())
}

impl Report {
    /// What the last round made.
    fn time<T>(
        &mut self,
        what: &str,
        on: &str,
        mut run: impl FnMut() -> Result<T, Box<dyn Error>>,
    ) -> Result<T, Box<dyn Error>> {
        let mut least = f64::INFINITY;
        let mut last = None;
        for _ in 0..ROUNDS {
            drop(last.take());
            let started = Instant::now();
            last = Some(run()?);
            least = least.min(started.elapsed().as_secs_f64());
        }
        let gb_per_second = self.model_bytes as f64 / least / 1e9;
        println!("| {what} | {on} | {:.2} | {gb_per_second:.2} |", least * 1e3);
        self.rows.push(serde_json::json!({
            "what": what, "on": on, "ms": least * 1e3, "gb_per_second": gb_per_second,
        }));
        Ok(last.ok_or("no round was run")?)
    }
}

/// A version and the next one.
fn synthetic(mib: usize) -> Result<(Checkpoint, Checkpoint), Box<dyn Error>> {
    let (mut base, mut result) = (Checkpoint::default(), Checkpoint::default());
    let mut left = mib << 20;
    while left > 0 {
        let bytes = left.min(TENSOR_MIB << 20);
        left -= bytes;
        let (mut old, mut new) = (vec![0; bytes], vec![0; bytes]);
        let frames = old
            .par_chunks_mut(2 * FRAME_WEIGHTS)
            .zip(new.par_chunks_mut(2 * FRAME_WEIGHTS));
        frames.enumerate().for_each(|(n, (old, new))| {
            let mut random = StdRng::seed_from_u64((left + n) as u64);
            for (old, new) in old.as_chunks_mut::<2>().0.iter_mut().zip(new.as_chunks_mut::<2>().0) {
                let value = (random.random::<f32>() + random.random::<f32>() - 1.0) * 0.04;
                let bits = half::bf16::from_f32(value).to_bits();
                let moved = random.random_ratio(CHANGED_PERCENT, 100);
                let step = if random.random() { 1 } else { 0xffff };
                *old = bits.to_le_bytes();
                *new = bits.wrapping_add(if moved { step } else { 0 }).to_le_bytes();
            }
        });
        let name = format!("t{:04}", base.tensors.len());
        for (checkpoint, bytes) in [(&mut base, old), (&mut result, new)] {
            let tensor = TensorData::new(Dtype::BF16, vec![bytes.len() / 2], bytes)?;
            checkpoint.tensors.insert(name.clone(), tensor);
        }
    }
    Ok((base, result))
}

fn upload(device: &Device, checkpoint: &Checkpoint) -> Result<BTreeMap<String, Tensor>, artifact::device::Error> {
    let tensors = checkpoint.tensors.iter();
    tensors
        .map(|(name, tensor)| Ok((name.clone(), device.upload(&tensor.bytes)?)))
        .collect()
}

/// The weights of one tensor that differ.
fn counted(base: &Checkpoint, result: &Checkpoint, name: &str) -> u64 {
    let only = |checkpoint: &Checkpoint| Checkpoint {
        tensors: checkpoint
            .tensors
            .get(name)
            .map(|tensor| (name.to_owned(), tensor.clone()))
            .into_iter()
            .collect(),
        ..Checkpoint::default()
    };
    delta::stats(&only(base), &only(result)).changed_weights
}
