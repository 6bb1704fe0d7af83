//! Executes one run: claims it, loads the head of its line, computes and publishes steps.
//!
//! The realtime run and offline runs share it; they choose the samples and advantages. After any
//! error an executor is dropped and opened again: opening is the same as recovering from a crash.
//! Over 500 lines, because all of it is one type that holds the claim.

use crate::cohort::{Cohort, Timings};
use crate::learn::guards;
use crate::learn::learner::thread::Handle;
use crate::learn::learner::{Checked, Learner, Metrics, Outcome};
use crate::offline::Failed;
use crate::outside::Outside;
use crate::parity::{Engines, Parity};
use crate::quarantine::{self, Compared, Quarantine};
use crate::share_alarm::{QUARANTINED, ShareAlarm};
use crate::step_metrics;
use crate::trainer::Trainer;
use anyhow::{Context, anyhow};
use artifact::checkpoint::Checkpoint;
use artifact::digest::Digest;
use artifact::need::Limit;
use model::lora;
use runs::advantage;
use runs::advantage::{Baseline, Baselines};
use runs::claim::{self, Claim};
use runs::door::{self, TrainedBy};
use runs::memory;
use runs::publish::run_state::{Encoded, RunState, StepRecord};
use runs::publish::{self, Draft, Published};
use runs::run::Status;
use runs::sample::{ModelLimits, Sample};
use runs::select;
use runs::settings::{Limits, StepSettings};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

/// A claimed run, loaded at the head of its line.
pub(crate) struct Executor<'a> {
    pub trainer: &'a Trainer,
    pub learner: &'a Handle,
    pub claim: Claim,
    pub line: String,
    pub branch: i32,
    pub head: i64,
    pub steps_done: i64,
    pub baselines: Baselines,
    /// The cohort of the next step.
    pub cohort: Cohort,
    /// How many of the latest samples were quarantined.
    pub quarantine: Quarantine,
    /// Whether log-probabilities of our engine and of others are as they should be.
    parity: [Parity; 2],
    /// Cohorts that a guard refused since the last published step.
    refused: u32,
    /// The run's random state, if it was restored.
    pub random: Option<u64>,
    /// Limits of the head's model.
    pub model_limits: ModelLimits,
    /// Bounds that the weights of a trainer outside must keep.
    pub limits: Limits,
    pub trains: Trains,
    /// Of a run that is trained outside.
    pub outside: Option<Outside>,
}

/// What the steps of a run change, and who computes them.
#[derive(Debug, Clone)]
pub(crate) enum Trains {
    /// All weights.
    All,
    Adapter(AdapterSetup),
    /// All weights or an adapter, by a trainer outside. The name of its launcher, if this process starts it.
    Outside(Option<String>),
}

/// An adapter to train instead of all weights, and the seed of its initial factors.
#[derive(Debug, Clone)]
pub(crate) struct AdapterSetup {
    pub config: lora::Config,
    pub seed: u64,
}

impl Trains {
    /// `seed`: of the initial factors of an adapter.
    pub fn of(trainer: &TrainedBy, lora: Option<&lora::Config>, seed: u64) -> Self {
        match (trainer, lora.cloned()) {
            (TrainedBy::External, _) => Trains::Outside(None),
            (TrainedBy::Launcher(name), _) => Trains::Outside(Some(name.clone())),
            (TrainedBy::Springtide, Some(config)) => Trains::Adapter(AdapterSetup { config, seed }),
            (TrainedBy::Springtide, None) => Trains::All,
        }
    }
}

/// The inputs of a step besides its cohort.
pub(crate) struct StepInputs {
    pub settings: StepSettings,
    pub limits: Limits,
    /// Baselines after the step.
    pub baselines: Baselines,
    pub random: u64,
    /// More to record with the step's metrics.
    pub notes: Value,
}

#[derive(Debug)]
pub(crate) enum StepOutcome {
    Published,
    /// A trainer outside has not committed yet: see [`Executor::committed`].
    Waiting,
    /// The cohort has no gradient at all and is dropped. The run continues.
    Empty,
    /// A guard refused: the cohort is dropped. The run continues.
    Refused,
    /// A guard refused once too often: the cohort is dropped and the run is paused.
    Paused,
}

/// Samples that were quarantined.
pub(crate) struct Quarantined {
    pub ids: Vec<Uuid>,
    /// How many of them cannot be from the version that they name.
    pub gross: usize,
}

