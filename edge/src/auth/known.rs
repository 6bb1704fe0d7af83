//! The valid keys of the table `api_key`, held in memory.
//!
//! The whole set is held, not a cache of lookups. So an unknown key costs no entry, and no query of
//! its own: requests with unknown keys wait for one comparison with the table, which at most ten a
//! second begin. Requests with known keys never wait for that. Of one connection, only one request
//! with an unknown key is in a comparison at a time ([`Guesses`]).
//!
//! A comparison reads one number, which every change of a key raises, and reads the keys again only
//! if it has risen. While requests come, one begins each second. A revoked key is refused once the
//! next comparison has succeeded, at the latest [`CURRENT_FOR`] after the last one.
//!
//! Without the database, known keys work on until they expire. Those without an expiry work for
//! [`CUT_OFF_MAX`].

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use anyhow::Context;
use sqlx::PgPool;
use time::OffsetDateTime;
use uuid::Uuid;

use super::key::{Grant, per_second};
use super::{KeyId, Principal};

/// A request compares in the background if the last comparison is older.
const COMPARE_AFTER: Duration = Duration::from_secs(1);
/// A request waits for a comparison if the last one is older.
const CURRENT_FOR: Duration = Duration::from_secs(3);
/// Between the beginnings of two comparisons.
const COMPARE_EVERY_MIN: Duration = Duration::from_millis(100);
const COMPARE_TIMEOUT: Duration = Duration::from_secs(2);
/// What `springtide key revoke` promises.
const _: () = assert!(CURRENT_FOR.as_secs() + COMPARE_TIMEOUT.as_secs() <= 5);
/// How long keys without an expiry work while the database does not answer.
const CUT_OFF_MAX: Duration = Duration::from_secs(30);
const HOUR_SECONDS: i64 = 3600;

/// The turn of a connection's requests with unknown keys: one has it, until its key was compared. So
/// a connection with many requests cannot try more than ten keys a second. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Guesses(Arc<tokio::sync::Mutex<()>>);

/// The database does not answer, so nobody knows whether the key is valid.
#[derive(Debug)]
pub(super) struct Unavailable;

#[derive(Debug)]
pub(super) struct KnownKeys {
    pool: PgPool,
    current: RwLock<Arc<Snapshot>>,
    /// Held by the task that compares.
    comparing: Arc<tokio::sync::Mutex<()>>,
    /// Keys whose last use is not stored yet; each comes here once an hour.
    used: Mutex<Vec<Uuid>>,
    storing: AtomicBool,
}

#[derive(Debug, Clone, Default)]
struct Snapshot {
    keys: Arc<HashMap<[u8; 32], KnownKey>>,
    revision: Option<i64>,
    /// When the last comparison that succeeded began.
    compared_at: Option<Instant>,
    /// When the last comparison began.
    tried_at: Option<Instant>,
    failed: bool,
}

#[derive(Debug)]
struct KnownKey {
    principal: Principal,
    key: Uuid,
    expires_at: Option<OffsetDateTime>,
    /// Hour of the last use, counted from 1970.
    used_hour: AtomicI64,
}

impl Snapshot {
    fn age(&self) -> Option<Duration> {
        self.compared_at.map(|at| at.elapsed())
    }
}

impl KnownKeys {
    pub(super) fn new(pool: PgPool) -> Arc<Self> {
        Arc::new(Self {
            pool,
            current: RwLock::default(),
            comparing: Arc::default(),
            used: Mutex::default(),
            storing: AtomicBool::new(false),
        })
    }

    /// The holder of the key, or `None` if it is unknown, revoked or expired.
    pub(super) async fn find(
        self: &Arc<Self>,
        digest: &[u8; 32],
        guesses: &Guesses,
    ) -> Result<Option<Principal>, Unavailable> {
        let asked_at = Instant::now();
        let snapshot = self.snapshot();
        if let Some(key) = snapshot.keys.get(digest) {
            let age = snapshot.age().unwrap_or(Duration::MAX);
            if age >= COMPARE_AFTER && (age < CURRENT_FOR || snapshot.failed) {
                self.compare_in_background(asked_at);
            }
            if age < CURRENT_FOR {
                return Ok(self.valid(key));
            }
            if snapshot.failed {
                return self.valid_while_cut_off(key, age);
            }
        }
        let snapshot = match snapshot.keys.contains_key(digest) {
            true => self.compared_since(asked_at).await,
            false => {
                let _turn = guesses.0.lock().await;
                // Not since it was asked: all that wait for a turn would share one comparison.
                self.compared_since(Instant::now()).await
            }
        };
        match snapshot.keys.get(digest) {
            Some(key) if snapshot.failed => self.valid_while_cut_off(key, snapshot.age().unwrap_or(Duration::MAX)),
            Some(key) => Ok(self.valid(key)),
            None if snapshot.failed => Err(Unavailable),
            None => Ok(None),
        }
    }

    fn valid(self: &Arc<Self>, key: &KnownKey) -> Option<Principal> {
        let now = OffsetDateTime::now_utc();
        if key.expires_at.is_some_and(|at| at <= now) {
            return None;
        }
        let hour = now.unix_timestamp() / HOUR_SECONDS;
        if key.used_hour.load(Ordering::Relaxed) != hour && key.used_hour.swap(hour, Ordering::Relaxed) != hour {
            self.note_use(key.key);
        }
        Some(key.principal.clone())
    }

