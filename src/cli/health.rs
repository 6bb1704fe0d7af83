//! `springtide health`: the probe of a container that has no shell.

use std::time::Duration;

use anyhow::{Context, ensure};

use super::App;
use crate::config::Part;

const TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// serve, ingest, control, train, relay, follow or world.
    role: String,
}

impl Args {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let part = Part::ALL.into_iter().find(|part| part.name() == self.role);
        let part = part.with_context(|| format!("there is no role {:?}", self.role))?;
        let http = edge::tls::client()
            .timeout(TIMEOUT)
            // The role's own process here. Its certificate may name only where others reach it.
            .tls_danger_accept_invalid_hostnames(true)
            .build()
            .context("set up HTTP client")?;
        let url = format!("{}/health", app.config.local_url(part));
        let answer = http.get(&url).send().await.with_context(|| format!("ask {url}"))?;
        let status = answer.status();
        ensure!(
            status.is_success(),
            "{url} answers {status}: {}",
            answer.text().await.unwrap_or_default()
        );
        Ok(())
    }
}
