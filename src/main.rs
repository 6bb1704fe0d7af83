//! `springtide`: production feedback becomes new weights. Every command is a module of [`cli`].

mod audited;
mod cli;
mod config;
mod console;
mod control_api;
mod database;
mod dead_letters;
mod policy_store;
mod private;
mod role;
mod signing_keys;
mod stack;
mod telemetry;
mod up;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    cli::Cli::parse().run().unwrap_or_else(|error| {
        eprintln!("springtide: {error:#}");
        ExitCode::FAILURE
    })
}