impl Quarantined {
    /// Why an offline run pauses: more than half of its `drawn` rollouts are quarantined. Those of later
    /// draws would be too.
    pub fn reason_to_pause(&self, drawn: usize, head: i64) -> Option<String> {
        let (quarantined, gross) = (self.ids.len(), self.gross);
        if 2 * gross > drawn {
            return Some(format!(
                "{gross} of {drawn} rollouts have log-probabilities that are not those of version {head}: samplers and \
                 trainer do not hold the same weights"
            ));
        }
        (2 * quarantined > drawn).then(|| {
            format!(
                "{quarantined} of {drawn} rollouts do not have the trainer's log-probabilities of version {head}, which \
                 are equal to the last bit with our own engine: compare the builds and `policy.compute` of `serve` and \
                 `train`. An engine that is not ours names itself in `engine`"
            )
        })
    }
}

/// What became of a sample that was to join.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    Judged(Compared),
    /// Right itself, but a rollout of its group was quarantined.
    OfBadGroup,
}

/// After this many refused cohorts in a row the run waits for a person. One alone may be the fault
/// of one sample.
const REFUSED_IN_A_ROW_MAX: u32 = 3;

impl<'a> Executor<'a> {
    /// Loads the head of `line` for a run that has been claimed. `None`: the trainer's key may not sign
    /// any longer, so the run is paused now.
    pub async fn open(
        trainer: &'a Trainer,
        learner: &'a Handle,
        claim: Claim,
        line: &str,
        trains: Trains,
        limits: Limits,
    ) -> anyhow::Result<Option<Self>> {
        let (pool, run) = (&trainer.pool, claim.run);
        let head = publish::line(pool, &trainer.policy, line).await?;
        let (head, branch) = head.with_context(|| format!("line {line} has no head"))?;
        let steps_done = sqlx::query_scalar!("select steps_done from run where id = $1", run)
            .fetch_one(pool)
            .await?;
        let mut executor = Executor {
            trainer,
            learner,
            claim,
            line: line.to_string(),
            branch,
            head,
            steps_done,
            baselines: Baselines::new(),
            cohort: Cohort::new(),
            quarantine: Quarantine::new(ShareAlarm::open(pool, run, QUARANTINED).await?),
            parity: [
                Parity::open(pool, run, Engines::Ours).await?,
                Parity::open(pool, run, Engines::Remote).await?,
            ],
            refused: 0,
            random: None,
            model_limits: ModelLimits::default(),
            limits,
            trains,
            outside: None,
        };
        let next = steps_done + 1;
        let publisher = &trainer.publisher;
        if let Err(error) = publisher.signing_keys().await {
            return executor.pause_without_key(error).await.map(|()| None);
        }
        if let Some(version) = publisher.adopt(&claim, next, line, branch, head).await? {
            executor.steps_done = next;
            executor.head = version;
            let message = format!("step {next} was prepared before a restart: committed as version {version}");
            executor.append_event("info", &message).await?;
        }
        executor.refused = executor.refused_before().await?;
        if !matches!(executor.trains, Trains::Outside(_)) {
            door::close(pool, &claim).await?;
        }
        executor.load().await?;
        Ok(Some(executor))
    }

    /// Cohorts that were refused since the last step, and since a person resumed the run.
    async fn refused_before(&self) -> Result<u32, sqlx::Error> {
        let refused = sqlx::query_scalar!(
            r#"
            select count(*) as "count!" from run_event
            where run_id = $1 and data ? 'cohort' and (data ->> 'step')::bigint = $2
              and at > coalesce((select max(at) from run_event where run_id = $1 and data ->> 'request' = 'resume'),
                                '-infinity')
            "#,
            self.claim.run,
            self.steps_done + 1
        )
        .fetch_one(&self.trainer.pool)
        .await?;
        Ok(u32::try_from(refused).unwrap_or(u32::MAX))
    }

