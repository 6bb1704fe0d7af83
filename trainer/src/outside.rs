//! Steps whose weights a trainer outside computes. The executor hands its cohort out through the door, and
//! publishes what comes back as a step of its own.
//!
//! What is handed out has passed all checks but one: log-probabilities are not computed again, so the trainer
//! outside drops what does not fit, with a code. Of the weights this process checks form, values, how far they
//! have moved, and, where our model computes the architecture, KL on a part of the cohort.

mod launch;

use crate::cohort::Cohort as Members;
use crate::executor::{Executor, StepInputs, StepOutcome, Trains};
use crate::learn::guards;
use crate::learn::learner::{Metrics, kl};
use crate::offline::Failed;
use anyhow::Context;
use artifact::checkpoint::Checkpoint;
use artifact::delta;
use artifact::manifest::Parent;
use launch::Launched;
use model::config::{ModelConfig, declared_context};
use model::exact::ExactModel;
use model::lora;
use runs::advantage;
use runs::door::samples;
use runs::door::weights::{self, Change};
use runs::door::{self, Cohort, Progress, Ready, State, Submission, Submitted};
use runs::grammar::Grammars;
use runs::publish::run_state::{Lease, RunState, StepRecord};
use runs::publish::{Draft, EXACT_BYTES_MAX, Error as PublishError};
use runs::run::Status;
use runs::sample::{ModelLimits, Routed, Sample};
use runs::select::{self, Answers};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Instant;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

/// KL is measured on a quarter of the generations, within these bounds.
const KL_GENERATIONS: RangeInclusive<usize> = 16..=64;
/// Tokens that go through the model together.
const KL_BATCH_TOKENS: usize = 4096;
const NOTHING_TRAINED: &str =
    "`dropped` names every generation of the cohort: commit no files and give `dropped_all` a code";
/// After so many refused submissions of one cohort its generations are dropped.
const REFUSALS_MAX: i32 = 3;
/// Their code.
const REFUSED: &str = "outside_refused";

/// What of an executor is only there if its steps are computed outside.
pub(crate) struct Outside {
    cohort: Cohort,
    /// The head.
    parent: Arc<Checkpoint>,
    /// How many bundles were handed out.
    bundles: i64,
    /// The trainer, if this process has started it.
    launched: Option<Launched>,
}

/// Weights that may be published.
struct Verified {
    checkpoint: Arc<Checkpoint>,
    /// The base, of an adapter.
    adapts: Option<Parent>,
    metrics: Metrics,
    change: Change,
}

/// What the head's model demands of trajectories. A model that ours does not compute is known by its
/// `config.json` alone.
fn limits_of(checkpoint: &Checkpoint) -> anyhow::Result<ModelLimits> {
    let json = checkpoint.files.get("config.json").context("config.json is missing")?;
    let (context, vocabulary, experts) = match ModelConfig::from_json(json) {
        Ok(config) => (config.context(), config.vocab_size, Routed::from(config.experts)),
        Err(_) => {
            let json: Value = serde_json::from_slice(json).context("config.json")?;
            let context = declared_context(&json).context("config.json: max_position_embeddings is missing")?;
            let vocabulary = json["vocab_size"]
                .as_i64()
                .context("config.json: vocab_size is missing")?;
            (context, vocabulary, Routed::Unknown)
        }
    };
    let decline = text::tokenizer::decline_id(checkpoint).context("read the decline token")?;
    Ok(ModelLimits {
        context,
        vocabulary,
        decline: decline.filter(|&id| i64::from(id) < vocabulary),
        experts,
        grammars: Grammars::of(checkpoint, vocabulary),
    })
}

impl Outside {
    /// The cohort of the executor's next step, from the head on.
    async fn open(
        executor: &Executor<'_>,
        parent: Arc<Checkpoint>,
        launched: Option<Launched>,
    ) -> anyhow::Result<Self> {
        let trainer = executor.trainer;
        let step = executor.steps_done + 1;
        let cohort = Cohort::open(&trainer.pool, &executor.claim, step, executor.head).await?;
        let store = &trainer.publisher.store;
        if let Err(error) = door::sweep(&trainer.pool, store, &trainer.payloads, &trainer.policy).await {
            tracing::warn!(
                error = format!("{error:#}"),
                "could not delete files of earlier cohorts"
            );
        }
        Ok(Outside {
            cohort,
            parent,
            bundles: 0,
            launched,
        })
    }
}

