//! The transformer: its parameters, and the forward pass from embeddings to hidden rows.
//!
//! The pass is written once, over a [`Backend`]: [`crate::exact`] for sampling and scoring,
//! [`crate::autograd`] for gradients. Architectures differ by [`ModelConfig`] and have no code of
//! their own. A row is one token. Only attention knows which rows form a sequence.

use crate::config::{Experts, Latent, ModelConfig};

/// The epsilon of DeepSeek's latent norms. It does not depend on `rms_norm_eps`.
const LATENT_EPS: f64 = 1e-6;

/// The end of the name of every router's weights.
const ROUTER: &str = "mlp.gate";

/// All parameters, each a `T`. V is the vocabulary's size and D the width of the residual stream.
#[derive(Debug, Clone)]
pub struct Transformer<T> {
    /// `[V, D]`.
    pub embedding: T,
    pub layers: Vec<Layer<T>>,
    /// `[D]`.
    pub norm: T,
    /// `[V, D]`. `None`: tied to the embedding.
    pub head: Option<T>,
}

/// The parameters of one block.
#[derive(Debug, Clone)]
pub struct Layer<T> {
    pub(crate) input_norm: T,
    pub(crate) projection: Projection<T>,
    pub(crate) output: Linear<T>,
    pub(crate) post_norm: T,
    pub(crate) mlp: Mlp<T>,
}

/// A weight `[outputs, inputs]` and a bias `[outputs]`.
#[derive(Debug, Clone)]
pub struct Linear<T> {
    pub weight: T,
    pub bias: Option<T>,
}

/// From the residual stream to queries, keys and values.
#[derive(Debug, Clone)]
pub(crate) enum Projection<T> {
    Heads {
        q: Linear<T>,
        k: Linear<T>,
        v: Linear<T>,
        /// Norms over each head's query and key, `[head_dim]` each.
        norms: Option<(T, T)>,
    },
    Latent {
        q: LatentQuery<T>,
        kv_down: Linear<T>,
        kv_norm: T,
        kv_up: Linear<T>,
    },
}

#[derive(Debug, Clone)]
pub(crate) enum LatentQuery<T> {
    Direct(Linear<T>),
    LowRank { down: Linear<T>, norm: T, up: Linear<T> },
}

#[derive(Debug, Clone)]
pub(crate) struct SwiGlu<T> {
    pub gate: Linear<T>,
    pub up: Linear<T>,
    pub down: Linear<T>,
}

#[derive(Debug, Clone)]
pub(crate) enum Mlp<T> {
    Dense(SwiGlu<T>),
    Experts(Mixture<T>),
}

#[derive(Debug, Clone)]
pub(crate) struct Mixture<T> {
    settings: Experts,
    router: Linear<T>,
    /// Added to the scores for the choice only, `[experts]`.
    choice_bias: Option<T>,
    experts: Vec<SwiGlu<T>>,
    shared: Option<SwiGlu<T>>,
}

/// The experts of each row, and their weights.
#[derive(Debug, Clone)]
pub struct Route<R> {
    /// `[rows · per_token]`, ascending within a row. Results are added in this order.
    pub experts: Vec<u32>,
    pub per_token: usize,
    /// `[rows, per_token]`.
    pub weights: R,
}

impl<R> Route<R> {
    /// The rows that use an expert, each with the expert's index among the row's experts.
    pub fn rows_of(&self, expert: u32) -> Vec<(usize, usize)> {
        let places = self.experts.iter().enumerate().filter(|&(_, &e)| e == expert);
        places.map(|(i, _)| (i / self.per_token, i % self.per_token)).collect()
    }
}

/// What a gradient needs of a dense block, besides its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Queries and keys before their norms, if they have norms.
    QueryBeforeNorm,
    KeyBeforeNorm,
    /// With their positions.
    Query,
    Key,
    Value,
    /// The result of attention, and the residual stream after it. In the last layer: of the rows
    /// whose logits are needed.
    Attended,
    Middle,
    Gate,
    Up,
}

impl Part {
    pub const COUNT: usize = Part::Up as usize + 1;
}

/// The operations of a forward pass. Rows are `[n, width]` in f32.
pub trait Backend {
    type Parameter;
    type Rows;

