//! From rewards to advantages: pure f64 arithmetic, no tensors, no database.
//!
//! Offline runs sample a group of rollouts per task and compare each with the group. Production has
//! one generation per prompt, so its rewards are compared with a running baseline per class of
//! request. A baseline is read before it sees the rewards it is compared with, so no sample moves
//! its own baseline.
//!
//! In production a trajectory may be an episode of several turns. [`Credit`] says what each turn is
//! credited with.

use crate::sample::Turn;
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

/// Baselines by class of request, and by turn (see [`Credit`]).
pub type Baselines = BTreeMap<String, Baseline>;

/// Between class and turn in the name of a baseline. No surface's name contains it.
const SEPARATOR: char = '\u{1f}';
/// Turns from this index on share a baseline.
const TURN_SHARED: usize = 16;

/// What each turn of an episode is credited with.
///
/// R is the reward of the episode, r_t the own reward of turn t, γ the discount, T the last turn; b is
/// a baseline, by class of request or by class and turn. All turns of the episode count in a sum,
/// also those that are not trained on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Credit {
    /// A_t = R − b(class). Own rewards do not count.
    #[default]
    Trajectory,
    /// A_t = G_t − b(class, t) with G_t = γ^(T−t) R + Σ_{k≥t} γ^(k−t) r_k, where r_k is 0 if turn k
    /// has none.
    ToGo,
    /// A_t = r_t − b(class, t). If turn t has no own reward, A_t = R − b(class).
    Turn,
}

/// What a generation is credited with, before its baseline is subtracted.
#[derive(Debug, Clone, PartialEq)]
pub struct Return {
    /// The baseline that it is compared with.
    pub baseline: String,
    pub value: f64,
}

impl Credit {
    /// What a generation of this class is credited with. `turn`: `None` if it is a trajectory of its
    /// own, which is credited with its reward.
    pub fn of(self, discount: f64, class: &str, reward: f64, turn: Option<&Turn>) -> Return {
        let shared = || Return {
            baseline: class.to_owned(),
            value: reward,
        };
        let Some(turn) = turn else { return shared() };
        let own = |value: f64| Return {
            baseline: format!("{class}{SEPARATOR}{}", turn.index.min(TURN_SHARED)),
            value,
        };
        match self {
            Credit::Trajectory => shared(),
            Credit::ToGo => own(reward_to_go(discount, reward, turn)),
            Credit::Turn => turn.reward().map_or_else(shared, own),
        }
    }

    /// Whether turns' own rewards count.
    pub fn reads_turns(self) -> bool {
        self != Credit::Trajectory
    }
}

/// G_t, computed from the end: G_T = R + r_T and G_t = r_t + γ G_{t+1}.
fn reward_to_go(discount: f64, reward: f64, turn: &Turn) -> f64 {
    let rewards = turn.rewards.iter().skip(turn.index);
    let mut from_the_end = rewards.rev().map(|reward| reward.unwrap_or(0.0));
    let last = reward + from_the_end.next().unwrap_or(0.0);
    from_the_end.fold(last, |to_go, reward| reward + discount * to_go)
}

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
    /// the learner adds gradients before the cohort is full. `classes`: the name of each reward's
    /// baseline.
    pub fn advantages<C: AsRef<str>>(self, baselines: &Baselines, classes: &[C], rewards: &[f64]) -> Vec<f64> {
        match self {
            BaselineKind::Ema => against_baseline(baselines, classes, rewards),
            BaselineKind::Zero => rewards.to_vec(),
        }
    }

    /// Updates the baselines with the rewards of a full cohort, in the order given.
    pub fn update<C: AsRef<str>>(self, baselines: &mut Baselines, classes: &[C], rewards: &[f64]) {
        match self {
            BaselineKind::Ema => update_moving_averages(baselines, classes, rewards),
            BaselineKind::Zero => {}
        }
    }
}

