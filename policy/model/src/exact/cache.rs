//! Keys and values of sequences. A slot holds one sequence.

use super::{Error, ExactModel};
use crate::config::ModelConfig;
use crate::kernel::{Compute, KvHead};

/// A cache with a fixed number of slots and a fixed context. It belongs to one set of weights and
/// must not be used with another.
#[derive(Debug)]
pub struct KvCache {
    /// `[slots][layers][heads]`.
    heads: Vec<Vec<Vec<KvHead>>>,
    /// Tokens in each slot.
    lengths: Vec<usize>,
    /// In tokens.
    context: usize,
}

impl KvCache {
    /// `context` is in tokens and is capped at the model's own.
    pub fn new(model: &ExactModel, slots: usize, context: usize) -> Self {
        let config = model.config();
        let context = context.min(config.context() as usize);
        let layer_heads = |_| empty_heads(config, context, model.compute());
        let layers = || (0..config.num_hidden_layers).map(layer_heads).collect();
        KvCache {
            heads: (0..slots).map(|_| layers()).collect(),
            lengths: vec![0; slots],
            context,
        }
    }

    /// Bytes that [`KvCache::new`] allocates, without allocating them.
    ///
    /// Latent attention caches the expanded keys and values of every head, which is many times its
    /// latent: 10 MB a token in f32 for DeepSeek-V3.
    pub fn bytes_for(config: &ModelConfig, slots: usize, context: usize, compute: Compute) -> u64 {
        let context = context.min(config.context() as usize);
        let (key_width, value_width) = (config.head_dim as usize, config.value_dim() as usize);
        let heads = config.num_hidden_layers.saturating_mul(config.cached_heads()) as u64;
        let head = KvHead::bytes_for(context, key_width, value_width, compute);
        head.saturating_mul(heads).saturating_mul(slots as u64)
    }

    pub fn slots(&self) -> usize {
        self.lengths.len()
    }

    /// The longest sequence that a slot can hold, in tokens.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Bytes allocated for all slots.
    pub fn bytes(&self) -> u64 {
        let heads = self.heads.iter().flatten().flatten();
        heads.map(|kv| kv.bytes() as u64).sum()
    }

    /// Tokens held by a slot.
    pub fn len(&self, slot: usize) -> usize {
        self.lengths[slot]
    }

    pub fn clear(&mut self, slot: usize) {
        self.lengths[slot] = 0;
    }

    /// Replaces the sequence in slot `to` by the first `tokens` tokens of the one in slot `from`, or
    /// by all of them if it has fewer. If both are the same slot, the rest of its sequence is
    /// dropped. So two continuations of one prompt need only one prefill.
    pub fn copy_prefix(&mut self, from: usize, to: usize, tokens: usize) {
        let tokens = tokens.min(self.lengths[from]);
        // an error says that both are the same slot, where nothing has to be copied
        if let Ok([source, target]) = self.heads.get_disjoint_mut([from, to]) {
            for (source, target) in source.iter().flatten().zip(target.iter_mut().flatten()) {
                target.copy_from(source, tokens);
            }
        }
        self.lengths[to] = tokens;
    }

    pub(super) fn check_room(&self, held: usize, more: usize) -> Result<(), Error> {
        if held + more > self.context {
            return Err(Error::ContextFull {
                wanted: held + more,
                context: self.context,
            });
        }
        Ok(())
    }

    pub(super) fn grow(&mut self, slot: usize, tokens: usize) {
        self.lengths[slot] += tokens;
    }

    pub(super) fn layer_heads_mut(&mut self, slot: usize, layer: usize) -> &mut [KvHead] {
        &mut self.heads[slot][layer]
    }

    pub(super) fn layer_heads(&self, slot: usize, layer: usize) -> &[KvHead] {
        &self.heads[slot][layer]
    }
}

/// Empty key-value heads of one layer for one sequence.
pub(super) fn empty_heads(config: &ModelConfig, tokens: usize, compute: Compute) -> Vec<KvHead> {
    let (key_width, value_width) = (config.head_dim as usize, config.value_dim() as usize);
    (0..config.cached_heads())
        .map(|_| KvHead::new(tokens, key_width, value_width, compute))
        .collect()
}
