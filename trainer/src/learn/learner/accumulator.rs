//! Sums over the trajectories of a cohort, not yet divided. So it does not matter when each of them
//! joins. The gradients themselves accumulate in the leaves of the autograd model.

use super::{Metrics, at_targets, to_vec};
use crate::learn::batch::{Counts, MicroBatch};
use crate::learn::correction::{Corrected, Sums};
use crate::learn::loss::Terms;
use crate::learn::mismatch;
use model::router::Disagreement;
use runs::advantage;
use runs::sample::{Sample, Trajectory};
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

/// One in this many trained tokens is kept to measure KL on, by whole micro-batches. More would cost
/// time that nothing else overlaps.
const KL_ONE_IN: usize = 4;
/// Values of log-softmax that are kept for it, unless one micro-batch has more: 256 MiB. Then half of
/// what is kept goes, and half as much is kept from there on.
const KL_VALUES_MAX: usize = 1 << 26;

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
    kl: KlSample,
    /// Time spent on all of it.
    pub seconds: f64,
    advantages: Vec<f64>,
    explored: usize,
    typed: usize,
    replayed: usize,
    /// Samples that were refused and are in none of the sums.
    pub quarantined: usize,
    /// Tokens of sequences that our engine sampled with the head's weights.
    of_head: LogProbs,
    /// The same of other engines, by name.
    engines: BTreeMap<String, LogProbs>,
    /// By layer of experts.
    disagreements: BTreeMap<i64, Disagreement>,
    /// Tokens of older versions.
    stale: LogProbs,
    /// Tokens of users.
    of_users: LogProbs,
    correction: Sums,
    loss: f64,
    clipped: f64,
    entropy: f64,
}

/// The micro-batches that KL is measured on: an even part of all.
#[derive(Debug, Default)]
struct KlSample {
    kept: Vec<KlBatch>,
    /// Trained tokens of all micro-batches so far.
    tokens: usize,
    halvings: u32,
}

