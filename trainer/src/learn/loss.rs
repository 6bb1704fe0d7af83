//! Losses: the loss of one token, and how the tokens of a cohort are averaged.
//!
//! Names and constants are those of [`Loss`]. How to add one: CONTRIBUTING.md, "Add a loss".
//!
//! Symbols, all per trained token; logarithms are natural: `logp` = log π of the weights being trained, with
//! gradient; `behavior` = log μ; `advantage` = A of the token's generation. sg(x) is x without gradient. log μ of the head's
//! tokens is recomputed, so π/μ has no part of another engine's rounding: that is corrected apart
//! ([`crate::learn::correction`]). log μ of older versions' tokens is the logged one, and π/μ corrects
//! for both. `lengths`: how many of the tokens each generation has, one after another.
//! Log-ratios are clamped to ±20 before they are exponentiated.

use crate::learn::batch::Counts;
use runs::sample::{Sample, Trajectory};
use runs::settings::{Aggregation, Loss};
use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};
use text::kept::Kept;

/// The loss of each trained token, before aggregation.
pub fn terms(loss: Loss, tokens: &Tokens<'_>) -> Terms {
    let Tokens {
        logp,
        behavior,
        advantage,
        lengths,
        kept,
        masked,
    } = *tokens;
    match loss {
        Loss::Gspo { low, high } => apart(masked, behavior, |old| gspo(logp, old, advantage, lengths, low, high)),
        Loss::ReinforceIs { cap } => reinforce_is(logp, behavior, advantage, cap),
        Loss::PpoClip { low, high, dual } => {
            apart(masked, behavior, |old| ppo_clip(logp, old, advantage, low, high, dual))
        }
        Loss::Verdicts { weight_max } => verdicts(logp, advantage, lengths, kept, weight_max),
        Loss::CrossEntropy => cross_entropy(logp, advantage),
    }
}

/// The trained tokens of a micro-batch. All tensors are f32 with one value per token. `lengths` says how many of
/// them each generation has, one after another.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a> {
    pub logp: &'a Tensor,
    pub behavior: &'a Tensor,
    pub advantage: &'a Tensor,
    pub lengths: &'a [i64],
    /// How many of each generation's tokens its user kept.
    pub kept: &'a [Option<Kept>],
    /// log(1 − π(decline)), without gradient, of tokens that were sampled with the decline token masked, and 0 of the
    /// others. None: there is no such token.
    pub masked: Option<&'a Tensor>,
}

/// The number that the sum over all tokens is divided by. `counts` are the whole cohort's, not a
/// micro-batch's.
pub fn denominator(aggregation: Aggregation, counts: Counts) -> f64 {
    match aggregation {
        Aggregation::TokenMean => counts.tokens.max(1) as f64,
        Aggregation::SeqMeanTokenSum | Aggregation::SeqMeanTokenMean => counts.trajectories.max(1) as f64,
    }
}

/// The advantages, each divided by its trajectory's trained tokens if those are averaged. Every loss but
/// `verdicts` is proportional to the advantage. `samples` has all turns of its trajectories; those that are rejected later
/// have counted.
pub fn scaled(aggregation: Aggregation, samples: &[Sample], advantages: &[f64]) -> Vec<f64> {
    if aggregation != Aggregation::SeqMeanTokenMean {
        return advantages.to_vec();
    }
    let mut tokens: BTreeMap<Trajectory, usize> = BTreeMap::new();
    for sample in samples {
        *tokens.entry(sample.trajectory()).or_default() += sample.trained_tokens();
    }
    let of = |sample: &Sample| tokens.get(&sample.trajectory()).copied().unwrap_or(0).max(1) as f64;
    let scaled = samples.iter().zip(advantages);
    scaled.map(|(sample, advantage)| advantage / of(sample)).collect()
}

/// The loss of each token, and which tokens were truncated or clipped (1.0) or not (0.0, as of a loss that does
/// neither). The dual clip does not count.
#[derive(Debug)]
pub struct Terms {
    pub per_token: Tensor,
    pub clipped: Tensor,
}

/// −sg(min(ρ, cap)) · A · log π with ρ = exp(log π − log μ).
///
/// Williams 1992; truncated importance sampling as in verl's `compute_policy_loss_reinforce`.
pub fn reinforce_is(logp: &Tensor, behavior: &Tensor, advantage: &Tensor, cap: f64) -> Terms {
    let rho = ratio(&logp.detach(), behavior);
    Terms {
        per_token: -(rho.clamp_max(cap) * advantage) * logp,
        clipped: rho.gt(cap).to_kind(Kind::Float),
    }
}

