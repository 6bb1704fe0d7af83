//! What every HTTP server of Springtide shares: API keys, error documents, limits, TLS, graceful
//! shutdown and trace headers.
//!
//! This crate depends on no other crate of the workspace. It knows nothing about events or topics,
//! and of a policy only its name and its tenant.

pub mod audit;
pub mod auth;
pub mod bind;
pub mod database;
mod held;
pub mod host;
pub mod intake;
pub mod json;
pub mod options;
pub mod path;
pub mod problem;
pub mod query;
pub mod routes;
pub mod sampler;
pub mod server;
pub mod tenant;
pub mod tls;
pub mod trace;
pub mod turns;
pub mod window;

pub use problem::Problem;

/// A replica without a report for longer is silent: nobody counts on it.
pub const REPLICA_SILENT_SECONDS: f64 = 10.0;
