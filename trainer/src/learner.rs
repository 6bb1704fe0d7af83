//! The learner: one set of master weights, its optimiser, and the published values to compute with.
//!
//! The forward pass is the sampler's own ([`Model`]), to the bit; the gradient is libtorch's ([`Network`]) at the same
//! values and goes to the f32 master, and the next published values are the master rounded. The master is all weights, or
//! the factors of an adapter ([`lora`]). Trajectories may *accumulate* while their cohort fills: a trajectory's gradient does
//! not depend on the others', and what divides their sum is known at the end. A step is then *proposed*; the caller makes it
//! durable and *accepts* it, or *discards* it and everything is as before. Synchronous and single-threaded: see [`thread`]
//! for the thread that it lives on. Knows no database, no store and no clock but its own timings.

mod lora;
mod state;
mod sums;
pub mod thread;

use crate::batch::{self, MicroBatch};
use crate::drawing;
use crate::guards::{Breach, Limits};
use crate::mismatch::Mismatch;
use crate::optim::{self, AdamW};
use crate::sample::Sample;
use crate::select::Shape;
use crate::settings::StepSettings;
use anyhow::{Context, ensure};
use lora::Lora;
use policy::image::Image;
use policy::model::{Arithmetic, Model, Pass};
use policy::network::{self, Network, Parameters, image_from_f32, require_grad_of};
use policy::router::Routing;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Instant;
use sums::{Sums, Watched};
use tch::{Kind, Tensor};

/// What one step measured. Nats and seconds.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Metrics {
    pub loss: f64,
    /// Global, before clipping.
    pub gradient_norm: f64,
    /// KL(old‖new) exact over the vocabulary, mean over the trained tokens of at least a quarter of the sequences.
    pub kl: f64,
    /// Share of trained tokens that the loss cut.
    pub clipped: f64,
    /// Entropy of the old policy at the trained tokens, mean.
    pub entropy: f64,
    pub sequences: usize,
    /// Of those, sampled with the decline token masked.
    pub explored: usize,
    /// Of those, computed with the experts that were logged.
    pub replayed: usize,
    pub tokens: usize,
    /// Sequences whose advantage is exactly 0: they count in every mean, and nothing is propagated back through them.
    pub without_gradient: usize,
    pub reward_mean: f64,
    pub advantage_mean: f64,
    pub advantage_std: f64,
    /// Logged against recomputed log-probabilities: the parity of sampler and trainer.
    pub mismatch: Mismatch,
    /// Published values that differ from the parent's, of all.
    pub changed_weights: u64,
    pub total_weights: u64,
    /// All of the computing, whether or not the cohort was still filling.
    pub seconds: f64,
    /// Of these, measuring the update before anything of it is published.
    pub guard_seconds: f64,
}

/// A step that passed its guards and waits to be accepted or discarded.
#[derive(Debug, Clone)]
pub struct Proposal {
    pub parent_image: Arc<Image>,
    pub image: Arc<Image>,
    pub metrics: Metrics,
}

/// What came of a cohort.
#[derive(Debug, Clone)]
pub enum Outcome {
    Proposed(Proposal),
    /// Nothing has changed.
    Refused {
        breach: Breach,
        metrics: Metrics,
    },
}

/// Holds the weights of one line's head.
#[derive(Debug)]
pub struct Learner {
    /// The published values, as they are served.
    model: Model,
    /// The same values, as leaves that gather gradients.
    network: Network,
    image: Arc<Image>,
    arithmetic: Arithmetic,
    /// The id that says "show nothing".
    decline: Option<u32>,
    /// None: all weights are trained.
    lora: Option<Lora>,
    master: Parameters,
    optimiser: AdamW,
    /// The coming step's; its gradients are in the network's leaves.
    sums: Sums,
    pending: Option<Pending>,
}

#[derive(Debug)]
struct Pending {
    model: Model,
    image: Arc<Image>,
    master: Parameters,
    optimiser: AdamW,
}

