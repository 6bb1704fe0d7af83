//! Two versions that follow each other, and how small their difference can be coded.

use artifact::checkpoint::Checkpoint;
use artifact::tensor::TensorData;
use half::bf16;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use safetensors::Dtype;
use std::collections::HashMap;
use std::path::Path;

pub struct Pair {
    pub name: String,
    pub base: Checkpoint,
    pub result: Checkpoint,
    /// The tensors of both that have 16-bit weights and changed, one after another: what rivals are
    /// measured on.
    pub old: Vec<u8>,
    pub new: Vec<u8>,
}

/// AdamW in its steady state (Loshchilov & Hutter 2019): gradients of N(0, 1), β₁ = 0.9, v = 1,
/// decay 0.01; masters lie anywhere in the cells of their bf16. One step.
pub fn synthetic(bytes: usize) -> Vec<Pair> {
    let pair = |rate: f32| {
        let mut random = StdRng::seed_from_u64(7);
        let (mut old, mut new) = (Vec::with_capacity(bytes), Vec::with_capacity(bytes));
        // of a mean of independent gradients with weights 0.1 · 0.9ⁿ
        let spread = (0.1f32 / 1.9).sqrt();
        for _ in 0..bytes / 2 {
            let cell = bf16::from_f32(0.02 * normal(&mut random));
            let ulp = f32::from_bits((u32::from(cell.to_bits()) + 1) << 16) - cell.to_f32();
            let master = cell.to_f32() + (random.random::<f32>() - 0.5) * 0.999 * ulp;
            let momentum = 0.9 * spread * normal(&mut random) + 0.1 * normal(&mut random);
            old.extend(bf16::from_f32(master).to_le_bytes());
            new.extend(bf16::from_f32(master - rate * (momentum + 0.01 * master)).to_le_bytes());
        }
        let checkpoint = |bytes: &[u8]| Checkpoint {
            tensors: [("w".into(), tensor(bytes))].into(),
            ..Checkpoint::default()
        };
        Pair {
            name: format!("AdamW, lr {rate:e}"),
            base: checkpoint(&old),
            result: checkpoint(&new),
            old,
            new,
        }
    };
    [5e-7, 1e-6, 3e-6, 1e-5].map(pair).into()
}

fn tensor(bytes: &[u8]) -> TensorData {
    TensorData {
        dtype: Dtype::BF16,
        shape: vec![bytes.len() / 2],
        bytes: bytes.to_vec().into(),
    }
}

/// By Box & Muller.
fn normal(random: &mut StdRng) -> f32 {
    let (u, v): (f32, f32) = (1.0 - random.random::<f32>(), random.random());
    (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
}

/// The folders of `folder` that hold models, each with the next one by name; the same of every
/// folder that holds none.
pub fn read(folder: &Path) -> Result<Vec<Pair>, Box<dyn std::error::Error>> {
    let mut folders: Vec<_> = std::fs::read_dir(folder)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.is_dir())
        .collect();
    folders.sort();
    let (paths, others): (Vec<_>, Vec<_>) = folders
        .into_iter()
        .partition(|path| path.join("model.safetensors").exists());
    let mut pairs = vec![];
    for other in others {
        pairs.extend(read(&other)?);
    }
    for two in paths.windows(2) {
        let (base, result) = (Checkpoint::read_dir(&two[0])?, Checkpoint::read_dir(&two[1])?);
        let (mut old, mut new) = (vec![], vec![]);
        for (name, tensor) in &result.tensors {
            let before = base.tensors.get(name).filter(|before| before.shape == tensor.shape);
            if let Some(before) = before.filter(|before| before.dtype == tensor.dtype && tensor.dtype.bitsize() == 16) {
                old.extend_from_slice(&before.bytes);
                new.extend_from_slice(&tensor.bytes);
            }
        }
        let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        pairs.push(Pair {
            name: format!(
                "{} {} → {}",
                name(folder).unwrap_or_default(),
                name(&two[0]).unwrap_or_default(),
                name(&two[1]).unwrap_or_default()
            ),
            base,
            result,
            old,
            new,
        });
    }
    Ok(pairs)
}

/// Ratios that no code reaches which takes weights for independent.
pub struct Bounds {
    pub weights: usize,
    pub changed: f64,
    /// Among the changed ones, those that go to a neighboring value.
    pub single_steps: f64,
    /// The entropy of positions, and a sign.
    pub plain: f64,
    /// The entropies of positions and of steps, both given the exponent.
    pub by_exponent: f64,
}

impl Bounds {
    pub fn json(&self, pair: &str) -> serde_json::Value {
        serde_json::json!({
            "pair": pair, "weights": self.weights, "changed_share": self.changed, "single_step_share": self.single_steps,
            "plain": self.plain, "by_exponent": self.by_exponent,
        })
    }
}

pub fn bounds(pair: &Pair) -> Bounds {
    let mut keys = [[0f64; 2]; 256];
    let mut steps: HashMap<(u8, i32), f64> = HashMap::new();
    let place = |bits: u16| {
        let size = i32::from(bits & 0x7fff);
        if bits & 0x8000 == 0 { size } else { -1 - size }
    };
    let weights = pair.old.len() / 2;
    for (old, new) in pair.old.as_chunks::<2>().0.iter().zip(pair.new.as_chunks::<2>().0) {
        let (old, new) = (u16::from_le_bytes(*old), u16::from_le_bytes(*new));
        let key = (old >> 7) as u8;
        keys[usize::from(key)][0] += 1.0;
        if old != new {
            keys[usize::from(key)][1] += 1.0;
            *steps.entry((key, place(new) - place(old))).or_default() += 1.0;
        }
    }
    let entropy = |p: f64| match p {
        p if p <= 0.0 || p >= 1.0 => 0.0,
        p => -p * p.log2() - (1.0 - p) * (1.0 - p).log2(),
    };
    let changed: f64 = keys.iter().map(|key| key[1]).sum();
    let positions: f64 = keys
        .iter()
        .filter(|key| key[0] > 0.0)
        .map(|key| key[0] * entropy(key[1] / key[0]))
        .sum();
    let sizes: f64 = steps
        .iter()
        .map(|(&(key, _), n)| -n * (n / keys[usize::from(key)][1]).log2())
        .sum();
    let single: f64 = steps
        .iter()
        .filter(|((_, step), _)| step.abs() == 1)
        .map(|(_, n)| n)
        .sum();
    let p = changed / weights as f64;
    Bounds {
        weights,
        changed: p,
        single_steps: single / changed,
        plain: 16.0 / (entropy(p) + p),
        by_exponent: 16.0 * weights as f64 / (positions + sizes),
    }
}
