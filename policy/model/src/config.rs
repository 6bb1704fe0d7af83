//! The network's shape, read from a Hugging Face `config.json`.
//!
//! One transformer, whose differences are fields: Llama, Qwen2.5, Qwen3, Mistral, Qwen3-MoE and the DeepSeek-V3 family. A
//! field that would change the mathematics and is not implemented is refused by its name, so that a folder is never
//! half-understood. `model_type` decides what a missing field means, as it does in `transformers`.

mod read;
mod rope;
mod write;

pub use rope::Rope;

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
        supported: &'static str,
    },
    #[error("config.json: {0}")]
    Contradiction(String),
}

/// What `model_type` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Family {
    #[default]
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    /// Kimi K2 among them, whose `model_type` may also be `kimi_k2`.
    DeepseekV3,
}

/// Shape of a decoder-only transformer: RMSNorm, rotary positions, causal attention, SwiGLU. The default is a Llama without
/// extras whose sizes are 0, to be filled.
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
    /// Longest context, in tokens.
    pub max_position_embeddings: i64,
    /// The output projection is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// RMSNorm over each head's query and key (Qwen3).
    pub qk_norm: bool,
    /// q, k and v have a bias.
    pub qkv_bias: bool,
    /// The output projection of attention has one.
    pub output_bias: bool,
    /// gate, up and down have one.
    pub mlp_bias: bool,
    /// Positions that a layer looks at, itself included; none: all. One per layer, or empty when no layer has one.
    pub windows: Vec<Option<i64>>,
    /// Attention through a compressed latent (DeepSeek-V2) instead of heads of their own.
    pub latent: Option<Latent>,
    /// Mixture of experts, in the layers that it names.
    pub experts: Option<Experts>,
}

/// Multi-head latent attention (DeepSeek-AI 2024). A head's query and key are `nope` values without position and `rope` values
/// with; `head_dim` is their sum.
#[derive(Debug, Clone, PartialEq)]
pub struct Latent {
    /// Width of the queries' latent; none: queries are projected directly.
    pub q_rank: Option<i64>,
    /// Width of the latent of keys and values.
    pub kv_rank: i64,
    pub nope: i64,
    pub rope: i64,
    /// Width of a head's value.
    pub value: i64,
}

/// A router and its experts.
#[derive(Debug, Clone, PartialEq)]
pub struct Experts {
    pub count: i64,
    /// Experts that each token goes to.
    pub per_token: i64,
    /// Width inside an expert's SwiGLU.
    pub intermediate_size: i64,
    /// Whether the chosen experts' scores are divided by their sum.
    pub normalise: bool,
    /// Experts that every token goes to, as one SwiGLU of so many times the width.
    pub shared: i64,
    pub scoring: Scoring,
    /// Which layers have experts.
    pub layers: Vec<bool>,
}

/// How a router's logits become scores and a choice.
#[derive(Debug, Clone, PartialEq)]
pub enum Scoring {
    /// Softmax over all experts; the highest are taken (Qwen3-MoE).
    Softmax,
    /// Sigmoid; a bias that no gradient reaches is added for the choice alone, made among the `groups_kept` groups with the
    /// highest sum of their two best; the scores are multiplied by `scale` (DeepSeek-V3).
    Sigmoid { groups: i64, groups_kept: i64, scale: f64 },
}

impl ModelConfig {
    /// Width of a head's value: `head_dim` unless attention is latent.
    pub fn value_dim(&self) -> i64 {
        self.latent.as_ref().map_or(self.head_dim, |latent| latent.value)
    }

    /// Values of a head that carry a position.
    pub fn rotary_dim(&self) -> i64 {
        self.latent.as_ref().map_or(self.head_dim, |latent| latent.rope)
    }

    /// Heads of keys and values that a cache holds per position.
    pub fn cached_heads(&self) -> i64 {
        if self.latent.is_some() {
            self.num_attention_heads
        } else {
            self.num_key_value_heads
        }
    }

    /// What scores are multiplied by before the softmax.
    pub fn attention_scale(&self) -> f64 {
        let stretch = if self.latent.is_some() {
            self.rope.score_stretch()
        } else {
            1.0
        };
        stretch / (self.head_dim as f64).sqrt()
    }

    /// The window of a layer, in positions.
    pub fn window(&self, layer: i64) -> Option<i64> {
        self.windows.get(layer as usize).copied().flatten()
    }

    /// The experts of a layer.
    pub fn experts_of(&self, layer: i64) -> Option<&Experts> {
        let experts = self.experts.as_ref()?;
        experts
            .layers
            .get(layer as usize)
            .copied()
            .unwrap_or(false)
            .then_some(experts)
    }
}

#[cfg(test)]
mod tests;
