//! One executor's session with one run: claim it, stand where its line stands, make steps.
//!
//! Used by the realtime run and by offline runs alike. Which samples and which advantages is the caller's business. After
//! any error a session is thrown away and opened again: opening is the same as recovering from a crash.

use crate::advantage::{Baseline, Baselines};
use crate::checkpoint::{Checkpoint, StepRecord};
use crate::claim::{self, Claim};
use crate::coming::{Coming, Timings};
use crate::execute::Trainer;
use crate::guards::Limits;
use crate::learner::thread::Handle;
use crate::learner::{Learner, Metrics, Outcome};
use crate::publish::{self, Draft};
use crate::sample::Sample;
use crate::select;
use crate::select::Shape;
use crate::settings::StepSettings;
use anyhow::{Context, anyhow};
use policy::image::Image;
use policy::{lora, store};
use serde_json::{Value, json};
use sqlx::PgConnection;
use std::sync::Arc;
use std::time::Instant;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

/// A claimed run, loaded at the head of its line.
pub(crate) struct Session<'a> {
    pub trainer: &'a Trainer,
    pub learner: &'a Handle,
    pub claim: Claim,
    pub line: String,
    pub branch: i32,
    pub head: i64,
    pub steps_done: i64,
    pub baselines: Baselines,
    /// The next step's cohort.
    pub coming: Coming,
    /// State of the run's random numbers, if a checkpoint had it.
    pub random: Option<u64>,
    /// Of the head's model.
    pub shape: Shape,
    adaptation: Option<Adaptation>,
}

/// An adapter to train instead of all weights, and the seed that it starts with.
#[derive(Debug, Clone)]
pub(crate) struct Adaptation {
    pub config: lora::Config,
    pub seed: u64,
}

/// What a step needs beside its cohort.
pub(crate) struct StepPlan {
    pub settings: StepSettings,
    pub limits: Limits,
    /// Baselines that hold if the step is committed.
    pub baselines: Baselines,
    pub random: u64,
    /// More to record with the step's metrics.
    pub notes: Value,
}

/// How a step ended.
pub(crate) enum Stepped {
    Published,
    /// A guard refused: the cohort is dropped and the run is paused.
    Refused,
}

impl<'a> Session<'a> {
    /// Claims `run` and loads the head of `line`. `None`: the run is paused or has ended, or the line has no head.
    pub async fn open(
        trainer: &'a Trainer,
        learner: &'a Handle,
        run: Uuid,
        line: &str,
        adaptation: Option<Adaptation>,
    ) -> anyhow::Result<Option<Self>> {
        let Some(stand) = sqlx::query!(
            "select head, branch from line where policy = $1 and line = $2",
            trainer.policy,
            line
        )
        .fetch_optional(&trainer.pool)
        .await?
        else {
            return Ok(None);
        };
        let Some(claim) = Claim::take(&trainer.pool, run).await? else {
            return Ok(None);
        };
        let mut session = Session {
            trainer,
            learner,
            claim,
            line: line.to_string(),
            branch: stand.branch,
            head: stand.head,
            steps_done: 0,
            baselines: Baselines::new(),
            coming: Coming::new(),
            random: None,
            shape: Shape::default(),
            adaptation,
        };
        session.steps_done = sqlx::query_scalar!("select steps_done from run where id = $1", run)
            .fetch_one(&trainer.pool)
            .await?;
        let next = session.steps_done + 1;
        let adopted = trainer
            .publisher
            .adopt(&claim, next, line, session.branch, session.head)
            .await?;
        if let Some(version) = adopted {
            session.steps_done = next;
            session.head = version;
            session
                .say(
                    "info",
                    &format!("step {next} was prepared before a restart: committed as version {version}"),
                    json!({}),
                )
                .await?;
        }
        session.load().await?;
        Ok(Some(session))
    }

