//! One change of an engine's version: what changes, drain, update, probe.

use super::workers::{Asked, Workers};
use super::{Held, OfBytes};
use crate::engine::LoadedVersion;
use crate::remote::options::{InFlight, Options};
use crate::remote::placement::State;
use crate::remote::pool::Pool;
use crate::remote::probe::{self, Probed};
use crate::remote::protocol::Weights;
use anyhow::{Context, bail, ensure};
use artifact::checkpoint::Checkpoint;
use artifact::patch::{self, Contents};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio_util::task::AbortOnDropHandle;

/// How often a draining engine is looked at.
const DRAIN_CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// How many times the longest wait for a token a probe may take.
const PROBE_TIMEOUTS: u32 = 2;
/// The slowest that workers may read, write or hash weights.
const BYTES_PER_SECOND_MIN: u64 = 100 << 20;
/// How many times as long as that a proof by bytes may take, which leaves the engine to its requests.
const PROOF_TIMES: u32 = 10;
/// Between the beginnings of two proofs of an engine: each reads all its weights.
const PROOF_INTERVAL: Duration = Duration::from_secs(if cfg!(test) { 0 } else { 60 });
/// How long other engines are tried before one whose update failed.
const RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// An engine that gets a version.
pub(super) struct Change {
    pub pool: Pool,
    pub options: Arc<Options>,
    pub workers: Arc<Workers>,
    pub engine: usize,
    /// Of the new weights.
    pub name: String,
    pub version: Arc<LoadedVersion>,
    pub checkpoint: Arc<Checkpoint>,
    /// What it holds is not what it says: all weights are loaded.
    pub is_refuted: bool,
}

/// A patch that the engine's workers ask for.
struct ForWorkers {
    asked: Asked,
    /// The content hash from which it starts.
    from: String,
    /// Weights that it changes.
    weights: u64,
    /// The workers have it. Otherwise they ask for it during the update.
    is_staged: bool,
}

impl Change {
    /// Returns what the engine holds then, and how long it took no requests. After an error it has no
    /// traffic, unless the new weights never reached it.
    pub async fn run(self, held: Option<Held>) -> (Option<Held>, anyhow::Result<Duration>) {
        let (held, result) = self.change(held).await;
        let again = match &result {
            Ok(_) => Instant::now(),
            Err(_) => {
                metrics::counter!("springtide_remote_changes_failed_total").increment(1);
                Instant::now() + RETRY_INTERVAL
            }
        };
        self.pool.try_again_at(self.engine, again);
        self.pool.promise(self.engine, None);
        let url = self.pool.client(self.engine).url();
        let serial = self.version.serial;
        (
            held,
            result.with_context(|| format!("give the engine {url} version {serial}")),
        )
    }

