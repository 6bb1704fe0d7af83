//! Makes a delta. Threads code, verify and hash frames; then the delta is assembled in index order.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use safetensors::Dtype;

use super::frame::{self, Change, CodedFrame, Frame, WEIGHTS};
use super::index::{self, Entry, File, Index, Tensor};
use super::{Error, Header, frames, in_entry, malformed, planes, result_index, same_form, simd};
use crate::checkpoint::Checkpoint;
use crate::content_index;
use crate::digest::Digest;
use crate::merkle::{self, ChunkHash};
use crate::tensor::{TensorData, bytes_of, weight_bytes};
use crate::threads::Threads;

/// The delta from `base` to `result`. Every frame is decoded once as a check before the delta is
/// returned. The bytes are the same on every machine and any number of threads.
pub fn encode(base: &Checkpoint, result: &Checkpoint, threads: &Threads) -> Result<Vec<u8>, Error> {
    encode_known(base, result, None, threads)
}

/// How tensors differ, by name: the change of each frame. Tensors that are not named do not change.
pub type Changes = BTreeMap<String, Vec<Change>>;

/// [`encode`] after a device has compared. Returns the version that `changes` make of `base`, and
/// the delta to it, identical to the one from [`encode`]. Files do not change.
pub fn encode_changes(base: &Checkpoint, changes: &Changes, threads: &Threads) -> Result<(Checkpoint, Vec<u8>), Error> {
    let mut result = base.clone();
    for (name, changes) in changes {
        let tensor = result.tensors.get_mut(name);
        let tensor = tensor.ok_or_else(|| in_entry(name, malformed("the base has no such tensor")))?;
        let (width, mut bytes) = (weight_bytes(tensor.dtype), tensor.bytes.to_vec());
        let frames = bytes.chunks_mut(WEIGHTS * width);
        if frames.len() != changes.len() {
            return Err(in_entry(
                name,
                malformed("its changes are for another number of frames"),
            ));
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

/// `known`: all changes from `base` to `result`, if somebody has compared already.
fn encode_known(
    base: &Checkpoint,
    result: &Checkpoint,
    known: Option<&Changes>,
    threads: &Threads,
) -> Result<Vec<u8>, Error> {
    for (name, tensor) in base.tensors.iter().chain(&result.tensors) {
        if bytes_of(tensor.dtype, &tensor.shape) != Some(tensor.bytes.len()) {
            return Err(Error::Checkpoint(content_index::Error::Size(name.clone())));
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
        // new tensors and tensors with a known digest need no hash of the base
        let base_known = old.is_none_or(|old| old.bytes.digest_if_known().is_some());
        for (i, at) in frames(new).enumerate() {
            jobs.push(Job {
                old: old.map(|old| &old.bytes[at.clone()]),
                new: &new.bytes[at.clone()],
                width: weight_bytes(new.dtype),
                offset: at.start,
                tensor_bytes: new.bytes.len(),
                base_known,
                known: known.map(|changes| changes.get(name).map_or(&Change::Same, |frames| &frames[i])),
            });
        }
    }
    let mut coded = threads.map(jobs, |job| encode_frame(&job)).into_iter();

    let mut delta = DeltaBuilder::default();
    for &(name, old, new) in &tensors {
        let mut rows = vec![];
        for frame in coded.by_ref().take(frames(new).count()) {
            let (row, payload, reverse) = frame.map_err(|error| in_entry(name, error))?;
            rows.push(row);
            delta.payloads.extend(payload);
            delta.reverse.extend(reverse);
        }
        let frame_bytes = WEIGHTS * weight_bytes(new.dtype);
        let digest_of = |part: fn(&FrameRow) -> ChunkHash| {
            let parts: Vec<ChunkHash> = rows.iter().map(part).collect();
            merkle::merge(&parts, frame_bytes, new.bytes.len())
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
            delta.tensor(name, new.dtype, &new.shape, old_digest, digest, frames);
        }
    }
    for name in base.tensors.keys().filter(|&name| !result.tensors.contains_key(name)) {
        delta.index.tensors.push(Entry {
            name: name.clone(),
            change: None,
        });
    }
    delta.index.tensors.sort_by(|a, b| a.name.cmp(&b.name));
    delta.files(&base.files, &result.files)?;

    let contents = [base, result].map(|version| version.content_index(threads));
    for content in &contents {
        content.check().map_err(Error::Checkpoint)?;
    }
    let [base, result] = &contents;
    let header = Header {
        base: base.root(),
        result: result.root(),
    };
    let out = delta.finish(&header)?;
    // the frames are verified; this verifies the index
    result_index::check(&index::open(&out)?, base, false)?;
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
    /// The base's digest is known, so its frame need not be hashed.
    pub base_known: bool,
    pub known: Option<&'a Change>,
}

/// What the index needs to know about a frame.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct FrameRow {
    pub frame: Frame,
    /// Same as `result` if the base's digest is known.
    pub base: ChunkHash,
    pub result: ChunkHash,
}

/// Codes a frame, verifies that it decodes, and hashes it before and after. Returns its row, its
/// payload and its reverse data.
pub(super) fn encode_frame(job: &Job<'_>) -> Result<(FrameRow, Vec<u8>, Vec<u8>), Error> {
    let Job { old, new, width, .. } = *job;
    let isa = simd::best();
    let coded = frame::encode(isa, width, old, new, job.known)?;
    let compared = coded.frame == Frame::SAME && job.known.is_none();
    if !compared && !frame::decodes_to(isa, width, &coded, old, new)? {
        return Err(malformed(
            "a frame does not decode to its result, or more of it changed than the given changes say",
        ));
    }
    let CodedFrame {
        frame,
        payload,
        reverse,
    } = coded;
    let result = merkle::chunk_hash(&[new], job.offset, job.tensor_bytes);
    if frame == Frame::SAME {
        let base = result;
        return Ok((FrameRow { frame, base, result }, payload, reverse));
    }
    let hashed = old.filter(|_| !job.base_known);
    let base = hashed.map_or(result, |base| merkle::chunk_hash(&[base], job.offset, job.tensor_bytes));
    Ok((FrameRow { frame, base, result }, payload, reverse))
}

/// A delta under construction.
#[derive(Default)]
pub(super) struct DeltaBuilder {
    index: Index,
    /// Of the frames, if they are delta here, and then of the files.
    pub payloads: Vec<u8>,
    reverse: Vec<u8>,
}

impl DeltaBuilder {
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
        let overflow = || malformed("the sizes overflow");
        let (payloads, reverse) = self.index.stored().ok_or_else(overflow)?;
        Ok(self.index.to_bytes(header, payloads, reverse))
    }

    fn finish(self, header: &Header) -> Result<Vec<u8>, Error> {
        let mut out = self.head(header)?;
        out.extend(self.payloads);
        out.extend(self.reverse);
        Ok(out)
    }
}
