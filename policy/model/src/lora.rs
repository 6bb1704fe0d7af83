//! Low-rank adapters (Hu et al. 2021): W = W₀ + s · B · A for the matrices that an adapter names.
//!
//! Reads and writes the folders of PEFT (`adapter_config.json`, `adapter_model.safetensors`) and merges them: a version is
//! always whole weights, so what answers and what learns never computes with an adapter beside them. What PEFT would compute
//! otherwise is refused by the field's name. No libtorch; the trainer's part is `trainer::learner`.

mod config;
mod files;
mod tensors;

pub use config::{Config, Targets};

use crate::config::ModelConfig;
use crate::exact;
use artifact::checkpoint::Checkpoint;
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::collections::BTreeMap;

/// Why a folder is not an adapter, or does not fit a model.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path}: {why}")]
    File { path: String, why: String },
    #[error("{action} {path}")]
    Io {
        action: &'static str,
        path: String,
        source: std::io::Error,
    },
    #[error("the adapter's {0}")]
    Config(String),
    #[error("the adapter of `{module}`: {why}")]
    Module { module: String, why: String },
    #[error(transparent)]
    Model(#[from] exact::Error),
}

/// An adapter in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    pub config: Config,
    /// By the module's name in the model, such as `model.layers.0.self_attn.q_proj`.
    pub pairs: BTreeMap<String, Pair>,
}

/// The two factors of one matrix's change, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct Pair {
    pub rank: usize,
    pub inputs: usize,
    pub outputs: usize,
    /// `[rank, inputs]`.
    pub a: Vec<f32>,
    /// `[outputs, rank]`.
    pub b: Vec<f32>,
}

impl Adapter {
    /// A new adapter of a model, as PEFT starts one: A uniform in ±1/√inputs (Kaiming with a = √5), B zero. The same seed
    /// gives the same bits.
    pub fn fresh(config: Config, base: &Checkpoint, seed: u64) -> Result<Self, Error> {
        config.check().map_err(Error::Config)?;
        let model = &exact::config_of(base)?;
        let targets = config.target_modules.matcher().map_err(Error::Config)?;
        let mut rng = StdRng::seed_from_u64(seed);
        let mut pairs = BTreeMap::new();
        for (module, [outputs, inputs]) in trainable(model) {
            if !targets.matches(&module) {
                continue;
            }
            let (rank, _) = config.of(&module)?;
            let bound = 1.0 / (inputs as f64).sqrt();
            let a = (0..rank * inputs).map(|_| rng.random_range(-bound..bound) as f32);
            let pair = Pair {
                rank,
                inputs,
                outputs,
                a: a.collect(),
                b: vec![0.0; outputs * rank],
            };
            pairs.insert(module, pair);
        }
        if pairs.is_empty() {
            let names: std::collections::BTreeSet<String> = trainable(model)
                .filter_map(|(module, _)| Some(module.rsplit('.').next()?.to_string()))
                .collect();
            return Err(Error::Config(format!(
                "`target_modules` {} names nothing that can be adapted; there are {}",
                config.target_modules,
                Vec::from_iter(names).join(", ")
            )));
        }
        Ok(Adapter { config, pairs })
    }

    /// Reads a folder that PEFT saved.
    pub fn read_dir(path: &std::path::Path) -> Result<Self, Error> {
        files::read(path)
    }

    /// Writes a folder that PEFT loads; creates it when it is missing.
    pub fn write_dir(&self, path: &std::path::Path) -> Result<(), Error> {
        files::write(self, path)
    }

    /// The base with the adapter in its weights: W₀ + s · (B · A) in f32, rounded to the weight's dtype. Every value is one
    /// sum in the order of the ranks, so the same adapter and base give the same bits everywhere.
    pub fn merge(&self, base: &Checkpoint) -> Result<Checkpoint, Error> {
        let shapes: BTreeMap<String, [usize; 2]> = modules(&exact::config_of(base)?).collect();
        let mut merged = base.clone();
        for (module, pair) in &self.pairs {
            let refuse = |why: String| Error::Module {
                module: module.clone(),
                why,
            };
            match shapes.get(module) {
                Some(&shape) if shape == [pair.outputs, pair.inputs] => {}
                Some(shape) => {
                    let why = format!(
                        "is for weights of shape {:?}, the model's are {shape:?}",
                        [pair.outputs, pair.inputs]
                    );
                    return Err(refuse(why));
                }
                None => {
                    return Err(refuse(
                        "the model has no weights of this name that could be adapted".into(),
                    ));
                }
            }
            let (_, scale) = self.config.of(module)?;
            let name = format!("{module}.weight");
            let old = exact::tensor(base, &name, &[pair.outputs as i64, pair.inputs as i64])?;
            let new = pair.added_to(&exact::to_f32(&name, old)?, scale);
            if !new.iter().all(|w| w.is_finite()) {
                return Err(refuse("makes weights that are not finite".into()));
            }
            let new = exact::rounded(&name, old, &new)?;
            merged.tensors.insert(name, new);
        }
        Ok(merged)
    }
}

impl Pair {
    /// `weights` `[outputs, inputs]` + s · B · A. Multiplications and additions are rounded one by one, which no compiler may
    /// change; where nothing is added, the weight keeps its bits.
    fn added_to(&self, weights: &[f32], scale: f32) -> Vec<f32> {
        let mut merged = Vec::with_capacity(weights.len());
        let mut sum = vec![0f32; self.inputs];
        for (row, b) in weights.chunks_exact(self.inputs).zip(self.b.chunks_exact(self.rank)) {
            sum.fill(0.0);
            for (a, &b) in self.a.chunks_exact(self.inputs).zip(b) {
                for (sum, &a) in sum.iter_mut().zip(a) {
                    *sum += b * a;
                }
            }
            let added = |(&w, &d): (&f32, &f32)| if d == 0.0 { w } else { w + scale * d };
            merged.extend(row.iter().zip(&sum).map(added));
        }
        merged
    }
}

/// Every matrix that inputs are multiplied with, by module: `[outputs, inputs]`. The embedding is none; a head that is tied to
/// it neither, because a change would go to both.
fn modules(model: &ModelConfig) -> impl Iterator<Item = (String, [usize; 2])> {
    let shapes = model.parameter_shapes().into_iter();
    shapes.filter_map(|(name, shape)| {
        let module = name
            .strip_suffix(".weight")
            .filter(|&name| name != "model.embed_tokens")?;
        let &[outputs, inputs] = shape.as_slice() else {
            return None;
        };
        Some((module.to_string(), [outputs as usize, inputs as usize]))
    })
}

/// What a new adapter may change: all of a layer's matrices, in models with experts those of attention alone, because PEFT has
/// other names for the rest. The head is none of them, as in PEFT's `all-linear`.
fn trainable(model: &ModelConfig) -> impl Iterator<Item = (String, [usize; 2])> {
    let attention_alone = model.experts.is_some();
    modules(model).filter(move |(module, _)| match attention_alone {
        true => module.contains(".self_attn."),
        false => module != "lm_head",
    })
}

#[cfg(test)]
mod tests;
