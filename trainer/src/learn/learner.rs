//! The learner: master weights, their optimizer, and the published values to compute with.
//!
//! The forward pass is the sampler's own ([`ExactModel`]), bit by bit. The loss and its derivative by
//! the logits are libtorch's. The gradient of the weights is ours or libtorch's ([`gradient`]) and
//! updates the fp32 master; the next published values are the rounded master. The master is all
//! weights, or the factors of an adapter ([`lora`]).
//!
//! A step has three parts:
//! 1. [`Learner::accumulate`] adds gradients while the cohort fills. A trajectory's gradient does
//!    not depend on the others, and the denominator is applied at the end. A trajectory whose logged
//!    log-probabilities are not those of the model adds nothing.
//! 2. [`Learner::finish`] computes the update, checks the guards and proposes a step. A cohort
//!    without any gradient makes none: momentum alone would move the weights.
//! 3. The caller makes the step durable and calls [`Learner::accept`], or [`Learner::discard`],
//!    which undoes everything.
//!
//! Synchronous: one call at a time, on the thread of [`thread`]. A call may compute on
//! `trainer.threads` threads. It knows no database, no store, and no clock but its own timings. Over
//! 500 lines, because the three parts share one state.

mod accumulator;
mod gradient;
mod lora;
mod state;
mod tensors;
pub mod thread;

use crate::learn::batch::{self, MicroBatch};
use crate::learn::behavior;
use crate::learn::correction;
use crate::learn::guards::{self, Breach};
use crate::learn::loss::{self, Terms, Tokens};
use crate::learn::mismatch::{Mismatch, SampleMismatch};
use crate::learn::optimizer::{self, AdamW};
use crate::learn::score as sums;
use accumulator::{Accumulator, KlBatch};
use anyhow::{Context, ensure};
use artifact::checkpoint::Checkpoint;
use artifact::manifest::Parent;
use autograd::{Parameters, TrainModel, checkpoint_from_f32};
use gradient::Gradients;
use lora::Lora;
use model::exact::{Arithmetic, ExactModel, Pass};
use model::lora as lora_model;
use model::router::Routing;
use runs::grammar::Grammars;
use runs::sample::{ModelLimits, Sample};
use runs::settings::{Limits, StepSettings};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;
use tch::{Kind, Tensor};

/// What one step measured. Nats and seconds.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Metrics {
    pub loss: f64,
    /// Global norm before clipping.
    pub gradient_norm: f64,
    /// KL(old‖new), exact over the vocabulary, mean over at least a quarter of the trained tokens, or
    /// as many as fit in 256 MiB.
    pub kl: f64,
    /// Share of trained tokens that the loss truncated or clipped.
    pub clipped: f64,
    /// Mean entropy of the old policy at the trained tokens.
    pub entropy: f64,
    /// An episode is one, with any number of sequences: its turns.
    pub trajectories: usize,
    pub sequences: usize,
    /// Sequences sampled with the decline token masked.
    pub explored: usize,
    /// Sequences that users typed, and −log π of their tokens before the step, nats a token: 0 if there are none.
    pub typed: usize,
    pub typed_nats: f64,
    /// Sequences computed with their logged experts.
    pub replayed: usize,
    /// Samples that were refused because of their log-probabilities; in none of the other figures.
    pub quarantined: usize,
    pub tokens: usize,
    /// Sequences whose advantage is exactly 0. They count in every mean and get no backward pass.
    pub without_gradient: usize,
    /// Also of the trajectories that had no gradient and that the cohort did not need.
    pub reward_mean: f64,
    /// Sample standard deviation over the same.
    pub reward_std: f64,
    pub advantage_mean: f64,
    pub advantage_std: f64,
    /// Logged against recomputed log-probabilities of the head, of tokens that our own engine sampled:
    /// the parity of sampler and trainer.
    pub mismatch: Mismatch,
    /// The same of tokens that other engines sampled.
    pub remote: Mismatch,
    /// The same of each of these engines, as generations name it.
    pub engines: BTreeMap<String, Mismatch>,
    /// By layer of experts: the share of trained tokens for which the trainer's router would have chosen others than the
    /// sampler's, which were replayed.
    pub other_experts: BTreeMap<i64, f64>,
    /// What the correction did to the tokens of both.
    pub correction: correction::Summary,
    /// The same of turns that older versions sampled: how far the policy has moved since.
    pub stale: Mismatch,
    /// Published values that differ from the parent's.
    pub changed_weights: u64,
    pub total_weights: u64,
    /// All computing, also while the cohort was filling.
    pub seconds: f64,
    /// The part of it that measured the update.
    pub guard_seconds: f64,
}

