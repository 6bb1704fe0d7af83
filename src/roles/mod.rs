//! The roles: what each process of `springtide serve|ingest|control|train` is made of, out of the same configuration. Wiring
//! only: no role's work is done here.

pub mod control;
pub mod database;
pub mod ingest;
pub mod relay;
#[cfg(feature = "torch")]
pub mod serve;
mod shutdown;
#[cfg(feature = "torch")]
pub mod train;

use std::net::SocketAddr;

#[cfg(feature = "torch")]
use ::ingest::payload::Store as Payloads;
use anyhow::Context;
use axum::Router;
use edge::auth::Auth;
use policy::kernel::Threads;
use policy::store::{Cache, Limits, Store};
use sqlx::PgPool;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::telemetry::Telemetry;

/// What every role starts from.
pub struct Base {
    pub config: Config,
    pub pool: PgPool,
    pub auth: Auth,
    /// `/metrics`, for the role to merge into its own routes.
    pub metrics: Router,
    /// Cancelled by SIGTERM and SIGINT.
    pub shutdown: CancellationToken,
}

impl Base {
    /// Waits for the database, checks its schema and starts to listen for signals.
    pub async fn new(config: &Config, telemetry: &Telemetry) -> anyhow::Result<Self> {
        let shutdown = shutdown::on_signal()?;
        let ready = async {
            let pool = database::connect(config).await?;
            database::check_schema(&pool).await?;
            anyhow::Ok(pool)
        };
        let pool = tokio::select! {
            pool = ready => pool?,
            () = shutdown.cancelled() => anyhow::bail!("stopped while waiting for the database"),
        };
        Ok(Self {
            config: config.clone(),
            auth: Auth::new(config.auth, pool.clone()),
            pool,
            metrics: telemetry.router(),
            shutdown,
        })
    }

    /// Binds `address` unless it lets in more than it may.
    pub async fn listen(&self, address: SocketAddr) -> anyhow::Result<TcpListener> {
        edge::bind::check(address, self.auth.required())?;
        TcpListener::bind(address)
            .await
            .with_context(|| format!("listen on {address}"))
    }

    #[cfg(feature = "torch")] // of the roles that use it
    pub fn payloads(&self) -> anyhow::Result<Payloads> {
        let url = self.config.ingest.payload_store.as_deref();
        let url = url.context("ingest.payload_store is not set")?;
        Payloads::open(url).with_context(|| format!("open the store of payloads {url}"))
    }

    pub fn store(&self) -> anyhow::Result<Store> {
        store(&self.config)
    }
}

/// The policy store of the configuration; with a cache where it is not on this machine.
pub fn store(config: &Config) -> anyhow::Result<Store> {
    let url = config.store_url();
    let store = on_threads(open_store(&url, config.policy.store_api_key.as_deref())?, config)?;
    if url.starts_with("file://") {
        return Ok(store);
    }
    let folder = config.state_dir.join("objects");
    let limits = Limits {
        bytes_max: config.policy.cache_bytes_max,
        streams: config.policy.cache_streams,
    };
    let cache = Cache::open(&folder, limits).with_context(|| format!("open {}", folder.display()))?;
    Ok(store.with_cache(cache))
}

/// Where versions are: an object store, or a relay in front of one.
pub fn open_store(url: &str, api_key: Option<&str>) -> anyhow::Result<Store> {
    let store = if url.starts_with("http://") || url.starts_with("https://") {
        serving::relay::open(url, api_key)
    } else {
        Store::open(url).map_err(Into::into)
    };
    store.with_context(|| format!("open the policy store {url}"))
}

/// A store whose deltas are made and followed on as many threads as the configuration says.
pub fn on_threads(store: Store, config: &Config) -> anyhow::Result<Store> {
    let threads = Threads::new(config.policy.sync_threads.into()).context("policy.sync_threads")?;
    Ok(store.with_threads(threads))
}
