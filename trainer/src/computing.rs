//! Whether this process computes: a step, a gradient, or an evaluation. A replica on the same machine
//! asks, and lends its slots to rollouts only while nothing is computed (`serve.tide.beside_trainer`).
//!
//! What only packs or moves bytes beside the runs does not count: exports and squashed deltas.

use axum::Router;
use axum::extract::State;
use axum::routing::get;
use edge::json::Json;
use edge::query::Query;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use time::OffsetDateTime;
use tokio::sync::watch;
use tokio::task::{JoinError, spawn_blocking};

/// Longest wait for a change, per request.
const CHANGE_WAIT_MAX: Duration = Duration::from_millis(500);

/// Counts what this process computes now. Clones share the count.
#[derive(Debug, Clone)]
pub struct Computing(watch::Sender<Now>);

#[derive(Debug, Clone, Copy)]
struct Now {
    computations: usize,
    /// Since when something is computed, or nothing.
    since: OffsetDateTime,
}

/// Something that is computed until this is dropped.
#[derive(Debug)]
pub(crate) struct Computation(Computing);

impl Default for Computing {
    fn default() -> Self {
        Computing(watch::Sender::new(Now {
            computations: 0,
            since: OffsetDateTime::now_utc(),
        }))
    }
}

impl Computing {
    /// Call it before the computation begins.
    pub(crate) fn begin(&self) -> Computation {
        self.count(|computations| computations + 1);
        Computation(self.clone())
    }

    /// Computes on a blocking thread. Counts until the end, also if the caller leaves.
    pub(crate) async fn on_blocking_thread<T: Send + 'static>(
        &self,
        compute: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let computation = self.begin();
        let work = move || {
            let _computation = computation;
            compute()
        };
        spawn_blocking(work).await
    }

    /// `GET /computing`. No key is needed: it tells nothing of what is computed.
    pub fn routes(&self) -> Router {
        Router::new().route("/computing", get(show)).with_state(self.clone())
    }

    fn count(&self, change: impl FnOnce(usize) -> usize) {
        self.0.send_if_modified(|now| {
            let before = now.is_computing();
            now.computations = change(now.computations);
            let changed = now.is_computing() != before;
            if changed {
                now.since = OffsetDateTime::now_utc();
            }
            changed
        });
    }
}

impl Drop for Computation {
    fn drop(&mut self) {
        self.0.count(|computations| computations - 1);
    }
}

impl Now {
    fn is_computing(&self) -> bool {
        self.computations > 0
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Known {
    /// What the caller knows. The answer comes when it is no longer so, or after half a second.
    known: Option<bool>,
}

#[derive(Debug, Serialize)]
struct View {
    computing: bool,
    #[serde(with = "time::serde::rfc3339")]
    since: OffsetDateTime,
}

async fn show(State(computing): State<Computing>, Query(Known { known }): Query<Known>) -> Json<View> {
    let mut now = computing.0.subscribe();
    if let Some(known) = known {
        // without a change in time, the answer is what the caller knows
        let changed = now.wait_for(|now| now.is_computing() != known);
        drop(tokio::time::timeout(CHANGE_WAIT_MAX, changed).await);
    }
    let now = *now.borrow();
    Json(View {
        computing: now.is_computing(),
        since: now.since,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn ask(computing: &Computing, known: Option<bool>) -> View {
        show(State(computing.clone()), Query(Known { known })).await.0
    }

    #[tokio::test]
    async fn it_computes_from_the_first_begin_to_the_last_end() {
        let computing = Computing::default();
        let idle = ask(&computing, None).await;
        assert!(!idle.computing);
        let first = computing.begin();
        let begun = ask(&computing, None).await;
        assert!(begun.computing && begun.since >= idle.since);
        let second = computing.begin();
        drop(first);
        let still = ask(&computing, None).await;
        assert!(still.computing && still.since == begun.since, "one computation goes on");
        drop(second);
        assert!(!ask(&computing, None).await.computing);
    }

    #[tokio::test]
    async fn a_caller_that_knows_the_state_gets_the_next_one() {
        let computing = Computing::default();
        assert!(!ask(&computing, Some(false)).await.computing, "nothing changed in time");
        assert!(!ask(&computing, Some(true)).await.computing, "at once");
        let waits = tokio::spawn({
            let computing = computing.clone();
            async move { ask(&computing, Some(false)).await.computing }
        });
        tokio::task::yield_now().await;
        let _computation = computing.begin();
        assert!(waits.await.unwrap());
    }

    #[tokio::test]
    async fn blocking_work_counts_until_it_ends_although_nobody_waits_for_it() {
        let computing = Computing::default();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let work = computing.on_blocking_thread(move || ended.recv());
        assert!(futures::FutureExt::now_or_never(work).is_none());
        assert!(ask(&computing, None).await.computing);
        end.send(()).unwrap();
        computing
            .0
            .subscribe()
            .wait_for(|now| !now.is_computing())
            .await
            .unwrap();
    }
}
