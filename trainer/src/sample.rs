//! One trajectory as the trainer sees it: exactly the ids and log-probabilities that were logged, never re-tokenised.

use crate::drawing::Drawing;
use policy::router::Routing;
use std::sync::Arc;
use uuid::Uuid;

/// A rewarded generation, ready to be trained on.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    pub generation: Uuid,
    /// Class of request that the baseline is kept for: its surface.
    pub class: String,
    /// Group of rollouts of one task; production has none.
    pub group: Option<String>,
    /// Serial of the oldest version that sampled any of its tokens.
    pub version: i64,
    /// At least one id.
    pub prompt: Vec<u32>,
    /// Sampled ids, the stop token included; at least one.
    pub tokens: Vec<u32>,
    /// Nats, one per sampled token, under the distribution sampled from.
    pub logprobs: Vec<f32>,
    /// One per sampled token: whether it is trained on.
    pub mask: Vec<bool>,
    /// Above 0.
    pub temperature: f32,
    /// What else shaped the distribution sampled from; `None`: nothing, it was the model's own at that temperature.
    pub drawing: Option<Arc<Drawing>>,
    /// The experts that its tokens went to, all but the last, in a mixture of experts; `None`: not logged, or there are none.
    pub experts: Option<Arc<Routing>>,
    pub reward: f64,
    /// It could not decline: `logprobs` are of the distribution without the decline token.
    pub suppressed: bool,
    /// What its advantage is multiplied with, see [`crate::explore`].
    pub weight: f64,
}

impl Sample {
    /// Tokens that a network reads to score the sampled ones: all but the last.
    pub fn input_len(&self) -> usize {
        self.prompt.len() + self.tokens.len() - 1
    }

    /// Sampled tokens that are trained on.
    pub fn trained_tokens(&self) -> usize {
        self.mask.iter().filter(|&&m| m).count()
    }
}
