//! Events in: wire types, HTTP, Kafka, and the trajectory store in Postgres.
//!
//! ```text
//!  POST /v1/feedback, /v1/generations          serving's producer
//!            │ api                                 │ log::Producer
//!            ▼                                     ▼
//!      Kafka: <prefix>.generation.v1, <prefix>.feedback.v1
//!            │ sink: rows and offsets in one transaction, dead letters with their reason
//!            ▼
//!      Postgres: generation, feedback, open_generation
//!            │ closer: the horizon has passed
//!            ▼
//!      trajectory: rewarded, or censored with a code
//! ```
//!
//! A collector has the same entrance in front of a spool on its own disk, which is forwarded to such an ingest.
//!
//! Knows no tensors and no policy bytes; what is trained on, and who is served, is decided elsewhere.

mod api;
mod closer;
pub mod collector;
pub mod context;
mod dialect;
mod entrance;
pub mod event;
mod facts;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod kafka;
mod lag;
pub mod log;
mod options;
mod orphan;
mod partition;
pub mod payload;
pub mod rescore;
mod retention;
pub mod reward;
mod rules;
mod service;
pub mod sink;
pub mod spool;
mod transaction;

pub use options::Options;
pub use service::run;

/// The wire types, generated from `proto/springtide/v1/event.proto`. Everything else uses [`event`].
#[expect(clippy::large_enum_variant, reason = "generated")]
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/springtide.v1.rs"));
}
