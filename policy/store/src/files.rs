//! The files of a version beside its tensors, such as its tokenizer, without reading the tensors.

use std::collections::BTreeMap;
use std::ops::Range;

use artifact::checkpoint::{Checkpoint, Contents, FilePlace, HEADER_BYTES, Header};
use artifact::delta::{self, DeltaHead};
use artifact::digest::Digest;
use artifact::manifest::{ObjectRef, Shard};
use artifact::sign::TrustedKeys;
use bytes::{Bytes, BytesMut};

use super::path::Step;
use super::{Error, Store};

/// Of a content index, of a delta's head, and of a file.
const BYTES_MAX: u64 = 64 << 20;
/// Of a delta, read at once: most heads are no longer.
const HEAD_BYTES: u64 = 64 << 10;

impl Store {
    /// The named files of a version, without tensors. A file that it lacks is left out. They are those of its
    /// content hash: what each delta on the path to it changes is followed by names and digests.
    pub async fn files(
        &self,
        policy: &str,
        serial: i64,
        keys: &TrustedKeys,
        names: &[&str],
    ) -> Result<Checkpoint, Error> {
        let path = self.path(policy, serial, keys).await?;
        let missing = || Error::NoPath {
            policy: policy.to_owned(),
            version: serial,
            reason: "no checkpoint leads to it".to_owned(),
        };
        let object = path.checkpoint.ok_or_else(missing)?;
        let root = self.get_manifest(policy, path.start, keys).await?.root;
        let corrupt = |reason: String| Error::Corrupt {
            key: format!("the checkpoint of version {}", path.start),
            reason,
        };
        let (mut contents, places) = self.places_of_files(policy, &object, root, &corrupt).await?;
        let mut files = BTreeMap::new();
        for (name, FilePlace { range, digest }) in places {
            if !names.contains(&&*name) {
                continue;
            }
            let bytes = match range.is_empty() {
                true => Bytes::new(),
                false => self.read_range(policy, &object, small(range, &corrupt)?).await?,
            };
            if Digest::of(&bytes) != digest {
                return Err(corrupt(format!("`{name}` does not match its digest")));
            }
            files.insert(name, bytes);
        }
        for step in &path.steps {
            let corrupt = |reason: String| Error::Corrupt {
                key: format!("the delta of version {}", step.to),
                reason,
            };
            let bad = |error: delta::Error| corrupt(error.to_string());
            let head = self.delta_head(policy, step, &corrupt).await?;
            contents = head.result(&contents).map_err(bad)?;
            let manifest = self.get_manifest(policy, step.to, keys).await?;
            if contents.root() != manifest.root {
                return Err(corrupt("it leads to another version".to_owned()));
            }
            let shards = if step.squashed { vec![] } else { manifest.delta_shards };
            for (name, place) in head.files().filter(|(name, _)| names.contains(name)) {
                let Some(place) = place else {
                    files.remove(name);
                    continue;
                };
                let place = small(place, &corrupt)?;
                let payload = self.payload(policy, step, &shards, head.bytes(), place).await?;
                files.insert(name.to_owned(), head.file(name, &payload).map_err(bad)?);
            }
        }
        Ok(Checkpoint {
            files,
            ..Checkpoint::default()
        })
    }

    async fn delta_head(
        &self,
        policy: &str,
        step: &Step,
        corrupt: &impl Fn(String) -> Error,
    ) -> Result<DeltaHead, Error> {
        let bad = |error: delta::Error| corrupt(error.to_string());
        let size = step.delta.size_bytes;
        let mut head = self.read_range(policy, &step.delta, 0..size.min(HEAD_BYTES)).await?;
        let length = DeltaHead::length(&head).map_err(bad)?;
        if length > head.len() as u64 {
            head = self
                .read_range(policy, &step.delta, small(0..length.min(size), corrupt)?)
                .await?;
        }
        DeltaHead::from_bytes(&head).map_err(bad)
    }

    /// Some payloads of a delta, which follow its head or are in its shards.
    async fn payload(
        &self,
        policy: &str,
        step: &Step,
        shards: &[Shard],
        head_bytes: u64,
        wanted: Range<u64>,
    ) -> Result<Bytes, Error> {
        if wanted.is_empty() {
            return Ok(Bytes::new());
        }
        if shards.is_empty() {
            let range = head_bytes + wanted.start..head_bytes + wanted.end;
            return self.read_range(policy, &step.delta, range).await;
        }
        let mut payload = BytesMut::new();
        for (shard, range) in in_shards(shards, wanted) {
            payload.extend(self.read_range(policy, &shard.object, range).await?);
        }
        Ok(payload.freeze())
    }

    async fn places_of_files(
        &self,
        policy: &str,
        object: &ObjectRef,
        root: Digest,
        corrupt: &impl Fn(String) -> Error,
    ) -> Result<(Contents, BTreeMap<String, FilePlace>), Error> {
        let bad = |error: artifact::checkpoint::Error| corrupt(error.to_string());
        let header = self.read_range(policy, object, 0..HEADER_BYTES as u64).await?;
        let header = Header::from_bytes(&header).map_err(bad)?;
        if header.root != root {
            return Err(corrupt("its content hash is not that of the version".to_owned()));
        }
        if header.index.end > object.size_bytes.min(BYTES_MAX) {
            return Err(corrupt("its content index is too long".to_owned()));
        }
        let index = self.read_range(policy, object, header.index.clone()).await?;
        Ok((
            header.contents(&index).map_err(bad)?,
            header.files(&index).map_err(bad)?,
        ))
    }
}

/// Refuses to read more than a file may have.
fn small(range: Range<u64>, corrupt: &impl Fn(String) -> Error) -> Result<Range<u64>, Error> {
    match range.end.saturating_sub(range.start) > BYTES_MAX {
        true => Err(corrupt(format!("a file or an index is larger than {BYTES_MAX} bytes"))),
        false => Ok(range),
    }
}

/// Where some payloads of a delta are among its shards.
fn in_shards(shards: &[Shard], wanted: Range<u64>) -> Vec<(&Shard, Range<u64>)> {
    let mut start = 0;
    let places = shards.iter().map(|shard| {
        let first = start;
        start += shard.object.size_bytes.saturating_sub(shard.reverse_bytes);
        let (from, to) = (wanted.start.max(first), wanted.end.min(start));
        (shard, from.saturating_sub(first)..to.saturating_sub(first))
    });
    places.filter(|(_, range)| !range.is_empty()).collect()
}
