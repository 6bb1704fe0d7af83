//! Groups graded rollouts by task, drops those without a training signal, and computes the
//! advantages of the others.

use crate::learn::advantage::{self, GroupAdvantage};
use crate::learn::sample::Sample;
use crate::runs::executor::Executor;
use std::collections::BTreeMap;
use uuid::Uuid;

/// The samples of a draw, with advantages.
pub(super) struct ScoredGroups {
    pub samples: Vec<Sample>,
    pub advantages: Vec<f64>,
    /// Over all rollouts that arrived, dropped ones included.
    pub reward_mean: f64,
    pub dropped: BTreeMap<&'static str, u64>,
}

/// Groups the samples, drops groups that teach nothing, and computes the advantages of the others.
pub(super) async fn score(
    executor: &Executor<'_>,
    advantage: GroupAdvantage,
    samples: Vec<Sample>,
) -> anyhow::Result<ScoredGroups> {
    let reward_mean = advantage::mean(&rewards(&samples));
    let (groups, dropped) = split(samples, executor.head, executor.model_limits.context);
    let mut scored = ScoredGroups {
        samples: Vec::new(),
        advantages: Vec::new(),
        reward_mean,
        dropped: executor.drop_generations(&dropped).await?,
    };
    for group in groups {
        scored.advantages.extend(advantage.of(&rewards(&group)));
        scored.samples.extend(group);
    }
    Ok(scored)
}

fn rewards(samples: &[Sample]) -> Vec<f64> {
    samples.iter().map(|sample| sample.reward).collect()
}

/// Groups that can be trained on, and the ids of the other samples by reason.
fn split(samples: Vec<Sample>, head: i64, context: i64) -> (Vec<Vec<Sample>>, BTreeMap<&'static str, Vec<Uuid>>) {
    let mut groups: BTreeMap<Option<String>, Vec<Sample>> = BTreeMap::new();
    let mut dropped: BTreeMap<&'static str, Vec<Uuid>> = BTreeMap::new();
    for sample in samples {
        let length = (sample.prompt.len() + sample.tokens.len()) as i64;
        let why = if sample.version != head {
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
            None => groups.entry(sample.group.clone()).or_default().push(sample),
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
        let ids = group.iter().map(|sample| sample.generation);
        dropped.entry(code).or_default().extend(ids);
    }
    (trainable, dropped)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(group: &str, version: i64, reward: f64) -> Sample {
        Sample {
            group: Some(group.into()),
            version,
            reward,
            ..Sample::example()
        }
    }

    #[test]
    fn groups_without_a_training_signal_are_dropped_with_the_reason() {
        let samples = vec![
            sample("a", 5, 1.0),
            sample("a", 5, 0.0),
            sample("a", 4, 0.0),
            sample("b", 5, 1.0),
            sample("b", 5, 1.0),
            sample("c", 5, 1.0),
        ];
        let total = samples.len();
        let (trainable, dropped) = split(samples, 5, 64);
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
        let (trainable, dropped) = split(vec![sample("a", 5, 1.0), sample("a", 5, 0.0)], 5, 2);
        assert!(trainable.is_empty());
        assert_eq!(dropped["longer_than_context"].len(), 2);
    }
}
