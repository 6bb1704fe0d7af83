//! Which events the tables hold already. Requests that ask while the database answers others are asked for together, so that
//! it is asked less often the more there is to do.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use sqlx::PgPool;
use tokio::sync::{Mutex, mpsc, oneshot};

/// How long a request waits; not finding out in time counts as not knowing.
const TIMEOUT: Duration = Duration::from_millis(500);
/// Queries at once.
const LANES: usize = 2;
/// Requests that wait for a lane; more wait for room.
const WAITING_MAX: usize = 1024;
/// Events of one query, or of one request more.
const EVENTS_MAX: usize = 2000;

/// `(source, id)`; the tenant is the request's.
pub(super) type Key = (String, String);
pub(super) type Digests = HashMap<Key, [u8; 32]>;

/// Asks the tables. Cheap to clone; ends with its last clone.
#[derive(Clone)]
pub(super) struct Known {
    asks: mpsc::Sender<Ask>,
}

struct Ask {
    tenant: String,
    keys: Vec<Key>,
    /// Dropped where the tables could not be asked.
    answer: oneshot::Sender<Digests>,
}

impl Known {
    pub(super) fn new(pool: &PgPool) -> Self {
        let (asks, waiting) = mpsc::channel(WAITING_MAX);
        let waiting = Arc::new(Mutex::new(waiting));
        for _ in 0..LANES {
            tokio::spawn(lane(pool.clone(), waiting.clone()));
        }
        Self { asks }
    }

    /// The digests under which the tables hold these events. None where they could not be asked in time: the log takes events
    /// while the database is away, and the sink compares again.
    pub(super) async fn digests(&self, tenant: String, keys: Vec<Key>) -> Digests {
        let (answer, answered) = oneshot::channel();
        let ask = Ask { tenant, keys, answer };
        let asking = async {
            self.asks.send(ask).await.ok()?;
            answered.await.ok()
        };
        let Ok(answer) = tokio::time::timeout(TIMEOUT, asking).await else {
            tracing::warn!("duplicates cannot be looked up in time");
            return Digests::new();
        };
        answer.unwrap_or_default()
    }
}

async fn lane(pool: PgPool, waiting: Arc<Mutex<mpsc::Receiver<Ask>>>) {
    loop {
        let mut asks = Vec::new();
        {
            let mut waiting = waiting.lock().await;
            let Some(first) = waiting.recv().await else { return };
            let mut events = first.keys.len();
            asks.push(first);
            while events < EVENTS_MAX
                && let Ok(ask) = waiting.try_recv()
            {
                events += ask.keys.len();
                asks.push(ask);
            }
        }
        // Whose request has given up meanwhile is not asked for.
        asks.retain(|ask| !ask.answer.is_closed());
        if let Err(error) = answer(&pool, asks).await {
            tracing::warn!(%error, "duplicates cannot be looked up");
        }
    }
}

async fn answer(pool: &PgPool, asks: Vec<Ask>) -> sqlx::Result<()> {
    let (mut tenants, mut sources, mut ids) = (Vec::new(), Vec::new(), Vec::new());
    for ask in &asks {
        for (source, id) in &ask.keys {
            tenants.push(ask.tenant.clone());
            sources.push(source.clone());
            ids.push(id.clone());
        }
    }
    if ids.is_empty() {
        return Ok(());
    }
    let rows = sqlx::query_file!("src/api/known.sql", &tenants, &sources, &ids)
        .fetch_all(pool)
        .await?;
    let mut found: HashMap<String, Digests> = HashMap::new();
    for row in rows {
        if let Ok(digest) = row.digest.try_into() {
            let of_tenant = found.entry(row.tenant_id).or_default();
            of_tenant.insert((row.source, row.event_id), digest);
        }
    }
    for ask in asks {
        let of_tenant = found.get(&ask.tenant);
        let known = ask.keys.into_iter().filter_map(|key| {
            let digest = *of_tenant?.get(&key)?;
            Some((key, digest))
        });
        // Nobody waits where the request has ended.
        let _ = ask.answer.send(known.collect());
    }
    Ok(())
}
