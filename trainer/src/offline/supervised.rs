//! Supervised runs: cross-entropy on the trajectories of a dataset, exactly as their tokens were
//! logged. Prompts are context; sampled tokens are trained on where `train_mask` allows it. With the
//! target `demonstration` what the user wrote instead takes the place of what was sampled.
//!
//! A step takes a number of trajectories, or as many as fit into a budget of tokens. Whole trajectories
//! go through the model one after another without padding, and none sees another
//! ([`crate::learn::batch`]), so there is nothing to pack.
//!
//! Nothing is written about generations but their uses: their disposition is the realtime ledger's.

use super::demonstrations::Demonstrations;
use super::order::{self, Order, POSITION};
use super::training::{self, Batch};
use super::{
    Configuration, Failed, configuration, dataset_of, generations_of, pages_of, read_samples, reason_to_wait, waits,
};
use crate::executor::{AdapterSetup, StepInputs, StepOutcome};
use crate::learn::learner::thread::Handle;
use crate::trainer::Trainer;
use anyhow::Context;
use runs::api::offline::{Supervised, Target};
use runs::dataset::{self, Member, rows};
use runs::select::Answers;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
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
    } = configuration::<Supervised>(&trainer.pool, id).await?;
    if waits(trainer, id, &schedule).await? {
        return Ok(());
    }
    let adapter = config.lora.clone().map(|lora| AdapterSetup {
        config: lora,
        seed: config.seed,
    });
    let Some(mut executor) = training::open(trainer, learner, id, base_version, adapter).await? else {
        return Ok(());
    };
    let dataset = dataset_of(trainer, &config.dataset).await?;
    let mut connection = trainer.pool.acquire().await?;
    let mut members = dataset::available(&mut connection, &dataset, None).await?;
    drop(connection);
    let demonstrations = match config.target {
        Target::Sampled => None,
        Target::Demonstration => {
            let checkpoint = learner.with(|learner| Ok(Arc::clone(learner.checkpoint()))).await?;
            let limits = &executor.model_limits;
            Some(Demonstrations::new(&trainer.pool, &checkpoint, limits, &dataset)?)
        }
    };
    if let Some(demonstrations) = &demonstrations {
        let of = members.len();
        members = demonstrations.with_any(&members).await?;
        let message = format!("{} of {of} trajectories have a demonstration", members.len());
        executor.append_event("info", &message).await?;
        if members.is_empty() {
            let reason = format!(
                "no trajectory of dataset {} has a demonstration: send them as feedback with the metric `demonstration`, and \
                 make the dataset after that",
                config.dataset
            );
            return Err(Failed(reason).into());
        }
    }
    let answers = match config.target {
        Target::Sampled => Answers::Sampled,
        Target::Demonstration => Answers::Any,
    };
    let mut order = Order::new(members, config.seed);
    let mut position = order::position(&executor).await?;
    let steps = config.steps.unwrap_or(1);
    let mut without_step = 0;
    while executor.steps_done < steps {
        if shutdown.is_cancelled() {
            return Ok(());
        }
        if training::is_stopped(&executor).await? {
            return Ok(());
        }
        if let Some(reason) = reason_to_wait(trainer, id, &schedule).await? {
            return Ok(executor.claim.give_way(&trainer.pool, &reason).await?);
        }
        if without_step > order.len() {
            let reason = format!(
                "no batch of dataset {} made a step; the events of this run say why",
                config.dataset
            );
            return Err(Failed(reason).into());
        }
        let count = match config.tokens_per_step {
            None => config.batch_size() as usize,
            Some(budget) => fitting(trainer, order.rest(&mut position), budget).await?,
        };
        let batch = order.take(&mut position, count);
        let mut read = Batch::new(&batch);
        for slice in generations_of(&batch) {
            for page in pages_of(trainer, &slice).await? {
                let claim = executor.claim;
                let limits = executor.model_limits.clone();
                let Some(mut page) = read_samples(trainer, &claim, &page, &limits, answers, shutdown).await? else {
                    return Ok(());
                };
                if let Some(demonstrations) = &demonstrations {
                    page = demonstrations.instead(page).await?;
                }
                let samples = read.add(page);
                if samples.is_empty() {
                    continue;
                }
                let weights = vec![1.0; samples.len()];
                let limits = trainer.options.offline.guards;
                executor
                    .accumulate(samples, weights, config.step_settings(), limits)
                    .await?;
            }
        }
        if read.samples == 0 {
            without_step += 1;
            let why = json!({"refused": read.refused, "missing": read.missing});
            let message = format!("a batch of pass {} has nothing to train on: {why}", position.pass + 1);
            executor.append_event("warn", &message).await?;
            continue;
        }
        let inputs = StepInputs {
            settings: config.step_settings(),
            limits: trainer.options.offline.guards,
            baselines: BTreeMap::new(),
            random: 0,
            notes: json!({
                "dataset": config.dataset,
                "pass": position.pass + 1,
                POSITION: position,
                "refused": read.refused,
                "missing": read.missing,
            }),
        };
        match executor.step(inputs).await? {
            StepOutcome::Published => without_step = 0,
            StepOutcome::Paused => return Ok(()),
            StepOutcome::Refused | StepOutcome::Empty => without_step += 1,
        }
    }
    let done = format!("{} steps; head is version {}", executor.steps_done, executor.head);
    executor.release("succeeded", &done).await
}

/// Trajectories whose sizes are read for one step, so the most that a step has.
const STEP_TRAJECTORIES_MAX: usize = 4096;

/// How many of the next trajectories fit into a step of so many tokens: at least one.
async fn fitting(trainer: &Trainer, next: &[Member], budget: u64) -> anyhow::Result<usize> {
    let next = &next[..next.len().min(STEP_TRAJECTORIES_MAX)];
    let mut connection = trainer.pool.acquire().await?;
    let mut sizes = BTreeMap::new();
    for slice in generations_of(next) {
        let read = rows::tokens(&mut connection, &slice).await;
        sizes.extend(read.context("read the sizes of generations")?);
    }
    Ok(fit(next, &sizes, budget))
}

/// A trajectory has the tokens of its longest turn with its context. `sizes`: tokens by generation; those
/// that are gone have none.
fn fit(next: &[Member], sizes: &BTreeMap<Uuid, u64>, budget: u64) -> usize {
    let mut sum: u64 = 0;
    let fits = |member: &&Member| {
        let turns = member.generations.iter().filter_map(|id| sizes.get(id));
        sum = sum.saturating_add(turns.max().copied().unwrap_or(0));
        sum <= budget
    };
    next.iter().take_while(fits).count().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_has_the_trajectories_that_fit_into_its_tokens_and_at_least_one() {
        let member = |ids: &[u128]| Member {
            episode: None,
            generations: ids.iter().map(|&id| Uuid::from_u128(id)).collect(),
        };
        let members = [member(&[1]), member(&[2, 3]), member(&[4]), member(&[5])];
        let sizes: BTreeMap<Uuid, u64> = [(1, 100), (2, 50), (3, 200), (5, 1)]
            .map(|(id, tokens)| (Uuid::from_u128(id), tokens))
            .into();
        assert_eq!(fit(&members, &sizes, 99), 1, "a long one alone");
        assert_eq!(fit(&members, &sizes, 299), 1);
        assert_eq!(
            fit(&members, &sizes, 300),
            3,
            "the longest turn counts, and what is gone is free"
        );
        assert_eq!(fit(&members, &sizes, 301), 4);
        assert_eq!(fit(&members[3..], &sizes, 1000), 1);
    }
}
