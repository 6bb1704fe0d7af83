//! Limits the memory of one process: with its own control group (version 2 or 1; needs root), else
//! with a limit on its data segment, which is coarser.

use std::path::{Path, PathBuf};

use tokio::process::Command;

use super::process;

pub struct Limit {
    bytes: u64,
    group: Option<PathBuf>,
}

impl Limit {
    pub fn new(name: &str, bytes: u64) -> Self {
        let name = format!("springtide-{name}-{}", std::process::id());
        let roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/memory"];
        let group = roots
            .into_iter()
            .find_map(|root| make(&Path::new(root).join(&name), bytes));
        Self { bytes, group }
    }

    /// The kind of limit, for a report.
    pub fn kind(&self) -> &'static str {
        if self.group.is_some() {
            "control group"
        } else {
            "RLIMIT_DATA"
        }
    }

    /// The same command, under the limit from its start.
    pub fn hold(&self, command: &std::process::Command) -> Command {
        match &self.group {
            Some(group) => {
                let enter = format!("echo $$ > {}/cgroup.procs && exec \"$0\" \"$@\"", group.display());
                process::before("sh", &["-c", &enter], command)
            }
            None => process::before("prlimit", &[&format!("--data={}", self.bytes), "--"], command),
        }
    }

    /// How often the kernel killed it for lack of memory; `None`: unknown.
    pub fn kills(&self) -> Option<u64> {
        let group = self.group.as_ref()?;
        let files = ["memory.events", "memory.oom_control"];
        let text = files
            .into_iter()
            .find_map(|file| std::fs::read_to_string(group.join(file)).ok())?;
        let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "))?;
        line.trim().parse().ok()
    }
}

/// `None`: not possible on this machine.
fn make(group: &Path, bytes: u64) -> Option<PathBuf> {
    std::fs::create_dir(group).ok()?;
    let limits = ["memory.max", "memory.limit_in_bytes"];
    let limited = limits.into_iter().any(|limit| {
        let limit = group.join(limit);
        limit.exists() && std::fs::write(limit, bytes.to_string()).is_ok()
    });
    if !limited {
        let _ = std::fs::remove_dir(group);
    }
    limited.then(|| group.to_owned())
}

impl Drop for Limit {
    fn drop(&mut self) {
        if let Some(group) = &self.group
            && let Err(error) = std::fs::remove_dir(group)
        {
            eprintln!("{} stays: {error}", group.display());
        }
    }
}
