//! Lends the slots that production does not use to rollouts and evaluations.
//!
//! Every second, for each engine: look at its [`Load`](crate::engine::load::Load), compare it with
//! what production used at this time on other days, and set how many slots rollouts may use until
//! the next look. Between two looks the engine protects production by itself: a production request
//! takes the slot of a rollout between two passes. A replica on a trainer's machine also looks when
//! the trainer begins or ends to compute.
//!
//! | module | |
//! |---|---|
//! | `options` | the configuration `[serve.tide]` |
//! | `history` | what production used at each time of the week |
//! | `controller` | the decision for one engine; pure |
//! | `minute` | what happened in one minute, as a row |
//! | `trainer` | asks the trainer on this machine whether it computes |
//! | `task` | looks, lends and reports |
//! | `http` | the control role's side: rows in, the report out |

mod controller;
mod history;
pub mod http;
mod minute;
mod options;
mod task;
mod trainer;

pub use options::Options;
pub use task::{Control, Tide};

// A day as `2026-11-02`.
time::serde::format_description!(day, Date, "[year]-[month]-[day]");
