//! The weight of explored trajectories. Its tests are in `trainer/src/learn/explore_tests.rs`.
//!
//! We want the gradient of the policy π itself: g = Σ_y π(y) A(y) ∇ log π(y) over completions y.
//! With a logged probability s, serving masks the decline token d (sets its logit to −∞) at every
//! position. That gives two strata:
//!
//! | stratum | share | y is sampled from | weight of y |
//! |---|---|---|---|
//! | free | 1 − s | π | 1, or 1 / (1 − s) if y declines |
//! | suppressed | s | π̃ = Π_t π(y_t) / (1 − π_t(d)), only y without d | π / π̃ = Π_t (1 − π_t(d)) |
//!
//! In expectation, a y that shows something contributes ((1 − s) + s) π A ∇ log π. A y that
//! declines comes from the free stratum only and contributes (1 − s) / (1 − s) π A ∇ log π. The sum
//! is exactly g, for any advantage of a decline.
//!
//! The weight of a decline multiplies its advantage ([`weight`]). The weight of a suppressed
//! completion needs no code: the logged μ is π̃, so the ratio of `reinforce_is` is
//! ρ_t = π/μ = 1 − π_t(d). It is at most 1, so a cap of 1 or more never truncates it. The loss applies these
//! ratios per token instead of their product. For a policy that declines only at its first token,
//! that token has its exact weight, and later tokens count 1 instead of 1 − π_1(d). `ppo_clip` and
//! `gspo` multiply by the same weights, and clip only how far the policy has moved since.
//!
//! This is exact for a completion whose reward depends on it alone. Turns of a session are drawn
//! one by one. For each turn the table holds for its own tokens, given what came before. But the
//! turns before and after it are sampled from the mixture (1 − s) π + s π̃, and so is the reward
//! that it is credited with. The sum over turns is the gradient of π at each turn while the
//! others explore, and differs from that of π in terms of order s·T for T turns. Drawing once per
//! session would need a weight for the whole session, and would let one constant session id
//! decide for a whole product.
//!
//! **A bar.** An arm may show only texts of at least some probability (`probability_min`). The log calls a
//! text y below it declined, but y does not contain d. So y has the weight 1, as every text has.
//!
//! | stratum | share | advantage of y |
//! |---|---|---|
//! | free: y is held back | 1 − s | A of a decline |
//! | suppressed: y is shown | s | A of what its user says |
//!
//! So y contributes ((1 − s) A_decline + s A_user) π ∇ log π: the gradient of π in a world whose bar lets a
//! share s pass. The bar is held fixed. This is exact for every policy-gradient loss. `verdicts` is none: it
//! reads a reward as what a user says, so `faults.sql` drops a held-back text whose reward is not 0.

/// The factor of a trajectory's advantage. `declines`: the decline token was sampled. `share`: the logged
/// probability s, below 1; `None`: exploration was off.
pub fn weight(declines: bool, share: Option<f32>) -> f64 {
    match share {
        Some(share) if declines => 1.0 / (1.0 - f64::from(share)),
        _ => 1.0,
    }
}
