//! The relay: one per cluster or region stands between the policy store and whoever follows it there. An object crosses the
//! long way once, into a folder of bounded size, and is passed on part by part while the rest still arrives; each part is
//! verified before it is passed on. Signed documents are asked for anew each time and judged by the follower: a relay holds no
//! keys and is trusted with nothing. A relay's upstream may be another relay.
//!
//! ```text
//! GET  /v1/store/{key}          an object (ranges; verified), or a document as the upstream has it
//! HEAD /v1/store/{key}          its size
//! GET  /v1/store?prefix=KEY     {"objects": [{"key", "size_bytes"}]}
//! GET  /health
//! ```
//! Only what is under `policy/` is passed on: `private/` belongs to its writer.

mod client;
mod options;
mod server;

use std::path::Path;

use anyhow::Context;
use edge::auth::Auth;
use policy::store::{Cache, Limits, Store};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub use client::open;
pub use options::Options;

/// Passes on what `upstream` has until `shutdown`. `metrics`: merged into its routes.
pub async fn run(
    options: &Options,
    folder: &Path,
    upstream: Store,
    listener: TcpListener,
    metrics: axum::Router,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let limits = Limits {
        bytes_max: options.bytes_max,
        streams: options.streams,
    };
    let cache = Cache::open(folder, limits).with_context(|| format!("open {}", folder.display()))?;
    let auth = Auth::fixed(options.caller_key.as_deref());
    let router = server::router(upstream, cache, &auth).merge(metrics);
    edge::server::run(listener, router, shutdown).await
}
