//! The policy store: versions, assignments and private checkpoints in any object store.
//!
//! ```text
//! policy/{policy}/object/{hex}                 an image or a delta, named by the BLAKE3 of its bytes
//! policy/{policy}/parts/{hex}                  the hashes of an object's parts, where it has several; written before it
//! policy/{policy}/version/{serial:010}.json    the signed manifest of a version
//! policy/{policy}/assignment/{epoch:010}.json  the signed assignment of an epoch
//! policy/{policy}/fold/{to:010}-{from:010}.json  a signed delta over several steps, beside those of each step
//! policy/{policy}/pin/{serial:010}.json        a version that is kept whatever happens; its deletion is the unpinning
//! policy/{policy}/revocation/{key id}.json     a signed statement that a key is trusted no longer
//! policy/{policy}/statement.json               the signed statement of what is newest, replaced again and again
//! policy/{policy}/trash/{hex}                  an object that a collection is about to delete
//! private/{key}                                what is for nobody's replicas: a run's optimiser state, what shares report
//! ```
//! What is under `policy/` is written once and never changed, but for the statement; `gc` takes objects away. Whatever is read is verified: objects by size and digest,
//! documents by signature and by the place they were found in. Which line a version heads, and who may write, is not
//! known here: the database and the fence in the manifest decide that.
//!
//! On the local file system every write is a file of its own, flushed with its folder before it gets its name; a delete is
//! not flushed and may come undone in a power cut.

mod cache;
mod catalog;
mod documents;
mod download;
mod folds;
mod fsck;
mod gc;
mod materialise;
mod objects;
mod partial;
mod path;
mod pins;
mod revocations;
mod statement;

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use object_store::{
    ObjectStore, ObjectStoreExt as _, PutMode, PutOptions, PutPayload, local::LocalFileSystem, path::Path,
};

use artifact::digest::Digest;
use artifact::sign;
use artifact::threads::Threads;

pub use cache::{Arrival, Cache, Limits};
pub use catalog::{Catalog, Costs, Stored};
pub use documents::Signed;
pub use folds::{Folded, SPANS, due};
pub use fsck::{Finding, Report, Severity};
pub use gc::{Collected, Keep};
pub use materialise::Materialised;
pub use objects::Pieces;
pub use partial::PartialDelta;
pub use path::{Path as VersionPath, Step};
pub use pins::Pin;
pub use revocations::Revocation;
pub use statement::Statement;

/// Why the store could not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the store's URL `{url}`: {reason}")]
    Url { url: String, reason: String },
    #[error("`{0}` is not a policy's name: 1 to 64 of a–z, 0–9, `.`, `_`, `-`, not starting with `.`")]
    Policy(String),
    #[error("`{key}` is not a key: {reason}")]
    Key { key: String, reason: String },
    #[error("{0} is not there")]
    NotFound(String),
    /// Not a `source`: its words have those of all errors behind it, which a chain would repeat.
    #[error("{action} {key}: {why}")]
    Backend {
        action: &'static str,
        key: String,
        why: object_store::Error,
    },
    #[error("{key} is corrupt: {reason}")]
    Corrupt { key: String, reason: String },
    #[error("{key}: {source}")]
    Signature { key: String, source: sign::Error },
    #[error("{key} contradicts itself: {reason}")]
    Document { key: String, reason: String },
    #[error("version {version} of {policy} cannot be put together: {reason}")]
    NoPath {
        policy: String,
        version: i64,
        reason: String,
    },
    #[error("object {object} did not arrive: {reason}")]
    Download { object: Digest, reason: String },
    /// Who was asked could not say what is needed.
    #[error("{0}")]
    Needed(String),
    #[error("a blocking task did not finish: {0}")]
    Task(#[from] tokio::task::JoinError),
}

/// What a put-if-absent found.
#[derive(Debug, Clone, PartialEq)]
pub enum PutOutcome<T> {
    Created,
    /// Somebody wrote this first; nothing was changed.
    Exists(T),
}

/// A policy store. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Store {
    backend: Arc<dyn ObjectStore>,
    cache: Option<Cache>,
    threads: Threads,
}

impl Store {
    /// Opens `file://<path>` (absolute, or relative to the working folder; the folder is created) or
    /// `s3://<bucket>/…` with the credentials of the usual `AWS_*` variables.
    pub fn open(url: &str) -> Result<Self, Error> {
        let refuse = |reason: String| Error::Url {
            url: url.into(),
            reason,
        };
        match url.split_once("://") {
            Some(("file", path)) if !path.is_empty() => {
                let path = PathBuf::from(path);
                std::fs::create_dir_all(&path).map_err(|error| refuse(error.to_string()))?;
                let backend = LocalFileSystem::new_with_prefix(&path)
                    .map_err(|error| refuse(error.to_string()))?
                    .with_fsync(true);
                Ok(Self::over(Arc::new(backend)))
            }
            Some(("s3", _)) => Self::open_bucket(url, object_store::aws::AmazonS3Builder::from_env()),
            _ => Err(refuse("file://<path> and s3://<bucket>/<prefix> are known".into())),
        }
    }

