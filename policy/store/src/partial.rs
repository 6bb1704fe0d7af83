//! A version's delta for who holds, or follows, only some frames of its tensors: the head is read whole, payloads as they are
//! asked for.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

use super::{Error, Store, object_key};
use artifact::delta::FrameReader;
use artifact::manifest::{Manifest, Shard};

/// A delta whose head is verified. Payloads are not: a frame that is applied is checked by XXH3, which finds faults and no forgers, so
/// nothing of a tensor may be used before the BLAKE3 that all its frames' subtrees make ([`artifact::delta::tensor_digest`]) is
/// [`FrameReader::result`].
#[derive(Debug)]
pub struct PartialDelta {
    pub slices: FrameReader<'static>,
    policy: String,
    shards: Vec<Shard>,
    /// The payloads, where the delta is one object: then it was read at once.
    payloads: Bytes,
}

impl Store {
    /// Opens the delta that leads to a version: of one in shards the head alone is read.
    pub async fn open_delta(&self, policy: &str, manifest: &Manifest) -> Result<PartialDelta, Error> {
        let Some(delta) = manifest.delta else {
            return Err(Error::Document {
                key: format!("version {} of {policy}", manifest.version),
                reason: "it has no delta, only an image: read that".into(),
            });
        };
        let bytes = self.get_object(policy, &delta).await?;
        let key = object_key(policy, &delta.digest)?;
        let corrupt = |reason: String| Error::Corrupt {
            key: key.to_string(),
            reason,
        };
        let slices = FrameReader::from_head(&bytes).map_err(|error| corrupt(error.to_string()))?;
        let (header, expected) = (slices.header(), manifest.parent.map(|parent| parent.root));
        if header.result != manifest.root || Some(header.base) != expected {
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
    /// The payloads of some frames of a tensor, for [`FrameReader::apply_fetched`]; nothing where the tensor stays as it is.
    pub async fn payload(&self, store: &Store, name: &str, frames: Range<usize>) -> Result<Bytes, Error> {
        let Some(wanted) = self.slices.payload(name, frames) else {
            return Ok(Bytes::new());
        };
        if self.shards.is_empty() {
            let held = self.payloads.len() as u64;
            let (from, to) = (wanted.start.min(held) as usize, wanted.end.min(held) as usize);
            return Ok(self.payloads.slice(from..to));
        }
        let mut payload = BytesMut::new();
        let mut start = 0;
        for shard in &self.shards {
            let end = start + (shard.object.size_bytes - shard.reverse_bytes.min(shard.object.size_bytes));
            let own = wanted.start.max(start)..wanted.end.min(end);
            if own.start < own.end {
                let range = own.start - start..own.end - start;
                payload.extend(store.read_range(&self.policy, &shard.object, range).await?);
            }
            start = end;
        }
        Ok(payload.freeze())
    }
}
