//! What a follower remembers over a restart, so that no store can take it back: the highest assignment epoch whose signature
//! it has verified, and what was said in it; the roots that versions had; which keys are revoked; and when the store's newest
//! statement was made. It is written before anything is done with what was verified.
//!
//! A lower epoch is refused for ever, so an old document can never bring an old version back; a rollback is a new epoch. Only
//! where the key that signed an epoch is revoked, the epochs that it signed count no longer: whoever stole a key must not be
//! able to lock the fleet out with a high number.

use anyhow::Context;
use policy::assignment::Assignment;
use policy::digest::Digest;
use policy::sign::TrustedKeys;
use policy::store::Signed;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use time::OffsetDateTime;

/// Roots that are remembered, of the newest versions.
const ROOTS_MAX: usize = 10_000;
/// Epochs rise one by one. A leap like this is somebody who wants no later one to count.
pub const LEAP_MAX: i64 = 1_000_000;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    policy: String,
    /// 0: none yet.
    epoch: i64,
    /// The highest epoch that each key signed. Under no name: of a time when that was not remembered.
    #[serde(default)]
    signers: BTreeMap<String, i64>,
    /// Digest of the assignment of `epoch`.
    #[serde(default)]
    assignment: Option<Digest>,
    #[serde(default)]
    roots: BTreeMap<i64, Digest>,
    /// Key → the key that revoked it.
    #[serde(default)]
    revoked: BTreeMap<String, String>,
    #[serde(default, with = "time::serde::rfc3339::option")]
    stated_at: Option<OffsetDateTime>,
}

/// The state file, read once and written with every change.
#[derive(Debug)]
pub struct Memory {
    path: PathBuf,
    state: State,
}

