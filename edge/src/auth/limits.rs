//! Limits what one key, and all keys of one tenant, may ask of this process: requests per second,
//! and requests at a time.
//!
//! A bucket holds some seconds' worth of requests and fills at the key's rate. All that is stored of
//! it is the time at which it is full again (the generic cell rate algorithm, ITU-T I.371), so a key
//! that has been quiet needs no entry. Only valid keys get one, which bounds their number.

use std::collections::HashMap;
use std::hash::Hash;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::ensure;
use uuid::Uuid;

use super::Principal;
use crate::problem::Problem;

/// A bucket's time has a resolution of a nanosecond.
pub const REQUESTS_PER_SECOND_MAX: u32 = 1_000_000_000;
/// Fewer entries than this are not worth looking through for full buckets.
const ENTRIES_MIN: usize = 1024;
/// How often the log says that a key or a tenant is at its limit.
const TELL_EVERY: Duration = Duration::from_secs(60);

crate::options! {
    /// `[auth.limits]` of the configuration file: what each process takes of the callers that have keys.
    /// What exceeds it gets 429.
    #[derive(Copy, Eq)]
    pub struct LimitOptions {
        /// Requests per second of a key that has no limit of its own (`springtide key limit`); 0: no
        /// limit. A batch of events is one request.
        pub key_requests_per_second: u32 = 1000 => 0..=REQUESTS_PER_SECOND_MAX,
        /// Requests of one key that may be open at a time, from their header to the end of the
        /// answer; 0: no limit.
        pub key_open_requests_max: u32 = 512,
        /// Requests per second of all keys of a tenant together; 0: no limit.
        pub tenant_requests_per_second: u32 = 0 => 0..=REQUESTS_PER_SECOND_MAX,
        /// After a pause, the requests of this many seconds may come at once.
        pub burst_seconds: u32 = 5 => 1..=3600,
    }
}

impl LimitOptions {
    /// All callers together, for roles whose callers share one key; 0: no limit.
    pub(super) fn of_all_callers(requests_per_second: u32) -> Self {
        Self {
            key_requests_per_second: 0,
            key_open_requests_max: 0,
            tenant_requests_per_second: requests_per_second,
            ..Self::default()
        }
    }

    /// Refuses values that are out of range or contradict each other.
    pub fn check(&self) -> anyhow::Result<()> {
        let (key, tenant) = (self.key_requests_per_second, self.tenant_requests_per_second);
        self.check_ranges("auth.limits")?;
        ensure!(
            tenant == 0 || tenant >= key,
            "auth.limits.tenant_requests_per_second is {tenant}, and a single key may use {key}: give the tenant at least \
             as much"
        );
        Ok(())
    }
}

/// Counts what callers use. All clones of the [`Arc`] share the counts.
#[derive(Debug)]
pub(super) struct Limits {
    options: LimitOptions,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    keys: Entries<Uuid>,
    tenants: Entries<String>,
}

/// Those of `K` that have used something lately.
#[derive(Debug)]
struct Entries<K> {
    of: HashMap<K, Entry>,
    /// At this length, entries that say nothing are removed.
    sweep_at: usize,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    /// When the bucket is full again.
    full_at: Instant,
    open: u32,
    /// When the log last named it.
    told_at: Option<Instant>,
}

/// Time that one request takes out of a bucket, and time to fill an empty one.
#[derive(Debug, Clone, Copy)]
struct Rate {
    per_second: u32,
    each: Duration,
    depth: Duration,
}

/// Why a request is not taken now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refusal {
    KeyRate { per_second: u32, wait: Duration },
    TenantRate { per_second: u32, wait: Duration },
    KeyOpen { max: u32 },
}

/// An open request of a key. Dropping it ends the request.
#[derive(Debug)]
pub(super) struct Open {
    limits: Arc<Limits>,
    key: Uuid,
}

impl Limits {
    pub(super) fn new(options: LimitOptions) -> Arc<Self> {
        Arc::new(Self {
            options,
            used: Mutex::default(),
        })
    }

    /// Takes a request, or says why not. The request is open until the guard is dropped; without a
    /// guard, open requests are not limited.
    pub(super) fn admit(self: &Arc<Self>, principal: &Principal) -> Result<Option<Open>, Problem> {
        let now = Instant::now();
        let key = principal.key.map(|key| (key.id, principal.requests_per_second));
        self.take(key, &principal.tenant, now).map_err(|refusal| {
            self.tell(refusal, key.map(|(key, _)| key), &principal.tenant, now);
            refusal.problem()
        })?;
        let open = key.filter(|_| self.options.key_open_requests_max > 0);
        Ok(open.map(|(key, _)| Open {
            limits: self.clone(),
            key,
        }))
    }

