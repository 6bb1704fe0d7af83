//! Evaluations: a version, measured on the trajectories of a dataset. Samples nothing.
//!
//! The version computes the log-probability of every sampled token twice: in its own distribution,
//! and as the token was sampled (temperature, top-p, penalties, exploration). The second one over
//! what was logged gives importance weights.
//!
//! **Estimates.** What is measured is a trajectory: a single generation, or all turns of an episode.
//! Each counts once, however many turns it has. With π the version, μ what was sampled from, and a
//! trajectory's reward R,
//!
//! ```text
//! w = min(c, Π π(token | context) / μ(token | context))   over all trained tokens of all turns
//! reward_mean = Σ R / n          what the samplers got
//! reward_weighted = Σ w R / n    truncated importance sampling
//! reward_normalized = Σ w R / Σ w
//! effective_sample_size = (Σ w)² / Σ w²
//! ```
//!
//! The product of the turns' ratios is the ratio of the session's probabilities, because whatever
//! users and tools add between turns is the same under both (Precup, Sutton and Singh 2000, section 3).
//! Truncating at c = `weight_max` bounds the variance and biases toward the samplers' reward (Ionides
//! 2008). The self-normalized estimate is biased too, but does not leave the range of rewards (Owen,
//! Monte Carlo, section 9.2). The effective sample size is Kong's (1992): how many trajectories of the
//! version itself the estimates are worth. It falls fast with the length of sessions and with the
//! distance from the samplers; with an effective sample size of a few, the estimates say nothing.
//!
//! A trajectory of which any turn cannot be used has no such product. It is left out as a whole.
//!
//! A text that the bar of its arm held back (`probability_min`) has the reward of a decline, and is an
//! answer all the same: π and μ are probabilities of its tokens. So what is estimated is the version's
//! reward behind the bar as it fell in the log, where the samplers' probabilities decided. Which texts a bar
//! on the version's own probabilities would hold back, the estimates do not know.
//!
//! Beside these, `estimate` is the self-normalized one without truncation, with its 95% interval over
//! users, or the reason why the trajectories say too little about the version
//! ([`evidence::offpolicy`]): then there is none. `estimate.doubly_robust` also uses a model of the
//! reward (evaluate/reward_model.rs).
//!
//! `demonstrations` is apart from rewards: how often the version writes what users wrote themselves
//! (evaluate/demonstrated.rs).

mod demonstrated;
mod reward_model;
mod trajectories;

use super::Failed;
use super::demonstrations::Demonstrations;
use super::execution::Execution;
use super::pages::{Pages, generations_of};
use crate::learn::batch::{self, MicroBatch};
use crate::learn::behavior;
use anyhow::Context;
use demonstrated::{Demonstrated, Version};
use evidence::offpolicy::{self, Limits};
use model::exact::ExactModel;
use model::sampling::{self, Params, PreviousTokens};
use reward_model::{Opening, Outcome};
use runs::api::create::version_of;
use runs::api::offline::Evaluation;
use runs::grammar::Grammars;
use runs::sample::{ModelLimits, Sample};
use runs::select::Answers;
use runs::uses::Purpose;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use trajectories::Trajectories;
use uuid::Uuid;

/// Tokens that go through the model together.
const BATCH_TOKENS: usize = 4096;

/// `run.result`. Log-probabilities in nats.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Measured {
    version: i64,
    trajectories: usize,
    /// Of these trajectories.
    generations: usize,
    /// Trained tokens of these generations.
    tokens: usize,
    /// Of a token in the version's own distribution.
    logprob_mean: f64,
    /// Of the trajectories as they are.
    reward_mean: f64,
    /// Estimates of the version's reward.
    reward_weighted: f64,
    reward_normalized: f64,
    effective_sample_size: f64,
    weight_mean: f64,
    /// Share of the weights above `weight_max`.
    weights_clipped: f64,
    /// Trajectories with a generation that may not be used, by its code.
    refused: BTreeMap<String, usize>,
    /// Trajectories of which a generation is gone meanwhile, or has a parent that is not stored yet.
    missing: usize,
    #[serde(flatten)]
    estimate: Estimate,
    /// Absent: no user wrote what should have been written, or the version has no tokenizer or no id that
    /// ends a text.
    #[serde(skip_serializing_if = "Option::is_none")]
    demonstrations: Option<Demonstrated>,
}

