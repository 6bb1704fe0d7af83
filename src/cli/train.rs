//! `springtide train`: its arguments. The program `springtide-trainer` executes it.

use std::convert::Infallible;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;

use anyhow::{Context, ensure};

#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    pub command: Option<Command>,
}

#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Train a model on the windows that `springtide corpus build` wrote.
    ///
    /// Example: springtide train sft --data .springtide/base --out my-model
    Sft(Sft),
}

/// The defaults make the demo's base model: about 5 million weights.
#[derive(Debug, Clone, clap::Args)]
pub struct Sft {
    /// Folder of the windows and the tokenizer's files.
    #[arg(long)]
    pub data: PathBuf,
    /// Hugging Face folder to write.
    #[arg(long)]
    pub out: PathBuf,
    /// `config.json` with the model's shape [default: the demo's shape].
    #[arg(long, value_name = "FILE")]
    pub shape: Option<PathBuf>,
    /// Train this Hugging Face folder further instead of a new model. Its tokenizer must have made
    /// the windows.
    #[arg(long, value_name = "DIR", conflicts_with = "shape")]
    pub from: Option<PathBuf>,
    /// Optimizer updates.
    #[arg(long, default_value_t = 2000)]
    pub steps: usize,
    /// Windows per step.
    #[arg(long, default_value_t = 24)]
    pub batch: usize,
    /// Learning rate of matrices (Muon).
    #[arg(long, default_value_t = 0.02)]
    pub matrix_rate: f64,
    /// Learning rate of embeddings and norms (AdamW).
    #[arg(long, default_value_t = 3e-3)]
    pub vector_rate: f64,
    /// Seed of all random choices.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// CPU threads. More than one helps only on an idle machine.
    #[arg(long, default_value_t = 1)]
    pub threads: i32,
    /// Precision of matrix products. Weights and sums are f32 in both [default: the faster one on
    /// this CPU: bf16 where it has AVX512-BF16, else f32].
    #[arg(long)]
    pub precision: Option<Precision>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum Precision {
    F32,
    Bf16,
}

/// The program with libtorch, which is beside this one.
pub fn program() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("find own executable")?;
    let program = own.with_file_name("springtide-trainer");
    ensure!(
        program.is_file(),
        "{} is missing: training needs this program, which has libtorch. Unpack the archive springtide-trainer beside \
         this one, or build it with `make build`",
        program.display()
    );
    Ok(program)
}

/// Replaces this process by the program with libtorch, with the same arguments.
pub fn become_program() -> anyhow::Result<Infallible> {
    let program = program()?;
    let error = std::process::Command::new(&program)
        .args(std::env::args_os().skip(1))
        .exec();
    Err(error).with_context(|| format!("execute {}", program.display()))
}
