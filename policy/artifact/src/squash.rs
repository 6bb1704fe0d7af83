//! The signed description of a squashed delta: one delta that spans several steps.
//!
//! It is only a cheaper path between two versions that have their own manifests, and its result is
//! checked against those. So a squashed delta can be missing or deleted without loss.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use crate::manifest::{ObjectRef, Parent};

/// The kind in the envelope's payload type.
pub const KIND: &str = "fold";

/// A squashed delta.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SquashedDelta {
    pub policy: String,
    /// An ancestor of `to`.
    pub from: Parent,
    pub to: Parent,
    /// How many deltas it replaces, at least 2.
    pub steps: u32,
    /// The delta from `from` to `to`.
    pub delta: ObjectRef,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
}

/// Why a squashed delta contradicts itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("it goes from version {from} to version {to}; a squashed delta goes forward")]
    NotForward { from: i64, to: i64 },
    #[error("it spans {0} steps; a squashed delta spans at least 2, and at most those between its versions")]
    Steps(u32),
}

impl SquashedDelta {
    /// Returns an error if it contradicts itself. Called before signing and after reading.
    pub fn check(&self) -> Result<(), Error> {
        let (from, to) = (self.from.version, self.to.version);
        if from < 1 || from >= to {
            return Err(Error::NotForward { from, to });
        }
        if self.steps < 2 || i64::from(self.steps) > to - from {
            return Err(Error::Steps(self.steps));
        }
        Ok(())
    }
}
