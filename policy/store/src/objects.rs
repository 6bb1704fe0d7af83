//! Objects: written under the digest of their bytes, in parts where they are large, and verified when they are read.

use std::ops::Range;

use bytes::Bytes;
use futures::{Stream, StreamExt as _, TryStreamExt as _, stream};
use object_store::{GetResult, ObjectStoreExt as _, PutMode, PutOptions, PutPayload, WriteMultipart, path::Path};
use time::OffsetDateTime;

use super::gc::trash_key;
use super::{Error, Store, backend, blocking, download, object_key, parts_key};
use artifact::digest::Digest;
use artifact::manifest::ObjectRef;
use artifact::memory;
use artifact::merkle;
use artifact::parts::{self, PART_BYTES, Parts};

/// From this size on an object is uploaded in parts: S3 takes at most 5 GB at once, and parts go side by side.
const MULTIPART_BYTES_MIN: u64 = 64 << 20;
/// A part of an upload is not smaller, and larger only where there would be more of them than S3 takes.
const UPLOAD_PART_BYTES: u64 = 16 << 20;
const UPLOAD_PARTS_MAX: u64 = 10_000;
const UPLOADS_AT_ONCE: usize = 8;
/// S3 copies no object beyond 5 GB, and a copy of fewer may take longer than a request lasts. Less in unit tests, which move no gigabytes.
pub(super) const COPY_BYTES_MAX: u64 = if cfg!(test) { 100 } else { 1 << 30 };
/// Parts of one object that are fetched at once where there is no cache that says how many.
const STREAMS: usize = 4;
/// An object that is there already and older than this is written again, so that a collection which counts its age starts
/// anew. Far below any sensible grace time.
const REFRESH_AGE: time::Duration = time::Duration::minutes(5);

/// The bytes of one object as they lie in memory, one piece after another: nothing is copied to put them together.
#[derive(Debug, Clone)]
pub struct Pieces {
    pieces: Vec<Bytes>,
    parts: Parts,
}

impl Pieces {
    /// Hashes the pieces: blocks for as long as that takes.
    pub fn new(pieces: Vec<Bytes>) -> Self {
        let parts = Parts::of_pieces(&pieces);
        Pieces { pieces, parts }
    }

    pub fn object(&self) -> ObjectRef {
        self.parts.object()
    }
}

impl Store {
    /// Writes an object under the name of its content. Repeating it is harmless; an object that is there but damaged is
    /// replaced.
    pub async fn put_object(&self, policy: &str, bytes: &Bytes) -> Result<ObjectRef, Error> {
        let bytes = bytes.clone();
        let pieces = blocking(move || Pieces::new(vec![bytes])).await?;
        self.put_pieces(policy, &pieces).await
    }

    /// [`put_object`](Self::put_object) of bytes that lie in several pieces. The list of its parts is written first.
    pub async fn put_pieces(&self, policy: &str, pieces: &Pieces) -> Result<ObjectRef, Error> {
        let object = pieces.object();
        let key = object_key(policy, &object.digest)?;
        if pieces.parts.count() > 1 {
            // Whoever sees the object finds its parts. The list proves itself, so writing it again is harmless.
            let list = pieces.parts.to_bytes().into();
            self.put(&parts_key(policy, &object.digest)?, list, PutMode::Overwrite)
                .await?;
        }
        if object.size_bytes < MULTIPART_BYTES_MIN {
            if self.put_whole(&key, pieces, PutMode::Create).await? {
                return Ok(object);
            }
        } else if self.age_of(&key).await?.is_none() {
            self.upload(&key, pieces).await?;
            return Ok(object);
        }
        // Somebody wrote it before. A collection may have its eye on an old one: written again, it is a young one.
        let young = self.age_of(&key).await?.is_some_and(|age| age < REFRESH_AGE);
        if young {
            // What the store has, not what a cache remembers of it.
            match self.check_object(policy, &object).await {
                Ok(()) => return Ok(object),
                Err(error @ (Error::Corrupt { .. } | Error::NotFound(_))) => {
                    tracing::warn!(%key, %error, "replacing a damaged object");
                }
                Err(error) => return Err(error),
            }
        }
        match object.size_bytes < MULTIPART_BYTES_MIN {
            true => drop(self.put_whole(&key, pieces, PutMode::Overwrite).await?),
            false => self.upload(&key, pieces).await?,
        }
        Ok(object)
    }

