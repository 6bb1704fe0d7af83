//! What every HTTP server of Springtide shares: API keys, error documents, limits, TLS, graceful
//! shutdown and trace headers.
//!
//! This crate depends on no other crate of the workspace. It knows nothing about events, policies
//! or topics.

pub mod audit;
pub mod auth;
pub mod bind;
pub mod host;
pub mod json;
pub mod problem;
pub mod query;
pub mod routes;
pub mod sampler;
pub mod server;
pub mod tls;
pub mod trace;

pub use problem::Problem;
