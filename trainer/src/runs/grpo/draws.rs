//! The rollouts of a run: which are offered, how they end, and which the next step is made of. They
//! are rows of `rollout`, so nothing that has ended is lost when a process ends, and all of this can
//! be interrupted anywhere.
//!
//! ```text
//! offer   a draw of tasks: a group of rollouts for each            offered
//!         a harness takes one, lets the policy act, rewards it     leased, rewarded
//! expire  harnesses that say nothing; what was lost begins anew    failed, offered
//! settle  the reward and the end of the episode go to the log      settled
//! read    the turns of the oldest draw, from the database
//! spend   a step was made of the draw                              spent
//! ```
//! Steps take draws in the order in which they were offered, and wait for the slowest rollout of the
//! oldest. So no step favors short rollouts. Rollouts of up to `staleness_max` later draws are made
//! meanwhile. A draw is therefore offered at most so many steps before it is trained on.

use crate::api::grpo::Config;
use crate::learn::sample::Sample;
use crate::runs::claim::{self, Claim};
use crate::runs::executor::Executor;
use crate::runs::offline::Failed;
use crate::runs::random::Random;
use crate::runs::trainer::Trainer;
use crate::select;
use crate::select::rollouts::{self, Arrived};
use anyhow::Context;
use edge::tenant;
use futures::stream::{self, StreamExt, TryStreamExt};
use ingest::event::{EpisodeEnd, Feedback, Target, Value};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use time::OffsetDateTime;
use uuid::Uuid;

/// How often a rollout that was lost is offered again.
const ATTEMPTS_MAX: i32 = 3;
/// The metric that is the reward of the surface `environment`.
const METRIC: &str = "reward";
/// Longest reason of a lost rollout in an event.
const FIRST_CHARACTERS_MAX: usize = 500;
/// Events in flight to the log.
const SENDS_MAX: usize = 64;
/// After this long without a harness an event says so.
const NOBODY_AFTER: Duration = Duration::from_secs(60);

/// The rollouts of a draw.
#[derive(Debug, Default)]
pub(super) struct Draw {
    pub samples: Vec<Sample>,
    /// How many have a reward.
    pub rewarded: usize,
    /// Those that have none, or no turns in the database, by why.
    pub lost: BTreeMap<String, u64>,
    pub number: i64,
}

/// The rollouts of one run.
pub(super) struct Draws<'a> {
    trainer: &'a Trainer,
    config: &'a Config,
    /// Their ids.
    tasks: Vec<String>,
    /// Of the policy.
    tenant: String,
    /// Since when rollouts wait and nobody has leased any.
    waiting_since: Option<Instant>,
    /// An event has said that nobody leases any.
    said: bool,
}

impl<'a> Draws<'a> {
    /// `tasks`: their ids.
    pub async fn new(trainer: &'a Trainer, config: &'a Config, tasks: Vec<String>) -> anyhow::Result<Self> {
        let tenant = tenant::owner(&trainer.pool, &trainer.policy).await?;
        Ok(Draws {
            trainer,
            config,
            tasks,
            tenant: tenant.ok_or_else(|| Failed(format!("the policy {} belongs to no tenant", trainer.policy)))?,
            waiting_since: None,
            said: false,
        })
    }

    /// Whether a step was made of every draw that was offered.
    pub async fn are_spent(&self, run: Uuid) -> anyhow::Result<bool> {
        Ok(self.unspent(run).await?.is_empty())
    }

    /// The oldest draw that no step was made of, once all of its rollouts have ended.
    pub async fn next(&mut self, executor: &Executor<'_>) -> anyhow::Result<Draw> {
        let run = executor.claim.run;
        loop {
            self.expire(&executor.claim).await?;
            self.settle(&executor.claim).await?;
            let unspent = self.unspent(run).await?;
            let steps_left = usize::try_from(self.config.steps - executor.steps_done).unwrap_or(0);
            let ahead = steps_left.min(self.config.staleness_max as usize + 1);
            if unspent.len() < ahead {
                self.offer(&executor.claim).await?;
                continue;
            }
            if let Some((number, 0)) = unspent.first() {
                return self.read(executor, *number).await;
            }
            self.say_if_nobody_comes(executor).await?;
            tokio::time::sleep(Duration::from_millis(self.trainer.options.poll_ms)).await;
        }
    }

