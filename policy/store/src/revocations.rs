//! Revoked keys, and adding signatures to the documents they had signed.
//!
//! A revocation is signed by any key that its reader trusts, including the revoked one. A stolen
//! key can therefore remove trust but not grant any. Revocations count regardless of their order:
//! two keys that revoke each other are both revoked, and nothing loads until a person has looked.
//! They are permanent; create a new key instead.

use std::collections::BTreeMap;

use object_store::{PutMode, path::Path};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use super::documents::{Document, signature};
use super::keys::{assignment_key, manifest_key, revocation_key, squashed_delta_key};
use super::{Error, Store};
use artifact::assignment::Assignment;
use artifact::manifest::Manifest;
use artifact::sign::{Envelope, SigningKey, TrustedKeys};
use artifact::squash::SquashedDelta;

const KIND: &str = "revocation";

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
        KIND
    }

    fn kind(&self) -> &'static str {
        KIND
    }

    fn key(&self) -> Result<Path, Error> {
        revocation_key(&self.policy, &self.key)
    }
}

impl Store {
    /// Revokes a key for all readers of this policy. False if it was revoked already.
    pub async fn revoke(&self, revocation: &Revocation, signer: &SigningKey) -> Result<bool, Error> {
        self.create(revocation, signer).await
    }

    /// The keys that keys of `keys` have revoked, each with the signer. Ignores revocations that do
    /// not verify.
    pub async fn revocations(&self, policy: &str, keys: &TrustedKeys) -> Result<BTreeMap<String, String>, Error> {
        let mut revoked = BTreeMap::new();
        for name in self.list_names(policy, "revocation").await? {
            let Some(id) = name.strip_suffix(".json") else { continue };
            let Ok(key) = revocation_key(policy, id) else { continue };
            match self.get_signed::<Revocation>(&key, keys).await {
                Ok(signed) => drop(revoked.insert(id.to_owned(), signed.signer)),
                Err(error @ Error::Backend { .. }) => return Err(error),
                Err(error) => tracing::warn!(policy, %error, "ignored an invalid revocation"),
            }
        }
        Ok(revoked)
    }

    /// `keys` without those that the store says are revoked.
    pub async fn trusted(&self, policy: &str, mut keys: TrustedKeys) -> Result<TrustedKeys, Error> {
        for revoked in self.revocations(policy, &keys).await?.into_keys() {
            keys.revoke(&revoked);
        }
        Ok(keys)
    }

    /// Adds a signature by `signer` to every manifest, assignment and squashed delta that `keys`
    /// verify and `signer` has not signed. Only the envelopes change. Returns the number of new
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
        Ok(count)
    }
}