impl Executor<'_> {
    /// Loads what an outside step needs of the head.
    pub(crate) async fn load_outside(&mut self, head: Arc<Checkpoint>) -> anyhow::Result<()> {
        self.cohort = Members::new();
        self.model_limits = limits_of(&head)?;
        let running = self.outside.take().and_then(|outside| outside.launched);
        let launched = match running {
            Some(launched) => Some(launched),
            None => self.launch()?,
        };
        self.outside = Some(Outside::open(self, head, launched).await?);
        Ok(())
    }

    /// Starts the launcher of the run, if it has one.
    fn launch(&self) -> anyhow::Result<Option<Launched>> {
        let Trains::Outside(Some(name)) = &self.trains else {
            return Ok(None);
        };
        let trainer = self.trainer;
        let launcher = trainer.options.launcher.iter().find(|launcher| launcher.name == *name);
        let launcher = launcher.ok_or_else(|| {
            Failed(format!(
                "there is no [[trainer.launcher]] {name:?} in the configuration of `train`"
            ))
        })?;
        let (url, folder) = (trainer.control_url.clone(), trainer.state_dir.join("launchers"));
        Launched::start(launcher.clone(), trainer.pool.clone(), self.claim, url, &folder).map(Some)
    }

    /// Whether a full cohort waits for its trainer.
    pub fn awaits_commit(&self) -> bool {
        let state = self.outside.as_ref().map(|outside| outside.cohort.state);
        state.is_some_and(|state| state != State::Filling)
    }

    /// Hands samples out.
    pub(crate) async fn hand_out(&mut self, samples: &[Sample], advantages: &[f64]) -> anyhow::Result<()> {
        let Some(outside) = &mut self.outside else {
            return Ok(());
        };
        let trainer = self.trainer;
        let scored: Vec<(&Sample, f64)> = samples.iter().zip(advantages.iter().copied()).collect();
        let (cohort, bundles) = (&outside.cohort, &mut outside.bundles);
        let parts = samples::write(&trainer.pool, &trainer.payloads, cohort.id, &scored, bundles).await?;
        for part in parts {
            cohort.add(&trainer.pool, &self.claim, &part).await?;
        }
        self.cohort.join(scored);
        Ok(())
    }

    /// The cohort is full: its trainer may commit it.
    pub(crate) async fn await_commit(&mut self, inputs: StepInputs) -> anyhow::Result<StepOutcome> {
        let timings = self.cohort.timings(0.0);
        let rewards = self.cohort.rewards();
        let ready = Ready {
            baselines: inputs.baselines,
            random: inputs.random,
            notes: inputs.notes,
            reward_mean: advantage::mean(&rewards),
            reward_std: advantage::std(&rewards),
            trajectories: self.cohort.len(),
            sequences: self.cohort.generations().len(),
            tokens: self.cohort.tokens(),
            stale_tokens: self.cohort.stale_tokens(),
            wait: timings.wait,
            collect: timings.collect,
        };
        if let Some(outside) = &mut self.outside {
            outside.cohort.fill(&self.trainer.pool, &self.claim, ready).await?;
        }
        Ok(StepOutcome::Waiting)
    }

    /// Publishes what the trainer outside has committed, if it has.
    pub async fn committed(&mut self) -> anyhow::Result<StepOutcome> {
        let (pool, claim) = (&self.trainer.pool, self.claim);
        let Some(outside) = &self.outside else {
            return Ok(StepOutcome::Waiting);
        };
        let (cohort, parent) = (outside.cohort.clone(), Arc::clone(&outside.parent));
        let submitted = match cohort.submitted(pool).await? {
            Progress::Submitted(submitted) => *submitted,
            Progress::Gone => return self.next_cohort().await.map(|()| StepOutcome::Empty),
            Progress::Waiting => {
                if let Some(reason) = outside.launched.as_ref().and_then(Launched::gave_up) {
                    self.release(Status::Paused, &reason).await?;
                    return Ok(StepOutcome::Paused);
                }
                return Ok(StepOutcome::Waiting);
            }
        };
        let started = Instant::now();
        let _computation = self.trainer.computing.begin();
        let generations = cohort.generations(pool).await?;
        if let Some(code) = &submitted.submission.dropped_all {
            tracing::info!(run = %claim.run, trainer = submitted.holder, code, "nothing of a cohort was trained on");
            self.drop_generations(&BTreeMap::from([(code.clone(), generations)]))
                .await?;
            cohort
                .give_back(pool, &claim, &format!("its trainer dropped it: {code}"))
                .await?;
            return self.next_cohort().await.map(|()| StepOutcome::Empty);
        }
        let verified = match self.verify(&cohort, &submitted, &parent, &generations).await? {
            Ok(verified) => verified,
            Err(why) => {
                let message = format!("step {} by {} was not published: {why}", cohort.step, submitted.holder);
                tracing::warn!(run = %claim.run, "{message}");
                self.append_event("warn", &message).await?;
                if !cohort.refuse(pool, &claim, &why, REFUSALS_MAX).await? {
                    return Ok(StepOutcome::Waiting);
                }
                let outcome = self.refuse_outside(&generations, REFUSED, &why).await?;
                self.next_cohort().await?;
                return Ok(outcome);
            }
        };
        let Submitted {
            submission,
            fence,
            holder,
            times,
        } = submitted;
        let ready = cohort.ready.clone().unwrap_or_default();
        let Verified {
            checkpoint,
            adapts,
            mut metrics,
            change,
        } = verified;
        metrics.reward_mean = ready.reward_mean;
        metrics.reward_std = ready.reward_std;
        metrics.trajectories = ready.trajectories;
        metrics.sequences = ready.sequences.saturating_sub(submission.dropped.len());
        metrics.tokens = ready.tokens;
        let seconds = |from: OffsetDateTime, to: OffsetDateTime| (to - from).as_seconds_f64().max(0.0);
        let timings = crate::cohort::Timings {
            wait: ready.wait,
            collect: ready.collect,
            compute_tail: seconds(times.filled_at, times.submitted_at),
            guard: started.elapsed().as_secs_f64(),
        };
        let mut measured = serde_json::to_value(&metrics)?;
        measured["notes"] = ready.notes;
        measured["stale"]["tokens"] = ready.stale_tokens.into();
        measured["timings"] = serde_json::to_value(timings)?;
        // how long nobody worked on the full cohort
        measured["timings"]["idle"] = seconds(times.filled_at, times.leased_at).into();
        measured["computed_at"] = OffsetDateTime::now_utc().format(&Rfc3339)?.into();
        measured["outside"] = json!({
            "trainer": holder, "fence": fence, "change": change.relative_norm, "metrics": submission.metrics,
        });
        let trained = generations.iter().filter(|id| !submission.dropped.contains_key(id));
        let trained: BTreeSet<Uuid> = trained.copied().collect();
        let mut dropped: BTreeMap<String, Vec<Uuid>> = BTreeMap::new();
        for (id, code) in submission.dropped {
            dropped.entry(code).or_default().push(id);
        }
        let record = StepRecord {
            run: claim.run,
            step: cohort.step,
            cohort: trained.into_iter().collect(),
            dropped,
            typed: BTreeMap::new(),
            lease: Some(Lease {
                cohort: cohort.id,
                fence,
            }),
            baselines: ready.baselines.clone(),
            metrics: measured,
        };
        let run_state = RunState {
            record: record.clone(),
            lora: None,
            optimizer_step: cohort.step,
            random: ready.random,
            master: BTreeMap::new(),
            first: BTreeMap::new(),
            second: BTreeMap::new(),
        };
        let draft = Draft {
            reference: submission.reference,
            adapts,
            ..self.draft(record, run_state.encode()?, parent, Arc::clone(&checkpoint))
        };
        let published = match self.publish(draft).await {
            Ok(Some(published)) => published,
            Ok(None) => return Ok(StepOutcome::Paused),
            Err(error) => {
                let cause = error.downcast_ref();
                if let Some(
                    PublishError::AlreadyDecided
                    | PublishError::Revoked
                    | PublishError::ConsentWithdrawn
                    | PublishError::LeaseLost,
                ) = cause
                {
                    cohort.give_back(pool, &claim, &error.to_string()).await?;
                }
                return Err(error);
            }
        };
        self.published(published.version, ready.baselines, ready.random);
        let launched = self.outside.take().and_then(|outside| outside.launched);
        launched.iter().for_each(Launched::made_step);
        self.outside = Some(Outside::open(self, checkpoint, launched).await?);
        let tail_seconds = timings.compute_tail + started.elapsed().as_secs_f64();
        self.report(&metrics, timings, &published, tail_seconds);
        Ok(StepOutcome::Published)
    }

    /// Goes on with a new cohort for the same step.
    async fn next_cohort(&mut self) -> anyhow::Result<()> {
        self.cohort = Members::new();
        if let Some(Outside { parent, launched, .. }) = self.outside.take() {
            self.outside = Some(Outside::open(self, parent, launched).await?);
        }
        Ok(())
    }

    /// The weights and figures of a submission, or why they cannot be published.
    async fn verify(
        &self,
        cohort: &Cohort,
        submitted: &Submitted,
        parent: &Arc<Checkpoint>,
        generations: &[Uuid],
    ) -> anyhow::Result<Result<Verified, String>> {
        let limits = self.limits;
        let Submission {
            files,
            adapter,
            dropped,
            metrics,
            ..
        } = &submitted.submission;
        let of_cohort: BTreeSet<&Uuid> = generations.iter().collect();
        if let Some(id) = dropped.keys().find(|id| !of_cohort.contains(id)) {
            return Ok(Err(format!("`dropped` names {id}, which is not of this cohort")));
        }
        if dropped.len() == of_cohort.len() {
            return Ok(Err(NOTHING_TRAINED.into()));
        }
        let publisher = &self.trainer.publisher;
        let (store, lease) = (&publisher.store, (cohort.id, submitted.fence));
        let (assembled, adapts) = match adapter {
            None => {
                let parent = Arc::clone(parent);
                let merged = tokio::task::spawn_blocking(move || lora::merged(&parent)).await??;
                (weights::assemble(store, lease, files, &merged).await, None)
            }
            Some(config) => {
                let base = match publisher.adapted(self.head).await? {
                    Some(base) => base,
                    None => {
                        let parent = Arc::clone(parent);
                        let root = tokio::task::spawn_blocking(move || parent.root()).await?;
                        Parent {
                            version: self.head,
                            root,
                        }
                    }
                };
                let assembled = weights::assemble_adapter(store, lease, files, config, parent).await;
                (assembled, Some(base))
            }
        };
        let (checkpoint, change) = match assembled {
            Err(weights::Error::Refused(why)) => return Ok(Err(why)),
            assembled => assembled.context("read the uploaded weights")?,
        };
        if change.relative_norm > limits.change_max {
            return Ok(Err(format!(
                "the weights differ from their parent by {:.3} of its norm, above guards.change_max, {}",
                change.relative_norm, limits.change_max
            )));
        }
        let checkpoint = Arc::new(checkpoint);
        let mut figures = named(metrics);
        let changes = {
            let (parent, checkpoint) = (Arc::clone(parent), Arc::clone(&checkpoint));
            tokio::task::spawn_blocking(move || delta::stats(&parent, &checkpoint)).await?
        };
        (figures.changed_weights, figures.total_weights) = (changes.changed_weights, changes.total_weights);
        if changes.changed_weights == 0 {
            return Ok(Err("the weights are those of their parent".into()));
        }
        if let Some(measured) = self.kl(parent, &checkpoint, generations).await? {
            figures.kl = measured;
            if let Err(breach) = guards::after_update(&limits, measured) {
                return Ok(Err(breach.to_string()));
            }
        }
        Ok(Ok(Verified {
            checkpoint,
            adapts,
            metrics: figures,
            change,
        }))
    }

    /// Mean KL(old‖new) on a part of the cohort. `None`: our model does not compute this architecture, or it
    /// is too large.
    async fn kl(
        &self,
        parent: &Arc<Checkpoint>,
        checkpoint: &Arc<Checkpoint>,
        generations: &[Uuid],
    ) -> anyhow::Result<Option<f64>> {
        let json = parent.files.get("config.json");
        let is_unknown = json.is_none_or(|json| ModelConfig::from_json(json).is_err());
        if is_unknown || parent.tensor_bytes() > EXACT_BYTES_MAX {
            return Ok(None);
        }
        let trainer = self.trainer;
        let (few, many) = KL_GENERATIONS.into_inner();
        let every = generations
            .len()
            .div_ceil(generations.len().div_ceil(4).clamp(few, many))
            .max(1);
        let ids: Vec<Uuid> = generations.iter().step_by(every).copied().collect();
        let read = select::closed(&trainer.pool, &trainer.payloads, &ids, &self.model_limits, Answers::Any).await;
        let samples = read.context("read the samples of the cohort")?.samples;
        let (parent, checkpoint, arithmetic) = (Arc::clone(parent), Arc::clone(checkpoint), trainer.arithmetic.clone());
        let measured = tokio::task::spawn_blocking(move || {
            let before = ExactModel::with_arithmetic(&parent, &arithmetic).context("build the parent's model")?;
            let after = ExactModel::with_arithmetic(&checkpoint, &arithmetic).context("build the new model")?;
            kl(&before, &after, &samples, KL_BATCH_TOKENS)
        });
        Ok(Some(measured.await??))
    }
}

/// The figures that a step has, of those that its trainer measured.
fn named(metrics: &BTreeMap<String, f64>) -> Metrics {
    let of = |name: &str| metrics.get(name).copied().unwrap_or_default();
    Metrics {
        loss: of("loss"),
        gradient_norm: of("gradient_norm"),
        entropy: of("entropy"),
        clipped: of("clipped"),
        seconds: of("seconds"),
        ..Metrics::default()
    }
}
