//! Low-rank adapters (Hu et al. 2021): W = W₀ + s · B · A for the matrices that an adapter names.
//!
//! This module reads and writes PEFT's folders (`adapter_config.json`, `adapter_model.safetensors`)
//! and merges adapters into weights. A version may be an adapter ([`artifact::adapter`]): our own
//! models compute with merged weights, other engines with the factors. A field that would make PEFT
//! compute something else is refused by its name. Training of adapters is in the crate `trainer`.

mod config;
mod files;
mod tensors;

pub use config::{Config, Targets};

use crate::config::ModelConfig;
use crate::exact;
use artifact::adapter;
use artifact::checkpoint::Checkpoint;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha12Rng;
use safetensors::Dtype;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Why an adapter cannot be read, written or merged.
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
    /// A new adapter with PEFT's initial values: A is uniform in ±1/√inputs (Kaiming with a = √5),
    /// B is zero. The same seed gives the same bits.
    ///
    /// # Errors
    /// If the configuration is invalid or its targets match no matrix of the model.
    pub fn fresh(config: Config, base: &Checkpoint, seed: u64) -> Result<Self, Error> {
        config.check().map_err(Error::Config)?;
        let model = &exact::config_of(base)?;
        let targets = config.target_modules.matcher().map_err(Error::Config)?;
        let mut rng = ChaCha12Rng::seed_from_u64(seed);
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
                "`target_modules` {} matches no matrix that can be adapted; the model has {}",
                config.target_modules,
                Vec::from_iter(names).join(", ")
            )));
        }
        Ok(Adapter { config, pairs })
    }

    /// Whether both adapt the same modules with the same ranks and scales.
    pub fn is_shaped_like(&self, other: &Adapter) -> Result<bool, Error> {
        let shapes = |adapter: &Adapter| -> Result<BTreeMap<String, (usize, f32)>, Error> {
            let modules = adapter.pairs.keys();
            modules
                .map(|module| Ok((module.clone(), adapter.config.of(module)?)))
                .collect()
        };
        Ok(shapes(self)? == shapes(other)?)
    }

    /// Reads a folder that PEFT saved. Unsupported fields and malformed tensors are errors.
    pub fn read_dir(path: &std::path::Path) -> Result<Self, Error> {
        files::read(path)
    }

    /// This adapter as a version of `base`: what a manifest with `adapts` describes.
    ///
    /// # Errors
    /// If the adapter does not fit the base.
    pub fn version_of(&self, base: &Checkpoint) -> Result<Checkpoint, Error> {
        self.check(&exact::config_of(base)?)?;
        let factors = self.to_tensors().into_iter();
        let mut files = base.files.clone();
        files.insert(adapter::CONFIG.into(), files::config_bytes(self).into());
        Ok(Checkpoint {
            tensors: factors
                .map(|(name, tensor)| (format!("{}{name}", adapter::PREFIX), tensor))
                .collect(),
            files,
        })
    }

    /// The adapter of a version, with or without its base. `None`: it is none.
    pub fn of_version(version: &Checkpoint) -> Result<Option<Self>, Error> {
        let Some(config) = version.files.get(adapter::CONFIG) else {
            return Ok(None);
        };
        let refuse = |why| Error::Config(format!("{}: {why}", adapter::CONFIG));
        let config = files::read_config(config).map_err(refuse)?;
        let tensors = version.tensors.iter();
        let factors =
            tensors.filter_map(|(name, tensor)| Some((name.strip_prefix(adapter::PREFIX)?.to_owned(), tensor.clone())));
        Adapter::from_tensors(config, &factors.collect())
            .map(Some)
            .map_err(refuse)
    }

    /// Writes a folder that PEFT loads. Creates it if it is missing.
    pub fn write_dir(&self, path: &std::path::Path) -> Result<(), Error> {
        files::write(self, path)
    }

    /// The base with the adapter merged in: W₀ + s · (B · A) in f32, rounded to each weight's
    /// dtype.
    ///
    /// Sums run in the order of the ranks, so the same adapter and base give the same bits
    /// everywhere.
    ///
    /// # Errors
    /// If a module is missing in the model or has another shape, or merged weights are not finite.
    pub fn merge(&self, base: &Checkpoint) -> Result<Checkpoint, Error> {
        self.merge_as(base, |dtype| dtype)
    }

    /// The same in other dtypes than the base's.
    fn merge_as(&self, base: &Checkpoint, dtype: impl Fn(Dtype) -> Dtype) -> Result<Checkpoint, Error> {
        let config = exact::config_of(base)?;
        self.check(&config)?;
        let mut merged = base.clone();
        for (module, pair) in &self.pairs {
            let (_, scale) = self.config.of(module)?;
            let name = format!("{module}.weight");
            let old = exact::tensor(base, &config, &name, &[pair.outputs as i64, pair.inputs as i64])?;
            let new = pair.added_to(&exact::to_f32(&name, old)?, scale);
            if !new.iter().all(|w| w.is_finite()) {
                return Err(Error::Module {
                    module: module.clone(),
                    why: "merged weights are not finite".into(),
                });
            }
            let like = (dtype(old.dtype), old.shape.as_slice());
            let new = exact::to_dtype(&name, like, &new)?;
            merged.tensors.insert(name, new);
        }
        Ok(merged)
    }

    /// Fails unless the model has every module, with these sizes.
    fn check(&self, model: &ModelConfig) -> Result<(), Error> {
        let shapes: BTreeMap<String, [usize; 2]> = modules(model).collect();
        for (module, pair) in &self.pairs {
            let own = [pair.outputs, pair.inputs];
            let why = match shapes.get(module) {
                Some(&shape) if shape == own => continue,
                Some(shape) => format!("is for weights of shape {own:?}, the model's have {shape:?}"),
                None => "the model has no matrix of this name".into(),
            };
            let module = module.clone();
            return Err(Error::Module { module, why });
        }
        Ok(())
    }
}

