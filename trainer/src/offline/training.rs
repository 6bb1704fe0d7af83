//! What runs that train on a dataset share: how they begin, and how a batch is read.

use super::{Failed, Read};
use crate::executor::{AdapterSetup, Executor};
use crate::learn::learner::thread::Handle;
use crate::trainer::Trainer;
use runs::api::create::line_of;
use runs::dataset::Member;
use runs::sample::{Sample, Turn};
use std::collections::{BTreeMap, HashMap};
use uuid::Uuid;

/// Claims a run and loads the head of its line, which begins at `base`. `None`: the run is paused or has
/// ended.
pub(super) async fn open<'a>(
    trainer: &'a Trainer,
    learner: &'a Handle,
    run: Uuid,
    base: Option<i64>,
    adapter: Option<AdapterSetup>,
) -> anyhow::Result<Option<Executor<'a>>> {
    let base = base.ok_or_else(|| Failed("the run has no base version: create it again with `base_version`".into()))?;
    let line = line_of(run);
    sqlx::query!(
        "insert into line (policy, line, head) values ($1, $2, $3) on conflict do nothing",
        trainer.policy,
        line,
        base
    )
    .execute(&trainer.pool)
    .await?;
    Executor::open(trainer, learner, run, &line, adapter).await
}

/// Obeys a person's request to pause or cancel a run between two steps. True: the execution has ended.
pub(super) async fn is_stopped(executor: &Executor<'_>) -> anyhow::Result<bool> {
    let requested = executor.claim.requested(&executor.trainer.pool).await?;
    match requested.as_deref() {
        None => Ok(false),
        Some("cancel") => executor
            .release("cancelled", "cancelled by request")
            .await
            .map(|()| true),
        Some(_) => executor.release("paused", "paused by request").await.map(|()| true),
    }
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
