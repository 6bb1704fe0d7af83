//! The baseline: the same model in plain libtorch, in f32 or bf16 throughout, with a KV cache, as
//! one would write it in PyTorch. Only dense models without biases.

use autograd::Parameters;
use model::config::ModelConfig;
use tch::{Device, Tensor};

pub struct Plain {
    config: ModelConfig,
    layers: Vec<Weights>,
    embedding: Tensor,
    norm: Tensor,
    head: Tensor,
    cos: Tensor,
    sin: Tensor,
    /// Per layer `[slots, H_kv, context, head_dim]`.
    keys: Vec<Tensor>,
    values: Vec<Tensor>,
}

struct Weights {
    input_norm: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms: Option<(Tensor, Tensor)>,
    o: Tensor,
    post_norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

impl Plain {
    /// `parameters` must have one dtype. Everything is computed in it.
    pub fn new(config: &ModelConfig, parameters: &Parameters, slots: i64, context: i64) -> Self {
        let get = |name: &str| parameters[name].shallow_clone();
        let kind = get("model.norm.weight").kind();
        let layers = (0..config.num_hidden_layers)
            .map(|layer| {
                let get = |name: &str| get(&format!("model.layers.{layer}.{name}.weight"));
                Weights {
                    input_norm: get("input_layernorm"),
                    q: get("self_attn.q_proj"),
                    k: get("self_attn.k_proj"),
                    v: get("self_attn.v_proj"),
                    norms: config
                        .qk_norm
                        .then(|| (get("self_attn.q_norm"), get("self_attn.k_norm"))),
                    o: get("self_attn.o_proj"),
                    post_norm: get("post_attention_layernorm"),
                    gate: get("mlp.gate_proj"),
                    up: get("mlp.up_proj"),
                    down: get("mlp.down_proj"),
                }
            })
            .collect();
        let (cos, sin) = config.rope.rotations(config.head_dim).at(0..context as usize);
        let table = |values: &[f32]| {
            let half = Tensor::from_slice(values).view([context, config.head_dim / 2]);
            Tensor::cat(&[&half, &half], 1).to_kind(kind)
        };
        let shape = [slots, config.num_key_value_heads, context, config.head_dim];
        let cache = || {
            let zeros = |_| Tensor::zeros(shape, (kind, Device::Cpu));
            (0..config.num_hidden_layers).map(zeros).collect::<Vec<_>>()
        };
        Plain {
            layers,
            embedding: get("model.embed_tokens.weight"),
            norm: get("model.norm.weight"),
            head: match config.tie_word_embeddings {
                true => get("model.embed_tokens.weight"),
                false => get("lm_head.weight"),
            },
            cos: table(&cos),
            sin: table(&sin),
            keys: cache(),
            values: cache(),
            config: config.clone(),
        }
    }

    /// Writes `ids` to the start of a slot. Returns the logits after the last one.
    pub fn prefill(&mut self, slot: i64, ids: &[u32]) -> Tensor {
        let ids = wide(ids).unsqueeze(0);
        let length = ids.size()[1];
        let (cos, sin) = (self.cos.narrow(0, 0, length), self.sin.narrow(0, 0, length));
        let mut x = Tensor::embedding(&self.embedding, &ids, -1, false, false);
        for (layer, w) in self.layers.iter().enumerate() {
            let (q, k, v) = self.qkv(w, &x, &cos, &sin);
            for (side, new) in [(&self.keys, &k), (&self.values, &v)] {
                side[layer].get(slot).narrow(1, 0, length).copy_(&new.squeeze_dim(0));
            }
            let a = attend(&q, &k, &v, None, true);
            x = self.rest(w, &x, &a);
        }
        self.project(&x.narrow(1, length - 1, 1))
    }

    /// Copies slot 0 to the first `slots` slots.
    pub fn spread(&mut self, slots: i64) {
        for side in self.keys.iter().chain(&self.values) {
            for slot in 1..slots {
                side.get(slot).copy_(&side.get(0));
            }
        }
    }

