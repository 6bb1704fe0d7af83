//! The parts of a block: norm, rotary positions, attention, SwiGLU. Pure functions of tensors.

use super::{Compute, Parameters};
use crate::config::ModelConfig;
use tch::{Kind, Tensor};

/// x · wᵀ; w is `[out, in]` f32. With [`Compute::Bf16`] both are rounded to bf16 first and the result is bf16.
pub(super) fn linear(x: &Tensor, w: &Tensor, compute: Compute) -> Tensor {
    match compute {
        Compute::F32 => x.linear::<&Tensor>(w, None),
        Compute::Bf16 => x
            .to_kind(Kind::BFloat16)
            .linear::<&Tensor>(&w.to_kind(Kind::BFloat16), None),
    }
}

/// x / sqrt(mean(x²) + eps) · w over the last dimension, f32 (Zhang & Sennrich 2019).
pub(super) fn rms_norm(x: &Tensor, w: &Tensor, eps: f64) -> Tensor {
    let mean = (x * x).mean_dim([-1i64].as_slice(), true, Kind::Float);
    x * (mean + eps).rsqrt() * w
}

/// Rotary position embedding (Su et al. 2021), in the half-split layout of Hugging Face checkpoints.
#[derive(Debug)]
pub(super) struct Rotary {
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    pub fn new(config: &ModelConfig) -> Self {
        let half = config.head_dim / 2;
        let steps: Vec<f32> = (0..half)
            .map(|i| (1.0 / config.rope_theta.powf(2.0 * i as f64 / config.head_dim as f64)) as f32)
            .collect();
        let positions = Tensor::arange(config.max_position_embeddings, (Kind::Float, tch::Device::Cpu));
        let angles = positions.unsqueeze(1) * Tensor::from_slice(&steps).unsqueeze(0);
        let angles = Tensor::cat(&[&angles, &angles], 1);
        Rotary {
            cos: angles.cos(),
            sin: angles.sin(),
        }
    }

    /// cos and sin of positions `from..from + n`, each `[1, 1, n, head_dim]`.
    pub fn range(&self, from: i64, n: i64) -> (Tensor, Tensor) {
        let cut = |t: &Tensor| t.narrow(0, from, n).unsqueeze(0).unsqueeze(0);
        (cut(&self.cos), cut(&self.sin))
    }

    /// cos and sin of one position per row, each `[B, 1, 1, head_dim]`.
    pub fn at(&self, positions: &Tensor) -> (Tensor, Tensor) {
        let pick = |t: &Tensor| t.index_select(0, positions).unsqueeze(1).unsqueeze(1);
        (pick(&self.cos), pick(&self.sin))
    }
}

fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Tensor {
    let half = x.size()[3] / 2;
    let turned = Tensor::cat(&[&x.narrow(3, half, half).neg(), &x.narrow(3, 0, half)], 3);
    x * cos + turned * sin
}

/// One decoder block: the weights of one layer.
pub(super) struct Block<'a> {
    pub config: &'a ModelConfig,
    pub parameters: &'a Parameters,
    pub prefix: String,
    pub compute: Compute,
}

impl Block<'_> {
    fn weight(&self, name: &str) -> &Tensor {
        &self.parameters[&format!("{}{name}.weight", self.prefix)]
    }

    /// x `[B, T, D]` → queries `[B, H, T, hd]`, keys and values `[B, H_kv, T, hd]`; positions applied.
    pub fn qkv(&self, x: &Tensor, cos: &Tensor, sin: &Tensor) -> (Tensor, Tensor, Tensor) {
        let c = self.config;
        let size = x.size();
        let (b, t) = (size[0], size[1]);
        let h = rms_norm(x, self.weight("input_layernorm"), c.rms_norm_eps);
        let heads = |name: &str, n: i64| {
            linear(&h, self.weight(name), self.compute)
                .view([b, t, n, c.head_dim])
                .to_kind(Kind::Float)
        };
        let mut q = heads("self_attn.q_proj", c.num_attention_heads);
        let mut k = heads("self_attn.k_proj", c.num_key_value_heads);
        let v = heads("self_attn.v_proj", c.num_key_value_heads);
        if c.qk_norm {
            q = rms_norm(&q, self.weight("self_attn.q_norm"), c.rms_norm_eps);
            k = rms_norm(&k, self.weight("self_attn.k_norm"), c.rms_norm_eps);
        }
        let (q, k) = (q.transpose(1, 2), k.transpose(1, 2));
        (rotate(&q, cos, sin), rotate(&k, cos, sin), v.transpose(1, 2))
    }

    /// The rest of the block: output projection and SwiGLU, each added to the residual stream.
    pub fn finish(&self, x: &Tensor, attended: &Tensor) -> Tensor {
        self.rest(x, &attended.transpose(1, 2).flatten(2, 3))
    }

    /// [`finish`](Self::finish) at flat positions `row · T + t` alone: `[n, D]`.
    pub fn finish_at(&self, x: &Tensor, attended: &Tensor, positions: &Tensor) -> Tensor {
        let pick = |t: &Tensor| t.flatten(0, 1).index_select(0, positions);
        self.rest(&pick(x), &pick(&attended.transpose(1, 2).flatten(2, 3)))
    }

    /// Both `[…, D]`.
    fn rest(&self, x: &Tensor, attended: &Tensor) -> Tensor {
        let x = x + linear(attended, self.weight("self_attn.o_proj"), self.compute);
        let h = rms_norm(&x, self.weight("post_attention_layernorm"), self.config.rms_norm_eps);
        let gate = linear(&h, self.weight("mlp.gate_proj"), self.compute).silu();
        let up = linear(&h, self.weight("mlp.up_proj"), self.compute);
        &x + linear(&(gate * up), self.weight("mlp.down_proj"), self.compute)
    }
}

/// Causal attention over a whole sequence.
pub(super) fn attend_causal(q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor {
    let (k, v) = (spread(k, q), spread(v, q));
    Tensor::scaled_dot_product_attention::<&Tensor>(q, &k, &v, None, 0.0, true, None, false)
}

/// Attention of one query per row over a padded cache; `mask` `[B, 1, 1, L]` is 0 where a key counts and −∞ elsewhere.
pub(super) fn attend_masked(q: &Tensor, k: &Tensor, v: &Tensor, mask: &Tensor) -> Tensor {
    let (k, v) = (spread(k, q), spread(v, q));
    let scale = 1.0 / (q.size()[3] as f64).sqrt();
    let scores = q.matmul(&k.transpose(2, 3)) * scale + mask;
    scores.softmax(-1, Kind::Float).matmul(&v)
}

/// Repeats key-value heads so that each query head has its own (grouped-query attention).
fn spread(kv: &Tensor, q: &Tensor) -> Tensor {
    let groups = q.size()[1] / kv.size()[1];
    if groups == 1 {
        kv.shallow_clone()
    } else {
        kv.repeat_interleave_self_int(groups, 1, None)
    }
}
