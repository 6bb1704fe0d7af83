//! What a follower remembers over a restart: the highest assignment epoch whose signature it has verified. A lower one is
//! refused for ever, so an old document can never bring an old version back; a rollback is a new epoch.

use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    policy: String,
    /// 0: none yet.
    epoch: i64,
}

/// The state file, read once and written with every rise.
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
        let state = match std::fs::read(&path) {
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
            },
            Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
        };
        Ok(Memory { path, state })
    }

    /// The highest epoch verified; 0: none yet.
    pub fn epoch(&self) -> i64 {
        self.state.epoch
    }

    /// Remembers a verified epoch, durably, before anything is done with it.
    pub fn verified(&mut self, epoch: i64) -> anyhow::Result<()> {
        anyhow::ensure!(
            epoch >= self.state.epoch,
            "assignment {epoch} is older than {}, which was verified here before",
            self.state.epoch
        );
        if epoch == self.state.epoch {
            return Ok(());
        }
        let next = State {
            policy: self.state.policy.clone(),
            epoch,
        };
        let bytes = serde_json::to_vec(&next)?;
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

    #[test]
    fn the_highest_epoch_survives_a_restart_and_a_lower_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut memory = Memory::open(dir.path(), "demo").unwrap();
        assert_eq!(memory.epoch(), 0);
        memory.verified(4).unwrap();
        memory.verified(4).unwrap();
        memory.verified(9).unwrap();
        let mut memory = Memory::open(dir.path(), "demo").unwrap();
        assert_eq!(memory.epoch(), 9);
        assert!(memory.verified(8).unwrap_err().to_string().contains("older than 9"));
        assert_eq!(Memory::open(dir.path(), "other").unwrap().epoch(), 0);
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
