//! `springtide train sft`: trains a model from text on this machine, without the stack.

use std::time::{Duration, Instant};

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use model::config::{Family, ModelConfig};
use model::exact::Compute;
use springtide::cli::train::{Precision, Sft};
use trainer::sft;

/// Between two lines of progress where there is no terminal to draw a bar on.
const LINE_EVERY: Duration = Duration::from_secs(30);

pub fn run(args: Sft) -> anyhow::Result<()> {
    let start = match (args.from, &args.shape) {
        (Some(dir), _) => sft::Start::Model(dir),
        (None, Some(path)) => {
            let json = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
            sft::Start::Random(Box::new(ModelConfig::from_json(&json)?))
        }
        (None, None) => sft::Start::Random(Box::new(demo_shape())),
    };
    let style = ProgressStyle::with_template("{bar:30} step {pos}/{len}  {msg}  {elapsed}, {eta} to go")?;
    let bar = ProgressBar::new(args.steps as u64).with_style(style);
    let options = sft::Options {
        data: args.data,
        out: args.out.clone(),
        start,
        steps: args.steps,
        batch: args.batch,
        matrix_rate: args.matrix_rate,
        vector_rate: args.vector_rate,
        seed: args.seed,
        threads: args.threads,
        compute: match args.precision {
            Some(Precision::F32) => Compute::F32,
            Some(Precision::Bf16) => Compute::Bf16,
            None => sft::faster_compute(),
        },
    };
    let started = Instant::now();
    let mut lines = 0;
    let held_out = sft::run(&options, |progress| {
        let loss = format!("loss {:.3} nats per token", progress.loss);
        bar.set_position(progress.step as u64);
        if bar.is_hidden() && started.elapsed() >= LINE_EVERY * (lines + 1) {
            lines += 1;
            let seconds = started.elapsed().as_secs();
            eprintln!("step {}/{}  {loss}  {seconds} s", progress.step, progress.steps);
        }
        bar.set_message(loss);
    })?;
    bar.finish();
    println!(
        "held-out loss in nats per token: {:.4} for all text, {:.4} for rests of lines",
        held_out.text, held_out.rest
    );
    println!("written to {}", args.out.display());
    Ok(())
}
/// 6 layers of width 256, vocabulary 2048, context 256 tokens.
fn demo_shape() -> ModelConfig {
    ModelConfig {
        vocab_size: 2048,
        hidden_size: 256,
        intermediate_size: 704,
        num_hidden_layers: 6,
        num_attention_heads: 4,
        num_key_value_heads: 4,
        head_dim: 64,
        rms_norm_eps: 1e-6,
        max_position_embeddings: 256,
        tie_word_embeddings: true,
        qk_norm: true,
        family: Family::Qwen3,
        ..ModelConfig::default()
    }
}
