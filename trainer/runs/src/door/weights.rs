//! The weights that a trainer outside uploads: safetensors files, put together as a checkpoint and checked.
//!
//! A file has whole tensors, or the parts that one rank holds. Parts have the form of torch's distributed
//! checkpoint (`HuggingFaceStorageWriter(save_distributed=True)`): the metadata `DCP_SHARDING_INFO` says
//! where each begins, `{name: {"saved_offsets": [row, column, …]}}`. The whole shapes are the parent's.
//!
//! A file is stored in pieces of [`PIECE_BYTES`], each uploaded by one request, so nobody holds a whole
//! one in memory before it is put together.

use artifact::adapter;
use artifact::checkpoint::Checkpoint;
use artifact::memory::{Buffer, put_next};
use artifact::tensor::{TensorData, bytes_of, weight_bytes};
use bytes::Bytes;
use model::lora::{self, Adapter};
use safetensors::Dtype;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use store::Store;
use uuid::Uuid;

/// Every piece of a file but the last has exactly so many bytes.
pub const PIECE_BYTES: u64 = 16 << 20;
/// Of a file's header: the names of some hundred thousand tensors.
const HEADER_BYTES_MAX: u64 = 32 << 20;
const SHARDING: &str = "DCP_SHARDING_INFO";

/// Why weights cannot be put together.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store does not answer.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// The trainer has to change something.
    #[error("{0}")]
    Refused(String),
    #[error("putting the adapter on its base ended early")]
    Ended(#[from] tokio::task::JoinError),
}

impl From<lora::Error> for Error {
    fn from(error: lora::Error) -> Self {
        Error::Refused(error.to_string())
    }
}

fn refused<T>(why: impl Into<String>) -> Result<T, Error> {
    Err(Error::Refused(why.into()))
}

/// Where the uploads of a cohort lie in the private part of the policy store.
pub fn folder(cohort: Uuid) -> String {
    format!("cohort/{cohort}")
}

/// Where a piece lies. Uploads of another lease, which has another fence, are elsewhere.
pub fn piece_key(cohort: Uuid, fence: i64, file: &str, piece: u64) -> String {
    format!("{}/{fence}/{file}/{piece:06}", folder(cohort))
}

/// Whether a file may have this name: `[A-Za-z0-9._-]`, up to 128 bytes.
pub fn is_file_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    (1..=128).contains(&name.len()) && !name.starts_with('.') && name.chars().all(allowed)
}

/// An uploaded file.
struct File<'a> {
    store: &'a Store,
    name: &'a str,
    cohort: Uuid,
    fence: i64,
    size: u64,
}

/// The files of a lease: cohort and fence.
fn uploaded<'a>(
    store: &'a Store,
    (cohort, fence): (Uuid, i64),
    files: &'a BTreeMap<String, u64>,
) -> impl Iterator<Item = File<'a>> {
    files.iter().map(move |(name, &size)| File {
        store,
        name,
        cohort,
        fence,
        size,
    })
}

