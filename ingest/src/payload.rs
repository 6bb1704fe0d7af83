//! Payloads: what is too large for a record, in an object store that producers, ingest and readers share. A record names one by
//! the BLAKE3 of its bytes, their number and what they are; whatever is read is held against both.
//!
//! ```text
//! payload/{tenant}/{digest}     {tenant}: BLAKE3 of the tenant's name, so that no tenant reads another's by its digest
//! ```
//! Payloads are there before the record that names them. Apart from the policy store on purpose: every replica of the fleet
//! reads that one, and contexts are users' text. Which generation refers to what is in the table `payload_reference`.

mod experts;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use futures::{Stream, TryStreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt as _, PutPayload};
use time::OffsetDateTime;

use crate::event::{PAYLOAD_BYTES_MAX, PayloadRef};

pub use experts::{Experts, Malformed};

/// Token ids, u32 little-endian.
pub const TOKEN_IDS: &str = "application/vnd.springtide.token-ids";
/// [`Experts`].
pub const EXPERTS: &str = "application/vnd.springtide.experts";

const FOLDER: &str = "payload";

/// Why a payload is not to be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("ingest.payload_store is {url:?}: {reason}")]
    Url { url: String, reason: String },
    #[error("it is not in the store")]
    Missing,
    #[error("what is in the store is not it: {0}")]
    Differs(String),
    /// Says nothing about the payload; asking again may help.
    #[error("{action} a payload: {why}")]
    Away {
        action: &'static str,
        /// Not a `source`: its words have those of all errors behind it, which a chain would repeat.
        why: object_store::Error,
    },
}

/// A payload as the store lists it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Object {
    /// [`tenant_hash`].
    pub tenant: [u8; 32],
    pub digest: [u8; 32],
    /// Written last.
    pub written_at: OffsetDateTime,
}

/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct Store {
    backend: Arc<dyn ObjectStore>,
}

impl Store {
    /// Opens `file://<path>` (the folder is created) or, with the feature `s3`, `s3://<bucket>/<prefix>` with the credentials of
    /// the usual `AWS_*` variables.
    pub fn open(url: &str) -> Result<Self, Error> {
        let refuse = |reason: String| Error::Url {
            url: url.to_owned(),
            reason,
        };
        let backend: Arc<dyn ObjectStore> = match url.split_once("://") {
            Some(("file", path)) if !path.is_empty() => {
                let path = PathBuf::from(path);
                std::fs::create_dir_all(&path).map_err(|error| refuse(error.to_string()))?;
                let folder = LocalFileSystem::new_with_prefix(&path).map_err(|error| refuse(error.to_string()))?;
                Arc::new(folder.with_fsync(true))
            }
            Some(("s3", rest)) => bucket(url, rest).map_err(refuse)?,
            _ => return Err(refuse("file://<path> and s3://<bucket>/<prefix> are known".to_owned())),
        };
        Ok(Self { backend })
    }

    /// Writes bytes under the name of their content. Repeating it is harmless, and renews their age.
    pub async fn put(&self, tenant: &str, bytes: Bytes, media_type: &str) -> Result<PayloadRef, Error> {
        let payload = PayloadRef::of(&bytes, media_type);
        let payload_bytes = PutPayload::from(bytes);
        let written = self.backend.put(&key(tenant, &payload.digest), payload_bytes).await;
        written.map_err(away("write"))?;
        Ok(payload)
    }

    /// Reads a payload; its size and digest are verified.
    pub async fn get(&self, tenant: &str, payload: &PayloadRef) -> Result<Bytes, Error> {
        let found = self.backend.get(&key(tenant, &payload.digest)).await;
        let found = found.map_err(away("read"))?;
        fits(found.meta.size, payload)?;
        let bytes = found.bytes().await.map_err(away("read"))?;
        let digest = blake3::hash(&bytes);
        if digest.as_bytes() != &payload.digest {
            return Err(Error::Differs(format!("its digest is {digest}")));
        }
        Ok(bytes)
    }

    /// Whether a payload of this size is there, without reading it.
    pub async fn look(&self, tenant: &str, payload: &PayloadRef) -> Result<(), Error> {
        let found = self.backend.head(&key(tenant, &payload.digest)).await;
        fits(found.map_err(away("look for"))?.size, payload)
    }

    /// Deletes what nothing refers to; it is no error when it is not there.
    pub(crate) async fn delete(&self, tenant: &str, digest: &[u8; 32]) -> Result<(), Error> {
        self.delete_at(&key(tenant, digest)).await
    }

