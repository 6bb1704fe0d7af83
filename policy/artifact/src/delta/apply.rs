//! Applies a delta: checks it against the content index, then decodes frame by frame on all
//! threads.

use bytes::Bytes;

use super::frame::{self, Direction, Frame};
use super::index::{Entry, File, Index, OpenDelta, Tensor};
use super::{Error, in_entry, malformed, planes, result_index, simd};
use crate::checkpoint::Checkpoint;
use crate::content_index::ContentIndex;
use crate::digest::{Digest, Hashed};
use crate::memory::Buffer;
use crate::merkle::{self, ChunkHash};
use crate::tensor::{TensorData, weight_bytes};
use crate::threads::Threads;

/// Builds the other version. `reverse`: the base from the result.
pub(super) fn apply_delta(
    from: &Checkpoint,
    content: &ContentIndex,
    opened: &OpenDelta<'_>,
    bytes_max: u64,
    reverse: bool,
    threads: &Threads,
) -> Result<Checkpoint, Error> {
    result_index::check(opened, content, reverse)?;
    let needed = result_bytes(&opened.index, from)?;
    if needed > bytes_max {
        return Err(Error::TooLarge {
            needed,
            limit: bytes_max,
        });
    }
    let mut next = from.clone();
    let mut payloads = opened.payloads;
    for (name, tensor) in decode_tensors(from, opened, &mut payloads, reverse, threads)? {
        match tensor {
            Some(tensor) => drop(next.tensors.insert(name.into(), tensor)),
            None => drop(next.tensors.remove(name)),
        }
    }
    for Entry { name, change } in &opened.index.files {
        match change {
            None => drop(next.files.remove(name)),
            Some(file) => {
                let bytes = decode_file(file, &mut payloads).map_err(|error| in_entry(name, error))?;
                next.files.insert(name.clone(), bytes);
            }
        }
    }
    Ok(next)
}

/// A frame to decode, and where its bytes go.
struct Job<'a> {
    entry: usize,
    tensor: &'a Tensor,
    frame: &'a Frame,
    payload: &'a [u8],
    reverse: &'a [u8],
    /// None: zeros.
    from: Option<&'a [u8]>,
    offset: usize,
    to: &'a mut [u8],
}

type DecodedTensor<'a> = (&'a str, Option<TensorData>);

