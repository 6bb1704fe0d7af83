//! Writes a patch: all changed weights of one width in one launch, dense frames as copies. Values
//! are absolute, so a write can be repeated.

#![expect(unsafe_code, reason = "the kernel gets addresses of frames, which are checked here")]

use std::sync::Arc;

use super::Error;
use super::driver::Driver;
use super::kernels;
use super::memory::Memory;
use crate::delta::{Change, Piece};

/// Most entries per run. A block writes one run.
const RUN_ENTRIES: usize = 1024;

#[derive(Debug)]
pub(super) struct PatchWrites {
    driver: Arc<dyn Driver>,
    sparse: Vec<Sparse>,
    dense: Vec<Dense>,
    /// Keeps the memory allocated while runs have its addresses.
    #[expect(dead_code, reason = "held, not read")]
    tensors: Vec<Arc<Memory>>,
}

/// Changed weights of one width.
#[derive(Debug)]
struct Sparse {
    width: usize,
    runs: Memory,
    count: usize,
    indices: Memory,
    new: Memory,
    old: Memory,
}

/// A frame in which most weights change.
#[derive(Debug)]
struct Dense {
    tensor: Arc<Memory>,
    byte_range: std::ops::Range<usize>,
    new: Memory,
    old: Memory,
}

impl PatchWrites {
    /// Uploads the values. Each piece lies within its tensor.
    pub fn upload(driver: &Arc<dyn Driver>, touched: &[(&Arc<Memory>, &Piece)]) -> Result<Self, Error> {
        let mut dense = vec![];
        let mut entries: Vec<Entries> = [1, 2, 4, 8].map(Entries::new).into();
        for &(tensor, piece) in touched {
            match (&piece.new, &piece.old) {
                (Change::All(new), Change::All(old)) => dense.push(Dense {
                    tensor: tensor.clone(),
                    byte_range: piece.byte_range.clone(),
                    new: Memory::upload(driver, new)?,
                    old: Memory::upload(driver, old)?,
                }),
                (Change::Some(new), Change::Some(old)) => {
                    let address = tensor.address(piece.byte_range.clone())?;
                    entries[piece.width.trailing_zeros().min(3) as usize].push(address, new, old);
                }
                _ => {}
            }
        }
        let used = entries.into_iter().filter(|entries| !entries.runs.is_empty());
        let sparse = used.map(|entries| entries.upload(driver)).collect::<Result<_, _>>()?;
        Ok(PatchWrites {
            driver: driver.clone(),
            sparse,
            dense,
            tensors: touched.iter().map(|&(tensor, _)| tensor.clone()).collect(),
        })
    }

    /// Writes the result's values, or the base's.
    pub fn write(&self, result: bool) -> Result<(), Error> {
        for Sparse {
            width,
            runs,
            count,
            indices,
            new,
            old,
        } in &self.sparse
        {
            let values = if result { new } else { old };
            // SAFETY: the runs have addresses of pieces within `tensors`, and the indices are those
            // of weights in their frames.
            unsafe { kernels::put(*width, runs, *count, indices, values)? };
        }
        for Dense {
            tensor,
            byte_range,
            new,
            old,
        } in &self.dense
        {
            let from = if result { new } else { old };
            tensor.copy(from, 0..byte_range.len(), byte_range.clone())?;
        }
        self.driver.finish()
    }
}

/// A [`Sparse`] before it is uploaded.
struct Entries {
    width: usize,
    /// Three numbers per run; see [`kernels::put`].
    runs: Vec<u8>,
    indices: Vec<u8>,
    new: Vec<u8>,
    old: Vec<u8>,
}

impl Entries {
    fn new(width: usize) -> Self {
        Entries {
            width,
            runs: vec![],
            indices: vec![],
            new: vec![],
            old: vec![],
        }
    }

    /// Adds the changes of one frame. `new` and `old` name the same weights.
    fn push(&mut self, frame: u64, new: &[(u32, u64)], old: &[(u32, u64)]) {
        for (new, old) in new.chunks(RUN_ENTRIES).zip(old.chunks(RUN_ENTRIES)) {
            let first = self.indices.len() / 4;
            for number in [frame, first as u64, new.len() as u64] {
                self.runs.extend(number.to_le_bytes());
            }
            for &(index, value) in new {
                self.indices.extend(index.to_le_bytes());
                self.new.extend(&value.to_le_bytes()[..self.width]);
            }
            for &(_, value) in old {
                self.old.extend(&value.to_le_bytes()[..self.width]);
            }
        }
    }

    fn upload(self, driver: &Arc<dyn Driver>) -> Result<Sparse, Error> {
        Ok(Sparse {
            width: self.width,
            count: self.runs.len() / 24,
            runs: Memory::upload(driver, &self.runs)?,
            indices: Memory::upload(driver, &self.indices)?,
            new: Memory::upload(driver, &self.new)?,
            old: Memory::upload(driver, &self.old)?,
        })
    }
}
