//! The network: one forward pass for the sampler and the trainer.
//!
//! Weights are the published bf16 values held as f32 tensors, so both sides compute with the same numbers; activations,
//! logits and log-probabilities are f32. The sampler walks a KV cache (`prefill`, `decode`), the trainer runs whole
//! sequences with gradients (`logits`). Work happens on the calling thread; no thread of its own, no I/O.
//!
//! A libtorch error inside a forward pass is a mistake in this file (shapes are checked before), so it panics there; what
//! comes from outside (images, token ids, lengths) is checked and returned as [`Error`].

mod cache;
mod layers;
mod load;

pub use cache::KvCache;
pub use load::{image_from_f32, random_image, require_grad};

use crate::config::ModelConfig;
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

/// Parameters by Hugging Face name: f32, in checkpoint coordinates.
pub type Parameters = BTreeMap<String, Tensor>;

/// Why an image cannot become a network, or a request cannot be computed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Config(#[from] crate::config::Error),
    #[error("image: {0}")]
    Image(String),
    #[error("tensor `{name}`: {why}")]
    Tensor { name: String, why: String },
    #[error("token id {id} is outside the vocabulary of {vocab}")]
    TokenId { id: u32, vocab: i64 },
    #[error("{wanted} tokens do not fit the context of {context}; shorten the prompt or max_tokens")]
    ContextFull { wanted: usize, context: usize },
    #[error("no tokens were given")]
    Empty,
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}

/// How many threads libtorch's operators use in this process; 1 unless the machine is otherwise idle.
pub fn set_threads(threads: i32) {
    tch::set_num_threads(threads);
}

/// In which precision the matrix products run. Sampling and on-policy training use `F32`; supervised training may use
/// `Bf16` products, which are several times faster on CPUs with AVX512-BF16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compute {
    #[default]
    F32,
    Bf16,
}

/// One set of weights, ready to answer.
#[derive(Debug)]
pub struct Network {
    config: ModelConfig,
    parameters: Parameters,
    rotary: layers::Rotary,
    compute: Compute,
}

impl Network {
    /// Builds the network of an image: bf16 (or f16, f32) tensors become f32 tensors of the same values.
    pub fn from_image(image: &crate::image::Image) -> Result<Self, Error> {
        let config = load::config_of(image)?;
        let parameters = load::parameters(image, &config)?;
        Ok(Self::from_parameters(config, parameters))
    }

    /// A network over tensors that the caller holds, as the trainer of a new model does. Shapes must be the config's.
    pub fn from_parameters(config: ModelConfig, parameters: Parameters) -> Self {
        let rotary = layers::Rotary::new(&config);
        Network {
            config,
            parameters,
            rotary,
            compute: Compute::F32,
        }
    }

    /// Chooses the precision of matrix products.
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
    pub fn load_values(&mut self, image: &crate::image::Image) -> Result<(), Error> {
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
        let hidden = self.hidden(ids);
        self.project(&hidden)
    }

    /// Final hidden states `[B, T, D]` f32: what [`Network::project`] turns into logits.
    pub fn hidden(&self, ids: &Tensor) -> Tensor {
        self.walk(ids, None)
    }

    /// Final hidden states of flat positions `row · T + t` alone, `[n, D]` f32. What follows the last attention is computed
    /// for these only: an eighth of the work saved, in both directions, when they are few.
    pub fn hidden_at(&self, ids: &Tensor, positions: &Tensor) -> Tensor {
        self.walk(ids, Some(positions))
    }

    fn walk(&self, ids: &Tensor, positions: Option<&Tensor>) -> Tensor {
        let (_, length) = ids.size2().unwrap_or((0, 0));
        let mut x = self.embed(ids);
        let (cos, sin) = self.rotary.range(0, length);
        for layer in 0..self.config.num_hidden_layers {
            let block = self.block(layer);
            let (q, k, v) = block.qkv(&x, &cos, &sin);
            let a = layers::attend_causal(&q, &k, &v);
            x = match positions {
                Some(positions) if layer + 1 == self.config.num_hidden_layers => block.finish_at(&x, &a, positions),
                _ => block.finish(&x, &a),
            };
        }
        self.final_norm(&x)
    }

