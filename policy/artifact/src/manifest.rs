//! The signed description of a version: its content, its parent, the step that made it, its
//! objects.
//!
//! A manifest is written once, after its objects. Assignments, not manifests, say who gets a
//! version.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::digest::Digest;
use crate::reference::Reference;

/// The kind in the envelope's payload type.
pub const KIND: &str = "manifest";

/// The manifest of a version.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub policy: String,
    /// Serial number, from 1, unique in the policy.
    pub version: i64,
    /// Content hash: the digest of the version's content index. Covers every byte.
    pub root: Digest,
    /// The version that this one was made from. None for an imported base.
    pub parent: Option<Parent>,
    /// The line that it belongs to.
    pub line: String,
    /// Rises when the line is re-based.
    pub branch: i32,
    /// The full checkpoint as one object, if one was written.
    #[serde(rename = "image")]
    pub checkpoint: Option<ObjectRef>,
    /// The delta from the parent, if one was written. Its head alone if there are `delta_shards`.
    pub delta: Option<ObjectRef>,
    /// Bytes of all tensors of the version.
    pub tensor_bytes: u64,
    /// The step that made it. None for an imported base.
    pub run: Option<RunStep>,
    /// Fencing number of the executor. A later executor of the same run has a higher one.
    pub fence: i64,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    /// Quantized copies that can be made from the version and checked. Left out of the document if
    /// empty.
    #[serde(rename = "quantised", default, skip_serializing_if = "Vec::is_empty")]
    pub quantized: Vec<Quantized>,
    /// The shards of a delta that several machines made, in order. `delta` is then its header and
    /// index.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub delta_shards: Vec<Shard>,
    /// What engines that serve the version are compared with. None if its publisher could not
    /// compute it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<Reference>,
    /// The version whose weights it adapts: its own tensors are the factors of an adapter. None: it has all weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapts: Option<Parent>,
}

/// One shard of a delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// Payloads of its frames, then their reverse data.
    #[serde(flatten)]
    pub object: ObjectRef,
    /// Bytes of the reverse data in the object.
    #[serde(rename = "back_bytes")]
    pub reverse_bytes: u64,
}

/// A quantized copy of the version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quantized {
    /// Name of a spec of `quant`. Readers ignore specs that they do not know.
    pub spec: String,
    /// Content hash of the copy.
    pub root: Digest,
}

/// A version and its content hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parent {
    pub version: i64,
    pub root: Digest,
}

/// An object of the store, named by its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ObjectRef {
    /// BLAKE3 of the object's bytes.
    pub digest: Digest,
    pub size_bytes: u64,
}

/// The step of a run that made a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunStep {
    pub run: Uuid,
    pub step: i64,
    /// BLAKE3 of the sorted ids (16 bytes each) of the generations it trained on.
    pub cohort_digest: Digest,
}

/// Why a manifest contradicts itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("version {0} is not positive")]
    Serial(i64),
    #[error("version {version} names version {parent} as its parent; a parent is older")]
    ParentNotOlder { version: i64, parent: i64 },
    #[error("version {version} adapts version {base}; a base is older")]
    BaseNotOlder { version: i64, base: i64 },
    #[error("version {0} has a delta and no parent to apply it to")]
    DeltaWithoutParent(i64),
    #[error("version {0} has neither a full checkpoint nor a delta")]
    NoObject(i64),
    #[error("version {0} has delta shards but no delta, or a shard that is shorter than its reverse data")]
    Shards(i64),
    #[error(
        "version {version} names a quantized copy `{spec}`: a name is 1 to 64 of a-z, 0-9, `-` and `.`, and there once"
    )]
    Quantized { version: i64, spec: String },
    #[error(
        "version {0} has reference log-probabilities that are not finite, too many, or of ids beyond the vocabulary"
    )]
    Reference(i64),
}

impl ObjectRef {
    /// The reference to an object with these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        ObjectRef {
            digest: Digest::of(bytes),
            size_bytes: bytes.len() as u64,
        }
    }
}

impl Manifest {
    /// Every object of the delta: the delta or its head, and the shards.
    pub fn delta_objects(&self) -> impl Iterator<Item = ObjectRef> + Clone + '_ {
        let shards = self.delta_shards.iter().map(|shard| shard.object);
        self.delta.into_iter().chain(shards)
    }

    /// Bytes of all objects of the delta. None if there is no delta.
    pub fn delta_bytes(&self) -> Option<u64> {
        let objects = self.delta_objects().map(|object| object.size_bytes);
        self.delta.map(|_| objects.fold(0, u64::saturating_add))
    }

    /// Returns an error if the manifest contradicts itself. Called before signing and after
    /// reading.
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
        if let Some(base) = self.adapts.filter(|base| base.version >= version) {
            return Err(Error::BaseNotOlder {
                version,
                base: base.version,
            });
        }
        if self.checkpoint.is_none() && self.delta.is_none() {
            return Err(Error::NoObject(version));
        }
        let sound = |shard: &Shard| shard.reverse_bytes <= shard.object.size_bytes;
        if !self.delta_shards.is_empty() && (self.delta.is_none() || !self.delta_shards.iter().all(sound)) {
            return Err(Error::Shards(version));
        }
        if self.reference.as_ref().is_some_and(|reference| !reference.is_sound()) {
            return Err(Error::Reference(version));
        }
        let mut names = BTreeSet::new();
        let refused = self
            .quantized
            .iter()
            .find(|copy| !is_spec(&copy.spec) || !names.insert(&copy.spec));
        match refused {
            Some(copy) => Err(Error::Quantized {
                version,
                spec: copy.spec.clone(),
            }),
            None => Ok(()),
        }
    }
}

