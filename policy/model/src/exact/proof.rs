//! The proof, on the machine at hand, that the same tokens have the same bits however they are computed.

use super::{Error, ExactModel, KvCache, Machine};
use artifact::isa::Isa;
use artifact::threads::Threads;
use std::sync::Once;

/// Tokens of the longest sequence: across a panel of 32 positions.
const TOKENS: usize = 40;
/// Larger models are not computed on slower instructions as well: they would keep a start waiting.
const WEIGHTS_MAX: usize = 16_000_000;

impl ExactModel {
    /// [`prove_exact`](Self::prove_exact), once in a process, told to its log.
    pub fn prove_exact_once(&self) {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| match self.prove_exact() {
            Ok(None) => tracing::info!(
                instructions = ?Isa::best(),
                compute = ?self.compute(),
                threads = self.arithmetic.threads.count(),
                "the forward pass is exact on this machine: sampled and recomputed log-probabilities have the same bits"
            ),
            Ok(Some(why)) => tracing::error!(
                instructions = ?Isa::best(),
                compute = ?self.compute(),
                threads = self.arithmetic.threads.count(),
                why,
                "THE FORWARD PASS IS NOT EXACT ON THIS MACHINE: log-probabilities that are recomputed are only near the logged \
                 ones; SPRINGTIDE_ISA=portable computes without vector instructions"
            ),
            Err(error) => tracing::error!(%error, "the forward pass could not be proved exact on this machine"),
        });
    }

    /// Computes a few tokens of these weights in every way that a sampler and a trainer do, on one thread and on two, small
    /// models also on every kind of instruction of this machine, and compares the bits. `Ok(Some(…))` says what differs: then log-probabilities that are recomputed are
    /// near the logged ones, as everywhere else, and not equal to them.
    pub fn prove_exact(&self) -> Result<Option<String>, Error> {
        let tokens = TOKENS.min(self.config.max_position_embeddings as usize);
        let ids: Vec<u32> = (0..tokens as u32)
            .map(|i| i * 7919 % self.config.vocab_size as u32)
            .collect();
        let (prompt, rest) = ids.split_at(tokens / 3);
        let asked: Vec<usize> = (prompt.len().saturating_sub(1)..tokens).collect();
        let reference = self.score(&[&ids], &asked, None)?.logits;
        let differs = |what: &str, rows: &[Vec<f32>]| {
            let same = |(a, b): (&[f32], &Vec<f32>)| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
            let equal = rows.len() == reference.len() && reference.rows().zip(rows).all(same);
            (!equal).then(|| format!("{what} does not give the bits of the trainer's pass"))
        };
        if prompt.is_empty() {
            return Ok(None);
        }
        // beside another sequence, token by token
        let mut cache = KvCache::new(self, 2, tokens);
        let mut decoded = vec![self.prefill(&mut cache, 0, prompt)?];
        self.prefill(&mut cache, 1, &ids[..1])?;
        for (step, &id) in rest.iter().enumerate() {
            decoded.push(self.decode(&mut cache, &[id, ids[step]])?.swap_remove(0));
        }
        cache.clear(0);
        let mut chunked = Vec::new();
        for chunk in ids.chunks(7) {
            chunked = self.prefill(&mut cache, 0, chunk)?;
        }
        let last = |rows: &[Vec<f32>]| rows.last().is_some_and(|row| row == &chunked);
        let mut found = differs("decoding from the cache", &decoded)
            .or((!last(&decoded)).then(|| "a prompt in chunks does not give the bits of decoding".to_string()));
        let mut others = vec![(self.isa, Threads::new(2)?.eager(), "on two threads".to_string())];
        if self.work <= WEIGHTS_MAX {
            let one = |isa| (isa, Threads::ONE, format!("with {isa:?}"));
            others.extend(Isa::available().into_iter().map(one));
        }
        for (isa, threads, how) in &others {
            let machine = Machine { isa: *isa, threads };
            let logits = self.score_on(machine, &[&ids], &asked, None)?.logits;
            let rows: Vec<Vec<f32>> = logits.rows().map(<[f32]>::to_vec).collect();
            found = found.or(differs(&format!("computing {how}"), &rows));
        }
        Ok(found)
    }
}
