//! The engine: one thread that answers. Continuous batching over a KV cache per resident version, admission by priority
//! from a bounded queue, versions installed and retired between decode steps.
//!
//! It knows token ids and versions, nothing of HTTP, text, the log or who asked. It never chooses a version: a sequence
//! comes with the version that it was routed to, and finishes on it.

mod batch;
pub mod model;
mod queue;
pub mod resident;
pub mod templates;
mod thread;

pub use thread::{Config, Handle, Thread, spawn};

use policy::digest::Digest;
use policy::router::Routing;
use policy::sampling;
use policy::tokenizer::Tokenizer;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// What everyone may know of a version that can answer. Holding the `Arc` keeps the version resident.
#[derive(Debug)]
pub struct Version {
    pub serial: i64,
    pub root: Digest,
    pub line: String,
    /// Longest prompt and completion together, in tokens.
    pub context: usize,
    /// Token ids are below this.
    pub vocab: u32,
    /// Sampling one of these ends a sequence; the id stays in it.
    pub stop_ids: Vec<u32>,
    /// Experts that a layer of a mixture has.
    pub experts: Option<u16>,
    /// The id that says "show nothing".
    pub decline_id: Option<u32>,
    /// None: the version came without one and answers token ids only.
    pub tokenizer: Option<Tokenizer>,
    pub templates: templates::Rendering,
}

/// Who waits for a sequence: production goes before everything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    Production,
    /// Rollouts and evaluations: they wait, and leave the reserved slots alone.
    Background,
}

/// One sequence to sample.
#[derive(Debug)]
pub struct Request {
    pub version: Arc<Version>,
    pub prompt: Arc<[u32]>,
    /// At least 1; prompt and these fit the version's context.
    pub max_tokens: usize,
    pub params: sampling::Params,
    /// The only source of randomness of this sequence.
    pub seed: u64,
    /// Ends the sequence like the version's own stop ids.
    pub stop_ids: Vec<u32>,
    /// Never sampled; log-probabilities are of the distribution without it.
    pub suppressed: Option<u32>,
    /// How many of the most probable tokens to report with each sampled one.
    pub top_logprobs: usize,
    pub class: Class,
    /// Within a class: lower goes first.
    pub priority: i32,
    /// Must hold `max_tokens + 1` events without waiting. Dropping the receiver cancels the sequence.
    pub events: mpsc::Sender<Event>,
    pub submitted: Instant,
}

/// What a sequence says while it runs. The last event is not a token; a channel that closes without one means that the
/// engine stopped.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    Token(Token),
    Finished(Finish),
    /// Pushed out of a full queue by a request of higher priority, before its first token.
    Displaced,
    Failed(String),
}

/// One sampled token.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    pub id: u32,
    /// Nats, under the distribution actually sampled from.
    pub logprob: f32,
    /// How many ids could have been sampled.
    pub kept: u32,
    /// Which experts the tokens went to that were read for this one: the prompt's, or the one sampled before. Empty where the
    /// model has none.
    pub routing: Routing,
    /// (id, log-probability at temperature 1), most probable first.
    pub top: Vec<(u32, f32)>,
}

/// Why the engine stopped sampling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// A stop id was sampled; it is the last token.
    Stop(u32),
    Length,
}

/// Why a sequence was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("{waiting} sequences wait already")]
    Full { waiting: usize },
    #[error("the engine has stopped")]
    Stopped,
}

/// A version that now answers.
pub struct Installed {
    /// How long the engine did nothing else.
    pub pause: Duration,
    /// Gives the model back once the version has left, so that its memory is freed on another thread.
    pub left: oneshot::Receiver<Box<dyn model::Model>>,
}
