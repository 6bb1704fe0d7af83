//! Versions that are adapters: their tensors are the factors of an adapter, by PEFT's names, and their files are the
//! base's with `adapter_config.json`. The manifest names the base. In memory, base and factors are one [`Checkpoint`].

use crate::checkpoint::Checkpoint;
use crate::tensor::TensorData;

/// Begins the names of factors.
pub const PREFIX: &str = "base_model.model.";
/// What the factors mean.
pub const CONFIG: &str = "adapter_config.json";

fn is_factor(name: &str) -> bool {
    name.starts_with(PREFIX)
}

impl Checkpoint {
    /// Whether it has the factors of an adapter.
    pub fn has_adapter(&self) -> bool {
        self.files.contains_key(CONFIG)
    }

    fn tensors_where(&self, kept: impl Fn(&str) -> bool) -> impl Iterator<Item = (String, TensorData)> {
        let kept = self.tensors.iter().filter(move |(name, _)| kept(name));
        kept.map(|(name, tensor)| (name.clone(), tensor.clone()))
    }

    /// The adapter without its base.
    pub fn adapter(&self) -> Checkpoint {
        Checkpoint {
            tensors: self.tensors_where(is_factor).collect(),
            files: self.files.clone(),
        }
    }

    /// The base without an adapter.
    pub fn base(&self) -> Checkpoint {
        let mut files = self.files.clone();
        files.remove(CONFIG);
        Checkpoint {
            tensors: self.tensors_where(|name| !is_factor(name)).collect(),
            files,
        }
    }

    /// This base with an adapter, which shares its memory.
    pub fn with_adapter(&self, adapter: &Checkpoint) -> Checkpoint {
        Checkpoint {
            tensors: self
                .tensors_where(|name| !is_factor(name))
                .chain(adapter.tensors_where(is_factor))
                .collect(),
            files: adapter.files.clone(),
        }
    }
}
