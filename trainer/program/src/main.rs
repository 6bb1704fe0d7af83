//! `springtide-trainer`: the commands of `springtide` that need libtorch. `springtide` replaces itself by
//! this program for them, so that nothing else loads libtorch.

mod rehearse;
mod sft;
mod train;

use std::process::ExitCode;

use futures::FutureExt;
use futures::future::BoxFuture;
use springtide::cli::{App, Learning, train as arguments};

fn main() -> ExitCode {
    springtide::main(Some(learn))
}

fn learn(command: Learning, app: &App) -> BoxFuture<'_, anyhow::Result<()>> {
    async move {
        match command {
            Learning::Train(arguments::Args { command: None }) => train::run(app).await,
            Learning::Train(arguments::Args {
                command: Some(arguments::Command::Sft(args)),
            }) => sft::run(args),
            Learning::Rehearse(args) => rehearse::run(args, app).await,
        }
    }
    .boxed()
}