    /// Loads the head, with the optimiser's state if the last step made it. Baselines outlive a re-base; what was
    /// accumulated for the next step does not.
    pub async fn load(&mut self) -> anyhow::Result<()> {
        let pool = &self.trainer.pool;
        let rows = sqlx::query!(
            "select class, value, weight from baseline where run_id = $1 and step = $2",
            self.claim.run,
            self.steps_done
        )
        .fetch_all(pool)
        .await?;
        self.baselines = rows
            .into_iter()
            .map(|row| {
                (
                    row.class,
                    Baseline {
                        value: row.value,
                        weight: row.weight,
                    },
                )
            })
            .collect();
        let image = self
            .image(self.head)
            .await
            .with_context(|| format!("materialise version {}", self.head))?;
        let arithmetic = self.trainer.arithmetic.clone();
        self.random = None;
        self.coming = Coming::new();
        let restored = match self.checkpoint().await {
            Ok(None) => false,
            Ok(Some((checkpoint, base))) => {
                let random = checkpoint.random;
                let (image, arithmetic) = (image.clone(), arithmetic.clone());
                let restored = match self.trains_as(&checkpoint) {
                    true => {
                        let restore = move || Learner::restore(image, arithmetic, &checkpoint, base);
                        self.learner.load(restore).await
                    }
                    false => Err(anyhow!("it was made with other settings of `lora`")),
                };
                let restored = self.lost_unless(restored).await?;
                self.random = restored.then_some(random);
                restored
            }
            Err(error) if error.is_lost() => self.lost_unless(Err(error.into())).await?,
            Err(error) => return Err(error).context("read the checkpoint of the last step"),
        };
        if !restored {
            let (adaptation, head) = (self.adaptation.clone(), self.head);
            let fresh = move || match adaptation {
                None => Learner::with_arithmetic(image, arithmetic),
                Some(Adaptation { config, seed }) => Learner::with_lora(image, arithmetic, head, &config, seed),
            };
            self.learner.load(fresh).await?;
        }
        self.shape = self.learner.with(|l| Ok(l.shape())).await?;
        tracing::info!(run = %self.claim.run, line = self.line, head = self.head, restored, "loaded the head of the line");
        Ok(())
    }

    /// Whether a checkpoint's master is what this run is to train.
    fn trains_as(&self, checkpoint: &Checkpoint) -> bool {
        let theirs = checkpoint.lora.as_ref().map(|lora| &lora.config);
        theirs == self.adaptation.as_ref().map(|adaptation| &adaptation.config)
    }

    async fn image(&self, version: i64) -> Result<Arc<Image>, store::Error> {
        let Trainer {
            store,
            publisher,
            policy,
            ..
        } = self.trainer;
        let materialised = store.materialise(policy, version, &publisher.trusted, &[]).await?;
        Ok(materialised.image)
    }

    /// The checkpoint of the last step, if that step made the head, and the version that its adapter is of.
    async fn checkpoint(&self) -> Result<Option<(Checkpoint, Option<Arc<Image>>)>, publish::Error> {
        let key = sqlx::query_scalar!(
            "select checkpoint_key from step where run_id = $1 and step = $2 and version = $3",
            self.claim.run,
            self.steps_done,
            self.head
        )
        .fetch_optional(&self.trainer.pool)
        .await?;
        let Some(key) = key else { return Ok(None) };
        let checkpoint = self.trainer.publisher.read_checkpoint(&key).await?;
        let base = match &checkpoint.lora {
            Some(lora) => Some(self.image(lora.base).await?),
            None => None,
        };
        Ok(Some((checkpoint, base)))
    }

    /// A checkpoint that cannot be used costs the optimiser's moments and the master's low bits, not the run. An adapter
    /// begins anew on the head, which has what the old one learnt.
    async fn lost_unless(&self, restored: anyhow::Result<()>) -> anyhow::Result<bool> {
        let Err(error) = restored else { return Ok(true) };
        let message = format!(
            "the checkpoint of step {} cannot be used ({error:#}): going on from the published values with a fresh optimiser",
            self.steps_done
        );
        tracing::warn!(run = %self.claim.run, "{message}");
        self.say("warn", &message, json!({})).await?;
        Ok(false)
    }

