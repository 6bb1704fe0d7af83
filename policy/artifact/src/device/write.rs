//! Writing a patch: all changed weights of one width in one launch, dense frames as copies. Values
//! are absolute, so any write can be done again.

#![expect(
    unsafe_code,
    reason = "runs of entries name frames by their addresses, which are asked for here"
)]

use std::sync::Arc;

use super::Error;
use super::driver::Driver;
use super::kernels;
use super::memory::Memory;
use crate::delta::{Change, Piece};

/// Entries of a run: what a block writes.
const RUN_ENTRIES: usize = 1024;

#[derive(Debug)]
pub(super) struct Written {
    driver: Arc<dyn Driver>,
    sparse: Vec<Sparse>,
    dense: Vec<Dense>,
    /// What is written: kept for as long as its addresses are in runs.
    #[expect(dead_code, reason = "held, not read")]
    tensors: Vec<Arc<Memory>>,
}

/// Weights of one width.
#[derive(Debug)]
struct Sparse {
    width: usize,
    runs: Memory,
    count: usize,
    indices: Memory,
    new: Memory,
    old: Memory,
}

/// A frame of which most changes.
#[derive(Debug)]
struct Dense {
    tensor: Arc<Memory>,
    at: std::ops::Range<usize>,
    new: Memory,
    old: Memory,
}

impl Written {
    /// Each piece lies within the tensor beside it.
    pub fn of(driver: &Arc<dyn Driver>, touched: &[(&Arc<Memory>, &Piece)]) -> Result<Self, Error> {
        let mut dense = vec![];
        let mut entries: Vec<Entries> = [1, 2, 4, 8].map(Entries::new).into();
        for &(tensor, piece) in touched {
            match (&piece.new, &piece.old) {
                (Change::All(new), Change::All(old)) => dense.push(Dense {
                    tensor: tensor.clone(),
                    at: piece.at.clone(),
                    new: Memory::of(driver, new)?,
                    old: Memory::of(driver, old)?,
                }),
                (Change::Some(new), Change::Some(old)) => {
                    let address = tensor.address(piece.at.clone())?;
                    entries[piece.width.trailing_zeros().min(3) as usize].push(address, new, old);
                }
                _ => {}
            }
        }
        let some = entries.into_iter().filter(|entries| !entries.runs.is_empty());
        let sparse = some.map(|entries| entries.upload(driver)).collect::<Result<_, _>>()?;
        Ok(Written {
            driver: driver.clone(),
            sparse,
            dense,
            tensors: touched.iter().map(|&(tensor, _)| tensor.clone()).collect(),
        })
    }

    /// The result's values, or the base's.
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
            // SAFETY: the addresses are of pieces within tensors that are held; the patch's indices are of weights of its frames.
            unsafe { kernels::put(*width, runs, *count, indices, values)? };
        }
        for Dense { tensor, at, new, old } in &self.dense {
            let from = if result { new } else { old };
            tensor.copy(from, 0..at.len(), at.clone())?;
        }
        self.driver.finish()
    }
}

/// What becomes a [`Sparse`].
struct Entries {
    width: usize,
    /// Three numbers each; see [`kernels::put`].
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

    /// Both of the same weights.
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
            runs: Memory::of(driver, &self.runs)?,
            indices: Memory::of(driver, &self.indices)?,
            new: Memory::of(driver, &self.new)?,
            old: Memory::of(driver, &self.old)?,
        })
    }
}
