//! The canonical listing of a version: every tensor and file with its size and digest. Its own digest is the root.
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
//! Integers are little-endian. There is exactly one encoding of a version, so equal roots mean equal versions. The listing
//! says nothing of how or where the bytes are stored.

use std::collections::BTreeMap;

use bytes::Bytes;
use safetensors::Dtype;

use crate::digest::Digest;
use crate::image::{Image, bytes_of};

const MAGIC: &[u8; 8] = b"SPTLIST1";

/// One tensor of a listing.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub size: u64,
    pub digest: Digest,
}

/// One file of a listing.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct File {
    pub name: String,
    pub size: u64,
    pub digest: Digest,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Listing {
    /// Ascending by name, no name twice.
    pub tensors: Vec<Tensor>,
    /// Ascending by name, no name twice.
    pub files: Vec<File>,
}

/// Why bytes are not a listing.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    #[error("the listing does not start with its magic")]
    Magic,
    #[error("the listing ends early")]
    Truncated,
    #[error("the listing has {0} bytes too many")]
    TrailingBytes(usize),
    #[error("a name is not UTF-8")]
    NotUtf8,
    #[error("`{0}` is out of order, or there twice")]
    Order(String),
    #[error("unknown dtype `{0}`")]
    Dtype(String),
    #[error("a dimension does not fit this machine")]
    Dimension,
    #[error("`{0}`: the size does not follow from dtype and shape")]
    Size(String),
    #[error("`{0}` does not fit the listing's fields (name ≤ 65535 bytes, rank ≤ 255)")]
    TooLarge(String),
}

impl Listing {
    /// Hashes the files of `image`, and every tensor that has not been hashed yet.
    pub fn of(image: &Image) -> Self {
        Listing {
            tensors: image
                .tensors
                .iter()
                .map(|(name, tensor)| Tensor {
                    name: name.clone(),
                    dtype: tensor.dtype,
                    shape: tensor.shape.clone(),
                    size: tensor.bytes.len() as u64,
                    digest: tensor.bytes.digest(),
                })
                .collect(),
            files: files(&image.files),
        }
    }

    /// The first entry whose digest is another than in `other`, which has the same names.
    pub(crate) fn difference<'a>(&'a self, other: &Listing) -> Option<&'a str> {
        let tensors = self.tensors.iter().zip(&other.tensors);
        let tensor = tensors.filter(|(a, b)| a.digest != b.digest).map(|(a, _)| &a.name);
        let files = self.files.iter().zip(&other.files);
        let file = files.filter(|(a, b)| a.digest != b.digest).map(|(a, _)| &a.name);
        tensor.chain(file).map(String::as_str).next()
    }

    pub fn root(&self) -> Digest {
        Digest::of(&self.to_bytes())
    }

    /// Names longer than 65535 bytes and ranks over 255 cannot be expressed: they are cut here, and refused by
    /// [`check`](Self::check), which every writer calls.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend((self.tensors.len() as u32).to_le_bytes());
        for tensor in &self.tensors {
            push_name(&mut out, &tensor.name);
            push_dtype(&mut out, tensor.dtype);
            out.push(tensor.shape.len() as u8);
            for &dimension in &tensor.shape {
                out.extend((dimension as u64).to_le_bytes());
            }
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

    /// Refuses what the fields cannot express, and tensors whose bytes do not follow from dtype and shape.
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

    /// Reads exactly one listing; anything that [`to_bytes`](Self::to_bytes) could not have written is refused.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader(bytes);
        if reader.take(8)? != MAGIC {
            return Err(Error::Magic);
        }
        let mut listing = Listing::default();
        // no capacity is reserved from a count that the bytes may not cover
        for _ in 0..reader.u32()? {
            let name = reader.name()?;
            listing.tensors.push(Tensor {
                dtype: reader.dtype()?,
                shape: reader.shape()?,
                size: reader.u64()?,
                digest: reader.digest()?,
                name,
            });
        }
        for _ in 0..reader.u32()? {
            listing.files.push(File {
                name: reader.name()?,
                size: reader.u64()?,
                digest: reader.digest()?,
            });
        }
        if !reader.0.is_empty() {
            return Err(Error::TrailingBytes(reader.0.len()));
        }
        ascending(listing.tensors.iter().map(|t| t.name.as_str()))?;
        ascending(listing.files.iter().map(|f| f.name.as_str()))?;
        listing.check()?;
        Ok(listing)
    }
}

