//! Signed documents: written once and verified whenever they are read.
//!
//! A document names its own place (policy and number), so a copy served from another place is
//! refused.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use futures::TryStreamExt as _;
use object_store::{PutMode, path::Path};
use serde::{Serialize, de::DeserializeOwned};

use super::keys::{NUMBERS, assignment_key, manifest_key, policy_key};
use super::{Error, PutOutcome, Store, backend};
use artifact::assignment::{self, Assignment};
use artifact::digest::Digest;
use artifact::manifest::{self, Manifest};
use artifact::sign::{self, Envelope, SigningKey, TrustedKeys};

/// Signed documents have some kilobytes.
pub(super) const DOCUMENT_BYTES_MAX: u64 = 4 << 20;
/// Assignments by revoked keys that are read to find one by another key, if no timestamp says where
/// it is.
const EPOCHS_WALKED_MAX: usize = 1_000;
/// Manifests, assignments or pins that are listed: some years of them. Lists of numbers are short.
const NUMBERS_LISTED_MAX: usize = 10_000_000;

/// A verified document.
#[derive(Debug, Clone, PartialEq)]
pub struct Signed<T> {
    pub document: T,
    /// BLAKE3 of the document's exact bytes.
    pub digest: Digest,
    /// Id of the first trusted key of the document's role that signed it.
    pub signer: String,
}

/// A kind of signed document.
pub(super) trait Document: Serialize + DeserializeOwned + Send + Sync {
    /// The kind in the envelope's payload type.
    const KIND: &'static str;

    /// The place it names.
    fn key(&self) -> Result<Path, Error>;

    /// Returns the reason if it contradicts itself.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

impl Document for Manifest {
    const KIND: &'static str = manifest::KIND;

    fn key(&self) -> Result<Path, Error> {
        manifest_key(&self.policy, self.version)
    }

    fn check(&self) -> Result<(), String> {
        Manifest::check(self).map_err(|error| error.to_string())
    }
}

impl Document for Assignment {
    const KIND: &'static str = assignment::KIND;

    fn key(&self) -> Result<Path, Error> {
        assignment_key(&self.policy, self.epoch)
    }

    fn check(&self) -> Result<(), String> {
        Assignment::check(self).map_err(|error| error.to_string())
    }
}

impl Store {
    /// Signs and writes a manifest unless its version has one.
    pub async fn put_manifest(&self, manifest: &Manifest, key: &SigningKey) -> Result<PutOutcome<Manifest>, Error> {
        match self.create_or_get(manifest, key).await {
            Err(Error::Signature { .. } | Error::Document { .. } | Error::Corrupt { .. }) => Ok(PutOutcome::Taken),
            outcome => outcome,
        }
    }

    /// Reads and verifies the manifest of a version.
    pub async fn get_manifest(&self, policy: &str, serial: i64, keys: &TrustedKeys) -> Result<Manifest, Error> {
        let signed = self.get_signed_manifest(policy, serial, keys).await?;
        Ok(signed.document)
    }

    /// [`get_manifest`](Self::get_manifest) with the digest of its exact bytes and its signer.
    pub async fn get_signed_manifest(
        &self,
        policy: &str,
        serial: i64,
        keys: &TrustedKeys,
    ) -> Result<Signed<Manifest>, Error> {
        self.get_signed(&manifest_key(policy, serial)?, keys).await
    }

    /// Signs and writes an assignment unless its epoch has one. Returns false if it has, whatever
    /// that is.
    pub async fn put_assignment(&self, assignment: &Assignment, key: &SigningKey) -> Result<bool, Error> {
        self.create(assignment, key).await
    }

    /// Reads and verifies the assignment of an epoch.
    pub async fn get_assignment(&self, policy: &str, epoch: i64, keys: &TrustedKeys) -> Result<Assignment, Error> {
        let signed = self.get_signed(&assignment_key(policy, epoch)?, keys).await?;
        Ok(signed.document)
    }

    /// [`newest_assignment`](Self::newest_assignment) without its signer.
    pub async fn latest_assignment(
        &self,
        policy: &str,
        after_epoch: i64,
        keys: &TrustedKeys,
    ) -> Result<Option<Assignment>, Error> {
        let newest = self.newest_assignment(policy, after_epoch, keys).await?;
        Ok(newest.map(|signed| signed.document))
    }

