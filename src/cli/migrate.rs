//! `springtide migrate`: the database schema.

use super::App;
use crate::database;

/// Bring the database schema up to date.
///
/// `springtide up` does this by itself. Run it after an upgrade, before the roles start, where an
/// external Postgres is used.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {}

impl Args {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        database::migrate(&database::connect(&app.config).await?).await
    }
}
