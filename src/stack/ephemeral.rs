//! A temporary Postgres and Kafka for tests: free ports, a temporary folder, nothing left behind.
//! Not supervised: if one of them dies, the tests fail.
//!
//! Everybody may write to the folder for temporary files. So the stack's own folder has a random
//! name and other users cannot write to it, and only such folders are looked into afterwards.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::unistd::Uid;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::child::Child;
use super::fetch;
use super::kafka::{self, Kafka};
use super::postgres::{self, Postgres};
use crate::private;

const PREFIX: &str = "springtide-stack-";
const LOCK: &str = "lock";
const START_SECONDS_MAX: u64 = 60;

/// Their addresses.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Addresses {
    /// URL of an empty database whose user may create others.
    pub postgres: String,
    /// `host:port`.
    pub kafka: String,
    /// File of librdkafka settings, with the password.
    pub kafka_file: PathBuf,
}

/// Both, running.
#[derive(Debug)]
pub struct Ephemeral {
    pub addresses: Addresses,
    postgres: Child,
    kafka: Child,
    dir: TempDir,
    _lock: Flock<File>,
}

impl Ephemeral {
    /// Starts both and returns when both answer. Postgres waits for the disk only if `durable`.
    /// Call it from a thread that outlives them (see [`super::exec`]).
    pub async fn start(cache: &Path, durable: bool) -> anyhow::Result<Self> {
        sweep();
        let parts = fetch::fetch(cache)?;
        let dir = tempfile::Builder::new()
            .prefix(PREFIX)
            .permissions(Permissions::from_mode(0o700))
            .tempdir()
            .context("create temporary folder")?;
        if Uid::effective().is_root() {
            // The servers run as another user, who must pass through; nobody may list it.
            let pass = Permissions::from_mode(0o711);
            fs::set_permissions(dir.path(), pass).context("let the servers' user pass")?;
        }
        let lock = lock_new(dir.path()).context("lock own temporary folder")?;
        let [port, kafka_port, controller_port] = edge::bind::free_ports()?;
        let postgres = Postgres {
            installation: parts.postgres,
            data: dir.path().join("postgres"),
            port,
            durable,
        };
        let kafka = Kafka {
            java: parts.java,
            jars: parts.kafka,
            data: dir.path().join("kafka"),
            client_file: dir.path().join(kafka::CLIENT_FILE),
            port: kafka_port,
            controller_port,
            heap_mib: 384,
        };
        postgres.prepare()?;
        kafka.prepare()?;
        let mut running = Self {
            addresses: Addresses {
                postgres: postgres.url(postgres::SUPERUSER),
                kafka: kafka.brokers(),
                kafka_file: kafka.client_file.clone(),
            },
            postgres: spawn(postgres.command()?, dir.path(), "postgres.log")?,
            kafka: spawn(kafka.command()?, dir.path(), "kafka.log")?,
            dir,
            _lock: lock,
        };
        let answering = async {
            while !(postgres.ready().await && kafka.ready().await) {
                running.check_alive()?;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(Duration::from_secs(START_SECONDS_MAX), answering)
            .await
            .context("wait for Postgres and Kafka to answer")??;
        Ok(running)
    }

    /// Stops both and removes their folder.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        self.kafka.stop(kafka::STOP).await?;
        self.postgres.stop(postgres::STOP).await?;
        self.dir.close().context("remove temporary folder")
    }

    fn check_alive(&mut self) -> anyhow::Result<()> {
        for (child, log) in [(&mut self.postgres, "postgres.log"), (&mut self.kafka, "kafka.log")] {
            if let Some(status) = child.ended()? {
                let log = fs::read_to_string(self.dir.path().join(log)).unwrap_or_default();
                bail!("a server of the stack ended ({status}):\n{log}");
            }
        }
        Ok(())
    }
}

fn spawn(mut command: Command, dir: &Path, log: &str) -> anyhow::Result<Child> {
    let log = private::create(&dir.join(log)).context("create log file")?;
    command.stderr(log.try_clone().context("share log file")?).stdout(log);
    Child::spawn(command)
}

/// Removes folders that killed processes have left.
fn sweep() {
    let Ok(entries) = fs::read_dir(std::env::temp_dir()) else {
        return;
    };
    for entry in entries.filter_map(Result::ok) {
        let ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        // The lock is free when its holder is dead.
        if ours && lock_left(&entry.path()).is_some() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Locks a new folder. The lock gets its name when it is held, so no sweep finds it free.
fn lock_new(dir: &Path) -> anyhow::Result<Flock<File>> {
    let draft = dir.join("lock.new");
    let file = private::create(&draft).context("create lock file")?;
    let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno)?;
    fs::rename(&draft, dir.join(LOCK)).context("name the lock file")?;
    Ok(lock)
}

/// The lock of a folder that only this user can have filled. `None`: another process holds it, or
/// the folder is another user's, or a link.
fn lock_left(dir: &Path) -> Option<Flock<File>> {
    let folder = fs::symlink_metadata(dir).ok()?;
    if !folder.is_dir() || folder.uid() != Uid::effective().as_raw() || folder.mode() & 0o022 != 0 {
        return None;
    }
    let mut options = File::options();
    options.read(true).custom_flags(OFlag::O_NOFOLLOW.bits());
    let lock = options.open(dir.join(LOCK)).ok()?;
    Flock::lock(lock, FlockArg::LockExclusiveNonblock).ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A folder as a killed process leaves it.
    fn left() -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        drop(lock_new(dir.path()).unwrap());
        dir
    }

    #[test]
    fn only_a_folder_of_this_user_that_nobody_locks_is_swept() {
        let dir = left();
        let held = lock_left(dir.path()).unwrap();
        assert!(lock_left(dir.path()).is_none(), "it is held");
        drop(held);
        assert!(lock_left(dir.path()).is_some());

        let links = tempfile::tempdir().unwrap();
        let link = links.path().join("link");
        symlink(dir.path(), &link).unwrap();
        assert!(lock_left(&link).is_none(), "a link to a folder");

        fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).unwrap();
        assert!(lock_left(dir.path()).is_none(), "others can write to it");
    }

    #[test]
    fn a_link_in_place_of_the_lock_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        symlink(&victim, dir.path().join(LOCK)).unwrap();
        assert!(lock_left(dir.path()).is_none());
        fs::remove_file(dir.path().join(LOCK)).unwrap();
        symlink(&victim, dir.path().join("lock.new")).unwrap();
        assert!(lock_new(dir.path()).is_err());
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    }

    #[test]
    fn the_folder_of_another_user_is_left_alone() {
        if !Uid::effective().is_root() {
            return println!("not run: only root can make another user's folder");
        }
        let dir = left();
        std::os::unix::fs::chown(dir.path(), Some(65533), Some(65533)).unwrap();
        assert!(lock_left(dir.path()).is_none());
    }
}
