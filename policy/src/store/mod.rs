//! The policy store: versions, assignments and private checkpoints in any object store.
//!
//! ```text
//! policy/{policy}/object/{hex}                 an image or a delta, named by the BLAKE3 of its bytes
//! policy/{policy}/version/{serial:010}.json    the signed manifest of a version
//! policy/{policy}/assignment/{epoch:010}.json  the signed assignment of an epoch
//! private/{key}                                what only its writer reads, such as a run's optimiser state
//! ```
//! Everything under `policy/` is written once and never changed. Whatever is read is verified: objects by size and digest,
//! documents by signature and by the place they were found in. Which line a version heads, and who may write, is not
//! known here: the database and the fence in the manifest decide that.
//!
//! On the local file system every write is a file of its own, flushed with its folder before it gets its name; a delete is
//! not flushed and may come undone in a power cut.

mod documents;
mod materialise;

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use object_store::{
    ObjectStore, ObjectStoreExt as _, PutMode, PutOptions, PutPayload, local::LocalFileSystem, path::Path,
};

use crate::digest::Digest;
use crate::manifest::ObjectRef;
use crate::sign;

pub use materialise::Materialised;

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
    #[error("{action} {key}")]
    Backend {
        action: &'static str,
        key: String,
        source: object_store::Error,
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
}

impl Store {
    /// Opens `file://<path>` (absolute, or relative to the working folder; the folder is created) or, with the feature
    /// `s3`, `s3://<bucket>/…` with the credentials of the usual `AWS_*` variables.
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
            Some(("s3", _)) => Self::open_s3(url),
            _ => Err(refuse("file://<path> and s3://<bucket>/<prefix> are known".into())),
        }
    }

    #[cfg(feature = "s3")]
    fn open_s3(url: &str) -> Result<Self, Error> {
        let refuse = |error: object_store::Error| Error::Url {
            url: url.into(),
            reason: error.to_string(),
        };
        let bucket = object_store::aws::AmazonS3Builder::from_env()
            .with_url(url)
            .build()
            .map_err(refuse)?;
        let prefix = url.splitn(4, '/').nth(3).unwrap_or_default();
        let prefix = Path::parse(prefix).map_err(|error| refuse(error.into()))?;
        Ok(Self::over(Arc::new(object_store::prefix::PrefixStore::new(
            bucket, prefix,
        ))))
    }

    #[cfg(not(feature = "s3"))]
    fn open_s3(url: &str) -> Result<Self, Error> {
        Err(Error::Url {
            url: url.into(),
            reason: "this build has no S3 (feature `s3`)".into(),
        })
    }

    /// A store over any backend that supports put-if-absent.
    pub fn over(backend: Arc<dyn ObjectStore>) -> Self {
        Store { backend }
    }

    /// Writes an object under the name of its content. Repeating it is harmless; an object that is there but damaged is
    /// replaced.
    pub async fn put_object(&self, policy: &str, bytes: &Bytes) -> Result<ObjectRef, Error> {
        let object = blocking({
            let bytes = bytes.clone();
            move || ObjectRef::of(&bytes)
        })
        .await?;
        let key = object_key(policy, &object.digest)?;
        if self.put(&key, bytes.clone(), PutMode::Create).await? {
            return Ok(object);
        }
        match self.get_object(policy, &object).await {
            Ok(_) => {}
            Err(error @ Error::Corrupt { .. }) => {
                tracing::warn!(%key, %error, "replacing a damaged object");
                self.put(&key, bytes.clone(), PutMode::Overwrite).await?;
            }
            Err(error) => return Err(error),
        }
        Ok(object)
    }

    /// Reads an object; its size and digest are verified.
    pub async fn get_object(&self, policy: &str, object: &ObjectRef) -> Result<Bytes, Error> {
        let bytes = self.fetch_object(policy, object).await?;
        let digest = blocking({
            let bytes = bytes.clone();
            move || Digest::of(&bytes)
        })
        .await?;
        if digest == object.digest {
            return Ok(bytes);
        }
        Err(Error::Corrupt {
            key: object_key(policy, &object.digest)?.into(),
            reason: format!("its digest is {digest}"),
        })
    }

    /// Reads an object of the right size without looking at its bytes.
    async fn fetch_object(&self, policy: &str, object: &ObjectRef) -> Result<Bytes, Error> {
        let key = object_key(policy, &object.digest)?;
        self.get(&key, |size| {
            if size == object.size_bytes {
                Ok(())
            } else {
                Err(format!("it has {size} bytes, not {}", object.size_bytes))
            }
        })
        .await
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

    /// Deletes `private/{key}`; it is no error when it is not there.
    pub async fn delete_private(&self, key: &str) -> Result<(), Error> {
        let key = private_key(key)?;
        match self.backend.delete(&key).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(source) => Err(backend("delete", &key)(source)),
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
    move |source| match source {
        object_store::Error::NotFound { .. } => Error::NotFound(key),
        source => Error::Backend { action, key, source },
    }
}

#[cfg(test)]
mod tests;
