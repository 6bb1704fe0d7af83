//! The part of a tensor that one rank holds: a range of one dimension, as tensor, expert or data
//! parallelism divides it.
//!
//! A delta codes whole tensors in row order, however a trainer or an engine divides them. A rank
//! compares and writes its own part. This module maps its indices to those of the tensor's frames
//! and back, so only changes travel between ranks.

use std::collections::BTreeMap;
use std::ops::Range;

use safetensors::Dtype;

use super::frame::{Change, WEIGHTS};
use super::{Error, malformed};
use crate::tensor::{bytes_of, weight_bytes};

/// Index in a rank's part and new value of a changed weight.
type Weight = (u64, u64);

/// A range of one dimension of a tensor. For `[rows, columns]`, dimension 0 is a row split and
/// dimension 1 a column split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSlice {
    width: usize,
    /// Product of the dimensions before it.
    outer: usize,
    /// Weights from one step of `outer` to the next.
    stride: usize,
    /// The rank's weights within each stride.
    range: Range<usize>,
}

impl TensorSlice {
    /// `range` of dimension `dim`. Returns an error for dtypes narrower than a byte.
    pub fn new(dtype: Dtype, shape: &[usize], dim: usize, range: Range<usize>) -> Result<Self, Error> {
        let Some(&extent) = shape.get(dim) else {
            return Err(Error::Malformed(format!("a tensor {shape:?} has no dimension {dim}")));
        };
        if range.start > range.end || range.end > extent {
            return Err(Error::Malformed(format!(
                "dimension {dim} of {shape:?} has no range {range:?}"
            )));
        }
        if bytes_of(dtype, shape).is_none() || dtype.bitsize() < 8 {
            return Err(Error::Malformed(format!(
                "a tensor {dtype} {shape:?} cannot be cut by weights"
            )));
        }
        let inner: usize = shape[dim + 1..].iter().product();
        Ok(TensorSlice {
            width: weight_bytes(dtype),
            outer: shape[..dim].iter().product(),
            stride: extent * inner,
            range: range.start * inner..range.end * inner,
        })
    }

    /// Part `rank` (from 0) of `of` equal parts. Returns an error if `of` does not divide the
    /// dimension.
    pub fn even(dtype: Dtype, shape: &[usize], dim: usize, rank: usize, of: usize) -> Result<Self, Error> {
        let extent = shape.get(dim).copied().unwrap_or_default();
        if of == 0 || extent % of != 0 || rank >= of {
            let reason = format!("dimension {dim} of {shape:?} has no part {rank} of {of} equal ones");
            return Err(Error::Malformed(reason));
        }
        TensorSlice::new(dtype, shape, dim, extent / of * rank..extent / of * (rank + 1))
    }

    /// Number of weights that the rank holds.
    pub fn weights(&self) -> usize {
        self.outer * self.range.len()
    }

    /// The frames that contain weights of the rank: few for a row split, all for a column split.
    pub fn frames(&self) -> Range<usize> {
        match self.weights() {
            0 => 0..0,
            _ => {
                let last = (self.outer - 1) * self.stride + self.range.end - 1;
                self.range.start / WEIGHTS..last / WEIGHTS + 1
            }
        }
    }

    /// Copies the rank's bytes out of a whole tensor.
    pub fn take(&self, tensor: &[u8]) -> Result<Vec<u8>, Error> {
        if tensor.len() != self.outer * self.stride * self.width {
            return Err(malformed("the tensor has another size than its slice"));
        }
        let mut own = Vec::with_capacity(self.weights() * self.width);
        for row in tensor.chunks_exact((self.stride * self.width).max(1)) {
            own.extend(&row[self.range.start * self.width..self.range.end * self.width]);
        }
        Ok(own)
    }

    /// The part of a frame's change that falls into the rank's part, by index there.
    pub fn own(&self, frame: usize, change: &Change) -> Vec<Weight> {
        let at = |index: usize| self.local(frame * WEIGHTS + index);
        match change {
            Change::Same => vec![],
            Change::Some(weights) => {
                let own = weights
                    .iter()
                    .filter_map(|&(index, value)| Some((at(index as usize)?, value)));
                own.collect()
            }
            Change::All(bytes) => {
                let weights = bytes.chunks_exact(self.width).enumerate();
                let own = weights.filter_map(|(index, bytes)| Some((at(index)?, value(bytes))));
                own.collect()
            }
        }
    }

    /// Writes weights into the rank's bytes. Idempotent, because values are absolute.
    pub fn write(&self, weights: &[Weight], own: &mut [u8]) -> Result<(), Error> {
        for &(index, value) in weights {
            let at = usize::try_from(index)
                .ok()
                .and_then(|index| index.checked_mul(self.width));
            let slot = at.and_then(|at| own.get_mut(at..)?.get_mut(..self.width));
            let slot = slot.ok_or_else(|| malformed("a weight lies beyond the rank's bytes"))?;
            slot.copy_from_slice(&value.to_le_bytes()[..self.width]);
        }
        Ok(())
    }

    /// The weights that differ between two states of the rank's bytes.
    pub fn compare(&self, old: &[u8], new: &[u8]) -> Result<Vec<Weight>, Error> {
        let bytes = self.weights() * self.width;
        if old.len() != bytes || new.len() != bytes {
            return Err(malformed("the rank's bytes have another size than its slice"));
        }
        let mut weights = vec![];
        let mut differing = vec![];
        let frame_bytes = WEIGHTS * self.width;
        for (n, (old, new)) in old.chunks(frame_bytes).zip(new.chunks(frame_bytes)).enumerate() {
            differing.clear();
            super::frame::differing(self.width, old, new, &mut differing);
            weights.extend(differing.iter().map(|&index| {
                let at = index as usize * self.width;
                let index = (n * WEIGHTS) as u64 + u64::from(index);
                (index, value(&new[at..at + self.width]))
            }));
        }
        Ok(weights)
    }

    /// The rank's changed weights by frame of the tensor, ascending. Goes to the shards that code
    /// those frames.
    pub fn in_frames(&self, weights: &[Weight]) -> BTreeMap<usize, Vec<(u32, u64)>> {
        let mut frames: BTreeMap<usize, Vec<(u32, u64)>> = BTreeMap::new();
        let own = self.range.len().max(1) as u64;
        for &(index, value) in weights {
            let (row, column) = ((index / own) as usize, (index % own) as usize);
            let index = row * self.stride + self.range.start + column;
            let frame = frames.entry(index / WEIGHTS).or_default();
            frame.push(((index % WEIGHTS) as u32, value));
        }
        frames
    }

    /// A weight's index in the rank's part, from its index in the tensor. None if it is not there.
    fn local(&self, index: usize) -> Option<u64> {
        let (row, column) = (index / self.stride, index % self.stride);
        let column = self.range.contains(&column).then(|| column - self.range.start)?;
        Some((row * self.range.len() + column) as u64)
    }
}

fn value(bytes: &[u8]) -> u64 {
    let mut value = [0; 8];
    value[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(value)
}
