//! The policy store: versions, assignments and private files in any object store.
//!
//! ```text
//! policy/{policy}/object/{hex}                   a checkpoint or a delta, named by the BLAKE3 of its bytes
//! policy/{policy}/parts/{hex}                    the hashes of an object's parts, if it has several; written first
//! policy/{policy}/version/{serial:010}.json      the signed manifest of a version
//! policy/{policy}/assignment/{epoch:010}.json    the signed assignment of an epoch
//! policy/{policy}/fold/{to:010}-{from:010}.json  the signed document of a squashed delta
//! policy/{policy}/pin/{serial:010}.json          keeps a version from garbage collection until it is deleted
//! policy/{policy}/revocation/{key id}.json       the signed revocation of a key
//! policy/{policy}/statement.json                 the signed timestamp, replaced every few seconds
//! policy/{policy}/trash/{hex}                    an object that garbage collection is about to delete
//! private/{key}                                  files that replicas do not read: run states, shard reports
//! ```
//! Entries under `policy/` never change once written, except the timestamp and the signatures that
//! `resign` adds. Garbage collection deletes objects. Everything is verified when it is read:
//! objects by size and digest, documents by signature and by the place they were found in.
//!
//! The store does not know which version a line stands at or who may write. The database and the
//! fence in the manifest decide that.
//!
//! On the local file system every write goes to a new file, which is flushed with its folder before
//! it gets its name. Deletes are not flushed, so a power cut may undo them.

mod cache;
mod catalog;
mod documents;
mod download;
mod files;
mod fsck;
mod gc;
mod keys;
mod materialize;
mod objects;
mod path;
mod pins;
mod revocations;
mod squash;
mod timestamp;

use std::collections::BTreeMap;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures::TryStreamExt as _;
use object_store::{
    ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions, PutPayload, local::LocalFileSystem, path::Path,
};

use artifact::digest::Digest;
use artifact::sign;
use artifact::threads::Threads;
use keys::private_key;

pub use cache::{Cache, CachedObject, Limits};
pub use catalog::{Catalog, Costs, StoredObject};
pub use documents::{Signed, manifest_digest};
pub use fsck::{Finding, Report, Severity};
pub use gc::{GcReport, Retention};
pub use keys::{check_policy, policy_named_after};
pub use materialize::Materialized;
pub use objects::Pieces;
pub use path::{Path as VersionPath, Step};
pub use pins::Pin;
pub use revocations::Revocation;
pub use squash::{SQUASH_SPANS, SquashOutcome, due_squashes};
pub use timestamp::Timestamp;

/// Why a request to the store failed.
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
    /// `cause` is not a `source`: its text includes all errors behind it, which a chain would
    /// repeat.
    #[error("{action} {key}: {cause}")]
    Backend {
        action: &'static str,
        key: String,
        cause: object_store::Error,
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
    #[error("{key} has more than {count_max} entries: somebody else may write to the store")]
    Listing { key: String, count_max: usize },
    #[error("object {object} was not downloaded: {reason}")]
    Download { object: Digest, reason: String },
    /// The caller of garbage collection could not say which versions it needs.
    #[error("{0}")]
    Retention(String),
    #[error("a blocking task did not finish: {0}")]
    Task(#[from] tokio::task::JoinError),
}

impl Error {
    /// Whether the same request may succeed a moment later.
    fn is_transient(&self) -> bool {
        match self {
            Error::Backend { cause, .. } => download::is_transient(cause),
            Error::Download { .. } => true,
            _ => false,
        }
    }
}

/// The result of writing an entry unless it exists.
#[derive(Debug, Clone, PartialEq)]
pub enum PutOutcome<T> {
    Created,
    /// It existed already; nothing was changed.
    Exists(T),
    /// Something that the caller's key did not sign has its place; nothing was changed.
    Taken,
}

/// A policy store. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Store {
    backend: Arc<dyn ObjectStore>,
    cache: Option<Cache>,
    threads: Threads,
}

