//! Making a delta: every frame coded, tried and hashed by whichever thread is free, then put together in the index's order.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use safetensors::Dtype;

use super::frame::{self, Change, Coded, Frame, WEIGHTS};
use super::index::{self, Entry, File, Index, Tensor, width};
use super::tree::{self, Part};
use super::{Error, Header, frames, in_entry, lanes, planes, roots, same_form};
use crate::digest::Digest;
use crate::image::{Image, TensorData, bytes_of};
use crate::kernel::Threads;
use crate::listing;

/// The delta from `base` to `result`. Every frame is decoded once before it is returned: what leaves here is known to arrive.
/// The bytes are the same on every machine and any number of threads.
pub fn encode(base: &Image, result: &Image, threads: &Threads) -> Result<Vec<u8>, Error> {
    encode_known(base, result, None, threads)
}

/// How tensors differ, by name: what becomes of each frame. A tensor that is not named stays as it is.
pub type Changes = BTreeMap<String, Vec<Change>>;

/// [`encode`] where a device has compared already: the version that `changes` make of `base`, and the delta to it, byte for byte
/// that of [`encode`]. Files stay as they are.
pub fn encode_changes(base: &Image, changes: &Changes, threads: &Threads) -> Result<(Image, Vec<u8>), Error> {
    let mut result = base.clone();
    for (name, changes) in changes {
        let malformed = |reason: &str| in_entry(name, Error::Malformed(reason.into()));
        let tensor = result.tensors.get_mut(name);
        let tensor = tensor.ok_or_else(|| malformed("the base has no such tensor"))?;
        let (width, mut bytes) = (width(tensor.dtype), tensor.bytes.to_vec());
        let frames = bytes.chunks_mut(WEIGHTS * width);
        if frames.len() != changes.len() {
            return Err(malformed("its changes are of another number of frames"));
        }
        for (change, frame) in changes.iter().zip(frames) {
            change
                .check(width, frame.len())
                .map_err(|error| in_entry(name, error))?;
            change.write(width, frame);
        }
        tensor.bytes = bytes.into();
    }
    let delta = encode_known(base, &result, Some(changes), threads)?;
    Ok((result, delta))
}

/// `known` is all that makes `result` of `base`.
fn encode_known(base: &Image, result: &Image, known: Option<&Changes>, threads: &Threads) -> Result<Vec<u8>, Error> {
    for (name, tensor) in base.tensors.iter().chain(&result.tensors) {
        if bytes_of(tensor.dtype, &tensor.shape) != Some(tensor.bytes.len()) {
            return Err(Error::Image(listing::Error::Size(name.clone())));
        }
    }
    let tensors: Vec<(&String, Option<&TensorData>, &TensorData)> = result
        .tensors
        .iter()
        .map(|(name, new)| {
            let old = base.tensors.get(name).filter(|old| same_form(old, new));
            (name, old, new)
        })
        .collect();
    let mut jobs = vec![];
    for &(name, old, new) in &tensors {
        // neither a tensor that is new is hashed in the base, nor one whose digest is known
        let base_known = old.is_none_or(|old| old.bytes.digest_if_known().is_some());
        for (i, at) in frames(new).enumerate() {
            jobs.push(Job {
                old: old.map(|old| &old.bytes[at.clone()]),
                new: &new.bytes[at.clone()],
                width: width(new.dtype),
                offset: at.start,
                tensor_bytes: new.bytes.len(),
                base_known,
                known: known.map(|changes| changes.get(name).map_or(&Change::Same, |frames| &frames[i])),
            });
        }
    }
    let mut coded = threads.map(jobs, |job| encode_frame(&job)).into_iter();

    let mut made = Made::default();
    for &(name, old, new) in &tensors {
        let mut rows = vec![];
        for frame in coded.by_ref().take(super::frames(new).count()) {
            let (row, payload, back) = frame.map_err(|error| in_entry(name, error))?;
            rows.push(row);
            made.payloads.extend(payload);
            made.back.extend(back);
        }
        let frame_bytes = WEIGHTS * width(new.dtype);
        let digest_of = |part: fn(&Row) -> Part| {
            let parts: Vec<Part> = rows.iter().map(part).collect();
            tree::join(&parts, frame_bytes, new.bytes.len())
        };
        let digest = digest_of(|row| row.result);
        new.bytes.note(digest);
        let old_digest = old.map(|old| {
            let known = old.bytes.digest_if_known();
            let digest = known.unwrap_or_else(|| digest_of(|row| row.base));
            old.bytes.note(digest);
            digest
        });
        if old_digest != Some(digest) {
            let frames = rows.iter().map(|row| row.frame).collect();
            made.tensor(name, new.dtype, &new.shape, old_digest, digest, frames);
        }
    }
    for name in base.tensors.keys().filter(|&name| !result.tensors.contains_key(name)) {
        made.index.tensors.push(Entry {
            name: name.clone(),
            change: None,
        });
    }
    made.index.tensors.sort_by(|a, b| a.name.cmp(&b.name));
    made.files(&base.files, &result.files)?;

    let base_listing = roots::of(base, threads);
    let result_listing = roots::of(result, threads);
    base_listing.check().map_err(Error::Image)?;
    result_listing.check().map_err(Error::Image)?;
    let header = Header {
        base: base_listing.root(),
        result: result_listing.root(),
    };
    let out = made.finish(&header)?;
    // frames were decoded where they were made; this is what is left that could be wrong
    roots::after(&index::open(&out)?, &base_listing, false)?;
    Ok(out)
}

