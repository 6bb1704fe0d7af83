//! Versions that differ from the first one in 2% of its weights, each in others.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use artifact::checkpoint::Checkpoint;
use artifact::tensor::TensorData;
use model::config::ModelConfig;
use model::exact::ExactModel;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serving::engine::LoadedVersion;
use text::chat::Templates;

const CHANGED: f64 = 0.02;

pub struct Versions {
    first: Checkpoint,
    vocab: u32,
    seed: u64,
}

impl Versions {
    pub fn new(folder: &Path, seed: u64) -> anyhow::Result<Self> {
        let first = Checkpoint::read_dir(folder)?;
        let config = first.files.get("config.json").context("config.json is missing")?;
        let config = ModelConfig::from_json(config)?;
        let vocab = u32::try_from(config.vocab_size)?;
        Ok(Versions { first, vocab, seed })
    }

    /// Number of token ids.
    pub fn vocab(&self) -> u32 {
        self.vocab
    }

    /// Version 1 is the folder's. The changed weights of later ones are up to a third larger or smaller.
    pub fn checkpoint(&self, serial: i64) -> anyhow::Result<Checkpoint> {
        let mut checkpoint = self.first.clone();
        if serial == 1 {
            return Ok(checkpoint);
        }
        let mut random = StdRng::seed_from_u64(self.seed ^ (serial as u64) << 32);
        for tensor in checkpoint.tensors.values_mut() {
            let mut bytes = tensor.bytes.to_vec();
            for weight in bytes.chunks_exact_mut(2) {
                if random.random_bool(CHANGED) {
                    // bits of a bf16's mantissa: neither sign nor exponent change
                    weight[0] ^= random.random_range(1..0x40);
                }
            }
            *tensor = TensorData::new(tensor.dtype, tensor.shape.clone(), bytes)?;
        }
        Ok(checkpoint)
    }

    pub fn loaded(&self, serial: i64, checkpoint: &Checkpoint, context: usize) -> anyhow::Result<Arc<LoadedVersion>> {
        let reference = model::reference::of(&ExactModel::from_checkpoint(checkpoint)?)?;
        Ok(Arc::new(LoadedVersion {
            serial,
            root: checkpoint.root(),
            line: "bench".into(),
            adapts: None,
            context,
            vocab: self.vocab,
            stop_ids: vec![],
            experts: None,
            decline_id: None,
            tokenizer: None,
            reference: reference.map(Arc::new),
            templates: Templates::from_checkpoint(checkpoint).map(Arc::new).map_err(Arc::new),
        }))
    }
}