impl Learner {
    /// As [`with_arithmetic`](Self::with_arithmetic), in f32 on one thread.
    pub fn from_image(image: Arc<Image>) -> anyhow::Result<Self> {
        Self::with_arithmetic(image, Arithmetic::default())
    }

    /// Starts from a version: the master is its published values, the optimiser is fresh. The precision is the one that is
    /// sampled with; gradients have it too, their sums are f32.
    pub fn with_arithmetic(image: Arc<Image>, arithmetic: Arithmetic) -> anyhow::Result<Self> {
        let mut learner = Self::build(image, arithmetic, None, Parameters::new())?;
        learner.master = learner
            .network
            .parameters()
            .iter()
            .map(|(name, tensor)| (name.clone(), tensor.detach().copy()))
            .collect();
        learner.optimiser = AdamW::new(&learner.master);
        Ok(learner)
    }

    /// Starts a new adapter of version `serial`: its weights stay, and what is trained is added to them.
    pub fn with_lora(
        image: Arc<Image>,
        arithmetic: Arithmetic,
        serial: i64,
        config: &policy::lora::Config,
        seed: u64,
    ) -> anyhow::Result<Self> {
        let fresh = Lora::fresh(Arc::clone(&image), serial, config, seed)?;
        Self::adapting(image, arithmetic, fresh)
    }

    fn adapting(
        image: Arc<Image>,
        arithmetic: Arithmetic,
        (lora, factors): (Lora, Parameters),
    ) -> anyhow::Result<Self> {
        Self::build(image, arithmetic, Some(lora), factors)
    }

    fn build(
        image: Arc<Image>,
        arithmetic: Arithmetic,
        lora: Option<Lora>,
        master: Parameters,
    ) -> anyhow::Result<Self> {
        let model = Model::with_arithmetic(&image, &arithmetic).context("build the model of the head")?;
        model.prove_exact_once();
        let network = Network::from_image(&image).context("build the network of the head")?;
        let trained = |name: &str| lora.as_ref().is_none_or(|lora| lora.adapts(name));
        let leaves = require_grad_of(network.parameters(), trained);
        let network = Network::from_parameters(network.config().clone(), leaves)?.with_compute(arithmetic.compute);
        let vocabulary = network.config().vocab_size;
        let decline = policy::tokenizer::decline_id(&image).context("read the decline token")?;
        Ok(Learner {
            model,
            network,
            image,
            arithmetic,
            decline: decline.filter(|&id| i64::from(id) < vocabulary),
            optimiser: AdamW::new(&master),
            lora,
            master,
            sums: Sums::default(),
            pending: None,
        })
    }

    /// What of its model decides which trajectories it can be trained on.
    pub fn shape(&self) -> Shape {
        let config = self.network.config();
        Shape {
            context: config.max_position_embeddings,
            vocabulary: config.vocab_size,
            experts: config.experts.clone(),
        }
    }

    /// The version this learner stands on.
    pub fn image(&self) -> &Arc<Image> {
        &self.image
    }

    /// Computes one optimiser step on a whole cohort at once. `advantages` has one value per sample.
    pub fn propose(
        &mut self,
        samples: &[Sample],
        advantages: &[f64],
        settings: &StepSettings,
        limits: &Limits,
    ) -> anyhow::Result<Outcome> {
        self.discard()?;
        self.accumulate(samples, advantages, settings)?;
        self.finish(settings, limits)
    }

    /// Adds samples to the coming step: their gradients are summed and nothing else changes. An advantage must not depend
    /// on samples that come later. After an error the sums are to be discarded.
    pub fn accumulate(
        &mut self,
        samples: &[Sample],
        advantages: &[f64],
        settings: &StepSettings,
    ) -> anyhow::Result<()> {
        let started = Instant::now();
        ensure!(
            self.pending.is_none(),
            "the step before is neither accepted nor discarded"
        );
        ensure!(samples.len() == advantages.len(), "one advantage per sample");
        let vocabulary = self.network.config().vocab_size;
        let known = |id: &u32| i64::from(*id) < vocabulary;
        for sample in samples {
            ensure!(
                sample.prompt.iter().chain(&sample.tokens).all(known),
                "generation {} has token ids outside the vocabulary of {vocabulary}",
                sample.generation
            );
        }
        self.sums.join(samples, advantages, batch::count(samples));
        for batch in batch::pack(samples, advantages, settings.micro_batch_tokens)? {
            self.forward_backward(batch, settings)?;
        }
        self.sums.seconds += started.elapsed().as_secs_f64();
        Ok(())
    }

