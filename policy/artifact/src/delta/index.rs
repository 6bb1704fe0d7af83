//! Header and index of a delta: which tensors and files differ, where each frame's payload is, and
//! the digests before and after. One checksum covers both.
//!
//! ```text
//! tensors: count u32, then each, by name in ascending byte order:
//!     name: length u16, UTF-8 bytes
//!     change: u8    0 removed, 1 changed, 2 new (not in the base, or in another form; its base is zeros)
//!     the rest only if it is not removed:
//!     dtype: length u8, ASCII name; rank u8; each dimension u64
//!     changed only: BLAKE3 of the base's bytes
//!     BLAKE3 of the result's bytes
//!     each frame of 2^20 weights, the last one shorter:
//!         codec: u8    0 same, 1 planes, 2 packed planes, 3 steps
//!         the rest only if it is not the same:
//!         lengths of the payload and of its reverse data, LEB128
//!         XXH3-128 of the frame's bytes in the base, in the result
//! files: count u32, then each, by name in ascending byte order:
//!     name: length u16, UTF-8 bytes
//!     change: u8    0 removed, 1 raw, 2 one zstd frame
//!     raw and zstd only: size of the file u64, length of the payload u64, BLAKE3 of the file
//! ```

use safetensors::Dtype;

use super::frame::{Codec, Frame, WEIGHTS};
use super::{Error, Header, malformed};
use crate::digest::Digest;
use crate::tensor::{bytes_of, weight_bytes};
use crate::wire::{Reader, ascending, push_dtype, push_name, push_shape};

const MAGIC: &[u8; 8] = b"SPTDELTA";
const FORMAT_VERSION: u32 = 2;
pub(super) const HEADER_BYTES: usize = 136;
/// Of the header's bytes those that the checksum covers, before the index.
const CHECKED_BYTES: usize = HEADER_BYTES - 32;

#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Index {
    pub tensors: Vec<Entry<Tensor>>,
    pub files: Vec<Entry<File>>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry<C> {
    pub name: String,
    /// None: removed.
    pub change: Option<C>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// None: it is new.
    pub base: Option<Digest>,
    pub result: Digest,
    pub frames: Vec<Frame>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct File {
    pub packed: bool,
    pub size: u64,
    pub stored: u64,
    pub digest: Digest,
}

/// A delta whose header and index are verified.
#[derive(Debug)]
pub(super) struct OpenDelta<'a> {
    pub header: Header,
    pub index: Index,
    /// Payloads of the tensors' frames, then of the files, in index order, without gaps.
    pub payloads: &'a [u8],
    /// The reverse section, in the same order; None if it was cut off.
    pub reverse: Option<&'a [u8]>,
}

impl Tensor {
    pub fn bytes(&self) -> Result<usize, Error> {
        bytes_of(self.dtype, &self.shape).ok_or_else(|| malformed("the shape does not end at a byte boundary"))
    }

    pub fn frame_bytes(&self) -> usize {
        WEIGHTS * weight_bytes(self.dtype)
    }
}

impl Index {
    /// Header and index.
    pub fn to_bytes(&self, header: &Header, payload_bytes: u64, reverse_bytes: u64) -> Vec<u8> {
        let mut index = vec![];
        self.push(&mut index);
        let mut out = Vec::with_capacity(HEADER_BYTES + index.len());
        out.extend(MAGIC);
        out.extend(FORMAT_VERSION.to_le_bytes());
        out.extend([0; 4]);
        out.extend(header.base.0);
        out.extend(header.result.0);
        out.extend((index.len() as u64).to_le_bytes());
        out.extend(payload_bytes.to_le_bytes());
        out.extend(reverse_bytes.to_le_bytes());
        let checksum = checksum(&out, &index);
        out.extend(checksum.0);
        out.extend(index);
        out
    }

    /// Returns an error if the base cannot be rebuilt from the result.
    pub fn check_reversible(&self) -> Result<(), Error> {
        let reversible = |entry: &Entry<Tensor>| entry.change.as_ref().is_some_and(|tensor| tensor.base.is_some());
        if self.files.is_empty() && self.tensors.iter().all(reversible) {
            return Ok(());
        }
        Err(Error::NotReversible(
            "it adds, removes or reshapes a tensor, or changes a file",
        ))
    }