impl KlSample {
    fn offer(&mut self, one: KlBatch, values_max: usize) {
        self.tokens += one.batch.targets.len();
        let kept: usize = self.kept.iter().map(|kept| kept.batch.targets.len()).sum();
        if kept * (KL_ONE_IN << self.halvings) >= self.tokens {
            return;
        }
        self.kept.push(one);
        let values = |kept: &[KlBatch]| -> usize { kept.iter().map(|one| one.before.numel()).sum() };
        while self.kept.len() > 1 && values(&self.kept) > values_max {
            let mut stays = false;
            self.kept.retain(|_| {
                stays = !stays;
                stays
            });
            self.halvings += 1;
        }
    }
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
    fn of_all<'a>(parts: impl Iterator<Item = &'a LogProbs>) -> Self {
        let mut all = LogProbs::default();
        for part in parts {
            all.logged.extend_from_slice(&part.logged);
            all.recomputed.extend_from_slice(&part.recomputed);
            all.policy.extend_from_slice(&part.policy);
        }
        all
    }

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
        self.typed += usize::from(sample.typed.is_some());
        self.replayed += usize::from(sample.experts.is_some());
    }

    /// Adds how the routers of a micro-batch differ from the sampler's.
    pub fn add_disagreements(&mut self, of_batch: &BTreeMap<i64, Disagreement>) {
        for (&layer, &disagreement) in of_batch {
            self.disagreements.entry(layer).or_default().add(disagreement);
        }
    }

    /// Adds what a micro-batch computed. `recomputed`: its log μ. `corrected`: if its tokens were.
    pub fn add_batch(
        &mut self,
        batch: MicroBatch,
        transform: Option<[Tensor; 2]>,
        recomputed: &[f32],
        distribution: &Tensor,
        terms: &Terms,
        corrected: Option<&Corrected>,
    ) {
        if let Some(corrected) = corrected {
            self.correction.add(corrected);
        }
        let distribution = distribution.detach();
        self.loss += terms.per_token.sum(Kind::Double).double_value(&[]);
        self.clipped += terms.clipped.sum(Kind::Double).double_value(&[]);
        self.entropy += distribution.exp().special_entr().sum(Kind::Double).double_value(&[]);
        let log_probs = match (batch.stale, &batch.engine) {
            _ if batch.typed => &mut self.of_users,
            (true, _) => &mut self.stale,
            (false, Some(engine)) => self.engines.entry(engine.clone()).or_default(),
            (false, None) => &mut self.of_head,
        };
        log_probs.recomputed.extend_from_slice(recomputed);
        log_probs.policy.extend(to_vec(&at_targets(&distribution, &batch)));
        log_probs.logged.extend_from_slice(&batch.behavior);
        let offered = KlBatch {
            batch,
            transform,
            before: distribution,
        };
        self.kl.offer(offered, KL_VALUES_MAX);
    }

    /// What KL is measured on.
    pub fn kl_batches(&self) -> &[KlBatch] {
        &self.kl.kept
    }

    /// The metrics that are known before the update.
    pub fn metrics(&self, denominator: f64) -> Metrics {
        let tokens = self.tokens.max(1) as f64;
        let rewards: Vec<f64> = self.trajectories.values().copied().collect();
        Metrics {
            loss: self.loss / denominator,
            clipped: self.clipped / tokens,
            entropy: self.entropy / tokens,
            trajectories: self.trajectories.len(),
            sequences: self.advantages.len(),
            explored: self.explored,
            typed: self.typed,
            typed_nats: -self.of_users.policy.iter().map(|&logp| f64::from(logp)).sum::<f64>()
                / self.of_users.policy.len().max(1) as f64,
            replayed: self.replayed,
            quarantined: self.quarantined,
            tokens: self.tokens,
            without_gradient: self.advantages.iter().filter(|&&a| a == 0.0).count(),
            reward_mean: advantage::mean(&rewards),
            reward_std: advantage::std(&rewards),
            advantage_mean: advantage::mean(&self.advantages),
            advantage_std: advantage::std(&self.advantages),
            mismatch: self.of_head.measure(),
            remote: LogProbs::of_all(self.engines.values()).measure(),
            engines: self
                .engines
                .iter()
                .map(|(engine, of)| (engine.clone(), of.measure()))
                .collect(),
            other_experts: self
                .disagreements
                .iter()
                .map(|(&layer, of)| (layer, of.other as f64 / of.tokens.max(1) as f64))
                .collect(),
            correction: self.correction.summary(),
            stale: self.stale.measure(),
            ..Metrics::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A micro-batch of so many trained tokens of a vocabulary of 10.
    fn batch(number: usize, tokens: usize) -> KlBatch {
        KlBatch {
            batch: MicroBatch {
                targets: vec![number as i64; tokens],
                ..MicroBatch::default()
            },
            transform: None,
            before: Tensor::zeros([tokens as i64, 10], (Kind::Float, tch::Device::Cpu)),
        }
    }

    fn kept(sample: &KlSample) -> Vec<i64> {
        sample.kept.iter().map(|one| one.batch.targets[0]).collect()
    }

    #[test]
    fn kl_is_measured_on_a_quarter_of_the_tokens() {
        let mut sample = KlSample::default();
        (0..13).for_each(|number| sample.offer(batch(number, 5), 1_000));
        assert_eq!(kept(&sample), [0, 4, 8, 12]);
        // a long sequence is as many as its tokens
        sample.offer(batch(13, 40), 10_000);
        assert_eq!(kept(&sample), [0, 4, 8, 12, 13]);
        (14..39).for_each(|number| sample.offer(batch(number, 5), 10_000));
        assert_eq!(kept(&sample).len(), 5);
    }

    #[test]
    fn what_kl_is_measured_on_is_bounded_and_from_the_whole_cohort() {
        let mut sample = KlSample::default();
        // 500 micro-batches of 50 values; 12 of them are kept at most
        (0..500).for_each(|number| sample.offer(batch(number, 5), 600));
        let kept = kept(&sample);
        assert!((4..=12).contains(&kept.len()), "{kept:?}");
        let gaps: Vec<i64> = kept.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(gaps.iter().all(|gap| *gap == gaps[0]), "evenly: {kept:?}");
        assert!(kept[0] == 0 && kept[kept.len() - 1] > 400, "{kept:?}");
        // one that is larger than the bound is kept alone
        let mut sample = KlSample::default();
        (0..9).for_each(|number| sample.offer(batch(number, 5), 1));
        assert_eq!(sample.kept.len(), 1);
    }
}
