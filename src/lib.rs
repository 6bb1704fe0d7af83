//! `springtide`: production feedback becomes new weights. Every command is a module of [`cli`].

mod audited;
pub mod cli;
pub mod config;
mod console;
mod database;
pub mod policy_store;
mod private;
pub mod role;
pub mod signing_keys;
mod stack;
mod telemetry;
mod up;

use std::process::ExitCode;

use clap::Parser;

/// The whole program. `learn` executes what needs libtorch; without it, the program
/// `springtide-trainer` does.
pub fn main(learn: Option<cli::Learn>) -> ExitCode {
    cli::Cli::parse().run(learn).unwrap_or_else(|error| {
        eprintln!("springtide: {error:#}");
        ExitCode::FAILURE
    })
}