impl File<'_> {
    /// Reads a range, across pieces.
    async fn read(&self, range: Range<u64>) -> Result<Buffer<u8>, Error> {
        if range.start > range.end || range.end > self.size {
            return refused(format!(
                "{}: its header names bytes {range:?} of {}",
                self.name, self.size
            ));
        }
        let mut bytes = Buffer::at_rest(usize::try_from(range.end - range.start).unwrap_or(0));
        let mut rest = &mut bytes[..];
        let mut at = range.start;
        while at < range.end {
            let (piece, within) = (at / PIECE_BYTES, at % PIECE_BYTES);
            let count = (range.end - at).min(PIECE_BYTES - within);
            let key = piece_key(self.cohort, self.fence, self.name, piece);
            let read = self.store.get_private_range(&key, within..within + count).await;
            let read = match read {
                Err(store::Error::NotFound(_)) => {
                    return refused(format!("{}: piece {piece} was not uploaded", self.name));
                }
                read => read?,
            };
            if read.len() as u64 != count {
                return refused(format!(
                    "{}: piece {piece} is shorter than the commit says; each has {PIECE_BYTES} bytes, but the last",
                    self.name
                ));
            }
            put_next(&mut rest, &read);
            at += count;
        }
        Ok(bytes)
    }

    /// Its tensors, and where their bytes begin in the file.
    async fn header(&self) -> Result<Vec<Part>, Error> {
        #[derive(Deserialize)]
        struct Entry {
            dtype: Dtype,
            shape: Vec<usize>,
            data_offsets: (u64, u64),
        }
        #[derive(Deserialize)]
        struct Saved {
            saved_offsets: Vec<usize>,
        }
        let name = self.name;
        let wrong = |why: String| Error::Refused(format!("{name} is no safetensors file: {why}"));
        if self.size < 8 {
            return Err(wrong("it is shorter than its header".into()));
        }
        let length = self.read(0..8).await?;
        let length = u64::from_le_bytes(length[..].try_into().unwrap_or([0; 8]));
        if length > HEADER_BYTES_MAX || length + 8 > self.size {
            return Err(wrong(format!("its header would have {length} bytes")));
        }
        let header = self.read(8..8 + length).await?;
        let header: BTreeMap<String, serde_json::Value> =
            serde_json::from_slice(&header).map_err(|error| wrong(error.to_string()))?;
        let sharding = header
            .get("__metadata__")
            .and_then(|metadata| metadata[SHARDING].as_str());
        let sharding: BTreeMap<String, Saved> = match sharding {
            None => BTreeMap::new(),
            Some(text) => serde_json::from_str(text).map_err(|error| wrong(format!("{SHARDING}: {error}")))?,
        };
        let mut parts = Vec::new();
        for (tensor, entry) in header {
            if tensor == "__metadata__" {
                continue;
            }
            let entry = Entry::deserialize(entry).map_err(|error| wrong(format!("`{tensor}`: {error}")))?;
            let (from, to) = entry.data_offsets;
            if to > self.size - 8 - length {
                return Err(wrong(format!("`{tensor}` ends after the file")));
            }
            let bytes = bytes_of(entry.dtype, &entry.shape).map(|bytes| bytes as u64);
            if to.checked_sub(from) != bytes || bytes.is_none() {
                return Err(wrong(format!(
                    "`{tensor}` has another number of bytes than its shape says"
                )));
            }
            let offsets = sharding.get(&tensor).map(|saved| saved.saved_offsets.clone());
            parts.push(Part {
                offsets: offsets.unwrap_or_else(|| vec![0; entry.shape.len()]),
                tensor,
                dtype: entry.dtype,
                shape: entry.shape,
                bytes: 8 + length + from..8 + length + to,
            });
        }
        Ok(parts)
    }
}

/// A tensor of a file, or the part of one.
#[derive(Debug, Clone, PartialEq)]
struct Part {
    tensor: String,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Where its first value is in the whole tensor.
    offsets: Vec<usize>,
    /// In the file.
    bytes: Range<u64>,
}

impl Part {
    /// Whether two parts of a tensor have a value in common.
    fn meets(&self, other: &Part) -> bool {
        let axis = |axis: usize| {
            let (a, b) = (self.offsets[axis], other.offsets[axis]);
            a < b + other.shape[axis] && b < a + self.shape[axis]
        };
        (0..self.shape.len()).all(axis)
    }

    /// Fails unless it lies within the tensor.
    fn check(&self, whole: &TensorData) -> Result<(), Error> {
        let Part {
            tensor,
            dtype,
            shape,
            offsets,
            ..
        } = self;
        if *dtype != whole.dtype {
            return refused(format!(
                "`{tensor}` is {dtype}; cast it to {}, the dtype of its parent",
                whole.dtype
            ));
        }
        let ends = || {
            let axes = shape.iter().zip(offsets);
            axes.map(|(size, offset)| size.checked_add(*offset))
        };
        let fits = shape.len() == whole.shape.len()
            && offsets.len() == shape.len()
            && ends()
                .zip(&whole.shape)
                .all(|(end, size)| end.is_some_and(|end| end <= *size));
        match fits {
            true => Ok(()),
            false => refused(format!(
                "`{tensor}`: a part of shape {shape:?} at {offsets:?} does not lie in {:?}, its parent's shape",
                whole.shape
            )),
        }
    }

