//! A temporary Postgres and Kafka for tests: free ports, a temporary folder, nothing left behind.
//! Not supervised: if one of them dies, the tests fail.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::child::Child;
use super::fetch;
use super::kafka::{self, Kafka};
use super::postgres::{self, Postgres};

const PREFIX: &str = "springtide-stack-";
const START_SECONDS_MAX: u64 = 60;

/// Their addresses.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Addresses {
    /// URL of an empty database whose user may create others.
    pub postgres: String,
    /// `host:port`.
    pub kafka: String,
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
            .permissions(Permissions::from_mode(0o755))
            .tempdir()
            .context("create temporary folder")?;
        let lock = lock(dir.path())?.context("lock own temporary folder")?;
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
            port: kafka_port,
            controller_port,
            heap_mib: 384,
        };
        postgres.prepare()?;
        kafka.prepare()?;
        let mut running = Self {
            addresses: Addresses {
                postgres: postgres::url(port, postgres::SUPERUSER),
                kafka: kafka.brokers(),
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
    let log = File::create(dir.join(log)).context("create log file")?;
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
        // The lock is free when its holder is dead. Folders of other users stay.
        if ours && matches!(lock(&entry.path()), Ok(Some(_))) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// `None` if another process holds it.
fn lock(dir: &Path) -> anyhow::Result<Option<Flock<File>>> {
    let file = File::create(dir.join("lock")).context("create lock file")?;
    Ok(Flock::lock(file, FlockArg::LockExclusiveNonblock).ok())
}
