//! The distribution to sample from: logits with bias and penalties become weights, and filters set
//! weights to zero.

use std::borrow::Cow;

use super::{Params, PreviousTokens, argmax};

/// The distribution of one token.
pub enum Probabilities<'a> {
    Greedy {
        z: Cow<'a, [f32]>,
        best: usize,
    },
    Weights {
        /// By id, not normalized. An id with weight 0 cannot be drawn.
        weights: Vec<f64>,
        /// Their sum, in the order of ids.
        total: f64,
    },
}

impl<'a> Probabilities<'a> {
    /// With `candidates`, keeps that many of the largest z instead of applying the filters of
    /// `params`.
    pub fn new(logits: &'a [f32], params: &Params, previous: &PreviousTokens, candidates: Option<u32>) -> Self {
        let z = adjusted(logits, params, previous);
        let best = argmax(&z);
        if params.temperature <= 0.0 {
            return Probabilities::Greedy { z, best };
        }
        let weights = match candidates {
            Some(n) => largest(&z, best, params.temperature, n as usize),
            None => weights(&z, best, params),
        };
        let total = weights.iter().sum();
        Probabilities::Weights { weights, total }
    }

    pub fn log_prob(&self, id: usize) -> f32 {
        match self {
            // with the bits that it has if it is drawn at temperature 1: the trainer compares them
            Probabilities::Greedy { z, best } => {
                let weights = weights(z, *best, &Params::default());
                libm::log(weights[id] / weights.iter().sum::<f64>()) as f32
            }
            Probabilities::Weights { weights, total } => libm::log(weights[id] / total) as f32,
        }
    }

    pub fn candidates(&self) -> u32 {
        match self {
            Probabilities::Greedy { .. } => 1,
            Probabilities::Weights { weights, .. } => weights.iter().filter(|&&weight| weight > 0.0).count() as u32,
        }
    }
}

/// The logits with bias and penalties. Borrowed if there are none.
fn adjusted<'a>(logits: &'a [f32], params: &Params, previous: &PreviousTokens) -> Cow<'a, [f32]> {
    if params.logit_bias.is_empty() && !params.has_penalties() {
        return logits.into();
    }
    let mut z = logits.to_vec();
    for (&id, &bias) in &params.logit_bias {
        if let Some(z) = z.get_mut(id as usize) {
            *z += bias;
        }
    }
    if params.has_penalties() {
        let repetition = params.repetition_penalty;
        for (&id, &sampled) in &previous.sampled {
            let Some(z) = z.get_mut(id as usize) else { continue };
            *z = if *z < 0.0 { *z * repetition } else { *z / repetition };
            if sampled > 0 {
                *z -= params.frequency_penalty * sampled as f32;
                *z -= params.presence_penalty;
            }
        }
    }
    z.into()
}

/// The effect of [`adjusted`] as a factor and a summand for every logit. The sign of the biased
/// logit decides whether the repetition penalty multiplies or divides.
pub fn affine(logits: &[f32], params: &Params, previous: &PreviousTokens) -> (Vec<f32>, Vec<f32>) {
    let (mut factors, mut summands) = (vec![1.0; logits.len()], vec![0.0; logits.len()]);
    for (&id, &bias) in &params.logit_bias {
        if let Some(summand) = summands.get_mut(id as usize) {
            *summand = bias;
        }
    }
    if params.has_penalties() {
        for (&id, &sampled) in &previous.sampled {
            let id = id as usize;
            let Some(&logit) = logits.get(id) else { continue };
            let factor = match logit + summands[id] < 0.0 {
                true => params.repetition_penalty,
                false => 1.0 / params.repetition_penalty,
            };
            factors[id] = factor;
            summands[id] *= factor;
            if sampled > 0 {
                summands[id] -= params.frequency_penalty * sampled as f32 + params.presence_penalty;
            }
        }
    }
    (factors, summands)
}

/// The weights of the `n` largest z. Other weights are 0.
fn largest(z: &[f32], best: usize, temperature: f32, n: usize) -> Vec<f64> {
    let (inverse, max) = (1.0 / f64::from(temperature), f64::from(z[best]));
    let mut weights = vec![0.0; z.len()];
    for id in Order::new(z.iter().copied().enumerate()).first(n) {
        weights[id] = exp((f64::from(z[id]) - max) * inverse);
    }
    weights
}

