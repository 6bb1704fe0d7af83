//! Finds the changed weights of a tensor. Kernels set a bit for each weight that differs, count the
//! bits of each chunk, and sum the counts to get each chunk's position in the output. Then they
//! write indices and values there. Only these leave the device.

use std::ops::Range;
use std::sync::Arc;

use super::Error;
use super::driver::Driver;
use super::kernels::{self, CHUNK, Found, NOWHERE, RUN};
use super::memory::Memory;
use crate::delta::{Change, FRAME_WEIGHTS, is_sparse};

/// Frames per batch. It limits the extra memory on the device: a bit per weight of the batch, plus
/// the changed weights. Tests use more frames than one batch has.
const FRAMES: usize = if cfg!(test) { 2 } else { 128 };

const _: () = assert!(CHUNK * RUN * RUN == FRAME_WEIGHTS);

pub(super) fn changes(
    driver: &Arc<dyn Driver>,
    width: usize,
    old: &Memory,
    new: &Memory,
) -> Result<Vec<Change>, Error> {
    if old.len() != new.len() || !new.len().is_multiple_of(width) {
        return Err(Error::Bounds {
            needed: new.len(),
            found: old.len(),
        });
    }
    let mut found = vec![];
    for start in (0..new.len()).step_by(FRAMES * FRAME_WEIGHTS * width) {
        let end = new.len().min(start + FRAMES * FRAME_WEIGHTS * width);
        found.extend(batch(driver, width, old, new, start..end)?);
    }
    Ok(found)
}

/// The changes in a byte range of the tensors that begins with a frame.
fn batch(
    driver: &Arc<dyn Driver>,
    width: usize,
    old: &Memory,
    new: &Memory,
    byte_range: Range<usize>,
) -> Result<Vec<Change>, Error> {
    let allocate = |bytes: usize| Memory::new(driver, bytes);
    let weights = byte_range.len() / width;
    let chunks = weights.div_ceil(CHUNK);
    let groups = chunks.div_ceil(RUN);
    let frames = groups.div_ceil(RUN);
    let bits = allocate(chunks * CHUNK / 8)?;
    let (by_chunk, by_group, by_frame) = (allocate(chunks * 4)?, allocate(groups * 4)?, allocate(frames * 4)?);
    kernels::compare(width, old, new, byte_range.clone(), &bits)?;
    kernels::count(&bits, chunks, &by_chunk)?;
    kernels::sum(&by_chunk, chunks, &by_group)?;
    kernels::sum(&by_group, groups, &by_frame)?;

    let counts: Vec<usize> = numbers(&by_frame.read(0..frames * 4)?).map(|n| n as usize).collect();
    let frame_range = |frame: usize| {
        let start = byte_range.start + frame * FRAME_WEIGHTS * width;
        start..byte_range.end.min(start + FRAME_WEIGHTS * width)
    };
    let sparse = |frame: usize| is_sparse(counts[frame], frame_range(frame).len() / width);
    let mut total = 0;
    let mut starts = vec![];
    for (frame, &count) in counts.iter().enumerate() {
        if sparse(frame) {
            starts.extend((total as u64).to_le_bytes());
            total += count;
        } else {
            starts.extend(NOWHERE.to_le_bytes());
        }
    }
    let (mut indices, mut values) = (vec![], vec![]);
    if total > 0 {
        let (indices_out, values_out) = (allocate(total * 4)?, allocate(total * width)?);
        let found = Found {
            bits: &bits,
            chunks,
            before_chunk: &by_chunk,
            before_group: &by_group,
            starts: &Memory::upload(driver, &starts)?,
        };
        kernels::collect(width, new, byte_range.clone(), &found, total, &indices_out, &values_out)?;
        indices = indices_out.read(0..total * 4)?;
        values = values_out.read(0..total * width)?;
    }
    let mut indices = numbers(&indices);
    let mut values = values.chunks_exact(width).map(|value| {
        let mut eight = [0; 8];
        eight[..width].copy_from_slice(value);
        u64::from_le_bytes(eight)
    });
    let change = |frame: usize| match counts[frame] {
        0 => Ok(Change::Same),
        count if sparse(frame) => Ok(Change::Some(
            indices.by_ref().zip(values.by_ref()).take(count).collect(),
        )),
        _ => Ok(Change::All(new.read(frame_range(frame))?)),
    };
    (0..frames).map(change).collect()
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|&number| u32::from_le_bytes(number))
}
