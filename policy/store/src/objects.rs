//! Objects: written under the digest of their bytes and verified when they are read. Large ones are
//! written and read in parts.

use std::ops::Range;

use bytes::Bytes;
use futures::{Stream, StreamExt as _, TryStreamExt as _, stream};
use object_store::{GetResult, ObjectMeta, ObjectStoreExt as _, PutMode, PutPayload, WriteMultipart, path::Path};
use time::OffsetDateTime;

use super::keys::{object_key, parts_key, trash_key};
use super::{Error, Store, backend, blocking, download};
use artifact::digest::Digest;
use artifact::manifest::ObjectRef;
use artifact::memory::{Buffer, put_next};
use artifact::merkle;
use artifact::parts::{self, PART_BYTES, Parts};

/// Objects of at least this size are uploaded in parts: S3 takes at most 5 GB at once, and parts go
/// in parallel.
const MULTIPART_BYTES_MIN: u64 = 64 << 20;
/// Upload parts are larger only where an object would have more of them than S3 allows.
const UPLOAD_PART_BYTES: u64 = 16 << 20;
const UPLOAD_PARTS_MAX: u64 = 10_000;
const UPLOADS_AT_ONCE: usize = 8;
/// S3 copies at most 5 GB, and smaller copies may outlast a request. Unit tests use small objects.
pub(super) const COPY_BYTES_MAX: u64 = if cfg!(test) { 100 } else { 1 << 30 };
/// Parts of one object that are downloaded at once without a cache.
const STREAMS: usize = 4;
/// Putting an existing object that is older than this writes it again, so that its grace period
/// starts anew. Far below any sensible grace period.
const REFRESH_AGE: time::Duration = time::Duration::minutes(5);

/// The bytes of one object as several buffers, which are never copied together.
#[derive(Debug, Clone)]
pub struct Pieces {
    pieces: Vec<Bytes>,
    parts: Parts,
}

impl Pieces {
    /// Hashes the pieces, which blocks the calling thread.
    pub fn new(pieces: Vec<Bytes>) -> Self {
        let parts = Parts::of_pieces(&pieces);
        Pieces { pieces, parts }
    }

    pub fn object(&self) -> ObjectRef {
        self.parts.object()
    }
}

impl Store {
    /// Writes an object under its digest. Repeating it is harmless; a damaged object is replaced.
    pub async fn put_object(&self, policy: &str, bytes: &Bytes) -> Result<ObjectRef, Error> {
        let bytes = bytes.clone();
        let pieces = blocking(move || Pieces::new(vec![bytes])).await?;
        self.put_pieces(policy, &pieces).await
    }

    /// [`put_object`](Self::put_object) for bytes in several pieces.
    pub async fn put_pieces(&self, policy: &str, pieces: &Pieces) -> Result<ObjectRef, Error> {
        let object = pieces.object();
        let key = object_key(policy, &object.digest)?;
        if pieces.parts.count() > 1 {
            // Written first, so that readers of the object find its parts.
            let list = pieces.parts.to_bytes();
            self.put(&parts_key(policy, &object.digest)?, list, PutMode::Overwrite)
                .await?;
        }
        let multipart = object.size_bytes >= MULTIPART_BYTES_MIN;
        let created = match multipart {
            false => self.put(&key, payload(pieces), PutMode::Create).await?,
            true if self.head(&key).await?.is_some() => false,
            true => {
                self.upload(&key, pieces).await?;
                true
            }
        };
        if created {
            return Ok(object);
        }
        // Garbage collection may be about to delete an old object. Writing it again makes it young.
        let age = self
            .head(&key)
            .await?
            .map(|meta| OffsetDateTime::now_utc() - modified(&meta));
        if age.is_some_and(|age| age < REFRESH_AGE) {
            // Checks the store's bytes, not those of a cache.
            match self.check_object(policy, &object).await {
                Ok(()) => return Ok(object),
                Err(error @ (Error::Corrupt { .. } | Error::NotFound(_))) => {
                    tracing::warn!(%key, %error, "replacing a damaged object");
                }
                Err(error) => return Err(error),
            }
        }
        match multipart {
            false => drop(self.put(&key, payload(pieces), PutMode::Overwrite).await?),
            true => self.upload(&key, pieces).await?,
        }
        Ok(object)
    }

