//! What a process needs of memory, and what it may use: asked before it is taken. A process that
//! takes more than there is is killed, and whoever supervises it starts it again.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// What something needs of memory, part by part.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Need {
    parts: Vec<(&'static str, u64)>,
}

/// How much memory a process may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limit {
    pub bytes: u64,
    /// What limits it.
    pub of: String,
}

/// Something does not fit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} needs {} of memory ({need}), and {} is {}: {mend}", gb(need.bytes()), limit.of, gb(limit.bytes))]
pub struct TooMuch {
    what: String,
    need: Need,
    limit: Limit,
    mend: String,
}

impl Need {
    /// The same with this part, which is added to one of its name. A part of 0 bytes is left out.
    pub fn and(mut self, part: &'static str, bytes: u64) -> Self {
        match self.parts.iter_mut().find(|(name, _)| *name == part) {
            Some((_, before)) => *before = before.saturating_add(bytes),
            None => self.parts.extend((bytes > 0).then_some((part, bytes))),
        }
        self
    }

    /// Both.
    pub fn plus(self, other: &Need) -> Self {
        other
            .parts
            .iter()
            .fold(self, |need, (part, bytes)| need.and(part, *bytes))
    }

    pub fn bytes(&self) -> u64 {
        self.parts.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Refuses what is above the limit. `what` needs it, `mend` says what to do.
    pub fn fits(self, limit: &Limit, what: impl Into<String>, mend: impl Into<String>) -> Result<(), TooMuch> {
        if self.bytes() <= limit.bytes {
            return Ok(());
        }
        Err(TooMuch {
            what: what.into(),
            need: self,
            limit: limit.clone(),
            mend: mend.into(),
        })
    }
}

/// `weights 3.1 GB, KV cache 0.5 GB`.
impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (part, bytes)) in self.parts.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            write!(f, "{comma}{part} {}", gb(*bytes))?;
        }
        Ok(())
    }
}

impl Limit {
    /// A limit that a setting names.
    pub fn setting(name: &str, bytes: u64) -> Self {
        Limit {
            bytes,
            of: name.to_owned(),
        }
    }

    /// Of this process: the machine's memory, or that of a cgroup around it. No limit where neither is
    /// known.
    pub fn of_this_process() -> Self {
        let machine = Limit {
            bytes: fs::read_to_string("/proc/meminfo")
                .ok()
                .and_then(|text| machine_bytes(&text))
                .unwrap_or(u64::MAX),
            of: "the machine's memory".to_owned(),
        };
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let files = limit_files(&groups);
        let limits = files.iter().filter_map(|file| {
            Some(Limit {
                bytes: fs::read_to_string(file).ok()?.trim().parse().ok()?,
                of: format!("the limit in {}", file.display()),
            })
        });
        limits
            .chain([machine])
            .min_by_key(|limit| limit.bytes)
            .unwrap_or_else(|| Limit::setting("no limit", u64::MAX))
    }
}

/// Of `/proc/meminfo`.
fn machine_bytes(meminfo: &str) -> Option<u64> {
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    total
        .trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

/// The files that may limit a process, by its `/proc/self/cgroup`: of its groups and those around them.
fn limit_files(groups: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let (root, name) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            _ if controllers.split(',').any(|one| one == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        // a container may see only its own group, as the root
        let around = Path::new(path.trim_start_matches('/')).ancestors();
        files.extend(around.map(|group| Path::new(root).join(group).join(name)));
    }
    files
}

/// Bytes as people read them.
pub fn gb(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{:.0} kB", bytes as f64 / 1e3),
        1_000_000..10_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        10_000_000..1_000_000_000 => format!("{:.0} MB", bytes as f64 / 1e6),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_has_every_figure_the_limit_and_what_to_do() {
        let need = || {
            Need::default()
                .and("weights", 3_100_000_000)
                .and("none", 0)
                .and("KV cache", 500_000_000)
        };
        let limit = Limit::setting("serve.resident_bytes_max", 3_600_000_000);
        need().fits(&limit, "version 7", "raise it").unwrap();
        let limit = Limit {
            bytes: limit.bytes - 1,
            ..limit
        };
        assert_eq!(
            need().fits(&limit, "version 7", "raise it").unwrap_err().to_string(),
            "version 7 needs 3.6 GB of memory (weights 3.1 GB, KV cache 500 MB), and serve.resident_bytes_max is 3.6 GB: raise it"
        );
        assert_eq!(need().plus(&need()).to_string(), "weights 6.2 GB, KV cache 1.0 GB");
        assert_eq!(Need::default().and("a", u64::MAX).and("b", 1).bytes(), u64::MAX);
    }

    #[test]
    fn the_limits_of_all_groups_around_a_process_are_looked_at() {
        let both = "4:memory:/pod/one\n3:cpuset:/pod\n0::/pod/one\n";
        let files: Vec<String> = limit_files(both)
            .iter()
            .map(|file| file.display().to_string())
            .collect();
        assert_eq!(
            files,
            [
                "/sys/fs/cgroup/memory/pod/one/memory.limit_in_bytes",
                "/sys/fs/cgroup/memory/pod/memory.limit_in_bytes",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes",
                "/sys/fs/cgroup/pod/one/memory.max",
                "/sys/fs/cgroup/pod/memory.max",
                "/sys/fs/cgroup/memory.max",
            ]
        );
        assert_eq!(
            machine_bytes("MemTotal:       16384 kB\nMemFree: 1 kB\n"),
            Some(16 << 20)
        );
        assert!(Limit::of_this_process().bytes > 100_000_000);
    }
}
