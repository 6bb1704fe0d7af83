//! Hugging Face folders: one safetensors file, or shards with an index, and the model's other
//! files.
//!
//! The `__metadata__` of safetensors and the `metadata` of the index are not part of a version and
//! are not read.

mod lazy;
mod marker;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::Path;
use std::time::SystemTime;

use bytes::Bytes;
use safetensors::{SafeTensors, tensor::TensorView};
use serde::{Deserialize, Serialize};

use crate::atomic;
use crate::checkpoint::{Checkpoint, Error};
use crate::memory;
use crate::tensor::TensorData;

pub use lazy::LazyFolder;
pub use marker::Marker;

/// The files beside the weights that belong to a version: those that loaders and engines read.
pub const FILES: &[&str] = &[
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];

/// Largest shard in bytes. Larger weights are divided; a larger tensor gets a shard of its own.
pub const SHARD_BYTES_MAX: u64 = 5_000_000_000;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

const STILL_WRITTEN: &str =
    "either it is still being written, or it was copied in part; wait for its writer, or copy it again";

/// Reads a file of weights.
type Load<'a> = dyn Fn(&Path) -> std::io::Result<Bytes> + 'a;

#[derive(Serialize, Deserialize)]
struct Index {
    #[serde(default)]
    metadata: serde_json::Value,
    /// Tensor name to shard file name.
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Reads a Hugging Face folder: `model.safetensors` or the shards in
    /// `model.safetensors.index.json`, and the files in [`FILES`]. Ignores other files.
    pub fn read_dir(path: &Path) -> Result<Self, Error> {
        read(path, &memory::read_file)
    }

    /// [`read_dir`](Self::read_dir) of a folder whose files nobody changes in place: they are mapped
    /// ([`memory::map_file`]).
    pub fn map_dir(path: &Path) -> Result<Self, Error> {
        read(path, &memory::map_file)
    }

    /// Writes a folder that [`read_dir`](Self::read_dir) and Hugging Face's loaders read. Creates
    /// it if it is missing. Every file is written atomically. Weights over 5 GB are divided into
    /// shards.
    pub fn write_dir(&self, path: &Path) -> Result<(), Error> {
        self.write_shards(path, SHARD_BYTES_MAX)
    }

    /// [`write_dir`](Self::write_dir) with shards of at most `shard_bytes_max` bytes. A larger
    /// tensor gets a shard of its own.
    pub fn write_shards(&self, path: &Path, shard_bytes_max: u64) -> Result<(), Error> {
        write(self, path, shard_bytes_max)
    }
}

/// Returns an error if somebody seems to be writing the folder: the index is missing, a file is cut
/// off, or a file changes during the read.
fn read(folder: &Path, load: &Load) -> Result<Checkpoint, Error> {
    let before = times(folder)?;
    let checkpoint = read_files(folder, load)?;
    let after = times(folder)?;
    match before.iter().find(|(name, time)| after.get(*name) != Some(time)) {
        Some((name, _)) => Err(refuse(
            folder,
            format!("{name} changed while it was read: wait until whoever writes the folder is done"),
        )),
        None => Ok(checkpoint),
    }
}

/// Size and modification time of every file that is read.
fn times(folder: &Path) -> Result<BTreeMap<String, (u64, Option<SystemTime>)>, Error> {
    let entries = fs::read_dir(folder).map_err(io("read", folder))?;
    entries
        .map(|entry| {
            let entry = entry?;
            let metadata = entry.metadata()?;
            let name = entry.file_name().to_string_lossy().into_owned();
            Ok((name, (metadata.len(), metadata.modified().ok())))
        })
        .filter(|file| file.as_ref().map_or(true, |(name, _)| is_read(name)))
        .collect::<std::io::Result<_>>()
        .map_err(io("read", folder))
}

/// Whether a file of this name is read: weights, their index, and the files in [`FILES`].
pub fn is_read(name: &str) -> bool {
    name.ends_with(".safetensors") || name == INDEX || FILES.contains(&name)
}

fn read_files(folder: &Path, load: &Load) -> Result<Checkpoint, Error> {
    let mut checkpoint = Checkpoint::default();
    let index = read_if_there(&folder.join(INDEX))?;
    let single = load_if_there(&folder.join(SINGLE), load)?;
    match (single, index) {
        (Some(_), Some(_)) => {
            return Err(refuse(folder, format!("both {SINGLE} and {INDEX} are there")));
        }
        (None, None) if times(folder)?.keys().any(|name| name.ends_with(".safetensors")) => {
            let reason = format!("there are shards and no {INDEX}, which comes last: {STILL_WRITTEN}");
            return Err(refuse(folder, reason));
        }
        (None, None) => {
            return Err(refuse(folder, format!("neither {SINGLE} nor {INDEX} is there")));
        }
        (Some(bytes), None) => read_tensors(&folder.join(SINGLE), &bytes, &mut checkpoint)?,
        (None, Some(bytes)) => read_shards(folder, &bytes, &mut checkpoint, load)?,
    }
    for &name in FILES {
        if let Some(bytes) = read_if_there(&folder.join(name))? {
            checkpoint.files.insert(name.into(), bytes);
        }
    }
    Ok(checkpoint)
}