/// For a loss that clips or gates the ratio: it sees how far the policy moved, and not that serving masked the decline
/// token. `loss` gets the log-probabilities of the old policy, log μ + log(1 − π(decline)), and (1 − π(decline)) weighs
/// it from outside. Otherwise rejects of explored answers would lose their gradient and accepts keep theirs.
///
/// The decoupled objective of Hilton et al. 2022 (arXiv 2110.00641).
fn apart(masked: Option<&Tensor>, behavior: &Tensor, loss: impl Fn(&Tensor) -> Terms) -> Terms {
    match masked {
        None => loss(behavior),
        Some(masked) => {
            let Terms { per_token, clipped } = loss(&(behavior + masked));
            Terms {
                per_token: per_token * masked.exp(),
                clipped,
            }
        }
    }
}

/// L = max(−A r, −A clip(r, 1 − low, 1 + high)) with r = exp(log π − log μ). With `dual`, if A < 0,
/// min(L, −A · dual).
///
/// Schulman et al. 2017; dual clip: Ye et al. 2020. As in verl's `compute_policy_loss_vanilla`.
pub fn ppo_clip(logp: &Tensor, behavior: &Tensor, advantage: &Tensor, low: f64, high: f64, dual: Option<f64>) -> Terms {
    let terms = clip(&ratio(logp, behavior), advantage, low, high);
    let Some(dual) = dual else { return terms };
    let Terms {
        per_token: loss,
        clipped,
    } = terms;
    let dual_clipped = loss.minimum(&(-(advantage * dual)));
    Terms {
        per_token: dual_clipped.where_self(&advantage.lt(0.0), &loss),
        clipped,
    }
}

/// L = max(−A s, −A clip(s, 1 − low, 1 + high)) with s = sg(exp(mean over the generation of log π − log μ))
/// · π / sg(π). The mean is clamped, not the log-ratios of tokens.
///
/// Zheng et al. 2025, as in verl's `compute_policy_loss_gspo`, which has no gradient where the mean is above 10. TRL has
/// it as `importance_sampling_level="sequence"`, without a clamp.
pub fn gspo(logp: &Tensor, behavior: &Tensor, advantage: &Tensor, lengths: &[i64], low: f64, high: f64) -> Terms {
    let constant = logp.detach();
    let of_generations = (&constant - behavior).split_with_sizes(lengths, 0);
    let means = of_generations.iter().map(|ratios| match ratios.numel() {
        0 => ratios.shallow_clone(), // of no tokens there is no mean
        _ => ratios.mean(Kind::Float).expand_as(ratios),
    });
    let mean = clamped(&Tensor::cat(&means.collect::<Vec<_>>(), 0));
    let s = mean.exp() * (logp - &constant).exp();
    clip(&s, advantage, low, high)
}

/// −log p(y) for an accepted generation y, −log(1 − p(y)) for a rejected one, with p(y) = Π π over its tokens.
///
/// The likelihood of the verdicts if a user accepts y exactly when y is what they would write, which the policy says has
/// probability p(y). The gradient of the second one is that of sg(p/(1 − p)) log p(y); that weight is truncated at `weight_max`. The
/// likelihood holds whoever sampled y and however it was chosen, so there is no importance weight: older versions' samples
/// count in full. It is a proper score, so it makes p(y) the share of accepts. A rare text that is rejected says little, and
/// moves little. Unlikelihood of whole texts: Welleck et al. 2020.
///
/// A user who keeps the first k tokens and not the word after them, tokens k+1 to k+w, says more (`kept`): p(k) = Π_{t≤k} π(y_t) ·
/// (1 − Π_{k<t≤k+w} π(y_t)). Its likelihood is that of k accepted texts of one token each and a rejected one of w; the
/// tokens after them have no gradient.
fn verdicts(logp: &Tensor, advantage: &Tensor, lengths: &[i64], kept: &[Option<Kept>], weight_max: f64) -> Terms {
    const PROBABILITY_MAX: f64 = 1.0 - 1e-6;
    let (lengths, advantage) = &judged(lengths, kept, advantage);
    let of_generations = |per_token: &Tensor| {
        let sums = per_token.split_with_sizes(lengths, 0);
        let sums = sums.iter().map(|part| part.sum(Kind::Float).expand_as(part));
        Tensor::cat(&sums.collect::<Vec<_>>(), 0)
    };
    let p = of_generations(&logp.detach()).exp().clamp_max(PROBABILITY_MAX);
    let odds: Tensor = &p / (1.0 - &p);
    let accepted = advantage.gt(0.0).to_kind(Kind::Float);
    let rejected = advantage.lt(0.0);
    let weight = accepted - odds.clamp_max(weight_max) * rejected.to_kind(Kind::Float);
    Terms {
        per_token: -(weight * logp),
        clipped: rejected.logical_and(&odds.gt(weight_max)).to_kind(Kind::Float),
    }
}