    /// x Wᵀ + b.
    fn linear(&self, x: &Self::Rows, linear: &Linear<Self::Parameter>) -> Self::Rows;
    /// x Wᵀ of a router, in f32 whatever the precision of other products: rounding must not decide
    /// between two experts with close scores.
    fn router_logits(&self, x: &Self::Rows, router: &Linear<Self::Parameter>) -> Self::Rows;
    /// x / √(mean(x²) + eps) · w over groups as wide as `w` (Zhang & Sennrich 2019).
    fn rms_norm(&self, x: &Self::Rows, w: &Self::Parameter, eps: f64) -> Self::Rows;
    /// Applies rotary positions to every head of `head` values, from value `from` of the head on.
    fn rotate(&self, x: Self::Rows, head: i64, from: i64) -> Self::Rows;
    /// Causal attention: q `[n, H · head_dim]`, k `[n, H_kv · head_dim]` and
    /// v `[n, H_kv · value_dim]` give `[n, H · value_dim]`.
    fn attend(&mut self, layer: i64, q: &Self::Rows, k: &Self::Rows, v: &Self::Rows) -> Self::Rows;
    /// silu(gate) · up.
    fn swiglu(&self, gate: Self::Rows, up: &Self::Rows) -> Self::Rows;
    fn add(&self, x: Self::Rows, y: &Self::Rows) -> Self::Rows;
    /// Splits each of the `groups` equal parts of a row after its first `width` values.
    fn split(&self, x: &Self::Rows, groups: i64, width: i64) -> (Self::Rows, Self::Rows);
    /// Appends the row of `shared` to each of the `groups` equal parts of a row.
    fn join(&self, x: &Self::Rows, groups: i64, shared: &Self::Rows) -> Self::Rows;
    /// The rows whose logits are needed. The last layer continues with these.
    fn select_logit_rows(&self, x: Self::Rows) -> Self::Rows;
    /// Chooses experts from the router's logits `[n, count]`, or replays the recorded ones.
    fn route(
        &mut self,
        layer: i64,
        logits: &Self::Rows,
        experts: &Experts,
        choice_bias: Option<&Self::Parameter>,
    ) -> Route<Self::Rows>;
    fn zeros_like(&self, x: &Self::Rows) -> Self::Rows;
    /// The rows that use an expert. `None`: no row does.
    fn dispatch(&self, x: &Self::Rows, route: &Route<Self::Rows>, expert: u32) -> Option<Self::Rows>;
    /// Adds an expert's results, times their weights, to the rows that use it.
    fn combine(&self, sum: Self::Rows, y: &Self::Rows, route: &Route<Self::Rows>, expert: u32) -> Self::Rows;
    /// Called with every [`Part`] of a dense block.
    fn keep(&mut self, _part: Part, _rows: &Self::Rows) {}
}

impl<T> Transformer<T> {
    /// Calls `parameter` with the Hugging Face name and the shape of every parameter, in the order
    /// of the forward pass.
    pub fn build<E>(config: &ModelConfig, parameter: &mut impl FnMut(&str, &[i64]) -> Result<T, E>) -> Result<Self, E> {
        let (v, d) = (config.vocab_size, config.hidden_size);
        Ok(Transformer {
            embedding: parameter("model.embed_tokens.weight", &[v, d])?,
            layers: (0..config.num_hidden_layers)
                .map(|layer| Layer::build(config, layer, parameter))
                .collect::<Result<_, E>>()?,
            norm: parameter("model.norm.weight", &[d])?,
            head: match config.tie_word_embeddings {
                true => None,
                false => Some(parameter("lm_head.weight", &[v, d])?),
            },
        })
    }

    /// The output projection, `[V, D]`.
    pub fn projection(&self) -> &T {
        self.head.as_ref().unwrap_or(&self.embedding)
    }
}

impl<T> Layer<T> {
    fn build<E>(
        config: &ModelConfig,
        layer: i64,
        parameter: &mut impl FnMut(&str, &[i64]) -> Result<T, E>,
    ) -> Result<Self, E> {
        let d = config.hidden_size;
        let mut named = |name: &str, shape: &[i64]| parameter(&format!("model.layers.{layer}.{name}"), shape);
        Ok(Layer {
            input_norm: named("input_layernorm.weight", &[d])?,
            projection: match &config.latent {
                None => head_projection(config, &mut named)?,
                Some(latent) => latent_projection(config, latent, &mut named)?,
            },
            output: linear(
                &mut named,
                "self_attn.o_proj",
                [d, config.num_attention_heads * config.value_dim()],
                config.output_bias,
            )?,
            post_norm: named("post_attention_layernorm.weight", &[d])?,
            mlp: match config.experts_of(layer) {
                None => Mlp::Dense(swiglu(&mut named, "mlp", d, config.intermediate_size, config.mlp_bias)?),
                Some(experts) => Mlp::Experts(mixture(d, experts, &mut named)?),
            },
        })
    }

