//! How a judge is asked: a model behind an OpenAI-compatible endpoint that answers one question about
//! a text. The judges of feedback, which are ingest's, and those of offline runs, which are the
//! trainer's, use the same [`Endpoint`], [`request`] and [`Reply`].

mod client;
mod protocol;

use std::fmt;

use serde::Deserialize;

pub use client::Endpoint;
pub use protocol::{Fault, Reply, median, request, schema_text};

pub const VOTES_MAX: u32 = 15;

/// A secret that is never printed.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct ApiKey(String);

impl ApiKey {
    pub fn new(key: impl Into<String>) -> Self {
        Self(key.into())
    }

    /// Whether a header can carry it.
    pub fn is_printable(&self) -> bool {
        !self.0.is_empty() && self.0.bytes().all(|byte| byte.is_ascii_graphic())
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ApiKey")
    }
}

/// What kind of answer a judge gives.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Question {
    YesOrNo,
    Number { min: f64, max: f64 },
}
