//! Limits the bytes of requests that a role holds at once, and shares them between tenants, and the
//! bytes of a tenant between its keys.
//!
//! The rule is that of dynamic thresholds in packet switches (Choudhury and Hahne, 1998): a tenant
//! may hold a fixed multiple of the bytes that are free. A single tenant reaches its share and no
//! more. If n tenants all want more, they hold equal amounts once their older requests end, and
//! leave about as much free for a newcomer. Requests never wait: what does not fit is refused.
//!
//! A key may hold [`KEY_THRESHOLD`] times what its tenant may still take. So a key that is alone takes
//! eight ninths of an even tenant's share, and its flood leaves room for the tenant's other keys. A
//! key's only request is bound by its tenant's share alone, so that the largest one fits.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uuid::Uuid;

const KEY_THRESHOLD: f64 = 4.0;

/// Cheap to clone. All clones share one budget.
#[derive(Debug, Clone)]
pub(super) struct Budget(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    bytes_max: usize,
    /// A tenant may hold this many times the free bytes.
    threshold: f64,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    bytes: usize,
    /// Tenants that hold nothing are absent.
    by_tenant: HashMap<String, usize>,
    /// Keys that hold nothing are absent.
    by_key: HashMap<Uuid, usize>,
}

/// The tenant has no room now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Full;

/// The bytes that one request holds until it is dropped.
#[derive(Debug)]
pub(super) struct Permit {
    shared: Arc<Shared>,
    tenant: String,
    key: Option<Uuid>,
    bytes: usize,
}

impl Budget {
    /// `tenant_share_max`: the fraction of `bytes_max` that a single tenant may hold, in (0, 1).
    pub(super) fn new(bytes_max: usize, tenant_share_max: f64) -> Self {
        Self(Arc::new(Shared {
            bytes_max,
            threshold: tenant_share_max / (1.0 - tenant_share_max),
            held: Mutex::default(),
        }))
    }

    /// `key`: `None` where callers have none.
    pub(super) fn reserve(&self, tenant: &str, key: Option<Uuid>, bytes: usize) -> Result<Permit, Full> {
        let (shared, tenant) = (self.0.clone(), tenant.to_owned());
        let mut permit = Permit {
            shared,
            tenant,
            key,
            bytes: 0,
        };
        permit.grow(bytes).map(|()| permit)
    }

    pub(super) fn held_bytes(&self) -> usize {
        self.0.held().bytes
    }
}

impl Shared {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Permit {
    /// Whether so many more could be reserved if nobody else held any.
    pub(super) fn ever_fits(&self, bytes: usize) -> bool {
        let all = self.bytes.saturating_add(bytes);
        let free = self.shared.bytes_max.saturating_sub(all);
        self.shared.threshold * free as f64 >= all as f64
    }

