//! Reads parts of a model folder on demand, for machines that share a model larger than their
//! memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use safetensors::Dtype;
use safetensors::tensor::Metadata;

use super::{FILES, INDEX, Index, SINGLE, STILL_WRITTEN, io, read_if_there, refuse};
use crate::checkpoint::Error;
use crate::memory::Buffer;
use crate::tensor::bytes_of;

/// The limit of safetensors.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// The positions of a folder's tensors, and the files beside the weights.
#[derive(Debug)]
pub struct LazyFolder {
    folder: PathBuf,
    tensors: BTreeMap<String, Place>,
    /// `config.json`, `tokenizer.json`, … by file name.
    pub files: BTreeMap<String, Bytes>,
}

/// The position of a tensor.
#[derive(Debug, Clone)]
struct Place {
    file: String,
    dtype: Dtype,
    shape: Vec<usize>,
    start: u64,
    bytes: u64,
}

impl LazyFolder {
    /// Reads headers, the index and the files beside the weights. Refuses the same folders as
    /// [`Checkpoint::read_dir`](crate::checkpoint::Checkpoint::read_dir), but does not notice later
    /// changes.
    pub fn open(folder: &Path) -> Result<Self, Error> {
        let index = read_if_there(&folder.join(INDEX))?;
        let single = folder.join(SINGLE).exists();
        let mut tensors = BTreeMap::new();
        match (index, single) {
            (Some(_), true) => return Err(refuse(folder, format!("both {SINGLE} and {INDEX} are there"))),
            (None, false) => {
                let reason = format!("neither {SINGLE} nor {INDEX}, which comes last, is there");
                return Err(refuse(folder, reason));
            }
            (None, true) => tensors = places(folder, SINGLE)?,
            (Some(index), false) => {
                let path = folder.join(INDEX);
                let index: Index = serde_json::from_slice(&index).map_err(|error| refuse(&path, error.to_string()))?;
                let shards: BTreeSet<&String> = index.weight_map.values().collect();
                for shard in shards {
                    // a name with a path in it could read files outside the folder
                    if Path::new(shard).file_name() != Some(shard.as_ref()) {
                        return Err(refuse(&path, format!("`{shard}` is not a file name")));
                    }
                    for (name, place) in places(folder, shard)? {
                        if tensors.insert(name.clone(), place).is_some() {
                            return Err(refuse(&path, format!("`{name}` is in two shards")));
                        }
                    }
                }
                let placed = |(name, place): (&String, &Place)| index.weight_map.get(name) == Some(&place.file);
                if tensors.len() != index.weight_map.len() || !tensors.iter().all(placed) {
                    return Err(refuse(
                        &path,
                        "the shards have other tensors than the index names".into(),
                    ));
                }
            }
        }
        let mut files = BTreeMap::new();
        for &name in FILES {
            if let Some(bytes) = read_if_there(&folder.join(name))? {
                files.insert(name.into(), bytes);
            }
        }
        Ok(LazyFolder {
            folder: folder.into(),
            tensors,
            files,
        })
    }

    /// Name, dtype and shape of every tensor, in name order.
    pub fn forms(&self) -> impl Iterator<Item = (&str, Dtype, &[usize])> {
        let tensors = self.tensors.iter();
        tensors.map(|(name, place)| (name.as_str(), place.dtype, place.shape.as_slice()))
    }

    /// Bytes of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.values().map(|place| place.bytes).sum()
    }

    /// Reads a byte range of a tensor, at rest.
    pub fn read(&self, name: &str, range: Range<usize>) -> Result<Buffer<u8>, Error> {
        let place = self.tensors.get(name);
        let place = place.filter(|place| range.start <= range.end && range.end as u64 <= place.bytes);
        let place = place.ok_or_else(|| refuse(&self.folder, format!("`{name}` has no bytes {range:?}")))?;
        let path = self.folder.join(&place.file);
        let file = File::open(&path).map_err(io("open", &path))?;
        let mut bytes = Buffer::at_rest(range.len());
        let read = file.read_exact_at(&mut bytes, place.start + range.start as u64);
        read.map_err(io("read", &path))?;
        Ok(bytes)
    }
}

