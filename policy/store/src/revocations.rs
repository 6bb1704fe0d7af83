//! Revoked keys, and adding signatures to the documents they had signed.
//!
//! A root key signs a revocation, or the key that is revoked. [`TrustedKeys::revoke_by`] says which
//! revocations count, whatever their order. Revocations are permanent; create a new key instead.

use std::collections::BTreeSet;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::{PutMode, path::Path};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use super::documents::{Document, contradiction, sign_document, signature};
use super::keys::{assignment_key, manifest_key, private_key, revocation_key, squashed_delta_key};
use super::{Error, Store};
use artifact::assignment::Assignment;
use artifact::manifest::Manifest;
use artifact::sign::{ERASURE_KIND, REVOCATION_KIND, Revocations, Role, SigningKey, TrustedKeys};
use artifact::squash::SquashedDelta;

/// Revocations that `policy resign` lists. Nobody else lists them.
const LISTED_MAX: usize = 10_000;
/// Revocations read at once.
const READ_AT_ONCE: usize = 16;

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
    const KIND: &'static str = REVOCATION_KIND;

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
        // the folder may lack the key
        let ids = folder_ids(keys).chain([revocation.key.clone()]).collect();
        let mut now = keys.clone();
        now.revoke_by(&self.read_revocations(&revocation.policy, keys, ids).await?);
        let counts = now.is_revoked(&revocation.key);
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

    /// The revocations of the keys in the folder. `keys` are those of the folder. Ignores what
    /// does not verify.
    ///
    /// It reads one place per key and lists nothing: whoever writes to the store can put any number
    /// of files beside the revocations.
    pub async fn revocations(&self, policy: &str, keys: &TrustedKeys) -> Result<Revocations, Error> {
        self.read_revocations(policy, keys, folder_ids(keys).collect()).await
    }

    /// [`revocations`](Self::revocations), also of keys that the folder lacks.
    async fn all_revocations(&self, policy: &str, keys: &TrustedKeys) -> Result<Revocations, Error> {
        let names = self.list_names(policy, "revocation", LISTED_MAX).await?;
        let listed = names.iter().filter_map(|name| name.strip_suffix(".json"));
        let listed = listed
            .filter(|id| revocation_key(policy, id).is_ok())
            .map(str::to_owned);
        self.read_revocations(policy, keys, folder_ids(keys).chain(listed).collect())
            .await
    }

    async fn read_revocations(
        &self,
        policy: &str,
        keys: &TrustedKeys,
        ids: BTreeSet<String>,
    ) -> Result<Revocations, Error> {
        let read = |id: String| async move {
            let key = revocation_key(policy, &id)?;
            Ok::<_, Error>((id, self.revocation_signers(&key, keys).await))
        };
        let mut reads = stream::iter(ids).map(read).buffer_unordered(READ_AT_ONCE);
        let mut revocations = Revocations::new();
        while let Some((id, signers)) = reads.try_next().await? {
            match signers {
                Ok(signers) if signers.is_empty() => {
                    tracing::warn!(policy, key = id, "ignored a revocation that nobody signed who may");
                }
                Ok(signers) => drop(revocations.insert(id, signers)),
                Err(Error::NotFound(_)) => {}
                Err(error @ Error::Backend { .. }) => return Err(error),
                Err(error) => tracing::warn!(policy, %error, "ignored an invalid revocation"),
            }
        }
        Ok(revocations)
    }

    /// The keys of the folder that signed the revocation at `key` and may, revoked or not.
    async fn revocation_signers(&self, key: &Path, keys: &TrustedKeys) -> Result<BTreeSet<String>, Error> {
        let envelope = self.get_envelope(key).await?;
        let signers = envelope.verify_signatures(REVOCATION_KIND, keys);
        let (payload, signers) = signers.map_err(signature(key))?;
        let revocation: Revocation = serde_json::from_slice(&payload).map_err(contradiction(key))?;
        if revocation.key().ok().as_ref() != Some(key) {
            return Err(contradiction(key)("it was signed for another place"));
        }
        let may = |signer: &&str| *signer == revocation.key || keys.may_revoke(signer);
        Ok(signers.into_iter().filter(may).map(str::to_owned).collect())
    }

    /// `keys` without those that the store says are revoked.
    pub async fn trusted(&self, policy: &str, mut keys: TrustedKeys) -> Result<TrustedKeys, Error> {
        let revocations = self.revocations(policy, &keys).await?;
        keys.revoke_by(&revocations);
        Ok(keys)
    }

    /// Adds a signature by `signer` to every document of its role that `keys` verify and it has not
    /// signed: of a trainer's key manifests and squashed deltas, of a release key assignments and receipts of erased users, of a
    /// root key the revocations that count. Only the envelopes change. Returns the number of new
    /// signatures.
    pub async fn resign(&self, policy: &str, keys: &TrustedKeys, signer: &SigningKey) -> Result<usize, Error> {
        let mut documents: Vec<(Path, &str)> = vec![];
        for serial in self.list_numbers(policy, "version").await? {
            documents.push((manifest_key(policy, serial)?, Manifest::KIND));
        }
        for epoch in self.list_numbers(policy, "assignment").await? {
            documents.push((assignment_key(policy, epoch)?, Assignment::KIND));
        }
        for (to, starts) in self.list_squashed_deltas(policy).await? {
            for from in starts {
                documents.push((squashed_delta_key(policy, from, to)?, SquashedDelta::KIND));
            }
        }
        for receipt in self.list_private("erasures").await?.into_keys() {
            documents.push((private_key(&receipt)?, ERASURE_KIND));
        }
        let mut count = 0;
        for (key, kind) in documents {
            let mut envelope = match self.get_envelope(&key).await {
                Err(Error::NotFound(_)) => continue,
                read => read?,
            };
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
            count += self.sign_revocations(policy, keys, signer).await?;
        }
        Ok(count)
    }

    /// Adds a signature by `signer` to every revocation that counts for `keys`, also of keys that
    /// they lack. Returns the number of new signatures.
    pub async fn sign_revocations(
        &self,
        policy: &str,
        keys: &TrustedKeys,
        signer: &SigningKey,
    ) -> Result<usize, Error> {
        let revocations = self.all_revocations(policy, keys).await?;
        let mut now = keys.clone();
        now.revoke_by(&revocations);
        let mut count = 0;
        for id in revocations.into_keys().filter(|id| now.is_revoked(id)) {
            let key = revocation_key(policy, &id)?;
            let mut envelope = self.get_envelope(&key).await?;
            if envelope.countersign(REVOCATION_KIND, signer).map_err(signature(&key))? {
                let bytes = envelope.to_bytes().map_err(signature(&key))?;
                self.put(&key, bytes, PutMode::Overwrite).await?;
                count += 1;
            }
        }
        Ok(count)
    }
}

fn folder_ids(keys: &TrustedKeys) -> impl Iterator<Item = String> {
    keys.ids().map(str::to_owned)
}
