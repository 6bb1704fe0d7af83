//! `springtide train`: executes the realtime run and queued offline runs until shutdown.
//!
//! One process per policy works; others wait for its lease. A process that loses the lease ends.
//! Until then the fences stop everything that it may still try to write.

use crate::trainer::{Environment, Trainer, pause};
use crate::{offline, realtime};
use anyhow::{Context, bail};
use futures::FutureExt;
use runs::options::Options;
use runs::publish::{self, squash};
use runs::{claim, monitors, show_rate};
use sqlx::PgConnection;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// How often a waiting process asks for the lease, and a working process checks it.
const LEASE_EVERY: Duration = Duration::from_secs(2);

/// Runs until `shutdown`. The next process recomputes steps that were not committed by then.
pub async fn run(options: Options, environment: Environment, shutdown: CancellationToken) -> anyhow::Result<()> {
    options.check().context("the configuration is not valid")?;
    let base_dir = environment.base_dir.clone();
    let trainer = Trainer::new(options, environment).await?;
    let Some(mut lease) = wait_for_lease(&trainer, &shutdown).await? else {
        return Ok(());
    };
    let line = runs::REALTIME_LINE;
    if let Some(dir) = base_dir {
        let head = publish::import(&trainer.publisher, &dir, line).await?;
        tracing::info!(line, head, "the realtime line has a head");
    }
    let (pool, policy, options) = (&trainer.pool, &trainer.policy, &trainer.options.realtime);
    let show_rate = show_rate::watch(pool.clone(), policy, options, &shutdown).map(anyhow::Ok);
    let monitors = monitors::watch(pool.clone(), policy, options, &shutdown).map(anyhow::Ok);
    let squash = async {
        if trainer.options.squash {
            shutdown.run_until_cancelled(squash::run(&trainer.publisher)).await;
        }
        anyhow::Ok(())
    };
    let (realtime, offline) = (realtime::run(&trainer, &shutdown), offline::run(&trainer, &shutdown));
    tokio::select! {
        done = async { tokio::try_join!(realtime, offline, Box::pin(show_rate), Box::pin(monitors), Box::pin(squash)) } => {
            done?;
        }
        error = lease_lost(&mut lease) => bail!("the lease of policy `{}` is lost: {error}", trainer.policy),
    }
    Ok(())
}

async fn wait_for_lease(trainer: &Trainer, shutdown: &CancellationToken) -> anyhow::Result<Option<PgConnection>> {
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
async fn lease_lost(lease: &mut PgConnection) -> sqlx::Error {
    loop {
        tokio::time::sleep(LEASE_EVERY).await;
        if let Err(error) = sqlx::query!("select 1 as one").fetch_one(&mut *lease).await {
            return error;
        }
    }
}
