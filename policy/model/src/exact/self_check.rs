//! Checks on this machine that all ways to compute the same tokens give the same bits.

use super::{Error, ExactModel, KvCache, Machine};
use artifact::isa::Isa;
use artifact::threads::Threads;
use std::sync::Once;

/// Tokens of the longest sequence. It crosses a panel of 32 positions.
const TOKENS: usize = 40;
/// Larger models are not checked on slower instruction sets, which would delay the start.
const WEIGHTS_MAX: usize = 16_000_000;

impl ExactModel {
    /// Runs [`self_check`](Self::self_check) once per process and logs the result.
    pub fn self_check_once(&self) {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| match self.self_check() {
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
                "THE FORWARD PASS IS NOT EXACT ON THIS MACHINE: recomputed log-probabilities are only close to the logged ones; \
                 set SPRINGTIDE_ISA=portable to compute without vector instructions"
            ),
            Err(error) => tracing::error!(%error, "could not check whether the forward pass is exact on this machine"),
        });
    }

    /// Computes a few tokens in every way that samplers and trainers do, and compares the bits.
    ///
    /// The ways are prefill, chunked prefill, decode and score, on one thread and on two. Small
    /// models also run on every instruction set of this machine. `Ok(Some(…))` names the
    /// difference. Recomputed log-probabilities are then close to the logged ones, but not equal.
    pub fn self_check(&self) -> Result<Option<String>, Error> {
        let tokens = TOKENS.min(self.config.context() as usize);
        let ids: Vec<u32> = (0..tokens as u32)
            .map(|i| i * 7919 % self.config.vocab_size as u32)
            .collect();
        let (prompt, rest) = ids.split_at(tokens / 3);
        let logit_rows: Vec<usize> = (prompt.len().saturating_sub(1)..tokens).collect();
        let reference = self.score(&[&ids], &logit_rows, None)?.logits;
        let differs = |what: &str, rows: &[Vec<f32>]| {
            let same = |(a, b): (&[f32], &Vec<f32>)| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
            let equal = rows.len() == reference.len() && reference.rows().zip(rows).all(same);
            (!equal).then(|| format!("{what} does not give the bits of the trainer's pass"))
        };
        if prompt.is_empty() {
            return Ok(None);
        }
        // Token by token, beside another sequence.
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
            let logits = self.pass_on(machine, &[&ids], &logit_rows, None, None)?.logits;
            let rows: Vec<Vec<f32>> = logits.rows().map(<[f32]>::to_vec).collect();
            found = found.or(differs(&format!("computing {how}"), &rows));
        }
        Ok(found)
    }
}
