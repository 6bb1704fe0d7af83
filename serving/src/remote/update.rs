//! Changes the version that an engine holds: new weights for its workers, drain, update, probe. Each change is a
//! task of its own (`change`), so an engine that hangs delays no other. Also gives restarted and spare
//! engines a version, and finds out which version an engine holds that takes no weights from us
//! (`recognize`).

mod adapters;
mod change;
mod recognize;
mod workers;

use super::options::Options;
use super::placement::State;
use super::pool::Pool;
use crate::engine::LoadedVersion;
use adapters::{Adapter, Adding};
use anyhow::{Context, ensure};
use artifact::checkpoint::Checkpoint;
use artifact::digest::Digest;
use change::Change;
use futures::FutureExt as _;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};
use tokio_util::task::AbortOnDropHandle;
use workers::Workers;

/// How long an engine may take to say how long its context is.
const CONTEXT_WAIT: Duration = Duration::from_secs(2);
/// Engines that change at once without being urgent: each reads all weights.
const MENDED_MAX: usize = 2;

/// What an engine holds, as far as is known.
#[derive(Clone)]
struct Held {
    name: String,
    root: Digest,
    checkpoint: Arc<Checkpoint>,
    /// The requests that were routed to it hold it too.
    version: Weak<LoadedVersion>,
    proof: Arc<OfBytes>,
}

/// The proof by bytes, which goes on beside requests.
struct OfBytes {
    begins: Instant,
    /// Its workers hold other weights than the version has.
    refuted: AtomicBool,
    /// The weights change again, so what the workers say means nothing any more.
    over: AtomicBool,
    task: OnceLock<AbortOnDropHandle<()>>,
}

impl OfBytes {
    fn new(begins: Instant) -> Self {
        OfBytes {
            begins,
            refuted: AtomicBool::new(false),
            over: AtomicBool::new(false),
            task: OnceLock::new(),
        }
    }
}

/// The weights of a version.
#[derive(Clone)]
pub struct VersionWeights {
    pub checkpoint: Arc<Checkpoint>,
    /// What engines without adapters get: its copy, or of an adapter its base with it.
    pub given: Arc<Checkpoint>,
}

/// No engine may be given a version now.
#[derive(Debug, thiserror::Error)]
#[error(
    "none of the {engines} engines is free for version {serial}, and none that takes no weights holds it: start more \
     engines, or name fewer versions"
)]
pub struct NoEngine {
    engines: usize,
    serial: i64,
}

/// A change that goes on, and what the engine holds after it.
struct Ongoing {
    serial: i64,
    task: AbortOnDropHandle<(Option<Held>, anyhow::Result<Duration>)>,
}

/// How a task has ended, of which engine or at which place.
enum End {
    Change(
        usize,
        Result<(Option<Held>, anyhow::Result<Duration>), tokio::task::JoinError>,
    ),
    Adding(usize, Result<anyhow::Result<Duration>, tokio::task::JoinError>),
}

/// The only one that changes engines of a pool.
pub struct Updater {
    pool: Pool,
    options: Arc<Options>,
    /// Per engine; `None`: unknown weights.
    held: Vec<Option<Held>>,
    /// Per engine. It stays after its end until somebody has seen how it ended.
    changing: Vec<Option<Ongoing>>,
    /// For the engines that take weights. `None`: there are none.
    workers: Option<Arc<Workers>>,
    /// When each engine that takes no weights is probed next.
    probe_at: Vec<Instant>,
    /// Per engine, the adapters that it has loaded.
    adapters: Vec<BTreeMap<i64, Adapter>>,
    /// Per engine, the version whose adapters it serves.
    bases: Vec<Option<i64>>,
    /// What goes on for them.
    adding: Vec<Adding>,
    /// Per engine, when it did not serve a version last.
    refused: Vec<BTreeMap<i64, Instant>>,
}

impl Updater {
    /// Fails if `weights_listen` is taken.
    pub fn new(pool: Pool, options: Options) -> anyhow::Result<Self> {
        let takes_weights = (0..pool.engines()).any(|engine| pool.client(engine).takes_weights());
        if (0..pool.engines()).any(|engine| pool.client(engine).takes_adapters()) {
            // an earlier process may have left some
            let _ = std::fs::remove_dir_all(&options.adapters_dir);
        }
        let workers = takes_weights
            .then(|| Workers::listen(options.weights_listen))
            .transpose()?;
        Ok(Updater {
            workers: workers.map(Arc::new),
            held: (0..pool.engines()).map(|_| None).collect(),
            changing: (0..pool.engines()).map(|_| None).collect(),
            probe_at: vec![Instant::now(); pool.engines()],
            adapters: (0..pool.engines()).map(|_| BTreeMap::new()).collect(),
            bases: vec![None; pool.engines()],
            adding: Vec::new(),
            refused: vec![BTreeMap::new(); pool.engines()],
            pool,
            options: Arc::new(options),
        })
    }