    fn valid_while_cut_off(self: &Arc<Self>, key: &KnownKey, age: Duration) -> Result<Option<Principal>, Unavailable> {
        match key.expires_at.is_some() || age < CUT_OFF_MAX {
            true => Ok(self.valid(key)),
            false => Err(Unavailable),
        }
    }

    fn snapshot(&self) -> Arc<Snapshot> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn compare_in_background(self: &Arc<Self>, asked_at: Instant) {
        // Somebody compares already.
        if self.comparing.try_lock().is_err() {
            return;
        }
        let keys = self.clone();
        tokio::spawn(async move { keys.compared_since(asked_at).await });
    }

    /// What a comparison gave that began at or after `since`. All who wait share one. It is a task of
    /// its own, so a caller that goes away neither ends it nor makes another begin.
    async fn compared_since(self: &Arc<Self>, since: Instant) -> Arc<Snapshot> {
        let turn = self.comparing.clone().lock_owned().await;
        let current = self.snapshot();
        if current.tried_at.is_some_and(|tried_at| tried_at >= since) {
            return current;
        }
        let keys = self.clone();
        let compared = tokio::spawn(async move {
            let _turn = turn;
            keys.compare_in_turn(current).await
        });
        // It fails only if it panics, or as the process ends.
        compared.await.unwrap_or_else(|_| self.snapshot())
    }

    async fn compare_in_turn(&self, current: Arc<Snapshot>) -> Arc<Snapshot> {
        if let Some(tried_at) = current.tried_at {
            tokio::time::sleep_until((tried_at + COMPARE_EVERY_MIN).into()).await;
        }
        let tried_at = Instant::now();
        let compared = match tokio::time::timeout(COMPARE_TIMEOUT, self.compare(&current)).await {
            Ok(compared) => compared,
            Err(_) => Err(anyhow::anyhow!("no answer within {COMPARE_TIMEOUT:?}")),
        };
        let next = match compared {
            Ok((keys, revision)) => Snapshot {
                keys,
                revision: Some(revision),
                compared_at: Some(tried_at),
                tried_at: Some(tried_at),
                failed: false,
            },
            Err(error) => {
                if !current.failed {
                    tracing::warn!(error = %format!("{error:#}"), "cannot compare API keys with the database");
                }
                Snapshot {
                    tried_at: Some(tried_at),
                    failed: true,
                    ..Snapshot::clone(&current)
                }
            }
        };
        let next = Arc::new(next);
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = next.clone();
        next
    }

    async fn compare(&self, current: &Snapshot) -> anyhow::Result<(Arc<HashMap<[u8; 32], KnownKey>>, i64)> {
        // Before the keys: a change in between is found by the next comparison.
        let revision = sqlx::query_scalar!("select revision from api_key_revision")
            .fetch_one(&self.pool)
            .await
            .context("read the revision of the keys")?;
        if current.revision == Some(revision) {
            return Ok((current.keys.clone(), revision));
        }
        let rows = sqlx::query!(
            r#"select id, tenant_id, role, scopes, digest, label, expires_at, last_used, replica,
                      requests_per_second, coalesce(lineage, id) as "lineage!"
               from api_key where revoked_at is null and (expires_at is null or expires_at > now())"#
        )
        .fetch_all(&self.pool)
        .await
        .context("read the keys")?;
        let mut keys = HashMap::with_capacity(rows.len());
        for row in rows {
            // A newer program may have written it. The key is refused here, the others work.
            let grant = match Grant::parse(&row.role, row.scopes.as_deref()) {
                Ok(grant) => grant,
                Err(error) => {
                    tracing::warn!(key = %row.id, error = %error, "a key cannot be read, so it is refused");
                    continue;
                }
            };
            let Ok(digest) = <[u8; 32]>::try_from(row.digest) else {
                continue;
            };
            let used_hour = row.last_used.map_or(0, |at| at.unix_timestamp() / HOUR_SECONDS);
            let key = KnownKey {
                principal: Principal {
                    tenant: row.tenant_id,
                    scopes: grant.scopes(),
                    label: row.label,
                    key: Some(KeyId {
                        id: row.id,
                        lineage: row.lineage,
                    }),
                    replica: row.replica,
                    requests_per_second: per_second(row.requests_per_second),
                    is_person: true,
                },
                key: row.id,
                expires_at: row.expires_at,
                used_hour: AtomicI64::new(used_hour),
            };
            keys.insert(digest, key);
        }
        Ok((Arc::new(keys), revision))
    }

    /// Stores the hour of the last use. One task at a time writes, in one statement for all keys
    /// that were used meanwhile.
    fn note_use(self: &Arc<Self>, key: Uuid) {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).push(key);
        if self.storing.swap(true, Ordering::SeqCst) {
            return;
        }
        let keys = self.clone();
        tokio::spawn(async move {
            loop {
                let used = std::mem::take(&mut *keys.used.lock().unwrap_or_else(PoisonError::into_inner));
                if used.is_empty() {
                    keys.storing.store(false, Ordering::SeqCst);
                    // A key that came between the two lines would wait for the next use of another.
                    let left = !keys.used.lock().unwrap_or_else(PoisonError::into_inner).is_empty();
                    if left && !keys.storing.swap(true, Ordering::SeqCst) {
                        continue;
                    }
                    return;
                }
                let stored = sqlx::query!(
                    "update api_key set last_used = date_trunc('hour', now())
                     where id = any($1) and (last_used is null or last_used < date_trunc('hour', now()))",
                    &used
                )
                .execute(&keys.pool)
                .await;
                if let Err(error) = stored {
                    tracing::debug!(%error, "cannot store when keys were last used");
                }
            }
        });
    }
}
