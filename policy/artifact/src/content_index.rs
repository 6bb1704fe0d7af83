//! The content index of a version: every tensor and file with its size and digest. Its own digest
//! is the version's content hash.
//!
//! ```text
//! "SPTLIST1"                                                      8 bytes
//! tensors: count u32, then each, by name in ascending byte order:
//!     name: length u16, UTF-8 bytes
//!     dtype: length u8, ASCII name as in safetensors ("BF16")
//!     shape: rank u8, then each dimension u64
//!     size of the bytes: u64
//!     BLAKE3 of the bytes: 32 bytes
//! files: count u32, then each, by name in ascending byte order:
//!     name: length u16, UTF-8 bytes
//!     size: u64
//!     BLAKE3: 32 bytes
//! ```
//! Integers are little-endian. A version has exactly one encoding, so equal hashes mean equal
//! versions. The index does not say how or where the bytes are stored.

use std::collections::BTreeMap;

use bytes::Bytes;
use safetensors::Dtype;

use crate::digest::Digest;
use crate::tensor::bytes_of;
use crate::wire::{self, Reader, ascending, push_dtype, push_name, push_shape};

const MAGIC: &[u8; 8] = b"SPTLIST1";

/// A tensor's entry.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub size: u64,
    pub digest: Digest,
}

/// A file's entry.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct File {
    pub name: String,
    pub size: u64,
    pub digest: Digest,
}

/// What a version consists of.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct ContentIndex {
    /// Ascending by name, no name twice.
    pub tensors: Vec<Tensor>,
    /// Ascending by name, no name twice.
    pub files: Vec<File>,
}

/// Why bytes are not a content index.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    #[error("the content index does not start with its magic")]
    Magic,
    #[error("the content index has {0} bytes too many")]
    TrailingBytes(usize),
    #[error(transparent)]
    Field(#[from] wire::Error),
    #[error("`{0}`: the size does not follow from dtype and shape")]
    Size(String),
    #[error("`{0}` does not fit the fields of the content index (name ≤ 65535 bytes, rank ≤ 255)")]
    TooLarge(String),
}

impl ContentIndex {
    /// The first entry whose digest differs from `other`, which has the same names.
    pub fn difference<'a>(&'a self, other: &ContentIndex) -> Option<&'a str> {
        let tensors = self.tensors.iter().zip(&other.tensors);
        let tensor = tensors.filter(|(a, b)| a.digest != b.digest).map(|(a, _)| &a.name);
        let files = self.files.iter().zip(&other.files);
        let file = files.filter(|(a, b)| a.digest != b.digest).map(|(a, _)| &a.name);
        tensor.chain(file).map(String::as_str).next()
    }

    /// The version's content hash.
    pub fn root(&self) -> Digest {
        Digest::of(&self.to_bytes())
    }

    /// The encoding. Names over 65535 bytes and ranks over 255 are cut; [`check`](Self::check),
    /// which every writer calls, refuses them.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend((self.tensors.len() as u32).to_le_bytes());
        for tensor in &self.tensors {
            push_name(&mut out, &tensor.name);
            push_dtype(&mut out, tensor.dtype);
            push_shape(&mut out, &tensor.shape);
            out.extend(tensor.size.to_le_bytes());
            out.extend(tensor.digest.0);
        }
        out.extend((self.files.len() as u32).to_le_bytes());
        for file in &self.files {
            push_name(&mut out, &file.name);
            out.extend(file.size.to_le_bytes());
            out.extend(file.digest.0);
        }
        out
    }

    /// Returns an error if a field is too small for its value, or a tensor's size does not follow
    /// from dtype and shape.
    pub fn check(&self) -> Result<(), Error> {
        let too_large = |name: &str, rank: usize| name.len() > 0xffff || rank > 0xff;
        for tensor in &self.tensors {
            if too_large(&tensor.name, tensor.shape.len()) {
                return Err(Error::TooLarge(tensor.name.clone()));
            }
            if bytes_of(tensor.dtype, &tensor.shape).map(|n| n as u64) != Some(tensor.size) {
                return Err(Error::Size(tensor.name.clone()));
            }
        }
        match self.files.iter().find(|file| too_large(&file.name, 0)) {
            Some(file) => Err(Error::TooLarge(file.name.clone())),
            None => Ok(()),
        }
    }

    /// Reads exactly one content index. Refuses everything that [`to_bytes`](Self::to_bytes) does
    /// not write.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader(bytes);
        if reader.take(8)? != MAGIC {
            return Err(Error::Magic);
        }
        let mut index = ContentIndex::default();
        // no capacity is reserved from a count that the bytes may not cover
        for _ in 0..reader.u32()? {
            let name = reader.name()?;
            index.tensors.push(Tensor {
                dtype: reader.dtype()?,
                shape: reader.shape()?,
                size: reader.u64()?,
                digest: reader.digest()?,
                name,
            });
        }
        for _ in 0..reader.u32()? {
            index.files.push(File {
                name: reader.name()?,
                size: reader.u64()?,
                digest: reader.digest()?,
            });
        }
        if !reader.0.is_empty() {
            return Err(Error::TrailingBytes(reader.0.len()));
        }
        ascending(index.tensors.iter().map(|t| t.name.as_str()))?;
        ascending(index.files.iter().map(|f| f.name.as_str()))?;
        index.check()?;
        Ok(index)
    }
}

