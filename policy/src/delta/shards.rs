//! A delta that several make: each shard codes a run of frames and uploads what comes of it, and one puts together what they
//! report of their frames. The delta's bytes are those that one alone would have made, whatever the number of shards.
//!
//! The frames of a version, tensor after tensor by name, are cut into runs. A shard's object is the payloads of its run and
//! then what they need for the way back. The delta is the head (header and index), the payloads of all shards in turn, and
//! then their ways back in turn; files that differ are one more shard, the last.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use safetensors::Dtype;

use super::encode::{Made, Row, encode_frame};
use super::frame::{Change, Frame, WEIGHTS};
use super::index::{self, width};
use super::tree::{self, Part};
use super::{Error, Header, in_entry};
use crate::digest::Digest;
use crate::image::bytes_of;
use crate::kernel::Threads;
use crate::listing::{self, Listing, Reader, push_dtype, push_name};
use crate::manifest::{ObjectRef, Shard};

const MAGIC: &[u8; 8] = b"SPTSHARE";
const FORMAT_VERSION: u32 = 1;

/// The frames of a tensor that a shard takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run<'a> {
    pub name: &'a str,
    pub dtype: Dtype,
    /// Of the whole tensor.
    pub shape: &'a [usize],
    pub frames: Range<usize>,
    /// Their bytes in the tensor's.
    pub bytes: Range<usize>,
}

/// The frames that shard `shard` of `of` takes, of tensors that are given by name in ascending order: runs of about as many
/// bytes each, so that every frame has one shard.
pub fn run<'a>(
    forms: impl IntoIterator<Item = (&'a str, Dtype, &'a [usize])>,
    shard: usize,
    of: usize,
) -> Result<Vec<Run<'a>>, Error> {
    if shard >= of {
        return Err(Error::Malformed(format!(
            "there is no shard {shard} of {of}, counted from 0"
        )));
    }
    let tensors = forms.into_iter().map(|(name, dtype, shape)| {
        let bytes = bytes_of(dtype, shape).ok_or_else(|| Error::Image(listing::Error::Size(name.into())))?;
        Ok((name, dtype, shape, bytes))
    });
    let tensors: Vec<(&str, Dtype, &[usize], usize)> = tensors.collect::<Result<_, Error>>()?;
    let total: u128 = tensors.iter().map(|&(.., bytes)| bytes as u128).sum();
    // whose a frame is follows from where it starts
    let whose = |start: u128| ((start * of as u128) / total.max(1)).min(of as u128 - 1) as usize;
    let mut runs = vec![];
    let mut start = 0u128;
    for (name, dtype, shape, bytes) in tensors {
        let frame_bytes = WEIGHTS * width(dtype);
        let own = |frame: &usize| whose(start + (frame * frame_bytes) as u128) == shard;
        let mut frames = (0..bytes.div_ceil(frame_bytes)).filter(own);
        let frames = match frames.next() {
            Some(first) => Some(first..first + 1 + frames.count()),
            // a tensor without weights is somebody's too
            None => (bytes == 0 && whose(start) == shard).then_some(0..0),
        };
        runs.extend(frames.map(|frames| Run {
            name,
            dtype,
            shape,
            bytes: frames.start * frame_bytes..bytes.min(frames.end * frame_bytes),
            frames,
        }));
        start += bytes as u128;
    }
    Ok(runs)
}

/// Whole frames of a tensor that follow each other, before and after the step.
#[derive(Debug, Clone, Copy)]
pub struct Stretch<'a> {
    pub name: &'a str,
    pub dtype: Dtype,
    /// Of the whole tensor.
    pub shape: &'a [usize],
    pub first_frame: usize,
    /// From the first of the frames to the end of the last.
    pub old: &'a [u8],
    pub new: &'a [u8],
    /// What makes `new` of `old`, of each frame, where somebody has compared already.
    pub known: Option<&'a [Change]>,
}

/// What a shard made of its run.
#[derive(Debug, Clone)]
pub struct Share {
    /// Payloads, then what the way back needs.
    pub object: Bytes,
    pub report: Report,
}

/// What [`join`] needs of a shard: form, digests and lengths of its frames, and none of their bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// BLAKE3 of the shard's object.
    object: Digest,
    stretches: Vec<Reported>,
}

#[derive(Debug, Clone, PartialEq)]
struct Reported {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    first_frame: usize,
    rows: Vec<Row>,
}

