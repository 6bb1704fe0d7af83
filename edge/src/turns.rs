//! Limits how many requests of a costly route run at a time, in all and for each key.
//!
//! Requests of different keys wait for each other in the order in which they came. As a key may wait
//! only a few times, nobody waits long behind one key's flood.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use tokio::sync::Semaphore;
use tracing::Instrument;
use uuid::Uuid;

use crate::auth::Principal;
use crate::problem::Problem;

/// Cheap to clone. All clones count together.
#[derive(Debug, Clone)]
pub struct Turns {
    running: Arc<Semaphore>,
    key_max: usize,
    /// Requests of each key that run or wait.
    open: Arc<Mutex<HashMap<Uuid, usize>>>,
}

/// A request of a key that runs or waits.
struct Turn {
    turns: Turns,
    key: Uuid,
}

impl Turns {
    /// `at_once` requests run. Further ones wait, at most `key_max` of a key, running ones included.
    pub fn new(at_once: usize, key_max: usize) -> Self {
        Self {
            running: Arc::new(Semaphore::new(at_once)),
            key_max,
            open: Arc::default(),
        }
    }

    /// `None`: callers without a key cannot be told apart, so they only wait.
    fn enter(&self, principal: &Principal) -> Result<Option<Turn>, Problem> {
        let Some(key) = principal.key.map(|key| key.id) else {
            return Ok(None);
        };
        let mut open = self.lock();
        let count = open.entry(key).or_default();
        if *count >= self.key_max {
            metrics::counter!("springtide_requests_limited_total", "limit" => "costly_route").increment(1);
            let detail = format!("{count} such requests of this key are open already; wait for their answers");
            return Err(Problem::too_many(detail, 1).with("limit", "costly_route"));
        }
        *count += 1;
        drop(open);
        Ok(Some(Turn {
            turns: self.clone(),
            key,
        }))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, usize>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut open = self.turns.lock();
        if let Some(count) = open.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.key);
            }
        }
    }
}

/// Middleware that waits for a turn. Needs a [`Principal`].
pub(crate) async fn in_turn(
    State(turns): State<Turns>,
    principal: Principal,
    request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let turn = turns.enter(&principal)?;
    // The database finishes a query whose caller has left. So the handler runs to its end on its own,
    // and its turn lasts as long.
    let answer = async move {
        // never closed
        let _running = turns.running.acquire().await;
        let response = next.run(request).await;
        drop(turn);
        response
    };
    tokio::spawn(answer.in_current_span()).await.map_err(Problem::internal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::{KeyId, Role};

    fn holder(key: u128) -> Principal {
        let id = Uuid::from_u128(key);
        Principal {
            key: Some(KeyId { id, lineage: id }),
            ..Principal::with_role("default", Role::Release, "test")
        }
    }

    #[test]
    fn a_key_has_few_turns_at_a_time_and_takes_none_from_others() {
        let turns = Turns::new(1, 2);
        let first = turns.enter(&holder(1)).unwrap();
        let second = turns.enter(&holder(1)).unwrap();
        for _ in 0..100 {
            let refused = turns.enter(&holder(1)).map(drop).unwrap_err();
            assert_eq!((refused.status.as_u16(), refused.retry_after_seconds), (429, Some(1)));
        }
        turns.enter(&holder(2)).unwrap();
        drop(first);
        let third = turns.enter(&holder(1)).unwrap();
        drop((second, third));
        assert!(turns.lock().is_empty());
    }
}
