//! Looks up which events the tables already hold, for those that may have been sent long ago (see
//! [`super::recent`]). Requests that arrive while queries run share the next query, so the number of
//! queries grows more slowly than the load.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use sqlx::PgPool;
use tokio::sync::{Mutex, mpsc, oneshot};

use crate::rows::transaction;

/// How long a request waits. After that, its events count as new.
const TIMEOUT: Duration = Duration::from_millis(500);
/// Concurrent queries.
const WORKERS: usize = 2;
/// Requests in the queue. Further ones wait for room.
const QUEUED_MAX: usize = 1024;
/// A query takes no further request once it has this many events.
const EVENTS_MAX: usize = 2000;

/// `(source, id, kind)`. The request has one tenant.
pub(super) type Key = (String, String, String);
pub(super) type Digests = HashMap<Key, [u8; 32]>;

/// The lookup. Cheap to clone. Its workers end with the last clone.
#[derive(Clone)]
pub(super) struct StoredEvents {
    lookups: mpsc::Sender<Lookup>,
}

struct Lookup {
    tenant: String,
    keys: Vec<Key>,
    /// Dropped if the query fails.
    answer: oneshot::Sender<Digests>,
}

impl StoredEvents {
    pub(super) fn new(pool: &PgPool) -> Self {
        let (lookups, queue) = mpsc::channel(QUEUED_MAX);
        let queue = Arc::new(Mutex::new(queue));
        for _ in 0..WORKERS {
            tokio::spawn(work(pool.clone(), queue.clone()));
        }
        Self { lookups }
    }

    /// The digests of those events that the tables hold. Empty if the database does not answer in
    /// time: the log accepts events without the database, and the sink compares them again.
    pub(super) async fn digests(&self, tenant: String, keys: Vec<Key>) -> Digests {
        let (answer, answered) = oneshot::channel();
        let lookup = async {
            self.lookups.send(Lookup { tenant, keys, answer }).await.ok()?;
            answered.await.ok()
        };
        let Ok(digests) = tokio::time::timeout(TIMEOUT, lookup).await else {
            tracing::warn!("looking up duplicates timed out");
            return Digests::new();
        };
        digests.unwrap_or_default()
    }
}

async fn work(pool: PgPool, queue: Arc<Mutex<mpsc::Receiver<Lookup>>>) {
    loop {
        let mut lookups = Vec::new();
        {
            let mut queue = queue.lock().await;
            let Some(first) = queue.recv().await else { return };
            let mut events = first.keys.len();
            lookups.push(first);
            while events < EVENTS_MAX
                && let Ok(lookup) = queue.try_recv()
            {
                events += lookup.keys.len();
                lookups.push(lookup);
            }
        }
        // Requests that have timed out need no answer.
        lookups.retain(|lookup| !lookup.answer.is_closed());
        if let Err(error) = answer(&pool, lookups).await {
            tracing::warn!(%error, "cannot look up duplicates");
        }
    }
}

async fn answer(pool: &PgPool, lookups: Vec<Lookup>) -> sqlx::Result<()> {
    let (mut tenants, mut sources, mut ids, mut kinds) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for lookup in &lookups {
        for (source, id, kind) in &lookup.keys {
            tenants.push(lookup.tenant.clone());
            sources.push(source.clone());
            ids.push(id.clone());
            kinds.push(kind.clone());
        }
    }
    if ids.is_empty() {
        return Ok(());
    }
    let mut transaction = transaction::begin(pool).await?;
    let rows = sqlx::query_file!("src/entry/api/known.sql", &tenants, &sources, &ids, &kinds)
        .fetch_all(&mut *transaction)
        .await?;
    transaction.commit().await?;
    let mut stored: HashMap<String, Digests> = HashMap::new();
    for row in rows {
        if let Ok(digest) = row.digest.try_into() {
            let of_tenant = stored.entry(row.tenant_id).or_default();
            of_tenant.insert((row.source, row.event_id, row.kind), digest);
        }
    }
    for lookup in lookups {
        let of_tenant = stored.get(&lookup.tenant);
        let found = lookup.keys.into_iter().filter_map(|key| {
            let digest = *of_tenant?.get(&key)?;
            Some((key, digest))
        });
        // Fails only if the request has ended.
        let _ = lookup.answer.send(found.collect());
    }
    Ok(())
}
