//! The collector: the event API in front of a spool on a local disk, and the forwarder behind it.
//!
//! It has no log and no database. Joins and conflicts with stored events are the upstream's work.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use axum::{Router, middleware};
use edge::auth::Auth;
use edge::server::Listener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::entry::api::Api;
use crate::entry::destination::{self, Destination};
use crate::entry::spool;
use crate::options::Options;
use crate::service::{join, until_stopped};
use crate::validator::Validator;

/// Runs a collector until `shutdown`. Serves `extra` beside its own routes. Events that are still
/// spooled stay in `folder` for the next start. The surfaces in `options` define metric types and
/// should equal the upstream's.
pub async fn run(
    options: Options,
    spool: spool::Options,
    folder: &Path,
    upstream: &str,
    listener: Listener,
    extra: Router,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    options.check()?;
    spool.check()?;
    spool::check_upstream("the upstream", upstream)?;
    let skew = time::Duration::seconds_f64(options.clock_skew_seconds_max);
    let validator = Arc::new(Validator::new(options.metrics()?, skew).with_judges(&options.judges()?));
    let auth = Auth::fixed(spool.caller_key.as_deref()).requests_per_second_max(spool.requests_per_second_max);
    let (path, url) = (folder.to_owned(), upstream.to_owned());
    let open = move || spool::open(&path, &url, &spool);
    let opened = tokio::task::spawn_blocking(open).await.context("join")??;

    let stop = shutdown.child_token();
    let api = Api::new(&options, None, Destination::Spool(opened.spool), validator);
    let router = api
        .router(&auth)
        .layer(middleware::from_fn(destination::mark_spooled))
        .merge(extra);
    let mut parts: JoinSet<anyhow::Result<()>> = JoinSet::new();
    parts.spawn(edge::server::run(listener, router, stop.clone()));
    parts.spawn(until_stopped(opened.forwarder.run(stop.clone())));
    let result = join(&mut parts, &stop).await;
    // The server and the forwarder are gone, so the writer ends after its last command.
    let writer = opened.writer;
    let ended = tokio::task::spawn_blocking(move || writer.join())
        .await
        .context("join")?;
    anyhow::ensure!(ended.is_ok(), "the spool's writer panicked");
    result
}