    /// Hidden states `[…, D]` → logits `[…, V]`, f32.
    pub fn project(&self, hidden: &Tensor) -> Tensor {
        let head = if self.config.tie_word_embeddings {
            "model.embed_tokens.weight"
        } else {
            "lm_head.weight"
        };
        layers::linear(hidden, &self.parameters[head], self.compute).to_kind(Kind::Float)
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

    /// Runs a prompt into an empty slot of the cache. Returns the logits after its last token, `V` values.
    pub fn prefill(&self, cache: &mut KvCache, slot: usize, ids: &[u32]) -> Result<Vec<f32>, Error> {
        self.check_ids(ids)?;
        if ids.is_empty() {
            return Err(Error::Empty);
        }
        cache.check_room(0, ids.len())?;
        let _no_grad = tch::no_grad_guard();
        let wide: Vec<i64> = ids.iter().map(|&id| i64::from(id)).collect();
        let mut x = self.embed(&Tensor::from_slice(&wide).unsqueeze(0));
        let (cos, sin) = self.rotary.range(0, ids.len() as i64);
        for layer in 0..self.config.num_hidden_layers {
            let block = self.block(layer);
            let (q, k, v) = block.qkv(&x, &cos, &sin);
            cache.write_prompt(layer, slot, &k, &v);
            let a = layers::attend_causal(&q, &k, &v);
            x = block.finish(&x, &a);
        }
        cache.set_len(slot, ids.len());
        let last = x.narrow(1, ids.len() as i64 - 1, 1);
        let logits = self.project(&self.final_norm(&last)).flatten(0, -1);
        Ok(Vec::<f32>::try_from(&logits)?)
    }

    /// Advances slots `0..tokens.len()` by one token each. Returns each slot's next logits, `V` values.
    pub fn decode(&self, cache: &mut KvCache, tokens: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
        self.check_ids(tokens)?;
        if tokens.is_empty() {
            return Err(Error::Empty);
        }
        let lengths = cache.lengths(tokens.len());
        for &length in &lengths {
            cache.check_room(length as usize, 1)?;
        }
        let _no_grad = tch::no_grad_guard();
        let wide: Vec<i64> = tokens.iter().map(|&id| i64::from(id)).collect();
        let mut x = self.embed(&Tensor::from_slice(&wide).unsqueeze(1));
        let positions = Tensor::from_slice(&lengths);
        let (cos, sin) = self.rotary.at(&positions);
        let mask = cache.mask(&lengths);
        for layer in 0..self.config.num_hidden_layers {
            let block = self.block(layer);
            let (q, k, v) = block.qkv(&x, &cos, &sin);
            let (k, v) = cache.append(layer, &positions, &k, &v, &lengths);
            let a = layers::attend_masked(&q, &k, &v, &mask);
            x = block.finish(&x, &a);
        }
        cache.advance(tokens.len());
        let logits = self.project(&self.final_norm(&x)).squeeze_dim(1);
        (0..tokens.len())
            .map(|i| Ok(Vec::<f32>::try_from(&logits.get(i as i64))?))
            .collect()
    }

    fn embed(&self, ids: &Tensor) -> Tensor {
        Tensor::embedding(&self.parameters["model.embed_tokens.weight"], ids, -1, false, false)
    }

    fn final_norm(&self, x: &Tensor) -> Tensor {
        layers::rms_norm(x, &self.parameters["model.norm.weight"], self.config.rms_norm_eps)
    }

    fn block(&self, layer: i64) -> layers::Block<'_> {
        layers::Block {
            config: &self.config,
            parameters: &self.parameters,
            prefix: format!("model.layers.{layer}."),
            compute: self.compute,
        }
    }

    fn check_ids(&self, ids: &[u32]) -> Result<(), Error> {
        let vocab = self.config.vocab_size;
        match ids.iter().find(|&&id| i64::from(id) >= vocab) {
            Some(&id) => Err(Error::TokenId { id, vocab }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
