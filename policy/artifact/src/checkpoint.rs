//! A checkpoint: all bytes of one version, in memory or as one self-describing object.
//!
//! Canonical bytes are the tensors in Hugging Face coordinates in their declared dtypes,
//! little-endian and row-major, and the files that belong to the model. What the values mean is not
//! known here. Reading and writing model folders is in `folder`.
//!
//! ```text
//! offset  size
//!      0     8  "SPTIMAGE"
//!      8     4  format version, 1
//!     12     4  zero
//!     16    32  content hash: BLAKE3 of the content index
//!     48     8  length of the content index
//!     56        the content index (see `content_index`), then the bytes of every tensor and every file in its order,
//!               each starting at the next multiple of 64 from the start of the object, the gaps filled with zeros
//! ```
//! Integers are little-endian. The object ends with the last byte of the last entry.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;

use crate::content_index::{self, ContentIndex};
use crate::digest::{Digest, Hashed};
use crate::memory;
use crate::merkle;
use crate::tensor::{self, TensorData};
use crate::threads::Threads;
use crate::wire::Reader;

const MAGIC: &[u8; 8] = b"SPTIMAGE";
const FORMAT_VERSION: u32 = 1;
/// Entries start at multiples of this, so a mapped object can be read in place as any dtype.
const ALIGNMENT: usize = 64;

/// All bytes of one version. Clones share them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Checkpoint {
    /// By name.
    pub tensors: BTreeMap<String, TensorData>,
    /// `config.json`, `tokenizer.json`, … by file name.
    pub files: BTreeMap<String, Bytes>,
}

