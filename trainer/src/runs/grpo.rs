//! Offline runs: GRPO on a researcher's tasks, with rollouts from the same fleet that serves users.
//!
//! Rollouts use the public completions API at low priority and are logged like all traffic. Rewards
//! are feedback events on the log. The run trains on what arrived in the database, and publishes to
//! its own line, which users never get.
//!
//! ```text
//! rollout, grade   one completion of each prompt, which a grader rewards
//! leases           rollouts that a harness outside makes and rewards
//! groups           what is compared with what
//! ```

mod grade;
mod groups;
mod leases;
mod rollout;

use crate::api::{self, create::line_of};
use crate::learn::learner::thread::Handle;
use crate::learn::sample::{Sample, Trajectory};
use crate::runs::executor::{AdapterSetup, Executor, StepInputs, StepOutcome};
use crate::runs::grader;
use crate::runs::offline::{self, Configuration, Failed, IDLE};
use crate::runs::random::Random;
use crate::runs::schedule::Schedule;
use crate::runs::trainer::{Trainer, pause};
use crate::select;
use anyhow::Context;
use leases::Leases;
use rollout::{Client, Rolled, Rollout, Task};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

pub(super) async fn execute(
    trainer: &Trainer,
    learner: &Handle,
    id: Uuid,
    shutdown: &CancellationToken,
) -> anyhow::Result<()> {
    let Configuration {
        config,
        schedule,
        base_version,
    } = offline::configuration::<api::Config>(&trainer.pool, id).await?;
    if offline::waits(trainer, id, &schedule).await? {
        return Ok(());
    }
    let base = base_version.ok_or_else(|| Failed("the run has no base version".into()))?;
    let line = line_of(id);
    sqlx::query!(
        "insert into line (policy, line, head) values ($1, $2, $3) on conflict do nothing",
        trainer.policy,
        line,
        base
    )
    .execute(&trainer.pool)
    .await?;
    let tasks = sqlx::query_as!(
        Task,
        "select id, prompt, answer from task where run_id = $1 order by id",
        id
    )
    .fetch_all(&trainer.pool)
    .await?;
    let tasks: Vec<Arc<Task>> = tasks.into_iter().map(Arc::new).collect();
    let adapter = config.lora.clone().map(|lora| AdapterSetup {
        config: lora,
        seed: config.seed,
    });
    let Some(mut executor) = Executor::open(trainer, learner, id, &line, adapter).await? else {
        return Ok(());
    };
    let client = Client::new(trainer, id, &line, &config)?;
    let mut leases = match config.environment {
        Some(environment) => {
            let ids = tasks.iter().map(|task| task.id.clone()).collect();
            Some(Leases::new(trainer, &config, environment, ids).await?)
        }
        None => None,
    };
    let grading = grader::Context::new(trainer.sandboxes.clone());
    let mut empty = Empty::default();
    while executor.steps_done < config.steps {
        if shutdown.is_cancelled() {
            return Ok(());
        }
        match executor.claim.requested(&trainer.pool).await?.as_deref() {
            Some("cancel") => return executor.release("cancelled", "cancelled by request").await,
            Some(_) => return executor.release("paused", "paused by request").await,
            None => {}
        }
        if let Some(reason) = offline::reason_to_wait(trainer, id, &schedule).await? {
            return Ok(executor.claim.give_way(&trainer.pool, &reason).await?);
        }
        // harnesses go on with rollouts of later steps while the fleet takes the head up
        let goes_on = match &leases {
            Some(leases) => !leases.is_idle(id).await?,
            None => false,
        };
        if !goes_on && !wait_until_served(&client, &executor, &schedule, shutdown).await? {
            continue; // the top of the loop handles the request to stop
        }
        let started = Instant::now();
        let drawn = tokio::select! {
            drawn = draw(&executor, &client, &grading, &config, &tasks, &mut leases) => drawn?,
            stop = stop_requested(&executor, &schedule, shutdown) => {
                stop?;
                continue;
            }
        };
        let Drawn { samples, next, .. } = drawn;
        let groups = groups::score(&executor, config.advantage, config.staleness_max, samples).await?;
        if groups.samples.is_empty() {
            executor.random = Some(next);
            spend(&executor, leases.as_ref(), drawn.draw).await?;
            empty.add(0, trainer.options.offline.empty_draws_max)?;
            continue;
        }
        let trajectories: BTreeSet<Trajectory> = groups.samples.iter().map(Sample::trajectory).collect();
        let count = groups.samples.len();
        let inputs = StepInputs {
            settings: config.step_settings(),
            limits: trainer.options.offline.guards,
            baselines: BTreeMap::new(),
            random: next,
            notes: json!({
                "rollouts": drawn.rollouts,
                "rollouts_failed": drawn.lost.values().sum::<u64>(),
                "lost": drawn.lost,
                "trajectories": trajectories.len(),
                "reward_mean": groups.reward_mean,
                "staleness": groups.staleness,
                "dropped": groups.dropped,
                "rollout_seconds": started.elapsed().as_secs_f64(),
            }),
        };
        let quarantined = executor
            .accumulate(groups.samples, groups.advantages, inputs.settings, inputs.limits)
            .await?;
        if let Some(reason) = quarantined.reason_to_pause(count, executor.head) {
            return executor.release("paused", &reason).await;
        }
        match executor.step(inputs).await? {
            StepOutcome::Published => empty = Empty::default(),
            StepOutcome::Paused => return Ok(()),
            StepOutcome::Refused => executor.random = Some(next),
            StepOutcome::Empty => {
                executor.random = Some(next);
                empty.add(quarantined.ids.len(), trainer.options.offline.empty_draws_max)?;
            }
        }
        spend(&executor, leases.as_ref(), drawn.draw).await?;
    }
    let done = format!("{} steps; head is version {}", executor.steps_done, executor.head);
    executor.release("succeeded", &done).await
}

