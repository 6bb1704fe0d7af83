//! From graded rollouts to samples with advantages: groups of one task, and what each of the others is dropped for.

use crate::advantage;
use crate::sample::Sample;
use crate::session::Session;
use std::collections::BTreeMap;
use uuid::Uuid;

/// What a draw left to train on.
pub(super) struct Gathered {
    pub samples: Vec<Sample>,
    pub advantages: Vec<f64>,
    /// Over all that arrived, dropped groups included.
    pub reward_mean: f64,
    pub dropped: BTreeMap<&'static str, u64>,
}

/// Groups the samples, drops what cannot teach anything with its reason, and scores the rest.
pub(super) async fn gather(session: &Session<'_>, samples: Vec<Sample>) -> anyhow::Result<Gathered> {
    let rewards: Vec<f64> = samples.iter().map(|s| s.reward).collect();
    let (kept, dropped) = split(samples, session.head, session.shape.context);
    let mut gathered = Gathered {
        samples: Vec::new(),
        advantages: Vec::new(),
        reward_mean: advantage::mean(&rewards),
        dropped: BTreeMap::new(),
    };
    for (code, ids) in dropped {
        gathered.dropped.insert(code, session.drop_all(&ids, code).await?);
    }
    for group in kept {
        let rewards: Vec<f64> = group.iter().map(|s| s.reward).collect();
        gathered.advantages.extend(advantage::dr_grpo(&rewards));
        gathered.samples.extend(group);
    }
    Ok(gathered)
}

type Groups = Vec<Vec<Sample>>;

/// Groups that can be trained on, and the ids of the others by reason.
fn split(samples: Vec<Sample>, head: i64, context: i64) -> (Groups, BTreeMap<&'static str, Vec<Uuid>>) {
    let mut groups: BTreeMap<String, Vec<Sample>> = BTreeMap::new();
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
            None => groups
                .entry(sample.group.clone().unwrap_or_default())
                .or_default()
                .push(sample),
        }
    }
    let mut kept = Vec::new();
    for group in groups.into_values() {
        let rewards: Vec<f64> = group.iter().map(|s| s.reward).collect();
        let code = match group.len() {
            1 => "incomplete_group",
            _ if advantage::has_no_variance(&rewards) => "zero_variance_group",
            _ => {
                kept.push(group);
                continue;
            }
        };
        dropped
            .entry(code)
            .or_default()
            .extend(group.iter().map(|s| s.generation));
    }
    (kept, dropped)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(group: &str, version: i64, reward: f64) -> Sample {
        Sample {
            generation: Uuid::now_v7(),
            class: "rollout".into(),
            group: Some(group.into()),
            version,
            prompt: vec![1, 2],
            tokens: vec![3],
            logprobs: vec![-1.0],
            mask: vec![true],
            temperature: 1.0,
            drawing: None,
            experts: None,
            reward,
            suppressed: false,
            weight: 1.0,
        }
    }

    #[test]
    fn groups_that_teach_nothing_are_dropped_with_their_reason() {
        let samples = vec![
            sample("a", 5, 1.0),
            sample("a", 5, 0.0),
            sample("a", 4, 0.0),
            sample("b", 5, 1.0),
            sample("b", 5, 1.0),
            sample("c", 5, 1.0),
        ];
        let total = samples.len();
        let (kept, dropped) = split(samples, 5, 64);
        assert_eq!(kept.len(), 1);
        assert_eq!(kept[0].len(), 2);
        let count = |code| dropped.get(code).map_or(0, Vec::len);
        assert_eq!(
            (count("stale"), count("zero_variance_group"), count("incomplete_group")),
            (1, 2, 1)
        );
        assert_eq!(kept[0].len() + dropped.values().map(Vec::len).sum::<usize>(), total);
    }

    #[test]
    fn a_rollout_longer_than_the_context_is_not_trained_on() {
        let (kept, dropped) = split(vec![sample("a", 5, 1.0), sample("a", 5, 0.0)], 5, 2);
        assert!(kept.is_empty());
        assert_eq!(dropped["longer_than_context"].len(), 2);
    }
}
