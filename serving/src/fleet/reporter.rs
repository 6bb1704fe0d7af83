//! The replica's side of the fleet: reports to the control role that it runs, which versions it
//! holds and how its swaps went. Serving does not depend on it.

use super::{Report, ReportedVersion, Swap};
use crate::routing::RouteTable;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Swaps kept while the control role does not answer; the oldest are dropped first.
const SWAPS_KEPT_MAX: usize = 256;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Sends the reports of one replica.
pub struct Reporter {
    pub replica: String,
    /// The fields that do not change are taken from here.
    pub template: Report,
    pub control_url: String,
    pub api_key: Option<String>,
    pub interval: Duration,
    pub routes: Arc<RouteTable>,
    /// Whether requests can be answered.
    pub ready: Arc<dyn Fn() -> bool + Send + Sync>,
    pub swaps: mpsc::Receiver<Swap>,
    pub client: reqwest::Client,
}

impl Reporter {
    /// A client for the control role.
    pub fn client() -> reqwest::Result<reqwest::Client> {
        edge::tls::client().timeout(ANSWER_TIMEOUT).build()
    }

    /// Reports until `shutdown`, and then once more as not ready.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut waiting: VecDeque<Swap> = VecDeque::new();
        let mut ticks = tokio::time::interval(self.interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut connected = true;
        loop {
            tokio::select! {
                () = shutdown.cancelled() => break,
                _ = ticks.tick() => {}
                Some(swap) = self.swaps.recv() => {
                    if waiting.len() >= SWAPS_KEPT_MAX {
                        waiting.pop_front();
                    }
                    waiting.push_back(swap);
                }
            }
            let sent = self.send(&mut waiting).await;
            match &sent {
                Err(error) if connected => tracing::warn!(%error, "reports do not reach the control role"),
                Ok(()) if !connected => tracing::info!("reports reach the control role again"),
                _ => {}
            }
            connected = sent.is_ok();
        }
        let last = Report {
            ready: false,
            ..self.report()
        };
        let _ = self.post(&self.replica_path(), &last).await;
    }

    async fn send(&self, waiting: &mut VecDeque<Swap>) -> reqwest::Result<()> {
        self.post(&self.replica_path(), &self.report()).await?;
        while let Some(swap) = waiting.front() {
            self.post("/v1/swaps", swap).await?;
            waiting.pop_front();
        }
        Ok(())
    }

    fn replica_path(&self) -> String {
        format!("/v1/replicas/{}", self.replica)
    }

    fn report(&self) -> Report {
        Report {
            epoch: self.routes.epoch(),
            resident: self
                .routes
                .served()
                .into_iter()
                .map(|(version, aliases)| ReportedVersion {
                    version: version.serial,
                    root: version.root.to_string(),
                    aliases,
                })
                .collect(),
            ready: (self.ready)(),
            ..self.template.clone()
        }
    }

    async fn post<T: serde::Serialize>(&self, path: &str, body: &T) -> reqwest::Result<()> {
        let url = format!("{}{path}", self.control_url.trim_end_matches('/'));
        let mut request = self.client.post(url).json(body);
        if let Some(key) = &self.api_key {
            request = request.bearer_auth(key);
        }
        request.send().await?.error_for_status()?;
        Ok(())
    }
}
