//! The behaviour policy μ: the distribution that tokens were sampled from, recomputed from the
//! model's logits.
//!
//! Top-p, top-k, min-p, penalties and logit bias change the model's distribution, and so does a
//! masked decline token. The trainer applies the same before it takes log-probabilities. Then π and
//! μ cover the same ids, and their ratio is 1 if the weights are equal. Which ids could be sampled
//! follows from the logits, which are bit-equal to the sampler's, or from their logged number. Kept
//! ids and penalties are constants of the update; gradients flow through the logits.

use crate::learn::batch::MicroBatch;
use ingest::event::Sampling;
use model::exact::Rows;
use model::sampling::{self, Distribution, History, Params};
use std::borrow::Cow;
use std::sync::Arc;

/// How the tokens of one generation were sampled, if not from the model's own distribution at some
/// temperature.
#[derive(Debug, Clone, PartialEq)]
pub struct Behaviour {
    pub params: Params,
    /// How many ids could be sampled, one value per sampled token, if it was logged.
    pub kept: Option<Vec<u32>>,
}

impl Behaviour {
    /// `None`: the model's own distribution.
    pub fn from_logged(temperature: f32, top_p: f32, sampling: Option<Sampling>) -> Option<Self> {
        // no `..`: a parameter that is added to the event must be added here
        let Sampling {
            top_k,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias,
            kept,
        } = sampling.unwrap_or_default();
        let params = Params {
            temperature,
            top_p,
            top_k,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias,
        };
        (!params.is_plain()).then_some(Behaviour { params, kept })
    }
}

/// A trained token with a [`Behaviour`], and where to find it.
#[derive(Debug, Clone, PartialEq)]
pub struct ReshapedToken {
    /// Index among the trained tokens of the micro-batch.
    pub index: usize,
    /// Index among the sequences of the micro-batch.
    pub sequence: usize,
    pub prompt_len: usize,
    /// Index among the sampled tokens of its sequence.
    pub position: usize,
    pub behaviour: Arc<Behaviour>,
}

impl ReshapedToken {
    /// The ids before the token, for penalties.
    pub fn history(&self, batch: &MicroBatch) -> History {
        match self.behaviour.params.looks_back() {
            true => {
                let (prompt, sampled) = batch.sequences[self.sequence].split_at(self.prompt_len);
                History::of(prompt, &sampled[..self.position])
            }
            false => History::default(),
        }
    }

    /// The distribution from which `target` was sampled. Another engine's logits are not bit-equal
    /// to ours, so our set of kept ids may miss the target. It is then extended until it contains
    /// the target.
    pub fn distribution<'a>(&'a self, logits: &'a [f32], history: &'a History, target: u32) -> Distribution<'a> {
        let kept = self.behaviour.kept.as_ref();
        let kept = kept.and_then(|kept| kept.get(self.position).copied());
        let rebuilt = |kept| Distribution::rebuilt(logits, &self.behaviour.params, history, kept);
        let distribution = rebuilt(kept);
        if distribution.log_prob(target) > f32::NEG_INFINITY {
            return distribution;
        }
        let all = rebuilt(Some(u32::MAX));
        let of_target = all.log_prob(target);
        let rank = (0..logits.len() as u32)
            .filter(|&id| all.log_prob(id) >= of_target)
            .count();
        rebuilt(Some(rank as u32))
    }
}

/// Factors and summands that turn the model's logits into those of μ, `[n × V]` each. `None`: no
/// token of the micro-batch needs them. `logits` are exact and of the weights that sampled.
pub fn logit_transform(batch: &MicroBatch, logits: &Rows) -> Option<[Vec<f32>; 2]> {
    if batch.reshaped.is_empty() {
        return None;
    }
    let (size, width) = (logits.values().len(), logits.width());
    let (mut factors, mut summands) = (vec![1.0; size], vec![0.0; size]);
    for token in &batch.reshaped {
        let history = token.history(batch);
        let target = batch.targets[token.index] as u32;
        let (factor, summand) = token.distribution(logits.row(token.index), &history, target).affine();
        factors[token.index * width..][..width].copy_from_slice(&factor);
        summands[token.index * width..][..width].copy_from_slice(&summand);
    }
    Some([factors, summands])
}

/// log μ of every trained token, by the sampler's own arithmetic. Parity is measured with it.
/// `decline`: the version's decline token. A token that μ cannot produce, such as a decline of a
/// suppressed completion, gets −∞; the parity guard refuses it.
pub fn log_behaviour(logits: &Rows, batch: &MicroBatch, decline: Option<u32>) -> Vec<f32> {
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
                let history = token.history(batch);
                token.distribution(&logits, &history, target).log_prob(target)
            }
            None => {
                let params = Params {
                    temperature: batch.temperature[i],
                    ..Params::default()
                };
                sampling::log_prob_of(&logits, &params, &History::default(), target)
            }
        }
    };
    logits.rows().enumerate().map(row).collect()
}