    /// Samples join the next step's cohort, and their gradients its sums.
    pub async fn accumulate(
        &mut self,
        samples: Vec<Sample>,
        advantages: Vec<f64>,
        settings: StepSettings,
    ) -> anyhow::Result<()> {
        self.coming.join(&samples);
        self.learner
            .with(move |learner| learner.accumulate(&samples, &advantages, &settings))
            .await
    }

    /// Computes the step of the cohort that has joined, and publishes it.
    pub async fn step(&mut self, plan: StepPlan) -> anyhow::Result<Stepped> {
        let StepPlan {
            settings,
            limits,
            baselines,
            random,
            notes,
        } = plan;
        let outcome = self
            .learner
            .with(move |learner| learner.finish(&settings, &limits))
            .await?;
        let coming = std::mem::replace(&mut self.coming, Coming::new());
        let cohort = coming.generations();
        let proposal = match outcome {
            Outcome::Proposed(proposal) => proposal,
            Outcome::Refused { breach, metrics } => {
                self.refuse(&cohort, breach.code(), &breach.to_string(), &metrics)
                    .await?;
                return Ok(Stepped::Refused);
            }
        };
        let timings = coming.timings(proposal.metrics.guard_seconds);
        let mut metrics = serde_json::to_value(&proposal.metrics)?;
        metrics["notes"] = notes;
        metrics["timings"] = serde_json::to_value(timings)?;
        metrics["computed_at"] = OffsetDateTime::now_utc().format(&Rfc3339)?.into();
        let mut record = StepRecord {
            run: self.claim.run,
            step: self.steps_done + 1,
            cohort,
            baselines: baselines.clone(),
            metrics,
        };
        let kept = record.clone();
        let started = Instant::now();
        let checkpoint = self
            .learner
            .with(move |learner| Ok(learner.checkpoint(kept, random).to_bytes()?))
            .await?;
        record.metrics["timings"]["checkpoint"] = started.elapsed().as_secs_f64().into();
        let draft = Draft {
            line: self.line.clone(),
            branch: self.branch,
            parent: self.head,
            parent_image: proposal.parent_image,
            image: proposal.image,
            record,
            checkpoint,
        };
        let published = self.trainer.publisher.publish(&self.claim, draft).await?;
        self.learner
            .with(|learner| {
                learner.accept();
                Ok(())
            })
            .await?;
        self.steps_done += 1;
        self.head = published.version;
        self.baselines = baselines;
        self.random = Some(random);
        self.coming = Coming::new(); // its wait begins now, with the version published
        let tail = timings.compute_tail + timings.guard + started.elapsed().as_secs_f64();
        observe(&self.line, &proposal.metrics, timings, published.timings, tail);
        tracing::info!(
            run = %self.claim.run, line = self.line, step = self.steps_done, version = published.version,
            loss = proposal.metrics.loss, kl = proposal.metrics.kl, reward = proposal.metrics.reward_mean,
            parity = proposal.metrics.mismatch.difference_max, ?timings, publish = ?published.timings,
            "published a version"
        );
        Ok(Stepped::Published)
    }