    /// One block: adds attention and the MLP to the residual stream x `[n, D]`. After the last
    /// layer's attention only the rows whose logits are needed remain.
    pub fn forward<B: Backend<Parameter = T>>(
        &self,
        b: &mut B,
        config: &ModelConfig,
        layer: i64,
        x: B::Rows,
    ) -> B::Rows {
        let h = b.rms_norm(&x, &self.input_norm, config.rms_norm_eps);
        let (q, k, v) = self.projection.forward(b, config, &h);
        let mut attended = b.attend(layer, &q, &k, &v);
        let mut x = x;
        if layer + 1 == config.num_hidden_layers {
            (x, attended) = (b.select_logit_rows(x), b.select_logit_rows(attended));
        }
        let x = b.add(x, &b.linear(&attended, &self.output));
        b.keep(Part::Attended, &attended);
        b.keep(Part::Middle, &x);
        let h = b.rms_norm(&x, &self.post_norm, config.rms_norm_eps);
        let h = self.mlp.forward(b, layer, &h);
        b.add(x, &h)
    }
}

impl<T> Projection<T> {
    fn forward<B: Backend<Parameter = T>>(
        &self,
        b: &mut B,
        config: &ModelConfig,
        h: &B::Rows,
    ) -> (B::Rows, B::Rows, B::Rows) {
        let width = config.head_dim;
        match self {
            Projection::Heads { q, k, v, norms } => {
                let (mut q, mut k, v) = (b.linear(h, q), b.linear(h, k), b.linear(h, v));
                if let Some((q_norm, k_norm)) = norms {
                    b.keep(Part::QueryBeforeNorm, &q);
                    b.keep(Part::KeyBeforeNorm, &k);
                    q = b.rms_norm(&q, q_norm, config.rms_norm_eps);
                    k = b.rms_norm(&k, k_norm, config.rms_norm_eps);
                }
                let (q, k) = (b.rotate(q, width, 0), b.rotate(k, width, 0));
                b.keep(Part::Query, &q);
                b.keep(Part::Key, &k);
                b.keep(Part::Value, &v);
                (q, k, v)
            }
            Projection::Latent {
                q,
                kv_down,
                kv_norm,
                kv_up,
            } => {
                let heads = config.num_attention_heads;
                let plain = width - config.rotary_dim();
                let q = match q {
                    LatentQuery::Direct(q) => b.linear(h, q),
                    LatentQuery::LowRank { down, norm, up } => {
                        b.linear(&b.rms_norm(&b.linear(h, down), norm, LATENT_EPS), up)
                    }
                };
                let down = b.linear(h, kv_down);
                let (latent, rotary) = b.split(&down, 1, config.latent.as_ref().map_or(0, |latent| latent.kv_rank));
                // All heads share the part of the key that carries the position.
                let rotary = b.rotate(rotary, config.rotary_dim(), 0);
                let kv = b.linear(&b.rms_norm(&latent, kv_norm, LATENT_EPS), kv_up);
                let (k, v) = b.split(&kv, heads, plain);
                (b.rotate(q, width, plain), b.join(&k, heads, &rotary), v)
            }
        }
    }
}

impl<T> SwiGlu<T> {
    fn forward<B: Backend<Parameter = T>>(&self, b: &mut B, h: &B::Rows) -> B::Rows {
        let (gate, up) = (b.linear(h, &self.gate), b.linear(h, &self.up));
        b.keep(Part::Gate, &gate);
        b.keep(Part::Up, &up);
        let gated = b.swiglu(gate, &up);
        b.linear(&gated, &self.down)
    }
}

impl<T> Mlp<T> {
    fn forward<B: Backend<Parameter = T>>(&self, b: &mut B, layer: i64, h: &B::Rows) -> B::Rows {
        let mixture = match self {
            Mlp::Dense(dense) => return dense.forward(b, h),
            Mlp::Experts(mixture) => mixture,
        };
        let logits = b.router_logits(h, &mixture.router);
        let route = b.route(layer, &logits, &mixture.settings, mixture.choice_bias.as_ref());
        let mut sum = b.zeros_like(h);
        for (expert, swiglu) in (0..).zip(&mixture.experts) {
            if let Some(chosen) = b.dispatch(h, &route, expert) {
                let y = swiglu.forward(b, &chosen);
                sum = b.combine(sum, &y, &route, expert);
            }
        }
        match &mixture.shared {
            Some(shared) => {
                let y = shared.forward(b, h);
                b.add(sum, &y)
            }
            None => sum,
        }
    }
}

fn linear<T, E>(
    named: &mut impl FnMut(&str, &[i64]) -> Result<T, E>,
    name: &str,
    [outputs, inputs]: [i64; 2],
    bias: bool,
) -> Result<Linear<T>, E> {
    Ok(Linear {
        weight: named(&format!("{name}.weight"), &[outputs, inputs])?,
        bias: match bias {
            true => Some(named(&format!("{name}.bias"), &[outputs])?),
            false => None,
        },
    })
}

