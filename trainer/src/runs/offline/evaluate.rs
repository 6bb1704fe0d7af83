//! Evaluations: a version, measured on the trajectories of a dataset. Samples nothing.
//!
//! The version computes the log-probability of every sampled token twice: in its own distribution,
//! and as the token was sampled (temperature, top-p, penalties, exploration). The second one over
//! what was logged gives importance weights. They are by generation and clipped, so what an estimate
//! says about a version far from the samplers is little: the effective sample size tells how little.

use super::{Failed, configuration, dataset_of, is_stopped, read_samples, succeed};
use crate::api::offline::Evaluation;
use crate::dataset;
use crate::learn::batch::{self, MicroBatch};
use crate::learn::behavior;
use crate::learn::sample::{ModelLimits, Sample};
use crate::runs::claim::Claim;
use crate::runs::trainer::Trainer;
use crate::uses::Purpose;
use anyhow::Context;
use model::exact::ExactModel;
use model::sampling::{self, Params, PreviousTokens};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Generations read at a time.
const SAMPLES_AT_ONCE: usize = 64;
/// Tokens that go through the model together.
const BATCH_TOKENS: usize = 4096;

/// `run.result`. Log-probabilities in nats.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Measured {
    version: i64,
    generations: usize,
    /// Trained tokens.
    tokens: usize,
    /// Of a token in the version's own distribution.
    logprob_mean: f64,
    /// Of the generations as they are.
    reward_mean: f64,
    /// Estimates of the version's reward: the mean of weight · reward, and the same over the mean of
    /// the weights.
    reward_weighted: f64,
    reward_normalized: f64,
    /// (Σw)² / Σw²: how many generations the estimates are worth.
    effective_sample_size: f64,
    weight_mean: f64,
    /// Share of the weights above `weight_max`.
    weights_clipped: f64,
    /// Trajectories that may not be used, by code.
    refused: BTreeMap<String, usize>,
    /// Trajectories that are gone meanwhile, or whose context cannot be read now.
    missing: usize,
}

/// What the version computed for one generation, summed over its trained tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Score {
    tokens: usize,
    logprob: f64,
    /// log of the version's probability over the sampler's, as the tokens were sampled.
    log_ratio: f64,
    reward: f64,
}

pub(super) async fn execute(trainer: &Trainer, id: Uuid, shutdown: &CancellationToken) -> anyhow::Result<()> {
    let Some(claim) = Claim::take(&trainer.pool, id).await? else {
        return Ok(());
    };
    let (config, version): (Evaluation, _) = configuration(&trainer.pool, id).await?;
    let version = version.ok_or_else(|| Failed("the run names no version".into()))?;
    let dataset = dataset_of(trainer, &config.dataset).await?;
    let mut connection = trainer.pool.acquire().await?;
    let ids = dataset::available(&mut connection, &dataset, None).await?;
    drop(connection);
    let checkpoint = trainer.publisher.load(version).await.context("load the version")?;
    let decline = text::tokenizer::decline_id(&checkpoint).context("read the decline token")?;
    let arithmetic = trainer.arithmetic.clone();
    let build = move || ExactModel::with_arithmetic(&checkpoint, &arithmetic);
    let model = Arc::new(tokio::task::spawn_blocking(build).await?.context("build the model")?);
    let limits = ModelLimits {
        context: model.config().max_position_embeddings,
        vocabulary: model.config().vocab_size,
        experts: model.config().experts.clone(),
    };
    let decline = decline.filter(|&id| i64::from(id) < limits.vocabulary);
    let mut scores = Scores::new(config.weight_max);
    let mut used: Vec<Uuid> = Vec::with_capacity(ids.len());
    let (mut refused, mut missing) = (BTreeMap::<String, usize>::new(), 0);
    for page in ids.chunks(SAMPLES_AT_ONCE) {
        if is_stopped(&trainer.pool, &claim, shutdown).await? {
            return Ok(());
        }
        let read = read_samples(trainer, page, &limits, shutdown).await?;
        missing += read.missing;
        for (code, count) in read.refused {
            *refused.entry(code).or_default() += count;
        }
        used.extend(read.samples.iter().map(|sample| sample.generation));
        let model = Arc::clone(&model);
        let work = move || score(&model, &read.samples, decline);
        for score in tokio::task::spawn_blocking(work).await?? {
            scores.add(score);
        }
    }
    if used.is_empty() {
        let why = serde_json::json!({"refused": refused, "missing": missing});
        let reason = format!("no trajectory of dataset {} can be used: {why}", config.dataset);
        return Err(Failed(reason).into());
    }
    let measured = Measured {
        refused,
        missing,
        ..scores.measured(version)
    };
    let reason = format!(
        "version {version}: mean log-probability {:.4}, mean reward {:.4}, weighted {:.4} from {:.1} effective of {} generations",
        measured.logprob_mean,
        measured.reward_mean,
        measured.reward_weighted,
        measured.effective_sample_size,
        measured.generations
    );
    let result = serde_json::to_value(&measured)?;
    succeed(trainer, &claim, Purpose::Evaluated, &used, &result, &reason).await
}

