//! The behavior policy μ: the distribution that tokens were sampled from, recomputed from the
//! model's logits.
//!
//! Top-p, top-k, min-p, penalties and logit bias change the model's distribution, and so do a
//! grammar and a masked decline token. The trainer applies the same changes before it takes
//! log-probabilities of these tokens. Then π and μ cover the same ids, and their ratio is 1 if the
//! weights are equal.
//!
//! The ids that could be sampled are the candidate tokens. The trainer finds them from its logits,
//! which are bit-equal to the sampler's, or from their logged number. Candidate tokens and
//! penalties are constants of the update; gradients flow through the logits.
//!
//! An older version filtered by its own probabilities. Tokens that it sampled get the weight
//! w = 1{y ∈ N_π} π_N(y)/μ(y) with the candidates N_π of the weights that are trained (Precup et al.
//! 2000): a token that these would filter out has the weight 0.

use crate::learn::batch::{MicroBatch, ReshapedToken};
use model::exact::Rows;
use model::sampling::{self, Distribution, Params, PreviousTokens};
use std::borrow::Cow;

/// What turns the model's logits into those of the distribution that is trained.
#[derive(Debug)]
pub struct LogitTransform {
    /// Factors and summands, `[n × V]` each.
    pub affine: [Vec<f32>; 2],
    /// Trained tokens that the weights which are trained would filter out: they have the weight 0.
    pub excluded: Vec<usize>,
}

/// `None`: no token of the micro-batch needs it. `logits` are exact and of the weights that are trained.
pub fn logit_transform(batch: &MicroBatch, logits: &Rows) -> Option<LogitTransform> {
    if batch.reshaped.is_empty() {
        return None;
    }
    let (size, width) = (logits.values().len(), logits.width());
    let (mut factors, mut summands) = (vec![1.0; size], vec![0.0; size]);
    let mut excluded = vec![];
    for token in &batch.reshaped {
        let history = history(batch, token);
        let target = batch.targets[token.index] as u32;
        let allowed = allowed(token, logits.row(token.index).into());
        if batch.stale && !own_candidates(token, &allowed, &history, target) {
            excluded.push(token.index);
        }
        let counts = match batch.stale {
            true => None,
            false => token.behavior.candidates.as_deref(),
        };
        let (factor, summand) = distribution(token, counts, &allowed, &history, target).affine();
        factors[token.index * width..][..width].copy_from_slice(&factor);
        summands[token.index * width..][..width].copy_from_slice(&summand);
    }
    Some(LogitTransform {
        affine: [factors, summands],
        excluded,
    })
}

/// log μ of every trained token, by the sampler's own arithmetic. Parity is measured with it.
/// `decline`: the version's decline token. A token that μ cannot produce, such as a decline of a
/// suppressed completion, gets −∞; the parity guard refuses it.
pub fn log_behavior(logits: &Rows, batch: &MicroBatch, decline: Option<u32>) -> Vec<f32> {
    of_each(logits, batch, decline, |i, sampled_from| {
        sampled_from.log_prob(batch.targets[i] as u32)
    })
}

/// `of` the distribution of every trained token, with the token's index.
pub fn of_each<T>(
    logits: &Rows,
    batch: &MicroBatch,
    decline: Option<u32>,
    of: impl Fn(usize, &Distribution<'_>) -> T,
) -> Vec<T> {
    let mut suppressed = batch.suppressed.iter().peekable();
    let mut reshaped = batch.reshaped.iter().peekable();
    let row = |(i, logits): (usize, &[f32])| {
        let masked = suppressed.next_if(|&&at| at == i as i64).and(decline);
        let mut logits: Cow<[f32]> = Cow::Borrowed(logits);
        if let Some(decline) = masked {
            sampling::suppress(logits.to_mut(), decline);
        }
        let target = batch.targets[i] as u32;
        match reshaped.next_if(|token| token.index == i) {
            Some(token) => {
                let history = history(batch, token);
                let counts = token.behavior.candidates.as_deref();
                of(
                    i,
                    &distribution(token, counts, &allowed(token, logits), &history, target),
                )
            }
            None => {
                let params = Params {
                    temperature: batch.temperature[i],
                    ..Params::default()
                };
                of(
                    i,
                    &Distribution::new(&logits, &params, &PreviousTokens::default(), None),
                )
            }
        }
    };
    logits.rows().enumerate().map(row).collect()
}

/// The ids before the token, for penalties.
fn history(batch: &MicroBatch, token: &ReshapedToken) -> PreviousTokens {
    match token.behavior.params.has_penalties() {
        true => {
            let (prompt, sampled) = batch.sequences[token.sequence].split_at(token.prompt_len);
            PreviousTokens::of(prompt, &sampled[..token.position])
        }
        false => PreviousTokens::default(),
    }
}

/// The logits with −∞ for the ids that a grammar excluded.
fn allowed<'a>(token: &ReshapedToken, mut logits: Cow<'a, [f32]>) -> Cow<'a, [f32]> {
    if let Some(masks) = &token.behavior.masks {
        masks.exclude(token.position, logits.to_mut());
    }
    logits
}