    fn push(&self, out: &mut Vec<u8>) {
        out.extend((self.tensors.len() as u32).to_le_bytes());
        for Entry { name, change } in &self.tensors {
            push_name(out, name);
            let Some(tensor) = change else {
                out.push(0);
                continue;
            };
            out.push(if tensor.base.is_some() { 1 } else { 2 });
            push_dtype(out, tensor.dtype);
            push_shape(out, &tensor.shape);
            if let Some(base) = tensor.base {
                out.extend(base.0);
            }
            out.extend(tensor.result.0);
            for frame in &tensor.frames {
                push_frame(out, frame);
            }
        }
        out.extend((self.files.len() as u32).to_le_bytes());
        for Entry { name, change } in &self.files {
            push_name(out, name);
            let Some(file) = change else {
                out.push(0);
                continue;
            };
            out.push(if file.packed { 2 } else { 1 });
            out.extend(file.size.to_le_bytes());
            out.extend(file.stored.to_le_bytes());
            out.extend(file.digest.0);
        }
    }

    fn read(bytes: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader(bytes);
        let mut index = Index::default();
        // no capacity is reserved from a count that the bytes may not cover
        for _ in 0..reader.u32()? {
            index.tensors.push(read_tensor(&mut reader)?);
        }
        for _ in 0..reader.u32()? {
            index.files.push(read_file(&mut reader)?);
        }
        if !reader.0.is_empty() {
            return Err(malformed("there are bytes after the index"));
        }
        // a name twice would make the result depend on the order of applying
        ascending(index.tensors.iter().map(|entry| entry.name.as_str()))?;
        ascending(index.files.iter().map(|entry| entry.name.as_str()))?;
        Ok(index)
    }

    /// Bytes of all payloads and of the reverse section, by the frames and files. None on overflow.
    pub fn stored(&self) -> Option<(u64, u64)> {
        let (mut payloads, mut reverse) = (0u64, 0u64);
        for tensor in self.tensors.iter().filter_map(|entry| entry.change.as_ref()) {
            for frame in &tensor.frames {
                payloads = payloads.checked_add(frame.payload_bytes.into())?;
                reverse = reverse.checked_add(frame.reverse_bytes.into())?;
            }
        }
        for file in self.files.iter().filter_map(|entry| entry.change.as_ref()) {
            payloads = payloads.checked_add(file.stored)?;
        }
        Some((payloads, reverse))
    }
}

fn checksum(header: &[u8], index: &[u8]) -> Digest {
    let mut hasher = blake3::Hasher::new();
    Digest(*hasher.update(header).update(index).finalize().as_bytes())
}

/// The verified header and index of a delta, and how many bytes follow them.
#[derive(Debug)]
pub(super) struct Head {
    pub header: Header,
    pub index: Index,
    /// Bytes of header and index.
    pub bytes: usize,
    pub payload_bytes: u64,
    pub reverse_bytes: u64,
}

/// Reads a delta. The reverse section may be missing, but not incomplete.
pub(super) fn open(delta: &[u8]) -> Result<OpenDelta<'_>, Error> {
    let head = open_head(delta)?;
    let rest = &delta[head.bytes..];
    let length = usize::try_from(head.payload_bytes).map_err(|_| Error::Checksum)?;
    let (payloads, reverse) = rest.split_at_checked(length).ok_or(Error::Checksum)?;
    let complete = reverse.len() as u64 == head.reverse_bytes;
    if !complete && !reverse.is_empty() {
        return Err(Error::Checksum);
    }
    Ok(OpenDelta {
        header: head.header,
        index: head.index,
        payloads,
        reverse: complete.then_some(reverse),
    })
}

/// Reads header and index. Ignores what follows.
pub(super) fn open_head(delta: &[u8]) -> Result<Head, Error> {
    if !delta.starts_with(MAGIC) {
        return Err(Error::Magic);
    }
    let early = |_| Error::Checksum;
    let mut reader = Reader(&delta[MAGIC.len()..]);
    // version first: another one may place its checksum elsewhere
    match reader.u32().map_err(early)? {
        FORMAT_VERSION => {}
        other => return Err(Error::FormatVersion(other)),
    }
    let reserved = reader.u32().map_err(early)?;
    let header = Header {
        base: reader.digest().map_err(early)?,
        result: reader.digest().map_err(early)?,
    };
    let [index_bytes, payload_bytes, reverse_bytes] = [
        reader.u64().map_err(early)?,
        reader.u64().map_err(early)?,
        reader.u64().map_err(early)?,
    ];
    let expected = reader.digest().map_err(early)?;
    let length = usize::try_from(index_bytes).map_err(|_| Error::Checksum)?;
    let index = delta[HEADER_BYTES..].get(..length).ok_or(Error::Checksum)?;
    if checksum(&delta[..CHECKED_BYTES], index) != expected {
        return Err(Error::Checksum);
    }
    if reserved != 0 {
        return Err(malformed("a reserved field is not zero"));
    }
    let index = Index::read(index)?;
    if index.stored() != Some((payload_bytes, reverse_bytes)) {
        return Err(malformed("the payloads have other lengths than the header says"));
    }
    Ok(Head {
        header,
        index,
        bytes: HEADER_BYTES + length,
        payload_bytes,
        reverse_bytes,
    })
}

