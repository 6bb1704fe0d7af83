//! What a follower remembers across restarts, so that a store cannot show it something older:
//! - the highest verified assignment epoch and the digest of that assignment,
//! - the content hashes of versions,
//! - which keys are revoked,
//! - when the newest timestamp was made.
//!
//! The state is written before a verified assignment is applied. Lower epochs are refused forever,
//! so an old document can never bring back an old version; a rollback is a new epoch. There is one
//! exception: when a key is revoked, the epochs it signed no longer count. Otherwise a stolen key
//! could lock out the fleet with a very high epoch.

use anyhow::Context;
use artifact::assignment::{Assignment, EPOCH_JUMP_MAX};
use artifact::atomic;
use artifact::digest::Digest;
use artifact::sign::{Revocations, TrustedKeys};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use store::Signed;
use time::OffsetDateTime;

/// Content hashes remembered, of the newest versions.
const ROOTS_MAX: usize = 10_000;

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Contents {
    policy: String,
    /// 0: none yet.
    epoch: i64,
    /// The highest epoch that each key signed.
    signers: BTreeMap<String, i64>,
    /// Digest of the assignment of `epoch`.
    assignment: Option<Digest>,
    roots: BTreeMap<i64, Digest>,
    /// Key → the keys that signed its revocation.
    revocations: Revocations,
    /// When the newest timestamp was made.
    #[serde(with = "time::serde::rfc3339::option")]
    stated_at: Option<OffsetDateTime>,
}

/// The state file: read once, written with every change.
#[derive(Debug)]
pub struct TrustState {
    path: PathBuf,
    contents: Contents,
}

