//! Groups graded rollouts by task, drops those without a training signal, and computes the
//! advantages of the others.

use crate::learn::advantage::{self, GroupAdvantage};
use crate::learn::sample::{Sample, Trajectory};
use crate::runs::executor::Executor;
use std::collections::BTreeMap;
use uuid::Uuid;

/// The samples of a draw, with advantages.
pub(super) struct ScoredGroups {
    /// Every turn of an episode has the advantage of the episode.
    pub samples: Vec<Sample>,
    pub advantages: Vec<f64>,
    /// Over all rollouts that arrived, dropped ones included.
    pub reward_mean: f64,
    /// How many samples are how many steps old.
    pub staleness: BTreeMap<usize, usize>,
    pub dropped: BTreeMap<&'static str, u64>,
}

/// The turns of one rollout.
type Turns = Vec<Sample>;
/// The rollouts of one task.
type Group = BTreeMap<Trajectory, Turns>;

/// Groups the samples, drops groups that teach nothing, and computes the advantages of the others.
/// `staleness_max`: of samples that are trained on, steps.
pub(super) async fn score(
    executor: &Executor<'_>,
    advantage: GroupAdvantage,
    staleness_max: u32,
    samples: Vec<Sample>,
) -> anyhow::Result<ScoredGroups> {
    let rewards_of_all: BTreeMap<Trajectory, f64> = samples.iter().map(|s| (s.trajectory(), s.reward)).collect();
    let rewards_of_all: Vec<f64> = rewards_of_all.into_values().collect();
    let (groups, dropped) = split(samples, staleness_max as usize, executor.model_limits.context);
    let mut scored = ScoredGroups {
        samples: Vec::new(),
        advantages: Vec::new(),
        reward_mean: advantage::mean(&rewards_of_all),
        staleness: BTreeMap::new(),
        dropped: executor.drop_generations(&dropped).await?,
    };
    for group in groups {
        for (advantage, turns) in advantage.of(&rewards(&group)).into_iter().zip(group.into_values()) {
            scored.advantages.extend(turns.iter().map(|_| advantage));
            scored.samples.extend(turns);
        }
    }
    for sample in &scored.samples {
        *scored.staleness.entry(sample.staleness).or_default() += 1;
    }
    Ok(scored)
}

/// In the order of the rollouts.
fn rewards(group: &Group) -> Vec<f64> {
    let turns = group.values().filter_map(|turns| turns.first());
    turns.map(|turn| turn.reward).collect()
}

/// Groups that can be trained on, and the ids of the other samples by reason.
fn split(samples: Vec<Sample>, staleness_max: usize, context: i64) -> (Vec<Group>, BTreeMap<&'static str, Vec<Uuid>>) {
    let mut groups: BTreeMap<Option<String>, Group> = BTreeMap::new();
    let mut dropped: BTreeMap<&'static str, Vec<Uuid>> = BTreeMap::new();
    for sample in samples {
        let length = (sample.prompt.len() + sample.tokens.len()) as i64;
        let why = if sample.staleness > staleness_max {
            Some("stale")
        } else if sample.prompt.is_empty() || sample.tokens.is_empty() {
            Some("empty")
        } else if length > context {
            Some("longer_than_context")
        } else if sample.temperature <= 0.0 {
            Some("greedy")
        } else if !sample.reward.is_finite() {
            Some("reward_not_finite")
        } else {
            None
        };
        match why {
            Some(code) => dropped.entry(code).or_default().push(sample.generation),
            None => {
                let group = groups.entry(sample.group.clone()).or_default();
                group.entry(sample.trajectory()).or_default().push(sample);
            }
        }
    }
    let mut trainable = Vec::new();
    for group in groups.into_values() {
        let code = match group.len() {
            1 => "incomplete_group",
            _ if advantage::has_no_variance(&rewards(&group)) => "zero_variance_group",
            _ => {
                trainable.push(group);
                continue;
            }
        };
        let ids = group.into_values().flatten().map(|sample| sample.generation);
        dropped.entry(code).or_default().extend(ids);
    }
    (trainable, dropped)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(group: &str, staleness: usize, reward: f64) -> Sample {
        Sample {
            group: Some(group.into()),
            staleness,
            reward,
            ..Sample::example()
        }
    }

    #[test]
    fn groups_without_a_training_signal_are_dropped_with_the_reason() {
        let samples = vec![
            sample("a", 0, 1.0),
            sample("a", 2, 0.0),
            sample("a", 3, 0.0),
            sample("b", 0, 1.0),
            sample("b", 0, 1.0),
            sample("c", 0, 1.0),
        ];
        let total = samples.len();
        let (trainable, dropped) = split(samples, 2, 64);
        assert_eq!(trainable.len(), 1);
        assert_eq!(trainable[0].len(), 2);
        let count = |code| dropped.get(code).map_or(0, Vec::len);
        assert_eq!(
            (count("stale"), count("zero_variance_group"), count("incomplete_group")),
            (1, 2, 1)
        );
        assert_eq!(
            trainable[0].len() + dropped.values().map(Vec::len).sum::<usize>(),
            total
        );
    }

    #[test]
    fn a_rollout_longer_than_the_context_is_dropped() {
        let (trainable, dropped) = split(vec![sample("a", 0, 1.0), sample("a", 0, 0.0)], 0, 2);
        assert!(trainable.is_empty());
        assert_eq!(dropped["longer_than_context"].len(), 2);
    }

    #[test]
    fn the_turns_of_an_episode_count_as_one_rollout() {
        let turn = |episode: u128, index: usize, reward: f64| Sample {
            group: Some("a".into()),
            reward,
            ..Sample::example_of(episode, index, &[None, None, None])
        };
        let samples = vec![turn(1, 0, 1.0), turn(1, 1, 1.0), turn(1, 2, 1.0), turn(2, 0, 0.0)];
        let (trainable, dropped) = split(samples.clone(), 0, 64);
        assert!(dropped.is_empty());
        assert_eq!(rewards(&trainable[0]), [1.0, 0.0], "not 0.75 on average");
        let (trainable, dropped) = split(samples[..3].to_vec(), 0, 64);
        assert!(trainable.is_empty());
        assert_eq!(dropped["incomplete_group"].len(), 3, "three turns are one rollout");
    }
}
