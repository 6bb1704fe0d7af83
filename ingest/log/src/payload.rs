//! Payloads: bytes that are too large for a record, in an object store that producers, ingest and
//! readers share.
//!
//! A record refers to a payload by BLAKE3 digest, size and media type. Readers check digest and
//! size.
//!
//! ```text
//! payload/{tenant}/{digest}     {tenant}: BLAKE3 of the tenant's name
//! export/{tenant}/{digest}      parts of files that runs made of datasets
//! ```
//! The tenant is part of the key so that no tenant can read another's payload by its digest.
//! Payloads are uploaded before the record that refers to them. They are not in the policy store,
//! which every replica of the fleet can read, because contexts are user text. The table
//! `payload_reference` lists which generation refers to which payload.

mod experts;
#[cfg(test)]
mod tests;

use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use futures::{Stream, TryStreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt as _, PutPayload};
use time::OffsetDateTime;

use crate::event::PAYLOAD_BYTES_MAX;

pub use crate::event::{EXPERTS, PayloadRef, TOKEN_IDS};
pub use experts::{Experts, Malformed};

const PAYLOADS: &str = "payload";
/// A folder of its own, so that the role that answers people needs no right to read contexts.
const EXPORTS: &str = "export";

/// Why a payload could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("ingest.payload_store is {url:?}: {reason}")]
    Url { url: String, reason: String },
    #[error("it is not in the store")]
    Missing,
    #[error("the store has other bytes under its name: {0}")]
    Differs(String),
    /// The store failed. A retry may help.
    #[error("{action} a payload: {why}")]
    Unavailable {
        action: &'static str,
        /// Not a `source`, because its text already includes all causes.
        why: object_store::Error,
    },
}

/// The name of a payload in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    /// BLAKE3 of the tenant's name.
    tenant: [u8; 32],
    pub digest: [u8; 32],
}

impl Key {
    pub fn new(tenant: &str, digest: [u8; 32]) -> Self {
        Self {
            tenant: *blake3::hash(tenant.as_bytes()).as_bytes(),
            digest,
        }
    }

    fn path(&self, folder: &str) -> Path {
        Path::from_iter([folder.to_owned(), hex::encode(self.tenant), hex::encode(self.digest)])
    }

    /// `None` if the object is no payload of this folder.
    fn parse(folder: &str, path: &Path) -> Option<Self> {
        let mut parts = path.parts().skip(1);
        let mut hash = || hex::decode(parts.next()?.as_ref()).ok()?.try_into().ok();
        let (tenant, digest) = (hash()?, hash()?);
        let key = Self { tenant, digest };
        (key.path(folder) == *path).then_some(key)
    }
}

/// A payload in a listing of the store.
#[derive(Debug, Clone, PartialEq)]
pub struct Object {
    pub key: Key,
    /// The last upload.
    pub written_at: OffsetDateTime,
}

/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct Store {
    backend: Arc<dyn ObjectStore>,
    folder: &'static str,
}

