//! Offline runs: GRPO on a researcher's tasks, with rollouts from the same fleet that serves users.
//!
//! Rollouts use the public API at low priority and are logged like all traffic. Rewards are feedback
//! events on the log. The run trains on what arrived in the database, and publishes to its own line,
//! which users never get. Rollouts and steps go on at the same time.
//!
//! ```text
//! draws     which rollouts are offered, how they end, and which the next step is made of
//! harness   makes rollouts beside the steps, unless a harness outside does (push: by an environment)
//! groups    what is compared with what
//! ```

pub(crate) mod draws;
mod groups;
mod harness;
mod push;
mod served;

use crate::executor::{AdapterSetup, Executor, StepInputs, StepOutcome};
use crate::learn::learner::thread::Handle;
use crate::offline::{self, Configuration, Failed, IDLE};
use crate::trainer::{Trainer, pause};
use draws::Draws;
use harness::Harness;
use runs::api;
use runs::api::create::line_of;
use runs::sample::{Sample, Trajectory};
use runs::schedule::Schedule;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
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
    let tasks = sqlx::query_scalar!("select id from task where run_id = $1 order by id", id)
        .fetch_all(&trainer.pool)
        .await?;
    let adapter = config.lora.clone().map(|lora| AdapterSetup {
        config: lora,
        seed: config.seed,
    });
    let Some(mut executor) = Executor::open(trainer, learner, id, &line, adapter).await? else {
        return Ok(());
    };
    let claim = executor.claim;
    let harness = Harness::new(trainer, id, schedule.priority, &line, &config).await?;
    harness.give_up_interrupted(&claim).await?;
    let draws = Draws::new(trainer, &config, tasks).await?;
    tokio::select! {
        trained = train(&mut executor, draws, &config, &schedule, shutdown) => trained,
        Err(error) = harness.make_rollouts() => Err(error),
    }
}

/// Makes steps until the run has ended or is to stop.
async fn train(
    executor: &mut Executor<'_>,
    mut draws: Draws<'_>,
    config: &api::Config,
    schedule: &Schedule,
    shutdown: &CancellationToken,
) -> anyhow::Result<()> {
    let (trainer, id) = (executor.trainer, executor.claim.run);
    let mut empty = Empty {
        draws: draws.empty_before(executor).await?,
        quarantined: 0,
    };
    while executor.steps_done < config.steps {
        if shutdown.is_cancelled() {
            return Ok(());
        }
        match executor.claim.requested(&trainer.pool).await?.as_deref() {
            Some("cancel") => return executor.release("cancelled", "cancelled by request").await,
            Some(_) => {
                draws.settle(&executor.claim).await?;
                return executor.release("paused", "paused by request").await;
            }
            None => {}
        }
        if let Some(reason) = offline::reason_to_wait(trainer, id, schedule).await? {
            draws.settle(&executor.claim).await?;
            return Ok(executor.claim.give_way(&trainer.pool, &reason).await?);
        }
        // rollouts of later steps go on while the fleet takes the head up
        if draws.are_spent(id).await? && !wait_until_served(executor, schedule, shutdown).await? {
            continue; // the top of the loop handles the request to stop
        }
        let started = Instant::now();
        let (draw, groups) = tokio::select! {
            gathered = groups::gather(executor, &mut draws, config) => gathered?,
            stop = stop_requested(executor, schedule, shutdown) => {
                stop?;
                continue;
            }
        };
        let number = draw.number;
        let dropped = executor.drop_generations(&groups.dropped).await?;
        if groups.samples.is_empty() {
            draws.spend(&executor.claim, number).await?;
            empty.add(0, trainer.options.offline.empty_draws_max)?;
            continue;
        }
        let trajectories: BTreeSet<Trajectory> = groups.samples.iter().map(Sample::trajectory).collect();
        let count = groups.samples.len();
        let inputs = StepInputs {
            settings: config.step_settings(),
            limits: trainer.options.offline.guards,
            baselines: BTreeMap::new(),
            random: number.unsigned_abs(),
            notes: json!({
                "draw": number,
                "rollouts": draw.graded.len(),
                "rollouts_failed": draw.lost.values().sum::<u64>(),
                "lost": draw.lost,
                "trajectories": trajectories.len(),
                "groups_drawn": draw.groups.len(),
                "groups_without_signal": draw.groups.len() - groups.groups,
                "reward_mean": groups.reward_mean,
                "reward_part_means": draw.part_means(),
                "staleness": groups.staleness,
                "dropped": dropped,
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
            StepOutcome::Published => {
                empty = Empty::default();
            }
            StepOutcome::Paused => return Ok(()),
            StepOutcome::Refused => {}
            StepOutcome::Empty => empty.add(quarantined.ids.len(), trainer.options.offline.empty_draws_max)?,
        }
        draws.spend(&executor.claim, number).await?;
    }
    let done = format!("{} steps; head is version {}", executor.steps_done, executor.head);
    executor.release("succeeded", &done).await
}

/// Draws in a row without a gradient.
#[derive(Debug, Default)]
struct Empty {
    draws: u32,
    /// Rollouts that this execution quarantined. Their groups were left out with them.
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
    executor: &Executor<'_>,
    schedule: &Schedule,
    shutdown: &CancellationToken,
) -> anyhow::Result<bool> {
    let timeout = Duration::from_secs(executor.trainer.options.offline.served_timeout_seconds);
    let mut started = Instant::now();
    let mut last = String::from("no answer yet");
    while started.elapsed() < timeout {
        let answer = tokio::select! {
            answer = served::version(executor.trainer, executor.claim.run, &executor.line) => answer,
            stop = stop_requested(executor, schedule, shutdown) => return stop.map(|()| false),
        };
        match answer {
            Ok(version) if version == executor.head => return Ok(true),
            Ok(version) => last = format!("it answers with version {version}"),
            // production has all slots, and rollouts wait
            Err(error) if served::is_timeout(&error) => started = Instant::now(),
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
