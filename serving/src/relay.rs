//! The relay: one per cluster or region, between the policy store and the followers there. A
//! relay's upstream may be another relay.
//!
//! An object crosses the long distance once, into a cache folder of bounded size. Its parts are
//! verified and passed on while the rest still arrives. Signed documents and lists are fetched anew;
//! only requests for the same one at the same time share an answer. The relay holds no keys and is not
//! trusted: followers check the signatures.
//!
//! ```text
//! GET  /v1/store/{key}          an object (ranges; verified), or a document as the upstream has it
//! HEAD /v1/store/{key}          its size
//! GET  /v1/store?prefix=KEY     {"objects": [{"key", "size_bytes"}]}
//! GET  /health
//! ```
//! Only keys under `policy/` are passed on; `private/` belongs to its writer.

mod client;
mod flights;
mod options;
mod server;

use std::path::Path;

use anyhow::Context;
use edge::auth::Auth;
use edge::server::Listener;
use store::{Cache, Limits, Store};
use tokio_util::sync::CancellationToken;

pub use client::open;
pub use options::Options;

/// Passes on the contents of `upstream` until `shutdown`. `metrics` is merged into its routes.
pub async fn run(
    options: &Options,
    folder: &Path,
    upstream: Store,
    listener: Listener,
    metrics: axum::Router,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let limits = Limits {
        bytes_max: options.bytes_max,
        streams: options.streams,
    };
    let cache = Cache::open(folder, limits).with_context(|| format!("open {}", folder.display()))?;
    let auth = Auth::fixed(options.caller_key.as_deref()).requests_per_second_max(options.requests_per_second_max);
    let router = server::router(upstream, cache, &auth).merge(metrics);
    edge::server::run(listener, router, shutdown).await
}