    /// All limits, or none, are charged. `key`: with the limit of its own.
    fn take(&self, key: Option<(Uuid, Option<NonZeroU32>)>, tenant: &str, now: Instant) -> Result<(), Refusal> {
        let LimitOptions {
            key_requests_per_second,
            key_open_requests_max,
            tenant_requests_per_second,
            burst_seconds,
        } = self.options;
        let mut used = self.lock();
        let Used { keys, tenants } = &mut *used;
        let mut of_key = None;
        if let Some((key, own)) = key {
            let rate = Rate::new(own.map_or(key_requests_per_second, NonZeroU32::get), burst_seconds);
            let entry = keys.of.get(&key).copied().unwrap_or(Entry::unused(now));
            if key_open_requests_max > 0 && entry.open >= key_open_requests_max {
                return Err(Refusal::KeyOpen {
                    max: key_open_requests_max,
                });
            }
            let full_at = match rate {
                None => now,
                Some(rate) => rate.take(entry.full_at, now).map_err(|wait| Refusal::KeyRate {
                    per_second: rate.per_second,
                    wait,
                })?,
            };
            let open = entry.open + u32::from(key_open_requests_max > 0);
            of_key = Some((key, Entry { full_at, open, ..entry }));
        }
        if let Some(rate) = Rate::new(tenant_requests_per_second, burst_seconds) {
            let entry = tenants.of.get(tenant).copied().unwrap_or(Entry::unused(now));
            let full_at = rate.take(entry.full_at, now).map_err(|wait| Refusal::TenantRate {
                per_second: rate.per_second,
                wait,
            })?;
            tenants.set(tenant, Entry { full_at, ..entry }, now);
        }
        if let Some((key, entry)) = of_key {
            keys.set(&key, entry, now);
        }
        Ok(())
    }

    /// Counts a refusal, and logs it once in a while.
    fn tell(&self, refusal: Refusal, key: Option<Uuid>, tenant: &str, now: Instant) {
        let limit = refusal.limit();
        metrics::counter!("springtide_requests_limited_total", "limit" => limit).increment(1);
        let mut used = self.lock();
        let Used { keys, tenants } = &mut *used;
        let entry = match (refusal, key) {
            (Refusal::TenantRate { .. }, _) => tenants.of.get_mut(tenant),
            (_, Some(key)) => keys.of.get_mut(&key),
            (_, None) => None,
        };
        let Some(entry) = entry else { return };
        if entry
            .told_at
            .is_some_and(|at| now.saturating_duration_since(at) < TELL_EVERY)
        {
            return;
        }
        entry.told_at = Some(now);
        drop(used);
        let key = key.map(tracing::field::display);
        tracing::warn!(
            key,
            tenant,
            limit,
            "a caller is at its limit; its further requests get 429"
        );
    }

    fn lock(&self) -> MutexGuard<'_, Used> {
        // every statement leaves the counts consistent
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(entry) = self.limits.lock().keys.of.get_mut(&self.key) {
            entry.open = entry.open.saturating_sub(1);
        }
    }
}

impl<K> Default for Entries<K> {
    fn default() -> Self {
        Self {
            of: HashMap::new(),
            sweep_at: ENTRIES_MIN,
        }
    }
}

impl<K: Hash + Eq> Entries<K> {
    fn set<Q>(&mut self, key: &Q, entry: Entry, now: Instant)
    where
        Q: ?Sized + Hash + Eq + ToOwned<Owned = K>,
        K: std::borrow::Borrow<Q>,
    {
        if let Some(known) = self.of.get_mut(key) {
            *known = entry;
            return;
        }
        if self.of.len() >= self.sweep_at {
            self.of.retain(|_, entry| entry.open > 0 || entry.full_at > now);
            self.sweep_at = ENTRIES_MIN.max(2 * self.of.len());
        }
        self.of.insert(key.to_owned(), entry);
    }
}

impl Entry {
    /// The same as no entry.
    fn unused(now: Instant) -> Self {
        Self {
            full_at: now,
            open: 0,
            told_at: None,
        }
    }
}

impl Rate {
    /// `None`: no limit.
    fn new(per_second: u32, burst_seconds: u32) -> Option<Self> {
        let each = Duration::from_secs(1).checked_div(per_second)?;
        Some(Self {
            per_second,
            each,
            depth: Duration::from_secs(burst_seconds.into()),
        })
    }

    /// When the bucket is full again if a request is taken now, or how long to wait.
    fn take(self, full_at: Instant, now: Instant) -> Result<Instant, Duration> {
        let full_at = full_at.max(now) + self.each;
        let missing = full_at - now;
        match missing.checked_sub(self.depth).filter(|wait| !wait.is_zero()) {
            None => Ok(full_at),
            Some(wait) => Err(wait),
        }
    }
}

impl Refusal {
    /// The label of the metric, and of the problem document.
    fn limit(self) -> &'static str {
        match self {
            Self::KeyRate { .. } => "key_rate",
            Self::TenantRate { .. } => "tenant_rate",
            Self::KeyOpen { .. } => "key_open_requests",
        }
    }

    fn problem(self) -> Problem {
        let problem = match self {
            Self::KeyRate { per_second, wait } => Problem::too_many(
                format_args!(
                    "this key may send {per_second} requests per second here; send fewer, or have its limit raised \
                     (`springtide key limit`)"
                ),
                whole_seconds(wait),
            ),
            Self::TenantRate { per_second, wait } => Problem::too_many(
                format_args!(
                    "the callers of this tenant may send {per_second} requests per second together; send fewer"
                ),
                whole_seconds(wait),
            ),
            Self::KeyOpen { max } => Problem::too_many(
                format_args!("{max} requests of this key are open already; wait for their answers"),
                1,
            ),
        };
        problem.with("limit", self.limit())
    }
}

/// At least one, because `Retry-After: 0` asks for a loop.
fn whole_seconds(wait: Duration) -> u32 {
    u32::try_from(wait.as_millis().div_ceil(1000))
        .unwrap_or(u32::MAX)
        .max(1)
}

#[cfg(test)]
mod tests;
