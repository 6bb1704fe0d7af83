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

/// Sequences in slots; the slots in use come first. All calls come from the engine's thread.
pub trait Backend: Send {
    /// Number of slots.
    fn slots(&self) -> usize;

    /// Reads a prompt into an empty slot.
    fn prefill(&mut self, slot: usize, ids: &[u32]) -> anyhow::Result<Step>;

    /// Advances slots `0..tokens.len()` by one token each; returns one step per slot.
    fn decode(&mut self, tokens: &[u32]) -> anyhow::Result<Vec<Step>>;

    /// Moves a sequence to another slot and overwrites it; `from` is empty afterwards.
    fn move_slot(&mut self, from: usize, to: usize);

    /// Empties a slot.
    fn clear(&mut self, slot: usize);
}
