//! Pins: versions that a person wants kept. An entry's name is the pin; what is in it is for people, so that an entry that
//! cannot be read pins all the same.

use object_store::{PutMode, path::Path};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use time::OffsetDateTime;

use super::documents::{DOCUMENT_BYTES_MAX, numbered};
use super::{Error, Store, key};

/// Why a version is kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pin {
    pub version: i64,
    pub reason: String,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
}

impl Store {
    /// Pins a version: no collection takes what it needs. False when it was pinned before; the first reason stays.
    pub async fn pin(&self, policy: &str, pin: &Pin) -> Result<bool, Error> {
        let key = pin_key(policy, pin.version)?;
        let bytes = serde_json::to_vec(pin).map_err(|error| Error::Document {
            key: key.to_string(),
            reason: error.to_string(),
        })?;
        self.put(&key, bytes.into(), PutMode::Create).await
    }

    /// False when it was not pinned.
    pub async fn unpin(&self, policy: &str, version: i64) -> Result<bool, Error> {
        let key = pin_key(policy, version)?;
        if self.head(&key).await?.is_none() {
            return Ok(false);
        }
        self.delete(&key).await?;
        Ok(true)
    }

    /// All pins; none where the entry cannot be read.
    pub async fn pins(&self, policy: &str) -> Result<BTreeMap<i64, Option<Pin>>, Error> {
        let mut pins = BTreeMap::new();
        for version in self.numbers(policy, "pin").await? {
            let read = self
                .get(&pin_key(policy, version)?, |size| match size <= DOCUMENT_BYTES_MAX {
                    true => Ok(()),
                    false => Err("it is too large for a pin".into()),
                })
                .await;
            let pin = match read {
                Ok(bytes) => serde_json::from_slice(&bytes).ok(),
                // taken away since it was listed
                Err(Error::NotFound(_)) => continue,
                Err(Error::Corrupt { .. }) => None,
                Err(error) => return Err(error),
            };
            pins.insert(version, pin);
        }
        Ok(pins)
    }
}

fn pin_key(policy: &str, version: i64) -> Result<Path, Error> {
    key(policy, &format!("pin/{}.json", numbered(version)?))
}