impl Store {
    /// Opens `file://<path>` (the folder is created) or `s3://<bucket>/<prefix>` with the
    /// credentials of the usual `AWS_*` variables.
    pub fn open(url: &str) -> Result<Self, Error> {
        let refuse = |reason: String| Error::Url {
            url: url.to_owned(),
            reason,
        };
        let backend: Arc<dyn ObjectStore> = match url.split_once("://") {
            Some(("file", path)) if !path.is_empty() => {
                let path = PathBuf::from(path);
                // Payloads contain prompts. Other users cannot enter the folder.
                let created = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path);
                created.map_err(|error| refuse(error.to_string()))?;
                let folder = LocalFileSystem::new_with_prefix(&path).map_err(|error| refuse(error.to_string()))?;
                Arc::new(folder.with_fsync(true))
            }
            Some(("s3", rest)) => bucket(url, rest).map_err(refuse)?,
            _ => return Err(refuse("use file://<path> or s3://<bucket>/<prefix>".to_owned())),
        };
        Ok(Self {
            backend,
            folder: PAYLOADS,
        })
    }

    /// The exports of datasets, which are kept in the same way but in another folder.
    #[must_use]
    pub fn exports(&self) -> Self {
        Self {
            folder: EXPORTS,
            ..self.clone()
        }
    }

    /// Writes bytes under their digest. Idempotent. Renews the payload's age.
    pub async fn put(&self, tenant: &str, bytes: Bytes, media_type: &str) -> Result<PayloadRef, Error> {
        let payload = PayloadRef::of(&bytes, media_type);
        let payload_bytes = PutPayload::from(bytes);
        let written = self.backend.put(&self.path(tenant, &payload), payload_bytes).await;
        written.map_err(failed_to("write"))?;
        Ok(payload)
    }

    /// Reads a payload and checks its size and digest.
    pub async fn get(&self, tenant: &str, payload: &PayloadRef) -> Result<Bytes, Error> {
        let found = self.backend.get(&self.path(tenant, payload)).await;
        let found = found.map_err(failed_to("read"))?;
        check_size(found.meta.size, payload)?;
        let bytes = found.bytes().await.map_err(failed_to("read"))?;
        let digest = blake3::hash(&bytes);
        if digest.as_bytes() != &payload.digest {
            return Err(Error::Differs(format!("its digest is {digest}")));
        }
        Ok(bytes)
    }

    /// Checks that a payload of this size exists, without reading it.
    pub async fn check_exists(&self, tenant: &str, payload: &PayloadRef) -> Result<(), Error> {
        let found = self.backend.head(&self.path(tenant, payload)).await;
        check_size(found.map_err(failed_to("find"))?.size, payload)
    }

    fn path(&self, tenant: &str, payload: &PayloadRef) -> Path {
        Key::new(tenant, payload.digest).path(self.folder)
    }

    /// Deletes a payload that nothing refers to. Succeeds if it does not exist.
    pub async fn remove(&self, tenant: &str, payload: &PayloadRef) -> Result<(), Error> {
        self.delete(&Key::new(tenant, payload.digest)).await
    }

    /// Deletes a payload. Succeeds if it does not exist.
    pub async fn delete(&self, key: &Key) -> Result<(), Error> {
        match self.backend.delete(&key.path(self.folder)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(failed_to("delete")(error)),
        }
    }

    /// The last upload of a payload. `None` if it does not exist. Some stores return seconds here,
    /// but list milliseconds.
    pub async fn written_at(&self, key: &Key) -> Result<Option<OffsetDateTime>, Error> {
        match self.backend.head(&key.path(self.folder)).await {
            Ok(found) => Ok(Some(written_at(&found))),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(failed_to("find")(error)),
        }
    }

    /// Lists the payloads of all tenants. Skips objects with other names.
    pub fn objects(&self) -> impl Stream<Item = Result<Object, Error>> {
        let folder = self.folder;
        let found = self.backend.list(Some(&Path::from(folder)));
        found.map_err(failed_to("list")).try_filter_map(move |meta| {
            let object = Key::parse(folder, &meta.location).map(|key| Object {
                key,
                written_at: written_at(&meta),
            });
            std::future::ready(Ok(object))
        })
    }
}

fn bucket(url: &str, rest: &str) -> Result<Arc<dyn ObjectStore>, String> {
    let bucket = object_store::aws::AmazonS3Builder::from_env().with_url(url).build();
    let bucket = bucket.map_err(|error| error.to_string())?;
    let prefix = rest.split_once('/').map_or("", |(_, prefix)| prefix);
    let prefix = Path::parse(prefix).map_err(|error| error.to_string())?;
    Ok(Arc::new(object_store::prefix::PrefixStore::new(bucket, prefix)))
}

/// The token ids of a payload of type [`TOKEN_IDS`].
pub fn token_ids(bytes: &[u8]) -> Option<Vec<u32>> {
    let (ids, rest) = bytes.as_chunks::<4>();
    rest.is_empty()
        .then(|| ids.iter().map(|id| u32::from_le_bytes(*id)).collect())
}

/// The bytes of a payload of type [`TOKEN_IDS`]. The hash of a shared prefix covers the same bytes.
pub fn token_bytes(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

fn check_size(size: u64, payload: &PayloadRef) -> Result<(), Error> {
    if size == payload.size_bytes && size <= PAYLOAD_BYTES_MAX {
        return Ok(());
    }
    let wanted = payload.size_bytes;
    Err(Error::Differs(format!("it has {size} bytes, not {wanted}")))
}

fn written_at(meta: &ObjectMeta) -> OffsetDateTime {
    let nanoseconds = meta.last_modified.timestamp_nanos_opt().map_or(0, i128::from);
    OffsetDateTime::from_unix_timestamp_nanos(nanoseconds).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

fn failed_to(action: &'static str) -> impl Fn(object_store::Error) -> Error {
    move |why| match why {
        object_store::Error::NotFound { .. } => Error::Missing,
        why => Error::Unavailable { action, why },
    }
}
