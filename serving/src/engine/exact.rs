//! The engine's backend for our exact kernels: a version's weights and its KV cache.

use super::backend::{Backend, Step};
use anyhow::Context;
use artifact::checkpoint::Checkpoint;
use artifact::threads::Threads;
use model::config::ModelConfig;
use model::exact::{Arithmetic, ExactModel, KvCache};
use model::router::Routing;

/// Weights and cache of one version, in the exact arithmetic that the trainer repeats.
#[derive(Debug)]
pub struct ExactBackend {
    model: ExactModel,
    cache: KvCache,
}

/// How a replica builds backends.
#[derive(Debug)]
pub struct Staging {
    pub arithmetic: Arithmetic,
    /// Weights are packed on these threads, to leave the engine's threads to running requests.
    pub packing: Threads,
    /// Sequences that one version decodes together.
    pub slots: usize,
    /// Longest prompt and completion together, in tokens.
    pub context: usize,
}

impl ExactBackend {
    /// Builds the model while others serve, and runs two tokens through it. This warms its memory
    /// and refuses a version with non-finite logits before anyone is routed to it.
    pub fn stage(checkpoint: &Checkpoint, staging: &Staging) -> anyhow::Result<Self> {
        let model = ExactModel::packed_on(checkpoint, &staging.arithmetic, &staging.packing)?;
        let cache = KvCache::new(&model, staging.slots, staging.context);
        let mut backend = ExactBackend { model, cache };
        let mut steps = backend.advance(&[(0, &[0])])?;
        steps.extend(backend.advance(&[(0, &[0])])?);
        backend.cache.clear(0);
        anyhow::ensure!(
            steps
                .iter()
                .flat_map(|step| &step.logits)
                .all(|logit| logit.is_finite()),
            "the model's logits are not finite"
        );
        backend.model.self_check_once();
        Ok(backend)
    }

    /// Longest sequence, in tokens.
    pub fn context(&self) -> usize {
        self.cache.context()
    }

    /// Keys and values of every slot of a version, before it is staged.
    pub fn cache_bytes_for(checkpoint: &Checkpoint, staging: &Staging) -> anyhow::Result<u64> {
        let json = checkpoint.files.get("config.json").context("config.json is missing")?;
        let config = ModelConfig::from_json(json)?;
        let compute = staging.arithmetic.compute;
        Ok(KvCache::bytes_for(&config, staging.slots, staging.context, compute))
    }

    /// Experts per layer of a mixture-of-experts model.
    pub fn experts(&self) -> Option<u16> {
        let experts = self.model.config().experts.as_ref()?;
        u16::try_from(experts.count).ok()
    }

    pub fn vocab(&self) -> u32 {
        u32::try_from(self.model.config().vocab_size).unwrap_or(u32::MAX)
    }
}

impl Backend for ExactBackend {
    fn slots(&self) -> usize {
        self.cache.slots()
    }

    fn advance(&mut self, segments: &[(usize, &[u32])]) -> anyhow::Result<Vec<Step>> {
        let mut routing = Routing::default();
        let rows = self.model.advance(&mut self.cache, segments, Some(&mut routing))?;
        let routings = routing.split(segments.iter().map(|(_, ids)| ids.len()));
        let steps = rows.into_iter().zip(routings);
        Ok(steps.map(|(logits, routing)| Step { logits, routing }).collect())
    }

    fn copy_prefix(&mut self, from: usize, to: usize, tokens: usize) {
        self.cache.copy_prefix(from, to, tokens);
    }
}
