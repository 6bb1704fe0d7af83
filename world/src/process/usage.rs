//! What the processes of a sandbox use, all together, read from /proc every [`PERIOD`].
//!
//! The limits of one process (`RLIMIT_*`) are the kernel's and hold at once; those of all of them hold as
//! of the next reading. A control group would count more exactly. It is not used: few services may make one.

use crate::{Limit, Limits};
use nix::sys::statvfs::statvfs;
use std::collections::HashMap;
use std::fs::read_to_string;
use std::time::Duration;

const PERIOD: Duration = Duration::from_millis(10);
/// /proc counts processor time in hundredths of a second, on every Linux.
const TICK: Duration = Duration::from_millis(10);
/// What the kernel keeps for a file beside its content, at most, roughly.
const INODE_BYTES: u64 = 1024;

/// Waits until the processes below `bwrap` use more than they may.
pub(super) async fn exceeded(bwrap: u32, limits: &Limits, folders: &[(&str, u64)]) -> Limit {
    let mut processor = Processor::default();
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let processes = tree(bwrap);
        if processor.used(&processes) > limits.cpu {
            return Limit::Cpu;
        }
        // bwrap and its child, which waits for the program, are small
        let programs: Vec<u32> = processes
            .iter()
            .filter(|(_, depth)| *depth >= 2)
            .map(|(pid, _)| *pid)
            .collect();
        let files = files_bytes(&programs, folders);
        let resident = |pid: &u32| resident_bytes(*pid);
        let shared = |pid: &u32| share_bytes(*pid).unwrap_or_else(|| resident_bytes(*pid));
        // The share of each page is exact and slow to read, so first comes a number that is never too small.
        if files + programs.iter().map(resident).sum::<u64>() > limits.memory_bytes
            && files + programs.iter().map(shared).sum::<u64>() > limits.memory_bytes
        {
            return Limit::Memory;
        }
    }
}

/// The children of a process.
fn children(pid: u32) -> Vec<u32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return vec![];
    };
    let lists = threads
        .flatten()
        .filter_map(|thread| read_to_string(thread.path().join("children")).ok());
    lists
        .flat_map(|list| {
            list.split_whitespace()
                .filter_map(|pid| pid.parse().ok())
                .collect::<Vec<_>>()
        })
        .collect()
}

/// A process and all below it, with their depth.
fn tree(root: u32) -> Vec<(u32, u32)> {
    let mut found = vec![(root, 0)];
    let mut next = 0;
    while let Some(&(pid, depth)) = found.get(next) {
        found.extend(children(pid).into_iter().map(|child| (child, depth + 1)));
        next += 1;
    }
    found
}

/// Processor time. A process's own time is lost to its parent where that ignores SIGCHLD, and short
/// processes end between two readings, so both sums are made and the larger one holds.
#[derive(Default)]
struct Processor {
    /// By process and its start, in ticks.
    own: HashMap<(u32, u64), u64>,
}

impl Processor {
    fn used(&mut self, processes: &[(u32, u32)]) -> Duration {
        let mut with_children = 0;
        for &(pid, _) in processes {
            let Some(times) = Times::read(pid) else { continue };
            with_children += times.own + times.ended_children;
            self.own.insert((pid, times.start), times.own);
        }
        let ticks = with_children.max(self.own.values().sum());
        TICK.saturating_mul(u32::try_from(ticks).unwrap_or(u32::MAX))
    }
}

/// Of a process, in ticks.
struct Times {
    own: u64,
    ended_children: u64,
    start: u64,
}

impl Times {
    fn read(pid: u32) -> Option<Times> {
        let stat = read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // A name may hold blanks and brackets. `fields[0]` is proc(5)'s field 3.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        Some(Times {
            own: field(14)? + field(15)?,
            ended_children: field(16)? + field(17)?,
            start: field(22)?,
        })
    }
}

/// Memory of a process and its page tables. Pages that processes share count for each of them.
fn resident_bytes(pid: u32) -> u64 {
    let status = read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    kilobytes(&status, &["RssAnon:", "RssShmem:", "VmPTE:", "VmSwap:"]) * 1024
}

/// The same with its share of pages. None where this process may not look.
fn share_bytes(pid: u32) -> Option<u64> {
    let pages = read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let status = read_to_string(format!("/proc/{pid}/status")).ok()?;
    let shares = kilobytes(&pages, &["Pss_Anon:", "Pss_Shmem:", "SwapPss:"]);
    Some((shares + kilobytes(&status, &["VmPTE:"])) * 1024)
}

fn kilobytes(lines: &str, names: &[&str]) -> u64 {
    let value = |line: &str| {
        let (name, value) = line.split_at_checked(line.find(':')? + 1)?;
        let value = value.split_whitespace().next()?.parse::<u64>().ok()?;
        names.contains(&name).then_some(value)
    };
    lines.lines().filter_map(value).sum()
}

/// What is stored in the sandbox's folders, which are file systems in memory of these sizes. They are seen
/// through one of its processes; a folder of another size is not the sandbox's.
fn files_bytes(programs: &[u32], folders: &[(&str, u64)]) -> u64 {
    let used = |pid: u32, (folder, size): &(&str, u64)| {
        let space = statvfs(format!("/proc/{pid}/root{folder}").as_str()).ok()?;
        let unit = space.fragment_size();
        let ours = space.blocks() * unit == size.next_multiple_of(unit);
        let files = (space.files() - space.files_free()) * INODE_BYTES;
        ours.then(|| (space.blocks() - space.blocks_free()) * unit + files)
    };
    let all = |pid: &u32| folders.iter().map(|folder| used(*pid, folder)).sum::<Option<u64>>();
    programs.iter().find_map(all).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_counts_its_own_time_and_memory() {
        let me = std::process::id();
        let kept = vec![1u8; 32 << 20];
        let (resident, share) = (resident_bytes(me), share_bytes(me).unwrap());
        assert!(resident >= 32 << 20 && share >= 32 << 20, "{resident} {share}");
        // the kernel counts resident pages by processor, and adds them up from time to time
        let late = 1 << 20;
        assert!(share <= resident + late, "{share} {resident}");
        drop(kept);
        let mut processor = Processor::default();
        let before = processor.used(&[(me, 0)]);
        let start = std::time::Instant::now();
        while processor.used(&[(me, 0)]) < before + Duration::from_millis(50) {
            assert!(start.elapsed() < Duration::from_secs(60), "no time was counted");
        }
    }

    #[test]
    fn children_are_found_below_their_parent() {
        let mut child = std::process::Command::new("sh")
            .args(["-c", "sleep 60 & wait"])
            .spawn()
            .unwrap();
        let start = std::time::Instant::now();
        let grandchild = loop {
            let found = tree(std::process::id());
            if let Some((pid, _)) = found
                .iter()
                .find(|(pid, depth)| *depth == 2 && children(child.id()).contains(pid))
            {
                break *pid;
            }
            assert!(start.elapsed() < Duration::from_secs(30), "{found:?}");
        };
        let grandchild = nix::unistd::Pid::from_raw(i32::try_from(grandchild).unwrap());
        nix::sys::signal::kill(grandchild, nix::sys::signal::Signal::SIGKILL).unwrap();
        child.wait().unwrap();
    }
}
