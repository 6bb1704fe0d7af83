//! `springtide relay`: objects of a policy store that is far away, for everybody near.

use anyhow::{Context, ensure};
use tokio::net::TcpListener;

use super::{open_store, shutdown};
use crate::config::Config;
use crate::telemetry::Telemetry;

#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Where objects come from, over relay.upstream: `file://`, `s3://`, or the `http://` URL of another relay.
    #[arg(long, value_name = "URL")]
    pub upstream: Option<String>,
}

pub async fn run(config: &Config, telemetry: &Telemetry, args: &Args) -> anyhow::Result<()> {
    let shutdown = shutdown::on_signal()?;
    let options = &config.relay;
    let upstream = args.upstream.clone().or_else(|| options.upstream.clone());
    let upstream = upstream.unwrap_or_else(|| config.store_url());
    let store = open_store(&upstream, options.api_key.as_deref())?;
    let address = options.listen;
    ensure!(
        edge::bind::check(address, options.caller_key.is_some()).is_ok(),
        "{address} can be reached from other machines, and no key is required: \
         listen on 127.0.0.1 or set relay.caller_key"
    );
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("listen on {address}"))?;
    tracing::info!(%address, %upstream, "relay");
    let folder = config.state_dir.join("relay");
    serving::relay::run(options, &folder, store, listener, telemetry.router(), shutdown).await
}
