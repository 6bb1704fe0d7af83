//! `springtide ingest`: events in. With `--spool` a collector: the same entrance in front of a folder on this machine, which is
//! forwarded to an ingest elsewhere.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use tokio::net::TcpListener;

use super::{Base, shutdown};
use crate::config::Config;
use crate::telemetry::Telemetry;

#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Be a collector: no log and no database; events are flushed to this folder, acknowledged with 202, and forwarded.
    #[arg(long, value_name = "DIR")]
    pub spool: Option<PathBuf>,
    /// Base URL of the ingest role to forward to, over spool.upstream.
    #[arg(long, value_name = "URL", requires = "spool")]
    pub upstream: Option<String>,
}

pub async fn run(base: Base) -> anyhow::Result<()> {
    let listener = base.listen(base.config.listen.ingest).await?;
    ingest::run(
        base.config.ingest.clone(),
        base.config.kafka_client(),
        base.pool,
        base.auth,
        listener,
        base.metrics,
        base.shutdown,
    )
    .await
}

pub async fn collect(
    config: &Config,
    telemetry: &Telemetry,
    folder: &Path,
    upstream: Option<&str>,
) -> anyhow::Result<()> {
    let shutdown = shutdown::on_signal()?;
    let upstream = upstream.or(config.spool.upstream.as_deref());
    let upstream = upstream.context("no upstream to forward to: give --upstream URL or set spool.upstream")?;
    let address = config.listen.ingest;
    ensure!(
        edge::bind::check(address, config.spool.caller_key.is_some()).is_ok(),
        "{address} can be reached from other machines, and no key is required: \
         listen on 127.0.0.1 or set spool.caller_key"
    );
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("listen on {address}"))?;
    ingest::collector::run(
        config.ingest.clone(),
        config.spool.clone(),
        folder,
        upstream,
        listener,
        telemetry.router(),
        shutdown,
    )
    .await
}
