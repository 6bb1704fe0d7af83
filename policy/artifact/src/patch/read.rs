//! Reads a patch and checks all of it before anything is returned.

use std::collections::BTreeMap;

use bytes::Bytes;
use safetensors::{Dtype, SafeTensors};

use super::{FORMAT, NO_DIGEST, digest_place};
use crate::digest::Digest;
use crate::tensor::{TensorData, weight_bytes};

/// A patch that was read. Its tensors share the file's memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Contents {
    /// Content hash of the version that it applies to.
    pub from: Digest,
    /// Content hash of the version that it makes.
    pub to: Digest,
    /// By name. Tensors that stay as they are are absent.
    pub tensors: BTreeMap<String, Changes>,
}

/// The weights of one tensor that change.
#[derive(Debug, Clone, PartialEq)]
pub struct Changes {
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// U32 `[k]`: the flat index of the first one, then the gap to the next. All lie in the shape.
    gaps: TensorData,
    /// What is there now: `[k]`, in the dtype of the whole tensor.
    pub values: TensorData,
}

/// Why a file is not a patch.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    #[error("it is no safetensors file ({0}): it is still being written, was cut off, or is something else")]
    Safetensors(#[from] safetensors::SafeTensorError),
    #[error("its format is {found:?}, and this program reads \"{FORMAT}\": use the same release on both sides")]
    Format { found: Option<String> },
    #[error("its metadata: {0}")]
    Metadata(String),
    #[error("its bytes do not match their digest: it was damaged, or written while it was read")]
    Digest,
    #[error("`{name}`: {reason}")]
    Tensor { name: String, reason: &'static str },
}

impl Contents {
    /// Reads and checks a file. Of the versions it knows no more than their names: the caller
    /// compares `from` with what it holds.
    pub fn from_bytes(file: &Bytes) -> Result<Self, Refused> {
        let read = SafeTensors::deserialize(file)?;
        let (_, header) = SafeTensors::read_metadata(file)?;
        let mut metadata = header.metadata().clone().unwrap_or_default();
        match metadata.remove("format") {
            Some(format) if format == FORMAT => {}
            found => return Err(Refused::Format { found }),
        }
        let mut take = |key: &str| {
            let value = metadata.remove(key);
            value.ok_or_else(|| Refused::Metadata(format!("`{key}` is missing")))
        };
        check_digest(file, &take("digest")?)?;
        let digest = |text: String| text.parse().map_err(|error| Refused::Metadata(format!("{error}")));
        let (from, to, shapes) = (digest(take("from")?)?, digest(take("to")?)?, take("shapes")?);
        let shapes: BTreeMap<String, Vec<usize>> =
            serde_json::from_str(&shapes).map_err(|error| Refused::Metadata(format!("`shapes`: {error}")))?;
        // it would be a key of another release, or one that was damaged
        if let Some(key) = metadata.keys().next() {
            return Err(Refused::Metadata(format!("`{key}` is unknown")));
        }
        let tensor = |name: &str| -> Result<TensorData, Refused> {
            let view = read.tensor(name)?;
            let bytes = file.slice_ref(view.data());
            TensorData::new(view.dtype(), view.shape().to_vec(), bytes).map_err(|_| Refused::Tensor {
                name: name.into(),
                reason: "its bytes do not fill its shape",
            })
        };
        let mut tensors = BTreeMap::new();
        for (name, shape) in shapes {
            let changes = Changes {
                shape,
                gaps: tensor(&format!("{name}|g"))?,
                values: tensor(&format!("{name}|v"))?,
            };
            if let Err(reason) = changes.check() {
                return Err(Refused::Tensor { name, reason });
            }
            tensors.insert(name, changes);
        }
        if read.len() != 2 * tensors.len() {
            return Err(Refused::Metadata(
                "`shapes` does not name every tensor of the file".into(),
            ));
        }
        Ok(Contents { from, to, tensors })
    }

    /// Weights that it changes.
    pub fn weights(&self) -> u64 {
        self.tensors.values().map(|changes| changes.values.elements()).sum()
    }
}

impl Changes {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.gaps.shape[0]
    }

    /// Where they are, flat, ascending.
    pub fn indices(&self) -> impl Iterator<Item = usize> {
        let gaps = self.gaps.bytes.as_chunks().0.iter();
        gaps.scan(0, |last, gap| {
            *last += u32::from_le_bytes(*gap) as usize;
            Some(*last)
        })
    }

    fn check(&self) -> Result<(), &'static str> {
        let (gaps, values) = (&self.gaps, &self.values);
        if gaps.dtype != Dtype::U32 || gaps.shape.len() != 1 {
            return Err("its gaps are not one row of U32");
        }
        let count = gaps.shape[0];
        // a byte counts as a weight where a weight is narrower
        if values.shape != gaps.shape || values.bytes.len() != count * weight_bytes(values.dtype) {
            return Err("it has not one value for each gap");
        }
        let size = self
            .shape
            .iter()
            .try_fold(1_usize, |size, &extent| size.checked_mul(extent));
        let size = size.filter(|&size| i64::try_from(size).is_ok());
        let size = size.ok_or("its shape is too large")?;
        let zero = |gap: &&[u8; 4]| **gap == [0; 4];
        if gaps.bytes.as_chunks().0.iter().skip(1).any(|gap| zero(&gap)) {
            return Err("it changes a weight twice");
        }
        match self.indices().last() {
            None => Err("it changes nothing"),
            Some(last) if last >= size => Err("an index is outside of its shape"),
            Some(_) => Ok(()),
        }
    }
}

