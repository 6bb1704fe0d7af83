//! Losses of preferences: DPO of pairs, KTO of single trajectories.
//!
//! Both are functions of Δ = log π − log π_ref, where each log-probability is the sum over the trained
//! tokens of a whole trajectory, in nats, in the model's own distribution. π are the weights being
//! trained and π_ref those of the run's base version. The trainer computes both with the forward pass
//! that serves; what the sampler logged is not used.
//!
//! They return the loss with its derivative by each log π. A step makes one update, so π is the head
//! while a cohort is added up. A trajectory's gradient is therefore exactly ∂L/∂log π · ∇ Σ log π, and
//! the learner adds it as [`Loss::CrossEntropy`](runs::settings::Loss::CrossEntropy) with the
//! advantage −∂L/∂log π: token by token and in micro-batches of any size.

use serde::Serialize;

/// What a trajectory's trained tokens have together, nats.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct LogProbs {
    pub policy: f64,
    pub reference: f64,
}

impl LogProbs {
    /// Δ: how much more likely the policy is to say it than the reference, nats.
    pub fn log_ratio(&self) -> f64 {
        self.policy - self.reference
    }

    /// Adds a turn of the same trajectory.
    pub fn add(&mut self, turn: LogProbs) {
        self.policy += turn.policy;
        self.reference += turn.reference;
    }
}

/// The loss of a pair.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair {
    pub loss: f64,
    /// ∂loss/∂log π of the chosen and of the rejected trajectory.
    pub gradient: [f64; 2],
}

/// The loss of one trajectory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Single {
    pub loss: f64,
    /// ∂loss/∂log π.
    pub gradient: f64,
}

/// −log σ(β(Δ_chosen − Δ_rejected)).
///
/// Rafailov et al. 2023, "Direct preference optimization", equation 7. TRL's `loss_type="sigmoid"`.
pub fn dpo(chosen: LogProbs, rejected: LogProbs, beta: f64) -> Pair {
    let margin = beta * (chosen.log_ratio() - rejected.log_ratio());
    let slope = beta * sigmoid(-margin);
    Pair {
        loss: softplus(-margin),
        gradient: [-slope, slope],
    }
}

/// λ(1 − σ(β(Δ − z₀))) of a desirable trajectory, λ(1 − σ(β(z₀ − Δ))) of an undesirable one.
/// `weight` is λ, `reference_point` z₀.
///
/// Ethayarajh et al. 2024, "KTO: model alignment as prospect theoretic optimization", equations 7 and 8.
/// No gradient goes through z₀. TRL's `loss_type="kto"`.
pub fn kto(of: LogProbs, desirable: bool, reference_point: f64, beta: f64, weight: f64) -> Single {
    let sign = if desirable { 1.0 } else { -1.0 };
    let value = sigmoid(sign * beta * (of.log_ratio() - reference_point));
    Single {
        loss: weight * (1.0 - value),
        gradient: -sign * weight * beta * value * (1.0 - value),
    }
}

/// z₀ = max(0, mean Δ): an estimate of KL(π‖π_ref) from answers to other prompts than they are paired
/// with. 0 without any.
pub fn kto_reference_point(mismatched: &[LogProbs]) -> f64 {
    let sum: f64 = mismatched.iter().map(LogProbs::log_ratio).sum();
    (sum / mismatched.len().max(1) as f64).max(0.0)
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// log(1 + eˣ), also of large x.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(policy: f64, reference: f64) -> LogProbs {
        LogProbs { policy, reference }
    }

    fn close(got: f64, want: f64) {
        assert!((got - want).abs() < 1e-9, "{got} against {want}");
    }

    #[test]
    fn dpo_is_the_log_of_two_where_the_policy_is_the_reference() {
        let pair = dpo(of(-3.0, -3.0), of(-7.0, -7.0), 0.1);
        close(pair.loss, std::f64::consts::LN_2);
        assert_eq!(pair.gradient, [-0.05, 0.05]);
    }

    #[test]
    fn dpo_pulls_less_where_the_pair_is_right_already() {
        // β(Δ_w − Δ_l) = 0.5 · (2 − (−2)) = ln(e²)
        let pair = dpo(of(-1.0, -3.0), of(-6.0, -4.0), 0.5);
        close(pair.loss, (1.0 + (-2.0f64).exp()).ln());
        let slope = 0.5 / (1.0 + 2.0f64.exp());
        close(pair.gradient[0], -slope);
        close(pair.gradient[1], slope);
    }

    #[test]
    fn dpo_stays_finite_far_from_the_reference() {
        let wrong = dpo(of(-5000.0, 0.0), of(0.0, -5000.0), 1.0);
        assert_eq!((wrong.loss, wrong.gradient), (10_000.0, [-1.0, 1.0]));
        let right = dpo(of(0.0, -5000.0), of(-5000.0, 0.0), 1.0);
        assert_eq!((right.loss, right.gradient), (0.0, [0.0, 0.0]));
    }

    #[test]
    fn kto_values_gains_and_losses_from_its_reference_point() {
        // β(Δ − z₀) = 0.5 · (3 − 1) = 1
        let value = 1.0 / (1.0 + (-1.0f64).exp());
        let good = kto(of(-2.0, -5.0), true, 1.0, 0.5, 1.0);
        close(good.loss, 1.0 - value);
        close(good.gradient, -0.5 * value * (1.0 - value));
        // the same distance, but undesirable: σ(−1), and a weight of 2
        let bad = kto(of(-2.0, -5.0), false, 1.0, 0.5, 2.0);
        close(bad.loss, 2.0 * value);
        close(bad.gradient, value * (1.0 - value));
    }

    #[test]
    fn the_reference_point_is_a_mean_that_is_not_negative() {
        close(kto_reference_point(&[of(-1.0, -2.0), of(-1.0, -3.0)]), 1.5);
        assert_eq!(kto_reference_point(&[of(-2.0, -1.0), of(-3.0, -1.0)]), 0.0);
        assert_eq!(kto_reference_point(&[]), 0.0);
    }

    #[test]
    fn turns_of_a_trajectory_add_up() {
        let mut sum = of(-1.0, -2.0);
        sum.add(of(-0.5, -0.25));
        assert_eq!(sum, of(-1.5, -2.25));
    }
}
