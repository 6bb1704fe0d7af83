//! The signed description of a version: what it is, where it comes from, which step made it, which objects hold it.
//!
//! A manifest is written once, after its objects. It does not say who is served by the version; an assignment does.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::digest::Digest;

/// The kind in the envelope's payload type.
pub const KIND: &str = "manifest";

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub policy: String,
    /// Serial number, unique in the policy.
    pub version: i64,
    /// Digest of the version's listing: it covers every byte.
    pub root: Digest,
    /// The version that this one was made from; none for an imported base.
    pub parent: Option<Parent>,
    pub line: String,
    /// Rises when the line is re-based.
    pub branch: i32,
    /// All bytes of the version as one object, where one was written.
    pub image: Option<ObjectRef>,
    /// What turns the parent's bytes into this version's, where one was written.
    pub delta: Option<ObjectRef>,
    /// Bytes of all tensors of the version.
    pub tensor_bytes: u64,
    /// The step that made it; none for an imported base.
    pub run: Option<RunStep>,
    /// The executor's fencing number: a later executor of the same run has a higher one.
    pub fence: i64,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parent {
    pub version: i64,
    pub root: Digest,
}

/// An object of the store, named by its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ObjectRef {
    /// BLAKE3 of the object's bytes.
    pub digest: Digest,
    pub size_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunStep {
    pub run: Uuid,
    pub step: i64,
    /// BLAKE3 of the sorted generation ids it trained on, 16 bytes each.
    pub cohort_digest: Digest,
}

/// Why a manifest contradicts itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("version {0} is not positive")]
    Serial(i64),
    #[error("version {version} names version {parent} as its parent; a parent is older")]
    ParentNotOlder { version: i64, parent: i64 },
    #[error("version {0} has a delta and no parent to apply it to")]
    DeltaWithoutParent(i64),
    #[error("version {0} has neither an image nor a delta")]
    NoObject(i64),
}

impl ObjectRef {
    pub fn of(bytes: &[u8]) -> Self {
        ObjectRef {
            digest: Digest::of(bytes),
            size_bytes: bytes.len() as u64,
        }
    }
}

impl Manifest {
    /// Refuses what no reader could follow. Called before a manifest is signed and after it is read.
    pub fn check(&self) -> Result<(), Error> {
        let version = self.version;
        if version < 1 {
            return Err(Error::Serial(version));
        }
        match self.parent {
            // a walk along parents must end
            Some(parent) if parent.version >= version => {
                return Err(Error::ParentNotOlder {
                    version,
                    parent: parent.version,
                });
            }
            None if self.delta.is_some() => return Err(Error::DeltaWithoutParent(version)),
            _ => {}
        }
        if self.image.is_none() && self.delta.is_none() {
            return Err(Error::NoObject(version));
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn sample() -> Manifest {
        Manifest {
            policy: "demo".into(),
            version: 8,
            root: Digest::of(b"root"),
            parent: Some(Parent {
                version: 7,
                root: Digest::of(b"parent"),
            }),
            line: "realtime".into(),
            branch: 0,
            image: None,
            delta: Some(ObjectRef::of(b"delta")),
            tensor_bytes: 10_485_760,
            run: Some(RunStep {
                run: Uuid::from_u128(7),
                step: 3,
                cohort_digest: Digest::of(b"cohort"),
            }),
            fence: 2,
            created_at: time::macros::datetime!(2026-11-21 06:00:00.25 UTC),
        }
    }

    #[test]
    fn the_json_form_is_read_back_and_is_the_documented_one() {
        let manifest = sample();
        let json = serde_json::to_value(&manifest).unwrap();
        assert_eq!(json["created_at"], "2026-11-21T06:00:00.25Z");
        assert_eq!(json["root"], manifest.root.to_string());
        assert_eq!(json["delta"]["size_bytes"], 5);
        assert_eq!(json["image"], serde_json::Value::Null);
        assert_eq!(json["run"]["run"], "00000000-0000-0000-0000-000000000007");
        let back: Manifest = serde_json::from_value(json).unwrap();
        assert_eq!(back, manifest);
    }

    #[test]
    fn contradictions_are_refused() {
        assert_eq!(sample().check(), Ok(()));
        let with = |change: &dyn Fn(&mut Manifest)| {
            let mut manifest = sample();
            change(&mut manifest);
            manifest.check().unwrap_err()
        };
        assert_eq!(with(&|m| m.version = 0), Error::Serial(0));
        assert!(matches!(with(&|m| m.version = 7), Error::ParentNotOlder { .. }));
        assert_eq!(with(&|m| m.parent = None), Error::DeltaWithoutParent(8));
        assert_eq!(with(&|m| m.delta = None), Error::NoObject(8));
    }
}
