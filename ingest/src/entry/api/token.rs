//! Checks feedback tokens: the signature of the sampler that answered.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use edge::problem::Problem;
use edge::sampler;
use sqlx::PgPool;
use time::OffsetDateTime;

use super::answer::invalid;
use crate::event::Invalid;
use crate::feedback_token::FeedbackToken;

/// How long a lookup counts. A revoked sampler's tokens may be accepted for this much longer.
const CACHED_FOR: Duration = Duration::from_secs(5);
const CACHED_MAX: usize = 1_000;

struct Lookup {
    at: Instant,
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
        let key = match self.cached(&token.sampler) {
            Some(key) => key,
            None => {
                let key = sampler::valid_key(&self.pool, &token.sampler).await.map_err(|error| {
                    tracing::warn!(error = format!("{error:#}"), "cannot look up a sampler");
                    Problem::unavailable("feedback tokens cannot be checked right now", 2)
                })?;
                self.store(&token.sampler, key.clone());
                key
            }
        };
        let key = key.ok_or_else(|| invalid(&Invalid::new("token", "names a sampler that is unknown or revoked")))?;
        let verified = token.verify(tenant, &key, OffsetDateTime::now_utc());
        verified.map_err(|error| invalid(&error))
    }

    fn cached(&self, sampler: &str) -> Option<Option<Vec<u8>>> {
        let keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        let lookup = keys.get(sampler)?;
        (lookup.at.elapsed() < CACHED_FOR).then(|| lookup.key.clone())
    }

    /// Invented samplers never push out known ones.
    fn store(&self, sampler: &str, key: Option<Vec<u8>>) {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if keys.len() >= CACHED_MAX {
            keys.retain(|_, lookup| lookup.key.is_some() && lookup.at.elapsed() < CACHED_FOR);
        }
        if keys.len() < CACHED_MAX {
            let at = Instant::now();
            keys.insert(sampler.to_owned(), Lookup { at, key });
        }
    }
}
