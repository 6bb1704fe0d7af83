//! Groups graded rollouts by task, drops those without a training signal, and computes the
//! advantages of the others.

use super::draws::{Draw, Draws, Graded};
use crate::executor::Executor;
use crate::offline::Failed;
use runs::advantage;
use runs::api::grpo::{Config, Overlong};
use runs::sample::{Sample, Trajectory};
use std::collections::BTreeMap;
use std::iter;
use uuid::Uuid;

/// The groups of one step, and what was drawn besides.
pub(super) struct Groups<'a> {
    config: &'a Config,
    /// See [`Config::weights`].
    weights: BTreeMap<String, f64>,
    /// Those that can be trained on.
    trainable: Vec<ScoredGroup>,
    /// Of all rollouts that arrived, dropped ones included.
    rewards: Vec<f64>,
    dropped: Dropped,
}

/// Generations that teach nothing, by reason.
type Dropped = BTreeMap<&'static str, Vec<Uuid>>;

/// The samples of a step, with advantages.
pub(super) struct ScoredGroups {
    /// Every turn of an episode has the advantage of the episode.
    pub samples: Vec<Sample>,
    pub advantages: Vec<f64>,
    /// How many groups they are of.
    pub groups: usize,
    /// Over all rollouts that arrived, dropped ones included.
    pub reward_mean: f64,
    /// How many samples are how many steps old.
    pub staleness: BTreeMap<usize, usize>,
    /// To be dropped.
    pub dropped: Dropped,
}

/// The turns of one rollout, and what it is compared by.
struct Rollout {
    turns: Vec<Sample>,
    rewards: Vec<f64>,
}

/// The rollouts of one task.
type Group = BTreeMap<Trajectory, Rollout>;
/// The turns of each rollout, and its advantage within the group.
type ScoredGroup = Vec<(Vec<Sample>, f64)>;

/// Reads the oldest draw that no step was made of, and groups it. With `dynamic_sampling`, tasks are
/// added to the draw until it has `tasks_per_step` groups with a signal, or as many tasks as it may
/// have. Decides nothing, so it may be interrupted anywhere: what has ended is read again.
pub(super) async fn gather(
    executor: &Executor<'_>,
    draws: &mut Draws<'_>,
    config: &Config,
) -> anyhow::Result<(Draw, ScoredGroups)> {
    let (mut draw, mut groups) = (Draw::default(), Groups::new(config)?);
    loop {
        let samples = draws.read_oldest(executor, &mut draw).await?;
        groups.add(samples, &draw.graded, executor.model_limits.context);
        let missing = groups.missing();
        let drawn = draw.groups.len();
        if missing == 0 || !draws.add_tasks(&executor.claim, draw.number, drawn, missing).await? {
            return Ok((draw, groups.scored()));
        }
    }
}

impl<'a> Groups<'a> {
    fn new(config: &'a Config) -> Result<Self, Failed> {
        Ok(Groups {
            config,
            weights: config.weights().map_err(Failed)?,
            trainable: Vec::new(),
            rewards: Vec::new(),
            dropped: BTreeMap::new(),
        })
    }

    /// How many groups are to be drawn besides. None without `dynamic_sampling`.
    fn missing(&self) -> usize {
        // a step was made of the draw before a restart
        let is_decided = self.trainable.is_empty() && self.dropped.is_empty();
        match self.config.dynamic_sampling && !is_decided {
            true => (self.config.tasks_per_step as usize).saturating_sub(self.trainable.len()),
            false => 0,
        }
    }