    /// Loads the head, with the optimizer state if the last step made it. Keeps the baselines of
    /// the last step and drops what was accumulated for the next one.
    pub async fn load(&mut self) -> anyhow::Result<()> {
        let rows = sqlx::query!(
            "select class, value, weight from baseline where run_id = $1 and step = $2",
            self.claim.run,
            self.steps_done
        )
        .fetch_all(&self.trainer.pool)
        .await?;
        let baselines = rows.into_iter().map(|row| {
            let baseline = Baseline {
                value: row.value,
                weight: row.weight,
            };
            (row.class, baseline)
        });
        self.baselines = baselines.collect();
        let is_outside = matches!(self.trains, Trains::Outside(_));
        if self.line != runs::REALTIME_LINE && !is_outside {
            self.ask_memory().await?;
        }
        let checkpoint = self
            .trainer
            .publisher
            .load(self.head)
            .await
            .with_context(|| format!("materialize version {}", self.head))?;
        if is_outside {
            return self.load_outside(checkpoint).await;
        }
        let arithmetic = self.trainer.arithmetic.clone();
        self.cohort = Cohort::new();
        self.random = self.restore(&checkpoint).await?;
        let restored = self.random.is_some();
        if !restored {
            let adapts = self.trainer.publisher.adapted(self.head).await?;
            let (adapter, head) = (self.adapter().cloned(), (self.head, adapts));
            let fresh = move || match adapter {
                None => Learner::with_arithmetic(checkpoint, arithmetic),
                Some(AdapterSetup { config, seed }) => Learner::with_lora(checkpoint, arithmetic, head, &config, seed),
            };
            self.learner.load(fresh).await?;
        }
        self.model_limits = self.learner.with(|l| Ok(l.model_limits())).await?;
        tracing::info!(run = %self.claim.run, line = self.line, head = self.head, restored, "loaded the head of the line");
        Ok(())
    }

    /// Fails an offline run whose learner does not fit beside the realtime run's.
    async fn ask_memory(&self) -> anyhow::Result<()> {
        let (trainer, publisher) = (self.trainer, &self.trainer.publisher);
        let keys = publisher.trusted().await?;
        let size = memory::size_of(&publisher.store, &publisher.policy, self.head, keys).await?;
        let lora = self.adapter().map(|adapter| &adapter.config);
        let (options, compute) = (&trainer.options, trainer.arithmetic.compute);
        memory::ask_beside(&size, lora, options, compute, &Limit::of_this_process())
            .map_err(|error| Failed(error.to_string()).into())
    }

    /// Restores the learner from the run state of the last step, if that step made the head.
    /// Returns the random state, or `None` if there is no usable run state. The run then continues
    /// from the published values with a fresh optimizer, and an adapter starts anew on the head.
    async fn restore(&self, checkpoint: &Arc<Checkpoint>) -> anyhow::Result<Option<u64>> {
        let error = match self.run_state().await {
            Ok(None) => return Ok(None),
            Ok(Some((run_state, _))) if !self.trains_same_weights(&run_state) => {
                anyhow!("it was made with other settings of `lora`")
            }
            Ok(Some((run_state, base))) => {
                let random = run_state.random;
                let (checkpoint, arithmetic) = (Arc::clone(checkpoint), self.trainer.arithmetic.clone());
                let restore = move || Learner::restore(checkpoint, arithmetic, &run_state, base);
                match self.learner.load(restore).await {
                    Ok(()) => return Ok(Some(random)),
                    Err(error) => error,
                }
            }
            Err(error) if error.is_lost() => error.into(),
            Err(error) => return Err(error).context("read the run state of the last step"),
        };
        let message = format!(
            "the run state of step {} cannot be used ({error:#}): continuing from the published values with a fresh optimizer",
            self.steps_done
        );
        tracing::warn!(run = %self.claim.run, "{message}");
        self.append_event("warn", &message).await?;
        Ok(None)
    }

    fn adapter(&self) -> Option<&AdapterSetup> {
        match &self.trains {
            Trains::Adapter(adapter) => Some(adapter),
            Trains::All | Trains::Outside(_) => None,
        }
    }

    fn trains_same_weights(&self, run_state: &RunState) -> bool {
        let saved = run_state.lora.as_ref().map(|lora| &lora.config);
        saved == self.adapter().map(|adapter| &adapter.config)
    }

    /// The run state of the last step, if that step made the head, and the base version of its
    /// adapter.
    async fn run_state(&self) -> Result<Option<(RunState, Option<Arc<Checkpoint>>)>, publish::Error> {
        let row = sqlx::query!(
            "select checkpoint_key, run_state_digest from step where run_id = $1 and step = $2 and version = $3",
            self.claim.run,
            self.steps_done,
            self.head
        )
        .fetch_optional(&self.trainer.pool)
        .await?;
        let Some(row) = row else { return Ok(None) };
        let publisher = &self.trainer.publisher;
        let expected = Digest::from_slice(&row.run_state_digest);
        let run_state = publisher.read_run_state(&row.checkpoint_key, expected).await?;
        let base = match &run_state.lora {
            Some(lora) => Some(publisher.load(lora.base).await?),
            None => None,
        };
        Ok(Some((run_state, base)))
    }