    /// Reserves more bytes. If refused, the permit is unchanged.
    pub(super) fn grow(&mut self, bytes: usize) -> Result<(), Full> {
        let mut held = self.shared.held();
        let total = held.bytes.checked_add(bytes).ok_or(Full)?;
        let free = self.shared.bytes_max.checked_sub(total).ok_or(Full)?;
        let own = held.by_tenant.get(&self.tenant).copied().unwrap_or(0) + bytes;
        let left = self.shared.threshold * free as f64 - own as f64;
        if left < 0.0 {
            return Err(Full);
        }
        if let Some(key) = self.key {
            let before = held.by_key.get(&key).copied().unwrap_or(0);
            let (is_only_request, own) = (before == self.bytes, before + bytes);
            if !is_only_request && own as f64 > KEY_THRESHOLD * left {
                return Err(Full);
            }
            held.by_key.insert(key, own);
        }
        held.bytes = total;
        held.by_tenant.insert(self.tenant.clone(), own);
        self.bytes += bytes;
        metrics::gauge!("springtide_http_in_flight_bytes").set(total as f64);
        Ok(())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut held = self.shared.held();
        held.bytes -= self.bytes;
        if let Some(own) = held.by_tenant.get_mut(&self.tenant) {
            *own -= self.bytes;
            if *own == 0 {
                held.by_tenant.remove(&self.tenant);
            }
        }
        if let Some(key) = self.key
            && let Some(own) = held.by_key.get_mut(&key)
        {
            *own -= self.bytes;
            if *own == 0 {
                held.by_key.remove(&key);
            }
        }
        metrics::gauge!("springtide_http_in_flight_bytes").set(held.bytes as f64);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use proptest::prelude::*;

    /// Takes permits of `bytes` until one is refused.
    fn fill(budget: &Budget, tenant: &str, bytes: usize) -> Vec<Permit> {
        fill_by(budget, tenant, None, bytes)
    }

    fn fill_by(budget: &Budget, tenant: &str, key: Option<Uuid>, bytes: usize) -> Vec<Permit> {
        std::iter::from_fn(|| budget.reserve(tenant, key, bytes).ok()).collect()
    }

    fn bytes(permits: &[Permit]) -> usize {
        permits.iter().map(|permit| permit.bytes).sum()
    }

    #[test]
    fn a_single_tenant_takes_its_share_and_no_more() {
        for (share, expected) in [(0.5, 500), (0.8, 800), (0.25, 250)] {
            let budget = Budget::new(1_000, share);
            assert_eq!(bytes(&fill(&budget, "greedy", 1)), expected);
        }
    }

    const REQUEST: usize = 100;

    /// In every round each tenant sends its number of requests, in a random order, while the 60
    /// oldest open requests end one by one. There is room for 1000. Returns the open requests, and
    /// the refused requests by tenant in the last 1000 rounds.
    fn simulate(budget: &Budget, tenants: &[(String, usize)]) -> (VecDeque<Permit>, HashMap<String, u32>) {
        let requests = tenants.iter();
        let mut requests: Vec<&str> = requests
            .flat_map(|(tenant, count)| std::iter::repeat_n(&**tenant, *count))
            .collect();
        let mut open = VecDeque::new();
        let mut refused = HashMap::new();
        let mut draw = 1_u64;
        for round in 0..2_000 {
            for last in (1..requests.len()).rev() {
                // Knuth's MMIX generator; the upper bits are the random ones.
                draw = draw
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                requests.swap(last, (draw >> 33) as usize % (last + 1));
            }
            for (index, tenant) in requests.iter().enumerate() {
                if index % (requests.len() / 60) == 0 {
                    open.pop_front();
                }
                match budget.reserve(tenant, None, REQUEST) {
                    Ok(permit) => open.push_back(permit),
                    Err(Full) if round >= 1_000 => *refused.entry((*tenant).to_owned()).or_default() += 1,
                    Err(Full) => {}
                }
            }
        }
        (open, refused)
    }

    /// A busy tenant, and fifty others with `requests` each.
    fn busy_and_others(requests: usize) -> Vec<(String, usize)> {
        let others = (0..50).map(|index| (format!("tenant-{index}"), requests));
        [("busy".to_owned(), 1_000)].into_iter().chain(others).collect()
    }

    #[test]
    fn fifty_modest_tenants_are_never_refused_beside_one_that_sends_a_thousand_times_as_much() {
        let budget = Budget::new(1_000 * REQUEST, 0.5);
        let (_open, refused) = simulate(&budget, &busy_and_others(1));
        assert_eq!(refused.keys().collect::<Vec<_>>(), ["busy"]);
        assert!(refused["busy"] > 900_000, "{refused:?}");
    }

    #[test]
    fn tenants_that_all_want_more_hold_equal_amounts_and_leave_room_for_a_newcomer() {
        let budget = Budget::new(1_000 * REQUEST, 0.5);
        let tenants = busy_and_others(10);
        let (open, _) = simulate(&budget, &tenants);
        let holds = |tenant: &str| open.iter().filter(|permit| permit.tenant == tenant).count();
        let held: Vec<_> = tenants.iter().map(|(tenant, _)| holds(tenant)).collect();
        let (least, most) = (held.iter().min().unwrap(), held.iter().max().unwrap());
        assert!(*least >= 10 && *most <= 30, "1000 among 52: {held:?}");
        let newcomer = fill(&budget, "newcomer", REQUEST);
        assert!(newcomer.len() >= 5, "{}", newcomer.len());
    }

    fn key(number: u128) -> Option<Uuid> {
        Some(Uuid::from_u128(number))
    }

    #[test]
    fn one_keys_flood_leaves_room_for_the_tenants_other_keys() {
        let budget = Budget::new(9_000, 0.5);
        let flood = fill_by(&budget, "a", key(1), 10);
        assert_eq!(bytes(&flood), 4_000, "of the tenant's 4500");
        let honest = fill_by(&budget, "a", key(2), 10);
        assert!(bytes(&honest) >= 400, "{}", bytes(&honest));
        drop(flood);
        let more = fill_by(&budget, "a", key(2), 10);
        assert_eq!(bytes(&honest) + bytes(&more), 4_000, "once it is alone");
    }

    #[test]
    fn a_flood_of_large_requests_leaves_room_for_another_keys_small_ones() {
        let budget = Budget::new(64 << 20, 0.5);
        // slow bodies that have declared their length
        let flood = fill_by(&budget, "a", key(1), 8 << 20);
        assert_eq!(flood.len(), 3);
        let honest = fill_by(&budget, "a", key(2), 4 << 10);
        assert!(honest.len() > 100, "{}", honest.len());
    }

    #[test]
    fn a_dropped_permit_returns_all_its_bytes() {
        let budget = Budget::new(1_000, 0.5);
        let mut permit = budget.reserve("a", key(1), 100).unwrap();
        permit.grow(300).unwrap();
        assert_eq!(permit.grow(200), Err(Full));
        assert_eq!(permit.bytes, 400, "a refusal reserves nothing");
        assert!(budget.reserve("a", key(1), 101).is_err());
        drop(permit);
        assert!(budget.0.held().by_tenant.is_empty() && budget.0.held().by_key.is_empty());
        assert!(
            budget.reserve("a", key(1), 500).is_ok(),
            "a key's only request has its tenant's share"
        );
    }

    proptest! {
        #[test]
        fn no_order_of_requests_exceeds_the_bound_or_loses_a_byte(
            steps in prop::collection::vec((0_usize..6, 0_u128..12, 0_usize..2_000, any::<bool>()), 0..200),
            share in 0.05_f64..0.95,
        ) {
            let budget = Budget::new(10_000, share);
            let mut open: Vec<Permit> = Vec::new();
            for (tenant, key_number, bytes, ends) in steps {
                if ends && !open.is_empty() {
                    open.swap_remove(bytes % open.len());
                } else {
                    let key = Some(key_number).filter(|number| *number > 0).and_then(key);
                    open.extend(budget.reserve(&format!("tenant-{tenant}"), key, bytes));
                }
                let held = budget.0.held.lock().unwrap();
                prop_assert!(held.bytes <= 10_000);
                prop_assert_eq!(held.bytes, open.iter().map(|permit| permit.bytes).sum::<usize>());
                prop_assert_eq!(held.bytes, held.by_tenant.values().sum::<usize>());
                let with_key = open.iter().filter(|permit| permit.key.is_some());
                prop_assert_eq!(
                    with_key.map(|permit| permit.bytes).sum::<usize>(),
                    held.by_key.values().sum::<usize>()
                );
            }
        }
    }
}