/// Why bytes or a folder are not a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the object is not a checkpoint: {0}")]
    Malformed(&'static str),
    #[error("unknown checkpoint format version {0}; this program reads version 1")]
    FormatVersion(u32),
    #[error("the checkpoint's content index: {0}")]
    ContentIndex(#[from] content_index::Error),
    #[error("`{0}`: the bytes do not match their digest")]
    Digest(String),
    #[error(transparent)]
    Tensor(#[from] tensor::WrongSize),
    #[error("{action} {path}")]
    Io {
        action: &'static str,
        path: String,
        source: std::io::Error,
    },
    #[error("{path}: {reason}")]
    Folder { path: String, reason: String },
}

impl Checkpoint {
    /// The version's content hash: the digest of its content index. Hashes every byte that has not
    /// been hashed yet.
    pub fn root(&self) -> Digest {
        self.root_on(&Threads::ONE)
    }

    /// [`root`](Self::root), with the tensors hashed on all threads.
    pub fn root_on(&self, threads: &Threads) -> Digest {
        self.content_index(threads).root()
    }

    /// Names, forms and digests of everything. Tensors that have not been hashed yet are hashed on
    /// all threads.
    pub(crate) fn content_index(&self, threads: &Threads) -> ContentIndex {
        let new = self.tensors.values().map(|tensor| &tensor.bytes);
        let new: Vec<&Hashed> = new.filter(|bytes| bytes.digest_if_known().is_none()).collect();
        let bytes: Vec<&[u8]> = new.iter().map(|bytes| &bytes[..]).collect();
        for (bytes, digest) in new.iter().zip(merkle::digests(&bytes, threads)) {
            bytes.note(digest);
        }
        let tensor = |(name, tensor): (&String, &TensorData)| content_index::Tensor {
            name: name.clone(),
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            size: tensor.bytes.len() as u64,
            digest: tensor.bytes.digest(),
        };
        ContentIndex {
            tensors: self.tensors.iter().map(tensor).collect(),
            files: content_index::files(&self.files),
        }
    }

    /// [`root`](Self::root), with all bytes hashed again.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn root_anew(&self) -> Digest {
        let mut checkpoint = self.clone();
        for tensor in checkpoint.tensors.values_mut() {
            tensor.bytes = Bytes::clone(&tensor.bytes).into();
        }
        checkpoint.root()
    }

    /// How `other`'s tensors differ from these in name, dtype or shape: one line each, by name.
    /// Empty if a training step can lead from one to the other.
    pub fn form_differences(&self, other: &Checkpoint) -> Vec<String> {
        let form = |tensor: &TensorData| format!("{} {:?}", tensor.dtype, tensor.shape);
        let names: std::collections::BTreeSet<&String> = self.tensors.keys().chain(other.tensors.keys()).collect();
        let differs = |name: &String| match (self.tensors.get(name), other.tensors.get(name)) {
            (Some(_), None) => Some(format!("`{name}` is missing")),
            (None, Some(new)) => Some(format!("`{name}` {} is new", form(new))),
            (Some(old), Some(new)) if form(old) != form(new) => {
                Some(format!("`{name}` is {}, not {}", form(new), form(old)))
            }
            _ => None,
        };
        names.into_iter().filter_map(differs).collect()
    }

    /// Bytes of all tensors, without files.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.values().map(|t| t.bytes.len() as u64).sum()
    }

    /// The checkpoint as one object.
    pub fn to_bytes(&self) -> Result<Bytes, Error> {
        let parts = self.to_pieces()?;
        let mut out = memory::room(parts.iter().map(Bytes::len).sum());
        parts.iter().for_each(|part| out.extend_from_slice(part));
        Ok(out.into())
    }

    /// The checkpoint as one object, in consecutive pieces that share the memory of tensors and
    /// files.
    pub fn to_pieces(&self) -> Result<Vec<Bytes>, Error> {
        let index = self.content_index(&Threads::ONE);
        index.check()?;
        let encoded = index.to_bytes();
        let mut head = Vec::with_capacity(56 + encoded.len());
        head.extend(MAGIC);
        head.extend(FORMAT_VERSION.to_le_bytes());
        head.extend([0; 4]);
        head.extend(Digest::of(&encoded).0);
        head.extend((encoded.len() as u64).to_le_bytes());
        head.extend(encoded);
        let mut position = head.len();
        let mut parts = vec![head.into()];
        let tensors = self.tensors.values().map(|tensor| &*tensor.bytes);
        for bytes in tensors.chain(self.files.values()) {
            let gap = position.next_multiple_of(ALIGNMENT) - position;
            parts.push(Bytes::from_static(&[0; ALIGNMENT]).slice(..gap));
            parts.push(bytes.clone());
            position += gap + bytes.len();
        }
        Ok(parts)
    }

    /// Reads one object and verifies every byte. The tensors share `object`'s memory.
    pub fn from_bytes(object: &Bytes) -> Result<Self, Error> {
        Ok(Self::from_bytes_on(object, &Threads::ONE)?.0)
    }

    /// [`from_bytes`](Self::from_bytes) on all threads. Also returns the verified content hash.
    pub fn from_bytes_on(object: &Bytes, threads: &Threads) -> Result<(Self, Digest), Error> {
        let header = Header::from_bytes(object)?;
        let root = header.root;
        let mut position = usize::try_from(header.index.end)
            .ok()
            .filter(|&end| end <= object.len())
            .ok_or(Error::Malformed("it ends early"))?;
        let index = header.index_of(&object[HEADER_BYTES..position])?;

        let mut next = |size: u64| -> Result<Bytes, Error> {
            let start = position.next_multiple_of(ALIGNMENT);
            let end = usize::try_from(size)
                .ok()
                .and_then(|size| start.checked_add(size))
                .filter(|&end| end <= object.len())
                .ok_or(Error::Malformed("it ends early"))?;
            if object[position..start].iter().any(|&byte| byte != 0) {
                return Err(Error::Malformed("a gap is not zero"));
            }
            position = end;
            Ok(object.slice(start..end))
        };
        let mut checkpoint = Checkpoint::default();
        for tensor in &index.tensors {
            let data = TensorData {
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                bytes: next(tensor.size)?.into(),
            };
            checkpoint.tensors.insert(tensor.name.clone(), data);
        }
        for file in &index.files {
            checkpoint.files.insert(file.name.clone(), next(file.size)?);
        }
        if position != object.len() {
            return Err(Error::Malformed("it has bytes after its last entry"));
        }
        match checkpoint.content_index(threads).difference(&index) {
            None => Ok((checkpoint, root)),
            Some(name) => Err(Error::Digest(name.into())),
        }
    }
}

