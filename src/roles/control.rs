//! `springtide control`: one front for runs, versions, releases and the fleet, and the release loop. Any number may run; one
//! leads.

use anyhow::Context;
use axum::routing::get;
use serving::release::{self, Desk};

use super::Base;
use crate::control;

pub async fn run(base: Base) -> anyhow::Result<()> {
    let config = base.config.clone();
    let listener = base.listen(config.listen.control).await?;
    let log = ingest::log::Producer::new(&config.kafka_client()).context("connect to the log")?;
    let desk = Desk::new(
        config.release.clone(),
        config.policy.name.clone(),
        base.pool.clone(),
        base.store()?,
        &config.keys_dir(),
        Some(log),
    )?;
    let router = base
        .auth
        .protect(control::router(
            &base.pool,
            &config.policy.name,
            desk.clone(),
            config.state_dir.join("report.html"),
        ))
        .merge(base.metrics)
        .route("/health", get(|| async { "ok" }));
    let server = edge::server::run(listener, router, base.shutdown.clone());
    tokio::try_join!(server, release::follow(desk, base.shutdown)).map(drop)
}
