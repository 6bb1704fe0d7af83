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
//! add     more tasks to a draw, if groups have no signal           offered
//! spend   a step was made of the draw                              spent
//! ```
//! Steps take draws in the order in which they were offered, and wait for the slowest rollout of the
//! oldest. So no step favors short rollouts. Rollouts of up to `staleness_max` later draws are made
//! meanwhile. A draw is therefore offered at most so many steps before it is trained on, fewer if
//! replicas lag behind the head. Tasks that are added to the oldest draw are the next ones that
//! harnesses get. No step is made until they have ended, so the others of the draw get no older meanwhile.

mod draw;

use super::harness::Bells;
use crate::executor::Executor;
use crate::offline::Failed;
use crate::realtime::CLOSED_CHANNEL;
use crate::trainer::Trainer;
use anyhow::Context;
use edge::tenant;
use event_log::event::{EpisodeEnd, Feedback, Target, Value};
use futures::stream::{self, StreamExt, TryStreamExt};
use runs::advantage::GroupAdvantage;
use runs::api::grpo::{Config, Overlong};
use runs::claim::Claim;
use runs::leases::{self, ATTEMPTS_MAX};
use runs::random::Random;
use runs::sample::Sample;
use runs::select;
use runs::select::rollouts::staleness;
use sqlx::postgres::PgListener;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use time::OffsetDateTime;
use tokio::time::timeout;
use uuid::Uuid;

pub(super) use draw::{Draw, Graded};

/// The metric that is the reward of the surface `environment`.
const METRIC: &str = "reward";
/// Events in flight to the log.
const SENDS_MAX: usize = 64;
/// After this long without a harness an event says so.
const NOBODY_AFTER: Duration = Duration::from_secs(60);

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
    bells: &'a Bells,
    /// Rings when trajectories close.
    closed: PgListener,
}

impl<'a> Draws<'a> {
    /// `tasks`: their ids.
    pub async fn new(
        trainer: &'a Trainer,
        config: &'a Config,
        tasks: Vec<String>,
        bells: &'a Bells,
    ) -> anyhow::Result<Self> {
        let tenant = tenant::owner(&trainer.pool, &trainer.policy).await?;
        let mut closed = PgListener::connect_with(&trainer.pool).await?;
        closed.listen(CLOSED_CHANNEL).await?;
        Ok(Draws {
            trainer,
            config,
            tasks,
            tenant: tenant.ok_or_else(|| Failed(format!("the policy {} belongs to no tenant", trainer.policy)))?,
            waiting_since: None,
            said: false,
            bells,
            closed,
        })
    }

    /// Whether a step was made of every draw that was offered.
    pub async fn are_spent(&self, run: Uuid) -> anyhow::Result<bool> {
        Ok(self.unspent(run).await?.is_empty())
    }

