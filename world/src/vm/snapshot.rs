//! A machine that has booted, saved. Forks of it begin where it stopped.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::net::UnixListener;

use super::launch::{MEMORY, MIGRATION_SOCKET, OWN, STATE, Start};
use super::{Machine, Options};
use crate::provider::Error;
use crate::{Command, Ended, Limits};

/// From the start of QEMU to the answer of the services. An emulated processor takes 11 s, and minutes
/// beside other work.
const BOOT_TIME_MAX: Duration = Duration::from_secs(600);
const SAVE_TIME_MAX: Duration = Duration::from_secs(60);
const SETUP_TIME_MAX: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(2);

/// The memory and the devices of a machine whose services answer, in a folder.
#[derive(Debug)]
pub struct Snapshot {
    options: Options,
    folder: PathBuf,
    /// From the start of QEMU until the services answered.
    boot: Duration,
    forks: AtomicU64,
    /// Locked as long as the folder is in use.
    _lock: File,
}

impl Snapshot {
    /// Boots a machine and saves it in `folder`, which no other process may use. What an earlier
    /// process left there is removed.
    pub async fn make(mut options: Options, folder: &Path) -> Result<Self, Error> {
        options.check_host()?;
        let unusable = |what: &str, path: &Path, error: std::io::Error| {
            Error::Unusable(format!("{what} {}: {error}", path.display()))
        };
        options.image = (options.image.canonicalize()).map_err(|error| unusable("find", &options.image, error))?;
        let lock = lock(folder)?;
        if folder.exists() {
            std::fs::remove_dir_all(folder).map_err(|error| unusable("empty", folder, error))?;
        }
        std::fs::create_dir_all(folder).map_err(|error| unusable("create", folder, error))?;
        let folder = folder.canonicalize().map_err(|error| unusable("find", folder, error))?;
        let memory = folder.join(MEMORY);
        let file = File::create(&memory).map_err(|error| unusable("create", &memory, error))?;
        let sized = file.set_len(u64::from(options.memory_mib) << 20);
        sized.map_err(|error| unusable("resize", &memory, error))?;

        let began = Instant::now();
        let mut machine = Machine::start(&options, folder.join("boot"), &folder, Start::Boot).await?;
        if let Err(error) = machine.agent.hello(BOOT_TIME_MAX).await {
            return Err(Error::Unusable(format!(
                "the machine did not boot: {error}: {}",
                machine.said()
            )));
        }
        let boot = began.elapsed();
        if !options.setup.is_empty() {
            set_up(&mut machine, &options.setup).await?;
        }
        save(&mut machine, &folder.join(STATE)).await?;
        Ok(Self {
            options,
            folder,
            boot,
            forks: AtomicU64::new(0),
            _lock: lock,
        })
    }

    /// From the start of QEMU until the services answered.
    pub fn boot(&self) -> Duration {
        self.boot
    }

    /// Bytes of disk that the snapshot takes.
    pub fn disk_bytes(&self) -> u64 {
        use std::os::unix::fs::MetadataExt as _;
        [MEMORY, STATE]
            .iter()
            .filter_map(|name| std::fs::metadata(self.folder.join(name)).ok())
            .map(|found| found.blocks() * 512)
            .sum()
    }

    /// A machine with the memory of the snapshot. It stands still until [`Machine::begin`], so one that
    /// waits takes no processor time.
    pub async fn fork(&self) -> Result<Machine, Error> {
        let number = self.forks.fetch_add(1, Ordering::Relaxed);
        let own = self.folder.join(format!("w{number}"));
        let mut machine = Machine::start(&self.options, own, &self.folder, Start::Fork).await?;
        ignore_shared(&mut machine).await?;
        let incoming = json!({"uri": "fd:0"});
        machine.control.execute("migrate-incoming", incoming).await?;
        let until = Instant::now() + SAVE_TIME_MAX;
        loop {
            let answer = machine.control.execute("query-status", json!({})).await?;
            match answer["status"].as_str() {
                Some("inmigrate") if Instant::now() < until => tokio::time::sleep(POLL).await,
                Some("paused" | "prelaunch" | "postmigrate") => return Ok(machine),
                status => {
                    return Err(Error::Unusable(format!(
                        "a fork did not load its state ({}): {}",
                        status.unwrap_or("no status"),
                        machine.said()
                    )));
                }
            }
        }
    }
}

