//! What every role starts from: database, authentication, metrics, listener and shutdown.

pub mod shutdown;

use std::time::Duration;

use anyhow::{Context, ensure};
use axum::Router;
use edge::auth::Auth;
use edge::host::Hosts;
use edge::server::{Limits, Listener};
use edge::tenant;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use sqlx::PgPool;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::cli::App;
use crate::cli::audit::CommandLine;
use crate::config::{Config, Part};
use crate::database;

/// File descriptors for the database, the log, objects, files and threads.
const FILES_BESIDE_CONNECTIONS: u64 = 512;

/// A role that is starting.
pub struct Role {
    pub pool: PgPool,
    pub auth: Auth,
    metrics: Router,
    /// Canceled by SIGTERM and SIGINT.
    pub shutdown: CancellationToken,
}

impl Role {
    /// Listens for signals, waits for the database and checks its schema.
    pub async fn start(app: &App, part: Part) -> anyhow::Result<Self> {
        let shutdown = shutdown::on_signal(&app.config.listen)?;
        let ready = async {
            let pool = database::connect_as(&app.config, part).await?;
            database::check_schema(&pool).await?;
            anyhow::Ok(pool)
        };
        let pool = tokio::select! {
            pool = ready => pool?,
            () = shutdown.cancelled() => anyhow::bail!("stopped while waiting for the database"),
        };
        Ok(Self {
            auth: Auth::new(app.config.auth.clone(), pool.clone()),
            pool,
            metrics: app.metrics.clone(),
            shutdown,
        })
    }

    /// Gives the configured policy to the configured tenant if it is new. Fails if it belongs to another
    /// one.
    pub async fn own_policy(&self, config: &Config) -> anyhow::Result<()> {
        let (policy, person) = (&config.policy, CommandLine::new());
        tenant::own(&self.pool, &policy.name, &policy.tenant, person.actor()).await
    }

    /// `/metrics`, for the role to merge into its own routes. Needs a key if other machines reach
    /// `part`.
    pub fn metrics(&self, config: &Config, part: Part) -> Router {
        self.auth
            .protect_beyond_loopback(self.metrics.clone(), config.address(part))
    }

    /// Binds the address of `part`. Refuses one that other machines reach while no key is required.
    pub async fn listen(&self, config: &Config, part: Part) -> anyhow::Result<Listener> {
        let (address, required) = (config.address(part), self.auth.required());
        edge::bind::check(address, required)?;
        bind(config, part, required).await
    }
}

/// Binds the address of a role that has one key, named by the field `key_field`, instead of the
/// database's keys.
pub async fn listen_with_key(
    config: &Config,
    part: Part,
    key: Option<&String>,
    key_field: &str,
) -> anyhow::Result<Listener> {
    let address = config.address(part);
    ensure!(
        edge::bind::check(address, key.is_some()).is_ok(),
        "other machines can reach {address}, and no key is required: listen on 127.0.0.1 or set {key_field}"
    );
    bind(config, part, key.is_some()).await
}

async fn bind(config: &Config, part: Part, key_required: bool) -> anyhow::Result<Listener> {
    let address = config.address(part);
    let mut limits = Limits {
        connections_max: allow_connections(config.listen.connections_max.of(part))?,
        unready: Duration::from_secs(config.listen.unready_seconds),
        drain: Duration::from_secs(config.listen.drain_seconds),
        ..Limits::default()
    };
    if part == Part::Ingest {
        // Ingest's own limit says what was too slow.
        let own = Duration::from_secs_f64(config.ingest.request_read_seconds_max);
        limits.body = limits.body.max(own + limits.head);
    }
    let tcp = TcpListener::bind(address)
        .await
        .with_context(|| format!("listen on {address}"))?;
    let mut listener = Listener::from(tcp).limits(limits);
    match config.tls.of(part) {
        Some(options) => listener = listener.tls(edge::tls::Acceptor::load(options).context("set up TLS")?),
        None if address.ip().to_canonical().is_loopback() => {}
        None => tracing::warn!(
            %address,
            "keys and prompts cross the network unencrypted: set tls.cert and tls.key, or put a TLS proxy in front"
        ),
    }
    if !key_required {
        listener = listener.only_for(Hosts::new(&config.listen.hosts));
    }
    Ok(listener)
}

/// How many connections the limit on file descriptors leaves room for, `wanted` at most. Raises the
/// limit if it may.
fn allow_connections(wanted: usize) -> anyhow::Result<usize> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("read the limit on open files")?;
    let needed = u64::try_from(wanted)? + FILES_BESIDE_CONNECTIONS;
    let limit = needed.clamp(soft, hard.max(soft));
    if limit > soft {
        setrlimit(Resource::RLIMIT_NOFILE, limit, hard).context("raise the limit on open files")?;
    }
    // At least half of what there is: a few hundred may be enough for the rest.
    let room = limit.saturating_sub(FILES_BESIDE_CONNECTIONS).max(limit / 2);
    let allowed = wanted.min(usize::try_from(room)?);
    if allowed < wanted {
        tracing::warn!(
            wanted,
            allowed,
            "fewer connections than configured: raise the limit on open files (ulimit -n)"
        );
    }
    Ok(allowed)
}

/// The store of long contexts and expert ids, and with it that of exports.
pub fn payloads(app: &App) -> anyhow::Result<event_log::payload::Store> {
    let url = app.config.ingest.payload_store.as_deref();
    let url = url.context("ingest.payload_store is not set")?;
    event_log::payload::Store::open(url).with_context(|| format!("open the payload store {url}"))
}