fn check_digest(file: &[u8], digest: &str) -> Result<(), Refused> {
    let place = digest_place(file).ok_or(Refused::Digest)?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(&file[..place.start]);
    hasher.update(NO_DIGEST);
    hasher.update(&file[place.end..]);
    match digest.parse() == Ok(Digest(*hasher.finalize().as_bytes())) {
        true => Ok(()),
        false => Err(Refused::Digest),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::patch::between;
    use crate::patch::tests::checkpoint;
    use std::collections::HashMap;

    fn file() -> Bytes {
        let old = checkpoint(&[("a", &[1, 2, 3, 4]), ("b", &[5, 6]), ("c", &[7, 8])]);
        let new = checkpoint(&[("a", &[1, 9, 3, 8]), ("b", &[5, 6]), ("c", &[9, 8])]);
        between(&old, &new).unwrap().file.into()
    }

    type Change<'a> = &'a dyn Fn(&mut HashMap<String, String>, &mut Vec<u32>);

    /// A patch of the tensor `a` with the shape [2, 2], with a digest that fits.
    fn written(change: Change<'_>) -> Bytes {
        let hash = Digest::of(b"").to_string();
        let mut metadata: HashMap<String, String> = [
            ("format", FORMAT),
            ("from", &hash),
            ("to", &hash),
            ("shapes", r#"{"a":[2,2]}"#),
            ("digest", std::str::from_utf8(NO_DIGEST).unwrap()),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into();
        let mut gaps = vec![1, 2];
        change(&mut metadata, &mut gaps);
        let gaps: Vec<u8> = gaps.iter().flat_map(|gap| gap.to_le_bytes()).collect();
        let parts = [
            ("a|g", super::super::Part::new(Dtype::U32, gaps.len() / 4, gaps)),
            ("a|v", super::super::Part::new(Dtype::BF16, 2, vec![1, 2, 3, 4])),
        ];
        let mut file = safetensors::serialize(parts, Some(metadata)).unwrap();
        if let Some(place) = digest_place(&file) {
            let digest = Digest::of(&file).to_string();
            file[place].copy_from_slice(digest.as_bytes());
        }
        file.into()
    }

    #[test]
    fn a_patch_is_read_back_without_a_copy() {
        let file = file();
        let read = Contents::from_bytes(&file).unwrap();
        assert_eq!(read.weights(), 3);
        assert_eq!(read.tensors.keys().collect::<Vec<_>>(), ["a", "c"]);
        let a = &read.tensors["a"];
        assert_eq!(
            (a.shape.as_slice(), &a.values.bytes[..]),
            (&[2, 2][..], &[9, 0, 8, 0][..])
        );
        assert_eq!(a.indices().collect::<Vec<_>>(), [1, 3]);
        assert!(file.as_ptr_range().contains(&a.values.bytes.as_ptr()));
        let one = checkpoint(&[("a", &[1, 2])]);
        let empty = between(&one, &one).unwrap().file.into();
        assert_eq!(Contents::from_bytes(&empty).unwrap().weights(), 0);
    }

    #[test]
    fn every_flipped_byte_and_every_other_length_is_refused() {
        let file = file();
        for position in 0..file.len() {
            for flip in [0x01, 0x20, 0x80] {
                let mut broken = file.to_vec();
                broken[position] ^= flip;
                assert!(
                    Contents::from_bytes(&broken.into()).is_err(),
                    "byte {position} ^ {flip}"
                );
            }
        }
        for length in 0..file.len() {
            assert!(Contents::from_bytes(&file.slice(..length)).is_err(), "{length}");
        }
        assert!(Contents::from_bytes(&[&file[..], &[0]].concat().into()).is_err());
    }

    #[test]
    fn a_file_that_contradicts_itself_is_refused() {
        assert_eq!(Contents::from_bytes(&written(&|_, _| {})).unwrap().weights(), 2);
        let refused = |change: Change<'_>| Contents::from_bytes(&written(change)).unwrap_err().to_string();
        let set = |key: &'static str, value: &'static str| {
            refused(&move |metadata, _| drop(metadata.insert(key.into(), value.into())))
        };
        assert!(set("format", "springtide-patch-1").contains("same release"));
        assert!(set("from", "aa").contains("64 lowercase"));
        assert!(set("shapes", "[]").contains("shapes"));
        assert!(set("shapes", "{}").contains("every tensor"));
        assert!(set("shapes", r#"{"b":[2,2]}"#).contains("b|g"));
        assert!(set("shapes", r#"{"a":[3]}"#).contains("outside"));
        assert!(set("shapes", r#"{"a":[4294967296,4294967296]}"#).contains("too large"));
        assert!(set("new", "").contains("`new` is unknown"));
        for key in ["to", "digest"] {
            let error = refused(&|metadata, _| drop(metadata.remove(key)));
            assert!(error.contains(&format!("`{key}` is missing")), "{error}");
        }
        assert!(refused(&|_, gaps| *gaps = vec![3, 0]).contains("twice"));
        assert!(refused(&|_, gaps| *gaps = vec![1, 3]).contains("outside"));
        assert!(refused(&|_, gaps| *gaps = vec![u32::MAX, u32::MAX]).contains("outside"));
        assert!(refused(&|_, gaps| *gaps = vec![1]).contains("one value for each"));
    }
}
