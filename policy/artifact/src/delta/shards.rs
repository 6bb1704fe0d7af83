//! A delta that several machines make. Each shard codes a partition of the frames and uploads one
//! object. One machine merges their reports. The delta has the same bytes as from a single encoder,
//! for any number of shards.
//!
//! The frames of a version, tensor after tensor by name, are divided into contiguous partitions. A
//! shard's object has the payloads of its frames, then their reverse data. The delta is the head
//! (header and index), the payloads of all shards in order, then their reverse data in order. Files
//! that differ are one more shard, the last.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use safetensors::Dtype;

use super::encode::{DeltaBuilder, FrameRow, encode_frame};
use super::frame::{Frame, WEIGHTS};
use super::index;
use super::{Error, Header, in_entry, malformed};
use crate::content_index::{self, ContentIndex};
use crate::digest::Digest;
use crate::manifest::{ObjectRef, Shard};
use crate::merkle::{self, ChunkHash};
use crate::tensor::{bytes_of, weight_bytes};
use crate::threads::Threads;
use crate::wire::{Reader, push_dtype, push_name, push_shape};

const MAGIC: &[u8; 8] = b"SPTSHARE";
const FORMAT_VERSION: u32 = 1;

/// Frames of a tensor that belong to one shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrameRange<'a> {
    pub name: &'a str,
    pub dtype: Dtype,
    /// Shape of the full tensor.
    pub shape: &'a [usize],
    pub frames: Range<usize>,
    /// Their byte range in the tensor.
    pub bytes: Range<usize>,
}

/// The frames of shard `shard` (from 0) of `of`. `forms` are name, dtype and shape of all tensors,
/// by name. Partitions are contiguous and have about the same number of bytes; every frame is in
/// one.
pub fn partition<'a>(
    forms: impl IntoIterator<Item = (&'a str, Dtype, &'a [usize])>,
    shard: usize,
    of: usize,
) -> Result<Vec<FrameRange<'a>>, Error> {
    if shard >= of {
        return Err(Error::Malformed(format!(
            "there is no shard {shard} of {of}, counted from 0"
        )));
    }
    let tensors = forms.into_iter().map(|(name, dtype, shape)| {
        let bytes = bytes_of(dtype, shape).ok_or_else(|| Error::Checkpoint(content_index::Error::Size(name.into())))?;
        Ok((name, dtype, shape, bytes))
    });
    let tensors: Vec<(&str, Dtype, &[usize], usize)> = tensors.collect::<Result<_, Error>>()?;
    let total: u128 = tensors.iter().map(|&(.., bytes)| bytes as u128).sum();
    // the first byte of a frame decides which shard owns it
    let owner = |start: u128| ((start * of as u128) / total.max(1)).min(of as u128 - 1) as usize;
    let mut ranges = vec![];
    let mut start = 0u128;
    for (name, dtype, shape, bytes) in tensors {
        let frame_bytes = WEIGHTS * weight_bytes(dtype);
        let own = |frame: &usize| owner(start + (frame * frame_bytes) as u128) == shard;
        let mut frames = (0..bytes.div_ceil(frame_bytes)).filter(own);
        let frames = match frames.next() {
            Some(first) => Some(first..first + 1 + frames.count()),
            // a tensor without weights has an owner too
            None => (bytes == 0 && owner(start) == shard).then_some(0..0),
        };
        ranges.extend(frames.map(|frames| FrameRange {
            name,
            dtype,
            shape,
            bytes: frames.start * frame_bytes..bytes.min(frames.end * frame_bytes),
            frames,
        }));
        start += bytes as u128;
    }
    Ok(ranges)
}

/// Consecutive, complete frames of a tensor, before and after the step.
#[derive(Debug, Clone, Copy)]
pub struct FrameSpan<'a> {
    pub name: &'a str,
    pub dtype: Dtype,
    /// Shape of the full tensor.
    pub shape: &'a [usize],
    pub first_frame: usize,
    /// Bytes of the frames before the step.
    pub old: &'a [u8],
    /// Bytes of the frames after the step.
    pub new: &'a [u8],
}

/// The coded frames of one shard.
#[derive(Debug, Clone)]
pub struct EncodedShard {
    /// Payloads, then reverse data.
    pub object: Bytes,
    pub report: ShardReport,
}

/// What [`merge_shards`] needs from a shard: form, digests and lengths of its frames, but no
/// payloads.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardReport {
    /// BLAKE3 of the shard's object.
    object: Digest,
    spans: Vec<SpanReport>,
}

#[derive(Debug, Clone, PartialEq)]
struct SpanReport {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    first_frame: usize,
    rows: Vec<FrameRow>,
}

/// A delta without the payloads of its frames, which are in the shards' objects.
#[derive(Debug, Clone, PartialEq)]
pub struct MergedDelta {
    pub header: Header,
    /// Header and index.
    pub head: Vec<u8>,
    /// Payloads of the files that differ: one more shard after the others, if there are any.
    pub files: Vec<u8>,
    /// Bytes of all tensors of the result.
    pub tensor_bytes: u64,
}

