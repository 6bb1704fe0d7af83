//! `springtide config`: the configuration in force.

use anyhow::Context;

use super::App;
use super::output::Output;

#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Check that the configuration is valid.
    Check,
    /// Print the configuration in force, without secrets.
    Show(Output),
}

impl Command {
    pub fn run(self, app: &App) -> anyhow::Result<()> {
        match self {
            // Loading it was the check.
            Self::Check => println!("the configuration is valid"),
            Self::Show(output) => {
                let text = toml::to_string(&app.config).context("write the configuration")?;
                output.print(&app.config, || text)?;
            }
        }
        Ok(())
    }
}