fn read_shards(folder: &Path, index: &[u8], checkpoint: &mut Checkpoint, load: &Load) -> Result<(), Error> {
    let index_path = folder.join(INDEX);
    let index: Index = serde_json::from_slice(index).map_err(|error| refuse(&index_path, error.to_string()))?;
    let shards: BTreeSet<&String> = index.weight_map.values().collect();
    for &shard in &shards {
        // a name with a path in it could read files outside the folder
        if Path::new(shard).file_name() != Some(shard.as_ref()) {
            return Err(refuse(&index_path, format!("`{shard}` is not a file name")));
        }
        let path = folder.join(shard);
        let bytes = load_if_there(&path, load)?
            .ok_or_else(|| refuse(&index_path, format!("the shard {shard} is missing: {STILL_WRITTEN}")))?;
        let mut part = Checkpoint::default();
        read_tensors(&path, &bytes, &mut part)?;
        for (name, tensor) in part.tensors {
            if index.weight_map.get(&name) != Some(shard) {
                let reason = format!("`{name}` is in {shard}, where the index does not place it");
                return Err(refuse(&index_path, reason));
            }
            checkpoint.tensors.insert(name, tensor);
        }
    }
    match index
        .weight_map
        .keys()
        .find(|name| !checkpoint.tensors.contains_key(*name))
    {
        Some(name) => Err(refuse(&index_path, format!("`{name}` is in no shard"))),
        None => Ok(()),
    }
}

pub(crate) fn read_tensors(path: &Path, bytes: &Bytes, checkpoint: &mut Checkpoint) -> Result<(), Error> {
    let file = SafeTensors::deserialize(bytes).map_err(|error| refuse(path, format!("{error}: {STILL_WRITTEN}")))?;
    for (name, view) in file.iter() {
        let data = bytes.slice_ref(view.data());
        let tensor = TensorData::new(view.dtype(), view.shape().to_vec(), data)?;
        checkpoint.tensors.insert(name.into(), tensor);
    }
    Ok(())
}

pub(crate) fn write(checkpoint: &Checkpoint, folder: &Path, shard_bytes_max: u64) -> Result<(), Error> {
    fs::create_dir_all(folder).map_err(io("create", folder))?;
    if let Some(name) = checkpoint.files.keys().find(|name| !FILES.contains(&name.as_str())) {
        return Err(refuse(folder, format!("`{name}` is not a file of a model folder")));
    }
    let shards = shards(checkpoint, shard_bytes_max);
    let other_layout = if shards.len() == 1 { INDEX } else { SINGLE };
    if folder.join(other_layout).exists() {
        return Err(refuse(folder, format!("{other_layout} of other weights is there")));
    }
    let mut index = Index {
        metadata: serde_json::json!({ "total_size": checkpoint.tensor_bytes() }),
        weight_map: BTreeMap::new(),
    };
    for (i, names) in shards.iter().enumerate() {
        let file = match shards.len() {
            1 => SINGLE.to_string(),
            count => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        write_tensors(&folder.join(&file), checkpoint, names)?;
        index
            .weight_map
            .extend(names.iter().map(|&name| (name.clone(), file.clone())));
    }
    for (name, bytes) in &checkpoint.files {
        let path = folder.join(name);
        atomic::replace(&path, &[bytes]).map_err(io("write", &path))?;
    }
    // last, because the index makes a folder of shards readable
    if shards.len() > 1 {
        let path = folder.join(INDEX);
        let json = serde_json::to_vec_pretty(&index).map_err(|error| refuse(&path, error.to_string()))?;
        atomic::replace(&path, &[&json]).map_err(io("write", &path))?;
    }
    Ok(())
}

/// Tensor names per shard, in name order; at least one shard.
fn shards(checkpoint: &Checkpoint, shard_bytes_max: u64) -> Vec<Vec<&String>> {
    let mut shards = vec![vec![]];
    let mut size = 0;
    for (name, tensor) in &checkpoint.tensors {
        let bytes = tensor.bytes.len() as u64;
        if size > 0 && size + bytes > shard_bytes_max {
            shards.push(vec![]);
            size = 0;
        }
        size += bytes;
        if let Some(shard) = shards.last_mut() {
            shard.push(name);
        }
    }
    shards
}

fn write_tensors(path: &Path, checkpoint: &Checkpoint, names: &[&String]) -> Result<(), Error> {
    let views = names
        .iter()
        .filter_map(|&name| Some((name, checkpoint.tensors.get(name)?)))
        .map(|(name, tensor)| {
            let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes);
            Ok((name, view?))
        })
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>();
    // transformers refuses a file without a framework name
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    let views = views.map_err(|error| refuse(path, error.to_string()))?;
    let write = |temporary: &Path| safetensors::serialize_to_file(views, Some(metadata), temporary);
    let written = atomic::replace_by(path, |temporary, _| write(temporary).map_err(std::io::Error::other));
    written.map_err(io("write", path))
}

