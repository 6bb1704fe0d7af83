//! Supervised runs: cross-entropy on the trajectories of a dataset, exactly as their tokens were
//! logged. Prompts are context; sampled tokens are trained on where `train_mask` allows it. With the
//! target `demonstration` what the user wrote instead takes the place of what was sampled.
//!
//! A step takes a number of trajectories, or as many as fit into a budget of tokens. Whole trajectories
//! go through the model one after another without padding, and none sees another
//! ([`crate::learn::batch`]), so there is nothing to pack.
//!
//! Nothing is written about generations but their uses: their disposition is the realtime ledger's.

use super::Failed;
use super::demonstrations::Demonstrations;
use super::execution::Execution;
use super::order::{Order, Position};
use super::pages::{Pages, SIZED_AT_ONCE, generations_of};
use super::training::{self, Accumulated, Batch, Batches, Plan};
use crate::executor::Executor;
use crate::trainer::Trainer;
use anyhow::Context;
use runs::api::offline::{Supervised, Target};
use runs::dataset::{Member, rows};
use runs::select::Answers;
use serde_json::json;
use std::collections::BTreeMap;
use uuid::Uuid;

pub(super) async fn train(run: &Execution<'_>) -> anyhow::Result<()> {
    let config: Supervised = run.config()?;
    let plan = Plan {
        dataset: &config.dataset,
        steps: config.steps.unwrap_or(1),
        settings: config.step_settings(),
        seed: config.seed,
        lora: config.lora.as_ref(),
        trainer: &config.trainer,
    };
    let executor = run.open(plan.trainer, plan.lora, plan.seed).await?;
    let (dataset, mut members) = run.dataset(&config.dataset, None).await?;
    let demonstrations = match config.target {
        Target::Sampled => None,
        Target::Demonstration => Some(Demonstrations::new(
            &run.trainer.pool,
            &executor.model_limits,
            &dataset,
        )?),
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
    let batches = Trajectories {
        run,
        config: &config,
        demonstrations,
    };
    training::make_steps(run, executor, plan, members, batches).await
}

/// The trajectories of a dataset, with what is learned from them.
struct Trajectories<'a> {
    run: &'a Execution<'a>,
    config: &'a Supervised,
    /// `None`: what was sampled.
    demonstrations: Option<Demonstrations>,
}

impl Batches for Trajectories<'_> {
    type Unit = Member;

    async fn accumulate(
        &mut self,
        executor: &mut Executor<'_>,
        units: &mut Order<Member>,
        position: &mut Position,
    ) -> anyhow::Result<Accumulated> {
        let (trainer, config) = (self.run.trainer, self.config);
        let answers = match self.demonstrations {
            None => Answers::Sampled,
            Some(_) => Answers::Any,
        };
        let count = match config.tokens_per_step {
            None => config.batch_size() as usize,
            Some(budget) => fitting(trainer, units.rest(position), budget).await?,
        };
        let members = units.take(position, count);
        let mut batch = Batch::new(&members);
        let mut pages = Pages::new(self.run, generations_of(&members));
        // a trainer outside gets a session as a whole, though it is read in pages
        let mut whole = Vec::new();
        while let Some(mut page) = pages.read(&executor.model_limits, answers).await? {
            if let Some(demonstrations) = &self.demonstrations {
                page = demonstrations.instead(page).await?;
            }
            let samples = batch.add(page);
            if samples.is_empty() {
                continue;
            }
            if executor.outside.is_some() {
                whole.extend(samples);
                continue;
            }
            let (weights, limits) = (vec![1.0; samples.len()], trainer.options.offline.guards);
            executor
                .accumulate(samples, weights, config.step_settings(), limits)
                .await?;
        }
        if !whole.is_empty() {
            let (weights, limits) = (vec![1.0; whole.len()], trainer.options.offline.guards);
            executor
                .accumulate(whole, weights, config.step_settings(), limits)
                .await?;
        }
        Ok(Accumulated {
            loss: None,
            is_empty: batch.samples == 0,
            notes: json!({"refused": batch.refused, "missing": batch.missing}),
        })
    }
}

/// Trajectories whose sizes are read for one step, so the most that a step has.
const STEP_TRAJECTORIES_MAX: usize = 4096;

/// How many of the next trajectories fit into a step of so many tokens: at least one.
async fn fitting(trainer: &Trainer, next: &[Member], budget: u64) -> anyhow::Result<usize> {
    let next = &next[..next.len().min(STEP_TRAJECTORIES_MAX)];
    let mut connection = trainer.pool.acquire().await?;
    let mut sizes = BTreeMap::new();
    for slice in generations_of(next).chunks(SIZED_AT_ONCE) {
        let read = rows::tokens(&mut connection, slice).await;
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
