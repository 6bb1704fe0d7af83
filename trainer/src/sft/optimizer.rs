//! Muon for matrices (Jordan et al. 2024: momentum, then the nearest orthogonal matrix by Newton-Schulz), AdamW for
//! embeddings and norms.

use super::Options;
use policy::network::Parameters;
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

const MOMENTUM: f64 = 0.95;
const BETAS: (f64, f64) = (0.9, 0.95);
const EPS: f64 = 1e-10;
const WEIGHT_DECAY: f64 = 0.01;

pub(super) struct Optimizer {
    /// Names of the matrices that Muon moves, grouped by shape so that each group is orthogonalised in one batch.
    groups: Vec<Vec<String>>,
    momentum: BTreeMap<String, Tensor>,
    /// Adam's first and second moment of every other parameter.
    moments: BTreeMap<String, (Tensor, Tensor)>,
    steps: i32,
    matrix_rate: f64,
    vector_rate: f64,
}

impl Optimizer {
    pub fn new(parameters: &Parameters, options: &Options) -> Self {
        let mut by_shape: BTreeMap<Vec<i64>, Vec<String>> = BTreeMap::new();
        let mut momentum = BTreeMap::new();
        let mut moments = BTreeMap::new();
        for (name, tensor) in parameters {
            if name.starts_with("model.layers.") && tensor.dim() == 2 {
                by_shape.entry(tensor.size()).or_default().push(name.clone());
                momentum.insert(name.clone(), tensor.detach().zeros_like());
            } else {
                let zeros = || tensor.detach().zeros_like();
                moments.insert(name.clone(), (zeros(), zeros()));
            }
        }
        Optimizer {
            groups: by_shape.into_values().collect(),
            momentum,
            moments,
            steps: 0,
            matrix_rate: options.matrix_rate,
            vector_rate: options.vector_rate,
        }
    }

    /// One update from the gathered gradients, which are cleared. `scale` multiplies both rates.
    pub fn step(&mut self, parameters: &Parameters, scale: f64) {
        let _no_grad = tch::no_grad_guard();
        self.steps += 1;
        for group in &self.groups {
            let looked_ahead: Vec<Tensor> = group
                .iter()
                .filter_map(|name| {
                    let grad = parameters[name].grad();
                    let m = self.momentum.get_mut(name)?;
                    let _ = m.g_mul_scalar_(MOMENTUM).g_add_(&grad);
                    Some(grad + &*m * MOMENTUM)
                })
                .collect();
            let directions = orthogonalise(&Tensor::stack(&looked_ahead, 0));
            for (i, name) in group.iter().enumerate() {
                let mut w = parameters[name].detach();
                let (rows, columns) = (w.size()[0] as f64, w.size()[1] as f64);
                let rate = self.matrix_rate * scale;
                let _ = w.g_mul_scalar_(1.0 - rate * WEIGHT_DECAY);
                let step = directions.get(i as i64) * (rate * (rows / columns).max(1.0).sqrt());
                let _ = w.g_sub_(&step);
            }
        }
        let bias = |beta: f64| 1.0 - beta.powi(self.steps);
        for (name, (m, v)) in &mut self.moments {
            let grad = parameters[name].grad();
            let _ = m.g_mul_scalar_(BETAS.0).g_add_(&(&grad * (1.0 - BETAS.0)));
            let _ = v.g_mul_scalar_(BETAS.1).g_add_(&(&grad * &grad * (1.0 - BETAS.1)));
            let mean = &*m / bias(BETAS.0);
            let spread = (&*v / bias(BETAS.1)).sqrt() + EPS;
            let mut w = parameters[name].detach();
            let _ = w.g_sub_(&(mean / spread * (self.vector_rate * scale)));
        }
        for tensor in parameters.values() {
            let mut grad = tensor.grad();
            let _ = grad.zero_();
        }
    }
}

/// The orthogonal factor of each matrix of `[N, rows, columns]`, by five quintic Newton-Schulz steps in bf16.
fn orthogonalise(g: &Tensor) -> Tensor {
    let (a, b, c) = (3.4445, -4.7750, 2.0315);
    let tall = g.size()[1] > g.size()[2];
    let mut x = g.to_kind(Kind::BFloat16);
    if tall {
        x = x.transpose(1, 2);
    }
    let norm = x
        .to_kind(Kind::Float)
        .square()
        .sum_dim_intlist([1i64, 2].as_slice(), true, Kind::Float)
        .sqrt();
    x = (x.to_kind(Kind::Float) / (norm + 1e-7)).to_kind(Kind::BFloat16);
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
    fn an_orthogonalised_matrix_has_singular_values_near_one() {
        tch::manual_seed(1);
        for shape in [[2, 48, 16], [2, 16, 48]] {
            let x = orthogonalise(&Tensor::randn(shape, (Kind::Float, tch::Device::Cpu)));
            let (_, s, _) = x.get(0).svd(true, true);
            let (low, high) = (s.min().double_value(&[]), s.max().double_value(&[]));
            assert!(low > 0.5 && high < 1.4, "singular values in [{low}, {high}]");
        }
    }
}
