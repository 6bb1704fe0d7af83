//! What a replica tells the control role: that it is there, what it holds, how its swaps went. Best effort: serving does
//! not depend on anybody listening.

use crate::fleet::{Report, ResidentReport, Swap};
use crate::routing::Routing;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Swaps that wait for a control role that is away; the oldest are forgotten first.
const SWAPS_KEPT_MAX: usize = 256;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// What does not change while a replica runs.
#[derive(Debug, Clone)]
pub struct Told {
    pub replica: String,
    pub cluster: String,
    pub policy: String,
    pub address: String,
}

pub struct Reporter {
    told: Told,
    control_url: String,
    api_key: Option<String>,
    interval: Duration,
    routing: Arc<Routing>,
    swaps: mpsc::Receiver<Swap>,
    client: reqwest::Client,
}

impl Reporter {
    pub fn new(
        told: Told,
        control_url: &str,
        api_key: Option<String>,
        interval: Duration,
        routing: Arc<Routing>,
        swaps: mpsc::Receiver<Swap>,
    ) -> reqwest::Result<Self> {
        Ok(Reporter {
            told,
            control_url: control_url.trim_end_matches('/').into(),
            api_key,
            interval,
            routing,
            swaps,
            client: reqwest::Client::builder().timeout(ANSWER_TIMEOUT).build()?,
        })
    }

    /// Reports until `shutdown`, and once more then: not ready any longer.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut waiting: VecDeque<Swap> = VecDeque::new();
        let mut ticks = tokio::time::interval(self.interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut heard = true;
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
            let told = self.tell(&mut waiting).await;
            match &told {
                Err(error) if heard => tracing::warn!(error = %error, "control does not hear this replica"),
                Ok(()) if !heard => tracing::info!("control hears this replica again"),
                _ => {}
            }
            heard = told.is_ok();
        }
        let mut last = self.report();
        last.ready = false;
        let _ = self.post(&self.replica_url(), &last).await;
    }

    async fn tell(&self, waiting: &mut VecDeque<Swap>) -> reqwest::Result<()> {
        self.post(&self.replica_url(), &self.report()).await?;
        while let Some(swap) = waiting.front() {
            self.post(&format!("{}/v1/swaps", self.control_url), swap).await?;
            waiting.pop_front();
        }
        Ok(())
    }

    fn replica_url(&self) -> String {
        format!("{}/v1/replicas/{}", self.control_url, self.told.replica)
    }

    fn report(&self) -> Report {
        Report {
            cluster: self.told.cluster.clone(),
            policy: self.told.policy.clone(),
            address: self.told.address.clone(),
            epoch: self.routing.epoch(),
            resident: self
                .routing
                .residents()
                .into_iter()
                .map(|resident| ResidentReport {
                    version: resident.version.serial,
                    root: resident.version.root.to_string(),
                    aliases: resident.aliases,
                })
                .collect(),
            ready: self.routing.ready(),
        }
    }

    async fn post<T: serde::Serialize>(&self, url: &str, body: &T) -> reqwest::Result<()> {
        let mut request = self.client.post(url).json(body);
        if let Some(key) = &self.api_key {
            request = request.bearer_auth(key);
        }
        request.send().await?.error_for_status()?;
        Ok(())
    }
}
