//! Squashed deltas: one delta that spans several steps.
//!
//! Squashed deltas of one span lie end to end along a line, starting at the oldest version that is
//! still stored. A replica that is far behind downloads a few of them and a few single steps.
//! Whether one saves bytes is known only once it is encoded.

use std::collections::BTreeMap;

use object_store::path::Path;
use time::OffsetDateTime;

use super::documents::{Document, contradiction};
use super::keys::squashed_delta_key;
use super::objects::Pieces;
use super::{Error, PutOutcome, Store, blocking};
use artifact::delta;
use artifact::manifest::{Manifest, Parent};
use artifact::sign::{SigningKey, TrustedKeys};
use artifact::squash::{self, SquashedDelta};

/// The numbers of steps that squashed deltas span.
pub const SQUASH_SPANS: [u32; 2] = [8, 64];
/// Squashed deltas that are listed. Replicas list them, so their memory is the limit.
const LISTED_MAX: usize = 1_000_000;

#[derive(Debug, Clone, PartialEq)]
pub enum SquashOutcome {
    Created(SquashedDelta),
    Exists(SquashedDelta),
    /// It would have at least as many bytes as the steps themselves, so nothing was written.
    NotSmaller {
        bytes: u64,
        steps_bytes: u64,
    },
}

impl Document for SquashedDelta {
    const KIND: &'static str = squash::KIND;

    fn key(&self) -> Result<Path, Error> {
        squashed_delta_key(&self.policy, self.from.version, self.to.version)
    }

    fn check(&self) -> Result<(), String> {
        SquashedDelta::check(self).map_err(|error| error.to_string())
    }
}

impl Store {
    /// Reads and verifies the squashed delta between two versions.
    pub async fn get_squashed_delta(
        &self,
        policy: &str,
        from: i64,
        to: i64,
        keys: &TrustedKeys,
    ) -> Result<SquashedDelta, Error> {
        let signed = self.get_signed(&squashed_delta_key(policy, from, to)?, keys).await?;
        Ok(signed.document)
    }

    /// The start versions of the squashed deltas, by the version they lead to.
    pub async fn list_squashed_deltas(&self, policy: &str) -> Result<BTreeMap<i64, Vec<i64>>, Error> {
        let mut starts: BTreeMap<i64, Vec<i64>> = BTreeMap::new();
        for name in self.list_names(policy, "fold", LISTED_MAX).await? {
            let parsed = name
                .strip_suffix(".json")
                .and_then(|name| name.split_once('-'))
                .and_then(|(to, from)| Some((to.parse().ok()?, from.parse().ok()?)));
            if let Some((to, from)) = parsed {
                starts.entry(to).or_default().push(from);
            }
        }
        Ok(starts)
    }

    /// The manifests from `serial` back along its parents, newest first. It ends after `count` of
    /// them, or before one that is missing or does not verify.
    pub async fn ancestry(
        &self,
        policy: &str,
        serial: i64,
        count: usize,
        keys: &TrustedKeys,
    ) -> Result<Vec<Manifest>, Error> {
        let mut manifests = vec![self.get_manifest(policy, serial, keys).await?];
        while manifests.len() < count {
            let Some(parent) = manifests.last().and_then(|manifest| manifest.parent) else {
                break;
            };
            match self.get_manifest(policy, parent.version, keys).await {
                Ok(manifest) if manifest.root == parent.root => manifests.push(manifest),
                Ok(_) | Err(Error::NotFound(_) | Error::Document { .. } | Error::Signature { .. }) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(manifests)
    }

    /// Encodes one delta from `from` to its descendant `to`, and writes it if it is smaller than
    /// `steps_bytes`, the size of the deltas in between. Holds both checkpoints in memory.
    pub async fn squash(
        &self,
        policy: &str,
        (from, to): (&Manifest, &Manifest),
        steps: u32,
        steps_bytes: u64,
        signer: &SigningKey,
        keys: &TrustedKeys,
    ) -> Result<SquashOutcome, Error> {
        match self.get_squashed_delta(policy, from.version, to.version, keys).await {
            Ok(found) if self.object_size(policy, &found.delta.digest).await? == Some(found.delta.size_bytes) => {
                return Ok(SquashOutcome::Exists(found));
            }
            Ok(_) | Err(Error::NotFound(_)) => {}
            Err(error) => return Err(error),
        }
        let base = self.materialize(policy, from.version, keys, &[]).await?.checkpoint;
        let held = [(from.version, base.clone())];
        let result = self.materialize(policy, to.version, keys, &held).await?.checkpoint;
        let threads = self.threads.clone();
        let encoded = blocking(move || {
            let bytes = delta::encode(&base, &result, &threads)?;
            Ok::<_, delta::Error>(Pieces::new(vec![bytes.into()]))
        });
        let key = squashed_delta_key(policy, from.version, to.version)?;
        let pieces = encoded.await?.map_err(contradiction(&key))?;
        let bytes = pieces.object().size_bytes;
        if bytes >= steps_bytes {
            return Ok(SquashOutcome::NotSmaller { bytes, steps_bytes });
        }
        let end = |manifest: &Manifest| Parent {
            version: manifest.version,
            root: manifest.root,
        };
        let squashed = SquashedDelta {
            policy: policy.into(),
            from: end(from),
            to: end(to),
            steps,
            delta: self.put_pieces(policy, &pieces).await?,
            created_at: OffsetDateTime::now_utc(),
        };
        if let PutOutcome::Exists(found) = self.create_or_get(&squashed, signer).await? {
            return Ok(SquashOutcome::Exists(found));
        }
        self.reupload_missing(policy, &[&pieces]).await?;
        Ok(SquashOutcome::Created(squashed))
    }
}

/// The squashed deltas of `span` steps to create along `path` (manifests, newest first), as indices
/// (from, to) into it. `existing` holds start versions by end version. New ones begin where the
/// newest existing one ends.
pub fn due_squashes(path: &[Manifest], existing: &BTreeMap<i64, Vec<i64>>, span: u32) -> Vec<(usize, usize)> {
    let span = span as usize;
    let newest = path.windows(span + 1).position(|steps| match steps {
        [to, .., from] => existing
            .get(&to.version)
            .is_some_and(|starts| starts.contains(&from.version)),
        _ => false,
    });
    let mut from = newest.unwrap_or(path.len().saturating_sub(1));
    let mut due = vec![];
    while from >= span {
        due.push((from, from - span));
        from -= span;
    }
    due
}