    /// Nothing is published: the cohort is dropped with the guard's code and the run pauses, in one transaction.
    async fn refuse(&self, cohort: &[Uuid], code: &str, reason: &str, metrics: &Metrics) -> anyhow::Result<()> {
        let step = self.steps_done + 1;
        let reason = format!("step {step} was not published: {reason}");
        tracing::error!(run = %self.claim.run, step, code, "{reason}");
        metrics::counter!("springtide_train_refused_steps_total", "line" => self.line.clone(), "code" => code.to_string()).increment(1);
        let mut transaction = self.trainer.pool.begin().await?;
        self.claim.hold(&mut transaction).await?;
        select::drop_all(&mut transaction, self.claim.run, cohort, code).await?;
        let data = json!({"code": code, "step": step, "cohort": cohort.len(), "metrics": finite(metrics)});
        claim::event(&mut transaction, self.claim.run, "error", &reason, &data).await?;
        self.claim.release(&mut transaction, "paused", Some(&reason)).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Ends this execution of the run; see [`Claim::release`].
    pub async fn release(&self, status: &str, reason: Option<&str>) -> anyhow::Result<()> {
        tracing::info!(run = %self.claim.run, line = self.line, status, reason, "the run stops here");
        let mut transaction = self.trainer.pool.begin().await?;
        self.claim.release(&mut transaction, status, reason).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Writes a run event.
    pub async fn say(&self, level: &str, message: &str, data: Value) -> anyhow::Result<()> {
        let mut connection = self.trainer.pool.acquire().await?;
        claim::event(&mut connection, self.claim.run, level, message, &data).await?;
        Ok(())
    }

    /// Drops rollouts or trajectories with a code, fenced.
    pub async fn drop_all(&self, ids: &[Uuid], code: &str) -> anyhow::Result<u64> {
        if ids.is_empty() {
            return Ok(0);
        }
        let mut transaction = self.trainer.pool.begin().await?;
        self.claim.hold(&mut transaction).await?;
        let dropped = select::drop_all(&mut transaction, self.claim.run, ids, code).await?;
        transaction.commit().await?;
        Ok(dropped)
    }

    /// The line stands elsewhere now: the branch and head that a release chose. In the caller's fenced transaction.
    pub async fn move_line(&self, connection: &mut PgConnection, branch: i32, head: i64) -> Result<(), sqlx::Error> {
        sqlx::query!(
            "update line set branch = $3, head = $4, updated_at = now() where policy = $1 and line = $2 and branch < $3",
            self.trainer.policy,
            self.line,
            branch,
            head
        )
        .execute(connection)
        .await?;
        Ok(())
    }
}

/// JSON has no NaN: what is not finite becomes null.
fn finite(metrics: &Metrics) -> Value {
    serde_json::to_value(metrics).unwrap_or(Value::Null)
}

fn observe(line: &str, metrics: &Metrics, timings: Timings, publish: publish::Timings, tail: f64) {
    let line = line.to_string();
    metrics::counter!("springtide_train_steps_total", "line" => line.clone()).increment(1);
    metrics::counter!("springtide_train_trajectories_total", "line" => line.clone())
        .increment(metrics.sequences as u64);
    metrics::histogram!("springtide_train_compute_seconds", "line" => line.clone()).record(metrics.seconds);
    metrics::histogram!("springtide_train_step_seconds", "line" => line.clone()).record(tail);
    let phases = [
        ("wait", timings.wait),
        ("collect", timings.collect),
        ("compute_tail", timings.compute_tail),
        ("guard", timings.guard),
        ("encode", publish.encode),
        ("upload", publish.upload),
        ("commit", publish.commit),
    ];
    for (phase, seconds) in phases {
        metrics::histogram!("springtide_train_phase_seconds", "line" => line.clone(), "phase" => phase).record(seconds);
    }
    let gauges = [
        ("springtide_train_loss", metrics.loss),
        ("springtide_train_kl_nats", metrics.kl),
        ("springtide_train_gradient_norm", metrics.gradient_norm),
        ("springtide_train_entropy_nats", metrics.entropy),
        ("springtide_train_reward_mean", metrics.reward_mean),
        (
            "springtide_train_parity_difference_max_nats",
            metrics.mismatch.difference_max,
        ),
        ("springtide_train_effective_sample_ratio", metrics.mismatch.ess),
    ];
    for (name, value) in gauges {
        metrics::gauge!(name, "line" => line.clone()).set(value);
    }
}
