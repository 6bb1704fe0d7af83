//! `springtide up`: everything on one machine.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, ensure};

use super::{App, train};
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
    /// folder, in lower case.
    #[arg(long, value_name = "DIR")]
    policy: Option<PathBuf>,
    /// Arguments for `springtide demo`.
    #[arg(last = true, requires = "demo")]
    demo_args: Vec<OsString>,
}

impl Args {
    pub async fn run(self, app: &App) -> anyhow::Result<ExitCode> {
        train::program()?;
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
        let name = name_after(&folder)?;
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
        // in quotes: a name may look like a number
        command.env("SPRINGTIDE__POLICY__NAME", format!("{name:?}"));
        command.env("SPRINGTIDE__POLICY__BASE", &folder);
        Err(command.exec()).context("restart with the policy")
    }
}

/// Names of published models have capitals, those of policies do not.
fn name_after(folder: &Path) -> anyhow::Result<String> {
    let model = folder.file_name().unwrap_or_default().to_string_lossy();
    let name = store::policy_named_after(&model);
    ensure!(
        !name.is_empty(),
        "--policy {}: no policy can be named after it: rename the folder, or set policy.name and policy.base",
        folder.display()
    );
    if name != model {
        eprintln!("the policy of {model} is named {name}");
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_with_capitals_gives_a_name_in_lower_case() {
        let name = |folder: &str| name_after(Path::new(folder));
        assert_eq!(name("/models/Qwen2.5-0.5B-Instruct").unwrap(), "qwen2.5-0.5b-instruct");
        assert_eq!(name("/models/42").unwrap(), "42");
        assert!(name("/").unwrap_err().to_string().contains("policy.name"));
    }
}