/// A step that passed its guards and waits to be accepted or discarded.
#[derive(Debug, Clone)]
pub struct Proposal {
    pub parent: Arc<Checkpoint>,
    pub checkpoint: Arc<Checkpoint>,
    /// The base of `checkpoint`, if that is an adapter.
    pub adapts: Option<Parent>,
    pub metrics: Metrics,
}

/// The outcome of a cohort.
#[derive(Debug, Clone)]
pub enum Outcome {
    Proposed(Proposal),
    /// The gradient is exactly 0, so there is nothing to learn. Nothing has changed.
    Empty(Metrics),
    /// Nothing has changed.
    Refused {
        breach: Breach,
        metrics: Metrics,
    },
}

/// A sample that was not added: its log-probabilities are not those of the model, or those of another
/// rollout of its group are not.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rejected {
    /// Its index among the given samples.
    pub index: usize,
    /// How far its log-probabilities are off. `None`: it is right itself.
    pub mismatch: Option<SampleMismatch>,
}

/// What became of samples that were to be added.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Checked {
    /// In the order given.
    pub rejected: Vec<Rejected>,
    /// Those that were compared, by index: of the head, with trained tokens.
    pub compared: Vec<(usize, SampleMismatch)>,
}

/// Holds the weights of one line's head.
#[derive(Debug)]
pub struct Learner {
    state: State,
    /// The state after a proposed step.
    pending: Option<State>,
    /// Sums of the next step's gradients, with the published values that they need.
    gradients: Gradients,
    arithmetic: Arithmetic,
    /// The token that declines to answer.
    decline: Option<u32>,
    /// `None`: all weights are trained.
    lora: Option<Lora>,
    /// The other sums of the next step.
    accumulator: Accumulator,
}

#[derive(Debug)]
struct State {
    /// The version.
    checkpoint: Arc<Checkpoint>,
    /// The values that it computes with: of an adapter, merged into its base.
    weights: Arc<Checkpoint>,
    /// Computes with the published values.
    model: ExactModel,
    master: Parameters,
    optimizer: AdamW,
}

impl Learner {
    /// Like [`with_arithmetic`](Self::with_arithmetic), in f32 on one thread.
    pub fn from_checkpoint(checkpoint: Arc<Checkpoint>) -> anyhow::Result<Self> {
        Self::with_arithmetic(checkpoint, Arithmetic::default())
    }

    /// Starts from a version: the master is its published values, the optimizer is fresh.
    /// `arithmetic` has the precision of the sampler; gradients have it too, their sums are f32.
    pub fn with_arithmetic(checkpoint: Arc<Checkpoint>, arithmetic: Arithmetic) -> anyhow::Result<Self> {
        Self::build(checkpoint, arithmetic, None)
    }

    /// Starts an adapter of version `head`, whose own weights stay as they are: its serial, and what it adapts.
    pub fn with_lora(
        checkpoint: Arc<Checkpoint>,
        arithmetic: Arithmetic,
        head: (i64, Option<Parent>),
        config: &model::lora::Config,
        seed: u64,
    ) -> anyhow::Result<Self> {
        let (lora, factors) = Lora::fresh(&checkpoint, head, config, seed)?;
        Self::build(checkpoint, arithmetic, Some((lora, factors)))
    }

