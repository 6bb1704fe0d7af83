//! Release: which alias names which version. The leader's loop lets aliases follow their lines; people move them by hand
//! through the router. Every change is rows (assignment, release, transition) in one transaction under a new epoch, then
//! one signed document in the policy store, then an announcement.
//!
//! It never touches weights, lines or runs: it reads what the trainer wrote and answers with assignments.

mod books;
mod change;
mod follow;
mod http;
mod plan;
mod publish;

pub use follow::{Follow, follow};
pub use http::router;

use crate::options::ReleaseOptions;
use anyhow::Context;
use ingest::log::Producer;
use policy::sign::{SigningKey, TrustedKeys};
use policy::store::Store;
use sqlx::PgPool;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicI64;

/// The alias that users' traffic resolves to.
pub const CHAMPION: &str = "champion";
/// The frozen arm: the first version of the realtime line.
pub const BASE: &str = "base";
/// What the last successful offline run made.
pub const CANDIDATE: &str = "candidate";
/// The line that production feedback trains.
pub const REALTIME: &str = "realtime";

/// What a change of assignments needs; shared by the loop and the router.
#[derive(Clone)]
pub struct Desk(Arc<Inner>);

struct Inner {
    options: ReleaseOptions,
    policy: String,
    pool: PgPool,
    store: Store,
    key: SigningKey,
    keys_dir: PathBuf,
    /// None: followers find new assignments by looking at the store.
    log: Option<Producer>,
    /// Newest epoch whose document is known to be in the store.
    published: AtomicI64,
}

impl Desk {
    /// Loads the key `release` out of `keys_dir`, or makes it.
    pub fn new(
        options: ReleaseOptions,
        policy: impl Into<String>,
        pool: PgPool,
        store: Store,
        keys_dir: &Path,
        log: Option<Producer>,
    ) -> anyhow::Result<Self> {
        let key = SigningKey::load_or_create(keys_dir, "release").context("load the release key")?;
        Ok(Desk(Arc::new(Inner {
            options,
            policy: policy.into(),
            pool,
            store,
            key,
            keys_dir: keys_dir.to_path_buf(),
            log,
            published: AtomicI64::new(0),
        })))
    }

    /// Keys may come and go while this runs, so they are read when they are needed.
    async fn trusted(&self) -> anyhow::Result<TrustedKeys> {
        let keys = TrustedKeys::load(&self.0.keys_dir).context("load the trusted keys")?;
        let trusted = self.0.store.trusted(&self.0.policy, keys).await;
        trusted.context("look for revoked keys")
    }
}
