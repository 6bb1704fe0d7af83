//! What the model itself can do: the same prompts and as many tokens through the engine's backend,
//! without sampling, scheduler, log or HTTP. A served rate is judged by its share of this one.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use artifact::checkpoint::Checkpoint;
use artifact::threads::Threads;
use model::exact::{Arithmetic, Compute};
use serving::engine::backend::Backend;
use serving::engine::exact::{ExactBackend, Staging};

pub struct Kernel {
    checkpoint: Checkpoint,
    threads: usize,
}

/// How long one batch of sequences took.
pub struct Batch {
    /// From the first prompt's first token until every prompt was read.
    pub prompts: Duration,
    pub all: Duration,
}

impl Kernel {
    pub fn read(model: &Path, threads: usize) -> anyhow::Result<Self> {
        let checkpoint = Checkpoint::read_dir(model).with_context(|| format!("read {}", model.display()))?;
        Ok(Kernel { checkpoint, threads })
    }

    /// Room for as many sequences of `tokens` tokens.
    pub fn stage(&self, sequences: usize, tokens: usize) -> anyhow::Result<ExactBackend> {
        let staging = Staging {
            arithmetic: Arithmetic::new(Compute::F32, self.threads)?,
            packing: Threads::ONE,
            slots: sequences,
            context: tokens,
        };
        ExactBackend::stage(&self.checkpoint, &staging)
    }
}

/// Reads one prompt per slot, at most 256 tokens in a pass, then extends all sequences together by
/// the most probable ids.
pub fn run(backend: &mut ExactBackend, prompts: &[Vec<u32>], max_tokens: usize) -> anyhow::Result<Batch> {
    const PROMPT_TOKENS_PER_PASS_MAX: usize = 256;
    let began = Instant::now();
    let mut last = vec![0; prompts.len()];
    for slot in 0..prompts.len() {
        backend.copy_prefix(slot, slot, 0);
    }
    let parts = prompts
        .iter()
        .enumerate()
        .flat_map(|(slot, prompt)| prompt.chunks(PROMPT_TOKENS_PER_PASS_MAX).map(move |part| (slot, part)));
    let mut pass: Vec<(usize, &[u32])> = Vec::new();
    let mut passes = Vec::new();
    for (slot, part) in parts {
        let tokens: usize = pass.iter().map(|(_, part)| part.len()).sum();
        if tokens + part.len() > PROMPT_TOKENS_PER_PASS_MAX || pass.iter().any(|(other, _)| *other == slot) {
            passes.push(std::mem::take(&mut pass));
        }
        pass.push((slot, part));
    }
    passes.push(pass);
    for pass in passes {
        for ((slot, _), step) in pass.iter().zip(backend.advance(&pass)?) {
            last[*slot] = most_probable(&step.logits);
        }
    }
    let read = began.elapsed();
    for _ in 1..max_tokens {
        let segments: Vec<(usize, &[u32])> = last.iter().map(std::slice::from_ref).enumerate().collect();
        let steps = backend.advance(&segments)?;
        last = steps.iter().map(|step| most_probable(&step.logits)).collect();
    }
    Ok(Batch {
        prompts: read,
        all: began.elapsed(),
    })
}

fn most_probable(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
    best.map_or(0, |(id, _)| id as u32)
}
