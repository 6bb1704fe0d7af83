//! A draw as it is read from the database, once all of its rollouts have ended.

use super::Draws;
use crate::executor::Executor;
use crate::grpo::harness::HOLDER;
use crate::offline::Failed;
use anyhow::Context;
use futures::FutureExt as _;
use runs::advantage;
use runs::claim;
use runs::sample::Sample;
use runs::select;
use runs::select::rollouts::{self, Arrived, LastAnswer};
use serde_json::json;
use sqlx::types::Json;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Longest reason of a lost rollout in an event.
const FIRST_CHARACTERS_MAX: usize = 500;

/// A draw, as far as it has been read.
#[derive(Debug, Default)]
pub(crate) struct Draw {
    pub number: i64,
    /// Its rollouts that have a reward.
    pub graded: BTreeMap<Uuid, Graded>,
    /// Those that have none, or no turns in the database, by why.
    pub lost: BTreeMap<String, u64>,
    /// The groups of its rollouts.
    pub groups: BTreeSet<Uuid>,
    /// Its rollouts that have been read.
    read: Vec<Uuid>,
}

/// What a rollout is compared by, besides its reward.
#[derive(Debug, Default)]
pub(crate) struct Graded {
    /// As its harness posted it.
    pub reward: f64,
    /// The rewards that a `multi` grader computed the reward from.
    pub parts: BTreeMap<String, f64>,
    /// `None`: no turn of it is in the database.
    pub last_answer: Option<LastAnswer>,
    /// The generations that its harness received. `None`: a harness outside does not say.
    pub answers: Option<Vec<Uuid>>,
}

impl Draw {
    /// The mean of each of [`Graded::parts`].
    pub fn part_means(&self) -> BTreeMap<&str, f64> {
        let mut parts: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for (name, reward) in self.graded.values().flat_map(|graded| &graded.parts) {
            parts.entry(name).or_default().push(*reward);
        }
        let means = parts
            .into_iter()
            .map(|(name, rewards)| (name, advantage::mean(&rewards)));
        means.collect()
    }

    /// Splits off the ids of answers that their harness did not receive.
    fn split_received(&self, samples: Vec<Sample>) -> (Vec<Sample>, Vec<Uuid>) {
        let (received, twins): (Vec<Sample>, Vec<Sample>) = samples.into_iter().partition(|sample| {
            let graded = sample.turn.as_ref().and_then(|turn| self.graded.get(&turn.episode));
            let answers = graded.and_then(|graded| graded.answers.as_ref());
            answers.is_none_or(|answers| answers.contains(&sample.generation))
        });
        (received, twins.into_iter().map(|sample| sample.generation).collect())
    }
}

