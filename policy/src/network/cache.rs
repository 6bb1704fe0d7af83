//! Keys and values of sequences in progress. A slot is one sequence; slots in use are kept at the front, so that a decode
//! step reads them without gathering.

use super::{Error, Network};
use tch::{Device, Kind, Tensor};

/// Cache of a fixed number of slots of a fixed context. It belongs to one set of weights: never carry it to another.
#[derive(Debug)]
pub struct KvCache {
    /// Per layer `[slots, H_kv, context, head_dim]`, f32.
    k: Vec<Tensor>,
    v: Vec<Tensor>,
    lengths: Vec<i64>,
    context: usize,
}

impl KvCache {
    /// `context` in tokens; at most the network's `max_position_embeddings` is used.
    pub fn new(network: &Network, slots: usize, context: usize) -> Self {
        let c = network.config();
        let context = context.min(c.max_position_embeddings as usize);
        let shape = [slots as i64, c.num_key_value_heads, context as i64, c.head_dim];
        let make = || {
            (0..c.num_hidden_layers)
                .map(|_| Tensor::zeros(shape, (Kind::Float, Device::Cpu)))
                .collect()
        };
        KvCache {
            k: make(),
            v: make(),
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

    /// Tokens held by a slot.
    pub fn len(&self, slot: usize) -> usize {
        self.lengths[slot] as usize
    }

    pub fn is_empty(&self, slot: usize) -> bool {
        self.lengths[slot] == 0
    }

    pub fn clear(&mut self, slot: usize) {
        self.lengths[slot] = 0;
    }

    /// Moves a sequence into another slot, which is overwritten; `from` is empty afterwards.
    pub fn move_slot(&mut self, from: usize, to: usize) {
        if from == to {
            return;
        }
        self.copy_slot(from, to);
        self.lengths[from] = 0;
    }

    /// Copies a sequence into another slot, which is overwritten: two continuations of one prompt read it once.
    pub fn copy_slot(&mut self, from: usize, to: usize) {
        let n = self.lengths[from];
        for side in [&self.k, &self.v] {
            for layer in side {
                let source = layer.get(from as i64).narrow(1, 0, n);
                layer.get(to as i64).narrow(1, 0, n).copy_(&source);
            }
        }
        self.lengths[to] = n;
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

    pub(super) fn set_len(&mut self, slot: usize, n: usize) {
        self.lengths[slot] = n as i64;
    }

    pub(super) fn lengths(&self, slots: usize) -> Vec<i64> {
        self.lengths[..slots].to_vec()
    }

    pub(super) fn advance(&mut self, slots: usize) {
        for n in &mut self.lengths[..slots] {
            *n += 1;
        }
    }

    /// Stores a prompt's keys and values, `[1, H_kv, T, hd]`, at the start of a slot.
    pub(super) fn write_prompt(&mut self, layer: i64, slot: usize, k: &Tensor, v: &Tensor) {
        let t = k.size()[2];
        for (side, new) in [(&self.k, k), (&self.v, v)] {
            side[layer as usize]
                .get(slot as i64)
                .narrow(1, 0, t)
                .copy_(&new.squeeze_dim(0));
        }
    }

    /// Appends one token's keys and values, `[B, H_kv, 1, hd]`, to slots `0..B`; returns all of theirs, `[B, H_kv, L, hd]`.
    pub(super) fn append(
        &mut self,
        layer: i64,
        positions: &Tensor,
        k: &Tensor,
        v: &Tensor,
        lengths: &[i64],
    ) -> (Tensor, Tensor) {
        let rows = lengths.len() as i64;
        let longest = longest(lengths);
        let row_ids = Tensor::arange(rows, (Kind::Int64, Device::Cpu));
        let put = |side: &mut Vec<Tensor>, new: &Tensor| {
            let cache = &mut side[layer as usize];
            let _ = cache.index_put_(&[Some(&row_ids), None, Some(positions)], &new.squeeze_dim(2), false);
            cache.narrow(0, 0, rows).narrow(2, 0, longest)
        };
        (put(&mut self.k, k), put(&mut self.v, v))
    }

    /// `[B, 1, 1, L]`: 0 for positions up to and including a row's new token, −∞ beyond.
    pub(super) fn mask(&self, lengths: &[i64]) -> Tensor {
        let longest = longest(lengths);
        let columns = Tensor::arange(longest, (Kind::Int64, Device::Cpu)).unsqueeze(0);
        let beyond = columns.gt_tensor(&Tensor::from_slice(lengths).unsqueeze(1));
        Tensor::zeros([lengths.len() as i64, longest], (Kind::Float, Device::Cpu))
            .masked_fill(&beyond, f64::NEG_INFINITY)
            .unsqueeze(1)
            .unsqueeze(1)
    }
}

/// Keys that a decode step looks at: the longest row and its new token.
fn longest(lengths: &[i64]) -> i64 {
    lengths.iter().copied().max().unwrap_or(0) + 1
}
