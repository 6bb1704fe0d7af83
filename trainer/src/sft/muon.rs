//! Muon for matrices (Jordan et al. 2024): momentum, then the nearest orthogonal matrix by
//! Newton-Schulz iteration. AdamW for embeddings and norms.

use super::Options;
use crate::learn::optimizer::AdamW;
use autograd::Parameters;
use model::exact::Compute;
use runs::settings::OptimizerSettings;
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

const MOMENTUM: f64 = 0.95;
const WEIGHT_DECAY: f64 = 0.01;

pub(super) struct Optimizer {
    /// Names of the matrices that Muon trains, grouped by shape: each group is orthogonalized in
    /// one batch.
    groups: Vec<Vec<String>>,
    momentum: BTreeMap<String, Tensor>,
    /// State of all other parameters.
    adam: AdamW,
    matrix_rate: f64,
    vector_rate: f64,
    /// Of the iteration's products.
    kind: Kind,
}

impl Optimizer {
    pub fn new(parameters: &Parameters, options: &Options) -> Self {
        let mut by_shape: BTreeMap<Vec<i64>, Vec<String>> = BTreeMap::new();
        let (mut momentum, mut vectors) = (BTreeMap::new(), Parameters::new());
        for (name, tensor) in parameters {
            if name.starts_with("model.layers.") && tensor.dim() == 2 {
                by_shape.entry(tensor.size()).or_default().push(name.clone());
                momentum.insert(name.clone(), tensor.detach().zeros_like());
            } else {
                vectors.insert(name.clone(), tensor.detach());
            }
        }
        Optimizer {
            groups: by_shape.into_values().collect(),
            momentum,
            adam: AdamW::new(&vectors),
            matrix_rate: options.matrix_rate,
            vector_rate: options.vector_rate,
            kind: match options.compute {
                Compute::F32 => Kind::Float,
                Compute::Bf16 => Kind::BFloat16,
            },
        }
    }

    /// One update from the accumulated gradients, which are then cleared. `scale` multiplies both
    /// rates.
    pub fn step(&mut self, parameters: &Parameters, scale: f64) {
        let _no_grad = tch::no_grad_guard();
        for group in &self.groups {
            let nesterov: Vec<Tensor> = group
                .iter()
                .filter_map(|name| {
                    let grad = parameters[name].grad();
                    let m = self.momentum.get_mut(name)?;
                    let _ = m.g_mul_scalar_(MOMENTUM).g_add_(&grad);
                    Some(grad + &*m * MOMENTUM)
                })
                .collect();
            let directions = orthogonalize(&Tensor::stack(&nesterov, 0), self.kind);
            for (i, name) in group.iter().enumerate() {
                let mut w = parameters[name].detach();
                let (rows, columns) = (w.size()[0] as f64, w.size()[1] as f64);
                let rate = self.matrix_rate * scale;
                let _ = w.g_mul_scalar_(1.0 - rate * WEIGHT_DECAY);
                let step = directions.get(i as i64) * (rate * (rows / columns).max(1.0).sqrt());
                let _ = w.g_sub_(&step);
            }
        }
        let of_adam = |tensor: fn(&Tensor) -> Tensor| -> Parameters {
            let names = self.adam.first.keys();
            names.map(|name| (name.clone(), tensor(&parameters[name]))).collect()
        };
        let (vectors, gradients) = (of_adam(Tensor::detach), of_adam(Tensor::grad));
        let settings = OptimizerSettings {
            learning_rate: self.vector_rate * scale,
            epsilon: 1e-10,
            ..OptimizerSettings::default() // β 0.9 and 0.95, no decay
        };
        let (updated, adam) = self.adam.updated(&vectors, &gradients, &settings);
        self.adam = adam;
        for (name, value) in updated {
            parameters[&name].detach().copy_(&value);
        }
        for tensor in parameters.values() {
            let _ = tensor.grad().zero_();
        }
    }
}

/// The orthogonal factor of each matrix of `[N, rows, columns]`: five quintic Newton-Schulz steps
/// in `kind`.
fn orthogonalize(g: &Tensor, kind: Kind) -> Tensor {
    let (a, b, c) = (3.4445, -4.7750, 2.0315);
    let tall = g.size()[1] > g.size()[2];
    let mut x = g.to_kind(kind);
    if tall {
        x = x.transpose(1, 2);
    }
    let norm = x
        .to_kind(Kind::Float)
        .square()
        .sum_dim_intlist([1i64, 2].as_slice(), true, Kind::Float)
        .sqrt();
    x = (x.to_kind(Kind::Float) / (norm + 1e-7)).to_kind(kind);
    for _ in 0..5 {
        let s = x.bmm(&x.transpose(1, 2));
        let p = &s * b + s.bmm(&s) * c;
        x = &x * a + p.bmm(&x);
    }
    if tall {
        x = x.transpose(1, 2);
    }
    x.to_kind(Kind::Float)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_orthogonalized_matrix_has_singular_values_near_one() {
        tch::manual_seed(1);
        for kind in [Kind::BFloat16, Kind::Float] {
            for shape in [[2, 48, 16], [2, 16, 48]] {
                let x = orthogonalize(&Tensor::randn(shape, (Kind::Float, tch::Device::Cpu)), kind);
                let (_, s, _) = x.get(0).svd(true, true);
                let (low, high) = (s.min().double_value(&[]), s.max().double_value(&[]));
                assert!(
                    low > 0.5 && high < 1.4,
                    "singular values in [{low}, {high}] of {kind:?}"
                );
            }
        }
    }
}
