//! The roles: what each process of `springtide serve|ingest|control|train` is made of, out of the same configuration. Wiring
//! only: no role's work is done here.

pub mod control;
pub mod database;
pub mod ingest;
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
use policy::store::Store;
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
        let pool = tokio::select! {
            pool = database::connect(config) => pool?,
            () = shutdown.cancelled() => anyhow::bail!("stopped while waiting for the database"),
        };
        database::check_schema(&pool).await?;
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
        let url = self.config.store_url();
        Store::open(&url).with_context(|| format!("open the policy store {url}"))
    }
}