fn swiglu<T, E>(
    named: &mut impl FnMut(&str, &[i64]) -> Result<T, E>,
    name: &str,
    d: i64,
    width: i64,
    bias: bool,
) -> Result<SwiGlu<T>, E> {
    Ok(SwiGlu {
        gate: linear(named, &format!("{name}.gate_proj"), [width, d], bias)?,
        up: linear(named, &format!("{name}.up_proj"), [width, d], bias)?,
        down: linear(named, &format!("{name}.down_proj"), [d, width], bias)?,
    })
}

fn head_projection<T, E>(
    config: &ModelConfig,
    named: &mut impl FnMut(&str, &[i64]) -> Result<T, E>,
) -> Result<Projection<T>, E> {
    let (d, width) = (config.hidden_size, config.head_dim);
    let mut one = |name: &str, heads: i64| linear(named, name, [heads * width, d], config.qkv_bias);
    Ok(Projection::Heads {
        q: one("self_attn.q_proj", config.num_attention_heads)?,
        k: one("self_attn.k_proj", config.num_key_value_heads)?,
        v: one("self_attn.v_proj", config.num_key_value_heads)?,
        norms: match config.qk_norm {
            true => Some((
                named("self_attn.q_norm.weight", &[width])?,
                named("self_attn.k_norm.weight", &[width])?,
            )),
            false => None,
        },
    })
}

fn latent_projection<T, E>(
    config: &ModelConfig,
    latent: &Latent,
    named: &mut impl FnMut(&str, &[i64]) -> Result<T, E>,
) -> Result<Projection<T>, E> {
    let (d, heads, bias) = (config.hidden_size, config.num_attention_heads, config.qkv_bias);
    let q_width = heads * config.head_dim;
    Ok(Projection::Latent {
        q: match latent.q_rank {
            None => LatentQuery::Direct(linear(named, "self_attn.q_proj", [q_width, d], false)?),
            Some(rank) => LatentQuery::LowRank {
                down: linear(named, "self_attn.q_a_proj", [rank, d], bias)?,
                norm: named("self_attn.q_a_layernorm.weight", &[rank])?,
                up: linear(named, "self_attn.q_b_proj", [q_width, rank], false)?,
            },
        },
        kv_down: linear(
            named,
            "self_attn.kv_a_proj_with_mqa",
            [latent.kv_rank + latent.rope, d],
            bias,
        )?,
        kv_norm: named("self_attn.kv_a_layernorm.weight", &[latent.kv_rank])?,
        kv_up: linear(
            named,
            "self_attn.kv_b_proj",
            [heads * (latent.nope + latent.value), latent.kv_rank],
            false,
        )?,
    })
}

fn mixture<T, E>(
    d: i64,
    experts: &Experts,
    named: &mut impl FnMut(&str, &[i64]) -> Result<T, E>,
) -> Result<Mixture<T>, E> {
    let width = experts.intermediate_size;
    let biased = matches!(experts.scoring, crate::config::Scoring::Sigmoid { .. });
    Ok(Mixture {
        settings: experts.clone(),
        router: linear(named, ROUTER, [experts.count, d], false)?,
        choice_bias: match biased {
            true => Some(named(&format!("{ROUTER}.e_score_correction_bias"), &[experts.count])?),
            false => None,
        },
        experts: (0..experts.count)
            .map(|expert| swiglu(named, &format!("mlp.experts.{expert}"), d, width, false))
            .collect::<Result<_, E>>()?,
        shared: match experts.shared {
            0 => None,
            shared => Some(swiglu(named, "mlp.shared_experts", d, shared * width, false)?),
        },
    })
}

/// Whether a parameter is a router's weight, which [`Backend::router_logits`] multiplies in f32.
pub fn is_router(name: &str) -> bool {
    name.strip_suffix(".weight").is_some_and(|name| name.ends_with(ROUTER))
}

/// Whether the outputs of a parameter's matrix are added to the residual stream.
pub fn writes_to_residual_stream(name: &str) -> bool {
    name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight")
}

impl ModelConfig {
    /// The Hugging Face name and the shape of every parameter, in the order of the forward pass.
    pub fn parameter_shapes(&self) -> Vec<(String, Vec<i64>)> {
        let mut shapes = Vec::new();
        Transformer::build(self, &mut |name: &str, shape: &[i64]| {
            shapes.push((name.to_string(), shape.to_vec()));
            Ok::<(), std::convert::Infallible>(())
        })
        .unwrap_or_else(|never| match never {});
        shapes
    }
}
