//! What the engine needs of a resident version: the seam between scheduling and tensors. `engine::resident` is the real
//! one; the scheduler's tests bring one of their own.

/// Sequences in slots, the ones in use at the front. All calls come from the engine's thread.
pub trait Model: Send {
    /// Number of slots.
    fn slots(&self) -> usize;

    /// Reads a prompt into an empty slot; returns the logits after its last token.
    fn prefill(&mut self, slot: usize, ids: &[u32]) -> anyhow::Result<Vec<f32>>;

    /// Advances slots `0..tokens.len()` by one token each; returns each slot's logits.
    fn decode(&mut self, tokens: &[u32]) -> anyhow::Result<Vec<Vec<f32>>>;

    /// Moves a sequence into another slot, which is overwritten; `from` is empty afterwards.
    fn move_slot(&mut self, from: usize, to: usize);

    /// Empties a slot.
    fn clear(&mut self, slot: usize);
}
