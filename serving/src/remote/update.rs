//! Changes the version that an engine holds: drain, new weights, probe. Also gives restarted and
//! spare engines a version, and finds out which version an engine holds that takes no weights from us
//! (`recognize`).

mod files;
mod recognize;

use super::client::Weights;
use super::options::{InFlight, Options};
use super::placement::State;
use super::pool::Pool;
use super::probe::{self, Probed};
use super::weights::{self, Source};
use crate::engine::LoadedVersion;
use anyhow::{Context, bail};
use artifact::checkpoint::Checkpoint;
use artifact::digest::Digest;
use artifact::patch;
use files::Files;
use model::exact::{Arithmetic, ExactModel};
use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How often a draining engine is looked at.
const DRAIN_CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// How long other engines are tried before one whose update failed.
const RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// What an engine holds, as far as is known.
struct Held {
    root: Digest,
    checkpoint: Arc<Checkpoint>,
    /// The requests that were routed to it hold it too.
    version: Weak<LoadedVersion>,
}

/// The only one that changes engines of a pool.
pub struct Updater {
    pool: Pool,
    options: Options,
    arithmetic: Arithmetic,
    /// Per engine; `None`: unknown weights.
    held: Vec<Option<Held>>,
    /// The exact model that was needed last, by serial.
    exact: Option<(i64, Option<Arc<ExactModel>>)>,
    /// Where the weights of a version are that came without them.
    source: Option<Source>,
    /// For the engines that take weights. `None`: there are none.
    files: Option<Files>,
    /// When each engine that takes no weights is probed next.
    probe_at: Vec<Instant>,
}

impl Updater {
    /// Fails if somebody else can write to `patch_dir`.
    pub fn new(pool: Pool, options: Options, arithmetic: Arithmetic) -> anyhow::Result<Self> {
        let takes_weights = (0..pool.engines()).any(|engine| pool.client(engine).takes_weights());
        let files = takes_weights.then(|| Files::open(&options.patch_dir)).transpose()?;
        Ok(Updater {
            files,
            held: (0..pool.engines()).map(|_| None).collect(),
            probe_at: vec![Instant::now(); pool.engines()],
            pool,
            options,
            arithmetic,
            exact: None,
            source: None,
        })
    }

    /// Whether engines get their weights from here. Otherwise versions come without tensors.
    pub fn gives_weights(&self) -> bool {
        self.files.is_some()
    }

    /// Where the weights of versions are read that came without them.
    pub fn read_from(&mut self, source: Source) {
        self.source = Some(source);
    }

    /// The shortest context of the engines that answer, in tokens; `usize::MAX` if none of them says.
    pub async fn context(&self) -> anyhow::Result<usize> {
        let contexts = (0..self.held.len()).map(|engine| self.pool.client(engine).context());
        let contexts = futures::future::join_all(contexts).await;
        let errors: Vec<String> = contexts
            .iter()
            .filter_map(|one| one.as_ref().err().map(|error| format!("{error:#}")))
            .collect();
        let answers = contexts.into_iter().filter_map(Result::ok);
        let shortest = answers.map(|context| context.unwrap_or(usize::MAX)).min();
        shortest.with_context(|| format!("no engine answers: {}", errors.join("; ")))
    }

    /// Whether an engine serves the version.
    pub fn serves(&self, serial: i64) -> bool {
        self.pool.placement(|engines| engines.servers(serial)) > 0
    }

    /// Has an engine serve the version, if none does. `kept`: serials of other versions that must go on
    /// being served. Returns how long the engine took no requests.
    pub async fn place(
        &mut self,
        version: &Arc<LoadedVersion>,
        checkpoint: &Arc<Checkpoint>,
        kept: &BTreeSet<i64>,
    ) -> anyhow::Result<Duration> {
        self.pool.know(weights_name(version), version);
        if self.serves(version.serial) || self.recognize_anywhere(version, checkpoint, kept).await? {
            return Ok(Duration::ZERO);
        }
        let place = self.pool.placement(|engines| engines.place(kept, Instant::now()));
        let engine = place.with_context(|| {
            format!(
                "none of the {} engines is free for version {}, and none that takes no weights holds it: start more \
                 engines, or name fewer versions",
                self.held.len(),
                version.serial
            )
        })?;
        self.change(engine, version, checkpoint).await
    }

