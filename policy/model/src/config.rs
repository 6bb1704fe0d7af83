//! The shape of a model, read from a Hugging Face `config.json`.
//!
//! Llama, Qwen2.5, Qwen3, Mistral, Qwen3-MoE and the DeepSeek-V3 family are one transformer. They
//! differ only in the fields of [`ModelConfig`]. A field that would change the mathematics and is
//! not implemented is refused by its name. What `transformers` decides by `model_type` alone is in
//! [`Family`]; CONTRIBUTING.md says how to add one.

mod family;
mod field;
mod read;
mod rope;
mod write;

pub use family::Family;
pub use rope::{Rope, Rotations};

use serde_json::Value;
use std::borrow::Cow;

/// Why a `config.json` was refused. Each message names the field.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("config.json is not valid JSON: {0}")]
    Json(#[from] serde_json::Error),
    #[error("config.json has no `{0}`, or it is not of the expected type")]
    Missing(&'static str),
    #[error("config.json: `{field}` is {value}, which is not supported; supported: {supported}")]
    Unsupported {
        field: &'static str,
        value: String,
        supported: Cow<'static, str>,
    },
    #[error("config.json: {0}")]
    Contradiction(String),
}

/// A decoder-only transformer with RMSNorm, rotary positions, causal attention and SwiGLU.
///
/// The default is a plain Llama whose sizes are 0 and must be set.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ModelConfig {
    pub family: Family,
    pub vocab_size: i64,
    /// Width of the residual stream.
    pub hidden_size: i64,
    /// Width inside the SwiGLU.
    pub intermediate_size: i64,
    pub num_hidden_layers: i64,
    pub num_attention_heads: i64,
    pub num_key_value_heads: i64,
    /// Width of a head's query and key.
    pub head_dim: i64,
    pub rms_norm_eps: f64,
    pub rope: Rope,
    /// Positions before `rope` stretches them; [`ModelConfig::context`] is the longest context.
    pub max_position_embeddings: i64,
    /// The output projection is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// RMSNorm over each head's query and key (Qwen3).
    pub qk_norm: bool,
    /// q, k and v have a bias.
    pub qkv_bias: bool,
    /// The output projection of attention has a bias.
    pub output_bias: bool,
    /// The gate, up and down projections have a bias.
    pub mlp_bias: bool,
    /// Positions that each layer attends to, the current one included. `None` is all of them.
    /// Empty when no layer has a window.
    pub windows: Vec<Option<i64>>,
    /// Multi-head latent attention, instead of a projection for each head.
    pub latent: Option<Latent>,
    /// A mixture of experts, in the layers that it lists.
    pub experts: Option<Experts>,
}

/// Multi-head latent attention (DeepSeek-AI 2024).
///
/// A head's query and key are `nope` values without a position, then `rope` values with one.
/// `head_dim` is the sum.
#[derive(Debug, Clone, PartialEq)]
pub struct Latent {
    /// Width of the query latent. `None`: queries are projected directly.
    pub q_rank: Option<i64>,
    /// Width of the latent shared by keys and values.
    pub kv_rank: i64,
    pub nope: i64,
    pub rope: i64,
    /// Width of a head's value.
    pub value: i64,
}

/// The routers and experts of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Experts {
    pub count: i64,
    /// Experts per token.
    pub per_token: i64,
    /// Width inside an expert's SwiGLU.
    pub intermediate_size: i64,
    /// Whether the scores of the chosen experts are divided by their sum.
    pub normalize: bool,
    /// Experts that every token uses: one SwiGLU of `shared · intermediate_size`. 0 is none.
    pub shared: i64,
    pub scoring: Scoring,
    /// Which layers have experts.
    pub layers: Vec<bool>,
}

/// How router logits become scores, and how experts are chosen.
#[derive(Debug, Clone, PartialEq)]
pub enum Scoring {
    /// Softmax over all experts. The highest scores win (Qwen3-MoE).
    Softmax,
    /// Sigmoid (DeepSeek-V3). For the choice only, a bias without a gradient is added. Experts are
    /// chosen from the `top_groups` groups with the highest sum of their two best scores. The
    /// weights are multiplied by `scale`.
    Sigmoid { groups: i64, top_groups: i64, scale: f64 },
}

/// The longest context of a `config.json` of any architecture, in tokens.
pub fn declared_context(json: &Value) -> Option<i64> {
    let context = json["max_position_embeddings"].as_i64()?;
    let rope = Rope::from_json(json, false, context);
    Some(rope.map_or(context, |rope| rope.context(context)))
}

impl ModelConfig {
    /// Longest context, in tokens.
    pub fn context(&self) -> i64 {
        self.rope.context(self.max_position_embeddings)
    }

    /// Width of a head's value: `head_dim` unless attention is latent.
    pub fn value_dim(&self) -> i64 {
        self.latent.as_ref().map_or(self.head_dim, |latent| latent.value)
    }

    /// How many values of a head carry a position.
    pub fn rotary_dim(&self) -> i64 {
        self.latent.as_ref().map_or(self.head_dim, |latent| latent.rope)
    }

    /// Key-value heads that a cache holds per position.
    pub fn cached_heads(&self) -> i64 {
        if self.latent.is_some() {
            self.num_attention_heads
        } else {
            self.num_key_value_heads
        }
    }

    /// What attention scores are multiplied by before the softmax: 1/√`head_dim`, and for latent
    /// attention also yarn's correction.
    pub fn attention_scale(&self) -> f64 {
        let yarn = self.latent.as_ref().map_or(1.0, |_| self.rope.score_scale());
        yarn / (self.head_dim as f64).sqrt()
    }

    /// The attention window of a layer, in positions. `None`: all earlier positions.
    pub fn window(&self, layer: i64) -> Option<i64> {
        self.windows.get(layer as usize).copied().flatten()
    }

    /// The experts of a layer. `None`: the layer is dense.
    pub fn experts_of(&self, layer: i64) -> Option<&Experts> {
        let experts = self.experts.as_ref()?;
        let sparse = experts.layers.get(layer as usize).copied();
        sparse.unwrap_or(false).then_some(experts)
    }

    /// Whether a checkpoint may hold a tensor of this name although the model does not use it.
    ///
    /// There are three kinds: the copy of a tied embedding, rotary tables that old checkpoints
    /// saved, and layers after the last one that predict further tokens.
    pub fn ignores(&self, tensor: &str) -> bool {
        let layer = tensor
            .strip_prefix("model.layers.")
            .and_then(|rest| rest.split('.').next()?.parse::<i64>().ok());
        let extra = self.family.conventions().extra_layers && layer.is_some_and(|n| n >= self.num_hidden_layers);
        extra || (self.tie_word_embeddings && tensor == "lm_head.weight") || tensor.ends_with(".rotary_emb.inv_freq")
    }
}

#[cfg(test)]
mod tests;
