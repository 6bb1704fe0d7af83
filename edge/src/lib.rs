//! What every HTTP edge of Springtide shares: who may call, how errors look, how a server drains, how a trace crosses
//! a process boundary. A leaf: it knows no event, no policy and no topic.

pub mod auth;
pub mod bind;
pub mod json;
pub mod problem;
pub mod server;
pub mod trace;

pub use problem::Problem;
