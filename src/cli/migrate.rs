//! `springtide migrate`: the database schema.

use std::path::PathBuf;

use super::{App, secrets};
use crate::database;

#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Also register the API keys and samplers in this folder, which `springtide secrets` wrote.
    #[arg(long, value_name = "DIR")]
    secrets: Option<PathBuf>,
}

impl Args {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let pool = database::connect(&app.config).await?;
        database::migrate(&pool).await?;
        match self.secrets {
            Some(dir) => secrets::register(&dir, &app.config, &pool).await,
            None => Ok(()),
        }
    }
}
