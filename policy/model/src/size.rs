//! How large a model is, before a weight of it is read.

use crate::config::ModelConfig;
use crate::exact::Error;
use artifact::folder::LazyFolder;
use bytes::Bytes;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// The size of one version.
#[derive(Debug, Clone, PartialEq)]
pub struct Size {
    pub config: ModelConfig,
    /// Of the tensors of its checkpoint.
    pub tensor_bytes: u64,
    /// Bytes of its weights once they are packed for our kernels.
    pub packed_bytes: u64,
}

impl Size {
    /// Of a Hugging Face folder, from its headers.
    pub fn of_folder(folder: &Path) -> Result<Self, Error> {
        let folder = LazyFolder::open(folder).map_err(|error| Error::Checkpoint(error.to_string()))?;
        Self::of_files(&folder.files, folder.tensor_bytes())
    }

    /// Of a version with these files.
    pub fn of_files(files: &BTreeMap<String, Bytes>, tensor_bytes: u64) -> Result<Self, Error> {
        #[derive(Deserialize)]
        struct Declared {
            #[serde(alias = "torch_dtype")]
            dtype: Option<String>,
        }
        let json = files.get("config.json");
        let json = json.ok_or_else(|| Error::Checkpoint("config.json is missing".into()))?;
        let declared = serde_json::from_slice::<Declared>(json)
            .ok()
            .and_then(|declared| declared.dtype);
        Ok(Size {
            config: ModelConfig::from_json(json)?,
            tensor_bytes,
            // bf16 and f32 stay as they are, f16 becomes f32
            packed_bytes: match declared.as_deref() {
                Some("float16") => tensor_bytes.saturating_mul(2),
                _ => tensor_bytes,
            },
        })
    }

    /// The number of weights of the parameters that are `wanted` by name.
    pub fn weights(&self, wanted: impl Fn(&str) -> bool) -> u64 {
        let shapes = self.config.parameter_shapes();
        let wanted = shapes.iter().filter(|(name, _)| wanted(name));
        wanted
            .map(|(_, shape)| shape.iter().product::<i64>().unsigned_abs())
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folders_size_is_that_of_its_checkpoint() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen3");
        let checkpoint = artifact::checkpoint::Checkpoint::read_dir(&folder).unwrap();
        let size = Size::of_folder(&folder).unwrap();
        assert_eq!(size.tensor_bytes, checkpoint.tensor_bytes());
        let weights: usize = checkpoint
            .tensors
            .values()
            .map(|one| one.shape.iter().product::<usize>())
            .sum();
        assert_eq!(size.weights(|_| true), weights as u64);
        assert!(size.weights(|name| name.ends_with("norm.weight")) < weights as u64);
        let half = Bytes::from_static(
            br#"{"model_type": "llama", "torch_dtype": "float16", "vocab_size": 8, "hidden_size": 8,
                 "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 8,
                 "rms_norm_eps": 1e-5, "hidden_act": "silu", "architectures": ["LlamaForCausalLM"]}"#,
        );
        let size = Size::of_files(&BTreeMap::from([("config.json".to_owned(), half)]), 100).unwrap();
        assert_eq!((size.tensor_bytes, size.packed_bytes), (100, 200));
        assert!(Size::of_folder(Path::new("/nowhere")).is_err());
    }
}
