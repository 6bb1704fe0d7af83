//! Learning from explored trajectories: what their gradient counts for, and the distribution that sampled them.
//!
//! Wanted is the gradient of the policy as it is, g = Σ_y π(y) A(y) ∇ log π(y), over completions y. Serving tosses a coin,
//! and with its logged probability s the decline token d is masked (−∞) at every position. There are two strata:
//!
//! | stratum | share | y is drawn from | weight of y |
//! |---|---|---|---|
//! | free | 1 − s | π | 1 where it shows something, 1 / (1 − s) where it declines |
//! | suppressed | s | π̃ = Π_t π(y_t) / (1 − π_t(d)), only y without d | π / π̃ = Π_t (1 − π_t(d)) |
//!
//! In expectation a y that shows something contributes ((1 − s) + s) π A ∇ log π, and one that declines, which only the
//! free stratum can draw, (1 − s) / (1 − s) π A ∇ log π: together exactly g, for any advantage, that of a decline
//! included. Where a decline's advantage is 0, its weight does not matter.
//!
//! The weight of a decline multiplies its advantage. That of a suppressed completion needs no code of its own: the logged
//! μ is π̃, so `reinforce_is` finds ρ_t = π/μ = 1 − π_t(d) at each token. It applies them token by token, not as their
//! product, as it does with every ratio: where a policy declines at its first token only, that token, which decides between
//! showing and declining, has its exact weight, and the following ones count for 1 instead of 1 − π_1(d). ρ_t is at most 1,
//! so the cap never cuts it. `ppo_clip` does not look at μ and takes explored completions for free ones.

use crate::batch::MicroBatch;
use policy::model::Rows;
use policy::sampling::{self, History, Params};
use std::borrow::Cow;

/// What a trajectory's advantage is multiplied with. `share`: the coin's probability, below 1; `None`: not tossed.
pub fn weight(declined: bool, share: Option<f32>) -> f64 {
    match share {
        Some(share) if declined => 1.0 / (1.0 - f64::from(share)),
        _ => 1.0,
    }
}

/// log μ of the trained tokens under the distribution that sampled them, by the sampler's own arithmetic: what parity is
/// measured with. One per trained token, from its row of `logits`. `decline`: the version's decline token; a suppressed
/// completion that declines all the same has −∞ there, which no parity guard lets pass.
pub fn log_behaviour(logits: &Rows, batch: &MicroBatch, decline: Option<u32>) -> Vec<f32> {
    let mut suppressed = batch.suppressed.iter().peekable();
    let mut drawn = batch.drawn.iter().peekable();
    let mut rows = Vec::with_capacity(batch.targets.len());
    for (i, logits) in logits.rows().enumerate() {
        let masked = suppressed.next_if(|&&at| at == i as i64).and(decline);
        let (target, temperature) = (batch.targets[i] as u32, batch.temperature[i]);
        let params = Params {
            temperature,
            ..Params::default()
        };
        let mut logits = Cow::from(logits);
        if let Some(decline) = masked {
            sampling::suppress(logits.to_mut(), decline);
        }
        rows.push(match drawn.next_if(|drawn| drawn.at == i) {
            Some(drawn) => {
                let history = drawn.history(batch);
                drawn.distribution(&logits, &history, target).log_prob(target)
            }
            None => sampling::log_prob_of(&logits, &params, &History::default(), target),
        });
    }
    rows
}

#[cfg(test)]
#[cfg(feature = "torch")]
mod tests;