    /// Copies its bytes to where they belong.
    fn copy_into(&self, whole: &mut [u8], whole_shape: &[usize], bytes: &[u8]) {
        let width = weight_bytes(self.dtype);
        // the axes that are complete from some axis on are contiguous
        let mut axis = self.shape.len();
        let mut run = width;
        while axis > 0 {
            axis -= 1;
            run *= self.shape[axis];
            if self.shape[axis] != whole_shape[axis] {
                break;
            }
        }
        let runs = bytes.len().checked_div(run).unwrap_or(0);
        for number in 0..runs {
            // the run's place among the outer axes
            let (mut rest, mut at, mut stride) = (number, 0, width);
            for inner in (0..self.shape.len()).rev() {
                let index = match inner < axis {
                    true => {
                        let index = rest % self.shape[inner];
                        rest /= self.shape[inner];
                        index
                    }
                    false => 0,
                };
                at += (self.offsets[inner] + index) * stride;
                stride *= whole_shape[inner];
            }
            whole[at..at + run].copy_from_slice(&bytes[number * run..(number + 1) * run]);
        }
    }
}

/// What differs between a version and its child, as far as a guard looks.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Change {
    /// ‖new − old‖ / ‖old‖ over all weights.
    pub relative_norm: f64,
}

/// Puts the uploaded files together: the child of `parent`, with its files and every one of its tensors.
/// Refuses values that are not finite.
pub async fn assemble(
    store: &Store,
    (cohort, fence): (Uuid, i64),
    files: &BTreeMap<String, u64>,
    parent: &Checkpoint,
) -> Result<(Checkpoint, Change), Error> {
    let mut parts: BTreeMap<String, Vec<(&str, u64, Part)>> = BTreeMap::new();
    for file in uploaded(store, (cohort, fence), files) {
        let (name, size) = (file.name, file.size);
        for part in file.header().await? {
            let Some(whole) = parent.tensors.get(&part.tensor) else {
                return refused(format!(
                    "`{}` of {name} is not in the parent version; leave out what is tied to another tensor",
                    part.tensor
                ));
            };
            part.check(whole)?;
            let of_tensor = parts.entry(part.tensor.clone()).or_default();
            if let Some((other, ..)) = of_tensor.iter().find(|(.., other)| other.meets(&part)) {
                return refused(format!(
                    "`{}`: parts of {other} and {name} have values in common",
                    part.tensor
                ));
            }
            of_tensor.push((name, size, part));
        }
    }
    let mut checkpoint = Checkpoint {
        files: parent.files.clone(),
        ..Checkpoint::default()
    };
    let (mut change, mut norm) = (0.0, 0.0);
    for (tensor, old) in &parent.tensors {
        let parts = parts.remove(tensor).unwrap_or_default();
        let covered: u64 = parts.iter().map(|(.., part)| part.bytes.end - part.bytes.start).sum();
        if covered != old.bytes.len() as u64 {
            return refused(format!(
                "{covered} of the {} bytes of `{tensor}` are in the uploaded files; each rank uploads its own",
                old.bytes.len()
            ));
        }
        // the parts cover it
        let mut bytes = Buffer::at_rest(old.bytes.len());
        for (name, size, part) in parts {
            let file = File {
                store,
                name,
                cohort,
                fence,
                size,
            };
            let read = file.read(part.bytes.clone()).await?;
            part.copy_into(&mut bytes, &old.shape, &read);
        }
        let new = TensorData {
            dtype: old.dtype,
            shape: old.shape.clone(),
            bytes: Bytes::from_owner(bytes).into(),
        };
        let (squares, difference) = sums(old, &new);
        if !difference.is_finite() {
            return refused(format!("`{tensor}` has values that are not finite"));
        }
        (norm, change) = (norm + squares, change + difference);
        checkpoint.tensors.insert(tensor.clone(), new);
    }
    Ok((checkpoint, Change::of(change, norm)))
}