    /// The newest assignment after `after_epoch`, if there is one.
    ///
    /// With `after_epoch` 0 it starts at the epoch that the store's timestamp names, and lists the
    /// store if there is no timestamp that verifies. Then it probes the epochs that follow, across
    /// a gap of one, which a crash between reserving and writing an epoch leaves. An epoch that
    /// does not verify is an error unless a later one does. An assignment that only a revoked key
    /// signed is skipped.
    pub async fn newest_assignment(
        &self,
        policy: &str,
        after_epoch: i64,
        keys: &TrustedKeys,
    ) -> Result<Option<Signed<Assignment>>, Error> {
        let mut epoch = match after_epoch {
            ..=0 => match self.start_epoch(policy, keys).await? {
                0 => return Ok(None),
                newest => newest - 1,
            },
            _ => after_epoch,
        };
        let mut newest = Ok(None);
        let mut missing = 0;
        while missing < 2 {
            epoch = epoch.saturating_add(1);
            let key = match assignment_key(policy, epoch) {
                Err(Error::Key { .. }) => break,
                key => key?,
            };
            match self.get_signed(&key, keys).await {
                Err(Error::NotFound(_)) => {
                    missing += 1;
                    continue;
                }
                Ok(assignment) => newest = Ok(Some(assignment)),
                Err(Error::Signature {
                    source: sign::Error::Revoked(key),
                    ..
                }) => tracing::warn!(policy, epoch, key, "skipped an assignment that a revoked key signed"),
                Err(error) => {
                    tracing::warn!(policy, epoch, %error, "an assignment does not verify");
                    if !matches!(newest, Ok(Some(_))) {
                        newest = Err(error);
                    }
                }
            }
            missing = 0;
        }
        newest
    }

    /// The newest epoch that the timestamp names; without one, the highest epoch whose assignment is
    /// not signed by a revoked key. 0 if there is none.
    async fn start_epoch(&self, policy: &str, keys: &TrustedKeys) -> Result<i64, Error> {
        match self.get_timestamp(policy, keys).await {
            Ok(Some(signed)) if signed.document.epoch > 0 => return Ok(signed.document.epoch),
            Err(error @ Error::Backend { .. }) => return Err(error),
            _ => {}
        }
        // the highest ones alone, whatever else the store lists
        let mut epochs = BTreeSet::new();
        let folder = policy_key(policy, "assignment")?;
        let keep = |name: &str| {
            epochs.extend(number(name));
            if epochs.len() > EPOCHS_WALKED_MAX {
                epochs.pop_first();
            }
        };
        self.each_name(&folder, None, NUMBERS_LISTED_MAX, keep).await?;
        for epoch in epochs.into_iter().rev() {
            match self.get_assignment(policy, epoch, keys).await {
                Err(Error::Signature {
                    source: sign::Error::Revoked(_),
                    ..
                }) => {}
                _ => return Ok(epoch),
            }
        }
        Ok(0)
    }

    /// The epochs of a range that have an assignment. Nothing is read or verified.
    pub async fn assignment_epochs(&self, policy: &str, range: RangeInclusive<i64>) -> Result<BTreeSet<i64>, Error> {
        let mut epochs = BTreeSet::new();
        self.each_epoch(policy, range, |epoch| {
            epochs.insert(epoch);
        })
        .await?;
        Ok(epochs)
    }