    /// Keeps the groups of these samples that can be trained on.
    fn add(&mut self, samples: Vec<Sample>, graded: &BTreeMap<Uuid, Graded>, context: i64) {
        let rewards: BTreeMap<Trajectory, f64> = samples.iter().map(|s| (s.trajectory(), s.reward)).collect();
        self.rewards.extend(rewards.into_values());
        let mut groups: BTreeMap<Option<String>, Group> = BTreeMap::new();
        for sample in samples {
            let graded = sample.turn.as_ref().and_then(|turn| graded.get(&turn.episode));
            match self.compared(&sample, graded, context) {
                Err(code) => self.dropped.entry(code).or_default().push(sample.generation),
                Ok(rewards) => {
                    let group = groups.entry(sample.group.clone()).or_default();
                    let rollout = group.entry(sample.trajectory()).or_insert(Rollout {
                        turns: Vec::new(),
                        rewards,
                    });
                    rollout.turns.push(sample);
                }
            }
        }
        let weights: Vec<f64> = self.weights.values().copied().chain(iter::once(1.0)).collect();
        for group in groups.into_values() {
            let (turns, rewards): (Vec<_>, Vec<_>) = group
                .into_values()
                .map(|rollout| (rollout.turns, rollout.rewards))
                .unzip();
            let advantages = self.config.advantage.of_several(&rewards, &weights);
            let code = match rewards.len() {
                1 => "incomplete_group",
                _ if advantages.iter().all(|advantage| *advantage == 0.0) => "zero_variance_group",
                _ => {
                    self.trainable.push(turns.into_iter().zip(advantages).collect());
                    continue;
                }
            };
            let ids = turns.into_iter().flatten().map(|sample| sample.generation);
            self.dropped.entry(code).or_default().extend(ids);
        }
    }