    fn build(
        checkpoint: Arc<Checkpoint>,
        arithmetic: Arithmetic,
        adapter: Option<(Lora, Parameters)>,
    ) -> anyhow::Result<Self> {
        let weights = lora_model::computed_shared(&checkpoint).context("merge the adapter of the head")?;
        let model = ExactModel::with_arithmetic(&weights, &arithmetic).context("build the model of the head")?;
        model.self_check_once();
        let loaded = TrainModel::from_checkpoint(&weights).context("read the weights of the head")?;
        let adapts = |name: &str| adapter.as_ref().is_none_or(|(lora, _)| lora.adapts(name));
        let gradients = Gradients::new(&weights, &arithmetic, &loaded, adapts)?;
        let (lora, master) = match adapter {
            Some((lora, factors)) => (Some(lora), factors),
            None => (None, loaded.into_parameters()),
        };
        let vocabulary = model.config().vocab_size;
        let decline = text::tokenizer::decline_id(&checkpoint).context("read the decline token")?;
        Ok(Learner {
            state: State {
                checkpoint,
                weights,
                model,
                optimizer: AdamW::new(&master),
                master,
            },
            pending: None,
            gradients,
            arithmetic,
            decline: decline.filter(|&id| i64::from(id) < vocabulary),
            lora,
            accumulator: Accumulator::default(),
        })
    }

    /// What the model demands of trajectories.
    pub fn model_limits(&self) -> ModelLimits {
        let config = self.state.model.config();
        ModelLimits {
            context: config.context(),
            vocabulary: config.vocab_size,
            decline: self.decline,
            experts: config.experts.clone().into(),
            grammars: Grammars::of(&self.state.checkpoint, config.vocab_size),
        }
    }