    /// Adds samples to the cohort of the next step, and their gradients to the learner's sums.
    /// Quarantines those whose logged log-probabilities `limits` do not accept, and drops the rest of
    /// their groups. Returns those that it quarantined.
    pub async fn accumulate(
        &mut self,
        samples: Vec<Sample>,
        advantages: Vec<f64>,
        settings: StepSettings,
        limits: Limits,
    ) -> anyhow::Result<Quarantined> {
        if self.outside.is_some() {
            self.hand_out(&samples, &advantages).await?;
            return Ok(Quarantined { ids: vec![], gross: 0 });
        }
        self.cohort.arrive();
        let (samples, advantages, checked) = self
            .learner
            .with(move |learner| {
                let checked = learner.accumulate(&samples, &advantages, &settings, &limits)?;
                Ok((samples, advantages, checked))
            })
            .await?;
        self.watch_parity(&samples, &checked, &limits).await?;
        let mut fates = vec![Fate::Judged(Compared::Kept); samples.len()];
        for one in &checked.rejected {
            fates[one.index] = match one.mismatch {
                Some(mismatch) if guards::is_gross(&limits, &mismatch) => Fate::Judged(Compared::Gross),
                Some(_) => Fate::Judged(Compared::Quarantined),
                None => Fate::OfBadGroup,
            };
        }
        let of = |fate: Fate| {
            let judged = samples.iter().zip(&fates);
            judged
                .filter(move |(_, other)| **other == fate)
                .map(|(sample, _)| sample)
        };
        let ids = |fate| of(fate).map(|sample| sample.generation).collect::<Vec<Uuid>>();
        let mut quarantined = ids(Fate::Judged(Compared::Gross));
        let gross = quarantined.len();
        quarantined.extend(ids(Fate::Judged(Compared::Quarantined)));
        if let Some(first) = checked.rejected.iter().find(|one| one.mismatch.is_some()) {
            let sample = &samples[first.index];
            let mismatches = || checked.rejected.iter().filter_map(|one| one.mismatch);
            tracing::warn!(
                generation = %sample.generation, replica = sample.replica, engine = sample.engine,
                samples = quarantined.len(), gross,
                difference = mismatches().map(|one| one.difference_max).fold(f64::NAN, f64::max),
                k3 = mismatches().map(|one| one.k3).fold(f64::NAN, f64::max),
                "quarantined samples: their logged log-probabilities are not those of their version"
            );
        }
        // nothing is compared with the log-probabilities of older versions, and nobody sampled what was typed
        let compared = |fate| of(fate).filter(|sample| sample.staleness == 0 && sample.typed.is_none());
        for judged in [Compared::Gross, Compared::Quarantined, Compared::Kept] {
            self.quarantine.record(compared(Fate::Judged(judged)), judged);
        }
        self.quarantine.record(compared(Fate::OfBadGroup), Compared::Kept);
        let kept: Vec<(&Sample, f64)> = samples
            .iter()
            .zip(advantages)
            .zip(&fates)
            .filter(|(_, fate)| **fate == Fate::Judged(Compared::Kept))
            .map(|(kept, _)| kept)
            .collect();
        if !kept.is_empty() {
            self.cohort.join(kept);
        }
        if !quarantined.is_empty() {
            let of_bad_groups = ids(Fate::OfBadGroup);
            let dropped = [
                (quarantine::LOGPROB, quarantined.clone()),
                ("incomplete_group", of_bad_groups),
            ];
            self.drop_generations(&BTreeMap::from(dropped)).await?;
        }
        Ok(Quarantined {
            ids: quarantined,
            gross,
        })
    }

    /// Begins or ends the alarms on log-probabilities.
    async fn watch_parity(&mut self, samples: &[Sample], checked: &Checked, limits: &Limits) -> anyhow::Result<()> {
        for &(index, mismatch) in &checked.compared {
            let [ours, remote] = &mut self.parity;
            let engine = samples[index].engine.as_deref();
            let parity = if engine.is_none() { ours } else { remote };
            parity.record(engine, mismatch, guards::accepts(limits, engine.is_none(), &mismatch));
        }
        let k3_max = self.trainer.options.realtime.alarms.remote_k3_max;
        for parity in &mut self.parity {
            parity
                .watch(&self.trainer.pool, self.claim.run, &self.line, k3_max)
                .await?;
        }
        Ok(())
    }

