//! A patch for engines that hold one version in memory: the weights in which the next one differs.
//!
//! It is a safetensors file in the names and shapes of the checkpoint. For each tensor `NAME` that
//! changed it has two: `NAME|g`, u32 `[k]`, the flat index of the first changed weight, and the gap
//! from each to the next; and `NAME|v`, the new values, `[k]`, in the tensor's dtype. Its metadata:
//!
//! | key | value |
//! |---|---|
//! | `format` | `springtide-patch-2` |
//! | `from`, `to` | content hashes of both versions, in hex |
//! | `shapes` | JSON object: the shape of each tensor that changed |
//! | `digest` | BLAKE3 of the file with these 64 digits as `0`, in hex |
//!
//! A worker of an engine gets a patch of its own, whose tensors are the memories of its [`LocalPart`]s.
//!
//! It moves weights between processes of one cluster. [`delta`](crate::delta) is the form for
//! storage and networks.

mod local;
mod read;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use rayon::prelude::*;
use safetensors::{Dtype, View};

use crate::checkpoint::Checkpoint;
use crate::delta::{self, FRAME_WEIGHTS};
use crate::digest::Digest;
use crate::tensor::{TensorData, weight_bytes};

pub use local::{HeldPart, LocalPart, wrongly_held};
pub use read::{Changes, Contents, Refused};

const FORMAT: &str = "springtide-patch-2";
/// The value of `digest` while the file is hashed.
const NO_DIGEST: &[u8; 64] = &[b'0'; 64];

/// Why there is no patch between two versions.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the versions differ in more than their weights: {0}")]
    Form(String),
    #[error("between two changed weights of a tensor are {0} others, and a patch has at most 2^32 - 1")]
    Gap(usize),
    #[error("{0}")]
    Part(String),
    #[error("serialize the patch")]
    Serialize(#[from] safetensors::SafeTensorError),
}

/// A file that makes `to` out of `from`.
#[derive(Debug, Clone, PartialEq)]
pub struct Patch {
    pub file: Vec<u8>,
    /// Weights that it changes.
    pub weights: u64,
}

/// The weights in which `to` differs from `from`.
///
/// # Errors
/// If names, shapes, dtypes or the model's configuration differ. An engine has to be started with
/// such a version.
pub fn between(from: &Checkpoint, to: &Checkpoint) -> Result<Patch, Error> {
    if let Some(first) = from.form_differences(to).into_iter().next() {
        return Err(Error::Form(first));
    }
    if from.files.get("config.json") != to.files.get("config.json") {
        return Err(Error::Form("`config.json` differs".into()));
    }
    let found = to.tensors.par_iter().filter_map(|(name, new)| {
        let old = from.tensors.get(name)?;
        Some(changes(name, old, new))
    });
    let rows = found.collect::<Result<Vec<_>, Error>>()?;
    written(from.root(), to.root(), rows)
}