    /// Ends the coming step with what has been gathered: division, clipping, update, guards.
    pub fn finish(&mut self, settings: &StepSettings, limits: &Limits) -> anyhow::Result<Outcome> {
        let started = Instant::now();
        ensure!(
            self.pending.is_none(),
            "the step before is neither accepted nor discarded"
        );
        let sums = std::mem::take(&mut self.sums);
        let seconds = |started: Instant| sums.seconds + started.elapsed().as_secs_f64();
        let denominator = settings.aggregation.denominator(sums.counts);
        let mut metrics = sums.metrics(denominator);
        let mut gradients = self.take_gradients(denominator);
        metrics.gradient_norm = optim::norm(&gradients);
        let checked = limits.before_update(metrics.loss, metrics.gradient_norm, metrics.mismatch.difference_max);
        if let Err(breach) = checked {
            metrics.seconds = seconds(started);
            return Ok(Outcome::Refused { breach, metrics });
        }

        optim::clip(&mut gradients, metrics.gradient_norm, settings.optimiser.clip_norm);
        let (master, optimiser) = self.optimiser.updated(&self.master, &gradients, &settings.optimiser);
        if let Some(name) = optim::first_not_finite(&master) {
            metrics.seconds = seconds(started);
            return Ok(Outcome::Refused {
                breach: Breach::Parameters(name.to_string()),
                metrics,
            });
        }
        let image = Arc::new(self.published(&master)?);
        let guarding = Instant::now();
        let model = Model::with_arithmetic(&image, &self.arithmetic).context("build the model of the new weights")?;
        metrics.kl = divergence(&model, &sums.watched)?;
        metrics.guard_seconds = guarding.elapsed().as_secs_f64();
        if let Err(breach) = limits.after_update(metrics.kl) {
            metrics.seconds = seconds(started);
            return Ok(Outcome::Refused { breach, metrics });
        }
        self.network.load_values(&image).context("take up the new weights")?;
        let changes = policy::delta::stats(&self.image, &image);
        metrics.changed_weights = changes.changed_weights;
        metrics.total_weights = changes.total_weights;
        metrics.seconds = seconds(started);
        let proposal = Proposal {
            parent_image: Arc::clone(&self.image),
            image: Arc::clone(&image),
            metrics,
        };
        self.pending = Some(Pending {
            model,
            image,
            master,
            optimiser,
        });
        Ok(Outcome::Proposed(proposal))
    }

    /// The proposed step is durable: stand on it.
    pub fn accept(&mut self) {
        if let Some(pending) = self.pending.take() {
            self.model = pending.model;
            self.image = pending.image;
            self.master = pending.master;
            self.optimiser = pending.optimiser;
        }
    }

    /// Forgets a proposed step, or what the coming one has gathered.
    pub fn discard(&mut self) -> anyhow::Result<()> {
        self.sums = Sums::default();
        for leaf in self.network.parameters().values() {
            leaf.shallow_clone().zero_grad();
        }
        if self.pending.take().is_some() {
            self.network
                .load_values(&self.image)
                .context("return to the old weights")?;
        }
        Ok(())
    }