/// R − b, with the baseline b of its class.
fn against_baseline<C: AsRef<str>>(baselines: &Baselines, classes: &[C], rewards: &[f64]) -> Vec<f64> {
    let value = |class: &C| baselines.get(class.as_ref()).copied().unwrap_or_default().value;
    let pairs = classes.iter().zip(rewards);
    pairs.map(|(class, reward)| reward - value(class)).collect()
}

/// b ← 0.95 b + 0.05 R, for each reward in turn.
fn update_moving_averages<C: AsRef<str>>(baselines: &mut Baselines, classes: &[C], rewards: &[f64]) {
    for (class, reward) in classes.iter().zip(rewards) {
        let baseline = baselines.entry(class.as_ref().to_owned()).or_default();
        baseline.value = EMA_DECAY * baseline.value + (1.0 - EMA_DECAY) * reward;
        baseline.weight += 1.0;
    }
}

/// How the rewards of a group, rollouts of the same task, become advantages. R is a rollout's reward,
/// G the size of the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupAdvantage {
    /// A = R − mean. Dr. GRPO (Liu et al. 2025).
    #[default]
    DrGrpo,
    /// A = (R − mean) / (std + 1e-6), std with one degree of freedom removed. GRPO (Shao et al. 2024),
    /// as verl's `compute_grpo_outcome_advantage`. It favors very easy and very hard tasks.
    Grpo,
    /// A = R − mean of the other rollouts = (R − mean) · G / (G − 1). RLOO (Ahmadian et al. 2024).
    Rloo,
    /// A = Σ_k w_k (R_k − mean_k) / (std_k + 1e-6) over the rewards of several graders, each compared
    /// with its own group, and then (A − mean) / (std + 1e-6) over all rollouts of the step. GDPO (Liu et
    /// al. 2026, arXiv 2601.05242).
    Gdpo,
}

/// Added to a standard deviation before a division by it.
const EPSILON: f64 = 1e-6;

impl GroupAdvantage {
    /// The advantages of one group, in the order of its rewards. All are 0 if its rewards are equal.
    pub fn of(self, rewards: &[f64]) -> Vec<f64> {
        if has_no_variance(rewards) {
            return vec![0.0; rewards.len()]; // their mean may be rounded to another number
        }
        let mean = mean(rewards);
        let scale = match self {
            GroupAdvantage::DrGrpo => 1.0,
            GroupAdvantage::Grpo | GroupAdvantage::Gdpo => 1.0 / (std(rewards) + EPSILON),
            GroupAdvantage::Rloo => rewards.len() as f64 / (rewards.len() - 1) as f64,
        };
        rewards.iter().map(|reward| (reward - mean) * scale).collect()
    }

    /// The advantages of one group whose rollouts have several rewards each: the weighted sum of the
    /// advantages of each reward. `rewards`: by rollout, as many as there are `weights`.
    pub fn of_several(self, rewards: &[Vec<f64>], weights: &[f64]) -> Vec<f64> {
        let mut sums = vec![0.0; rewards.len()];
        for (k, weight) in weights.iter().enumerate() {
            let column: Vec<f64> = rewards
                .iter()
                .filter_map(|of_rollout| of_rollout.get(k).copied())
                .collect();
            for (sum, advantage) in sums.iter_mut().zip(self.of(&column)) {
                *sum += weight * advantage;
            }
        }
        sums
    }

    /// The advantages that a step uses: those of the rollouts of all of its groups, together.
    pub fn of_step(self, mut advantages: Vec<f64>) -> Vec<f64> {
        if self == GroupAdvantage::Gdpo {
            let (mean, scale) = (mean(&advantages), 1.0 / (std(&advantages) + EPSILON));
            for advantage in &mut advantages {
                *advantage = (*advantage - mean) * scale;
            }
        }
        advantages
    }
}

