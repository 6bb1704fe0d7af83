//! What the engine needs from a loaded model. [`super::exact`] implements it; the scheduler's tests
//! use fakes.

use model::router::Routing;

/// The result of reading tokens into a slot.
#[derive(Debug, Clone, Default)]
pub struct Step {
    /// After the last token read, one value per vocabulary entry.
    pub logits: Vec<f32>,
    /// The experts each token used; empty for dense models.
    pub routing: Routing,
}

/// Sequences in slots. All calls come from the engine's thread.
pub trait Backend: Send {
    /// Number of slots.
    fn slots(&self) -> usize;

    /// Appends tokens to slots in one pass: parts of prompts and single tokens together. Returns one
    /// step per segment. After an error the slots are unchanged.
    fn advance(&mut self, segments: &[(usize, &[u32])]) -> anyhow::Result<Vec<Step>>;

    /// Replaces the sequence in slot `to` by the first `tokens` tokens of the one in slot `from`. If
    /// both are the same slot, the rest of its sequence is dropped.
    fn copy_prefix(&mut self, from: usize, to: usize, tokens: usize);
}
