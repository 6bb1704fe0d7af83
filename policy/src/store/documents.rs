//! Manifests and assignments: signed, written once, verified whenever they are read.
//!
//! A document names its own place (policy and number), so that a copy served from another place is refused.

use futures::TryStreamExt as _;
use object_store::{PutMode, path::Path};
use serde::{Serialize, de::DeserializeOwned};

use super::{Error, PutOutcome, Store, backend, key};
use crate::assignment::{self, Assignment};
use crate::manifest::{self, Manifest};
use crate::sign::{self, Envelope, SigningKey, TrustedKeys};

/// A signed document is some kilobytes; anything much larger is not one.
const DOCUMENT_BYTES_MAX: u64 = 4 << 20;
/// Serials and epochs: ten digits, so that names sort as numbers do.
const NUMBERS: std::ops::RangeInclusive<i64> = 1..=9_999_999_999;

impl Store {
    /// Signs a manifest and writes it unless its version has one. What is there already must be signed by the same key.
    pub async fn put_manifest(&self, manifest: &Manifest, key: &SigningKey) -> Result<PutOutcome<Manifest>, Error> {
        let place = manifest_key(&manifest.policy, manifest.version)?;
        manifest.check().map_err(contradiction(&place))?;
        if self.put_document(&place, manifest::KIND, manifest, key).await? {
            return Ok(PutOutcome::Created);
        }
        let existing = self
            .get_manifest(&manifest.policy, manifest.version, &key.trusted())
            .await?;
        Ok(PutOutcome::Exists(existing))
    }

    /// Reads and verifies the manifest of a version.
    pub async fn get_manifest(&self, policy: &str, serial: i64, keys: &TrustedKeys) -> Result<Manifest, Error> {
        let place = manifest_key(policy, serial)?;
        let manifest: Manifest = self.get_document(&place, manifest::KIND, keys).await?;
        manifest.check().map_err(contradiction(&place))?;
        if manifest.policy != policy || manifest.version != serial {
            return Err(moved(&place));
        }
        Ok(manifest)
    }

    /// Signs an assignment and writes it unless its epoch has one. What is there already must be signed by the same key.
    pub async fn put_assignment(
        &self,
        assignment: &Assignment,
        key: &SigningKey,
    ) -> Result<PutOutcome<Assignment>, Error> {
        let place = assignment_key(&assignment.policy, assignment.epoch)?;
        assignment.check().map_err(contradiction(&place))?;
        if self.put_document(&place, assignment::KIND, assignment, key).await? {
            return Ok(PutOutcome::Created);
        }
        let existing = self
            .get_assignment(&assignment.policy, assignment.epoch, &key.trusted())
            .await?;
        Ok(PutOutcome::Exists(existing))
    }

    /// Reads and verifies the assignment of an epoch.
    pub async fn get_assignment(&self, policy: &str, epoch: i64, keys: &TrustedKeys) -> Result<Assignment, Error> {
        let place = assignment_key(policy, epoch)?;
        let assignment: Assignment = self.get_document(&place, assignment::KIND, keys).await?;
        assignment.check().map_err(contradiction(&place))?;
        if assignment.policy != policy || assignment.epoch != epoch {
            return Err(moved(&place));
        }
        Ok(assignment)
    }

    /// The newest assignment beyond `after_epoch`, or none. With `after_epoch` 0 the newest of all is looked for by
    /// listing; else the epochs that follow are probed one by one, across a gap of one (a crash between taking an epoch
    /// and writing it leaves one). An epoch that does not verify is an error unless a later one does.
    pub async fn latest_assignment(
        &self,
        policy: &str,
        after_epoch: i64,
        keys: &TrustedKeys,
    ) -> Result<Option<Assignment>, Error> {
        let mut epoch = match after_epoch {
            ..=0 => match self.newest_epoch(policy).await? {
                0 => return Ok(None),
                newest => newest - 1,
            },
            _ => after_epoch,
        };
        let mut newest = Ok(None);
        let mut missing = 0;
        while missing < 2 {
            epoch = epoch.saturating_add(1);
            match self.get_assignment(policy, epoch, keys).await {
                Ok(assignment) => {
                    newest = Ok(Some(assignment));
                    missing = 0;
                }
                Err(Error::NotFound(_)) => missing += 1,
                Err(error) => {
                    tracing::warn!(policy, epoch, %error, "an assignment does not verify");
                    if !matches!(newest, Ok(Some(_))) {
                        newest = Err(error);
                    }
                    missing = 0;
                }
            }
        }
        newest
    }

    /// The highest epoch there is a document for; 0 when there is none.
    async fn newest_epoch(&self, policy: &str) -> Result<i64, Error> {
        let folder = key(policy, "assignment")?;
        let epochs: Vec<i64> = self
            .backend
            .list(Some(&folder))
            .try_filter_map(|entry| async move {
                let name = entry.location.filename().and_then(|name| name.strip_suffix(".json"));
                Ok(name.and_then(|name| name.parse::<i64>().ok()))
            })
            .try_collect()
            .await
            .map_err(backend("list", &folder))?;
        Ok(epochs
            .into_iter()
            .filter(|epoch| NUMBERS.contains(epoch))
            .max()
            .unwrap_or(0))
    }

    async fn put_document<T: Serialize>(
        &self,
        place: &Path,
        kind: &str,
        document: &T,
        key: &SigningKey,
    ) -> Result<bool, Error> {
        let payload = serde_json::to_vec(document).map_err(contradiction(place))?;
        let envelope = Envelope::sign(kind, &payload, key)
            .to_bytes()
            .map_err(signature(place))?;
        self.put(place, envelope.into(), PutMode::Create).await
    }

    async fn get_document<T: DeserializeOwned>(
        &self,
        place: &Path,
        kind: &str,
        keys: &TrustedKeys,
    ) -> Result<T, Error> {
        let bytes = self
            .get(place, |size| {
                if size <= DOCUMENT_BYTES_MAX {
                    Ok(())
                } else {
                    Err(format!("{size} bytes are too many for a signed document"))
                }
            })
            .await?;
        let payload = Envelope::from_bytes(&bytes)
            .and_then(|envelope| envelope.verify(kind, keys))
            .map_err(signature(place))?;
        serde_json::from_slice(&payload).map_err(contradiction(place))
    }
}

fn manifest_key(policy: &str, serial: i64) -> Result<Path, Error> {
    key(policy, &format!("version/{}.json", numbered(serial)?))
}

fn assignment_key(policy: &str, epoch: i64) -> Result<Path, Error> {
    key(policy, &format!("assignment/{}.json", numbered(epoch)?))
}

fn numbered(number: i64) -> Result<String, Error> {
    if NUMBERS.contains(&number) {
        return Ok(format!("{number:010}"));
    }
    Err(Error::Key {
        key: number.to_string(),
        reason: "numbers run from 1 to 9999999999".into(),
    })
}

fn contradiction<E: std::fmt::Display>(key: &Path) -> impl FnOnce(E) -> Error {
    let key = key.to_string();
    move |error| Error::Document {
        key,
        reason: error.to_string(),
    }
}

fn signature(key: &Path) -> impl FnOnce(sign::Error) -> Error {
    let key = key.to_string();
    move |source| Error::Signature { key, source }
}

/// A document that was signed for another place: a copy of an older one, or of another policy's.
fn moved(key: &Path) -> Error {
    Error::Document {
        key: key.to_string(),
        reason: "it was signed for another place".into(),
    }
}
