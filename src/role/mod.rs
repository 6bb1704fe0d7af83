//! What every role starts from: database, authentication, metrics, listener and shutdown.

pub mod shutdown;

use std::net::SocketAddr;

use anyhow::{Context, ensure};
use axum::Router;
use edge::auth::Auth;
use sqlx::PgPool;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::cli::App;
use crate::database;

/// A role that is starting.
pub struct Role {
    pub pool: PgPool,
    pub auth: Auth,
    /// `/metrics`, for the role to merge into its own routes.
    pub metrics: Router,
    /// Canceled by SIGTERM and SIGINT.
    pub shutdown: CancellationToken,
}

impl Role {
    /// Listens for signals, waits for the database and checks its schema.
    pub async fn start(app: &App) -> anyhow::Result<Self> {
        let shutdown = shutdown::on_signal()?;
        let ready = async {
            let pool = database::connect(&app.config).await?;
            database::check_schema(&pool).await?;
            anyhow::Ok(pool)
        };
        let pool = tokio::select! {
            pool = ready => pool?,
            () = shutdown.cancelled() => anyhow::bail!("stopped while waiting for the database"),
        };
        Ok(Self {
            auth: Auth::new(app.config.auth, pool.clone()),
            pool,
            metrics: app.metrics.clone(),
            shutdown,
        })
    }

    /// Binds `address`. Refuses one that other machines reach while no key is required.
    pub async fn listen(&self, address: SocketAddr) -> anyhow::Result<TcpListener> {
        edge::bind::check(address, self.auth.required())?;
        bind(address).await
    }
}

/// Binds the address of a role that has one key, named by the field `key_field`, instead of the
/// database's keys.
pub async fn listen_with_key(
    address: SocketAddr,
    key: Option<&String>,
    key_field: &str,
) -> anyhow::Result<TcpListener> {
    ensure!(
        edge::bind::check(address, key.is_some()).is_ok(),
        "other machines can reach {address}, and no key is required: listen on 127.0.0.1 or set {key_field}"
    );
    bind(address).await
}

async fn bind(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("listen on {address}"))
}

/// The store of long contexts and expert ids.
#[cfg(feature = "torch")] // of the roles that use it
pub fn payloads(app: &App) -> anyhow::Result<ingest::payload::Store> {
    let url = app.config.ingest.payload_store.as_deref();
    let url = url.context("ingest.payload_store is not set")?;
    ingest::payload::Store::open(url).with_context(|| format!("open the payload store {url}"))
}
