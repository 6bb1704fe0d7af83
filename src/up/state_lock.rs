//! The lock on a state folder, held by one supervisor, and the list of its children. The kernel
//! *signals* the children when their supervisor dies. The list lets the next supervisor wait for
//! those that still run, and end them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::{console, private};

const LOCK: &str = "up.lock";
const CHILDREN: &str = "up.json";
/// How long a leftover process may take to end before it is killed.
const LEFTOVER_SECONDS_MAX: u64 = 10;

/// The lock on a state folder. Cheap to clone. Released when the last clone is dropped or the process
/// ends.
#[derive(Clone)]
pub struct StateLock(Rc<Inner>);

struct Inner {
    _lock: Flock<File>,
    children_file: PathBuf,
    children: RefCell<BTreeMap<String, Process>>,
}

/// A process. The start time tells it from a later one with the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Process {
    pid: i32,
    /// When it started, in clock ticks since boot.
    #[serde(rename = "started")]
    start_ticks: u64,
}

impl StateLock {
    /// Fails if another supervisor runs on the same state folder.
    pub fn take(state_dir: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(state_dir).with_context(|| format!("create {}", state_dir.display()))?;
        let path = state_dir.join(LOCK);
        let file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .with_context(|| format!("open {}", path.display()))?;
        let mut lock =
            Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| lock_error(state_dir, errno))?;
        lock.set_len(0).context("write lock file")?;
        writeln!(lock, "{}", std::process::id()).context("write lock file")?;
        Ok(Self(Rc::new(Inner {
            _lock: lock,
            children_file: state_dir.join(CHILDREN),
            children: RefCell::default(),
        })))
    }

    /// Ends processes that an earlier supervisor left behind.
    pub async fn clear_leftovers(&self) -> anyhow::Result<()> {
        let Ok(list) = fs::read(&self.0.children_file) else {
            return Ok(());
        };
        // The file may be truncated if the machine stopped while it was written.
        let children: BTreeMap<String, Process> = serde_json::from_slice(&list).unwrap_or_default();
        for (name, process) in children {
            if process.is_alive() {
                eprintln!(
                    "{name} (process {}) was left by a killed supervisor: ending it",
                    process.pid
                );
                process.end().await?;
            }
        }
        self.forget_all();
        Ok(())
    }

    pub fn remember(&self, name: &str, pid: Pid) {
        let Some(process) = Process::find(pid.as_raw()) else {
            return; // already ended
        };
        self.0.children.borrow_mut().insert(name.to_owned(), process);
        self.write();
    }

    pub fn forget(&self, name: &str) {
        self.0.children.borrow_mut().remove(name);
        self.write();
    }

    pub fn forget_all(&self) {
        self.0.children.borrow_mut().clear();
        self.write();
    }

    /// The file is only needed to end leftover processes, so a failure is only reported.
    fn write(&self) {
        let written = serde_json::to_string(&*self.0.children.borrow())
            .map_err(anyhow::Error::from)
            .and_then(|list| private::replace(&self.0.children_file, &list, None));
        if let Err(error) = written {
            console::say(&format!(
                "could not write {}: {error:#}",
                self.0.children_file.display()
            ));
        }
    }
}

impl Process {
    fn find(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        Some(Self {
            pid,
            start_ticks: start_ticks(&stat)?,
        })
    }

    fn is_alive(self) -> bool {
        Self::find(self.pid) == Some(self)
    }

    async fn end(self) -> anyhow::Result<()> {
        let pid = Pid::from_raw(self.pid);
        let started = Instant::now();
        send_signal(pid, Signal::SIGTERM).context("end a leftover process")?;
        while self.is_alive() {
            if started.elapsed() > Duration::from_secs(LEFTOVER_SECONDS_MAX) {
                send_signal(pid, Signal::SIGKILL).context("kill a leftover process")?;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }
}

/// Why the lock could not be taken. A supervisor that holds it has written its process id into it.
fn lock_error(state_dir: &Path, errno: Errno) -> anyhow::Error {
    let path = state_dir.join(LOCK);
    if errno != Errno::EWOULDBLOCK {
        return anyhow!("cannot lock {}: {errno}", path.display());
    }
    let pid = fs::read_to_string(&path).unwrap_or_default();
    anyhow!(
        "Springtide already runs on {} (process {}): stop it first, or give this one another state_dir and ports",
        state_dir.display(),
        pid.trim()
    )
}

/// Sends a signal. Succeeds if the process has already ended.
fn send_signal(pid: Pid, signal: Signal) -> nix::Result<()> {
    match kill(pid, signal) {
        Err(Errno::ESRCH) => Ok(()),
        result => result,
    }
}

/// Field 22 of `/proc/<pid>/stat`; `None` for a zombie. The second field is a name in brackets; the
/// name may contain brackets and spaces.
fn start_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    if fields.next()? == "Z" {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_folder_is_locked_by_one_supervisor() {
        let temp = tempfile::tempdir().unwrap();
        let first = StateLock::take(temp.path()).unwrap();
        let refused = StateLock::take(temp.path()).map(drop).unwrap_err().to_string();
        assert!(refused.contains("already runs"), "{refused}");
        assert!(refused.contains(&std::process::id().to_string()), "{refused}");
        drop(first);
        StateLock::take(temp.path()).unwrap();
    }

    #[test]
    fn only_a_lock_that_is_held_means_that_springtide_runs() {
        let dir = Path::new("/srv/state");
        assert!(lock_error(dir, Errno::EWOULDBLOCK).to_string().contains("already runs"));
        let other = lock_error(dir, Errno::ENOLCK).to_string();
        assert!(other.starts_with("cannot lock /srv/state/up.lock: "), "{other}");
    }

    #[test]
    fn signalling_a_process_that_has_ended_succeeds() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
        child.wait().unwrap();
        assert_eq!(send_signal(pid, Signal::SIGTERM), Ok(()));
    }

    #[test]
    fn the_list_of_children_keeps_its_format() {
        let process = Process { pid: 7, start_ticks: 9 };
        assert_eq!(serde_json::to_string(&process).unwrap(), r#"{"pid":7,"started":9}"#);
    }

    #[test]
    fn a_process_differs_from_a_later_one_with_its_id() {
        let own = i32::try_from(std::process::id()).unwrap();
        let process = Process::find(own).unwrap();
        assert!(process.is_alive());
        let earlier = Process {
            start_ticks: process.start_ticks - 1,
            ..process
        };
        assert!(!earlier.is_alive());
    }

    #[test]
    fn a_process_name_with_brackets_does_not_shift_the_fields() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4242 1000 1";
        assert_eq!(start_ticks(stat), Some(4242));
        assert_eq!(start_ticks(&stat.replace(" S ", " Z ")), None);
    }

    #[tokio::test]
    async fn a_leftover_process_is_ended() {
        let temp = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        {
            let lock = StateLock::take(temp.path()).unwrap();
            lock.remember("sleeper", Pid::from_raw(i32::try_from(child.id()).unwrap()));
        }
        StateLock::take(temp.path()).unwrap().clear_leftovers().await.unwrap();
        assert!(!child.wait().unwrap().success());
    }
}