    /// Computes the step of the cohort and publishes it.
    pub async fn step(&mut self, inputs: StepInputs) -> anyhow::Result<StepOutcome> {
        self.step_with_loss(inputs, None).await
    }

    /// The same. `loss`: of the cohort, where the sum over tokens has its gradient but not its value.
    pub async fn step_with_loss(&mut self, inputs: StepInputs, loss: Option<f64>) -> anyhow::Result<StepOutcome> {
        if self.outside.is_some() {
            return self.await_commit(inputs).await;
        }
        // a step is one computation, its publication included
        let _computation = self.trainer.computing.begin();
        let StepInputs {
            settings,
            limits,
            baselines,
            random,
            notes,
        } = inputs;
        let outcome = self
            .learner
            .with(move |learner| learner.finish(&settings, &limits))
            .await?;
        let cohort = std::mem::replace(&mut self.cohort, Cohort::new());
        let generations = cohort.generations();
        let mut proposal = match outcome {
            Outcome::Proposed(proposal) => proposal,
            Outcome::Empty(_) => {
                tracing::info!(run = %self.claim.run, cohort = generations.len(), "dropped a cohort without a gradient");
                self.drop_generations(&BTreeMap::from([("no_gradient", generations)]))
                    .await?;
                return Ok(StepOutcome::Empty);
            }
            Outcome::Refused { breach, metrics } => {
                self.refused += 1;
                return self
                    .refuse(&generations, breach.code(), &breach.to_string(), &metrics)
                    .await;
            }
        };
        proposal.metrics.loss = loss.unwrap_or(proposal.metrics.loss);
        let rewards = cohort.rewards();
        proposal.metrics.reward_mean = advantage::mean(&rewards);
        proposal.metrics.reward_std = advantage::std(&rewards);
        let timings = cohort.timings(proposal.metrics.guard_seconds);
        let mut metrics = serde_json::to_value(&proposal.metrics)?;
        metrics["notes"] = notes;
        metrics["timings"] = serde_json::to_value(timings)?;
        metrics["computed_at"] = OffsetDateTime::now_utc().format(&Rfc3339)?.into();
        let mut record = StepRecord {
            run: self.claim.run,
            step: self.steps_done + 1,
            cohort: generations,
            dropped: BTreeMap::new(),
            typed: cohort.typed().clone(),
            lease: None,
            baselines: baselines.clone(),
            metrics,
        };
        let saved = record.clone();
        let started = Instant::now();
        let run_state = self
            .learner
            .with(move |learner| Ok(learner.run_state(saved, random).encode()?))
            .await?;
        record.metrics["timings"]["checkpoint"] = started.elapsed().as_secs_f64().into();
        let draft = Draft {
            adapts: proposal.adapts,
            ..self.draft(record, run_state, proposal.parent, proposal.checkpoint)
        };
        let Some(published) = self.publish(draft).await? else {
            return Ok(StepOutcome::Paused);
        };
        self.learner
            .with(|learner| {
                learner.accept();
                Ok(())
            })
            .await?;
        self.published(published.version, baselines, random);
        let tail_seconds = timings.compute_tail + timings.guard + started.elapsed().as_secs_f64();
        self.report(&proposal.metrics, timings, &published, tail_seconds);
        Ok(StepOutcome::Published)
    }

    /// The next version of the line.
    pub fn draft(
        &self,
        record: StepRecord,
        run_state: Encoded,
        parent_checkpoint: Arc<Checkpoint>,
        checkpoint: Arc<Checkpoint>,
    ) -> Draft {
        Draft {
            line: self.line.clone(),
            branch: self.branch,
            parent: self.head,
            parent_checkpoint,
            checkpoint,
            record,
            run_state,
            reference: None,
            adapts: None,
        }
    }

    /// Publishes a step. `None`: the trainer's key may not sign any longer, so the run is paused now.
    pub async fn publish(&self, draft: Draft) -> anyhow::Result<Option<Published>> {
        match self.trainer.publisher.publish(&self.claim, draft).await {
            Err(error @ publish::Error::KeyRefused { .. }) => {
                self.pause_without_key(error).await?;
                Ok(None)
            }
            published => Ok(Some(published?)),
        }
    }

    /// Continues from the step that was published.
    pub fn published(&mut self, version: i64, baselines: Baselines, random: u64) {
        self.steps_done += 1;
        self.refused = 0;
        self.head = version;
        self.baselines = baselines;
        self.random = Some(random);
        self.cohort = Cohort::new(); // restarts its clock at the publication
    }