impl Draws<'_> {
    /// Waits until the turns of the draw's rollouts have closed in the database, and reads them: those of
    /// rollouts that it does not have yet.
    pub(super) async fn read(&mut self, executor: &Executor<'_>, draw: &mut Draw) -> anyhow::Result<Vec<Sample>> {
        let run = executor.claim.run;
        let rows = sqlx::query!(
            r#"
            select id, group_id, reward, code, reason,
                   coalesce(reward_parts, '{}') as "reward_parts!: Json<BTreeMap<String, f64>>",
                   case when holder = $4 then coalesce(answers, '{}') end as answers
            from rollout
            where run_id = $1 and draw = $2 and state = 'settled' and id <> all ($3)
            order by finished_at
            "#,
            run,
            draw.number,
            &draw.read,
            HOLDER
        )
        .fetch_all(&self.trainer.pool)
        .await?;
        let (mut episodes, mut lost, mut first) = (Vec::new(), BTreeMap::<String, u64>::new(), None);
        for row in rows {
            draw.read.push(row.id);
            draw.groups.insert(row.group_id);
            if let Some(reward) = row.reward {
                let graded = Graded {
                    reward,
                    parts: row.reward_parts.0,
                    last_answer: None,
                    answers: row.answers,
                };
                draw.graded.insert(row.id, graded);
                episodes.push(row.id);
                continue;
            }
            let code = row.code.unwrap_or_default();
            first.get_or_insert_with(|| format!("{code}: {}", row.reason.unwrap_or_default()));
            *lost.entry(code).or_default() += 1;
        }
        if let Some(first) = first {
            self.say_what_was_lost(executor, draw, &lost, &first).await?;
        }
        for (code, count) in lost {
            *draw.lost.entry(code).or_default() += count;
        }
        let trainer = self.trainer;
        let (head, staleness_max) = (executor.head, self.config.staleness_max);
        let versions = select::versions(&trainer.pool, &trainer.policy, head, staleness_max).await?;
        let timeout = Duration::from_secs(self.trainer.options.offline.arrival_timeout_seconds);
        let mut started = Instant::now();
        loop {
            let Arrived {
                mut samples,
                last_answers,
                broken,
                missing,
                is_unavailable,
            } = rollouts::episodes(
                &trainer.pool,
                &trainer.payloads,
                run,
                &versions,
                &episodes,
                &executor.model_limits,
            )
            .await
            .context("read the rollouts")?;
            if is_unavailable {
                // nothing is left out because of an outage
                started = Instant::now();
            }
            if missing.is_empty() || started.elapsed() > timeout {
                executor.drop_generations(&broken).await?;
                if let Some(ids) = broken.get("quarantined_reward") {
                    samples = self.without_groups_of(executor, ids, samples).await?;
                }
                for (code, ids) in broken {
                    *draw.lost.entry(code.into_owned()).or_default() += ids.len() as u64;
                }
                if !missing.is_empty() {
                    *draw.lost.entry("no_turns".into()).or_default() += missing.len() as u64;
                    let message = format!(
                        "{} of {} rewarded rollouts have no turns in the database after {} s: did the harness use \
                         their `base_url`?",
                        missing.len(),
                        episodes.len(),
                        timeout.as_secs()
                    );
                    executor.append_event("warn", &message).await?;
                }
                let (mut samples, twins) = draw.split_received(samples);
                let twins = BTreeMap::from([("caller_gone", twins)]);
                executor.drop_generations(&twins).await?;
                self.use_own_rewards(executor, draw, &mut samples).await?;
                for (rollout, last_answer) in last_answers {
                    draw.graded.entry(rollout).or_default().last_answer = Some(last_answer);
                }
                return Ok(samples);
            }
            // other traffic rings too
            tokio::time::sleep(self.poll() / 4).await;
            let mut rang = false;
            while let Some(rung) = self.closed.recv().now_or_never() {
                rung?;
                rang = true;
            }
            if rang {
                continue;
            }
            if let Ok(rung) = tokio::time::timeout(self.poll(), self.closed.recv()).await {
                rung?;
            }
        }
    }

    /// Leaves out the groups of generations whose rewards are out of bounds: compared among themselves, the
    /// others would be reinforced in place of the best.
    async fn without_groups_of(
        &self,
        executor: &Executor<'_>,
        ids: &[Uuid],
        samples: Vec<Sample>,
    ) -> anyhow::Result<Vec<Sample>> {
        let groups = sqlx::query_scalar!(
            "select distinct o.group_id from generation g join rollout o on o.id = g.episode_id where g.id = any($1)",
            ids
        )
        .fetch_all(&self.trainer.pool)
        .await
        .context("read the groups of rewards that are out of bounds")?;
        let groups: BTreeSet<String> = groups.iter().map(Uuid::to_string).collect();
        let is_out = |sample: &Sample| sample.group.as_ref().is_some_and(|group| groups.contains(group));
        let (out, kept): (Vec<Sample>, Vec<Sample>) = samples.into_iter().partition(is_out);
        let out = out.into_iter().map(|sample| sample.generation).collect();
        executor
            .drop_generations(&BTreeMap::from([("incomplete_group", out)]))
            .await?;
        Ok(kept)
    }

    /// Gives every rollout the reward that its harness posted. What closed its episode may be feedback of
    /// somebody else: the first one decides there, and the agent knows enough to send it.
    async fn use_own_rewards(
        &self,
        executor: &Executor<'_>,
        draw: &Draw,
        samples: &mut [Sample],
    ) -> anyhow::Result<()> {
        let mut others = BTreeSet::new();
        for sample in samples {
            let rollout = sample.turn.as_ref().map(|turn| turn.episode);
            let Some((id, graded)) = rollout.and_then(|id| Some((id, draw.graded.get(&id)?))) else {
                continue;
            };
            if sample.reward != graded.reward {
                others.insert(id);
                sample.reward = graded.reward;
            }
        }
        if others.is_empty() {
            return Ok(());
        }
        let message = format!(
            "{} rollouts closed with another reward than their harness posted, which counts: somebody else has \
             posted one, or the surface `environment` changes rewards",
            others.len()
        );
        executor.append_event("warn", &message).await
    }

    /// One event with the rollouts that have no reward. Fails if no rollout of the draw has any.
    async fn say_what_was_lost(
        &self,
        executor: &Executor<'_>,
        draw: &Draw,
        lost: &BTreeMap<String, u64>,
        first: &str,
    ) -> anyhow::Result<()> {
        let count: u64 = lost.values().sum();
        let first: String = first.chars().take(FIRST_CHARACTERS_MAX).collect();
        if draw.graded.is_empty() {
            return Err(Failed(format!(
                "no rollout of a step has a reward, the first one because of {first}"
            ))
            .into());
        }
        let message = format!("{count} rollouts have no reward, the first one because of {first}");
        let mut connection = self.trainer.pool.acquire().await?;
        claim::append_event(
            &mut connection,
            executor.claim.run,
            "warn",
            &message,
            &json!({"lost": lost}),
        )
        .await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_harness_received_is_trained_on_if_it_says() {
        let turns = |episode| [0, 1].map(|index| Sample::example_of(episode, index, &[None, None]));
        let (own, outside) = (turns(1), turns(2));
        let received = Graded {
            answers: Some(vec![own[1].generation]),
            ..Graded::default()
        };
        let draw = Draw {
            graded: [(Uuid::from_u128(1), received), (Uuid::from_u128(2), Graded::default())].into(),
            ..Draw::default()
        };
        let twin = own[0].generation;
        let (kept, twins) = draw.split_received([own, outside].concat());
        assert_eq!((kept.len(), twins), (3, vec![twin]));
    }

    #[test]
    fn the_parts_of_rewards_are_averaged_by_name() {
        let graded = |parts: &[(&str, f64)]| Graded {
            parts: parts
                .iter()
                .map(|(name, reward)| ((*name).to_owned(), *reward))
                .collect(),
            ..Graded::default()
        };
        let draw = Draw {
            graded: [
                (Uuid::now_v7(), graded(&[("right", 1.0), ("short", 0.25)])),
                (Uuid::now_v7(), graded(&[("right", 0.0), ("short", 0.75)])),
            ]
            .into(),
            ..Draw::default()
        };
        assert_eq!(draw.part_means(), BTreeMap::from([("right", 0.5), ("short", 0.5)]));
    }
}
