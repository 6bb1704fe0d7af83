//! What the engine needs of a resident version: the seam between scheduling and tensors. `engine::resident` is the real
//! one; the scheduler's tests bring one of their own.

use policy::router::Routing;

/// What a sequence has after the tokens that were read.
#[derive(Debug, Clone, Default)]
pub struct Step {
    /// After the last of them, one per vocabulary entry.
    pub logits: Vec<f32>,
    /// Which experts each of them went to; empty where the model has none.
    pub routing: Routing,
}

/// Sequences in slots, the ones in use at the front. All calls come from the engine's thread.
pub trait Model: Send {
    /// Number of slots.
    fn slots(&self) -> usize;

    /// Reads a prompt into an empty slot.
    fn prefill(&mut self, slot: usize, ids: &[u32]) -> anyhow::Result<Step>;

    /// Advances slots `0..tokens.len()` by one token each; returns each slot's step.
    fn decode(&mut self, tokens: &[u32]) -> anyhow::Result<Vec<Step>>;

    /// Moves a sequence into another slot, which is overwritten; `from` is empty afterwards.
    fn move_slot(&mut self, from: usize, to: usize);

    /// Empties a slot.
    fn clear(&mut self, slot: usize);
}
