//! The engine: one thread that samples tokens. It batches sequences over one KV cache per loaded
//! version, admits requests from a bounded priority queue, and installs and retires versions
//! between passes.
//!
//! It knows token ids and versions, but no HTTP, text or log. It never chooses a version: each
//! request names the version it was routed to and finishes on it.

pub mod backend;
mod batch;
pub mod caller;
pub mod exact;
pub mod load;
pub(crate) mod queue;
mod thread;

pub use thread::{Config, Handle, Thread, spawn};

use artifact::digest::Digest;
use artifact::reference::Reference;
use caller::Caller;
use futures::future::BoxFuture;
use load::{Limit, Load};
use model::router::Routing;
use model::sampling;
use serde_json::Value;
use std::sync::Arc;
use std::time::{Duration, Instant};
use text::chat::{self, Templates};
use text::constraint::Matcher;
use text::tokenizer::Tokenizer;
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

/// Samples tokens for the API: our own engine ([`Handle`]), or engines elsewhere
/// ([`Pool`](crate::remote::Pool)).
pub trait Engine: Send + Sync {
    /// Queues all choices of one request, or none of them. All have the same caller, traffic class and
    /// priority. Choices that lose their places to them get [`SampleEvent::Displaced`].
    fn submit(&self, requests: Vec<SampleRequest>) -> Result<(), SubmitError>;

    /// `None`: the version takes requests. Otherwise the caller waits, without holding the version,
    /// and routes again.
    fn unavailable(&self, version: &LoadedVersion) -> Option<BoxFuture<'static, ()>>;

    /// Refuses further requests. Running sequences are cut off.
    fn stop(&self);

    /// What each engine behind this one does. Our own is one; a pool has several, in their order.
    fn loads(&self) -> Vec<Load> {
        Vec::new()
    }

    /// Limits rollouts and evaluations from now on: one limit for each of [`Engine::loads`].
    fn lend(&self, _limits: &[Limit]) {}
}

/// A version that can answer. Holding the `Arc` keeps it loaded; holding a copy of it does not.
#[derive(Debug, Clone)]
pub struct LoadedVersion {
    pub serial: i64,
    /// Content hash.
    pub root: Digest,
    pub line: String,
    /// The version whose adapter it is.
    pub adapts: Option<i64>,
    /// Longest prompt and completion together, in tokens.
    pub context: usize,
    /// Token ids are below this.
    pub vocab: u32,
    /// Sampling one of these ends a sequence; the id stays in it.
    pub stop_ids: Vec<u32>,
    /// Experts per layer of a mixture-of-experts model.
    pub experts: Option<u16>,
    /// The token that means "show nothing".
    pub decline_id: Option<u32>,
    /// `None`: the version came without one and answers token ids only.
    pub tokenizer: Option<Tokenizer>,
    /// What an engine elsewhere that serves it is compared with, if its manifest has it.
    pub reference: Option<Arc<Reference>>,
    /// A version whose templates cannot be read still answers plain prompts.
    pub templates: Result<Arc<Templates>, Arc<chat::Error>>,
}

impl LoadedVersion {
    /// Whether both make the same ids of a prompt, and text of the same ids.
    pub fn reads_like(&self, other: &LoadedVersion) -> bool {
        let tokenizers = match (&self.tokenizer, &other.tokenizer) {
            (Some(one), Some(other)) => one.is(other),
            (None, None) => true,
            _ => false,
        };
        let templates = match (&self.templates, &other.templates) {
            (Ok(one), Ok(other)) => Arc::ptr_eq(one, other),
            (Err(one), Err(other)) => Arc::ptr_eq(one, other),
            _ => false,
        };
        let shape = |version: &LoadedVersion| (version.vocab, version.context, version.decline_id);
        tokenizers && templates && shape(self) == shape(other) && self.stop_ids == other.stop_ids
    }
}

/// Production traffic goes before everything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TrafficClass {
    Production,
    /// Rollouts and evaluations: they wait, and never use the reserved slots.
    Background,
}

/// One sequence to sample.
#[derive(Debug)]
pub struct SampleRequest {
    pub version: Arc<LoadedVersion>,
    pub prompt: Arc<[u32]>,
    /// At least 1; together with the prompt it fits the version's context.
    pub max_tokens: usize,
    pub params: sampling::Params,
    /// The sequence's only source of randomness.
    pub seed: u64,
    /// Never sampled; log-probabilities are of the distribution without it.
    pub suppressed: Option<u32>,
    /// Ids that it excludes are never sampled either.
    pub constraint: Option<Constraint>,
    /// Where the caller wants it to end.
    pub ends: Ends,
    /// Ask for the log-probabilities of the prompt's tokens, and for so many of the most probable ones.
    pub score_prompt: Option<usize>,
    /// How many of the most probable tokens to report with each sampled one.
    pub top_logprobs: usize,
    pub caller: Caller,
    pub class: TrafficClass,
    /// Within a class: lower goes first.
    pub priority: i32,
    /// The episode of which it is a turn: what it shares with earlier turns may be in a cache.
    pub session: Option<Uuid>,
    /// Capacity of at least [`events_max`], so the engine never waits. Dropping the receiver cancels
    /// the sequence.
    pub events: mpsc::Sender<SampleEvent>,
    pub submitted: Instant,
}