    /// The engine that should get another version now, and its serial. `wanted`: serials and the shares
    /// of users they have.
    pub fn next_change(&self, wanted: &[(i64, f64)]) -> Option<(usize, i64)> {
        let arms: BTreeSet<i64> = wanted
            .iter()
            .filter(|(_, share)| *share > 0.0)
            .map(|(serial, _)| *serial)
            .collect();
        let now = Instant::now();
        self.pool.placement(|engines| {
            let missing = arms.iter().find(|&&serial| engines.servers(serial) == 0);
            let urgent = missing.and_then(|&serial| Some((engines.place(&arms, now)?, serial)));
            urgent.or_else(|| engines.spare(wanted, now))
        })
    }

    /// Gives an engine this version. After an error it has no traffic.
    pub async fn change(
        &mut self,
        engine: usize,
        version: &Arc<LoadedVersion>,
        checkpoint: &Arc<Checkpoint>,
    ) -> anyhow::Result<Duration> {
        let url = self.pool.client(engine).url().to_owned();
        let model = self.exact_model(version.serial, checkpoint).await?;
        let started = Instant::now();
        if self.options.in_flight == InFlight::Drain {
            self.drain(engine).await;
        }
        let drained = started.elapsed();
        let name = weights_name(version);
        self.pool.know(name.clone(), version);
        self.pool.update_begins(engine, &name);
        let held = match self.held[engine].take() {
            Some(held) => Some(held),
            None => self.named(engine, version, checkpoint).await,
        };
        let changed = self
            .update_and_probe(engine, held, version, checkpoint, model.as_ref())
            .await;
        let (probed, patched) = match changed {
            Ok(changed) => changed,
            Err(error) => {
                metrics::counter!("springtide_remote_changes_failed_total").increment(1);
                self.pool.update_failed(engine);
                self.pool.try_again_at(engine, Instant::now() + RETRY_INTERVAL);
                self.pool.set_state(engine, State::Unproven, None);
                return Err(error.context(format!("give the engine {url} version {}", version.serial)));
            }
        };
        self.held[engine] = Some(Held {
            root: version.root,
            checkpoint: checkpoint.clone(),
            version: Arc::downgrade(version),
        });
        self.pool.try_again_at(engine, Instant::now());
        self.pool.set_state(engine, State::Serving(version.serial), None);
        let away = started.elapsed();
        tracing::info!(
            engine = url,
            version = version.serial,
            root = %version.root.short(),
            patched_weights = patched,
            drain_ms = drained.as_secs_f64() * 1e3,
            change_ms = (away - drained).as_secs_f64() * 1e3,
            probed_tokens = probed.tokens,
            largest_difference = probed.largest_difference,
            "engine serves version"
        );
        metrics::histogram!("springtide_remote_change_seconds").record(away.as_secs_f64());
        metrics::counter!("springtide_remote_probed_tokens_total").increment(probed.tokens as u64);
        metrics::gauge!("springtide_remote_probe_difference", "engine" => url)
            .set(f64::from(probed.largest_difference));
        Ok(away)
    }

    /// An engine that was updated by an earlier process may say that it holds the version. Then an empty
    /// patch is enough: the engine refuses it if an update was broken off, and the probe follows.
    async fn named(&self, engine: usize, version: &Arc<LoadedVersion>, checkpoint: &Arc<Checkpoint>) -> Option<Held> {
        let name = self.pool.client(engine).weights().await.ok()??;
        (name == weights_name(version)).then(|| Held {
            root: version.root,
            checkpoint: checkpoint.clone(),
            version: Weak::new(),
        })
    }

    /// Waits until no request needs the engine any more, or too long.
    async fn drain(&self, engine: usize) {
        let State::Serving(serial) = self.pool.state(engine) else {
            return;
        };
        self.pool.set_state(engine, State::Draining(serial), None);
        let started = Instant::now();
        let limit = Duration::from_millis(self.options.drain_ms_max);
        // besides requests, only the routes hold a version
        let held = |held: &Held| held.version.strong_count() > 1;
        loop {
            let needed = self.held[engine].as_ref().is_some_and(held) && !self.serves(serial);
            if self.pool.running(engine) == 0 && !needed {
                return;
            }
            if started.elapsed() > limit {
                let running = self.pool.running(engine);
                tracing::warn!(
                    engine = self.pool.client(engine).url(),
                    running,
                    "drained too long; cut off"
                );
                return;
            }
            tokio::time::sleep(DRAIN_CHECK_INTERVAL).await;
        }
    }