fn read_if_there(path: &Path) -> Result<Option<Bytes>, Error> {
    load_if_there(path, &|file| fs::read(file).map(Bytes::from))
}

fn load_if_there(path: &Path, load: &Load) -> Result<Option<Bytes>, Error> {
    match load(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io("read", path)(error)),
    }
}

fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.display().to_string();
    move |source| Error::Io { action, path, source }
}

fn refuse(path: &Path, reason: String) -> Error {
    Error::Folder {
        path: path.display().to_string(),
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::tests::sample;

    pub(super) fn model() -> Checkpoint {
        let mut checkpoint = sample();
        checkpoint.files = [
            ("config.json".to_string(), Bytes::from_static(b"{}\n")),
            ("tokenizer.json".to_string(), Bytes::from_static(b"{\"a\": 1}")),
        ]
        .into();
        checkpoint
    }

    #[test]
    fn a_single_file_folder_is_read_back_bit_for_bit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/model");
        model().write_dir(&path).unwrap();
        // once more over itself, and with a file that is none of the model's
        model().write_dir(&path).unwrap();
        fs::write(path.join("README.md"), "a card").unwrap();
        assert_eq!(Checkpoint::read_dir(&path).unwrap(), model());
        assert_eq!(Checkpoint::read_dir(&path).unwrap().root(), model().root());
    }

    #[test]
    fn shards_are_written_with_an_index_and_read_back() {
        let folder = tempfile::tempdir().unwrap();
        write(&model(), folder.path(), 13).unwrap();
        let shards = fs::read_dir(folder.path())
            .unwrap()
            .filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().contains("-of-00002"))
            .count();
        assert_eq!(shards, 2);
        assert_eq!(Checkpoint::read_dir(folder.path()).unwrap(), model());
        // the other layout would leave two sets of weights in one folder
        assert!(model().write_dir(folder.path()).is_err());
    }

    #[test]
    fn a_missing_shard_a_misplaced_tensor_and_a_climbing_name_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        write(&model(), path, 13).unwrap();
        let index: Index = serde_json::from_slice(&fs::read(path.join(INDEX)).unwrap()).unwrap();
        let with = |change: &dyn Fn(&mut BTreeMap<String, String>)| {
            let mut map = index.weight_map.clone();
            change(&mut map);
            let index = serde_json::json!({ "weight_map": map });
            fs::write(path.join(INDEX), index.to_string()).unwrap();
            Checkpoint::read_dir(path).unwrap_err().to_string()
        };
        let error = with(&|map| drop(map.insert("a.weight".into(), "gone.safetensors".into())));
        assert!(error.contains("a.weight") || error.contains("gone"), "{error}");
        let error = with(&|map| drop(map.remove("b.scalar")));
        assert!(error.contains("b.scalar"), "{error}");
        let error = with(&|map| drop(map.insert("zzz".into(), map["a.weight"].clone())));
        assert!(error.contains("zzz"), "{error}");
        let error = with(&|map| drop(map.insert("zzz".into(), "../x.safetensors".into())));
        assert!(error.contains("not a file name"), "{error}");
    }

    #[test]
    fn an_empty_or_ambiguous_folder_and_a_broken_file_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        assert!(Checkpoint::read_dir(path).is_err());
        assert!(Checkpoint::read_dir(&path.join("missing")).is_err());
        model().write_dir(path).unwrap();
        let good = fs::read(path.join(SINGLE)).unwrap();
        fs::write(path.join(SINGLE), &good[..good.len() - 1]).unwrap();
        assert!(Checkpoint::read_dir(path).is_err());
        fs::write(path.join(SINGLE), &good).unwrap();
        fs::write(path.join(INDEX), "{\"weight_map\": {}}").unwrap();
        assert!(Checkpoint::read_dir(path).unwrap_err().to_string().contains("both"));
    }

    #[test]
    fn a_folder_that_is_still_being_written_is_refused_with_a_clear_message() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        write(&model(), path, 13).unwrap();
        let index = fs::read(path.join(INDEX)).unwrap();
        let refused = || Checkpoint::read_dir(path).unwrap_err().to_string();
        fs::remove_file(path.join(INDEX)).unwrap();
        assert!(refused().contains("comes last"), "{}", refused());
        fs::write(path.join(INDEX), &index).unwrap();
        let shard = path.join("model-00002-of-00002.safetensors");
        let bytes = fs::read(&shard).unwrap();
        fs::write(&shard, &bytes[..bytes.len() - 2]).unwrap();
        assert!(refused().contains("still being written"), "{}", refused());
        fs::remove_file(&shard).unwrap();
        assert!(refused().contains("still being written"), "{}", refused());
        fs::write(&shard, &bytes).unwrap();
        assert_eq!(Checkpoint::read_dir(path).unwrap(), model());
    }

    #[test]
    fn a_file_that_no_folder_would_read_back_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        assert!(sample().write_dir(folder.path()).is_err());
    }
}