    /// The version that the learner is at.
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.state.checkpoint
    }

    /// Σ log π of each sample's trained tokens in the head's own distribution, nats. Changes nothing.
    pub fn log_probs(&self, samples: &[Sample]) -> anyhow::Result<Vec<f64>> {
        sums::log_probs(&self.state.model, samples, sums::TOKENS_AT_ONCE)
    }

    /// Computes one optimizer step on a whole cohort at once. `advantages` has one value per
    /// sample.
    pub fn propose(
        &mut self,
        samples: &[Sample],
        advantages: &[f64],
        settings: &StepSettings,
        limits: &Limits,
    ) -> anyhow::Result<Outcome> {
        self.discard()?;
        self.accumulate(samples, advantages, settings, limits)?;
        self.finish(settings, limits)
    }

    /// Adds the gradients of samples to the next step and changes nothing else. An advantage must
    /// not depend on samples that come later. After an error the caller must discard.
    ///
    /// Samples whose logged log-probabilities `limits` do not accept are not added, but returned; stale
    /// ones only if the model cannot produce a token. So is the whole group of such a rollout, because
    /// its reward is in the advantages of the others. All groups of a step must be given at once.
    pub fn accumulate(
        &mut self,
        samples: &[Sample],
        advantages: &[f64],
        settings: &StepSettings,
        limits: &Limits,
    ) -> anyhow::Result<Checked> {
        let started = Instant::now();
        self.ensure_nothing_pending()?;
        ensure!(samples.len() == advantages.len(), "one advantage per sample");
        let vocabulary = self.state.model.config().vocab_size;
        let known = |id: &u32| i64::from(*id) < vocabulary;
        for sample in samples {
            ensure!(
                sample.prompt.iter().chain(&sample.tokens).all(known),
                "generation {} has token ids outside the vocabulary of {vocabulary}",
                sample.generation
            );
        }
        let is_first = self.accumulator.is_empty();
        let mut checked = self.add(samples, advantages, settings, limits)?;
        let rejected = &mut checked.rejected;
        let quarantined = rejected.len();
        let companions = companions(samples, rejected);
        if !companions.is_empty() {
            ensure!(is_first, "all groups of a step must be given at once");
            rejected.extend(companions);
            rejected.sort_by_key(|rejected| rejected.index);
            // sums cannot be taken apart: those of the other groups are computed again, which is rare
            self.discard()?;
            let (kept, advantages): (Vec<Sample>, Vec<f64>) = (0..samples.len())
                .filter(|&index| !is_among(rejected, index))
                .map(|index| (samples[index].clone(), advantages[index]))
                .unzip();
            let again = self.add(&kept, &advantages, settings, limits)?;
            ensure!(
                again.rejected.is_empty(),
                "the same samples have other log-probabilities now"
            );
        }
        self.accumulator.quarantined += quarantined;
        self.accumulator.seconds += started.elapsed().as_secs_f64();
        Ok(checked)
    }

    /// Adds the gradients of samples with right log-probabilities.
    fn add(
        &mut self,
        samples: &[Sample],
        advantages: &[f64],
        settings: &StepSettings,
        limits: &Limits,
    ) -> anyhow::Result<Checked> {
        let mut checked = Checked::default();
        let supervised = settings.loss.is_supervised();
        let scaled = loss::scaled(settings.aggregation, samples, advantages);
        let kept_bytes_max = |batch: &MicroBatch| batch.has_gradient().then_some(settings.activation_bytes_max);
        for batch in batch::pack(samples, &scaled, settings.micro_batch_tokens)? {
            if batch.targets.is_empty() {
                continue;
            }
            let scored = self.score(&batch, kept_bytes_max(&batch))?;
            let (mut good, mut bad) = (Vec::new(), Vec::new());
            for (index, mismatch) in batch.mismatches(&scored.recomputed) {
                let unsampled = supervised || batch.typed;
                let accepted = match (unsampled, batch.stale) {
                    (true, _) => true,                                    // nothing depends on the sampler's
                    (false, true) => mismatch.difference_max.is_finite(), // the loss corrects for older versions
                    (false, false) => guards::accepts(limits, batch.engine.is_none(), &mismatch),
                };
                match accepted {
                    true => good.push(index),
                    false => bad.push(Rejected {
                        index,
                        mismatch: Some(mismatch),
                    }),
                }
                if !unsampled && !batch.stale && mismatch.tokens > 0 {
                    checked.compared.push((index, mismatch));
                }
            }
            if bad.is_empty() {
                self.backward(batch, scored, settings)?;
                continue;
            }
            checked.rejected.extend(bad);
            // the others alone: their values do not depend on their neighbors
            let (kept, advantages): (Vec<Sample>, Vec<f64>) =
                good.iter().map(|&i| (samples[i].clone(), scaled[i])).unzip();
            for batch in batch::pack(&kept, &advantages, settings.micro_batch_tokens)? {
                if !batch.targets.is_empty() {
                    let scored = self.score(&batch, kept_bytes_max(&batch))?;
                    self.backward(batch, scored, settings)?;
                }
            }
        }
        checked.rejected.sort_by_key(|rejected| rejected.index);
        for (index, (sample, &advantage)) in samples.iter().zip(advantages).enumerate() {
            if !is_among(&checked.rejected, index) {
                self.accumulator.add_sample(sample, advantage);
            }
        }
        Ok(checked)
    }

    /// Ends the step with what was accumulated: division, clipping, update, guards.
    pub fn finish(&mut self, settings: &StepSettings, limits: &Limits) -> anyhow::Result<Outcome> {
        let started = Instant::now();
        self.ensure_nothing_pending()?;
        let accumulated = std::mem::take(&mut self.accumulator);
        let denominator = loss::denominator(settings.aggregation, accumulated.counts());
        let mut metrics = accumulated.metrics(denominator);
        let gradients = self.take_gradients(denominator)?;
        metrics.gradient_norm = optimizer::norm(&gradients);
        if metrics.gradient_norm == 0.0 && metrics.loss.is_finite() {
            metrics.seconds = accumulated.seconds + started.elapsed().as_secs_f64();
            return Ok(Outcome::Empty(metrics));
        }
        let proposed = self.update(&accumulated, gradients, &mut metrics, settings, limits)?;
        metrics.seconds = accumulated.seconds + started.elapsed().as_secs_f64();
        let pending = match proposed {
            Ok(pending) => pending,
            Err(breach) => return Ok(Outcome::Refused { breach, metrics }),
        };
        let proposal = Proposal {
            parent: Arc::clone(&self.state.checkpoint),
            checkpoint: Arc::clone(&pending.checkpoint),
            adapts: self.lora.as_ref().and_then(Lora::base),
            metrics,
        };
        self.pending = Some(pending);
        Ok(Outcome::Proposed(proposal))
    }

    /// The state after the step, or the guard that refuses it.
    fn update(
        &mut self,
        accumulated: &Accumulator,
        mut gradients: Parameters,
        metrics: &mut Metrics,
        settings: &StepSettings,
        limits: &Limits,
    ) -> anyhow::Result<Result<State, Breach>> {
        let checked = guards::before_update(limits, metrics.loss, metrics.gradient_norm);
        if let Err(breach) = checked {
            return Ok(Err(breach));
        }
        optimizer::clip(&mut gradients, metrics.gradient_norm, settings.optimizer.clip_norm);
        let (master, optimizer) = self
            .state
            .optimizer
            .updated(&self.state.master, &gradients, &settings.optimizer);
        if let Some(name) = optimizer::first_not_finite(&master) {
            return Ok(Err(Breach::Parameters(name.to_string())));
        }
        let checkpoint = Arc::new(self.published(&master)?);
        let weights = lora_model::computed_shared(&checkpoint).context("merge the adapter")?;
        let guarding = Instant::now();
        let model =
            ExactModel::with_arithmetic(&weights, &self.arithmetic).context("build the model of the new weights")?;
        metrics.kl = mean_kl(&model, accumulated.kl_batches())?;
        metrics.guard_seconds = guarding.elapsed().as_secs_f64();
        if let Err(breach) = guards::after_update(limits, metrics.kl) {
            return Ok(Err(breach));
        }
        self.gradients
            .load(&weights, &self.arithmetic)
            .context("load the new weights")?;
        let changes = artifact::delta::stats(&self.state.weights, &weights);
        metrics.changed_weights = changes.changed_weights;
        metrics.total_weights = changes.total_weights;
        Ok(Ok(State {
            model,
            checkpoint,
            weights,
            master,
            optimizer,
        }))
    }

    /// The proposed step is durable: continue from it.
    pub fn accept(&mut self) {
        if let Some(pending) = self.pending.take() {
            self.state = pending;
        }
    }

    /// Forgets a proposed step and everything that was accumulated.
    pub fn discard(&mut self) -> anyhow::Result<()> {
        self.accumulator = Accumulator::default();
        self.gradients.clear();
        if self.pending.take().is_some() {
            self.gradients
                .load(&self.state.weights, &self.arithmetic)
                .context("return to the old weights")?;
        }
        Ok(())
    }

    fn ensure_nothing_pending(&self) -> anyhow::Result<()> {
        ensure!(
            self.pending.is_none(),
            "the previous step is neither accepted nor discarded"
        );
        Ok(())
    }

    /// The forward pass of a micro-batch, and log μ of its trained tokens. `kept_bytes_max`: for its
    /// gradient, if it has one.
    fn score(&self, batch: &MicroBatch, kept_bytes_max: Option<u64>) -> anyhow::Result<Scored> {
        let pass = score(&self.state.model, batch, kept_bytes_max)?;
        let recomputed = behavior::log_behavior(&pass.logits, batch, self.decline);
        Ok(Scored { pass, recomputed })
    }

    /// Adds the gradients of the micro-batch's summed loss. If every advantage is 0, there is no
    /// backward pass.
    fn backward(&mut self, mut batch: MicroBatch, scored: Scored, settings: &StepSettings) -> anyhow::Result<()> {
        let Scored { pass, recomputed } = scored;
        let unsampled = settings.loss.is_supervised() || batch.typed;
        if unsampled {
            batch.behavior.clone_from(&recomputed); // no mismatch is measured, whoever sampled
        }
        // of older versions the two parts of π/μ cannot be told apart: the loss corrects for both
        let corrected = (!batch.stale && !unsampled)
            .then(|| correction::factors(settings.correction, &batch.behavior, &recomputed));
        let backward = batch.has_gradient();
        let _no_grad = (!backward).then(tch::no_grad_guard);
        let logits = match backward {
            true => autograd::leaf(&pass.logits),
            false => autograd::tensor(&pass.logits),
        };
        let transform = match settings.loss.reads_own_probabilities() {
            true => {
                batch.temperature.fill(1.0);
                None
            }
            false => behavior::logit_transform(&batch, &pass.logits),
        };
        let excluded = transform
            .as_ref()
            .map_or(&[][..], |transform| &transform.excluded)
            .to_vec();
        let transform = transform.map(|transform| transform.affine);
        let transform = transform.map(|parts| parts.map(|part| Tensor::from_slice(&part).view_as(&logits)));
        let distribution = log_softmax(&logits, &batch, transform.as_ref());
        let logp = at_targets(&distribution, &batch);
        let sampled_from = Tensor::from_slice(match batch.stale {
            true => &batch.behavior,
            false => &recomputed,
        });
        let advantage = Tensor::from_slice(&batch.advantage);
        let lengths: Vec<i64> = batch.samples.iter().map(|(_, tokens)| *tokens as i64).collect();
        let masked = (!batch.suppressed.is_empty()).then(|| {
            let mut masked = vec![0.0; recomputed.len()];
            let own = to_vec(&logp.detach());
            for at in batch.suppressed.iter().map(|&at| at as usize) {
                masked[at] = (own[at] - recomputed[at]).min(0.0);
            }
            Tensor::from_slice(&masked)
        });
        let Terms { per_token, clipped } = loss::terms(
            settings.loss,
            &Tokens {
                logp: &logp,
                behavior: &sampled_from,
                advantage: &advantage,
                lengths: &lengths,
                kept: &batch.kept,
                masked: masked.as_ref(),
            },
        );
        let per_token = match &corrected {
            Some(corrected) => per_token * Tensor::from_slice(&corrected.factors),
            None => per_token,
        };
        let per_token = match excluded.is_empty() {
            true => per_token,
            false => {
                let mut weights = vec![1.0f32; batch.targets.len()];
                excluded.into_iter().for_each(|at| weights[at] = 0.0);
                per_token * Tensor::from_slice(&weights)
            }
        };
        let terms = Terms { per_token, clipped };
        if backward {
            terms.per_token.sum(Kind::Float).backward();
            self.gradients.add(&self.state.model, &pass, &logits.grad());
        }
        self.accumulator.add_disagreements(&pass.disagreements);
        self.accumulator
            .add_batch(batch, transform, &recomputed, &distribution, &terms, corrected.as_ref());
        Ok(())
    }

    /// Takes the summed gradients of the master, divided by `denominator`.
    fn take_gradients(&mut self, denominator: f64) -> anyhow::Result<Parameters> {
        let weights = self.gradients.take(denominator)?;
        Ok(match &self.lora {
            None => weights,
            Some(lora) => lora.gradients(&self.state.master, &weights),
        })
    }

    /// The checkpoint that a master rounds to.
    fn published(&self, master: &Parameters) -> anyhow::Result<Checkpoint> {
        match &self.lora {
            None => {
                let template = lora_model::merged(&self.state.checkpoint).context("merge the adapter of the head")?;
                checkpoint_from_f32(&template, master).context("round the master weights")
            }
            Some(lora) => lora.published(master),
        }
    }
}