    /// Appends one token to each of the slots `0..tokens.len()`, which all hold `held` tokens.
    pub fn decode(&mut self, tokens: &[u32], held: i64) -> Tensor {
        let rows = tokens.len() as i64;
        let mut x = Tensor::embedding(&self.embedding, &wide(tokens).unsqueeze(1), -1, false, false);
        let (cos, sin) = (self.cos.narrow(0, held, 1), self.sin.narrow(0, held, 1));
        for (layer, w) in self.layers.iter().enumerate() {
            let (q, k, v) = self.qkv(w, &x, &cos, &sin);
            let all = [(&self.keys, &k), (&self.values, &v)].map(|(side, new)| {
                let cache = side[layer].narrow(0, 0, rows);
                cache.narrow(2, held, 1).copy_(new);
                cache.narrow(2, 0, held + 1)
            });
            let a = attend(&q, &all[0], &all[1], None, false);
            x = self.rest(w, &x, &a);
        }
        self.project(&x)
    }

    /// Logits of every position `[B, T, V]`, differentiable.
    pub fn logits(&self, ids: &Tensor) -> Tensor {
        let length = ids.size()[1];
        let (cos, sin) = (self.cos.narrow(0, 0, length), self.sin.narrow(0, 0, length));
        let mut x = Tensor::embedding(&self.embedding, ids, -1, false, false);
        for w in &self.layers {
            let (q, k, v) = self.qkv(w, &x, &cos, &sin);
            x = self.rest(w, &x, &attend(&q, &k, &v, None, true));
        }
        self.project(&x)
    }

    fn project(&self, x: &Tensor) -> Tensor {
        norm(x, &self.norm, self.config.rms_norm_eps).linear::<&Tensor>(&self.head, None)
    }

    fn qkv(&self, w: &Weights, x: &Tensor, cos: &Tensor, sin: &Tensor) -> (Tensor, Tensor, Tensor) {
        let c = &self.config;
        let size = x.size();
        let h = norm(x, &w.input_norm, c.rms_norm_eps);
        let heads = |weight: &Tensor, n: i64| {
            h.linear::<&Tensor>(weight, None)
                .view([size[0], size[1], n, c.head_dim])
        };
        let (mut q, mut k) = (heads(&w.q, c.num_attention_heads), heads(&w.k, c.num_key_value_heads));
        if let Some((q_norm, k_norm)) = &w.norms {
            (q, k) = (norm(&q, q_norm, c.rms_norm_eps), norm(&k, k_norm, c.rms_norm_eps));
        }
        let v = heads(&w.v, c.num_key_value_heads).transpose(1, 2);
        let turn = |x: Tensor| {
            let x = x.transpose(1, 2);
            let half = c.head_dim / 2;
            let turned = Tensor::cat(&[&x.narrow(3, half, half).neg(), &x.narrow(3, 0, half)], 3);
            x * cos + turned * sin
        };
        (turn(q), turn(k), v)
    }

    fn rest(&self, w: &Weights, x: &Tensor, attended: &Tensor) -> Tensor {
        let x = x + attended.transpose(1, 2).flatten(2, 3).linear::<&Tensor>(&w.o, None);
        let h = norm(&x, &w.post_norm, self.config.rms_norm_eps);
        let gated = h.linear::<&Tensor>(&w.gate, None).silu() * h.linear::<&Tensor>(&w.up, None);
        &x + gated.linear::<&Tensor>(&w.down, None)
    }
}

fn norm(x: &Tensor, w: &Tensor, eps: f64) -> Tensor {
    let width = *x.size().last().unwrap_or(&1);
    x.internal_fused_rms_norm([width].as_slice(), Some(w), eps).0
}

fn attend(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>, causal: bool) -> Tensor {
    let shared = q.size()[1] != k.size()[1];
    Tensor::scaled_dot_product_attention(q, k, v, mask, 0.0, causal, None, shared)
}

fn wide(ids: &[u32]) -> Tensor {
    let ids: Vec<i64> = ids.iter().map(|&id| i64::from(id)).collect();
    Tensor::from_slice(&ids)
}
