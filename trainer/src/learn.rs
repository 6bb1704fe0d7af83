//! One optimizer step, from rewards to new weights. No database, no object store, no HTTP.
//!
//! | to see or change | file |
//! |---|---|
//! | a loss: its formula, its constants, how tokens are averaged | `loss.rs` |
//! | advantages and baselines: their formulas | `advantage.rs` |
//! | AdamW | `optimizer.rs` |
//! | how tokens were sampled: top-p, penalties, exploration | `behaviour.rs`, `explore.rs` |
//! | one trajectory as the trainer sees it | `sample.rs` |
//! | micro-batches | `batch.rs` |
//! | train/sampler mismatch metrics | `mismatch.rs` |
//! | what a step must satisfy to be published | `guards.rs` |
//! | the order in which all this happens | `learner.rs` |
//!
//! Settings compile without libtorch, so that every build can check the configuration file.
//!
//! # To add a loss
//!
//! 1. In `loss.rs`: a variant of [`loss::Loss`] with its constants, their check in `Loss::check`,
//!    the formula as a function with its source in the comment, and one line in `Loss::terms`.
//! 2. In the same file: a test with numbers computed by hand, of the values and of the gradient.
//! 3. In `springtide.toml`: `trainer.realtime.step.loss = { name = "my_loss", … }`. GRPO runs use
//!    the default of [`settings::StepSettings`].
//!
//! # To add an advantage
//!
//! Of production: a variant of [`advantage::BaselineKind`] with its two lines, chosen by
//! `trainer.realtime.baseline`. It may use the class and the reward of a trajectory, and the
//! baselines from before the cohort. It cannot use the other rewards of the cohort, because a
//! gradient is added as soon as its trajectory joins.
//!
//! Of GRPO: a function of one group's rewards beside [`advantage::dr_grpo`]. `runs/grpo/groups.rs`
//! calls it.

pub mod advantage;
pub mod batch;
pub mod behaviour;
pub mod explore;
pub mod guards;
#[cfg(feature = "torch")]
pub mod learner;
pub mod loss;
pub mod mismatch;
pub mod optimizer;
pub mod sample;
pub mod settings;
