//! The network that learns: gradients, by libtorch.
//!
//! What is sampled and logged is computed by [`crate::exact`], to the bit. This is the same [`crate::transformer`] over
//! tensors that remember how they came about. [`TrainModel::backward`] takes a pass of the model and goes back through it, one
//! layer after the other, each computed again from what went into it: activations of one layer at a time are in memory,
//! whatever the depth. Supervised training uses [`TrainModel::logits`] alone.
//!
//! A libtorch error inside a forward pass is a mistake in this file (shapes are checked before), so it panics there; what
//! comes from outside (images, token ids, lengths) is checked and returned as [`Error`].

mod backend;
mod load;

pub use load::{checkpoint_from_f32, random_checkpoint, require_grad, require_grad_of};

pub use crate::kernel::Compute;

use crate::config::ModelConfig;
use crate::exact::{Pass, Rows};
use crate::transformer::{Backend, Transformer};
use backend::Torch;
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

/// Parameters by Hugging Face name: f32, in checkpoint coordinates.
pub type Parameters = BTreeMap<String, Tensor>;

/// Why an image cannot become a network, or be computed with.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Checkpoint(#[from] crate::exact::Error),
    #[error("tensor `{name}`: {why}")]
    Tensor { name: String, why: String },
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}

/// How many threads libtorch's operators use in this process; 1 unless the machine is otherwise idle.
pub fn set_threads(threads: i32) {
    tch::set_num_threads(threads);
}

/// One set of weights that gradients flow to.
#[derive(Debug)]
pub struct TrainModel {
    config: ModelConfig,
    parameters: Parameters,
    /// The same tensors, where the walk needs them.
    transformer: Transformer<Tensor>,
    rotary: backend::Rotary,
    compute: Compute,
}

impl TrainModel {
    /// Builds the network of an image: bf16 (or f16, f32) tensors become f32 tensors of the same values.
    pub fn from_checkpoint(image: &artifact::checkpoint::Checkpoint) -> Result<Self, Error> {
        let config = crate::exact::config_of(image)?;
        let parameters = load::parameters(image, &config)?;
        Self::from_parameters(config, parameters)
    }

    /// A network over tensors that the caller holds, as the trainer of a new model does.
    pub fn from_parameters(config: ModelConfig, parameters: Parameters) -> Result<Self, Error> {
        let transformer = load::transformer(&config, &parameters)?;
        Ok(TrainModel {
            rotary: backend::Rotary::new(&config),
            config,
            parameters,
            transformer,
            compute: Compute::F32,
        })
    }

    /// Chooses the precision of matrix products. Supervised training may use bf16, which is several times faster on CPUs with
    /// AVX512-BF16.
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

    /// Replaces every value in place by the image's, keeping the tensors (and their `requires_grad`).
    pub fn load_values(&mut self, image: &artifact::checkpoint::Checkpoint) -> Result<(), Error> {
        let fresh = load::parameters(image, &self.config)?;
        let _no_grad = tch::no_grad_guard();
        for (name, tensor) in &mut self.parameters {
            tensor.f_copy_(&fresh[name])?;
        }
        Ok(())
    }

    /// Logits of every position: ids `[B, T]` i64 → `[B, T, V]` f32, differentiable. Rows are right-padded: attention is
    /// causal, so what follows a position never changes it.
    pub fn logits(&self, ids: &Tensor) -> Tensor {
        let (rows, length) = ids.size2().unwrap_or((0, 0));
        let lengths = vec![length; rows as usize];
        let mut torch = Torch::new(self, &lengths, None, None);
        let mut x = self.embed(&ids.flatten(0, -1));
        for (layer, block) in (0..).zip(&self.transformer.layers) {
            x = block.forward(&mut torch, &self.config, layer, x);
        }
        self.project(&x).view([rows, length, -1])
    }

    /// Hidden rows before the final norm, `[n, D]` → logits `[n, V]`, f32.
    pub fn project(&self, hidden: &Tensor) -> Tensor {
        let torch = Torch::new(self, &[], None, None);
        let normed = torch.rms_norm(hidden, &self.transformer.norm, self.config.rms_norm_eps);
        torch.product(&normed, self.transformer.projection(), None)
    }

    /// Gradients of a pass of the model: `gradient` `[asked, D]` is the loss's by the pass's hidden rows, and every
    /// parameter below gathers its own. Each layer is computed once more from what went into it (Chen et al. 2016), at the
    /// experts that the pass went to.
    pub fn backward(&self, pass: &Pass, gradient: Tensor) {
        let lengths: Vec<i64> = pass.lengths.iter().map(|&n| n as i64).collect();
        let asked: Vec<i64> = pass.asked.iter().map(|&row| row as i64).collect();
        let asked = Tensor::from_slice(&asked);
        let mut gradient = gradient;
        for (layer, (block, input)) in self.transformer.layers.iter().zip(&pass.inputs).enumerate().rev() {
            let x = leaf(input);
            let mut torch = Torch::new(self, &lengths, Some(&asked), Some(&pass.routing));
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

    /// Log-probability of `targets` `[B, T]` at each position of `logits` `[B, T, V]`, at a temperature; nats, `[B, T]`.
    pub fn token_logprobs(logits: &Tensor, targets: &Tensor, temperature: f64) -> Tensor {
        let scaled = if temperature == 1.0 {
            logits.shallow_clone()
        } else {
            logits / temperature
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

/// Rows as a tensor without history, `[n, width]`.
pub fn tensor(rows: &Rows) -> Tensor {
    Tensor::from_slice(rows.values()).view([rows.len() as i64, rows.width() as i64])
}

/// A tensor with its history and other values: the gradients are those of `computed`, taken at `values`. Both of one shape;
/// the operation that made `computed` must not need its result to go back, as a matrix product does not.
pub fn with_values(computed: Tensor, values: &Tensor) -> Tensor {
    computed.data().copy_(values);
    computed
}

/// Rows as a tensor that gathers a gradient.
pub fn leaf(rows: &Rows) -> Tensor {
    tensor(rows).set_requires_grad(true)
}

#[cfg(test)]
mod tests;
