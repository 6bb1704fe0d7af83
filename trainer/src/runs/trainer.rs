//! `springtide train`: executes the realtime run and queued offline runs until shutdown.
//!
//! One process per policy works; others wait for its lease. A process that loses the lease ends.
//! Until then the fences stop everything that it may still try to write.

use crate::options::Options;
use crate::publish::{self, Publisher, QuantisedCopies, squash};
use crate::runs::{claim, grpo, realtime, show_rate};
use anyhow::{Context, bail};
use artifact::quant::Spec;
use artifact::sign::{SigningKey, TrustedKeys};
use ingest::log::{ClientOptions, Producer};
use ingest::payload::Store as Payloads;
use model::exact::{Arithmetic, Compute};
use sqlx::{PgPool, Postgres, pool::PoolConnection};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use store::Store;
use tokio_util::sync::CancellationToken;

/// How often a waiting process asks for the lease, and a working process checks it.
const LEASE_EVERY: Duration = Duration::from_secs(2);
/// Name of the key that signs manifests.
const KEY_NAME: &str = "trainer";

/// What the trainer works with.
pub struct Environment {
    /// Name of the policy.
    pub policy: String,
    /// Precision of the forward pass; must be the sampler's.
    pub compute: Compute,
    /// The quantised copies of every version.
    pub quantised: Vec<Spec>,
    /// Folder of the base policy, imported if the realtime line has no head.
    pub base_dir: Option<PathBuf>,
    pub kafka: ClientOptions,
    pub pool: PgPool,
    pub store: Store,
    /// The store of contexts that are too long for a record.
    pub payloads: Payloads,
    /// Signing keys and trusted keys.
    pub keys_dir: PathBuf,
    /// Base URL of the serving API, for rollouts: `http://127.0.0.1:8000`.
    pub serve_url: String,
}

/// What all runs of this process share.
pub(crate) struct Trainer {
    pub options: Options,
    pub policy: String,
    /// Shared by all learners, with its threads.
    pub arithmetic: Arithmetic,
    pub pool: PgPool,
    pub store: Store,
    pub payloads: Payloads,
    pub publisher: Publisher,
    pub producer: Producer,
    pub serve_url: String,
}

/// Runs until `shutdown`. The next process recomputes steps that were not committed by then.
pub async fn run(options: Options, environment: Environment, shutdown: CancellationToken) -> anyhow::Result<()> {
    if let Err(why) = options.check() {
        bail!("configuration: {why}");
    }
    let (trainer, base_dir) = prepare(options, environment).await?;
    let Some(mut lease) = wait_for_lease(&trainer, &shutdown).await? else {
        return Ok(());
    };
    let line = &trainer.options.realtime.line;
    if let Some(dir) = base_dir {
        let head = publish::import(&trainer.publisher, &dir, line).await?;
        tracing::info!(line, head, "the realtime line has a head");
    }
    let show_rate = async {
        show_rate::watch(
            trainer.pool.clone(),
            &trainer.policy,
            &trainer.options.realtime,
            &shutdown,
        )
        .await;
        anyhow::Ok(())
    };
    let squash = async {
        if trainer.options.squash {
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = squash::run(&trainer.publisher) => {}
            }
        }
        anyhow::Ok(())
    };
    let (realtime, grpo) = (realtime::run(&trainer, &shutdown), grpo::run(&trainer, &shutdown));
    tokio::select! {
        done = async { tokio::try_join!(realtime, grpo, Box::pin(show_rate), Box::pin(squash)) } => {
            done?;
        }
        error = lost(&mut lease) => bail!("the lease of policy `{}` is lost: {error}", trainer.policy),
    }
    Ok(())
}

async fn prepare(options: Options, environment: Environment) -> anyhow::Result<(Trainer, Option<PathBuf>)> {
    let key = SigningKey::load_or_create(&environment.keys_dir, KEY_NAME).context("load the signing key")?;
    let trusted = TrustedKeys::load(&environment.keys_dir).context("load the trusted keys")?;
    let trusted = environment.store.trusted(&environment.policy, trusted).await;
    let trusted = trusted.context("read the revoked keys")?;
    anyhow::ensure!(
        trusted.contains(key.key_id()),
        "the trainer's signing key is revoked: move {KEY_NAME}.key and {KEY_NAME}.pub away, and a new one is made"
    );
    let producer = Producer::new(&environment.kafka).context("connect to the log")?;
    let publisher = Publisher {
        pool: environment.pool.clone(),
        store: environment.store.clone(),
        key: Arc::new(key),
        trusted: Arc::new(trusted),
        announce: Some(producer.clone()),
        policy: environment.policy.clone(),
        checkpoint_every: options.checkpoint_every,
        run_states_kept: options.run_states_kept,
        quantised: QuantisedCopies::new(&environment.quantised),
    };
    let threads = options.threads.into();
    let trainer = Trainer {
        arithmetic: Arithmetic::new(environment.compute, threads).context("trainer.threads")?,
        options,
        policy: environment.policy,
        pool: environment.pool,
        store: environment.store,
        payloads: environment.payloads,
        publisher,
        producer,
        serve_url: environment.serve_url.trim_end_matches('/').to_string(),
    };
    Ok((trainer, environment.base_dir))
}

async fn wait_for_lease(
    trainer: &Trainer,
    shutdown: &CancellationToken,
) -> anyhow::Result<Option<PoolConnection<Postgres>>> {
    let mut logged = false;
    loop {
        let lease = claim::lease(&trainer.pool, &trainer.policy)
            .await
            .context("ask for the lease")?;
        if lease.is_some() {
            return Ok(lease);
        }
        if !logged {
            tracing::info!(policy = trainer.policy, "another process trains this policy: waiting");
            logged = true;
        }
        if !pause(shutdown, LEASE_EVERY).await {
            return Ok(None);
        }
    }
}

/// Resolves when the lease's connection fails.
async fn lost(lease: &mut PoolConnection<Postgres>) -> sqlx::Error {
    loop {
        tokio::time::sleep(LEASE_EVERY).await;
        if let Err(error) = sqlx::query!("select 1 as one").fetch_one(&mut **lease).await {
            return error;
        }
    }
}

/// Sleeps. False: shut down.
pub(crate) async fn pause(shutdown: &CancellationToken, span: Duration) -> bool {
    tokio::select! {
        () = tokio::time::sleep(span) => !shutdown.is_cancelled(),
        () = shutdown.cancelled() => false,
    }
}
