//! Engines that serve many versions at once: adapters of one base, whose weights stay. Each adapter has a name of its
//! own and is never replaced, so requests that run keep theirs. It gets requests after its probe, which also shows that
//! the engine has the right base. The base itself is an adapter that adds nothing: vLLM's CPU build (0.32) computes a
//! request without adapter with that of another one in its batch.

use super::{Updater, VersionWeights, change, weights_name};
use crate::engine::LoadedVersion;
use crate::remote::options::Options;
use crate::remote::placement::State;
use crate::remote::pool::Pool;
use anyhow::Context;
use artifact::checkpoint::Checkpoint;
use model::lora;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio_util::task::AbortOnDropHandle;

/// After a version that an engine did not serve.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// What an engine has loaded.
pub(super) struct Adapter {
    name: String,
    /// The routes, and the requests that were routed to it, hold it too.
    version: Weak<LoadedVersion>,
    folder: PathBuf,
}

/// A version that an engine is about to serve.
pub(super) struct Adding {
    engine: usize,
    pub serial: i64,
    /// What it adapts, or itself.
    base: i64,
    pub task: AbortOnDropHandle<anyhow::Result<Duration>>,
}

impl Updater {
    /// Has engines that take adapters begin to serve these versions, and forget those that nobody needs any more.
    pub async fn adapt(&mut self, wanted: &[(Arc<LoadedVersion>, VersionWeights)]) {
        for engine in self.adaptable() {
            for (version, _) in wanted {
                // it may have been loaded again since
                if let Some(adapter) = self.adapters[engine].get_mut(&version.serial) {
                    adapter.version = Arc::downgrade(version);
                }
            }
            self.forget(engine).await;
            for (version, weights) in wanted {
                self.adds(engine, version, weights);
            }
        }
    }

    /// Has all engines that take adapters begin to serve the version. Returns one of them; `None`: there is none that
    /// may.
    pub(super) fn adapt_anywhere(
        &mut self,
        version: &Arc<LoadedVersion>,
        weights: &VersionWeights,
    ) -> anyhow::Result<Option<usize>> {
        let engines = self.adaptable();
        if !engines.is_empty() {
            self.check_provable(version)?;
        }
        let adds = engines
            .into_iter()
            .filter(|&engine| self.adds(engine, version, weights));
        Ok(adds.collect::<Vec<_>>().first().copied())
    }

    fn adaptable(&self) -> Vec<usize> {
        let engines = 0..self.held.len();
        engines
            .filter(|&engine| self.pool.client(engine).takes_adapters())
            .collect()
    }

    /// Whether the engine is about to serve the version.
    fn adds(&mut self, engine: usize, version: &Arc<LoadedVersion>, weights: &VersionWeights) -> bool {
        let serial = version.serial;
        if self
            .adding
            .iter()
            .any(|adding| (adding.engine, adding.serial) == (engine, serial))
        {
            return true;
        }
        let beside = self.pool.beside(engine);
        let base = version.adapts.unwrap_or(serial);
        if beside.is_empty() {
            self.bases[engine] = None;
        }
        // it would fail its probe
        let fits = self.bases[engine].is_none_or(|known| known == base);
        let answers = fits && matches!(self.pool.state(engine), State::Unproven | State::Serving(_));
        let refused = self.refused[engine].get(&serial);
        let waits = refused.is_some_and(|at| Instant::now() < *at + RETRY_INTERVAL);
        if !answers || waits || beside.contains(&serial) {
            return false;
        }
        let name = weights_name(version);
        let dir = self.options.adapters_dir.join(format!("{name}-{engine}"));
        let folder = std::path::absolute(&dir).unwrap_or(dir);
        let adapter = Adapter {
            version: Arc::downgrade(version),
            folder: folder.clone(),
            name,
        };
        self.adapters[engine].insert(serial, adapter);
        let added = add(
            self.pool.clone(),
            self.options.clone(),
            engine,
            version.clone(),
            (folder, weights.checkpoint.clone()),
        );
        self.adding.push(Adding {
            engine,
            serial,
            base,
            task: AbortOnDropHandle::new(tokio::spawn(added)),
        });
        true
    }

    /// After the end of the task at this place.
    pub(super) fn added(
        &mut self,
        place: usize,
        ended: Result<anyhow::Result<Duration>, tokio::task::JoinError>,
    ) -> anyhow::Result<Duration> {
        let Adding {
            engine, serial, base, ..
        } = self.adding.swap_remove(place);
        let result = ended.context("the task of an adapter").and_then(|result| result);
        match &result {
            Ok(_) => {
                self.bases[engine] = Some(base);
                self.refused[engine].remove(&serial);
            }
            Err(_) => {
                self.refused[engine].insert(serial, Instant::now());
            }
        }
        let url = self.pool.client(engine).url();
        result.with_context(|| format!("have the engine {url} serve version {serial} beside others"))
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
            self.pool.leaves_beside(engine, serial);
            let client = self.pool.client(engine);
            if let Err(error) = client.unload_adapter(&adapter.name).await {
                let (engine, error) = (client.url(), format!("{error:#}"));
                tracing::debug!(engine, version = serial, error, "an adapter was not unloaded");
            }
            let _ = fs::remove_dir_all(&adapter.folder);
        }
    }
}

/// Loads and probes a version, whose adapter is put into the folder.
async fn add(
    pool: Pool,
    options: Arc<Options>,
    engine: usize,
    version: Arc<LoadedVersion>,
    (folder, checkpoint): (PathBuf, Arc<Checkpoint>),
) -> anyhow::Result<Duration> {
    let started = Instant::now();
    let client = pool.client(engine);
    let base = client.weights_name().await?.context("it does not name its weights")?;
    let into = folder.clone();
    let written = tokio::task::spawn_blocking(move || {
        let adapter = match lora::Adapter::of_version(&checkpoint)? {
            Some(adapter) => adapter,
            None => nothing(&checkpoint)?,
        };
        anyhow::Ok(adapter.write_dir(&into)?)
    });
    written.await.context("the writing thread")??;
    client.load_adapter(&weights_name(&version), &folder).await?;
    let probed = change::probe(&pool, &options, engine, &version, &base).await?;
    pool.serves_beside(engine, version.serial, &base);
    let (engine, seconds) = (client.url(), started.elapsed().as_secs_f64());
    tracing::info!(
        engine,
        version = version.serial,
        seconds,
        largest_difference = probed.largest_difference,
        "engine serves version beside others"
    );
    metrics::histogram!("springtide_remote_adapter_seconds").record(seconds);
    Ok(Duration::ZERO)
}

/// An adapter that adds nothing.
fn nothing(base: &Checkpoint) -> Result<lora::Adapter, lora::Error> {
    let config = lora::Config {
        r: 1,
        ..lora::Config::default()
    };
    // B is zero
    lora::Adapter::fresh(config, base, 0)
}