    /// The rewards that a turn's rollout is compared by, one for each of `weights` and one more of weight
    /// 1; or why the turn is not trained on.
    fn compared(&self, sample: &Sample, graded: Option<&Graded>, context: i64) -> Result<Vec<f64>, &'static str> {
        let length = (sample.prompt.len() + sample.tokens.len()) as i64;
        let last_answer = graded.and_then(|graded| graded.last_answer);
        if sample.staleness > self.config.staleness_max as usize {
            return Err("stale");
        }
        if sample.prompt.is_empty() || sample.tokens.is_empty() {
            return Err("empty");
        }
        if length > context {
            return Err("longer_than_context");
        }
        if !sample.reward.is_finite() {
            return Err("reward_not_finite");
        }
        if self.config.overlong == Overlong::Mask && last_answer.is_some_and(|last| last.is_cut_off) {
            return Err("overlong");
        }
        let tokens = last_answer.map_or(0, |last| last.tokens);
        let penalty = self.config.overlong.penalty(tokens, self.config.max_tokens);
        if self.weights.is_empty() {
            return Ok(vec![sample.reward + penalty]);
        }
        let part = |name: &String| graded.and_then(|graded| graded.parts.get(name).copied());
        let parts: Option<Vec<f64>> = self.weights.keys().map(part).chain([Some(penalty)]).collect();
        parts.ok_or("incomplete_reward")
    }

    fn scored(self) -> ScoredGroups {
        let groups = self.trainable.len();
        let (rollouts, advantages): (Vec<_>, Vec<_>) = self.trainable.into_iter().flatten().unzip();
        let advantages = self.config.advantage.of_step(advantages);
        let mut scored = ScoredGroups {
            samples: Vec::new(),
            advantages: Vec::new(),
            groups,
            reward_mean: advantage::mean(&self.rewards),
            staleness: BTreeMap::new(),
            dropped: self.dropped,
        };
        for (turns, advantage) in rollouts.into_iter().zip(advantages) {
            scored.advantages.extend(turns.iter().map(|_| advantage));
            scored.samples.extend(turns);
        }
        for sample in &scored.samples {
            *scored.staleness.entry(sample.staleness).or_default() += 1;
        }
        scored
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use runs::select::rollouts::LastAnswer;

    fn sample(group: &str, staleness: usize, reward: f64) -> Sample {
        Sample {
            group: Some(group.into()),
            staleness,
            reward,
            ..Sample::example()
        }
    }

    fn split(config: &Config, samples: Vec<Sample>, graded: &BTreeMap<Uuid, Graded>) -> ScoredGroups {
        let mut groups = Groups::new(config).unwrap();
        groups.add(samples, graded, 64);
        groups.scored()
    }

    fn split_by_reward(samples: Vec<Sample>) -> ScoredGroups {
        let config = Config {
            staleness_max: 2,
            ..Config::default()
        };
        split(&config, samples, &BTreeMap::new())
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
        let scored = split_by_reward(samples);
        assert_eq!((scored.groups, scored.samples.len()), (1, 2));
        assert_eq!(scored.staleness, BTreeMap::from([(0, 1), (2, 1)]));
        let count = |code| scored.dropped.get(code).map_or(0, Vec::len);
        assert_eq!(
            (count("stale"), count("zero_variance_group"), count("incomplete_group")),
            (1, 2, 1)
        );
        assert_eq!(
            scored.samples.len() + scored.dropped.values().map(Vec::len).sum::<usize>(),
            total
        );
        assert_eq!(scored.reward_mean, 4.0 / 6.0, "of all");
    }

    #[test]
    fn tasks_are_missing_until_there_are_enough_groups_with_a_signal() {
        let mut config = Config {
            tasks_per_step: 2,
            ..Config::default()
        };
        let two = |group: &str, second: f64| vec![sample(group, 0, 1.0), sample(group, 0, second)];
        let missing = |config: &Config, draws: &[Vec<Sample>]| {
            let mut groups = Groups::new(config).unwrap();
            for samples in draws {
                groups.add(samples.clone(), &BTreeMap::new(), 64);
            }
            groups.missing()
        };
        let draws = [two("a", 1.0), two("b", 0.0), two("c", 1.0), two("d", 0.0)];
        assert_eq!(missing(&config, &draws[..1]), 0, "it is not asked for");
        config.dynamic_sampling = true;
        let after: Vec<usize> = (1..=4).map(|count| missing(&config, &draws[..count])).collect();
        assert_eq!(after, [2, 1, 1, 0]);
        assert_eq!(missing(&config, &[]), 0, "a step was made of it");
    }

    #[test]
    fn a_rollout_longer_than_the_context_is_dropped() {
        let config = Config::default();
        let mut groups = Groups::new(&config).unwrap();
        let samples = vec![sample("a", 0, 1.0), sample("a", 0, 0.0)];
        groups.add(samples, &BTreeMap::new(), 2);
        assert!(groups.trainable.is_empty());
        assert_eq!(groups.dropped["longer_than_context"].len(), 2);
    }

    fn turn(episode: u128, index: usize, reward: f64) -> Sample {
        Sample {
            group: Some("a".into()),
            reward,
            ..Sample::example_of(episode, index, &[None, None, None])
        }
    }

    #[test]
    fn the_turns_of_an_episode_count_as_one_rollout() {
        let samples = vec![turn(1, 0, 1.0), turn(1, 1, 1.0), turn(1, 2, 1.0), turn(2, 0, 0.0)];
        let scored = split_by_reward(samples.clone());
        assert!(scored.dropped.is_empty());
        assert_eq!(scored.advantages, [0.5, 0.5, 0.5, -0.5], "their mean is not 0.75");
        let scored = split_by_reward(samples[..3].to_vec());
        assert_eq!(scored.groups, 0);
        assert_eq!(
            scored.dropped["incomplete_group"].len(),
            3,
            "three turns are one rollout"
        );
    }

    /// A rollout whose last answer has so many tokens, the most that it may have if it has 10.
    fn answered(rollout: u128, tokens: u32, parts: &[(&str, f64)]) -> (Uuid, Graded) {
        let graded = Graded {
            parts: parts
                .iter()
                .map(|(name, reward)| ((*name).to_owned(), *reward))
                .collect(),
            last_answer: Some(LastAnswer {
                tokens,
                is_cut_off: tokens == 10,
            }),
            ..Graded::default()
        };
        (Uuid::from_u128(rollout), graded)
    }

    #[test]
    fn an_overlong_rollout_is_kept_left_out_or_penalized() {
        let samples = vec![turn(1, 0, 1.0), turn(2, 0, 0.0), turn(3, 0, 0.0), turn(3, 1, 0.0)];
        let graded = BTreeMap::from([answered(1, 5, &[]), answered(2, 8, &[]), answered(3, 10, &[])]);
        let with = |overlong| Config {
            overlong,
            max_tokens: 10,
            ..Config::default()
        };
        let kept = split(&with(Overlong::Keep), samples.clone(), &graded);
        assert_eq!(kept.advantages, [1.0 - 1.0 / 3.0, -1.0 / 3.0, -1.0 / 3.0, -1.0 / 3.0]);
        // neither of its turns is trained on, and the mean is that of the others
        let masked = split(&with(Overlong::Mask), samples.clone(), &graded);
        assert_eq!(
            (masked.advantages, masked.dropped["overlong"].len()),
            (vec![0.5, -0.5], 2)
        );
        // rewards 1, 0 - (8 - 6) / 4 and 0 - 1, whose mean is -1/6
        let penalized = split(&with(Overlong::Penalty { from: 6 }), samples, &graded);
        for (got, want) in penalized
            .advantages
            .iter()
            .zip([7.0 / 6.0, -2.0 / 6.0, -5.0 / 6.0, -5.0 / 6.0])
        {
            assert!((got - want).abs() < 1e-12, "{got} against {want}");
        }
        assert!(penalized.dropped.is_empty());
        assert!((penalized.reward_mean - 1.0 / 3.0).abs() < 1e-12, "without penalties");
    }

    #[test]
    fn gdpo_compares_the_rewards_of_each_grader() {
        let config: Config = serde_json::from_str(
            r#"{"advantage": "gdpo", "grader": {"type": "multi", "calculate_output": "0.5 * right + 0.25 * short",
                "graders": {
                    "right": {"type": "string_check", "operation": "eq", "input": "a", "reference": "b"},
                    "short": {"type": "string_check", "operation": "eq", "input": "a", "reference": "b"}}}}"#,
        )
        .unwrap();
        assert_eq!(config.check(), Ok(()));
        let rewards = [0.25, 0.25, 0.5, 0.75, 0.25];
        let samples: Vec<Sample> = (1..).zip(rewards).map(|(id, reward)| turn(id, 0, reward)).collect();
        let graded = BTreeMap::from([
            answered(1, 5, &[("right", 0.0), ("short", 1.0)]),
            answered(2, 5, &[("right", 0.0), ("short", 1.0)]),
            answered(3, 5, &[("right", 1.0), ("short", 0.0)]),
            answered(4, 5, &[("right", 1.0), ("short", 1.0)]),
            answered(5, 5, &[("right", 0.5), ("short", 0.0)]),
        ]);
        let scored = split(&config, samples[..4].to_vec(), &graded);
        // right: (-1, -1, 1, 1) / 2 by a deviation of √(1/3); short: (1, 1, -3, 1) / 4 by 1/2
        let (right, short) = (0.5 / (3.0_f64.sqrt().recip() + 1e-6), 0.25 / (0.5 + 1e-6));
        let sums = [(-1.0, 1.0), (-1.0, 1.0), (1.0, -3.0), (1.0, 1.0)].map(|(r, s)| 0.5 * r * right + 0.25 * s * short);
        let scale = 1.0 / (advantage::std(&sums) + 1e-6);
        for (got, want) in scored.advantages.iter().zip(sums.map(|sum| sum * scale)) {
            assert!((got - want).abs() < 1e-9, "{got} against {want}");
        }
        // equal sums are a signal if their parts differ, and equal parts are none
        let equal_sums = split(&config, vec![samples[0].clone(), samples[4].clone()], &graded);
        assert_eq!(equal_sums.groups, 1);
        let equal_parts = split(&config, samples[..2].to_vec(), &graded);
        assert_eq!(
            (equal_parts.groups, equal_parts.dropped["zero_variance_group"].len()),
            (0, 2)
        );
        let ungraded = split(&config, samples, &BTreeMap::new());
        assert_eq!((ungraded.groups, ungraded.dropped["incomplete_reward"].len()), (0, 5));
    }
}