impl Machine {
    /// Lets a fork run, with a name, a clock and entropy of its own. `id` is its host name.
    pub async fn begin(&mut self, id: &str) -> Result<(), Error> {
        self.control.execute("cont", json!({})).await?;
        self.agent.begin(id).await
    }
}

/// Keeps other processes from `folder`, by a file beside it.
fn lock(folder: &Path) -> Result<File, Error> {
    let path = folder.with_extension("lock");
    let unusable = |error: std::io::Error| Error::Unusable(format!("lock {}: {error}", path.display()));
    if let Some(parent) = folder.parent() {
        std::fs::create_dir_all(parent).map_err(unusable)?;
    }
    let file = File::create(&path).map_err(unusable)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(Error::Unusable(format!(
            "another process has its worlds in {}: stop it, or give this one another folder",
            folder.display()
        ))),
        Err(std::fs::TryLockError::Error(error)) => Err(unusable(error)),
    }
}

/// Memory that is a shared file is not part of a machine's state.
async fn ignore_shared(machine: &mut Machine) -> Result<(), Error> {
    let capabilities = json!({"capabilities": [{"capability": "x-ignore-shared", "state": true}]});
    let set = machine.control.execute("migrate-set-capabilities", capabilities);
    set.await.map(drop)
}

async fn set_up(machine: &mut Machine, program: &[String]) -> Result<(), Error> {
    let command = Command {
        program: program.to_vec(),
        stdin: Vec::new(),
        files: BTreeMap::new(),
        limits: Limits {
            wall: SETUP_TIME_MAX,
            cpu: SETUP_TIME_MAX,
            ..Limits::default()
        },
    };
    let output = machine.agent.run(&command).await?;
    match output.ended {
        Ended::Exited(0) => Ok(()),
        ended => Err(Error::Unusable(format!(
            "the program of setup ended with {ended:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        ))),
    }
}

/// Stops a machine and writes the state of its devices to `file`. Its memory is in its own file.
async fn save(machine: &mut Machine, file: &Path) -> Result<(), Error> {
    let failed = |error: std::io::Error| Error::Unusable(format!("save the state of a machine: {error}"));
    machine.control.execute("stop", json!({})).await?;
    ignore_shared(machine).await?;
    let listener = UnixListener::bind(machine.folder().join(MIGRATION_SOCKET)).map_err(failed)?;
    let uri = format!("unix:{OWN}/{MIGRATION_SOCKET}");
    machine.control.execute("migrate", json!({"uri": uri})).await?;
    let copied = tokio::time::timeout(SAVE_TIME_MAX, async {
        let (mut stream, _) = listener.accept().await?;
        let mut file = tokio::fs::File::create(file).await?;
        tokio::io::copy(&mut stream, &mut file).await?;
        file.sync_all().await
    });
    copied.await.map_err(|error| failed(error.into()))?.map_err(failed)?;
    let until = Instant::now() + SAVE_TIME_MAX;
    loop {
        let answer = machine.control.execute("query-migrate", json!({})).await?;
        match answer["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("setup" | "active" | "device") if Instant::now() < until => tokio::time::sleep(POLL).await,
            status => {
                let status = status.unwrap_or("no status");
                return Err(Error::Unusable(format!(
                    "the state of a machine was not saved: {status}"
                )));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_one_owner_at_a_time() {
        let parent = std::env::temp_dir().join(format!("world-lock-{}", std::process::id()));
        let folder = parent.join("world");
        let first = lock(&folder).unwrap();
        let refused = lock(&folder).unwrap_err().to_string();
        assert!(refused.contains("another process"), "{refused}");
        drop(first);
        assert!(lock(&folder).is_ok());
        std::fs::remove_dir_all(parent).unwrap();
    }
}