fn read_tensor(reader: &mut Reader<'_>) -> Result<Entry<Tensor>, Error> {
    let name = reader.name()?;
    let kind = reader.u8()?;
    if kind == 0 {
        return Ok(Entry { name, change: None });
    }
    if kind > 2 {
        return Err(Error::Malformed(format!("`{name}`: unknown change {kind}")));
    }
    let mut tensor = Tensor {
        dtype: reader.dtype()?,
        shape: reader.shape()?,
        base: None,
        result: Digest([0; 32]),
        frames: vec![],
    };
    if kind == 1 {
        tensor.base = Some(reader.digest()?);
    }
    tensor.result = reader.digest()?;
    for _ in 0..tensor.bytes()?.div_ceil(tensor.frame_bytes()) {
        tensor.frames.push(read_frame(reader)?);
    }
    Ok(Entry {
        name,
        change: Some(tensor),
    })
}

pub(super) fn push_frame(out: &mut Vec<u8>, frame: &Frame) {
    out.push(match frame.codec {
        Codec::Same => 0,
        Codec::Planes => 1,
        Codec::Packed => 2,
        Codec::Steps => 3,
    });
    if frame.codec != Codec::Same {
        push_varint(out, frame.payload_bytes);
        push_varint(out, frame.reverse_bytes);
        out.extend(frame.base.to_le_bytes());
        out.extend(frame.result.to_le_bytes());
    }
}

pub(super) fn read_frame(reader: &mut Reader<'_>) -> Result<Frame, Error> {
    let codec = match reader.u8()? {
        0 => return Ok(Frame::SAME),
        1 => Codec::Planes,
        2 => Codec::Packed,
        3 => Codec::Steps,
        other => return Err(Error::Malformed(format!("unknown codec {other}"))),
    };
    let frame = Frame {
        codec,
        payload_bytes: varint(reader)?,
        reverse_bytes: varint(reader)?,
        base: hash(reader)?,
        result: hash(reader)?,
    };
    if codec != Codec::Steps && frame.reverse_bytes != 0 {
        return Err(malformed("planes have no reverse data"));
    }
    Ok(frame)
}

fn read_file(reader: &mut Reader<'_>) -> Result<Entry<File>, Error> {
    let name = reader.name()?;
    let packed = match reader.u8()? {
        0 => return Ok(Entry { name, change: None }),
        1 => false,
        2 => true,
        other => return Err(Error::Malformed(format!("`{name}`: unknown change {other}"))),
    };
    let file = File {
        packed,
        size: reader.u64()?,
        stored: reader.u64()?,
        digest: reader.digest()?,
    };
    Ok(Entry {
        name,
        change: Some(file),
    })
}

fn hash(reader: &mut Reader<'_>) -> Result<u128, Error> {
    Ok(u128::from_le_bytes(reader.array()?))
}

fn push_varint(out: &mut Vec<u8>, mut value: u32) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn varint(reader: &mut Reader<'_>) -> Result<u32, Error> {
    let mut value = 0u64;
    for shift in (0..35).step_by(7) {
        let byte = reader.u8()?;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return u32::try_from(value).map_err(|_| malformed("a length is too large"));
        }
    }
    Err(malformed("a length is too large"))
}

/// The delta with its checksum recomputed, after a change.
#[cfg(any(test, feature = "fuzz"))]
pub(crate) fn resealed(mut delta: Vec<u8>) -> Vec<u8> {
    let length = delta.get(80..88).and_then(|length| length.first_chunk());
    let length = length.map_or(usize::MAX, |&length| u64::from_le_bytes(length) as usize);
    let index = delta.get(HEADER_BYTES..).and_then(|rest| rest.get(..length));
    let Some(index) = index else { return delta };
    let checksum = checksum(&delta[..CHECKED_BYTES], index);
    delta[CHECKED_BYTES..HEADER_BYTES].copy_from_slice(&checksum.0);
    delta
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_leb128_and_overlong_ones_are_refused() {
        let mut out = vec![];
        push_varint(&mut out, 300);
        assert_eq!(out, [0xac, 0x02]);
        push_varint(&mut out, u32::MAX);
        let mut reader = Reader(&out);
        assert_eq!(varint(&mut reader).unwrap(), 300);
        assert_eq!(varint(&mut reader).unwrap(), u32::MAX);
        assert!(varint(&mut Reader(&[0x80])).is_err());
        assert!(varint(&mut Reader(&[0xff; 5])).is_err());
        assert!(varint(&mut Reader(&[0x80; 6])).is_err());
    }
}
