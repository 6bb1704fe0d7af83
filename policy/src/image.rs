//! A checkpoint image: all bytes of one version, in memory and as one self-describing object.
//!
//! Canonical bytes are the tensors in Hugging Face coordinates in their declared dtypes, little-endian and row-major, and
//! the files that belong to the model. What the values mean is not known here; folders are `folder`'s.
//!
//! ```text
//! offset  size
//!      0     8  "SPTIMAGE"
//!      8     4  format version, 1
//!     12     4  zero
//!     16    32  root: BLAKE3 of the listing
//!     48     8  length of the listing
//!     56        the listing (see `listing`), then every tensor's and every file's bytes in the listing's order, each
//!               starting at the next multiple of 64 from the start of the object, the gap filled with zeros
//! ```
//! Integers are little-endian. The object ends with the last byte of the last entry.

use std::collections::BTreeMap;
use std::path::Path;

use bytes::Bytes;
use safetensors::Dtype;

use crate::delta;
use crate::digest::{Digest, Hashed};
use crate::kernel::Threads;
use crate::listing::{self, Listing, Reader};
use crate::memory;

const MAGIC: &[u8; 8] = b"SPTIMAGE";
const FORMAT_VERSION: u32 = 1;
/// Entries start at multiples of this, so that a mapped object can be read in place as any dtype.
const ALIGNMENT: usize = 64;

/// All bytes of one version. Cheap to clone: the bytes are shared.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Image {
    pub tensors: BTreeMap<String, TensorData>,
    /// `config.json`, `tokenizer.json`, … by file name.
    pub files: BTreeMap<String, Bytes>,
}

/// One tensor: row-major, little-endian, exactly `shape`'s product times the dtype's width in bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorData {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Hashed,
}

/// Why bytes or a folder are not an image.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the object is not an image: {0}")]
    Malformed(&'static str),
    #[error("image format version {0} is not known here; 1 is")]
    FormatVersion(u32),
    #[error("the image's listing: {0}")]
    Listing(#[from] listing::Error),
    #[error("`{0}`: the bytes do not match their digest")]
    Digest(String),
    #[error("{bytes} bytes do not make a tensor {dtype} {shape:?}")]
    Shape {
        dtype: Dtype,
        shape: Vec<usize>,
        bytes: usize,
    },
    #[error("{action} {path}")]
    Io {
        action: &'static str,
        path: String,
        source: std::io::Error,
    },
    #[error("{path}: {reason}")]
    Folder { path: String, reason: String },
}

impl TensorData {
    /// Refuses bytes whose number does not follow from `dtype` and `shape`.
    pub fn new(dtype: Dtype, shape: Vec<usize>, bytes: impl Into<Hashed>) -> Result<Self, Error> {
        let bytes = bytes.into();
        if bytes_of(dtype, &shape) != Some(bytes.len()) {
            return Err(Error::Shape {
                dtype,
                shape,
                bytes: bytes.len(),
            });
        }
        Ok(TensorData { dtype, shape, bytes })
    }

    /// Elements in the tensor: 1 for a scalar, 0 where a dimension is 0.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&d| d as u64).product()
    }
}

impl Image {
    /// Reads a Hugging Face folder: `model.safetensors`, or the shards that `model.safetensors.index.json` names, and the
    /// files in [`crate::folder::FILES`]. Other files are not part of a version and are left alone.
    pub fn read_dir(path: &Path) -> Result<Self, Error> {
        crate::folder::read(path)
    }

    /// Writes a folder that [`read_dir`](Self::read_dir) and Hugging Face's loaders read; creates it when it is missing.
    /// Every file appears whole or not at all. Weights over 5 GB are cut into shards.
    pub fn write_dir(&self, path: &Path) -> Result<(), Error> {
        self.write_shards(path, crate::folder::SHARD_BYTES_MAX)
    }

    /// [`write_dir`](Self::write_dir) with shards of at most `shard_bytes_max`; a larger tensor has one of its own.
    pub fn write_shards(&self, path: &Path, shard_bytes_max: u64) -> Result<(), Error> {
        crate::folder::write(self, path, shard_bytes_max)
    }

    /// The version's identity: the digest of its listing. Hashes every byte that has not been hashed yet.
    pub fn root(&self) -> Digest {
        Listing::of(self).root()
    }

