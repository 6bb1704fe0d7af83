//! One optimizer step, from rewards to new weights. No database, no object store, no HTTP.
//!
//! | to see or change | file |
//! |---|---|
//! | a loss: its formula, its constants, how tokens are averaged | `loss.rs` |
//! | corrections for engines with other arithmetic | `correction.rs` |
//! | advantages and baselines: their formulas | `advantage.rs` |
//! | AdamW | `optimizer.rs` |
//! | how tokens were sampled: top-p, penalties, exploration | `behavior.rs`, `explore.rs` |
//! | answers that a grammar constrained | `grammar.rs` |
//! | one trajectory as the trainer sees it | `sample.rs` |
//! | micro-batches | `batch.rs` |
//! | train/sampler mismatch metrics | `mismatch.rs` |
//! | what a step must satisfy to be published | `guards.rs` |
//! | losses, gradients and advantages beside those of TRL and verl (tests) | `golden.rs` |
//! | the order in which all this happens | `learner.rs` |
//!
//! Settings compile without libtorch, so that every build can check the configuration file.
//!
//! CONTRIBUTING.md says how to add a loss or an advantage.

pub mod advantage;
pub mod batch;
pub mod behavior;
pub mod correction;
pub mod explore;
#[cfg(feature = "torch")]
#[cfg(test)]
mod golden;
pub mod grammar;
pub mod guards;
#[cfg(feature = "torch")]
pub mod learner;
pub mod loss;
pub mod mismatch;
pub mod optimizer;
pub mod preference;
pub mod sample;
pub mod score;
pub mod settings;