/// What a step may be made of.
struct Drawn {
    samples: Vec<Sample>,
    /// Rollouts that have a reward.
    rollouts: usize,
    /// Rollouts that have none, or that nothing can be learned from, by why.
    lost: BTreeMap<String, u64>,
    /// The random state after it.
    next: u64,
    /// The draw of leased rollouts.
    draw: Option<i64>,
}

/// Rollouts of the next tasks, rewarded.
async fn draw(
    executor: &Executor<'_>,
    client: &Client<'_>,
    grading: &grader::Context,
    config: &api::Config,
    tasks: &[Arc<Task>],
    leases: &mut Option<Leases<'_>>,
) -> anyhow::Result<Drawn> {
    if let Some(leases) = leases {
        let draw = leases.draw(executor).await?;
        return Ok(Drawn {
            samples: draw.samples,
            rollouts: draw.rewarded,
            lost: draw.lost,
            next: draw.number.unsigned_abs(),
            draw: Some(draw.number),
        });
    }
    let mut random = Random(executor.random.unwrap_or(config.seed));
    let chosen = random.choose(tasks.len(), config.tasks_per_step as usize);
    let chosen: Vec<Arc<Task>> = chosen.into_iter().filter_map(|i| tasks.get(i).cloned()).collect();
    let (rolled, samples) = roll_out(executor, client, grading, config, &chosen).await?;
    let mut lost: BTreeMap<String, u64> = BTreeMap::from([("request_failed".to_owned(), rolled.failed as u64)]);
    lost.extend(
        rolled
            .ungraded
            .iter()
            .map(|(code, count)| ((*code).to_owned(), *count as u64)),
    );
    Ok(Drawn {
        samples,
        rollouts: rolled.rollouts.len(),
        lost: lost.into_iter().filter(|(_, count)| *count > 0).collect(),
        next: random.0,
        draw: None,
    })
}

/// No further step is made of a draw of leased rollouts.
async fn spend(executor: &Executor<'_>, leases: Option<&Leases<'_>>, draw: Option<i64>) -> anyhow::Result<()> {
    match (leases, draw) {
        (Some(leases), Some(draw)) => leases.spend(&executor.claim, draw).await,
        _ => Ok(()),
    }
}

/// Draws in a row without a gradient.
#[derive(Debug, Default)]
struct Empty {
    draws: u32,
    /// Rollouts that were quarantined. Their groups were left out with them.
    quarantined: usize,
}

impl Empty {
    /// Counts a draw. Fails the run if that makes `draws_max`.
    fn add(&mut self, quarantined: usize, draws_max: u32) -> Result<(), Failed> {
        self.draws += 1;
        self.quarantined += quarantined;
        let draws = self.draws;
        if draws < draws_max {
            return Ok(());
        }
        Err(Failed(match self.quarantined {
            0 => format!(
                "no group of the last {draws} draws had rollouts with different rewards: there is nothing to learn from"
            ),
            quarantined => format!(
                "no group of the last {draws} draws had a gradient. {quarantined} rollouts were quarantined and their \
                 groups left out: their log-probabilities are not those of their version"
            ),
        }))
    }
}

