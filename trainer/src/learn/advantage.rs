//! From rewards to advantages: pure f64 arithmetic, no tensors, no database.
//!
//! Offline runs sample a group of rollouts per task and compare each with the group. Production has
//! one generation per prompt, so its rewards are compared with a running baseline per class of
//! request. A baseline is read before it sees the rewards it is compared with, so no sample moves
//! its own baseline.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Decay of the moving average: b ← 0.95 b + 0.05 R.
const EMA_DECAY: f64 = 0.95;

/// Average reward of one class of requests. A new class starts at 0.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Baseline {
    pub value: f64,
    /// Number of rewards in the average.
    pub weight: f64,
}

/// Baselines by class of request.
pub type Baselines = BTreeMap<String, Baseline>;

/// What rewards of production are compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BaselineKind {
    /// The moving average of its class before the step.
    Ema,
    /// Nothing: the advantage is the reward.
    Zero,
}

impl BaselineKind {
    /// The advantages of production's rewards. None of them depends on the other rewards, because
    /// the learner adds gradients before the cohort is full. `classes` and `rewards` have equal
    /// lengths.
    pub fn advantages(self, baselines: &Baselines, classes: &[&str], rewards: &[f64]) -> Vec<f64> {
        match self {
            BaselineKind::Ema => against_baseline(baselines, classes, rewards),
            BaselineKind::Zero => rewards.to_vec(),
        }
    }

    /// Updates the baselines with the rewards of a full cohort, in the order given.
    pub fn update(self, baselines: &mut Baselines, classes: &[&str], rewards: &[f64]) {
        match self {
            BaselineKind::Ema => update_moving_averages(baselines, classes, rewards),
            BaselineKind::Zero => {}
        }
    }
}

/// R − b, with the baseline b of its class.
fn against_baseline(baselines: &Baselines, classes: &[&str], rewards: &[f64]) -> Vec<f64> {
    let value = |class: &str| baselines.get(class).copied().unwrap_or_default().value;
    let pairs = classes.iter().zip(rewards);
    pairs.map(|(&class, reward)| reward - value(class)).collect()
}

/// b ← 0.95 b + 0.05 R, for each reward in turn.
fn update_moving_averages(baselines: &mut Baselines, classes: &[&str], rewards: &[f64]) {
    for (&class, reward) in classes.iter().zip(rewards) {
        let baseline = baselines.entry(class.to_string()).or_default();
        baseline.value = EMA_DECAY * baseline.value + (1.0 - EMA_DECAY) * reward;
        baseline.weight += 1.0;
    }
}

/// Dr. GRPO (Liu et al. 2025): R − mean within a group. GRPO (Shao et al. 2024) also divides by the
/// standard deviation, which favors very easy and very hard tasks.
pub fn dr_grpo(rewards: &[f64]) -> Vec<f64> {
    let mean = mean(rewards);
    rewards.iter().map(|r| r - mean).collect()
}

/// All rewards of the group are equal, so every advantage is 0.
pub fn has_no_variance(rewards: &[f64]) -> bool {
    rewards.windows(2).all(|pair| pair[0] == pair[1])
}

/// Arithmetic mean; 0 of nothing.
pub fn mean(values: &[f64]) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    values.iter().sum::<f64>() / values.len() as f64
}

/// Standard deviation with one degree of freedom removed; 0 for fewer than two values.
pub fn std(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let mean = mean(values);
    let square: f64 = values.iter().map(|v| (v - mean) * (v - mean)).sum();
    (square / (values.len() - 1) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(got: &[f64], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (g, w) in got.iter().zip(want) {
            assert!((g - w).abs() < 1e-9, "{g} against {w}");
        }
    }

    #[test]
    fn a_new_class_is_compared_with_zero() {
        let mut baselines = Baselines::new();
        close(&against_baseline(&baselines, &["a"], &[0.75]), &[0.75]);
        update_moving_averages(&mut baselines, &["a"], &[0.75]);
        close(&[baselines["a"].value, baselines["a"].weight], &[0.0375, 1.0]);
    }

    #[test]
    fn a_cohort_is_compared_with_the_baseline_before_it_and_then_updates_it() {
        let mut baselines = Baselines::from([(
            "a".into(),
            Baseline {
                value: 0.2,
                weight: 9.0,
            },
        )]);
        let (classes, rewards) = (["a", "a", "b"], [0.75, -0.25, 0.75]);
        close(&against_baseline(&baselines, &classes, &rewards), &[0.55, -0.45, 0.75]);
        update_moving_averages(&mut baselines, &classes, &rewards);
        // 0.95 · 0.2 + 0.05 · 0.75 = 0.2275; 0.95 · 0.2275 − 0.05 · 0.25 = 0.203625
        close(&[baselines["a"].value, baselines["b"].value], &[0.203625, 0.0375]);
        close(&[baselines["a"].weight, baselines["b"].weight], &[11.0, 1.0]);
    }

    #[test]
    fn dr_grpo_subtracts_the_mean_of_the_group() {
        close(&dr_grpo(&[1.0, 0.0, 0.0, 0.0]), &[0.75, -0.25, -0.25, -0.25]);
    }

    #[test]
    fn equal_rewards_have_no_variance() {
        assert!(has_no_variance(&[1.0, 1.0, 1.0]));
        assert!(has_no_variance(&[0.5]));
        assert!(!has_no_variance(&[1.0, 0.0]));
        close(&dr_grpo(&[1.0, 1.0]), &[0.0, 0.0]);
    }
}