/// Entries of files.
pub(crate) fn files(files: &BTreeMap<String, Bytes>) -> Vec<File> {
    let file = |(name, bytes): (&String, &Bytes)| File {
        name: name.clone(),
        size: bytes.len() as u64,
        digest: Digest::of(bytes),
    };
    files.iter().map(file).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{Checkpoint, tests::sample};
    use crate::threads::Threads;

    #[test]
    fn what_is_written_is_read_back() {
        let index = sample().content_index(&Threads::ONE);
        assert_eq!(ContentIndex::from_bytes(&index.to_bytes()), Ok(index));
    }

    #[test]
    fn the_bytes_are_those_of_the_documented_layout() {
        let checkpoint = Checkpoint {
            tensors: [(
                "w".to_string(),
                crate::tensor::TensorData::new(Dtype::U8, vec![3], vec![1, 2, 3]).unwrap(),
            )]
            .into(),
            files: [("f".to_string(), bytes::Bytes::from_static(b"x"))].into(),
        };
        let expected = [
            b"SPTLIST1".as_slice(),
            &[1, 0, 0, 0, 1, 0, b'w', 2, b'U', b'8', 1, 3, 0, 0, 0, 0, 0, 0, 0],
            &[3, 0, 0, 0, 0, 0, 0, 0],
            blake3::hash(&[1, 2, 3]).as_bytes(),
            &[1, 0, 0, 0, 1, 0, b'f', 1, 0, 0, 0, 0, 0, 0, 0],
            blake3::hash(b"x").as_bytes(),
        ]
        .concat();
        assert_eq!(checkpoint.content_index(&Threads::ONE).to_bytes(), expected);
        assert_eq!(checkpoint.root(), Digest::of(&expected));
    }

    #[test]
    fn every_truncation_is_refused() {
        let bytes = sample().content_index(&Threads::ONE).to_bytes();
        for length in 0..bytes.len() {
            assert!(ContentIndex::from_bytes(&bytes[..length]).is_err(), "{length}");
        }
    }

    #[test]
    fn disorder_duplicates_wrong_sizes_and_trailing_bytes_are_refused() {
        let good = sample().content_index(&Threads::ONE);
        let mut swapped = good.clone();
        swapped.tensors.swap(0, 1);
        assert!(matches!(
            ContentIndex::from_bytes(&swapped.to_bytes()),
            Err(Error::Field(wire::Error::Order(_)))
        ));
        let mut twice = good.clone();
        twice.files.push(twice.files[0].clone());
        assert!(matches!(
            ContentIndex::from_bytes(&twice.to_bytes()),
            Err(Error::Field(wire::Error::Order(_)))
        ));
        let mut size = good.clone();
        size.tensors[0].size += 1;
        assert!(matches!(
            ContentIndex::from_bytes(&size.to_bytes()),
            Err(Error::Size(_))
        ));
        let mut bytes = good.to_bytes();
        bytes.push(0);
        assert_eq!(ContentIndex::from_bytes(&bytes), Err(Error::TrailingBytes(1)));
    }

    #[test]
    fn a_shape_whose_product_overflows_is_refused() {
        let mut index = sample().content_index(&Threads::ONE);
        index.tensors[0].shape = vec![usize::MAX, usize::MAX];
        assert!(matches!(
            ContentIndex::from_bytes(&index.to_bytes()),
            Err(Error::Size(_))
        ));
    }
}