    /// Gradients of the loss's sum over the micro-batch gather in the network's leaves. Where every advantage is 0 there
    /// are none: such a micro-batch is only run forward, so that parity holds for every token.
    fn forward_backward(&mut self, batch: MicroBatch, settings: &StepSettings) -> anyhow::Result<()> {
        if batch.targets.is_empty() {
            return Ok(());
        }
        let pass = score(&self.model, &batch, batch.routing.as_ref())?;
        let backward = batch.has_gradient();
        let _no_grad = (!backward).then(tch::no_grad_guard);
        let hidden = network::leaf(&pass.hidden);
        let logits = network::tensor(&pass.logits);
        let logits = match backward {
            true => network::with_values(self.network.project(&hidden), &logits),
            false => logits,
        };
        let shape = drawing::affine(&batch, &pass.logits)
            .map(|parts| parts.map(|part| Tensor::from_slice(&part).view_as(&logits)));
        let distribution = log_softmax(&logits, &batch, shape.as_ref());
        let logp = at_targets(&distribution, &batch);
        let behaviour = Tensor::from_slice(&batch.behaviour);
        let advantage = Tensor::from_slice(&batch.advantage);
        let terms = settings.loss.terms(&logp, &behaviour, &logp.detach(), &advantage);
        if backward {
            terms.per_token.sum(Kind::Float).backward();
            self.network.backward(&pass, hidden.grad());
        }
        self.sums
            .add(batch, shape, &pass.logits, &distribution, &terms, self.decline);
        Ok(())
    }

    /// Takes the summed gradients of the master out of the leaves, divided, and leaves none behind.
    fn take_gradients(&mut self, denominator: f64) -> Parameters {
        let _no_grad = tch::no_grad_guard();
        let leaves = self.network.parameters().iter();
        let weights = leaves
            .filter(|(_, leaf)| leaf.requires_grad())
            .map(|(name, leaf)| {
                let gradient = leaf.grad();
                let taken = if gradient.defined() {
                    gradient / denominator
                } else {
                    leaf.zeros_like()
                };
                leaf.shallow_clone().zero_grad();
                (name.clone(), taken)
            })
            .collect();
        match &self.lora {
            None => weights,
            Some(lora) => lora.gradients(&self.master, &weights),
        }
    }

    /// The version that a master makes.
    fn published(&self, master: &Parameters) -> anyhow::Result<Image> {
        match &self.lora {
            None => image_from_f32(&self.image, master).context("round the master weights"),
            Some(lora) => lora.published(master),
        }
    }
}

/// The model's pass over a micro-batch, asked at its trained positions. `replay`: the experts to go to instead of choosing.
fn score(model: &Model, batch: &MicroBatch, replay: Option<&Routing>) -> anyhow::Result<Pass> {
    let sequences: Vec<&[u32]> = batch.sequences.iter().map(Vec::as_slice).collect();
    Ok(model.score(&sequences, &batch.positions, replay)?)
}

/// log-softmax of the logits at the trained positions, as they were drawn from: `[n, V]`. `shape`: what [`drawing::affine`] gave.
fn log_softmax(logits: &Tensor, batch: &MicroBatch, shape: Option<&[Tensor; 2]>) -> Tensor {
    let temperature = Tensor::from_slice(&batch.temperature).unsqueeze(1);
    let z = match shape {
        Some([factors, summands]) => logits * factors + summands,
        None => logits.shallow_clone(),
    };
    (z / temperature).log_softmax(-1, Kind::Float)
}

/// Mean KL(old‖new) over the trained tokens that are watched, at the experts that were logged where they were.
fn divergence(new: &Model, watched: &[Watched]) -> anyhow::Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let (mut sum, mut tokens) = (0.0, 0);
    for Watched { batch, shape, before } in watched {
        let after = log_softmax(
            &network::tensor(&score(new, batch, batch.routing.as_ref())?.logits),
            batch,
            shape.as_ref(),
        );
        // what could not be drawn has probability 0 before and after
        let change = (before - after).masked_fill(&before.eq(f64::NEG_INFINITY), 0.0);
        sum += (before.exp() * change).sum(Kind::Double).double_value(&[]);
        tokens += batch.targets.len();
    }
    Ok(sum / tokens.max(1) as f64)
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