/// Bytes at the beginning of an object that say where its content index is.
pub const HEADER_BYTES: usize = 56;

/// The beginning of a checkpoint's object. With it, a reader finds the object's files without its tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The version's content hash.
    pub root: Digest,
    /// Where the content index lies in the object.
    pub index: Range<u64>,
}

/// What a version consists of: names, forms and digests, without the bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct Contents(pub(crate) ContentIndex);

impl Contents {
    /// The version's content hash.
    pub fn root(&self) -> Digest {
        self.0.root()
    }
}

/// Where a file lies in a checkpoint's object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePlace {
    pub range: Range<u64>,
    /// Of the file's bytes.
    pub digest: Digest,
}

impl Header {
    /// Reads the first [`HEADER_BYTES`] of `object`.
    pub fn from_bytes(object: &[u8]) -> Result<Self, Error> {
        let early = |_| Error::Malformed("it ends early");
        let mut reader = Reader(object);
        if reader.take(8).map_err(early)? != MAGIC {
            return Err(Error::Malformed("it does not start with its magic"));
        }
        match reader.u32().map_err(early)? {
            FORMAT_VERSION => {}
            other => return Err(Error::FormatVersion(other)),
        }
        if reader.u32().map_err(early)? != 0 {
            return Err(Error::Malformed("a reserved field is not zero"));
        }
        let root = reader.digest().map_err(early)?;
        let begin = HEADER_BYTES as u64;
        let end = begin.checked_add(reader.u64().map_err(early)?);
        let end = end.ok_or(Error::Malformed("its content index is too long"))?;
        Ok(Header {
            root,
            index: begin..end,
        })
    }

    /// Reads the bytes of the content index, and verifies them.
    fn index_of(&self, encoded: &[u8]) -> Result<ContentIndex, Error> {
        if Digest::of(encoded) != self.root {
            return Err(Error::Digest("content index".into()));
        }
        Ok(ContentIndex::from_bytes(encoded)?)
    }

    /// What the version consists of, from the bytes of the content index, which are verified.
    pub fn contents(&self, encoded: &[u8]) -> Result<Contents, Error> {
        self.index_of(encoded).map(Contents)
    }

