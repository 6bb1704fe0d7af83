//! Policy-gradient losses: pure functions from tensors to tensors, minimised.
//!
//! All arguments are one-dimensional f32 tensors over the trained tokens: `logp` = log π with its gradient; `behaviour` =
//! log μ as logged; `proximal` = log π at the start of the step; `advantage` broadcast to tokens. Log-ratios are clamped
//! to ±20 and weights carry no gradient. Nothing here knows of batches, networks or optimisers.

use crate::settings::Loss;
use tch::Tensor;

/// Log-ratios beyond this are cut before they are exponentiated, nats.
const LOG_RATIO_MAX: f64 = 20.0;

/// A loss per token, and which tokens it cut (1.0) or left alone (0.0).
#[derive(Debug)]
pub struct Terms {
    pub per_token: Tensor,
    pub clipped: Tensor,
}

impl Loss {
    /// The loss of each trained token, before aggregation. All tensors have the same length.
    pub fn terms(&self, logp: &Tensor, behaviour: &Tensor, proximal: &Tensor, advantage: &Tensor) -> Terms {
        match *self {
            Loss::ReinforceIs { cap } => reinforce_is(logp, behaviour, advantage, cap),
            Loss::PpoClip { low, high, dual } => ppo_clip(logp, proximal, advantage, low, high, dual),
        }
    }
}

/// −sg(min(ρ, cap)) · A · log π, ρ = exp(log π − log μ).
pub fn reinforce_is(logp: &Tensor, behaviour: &Tensor, advantage: &Tensor, cap: f64) -> Terms {
    let rho = ratio(&logp.detach(), behaviour);
    Terms {
        per_token: -(rho.clamp_max(cap) * advantage) * logp,
        clipped: rho.gt(cap).to_kind(tch::Kind::Float),
    }
}

/// max(−A r, −A clip(r, 1−low, 1+high)), r = exp(log π − log π_p); where A < 0, at most −A · dual.
pub fn ppo_clip(logp: &Tensor, proximal: &Tensor, advantage: &Tensor, low: f64, high: f64, dual: f64) -> Terms {
    let r = ratio(logp, proximal);
    let free = -(advantage * &r);
    let cut = -(advantage * r.clamp(1.0 - low, 1.0 + high));
    let upper = free.maximum(&cut);
    let bounded = upper.minimum(&(-(advantage * dual)));
    Terms {
        per_token: bounded.where_self(&advantage.lt(0.0), &upper),
        clipped: cut.gt_tensor(&free).to_kind(tch::Kind::Float),
    }
}

fn ratio(logp: &Tensor, reference: &Tensor) -> Tensor {
    (logp - reference).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    fn leaf(values: &[f64]) -> Tensor {
        Tensor::from_slice(values).to_kind(Kind::Float).set_requires_grad(true)
    }
    fn logs(p: &[f64]) -> Vec<f64> {
        p.iter().map(|p| p.ln()).collect()
    }
    fn constant(values: &[f64]) -> Tensor {
        Tensor::from_slice(values).to_kind(Kind::Float)
    }
    fn close(tensor: &Tensor, want: &[f64]) {
        let got = Vec::<f32>::try_from(&tensor.detach()).unwrap();
        assert_eq!(got.len(), want.len());
        for (g, w) in got.iter().zip(want) {
            assert!((f64::from(*g) - w).abs() < 1e-5, "{got:?} against {want:?}");
        }
    }

    #[test]
    fn reinforce_is_weights_by_the_truncated_ratio() {
        // π/μ = 5 → cut to 2; 0.5 stays; 1 stays
        let logp = leaf(&logs(&[0.5, 0.2, 0.3]));
        let behaviour = constant(&logs(&[0.1, 0.4, 0.3]));
        let advantage = constant(&[0.75, -0.25, 0.0]);
        let terms = reinforce_is(&logp, &behaviour, &advantage, 2.0);
        close(
            &terms.per_token,
            &[-2.0 * 0.75 * 0.5f64.ln(), 0.5 * 0.25 * 0.2f64.ln(), 0.0],
        );
        close(&terms.clipped, &[1.0, 0.0, 0.0]);
        terms.per_token.sum(Kind::Float).backward();
        close(&logp.grad(), &[-1.5, 0.125, 0.0]); // −min(ρ, 2) A: no gradient through the weight
    }

    #[test]
    fn ppo_clip_cuts_what_has_moved_far_enough() {
        // ratios 1.5, 1.1, 0.5, 5 with advantages 1, 1, −1, −1
        let logp = leaf(&logs(&[0.3, 0.22, 0.1, 0.5]));
        let proximal = constant(&logs(&[0.2, 0.2, 0.2, 0.1]));
        let advantage = constant(&[1.0, 1.0, -1.0, -1.0]);
        let terms = ppo_clip(&logp, &proximal, &advantage, 0.2, 0.2, 3.0);
        // −1.2 (cut), −1.1 (free), 0.8 (cut), 3 (dual clip of 5)
        close(&terms.per_token, &[-1.2, -1.1, 0.8, 3.0]);
        close(&terms.clipped, &[1.0, 0.0, 1.0, 0.0]);
        terms.per_token.sum(Kind::Float).backward();
        close(&logp.grad(), &[0.0, -1.1, 0.0, 0.0]);
    }

    #[test]
    fn wild_log_ratios_stay_finite() {
        let logp = leaf(&[0.0, -200.0]);
        let behaviour = constant(&[-200.0, 0.0]);
        let terms = reinforce_is(&logp, &behaviour, &constant(&[1.0, 1.0]), 2.0);
        assert!(terms.per_token.isfinite().all().int64_value(&[]) == 1);
    }
}
