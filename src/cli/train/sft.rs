//! `springtide train sft`: trains a model from text on this machine, without the stack.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use model::config::{Family, ModelConfig};
use model::exact::Compute;
use trainer::runs::sft;

/// The defaults make the demo's base model: about 5 million weights.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Folder of the windows and the tokenizer's files.
    #[arg(long)]
    data: PathBuf,
    /// Hugging Face folder to write.
    #[arg(long)]
    out: PathBuf,
    /// `config.json` with the model's shape [default: the demo's shape].
    #[arg(long, value_name = "FILE")]
    shape: Option<PathBuf>,
    /// Train this Hugging Face folder further instead of a new model. Its tokenizer must have made
    /// the windows.
    #[arg(long, value_name = "DIR", conflicts_with = "shape")]
    from: Option<PathBuf>,
    /// Optimizer updates.
    #[arg(long, default_value_t = 2000)]
    steps: usize,
    /// Windows per step.
    #[arg(long, default_value_t = 24)]
    batch: usize,
    /// Learning rate of matrices (Muon).
    #[arg(long, default_value_t = 0.02)]
    matrix_rate: f64,
    /// Learning rate of embeddings and norms (AdamW).
    #[arg(long, default_value_t = 3e-3)]
    vector_rate: f64,
    /// Seed of all random choices.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// CPU threads. More than one helps only on an idle machine.
    #[arg(long, default_value_t = 1)]
    threads: i32,
    /// Precision of matrix products. Weights and sums are f32 in both [default: the faster one on
    /// this CPU: bf16 where it has AVX512-BF16, else f32].
    #[arg(long)]
    precision: Option<Precision>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Precision {
    F32,
    Bf16,
}

/// Between two lines of progress where there is no terminal to draw a bar on.
const LINE_EVERY: Duration = Duration::from_secs(30);

impl Args {
    pub fn run(self) -> anyhow::Result<()> {
        let start = match (self.from, &self.shape) {
            (Some(dir), _) => sft::Start::Model(dir),
            (None, Some(path)) => {
                let json = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
                sft::Start::Random(Box::new(ModelConfig::from_json(&json)?))
            }
            (None, None) => sft::Start::Random(Box::new(demo_shape())),
        };
        let style = ProgressStyle::with_template("{bar:30} step {pos}/{len}  {msg}  {elapsed}, {eta} to go")?;
        let bar = ProgressBar::new(self.steps as u64).with_style(style);
        let options = sft::Options {
            data: self.data,
            out: self.out.clone(),
            start,
            steps: self.steps,
            batch: self.batch,
            matrix_rate: self.matrix_rate,
            vector_rate: self.vector_rate,
            seed: self.seed,
            threads: self.threads,
            compute: match self.precision {
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
        println!("written to {}", self.out.display());
        Ok(())
    }
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