/// The weights of a version in their dtypes: its own, or those of its base with its adapter merged in.
pub fn merged(version: &Arc<Checkpoint>) -> Result<Arc<Checkpoint>, Error> {
    match Adapter::of_version(version)? {
        None => Ok(Arc::clone(version)),
        Some(adapter) => Ok(Arc::new(adapter.merge(&version.base())?)),
    }
}

/// The weights that our models compute with: as [`merged`], but what an adapter changes is f32 and not rounded, as other
/// engines add it.
pub fn computed(version: &Checkpoint) -> Result<Cow<'_, Checkpoint>, Error> {
    match Adapter::of_version(version)? {
        None => Ok(Cow::Borrowed(version)),
        Some(adapter) => adapter.merge_as(&version.base(), |_| Dtype::F32).map(Cow::Owned),
    }
}

/// The same of a shared one.
pub fn computed_shared(version: &Arc<Checkpoint>) -> Result<Arc<Checkpoint>, Error> {
    match version.has_adapter() {
        false => Ok(Arc::clone(version)),
        true => Ok(Arc::new(computed(version)?.into_owned())),
    }
}

impl Pair {
    /// `weights` `[outputs, inputs]` + s · B · A. Products and sums are rounded separately, never
    /// fused. Where B · A is 0, the weight keeps its bits.
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

/// Every module that is a matrix, with `[outputs, inputs]`. The embedding is left out, and with it
/// a tied head, because a change would affect both.
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

/// The matrices that a new adapter may change: those of the layers, but not the head, as in PEFT's
/// `all-linear`. In models with experts only attention's, because PEFT names the others
/// differently.
fn trainable(model: &ModelConfig) -> impl Iterator<Item = (String, [usize; 2])> {
    let attention_alone = model.experts.is_some();
    modules(model).filter(move |(module, _)| match attention_alone {
        true => module.contains(".self_attn."),
        false => module != "lm_head",
    })
}

#[cfg(test)]
mod tests;
