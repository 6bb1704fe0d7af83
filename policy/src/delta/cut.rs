//! The part of a tensor that one rank holds: a range of one dimension, as tensor, expert or data parallelism cuts it.
//!
//! A delta codes whole tensors, row after row, whatever a trainer or an engine cuts them into. A rank compares and writes what it
//! holds; between its indices and those of the tensor's frames there is arithmetic alone, and only what changes goes from one
//! to the other.

use std::collections::BTreeMap;
use std::ops::Range;

use safetensors::Dtype;

use super::Error;
use super::frame::{Change, WEIGHTS};
use super::index::width;
use crate::image::bytes_of;

/// Index in a rank's part and value of a weight that changes.
type Weight = (u64, u64);

/// A range of one dimension of a tensor. Of `[rows, columns]` a range of dimension 0 is a row split, of dimension 1 a column split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    width: usize,
    /// Products of the dimensions before it.
    outer: usize,
    /// Weights from one step of `outer` to the next.
    stride: usize,
    /// Of these the rank's.
    range: Range<usize>,
}

impl Cut {
    /// What a rank holds of a tensor: `range` of dimension `dim`. Dtypes narrower than a byte cannot be cut.
    pub fn new(dtype: Dtype, shape: &[usize], dim: usize, range: Range<usize>) -> Result<Self, Error> {
        let malformed = |reason: String| Error::Malformed(reason);
        let Some(&extent) = shape.get(dim) else {
            return Err(malformed(format!("a tensor {shape:?} has no dimension {dim}")));
        };
        if range.start > range.end || range.end > extent {
            return Err(malformed(format!(
                "dimension {dim} of {shape:?} has no range {range:?}"
            )));
        }
        if bytes_of(dtype, shape).is_none() || dtype.bitsize() < 8 {
            return Err(malformed(format!(
                "a tensor {dtype} {shape:?} cannot be cut by weights"
            )));
        }
        let inner: usize = shape[dim + 1..].iter().product();
        Ok(Cut {
            width: width(dtype),
            outer: shape[..dim].iter().product(),
            stride: extent * inner,
            range: range.start * inner..range.end * inner,
        })
    }

    /// The part of rank `rank` of `of`, of equal size.
    pub fn even(dtype: Dtype, shape: &[usize], dim: usize, rank: usize, of: usize) -> Result<Self, Error> {
        let extent = shape.get(dim).copied().unwrap_or_default();
        if of == 0 || extent % of != 0 || rank >= of {
            let reason = format!("dimension {dim} of {shape:?} has no part {rank} of {of} equal ones");
            return Err(Error::Malformed(reason));
        }
        Cut::new(dtype, shape, dim, extent / of * rank..extent / of * (rank + 1))
    }

    /// How many weights the rank holds.
    pub fn weights(&self) -> usize {
        self.outer * self.range.len()
    }

    /// The frames that have weights of it, from the first to the last: few of a row split, all of a column split.
    pub fn frames(&self) -> Range<usize> {
        match self.weights() {
            0 => 0..0,
            _ => {
                let last = (self.outer - 1) * self.stride + self.range.end - 1;
                self.range.start / WEIGHTS..last / WEIGHTS + 1
            }
        }
    }

    /// The rank's bytes of a whole tensor.
    pub fn take(&self, tensor: &[u8]) -> Result<Vec<u8>, Error> {
        if tensor.len() != self.outer * self.stride * self.width {
            return Err(Error::Malformed("the tensor has another size than its cut".into()));
        }
        let mut own = Vec::with_capacity(self.weights() * self.width);
        for row in tensor.chunks_exact((self.stride * self.width).max(1)) {
            own.extend(&row[self.range.start * self.width..self.range.end * self.width]);
        }
        Ok(own)
    }

    /// What of a frame's change falls into the rank's part, by its index there.
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

    /// Writes weights into the rank's bytes. Values are absolute: once more, it changes nothing.
    pub fn write(&self, weights: &[Weight], own: &mut [u8]) -> Result<(), Error> {
        for &(index, value) in weights {
            let at = usize::try_from(index)
                .ok()
                .and_then(|index| index.checked_mul(self.width));
            let slot = at.and_then(|at| own.get_mut(at..)?.get_mut(..self.width));
            let slot = slot.ok_or_else(|| Error::Malformed("a weight lies beyond the rank's bytes".into()))?;
            slot.copy_from_slice(&value.to_le_bytes()[..self.width]);
        }
        Ok(())
    }

    /// What a rank's step changed, of two states of its bytes.
    pub fn compare(&self, old: &[u8], new: &[u8]) -> Result<Vec<Weight>, Error> {
        let bytes = self.weights() * self.width;
        if old.len() != bytes || new.len() != bytes {
            return Err(Error::Malformed(
                "the rank's bytes have another size than its cut".into(),
            ));
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

    /// Weights of the rank's part as changes of the tensor's frames, ascending: what goes to the shards that code these.
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

    /// The index in the rank's part of a weight of the tensor.
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
