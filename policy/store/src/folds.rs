//! Folds in the store: their documents, which ones are due along a line, and making one.
//!
//! Folds of one span lie end to end, from the oldest version that is still there: so a follower that is far behind takes a
//! few of them and a few single steps. Whether a fold is worth its bytes shows when it is made.

use object_store::path::Path;
use std::collections::BTreeMap;
use time::OffsetDateTime;

use super::documents::{contradiction, moved, numbered};
use super::objects::Pieces;
use super::{Error, PutOutcome, Store, blocking, key};
use artifact::delta;
use artifact::manifest::{Manifest, Parent};
use artifact::sign::{SigningKey, TrustedKeys};
use artifact::squash::{self, SquashedDelta};

/// How many steps folds stand for.
pub const SPANS: [u32; 2] = [8, 64];

/// What came of folding.
#[derive(Debug, Clone, PartialEq)]
pub enum Folded {
    Made(SquashedDelta),
    /// It was there already.
    There(SquashedDelta),
    /// It would have as many bytes as the steps themselves, or more: nothing was written.
    NotWorth {
        bytes: u64,
        steps_bytes: u64,
    },
}

impl Store {
    /// Signs a fold and writes it unless its two versions have one.
    pub async fn put_fold(
        &self,
        fold: &SquashedDelta,
        signer: &SigningKey,
    ) -> Result<PutOutcome<SquashedDelta>, Error> {
        let place = fold_key(&fold.policy, fold.from.version, fold.to.version)?;
        fold.check().map_err(contradiction(&place))?;
        if self.put_document(&place, squash::KIND, fold, signer).await? {
            return Ok(PutOutcome::Created);
        }
        let (from, to) = (fold.from.version, fold.to.version);
        let existing = self.get_fold(&fold.policy, from, to, &signer.trusted()).await?;
        Ok(PutOutcome::Exists(existing))
    }

    /// Reads and verifies the fold between two versions.
    pub async fn get_fold(&self, policy: &str, from: i64, to: i64, keys: &TrustedKeys) -> Result<SquashedDelta, Error> {
        let place = fold_key(policy, from, to)?;
        let fold: SquashedDelta = self.get_document(&place, squash::KIND, keys).await?;
        fold.check().map_err(contradiction(&place))?;
        if fold.policy != policy || fold.from.version != from || fold.to.version != to {
            return Err(moved(&place));
        }
        Ok(fold)
    }

    /// Which folds there are, by the version that they lead to: the versions that they lead from.
    pub async fn fold_names(&self, policy: &str) -> Result<BTreeMap<i64, Vec<i64>>, Error> {
        let mut folds: BTreeMap<i64, Vec<i64>> = BTreeMap::new();
        for name in self.names(policy, "fold").await? {
            let parsed = name
                .strip_suffix(".json")
                .and_then(|name| name.split_once('-'))
                .and_then(|(to, from)| Some((to.parse().ok()?, from.parse().ok()?)));
            if let Some((to, from)) = parsed {
                folds.entry(to).or_default().push(from);
            }
        }
        Ok(folds)
    }

    /// The manifests from `serial` back along its parents, newest first: up to `count` of them, and none beyond one that
    /// cannot be read or believed.
    pub async fn ancestry(
        &self,
        policy: &str,
        serial: i64,
        count: usize,
        keys: &TrustedKeys,
    ) -> Result<Vec<Manifest>, Error> {
        let mut path = vec![self.get_manifest(policy, serial, keys).await?];
        while path.len() < count {
            let Some(parent) = path.last().and_then(|manifest| manifest.parent) else {
                break;
            };
            match self.get_manifest(policy, parent.version, keys).await {
                Ok(manifest) if manifest.root == parent.root => path.push(manifest),
                Ok(_) | Err(Error::NotFound(_) | Error::Document { .. } | Error::Signature { .. }) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(path)
    }

    /// Makes the fold from `from` to its descendant `to`, whose deltas in between take `steps_bytes`. Both versions are put
    /// together for it: two images in memory.
    pub async fn fold(
        &self,
        policy: &str,
        (from, to): (&Manifest, &Manifest),
        steps: u32,
        steps_bytes: u64,
        signer: &SigningKey,
        keys: &TrustedKeys,
    ) -> Result<Folded, Error> {
        match self.get_fold(policy, from.version, to.version, keys).await {
            Ok(fold) if self.size_of(policy, &fold.delta.digest).await? == Some(fold.delta.size_bytes) => {
                return Ok(Folded::There(fold));
            }
            Ok(_) | Err(Error::NotFound(_)) => {}
            Err(error) => return Err(error),
        }
        let base = self.materialise(policy, from.version, keys, &[]).await?.image;
        let held = [(from.version, base.clone())];
        let result = self.materialise(policy, to.version, keys, &held).await?.image;
        let place = fold_key(policy, from.version, to.version)?;
        let threads = self.threads.clone();
        let parts = blocking(move || {
            let bytes = delta::encode(&base, &result, &threads)?;
            Ok::<_, delta::Error>(Pieces::new(vec![bytes.into()]))
        })
        .await?
        .map_err(contradiction(&place))?;
        let bytes = parts.object().size_bytes;
        if bytes >= steps_bytes {
            return Ok(Folded::NotWorth { bytes, steps_bytes });
        }
        let at = |manifest: &Manifest| Parent {
            version: manifest.version,
            root: manifest.root,
        };
        let fold = SquashedDelta {
            policy: policy.into(),
            from: at(from),
            to: at(to),
            steps,
            delta: self.put_pieces(policy, &parts).await?,
            created_at: OffsetDateTime::now_utc(),
        };
        let outcome = self.put_fold(&fold, signer).await?;
        if let PutOutcome::Exists(there) = outcome {
            return Ok(Folded::There(there));
        }
        self.make_good(policy, &[&parts]).await?;
        Ok(Folded::Made(fold))
    }

    /// Takes the document of a fold away; its object is the collection's.
    pub(super) async fn delete_fold(&self, policy: &str, from: i64, to: i64) -> Result<(), Error> {
        self.delete(&fold_key(policy, from, to)?).await
    }
}

/// Which folds of `span` steps are due along `path` (newest version first), given those there are by the version that they
/// lead to: as (from, to), indices into `path`. The newest fold of that span on the path is where the next one begins.
pub fn due(path: &[Manifest], folds: &BTreeMap<i64, Vec<i64>>, span: u32) -> Vec<(usize, usize)> {
    let span = span as usize;
    let begins = (0..path.len()).find(|&to| {
        let there = path.get(to + span).map(|from| from.version);
        folds
            .get(&path[to].version)
            .is_some_and(|from| there.is_some_and(|there| from.contains(&there)))
    });
    let mut from = begins.unwrap_or(path.len().saturating_sub(1));
    let mut due = vec![];
    while from >= span {
        due.push((from, from - span));
        from -= span;
    }
    due
}

pub(super) fn fold_key(policy: &str, from: i64, to: i64) -> Result<Path, Error> {
    key(policy, &format!("fold/{}-{}.json", numbered(to)?, numbered(from)?))
}