/// Whether a sample is among the rejected ones, which are sorted by index.
fn is_among(rejected: &[Rejected], index: usize) -> bool {
    rejected.binary_search_by_key(&index, |rejected| rejected.index).is_ok()
}

/// The samples that are right themselves, but in a group with a rejected one.
fn companions(samples: &[Sample], rejected: &[Rejected]) -> Vec<Rejected> {
    let groups = rejected.iter().filter_map(|one| samples[one.index].group.as_deref());
    let groups: BTreeSet<&str> = groups.collect();
    let in_bad_group = |sample: &Sample| sample.group.as_deref().is_some_and(|group| groups.contains(group));
    let indices = (0..samples.len()).filter(|&index| in_bad_group(&samples[index]) && !is_among(rejected, index));
    indices.map(|index| Rejected { index, mismatch: None }).collect()
}

/// A micro-batch after its forward pass.
struct Scored {
    pass: Pass,
    /// log μ of each trained token.
    recomputed: Vec<f32>,
}

/// The model's pass over a micro-batch, with logits at its trained positions and its logged
/// experts, if any. `kept_bytes_max`: for its gradient, if it has one.
fn score(model: &ExactModel, batch: &MicroBatch, kept_bytes_max: Option<u64>) -> anyhow::Result<Pass> {
    let sequences: Vec<&[u32]> = batch.sequences.iter().map(Vec::as_slice).collect();
    let replay: Option<&Routing> = batch.routing.as_ref();
    Ok(match kept_bytes_max {
        Some(bytes) => model.score_for_gradient(&sequences, &batch.positions, replay, bytes)?,
        None => model.score(&sequences, &batch.positions, replay)?,
    })
}

