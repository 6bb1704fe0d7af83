//! How tokens were drawn that were not drawn from the model's own distribution: top-p, top-k, min-p, penalties, logit bias.
//!
//! The trainer applies the same before it takes log-probabilities, so that π and μ are distributions over the same ids and their
//! ratio is 1 where the weights are the same. Which ids could be drawn follows from the logits, whose bits are the sampler's
//! own, or from how many there were, where that was logged. The set and the penalties are constants of the update: gradients
//! flow through the logits that are left.

use crate::batch::MicroBatch;
use ingest::event::Sampling;
use policy::model::Rows;
use policy::sampling::{Distribution, History, Params};

/// How the tokens of one generation were drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct Drawing {
    pub params: Params,
    /// How many ids could be drawn, one per sampled token, where it was logged.
    pub kept: Option<Vec<u32>>,
}

impl Drawing {
    /// `None`: from the model's own distribution.
    pub fn of(temperature: f32, top_p: f32, sampling: Option<Sampling>) -> Option<Self> {
        let sampling = sampling.unwrap_or_default();
        let params = Params {
            temperature,
            top_p,
            top_k: sampling.top_k,
            min_p: sampling.min_p,
            repetition_penalty: sampling.repetition_penalty,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            logit_bias: sampling.logit_bias,
        };
        (!params.is_plain()).then_some(Drawing {
            params,
            kept: sampling.kept,
        })
    }
}

/// Where a trained token that was drawn so is found.
#[derive(Debug, Clone, PartialEq)]
pub struct Drawn {
    /// Among the micro-batch's trained tokens.
    pub at: usize,
    /// Among its sequences.
    pub sequence: usize,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Among the sampled tokens.
    pub token: usize,
    pub drawing: std::sync::Arc<Drawing>,
}

impl Drawn {
    /// What its penalties look back on.
    pub fn history(&self, batch: &MicroBatch) -> History {
        match self.drawing.params.looks_back() {
            true => {
                let (prompt, sampled) = batch.sequences[self.sequence].split_at(self.prompt);
                History::of(prompt, &sampled[..self.token])
            }
            false => History::default(),
        }
    }

    /// `target` was drawn: where the logits are not the sampler's own bits (another engine's), the set's edge may fall short of
    /// it, and then reaches as far as it.
    pub fn distribution<'a>(&'a self, logits: &'a [f32], history: &'a History, target: u32) -> Distribution<'a> {
        let kept = self
            .drawing
            .kept
            .as_ref()
            .and_then(|kept| kept.get(self.token).copied());
        let rebuilt = |kept| Distribution::rebuilt(logits, &self.drawing.params, history, kept);
        let distribution = rebuilt(kept);
        if distribution.log_prob(target) > f32::NEG_INFINITY {
            return distribution;
        }
        let all = rebuilt(Some(u32::MAX));
        let (of, mut above) = (all.log_prob(target), 0);
        for id in 0..logits.len() as u32 {
            above += u32::from(all.log_prob(id) >= of);
        }
        rebuilt(Some(above))
    }
}

/// Factors and summands of all logits of a micro-batch, `[n × V]` each, where any of its tokens was not drawn plainly.
/// `logits`: exact, of the weights that sampled.
pub fn affine(batch: &MicroBatch, logits: &Rows) -> Option<[Vec<f32>; 2]> {
    if batch.drawn.is_empty() {
        return None;
    }
    let size = logits.values().len();
    let (mut factors, mut summands) = (vec![1.0; size], vec![0.0; size]);
    let width = logits.width();
    for drawn in &batch.drawn {
        let history = drawn.history(batch);
        let target = batch.targets[drawn.at] as u32;
        let (factor, summand) = drawn.distribution(logits.row(drawn.at), &history, target).affine();
        factors[drawn.at * width..][..width].copy_from_slice(&factor);
        summands[drawn.at * width..][..width].copy_from_slice(&summand);
    }
    Some([factors, summands])
}
