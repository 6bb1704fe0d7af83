//! Manifests and assignments: signed, written once, verified whenever they are read.
//!
//! A document names its own place (policy and number), so that a copy served from another place is refused.

use futures::TryStreamExt as _;
use object_store::{PutMode, path::Path};
use serde::{Serialize, de::DeserializeOwned};

use super::{Error, PutOutcome, Store, backend, key};
use artifact::assignment::{self, Assignment};
use artifact::digest::Digest;
use artifact::manifest::{self, Manifest};
use artifact::sign::{self, Envelope, SigningKey, TrustedKeys};

/// A signed document is some kilobytes; anything much larger is not one.
pub(super) const DOCUMENT_BYTES_MAX: u64 = 4 << 20;
/// Serials and epochs: ten digits, so that names sort as numbers do.
pub(super) const NUMBERS: std::ops::RangeInclusive<i64> = 1..=9_999_999_999;

/// A verified document.
#[derive(Debug, Clone, PartialEq)]
pub struct Signed<T> {
    pub document: T,
    /// BLAKE3 of the document's exact bytes.
    pub digest: Digest,
    /// Id of the first trusted key that signed it.
    pub signer: String,
}

impl Store {
    /// Signs a manifest and writes it unless its version has one. What is there already must be signed by the same key.
    pub async fn put_manifest(&self, manifest: &Manifest, key: &SigningKey) -> Result<PutOutcome<Manifest>, Error> {
        let place = manifest_key(&manifest.policy, manifest.version)?;
        manifest.check().map_err(contradiction(&place))?;
        if self.put_document(&place, manifest.kind(), manifest, key).await? {
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
        let envelope = self.get_envelope(&place).await?;
        let kind = manifest_kind(&envelope);
        let manifest: Manifest = opened(&place, &envelope, kind, keys)?.document;
        manifest.check().map_err(contradiction(&place))?;
        if manifest.kind() != kind {
            return Err(contradiction(&place)(format!(
                "it is signed as a {kind}, and is a {}",
                manifest.kind()
            )));
        }
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
        Ok(self.signed_assignment(policy, epoch, keys).await?.document)
    }

    /// The newest assignment beyond `after_epoch`, or none; see [`newest_assignment`](Self::newest_assignment).
    pub async fn latest_assignment(
        &self,
        policy: &str,
        after_epoch: i64,
        keys: &TrustedKeys,
    ) -> Result<Option<Assignment>, Error> {
        let newest = self.newest_assignment(policy, after_epoch, keys).await?;
        Ok(newest.map(|signed| signed.document))
    }

    /// The newest assignment beyond `after_epoch`, or none, with who signed it. With `after_epoch` 0 the newest of all is
    /// looked for by listing; else the epochs that follow are probed one by one, across a gap of one (a crash between taking
    /// an epoch and writing it leaves one). An epoch that does not verify is an error unless a later one does; one that
    /// nobody but a revoked key signed counts as not there.
    pub async fn newest_assignment(
        &self,
        policy: &str,
        after_epoch: i64,
        keys: &TrustedKeys,
    ) -> Result<Option<Signed<Assignment>>, Error> {
        let mut epoch = match after_epoch {
            ..=0 => match self.newest_epoch(policy, keys).await? {
                0 => return Ok(None),
                newest => newest - 1,
            },
            _ => after_epoch,
        };
        let mut newest = Ok(None);
        let mut missing = 0;
        while missing < 2 {
            epoch = epoch.saturating_add(1);
            match self.signed_assignment(policy, epoch, keys).await {
                Ok(assignment) => {
                    newest = Ok(Some(assignment));
                    missing = 0;
                }
                Err(Error::NotFound(_)) => missing += 1,
                Err(Error::Key { .. }) => break,
                Err(Error::Signature {
                    source: sign::Error::Revoked(key),
                    ..
                }) => {
                    tracing::warn!(policy, epoch, key, "an assignment of a revoked key is passed over");
                    missing = 0;
                }
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

    async fn signed_assignment(
        &self,
        policy: &str,
        epoch: i64,
        keys: &TrustedKeys,
    ) -> Result<Signed<Assignment>, Error> {
        let place = assignment_key(policy, epoch)?;
        let signed: Signed<Assignment> = self.get_signed(&place, assignment::KIND, keys).await?;
        let assignment = &signed.document;
        assignment.check().map_err(contradiction(&place))?;
        if assignment.policy != policy || assignment.epoch != epoch {
            return Err(moved(&place));
        }
        Ok(signed)
    }

    /// The highest epoch that a document is there for which is not of a revoked key; 0 when there is none.
    async fn newest_epoch(&self, policy: &str, keys: &TrustedKeys) -> Result<i64, Error> {
        for epoch in self.numbers(policy, "assignment").await?.into_iter().rev() {
            match self.signed_assignment(policy, epoch, keys).await {
                Err(Error::Signature {
                    source: sign::Error::Revoked(_),
                    ..
                }) => {}
                _ => return Ok(epoch),
            }
        }
        Ok(0)
    }

    /// The numbers that documents of a folder have, ascending.
    pub(super) async fn numbers(&self, policy: &str, folder: &str) -> Result<Vec<i64>, Error> {
        let names = self.names(policy, folder).await?;
        let mut numbers: Vec<i64> = names
            .iter()
            .filter_map(|name| name.strip_suffix(".json")?.parse().ok())
            .filter(|number| NUMBERS.contains(number))
            .collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// The names of a folder's entries.
    pub(super) async fn names(&self, policy: &str, folder: &str) -> Result<Vec<String>, Error> {
        let folder = key(policy, folder)?;
        self.backend
            .list(Some(&folder))
            .try_filter_map(async |entry| Ok(entry.location.filename().map(str::to_owned)))
            .try_collect()
            .await
            .map_err(backend("list", &folder))
    }

    /// The ids of the keys that a version's manifest says it is signed by; nothing is verified.
    pub async fn signers(&self, policy: &str, serial: i64) -> Result<Vec<String>, Error> {
        let place = manifest_key(policy, serial)?;
        let envelope = self.get_envelope(&place).await?;
        Ok(envelope
            .signatures
            .into_iter()
            .map(|signature| signature.keyid)
            .collect())
    }

    pub(super) async fn get_envelope(&self, place: &Path) -> Result<Envelope, Error> {
        let bytes = self
            .get(place, |size| {
                if size <= DOCUMENT_BYTES_MAX {
                    Ok(())
                } else {
                    Err(format!("{size} bytes are too many for a signed document"))
                }
            })
            .await?;
        Envelope::from_bytes(&bytes).map_err(signature(place))
    }

    pub(super) async fn put_document<T: Serialize>(
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

    pub(super) async fn get_document<T: DeserializeOwned>(
        &self,
        place: &Path,
        kind: &str,
        keys: &TrustedKeys,
    ) -> Result<T, Error> {
        Ok(self.get_signed(place, kind, keys).await?.document)
    }

    pub(super) async fn get_signed<T: DeserializeOwned>(
        &self,
        place: &Path,
        kind: &str,
        keys: &TrustedKeys,
    ) -> Result<Signed<T>, Error> {
        opened(place, &self.get_envelope(place).await?, kind, keys)
    }
}

fn opened<T: DeserializeOwned>(
    place: &Path,
    envelope: &Envelope,
    kind: &str,
    keys: &TrustedKeys,
) -> Result<Signed<T>, Error> {
    let (payload, signer) = envelope.verify_signer(kind, keys).map_err(signature(place))?;
    Ok(Signed {
        document: serde_json::from_slice(&payload).map_err(contradiction(place))?,
        digest: Digest::of(&payload),
        signer,
    })
}

/// Which of a manifest's two kinds an envelope is to be read as.
pub(super) fn manifest_kind(envelope: &Envelope) -> &'static str {
    match envelope.says(manifest::SHARDED_KIND) {
        true => manifest::SHARDED_KIND,
        false => manifest::KIND,
    }
}

pub(super) fn manifest_key(policy: &str, serial: i64) -> Result<Path, Error> {
    key(policy, &format!("version/{}.json", numbered(serial)?))
}

pub(super) fn assignment_key(policy: &str, epoch: i64) -> Result<Path, Error> {
    key(policy, &format!("assignment/{}.json", numbered(epoch)?))
}

pub(super) fn numbered(number: i64) -> Result<String, Error> {
    if NUMBERS.contains(&number) {
        return Ok(format!("{number:010}"));
    }
    Err(Error::Key {
        key: number.to_string(),
        reason: "numbers run from 1 to 9999999999".into(),
    })
}

pub(super) fn contradiction<E: std::fmt::Display>(key: &Path) -> impl FnOnce(E) -> Error {
    let key = key.to_string();
    move |error| Error::Document {
        key,
        reason: error.to_string(),
    }
}

pub(super) fn signature(key: &Path) -> impl FnOnce(sign::Error) -> Error {
    let key = key.to_string();
    move |source| Error::Signature { key, source }
}

/// A document that was signed for another place: a copy of an older one, or of another policy's.
pub(super) fn moved(key: &Path) -> Error {
    Error::Document {
        key: key.to_string(),
        reason: "it was signed for another place".into(),
    }
}
