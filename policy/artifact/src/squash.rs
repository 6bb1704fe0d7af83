//! The signed description of a fold: one delta that leads over several steps, beside the deltas of the steps themselves.
//!
//! A fold is only ever a cheaper way between two versions that have their own manifests: what it leads to is held against
//! those, so a fold can be missing, or taken away, without anything being lost.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use crate::manifest::{ObjectRef, Parent};

/// The kind in the envelope's payload type.
pub const KIND: &str = "fold";

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SquashedDelta {
    pub policy: String,
    /// An ancestor of `to`.
    pub from: Parent,
    pub to: Parent,
    /// How many deltas it stands for, at least 2.
    pub steps: u32,
    /// What turns `from`'s bytes into `to`'s.
    pub delta: ObjectRef,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
}

/// Why a fold contradicts itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("it leads from version {from} to version {to}; a fold leads forward")]
    NotForward { from: i64, to: i64 },
    #[error("it stands for {0} steps; a fold stands for at least 2, and for no more than lie between its versions")]
    Steps(u32),
}

impl SquashedDelta {
    /// Refuses what no reader could follow. Called before a fold is signed and after it is read.
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