/// The file with these rows. Empty ones are left out.
fn written(from: Digest, to: Digest, rows: impl IntoIterator<Item = Row>) -> Result<Patch, Error> {
    let mut parts = Vec::new();
    let mut shapes = BTreeMap::new();
    let mut weights = 0;
    for Row {
        name,
        shape,
        dtype,
        gaps,
        values,
        ..
    } in rows
    {
        if gaps.is_empty() {
            continue;
        }
        let count = gaps.len() / size_of::<u32>();
        weights += count as u64;
        parts.push((format!("{name}|g"), Part::new(Dtype::U32, count, gaps)));
        parts.push((format!("{name}|v"), Part::new(dtype, count, values)));
        shapes.insert(name, shape);
    }
    let shapes = serde_json::to_string(&shapes).unwrap_or_default();
    let no_digest = String::from_utf8_lossy(NO_DIGEST).into_owned();
    let metadata: HashMap<String, String> = [
        ("format", FORMAT.to_owned()),
        ("from", from.to_string()),
        ("to", to.to_string()),
        ("shapes", shapes),
        ("digest", no_digest),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into();
    let mut file = safetensors::serialize(parts, Some(metadata))?;
    let digest = Digest::of(&file).to_string();
    if let Some(place) = digest_place(&file) {
        file[place].copy_from_slice(digest.as_bytes());
    }
    Ok(Patch { file, weights })
}

/// Where the 64 digits of `digest` are in the header. Quotes inside a JSON string are escaped, so
/// no other text has this form.
fn digest_place(file: &[u8]) -> Option<std::ops::Range<usize>> {
    const KEY: &[u8] = b"\"digest\":\"";
    let header_bytes = u64::from_le_bytes(*file.first_chunk()?);
    let header = file.get(8..)?.get(..usize::try_from(header_bytes).ok()?)?;
    let start = 8 + header.windows(KEY.len()).position(|bytes| bytes == KEY)? + KEY.len();
    (start + NO_DIGEST.len() <= file.len()).then_some(start..start + NO_DIGEST.len())
}

/// The weights that differ.
fn changes(name: &str, old: &TensorData, new: &TensorData) -> Result<Row, Error> {
    let mut row = Row::new(name.into(), new.shape.clone(), new.dtype);
    // what a delta did not touch shares its memory
    if old.bytes.as_ptr_range() == new.bytes.as_ptr_range() {
        return Ok(row);
    }
    let width = weight_bytes(new.dtype);
    let frame = FRAME_WEIGHTS * width;
    let frames = old.bytes.par_chunks(frame).zip(new.bytes.par_chunks(frame));
    let found = frames.map(|(old, new)| {
        let mut indices = Vec::new();
        delta::differing(width, old, new, &mut indices);
        indices
    });
    let found: Vec<Vec<u32>> = found.collect();
    let indices = found.iter().enumerate().flat_map(|(frame, indices)| {
        let at = move |&index: &u32| frame * FRAME_WEIGHTS + index as usize;
        indices.iter().map(at)
    });
    for index in indices {
        row.push(index, &new.bytes[index * width..][..width])?;
    }
    Ok(row)
}

/// What changes of one tensor.
struct Row {
    name: String,
    shape: Vec<usize>,
    dtype: Dtype,
    gaps: Vec<u8>,
    values: Vec<u8>,
    last: usize,
}

impl Row {
    fn new(name: String, shape: Vec<usize>, dtype: Dtype) -> Self {
        Row {
            name,
            shape,
            dtype,
            gaps: Vec::new(),
            values: Vec::new(),
            last: 0,
        }
    }

    /// Adds a weight behind the last one.
    fn push(&mut self, index: usize, value: &[u8]) -> Result<(), Error> {
        let gap = index - self.last;
        let gap = u32::try_from(gap).map_err(|_| Error::Gap(gap))?;
        self.gaps.extend(gap.to_le_bytes());
        self.values.extend_from_slice(value);
        self.last = index;
        Ok(())
    }
}

struct Part {
    dtype: Dtype,
    shape: [usize; 1],
    bytes: Vec<u8>,
}

impl Part {
    fn new(dtype: Dtype, count: usize, bytes: Vec<u8>) -> Self {
        Part {
            dtype,
            shape: [count],
            bytes,
        }
    }
}

impl View for Part {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    pub(super) fn checkpoint(tensors: &[(&str, &[u16])]) -> Checkpoint {
        let tensors = tensors.iter().map(|(name, values)| {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let tensor = TensorData::new(Dtype::BF16, vec![2, values.len() / 2], bytes).unwrap();
            (name.to_string(), tensor)
        });
        Checkpoint {
            tensors: tensors.collect(),
            files: BTreeMap::new(),
        }
    }

    #[test]
    fn a_patch_has_the_weights_that_changed_and_says_between_which_versions() {
        let old = checkpoint(&[("a", &[1, 2, 3, 4]), ("b", &[5, 6])]);
        let new = checkpoint(&[("a", &[1, 9, 3, 8]), ("b", &[5, 6])]);
        let patch = between(&old, &new).unwrap();
        assert_eq!(patch.weights, 2);
        let read = SafeTensors::deserialize(&patch.file).unwrap();
        let mut names = read.names();
        names.sort();
        assert_eq!(names, ["a|g", "a|v"]);
        assert_eq!(read.tensor("a|g").unwrap().data(), [1, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(read.tensor("a|v").unwrap().data(), [9, 0, 8, 0]);
        let (_, metadata) = SafeTensors::read_metadata(&patch.file).unwrap();
        let metadata = metadata.metadata().as_ref().unwrap();
        assert_eq!(metadata["from"], old.root().to_string());
        assert_eq!(metadata["to"], new.root().to_string());
        assert_eq!(metadata["shapes"], r#"{"a":[2,2]}"#);
    }

    #[test]
    fn equal_versions_have_an_empty_patch() {
        let one = checkpoint(&[("a", &[1, 2, 3, 4])]);
        let patch = between(&one, &one).unwrap();
        assert_eq!(patch.weights, 0);
        assert!(SafeTensors::deserialize(&patch.file).unwrap().is_empty());
    }

    #[test]
    fn versions_of_another_form_have_no_patch() {
        let old = checkpoint(&[("a", &[1, 2, 3, 4])]);
        let new = checkpoint(&[("a", &[1, 2])]);
        assert!(matches!(between(&old, &new), Err(Error::Form(_))));
    }
}
