//! Real Rust for the demo: the sources of the crates that this project's own build fetches.
//!
//! `springtide corpus build` turns them into a tokenizer and training windows for `springtide train
//! sft`. `springtide demo` replays developers on the files of the demo split. Crates are split by
//! family, so the base was not trained on any file of a demo or held-out crate or of a sibling.

mod build;
mod evaluate;
pub mod pauses;
mod sources;
pub mod tokenizer;

pub use sources::replayed_files;

use std::path::{Path, PathBuf};

use anyhow::Context;

/// The code that the demo's model learns from.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Make a tokenizer and training windows from the crates that this project's build has fetched.
    Build(build::Args),
    /// Write the code that the demo replays, for machines that do not build this project (`demo --corpus`).
    Export {
        /// Folder to write: a folder for each crate.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
    /// Measure how often a model's greedy suggestion is exactly what was typed.
    Evaluate(evaluate::Args),
}

pub fn run(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Build(args) => build::run(args),
        Command::Export { out } => export(out),
        Command::Evaluate(args) => evaluate::run(args),
    }
}

fn export(out: &Path) -> anyhow::Result<()> {
    for file in replayed_files(None, false)? {
        let path = out.join(&file.krate).join(&file.path);
        let write = || {
            std::fs::create_dir_all(path.parent().unwrap_or(out))?;
            std::fs::write(&path, &file.text)
        };
        write().with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}
