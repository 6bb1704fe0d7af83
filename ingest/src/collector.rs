//! The collector: the event API in front of a spool on a local disk, and the forwarder behind it. No log and no database:
//! what needs them (known contradictions, joins) is the upstream's.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use axum::{Router, middleware};
use edge::auth::Auth;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::api::Api;
use crate::entrance::{self, Entrance};
use crate::options::Options;
use crate::rules::Rules;
use crate::service::{join, until_stopped};
use crate::spool;

/// Runs a collector until `shutdown`: `extra` is served beside its own routes. What is spooled then stays in `folder` for the
/// next start. The surfaces of `options` say which values a metric takes; they should be the upstream's.
pub async fn run(
    options: Options,
    spool: spool::Options,
    folder: &Path,
    upstream: &str,
    listener: TcpListener,
    extra: Router,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    options.check()?;
    spool.check()?;
    spool::check_upstream("the upstream", upstream)?;
    let skew = time::Duration::seconds_f64(options.clock_skew_seconds_max);
    let rules = Arc::new(Rules::new(options.metrics()?, skew));
    let auth = Auth::fixed(spool.caller_key.as_deref());
    let (path, url) = (folder.to_owned(), upstream.to_owned());
    let open = move || spool::open(&path, &url, &spool);
    let opened = tokio::task::spawn_blocking(open).await.context("join")??;

    let stop = shutdown.child_token();
    let api = Api::new(&options, None, Entrance::Spool(opened.spool), rules);
    let router = api
        .router(&auth)
        .layer(middleware::from_fn(entrance::say_spooled))
        .merge(extra);
    let mut parts: JoinSet<anyhow::Result<()>> = JoinSet::new();
    parts.spawn(edge::server::run(listener, router, stop.clone()));
    parts.spawn(until_stopped(opened.forwarder.run(stop.clone())));
    let result = join(&mut parts, &stop).await;
    // Both that could ask the writer are gone, so it ends when it has answered everybody.
    let writer = opened.writer;
    let ended = tokio::task::spawn_blocking(move || writer.join())
        .await
        .context("join")?;
    anyhow::ensure!(ended.is_ok(), "the spool's writer panicked");
    result
}
