//! A version's weights and its KV cache, as the engine sees them.

use super::model::Model;
use policy::image::Image;
use policy::model::{self, Arithmetic, KvCache};

/// Weights and cache of one version, in the exact arithmetic that the trainer repeats.
#[derive(Debug)]
pub struct Resident {
    model: model::Model,
    cache: KvCache,
}

impl Resident {
    /// Builds the model beside whatever serves, and runs one token through it: the first request finds warm memory, and
    /// a version that computes nonsense is refused before anyone is routed to it.
    pub fn stage(image: &Image, arithmetic: &Arithmetic, slots: usize, context: usize) -> anyhow::Result<Self> {
        let model = model::Model::with_arithmetic(image, arithmetic)?;
        let cache = KvCache::new(&model, slots, context);
        let mut resident = Resident { model, cache };
        let logits = resident.prefill(0, &[0])?;
        let stepped = resident.decode(&[0])?;
        resident.clear(0);
        anyhow::ensure!(
            logits.iter().chain(stepped.iter().flatten()).all(|l| l.is_finite()),
            "the model's logits are not finite"
        );
        resident.model.prove_exact_once();
        Ok(resident)
    }

    /// Longest sequence, in tokens.
    pub fn context(&self) -> usize {
        self.cache.context()
    }

    /// Keys and values of every slot.
    pub fn cache_bytes(&self) -> u64 {
        self.cache.bytes()
    }

    pub fn vocab(&self) -> u32 {
        u32::try_from(self.model.config().vocab_size).unwrap_or(u32::MAX)
    }
}

impl Model for Resident {
    fn slots(&self) -> usize {
        self.cache.slots()
    }

    fn prefill(&mut self, slot: usize, ids: &[u32]) -> anyhow::Result<Vec<f32>> {
        self.cache.clear(slot);
        Ok(self.model.prefill(&mut self.cache, slot, ids)?)
    }

    fn decode(&mut self, tokens: &[u32]) -> anyhow::Result<Vec<Vec<f32>>> {
        Ok(self.model.decode(&mut self.cache, tokens)?)
    }

    fn move_slot(&mut self, from: usize, to: usize) {
        self.cache.move_slot(from, to);
    }

    fn clear(&mut self, slot: usize) {
        self.cache.clear(slot);
    }
}