    /// Where each file lies, from the verified bytes of the content index.
    pub fn files(&self, encoded: &[u8]) -> Result<BTreeMap<String, FilePlace>, Error> {
        let index = self.index_of(encoded)?;
        let too_large = || Error::Malformed("its entries are too large");
        let mut position = self.index.end;
        let mut next = |size: u64| -> Result<Range<u64>, Error> {
            let start = position
                .checked_next_multiple_of(ALIGNMENT as u64)
                .ok_or_else(too_large)?;
            position = start.checked_add(size).ok_or_else(too_large)?;
            Ok(start..position)
        };
        for tensor in &index.tensors {
            next(tensor.size)?;
        }
        let place = |file: content_index::File| {
            let range = next(file.size)?;
            Ok((
                file.name,
                FilePlace {
                    range,
                    digest: file.digest,
                },
            ))
        };
        index.files.into_iter().map(place).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use safetensors::Dtype;

    /// A small checkpoint with edge cases: a scalar, an empty tensor, a NaN with a payload, −0.0,
    /// half-byte elements.
    pub(crate) fn sample() -> Checkpoint {
        let bf16: Vec<u8> = [0x3f80u16, 0x8000, 0x7fc1, 0xff80, 0x0001, 0x0000]
            .iter()
            .flat_map(|bits| bits.to_le_bytes())
            .collect();
        let tensor = |dtype, shape, bytes: Vec<u8>| TensorData::new(dtype, shape, bytes).unwrap();
        Checkpoint {
            tensors: [
                ("a.weight".into(), tensor(Dtype::BF16, vec![2, 3], bf16)),
                (
                    "b.scalar".into(),
                    tensor(Dtype::F32, vec![], (-0.0f32).to_le_bytes().to_vec()),
                ),
                ("c.empty".into(), tensor(Dtype::I64, vec![0, 7], vec![])),
                ("d.codes".into(), tensor(Dtype::F4, vec![2, 3], vec![0x12, 0x34, 0x56])),
            ]
            .into(),
            files: [
                ("config.json".into(), Bytes::from_static(b"{}\n")),
                ("empty.txt".into(), Bytes::new()),
            ]
            .into(),
        }
    }

    #[test]
    fn an_object_is_read_back_bit_for_bit() {
        for checkpoint in [sample(), Checkpoint::default()] {
            let object = checkpoint.to_bytes().unwrap();
            let back = Checkpoint::from_bytes(&object).unwrap();
            assert_eq!(back, checkpoint);
            assert_eq!(back.root(), checkpoint.root());
            assert_eq!(back.to_bytes().unwrap(), object);
        }
    }

    #[test]
    fn files_are_found_without_reading_tensors() {
        let checkpoint = sample();
        let object = checkpoint.to_bytes().unwrap();
        let header = Header::from_bytes(&object[..HEADER_BYTES]).unwrap();
        assert_eq!(header.root, checkpoint.root());
        let of = |range: &Range<u64>| &object[range.start as usize..range.end as usize];
        let places = header.files(of(&header.index)).unwrap();
        assert_eq!(places.len(), checkpoint.files.len());
        for (name, place) in &places {
            assert_eq!(of(&place.range), &checkpoint.files[name][..], "{name}");
            assert_eq!(place.digest, Digest::of(&checkpoint.files[name]));
        }
        let mut broken = of(&header.index).to_vec();
        broken[20] ^= 1;
        assert!(matches!(header.files(&broken), Err(Error::Digest(_))));
        assert!(Header::from_bytes(&object[..HEADER_BYTES - 1]).is_err());
    }

    #[test]
    fn every_flipped_byte_of_an_object_is_refused() {
        let object = sample().to_bytes().unwrap();
        for position in 0..object.len() {
            for flip in [0x01, 0x80, 0xff] {
                let mut broken = object.to_vec();
                broken[position] ^= flip;
                assert!(Checkpoint::from_bytes(&broken.into()).is_err(), "{position}");
            }
        }
    }

    #[test]
    fn every_truncation_and_extension_of_an_object_is_refused() {
        let object = sample().to_bytes().unwrap();
        for length in 0..object.len() {
            assert!(Checkpoint::from_bytes(&object.slice(..length)).is_err(), "{length}");
        }
        let longer = [&object[..], &[0]].concat();
        assert!(Checkpoint::from_bytes(&longer.into()).is_err());
    }

    #[test]
    fn another_format_version_is_refused_by_its_number() {
        let mut object = sample().to_bytes().unwrap().to_vec();
        object[8] = 9;
        let error = Checkpoint::from_bytes(&object.into()).unwrap_err();
        assert!(matches!(error, Error::FormatVersion(9)), "{error}");
    }

    #[test]
    fn the_content_hash_changes_with_any_name_shape_dtype_byte_or_file() {
        let base = sample();
        let mut changed = vec![];
        let mut push = |change: &dyn Fn(&mut Checkpoint)| {
            let mut checkpoint = base.clone();
            change(&mut checkpoint);
            changed.push(checkpoint.root());
        };
        push(&|checkpoint| {
            let tensor = checkpoint.tensors.remove("a.weight").unwrap();
            checkpoint.tensors.insert("a.weights".into(), tensor);
        });
        push(&|checkpoint| checkpoint.tensors.get_mut("a.weight").unwrap().shape = vec![3, 2]);
        push(&|checkpoint| checkpoint.tensors.get_mut("a.weight").unwrap().dtype = Dtype::F16);
        push(&|checkpoint| checkpoint.tensors.get_mut("b.scalar").unwrap().bytes = vec![0; 4].into());
        push(&|checkpoint| checkpoint.tensors.get_mut("c.empty").unwrap().shape = vec![7, 0]);
        push(&|checkpoint| drop(checkpoint.files.insert("config.json".into(), "{}".into())));
        push(&|checkpoint| drop(checkpoint.files.remove("empty.txt")));
        changed.push(base.root());
        let distinct: std::collections::BTreeSet<_> = changed.iter().collect();
        assert_eq!(distinct.len(), changed.len());
    }
}