/// A delta but for the payloads of its frames, which are the shards'.
#[derive(Debug, Clone, PartialEq)]
pub struct Joined {
    pub header: Header,
    /// Header and index.
    pub head: Vec<u8>,
    /// Payloads of the files that differ: one more shard, after the others, where there are any.
    pub files: Vec<u8>,
    /// Of all tensors of the result.
    pub tensor_bytes: u64,
}

/// Codes, tries and hashes the frames of a run, whose stretches are in the order of [`run`].
pub fn share(stretches: &[Stretch<'_>], threads: &Threads) -> Result<Share, Error> {
    let mut jobs = vec![];
    for stretch in stretches {
        let frames = stretch.check().map_err(|error| in_entry(stretch.name, error))?;
        let tensor_bytes = stretch.bytes()?;
        let width = width(stretch.dtype);
        for (n, frame) in frames.enumerate() {
            let at = n * WEIGHTS * width;
            let to = stretch.new.len().min(at + WEIGHTS * width);
            jobs.push(super::encode::Job {
                old: Some(&stretch.old[at..to]),
                new: &stretch.new[at..to],
                width,
                offset: frame * WEIGHTS * width,
                tensor_bytes,
                base_known: false,
                known: stretch.known.map(|known| &known[n]),
            });
        }
    }
    let mut coded = threads.map(jobs, |job| encode_frame(&job)).into_iter();
    let (mut object, mut back, mut reported) = (vec![], vec![], vec![]);
    for stretch in stretches {
        let mut rows = vec![];
        for _ in 0..stretch.new.len().div_ceil(WEIGHTS * width(stretch.dtype)) {
            let Some(coded) = coded.next() else { break };
            let (row, payload, own) = coded.map_err(|error| in_entry(stretch.name, error))?;
            rows.push(row);
            object.extend(payload);
            back.extend(own);
        }
        reported.push(Reported {
            name: stretch.name.into(),
            dtype: stretch.dtype,
            shape: stretch.shape.to_vec(),
            first_frame: stretch.first_frame,
            rows,
        });
    }
    object.extend(back);
    let report = Report {
        object: Digest::of(&object),
        stretches: reported,
    };
    Ok(Share {
        object: object.into(),
        report,
    })
}

/// Puts together what all shards report, in their order: every frame of every tensor, each once, in the order of [`run`].
/// `base` and `result` are the files of both versions.
pub fn join(
    reports: &[Report],
    base: &BTreeMap<String, Bytes>,
    result: &BTreeMap<String, Bytes>,
) -> Result<Joined, Error> {
    let mut tensors: Vec<Reported> = vec![];
    for part in reports.iter().flat_map(|report| &report.stretches) {
        let malformed = |reason: &str| in_entry(&part.name, Error::Malformed(reason.into()));
        let in_order = tensors.last().is_none_or(|last| last.name <= part.name);
        match tensors.last_mut().filter(|last| last.name == part.name) {
            Some(last) if last.dtype != part.dtype || last.shape != part.shape => {
                return Err(malformed("two shards report it in different forms"));
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
    let mut made = Made::default();
    let mut listings = (Listing::default(), Listing::default());
    for tensor in &tensors {
        let (name, width) = (&tensor.name, width(tensor.dtype));
        let bytes = bytes_of(tensor.dtype, &tensor.shape)
            .filter(|bytes| tensor.rows.len() == bytes.div_ceil(WEIGHTS * width))
            .ok_or_else(|| in_entry(name, Error::Malformed("its last frames are not reported".into())))?;
        let digest = |part: fn(&Row) -> Part| {
            let parts: Vec<Part> = tensor.rows.iter().map(part).collect();
            tree::join(&parts, WEIGHTS * width, bytes)
        };
        let (old, new) = (digest(|row| row.base), digest(|row| row.result));
        let listed = |digest| listing::Tensor {
            name: name.clone(),
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            size: bytes as u64,
            digest,
        };
        listings.0.tensors.push(listed(old));
        listings.1.tensors.push(listed(new));
        if old != new {
            let frames = tensor.rows.iter().map(|row| row.frame).collect();
            made.tensor(name, tensor.dtype, &tensor.shape, Some(old), new, frames);
        }
    }
    for (files, listing) in [(base, &mut listings.0), (result, &mut listings.1)] {
        listing.files = listing::files(files);
        listing.check().map_err(Error::Image)?;
    }
    made.files(base, result)?;
    let header = Header {
        base: listings.0.root(),
        result: listings.1.root(),
    };
    Ok(Joined {
        head: made.head(&header)?,
        header,
        files: made.payloads,
        tensor_bytes: listings.1.tensors.iter().map(|tensor| tensor.size).sum(),
    })
}

/// The whole delta from its head and, of each shard in turn, the object and how much of it is for the way back.
pub fn stitch(head: &[u8], shards: &[(Bytes, u64)]) -> Result<Vec<u8>, Error> {
    let total = head.len() + shards.iter().map(|(object, _)| object.len()).sum::<usize>();
    let mut delta = Vec::with_capacity(total);
    delta.extend(head);
    let mut backs = vec![];
    for (object, back_bytes) in shards {
        let cut = usize::try_from(*back_bytes)
            .ok()
            .and_then(|back| object.len().checked_sub(back));
        let cut = cut.ok_or_else(|| Error::Malformed("a shard is shorter than its way back".into()))?;
        let (payloads, back) = object.split_at(cut);
        delta.extend(payloads);
        backs.push(back);
    }
    for back in backs {
        delta.extend(back);
    }
    Ok(delta)
}

impl Stretch<'_> {
    fn bytes(&self) -> Result<usize, Error> {
        bytes_of(self.dtype, self.shape).ok_or_else(|| Error::Image(listing::Error::Size(self.name.into())))
    }

    /// Its frames.
    fn check(&self) -> Result<Range<usize>, Error> {
        let malformed = |reason: &str| Error::Malformed(reason.into());
        let frame_bytes = WEIGHTS * width(self.dtype);
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
        for (n, change) in self.known.into_iter().flatten().enumerate() {
            let frame = self
                .new
                .len()
                .min((n + 1) * frame_bytes)
                .saturating_sub(n * frame_bytes);
            change.check(width(self.dtype), frame)?;
        }
        if self.known.is_some_and(|known| known.len() != frames) {
            return Err(malformed("its changes are of another number of frames"));
        }
        Ok(self.first_frame..self.first_frame + frames)
    }
}

impl Report {
    /// `SPTSHARE`, format version, BLAKE3 of the object, the number of stretches; of each its name, dtype, shape, first frame and number of frames, and of
    /// each frame what the index has of it and the BLAKE3 subtrees before and after.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(FORMAT_VERSION.to_le_bytes());
        out.extend(self.object.0);
        out.extend((self.stretches.len() as u32).to_le_bytes());
        for part in &self.stretches {
            push_name(&mut out, &part.name);
            push_dtype(&mut out, part.dtype);
            out.push(part.shape.len() as u8);
            for &dimension in &part.shape {
                out.extend((dimension as u64).to_le_bytes());
            }
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

    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader(bytes.strip_prefix(MAGIC).ok_or(Error::Magic)?);
        match reader.u32()? {
            FORMAT_VERSION => {}
            other => return Err(Error::FormatVersion(other)),
        }
        let object = reader.digest()?;
        let mut stretches = vec![];
        for _ in 0..reader.u32()? {
            stretches.push(Reported::read(&mut reader)?);
        }
        match reader.0 {
            [] => Ok(Report { object, stretches }),
            _ => Err(Error::Malformed("there are bytes after the report".into())),
        }
    }

    /// The shard as a manifest names it.
    pub fn shard(&self) -> Shard {
        let frames = self.stretches.iter().flat_map(|part| &part.rows).map(|row| &row.frame);
        let back_bytes: u64 = frames.clone().map(|frame| u64::from(frame.back_bytes)).sum();
        let payload_bytes: u64 = frames.map(|frame| u64::from(frame.payload_bytes)).sum();
        Shard {
            object: ObjectRef {
                digest: self.object,
                size_bytes: payload_bytes + back_bytes,
            },
            back_bytes,
        }
    }
}

impl Reported {
    fn read(reader: &mut Reader<'_>) -> Result<Self, Error> {
        let (name, dtype, shape) = (reader.name()?, reader.dtype()?, reader.shape()?);
        let too_large = |_| in_entry(&name, Error::Malformed("a number is too large".into()));
        let first_frame = usize::try_from(reader.u64()?).map_err(too_large)?;
        let mut rows = vec![];
        // no capacity is reserved from a count that the bytes may not cover
        let frames = reader.u64()?;
        let all = bytes_of(dtype, &shape).map_or(0, |bytes| bytes.div_ceil(WEIGHTS * width(dtype)));
        for _ in 0..frames {
            let frame = index::read_frame(reader)?;
            let part = |digest: Digest| Part::of_value(digest, all == 1);
            let base = part(reader.digest()?);
            let result = match frame == Frame::SAME {
                true => base,
                false => part(reader.digest()?),
            };
            rows.push(Row { frame, base, result });
        }
        Ok(Reported {
            name,
            dtype,
            shape,
            first_frame,
            rows,
        })
    }
}