/// The lengths of the texts that were judged each for itself, and the verdicts: above 0 for right, below for wrong, 0 for
/// not known. Generations without an advantage have none.
fn judged(lengths: &[i64], kept: &[Option<Kept>], advantage: &Tensor) -> (Vec<i64>, Tensor) {
    let (mut texts, mut verdicts) = (Vec::new(), Vec::new());
    let mut advantages = advantage.split_with_sizes(lengths, 0).into_iter();
    for (&length, kept) in lengths.iter().zip(kept) {
        let Some(of_generation) = advantages.next() else { break };
        let Some(kept) = kept else {
            texts.push(length);
            verdicts.push(of_generation);
            continue;
        };
        let right = (kept.right as i64).min(length);
        let wrong = (kept.wrong as i64).min(length - right);
        texts.extend((0..right).map(|_| 1));
        texts.extend([wrong, length - right - wrong]);
        let is = |verdict: f64, tokens: i64| Tensor::full([tokens], verdict, (Kind::Float, Device::Cpu));
        let said = Tensor::cat(&[is(1.0, right), is(-1.0, wrong), is(0.0, length - right - wrong)], 0);
        verdicts.push(said * of_generation.abs());
    }
    (texts, Tensor::cat(&verdicts, 0))
}

/// max(−A r, −A clip(r, 1 − low, 1 + high)).
fn clip(r: &Tensor, advantage: &Tensor, low: f64, high: f64) -> Terms {
    let unclipped = -(advantage * r);
    let clipped = -(advantage * r.clamp(1.0 - low, 1.0 + high));
    Terms {
        per_token: unclipped.maximum(&clipped),
        clipped: clipped.gt_tensor(&unclipped).to_kind(Kind::Float),
    }
}

/// −A · log π.
pub fn cross_entropy(logp: &Tensor, advantage: &Tensor) -> Terms {
    Terms {
        per_token: -(advantage * logp),
        clipped: logp.detach().zeros_like(),
    }
}

fn ratio(logp: &Tensor, reference: &Tensor) -> Tensor {
    log_ratio(logp, reference).exp()
}

fn log_ratio(logp: &Tensor, reference: &Tensor) -> Tensor {
    clamped(&(logp - reference))
}

