//! The transformer's operations as differentiable operations on tensors `[n, width]`.

use crate::TrainModel;
use model::config::{Experts, ModelConfig, Rotations, Scoring};
use model::exact::Compute;
use model::router::{self, Routing};
use model::transformer::{Backend, Linear, Route};
use tch::{Device, Kind, Tensor};

/// cos and sin of every row of a pass, `[n, 1, pairs]`.
#[derive(Debug)]
pub struct Rotary {
    cos: Tensor,
    sin: Tensor,
    pairs: i64,
}

impl Rotary {
    /// For sequences of these lengths, which lie one after the other.
    pub fn new(rotations: &Rotations, lengths: &[i64]) -> Self {
        let longest = lengths.iter().copied().max().unwrap_or(0).max(1);
        let pairs = rotations.pairs() as i64;
        let (cos, sin) = rotations.at(0..longest as usize);
        let positions: Vec<i64> = lengths.iter().flat_map(|&n| 0..n).collect();
        let positions = Tensor::from_slice(&positions);
        let rows = |values: &[f32]| {
            let each = Tensor::from_slice(values).view([longest, pairs]);
            each.index_select(0, &positions).unsqueeze(1)
        };
        Rotary {
            cos: rows(&cos),
            sin: rows(&sin),
            pairs,
        }
    }
}

/// The state of one pass, or of one layer of it.
#[derive(Debug)]
pub struct TorchBackend<'a> {
    config: &'a ModelConfig,
    compute: Compute,
    /// The lengths of the sequences, which lie one after the other.
    lengths: &'a [i64],
    rotary: &'a Rotary,
    /// The rows whose logits are needed. `None`: all.
    logit_rows: Option<&'a Tensor>,
    /// The experts to use instead of choosing.
    replay: Option<&'a Routing>,
}

impl<'a> TorchBackend<'a> {
    pub fn new(
        model: &'a TrainModel,
        lengths: &'a [i64],
        rotary: &'a Rotary,
        logit_rows: Option<&'a Tensor>,
        replay: Option<&'a Routing>,
    ) -> Self {
        TorchBackend {
            config: &model.config,
            compute: model.compute,
            lengths,
            rotary,
            logit_rows,
            replay,
        }
    }

    /// x · wᵀ + bias in f32. With [`Compute::Bf16`] both factors are rounded to bf16 first.
    pub fn product(&self, x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Tensor {
        match self.compute {
            Compute::F32 => x.linear(w, bias),
            Compute::Bf16 => {
                let half = |t: &Tensor| t.to_kind(Kind::BFloat16);
                half(x).linear(&half(w), bias.map(half).as_ref()).to_kind(Kind::Float)
            }
        }
    }

    /// Attention over sequences of equal length.
    fn attend_equal(&self, q: &Tensor, k: &Tensor, v: &Tensor, length: i64, window: Option<i64>) -> Tensor {
        let c = self.config;
        let heads = |x: &Tensor, heads: i64, width: i64| x.view([-1, length, heads, width]).transpose(1, 2);
        let q = heads(q, c.num_attention_heads, c.head_dim);
        let shared = c.num_attention_heads / c.cached_heads();
        let spread = |x: Tensor| match shared {
            1 => x,
            _ => x.repeat_interleave_self_int(shared, 1, None),
        };
        let k = spread(heads(k, c.cached_heads(), c.head_dim));
        let v = spread(heads(v, c.cached_heads(), c.value_dim()));
        let mask = window.filter(|&window| window < length).map(|window| {
            Tensor::ones([length, length], (Kind::Bool, Device::Cpu))
                .tril(0)
                .triu(1 - window)
        });
        let causal = mask.is_none();
        let scale = c.attention_scale();
        Tensor::scaled_dot_product_attention(&q, &k, &v, mask.as_ref(), 0.0, causal, scale, false)
            .transpose(1, 2)
            .flatten(2, 3)
            .flatten(0, 1)
    }

    /// [`Route::rows_of`] as tensors. `None`: no row uses the expert.
    fn rows_of(&self, route: &Route<Tensor>, expert: u32) -> Option<(Tensor, Tensor)> {
        let (rows, places): (Vec<i64>, Vec<i64>) = route
            .rows_of(expert)
            .into_iter()
            .map(|(row, place)| (row as i64, place as i64))
            .unzip();
        (!rows.is_empty()).then(|| (Tensor::from_slice(&rows), Tensor::from_slice(&places)))
    }
}

impl Backend for TorchBackend<'_> {
    type Parameter = Tensor;
    type Rows = Tensor;

    fn linear(&self, x: &Tensor, linear: &Linear<Tensor>) -> Tensor {
        self.product(x, &linear.weight, linear.bias.as_ref())
    }

    fn router_logits(&self, x: &Tensor, router: &Linear<Tensor>) -> Tensor {
        x.linear(&router.weight, router.bias.as_ref())
    }

    fn rms_norm(&self, x: &Tensor, w: &Tensor, eps: f64) -> Tensor {
        let groups = x.view([-1, w.size()[0]]);
        let mean = (&groups * &groups).mean_dim([-1i64].as_slice(), true, Kind::Float);
        (&groups * (mean + eps).rsqrt() * w).view_as(x)
    }

