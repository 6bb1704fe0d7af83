//! `springtide train sft`: trains a model from text, here and now, without the stack. The role `springtide train`, which
//! executes scheduled runs, is in `roles`; what a step does is the crate `trainer`'s.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use policy::config::{Family, ModelConfig};
use trainer::sft;

#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    pub command: Option<Command>,
}

#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Train a model on the windows that `springtide corpus build` made.
    Sft(Sft),
}

/// Defaults are the demo's base model: about 5 million weights.
#[derive(Debug, Clone, clap::Args)]
pub struct Sft {
    /// Folder with the windows and the tokenizer's files.
    #[arg(long)]
    data: PathBuf,
    /// Hugging Face folder to write.
    #[arg(long)]
    out: PathBuf,
    /// `config.json` of the model's shape, if it is not the demo's.
    #[arg(long, value_name = "FILE")]
    shape: Option<PathBuf>,
    /// Optimiser updates.
    #[arg(long, default_value_t = 2000)]
    steps: usize,
    /// Windows in one step.
    #[arg(long, default_value_t = 24)]
    batch: usize,
    /// Step size for matrices (Muon).
    #[arg(long, default_value_t = 0.02)]
    matrix_rate: f64,
    /// Step size for embeddings and norms (AdamW).
    #[arg(long, default_value_t = 3e-3)]
    vector_rate: f64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Processor threads; more than one helps only on an idle machine.
    #[arg(long, default_value_t = 1)]
    threads: i32,
}

pub fn run(command: &Command) -> anyhow::Result<ExitCode> {
    let Command::Sft(args) = command;
    let config = match &args.shape {
        Some(path) => {
            let json = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
            ModelConfig::from_json(&json)?
        }
        None => demo_shape(),
    };
    let options = sft::Options {
        data: args.data.clone(),
        out: args.out.clone(),
        config,
        steps: args.steps,
        batch: args.batch,
        matrix_rate: args.matrix_rate,
        vector_rate: args.vector_rate,
        seed: args.seed,
        threads: args.threads,
    };
    let style = ProgressStyle::with_template("{bar:30} step {pos}/{len}  {msg}  {elapsed}, {eta} to go")?;
    let bar = ProgressBar::new(args.steps as u64).with_style(style);
    let held_out = sft::run(&options, |progress| {
        bar.set_position(progress.step as u64);
        bar.set_message(format!("loss {:.3} nats a token", progress.loss));
    })?;
    bar.finish();
    println!(
        "held-out loss, nats a token: {:.4} of text, {:.4} of the rest of a line",
        held_out.text, held_out.rest
    );
    println!("written to {}", args.out.display());
    Ok(ExitCode::SUCCESS)
}

/// 6 layers of width 256, a vocabulary of 2048, a context of 256 tokens.
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
