//! Following a delta to the other version: checked against the listing, then frame by frame on whichever thread is free.

use bytes::Bytes;

use super::frame::{self, Frame, Way};
use super::index::{Entry, File, Index, Opened, Tensor, width};
use super::tree::{self, Part};
use super::{Error, in_entry, lanes, planes, roots};
use crate::digest::{Digest, Hashed};
use crate::image::{Image, TensorData};
use crate::kernel::Threads;
use crate::listing::Listing;
use crate::memory::Buffer;

/// Puts the other version together, with its listing; `back` from the result.
pub(super) fn follow(
    from: &Image,
    listing: &Listing,
    opened: &Opened<'_>,
    bytes_max: u64,
    back: bool,
    threads: &Threads,
) -> Result<(Image, Listing), Error> {
    let after = roots::after(opened, listing, back)?;
    let needed = result_bytes(&opened.index, from)?;
    if needed > bytes_max {
        return Err(Error::TooLarge {
            needed,
            limit: bytes_max,
        });
    }
    let mut image = from.clone();
    let mut payloads = opened.payloads;
    for (name, tensor) in make_tensors(from, opened, &mut payloads, back, threads)? {
        match tensor {
            Some(tensor) => drop(image.tensors.insert(name.into(), tensor)),
            None => drop(image.tensors.remove(name)),
        }
    }
    for Entry { name, change } in &opened.index.files {
        match change {
            None => drop(image.files.remove(name)),
            Some(file) => {
                let bytes = make_file(file, &mut payloads).map_err(|error| in_entry(name, error))?;
                image.files.insert(name.clone(), bytes);
            }
        }
    }
    Ok((image, after))
}

/// A frame to decode, and where to.
struct Job<'a> {
    entry: usize,
    tensor: &'a Tensor,
    frame: &'a Frame,
    payload: &'a [u8],
    back: &'a [u8],
    /// None: zeros.
    from: Option<&'a [u8]>,
    offset: usize,
    to: &'a mut [u8],
}

type MadeTensor<'a> = (&'a str, Option<TensorData>);

/// Every tensor that the index names, its digest checked; none where it is removed. Takes their payloads off `payloads`.
fn make_tensors<'a>(
    from: &Image,
    opened: &'a Opened<'_>,
    payloads: &mut &[u8],
    back: bool,
    threads: &Threads,
) -> Result<Vec<MadeTensor<'a>>, Error> {
    let entries = &opened.index.tensors;
    // memory that is fresh is brought in by the thread that decodes a frame into it
    let mut bytes: Vec<Buffer<u8>> = Vec::with_capacity(entries.len());
    for Entry { name, change } in entries {
        let size = change.as_ref().map_or(Ok(0), Tensor::bytes);
        bytes.push(Buffer::unset(size.map_err(|error| in_entry(name, error))?));
    }
    let mut jobs = vec![];
    let mut backs = opened.back.unwrap_or_default();
    for (entry, (Entry { name, change }, bytes)) in entries.iter().zip(&mut bytes).enumerate() {
        let Some(tensor) = change else {
            if !from.tensors.contains_key(name) {
                return Err(in_entry(name, Error::Malformed("the base has no such tensor".into())));
            }
            continue;
        };
        let old = from.tensors.get(name);
        let old = match tensor.base {
            Some(_) => Some(
                old.filter(|old| old.dtype == tensor.dtype && old.shape == tensor.shape)
                    .ok_or_else(|| in_entry(name, Error::Malformed("the base has no such tensor".into())))?,
            ),
            None => None,
        };
        let frame_bytes = tensor.frame_bytes();
        let mut offset = 0;
        for (frame, to) in tensor.frames.iter().zip(bytes.chunks_mut(frame_bytes)) {
            let early = || in_entry(name, Error::Malformed("a payload is longer than the delta".into()));
            let length = to.len();
            jobs.push(Job {
                entry,
                tensor,
                frame,
                payload: payloads.split_off(..frame.payload_bytes as usize).ok_or_else(early)?,
                back: if back {
                    backs.split_off(..frame.back_bytes as usize).ok_or_else(early)?
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
    let parts = threads.map(jobs, |mut job| (job.entry, make_frame(&mut job, back)));
    let mut parts_of = vec![vec![]; entries.len()];
    for (entry, part) in parts {
        parts_of[entry].push(part.map_err(|error| in_entry(&entries[entry].name, error))?);
    }
    let made = entries
        .iter()
        .zip(bytes)
        .zip(parts_of)
        .map(|((Entry { name, change }, bytes), parts)| {
            let Some(tensor) = change else {
                return Ok((name.as_str(), None));
            };
            let digest = tree::join(&parts, tensor.frame_bytes(), bytes.len());
            let expected = if back { tensor.base } else { Some(tensor.result) };
            if expected != Some(digest) {
                return Err(in_entry(
                    name,
                    Error::Malformed("its bytes have another digest than the delta says".into()),
                ));
            }
            let bytes = Hashed::known(Bytes::from_owner(bytes), digest);
            let tensor = TensorData::new(tensor.dtype, tensor.shape.clone(), bytes)
                .map_err(|error| in_entry(name, Error::Malformed(error.to_string())))?;
            Ok((name.as_str(), Some(tensor)))
        });
    made.collect()
}

fn make_frame(job: &mut Job<'_>, back: bool) -> Result<Part, Error> {
    let way = if back { Way::Back(job.back) } else { Way::Forward };
    let (isa, width) = (lanes::best(), width(job.tensor.dtype));
    match job.from {
        Some(from) => job.to.copy_from_slice(from),
        None => job.to.fill(0),
    }
    frame::follow(isa, width, job.frame, job.payload, job.to, way)?;
    let bytes = job.tensor.bytes()?;
    Ok(tree::part(job.to, job.offset, bytes))
}

fn make_file(file: &File, payloads: &mut &[u8]) -> Result<Bytes, Error> {
    let early = || Error::Malformed("a payload is longer than the delta".into());
    let stored = usize::try_from(file.stored).map_err(|_| early())?;
    let stored = payloads.split_off(..stored).ok_or_else(early)?;
    let bytes = if file.packed {
        let size = usize::try_from(file.size).map_err(|_| early())?;
        planes::unpack(stored, size)?
    } else {
        stored.to_vec()
    };
    if bytes.len() as u64 != file.size || Digest::of(&bytes) != file.digest {
        return Err(Error::Malformed(
            "its bytes have another digest than the delta says".into(),
        ));
    }
    Ok(bytes.into())
}

/// Bytes of the result: what of the base stays, and what is new.
fn result_bytes(index: &Index, base: &Image) -> Result<u64, Error> {
    let overflow = || Error::Malformed("the sizes overflow".into());
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