    /// Publishers call this after writing the manifest that names the objects. A garbage collection
    /// that began earlier may have deleted an object, or its list of parts, that existed when it was
    /// put. Returns how many it uploaded.
    pub async fn reupload_missing(&self, policy: &str, objects: &[&Pieces]) -> Result<usize, Error> {
        let mut missing = 0;
        for pieces in objects {
            let object = pieces.object();
            let exists = self.object_size(policy, &object.digest).await? == Some(object.size_bytes);
            if !exists || !self.has_parts(policy, &object).await? {
                self.put_pieces(policy, pieces).await?;
                missing += 1;
            }
        }
        Ok(missing)
    }

    /// Reads an object and verifies its size and digest.
    pub async fn get_object(&self, policy: &str, object: &ObjectRef) -> Result<Bytes, Error> {
        let bytes = self.fetch_object(policy, object).await?;
        let digest = blocking({
            let (bytes, threads) = (bytes.clone(), self.threads.clone());
            move || merkle::digest(&bytes, &threads)
        });
        check_digest(digest.await?, object, &object_key(policy, &object.digest)?)?;
        Ok(bytes)
    }

    /// Verifies an object as a stream, with one piece in memory at a time.
    pub async fn check_object(&self, policy: &str, object: &ObjectRef) -> Result<(), Error> {
        let key = object_key(policy, &object.digest)?;
        let mut stream = self.open_object(policy, object).await?.into_stream();
        let mut hasher = blake3::Hasher::new();
        while let Some(piece) = stream.next().await {
            let piece = piece.map_err(backend("read", &key))?;
            hasher = blocking(move || {
                hasher.update(&piece);
                hasher
            })
            .await?;
        }
        check_digest(Digest(*hasher.finalize().as_bytes()), object, &key)
    }

    /// Reads an object of the right size. Only a cache verifies its bytes.
    pub(super) async fn fetch_object(&self, policy: &str, object: &ObjectRef) -> Result<Bytes, Error> {
        if object.size_bytes > PART_BYTES {
            let read = match &self.cache {
                Some(cache) => cache.read(self, policy, object).await,
                None => self.fetch_parts(policy, object).await,
            };
            // The list of parts may be missing, or the object in the trash.
            if !matches!(read, Err(Error::NotFound(_))) {
                return read;
            }
        }
        let key = object_key(policy, &object.digest)?;
        let found = self.open_object(policy, object).await?;
        found.bytes().await.map_err(backend("read", &key))
    }

    /// Reads some bytes of an object without verifying them.
    pub async fn read_range(&self, policy: &str, object: &ObjectRef, range: Range<u64>) -> Result<Bytes, Error> {
        for key in places(policy, &object.digest)? {
            match download::part(self.backend.as_ref(), &key, range.clone(), |_| true).await {
                Err(download::Failure::Store(object_store::Error::NotFound { .. })) => {}
                read => return read.map_err(download_error(&key, object)),
            }
        }
        Err(Error::NotFound(object_key(policy, &object.digest)?.into()))
    }

