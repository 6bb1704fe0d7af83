//! `springtide train`: executes scheduled runs. It has no API; its listener serves health and
//! metrics.

mod sft;

use axum::routing::get;
use trainer::Environment;

use super::App;
use crate::config::Part;
use crate::policy_store;
use crate::role::{self, Role};

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
    Sft(sft::Args),
}

impl Args {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        match self.command {
            Some(Command::Sft(args)) => args.run(),
            None => execute_runs(app).await,
        }
    }
}

async fn execute_runs(app: &App) -> anyhow::Result<()> {
    let role = Role::start(app).await?;
    let config = &app.config;
    let listener = role.listen(config, Part::Train).await?;
    let metrics = role.metrics(config, Part::Train);
    let environment = Environment {
        policy: config.policy.name.clone(),
        compute: config.policy.compute,
        quantized: config.policy.quantized.clone(),
        base_dir: Some(config.policy.base.clone()),
        kafka: config.kafka_client()?,
        store: policy_store::open(config)?,
        payloads: role::payloads(app)?,
        keys_dir: config.keys_dir(),
        serve_url: config.serve_url(),
        pool: role.pool,
    };
    let router = metrics.route("/health", get(|| async { "ok" }));
    // The server stops when the work ends, for whatever reason.
    let done = role.shutdown.child_token();
    let server = tokio::spawn(edge::server::run(listener, router, done.clone()));
    let outcome = Box::pin(trainer::run(config.trainer.clone(), environment, role.shutdown)).await;
    done.cancel();
    server.await??;
    outcome
}
