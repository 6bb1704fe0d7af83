//! Consecutive checkpoints of the learner's own training, for `make bench NAME=delta`.
//!
//! A model with random weights samples bytes, is rewarded for bytes that are frequent in English,
//! and learns by REINFORCE on its own samples with AdamW. The last `--keep` versions of each
//! learning rate are written as Hugging Face folders `OUT/lr-RATE/STEP`. Standard output says what
//! each step changed.

use std::path::PathBuf;
use std::sync::Arc;

use model::config::{Family, ModelConfig};
use model::exact::{Arithmetic, Compute, ExactModel, KvCache};
use model::random_checkpoint;
use model::sampling::{self, Params, Source};
use runs::sample::Sample;
use runs::settings::{Limits, OptimizerSettings, StepSettings};
use trainer::learn::learner::{Learner, Outcome};
use uuid::Uuid;

const PROMPT: usize = 8;
const SEQUENCES: usize = 16;
const TOKENS: usize = 24;
/// Bytes by how often English has them, the most frequent first: the reward of a byte falls with
/// its place.
const FREQUENT: &[u8] = b" etaoinshrdlcumwfgypbvk";

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (mut out, mut rates, mut steps, mut keep) = (PathBuf::from("checkpoints"), vec![1e-6], 200, 3);
    while let Some(argument) = arguments.next() {
        let mut value = || {
            arguments
                .next()
                .ok_or_else(|| anyhow::anyhow!("{argument} needs a value"))
        };
        match argument.as_str() {
            "--out" => out = value()?.into(),
            "--rates" => rates = value()?.split(',').map(str::parse).collect::<Result<Vec<f64>, _>>()?,
            "--steps" => steps = value()?.parse()?,
            "--keep" => keep = value()?.parse()?,
            // given by `cargo bench`
            "--bench" => {}
            other => anyhow::bail!("{other} is not known: --out DIR, --rates 1e-6,1e-5, --steps 200, --keep 3"),
        }
    }
    for rate in rates {
        train(&out.join(format!("lr-{rate:e}")), rate, steps, keep)?;
    }
    Ok(())
}

fn model() -> ModelConfig {
    ModelConfig {
        vocab_size: 256,
        hidden_size: 512,
        intermediate_size: 1536,
        num_hidden_layers: 8,
        num_attention_heads: 8,
        num_key_value_heads: 8,
        head_dim: 64,
        rms_norm_eps: 1e-6,
        max_position_embeddings: 64,
        tie_word_embeddings: true,
        qk_norm: true,
        family: Family::Qwen3,
        ..ModelConfig::default()
    }
}

fn train(out: &std::path::Path, rate: f64, steps: usize, keep: usize) -> anyhow::Result<()> {
    let arithmetic = Arithmetic::new(Compute::F32, 1)?;
    let mut learner = Learner::with_arithmetic(Arc::new(random_checkpoint(&model(), 5)), arithmetic.clone())?;
    let settings = StepSettings {
        optimizer: OptimizerSettings {
            learning_rate: rate,
            ..OptimizerSettings::default()
        },
        ..StepSettings::default()
    };
    let limits = Limits {
        gradient_norm_max: f64::MAX,
        ..Limits::default()
    };
    for step in 1..=steps {
        let model = ExactModel::with_arithmetic(learner.checkpoint(), &arithmetic)?;
        let samples = sampled(&model, step as u64)?;
        let mean = samples.iter().map(|sample| sample.reward).sum::<f64>() / samples.len() as f64;
        let advantages: Vec<f64> = samples.iter().map(|sample| sample.reward - mean).collect();
        match learner.propose(&samples, &advantages, &settings, &limits)? {
            Outcome::Proposed(proposal) => {
                let metrics = &proposal.metrics;
                let share = metrics.changed_weights as f64 / metrics.total_weights as f64;
                println!(
                    "lr {rate:e} step {step}: reward {mean:.4}, gradient norm {:.3}, {:.3}% changed, {:.1} s",
                    metrics.gradient_norm,
                    100.0 * share,
                    metrics.seconds
                );
            }
            Outcome::Empty(_) => anyhow::bail!("step {step} has no gradient"),
            Outcome::Refused { breach, .. } => anyhow::bail!("step {step} was refused: {breach}"),
        }
        learner.accept();
        if step + keep > steps {
            learner.checkpoint().write_dir(&out.join(format!("{step:06}")))?;
        }
    }
    Ok(())
}

/// Completions of the model as it is, all of a length.
fn sampled(model: &ExactModel, step: u64) -> anyhow::Result<Vec<Sample>> {
    let mut source = Source::new(step);
    let params = Params::default();
    let mut cache = KvCache::new(model, SEQUENCES, PROMPT + TOKENS);
    let mut samples = vec![];
    let mut logits = vec![];
    for slot in 0..SEQUENCES {
        let prompt: Vec<u32> = (0..PROMPT).map(|_| (source.uniform() * 256.0) as u32).collect();
        logits.push(model.prefill(&mut cache, slot, &prompt)?);
        samples.push(Sample {
            generation: Uuid::from_u64_pair(step, slot as u64),
            tenant: "default".into(),
            user: "u".into(),
            replica: "r".into(),
            engine: None,
            class: "bytes".into(),
            group: None,
            turn: None,
            version: 1,
            staleness: 0,
            prompt,
            tokens: vec![],
            logprobs: vec![],
            mask: vec![true; TOKENS],
            temperature: params.temperature,
            behavior: None,
            experts: None,
            reward: 0.0,
            kept: None,
            typed: None,
            suppressed: false,
            weight: 1.0,
        });
    }
    for _ in 0..TOKENS {
        let mut drawn = vec![];
        for (sample, logits) in samples.iter_mut().zip(&logits) {
            let (id, log_prob) = sampling::sample(logits, &params, &mut source);
            sample.tokens.push(id);
            sample.logprobs.push(log_prob);
            let place = FREQUENT.iter().position(|&byte| u32::from(byte) == id);
            sample.reward += place.map_or(0.0, |place| 1.0 - place as f64 / FREQUENT.len() as f64) / TOKENS as f64;
            drawn.push(id);
        }
        logits = model.decode(&mut cache, &drawn)?;
    }
    Ok(samples)
}