/// Whether the filters keep `target` with these logits.
fn own_candidates(token: &ReshapedToken, logits: &[f32], history: &PreviousTokens, target: u32) -> bool {
    let own = Distribution::new(logits, &token.behavior.params, history, None);
    own.log_prob(target) > f32::NEG_INFINITY
}

/// The distribution from which `target` was sampled. `counts`: the logged numbers of candidate tokens.
/// Another engine's logits are not bit-equal to ours, so our candidate tokens may lack the target. They
/// are then extended until they contain it.
fn distribution<'a>(
    token: &'a ReshapedToken,
    counts: Option<&[u32]>,
    logits: &'a [f32],
    history: &'a PreviousTokens,
    target: u32,
) -> Distribution<'a> {
    let params = &token.behavior.params;
    let logged = counts.and_then(|counts| counts.get(token.position).copied());
    let with_candidates = |count| Distribution::new(logits, params, history, count);
    let sampled = with_candidates(logged);
    if sampled.log_prob(target) > f32::NEG_INFINITY {
        return sampled;
    }
    let untruncated = with_candidates(Some(u32::MAX));
    let of_target = untruncated.log_prob(target);
    let rank = (0..logits.len() as u32)
        .filter(|&id| untruncated.log_prob(id) >= of_target)
        .count();
    with_candidates(Some(rank as u32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use runs::sample::Behavior;
    use std::sync::Arc;

    /// Every outcome of a token with five ids under an older version's filter and under today's.
    #[test]
    fn tokens_of_older_versions_are_weighed_by_the_filters_of_the_trained_weights() {
        let (old, new) = ([2.0f32, 1.5, 0.5, 0.0, -1.0], [0.5f32, 2.0, -0.5, 1.6, -1.0]);
        for params in [
            Params {
                top_p: 0.8,
                ..Params::default()
            },
            Params {
                top_k: 2,
                ..Params::default()
            },
            Params {
                min_p: 0.3,
                ..Params::default()
            },
        ] {
            let none = PreviousTokens::default();
            let mu = Distribution::new(&old, &params, &none, None);
            let pi = Distribution::new(&new, &params, &none, None);
            let kept = |of: &Distribution<'_>| {
                (0..5u32)
                    .filter(|&id| of.log_prob(id) > f32::NEG_INFINITY)
                    .collect::<Vec<_>>()
            };
            let counts = vec![kept(&mu).len() as u32];
            assert_ne!(kept(&mu), kept(&pi), "{params:?}");
            let mut total = 0.0;
            for id in kept(&mu) {
                let batch = MicroBatch {
                    sequences: vec![vec![0]],
                    targets: vec![i64::from(id)],
                    temperature: vec![1.0],
                    stale: true,
                    reshaped: vec![ReshapedToken {
                        index: 0,
                        sequence: 0,
                        prompt_len: 1,
                        position: 0,
                        behavior: Arc::new(Behavior {
                            params: params.clone(),
                            candidates: Some(counts.clone()),
                            masks: None,
                        }),
                    }],
                    ..MicroBatch::default()
                };
                let transform = logit_transform(&batch, &Rows::from_values(5, new.to_vec())).unwrap();
                let inside = pi.log_prob(id) > f32::NEG_INFINITY;
                assert_eq!(transform.excluded.is_empty(), inside, "{params:?}: {id}");
                let [factors, summands] = &transform.affine;
                let logits: Vec<f64> = (0..5).map(|i| f64::from(new[i] * factors[i] + summands[i])).collect();
                let sum: f64 = logits.iter().map(|l| l.exp()).sum();
                let trained = logits[id as usize].exp() / sum;
                if inside {
                    assert!(
                        (trained.ln() - f64::from(pi.log_prob(id))).abs() < 1e-5,
                        "{params:?}: {id}"
                    );
                    total += trained; // μ · w
                } else {
                    assert!(trained > 0.0, "its logarithm is finite");
                }
            }
            // E_μ[w] is what π gives to the ids that both keep.
            let both = kept(&mu).into_iter().filter(|id| kept(&pi).contains(id));
            let expected: f64 = both.map(|id| f64::from(pi.log_prob(id)).exp()).sum();
            assert!(
                (total - expected).abs() < 1e-5,
                "{params:?}: {total} against {expected}"
            );
        }
    }
}