    /// Whether engines get their weights from here. Otherwise versions come without tensors.
    pub fn gives_weights(&self) -> bool {
        self.workers.is_some()
    }

    /// Whether engines take adapters beside their base weights.
    pub fn gives_adapters(&self) -> bool {
        (0..self.pool.engines()).any(|engine| self.pool.client(engine).takes_adapters())
    }

    /// The shortest context of the engines that answer, in tokens; `usize::MAX` if none of them says.
    pub async fn context(&self) -> anyhow::Result<usize> {
        let contexts = (0..self.held.len()).map(async |engine| {
            let context = tokio::time::timeout(CONTEXT_WAIT, self.pool.client(engine).context());
            let url = self.pool.client(engine).url();
            context.await.with_context(|| format!("{url} does not answer"))?
        });
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

    /// Whether a change to the version goes on, or nobody has seen yet how it ended.
    pub fn gets(&self, serial: i64) -> bool {
        let mut changing = self.changing.iter().flatten().map(|ongoing| ongoing.serial);
        let mut adding = self.adding.iter().map(|adding| adding.serial);
        changing.any(|one| one == serial) || adding.any(|one| one == serial)
    }

    /// Has an engine serve the version, if none does, and waits for it. `kept`: serials of other versions that
    /// must go on being served. Returns how long the engine took no requests.
    pub async fn place(
        &mut self,
        version: &Arc<LoadedVersion>,
        checkpoint: &Arc<Checkpoint>,
        kept: &BTreeSet<i64>,
    ) -> anyhow::Result<Duration> {
        let weights = VersionWeights {
            checkpoint: checkpoint.clone(),
            given: checkpoint.clone(),
        };
        match self.begin(version, &weights, kept).await? {
            None => Ok(Duration::ZERO),
            Some(engine) => self.end(engine).await,
        }
    }

    /// The same without waiting: the engine whose change goes on. `None`: an engine serves the version. A
    /// change to a version that is not `kept` is broken off if no other engine is free. Fails with
    /// [`NoEngine`] before anything has changed.
    pub async fn begin(
        &mut self,
        version: &Arc<LoadedVersion>,
        weights: &VersionWeights,
        kept: &BTreeSet<i64>,
    ) -> anyhow::Result<Option<usize>> {
        let serial = version.serial;
        self.pool.know(weights_name(version), version);
        if self.pool.placement(|engines| engines.staying(serial)) > 0 {
            return Ok(None);
        }
        if let Some(engine) = self.pool.placement(|engines| engines.promised_to(serial)) {
            return Ok(Some(engine));
        }
        if let Some(engine) = self.pool.placement(|engines| engines.leaving(serial, kept)) {
            self.break_off(engine).await;
            if self.serves(serial) {
                return Ok(None);
            }
        }
        if let Some(engine) = self.adapt_anywhere(version, weights)? {
            return Ok(Some(engine));
        }
        if self.recognize_anywhere(version, kept).await? {
            return Ok(None);
        }
        let place = self.pool.placement(|engines| engines.place(kept, Instant::now()));
        let engine = place.ok_or(NoEngine {
            engines: self.held.len(),
            serial,
        })?;
        self.start(engine, version, &weights.given).await?;
        Ok(Some(engine))
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
            let is_added = |serial| self.adding.iter().any(|adding| adding.serial == serial);
            let lacks =
                |serial| engines.servers(serial) == 0 && engines.promised_to(serial).is_none() && !is_added(serial);
            let missing = arms.iter().find(|&&serial| lacks(serial));
            let urgent = missing.and_then(|&serial| Some((engines.place(&arms, now)?, serial)));
            let changing = engines
                .engines
                .iter()
                .filter(|engine| engine.promised.is_some())
                .count();
            urgent.or_else(|| engines.spare(wanted, now).filter(|_| changing < MENDED_MAX))
        })
    }

    /// Gives an engine this version, and waits for it. After an error it has no traffic, unless nothing has
    /// been changed yet.
    pub async fn change(
        &mut self,
        engine: usize,
        version: &Arc<LoadedVersion>,
        checkpoint: &Arc<Checkpoint>,
    ) -> anyhow::Result<Duration> {
        self.start(engine, version, checkpoint).await?;
        self.end(engine).await
    }

    /// Begins to give an engine this version.
    pub async fn start(
        &mut self,
        engine: usize,
        version: &Arc<LoadedVersion>,
        checkpoint: &Arc<Checkpoint>,
    ) -> anyhow::Result<()> {
        self.break_off(engine).await;
        self.check_provable(version)?;
        let name = weights_name(version);
        self.pool.know(name.clone(), version);
        let change = Change {
            pool: self.pool.clone(),
            options: self.options.clone(),
            workers: self.workers.clone().context("no engine takes weights")?,
            engine,
            name,
            version: version.clone(),
            checkpoint: checkpoint.clone(),
            is_refuted: self.is_refuted(engine),
        };
        self.pool.promise(engine, Some(version.serial));
        let held = self.held[engine].clone().filter(|_| !change.is_refuted);
        self.changing[engine] = Some(Ongoing {
            serial: version.serial,
            task: AbortOnDropHandle::new(tokio::spawn(change.run(held))),
        });
        Ok(())
    }

    /// Whether its workers hold other weights than they were given.
    fn is_refuted(&self, engine: usize) -> bool {
        let proof = self.held[engine].as_ref().map(|held| &held.proof);
        proof.is_some_and(|proof| proof.refuted.load(Ordering::Relaxed))
    }

    /// Refuses a version that nothing can prove, unless somebody vouches for it.
    fn check_provable(&self, version: &LoadedVersion) -> anyhow::Result<()> {
        ensure!(
            version.reference.is_some() || self.options.unproved_error_max.is_some(),
            "version {} has no reference log-probabilities, so nothing proves that an engine computes what was trained: \
             publish it with them (docs/policy.md), or set serve.remote.unproved_error_max, for `springtide follow` \
             follow.unproved_error_max, to serve it unproved",
            version.serial
        );
        Ok(())
    }

    /// Waits for the end of an engine's change, if there is one.
    async fn end(&mut self, engine: usize) -> anyhow::Result<Duration> {
        let Some(ongoing) = &mut self.changing[engine] else {
            return Ok(Duration::ZERO);
        };
        let ended = (&mut ongoing.task).await;
        self.ended(engine, ended)
    }

    /// The next change that ends: its version, and how long its engine took no requests. `None`: none goes
    /// on. Dropping the future loses nothing.
    pub async fn next_end(&mut self) -> Option<(i64, anyhow::Result<Duration>)> {
        let ongoing = self.changing.iter_mut().enumerate();
        let ongoing = ongoing.filter_map(|(engine, ongoing)| {
            let Ongoing { serial, task } = ongoing.as_mut()?;
            Some(
                task.map(move |ended| (*serial, End::Change(engine, ended)))
                    .left_future(),
            )
        });
        let adding = self.adding.iter_mut().enumerate();
        let adding = adding.map(|(place, Adding { serial, task, .. })| {
            task.map(move |ended| (*serial, End::Adding(place, ended)))
                .right_future()
        });
        let ongoing: Vec<_> = ongoing.chain(adding).collect();
        if ongoing.is_empty() {
            return None;
        }
        let ((serial, ended), ..) = futures::future::select_all(ongoing).await;
        let ended = match ended {
            End::Change(engine, ended) => self.ended(engine, ended),
            End::Adding(place, ended) => self.added(place, ended),
        };
        Some((serial, ended))
    }

    fn ended(
        &mut self,
        engine: usize,
        ended: Result<(Option<Held>, anyhow::Result<Duration>), tokio::task::JoinError>,
    ) -> anyhow::Result<Duration> {
        self.changing[engine] = None;
        match ended {
            Ok((held, result)) => {
                self.held[engine] = held;
                result
            }
            Err(error) => {
                self.interrupted(engine);
                Err(error).context("the change of an engine")
            }
        }
    }

    /// Ends a change that nobody needs any more. An engine whose weights it has not touched yet goes on.
    async fn break_off(&mut self, engine: usize) {
        let Some(Ongoing { serial, mut task }) = self.changing[engine].take() else {
            return;
        };
        task.abort();
        let ended = (&mut task).await;
        if ended.is_err() {
            let engine = self.pool.client(engine).url();
            tracing::info!(engine, version = serial, "change broken off");
        }
        if let Err(error) = self.ended(engine, ended) {
            tracing::debug!(error = format!("{error:#}"), "change ended");
        }
    }

    /// An engine's change has ended in the middle.
    fn interrupted(&mut self, engine: usize) {
        match self.pool.state(engine) {
            State::Draining(_) if self.is_refuted(engine) => self.pool.set_state(engine, State::Unproven, None),
            State::Draining(serial) => self.pool.set_state(engine, State::Serving(serial), None),
            State::Changing => {
                self.held[engine] = None;
                self.pool.update_failed(engine);
                self.pool.set_state(engine, State::Unproven, None);
            }
            State::Down | State::Unproven | State::Serving(_) => {}
        }
        self.pool.promise(engine, None);
    }
}

/// What an engine calls the weights of a version.
pub(super) fn weights_name(version: &LoadedVersion) -> String {
    format!("springtide-{}-{}", version.serial, version.root.short())
}