    /// The last epoch of a range that has an assignment. Nothing is read or verified.
    pub async fn last_assignment_epoch(&self, policy: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, Error> {
        let mut last = None;
        self.each_epoch(policy, range, |epoch| last = last.max(Some(epoch)))
            .await?;
        Ok(last)
    }

    async fn each_epoch(
        &self,
        policy: &str,
        range: RangeInclusive<i64>,
        mut each: impl FnMut(i64),
    ) -> Result<(), Error> {
        let folder = policy_key(policy, "assignment")?;
        let after = assignment_key(policy, range.start() - 1).ok();
        let names = |name: &str| {
            if let Some(epoch) = number(name).filter(|epoch| range.contains(epoch)) {
                each(epoch);
            }
        };
        self.each_name(&folder, after.as_ref(), NUMBERS_LISTED_MAX, names).await
    }

    /// The numbers in the names of a folder's documents, ascending.
    pub(super) async fn list_numbers(&self, policy: &str, folder: &str) -> Result<Vec<i64>, Error> {
        let folder = policy_key(policy, folder)?;
        let mut numbers = vec![];
        self.each_name(&folder, None, NUMBERS_LISTED_MAX, |name| numbers.extend(number(name)))
            .await?;
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// The names in a folder. An error if there are more than `count_max`.
    pub(super) async fn list_names(&self, policy: &str, folder: &str, count_max: usize) -> Result<Vec<String>, Error> {
        let folder = policy_key(policy, folder)?;
        let mut names = vec![];
        self.each_name(&folder, None, count_max, |name| names.push(name.to_owned()))
            .await?;
        Ok(names)
    }

    /// Calls `each` with the names in a folder that come behind `after`. An error if there are more
    /// than `count_max`: whoever writes to the store could list entries without end.
    async fn each_name(
        &self,
        folder: &Path,
        after: Option<&Path>,
        count_max: usize,
        mut each: impl FnMut(&str),
    ) -> Result<(), Error> {
        let mut entries = match after {
            Some(after) => self.backend.list_with_offset(Some(folder), after),
            None => self.backend.list(Some(folder)),
        };
        let mut count = 0;
        while let Some(entry) = entries.try_next().await.map_err(backend("list", folder))? {
            count += 1;
            if count > count_max {
                return Err(Error::Listing {
                    key: folder.to_string(),
                    count_max,
                });
            }
            entry.location.filename().into_iter().for_each(&mut each);
        }
        Ok(())
    }

    /// The key ids in a manifest's signatures; nothing is verified.
    pub async fn signers(&self, policy: &str, serial: i64) -> Result<Vec<String>, Error> {
        let envelope = self.get_envelope(&manifest_key(policy, serial)?).await?;
        Ok(envelope.signatures.into_iter().map(|one| one.keyid).collect())
    }

    pub(super) async fn get_envelope(&self, key: &Path) -> Result<Envelope, Error> {
        let bytes = self.get(key, DOCUMENT_BYTES_MAX).await?;
        Envelope::from_bytes(&bytes).map_err(signature(key))
    }

    /// Signs and writes a document unless its place has one. False if it has.
    pub(super) async fn create<T: Document>(&self, document: &T, signer: &SigningKey) -> Result<bool, Error> {
        let key = document.key()?;
        document.check().map_err(contradiction(&key))?;
        let bytes = sign_document(&key, document, signer)?;
        self.put(&key, bytes, PutMode::Create).await
    }

    /// [`create`](Self::create), or the existing document if `signer` signed it.
    pub(super) async fn create_or_get<T: Document>(
        &self,
        document: &T,
        signer: &SigningKey,
    ) -> Result<PutOutcome<T>, Error> {
        if self.create(document, signer).await? {
            return Ok(PutOutcome::Created);
        }
        let existing = self.get_signed(&document.key()?, &signer.trusted()).await?;
        Ok(PutOutcome::Exists(existing.document))
    }

    /// Reads and verifies the document at `key`.
    pub(super) async fn get_signed<T: Document>(&self, key: &Path, keys: &TrustedKeys) -> Result<Signed<T>, Error> {
        let envelope = self.get_envelope(key).await?;
        let (payload, signer) = envelope.verify_signer(T::KIND, keys).map_err(signature(key))?;
        let document: T = serde_json::from_slice(&payload).map_err(contradiction(key))?;
        document.check().map_err(contradiction(key))?;
        if document.key().ok().as_ref() != Some(key) {
            return Err(contradiction(key)("it was signed for another place"));
        }
        let digest = Digest::of(&payload);
        Ok(Signed {
            document,
            digest,
            signer,
        })
    }
}

/// The number in a document's name. One spelling only: another name is another place.
fn number(name: &str) -> Option<i64> {
    let digits = name.strip_suffix(".json")?;
    let padded = digits.len() == 10 && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number = digits.parse().ok().filter(|_| padded)?;
    NUMBERS.contains(&number).then_some(number)
}

/// BLAKE3 of the exact bytes of a manifest, as [`Store::put_manifest`] signs them.
pub fn manifest_digest(manifest: &Manifest) -> Result<Digest, Error> {
    let key = manifest.key()?;
    Ok(Digest::of(&payload(&key, manifest)?))
}

/// The exact bytes of a document.
fn payload<T: Document>(key: &Path, document: &T) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(document).map_err(contradiction(key))
}

pub(super) fn sign_document<T: Document>(key: &Path, document: &T, signer: &SigningKey) -> Result<Vec<u8>, Error> {
    let payload = payload(key, document)?;
    let envelope = Envelope::sign(T::KIND, &payload, signer);
    envelope.to_bytes().map_err(signature(key))
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