/// Files as they are listed.
pub(crate) fn files(files: &BTreeMap<String, Bytes>) -> Vec<File> {
    let file = |(name, bytes): (&String, &Bytes)| File {
        name: name.clone(),
        size: bytes.len() as u64,
        digest: Digest::of(bytes),
    };
    files.iter().map(file).collect()
}

/// Refuses names that do not rise: an order of their own, or one twice.
pub(crate) fn ascending<'a>(names: impl Iterator<Item = &'a str>) -> Result<(), Error> {
    let mut last: Option<&str> = None;
    for name in names {
        if last.is_some_and(|last| last >= name) {
            return Err(Error::Order(name.into()));
        }
        last = Some(name);
    }
    Ok(())
}

pub(crate) fn push_name(out: &mut Vec<u8>, name: &str) {
    let bytes = &name.as_bytes()[..name.len().min(0xffff)];
    out.extend((bytes.len() as u16).to_le_bytes());
    out.extend(bytes);
}

pub(crate) fn push_dtype(out: &mut Vec<u8>, dtype: Dtype) {
    let name = dtype.to_string();
    out.push(name.len() as u8);
    out.extend(name.as_bytes());
}

/// Takes fields off the front of a slice; every length is checked against what is left.
pub(crate) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn take(&mut self, n: usize) -> Result<&'a [u8], Error> {
        let (head, tail) = self.0.split_at_checked(n).ok_or(Error::Truncated)?;
        self.0 = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let (head, tail) = self.0.split_first_chunk().ok_or(Error::Truncated)?;
        self.0 = tail;
        Ok(*head)
    }

    pub fn u8(&mut self) -> Result<u8, Error> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub fn u32(&mut self) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub fn digest(&mut self) -> Result<Digest, Error> {
        Ok(Digest(self.array()?))
    }

    pub fn name(&mut self) -> Result<String, Error> {
        let length = u16::from_le_bytes(self.array()?);
        let bytes = self.take(length.into())?;
        String::from_utf8(bytes.to_vec()).map_err(|_| Error::NotUtf8)
    }

    pub fn dtype(&mut self) -> Result<Dtype, Error> {
        let length = self.u8()?;
        let name = String::from_utf8_lossy(self.take(length.into())?).into_owned();
        // safetensors names its dtypes in its own serde form; there is no other parser of them
        serde_json::from_value(serde_json::Value::String(name.clone())).map_err(|_| Error::Dtype(name))
    }

    pub fn shape(&mut self) -> Result<Vec<usize>, Error> {
        (0..self.u8()?)
            .map(|_| usize::try_from(self.u64()?).map_err(|_| Error::Dimension))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::tests::sample;

    #[test]
    fn what_is_written_is_read_back() {
        let listing = Listing::of(&sample());
        assert_eq!(Listing::from_bytes(&listing.to_bytes()), Ok(listing));
    }

    #[test]
    fn the_bytes_are_those_of_the_documented_layout() {
        let image = Image {
            tensors: [(
                "w".to_string(),
                crate::image::TensorData::new(Dtype::U8, vec![3], vec![1, 2, 3]).unwrap(),
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
        assert_eq!(Listing::of(&image).to_bytes(), expected);
        assert_eq!(image.root(), Digest::of(&expected));
    }

    #[test]
    fn every_truncation_is_refused() {
        let bytes = Listing::of(&sample()).to_bytes();
        for length in 0..bytes.len() {
            assert!(Listing::from_bytes(&bytes[..length]).is_err(), "{length}");
        }
    }

    #[test]
    fn disorder_duplicates_wrong_sizes_and_trailing_bytes_are_refused() {
        let good = Listing::of(&sample());
        let mut swapped = good.clone();
        swapped.tensors.swap(0, 1);
        assert!(matches!(Listing::from_bytes(&swapped.to_bytes()), Err(Error::Order(_))));
        let mut twice = good.clone();
        twice.files.push(twice.files[0].clone());
        assert!(matches!(Listing::from_bytes(&twice.to_bytes()), Err(Error::Order(_))));
        let mut size = good.clone();
        size.tensors[0].size += 1;
        assert!(matches!(Listing::from_bytes(&size.to_bytes()), Err(Error::Size(_))));
        let mut bytes = good.to_bytes();
        bytes.push(0);
        assert_eq!(Listing::from_bytes(&bytes), Err(Error::TrailingBytes(1)));
    }

    #[test]
    fn a_shape_whose_product_overflows_is_refused() {
        let mut listing = Listing::of(&sample());
        listing.tensors[0].shape = vec![usize::MAX, usize::MAX];
        assert!(matches!(Listing::from_bytes(&listing.to_bytes()), Err(Error::Size(_))));
    }
}