/// Codes, verifies and hashes the frames of one shard, given in the order of [`partition`].
pub fn encode_shard(spans: &[FrameSpan<'_>], threads: &Threads) -> Result<EncodedShard, Error> {
    let mut jobs = vec![];
    for span in spans {
        let frames = span.check().map_err(|error| in_entry(span.name, error))?;
        let tensor_bytes = span.bytes()?;
        let width = weight_bytes(span.dtype);
        for (n, frame) in frames.enumerate() {
            let at = n * WEIGHTS * width;
            let to = span.new.len().min(at + WEIGHTS * width);
            jobs.push(super::encode::Job {
                old: Some(&span.old[at..to]),
                new: &span.new[at..to],
                width,
                offset: frame * WEIGHTS * width,
                tensor_bytes,
                base_known: false,
                known: None,
            });
        }
    }
    let mut coded = threads.map(jobs, |job| encode_frame(&job)).into_iter();
    let (mut object, mut reverse, mut reported) = (vec![], vec![], vec![]);
    for span in spans {
        let mut rows = vec![];
        for _ in 0..span.new.len().div_ceil(WEIGHTS * weight_bytes(span.dtype)) {
            let Some(coded) = coded.next() else { break };
            let (row, payload, own) = coded.map_err(|error| in_entry(span.name, error))?;
            rows.push(row);
            object.extend(payload);
            reverse.extend(own);
        }
        reported.push(SpanReport {
            name: span.name.into(),
            dtype: span.dtype,
            shape: span.shape.to_vec(),
            first_frame: span.first_frame,
            rows,
        });
    }
    object.extend(reverse);
    let report = ShardReport {
        object: Digest::of(&object),
        spans: reported,
    };
    Ok(EncodedShard {
        object: object.into(),
        report,
    })
}

/// Merges the reports of all shards, in shard order. Returns an error unless they cover every frame
/// of every tensor once, in the order of [`partition`]. `base` and `result` are the files of both
/// versions.
pub fn merge_shards(
    reports: &[ShardReport],
    base: &BTreeMap<String, Bytes>,
    result: &BTreeMap<String, Bytes>,
) -> Result<MergedDelta, Error> {
    let mut tensors: Vec<SpanReport> = vec![];
    for part in reports.iter().flat_map(|report| &report.spans) {
        let malformed = |reason: &str| in_entry(&part.name, malformed(reason));
        let in_order = tensors.last().is_none_or(|last| last.name <= part.name);
        match tensors.last_mut().filter(|last| last.name == part.name) {
            Some(last) if last.dtype != part.dtype || last.shape != part.shape => {
                return Err(malformed("two shards report different forms of it"));
            }
            Some(last) if last.rows.len() != part.first_frame => {
                return Err(malformed("frames between two shards are missing, or reported twice"));
            }
            Some(last) => last.rows.extend(part.rows.iter().copied()),
            None if part.first_frame != 0 => return Err(malformed("its first frames are not reported")),
            None if !in_order => return Err(malformed("it is reported out of order")),
            None => tensors.push(part.clone()),
        }
    }
    let mut delta = DeltaBuilder::default();
    let mut contents = (ContentIndex::default(), ContentIndex::default());
    for tensor in &tensors {
        let (name, width) = (&tensor.name, weight_bytes(tensor.dtype));
        let bytes = bytes_of(tensor.dtype, &tensor.shape)
            .filter(|bytes| tensor.rows.len() == bytes.div_ceil(WEIGHTS * width))
            .ok_or_else(|| in_entry(name, malformed("its last frames are not reported")))?;
        let digest = |part: fn(&FrameRow) -> ChunkHash| {
            let parts: Vec<ChunkHash> = tensor.rows.iter().map(part).collect();
            merkle::merge(&parts, WEIGHTS * width, bytes)
        };
        let (old, new) = (digest(|row| row.base), digest(|row| row.result));
        let entry = |digest| content_index::Tensor {
            name: name.clone(),
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            size: bytes as u64,
            digest,
        };
        contents.0.tensors.push(entry(old));
        contents.1.tensors.push(entry(new));
        if old != new {
            let frames = tensor.rows.iter().map(|row| row.frame).collect();
            delta.tensor(name, tensor.dtype, &tensor.shape, Some(old), new, frames);
        }
    }
    for (files, content) in [(base, &mut contents.0), (result, &mut contents.1)] {
        content.files = content_index::files(files);
        content.check().map_err(Error::Checkpoint)?;
    }
    delta.files(base, result)?;
    let header = Header {
        base: contents.0.root(),
        result: contents.1.root(),
    };
    Ok(MergedDelta {
        head: delta.head(&header)?,
        header,
        files: delta.payloads,
        tensor_bytes: contents.1.tensors.iter().map(|tensor| tensor.size).sum(),
    })
}

/// The whole delta, from its head and, for each shard in order, its object and how many bytes of
/// that are reverse data.
pub fn concat(head: &[u8], shards: &[(Bytes, u64)]) -> Result<Vec<u8>, Error> {
    let total = head.len() + shards.iter().map(|(object, _)| object.len()).sum::<usize>();
    let mut delta = Vec::with_capacity(total);
    delta.extend(head);
    let mut reverse_sections = vec![];
    for (object, reverse_bytes) in shards {
        let cut = usize::try_from(*reverse_bytes)
            .ok()
            .and_then(|reverse| object.len().checked_sub(reverse));
        let cut = cut.ok_or_else(|| malformed("a shard is shorter than its reverse data"))?;
        let (payloads, reverse) = object.split_at(cut);
        delta.extend(payloads);
        reverse_sections.push(reverse);
    }
    for reverse in reverse_sections {
        delta.extend(reverse);
    }
    Ok(delta)
}

impl FrameSpan<'_> {
    fn bytes(&self) -> Result<usize, Error> {
        bytes_of(self.dtype, self.shape).ok_or_else(|| Error::Checkpoint(content_index::Error::Size(self.name.into())))
    }

    /// Verifies the span. Returns the tensor's frames that it has.
    fn check(&self) -> Result<Range<usize>, Error> {
        let frame_bytes = WEIGHTS * weight_bytes(self.dtype);
        let (bytes, length) = (self.bytes()?, self.new.len());
        if self.old.len() != length {
            return Err(malformed("before and after have different lengths"));
        }
        let start = self.first_frame.checked_mul(frame_bytes);
        let end = start.and_then(|start| start.checked_add(length));
        if !end.is_some_and(|end| end == bytes || (end < bytes && length % frame_bytes == 0)) {
            return Err(malformed("its bytes are not whole frames of the tensor"));
        }
        let frames = length.div_ceil(frame_bytes);
        Ok(self.first_frame..self.first_frame + frames)
    }
}

