//! Pins: versions that a person wants to keep. An entry's name is the pin and its contents are for
//! people, so an unreadable entry pins its version as well.

use std::collections::BTreeMap;

use object_store::PutMode;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use super::documents::{DOCUMENT_BYTES_MAX, contradiction};
use super::keys::pin_key;
use super::{Error, Store};

/// Why a version is kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pin {
    pub version: i64,
    pub reason: String,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
}

impl Store {
    /// Keeps garbage collection from a version. False if it was pinned already; the first reason
    /// stays.
    pub async fn pin(&self, policy: &str, pin: &Pin) -> Result<bool, Error> {
        let key = pin_key(policy, pin.version)?;
        let bytes = serde_json::to_vec(pin).map_err(contradiction(&key))?;
        self.put(&key, bytes, PutMode::Create).await
    }

    /// False if it was not pinned.
    pub async fn unpin(&self, policy: &str, version: i64) -> Result<bool, Error> {
        let key = pin_key(policy, version)?;
        if self.head(&key).await?.is_none() {
            return Ok(false);
        }
        self.delete(&key).await?;
        Ok(true)
    }

    /// All pins by version; `None` if the entry is unreadable.
    pub async fn pins(&self, policy: &str) -> Result<BTreeMap<i64, Option<Pin>>, Error> {
        let mut pins = BTreeMap::new();
        for version in self.list_numbers(policy, "pin").await? {
            let pin = match self.get(&pin_key(policy, version)?, DOCUMENT_BYTES_MAX).await {
                Ok(bytes) => serde_json::from_slice(&bytes).ok(),
                // Deleted since it was listed.
                Err(Error::NotFound(_)) => continue,
                Err(Error::Corrupt { .. }) => None,
                Err(error) => return Err(error),
            };
            pins.insert(version, pin);
        }
        Ok(pins)
    }
}