/// The tensors of one file, from its header.
fn places(folder: &Path, name: &str) -> Result<BTreeMap<String, Place>, Error> {
    let path = folder.join(name);
    let cut_off = |reason: String| refuse(&path, format!("{reason}: {STILL_WRITTEN}"));
    let file = File::open(&path).map_err(io("open", &path))?;
    let length = file.metadata().map_err(io("look at", &path))?.len();
    let mut size = [0; 8];
    let read = file.read_exact_at(&mut size, 0);
    read.map_err(|error| cut_off(format!("its header cannot be read ({error})")))?;
    let size = u64::from_le_bytes(size);
    let start = size
        .checked_add(8)
        .filter(|&start| start <= length && size <= HEADER_BYTES_MAX);
    let start = start.ok_or_else(|| cut_off("its header ends early".into()))?;
    let mut header = vec![0; size as usize];
    file.read_exact_at(&mut header, 8).map_err(io("read", &path))?;
    let header: Metadata = serde_json::from_slice(&header).map_err(|error| cut_off(error.to_string()))?;
    if start + header.data_len() as u64 != length {
        return Err(cut_off("it is shorter or longer than its header says".into()));
    }
    let place = |(tensor, info): (String, &safetensors::tensor::TensorInfo)| {
        let (from, to) = info.data_offsets;
        if bytes_of(info.dtype, &info.shape) != to.checked_sub(from) {
            return Err(refuse(&path, format!("`{tensor}` has another size than its shape")));
        }
        let place = Place {
            file: name.into(),
            dtype: info.dtype,
            shape: info.shape.clone(),
            start: start + from as u64,
            bytes: (to - from) as u64,
        };
        Ok((tensor, place))
    };
    header.tensors().into_iter().map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Checkpoint;
    use std::fs;

    fn assert_same(folder: &Path, checkpoint: &Checkpoint) {
        let lazy = LazyFolder::open(folder).unwrap();
        assert_eq!(lazy.files, checkpoint.files);
        let forms: Vec<_> = lazy
            .forms()
            .map(|(name, dtype, shape)| (name.to_owned(), dtype, shape.to_vec()))
            .collect();
        let expected = checkpoint.tensors.iter();
        let expected = expected.map(|(name, tensor)| (name.clone(), tensor.dtype, tensor.shape.clone()));
        assert_eq!(forms, expected.collect::<Vec<_>>());
        for (name, tensor) in &checkpoint.tensors {
            let bytes = &tensor.bytes[..];
            for range in [0..bytes.len(), bytes.len() / 2..bytes.len(), 0..0] {
                assert_eq!(lazy.read(name, range.clone()).unwrap()[..], bytes[range]);
            }
            assert!(lazy.read(name, 0..bytes.len() + 1).is_err());
        }
        assert!(lazy.read("nothing", 0..0).is_err());
    }

    #[test]
    fn parts_of_a_folder_equal_those_of_the_full_checkpoint() {
        let checkpoint = super::super::tests::model();
        for shard_bytes_max in [u64::MAX, 13] {
            let folder = tempfile::tempdir().unwrap();
            checkpoint.write_shards(folder.path(), shard_bytes_max).unwrap();
            assert_same(folder.path(), &checkpoint);
        }
    }

    #[test]
    fn an_incomplete_folder_is_refused_with_a_clear_message() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let refused = || LazyFolder::open(path).unwrap_err().to_string();
        assert!(refused().contains("comes last"), "{}", refused());
        super::super::tests::model().write_shards(path, 13).unwrap();
        let shard = path.join("model-00002-of-00002.safetensors");
        let bytes = fs::read(&shard).unwrap();
        for length in [0, 7, 20, bytes.len() - 1] {
            fs::write(&shard, &bytes[..length]).unwrap();
            assert!(refused().contains("still being written"), "{length}: {}", refused());
        }
        fs::write(&shard, &bytes).unwrap();
        fs::write(
            path.join(INDEX),
            r#"{"weight_map": {"zzz": "model-00001-of-00002.safetensors"}}"#,
        )
        .unwrap();
        assert!(refused().contains("other tensors"), "{}", refused());
        fs::write(path.join(INDEX), r#"{"weight_map": {"a": "../x.safetensors"}}"#).unwrap();
        assert!(refused().contains("not a file name"), "{}", refused());
        fs::write(path.join(SINGLE), "").unwrap();
        assert!(refused().contains("both"), "{}", refused());
    }
}
