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

use crate::executor::{Executor, StepInputs, StepOutcome};
use crate::offline::{Execution, Failed, Stop};
use draws::Draws;
use harness::Harness;
use runs::run::Status;
use runs::sample::{Sample, Trajectory};
use runs::{api, leases};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

pub(super) async fn train(run: &Execution<'_>) -> anyhow::Result<()> {
    let (trainer, id) = (run.trainer, run.claim.run);
    let config: api::Config = run.config()?;
    let tasks = sqlx::query_scalar!("select id from task where run_id = $1 order by id", id)
        .fetch_all(&trainer.pool)
        .await?;
    let mut executor = run.open(&config.trainer, config.lora.as_ref(), config.seed).await?;
    let harness = Harness::new(trainer, id, run.schedule.priority, &executor.line, &config).await?;
    leases::give_up_interrupted(&trainer.pool, &run.claim, harness::HOLDER).await?;
    let mut draws = Draws::new(trainer, &config, tasks, &harness.bells).await?;
    let trained = tokio::select! {
        trained = make_steps(run, &mut executor, &mut draws, &config) => trained,
        Err(error) = harness.make_rollouts() => Err(error),
    };
    if let Err(error) = &trained
        && let Some(Stop::Paused | Stop::GivesWay(_)) = error.downcast_ref()
    {
        // their episodes would close without the rewards meanwhile
        draws.settle(&run.claim).await?;
    }
    trained
}

/// Makes steps until the run has ended or is to stop.
async fn make_steps(
    run: &Execution<'_>,
    executor: &mut Executor<'_>,
    draws: &mut Draws<'_>,
    config: &api::Config,
) -> anyhow::Result<()> {
    let trainer = executor.trainer;
    let mut empty = Empty {
        draws: draws.empty_before(executor).await?,
        quarantined: 0,
    };
    // of an execution before this one
    let outcome = outside_step(run, executor, draws).await?;
    if let StepOutcome::Published | StepOutcome::Empty = outcome {
        let draw = i64::try_from(executor.random.unwrap_or_default()).unwrap_or_default();
        leases::spend(&trainer.pool, &executor.claim, draw).await?;
    }
    while executor.steps_done < config.steps {
        run.check().await?;
        // rollouts of later steps go on while the fleet takes the head up
        if draws.are_spent(run.claim.run).await? {
            wait_until_served(run, executor).await?;
        }
        let started = Instant::now();
        let (draw, groups) = tokio::select! {
            gathered = groups::gather(executor, draws, config) => gathered?,
            stop = run.stopped() => return Err(stop),
        };
        let number = draw.number;
        let dropped = executor.drop_generations(&groups.dropped).await?;
        if groups.samples.is_empty() {
            leases::spend(&trainer.pool, &executor.claim, number).await?;
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
            executor.release(Status::Paused, &reason).await?;
            return Err(Stop::Ended.into());
        }
        let outcome = match executor.step(inputs).await? {
            StepOutcome::Waiting => outside_step(run, executor, draws).await?,
            outcome => outcome,
        };
        match outcome {
            StepOutcome::Published => {
                empty = Empty::default();
            }
            StepOutcome::Paused => return Err(Stop::Ended.into()),
            StepOutcome::Refused | StepOutcome::Waiting => {}
            StepOutcome::Empty => empty.add(quarantined.ids.len(), trainer.options.offline.empty_draws_max)?,
        }
        leases::spend(&trainer.pool, &executor.claim, number).await?;
    }
    run.succeed(executor).await
}

/// Waits for the trainer outside. Meanwhile rollouts of later draws end in time.
async fn outside_step(
    run: &Execution<'_>,
    executor: &mut Executor<'_>,
    draws: &Draws<'_>,
) -> anyhow::Result<StepOutcome> {
    loop {
        if let Some(outcome) = run.outside_look(executor).await? {
            return Ok(outcome);
        }
        leases::expire(&run.trainer.pool, &executor.claim).await?;
        draws.settle(&executor.claim).await?;
    }
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

/// Waits until the fleet serves the run's head.
async fn wait_until_served(run: &Execution<'_>, executor: &Executor<'_>) -> anyhow::Result<()> {
    let timeout = Duration::from_secs(run.trainer.options.offline.served_timeout_seconds);
    let mut started = Instant::now();
    let mut last = String::from("no answer yet");
    while started.elapsed() < timeout {
        let answer = tokio::select! {
            answer = served::version(run.trainer, run.claim.run, &executor.line) => answer,
            stop = run.stopped() => return Err(stop),
        };
        match answer {
            Ok(version) if version == executor.head => return Ok(()),
            Ok(version) => last = format!("it answers with version {version}"),
            // production has all slots, and rollouts wait
            Err(error) if served::is_timeout(&error) => started = Instant::now(),
            Err(error) => last = format!("{error:#}"),
        }
        run.check().await?;
        run.pause(Duration::from_millis(250)).await;
    }
    Err(Failed(format!(
        "the fleet did not serve version {} of line {} within {} s: {last}",
        executor.head,
        executor.line,
        timeout.as_secs()
    ))
    .into())
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