    /// To be called once the manifest that names the objects is written. A collection that began before that may have taken
    /// away one that was there already when it was put; such a one is put again. Returns how many were.
    pub async fn make_good(&self, policy: &str, objects: &[&Pieces]) -> Result<usize, Error> {
        let mut missing = 0;
        for pieces in objects {
            let object = pieces.object();
            if self.size_of(policy, &object.digest).await? != Some(object.size_bytes) {
                self.put_pieces(policy, pieces).await?;
                missing += 1;
            }
        }
        Ok(missing)
    }

    /// Reads an object; its size and digest are verified.
    pub async fn get_object(&self, policy: &str, object: &ObjectRef) -> Result<Bytes, Error> {
        let bytes = self.fetch_object(policy, object).await?;
        let digest = blocking({
            let (bytes, threads) = (bytes.clone(), self.threads.clone());
            move || merkle::digest(&bytes, &threads)
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

    /// Verifies an object as it streams by: a piece of it in memory at a time.
    pub async fn check_object(&self, policy: &str, object: &ObjectRef) -> Result<(), Error> {
        let key = object_key(policy, &object.digest)?;
        let corrupt = |reason: String| Error::Corrupt {
            key: key.to_string(),
            reason,
        };
        let found = self.open_object(policy, &object.digest).await?;
        if found.meta.size != object.size_bytes {
            return Err(corrupt(format!(
                "it has {} bytes, not {}",
                found.meta.size, object.size_bytes
            )));
        }
        let mut stream = found.into_stream();
        let mut hasher = blake3::Hasher::new();
        while let Some(piece) = stream.next().await {
            let piece = piece.map_err(backend("read", &key))?;
            hasher = blocking(move || {
                hasher.update(&piece);
                hasher
            })
            .await?;
        }
        match Digest(*hasher.finalize().as_bytes()) {
            digest if digest == object.digest => Ok(()),
            digest => Err(corrupt(format!("its digest is {digest}"))),
        }
    }

    /// Reads an object of the right size; its bytes are looked at only where they come through the cache.
    pub(super) async fn fetch_object(&self, policy: &str, object: &ObjectRef) -> Result<Bytes, Error> {
        if object.size_bytes > PART_BYTES {
            let read = match &self.cache {
                Some(cache) => cache.whole(self, policy, object).await,
                None => self.fetch_parts(policy, object).await,
            };
            // Without its list, or in the trash for a moment: it may be there all the same.
            if !matches!(read, Err(Error::NotFound(_))) {
                return read;
            }
        }
        let key = object_key(policy, &object.digest)?;
        let found = self.open_object(policy, &object.digest).await?;
        if found.meta.size != object.size_bytes {
            return Err(Error::Corrupt {
                key: key.to_string(),
                reason: format!("it has {} bytes, not {}", found.meta.size, object.size_bytes),
            });
        }
        found.bytes().await.map_err(backend("read", &key))
    }

    /// Some bytes of an object, as they are there: whoever asks for a part checks what it makes of it. Looked for as
    /// [`open_object`](Self::open_object) does.
    pub async fn read_range(&self, policy: &str, object: &ObjectRef, range: Range<u64>) -> Result<Bytes, Error> {
        let key = object_key(policy, &object.digest)?;
        for place in [&key, &trash_key(policy, &object.digest)?] {
            match download::part(self.backend.as_ref(), place, range.clone(), |_| true).await {
                Err(download::Failure::Store(object_store::Error::NotFound { .. })) => {}
                read => return read.map_err(|failure| not_arrived(place, object, failure)),
            }
        }
        let read = download::part(self.backend.as_ref(), &key, range, |_| true).await;
        read.map_err(|failure| not_arrived(&key, object, failure))
    }

    /// Whether an object is there in its size: where it belongs, or in the trash for the moment that a collection needs to see that
    /// it is needed after all.
    pub async fn is_there(&self, policy: &str, object: &ObjectRef) -> Result<bool, Error> {
        let key = object_key(policy, &object.digest)?;
        for place in [&key, &trash_key(policy, &object.digest)?, &key] {
            if self
                .head(place)
                .await?
                .is_some_and(|meta| meta.size == object.size_bytes)
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Several ranges at once, into memory.
    async fn fetch_parts(&self, policy: &str, object: &ObjectRef) -> Result<Bytes, Error> {
        let key = object_key(policy, &object.digest)?;
        let ranges = (0..parts::count(object.size_bytes)).map(|index| parts::range(object.size_bytes, index));
        let mut parts = stream::iter(ranges)
            .map(|range| download::part(self.backend.as_ref(), &key, range, |_| true))
            .buffered(STREAMS);
        let mut bytes = memory::room(usize::try_from(object.size_bytes).unwrap_or_default());
        let failed = |failure| not_arrived(&key, object, failure);
        while let Some(part) = parts.try_next().await.map_err(failed)? {
            bytes.extend_from_slice(&part);
        }
        Ok(bytes.into())
    }

    /// The hashes of an object's parts.
    pub async fn get_parts(&self, policy: &str, object: &ObjectRef) -> Result<Parts, Error> {
        if let Some(parts) = Parts::single(*object) {
            return Ok(parts);
        }
        let key = parts_key(policy, &object.digest)?;
        let bytes = self.get(&key, |_| Ok(())).await?;
        Parts::from_bytes(*object, &bytes).map_err(|error| Error::Corrupt {
            key: key.to_string(),
            reason: error.to_string(),
        })
    }

    /// An object where it belongs, or in the trash for the moment that a collection needs to see that it is needed after all.
    async fn open_object(&self, policy: &str, digest: &Digest) -> Result<GetResult, Error> {
        let key = object_key(policy, digest)?;
        for place in [&key, &trash_key(policy, digest)?] {
            match self.backend.get(place).await {
                Err(object_store::Error::NotFound { .. }) => {}
                found => return found.map_err(backend("read", place)),
            }
        }
        // put back between the two looks
        self.backend.get(&key).await.map_err(backend("read", &key))
    }

    /// Size of the object under a digest; none when it is not there.
    pub async fn size_of(&self, policy: &str, digest: &Digest) -> Result<Option<u64>, Error> {
        let key = object_key(policy, digest)?;
        Ok(self.head(&key).await?.map(|meta| meta.size))
    }

    async fn age_of(&self, key: &Path) -> Result<Option<time::Duration>, Error> {
        let meta = self.head(key).await?;
        Ok(meta.map(|meta| OffsetDateTime::now_utc() - modified(&meta)))
    }

    pub(super) async fn head(&self, key: &Path) -> Result<Option<object_store::ObjectMeta>, Error> {
        match self.backend.head(key).await {
            Ok(meta) => Ok(Some(meta)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(source) => Err(backend("look at", key)(source)),
        }
    }

    async fn put_whole(&self, key: &Path, pieces: &Pieces, mode: PutMode) -> Result<bool, Error> {
        let options = PutOptions {
            mode,
            ..PutOptions::default()
        };
        let payload: PutPayload = pieces.pieces.iter().cloned().collect();
        match self.backend.put_opts(key, payload, options).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::AlreadyExists { .. }) => Ok(false),
            Err(source) => Err(backend("write", key)(source)),
        }
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

    /// Writes an object whose bytes come in pieces. It appears whole, when its last part is there; an upload that was cut off leaves
    /// nothing under its name.
    async fn upload_stream(
        &self,
        key: &Path,
        size_bytes: u64,
        mut pieces: impl Stream<Item = Result<Bytes, Error>> + Unpin,
    ) -> Result<(), Error> {
        let upload = self.backend.put_multipart(key).await.map_err(backend("write", key))?;
        let mut upload = WriteMultipart::new_with_chunk_size(upload, upload_part_bytes(size_bytes));
        while let Some(piece) = pieces.next().await {
            let room = upload.wait_for_capacity(UPLOADS_AT_ONCE).await;
            match room.map_err(backend("write", key)).and(piece) {
                Ok(piece) => upload.put(piece),
                Err(error) => {
                    // parts that are there would be kept, and paid for, under no name
                    let _ = upload.abort().await;
                    return Err(error);
                }
            }
        }
        upload.finish().await.map_err(backend("write", key))?;
        Ok(())
    }

    /// Moves an object; false where there is none. A large one that the backend does not move goes through this process.
    pub(super) async fn relocate(&self, object: &ObjectRef, from: &Path, to: &Path) -> Result<bool, Error> {
        match self.backend.rename(from, to).await {
            Ok(()) => Ok(true),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(error) if object.size_bytes > COPY_BYTES_MAX => {
                tracing::warn!(%from, %to, object.size_bytes, %error, "the store did not move an object, which goes through this process");
                match self.carry(object, from, to).await {
                    // another collection was quicker
                    Err(Error::NotFound(_)) => Ok(false),
                    carried => carried.map(|()| true),
                }
            }
            Err(error) => Err(backend("move", from)(error)),
        }
    }

    /// Moves an object by reading and writing it, unless it is written again meanwhile: then the new one stays as well.
    pub(super) async fn carry(&self, object: &ObjectRef, from: &Path, to: &Path) -> Result<(), Error> {
        let written = |meta: object_store::ObjectMeta| (meta.last_modified, meta.size, meta.e_tag);
        let before = self.backend.head(from).await.map_err(backend("look at", from))?;
        let size_bytes = before.size;
        let ranges = (0..parts::count(size_bytes)).map(|index| parts::range(size_bytes, index));
        let parts = stream::iter(ranges)
            .map(|range| download::part(self.backend.as_ref(), from, range, |_| true))
            .buffered(STREAMS)
            .map_err(|failure| not_arrived(from, object, failure));
        self.upload_stream(to, size_bytes, parts).await?;
        let now = self.head(from).await?;
        if now.map(written) == Some(written(before)) {
            self.delete(from).await?;
        }
        Ok(())
    }
}

/// Bytes of each part but the last of an upload of `size_bytes`.
pub(super) fn upload_part_bytes(size_bytes: u64) -> usize {
    let fewest = size_bytes.div_ceil(UPLOAD_PARTS_MAX).next_multiple_of(1 << 20);
    usize::try_from(fewest.max(UPLOAD_PART_BYTES)).unwrap_or(usize::MAX)
}

/// Why a part of an object is not here.
fn not_arrived(key: &Path, object: &ObjectRef, failure: download::Failure) -> Error {
    match failure {
        download::Failure::Store(source) => backend("read", key)(source),
        download::Failure::Length { .. } | download::Failure::Damaged => Error::Corrupt {
            key: key.to_string(),
            reason: format!("of one of its parts, {failure}"),
        },
        download::Failure::Stalled => Error::Download {
            object: object.digest,
            reason: failure.to_string(),
        },
    }
}

/// When an entry was last written.
pub(super) fn modified(meta: &object_store::ObjectMeta) -> OffsetDateTime {
    let nanos = i128::from(meta.last_modified.timestamp_micros()) * 1_000;
    OffsetDateTime::from_unix_timestamp_nanos(nanos).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}
