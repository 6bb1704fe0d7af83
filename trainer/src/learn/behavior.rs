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

use crate::learn::batch::{MicroBatch, ReshapedToken};
use crate::learn::sample::Behavior;
use model::exact::Rows;
use model::sampling::{self, Distribution, Params, PreviousTokens};
use std::borrow::Cow;

/// Factors and summands that turn the model's logits into those of μ, `[n × V]` each. `None`: no
/// token of the micro-batch needs them. `logits` are exact and of the weights that sampled.
pub fn logit_transform(batch: &MicroBatch, logits: &Rows) -> Option<[Vec<f32>; 2]> {
    if batch.reshaped.is_empty() {
        return None;
    }
    let (size, width) = (logits.values().len(), logits.width());
    let (mut factors, mut summands) = (vec![1.0; size], vec![0.0; size]);
    for token in &batch.reshaped {
        let history = history(batch, token);
        let target = batch.targets[token.index] as u32;
        let allowed = allowed(token, logits.row(token.index).into());
        let (factor, summand) = distribution(token, &allowed, &history, target).affine();
        factors[token.index * width..][..width].copy_from_slice(&factor);
        summands[token.index * width..][..width].copy_from_slice(&summand);
    }
    Some([factors, summands])
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
                of(i, &distribution(token, &allowed(token, logits), &history, target))
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

/// The distribution from which `target` was sampled. Another engine's logits are not bit-equal to
/// ours, so our candidate tokens may lack the target. They are then extended until they contain it.
fn distribution<'a>(
    token: &'a ReshapedToken,
    logits: &'a [f32],
    history: &'a PreviousTokens,
    target: u32,
) -> Distribution<'a> {
    let Behavior { params, candidates, .. } = &*token.behavior;
    let logged = candidates
        .as_ref()
        .and_then(|counts| counts.get(token.position).copied());
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