impl Store {
    /// Opens `file://<path>` (absolute or relative to the working folder; created if missing) or
    /// `s3://<bucket>/…` with the credentials of the usual `AWS_*` variables.
    pub fn open(url: &str) -> Result<Self, Error> {
        let refuse = |reason: String| Error::Url {
            url: url.into(),
            reason,
        };
        match url.split_once("://") {
            Some(("file", path)) if !path.is_empty() => {
                let path = PathBuf::from(path);
                // The training state names users' generations. An existing folder keeps its mode.
                let created = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path);
                created.map_err(|error| refuse(error.to_string()))?;
                let backend = LocalFileSystem::new_with_prefix(&path)
                    .map_err(|error| refuse(error.to_string()))?
                    .with_fsync(true);
                Ok(Self::over(Arc::new(backend)))
            }
            Some(("s3", _)) => Self::open_bucket(url, object_store::aws::AmazonS3Builder::from_env()),
            _ => Err(refuse("use file://<path> or s3://<bucket>/<prefix>".into())),
        }
    }

    fn open_bucket(url: &str, access: object_store::aws::AmazonS3Builder) -> Result<Self, Error> {
        let refuse = |error: object_store::Error| {
            let causes = std::iter::successors(Some(&error as &dyn std::error::Error), |cause| cause.source());
            let root_cause = causes.last().map(ToString::to_string).unwrap_or_default();
            let mut reason = error.to_string();
            if !reason.contains(&root_cause) {
                reason = format!("{reason}: {root_cause}");
            }
            Error::Url {
                url: url.into(),
                reason,
            }
        };
        let bucket = access.with_url(url).build().map_err(refuse)?;
        let prefix = url.splitn(4, '/').nth(3).unwrap_or_default();
        let prefix = Path::parse(prefix).map_err(|error| refuse(error.into()))?;
        let backend = object_store::prefix::PrefixStore::new(bucket, prefix);
        Ok(Self::over(Arc::new(backend)))
    }

    /// A store over any backend that can write an entry unless it exists.
    pub fn over(backend: Arc<dyn ObjectStore>) -> Self {
        Store {
            backend,
            cache: None,
            threads: Threads::ONE,
        }
    }

    /// Reads objects of several parts through `cache`.
    pub fn with_cache(self, cache: Cache) -> Self {
        Store {
            cache: Some(cache),
            ..self
        }
    }

    /// Sets the threads that encode, apply and hash.
    pub fn with_threads(self, threads: Threads) -> Self {
        Store { threads, ..self }
    }

    pub fn threads(&self) -> &Threads {
        &self.threads
    }

    /// The object store, for callers that pass its bytes on unverified.
    pub fn backend(&self) -> &Arc<dyn ObjectStore> {
        &self.backend
    }

    /// Writes or replaces `private/{key}`.
    pub async fn put_private(&self, key: &str, bytes: &Bytes) -> Result<(), Error> {
        self.put(&private_key(key)?, bytes.clone(), PutMode::Overwrite).await?;
        Ok(())
    }

    /// Reads `private/{key}` without verifying it: the caller's format has its own checksum.
    pub async fn get_private(&self, key: &str) -> Result<Bytes, Error> {
        self.get(&private_key(key)?, u64::MAX).await
    }

    /// Reads a part of `private/{key}`.
    pub async fn get_private_range(&self, key: &str, range: std::ops::Range<u64>) -> Result<Bytes, Error> {
        let key = private_key(key)?;
        self.backend.get_range(&key, range).await.map_err(backend("read", &key))
    }

    /// Deletes `private/{key}` if it exists.
    pub async fn delete_private(&self, key: &str) -> Result<(), Error> {
        self.delete(&private_key(key)?).await
    }

    /// The keys below `private/{folder}`, without `private/`.
    pub async fn list_private(&self, folder: &str) -> Result<BTreeMap<String, StoredObject>, Error> {
        let folder = private_key(folder)?;
        let entries = self.backend.list(Some(&folder));
        let named = entries.map_ok(|entry| {
            let key = entry.location.as_ref().trim_start_matches("private/").to_owned();
            (key, StoredObject::of(&entry))
        });
        named.try_collect().await.map_err(backend("list", &folder))
    }

    async fn delete(&self, key: &Path) -> Result<(), Error> {
        match self.backend.delete(key).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(source) => Err(backend("delete", key)(source)),
        }
    }

    /// False if the mode is `Create` and the key exists.
    async fn put(&self, key: &Path, bytes: impl Into<PutPayload>, mode: PutMode) -> Result<bool, Error> {
        let options = PutOptions {
            mode,
            ..PutOptions::default()
        };
        match self.backend.put_opts(key, bytes.into(), options).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::AlreadyExists { .. }) => Ok(false),
            Err(source) => Err(backend("write", key)(source)),
        }
    }

    /// Reads an entry of at most `bytes_max` bytes.
    async fn get(&self, key: &Path, bytes_max: u64) -> Result<Bytes, Error> {
        let found = self.backend.get(key).await.map_err(backend("read", key))?;
        let too_large = |size: u64| Error::Corrupt {
            key: key.to_string(),
            reason: format!("it has {size} bytes; at most {bytes_max} are allowed"),
        };
        if found.meta.size > bytes_max {
            return Err(too_large(found.meta.size));
        }
        // A server may send more than it announced.
        let mut chunks = found.into_stream();
        let mut bytes = BytesMut::new();
        while let Some(chunk) = chunks.try_next().await.map_err(backend("read", key))? {
            bytes.extend_from_slice(&chunk);
            if bytes.len() as u64 > bytes_max {
                return Err(too_large(bytes.len() as u64));
            }
        }
        Ok(bytes.freeze())
    }

    async fn head(&self, key: &Path) -> Result<Option<ObjectMeta>, Error> {
        match self.backend.head(key).await {
            Ok(meta) => Ok(Some(meta)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(source) => Err(backend("look at", key)(source)),
        }
    }
}

/// Runs hashing and decoding away from the threads that serve requests.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
    Ok(tokio::task::spawn_blocking(work).await?)
}

fn backend(action: &'static str, key: &Path) -> impl FnOnce(object_store::Error) -> Error {
    let key = key.to_string();
    move |cause| match cause {
        object_store::Error::NotFound { .. } => Error::NotFound(key),
        cause => Error::Backend { action, key, cause },
    }
}

#[cfg(test)]
mod tests;