    /// When a payload was written last; `None`: it is not there.
    pub(crate) async fn written_at(&self, tenant: &str, digest: &[u8; 32]) -> Result<Option<OffsetDateTime>, Error> {
        match self.backend.head(&key(tenant, digest)).await {
            Ok(found) => Ok(Some(written_at(&found))),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(source) => Err(away("look for")(source)),
        }
    }

    /// Every payload of every tenant; objects with other names are passed over.
    pub(crate) fn objects(&self) -> impl Stream<Item = Result<Object, Error>> {
        let found = self.backend.list(Some(&Path::from(FOLDER)));
        found.map_err(away("list")).try_filter_map(|meta| {
            let object = named(&meta.location).map(|(tenant, digest)| Object {
                tenant,
                digest,
                written_at: written_at(&meta),
            });
            std::future::ready(Ok(object))
        })
    }

    /// Whether a listed payload is there still and was not written again since `moment`. Asked like this because a store may tell
    /// milliseconds when it lists and seconds when it is asked for one.
    pub(crate) async fn is_older(&self, object: &Object, moment: OffsetDateTime) -> Result<bool, Error> {
        match self.backend.head(&key_of(&object.tenant, &object.digest)).await {
            Ok(found) => Ok(written_at(&found) < moment),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(source) => Err(away("look for")(source)),
        }
    }

    /// Deletes a listed payload; it is no error when it is not there.
    pub(crate) async fn remove(&self, object: &Object) -> Result<(), Error> {
        self.delete_at(&key_of(&object.tenant, &object.digest)).await
    }

    async fn delete_at(&self, key: &Path) -> Result<(), Error> {
        match self.backend.delete(key).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(source) => Err(away("delete")(source)),
        }
    }
}

#[cfg(feature = "s3")]
fn bucket(url: &str, rest: &str) -> Result<Arc<dyn ObjectStore>, String> {
    let bucket = object_store::aws::AmazonS3Builder::from_env().with_url(url).build();
    let bucket = bucket.map_err(|error| error.to_string())?;
    let prefix = rest.split_once('/').map_or("", |(_, prefix)| prefix);
    let prefix = Path::parse(prefix).map_err(|error| error.to_string())?;
    Ok(Arc::new(object_store::prefix::PrefixStore::new(bucket, prefix)))
}

#[cfg(not(feature = "s3"))]
fn bucket(_url: &str, _rest: &str) -> Result<Arc<dyn ObjectStore>, String> {
    Err("this build has no S3 (feature `s3`)".to_owned())
}

/// The token ids of a payload of type [`TOKEN_IDS`].
pub fn token_ids(bytes: &[u8]) -> Option<Vec<u32>> {
    let (ids, rest) = bytes.as_chunks::<4>();
    rest.is_empty()
        .then(|| ids.iter().map(|id| u32::from_le_bytes(*id)).collect())
}

/// The bytes of a payload of type [`TOKEN_IDS`]; also what the hash of a shared prefix is taken over.
pub fn token_bytes(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

fn fits(size: u64, payload: &PayloadRef) -> Result<(), Error> {
    if size == payload.size_bytes && size <= PAYLOAD_BYTES_MAX {
        return Ok(());
    }
    let wanted = payload.size_bytes;
    Err(Error::Differs(format!("it has {size} bytes, not {wanted}")))
}

/// What stands for a tenant in a key.
pub(crate) fn tenant_hash(tenant: &str) -> [u8; 32] {
    *blake3::hash(tenant.as_bytes()).as_bytes()
}

fn key(tenant: &str, digest: &[u8; 32]) -> Path {
    key_of(&tenant_hash(tenant), digest)
}

fn key_of(tenant: &[u8; 32], digest: &[u8; 32]) -> Path {
    Path::from_iter([FOLDER.to_owned(), hex::encode(tenant), hex::encode(digest)])
}

/// Tenant and digest of a key; `None`: it is none.
fn named(key: &Path) -> Option<([u8; 32], [u8; 32])> {
    let mut parts = key.parts();
    let folder = parts.next()?;
    let mut next = || {
        let part = parts.next()?;
        let bytes = hex::decode(part.as_ref()).ok()?;
        bytes.try_into().ok()
    };
    let (tenant, digest) = (next()?, next()?);
    (folder.as_ref() == FOLDER && key_of(&tenant, &digest) == *key).then_some((tenant, digest))
}

fn written_at(meta: &ObjectMeta) -> OffsetDateTime {
    let nanoseconds = meta.last_modified.timestamp_nanos_opt().map_or(0, i128::from);
    OffsetDateTime::from_unix_timestamp_nanos(nanoseconds).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

fn away(action: &'static str) -> impl Fn(object_store::Error) -> Error {
    move |why| match why {
        object_store::Error::NotFound { .. } => Error::Missing,
        why => Error::Away { action, why },
    }
}
