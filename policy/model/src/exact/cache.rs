//! Keys and values of sequences in progress. A slot is one sequence; slots in use are kept at the front.

use super::{Error, ExactModel};
use crate::config::ModelConfig;
use crate::kernel::{Compute, Keys};

/// Cache of a fixed number of slots of a fixed context. It belongs to one set of weights: never carry it to another.
#[derive(Debug)]
pub struct KvCache {
    /// Per place and layer, the heads.
    places: Vec<Vec<Vec<Keys>>>,
    /// Where each slot's sequence is: moving one moves no values.
    place_of: Vec<usize>,
    /// Per slot.
    lengths: Vec<usize>,
    context: usize,
}

impl KvCache {
    /// `context` in tokens; at most the model's `max_position_embeddings` is used.
    pub fn new(model: &ExactModel, slots: usize, context: usize) -> Self {
        let config = model.config();
        let context = context.min(config.max_position_embeddings as usize);
        let heads = |_| heads(config, context, model.compute());
        let layers = || (0..config.num_hidden_layers).map(heads).collect();
        KvCache {
            places: (0..slots).map(|_| layers()).collect(),
            place_of: (0..slots).collect(),
            lengths: vec![0; slots],
            context,
        }
    }

    pub fn slots(&self) -> usize {
        self.lengths.len()
    }

    /// Longest sequence a slot can hold, in tokens.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Keys and values of every slot.
    pub fn bytes(&self) -> u64 {
        let all = self.places.iter().flatten().flatten();
        all.map(|keys| keys.bytes() as u64).sum()
    }

    /// Tokens held by a slot.
    pub fn len(&self, slot: usize) -> usize {
        self.lengths[slot]
    }

    pub fn is_empty(&self, slot: usize) -> bool {
        self.lengths[slot] == 0
    }

    pub fn clear(&mut self, slot: usize) {
        self.lengths[slot] = 0;
    }

    /// Forgets what a slot holds beyond so many tokens.
    pub fn truncate(&mut self, slot: usize, tokens: usize) {
        self.lengths[slot] = self.lengths[slot].min(tokens);
    }

    /// Moves a sequence into another slot, which is overwritten; `from` is empty afterwards.
    pub fn move_slot(&mut self, from: usize, to: usize) {
        if from != to {
            self.place_of.swap(from, to);
            self.lengths[to] = std::mem::take(&mut self.lengths[from]);
        }
    }

    /// Copies a sequence into another slot, which is overwritten: two continuations of one prompt read it once.
    pub fn copy_slot(&mut self, from: usize, to: usize) {
        let positions = self.lengths[from];
        let Ok([source, target]) = self.places.get_disjoint_mut([self.place_of[from], self.place_of[to]]) else {
            return;
        };
        for (source, target) in source.iter().flatten().zip(target.iter_mut().flatten()) {
            target.copy_from(source, positions);
        }
        self.lengths[to] = positions;
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

    pub(super) fn heads_mut(&mut self, slot: usize, layer: usize) -> &mut [Keys] {
        &mut self.places[self.place_of[slot]][layer]
    }

    pub(super) fn heads(&self, slot: usize, layer: usize) -> &[Keys] {
        &self.places[self.place_of[slot]][layer]
    }
}

/// One layer's keys and values of one sequence.
pub(super) fn heads(config: &ModelConfig, positions: usize, compute: Compute) -> Vec<Keys> {
    let (key_width, value_width) = (config.head_dim as usize, config.value_dim() as usize);
    (0..config.cached_heads())
        .map(|_| Keys::new(positions, key_width, value_width, compute))
        .collect()
}