    /// [`root`](Self::root), from the bytes alone.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn root_anew(&self) -> Digest {
        let mut image = self.clone();
        for tensor in image.tensors.values_mut() {
            tensor.bytes = Bytes::clone(&tensor.bytes).into();
        }
        image.root()
    }

    /// How the tensors of `other` differ in name, dtype or shape from these: one line each, in name order. Empty: a step
    /// could have led from one to the other.
    pub fn form_differences(&self, other: &Image) -> Vec<String> {
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

    /// Bytes of all tensors together, files not counted.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.values().map(|t| t.bytes.len() as u64).sum()
    }

    /// The image as one object.
    pub fn to_bytes(&self) -> Result<Bytes, Error> {
        let parts = self.to_pieces()?;
        let mut out = memory::room(parts.iter().map(Bytes::len).sum());
        parts.iter().for_each(|part| out.extend_from_slice(part));
        Ok(out.into())
    }

    /// The image as one object, in pieces one after another: the tensors and files themselves, and what stands between them.
    pub fn to_pieces(&self) -> Result<Vec<Bytes>, Error> {
        let listing = Listing::of(self);
        listing.check()?;
        let encoded = listing.to_bytes();
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

    /// Reads one image object and verifies every byte of it. The tensors share `object`'s memory.
    pub fn from_bytes(object: &Bytes) -> Result<Self, Error> {
        Ok(Self::from_bytes_rooted(object, &Threads::ONE)?.0)
    }

    /// [`from_bytes`](Self::from_bytes) on several threads, with the root that the image was found to have.
    pub(crate) fn from_bytes_rooted(object: &Bytes, threads: &Threads) -> Result<(Self, Digest), Error> {
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
        let length =
            usize::try_from(reader.u64().map_err(early)?).map_err(|_| Error::Malformed("its listing is too long"))?;
        let encoded = reader.take(length).map_err(early)?;
        if Digest::of(encoded) != root {
            return Err(Error::Digest("listing".into()));
        }
        let listing = Listing::from_bytes(encoded)?;

        let mut position = object.len() - reader.0.len();
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
        let mut image = Image::default();
        for tensor in &listing.tensors {
            let data = TensorData {
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                bytes: next(tensor.size)?.into(),
            };
            image.tensors.insert(tensor.name.clone(), data);
        }
        for file in &listing.files {
            image.files.insert(file.name.clone(), next(file.size)?);
        }
        if position != object.len() {
            return Err(Error::Malformed("it has bytes after its last entry"));
        }
        match delta::listing(&image, threads).difference(&listing) {
            None => Ok((image, root)),
            Some(name) => Err(Error::Digest(name.into())),
        }
    }
}

/// Bytes of a tensor; none when they overflow, or do not fill whole bytes (dtypes narrower than a byte).
pub(crate) fn bytes_of(dtype: Dtype, shape: &[usize]) -> Option<usize> {
    let bits = shape
        .iter()
        .try_fold(dtype.bitsize(), |bits, &dimension| bits.checked_mul(dimension))?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A small image with the awkward cases: a scalar, an empty tensor, a NaN with a payload, −0.0, half-byte elements.
    pub(crate) fn sample() -> Image {
        let bf16: Vec<u8> = [0x3f80u16, 0x8000, 0x7fc1, 0xff80, 0x0001, 0x0000]
            .iter()
            .flat_map(|bits| bits.to_le_bytes())
            .collect();
        let tensor = |dtype, shape, bytes: Vec<u8>| TensorData::new(dtype, shape, bytes).unwrap();
        Image {
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
        for image in [sample(), Image::default()] {
            let object = image.to_bytes().unwrap();
            let back = Image::from_bytes(&object).unwrap();
            assert_eq!(back, image);
            assert_eq!(back.root(), image.root());
            assert_eq!(back.to_bytes().unwrap(), object);
        }
    }

    #[test]
    fn every_flipped_byte_of_an_object_is_refused() {
        let object = sample().to_bytes().unwrap();
        for position in 0..object.len() {
            for flip in [0x01, 0x80, 0xff] {
                let mut broken = object.to_vec();
                broken[position] ^= flip;
                assert!(Image::from_bytes(&broken.into()).is_err(), "{position}");
            }
        }
    }

    #[test]
    fn every_truncation_and_extension_of_an_object_is_refused() {
        let object = sample().to_bytes().unwrap();
        for length in 0..object.len() {
            assert!(Image::from_bytes(&object.slice(..length)).is_err(), "{length}");
        }
        let longer = [&object[..], &[0]].concat();
        assert!(Image::from_bytes(&longer.into()).is_err());
    }

    #[test]
    fn another_format_version_is_refused_by_its_number() {
        let mut object = sample().to_bytes().unwrap().to_vec();
        object[8] = 9;
        let error = Image::from_bytes(&object.into()).unwrap_err();
        assert!(matches!(error, Error::FormatVersion(9)), "{error}");
    }

    #[test]
    fn the_root_changes_with_any_name_shape_dtype_byte_or_file() {
        let base = sample();
        let mut changed = vec![];
        let mut push = |change: &dyn Fn(&mut Image)| {
            let mut image = base.clone();
            change(&mut image);
            changed.push(image.root());
        };
        push(&|image| {
            let tensor = image.tensors.remove("a.weight").unwrap();
            image.tensors.insert("a.weights".into(), tensor);
        });
        push(&|image| image.tensors.get_mut("a.weight").unwrap().shape = vec![3, 2]);
        push(&|image| image.tensors.get_mut("a.weight").unwrap().dtype = Dtype::F16);
        push(&|image| image.tensors.get_mut("b.scalar").unwrap().bytes = vec![0; 4].into());
        push(&|image| image.tensors.get_mut("c.empty").unwrap().shape = vec![7, 0]);
        push(&|image| drop(image.files.insert("config.json".into(), "{}".into())));
        push(&|image| drop(image.files.remove("empty.txt")));
        changed.push(base.root());
        let distinct: std::collections::BTreeSet<_> = changed.iter().collect();
        assert_eq!(distinct.len(), changed.len());
    }

    #[test]
    fn bytes_that_do_not_fill_the_shape_are_refused() {
        assert!(TensorData::new(Dtype::BF16, vec![2, 2], vec![0; 7]).is_err());
        assert!(TensorData::new(Dtype::F4, vec![3], vec![0; 2]).is_err());
        assert!(TensorData::new(Dtype::U8, vec![usize::MAX, 2], vec![]).is_err());
        assert_eq!(TensorData::new(Dtype::F32, vec![], vec![0; 4]).unwrap().elements(), 1);
    }
}