/// Whether `name` has the form of a spec's name.
fn is_spec(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.');
    (1..=64).contains(&name.len()) && name.bytes().all(allowed)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::reference;

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
            checkpoint: None,
            delta: Some(ObjectRef::of(b"delta")),
            tensor_bytes: 10_485_760,
            run: Some(RunStep {
                run: Uuid::from_u128(7),
                step: 3,
                cohort_digest: Digest::of(b"cohort"),
            }),
            fence: 2,
            created_at: time::macros::datetime!(2026-11-21 06:00:00.25 UTC),
            quantized: vec![],
            delta_shards: vec![],
            reference: None,
            adapts: None,
        }
    }

    #[test]
    fn a_manifest_carries_what_engines_are_compared_with() {
        let mut manifest = sample();
        manifest.reference = Some(reference::tests::sample());
        assert_eq!(manifest.check(), Ok(()));
        let json = serde_json::to_value(&manifest).unwrap();
        assert_eq!(
            json["reference"]["answers"][1]["logprobs"],
            serde_json::json!([-0.5, -1.25])
        );
        assert_eq!(serde_json::from_value::<Manifest>(json).unwrap(), manifest);
        manifest.reference.as_mut().unwrap().vocab = 1;
        assert_eq!(manifest.check(), Err(Error::Reference(8)));
    }

    #[test]
    fn the_json_form_is_read_back_and_is_the_documented_one() {
        let manifest = sample();
        let json = serde_json::to_value(&manifest).unwrap();
        assert_eq!(json["created_at"], "2026-11-21T06:00:00.25Z");
        assert_eq!(json["root"], manifest.root.to_string());
        assert_eq!(json["delta"]["size_bytes"], 5);
        assert_eq!(json["image"], serde_json::Value::Null);
        assert!(
            json.get("quantised").is_none() && json.get("reference").is_none() && json.get("delta_shards").is_none()
        );
        assert_eq!(json["run"]["run"], "00000000-0000-0000-0000-000000000007");
        let back: Manifest = serde_json::from_value(json).unwrap();
        assert_eq!(back, manifest);
    }

    #[test]
    fn a_manifest_lists_shards_with_the_size_of_their_reverse_data() {
        let mut manifest = sample();
        let object = ObjectRef::of(b"a shard");
        manifest.delta_shards = vec![
            Shard {
                object,
                reverse_bytes: 2
            };
            3
        ];
        assert_eq!(manifest.check(), Ok(()));
        assert_eq!(
            (manifest.delta_objects().count(), manifest.delta_bytes()),
            (4, Some(5 + 3 * 7))
        );
        let json = serde_json::to_value(&manifest).unwrap();
        let expected = serde_json::json!({"digest": object.digest, "size_bytes": 7, "back_bytes": 2});
        assert_eq!(json["delta_shards"][2], expected);
        assert_eq!(serde_json::from_value::<Manifest>(json).unwrap(), manifest);
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
        let shard = |reverse_bytes| Shard {
            object: ObjectRef::of(b"shard"),
            reverse_bytes,
        };
        assert_eq!(with(&|m| m.delta_shards = vec![shard(5), shard(6)]), Error::Shards(8));
        let without = with(&|m| {
            (m.checkpoint, m.delta) = (m.delta, None);
            m.delta_shards = vec![shard(0)];
        });
        assert_eq!(without, Error::Shards(8));
        for specs in [
            vec![""],
            vec!["Fp8"],
            vec!["a b"],
            vec!["fp8.1", "int4.1", "fp8.1"],
            vec![&"x".repeat(65)],
        ] {
            let error = with(&|m| m.quantized = copies(&specs));
            assert!(matches!(error, Error::Quantized { .. }), "{specs:?}");
        }
    }

    fn copies(specs: &[&str]) -> Vec<Quantized> {
        let copy = |spec: &&str| Quantized {
            spec: (*spec).into(),
            root: Digest::of(b"copy"),
        };
        specs.iter().map(copy).collect()
    }

    #[test]
    fn copies_of_unknown_specs_survive_a_round_trip() {
        let mut manifest = sample();
        let before = serde_json::to_string(&manifest).unwrap();
        manifest.quantized = copies(&["mxfp4.3", "fp8-e4m3-b128.1"]);
        assert_eq!(manifest.check(), Ok(()));
        let json = serde_json::to_string(&manifest).unwrap();
        assert_eq!(serde_json::from_str::<Manifest>(&json).unwrap(), manifest);
        // without copies the field is left out
        assert!(json.starts_with(before.trim_end_matches('}')));
        let without: Manifest = serde_json::from_str(&before).unwrap();
        assert_eq!(
            (without.quantized.len(), serde_json::to_string(&without).unwrap()),
            (0, before)
        );
    }
}