impl Memory {
    /// Opens `follow-<policy>.json` in `dir`, which is created. A file that cannot be understood is an error.
    pub fn open(dir: &Path, policy: &str) -> anyhow::Result<Self> {
        std::fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
        let path = dir.join(format!("follow-{policy}.json"));
        let mut state = match std::fs::read(&path) {
            Ok(bytes) => {
                let state: State =
                    serde_json::from_slice(&bytes).with_context(|| format!("read {}", path.display()))?;
                anyhow::ensure!(
                    state.policy == policy && state.epoch >= 0,
                    "{} is about policy {:?}, epoch {}",
                    path.display(),
                    state.policy,
                    state.epoch
                );
                state
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => State {
                policy: policy.into(),
                epoch: 0,
                signers: BTreeMap::new(),
                assignment: None,
                roots: BTreeMap::new(),
                revoked: BTreeMap::new(),
                stated_at: None,
            },
            Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
        };
        if state.signers.is_empty() && state.epoch > 0 {
            state.signers.insert(String::new(), state.epoch);
        }
        Ok(Memory { path, state })
    }

    /// The highest epoch verified that a key which still counts has signed; 0: none yet.
    pub fn epoch(&self, keys: &TrustedKeys) -> i64 {
        let counts = self.state.signers.iter().filter(|(key, _)| !keys.is_revoked(key));
        counts.map(|(_, epoch)| *epoch).max().unwrap_or(0)
    }

    /// Whether this very assignment was verified here before.
    pub fn knows(&self, assignment: &Signed<Assignment>) -> bool {
        self.state.epoch == assignment.document.epoch && self.state.assignment == Some(assignment.digest)
    }

    /// Remembers a verified assignment, durably, before anything is done with it. Refuses what contradicts what was
    /// verified before.
    pub fn verified(&mut self, assignment: &Signed<Assignment>, keys: &TrustedKeys) -> anyhow::Result<()> {
        let (floor, document) = (self.epoch(keys), &assignment.document);
        let epoch = document.epoch;
        anyhow::ensure!(
            epoch >= floor,
            "assignment {epoch} is older than {floor}, which was verified here before"
        );
        anyhow::ensure!(
            floor == 0 || epoch - floor <= LEAP_MAX,
            "assignment {epoch} leaps far beyond {floor}, after which no later one would count: revoke the key {} if it was stolen",
            assignment.signer
        );
        if epoch == floor && epoch == self.state.epoch && self.state.assignment.is_some() {
            anyhow::ensure!(
                self.knows(assignment),
                "assignment {epoch} is not the one that was verified here before: somebody signed two"
            );
        }
        for (alias, target) in &document.aliases {
            if let Some(known) = self.state.roots.get(&target.version) {
                anyhow::ensure!(
                    *known == target.root,
                    "assignment {epoch} gives {alias} version {} with root {}, which had root {known} before",
                    target.version,
                    target.root
                );
            }
        }
        let mut next = self.state.clone();
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

    /// The keys that are revoked, as far as who revoked them is trusted by `folder`.
    pub fn revoked(&self, folder: &TrustedKeys) -> impl Iterator<Item = &String> {
        let counts = self.state.revoked.iter().filter(|(_, by)| folder.contains(by));
        counts.map(|(key, _)| key)
    }

    /// Remembers revocations, as (key, who revoked it). They are never forgotten.
    pub fn revoke(&mut self, revoked: impl IntoIterator<Item = (String, String)>) -> anyhow::Result<()> {
        let mut next = self.state.clone();
        for (key, by) in revoked {
            next.revoked.entry(key).or_insert(by);
        }
        self.write(next)
    }

    /// When the newest statement was made that was ever verified here.
    pub fn stated_at(&self) -> Option<OffsetDateTime> {
        self.state.stated_at
    }

    pub fn stated(&mut self, at: OffsetDateTime) -> anyhow::Result<()> {
        let mut next = self.state.clone();
        next.stated_at = next.stated_at.max(Some(at));
        self.write(next)
    }

    fn write(&mut self, next: State) -> anyhow::Result<()> {
        let bytes = serde_json::to_vec(&next)?;
        if serde_json::to_vec(&self.state).is_ok_and(|before| before == bytes) && self.path.exists() {
            return Ok(());
        }
        let fresh = self.path.with_extension("json.new");
        let mut file = std::fs::File::create(&fresh).with_context(|| format!("create {}", fresh.display()))?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        std::fs::rename(&fresh, &self.path).with_context(|| format!("write {}", self.path.display()))?;
        if let Some(dir) = self.path.parent() {
            std::fs::File::open(dir)?.sync_all()?;
        }
        self.state = next;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assignment(epoch: i64, signer: &str, said: &[u8]) -> Signed<Assignment> {
        Signed {
            document: crate::routing::tests::assignment(epoch, &[("champion", 7)], &[]),
            digest: Digest::of(said),
            signer: signer.into(),
        }
    }

    #[test]
    fn the_highest_epoch_survives_a_restart_and_a_lower_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let keys = TrustedKeys::default();
        let mut memory = Memory::open(dir.path(), "demo").unwrap();
        assert_eq!(memory.epoch(&keys), 0);
        for epoch in [4, 4, 9] {
            memory.verified(&assignment(epoch, "a", b"one"), &keys).unwrap();
        }
        let mut memory = Memory::open(dir.path(), "demo").unwrap();
        assert_eq!(memory.epoch(&keys), 9);
        let refused = |memory: &mut Memory, epoch, said: &[u8]| {
            memory
                .verified(&assignment(epoch, "a", said), &keys)
                .unwrap_err()
                .to_string()
        };
        assert!(refused(&mut memory, 8, b"one").contains("older than 9"));
        assert!(refused(&mut memory, 9, b"two").contains("signed two"));
        assert!(refused(&mut memory, 2_000_000, b"one").contains("leaps"));
        assert_eq!(Memory::open(dir.path(), "other").unwrap().epoch(&keys), 0);
    }

    #[test]
    fn epochs_of_a_revoked_key_count_no_longer() {
        let dir = tempfile::tempdir().unwrap();
        let mut keys = TrustedKeys::default();
        let mut memory = Memory::open(dir.path(), "demo").unwrap();
        memory.verified(&assignment(5, "good", b"5"), &keys).unwrap();
        memory.verified(&assignment(900_000, "stolen", b"x"), &keys).unwrap();
        assert!(memory.verified(&assignment(6, "good", b"6"), &keys).is_err());
        keys.revoke("stolen");
        memory.revoke([("stolen".to_owned(), "good".to_owned())]).unwrap();
        assert_eq!(memory.epoch(&keys), 5);
        memory.verified(&assignment(6, "good", b"6"), &keys).unwrap();
        assert_eq!(Memory::open(dir.path(), "demo").unwrap().epoch(&keys), 6);
        assert!(memory.verified(&assignment(5, "good", b"5"), &keys).is_err());
    }

    #[test]
    fn a_version_keeps_its_root_and_an_old_file_is_understood() {
        let dir = tempfile::tempdir().unwrap();
        let keys = TrustedKeys::default();
        std::fs::write(dir.path().join("follow-demo.json"), r#"{"policy":"demo","epoch":3}"#).unwrap();
        let mut memory = Memory::open(dir.path(), "demo").unwrap();
        assert_eq!(memory.epoch(&keys), 3);
        memory.verified(&assignment(4, "a", b"4"), &keys).unwrap();
        let mut other = assignment(5, "a", b"5");
        other
            .document
            .aliases
            .values_mut()
            .for_each(|target| target.root = Digest::of(b"other"));
        let error = memory.verified(&other, &keys).unwrap_err().to_string();
        assert!(error.contains("had root"), "{error}");
    }

    #[test]
    fn a_memory_that_cannot_be_read_is_not_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        for torn in [
            "",
            "{\"policy\":\"demo\"",
            "{\"policy\":\"else\",\"epoch\":3}",
            "{\"policy\":\"demo\",\"epoch\":-1}",
        ] {
            std::fs::write(dir.path().join("follow-demo.json"), torn).unwrap();
            assert!(Memory::open(dir.path(), "demo").is_err(), "{torn:?}");
        }
    }
}