/// A frame to code.
pub(super) struct Job<'a> {
    /// None: zeros.
    pub old: Option<&'a [u8]>,
    pub new: &'a [u8],
    /// Bytes of a weight.
    pub width: usize,
    /// Where the frame begins in its tensor.
    pub offset: usize,
    pub tensor_bytes: usize,
    /// Nobody asks for the base's subtree.
    pub base_known: bool,
    pub known: Option<&'a Change>,
}

/// What the index needs of a frame.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Row {
    pub frame: Frame,
    /// The result's where the base's digest is known.
    pub base: Part,
    pub result: Part,
}

/// Codes a frame, tries it, and hashes what it comes from and what it makes: its row, its payload, and what it needs for the way
/// back.
pub(super) fn encode_frame(job: &Job<'_>) -> Result<(Row, Vec<u8>, Vec<u8>), Error> {
    let Job { old, new, width, .. } = *job;
    let isa = lanes::best();
    let coded = frame::encode(isa, width, old, new, job.known)?;
    let compared = coded.frame == Frame::SAME && job.known.is_none();
    if !compared && !frame::arrives(isa, width, &coded, old, new)? {
        return Err(Error::Malformed(
            "a frame does not decode to what it was made from, or more of it changed than was named".into(),
        ));
    }
    let Coded { frame, payload, back } = coded;
    let result = tree::part(new, job.offset, job.tensor_bytes);
    if frame == Frame::SAME {
        let base = result;
        return Ok((Row { frame, base, result }, payload, back));
    }
    let hashed = old.filter(|_| !job.base_known);
    let base = hashed.map_or(result, |base| tree::part(base, job.offset, job.tensor_bytes));
    Ok((Row { frame, base, result }, payload, back))
}

/// A delta as it is put together.
#[derive(Default)]
pub(super) struct Made {
    index: Index,
    /// Of frames as far as they are at hand here, and then of files.
    pub payloads: Vec<u8>,
    back: Vec<u8>,
}

impl Made {
    pub fn tensor(
        &mut self,
        name: &str,
        dtype: Dtype,
        shape: &[usize],
        base: Option<Digest>,
        result: Digest,
        frames: Vec<Frame>,
    ) {
        self.index.tensors.push(Entry {
            name: name.into(),
            change: Some(Tensor {
                dtype,
                shape: shape.to_vec(),
                base,
                result,
                frames,
            }),
        });
    }

    pub fn files(&mut self, base: &BTreeMap<String, Bytes>, result: &BTreeMap<String, Bytes>) -> Result<(), Error> {
        let names: BTreeSet<&String> = base.keys().chain(result.keys()).collect();
        for name in names {
            let change = match (base.get(name), result.get(name)) {
                (old, new) if old == new => continue,
                (_, None) => None,
                (_, Some(new)) => {
                    let packed = planes::pack(new)?;
                    let smaller = packed.len() < new.len();
                    let stored: &[u8] = if smaller { &packed } else { new };
                    self.payloads.extend_from_slice(stored);
                    Some(File {
                        packed: smaller,
                        size: new.len() as u64,
                        stored: stored.len() as u64,
                        digest: Digest::of(new),
                    })
                }
            };
            self.index.files.push(Entry {
                name: name.clone(),
                change,
            });
        }
        Ok(())
    }

    /// Header and index.
    pub fn head(&self, header: &Header) -> Result<Vec<u8>, Error> {
        let overflow = || Error::Malformed("the sizes overflow".into());
        let (payloads, back) = self.index.stored().ok_or_else(overflow)?;
        Ok(self.index.to_bytes(header, payloads, back))
    }

    fn finish(self, header: &Header) -> Result<Vec<u8>, Error> {
        let mut out = self.head(header)?;
        out.extend(self.payloads);
        out.extend(self.back);
        Ok(out)
    }
}
