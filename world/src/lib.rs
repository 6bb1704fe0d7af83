//! Places apart from the rest of the machine, in which programs run that nobody trusts: what a policy
//! wrote, and what grades it.

pub mod process;
pub mod provider;
pub mod remote;
pub mod service;
pub mod vm;

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// A program to run in a world.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Command {
    /// The program and its arguments.
    pub program: Vec<String>,
    pub stdin: Vec<u8>,
    /// Files that the program finds in its working directory, by relative path.
    pub files: BTreeMap<String, Vec<u8>>,
    pub limits: Limits,
}

/// What a program may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// From its start to its end. Default: 10 s.
    pub wall: Duration,
    /// Processor time of all its processes. Default: 10 s.
    pub cpu: Duration,
    /// Of all its processes and their files. Default: 256 MiB.
    pub memory_bytes: u64,
    /// Of standard output and standard error, each. Default: 64 KiB.
    pub output_bytes: u64,
    /// Processes and threads at a time. Default: 32.
    pub processes: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            wall: Duration::from_secs(10),
            cpu: Duration::from_secs(10),
            memory_bytes: 256 << 20,
            output_bytes: 64 << 10,
            processes: 32,
        }
    }
}

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// With this exit status. In a sandbox also 128 + n where the signal n ended it.
    Exited(i32),
    /// By this signal, in a virtual machine.
    Signalled(i32),
    /// It was ended because it used more than a limit allows.
    Exceeded(Limit),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    Wall,
    Cpu,
    Memory,
    Output,
}

/// What a program left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    pub ended: Ended,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub wall: Duration,
}