    /// Whether an object exists with its size, possibly in the trash.
    pub async fn object_exists(&self, policy: &str, object: &ObjectRef) -> Result<bool, Error> {
        for key in places(policy, &object.digest)? {
            let meta = self.head(&key).await?;
            if meta.is_some_and(|meta| meta.size == object.size_bytes) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    async fn fetch_parts(&self, policy: &str, object: &ObjectRef) -> Result<Bytes, Error> {
        let key = object_key(policy, &object.digest)?;
        let mut parts = self.parts_at(&key, object, object.size_bytes);
        let mut bytes = Buffer::at_rest(usize::try_from(object.size_bytes).unwrap_or_default());
        let mut rest = &mut bytes[..];
        while let Some(part) = parts.try_next().await? {
            put_next(&mut rest, &part);
        }
        Ok(Bytes::from_owner(bytes))
    }

    /// The parts of the object at `key` in order, several downloaded at once.
    fn parts_at(
        &self,
        key: &Path,
        object: &ObjectRef,
        size_bytes: u64,
    ) -> impl Stream<Item = Result<Bytes, Error>> + Unpin {
        let ranges = (0..parts::count(size_bytes)).map(move |index| parts::range(size_bytes, index));
        let (backend, key, object) = (self.backend.clone(), key.clone(), *object);
        let downloads = ranges.map(move |range| {
            let (backend, key) = (backend.clone(), key.clone());
            async move {
                let part = download::part(backend.as_ref(), &key, range, |_| true).await;
                part.map_err(download_error(&key, &object))
            }
        });
        Box::pin(stream::iter(downloads).buffered(STREAMS))
    }

    /// The hashes of an object's parts.
    pub async fn get_parts(&self, policy: &str, object: &ObjectRef) -> Result<Parts, Error> {
        if let Some(parts) = Parts::single(*object) {
            return Ok(parts);
        }
        let key = parts_key(policy, &object.digest)?;
        let bytes = self.get(&key, Parts::list_bytes(object.size_bytes)).await?;
        Parts::from_bytes(*object, &bytes).map_err(|error| corrupt(&key, error.to_string()))
    }

    /// Whether an object's list of parts exists with its size. An object of one part needs none.
    async fn has_parts(&self, policy: &str, object: &ObjectRef) -> Result<bool, Error> {
        let bytes = match Parts::list_bytes(object.size_bytes) {
            0 => return Ok(true),
            bytes => bytes,
        };
        let meta = self.head(&parts_key(policy, &object.digest)?).await?;
        Ok(meta.is_some_and(|meta| meta.size == bytes))
    }

    /// Writes an object's list of parts anew, from its bytes.
    pub(super) async fn rebuild_parts(&self, policy: &str, object: &ObjectRef) -> Result<(), Error> {
        let key = object_key(policy, &object.digest)?;
        let size_bytes = object.size_bytes;
        let mut downloads = self.parts_at(&key, object, size_bytes);
        let mut list = vec![];
        for index in 0.. {
            let Some(part) = downloads.try_next().await? else { break };
            list.extend(blocking(move || Parts::hash_part(size_bytes, index, &part)).await?);
        }
        let parts = Parts::from_bytes(*object, &list).map_err(|error| corrupt(&key, error.to_string()))?;
        let list = parts.to_bytes();
        self.put(&parts_key(policy, &object.digest)?, list, PutMode::Overwrite)
            .await?;
        Ok(())
    }

    /// Opens an object of the right size, possibly in the trash.
    async fn open_object(&self, policy: &str, object: &ObjectRef) -> Result<GetResult, Error> {
        for key in places(policy, &object.digest)? {
            match self.backend.get(&key).await {
                Err(object_store::Error::NotFound { .. }) => {}
                Ok(found) if found.meta.size != object.size_bytes => {
                    let reason = format!("it has {} bytes, not {}", found.meta.size, object.size_bytes);
                    return Err(corrupt(&key, reason));
                }
                found => return found.map_err(backend("read", &key)),
            }
        }
        Err(Error::NotFound(object_key(policy, &object.digest)?.into()))
    }

    /// The size of the object with this digest, if it exists.
    pub async fn object_size(&self, policy: &str, digest: &Digest) -> Result<Option<u64>, Error> {
        let meta = self.head(&object_key(policy, digest)?).await?;
        Ok(meta.map(|meta| meta.size))
    }

    async fn upload(&self, key: &Path, pieces: &Pieces) -> Result<(), Error> {
        let size_bytes = pieces.object().size_bytes;
        let part_bytes = upload_part_bytes(size_bytes);
        let slices = pieces.pieces.iter().flat_map(|piece| {
            let starts = (0..piece.len()).step_by(part_bytes);
            starts.map(move |start| Ok(piece.slice(start..piece.len().min(start + part_bytes))))
        });
        self.upload_stream(key, size_bytes, stream::iter(slices)).await
    }

    /// Writes an object from a stream. It appears once its last part is there; an interrupted
    /// upload leaves nothing under its name.
    async fn upload_stream(
        &self,
        key: &Path,
        size_bytes: u64,
        mut pieces: impl Stream<Item = Result<Bytes, Error>> + Unpin,
    ) -> Result<(), Error> {
        let upload = self.backend.put_multipart(key).await.map_err(backend("write", key))?;
        let mut upload = WriteMultipart::new_with_chunk_size(upload, upload_part_bytes(size_bytes));
        while let Some(piece) = pieces.next().await {
            let capacity = upload.wait_for_capacity(UPLOADS_AT_ONCE).await;
            match capacity.map_err(backend("write", key)).and(piece) {
                Ok(piece) => upload.put(piece),
                Err(error) => {
                    // Uploaded parts would stay, and cost money.
                    let _ = upload.abort().await;
                    return Err(error);
                }
            }
        }
        upload.finish().await.map_err(backend("write", key))?;
        Ok(())
    }

    /// Moves an object; false if it does not exist. A large one that the backend cannot move is
    /// copied through this process.
    pub(super) async fn move_object(&self, object: &ObjectRef, from: &Path, to: &Path) -> Result<bool, Error> {
        match self.backend.rename(from, to).await {
            Ok(()) => Ok(true),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(error) if object.size_bytes > COPY_BYTES_MAX => {
                tracing::warn!(%from, %to, object.size_bytes, %error, "the store cannot move an object; copying it through this process");
                match self.copy_and_delete(object, from, to).await {
                    // Another garbage collection was faster.
                    Err(Error::NotFound(_)) => Ok(false),
                    copied => copied.map(|()| true),
                }
            }
            Err(error) => Err(backend("move", from)(error)),
        }
    }

    /// Moves an object by reading and writing it. If `from` is written again meanwhile, it stays as
    /// well.
    pub(super) async fn copy_and_delete(&self, object: &ObjectRef, from: &Path, to: &Path) -> Result<(), Error> {
        let identity = |meta: ObjectMeta| (meta.last_modified, meta.size, meta.e_tag);
        let before = self.backend.head(from).await.map_err(backend("look at", from))?;
        let parts = self.parts_at(from, object, before.size);
        self.upload_stream(to, before.size, parts).await?;
        let now = self.head(from).await?;
        if now.map(identity) == Some(identity(before)) {
            self.delete(from).await?;
        }
        Ok(())
    }
}

/// Where to look for an object: garbage collection moves it to the trash and may move it back
/// between two looks.
fn places(policy: &str, digest: &Digest) -> Result<[Path; 3], Error> {
    let key = object_key(policy, digest)?;
    Ok([key.clone(), trash_key(policy, digest)?, key])
}

fn payload(pieces: &Pieces) -> PutPayload {
    pieces.pieces.iter().cloned().collect()
}

fn corrupt(key: &Path, reason: String) -> Error {
    Error::Corrupt {
        key: key.to_string(),
        reason,
    }
}

fn check_digest(digest: Digest, object: &ObjectRef, key: &Path) -> Result<(), Error> {
    match digest == object.digest {
        true => Ok(()),
        false => Err(corrupt(key, format!("its digest is {digest}"))),
    }
}

/// The size of an upload's parts except the last.
pub(super) fn upload_part_bytes(size_bytes: u64) -> usize {
    let smallest = size_bytes.div_ceil(UPLOAD_PARTS_MAX).next_multiple_of(1 << 20);
    usize::try_from(smallest.max(UPLOAD_PART_BYTES)).unwrap_or(usize::MAX)
}

fn download_error(key: &Path, object: &ObjectRef) -> impl FnOnce(download::Failure) -> Error {
    move |failure| match failure {
        download::Failure::Store(source) => backend("read", key)(source),
        download::Failure::Length { .. } | download::Failure::Damaged => {
            corrupt(key, format!("in one of its parts, {failure}"))
        }
        download::Failure::Stalled => Error::Download {
            object: object.digest,
            reason: failure.to_string(),
        },
    }
}

/// When an entry was last written.
pub(super) fn modified(meta: &ObjectMeta) -> OffsetDateTime {
    let nanos = i128::from(meta.last_modified.timestamp_micros()) * 1_000;
    OffsetDateTime::from_unix_timestamp_nanos(nanos).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}
