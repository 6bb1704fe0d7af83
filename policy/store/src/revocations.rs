//! Revoked keys, and adding signatures to the documents they had signed.
//!
//! A root key signs a revocation, or the key that is revoked. [`TrustedKeys::revoke_by`] says which
//! revocations count, whatever their order. Revocations are permanent; create a new key instead.

use std::collections::BTreeSet;

use object_store::{PutMode, path::Path};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use super::documents::{Document, contradiction, sign_document, signature};
use super::keys::{assignment_key, manifest_key, revocation_key, squashed_delta_key};
use super::{Error, Store};
use artifact::assignment::Assignment;
use artifact::manifest::Manifest;
use artifact::sign::{Envelope, REVOCATION_KIND, Revocations, Role, SigningKey, TrustedKeys};
use artifact::squash::SquashedDelta;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Revocation {
    pub policy: String,
    /// Id of the key: BLAKE3 of its 32 bytes.
    pub key: String,
    pub reason: String,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
}

impl Document for Revocation {
    fn kind_of(_: &Envelope) -> &'static str {
        REVOCATION_KIND
    }

    fn kind(&self) -> &'static str {
        REVOCATION_KIND
    }

    fn key(&self) -> Result<Path, Error> {
        revocation_key(&self.policy, &self.key)
    }
}

impl Store {
    /// Revokes a key for all readers of this policy. Returns false if it was revoked already; then
    /// `signer` signs the revocation too. `keys` are those of the folder, without revocations.
    pub async fn revoke(
        &self,
        revocation: &Revocation,
        signer: &SigningKey,
        keys: &TrustedKeys,
    ) -> Result<bool, Error> {
        if self.create(revocation, signer).await? {
            return Ok(true);
        }
        let key = revocation.key()?;
        let counts = self
            .trusted(&revocation.policy, keys.clone())
            .await?
            .is_revoked(&revocation.key);
        if counts && !self.revocation_signers(&key, keys).await?.is_empty() {
            let mut envelope = self.get_envelope(&key).await?;
            if envelope.countersign(REVOCATION_KIND, signer).map_err(signature(&key))? {
                let bytes = envelope.to_bytes().map_err(signature(&key))?;
                self.put(&key, bytes, PutMode::Overwrite).await?;
            }
            return Ok(false);
        }
        // Somebody without the right to revoke took the place.
        let bytes = sign_document(&key, revocation, signer)?;
        self.put(&key, bytes, PutMode::Overwrite).await?;
        Ok(true)
    }

    /// The signers of every revocation, whether it counts or not. `keys` are those of the folder.
    /// Ignores revocations that do not verify.
    pub async fn revocations(&self, policy: &str, keys: &TrustedKeys) -> Result<Revocations, Error> {
        let mut revocations = Revocations::new();
        for name in self.list_names(policy, "revocation").await? {
            let Some(id) = name.strip_suffix(".json") else { continue };
            let Ok(key) = revocation_key(policy, id) else { continue };
            match self.revocation_signers(&key, keys).await {
                Ok(signers) => drop(revocations.insert(id.to_owned(), signers)),
                Err(error @ Error::Backend { .. }) => return Err(error),
                Err(error) => tracing::warn!(policy, %error, "ignored an invalid revocation"),
            }
        }
        Ok(revocations)
    }

    /// The keys of the folder that signed the revocation at `key`.
    async fn revocation_signers(&self, key: &Path, keys: &TrustedKeys) -> Result<BTreeSet<String>, Error> {
        let envelope = self.get_envelope(key).await?;
        let signers = envelope.verify_signatures(REVOCATION_KIND, keys);
        let (payload, signers) = signers.map_err(signature(key))?;
        let revocation: Revocation = serde_json::from_slice(&payload).map_err(contradiction(key))?;
        if revocation.key().ok().as_ref() != Some(key) {
            return Err(contradiction(key)("it was signed for another place"));
        }
        Ok(signers.into_iter().map(str::to_owned).collect())
    }

    /// `keys` without those that the store says are revoked.
    pub async fn trusted(&self, policy: &str, mut keys: TrustedKeys) -> Result<TrustedKeys, Error> {
        let revocations = self.revocations(policy, &keys).await?;
        keys.revoke_by(&revocations);
        Ok(keys)
    }

    /// Adds a signature by `signer` to every document of its role that `keys` verify and it has not
    /// signed: of a trainer's key manifests and squashed deltas, of a release key assignments, of a
    /// root key the revocations that count. Only the envelopes change. Returns the number of new
    /// signatures.
    pub async fn resign(&self, policy: &str, keys: &TrustedKeys, signer: &SigningKey) -> Result<usize, Error> {
        type KindOf = fn(&Envelope) -> &'static str;
        let mut documents: Vec<(Path, KindOf)> = vec![];
        for serial in self.list_numbers(policy, "version").await? {
            documents.push((manifest_key(policy, serial)?, Manifest::kind_of));
        }
        for epoch in self.list_numbers(policy, "assignment").await? {
            documents.push((assignment_key(policy, epoch)?, Assignment::kind_of));
        }
        for (to, starts) in self.list_squashed_deltas(policy).await? {
            for from in starts {
                documents.push((squashed_delta_key(policy, from, to)?, SquashedDelta::kind_of));
            }
        }
        let mut count = 0;
        for (key, kind_of) in documents {
            let mut envelope = match self.get_envelope(&key).await {
                Err(Error::NotFound(_)) => continue,
                read => read?,
            };
            let kind = kind_of(&envelope);
            if !keys.may_sign(signer.key_id(), kind) {
                continue;
            }
            if let Err(error) = envelope.verify(kind, keys) {
                tracing::warn!(%key, %error, "not signed again");
                continue;
            }
            if envelope.countersign(kind, signer).map_err(signature(&key))? {
                let bytes = envelope.to_bytes().map_err(signature(&key))?;
                self.put(&key, bytes, PutMode::Overwrite).await?;
                count += 1;
            }
        }
        if keys.roles(signer.key_id()).any(|role| role == Role::Root) {
            count += self.sign_revocations(policy, keys, keys, signer).await?;
        }
        Ok(count)
    }

    /// Adds a signature by `signer` to the revocation of every key that `keys` hold for revoked.
    /// `folder` verifies the documents. Returns the number of new signatures.
    pub async fn sign_revocations(
        &self,
        policy: &str,
        keys: &TrustedKeys,
        folder: &TrustedKeys,
        signer: &SigningKey,
    ) -> Result<usize, Error> {
        let mut count = 0;
        for id in self.revocations(policy, folder).await?.into_keys() {
            let key = revocation_key(policy, &id)?;
            let mut envelope = self.get_envelope(&key).await?;
            if keys.is_revoked(&id) && envelope.countersign(REVOCATION_KIND, signer).map_err(signature(&key))? {
                let bytes = envelope.to_bytes().map_err(signature(&key))?;
                self.put(&key, bytes, PutMode::Overwrite).await?;
                count += 1;
            }
        }
        Ok(count)
    }
}
