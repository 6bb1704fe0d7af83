//! Reads a version's delta for some frames of its tensors. The header and index are read
//! completely, payloads on request.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

use super::keys::object_key;
use super::{Error, Store};
use artifact::delta::FrameReader;
use artifact::manifest::{Manifest, Shard};

/// A delta whose header and index are verified, but not its payloads.
///
/// Each applied frame is checked by XXH3, which finds faults but not forgeries. Before a tensor is
/// used, the BLAKE3 of all its frames ([`artifact::delta::tensor_digest`]) must equal
/// [`FrameReader::result`].
#[derive(Debug)]
pub struct PartialDelta {
    pub slices: FrameReader<'static>,
    policy: String,
    shards: Vec<Shard>,
    /// The payloads, if the delta is one object.
    payloads: Bytes,
}

impl Store {
    /// Opens the delta that leads to a version. If it has shards, only the head is read.
    pub async fn open_delta(&self, policy: &str, manifest: &Manifest) -> Result<PartialDelta, Error> {
        let Some(delta) = manifest.delta else {
            return Err(Error::Document {
                key: format!("version {} of {policy}", manifest.version),
                reason: "it has no delta; read its checkpoint".into(),
            });
        };
        let bytes = self.get_object(policy, &delta).await?;
        let key = object_key(policy, &delta.digest)?;
        let corrupt = |reason: String| Error::Corrupt {
            key: key.to_string(),
            reason,
        };
        let slices = FrameReader::from_head(&bytes).map_err(|error| corrupt(error.to_string()))?;
        let (header, base) = (slices.header(), manifest.parent.map(|parent| parent.root));
        if header.result != manifest.root || Some(header.base) != base {
            return Err(corrupt("it joins other versions than its manifest does".into()));
        }
        let payloads = bytes.slice(slices.head_bytes().min(bytes.len())..);
        Ok(PartialDelta {
            slices,
            policy: policy.into(),
            shards: manifest.delta_shards.clone(),
            payloads,
        })
    }
}

impl PartialDelta {
    /// The payloads of some frames of a tensor, for [`FrameReader::apply_fetched`]. Empty if the
    /// tensor does not change.
    pub async fn payload(&self, store: &Store, name: &str, frames: Range<usize>) -> Result<Bytes, Error> {
        let Some(wanted) = self.slices.payload(name, frames) else {
            return Ok(Bytes::new());
        };
        if self.shards.is_empty() {
            let length = self.payloads.len() as u64;
            let (from, to) = (wanted.start.min(length) as usize, wanted.end.min(length) as usize);
            return Ok(self.payloads.slice(from..to));
        }
        let mut payload = BytesMut::new();
        for (shard, range) in in_shards(&self.shards, wanted) {
            payload.extend(store.read_range(&self.policy, &shard.object, range).await?);
        }
        Ok(payload.freeze())
    }
}

/// Where some payloads of a delta are among its shards.
pub(super) fn in_shards(shards: &[Shard], wanted: Range<u64>) -> Vec<(&Shard, Range<u64>)> {
    let mut start = 0;
    let places = shards.iter().map(|shard| {
        let first = start;
        start += shard.object.size_bytes.saturating_sub(shard.reverse_bytes);
        let (from, to) = (wanted.start.max(first), wanted.end.min(start));
        (shard, from.saturating_sub(first)..to.saturating_sub(first))
    });
    places.filter(|(_, range)| !range.is_empty()).collect()
}
