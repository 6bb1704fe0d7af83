//! Engines that serve many versions at once: adapters of one base, whose weights stay. Each adapter has a name of its
//! own and is never replaced, so requests that run keep theirs. It gets requests after its probe, which also shows that
//! the engine has the right base.

use super::{Updater, VersionWeights, change, weights_name};
use crate::engine::LoadedVersion;
use crate::remote::placement::State;
use anyhow::Context;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// After a version that an engine did not serve.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// What an engine has loaded.
pub(super) struct Adapter {
    name: String,
    /// The routes, and the requests that were routed to it, hold it too.
    version: Weak<LoadedVersion>,
    folder: PathBuf,
}

impl Updater {
    /// Has engines that take adapters serve these versions, and forget those that nobody needs any more.
    pub async fn adapt(&mut self, wanted: &[(Arc<LoadedVersion>, VersionWeights)]) {
        for engine in self.adaptable() {
            self.forget(engine).await;
            for (version, weights) in wanted {
                self.adds(engine, version, weights).await;
            }
        }
    }

    /// Whether an engine that takes adapters serves the version, since now.
    pub(super) async fn adapt_anywhere(
        &mut self,
        version: &Arc<LoadedVersion>,
        weights: &VersionWeights,
    ) -> anyhow::Result<bool> {
        let mut serves = false;
        for engine in self.adaptable() {
            self.check_provable(version)?;
            serves |= self.adds(engine, version, weights).await;
        }
        Ok(serves)
    }

    fn adaptable(&self) -> Vec<usize> {
        let engines = 0..self.held.len();
        engines
            .filter(|&engine| self.pool.client(engine).takes_adapters())
            .collect()
    }

    /// Whether the engine serves the version afterwards.
    async fn adds(&mut self, engine: usize, version: &Arc<LoadedVersion>, weights: &VersionWeights) -> bool {
        let serial = version.serial;
        let answers = matches!(self.pool.state(engine), State::Unproven | State::Serving(_));
        let mut beside = self.pool.beside(engine);
        if !answers || beside.contains(&serial) {
            return answers;
        }
        let refused = self.refused[engine].get(&serial);
        if refused.is_some_and(|at| Instant::now() < *at + RETRY_INTERVAL) {
            return false;
        }
        let started = Instant::now();
        let url = self.pool.client(engine).url().to_owned();
        match self.load(engine, version, weights).await {
            Ok(base) => {
                let seconds = started.elapsed().as_secs_f64();
                tracing::info!(
                    engine = url,
                    version = serial,
                    seconds,
                    "engine serves version beside others"
                );
                metrics::histogram!("springtide_remote_adapter_seconds").record(seconds);
                // it may have failed meanwhile
                if self.pool.beside(engine) != beside {
                    return false;
                }
                beside.push(serial);
                self.pool.set_beside(engine, beside, &base);
                self.refused[engine].remove(&serial);
                true
            }
            Err(error) => {
                let error = format!("{error:#}");
                tracing::warn!(engine = url, version = serial, error, "engine does not serve version");
                self.refused[engine].insert(serial, Instant::now());
                false
            }
        }
    }

    /// Loads and probes a version. Returns what the engine calls its base weights.
    async fn load(
        &mut self,
        engine: usize,
        version: &Arc<LoadedVersion>,
        weights: &VersionWeights,
    ) -> anyhow::Result<String> {
        let client = self.pool.client(engine);
        let base = client.weights_name().await?.context("it does not name its weights")?;
        if version.adapts.is_some() {
            let name = weights_name(version);
            let folder = std::path::absolute(self.options.adapters_dir.join(format!("{name}-{engine}")))?;
            let (checkpoint, into) = (weights.checkpoint.clone(), folder.clone());
            let written = tokio::task::spawn_blocking(move || {
                let adapter = model::lora::Adapter::of_version(&checkpoint)?;
                anyhow::Ok(adapter.context("the version has no adapter")?.write_dir(&into)?)
            });
            written.await.context("the writing thread")??;
            let loaded = Adapter {
                name: name.clone(),
                version: Arc::downgrade(version),
                folder: folder.clone(),
            };
            self.adapters[engine].insert(version.serial, loaded);
            self.pool.client(engine).load_adapter(&name, &folder).await?;
        }
        change::probe(&self.pool, &self.options, engine, version, &base).await?;
        Ok(base)
    }

    /// Unloads the adapters that no request needs any more.
    async fn forget(&mut self, engine: usize) {
        let is_unused = |adapter: &Adapter| adapter.version.strong_count() == 0;
        let unused: Vec<i64> = self.adapters[engine]
            .iter()
            .filter_map(|(&serial, adapter)| is_unused(adapter).then_some(serial))
            .collect();
        for serial in unused {
            let Some(adapter) = self.adapters[engine].remove(&serial) else {
                continue;
            };
            let mut beside = self.pool.beside(engine);
            if beside.contains(&serial) {
                beside.retain(|&one| one != serial);
                self.pool.set_beside(engine, beside, "");
            }
            let client = self.pool.client(engine);
            if let Err(error) = client.unload_adapter(&adapter.name).await {
                let (engine, error) = (client.url(), format!("{error:#}"));
                tracing::debug!(engine, version = serial, error, "an adapter was not unloaded");
            }
            let _ = fs::remove_dir_all(&adapter.folder);
        }
    }
}
