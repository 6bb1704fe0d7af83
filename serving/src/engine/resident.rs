//! A version's weights and its KV cache, as the engine sees them.

use super::model::{Model, Step};
use policy::image::Image;
use policy::kernel::Threads;
use policy::model::{self, Arithmetic, KvCache};
use policy::router::Routing;

/// Weights and cache of one version, in the exact arithmetic that the trainer repeats.
#[derive(Debug)]
pub struct Resident {
    model: model::Model,
    cache: KvCache,
}

impl Resident {
    /// Builds the model beside whatever serves, and runs one token through it: the first request finds warm memory, and
    /// a version that computes nonsense is refused before anyone is routed to it. Weights are packed on `packing`, not on
    /// the threads that others' tokens are waiting for.
    pub fn stage(
        image: &Image,
        arithmetic: &Arithmetic,
        packing: &Threads,
        slots: usize,
        context: usize,
    ) -> anyhow::Result<Self> {
        let model = model::Model::packed_on(image, arithmetic, packing)?;
        let cache = KvCache::new(&model, slots, context);
        let mut resident = Resident { model, cache };
        let mut steps = vec![resident.prefill(0, &[0])?];
        steps.extend(resident.decode(&[0])?);
        resident.clear(0);
        anyhow::ensure!(
            steps.iter().flat_map(|step| &step.logits).all(|l| l.is_finite()),
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

    /// Experts that a layer of a mixture has.
    pub fn experts(&self) -> Option<u16> {
        let experts = self.model.config().experts.as_ref()?;
        u16::try_from(experts.count).ok()
    }

    pub fn vocab(&self) -> u32 {
        u32::try_from(self.model.config().vocab_size).unwrap_or(u32::MAX)
    }
}

impl Model for Resident {
    fn slots(&self) -> usize {
        self.cache.slots()
    }

    fn prefill(&mut self, slot: usize, ids: &[u32]) -> anyhow::Result<Step> {
        self.cache.clear(slot);
        let mut routing = Routing::default();
        let logits = self
            .model
            .advance(&mut self.cache, &[(slot, ids)], Some(&mut routing))?
            .swap_remove(0);
        Ok(Step { logits, routing })
    }

    fn decode(&mut self, tokens: &[u32]) -> anyhow::Result<Vec<Step>> {
        let segments: Vec<(usize, &[u32])> = tokens.chunks(1).enumerate().collect();
        let mut routing = Routing::default();
        let rows = self.model.advance(&mut self.cache, &segments, Some(&mut routing))?;
        let steps = rows.into_iter().zip(routing.by_row(tokens.len()));
        Ok(steps.map(|(logits, routing)| Step { logits, routing }).collect())
    }

    fn move_slot(&mut self, from: usize, to: usize) {
        self.cache.move_slot(from, to);
    }

    fn clear(&mut self, slot: usize) {
        self.cache.clear(slot);
    }
}
