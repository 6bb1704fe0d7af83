//! The timestamp: a signed document, renewed every few seconds, that names the newest epoch.
//!
//! It protects against replayed or frozen stores (the term is TUF's). The control role signs it. It
//! also lists the revoked keys, so a store that hides an assignment or a revocation contradicts it.
//! A store that hides the timestamp as well shows an old one.

use std::collections::BTreeSet;

use object_store::{PutMode, path::Path};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use super::documents::{Document, sign_document};
use super::keys::timestamp_key;
use super::{Error, Signed, Store};
use artifact::sign::{SigningKey, TIMESTAMP_KIND, TrustedKeys};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Timestamp {
    pub policy: String,
    /// The newest assignment, 0 if there is none yet.
    pub epoch: i64,
    /// Ids of all revoked keys.
    pub revoked: BTreeSet<String>,
    /// When this was true.
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
}

impl Document for Timestamp {
    const KIND: &'static str = TIMESTAMP_KIND;

    fn key(&self) -> Result<Path, Error> {
        timestamp_key(&self.policy)
    }
}

impl Store {
    /// Signs a timestamp and replaces the previous one.
    pub async fn put_timestamp(&self, timestamp: &Timestamp, signer: &SigningKey) -> Result<(), Error> {
        let key = timestamp.key()?;
        let bytes = sign_document(&key, timestamp, signer)?;
        self.put(&key, bytes, PutMode::Overwrite).await?;
        Ok(())
    }

    /// The store's timestamp, verified. None if there never was one or the store hides it.
    pub async fn get_timestamp(&self, policy: &str, keys: &TrustedKeys) -> Result<Option<Signed<Timestamp>>, Error> {
        match self.get_signed(&timestamp_key(policy)?, keys).await {
            Err(Error::NotFound(_)) => Ok(None),
            read => read.map(Some),
        }
    }
}
