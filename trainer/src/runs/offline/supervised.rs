//! Supervised runs: cross-entropy on the trajectories of a dataset, exactly as their tokens were
//! logged. Prompts are context; sampled tokens are trained on where `train_mask` allows it.
//!
//! The order of a pass is by a hash of the seed, the pass and the trajectory's last generation. Each
//! step notes the trajectory that it ended with, and a restart goes on behind its hash. So every
//! trajectory that is still there has its turn once in a pass, whatever has expired meanwhile.
//!
//! Nothing is written about generations but their uses: their disposition is the realtime ledger's.

use super::{
    Configuration, Failed, configuration, dataset_of, generations_of, pages_of, read_samples, reason_to_wait, waits,
};
use crate::api::create::line_of;
use crate::api::offline::Supervised;
use crate::dataset::{self, Member};
use crate::learn::learner::thread::Handle;
use crate::learn::sample::{Sample, Turn};
use crate::runs::executor::{AdapterSetup, Executor, StepInputs, StepOutcome};
use crate::runs::trainer::Trainer;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::{BTreeMap, HashMap};
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
    let base = base_version
        .ok_or_else(|| Failed("the run has no base version: create it again with `base_version`".into()))?;
    let line = line_of(id);
    sqlx::query!(
        "insert into line (policy, line, head) values ($1, $2, $3) on conflict do nothing",
        trainer.policy,
        line,
        base
    )
    .execute(&trainer.pool)
    .await?;
    let adapter = config.lora.clone().map(|lora| AdapterSetup {
        config: lora,
        seed: config.seed,
    });
    let Some(mut executor) = Executor::open(trainer, learner, id, &line, adapter).await? else {
        return Ok(());
    };
    let dataset = dataset_of(trainer, &config.dataset).await?;
    let mut connection = trainer.pool.acquire().await?;
    let members = dataset::available(&mut connection, &dataset, None).await?;
    drop(connection);
    let mut order = Order::new(members, config.seed, config.batch_size as usize);
    let mut position = position(&executor).await?;
    let steps = config.steps.unwrap_or(1);
    let mut without_step = 0;
    while executor.steps_done < steps {
        if shutdown.is_cancelled() {
            return Ok(());
        }
        match executor.claim.requested(&trainer.pool).await?.as_deref() {
            Some("cancel") => return executor.release("cancelled", "cancelled by request").await,
            Some(_) => return executor.release("paused", "paused by request").await,
            None => {}
        }
        if let Some(reason) = reason_to_wait(trainer, id, &schedule).await? {
            return Ok(executor.claim.give_way(&trainer.pool, &reason).await?);
        }
        if without_step >= order.batches_per_pass() {
            let reason = format!(
                "no batch of dataset {} made a step; the events of this run say why",
                config.dataset
            );
            return Err(Failed(reason).into());
        }
        let batch = order.batch(&mut position);
        let mut read = Batch::new(&batch);
        for slice in generations_of(&batch) {
            for page in pages_of(trainer, &slice).await? {
                let claim = executor.claim;
                let limits = executor.model_limits.clone();
                let Some(page) = read_samples(trainer, &claim, &page, &limits, shutdown).await? else {
                    return Ok(());
                };
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

/// A batch while its generations are read.
#[derive(Debug)]
struct Batch {
    /// Of the episodes.
    turns: HashMap<Uuid, Turn>,
    samples: usize,
    /// Generations that may not be used, by code.
    refused: BTreeMap<String, usize>,
    missing: usize,
}

impl Batch {
    fn new(members: &[Member]) -> Self {
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
    fn add(&mut self, page: super::Read) -> Vec<Sample> {
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

/// Where a run is in its dataset. A step has it in `notes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
struct Position {
    /// From 0.
    pass: u64,
    /// The last generation of the trajectory that was trained on last. `None`: the pass begins.
    after: Option<Uuid>,
}

/// The name of the position in a step's notes.
const POSITION: &str = "position";

/// Where the run's last step ended.
async fn position(executor: &Executor<'_>) -> anyhow::Result<Position> {
    let noted = sqlx::query_scalar!(
        "select metrics -> 'notes' -> $3::text from step where run_id = $1 and step = $2",
        executor.claim.run,
        executor.steps_done,
        POSITION
    )
    .fetch_optional(&executor.trainer.pool)
    .await
    .context("read where the run's last step ended")?;
    let noted = noted.flatten().map(serde_json::from_value).transpose();
    Ok(noted
        .context("read where the run's last step ended")?
        .unwrap_or_default())
}

/// The trajectories of a dataset in the order in which they are trained on.
struct Order {
    members: Vec<Member>,
    seed: u64,
    batch_size: usize,
    /// The pass that `members` are in the order of.
    sorted_for: Option<u64>,
}

impl Order {
    fn new(members: Vec<Member>, seed: u64, batch_size: usize) -> Self {
        Order {
            members,
            seed,
            batch_size: batch_size.max(1),
            sorted_for: None,
        }
    }

    /// At least 1, also for an empty dataset.
    fn batches_per_pass(&self) -> u64 {
        self.members.len().div_ceil(self.batch_size).max(1) as u64
    }

    /// The batch after a position, which moves behind it. A pass ends with a smaller batch.
    fn batch(&mut self, position: &mut Position) -> Vec<Member> {
        let size = self.batch_size;
        let mut rest = self.after(position);
        if rest.is_empty() {
            *position = Position {
                pass: position.pass + 1,
                after: None,
            };
            rest = self.after(position);
        }
        let batch = rest[..size.min(rest.len())].to_vec();
        position.after = batch.last().map(last).or(position.after);
        batch
    }

    /// What the pass has after this position.
    fn after(&mut self, position: &Position) -> &[Member] {
        let key = |id| key(self.seed, position.pass, id);
        if self.sorted_for != Some(position.pass) {
            self.members.sort_by_cached_key(|member| key(last(member)));
            self.sorted_for = Some(position.pass);
        }
        let done = position.after.map(key);
        let begin = self.members.partition_point(|member| Some(key(last(member))) <= done);
        &self.members[begin..]
    }
}

/// By which a trajectory is known. Episodes are in a dataset as a whole, so it stays the same.
fn last(member: &Member) -> Uuid {
    member.generations.last().copied().unwrap_or_default()
}

/// Where a trajectory stands in a pass.
fn key(seed: u64, pass: u64, id: Uuid) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher
        .update(&seed.to_le_bytes())
        .update(&pass.to_le_bytes())
        .update(id.as_bytes());
    *hasher.finalize().as_bytes()
}

/// The sample for the model's own distribution: however its tokens were sampled, they are what the
/// model is to say.
fn supervised(sample: Sample) -> Sample {
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
    use std::collections::BTreeSet;

    fn member(id: u128) -> Member {
        Member {
            episode: None,
            generations: vec![Uuid::from_u128(id)],
        }
    }

    fn members(count: u128) -> Vec<Member> {
        (0..count).map(member).collect()
    }

    fn numbers(members: &[Member]) -> Vec<u128> {
        members.iter().map(|member| last(member).as_u128()).collect()
    }

    #[test]
    fn each_pass_has_every_trajectory_once_in_another_order() {
        let mut order = Order::new(members(10), 7, 4);
        assert_eq!(order.batches_per_pass(), 3);
        let mut position = Position::default();
        let mut sizes = Vec::new();
        let mut pass = |number: u64| -> Vec<u128> {
            let mut all = Vec::new();
            for _ in 0..3 {
                let batch = order.batch(&mut position);
                assert_eq!(position.pass, number);
                sizes.push(batch.len());
                all.extend(numbers(&batch));
            }
            all
        };
        let (first, second) = (pass(0), pass(1));
        for pass in [&first, &second] {
            let mut sorted = pass.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..10).collect::<Vec<_>>());
        }
        assert_ne!(first, second);
        assert_eq!(sizes, [4, 4, 2, 4, 4, 2]);
        let other_seed = Order::new(members(10), 8, 4).batch(&mut Position::default());
        assert_ne!(numbers(&other_seed), first[..4]);
    }

    #[test]
    fn a_restart_goes_on_behind_the_last_trajectory_although_others_have_expired() {
        let seed = 3;
        let mut whole = Order::new(members(40), seed, 40);
        let all = numbers(&whole.batch(&mut Position::default()));
        // after two batches of 7, trajectories expire that were trained on, the last one among them, and
        // some that were not
        let mut order = Order::new(members(40), seed, 7);
        let mut position = Position::default();
        let mut trained = numbers(&order.batch(&mut position));
        trained.extend(numbers(&order.batch(&mut position)));
        assert_eq!(trained, all[..14]);
        let expired: BTreeSet<u128> = [0, 3, 5, 9, 13, 16, 30].into_iter().map(|at: usize| all[at]).collect();
        let noted = serde_json::to_value(position).unwrap();
        let mut position: Position = serde_json::from_value(noted).unwrap();
        let left: Vec<Member> = members(40)
            .into_iter()
            .filter(|member| !expired.contains(&last(member).as_u128()))
            .collect();
        let mut order = Order::new(left, seed, 7);
        while position.pass == 0 {
            let batch = order.batch(&mut position);
            if position.pass == 0 {
                trained.extend(numbers(&batch));
            }
        }
        let expected: Vec<u128> = all
            .iter()
            .enumerate()
            .filter(|(at, id)| *at < 14 || !expired.contains(id))
            .map(|(_, id)| *id)
            .collect();
        assert_eq!(trained, expected, "none is skipped, none comes twice");
    }

    #[test]
    fn an_empty_dataset_has_empty_batches() {
        let mut position = Position::default();
        assert_eq!(Order::new(vec![], 1, 4).batch(&mut position), []);
        assert_eq!(position, Position { pass: 1, after: None });
    }

    #[test]
    fn turns_of_an_episode_are_of_one_trajectory() {
        let session = Member {
            episode: Some(Uuid::from_u128(9)),
            generations: vec![Uuid::from_u128(1), Uuid::from_u128(2)],
        };
        let mut batch = Batch::new(&[member(5), session]);
        let samples = [1, 2, 5].map(|id| Sample {
            generation: Uuid::from_u128(id),
            ..Sample::example()
        });
        let page = super::super::Read {
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
