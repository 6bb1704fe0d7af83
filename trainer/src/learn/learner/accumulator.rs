//! Sums over the trajectories of a cohort, not yet divided. So it does not matter when each of them
//! joins. The gradients themselves accumulate in the leaves of the autograd model.

use super::{Metrics, at_targets, to_vec};
use crate::learn::batch::{Counts, MicroBatch};
use crate::learn::loss::Terms;
use crate::learn::sample::{Sample, Trajectory};
use crate::learn::{advantage, mismatch};
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

/// One in this many sequences is kept to measure KL on. More would cost time that nothing else
/// overlaps.
const KL_ONE_IN: usize = 4;

/// A micro-batch that KL is measured on after the update.
#[derive(Debug)]
pub(super) struct KlBatch {
    pub batch: MicroBatch,
    /// From [`crate::learn::behavior::logit_transform`].
    pub transform: Option<[Tensor; 2]>,
    /// Log-softmax at each trained position before the update, `[n, V]`, without gradient.
    pub before: Tensor,
}

#[derive(Debug, Default)]
pub(super) struct Accumulator {
    /// Trained tokens.
    tokens: usize,
    /// With their rewards.
    trajectories: BTreeMap<Trajectory, f64>,
    pub kl_batches: Vec<KlBatch>,
    /// Time spent on all of it.
    pub seconds: f64,
    advantages: Vec<f64>,
    explored: usize,
    replayed: usize,
    /// Samples that were refused and are in none of the sums.
    pub quarantined: usize,
    /// Tokens of sequences that the head sampled.
    of_head: LogProbs,
    /// Tokens of the others.
    stale: LogProbs,
    loss: f64,
    clipped: f64,
    entropy: f64,
    sequences: usize,
    kl_sequences: usize,
}

/// What trained tokens were logged with, and what the head gives them.
#[derive(Debug, Default)]
struct LogProbs {
    /// log μ as logged.
    logged: Vec<f32>,
    /// log μ recomputed.
    recomputed: Vec<f32>,
    /// log π.
    policy: Vec<f32>,
}

impl LogProbs {
    fn measure(&self) -> mismatch::Mismatch {
        mismatch::measure(&self.logged, &self.recomputed, &self.policy)
    }
}

impl Accumulator {
    /// Whether no sample has been given.
    pub fn is_empty(&self) -> bool {
        self.advantages.is_empty() && self.quarantined == 0
    }

    pub fn counts(&self) -> Counts {
        Counts {
            trajectories: self.trajectories.len(),
            tokens: self.tokens,
        }
    }

    /// Counts a sample that joins the cohort.
    pub fn add_sample(&mut self, sample: &Sample, advantage: f64) {
        self.trajectories.insert(sample.trajectory(), sample.reward);
        self.tokens += sample.trained_tokens();
        self.advantages.push(advantage);
        self.explored += usize::from(sample.suppressed);
        self.replayed += usize::from(sample.experts.is_some());
    }

    /// Adds what a micro-batch computed. `recomputed`: its log μ.
    pub fn add_batch(
        &mut self,
        batch: MicroBatch,
        transform: Option<[Tensor; 2]>,
        recomputed: &[f32],
        distribution: &Tensor,
        terms: &Terms,
    ) {
        let distribution = distribution.detach();
        self.loss += terms.per_token.sum(Kind::Double).double_value(&[]);
        self.clipped += terms.clipped.sum(Kind::Double).double_value(&[]);
        self.entropy += distribution.exp().special_entr().sum(Kind::Double).double_value(&[]);
        let log_probs = if batch.stale {
            &mut self.stale
        } else {
            &mut self.of_head
        };
        log_probs.recomputed.extend_from_slice(recomputed);
        log_probs.policy.extend(to_vec(&at_targets(&distribution, &batch)));
        log_probs.logged.extend_from_slice(&batch.behavior);
        self.sequences += batch.sequences.len();
        if self.kl_sequences * KL_ONE_IN < self.sequences {
            self.kl_sequences += batch.sequences.len();
            self.kl_batches.push(KlBatch {
                batch,
                transform,
                before: distribution,
            });
        }
    }

    /// The metrics that are known before the update.
    pub fn metrics(&self, denominator: f64) -> Metrics {
        let tokens = self.tokens.max(1) as f64;
        Metrics {
            loss: self.loss / denominator,
            clipped: self.clipped / tokens,
            entropy: self.entropy / tokens,
            trajectories: self.trajectories.len(),
            sequences: self.advantages.len(),
            explored: self.explored,
            replayed: self.replayed,
            quarantined: self.quarantined,
            tokens: self.tokens,
            without_gradient: self.advantages.iter().filter(|&&a| a == 0.0).count(),
            reward_mean: advantage::mean(&self.trajectories.values().copied().collect::<Vec<f64>>()),
            advantage_mean: advantage::mean(&self.advantages),
            advantage_std: advantage::std(&self.advantages),
            mismatch: self.of_head.measure(),
            stale: self.stale.measure(),
            ..Metrics::default()
        }
    }
}