/// What an answer that is nearly as long as it may be loses: 0 up to `from` tokens, then linear, −1 at
/// `max` tokens and beyond. Soft overlong punishment, equation 13 of DAPO (Yu et al. 2025, arXiv
/// 2503.14476) with L_max = `max` and L_cache = `max` − `from`. `from` is below `max`.
pub fn overlong_penalty(tokens: u32, from: u32, max: u32) -> f64 {
    if tokens <= from {
        return 0.0;
    }
    let (beyond, cache) = (f64::from(tokens - from), f64::from(max.saturating_sub(from).max(1)));
    -(beyond / cache).min(1.0)
}

/// All rewards of the group are equal, so every advantage is 0.
fn has_no_variance(rewards: &[f64]) -> bool {
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
    mod guilty;

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

    /// What the turns of an episode with reward 1 are credited with.
    fn credited(credit: Credit, discount: f64, rewards: &[Option<f64>]) -> (Vec<f64>, Vec<String>) {
        let turns = (0..rewards.len()).map(|index| Turn {
            episode: uuid::Uuid::nil(),
            index,
            rewards: rewards.into(),
        });
        let returns = turns.map(|turn| credit.of(discount, "chat", 1.0, Some(&turn)));
        returns.map(|one| (one.value, one.baseline)).unzip()
    }

    #[test]
    fn every_turn_gets_the_reward_of_its_trajectory() {
        let (values, baselines) = credited(Credit::Trajectory, 0.5, &[None, Some(-1.0), Some(0.5)]);
        close(&values, &[1.0; 3]);
        assert_eq!(baselines, ["chat"; 3]);
    }

    #[test]
    fn rewards_to_go_are_discounted_by_the_distance() {
        // 1 + 0.25 = 1.25; −1 + 0.5 · 1.25 = −0.375; 0 + 0.5 · −0.375 = −0.1875
        let (values, baselines) = credited(Credit::ToGo, 0.5, &[None, Some(-1.0), Some(0.25)]);
        close(&values, &[-0.1875, -0.375, 1.25]);
        assert_eq!(baselines, ["chat\u{1f}0", "chat\u{1f}1", "chat\u{1f}2"]);
        let (values, _) = credited(Credit::ToGo, 1.0, &[None, Some(-1.0), Some(0.25)]);
        close(&values, &[0.25, 0.25, 1.25]);
        // γ² · 1, γ · 1, 1
        let (values, _) = credited(Credit::ToGo, 0.9, &[None; 3]);
        close(&values, &[0.81, 0.9, 1.0]);
        let (values, _) = credited(Credit::ToGo, 0.0, &[None, Some(0.5), None]);
        close(&values, &[0.0, 0.5, 1.0]);
    }

    #[test]
    fn a_turn_with_a_reward_of_its_own_gets_that_and_the_others_the_trajectorys() {
        let (values, baselines) = credited(Credit::Turn, 0.5, &[None, Some(-1.0), Some(0.25)]);
        close(&values, &[1.0, -1.0, 0.25]);
        assert_eq!(baselines, ["chat", "chat\u{1f}1", "chat\u{1f}2"]);
    }

    #[test]
    fn late_turns_share_a_baseline_and_a_single_generation_has_that_of_its_class() {
        let (values, baselines) = credited(Credit::ToGo, 1.0, &[Some(0.0); 19]);
        close(&values, &[1.0; 19]);
        assert_eq!(
            baselines[15..],
            ["chat\u{1f}15", "chat\u{1f}16", "chat\u{1f}16", "chat\u{1f}16"]
        );
        for credit in [Credit::Trajectory, Credit::ToGo, Credit::Turn] {
            let single = credit.of(0.5, "chat", -0.25, None);
            assert_eq!((single.value, single.baseline.as_str()), (-0.25, "chat"));
        }
    }

    #[test]
    fn a_group_is_compared_with_its_mean() {
        let rewards = [1.0, 0.0, 0.0, 0.0];
        close(&GroupAdvantage::DrGrpo.of(&rewards), &[0.75, -0.25, -0.25, -0.25]);
        // mean 1/4, variance (9/16 + 3 · 1/16) / 3 = 1/4
        let scale = 1.0 / (0.5 + 1e-6);
        let by_std = [0.75 * scale, -0.25 * scale, -0.25 * scale, -0.25 * scale];
        close(&GroupAdvantage::Grpo.of(&rewards), &by_std);
        // 1 − 0, and 0 − 1/3 three times
        close(
            &GroupAdvantage::Rloo.of(&rewards),
            &[1.0, -1.0 / 3.0, -1.0 / 3.0, -1.0 / 3.0],
        );
        for advantage in [GroupAdvantage::DrGrpo, GroupAdvantage::Grpo, GroupAdvantage::Rloo] {
            close(&advantage.of(&[0.5]), &[0.0]);
            close(&advantage.of(&[1.0, 1.0]), &[0.0, 0.0]);
            assert_eq!(advantage.of(&[0.1; 3]), [0.0; 3], "whatever their mean is rounded to");
        }
    }

    #[test]
    fn gdpo_normalizes_each_reward_in_its_group_and_the_sum_over_the_step() {
        // Rewards (1, 0), (0, 1), (0, 0) have the sums 1, 1, 0, so GRPO takes the first two as equal.
        // mean 1/3, variance ((2/3)² + 2 (1/3)²) / 2 = 1/3: (2, −1, −1) / √3
        let rewards = [vec![1.0, 0.0], vec![0.0, 1.0], vec![0.0, 0.0]];
        let unit = 1.0 / (3.0 * (3.0_f64.sqrt().recip() + 1e-6));
        let sums = GroupAdvantage::Gdpo.of_several(&rewards, &[3.0, 1.0]);
        // 3 · (2, −1, −1) + (−1, 2, −1) = (5, −1, −4)
        close(&sums, &[5.0 * unit, -unit, -4.0 * unit]);
        // a reward that does not differ adds nothing, however often it is weighted
        let constant = [vec![0.1, 0.0], vec![0.1, 1.0], vec![0.1, 0.0]];
        close(
            &GroupAdvantage::Gdpo.of_several(&constant, &[100.0, 1.0]),
            &[-unit, 2.0 * unit, -unit],
        );
        // mean 0, variance (25 + 1 + 16 + 4 · 1) · u² / 6 over the step of this group and another one
        let step = [&sums[..], &[unit, -unit, unit, -unit]].concat();
        let scale = 1.0 / ((46.0_f64 / 6.0).sqrt() * unit + 1e-6);
        let expected: Vec<f64> = step.iter().map(|advantage| advantage * scale).collect();
        close(&GroupAdvantage::Gdpo.of_step(step.clone()), &expected);
        close(&GroupAdvantage::Grpo.of_step(step.clone()), &step);
    }

    #[test]
    fn a_weighted_sum_of_rewards_is_one_reward_to_the_others() {
        let rewards = [vec![1.0, 0.0], vec![0.0, 1.0], vec![0.0, 0.0]];
        let summed = GroupAdvantage::DrGrpo.of(&[3.0, 1.0, 0.0]);
        close(&GroupAdvantage::DrGrpo.of_several(&rewards, &[3.0, 1.0]), &summed);
    }

    #[test]
    fn the_penalty_of_long_answers_is_linear_between_its_bounds() {
        let penalties = [0, 75, 76, 80, 90, 100, 101].map(|tokens| overlong_penalty(tokens, 75, 100));
        close(&penalties, &[0.0, 0.0, -0.04, -0.2, -0.6, -1.0, -1.0]);
    }

    #[test]
    fn equal_rewards_have_no_variance() {
        assert!(has_no_variance(&[1.0, 1.0, 1.0]));
        assert!(has_no_variance(&[0.5]));
        assert!(!has_no_variance(&[1.0, 0.0]));
    }
}