impl SampleRequest {
    /// Sampling one of these ends the sequence.
    pub fn stop_ids(&self) -> Vec<u32> {
        let (decline, ignored) = (self.version.decline_id, self.ends.ignore_eos);
        let own = self.version.stop_ids.iter();
        let own = own.filter(|id| !ignored || decline == Some(**id));
        let mut ids: Vec<u32> = own.chain(&self.ends.stop_ids).copied().collect();
        ids.dedup();
        ids
    }
}

/// Where a sequence ends, besides the version's own stop ids.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ends {
    pub stop_ids: Vec<u32>,
    /// The version's own end nothing, but that which declines does.
    pub ignore_eos: bool,
    /// Nothing that ends it is sampled before so many tokens.
    pub min_tokens: usize,
}

/// What the sampled text must be: JSON of a schema.
#[derive(Debug, Clone)]
pub struct Constraint {
    pub schema: Arc<Value>,
    /// Knows the text so far.
    pub matcher: Matcher,
}

/// Progress of a sequence. The last event is never a token; a channel that closes without one means
/// that the engine stopped.
#[derive(Debug, Clone, PartialEq)]
pub enum SampleEvent {
    Token(Token),
    /// The prompt's tokens but the first, if they were asked for. Comes before the first token.
    Prompt(Vec<Token>),
    /// An engine elsewhere samples it from now on. Our own engine sends no such event.
    Started(Started),
    /// Which versions sampled the tokens, in order. Without it, all are the routed version's.
    Versions(Vec<TokensOfVersion>),
    /// The answer must not be trained on; the code says why.
    Untrainable(&'static str),
    Finished(Finish),
    /// Removed from a full queue before its first token: by a production request, or because its caller
    /// held more places than others.
    Displaced,
    /// Removed from the queue because no slot became free in time.
    Expired,
    /// Removed from the queue because its version is in force no more and no engine holds it. It has to
    /// be routed again.
    VersionGone,
    /// The engine does not take such a request. The reason is for its caller, and never logged: it may
    /// quote the request.
    Refused(String),
    /// The engine takes no more requests now.
    Busy,
    /// The engine answered something that is no answer to the request, for this reason.
    Unusable(String),
    /// The engine failed. The reason is for the log, and quotes nothing of the request or the answer.
    Failed(String),
}

/// Which engine samples a sequence.
#[derive(Clone)]
pub struct Started {
    /// What the generation is logged with as its engine.
    pub engine: Arc<str>,
    /// Whether the routed version sampled all tokens so far. Asked for answers that end before the engine
    /// says which versions sampled them.
    pub holds: Arc<dyn Fn() -> BoxFuture<'static, bool> + Send + Sync>,
}

impl std::fmt::Debug for Started {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Started")
            .field("engine", &self.engine)
            .finish_non_exhaustive()
    }
}

impl PartialEq for Started {
    fn eq(&self, other: &Self) -> bool {
        self.engine == other.engine && Arc::ptr_eq(&self.holds, &other.holds)
    }
}

/// One sampled token.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Token {
    pub id: u32,
    /// Nats, under the distribution actually sampled from.
    pub logprob: f32,
    /// How many ids could have been sampled; `None`: the engine does not say.
    pub candidates: Option<u32>,
    /// The experts used for the tokens read before this one: the prompt, or the previous token.
    /// Empty for dense models.
    pub routing: Routing,
    /// (id, log-probability at temperature 1), most probable first.
    pub top: Vec<(u32, f32)>,
}

/// Consecutive tokens that one version sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokensOfVersion {
    pub serial: i64,
    /// Content hash.
    pub root: Digest,
    pub tokens: usize,
}

/// Events of a sequence besides its tokens: the last one, and what it says of versions and training.
const EVENTS_BESIDE_TOKENS_MAX: usize = 16;

/// How many events a sequence of so many tokens has at most.
pub fn events_max(max_tokens: usize) -> usize {
    max_tokens + EVENTS_BESIDE_TOKENS_MAX
}

/// Why the engine stopped sampling a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// A stop id was sampled; it is the last token.
    Stop(u32),
    Length,
}

/// Why the engine did not accept a request or a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    #[error("{waiting} sequences wait already")]
    Full { waiting: usize },
    #[error("the engine has stopped")]
    Stopped,
}

/// A version that the engine has installed.
pub struct Installation {
    /// How long the engine paused for it.
    pub pause: Duration,
    /// Resolves to the backend once the version has retired, so that another thread frees its
    /// memory.
    pub retired: oneshot::Receiver<Box<dyn backend::Backend>>,
}
