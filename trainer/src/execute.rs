//! `springtide train`: executes the realtime run and whatever offline runs are queued, until told to stop.
//!
//! One process per policy works; others wait for its lease. If the lease is lost the process ends rather than going on in
//! doubt, and the fences stop what it might still try.

use crate::options::Options;
use crate::publish::{self, Copies, Publisher};
use crate::{claim, grpo, realtime, silence, upkeep};
use anyhow::{Context, bail};
use ingest::kafka::ClientOptions;
use ingest::log::Producer;
use ingest::payload::Store as Payloads;
use policy::model::{Arithmetic, Compute};
use policy::quant::Spec;
use policy::sign::{SigningKey, TrustedKeys};
use policy::store::Store;
use sqlx::{PgPool, Postgres, pool::PoolConnection};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// How often a waiting process asks for the lease, and a working one checks that it still has it.
const LEASE_EVERY: Duration = Duration::from_secs(2);
/// Name of the key that manifests are signed with.
const KEY_NAME: &str = "trainer";

/// What the trainer works with.
pub struct Environment {
    /// Name of the policy.
    pub policy: String,
    /// In which precision its forward pass computes: that of whoever samples.
    pub compute: Compute,
    /// The quantised copies that every version of it has.
    pub quantised: Vec<Spec>,
    /// Folder of the base policy, imported if the realtime line has no head.
    pub base_dir: Option<PathBuf>,
    pub kafka: ClientOptions,
    pub pool: PgPool,
    pub store: Store,
    /// Where contexts are that are too long for a record.
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
    /// Of every learner, on threads that they share.
    pub arithmetic: Arithmetic,
    pub pool: PgPool,
    pub store: Store,
    pub payloads: Payloads,
    pub publisher: Publisher,
    pub producer: Producer,
    pub serve_url: String,
}

/// Runs until `shutdown`. Steps that were not committed by then are computed again by the next process.
pub async fn run(options: Options, environment: Environment, shutdown: CancellationToken) -> anyhow::Result<()> {
    if let Err(why) = options.check() {
        bail!("configuration: {why}");
    }
    let (trainer, base_dir) = prepare(options, environment).await?;
    let Some(mut lease) = wait_for_lease(&trainer, &shutdown).await? else {
        return Ok(());
    };
    if let Some(dir) = base_dir {
        let head = publish::import(&trainer.publisher, &dir, &trainer.options.realtime.line).await?;
        tracing::info!(
            line = trainer.options.realtime.line,
            head,
            "the line has its first version"
        );
    }
    tokio::select! {
        done = async {
            let watch = Box::pin(async {
                let options = &trainer.options.realtime;
                silence::watch(trainer.pool.clone(), &trainer.policy, options, &shutdown).await;
                anyhow::Ok(())
            });
            let folds = Box::pin(async {
                if trainer.options.folds {
                    tokio::select! {
                        () = shutdown.cancelled() => {}
                        () = upkeep::run(&trainer.publisher) => {}
                    }
                }
                anyhow::Ok(())
            });
            tokio::try_join!(realtime::run(&trainer, &shutdown), grpo::run(&trainer, &shutdown), watch, folds)
        } => {
            done?;
        }
        lost = watch(&mut lease) => bail!("the lease of policy `{}` is lost: {lost}", trainer.policy),
    }
    Ok(())
}

async fn prepare(options: Options, environment: Environment) -> anyhow::Result<(Trainer, Option<PathBuf>)> {
    let key = SigningKey::load_or_create(&environment.keys_dir, KEY_NAME).context("load the signing key")?;
    let trusted = TrustedKeys::load(&environment.keys_dir).context("load the trusted keys")?;
    let trusted = environment.store.trusted(&environment.policy, trusted).await;
    let trusted = trusted.context("look for revoked keys")?;
    anyhow::ensure!(
        trusted.contains(key.key_id()),
        "the key that this would sign with is revoked: put {KEY_NAME}.key and {KEY_NAME}.pub away, and a new one is made"
    );
    let producer = Producer::new(&environment.kafka).context("connect to the log")?;
    let publisher = Publisher {
        pool: environment.pool.clone(),
        store: environment.store.clone(),
        key: Arc::new(key),
        trusted: Arc::new(trusted),
        announce: Some(producer.clone()),
        policy: environment.policy.clone(),
        image_every: options.image_every,
        checkpoints_kept: options.checkpoints_kept,
        copies: Copies::new(&environment.quantised),
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
    let mut told = false;
    loop {
        let lease = claim::lease(&trainer.pool, &trainer.policy)
            .await
            .context("ask for the lease")?;
        if lease.is_some() {
            return Ok(lease);
        }
        if !told {
            tracing::info!(policy = trainer.policy, "another process trains this policy: waiting");
            told = true;
        }
        if !pause(shutdown, LEASE_EVERY).await {
            return Ok(None);
        }
    }
}

/// Resolves when the lease's connection no longer answers.
async fn watch(lease: &mut PoolConnection<Postgres>) -> sqlx::Error {
    loop {
        tokio::time::sleep(LEASE_EVERY).await;
        if let Err(error) = sqlx::query!("select 1 as one").fetch_one(&mut **lease).await {
            return error;
        }
    }
}

/// Sleeps; false if the process is to stop.
pub(crate) async fn pause(shutdown: &CancellationToken, span: Duration) -> bool {
    tokio::select! {
        () = tokio::time::sleep(span) => !shutdown.is_cancelled(),
        () = shutdown.cancelled() => false,
    }
}
