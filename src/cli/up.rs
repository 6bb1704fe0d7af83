//! `springtide up`: everything on one machine.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, ensure};

use super::App;
use crate::up;

#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Run the demo when all roles are ready; keep serving afterwards.
    #[arg(long)]
    demo: bool,
    /// Stop after the demo, with its exit code.
    #[arg(long, requires = "demo")]
    once: bool,
    /// Start from this Hugging Face folder instead of policy.base; the policy is named after the
    /// folder.
    #[arg(long, value_name = "DIR")]
    policy: Option<PathBuf>,
    /// Arguments for `springtide demo`.
    #[arg(last = true, requires = "demo")]
    demo_args: Vec<OsString>,
}

impl Args {
    pub async fn run(self, app: &App) -> anyhow::Result<ExitCode> {
        ensure!(
            cfg!(feature = "torch"),
            "this program was built without libtorch and can neither serve nor train: \
             run `springtide ingest` or `springtide control`"
        );
        ensure!(
            !self.demo || cfg!(feature = "demo"),
            "this program was built without the demo: build it with `cargo build --features demo`"
        );
        if let Some(folder) = &self.policy {
            match self.restart_with_policy(folder, app.config_file.as_deref())? {}
        }
        let demo = self.demo.then_some(up::Demo {
            args: &self.demo_args,
            once: self.once,
        });
        up::run(&app.config, app.config_file.clone(), demo).await
    }

    /// Executes the same command with the policy in its environment, where all roles and the demo
    /// read it.
    fn restart_with_policy(&self, folder: &Path, config_file: Option<&Path>) -> anyhow::Result<Infallible> {
        let folder = folder
            .canonicalize()
            .with_context(|| format!("--policy {}: find the folder", folder.display()))?;
        ensure!(
            folder.join("config.json").is_file(),
            "--policy {}: the folder has no config.json; give a Hugging Face folder",
            folder.display()
        );
        let mut command = Command::new(std::env::current_exe().context("find this program")?);
        command.arg("up");
        if let Some(file) = config_file {
            command.arg("--config").arg(file);
        }
        command.args(self.demo.then_some("--demo"));
        command.args(self.once.then_some("--once"));
        if !self.demo_args.is_empty() {
            command.arg("--").args(&self.demo_args);
        }
        command.env("SPRINGTIDE__POLICY__NAME", folder.file_name().unwrap_or_default());
        command.env("SPRINGTIDE__POLICY__BASE", &folder);
        Err(command.exec()).context("restart with the policy")
    }
}
