//! Supervised runs: cross-entropy on the trajectories of a dataset, exactly as their tokens were
//! logged. Prompts are context; sampled tokens are trained on where `train_mask` allows it.
//!
//! The order of a pass is by a hash of the seed, the pass and the generation's id. So a restart goes
//! on where it was, also if generations have expired meanwhile. The position, in batches, is kept in
//! the run state in place of a random state.
//!
//! Nothing is written about generations but their uses: their disposition is the realtime ledger's.

use super::{Failed, configuration, dataset_of, read_samples};
use crate::api::create::line_of;
use crate::api::offline::Supervised;
use crate::dataset;
use crate::learn::learner::thread::Handle;
use crate::learn::sample::Sample;
use crate::runs::executor::{AdapterSetup, Executor, StepInputs, StepOutcome};
use crate::runs::trainer::Trainer;
use serde_json::json;
use std::collections::BTreeMap;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

pub(super) async fn execute(
    trainer: &Trainer,
    learner: &Handle,
    id: Uuid,
    shutdown: &CancellationToken,
) -> anyhow::Result<()> {
    let (config, base): (Supervised, _) = configuration(&trainer.pool, id).await?;
    let base = base.ok_or_else(|| Failed("the run has no base version".into()))?;
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
    let ids = dataset::available(&mut connection, &dataset, None).await?;
    drop(connection);
    let mut order = Order::new(ids, config.seed, config.batch_size as usize);
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
        if without_step >= order.batches_per_pass() {
            let reason = format!(
                "no batch of dataset {} made a step; the events of this run say why",
                config.dataset
            );
            return Err(Failed(reason).into());
        }
        let position = executor.random.unwrap_or(executor.steps_done.unsigned_abs());
        executor.random = Some(position + 1);
        let batch = read_samples(trainer, &order.batch(position), &executor.model_limits, shutdown).await?;
        if batch.samples.is_empty() {
            without_step += 1;
            let why = json!({"refused": batch.refused, "missing": batch.missing});
            let message = format!("batch {} has nothing to train on: {why}", position + 1);
            executor.append_event("warn", &message).await?;
            continue;
        }
        let inputs = StepInputs {
            settings: config.step_settings(),
            limits: trainer.options.offline.guards,
            baselines: BTreeMap::new(),
            random: position + 1,
            notes: json!({
                "dataset": config.dataset,
                "pass": order.pass(position) + 1,
                "refused": batch.refused,
                "missing": batch.missing,
            }),
        };
        let samples: Vec<Sample> = batch.samples.into_iter().map(supervised).collect();
        let weights = vec![1.0; samples.len()];
        // Another version may have sampled them, so nothing compares log-probabilities.
        let difference_max = f64::INFINITY;
        executor
            .accumulate(samples, weights, inputs.settings, difference_max)
            .await?;
        match executor.step(inputs).await? {
            StepOutcome::Published => without_step = 0,
            StepOutcome::Paused => return Ok(()),
            StepOutcome::Refused | StepOutcome::Empty => without_step += 1,
        }
    }
    let done = format!("{} steps; head is version {}", executor.steps_done, executor.head);
    executor.release("succeeded", &done).await
}

/// The generations of a dataset in the order in which they are trained on.
struct Order {
    ids: Vec<Uuid>,
    seed: u64,
    batch_size: usize,
    /// The pass that `ids` are in the order of.
    sorted_for: Option<u64>,
}

impl Order {
    fn new(ids: Vec<Uuid>, seed: u64, batch_size: usize) -> Self {
        Order {
            ids,
            seed,
            batch_size: batch_size.max(1),
            sorted_for: None,
        }
    }

    /// At least 1, also for an empty dataset.
    fn batches_per_pass(&self) -> u64 {
        self.ids.len().div_ceil(self.batch_size).max(1) as u64
    }

    fn pass(&self, position: u64) -> u64 {
        position / self.batches_per_pass()
    }

    /// The batch at a position, counted through all passes.
    fn batch(&mut self, position: u64) -> Vec<Uuid> {
        let pass = self.pass(position);
        if self.sorted_for != Some(pass) {
            let seed = self.seed;
            self.ids.sort_by_cached_key(|id| key(seed, pass, *id));
            self.sorted_for = Some(pass);
        }
        let index = usize::try_from(position % self.batches_per_pass()).unwrap_or(0);
        let batch = self.ids.chunks(self.batch_size).nth(index);
        batch.map(<[Uuid]>::to_vec).unwrap_or_default()
    }
}

/// Where a generation stands in a pass.
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

    fn ids(count: u128) -> Vec<Uuid> {
        (0..count).map(Uuid::from_u128).collect()
    }

    #[test]
    fn each_pass_has_every_generation_once_in_another_order() {
        let mut order = Order::new(ids(10), 7, 4);
        assert_eq!(order.batches_per_pass(), 3);
        let mut pass = |first: u64| -> Vec<Uuid> { (first..first + 3).flat_map(|at| order.batch(at)).collect() };
        let (first, second) = (pass(0), pass(3));
        for pass in [&first, &second] {
            let different: BTreeSet<Uuid> = pass.iter().copied().collect();
            assert_eq!(different, ids(10).into_iter().collect());
            assert_eq!(pass.len(), 10);
        }
        assert_ne!(first, second);
        let mut again = Order::new(ids(10), 7, 4);
        assert_eq!(again.batch(4), second[4..8], "a restart goes on where it was");
        assert_ne!(Order::new(ids(10), 8, 4).batch(0), first[..4]);
    }

    #[test]
    fn without_an_expired_generation_the_others_keep_their_order() {
        let all = Order::new(ids(9), 1, 100).batch(0);
        let left = Order::new(ids(8), 1, 100).batch(0);
        let without: Vec<Uuid> = all.into_iter().filter(|id| id.as_u128() < 8).collect();
        assert_eq!(left, without);
        assert!(Order::new(vec![], 1, 4).batch(5).is_empty());
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
