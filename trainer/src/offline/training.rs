//! What runs that train on a dataset share: their steps, and how a batch is read.

use super::Failed;
use super::execution::{Execution, Stop};
use super::order::{self, Order, POSITION, Position, Unit};
use super::pages::Read;
use crate::executor::{Executor, StepInputs, StepOutcome};
use runs::dataset::{Member, Reference};
use runs::door::TrainedBy;
use runs::sample::{Sample, Turn};
use runs::settings::StepSettings;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use uuid::Uuid;

/// What a run that trains on a dataset was asked for, whatever its kind.
pub(super) struct Plan<'a> {
    pub dataset: &'a Reference,
    pub steps: i64,
    pub settings: StepSettings,
    pub seed: u64,
    pub lora: Option<&'a model::lora::Config>,
    pub trainer: &'a TrainedBy,
}

/// What a kind does with the units of a dataset.
pub(super) trait Batches {
    type Unit: Unit + Send + Sync;

    /// Adds the gradients of the next batch to the executor's sums.
    async fn accumulate(
        &mut self,
        executor: &mut Executor<'_>,
        units: &mut Order<Self::Unit>,
        position: &mut Position,
    ) -> anyhow::Result<Accumulated>;
}

/// A batch whose gradients were added.
pub(super) struct Accumulated {
    /// `None`: the learner's own.
    pub loss: Option<f64>,
    pub is_empty: bool,
    /// For the step: what was left out, and what was measured.
    pub notes: Value,
}

/// Makes the steps of a run, each on the next batch of `units`.
pub(super) async fn make_steps<B: Batches>(
    run: &Execution<'_>,
    mut executor: Executor<'_>,
    plan: Plan<'_>,
    units: Vec<B::Unit>,
    mut batches: B,
) -> anyhow::Result<()> {
    let mut units = Order::new(units, plan.seed);
    run.outside_step(&mut executor).await?; // of an execution before this one
    let mut position = order::position(&executor).await?;
    let mut without_step = 0;
    while executor.steps_done < plan.steps {
        run.check().await?;
        if without_step > units.len() {
            let reason = format!(
                "no batch of dataset {} made a step; the events of this run say why",
                plan.dataset
            );
            return Err(Failed(reason).into());
        }
        without_step += 1;
        let batch = batches.accumulate(&mut executor, &mut units, &mut position).await?;
        let (pass, mut notes) = (position.pass + 1, batch.notes);
        if batch.is_empty {
            let message = format!("a batch of pass {pass} has nothing to train on: {notes}");
            executor.append_event("warn", &message).await?;
            continue;
        }
        notes["dataset"] = json!(plan.dataset);
        notes["pass"] = json!(pass);
        notes[POSITION] = json!(position);
        let inputs = StepInputs {
            settings: plan.settings,
            limits: run.trainer.options.offline.guards,
            baselines: BTreeMap::new(),
            random: 0,
            notes,
        };
        let outcome = match executor.step_with_loss(inputs, batch.loss).await? {
            StepOutcome::Waiting => run.outside_step(&mut executor).await?,
            outcome => outcome,
        };
        match outcome {
            StepOutcome::Published => without_step = 0,
            StepOutcome::Paused => return Err(Stop::Ended.into()),
            StepOutcome::Refused | StepOutcome::Empty | StepOutcome::Waiting => {}
        }
    }
    run.succeed(&executor).await
}

/// A batch while its generations are read.
#[derive(Debug)]
pub(super) struct Batch {
    /// Of the episodes.
    turns: HashMap<Uuid, Turn>,
    pub samples: usize,
    /// Generations that may not be used, by code.
    pub refused: BTreeMap<String, usize>,
    pub missing: usize,
}

impl Batch {
    pub(super) fn new(members: &[Member]) -> Self {
        let turns_of = |member: &Member| {
            let episode = member.episode;
            let turns = member.generations.clone().into_iter().enumerate();
            turns.filter_map(move |(index, id)| {
                let rewards = [].into();
                let turn = episode.map(|episode| Turn {
                    episode,
                    index,
                    rewards,
                });
                Some((id, turn?))
            })
        };
        Batch {
            turns: members.iter().flat_map(turns_of).collect(),
            samples: 0,
            refused: BTreeMap::new(),
            missing: 0,
        }
    }

    /// The samples of a page, to be trained on.
    pub(super) fn add(&mut self, page: Read) -> Vec<Sample> {
        self.samples += page.samples.len();
        self.missing += page.missing;
        for (code, ids) in page.refused {
            *self.refused.entry(code).or_default() += ids.len();
        }
        let with_turn = |sample: Sample| {
            let turn = self.turns.get(&sample.generation).cloned();
            supervised(Sample { turn, ..sample })
        };
        page.samples.into_iter().map(with_turn).collect()
    }
}

/// The sample for the model's own distribution: however its tokens were sampled, they are what the
/// model is to say.
pub(super) fn supervised(sample: Sample) -> Sample {
    Sample {
        temperature: 1.0,
        behavior: None,
        experts: None,
        kept: None,
        typed: None,
        suppressed: false,
        weight: 1.0,
        group: None,
        ..sample
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_of_an_episode_are_of_one_trajectory() {
        let session = Member {
            episode: Some(Uuid::from_u128(9)),
            generations: vec![Uuid::from_u128(1), Uuid::from_u128(2)],
        };
        let single = Member {
            episode: None,
            generations: vec![Uuid::from_u128(5)],
        };
        let mut batch = Batch::new(&[single, session]);
        let samples = [1, 2, 5].map(|id| Sample {
            generation: Uuid::from_u128(id),
            ..Sample::example()
        });
        let page = Read {
            samples: samples.into(),
            ..Default::default()
        };
        let trajectories: Vec<_> = batch.add(page).iter().map(Sample::trajectory).collect();
        assert_eq!(trajectories[0], trajectories[1]);
        assert_ne!(trajectories[0], trajectories[2]);
    }

    #[test]
    fn a_supervised_sample_is_of_the_models_own_distribution() {
        let logged = Sample {
            temperature: 0.7,
            suppressed: true,
            weight: 3.0,
            mask: vec![false],
            ..Sample::example()
        };
        let sample = supervised(logged.clone());
        assert_eq!(
            (sample.temperature, sample.suppressed, sample.weight),
            (1.0, false, 1.0)
        );
        assert_eq!(
            (sample.prompt, sample.tokens, sample.mask),
            (logged.prompt, logged.tokens, logged.mask)
        );
    }
}
