//! Requests that are passed on to an engine as they are, by whoever stands in front of it
//! (`springtide follow`). They count as running, so an update drains them like the pool's own.

use super::{Pool, State};
use std::time::Duration;

/// Lets one request through to an engine. Dropping it ends the request.
pub struct Pass {
    pool: Pool,
    engine: usize,
    /// Updates of the engine that had failed when the request began.
    failed_updates: u64,
}

impl Pool {
    /// `None` unless the engine holds a version that was probed.
    pub fn admit(&self, engine: usize) -> Option<Pass> {
        let mut work = self.lock();
        let one = &mut work.placement.engines[engine];
        if !matches!(one.state, State::Serving(_)) {
            return None;
        }
        one.production += 1;
        Some(Pass {
            pool: self.clone(),
            engine,
            failed_updates: one.failed_updates,
        })
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

impl Pass {
    /// The name of the weights that were probed.
    pub fn weights(&self) -> String {
        self.pool.lock().weights[self.engine].clone()
    }

    /// Whether what the engine has answered until now may be passed on. Waits while the engine is
    /// updated: what its new weights sample is held back until they are probed.
    pub async fn proven(&self) -> bool {
        self.pool.after_update(self.engine).await;
        self.pool.lock().placement.engines[self.engine].failed_updates == self.failed_updates
    }

    /// The engine does not answer, or is another one than was probed.
    pub fn eject(&self, error: &anyhow::Error) {
        self.pool.eject(self.engine, error);
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut work = self.pool.lock();
        let one = &mut work.placement.engines[self.engine];
        one.production = one.production.saturating_sub(1);
    }
}