/// Puts an uploaded adapter on `parent`, or on what that adapts. `config` is PEFT's. The change is that of the
/// weights with each adapter added to them.
pub async fn assemble_adapter(
    store: &Store,
    lease: (Uuid, i64),
    files: &BTreeMap<String, u64>,
    config: &Value,
    parent: &Arc<Checkpoint>,
) -> Result<(Checkpoint, Change), Error> {
    let mut factors = Checkpoint {
        files: [(adapter::CONFIG.to_owned(), Bytes::from(config.to_string()))].into(),
        ..Checkpoint::default()
    };
    // more than a full rank would have, before anything is read
    let (mut room, most) = (parent.tensor_bytes(), parent.tensor_bytes());
    for file in uploaded(store, lease, files) {
        let name = file.name;
        for part in file.header().await? {
            room = match room.checked_sub(part.bytes.end - part.bytes.start) {
                Some(room) => room,
                None => return refused(format!("the adapter has more bytes than its parent, {most}")),
            };
            if !part.tensor.starts_with(adapter::PREFIX) {
                return refused(format!(
                    "`{}` of {name} is not of an adapter: PEFT's names begin with `{}`",
                    part.tensor,
                    adapter::PREFIX
                ));
            }
            let bytes = Bytes::from_owner(file.read(part.bytes).await?);
            let tensor = TensorData {
                dtype: part.dtype,
                shape: part.shape,
                bytes: bytes.into(),
            };
            if factors.tensors.insert(part.tensor.clone(), tensor).is_some() {
                return refused(format!("`{}` of {name} is in another file too", part.tensor));
            }
        }
    }
    let parent = Arc::clone(parent);
    let put = tokio::task::spawn_blocking(move || {
        let base = parent.base();
        let Some(adapter) = Adapter::of_version(&factors)? else {
            return refused("there is no adapter_config.json");
        };
        let version = base.with_adapter(&adapter.version_of(&base)?);
        let (old, new) = (lora::computed(&parent)?, lora::computed(&version)?);
        let pairs = new
            .tensors
            .iter()
            .filter_map(|(name, new)| Some((old.tensors.get(name)?, new)));
        let (norm, change) = pairs.fold((0.0, 0.0), |(norm, change), (old, new)| {
            let (squares, difference) = sums(old, new);
            (norm + squares, change + difference)
        });
        drop((old, new));
        Ok((version, Change::of(change, norm)))
    });
    put.await?
}

impl Change {
    fn of(difference: f64, norm: f64) -> Self {
        let relative_norm = match norm > 0.0 {
            true => (difference / norm).sqrt(),
            false => difference.sqrt(),
        };
        Change { relative_norm }
    }
}

/// Σ old² and Σ (new − old)². Other dtypes than floats of at least 16 bits are not summed up.
fn sums(old: &TensorData, new: &TensorData) -> (f64, f64) {
    let (Some(old), Some(new)) = (values(old), values(new)) else {
        return (0.0, 0.0);
    };
    old.zip(new).fold((0.0, 0.0), |(squares, differences), (old, new)| {
        (squares + old * old, differences + (new - old) * (new - old))
    })
}

