//! From rewards to advantages: pure f64 arithmetic, no tensors, no database.
//!
//! Offline runs sample a group of rollouts per task and compare each with the group. Production has
//! one generation per prompt, so its rewards are compared with a running baseline per class of
//! request. A baseline is read before it sees the rewards it is compared with, so no sample moves
//! its own baseline.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Decay of the moving average: b ← 0.95 b + 0.05 R.
pub const EMA_DECAY: f64 = 0.95;

/// Average reward of one class of requests. A new class starts at 0.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Baseline {
    pub value: f64,
    /// Number of rewards in the average.
    pub weight: f64,
}

/// Baselines by class of request.
pub type Baselines = BTreeMap<String, Baseline>;

/// R − baseline of its class. An advantage does not depend on the other rewards of the cohort.
/// `classes` and `rewards` have equal lengths.
pub fn against_baseline(baselines: &Baselines, classes: &[&str], rewards: &[f64]) -> Vec<f64> {
    let value = |class: &str| baselines.get(class).copied().unwrap_or_default().value;
    let pairs = classes.iter().zip(rewards);
    pairs.map(|(&class, reward)| reward - value(class)).collect()
}

/// Updates the moving averages with a cohort's rewards, in the order given.
pub fn update_baselines(baselines: &mut Baselines, classes: &[&str], rewards: &[f64]) {
    for (&class, reward) in classes.iter().zip(rewards) {
        let baseline = baselines.entry(class.to_string()).or_default();
        baseline.value = EMA_DECAY * baseline.value + (1.0 - EMA_DECAY) * reward;
        baseline.weight += 1.0;
    }
}

/// GRPO (Shao et al. 2024): (R − mean) / (std + 1e-6) within a group, std with one degree of
/// freedom removed.
pub fn grpo(rewards: &[f64]) -> Vec<f64> {
    let mean = mean(rewards);
    let std = std(rewards);
    rewards.iter().map(|r| (r - mean) / (std + 1e-6)).collect()
}

/// Dr. GRPO (Liu et al. 2025): R − mean within a group. Dividing by std would favour very easy and
/// very hard tasks.
pub fn dr_grpo(rewards: &[f64]) -> Vec<f64> {
    let mean = mean(rewards);
    rewards.iter().map(|r| r - mean).collect()
}

/// RLOO (Ahmadian et al. 2024): (R − mean) · G / (G − 1), the reward minus the mean of the others.
/// A group of one gets 0.
pub fn rloo(rewards: &[f64]) -> Vec<f64> {
    let n = rewards.len() as f64;
    if rewards.len() < 2 {
        return vec![0.0; rewards.len()];
    }
    dr_grpo(rewards).iter().map(|a| a * n / (n - 1.0)).collect()
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
        update_baselines(&mut baselines, &["a"], &[0.75]);
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
        update_baselines(&mut baselines, &classes, &rewards);
        // 0.95 · 0.2 + 0.05 · 0.75 = 0.2275; 0.95 · 0.2275 − 0.05 · 0.25 = 0.203625
        close(&[baselines["a"].value, baselines["b"].value], &[0.203625, 0.0375]);
        close(&[baselines["a"].weight, baselines["b"].weight], &[11.0, 1.0]);
    }

    #[test]
    fn grpo_divides_by_the_standard_deviation_and_dr_grpo_does_not() {
        // mean 0.25, deviations 0.75, −0.25 ×3, variance (0.5625 + 3 · 0.0625) / 3 = 0.25, std 0.5
        let rewards = [1.0, 0.0, 0.0, 0.0];
        close(&dr_grpo(&rewards), &[0.75, -0.25, -0.25, -0.25]);
        let s = 0.5 + 1e-6;
        close(&grpo(&rewards), &[0.75 / s, -0.25 / s, -0.25 / s, -0.25 / s]);
    }

    #[test]
    fn rloo_subtracts_the_mean_of_the_others() {
        // others of the first: (0 + 0 + 0)/3 = 0; of the second: (1 + 0 + 0)/3
        let third = 1.0 / 3.0;
        close(&rloo(&[1.0, 0.0, 0.0, 0.0]), &[1.0, -third, -third, -third]);
        close(&rloo(&[1.0]), &[0.0]);
    }

    #[test]
    fn equal_rewards_have_no_variance() {
        assert!(has_no_variance(&[1.0, 1.0, 1.0]));
        assert!(has_no_variance(&[0.5]));
        assert!(!has_no_variance(&[1.0, 0.0]));
        close(&grpo(&[1.0, 1.0]), &[0.0, 0.0]);
    }
}