/// Of the version's reward, without truncation.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
enum Estimate {
    There { estimate: Value },
    Refused { estimate_refused: String },
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Value {
    reward: f64,
    /// 95%, over users.
    interval: [f64; 2],
    users: u64,
    /// How many trajectories of the version itself it is worth.
    effective: f64,
    /// `None`: there is no model of the reward, because the users are too few to be split.
    doubly_robust: Option<DoublyRobust>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct DoublyRobust {
    reward: f64,
    /// 95%, over users.
    interval: [f64; 2],
}

impl Estimate {
    fn of(rows: &[offpolicy::Row<User>]) -> Self {
        match offpolicy::value(rows, &Limits::default()) {
            Ok(value) => Estimate::There {
                estimate: Value {
                    reward: value.self_normalized.mean,
                    interval: value.self_normalized.interval().ci95,
                    users: value.users,
                    effective: value.effective_rows,
                    doubly_robust: value.doubly_robust.map(|estimate| DoublyRobust {
                        reward: estimate.mean,
                        interval: estimate.interval().ci95,
                    }),
                },
            },
            Err(refusal) => Estimate::Refused {
                estimate_refused: refusal.to_string(),
            },
        }
    }
}

/// Tenant and key.
type User = (String, String);

/// What the version computed for one generation or trajectory, summed over its trained tokens.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Score {
    generations: usize,
    tokens: usize,
    logprob: f64,
    /// log of the version's probability over the sampler's, as the tokens were sampled.
    log_ratio: f64,
    /// Of the trajectory.
    reward: f64,
    /// `None`: several turns, or it could not decline.
    opening: Option<Opening>,
}

impl Score {
    /// Adds a turn of the same trajectory.
    fn add(&mut self, turn: &Score) {
        self.opening = turn.opening.filter(|_| self.generations == 0);
        self.generations += turn.generations;
        self.tokens += turn.tokens;
        self.logprob += turn.logprob;
        self.log_ratio += turn.log_ratio;
        self.reward = turn.reward;
    }
}

pub(super) async fn measure(run: &Execution<'_>) -> anyhow::Result<()> {
    let trainer = run.trainer;
    let config: Evaluation = run.config()?;
    let version = match &config.base {
        None => run.base_version,
        Some(name) => {
            let found = version_of(&trainer.pool, &trainer.policy, name).await?;
            let gone = || {
                Failed(format!(
                    "policy `{}` has no alias and no line `{name}` any more",
                    trainer.policy
                ))
            };
            Some(found.ok_or_else(gone)?)
        }
    };
    let version = version
        .ok_or_else(|| Failed("the run names no version to measure: create it again with `base_version`".into()))?;
    let (dataset, members) = run.dataset(&config.dataset, None).await?;
    let checkpoint = trainer.publisher.load(version).await.context("load the version")?;
    let decline = text::tokenizer::decline_id(&checkpoint).context("read the decline token")?;
    let arithmetic = trainer.arithmetic.clone();
    let of_model = Arc::clone(&checkpoint);
    let build = move || ExactModel::with_arithmetic(&of_model, &arithmetic);
    let computing = &trainer.computing;
    let model = computing.on_blocking_thread(build).await?.context("build the model")?;
    let model = Arc::new(model);
    let vocabulary = model.config().vocab_size;
    let decline = decline.filter(|&id| i64::from(id) < vocabulary);
    let limits = ModelLimits {
        context: model.config().context(),
        vocabulary,
        decline,
        experts: model.config().experts.clone().into(),
        grammars: Grammars::of(&checkpoint, vocabulary),
    };
    // without them the version is measured by rewards alone
    let demonstrations = Demonstrations::new(&trainer.pool, &limits, &dataset)
        .inspect_err(
            |error| tracing::info!(run = %run.claim.run, %error, "the version is not measured by demonstrations"),
        )
        .ok();
    drop(checkpoint); // the model has its weights
    let mut trajectories = Trajectories::new(&members);
    let mut pages = Pages::new(run, generations_of(&members));
    while let Some(read) = pages.read(&limits, Answers::Sampled).await? {
        run.check().await?;
        trajectories.refuse(read.refused);
        let model = Arc::clone(&model);
        let work = move || score(&model, &read.samples, decline).map(|scores| (read.samples, scores));
        let (samples, scores) = computing.on_blocking_thread(work).await??;
        for (sample, score) in samples.iter().zip(&scores) {
            trajectories.add(sample.generation, (&sample.tenant, &sample.user), score);
        }
    }
    let (refused, missing) = trajectories.left_out();
    let mut scores = Scores::new(config.weight_max);
    let mut used: Vec<Uuid> = Vec::new();
    for (member, _, score) in trajectories.whole() {
        used.extend(&member.generations);
        scores.add(score);
    }
    if used.is_empty() {
        let why = serde_json::json!({"refused": refused, "missing": missing});
        let reason = format!(
            "no trajectory of dataset {} can be used: {why}. docs/guide-research.md says what the codes mean",
            config.dataset
        );
        return Err(Failed(reason).into());
    }
    let estimate = Estimate::of(&rows(&trajectories));
    let demonstrations = match &demonstrations {
        None => None,
        Some(demonstrations) => {
            let of = Version {
                model: &model,
                decline,
                limits: &limits,
            };
            let measured = demonstrated::measure(run, of, demonstrations, &members).await?;
            measured.map(|(demonstrated, of)| {
                used.extend(of);
                used.sort_unstable();
                used.dedup();
                demonstrated
            })
        }
    };
    let measured = Measured {
        refused,
        missing,
        estimate,
        demonstrations,
        ..scores.measured(version)
    };
    let mut reason = format!(
        "version {version}: mean log-probability {:.4}, mean reward {:.4}, weighted {:.4} from {:.1} effective of {} trajectories",
        measured.logprob_mean,
        measured.reward_mean,
        measured.reward_weighted,
        measured.effective_sample_size,
        measured.trajectories
    );
    if let Some(demonstrated) = &measured.demonstrations {
        reason += &format!(
            "; writes what users wrote at {:.1} of 100 generations, of {}",
            demonstrated.right_per_100, demonstrated.generations
        );
    }
    let result = serde_json::to_value(&measured)?;
    run.finish(Purpose::Evaluated, &used, &result, &reason).await?;
    record(&config, &measured);
    Ok(())
}

/// What an evaluation adds to the metrics of the process. Of an alias or a line, because each version is
/// evaluated once.
fn record(config: &Evaluation, measured: &Measured) {
    let Some(base) = &config.base else { return };
    let labels = [("dataset", config.dataset.to_string()), ("base", base.clone())];
    metrics::gauge!("springtide_train_evaluated_reward", &labels).set(measured.reward_normalized);
    if let Some(demonstrated) = &measured.demonstrations {
        metrics::gauge!("springtide_train_evaluated_right_per_100", &labels).set(demonstrated.right_per_100);
    }
}

/// What is known of each whole trajectory.
fn rows(trajectories: &Trajectories<'_>) -> Vec<offpolicy::Row<User>> {
    let outcome = |(_, user, score): (_, _, &Score)| Outcome {
        user,
        reward: score.reward,
        opening: score.opening,
    };
    let outcomes: Vec<Outcome<'_>> = trajectories.whole().map(outcome).collect();
    let predictions = reward_model::predictions(&outcomes);
    let row = |(at, (_, user, score)): (usize, (_, &User, &Score))| offpolicy::Row {
        user: user.clone(),
        reward: score.reward,
        weight: score.log_ratio.exp(),
        prediction: predictions.as_ref().map(|of_each| of_each[at]),
    };
    trajectories.whole().enumerate().map(row).collect()
}

/// Scores samples with the model that serves, bit by bit. One score per sample, in their order.
fn score(model: &ExactModel, samples: &[Sample], decline: Option<u32>) -> anyhow::Result<Vec<Score>> {
    let mut scores: Vec<Score> = samples
        .iter()
        .map(|sample| Score {
            generations: 1,
            reward: sample.reward,
            ..Score::default()
        })
        .collect();
    // Micro-batches keep samples with and without an advantage apart; here all have the same.
    let advantages = vec![1.0; samples.len()];
    for batch in batch::pack(samples, &advantages, BATCH_TOKENS)? {
        if !batch.targets.is_empty() {
            add(model, &batch, samples, decline, &mut scores)?;
        }
    }
    Ok(scores)
}

fn add(
    model: &ExactModel,
    batch: &MicroBatch,
    samples: &[Sample],
    decline: Option<u32>,
    scores: &mut [Score],
) -> anyhow::Result<()> {
    let sequences: Vec<&[u32]> = batch.sequences.iter().map(Vec::as_slice).collect();
    let pass = model.score(&sequences, &batch.positions, batch.routing.as_ref())?;
    // as the token was sampled: its log-probability, and the probability of declining there
    let sampled_as = behavior::of_each(&pass.logits, batch, decline, |token, sampled_from| {
        let declined = decline.map(|id| f64::from(sampled_from.log_prob(id)).exp());
        (sampled_from.log_prob(batch.targets[token] as u32), declined)
    });
    let own = Params::default();
    let nothing = PreviousTokens::default();
    let logits = pass.logits.rows().zip(&batch.targets);
    let own: Vec<f32> = logits
        .map(|(logits, &target)| sampling::log_prob_of(logits, &own, &nothing, target as u32))
        .collect();
    let mut at = 0;
    for &(sample, count) in &batch.samples {
        let Some(score) = scores.get_mut(sample) else { continue };
        score.opening = opening(
            &samples[sample],
            sampled_as.get(at).and_then(|(_, declined)| *declined),
            decline,
        );
        for token in at..at + count {
            score.logprob += f64::from(own[token]);
            score.log_ratio += f64::from(sampled_as[token].0) - f64::from(batch.behavior[token]);
        }
        score.tokens += count;
        at += count;
    }
    Ok(())
}

/// `None` if its first token was not sampled, or it could not decline. Also if a filter chose the tokens
/// that could be sampled: where the version's own would exclude the logged one, the filter is widened, so
/// the probability would depend on what was sampled.
fn opening(sample: &Sample, decline_probability: Option<f64>, decline: Option<u32>) -> Option<Opening> {
    let is_sampled = sample.mask.first().is_some_and(|&is| is) && !sample.suppressed && sample.behavior.is_none();
    Some(Opening {
        declined: sample.tokens.first().copied() == decline,
        decline_probability: decline_probability.filter(|_| is_sampled)?,
    })
}

/// Sums over trajectories.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Scores {
    weight_max: f64,
    trajectories: usize,
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
            ..Scores::default()
        }
    }

    /// Adds a whole trajectory.
    fn add(&mut self, score: &Score) {
        let ratio = score.log_ratio.exp();
        let weight = ratio.min(self.weight_max);
        self.trajectories += 1;
        self.generations += score.generations;
        self.tokens += score.tokens;
        self.logprob += score.logprob;
        self.reward += score.reward;
        self.weight += weight;
        self.weight_squared += weight * weight;
        self.weighted_reward += weight * score.reward;
        self.clipped += usize::from(ratio > self.weight_max);
    }

    fn measured(&self, version: i64) -> Measured {
        let count = self.trajectories.max(1) as f64;
        // 0 if every weight is 0: the version would never have said any of it
        let over = |value: f64, sum: f64| if sum > 0.0 { value / sum } else { 0.0 };
        Measured {
            version,
            trajectories: self.trajectories,
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
            estimate: Estimate::of(&[]),
            demonstrations: None,
        }
    }
}

#[cfg(test)]
mod tests;