/// Weights after min-p, top-k and top-p. Min-p and top-k keep prefixes of the same order, so either
/// may come first. With top-k first, few weights are computed.
fn weights(z: &[f32], best: usize, params: &Params) -> Vec<f64> {
    let (inverse, max) = (1.0 / f64::from(params.temperature), f64::from(z[best]));
    let weight = |z: f32| exp((f64::from(z) - max) * inverse);
    let top_k = match params.top_k {
        0 => usize::MAX,
        k => k as usize,
    };
    let mut weights: Vec<f64> = match top_k < z.len() {
        true => largest(z, best, params.temperature, top_k),
        false => z.iter().map(|&z| weight(z)).collect(),
    };
    let least = f64::from(params.min_p);
    if least > 0.0 {
        for weight in &mut weights {
            *weight = if *weight < least { 0.0 } else { *weight };
        }
    }
    if params.top_p < 1.0 {
        let enough = f64::from(params.top_p) * weights.iter().sum::<f64>();
        let left = z.iter().copied().enumerate().filter(|&(id, _)| weights[id] > 0.0);
        let mut order = Order::new(left);
        let mut nucleus = vec![0.0; z.len()];
        let mut reached = 0.0;
        let mut next = 64;
        'reach: while !order.is_empty() {
            // Usually a few ids suffice, so they are sorted in growing batches.
            for id in order.take(next) {
                reached += weights[id];
                nucleus[id] = weights[id];
                if reached >= enough {
                    break 'reach;
                }
            }
            next *= 4;
        }
        weights = nucleus;
    }
    weights
}

/// Ids, ordered by z from large to small, and by id among equals.
pub struct Order {
    /// z and the id in one number, for fast comparisons. A larger z gives a smaller key.
    keys: Vec<u64>,
    taken: usize,
}

impl Order {
    pub fn new(ids: impl Iterator<Item = (usize, f32)>) -> Self {
        let key = |(id, z): (usize, f32)| {
            let bits = (z + 0.0).to_bits(); // −0 becomes 0
            let rising = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
            u64::from(!rising) << 32 | id as u64
        };
        Order {
            keys: ids.map(key).collect(),
            taken: 0,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.taken == self.keys.len()
    }

    /// The first `n` ids, in any order.
    pub fn first(&mut self, n: usize) -> impl Iterator<Item = usize> {
        if 0 < n && n < self.keys.len() {
            self.keys.select_nth_unstable(n - 1);
        }
        let n = n.min(self.keys.len());
        self.keys[..n].iter().map(|&key| key as u32 as usize)
    }

    /// The next `n` ids, in order.
    pub fn take(&mut self, n: usize) -> impl Iterator<Item = usize> {
        let rest = &mut self.keys[self.taken..];
        if 0 < n && n < rest.len() {
            rest.select_nth_unstable(n - 1);
        }
        let n = n.min(rest.len());
        rest[..n].sort_unstable();
        self.taken += n;
        rest[..n].iter().map(|&key| key as u32 as usize)
    }
}

/// eˣ for x ≤ 0, within 2 units in the last place; 0 below −708.
///
/// It uses only additions and multiplications that are never fused, without branches or tables.
/// Compilers can vectorize it, and it gives the same bits on every machine.
pub fn exp(x: f64) -> f64 {
    // x = k ln 2 + r with |r| ≤ ln 2 / 2. ln 2 has two parts; k times the first is exact.
    const LN_2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    // Adding it rounds to an integer, which ends up in the lowest bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let rounded = x * std::f64::consts::LOG2_E + ROUND;
    let k = rounded - ROUND;
    let r = x - k * LN_2_HIGH - k * LN_2_LOW;
    // 1 / n! for n = 12 down to 0; the series starts with 1 / 13!.
    const COEFFICIENTS: [f64; 13] = [
        2.087_675_698_786_81e-9,
        2.505_210_838_544_172e-8,
        2.755_731_922_398_589_4e-7,
        2.755_731_922_398_589e-6,
        2.480_158_730_158_73e-5,
        1.984_126_984_126_984e-4,
        1.388_888_888_888_889e-3,
        8.333_333_333_333_333e-3,
        4.166_666_666_666_666_4e-2,
        1.666_666_666_666_666_6e-1,
        0.5,
        1.0,
        1.0,
    ];
    let series = COEFFICIENTS
        .iter()
        .fold(1.605_904_383_682_161_5e-10, |sum, c| sum * r + c);
    // Adds k to the exponent.
    let value = f64::from_bits(series.to_bits().wrapping_add(rounded.to_bits() << 52));
    if x < -708.0 { 0.0 } else { value }
}

#[cfg(test)]
mod tests {
    use super::exp;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_exponential_is_exact_to_two_units(x in -708.0f64..=0.0) {
            let exact = libm::exp(x);
            prop_assert!((exp(x) - exact).abs() <= 2.0 * f64::EPSILON * exact, "{x}: {} {exact}", exp(x));
        }
    }

    #[test]
    fn the_ends_of_the_exponential() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(-1e-300), 1.0);
        assert_eq!(exp(-709.0), 0.0);
        assert_eq!(exp(f64::NEG_INFINITY), 0.0);
        assert!(exp(f64::NAN).is_nan());
    }
}