/// Waits until the fleet serves the run's head. False: the run or the process is to stop.
async fn wait_until_served(
    client: &Client<'_>,
    executor: &Executor<'_>,
    schedule: &Schedule,
    shutdown: &CancellationToken,
) -> anyhow::Result<bool> {
    let timeout = Duration::from_secs(executor.trainer.options.offline.served_timeout_seconds);
    let started = Instant::now();
    let mut last = String::from("no answer yet");
    while started.elapsed() < timeout {
        match client.served_version().await {
            Ok(version) if version == executor.head => return Ok(true),
            Ok(version) => last = format!("it answers with version {version}"),
            Err(error) => last = format!("{error:#}"),
        }
        if is_to_stop(executor, schedule).await? || !pause(shutdown, Duration::from_millis(250)).await {
            return Ok(false);
        }
    }
    Err(Failed(format!(
        "the fleet did not serve version {} of line {} within {} s: {last}",
        executor.head,
        executor.line,
        timeout.as_secs()
    ))
    .into())
}

/// Rollouts of the chosen tasks, graded, and the samples that arrived in the database. A request or a
/// grade that fails costs its rollouts; the others of their groups are compared with each other.
async fn roll_out(
    executor: &Executor<'_>,
    client: &Client<'_>,
    grading: &grader::Context,
    config: &api::Config,
    tasks: &[Arc<Task>],
) -> anyhow::Result<(Rolled, Vec<Sample>)> {
    let mut rolled = client.roll_out(tasks).await?;
    if let Some(error) = &rolled.first_error {
        let message = format!("{} rollouts failed, the first one because of: {error}", rolled.failed);
        executor.append_event("warn", &message).await?;
    }
    grade::grade_and_post(executor, grading, &config.grader, &mut rolled).await?;
    let arrived = wait_for_arrival(executor, config.staleness_max, &rolled.rollouts).await?;
    Ok((rolled, arrived))
}

/// Resolves when the process or the run is to stop. Rollouts can take minutes, so they are
/// interrupted: the step then begins anew.
async fn stop_requested(
    executor: &Executor<'_>,
    schedule: &Schedule,
    shutdown: &CancellationToken,
) -> anyhow::Result<()> {
    while !is_to_stop(executor, schedule).await? && pause(shutdown, IDLE).await {}
    Ok(())
}

/// Whether a person has asked the run to stop, or it must give way.
async fn is_to_stop(executor: &Executor<'_>, schedule: &Schedule) -> anyhow::Result<bool> {
    let (trainer, claim) = (executor.trainer, &executor.claim);
    let requested = claim.requested(&trainer.pool).await?.is_some();
    Ok(requested || offline::reason_to_wait(trainer, claim.run, schedule).await?.is_some())
}

/// Reads the graded rollouts from the database. Waits until all have arrived or the timeout ends.
async fn wait_for_arrival(
    executor: &Executor<'_>,
    staleness_max: u32,
    rollouts: &[Rollout],
) -> anyhow::Result<Vec<Sample>> {
    let trainer = executor.trainer;
    let versions = select::versions(&trainer.pool, &trainer.policy, executor.head, staleness_max).await?;
    let ids: Vec<Uuid> = rollouts.iter().map(|r| r.generation).collect();
    let timeout = Duration::from_secs(trainer.options.offline.arrival_timeout_seconds);
    let started = Instant::now();
    let mut dropped = 0;
    loop {
        let (pool, limits) = (&trainer.pool, &executor.model_limits);
        let assembled =
            select::rollouts::completions(pool, &trainer.payloads, executor.claim.run, &versions, &ids, limits)
                .await
                .context("read the rollouts")?;
        let counts = executor.drop_generations(&assembled.broken).await?;
        dropped += counts.values().sum::<u64>() as usize;
        let samples = assembled.samples;
        if samples.len() + dropped == ids.len() {
            return Ok(samples);
        }
        if started.elapsed() > timeout {
            let message = format!(
                "{} of {} graded rollouts did not become trajectories within {} s",
                ids.len() - dropped - samples.len(),
                ids.len(),
                timeout.as_secs()
            );
            executor.append_event("warn", &message).await?;
            return Ok(samples);
        }
        tokio::time::sleep(Duration::from_millis(trainer.options.poll_ms)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_without_gradients_fails_with_its_cause() {
        let mut empty = Empty::default();
        assert!(empty.add(0, 2).is_ok());
        let reason = empty.add(0, 2).unwrap_err().0;
        assert!(reason.contains("different rewards"), "{reason}");
        let mut empty = Empty::default();
        assert!(empty.add(3, 2).is_ok());
        let reason = empty.add(1, 2).unwrap_err().0;
        assert!(reason.contains("4 rollouts were quarantined"), "{reason}");
    }
}
