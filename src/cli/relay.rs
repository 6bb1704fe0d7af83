//! `springtide relay`: caches the objects of a remote policy store for nearby replicas.

use edge::auth::Auth;

use super::App;
use crate::config::Part;
use crate::policy_store;
use crate::role::{listen_with_key, shutdown};

#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Source of objects: `file://`, `s3://`, or another relay's `http://` or `https://` URL;
    /// overrides relay.upstream.
    #[arg(long, value_name = "URL")]
    upstream: Option<String>,
}

impl Args {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let shutdown = shutdown::on_signal(&app.config.listen)?;
        let (config, options) = (&app.config, &app.config.relay);
        let upstream = self.upstream.or_else(|| options.upstream.clone());
        let upstream = upstream.unwrap_or_else(|| config.store_url());
        let store = policy_store::open_url(&upstream, options.api_key.as_deref())?;
        let listener = listen_with_key(config, Part::Relay, options.caller_key.as_ref(), "relay.caller_key").await?;
        tracing::info!(address = %options.listen, %upstream, "relay");
        let folder = config.state_dir.join("relay");
        let auth = Auth::fixed(options.caller_key.as_deref());
        let metrics = auth.protect_beyond_loopback(app.metrics.clone(), options.listen);
        serving::relay::run(options, &folder, store, listener, metrics, shutdown).await
    }
}
