//! Log-probabilities of whole samples, with the forward pass that serves.

use crate::learn::batch;
use crate::learn::sample::Sample;
use model::exact::ExactModel;
use model::sampling::{self, Params, PreviousTokens};

/// Tokens that go through the model together.
pub const TOKENS_AT_ONCE: usize = 4096;

/// Σ log π over the trained tokens of each sample, nats, in the model's own distribution whatever the
/// tokens were sampled from. `tokens_max`: that go through the model together.
pub fn log_probs(model: &ExactModel, samples: &[Sample], tokens_max: usize) -> anyhow::Result<Vec<f64>> {
    let mut sums = vec![0.0; samples.len()];
    let (own, nothing) = (Params::default(), PreviousTokens::default());
    // micro-batches keep samples with and without an advantage apart; here all have the same
    for batch in batch::pack(samples, &vec![1.0; samples.len()], tokens_max)? {
        if batch.targets.is_empty() {
            continue;
        }
        let sequences: Vec<&[u32]> = batch.sequences.iter().map(Vec::as_slice).collect();
        let pass = model.score(&sequences, &batch.positions, batch.routing.as_ref())?;
        let logits = pass.logits.rows().zip(&batch.targets);
        let mut tokens =
            logits.map(|(logits, &target)| f64::from(sampling::log_prob_of(logits, &own, &nothing, target as u32)));
        for &(sample, count) in &batch.samples {
            sums[sample] += tokens.by_ref().take(count).sum::<f64>();
        }
    }
    Ok(sums)
}
