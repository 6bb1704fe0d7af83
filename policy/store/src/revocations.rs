//! Keys that are trusted no longer, told by the store to everybody who reads it; and signing again what they had signed.
//!
//! A revocation is signed by any key that its reader trusts, the revoked one among them: whoever holds a stolen key can so take
//! trust away and never give any. Revocations count together, whatever their order: two keys that revoke each other are both
//! revoked, and nothing loads until a person has looked. They are never taken back; a new key is made instead.

use std::collections::BTreeMap;

use object_store::{PutMode, path::Path};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use super::documents::{assignment_key, contradiction, manifest_key, manifest_kind, moved, signature};
use super::folds::fold_key;
use super::{Error, Store, key};
use artifact::sign::{SigningKey, TrustedKeys};
use artifact::{assignment, manifest, squash};

/// The kind in the envelope's payload type.
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

impl Store {
    /// Revokes a key for everybody who reads this policy. False when it was revoked before.
    pub async fn revoke(&self, revocation: &Revocation, signer: &SigningKey) -> Result<bool, Error> {
        let place = revocation_key(&revocation.policy, &revocation.key)?;
        self.put_document(&place, KIND, revocation, signer).await
    }

    /// Every key that a key of `keys` has revoked, with who did. What does not verify revokes nothing.
    pub async fn revocations(&self, policy: &str, keys: &TrustedKeys) -> Result<BTreeMap<String, String>, Error> {
        let mut revoked = BTreeMap::new();
        for name in self.names(policy, KIND).await? {
            let Some(id) = name.strip_suffix(".json") else { continue };
            let Ok(place) = revocation_key(policy, id) else {
                continue;
            };
            match self.get_signed::<Revocation>(&place, KIND, keys).await {
                Ok(signed) if signed.document.policy == policy && signed.document.key == id => {
                    revoked.insert(id.to_owned(), signed.signer);
                }
                Ok(_) => tracing::warn!(policy, error = %moved(&place), "a revocation that counts for nothing"),
                Err(error @ Error::Backend { .. }) => return Err(error),
                Err(error) => tracing::warn!(policy, %error, "a revocation that counts for nothing"),
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

    /// Adds a signature by `signer` to every manifest, fold and assignment that `keys` believe and it has not signed. The
    /// documents stay the same, byte for byte; only their envelopes are replaced. Returns how many were signed.
    pub async fn resign(&self, policy: &str, keys: &TrustedKeys, signer: &SigningKey) -> Result<usize, Error> {
        let mut places = vec![];
        for serial in self.numbers(policy, "version").await? {
            places.push((manifest_key(policy, serial)?, manifest::KIND));
        }
        for epoch in self.numbers(policy, "assignment").await? {
            places.push((assignment_key(policy, epoch)?, assignment::KIND));
        }
        for (to, begins) in self.fold_names(policy).await? {
            for from in begins {
                places.push((fold_key(policy, from, to)?, squash::KIND));
            }
        }
        let mut count = 0;
        for (place, kind) in places {
            let mut envelope = match self.get_envelope(&place).await {
                Err(Error::NotFound(_)) => continue,
                read => read?,
            };
            // what nobody here believes is not made believable
            let kind = match kind {
                manifest::KIND => manifest_kind(&envelope),
                kind => kind,
            };
            if let Err(error) = envelope.verify(kind, keys) {
                tracing::warn!(%place, %error, "not signed again");
                continue;
            }
            if envelope.countersign(kind, signer).map_err(signature(&place))? {
                let bytes = envelope.to_bytes().map_err(signature(&place))?;
                self.put(&place, bytes.into(), PutMode::Overwrite).await?;
                count += 1;
            }
        }
        Ok(count)
    }
}

fn revocation_key(policy: &str, id: &str) -> Result<Path, Error> {
    let place = key(policy, &format!("{KIND}/{id}.json"))?;
    // one spelling of an id
    id.parse::<artifact::digest::Digest>().map_err(contradiction(&place))?;
    Ok(place)
}
