//! The statement of what is newest: how a reader tells a store in which nothing happens from one that shows it an old picture.
//!
//! Whoever leads the releases signs one every few seconds, and it is the one document that is replaced. It names the newest
//! epoch and the revoked keys, so a store that keeps back an assignment or a revocation contradicts it, and a store that keeps
//! it back as well shows one that grows old.

use std::collections::BTreeSet;

use object_store::{PutMode, path::Path};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use super::documents::{contradiction, moved, signature};
use super::{Error, Signed, Store, key};
use artifact::sign::{Envelope, SigningKey, TrustedKeys};

/// The kind in the envelope's payload type.
const KIND: &str = "statement";

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Statement {
    pub policy: String,
    /// The newest assignment; 0: there is none yet.
    pub epoch: i64,
    /// Ids of all keys that have been revoked.
    pub revoked: BTreeSet<String>,
    /// When this was true.
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
}

impl Store {
    /// Signs a statement and puts it in the place of the one before.
    pub async fn put_statement(&self, statement: &Statement, signer: &SigningKey) -> Result<(), Error> {
        let place = statement_key(&statement.policy)?;
        let payload = serde_json::to_vec(statement).map_err(contradiction(&place))?;
        let envelope = Envelope::sign(KIND, &payload, signer);
        let bytes = envelope.to_bytes().map_err(signature(&place))?;
        self.put(&place, bytes.into(), PutMode::Overwrite).await?;
        Ok(())
    }

    /// The statement that the store shows, verified; none where there never was one, or it is kept back.
    pub async fn statement(&self, policy: &str, keys: &TrustedKeys) -> Result<Option<Signed<Statement>>, Error> {
        let place = statement_key(policy)?;
        match self.get_signed::<Statement>(&place, KIND, keys).await {
            Ok(signed) if signed.document.policy == policy => Ok(Some(signed)),
            Ok(_) => Err(moved(&place)),
            Err(Error::NotFound(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn statement_key(policy: &str) -> Result<Path, Error> {
    key(policy, "statement.json")
}
