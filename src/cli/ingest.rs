//! `springtide ingest`: stores events. With `--spool` it is a collector: it keeps events in a
//! folder on this machine and forwards them to a remote ingest role.

use std::path::{Path, PathBuf};

use anyhow::Context;
use edge::auth::Auth;

use super::App;
use crate::config::Part;
use crate::role::{Role, listen_with_key, shutdown};

#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Be a collector: write events to this folder, answer 202, and forward them. Needs no log and
    /// no database.
    #[arg(long, value_name = "DIR")]
    pub spool: Option<PathBuf>,
    /// Base URL of the remote ingest role; overrides spool.upstream.
    #[arg(long, value_name = "URL", requires = "spool")]
    upstream: Option<String>,
}

impl Args {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        if let Some(folder) = &self.spool {
            return self.collect(app, folder).await;
        }
        let role = Role::start(app, Part::Ingest).await?;
        let config = &app.config;
        ingest::run(
            config.ingest.clone(),
            config.kafka_client()?,
            role.pool.clone(),
            role.auth.clone(),
            role.listen(config, Part::Ingest).await?,
            role.metrics(config, Part::Ingest),
            role.shutdown,
        )
        .await
    }

    async fn collect(&self, app: &App, folder: &Path) -> anyhow::Result<()> {
        let shutdown = shutdown::on_signal(&app.config.listen)?;
        let config = &app.config;
        let upstream = self.upstream.as_ref().or(config.spool.upstream.as_ref());
        let upstream = upstream.context("the collector has no upstream: give --upstream URL or set spool.upstream")?;
        let key = config.spool.caller_key.as_ref();
        let auth = Auth::fixed(key.map(String::as_str));
        let metrics = auth.protect_beyond_loopback(app.metrics.clone(), config.address(Part::Ingest));
        ingest::collector::run(
            config.ingest.clone(),
            config.spool.clone(),
            folder,
            upstream,
            listen_with_key(config, Part::Ingest, key, "spool.caller_key").await?,
            metrics,
            shutdown,
        )
        .await
    }
}
