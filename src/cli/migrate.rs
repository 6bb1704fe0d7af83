//! `springtide migrate`: the database schema.

use super::App;
use crate::database;

#[derive(Debug, Clone, clap::Args)]
pub struct Args {}

impl Args {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        database::migrate(&database::connect(&app.config).await?).await
    }
}
