//! vLLM servers.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context;

use crate::process::Process;

const START_MAX: Duration = Duration::from_secs(600);

/// How servers are started.
#[derive(Debug, Clone)]
pub struct Vllm {
    /// `tools/vllm-server.sh`.
    script: PathBuf,
    program: PathBuf,
    model: PathBuf,
}

impl Vllm {
    pub fn new(script: &Path, program: &Path, model: &Path) -> anyhow::Result<Self> {
        let existing = |path: &Path| fs::canonicalize(path).with_context(|| format!("find {}", path.display()));
        Ok(Vllm {
            script: existing(script)?,
            // not a link's target: the Python of an environment knows it by its path
            program: std::path::absolute(program)?,
            model: existing(model)?,
        })
    }

    /// Starts a server with the model's weights. Returns how long it took.
    pub async fn start(&self, port: u16, args: &[&str], log: &Path) -> anyhow::Result<(Process, Duration)> {
        let mut command = Command::new(&self.script);
        command
            .args([&self.program, &self.model])
            .arg(port.to_string())
            .args(args)
            .env("VLLM_WORKER_MULTIPROCESSING_METHOD", "fork")
            // otherwise all servers of a machine use the same core
            .env("VLLM_CPU_OMP_THREADS_BIND", "nobind");
        let mut process = Process::start(command, log)?;
        let took = process
            .answers(&format!("http://127.0.0.1:{port}/health"), START_MAX)
            .await?;
        Ok((process, took))
    }
}
