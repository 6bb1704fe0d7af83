//! What a coming step has gathered of its cohort. Everything in it is a sum over trajectories that is not divided yet, so
//! it does not matter when each of them joined; the gradients themselves gather in the network's leaves.

use super::{Metrics, at_targets, to_vec};
use crate::batch::{Counts, MicroBatch};
use crate::loss::Terms;
use crate::sample::Sample;
use crate::{advantage, explore, mismatch};
use policy::model::Rows;
use tch::{Kind, Tensor};

/// One in this many sequences is kept to measure the update on: enough for a guard, and a quarter of its time, which
/// nothing overlaps.
const WATCHED_ONE_IN: usize = 4;

/// A micro-batch that the update will be measured on.
#[derive(Debug)]
pub(super) struct Watched {
    pub batch: MicroBatch,
    /// What [`crate::drawing::affine`] gave for it.
    pub shape: Option<[Tensor; 2]>,
    /// Log-softmax at each trained position before the update, `[n, V]`, without gradient.
    pub before: Tensor,
}

/// Sums over the trajectories that have joined.
#[derive(Debug, Default)]
pub(super) struct Sums {
    pub counts: Counts,
    pub watched: Vec<Watched>,
    /// Time spent on all of it.
    pub seconds: f64,
    rewards: Vec<f64>,
    advantages: Vec<f64>,
    explored: usize,
    replayed: usize,
    logged: Vec<f32>,
    /// Under the distribution that sampled.
    recomputed: Vec<f32>,
    /// Under the policy.
    policy: Vec<f32>,
    loss: f64,
    clipped: f64,
    entropy: f64,
    rows: usize,
    rows_watched: usize,
}

impl Sums {
    /// Trajectories join.
    pub fn join(&mut self, samples: &[Sample], advantages: &[f64], counts: Counts) {
        self.counts += counts;
        self.rewards.extend(samples.iter().map(|s| s.reward));
        self.advantages.extend_from_slice(advantages);
        self.explored += samples.iter().filter(|s| s.suppressed).count();
        self.replayed += samples.iter().filter(|s| s.experts.is_some()).count();
    }

    /// A micro-batch of theirs has been computed. `decline`: the version's decline token.
    pub fn add(
        &mut self,
        batch: MicroBatch,
        shape: Option<[Tensor; 2]>,
        logits: &Rows,
        distribution: &Tensor,
        terms: &Terms,
        decline: Option<u32>,
    ) {
        let distribution = distribution.detach();
        self.loss += terms.per_token.sum(Kind::Double).double_value(&[]);
        self.clipped += terms.clipped.sum(Kind::Double).double_value(&[]);
        self.entropy += distribution.exp().special_entr().sum(Kind::Double).double_value(&[]);
        let policy = at_targets(&distribution, &batch);
        self.recomputed.extend(explore::log_behaviour(logits, &batch, decline));
        self.policy.extend(to_vec(&policy));
        self.logged.extend_from_slice(&batch.behaviour);
        self.rows += batch.sequences.len();
        if self.rows_watched * WATCHED_ONE_IN < self.rows {
            self.rows_watched += batch.sequences.len();
            self.watched.push(Watched {
                batch,
                shape,
                before: distribution,
            });
        }
    }

    /// What is known before the update.
    pub fn metrics(&self, denominator: f64) -> Metrics {
        let tokens = self.counts.tokens.max(1) as f64;
        Metrics {
            loss: self.loss / denominator,
            clipped: self.clipped / tokens,
            entropy: self.entropy / tokens,
            sequences: self.counts.sequences,
            explored: self.explored,
            replayed: self.replayed,
            tokens: self.counts.tokens,
            without_gradient: self.advantages.iter().filter(|&&a| a == 0.0).count(),
            reward_mean: advantage::mean(&self.rewards),
            advantage_mean: advantage::mean(&self.advantages),
            advantage_std: advantage::std(&self.advantages),
            mismatch: mismatch::measure(&self.logged, &self.recomputed, &self.policy),
            ..Metrics::default()
        }
    }
}