    /// Returns the number of weights that were patched; `None`: all were loaded.
    async fn update_and_probe(
        &self,
        engine: usize,
        held: Option<Held>,
        version: &Arc<LoadedVersion>,
        checkpoint: &Arc<Checkpoint>,
        model: Option<&Arc<ExactModel>>,
    ) -> anyhow::Result<(Probed, Option<u64>)> {
        let client = self.pool.client(engine);
        let name = weights_name(version);
        let files = self.files.as_ref().context("no engine takes weights")?;
        let files = Arc::new(files.weights_of(engine)?);
        if let Some(held) = held {
            let patched = async {
                let (old, new) = (held.checkpoint.clone(), checkpoint.clone());
                let files_of = files.clone();
                let weights = tokio::task::spawn_blocking(move || {
                    let patch = patch::between(&old, &new)?;
                    files_of.write_patch(&patch.file)?;
                    anyhow::Ok(patch.weights)
                });
                let weights = weights.await.context("the patch's thread")??;
                let (from, to) = (held.root.to_string(), version.root.to_string());
                let in_flight = self.options.in_flight;
                client
                    .update(Weights::Patch(&files.patch), &from, &to, &name, in_flight)
                    .await?;
                anyhow::Ok((self.probe(engine, version, model).await?, Some(weights)))
            };
            match patched.await {
                Ok(done) => return Ok(done),
                Err(error) => {
                    let error = format!("{error:#}");
                    tracing::warn!(engine = client.url(), error, "patch failed; loading all weights");
                    metrics::counter!("springtide_remote_patches_failed_total").increment(1);
                    self.pool.update_failed(engine);
                }
            }
        }
        let (whole, files_of) = (checkpoint.clone(), files.clone());
        let written = tokio::task::spawn_blocking(move || files_of.write_folder(&whole));
        written.await.context("the writing thread")??;
        let to = version.root.to_string();
        // whatever still runs may have been sampled with wrong weights
        client
            .update(Weights::Folder(&files.folder), "", &to, &name, InFlight::Drain)
            .await?;
        Ok((self.probe(engine, version, model).await?, None))
    }

    async fn probe(
        &self,
        engine: usize,
        version: &Arc<LoadedVersion>,
        model: Option<&Arc<ExactModel>>,
    ) -> anyhow::Result<Probed> {
        let client = self.pool.client(engine);
        if model.is_none() && !client.names_weights() {
            bail!("the engine names no weights, so without a probe nobody knows which version it holds");
        }
        let probed = probe::probe(client, &weights_name(version), version, model).await?;
        let Probed { largest_difference, .. } = probed;
        if largest_difference > self.options.probe_error_max {
            metrics::counter!("springtide_remote_probes_failed_total").increment(1);
            bail!(
                "the engine's log-probabilities differ by up to {largest_difference} nats from those of version {}, and \
                 probe_error_max is {}: it has other weights or computes differently",
                version.serial,
                self.options.probe_error_max
            );
        }
        Ok(probed)
    }

    /// `None`: the version goes unproved.
    async fn exact_model(
        &mut self,
        serial: i64,
        checkpoint: &Arc<Checkpoint>,
    ) -> anyhow::Result<Option<Arc<ExactModel>>> {
        if let Some((_, model)) = self.exact.as_ref().filter(|(of, _)| *of == serial) {
            return Ok(model.clone());
        }
        // free the other one first
        self.exact = None;
        let (source, options) = (self.source.as_ref(), &self.options);
        let model = weights::exact_model(source, options, &self.arithmetic, serial, checkpoint).await?;
        self.exact = Some((serial, model.clone()));
        Ok(model)
    }
}

/// What an engine calls the weights of a version.
fn weights_name(version: &LoadedVersion) -> String {
    format!("springtide-{}-{}", version.serial, version.root.short())
}