impl TrustState {
    /// Opens `follow-<policy>.json` in `dir`, which is created. An unreadable file is an error.
    pub fn open(dir: &Path, policy: &str) -> anyhow::Result<Self> {
        let created = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
        created.with_context(|| format!("create {}", dir.display()))?;
        let path = dir.join(format!("follow-{policy}.json"));
        let contents = match std::fs::read(&path) {
            Ok(bytes) => {
                serde_json::from_slice::<Contents>(&bytes).with_context(|| format!("read {}", path.display()))?
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Contents {
                policy: policy.into(),
                ..Contents::default()
            },
            Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
        };
        anyhow::ensure!(
            contents.policy == policy && contents.epoch >= 0,
            "{} belongs to policy {:?}, epoch {}",
            path.display(),
            contents.policy,
            contents.epoch
        );
        Ok(TrustState { path, contents })
    }

    /// The highest verified epoch among keys that are not revoked; 0: none yet.
    pub fn epoch(&self, keys: &TrustedKeys) -> i64 {
        let valid = self.contents.signers.iter().filter(|(key, _)| !keys.is_revoked(key));
        valid.map(|(_, epoch)| *epoch).max().unwrap_or(0)
    }

    /// Whether exactly this assignment was verified here before.
    pub fn has_verified(&self, assignment: &Signed<Assignment>) -> bool {
        self.contents.epoch == assignment.document.epoch && self.contents.assignment == Some(assignment.digest)
    }

    /// Stores a verified assignment durably, before it is applied. Refuses one that contradicts an
    /// earlier one.
    pub fn record_assignment(&mut self, assignment: &Signed<Assignment>, keys: &TrustedKeys) -> anyhow::Result<()> {
        let (floor, document) = (self.epoch(keys), &assignment.document);
        let epoch = document.epoch;
        anyhow::ensure!(
            epoch >= floor,
            "assignment {epoch} is older than {floor}, which was verified here before"
        );
        anyhow::ensure!(
            floor == 0 || epoch - floor <= EPOCH_JUMP_MAX,
            "assignment {epoch} jumps too far ahead of {floor} and would block all later ones; if the key {} was stolen, revoke it",
            assignment.signer
        );
        if epoch == floor && epoch == self.contents.epoch && self.contents.assignment.is_some() {
            anyhow::ensure!(
                self.has_verified(assignment),
                "a different assignment {epoch} was verified here before: somebody signed two"
            );
        }
        for (alias, target) in &document.aliases {
            if let Some(known) = self.contents.roots.get(&target.version) {
                anyhow::ensure!(
                    *known == target.root,
                    "assignment {epoch} gives version {} of {alias} the content hash {}, but that version had {known} before",
                    target.version,
                    target.root
                );
            }
        }
        let mut next = self.contents.clone();
        next.epoch = epoch;
        next.assignment = Some(assignment.digest);
        next.signers.retain(|key, _| !keys.is_revoked(key));
        next.signers.insert(assignment.signer.clone(), epoch);
        next.roots
            .extend(document.aliases.values().map(|target| (target.version, target.root)));
        while next.roots.len() > ROOTS_MAX {
            next.roots.pop_first();
        }
        self.write(next)
    }

    /// The revocations seen so far. [`TrustedKeys::revoke_by`] says which of them count.
    pub fn revocations(&self) -> &Revocations {
        &self.contents.revocations
    }

    /// Stores the signers of revocations. They are never forgotten, so `revocations` must be of the
    /// folder's keys alone.
    pub fn record_revocations(&mut self, revocations: Revocations) -> anyhow::Result<()> {
        let mut next = self.contents.clone();
        for (key, signers) in revocations {
            next.revocations.entry(key).or_default().extend(signers);
        }
        self.write(next)
    }

    /// When the newest verified timestamp was made.
    pub fn timestamp_at(&self) -> Option<OffsetDateTime> {
        self.contents.stated_at
    }

    pub fn record_timestamp(&mut self, at: OffsetDateTime) -> anyhow::Result<()> {
        let mut next = self.contents.clone();
        next.stated_at = next.stated_at.max(Some(at));
        self.write(next)
    }

    fn write(&mut self, next: Contents) -> anyhow::Result<()> {
        if self.contents != next || !self.path.exists() {
            let bytes = serde_json::to_vec(&next)?;
            atomic::replace(&self.path, &[&bytes]).with_context(|| format!("write {}", self.path.display()))?;
            self.contents = next;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assignment(epoch: i64, signer: &str, bytes: &[u8]) -> Signed<Assignment> {
        Signed {
            document: crate::routing::tests::assignment(epoch, &[("champion", 7)], &[]),
            digest: Digest::of(bytes),
            signer: signer.into(),
        }
    }

    #[test]
    fn the_highest_epoch_survives_a_restart_and_a_lower_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let keys = TrustedKeys::default();
        let mut state = TrustState::open(dir.path(), "demo").unwrap();
        assert_eq!(state.epoch(&keys), 0);
        for epoch in [4, 4, 9] {
            state.record_assignment(&assignment(epoch, "a", b"one"), &keys).unwrap();
        }
        let mut state = TrustState::open(dir.path(), "demo").unwrap();
        assert_eq!(state.epoch(&keys), 9);
        let refused = |state: &mut TrustState, epoch, bytes: &[u8]| {
            state
                .record_assignment(&assignment(epoch, "a", bytes), &keys)
                .unwrap_err()
                .to_string()
        };
        assert!(refused(&mut state, 8, b"one").contains("older than 9"));
        assert!(refused(&mut state, 9, b"two").contains("signed two"));
        assert!(refused(&mut state, 2_000_000, b"one").contains("jumps too far"));
        assert_eq!(TrustState::open(dir.path(), "other").unwrap().epoch(&keys), 0);
    }

    #[test]
    fn epochs_signed_by_a_revoked_key_do_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let mut keys = TrustedKeys::default();
        let mut state = TrustState::open(dir.path(), "demo").unwrap();
        state.record_assignment(&assignment(5, "good", b"5"), &keys).unwrap();
        state
            .record_assignment(&assignment(900_000, "stolen", b"x"), &keys)
            .unwrap();
        assert!(state.record_assignment(&assignment(6, "good", b"6"), &keys).is_err());
        keys.revoke("stolen");
        assert_eq!(state.epoch(&keys), 5);
        state.record_assignment(&assignment(6, "good", b"6"), &keys).unwrap();
        assert_eq!(TrustState::open(dir.path(), "demo").unwrap().epoch(&keys), 6);
        assert!(state.record_assignment(&assignment(5, "good", b"5"), &keys).is_err());
    }

    #[test]
    fn a_version_keeps_its_content_hash() {
        let dir = tempfile::tempdir().unwrap();
        let keys = TrustedKeys::default();
        let mut state = TrustState::open(dir.path(), "demo").unwrap();
        state.record_assignment(&assignment(4, "a", b"4"), &keys).unwrap();
        let mut other = assignment(5, "a", b"5");
        other
            .document
            .aliases
            .values_mut()
            .for_each(|target| target.root = Digest::of(b"other"));
        let error = state.record_assignment(&other, &keys).unwrap_err().to_string();
        assert!(error.contains("the content hash"), "{error}");
    }

    #[test]
    fn revocations_are_remembered() {
        let dir = tempfile::tempdir().unwrap();
        let mut state = TrustState::open(dir.path(), "demo").unwrap();
        let revoked = |by: &[&str]| {
            let signers = by.iter().map(|by| (*by).to_owned()).collect();
            Revocations::from([("stolen".to_owned(), signers)])
        };
        state.record_revocations(revoked(&["release"])).unwrap();
        state.record_revocations(revoked(&["root"])).unwrap();
        let state = TrustState::open(dir.path(), "demo").unwrap();
        assert_eq!(*state.revocations(), revoked(&["release", "root"]));
    }

    #[test]
    fn an_unreadable_state_file_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        for torn in ["", "{\"policy\":\"demo\"", "{\"policy\":\"demo\",\"epoch\":3}"] {
            std::fs::write(dir.path().join("follow-demo.json"), torn).unwrap();
            assert!(TrustState::open(dir.path(), "demo").is_err(), "{torn:?}");
        }
    }
}
