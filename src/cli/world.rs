//! `springtide world`: virtual machines for the harnesses of rollouts.

use anyhow::Context as _;
use edge::auth::Auth;

use super::App;
use crate::config::Part;
use crate::role::{listen_with_key, shutdown};

#[derive(Debug, Clone, clap::Args)]
pub struct Args {}

impl Args {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let shutdown = shutdown::on_signal(&app.config.listen)?;
        let (config, options) = (&app.config, &app.config.world);
        std::fs::create_dir_all(&config.state_dir).context("create the state folder")?;
        let listener = listen_with_key(config, Part::World, options.caller_key.as_ref(), "world.caller_key").await?;
        tracing::info!(address = %options.listen, "world");
        let folder = config.state_dir.join("world");
        let auth = Auth::fixed(options.caller_key.as_deref());
        let metrics = auth.protect_beyond_loopback(app.metrics.clone(), options.listen);
        world::service::run(options, &folder, listener, metrics, shutdown).await
    }
}
