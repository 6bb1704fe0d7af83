//! Requests beside the updates of their engine: those that may go on with the next version, and those
//! that are passed on as they are by whoever stands in front of the engine (`springtide follow`).
//! The latter count as running, so an update drains them like the pool's own.

use super::{EngineState, Pool, State};
use crate::engine::{LoadedVersion, SampleEvent, Started};
use artifact::digest::Digest;
use futures::FutureExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an answer waits for a version that it names and we have not seen yet.
const UNKNOWN_WAIT: Duration = Duration::from_secs(5);
const UNKNOWN_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Versions whose names are known: far more than one answer can cross.
const KNOWN_MAX: usize = 1024;

/// How long an engine has to say which weights it holds.
const HOLDS_WAIT: Duration = Duration::from_secs(2);

/// Watches the updates of an engine for one request.
#[derive(Clone)]
pub struct Updates {
    pool: Pool,
    engine: usize,
    /// Updates of the engine that had failed when the request began.
    failed: u64,
    /// Those that had begun.
    begun: u64,
}

/// Lets one request through to an engine. Dropping it ends the request.
pub struct Pass(Updates);

impl Pool {
    /// `None` unless the engine holds a version that was probed.
    pub fn admit(&self, engine: usize) -> Option<Pass> {
        let mut work = self.lock();
        let one = &mut work.placement.engines[engine];
        if !matches!(one.state, State::Serving(_)) {
            return None;
        }
        one.production += 1;
        Some(Pass(Updates::new(self, engine, one)))
    }

    /// Notes what engines call a version.
    pub(in crate::remote) fn know(&self, name: String, version: &LoadedVersion) {
        let mut work = self.lock();
        work.known.insert(name, (version.serial, version.root));
        if work.known.len() > KNOWN_MAX {
            let oldest = work.known.iter().min_by_key(|(_, (serial, _))| *serial);
            if let Some(name) = oldest.map(|(name, _)| name.clone()) {
                work.known.remove(&name);
            }
        }
    }

    /// The same, but waits for an update that goes on, at most for `limit`.
    pub async fn admit_after_update(&self, engine: usize, limit: Duration) -> Option<Pass> {
        let updated = self.after_update(engine);
        // without an answer in time the engine is as it is
        let _ = tokio::time::timeout(limit, updated).await;
        self.admit(engine)
    }

    /// What the engine serves; `None`: it may not be asked.
    pub fn serves(&self, engine: usize) -> Option<i64> {
        match self.state(engine) {
            State::Serving(serial) => Some(serial),
            _ => None,
        }
    }

    /// Requests that run on the engine.
    pub fn in_flight(&self, engine: usize) -> usize {
        self.running(engine)
    }

    /// What a running request has received since its engine's last proven version may be of wrong
    /// weights.
    pub(in crate::remote) fn update_failed(&self, engine: usize) {
        self.lock().placement.engines[engine].failed_updates += 1;
    }

    async fn after_update(&self, engine: usize) {
        loop {
            let changed = self.shared.changed.notified();
            tokio::pin!(changed);
            // from here on, no change is missed
            changed.as_mut().enable();
            if self.state(engine) != State::Changing {
                return;
            }
            changed.await;
        }
    }
}

impl Updates {
    /// From now on. `state`: of the engine.
    pub(super) fn new(pool: &Pool, engine: usize, state: &EngineState) -> Self {
        Updates {
            pool: pool.clone(),
            engine,
            failed: state.failed_updates,
            begun: state.updates,
        }
    }

    /// Whether what the engine has answered until now may be passed on. Waits while the engine is
    /// updated: what its new weights sample is held back until they are probed.
    pub async fn proven(&self) -> bool {
        self.pool.after_update(self.engine).await;
        self.pool.lock().placement.engines[self.engine].failed_updates == self.failed
    }

    /// The event that a request for the weights of this name begins with.
    pub(super) fn started(&self, weights: String) -> SampleEvent {
        let updates = self.clone();
        let holds = move || {
            let (updates, weights) = (updates.clone(), weights.clone());
            async move { updates.hold(&weights).await }.boxed()
        };
        SampleEvent::Started(Started {
            engine: self.pool.label(self.engine),
            holds: Arc::new(holds),
        })
    }

    /// Whether the engine has held the weights of this name since the request began.
    pub(in crate::remote) async fn hold(&self, weights: &str) -> bool {
        if self.pool.lock().placement.engines[self.engine].updates != self.begun {
            return false;
        }
        let client = self.pool.client(self.engine);
        // we alone change the first kind, and the second says nothing
        if client.takes_weights() || !client.names_weights() {
            return true;
        }
        let held = tokio::time::timeout(HOLDS_WAIT, client.weights_name()).await;
        matches!(held, Ok(Ok(Some(held))) if held == weights)
    }

    /// The version that an engine calls so. A follower may be ahead of us, so this waits a while.
    pub async fn version(&self, name: &str) -> Option<(i64, Digest)> {
        let started = Instant::now();
        loop {
            let known = self.pool.lock().known.get(name).copied();
            if known.is_some() || started.elapsed() > UNKNOWN_WAIT {
                return known;
            }
            tokio::time::sleep(UNKNOWN_CHECK_INTERVAL).await;
        }
    }
}

impl Pass {
    /// The name of the weights that were probed.
    pub fn weights(&self) -> String {
        self.0.pool.lock().weights[self.0.engine].clone()
    }

    /// [`Updates::proven`].
    pub async fn proven(&self) -> bool {
        self.0.proven().await
    }

    /// The engine does not answer, or is another one than was probed.
    pub fn eject(&self, error: &anyhow::Error) {
        self.0.pool.eject(self.0.engine, error);
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut work = self.0.pool.lock();
        let one = &mut work.placement.engines[self.0.engine];
        one.production = one.production.saturating_sub(1);
    }
}
