//! Log-probabilities of whole samples, with the forward pass that serves.

use crate::learn::batch;
use model::exact::ExactModel;
use model::sampling::{self, Params, PreviousTokens};
use runs::sample::Sample;

/// Tokens that go through the model together.
pub const TOKENS_AT_ONCE: usize = 4096;

/// What a model says of a sample's trained tokens, in its own distribution whatever they were sampled
/// from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// Σ log π, nats.
    pub log_prob: f64,
    /// Greedy decoding that may not decline takes each of them.
    pub is_greedy: bool,
}

/// Σ log π over the trained tokens of each sample, nats. `tokens_max`: that go through the model together.
pub fn log_probs(model: &ExactModel, samples: &[Sample], tokens_max: usize) -> anyhow::Result<Vec<f64>> {
    let scores = scores(model, samples, None, tokens_max)?;
    Ok(scores.into_iter().map(|score| score.log_prob).collect())
}

/// One score for each sample. `decline`: the model's decline token.
pub fn scores(
    model: &ExactModel,
    samples: &[Sample],
    decline: Option<u32>,
    tokens_max: usize,
) -> anyhow::Result<Vec<Score>> {
    let none = Score {
        log_prob: 0.0,
        is_greedy: true,
    };
    let mut scores = vec![none; samples.len()];
    let (own, nothing) = (Params::default(), PreviousTokens::default());
    // micro-batches keep samples with and without an advantage apart; here all have the same
    for batch in batch::pack(samples, &vec![1.0; samples.len()], tokens_max)? {
        if batch.targets.is_empty() {
            continue;
        }
        let sequences: Vec<&[u32]> = batch.sequences.iter().map(Vec::as_slice).collect();
        let pass = model.score(&sequences, &batch.positions, batch.routing.as_ref())?;
        let mut tokens = pass.logits.rows().zip(&batch.targets);
        for &(sample, count) in &batch.samples {
            for (logits, &target) in tokens.by_ref().take(count) {
                let (score, target) = (&mut scores[sample], target as u32);
                score.log_prob += f64::from(sampling::log_prob_of(logits, &own, &nothing, target));
                score.is_greedy &= sampling::greedy(logits, decline) == target;
            }
        }
    }
    Ok(scores)
}