    async fn change(&self, held: Option<Held>) -> (Option<Held>, anyhow::Result<Duration>) {
        // whatever fails here leaves the engine to its requests
        let mut patch = match self.prepare(held.as_ref()).await {
            Ok(patch) => patch,
            Err(error) => return (held, Err(error)),
        };
        let started = Instant::now();
        if self.options.in_flight == InFlight::Drain {
            self.drain(held.as_ref()).await;
        }
        let drained = started.elapsed();
        if let Some(Held { proof, .. }) = &held {
            proof.over.store(true, Ordering::Relaxed);
            if proof.refuted.load(Ordering::Relaxed) {
                // since it was prepared
                patch = None;
            }
        }
        self.pool.update_begins(self.engine, &self.name);
        let (probed, patched) = match self.update(patch).await {
            Ok(done) => done,
            Err(error) => {
                self.pool.update_failed(self.engine);
                self.pool.set_state(self.engine, State::Unproven, None);
                return (None, Err(error));
            }
        };
        self.pool
            .set_state(self.engine, State::Serving(self.version.serial), None);
        let (away, url) = (started.elapsed(), self.pool.client(self.engine).url().to_owned());
        tracing::info!(
            engine = url,
            version = self.version.serial,
            root = %self.version.root.short(),
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
        let mut now_held = self.held(Arc::downgrade(&self.version));
        let now = Instant::now();
        let begins = match held.map(|held| held.proof.begins).filter(|_| patched.is_some()) {
            // it waits for its turn
            Some(begins) if begins > now => begins,
            Some(begins) => now.max(begins + PROOF_INTERVAL),
            None => now,
        };
        now_held.proof = self.prove(begins, patched.is_some());
        (Some(now_held), Ok(away))
    }

    /// Compares all that the engine's workers hold with the version, while it answers. If it `is_patched` and they hold
    /// others, it gets no traffic until it has loaded all weights. Else only people can help, and they are told.
    fn prove(&self, begins: Instant, is_patched: bool) -> Arc<OfBytes> {
        let (pool, engine, serial) = (self.pool.clone(), self.engine, self.version.serial);
        let (workers, checkpoint) = (self.workers.clone(), self.checkpoint.clone());
        let root = checkpoint.root();
        let limit = self.weights_limit().saturating_mul(PROOF_TIMES);
        let proof = Arc::new(OfBytes::new(begins));
        if self.options.quantized.is_some() {
            // what engines made of the codes is nobody else's to compare
            return proof;
        }
        let of = Arc::downgrade(&proof);
        let task = tokio::spawn(async move {
            tokio::time::sleep_until(begins.into()).await;
            let client = pool.client(engine);
            let asked = workers.ask(None, root, checkpoint);
            let found = match client.prove(&asked.url, &asked.to()).await {
                Ok(true) => asked.proof(limit).await,
                Ok(false) => return,
                Err(error) => Err(error),
            };
            let Some(of) = of.upgrade().filter(|of| !of.over.load(Ordering::Relaxed)) else {
                return;
            };
            let engine_url = client.url();
            let compared = match found {
                Ok(proof) if proof.wrong.is_empty() => {
                    let seconds = begins.elapsed().as_secs_f64();
                    tracing::info!(
                        engine = engine_url,
                        version = serial,
                        ?proof,
                        seconds,
                        "workers hold the version"
                    );
                    proof.compared
                }
                Ok(proof) => {
                    tracing::error!(
                        engine = engine_url,
                        version = serial,
                        ?proof,
                        "workers hold other weights"
                    );
                    metrics::counter!("springtide_remote_proofs_failed_total").increment(1);
                    of.refuted.store(is_patched, Ordering::Relaxed);
                    if is_patched && matches!(pool.state(engine), State::Serving(served) if served == serial) {
                        pool.update_failed(engine);
                        pool.set_state(engine, State::Unproven, None);
                    }
                    0
                }
                Err(error) => {
                    let error = format!("{error:#}");
                    tracing::warn!(
                        engine = engine_url,
                        version = serial,
                        error,
                        "workers do not say what they hold"
                    );
                    0
                }
            };
            metrics::gauge!("springtide_remote_compared_weights", "engine" => engine_url.to_owned())
                .set(compared as f64);
        });
        let _ = proof.task.set(AbortOnDropHandle::new(task));
        proof
    }

    fn held(&self, version: Weak<LoadedVersion>) -> Held {
        Held {
            name: self.name.clone(),
            root: self.checkpoint.root(),
            checkpoint: self.checkpoint.clone(),
            version,
            proof: Arc::new(OfBytes::new(Instant::now())),
        }
    }

    /// How long the engine's workers may take for all weights.
    fn weights_limit(&self) -> Duration {
        let reading = self.checkpoint.tensor_bytes() / BYTES_PER_SECOND_MIN;
        Duration::from_millis(self.options.timeout_ms).saturating_add(Duration::from_secs(reading))
    }

    /// Makes what changes ready, while the engine still answers. `None`: all weights are to be loaded.
    async fn prepare(&self, held: Option<&Held>) -> anyhow::Result<Option<ForWorkers>> {
        let named = match held {
            None if !self.is_refuted => self.named().await,
            _ => None,
        };
        let held = held.or(named.as_ref());
        if let Some(held) = held.filter(|_| self.options.reads_text) {
            self.check_text(held).await?;
        }
        let patch = match held {
            // engines arrange the codes of copies in their own ways, and make that again from all of them
            Some(held) if self.options.quantized.is_none() => self.patch(held).await,
            _ => Ok(None),
        };
        Ok(patch.unwrap_or_else(|error| {
            let (error, engine) = (format!("{error:#}"), self.pool.client(self.engine).url());
            tracing::warn!(
                engine,
                error,
                "the engine is not ready for a patch; all weights are loaded"
            );
            metrics::counter!("springtide_remote_patches_failed_total").increment(1);
            None
        }))
    }

    /// What changes, ready in the engine's workers. `None`: more than weights changes.
    async fn patch(&self, held: &Held) -> anyhow::Result<Option<ForWorkers>> {
        let (old, new) = (held.checkpoint.clone(), self.checkpoint.clone());
        let made = tokio::task::spawn_blocking(move || {
            let patch = patch::between(&old, &new)?;
            anyhow::Ok(Contents::from_bytes(&patch.file.into())?)
        });
        let contents = match made.await.context("the patch's thread")? {
            Ok(contents) => contents,
            Err(error) => {
                tracing::info!(%error, "no patch; all weights are loaded");
                return Ok(None);
            }
        };
        let (from, weights) = (held.root.to_string(), contents.weights());
        let asked = self
            .workers
            .ask(Some(contents), self.checkpoint.root(), self.checkpoint.clone());
        let client = self.pool.client(self.engine);
        let is_staged = client.stage(&asked.url, &from, &asked.to()).await?;
        if is_staged {
            self.staged(&asked).await?;
        }
        Ok(Some(ForWorkers {
            asked,
            from,
            weights,
            is_staged,
        }))
    }

    async fn staged(&self, asked: &Asked) -> anyhow::Result<()> {
        let staged = tokio::time::timeout(self.weights_limit(), asked.staged()).await;
        staged.context("it took too long")?
    }

    /// An engine that reads text itself has read its tokenizer, templates and end tokens when it started.
    async fn check_text(&self, held: &Held) -> anyhow::Result<()> {
        let (old, new) = (&held.checkpoint.files, &self.checkpoint.files);
        let names = old.keys().chain(new.keys());
        let Some(name) = names.into_iter().find(|&name| old.get(name) != new.get(name)) else {
            return Ok(());
        };
        // one that was started again has read others
        let holds = self
            .pool
            .client(self.engine)
            .weights_name()
            .await
            .context("ask what it holds")?;
        ensure!(
            holds.as_ref() != Some(&held.name),
            "version {} has another {name} than the engine was started with, which no update can replace: start the \
             engine again with the files of version {}",
            self.version.serial,
            self.version.serial
        );
        Ok(())
    }

    /// An engine that was updated by an earlier process may say that it holds the version. Then an empty
    /// patch is enough: the engine refuses it if an update was broken off, and the probe follows.
    async fn named(&self) -> Option<Held> {
        let name = self.pool.client(self.engine).weights_name().await.ok()??;
        (name == self.name).then(|| self.held(Weak::new()))
    }

    /// Waits until no request needs the engine any more, or too long. `held`: what it holds.
    async fn drain(&self, held: Option<&Held>) {
        let State::Serving(serial) = self.pool.state(self.engine) else {
            return;
        };
        self.pool.set_state(self.engine, State::Draining(serial), None);
        let started = Instant::now();
        let limit = Duration::from_millis(self.options.drain_ms_max);
        // besides requests, only the routes hold a version
        let has_requests = |held: &Held| held.version.strong_count() > 1;
        loop {
            let needed = held.is_some_and(has_requests) && self.pool.placement(|engines| engines.servers(serial)) == 0;
            let running = self.pool.running(self.engine);
            if running == 0 && !needed {
                return;
            }
            if started.elapsed() > limit {
                let engine = self.pool.client(self.engine).url();
                tracing::warn!(engine, running, "drained too long; cut off");
                return;
            }
            tokio::time::sleep(DRAIN_CHECK_INTERVAL).await;
        }
    }

    /// Returns the number of weights that were patched; `None`: all were loaded.
    async fn update(&self, patch: Option<ForWorkers>) -> anyhow::Result<(Probed, Option<u64>)> {
        let client = self.pool.client(self.engine);
        if let Some(ForWorkers {
            asked,
            from,
            weights,
            is_staged,
        }) = patch
        {
            let patched = async {
                self.give(&asked, Some(&from), self.options.in_flight).await?;
                if !is_staged {
                    self.staged(&asked).await?;
                }
                self.probe().await
            };
            match patched.await {
                Ok(probed) => return Ok((probed, Some(weights))),
                Err(error) => {
                    let error = format!("{error:#}");
                    tracing::warn!(engine = client.url(), error, "patch failed; loading all weights");
                    metrics::counter!("springtide_remote_patches_failed_total").increment(1);
                    self.pool.update_failed(self.engine);
                }
            }
        }
        let asked = self.workers.ask(None, self.checkpoint.root(), self.checkpoint.clone());
        // whatever still runs may have been sampled with wrong weights
        self.give(&asked, None, InFlight::Drain).await?;
        self.staged(&asked).await?;
        Ok((self.probe().await?, None))
    }

    async fn give(&self, asked: &Asked, from: Option<&str>, in_flight: InFlight) -> anyhow::Result<()> {
        let (to, limit) = (asked.to(), self.weights_limit());
        let weights = Weights {
            url: &asked.url,
            from,
            to: &to,
            name: &self.name,
            limit,
        };
        self.pool.client(self.engine).update(weights, in_flight).await
    }

    async fn probe(&self) -> anyhow::Result<Probed> {
        probe(&self.pool, &self.options, self.engine, &self.version, &self.name).await
    }
}

/// Compares an engine with a version. `weights`: what it calls those that answer.
pub(super) async fn probe(
    pool: &Pool,
    options: &Options,
    engine: usize,
    version: &Arc<LoadedVersion>,
    weights: &str,
) -> anyhow::Result<Probed> {
    let client = pool.client(engine);
    ensure!(
        version.reference.is_some() || client.names_weights() && options.unproved_error_max.is_some(),
        "version {} has no reference log-probabilities, and the engine names no weights or nobody vouches for them \
         (unproved_error_max)",
        version.serial
    );
    let limit = Duration::from_millis(options.timeout_ms).saturating_mul(PROBE_TIMEOUTS);
    let probed = tokio::time::timeout(limit, probe::probe(client, weights, version)).await;
    let probed = probed.context("the engine took too long for its probe")??;
    let Probed { largest_difference, .. } = probed;
    if largest_difference > options.probe_error_max {
        metrics::counter!("springtide_remote_probes_failed_total").increment(1);
        bail!(
            "the engine's log-probabilities differ by up to {largest_difference} nats from those of version {}, and \
             probe_error_max is {}: it has other weights or computes differently",
            version.serial,
            options.probe_error_max
        );
    }
    Ok(probed)
}
