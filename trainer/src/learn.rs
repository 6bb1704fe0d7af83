//! One optimizer step, from rewards to new weights. No database, no object store, no HTTP.
//!
//! | to see or change | file |
//! |---|---|
//! | a loss: its formula, how tokens are averaged | `loss.rs` |
//! | corrections for engines with other arithmetic | `correction.rs` |
//! | AdamW | `optimizer.rs` |
//! | losses of preferences | `preference.rs` |
//! | how tokens were sampled: top-p, penalties, exploration | `behavior.rs` |
//! | micro-batches | `batch.rs` |
//! | train/sampler mismatch metrics | `mismatch.rs` |
//! | what a step must satisfy to be published | `guards.rs` |
//! | losses, gradients and advantages beside those of TRL and verl (tests) | `golden.rs` |
//! | the order in which all this happens | `learner.rs` |
//!
//! What needs no libtorch is in the crate `runs`:
//!
//! | to see or change | file |
//! |---|---|
//! | losses, corrections, AdamW and guards: names, constants, defaults | `settings.rs` |
//! | advantages and baselines: their formulas | `advantage.rs` |
//! | one trajectory as the learner sees it | `sample.rs` |
//! | the weight of explored answers; answers that a grammar constrained | `explore.rs`, `grammar.rs` |
//!
//! CONTRIBUTING.md says how to add a loss or an advantage.

pub mod batch;
pub mod behavior;
pub mod correction;
#[cfg(test)]
mod explore_tests;
#[cfg(test)]
mod golden;
pub mod guards;
pub mod learner;
pub mod loss;
pub mod mismatch;
pub mod optimizer;
pub mod preference;
pub mod score;