/// Every tensor that the index names, with its digest checked; None if it is removed. Takes the
/// tensors' payloads off the front of `payloads`.
fn decode_tensors<'a>(
    from: &Checkpoint,
    opened: &'a OpenDelta<'_>,
    payloads: &mut &[u8],
    reverse: bool,
    threads: &Threads,
) -> Result<Vec<DecodedTensor<'a>>, Error> {
    let entries = &opened.index.tensors;
    // fresh memory is first touched by the thread that decodes into it
    let mut bytes: Vec<Buffer<u8>> = Vec::with_capacity(entries.len());
    for Entry { name, change } in entries {
        let size = change.as_ref().map_or(Ok(0), Tensor::bytes);
        bytes.push(Buffer::at_rest(size.map_err(|error| in_entry(name, error))?));
    }
    let mut jobs = vec![];
    let mut reverse_sections = opened.reverse.unwrap_or_default();
    for (entry, (Entry { name, change }, bytes)) in entries.iter().zip(&mut bytes).enumerate() {
        let Some(tensor) = change else {
            if !from.tensors.contains_key(name) {
                return Err(in_entry(name, malformed("the base has no such tensor")));
            }
            continue;
        };
        let old = from.tensors.get(name);
        let old = match tensor.base {
            Some(_) => Some(
                old.filter(|old| old.dtype == tensor.dtype && old.shape == tensor.shape)
                    .ok_or_else(|| in_entry(name, malformed("the base has no such tensor")))?,
            ),
            None => None,
        };
        let frame_bytes = tensor.frame_bytes();
        let mut offset = 0;
        for (frame, to) in tensor.frames.iter().zip(bytes.chunks_mut(frame_bytes)) {
            let early = || in_entry(name, malformed("a payload is longer than the delta"));
            let length = to.len();
            jobs.push(Job {
                entry,
                tensor,
                frame,
                payload: payloads.split_off(..frame.payload_bytes as usize).ok_or_else(early)?,
                reverse: if reverse {
                    reverse_sections
                        .split_off(..frame.reverse_bytes as usize)
                        .ok_or_else(early)?
                } else {
                    &[]
                },
                from: old.map(|old| &old.bytes[offset..offset + length]),
                offset,
                to,
            });
            offset += length;
        }
    }
    let parts = threads.map(jobs, |mut job| (job.entry, decode_frame(&mut job, reverse)));
    let mut parts_of = vec![vec![]; entries.len()];
    for (entry, part) in parts {
        parts_of[entry].push(part.map_err(|error| in_entry(&entries[entry].name, error))?);
    }
    let results = entries
        .iter()
        .zip(bytes)
        .zip(parts_of)
        .map(|((Entry { name, change }, bytes), parts)| {
            let Some(tensor) = change else {
                return Ok((name.as_str(), None));
            };
            let digest = merkle::merge(&parts, tensor.frame_bytes(), bytes.len());
            let expected = if reverse { tensor.base } else { Some(tensor.result) };
            if expected != Some(digest) {
                return Err(in_entry(
                    name,
                    malformed("its bytes have another digest than the delta says"),
                ));
            }
            let bytes = Hashed::known(Bytes::from_owner(bytes), digest);
            let tensor = TensorData::new(tensor.dtype, tensor.shape.clone(), bytes)
                .map_err(|error| in_entry(name, Error::Malformed(error.to_string())))?;
            Ok((name.as_str(), Some(tensor)))
        });
    results.collect()
}

fn decode_frame(job: &mut Job<'_>, reverse: bool) -> Result<ChunkHash, Error> {
    let direction = if reverse {
        Direction::Reverse(job.reverse)
    } else {
        Direction::Forward
    };
    let (isa, width) = (simd::best(), weight_bytes(job.tensor.dtype));
    match job.from {
        Some(from) => job.to.copy_from_slice(from),
        None => job.to.fill(0),
    }
    frame::apply(isa, width, job.frame, job.payload, job.to, direction)?;
    let bytes = job.tensor.bytes()?;
    Ok(merkle::chunk_hash(&[job.to], job.offset, bytes))
}

pub(super) fn decode_file(file: &File, payloads: &mut &[u8]) -> Result<Bytes, Error> {
    let early = || malformed("a payload is longer than the delta");
    let stored = usize::try_from(file.stored).map_err(|_| early())?;
    let stored = payloads.split_off(..stored).ok_or_else(early)?;
    let bytes = if file.packed {
        let size = usize::try_from(file.size).map_err(|_| early())?;
        planes::unpack(stored, size)?
    } else {
        stored.to_vec()
    };
    if bytes.len() as u64 != file.size || Digest::of(&bytes) != file.digest {
        return Err(malformed("its bytes have another digest than the delta says"));
    }
    Ok(bytes.into())
}

/// Bytes of the result: what stays of the base, and what is new.
fn result_bytes(index: &Index, base: &Checkpoint) -> Result<u64, Error> {
    let overflow = || malformed("the sizes overflow");
    let mut total = base.tensor_bytes() + base.files.values().map(|f| f.len() as u64).sum::<u64>();
    for Entry { name, change } in &index.tensors {
        let old = base.tensors.get(name).map_or(0, |t| t.bytes.len() as u64);
        let new = change.as_ref().map_or(Ok(0), Tensor::bytes)? as u64;
        total = (total - old).checked_add(new).ok_or_else(overflow)?;
    }
    for Entry { name, change } in &index.files {
        let old = base.files.get(name).map_or(0, |f| f.len() as u64);
        let new = change.as_ref().map_or(0, |file| file.size);
        total = (total - old).checked_add(new).ok_or_else(overflow)?;
    }
    Ok(total)
}