/// Log-softmax at the trained positions, `[n, V]`, as they were sampled. `transform`: from
/// [`behavior::logit_transform`].
fn log_softmax(logits: &Tensor, batch: &MicroBatch, transform: Option<&[Tensor; 2]>) -> Tensor {
    let temperature = Tensor::from_slice(&batch.temperature).unsqueeze(1);
    let z = match transform {
        Some([factors, summands]) => logits * factors + summands,
        None => logits.shallow_clone(),
    };
    (z / temperature).log_softmax(-1, Kind::Float)
}

/// Mean KL(old‖new) over the trained tokens of the batches.
fn mean_kl(new: &ExactModel, batches: &[KlBatch]) -> anyhow::Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let (mut sum, mut tokens) = (0.0, 0);
    for KlBatch {
        batch,
        transform,
        before,
    } in batches
    {
        let logits = autograd::tensor(&score(new, batch, None)?.logits);
        let after = log_softmax(&logits, batch, transform.as_ref());
        // ids that could not be sampled have probability 0 before and after
        let change = (before - after).masked_fill(&before.eq(f64::NEG_INFINITY), 0.0);
        sum += (before.exp() * change).sum(Kind::Double).double_value(&[]);
        tokens += batch.targets.len();
    }
    Ok(sum / tokens.max(1) as f64)
}

/// Mean KL(before‖after) over the trained tokens of the samples, at the temperatures that they were sampled
/// with. For weights that another trainer made.
pub fn kl(before: &ExactModel, after: &ExactModel, samples: &[Sample], batch_tokens: usize) -> anyhow::Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let mut batches = Vec::new();
    for batch in batch::pack(samples, &vec![0.0; samples.len()], batch_tokens)? {
        if batch.targets.is_empty() {
            continue;
        }
        let logits = autograd::tensor(&score(before, &batch, None)?.logits);
        let before = log_softmax(&logits, &batch, None);
        batches.push(KlBatch {
            batch,
            transform: None,
            before,
        });
    }
    mean_kl(after, &batches)
}

fn at_targets(distribution: &Tensor, batch: &MicroBatch) -> Tensor {
    let targets = Tensor::from_slice(&batch.targets).unsqueeze(1);
    distribution.gather(1, &targets, false).squeeze_dim(1)
}

fn to_vec(tensor: &Tensor) -> Vec<f32> {
    let mut values = vec![0.0; tensor.numel()];
    tensor.copy_data(&mut values, tensor.numel());
    values
}

#[cfg(test)]
mod tests;
