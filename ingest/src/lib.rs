//! Takes in generations and feedback, and turns them into trajectories in Postgres.
//!
//! ```text
//!  POST /v1/feedback, /v1/generations          serving's producer
//!            │ entry::api                          │
//!            ▼                                     ▼
//!   event_log   Kafka: <prefix>.generation.v1, <prefix>.feedback.v1
//!            │ rows::sink: rows and offsets in one transaction
//!            │             (unusable records go to the dead-letter queue)
//!            ▼
//!      rows     Postgres: generation, feedback, open_generation
//!            │ close::closer: after the horizon
//!            ▼
//!      trajectory: rewarded, or censored with a code
//! ```
//!
//! Texts of users may be scored by a model behind an endpoint ([`judge`]). `judging` asks it, and its
//! answer goes into the log like any other feedback.
//!
//! A [`collector`] has the same API in front of a spool on its disk, and forwards its events to an
//! ingest. This crate never handles tensors or policy files. Other crates decide what to train on
//! and what to serve.
//!
//! Modules import only from those to their left, so there are no circles:
//!
//! ```text
//!  reward ◄ judge ◄ options, clock ◄ validator ◄ repaired, rows
//!        ◄ close, judging, upkeep ◄ entry ◄ service ◄ collector
//! ```

mod clock;
mod close;
pub mod collector;
mod entry;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod judge;
mod judging;
mod options;
mod repaired;
pub mod reward;
mod rows;
mod service;
mod upkeep;
mod validator;

pub use close::rescore;
pub use entry::spool;
pub use options::{ContentRetention, Options};
pub use repaired::repaired;
pub use rows::{offset, sink};
pub use service::run;