    fn rotate(&self, x: Tensor, head: i64, from: i64) -> Tensor {
        let Rotary { cos, sin, pairs } = self.rotary;
        let (rows, pairs) = (x.size()[0], *pairs);
        let heads = x.view([rows, -1, head]);
        let rotary = heads.narrow(2, from, 2 * pairs);
        let (a, b) = if self.config.rope.interleaved {
            let pairs_of = rotary.reshape([rows, -1, pairs, 2]);
            (pairs_of.select(3, 0), pairs_of.select(3, 1))
        } else {
            (rotary.narrow(2, 0, pairs), rotary.narrow(2, pairs, pairs))
        };
        let rotated = [&a * cos - &b * sin, &b * cos + &a * sin];
        let unrotated = heads.narrow(2, 0, from);
        Tensor::cat(&[&unrotated, &rotated[0], &rotated[1]], 2).view_as(&x)
    }

    fn attend(&mut self, layer: i64, q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor {
        let window = self.config.window(layer);
        let first = self.lengths.first().copied().unwrap_or(0);
        if self.lengths.iter().all(|&length| length == first) {
            return self.attend_equal(q, k, v, first, window);
        }
        let mut row = 0;
        let parts: Vec<Tensor> = self
            .lengths
            .iter()
            .map(|&length| {
                let rows_of = |x: &Tensor| x.narrow(0, row, length);
                let part = self.attend_equal(&rows_of(q), &rows_of(k), &rows_of(v), length, window);
                row += length;
                part
            })
            .collect();
        Tensor::cat(&parts, 0)
    }

    fn swiglu(&self, gate: Tensor, up: &Tensor) -> Tensor {
        gate.silu() * up
    }

    fn add(&self, x: Tensor, y: &Tensor) -> Tensor {
        x + y
    }

    fn split(&self, x: &Tensor, groups: i64, width: i64) -> (Tensor, Tensor) {
        let rows = x.size()[0];
        let parts = x.view([rows, groups, -1]);
        let rest = parts.size()[2] - width;
        let columns = |from, width| parts.narrow(2, from, width).reshape([rows, -1]);
        (columns(0, width), columns(width, rest))
    }

    fn join(&self, x: &Tensor, groups: i64, shared: &Tensor) -> Tensor {
        let rows = x.size()[0];
        let shared = shared.unsqueeze(1).expand([-1, groups, -1], false);
        Tensor::cat(&[&x.view([rows, groups, -1]), &shared], 2).flatten(1, 2)
    }

    fn select_logit_rows(&self, x: Tensor) -> Tensor {
        match self.logit_rows {
            Some(rows) => x.index_select(0, rows),
            None => x,
        }
    }

    fn route(&mut self, layer: i64, logits: &Tensor, experts: &Experts, bias: Option<&Tensor>) -> Route<Tensor> {
        let per_token = experts.per_token as usize;
        let scores = match experts.scoring {
            Scoring::Softmax => logits.softmax(-1, Kind::Float),
            Scoring::Sigmoid { .. } => logits.sigmoid(),
        };
        let recorded = self.replay.and_then(|replay| replay.of_layer(layer));
        let chosen: Vec<u32> = match (recorded, self.logit_rows) {
            (Some(all), Some(logit_rows)) if layer + 1 == self.config.num_hidden_layers => {
                let rows: Vec<i64> = Vec::try_from(logit_rows).unwrap_or_default();
                let rows: Vec<usize> = rows.into_iter().map(|row| row as usize).collect();
                router::pick(all, per_token, &rows)
            }
            (Some(all), _) => all.to_vec(),
            (None, _) => {
                let for_choice = match bias {
                    Some(bias) => (&scores + bias).detach(),
                    None => logits.detach(),
                };
                let count = experts.count as usize;
                let mut values = vec![0f32; for_choice.numel()];
                for_choice.copy_data(&mut values, for_choice.numel());
                let rows = values.chunks_exact(count);
                rows.flat_map(|scores| router::choose(scores, experts)).collect()
            }
        };
        let ids: Vec<i64> = chosen.iter().map(|&expert| i64::from(expert)).collect();
        let ids = Tensor::from_slice(&ids).view([-1, experts.per_token]);
        let mut weights = scores.gather(1, &ids, false);
        if experts.normalize {
            weights = &weights / weights.sum_dim_intlist([-1i64].as_slice(), true, Kind::Float);
        }
        if let Scoring::Sigmoid { scale, .. } = experts.scoring {
            weights *= scale;
        }
        Route {
            experts: chosen,
            per_token,
            weights,
        }
    }

    fn zeros_like(&self, x: &Tensor) -> Tensor {
        x.zeros_like()
    }

    fn dispatch(&self, x: &Tensor, route: &Route<Tensor>, expert: u32) -> Option<Tensor> {
        let (rows, _) = self.rows_of(route, expert)?;
        Some(x.index_select(0, &rows))
    }

    fn combine(&self, sum: Tensor, y: &Tensor, route: &Route<Tensor>, expert: u32) -> Tensor {
        let Some((rows, places)) = self.rows_of(route, expert) else {
            return sum;
        };
        let weights = route
            .weights
            .index_select(0, &rows)
            .gather(1, &places.unsqueeze(1), false);
        sum.index_add(0, &rows, &(y * weights))
    }
}