fn values(tensor: &TensorData) -> Option<impl Iterator<Item = f64>> {
    let value: fn(&[u8]) -> f64 = match tensor.dtype {
        Dtype::F32 => |b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        Dtype::BF16 => |b| f64::from(f32::from_le_bytes([0, 0, b[0], b[1]])),
        Dtype::F16 => |b| f64::from(half::f16::from_le_bytes([b[0], b[1]])),
        _ => return None,
    };
    Some(tensor.bytes.chunks_exact(weight_bytes(tensor.dtype)).map(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView;
    use serde_json::json;
    use std::collections::HashMap;

    fn tensor(shape: &[usize], values: &[f32]) -> TensorData {
        TensorData {
            dtype: Dtype::F32,
            shape: shape.to_vec(),
            bytes: values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>().into(),
        }
    }

    fn parent() -> Checkpoint {
        let values: Vec<f32> = (0..24).map(|n| n as f32).collect();
        Checkpoint {
            tensors: [
                ("a".to_owned(), tensor(&[4, 3, 2], &values)),
                ("b".to_owned(), tensor(&[3], &[1.0, 2.0, 3.0])),
            ]
            .into(),
            files: [("config.json".to_owned(), Bytes::from_static(b"{}"))].into(),
        }
    }

    /// A part of a file: name, offsets, shape, values.
    type Given<'a> = (&'a str, &'a [usize], &'a [usize], Vec<f32>);

    fn file(parts: &[Given<'_>]) -> Vec<u8> {
        let offsets = parts
            .iter()
            .map(|(name, offsets, ..)| (*name, serde_json::json!({"saved_offsets": offsets})));
        let offsets: HashMap<&str, serde_json::Value> = offsets.collect();
        let metadata = HashMap::from([(SHARDING.to_owned(), serde_json::to_string(&offsets).unwrap())]);
        let data: Vec<(&str, &[usize], Vec<u8>)> = parts
            .iter()
            .map(|(name, _, shape, values)| (*name, *shape, values.iter().flat_map(|v| v.to_le_bytes()).collect()))
            .collect();
        let views = data
            .iter()
            .map(|(name, shape, bytes)| (*name, TensorView::new(Dtype::F32, shape.to_vec(), bytes).unwrap()));
        safetensors::serialize(views, Some(metadata)).unwrap()
    }

    async fn assembled(files: &[Vec<u8>]) -> Result<(Checkpoint, Change), Error> {
        let store = Store::over(Arc::new(object_store::memory::InMemory::new()));
        let cohort = Uuid::from_u128(5);
        let mut sizes = BTreeMap::new();
        for (n, bytes) in files.iter().enumerate() {
            let name = format!("shard-{n}.safetensors");
            for (piece, bytes) in bytes.chunks(PIECE_BYTES as usize).enumerate() {
                let key = piece_key(cohort, 3, &name, piece as u64);
                store.put_private(&key, &Bytes::copy_from_slice(bytes)).await.unwrap();
            }
            sizes.insert(name, bytes.len() as u64);
        }
        assemble(&store, (cohort, 3), &sizes, &parent()).await
    }

    /// Rows 0..2 and 2..4 of `a`, of which the columns of the second file are cut, and all of `b`.
    fn shards() -> [Vec<Given<'static>>; 3] {
        let rows = |rows: Range<usize>, columns: Range<usize>| -> Vec<f32> {
            let all = rows.flat_map(|row| {
                columns
                    .clone()
                    .flat_map(move |column| (0..2).map(move |k| (row, column, k)))
            });
            all.map(|(row, column, k)| (row * 6 + column * 2 + k) as f32 + 0.5)
                .collect()
        };
        [
            vec![
                ("a", &[0, 0, 0], &[2, 3, 2], rows(0..2, 0..3)),
                ("b", &[0], &[2], vec![1.0, 2.0]),
            ],
            vec![
                ("a", &[2, 0, 0], &[2, 1, 2], rows(2..4, 0..1)),
                ("b", &[2], &[1], vec![3.0]),
            ],
            vec![("a", &[2, 1, 0], &[2, 2, 2], rows(2..4, 1..3))],
        ]
    }

    #[tokio::test]
    async fn parts_of_any_axis_make_the_whole_tensor() {
        let (checkpoint, change) = assembled(&shards().map(|parts| file(&parts))).await.unwrap();
        let values: Vec<f32> = (0..24).map(|n| n as f32 + 0.5).collect();
        assert_eq!(checkpoint.tensors["a"], tensor(&[4, 3, 2], &values));
        assert_eq!(checkpoint.tensors["b"], parent().tensors["b"]);
        assert_eq!(checkpoint.files, parent().files);
        let norm: f64 = (0..24).map(f64::from).map(|n| n * n).sum::<f64>() + 14.0;
        assert!((change.relative_norm - (6.0 / norm).sqrt()).abs() < 1e-12);
    }

    #[tokio::test]
    async fn what_is_missing_doubled_of_another_form_or_not_finite_is_refused() {
        let whole = || shards().to_vec();
        let with = |change: &dyn Fn(&mut Vec<Vec<Given<'static>>>)| {
            let mut parts = whole();
            change(&mut parts);
            parts.iter().map(|parts| file(parts)).collect::<Vec<_>>()
        };
        for (files, why) in [
            (with(&|parts| drop(parts.pop())), "64 of the 96 bytes of `a`"),
            (
                with(&|parts| parts.push(vec![("b", &[2], &[1], vec![9.0])])),
                "have values in common",
            ),
            (
                with(&|parts| parts.push(vec![("c", &[0], &[1], vec![9.0])])),
                "`c` of shard-3.safetensors is not in the parent",
            ),
            (with(&|parts| parts[1][1].1 = &[3]), "does not lie in [3]"),
            (
                with(&|parts| parts[2][0].3[0] = f32::NAN),
                "`a` has values that are not finite",
            ),
            (vec![b"not safetensors at all".to_vec()], "is no safetensors file"),
            (vec![beyond_the_file()], "`b` ends after the file"),
        ] {
            let error = assembled(&files).await.unwrap_err();
            assert!(
                matches!(&error, Error::Refused(found) if found.contains(why)),
                "{why}: {error}"
            );
        }
    }

    fn beyond_the_file() -> Vec<u8> {
        let header =
            json!({"b": {"dtype": "F32", "shape": [3], "data_offsets": [u64::MAX - 12, u64::MAX]}}).to_string();
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()
    }

    #[test]
    fn a_file_has_a_plain_name() {
        assert!(is_file_name("shard-00000-model-00001-of-00001.safetensors"));
        for name in ["", "..", ".x", "a/b", "a b", &"x".repeat(129)] {
            assert!(!is_file_name(name), "{name}");
        }
    }
}
