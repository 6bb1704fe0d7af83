//! A version at pauses of users on whom nothing was trained: how often it is right, and what each way
//! of serving it would earn.

use std::fmt;

use artifact::checkpoint::Checkpoint;
use report::Interval;
use serde::Serialize;

use super::{Policy, Thresholds, Trial, draw, try_out};
use crate::{
    developer::FilePart,
    stats::{self, ArmStats, Measure, Observation, Reaction},
};

/// A version's suggestions at some pauses.
pub struct Tried {
    pub(super) trials: Vec<Trial>,
    pub(super) tau: f64,
}

/// What each way of serving a version earns per pause.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Ways {
    /// Of 100 pauses, those at which the greedy text is what was typed, declining not allowed.
    pub right_per_100: f64,
    pub sampled: f64,
    pub greedy: f64,
    /// The threshold is chosen on the other half of the users.
    pub sampled_above_threshold: f64,
    pub greedy_above_threshold: f64,
    /// Shares of the pauses at which something is shown.
    pub shown_sampled: f64,
    pub shown_greedy: f64,
}

/// One version minus another, paired by pause, with intervals clustered by user.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Differences {
    pub right_per_100: Option<Interval>,
    pub sampled: Option<Interval>,
    pub greedy: Option<Interval>,
    pub greedy_above_threshold: Option<Interval>,
    /// Greedy, minus the other one greedy above its threshold.
    pub greedy_minus_base_above_threshold: Option<Interval>,
}

impl Tried {
    /// At `count` pauses of `users`, who are numbered from `first`.
    pub fn at_pauses_of(
        checkpoint: &Checkpoint,
        (users, first): (&[Vec<FilePart>], usize),
        count: usize,
        temperature: f32,
        seed: u64,
        tau: f64,
    ) -> anyhow::Result<Self> {
        let pauses = draw(users, first, seed, count);
        let trials = try_out(checkpoint, &pauses, temperature, seed)?;
        Ok(Self { trials, tau })
    }

    /// The same, if greedy texts whose probability is below `probability_min` are not shown.
    pub fn served_above(mut self, probability_min: f64) -> Self {
        let bound = probability_min.ln();
        for Trial { greedy, .. } in &mut self.trials {
            greedy.declined |= greedy.log_prob < bound;
        }
        self
    }

    /// What users would have got at each pause. Thresholds for users with even numbers are chosen on the
    /// others, and the other way round.
    pub(super) fn observations(&self, policy: Policy) -> Vec<Observation> {
        let half = |parity: usize| -> Vec<Trial> {
            let of = self.trials.iter().filter(|trial| trial.user % 2 == parity);
            of.cloned().collect()
        };
        let thresholds = [1, 0].map(|other| Thresholds::choose(&half(other), self.tau));
        let observe = |trial: &Trial| policy.observe(trial, thresholds[trial.user % 2]);
        self.trials.iter().map(observe).collect()
    }

    pub fn ways(&self) -> Ways {
        let stats = |policy| ArmStats::of(self.observations(policy), self.tau);
        let reward = |policy| stats(policy).reward_mean.unwrap_or_default();
        let shown = |policy| stats(policy).show_rate.unwrap_or_default();
        let right = self
            .trials
            .iter()
            .filter(|trial| trial.greedy.reaction == Reaction::Right);
        Ways {
            right_per_100: 100.0 * right.count() as f64 / self.trials.len().max(1) as f64,
            sampled: reward(Policy::Sampled),
            greedy: reward(Policy::Greedy),
            sampled_above_threshold: reward(Policy::SampledAboveThreshold),
            greedy_above_threshold: reward(Policy::GreedyAboveThreshold),
            shown_sampled: shown(Policy::Sampled),
            shown_greedy: shown(Policy::Greedy),
        }
    }

    /// This version minus another one at the same pauses.
    pub fn minus(&self, other: &Tried) -> Differences {
        let rewards = |own: Policy, others: Policy| {
            let pairs = self.observations(own).into_iter().zip(other.observations(others));
            let answered = pairs.filter(|(own, _)| own.answers);
            stats::paired_difference(answered, Measure::Reward, self.tau)
        };
        let both = |policy| rewards(policy, policy);
        let oracles = self
            .observations(Policy::Oracle)
            .into_iter()
            .zip(other.observations(Policy::Oracle));
        Differences {
            right_per_100: stats::paired_difference(oracles, Measure::Accepts, self.tau),
            sampled: both(Policy::Sampled),
            greedy: both(Policy::Greedy),
            greedy_above_threshold: both(Policy::GreedyAboveThreshold),
            greedy_minus_base_above_threshold: rewards(Policy::Greedy, Policy::GreedyAboveThreshold),
        }
    }
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ways = self.ways();
        write!(
            f,
            "right at {:.1} of 100 pauses; reward sampled {:.3} (shown {:.0}%), greedy {:.3} (shown {:.0}%), sampled above a \
             threshold {:.3}, greedy above a threshold {:.3}",
            ways.right_per_100,
            ways.sampled,
            100.0 * ways.shown_sampled,
            ways.greedy,
            100.0 * ways.shown_greedy,
            ways.sampled_above_threshold,
            ways.greedy_above_threshold,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::Judged;
    use super::*;

    fn trial(user: usize, right: bool, log_prob: f64) -> Trial {
        let reaction = if right { Reaction::Right } else { Reaction::Wrong };
        let judged = Judged {
            reaction,
            declined: false,
            log_prob,
        };
        Trial {
            user,
            answers: true,
            sampled: judged,
            greedy: judged,
        }
    }

    #[test]
    fn a_threshold_is_chosen_on_the_other_half_of_the_users() {
        // users with even numbers are right from -1 on, those with odd ones never
        let trials = vec![
            trial(2, true, -1.0),
            trial(2, false, -2.0),
            trial(3, false, -0.5),
            trial(3, false, -1.5),
        ];
        let tried = Tried { trials, tau: 0.25 };
        let ways = tried.ways();
        assert_eq!(ways.right_per_100, 25.0);
        // chosen on user 3: show nothing to user 2; chosen on user 2: user 3 sees what is above -1
        assert_eq!(ways.greedy_above_threshold, -0.25 / 4.0);
        assert_eq!(ways.greedy, (0.75 - 3.0 * 0.25) / 4.0);
    }

    #[test]
    fn versions_are_compared_pause_by_pause() {
        let version = |right: [bool; 4]| {
            let trials = right.into_iter().enumerate();
            let trials = trials.map(|(nth, right)| trial(nth / 2, right, -1.0));
            Tried {
                trials: trials.collect(),
                tau: 0.25,
            }
        };
        let (base, better) = (version([true, false, false, false]), version([true, true, false, true]));
        let differences = better.minus(&base);
        assert_eq!(differences.right_per_100.unwrap().mean, 50.0);
        assert_eq!(differences.greedy.unwrap().mean, 0.5);
    }
}