    /// Tells metrics and the log of the step that was published.
    pub fn report(&self, metrics: &Metrics, timings: Timings, published: &Published, tail_seconds: f64) {
        let is_outside = self.outside.is_some();
        step_metrics::record(
            &self.line,
            metrics,
            is_outside,
            timings,
            published.timings,
            tail_seconds,
        );
        tracing::info!(
            run = %self.claim.run, line = self.line, step = self.steps_done, version = published.version,
            loss = metrics.loss, kl = metrics.kl, reward = metrics.reward_mean,
            trajectories = metrics.trajectories, turns = metrics.sequences, tokens = metrics.tokens,
            stale_tokens = metrics.stale.tokens, parity = metrics.mismatch.difference_max, remote_tokens = metrics.remote.tokens,
            remote_k3 = metrics.remote.k3, truncated = metrics.correction.truncated, ?timings, publish = ?published.timings,
            "published a version"
        );
    }

    /// Drops a cohort whose weights were refused again and again.
    pub async fn refuse_outside(&mut self, cohort: &[Uuid], code: &str, reason: &str) -> anyhow::Result<StepOutcome> {
        self.refused += 1;
        self.refuse(cohort, code, reason, &Metrics::default()).await
    }

    /// Drops the cohort with the guard's code and, after too many in a row, pauses the run, in one
    /// transaction.
    async fn refuse(
        &self,
        cohort: &[Uuid],
        code: &str,
        reason: &str,
        metrics: &Metrics,
    ) -> anyhow::Result<StepOutcome> {
        let step = self.steps_done + 1;
        let reason = format!("step {step} was not published: {reason}");
        tracing::error!(run = %self.claim.run, step, code, "{reason}");
        metrics::counter!("springtide_train_refused_steps_total", "line" => self.line.clone(), "code" => code.to_string()).increment(1);
        let mut transaction = self.claim.begin(&self.trainer.pool).await?;
        select::drop_generations(&mut transaction, self.claim.run, cohort, code).await?;
        // JSON has no NaN: values that are not finite become null
        let metrics = serde_json::to_value(metrics).unwrap_or(Value::Null);
        let data = json!({"code": code, "step": step, "cohort": cohort.len(), "metrics": metrics});
        claim::append_event(&mut transaction, self.claim.run, "error", &reason, &data).await?;
        let paused = self.refused >= REFUSED_IN_A_ROW_MAX;
        if paused {
            let reason = format!("{} cohorts in a row were refused; the last: {reason}", self.refused);
            let release = self.claim.release(&mut transaction, Status::Paused, &reason, json!({}));
            release.await?;
        }
        transaction.commit().await?;
        Ok(match paused {
            true => StepOutcome::Paused,
            false => StepOutcome::Refused,
        })
    }

    /// Pauses the run if `error` says that the trainer's key may not sign any longer. The cohort is
    /// still undecided, so nothing of it is lost. Returns other errors.
    async fn pause_without_key(&self, error: publish::Error) -> anyhow::Result<()> {
        match error {
            publish::Error::KeyRefused { .. } => self.release(Status::Paused, &error.to_string()).await,
            error => Err(error).context("check the signing key"),
        }
    }

    /// Ends this execution of the run; see [`Claim::end`].
    pub async fn release(&self, status: Status, reason: &str) -> anyhow::Result<()> {
        Ok(self.claim.end(&self.trainer.pool, status, reason).await?)
    }

    pub async fn append_event(&self, level: &str, message: &str) -> anyhow::Result<()> {
        Ok(self.claim.append_event(&self.trainer.pool, level, message).await?)
    }

    /// Drops generations by code, in one fenced transaction. Returns how many of each code.
    pub async fn drop_generations<C: AsRef<str> + Ord + Clone>(
        &self,
        ids_by_code: &BTreeMap<C, Vec<Uuid>>,
    ) -> anyhow::Result<BTreeMap<C, u64>> {
        let mut dropped = BTreeMap::new();
        if ids_by_code.is_empty() {
            return Ok(dropped);
        }
        let mut transaction = self.claim.begin(&self.trainer.pool).await?;
        for (code, ids) in ids_by_code {
            let count = select::drop_generations(&mut transaction, self.claim.run, ids, code.as_ref()).await?;
            dropped.insert(code.clone(), count);
        }
        transaction.commit().await?;
        Ok(dropped)
    }
}