    /// No further step is made of the draw.
    pub async fn spend(&self, claim: &Claim, draw: i64) -> anyhow::Result<()> {
        let mut transaction = self.trainer.pool.begin().await?;
        claim.lock(&mut transaction).await?;
        sqlx::query!(
            "update rollout set state = 'spent' where run_id = $1 and draw = $2 and state <> 'spent'",
            claim.run,
            draw
        )
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(())
    }

    /// The draws that no step was made of, the oldest first, and how many of their rollouts have not
    /// settled.
    async fn unspent(&self, run: Uuid) -> anyhow::Result<Vec<(i64, i64)>> {
        let rows = sqlx::query!(
            r#"
            select draw, count(*) filter (where state <> 'settled') as "unsettled!"
            from rollout
            where run_id = $1 and state <> 'spent'
            group by draw
            order by draw
            "#,
            run
        )
        .fetch_all(&self.trainer.pool)
        .await?;
        Ok(rows.into_iter().map(|row| (row.draw, row.unsettled)).collect())
    }

    /// Offers the next draw: groups of rollouts of tasks that the seed and the draw's number choose.
    async fn offer(&self, claim: &Claim) -> anyhow::Result<()> {
        let mut transaction = self.trainer.pool.begin().await?;
        claim.lock(&mut transaction).await?;
        let draw = sqlx::query_scalar!(
            r#"select coalesce(max(draw) + 1, 0) as "draw!" from rollout where run_id = $1"#,
            claim.run
        )
        .fetch_one(&mut *transaction)
        .await?;
        let (mut ids, mut tasks, mut groups) = (Vec::new(), Vec::new(), Vec::new());
        let mut random = Random(Random(self.config.seed).draw() ^ draw.unsigned_abs());
        for index in random.choose(self.tasks.len(), self.config.tasks_per_step as usize) {
            let (Some(task), group) = (self.tasks.get(index), Uuid::now_v7()) else {
                continue;
            };
            for _ in 0..self.config.group_size {
                ids.push(Uuid::now_v7());
                tasks.push(task.clone());
                groups.push(group);
            }
        }
        sqlx::query!(
            r#"
            insert into rollout (id, run_id, task_id, group_id, draw)
            select id, $1, task, group_id, $2 from unnest($3::uuid[], $4::text[], $5::uuid[]) as r (id, task, group_id)
            "#,
            claim.run,
            draw,
            &ids,
            &tasks,
            &groups
        )
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Gives up leases that have expired, and offers what was lost again.
    async fn expire(&self, claim: &Claim) -> anyhow::Result<()> {
        let mut transaction = self.trainer.pool.begin().await?;
        claim.lock(&mut transaction).await?;
        sqlx::query!(
            r#"
            update rollout set state = 'failed', code = 'lease_expired', finished_at = now()
            where run_id = $1 and state = 'leased' and expires_at < now()
            "#,
            claim.run
        )
        .execute(&mut *transaction)
        .await?;
        // a failed one is settled next, so it is replaced once
        let lost = sqlx::query!(
            r#"
            select id, task_id, group_id, draw, attempt, code = 'interrupted' as "interrupted!" from rollout
            where run_id = $1 and state = 'failed' and attempt < $2
            "#,
            claim.run,
            ATTEMPTS_MAX
        )
        .fetch_all(&mut *transaction)
        .await?;
        let replaced: Vec<Uuid> = lost.iter().map(|one| one.id).collect();
        for one in lost {
            sqlx::query!(
                "insert into rollout (id, run_id, task_id, group_id, draw, attempt) values ($1, $2, $3, $4, $5, $6)",
                Uuid::now_v7(),
                claim.run,
                one.task_id,
                one.group_id,
                one.draw,
                // nobody's fault
                one.attempt + i32::from(!one.interrupted)
            )
            .execute(&mut *transaction)
            .await?;
        }
        // a harness may fail another one meanwhile, which is settled after it is replaced
        sqlx::query!(
            "update rollout set attempt = $2 where run_id = $1 and id = any($3)",
            claim.run,
            ATTEMPTS_MAX,
            &replaced
        )
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Posts the ends of rollouts to the log. What is repeated after a restart is the same events.
    pub async fn settle(&self, claim: &Claim) -> anyhow::Result<()> {
        let ended = sqlx::query!(
            r#"
            select id, reward from rollout
            where run_id = $1 and (state = 'rewarded' or state = 'failed' and attempt >= $2)
            "#,
            claim.run,
            ATTEMPTS_MAX
        )
        .fetch_all(&self.trainer.pool)
        .await?;
        if ended.is_empty() {
            return Ok(());
        }
        let ids: Vec<Uuid> = ended.iter().map(|row| row.id).collect();
        let source = format!("springtide/train/{}", claim.run);
        let ends = ended
            .into_iter()
            .map(|row| self.post_end(&source, claim.run, row.id, row.reward));
        stream::iter(ends)
            .buffer_unordered(SENDS_MAX)
            .try_collect::<Vec<()>>()
            .await
            .context("post the ends of rollouts to the log")?;
        let mut transaction = self.trainer.pool.begin().await?;
        claim.lock(&mut transaction).await?;
        sqlx::query!(
            r#"
            update rollout set state = 'settled', settled_at = now()
            where run_id = $1 and id = any($2) and state in ('rewarded', 'failed')
            "#,
            claim.run,
            &ids
        )
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(())
    }

    async fn post_end(&self, source: &str, run: Uuid, rollout: Uuid, reward: Option<f64>) -> anyhow::Result<()> {
        let now = OffsetDateTime::now_utc();
        if let Some(reward) = reward {
            let feedback = Feedback {
                id: feedback_id(rollout),
                target: Target::Episode(rollout),
                metric_name: METRIC.into(),
                value: Value::Float(reward),
                tags: BTreeMap::from([("run_id".into(), run.to_string())]),
            };
            let event = feedback.into_event(&self.tenant, source, now);
            self.trainer.producer.send_event(&event).await?;
        }
        let end = EpisodeEnd { episode_id: rollout };
        let event = end.into_event(&self.tenant, source, now);
        self.trainer.producer.send_event(&event).await?;
        Ok(())
    }

    /// Waits until the turns of the draw's rollouts have closed in the database, and reads them.
    async fn read(&self, executor: &Executor<'_>, number: i64) -> anyhow::Result<Draw> {
        let run = executor.claim.run;
        let rows = sqlx::query!(
            r#"
            select id, reward, code, reason from rollout
            where run_id = $1 and draw = $2 and state = 'settled'
            order by finished_at
            "#,
            run,
            number
        )
        .fetch_all(&self.trainer.pool)
        .await?;
        let mut draw = Draw {
            number,
            ..Draw::default()
        };
        let mut episodes = Vec::new();
        let mut first = None;
        for row in rows {
            if row.reward.is_some() {
                episodes.push(row.id);
                continue;
            }
            let code = row.code.unwrap_or_default();
            first.get_or_insert_with(|| format!("{code}: {}", row.reason.unwrap_or_default()));
            *draw.lost.entry(code).or_default() += 1;
        }
        draw.rewarded = episodes.len();
        if let Some(first) = first {
            self.say_what_was_lost(executor, &draw, &first).await?;
        }
        let trainer = self.trainer;
        let (head, staleness_max) = (executor.head, self.config.staleness_max);
        let versions = select::versions(&trainer.pool, &trainer.policy, head, staleness_max).await?;
        let timeout = Duration::from_secs(self.trainer.options.offline.arrival_timeout_seconds);
        let mut started = Instant::now();
        loop {
            let Arrived {
                samples,
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
                for (code, ids) in broken {
                    *draw.lost.entry(code.into_owned()).or_default() += ids.len() as u64;
                }
                if !missing.is_empty() {
                    draw.lost.insert("no_turns".into(), missing.len() as u64);
                    let message = format!(
                        "{} of {} rewarded rollouts have no turns in the database after {} s: did the harness use \
                         their `base_url`?",
                        missing.len(),
                        episodes.len(),
                        timeout.as_secs()
                    );
                    executor.append_event("warn", &message).await?;
                }
                draw.samples = samples;
                return Ok(draw);
            }
            tokio::time::sleep(Duration::from_millis(self.trainer.options.poll_ms)).await;
        }
    }

    /// One event with the rollouts that have no reward. Fails if no rollout has any.
    async fn say_what_was_lost(&self, executor: &Executor<'_>, draw: &Draw, first: &str) -> anyhow::Result<()> {
        let lost: u64 = draw.lost.values().sum();
        let first: String = first.chars().take(FIRST_CHARACTERS_MAX).collect();
        if draw.rewarded == 0 {
            return Err(Failed(format!(
                "no rollout of a step has a reward, the first one because of {first}"
            ))
            .into());
        }
        let message = format!("{lost} rollouts have no reward, the first one because of {first}");
        let mut connection = self.trainer.pool.acquire().await?;
        claim::append_event(
            &mut connection,
            executor.claim.run,
            "warn",
            &message,
            &json!({"lost": draw.lost}),
        )
        .await?;
        Ok(())
    }

    /// One event if rollouts wait and no harness has taken any for long.
    async fn say_if_nobody_comes(&mut self, executor: &Executor<'_>) -> anyhow::Result<()> {
        let run = executor.claim.run;
        let counts = sqlx::query!(
            r#"
            select count(*) filter (where state = 'offered') as "offered!",
                   count(*) filter (where state = 'leased') as "leased!"
            from rollout where run_id = $1 and state <> 'spent'
            "#,
            run
        )
        .fetch_one(&self.trainer.pool)
        .await?;
        if counts.offered == 0 || counts.leased > 0 {
            (self.waiting_since, self.said) = (None, false);
            return Ok(());
        }
        let since = *self.waiting_since.get_or_insert_with(Instant::now);
        if since.elapsed() < NOBODY_AFTER || self.said {
            return Ok(());
        }
        self.said = true;
        let message = format!(
            "{} rollouts wait for a harness, and none has come for {} s: POST /v1/runs/{run}/leases takes one",
            counts.offered,
            NOBODY_AFTER.as_secs()
        );
        executor.append_event("warn", &message).await
    }
}

/// The id of the reward's event: the same for each repetition, with the time of the rollout's id.
fn feedback_id(rollout: Uuid) -> Uuid {
    let digest = blake3::hash(rollout.as_bytes());
    let mut bytes = *rollout.as_bytes();
    for (byte, of_digest) in bytes[8..].iter_mut().zip(digest.as_bytes()) {
        *byte = *of_digest;
    }
    bytes[8] = 0x80 | (bytes[8] & 0x3f); // the variant of RFC 9562
    Uuid::from_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_event_of_a_reward_has_one_id_that_is_no_other() {
        let (one, two) = (Uuid::now_v7(), Uuid::now_v7());
        assert_eq!(feedback_id(one), feedback_id(one));
        assert!(feedback_id(one) != one && feedback_id(one) != feedback_id(two));
        assert_eq!(feedback_id(one).get_version_num(), 7);
        assert_eq!(feedback_id(one).get_variant(), uuid::Variant::RFC4122);
        assert_eq!(feedback_id(one).as_bytes()[..6], one.as_bytes()[..6], "its time");
    }
}