fn clamped(log_ratio: &Tensor) -> Tensor {
    const LOG_RATIO_MAX: f64 = 20.0;
    log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use runs::sample::Turn;
    use uuid::Uuid;

    fn leaf(values: &[f64]) -> Tensor {
        Tensor::from_slice(values).to_kind(Kind::Float).set_requires_grad(true)
    }
    fn logs(p: &[f64]) -> Vec<f64> {
        p.iter().map(|p| p.ln()).collect()
    }
    fn constant(values: &[f64]) -> Tensor {
        Tensor::from_slice(values).to_kind(Kind::Float)
    }
    fn close(tensor: &Tensor, want: &[f64]) {
        let got = Vec::<f32>::try_from(&tensor.detach()).unwrap();
        assert_eq!(got.len(), want.len());
        for (g, w) in got.iter().zip(want) {
            assert!((f64::from(*g) - w).abs() < 1e-5, "{got:?} against {want:?}");
        }
    }

    /// With so many trained tokens.
    fn sample(id: u128, episode: Option<u128>, trained: usize) -> Sample {
        let turn = episode.map(|episode| Turn {
            episode: Uuid::from_u128(episode),
            index: 0,
            rewards: [None, None].into(),
        });
        Sample {
            generation: Uuid::from_u128(id),
            mask: vec![true; trained],
            turn,
            ..Sample::example()
        }
    }

    #[test]
    fn a_mean_over_tokens_is_over_all_turns_of_a_trajectory() {
        let samples = [
            sample(1, None, 4),
            sample(2, Some(9), 1),
            sample(3, Some(9), 2),
            sample(4, None, 0),
        ];
        let advantages = [1.0, 3.0, 6.0, 5.0];
        let of = |aggregation| scaled(aggregation, &samples, &advantages);
        assert_eq!(of(Aggregation::SeqMeanTokenMean), [0.25, 1.0, 2.0, 5.0]);
        assert_eq!(of(Aggregation::SeqMeanTokenSum), advantages);
        assert_eq!(of(Aggregation::TokenMean), advantages);
    }

    #[test]
    fn a_sum_is_divided_by_the_whole_cohorts_tokens_or_trajectories() {
        let counts = Counts {
            trajectories: 2,
            tokens: 5,
        };
        assert_eq!(denominator(Aggregation::TokenMean, counts), 5.0);
        assert_eq!(denominator(Aggregation::SeqMeanTokenSum, counts), 2.0);
        assert_eq!(denominator(Aggregation::SeqMeanTokenMean, counts), 2.0);
        assert_eq!(denominator(Aggregation::TokenMean, Counts::default()), 1.0);
    }

    #[test]
    fn the_reinforce_is_loss_is_weighted_by_the_truncated_ratio() {
        // π/μ = 5 is truncated to 2; 0.5 and 1 stay
        let logp = leaf(&logs(&[0.5, 0.2, 0.3]));
        let behavior = constant(&logs(&[0.1, 0.4, 0.3]));
        let advantage = constant(&[0.75, -0.25, 0.0]);
        let terms = reinforce_is(&logp, &behavior, &advantage, 2.0);
        close(
            &terms.per_token,
            &[-2.0 * 0.75 * 0.5f64.ln(), 0.5 * 0.25 * 0.2f64.ln(), 0.0],
        );
        close(&terms.clipped, &[1.0, 0.0, 0.0]);
        terms.per_token.sum(Kind::Float).backward();
        close(&logp.grad(), &[-1.5, 0.125, 0.0]); // −min(ρ, 2) A: no gradient through the weight
    }

    #[test]
    fn ppo_clip_removes_the_gradient_of_ratios_that_moved_far_enough() {
        // ratios 1.5, 1.1, 0.5, 5 with advantages 1, 1, −1, −1
        let logp = leaf(&logs(&[0.3, 0.22, 0.1, 0.5]));
        let behavior = constant(&logs(&[0.2, 0.2, 0.2, 0.1]));
        let advantage = constant(&[1.0, 1.0, -1.0, -1.0]);
        let terms = ppo_clip(&logp, &behavior, &advantage, 0.2, 0.2, Some(3.0));
        // −1.2 (clipped), −1.1 (free), 0.8 (clipped), 3 (dual clip of 5)
        close(&terms.per_token, &[-1.2, -1.1, 0.8, 3.0]);
        close(&terms.clipped, &[1.0, 0.0, 1.0, 0.0]);
        terms.per_token.sum(Kind::Float).backward();
        close(&logp.grad(), &[0.0, -1.1, 0.0, 0.0]);
        // as published: −A r = 5 with its gradient
        let terms = ppo_clip(&logp, &behavior, &advantage, 0.2, 0.2, None);
        close(&terms.per_token, &[-1.2, -1.1, 0.8, 5.0]);
    }

    #[test]
    fn a_masked_decline_token_weighs_a_clipped_loss_and_is_not_clipped() {
        // π(decline) = 0.6, so π/μ = 0.4 for every answer of the old policy; the third answer is of an older one, with
        // π/π_old = 1.5
        let old = [0.3, 0.1, 0.2];
        let logp = leaf(&logs(&[0.3, 0.1, 0.3]));
        let behavior = constant(&logs(&old.map(|p| p / 0.4)));
        let masked = constant(&logs(&[0.4, 0.4, 0.4]));
        let advantage = constant(&[1.0, -1.0, 1.0]);
        let clip = Loss::PpoClip {
            low: 0.2,
            high: 0.2,
            dual: None,
        };
        for loss in [clip, Loss::Gspo { low: 0.2, high: 0.2 }] {
            let logp = logp.detach().set_requires_grad(true);
            let terms = terms(
                loss,
                &Tokens {
                    logp: &logp,
                    behavior: &behavior,
                    advantage: &advantage,
                    lengths: &[1, 1, 1],
                    kept: &[None; 3],
                    masked: Some(&masked),
                },
            );
            close(&terms.per_token, &[-0.4, 0.4, -0.4 * 1.2]);
            close(&terms.clipped, &[0.0, 0.0, 1.0]);
            terms.per_token.sum(Kind::Float).backward();
            close(&logp.grad(), &[-0.4, 0.4, 0.0]);
        }
    }

    #[test]
    fn gspo_gives_a_generation_one_ratio() {
        // ratios 2 and 0.5 of the first generation: 1 on average; 1.5 alone
        let logp = leaf(&logs(&[0.4, 0.1, 0.3]));
        let behavior = constant(&logs(&[0.2, 0.2, 0.2]));
        let terms = gspo(&logp, &behavior, &constant(&[2.0, 2.0, 1.0]), &[2, 0, 1], 0.2, 0.2);
        close(&terms.per_token, &[-2.0, -2.0, -1.2]);
        close(&terms.clipped, &[0.0, 0.0, 1.0]);
        terms.per_token.sum(Kind::Float).backward();
        close(&logp.grad(), &[-2.0, -2.0, 0.0]);
    }

    #[test]
    fn verdicts_are_learned_from_by_their_likelihood() {
        // an accepted text of two tokens; one rejected at p = 0.2, so its odds are 1/4; one at p = 0.99, odds 99; a reward of 0
        let logp = leaf(&logs(&[0.25, 0.4, 0.2, 0.99, 0.5]));
        let advantage = constant(&[0.75, 0.75, -0.25, -0.25, 0.0]);
        let terms = verdicts(&logp, &advantage, &[2, 1, 1, 1], &[None; 4], 20.0);
        terms.per_token.sum(Kind::Float).backward();
        close(&logp.grad(), &[-1.0, -1.0, 0.25, 20.0, 0.0]);
        close(&terms.clipped, &[0.0, 0.0, 0.0, 1.0, 0.0]);
    }

    #[test]
    fn the_gradient_of_a_reject_is_that_of_its_likelihood() {
        let logs = [-0.3, -0.9];
        let likelihood = |logs: [f64; 2]| -(1.0 - logs.iter().sum::<f64>().exp()).ln();
        let logp = leaf(&logs);
        let terms = verdicts(&logp, &constant(&[-0.25; 2]), &[2], &[None], 20.0);
        terms.per_token.sum(Kind::Float).backward();
        let step = 1e-5;
        let slope = (likelihood([logs[0] + step, logs[1]]) - likelihood([logs[0] - step, logs[1]])) / (2.0 * step);
        close(&logp.grad(), &[slope; 2]);
    }

    #[test]
    fn the_gradient_of_what_was_kept_is_that_of_its_likelihood() {
        // −log p(k) with two tokens kept, a wrong word of two, and one token of which nothing is known; beside it a text
        // that was judged as a whole, and one of whose arm nothing is learned
        let logs = [-0.3, -0.9, -0.2, -0.5, -0.7, -0.4, -0.6];
        let likelihood = |logs: &[f64]| {
            let kept = logs[0] + logs[1] + (1.0 - (logs[2] + logs[3]).exp()).ln();
            -(kept + logs[5])
        };
        let logp = leaf(&logs);
        let advantage = constant(&[-0.25, -0.25, -0.25, -0.25, -0.25, 0.75, 0.0]);
        let half = Some(Kept { right: 2, wrong: 2 });
        let terms = verdicts(&logp, &advantage, &[5, 1, 1], &[half, None, half], 20.0);
        terms.per_token.sum(Kind::Float).backward();
        let slopes = (0..logs.len()).map(|at| {
            let step = 1e-5;
            let [above, below] = [step, -step].map(|step| {
                let mut moved = logs;
                moved[at] += step;
                likelihood(&moved)
            });
            (above - below) / (2.0 * step)
        });
        close(&logp.grad(), &slopes.collect::<Vec<_>>());
    }

    #[test]
    fn cross_entropy_ignores_the_sampler() {
        let logp = leaf(&logs(&[0.5, 0.2]));
        let terms = cross_entropy(&logp, &constant(&[1.0, 0.5]));
        close(&terms.per_token, &[-0.5f64.ln(), -0.5 * 0.2f64.ln()]);
        close(&terms.clipped, &[0.0, 0.0]);
        terms.per_token.sum(Kind::Float).backward();
        close(&logp.grad(), &[-1.0, -0.5]);
    }

    #[test]
    fn extreme_log_ratios_stay_finite() {
        let logp = leaf(&[0.0, -200.0]);
        let behavior = constant(&[-200.0, 0.0]);
        let terms = reinforce_is(&logp, &behavior, &constant(&[1.0, 1.0]), 2.0);
        assert!(terms.per_token.isfinite().all().int64_value(&[]) == 1);
    }
}