/// Scores samples with the model that serves, bit by bit. One score per sample, in their order.
fn score(model: &ExactModel, samples: &[Sample], decline: Option<u32>) -> anyhow::Result<Vec<Score>> {
    let mut scores: Vec<Score> = samples
        .iter()
        .map(|sample| Score {
            tokens: 0,
            logprob: 0.0,
            log_ratio: 0.0,
            reward: sample.reward,
        })
        .collect();
    // Micro-batches keep samples with and without an advantage apart; here all have the same.
    let advantages = vec![1.0; samples.len()];
    for batch in batch::pack(samples, &advantages, BATCH_TOKENS)? {
        if !batch.targets.is_empty() {
            add(model, &batch, decline, &mut scores)?;
        }
    }
    Ok(scores)
}

fn add(model: &ExactModel, batch: &MicroBatch, decline: Option<u32>, scores: &mut [Score]) -> anyhow::Result<()> {
    let sequences: Vec<&[u32]> = batch.sequences.iter().map(Vec::as_slice).collect();
    let pass = model.score(&sequences, &batch.positions, batch.routing.as_ref())?;
    let sampled_as = behavior::log_behavior(&pass.logits, batch, decline);
    let own = Params::default();
    let nothing = PreviousTokens::default();
    let logits = pass.logits.rows().zip(&batch.targets);
    let own: Vec<f32> = logits
        .map(|(logits, &target)| sampling::log_prob_of(logits, &own, &nothing, target as u32))
        .collect();
    let mut at = 0;
    for &(sample, count) in &batch.samples {
        let Some(score) = scores.get_mut(sample) else { continue };
        for token in at..at + count {
            score.logprob += f64::from(own[token]);
            score.log_ratio += f64::from(sampled_as[token]) - f64::from(batch.behavior[token]);
        }
        score.tokens += count;
        at += count;
    }
    Ok(())
}

/// Sums over generations.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Scores {
    weight_max: f64,
    generations: usize,
    tokens: usize,
    logprob: f64,
    reward: f64,
    weight: f64,
    weight_squared: f64,
    weighted_reward: f64,
    clipped: usize,
}

impl Scores {
    fn new(weight_max: f64) -> Self {
        Scores {
            weight_max,
            generations: 0,
            tokens: 0,
            logprob: 0.0,
            reward: 0.0,
            weight: 0.0,
            weight_squared: 0.0,
            weighted_reward: 0.0,
            clipped: 0,
        }
    }

    fn add(&mut self, score: Score) {
        let ratio = score.log_ratio.exp();
        let weight = ratio.min(self.weight_max);
        self.generations += 1;
        self.tokens += score.tokens;
        self.logprob += score.logprob;
        self.reward += score.reward;
        self.weight += weight;
        self.weight_squared += weight * weight;
        self.weighted_reward += weight * score.reward;
        self.clipped += usize::from(ratio > self.weight_max);
    }

    fn measured(&self, version: i64) -> Measured {
        let count = self.generations.max(1) as f64;
        // 0 if every weight is 0: the version would never have said any of it
        let over = |value: f64, sum: f64| if sum > 0.0 { value / sum } else { 0.0 };
        Measured {
            version,
            generations: self.generations,
            tokens: self.tokens,
            logprob_mean: self.logprob / self.tokens.max(1) as f64,
            reward_mean: self.reward / count,
            reward_weighted: self.weighted_reward / count,
            reward_normalized: over(self.weighted_reward, self.weight),
            effective_sample_size: over(self.weight * self.weight, self.weight_squared),
            weight_mean: self.weight / count,
            weights_clipped: self.clipped as f64 / count,
            refused: BTreeMap::new(),
            missing: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(log_ratio: f64, reward: f64) -> Score {
        Score {
            tokens: 2,
            logprob: -3.0,
            log_ratio,
            reward,
        }
    }

    #[test]
    fn estimates_are_those_computed_by_hand() {
        let mut scores = Scores::new(4.0);
        // weights 2, 0.5, and 8 clipped to 4
        for (ratio, reward) in [(2.0f64, 1.0), (0.5, -1.0), (8.0, 0.25)] {
            scores.add(score(ratio.ln(), reward));
        }
        let measured = scores.measured(9);
        let close = |got: f64, want: f64| assert!((got - want).abs() < 1e-12, "{got} against {want}");
        close(measured.logprob_mean, -1.5);
        close(measured.reward_mean, 0.25 / 3.0);
        close(measured.reward_weighted, (2.0 - 0.5 + 1.0) / 3.0);
        close(measured.reward_normalized, 2.5 / 6.5);
        close(measured.effective_sample_size, 6.5 * 6.5 / (4.0 + 0.25 + 16.0));
        close(measured.weight_mean, 6.5 / 3.0);
        close(measured.weights_clipped, 1.0 / 3.0);
        assert_eq!((measured.version, measured.generations, measured.tokens), (9, 3, 6));
    }

    #[test]
    fn a_version_that_would_never_say_it_has_no_effective_sample() {
        let mut scores = Scores::new(4.0);
        scores.add(score(f64::NEG_INFINITY, 1.0));
        let measured = scores.measured(1);
        assert_eq!((measured.effective_sample_size, measured.reward_normalized), (0.0, 0.0));
        assert_eq!(Scores::new(4.0).measured(1).logprob_mean, 0.0);
    }
}