    /// How many draws without a gradient earlier executions have spent since the last step. Those that a guard
    /// refused had one.
    pub async fn empty_before(&self, executor: &Executor<'_>) -> anyhow::Result<u32> {
        let empty = sqlx::query_scalar!(
            r#"
            select count(distinct draw)
                   - (select count(*) from run_event
                      where run_id = $1 and data ? 'cohort' and (data ->> 'step')::bigint = $2) as "empty!"
            from rollout
            where run_id = $1 and state = 'spent'
              and draw > coalesce((select (metrics #>> '{notes,draw}')::bigint from step
                                   where run_id = $1 order by step desc limit 1), -1)
            "#,
            executor.claim.run,
            executor.steps_done + 1
        )
        .fetch_one(&self.trainer.pool)
        .await?;
        Ok(u32::try_from(empty).unwrap_or(0))
    }

    /// Reads the oldest draw that no step was made of, once all of its rollouts have ended. Returns the
    /// turns of those that `draw` does not have yet.
    pub async fn read_oldest(&mut self, executor: &Executor<'_>, draw: &mut Draw) -> anyhow::Result<Vec<Sample>> {
        let run = executor.claim.run;
        loop {
            leases::expire(&self.trainer.pool, &executor.claim).await?;
            self.settle(&executor.claim).await?;
            let unspent = self.unspent(run).await?;
            let steps_left = usize::try_from(self.config.steps - executor.steps_done).unwrap_or(0);
            let ahead = steps_left.min(self.config.staleness_max as usize + 1);
            if unspent.len() < ahead && self.would_be_young(executor, unspent.len()).await? {
                self.offer(&executor.claim).await?;
                continue;
            }
            if let Some((oldest, unsettled)) = unspent.first() {
                self.add_tasks_early(&executor.claim, *oldest).await?;
                if *unsettled == 0 {
                    draw.number = *oldest;
                    return self.read(executor, draw).await;
                }
            }
            self.say_if_nobody_comes(executor).await?;
            let _ = timeout(self.poll(), self.bells.ended.notified()).await;
        }
    }

    /// Whether rollouts of a draw that is offered now, and that `before` others are trained on before, are
    /// young enough then: replicas that lag sample with older versions than the head.
    async fn would_be_young(&self, executor: &Executor<'_>, before: usize) -> anyhow::Result<bool> {
        if before == 0 {
            return Ok(true); // the run has waited until the fleet serves its head
        }
        let sampling = sqlx::query_scalar!(
            r#"
            select distinct (held ->> 'version')::bigint as "version!"
            from replica
            cross join lateral jsonb_array_elements(resident) held
            where policy = $1 and ready and reported_at > now() - make_interval(secs => $3)
              and held -> 'aliases' ? $2
            "#,
            self.trainer.policy,
            executor.line,
            edge::REPLICA_SILENT_SECONDS
        )
        .fetch_all(&self.trainer.pool)
        .await?;
        let staleness_max = self.config.staleness_max;
        let versions = select::versions(&self.trainer.pool, &self.trainer.policy, executor.head, staleness_max).await?;
        let lag = sampling.iter().map(|version| staleness(*version, &versions)).max();
        Ok(lag.unwrap_or(0).saturating_add(before) <= staleness_max as usize)
    }

    /// How often to look for what no bell rings for.
    fn poll(&self) -> Duration {
        Duration::from_millis(self.trainer.options.poll_ms)
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
        let mut transaction = claim.begin(&self.trainer.pool).await?;
        let draw = sqlx::query_scalar!(
            r#"select coalesce(max(draw) + 1, 0) as "draw!" from rollout where run_id = $1"#,
            claim.run
        )
        .fetch_one(&mut *transaction)
        .await?;
        let tasks = self.tasks_of(draw, 0, self.tasks.len().min(self.config.tasks_per_step as usize));
        leases::offer(&mut transaction, claim.run, draw, &tasks, self.config.group_size).await?;
        transaction.commit().await?;
        self.bells.offered.notify_one();
        Ok(())
    }

    /// Adds up to `wanted` tasks to a draw that has `drawn`, whose rollouts have all ended. False: it has
    /// as many as it may have.
    pub async fn add_tasks(&self, claim: &Claim, draw: i64, drawn: usize, wanted: usize) -> anyhow::Result<bool> {
        let drawn_max = (self.config.tasks_per_step * self.config.draws_per_step_max) as usize;
        let count = wanted.min(drawn_max.saturating_sub(drawn));
        if count == 0 {
            return Ok(false);
        }
        let mut transaction = claim.begin(&self.trainer.pool).await?;
        let tasks = self.tasks_of(draw, drawn, count);
        leases::offer(&mut transaction, claim.run, draw, &tasks, self.config.group_size).await?;
        transaction.commit().await?;
        self.bells.offered.notify_one();
        Ok(true)
    }

    /// Adds tasks to the draws after the oldest, as far as their rewards show already that groups have no
    /// signal, so that no step has to wait for all of them. The turns may show more: see `groups.rs`.
    async fn add_tasks_early(&self, claim: &Claim, oldest: i64) -> anyhow::Result<()> {
        let by_reward = self.config.advantage != GroupAdvantage::Gdpo;
        if !self.config.dynamic_sampling || !by_reward || matches!(self.config.overlong, Overlong::Penalty { .. }) {
            return Ok(());
        }
        let ended = sqlx::query!(
            r#"
            select draw as "draw!", count(*) as "drawn!", count(*) filter (where has_signal) as "with_signal!"
            from (
                select draw, count(distinct reward) > 1 as has_signal, bool_and(state = 'settled') as has_ended
                from rollout
                where run_id = $1 and state <> 'spent'
                group by draw, group_id
            ) of_group
            where draw > $2
            group by draw
            having bool_and(has_ended)
            "#,
            claim.run,
            oldest
        )
        .fetch_all(&self.trainer.pool)
        .await?;
        for draw in ended {
            let missing = i64::from(self.config.tasks_per_step) - draw.with_signal;
            let (drawn, missing) = (usize::try_from(draw.drawn)?, usize::try_from(missing).unwrap_or(0));
            self.add_tasks(claim, draw.draw, drawn, missing).await?;
        }
        Ok(())
    }

    /// The tasks of a draw, after the first `skip`.
    fn tasks_of(&self, draw: i64, skip: usize, count: usize) -> Vec<&str> {
        let chosen = choose(self.config.seed, draw, self.tasks.len(), skip, count);
        chosen
            .into_iter()
            .filter_map(|index| self.tasks.get(index))
            .map(String::as_str)
            .collect()
    }

    /// Posts the ends of rollouts to the log. What is repeated after a restart is the same events.
    pub async fn settle(&self, claim: &Claim) -> anyhow::Result<()> {
        let ids = post_ends(self.trainer, &self.tenant, claim.run).await?;
        if ids.is_empty() {
            return Ok(());
        }
        let mut transaction = claim.begin(&self.trainer.pool).await?;
        leases::mark_settled(&mut transaction, claim.run, &ids).await?;
        transaction.commit().await?;
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

/// Posts the ends of rollouts of runs that wait or are paused: their episodes would close without the
/// rewards meanwhile.
pub(crate) async fn settle_waiting(trainer: &Trainer) -> anyhow::Result<()> {
    let runs = sqlx::query!(
        r#"
        select r.id, p.tenant_id
        from run r join policy p on p.name = r.policy
        where r.policy = $1 and r.kind = 'grpo' and r.status in ('queued', 'paused')
          and exists (select from rollout o where o.run_id = r.id and o.state = 'rewarded')
        "#,
        trainer.policy
    )
    .fetch_all(&trainer.pool)
    .await?;
    for run in runs {
        let ids = post_ends(trainer, &run.tenant_id, run.id).await?;
        // an executor that begins meanwhile posts the same events
        leases::mark_settled(&mut *trainer.pool.acquire().await?, run.id, &ids).await?;
    }
    Ok(())
}

/// Posts the ends of a run's rollouts to the log. Returns which.
async fn post_ends(trainer: &Trainer, tenant: &str, run: Uuid) -> anyhow::Result<Vec<Uuid>> {
    let ended = sqlx::query!(
        r#"
        select id, reward from rollout
        where run_id = $1 and (state = 'rewarded' or state = 'failed' and attempt >= $2)
        "#,
        run,
        ATTEMPTS_MAX
    )
    .fetch_all(&trainer.pool)
    .await?;
    let ids: Vec<Uuid> = ended.iter().map(|row| row.id).collect();
    let ends = ended
        .into_iter()
        .map(|row| post_end(trainer, tenant, run, row.id, row.reward));
    stream::iter(ends)
        .buffer_unordered(SENDS_MAX)
        .try_collect::<Vec<()>>()
        .await
        .context("post the ends of rollouts to the log")?;
    Ok(ids)
}

async fn post_end(trainer: &Trainer, tenant: &str, run: Uuid, id: Uuid, reward: Option<f64>) -> anyhow::Result<()> {
    let (now, source) = (OffsetDateTime::now_utc(), format!("springtide/train/{run}"));
    if let Some(reward) = reward {
        let feedback = Feedback {
            id: feedback_id(id),
            target: Target::Episode(id),
            metric_name: METRIC.into(),
            value: Value::Float(reward),
            tags: BTreeMap::from([("run_id".into(), run.to_string())]),
        };
        let event = feedback.into_event(tenant, &*source, now);
        trainer.producer.send_event(&event).await?;
    }
    let end = EpisodeEnd { episode_id: id };
    let event = end.into_event(tenant, &*source, now);
    trainer.producer.send_event(&event).await?;
    Ok(())
}

/// Indices of the tasks of a draw, after the first `skip`: all tasks in a random order, again and again
/// in another one. The seed and the draw's number decide.
fn choose(seed: u64, draw: i64, tasks: usize, skip: usize, count: usize) -> Vec<usize> {
    let mut random = Random(Random(seed).draw() ^ draw.unsigned_abs());
    let mut chosen = Vec::new();
    while chosen.len() < skip + count && tasks > 0 {
        chosen.extend(random.choose(tasks, skip + count - chosen.len()));
    }
    chosen.split_off(skip.min(chosen.len()))
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
    fn tasks_are_added_to_a_draw_that_it_does_not_have_until_it_has_all() {
        let first = choose(7, 3, 10, 0, 4);
        assert_eq!(first, Random(Random(7).draw() ^ 3).choose(10, 4));
        let mut all = [first, choose(7, 3, 10, 4, 1), choose(7, 3, 10, 5, 5)].concat();
        let again = choose(7, 3, 10, 10, 10);
        assert!(again != all, "in another order");
        for mut round in [std::mem::take(&mut all), again] {
            round.sort_unstable();
            assert_eq!(round, (0..10).collect::<Vec<_>>());
        }
        assert_eq!(choose(7, 3, 1, 1, 3), [0, 0, 0]);
        assert!(choose(7, 3, 0, 0, 3).is_empty());
    }

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
