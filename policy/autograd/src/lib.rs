//! The model that trains: gradients by libtorch's autograd.
//!
//! [`model::exact`] computes what is sampled and logged, and [`model::gradient`] the gradients of
//! dense models in f32. This crate runs the same [`model::transformer`] over tensors that record
//! their computation. [`TrainModel::backward`] takes a pass of the exact model and recomputes one
//! layer at a time from the layer's input, last layer first. The activations of a single layer are
//! in memory, whatever the depth. Supervised training uses [`TrainModel::logits`].
//!
//! Input from outside (checkpoints, token ids, lengths) is checked and gives an [`Error`]. A
//! libtorch error inside a forward pass is a bug in this crate and panics.

mod backend;
mod load;

pub use load::{checkpoint_from_f32, require_grad, require_grad_of};

use backend::{Rotary, TorchBackend};
use model::config::{ModelConfig, Rotations};
use model::exact::{Compute, Pass, Rows};
use model::transformer::{Backend, Transformer};
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

/// Parameters by Hugging Face name, in f32 and with the checkpoint's shapes.
pub type Parameters = BTreeMap<String, Tensor>;

/// Why a checkpoint cannot become a [`TrainModel`].
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Checkpoint(#[from] model::exact::Error),
    #[error("tensor `{name}`: {why}")]
    Tensor { name: String, why: String },
    #[error("{0}")]
    Adapter(#[from] model::lora::Error),
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}

/// Sets the number of threads of libtorch's operators in this process. Use 1 unless the machine is
/// otherwise idle.
pub fn set_threads(threads: i32) {
    tch::set_num_threads(threads);
}

/// One version's weights as tensors that can gather gradients.
#[derive(Debug)]
pub struct TrainModel {
    config: ModelConfig,
    parameters: Parameters,
    /// The same tensors, arranged for the forward pass.
    transformer: Transformer<Tensor>,
    rotations: Rotations,
    compute: Compute,
}

impl TrainModel {
    /// Builds the model of a checkpoint. bf16, f16 and f32 tensors become f32 tensors of the same
    /// values.
    ///
    /// # Errors
    /// If `config.json` is unsupported, or a tensor is missing, unexpected or has the wrong shape.
    pub fn from_checkpoint(checkpoint: &artifact::checkpoint::Checkpoint) -> Result<Self, Error> {
        let checkpoint = &*model::lora::computed(checkpoint)?;
        let config = model::exact::config_of(checkpoint)?;
        let parameters = load::parameters(checkpoint, &config)?;
        Self::from_parameters(config, parameters)
    }

    /// Builds a model over the caller's tensors, which it shares.
    ///
    /// # Errors
    /// If a parameter is missing or has the wrong shape.
    pub fn from_parameters(config: ModelConfig, parameters: Parameters) -> Result<Self, Error> {
        let transformer = load::transformer(&config, &parameters)?;
        Ok(TrainModel {
            rotations: config.rope.rotations(config.rotary_dim()),
            config,
            parameters,
            transformer,
            compute: Compute::F32,
        })
    }

    /// Sets the precision of matrix products. bf16 is several times faster on CPUs with AVX512-BF16,
    /// and several times slower on others.
    pub fn with_compute(mut self, compute: Compute) -> Self {
        self.compute = compute;
        self
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    pub fn into_parameters(self) -> Parameters {
        self.parameters
    }

    /// Copies a checkpoint's values into the parameters. The tensors and their `requires_grad`
    /// stay.
    pub fn load_values(&mut self, checkpoint: &artifact::checkpoint::Checkpoint) -> Result<(), Error> {
        let fresh = load::parameters(checkpoint, &self.config)?;
        let _no_grad = tch::no_grad_guard();
        for (name, tensor) in &mut self.parameters {
            tensor.f_copy_(&fresh[name])?;
        }
        Ok(())
    }

    /// Logits of every position: ids `[B, T]` i64 give `[B, T, V]` f32, differentiable.
    ///
    /// Pad short sequences on the right. Attention is causal, so padding changes no earlier
    /// position.
    pub fn logits(&self, ids: &Tensor) -> Tensor {
        let (rows, length) = ids.size2().unwrap_or((0, 0));
        let lengths = vec![length; rows as usize];
        let rotary = Rotary::new(&self.rotations, &lengths);
        let mut torch = TorchBackend::new(self, &lengths, &rotary, None, None);
        let mut x = self.embed(&ids.flatten(0, -1));
        for (layer, block) in (0..).zip(&self.transformer.layers) {
            x = block.forward(&mut torch, &self.config, layer, x);
        }
        self.project(&x).view([rows, length, -1])
    }

    /// The final norm and the output projection: `[n, D]` gives logits `[n, V]`, f32.
    pub fn project(&self, hidden: &Tensor) -> Tensor {
        let rotary = Rotary::new(&self.rotations, &[]);
        let torch = TorchBackend::new(self, &[], &rotary, None, None);
        let normed = torch.rms_norm(hidden, &self.transformer.norm, self.config.rms_norm_eps);
        torch.product(&normed, self.transformer.projection(), None)
    }

    /// Adds the gradients of a pass to every parameter that requires one.
    ///
    /// `logits` is the loss's gradient with respect to [`Pass::logits`]. Each layer is recomputed from
    /// its input (Chen et al. 2016), with the experts that the pass used.
    pub fn backward(&self, pass: &Pass, logits: &Tensor) {
        let hidden = leaf(&pass.hidden);
        (self.project(&hidden) * logits).sum(Kind::Float).backward();
        let lengths: Vec<i64> = pass.lengths.iter().map(|&n| n as i64).collect();
        let logit_rows: Vec<i64> = pass.logit_rows.iter().map(|&row| row as i64).collect();
        let logit_rows = Tensor::from_slice(&logit_rows);
        let rotary = Rotary::new(&self.rotations, &lengths);
        let mut gradient = hidden.grad();
        for (layer, (block, kept)) in self.transformer.layers.iter().zip(&pass.layers).enumerate().rev() {
            let x = leaf(&kept.input);
            let mut torch = TorchBackend::new(self, &lengths, &rotary, Some(&logit_rows), Some(&pass.routing));
            let y = block.forward(&mut torch, &self.config, layer as i64, x.shallow_clone());
            (y * gradient).sum(Kind::Float).backward();
            gradient = x.grad();
        }
        if !self.transformer.embedding.requires_grad() {
            return;
        }
        let ids: Vec<i64> = pass.ids.iter().map(|&id| i64::from(id)).collect();
        (self.embed(&Tensor::from_slice(&ids)) * gradient)
            .sum(Kind::Float)
            .backward();
    }

    /// Log-probabilities of `targets` `[B, T]` under `logits` `[B, T, V]` at a temperature, in
    /// nats, `[B, T]`.
    pub fn token_logprobs(logits: &Tensor, targets: &Tensor, temperature: f64) -> Tensor {
        let scaled = match temperature == 1.0 {
            true => logits.shallow_clone(),
            false => logits / temperature,
        };
        scaled
            .log_softmax(-1, Kind::Float)
            .gather(-1, &targets.unsqueeze(-1), false)
            .squeeze_dim(-1)
    }

    fn embed(&self, ids: &Tensor) -> Tensor {
        Tensor::embedding(&self.transformer.embedding, ids, -1, false, false)
    }
}

/// Rows as a tensor `[n, width]` that gathers no gradient.
pub fn tensor(rows: &Rows) -> Tensor {
    Tensor::from_slice(rows.values()).view([rows.len() as i64, rows.width() as i64])
}

/// Rows as a leaf tensor `[n, width]` that gathers a gradient.
pub fn leaf(rows: &Rows) -> Tensor {
    tensor(rows).set_requires_grad(true)
}

#[cfg(test)]
mod tests;
