//! How many bytes of requests this process holds at once, and how they are shared between tenants.
//!
//! The rule is that of dynamic thresholds in packet switches (Choudhury and Hahne, 1998): a tenant may hold as much as a
//! fixed multiple of what is free. Alone it reaches its share and no more; n tenants that all want more hold the same as soon
//! as their older requests have ended, and leave about as much free for one who was not there. Nobody waits: what does not fit
//! is refused.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Cheap to clone; all clones are one budget.
#[derive(Debug, Clone)]
pub(super) struct Budget(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    bytes_max: usize,
    /// How many times what is free a tenant may hold.
    threshold: f64,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    bytes: usize,
    /// Only tenants that hold something.
    by_tenant: HashMap<String, usize>,
}

/// There is no room for this tenant now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Full;

/// Bytes that one request holds, until it is dropped.
#[derive(Debug)]
pub(super) struct Permit {
    shared: Arc<Shared>,
    tenant: String,
    bytes: usize,
}

impl Budget {
    /// `tenant_share_max`: what one tenant alone may hold of `bytes_max`, in (0, 1).
    pub(super) fn new(bytes_max: usize, tenant_share_max: f64) -> Self {
        Self(Arc::new(Shared {
            bytes_max,
            threshold: tenant_share_max / (1.0 - tenant_share_max),
            held: Mutex::default(),
        }))
    }

    pub(super) fn reserve(&self, tenant: &str, bytes: usize) -> Result<Permit, Full> {
        let mut permit = Permit {
            shared: self.0.clone(),
            tenant: tenant.to_owned(),
            bytes: 0,
        };
        permit.grow(bytes)?;
        Ok(permit)
    }

    #[cfg(any(test, feature = "fuzz"))]
    pub(super) fn held(&self) -> usize {
        self.0.held.lock().unwrap_or_else(PoisonError::into_inner).bytes
    }
}

impl Permit {
    /// Holds this much more; on refusal what it held before.
    pub(super) fn grow(&mut self, bytes: usize) -> Result<(), Full> {
        let mut held = self.shared.held.lock().unwrap_or_else(PoisonError::into_inner);
        let total = held.bytes.checked_add(bytes).ok_or(Full)?;
        let free = self.shared.bytes_max.checked_sub(total).ok_or(Full)?;
        let own = held.by_tenant.get(&self.tenant).copied().unwrap_or(0) + bytes;
        if own as f64 > self.shared.threshold * free as f64 {
            return Err(Full);
        }
        held.bytes = total;
        held.by_tenant.insert(self.tenant.clone(), own);
        self.bytes += bytes;
        metrics::gauge!("springtide_ingest_in_flight_bytes").set(total as f64);
        Ok(())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut held = self.shared.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.bytes -= self.bytes;
        if let Some(own) = held.by_tenant.get_mut(&self.tenant) {
            *own -= self.bytes;
            if *own == 0 {
                held.by_tenant.remove(&self.tenant);
            }
        }
        metrics::gauge!("springtide_ingest_in_flight_bytes").set(held.bytes as f64);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use proptest::prelude::*;

    /// Takes as many permits of `bytes` as there are.
    fn fill(budget: &Budget, tenant: &str, bytes: usize) -> Vec<Permit> {
        std::iter::from_fn(|| budget.reserve(tenant, bytes).ok()).collect()
    }

    fn bytes(permits: &[Permit]) -> usize {
        permits.iter().map(|permit| permit.bytes).sum()
    }

    #[test]
    fn one_tenant_alone_takes_its_share_and_no_more() {
        for (share, expected) in [(0.5, 500), (0.8, 800), (0.25, 250)] {
            let budget = Budget::new(1_000, share);
            assert_eq!(bytes(&fill(&budget, "greedy", 1)), expected);
        }
    }

    const REQUEST: usize = 100;

    /// Tenants with so many requests each in every round, in an order that is drawn anew; while they come the 60 oldest open
    /// ones end, one after the other. There is room for 1000. Returns what is open, and how many of each tenant's requests
    /// were refused in the last 1000 rounds.
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
                match budget.reserve(tenant, REQUEST) {
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
    fn fifty_tenants_within_their_share_are_never_refused_beside_one_that_asks_a_thousand_times_as_much() {
        let budget = Budget::new(1_000 * REQUEST, 0.5);
        let (_open, refused) = simulate(&budget, &busy_and_others(1));
        assert_eq!(refused.keys().collect::<Vec<_>>(), ["busy"]);
        assert!(refused["busy"] > 900_000, "{refused:?}");
    }

    #[test]
    fn tenants_that_all_want_more_hold_the_same_and_leave_room_for_a_newcomer() {
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

    #[test]
    fn what_ends_gives_everything_back() {
        let budget = Budget::new(1_000, 0.5);
        let mut permit = budget.reserve("a", 100).unwrap();
        permit.grow(300).unwrap();
        assert_eq!(permit.grow(200), Err(Full));
        assert_eq!(permit.bytes, 400, "a refusal takes nothing");
        assert!(budget.reserve("a", 101).is_err());
        drop(permit);
        assert!(budget.0.held.lock().unwrap().by_tenant.is_empty());
        assert!(budget.reserve("a", 500).is_ok());
    }

    proptest! {
        #[test]
        fn no_order_of_requests_breaks_the_bound_or_loses_a_byte(
            steps in prop::collection::vec((0_usize..6, 0_usize..2_000, any::<bool>()), 0..200),
            share in 0.05_f64..0.95,
        ) {
            let budget = Budget::new(10_000, share);
            let mut open: Vec<Permit> = Vec::new();
            for (tenant, bytes, ends) in steps {
                if ends && !open.is_empty() {
                    open.swap_remove(bytes % open.len());
                } else {
                    open.extend(budget.reserve(&format!("tenant-{tenant}"), bytes));
                }
                let held = budget.0.held.lock().unwrap();
                prop_assert!(held.bytes <= 10_000);
                prop_assert_eq!(held.bytes, open.iter().map(|permit| permit.bytes).sum::<usize>());
                prop_assert_eq!(held.bytes, held.by_tenant.values().sum::<usize>());
            }
        }
    }
}
