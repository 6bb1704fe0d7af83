//! A version's network and its KV cache, as the engine sees them.

use super::model::Model;
use policy::image::Image;
use policy::network::{KvCache, Network};

/// Weights and cache of one version: f32 values of the published bf16.
#[derive(Debug)]
pub struct Resident {
    network: Network,
    cache: KvCache,
}

impl Resident {
    /// Builds the network beside whatever serves, and runs one token through it: the first request finds warm memory, and
    /// a version that computes nonsense is refused before anyone is routed to it.
    pub fn stage(image: &Image, slots: usize, context: usize) -> anyhow::Result<Self> {
        tch::set_num_threads(1);
        let network = Network::from_image(image)?;
        let cache = KvCache::new(&network, slots, context);
        let mut resident = Resident { network, cache };
        let logits = resident.prefill(0, &[0])?;
        let stepped = resident.decode(&[0])?;
        resident.clear(0);
        anyhow::ensure!(
            logits.iter().chain(stepped.iter().flatten()).all(|l| l.is_finite()),
            "the network's logits are not finite"
        );
        Ok(resident)
    }

    /// Longest sequence, in tokens.
    pub fn context(&self) -> usize {
        self.cache.context()
    }

    /// Keys and values of every slot, f32.
    pub fn cache_bytes(&self) -> u64 {
        let c = self.network.config();
        let per_token = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 4;
        per_token as u64 * (self.cache.slots() * self.cache.context()) as u64
    }

    pub fn vocab(&self) -> u32 {
        u32::try_from(self.network.config().vocab_size).unwrap_or(u32::MAX)
    }
}

impl Model for Resident {
    fn slots(&self) -> usize {
        self.cache.slots()
    }

    fn prefill(&mut self, slot: usize, ids: &[u32]) -> anyhow::Result<Vec<f32>> {
        self.cache.clear(slot);
        Ok(self.network.prefill(&mut self.cache, slot, ids)?)
    }

    fn decode(&mut self, tokens: &[u32]) -> anyhow::Result<Vec<Vec<f32>>> {
        Ok(self.network.decode(&mut self.cache, tokens)?)
    }

    fn move_slot(&mut self, from: usize, to: usize) {
        self.cache.move_slot(from, to);
    }

    fn clear(&mut self, slot: usize) {
        self.cache.clear(slot);
    }
}
