//! Checks feedback tokens: the signature of a registered sampler.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use edge::problem::Problem;
use edge::sampler;
use event_log::event::Invalid;
use event_log::feedback_token::FeedbackToken;
use sqlx::PgPool;
use time::OffsetDateTime;

use super::answer::invalid;

/// How long a lookup counts. A revoked sampler's tokens may be accepted for this much longer.
const CACHED_FOR: Duration = Duration::from_secs(2);
/// How long the key of a valid sampler counts while the database does not answer.
const CUT_OFF_MAX: Duration = Duration::from_secs(30);
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(2);
/// After a lookup that failed.
const RETRY_AFTER: Duration = Duration::from_secs(1);
const CACHED_MAX: usize = 1_000;

struct Lookup {
    at: Instant,
    /// When to look again.
    again_at: Instant,
    /// `None`: unknown or not valid.
    key: Option<Vec<u8>>,
}

/// The public keys of samplers.
pub(super) struct Tokens {
    pool: PgPool,
    /// By sampler.
    keys: Mutex<HashMap<String, Lookup>>,
}

impl Tokens {
    pub(super) fn new(pool: PgPool) -> Self {
        Self {
            pool,
            keys: Mutex::default(),
        }
    }

    /// Fails unless a valid sampler issued the token for the tenant.
    pub(super) async fn verify(&self, token: &FeedbackToken, tenant: &str) -> Result<(), Problem> {
        let key = self.key(&token.sampler).await?;
        let key = key.ok_or_else(|| invalid(&Invalid::new("token", "names a sampler that is unknown or revoked")))?;
        let verified = token.verify(tenant, &key, OffsetDateTime::now_utc());
        verified.map_err(|error| invalid(&error))
    }

    /// The sampler's public key, if it is valid.
    async fn key(&self, sampler: &str) -> Result<Option<Vec<u8>>, Problem> {
        if let Some(key) = self.cached(sampler) {
            return Ok(key);
        }
        let found = tokio::time::timeout(LOOKUP_TIMEOUT, sampler::valid_key(&self.pool, sampler)).await;
        match found.unwrap_or_else(|_| Err(anyhow!("no answer within {LOOKUP_TIMEOUT:?}"))) {
            Ok(key) => {
                self.store(sampler, key.clone());
                Ok(key)
            }
            Err(error) => {
                tracing::warn!(error = format!("{error:#}"), "cannot look up a sampler");
                let last = self.last_known(sampler).map(Some);
                last.ok_or_else(|| Problem::unavailable("feedback tokens cannot be checked right now", 2))
            }
        }
    }

    fn keys(&self) -> MutexGuard<'_, HashMap<String, Lookup>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cached(&self, sampler: &str) -> Option<Option<Vec<u8>>> {
        let keys = self.keys();
        let lookup = keys.get(sampler)?;
        (Instant::now() < lookup.again_at).then(|| lookup.key.clone())
    }

    /// The key of a sampler that was valid shortly before the database stopped answering.
    fn last_known(&self, sampler: &str) -> Option<Vec<u8>> {
        let mut keys = self.keys();
        let lookup = keys.get_mut(sampler)?;
        let known = lookup.key.clone().filter(|_| lookup.at.elapsed() < CUT_OFF_MAX)?;
        lookup.again_at = Instant::now() + RETRY_AFTER;
        Some(known)
    }

    /// Invented samplers never push out known ones.
    fn store(&self, sampler: &str, key: Option<Vec<u8>>) {
        let mut keys = self.keys();
        if keys.len() >= CACHED_MAX {
            keys.retain(|_, lookup| lookup.key.is_some() && lookup.at.elapsed() < CUT_OFF_MAX);
        }
        if keys.len() < CACHED_MAX {
            let at = Instant::now();
            let again_at = at + CACHED_FOR;
            keys.insert(sampler.to_owned(), Lookup { at, again_at, key });
        }
    }
}