    fn open_bucket(url: &str, access: object_store::aws::AmazonS3Builder) -> Result<Self, Error> {
        let refuse = |error: object_store::Error| {
            let causes = std::iter::successors(Some(&error as &dyn std::error::Error), |cause| cause.source());
            let last = causes.last().map(ToString::to_string).unwrap_or_default();
            let whole = error.to_string();
            Error::Url {
                url: url.into(),
                reason: if whole.contains(&last) {
                    whole
                } else {
                    format!("{whole}: {last}")
                },
            }
        };
        let bucket = access.with_url(url).build().map_err(refuse)?;
        let prefix = url.splitn(4, '/').nth(3).unwrap_or_default();
        let prefix = Path::parse(prefix).map_err(|error| refuse(error.into()))?;
        Ok(Self::over(Arc::new(object_store::prefix::PrefixStore::new(
            bucket, prefix,
        ))))
    }

    /// A store over any backend that supports put-if-absent.
    pub fn over(backend: Arc<dyn ObjectStore>) -> Self {
        Store {
            backend,
            cache: None,
            threads: Threads::ONE,
        }
    }

    /// Objects of several parts are read through `cache`.
    pub fn with_cache(self, cache: Cache) -> Self {
        Store {
            cache: Some(cache),
            ..self
        }
    }

    /// Deltas and folds are made and followed, and images hashed, on these.
    pub fn with_threads(self, threads: Threads) -> Self {
        Store { threads, ..self }
    }

    pub fn threads(&self) -> &Threads {
        &self.threads
    }

    /// Where the bytes are; for whoever passes them on as they are.
    pub fn backend(&self) -> &Arc<dyn ObjectStore> {
        &self.backend
    }

    /// Writes or replaces `private/{key}`.
    pub async fn put_private(&self, key: &str, bytes: &Bytes) -> Result<(), Error> {
        let key = private_key(key)?;
        self.put(&key, bytes.clone(), PutMode::Overwrite).await?;
        Ok(())
    }

    /// Reads `private/{key}` as it was written; the caller's format has its own checksum.
    pub async fn get_private(&self, key: &str) -> Result<Bytes, Error> {
        self.get(&private_key(key)?, |_| Ok(())).await
    }

    /// Reads a part of `private/{key}`.
    pub async fn get_private_range(&self, key: &str, range: std::ops::Range<u64>) -> Result<Bytes, Error> {
        let key = private_key(key)?;
        self.backend.get_range(&key, range).await.map_err(backend("read", &key))
    }

    /// Deletes `private/{key}`; it is no error when it is not there.
    pub async fn delete_private(&self, key: &str) -> Result<(), Error> {
        self.delete(&private_key(key)?).await
    }

    async fn delete(&self, key: &Path) -> Result<(), Error> {
        match self.backend.delete(key).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(source) => Err(backend("delete", key)(source)),
        }
    }

    /// False when the mode is put-if-absent and the key is taken.
    async fn put(&self, key: &Path, bytes: Bytes, mode: PutMode) -> Result<bool, Error> {
        let options = PutOptions {
            mode,
            ..PutOptions::default()
        };
        match self.backend.put_opts(key, PutPayload::from(bytes), options).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::AlreadyExists { .. }) => Ok(false),
            Err(source) => Err(backend("write", key)(source)),
        }
    }

    /// `fits` judges the size before the bytes are read.
    async fn get(&self, key: &Path, fits: impl FnOnce(u64) -> Result<(), String>) -> Result<Bytes, Error> {
        let found = self.backend.get(key).await.map_err(backend("read", key))?;
        fits(found.meta.size).map_err(|reason| Error::Corrupt {
            key: key.to_string(),
            reason,
        })?;
        found.bytes().await.map_err(backend("read", key))
    }
}

/// Runs hashing and decoding away from the threads that serve requests.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
    Ok(tokio::task::spawn_blocking(work).await?)
}

fn key(policy: &str, rest: &str) -> Result<Path, Error> {
    let fits = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-');
    if policy.is_empty() || policy.len() > 64 || policy.starts_with('.') || !policy.bytes().all(fits) {
        return Err(Error::Policy(policy.into()));
    }
    Ok(Path::from(format!("policy/{policy}/{rest}")))
}

fn object_key(policy: &str, digest: &Digest) -> Result<Path, Error> {
    key(policy, &format!("object/{digest}"))
}

fn parts_key(policy: &str, digest: &Digest) -> Result<Path, Error> {
    key(policy, &format!("parts/{digest}"))
}

fn private_key(key: &str) -> Result<Path, Error> {
    let refuse = |reason: String| Error::Key {
        key: key.into(),
        reason,
    };
    if key.is_empty() || key.starts_with('/') || key.ends_with('/') {
        return Err(refuse("it is empty, or starts or ends with a slash".into()));
    }
    // refuses empty parts, `.` and `..`
    Path::parse(format!("private/{key}")).map_err(|error| refuse(error.to_string()))
}

fn backend(action: &'static str, key: &Path) -> impl FnOnce(object_store::Error) -> Error {
    let key = key.to_string();
    move |why| match why {
        object_store::Error::NotFound { .. } => Error::NotFound(key),
        why => Error::Backend { action, key, why },
    }
}

#[cfg(test)]
mod tests;