impl ShardReport {
    /// Writes `SPTSHARE`, the format version, BLAKE3 of the object, and the number of spans. Each
    /// span has its name, dtype, shape, first frame and number of frames. Each frame has its entry
    /// in the index and its BLAKE3 subtrees before and after.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(FORMAT_VERSION.to_le_bytes());
        out.extend(self.object.0);
        out.extend((self.spans.len() as u32).to_le_bytes());
        for part in &self.spans {
            push_name(&mut out, &part.name);
            push_dtype(&mut out, part.dtype);
            push_shape(&mut out, &part.shape);
            out.extend((part.first_frame as u64).to_le_bytes());
            out.extend((part.rows.len() as u64).to_le_bytes());
            for row in &part.rows {
                index::push_frame(&mut out, &row.frame);
                out.extend(row.base.value());
                if row.frame != Frame::SAME {
                    out.extend(row.result.value());
                }
            }
        }
        out
    }

    /// Reads a report as [`to_bytes`](Self::to_bytes) wrote it.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader(bytes.strip_prefix(MAGIC).ok_or(Error::Magic)?);
        match reader.u32()? {
            FORMAT_VERSION => {}
            other => return Err(Error::FormatVersion(other)),
        }
        let object = reader.digest()?;
        let mut spans = vec![];
        for _ in 0..reader.u32()? {
            spans.push(SpanReport::read(&mut reader)?);
        }
        match reader.0 {
            [] => Ok(ShardReport { object, spans }),
            _ => Err(malformed("there are bytes after the report")),
        }
    }

    /// The shard's entry in a manifest.
    pub fn shard(&self) -> Shard {
        let frames = self.spans.iter().flat_map(|part| &part.rows).map(|row| &row.frame);
        let reverse_bytes: u64 = frames.clone().map(|frame| u64::from(frame.reverse_bytes)).sum();
        let payload_bytes: u64 = frames.map(|frame| u64::from(frame.payload_bytes)).sum();
        Shard {
            object: ObjectRef {
                digest: self.object,
                size_bytes: payload_bytes + reverse_bytes,
            },
            reverse_bytes,
        }
    }
}

impl SpanReport {
    fn read(reader: &mut Reader<'_>) -> Result<Self, Error> {
        let (name, dtype, shape) = (reader.name()?, reader.dtype()?, reader.shape()?);
        let too_large = |_| in_entry(&name, malformed("a number is too large"));
        let first_frame = usize::try_from(reader.u64()?).map_err(too_large)?;
        let mut rows = vec![];
        // no capacity is reserved from a count that the bytes may not cover
        let frames = reader.u64()?;
        let all = bytes_of(dtype, &shape).map_or(0, |bytes| bytes.div_ceil(WEIGHTS * weight_bytes(dtype)));
        for _ in 0..frames {
            let frame = index::read_frame(reader)?;
            let part = |digest: Digest| ChunkHash::from_value(digest, all == 1);
            let base = part(reader.digest()?);
            let result = match frame == Frame::SAME {
                true => base,
                false => part(reader.digest()?),
            };
            rows.push(FrameRow { frame, base, result });
        }
        Ok(SpanReport {
            name,
            dtype,
            shape,
            first_frame,
            rows,
        })
    }
}
